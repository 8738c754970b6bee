"""What the end of a handler means for its job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from lenso_jobs import _wire
from lenso_jobs.errors import InvalidArgument, InvalidFailure, PayloadUndecodable

if TYPE_CHECKING:
    from datetime import timedelta

NAME_RULE = "1 to 128 characters of A-Z a-z 0-9 . _ : / -"
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_LONGEST_WAIT = 86_400
_NO_PART_OF_A_NAME = re.compile(r"[^A-Za-z0-9._:/-]+")


def is_name(value: object) -> bool:
    """Return whether a value has the form of failure codes and names of queues."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


class _Chosen(Exception):
    """An end of an attempt that the handler chose."""

    def __init__(self, code: str) -> None:
        if not is_name(code):
            raise InvalidFailure(f"code must be {NAME_RULE}")
        super().__init__(code)
        self.code = code


class Retry(_Chosen):
    """Raised by a handler: this attempt failed, another may succeed.

    Args:
        code: 1 to 128 characters of ``A-Z a-z 0-9 . _ : / -``, stable and without
            secrets: observers read it.
        after: How long the next attempt waits, as a server asked: a timedelta, or
            seconds from 0 to 86,400, rounded up. Never longer than
            ``retry_max_seconds``. None for the wait of the policy.

    Raises:
        InvalidFailure: *code* is malformed.
        InvalidArgument: *after* is out of range.
    """

    after: int | None = None

    def __init__(self, code: str, after: float | timedelta | None = None) -> None:
        super().__init__(code)
        self.after = _after(after)


class Fail(_Chosen):
    """Raised by a handler: the job fails permanently. The code is as for ``Retry``."""


class Release(_Chosen):
    """Raised by a handler: the job is queued again, and this was no attempt.

    A job that was released 100 times fails its attempt instead, with the code.

    Args:
        code: As for ``Retry``. Only the log and observers see it, unless it fails.
        after: When the job is due again: a timedelta, or seconds from 0 to 86,400,
            rounded up. With 0 it keeps its place in the queue, and runs at once.

    Raises:
        InvalidFailure: *code* is malformed.
        InvalidArgument: *after* is out of range.
    """

    after: int | None = None

    def __init__(self, code: str, after: float | timedelta) -> None:
        super().__init__(code)
        self.after = _after(after)


def _after(value: float | timedelta | None) -> int | None:
    seconds = _wire.delay(value, InvalidArgument, "after")
    if not 0 <= (seconds or 0) <= _LONGEST_WAIT:
        raise InvalidArgument(f"after must be from 0 to {_LONGEST_WAIT:,} seconds")
    return seconds


class Verdict(NamedTuple):
    """How an attempt ended. It failed if it has a code and releases nothing.

    ``after``: how many seconds the job waits. None: it keeps its place if it is
    released, and waits as the policy says if it failed.
    """

    code: str | None
    retryable: bool
    after: int | None = None
    releases: bool = False


DONE = Verdict(None, retryable=False)
RELEASED = Verdict(None, retryable=True, releases=True)
HANDED_BACK = Verdict("worker_shutdown", retryable=True)
TIMED_OUT = Verdict("handler_timeout", retryable=True)
ROLLED_BACK = Verdict("completion_rolled_back", retryable=True)
UNJUDGED = Verdict("exception", retryable=True)

Outcome: TypeAlias = Literal[
    "succeeded", "retried", "failed", "lost", "released", "handed_back"
]
"""What became of a job that a worker held, as the server confirmed it.

- ``succeeded``, ``retried`` (queued again) and ``failed`` (permanently) are recorded.
- ``released``: the handler was not begun, or raised ``Release``. The job is queued again
  with all its attempts.
- ``handed_back``: the worker stopped while the handler ran. The job is queued again. If
  that was its last attempt, the outcome is ``failed`` with code ``worker_shutdown``.
- ``lost``: the lease ran out, was superseded or could not be reported on. The worker does
  not know what becomes of the job.
"""


@dataclass(slots=True)
class Tally:
    """How many jobs of a worker ended in which way; see ``Outcome``.

    ``is_clean`` is False if handlers still ran after the grace, or if the outcome of a
    job could not be reported after the worker was stopped.
    """

    succeeded: int = 0
    retried: int = 0
    failed: int = 0
    lost: int = 0
    handed_back: int = 0
    is_clean: bool = True
    released: int = 0


def verdict_on(error: BaseException) -> Verdict:
    """Return what an exception of a handler means for its job."""
    code, error = code_of(error), chosen(error)
    is_final = isinstance(error, Fail | PayloadUndecodable)
    after = error.after if isinstance(error, Retry | Release) else None
    is_release = isinstance(error, Release)
    return Verdict(code, not is_final, _after(after), is_release)


def chosen(error: BaseException) -> BaseException:
    """Return the ``Retry``, ``Fail`` or ``Release`` alone in a group, or the exception."""
    alone = error
    while isinstance(alone, BaseExceptionGroup) and len(alone.exceptions) == 1:
        (alone,) = alone.exceptions
    return alone if isinstance(alone, _Chosen | PayloadUndecodable) else error


def code_of(error: BaseException) -> str:
    """Return the failure code of an exception: from its class, never from its text."""
    error = chosen(error)
    # A class of the application's may not have called our constructor.
    if isinstance(error, _Chosen) and is_name(getattr(error, "code", None)):
        return error.code
    if isinstance(error, PayloadUndecodable):
        return error.code
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    # The end of a long name says more than its beginning.
    return _NO_PART_OF_A_NAME.sub("_", name)[-128:] or "exception"
