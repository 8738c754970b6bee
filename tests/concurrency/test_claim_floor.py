"""Sessions with a claim floor in force: what others hold or hide is not lost to them."""

from __future__ import annotations

from collections import Counter
from threading import Barrier

import pytest

from fixtures.floors import entries, take

CLAIM = "select job_id from claim('email', %s::integer)"


@pytest.fixture
def is_floored(owner):
    """Whether the queue has a floor."""
    return lambda: owner.value(
        "select pg_sequence_last_value(floor[1]) is not null from queue"
        " where queue = 'email'"
    )


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 5])
def test_no_session_of_a_fleet_reads_what_is_dead_beside_a_held_snapshot(
    limit, connect, owner, rival, producer, enqueue
):
    producer.execute(
        "select count(*) from generate_series(1, 300) as n,"
        " lateral enqueue('email', 'send', '{}', 'k' || n)"
    )
    reader = connect()
    reader.execute("begin isolation level repeatable read")
    reader.execute("select from live_job limit 1")
    done = rival.rows("select job_id, lease_token from claim('email', 300)")
    rival.execute(
        "select complete_many(%s, %s)",
        ([job_id for job_id, _ in done], [token for _, token in done]),
    )
    assert take(rival) == []  # passes over all, and sets the floor
    owner.execute(  # 300 entries take too little time to wait for the next scan
        "select setval(floor[3], pg_sequence_last_value(floor[3]) | 2048)"
        " from queue where queue = 'email'"
    )
    fleet = [connect("email-worker") for _ in range(5)]

    idle = [entries(session, CLAIM, 1) for session in fleet]
    sleeps = [
        entries(session, "select next_available_at('email')") for session in fleet
    ]
    jobs = [enqueue() for _ in range(5 * limit)]
    busy = [entries(session, CLAIM, limit) for session in fleet]
    reader.execute("commit")

    assert [job for claimed, _ in busy for job in claimed] == jobs
    assert max(read for _, read in idle + sleeps) == 0
    assert max(read for _, read in busy) <= 5 * limit


@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("ending", ["rollback", "death"])
def test_a_claim_that_another_session_undoes_is_found_by_the_next_full_scan(
    limit, ending, worker, rival, owner, enqueue, running, scan_is_due
):
    running(150)
    rival.execute("begin")
    job_id = enqueue()
    assert take(rival) == [job_id]
    first = enqueue()
    assert take(worker, limit) == [first]

    if ending == "death":
        owner.execute("select pg_terminate_backend(%s, 8000)", (rival.pid,))
    else:
        rival.execute("rollback")
    scan_is_due()
    second = enqueue()

    assert take(worker, limit) == [job_id, second][:limit]


def test_a_full_scan_passes_over_the_rows_that_another_session_holds(
    worker, rival, enqueue, running, scan_is_due, impatient
):
    running(150)
    job_id = enqueue()
    rival.execute("begin")
    assert take(rival) == [job_id]
    newer = enqueue()

    assert take(impatient(worker), 5) == [newer]
    rival.execute("rollback")
    scan_is_due()
    assert take(worker, 5) == [job_id]


def test_a_job_that_an_older_snapshot_could_not_see_is_found_by_the_next_full_scan(
    worker, enqueue, running, scan_is_due
):
    running(150)
    with worker.transaction():
        worker.execute("set transaction isolation level repeatable read")
        worker.execute("select")
        job_id = enqueue()
        assert take(worker) == []
    scan_is_due()

    assert take(worker) == [job_id]


@pytest.mark.slow
def test_floored_sessions_drain_a_queue_to_the_last_job_and_end_each_once(
    connect, owner, producer, running, background, is_floored
):
    running(150)
    producer.execute(
        "select count(*) from generate_series(1, 1500) as n,"
        " lateral enqueue('email', 'send', '{}', 'k' || n)"
    )
    owner.execute(
        """
        update live_job as l set
            attempt = case when right(j.idempotency_key, 2) = '77' then 3 else 1 end,
            leased_at = clock_timestamp() - interval '1 min',
            lease_expires_at = clock_timestamp() - interval '1 s',
            lease_owner = 'spare-worker', lease_token_hash = 'gone'
        from job as j
        where j.job_id = l.job_id and right(j.idempotency_key, 1) = '7'
        """
    )
    start = Barrier(3)
    leases = []

    def drain(session):
        seen_floored = False
        start.wait(10)
        while True:
            limit = 1 if not seen_floored else 20
            claimed = session.rows(
                "select job_id, attempt, lease_token from claim('email', %s::integer)",
                limit,
            )
            seen_floored |= session is sessions[0] and is_floored()
            if not claimed and owner.value("select count(*) from live_job") == 150:
                return seen_floored
            leases.extend((job_id, attempt) for job_id, attempt, _ in claimed)
            fate = {"completed": [], "failed": [], "retried": []}
            for job_id, attempt, token in claimed:
                by = job_id.int % 10
                kind = (
                    "failed"
                    if by == 0
                    else "retried"
                    if by == 1 and attempt == 1
                    else "completed"
                )
                fate[kind].append((job_id, token))
            if fate["completed"]:
                job_ids, tokens = map(list, zip(*fate["completed"], strict=True))
                session.execute("select complete_many(%s, %s)", (job_ids, tokens))
            for kind in ("failed", "retried"):
                if fate[kind]:
                    job_ids, tokens = map(list, zip(*fate[kind], strict=True))
                    session.execute(
                        "select fail_many(%s, %s,"
                        " array_fill('timeout'::text, array[%s::integer]),"
                        " array_fill(%s::boolean, array[%s::integer]))",
                        (job_ids, tokens, len(job_ids), kind == "retried", len(tokens)),
                    )
            if fate["retried"]:
                owner.execute(
                    "update live_job"
                    " set available_at = clock_timestamp() - interval '30 s'"
                    " where job_id = any (%s)",
                    (job_ids,),
                )

    sessions = [connect("email-worker") for _ in range(3)]
    drains = [background(drain, session) for session in sessions]
    drained = [each.result(60) for each in drains]
    assert any(drained)

    ends = Counter(
        job_id
        for (job_id,) in owner.rows(
            "select job_id from attempt where outcome in ('succeeded', 'failed')"
            " or failure_code = 'attempts_exhausted'"
        )
    )
    exhausted = owner.rows(
        "select job_id from attempt where failure_code = 'attempts_exhausted'"
    )
    assert len(ends) == 1500
    assert set(ends.values()) == {1}
    assert len(exhausted) == 15
    assert len(leases) == len(set(leases))
    assert {job_id for job_id, _ in leases} == set(ends) - {j for (j,) in exhausted}
