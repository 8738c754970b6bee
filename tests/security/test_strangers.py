"""Locks that any role may take do not delay the verbs."""

from __future__ import annotations

import pytest

# The keys that PostgreSQL users can compute from the names an Instance has.
NAMES = (
    "jobs_email",
    "email",
    "jobs_email email",
    "jobs_email.email",
    "lenso-jobs",
    "lenso-jobs migration jobs_email",
    "lenso-jobs bootstrap jobs_email",
    "lenso-jobs operator jobs_email",
)


@pytest.fixture
def wait_key(worker):
    """The key by which workers of a queue wait, where the Instance has one."""
    if worker.value("select to_regproc('jobs_email.wait_key')") is None:
        return 0
    return worker.value("select wait_key('email')")


@pytest.fixture
def hoarding(stranger, wait_key):
    """A stranger that holds every such key until its session ends."""

    def hoarding(mode):
        lock = f"pg_advisory_lock{mode}"
        stranger.execute(f"select {lock}(%s)", (wait_key,))
        for name in NAMES:
            stranger.execute(f"select {lock}(hashtextextended(%s, 0))", (name,))
            stranger.execute(f"select {lock}(hashtext(%s))", (name,))

    return hoarding


@pytest.mark.parametrize("mode", ["", "_shared"])
def test_advisory_locks_of_a_stranger_hold_up_neither_enqueue_nor_claim(
    mode, hoarding, producer, worker, observer, operator, wait_key
):
    hoarding(mode)
    for session in (producer, worker, observer, operator):
        session.execute("set lock_timeout = '1s'")

    job_id = producer.value("select job_id from enqueue('email', 'send', '{}', 'k')")
    outcome = producer.value(
        """select outcome from enqueue_many('[{"queue": "email", "kind": "send",
            "payload": {}, "idempotency_key": "m"}]')"""
    )
    (lease, _) = worker.rows("select job_id, lease_token from claim('email', 2)")
    worker.execute("select renew(%s, %s)", lease)
    completed = worker.value("select complete(%s, %s)", *lease)
    observer.execute("select inspect(%s)", (job_id,))
    purged = operator.value("select purge(clock_timestamp())")

    assert outcome == "created"
    assert completed
    assert purged == 1


def test_no_verb_keeps_an_advisory_lock(
    producer, worker, operator, owner, enqueue, claim
):
    enqueue()
    for session in (producer, worker, operator):
        session.execute("begin")

    producer.execute("select enqueue('email', 'send', '{}', 'k')")
    job_id, token = claim()
    worker.execute("select renew(%s, %s)", (job_id, token))
    worker.execute("select complete(%s, %s)", (job_id, token))
    operator.execute("select purge(clock_timestamp())")
    held = owner.rows(
        "select pid, objid from pg_locks where locktype = 'advisory'"
        " and database = (select oid from pg_database"
        "  where datname = current_database())"
    )

    assert held == []


def test_an_open_transaction_of_a_stranger_changes_no_result(
    stranger, enqueue, claim, worker, operator, owner
):
    stranger.execute("begin isolation level repeatable read")
    stranger.execute("select count(*) from pg_class")

    job_id = enqueue()
    _, token = claim()
    completed = worker.value("select complete(%s, %s)", job_id, token)
    purged = operator.value("select purge(clock_timestamp())")

    assert completed
    assert purged == 1
    assert owner.value("select count(*) from job") == 0


def test_a_reader_of_the_open_views_locks_no_table(producer, worker, claim, enqueue):
    enqueue()
    producer.execute("begin")
    producer.execute("select from error_code")
    producer.execute("select from installed_version")
    producer.execute("lock table error_code in access share mode")
    worker.execute("set lock_timeout = '1s'")

    job_id, token = claim()

    assert worker.value("select complete(%s, %s)", job_id, token)
