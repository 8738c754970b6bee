"""Traces: what an exporter gets of jobs, and that either side finds the other by the id."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from threading import Barrier, Event, Timer
from uuid import UUID, uuid4

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from psycopg.conninfo import make_conninfo

from lenso_jobs import InvalidArgument, NewJob
from lenso_jobs.tracing import Tracing
from lenso_jobs.worker import AsyncWorker, Fail, Observer, Release, Retry, Worker

SECRET = "hunter2"
RANDOM = Random(7)
HALF = 1 << 55


def uuid7(low=None):
    """A UUID version 7, random or with these as its last 56 bits."""
    bits = RANDOM.getrandbits(128) & ~(0xF << 76) & ~(3 << 62) | 7 << 76 | 2 << 62
    return UUID(int=bits if low is None else bits >> 56 << 56 | low)


@dataclass(eq=False)
class Lease:
    """What an observer reads of a lease."""

    job_id: UUID = field(default_factory=uuid7)
    queue: str = "email"
    kind: str = "send"
    attempt: int = 1


class Stopper(Observer):
    """Stops a worker once so many jobs have left it."""

    def __init__(self, jobs):
        self.left = jobs

    def ended(self, *_):
        self.left -= 1
        if not self.left:
            self.stop()


@pytest.fixture
def run(conninfo):
    """Run a worker until so many jobs have left it, or for 20 seconds."""

    def run(kind, handler, observers, jobs=1, **options):
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

    return run


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


@pytest.fixture
def tracer(provider):
    """The application's own."""
    return provider.get_tracer("application")


@pytest.fixture
def tracing(provider):
    return Tracing(provider)


@pytest.fixture
def linked(exporter, tracer):
    """The contexts that a span gets links to when it links to jobs."""

    def linked(tracing, *jobs):
        with tracer.start_as_current_span("place an order"):
            tracing.link(*jobs)
        return [link.context for link in exporter.get_finished_spans()[-1].links]

    return linked


@pytest.fixture
def attempts(exporter):
    """The finished spans of attempts, oldest first."""

    def attempts():
        return [
            span
            for span in exporter.get_finished_spans()
            if span.kind is trace.SpanKind.CONSUMER
        ]

    return attempts


def place(context):
    """The part of a span's context that another process receives."""
    return context.trace_id, context.span_id, int(context.trace_flags)


def is_sampled(tracing, job_id):
    with tracing.running(Lease(job_id)):
        return trace.get_current_span().get_span_context().trace_flags.sampled


def test_an_attempt_is_a_span_of_the_trace_with_the_jobs_id(
    run, enqueue, tracing, attempts
):
    job_id = enqueue(kind="send-welcome")

    run(Worker, lambda _: None, [tracing])

    (span,) = attempts()
    assert span.name == "process email"
    assert span.kind is trace.SpanKind.CONSUMER
    assert f"{span.context.trace_id:032x}" == job_id.hex
    assert f"{span.parent.span_id:016x}" == job_id.hex[16:]
    assert span.parent.is_remote
    assert dict(span.attributes) == {
        "messaging.system": "lenso_jobs",
        "messaging.destination.name": "email",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": str(job_id),
        "lenso_jobs.kind": "send-welcome",
        "lenso_jobs.attempt": 1,
    }
    assert span.status.status_code is trace.StatusCode.UNSET
    assert (span.events, span.links) == ((), ())


def test_producer_and_all_attempts_meet_in_one_place(
    run, producing, key, make_due, provider, linked, attempts
):
    job = producing.enqueue("email", "send", {}, idempotency_key=key)
    produced = linked(Tracing(provider), job)

    def handler(lease):
        if lease.attempt == 1:
            raise Retry("smtp.timeout")

    run(Worker, handler, [Tracing(provider)])
    make_due(job.job_id)
    run(Worker, handler, [Tracing(provider)])

    first, second = attempts()
    assert [place(first.parent)] == [place(second.parent)] == [*map(place, produced)]
    assert first.context.span_id != second.context.span_id
    assert [s.attributes["lenso_jobs.attempt"] for s in (first, second)] == [1, 2]


def test_a_producer_links_to_jobs_items_and_ids(producing, tracing, linked):
    jobs = producing.enqueue_many(
        [
            NewJob("email", "send", {}, f"key-{uuid4()}"),
            {"queue": "email", "kind": "no kind", "payload": {}},
            NewJob("email", "send", {}, f"key-{uuid4()}"),
        ]
    )
    job_id = uuid7()

    contexts = linked(tracing, *jobs, job_id)

    assert [item.outcome for item in jobs] == ["created", "invalid_job", "created"]
    assert [UUID(int=context.trace_id) for context in contexts] == [
        jobs[0].job_id,
        jobs[2].job_id,
        job_id,
    ]
    assert all(context.is_remote and context.is_valid for context in contexts)


