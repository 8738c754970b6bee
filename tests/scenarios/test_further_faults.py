"""Further faults of handlers, of what surrounds a worker, and of connections: no job is
lost, run without being run, or held for ever, and none stops those behind it."""

import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import EnvironmentSecrets, InvalidArgument, Jobs
from lenso_jobs.worker import Fail, Retry, Worker

FOREIGN = {"to": "中", "from": "Zoë", "😀": "\\u4e2d"}
ENCODINGS = ["LATIN1", pytest.param("SQL_ASCII", marks=pytest.mark.slow)]


def generator(lease):
    yield lease


async def async_generator(lease):
    yield lease


class Silent(Retry):
    def __init__(self):
        pass


class Final(Fail):
    def __init__(self):
        self.code = "no code"


class Unspeakable(Retry):
    @property
    def code(self):
        raise MemoryError

    def __init__(self):
        pass


class Upset(logging.Filter):
    def filter(self, record):
        raise RuntimeError(record)


class Plain:
    """Hands a handler on as it is."""

    def __init__(self, crew):
        self._crew = crew

    def __getattr__(self, name):
        return getattr(self._crew, name)

    def adapt(self, handler):
        return handler


@pytest.fixture(params=[0, 1], ids=["Worker", "AsyncWorker"])
def crew(crews, request):
    return crews[request.param]


# Handlers.


@pytest.mark.parametrize("handler", [generator, async_generator])
def test_a_function_of_which_nothing_would_be_run_is_no_handler(handler, conninfo):
    with pytest.raises(InvalidArgument, match="generator"):
        Worker(conninfo, schema="jobs_email", queue="email", handler=handler)


@pytest.mark.parametrize("handler", [generator, async_generator])
def test_a_generator_that_nobody_has_run_is_no_success(
    handler, crew, hire, enqueue, attempts
):
    job = enqueue(crew.queue, max_attempts=1)

    hire(Plain(crew), partial(lambda made, lease: made(lease), handler))

    assert attempts(job, count=1) == [(1, "failed", "TypeError")]


@pytest.mark.parametrize(
    ("kind", "outcome", "code"),
    [
        (Silent, "retried", f"{__name__}.Silent"),
        (Final, "failed", f"{__name__}.Final"),
        (Unspeakable, "retried", "exception"),
    ],
)
def test_a_verdict_that_was_made_without_a_code_is_a_failure_all_the_same(
    kind, outcome, code, crew, hire, enqueue, attempts
):
    job = enqueue(crew.queue)

    async def handler(crew, lease):
        raise kind

    hire(crew, handler, concurrency=1)

    assert attempts(job, count=1) == [(1, outcome, code)]
    following = enqueue(crew.queue)
    assert attempts(following, count=1) == [(1, outcome, code)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raised", "outcome", "code"),
    [
        (ExceptionGroup("tasks", [Fail("gone")]), "failed", "gone"),
        (
            BaseExceptionGroup("x", [ExceptionGroup("y", [Retry("later")])]),
            "retried",
            "later",
        ),
        (
            ExceptionGroup("tasks", [Fail("gone"), KeyError()]),
            "retried",
            "ExceptionGroup",
        ),
    ],
    ids=["alone", "within", "beside"],
)
def test_a_verdict_alone_in_a_group_of_exceptions_counts(
    raised, outcome, code, crew, hire, enqueue, attempts
):
    async def handler(crew, lease):
        raise raised

    job = enqueue(crew.queue)
    hire(crew, handler)

    assert attempts(job, count=1) == [(1, outcome, code)]


def test_what_is_thrown_into_a_thread_too_late_for_its_handler_ends_no_hand(
    crews, hire, enqueue, attempts, until
):
    crew, _ = crews
    threads = []
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc

    async def handler(crew, lease):
        threads.append(threading.get_ident())

    hired = hire(crew, handler, concurrency=1)
    assert attempts(enqueue(), count=1) == [(1, "succeeded", None)]
    throw(ctypes.c_ulong(threads[0]), ctypes.py_object(SystemExit))

    for _ in range(2):
        assert attempts(enqueue(), count=1) == [(1, "succeeded", None)]
    assert hired.stop().succeeded == 3


