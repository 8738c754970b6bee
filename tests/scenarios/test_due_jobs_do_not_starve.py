"""The fault: starvation.

A due job is claimed in its place: by due time, then by order of enqueueing.
"""

from collections import Counter
from datetime import timedelta

import pytest

WORKERS = 4


@pytest.fixture
def backing_off(fill, owner):
    """Ten thousand jobs that failed once and wait, all older than any other."""
    fill(scheduled=10000)
    owner.execute(
        "update live_job set attempt = 1, last_failure_code = 'down';"
        " update job set job_id = ('00000000' || substr(job_id::text, 9))::uuid;"
        " update live_job set job_id = ('00000000' || substr(job_id::text, 9))::uuid"
    )
    owner.execute("vacuum analyze live_job")


@pytest.mark.slow
def test_a_due_job_is_claimed_past_ten_thousand_that_wait(
    backing_off, client, enqueue, worker, buffers
):
    there = client("email-worker")
    for _ in range(3):
        job_id = enqueue()
        (lease,) = there.claim("email")
        assert lease.job_id == job_id
        assert there.claim("email") == []
    enqueue()
    for _ in range(2):
        enqueue()
        spent = buffers(worker, "select claim('email')")

    assert spent < 60


@pytest.mark.slow
def test_a_lapsed_job_is_claimed_before_a_hundred_fresh_ones(
    client, enqueue, expire, fill
):
    first = enqueue()
    crashed, worker = client("spare-worker"), client("email-worker")
    assert [lease.job_id for lease in crashed.claim("email")] == [first]
    fill(due=100)  # due before the first was, and so before it in the queue
    fresh = [enqueue() for _ in range(100)]
    expire(first)
    claimed = []

    while first not in claimed:
        enqueue()
        claimed += [lease.job_id for lease in worker.claim("email")]
        assert len(claimed) <= 101

    assert len(claimed) == 101
    assert not set(claimed) & set(fresh)
    (next_one,) = worker.claim("email")
    assert next_one.job_id == fresh[0]


@pytest.mark.usefixtures("read_committed")
@pytest.mark.parametrize("limit", [1, 7])
def test_jobs_of_one_instant_are_claimed_in_order_of_enqueueing_and_none_starves(
    limit, client, owner, enqueue_at_one_instant, background
):
    jobs = enqueue_at_one_instant(60 * limit)
    workers = [client("email-worker") for _ in range(WORKERS)]

    def drain(worker):
        return list(iter(lambda: [x.job_id for x in worker.claim("email", limit)], []))

    # One loop runs all async clients, so those take turns.
    drained = (
        [drain(worker) for worker in workers]
        if hasattr(workers[0], "_runner")
        else [x.result() for x in [background(drain, worker) for worker in workers]]
    )

    claims = [claim for worker in drained for claim in worker]
    assert Counter(job_id for claim in claims for job_id in claim) == Counter(jobs)
    place = {job_id: n for n, job_id in enumerate(jobs)}
    for own in drained:
        places = [place[job_id] for claim in own for job_id in claim]
        assert places == sorted(places)


@pytest.fixture
def enqueue_at_one_instant(owner, producer):
    """Enqueue so many jobs that fall due in one instant, a second ago."""

    def enqueue_at_one_instant(count):
        at = owner.value("select clock_timestamp()") - timedelta(seconds=1)
        producer.execute(
            "select count(*) from generate_series(1, %s) as n,"
            " lateral enqueue('email', 'send', '{}', 'k' || n)",
            (count,),
        )
        owner.execute("update live_job set available_at = %s", (at,))
        return [j for (j,) in owner.rows("select job_id from job order by created_at")]

    return enqueue_at_one_instant
