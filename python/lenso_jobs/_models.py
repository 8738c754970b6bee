"""What the calls take and return: one frozen dataclass for each composite type in SQL."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from lenso_jobs.errors import PayloadUndecodable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID


class Lease(Protocol):
    """Anything that names a job and holds its lease token."""

    @property
    def job_id(self) -> UUID: ...
    @property
    def lease_token(self) -> str: ...


@dataclass(frozen=True, slots=True)
class NewJob:
    """One item for ``enqueue_many``; the fields are the arguments of ``enqueue``."""

    queue: str
    kind: str
    payload: Mapping[str, Any] = field(repr=False)
    idempotency_key: str = field(repr=False)
    available_at: datetime | None = None
    max_attempts: int = 3

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, with the payload as it was given."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class EnqueuedJob:
    """The job, and whether this call created it or an earlier one with the same key."""

    job_id: UUID
    created: bool


@dataclass(frozen=True, slots=True)
class EnqueuedItem:
    """The outcome of one item of ``enqueue_many``, by its position from 1."""

    position: int
    job_id: UUID | None
    outcome: Literal["created", "existing", "conflict", "invalid_job"]


def _column(index: int, doc: str) -> Any:  # noqa: ANN401 - each says its type below
    return property(lambda lease: lease._columns[index], doc=doc)  # noqa: SLF001


class LeasedJob:
    """A job that this worker holds until ``lease_expires_at``.

    ``claim`` returns it, and a worker hands it to its handler. Fields cannot be set. The
    repr does not show the payload and the lease token. Two leases are equal if they hold
    the same job by the same token.
    """

    # The columns of the claim statement: one tuple costs less than ten attributes, and
    # a worker makes thousands of leases a second.
    __slots__ = ("_columns", "_payload")

    def __init__(self, *columns: Any) -> None:  # noqa: ANN401 - of several types
        self._columns = columns
        self._payload: dict[str, Any] | None = None

    job_id: UUID = _column(0, "The job.")
    queue: str = _column(1, "The queue it was claimed from.")
    kind: str = _column(2, "The kind that it was enqueued with.")
    payload_json: bytes = _column(3, "The payload as JSON in UTF-8.")
    attempt: int = _column(4, "Counts from 1 and only grows: the fencing token.")
    max_attempts: int = _column(5, "How many attempts the job has.")
    lease_token: str = _column(6, "What renew, complete, fail and release present.")
    seconds_left: float = _column(9, "What was left of the lease as it was claimed.")

    @property
    def lease_expires_at(self) -> datetime:
        """The end of the lease by the server's clock, in UTC."""
        return datetime.fromtimestamp(self._columns[7], UTC)

    @property
    def created_at(self) -> datetime:
        """When the job was enqueued, by the server's clock, in UTC."""
        return datetime.fromtimestamp(self._columns[8], UTC)

    @property
    def payload(self) -> dict[str, Any]:
        """The payload, decoded at the first access.

        Raises:
            PayloadUndecodable: Python cannot represent it. A handler that lets this
                pass ends the job as failed, with code ``payload_undecodable``.
        """
        if self._payload is None:
            try:
                self._payload = json.loads(self.payload_json.decode())
            except (ValueError, RecursionError):
                raise PayloadUndecodable("the payload cannot be decoded") from None
        return self._payload

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of job {self.job_id}, queue {self.queue}, kind "
            f"{self.kind}, attempt {self.attempt}>"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LeasedJob):
            return NotImplemented
        return self.job_id == other.job_id and self.lease_token == other.lease_token

    def __hash__(self) -> int:
        return hash(self.lease_token)


@dataclass(frozen=True, slots=True)
class RenewedItem:
    """The outcome of one item of ``renew_many``, by its position from 1.

    ``busy``: another session has locked the job's row, for instance by this worker's own
    uncommitted completion. The lease is unchanged. ``seconds_left`` is how long a
    renewed lease had left by the server's clock as it returned.
    """

    position: int
    job_id: UUID | None
    lease_expires_at: datetime | None
    outcome: Literal["renewed", "invalid_lease", "busy"]
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class CompletedItem:
    """The outcome of one item of ``complete_many``, by its position from 1."""

    position: int
    job_id: UUID | None
    outcome: Literal["completed", "invalid_lease"]


Status: TypeAlias = Literal["queued", "running", "succeeded", "failed", "lost"]
PlainFailure: TypeAlias = (
    "tuple[Lease, str, bool] | tuple[Lease, str, bool, float | timedelta | None]"
)


class Failure(NamedTuple):
    """One item for ``fail_many``; the fields are the arguments of ``fail``."""

    lease: Lease
    failure_code: str
    retryable: bool
    retry_after: float | timedelta | None = None


@dataclass(frozen=True, slots=True)
class FailedJob:
    """``queued``, with the time the job falls due, or permanently ``failed``."""

    status: Literal["queued", "failed"]
    available_at: datetime | None


@dataclass(frozen=True, slots=True)
class FailedItem:
    """The outcome of one item of ``fail_many``, by its position from 1."""

    position: int
    job_id: UUID | None
    outcome: Literal[
        "queued", "failed", "invalid_lease", "invalid_failure", "invalid_argument"
    ]
    available_at: datetime | None


