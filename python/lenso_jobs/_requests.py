"""What each call sends and how its answer is read, once for every client.

A request is a row factory, a statement and its arguments, checked and encoded. Making
one refuses, before any SQL, what PostgreSQL could not even read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from psycopg.rows import args_row, kwargs_row, scalar_row, tuple_row

from lenso_jobs import _wire
from lenso_jobs._calls import calls
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
from lenso_jobs.errors import (
    InvalidArgument,
    InvalidFailure,
    InvalidJob,
    InvalidLease,
    InvalidQueue,
    JobNotFound,
    JobsError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from typing import TypeAlias
    from uuid import UUID

    from psycopg.rows import BaseRowFactory

Row = TypeVar("Row")
Item = TypeVar("Item")
if TYPE_CHECKING:
    RowMaker: TypeAlias = BaseRowFactory[Row]
    Request: TypeAlias = tuple[RowMaker[Row], bytes, Sequence[Any]]

_ENQUEUED_JOB = args_row(EnqueuedJob)
_ENQUEUED_ITEM = args_row(EnqueuedItem)
_LEASED_JOB = args_row(LeasedJob)
_RENEWED_ITEM = args_row(RenewedItem)
_COMPLETED_ITEM = args_row(CompletedItem)
_FAILED_JOB = args_row(FailedJob)
_FAILED_ITEM = args_row(FailedItem)
_INSPECTED_JOB = args_row(InspectedJob)
_INSPECTED_ATTEMPT = args_row(InspectedAttempt)
_INSPECTED_WORKER = args_row(InspectedWorker)
_INSPECTED_FAILURE = args_row(InspectedFailure)
_INSPECTED_FINDING = args_row(InspectedFinding)
_EXPLAINED_JOB = args_row(ExplainedJob)


def _inspected_queue(
    failure_codes: bytes,
    **others: Any,  # noqa: ANN401 - as they were loaded
) -> InspectedQueue:
    return InspectedQueue(failure_codes=json.loads(failure_codes), **others)


def _inspected_act(
    arguments: bytes,
    **others: Any,  # noqa: ANN401 - likewise
) -> InspectedAct:
    return InspectedAct(arguments=json.loads(arguments), **others)


_INSPECTED_QUEUE = kwargs_row(_inspected_queue)
_INSPECTED_ACT = kwargs_row(_inspected_act)


class Requests:
    """The requests of one Instance; the arguments are those of the clients' methods."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._calls = calls(schema)

    def enqueue(  # noqa: PLR0913, PLR0917 - the arguments are SQL's
        self,
        queue: str,
        kind: str,
        payload: Mapping[str, Any],
        idempotency_key: str,
        available_at: datetime | None,
        max_attempts: int,
    ) -> Request[EnqueuedJob]:
        """Ask for a job to be made durable."""
        return (
            _ENQUEUED_JOB,
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
    ) -> Request[EnqueuedItem]:
        """Ask for many, as one JSON document."""
        documents = (
            None
            if items is None
            else [
                item.as_dict() if isinstance(item, NewJob) else item
                for item in _each(items, InvalidJob, "items")
            ]
        )
        return _ENQUEUED_ITEM, self._calls.enqueue_many, (_wire.jobs(documents),)

    def claim(self, queue: str, limit: int) -> Request[LeasedJob]:
        """Ask for due jobs."""
        return (
            _LEASED_JOB,
            self._calls.claim,
            (
                _wire.text(queue, InvalidQueue, "queue"),
                _wire.integer(limit, InvalidArgument, "limit"),
            ),
        )

    def renew(self, lease: Lease) -> Request[datetime]:
        """Ask for a longer lease."""
        return scalar_row, self._calls.renew, _lease(lease)

    def renew_many(self, leases: Iterable[Lease]) -> Request[RenewedItem]:
        """Ask for longer leases."""
        return (
            _RENEWED_ITEM,
            self._calls.renew_many,
            _columns("leases", leases, _lease_item, 2),
        )

    def complete(self, lease: Lease) -> Request[bool]:
        """Ask for a job to end as succeeded."""
        return scalar_row, self._calls.complete, _lease(lease)

    def complete_many(self, leases: Iterable[Lease]) -> Request[CompletedItem]:
        """Ask for many to end as succeeded."""
        return (
            _COMPLETED_ITEM,
            self._calls.complete_many,
            _columns("leases", leases, _lease_item, 2),
        )

    def fail(self, lease: Lease, code: str, retryable: bool) -> Request[FailedJob]:
        """Report a failed attempt."""
        failure = (
            _wire.text(code, InvalidFailure, "failure_code"),
            _wire.boolean(retryable, InvalidFailure, "retryable"),
        )
        return _FAILED_JOB, self._calls.fail, (*_lease(lease), *failure)

    def fail_many(
        self, failures: Iterable[Failure | tuple[Lease, str, bool]]
    ) -> Request[FailedItem]:
        """Report many failed attempts."""
        return (
            _FAILED_ITEM,
            self._calls.fail_many,
            _columns("failures", failures, _failure_item, 4),
        )

    def inspect(self, job_id: UUID | str) -> Request[InspectedJob]:
        """Ask for the evidence of a job."""
        return (
            _INSPECTED_JOB,
            self._calls.inspect,
            (_wire.job_id(job_id, JobNotFound),),
        )

    def inspect_attempts(self, job_id: UUID | str) -> Request[InspectedAttempt]:
        """Ask for the history of a job."""
        return (
            _INSPECTED_ATTEMPT,
            self._calls.inspect_attempts,
            (_wire.job_id(job_id, JobNotFound),),
        )

    def inspect_queues(self) -> Request[InspectedQueue]:
        """Ask for counts by queue."""
        return _INSPECTED_QUEUE, self._calls.inspect_queues, ()

    def inspect_workers(self) -> Request[InspectedWorker]:
        """Ask for leases and sessions by worker."""
        return _INSPECTED_WORKER, self._calls.inspect_workers, ()

    def inspect_failures(
        self,
        queue: str | None,
        since: datetime | None,
        limit: int,
        failure_code: str | None,
        before: InspectedFailure | datetime | None,
    ) -> Request[InspectedFailure]:
        """Ask for a page of the jobs that have failed."""
        end, last = (
            (before.ended_at, before.job_id)
            if isinstance(before, InspectedFailure)
            else (before, None)
        )
        return (
            _INSPECTED_FAILURE,
            self._calls.inspect_failures,
            (
                _wire.text(queue, InvalidQueue, "queue"),
                _wire.instant(since, InvalidArgument, "since"),
                _wire.integer(limit, InvalidArgument, "limit"),
                _wire.text(failure_code, InvalidFailure, "failure_code"),
                _wire.instant(end, InvalidArgument, "before"),
                last,
            ),
        )

    def inspect_acts(
        self, limit: int, before: InspectedAct | None
    ) -> Request[InspectedAct]:
        """Ask for a page of the audit."""
        if before is not None and not isinstance(before, InspectedAct):
            raise InvalidArgument("before must be the last row of the page before")
        return (
            _INSPECTED_ACT,
            self._calls.inspect_acts,
            (
                _wire.integer(limit, InvalidArgument, "limit"),
                before and before.act_id,
            ),
        )

    def inspect_health(self) -> Request[InspectedFinding]:
        """Ask for what is wrong."""
        return _INSPECTED_FINDING, self._calls.inspect_health, ()

    def explain_job(self, job_id: UUID | str) -> Request[ExplainedJob]:
        """Ask why a job is not being claimed."""
        return (
            _EXPLAINED_JOB,
            self._calls.explain_job,
            (_wire.job_id(job_id, JobNotFound),),
        )

    def redrive(self, job_id: UUID | str, extra_attempts: int) -> Request[FailedJob]:
        """Ask for a failed job to be queued again."""
        return (
            _FAILED_JOB,
            self._calls.redrive,
            (
                _wire.job_id(job_id, JobNotFound),
                _wire.integer(extra_attempts, InvalidArgument, "extra_attempts"),
            ),
        )

    def redrive_failed(  # noqa: PLR0913, PLR0917 - the arguments are SQL's
        self,
        queue: str,
        since: datetime,
        before: datetime | None,
        failure_code: str | None,
        limit: int,
        extra_attempts: int,
    ) -> Request[int]:
        """Ask for failed jobs of a queue to be queued again."""
        return (
            scalar_row,
            self._calls.redrive_failed,
            (
                _wire.text(queue, InvalidQueue, "queue"),
                _wire.instant(since, InvalidArgument, "since"),
                _wire.instant(before, InvalidArgument, "before"),
                _wire.text(failure_code, InvalidFailure, "failure_code"),
                _wire.integer(limit, InvalidArgument, "limit"),
                _wire.integer(extra_attempts, InvalidArgument, "extra_attempts"),
            ),
        )

    def purge(self, before: datetime, limit: int) -> Request[int]:
        """Ask for ended jobs to be deleted."""
        return (
            scalar_row,
            self._calls.purge,
            (
                _wire.instant(before, InvalidArgument, "before"),
                _wire.integer(limit, InvalidArgument, "limit"),
            ),
        )

    def enforce_retention(self, limit: int) -> Request[int]:
        """Ask for jobs to be deleted that were kept for long enough."""
        return (
            scalar_row,
            self._calls.enforce_retention,
            (_wire.integer(limit, InvalidArgument, "limit"),),
        )

    def retire_expired(self, limit: int) -> Request[int]:
        """Ask for jobs to be ended whose last lease ran out."""
        return (
            scalar_row,
            self._calls.retire_expired,
            (_wire.integer(limit, InvalidArgument, "limit"),),
        )

    def next_available_at(self, queue: str) -> Request[datetime | None]:
        """Ask when the next job falls due."""
        return (
            scalar_row,
            self._calls.next_available_at,
            (_wire.text(queue, InvalidQueue, "queue"),),
        )

    def due_in(self, queue: str) -> Request[float | None]:
        """Ask the same in seconds from now, by the server's clock."""
        return scalar_row, self._calls.due_in, (queue,)

    def wait_state(self, queue: str) -> Request[tuple[int | None, int, bool]]:
        """Ask for the key to wait with, the backend's pid, and whether it listens."""
        return tuple_row, self._calls.wait_state, (queue, self.schema)

    def hold(self, make: RowMaker[Row], queue: str, limit: int) -> Request[Row]:
        """Ask for due jobs, as a worker reads them."""
        return make, self._calls.hold, (queue, limit)

    def prolong(
        self, leases: Sequence[Lease]
    ) -> Request[tuple[str, float | None, float | None]]:
        """Ask for longer leases; answers outcome, end as an epoch, and seconds left."""
        return tuple_row, self._calls.prolong, _plain(leases)

    def end(
        self,
        leases: Sequence[Lease],
        failures: Sequence[tuple[str | None, bool]] | None,
    ) -> Request[str]:
        """Report ends, with code and retryable where they are failures; the outcomes."""
        if failures is None:
            return scalar_row, self._calls.end, _plain(leases)
        codes, retryable = zip(*failures, strict=True)
        arguments = (*_plain(leases), list(codes), list(retryable))
        return scalar_row, self._calls.end_badly, arguments


