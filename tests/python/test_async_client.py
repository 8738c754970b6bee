from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import time
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import NamedTuple
from uuid import UUID

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from lenso_jobs import (
    AsyncJobs,
    Failure,
    InvalidArgument,
    InvalidJob,
    InvalidQueue,
    JobsError,
    LeasedJob,
    NewJob,
    SchemaNotReady,
    SecretNotFound,
    Unauthorized,
    _async_client,
    _waiting,
    prepare,
    prepare_async,
)

DEADLINE = 20.0
FOR_EVER = 60.0
ENQUEUED = ("email", "send", {"to": "ada"})


def in_a_loop(test):
    """Run a test in a new event loop, and not for ever."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(asyncio.wait_for(test(**fixtures), 2 * DEADLINE))

    return run


async def until(condition):
    """Wait until something is so."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - the server's state, mostly
            await asyncio.sleep(0.002)


# What a client stands on.


class Stand(NamedTuple):
    pool: bool = False
    autocommit: bool = False
    block: bool = False
    acting: bool = False

    @property
    def joins(self):
        """Whether its calls join a transaction that somebody else ends."""
        return not self.pool and (self.block or not self.autocommit)


STANDS = {
    "connection in autocommit": Stand(autocommit=True),
    "connection without autocommit": Stand(),
    "transaction block": Stand(autocommit=True, block=True),
    "connection in autocommit with a caller": Stand(autocommit=True, acting=True),
    "connection without autocommit with a caller": Stand(acting=True),
    "transaction block with a caller": Stand(autocommit=True, block=True, acting=True),
    "pool": Stand(pool=True),
    "pool in autocommit": Stand(pool=True, autocommit=True),
    "pool with a caller": Stand(pool=True, acting=True),
    "pool in autocommit with a caller": Stand(pool=True, autocommit=True, acting=True),
}


# What differs from another by one thing alone.
LIKE_ANOTHER = {
    "connection without autocommit with a caller",
    "transaction block with a caller",
    "pool in autocommit",
    "pool with a caller",
}


def stands(condition):
    return pytest.mark.parametrize(
        "stand",
        [
            pytest.param(
                stand, id=name, marks=pytest.mark.slow if name in LIKE_ANOTHER else ()
            )
            for name, stand in STANDS.items()
            if condition(stand)
        ],
    )


every_stand = stands(lambda _: True)
every_joining_stand = stands(lambda stand: stand.joins)
every_free_stand = stands(lambda stand: not stand.joins)
every_listening_stand = stands(
    lambda stand: stand.autocommit != stand.pool and not stand.block
)


@pytest.fixture
def standing(conninfo, replica):
    """Lend a client of a role; what its calls joined is committed at the end."""

    @contextlib.asynccontextmanager
    async def standing(stand, name="email-worker", size=1):
        url = make_conninfo(conninfo, user=replica if stand.acting else name)
        caller = name if stand.acting else None
        if stand.pool:
            async with AsyncConnectionPool(
                url,
                min_size=1,
                max_size=size,
                open=False,
                kwargs={"autocommit": stand.autocommit},
            ) as pool:
                yield AsyncJobs(pool, "jobs_email", caller)
            return
        connection = await psycopg.AsyncConnection.connect(
            url, autocommit=stand.autocommit
        )
        async with connection:
            if stand.block:
                async with connection.transaction():
                    yield AsyncJobs(connection, "jobs_email", caller)
            else:
                yield AsyncJobs(connection, "jobs_email", caller)

    return standing


@contextlib.asynccontextmanager
async def connection_of(jobs):
    if isinstance(jobs._source, psycopg.AsyncConnection):
        yield jobs._source
    else:
        async with jobs._source.connection() as connection:
            yield connection


def savepoint(stand, jobs):
    """What an application puts around a call that may go wrong in its transaction."""
    return jobs._source.transaction() if stand.joins else contextlib.nullcontext()


async def value(connection, statement):
    (answer,) = await (await connection.execute(statement)).fetchone()
    return answer


async def role_in_force(connection):
    return await value(connection, "select current_setting('role')")


# Every verb returns the same as in the client that blocks.


class Lost(NamedTuple):
    """A lease that never was."""

    job_id: UUID = UUID("01900000-0000-7000-8000-000000000000")
    lease_token: str = "job_lease_no"


