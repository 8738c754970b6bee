from datetime import UTC, datetime, timedelta

import pytest

NEXT = "select next_available_at(%s)"
LATER = "2040-01-01T00:00:00Z"
LATEST = "2041-01-01T00:00:00Z"


def test_next_available_at_is_null_for_an_empty_queue(worker, enqueue):
    enqueue(queue="slow")

    assert worker.value(NEXT, "email") is None


def test_next_available_at_is_null_once_every_job_has_ended(worker, enqueue, claim):
    enqueue()
    worker.execute("select complete(%s, %s)", claim())
    enqueue()
    worker.execute("select fail(%s, %s, 'refused', false)", claim())

    assert worker.value(NEXT, "email") is None


def test_next_available_at_has_passed_where_a_job_is_due(worker, owner, enqueue):
    enqueue()
    enqueue(available_at=LATER)

    answer = worker.value(NEXT, "email")

    assert answer == owner.value("select min(available_at) from live_job")
    assert answer < owner.value("select clock_timestamp()")


def test_next_available_at_tells_the_first_of_the_scheduled_jobs(worker, enqueue):
    enqueue(available_at=LATEST)
    enqueue(available_at=LATER)
    enqueue(queue="slow", available_at="2039-01-01T00:00:00Z")

    assert worker.value(NEXT, "email") == datetime(2040, 1, 1, tzinfo=UTC)


def test_next_available_at_tells_when_a_retry_falls_due(worker, owner, enqueue, claim):
    enqueue()
    enqueue(available_at=LATER)
    worker.execute("select fail(%s, %s, 'timeout', true)", claim())

    assert worker.value(NEXT, "email") == owner.value("select retry_at from attempt")


def test_next_available_at_tells_the_first_lease_to_lapse(
    worker, owner, enqueue, claim
):
    _, second = enqueue(), enqueue()
    claim()
    claim()
    owner.execute(
        "update live_job set lease_expires_at = clock_timestamp() + interval '9 s'"
        " where job_id = %s",
        (second,),
    )

    answer = worker.value(NEXT, "email")

    assert answer == owner.value(
        "select lease_expires_at from live_job where job_id = %s", second
    )


@pytest.mark.parametrize("scheduled_first", [True, False])
def test_next_available_at_tells_the_sooner_of_a_schedule_and_a_lapse(
    worker, owner, enqueue, claim, scheduled_first
):
    now = owner.value("select clock_timestamp()")
    enqueue()
    claim()
    scheduled = now + timedelta(seconds=10 if scheduled_first else 50)
    enqueue(available_at=scheduled)

    answer = worker.value(NEXT, "email")

    lapse = owner.value("select min(lease_expires_at) from live_job")
    assert answer == (scheduled if scheduled_first else lapse)


def test_next_available_at_has_passed_where_a_lease_has_lapsed(
    worker, owner, enqueue, claim, expire
):
    job_id = enqueue()
    enqueue(available_at=LATER)
    claim()
    expire(job_id)

    answer = worker.value(NEXT, "email")

    assert answer == owner.value("select min(lease_expires_at) from live_job")
    assert answer < owner.value("select clock_timestamp()")


def test_next_available_at_sees_a_due_job_behind_running_ones(worker, enqueue, claim):
    for _ in range(20):
        enqueue()
        claim()
    assert worker.value(NEXT, "email") is not None
    before = worker.value("select clock_timestamp()")

    enqueue()

    assert (
        before < worker.value(NEXT, "email") < worker.value("select clock_timestamp()")
    )


def test_next_available_at_knows_no_lease_of_another_queue(worker, enqueue, claim):
    enqueue(queue="slow")
    claim(queue="slow")

    assert worker.value(NEXT, "email") is None


@pytest.mark.usefixtures("read_committed")
def test_next_available_at_reads_the_clock_and_not_the_transactions_start(
    worker, rival, owner, enqueue, claim
):
    with worker.transaction():
        worker.execute("select 1")
        enqueue()
        claim(session=rival)
        answer = worker.value(NEXT, "email")

    assert answer == owner.value("select lease_expires_at from live_job")


def test_next_available_at_changes_nothing_and_reads_in_a_read_only_transaction(
    worker, enqueue, state
):
    enqueue(available_at=LATER)
    before = state()
    worker.execute("set default_transaction_read_only to on")

    assert worker.value(NEXT, "email") is not None
    assert state() == before


@pytest.mark.parametrize("queue", [None, "", "nowhere", "Email", "email\n"])
def test_next_available_at_refuses_a_queue_that_is_not_declared(worker, queue):
    with worker.refusing("LJ003") as caught:
        worker.value(NEXT, queue)

    assert "queue" in caught.value.diag.message_primary
