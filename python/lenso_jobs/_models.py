"""What the calls take and answer: one frozen dataclass per composite type in SQL."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta
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
        return {
            "queue": self.queue,
            "kind": self.kind,
            "payload": self.payload,
            "idempotency_key": self.idempotency_key,
            "available_at": self.available_at,
            "max_attempts": self.max_attempts,
        }


@dataclass(frozen=True, slots=True)
class EnqueuedJob:
    """The job, and whether this call created it or an earlier one with the same key."""

    job_id: UUID
    created: bool


@dataclass(frozen=True, slots=True)
class EnqueuedItem:
    """The fate of one item of ``enqueue_many``, by its position from 1."""

    position: int
    job_id: UUID | None
    outcome: Literal["created", "existing", "conflict", "invalid_job"]


@dataclass(frozen=True, slots=True)
class LeasedJob:
    """A job this worker holds until ``lease_expires_at``.

    ``attempt`` counts from 1 and only grows: hand it to outside systems as the fencing
    token. ``lease_token`` is what renew, complete and fail must present; like the
    payload it stays out of the repr.
    """

    job_id: UUID
    queue: str
    kind: str
    payload_json: bytes = field(repr=False)
    attempt: int
    max_attempts: int
    lease_token: str = field(repr=False)
    lease_expires_at: datetime
    created_at: datetime

    @property
    def payload(self) -> dict[str, Any]:
        """The payload, decoded anew at each access.

        Raises:
            ValueError: Python cannot represent it; only this job is concerned.
        """
        decoded: dict[str, Any] = json.loads(self.payload_json)
        return decoded


@dataclass(frozen=True, slots=True)
class RenewedItem:
    """The fate of one item of ``renew_many``, by its position from 1.

    ``busy``: another session holds the job's row at the moment, for instance this
    worker's own uncommitted completion; the lease stands as it was.
    """

    position: int
    job_id: UUID | None
    lease_expires_at: datetime | None
    outcome: Literal["renewed", "invalid_lease", "busy"]


@dataclass(frozen=True, slots=True)
class CompletedItem:
    """The fate of one item of ``complete_many``, by its position from 1."""

    position: int
    job_id: UUID | None
    outcome: Literal["completed", "invalid_lease"]


class Failure(NamedTuple):
    """One item for ``fail_many``; the fields are the arguments of ``fail``."""

    lease: Lease
    code: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class FailedJob:
    """``queued`` with the time of the next attempt, or ``failed`` for good."""

    status: Literal["queued", "failed"]
    available_at: datetime | None


@dataclass(frozen=True, slots=True)
class FailedItem:
    """The fate of one item of ``fail_many``, by its position from 1."""

    position: int
    job_id: UUID | None
    outcome: Literal["queued", "failed", "invalid_lease", "invalid_failure"]
    available_at: datetime | None


@dataclass(frozen=True, slots=True)
class InspectedJob:
    """The durable evidence of one job; times are aware and in UTC."""

    job_id: UUID
    queue: str
    kind: str
    status: Literal["queued", "running", "succeeded", "failed"]
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


@dataclass(frozen=True, slots=True)
class InspectedAttempt:
    """One attempt of a job: ``running`` under a lease, live or expired, or ended.

    ``lease_expires_at`` is set while it runs, ``ended_at`` once it has ended, and
    ``retry_at`` where another attempt followed; ``max_attempts`` is the bound that was
    in force then.
    """

    attempt: int
    worker: str
    outcome: Literal["running", "succeeded", "retried", "failed", "lease_expired"]
    leased_at: datetime
    lease_expires_at: datetime | None
    ended_at: datetime | None
    failure_code: str | None
    retryable: bool | None
    retry_at: datetime | None
    max_attempts: int


@dataclass(frozen=True, slots=True)
class InspectedQueue:
    """How many live jobs of one queue are in which state, and how the last ones ended.

    Each live job is in one of five states: ``ready`` is due, ``scheduled`` has never
    begun and is due later, ``retry_waiting`` has failed and is due later, ``running``
    has a live lease, ``expired`` one that ran out, the first of them at
    ``oldest_lapse_at``. The five are scaled up from a sample where ``is_estimate``.
    ``succeeded`` and ``failed`` count the jobs that ended since ``counted_since``, and
    ``failure_codes`` those that failed by their last code. ``workers_waiting`` are the
    sessions that listen for the queue.
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
    workers_waiting: int


@dataclass(frozen=True, slots=True)
class InspectedWorker:
    """The leases of one worker, and how many sessions may act as it.

    ``leases`` counts live and expired ones, ``expired`` the latter alone; both are
    scaled up from a sample where ``is_estimate``. Sessions of superusers do not count.
    """

    worker: str
    is_declared: bool
    is_estimate: bool
    leases: int
    expired: int
    oldest_leased_at: datetime | None
    next_lease_expires_at: datetime | None
    sessions: int


@dataclass(frozen=True, slots=True)
class InspectedFailure:
    """A job that has failed for good, with its last code, worker and attempt."""

    job_id: UUID
    queue: str
    kind: str
    failure_code: str
    worker: str
    attempts: int
    ended_at: datetime


@dataclass(frozen=True, slots=True)
class InspectedAct:
    """One act of an operator, as it was audited: who did what to how many jobs.

    ``login`` is as whom they had logged in, where ``operator`` may be a group that they
    became by SET ROLE; None for acts of before that was kept.
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

    ``finding`` is one of the view ``health_finding``, which may grow; ``since`` is None
    where that cannot be seen.
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

    ``reason`` is one of the view ``explain_reason``, which may grow. ``since`` and
    ``until`` are what the reason says, ``who`` and ``pid`` the worker, operator or
    session it speaks of, and ``ahead`` counts the due jobs before this one, to 10,000
    at most.
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
