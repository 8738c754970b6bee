from datetime import timedelta
from uuid import uuid4

import pytest

RENEW = "select renew(%s::uuid, %s)"
LEASE = timedelta(seconds=30)
NO_TOKEN = "job_lease_" + 64 * "0"


def test_renew_extends_a_lease_by_its_length_from_now(worker, owner, enqueue, claim):
    enqueue()
    held = claim()
    owner.execute(
        "update live_job set lease_expires_at = clock_timestamp() + interval '5 s'"
    )
    before = owner.value("select clock_timestamp()")

    expires_at = worker.value(RENEW, *held)

    after = owner.value("select clock_timestamp()")
    assert before + LEASE <= expires_at <= after + LEASE
    assert owner.value("select lease_expires_at from live_job") == expires_at


def test_renew_changes_nothing_but_the_end(worker, owner, enqueue, claim):
    enqueue()
    held = claim()
    rest = "select (to_jsonb(l) - 'lease_expires_at')::text from live_job as l"
    before = owner.value(rest)

    worker.value(RENEW, *held)

    assert owner.value(rest) == before
    assert owner.value("select count(*) from attempt") == 0


def test_renew_touches_no_other_job(worker, enqueue, claim, state):
    enqueue(), enqueue(), enqueue()
    held, _ = claim(), claim()
    before = state()["live_job"]

    worker.value(RENEW, *held)

    after = state()["live_job"]
    assert [str(held[0]) in row for (row,) in set(after) - set(before)] == [True]


def test_renew_takes_arguments_by_name(worker, enqueue, claim):
    enqueue()
    job_id, token = claim()

    assert worker.value(
        "select renew(p_lease_token => %s, p_job_id => %s)", token, job_id
    )


def test_renew_never_shortens_a_lease(worker, owner, enqueue, claim):
    enqueue()
    held = claim()
    owner.execute(
        "update live_job set lease_expires_at = clock_timestamp() + interval '1 day'"
    )
    end = owner.value("select lease_expires_at from live_job")

    assert worker.value(RENEW, *held) == end
    assert owner.value("select lease_expires_at from live_job") == end


def test_renew_goes_on_as_often_as_asked(worker, enqueue, claim):
    enqueue()
    held = claim()

    ends = [worker.value(RENEW, *held) for _ in range(5)]

    assert ends == sorted(ends)
    assert len(set(ends)) == 5


def test_renew_counts_from_the_clock_not_the_transactions_start(
    worker, owner, enqueue, claim
):
    enqueue()
    held = claim()

    with worker.transaction():
        worker.execute("select 1")
        passed = owner.value("select clock_timestamp()")
        expires_at = worker.value(RENEW, *held)

    assert expires_at > passed + LEASE


@pytest.mark.usefixtures("read_committed")
def test_renew_sees_a_lease_end_within_the_transaction(worker, owner, enqueue, claim):
    enqueue()
    held = claim()

    with worker.refusing("LJ004"), worker.transaction():
        worker.execute("select 1")
        owner.execute("update live_job set lease_expires_at = clock_timestamp()")
        worker.value(RENEW, *held)


def test_renew_refuses_an_expired_lease_even_if_nobody_claimed_it(
    worker, enqueue, claim, expire, state
):
    job_id = enqueue()
    held = claim()
    expire(job_id)
    before = state()

    with worker.refusing("LJ004") as caught:
        worker.value(RENEW, *held)

    assert "lease" in caught.value.diag.message_primary
    assert state() == before


def test_renew_refuses_a_superseded_lease(connect, enqueue, expire, claim, state):
    job_id = enqueue()
    worker = connect("email-worker")
    held = claim(session=worker)
    expire(job_id)
    claim(session=connect("email-worker"))
    before = state()

    with worker.refusing("LJ004"):
        worker.value(RENEW, *held)

    assert state() == before


@pytest.mark.parametrize("end", ["succeeded", "retrying", "failed"])
def test_renew_refuses_a_lease_that_has_ended(worker, enqueue, claim, state, end):
    enqueue()
    held = claim()
    if end == "succeeded":
        worker.execute("select complete(%s, %s)", held)
    else:
        worker.execute("select fail(%s, %s, 'timeout', %s)", (*held, end == "retrying"))
    before = state()

    with worker.refusing("LJ004"):
        worker.value(RENEW, *held)

    assert state() == before


def test_renew_refuses_any_other_owner_token_or_job(
    connect, owner, enqueue, claim, state
):
    worker, rival = connect("email-worker"), connect("spare-worker")
    enqueue()
    enqueue()
    (job_id, token), (other_id, other_token) = claim(), claim()
    hash_ = owner.value("select encode(lease_token_hash, 'hex') from live_job limit 1")
    before = state()

    for session, *held in (
        (rival, job_id, token),
        (worker, job_id, other_token),
        (worker, other_id, token),
        (worker, uuid4(), token),
        (worker, job_id, NO_TOKEN),
        (worker, job_id, ""),
        (worker, job_id, token.upper()),
        (worker, job_id, token + " "),
        (worker, job_id, token[:-1]),
        (worker, job_id, token.removeprefix("job_lease_")),
        (worker, job_id, hash_),
        (worker, job_id, "\\x" + hash_),
        (worker, job_id, "é\\000\\"),
        (worker, None, token),
        (worker, job_id, None),
        (worker, None, None),
    ):
        with session.refusing("LJ004") as caught:
            session.value(RENEW, *held)
        for secret in (token, other_token):
            assert secret not in str(caught.value)
            assert secret not in (caught.value.diag.context or "")

    assert state() == before


def test_renew_refuses_a_job_that_nobody_has_claimed(worker, enqueue, state):
    job_id = enqueue()
    before = state()

    for token in (NO_TOKEN, "", None):
        with worker.refusing("LJ004"):
            worker.value(RENEW, job_id, token)

    assert state() == before


def test_renew_refuses_whoever_is_not_the_owner_of_the_lease(
    owner, enqueue, claim, state
):
    enqueue()
    held = claim()
    before = state()

    with owner.refusing("LJ004"):
        owner.value(RENEW, *held)
    with owner.refusing("LJ004"), owner.transaction():
        owner.execute('set local role "spare-worker"')
        owner.value(RENEW, *held)

    assert state() == before


def test_renew_serves_the_role_that_set_role_put_in_force(owner, enqueue, claim):
    enqueue()
    held = claim()

    with owner.transaction():
        owner.execute('set local role "email-worker"')
        assert owner.value(RENEW, *held)


def test_renew_gives_the_lease_that_the_policy_says(worker, owner, enqueue, claim):
    enqueue()
    held = claim()
    owner.execute("update instance set lease_seconds = 3600")

    expires_at = worker.value(RENEW, *held)

    left = expires_at - owner.value("select clock_timestamp()")
    assert timedelta(seconds=3590) < left <= timedelta(seconds=3600)


def test_renew_updates_the_row_in_its_page(connect, enqueue, claim):
    enqueue()
    worker = connect("email-worker")
    held = claim()

    with worker.transaction():
        worker.value(RENEW, *held)
        counts = worker.row(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_xact_user_tables"
            " where relname = 'live_job'"
        )

    assert counts == {"n_tup_upd": 1, "n_tup_hot_upd": 1}


def test_renew_rolls_back_with_the_callers_transaction(worker, enqueue, claim, state):
    enqueue()
    held = claim()
    before = state()

    with worker.transaction(force_rollback=True):
        worker.value(RENEW, *held)

    assert state() == before
