"""Both workers, by one text: a handler of a ``Worker`` is a coroutine that never waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import time
from contextvars import ContextVar
from itertools import chain, repeat
from threading import Event, Lock, Thread, current_thread
from threading import enumerate as threads

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from lenso_jobs import (
    InvalidArgument,
    InvalidLease,
    InvalidQueue,
    Unauthorized,
    _waiting,
)
from lenso_jobs.worker import (
    AsyncHeldLease,
    AsyncWorker,
    Fail,
    HeldLease,
    Observer,
    PayloadUndecodable,
    Retry,
    Tally,
    Worker,
    _engine,
)

DEADLINE = 20.0


def wait_until(condition):
    """Block until it holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.004)


# One text for both workers.


def without_waiting(coroutine):
    """The answer of a coroutine that blocks where it would have to wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("it waits")


class Blocking:
    """A connection whose methods block when they are awaited."""

    def __init__(self, connection):
        self.connection = connection

    async def execute(self, *arguments):
        return self.connection.execute(*arguments)

    async def commit(self):
        self.connection.commit()

    async def rollback(self):
        self.connection.rollback()

    async def close(self):
        self.connection.close()


class Threads:
    """A ``Worker``, whose handlers are on threads."""

    worker = Worker
    lease = HeldLease
    pool = ConnectionPool

    def adapt(self, handler):
        return lambda lease: without_waiting(handler(lease))

    def run(self, worker):
        return worker.run()

    async def until(self, condition):
        wait_until(condition)

    async def connect(self, conninfo):
        return Blocking(psycopg.connect(conninfo))

    async def complete(self, lease, connection):
        lease.complete(connection.connection)


class Tasks:
    """An ``AsyncWorker``, whose handlers are tasks of a loop."""

    worker = AsyncWorker
    lease = AsyncHeldLease
    pool = AsyncConnectionPool

    def adapt(self, handler):
        return handler

    def run(self, worker):
        return asyncio.run(worker.run())

    async def until(self, condition):
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.004)

    async def connect(self, conninfo):
        return await psycopg.AsyncConnection.connect(conninfo)

    async def complete(self, lease, connection):
        await lease.complete(connection)


@pytest.fixture(params=[Threads, Tasks])
def crew(request):
    """How handlers are run."""
    return request.param()


# What concerns one of them, or what both have in common.
on_threads = pytest.mark.parametrize("crew", [Threads], indirect=True)
on_tasks = pytest.mark.parametrize("crew", [Tasks], indirect=True)


@pytest.fixture
def as_worker(conninfo):
    """The connection string of email-worker."""
    return make_conninfo(conninfo, user="email-worker")


@pytest.fixture
def hire(crew, as_worker, on_a_thread):
    """Begin to run a worker; it is stopped at the end of the test, whatever happened."""

    def hire(handler, source=as_worker, *, begins=True, **options):
        options = {"schema": "jobs_email", "queue": "email"} | options
        worker = crew.worker(source, handler=crew.adapt(handler), **options)
        hired = on_a_thread(crew, worker)
        if begins:
            hired.start()
        return hired

    return hire


@pytest.fixture
def staying(crew, gate):
    """A handler that stays until it is time; that it has begun; and that it is time."""
    begun, is_time = gate(), gate()

    async def handler(lease):
        begun.set()
        await crew.until(is_time.is_set)

    return handler, begun, is_time


@pytest.fixture
def ended(owner):
    """Wait until so many attempts have ended; answers them as (attempt, outcome, code)."""

    def ended(*job_ids, count=1):
        query = (
            "select attempt, outcome, failure_code from attempt"
            " where job_id = any (%s) order by job_id, attempt"
        )
        wait_until(lambda: len(owner.rows(query, list(job_ids))) >= count)
        return owner.rows(query, list(job_ids))

    return ended


@pytest.fixture
def drain(hire, owner):
    """Run the handler until nothing is due; answers the tally."""

    def drain(handler, **options):
        hired = hire(handler, **options)
        wait_until(
            lambda: (
                not owner.value(
                    "select count(*) from live_job where available_at <= clock_timestamp()"
                )
            )
        )
        return hired.stop()

    return drain


@pytest.fixture
def supersede(expire, claim, rival):
    """Let a lease run out and have spare-worker do the job.

    The worker that held it must have no free hand, or it may be the first.
    """

    def supersede(job_id):
        expire(job_id)
        lease = claim(session=rival)
        assert lease[0] == job_id
        assert rival.value("select complete(%s, %s)", *lease)

    return supersede


SUPERSEDED = [(1, "lease_expired", None), (2, "succeeded", None)]


class Watching(Observer):
    """Notes what it is told."""

    def __init__(self):
        self.claims = []
        self.losses = []
        self.ends = []
        self.spans = []
        self.states = []

    def claimed(self, queue, count):
        self.claims.append((queue, count))

    @contextlib.contextmanager
    def running(self, lease):
        self.spans.append(("enter", lease.job_id, current_thread().name))
        try:
            yield
        except BaseException as error:
            self.spans.append(("raised", lease.job_id, type(error).__name__))
            raise
        else:
            self.spans.append(("returned", lease.job_id, current_thread().name))

    def lost(self, lease):
        self.losses.append(lease.job_id)

    def ended(self, ended):
        self.ends.append(ended)

    def disconnected(self, error):
        self.states.append(("disconnected", type(error)))

    def reconnected(self, seconds):
        self.states.append(("reconnected", type(seconds)))


@pytest.fixture
def watching():
    return Watching()


async def nothing(lease):
    """Handle a job."""


# What a handler's end means.


def test_a_handler_that_returns_has_its_job_completed(crew, enqueue, drain, ended):
    job_id = enqueue(kind="send:mail", payload={"to": "a@b"})
    seen = []

    async def handler(lease):
        seen.append(lease)

    assert drain(handler) == Tally(succeeded=1)

    (lease,) = seen
    assert isinstance(lease, crew.lease)
    assert (lease.job_id, lease.queue, lease.kind) == (job_id, "email", "send:mail")
    assert lease.payload == {"to": "a@b"}
    assert lease.payload_json == b'{"to": "a@b"}'
    assert (lease.attempt, lease.max_attempts) == (1, 3)
    assert (lease.lease_expires_at - lease.created_at).total_seconds() > 29
    assert str(job_id) in repr(lease)
    assert "a@b" not in repr(lease)
    assert lease.lease_token not in repr(lease)
    assert ended(job_id) == [(1, "succeeded", None)]


class Unspeakable(Exception):
    """Whoever asks for its text gets another exception."""

    def __str__(self):
        raise RuntimeError("nobody can say it")

    __repr__ = __str__


Foreign = type("Ünïcode", (Exception,), {})
Long = type("Long" + "g" * 200, (Exception,), {})
HERE = re.sub(r"[^A-Za-z0-9._:/-]+", "_", __name__)


RAISED = [
    (Retry("smtp:421"), "retried", "smtp:421"),
    (Fail("bad-address"), "failed", "bad-address"),
    (ValueError("secret"), "retried", "ValueError"),
    (psycopg.OperationalError("x"), "retried", "psycopg.OperationalError"),
    (BaseExceptionGroup("x", [OSError()]), "retried", "ExceptionGroup"),
    (Unspeakable(), "retried", f"{HERE}.Unspeakable"),
    (Foreign(), "retried", f"{HERE}._n_code"),
    (Long(), "retried", f"{HERE}.{Long.__name__}"[-128:]),
    (InvalidLease("x"), "retried", "lenso_jobs.errors.InvalidLease"),
    (PayloadUndecodable("x"), "failed", "payload_undecodable"),
    (GeneratorExit(), "retried", "GeneratorExit"),
    (SystemExit(1), "retried", "SystemExit"),
    (KeyboardInterrupt(), "retried", "KeyboardInterrupt"),
]


def test_what_a_handler_raises_is_the_failure_of_its_job_alone(enqueue, drain, ended):
    jobs = [enqueue(kind=f"{n}") for n in range(len(RAISED))]
    good = enqueue(kind="good")

    async def handler(lease):
        if lease.kind != "good":
            raise RAISED[int(lease.kind)][0]

    tally = drain(handler, concurrency=1)

    assert [ended(job_id) for job_id in jobs] == [
        [(1, outcome, code)] for _, outcome, code in RAISED
    ]
    assert ended(good) == [(1, "succeeded", None)]
    assert tally == Tally(succeeded=1, retried=len(RAISED) - 2, failed=2)


@on_threads
def test_a_code_that_is_none_is_refused_where_it_is_raised(enqueue, drain, ended):
    job_id = enqueue()

    async def handler(lease):
        raise Retry("no code at all")

    drain(handler)

    assert ended(job_id) == [(1, "retried", "lenso_jobs.errors.InvalidFailure")]


@on_threads
def test_a_failure_of_the_last_attempt_is_counted_as_failed(enqueue, drain, ended):
    job_id = enqueue(max_attempts=1)

    async def handler(lease):
        raise Retry("down")

    assert drain(handler) == Tally(failed=1)
    assert ended(job_id) == [(1, "failed", "down")]


def test_a_retried_job_runs_again_once_it_is_due(enqueue, hire, ended, make_due, owner):
    job_id = enqueue()
    attempts = []

    async def handler(lease):
        attempts.append(lease.attempt)
        if lease.attempt == 1:
            raise Retry("down")

    hired = hire(handler)
    ended(job_id)
    make_due(job_id)
    owner.execute("select _wake('email')")

    assert ended(job_id, count=2) == [(1, "retried", "down"), (2, "succeeded", None)]
    assert attempts == [1, 2]
    assert hired.stop() == Tally(succeeded=1, retried=1)


def test_a_payload_that_python_cannot_represent_fails_its_job_alone(
    enqueue, drain, ended, owner
):
    first, bad, last = enqueue(), enqueue(), enqueue()
    # More digits than int() takes.
    owner.execute(
        "update job set payload = format('{\"n\": %%s}', repeat('9', 5000))::jsonb"
        " where job_id = %s",
        (bad,),
    )
    seen = []

    async def handler(lease):
        seen.append(lease.payload)

    tally = drain(handler, concurrency=3)

    assert ended(bad) == [(1, "failed", "payload_undecodable")]
    assert ended(first, last, count=2) == [(1, "succeeded", None)] * 2
    assert seen == [{}, {}]
    assert tally == Tally(succeeded=2, failed=1)


class Awaitable:
    def __await__(self):
        yield from ()


@on_threads
def test_a_function_that_answers_an_awaitable_has_not_done_its_job(
    on_a_thread, crew, enqueue, as_worker, ended
):
    job_id = enqueue()
    worker = Worker(
        as_worker, schema="jobs_email", queue="email", handler=lambda _: Awaitable()
    )
    hired = on_a_thread(crew, worker)
    hired.start()

    assert ended(job_id) == [(1, "retried", "TypeError")]
    assert hired.stop() == Tally(retried=1)


def test_a_worker_of_threads_refuses_a_coroutine_function(as_worker):
    with pytest.raises(InvalidArgument, match="handler"):
        Worker(as_worker, schema="jobs_email", queue="email", handler=nothing)


@on_tasks
def test_an_async_handler_may_be_anything_that_answers_an_awaitable(
    on_a_thread, crew, enqueue, as_worker, ended
):
    job_id = enqueue()
    worker = AsyncWorker(
        as_worker, schema="jobs_email", queue="email", handler=lambda _: Awaitable()
    )
    hired = on_a_thread(crew, worker)
    hired.start()

    assert ended(job_id) == [(1, "succeeded", None)]
    assert hired.stop() == Tally(succeeded=1)


@on_tasks
def test_a_cancellation_that_is_the_handlers_own_is_a_failure_as_any(
    crew, enqueue, drain, ended
):
    job_id = enqueue()

    async def handler(lease):
        task = asyncio.create_task(asyncio.sleep(DEADLINE))
        task.cancel()
        await task

    drain(handler)

    assert ended(job_id) == [(1, "retried", "asyncio.exceptions.CancelledError")]


# A handler that completes its job itself.


@pytest.fixture
def effects(owner):
    """What handlers wrote, as kinds of jobs."""
    owner.execute("create table public.effect (kind text)")
    owner.execute('grant insert on public.effect to "email-worker"')
    return lambda: [kind for (kind,) in owner.rows("select kind from public.effect")]


@pytest.fixture
def writing(crew, as_worker, effects):
    """Within a handler: write something and complete the job in one transaction."""

    async def writing(lease, conninfo=as_worker):
        connection = await crew.connect(conninfo)
        await connection.execute("insert into public.effect values (%s)", (lease.kind,))
        try:
            await crew.complete(lease, connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    return writing


def test_what_was_committed_with_its_effects_is_completed_once(
    enqueue, drain, ended, writing, effects
):
    job_id = enqueue()

    async def handler(lease):
        connection = await writing(lease)
        await connection.commit()
        await connection.close()

    assert drain(handler) == Tally(succeeded=1)
    assert ended(job_id) == [(1, "succeeded", None)]
    assert effects() == ["send"]


def test_what_was_committed_has_succeeded_whatever_the_handler_raises_then(
    enqueue, drain, ended, writing, effects
):
    job_id = enqueue()

    async def handler(lease):
        connection = await writing(lease)
        await connection.commit()
        await connection.close()
        raise Fail("too-late")

    assert drain(handler) == Tally(succeeded=1)
    assert ended(job_id) == [(1, "succeeded", None)]


@pytest.mark.parametrize("error", [None, Fail("rolled-back")])
def test_after_a_rollback_the_handlers_end_decides(
    error, enqueue, drain, ended, writing, effects
):
    job_id = enqueue()

    async def handler(lease):
        connection = await writing(lease)
        await connection.rollback()
        await connection.close()
        if error:
            raise error

    tally = drain(handler)

    assert effects() == []
    if error:
        assert ended(job_id) == [(1, "failed", "rolled-back")]
        assert tally == Tally(failed=1)
    else:
        assert ended(job_id) == [(1, "retried", "completion_rolled_back")]
        assert tally == Tally(retried=1)


@on_tasks
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_completion_that_was_not_awaited_is_none(crew, enqueue, drain, ended):
    job_id = enqueue()

    async def handler(lease):
        lease.complete(None)

    assert drain(handler) == Tally(retried=1)
    assert ended(job_id) == [(1, "retried", "completion_rolled_back")]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_transaction_left_open_holds_up_no_other_report(
    end, crew, enqueue, hire, ended, gate, writing, effects
):
    job_id = enqueue(kind="open")
    opened, is_time = [], gate()

    async def handler(lease):
        if lease.kind == "open":
            opened.append(await writing(lease))
        elif lease.kind == "end":
            await crew.until(is_time.is_set)
            await getattr(opened[0], end)()
            await opened[0].close()

    hired = hire(handler)
    wait_until(lambda: opened)
    ender = enqueue(kind="end")
    others = [enqueue() for _ in range(5)]
    assert ended(*others, count=5) == [(1, "succeeded", None)] * 5
    assert effects() == []
    is_time.set()

    is_kept = end == "commit"
    assert ended(job_id) == [
        (1, "succeeded", None) if is_kept else (1, "retried", "completion_rolled_back")
    ]
    assert effects() == (["open"] if is_kept else [])
    assert ended(ender) == [(1, "succeeded", None)]
    assert hired.stop() == Tally(succeeded=6 + is_kept, retried=not is_kept)


@pytest.mark.parametrize("is_let_pass", [True, False])
def test_a_completion_under_a_lost_lease_is_refused_and_counts_for_nothing(
    is_let_pass, crew, enqueue, hire, ended, supersede, gate, writing, effects, watching
):
    job_id = enqueue(kind="stale")
    begun, is_time, seen = gate(), gate(), []

    async def handler(lease):
        begun.set()
        await crew.until(is_time.is_set)
        try:
            await writing(lease)
        except InvalidLease:
            seen.append(lease.lost)
            if is_let_pass:
                raise

    hired = hire(handler, concurrency=1, observers=[watching])
    wait_until(begun.is_set)
    supersede(job_id)
    is_time.set()
    wait_until(lambda: watching.ends)

    assert hired.stop() == Tally(lost=1)
    assert seen == [True]
    assert ended(job_id) == SUPERSEDED
    assert [(e.outcome, e.code) for e in watching.ends] == [("lost", None)]
    assert effects() == []


def test_a_completion_acts_as_the_caller_of_the_worker(
    enqueue, drain, owner, role, conninfo, writing, effects
):
    job_id = enqueue()
    login = role(member_of=("email-worker", "accounts"))
    source = make_conninfo(conninfo, user=login)

    async def handler(lease):
        connection = await writing(lease, source)
        await connection.commit()
        await connection.close()

    assert drain(handler, source=source, caller="email-worker") == Tally(succeeded=1)
    assert owner.rows(
        "select outcome, worker from attempt where job_id = %s", job_id
    ) == [("succeeded", "email-worker")]


def test_what_was_committed_has_succeeded_also_if_the_grace_is_over_then(
    crew, enqueue, hire, ended, gate, writing, effects
):
    job_id = enqueue()
    is_time = gate()

    async def handler(lease):
        connection = await writing(lease)
        await connection.commit()
        await connection.close()
        await crew.until(is_time.is_set)

    hired = hire(handler)
    ended(job_id)

    assert hired.stop(0) == Tally(succeeded=1, is_clean=False)


# Side by side.


@pytest.mark.parametrize("options", [{}, {"batch": 10}], ids=["alone", "batch"])
def test_no_more_handlers_run_than_the_concurrency(
    options, crew, enqueue, hire, ended, gate, owner
):
    jobs = [enqueue() for _ in range(12)]
    lock, is_time = Lock(), gate()
    running, most = 0, 0

    async def handler(lease):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        await crew.until(is_time.is_set)
        with lock:
            running -= 1

    hired = hire(handler, concurrency=3, **options)
    held = "select count(*) from live_job where lease_owner is not null"
    wait_until(lambda: running == 3 and owner.value(held) == options.get("batch", 3))
    is_time.set()

    assert ended(*jobs, count=12) == [(1, "succeeded", None)] * 12
    assert most == 3
    assert owner.value("select count(*) from attempt") == 12
    assert hired.stop() == Tally(succeeded=12)


def test_context_variables_do_not_leak_from_one_job_into_another(crew, enqueue, drain):
    tenant = ContextVar("tenant", default="nobody")
    seen = []
    for _ in range(4):
        enqueue()

    async def handler(lease):
        seen.append(tenant.get())
        tenant.set(lease.job_id)

    drain(handler, concurrency=1)

    assert seen == ["nobody"] * 4


def test_what_an_observer_puts_into_the_context_is_the_handlers(enqueue, drain):
    span = ContextVar("span", default=None)
    seen = []
    jobs = [enqueue() for _ in range(2)]

    class Tracing(Observer):
        @contextlib.contextmanager
        def running(self, lease):
            token = span.set(lease.job_id)
            yield
            span.reset(token)

    async def handler(lease):
        seen.append(span.get())

    assert drain(handler, concurrency=1, observers=[Tracing()]).is_clean
    assert seen == jobs


# Observers.


def test_each_lease_that_is_claimed_ends_once(
    crew, enqueue, hire, ended, supersede, gate, watching
):
    ends = {
        "good": ("succeeded", None),
        "later": ("retried", "later"),
        "never": ("failed", "never"),
        "stale": ("lost", None),
    }
    jobs = {kind: enqueue(kind=kind) for kind in ends}
    begun, is_time = gate(), gate()

    async def handler(lease):
        if lease.kind == "later":
            raise Retry("later")
        if lease.kind == "never":
            raise Fail("never")
        if lease.kind == "stale":
            begun.set()
            await crew.until(is_time.is_set)

    hired = hire(handler, concurrency=1, observers=[watching])
    wait_until(begun.is_set)
    supersede(jobs["stale"])
    is_time.set()
    wait_until(lambda: len(watching.ends) == 4)

    assert hired.stop() == Tally(succeeded=1, retried=1, failed=1, lost=1)
    assert sum(count for _, count in watching.claims) == 4
    assert {queue for queue, _ in watching.claims} == {"email"}
    assert {e.lease.job_id: (e.outcome, e.code) for e in watching.ends} == {
        jobs[kind]: end for kind, end in ends.items()
    }
    assert len(watching.ends) == 4
    assert all(0 < e.seconds < DEADLINE for e in watching.ends)


def test_an_observer_is_around_the_handler_in_its_thread(enqueue, drain, watching):
    good, bad = enqueue(), enqueue(kind="bad")
    threads = []

    async def handler(lease):
        threads.append(current_thread().name)
        if lease.kind == "bad":
            raise Retry("down")

    drain(handler, concurrency=1, observers=[watching])

    assert watching.spans == [
        ("enter", good, threads[0]),
        ("returned", good, threads[0]),
        ("enter", bad, threads[1]),
        ("raised", bad, "Retry"),
    ]


@on_threads
def test_an_observer_that_swallows_an_exception_swallows_no_failure(
    enqueue, drain, ended
):
    job_id = enqueue()

    class Swallowing(Observer):
        def running(self, _):
            return contextlib.suppress(Exception)

    async def handler(lease):
        raise Fail("down")

    assert drain(handler, observers=[Swallowing()]) == Tally(failed=1)
    assert ended(job_id) == [(1, "failed", "down")]


class Broken(Observer):
    """Raises whatever it is told."""

    def claimed(self, *_):
        raise RuntimeError("told claimed")

    def running(self, _):
        raise RuntimeError("told running")

    def ended(self, _):
        raise RuntimeError("told ended")

    lost = ended
    disconnected = None


class BrokenInside(Observer):
    """Raises on the way out."""

    @contextlib.contextmanager
    def running(self, _):
        yield
        raise RuntimeError("told at exit")


def test_an_observer_that_raises_harms_nothing_and_is_logged(
    enqueue, drain, watching, caplog
):
    jobs = [enqueue() for _ in range(3)]

    tally = drain(nothing, observers=[Broken(), BrokenInside(), watching])

    assert tally == Tally(succeeded=3)
    assert {e.lease.job_id for e in watching.ends} == set(jobs)
    assert {job for event, job, _ in watching.spans if event == "returned"} == set(jobs)
    lines = [r.getMessage() for r in caplog.records if "observer" in r.getMessage()]
    for event in ("claimed", "running", "ended"):
        assert any(f" at {event}: RuntimeError" in line for line in lines)
    assert all(__file__ in line for line in lines)
    # Its text may be a payload's.
    assert "told" not in caplog.text


def test_a_lost_lease_is_seen_by_the_handler_and_told(
    crew, configure, enqueue, hire, ended, supersede, gate, watching
):
    configure(lease_seconds=1)
    job_id = enqueue()
    begun, never, seen = gate(), gate(), []

    async def handler(lease):
        assert not lease.lost
        begun.set()
        try:
            await crew.until(lambda: lease.lost or never.is_set())
        finally:
            seen.append(lease.lost)

    hired = hire(handler, concurrency=1, observers=[watching])
    wait_until(begun.is_set)
    # The next renewal is refused, in a third of a second.
    supersede(job_id)
    wait_until(lambda: watching.ends)

    assert hired.stop() == Tally(lost=1)
    assert seen == [True]
    assert watching.losses == [job_id]
    assert ended(job_id) == SUPERSEDED
    assert [e.outcome for e in watching.ends] == ["lost"]


@on_tasks  # a thread that blocks harms nobody
def test_a_lease_is_kept_alive_while_its_handler_blocks_the_loop(
    configure, enqueue, hire, ended, rival
):
    configure(lease_seconds=1)
    job_id = enqueue()
    begun = Event()

    async def handler(lease):
        before = lease.lease_expires_at
        begun.set()
        # For longer than the lease.
        time.sleep(1.3)  # noqa: ASYNC251 - that it blocks is the point
        assert lease.lease_expires_at > before
        assert not lease.lost

    hired = hire(handler)
    wait_until(begun.is_set)
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        assert rival.rows("select job_id from claim('email')") == []
        time.sleep(0.005)

    assert ended(job_id) == [(1, "succeeded", None)]
    assert hired.stop() == Tally(succeeded=1)


# The log.


@pytest.fixture
def records(caplog):
    """Everything that is logged, at whatever level."""
    caplog.set_level(logging.DEBUG)
    return lambda name="lenso_jobs": [r for r in caplog.records if name in r.name]


def test_each_line_about_a_job_says_which_as_fields(
    crew, enqueue, drain, ended, records
):
    jobs = {kind: enqueue(kind=kind) for kind in ("good", "later", "never", "surprise")}

    async def handler(lease):
        if lease.kind == "later":
            raise Retry("later")
        if lease.kind == "never":
            raise Fail("never")
        if lease.kind == "surprise":
            raise LookupError

    drain(handler)

    about = [r for r in records() if hasattr(r, "job_id")]
    assert {r.job_id for r in about} == {str(job_id) for job_id in jobs.values()}
    assert all((r.queue, r.attempt) == ("email", 1) for r in about)
    assert all(r.job_id == str(jobs[r.kind]) for r in about)
    assert {(r.kind, r.failure_code) for r in about if hasattr(r, "failure_code")} == {
        ("later", "later"),
        ("never", "never"),
        ("surprise", "LookupError"),
    }
    levels = {(r.kind, r.levelno) for r in about}
    assert ("good", logging.DEBUG) in levels
    assert ("good", logging.WARNING) not in levels
    # Where it was raised is worth as much as its text.
    assert any(__file__ in r.getMessage() for r in about if r.kind == "surprise")


class Clumsy(Observer):
    """Fails on what the handler raised."""

    @contextlib.contextmanager
    def running(self, _):
        try:
            yield
        except Exception as error:
            raise RuntimeError("secret-span") from error


def test_no_line_has_a_secret(
    crew, enqueue, hire, ended, supersede, gate, records, caplog, owner
):
    kinds = ("good", "later", "surprise", "chain", "exit", "broken", "stale")
    jobs = {
        kind: enqueue(
            kind=kind, payload={"to": "secret-payload"}, key=f"secret-key-{kind}"
        )
        for kind in kinds
    }
    owner.execute(
        "update job set payload = payload || format("
        "'{\"n\": %%s}', repeat('9', 5000))::jsonb where job_id = %s",
        (jobs["broken"],),
    )
    tokens, begun, is_time = [], gate(), gate()

    async def handler(lease):
        tokens.append(lease.lease_token)
        if lease.kind == "later":
            raise Retry("later")
        if lease.kind == "surprise":
            raise ValueError("secret-text")
        if lease.kind == "chain":
            raise KeyError("secret-text") from OSError("secret-cause")
        if lease.kind == "exit":
            raise SystemExit("secret-text")
        if lease.kind == "broken":
            return lease.payload
        if lease.kind == "stale":
            begun.set()
            await crew.until(is_time.is_set)
        return None

    hired = hire(handler, concurrency=1, observers=[Clumsy(), Broken()])
    ended(*(jobs[kind] for kind in kinds if kind != "stale"), count=6)
    wait_until(begun.is_set)
    supersede(jobs["stale"])
    is_time.set()
    wait_until(lambda: any(getattr(r, "kind", "") == "stale" for r in records()))
    hired.stop()

    formatter = logging.Formatter()
    said = "\n".join(
        f"{formatter.format(r)} {r.exc_text} {r.__dict__}" for r in caplog.records
    )
    assert len(tokens) == 7
    assert "an observer failed" in said
    for secret in ("secret", "9" * 20, *tokens):
        assert secret not in said
    assert caplog.text.count("secret") == 0


# Options.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema", ""),
        ("schema", None),
        ("queue", ""),
        ("queue", 5),
        ("handler", None),
        ("handler", "module:function"),
        ("concurrency", 0),
        ("concurrency", 1001),
        ("concurrency", 2.0),
        ("concurrency", True),
        ("batch", 0),
        ("batch", 1001),
        ("batch", "10"),
        ("lease_margin", -1),
        ("lease_margin", "1"),
        ("lease_margin", float("nan")),
        ("grace", -0.1),
        ("grace", None),
        ("on_shutdown", "retry"),
        ("on_shutdown", None),
        ("conninfo_or_pool", None),
        ("conninfo_or_pool", 5),
    ],
)
def test_an_option_out_of_range_is_refused_by_its_name(name, value, crew):
    options = {
        "conninfo_or_pool": "dbname=nowhere",
        "schema": "jobs_email",
        "queue": "email",
        "handler": print,
    } | {name: value}

    with pytest.raises(InvalidArgument, match=name):
        crew.worker(options.pop("conninfo_or_pool"), **options)


@pytest.mark.parametrize("grace", [-1, "1", float("nan"), True])
def test_a_grace_out_of_range_is_refused_by_its_name(grace, crew):
    worker = crew.worker("", schema="jobs_email", queue="email", handler=print)

    with pytest.raises(InvalidArgument, match="grace"):
        worker.stop(grace)


@on_threads
def test_a_margin_as_long_as_the_lease_leaves_half_of_it(enqueue, drain, ended):
    job_id = enqueue()

    assert drain(nothing, lease_margin=30) == Tally(succeeded=1)
    assert ended(job_id) == [(1, "succeeded", None)]


# A life.


def test_a_worker_runs_once(hire, crew):
    hired = hire(nothing)
    assert hired.stop() == Tally()

    with pytest.raises(RuntimeError, match="once"):
        crew.run(hired.worker)


def test_a_worker_that_was_stopped_before_claims_nothing(hire, enqueue, owner):
    enqueue()
    hired = hire(nothing, begins=False)
    hired.worker.stop()
    began = time.monotonic()
    hired.start()

    assert hired.tally() == Tally()
    assert time.monotonic() - began < 5
    assert owner.value("select attempt from live_job") == 0


def test_a_stopped_worker_lets_what_runs_end_and_claims_no_more(
    hire, enqueue, ended, owner, staying
):
    first = enqueue()
    handler, begun, is_time = staying
    hired = hire(handler)
    wait_until(begun.is_set)
    hired.worker.stop()
    wait_until(lambda: not hired.worker._ledger._is_open)
    wait_until(lambda: not any(t.name.endswith("email claims") for t in threads()))
    second = enqueue()
    assert hired.is_running()
    is_time.set()

    assert hired.tally() == Tally(succeeded=1)
    assert ended(first) == [(1, "succeeded", None)]
    assert owner.value("select attempt from live_job where job_id = %s", second) == 0


def test_stop_may_be_called_from_a_signal_handler(
    crew, enqueue, as_worker, gate, ended
):
    job_id = enqueue()
    begun, is_time = Event(), Event()

    async def handler(lease):
        begun.set()
        await crew.until(is_time.is_set)

    worker = crew.worker(
        as_worker, schema="jobs_email", queue="email", handler=crew.adapt(handler)
    )

    def signals():
        wait_until(begun.is_set)
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
        is_time.set()

    before = signal.signal(signal.SIGUSR1, lambda *_: worker.stop())
    thread = Thread(target=signals)
    try:
        thread.start()
        tally = crew.run(worker)  # in the main thread, which gets the signals
    finally:
        is_time.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)

    assert tally == Tally(succeeded=1)
    assert ended(job_id) == [(1, "succeeded", None)]


@pytest.mark.parametrize("between", [0, 0.15])
def test_of_two_orders_to_stop_the_shorter_grace_counts(
    between, hire, enqueue, ended, staying
):
    job_id = enqueue()
    handler, begun, _ = staying
    hired = hire(handler)
    wait_until(begun.is_set)
    began = time.monotonic()
    hired.worker.stop(60)
    Event().wait(between)

    assert hired.stop(0.1) == Tally(handed_back=1, is_clean=False)
    assert time.monotonic() - began < 5
    assert ended(job_id) == [(1, "retried", "worker_shutdown")]


@on_threads
def test_a_longer_grace_does_not_put_off_the_end(hire, enqueue, staying):
    enqueue()
    handler, begun, _ = staying
    hired = hire(handler)
    wait_until(begun.is_set)
    hired.worker.stop(0.1)

    assert hired.stop(60).handed_back == 1


def test_what_has_not_ended_when_the_grace_is_over_is_handed_back(
    crew, hire, enqueue, gate, ended, watching, observing
):
    jobs = [enqueue() for _ in range(2)]
    begun, is_time, seen = [], gate(), []

    async def handler(lease):
        begun.append(lease)
        await crew.until(is_time.is_set)
        seen.append(lease.lost)

    hired = hire(handler, observers=[watching])
    wait_until(lambda: len(begun) == 2)

    assert hired.stop(0) == Tally(handed_back=2, is_clean=False)
    assert all(lease.lost for lease in begun)
    assert ended(*jobs, count=2) == [(1, "retried", "worker_shutdown")] * 2
    assert {observing.inspect(job_id).status for job_id in jobs} == {"queued"}
    assert [(e.outcome, e.code) for e in watching.ends] == [
        ("handed_back", "worker_shutdown")
    ] * 2


def test_what_has_not_ended_may_be_left_to_lapse(
    hire, enqueue, watching, observing, staying
):
    job_id = enqueue()
    handler, begun, _ = staying
    hired = hire(handler, observers=[watching], on_shutdown="lapse")
    wait_until(begun.is_set)

    assert hired.stop(0) == Tally(lost=1, is_clean=False)
    assert [(e.outcome, e.code) for e in watching.ends] == [("lost", None)]
    assert observing.inspect(job_id).status == "running"


@pytest.mark.parametrize("on_shutdown", ["return", "lapse"])
def test_what_waits_for_a_hand_is_let_go_at_once_but_for_last_attempts(
    on_shutdown, crew, hire, enqueue, gate, ended, observing
):
    running, last = enqueue(), enqueue(max_attempts=1)
    waiting = [enqueue() for _ in range(3)]
    begun, is_time = [], gate()

    async def handler(lease):
        begun.append(lease.job_id)
        await crew.until(is_time.is_set)

    hired = hire(handler, concurrency=1, batch=10, on_shutdown=on_shutdown)
    ledger = hired.worker._ledger
    wait_until(lambda: begun and len(ledger._waiting) == 4)
    hired.worker.stop()
    wait_until(lambda: not ledger._is_open)
    if on_shutdown == "return":
        assert ended(*waiting, count=3) == [(1, "retried", "worker_shutdown")] * 3
    is_time.set()
    tally = hired.tally()

    assert begun == [running, last]
    assert ended(running, last, count=2) == [(1, "succeeded", None)] * 2
    if on_shutdown == "return":
        assert tally == Tally(succeeded=2, handed_back=3)
    else:
        assert tally == Tally(succeeded=2, lost=3)
        assert {observing.inspect(j).status for j in waiting} == {"running"}


def test_nothing_is_left_of_a_worker_that_has_stopped(hire, enqueue, ended, owner):
    def here():
        return [t for t in threads() if "lenso-jobs" in t.name]

    hired = hire(nothing)
    ended(enqueue())
    assert here()
    hired.stop()

    wait_until(lambda: not here())
    wait_until(
        lambda: (
            not owner.value(
                "select count(*) from pg_stat_activity"
                " where usename = 'email-worker' and datname = current_database()"
            )
        )
    )


@on_tasks
def test_a_cancelled_run_hands_back_what_it_cancels(crew, as_worker, enqueue, ended):
    job_id = enqueue()
    seen = []

    async def main():
        begun = asyncio.Event()

        async def handler(lease):
            begun.set()
            try:
                await asyncio.sleep(DEADLINE)
            except asyncio.CancelledError:
                seen.append(lease.lost)
                raise

        worker = AsyncWorker(
            as_worker, schema="jobs_email", queue="email", handler=handler
        )
        task = asyncio.create_task(worker.run())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    began = time.monotonic()
    asyncio.run(main())

    assert time.monotonic() - began < 5
    assert seen == [False]  # it is good until the handler has cleaned up
    assert ended(job_id) == [(1, "retried", "worker_shutdown")]


@on_tasks
def test_a_task_is_cancelled_as_soon_as_the_grace_is_over(crew, as_worker, enqueue):
    enqueue()
    seen = []

    async def main():
        async def handler(lease):
            worker.stop(0)
            try:
                await asyncio.sleep(DEADLINE)
            finally:
                seen.append(lease.lost)

        worker = AsyncWorker(
            as_worker, schema="jobs_email", queue="email", handler=handler
        )
        tally = await worker.run()

        assert seen == [False]
        assert tally == Tally(handed_back=1, is_clean=False)

    asyncio.run(main())


@on_threads
def test_an_interrupted_run_hands_back_what_it_leaves(
    crew, as_worker, enqueue, ended, staying
):
    job_id = enqueue()
    handler, begun, _ = staying
    worker = Worker(
        as_worker, schema="jobs_email", queue="email", handler=crew.adapt(handler)
    )

    def interrupt():
        wait_until(begun.is_set)
        os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        worker.run()
    thread.join()

    assert ended(job_id) == [(1, "retried", "worker_shutdown")]


@pytest.mark.slow
@on_tasks
@pytest.mark.parametrize("naps", [3, 30])
def test_a_handler_that_minds_no_cancellation_has_a_second_at_most(
    crew, hire, enqueue, ended, naps
):
    job_id = enqueue()
    begun = Event()

    async def handler(lease):
        begun.set()
        for _ in range(naps):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    hired = hire(handler)
    wait_until(begun.is_set)

    if naps == 3:
        assert hired.stop(0) == Tally(succeeded=1, is_clean=False)
        assert ended(job_id) == [(1, "succeeded", None)]
    else:
        assert hired.stop(0) == Tally(handed_back=1, is_clean=False)
        assert ended(job_id) == [(1, "retried", "worker_shutdown")]


# Refusals.


@on_threads
def test_a_queue_that_is_not_declared_ends_the_run_at_once(hire):
    began = time.monotonic()
    hired = hire(nothing, queue="unknown")

    with pytest.raises(InvalidQueue):
        hired.tally()
    assert time.monotonic() - began < 5


@on_threads
@pytest.mark.parametrize("role", ["accounts", "operations", "stranger"])
def test_a_role_that_is_no_worker_ends_the_run_at_once(role, hire, conninfo):
    began = time.monotonic()
    hired = hire(nothing, make_conninfo(conninfo, user=role))

    with pytest.raises((Unauthorized, psycopg.Error)) as caught:
        hired.tally()
    assert caught.value.sqlstate == "42501"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("what", ["queue", "worker"])
def test_a_refusal_in_the_middle_ends_the_run_after_what_runs(
    what, hire, enqueue, ended, owner, configure, watching, staying
):
    job_id = enqueue()
    handler, begun, is_time = staying
    hired = hire(handler, observers=[watching])
    wait_until(begun.is_set)
    if what == "queue":
        # configure would refuse it while there is a job.
        owner.execute("delete from queue where queue = 'email'")
    else:
        configure(worker_instances=["spare-worker"])
    owner.execute("select _wake('email')")
    wait_until(lambda: not hired.worker._ledger._is_open)
    assert hired.is_running()
    is_time.set()

    with pytest.raises(InvalidQueue if what == "queue" else Unauthorized):
        hired.tally()
    assert [e.outcome for e in watching.ends] == ["succeeded"]
    assert ended(job_id) == [(1, "succeeded", None)]


@on_threads
@pytest.mark.parametrize("end", ["cancel", "terminate"])
@pytest.mark.parametrize("call", ["claim", "report"])
def test_a_call_that_is_broken_off_is_made_again(
    call, end, crew, hire, enqueue, ended, owner, connect
):
    job_id = enqueue()
    holder = connect()
    table = {"claim": "live_job", "report": "attempt"}[call]
    holder.execute(f"begin; lock table {table} in access exclusive mode")
    hired = hire(nothing)
    broken_off = (
        f"select pg_{end}_backend(pid) from pg_stat_activity"
        " where usename = 'email-worker' and datname = current_database()"
        " and wait_event_type = 'Lock'"
    )
    wait_until(lambda: owner.rows(broken_off))
    holder.execute("rollback")

    assert ended(job_id) == [(1, "succeeded", None)]
    assert hired.stop() == Tally(succeeded=1)


@pytest.mark.slow
@on_threads
def test_a_database_that_cannot_be_reached_is_told_of_once_and_tried_again(
    hire, conninfo, watching, caplog, monkeypatch, enqueue, ended, owner
):
    job_id = enqueue()
    connect, failures = psycopg.Connection.connect.__func__, []

    def failing(cls, *arguments, **parameters):
        if cls is psycopg.Connection and len(failures) < 5:
            failures.append(parameters)
            raise psycopg.OperationalError("secret-text")
        return connect(cls, *arguments, **parameters)

    monkeypatch.setattr(psycopg.Connection, "connect", classmethod(failing))
    hired = hire(
        nothing,
        make_conninfo(conninfo, user="email-worker", password="secret-password"),
        observers=[watching],
    )

    assert ended(job_id) == [(1, "succeeded", None)]
    # Once all three connections are there.
    wait_until(lambda: len(watching.states) == 2)
    assert hired.stop() == Tally(succeeded=1)
    lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 2, [r.getMessage() for r in lines]
    assert "secret" not in caplog.text
    assert [event for event, _ in watching.states] == ["disconnected", "reconnected"]


@on_threads
def test_a_worker_that_reaches_no_database_can_be_stopped(hire, tmp_path):
    hired = hire(nothing, make_conninfo(host=str(tmp_path), dbname="nowhere"))
    began = time.monotonic()

    assert hired.stop() == Tally()
    assert time.monotonic() - began < 5


# Waiting.


@pytest.fixture
def idle(monkeypatch):
    """Wait until the worker means to sleep for as long as it ever does."""
    naps = []
    sleep_until = _waiting.Waiter.sleep_until

    def noted(waiter, alarm, seconds):
        naps.append((seconds, waiter.longest))
        sleep_until(waiter, alarm, seconds)

    monkeypatch.setattr(_waiting.Waiter, "sleep_until", noted)
    monkeypatch.setattr(
        _engine, "pauses", lambda longest: chain([0.02], repeat(longest))
    )
    return lambda: wait_until(lambda: naps and naps[-1][0] == naps[-1][1])


def test_an_enqueue_reaches_an_idle_worker(hire, enqueue, ended, idle, caplog):
    hired = hire(nothing)
    idle()
    began = time.monotonic()

    assert ended(enqueue()) == [(1, "succeeded", None)]
    assert time.monotonic() - began < 5
    assert hired.stop() == Tally(succeeded=1)
    assert "cannot listen" not in caplog.text


@on_threads
def test_a_job_that_falls_due_soon_is_found_in_time(hire, enqueue, ended, idle, owner):
    hired = hire(nothing)
    idle()
    (when,) = owner.rows("select clock_timestamp() + interval '300 ms'")[0]
    job_id = enqueue(available_at=when)

    assert ended(job_id) == [(1, "succeeded", None)]
    late = owner.value("select extract(epoch from clock_timestamp() - %s)", when)
    assert late < 5
    hired.stop()


@on_threads
def test_a_retry_is_found_when_it_falls_due(
    hire, configure, enqueue, ended, idle, owner
):
    configure(retry_base_seconds=1, retry_max_seconds=1)
    job_id = enqueue()

    async def handler(lease):
        if lease.attempt == 1:
            raise Retry("down")

    hired = hire(handler)

    assert ended(job_id, count=2) == [(1, "retried", "down"), (2, "succeeded", None)]
    assert (
        owner.value(
            "select extract(epoch from b.ended_at - a.retry_at) from attempt as a,"
            " attempt as b where (a.attempt, b.attempt) = (1, 2)"
        )
        < 1
    )
    hired.stop()


class Wire:
    """What the connections of workers send, as libpq's own trace tells it."""

    def __init__(self, path):
        self._path = path
        self._file = path.open("wb", buffering=0)

    def watch(self, connection):
        connection.pgconn.trace(os.dup(self._file.fileno()))

    def sent(self, *kinds):
        """The messages of some kinds that were sent."""
        lines = self._path.read_text().splitlines()
        return [
            line.split("\t", 4)
            for line in lines
            if re.match(rf".*\tF\t\d+\t({'|'.join(kinds)})", line)
        ]

    def close(self):
        self._file.close()


