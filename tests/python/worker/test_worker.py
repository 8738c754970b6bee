"""Both workers, by one text: a handler of a ``Worker`` is a coroutine that never waits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import logging.config
import os
import re
import signal
import time
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, repeat
from socket import gethostname
from threading import Event, Lock, Thread, current_thread
from threading import enumerate as threads
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool, NullConnectionPool

from lenso_jobs import (
    InvalidArgument,
    InvalidLease,
    InvalidQueue,
    Kinds,
    Unauthorized,
)
from lenso_jobs.worker import (
    AsyncHeldLease,
    AsyncWorker,
    Fail,
    HeldLease,
    Observer,
    PayloadUndecodable,
    Release,
    Retry,
    Tally,
    Worker,
    _claims,
    _connection,
    _lease,
    _outcome,
    _part,
    _run,
    _settings,
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
    """Return the result of a coroutine that blocks instead of waiting."""
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

    def run(self, worker, *, until_idle=False):
        return worker.run(until_idle=until_idle)

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

    def run(self, worker, *, until_idle=False):
        return asyncio.run(worker.run(until_idle=until_idle))

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
def executor(request):
    """How handlers are run."""
    return request.param()


# What concerns one of them, or what both have in common.
on_threads = pytest.mark.parametrize("executor", [Threads], indirect=True)
on_tasks = pytest.mark.parametrize("executor", [Tasks], indirect=True)


@pytest.fixture
def as_worker(conninfo):
    """The connection string of email-worker."""
    return make_conninfo(conninfo, user="email-worker")


@pytest.fixture
def start(executor, as_worker, on_a_thread):
    """Start a worker; it is stopped at the end of the test."""

    def start(handler, source=as_worker, *, begins=True, **options):
        options = {"schema": "jobs_email", "queue": "email"} | options
        if not isinstance(handler, dict):  # of handlers by kind
            handler = executor.adapt(handler)
        worker = executor.worker(source, handler=handler, **options)
        started = on_a_thread(executor, worker)
        if begins:
            started.start()
        return started

    return start


@pytest.fixture
def staying(executor, gate):
    """A handler that stays until it is time; that it has begun; and that it is time."""
    begun, is_time = gate(), gate()

    async def handler(lease):
        begun.set()
        await executor.until(is_time.is_set)

    return handler, begun, is_time


@pytest.fixture
def ended(owner):
    """Wait until so many attempts have ended; return (attempt, outcome, code) of each."""

    def ended(*job_ids, count=1):
        query = (
            "select attempt, outcome, failure_code from attempt"
            " where job_id = any (%s) order by job_id, attempt"
        )
        wait_until(lambda: len(owner.rows(query, list(job_ids))) >= count)
        return owner.rows(query, list(job_ids))

    return ended


@pytest.fixture
def drain(start, owner):
    """Run the handler until nothing is due; return the tally."""

    def drain(handler, **options):
        started = start(handler, **options)
        wait_until(
            lambda: (
                not owner.value(
                    "select count(*) from live_job where available_at <= clock_timestamp()"
                )
            )
        )
        return started.stop()

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
    """Keeps what its methods are given."""

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


@dataclass
class Order:
    number: int


def generator_of_two(lease, payload):
    yield lease, payload


async def coroutine_of_two(lease, payload):
    """Handle a job of a kind."""


def test_an_ended_job_is_freed_without_the_garbage_collector(executor, enqueue, drain):
    def held():
        return sum(type(each) is _lease.LeaseState for each in gc.get_objects())

    async def handler(lease):
        if lease.payload["fails"]:
            raise Fail("no")

    for number in range(20):
        enqueue(payload={"fails": number % 2})
    gc.collect()
    gc.disable()
    try:
        before = held()
        drain(executor.adapt(handler))
        wait_until(lambda: held() == before)  # the last threads end
    finally:
        gc.enable()


# Handlers by kind.


def test_each_job_goes_to_the_handler_of_its_kind(
    executor, enqueue, drain, ended, owner, records
):
    kinds = Kinds()
    seen = []

    @kinds("order", queue="email", payload=Order)
    async def order(lease, payload):
        seen.append(payload)

    @kinds("later", queue="email")
    async def later(lease, payload):
        raise Release("not_yet", after=timedelta(minutes=5))

    adapted = {kind: executor.adapt(handler) for kind, handler in kinds.items()}
    good = enqueue(kind="order", payload={"number": 7})
    bad = enqueue(kind="order", payload={"number": "secret"})
    put_off = enqueue(kind="later")
    unknown = enqueue(kind="newer", max_attempts=1)

    tally = drain(adapted, concurrency=1)

    assert seen == [Order(7)]
    assert tally == Tally(succeeded=1, failed=1, released=2)
    assert ended(good) == [(1, "succeeded", None)]
    assert ended(bad) == [(1, "failed", "payload_invalid")]
    assert ended(put_off, unknown, count=2) == [(1, "released", None)] * 2
    waits = owner.rows(
        "select round(extract(epoch from available_at - clock_timestamp()), -1)"
        " from live_job order by job_id"
    )
    assert waits == [(300,), (60,)]
    said = "\n".join(r.getMessage() for r in records())
    assert "no handler for kind newer: its jobs are released for 60 s" in said
    assert "failure_code=not_yet" in said
    assert (
        "handler raised payload_invalid: Order: number (int_parsing): job_id=" in said
    )
    assert "secret" not in said


def test_a_release_waits_as_it_says_and_may_be_alone_in_a_group():
    error = ExceptionGroup("x", [Release("not_yet", after=1.5)])

    assert _outcome.verdict_on(error) == ("not_yet", True, 2, True)


@pytest.mark.parametrize("after", [-1, 86_401, "7", float("nan"), True])
@pytest.mark.parametrize("chosen", [Release, Retry])
def test_an_end_after_an_impossible_time_is_refused(after, chosen):
    with pytest.raises(InvalidArgument, match="after must be"):
        chosen("not_yet", after=after)


@on_threads
def test_a_retry_waits_as_its_handler_says(enqueue, drain, owner):
    waits = {"one": 7, "two": timedelta(seconds=90), "three": None}
    for kind in waits:
        enqueue(kind=kind)

    async def handler(lease):
        raise Retry("http_429", after=waits[lease.kind])

    assert drain(handler) == Tally(retried=3)
    rows = owner.rows(
        "select extract(epoch from retry_at - ended_at)::integer from attempt"
        " order by job_id"
    )
    policy = owner.value("select retry_base_seconds from instance")
    assert rows == [(7,), (90,), (policy,)]


def test_a_worker_refuses_kinds_that_it_cannot_run(executor):
    options = {"schema": "jobs_email", "queue": "email"}
    kinds = Kinds()

    with pytest.raises(InvalidArgument, match="handler has no kinds: import the mod"):
        executor.worker("dbname=x", handler=kinds, **options)
    is_for_asyncio = executor.worker is AsyncWorker
    fine = coroutine_of_two if is_for_asyncio else lambda _, __: None
    kinds("fine", queue="email")(fine)
    assert executor.worker("dbname=x", handler=kinds, **options)
    assert _settings.is_for_asyncio(kinds) is is_for_asyncio
    kinds("odd", queue="email")(generator_of_two)
    with pytest.raises(InvalidArgument, match="of kind odd is a generator function"):
        executor.worker("dbname=x", handler=kinds, **options)


def test_coroutine_functions_by_kind_are_for_asyncio():
    kinds = Kinds()
    kinds("fine", queue="email")(coroutine_of_two)

    assert _settings.is_for_asyncio(kinds)
    with pytest.raises(
        InvalidArgument, match="of kind fine is a coroutine function: u"
    ):
        Worker("dbname=x", schema="jobs_email", queue="email", handler=kinds)


def test_async_worker_refuses_a_plain_function_by_kind():
    options = {"schema": "jobs_email", "queue": "email"}
    kinds = Kinds()
    kinds("fine", queue="email")(coroutine_of_two)
    hidden = functools.wraps(coroutine_of_two)(lambda lease, _: nothing(lease))
    kinds("hidden", queue="email")(hidden)
    assert AsyncWorker("dbname=x", handler=kinds, **options)

    kinds("odd", queue="email")(lambda _, __: None)

    around = {kind: wrapped(handler) for kind, handler in kinds.items()}
    for handler in (kinds, around):
        with pytest.raises(InvalidArgument, match="of kind odd is a plain function"):
            AsyncWorker("dbname=x", handler=handler, **options)


# What a handler's end means.


def test_a_handler_that_returns_has_its_job_completed(executor, enqueue, drain, ended):
    job_id = enqueue(kind="send:mail", payload={"to": "a@b"})
    seen = []

    async def handler(lease):
        seen.append(lease)

    assert drain(handler) == Tally(succeeded=1)

    (lease,) = seen
    assert isinstance(lease, executor.lease)
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
    """Raises another exception when its text is read."""

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


def test_an_exception_of_a_handler_fails_its_job_and_no_other(enqueue, drain, ended):
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
def test_retry_with_a_malformed_code_raises_invalid_failure(enqueue, drain, ended):
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


def test_a_retried_job_runs_again_once_it_is_due(
    enqueue, start, ended, make_due, owner
):
    job_id = enqueue()
    attempts = []

    async def handler(lease):
        attempts.append(lease.attempt)
        if lease.attempt == 1:
            raise Retry("down")

    started = start(handler)
    ended(job_id)
    make_due(job_id)
    owner.execute("select _queue_wake('email')")

    assert ended(job_id, count=2) == [(1, "retried", "down"), (2, "succeeded", None)]
    assert attempts == [1, 2]
    assert started.stop() == Tally(succeeded=1, retried=1)


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


class AsyncHandler:
    """Its instances are called as coroutine functions are."""

    async def __call__(self, lease):
        """Handle a job."""

    async def method(self, lease):
        """Handle a job."""


class Handler:
    def __call__(self, lease):
        """Handle a job."""


def calling(handler):
    """Hide a handler behind another function."""

    def caller(lease):
        return handler(lease)

    return caller


def wrapped(handler):
    @functools.wraps(handler)
    def wrapper(lease):
        return handler(lease)

    return wrapper


def bridge(handler):
    """Make a plain function of a coroutine function, which looks wrapped."""

    @functools.wraps(handler)
    def wrapper(lease):
        coroutine = handler(lease)
        try:
            asyncio.run(coroutine)
        finally:
            coroutine.close()

    return wrapper


def given_a_connection(handler):
    """Call a handler with one argument more than it is called with."""

    @functools.wraps(handler)
    def wrapper(lease):
        return handler(lease, None)

    return wrapper


def plain(lease):
    """Handle a job."""


def generator(lease):
    yield lease


async def async_generator(lease):
    yield lease


CERTAINLY_ASYNC = {
    "async def": nothing,
    "partial": functools.partial(nothing),
    "partial of a partial": functools.partial(functools.partial(nothing)),
    "object": AsyncHandler(),
    "partial of an object": functools.partial(AsyncHandler()),
    "method": AsyncHandler().method,
}
# Only a call can tell: a wrapper may also run the coroutine.
PERHAPS_ASYNC = {
    "wraps": wrapped(nothing),
    "wraps of wraps": wrapped(wrapped(nothing)),
    "partial of wraps": functools.partial(wrapped(nothing)),
    "wraps of a method": wrapped(AsyncHandler().method),
}


class Generators:
    def __call__(self, lease):
        yield lease


def by_name(handlers):
    return pytest.mark.parametrize("handler", handlers.values(), ids=handlers)


@by_name(CERTAINLY_ASYNC)
def test_worker_refuses_every_kind_of_coroutine_function(handler):
    with pytest.raises(InvalidArgument, match="handler is a coroutine function"):
        Worker("dbname=x", schema="jobs_email", queue="email", handler=handler)


@by_name(CERTAINLY_ASYNC | PERHAPS_ASYNC)
def test_a_coroutine_function_is_known_to_be_for_asyncio(handler):
    assert _settings.is_for_asyncio(handler)


@by_name(
    {
        "def": plain,
        "partial": functools.partial(plain),
        "object": Handler(),
        "builtin": print,
        "class": Handler,
        "generator": generator,
        "wraps": wrapped(plain),
        "caller": calling(nothing),
        "text": "module:function",
    }
)
def test_another_handler_is_not_known_to_be_for_asyncio(handler):
    assert not _settings.is_for_asyncio(handler)


def test_a_wrapper_that_wraps_itself_is_not_unwrapped_for_ever():
    handler = wrapped(plain)
    handler.__wrapped__ = handler

    assert not _settings.is_for_asyncio(handler)


@on_threads
def test_worker_runs_a_wrapper_that_runs_its_coroutine(
    on_a_thread, executor, enqueue, as_worker, ended
):
    job_id = enqueue()
    worker = Worker(
        as_worker, schema="jobs_email", queue="email", handler=bridge(nothing)
    )
    started = on_a_thread(executor, worker)
    started.start()

    assert ended(job_id) == [(1, "succeeded", None)]
    assert started.stop() == Tally(succeeded=1)


@by_name(
    {
        "generator": generator,
        "async generator": async_generator,
        "partial": functools.partial(generator),
        "object": Generators(),
    }
)
def test_a_generator_function_is_refused(handler, executor):
    with pytest.raises(InvalidArgument, match="handler is a generator function"):
        executor.worker("dbname=x", schema="jobs_email", queue="email", handler=handler)


UNFIT = {
    Threads: {
        "wraps": wrapped(nothing),
        "caller": calling(nothing),
        "awaitable": lambda _: Awaitable(),
        "generator": calling(generator),
        "async generator": calling(async_generator),
    },
    Tasks: {
        "def": plain,
        "bridge": bridge(nothing),
        "object": Handler(),
        "generator": calling(generator),
        "async generator": calling(async_generator),
    },
}


@pytest.mark.parametrize(
    ("executor", "name"),
    [(executor, name) for executor, handlers in UNFIT.items() for name in handlers],
    indirect=["executor"],
)
def test_a_handler_of_the_wrong_kind_stops_the_worker_and_fails_no_job(
    name, executor, on_a_thread, enqueue, as_worker, ended, owner, watching
):
    jobs = [enqueue(max_attempts=1) for _ in range(3)]
    worker = executor.worker(
        as_worker,
        schema="jobs_email",
        queue="email",
        handler=UNFIT[type(executor)][name],
        concurrency=1,
        batch=3,
        observers=[watching],
    )
    started = on_a_thread(executor, worker)
    started.start()

    with pytest.raises(InvalidArgument, match=r"handler (returned|runs)"):
        started.tally()
    wait_until(lambda: len(watching.ends) == 3)
    assert {each.outcome for each in watching.ends} == {"released"}
    assert ended(*jobs, count=3) == [(1, "released", None)] * 3
    assert owner.rows("select lease_owner from live_job") == [(None,)] * 3


@on_tasks
def test_an_async_handler_may_be_any_function_that_returns_an_awaitable(
    on_a_thread, executor, enqueue, as_worker, ended
):
    job_id = enqueue()
    worker = AsyncWorker(
        as_worker, schema="jobs_email", queue="email", handler=lambda _: Awaitable()
    )
    started = on_a_thread(executor, worker)
    started.start()

    assert ended(job_id) == [(1, "succeeded", None)]
    assert started.stop() == Tally(succeeded=1)


@on_tasks
def test_a_handler_that_is_cancelled_by_itself_fails_its_attempt(
    executor, enqueue, drain, ended
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
def writing(executor, as_worker, effects):
    """Within a handler: write something and complete the job in one transaction."""

    async def writing(lease, conninfo=as_worker):
        connection = await executor.connect(conninfo)
        await connection.execute("insert into public.effect values (%s)", (lease.kind,))
        try:
            await executor.complete(lease, connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    return writing


def test_a_job_that_its_handler_completed_and_committed_is_completed_once(
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


def test_a_committed_completion_counts_though_the_handler_raises_later(
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
def test_after_a_rollback_the_handler_s_return_or_exception_decides(
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
def test_a_completion_that_was_not_awaited_fails_the_attempt(
    executor, enqueue, drain, ended
):
    job_id = enqueue()

    async def handler(lease):
        lease.complete(None)

    assert drain(handler) == Tally(retried=1)
    assert ended(job_id) == [(1, "retried", "completion_rolled_back")]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_completion_left_uncommitted_delays_no_other_report(
    end, executor, enqueue, start, ended, gate, writing, effects
):
    job_id = enqueue(kind="open")
    opened, is_time = [], gate()

    async def handler(lease):
        if lease.kind == "open":
            opened.append(await writing(lease))
        elif lease.kind == "end":
            await executor.until(is_time.is_set)
            await getattr(opened[0], end)()
            await opened[0].close()

    started = start(handler)
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
    assert started.stop() == Tally(succeeded=6 + is_kept, retried=not is_kept)


@pytest.mark.parametrize("is_let_pass", [True, False])
def test_a_completion_under_a_lost_lease_is_refused_and_rolled_back(
    is_let_pass,
    executor,
    enqueue,
    start,
    ended,
    supersede,
    gate,
    writing,
    effects,
    watching,
):
    job_id = enqueue(kind="stale")
    begun, is_time, seen = gate(), gate(), []

    async def handler(lease):
        begun.set()
        await executor.until(is_time.is_set)
        try:
            await writing(lease)
        except InvalidLease:
            seen.append(lease.lost)
            if is_let_pass:
                raise

    started = start(handler, concurrency=1, observers=[watching])
    wait_until(begun.is_set)
    supersede(job_id)
    is_time.set()
    wait_until(lambda: watching.ends)

    assert started.stop() == Tally(lost=1)
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


def test_a_committed_completion_counts_though_the_grace_is_over(
    executor, enqueue, start, ended, gate, writing, effects
):
    job_id = enqueue()
    is_time = gate()

    async def handler(lease):
        connection = await writing(lease)
        await connection.commit()
        await connection.close()
        await executor.until(is_time.is_set)

    started = start(handler)
    ended(job_id)

    assert started.stop(0) == Tally(succeeded=1, is_clean=False)


# Side by side.


@pytest.mark.parametrize("options", [{}, {"batch": 10}], ids=["alone", "batch"])
def test_no_more_handlers_run_than_the_concurrency(
    options, executor, enqueue, start, ended, gate, owner
):
    jobs = [enqueue() for _ in range(12)]
    lock, is_time = Lock(), gate()
    running, most = 0, 0

    async def handler(lease):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        await executor.until(is_time.is_set)
        with lock:
            running -= 1

    started = start(handler, concurrency=3, **options)
    held = "select count(*) from live_job where lease_owner is not null"
    wait_until(lambda: running == 3 and owner.value(held) == options.get("batch", 3))
    is_time.set()

    assert ended(*jobs, count=12) == [(1, "succeeded", None)] * 12
    assert most == 3
    assert owner.value("select count(*) from attempt") == 12
    assert started.stop() == Tally(succeeded=12)


def test_context_variables_do_not_leak_from_one_job_into_another(
    executor, enqueue, drain
):
    tenant = ContextVar("tenant", default="nobody")
    seen = []
    for _ in range(4):
        enqueue()

    async def handler(lease):
        seen.append(tenant.get())
        tenant.set(lease.job_id)

    drain(handler, concurrency=1)

    assert seen == ["nobody"] * 4


def test_a_handler_sees_context_variables_that_an_observer_set(enqueue, drain):
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
    executor, enqueue, start, ended, supersede, gate, watching
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
            await executor.until(is_time.is_set)

    started = start(handler, concurrency=1, observers=[watching])
    wait_until(begun.is_set)
    supersede(jobs["stale"])
    is_time.set()
    wait_until(lambda: len(watching.ends) == 4)

    assert started.stop() == Tally(succeeded=1, retried=1, failed=1, lost=1)
    assert sum(count for _, count in watching.claims) == 4
    assert {queue for queue, _ in watching.claims} == {"email"}
    assert {e.lease.job_id: (e.outcome, e.code) for e in watching.ends} == {
        jobs[kind]: end for kind, end in ends.items()
    }
    assert len(watching.ends) == 4
    assert all(0 < e.seconds < DEADLINE for e in watching.ends)


def test_running_is_entered_and_left_on_the_thread_of_the_handler(
    enqueue, drain, watching
):
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
def test_an_observer_that_suppresses_an_exception_does_not_hide_the_failure(
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
    """Raises in each of its methods."""

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


def test_a_lost_lease_is_seen_by_the_handler_and_by_observers(
    executor, configure, enqueue, start, ended, supersede, gate, watching
):
    configure(lease_seconds=1)
    job_id = enqueue()
    begun, never, seen = gate(), gate(), []

    async def handler(lease):
        assert not lease.lost
        begun.set()
        try:
            await executor.until(lambda: lease.lost or never.is_set())
        finally:
            seen.append(lease.lost)

    started = start(handler, concurrency=1, observers=[watching])
    wait_until(begun.is_set)
    # The next renewal is refused, in a third of a second.
    supersede(job_id)
    wait_until(lambda: watching.ends)

    assert started.stop() == Tally(lost=1)
    assert seen == [True]
    assert watching.losses == [job_id]
    assert ended(job_id) == SUPERSEDED
    assert [e.outcome for e in watching.ends] == ["lost"]


@pytest.mark.slow
@on_tasks  # a thread that blocks harms nobody
def test_a_lease_is_kept_alive_while_its_handler_blocks_the_loop(
    configure, enqueue, start, ended, rival
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

    started = start(handler)
    wait_until(begun.is_set)
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        assert rival.rows("select job_id from claim('email')") == []
        time.sleep(0.005)

    assert ended(job_id) == [(1, "succeeded", None)]
    assert started.stop() == Tally(succeeded=1)


# Timeouts.


@on_threads
def test_a_function_that_runs_too_long_loses_its_lease_and_harms_nothing(
    executor, start, enqueue, ended, gate, as_worker, watching, records
):
    begun, is_time, refused = gate(), gate(), gate()

    async def handler(lease):
        if lease.kind != "long":
            return
        begun.set()
        await executor.until(is_time.is_set)
        connection = await executor.connect(as_worker)
        with contextlib.suppress(InvalidLease):
            try:
                assert lease.lost
                await executor.complete(lease, connection)
            except InvalidLease:
                refused.set()
                raise
            finally:
                await connection.close()

    job_id = enqueue(kind="long")
    started = start(handler, timeout=0.1, concurrency=2, observers=[watching])

    assert ended(job_id) == [(1, "retried", "handler_timeout")]
    assert ended(enqueue()) == [(1, "succeeded", None)]
    assert 0.1 <= watching.ends[0].seconds < 10
    assert any("its handler has run for 0.1 s" in r.getMessage() for r in records())
    is_time.set()
    wait_until(refused.is_set)
    assert started.stop() == Tally(succeeded=1, retried=1)
    assert ended(job_id) == [(1, "retried", "handler_timeout")]


@on_threads
def test_a_stop_does_not_wait_for_a_handler_that_was_given_up(
    start, staying, enqueue, ended
):
    handler, _, _ = staying
    job_id = enqueue()
    started = start(handler, timeout=0.1)
    ended(job_id)

    assert started.stop() == Tally(retried=1, is_clean=False)


@on_tasks
@pytest.mark.parametrize(
    "says", [None, Fail("too_long"), pytest.param("waits", marks=pytest.mark.slow)]
)
def test_a_coroutine_that_runs_too_long_is_cancelled(says, start, enqueue, ended):
    async def handler(lease):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if says == "waits":
                await asyncio.sleep(60)
            raise says or asyncio.CancelledError from None

    job_id = enqueue()
    started = start(handler, timeout=0.1)

    code = "too_long" if isinstance(says, Fail) else "handler_timeout"
    outcome = "failed" if isinstance(says, Fail) else "retried"
    assert ended(job_id) == [(1, outcome, code)]
    started.stop(0)


# The log.


@pytest.fixture
def records(caplog):
    """All that is logged, at any level."""
    caplog.set_level(logging.DEBUG)
    return lambda name="lenso_jobs": [r for r in caplog.records if name in r.name]


def test_each_log_record_about_a_job_has_its_facts_as_fields(
    executor, enqueue, drain, ended, records
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
    assert ("never", logging.ERROR) in levels
    assert ("later", logging.ERROR) not in levels
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


def test_no_log_record_holds_a_payload_a_key_a_token_or_an_exception_s_text(
    executor, enqueue, start, ended, supersede, gate, records, caplog, owner
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
            await executor.until(is_time.is_set)
        return None

    started = start(handler, concurrency=1, observers=[Clumsy(), Broken()])
    ended(*(jobs[kind] for kind in kinds if kind != "stale"), count=6)
    wait_until(begun.is_set)
    supersede(jobs["stale"])
    is_time.set()
    wait_until(lambda: any(getattr(r, "kind", "") == "stale" for r in records()))
    started.stop()

    formatter = logging.Formatter()
    said = "\n".join(
        f"{formatter.format(r)} {r.exc_text} {r.__dict__}" for r in caplog.records
    )
    assert len(tokens) == 7
    assert "an observer failed" in said
    for secret in ("secret", "9" * 20, *tokens):
        assert secret not in said
    assert caplog.text.count("secret") == 0


@on_threads
def test_a_traceback_is_logged_and_an_error_handed_to_observers_if_asked_for(
    enqueue, drain, records, watching
):
    enqueue()
    error = ValueError("its text")

    async def handler(lease):
        raise error

    drain(handler, tracebacks=True, observers=[watching])

    (record,) = [r for r in records() if r.exc_info]
    assert record.levelno == logging.WARNING
    assert "ValueError: its text" in logging.Formatter().format(record)
    (end,) = watching.ends
    assert end.error is error
    assert "its text" not in repr(end)


@pytest.fixture
def loggers():
    """Put back which loggers are on."""
    named = logging.root.manager.loggerDict.values()
    before = {x: x.disabled for x in named if isinstance(x, logging.Logger)}
    yield
    for logger, was_disabled in before.items():
        logger.disabled = was_disabled


@pytest.mark.usefixtures("loggers")
@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_a_handler_that_configures_logging_does_not_turn_the_worker_s_log_off(
    level, executor, start, enqueue, ended, caplog
):
    caplog.set_level(level)
    job_id = enqueue()

    async def handler(lease):
        logging.config.dictConfig({"version": 1})
        raise LookupError

    started = start(handler)
    ended(job_id)
    started.stop()

    said = [r.getMessage() for r in caplog.records if r.name == "lenso_jobs.worker"]
    assert any("handler raised LookupError" in line for line in said)
    assert any(line.startswith("retried: ") for line in said)


@pytest.mark.usefixtures("loggers")
def test_a_configuration_of_logging_may_still_choose_the_worker_s_level(
    executor, start, enqueue, ended, caplog
):
    job_id = enqueue()

    async def handler(lease):
        logging.config.dictConfig(
            {"version": 1, "loggers": {"lenso_jobs.worker": {"level": "CRITICAL"}}}
        )
        raise LookupError

    started = start(handler)
    ended(job_id)
    started.stop()
    logging.getLogger("lenso_jobs.worker").setLevel(logging.NOTSET)

    assert [r for r in caplog.records if r.name == "lenso_jobs.worker"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "said"), [(1, "1 handler runs"), (2, "2 handlers run")]
)
def test_a_stopping_worker_says_at_once_and_again_what_it_waits_for(
    count, said, executor, start, enqueue, gate, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(_run, "_SAY_EVERY_SECONDS", 0.3)
    begun, is_time = [], gate()
    for _ in range(count):
        enqueue()

    async def handler(lease):
        begun.append(lease)
        await executor.until(is_time.is_set)

    def lines():
        return [r.getMessage() for r in caplog.records if "stopping" in r.getMessage()]

    started = start(handler)
    wait_until(lambda: len(begun) == count)
    assert lines() == []
    began = time.monotonic()
    started.worker.stop(30)
    wait_until(lines)
    assert time.monotonic() - began < 0.3
    wait_until(lambda: len(lines()) > 1)
    is_time.set()
    started.tally()

    assert lines()[0] == f"stopping: {said}, grace 30 s"
    assert lines()[1].startswith(f"stopping: {said}, grace ")


LOGIN = [
    'connection failed: FATAL:  password authentication failed for user "x"',
    'FATAL:  no pg_hba.conf entry for host "h"',
    'FATAL:  role "x" does not exist',
    'FATAL:  role "x" is not permitted to log in',
    "fe_sendauth: no password supplied",
    "could not translate host name",
    "connection to server failed: Connection refused",
]
SERVER = [
    "FATAL:  could not write init file: No space left on device",
    "server closed the connection unexpectedly",
    "FATAL:  the database system is starting up",
    "something else",
]


@pytest.mark.parametrize("text", [*LOGIN, *SERVER])
def test_an_outage_points_to_the_server_s_log_unless_the_login_failed(text):
    said = _part.cause(psycopg.OperationalError(text))

    assert ("the server's log says why" in said) == (text in SERVER)
    assert said.startswith("OperationalError")
    assert '"x"' not in said


def test_an_outage_names_the_code_of_a_full_disk_and_points_to_the_server_s_log():
    said = _part.cause(psycopg.errors.DiskFull("secret"))

    assert said == "DiskFull, 53100, the server's log says why"


# Options.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("schema", value) for value in ("", None, 5, "x" * 64, "a\0b")),
        *(("queue", value) for value in ("", 5, None, "two words", "x" * 129)),
        *(("handler", value) for value in (None, "module:function", 5, Observer)),
        *(("handler", value) for value in (lambda: None, lambda _a, _b: None)),
        *(("concurrency", value) for value in (0, 1001, 2.0, True, "4")),
        *(("batch", value) for value in (0, 1001, "10", True, 1.5)),
        *(("caller", value) for value in ("", 5, "x" * 64)),
        *(("grace", value) for value in (-0.1, None, True, timedelta(seconds=1))),
        *(("on_shutdown", value) for value in ("retry", None, 1)),
        *(("timeout", value) for value in (0, -1, True, "600")),
        *(("tracebacks", value) for value in (None, 1)),
        *(("observers", value) for value in (None, Observer(), [Observer], ["x"])),
        *(("prepare_threshold", value) for value in (-1, "5", 1.0, True)),
        *(("conninfo_or_pool", value) for value in (None, 5, "", b"dbname=x")),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_its_name(name, value, executor):
    options = {
        "conninfo_or_pool": "dbname=nowhere",
        "schema": "jobs_email",
        "queue": "email",
        "handler": print,
    } | {name: value}

    with pytest.raises(InvalidArgument, match=f"^{name} (must|is) "):
        executor.worker(options.pop("conninfo_or_pool"), **options)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({}, "queue must be 1 to 128 characters"),
        ({"queues": {}}, "queues must be a mapping such as"),
        ({"queues": ["email"]}, "queues must be a mapping such as"),
        ({"queues": {"two words": 1}}, "queues must have names as keys"),
        ({"queues": {"email": 0}}, "queues: each concurrency must be a whole number"),
        ({"queues": {"email": 1}, "queue": "email"}, "queues must be given alone"),
        ({"queues": {"email": 1}, "concurrency": 4}, "queues must be given alone"),
    ],
)
def test_queues_that_cannot_be_worked_are_refused(options, fault):
    with pytest.raises(InvalidArgument, match=f"^{fault}"):
        Worker("dbname=nowhere", schema="jobs_email", handler=print, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("handler", lambda _lease, _retries=3: None),
        ("handler", lambda *_: None),
        ("handler", given_a_connection(lambda _lease, _connection: None)),
        ("batch", 1),
        ("caller", "ä" * 31),
        ("grace", float("inf")),
        ("timeout", None),
        ("timeout", 0.1),
        ("observers", ()),
        ("prepare_threshold", 0),
        ("prepare_threshold", 10_000),
    ],
)
def test_an_option_at_its_limit_is_accepted(name, value, executor):
    options = {
        "schema": "jobs_email",
        "queue": "email",
        "handler": print,
        name: value,
    }

    assert executor.worker("dbname=nowhere", **options)


@pytest.mark.parametrize("grace", [-1, "1", float("nan"), True])
def test_a_grace_out_of_range_is_refused_by_its_name(grace, executor):
    worker = executor.worker(
        "dbname=x", schema="jobs_email", queue="email", handler=print
    )

    with pytest.raises(InvalidArgument, match="grace"):
        worker.stop(grace)


# A life.


def test_a_worker_runs_once(start, executor):
    started = start(nothing)
    assert started.stop() == Tally()

    with pytest.raises(RuntimeError, match="once"):
        executor.run(started.worker)


def test_a_worker_that_was_stopped_before_it_ran_claims_nothing(start, enqueue, owner):
    enqueue()
    started = start(nothing, begins=False)
    started.worker.stop()
    began = time.monotonic()
    started.start()

    assert started.tally() == Tally()
    assert time.monotonic() - began < 5
    assert owner.value("select attempt from live_job") == 0


def test_a_stopped_worker_lets_running_handlers_end_and_claims_nothing(
    start, enqueue, ended, owner, staying
):
    first = enqueue()
    handler, begun, is_time = staying
    started = start(handler)
    wait_until(begun.is_set)
    started.worker.stop()
    wait_until(lambda: not started.worker._run.jobs._is_open)
    wait_until(lambda: not any(t.name.endswith("email claims") for t in threads()))
    second = enqueue()
    assert started.is_running()
    is_time.set()

    assert started.tally() == Tally(succeeded=1)
    assert ended(first) == [(1, "succeeded", None)]
    assert owner.value("select attempt from live_job where job_id = %s", second) == 0


def test_stop_may_be_called_from_a_signal_handler(
    executor, enqueue, as_worker, gate, ended
):
    job_id = enqueue()
    begun, is_time = Event(), Event()

    async def handler(lease):
        begun.set()
        await executor.until(is_time.is_set)

    worker = executor.worker(
        as_worker, schema="jobs_email", queue="email", handler=executor.adapt(handler)
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
        tally = executor.run(worker)  # in the main thread, which gets the signals
    finally:
        is_time.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)

    assert tally == Tally(succeeded=1)
    assert ended(job_id) == [(1, "succeeded", None)]


@pytest.mark.parametrize("between", [0, 0.15])
def test_of_two_calls_of_stop_the_shorter_grace_counts(
    between, start, enqueue, ended, staying
):
    job_id = enqueue()
    handler, begun, _ = staying
    started = start(handler)
    wait_until(begun.is_set)
    began = time.monotonic()
    started.worker.stop(60)
    Event().wait(between)

    assert started.stop(0.1) == Tally(handed_back=1, is_clean=False)
    assert time.monotonic() - began < 5
    assert ended(job_id) == [(1, "retried", "worker_shutdown")]


@on_threads
def test_a_longer_grace_does_not_put_off_the_end(start, enqueue, staying):
    enqueue()
    handler, begun, _ = staying
    started = start(handler)
    wait_until(begun.is_set)
    started.worker.stop(0.1)

    assert started.stop(60).handed_back == 1


def test_jobs_whose_handlers_run_after_the_grace_are_handed_back(
    executor, start, enqueue, gate, ended, watching, observing
):
    jobs = [enqueue() for _ in range(2)]
    begun, is_time, seen = [], gate(), []

    async def handler(lease):
        begun.append(lease)
        await executor.until(is_time.is_set)
        seen.append(lease.lost)

    started = start(handler, observers=[watching])
    wait_until(lambda: len(begun) == 2)

    assert started.stop(0) == Tally(handed_back=2, is_clean=False)
    assert all(lease.lost for lease in begun)
    assert ended(*jobs, count=2) == [(1, "retried", "worker_shutdown")] * 2
    assert {observing.inspect(job_id).status for job_id in jobs} == {"queued"}
    assert [(e.outcome, e.code) for e in watching.ends] == [
        ("handed_back", "worker_shutdown")
    ] * 2


def test_with_lapse_jobs_whose_handlers_run_after_the_grace_keep_their_leases(
    start, enqueue, watching, observing, staying
):
    job_id = enqueue()
    handler, begun, _ = staying
    started = start(handler, observers=[watching], on_shutdown="lapse")
    wait_until(begun.is_set)

    assert started.stop(0) == Tally(lost=1, is_clean=False)
    assert [(e.outcome, e.code) for e in watching.ends] == [("lost", None)]
    assert observing.inspect(job_id).status == "running"


# Jobs that were not begun when the worker stops.

WAITING_FOR_A_LOCK = """
    select from pg_stat_activity where datname = current_database()
        and usename = 'email-worker' and wait_event_type = 'Lock'
