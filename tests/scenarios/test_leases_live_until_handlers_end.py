"""The fault: a stop ends the heartbeat before the handlers.

Leases live as long as their handlers. What has not ended is claimable within one lease.

Jobs whose handlers run after the grace can be claimed again within one lease.
"""

from __future__ import annotations

import time
from signal import SIGINT, SIGTERM, SIGUSR1

import pytest

LEASE = 1


@pytest.fixture
def begun(employ, enqueue, starts, until):
    """A job of so many seconds, and a process in which its handler has begun."""

    def begun(crew, queue, seconds, **options):
        job_id = enqueue(queue=queue, payload={"seconds": seconds})
        process = employ(crew, queue=queue, concurrency=1, **options)
        until(lambda: starts(job_id))
        return job_id, process

    return begun


def in_the_grace(crew, begun, employ, starts, attempts, **_):
    """(a) The handler ends within the grace, after its first lease."""
    queue = f"{crew.queue}-a"
    job_id, process = begun(crew, queue, LEASE + 0.5, grace=10)
    second = employ(crew, queue=queue)
    process.send(SIGTERM)

    assert process.exit_code() == 0
    assert starts(job_id) == 1
    assert attempts(job_id) == [(1, "succeeded", None)]
    second.send(SIGTERM)
    assert second.exit_code() == 0


def after_the_grace(crew, begun, starts, attempts, **_):
    """(b) The handler would go on long after the grace: handed back."""
    job_id, process = begun(crew, f"{crew.queue}-b", 60, grace=0.5)
    began = time.monotonic()
    process.send(SIGTERM)

    assert process.exit_code() == 3
    assert 0.4 < time.monotonic() - began < 4
    assert attempts(job_id) == [(1, "retried", "worker_shutdown")]
    assert starts(job_id) == 1


def left_to_lapse(crew, begun, attempts, rivals, **_):
    """(b) Likewise, but as configured it is left until its lease runs out."""
    queue = f"{crew.queue}-l"
    job_id, process = begun(crew, queue, 60, grace=0.2, on_shutdown="lapse")
    process.send(SIGTERM)

    assert process.exit_code() == 3
    assert attempts(job_id) == []
    began = time.monotonic()
    while not rivals[crew].rows("select from claim(%s)", queue):
        assert time.monotonic() - began < LEASE + 0.5
        time.sleep(0.01)
    assert attempts(job_id) == [(1, "lease_expired", None)]


def cancelled(crew, begun, attempts, **_):
    """(c) The task that runs an AsyncWorker is cancelled."""
    if crew.name != "AsyncWorker":
        return
    job_id, process = begun(crew, f"{crew.queue}-c", 60, grace=60)
    began = time.monotonic()
    process.send(SIGUSR1)

    assert process.exit_code() == 4
    assert time.monotonic() - began < 4
    assert attempts(job_id) == [(1, "retried", "worker_shutdown")]


def three_signals(crew, begun, attempts, **_):
    """(d) Two SIGTERMs, then SIGINT, each with a shorter grace."""
    job_id, process = begun(crew, f"{crew.queue}-d", 60, grace=120, graces=[60, 0])
    began = time.monotonic()
    for number in (SIGTERM, SIGTERM, SIGINT):
        process.send(number)
        time.sleep(0.1)  # the same signal twice at once may arrive once

    assert process.exit_code() == 3
    assert time.monotonic() - began < 4
    assert attempts(job_id) == [(1, "retried", "worker_shutdown")]


WAYS = (in_the_grace, after_the_grace, left_to_lapse, cancelled, three_signals)


@pytest.mark.slow
def test_a_stopped_worker_leaves_nothing_behind(
    crews, configure, connect, background, begun, employ, starts, attempts, owner
):
    queues = [f"{crew.queue}-{way}" for crew in crews for way in "abcdl"]
    configure(lease_seconds=LEASE, queues=["email", "slow", *queues])
    # All at once, on queues of their own: it is real time that passes.
    calls = [
        background(
            way,
            crew,
            begun=begun,
            employ=employ,
            starts=starts,
            attempts=attempts,
            rivals={crew: connect("spare-worker")},
        )
        for crew in crews
        for way in WAYS
    ]
    for call in calls:
        call.result(30)

    # The rival's own leases are the only ones.
    assert set(
        owner.rows("select lease_owner, queue from live_job where lease_owner <> ''")
    ) == {("spare-worker", f"{crew.queue}-l") for crew in crews}