@pytest.fixture
def wire(tmp_path, monkeypatch):
    """Have everything traced that workers send from now on."""
    wire = Wire(tmp_path / "trace")
    connect = psycopg.Connection.connect.__func__

    def traced(cls, *arguments, **parameters):
        connection = connect(cls, *arguments, **parameters)
        if cls is psycopg.Connection:
            wire.watch(connection)
        return connection

    monkeypatch.setattr(psycopg.Connection, "connect", classmethod(traced))
    yield wire
    wire.close()


@pytest.fixture
def asked(wire):
    """Count what idle workers ask the server in a while; answers that and the time."""

    def asked():
        before = len(wire.sent("Query", "Execute"))
        began = time.monotonic()
        Event().wait(1.6)
        count = len(wire.sent("Query", "Execute")) - before
        assert before  # the trace works
        return count, time.monotonic() - began

    return asked


@on_threads
def test_a_worker_that_listens_asks_nothing_while_it_is_idle(hire, idle, asked):
    hired = hire(nothing)
    idle()

    count, _ = asked()

    assert count <= 1
    hired.stop()


@pytest.mark.slow
@on_threads
def test_a_worker_that_may_not_listen_looks_every_second_and_says_so_once(
    hire, configure, enqueue, ended, idle, asked, caplog
):
    configure(notify=False)
    hired = hire(nothing)
    idle()

    count, seconds = asked()
    began = time.monotonic()
    job_id = enqueue()

    assert 1 <= count <= seconds + 1
    assert ended(job_id) == [(1, "succeeded", None)]
    assert time.monotonic() - began < 3
    assert hired.stop() == Tally(succeeded=1)
    lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "queue email is looked at every 1 s" in lines[0].getMessage()