"""


@pytest.fixture
def unbegun(executor, start, enqueue, gate):
    """A worker that runs one job and holds three more; each has one attempt."""

    def unbegun(**options):
        is_time, begun = gate(), []

        async def handler(lease):
            begun.append(lease.job_id)
            await executor.until(is_time.is_set)

        jobs = [enqueue(max_attempts=1) for _ in range(4)]
        started = start(handler, concurrency=1, batch=10, **options)
        wait_until(lambda: begun and started.worker._run.jobs.waiting("email") == 3)
        return started, jobs, is_time, begun

    return unbegun


@pytest.fixture
def released(ended, owner):
    """Insist that jobs were released and can be claimed again."""

    def released(*jobs):
        assert ended(*jobs, count=len(jobs)) == [(1, "released", None)] * len(jobs)
        assert owner.rows(
            "select lease_owner, attempt, max_attempts from live_job"
            " where job_id = any (%s)",
            list(jobs),
        ) == [(None, 1, 2)] * len(jobs)

    return released


@pytest.mark.parametrize("on_shutdown", ["return", "lapse"])
def test_jobs_that_were_not_begun_are_released_at_once(
    on_shutdown, unbegun, released, ended, watching, caplog
):
    caplog.set_level(logging.INFO)
    started, (running, *waiting), is_time, begun = unbegun(
        on_shutdown=on_shutdown, observers=[watching]
    )

    started.worker.stop()
    released(*waiting)
    assert started.is_running()
    is_time.set()

    assert started.tally() == Tally(succeeded=1, released=3)
    assert begun == [running]
    assert ended(running) == [(1, "succeeded", None)]
    ends = [(e.outcome, e.code, e.seconds) for e in watching.ends]
    assert ends.count(("released", None, 0)) == 3
    about = [r for r in caplog.records if r.getMessage().startswith("released: ")]
    assert {r.job_id for r in about} == set(map(str, waiting))


def test_a_stop_without_grace_hands_back_running_jobs_and_releases_the_others(
    unbegun, released, ended
):
    started, (running, *waiting), _, begun = unbegun()

    tally = started.stop(0)

    # The running job is handed back, and that was its last attempt.
    assert tally == Tally(failed=1, released=3, is_clean=False)
    released(*waiting)
    assert ended(running) == [(1, "failed", "worker_shutdown")]
    assert begun == [running]


def test_a_stop_without_grace_that_gives_up_no_handler_is_clean(
    start, enqueue, released, connect, owner
):
    holder = connect()
    jobs = [enqueue(max_attempts=1) for _ in range(2)]
    holder.execute("begin; lock table live_job in access exclusive mode")
    started = start(nothing)
    wait_until(lambda: owner.rows(WAITING_FOR_A_LOCK))

    started.worker.stop(0)
    wait_until(lambda: not started.worker._run.jobs._is_open)
    holder.execute("rollback")

    # What the claim on its way leased.
    assert started.tally() == Tally(released=2)
    released(*jobs)


@on_threads
def test_an_interrupt_releases_jobs_that_were_not_begun(
    executor, as_worker, enqueue, released, ended, staying
):
    jobs = [enqueue(max_attempts=1) for _ in range(3)]
    handler, begun, _ = staying
    worker = Worker(
        as_worker,
        schema="jobs_email",
        queue="email",
        handler=executor.adapt(handler),
        concurrency=1,
        batch=10,
    )

    def interrupt():
        wait_until(lambda: begun.is_set() and worker._run.jobs.waiting("email") == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        worker.run()
    thread.join()

    released(*jobs[1:])
    assert ended(jobs[0]) == [(1, "failed", "worker_shutdown")]


@pytest.mark.parametrize("end", ["cancel", "close", "block"])
def test_tasks_that_have_not_begun_are_released_and_never_begin(
    end, as_worker, enqueue, released, gate, ended
):
    """However the loop keeps the worker's tasks from their first step."""
    jobs = [enqueue(max_attempts=1) for _ in range(3)]
    begun, is_time = [], gate()

    async def handler(lease):
        begun.append(lease.job_id)
        # The next tasks are made, and wait for the loop.
        wait_until(lambda: worker._run.jobs.waiting("email") == 2)
        if end == "cancel":
            for task in asyncio.all_tasks():
                task.cancel()
        elif end == "block":
            worker.stop(0)
            is_time.wait(20)
        else:
            loop.stop()
        await asyncio.sleep(DEADLINE)

    worker = AsyncWorker(
        as_worker,
        schema="jobs_email",
        queue="email",
        handler=handler,
        concurrency=1 if end == "close" else 4,
        batch=10,
    )
    loop = asyncio.new_event_loop()
    running = loop.create_task(worker.run())
    if end == "cancel":
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(running)
        loop.close()
    elif end == "block":
        thread = Thread(target=lambda: (released(*jobs[1:]), is_time.set()))
        thread.start()
        tally = loop.run_until_complete(running)
        thread.join()
        loop.close()
        assert tally == Tally(failed=1, released=2, is_clean=False)
    else:
        with contextlib.suppress(RuntimeError):
            loop.run_until_complete(running)
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False
        loop.close()

    released(*jobs[1:])
    assert ended(jobs[0]) == [(1, "failed", "worker_shutdown")]
    assert begun == jobs[:1]


