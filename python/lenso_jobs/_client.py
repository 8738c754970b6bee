"""The client: one method per verb, one statement per method."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import args_row, scalar_row, tuple_row

from lenso_jobs import _wire
from lenso_jobs._calls import ROLE, calls
from lenso_jobs._models import (
    CompletedItem,
    EnqueuedItem,
    EnqueuedJob,
    FailedItem,
    FailedJob,
    Failure,
    InspectedJob,
    Lease,
    LeasedJob,
    NewJob,
    RenewedItem,
)
from lenso_jobs.errors import (
    InvalidArgument,
    InvalidFailure,
    InvalidJob,
    InvalidLease,
    InvalidQueue,
    JobNotFound,
    translated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from psycopg.rows import BaseRowFactory
    from psycopg_pool import ConnectionPool

    Connection = psycopg.Connection[Any]
    Pool = ConnectionPool[Any]

Row = TypeVar("Row")
Item = TypeVar("Item")


class Jobs:
    """The verbs of one Jobs Instance, on a connection or a pool of yours.

    On a connection each call joins the transaction in progress, and nothing is ever
    committed for you; on a pool each call is a transaction of its own. Calls raise the
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
        self._calls = calls(schema)
        self._caller = caller

    def __repr__(self) -> str:
        return f"<{type(self).__name__} as {self._caller or 'the connected role'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection or pool this client stands on."""
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
            args_row(EnqueuedJob),
            self._calls.enqueue,
            (
                _wire.text(queue, InvalidJob, "queue"),
                _wire.text(kind, InvalidJob, "kind"),
                _wire.payload(payload),
                _wire.text(idempotency_key, InvalidJob, "idempotency_key"),
                _wire.instant(available_at),
                _wire.integer(max_attempts, InvalidJob, "max_attempts"),
            ),
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
        documents = (
            None
            if items is None
            else [
                {f.name: getattr(item, f.name) for f in fields(NewJob)}
                if isinstance(item, NewJob)
                else item
                for item in items
            ]
        )
        return self._all(
            args_row(EnqueuedItem), self._calls.enqueue_many, (_wire.jobs(documents),)
        )

    def claim(self, queue: str, limit: int = 1) -> list[LeasedJob]:
        """Lease up to *limit* (1 to 1,000) due jobs; an empty list means none is due.

        Commit before working on them: until then no other session can see that they
        are taken, and the leases are already running.

        Raises:
            InvalidQueue: The queue is not declared.
            InvalidArgument: *limit* is out of range.
            Unauthorized: The role is not a declared worker.
        """
        return self._all(
            args_row(LeasedJob),
            self._calls.claim,
            (
                _wire.text(queue, InvalidQueue, "queue"),
                _wire.integer(limit, InvalidArgument, "limit"),
            ),
        )

    def renew(self, lease: Lease) -> datetime:
        """Extend a lease by the Instance's lease length from now; answers its new end.

        Raises:
            InvalidLease: It has expired, was superseded or has ended: stop working.
        """
        end: datetime = self._one(scalar_row, self._calls.renew, _lease(lease))
        return end

    def renew_many(self, leases: Iterable[Lease]) -> list[RenewedItem]:
        """Extend 1 to 1,000 leases at once, and answer one item each in input order.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
        """
        return self._all(
            args_row(RenewedItem),
            self._calls.renew_many,
            _columns(leases, _lease_item, 2),
        )

    def complete(self, lease: Lease) -> bool:
        """End the job as succeeded; True, also when repeated under the same lease.

        On a connection this joins your transaction: commit it together with what the
        job wrote to the same database, and both happened or neither.

        Raises:
            InvalidLease: It has expired or was superseded: discard the result.
        """
        done: bool = self._one(scalar_row, self._calls.complete, _lease(lease))
        return done

    def complete_many(self, leases: Iterable[Lease]) -> list[CompletedItem]:
        """End 1 to 1,000 jobs as succeeded, and answer one item each in input order.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
        """
        return self._all(
            args_row(CompletedItem),
            self._calls.complete_many,
            _columns(leases, _lease_item, 2),
        )

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
        failure = (
            _wire.text(code, InvalidFailure, "failure_code"),
            _wire.boolean(retryable, InvalidFailure, "retryable"),
        )
        return self._one(
            args_row(FailedJob), self._calls.fail, (*_lease(lease), *failure)
        )

    def fail_many(
        self, failures: Iterable[Failure | tuple[Lease, str, bool]]
    ) -> list[FailedItem]:
        """Record 1 to 1,000 failed attempts, and answer one item each in input order.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
        """
        return self._all(
            args_row(FailedItem),
            self._calls.fail_many,
            _columns(failures, _failure_item, 4),
        )

    def inspect(self, job_id: UUID | str) -> InspectedJob:
        """Read the durable evidence of one job; changes nothing.

        Raises:
            JobNotFound: No such job; it may have been purged.
        """
        return self._one(
            args_row(InspectedJob),
            self._calls.inspect,
            (_wire.job_id(job_id, JobNotFound),),
        )

    def next_available_at(self, queue: str) -> datetime | None:
        """Tell when the next job of a queue falls due, lapsing leases included.

        None while the queue is empty. Meant for an idle worker's sleep: with thousands
        of jobs running it costs milliseconds.

        Raises:
            InvalidQueue: The queue is not declared.
        """
        due: datetime | None = self._one(
            scalar_row,
            self._calls.next_available_at,
            (_wire.text(queue, InvalidQueue, "queue"),),
        )
        return due

    def _one(
        self, row: BaseRowFactory[Row], statement: bytes, arguments: Sequence[Any]
    ) -> Row:
        (answer,) = self._all(row, statement, arguments)
        return answer

    def _all(
        self, row: BaseRowFactory[Row], statement: bytes, arguments: Sequence[Any]
    ) -> list[Row]:
        # Not the connection's own cursor class: one that binds on the client knows no
        # binary results, which is what frees times from the session's DateStyle.
        with (
            translated(),
            self._transaction() as connection,
            psycopg.Cursor(connection, row_factory=row) as cursor,
        ):
            _wire.register_loaders(cursor)
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
                        connection.execute(ROLE, (self._caller,))
                    yield connection


