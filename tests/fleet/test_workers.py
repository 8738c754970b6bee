"""The workers of a fleet: each shard has one, and the router has none."""

from __future__ import annotations

import asyncio
import logging
import threading

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import (
    SchemaNotReady,
    Worker,
    current_shard,
    prepare,
    prepare_fleet_workers,
    prepare_worker,
    shard_of,
)

pytestmark = pytest.mark.slow


class Run:
    """How ``on_a_thread`` runs workers."""

    def run(self, workers):
        return workers.run()


@pytest.fixture
def url_of(fleet):
    """The URL of a caller at the router or at a shard, by the reference of its secret."""

    def url_of(caller, reference):
        secret = fleet.document.passwords[caller]
        return make_conninfo(
            fleet.secrets(reference), user=caller, password=fleet.secrets(secret)
        )

    return url_of


@pytest.fixture
def as_worker(url_of):
    return lambda reference: url_of("email-worker", reference)


@pytest.fixture
def enqueue(fleet):
    """Enqueue jobs at the router, so many on each shard; return their keys."""

    def enqueue(count, shards=(0, 1)):
        jobs = fleet.jobs("accounts")
        keys = [fleet.key(shard) for shard in shards for _ in range(count)]
        for key in keys:
            jobs.enqueue("email", "send", {"key": key}, idempotency_key=key)
        return keys

    return enqueue


@pytest.fixture
def start(fleet, as_worker, on_a_thread):
    """Start workers of all shards; they are stopped at the end of the test."""

    def start(handler):
        workers = prepare_fleet_workers(
            fleet.document, as_worker, handler, queue="email"
        )
        started = on_a_thread(Run(), workers)
        started.start()
        return started

    return start


@pytest.mark.parametrize("caller", ["accounts", "email-worker", "operations"])
def test_every_declared_caller_finds_the_router_ready(caller, fleet, url_of):
    prepare(
        fleet.document.instance, lambda reference: url_of(caller, reference)
    ).close()


def test_a_worker_is_refused_at_the_router_and_sent_to_the_shards(fleet, as_worker):
    with pytest.raises(SchemaNotReady, match="is the router of a fleet") as caught:
        prepare_worker(fleet.document.instance, as_worker, print, queue="email")
    assert "lenso-jobs work --fleet FILE" in caught.value.hint

    worker = Worker(
        as_worker("router/url"), schema=fleet.schema, handler=print, queue="email"
    )
    with pytest.raises(SchemaNotReady, match="is the router of a fleet") as caught:
        worker.run()
    assert "lenso-jobs work --fleet FILE" in caught.value.hint


@pytest.mark.parametrize("is_async", [False, True])
def test_the_jobs_of_all_shards_are_worked_each_by_its_own_worker(
    fleet, as_worker, enqueue, is_async
):
    keys, done, lock = enqueue(20), {}, threading.Lock()

    def handler(lease):
        with lock:
            done[lease.payload["key"]] = current_shard()

    async def handler_as_task(lease):
        handler(lease)

    workers = prepare_fleet_workers(
        fleet.document,
        as_worker,
        handler_as_task if is_async else handler,
        queue="email",
    )
    tally = workers.run(until_idle=True)
    if is_async:
        tally = asyncio.run(tally)

    assert tally.succeeded == len(keys)
    assert done == {key: shard_of(key, len(fleet.document.shards)) for key in keys}
    (queue,) = [
        each
        for each in fleet.jobs("operations").inspect_queues()
        if each.queue == "email"
    ]
    assert (queue.ready, queue.running) == (0, 0)


def test_a_handler_completes_its_job_in_a_transaction_on_its_shard(
    fleet, as_worker, enqueue
):
    enqueue(1)
    for shard in range(2):
        fleet.open(shard=shard).execute(
            'create table public.note (key text); grant all on public.note to "email-worker"'
        )

    def handler(lease):
        with psycopg.connect(as_worker(f"shard/{current_shard()}")) as connection:
            connection.execute(
                "insert into public.note values (%s)", [lease.payload["key"]]
            )
            lease.complete(connection)

    try:
        workers = prepare_fleet_workers(
            fleet.document, as_worker, handler, queue="email"
        )
        assert workers.run(until_idle=True).succeeded == 2
        for shard in range(2):
            assert (
                fleet.open(shard=shard).value("select count(*) from public.note") == 1
            )
    finally:
        for shard in range(2):
            fleet.open(shard=shard).execute("drop table public.note")


def test_a_shard_that_dies_stops_its_own_jobs_only_and_is_worked_again(
    fleet, enqueue, start, until, caplog
):
    caplog.set_level(logging.INFO, "lenso_jobs.worker")
    done, server = [], fleet.machines[2]
    started = start(lambda lease: done.append(lease.payload["key"]))
    producer = fleet.jobs("accounts")
    lost, kept = fleet.key(1), fleet.key(0)
    first = enqueue(3)
    until(lambda: sorted(done) == sorted(first))

    server.crash()
    try:
        with pytest.raises(psycopg.OperationalError):
            producer.enqueue("email", "send", {"key": lost}, idempotency_key=lost)
        producer.enqueue("email", "send", {"key": kept}, idempotency_key=kept)
        until(lambda: kept in done)
        until(lambda: "shard 1: the database has not responded" in caplog.text)
        assert "shard 0: the database has not responded" not in caplog.text
    finally:
        server.start()

    # The same session of the producer.
    producer.enqueue("email", "send", {"key": lost}, idempotency_key=lost)
    until(lambda: lost in done)
    assert started.stop().is_clean
    assert sorted(done) == sorted([*first, lost, kept])


def test_a_secret_of_another_shard_is_refused_and_the_right_shard_is_worked(
    fleet, as_worker, enqueue, caplog
):
    enqueue(1)
    done = []

    def secrets(reference):
        return as_worker("shard/0" if reference == "shard/1" else reference)

    workers = prepare_fleet_workers(
        fleet.document, secrets, lambda _: done.append(current_shard()), queue="email"
    )
    with pytest.raises(SchemaNotReady, match="is shard 0 of 2, not shard 1 of 2"):
        workers.run(until_idle=True)
    assert done == [0]
    assert "no worker of shard 1 (shard/1)" in caplog.text
    assert "Correct the URL in the secret of this shard." in caplog.text

    with pytest.raises(SchemaNotReady, match="is shard 0 of 2, not shard 1 of 2"):
        prepare_fleet_workers(fleet.document, secrets, print, shards=[1], queue="email")


def test_a_shard_that_is_down_at_the_start_is_worked_once_it_is_up(
    fleet, enqueue, start, until, caplog
):
    keys, done, server = enqueue(3), [], fleet.machines[2]
    server.crash()
    try:
        started = start(lambda lease: done.append(lease.payload["key"]))
        until(lambda: len(done) == 3)
        assert "no worker of shard 1 (shard/1): OperationalError" in caplog.text
    finally:
        server.start()

    until(lambda: sorted(done) == sorted(keys))
    assert started.stop().succeeded == len(keys)