@pytest.mark.slow
@on_threads
def test_a_waiting_job_whose_lease_runs_short_is_released(
    executor, configure, start, enqueue, gate, ended, monkeypatch
):
    configure(lease_seconds=2)
    jobs = [enqueue(max_attempts=1) for _ in range(2)]
    begun, is_time = gate(), gate()

    async def handler(lease):
        begun.set()
        await executor.until(is_time.is_set)

    def failing(*_):
        raise psycopg.OperationalError

    # No renewal gets through; the lease counts as lost 1 s before its end.
    monkeypatch.setattr(_lease, "MARGIN", 0.5)
    monkeypatch.setattr(_connection.WorkerJobs, "renew_many", failing)
    started = start(handler, concurrency=1, batch=10)
    wait_until(begun.is_set)

    assert ended(jobs[1])[0] == (1, "released", None)
    is_time.set()
    assert started.stop(0).released


@pytest.mark.slow
@on_threads
def test_a_job_that_was_released_100_times_is_handed_back(
    start, ended, enqueue, claim, rival, staying
):
    first, often = enqueue(), enqueue()
    held = claim(session=rival)
    released = "select (release(job_id, lease_token)).status from claim('email')"
    assert [rival.value(released) for _ in range(100)] == ["queued"] * 100
    assert rival.value("select (release(%s, %s)).status", *held) == "queued"
    handler, begun, is_time = staying
    started = start(handler, concurrency=1, batch=2)
    wait_until(
        lambda: begun.is_set() and started.worker._run.jobs.waiting("email") == 1
    )

    started.worker.stop()
    ended(often, count=101)
    is_time.set()

    assert started.tally() == Tally(succeeded=1, handed_back=1)
    assert ended(often)[-1] == (101, "retried", "worker_shutdown")
    assert ended(first)[-1] == (2, "succeeded", None)