LOST = Lost()
MANY = (
    NewJob(*ENQUEUED, "again"),
    {
        "queue": "email",
        "kind": "send",
        "payload": {"list": [1, 2.5, None]},
        "idempotency_key": "mapping",
        "available_at": datetime(2040, 1, 1, tzinfo=UTC),
        "max_attempts": 9,
    },
    NewJob("email", "other", {}, "again"),
    NewJob("undeclared", "send", {}, "many.1"),
    NewJob("email", "send", {"n": math.nan}, "many.2"),
)
PRODUCING = {
    "enqueue": lambda jobs: jobs.enqueue(*ENQUEUED, idempotency_key="again"),
    "enqueue again": lambda jobs: jobs.enqueue(*ENQUEUED, idempotency_key="again"),
    "enqueue by position and by name": lambda jobs: jobs.enqueue(
        queue="email",
        kind="send",
        payload={"ž": ["\\u0000", 2**70, 0.5]},
        idempotency_key="all",
        available_at=datetime(2040, 2, 3, 4, 5, 6, 789012, tzinfo=UTC),
        max_attempts=100,
    ),
    "enqueue another intent": lambda jobs: jobs.enqueue(
        "email", "other", {}, idempotency_key="again"
    ),
    "enqueue to no queue": lambda jobs: jobs.enqueue(
        "undeclared", "send", {}, idempotency_key="k"
    ),
    "enqueue at no time": lambda jobs: jobs.enqueue(
        *ENQUEUED,
        idempotency_key="k",
        available_at=datetime(2040, 1, 1),  # noqa: DTZ001 - what is refused
    ),
    "enqueue no number": lambda jobs: jobs.enqueue(
        "email", "send", {"n": math.inf}, idempotency_key="k"
    ),
    "enqueue no key": lambda jobs: jobs.enqueue(*ENQUEUED, idempotency_key=None),
    "enqueue_many": lambda jobs: jobs.enqueue_many(iter(MANY)),
    "enqueue_many of none": lambda jobs: jobs.enqueue_many([]),
    "enqueue_many of NULL": lambda jobs: jobs.enqueue_many(None),
    "claim by a producer": lambda jobs: jobs.claim("slow"),
    "claim many by a producer": lambda jobs: jobs.claim("slow", 2),
    "wait by a producer": lambda jobs: jobs.wait("slow", 9),
    "inspect nothing": lambda jobs: jobs.inspect(LOST.job_id),
    "inspect no id": lambda jobs: jobs.inspect("x"),
}
# The jobs of the queue "slow" are there beforehand; ``leases`` are of the first claims.
WORKING = {
    "next_available_at": lambda jobs, _: jobs.next_available_at("slow"),
    "next_available_at of nothing": lambda jobs, _: jobs.next_available_at("email"),
    "next_available_at of no queue": lambda jobs, _: jobs.next_available_at("none"),
    "wait for what is due": lambda jobs, _: jobs.wait("slow", 9),
    "claim": lambda jobs, _: jobs.claim("slow"),
    "claim many": lambda jobs, _: jobs.claim(queue="slow", limit=3, wait=9),
    "claim the rest": lambda jobs, _: jobs.claim("slow", 1000),
    "claim nothing": lambda jobs, _: jobs.claim("slow"),
    "claim for a moment": lambda jobs, _: jobs.claim("slow", wait=0.001),
    "wait for a moment": lambda jobs, _: jobs.wait("slow", 0.001),
    "claim of no queue": lambda jobs, _: jobs.claim("none"),
    "claim of NULL": lambda jobs, _: jobs.claim(None),
    "claim none": lambda jobs, _: jobs.claim("slow", 0),
    "claim too many": lambda jobs, _: jobs.claim("slow", 1001),
    "claim truly": lambda jobs, _: jobs.claim("slow", limit=True),
    "claim for no time": lambda jobs, _: jobs.claim("slow", wait=-1),
    "wait for no time": lambda jobs, _: jobs.wait("slow", math.nan),
    "wait for no queue": lambda jobs, _: jobs.wait("none", 9),
    "wait for a NUL": lambda jobs, _: jobs.wait("\0", 9),
    "inspect": lambda jobs, leases: jobs.inspect(leases[0].job_id),
    "inspect by text": lambda jobs, leases: jobs.inspect(str(leases[1].job_id)),
    "renew": lambda jobs, leases: jobs.renew(leases[0]),
    "renew no lease": lambda jobs, _: jobs.renew(LOST),
    "renew NULL": lambda jobs, _: jobs.renew(None),
    "renew_many": lambda jobs, leases: jobs.renew_many(iter([LOST, leases[1], None])),
    "renew_many of none": lambda jobs, _: jobs.renew_many([]),
    "complete": lambda jobs, leases: jobs.complete(leases[0]),
    "complete again": lambda jobs, leases: jobs.complete(leases[0]),
    "complete no lease": lambda jobs, _: jobs.complete(LOST),
    "complete_many": lambda jobs, leases: jobs.complete_many(
        [LOST, leases[1], leases[0]]
    ),
    "complete_many of NULL": lambda jobs, _: jobs.complete_many(None),
    "fail": lambda jobs, leases: jobs.fail(leases[2], "smtp.timeout", retryable=True),
    "fail again": lambda jobs, leases: jobs.fail(
        leases[2], "smtp.timeout", retryable=True
    ),
    "fail for good": lambda jobs, leases: jobs.fail(
        lease=leases[3], failure_code="address.unknown", retryable=False
    ),
    "fail no lease": lambda jobs, _: jobs.fail(LOST, "x", retryable=True),
    "fail no code": lambda jobs, leases: jobs.fail(leases[4], "a b", retryable=True),
    "fail perhaps": lambda jobs, leases: jobs.fail(leases[4], "x", retryable=1),
    "fail_many": lambda jobs, leases: jobs.fail_many(
        [
            Failure(leases[4], "smtp.timeout", retryable=True),
            (leases[5], "address.unknown", False),
            Failure(LOST, "x", retryable=False),
            (leases[4], "not a code", True),
        ]
    ),
    "fail_many of none": lambda jobs, _: jobs.fail_many(()),
    "enqueue by a worker": lambda jobs, _: jobs.enqueue(
        *ENQUEUED, idempotency_key="no"
    ),
    "enqueue_many by a worker": lambda jobs, _: jobs.enqueue_many([MANY[0]]),
}


LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
# An operator's; ``job`` has failed, another runs, and a third has lost its last lease.
OPERATING = {
    "inspect_attempts": lambda jobs, job: jobs.inspect_attempts(job),
    "inspect_attempts of nothing": lambda jobs, _: jobs.inspect_attempts(LOST.job_id),
    "inspect_queues": lambda jobs, _: jobs.inspect_queues(),
    "inspect_workers": lambda jobs, _: jobs.inspect_workers(),
    "inspect_failures": lambda jobs, _: jobs.inspect_failures(
        "email", since=LONG_AGO, limit=9, failure_code="smtp.timeout"
    ),
    "inspect_failures before": lambda jobs, _: jobs.inspect_failures(before=LONG_AGO),
    "inspect_failures of no queue": lambda jobs, _: jobs.inspect_failures("none"),
    "inspect_health": lambda jobs, _: jobs.inspect_health(),
    "explain_job": lambda jobs, job: jobs.explain_job(str(job)),
    "explain_job of no id": lambda jobs, _: jobs.explain_job("x"),
    "redrive": lambda jobs, job: jobs.redrive(job, extra_attempts=3),
    "redrive again": lambda jobs, job: jobs.redrive(job),
    "redrive_failed": lambda jobs, _: jobs.redrive_failed(
        "email", since=LONG_AGO, before=None, failure_code=None, limit=7
    ),
    "redrive_failed since ever": lambda jobs, _: jobs.redrive_failed(
        "email", since=None
    ),
    "retire_expired": lambda jobs, _: jobs.retire_expired(limit=9),
    "pause": lambda jobs, _: jobs.pause("slow"),
    "resume": lambda jobs, _: jobs.resume("slow"),
    "resume of no queue": lambda jobs, _: jobs.resume("none"),
    "inspect_key": lambda jobs, _: jobs.inspect_key("none", "accounts"),
    "inspect_jobs": lambda jobs, _: jobs.inspect_jobs("email", "queued", limit=1),
    "erase": lambda jobs, job: jobs.erase(job),
    "enforce_retention": lambda jobs, _: jobs.enforce_retention(),
    "purge": lambda jobs, _: jobs.purge(LONG_AGO, limit=9),
    "purge at no time": lambda jobs, _: jobs.purge(datetime(2020, 1, 1)),  # noqa: DTZ001
    "inspect_acts": lambda jobs, _: jobs.inspect_acts(limit=9),
    "inspect_acts of none": lambda jobs, _: jobs.inspect_acts(0),
}


