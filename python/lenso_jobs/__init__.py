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
        JobPage,
        Lease,
        LeasedJob,
        NewJob,
        RenewedItem,
    )
    from lenso_jobs._prepare import prepare, prepare_async
    from lenso_jobs.config import Configuration, ConfigurationError
    from lenso_jobs.errors import (
        IdempotencyConflict,
        InvalidArgument,
        InvalidFailure,
        InvalidJob,
        InvalidLease,
        InvalidQueue,
        JobNotFound,
        JobsError,
        PayloadInvalid,
        PayloadUndecodable,
        SchemaNotReady,
        Unauthorized,
    )
    from lenso_jobs.fleet import Fleet, shard_of
    from lenso_jobs.kinds import Kind, Kinds
    from lenso_jobs.secrets import DirectorySecrets, EnvironmentSecrets, SecretNotFound
    from lenso_jobs.worker import (
        AsyncFleetWorkers,
        AsyncHeldLease,
        AsyncWorker,
        Ended,
        Fail,
        FleetWorkers,
        HeldLease,
        Observer,
        Release,
        Retry,
        Tally,
        Worker,
        WorkerLease,
        WorkerOptions,
        current_shard,
        prepare_fleet_workers,
        prepare_worker,
    )

# fmt: off
__all__ = [
    "AsyncFleetWorkers", "AsyncHeldLease", "AsyncJobs", "AsyncWorker", "CompletedItem", "Configuration",
    "ConfigurationError", "DirectorySecrets", "Ended", "EnqueuedItem",
    "EnqueuedJob", "EnvironmentSecrets", "ExplainedJob", "Fail", "FailedItem",
    "FailedJob", "Failure", "Fleet", "FleetWorkers", "HeldLease", "IdempotencyConflict", "InspectedAct",
    "InspectedAttempt", "InspectedFailure", "InspectedFinding", "InspectedJob",
    "InspectedQueue", "InspectedWorker", "InvalidArgument", "InvalidFailure",
    "InvalidJob", "InvalidLease", "InvalidQueue", "JobNotFound", "JobPage", "Jobs",
    "JobsError", "Kind", "Kinds", "Lease", "LeasedJob", "NewJob", "Observer", "PayloadInvalid",
    "PayloadUndecodable", "Release", "RenewedItem", "Retry", "SchemaNotReady", "SecretNotFound", "Tally",
    "Unauthorized", "Worker", "WorkerLease", "WorkerOptions", "current_shard", "prepare", "prepare_async",
    "prepare_fleet_workers", "prepare_worker", "shard_of",
]
# fmt: on

# In the order of what they cost to load: the document needs pydantic.
_MODULES = (
    *("errors", "_models", "_client", "_async_client", "secrets", "_prepare"),
    *("worker", "kinds", "config", "fleet"),
)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - type checkers see the block above
    # On demand: pytest imports this package at its start, for the plugin, wherever it is
    # installed, and all of it takes thirty times as long.
    if name in __all__:
        for home in _MODULES:
            module = import_module(f"{__name__}.{home}")
            if name in vars(module):
                globals()[name] = found = vars(module)[name]
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
