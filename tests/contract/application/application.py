"""A user's application, as it might be: what the types of the package must allow."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict
from uuid import UUID

import psycopg
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from pydantic import BaseModel
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from lenso_jobs import (
    AsyncHeldLease,
    AsyncJobs,
    AsyncWorker,
    Configuration,
    Ended,
    EnvironmentSecrets,
    ExplainedJob,
    Fail,
    Fleet,
    HeldLease,
    IdempotencyConflict,
    InspectedAct,
    InspectedAttempt,
    InspectedFailure,
    InspectedFinding,
    InspectedWorker,
    InvalidLease,
    Jobs,
    Kinds,
    NewJob,
    Observer,
    Release,
    Retry,
    Tally,
    Worker,
    WorkerLease,
    current_shard,
    prepare,
    prepare_async,
    prepare_fleet_workers,
    prepare_worker,
    shard_of,
)
from lenso_jobs.capability import AsyncCapability, Capability
from lenso_jobs.contrib.sqlalchemy import jobs_on
from lenso_jobs.metrics import PrometheusObserver
from lenso_jobs.testing import JobsInstance, async_held_lease, held_lease
from lenso_jobs.tracing import Tracing


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
    listed = jobs.inspect_jobs("email", "failed", kind=page[0].kind)
    listed += jobs.inspect_jobs("email", "failed", before=listed.next_before)
    producer: str = jobs.inspect_key(listed[0].queue, producer="accounts").producer
    print(producer, jobs.pause("email"), jobs.resume("email"), jobs.erase(producer))
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


def place(session: Session, connection: Connection, lease: HeldLease) -> UUID:
    jobs: Jobs = jobs_on(connection, "jobs_email")
    jobs = jobs_on(session, "jobs_email", caller="accounts")
    lease.complete(jobs)
    return jobs.enqueue("email", "send", {}, idempotency_key="k").job_id


async def place_async(session: AsyncSession, lease: AsyncHeldLease) -> bool:
    jobs: AsyncJobs = jobs_on(session, "jobs_email")
    await lease.complete(jobs)
    return (await jobs.enqueue("email", "send", {}, idempotency_key="k")).created


def handle(lease: HeldLease) -> None:
    if lease.payload.get("to") is None:
        raise Fail("no_recipient")
    if lease.lost or lease.attempt > 2:
        raise Retry("later", after=7.5)
    with psycopg.Connection[DictRow].connect(row_factory=dict_row) as connection:
        lease.complete(connection)


async def handle_async(lease: AsyncHeldLease) -> str:
    async with await psycopg.AsyncConnection.connect() as connection:
        await lease.complete(connection)
    return "answers are ignored"


class Receipt(BaseModel):
    order: int


@dataclass
class Reminder:
    days: int


class Digest(TypedDict):
    to: list[str]


kinds, later = Kinds(), Kinds()


@kinds("receipt", queue="email", payload=Receipt, max_attempts=5)
def receipt(lease: HeldLease, payload: Receipt) -> None:
    print(lease.kind, payload.order + 1)


@kinds("digest", queue="email", payload=Digest)
def digest(lease: HeldLease, payload: Digest) -> int:
    if not payload["to"]:
        raise Release("not_yet", after=timedelta(minutes=5))
    return len(lease.kind)


@kinds("note", queue="email")
def note(lease: WorkerLease, payload: dict[str, Any]) -> None:
    print(lease.kind, payload["text"])


@later("reminder", queue="email", payload=Reminder)
async def reminder(lease: AsyncHeldLease, payload: Reminder) -> None:
    print(lease.kind, payload.days)


def by_kind(jobs: Jobs, lease: HeldLease) -> int:
    made: UUID = receipt.enqueue(
        jobs, Receipt(order=1), idempotency_key="receipt:1"
    ).job_id
    note.enqueue(jobs, {"text": "hello"}, idempotency_key="note:1", max_attempts=1)
    jobs.enqueue_many([digest.new_job({"to": ["ada"]}, idempotency_key="digest:1")])
    receipt(lease, Receipt(order=1))
    days: int = digest(lease)
    print(made, days)
    return Worker("", schema="s", queue="email", handler=kinds).run().succeeded


async def by_kind_async(jobs: AsyncJobs, lease: AsyncHeldLease) -> None:
    job = await reminder.enqueue(jobs, Reminder(7), idempotency_key="reminder:1")
    await reminder(lease, Reminder(7))
    await AsyncWorker("", schema="s", queue="email", handler=later).run()
    print(job.created)


class Watching(Observer):
    def running(
        self, lease: HeldLease | AsyncHeldLease
    ) -> AbstractContextManager[object]:
        print(lease.queue, lease.kind, lease.attempt)
        return nullcontext()

    def lost(self, lease: HeldLease | AsyncHeldLease) -> None:
        print(lease.lost, lease.job_id)

    def ended(self, ended: Ended) -> None:
        print(ended.outcome, ended.code, ended.seconds, ended.lease.job_id)


class Timing(Observer):
    @contextmanager
    def running(self, lease: WorkerLease) -> Generator[None, None, None]:
        print(lease.lease_expires_at)
        yield


def work() -> int:
    worker = Worker(
        "postgresql:///app",
        schema="jobs_email",
        queue="email",
        handler=handle,
        concurrency=8,
        observers=[Watching(), Timing(), PrometheusObserver(), Tracing()],
    )
    tally: Tally = worker.run(until_idle=True)
    Worker("", schema="s", queue="email", handler={"send": handle, "other": handle})
    return tally.succeeded + tally.released + tally.handed_back


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
    secrets = EnvironmentSecrets()
    worker = prepare_worker(configuration, secrets, handle, queue="email", timeout=600)
    done: Tally = worker.run()
    queues = {"email": 4, "billing": 2}
    others_worker = prepare_worker(configuration, secrets, handle_async, queues=queues)
    print(done, await others_worker.run())
    either = prepare_worker(
        configuration, secrets, kinds, "email-worker", queues=queues
    )
    either.stop()


async def of_a_fleet() -> None:
    fleet, secrets = Fleet.from_file("fleet.json"), EnvironmentSecrets()
    shard = shard_of("receipt:7", len(fleet.shards))
    with prepare(fleet.shard(shard), secrets) as jobs:
        jobs.enqueue("email", "send", {}, idempotency_key="receipt:7")
    workers = prepare_fleet_workers(
        fleet, secrets, handle, shards=[shard], queue="email"
    )
    done: Tally = workers.run(until_idle=True)
    others = prepare_fleet_workers(fleet, secrets, handle_async, queues={"email": 4})
    print(done, await others.run(), current_shard())
    prepare_fleet_workers(fleet, secrets, kinds, "email-worker", queue="q").stop()


def test_a_handler(jobs_instance: JobsInstance) -> None:
    job = jobs_instance.producer.enqueue("email", "send", {}, idempotency_key="k")
    (run,) = jobs_instance.drain(handle, raising=False)
    jobs_instance.make_due(job)
    print(run.outcome, run.code, jobs_instance.inspect(job).status)
    print(jobs_instance.drain(kinds))
    jobs_instance.clear()
    receipt(held_lease(receipt, Receipt(order=1), attempt=2))
    handle(held_lease("send", {"to": "ada@example.com"}, lost=True))


async def test_a_coroutine(jobs_instance: JobsInstance) -> None:
    for run in await jobs_instance.drain_async(handle_async, "email", limit=5):
        print(run.outcome, run.kind)
    await jobs_instance.drain_async(later)
    await reminder(async_held_lease("reminder"), Reminder(7))
