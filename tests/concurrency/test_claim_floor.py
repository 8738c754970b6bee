"""Sessions with a claim floor in force: what others hold or hide is not lost to them."""

from __future__ import annotations

from collections import Counter
from threading import Barrier

import pytest

CLAIMABLE = "jobs_email.live_job_claimable_idx"
NAME = "'lenso_jobs.floor_' || to_hex(wait_key('email'))"
CLAIM = "select job_id from claim('email', %s::integer)"


@pytest.fixture
def running(owner):
    """Put running jobs in front of whatever is enqueued."""

    def running(count):
        owner.execute(
            "insert into live_job (job_id, available_at, leased_at, lease_expires_at,"
            " attempt, max_attempts, queue, lease_owner, lease_token_hash)"
            " select gen_random_uuid(), clock_timestamp() - interval '1 min',"
            " clock_timestamp(), clock_timestamp() + interval '1 h',"
            " 1, 3, 'email', 'nobody', 't' from generate_series(1, %s::integer)",
            (count,),
        )

    return running


@pytest.fixture
def walked():
    """Move the last walk of a session's floor to so many seconds ago."""

    def walked(session, ago):
        at, job_id, _, took, slow = session.value(
            f"select string_to_array(current_setting({NAME}), ' ')"
        )
        session.execute(
            f"select set_config({NAME}, concat_ws(' ', %s::text, %s::text,"
            " (extract(epoch from clock_timestamp() - make_interval(secs => %s::float8))"
            " * 1000000)::bigint, %s::text, %s::text), false)",
            (at, job_id, ago, took, slow),
        )

    return walked


@pytest.fixture
def floored(enqueue, walked):
    """Let two slow walks put a session's floor in force."""

    def floored(session):
        for _ in range(2):
            job_id = enqueue()
            assert take(session) == [job_id]
            walked(session, 31)
        assert is_floored(session)
        walked(session, 0)

    return floored


def take(session, limit=1):
    return [job_id for (job_id,) in session.rows(CLAIM, limit)]


def is_floored(session):
    return session.value(f"select coalesce(current_setting({NAME}), '') like '% 2'")


def reading(session, limit=1):
    """Claim; answers the jobs and how many index entries that read."""
    read = "select pg_stat_get_xact_tuples_returned(%s::regclass)"
    with session.transaction():
        before = session.value(read, CLAIMABLE)
        jobs = take(session, limit)
        return jobs, session.value(read, CLAIMABLE) - before


@pytest.mark.parametrize("limit", [1, 5])
def test_claims_stay_short_while_a_snapshot_keeps_what_is_done(
    limit, connect, worker, rival, producer, enqueue, walked
):
    producer.execute(
        "select count(*) from generate_series(1, 300) as n,"
        " lateral enqueue('email', 'send', '{}', 'k' || n)"
    )
    onlooker = connect()
    onlooker.execute("begin isolation level repeatable read")
    onlooker.execute("select from live_job limit 1")
    done = rival.rows("select job_id, lease_token from claim('email', 300)")
    rival.execute(
        "select complete_many(%s, %s)",
        ([job_id for job_id, _ in done], [token for _, token in done]),
    )
    jobs = [enqueue() for _ in range(5 * limit)]

    claimed, spent = [], []
    for n in range(5):
        taken, read = reading(worker, limit)
        claimed += taken
        spent.append(read)
        walked(worker, 31 if n == 0 else 0)
    onlooker.execute("commit")

    assert claimed == jobs
    assert min(spent[:2]) > 250
    assert max(spent[2:]) <= limit + 1


@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("ending", ["rollback", "death"])
def test_a_claim_undone_by_another_session_is_found_in_time(
    limit, ending, worker, rival, owner, enqueue, running, floored, walked
):
    running(150)
    floored(worker)
    rival.execute("begin")
    job_id = enqueue()
    assert take(rival) == [job_id]
    first = enqueue()
    assert take(worker, limit) == [first]

    if ending == "death":
        owner.execute("select pg_terminate_backend(%s, 8000)", (rival.pid,))
    else:
        rival.execute("rollback")
    walked(worker, 0)
    second = enqueue()
    assert take(worker, limit) == [second]
    walked(worker, 31)
    third = enqueue()

    assert take(worker, limit) == [job_id, third][:limit]


def test_a_walk_from_the_start_passes_over_what_another_session_holds(
    worker, rival, enqueue, running, floored, walked, impatient
):
    running(150)
    job_id = enqueue()
    rival.execute("begin")
    assert take(rival) == [job_id]
    floored(worker)
    walked(worker, 31)
    newer = enqueue()

    assert take(impatient(worker), 5) == [newer]
    rival.execute("rollback")
    walked(worker, 31)
    assert take(worker, 5) == [job_id]


def test_a_job_that_an_older_snapshot_could_not_see_is_found_in_time(
    worker, enqueue, running, floored, walked
):
    running(150)
    floored(worker)
    with worker.transaction():
        worker.execute("set transaction isolation level repeatable read")
        worker.execute("select")
        job_id = enqueue()
        assert take(worker) == []
    walked(worker, 31)

    assert take(worker) == [job_id]


def test_floored_sessions_drain_a_queue_to_the_last_job_and_end_each_once(
    connect, owner, producer, running, background
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
            seen_floored |= is_floored(session)
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
    assert [each.result(60) for each in drains] == [True] * 3

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
