"""The fault: a conflict with a row that is not visible.

Every call returns a job. There is one job for each key.
"""

from threading import Barrier, Event

import psycopg
import pytest

KEYS = [f"key.{n}" for n in range(10)]
MINE, OTHER = {"to": 1}, {"to": 2}

pytestmark = pytest.mark.usefixtures("no_wait_is_for_ever", "read_committed")


def item(key, payload):
    return {
        "queue": "email",
        "kind": "send",
        "payload": payload,
        "idempotency_key": key,
    }


def test_a_call_that_waited_for_a_commit_returns_the_job_that_it_could_not_see(
    client, beneath, verbs, background, blocked
):
    first, second, third = (client("accounts") for _ in range(3))
    beneath(first).execute("begin")
    made = [verbs["enqueue"](first, key, MINE)[0] for key in ("k", "l")]
    one = background(verbs["enqueue"], second, "k", MINE)
    blocked(beneath(second), beneath(first))
    many = background(
        third.enqueue_many,
        [item("z", MINE), item("l", MINE), item("l", OTHER), item("a", MINE)],
    )
    blocked(beneath(third), beneath(first))

    beneath(first).execute("commit")

    assert one.result() == (made[0], "existing")
    items = many.result()
    assert [(i.position, i.outcome) for i in items] == [
        (1, "created"),
        (2, "existing"),
        (3, "conflict"),
        (4, "created"),
    ]
    assert items[1].job_id == made[1]
    assert items[2].job_id is None
    assert len({items[0].job_id, items[3].job_id, *made}) == 4


@pytest.fixture
def rush(client, verbs, background):
    """Have sessions enqueue the ten keys again and again, while workers drain the queue.

    Returns the payload, key, job and outcome of each call. A call above
    READ COMMITTED may lose to another, and is made once more.
    """

    def rush(sessions, calls, **connecting):
        start, is_over = Barrier(sessions), Event()

        def ask(number, jobs):
            answers = []
            start.wait(20)
            for turn in range(calls):
                key = KEYS[(number + turn) % len(KEYS)]
                payload = OTHER if (number + turn) % 7 == 0 else MINE
                verb = verbs["enqueue_many" if turn % 3 == 0 else "enqueue"]
                while True:
                    try:
                        answer = verb(jobs, key, payload)
                    except psycopg.errors.SerializationFailure:
                        assert connecting
                        continue
                    break
                answers.append((payload["to"], key, *answer))
            return answers

        def drain(worker):
            done = 0
            while not is_over.wait(0.01):
                if leases := worker.claim("email", 3):
                    done += len(worker.complete_many(leases))
            return done + len(worker.claim("email", len(KEYS)))

        drained = [background(drain, client("email-worker")) for _ in range(2)]
        asked = [
            background(ask, n, client("accounts", **connecting))
            for n in range(sessions)
        ]
        try:
            answers = [answer for call in asked for answer in call.result()]
        finally:
            is_over.set()
        assert sum(call.result() for call in drained) == len(KEYS)
        return answers

    return rush


def judge(answers, owner):
    """Every call was answered, and as the first of its key demands."""
    jobs = {
        key: (payload["to"], job_id)
        for key, job_id, payload in owner.rows(
            "select idempotency_key, job_id, payload from job"
        )
    }
    assert jobs.keys() == set(KEYS)
    for to, key, job_id, outcome in answers:
        if to == jobs[key][0]:
            assert (job_id, outcome in {"created", "existing"}) == (jobs[key][1], True)
        else:
            assert (job_id, outcome) == (None, "conflict")
    outcomes = [outcome for *_, outcome in answers]
    assert outcomes.count("created") == len(KEYS)
    assert "conflict" in outcomes
    assert owner.rows("select distinct outcome, attempt from attempt") == [
        ("succeeded", 1)
    ]


@pytest.mark.slow
def test_a_rush_for_ten_keys_makes_one_job_a_key(rush, owner):
    judge(rush(sessions=8, calls=15), owner)


@pytest.mark.parametrize("way", ["sql"])
def test_a_rush_above_read_committed_makes_one_job_a_key(rush, owner):
    answers = rush(
        sessions=8,
        calls=15,
        options="-c default_transaction_isolation=repeatable\\ read",
    )

    judge(answers, owner)


@pytest.mark.long
def test_a_long_rush_for_ten_keys_makes_one_job_a_key(rush, owner):
    judge(rush(sessions=16, calls=1000), owner)
