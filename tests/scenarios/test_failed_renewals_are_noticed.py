"""The fault: renewal errors count as success.

The handler knows by the last confirmed end of its lease. A lost completion is never
counted as done.
"""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from contextlib import suppress

import psycopg
import pytest

from lenso_jobs.worker import Observer, Tally, _connection

LEASE = 1


class Outcomes(Observer):
    """Notes what became of jobs."""

    def __init__(self):
        self.ends = {}
        self.losses = []

    def ended(self, ended):
        self.ends[ended.lease.job_id] = ended.outcome

    def lost(self, lease):
        self.losses.append(lease.job_id)


@pytest.fixture
def outcomes():
    return Outcomes()


@pytest.fixture
def do_again(rival, until):
    """Have spare-worker do a job as soon as its lease has run out."""

    def do_again(queue, job_id):
        claimed = []
        claim = "select job_id, lease_token from claim(%s)"
        until(lambda: claimed.extend(rival.rows(claim, queue)) or claimed)
        (lease,) = claimed
        assert lease[0] == job_id
        assert rival.value("select complete(%s, %s)", *lease)

    return do_again


DONE_AGAIN = [(1, "lease_expired", None), (2, "succeeded", None)]


@pytest.mark.slow
def test_a_lease_that_cannot_be_renewed_is_lost_by_its_last_confirmed_end(
    crews,
    configure,
    enqueue,
    hire,
    monkeypatch,
    attempts,
    outcomes,
    do_again,
    gate,
    owner,
    until,
):
    configure(lease_seconds=LEASE)
    is_down, end = gate(), gate()
    renew_many, failures = _connection.WorkerJobs.renew_many, []

    def failing(jobs, leases):
        if is_down.is_set():
            failures.append(time.monotonic())
            raise psycopg.OperationalError("no answer")
        return renew_many(jobs, leases)

    monkeypatch.setattr(_connection.WorkerJobs, "renew_many", failing)
    seen = {}

    async def handler(crew, lease):
        try:
            await crew.until(lambda: lease.lost)
        finally:
            late = time.time() - lease.lease_expires_at.timestamp()
            seen[lease.job_id] = lease.lost, late
            # Its worker has no free hand until others have done the job.
            while not end.is_set():
                with suppress(CancelledError):
                    await crew.until(end.is_set)

    hired, jobs = [], {}
    for crew in crews:
        jobs[crew] = enqueue(queue=crew.queue)
        hired.append(hire(crew, handler, concurrency=1, observers=[outcomes]))
    until(
        lambda: (
            owner.value(
                "select count(*) from live_job where lease_expires_at >"
                " leased_at + make_interval(secs => %s)",
                LEASE + 0.1,
            )
            == len(crews)
        )
    )
    is_down.set()
    for crew in crews:
        do_again(crew.queue, jobs[crew])
    until(lambda: len(seen) == len(crews))
    end.set()
    tallies = [each.stop() for each in hired]

    assert len(failures) > 2
    for crew in crews:
        was_lost, late = seen[jobs[crew]]
        assert was_lost
        assert late < 0.05
        assert attempts(jobs[crew]) == DONE_AGAIN
    assert tallies == [Tally(lost=1)] * 2
    assert set(outcomes.losses) == set(jobs.values())
    assert set(outcomes.ends.values()) == {"lost"}


def test_a_completion_that_is_refused_is_not_a_success(
    crews, enqueue, expire, hire, attempts, outcomes, do_again, gate, caplog, until
):
    caplog.set_level(logging.DEBUG, "lenso_jobs")
    end, begun = gate(), []

    async def handler(crew, lease):
        begun.append(lease.job_id)
        await crew.until(end.is_set)

    hired, jobs = [], {}
    for crew in crews:
        jobs[crew] = enqueue(queue=crew.queue)
        hired.append(hire(crew, handler, concurrency=1, observers=[outcomes]))
    until(lambda: len(begun) == len(crews))
    # Renewals are not due yet, so only the report can tell.
    expire(*jobs.values())
    for crew in crews:
        do_again(crew.queue, jobs[crew])
    end.set()
    tallies = [each.stop() for each in hired]

    assert tallies == [Tally(lost=1)] * 2
    assert outcomes.ends == dict.fromkeys(jobs.values(), "lost")
    for crew in crews:
        assert attempts(jobs[crew]) == DONE_AGAIN
    about = [r for r in caplog.records if hasattr(r, "job_id")]
    assert len(about) == 2
    assert not any("succeeded" in r.getMessage() for r in about)
