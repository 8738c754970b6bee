"""The fault: claims above READ COMMITTED.

Claims above READ COMMITTED: no job is handed out twice, and 40001 is all that can go
wrong.
"""

import time

import psycopg
import pytest

JOBS, SESSIONS, DEADLINE = 240, 8, 20


@pytest.fixture(params=["serializable", "repeatable read"])
def level(request, owner):
    """The default isolation level of email-worker, in this database."""
    owner.execute(
        f'alter role "email-worker" in database "{owner.info.dbname}"'
        f" set default_transaction_isolation = '{request.param}'"
    )
    return request.param


@pytest.fixture
def persistent():
    """Repeat a call at once while it is answered 40001."""
    deadline = time.monotonic() + DEADLINE

    def persistent(call, *arguments):
        while True:
            assert time.monotonic() < deadline
            try:
                return call(*arguments)
            except psycopg.errors.SerializationFailure:
                continue

    return persistent


@pytest.mark.slow
def test_eight_sessions_claim_each_job_once_and_complete_it(
    level, way, client, persistent, background, connect, producer, owner
):
    producer.execute(
        "select count(*) from enqueue_many((select jsonb_agg(jsonb_build_object("
        "'queue', 'email', 'kind', 'send', 'payload', '{}'::jsonb,"
        " 'idempotency_key', 'k' || n)) from generate_series(1, %s) as n))",
        (JOBS,),
    )

    def work(worker):
        done = []
        # Jobs that a refused claim had passed wait below the floor for a full scan.
        left = "select count(*) from live_job where lease_expires_at is null"
        while (leases := persistent(worker.claim, "email", 5)) or owner.value(left):
            answers = leases and persistent(worker.complete_many, leases)
            assert {answer.outcome for answer in answers} <= {"completed"}
            done += [(lease.job_id, lease.attempt) for lease in leases]
        return done

    workers = [client("email-worker") for _ in range(SESSIONS)]
    calls = [background(work, worker) for worker in workers]
    done = [job for call in calls for job in call.result(timeout=DEADLINE)]

    assert connect("email-worker").value("show transaction_isolation") == level
    assert len(done) == JOBS
    assert {attempt for _, attempt in done} == {1}
    assert {job_id for job_id, _ in done} == {
        job_id for (job_id,) in owner.rows("select job_id from job")
    }
    assert owner.rows("select outcome, count(*) from attempt group by 1") == [
        ("succeeded", JOBS)
    ]