def test_a_link_without_a_current_span_returns_none(tracing, exporter):
    tracing.link(uuid7())

    assert exporter.get_finished_spans() == ()


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "share"), [(0, 0), (0.1, 0.1), (0.5, 0.5), (1, 1)])
def test_producers_and_attempts_agree_on_which_jobs_are_sampled(
    provider, exporter, linked, attempts, ratio, share
):
    producer, worker = (Tracing(provider, ratio=ratio) for _ in range(2))
    ids = [uuid7() for _ in range(1000)]

    produced = [linked(producer, job_id)[0].trace_flags.sampled for job_id in ids]
    worked = [is_sampled(worker, job_id) for job_id in ids]
    worked_again = [is_sampled(worker, job_id) for job_id in ids]

    assert produced == worked == worked_again
    assert abs(sum(worked) / len(ids) - share) < (0.08 if 0 < share < 1 else 1e-9)
    assert len(attempts()) == 2 * sum(worked)


def test_jobs_sampled_at_a_ratio_are_sampled_at_a_higher_one(provider):
    ids = [uuid7() for _ in range(500)]
    some, more = (
        {i for i in ids if is_sampled(Tracing(provider, ratio=ratio), i)}
        for ratio in (0.3, 0.6)
    )

    assert some < more


def test_the_last_56_bits_decide_as_opentelemetry_has_it(provider):
    tracing = Tracing(provider, ratio=0.5)

    assert is_sampled(tracing, uuid7(HALF))
    assert not is_sampled(tracing, uuid7(HALF - 1))


def test_the_ids_of_real_jobs_are_sampled_evenly(owner, provider):
    rows = owner.rows(
        "select _enqueue_job_id(clock_timestamp()) from generate_series(1, 400)"
    )
    tracing = Tracing(provider, ratio=0.5)

    assert 120 < sum(is_sampled(tracing, job_id) for (job_id,) in rows) < 280


def test_nothing_in_a_job_that_is_not_sampled_is_exported(
    run, enqueue, provider, tracer, exporter
):
    enqueue()

    def handler(lease):
        with tracer.start_as_current_span("send"):
            raise ValueError

    tally = run(Worker, handler, [Tracing(provider, ratio=0)])

    assert tally.retried == 1
    assert exporter.get_finished_spans() == ()


def crash(text):
    raise ValueError(text) from KeyError(text)


def quit_with(text):
    raise SystemExit(text)


def retry(text):
    raise Retry("smtp.timeout") from ValueError(text)


def fail(text):
    raise Fail("address.malformed") from ValueError(text)


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
def test_a_span_has_the_code_of_a_failure_and_nothing_of_its_text(
    run, enqueue, tracing, exporter, attempts, kind
):
    ways = {
        "crash": (crash, "ValueError"),
        "retry": (retry, "smtp.timeout"),
        "fail": (fail, "address.malformed"),
    }
    for way in ways:
        enqueue(kind=way, payload={"secret": SECRET}, key=f"{SECRET}-{uuid4()}")
    tokens = []

    def handler(lease):
        tokens.append(lease.lease_token)
        ways[lease.kind][0](lease.payload["secret"])

    async def handle(lease):
        handler(lease)

    run(kind, handle if kind is AsyncWorker else handler, [tracing], len(ways))

    assert {
        s.attributes["lenso_jobs.kind"]: s for s in attempts()
    }.keys() == ways.keys()
    for span in attempts():
        code = ways[span.attributes["lenso_jobs.kind"]][1]
        assert span.attributes["error.type"] == code
        assert span.status.status_code is trace.StatusCode.ERROR
        assert span.status.description == code
        assert span.events == ()
    exported = "".join(span.to_json() for span in exporter.get_finished_spans())
    for secret in (SECRET, *tokens):
        assert secret not in exported


def test_a_release_is_no_error(tracing, attempts):
    with pytest.raises(Release), tracing.running(Lease()):
        raise Release("not_yet", after=30)

    (span,) = attempts()
    assert span.attributes["lenso_jobs.released"] == "not_yet"
    assert span.status.status_code is trace.StatusCode.UNSET


def test_an_exception_of_a_handler_passes_through_the_span(tracing, attempts):
    def leave():
        with tracing.running(Lease()):
            quit_with(SECRET)

    with pytest.raises(SystemExit, match=SECRET):
        leave()

    (span,) = attempts()
    assert span.attributes["error.type"] == "SystemExit"
    assert SECRET not in span.to_json()