class Transcript(dict):
    """What was answered by the names of calls: ids by number, times as such."""

    def __init__(self):
        super().__init__()
        self.leases = []
        self._ids = {LOST.job_id: "no job"}

    def script(self):
        """Each call in turn: the role, the name, and the function that calls a client."""
        for name, call in WORKING.items():
            yield "email-worker", name, lambda jobs, call=call: call(jobs, self.leases)
        for name, call in PRODUCING.items():
            yield "accounts", name, call

    def note(self, name, answer):
        self[name] = self._masked(answer)
        if isinstance(answer, list):
            self.leases += [item for item in answer if isinstance(item, LeasedJob)]

    def _masked(self, answer):
        if isinstance(answer, list):
            return [self._masked(item) for item in answer]
        if isinstance(answer, LeasedJob) or dataclasses.is_dataclass(answer):
            return type(answer), self._fields(answer)
        if isinstance(answer, UUID):
            return self._ids.setdefault(answer, f"job {len(self._ids)}")
        if isinstance(answer, datetime | timedelta | float):
            assert getattr(answer, "tzinfo", UTC) is UTC
            return f"a {type(answer).__name__}"
        if isinstance(answer, JobsError):
            return type(answer), str(answer), answer.hint, type(answer.__cause__)
        return answer

    def _fields(self, answer):
        if not isinstance(answer, LeasedJob):
            names = [field.name for field in dataclasses.fields(answer)]
            return {name: self._masked(getattr(answer, name)) for name in names}
        assert answer.lease_token.startswith("job_lease_")
        return {
            name: self._masked(getattr(answer, name))
            for name, member in vars(LeasedJob).items()
            if isinstance(member, property) and name != "lease_token"
        }


@pytest.fixture
def evidence(owner):
    """What was stored, in order, without ids and times."""

    def evidence():
        return (
            owner.rows(
                "select producer, queue, kind, idempotency_key, payload, max_attempts,"
                " available_at > created_at from job order by queue, job_id"
            ),
            owner.rows(
                "select queue, attempt, max_attempts, lease_owner, last_failure_code,"
                " available_at > clock_timestamp() from live_job order by queue, job_id"
            ),
            owner.rows(
                "select attempt, worker, outcome, failure_code, retryable"
                " from attempt order by job_id"
            ),
        )

    return evidence


@pytest.fixture
def fresh(owner, enqueue):
    """Empty the Instance but for six jobs to work on."""

    def fresh():
        owner.execute("truncate job, live_job, attempt")
        for n in range(6):
            enqueue("slow", payload={"n": n}, key=f"slow.{n}")

    return fresh


@pytest.fixture
def expected(fresh, producing, working, evidence):
    """What the client that blocks returns on a connection, and what it stored."""
    fresh()
    transcript = Transcript()
    for name, verb, call in transcript.script():
        try:
            answer = call(producing if name == "accounts" else working)
        except JobsError as error:
            answer = error
        transcript.note(verb, answer)
    return transcript, evidence()


@pytest.fixture
def played(standing, fresh, evidence):
    """The same by the client for asyncio, on a stand."""

    async def played(stand, **habits):
        fresh()
        transcript = Transcript()
        async with (
            standing(stand, "email-worker") as worker,
            standing(stand, "accounts") as producer,
        ):
            for attribute, setting in habits.items():
                setattr(worker._source, attribute, setting)
                setattr(producer._source, attribute, setting)
            for name, verb, call in transcript.script():
                jobs = producer if name == "accounts" else worker
                try:
                    async with savepoint(stand, jobs):
                        answer = await call(jobs)
                except JobsError as error:
                    answer = error
                transcript.note(verb, answer)
        return transcript, evidence()

    return played


@pytest.mark.sampled
@every_stand
@in_a_loop
async def test_every_verb_returns_and_stores_the_same_in_both_clients(
    stand, played, expected
):
    assert await played(stand) == expected


@pytest.mark.slow
@in_a_loop
async def test_an_operator_gets_the_same_results_from_both_clients(
    fail, enqueue, working, expire, operating, standing, prefix
):
    (job,) = fail()
    lapsed = enqueue(max_attempts=1)
    enqueue()
    working.claim("email", 2)
    expire(lapsed)
    expected, answered = Transcript(), Transcript()

    with operating._source.transaction(force_rollback=True):
        for name, call in OPERATING.items():
            try:
                with operating._source.transaction():
                    answer = call(operating, job)
            except JobsError as error:
                answer = error
            expected.note(name, answer)
    async with standing(Stand(autocommit=True), f"{prefix}_duty") as jobs:
        for name, call in OPERATING.items():
            try:
                answer = await call(jobs, job)
            except JobsError as error:
                answer = error
            answered.note(name, answer)

    # The numbers of acts that were rolled back are not given again.
    for transcript in (expected, answered):
        transcript["inspect_acts"] = [
            (model, {**fields, "act_id": "a number"})
            for model, fields in transcript["inspect_acts"]
        ]
    assert answered == expected
    assert len(answered["inspect_acts"]) == 5  # an act that changed nothing has no row