@contextmanager
def _acting_as(connection: Connection, caller: str | None) -> Iterator[None]:
    """Put a role in force for one call, and the one before it back."""
    if caller is None:
        yield
        return
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        # Where nothing is in progress the block would commit what it began; so the
        # connection begins by itself, unless it commits by itself too.
        status = connection.info.transaction_status
        if status is TransactionStatus.IDLE and not connection.autocommit:
            cursor.execute("select")
        # Where the call fails, the savepoint's rollback puts the role back.
        with connection.transaction():
            before = cursor.execute(ROLE, (caller,)).fetchone()
            yield
            cursor.execute(ROLE, before and before[:1])


def _lease(lease: Lease | None) -> tuple[UUID | None, str | None]:
    if lease is None:
        return None, None
    return (
        _wire.job_id(lease.job_id, InvalidLease),
        _wire.text(lease.lease_token, InvalidLease, "lease_token"),
    )


def _lease_item(lease: Lease | None) -> tuple[UUID | None, str | None]:
    """Make of an unusable lease one that the server refuses by itself."""
    try:
        return _lease(lease)
    except InvalidLease:
        return None, None


def _failure_item(
    item: Failure | tuple[Lease, str, bool],
) -> tuple[UUID | None, str | None, str | None, bool | None]:
    lease, code, retryable = item
    return (
        *_lease_item(lease),
        _wire.text_or_null(code),
        retryable if isinstance(retryable, bool) else None,
    )


def _columns(
    items: Iterable[Item] | None, row: Callable[[Item], Sequence[Any]], width: int
) -> Sequence[list[Any] | None]:
    """Turn items into one list per argument, which also holds for no items."""
    if items is None:
        return [None] * width
    columns = [list(column) for column in zip(*map(row, items), strict=True)]
    return columns or [[] for _ in range(width)]