def parents(exporter):
    """The span ids and trace ids of attempts, and those of what their handlers did."""
    spans = exporter.get_finished_spans()
    return (
        {(s.context.trace_id, s.context.span_id) for s in spans if s.parent.is_remote},
        {
            (s.context.trace_id, s.parent.span_id)
            for s in spans
            if not s.parent.is_remote
        },
    )


def test_the_spans_of_a_handler_on_a_thread_are_in_its_attempt(
    run, enqueue, tracing, tracer, exporter
):
    for _ in range(4):
        enqueue()
    together = Barrier(4, timeout=20)

    def handler(lease):
        together.wait()
        with tracer.start_as_current_span(str(lease.job_id)) as span:
            together.wait()
            assert span.get_span_context().trace_id == lease.job_id.int

    tally = run(Worker, handler, [tracing], 4, concurrency=4)

    assert tally.succeeded == 4
    attempts, inner = parents(exporter)
    assert attempts == inner
    assert len(attempts) == 4


def test_the_spans_of_a_handler_in_a_task_are_in_its_attempt(
    run, enqueue, tracing, tracer, exporter
):
    for _ in range(4):
        enqueue()
    together = asyncio.Barrier(4)

    async def handler(lease):
        await together.wait()
        with tracer.start_as_current_span(str(lease.job_id)) as span:
            await together.wait()
            assert span.get_span_context().trace_id == lease.job_id.int

    tally = run(AsyncWorker, handler, [tracing], 4, concurrency=4)

    assert tally.succeeded == 4
    attempts, inner = parents(exporter)
    assert attempts == inner
    assert len(attempts) == 4


def test_spans_of_many_threads_are_kept_apart(tracing, attempts):
    def work(_):
        for _ in range(50):
            lease = Lease(uuid4())
            with tracing.running(lease):
                span = trace.get_current_span()
                tracing.lost(lease)
            assert span.get_span_context().trace_id == lease.job_id.int
            assert len(span.events) == 1
            assert trace.get_current_span() is trace.INVALID_SPAN

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))

    assert len(attempts()) == 400
    assert not tracing._spans


class Lost(Observer):
    def __init__(self):
        self.told = Event()

    def lost(self, *_):
        self.told.set()


@pytest.fixture
def lose(owner, expire):
    """Let the lease of a last attempt run out; its worker learns of it in 1/3 second."""
    owner.execute("update instance set lease_seconds = 1")
    return expire


def test_a_lost_lease_is_an_event_of_the_attempt(run, enqueue, lose, tracing, attempts):
    enqueue(max_attempts=1)
    lost = Lost()

    def handler(lease):
        lose(lease.job_id)
        assert lost.told.wait(20)

    tally = run(Worker, handler, [tracing, lost], concurrency=1)

    assert tally.lost == 1
    (span,) = attempts()
    assert [event.name for event in span.events] == ["lenso_jobs.lease_lost"]
    assert not span.events[0].attributes
    assert span.status.status_code is trace.StatusCode.UNSET


def test_an_attempt_that_was_cancelled_says_so(run, enqueue, lose, tracing, attempts):
    enqueue(max_attempts=1)

    async def handler(lease):
        lose(lease.job_id)
        await asyncio.sleep(20)

    tally = run(AsyncWorker, handler, [tracing], concurrency=1)

    assert tally.lost == 1
    (span,) = attempts()
    assert span.attributes["error.type"] == "asyncio.exceptions.CancelledError"


def test_a_lease_that_is_lost_afterwards_is_not_an_event(tracing, attempts):
    lease = Lease()
    with tracing.running(lease):
        pass

    tracing.lost(lease)

    (span,) = attempts()
    assert span.events == ()


def test_without_a_provider_the_global_one_makes_the_spans(
    monkeypatch, provider, attempts
):
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)

    with Tracing().running(Lease()):
        pass

    assert len(attempts()) == 1


def test_without_an_sdk_nothing_is_traced(exporter):
    tracing = Tracing()

    with tracing.running(lease := Lease()):
        tracing.link(lease.job_id)

    assert exporter.get_finished_spans() == ()
    assert trace.get_current_span() is trace.INVALID_SPAN


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), "0.5", None, True])
def test_a_ratio_that_is_not_a_share_is_refused(ratio):
    with pytest.raises(InvalidArgument, match="ratio must be a number from 0 to 1"):
        Tracing(ratio=ratio)


@pytest.mark.parametrize("provider", ["otel", object(), trace.get_tracer_provider])
def test_an_object_that_is_not_a_tracer_provider_is_refused(provider):
    with pytest.raises(InvalidArgument, match="tracer_provider must be"):
        Tracing(provider)
