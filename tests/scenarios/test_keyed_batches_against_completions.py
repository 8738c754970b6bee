"""The fault: deadlock of producers and workers.

An existing key takes no lock. No deadlock comes from our calls alone.
"""

import random
import time
from collections import Counter
from threading import Barrier, Event

import psycopg
import pytest

ITEM = {"queue": "email", "kind": "send", "payload": {}}

pytestmark = pytest.mark.usefixtures("no_wait_is_for_ever", "read_committed")


def items(keys):
    return [ITEM | {"idempotency_key": key} for key in keys]


def test_an_existing_key_in_a_transaction_neither_waits_for_a_completion_nor_blocks_it(
    client, beneath
):
    options = {"options": "-c lock_timeout=2s"}
    jobs, worker = client("accounts", **options), client("email-worker", **options)
    keys = [f"key.{n}" for n in range(20)]
    jobs.enqueue_many(items(keys))
    leases = worker.claim("email", 20)
    beneath(worker).execute("begin")
    beneath(jobs).execute("begin")
    ended = worker.complete_many(leases[10:])

    batch = jobs.enqueue_many(items(keys[::-1]))
    single = [
        jobs.enqueue("email", "send", {}, idempotency_key=key).created for key in keys
    ]
    ended += worker.complete_many(leases[4:10])
    ended += worker.fail_many([(lease, "down", True) for lease in leases[2:4]])
    renewed = [worker.renew(lease) for lease in leases[:2]]
    for session in (worker, jobs):
        beneath(session).execute("commit")

    assert {item.outcome for item in batch} == {"existing"}
    assert single == [False] * 20
    assert [item.outcome for item in ended] == ["completed"] * 16 + ["queued"] * 2
    assert len(renewed) == 2


class Storm:
    """Four sessions that loop over the same jobs."""

    def __init__(self, size, client, beneath, operator):
        self._keys = [f"key.{n}" for n in range(size)]
        self._shuffle = random.Random(15).shuffle
        self._jobs = client("accounts")
        self._worker, self._claimer = client("email-worker"), client("email-worker")
        self._operator = operator
        self._beneath = beneath
        self._held = []
        self._purged = 0
        self._is_over = Event()
        self._jobs.enqueue_many(items(self._keys))

    def enqueue(self):
        self._shuffle(self._keys)
        self._beneath(self._jobs).execute("begin")
        for key in self._keys[: len(self._keys) // 4]:
            self._jobs.enqueue("email", "send", {}, idempotency_key=key)
        self._jobs.enqueue_many(items(self._keys))
        self._beneath(self._jobs).execute("commit")

    def end(self):
        leases = self._held[:]
        del self._held[: len(leases)]
        leases.sort(key=lambda lease: lease.job_id, reverse=True)
        self._beneath(self._worker).execute("begin")
        for n, lease in enumerate(leases):
            self._worker.renew(lease)
            if n % 3:
                self._worker.complete(lease)
            else:
                self._worker.fail(lease, "down", retryable=n % 2 == 0)
        self._beneath(self._worker).execute("commit")

    def claim(self):
        self._held.extend(self._claimer.claim("email", 9))

    def purge(self):
        self._purged += self._operator.value("select purge(clock_timestamp())")

    def blow(self, seconds, background, until):
        """For so long, and until each has gone round a few times and something is gone."""
        deadline = time.monotonic() + seconds
        rounds = Counter()

        def loop(act):
            try:
                while not self._is_over.wait(0.001):
                    act()
                    rounds[act] += 1
            finally:
                self._is_over.set()

        def is_enough():
            is_late = time.monotonic() > deadline
            return is_late and self._purged and all(rounds[act] > 2 for act in acts)

        acts = (self.enqueue, self.end, self.claim, self.purge)
        loops = [background(loop, act) for act in acts]
        until(lambda: self._is_over.is_set() or is_enough())
        self._is_over.set()
        for each in loops:
            each.result()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "seconds"), [(40, 0.2), pytest.param(200, 15, marks=pytest.mark.long)]
)
def test_no_call_deadlocks_while_all_are_at_the_same_jobs(
    size, seconds, client, beneath, configure, operator, background, until, owner
):
    configure(retry_base_seconds=1, retry_max_seconds=1)

    storm = Storm(size, client, beneath, operator)
    storm.blow(seconds, background, until)
    storm.enqueue()

    assert owner.value("select count(*) from job") == size
    assert (
        owner.value(
            "select count(*) from job as j where not exists"
            " (select from live_job as l where l.job_id = j.job_id) and not exists"
            " (select from attempt as a where a.job_id = j.job_id)"
        )
        == 0
    )


def test_completions_in_opposite_orders_have_one_victim_which_may_try_again(
    quick_detection, client, beneath, background, owner
):
    first, second = client("email-worker"), client("email-worker")
    client("accounts").enqueue_many(items("ab"))
    leases = first.claim("email", 2)
    both_ended_one = Barrier(2, timeout=20)

    def complete_both(worker, leases):
        beneath(worker).execute("begin")
        worker.complete(leases[0])
        both_ended_one.wait()
        try:
            worker.complete(leases[1])
        except psycopg.Error as error:
            beneath(worker).execute("rollback")
            return error.sqlstate
        beneath(worker).execute("commit")
        return "committed"

    calls = [
        background(complete_both, first, leases),
        background(complete_both, second, leases[::-1]),
    ]
    ends = [call.result() for call in calls]

    assert sorted(ends) == ["40P01", "committed"]
    assert [w.complete(lease) for w in (first, second) for lease in leases] == [
        True
    ] * 4
    assert owner.rows("select outcome, count(*) from attempt group by 1") == [
        ("succeeded", 2)
    ]
