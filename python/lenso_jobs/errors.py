"""Every refusal of lenso-jobs as an exception, a ``JobsError``.

The codes are those of the view ``error_code`` in every Instance. Any other exception of
a call is psycopg's own. Of those try again after 40001, 40P01, 55P03, 57014, class 08,
57P0x and 25006, and after 54000 from a commit, while the server's queue of notifications
is full.
"""

from __future__ import annotations

import re
from typing import ClassVar
from uuid import UUID

try:
    import psycopg
except ImportError as _error:
    _reason = str(_error).partition("\n")[0].rstrip(".")
    raise ImportError(
        f"psycopg finds no libpq ({_reason}): pip install 'lenso-jobs[binary]'"
    ) from None


class JobsError(Exception):
    """A refusal with a stable code. The call changed nothing.

    ``hint`` says what to do, if there is more to say.
    """

    sqlstate: ClassVar[str]
    """The code that the server reports, and that SQL callers see."""
    code: ClassVar[str]
    """The stable name, the same in every language."""

    def __init__(
        self, message: str, *, hint: str | None = None, detail: str | None = None
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.detail = detail

    def __init_subclass__(cls, *, sqlstate: str, code: str) -> None:
        super().__init_subclass__()
        cls.sqlstate = sqlstate
        cls.code = code
        REGISTRY[sqlstate] = cls


REGISTRY: dict[str, type[JobsError]] = {}
"""The exception of each SQLSTATE."""


class Unauthorized(JobsError, sqlstate="42501", code="unauthorized"):
    """The role may not call this function, or is not a declared caller."""


class InvalidJob(JobsError, sqlstate="LJ001", code="invalid_job"):
    """An argument of enqueue is out of bounds, or the queue is not declared."""


class IdempotencyConflict(JobsError, sqlstate="LJ002", code="idempotency_conflict"):
    """The producer has used this idempotency key for another intent."""

    @property
    def job_id(self) -> UUID | None:
        """The job that has the key; None if the server did not say."""
        found = re.search(
            r"\bjob_id=([0-9a-f]{8}(-[0-9a-f]{4}){4}[0-9a-f]{8})\b", self.detail or ""
        )
        return UUID(found[1]) if found else None


class InvalidQueue(JobsError, sqlstate="LJ003", code="invalid_queue"):
    """The queue is not declared."""


class InvalidLease(JobsError, sqlstate="LJ004", code="invalid_lease"):
    """The lease has expired, was superseded, has ended, or never was."""


class InvalidFailure(JobsError, sqlstate="LJ005", code="invalid_failure"):
    """The failure code, its retryable mark or its wait is malformed."""


class JobNotFound(JobsError, sqlstate="LJ006", code="job_not_found"):
    """No such job; it may have been purged or erased."""


class InvalidArgument(JobsError, sqlstate="LJ007", code="invalid_argument"):
    """A limit, cut-off, array or document is out of range."""


class SchemaNotReady(JobsError, sqlstate="LJ008", code="schema_not_ready"):
    """The schema is missing, older or newer than the client, or has drifted."""


class PayloadUndecodable(ValueError):
    """Python cannot represent the payload of this job; other jobs are not affected."""

    code: ClassVar[str] = "payload_undecodable"
    """The failure code of such a job."""


class PayloadInvalid(PayloadUndecodable):
    """The payload of this job does not fit the type of its kind.

    ``fault``, if a ``Kind`` raised it: the type, the fields and the rules. No value of
    the payload is in it.
    """

    code: ClassVar[str] = "payload_invalid"
    fault: str | None = None


class Translated:
    """Raises a refusal of the server as its exception, with psycopg's as the cause.

    A class, since a generator costs three times as much for each call.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, _kind: object, error: BaseException | None, _traceback: object
    ) -> None:
        """Raise the exception of the refusal. Let any other error pass."""
        if isinstance(error, psycopg.Error):
            kind = REGISTRY.get(error.sqlstate or "")
            if kind is not None:
                diag = error.diag
                raise kind(
                    diag.message_primary or kind.code,
                    hint=diag.message_hint,
                    detail=diag.message_detail,
                ) from error
