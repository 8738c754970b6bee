"""The fault: claiming more than can run.

Waiting jobs are renewed. A job whose lease has lapsed is never begun.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime
from threading import Event, Lock

import pytest

JOBS = 6
LEASE = 1


@pytest.mark.slow
def test_jobs_that_wait_longer_than_a_lease_run_once(
    crews, configure, enqueue, hire, attempts, owner
):
    configure(lease_seconds=LEASE)
    runs, lapsed, lock = Counter(), [], Lock()

    async def handler(crew, lease):
        with lock:
            runs[lease.job_id] += 1
            (until,) = owner.rows(
                "select lease_expires_at from live_job where job_id = %s", lease.job_id
            )[0]
            if lease.lost or until < datetime.now(UTC):
                lapsed.append(lease)
        end = time.monotonic() + LEASE * 0.6
        await crew.until(lambda: time.monotonic() >= end)

    jobs = [enqueue(queue=crew.queue) for crew in crews for _ in range(JOBS)]
    first = [hire(crew, handler, concurrency=2, batch=JOBS) for crew in crews]
    Event().wait(LEASE * 1.1)
    second = [hire(crew, handler, concurrency=2, batch=JOBS) for crew in crews]
    ended = attempts(*jobs, count=2 * JOBS)
    tallies = [each.stop() for each in (*first, *second)]

    assert ended == [(1, "succeeded", None)] * 2 * JOBS
    assert runs == Counter(jobs)
    assert lapsed == []
    assert [tally.succeeded for tally in tallies] == [JOBS, JOBS, 0, 0]
    assert all(tally.is_clean for tally in tallies)
