"""Batches that meet in opposite orders: one waits for the other, and both succeed."""

from __future__ import annotations

import itertools
import json
from threading import Barrier
from uuid import uuid4

import pytest

BATCHES = {
    "complete_many": "select outcome from complete_many(%s, %s)",
    "fail_many": (
        "select outcome from fail_many(%s, %s,"
        " array_fill('smtp.down'::text, array[9]), array_fill(true, array[9]))"
    ),
}


def jobs(keys):
    return json.dumps(
        [
            {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": key}
            for key in keys
        ]
    )


@pytest.fixture
def twin(connect):
    """Another session of ``accounts``."""
    return connect("accounts")


@pytest.fixture
def leases(enqueue, worker):
    """Nine leases of ``email-worker``: the jobs, and their tokens."""
    for _ in range(9):
        enqueue()
    rows = worker.rows("select job_id, lease_token from claim('email', 9)")
    return [job_id for job_id, _ in rows], [token for _, token in rows]


def test_t16_batches_in_opposite_orders_that_both_met_a_third_do_not_deadlock(
    connect, producer, twin, owner, blocked, background
):
    keys = [f"key-{n}" for n in range(9)]
    third = connect("accounts")
    third.execute("begin")
    third.execute("select enqueue('email', 'send', '{}', %s)", (keys[4],))
    batch = "select outcome from enqueue_many(%s)"
    ascending = background(producer.rows, batch, jobs(keys))
    blocked(producer, third)
    descending = background(twin.rows, batch, jobs(reversed(keys)))
    blocked(twin, producer)

    third.execute("rollback")

    assert set(ascending.result()) == {("created",)}
    assert set(descending.result()) == {("existing",)}
    assert owner.value("select count(*) from live_job") == 9


def test_t16_batches_in_opposite_orders_never_deadlock(
    producer, twin, owner, background
):
    rounds = [[f"{n}-{uuid4()}" for n in range(50)] for _ in range(60)]
    start = Barrier(2, timeout=20)

    def enqueue_all(session, order):
        outcomes = []
        for keys in rounds:
            start.wait()
            outcomes += session.rows(
                "select outcome from enqueue_many(%s)", jobs(order(keys))
            )
        return outcomes

    asked = [
        background(enqueue_all, producer, list),
        background(enqueue_all, twin, reversed),
    ]
    outcomes = [outcome for asking in asked for outcome in asking.result()]

    assert outcomes.count(("created",)) == outcomes.count(("existing",)) == 3000
    assert owner.value("select count(*) from live_job") == 3000


def test_t16_one_by_one_in_opposite_orders_one_is_the_victim_and_may_repeat(
    producer, twin, owner, blocked, background
):
    one = "select job_id from enqueue('email', 'send', '{}', %s)"
    producer.execute("begin")
    twin.execute("begin")
    producer.execute(one, ("a",))
    twin.execute(one, ("b",))
    waiting = background(producer.execute, one, ("b",))
    blocked(producer, twin)

    crossing = background(twin.execute, one, ("a",))
    victims = [w.exception().sqlstate for w in (waiting, crossing) if w.exception()]
    for session in (producer, twin):
        session.execute("commit")
    for session in (producer, twin):
        for key in ("a", "b"):
            session.execute(one, (key,))

    assert victims == ["40P01"]
    assert owner.value("select count(*) from live_job") == 2


@pytest.mark.parametrize(("first", "second"), [*itertools.product(BATCHES, BATCHES)])
def test_batches_of_leases_in_opposite_orders_that_both_met_a_lock_do_not_deadlock(
    first, second, leases, worker, colleague, owner, hold, blocked, background
):
    job_ids, tokens = leases
    holder = hold(job_ids[4])
    ascending = background(worker.rows, BATCHES[first], job_ids, tokens)
    blocked(worker, holder)
    descending = background(
        colleague.rows, BATCHES[second], job_ids[::-1], tokens[::-1]
    )
    blocked(colleague, worker)

    holder.execute("rollback")

    winner = "completed" if first == "complete_many" else "queued"
    assert set(ascending.result()) == {(winner,)}
    assert set(descending.result()) == {
        (winner if first == second else "invalid_lease",)
    }
    assert owner.value("select count(*) from attempt") == 9


@pytest.mark.parametrize("batch", [*BATCHES, "renew_many"])
def test_batches_of_leases_in_opposite_orders_never_deadlock(
    batch, enqueue, connect, background, owner
):
    sessions = [connect("email-worker") for _ in range(2)]
    for _ in range(9 * 30):
        enqueue()
    rounds = []
    while rows := sessions[0].rows("select job_id, lease_token from claim('email', 9)"):
        rounds.append(([job for job, _ in rows], [token for _, token in rows]))
    statement = BATCHES.get(batch, "select outcome from renew_many(%s, %s)")
    start = Barrier(2, timeout=20)

    def run(session, step):
        outcomes = set()
        for job_ids, tokens in rounds:
            start.wait()
            outcomes.update(session.rows(statement, job_ids[::step], tokens[::step]))
        return outcomes

    runs = [background(run, sessions[0], 1), background(run, sessions[1], -1)]
    outcomes = {outcome for (outcome,) in runs[0].result() | runs[1].result()}

    assert len(rounds) == 30
    assert (
        outcomes
        <= {
            "complete_many": {"completed"},
            "fail_many": {"queued"},
            "renew_many": {"renewed", "busy"},
        }[batch]
    )
    assert owner.value("select count(*) from attempt") == (
        0 if batch == "renew_many" else 270
    )


def test_renewing_and_completing_the_same_leases_in_opposite_orders_does_not_deadlock(
    leases, worker, colleague, hold, blocked, background, impatient
):
    job_ids, tokens = leases
    holder = hold(job_ids[4])
    completing = background(worker.rows, BATCHES["complete_many"], job_ids, tokens)
    blocked(worker, holder)
    colleague.execute("begin")

    renewed = impatient(colleague).rows(
        "select outcome from renew_many(%s, %s)", job_ids[::-1], tokens[::-1]
    )
    holder.execute("rollback")
    blocked(worker, colleague)
    again = colleague.rows(
        "select outcome from renew_many(%s, %s)", job_ids[::-1], tokens[::-1]
    )
    colleague.execute("commit")

    assert renewed == [("renewed",)] * 4 + [("busy",)] * 5
    assert again == renewed
    assert set(completing.result()) == {("completed",)}


def test_t15_a_keyed_batch_in_a_transaction_does_not_deadlock_with_completions(
    producer, worker, colleague, impatient
):
    keys = [f"key-{n}" for n in range(20)]
    producer.execute("select enqueue_many(%s)", (jobs(keys),))
    rows = worker.rows("select job_id, lease_token from claim('email', 20)")
    job_ids, tokens = [job for job, _ in rows], [token for _, token in rows]
    worker.execute("begin")
    worker.execute("select complete_many(%s, %s)", (job_ids[10:], tokens[10:]))
    producer.execute("begin")

    outcomes = impatient(producer).rows(
        "select outcome from enqueue_many(%s)", jobs(reversed(keys))
    )
    completed = impatient(worker).rows(
        "select outcome from complete_many(%s, %s)", job_ids[:10], tokens[:10]
    )
    worker.execute("commit")
    producer.execute("commit")

    assert set(outcomes) == {("existing",)}
    assert set(completed) == {("completed",)}
