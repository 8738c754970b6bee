COMPLETE = "select complete(%s::uuid, %s)"
NO_TOKEN = "job_lease_" + 64 * "0"


def test_complete_ends_the_job_as_succeeded_with_evidence(
    worker, owner, enqueue, claim
):
    job_id = enqueue()
    held = claim()
    live = owner.row("select * from live_job")
    before = owner.value("select clock_timestamp()")

    assert worker.value(COMPLETE, *held) is True

    after = owner.value("select clock_timestamp()")
    evidence = owner.row("select * from attempt")
    assert evidence["job_id"] == job_id
    assert evidence["attempt"] == 1
    assert evidence["max_attempts"] == 3
    assert evidence["outcome"] == "succeeded"
    assert evidence["worker"] == "email-worker"
    assert evidence["leased_at"] == live["leased_at"]
    assert evidence["lease_token_hash"] == live["lease_token_hash"]
    assert before < evidence["ended_at"] < after
    assert evidence["failure_code"] is None
    assert evidence["retry_at"] is None
    assert evidence["retryable"] is None
    assert owner.value("select count(*) from live_job") == 0
    assert owner.value("select count(*) from job") == 1


def test_complete_repeated_returns_true_and_changes_nothing(
    worker, enqueue, claim, state
):
    enqueue()
    held = claim()
    worker.value(COMPLETE, *held)
    before = state()

    assert worker.value(COMPLETE, *held) is True
    assert worker.value(COMPLETE, *held) is True

    assert state() == before


def test_complete_repeated_within_one_transaction_returns_true(worker, enqueue, claim):
    enqueue()
    held = claim()

    with worker.transaction():
        assert worker.value(COMPLETE, *held) is True
        assert worker.value(COMPLETE, *held) is True


def test_complete_dates_its_evidence_by_the_clock(worker, owner, enqueue, claim):
    enqueue()
    held = claim()

    with worker.transaction():
        worker.execute("select 1")
        passed = owner.value("select clock_timestamp()")
        worker.value(COMPLETE, *held)

    assert owner.value("select ended_at from attempt") > passed


def test_complete_refuses_the_stale_worker_and_serves_the_new_one(
    connect, owner, enqueue, claim, expire
):
    job_id = enqueue()
    stale, fresh = connect("email-worker"), connect("email-worker")
    old = claim(session=stale)
    expire(job_id)
    new = claim(session=fresh)

    assert fresh.value(COMPLETE, *new) is True
    with stale.refusing("LJ004"):
        stale.value(COMPLETE, *old)

    assert owner.rows("select attempt, outcome from attempt order by 1") == [
        (1, "lease_expired"),
        (2, "succeeded"),
    ]


def test_complete_repeated_refuses_any_other_owner_token_or_job(
    connect, enqueue, claim, state
):
    worker, rival = connect("email-worker"), connect("spare-worker")
    other_id = enqueue()
    job_id, token = claim()
    worker.value(COMPLETE, job_id, token)
    other_id = enqueue()
    before = state()

    for session, *held in (
        (rival, job_id, token),
        (worker, other_id, token),
        (worker, job_id, NO_TOKEN),
        (worker, job_id, None),
        (worker, None, token),
    ):
        with session.refusing("LJ004"):
            session.value(COMPLETE, *held)

    assert state() == before


def test_complete_joins_the_callers_transaction(worker, enqueue, claim, state):
    enqueue()
    held = claim()
    before = state()

    with worker.transaction(force_rollback=True):
        worker.execute("create temporary table effect (n int)")
        assert worker.value(COMPLETE, *held) is True

    assert state() == before
    assert worker.value("select to_regclass('effect')") is None


def test_complete_refused_rolls_the_callers_effects_back(
    worker, owner, enqueue, claim, expire
):
    owner.execute("create table public.effect (n int)")
    owner.execute('grant insert on public.effect to "email-worker"')
    job_id = enqueue()
    held = claim()
    expire(job_id)

    with worker.refusing("LJ004"), worker.transaction():
        worker.execute("insert into public.effect values (1)")
        worker.value(COMPLETE, *held)

    assert owner.rows("select * from public.effect") == []
