"""Claims next to claims: every job has one lease, and nobody waits for a lock."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from threading import Barrier

import pytest


def test_claim_skips_a_job_another_session_is_claiming(enqueue, claim, worker, rival):
    first, second = enqueue(), enqueue()

    with worker.transaction():
        mine, _ = claim()
        theirs, _ = claim(session=rival)

    assert (mine, theirs) == (first, second)


def test_claim_finds_nothing_while_the_only_job_is_being_claimed(
    enqueue, claim, worker, rival, impatient
):
    enqueue()

    with worker.transaction():
        claim()
        found = impatient(rival).rows("select * from claim('email')")

    assert found == []


def test_a_claim_rolled_back_hands_the_job_on_with_its_attempt_unchanged(
    enqueue, claim, worker, rival, state
):
    job_id = enqueue()
    before = state()
    worker.execute("begin")
    claim()

    worker.execute("rollback")
    after = state()
    lease = rival.row("select job_id, attempt from claim('email')")

    assert after == before
    assert lease == {"job_id": job_id, "attempt": 1}


def test_a_reclaim_rolled_back_leaves_the_lapsed_lease_and_no_evidence(
    enqueue, claim, worker, rival, expire, state
):
    job_id = enqueue()
    claim()
    expire(job_id)
    before = state()
    rival.execute("begin")
    rival.execute("select from claim('email')")

    rival.execute("rollback")
    after = state()
    attempt = worker.value("select attempt from claim('email')")

    assert after == before
    assert attempt == 2


def test_the_token_of_a_claim_rolled_back_is_worthless(enqueue, claim, worker):
    enqueue()
    worker.execute("begin")
    job_id, token = claim()
    worker.execute("rollback")

    with worker.refusing("LJ004"):
        worker.execute("select complete(%s, %s)", (job_id, token))


def test_two_reclaims_of_one_lapsed_lease_give_it_to_one(
    enqueue, claim, worker, rival, expire, owner, impatient
):
    job_id = enqueue()
    claim()
    expire(job_id)

    with worker.transaction():
        mine = worker.rows("select job_id from claim('email')")
        theirs = impatient(rival).rows("select job_id from claim('email')")

    assert (mine, theirs) == ([(job_id,)], [])
    assert owner.rows("select attempt, outcome from attempt") == [(1, "lease_expired")]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 25])
def test_eight_workers_claim_and_complete_each_of_2000_jobs_exactly_once(
    size, connect, owner, producer, background
):
    producer.execute(
        "select from generate_series(0, 1) as b cross join lateral enqueue_many(("
        " select jsonb_agg(jsonb_build_object('queue', 'email', 'kind', 'send',"
        " 'payload', '{}'::jsonb, 'idempotency_key', format('%s-%s', b, i)))"
        " from generate_series(1, 1000) as i))"
    )
    start = Barrier(8, timeout=20)

    def drain(session):
        claimed = []
        start.wait()
        while leases := session.rows(
            "select job_id, attempt, lease_token from claim('email', %s)", size
        ):
            claimed += [(job_id, attempt) for job_id, attempt, _ in leases]
            outcomes = session.rows(
                "select outcome from complete_many(%s, %s)",
                [job_id for job_id, _, _ in leases],
                [token for _, _, token in leases],
            )
            assert set(outcomes) == {("completed",)}
        return claimed

    drains = [
        background(drain, connect(role))
        for role in ("email-worker", "spare-worker") * 4
    ]
    claims = Counter(claim for drain in drains for claim in drain.result())

    assert len(claims) == 2000
    assert set(claims.values()) == {1}
    assert {attempt for _, attempt in claims} == {1}
    assert owner.value("select count(*) from live_job") == 0
    assert owner.value("select count(*) from attempt") == 2000


def test_workers_that_roll_every_other_claim_back_lose_and_double_nothing(
    connect, enqueue, owner, background
):
    job_ids = {enqueue() for _ in range(60)}
    start = Barrier(4, timeout=20)

    def drain(session):
        completed = []
        endings = cycle(["rollback", "commit"])
        start.wait()
        while session.value("select next_available_at('email')"):
            session.execute("begin")
            leases = session.rows("select job_id, lease_token from claim('email', 3)")
            for lease in leases:
                session.execute("select complete(%s, %s)", lease)
            ending = next(endings)
            session.execute(ending)
            if ending == "commit":
                completed += [job_id for job_id, _ in leases]
        return completed

    drains = [background(drain, connect("email-worker")) for _ in range(4)]
    completed = [job_id for drain in drains for job_id in drain.result()]

    assert sorted(completed) == sorted(job_ids)
    assert owner.rows("select distinct attempt, outcome from attempt") == [
        (1, "succeeded")
    ]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_retire_expired_passes_over_a_job_that_a_claim_is_ending(
    ending, enqueue, claim, worker, operator, owner, expire, impatient
):
    job_id = enqueue(max_attempts=1)
    claim()
    expire(job_id)
    worker.execute("begin")
    worker.execute("select from claim('email')")

    meanwhile = impatient(operator).value("select retire_expired(10)")
    worker.execute(ending)
    afterwards = operator.value("select retire_expired(10)")

    assert meanwhile == 0
    assert afterwards == (1 if ending == "rollback" else 0)
    assert owner.rows("select job_id, attempt, outcome, failure_code from attempt") == [
        (job_id, 1, "lease_expired", "attempts_exhausted")
    ]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_claim_passes_over_a_job_that_retire_expired_is_ending(
    ending, enqueue, claim, worker, operator, owner, expire, impatient
):
    job_id = enqueue(max_attempts=1)
    claim()
    expire(job_id)
    good = enqueue()
    operator.execute("begin")
    retired = operator.value("select retire_expired(10)")

    found = impatient(worker).rows("select job_id from claim('email', 10)")
    operator.execute(ending)
    again = worker.rows("select job_id from claim('email', 10)")

    assert retired == 1
    assert (found, again) == ([(good,)], [])
    assert owner.rows("select job_id, attempt, outcome from attempt") == [
        (job_id, 1, "lease_expired")
    ]


def test_the_lease_of_a_claim_in_an_old_transaction_starts_at_the_claim(
    enqueue, worker, pass_by, owner
):
    worker.execute("begin")
    started = worker.value("select now()")
    job_id = enqueue()
    pass_by(owner.value("select clock_timestamp() + interval '300 ms'"))
    called = owner.value("select clock_timestamp()")

    lease = worker.row("select job_id, lease_expires_at from claim('email')")
    worker.execute("commit")

    assert lease["job_id"] == job_id
    assert started < called
    assert (lease["lease_expires_at"] - called).total_seconds() >= 30
