"""Prometheus metrics of workers: the jobs that they claim, hold, run and end."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lenso_jobs.errors import InvalidArgument
from lenso_jobs.worker import current_shard
from lenso_jobs.worker.observer import Ended, Observer

try:
    from prometheus_client import (
        REGISTRY,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
    )
except ImportError as error:
    raise ImportError("pip install 'lenso-jobs[prometheus]'") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lenso_jobs.worker._lease import WorkerLease

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BUCKETS = (0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)


class PrometheusObserver(Observer):
    """Counts what workers do. The names of its metrics begin with the namespace.

    ::

        claimed_total{queue}               jobs leased
        ended_total{queue,kind,outcome}    jobs by outcome, as in the Tally of run
        failures_total{queue,code}         failure codes reported, worker_shutdown too
        held{queue}                        jobs claimed and not ended
        running{queue}                     handlers that run, with or without a lease
        handler_seconds{queue,kind}        how long handlers ran
        leases_lost_total{queue}           leases lost while their handler ran
        disconnections_total               how often the database could not be reached
        connected                          0 while it cannot be reached, else 1

    With the workers of a fleet, ``connected`` is 0 while any shard cannot be reached.
    Several workers may share one observer. Several observers of one registry and
    namespace count in the same metrics. Kinds and failure codes are labels: keep them
    few.

    Args:
        registry: Where the metrics are registered. By default prometheus_client's own.
        namespace: What the names begin with.

    Raises:
        InvalidArgument: An argument is out of range.
        ValueError: The registry has other metrics by these names.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        namespace: str = "lenso_jobs",
    ) -> None:
        registry = REGISTRY if registry is None else registry
        if not isinstance(registry, CollectorRegistry):
            raise InvalidArgument("registry must be a CollectorRegistry or None")
        if not isinstance(namespace, str) or not _NAME.fullmatch(namespace):
            raise InvalidArgument(
                "namespace must be letters, digits and _, and begin with no digit"
            )
        with _known_lock:
            known = _known.setdefault(registry, {})
            if namespace not in known:
                known[namespace] = _Metrics(registry, namespace)
            self._metrics = known[namespace]

    def claimed(self, queue: str, count: int) -> None:
        """Count jobs that were leased."""
        self._metrics.claimed.labels(queue).inc(count)
        self._metrics.lost.labels(queue)  # an alert needs the 0 before the first
        self._metrics.held.labels(queue).inc(count)
        # A worker that lost its connection may have stopped since.
        self._metrics.note_connected()

    @contextmanager
    def running(self, lease: WorkerLease) -> Iterator[None]:
        """Time the handler."""
        seconds = self._metrics.seconds.labels(lease.queue, lease.kind)
        running = self._metrics.running.labels(lease.queue)
        with running.track_inprogress(), seconds.time():
            yield

    def lost(self, lease: WorkerLease) -> None:
        """Count a lease that was lost while its handler runs."""
        self._metrics.lost.labels(lease.queue).inc()

    def ended(self, ended: Ended) -> None:
        """Count what became of a job."""
        lease = ended.lease
        self._metrics.ended.labels(lease.queue, lease.kind, ended.outcome).inc()
        if ended.code is not None and ended.outcome != "released":
            self._metrics.failures.labels(lease.queue, ended.code).inc()
        self._metrics.held.labels(lease.queue).dec()

    def disconnected(self, error: BaseException) -> None:
        """Note that the database cannot be reached."""
        del error
        self._metrics.disconnections.inc()
        self._metrics.note_disconnected()

    def reconnected(self, seconds: float) -> None:
        """Note that the database responds again."""
        del seconds
        self._metrics.note_connected()


class _Metrics:
    """The metrics of one namespace in one registry."""

    def __init__(self, registry: CollectorRegistry, namespace: str) -> None:
        counter = partial(Counter, namespace=namespace, registry=registry)
        gauge = partial(Gauge, namespace=namespace, registry=registry)
        summed = partial(gauge, multiprocess_mode="livesum")
        timer = partial(Histogram, namespace=namespace, registry=registry)
        queue, sort = ["queue"], ["queue", "kind"]
        self.claimed = counter("claimed_total", "Jobs leased", queue)
        self.ended = counter("ended_total", "Jobs by outcome", [*sort, "outcome"])
        self.failures = counter("failures_total", "Failures by code", [*queue, "code"])
        self.held = summed("held", "Jobs claimed and not ended", queue)
        self.running = summed("running", "Handlers that run", queue)
        self.seconds = timer(
            "handler_seconds", "How long handlers ran", sort, buckets=_BUCKETS
        )
        self.lost = counter("leases_lost_total", "Leases lost in a run", queue)
        self.disconnections = counter(
            "disconnections_total", "How often the database could not be reached"
        )
        self.connected = gauge(
            "connected", "1 if the database responds", multiprocess_mode="livemin"
        )
        self.connected.set(1)
        # The shards that cannot be reached; None stands for a server without a fleet.
        self._lost: set[int | None] = set()
        self._lock = Lock()

    def note_connected(self) -> None:
        """Note that the server of this thread's worker responds."""
        with self._lock:
            self._lost.discard(current_shard())
            self.connected.set(not self._lost)

    def note_disconnected(self) -> None:
        """Note that the server of this thread's worker cannot be reached."""
        with self._lock:
            self._lost.add(current_shard())
            self.connected.set(0)


_known: WeakKeyDictionary[CollectorRegistry, dict[str, _Metrics]] = WeakKeyDictionary()
_known_lock = Lock()