@pytest.mark.slow
@on_threads
def test_a_job_that_was_released_100_times_fails_with_the_code_of_its_release(
    drain, ended, enqueue, rival
):
    job_id = enqueue(kind="newer", max_attempts=1)
    released = "select (release(job_id, lease_token)).status from claim('email')"
    assert [rival.value(released) for _ in range(100)] == ["queued"] * 100

    assert drain({"older": lambda _: None}) == Tally(failed=1)

    assert ended(job_id)[-1] == (101, "failed", "unknown_kind")


def test_a_stopped_worker_leaves_no_thread_and_no_session(start, enqueue, ended, owner):
    def here():
        return [t for t in threads() if "lenso-jobs" in t.name]

    started = start(nothing)
    ended(enqueue())
    assert here()
    started.stop()

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
def test_a_cancelled_run_hands_back_the_jobs_of_cancelled_handlers(
    executor, as_worker, enqueue, ended
):
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
def test_a_task_is_cancelled_as_soon_as_the_grace_is_over(executor, as_worker, enqueue):
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
def test_an_interrupted_run_hands_back_running_jobs(
    executor, as_worker, enqueue, ended, staying
):
    job_id = enqueue()
    handler, begun, _ = staying
    worker = Worker(
        as_worker, schema="jobs_email", queue="email", handler=executor.adapt(handler)
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
def test_a_handler_that_ignores_its_cancellation_has_a_second_at_most(
    executor, start, enqueue, ended, naps
):
    job_id = enqueue()
    begun = Event()

    async def handler(lease):
        begun.set()
        for _ in range(naps):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    started = start(handler)
    wait_until(begun.is_set)

    if naps == 3:
        assert started.stop(0) == Tally(succeeded=1, is_clean=False)
        assert ended(job_id) == [(1, "succeeded", None)]
    else:
        assert started.stop(0) == Tally(handed_back=1, is_clean=False)
        assert ended(job_id) == [(1, "retried", "worker_shutdown")]


# Refusals.


@on_threads
def test_a_queue_that_is_not_declared_ends_the_run_at_once(start):
    began = time.monotonic()
    started = start(nothing, queue="unknown")

    with pytest.raises(InvalidQueue):
        started.tally()
    assert time.monotonic() - began < 5


@on_threads
@pytest.mark.parametrize("role", ["accounts", "operations", "stranger"])
def test_a_role_that_is_not_a_worker_ends_the_run_at_once(role, start, conninfo):
    began = time.monotonic()
    started = start(nothing, make_conninfo(conninfo, user=role))

    with pytest.raises((Unauthorized, psycopg.Error)) as caught:
        started.tally()
    assert caught.value.sqlstate == "42501"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("what", ["queue", "worker"])
def test_a_refused_claim_ends_the_run_once_running_handlers_have_ended(
    what, start, enqueue, ended, owner, configure, watching, staying
):
    job_id = enqueue()
    handler, begun, is_time = staying
    started = start(handler, observers=[watching])
    wait_until(begun.is_set)
    if what == "queue":
        # configure would refuse it while there is a job.
        owner.execute("delete from queue where queue = 'email'")
    else:
        configure(worker_instances=["spare-worker"])
    owner.execute("select _queue_wake('email')")
    wait_until(lambda: not started.worker._run.jobs._is_open)
    assert started.is_running()
    is_time.set()

    with pytest.raises(InvalidQueue if what == "queue" else Unauthorized):
        started.tally()
    assert [e.outcome for e in watching.ends] == ["succeeded"]
    assert ended(job_id) == [(1, "succeeded", None)]


@on_threads
@pytest.mark.parametrize("end", ["cancel", "terminate"])
@pytest.mark.parametrize("call", ["claim", "report"])
def test_a_cancelled_or_terminated_call_is_repeated(
    call, end, executor, start, enqueue, ended, owner, connect
):
    job_id = enqueue()
    holder = connect()
    table = {"claim": "live_job", "report": "attempt"}[call]
    holder.execute(f"begin; lock table {table} in access exclusive mode")
    started = start(nothing)
    broken_off = (
        f"select pg_{end}_backend(pid) from pg_stat_activity"
        " where usename = 'email-worker' and datname = current_database()"
        " and wait_event_type = 'Lock'"
    )
    wait_until(lambda: owner.rows(broken_off))
    holder.execute("rollback")

    assert ended(job_id) == [(1, "succeeded", None)]
    assert started.stop() == Tally(succeeded=1)


@pytest.mark.slow
@on_threads
def test_an_outage_is_logged_once_and_the_worker_connects_again(
    start, conninfo, watching, caplog, monkeypatch, enqueue, ended, owner
):
    job_id = enqueue()
    connect, failures = psycopg.Connection.connect.__func__, []

    def failing(cls, *arguments, **parameters):
        if cls is psycopg.Connection and len(failures) < 5:
            failures.append(parameters)
            raise psycopg.OperationalError("secret-text")
        return connect(cls, *arguments, **parameters)

    monkeypatch.setattr(psycopg.Connection, "connect", classmethod(failing))
    started = start(
        nothing,
        make_conninfo(conninfo, user="email-worker", password="secret-password"),
        observers=[watching],
    )

    assert ended(job_id) == [(1, "succeeded", None)]
    # Once all three connections are there.
    wait_until(lambda: len(watching.states) == 2)
    assert started.stop() == Tally(succeeded=1)
    lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 2, [r.getMessage() for r in lines]
    assert "secret" not in caplog.text
    assert [event for event, _ in watching.states] == ["disconnected", "reconnected"]


@on_threads
def test_a_worker_that_reaches_no_database_can_be_stopped(start, tmp_path):
    started = start(nothing, make_conninfo(host=str(tmp_path), dbname="nowhere"))
    began = time.monotonic()

    assert started.stop() == Tally()
    assert time.monotonic() - began < 5


# Until idle.


@pytest.fixture
def until_idle(executor, as_worker):
    """Run a worker until it is idle; return its tally and how long it took."""

    def until_idle(handler, **options):
        options = {"schema": "jobs_email", "queue": "email"} | options
        worker = executor.worker(as_worker, handler=executor.adapt(handler), **options)
        began = time.monotonic()
        run = worker.run(until_idle=True)
        tally = asyncio.run(run) if asyncio.iscoroutine(run) else run
        return tally, time.monotonic() - began

    return until_idle


def test_a_run_until_idle_ends_once_nothing_is_due(until_idle, enqueue, ended, caplog):
    caplog.set_level(logging.INFO)
    jobs = [enqueue() for _ in range(7)]

    tally, seconds = until_idle(nothing, concurrency=2)

    assert tally == Tally(succeeded=7)
    assert seconds < 5
    assert ended(*jobs, count=7) == [(1, "succeeded", None)] * 7
    assert "stopping" not in caplog.text
    assert until_idle(nothing)[0] == Tally()


def test_a_run_until_idle_takes_what_its_handlers_enqueue(
    until_idle, enqueue, executor
):
    enqueue(kind="2")

    async def handler(lease):
        if int(lease.kind):
            # The other handler has nothing to do, and the worker looks meanwhile.
            naps = time.monotonic() + 0.2
            await executor.until(lambda: time.monotonic() > naps)
            for _ in range(2):
                enqueue(kind=str(int(lease.kind) - 1))

    assert until_idle(handler, concurrency=2)[0] == Tally(succeeded=7)


def test_a_run_until_idle_leaves_what_is_due_later(
    until_idle, enqueue, owner, configure
):
    configure(retry_base_seconds=60, retry_max_seconds=60)
    enqueue(kind="again")
    (when,) = owner.rows("select clock_timestamp() + interval '1 h'")[0]
    enqueue(available_at=when)

    async def handler(lease):
        raise Retry("later")

    assert until_idle(handler)[0] == Tally(retried=1)
    assert owner.value("select count(*) from live_job") == 2


@on_threads
def test_a_run_until_idle_does_not_wait_for_other_workers_jobs(
    until_idle, enqueue, claim, rival
):
    enqueue()
    claim(session=rival)

    tally, seconds = until_idle(nothing)

    assert tally == Tally()
    assert seconds < 5


@pytest.mark.slow
@on_threads
def test_a_run_until_idle_gives_up_on_a_job_that_another_session_locks(
    until_idle, enqueue, hold
):
    hold(enqueue())

    tally, seconds = until_idle(nothing)

    assert tally == Tally()
    assert 1 < seconds < 10


@on_threads
def test_a_run_until_idle_can_be_stopped(
    on_a_thread, executor, as_worker, enqueue, gate
):
    for _ in range(3):
        enqueue()
    begun, is_time = gate(), gate()

    def handler(lease):
        begun.set()
        is_time.wait(20)

    worker = Worker(
        as_worker, schema="jobs_email", queue="email", handler=handler, concurrency=1
    )
    answer = on_a_thread(SimpleNamespace(run=lambda w: w.run(until_idle=True)), worker)
    answer.start()
    wait_until(begun.is_set)
    worker.stop()
    is_time.set()

    assert answer.tally() == Tally(succeeded=1)


@pytest.mark.parametrize("queue", ["unknown", "email"])
def test_a_run_until_idle_raises_a_refusal(queue, until_idle, owner):
    if queue == "email":
        owner.execute("delete from caller where caller = 'email-worker'")

    with pytest.raises(InvalidQueue if queue == "unknown" else Unauthorized):
        until_idle(nothing, queue=queue)


# Waiting.


@pytest.fixture
def idle(monkeypatch):
    """Wait until the worker means to sleep for as long as it ever does."""
    naps = []
    sleep_until = _connection.WorkerWaiter.sleep_until

    def noted(waiter, alarm, seconds):
        naps.append((seconds, waiter.longest))
        sleep_until(waiter, alarm, seconds)

    monkeypatch.setattr(_connection.WorkerWaiter, "sleep_until", noted)
    monkeypatch.setattr(
        _claims, "pauses", lambda longest: chain([0.02], repeat(longest))
    )

    def idle():
        wait_until(lambda: naps and naps[-1][0] == naps[-1][1])
        naps.clear()

    return idle


NAME = f"lenso-jobs {gethostname()[:40]}:{os.getpid()}"
LOCKS = """
    select count(*) from pg_locks as l join pg_database as d on d.oid = l.database
    where d.datname = current_database() and l.locktype = 'advisory' and l.granted
"""


SESSIONS = """
    select count(*) from pg_stat_activity
    where datname = current_database() and application_name = %s
"""


def test_a_busy_queue_starves_no_other_and_goes_on_as_soon_as_it_has_room(
    start, staying, enqueue, ended, idle, owner
):
    stays, begun, is_time = staying

    async def handler(lease):
        if lease.queue == "email":
            await stays(lease)

    first = enqueue()
    started = start(handler, queue=None, queues={"email": 1, "slow": 1})
    wait_until(begun.is_set)
    second = enqueue()

    idle()
    assert owner.value(LOCKS) == 1  # it waits for the queue that has room
    assert ended(enqueue(queue="slow")) == [(1, "succeeded", None)]
    assert owner.value(SESSIONS, NAME) == 3
    idle()
    began = time.monotonic()
    is_time.set()

    assert ended(first, second, count=2) == [(1, "succeeded", None)] * 2
    idle()
    assert owner.value(LOCKS) == 2
    assert ended(enqueue(), enqueue(queue="slow"), count=2)
    assert time.monotonic() - began < 5
    assert started.stop() == Tally(succeeded=5)


def test_a_run_until_idle_works_all_its_queues(
    executor, on_a_thread, as_worker, enqueue
):
    for _ in range(2):
        enqueue(), enqueue(queue="slow")
    worker = executor.worker(
        as_worker,
        schema="jobs_email",
        queues={"slow": 1, "email": 1},
        handler=executor.adapt(nothing),
    )
    started = on_a_thread(executor, worker)
    executor.run = functools.partial(executor.run, until_idle=True)
    started.start()

    assert started.tally() == Tally(succeeded=4)


def test_an_enqueue_reaches_an_idle_worker(start, enqueue, ended, idle, caplog):
    started = start(nothing)
    idle()
    began = time.monotonic()

    assert ended(enqueue()) == [(1, "succeeded", None)]
    assert time.monotonic() - began < 5
    assert started.stop() == Tally(succeeded=1)
    assert "cannot listen" not in caplog.text


@on_threads
def test_a_job_that_falls_due_soon_is_found_in_time(start, enqueue, ended, idle, owner):
    started = start(nothing)
    idle()
    (when,) = owner.rows("select clock_timestamp() + interval '300 ms'")[0]
    job_id = enqueue(available_at=when)

    assert ended(job_id) == [(1, "succeeded", None)]
    late = owner.value("select extract(epoch from clock_timestamp() - %s)", when)
    assert late < 5
    started.stop()


@pytest.mark.slow
@on_threads
def test_a_retry_is_found_when_it_falls_due(
    start, configure, enqueue, ended, idle, owner
):
    configure(retry_base_seconds=1, retry_max_seconds=1)
    job_id = enqueue()

    async def handler(lease):
        if lease.attempt == 1:
            raise Retry("down")

    started = start(handler)

    assert ended(job_id, count=2) == [(1, "retried", "down"), (2, "succeeded", None)]
    assert (
        owner.value(
            "select extract(epoch from b.ended_at - a.retry_at) from attempt as a,"
            " attempt as b where (a.attempt, b.attempt) = (1, 2)"
        )
        < 1
    )
    started.stop()


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
    """Return how many queries idle workers send in a while, and how long that was."""

    def asked():
        before = len(wire.sent("Query", "Execute"))
        began = time.monotonic()
        Event().wait(1.6)
        count = len(wire.sent("Query", "Execute")) - before
        assert before  # the trace works
        return count, time.monotonic() - began

    return asked


@pytest.mark.slow
@on_threads
def test_a_worker_that_listens_sends_no_query_while_it_is_idle(start, idle, asked):
    started = start(nothing)
    idle()

    count, _ = asked()

    assert count <= 1
    started.stop()


@pytest.mark.slow
@on_threads
def test_with_notify_false_a_worker_looks_every_second_and_logs_why_once(
    start, configure, enqueue, ended, idle, asked, caplog
):
    configure(notify=False)
    started = start(nothing)
    idle()

    count, seconds = asked()
    began = time.monotonic()
    job_id = enqueue()

    assert 1 <= count <= seconds + 1
    assert ended(job_id) == [(1, "succeeded", None)]
    assert time.monotonic() - began < 3
    assert started.stop() == Tally(succeeded=1)
    lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert lines[0].getMessage() == (
        "queue email is looked at every 1 s: the document says notify: false"
    )


@on_threads
@pytest.mark.parametrize("threshold", [None, 2])
def test_statements_are_prepared_unless_prepare_threshold_is_none(
    threshold, start, enqueue, ended, wire
):
    jobs = []
    started = start(nothing, concurrency=1, prepare_threshold=threshold)
    for n in range(8):
        jobs.append(enqueue())
        ended(*jobs, count=n + 1)
    started.stop()

    names = {line[4].split()[0] for line in wire.sent("Parse")}
    assert names
    assert (names == {'""'}) == (threshold is None)


# Where to connect.


@pytest.mark.parametrize("given", ["conninfo", "url", "pool"])
def test_a_worker_connects_with_a_string_or_as_a_pool_does(
    given, executor, start, conninfo, enqueue, ended, owner
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
        source = executor.pool(  # need not be open
            make_conninfo(conninfo, user="accounts"),
            open=False,
            kwargs={
                "user": "email-worker",
                "application_name": "given",
                "row_factory": psycopg.rows.dict_row,
                "autocommit": False,
            },
        )

    started = start(nothing, source)

    assert ended(job_id) == [(1, "succeeded", None)]
    assert owner.rows(
        "select application_name, count(*) from pg_stat_activity"
        " where usename = 'email-worker' and datname = current_database() group by 1"
    ) == [(NAME if given == "conninfo" else "given", 3)]
    assert started.stop() == Tally(succeeded=1)
    assert owner.value("select worker from attempt") == "email-worker"


SECRET_URL = "postgresql+psycopg://someone:secret@host/db"


@pytest.mark.parametrize(
    "conninfo",
    [
        SECRET_URL,
        "mysql://someone:secret@host/db",
        "host=h password=secret dbname",
        "postgresql://someone:sec@ret@host/db",
        "postgresql://someone:secret@host:port/db",
    ],
)
@pytest.mark.parametrize("as_pool", [False, True], ids=["string", "pool"])
def test_a_connection_string_that_cannot_work_is_refused_and_not_quoted(
    conninfo, as_pool, executor
):
    source = executor.pool(conninfo, open=False) if as_pool else conninfo

    with pytest.raises(InvalidArgument, match=r"^conninfo_or_pool ") as caught:
        executor.worker(source, schema="jobs_email", queue="email", handler=plain)

    assert "sec" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_function_of_a_pool_that_returns_a_bad_connection_string_ends_the_run(start):
    started = start(nothing, SimpleNamespace(conninfo=lambda: SECRET_URL, kwargs=None))

    with pytest.raises(InvalidArgument, match=r"^conninfo_or_pool ") as caught:
        started.tally()

    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None


class Token(psycopg.Connection):
    """Connects with what a cloud provider gives out."""

    given = 0

    @classmethod
    def connect(cls, conninfo="", **kwargs):
        cls.given += 1
        return super().connect(conninfo, **kwargs | {"user": "email-worker"})


def configure(connection):
    connection.execute("set application_name = 'configured'")
    connection.commit()


def sloppy(connection):
    """Leave everything as a worker cannot use it."""
    connection.execute("set application_name = 'configured'")
    connection.commit()
    connection.autocommit = False
    connection.row_factory = psycopg.rows.dict_row
    connection.cursor_factory = psycopg.ClientCursor


def never(*_):
    raise AssertionError("not of a connection of the pool")


@pytest.mark.parametrize("kind", [ConnectionPool, NullConnectionPool])
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"connection_class": Token}, NAME),
        ({"configure": configure}, "configured"),
        ({"configure": sloppy}, "configured"),
        ({"connection_class": Token, "configure": configure}, "configured"),
        ({"check": never, "reset": never, "reconnect_failed": never}, None),
    ],
    ids=["class", "configure", "sloppy", "both", "callbacks"],
)
def test_a_worker_uses_the_connection_class_and_the_configure_of_its_pool(
    kind, options, name, executor, start, conninfo, enqueue, ended, owner
):
    user = {} if "connection_class" in options else {"user": "email-worker"}
    least = 1 if kind is ConnectionPool else 0
    pool = kind(make_conninfo(conninfo, **user), min_size=least, open=False, **options)

    started = start(nothing, pool)

    assert ended(enqueue()) == [(1, "succeeded", None)]
    assert owner.rows(
        "select application_name, count(*) from pg_stat_activity"
        " where usename = 'email-worker' and datname = current_database() group by 1"
    ) == [(name or NAME, 3)]
    assert started.stop() == Tally(succeeded=1)


