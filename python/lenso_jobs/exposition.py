"""Metrics of an Instance for Prometheus: what its queues, workers and health are."""

from __future__ import annotations

import json
import logging
import math
import os
from contextlib import contextmanager, suppress
from socket import SHUT_RDWR, socket
from threading import Lock, Timer
from time import monotonic
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from lenso_jobs._home import Process

try:
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("pip install 'lenso-jobs[prometheus]'") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from psycopg_pool import ConnectionPool

    Connection = psycopg.Connection[Any]
    Rows = list[dict[str, Any]]
    Sample = tuple[str, tuple[str, ...], float | None]

logger = logging.getLogger("lenso_jobs.exposition")

MOST_CODES = 20
"""How many failure codes of a queue are told apart."""
OTHER_CODES = "other"
"""The label of the rest."""
_STATES = ("ready", "scheduled", "retry_waiting", "running", "expired")
_OUTCOMES = ("succeeded", "failed")
# A read waits for nobody but who has locked a whole table.
_LOCK_MILLISECONDS = 1000
_PING_SECONDS = 1.0

METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "up": ("1 if all of this could be read from the Instance, 0 if not", ()),
    "scrape_seconds": ("How long reading it took", ()),
    "schema_version": ("The version of the Instance's schema", ()),
    "health_findings": (
        "What is wrong by inspect_health, on how many objects; 0 for what is not",
        ("finding", "severity"),
    ),
    "queue_jobs": (
        (
            "Live jobs: ready, scheduled (never begun, due later), retry_waiting,"
            " running, or expired (running under a lease that ran out)"
        ),
        ("queue", "state"),
    ),
    "queue_estimated": ("1 if queue_jobs is scaled up from a sample", ("queue",)),
    "queue_declared": ("1 if the document names the queue, 0 if not", ("queue",)),
    "queue_oldest_ready_seconds": (
        "How long the oldest ready job has been due, 0 without one",
        ("queue",),
    ),
    "queue_next_due_timestamp_seconds": (
        "When the next job that is not due falls due; no sample without one",
        ("queue",),
    ),
    "queue_last_claim_timestamp_seconds": (
        "When a job was last claimed, as far as is known; no sample if it is not",
        ("queue",),
    ),
    "queue_workers_waiting": ("Sessions that wait for a job to claim", ("queue",)),
    "queue_counted_seconds": (
        (
            "How far back ended_recently and failures_recently reach: 5 minutes, or as"
            " long as the last 10000 ends of the Instance took"
        ),
        ("queue",),
    ),
    "queue_ended_recently": (
        "Jobs that ended within the last counted_seconds; rises and falls",
        ("queue", "outcome"),
    ),
    "queue_failures_recently": (
        (
            "Jobs that ended failed within the last counted_seconds, by failure code;"
            f" the {MOST_CODES} most frequent, the rest together as {OTHER_CODES}"
        ),
        ("queue", "code"),
    ),
    "worker_leases": ("Leases held, expired ones too", ("worker",)),
    "worker_expired_leases": ("Leases held that ran out", ("worker",)),
    "worker_estimated": ("1 if leases are scaled up from a sample", ("worker",)),
    "worker_declared": ("1 if the document names the worker, 0 if not", ("worker",)),
    "worker_oldest_lease_seconds": (
        "How long ago the oldest lease held was taken, 0 without one",
        ("worker",),
    ),
    "worker_sessions": ("Sessions that may act as the worker", ("worker",)),
}
"""Each metric after ``lenso_jobs_``: its help, and its labels after schema."""

_SET = (
    "select set_config('role', coalesce(%s::text, current_setting('role')), true),"
    " set_config('statement_timeout', %s::text, true),"
    " set_config('lock_timeout', %s::text, true)"
)


