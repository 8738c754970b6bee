"""What the calls take and answer: one frozen dataclass per composite type in SQL."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
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