HABITS = {
    "dictionaries for rows": {"row_factory": dict_row},
    "binding on the client": {"cursor_factory": psycopg.AsyncClientCursor},
    "PostgreSQL's placeholders": {"cursor_factory": psycopg.AsyncRawCursor},
    "prepared at once": {"prepare_threshold": 0},
    "never prepared": {"prepare_threshold": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("habit", HABITS)
@in_a_loop
async def test_the_settings_of_a_connection_change_no_result(habit, played, expected):
    stand = Stand(autocommit=True, acting=True)

    assert await played(stand, **HABITS[habit]) == expected


@in_a_loop
async def test_the_encoding_may_change_between_two_calls(standing, owner):
    payload, leases = {"to": "Zoë"}, []
    encodings = ("UTF8", "LATIN1", "WIN1252", "UTF8")
    stand = Stand(autocommit=True)
    async with standing(stand) as worker, standing(stand, "accounts") as producer:
        for n, encoding in enumerate(encodings):
            await producer._source.execute(f"set client_encoding = '{encoding}'")
            await producer.enqueue("email", "send", payload, idempotency_key=f"k{n}")
        stored = owner.rows("select payload from job")
        for encoding in encodings:
            await worker._source.execute(f"set client_encoding = '{encoding}'")
            leases += await worker.claim("email")

    assert stored == [(payload,)] * 4
    assert [lease.payload for lease in leases] == [payload] * 4


# The transaction is the application's, and the role is put back.

VERBS = {
    "enqueue": (
        "accounts",
        lambda jobs, _: jobs.enqueue(*ENQUEUED, idempotency_key="k"),
    ),
    "enqueue_many": ("accounts", lambda jobs, _: jobs.enqueue_many([MANY[0]])),
    "claim": ("email-worker", lambda jobs, _: jobs.claim("slow")),
    "claim many": ("email-worker", lambda jobs, _: jobs.claim("slow", 2)),
    "claim, waiting": ("email-worker", lambda jobs, _: jobs.claim("slow", 2, wait=9)),
    "renew": ("email-worker", lambda jobs, lease: jobs.renew(lease)),
    "renew_many": ("email-worker", lambda jobs, lease: jobs.renew_many([lease])),
    "complete": ("email-worker", lambda jobs, lease: jobs.complete(lease)),
    "complete_many": ("email-worker", lambda jobs, lease: jobs.complete_many([lease])),
    "fail": ("email-worker", lambda jobs, lease: jobs.fail(lease, "x", retryable=True)),
    "fail_many": (
        "email-worker",
        lambda jobs, lease: jobs.fail_many([(lease, "x", True)]),
    ),
}


async def rolled_back(jobs, act, state):
    """Make a call in a new transaction, and return what others saw meanwhile."""
    connection = jobs._source
    if connection.autocommit:
        async with connection.transaction(force_rollback=True):
            await act(jobs)
            return state(), connection.info.transaction_status
    await act(jobs)
    meanwhile = state(), connection.info.transaction_status
    await connection.rollback()
    return meanwhile


@every_joining_stand
@in_a_loop
async def test_a_call_on_a_connection_is_invisible_to_others_and_undone_by_a_rollback(
    stand, standing, leased, enqueue, state
):
    enqueue("slow")
    before = state()
    open_stand = stand._replace(block=False)

    async with (
        standing(open_stand, "email-worker") as worker,
        standing(open_stand, "accounts") as producer,
    ):
        for verb, (name, act) in VERBS.items():
            jobs = producer if name == "accounts" else worker

            meanwhile, status = await rolled_back(
                jobs, lambda jobs, act=act: act(jobs, leased), state
            )

            assert status is TransactionStatus.INTRANS, verb
            assert meanwhile == state() == before, verb
            assert await role_in_force(jobs._source) == "none"
            if not stand.autocommit:
                await jobs._source.rollback()


@pytest.mark.sampled
@every_free_stand
@in_a_loop
async def test_a_call_outside_a_transaction_is_a_separate_transaction(
    stand, standing, enqueue, claim, state
):
    async with (
        standing(stand, "email-worker") as worker,
        standing(stand, "accounts") as producer,
    ):
        for verb, (name, act) in VERBS.items():
            enqueue()
            lease = Lost(*claim())
            enqueue("slow")
            before = state()
            jobs = producer if name == "accounts" else worker

            await act(jobs, lease)

            assert state() != before, verb
            async with connection_of(jobs) as connection:
                assert connection.info.transaction_status is TransactionStatus.IDLE
                assert await role_in_force(connection) == "none"


@pytest.mark.parametrize("before", ["none", "email-worker"])
@stands(lambda stand: stand.joins and stand.acting)
@in_a_loop
async def test_the_role_of_a_transaction_is_back_after_a_call_and_after_a_refusal(
    stand, before, standing
):
    async with standing(stand, "accounts") as jobs:
        connection = jobs._source
        await connection.execute(f'set local role "{before}"')

        assert (await jobs.enqueue(*ENQUEUED, idempotency_key="k")).created
        after_a_call = await role_in_force(connection)
        with pytest.raises(InvalidJob):
            async with connection.transaction():
                await jobs.enqueue("undeclared", "send", {}, idempotency_key="k.1")
        after_a_refusal = await role_in_force(connection)
        with pytest.raises(InvalidArgument):
            async with connection.transaction():
                await jobs.enqueue_many([])
        after_another = await role_in_force(connection)

        assert after_a_call == after_a_refusal == after_another == before
        assert (await jobs.enqueue_many([MANY[1]]))[0].outcome == "created"


@in_a_loop
async def test_a_role_of_the_session_is_back_after_a_call_and_after_the_commit(
    standing,
):
    async with standing(Stand(acting=True), "accounts") as jobs:
        connection = jobs._source
        await connection.execute('set role "email-worker"')
        await connection.commit()

        await jobs.enqueue(*ENQUEUED, idempotency_key="k")
        within = await role_in_force(connection)
        await connection.commit()

        assert within == await role_in_force(connection) == "email-worker"


@pytest.mark.parametrize("autocommit", [True, False])
@in_a_loop
async def test_a_caller_the_login_is_not_a_member_of_is_unauthorized(
    autocommit, conninfo
):
    connection = await psycopg.AsyncConnection.connect(
        make_conninfo(conninfo, user="organization"), autocommit=autocommit
    )
    async with connection:
        jobs = AsyncJobs(connection, "jobs_email", caller="accounts")

        with pytest.raises(Unauthorized):
            await jobs.enqueue(*ENQUEUED, idempotency_key="k")

        await connection.rollback()
        assert await role_in_force(connection) == "none"


@in_a_loop
async def test_a_pipeline_of_the_application_s_is_joined(standing, state):
    before = state()

    async with (
        standing(Stand(acting=True), "accounts") as jobs,
        jobs._source.pipeline(),
    ):
        job = await jobs.enqueue(*ENQUEUED, idempotency_key="k")
        await jobs._source.rollback()

    assert job.created
    assert state() == before


@pytest.mark.parametrize("pool", [True, False])
@in_a_loop
async def test_closing_the_client_leaves_the_source_open(pool, standing):
    async with standing(Stand(pool=pool), "accounts") as jobs:
        async with jobs:
            await jobs.enqueue(*ENQUEUED, idempotency_key="k")
        await jobs.close()

        assert not jobs._source.closed
        if not pool:
            info = jobs._source.info
            assert info.transaction_status is TransactionStatus.INTRANS
        await jobs.enqueue(*ENQUEUED, idempotency_key="k")


@in_a_loop
async def test_a_closed_connection_raises_psycopg_s_own_error(standing):
    async with standing(Stand()) as jobs:
        await jobs._source.close()
        with pytest.raises(psycopg.OperationalError):
            await jobs.claim("email")
        with pytest.raises(psycopg.OperationalError):
            await jobs.wait("email", FOR_EVER)


@in_a_loop
async def test_the_repr_shows_no_secret(standing):
    async with standing(Stand(acting=True), "accounts") as jobs:
        assert repr(jobs) == "<AsyncJobs as accounts>"


# Many tasks.


@pytest.mark.slow
@stands(lambda stand: not stand.pool)
@in_a_loop
async def test_tasks_on_one_connection_get_their_own_results(stand, standing, owner):
    async def task(n):
        made = {}
        for m in range(5):
            key = f"{n}.{m}"
            job = await jobs.enqueue(*ENQUEUED, idempotency_key=key)
            assert (await jobs.inspect(job.job_id)).job_id == job.job_id
            made[key] = job.job_id
            # A role is in force for the whole connection. Calls for many run at the same
            # time, and would put the role of one another away.
            if not stand.acting:
                (item,) = await jobs.enqueue_many([NewJob(*ENQUEUED, f"{key}.many")])
                made[f"{key}.many"] = item.job_id
        return made

    async with standing(stand, "accounts") as jobs:
        made = await asyncio.gather(*map(task, range(10)))

    answered = {key: job_id for each in made for key, job_id in each.items()}
    assert answered == dict(owner.rows("select idempotency_key, job_id from job"))
    assert len(answered) == (50 if stand.acting else 100)


@pytest.mark.slow
@stands(lambda stand: stand.pool)
@in_a_loop
async def test_many_tasks_share_a_pool_of_two(stand, standing, owner):
    async def task(n):
        made = {}
        for m in range(2):
            job = await producer.enqueue(*ENQUEUED, idempotency_key=f"{n}.{m}")
            (item,) = await producer.enqueue_many([NewJob("slow", "k", {}, f"{n}:{m}")])
            made |= {f"{n}.{m}": job.job_id, f"{n}:{m}": item.job_id}
        leases = [*await worker.claim("email"), *await worker.claim("slow", 3)]
        assert [i.outcome for i in await worker.complete_many(leases)] == (
            ["completed"] * len(leases)
        )
        return made, [lease.job_id for lease in leases]

    async with (
        standing(stand, "accounts", size=2) as producer,
        standing(stand, "email-worker", size=2) as worker,
    ):
        done = await asyncio.gather(*map(task, range(15)))
        stats = producer._source.get_stats()

    made = {key: job_id for each, _ in done for key, job_id in each.items()}
    claimed = [job_id for _, each in done for job_id in each]
    assert made == dict(owner.rows("select idempotency_key, job_id from job"))
    assert len(claimed) == len(set(claimed)) > 15
    assert stats["pool_size"] <= 2


# A call that is cancelled.


@pytest.fixture
def waiting_for_a_lock(owner):
    """Whether some session of the database waits for a lock."""

    def waiting_for_a_lock():
        return owner.value(
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
            " and datname = current_database()"
        )

    return waiting_for_a_lock


@every_stand
@in_a_loop
async def test_a_call_that_is_cancelled_leaves_all_as_it_was(
    stand, standing, producer, waiting_for_a_lock, owner
):
    calls = [
        lambda: jobs.enqueue(*ENQUEUED, idempotency_key="k"),
        lambda: jobs.enqueue_many([NewJob(*ENQUEUED, "k")]),
    ]

    async def within_a_savepoint(call):
        async with savepoint(stand, jobs):
            await call()

    async with standing(stand, "accounts") as jobs:
        for call in calls:
            producer.execute("begin")
            producer.execute("select enqueue('email', 'other', '{}', 'k')")
            task = asyncio.create_task(within_a_savepoint(call))
            await until(waiting_for_a_lock)

            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            assert not waiting_for_a_lock()
            producer.execute("rollback")
            async with connection_of(jobs) as connection:
                status = connection.info.transaction_status
                assert status is TransactionStatus["INTRANS" if stand.block else "IDLE"]
                assert await role_in_force(connection) == "none"
                if not stand.block:
                    await connection.rollback()
        assert (await calls[0]()).created
        assert [item.outcome for item in await calls[1]()] == ["existing"]

    assert owner.value("select count(*) from job") == 1


@in_a_loop
async def test_a_call_cancelled_in_the_queue_for_the_connection_leaves_the_first_alone(
    standing, producer, waiting_for_a_lock
):
    producer.execute("begin")
    producer.execute("select enqueue('email', 'other', '{}', 'k')")

    async with standing(Stand(autocommit=True), "accounts") as jobs:
        first = asyncio.create_task(jobs.enqueue(*ENQUEUED, idempotency_key="k"))
        await until(waiting_for_a_lock)
        one = asyncio.create_task(jobs.enqueue(*ENQUEUED, idempotency_key="one"))
        many = asyncio.create_task(jobs.enqueue_many([NewJob(*ENQUEUED, "many")]))
        await asyncio.sleep(0)
        for task in (one, many):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        producer.execute("rollback")

        assert (await first).created
        assert (await jobs.enqueue(*ENQUEUED, idempotency_key="one")).created
        (item,) = await jobs.enqueue_many([NewJob(*ENQUEUED, "many")])
        assert item.outcome == "created"


@in_a_loop
async def test_a_call_cancelled_in_the_queue_for_the_pool_takes_no_connection_with_it(
    standing,
):
    async with standing(Stand(pool=True, acting=True), "accounts") as jobs:
        async with jobs._source.connection():
            tasks = [
                asyncio.create_task(jobs.enqueue(*ENQUEUED, idempotency_key="k")),
                asyncio.create_task(jobs.wait("email", FOR_EVER)),
            ]
            await until(lambda: jobs._source.get_stats()["requests_waiting"] == 2)
            for task in tasks:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        assert (await jobs.enqueue(*ENQUEUED, idempotency_key="k")).created


@in_a_loop
async def test_a_pool_that_is_exhausted_is_psycopg_s_own_error(standing):
    async with standing(Stand(pool=True)) as jobs:
        jobs._source.timeout = 0.05
        async with jobs._source.connection():
            with pytest.raises(PoolTimeout):
                await jobs.claim("email")
            with pytest.raises(PoolTimeout):
                await jobs.claim("email", wait=FOR_EVER)

        assert await jobs.claim("email") == []


# Waiting.

LOOKS = {
    "claim": lambda jobs, seconds, queue="email": jobs.claim(queue, wait=seconds),
    "claim many": lambda jobs, seconds, queue="email": jobs.claim(
        queue, 2, wait=seconds
    ),
    "wait": lambda jobs, seconds, queue="email": jobs.wait(queue, seconds),
}


@pytest.fixture(params=LOOKS)
def look(request):
    """The calls that wait."""
    return LOOKS[request.param]


@pytest.fixture
def naps(monkeypatch, acts):
    """The lengths of all sleeps that waits meant to take."""
    naps = []
    sleep = _async_client.AsyncWaiter.sleep

    async def noted(waiter, seconds):
        naps.append(seconds)
        if acts:
            acts.popleft()()
        await sleep(waiter, seconds)

    monkeypatch.setattr(_async_client.AsyncWaiter, "sleep", noted)
    return naps


@pytest.fixture
def untouched(locks):
    """Insist that a session is idle and listens to nothing, and that nobody has a lock."""

    async def untouched(jobs, stand):
        async with connection_of(jobs) as connection:
            assert connection.info.transaction_status is TransactionStatus.IDLE
            assert connection.autocommit == stand.autocommit
            assert locks() == []
            listening = await connection.execute("select pg_listening_channels()")
            assert await listening.fetchall() == []
            assert await role_in_force(connection) == "none"

    return untouched


@pytest.mark.slow
@every_listening_stand
@in_a_loop
async def test_an_enqueue_ends_the_sleep_of_the_session_that_holds_the_queue_s_key(
    stand, standing, naps, acts, pausing, enqueue, locks, untouched
):
    before = []
    asked = pausing(FOR_EVER)
    async with standing(stand) as jobs:
        for look in LOOKS.values():
            naps.clear()
            # The session of enqueue is silent for 20 ms after each notification.
            await asyncio.sleep(0.03)
            acts.append(lambda: before.append(locks()) or enqueue())
            start = time.monotonic()

            found = await look(jobs, DEADLINE)

            assert found
            assert time.monotonic() - start < DEADLINE / 2
            assert len(naps) == 1
            await untouched(jobs, stand)
            await jobs.claim("email")

    assert asked == [10] * 3
    assert before == [[("ShareLock", True)]] * 3


@in_a_loop
async def test_a_pool_serves_other_tasks_while_one_waits(standing, naps, pausing):
    pausing(FOR_EVER)
    stand = Stand(pool=True)
    async with (
        standing(stand, size=2) as worker,
        standing(stand, "accounts") as producer,
    ):
        waits = [asyncio.create_task(worker.claim("email", wait=DEADLINE))]
        await until(lambda: naps)
        assert await worker.claim("email") == []

        waits.append(asyncio.create_task(worker.claim("slow", wait=DEADLINE)))
        await until(lambda: len(naps) == 2)
        jobs = [
            await producer.enqueue(queue, "send", {}, idempotency_key=queue)
            for queue in ("email", "slow")
        ]

        leases = [lease for each in waits for lease in await each]

    assert [lease.job_id for lease in leases] == [job.job_id for job in jobs]


@in_a_loop
async def test_one_job_goes_to_one_of_the_tasks_that_wait(
    standing, naps, pausing, producing, client, key
):
    another = client("organization")
    pausing(FOR_EVER)
    async with standing(Stand(pool=True), size=3) as worker:
        tasks = [
            asyncio.create_task(worker.claim("email", wait=DEADLINE)) for _ in range(3)
        ]
        await until(lambda: len(naps) == 3)

        made = {producing.enqueue(*ENQUEUED, idempotency_key=key).job_id}
        done, others = await asyncio.wait(
            tasks, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE
        )
        assert (len(done), len(others)) == (1, 2)
        # One notification, by a session that is not silent for 20 ms after another.
        with another._source.transaction():
            for n in range(2):
                job = another.enqueue(*ENQUEUED, idempotency_key=f"{key}.{n}")
                made.add(job.job_id)
        leases = [lease for (lease,) in await asyncio.gather(*tasks)]

    assert {lease.job_id for lease in leases} == made


@in_a_loop
async def test_an_enqueue_that_began_before_the_wait_is_found_soon_after_its_commit(
    standing, naps, acts, producer, enqueue
):
    producer.execute("begin")
    enqueue()
    acts.extend([lambda: None, lambda: None, lambda: producer.execute("commit")])

    async with standing(Stand(autocommit=True)) as jobs:
        assert await jobs.claim("email", wait=math.inf)

    assert naps == [0.02, 0.05, 0.1]


@pytest.mark.slow
@in_a_loop
async def test_notifications_for_others_do_not_end_the_sleep(
    standing, naps, acts, pausing, enqueue, owner
):
    def chatter():
        enqueue("slow")
        owner.execute("notify jobs_email, 'slow'")
        owner.execute("notify jobs_email, ''")
        owner.execute("notify other, 'email'")

    pausing(FOR_EVER)
    acts.append(chatter)
    async with standing(Stand(autocommit=True)) as jobs:
        await jobs._source.execute("listen other")
        start = time.monotonic()

        found = await jobs.wait("email", 0.3)

    assert found is False
    assert time.monotonic() - start >= 0.3
    assert len(naps) == 1


@in_a_loop
async def test_a_key_that_was_taken_is_asked_for_again_and_nothing_sent_is_missed(
    standing, naps, acts, pausing, stranger, worker, enqueue, locks
):
    key = worker.value("select wait_key('email')")
    stranger.execute("select pg_advisory_lock(%s)", (key,))
    later = []
    pausing(0.01)
    acts.append(lambda: stranger.execute("select pg_advisory_unlock(%s)", (key,)))
    acts.append(lambda: later.extend(locks()))

    async with standing(Stand(autocommit=True)) as jobs:
        assert await jobs.wait("email", 0.3) is False
        assert later == [("ShareLock", True)]

        # The notification arrives with the result of a query of the second wait. It is
        # in no socket any more when the wait begins to listen.
        stranger.execute("select pg_advisory_lock(%s)", (key,))
        pausing(FOR_EVER)
        naps.clear()
        acts.append(enqueue)
        start = time.monotonic()

        assert await jobs.wait("email", DEADLINE)

    assert time.monotonic() - start < DEADLINE / 2
    assert len(naps) == 1


@pytest.mark.slow
@pytest.mark.parametrize("due", ["scheduled", "retried", "leased"])
@in_a_loop
async def test_a_job_that_falls_due_by_itself_ends_the_sleep(
    due, standing, naps, acts, pausing, enqueue, claim, rival, owner, soon
):
    def fall_due():
        if due == "scheduled":
            enqueue(available_at=soon())
            return
        column = "lease_expires_at"
        if due == "retried":
            rival.execute("select fail(%s, %s, 'down', true)", lease)
            column = "available_at"
        owner.execute(f"update live_job set {column} = %s", (soon(),))
        owner.execute("notify jobs_email, 'email'")

    if due != "scheduled":
        enqueue()
        lease = claim(session=rival)
    pausing(FOR_EVER)
    acts.append(fall_due)
    async with standing(Stand(autocommit=True)) as jobs:
        start = time.monotonic()

        (lease,) = await jobs.claim("email", wait=DEADLINE)

    assert lease.attempt == (1 if due == "scheduled" else 2)
    assert time.monotonic() - start < DEADLINE / 2
    assert naps[0] > 10
    assert max(naps[1:], default=0) <= 0.3


@pytest.mark.slow
@in_a_loop
async def test_a_wait_for_nothing_ends_with_the_time_and_leaves_nothing_behind(
    standing, untouched
):
    stand = Stand(autocommit=True)
    async with standing(stand) as jobs:
        for look, nothing in (("claim", []), ("claim many", []), ("wait", False)):
            start = time.monotonic()

            found = await LOOKS[look](jobs, 0.1)

            assert 0.1 <= time.monotonic() - start < DEADLINE / 2
            assert (found, type(found)) == (nothing, type(nothing))
            await untouched(jobs, stand)


@stands(lambda stand: stand in (Stand(autocommit=True), Stand(pool=True)))
@in_a_loop
async def test_a_wait_that_is_refused_meanwhile_leaves_nothing_behind(
    stand, standing, naps, acts, pausing, configure, untouched
):
    pausing(0.01)
    acts.append(lambda: configure(queues=["email"]))
    async with standing(stand) as jobs:
        with pytest.raises(InvalidQueue):
            await jobs.claim("slow", wait=DEADLINE)

        await untouched(jobs, stand)
        assert await jobs.claim("email") == []


@every_listening_stand
@in_a_loop
async def test_a_wait_that_is_cancelled_in_its_sleep_leaves_nothing_behind(
    stand, standing, naps, pausing, locks, enqueue, untouched
):
    pausing(FOR_EVER)
    async with standing(stand) as jobs:
        for look in LOOKS.values():
            naps.clear()
            task = asyncio.create_task(look(jobs, DEADLINE))
            await until(lambda: naps and locks())

            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            await untouched(jobs, stand)
        naps.clear()

        async def wait_for_a_time():
            async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
                group.create_task(until(lambda: naps and locks())).add_done_callback(
                    lambda _: limit.reschedule(0)
                )
                await jobs.wait("email", DEADLINE)

        with pytest.raises(TimeoutError):
            await wait_for_a_time()
        await untouched(jobs, stand)
        job_id = enqueue()
        (lease,) = await jobs.claim("email", wait=DEADLINE)

    assert lease.job_id == job_id


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("words", [b"listen", b"unlisten"])
@stands(lambda stand: stand == Stand(pool=True, acting=True))
@in_a_loop
async def test_a_wait_that_is_cancelled_as_it_begins_or_ends_leaves_nothing_behind(
    stand, words, when, standing, untouched, monkeypatch
):
    ask = _async_client.AsyncWaiter._ask

    async def cancelled(waiter, statements):
        is_now = statements.startswith(words)
        if is_now and when == "before":
            task.cancel()
        answer = await ask(waiter, statements)
        if is_now and when == "after":
            task.cancel()
            await asyncio.sleep(0)
        return answer

    monkeypatch.setattr(_async_client.AsyncWaiter, "_ask", cancelled)
    async with standing(stand) as jobs:
        task = asyncio.create_task(jobs.claim("email", wait=0.02))
        with pytest.raises(asyncio.CancelledError):
            await task

        await untouched(jobs, stand)


@pytest.mark.parametrize("times", [1, 2])
@in_a_loop
async def test_the_end_of_a_wait_is_not_cancelled_half_way(
    times, standing, untouched, monkeypatch, owner
):
    words = _waiting.words

    def slow(*arguments, **options):
        return tuple(
            text.replace(b"unlisten", b"select pg_sleep(0.2); unlisten")
            for text in words(*arguments, **options)
        )

    def ending():
        return owner.value(
            "select count(*) from pg_stat_activity"
            " where wait_event = 'PgSleep' and query like '%unlisten%'"
            " and pid <> pg_backend_pid()"
        )

    monkeypatch.setattr(_waiting, "words", slow)
    stand = Stand(autocommit=True)
    async with standing(stand) as jobs:
        task = asyncio.create_task(jobs.claim("email", wait=0.02))
        await until(ending)

        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

        assert bool(ending()) == (times == 2)
        assert await jobs.claim("email") == []
        await untouched(jobs, stand)


@in_a_loop
async def test_the_application_s_own_channels_and_locks_stay(
    standing, naps, acts, pausing, enqueue, locks
):
    async with standing(Stand(autocommit=True)) as jobs:
        session = jobs._source
        await session.execute("listen jobs_email")
        await session.execute("listen other")
        await session.execute(
            "select pg_advisory_lock_shared(jobs_email.wait_key('email'))"
        )
        acts.append(enqueue)
        assert await jobs.claim("email", wait=DEADLINE)
        assert await jobs.claim("email", wait=0.01) == []

        channels = await session.execute(
            "select * from pg_listening_channels() order by 1"
        )
        assert await channels.fetchall() == [("jobs_email",), ("other",)]
        assert locks() == [("ShareLock", True)]


@in_a_loop
async def test_a_connection_that_is_lost_ends_the_wait_and_a_pool_replaces_it(
    standing, naps, acts, pausing, owner, enqueue, locks, untouched
):
    def terminate():
        owner.execute(
            "select pg_terminate_backend(pid, 20000) from pg_locks"
            " where locktype = 'advisory' and database ="
            " (select oid from pg_database where datname = current_database())"
        )

    pausing(FOR_EVER)
    stand = Stand(pool=True)
    async with standing(stand) as jobs:
        acts.append(terminate)
        start = time.monotonic()
        with pytest.raises(psycopg.OperationalError):
            await jobs.wait("email", DEADLINE)
        assert time.monotonic() - start < DEADLINE / 2
        assert locks() == []

        acts.append(enqueue)
        assert await jobs.claim("email", wait=DEADLINE)
        await untouched(jobs, stand)


@in_a_loop
async def test_only_a_worker_waits_and_only_for_a_queue(standing, naps, untouched):
    stand = Stand(autocommit=True)
    async with standing(stand, "accounts") as producer, standing(stand) as worker:
        for look in LOOKS.values():
            with pytest.raises(Unauthorized):
                await look(producer, DEADLINE)
            with pytest.raises(InvalidQueue):
                await look(worker, DEADLINE, "undeclared")
            await untouched(producer, stand)
            await untouched(worker, stand)

    assert naps == []


# Where it cannot listen, it polls.


@every_joining_stand
@in_a_loop
async def test_a_wait_in_a_transaction_looks_and_ends_no_transaction(
    stand, standing, naps, acts, pausing, enqueue, locks, state
):
    before = []
    asked = pausing(0.01)
    async with standing(stand) as jobs:
        acts.append(lambda: before.extend([locks(), enqueue(), state()]))
        # Where none is in progress, a call leaves the one it began.
        found = await jobs.claim("email", wait=DEADLINE)

        assert found
        assert (naps, asked, before[0]) == ([0.01], [1], [])
        assert jobs._source.info.transaction_status is TransactionStatus.INTRANS
        listening = await jobs._source.execute("select pg_listening_channels()")
        assert await listening.fetchall() == []
        assert state() == before[2]


@stands(lambda stand: stand.joins and stand.block == stand.acting)
@in_a_loop
async def test_a_wait_in_a_transaction_that_is_cancelled_leaves_it_open(
    stand, standing, naps, pausing, enqueue
):
    pausing(FOR_EVER)
    async with standing(stand) as jobs:
        task = asyncio.create_task(jobs.wait("email", DEADLINE))
        await until(lambda: naps)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert jobs._source.info.transaction_status is TransactionStatus.INTRANS
        enqueue()
        assert await jobs.claim("email")


@stands(lambda stand: stand in (Stand(autocommit=True), Stand(pool=True)))
@in_a_loop
async def test_a_wait_looks_where_nothing_is_sent(
    stand, standing, naps, acts, pausing, enqueue, locks, configure, untouched
):
    before = []
    configure(notify=False)
    asked = pausing(0.01)
    acts.append(lambda: before.extend([locks(), enqueue()]))
    async with standing(stand) as jobs:
        assert await jobs.claim("email", wait=DEADLINE)

        assert (naps, asked, before[0]) == ([0.01], [1], [])
        await untouched(jobs, stand)


@in_a_loop
async def test_a_wait_in_a_pipeline_looks(standing, naps, acts, enqueue, untouched):
    acts.append(enqueue)
    stand = Stand(autocommit=True)
    async with standing(stand) as jobs:
        async with jobs._source.pipeline():
            assert await jobs.claim("email", wait=DEADLINE)

        await untouched(jobs, stand)


# From a document.


@pytest.fixture
def secrets(conninfo):
    """A resolver that knows the URL of a role."""

    def secrets(user="accounts"):
        def resolve(reference):
            assert reference == "jobs/database-url"
            return make_conninfo(conninfo, user=user)

        return resolve

    return secrets


@in_a_loop
async def test_a_prepared_client_is_ready_and_each_call_is_committed(
    configuration, secrets, observing, role
):
    login = role(member_of=("accounts", "email-worker"))

    async with await prepare_async(configuration(), secrets()) as jobs:
        one = await jobs.enqueue(*ENQUEUED, idempotency_key="one")
    async with await prepare_async(
        configuration(), secrets(login), caller="email-worker"
    ) as worker:
        (lease,) = await worker.claim("email", wait=DEADLINE)
        assert await worker.complete(lease)

    job = observing.inspect(one.job_id)
    assert (job.producer, job.worker, job.status) == (
        *("accounts", "email-worker"),
        "succeeded",
    )
    assert jobs._source.closed
    assert worker._source.closed


@in_a_loop
async def test_an_instance_that_is_not_ready_is_refused_and_leaves_nothing_open(
    configuration, secrets, owner, tmp_path
):
    with pytest.raises(SchemaNotReady, match="jobs_missing holds no Instance"):
        await prepare_async(configuration(schema="jobs_missing"), secrets())
    with pytest.raises(SchemaNotReady, match="cannot act as accounts"):
        await prepare_async(configuration(), secrets("organization"), caller="accounts")
    owner.execute(
        "create or replace view installed_version (version, oldest_client) as values (99, 99)"
    )
    with pytest.raises(SchemaNotReady, match="newer than this release") as caught:
        await prepare_async(configuration(), secrets())
    with pytest.raises(SecretNotFound):
        await prepare_async(configuration(), lambda _: "no connection string")
    with pytest.raises(psycopg.OperationalError):
        await prepare_async(configuration(), lambda _: f"host={tmp_path} dbname=jobs")

    assert "Install the release" in caught.value.hint
    # A backend may outlive its connection by a moment.
    left = (
        "select from pg_stat_activity where datname = current_database()"
        " and usename in ('accounts', 'organization')"
    )
    await until(lambda: not owner.rows(left))


@in_a_loop
async def test_the_loop_goes_on_while_the_instance_is_verified(configuration, secrets):
    entered, released = Event(), Event()

    def resolve(reference):
        entered.set()
        assert released.wait(DEADLINE)
        return secrets()(reference)

    task = asyncio.create_task(prepare_async(configuration(), resolve))
    await until(entered.is_set)
    released.set()

    await (await task).close()


@pytest.mark.parametrize("threshold", [0, None])
def test_a_pool_takes_its_size_and_prepare_threshold_from_the_options(
    threshold, configuration, secrets
):
    statements = "select count(*) from pg_prepared_statements where statement like %s"
    options = {"max_size": 1, "prepare_threshold": threshold}
    expected = int(threshold == 0)

    async def prepared():
        async with await prepare_async(configuration(), secrets(), **options) as jobs:
            await jobs.enqueue(*ENQUEUED, idempotency_key="k")
            async with jobs._source.connection() as connection:
                row = await connection.execute(statements, ("%enqueue%",))
                return jobs._source.max_size, (await row.fetchone())[0]

    with prepare(configuration(), secrets(), **options) as jobs:
        jobs.enqueue(*ENQUEUED, idempotency_key="k")
        with jobs._source.connection() as connection:
            row = connection.execute(statements, ("%enqueue%",)).fetchone()
            assert (jobs._source.max_size, row[0]) == (1, expected)

    assert asyncio.run(prepared()) == (1, expected)
