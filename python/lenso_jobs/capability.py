"""The portable capability ``lenso.jobs@1``: JSON objects in, JSON objects out.

Each operation is a coroutine over the calls of a client. The client that blocks is
called within it, so that it never waits.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from lenso_jobs._async_client import AsyncJobs
from lenso_jobs._client import Jobs
from lenso_jobs._given import kind
from lenso_jobs.errors import (
    IdempotencyConflict,
    InvalidArgument,
    InvalidFailure,
    InvalidJob,
    InvalidLease,
    InvalidQueue,
    JobNotFound,
    JobsError,
    PayloadUndecodable,
    SchemaNotReady,
    Unauthorized,
)

NO_JOB_AVAILABLE = "no_job_available"
"""The error of a claim if no job of the queue is due."""

Answer = dict[str, Any] | str
_Call = Callable[..., Awaitable[Any]]
_Request = dict[str, Any]
_Act = Callable[[_Call, _Request], Coroutine[Any, Any, Answer]]

_RFC_3339 = re.compile(
    r"(?P<seconds>"
    r"(?P<year>[0-9]{4})-(?P<month>0[1-9]|1[0-2])-(?P<day>0[1-9]|[12][0-9]|3[01])"
    r"[Tt](?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60))"
    r"(?P<fraction>\.[0-9]+)?"
    r"(?P<offset>[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)


class ProtocolViolation(ValueError):
    """A request that is not of the contract's form. No call was made for it."""


class Capability:
    """``lenso.jobs@1`` on a client.

    Args:
        jobs: The client to act through, as its caller and in its transaction.

    Raises:
        InvalidArgument: *jobs* is no ``Jobs``.
    """

    def __init__(self, jobs: Jobs) -> None:
        if not isinstance(jobs, Jobs):
            raise InvalidArgument(f"jobs must be a Jobs, not {kind(jobs)}")
        self._jobs = jobs

    def dispatch(self, operation: str, request: Mapping[str, Any]) -> Answer:
        """Carry out one request.

        Timestamps are RFC 3339 with an offset, and are returned in UTC with six digits.
        ``available_at`` may be null, for at once. It is rounded from up to nine digits
        to microseconds, as by PostgreSQL. More digits, offsets beyond 15:59, leap
        seconds and times outside the years 1 to 9999 are ``invalid_job``.

        A claimed job whose payload Python cannot represent is failed permanently as
        ``payload_undecodable``, and the next one is claimed.

        Args:
            operation: enqueue, claim, renew, complete, fail or inspect.
            request: The operation's object, with all of its fields and no other.

        Returns:
            The operation's object, or the name of its error. A name stands for a refusal
            of the Instance: a transaction in progress on the client's connection has
            failed, as if the client had raised.

        Raises:
            ProtocolViolation: The operation or the shape of the request is unknown.
            JobsError: A refusal that the contract has no name for.
        """

        async def call(verb: str, *arguments: object, **named: object) -> object:
            return getattr(self._jobs, verb)(*arguments, **named)

        try:
            _carry_out(call, operation, request).send(None)
        except StopIteration as end:
            answer: Answer = end.value
        return answer


class AsyncCapability:
    """``lenso.jobs@1`` on an ``AsyncJobs``; otherwise as ``Capability``."""

    def __init__(self, jobs: AsyncJobs) -> None:
        if not isinstance(jobs, AsyncJobs):
            raise InvalidArgument(f"jobs must be an AsyncJobs, not {kind(jobs)}")
        self._jobs = jobs

    async def dispatch(self, operation: str, request: Mapping[str, Any]) -> Answer:
        """Carry out one request, as ``Capability.dispatch``.

        Returns:
            The operation's object, or the name of its error.

        Raises:
            ProtocolViolation: The operation or the shape of the request is unknown.
            JobsError: A refusal that the contract has no name for.
        """

        async def call(verb: str, *arguments: object, **named: object) -> object:
            return await getattr(self._jobs, verb)(*arguments, **named)

        return await _carry_out(call, operation, request)


@dataclass(frozen=True, slots=True, repr=False)
class _Lease:
    job_id: UUID  # or any text: the client refuses one that is no UUID
    lease_token: str


async def _carry_out(call: _Call, operation: str, request: object) -> Answer:
    known = _OPERATIONS.get(operation) if isinstance(operation, str) else None
    if known is None:
        raise ProtocolViolation(f"{_name(operation)} is not an operation")
    takes, act, errors = known
    fields = _checked(operation, takes.split(), request)
    named: tuple[type[JobsError], ...] = (*errors, Unauthorized)
    try:
        return await act(call, fields)
    except named as refusal:
        return refusal.code


