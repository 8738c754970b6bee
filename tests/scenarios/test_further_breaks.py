"""Sessions, observers, files and loops that break beneath a worker or a wait: it goes on,
no verdict is lost, and nothing is kept for a handler that is gone."""

import asyncio
import contextlib
import errno
import os
import resource
import threading
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import _waiting
from lenso_jobs.worker import AsyncWorker, Fail, Observer, _engine, _line


@pytest.fixture(params=[0, 1], ids=["Worker", "AsyncWorker"])
def crew(crews, request):
    return crews[request.param]


# Sessions.


class Telling(Observer):
    """Keeps why the database gave no answers."""

    def __init__(self):
        self.errors = []

    def disconnected(self, error):
        self.errors.append(error)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["live_job", "attempt"])
def test_a_session_that_the_server_ends_for_its_long_transaction_is_replaced(
    table, crew, hire, enqueue, attempts, connect, owner, conninfo, until
):
    if owner.info.server_version < 170000:
        pytest.skip("this server has no transaction_timeout")
    source = make_conninfo(
        conninfo, user="email-worker", options="-c transaction_timeout=200"
    )
    job = enqueue(crew.queue)
    holder = connect()
    seen = set()

    def have_been_replaced():
        waiting = owner.rows(
            "select pid from pg_stat_activity where usename = 'email-worker'"
            " and %s = any (pg_blocking_pids(pid))",
            holder.info.backend_pid,
        )
        seen.update(waiting)
        return len(seen) > 1

    async def handler(crew, lease):
        pass

    holder.execute(f"begin; lock table {table} in access exclusive mode")
    hired = hire(crew, handler, source)
    until(have_been_replaced)
    holder.rollback()

    assert attempts(job, count=1) == [(1, "succeeded", None)]
    assert hired.stop().succeeded == 1


def test_a_session_that_cannot_be_asked_how_it_is_set_is_closed(
    crews, hire, enqueue, attempts, monkeypatch
):
    crew, _ = crews
    opened, make = [], _line.WorkersJobs.__init__

    def canceled_at_first(jobs, connection, *others):
        opened.append(connection)
        if len(opened) == 1:
            raise psycopg.errors.QueryCanceled
        make(jobs, connection, *others)

    async def handler(crew, lease):
        pass

    monkeypatch.setattr(_line.WorkersJobs, "__init__", canceled_at_first)
    hire(crew, handler)

    assert attempts(enqueue(), count=1) == [(1, "succeeded", None)]
    assert opened[0].closed


def test_a_pool_that_cannot_tell_for_a_while_where_to_connect_is_asked_again(
    crew, hire, enqueue, attempts, conninfo
):
    asked = []
    job = enqueue(crew.queue)

    def where():
        asked.append(None)
        if len(asked) <= 2:
            raise KeyError("no token yet")
        return make_conninfo(conninfo, user="email-worker")

    async def handler(crew, lease):
        pass

    hire(crew, handler, SimpleNamespace(conninfo=where, kwargs=None))

    assert attempts(job, count=1) == [(1, "succeeded", None)]


def test_a_call_that_finds_no_way_to_wait_for_its_answer_is_made_again(
    crew, hire, enqueue, attempts, monkeypatch
):
    hold, raised = _line.WorkersJobs.hold, []
    job = enqueue(crew.queue)

    def without_files_at_first(*arguments):
        if not raised:
            raised.append(None)
            raise OSError(errno.EMFILE, "Too many open files")
        return hold(*arguments)

    async def handler(crew, lease):
        pass

    monkeypatch.setattr(_line.WorkersJobs, "hold", without_files_at_first)
    hire(crew, handler)

    assert attempts(job, count=1) == [(1, "succeeded", None)]


def test_a_worker_without_a_connection_to_keep_leases_alive_begins_no_job(
    crews, hire, enqueue, attempts, new_caller, owner, until, conninfo
):
    crew, _ = crews
    job, name = enqueue(), new_caller("worker")
    told = Telling()

    async def handler(crew, lease):
        pass

    owner.execute(f"alter role {name} connection limit 1")
    hire(crew, handler, make_conninfo(conninfo, user=name), observers=[told])
    until(lambda: told.errors)
    assert owner.value("select attempt from live_job") == 0
    owner.execute(f"alter role {name} connection limit 3")

    assert attempts(job, count=1) == [(1, "succeeded", None)]


@pytest.mark.parametrize("sqlstate", ["58030", "XX000"])
@pytest.mark.parametrize("table", ["live_job", "attempt"])
def test_what_is_wrong_within_the_server_for_a_moment_ends_no_worker(
    table, sqlstate, crews, hire, enqueue, attempts, owner
):
    crew, _ = crews
    job = enqueue()

    async def handler(crew, lease):
        pass

    owner.execute(
        "create sequence public.tries; grant usage on sequence public.tries to public;"
        " create function public.fail() returns trigger language plpgsql as $$ begin"
        "  if nextval('public.tries') < 3 then"
        f"  raise exception using errcode = '{sqlstate}';"
        "  end if; return new; end $$;"
        f" create trigger fail before insert or update on {table}"
        "  for each row execute function public.fail()"
    )
    hired = hire(crew, handler)

    assert attempts(job, count=1) == [(1, "succeeded", None)]
    assert hired.stop().succeeded == 1
    assert owner.value("select last_value from public.tries") >= 3


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_wait_whose_last_words_are_cancelled_leaves_nothing_behind(
    way, client, beneath, locks, monkeypatch
):
    canceled = []
    cancel = b"do $$ begin raise exception using errcode = '57014'; end $$"

    def in_place_of_the_last(statements):
        if b"pg_advisory_unlock_shared" in statements and not canceled:
            canceled.append(statements)
            return cancel
        return statements

    for kind in (_waiting.Waiter, _waiting.AsyncWaiter):
        ask = kind._ask
        monkeypatch.setattr(
            kind,
            "_ask",
            lambda waiter, said, ask=ask: ask(waiter, in_place_of_the_last(said)),
        )
    jobs = client("email-worker")

    assert jobs.wait("email", 0.01) is False

    assert canceled
    assert locks() == []
    assert jobs.wait("email", 0) is False


