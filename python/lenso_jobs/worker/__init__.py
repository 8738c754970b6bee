"""The loop that claims jobs, runs their handlers and reports what became of them."""

from lenso_jobs.worker._engine import Tally
from lenso_jobs.worker._lease import AsyncHeldLease, HeldLease
from lenso_jobs.worker._outcome import Fail, Outcome, PayloadUndecodable, Retry
from lenso_jobs.worker._tasks import AsyncWorker
from lenso_jobs.worker._threads import Worker
from lenso_jobs.worker.observer import Ended, Observer

__all__ = [
    "AsyncHeldLease",
    "AsyncWorker",
    "Ended",
    "Fail",
    "HeldLease",
    "Observer",
    "Outcome",
    "PayloadUndecodable",
    "Retry",
    "Tally",
    "Worker",
]
