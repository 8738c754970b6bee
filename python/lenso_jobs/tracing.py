"""OpenTelemetry traces of jobs. Nothing is stored: the job's id leads to its trace.

The id of a job, a UUID, is the id of its trace. The attempts are spans in that trace.
Their parent span is never exported; its id is the last 16 hex digits of the job's id,
which are never zero. The producer's span links to that parent.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from lenso_jobs.errors import InvalidArgument
from lenso_jobs.worker._outcome import Release, chosen, code_of
from lenso_jobs.worker.observer import Observer

try:
    from opentelemetry import trace
except ImportError as error:
    raise ImportError("pip install 'lenso-jobs[otel]'") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lenso_jobs._models import EnqueuedItem, EnqueuedJob
    from lenso_jobs.worker._lease import WorkerLease

_LOW_64 = 2**64 - 1
_LOW_56 = 2**56 - 1


class Tracing(Observer):
    """Makes a span of every attempt, current while the handler runs.

    The span covers the run of the handler, not its report to the server. Of an exception
    it holds the failure code, never the text.

    Args:
        tracer_provider: What makes the spans. By default the global one.
        ratio: The share of jobs that are sampled, 0 to 1. Producers and workers with the
            same ratio agree on each job and all its attempts. It holds for samplers that
            follow the parent, as the SDK's does by default.

    Raises:
        InvalidArgument: An argument is out of range.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        *,
        ratio: float = 1.0,
    ) -> None:
        is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if not is_number or not 0 <= ratio <= 1:  # NaN is not
            raise InvalidArgument("ratio must be a number from 0 to 1")
        if not isinstance(tracer_provider, trace.TracerProvider | None):
            raise InvalidArgument("tracer_provider must be a TracerProvider or None")
        # The last 56 bits are random, and OpenTelemetry's threshold samplers use them.
        # TraceIdRatioBased uses the last 64, of which the first two are always 10. So it
        # samples no job up to a ratio of 1/2, and every job from 3/4 on.
        self._threshold = 2**56 - round(ratio * 2**56)
        self._tracer = trace.get_tracer("lenso_jobs", tracer_provider=tracer_provider)
        self._spans: dict[WorkerLease, trace.Span] = {}

    def link(self, *jobs: EnqueuedJob | EnqueuedItem | UUID) -> None:
        """Link the current span to the attempts of jobs that were just enqueued.

        Items without a job are skipped. A span keeps 128 links by the SDK's default.
        """
        span = trace.get_current_span()
        for job in jobs:
            job_id = job if isinstance(job, UUID) else job.job_id
            if job_id is not None:
                span.add_link(self._parent(job_id))

    @contextmanager
    def running(self, lease: WorkerLease) -> Iterator[None]:
        """Run the handler in a span."""
        parent = trace.NonRecordingSpan(self._parent(lease.job_id))
        with self._tracer.start_as_current_span(
            f"process {lease.queue}",
            trace.set_span_in_context(parent),
            trace.SpanKind.CONSUMER,
            {
                "messaging.system": "lenso_jobs",
                "messaging.destination.name": lease.queue,
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.message.id": str(lease.job_id),
                "lenso_jobs.kind": lease.kind,
                "lenso_jobs.attempt": lease.attempt,
            },
            record_exception=False,  # its text may be the payload's
            set_status_on_exception=False,
        ) as span:
            self._spans[lease] = span
            try:
                yield
            except BaseException as error:
                code = code_of(error)
                if isinstance(chosen(error), Release):
                    span.set_attribute("lenso_jobs.released", code)
                else:
                    span.set_attribute("error.type", code)
                    span.set_status(trace.Status(trace.StatusCode.ERROR, code))
                raise
            finally:
                del self._spans[lease]

    def lost(self, lease: WorkerLease) -> None:
        """Note in the span of the attempt that its lease was lost."""
        span = self._spans.get(lease)
        if span is not None:
            span.add_event("lenso_jobs.lease_lost")

    def _parent(self, job_id: UUID) -> trace.SpanContext:
        is_sampled = job_id.int & _LOW_56 >= self._threshold
        flags = trace.TraceFlags.SAMPLED if is_sampled else trace.TraceFlags.DEFAULT
        return trace.SpanContext(
            trace_id=job_id.int,
            span_id=job_id.int & _LOW_64,
            is_remote=True,
            trace_flags=trace.TraceFlags(flags),
        )
