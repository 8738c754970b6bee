"""The workers of a fleet's shards, where two shards are two ways to one Instance."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
import time
from contextvars import ContextVar

import psycopg
import pytest
from prometheus_client import CollectorRegistry
from psycopg.conninfo import make_conninfo

from lenso_jobs import (
    AsyncFleetWorkers,
    Fleet,
    FleetWorkers,
    InvalidArgument,
    SchemaNotReady,
    SecretNotFound,
    Tally,
    Unauthorized,
    current_shard,
    prepare_fleet_workers,
)
from lenso_jobs.metrics import PrometheusObserver
from lenso_jobs.worker import _fleet

tenant = ContextVar("tenant", default=None)


class Threads:
    """``FleetWorkers``, whose handlers are on threads."""

    kind = FleetWorkers

    def adapt(self, handler):
        return handler

    def run(self, workers, *, until_idle=False):
        return workers.run(until_idle=until_idle)


class Tasks:
    """``AsyncFleetWorkers``, whose handlers are tasks of one loop."""

    kind = AsyncFleetWorkers

    def adapt(self, handler):
        if inspect.iscoroutinefunction(handler):
            return handler

        async def coroutine(lease):
            # In a thread, so that two of them can wait for each other.
            await asyncio.to_thread(handler, lease)

        return coroutine

    def run(self, workers, *, until_idle=False):
        return asyncio.run(workers.run(until_idle=until_idle))


@pytest.fixture(params=[Threads, Tasks])
def executor(request):
    return request.param()


on_threads = pytest.mark.parametrize("executor", [Threads], indirect=True)


@pytest.fixture
def fleet(document):
    """The document of a fleet with so many shards."""

    def fleet(shards=2):
        return Fleet.from_json(
            json.dumps(
                {
                    "instance": json.loads(document()),
                    "shards": [f"jobs/shard-{n}" for n in range(shards)],
                }
            )
        )

    return fleet


@pytest.fixture
def urls(conninfo):
    """The database URLs of the shards, by reference; a test may change them."""
    as_worker = make_conninfo(conninfo, user="email-worker")
    return {f"jobs/shard-{n}": as_worker for n in range(4)}


@pytest.fixture
def secrets(urls):
    def resolve(reference):
        if reference not in urls:
            raise SecretNotFound(f"the secret {reference} is not there")
        if urls[reference] is OSError:
            raise OSError
        return urls[reference]

    return resolve


@pytest.fixture
def prepared(executor, fleet, secrets):
    """Prepare workers of both shards, with one handler each."""

    def prepared(handler, **options):
        options = {"queues": {"email": 1}} | options
        return prepare_fleet_workers(
            fleet(), secrets, executor.adapt(handler), **options
        )

    return prepared


@pytest.fixture
def start(executor, prepared, on_a_thread):
    """Start workers of both shards; they are stopped at the end of the test."""

    def start(handler, **options):
        started = on_a_thread(executor, prepared(handler, **options))
        started.start()
        return started

    return start


@pytest.fixture
def no_server(tmp_path):
    """A connection string of no server, with a password."""
    return f"host={tmp_path} dbname=jobs user=email-worker password=sesame"


@pytest.fixture
def both():
    """A handler that ends once two of its kind run; the shards that they ran for."""
    shards, barrier = [], threading.Barrier(2)

    def handler(lease):
        shards.append(current_shard())
        barrier.wait(20)

    return handler, shards


def test_each_shard_has_a_worker_and_its_handlers_know_the_shard(
    executor, prepared, enqueue, both
):
    handler, shards = both
    for _ in range(2):
        enqueue()

    tally = executor.run(prepared(handler), until_idle=True)

    assert sorted(shards) == [0, 1]
    assert tally == Tally(succeeded=2)
    assert current_shard() is None


def test_only_the_shards_that_are_named_are_worked(executor, prepared, enqueue):
    shards = []
    for _ in range(3):
        enqueue()
    workers = prepared(lambda _: shards.append(current_shard()), shards=[1])

    executor.run(workers, until_idle=True)

    assert shards == [1, 1, 1]
    assert repr(workers) == f"<{executor.kind.__name__} of shards 1>"


def test_each_line_of_the_log_names_the_shard(executor, prepared, enqueue, caplog):
    caplog.set_level(logging.DEBUG, "lenso_jobs.worker")
    enqueue(max_attempts=1)

    def fail(lease):
        raise ValueError

    executor.run(prepared(fail, shards=[1]), until_idle=True)

    lines = [record.getMessage() for record in caplog.records]
    for said in ("worker of queue email starts", "handler raised", "failed: job_id="):
        assert any(line.startswith(f"shard 1: {said}") for line in lines), lines
    assert {record.shard for record in caplog.records} == {1}


def test_a_handler_has_the_context_of_run(enqueue, fleet, secrets):
    enqueue()
    seen = []

    async def handler(lease):
        seen.append((tenant.get(), current_shard()))

    async def run():
        tenant.set("one")
        workers = prepare_fleet_workers(
            fleet(), secrets, handler, shards=[0], queue="email"
        )
        await workers.run(until_idle=True)

    asyncio.run(run())

    assert seen == [("one", 0)]


def test_a_shard_that_cannot_be_reached_is_worked_once_it_can(
    start, enqueue, urls, no_server, until, caplog, both
):
    handler, shards = both
    server, urls["jobs/shard-1"] = urls["jobs/shard-1"], no_server
    for _ in range(2):
        enqueue()
    started = start(handler)
    until(lambda: shards == [0])

    urls["jobs/shard-1"] = server

    until(lambda: sorted(shards) == [0, 1])
    assert started.stop().succeeded == 2
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]
    assert line == (
        "no worker of shard 1 (jobs/shard-1): OperationalError, No such file or "
        "directory. It is tried again."
    )
    assert "sesame" not in caplog.text


def test_observers_are_told_of_a_shard_that_cannot_be_reached_and_can_again(
    start, urls, no_server, until, enqueue
):
    registry = CollectorRegistry()
    enqueue()

    def connected():
        return registry.get_sample_value("lenso_jobs_connected")

    def claimed():
        return registry.get_sample_value("lenso_jobs_claimed_total", {"queue": "email"})

    server, urls["jobs/shard-1"] = urls["jobs/shard-1"], no_server
    started = start(lambda _: None, observers=[PrometheusObserver(registry)])
    until(claimed)  # on the other shard
    assert connected() == 0

    urls["jobs/shard-1"] = server

    until(connected)
    assert registry.get_sample_value("lenso_jobs_disconnections_total") == 1
    started.stop()


@on_threads
def test_a_source_of_secrets_that_fails_later_stops_no_worker(
    start, enqueue, urls, no_server, until, caplog, both, monkeypatch
):
    handler, shards = both
    monkeypatch.setattr(_fleet, "_LOG_EVERY_SECONDS", 0.0)

    server, urls["jobs/shard-1"] = urls["jobs/shard-1"], no_server
    for _ in range(2):
        enqueue()
    started = start(handler)
    until(lambda: shards == [0])

    urls["jobs/shard-1"] = OSError  # which the resolver raises
    until(lambda: "OperationalError, OSError" in caplog.text)
    urls["jobs/shard-1"] = server

    until(lambda: sorted(shards) == [0, 1])
    assert started.stop().succeeded == 2


@on_threads
def test_a_worker_that_connects_again_reads_the_secret_again(start, urls, until, owner):
    def sessions(name):
        return owner.value(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity"
            " where application_name = %s",
            name,
        )

    urls["jobs/shard-1"] += " application_name=before"
    started = start(lambda _: None)
    until(lambda: sessions("before") > 0)

    urls["jobs/shard-1"] += " application_name=after"

    until(lambda: sessions("before") == 0 and sessions("after") > 0)
    assert started.stop().is_clean


@on_threads
def test_a_shard_that_refuses_its_worker_harms_no_other(
    start, enqueue, urls, conninfo, until, caplog, both
):
    handler, shards = both
    server = urls["jobs/shard-1"]
    urls["jobs/shard-1"] = make_conninfo(conninfo, user="accounts")
    for _ in range(2):
        enqueue()
    started = start(handler)
    until(lambda: "no worker of shard 1 (jobs/shard-1): permission" in caplog.text)

    urls["jobs/shard-1"] = server

    until(lambda: sorted(shards) == [0, 1])
    assert started.stop().is_clean


@on_threads
def test_without_any_shard_the_refusal_names_the_first(prepared, urls, no_server):
    urls["jobs/shard-0"] = urls["jobs/shard-1"] = no_server

    with pytest.raises(psycopg.OperationalError, match=r"^shard 0 \(jobs/shard-0\): "):
        prepared(print)

    del urls["jobs/shard-0"]
    with pytest.raises(
        SecretNotFound, match=r"^shard 0 \(jobs/shard-0\): the secret jobs/shard-0"
    ):
        prepared(print)


def test_a_refusal_of_the_last_shard_that_is_worked_ends_the_workers(
    executor, prepared, urls, conninfo, no_server
):
    urls["jobs/shard-0"] = no_server
    urls["jobs/shard-1"] = make_conninfo(conninfo, user="accounts")
    workers = prepared(print, shards=[1])

    with pytest.raises(Unauthorized, match=r"^shard 1 \(jobs/shard-1\): permission"):
        executor.run(workers)


def test_until_idle_works_what_it_can_and_then_names_the_shard_that_was_missing(
    executor, prepared, urls, no_server, enqueue, status_of
):
    urls["jobs/shard-1"] = no_server
    job_id = enqueue()
    workers = prepared(lambda _: None)

    with pytest.raises(psycopg.OperationalError, match=r"^shard 1 \(jobs/shard-1\): "):
        executor.run(workers, until_idle=True)

    assert status_of(job_id) == "succeeded"


@pytest.fixture
def status_of(owner):
    return lambda job_id: owner.value("select status from inspect(%s)", job_id)


def test_workers_that_were_stopped_before_do_no_job(executor, prepared, enqueue):
    enqueue()
    workers = prepared(lambda _: None)

    workers.stop()

    assert executor.run(workers) == Tally()
    with pytest.raises(RuntimeError, match="run once"):
        executor.run(workers)


def test_a_stop_whose_grace_is_over_hands_the_jobs_of_all_shards_back(
    executor, start, enqueue, status_of, until, gate
):
    begun, is_time = [], gate()
    jobs = [enqueue() for _ in range(2)]

    def stay(lease):
        begun.append(lease)
        is_time.wait(20)

    async def stay_as_task(lease):
        begun.append(lease)
        await asyncio.sleep(20)

    started = start(stay if executor.kind is FleetWorkers else stay_as_task)
    until(lambda: len(begun) == 2)

    tally = started.stop(0)

    assert tally.handed_back == 2
    assert not tally.is_clean
    assert [status_of(job_id) for job_id in jobs] == ["queued", "queued"]


@on_threads
def test_workers_that_are_refused_while_they_stop_end_all_the_same(
    executor, prepared, on_a_thread, until, monkeypatch
):
    begun, stopped = [], threading.Event()

    def run(worker, *, until_idle):
        begun.append(worker.shard)
        assert stopped.wait(20)
        raise Unauthorized("it may no more")

    monkeypatch.setattr(_fleet._Worker, "run", run)
    monkeypatch.setattr(_fleet._Worker, "stop", lambda *_: stopped.set())
    started = on_a_thread(executor, prepared(print))
    started.start()
    until(lambda: sorted(begun) == [0, 1])

    assert started.stop() == Tally()


@on_threads
def test_a_handler_that_cannot_work_stops_the_workers_of_all_shards(
    executor, prepared, enqueue
):
    enqueue()

    def generator():
        yield

    with pytest.raises(InvalidArgument, match="returned an awaitable or a generator"):
        executor.run(prepared(lambda _: generator()))


def test_a_task_that_is_cancelled_hands_the_jobs_of_all_shards_back(
    fleet, secrets, enqueue, status_of
):
    jobs = [enqueue() for _ in range(2)]
    begun = []

    async def stay(lease):
        begun.append(lease)
        await asyncio.sleep(60)

    async def run():
        workers = prepare_fleet_workers(fleet(), secrets, stay, queues={"email": 1})
        task = asyncio.create_task(workers.run())
        deadline = time.monotonic() + 20
        while len(begun) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())

    assert [status_of(job_id) for job_id in jobs] == ["queued", "queued"]


@on_threads
def test_an_interrupt_of_run_stops_the_workers_of_all_shards(prepared):
    workers = prepared(lambda _: None)

    def interrupt():
        raise KeyboardInterrupt

    workers._events.put(lambda: workers._events.put(interrupt))

    with pytest.raises(KeyboardInterrupt):
        workers.run()

    assert not [
        each for each in threading.enumerate() if each.name.startswith("lenso-jobs sh")
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shards": [2]}, "shards must be numbers from 0 to 1"),
        ({"shards": ["1"]}, "shards must be numbers from 0 to 1"),
        ({"shards": [True]}, "shards must be numbers from 0 to 1"),
        ({"shards": [1, 1]}, "shards must not name a shard twice"),
        ({"shards": []}, "shards must be a list of numbers"),
        ({"shards": 1}, "shards must be a list of numbers"),
        ({"queues": {"email": 0}}, "concurrency must be a whole number"),
        ({"observers": print}, "observers must be a list or tuple of Observer"),
        ({"fleet": "fleet.json"}, "fleet must be a Fleet, not "),
        ({"handler": 7}, "handler must be callable"),
        ({"secrets": "url"}, "secrets must be a function"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(fleet, secrets, options, says):
    given = {
        "fleet": fleet(),
        "secrets": secrets,
        "handler": print,
        "queues": {"email": 1},
    }

    with pytest.raises(InvalidArgument, match=says):
        prepare_fleet_workers(**(given | options))


@on_threads
def test_a_grace_that_is_no_number_is_refused(prepared):
    with pytest.raises(InvalidArgument, match="grace must be"):
        prepared(print).stop(-1)


@on_threads
def test_a_shard_that_holds_no_instance_is_refused_with_what_to_run(
    prepared, urls, new_database
):
    urls["jobs/shard-1"] = new_database()

    with pytest.raises(SchemaNotReady, match="schema jobs_email holds no") as caught:
        prepared(print, shards=[1])

    assert caught.value.hint == (
        "Run lenso-jobs fleet setup with the document of jobs_email; if that was done, "
        "lenso-jobs fleet check says what is missing."
    )


def test_the_workers_of_shards_override_what_workers_have():
    # They name the shard on threads that a worker starts.
    assert inspect.signature(_fleet._Worker._work) == inspect.signature(
        _fleet.Worker._work
    )
    assert inspect.signature(_fleet._AsyncWorker._drive) == inspect.signature(
        _fleet.AsyncWorker._drive
    )
