"""The client: one method per verb, one statement per method."""

from __future__ import annotations

from contextlib import contextmanager
from math import inf
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from lenso_jobs import _waiting, _wire
from lenso_jobs._calls import ROLE
from lenso_jobs._home import Process
from lenso_jobs._requests import Requests
from lenso_jobs.errors import InvalidQueue, Translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import datetime
    from uuid import UUID

    from psycopg.rows import BaseRowFactory
    from psycopg_pool import ConnectionPool

    from lenso_jobs._models import (
        CompletedItem,
        EnqueuedItem,
        EnqueuedJob,
        ExplainedJob,
        FailedItem,
        FailedJob,
        Failure,
        InspectedAct,
        InspectedAttempt,
        InspectedFailure,
        InspectedFinding,
        InspectedJob,
        InspectedQueue,
        InspectedWorker,
        Lease,
        LeasedJob,
        NewJob,
        RenewedItem,
    )
    from lenso_jobs._requests import Request

    Connection = psycopg.Connection[Any]
    Pool = ConnectionPool[Any]

Row = TypeVar("Row")
Found = TypeVar("Found")


class Jobs:
    """The verbs of one Jobs Instance, on a connection or a pool of yours.

    On a connection each call joins the transaction in progress, and nothing is ever
    committed for you; on a pool each call is a transaction of its own. Threads share a
    pool, not a connection: a transaction belongs to one of them. Calls raise the
    exceptions of ``lenso_jobs.errors`` for what the Instance refuses, and psycopg's own
    for everything else.

    Args:
        connection_or_pool: A ``psycopg.Connection`` or ``psycopg_pool.ConnectionPool``.
        schema: The schema of the Instance.
        caller: The role to act as, by ``SET LOCAL ROLE`` around each call; the
            connection's own role when left out. The connection's role must be a member
            of it.
    """

    def __init__(
        self,
        connection_or_pool: Connection | Pool,
        schema: str,
        caller: str | None = None,
    ) -> None:
        self._source = connection_or_pool
        self._schema = schema
        self._requests = Requests(schema)
        self._caller = caller
        self._home = Process()
        # On a connection the cursors of calls for one job are kept: psycopg then keeps
        # what it found out about a statement's types, a tenth of such a call.
        self._kept: dict[bytes, psycopg.Cursor[Any]] = {}
        self._kept_encoding = ""
        self._kept_lock = Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} as {self._caller or 'the connected role'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection or pool this client stands on."""
        if self._home.is_here():
            self._source.close()

    def enqueue(  # noqa: PLR0913 - the arguments are SQL's
        self,
        queue: str,
        kind: str,
        payload: Mapping[str, Any],
        *,
        idempotency_key: str,
        available_at: datetime | None = None,
        max_attempts: int = 3,
    ) -> EnqueuedJob:
        """Make a job durable, and say whether this call created it.

        Repeating the call with the same key and the same arguments answers with the
        first job, so an answer that was lost is asked for again. On a connection the
        job exists once you commit.

        Args:
            queue: A declared queue.
            kind: 1 to 256 characters of ``A-Z a-z 0-9 . _ : / -``.
            payload: A JSON object of at most 262,144 bytes as text.
            idempotency_key: 1 to 256 characters, as *kind*; unique to the producer.
            available_at: An aware time before which the job is not claimed; at once
                when left out.
            max_attempts: 1 to 100; a crash is an attempt.

        Raises:
            InvalidJob: An argument is out of bounds; nothing was written.
            IdempotencyConflict: The key was used for another intent.
            Unauthorized: The role is not a declared producer.
        """
        return self._one(
            self._requests.enqueue(
                queue, kind, payload, idempotency_key, available_at, max_attempts
            )
        )

    def enqueue_many(
        self, items: Iterable[NewJob | Mapping[str, Any]]
    ) -> list[EnqueuedItem]:
        """Make 1 to 1,000 jobs durable, and answer one item each in input order.

        A bad item is answered ``invalid_job`` and spoils none of its neighbours; a key
        used for another intent is answered ``conflict``. Mappings have the fields of
        ``NewJob``.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
            Unauthorized: The role is not a declared producer.
        """
        return self._all(self._requests.enqueue_many(items))

    def claim(
        self, queue: str, limit: int = 1, *, wait: float = 0.0
    ) -> list[LeasedJob]:
        """Lease up to *limit* (1 to 1,000) due jobs; an empty list means none is due.

        Commit before working on them: until then no other session can see that they
        are taken, and the leases are already running.

        Args:
            queue: A declared queue.
            limit: 1 to 1,000.
            wait: For how many seconds to go on looking while none is due, as ``wait``
                does; 0 or more.

        Raises:
            InvalidQueue: The queue is not declared.
            InvalidArgument: *limit* or *wait* is out of range.
            Unauthorized: The role is not a declared worker.
        """
        request = self._requests.claim(queue, limit)
        longest = _waiting.seconds(wait, "wait")
        ask = self._few if limit == 1 else self._all
        if not longest:
            return ask(request)
        if not isinstance(self._source, psycopg.Connection):
            with self._alone(self._source) as jobs:
                return jobs.claim(queue, limit, wait=longest)
        return self._until(self._source, queue, longest, lambda: ask(request))

    def wait(self, queue: str, timeout: float) -> bool:
        """Wait until a job of a queue is due; False if none was for *timeout* seconds.

        On a pool the wait has a connection to itself. It listens for what enqueue and
        redrive notify, looks again after 20, 50, 100 ms and so on, at least every 10
        seconds, and when the next job falls due. It only looks, at least once a second,
        where it cannot listen: within a transaction or a pipeline, on a connection
        without autocommit, behind a transaction pooler, and where the document says
        ``notify: false``. A connection is taken while it waits: other threads' calls on
        it wait too, and notifications on other channels reach only its handlers.

        Args:
            queue: A declared queue.
            timeout: Seconds, 0 or more.

        Raises:
            InvalidQueue: The queue is not declared.
            InvalidArgument: *timeout* is out of range.
        """
        longest = _waiting.seconds(timeout, "timeout")
        _wire.text(queue, InvalidQueue, "queue")
        if not isinstance(self._source, psycopg.Connection):
            with self._alone(self._source) as jobs:
                return jobs.wait(queue, longest)
        return self._until(
            self._source, queue, longest, lambda: self._due_in(queue) <= 0
        )

    def renew(self, lease: Lease) -> datetime:
        """Extend a lease by the Instance's lease length from now; answers its new end.

        Raises:
            InvalidLease: It has expired, was superseded or has ended: stop working.
        """
        return self._one(self._requests.renew(lease))

    def renew_many(self, leases: Iterable[Lease]) -> list[RenewedItem]:
        """Extend 1 to 1,000 leases at once, and answer one item each in input order.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
        """
        return self._all(self._requests.renew_many(leases))

    def complete(self, lease: Lease) -> bool:
        """End the job as succeeded; True, also when repeated under the same lease.

        On a connection this joins your transaction: commit it together with what the
        job wrote to the same database, and both happened or neither.

        Raises:
            InvalidLease: It has expired or was superseded: discard the result.
        """
        return self._one(self._requests.complete(lease))

    def complete_many(self, leases: Iterable[Lease]) -> list[CompletedItem]:
        """End 1 to 1,000 jobs as succeeded, and answer one item each in input order.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
        """
        return self._all(self._requests.complete_many(leases))

    def fail(self, lease: Lease, code: str, *, retryable: bool) -> FailedJob:
        """Record a failed attempt; answers when the next is due, or that none is left.

        Args:
            lease: The lease of the attempt.
            code: 1 to 128 characters of ``A-Z a-z 0-9 . _ : / -``, stable and without
                secrets: observers read it.
            retryable: Whether another attempt may help.

        Raises:
            InvalidFailure: *code* or *retryable* is malformed.
            InvalidLease: It has expired or was superseded; nothing was recorded.
        """
        return self._one(self._requests.fail(lease, code, retryable))

    def fail_many(
        self, failures: Iterable[Failure | tuple[Lease, str, bool]]
    ) -> list[FailedItem]:
        """Record 1 to 1,000 failed attempts, and answer one item each in input order.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
        """
        return self._all(self._requests.fail_many(failures))

    def inspect(self, job_id: UUID | str) -> InspectedJob:
        """Read the durable evidence of one job; changes nothing.

        Raises:
            JobNotFound: No such job; it may have been purged.
        """
        return self._one(self._requests.inspect(job_id))

    def inspect_attempts(self, job_id: UUID | str) -> list[InspectedAttempt]:
        """Read the history of one job: its attempts in order, a running one last.

        An observer's and an operator's, as all that follow up to ``explain_job``.

        Raises:
            JobNotFound: No such job; it may have been purged.
            Unauthorized: The role is neither an observer nor an operator.
        """
        return self._all(self._requests.inspect_attempts(job_id))

    def inspect_queues(self) -> list[InspectedQueue]:
        """Count the live jobs of each queue by state, and how the last ones ended.

        Each declared queue is there, and each that still has live jobs. It reads the live
        jobs, at most 64 MB of them, so ask every few seconds and not in a loop.

        Raises:
            Unauthorized: The role is neither an observer nor an operator.
        """
        return self._all(self._requests.inspect_queues())

    def inspect_workers(self) -> list[InspectedWorker]:
        """Count the leases and the sessions of each worker; reads as ``inspect_queues``.

        Each declared worker is there, and each that still holds leases.

        Raises:
            Unauthorized: The role is neither an observer nor an operator.
        """
        return self._all(self._requests.inspect_workers())

    def inspect_failures(
        self,
        queue: str | None = None,
        *,
        since: datetime | None = None,
        limit: int = 100,
        failure_code: str | None = None,
        before: InspectedFailure | datetime | None = None,
    ) -> list[InspectedFailure]:
        """List the jobs that have failed and were not redriven, newest first.

        Args:
            queue: A declared queue; all when left out.
            since: An aware time before which no job failed that is listed.
            limit: 1 to 10,000.
            failure_code: The last failure code; any when left out.
            before: The last row of the page before, for the next page; or an aware time
                before which they failed.

        Raises:
            InvalidQueue: The queue is not declared.
            InvalidFailure: *failure_code* is malformed.
            InvalidArgument: *limit* is out of range, or a time is naive.
            Unauthorized: The role is neither an observer nor an operator.
        """
        return self._all(
            self._requests.inspect_failures(queue, since, limit, failure_code, before)
        )

    def inspect_acts(
        self, limit: int = 100, before: InspectedAct | None = None
    ) -> list[InspectedAct]:
        """Read the audit: what operators did, newest first.

        Args:
            limit: 1 to 10,000.
            before: The last row of the page before, for the next page.

        Raises:
            InvalidArgument: *limit* is out of range, or *before* no such row.
            Unauthorized: The role is neither an observer nor an operator.
        """
        return self._all(self._requests.inspect_acts(limit, before))

    def inspect_health(self) -> list[InspectedFinding]:
        """List what is wrong with the Instance, worst first; nothing while all is well.

        Where another session has locked a table it says that much, instead of waiting.

        Raises:
            Unauthorized: The role is neither an observer nor an operator.
        """
        return self._all(self._requests.inspect_health())

    def explain_job(self, job_id: UUID | str) -> ExplainedJob:
        """Tell why a job is not being claimed, with what to do; changes and locks nothing.

        A job that is not there is explained, too.

        Raises:
            JobNotFound: *job_id* is no UUID.
            Unauthorized: The role is neither an observer nor an operator.
        """
        return self._one(self._requests.explain_job(job_id))

    def redrive(self, job_id: UUID | str, extra_attempts: int = 1) -> FailedJob:
        """Queue a failed job again, with that many more attempts; it is due at once.

        An operator's, as the next four, and audited. The history stays, and the fencing
        token goes on growing.

        Args:
            job_id: The job.
            extra_attempts: 1 to 100.

        Raises:
            JobNotFound: No such job.
            InvalidArgument: It has not failed, or *extra_attempts* is out of range.
            Unauthorized: The role is no operator.
        """
        return self._one(self._requests.redrive(job_id, extra_attempts))

    def redrive_failed(  # noqa: PLR0913 - the arguments are SQL's
        self,
        queue: str,
        *,
        since: datetime,
        before: datetime | None = None,
        failure_code: str | None = None,
        limit: int = 100,
        extra_attempts: int = 1,
    ) -> int:
        """Queue failed jobs of a queue again, those first that failed first; answers how many.

        Called until it answers 0, it needs a *before* that stays the same: a job that
        fails once more meanwhile would else be taken again.

        Args:
            queue: A declared queue.
            since: An aware time; jobs that failed before it are left alone.
            before: An aware time; jobs that failed then or later are left alone.
            failure_code: The last failure code; any when left out.
            limit: 1 to 10,000.
            extra_attempts: 1 to 100, for each.

        Raises:
            InvalidQueue: The queue is not declared.
            InvalidFailure: *failure_code* is malformed.
            InvalidArgument: A number is out of range, or a time is naive.
            Unauthorized: The role is no operator.
        """
        return self._one(
            self._requests.redrive_failed(
                queue, since, before, failure_code, limit, extra_attempts
            )
        )

    def purge(self, before: datetime, limit: int = 1000) -> int:
        """Delete jobs that ended before a time, oldest first; answers how many.

        Their evidence and keys go with them. Call it until it answers 0.

        Args:
            before: An aware time that has passed.
            limit: 1 to 10,000.

        Raises:
            InvalidArgument: *before* is naive or yet to come, or *limit* out of range.
            Unauthorized: The role is no operator.
        """
        return self._one(self._requests.purge(before, limit))

    def enforce_retention(self, limit: int = 1000) -> int:
        """Delete jobs that ended longer than ``retention_seconds`` ago; answers how many.

        None where the document sets no ``retention_seconds``.

        Args:
            limit: 1 to 10,000.

        Raises:
            InvalidArgument: *limit* is out of range.
            Unauthorized: The role is no operator.
        """
        return self._one(self._requests.enforce_retention(limit))

    def retire_expired(self, limit: int = 1000) -> int:
        """End jobs whose last attempt's lease ran out, as claims do; answers how many.

        It walks over the live jobs: for an operator's hand and not for a loop.

        Args:
            limit: 1 to 10,000.

        Raises:
            InvalidArgument: *limit* is out of range.
            Unauthorized: The role is no operator.
        """
        return self._one(self._requests.retire_expired(limit))

    def next_available_at(self, queue: str) -> datetime | None:
        """Tell when the next job of a queue falls due, lapsing leases included.

        None while the queue is empty. Meant for an idle worker's sleep: with thousands
        of jobs running it costs milliseconds.

        Raises:
            InvalidQueue: The queue is not declared.
        """
        return self._one(self._requests.next_available_at(queue))

    def _one(self, request: Request[Row]) -> Row:
        (answer,) = self._few(request)
        return answer

    def _few(self, request: Request[Row]) -> list[Row]:
        """Call with a kept cursor, which holds the answer until the next call."""
        source = self._source
        if not isinstance(source, psycopg.Connection):
            return self._all(request)
        row, statement, arguments = request
        self._home.enter()
        with self._kept_lock, Translated():
            cursor = self._kept_cursor(source, row, statement)
            if self._caller is None:
                return cursor.execute(statement, arguments, binary=True).fetchall()
            with _acting_as(source, self._caller):
                return cursor.execute(statement, arguments, binary=True).fetchall()

    def _kept_cursor(
        self, connection: Connection, row: BaseRowFactory[Row], statement: bytes
    ) -> psycopg.Cursor[Row]:
        # A cursor goes on with the encoding it first met.
        encoding = connection.info.encoding
        if encoding != self._kept_encoding:
            self._kept.clear()
            self._kept_encoding = encoding
        cursor = self._kept.get(statement)
        if cursor is None:
            cursor = self._kept[statement] = _cursor(connection, row)
        return cursor

    def _all(self, request: Request[Row]) -> list[Row]:
        row, statement, arguments = request
        self._home.enter()
        with (
            Translated(),
            self._transaction() as connection,
            _cursor(connection, row) as cursor,
        ):
            return cursor.execute(statement, arguments, binary=True).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        if isinstance(self._source, psycopg.Connection):
            with _acting_as(self._source, self._caller):
                yield self._source
        else:
            with self._source.connection() as connection:
                if self._caller is None and connection.autocommit:
                    yield connection  # one statement is a transaction already
                    return
                with connection.transaction():
                    if self._caller is not None:
                        with psycopg.Cursor(connection) as cursor:
                            cursor.execute(ROLE, (self._caller,))
                    yield connection

    @contextmanager
    def _alone(self, pool: Pool) -> Iterator[Jobs]:
        """Lend a client on one connection of the pool, which commits by itself."""
        self._home.enter()
        with pool.connection() as connection:
            autocommit = connection.autocommit
            connection.autocommit = True
            try:
                yield Jobs(connection, self._schema, self._caller)
            finally:
                if not connection.closed:
                    connection.autocommit = autocommit

    def _until(
        self,
        connection: Connection,
        queue: str,
        longest: float,
        look: Callable[[], Found],
    ) -> Found:
        """Look for something until it is there, or for so many seconds."""
        deadline = monotonic() + longest
        found = look()
        if found or not longest:
            return found
        with self._waiter(connection, queue) as waiter:
            for pause in _waiting.pauses(waiter.longest):
                found = look()
                left = deadline - monotonic()
                if found or left <= 0:
                    break
                due_in = self._due_in(queue)
                waiter.sleep(min(pause, left, due_in if due_in > 0 else pause))
        return found

    def _due_in(self, queue: str) -> float:
        due_in = self._one(self._requests.due_in(queue))
        return inf if due_in is None else due_in

    def _waiter(self, connection: Connection, queue: str) -> _waiting.Waiter:
        key, is_listening = None, False
        if _waiting.can_listen(connection):
            key, process, is_listening = self._one(self._requests.wait_state(queue))
            if process != connection.info.backend_pid:
                key = None
        return _waiting.Waiter(
            connection,
            _waiting.Wake(self._schema, queue, key, unlisten=not is_listening),
        )


def _cursor(connection: Connection, row: BaseRowFactory[Row]) -> psycopg.Cursor[Row]:
    # Not the connection's own cursor class: one that binds on the client knows no
    # binary results, which is what frees times from the session's DateStyle.
    cursor = psycopg.Cursor(connection, row_factory=row)
    _wire.register_adapters(cursor)
    return cursor


@contextmanager
def _acting_as(connection: Connection, caller: str | None) -> Iterator[None]:
    """Put a role in force for one call, and the one before it back."""
    if caller is None:
        yield
        return
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        # Where nothing is in progress the block would commit what it began; so the
        # connection begins by itself, unless it commits by itself too.
        is_idle = connection.info.transaction_status is TransactionStatus.IDLE
        if is_idle and not connection.autocommit:
            cursor.execute("select")
        # Where the call fails, the savepoint's rollback puts the role back; where the
        # block is a transaction of its own, its end does.
        with connection.transaction():
            before = cursor.execute(ROLE, (caller,)).fetchone()
            yield
            if not (is_idle and connection.autocommit):
                cursor.execute(ROLE, before and before[:1])
