"""Which process holds a lease: the application_name of the session that claimed."""

import pytest

ENDS = {
    "succeeded": "complete(%s, %s)",
    "retried": "fail(%s, %s, 'timeout', true)",
    "failed": "fail(%s, %s, 'timeout', false)",
    "released": "release(%s, %s)",
    "succeeded of many": "complete_many(array[%s]::uuid[], array[%s])",
    "failed of many": (
        "fail_many(array[%s]::uuid[], array[%s], array['timeout'], array[false])"
    ),
}
BY_JOB = "select holder from inspect(%s)"
BY_ATTEMPT = "select attempt, holder from inspect_attempts(%s)"


@pytest.mark.parametrize("limit", [1, 2])
def test_reads_show_the_application_name_of_the_session_that_claimed(
    worker, observer, owner, enqueue, prefix, limit
):
    job_id = enqueue()
    worker.execute("set application_name = 'lenso-jobs host:7'")
    worker.execute("select claim('email', %s::integer)", (limit,))
    worker.execute("set application_name = 'other'")

    assert observer.value(BY_JOB, job_id) == "lenso-jobs host:7"
    assert observer.rows(BY_ATTEMPT, job_id) == [(1, "lenso-jobs host:7")]
    assert observer.rows(
        "select oldest_holder from inspect_workers() where worker = 'email-worker'"
    ) == [("lenso-jobs host:7",)]
    assert observer.value("select detail from explain_job(%s)", job_id) == (
        "application_name of its session: lenso-jobs host:7"
    )
    owner.execute(
        "update live_job set leased_at = clock_timestamp() - interval '2 days'"
    )
    assert observer.value(
        "select detail from inspect_health() where finding = 'lease_held_long'"
    ).endswith("held by email-worker in lenso-jobs host:7")


@pytest.mark.parametrize("end", ENDS)
def test_evidence_keeps_the_holder_and_a_queued_job_has_none(
    worker, owner, observer, enqueue, claim, end
):
    job_id = enqueue()
    worker.execute("set application_name = 'first'")
    held = claim()
    worker.execute("set application_name = 'second'")

    worker.execute(f"select {ENDS[end]}", held)

    assert owner.rows("select outcome, holder from attempt") == [
        (end.removesuffix(" of many"), "first")
    ]
    assert observer.value(BY_JOB, job_id) == "first"
    assert owner.rows("select from live_job where holder is not null") == []


def test_a_lapsed_lease_is_recorded_with_its_holder(
    worker, owner, observer, enqueue, claim, expire
):
    job_id = enqueue()
    worker.execute("set application_name = 'first'")
    claim()
    expire(job_id)
    worker.execute("set application_name = 'second'")
    claim()

    assert observer.rows(BY_ATTEMPT, job_id) == [(1, "first"), (2, "second")]


def test_a_session_without_a_name_is_no_holder(worker, observer, enqueue, claim):
    job_id = enqueue()
    worker.execute("set application_name = ''")
    claim()

    assert observer.value(BY_JOB, job_id) is None
    assert observer.value("select detail from explain_job(%s)", job_id) is None


def test_a_long_name_is_kept_as_pg_stat_activity_shows_it(
    worker, observer, enqueue, claim
):
    job_id = enqueue()
    worker.execute(f"set application_name = '{'ü' * 31}'")
    claim()

    assert observer.value(BY_JOB, job_id) == worker.value(
        "select application_name from pg_stat_activity where pid = pg_backend_pid()"
    )


def test_a_running_job_never_shows_the_holder_of_an_earlier_attempt(
    worker, observer, enqueue, claim
):
    job_id = enqueue()
    worker.execute("set application_name = 'first'")
    worker.execute("select fail(%s, %s, 'timeout', true, 0)", claim())
    worker.execute("set application_name = ''")
    claim()

    assert observer.row("select status, holder from inspect(%s)", job_id) == {
        "status": "running",
        "holder": None,
    }