def _plain(leases: Sequence[Lease]) -> Sequence[list[Any]]:
    """The columns of leases that are as they were claimed."""
    return [lease.job_id for lease in leases], [lease.lease_token for lease in leases]


def _lease(lease: Lease | None) -> tuple[UUID | None, str | None]:
    if lease is None:
        return None, None
    try:
        job_id, token = lease.job_id, lease.lease_token
    except AttributeError:
        raise InvalidLease("lease must have a job_id and a lease_token") from None
    return (
        _wire.job_id(job_id, InvalidLease),
        _wire.text(token, InvalidLease, "lease_token"),
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
    try:
        lease, code, retryable = item
    except (TypeError, ValueError):
        return None, None, None, None
    return (
        *_lease_item(lease),
        _wire.text_or_null(code),
        retryable if isinstance(retryable, bool) else None,
    )


def _columns(
    argument: str,
    items: Iterable[Item] | None,
    row: Callable[[Item], Sequence[Any]],
    width: int,
) -> Sequence[list[Any] | None]:
    """Turn items into one list per argument, which also holds for no items."""
    if items is None:
        return [None] * width
    rows = map(row, _each(items, InvalidArgument, argument))
    columns = [list(column) for column in zip(*rows, strict=True)]
    return columns or [[] for _ in range(width)]


def _each(
    items: Iterable[Item], error: type[JobsError], argument: str
) -> Iterator[Item]:
    try:
        return iter(items)
    except TypeError:
        raise error(f"{argument} must be an iterable") from None