@pytest.mark.slow
def test_a_pool_s_function_that_fails_for_a_while_is_called_again(
    start, as_worker, enqueue, ended, watching
):
    calls = []

    def failing(connection):
        calls.append(connection)
        if len(calls) < 3:
            raise OSError("no token")

    start(
        nothing,
        ConnectionPool(as_worker, open=False, configure=failing),
        observers=[watching],
    )

    assert ended(enqueue()) == [(1, "succeeded", None)]
    assert ("disconnected", psycopg.OperationalError) in watching.states
    assert all(connection.closed for connection in calls[:2])


def test_a_pool_s_configure_that_leaves_a_transaction_open_ends_the_run(
    start, as_worker
):
    pool = ConnectionPool(
        as_worker,
        open=False,
        kwargs={"autocommit": True},
        configure=lambda connection: connection.execute("begin"),
    )

    with pytest.raises(InvalidArgument, match="configure must commit"):
        start(nothing, pool).tally()


class AsyncToken(psycopg.AsyncConnection):
    pass


async def configure_async(connection):
    pass


async def where_to_connect():
    return ""


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"connection_class": AsyncToken}, "connection_class AsyncToken"),
        ({"configure": configure_async}, "configure"),
    ],
)
def test_a_pool_that_connects_for_asyncio_only_is_refused_with_what_to_do(
    options, what, executor, as_worker
):
    pool = AsyncConnectionPool(as_worker, open=False, **options)

    with pytest.raises(InvalidArgument) as caught:
        executor.worker(pool, schema="jobs_email", queue="email", handler=plain)

    assert f"the pool's {what}: give it" in str(caught.value)
    assert "ConnectionPool(open=False)" in str(caught.value)


