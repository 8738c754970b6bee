"""A durable single-step job queue that lives in PostgreSQL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenso_jobs._async_client import AsyncJobs
    from lenso_jobs._client import Jobs
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
    from lenso_jobs._prepare import prepare, prepare_async
    from lenso_jobs.config import Configuration
    from lenso_jobs.errors import (
        IdempotencyConflict,
        InvalidArgument,
        InvalidFailure,
        InvalidJob,
        InvalidLease,
        InvalidQueue,
        JobNotFound,
        JobsError,
        SchemaNotReady,
        Unauthorized,
    )
    from lenso_jobs.secrets import DirectorySecrets, EnvironmentSecrets, SecretNotFound
    from lenso_jobs.worker import (
        AsyncHeldLease,
        AsyncWorker,
        Fail,
        HeldLease,
        Retry,
        Worker,
    )

__all__ = [
    "AsyncHeldLease",
    "AsyncJobs",
    "AsyncWorker",
    "CompletedItem",
    "Configuration",
    "DirectorySecrets",
    "EnqueuedItem",
    "EnqueuedJob",
    "EnvironmentSecrets",
    "ExplainedJob",
    "Fail",
    "FailedItem",
    "FailedJob",
    "Failure",
    "HeldLease",
    "IdempotencyConflict",
    "InspectedAct",
    "InspectedAttempt",
    "InspectedFailure",
    "InspectedFinding",
    "InspectedJob",
    "InspectedQueue",
    "InspectedWorker",
    "InvalidArgument",
    "InvalidFailure",
    "InvalidJob",
    "InvalidLease",
    "InvalidQueue",
    "JobNotFound",
    "Jobs",
    "JobsError",
    "Lease",
    "LeasedJob",
    "NewJob",
    "RenewedItem",
    "Retry",
    "SchemaNotReady",
    "SecretNotFound",
    "Unauthorized",
    "Worker",
    "prepare",
    "prepare_async",
]

_ROOMS = (
    *("errors", "_models", "config", "secrets"),
    *("_client", "_async_client", "_prepare", "worker"),
)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what type checkers see is above
    # When they are asked for: pytest imports this package at its start, for the plugin,
    # wherever it is installed, and the rest takes thirty times as long.
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"{__name__}.{room}")
            if name in vars(module):
                globals()[name] = found = vars(module)[name]
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
