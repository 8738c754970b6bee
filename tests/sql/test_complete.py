from uuid import uuid4

import pytest

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


def test_complete_takes_arguments_by_name(worker, enqueue, claim):
    enqueue()
    job_id, token = claim()

    assert worker.value(
        "select complete(p_lease_token => %s, p_job_id => %s)", token, job_id
    )


def test_complete_touches_no_other_job(worker, owner, enqueue, claim):
    enqueue()
    others = {enqueue(), enqueue(queue="slow")}

    worker.value(COMPLETE, *claim())

    assert {j for (j,) in owner.rows("select job_id from live_job")} == others


def test_complete_repeated_answers_true_and_changes_nothing(
    worker, enqueue, claim, state
):
    enqueue()
    held = claim()
    worker.value(COMPLETE, *held)
    before = state()

    assert worker.value(COMPLETE, *held) is True
    assert worker.value(COMPLETE, *held) is True

    assert state() == before


def test_complete_repeated_within_one_transaction_answers_true(worker, enqueue, claim):
    enqueue()
    held = claim()

    with worker.transaction():
        assert worker.value(COMPLETE, *held) is True
        assert worker.value(COMPLETE, *held) is True


def test_complete_refuses_an_expired_lease_even_if_nobody_claimed_it(
    worker, enqueue, claim, expire, state
):
    job_id = enqueue()
    held = claim()
    expire(job_id)
    before = state()

    with worker.refusing("LJ004") as caught:
        worker.value(COMPLETE, *held)

    assert "lease" in caught.value.diag.message_primary
    assert state() == before


@pytest.mark.usefixtures("read_committed")
def test_complete_judges_the_lease_by_the_clock_not_the_transactions_start(
    worker, owner, enqueue, claim
):
    enqueue()
    held = claim()

    with worker.refusing("LJ004"), worker.transaction():
        worker.execute("select 1")
        owner.execute("update live_job set lease_expires_at = clock_timestamp()")
        worker.value(COMPLETE, *held)


def test_complete_dates_its_evidence_by_the_clock(worker, owner, enqueue, claim):
    enqueue()
    held = claim()

    with worker.transaction():
        worker.execute("select 1")
        passed = owner.value("select clock_timestamp()")
        worker.value(COMPLETE, *held)

    assert owner.value("select ended_at from attempt") > passed


def test_complete_refuses_a_superseded_lease(connect, enqueue, claim, expire, state):
    job_id = enqueue()
    worker = connect("email-worker")
    held = claim(session=worker)
    expire(job_id)
    claim(session=connect("spare-worker"))
    before = state()

    with worker.refusing("LJ004"):
        worker.value(COMPLETE, *held)

    assert state() == before


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


def test_complete_refuses_a_lease_that_failed(worker, enqueue, claim, state):
    for key, retryable in (("once", False), ("again", True)):
        enqueue(key=key)
        held = claim()
        worker.execute("select fail(%s, %s, 'timeout', %s)", (*held, retryable))
        before = state()

        with worker.refusing("LJ004"):
            worker.value(COMPLETE, *held)

        assert state() == before


def test_complete_refuses_a_last_lease_that_ran_out(
    connect, enqueue, claim, expire, state
):
    job_id = enqueue(max_attempts=1)
    worker = connect("email-worker")
    held = claim(session=worker)
    expire(job_id)
    connect("spare-worker").execute("select claim('email')")
    before = state()

    with worker.refusing("LJ004"):
        worker.value(COMPLETE, *held)

    assert state() == before


def test_complete_refuses_any_other_owner_token_or_job(
    connect, owner, enqueue, claim, state
):
    worker, rival = connect("email-worker"), connect("spare-worker")
    enqueue()
    enqueue()
    (job_id, token), (other_id, other_token) = claim(), claim()
    stored = owner.value("select encode(lease_token_hash, 'hex') from live_job limit 1")
    before = state()

    for session, *held in (
        (rival, job_id, token),
        (owner, job_id, token),
        (worker, job_id, other_token),
        (worker, other_id, token),
        (worker, uuid4(), token),
        (worker, job_id, NO_TOKEN),
        (worker, job_id, ""),
        (worker, job_id, token.upper()),
        (worker, job_id, token + " "),
        (worker, job_id, token[:-1]),
        (worker, job_id, stored),
        (worker, job_id, "\\x" + stored),
        (worker, job_id, "é\\000\\"),
        (worker, None, token),
        (worker, job_id, None),
        (worker, None, None),
    ):
        with session.refusing("LJ004") as caught:
            session.value(COMPLETE, *held)
        for secret in (token, other_token):
            assert secret not in str(caught.value)
            assert secret not in (caught.value.diag.context or "")

    assert state() == before


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


def test_complete_refuses_a_job_that_nobody_has_claimed(worker, enqueue, state):
    job_id = enqueue()
    before = state()

    for token in (NO_TOKEN, "", None):
        with worker.refusing("LJ004"):
            worker.value(COMPLETE, job_id, token)

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


def test_complete_refused_leaves_the_job_to_be_claimed_again(
    connect, enqueue, claim, expire
):
    job_id = enqueue()
    worker = connect("email-worker")
    held = claim(session=worker)
    expire(job_id)
    with worker.refusing("LJ004"):
        worker.value(COMPLETE, *held)

    assert claim(session=connect("email-worker"))[0] == job_id


def test_complete_serves_a_lease_that_was_renewed_beyond_its_first_end(
    worker, owner, enqueue, claim
):
    enqueue()
    held = claim()
    owner.execute(
        "update live_job set lease_expires_at = clock_timestamp() + interval '2 s'"
    )
    worker.execute("select renew(%s, %s)", held)

    assert worker.value(COMPLETE, *held) is True
