"""Two sessions with one idempotency key, the first of them not yet committed."""

from __future__ import annotations

from threading import Barrier

import psycopg
import pytest

ONE = "select job_id, created from enqueue('email', 'send', %s, %s)"
MANY = (
    "select job_id, outcome from enqueue_many(jsonb_build_array(jsonb_build_object("
    " 'queue', 'email', 'kind', 'send', 'payload', %s::jsonb,"
    " 'idempotency_key', %s::text)))"
)
VERBS = pytest.mark.parametrize("verb", ["enqueue", "enqueue_many"])


def ask(session, verb, payload='{"to": 1}', key="k"):
    """Enqueue; answers the job and what became of it, alike for both verbs."""
    job_id, answer = session.row(
        {"enqueue": ONE, "enqueue_many": MANY}[verb], payload, key
    ).values()
    return job_id, {True: "created", False: "existing"}.get(answer, answer)


@pytest.fixture
def twin(connect):
    """Another session of ``accounts``."""
    return connect("accounts")


@pytest.fixture
def in_flight(producer):
    """Enqueue key ``k`` in a transaction left open; answers the job."""
    producer.execute("begin")
    job_id, _ = ask(producer, "enqueue")
    return job_id


@VERBS
def test_t09_the_second_waits_and_creates_when_the_first_is_rolled_back(
    verb, producer, twin, in_flight, owner, blocked, background
):
    answer = background(ask, twin, verb)
    blocked(twin, producer)

    producer.execute("rollback")

    job_id, outcome = answer.result()
    assert outcome == "created"
    assert owner.rows("select job_id from job") == [(job_id,)]
    assert owner.rows("select job_id from live_job") == [(job_id,)]


@VERBS
def test_t09_the_second_waits_and_creates_when_the_first_is_killed(
    verb, producer, twin, in_flight, owner, blocked, background
):
    answer = background(ask, twin, verb)
    blocked(twin, producer)

    owner.execute("select pg_terminate_backend(%s)", (producer.pid,))

    job_id, outcome = answer.result()
    assert outcome == "created"
    assert owner.rows("select job_id from job") == [(job_id,)]


@VERBS
def test_t10_the_second_waits_and_finds_the_job_the_first_committed(
    verb, producer, twin, in_flight, owner, blocked, background
):
    answer = background(ask, twin, verb)
    blocked(twin, producer)

    producer.execute("commit")

    assert answer.result() == (in_flight, "existing")
    assert owner.rows("select job_id from live_job") == [(in_flight,)]


@VERBS
def test_t09_another_intent_waits_and_conflicts_with_the_job_the_first_committed(
    verb, producer, twin, in_flight, owner, blocked, background
):
    answer = background(ask, twin, verb, '{"to": 2}')
    blocked(twin, producer)
    producer.execute("commit")

    if verb == "enqueue":
        with twin.refusing("LJ002"):
            answer.result()
    else:
        assert answer.result() == (None, "conflict")

    assert owner.rows("select payload from job") == [({"to": 1},)]


@VERBS
def test_t09_another_intent_is_created_when_the_first_is_rolled_back(
    verb, producer, twin, in_flight, owner, blocked, background
):
    answer = background(ask, twin, verb, '{"to": 2}')
    blocked(twin, producer)

    producer.execute("rollback")

    assert answer.result()[1] == "created"
    assert owner.rows("select payload from job") == [({"to": 2},)]


@VERBS
def test_t09_a_lock_timeout_reaches_the_second_and_nothing_is_written(
    verb, producer, twin, in_flight, owner
):
    twin.execute("set lock_timeout = '200 ms'")

    with twin.refusing("55P03"):
        ask(twin, verb)

    producer.execute("rollback")
    assert owner.value("select count(*) from job") == 0
    assert owner.value("select count(*) from live_job") == 0


def test_another_producer_does_not_wait_for_the_same_key(
    in_flight, other_producer, impatient
):
    job_id, outcome = ask(impatient(other_producer), "enqueue")

    assert outcome == "created"
    assert job_id != in_flight