def _checked(operation: str, takes: list[str], request: object) -> _Request:
    if not isinstance(request, Mapping):
        raise ProtocolViolation(f"{operation}: the request must be an object")
    fields = dict(request)
    for field in fields:
        if field not in takes:
            raise ProtocolViolation(f"{operation}: {_name(field)} is not a field")
    for field in takes:
        if field not in fields:
            raise ProtocolViolation(f"{operation}: {field} is missing")
        wording, fits = _SHAPES.get(field, _STRING)
        if not fits(fields[field]):
            raise ProtocolViolation(f"{operation}: {field} must be {wording}")
    return fields


def _name(given: object) -> str:
    return f"{given!r:.80}" if isinstance(given, str) else "a name that is no string"


def _is_instant(value: object) -> bool:
    match = _RFC_3339.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value is None
    return int(match["day"]) <= monthrange(int(match["year"]), int(match["month"]))[1]


_Shape = tuple[str, Callable[[object], bool]]
_STRING: _Shape = ("a string", lambda value: isinstance(value, str))
_SHAPES: dict[str, _Shape] = {
    "payload": ("an object", lambda value: isinstance(value, Mapping)),
    "available_at": (
        "null or an RFC 3339 timestamp with an offset",
        _is_instant,
    ),
    "max_attempts": (
        "an integer",
        lambda value: isinstance(value, int) and not isinstance(value, bool),
    ),
    "retryable": ("true or false", lambda value: isinstance(value, bool)),
}


def _instant(text: str | None) -> datetime | None:
    """Read the time as ``_enqueue_instant`` does in SQL, to the microsecond."""
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


def _object(answer: object, fields: str) -> dict[str, Any]:
    return {field: _json(getattr(answer, field)) for field in fields.split()}


def _json(value: object) -> object:
    if isinstance(value, datetime):
        moment = value.astimezone(UTC).replace(tzinfo=None)
        return f"{moment.isoformat(timespec='microseconds')}Z"
    return str(value) if isinstance(value, UUID) else value


async def _enqueue(call: _Call, request: _Request) -> Answer:
    arguments = {**request, "available_at": _instant(request["available_at"])}
    return _object(await call("enqueue", **arguments), "job_id created")


async def _claim(call: _Call, request: _Request) -> Answer:
    fields = "job_id queue kind payload attempt max_attempts lease_token"
    while found := await call("claim", request["queue"]):
        with suppress(PayloadUndecodable):
            return _object(found[0], f"{fields} lease_expires_at")
        # The lease may have expired in the meantime.
        with suppress(InvalidLease):
            await call("fail", found[0], PayloadUndecodable.code, retryable=False)
    return NO_JOB_AVAILABLE


async def _renew(call: _Call, request: _Request) -> Answer:
    return {"lease_expires_at": _json(await call("renew", _Lease(**request)))}


async def _complete(call: _Call, request: _Request) -> Answer:
    return {"completed": await call("complete", _Lease(**request))}


async def _fail(call: _Call, request: _Request) -> Answer:
    lease = _Lease(request.pop("job_id"), request.pop("lease_token"))
    return _object(await call("fail", lease, **request), "status available_at")


async def _inspect(call: _Call, request: _Request) -> Answer:
    job = await call("inspect", request["job_id"])
    if job.status == "lost":
        raise SchemaNotReady(f"job {job.job_id} is lost: run lenso-jobs explain")
    fields = "job_id queue kind status attempts max_attempts"
    optional = _object(job, "lease_expires_at last_failure_code")
    return _object(job, f"{fields} available_at created_at updated_at") | {
        field: value for field, value in optional.items() if value is not None
    }


_LEASE = "job_id lease_token"
# The fields of each operation, and the errors that the contract names.
_OPERATIONS: dict[str, tuple[str, _Act, tuple[type[JobsError], ...]]] = {
    "enqueue": (
        "queue kind payload idempotency_key available_at max_attempts",
        _enqueue,
        (IdempotencyConflict, InvalidJob),
    ),
    "claim": ("queue", _claim, (InvalidQueue,)),
    "renew": (_LEASE, _renew, (InvalidLease,)),
    "complete": (_LEASE, _complete, (InvalidLease,)),
    "fail": (
        f"{_LEASE} failure_code retryable",
        _fail,
        (InvalidFailure, InvalidLease),
    ),
    "inspect": ("job_id", _inspect, (JobNotFound,)),
}
