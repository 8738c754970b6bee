"""Metrics of an Instance for Prometheus: its queues, its workers and its health."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager, nullcontext, suppress
from socket import SHUT_RDWR, socket
from threading import Lock, Timer
from time import monotonic
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from lenso_jobs._conninfo import checked
from lenso_jobs._home import Process
from lenso_jobs._log import Log

try:
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("pip install 'lenso-jobs[prometheus]'") from error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from psycopg_pool import ConnectionPool

    Connection = psycopg.Connection[Any]
    Sample = tuple[str, list[str], float | None]

logger = Log("lenso_jobs.exposition")

MOST_CODES = 20
"""How many failure codes of a queue have a label of their own."""
OTHER_CODES = "other"
"""The label of the other failure codes."""
# A read waits only for a session that has locked a whole table.
_LOCK_MILLISECONDS = 1000
_PING_SECONDS = 1.0

_DESCRIBED = f"""\
up: : 1 if everything could be read from the Instance, 0 if not
scrape_seconds: : Seconds that the reading took
schema_version: : The version of the Instance's schema
health_findings: finding severity: Objects with this finding of inspect_health
queue_jobs: queue state: Live jobs: ready, scheduled (never begun, due later), \
retry_waiting, running, or expired (running under an expired lease)
queue_estimated: queue: 1 if queue_jobs is estimated from a sample
queue_declared: queue: 1 if the document names the queue, 0 if not
queue_oldest_ready_seconds: queue: How long the oldest ready job has been due; or 0
queue_next_due_timestamp_seconds: queue: When the next scheduled job falls due, if any
queue_last_claim_timestamp_seconds: queue: When a job was last claimed, if known
queue_workers_waiting: queue: Sessions that wait for a job to claim
queue_counted_seconds: queue: How far back ended_recently and failures_recently reach: \
5 minutes, or as long as the last 10000 ends of the Instance took
queue_ended_recently: queue outcome: Jobs that ended within counted_seconds
queue_failures_recently: queue code: Jobs that failed within counted_seconds; the \
{MOST_CODES} most frequent codes, and the rest as {OTHER_CODES}
worker_leases: worker: Leases held, expired ones too
worker_expired_leases: worker: Leases held that have expired
worker_estimated: worker: 1 if leases are estimated from a sample
worker_declared: worker: 1 if the document names the worker, 0 if not
worker_oldest_lease_seconds: worker: Age of the oldest lease held, 0 without one
worker_sessions: worker: Sessions that may act as the worker
"""

METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    name: (documentation, tuple(labels.split()))
    for name, labels, documentation in (
        line.split(": ", 2) for line in _DESCRIBED.splitlines()
    )
}
"""Each metric after ``lenso_jobs_``: its help, and its labels after schema."""

_SET = (
    "select set_config('role', coalesce(%s::text, current_setting('role')), true),"
    " set_config('statement_timeout', %s::text, true),"
    " set_config('lock_timeout', %s::text, true)"
)
# Rows of metric, labels and value. Health comes first: it gets the time that it needs.
_READS = (
    """
    select 'schema_version', array[]::text[], version::float8
    from {schema}.installed_version
    """,
    """
    select 'health_findings', array[h.finding, h.severity], count(f.finding)::float8
    from {schema}.health_finding as h
    left join {schema}.inspect_health() as f on f.finding = h.finding
    group by h.finding, h.severity order by h.finding
    """,
    """
    with queue as materialized (select * from {schema}.inspect_queues())
    select s.* from queue as q cross join lateral (values
        ('queue_jobs', array[q.queue, 'ready'], q.ready::float8),
        ('queue_jobs', array[q.queue, 'scheduled'], q.scheduled),
        ('queue_jobs', array[q.queue, 'retry_waiting'], q.retry_waiting),
        ('queue_jobs', array[q.queue, 'running'], q.running),
        ('queue_jobs', array[q.queue, 'expired'], q.expired),
        ('queue_ended_recently', array[q.queue, 'succeeded'], q.succeeded),
        ('queue_ended_recently', array[q.queue, 'failed'], q.failed),
        ('queue_estimated', array[q.queue], q.is_estimate::int),
        ('queue_declared', array[q.queue], q.is_declared::int),
        ('queue_oldest_ready_seconds', array[q.queue],
            coalesce(date_part('epoch', q.oldest_ready_age), 0)),
        ('queue_next_due_timestamp_seconds', array[q.queue],
            date_part('epoch', q.next_due_at)),
        ('queue_last_claim_timestamp_seconds', array[q.queue],
            date_part('epoch', q.last_claimed_at)),
        ('queue_workers_waiting', array[q.queue], q.workers_waiting),
        ('queue_counted_seconds', array[q.queue],
            date_part('epoch', clock_timestamp() - q.counted_since))
    ) as s (metric, labels, value)
    union all
    select 'queue_failures_recently', array[c.queue, c.code], sum(c.jobs)
    from (
        select
            q.queue,
            case when row_number() over most_first <= {most} then e.key else {other} end,
            e.value::float8
        from queue as q cross join lateral jsonb_each_text(q.failure_codes) as e
        window most_first as (
            partition by q.queue order by e.value::float8 desc, e.key collate "C"
        )
    ) as c (queue, code, jobs)
    group by c.queue, c.code
    """,
    """
    select s.* from {schema}.inspect_workers() as w cross join lateral (values
        ('worker_leases', array[w.worker], w.leases::float8),
        ('worker_expired_leases', array[w.worker], w.expired),
        ('worker_estimated', array[w.worker], w.is_estimate::int),
        ('worker_declared', array[w.worker], w.is_declared::int),
        ('worker_oldest_lease_seconds', array[w.worker],
            coalesce(date_part('epoch', clock_timestamp() - w.oldest_leased_at), 0)),
        ('worker_sessions', array[w.worker], w.sessions)
    ) as s (metric, labels, value)
    """,
)


class InstanceCollector(Collector):
    """Reads one Jobs Instance for Prometheus at each scrape.

    ::

        registry.register(InstanceCollector(conninfo, "jobs_email"))

    Every metric is a gauge whose name begins with ``lenso_jobs_``, with the label
    ``schema``. If something cannot be read, ``lenso_jobs_up`` is 0, ``error`` says why,
    and the other metrics are there. Concurrent scrapes share one reading. A registry
    holds one Instance.

    Args:
        source: A connection string or a ``psycopg_pool.ConnectionPool``. With a string
            the collector keeps one connection, and opens it again when it is lost.
        schema: The schema of the Instance.
        caller: The role to act as, by ``SET LOCAL ROLE``: a declared observer. Default:
            the role of the source.
        timeout: Seconds that a reading may take; up to 2 more if the server hangs.

    Raises:
        InvalidArgument: The source is neither.
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
        is_pool = hasattr(source, "connection")
        self._source = source if is_pool else checked(source, "source")
        self._schema = schema
        self._caller = caller
        self._timeout = timeout
        self._home = Process()
        names = {"schema": sql.Identifier(schema), "most": MOST_CODES}
        names["other"] = sql.Literal(OTHER_CODES)
        self._reads = [sql.SQL(each).format(**names) for each in _READS]
        self._connection: Connection | None = None
        self._lock = Lock()
        self._begun = -math.inf
        self._answer: list[GaugeMetricFamily] = []

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the metrics without samples, without a connection."""
        return self._families([])

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the metrics of a new reading.

        Raises:
            RuntimeError: The collector was made in another process.
        """
        self._home.enter()
        asked = monotonic()
        with self._lock:
            # Of the threads that waited for an earlier reading one reads for all.
            if self._begun <= asked:
                self._begun = monotonic()
                self._answer = self._families(self._read())
            return self._answer

    def close(self) -> None:
        """Close the connection that the collector keeps; a pool stays open."""
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
                for statement in self._reads:
                    left = begun + self._timeout - monotonic()
                    try:
                        samples += self._rows(connection, statement, left)
                    except psycopg.Error as refusal:
                        if connection.broken:
                            raise
                        found = found or refusal
        except psycopg.Error as loss:
            found = loss
        self._say(found)
        samples.append(("up", [], float(found is None)))
        samples.append(("scrape_seconds", [], monotonic() - begun))
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
            lent: Any = nullcontext(self._connection)
        else:
            lent = self._source.connection(timeout=max(0, deadline - monotonic()))
        with lent as connection, _cut_off(connection, deadline + 1 - monotonic()):
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
    ) -> list[Sample]:
        limits = (max(1, round(left * 1000)), _LOCK_MILLISECONDS)
        with (
            connection.transaction(),
            # Not of the pool's own class, which may read no binary results.
            psycopg.Cursor(connection, row_factory=tuple_row) as cursor,
        ):
            cursor.execute(_SET, (self._caller, *limits))
            return cursor.execute(statement, binary=True).fetchall()


def _opened(conninfo: str, deadline: float) -> Connection:
    # Each of several hosts gets so long, and there must be time to read the last.
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
    """End the wait for a server that does not keep its own time-outs."""
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