def test_a_batch_answers_each_item_by_how_the_transaction_it_waited_for_ended(
    producer, twin, in_flight, blocked, background
):
    items = (
        "select outcome from enqueue_many((select jsonb_agg(jsonb_build_object("
        " 'queue', 'email', 'kind', 'send', 'payload', p::jsonb, 'idempotency_key', k))"
        " from (values (%s, 'a'), (%s, 'k'), (%s, 'k'), (%s, 'z')) as v (p, k)))"
    )
    payloads = ('{"to": 1}', '{"to": 1}', '{"to": 2}', '{"to": 1}')
    answer = background(twin.rows, items, *payloads)
    blocked(twin, producer)

    producer.execute("commit")

    assert answer.result() == [("created",), ("existing",), ("conflict",), ("created",)]


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_t10_sixteen_sessions_over_four_keys_make_one_job_a_key(
    isolation, connect, owner, background
):
    start = Barrier(16, timeout=20)

    def ask_all(session):
        session.execute(f"set default_transaction_isolation = '{isolation}'")
        answers = []
        start.wait()
        for turn in range(20):
            try:
                answers.append(ask(session, "enqueue", key=f"k-{turn % 4}"))
            except psycopg.errors.SerializationFailure:
                assert isolation == "repeatable read"
        return answers

    asked = [background(ask_all, connect("accounts")) for _ in range(16)]
    answers = [answer for asking in asked for answer in asking.result()]

    jobs = {job_id for (job_id,) in owner.rows("select job_id from job")}
    assert len(jobs) == 4
    assert {job_id for job_id, _ in answers} == jobs
    assert [outcome for _, outcome in answers].count("created") == 4


# Rows that somebody holds, of a job that exists


@VERBS
def test_an_existing_key_is_answered_at_once_while_its_rows_are_locked(
    verb, producer, hold, impatient
):
    job_id, _ = ask(producer, "enqueue")
    hold(job_id, table="job")
    hold(job_id, table="live_job")

    answer = ask(impatient(producer), verb)

    assert answer == (job_id, "existing")


@VERBS
@pytest.mark.parametrize("act", ["claim", "renew", "complete", "fail"])
def test_an_existing_key_is_answered_at_once_while_a_worker_is_at_its_job(
    verb, act, producer, worker, claim, impatient
):
    job_id, _ = ask(producer, "enqueue")
    if act == "claim":
        worker.execute("begin")
        claim()
    else:
        lease = claim()
        worker.execute("begin")
        worker.execute(
            {
                "renew": "select renew(%s, %s)",
                "complete": "select complete(%s, %s)",
                "fail": "select fail(%s, %s, 'smtp.down', false)",
            }[act],
            lease,
        )

    answer = ask(impatient(producer), verb)

    assert answer == (job_id, "existing")


@VERBS
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_an_existing_key_locks_nothing_that_its_job_needs(
    verb, ending, producer, worker, claim, operator, impatient
):
    job_id, _ = ask(producer, "enqueue")
    lease = claim()
    producer.execute("begin")
    ask(producer, verb)

    impatient(worker).execute("select fail(%s, %s, 'smtp.down', false)", lease)
    impatient(operator).execute("select redrive(%s)", (job_id,))
    _, token = claim()
    worker.execute("select complete(%s, %s)", (job_id, token))
    purged = operator.value("select purge(clock_timestamp())")
    producer.execute(ending)

    assert purged == 1


@VERBS
@pytest.mark.parametrize(
    ("ending", "outcome"), [("commit", "created"), ("rollback", "existing")]
)
def test_a_key_whose_job_is_being_purged_is_answered_by_how_the_purge_ends(
    verb, ending, outcome, producer, operator, failed_job, owner, blocked, background
):
    old = failed_job(key="k", payload={"to": 1})
    operator.execute("begin")
    purged = operator.value("select purge(clock_timestamp())")
    answer = background(ask, producer, verb)
    blocked(producer, operator)

    operator.execute(ending)

    job_id, answered = answer.result()
    assert purged == 1
    assert answered == outcome
    assert (job_id == old) == (outcome == "existing")
    assert owner.rows("select job_id from job") == [(job_id,)]
    assert owner.value("select count(*) from live_job") == (outcome == "created")


@VERBS
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_key_whose_job_is_being_redriven_is_existing_however_the_redrive_ends(
    verb, ending, producer, operator, failed_job, blocked, background
):
    job_id = failed_job(key="k", payload={"to": 1})
    operator.execute("begin")
    operator.execute("select redrive(%s)", (job_id,))
    answer = background(ask, producer, verb)
    blocked(producer, operator)

    operator.execute(ending)

    assert answer.result() == (job_id, "existing")
