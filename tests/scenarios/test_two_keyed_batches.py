"""The fault: deadlock of two batches.

Keys are inserted in sorted order. One by one, the victim gets 40P01 and can repeat.
"""

import asyncio
from string import ascii_uppercase
from threading import Barrier

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from lenso_jobs import AsyncJobs, Jobs

JOB = {"queue": "email", "kind": "send", "payload": {}}

pytestmark = pytest.mark.usefixtures("no_wait_is_for_ever", "read_committed")


def items(keys, number=0):
    return [JOB | {"idempotency_key": f"{number}.{key}"} for key in keys]


def test_batches_that_both_met_a_third_do_not_deadlock(
    client, beneath, owner, blocked, background
):
    ascending, descending, third = (client("accounts") for _ in range(3))
    beneath(third).execute("begin")
    third.enqueue_many(items("M"))
    first = background(ascending.enqueue_many, items(ascii_uppercase))
    blocked(beneath(ascending), beneath(third))
    second = background(descending.enqueue_many, items(ascii_uppercase[::-1]))
    blocked(beneath(descending), beneath(ascending))

    beneath(third).execute("rollback")

    assert {item.outcome for item in first.result()} == {"created"}
    assert {item.outcome for item in second.result()} == {"existing"}
    assert owner.value("select count(*) from live_job") == len(ascii_uppercase)


@pytest.mark.parametrize("rounds", [30, pytest.param(1000, marks=pytest.mark.long)])
def test_batches_in_opposite_orders_never_deadlock(rounds, client, owner, background):
    start = Barrier(2, timeout=20)

    def enqueue_all(jobs, keys):
        outcomes = []
        for number in range(rounds):
            start.wait()
            outcomes += [
                item.outcome for item in jobs.enqueue_many(items(keys, number))
            ]
        return outcomes

    asked = [
        background(enqueue_all, client("accounts"), keys)
        for keys in (ascii_uppercase, ascii_uppercase[::-1])
    ]
    outcomes = [outcome for call in asked for outcome in call.result()]

    all_keys = rounds * len(ascii_uppercase)
    assert outcomes.count("created") == outcomes.count("existing") == all_keys
    assert owner.value("select count(*) from live_job") == all_keys


def test_one_by_one_one_is_the_victim_and_may_try_again(
    quick_detection, client, beneath, verbs, owner, background
):
    both_hold_one = Barrier(2, timeout=20)
    sessions = [(client("accounts"), "ab"), (client("accounts"), "ba")]

    def enqueue_both(jobs, keys):
        beneath(jobs).execute("begin")
        verbs["enqueue"](jobs, keys[0], {})
        both_hold_one.wait()
        try:
            verbs["enqueue"](jobs, keys[1], {})
        except psycopg.Error as error:
            beneath(jobs).execute("rollback")
            return error.sqlstate
        beneath(jobs).execute("commit")
        return "committed"

    calls = [background(enqueue_both, *session) for session in sessions]
    ends = [call.result() for call in calls]
    again = [
        verbs["enqueue"](jobs, key, {})[1] for jobs, keys in sessions for key in keys
    ]

    assert sorted(ends) == ["40P01", "committed"]
    assert again == ["existing"] * 4
    assert owner.value("select count(*) from live_job") == 2


@pytest.fixture
def judge(owner):
    """One of two lost to the other, may try again, and left no connection stuck."""

    def judge(ends, again):
        (victim,) = [end for end in ends if end is not None]
        assert isinstance(victim, psycopg.errors.DeadlockDetected)
        assert [job.created for job in again] == [False, False]
        assert owner.value("select count(*) from live_job") == 2
        assert owner.rows(
            "select state, count(*) from pg_stat_activity"
            " where datname = current_database() and usename = 'accounts' group by 1"
        ) == [("idle", 2)]

    return judge


def test_a_victim_gives_its_connection_back_to_the_pool(
    quick_detection, conninfo, background, judge
):
    both_hold_one = Barrier(2, timeout=20)

    def enqueue_both(pool, keys):
        with pool.connection() as connection:
            jobs = Jobs(connection, "jobs_email")
            jobs.enqueue("email", "send", {}, idempotency_key=keys[0])
            both_hold_one.wait()
            jobs.enqueue("email", "send", {}, idempotency_key=keys[1])

    url = make_conninfo(conninfo, user="accounts")
    with ConnectionPool(url, min_size=2, max_size=2, open=True) as pool:
        calls = [background(enqueue_both, pool, keys) for keys in ("ab", "ba")]
        ends = [call.exception() for call in calls]
        jobs = Jobs(pool, "jobs_email")
        again = [jobs.enqueue("email", "send", {}, idempotency_key=key) for key in "ab"]

        judge(ends, again)
        assert pool.get_stats()["pool_available"] == 2


def test_a_victim_gives_its_connection_back_to_the_async_pool(
    quick_detection, conninfo, judge
):
    async def enqueue_both(pool, keys, both_hold_one):
        async with pool.connection() as connection:
            jobs = AsyncJobs(connection, "jobs_email")
            await jobs.enqueue("email", "send", {}, idempotency_key=keys[0])
            await both_hold_one.wait()
            await jobs.enqueue("email", "send", {}, idempotency_key=keys[1])

    async def run():
        url = make_conninfo(conninfo, user="accounts")
        async with AsyncConnectionPool(url, min_size=2, max_size=2, open=False) as pool:
            both_hold_one = asyncio.Barrier(2)
            ends = await asyncio.gather(
                *(enqueue_both(pool, keys, both_hold_one) for keys in ("ab", "ba")),
                return_exceptions=True,
            )
            jobs = AsyncJobs(pool, "jobs_email")
            again = [
                await jobs.enqueue("email", "send", {}, idempotency_key=key)
                for key in "ab"
            ]

            judge(ends, again)
            assert pool.get_stats()["pool_available"] == 2

    asyncio.run(run())
