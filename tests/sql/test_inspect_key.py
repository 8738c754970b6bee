"""Inspect a job by its idempotency key."""

import pytest

KEY = "select * from inspect_key(%s, %s)"


@pytest.fixture
def both(enqueue, other_producer):
    """Enqueue jobs of two producers under one key; returns their ids."""
    return enqueue(key="order:1"), enqueue(key="order:1", session=other_producer)


def test_inspect_key_returns_what_inspect_returns(
    both, producer, observer, operator, other_producer
):
    mine, theirs = both

    assert producer.row("select * from inspect_key('order:1')") == producer.row(
        "select * from inspect(%s)", mine
    )
    assert producer.row(KEY, "order:1", "accounts")["job_id"] == mine
    assert other_producer.row(KEY, "order:1", None)["job_id"] == theirs
    for session in (observer, operator):
        for name, job_id in (("accounts", mine), ("organization", theirs)):
            row = session.row(KEY, "order:1", name)
            assert (row["job_id"], row["producer"]) == (job_id, name)


@pytest.mark.usefixtures("both")
def test_inspect_key_shows_a_producer_no_key_of_another(producer, operator):
    calls = [
        (producer, ("order:1", "organization")),
        (producer, ("order:2", None)),
        (producer, ("order:2", "organization")),
        (producer, (None, None)),
        (operator, ("order:1", None)),
        (operator, ("order:1", "nobody")),
    ]
    refusals = set()

    for session, arguments in calls:
        with session.refusing("LJ006") as caught:
            session.row(KEY, *arguments)
        refusals.add(
            (caught.value.diag.message_primary, caught.value.diag.message_hint)
        )

    assert len(refusals) == 1


def test_inspect_key_finds_the_job_that_has_the_key_now(
    enqueue, claim, worker, operator, producer
):
    first = enqueue(key="order:1")
    worker.execute("select complete(%s, %s)", claim())
    operator.execute("select erase(%s)", (first,))
    with producer.refusing("LJ006"):
        producer.row(KEY, "order:1", None)

    second = enqueue(key="order:1")
    assert producer.row(KEY, "order:1", None)["job_id"] == second
