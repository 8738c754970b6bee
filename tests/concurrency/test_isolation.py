"""Callers above READ COMMITTED: 40001 and a retry, never a double lease or job."""

from __future__ import annotations

from collections import Counter
from threading import Barrier

import psycopg
import pytest

LEVELS = pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])


def begin(session, isolation):
    """Begin a transaction and take its snapshot."""
    session.execute(f"begin isolation level {isolation}")
    session.execute("select")


@LEVELS
def test_claim_in_an_old_snapshot_does_not_lease_a_job_claimed_since(
    isolation, enqueue, claim, worker, rival, owner
):
    enqueue()
    begin(worker, isolation)
    claim(session=rival)

    with worker.refusing("40001"):
        worker.execute("select from claim('email')")
    worker.execute("rollback")

    assert worker.rows("select from claim('email')") == []
    assert owner.rows("select lease_owner, attempt from live_job") == [
        ("spare-worker", 1)
    ]


@LEVELS
def test_claim_in_an_old_snapshot_does_not_revive_a_job_completed_since(
    isolation, enqueue, claim, worker, rival, owner
):
    job_id = enqueue()
    begin(worker, isolation)
    _, token = claim(session=rival)
    rival.execute("select complete(%s, %s)", (job_id, token))

    with worker.refusing("40001"):
        worker.execute("select from claim('email')")
    worker.execute("rollback")

    assert owner.value("select count(*) from live_job") == 0
    assert owner.rows("select attempt, outcome from attempt") == [(1, "succeeded")]


@pytest.mark.slow
@LEVELS
@pytest.mark.parametrize("size", [1, 5])
def test_eight_workers_above_read_committed_claim_each_job_once(
    isolation, size, connect, enqueue, owner, background
):
    for _ in range(100):
        enqueue()
    start = Barrier(8, timeout=20)

    def drain(session):
        session.execute(f"set default_transaction_isolation = '{isolation}'")
        claimed = []
        start.wait()
        while True:
            try:
                leases = session.rows("select job_id from claim('email', %s)", size)
            except psycopg.errors.SerializationFailure:
                continue
            # What a refused claim had passed waits below the floor for a full scan.
            if not leases and not owner.value(
                "select count(*) from live_job where lease_expires_at is null"
            ):
                return claimed
            claimed += leases

    drains = [background(drain, connect("email-worker")) for _ in range(8)]
    claims = Counter(job for drain in drains for job in drain.result())

    assert len(claims) == 100
    assert set(claims.values()) == {1}
    assert owner.rows("select distinct attempt from live_job") == [(1,)]


@pytest.mark.slow
@LEVELS
@pytest.mark.parametrize(
    "call",
    [
        "select renew(%s, %s)",
        "select complete(%s, %s)",
        "select fail(%s, %s, 'smtp.down', true)",
        "select outcome from complete_many(array[%s]::uuid[], array[%s]::text[])",
        "select outcome from renew_many(array[%s]::uuid[], array[%s]::text[])",
        (
            "select outcome from fail_many(array[%s]::uuid[], array[%s]::text[],"
            " array['smtp.down'], array[true])"
        ),
    ],
)
def test_a_lease_superseded_since_the_snapshot_changes_nothing(
    isolation, call, enqueue, claim, worker, rival, expire, state
):
    job_id = enqueue()
    _, stale = claim()
    begin(worker, isolation)
    expire(job_id)
    claim(session=rival)
    before = state()

    with worker.refusing("40001"):
        worker.execute(call, (job_id, stale))
    worker.execute("rollback")

    assert state() == before


@LEVELS
def test_every_step_of_a_jobs_life_works_above_read_committed(
    isolation, producer, worker, observer
):
    for session in (producer, worker, observer):
        session.execute(f"set default_transaction_isolation = '{isolation}'")

    job_id = producer.value("select job_id from enqueue('email', 'send', '{}', 'k')")
    _, token = worker.row("select job_id, lease_token from claim('email')").values()
    worker.execute("select renew(%s, %s)", (job_id, token))
    worker.execute("select complete(%s, %s)", (job_id, token))
    status = observer.value("select status from inspect(%s)", job_id)

    assert status == "succeeded"


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_key_purged_since_the_snapshot_names_the_transactions_own_job(
    isolation, producer, worker, owner, operator, enqueue, claim
):
    old = enqueue(key="k")
    worker.execute("select complete(%s, %s)", claim())
    producer.execute(f"begin isolation level {isolation}")
    producer.execute("select")
    operator.execute("select purge(clock_timestamp())")

    new = enqueue(key="k", max_attempts=3)
    again = producer.row("select * from enqueue('email', 'send', '{}', 'k')")
    (many,) = producer.rows(
        "select job_id, outcome from enqueue_many(jsonb_build_array("
        " jsonb_build_object('queue', 'email', 'kind', 'send', 'payload', '{}'::jsonb,"
        " 'idempotency_key', 'k')))"
    )
    producer.execute("commit")

    assert new != old
    assert again == {"job_id": new, "created": False}
    assert many == (new, "existing")
    assert owner.rows("select job_id from job") == [(new,)]
