"""A user's application, as it might be: what the types of the package must allow."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from lenso_jobs import (
    AsyncHeldLease,
    AsyncJobs,
    AsyncWorker,
    Configuration,
    EnvironmentSecrets,
    ExplainedJob,
    Fail,
    HeldLease,
    IdempotencyConflict,
    InspectedAct,
    InspectedAttempt,
    InspectedFailure,
    InspectedFinding,
    InspectedWorker,
    InvalidLease,
    Jobs,
    NewJob,
    Retry,
    Worker,
    prepare,
    prepare_async,
)
from lenso_jobs.capability import AsyncCapability, Capability
from lenso_jobs.metrics import PrometheusObserver
from lenso_jobs.testing import JobsInstance
from lenso_jobs.tracing import Tracing
from lenso_jobs.worker import Ended, Observer


def produce(connection: psycopg.Connection[DictRow]) -> UUID:
    jobs = Jobs(connection, "jobs_email", caller="accounts")
    job = jobs.enqueue(
        "email",
        "send-welcome",
        {"to": "ada@example.com", "tags": ["new"]},
        idempotency_key="welcome:1",
        available_at=datetime.now(UTC) + timedelta(minutes=5),
    )
    created: bool = job.created
    for item in jobs.enqueue_many(
        [NewJob("email", "send", {}, "k1"), {"queue": "email", "kind": "send"}]
    ):
        position: int = item.position
        found: UUID | None = item.job_id
        print(position, found, item.outcome == "conflict", created)
    return job.job_id


def consume(pool: ConnectionPool[psycopg.Connection[DictRow]]) -> None:
    jobs = Jobs(pool, schema="jobs_email")
    for lease in jobs.claim("email", limit=10, wait=20):
        payload: dict[str, Any] = lease.payload
        until: datetime = jobs.renew(lease)
        try:
            jobs.complete(lease)
        except InvalidLease as error:
            code: str = error.code
            print(code, error.hint, payload, until)
    due: datetime | None = jobs.next_available_at("email")
    print(due, jobs.wait("email", 1.5))


def look_after(jobs: Jobs) -> timedelta | None:
    oldest: timedelta | None = None
    for queue in jobs.inspect_queues():
        oldest = queue.oldest_ready_age
        codes: dict[str, int] = dict(queue.failure_codes)
        print(queue.queue, codes, queue.next_due_at)
    workers: list[InspectedWorker] = jobs.inspect_workers()
    findings: list[InspectedFinding] = jobs.inspect_health()
    page: list[InspectedFailure] = jobs.inspect_failures("email", limit=10)
    page = jobs.inspect_failures(failure_code="x", before=page[-1])
    acts: list[InspectedAct] = jobs.inspect_acts()
    acts = jobs.inspect_acts(before=acts[-1])
    explained: ExplainedJob = jobs.explain_job(page[0].job_id)
    history: list[InspectedAttempt] = jobs.inspect_attempts(page[0].job_id)
    print(workers, findings, acts[0].arguments["limit"], explained.who, history)
    yesterday = datetime.now(UTC) - timedelta(days=1)
    again: str = jobs.redrive(page[0].job_id, extra_attempts=2).status
    count: int = jobs.redrive_failed("email", since=yesterday)
    count += jobs.purge(yesterday) + jobs.enforce_retention() + jobs.retire_expired()
    print(again, count)
    return oldest


async def produce_async(pool: AsyncConnectionPool[Any]) -> None:
    async with AsyncJobs(pool, "jobs_email") as jobs:
        try:
            job = await jobs.enqueue("email", "send", {}, idempotency_key="k")
        except IdempotencyConflict as error:
            raise SystemExit(error.sqlstate) from error
        leases = await jobs.claim("email", 5)
        items = await jobs.complete_many(leases)
        evidence = await jobs.inspect(job.job_id)
        print(evidence.last_failure_code, [item.outcome for item in items])


def handle(lease: HeldLease) -> None:
    if lease.payload.get("to") is None:
        raise Fail("no_recipient")
    if lease.lost or lease.attempt > 2:
        raise Retry("later")
    with psycopg.Connection[DictRow].connect(row_factory=dict_row) as connection:
        lease.complete(connection)


async def handle_async(lease: AsyncHeldLease) -> str:
    async with await psycopg.AsyncConnection.connect() as connection:
        await lease.complete(connection)
    return "answers are ignored"


class Watching(Observer):
    def ended(self, ended: Ended) -> None:
        print(ended.outcome, ended.code, ended.seconds, ended.lease.job_id)


def work() -> int:
    worker = Worker(
        "postgresql:///app",
        schema="jobs_email",
        queue="email",
        handler=handle,
        concurrency=8,
        observers=[Watching(), PrometheusObserver(), Tracing()],
    )
    return worker.run().succeeded


async def work_async(pool: AsyncConnectionPool[Any]) -> bool:
    worker = AsyncWorker(
        pool, schema="jobs_email", queue="email", handler=handle_async, batch=100
    )
    task = asyncio.create_task(worker.run())
    worker.stop(grace=5)
    return (await task).is_clean


async def from_the_document() -> None:
    configuration = Configuration.from_file("jobs.json")
    with prepare(configuration, EnvironmentSecrets(), caller="accounts") as jobs:
        answer: dict[str, Any] | str = Capability(jobs).dispatch(
            "claim", {"queue": "q"}
        )
    async with await prepare_async(configuration, EnvironmentSecrets()) as others:
        answer = await AsyncCapability(others).dispatch("claim", {"queue": "q"})
    print(answer)


def test_a_handler(jobs_instance: JobsInstance) -> None:
    job = jobs_instance.producer.enqueue("email", "send", {}, idempotency_key="k")
    (run,) = jobs_instance.drain(handle, raising=False)
    jobs_instance.make_due(job)
    print(run.outcome, run.code, jobs_instance.inspect(job).status)