@on_threads
@pytest.mark.parametrize("threshold", [None, 2])
def test_statements_are_prepared_unless_it_is_told_not_to(
    threshold, hire, enqueue, ended, wire
):
    jobs = []
    hired = hire(nothing, concurrency=1, prepare_threshold=threshold)
    for n in range(8):
        jobs.append(enqueue())
        ended(*jobs, count=n + 1)
    hired.stop()

    names = {line[4].split()[0] for line in wire.sent("Parse")}
    assert names
    assert (names == {'""'}) == (threshold is None)


# Where to connect.


@pytest.mark.parametrize("given", ["conninfo", "url", "pool"])
def test_a_worker_connects_by_a_string_or_as_a_pool_does(
    given, crew, hire, conninfo, enqueue, ended, owner
):
    job_id = enqueue()
    parameters = conninfo_to_dict(conninfo)
    if given == "conninfo":
        source = make_conninfo(conninfo, user="email-worker")
    elif given == "url":
        host = parameters["host"].replace("/", "%2F")
        source = (
            f"postgresql://email-worker@{host}:{parameters['port']}"
            f"/{parameters['dbname']}?application_name=given"
        )
    else:
        source = crew.pool(  # need not be open
            make_conninfo(conninfo, user="accounts"),
            open=False,
            kwargs={
                "user": "email-worker",
                "application_name": "given",
                "row_factory": psycopg.rows.dict_row,
                "autocommit": False,
            },
        )

    hired = hire(nothing, source)

    assert ended(job_id) == [(1, "succeeded", None)]
    assert owner.rows(
        "select application_name, count(*) from pg_stat_activity"
        " where usename = 'email-worker' and datname = current_database() group by 1"
    ) == [("lenso-jobs email" if given == "conninfo" else "given", 3)]
    assert hired.stop() == Tally(succeeded=1)
    assert owner.value("select worker from attempt") == "email-worker"


