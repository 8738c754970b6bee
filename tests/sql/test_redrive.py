import json
from uuid import uuid4

import pytest

REDRIVE = "select * from redrive(%s::uuid, %s::integer)"


@pytest.fixture
def failed(connect, enqueue):
    """Make a job that has failed and return its id."""

    def failed(**arguments):
        job_id = enqueue(**arguments)
        worker = connect("email-worker")
        token = worker.value("select lease_token from claim('email')")
        worker.execute("select fail(%s, %s, 'refused', false)", (job_id, token))
        return job_id

    return failed


def test_redrive_queues_a_failed_job_again(operator, owner, failed):
    job_id = failed()
    before = owner.value("select clock_timestamp()")

    answer = operator.row(REDRIVE, job_id, 2)

    live = owner.row("select * from live_job")
    assert answer == {"status": "queued", "available_at": live["available_at"]}
    assert before < live["available_at"] < owner.value("select clock_timestamp()")
    assert live["job_id"] == job_id
    assert live["queue"] == "email"
    assert live["attempt"] == 1
    assert live["max_attempts"] == 3
    assert live["lease_owner"] is None
    assert live["last_failure_code"] == "refused"


def test_redrive_grants_one_attempt_by_default(operator, owner, failed):
    job_id = failed()

    operator.execute("select redrive(p_job_id => %s)", (job_id,))

    live = owner.row("select attempt, max_attempts from live_job")
    assert live == {"attempt": 1, "max_attempts": 2}


def test_redrive_lets_the_attempt_grow_and_keeps_the_history(
    operator, connect, owner, failed
):
    job_id = failed(max_attempts=1)
    history = owner.rows("select a::text from attempt as a")

    operator.row(REDRIVE, job_id, 2)
    attempts = []
    for code in ("timeout", "refused"):
        worker = connect("email-worker")
        row = worker.row("select * from claim('email')")
        attempts.append((row["attempt"], row["max_attempts"]))
        worker.execute(
            "select fail(%s, %s, %s, true)", (job_id, row["lease_token"], code)
        )
        owner.execute("update live_job set available_at = clock_timestamp()")

    assert attempts == [(2, 3), (3, 3)]
    assert owner.rows("select a::text from attempt as a where attempt = 1") == history
    assert owner.rows("select attempt, outcome from attempt order by 1") == [
        (1, "failed"),
        (2, "retried"),
        (3, "failed"),
    ]
    assert owner.value("select status from inspect(%s)", job_id) == "failed"


def test_redrive_takes_a_job_again_and_again(operator, connect, owner, failed):
    job_id = failed()

    for _ in range(3):
        operator.row(REDRIVE, job_id, 1)
        worker = connect("email-worker")
        token = worker.value("select lease_token from claim('email')")
        worker.execute("select fail(%s, %s, 'refused', true)", (job_id, token))

    assert owner.value("select max(attempt) from attempt") == 4
    assert owner.value("select count(*) from operator_act") == 3 + owner.value(
        "select count(*) from operator_act where act <> 'redrive'"
    )


def test_redrive_takes_a_job_whose_last_lease_ran_out(
    operator, connect, owner, enqueue, expire
):
    job_id = enqueue(max_attempts=1)
    connect("email-worker").execute("select claim('email')")
    expire(job_id)
    connect("email-worker").execute("select claim('email')")

    operator.row(REDRIVE, job_id, 1)

    row = connect("spare-worker").row("select * from claim('email')")
    assert (row["job_id"], row["attempt"]) == (job_id, 2)


def test_redrive_leaves_the_intent_of_the_job_alone(operator, producer, owner, failed):
    job_id = failed(key="k", payload={"a": 1})
    job = owner.rows("select j::text from job as j")

    operator.row(REDRIVE, job_id, 9)

    assert owner.rows("select j::text from job as j") == job
    answer = producer.row(
        "select * from enqueue('email', 'send', %s, 'k')", json.dumps({"a": 1})
    )
    assert answer == {"job_id": job_id, "created": False}


def test_redrive_writes_an_audit_row(operator, owner, prefix, failed):
    job_id = failed()

    operator.row(REDRIVE, job_id, 4)

    act = owner.row("select * from operator_act where act = 'redrive'")
    assert act["operator"] == f"{prefix}_duty"
    assert act["arguments"] == {"job_id": str(job_id), "extra_attempts": 4}
    assert act["job_count"] == 1


def test_redrive_accepts_1_and_100_attempts_and_no_other_number(
    operator, failed, state
):
    just, most, job_id = failed(), failed(), failed()

    operator.row(REDRIVE, just, 1)
    operator.row(REDRIVE, most, 100)
    before = state()
    for extra in (None, 0, -1, 101, 2147483647):
        with operator.refusing("LJ007") as caught:
            operator.row(REDRIVE, job_id, extra)
        assert "extra_attempts" in caught.value.diag.message_primary, extra

    assert state() == before


def test_redrive_refuses_an_unknown_job(operator, failed, state):
    failed()
    before = state()

    for job_id in (None, uuid4()):
        with operator.refusing("LJ006"):
            operator.row(REDRIVE, job_id, 1)

    assert state() == before


def test_redrive_refuses_an_argument_before_an_unknown_job(operator):
    with operator.refusing("LJ007"):
        operator.row(REDRIVE, uuid4(), 0)


@pytest.mark.parametrize(
    "status", ["queued", "running", "lapsed", "retrying", "succeeded", "redriven"]
)
def test_redrive_refuses_a_job_that_has_not_failed(
    operator, owner, connect, enqueue, status
):
    worker = connect("email-worker")
    job_id = enqueue(max_attempts=1 if status == "lapsed" else 3)
    if status != "queued":
        token = worker.value("select lease_token from claim('email')")
    if status == "lapsed":
        owner.execute("update live_job set lease_expires_at = clock_timestamp()")
    elif status == "succeeded":
        worker.execute("select complete(%s, %s)", (job_id, token))
    elif status in ("retrying", "redriven"):
        worker.execute(
            "select fail(%s, %s, 'refused', %s)", (job_id, token, status == "retrying")
        )
    if status == "redriven":
        operator.row(REDRIVE, job_id, 1)
    rows = (
        "select l::text from live_job as l union all select a::text from attempt as a"
    )
    rows += " union all select o::text from operator_act as o"
    before = owner.rows(rows)

    with operator.refusing("LJ007"):
        operator.row(REDRIVE, job_id, 1)

    assert owner.rows(rows) == before


def test_redrive_rolls_back_with_the_callers_transaction(operator, failed, state):
    job_id = failed()
    before = state()

    with operator.transaction(force_rollback=True):
        operator.row(REDRIVE, job_id, 1)

    assert state() == before