@pytest.mark.parametrize("part", ["conninfo", "kwargs"])
@pytest.mark.parametrize(
    "function", [where_to_connect, functools.partial(where_to_connect)]
)
def test_a_pool_whose_parts_must_be_awaited_is_refused(function, part, executor):
    pool = SimpleNamespace(**{"conninfo": "", "kwargs": None} | {part: function})

    with pytest.raises(InvalidArgument, match="coroutine functions: give it"):
        executor.worker(pool, schema="jobs_email", queue="email", handler=plain)


@pytest.mark.slow
def test_a_worker_takes_no_connection_from_an_exhausted_pool(
    on_a_thread, executor, as_worker, configure, enqueue, owner, gate
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

    if executor.worker is Worker:
        with ConnectionPool(as_worker, min_size=2, max_size=2, open=True) as pool:

            def handler(lease):
                if lease.job_id in jobs[:2]:
                    with pool.connection():
                        wait_until(over.is_set)

            worker = Worker(pool, schema="jobs_email", queue="email", handler=handler)
            started = on_a_thread(executor, worker)
            started.start()
            thread.start()
            wait_until(lambda: len(owner.rows("select from attempt")) == 4)
            tally = started.stop()
    else:

        async def main():
            async with AsyncConnectionPool(
                as_worker, min_size=2, max_size=2, open=False
            ) as pool:

                async def handler(lease):
                    if lease.job_id in jobs[:2]:
                        async with pool.connection():
                            await executor.until(over.is_set)

                worker = AsyncWorker(
                    pool, schema="jobs_email", queue="email", handler=handler
                )
                task = asyncio.create_task(worker.run())
                thread.start()
                await executor.until(
                    lambda: len(owner.rows("select from attempt")) == 4
                )
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
    start, role, conninfo, enqueue, ended, owner
):
    good, bad = enqueue(), enqueue(kind="bad")
    login = role(member_of=("email-worker", "spare-worker"))

    async def handler(lease):
        if lease.kind == "bad":
            raise Retry("down")

    started = start(handler, make_conninfo(conninfo, user=login), caller="spare-worker")

    assert ended(good, bad, count=2) == [(1, "succeeded", None), (1, "retried", "down")]
    assert started.stop() == Tally(succeeded=1, retried=1)
    assert owner.rows("select distinct worker from attempt") == [("spare-worker",)]


@on_threads
def test_a_caller_that_the_login_is_not_a_member_of_ends_the_run(start, role, conninfo):
    login = role(member_of=("email-worker",))
    started = start(nothing, make_conninfo(conninfo, user=login), caller="spare-worker")

    with pytest.raises((Unauthorized, psycopg.Error)) as caught:
        started.tally()
    assert caught.value.sqlstate == "42501"
