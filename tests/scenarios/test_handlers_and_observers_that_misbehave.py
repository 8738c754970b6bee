"""The fault: a handler, an observer or a log does what nobody expects.

Every job ends as its handler said, and none stops the jobs behind it.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import Jobs
from lenso_jobs.worker import AsyncWorker, Fail, Observer, Retry


class Nameless(Exception):
    @property
    def __class__(self):
        raise RuntimeError


class Leaving(Observer):
    """Raises a BaseException in each of its methods."""

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
    enqueue, attempts, conninfo, until, caplog
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
    # asyncio logs tasks that are pending when it closes.
    running._log_destroy_pending = False
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False
    loop.close()

    assert attempts(job, count=1) == [(1, "retried", "worker_shutdown")]
    until(lambda: not any("lenso-jobs" in x.name for x in threading.enumerate()))
    # What is left of the handler is collected: it has not raised anything.
    del running, task, worker
    gc.collect()
    assert "handler raised" not in caplog.text


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


def test_an_exception_thrown_into_a_thread_too_late_ends_no_thread(
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
def test_a_child_that_a_handler_forked_is_not_a_worker(
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
    crew, employ, enqueue, configure, until, starts, rival, owner, expire
):
    configure(lease_seconds=2)
    job = enqueue(crew.queue, payload={"seconds": 1})
    process = employ(crew)
    until(lambda: starts(job))
    process.send(signal.SIGSTOP)
    expire(job)
    configure()
    leases = []

    def is_claimed():  # a renewal sent before may hold the row for a moment
        leases.extend(
            rival.rows("select job_id, lease_token from claim(%s)", crew.queue)
        )
        return leases

    until(is_claimed)
    (lease,) = leases
    before = owner.row("select * from live_job")

    owner.execute("select pg_sleep(2)")
    process.send(signal.SIGCONT)
    process.send(signal.SIGTERM)

    assert process.exit_code() == 0
    assert owner.row("select * from live_job") == before
    assert rival.value("select complete(%s, %s)", *lease)
    assert starts(job) == 1
