# Written by tools/async_to_sync.py from _async_client.py: change that one.
# ruff: noqa: SIM117
"""The client: one method for each verb, one statement for each method."""

from __future__ import annotations

from contextlib import closing, contextmanager, nullcontext
from math import inf
from operator import methodcaller
from threading import Lock
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators
from psycopg.pq import TransactionStatus

from lenso_jobs import _calls, _given, _waiting
from lenso_jobs import _models as m
from lenso_jobs._home import Process
from lenso_jobs._pipelined import pipelined
from lenso_jobs.errors import Translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from datetime import datetime, timedelta
    from uuid import UUID

    from psycopg_pool import ConnectionPool

    from lenso_jobs._calls import Call

    Connection = psycopg.Connection[Any]
    Pool = ConnectionPool[Any]

Row = TypeVar("Row")
Found = TypeVar("Found")
W = TypeVar("W", bound="Waiter")
_NOTHING = nullcontext()
# One for each connection on which a client acts as a caller.
_ACTING: WeakKeyDictionary[Any, Lock] = WeakKeyDictionary()


class Jobs(_calls.Verbs):
    """The verbs of one Jobs Instance, on a connection or a pool of yours.

    On a connection each call joins the transaction in progress, which you commit. A
    call that fails aborts it: to go on after a refusal, use a savepoint. On a pool each
    call is one transaction. Threads share a pool, not a connection: a
    transaction belongs to one of them.

    Args:
        connection_or_pool: A ``psycopg.Connection`` or a
            ``psycopg_pool.ConnectionPool``. You close it; this client does not.
        schema: The schema of the Instance.
        caller: The role to act as, by ``SET LOCAL ROLE`` around each call. The role of
            the connection must be a member of it. None for the connection's own role.

    Raises:
        InvalidArgument: An argument is of another kind. The message says what to pass.
        JobsError: By each call, if the Instance refuses it. Any other error is psycopg's.
        RuntimeError: By each call in another process.
    """

    def __init__(
        self,
        connection_or_pool: Connection | Pool,
        schema: str,
        caller: str | None = None,
    ) -> None:
        _given.check(connection_or_pool, schema, caller, "Jobs")
        self._source = connection_or_pool
        self._schema = schema
        self._caller = caller
        self._joined: AbstractContextManager[Any] = nullcontext(connection_or_pool)
        self._home = Process()
        self._is_opened_by_prepare = False
        self._cursors = _calls.Cursors(psycopg.Cursor)
        self._kept_lock = Lock()
        if caller is not None:
            # Two clients with callers would put each other's roles in force.
            self._acting_lock = _ACTING.setdefault(connection_or_pool, Lock())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} as {self._caller or 'the connected role'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._is_opened_by_prepare and self._home.is_here():
            self._source.close()

    def enqueue(  # noqa: PLR0913 - the arguments of SQL
        self,
        queue: str,
        kind: str,
        payload: Mapping[str, Any],
        *,
        idempotency_key: str,
        available_at: datetime | None = None,
        max_attempts: int = 3,
    ) -> m.EnqueuedJob:
        rest = payload, idempotency_key, available_at, max_attempts
        return self._one(_calls.ENQUEUE, queue, kind, *rest)

    def enqueue_many(
        self, jobs: Iterable[m.NewJob | Mapping[str, Any]]
    ) -> list[m.EnqueuedItem]:
        return self._all(_calls.ENQUEUE_MANY, jobs)

    def claim(
        self, queue: str, limit: int = 1, *, wait: float = 0.0
    ) -> list[m.LeasedJob]:
        # By name: a client may find its connection anew at each call.
        claim: Any = methodcaller("_ask", _calls.CLAIM, (queue, limit), keep=limit == 1)
        if longest := _waiting.seconds(wait, "wait"):
            leases: list[m.LeasedJob] = self._until(queue, longest, claim)
        else:
            leases = claim(self)
        return leases

    def wait(self, queue: str, timeout: float) -> bool:
        def is_due(jobs: Jobs) -> bool:
            return jobs._due_in(queue) <= 0

        return self._until(queue, _waiting.seconds(timeout, "timeout"), is_due)

    def renew(self, lease: m.Lease) -> datetime:
        return self._one(_calls.RENEW, *_calls.lease_of(lease))

    def renew_many(self, leases: Iterable[m.Lease]) -> list[m.RenewedItem]:
        return self._all(_calls.RENEW_MANY, leases)

    def complete(self, lease: m.Lease) -> bool:
        return self._one(_calls.COMPLETE, *_calls.lease_of(lease))

    def complete_many(self, leases: Iterable[m.Lease]) -> list[m.CompletedItem]:
        return self._all(_calls.COMPLETE_MANY, leases)

    def fail(
        self,
        lease: m.Lease,
        failure_code: str,
        *,
        retryable: bool,
        retry_after: float | timedelta | None = None,
    ) -> m.FailedJob:
        key = _calls.lease_of(lease)
        return self._one(_calls.FAIL, *key, failure_code, retryable, retry_after)

    def fail_many(
        self, failures: Iterable[m.Failure | m.PlainFailure]
    ) -> list[m.FailedItem]:
        return self._all(_calls.FAIL_MANY, failures)

    def release(self, lease: m.Lease, *, delay: float | timedelta = 0) -> m.FailedJob:
        return self._one(_calls.RELEASE, *_calls.lease_of(lease), delay)

    def release_many(
        self, leases: Iterable[m.Lease], *, delay: float | timedelta = 0
    ) -> list[m.FailedItem]:
        return self._all(_calls.RELEASE_MANY, leases, delay)

    def inspect(self, job_id: UUID | str) -> m.InspectedJob:
        return self._one(_calls.INSPECT, job_id)

    def inspect_key(
        self, idempotency_key: str, producer: str | None = None
    ) -> m.InspectedJob:
        return self._one(_calls.INSPECT_KEY, idempotency_key, producer)

    def inspect_jobs(
        self,
        queue: str,
        status: m.Status,
        *,
        kind: str | None = None,
        limit: int = 100,
        before: UUID | str | None = None,
    ) -> m.JobPage:
        rest = kind, limit, before
        return m.JobPage(self._all(_calls.INSPECT_JOBS, queue, status, *rest), limit)

    def inspect_attempts(self, job_id: UUID | str) -> list[m.InspectedAttempt]:
        return self._all(_calls.INSPECT_ATTEMPTS, job_id)

    def inspect_queues(self) -> list[m.InspectedQueue]:
        return self._all(_calls.INSPECT_QUEUES)

    def inspect_workers(self) -> list[m.InspectedWorker]:
        return self._all(_calls.INSPECT_WORKERS)

    def inspect_failures(  # noqa: PLR0913 - the arguments of SQL
        self,
        queue: str | None = None,
        *,
        since: datetime | None = None,
        limit: int = 100,
        failure_code: str | None = None,
        before: m.InspectedFailure | datetime | None = None,
        kind: str | None = None,
    ) -> list[m.InspectedFailure]:
        # A row stands for two columns.
        last = getattr(before, "ended_at", before), getattr(before, "job_id", None)
        return self._all(
            _calls.INSPECT_FAILURES, queue, since, limit, failure_code, *last, kind
        )

    def inspect_acts(
        self, limit: int = 100, before: m.InspectedAct | None = None
    ) -> list[m.InspectedAct]:
        return self._all(_calls.INSPECT_ACTS, limit, before)

    def inspect_health(self) -> list[m.InspectedFinding]:
        return self._all(_calls.INSPECT_HEALTH)

    def explain_job(self, job_id: UUID | str) -> m.ExplainedJob:
        return self._one(_calls.EXPLAIN_JOB, job_id)

    def redrive(self, job_id: UUID | str, extra_attempts: int = 1) -> m.FailedJob:
        return self._one(_calls.REDRIVE, job_id, extra_attempts)

    def redrive_failed(  # noqa: PLR0913 - the arguments of SQL
        self,
        queue: str,
        *,
        since: datetime,
        before: datetime | None = None,
        failure_code: str | None = None,
        limit: int = 100,
        extra_attempts: int = 1,
        over_seconds: int = 0,
        kind: str | None = None,
    ) -> int:
        rest = before, failure_code, limit, extra_attempts, over_seconds, kind
        return self._one(_calls.REDRIVE_FAILED, queue, since, *rest)

    def purge(self, before: datetime, limit: int = 1000) -> int:
        return self._one(_calls.PURGE, before, limit)

    def enforce_retention(self, limit: int = 1000) -> int:
        return self._one(_calls.ENFORCE_RETENTION, limit)

    def retire_expired(self, limit: int = 1000) -> int:
        return self._one(_calls.RETIRE_EXPIRED, limit)

    def pause(self, queue: str) -> bool:
        return self._one(_calls.PAUSE, queue)

    def resume(self, queue: str) -> bool:
        return self._one(_calls.RESUME, queue)

    def erase(self, job_id: UUID | str) -> bool:
        return self._one(_calls.ERASE, job_id)

    def next_available_at(self, queue: str) -> datetime | None:
        return self._one(_calls.NEXT_AVAILABLE_AT, queue)

    def _one(self, call: Call[Row], *values: object) -> Row:
        (row,) = self._ask(call, values, keep=True)
        return row

    def _all(self, call: Call[Row], *values: object) -> list[Row]:
        return self._ask(call, values)

    def _ask(
        self, call: Call[Row], values: tuple[object, ...], *, keep: bool = False
    ) -> list[Row]:
        """Call. A kept cursor is quicker, and holds the rows until its next call."""
        statement, arguments = call.request(self._schema, values)
        self._home.enter()
        keep = keep and isinstance(self._source, psycopg.Connection)
        with Translated():
            with self._kept_lock if keep else _NOTHING:
                with self._transaction() as connection:
                    cursor = self._cursors.of(connection, call, keep=keep)
                    cursor.execute(statement, arguments, binary=True)
                rows: list[Row] = cursor.fetchall()
                return rows

    def _transaction(self) -> AbstractContextManager[Connection]:
        if not isinstance(self._source, psycopg.Connection):
            return self._pooled(self._source)
        if self._caller is None:
            return self._joined
        return self._alone(self._source, self._caller)

    @contextmanager
    def _alone(self, connection: Connection, caller: str) -> Iterator[Connection]:
        with self._acting_lock, self._acting(connection, caller):
            yield connection

    def _acting(
        self, connection: Connection, caller: str
    ) -> AbstractContextManager[Connection]:
        return (pipelined if psycopg.Pipeline.is_supported() else _in_turn)(
            connection, caller
        )

    @contextmanager
    def _pooled(self, pool: Pool) -> Iterator[Connection]:
        with pool.connection() as connection:
            if self._caller is None:
                yield connection  # the pool commits
                return
            with self._acting(connection, self._caller):
                yield connection

    def _until(
        self,
        queue: str,
        longest: float,
        look: Callable[[Jobs], Found],
    ) -> Found:
        """Look for something until it is there, or for so many seconds."""
        self._home.enter()
        if not isinstance(self._source, psycopg.Connection):
            with self._source.connection() as connection:
                autocommit = connection.autocommit
                connection.set_autocommit(True)
                try:
                    jobs = Jobs(connection, self._schema, self._caller)
                    return jobs._until(queue, longest, look)
                finally:
                    if not connection.closed:
                        connection.set_autocommit(autocommit)
        deadline = monotonic() + longest
        found = look(self)
        if found or not longest:
            return found
        with self._waiter(Waiter, self._source, queue) as waiter:
            for pause in _waiting.pauses(waiter.longest):
                found = look(self)
                left = deadline - monotonic()
                if found or left <= 0:
                    break
                due_in = self._due_in(queue)
                waiter.sleep(min(pause, left, due_in if due_in > 0 else pause))
        return found

    def _due_in(self, queue: str) -> float:
        due_in = self._one(_calls.DUE_IN, queue)
        return inf if due_in is None else due_in

    def _waiter(self, kind: type[W], connection: Connection, *queues: str) -> W:
        keys: list[int] = []
        is_listening = False
        if _waiting.can_listen(connection):
            for queue in queues:
                state = self._one(_calls.WAIT_STATE, queue)
                key, process, is_listening = state
                if key is None or process != connection.info.backend_pid:
                    keys = []
                    break
                keys.append(key)
        return kind(connection, self._schema, queues, keys, unlisten=not is_listening)


class Waiter(_waiting.Wake):
    """Sleeps until a job is enqueued to a queue, or for a while.

    With a key the connection is idle and in autocommit.
    """

    _connection: Connection

    def __enter__(self) -> Self:
        if self._is_waker:
            try:
                self._is_held = self._ask(self._listen)
            except BaseException:
                self._is_held = True  # perhaps; unlocking too much does no harm
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_waker and not self._connection.closed:
            # Cancelled on its way, it would leave the lock or the channel behind.
            self._leave()

    def _leave(self) -> None:
        words = self._unlock if self._is_held else self._end
        try:
            self._ask(words)
        except psycopg.errors.QueryCanceled:
            self._ask(words)  # somebody else uses the connection next

    def sleep(self, seconds: float) -> None:
        """Return when a job is enqueued, or after *seconds*."""
        if not self._is_waker:
            sleep(seconds)
            return
        self._hold()
        self._is_woken(seconds)

    def _hold(self) -> None:
        if not self._is_held:
            self._is_held = self._ask(self._lock)

    def _is_woken(self, seconds: float) -> bool:
        notifications = self._connection.notifies(timeout=seconds)
        with closing(notifications):
            for notification in notifications:
                if (notification.channel, notification.payload) in self._told:
                    return True
        return False

    def _ask(self, statements: bytes) -> bool:
        """Send statements without parameters together, and return the last value."""
        if not statements:
            return False
        # Without a cursor it takes two thirds of the time.
        with self._connection.lock:
            pgconn = self._connection.pgconn
            pgconn.send_query(statements)
            results = self._connection.wait(generators.execute(pgconn))
        return _waiting.is_true(results[-1])


@contextmanager
def _in_turn(connection: Connection, caller: str) -> Iterator[Connection]:
    """Put a role in force for one call, and then the role before it.

    If the call fails, so does its transaction, and the rollback puts the role back.
    """
    is_whole = connection.autocommit and (
        connection.info.transaction_status is TransactionStatus.IDLE
    )
    transaction: AbstractContextManager[object] = nullcontext()
    if is_whole:
        transaction = connection.transaction()
    with transaction, psycopg.Cursor(connection) as cursor:
        cursor.execute(_calls.ROLE, (caller,))
        try:
            yield connection
        finally:
            status = connection.info.transaction_status
            if not is_whole and status is TransactionStatus.INTRANS:
                cursor.execute(_calls.ROLE_BEFORE)
