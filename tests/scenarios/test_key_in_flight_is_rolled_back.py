"""The fault: a key in flight is rolled back.

A rollback gives `created`, a commit gives the first job, and a time-out is no answer.
"""

import itertools

import psycopg
import pytest

MINE, OTHER = {"to": 1}, {"to": 2}
ASKED = list(itertools.product(("enqueue", "enqueue_many"), ("mine", "other")))
PAYLOADS = {"mine": MINE, "other": OTHER}

pytestmark = pytest.mark.usefixtures("no_wait_is_for_ever", "read_committed")


@pytest.fixture
def first(client):
    return client("accounts")


@pytest.fixture
def in_flight(first, beneath, verbs):
    """Enqueue one key a question in a transaction left open and return the jobs."""
    beneath(first).execute("begin")
    return {
        (verb, whose): verbs["enqueue"](first, f"{verb}.{whose}", MINE)[0]
        for verb, whose in ASKED
    }


@pytest.fixture
def answers(in_flight, first, client, beneath, verbs, background, blocked):
    """Ask for each of the keys in a new session, until all of them wait."""
    answers = {}
    for verb, whose in ASKED:
        second = client("accounts")
        answers[verb, whose] = background(
            verbs[verb], second, f"{verb}.{whose}", PAYLOADS[whose]
        )
        blocked(beneath(second), beneath(first))
    return answers


@pytest.mark.parametrize("ending", ["rollback", "kill"])
def test_the_second_caller_makes_the_job_when_the_first_is_undone(
    ending, answers, first, beneath, verbs, owner
):
    if ending == "rollback":
        beneath(first).execute("rollback")
    else:
        owner.execute("select pg_terminate_backend(%s)", (beneath(first).pid,))

    made = {asked: answer.result() for asked, answer in answers.items()}

    assert {outcome for _, outcome in made.values()} == {"created"}
    assert owner.rows("select job_id, payload from job order by job_id") == sorted(
        (job_id, PAYLOADS[whose]) for (_, whose), (job_id, _) in made.items()
    )
    assert owner.value("select count(*) from live_job") == len(ASKED)
    if ending == "kill":
        with pytest.raises(psycopg.OperationalError):
            verbs["enqueue"](first, "k", MINE)


def test_the_second_caller_finds_the_job_that_the_first_committed(
    in_flight, answers, first, beneath, owner
):
    beneath(first).execute("commit")

    for (verb, whose), answer in answers.items():
        assert answer.result() == (
            (in_flight[verb, whose], "existing")
            if whose == "mine"
            else (None, "conflict")
        )
    assert owner.rows("select distinct payload, count(*) from job group by 1") == [
        (MINE, len(ASKED))
    ]
    assert owner.value("select count(*) from live_job") == len(ASKED)


@pytest.mark.slow
def test_a_lock_timeout_raises_and_writes_nothing(
    in_flight, first, client, beneath, verbs, refused, owner
):
    second = client("accounts", options="-c lock_timeout=200ms")

    for verb, ask in verbs.items():
        with refused("55P03") as caught:
            ask(second, f"{verb}.mine", MINE)
        assert isinstance(caught.value, psycopg.errors.LockNotAvailable)
    beneath(first).execute("rollback")

    assert owner.value("select count(*) from job") == 0
    for verb, ask in verbs.items():
        job_id, outcome = ask(second, f"{verb}.mine", MINE)
        assert outcome == "created"
        assert job_id != in_flight[verb, "mine"]
