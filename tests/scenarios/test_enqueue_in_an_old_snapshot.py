"""The fault: an enqueue in an old snapshot.

The call is refused with 40001, for another try. There is no second job.
"""

import itertools

import psycopg
import pytest

MINE, OTHER = {"to": 1}, {"to": 2}


def test_a_job_committed_since_the_snapshot_raises_40001_and_then_is_existing(
    client, beneath, verbs, refused, owner
):
    jobs, other = client("accounts"), client("accounts")
    levels = ("repeatable read", "serializable")
    asked = list(itertools.product(levels, verbs, (MINE, OTHER)))

    for level, verb, payload in asked:
        key = f"{level[:6]}.{verb}.{payload['to']}"
        beneath(jobs).execute(f"begin isolation level {level}")
        beneath(jobs).execute("select 1 from pg_class limit 1")
        first, _ = verbs["enqueue"](other, key, MINE)

        with refused("40001") as caught:
            verbs[verb](jobs, key, payload)
        beneath(jobs).execute("rollback")
        beneath(jobs).execute(f"begin isolation level {level}")
        again = verbs[verb](jobs, key, payload)
        beneath(jobs).execute("commit")

        assert isinstance(caught.value, psycopg.errors.SerializationFailure)
        assert again == ((first, "existing") if payload == MINE else (None, "conflict"))

    assert owner.rows("select payload, count(*) from job group by 1") == [
        (MINE, len(asked))
    ]
    assert owner.value("select count(*) from live_job") == len(asked)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_savepoint_does_not_hide_that_the_snapshot_is_old(
    client, beneath, verbs, refused, owner
):
    jobs, other = client(caller="accounts"), client("accounts")
    beneath(jobs).execute("begin isolation level repeatable read")
    beneath(jobs).execute("select 1 from pg_class limit 1")
    first, _ = verbs["enqueue"](other, "k", MINE)

    for ask in (*verbs.values(), verbs["enqueue"]):
        beneath(jobs).execute("savepoint here")
        with refused("40001"):
            ask(jobs, "k", MINE)
        beneath(jobs).execute("rollback to here")
    beneath(jobs).execute("rollback")

    assert verbs["enqueue"](jobs, "k", MINE) == (first, "existing")
    assert owner.rows("select job_id from job") == [(first,)]
