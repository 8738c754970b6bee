"""The portable capability ``lenso.jobs@1``: JSON objects in, JSON objects out.

An operation is a generator over the client's calls, which the two classes below make
for it: the words of the contract are written once, and only the waiting differs.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from uuid import UUID

from lenso_jobs.errors import (
    IdempotencyConflict,
    InvalidFailure,
    InvalidJob,
    InvalidLease,
    InvalidQueue,
    JobNotFound,
    JobsError,
    Unauthorized,
)
from lenso_jobs.worker._outcome import PAYLOAD_UNDECODABLE

if TYPE_CHECKING:
    from lenso_jobs._async_client import AsyncJobs
    from lenso_jobs._client import Jobs
    from lenso_jobs._models import FailedJob, LeasedJob

NO_JOB_AVAILABLE = "no_job_available"
"""What a claim answers when no job of the queue is due."""

Answer = dict[str, Any] | str
_Request = dict[str, Any]
_Call = Callable[["Jobs"], Any]
_Steps = Generator[_Call, Any, Answer]

_RFC_3339 = re.compile(
    r"(?P<seconds>"
    r"(?P<year>[0-9]{4})-(?P<month>0[1-9]|1[0-2])-(?P<day>0[1-9]|[12][0-9]|3[01])"
    r"[Tt](?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60))"
    r"(?P<fraction>\.[0-9]+)?"
    r"(?P<offset>[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)


class ProtocolViolation(ValueError):
    """A request that is none of the contract's; no call was made for it."""


class Capability:
    """``lenso.jobs@1`` on a client, as one call.

    Args:
        jobs: The client to act through, as its caller and in its transaction.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def dispatch(self, operation: str, request: Mapping[str, Any]) -> Answer:
        """Answer one request with the operation's object, or with its error's name.

        An error's name stands for a refusal of the Instance: where the client is on a
        connection within a transaction, that has failed as if the client had raised.

        Timestamps are RFC 3339 with an offset, and are answered in UTC with six digits.
        ``available_at`` may be null, which means at once. It is rounded from up to nine
        digits to microseconds, as by PostgreSQL; more digits, offsets beyond 15:59, leap
        seconds and whatever falls outside the years 1 to 9999 are ``invalid_job``.

        A claimed job whose payload Python cannot represent is failed for good as
        ``payload_undecodable``, and the next one is claimed.

        Args:
            operation: enqueue, claim, renew, complete, fail or inspect.
            request: The operation's object, with all of its fields and no other.

        Raises:
            ProtocolViolation: The operation or the shape of the request is unknown.
            JobsError: A refusal that the contract has no name for.
        """
        steps = _steps(operation, request)
        try:
            call = next(steps)
            while True:
                try:
                    answer = call(self._jobs)
                except JobsError as refusal:
                    call = steps.throw(refusal)
                else:
                    call = steps.send(answer)
        except StopIteration as end:
            return cast("Answer", end.value)


class AsyncCapability:
    """``lenso.jobs@1`` on an asynchronous client; otherwise as ``Capability``."""

    def __init__(self, jobs: AsyncJobs) -> None:
        self._jobs: Any = jobs

    async def dispatch(self, operation: str, request: Mapping[str, Any]) -> Answer:
        """As ``Capability.dispatch``."""
        steps = _steps(operation, request)
        try:
            call = next(steps)
            while True:
                try:
                    answer = await call(self._jobs)
                except JobsError as refusal:
                    call = steps.throw(refusal)
                else:
                    call = steps.send(answer)
        except StopIteration as end:
            return cast("Answer", end.value)


class _Shape(NamedTuple):
    """What a field must be, in words and in deed."""

    wording: str
    fits: Callable[[object], bool]


class _Operation(NamedTuple):
    takes: dict[str, _Shape]
    steps: Callable[[_Request], _Steps]
    errors: tuple[type[JobsError], ...]


@dataclass(frozen=True, slots=True, repr=False)
class _Lease:
    job_id: UUID  # or any text: what is no UUID, the client refuses
    lease_token: str


def _steps(operation: str, request: Mapping[str, Any]) -> _Steps:
    """Check the request, make the operation's calls, and name what refuses them."""
    known = _OPERATIONS.get(operation) if isinstance(operation, str) else None
    if known is None:
        raise ProtocolViolation(f"{_name(operation)} is not an operation")
    fields = _checked(operation, known.takes, request)
    try:
        return (yield from known.steps(fields))
    except known.errors as refusal:
        return refusal.code


def _checked(operation: str, takes: dict[str, _Shape], request: object) -> _Request:
    if not isinstance(request, Mapping):
        raise ProtocolViolation(f"{operation}: the request must be an object")
    fields = dict(request)
    for field in fields:
        if field not in takes:
            raise ProtocolViolation(f"{operation}: {_name(field)} is not a field")
    for field, shape in takes.items():
        if field not in fields:
            raise ProtocolViolation(f"{operation}: {field} is missing")
        if not shape.fits(fields[field]):
            raise ProtocolViolation(f"{operation}: {field} must be {shape.wording}")
    return fields


