"""What a handler's end means for its job."""

from __future__ import annotations

import re
from inspect import (
    isasyncgen,
    isasyncgenfunction,
    isawaitable,
    isgenerator,
    isgeneratorfunction,
)
from typing import Literal, NamedTuple

from lenso_jobs.errors import InvalidFailure

PAYLOAD_UNDECODABLE = "payload_undecodable"
"""The failure code of a job whose payload Python cannot represent."""
WORKER_SHUTDOWN = "worker_shutdown"
"""The failure code of a job that a stopping worker handed back."""

COMPLETION_ROLLED_BACK = "completion_rolled_back"
"""The failure code of a job whose handler completed it, rolled back, and returned."""

_CODE = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_NO_PART_OF_A_CODE = re.compile(r"[^A-Za-z0-9._:/-]+")
_LONGEST = 128


def _is_code(code: object) -> bool:
    return isinstance(code, str) and _CODE.fullmatch(code) is not None


class _Verdict(Exception):
    """A failure whose code the handler chose.

    Args:
        code: 1 to 128 characters of ``A-Z a-z 0-9 . _ : / -``, stable and without
            secrets: observers read it.

    Raises:
        InvalidFailure: *code* is malformed.
    """

    def __init__(self, code: str) -> None:
        if not _is_code(code):
            raise InvalidFailure(
                "code must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -"
            )
        super().__init__(code)
        self.code = code


class Retry(_Verdict):
    """Raised by a handler: this attempt failed, another may help."""


class Fail(_Verdict):
    """Raised by a handler: the job failed for good."""


class PayloadUndecodable(ValueError):
    """Python cannot represent this payload; only this job is concerned."""


class Verdict(NamedTuple):
    """How an attempt ended: well where there is no failure code."""

    code: str | None
    retryable: bool


DONE = Verdict(None, retryable=False)
HANDED_BACK = Verdict(WORKER_SHUTDOWN, retryable=True)
ROLLED_BACK = Verdict(COMPLETION_ROLLED_BACK, retryable=True)
UNJUDGED = Verdict("exception", retryable=True)

Outcome = Literal["succeeded", "retried", "failed", "lost", "handed_back"]
"""What became of a job that a worker held, by the server's answer.

``succeeded``, ``retried`` (queued again) and ``failed`` (for good) are recorded ends;
``handed_back`` was queued again, or ended, because the worker stopped; ``lost`` is a
lease that ran out, was superseded or could not be reported on: this worker does not know
what becomes of the job.
"""


def is_unbegun(result: object) -> bool:
    """Whether what a handler answered still has to be run by somebody."""
    return result is not None and (
        isawaitable(result) or isgenerator(result) or isasyncgen(result)
    )


def is_never_run(handler: object) -> bool:
    """Whether to call it runs nothing of it, and nobody would."""
    return isgeneratorfunction(handler) or isasyncgenfunction(handler)


def verdict_on(error: BaseException) -> Verdict:
    """Judge what a handler raised."""
    return Verdict(code_of(error), is_retryable(error))


def chosen(error: BaseException) -> BaseException:
    """Answer the verdict that is alone in a group, as a group of tasks raises it."""
    alone = error
    while isinstance(alone, BaseExceptionGroup) and len(alone.exceptions) == 1:
        (alone,) = alone.exceptions
    return alone if isinstance(alone, _Verdict | PayloadUndecodable) else error


def is_chosen(error: BaseException) -> bool:
    """Whether the handler chose how its job shall fail."""
    try:
        return isinstance(chosen(error), Retry | Fail)
    except Exception:  # noqa: BLE001 - a class of the application's may raise anything
        return False


def code_of(error: BaseException) -> str:
    """The failure code of what a handler raised: of its class, never of its text."""
    error = chosen(error)
    # A class of the application's may have made itself without ours.
    if isinstance(error, _Verdict) and _is_code(getattr(error, "code", None)):
        return error.code
    if isinstance(error, PayloadUndecodable):
        return PAYLOAD_UNDECODABLE
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    # The end of a long name says more than its beginning.
    return _NO_PART_OF_A_CODE.sub("_", name)[-_LONGEST:] or "exception"


def is_retryable(error: BaseException) -> bool:
    """Whether another attempt may help; so it is assumed of what nobody judged."""
    return not isinstance(chosen(error), Fail | PayloadUndecodable)