@pytest.mark.slow
def test_a_worker_starves_on_no_exhausted_pool(
    on_a_thread, crew, as_worker, configure, enqueue, owner, gate
):
    configure(lease_seconds=1)
    jobs = [enqueue() for _ in range(4)]
    over = Event()

    def release():
        # Leases were renewed meanwhile, and other jobs were claimed and completed.
        query = (
            "select count(*) from live_job"
            " where lease_expires_at > leased_at + interval '1.5 s'"
        )
        with contextlib.suppress(AssertionError):
            wait_until(lambda: owner.value(query) == 2)
        over.set()

    thread = Thread(target=release)

    if crew.worker is Worker:
        with ConnectionPool(as_worker, min_size=2, max_size=2, open=True) as pool:

            def handler(lease):
                if lease.job_id in jobs[:2]:
                    with pool.connection():
                        wait_until(over.is_set)

            worker = Worker(pool, schema="jobs_email", queue="email", handler=handler)
            hired = on_a_thread(crew, worker)
            hired.start()
            thread.start()
            wait_until(lambda: len(owner.rows("select from attempt")) == 4)
            tally = hired.stop()
    else:

        async def main():
            async with AsyncConnectionPool(
                as_worker, min_size=2, max_size=2, open=False
            ) as pool:

                async def handler(lease):
                    if lease.job_id in jobs[:2]:
                        async with pool.connection():
                            await crew.until(over.is_set)

                worker = AsyncWorker(
                    pool, schema="jobs_email", queue="email", handler=handler
                )
                task = asyncio.create_task(worker.run())
                thread.start()
                await crew.until(lambda: len(owner.rows("select from attempt")) == 4)
                worker.stop()
                return await task

        tally = asyncio.run(main())
    thread.join()

    assert over.is_set()
    assert tally == Tally(succeeded=4)
    assert owner.rows("select distinct attempt, outcome from attempt") == [
        (1, "succeeded")
    ]


def test_a_login_acts_as_the_caller_it_is_a_member_of(
    hire, role, conninfo, enqueue, ended, owner
):
    good, bad = enqueue(), enqueue(kind="bad")
    login = role(member_of=("email-worker", "spare-worker"))

    async def handler(lease):
        if lease.kind == "bad":
            raise Retry("down")

    hired = hire(handler, make_conninfo(conninfo, user=login), caller="spare-worker")

    assert ended(good, bad, count=2) == [(1, "succeeded", None), (1, "retried", "down")]
    assert hired.stop() == Tally(succeeded=1, retried=1)
    assert owner.rows("select distinct worker from attempt") == [("spare-worker",)]


@on_threads
def test_a_caller_that_the_login_is_no_member_of_ends_the_run(hire, role, conninfo):
    login = role(member_of=("email-worker",))
    hired = hire(nothing, make_conninfo(conninfo, user=login), caller="spare-worker")

    with pytest.raises((Unauthorized, psycopg.Error)) as caught:
        hired.tally()
    assert caught.value.sqlstate == "42501"
