"""Every refusal of lenso-jobs as an exception.

::

    JobsError
    ├── Unauthorized         42501
    ├── InvalidJob           LJ001
    ├── IdempotencyConflict  LJ002
    ├── InvalidQueue         LJ003
    ├── InvalidLease         LJ004
    ├── InvalidFailure       LJ005
    ├── JobNotFound          LJ006
    ├── InvalidArgument      LJ007
    └── SchemaNotReady       LJ008

The codes are those of the view ``error_code`` in every Instance. Whatever else a call
raises is psycopg's own and passes through untouched; of those, 40001, 40P01, 55P03,
57014, class 08, 57P0x and 25006 are worth another try, and 54000 from a commit while the
server's queue of notifications is full.
"""

from __future__ import annotations

from typing import ClassVar

import psycopg


class JobsError(Exception):
    """A refusal with a stable code; nothing was changed by the call."""

    sqlstate: ClassVar[str]
    """What the server reports, and what SQL callers see."""
    code: ClassVar[str]
    """The stable name, the same in every language."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

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


class InvalidQueue(JobsError, sqlstate="LJ003", code="invalid_queue"):
    """The queue is not declared."""


class InvalidLease(JobsError, sqlstate="LJ004", code="invalid_lease"):
    """The lease has expired, was superseded, has ended, or never was."""


class InvalidFailure(JobsError, sqlstate="LJ005", code="invalid_failure"):
    """The failure code or its retryable mark is malformed."""


class JobNotFound(JobsError, sqlstate="LJ006", code="job_not_found"):
    """No such job; it may have been purged."""


class InvalidArgument(JobsError, sqlstate="LJ007", code="invalid_argument"):
    """A limit, cut-off, array or document is out of range."""


class SchemaNotReady(JobsError, sqlstate="LJ008", code="schema_not_ready"):
    """The schema is missing, older or newer than the client, or has drifted."""


class Translated:
    """Raises a refusal of the server as its exception, with psycopg's as the cause.

    A class, since every call goes through it: a generator costs three times as much.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, _kind: object, error: BaseException | None, _traceback: object
    ) -> None:
        """Raise the refusal's own exception; anything else goes on as it is."""
        if isinstance(error, psycopg.Error):
            kind = REGISTRY.get(error.sqlstate or "")
            if kind is not None:
                raise kind(
                    error.diag.message_primary or kind.code,
                    hint=error.diag.message_hint,
                ) from error
