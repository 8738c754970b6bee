"""The fault: sessions end, and files and threads run out, beneath a worker or a wait.

The worker goes on or says why it cannot. No outcome is lost.
"""

import contextlib
import errno
import os
import resource
import threading
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import _async_client, _client
from lenso_jobs.worker import Observer, _connection, _part, _run


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
    opened, make = [], _connection.WorkerJobs.__init__

    def canceled_at_first(jobs, connection, *others):
        opened.append(connection)
        if len(opened) == 1:
            raise psycopg.errors.QueryCanceled
        make(jobs, connection, *others)

    async def handler(crew, lease):
        pass

    monkeypatch.setattr(_connection.WorkerJobs, "__init__", canceled_at_first)
    hire(crew, handler)

    assert attempts(enqueue(), count=1) == [(1, "succeeded", None)]
    assert opened[0].closed


@pytest.mark.slow
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


def test_a_call_that_cannot_wait_for_its_reply_is_repeated(
    crew, hire, enqueue, attempts, monkeypatch
):
    claim, raised = _connection.WorkerJobs.claim_as, []
    job = enqueue(crew.queue)

    def without_files_at_first(*arguments):
        if not raised:
            raised.append(None)
            raise OSError(errno.EMFILE, "Too many open files")
        return claim(*arguments)

    async def handler(crew, lease):
        pass

    monkeypatch.setattr(_connection.WorkerJobs, "claim_as", without_files_at_first)
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


@pytest.mark.slow
@pytest.mark.parametrize("sqlstate", ["58030", "XX000"])
@pytest.mark.parametrize("table", ["live_job", "attempt"])
def test_a_passing_error_of_the_server_ends_no_worker(
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

    for kind in (_client.Waiter, _async_client.AsyncWaiter):
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
    slept, sleep = [], _connection.WorkerWaiter.sleep_until

    def noted(waiter, alarm, seconds):
        slept.append(seconds)
        sleep(waiter, alarm, seconds)

    async def handler(crew, lease):
        pass

    monkeypatch.setattr(_connection.WorkerWaiter, "sleep_until", noted)
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

    monkeypatch.setattr(_part, "ANSWER_SECONDS", 0.5)
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


@pytest.mark.slow
@pytest.mark.parametrize("spare", range(4))
def test_a_worker_without_threads_raises_and_leaves_no_thread(
    spare, crew, hire, monkeypatch, until
):
    before = set(threading.enumerate())
    start = threading.Thread.start
    left = iter(range(spare))

    def start_while_there_are_some(thread):
        if "lenso-jobs" in thread.name and next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    async def handler(crew, lease):
        pass

    monkeypatch.setattr(threading.Thread, "start", start_while_there_are_some)
    hired = hire(crew, handler, concurrency=2)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        hired.tally()

    until(lambda: set(threading.enumerate()) <= before | {hired._thread})


def test_a_worker_for_which_there_are_no_files_says_so_and_leaves_no_thread(
    crew, hire, monkeypatch, until
):
    before = set(threading.enumerate())

    def none_left():
        raise OSError(errno.EMFILE, "Too many open files")

    async def handler(crew, lease):
        pass

    # The worker's alone: asyncio.run needs two sockets itself.
    monkeypatch.setattr(_run, "socket", SimpleNamespace(socketpair=none_left))
    hired = hire(crew, handler, concurrency=2)
    with pytest.raises(OSError, match="Too many open files"):
        hired.tally()

    until(lambda: set(threading.enumerate()) <= before | {hired._thread})


@pytest.fixture
def many_files():
    """Have more files open than select can watch."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for each in opened:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
def test_a_process_with_a_thousand_files_waits_and_is_woken(
    crew, hire, enqueue, attempts, only_woken
):
    async def handler(crew, lease):
        pass

    hire(crew, handler)
    only_woken(1)

    assert attempts(enqueue(crew.queue), count=1) == [(1, "succeeded", None)]


@pytest.mark.slow
def test_a_worker_goes_on_where_the_server_ends_idle_sessions(
    crew, hire, enqueue, attempts, conninfo, owner, until
):
    source = make_conninfo(
        conninfo, user="email-worker", options="-c idle_session_timeout=100"
    )
    sessions = (
        "select pid from pg_stat_activity where usename = 'email-worker'"
        " and application_name like 'lenso-jobs %'"
    )

    async def handler(crew, lease):
        pass

    hired = hire(crew, handler, source)
    for _ in range(3):
        assert attempts(enqueue(crew.queue), count=1) == [(1, "succeeded", None)]
        used = set(owner.rows(sessions))
        until(lambda used=used: used.isdisjoint(owner.rows(sessions)))

    assert hired.stop().succeeded == 3


def test_a_report_that_is_cancelled_as_it_waits_is_made_again(
    crew, hire, enqueue, attempts, hold, owner, until
):
    job = enqueue(crew.queue)
    holders = []
    cancel = (
        "select pg_cancel_backend(pid) from pg_stat_activity"
        " where usename = 'email-worker' and %s = any (pg_blocking_pids(pid))"
    )

    async def handler(crew, lease):
        holders.append(hold(lease.job_id))

    hire(crew, handler)
    for _ in range(2):
        until(lambda: holders and owner.rows(cancel, holders[0].pid))
    holders[0].rollback()

    assert attempts(job, count=1) == [(1, "succeeded", None)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("command", ["discard all", "deallocate all", "reset all"])
def test_a_session_that_was_emptied_is_as_good_as_a_new_one(
    command, client, beneath, enqueue
):
    jobs = client("email-worker")
    for _ in range(3):
        for _ in range(6):  # from the sixth on it is prepared
            enqueue()
            (lease,) = jobs.claim("email")
            assert jobs.complete(lease)
        beneath(jobs).execute(command)