@dataclass(frozen=True, slots=True)
class InspectedJob:
    """The durable evidence of one job; times are aware and in UTC.

    The status ``lost`` means that somebody deleted rows by hand: the job is neither live
    nor ended. ``explain_job`` says how to put it back. ``holder`` is the
    ``application_name`` of the session that claimed it last.
    """

    job_id: UUID
    queue: str
    kind: str
    status: Status
    attempts: int
    max_attempts: int
    available_at: datetime
    lease_expires_at: datetime | None
    last_failure_code: str | None
    created_at: datetime
    updated_at: datetime
    producer: str
    worker: str | None
    ended_at: datetime | None
    holder: str | None = None


class JobPage(list[InspectedJob]):
    """A page of ``inspect_jobs``. ``next_before`` asks for the next; None: this is all.

    The server ends a page that it cut short with a row that has only a job_id.
    """

    def __init__(self, rows: list[InspectedJob], limit: int) -> None:
        is_cut = bool(rows) and getattr(rows[-1], "status", None) is None
        super().__init__(rows[:-1] if is_cut else rows)
        is_last = not is_cut and len(rows) < limit
        self.next_before: UUID | None = None if is_last else rows[-1].job_id


@dataclass(frozen=True, slots=True)
class InspectedAttempt:
    """One attempt of a job: ``running`` under a lease, live or expired, or ended.

    ``lease_expires_at`` is set while it runs, ``ended_at`` once it has ended, and
    ``retry_at`` if another attempt followed. ``max_attempts`` is the bound at that time.
    ``holder`` is the ``application_name`` of the session that claimed.
    """

    attempt: int
    worker: str
    outcome: Literal[
        "running", "succeeded", "retried", "failed", "lease_expired", "released"
    ]
    leased_at: datetime
    lease_expires_at: datetime | None
    ended_at: datetime | None
    failure_code: str | None
    retryable: bool | None
    retry_at: datetime | None
    max_attempts: int
    holder: str | None = None


@dataclass(frozen=True, slots=True)
class InspectedQueue:
    """How many live jobs of one queue are in which state, and how the last ones ended.

    Each live job is in one of five states. A ``ready`` job is due. A ``scheduled`` one
    has never failed and is due later. A ``retry_waiting`` one has failed and is due
    later. A ``running`` one has a live lease. An ``expired`` one has an expired lease;
    the first of these expired at ``oldest_lapse_at``. If ``is_estimate``, the five are
    scaled up from a sample. ``succeeded`` and ``failed`` count the jobs that ended since
    ``counted_since``, and ``failure_codes`` the failed ones by their last code.
    ``workers_waiting`` counts the sessions that listen for the queue, and is None if the
    server hides its locks. ``broken`` counts the live jobs with half a lease, because
    somebody wrote to their rows. ``oldest_leased_at`` is when the oldest live lease began.
    ``paused_at`` is set while the queue is paused.
    """

    queue: str
    is_declared: bool
    is_estimate: bool
    ready: int
    scheduled: int
    retry_waiting: int
    running: int
    expired: int
    oldest_ready_age: timedelta | None
    oldest_lapse_at: datetime | None
    next_due_at: datetime | None
    last_claimed_at: datetime | None
    counted_since: datetime
    succeeded: int
    failed: int
    failure_codes: Mapping[str, int]
    workers_waiting: int | None
    broken: int = 0
    oldest_leased_at: datetime | None = None
    paused_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class InspectedWorker:
    """The leases of one worker, and how many sessions may act as it.

    ``leases`` counts live and expired leases, ``expired`` only the latter. If
    ``is_estimate``, both are scaled up from a sample. Superusers' sessions do not count,
    and ``sessions`` is None if the server hides them. ``oldest_job_id`` is the job of the
    oldest lease, and ``oldest_holder`` the ``application_name`` of its session.
    """

    worker: str
    is_declared: bool
    is_estimate: bool
    leases: int
    expired: int
    oldest_leased_at: datetime | None
    next_lease_expires_at: datetime | None
    sessions: int | None
    oldest_job_id: UUID | None = None
    oldest_holder: str | None = None


@dataclass(frozen=True, slots=True)
class InspectedFailure:
    """A job that has permanently failed, with its last code, worker and attempt."""

    job_id: UUID
    queue: str
    kind: str
    failure_code: str
    worker: str
    attempts: int
    ended_at: datetime


@dataclass(frozen=True, slots=True)
class InspectedAct:
    """One act of an operator, as it was audited.

    ``operator`` is the role in force, perhaps by SET ROLE. ``login`` is the role that
    logged in.
    """

    act_id: int
    acted_at: datetime
    operator: str
    act: str
    arguments: Mapping[str, Any]
    job_count: int | None
    login: str | None


@dataclass(frozen=True, slots=True)
class InspectedFinding:
    """Something that is wrong with the Instance, and what to do about it.

    ``finding`` is one of the view ``health_finding``, which may grow. ``since`` is None
    if the time is not known.
    """

    severity: Literal["critical", "warning", "notice"]
    finding: str
    subject: str
    since: datetime | None
    detail: str | None
    remedy: str


@dataclass(frozen=True, slots=True)
class ExplainedJob:
    """Why a job is not being claimed: one reason, its facts, and what to do.

    ``reason`` is one of the view ``explain_reason``, which may grow and says what
    ``since`` and ``until`` mean. ``who`` and ``pid`` name the worker, operator or
    session. ``ahead`` counts the due jobs before this one, up to 10,000. ``detail`` has
    further facts, one a line.
    """

    job_id: UUID
    queue: str | None
    reason: str
    since: datetime | None
    until: datetime | None
    who: str | None
    pid: int | None
    attempt: int | None
    max_attempts: int | None
    failure_code: str | None
    ahead: int | None
    meaning: str
    remedy: str
    detail: str | None = None
