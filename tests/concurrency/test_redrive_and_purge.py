"""Redrive and purge of one job at once: a job that lives is never without its row."""

from __future__ import annotations

import pytest

PURGE = "select purge(clock_timestamp())"
REDRIVE = "select status from redrive(%s)"
ENDINGS = pytest.mark.parametrize("ending", ["commit", "rollback"])
SNAPSHOTS = pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])


def begin(session, isolation):
    """Begin a transaction and take its snapshot."""
    session.execute(f"begin isolation level {isolation}")
    session.execute("select")


@ENDINGS
def test_purge_passes_over_a_job_that_is_being_redriven(
    ending, failed_job, operator, second_operator, orphans, owner, impatient
):
    job_id = failed_job()
    operator.execute("begin")
    operator.execute(REDRIVE, (job_id,))

    purged = impatient(second_operator).value(PURGE)
    operator.execute(ending)
    afterwards = second_operator.value(PURGE)

    assert purged == 0
    assert afterwards == (1 if ending == "rollback" else 0)
    assert orphans() == 0
    assert owner.value("select count(*) from live_job") == (ending == "commit")


@SNAPSHOTS
@ENDINGS
def test_a_purge_with_a_snapshot_older_than_a_redrive_deletes_nothing_of_it(
    ending, isolation, failed_job, operator, second_operator, orphans, owner
):
    job_id = failed_job()
    begin(second_operator, isolation)
    operator.execute("begin")
    operator.execute(REDRIVE, (job_id,))
    operator.execute(ending)

    if ending == "commit":
        with second_operator.refusing("40001"):
            second_operator.execute(PURGE)
        second_operator.execute("rollback")
    else:
        assert second_operator.value(PURGE) == 1
        second_operator.execute("commit")

    assert orphans() == 0
    assert owner.value("select count(*) from live_job") == (ending == "commit")
    assert owner.value("select count(*) from job") == (ending == "commit")


@SNAPSHOTS
def test_a_purge_with_a_snapshot_passes_over_a_redrive_not_yet_committed(
    isolation, failed_job, operator, second_operator, orphans, owner, impatient
):
    job_id = failed_job()
    operator.execute("begin")
    operator.execute(REDRIVE, (job_id,))
    begin(second_operator, isolation)

    purged = impatient(second_operator).value(PURGE)
    operator.execute("commit")
    second_operator.execute("commit")

    assert purged == 0
    assert orphans() == 0
    assert owner.rows("select job_id from live_job") == [(job_id,)]


@ENDINGS
def test_a_redrive_waits_for_the_purge_of_its_job(
    ending, failed_job, operator, second_operator, orphans, owner, blocked, background
):
    job_id = failed_job()
    operator.execute("begin")
    operator.execute(PURGE)
    answer = background(second_operator.value, REDRIVE, job_id)
    blocked(second_operator, operator)
    operator.execute(ending)

    if ending == "commit":
        with second_operator.refusing("LJ006"):
            answer.result()
    else:
        assert answer.result() == "queued"

    assert orphans() == 0
    assert owner.value("select count(*) from live_job") == (ending == "rollback")


@SNAPSHOTS
@ENDINGS
def test_a_redrive_with_a_snapshot_older_than_a_purge_revives_nothing(
    ending,
    isolation,
    failed_job,
    operator,
    second_operator,
    orphans,
    owner,
    blocked,
    background,
):
    job_id = failed_job()
    operator.execute("begin")
    operator.execute(PURGE)
    begin(second_operator, isolation)
    answer = background(second_operator.value, REDRIVE, job_id)
    blocked(second_operator, operator)
    operator.execute(ending)

    if ending == "commit":
        with second_operator.refusing("40001"):
            answer.result()
        second_operator.execute("rollback")
    else:
        assert answer.result() == "queued"
        second_operator.execute("commit")

    assert orphans() == 0
    assert owner.value("select count(*) from live_job") == (ending == "rollback")


@ENDINGS
def test_of_two_redrives_of_one_job_one_is_refused(
    ending, failed_job, operator, second_operator, owner, blocked, background
):
    job_id = failed_job()
    operator.execute("begin")
    operator.execute(REDRIVE, (job_id,))
    answer = background(second_operator.value, REDRIVE, job_id)
    blocked(second_operator, operator)
    operator.execute(ending)

    if ending == "commit":
        with second_operator.refusing("LJ007"):
            answer.result()
    else:
        assert answer.result() == "queued"

    assert owner.rows("select attempt, max_attempts from live_job") == [(1, 2)]


def test_a_redrive_with_a_snapshot_older_than_another_does_not_redrive_twice(
    failed_job, operator, second_operator, owner
):
    job_id = failed_job()
    begin(second_operator, "repeatable read")
    operator.execute(REDRIVE, (job_id,))

    with second_operator.refusing("40001"):
        second_operator.execute(REDRIVE, (job_id,))

    assert owner.value("select count(*) from live_job") == 1


