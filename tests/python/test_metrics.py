"""Metrics: what Prometheus reads of workers, against what the workers say themselves."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Event, Timer
from uuid import uuid4

import psycopg
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest
from psycopg.conninfo import make_conninfo

from lenso_jobs import InvalidArgument
from lenso_jobs.metrics import PrometheusObserver
from lenso_jobs.worker import (
    AsyncWorker,
    Ended,
    Fail,
    Observer,
    Retry,
    Worker,
)

SECRET = "hunter2"
OUTCOMES = ("succeeded", "retried", "failed", "lost", "released", "handed_back")


class Stopper(Observer):
    """Stops a worker once so many jobs have left it, or after 20 seconds."""

    def __init__(self, jobs):
        self.left = jobs

    def ended(self, *_):
        self.left -= 1
        if not self.left:
            self.stop()


def run(kind, conninfo, handler, observers, jobs, **options):
    stopper = Stopper(jobs)
    worker = kind(
        make_conninfo(conninfo, user="email-worker"),
        schema="jobs_email",
        queue="email",
        handler=handler,
        observers=[*observers, stopper],
        **options,
    )
    stopper.stop = worker.stop
    timer = Timer(20, worker.stop, [0])
    timer.start()
    try:
        return asyncio.run(worker.run()) if kind is AsyncWorker else worker.run()
    finally:
        timer.cancel()


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def watching(registry):
    return PrometheusObserver(registry)


@pytest.fixture
def read(registry):
    """The value of a metric; None if there is none."""

    def read(name, **labels):
        return registry.get_sample_value(f"lenso_jobs_{name}", labels)

    return read


@pytest.fixture
def by_label(registry):
    """The values of a metric that are not 0, added up by one of its labels."""

    def by_label(name, label):
        sums = {}
        for metric in registry.collect():
            for sample in metric.samples:
                if sample.name == f"lenso_jobs_{name}" and sample.value:
                    value = sample.labels[label]
                    sums[value] = sums.get(value, 0) + sample.value
        return sums

    return by_label


@dataclass(eq=False)
class Lease:
    """What an observer reads of a lease."""

    queue: str = "email"
    kind: str = "send"


def test_a_release_is_no_failure(watching, by_label):
    watching.ended(Ended(Lease(), "released", "not_yet", 0.1))
    watching.ended(Ended(Lease(), "failed", "unknown_kind", 0.1))

    assert by_label("ended_total", "outcome") == {"released": 1, "failed": 1}
    assert by_label("failures_total", "code") == {"unknown_kind": 1}


def handle(lease):
    if lease.kind == "later":
        raise Retry("smtp.timeout")
    if lease.kind == "never":
        raise Fail("address.malformed")
    if lease.kind == "crash":
        raise ValueError(lease.payload["secret"])


async def handle_async(lease):
    await asyncio.sleep(0)
    handle(lease)


class Reading(Observer):
    """Reads how many jobs are held, early and late in their lives."""

    def __init__(self, read):
        self.read = read
        self.running_with, self.left_with = [], []

    def running(self, _):
        self.running_with.append(self.read("held", queue="email"))
        return nullcontext()

    def ended(self, *_):
        self.left_with.append(self.read("held", queue="email"))


@pytest.mark.parametrize(
    ("kind", "handler"), [(Worker, handle), (AsyncWorker, handle_async)]
)
def test_the_metrics_of_a_run_are_its_tally(
    conninfo, enqueue, registry, watching, read, by_label, kind, handler
):
    kinds = {"send": 5, "later": 2, "never": 1, "crash": 3}
    for each, count in kinds.items():
        for _ in range(count):
            enqueue(kind=each, payload={"secret": SECRET}, key=f"{SECRET}-{uuid4()}")

    reading = Reading(read)

    tally = run(kind, conninfo, handler, [watching, reading], sum(kinds.values()))

    outcomes = {o: n for o in OUTCOMES if (n := getattr(tally, o))}
    assert outcomes == {"succeeded": 5, "retried": 5, "failed": 1}
    assert by_label("ended_total", "outcome") == outcomes
    assert by_label("ended_total", "kind") == kinds
    assert by_label("ended_total", "queue") == {"email": 11}
    assert by_label("handler_seconds_count", "kind") == kinds
    assert by_label("failures_total", "code") == {
        "smtp.timeout": 2,
        "address.malformed": 1,
        "ValueError": 3,
    }
    assert read("claimed_total", queue="email") == 11
    assert min(reading.running_with) >= 1
    assert min(reading.left_with) == reading.left_with[-1] == 0
    assert read("running", queue="email") == 0
    assert read("leases_lost_total", queue="email") == 0
    assert read("connected") == 1
    assert SECRET not in generate_latest(registry).decode()


class Told(Observer):
    """Notes that a method was called."""

    def __init__(self):
        self.lost_one, self.ended_one = Event(), Event()

    def lost(self, *_):
        self.lost_one.set()

    def ended(self, *_):
        self.ended_one.set()


def test_lost_jobs_are_no_longer_held(
    conninfo, owner, enqueue, expire, watching, read, by_label
):
    owner.execute("update instance set lease_seconds = 1")
    # On their last attempts: the worker cannot claim them again.
    jobs = [enqueue(max_attempts=1) for _ in range(2)]
    told = Told()

    def handler(_):
        expire(*jobs)
        assert told.lost_one.wait(20)
        assert told.ended_one.wait(20)

    tally = run(Worker, conninfo, handler, [watching, told], 2, concurrency=1, batch=2)

    assert tally.lost == 2
    assert by_label("ended_total", "outcome") == {"lost": 2}
    assert read("leases_lost_total", queue="email") == 1, "the other had not begun"
    assert read("handler_seconds_count", queue="email", kind="send") == 1
    assert by_label("failures_total", "code") == {}
    assert read("held", queue="email") == 0
    assert read("running", queue="email") == 0


def test_released_jobs_are_no_longer_held_though_a_handler_runs_on(
    conninfo, enqueue, background, watching, read, by_label
):
    for _ in range(2):
        enqueue()
    begun, release = Event(), Event()

    def handler(_):
        begun.set()
        release.wait(20)

    worker = Worker(
        make_conninfo(conninfo, user="email-worker"),
        schema="jobs_email",
        queue="email",
        handler=handler,
        concurrency=1,
        batch=2,
        observers=[watching],
    )
    answer = background(worker.run)
    assert begun.wait(20)
    held = read("held", queue="email")
    worker.stop(0)
    tally = answer.result(20)
    running = read("running", queue="email")
    release.set()

    assert (tally.handed_back, tally.released) == (1, 1)
    assert by_label("ended_total", "outcome") == {"handed_back": 1, "released": 1}
    assert by_label("failures_total", "code") == {"worker_shutdown": 1}
    assert (held, read("held", queue="email")) == (2, 0)
    assert running == 1
    deadline = time.monotonic() + 20
    while read("running", queue="email"):
        assert time.monotonic() < deadline, "the handler never ended"
    assert read("handler_seconds_count", queue="email", kind="send") == 1


def test_a_handler_is_timed_while_it_runs_even_if_it_raises(watching, read):
    during = []

    def leave():
        with watching.running(Lease()):
            during.append(read("running", queue="email"))
            sys.exit()

    with pytest.raises(SystemExit):
        leave()

    assert during == [1]
    assert read("running", queue="email") == 0
    assert read("handler_seconds_count", queue="email", kind="send") == 1


def test_durations_of_5_ms_and_of_10_minutes_are_in_different_buckets(
    registry, watching
):
    with watching.running(Lease()):
        pass

    bounds = [
        float(sample.labels["le"])
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "lenso_jobs_handler_seconds_bucket"
    ]
    assert (bounds[0], bounds[-2:]) == (0.005, [600, float("inf")])
    assert bounds == sorted(bounds)


def test_the_first_lost_lease_is_an_increase(watching, read):
    watching.claimed("email", 1)
    before = read("leases_lost_total", queue="email")
    watching.lost(Lease())

    assert (before, read("leases_lost_total", queue="email")) == (0, 1)


def test_a_database_that_cannot_be_reached_shows(registry, watching, read):
    assert (read("connected"), read("disconnections_total")) == (1, 0)

    watching.disconnected(psycopg.OperationalError(f"password={SECRET}"))
    assert (read("connected"), read("disconnections_total")) == (0, 1)
    assert SECRET not in generate_latest(registry).decode()

    watching.reconnected(3.0)
    assert (read("connected"), read("disconnections_total")) == (1, 1)


def test_a_claim_has_a_database_though_another_worker_stopped_without(
    registry, watching, read
):
    watching.disconnected(psycopg.OperationalError())

    PrometheusObserver(registry).claimed("email", 1)

    assert read("connected") == 1


def test_observers_of_many_threads_count_together_in_one_registry(
    registry, read, by_label
):
    observers = [PrometheusObserver(registry) for _ in range(8)]

    def work(observer):
        for number in range(250):
            lease = Lease("email" if number % 2 else "slow")
            observer.claimed(lease.queue, 1)
            with observer.running(lease):
                pass
            observer.lost(lease)
            observer.ended(Ended(lease, "retried", "smtp.timeout", 0.1))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, observers))
    finally:
        sys.setswitchinterval(interval)

    each = {"email": 1000, "slow": 1000}
    for counter in ("claimed_total", "ended_total", "leases_lost_total"):
        assert by_label(counter, "queue") == each, counter
    assert by_label("failures_total", "queue") == each
    assert by_label("handler_seconds_count", "queue") == each
    for queue in each:
        assert (read("held", queue=queue), read("running", queue=queue)) == (0, 0)


def test_namespaces_and_registries_are_apart(registry, watching, read):
    PrometheusObserver(registry, namespace="mail").claimed("email", 1)
    PrometheusObserver(CollectorRegistry()).claimed("email", 1)

    assert read("claimed_total", queue="email") is None
    assert registry.get_sample_value("mail_claimed_total", {"queue": "email"}) == 1


def test_prometheus_own_registry_is_the_default():
    PrometheusObserver(namespace="lenso_jobs_default").claimed("email", 1)

    assert REGISTRY.get_sample_value("lenso_jobs_default_held", {"queue": "email"}) == 1


@pytest.mark.parametrize("given", ["prometheus", object(), CollectorRegistry])
def test_an_object_that_is_not_a_registry_is_refused(given):
    with pytest.raises(InvalidArgument, match="registry must be"):
        PrometheusObserver(given)


@pytest.mark.parametrize("namespace", ["", "two words", "1st", "a-b", None, 5])
def test_a_namespace_that_prometheus_refuses_is_refused(namespace, registry):
    with pytest.raises(InvalidArgument, match="namespace must be"):
        PrometheusObserver(registry, namespace=namespace)


def test_metrics_of_another_library_are_left_alone(registry):
    Counter("lenso_jobs_claimed", "Theirs", registry=registry)

    with pytest.raises(ValueError, match="lenso_jobs_claimed"):
        PrometheusObserver(registry)


def test_a_registry_without_other_references_is_freed():
    registry = CollectorRegistry()
    PrometheusObserver(registry)
    left = weakref.ref(registry)

    del registry
    gc.collect()

    assert left() is None
