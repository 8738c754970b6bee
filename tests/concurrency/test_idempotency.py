"""Two sessions with one idempotency key, the first of them not yet committed."""

from __future__ import annotations

import pytest

ONE = "select job_id, created from enqueue('email', 'send', %s, %s)"
MANY = (
    "select job_id, outcome from enqueue_many(jsonb_build_array(jsonb_build_object("
    " 'queue', 'email', 'kind', 'send', 'payload', %s::jsonb,"
    " 'idempotency_key', %s::text)))"
)
VERBS = pytest.mark.parametrize("verb", ["enqueue", "enqueue_many"])


def ask(session, verb, payload='{"to": 1}', key="k"):
    """Enqueue a job by either verb. Return its id and the outcome."""
    job_id, answer = session.row(
        {"enqueue": ONE, "enqueue_many": MANY}[verb], payload, key
    ).values()
    return job_id, {True: "created", False: "existing"}.get(answer, answer)


@pytest.fixture
def in_flight(producer):
    """Enqueue key ``k`` in a transaction left open and return the job."""
    producer.execute("begin")
    job_id, _ = ask(producer, "enqueue")
    return job_id


def test_another_producer_does_not_wait_for_the_same_key(
    in_flight, other_producer, impatient
):
    job_id, outcome = ask(impatient(other_producer), "enqueue")

    assert outcome == "created"
    assert job_id != in_flight


# Rows that somebody holds, of a job that exists


@VERBS
def test_an_existing_key_returns_at_once_while_its_rows_are_locked(
    verb, producer, hold, impatient
):
    job_id, _ = ask(producer, "enqueue")
    hold(job_id, table="job")
    hold(job_id, table="live_job")

    answer = ask(impatient(producer), verb)

    assert answer == (job_id, "existing")


@VERBS
@pytest.mark.parametrize("act", ["claim", "renew", "complete", "fail"])
def test_an_existing_key_returns_at_once_while_a_worker_has_its_job(
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
def test_a_key_whose_job_is_being_purged_waits_for_the_end_of_the_purge(
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
def test_a_key_whose_job_is_purged_between_insert_and_look_is_created_anew(
    verb, producer, connect, operator, failed_job, owner, blocked, background
):
    old = failed_job(key="k", payload={"to": 1})
    owner.execute(
        "create function public.gate() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock_shared(1); return null; end $$;"
        " create trigger gate after insert on job"
        " for each statement execute function public.gate()"
    )
    admin = connect()
    admin.execute("select pg_advisory_lock(1)")
    answer = background(ask, producer, verb)
    blocked(producer, admin)

    purged = operator.value("select purge(clock_timestamp())")
    admin.execute("select pg_advisory_unlock(1)")

    job_id, outcome = answer.result()
    assert (purged, outcome) == (1, "created")
    assert job_id != old
    assert owner.rows("select job_id from job") == [(job_id,)]
    assert owner.rows("select job_id from live_job") == [(job_id,)]


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