class InstanceCollector(Collector):
    """Reads one Jobs Instance for Prometheus, whenever a registry is asked.

    ::

        registry.register(InstanceCollector(conninfo, "jobs_email"))

    Every metric is a gauge, begins with ``lenso_jobs_`` and has the label ``schema``. If
    something cannot be read ``lenso_jobs_up`` is 0, ``error`` says why, and what could
    be read is there all the same. Threads that ask at the same time share an answer. A
    registry holds one Instance.

    Args:
        source: A connection string, for a connection of its own that is kept and opened
            anew when lost, or a ``psycopg_pool.ConnectionPool``.
        schema: The schema of the Instance.
        caller: The role to act as, by ``SET LOCAL ROLE``: a declared observer. The
            source's own role when left out.
        timeout: Seconds after which the server gives up; 2 more if it does not answer.
    """

    def __init__(
        self,
        source: str | ConnectionPool[Any],
        schema: str,
        caller: str | None = None,
        *,
        timeout: float = 5.0,
    ) -> None:
        self.error: psycopg.Error | None = None
        """Why ``lenso_jobs_up`` was last 0; None after 1."""
        self._source = source
        self._schema = schema
        self._caller = caller
        self._timeout = timeout
        self._home = Process()
        self._reads = [
            (sql.SQL(statement).format(schema=sql.Identifier(schema)), samples)
            for statement, samples in _READS
        ]
        self._connection: Connection | None = None
        self._lock = Lock()
        self._begun = -math.inf
        self._answer: list[GaugeMetricFamily] = []

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Tell the names, without asking the server."""
        return self._families([])

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Read the Instance.

        Raises:
            RuntimeError: The process was forked since.
        """
        self._home.enter()
        asked = monotonic()
        with self._lock:
            # Of those who waited for an earlier answer one asks for all.
            if self._begun <= asked:
                self._begun = monotonic()
                self._answer = self._families(self._read())
            return self._answer

    def close(self) -> None:
        """Close the connection that is kept; a pool stays open."""
        if self._home.is_here():
            with self._lock:
                if self._connection is not None:
                    self._connection.close()

    def _families(self, samples: Iterable[Sample]) -> list[GaugeMetricFamily]:
        families = {
            name: GaugeMetricFamily(
                f"lenso_jobs_{name}", documentation, labels=("schema", *labels)
            )
            for name, (documentation, labels) in METRICS.items()
        }
        for name, labels, value in samples:
            if value is not None:
                families[name].add_metric((self._schema, *labels), value)
        return list(families.values())

    def _read(self) -> list[Sample]:
        begun = monotonic()
        samples: list[Sample] = []
        found: psycopg.Error | None = None
        try:
            with self._connected(begun + self._timeout) as connection:
                for statement, samples_of in self._reads:
                    left = begun + self._timeout - monotonic()
                    try:
                        samples += samples_of(self._rows(connection, statement, left))
                    except psycopg.Error as refusal:
                        if connection.broken:
                            raise
                        found = found or refusal
        except psycopg.Error as loss:
            found = loss
        self._say(found)
        samples.append(("up", (), int(found is None)))
        samples.append(("scrape_seconds", (), monotonic() - begun))
        return samples

    def _say(self, found: psycopg.Error | None) -> None:
        if found is not None and self.error is None:
            said = str(found).partition("\n")[0]
            logger.warning("Instance %s cannot be read: %s", self._schema, said)
        elif found is None and self.error is not None:
            logger.warning("Instance %s can be read again", self._schema)
        self.error = found

    @contextmanager
    def _connected(self, deadline: float) -> Iterator[Connection]:
        if isinstance(self._source, str):
            self._connection = self._kept() or _opened(self._source, deadline)
            with _cut_off(self._connection, deadline + 1 - monotonic()):
                yield self._connection
        else:
            left = max(0, deadline - monotonic())
            with (
                self._source.connection(timeout=left) as connection,
                _cut_off(connection, deadline + 1 - monotonic()),
            ):
                yield connection

    def _kept(self) -> Connection | None:
        if self._connection is None:
            return None
        try:
            with _cut_off(self._connection, _PING_SECONDS):
                self._connection.execute("")
        except psycopg.Error:
            self._connection.close()
            return None
        return self._connection

    def _rows(
        self, connection: Connection, statement: sql.Composed, left: float
    ) -> Rows:
        milliseconds = max(1, round(left * 1000))
        with (
            connection.transaction(),
            connection.cursor(row_factory=dict_row) as cursor,
        ):
            cursor.execute(_SET, (self._caller, milliseconds, _LOCK_MILLISECONDS))
            return cursor.execute(statement).fetchall()


