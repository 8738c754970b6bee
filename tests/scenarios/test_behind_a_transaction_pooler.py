"""The fault: PgBouncer in transaction mode.

Every verb works through PgBouncer in transaction mode, without prepared statements or
the state of a session.
"""

from __future__ import annotations

import asyncio
import contextlib

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg_pool import AsyncConnectionPool

from lenso_jobs import AsyncJobs, Configuration
from lenso_jobs.operator import OperatorError, check, configure, setup

CLIENTS, TIMES = 4, 10
DEADLINE = 30
ITEM = {"queue": "slow", "kind": "send", "payload": {}}


def claimed(worker, queue, count):
    """Claim so many: what is there may be in another's hands for a moment."""
    leases = []
    for _ in range(1000):
        leases += yield worker.claim(queue, count - len(leases))
        if len(leases) == count:
            return leases
    raise AssertionError("the jobs are gone")


def every_verb(producer, worker, key):
    """Each call in turn, to be made; what it answered is sent back."""
    job = yield producer.enqueue("email", "send", {}, idempotency_key=f"{key}.one")
    items = yield producer.enqueue_many(
        [ITEM | {"idempotency_key": f"{key}.{n}"} for n in range(2)]
    )
    assert job.created
    assert [item.outcome for item in items] == ["created"] * 2
    (one,) = yield from claimed(worker, "email", 1)
    two, three = yield from claimed(worker, "slow", 2)
    yield worker.renew(one)
    renewed = yield worker.renew_many([two, three])
    # busy: a claim of the others has the row in its hands, and will let go of it.
    assert {item.outcome for item in renewed} <= {"renewed", "busy"}
    assert (yield worker.complete(one)) is True
    completed = yield worker.complete_many([two])
    assert [item.outcome for item in completed] == ["completed"]
    assert (yield worker.fail(three, "down", retryable=False)).status == "failed"
    failed = yield worker.fail_many([(three, "down", False)])
    assert [item.outcome for item in failed] == ["failed"]
    assert (yield producer.inspect(one.job_id)).status == "succeeded"
    yield worker.next_available_at("email")


STATE = {
    "prepared": "select array_agg(statement) from pg_prepared_statements",
    "listening": "select array_agg(c) from pg_listening_channels() as c",
    "locks": "select array_agg(mode) from pg_locks"
    " where pid = pg_backend_pid() and locktype = 'advisory'",
    "temporary": "select array_agg(relname) from pg_class where relpersistence = 't'",
    "cursors": "select array_agg(name) from pg_cursors",
    "role": "select current_setting('role')",
    "settings": "select jsonb_object_agg(name, setting) from pg_settings"
    " where source = 'session'",
}


@pytest.fixture
def sessions(pooler):
    """The state of each of the pooler's two sessions for a role."""

    def sessions(*roles):
        found = {}
        for role in roles:
            with contextlib.ExitStack() as stack:
                for _ in range(2):  # both at once, since each is in a transaction
                    connection = stack.enter_context(
                        psycopg.connect(
                            make_conninfo(user=role, **pooler), prepare_threshold=None
                        )
                    )
                    (pid,) = connection.execute("select pg_backend_pid()").fetchone()
                    for name, question in STATE.items():
                        (answer,) = connection.execute(question).fetchone()
                        found[pid, name] = answer
        assert len(found) == 2 * len(roles) * len(STATE)
        return found

    return sessions


@pytest.mark.slow
@pytest.mark.usefixtures("read_committed")
def test_every_verb_works_and_leaves_nothing_in_a_session(
    sessions, pooler, conninfo, owner
):
    superuser = owner.info.user
    before = sessions(superuser)
    url = make_conninfo(user=superuser, **pooler)
    options = {"autocommit": True, "prepare_threshold": None}

    async def work(producer, worker, n):
        for m in range(TIMES):
            calls = every_verb(producer, worker, f"{n}.{m}")
            answer = None
            with contextlib.suppress(StopIteration):
                while True:
                    answer = await calls.send(answer)

    async def main():
        async with (
            asyncio.timeout(DEADLINE),
            AsyncConnectionPool(
                url, min_size=CLIENTS, max_size=CLIENTS, open=False, kwargs=options
            ) as pool,
            asyncio.TaskGroup() as tasks,
        ):
            for n in range(CLIENTS):
                tasks.create_task(
                    work(
                        AsyncJobs(pool, "jobs_email", caller="accounts"),
                        AsyncJobs(pool, "jobs_email", caller="email-worker"),
                        n,
                    )
                )

    asyncio.run(main())

    assert sessions(superuser) == before
    assert owner.value("select count(*) from attempt") == CLIENTS * TIMES * 3


@pytest.mark.slow
@pytest.mark.usefixtures("read_committed")
@pytest.mark.parametrize("way", ["sql", "sync", "async"])
def test_every_verb_works_from_four_clients_at_once(
    way, client, pooler, sessions, background, owner
):
    roles = ("accounts", "email-worker")
    before = sessions(*roles)
    options = {"connecting": {"prepare_threshold": None}, **pooler}

    def work(producer, worker, n):
        for m in range(TIMES):
            calls = every_verb(producer, worker, f"{n}.{m}")
            with contextlib.suppress(StopIteration):
                answer = None
                while True:
                    answer = calls.send(answer)

    calls = [
        background(work, *(client(role, **options) for role in roles), n)
        for n in range(CLIENTS)
    ]
    for call in calls:
        call.result(timeout=DEADLINE)

    assert sessions(*roles) == before
    assert owner.value("select count(*) from attempt") == CLIENTS * TIMES * 3


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_wait_looks_and_leaves_nothing_in_a_session(
    way, client, pooler, sessions, background, until, producer, owner
):
    before = sessions("email-worker")
    worker = client("email-worker", connecting={"prepare_threshold": None}, **pooler)

    assert worker.claim("email", wait=0.05) == []
    start = owner.value("select clock_timestamp()")
    call = background(worker.claim, "email", wait=DEADLINE)
    until(
        lambda: owner.value(
            "select count(*) from pg_stat_activity where usename = 'email-worker'"
            " and datname = current_database() and query like '%%next_available_at%%'"
            " and query_start > %s",
            start,
        )
    )
    held = owner.rows(
        "select mode from pg_locks where locktype = 'advisory' and database ="
        " (select oid from pg_database where datname = current_database())"
    )
    producer.execute("select enqueue('email', 'send', '{}', 'k')")
    (lease,) = call.result(timeout=DEADLINE)

    assert held == []
    assert worker.wait("email", 0) is False
    assert worker.complete(lease)
    assert sessions("email-worker") == before


def test_an_operator_behind_a_pooler_is_refused_with_the_remedy(
    pooler, conninfo, document
):
    configuration = Configuration.from_json(document())
    url = make_conninfo(conninfo, **pooler)

    for act in (setup, configure, check):
        with pytest.raises(OperatorError, match="through a pooler"):
            act(configuration, url)

    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as session:
        assert session.execute("show lock_timeout").fetchone() == ("0",)
