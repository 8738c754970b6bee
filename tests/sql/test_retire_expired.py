import pytest

RETIRE = "select retire_expired(%s::integer)"


@pytest.fixture
def lapsed(owner, producer, worker):
    """Make claimed jobs whose lease lapsed and return their ids."""

    def lapsed(count, max_attempts=1):
        producer.execute(
            "select count(*) from generate_series(1, %s) as n,"
            " lateral enqueue('email', 'send', '{}', %s || n, null, %s::integer)",
            (count, f"of-{max_attempts}-", max_attempts),
        )
        job_ids = [
            job_id
            for (job_id,) in worker.rows(
                "select job_id from claim('email', %s::integer)", count
            )
        ]
        owner.execute(
            "update live_job set lease_expires_at = clock_timestamp() - interval '1 s'"
            " where job_id = any (%s)",
            (job_ids,),
        )
        return job_ids

    return lapsed


def test_retire_expired_ends_jobs_whose_last_lease_lapsed(operator, owner, lapsed):
    job_ids = lapsed(3)
    leases = dict(owner.rows("select job_id, lease_token_hash from live_job"))

    assert operator.value(RETIRE, 1000) == 3

    assert owner.value("select count(*) from live_job") == 0
    assert dict(owner.rows("select job_id, lease_token_hash from attempt")) == leases
    assert set(leases) == set(job_ids)
    assert owner.rows(
        "select distinct outcome, failure_code, attempt, worker from attempt"
    ) == [("lease_expired", "attempts_exhausted", 1, "email-worker")]
    assert owner.value("select status from inspect(%s)", job_ids[0]) == "failed"


def test_retire_expired_leaves_every_other_job_alone(
    operator, owner, worker, enqueue, lapsed
):
    lapsed(1, max_attempts=2)
    enqueue(queue="slow", max_attempts=1)
    worker.execute("select claim('slow')")
    enqueue(queue="slow", max_attempts=1)
    live = owner.rows("select l::text from live_job as l order by 1")

    assert operator.value(RETIRE, 1000) == 0

    assert owner.rows("select l::text from live_job as l order by 1") == live
    assert owner.value("select count(*) from attempt") == 0


def test_retire_expired_spends_nothing_of_its_limit_on_other_jobs(
    operator, owner, lapsed
):
    *others, last = lapsed(6, max_attempts=2)
    owner.execute("update live_job set max_attempts = 1 where job_id = %s", (last,))

    assert operator.value(RETIRE, 1) == 1

    left = {job_id for (job_id,) in owner.rows("select job_id from live_job")}
    assert left == set(others)


def test_retire_expired_ends_no_more_than_the_limit(operator, owner, lapsed):
    lapsed(100)

    assert operator.value(RETIRE, 70) == 70
    assert owner.value("select count(*) from live_job") == 30
    assert operator.value(RETIRE, 70) == 30
    assert operator.value(RETIRE, 70) == 0


@pytest.mark.usefixtures("read_committed")
def test_retire_expired_takes_hold_of_no_more_than_it_ends(
    operator, connect, prefix, lapsed
):
    lapsed(2)
    another = connect(f"{prefix}_duty")

    with operator.transaction():
        operator.execute(RETIRE, (1,))

        assert another.value(RETIRE, 1) == 1


def test_retire_expired_goes_by_the_moment_at_which_it_looks(operator, owner, lapsed):
    lapsed(1)
    lapses = owner.value(
        "update live_job set lease_expires_at = clock_timestamp() + interval '100 ms'"
        " returning lease_expires_at"
    )

    assert (
        operator.value("select retire_expired() from pg_sleep_until(%s)", lapses) == 1
    )


def test_retire_expired_refuses_a_limit_out_of_bounds(operator, lapsed, state):
    lapsed(1)
    before = state()

    for limit in (None, 0, -1, 10001, 2147483647):
        with operator.refusing("LJ007") as caught:
            operator.value(RETIRE, limit)
        assert "limit" in caught.value.diag.message_primary, limit

    assert state() == before


def test_retire_expired_accepts_a_limit_of_1_and_of_10000(operator, lapsed):
    lapsed(3)

    assert operator.value(RETIRE, 1) == 1
    assert operator.value(RETIRE, 10000) == 2


def test_retire_expired_has_a_default_limit(operator, lapsed):
    lapsed(3)

    assert operator.value("select retire_expired()") == 3


def test_retire_expired_is_not_stopped_by_evidence_that_exists_already(
    operator, owner, lapsed
):
    lapsed(2)
    owner.execute(
        "insert into attempt (job_id, leased_at, ended_at, attempt,"
        " max_attempts, queue, worker,"
        " outcome, lease_token_hash) select job_id, leased_at, leased_at, attempt, 1,"
        " 'email', 'email-worker', 'lease_expired', lease_token_hash from live_job limit 1"
    )

    assert operator.value(RETIRE, 1000) == 2
    assert owner.value("select count(*) from live_job") == 0
    assert owner.value("select count(*) from attempt") == 2


def test_retire_expired_writes_an_audit_row(operator, owner, prefix, lapsed):
    lapsed(3)

    operator.value(RETIRE, 2)

    act = owner.row("select * from operator_act where act = 'retire_expired'")
    assert act["operator"] == f"{prefix}_duty"
    assert act["arguments"] == {"limit": 2}
    assert act["job_count"] == 2


def test_retire_expired_rolls_back_with_the_callers_transaction(
    operator, lapsed, state
):
    lapsed(2)
    before = state()

    with operator.transaction(force_rollback=True):
        operator.value(RETIRE, 10)

    assert state() == before
