"""Batches that meet in opposite orders: one waits for the other, and both succeed."""

from __future__ import annotations

import itertools
from threading import Barrier

import pytest

BATCHES = {
    "complete_many": "select outcome from complete_many(%s, %s)",
    "fail_many": (
        "select outcome from fail_many(%s, %s,"
        " array_fill('smtp.down'::text, array[9]), array_fill(true, array[9]))"
    ),
}


@pytest.fixture
def leases(enqueue, worker):
    """Nine leases of ``email-worker``: the jobs, and their tokens."""
    for _ in range(9):
        enqueue()
    rows = worker.rows("select job_id, lease_token from claim('email', 9)")
    return [job_id for job_id, _ in rows], [token for _, token in rows]


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
