"""A paused queue gives out no job, and everything else goes on."""

import pytest


@pytest.fixture
def paused(operator):
    """Pause the queue ``email``."""
    assert operator.value("select pause('email')") is True


@pytest.mark.usefixtures("paused")
@pytest.mark.parametrize("limit", [1, 10])
def test_claim_returns_no_row_of_a_paused_queue_until_it_is_resumed(
    worker, operator, enqueue, limit
):
    email, slow = enqueue(), enqueue(queue="slow")
    take = "select job_id from claim(%s, %s::integer)"

    assert worker.rows(take, "email", limit) == []
    assert worker.rows(take, "slow", limit) == [(slow,)]
    operator.execute("select resume('email')")
    assert worker.rows(take, "email", limit) == [(email,)]


def test_enqueue_renew_complete_fail_and_release_go_on_while_a_queue_is_paused(
    worker, operator, enqueue, claim
):
    for _ in range(3):
        enqueue()
    done, failed, released = (claim() for _ in range(3))
    operator.execute("select pause('email')")

    enqueue()
    worker.execute("select renew(%s, %s)", done)
    worker.execute("select complete(%s, %s)", done)
    worker.execute("select fail(%s, %s, 'timeout', false)", failed)
    worker.execute("select release(%s, %s)", released)

    assert worker.value("select next_available_at('email')") is None
    assert worker.rows("select claim('email', 10)") == []


def test_claim_of_a_paused_queue_refuses_what_it_always_refuses(
    worker, producer, operator
):
    operator.execute("select pause('email')")

    for session, call, sqlstate in (
        (worker, "claim('email', 0)", "LJ007"),
        (worker, "claim('none')", "LJ003"),
        (producer, "claim('email')", "42501"),
    ):
        with session.refusing(sqlstate):
            session.execute(f"select {call}")


def test_pause_and_resume_return_whether_they_changed_anything_and_audit_that(
    operator, observer, prefix
):
    answers = [
        operator.value(f"select {act}('email')")
        for act in ("resume", "pause", "pause", "resume", "resume")
    ]

    assert answers == [False, True, False, True, False]
    assert observer.rows(
        "select operator, act, arguments, job_count from inspect_acts(2)"
    ) == [(f"{prefix}_duty", act, {"queue": "email"}, 0) for act in ("resume", "pause")]


def test_pause_and_resume_act_on_one_queue_and_at_the_time_of_the_call(operator, owner):
    with operator.transaction():
        operator.execute("select pause('slow')")
        passed = owner.value("select clock_timestamp()")
        operator.execute("select pause('email')")
    operator.execute("select resume('slow')")

    ((queue, since),) = owner.rows(
        "select queue, paused_at from queue where paused_at is not null"
    )
    assert queue == "email"
    assert since > passed
    assert owner.value("select paused from instance") == ["email"]


@pytest.mark.parametrize("act", ["pause", "resume"])
@pytest.mark.parametrize("queue", [None, "none"])
def test_pause_and_resume_refuse_an_undeclared_queue(operator, state, act, queue):
    before = state()

    with operator.refusing("LJ003"):
        operator.execute(f"select {act}(%s)", (queue,))

    assert state() == before


@pytest.mark.usefixtures("paused")
def test_a_declared_queue_stays_paused_through_configure(configure, worker, enqueue):
    enqueue()

    configure(queues=["email", "other", "slow"], lease_seconds=30)

    assert worker.rows("select claim('email')") == []


@pytest.mark.usefixtures("paused")
def test_inspect_queues_explain_job_and_health_say_that_a_queue_is_paused(
    observer, owner, enqueue, prefix
):
    job_id = enqueue()
    since = owner.value("select paused_at from queue where queue = 'email'")
    owner.execute("update live_job set available_at = '2020-01-01'")

    queues = dict(observer.rows("select queue, paused_at from inspect_queues()"))
    assert queues == {"email": since, "slow": None}
    assert observer.rows(
        "select reason, since, who, remedy from explain_job(%s)", job_id
    ) == [("queue_paused", since, f"{prefix}_duty", "lenso-jobs resume email")]
    # Not queue_silent: nothing is wrong with the workers.
    assert observer.rows("select * from inspect_health()") == [
        (
            *("notice", "queue_paused", "email", since),
            f"was paused by {prefix}_duty and has 1 job ready",
            "lenso-jobs resume email",
        )
    ]


@pytest.mark.usefixtures("paused")
def test_resume_alone_notifies_the_sessions_that_wait(worker, operator, enqueue):
    worker.execute("select pg_try_advisory_lock_shared(wait_key('email'))")
    worker.execute("listen jobs_email")

    enqueue()
    worker.execute("select")
    assert list(worker.notifies(timeout=0)) == []
    operator.execute("select resume('email')")

    (told,) = worker.notifies(timeout=5, stop_after=1)
    assert (told.channel, told.payload) == ("jobs_email", "email")
