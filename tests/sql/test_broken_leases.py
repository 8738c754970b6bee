"""Leases that somebody broke by hand: each is given anew or ended, and stops nobody."""

from itertools import product

import pytest

FIELDS = ("leased_at", "lease_expires_at", "lease_owner", "lease_token_hash")
LEFT = [
    fields
    for size in product([True, False], repeat=4)
    for fields in [tuple(f for f, is_left in zip(FIELDS, size, strict=True) if is_left)]
]
COMBINATIONS = pytest.mark.parametrize("left", LEFT, ids=",".join)
LIMITS = pytest.mark.parametrize("limit", [1, 5])


@pytest.fixture
def broken(enqueue, claim, owner):
    """Leave some fields of a lapsed lease; returns the job's id."""

    def broken(left, max_attempts):
        job_id = enqueue(max_attempts=max_attempts)
        claim()
        owner.execute(
            "update live_job set lease_expires_at = clock_timestamp() - interval '1 s'"
        )
        for field in set(FIELDS) - set(left):
            owner.execute(f"update live_job set {field} = null")
        return job_id

    return broken


@COMBINATIONS
@LIMITS
def test_a_broken_lease_with_an_attempt_left_is_given_anew(
    broken, worker, owner, left, limit
):
    job_id = broken(left, 3)

    row = worker.row("select * from claim('email', %s)", limit)

    assert (row["job_id"], row["attempt"]) == (job_id, 2)
    assert owner.rows("select attempt, outcome, failure_code from attempt") == (
        [(1, "lease_expired", None)] if left else []
    )
    assert worker.value("select complete(%s, %s)", job_id, row["lease_token"]) is True


@COMBINATIONS
@pytest.mark.parametrize("act", ["claim one", "claim many", "retire_expired"])
def test_a_broken_lease_without_an_attempt_left_ends_the_job(
    broken, worker, owner, operator, left, act
):
    job_id = broken(left, 1)

    if act == "retire_expired":
        assert operator.value("select retire_expired()") == 1
    else:
        limit = {"claim one": 1, "claim many": 5}[act]
        assert worker.rows("select * from claim('email', %s)", limit) == []

    assert owner.rows("select * from live_job") == []
    assert worker.value("select next_available_at('email')") is None
    assert owner.rows("select attempt, outcome, failure_code from attempt") == [
        (1, "lease_expired", "attempts_exhausted")
    ]
    assert operator.value("select status from inspect(%s)", job_id) == "failed"
    assert operator.value("select status from redrive(%s)", job_id) == "queued"
    assert worker.value("select job_id from claim('email')") == job_id


@LIMITS
def test_a_queued_job_left_without_attempts_ends_with_the_code_it_failed_with(
    enqueue, claim, worker, owner, operator, limit
):
    job_id = enqueue()
    worker.execute("select fail(%s, %s, 'timeout', true)", claim())
    owner.execute("update live_job set max_attempts = 1, available_at = '2020-01-01'")

    assert worker.rows("select * from claim('email', %s)", limit) == []

    assert owner.rows("select * from live_job") == []
    assert owner.rows(
        "select attempt, outcome, failure_code, retry_at from attempt"
    ) == [(1, "failed", "timeout", None)]
    seen = operator.row("select * from inspect_failures('email')")
    assert (seen["job_id"], seen["failure_code"]) == (job_id, "timeout")


@LIMITS
def test_a_released_job_left_without_attempts_ends(
    enqueue, claim, worker, owner, operator, limit
):
    job_id = enqueue()
    worker.execute("select release(%s, %s)", claim())
    owner.execute("update live_job set max_attempts = 1")

    assert worker.rows("select * from claim('email', %s)", limit) == []

    assert owner.rows("select * from live_job") == []
    assert owner.rows("select attempt, outcome, failure_code from attempt") == [
        (1, "failed", "attempts_exhausted")
    ]
    assert operator.value("select status from inspect(%s)", job_id) == "failed"


@LIMITS
def test_a_job_that_was_given_no_attempt_at_all_ends(
    enqueue, worker, owner, operator, limit
):
    job_id = enqueue()
    owner.execute("update live_job set max_attempts = 0")

    assert worker.rows("select * from claim('email', %s)", limit) == []
    assert operator.value("select status from inspect(%s)", job_id) == "failed"


@LIMITS
def test_a_live_row_left_behind_by_a_completed_job_goes_and_the_job_stays_completed(
    enqueue, claim, worker, owner, operator, limit
):
    job_id = enqueue()
    owner.execute("create table public.kept as select * from live_job")
    worker.execute("select complete(%s, %s)", claim())
    owner.execute(
        "insert into live_job select * from public.kept;"
        " update live_job set attempt = 1, max_attempts = 1"
    )

    assert worker.rows("select * from claim('email', %s)", limit) == []

    assert owner.rows("select * from live_job") == []
    assert operator.value("select status from inspect(%s)", job_id) == "succeeded"


@pytest.mark.parametrize(
    "call",
    [
        "complete(%s, %s)",
        "complete_many(array[%s]::uuid[], array[%s])",
        "fail(%s, %s, 'c', true)",
        "fail(%s, %s, 'c', false)",
        "fail_many(array[%s]::uuid[], array[%s], array['c'], array[true])",
        "release(%s, %s)",
        "release_many(array[%s]::uuid[], array[%s], array[0])",
        "renew(%s, %s)",
        "renew_many(array[%s]::uuid[], array[%s])",
    ],
)
def test_a_live_lease_that_lost_its_beginning_still_serves(
    enqueue, claim, worker, owner, call
):
    enqueue()
    held = claim()
    owner.execute("update live_job set leased_at = null")

    answer = str(worker.rows(f"select {call}", *held))

    assert "invalid" not in answer
    assert owner.rows("select leased_at from attempt where leased_at > ended_at") == []


def test_many_jobs_without_attempts_end_64_a_claim_and_hold_up_no_other(
    enqueue, producer, worker, owner
):
    producer.execute(
        "select count(*) from generate_series(1, 100) as n,"
        " lateral enqueue('email', 'send', '{}', 'key-' || n)"
    )
    owner.execute("update live_job set max_attempts = 0")
    last = enqueue()

    assert worker.value("select job_id from claim('email')") == last
    assert owner.value("select count(*) from live_job") == 37
    assert worker.rows("select * from claim('email')") == []
    assert owner.value("select count(*) from live_job") == 1


@LIMITS
@pytest.mark.parametrize(
    ("attempt", "status"), [(-5, "running"), (3, "failed"), (2147483647, "failed")]
)
def test_an_attempt_out_of_range_is_claimed_or_ended_and_stops_nobody(
    enqueue, owner, worker, operator, attempt, status, limit
):
    broken, sound = enqueue(), enqueue()
    owner.execute(
        "update live_job set attempt = %s where job_id = %s", (attempt, broken)
    )

    claimed = [
        job_id
        for _ in range(2)
        for (job_id,) in worker.rows("select job_id from claim('email', %s)", limit)
    ]

    assert sound in claimed
    assert operator.value("select status from inspect(%s)", broken) == status
