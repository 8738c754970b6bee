"""The loop that claims jobs, runs their handlers and reports what became of them."""

from lenso_jobs.errors import PayloadInvalid, PayloadUndecodable
from lenso_jobs.worker._lease import AsyncHeldLease, HeldLease, WorkerLease
from lenso_jobs.worker._outcome import Fail, Outcome, Release, Retry, Tally
from lenso_jobs.worker._prepared import WorkerOptions, prepare_worker
from lenso_jobs.worker._workers import AsyncWorker, Worker
from lenso_jobs.worker.observer import Ended, Observer

__all__ = [
    "AsyncHeldLease",
    "AsyncWorker",
    "Ended",
    "Fail",
    "HeldLease",
    "Observer",
    "Outcome",
    "PayloadInvalid",
    "PayloadUndecodable",
    "Release",
    "Retry",
    "Tally",
    "Worker",
    "WorkerLease",
    "WorkerOptions",
    "prepare_worker",
]