def _name(given: object) -> str:
    return f"{given!r:.80}" if isinstance(given, str) else "what is no string"


def _is_instant(value: object) -> bool:
    match = _RFC_3339.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value is None
    return int(match["day"]) <= monthrange(int(match["year"]), int(match["month"]))[1]


def _instant(text: str | None) -> datetime | None:
    """Read what ``_instant_from_rfc3339`` reads in SQL, to the same microsecond."""
    match = _RFC_3339.fullmatch(text or "")
    if match is None:
        return None
    fraction, offset = match["fraction"] or ".0", match["offset"].upper()
    if len(fraction) <= len(".123456789") and offset[1:3] <= "15":
        with suppress(OverflowError, ValueError):
            whole = datetime.fromisoformat(match["seconds"].upper() + offset)
            microseconds = round(float(fraction) * 1_000_000)
            return whole.astimezone(UTC) + timedelta(microseconds=microseconds)
    raise InvalidJob("available_at is no time that can be kept")


def _object(answer: object, *fields: str) -> dict[str, Any]:
    return {field: _json(getattr(answer, field)) for field in fields}


def _json(value: object) -> object:
    if isinstance(value, datetime):
        moment = value.astimezone(UTC).replace(tzinfo=None)
        return f"{moment.isoformat(timespec='microseconds')}Z"
    return str(value) if isinstance(value, UUID) else value


def _enqueue(request: _Request) -> _Steps:
    arguments = {**request, "available_at": _instant(request["available_at"])}
    job = yield lambda jobs: jobs.enqueue(**arguments)
    return _object(job, "job_id", "created")


def _claim(request: _Request) -> _Steps:
    while found := (yield lambda jobs: jobs.claim(request["queue"])):
        (job,) = found
        with suppress(ValueError, RecursionError):
            return _object(
                job,
                *("job_id", "queue", "kind", "payload", "attempt", "max_attempts"),
                *("lease_token", "lease_expires_at"),
            )
        # A lease that has run out in the meantime is nobody's either.
        with suppress(InvalidLease):
            yield partial(_give_up, job)
    return NO_JOB_AVAILABLE


def _give_up(job: LeasedJob, jobs: Jobs) -> FailedJob:
    return jobs.fail(job, PAYLOAD_UNDECODABLE, retryable=False)


def _renew(request: _Request) -> _Steps:
    end = yield lambda jobs: jobs.renew(_Lease(**request))
    return {"lease_expires_at": _json(end)}


def _complete(request: _Request) -> _Steps:
    is_completed = yield lambda jobs: jobs.complete(_Lease(**request))
    return {"completed": is_completed}


def _fail(request: _Request) -> _Steps:
    lease = _Lease(request["job_id"], request["lease_token"])
    code, retryable = request["failure_code"], request["retryable"]
    job = yield lambda jobs: jobs.fail(lease, code, retryable=retryable)
    return _object(job, "status", "available_at")


def _inspect(request: _Request) -> _Steps:
    job = yield lambda jobs: jobs.inspect(request["job_id"])
    answer = _object(
        job,
        *("job_id", "queue", "kind", "status", "attempts", "max_attempts"),
        *("available_at", "created_at", "updated_at"),
    )
    optional = _object(job, "lease_expires_at", "last_failure_code")
    return answer | {k: v for k, v in optional.items() if v is not None}


_STRING = _Shape("a string", lambda value: isinstance(value, str))
_OBJECT = _Shape("an object", lambda value: isinstance(value, Mapping))
_BOOLEAN = _Shape("true or false", lambda value: isinstance(value, bool))
_INTEGER = _Shape(
    "an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)
)
_INSTANT = _Shape("null or an RFC 3339 timestamp with an offset", _is_instant)
_LEASE = {"job_id": _STRING, "lease_token": _STRING}

_OPERATIONS = {
    "enqueue": _Operation(
        {
            "queue": _STRING,
            "kind": _STRING,
            "payload": _OBJECT,
            "idempotency_key": _STRING,
            "available_at": _INSTANT,
            "max_attempts": _INTEGER,
        },
        _enqueue,
        (IdempotencyConflict, InvalidJob, Unauthorized),
    ),
    "claim": _Operation({"queue": _STRING}, _claim, (InvalidQueue, Unauthorized)),
    "renew": _Operation(_LEASE, _renew, (InvalidLease, Unauthorized)),
    "complete": _Operation(_LEASE, _complete, (InvalidLease, Unauthorized)),
    "fail": _Operation(
        {**_LEASE, "failure_code": _STRING, "retryable": _BOOLEAN},
        _fail,
        (InvalidFailure, InvalidLease, Unauthorized),
    ),
    "inspect": _Operation({"job_id": _STRING}, _inspect, (JobNotFound, Unauthorized)),
}
