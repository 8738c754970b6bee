"""A durable single-step job queue that lives in PostgreSQL."""

from lenso_jobs._async_client import AsyncJobs
from lenso_jobs._client import Jobs
from lenso_jobs._models import (
    CompletedItem,
    EnqueuedItem,
    EnqueuedJob,
    FailedItem,
    FailedJob,
    Failure,
    InspectedJob,
    Lease,
    LeasedJob,
    NewJob,
    RenewedItem,
)
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
from lenso_jobs.prepare import prepare, prepare_async
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
    "Fail",
    "FailedItem",
    "FailedJob",
    "Failure",
    "HeldLease",
    "IdempotencyConflict",
    "InspectedJob",
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
