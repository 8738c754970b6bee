"""The fault: a batch with a known key.

One row for each item, in input order. A bad item does not spoil the others.
"""

import pytest

SAME, OTHER, SHARED = {"to": 1}, {"to": 2}, {"to": 3}


@pytest.fixture
def jobs(client):
    return client("accounts")


@pytest.fixture
def known(jobs):
    """A job that exists already under the key k2."""
    return jobs.enqueue("email", "send", SAME, idempotency_key="k2").job_id


def five(second, prefix=""):
    """The keys and payloads of the five, of which the second is known."""
    a, b, c = (f"{prefix}{key}" for key in "abc")
    return [(a, {}), ("k2", second), (b, SHARED), (b, SHARED), (c, {})]


def as_items(pairs):
    return [
        {"queue": "email", "kind": "send", "payload": payload, "idempotency_key": key}
        for key, payload in pairs
    ]


@pytest.fixture
def keys(owner):
    """The keys there are, while k2 is what it was."""

    def keys():
        (same,) = owner.rows("select payload from job where idempotency_key = 'k2'")
        assert same == (SAME,)
        assert (
            owner.rows("select job_id from job except select job_id from live_job")
            == []
        )
        rows = owner.rows("select idempotency_key from job order by 1")
        return [key for (key,) in rows]

    return keys


def test_a_batch_returns_each_item_in_its_place_and_a_conflict_spoils_no_other(
    jobs, known, keys
):
    first = jobs.enqueue_many(as_items(five(SAME)))
    after_first = keys()
    second = jobs.enqueue_many(as_items(five(OTHER, "2.")))

    for items, outcome in ((first, "existing"), (second, "conflict")):
        assert [(item.position, item.outcome) for item in items] == [
            (1, "created"),
            (2, outcome),
            (3, "created"),
            (4, "existing"),
            (5, "created"),
        ]
        assert items[3].job_id == items[2].job_id
    assert (first[1].job_id, second[1].job_id) == (known, None)
    assert after_first == ["a", "b", "c", "k2"]
    assert keys() == ["2.a", "2.b", "2.c", *after_first]


def test_one_transaction_of_five_returns_each_in_its_place_or_is_undone_by_a_conflict(
    jobs, known, beneath, verbs, refused, keys
):
    beneath(jobs).execute("begin")
    answers = [verbs["enqueue"](jobs, *pair) for pair in five(SAME)]
    beneath(jobs).execute("commit")
    after_first = keys()
    fresh, other, shared, *_ = five(OTHER, "2.")
    beneath(jobs).execute("begin")
    second = [verbs["enqueue"](jobs, *pair) for pair in (fresh, other)]
    with refused("25P02"):
        verbs["enqueue"](jobs, *shared)
    beneath(jobs).execute("commit")

    job_ids, outcomes = zip(*answers, strict=True)
    assert outcomes == ("created", "existing", "created", "existing", "created")
    assert job_ids[1] == known
    assert job_ids[3] == job_ids[2]
    assert [outcome for _, outcome in second] == ["created", "conflict"]
    assert keys() == after_first == ["a", "b", "c", "k2"]


def test_a_conflict_behind_a_savepoint_spoils_no_other_of_the_five(
    jobs, known, beneath, verbs, keys
):
    outcomes = []
    beneath(jobs).execute("begin")
    for pair in five(OTHER):
        beneath(jobs).execute("savepoint here")
        outcomes.append(verbs["enqueue"](jobs, *pair)[1])
        if outcomes[-1] == "conflict":
            beneath(jobs).execute("rollback to here")
    beneath(jobs).execute("commit")

    assert outcomes == ["created", "conflict", "created", "existing", "created"]
    assert keys() == ["a", "b", "c", "k2"]