@ENDINGS
def test_two_purges_at_once_share_the_jobs_and_do_not_wait(
    ending, failed_job, operator, second_operator, orphans, owner, impatient
):
    for _ in range(3):
        failed_job()
    operator.execute("begin")
    first = operator.value("select purge(clock_timestamp(), 2)")

    second = impatient(second_operator).value(PURGE)
    operator.execute(ending)

    assert (first, second) == (2, 1)
    assert orphans() == 0
    assert owner.value("select count(*) from job") == (0 if ending == "commit" else 2)


def test_purge_leaves_a_job_whose_last_attempt_is_ending(
    enqueue, claim, worker, operator, orphans, impatient
):
    job_id = enqueue(max_attempts=2)
    _, token = claim()
    worker.execute("begin")
    worker.execute("select complete(%s, %s)", (job_id, token))

    meanwhile = impatient(operator).value(PURGE)
    worker.execute("commit")
    afterwards = operator.value(PURGE)

    assert (meanwhile, afterwards) == (0, 1)
    assert orphans() == 0


@pytest.mark.parametrize("ending", ["still queued", "running", "succeeded", "failed"])
def test_a_purge_overtaken_by_a_redrive_leaves_the_job_in_every_state(
    ending,
    failed_job,
    gated_evidence,
    connect,
    operator,
    worker,
    claim,
    observer,
    orphans,
    blocked,
    background,
):
    job_id = failed_job()
    admin = connect()
    admin.execute("select pg_advisory_lock(1)")
    cut_off = admin.value("select clock_timestamp()")
    answer = background(operator.value, "select purge(%s)", cut_off)
    blocked(operator, admin)

    admin.execute(REDRIVE, (job_id,))
    if ending != "still queued":
        _, token = claim()
    if ending == "succeeded":
        worker.execute("select complete(%s, %s)", (job_id, token))
    elif ending == "failed":
        worker.execute("select fail(%s, %s, 'smtp.down', false)", (job_id, token))
    admin.execute("select pg_advisory_unlock(1)")

    assert answer.result() == 0
    assert orphans() == 0
    assert observer.value("select attempts from inspect(%s)", job_id) == (
        1 if ending == "still queued" else 2
    )


def test_redriving_purging_and_working_at_once_leave_no_row_without_its_job(
    connect, prefix, failed_job, operator, background, orphans, owner
):
    job_ids = [failed_job() for _ in range(40)]

    def redrive_all(session):
        for job_id in job_ids:
            try:
                session.execute(REDRIVE, (job_id,))
            except Exception as error:  # noqa: BLE001
                assert error.sqlstate == "LJ006"  # noqa: PT017

    def purge_all(session):
        return sum(session.value("select purge(clock_timestamp(), 3)") for _ in job_ids)

    def work(session):
        for _ in job_ids:
            for lease in session.rows("select job_id, lease_token from claim('email')"):
                session.execute("select fail(%s, %s, 'smtp.down', true)", lease)

    calls = [
        background(redrive_all, operator),
        background(purge_all, connect(f"{prefix}_duty")),
        background(work, connect("email-worker")),
    ]
    _, purged, _ = [call.result() for call in calls]

    assert orphans() == 0
    assert owner.value("select count(*) from job") == 40 - purged
    assert (
        owner.value(
            "select count(*) from job as j"
            " where not exists (select from attempt as a where a.job_id = j.job_id)"
        )
        == 0
    )


# Erase, too.

ERASE = "select erase(%s)"


@ENDINGS
def test_an_erase_waits_for_the_redrive_of_its_job(
    ending, failed_job, operator, second_operator, orphans, owner, blocked, background
):
    job_id = failed_job()
    operator.execute("begin")
    operator.execute(REDRIVE, (job_id,))
    answer = background(second_operator.value, ERASE, job_id)
    blocked(second_operator, operator)
    operator.execute(ending)

    if ending == "commit":
        with second_operator.refusing("LJ007"):
            answer.result()
    else:
        assert answer.result() is True

    assert orphans() == 0
    assert owner.value("select count(*) from job") == (ending == "commit")


@SNAPSHOTS
def test_an_erase_with_a_snapshot_older_than_a_redrive_deletes_nothing(
    isolation, failed_job, operator, second_operator, orphans, owner
):
    job_id = failed_job()
    begin(second_operator, isolation)
    operator.execute(REDRIVE, (job_id,))

    with second_operator.refusing("40001"):
        second_operator.execute(ERASE, (job_id,))
    second_operator.execute("rollback")

    assert orphans() == 0
    assert owner.value("select count(*) from job") == 1