# Files.


@pytest.fixture
def no_files():
    """Let no file be opened, for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What the test opens is beyond it, and once closed is not opened again.
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)

    @contextlib.contextmanager
    def no_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return no_files


def test_a_process_that_can_open_no_more_files_waits_and_is_woken(
    crew, hire, enqueue, attempts, no_files, monkeypatch, until
):
    slept, sleep = [], _waiting.Waiter.sleep_until

    def noted(waiter, alarm, seconds):
        slept.append(seconds)
        sleep(waiter, alarm, seconds)

    async def handler(crew, lease):
        pass

    monkeypatch.setattr(_waiting.Waiter, "sleep_until", noted)
    hired = hire(crew, handler)
    assert attempts(enqueue(crew.queue), count=1) == [(1, "succeeded", None)]
    with no_files():
        count = len(slept)
        assert attempts(enqueue(crew.queue), count=1) == [(1, "succeeded", None)]
        until(lambda: len(slept) > count + 1)

    assert hired.stop().succeeded == 2


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_cut_off_without_a_file(
    crews, hire, enqueue, attempts, no_files, monkeypatch, until, connect, owner
):
    crew, _ = crews
    holder = connect()
    told = Telling()

    async def handler(crew, lease):
        pass

    monkeypatch.setattr(_engine, "ANSWER_SECONDS", 0.5)
    hire(crew, handler, observers=[told])
    assert attempts(enqueue(), count=1) == [(1, "succeeded", None)]
    holder.execute("begin; lock table attempt in access exclusive mode")
    job = enqueue()
    until(
        lambda: owner.rows(
            "select from pg_locks where not granted and relation = 'attempt'::regclass"
            " and database ="
            " (select oid from pg_database where datname = current_database())"
        )
    )
    with no_files():
        until(lambda: told.errors)
    holder.rollback()

    assert attempts(job, count=1) == [(1, "succeeded", None)]


# Observers.


class Nameless(Exception):
    @property
    def __class__(self):
        raise RuntimeError


class Leaving(Observer):
    """Raises what is no Exception, whatever it is told."""

    def claimed(self, *_):
        raise SystemExit

    def running(self, *_):
        raise asyncio.CancelledError

    def ended(self, *_):
        raise Nameless


def test_an_observer_that_exits_ends_neither_the_worker_nor_a_job(
    crew, hire, enqueue, attempts
):
    async def handler(crew, lease):
        pass

    hired = hire(crew, handler, observers=[Leaving()])

    for _ in range(2):
        assert attempts(enqueue(crew.queue), count=1) == [(1, "succeeded", None)]
    assert hired.stop().succeeded == 2


# Loops.


def test_a_verdict_after_a_cancellation_that_was_taken_for_a_timeout_counts(
    crews, hire, enqueue, attempts
):
    _, crew = crews
    job = enqueue(crew.queue)

    async def handler(crew, lease):
        # As clients do that know no Task.uncancel.
        asyncio.current_task().cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        raise Fail("gone")

    hire(crew, handler)

    assert attempts(job, count=1) == [(1, "failed", "gone")]


def test_an_exception_that_cannot_be_asked_for_its_class_is_a_failure(
    crew, hire, enqueue, attempts
):
    job = enqueue(crew.queue)

    async def handler(crew, lease):
        raise Nameless

    hired = hire(crew, handler)

    assert attempts(job, count=1) == [(1, "retried", "exception")]
    assert hired.stop().is_clean


def test_a_verdict_that_a_handler_chose_as_it_was_cancelled_counts(
    crews, hire, enqueue, attempts, gate
):
    _, crew = crews
    job, begun = enqueue(crew.queue), gate()

    async def handler(crew, lease):
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise Fail("gone") from None

    hired = hire(crew, handler)
    begun.wait(20)
    hired.stop(0)

    assert attempts(job, count=1) == [(1, "failed", "gone")]


@pytest.mark.slow
def test_a_worker_whose_loop_was_closed_hands_its_jobs_back(
    enqueue, attempts, conninfo, until
):
    job = enqueue()
    loop = asyncio.new_event_loop()
    began = asyncio.Event()

    async def handler(lease):
        began.set()
        await asyncio.sleep(60)

    worker = AsyncWorker(
        make_conninfo(conninfo, user="email-worker"),
        schema="jobs_email",
        queue="email",
        handler=handler,
    )
    running = loop.create_task(worker.run())
    loop.run_until_complete(began.wait())
    # What is pending when it goes is told of in the log of asyncio.
    running._log_destroy_pending = False
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False
    loop.close()

    assert attempts(job, count=1) == [(1, "retried", "worker_shutdown")]
    until(lambda: not any("lenso-jobs" in x.name for x in threading.enumerate()))
