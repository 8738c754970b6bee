"""The loop that claims jobs, runs their handlers and reports what became of them."""

from lenso_jobs.errors import PayloadInvalid, PayloadUndecodable
from lenso_jobs.worker._fleet import (
    AsyncFleetWorkers,
    FleetWorkers,
    current_shard,
    prepare_fleet_workers,
)
from lenso_jobs.worker._lease import AsyncHeldLease, HeldLease, WorkerLease
from lenso_jobs.worker._outcome import Fail, Outcome, Release, Retry, Tally
from lenso_jobs.worker._prepared import WorkerOptions, prepare_worker
from lenso_jobs.worker._workers import AsyncWorker, Worker
from lenso_jobs.worker.observer import Ended, Observer

__all__ = [
    "AsyncFleetWorkers",
    "AsyncHeldLease",
    "AsyncWorker",
    "Ended",
    "Fail",
    "FleetWorkers",
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
    "current_shard",
    "prepare_fleet_workers",
    "prepare_worker",
]