def _opened(conninfo: str, deadline: float) -> Connection:
    # Each of several hosts is given that long, and the last has to be read from.
    hosts = str(conninfo_to_dict(conninfo).get("host", "")).count(",") + 1
    return psycopg.connect(
        conninfo,
        autocommit=True,
        prepare_threshold=None,
        connect_timeout=max(2, round((deadline - monotonic()) / hosts)),
        fallback_application_name="lenso-jobs metrics",
    )


@contextmanager
def _cut_off(connection: Connection, seconds: float) -> Iterator[None]:
    """End the wait for a server that does not even keep its own time-outs."""
    try:
        line = socket(fileno=os.dup(connection.fileno()))
    except OSError as error:
        raise psycopg.OperationalError("the connection is lost") from error

    def cut() -> None:
        with suppress(OSError):
            line.shutdown(SHUT_RDWR)

    timer = Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        line.close()


def _of_version(rows: Rows) -> Iterator[Sample]:
    for row in rows:
        yield "schema_version", (), row["version"]


def _of_health(rows: Rows) -> Iterator[Sample]:
    for row in rows:
        yield "health_findings", (row["finding"], row["severity"]), row["found"]


def _of_queues(rows: Rows) -> Iterator[Sample]:
    for row in rows:
        queue = row["queue"]
        for state in _STATES:
            yield "queue_jobs", (queue, state), row[state]
        for outcome in _OUTCOMES:
            yield "queue_ended_recently", (queue, outcome), row[outcome]
        for code, number in _most_frequent(json.loads(row["failure_codes"])).items():
            yield "queue_failures_recently", (queue, code), number
        for name in (
            *("estimated", "declared", "oldest_ready_seconds"),
            *("next_due_timestamp_seconds", "last_claim_timestamp_seconds"),
            *("workers_waiting", "counted_seconds"),
        ):
            yield f"queue_{name}", (queue,), row[name]


def _of_workers(rows: Rows) -> Iterator[Sample]:
    for row in rows:
        worker = (row.pop("worker"),)
        for name, value in row.items():
            yield f"worker_{name}", worker, value


def _most_frequent(numbers: dict[str, int]) -> dict[str, int]:
    ordered = sorted(numbers.items(), key=lambda each: (-each[1], each[0]))
    told = dict(ordered[:MOST_CODES])
    rest = sum(number for _, number in ordered[MOST_CODES:])
    if rest:
        told[OTHER_CODES] = told.get(OTHER_CODES, 0) + rest
    return told


# Health is read first: of the time given it gets what it needs, whatever counting takes.
_READS: list[tuple[str, Callable[[Rows], Iterator[Sample]]]] = [
    ("select version from {schema}.installed_version", _of_version),
    (
        (
            "select h.finding, h.severity, count(f.finding) as found"
            " from {schema}.health_finding as h"
            " left join {schema}.inspect_health() as f on f.finding = h.finding"
            " group by h.finding, h.severity order by h.finding"
        ),
        _of_health,
    ),
    (
        (
            "select q.queue, q.ready, q.scheduled, q.retry_waiting, q.running, q.expired,"
            " q.succeeded, q.failed, q.failure_codes::text as failure_codes,"
            " q.is_estimate::integer as estimated, q.is_declared::integer as declared,"
            " coalesce(date_part('epoch', q.oldest_ready_age), 0) as oldest_ready_seconds,"
            " date_part('epoch', q.next_due_at) as next_due_timestamp_seconds,"
            " date_part('epoch', q.last_claimed_at) as last_claim_timestamp_seconds,"
            " q.workers_waiting,"
            " date_part('epoch', clock_timestamp() - q.counted_since) as counted_seconds"
            " from {schema}.inspect_queues() as q"
        ),
        _of_queues,
    ),
    (
        (
            "select w.worker, w.leases, w.expired as expired_leases,"
            " w.is_estimate::integer as estimated, w.is_declared::integer as declared,"
            " coalesce(date_part('epoch', clock_timestamp() - w.oldest_leased_at), 0)"
            " as oldest_lease_seconds, w.sessions"
            " from {schema}.inspect_workers() as w"
        ),
        _of_workers,
    ),
]
