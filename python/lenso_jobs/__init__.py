"""A durable single-step job queue that lives in PostgreSQL."""

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
from lenso_jobs.prepare import prepare
from lenso_jobs.secrets import DirectorySecrets, EnvironmentSecrets, SecretNotFound

__all__ = [
    "CompletedItem",
    "Configuration",
    "DirectorySecrets",
    "EnqueuedItem",
    "EnqueuedJob",
    "EnvironmentSecrets",
    "FailedItem",
    "FailedJob",
    "Failure",
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
    "SchemaNotReady",
    "SecretNotFound",
    "Unauthorized",
    "prepare",
]