@pytest.mark.slow
@pytest.mark.parametrize("spare", range(4))
def test_a_worker_for_which_there_are_no_threads_says_so_and_leaves_none(
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


def test_a_log_that_raises_harms_no_job(crew, hire, enqueue, attempts):
    filter_ = Upset()
    logger = logging.getLogger("lenso_jobs.worker")
    jobs = [enqueue(crew.queue), enqueue(crew.queue)]

    async def handler(crew, lease):
        raise Retry("later")

    logger.addFilter(filter_)
    try:
        hired = hire(crew, handler, concurrency=1)
        assert attempts(*jobs, count=2) == [(1, "retried", "later")] * 2
        assert hired.stop().retried == 2
    finally:
        logger.removeFilter(filter_)


def test_a_handler_that_enqueues_its_own_intent_starts_no_second_job(
    crew, hire, enqueue, attempts, connect, owner
):
    producer = Jobs(connect("accounts"), "jobs_email")
    answers = []

    async def handler(crew, lease):
        answers.append(
            producer.enqueue(lease.queue, lease.kind, {}, idempotency_key="own")
        )

    job = enqueue(crew.queue, key="own")
    hire(crew, handler)

    assert attempts(job, count=1) == [(1, "succeeded", None)]
    assert [(each.job_id, each.created) for each in answers] == [(job, False)]
    assert owner.value("select count(*) from live_job") == 0


@pytest.mark.parametrize("fate", ["returns", "raises"])
def test_a_child_that_a_handler_forked_is_no_worker(
    fate, crew, hire, enqueue, attempts, until
):
    children, statuses = [], {}

    async def handler(crew, lease):
        child = os.fork()
        if child == 0:
            if fate == "raises":
                raise KeyError
            return
        children.append(child)

    def has_ended():
        ended, status = os.waitpid(children[0], os.WNOHANG)
        statuses[ended] = os.waitstatus_to_exitcode(status)
        return ended

    job = enqueue(crew.queue)
    hire(crew, handler)

    assert attempts(job, count=1) == [(1, "succeeded", None)]
    until(has_ended)
    assert statuses[children[0]] == (fate == "raises")


MODULE = """
import multiprocessing, pathlib, time

def nap(end):
    end.send("begun")
    time.sleep(60)

def handler(lease):
    context = multiprocessing.get_context("fork")
    begun, end = context.Pipe()
    child = context.Process(target=nap, args=(end,))
    child.start()
    begun.recv()
    child.terminate()
    child.join(10)
    pathlib.Path("exitcode").write_text(str(child.exitcode))
    child.kill()

async def async_handler(lease):
    handler(lease)
"""


@pytest.mark.slow
@pytest.mark.parametrize("function", ["handler", "async_handler"])
def test_a_process_of_a_handler_is_ended_by_the_signal_that_stops_the_worker(
    function, conninfo, environment, document, enqueue, attempts, tmp_path
):
    (tmp_path / "handlers.py").write_text(MODULE)
    (tmp_path / "jobs.json").write_text(document())
    command = (
        "-c",
        "from lenso_jobs.cli import main; main()",
        *("work", "--config", "jobs.json", "--queue", "email"),
        *("--handler", f"handlers:{function}"),
    )
    url = make_conninfo(conninfo, user="email-worker")
    job = enqueue()

    with subprocess.Popen(
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment | {"JOBS_DATABASE_URL": url},
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert attempts(job, count=1) == [(1, "succeeded", None)]
        finally:
            process.terminate()

    assert (tmp_path / "exitcode").read_text() == str(-signal.SIGTERM)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_handler_that_holds_the_interpreter_past_its_lease_ends_nothing(
    crew, hire, enqueue, attempts, configure
):
    configure(lease_seconds=1)
    job = enqueue(crew.queue)

    async def handler(crew, lease):
        if lease.attempt == 1:
            ctypes.PyDLL(None).usleep(1_500_000)

    hired = hire(crew, handler)

    assert attempts(job, count=2) == [
        (1, "lease_expired", None),
        (2, "succeeded", None),
    ]
    tally = hired.stop()
    assert (tally.lost, tally.succeeded) == (1, 1)


@pytest.mark.slow
def test_a_process_that_was_stopped_past_its_lease_ends_nothing_when_it_goes_on(
    crew, employ, enqueue, configure, until, starts, rival, claim, owner, expire
):
    configure(lease_seconds=2)
    job = enqueue(crew.queue, payload={"seconds": 1})
    process = employ(crew)
    until(lambda: starts(job))
    process.send(signal.SIGSTOP)
    expire(job)
    configure()
    lease = claim(crew.queue, session=rival)
    before = owner.row("select * from live_job")

    owner.execute("select pg_sleep(2)")
    process.send(signal.SIGCONT)
    process.send(signal.SIGTERM)

    assert process.exit_code() == 0
    assert owner.row("select * from live_job") == before
    assert rival.value("select complete(%s, %s)", *lease)
    assert starts(job) == 1


# Connections.


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_worker_reads_every_payload_whatever_encoding_is_asked_for(
    encoding, crew, hire, enqueue, attempts, conninfo, monkeypatch
):
    monkeypatch.setenv("PGCLIENTENCODING", encoding)
    job = enqueue(crew.queue, payload=FOREIGN)
    seen = []

    async def handler(crew, lease):
        seen.append(lease.payload)

    hire(crew, handler, make_conninfo(conninfo, user="email-worker"))

    assert attempts(job, count=1) == [(1, "succeeded", None)]
    assert seen == [FOREIGN]


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_payload_is_claimed_that_the_encoding_of_the_connection_lacks(
    encoding, client, enqueue
):
    job = enqueue(payload=FOREIGN)
    jobs = client("email-worker", client_encoding=encoding)

    (lease,) = jobs.claim("email")

    assert (lease.job_id, lease.payload) == (job, FOREIGN)
    assert jobs.complete(lease)
    assert jobs.inspect(job).status == "succeeded"


@pytest.mark.parametrize("way", ["sync", "async"])
def test_no_function_of_a_stranger_s_is_given_the_payload_that_is_claimed(
    client, enqueue, owner
):
    enqueue(payload=FOREIGN)
    owner.execute(
        "create function public.convert_to(text, text) returns bytea"
        " language sql as $$ select '{}'::bytea $$"
    )
    jobs = client("email-worker", options="-c search_path=public")

    (lease,) = jobs.claim("email")

    assert lease.payload == FOREIGN


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("verb", ["enqueue", "enqueue_many"])
def test_a_payload_is_stored_that_the_encoding_of_the_connection_lacks(
    verb, encoding, client, verbs, owner
):
    job, outcome = verbs[verb](
        client("accounts", client_encoding=encoding), "k", FOREIGN
    )

    assert outcome == "created"
    assert owner.value("select payload from job") == FOREIGN
    assert verbs[verb](client("accounts"), "k", FOREIGN) == (job, "existing")


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
    sessions = "select count(distinct pid) from pg_stat_activity where usename = 'email-worker'"

    async def handler(crew, lease):
        pass

    hired = hire(crew, handler, source)
    for _ in range(3):
        assert attempts(enqueue(crew.queue), count=1) == [(1, "succeeded", None)]
        until(lambda: owner.value(sessions) == 0)

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


def test_the_last_line_break_of_a_variable_is_no_part_of_the_secret(monkeypatch):
    for end in ("", "\n", "\r\n"):
        monkeypatch.setenv("JOBS_DATABASE_URL", f"postgresql:///jobs{end}")
        assert EnvironmentSecrets()("jobs/database-url") == "postgresql:///jobs"
