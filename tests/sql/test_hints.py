"""What a refusal tells beside its message: the nearest queue, and the job under a key."""

import re

import pytest

NONE = "Name a queue that the configuration declares."
NEAR = {
    "emial": "email",
    "Email": "email",
    "e-mail": "email",
    "emails": "email",
    "mail": "email",
    "slwo": "slow",
    "slo": "slow",
}
FAR = ["other", "e", "emailing-list", "fast", "x" * 100_000]
CALLS = {
    "enqueue": ("accounts", "enqueue(%s, 'send', '{}', 'k')", "LJ001"),
    "claim": ("email-worker", "claim(%s)", "LJ003"),
    "claim of many": ("email-worker", "claim(%s, 5)", "LJ003"),
    "next_available_at": ("email-worker", "next_available_at(%s)", "LJ003"),
    "wait_key": ("email-worker", "wait_key(%s)", "LJ003"),
    "inspect_failures": ("operations", "inspect_failures(%s)", "LJ003"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("queue", NEAR)
def test_an_undeclared_queue_is_refused_with_the_nearest_declared_one(
    connect, call, queue
):
    role, statement, code = CALLS[call]
    session = connect(role)

    with session.refusing(code) as caught:
        session.execute(f"select {statement}", (queue,))

    assert caught.value.diag.message_hint == f"Did you mean {NEAR[queue]}?"


@pytest.mark.slow
@pytest.mark.parametrize("queue", FAR)
def test_a_queue_unlike_any_declared_one_is_refused_without_a_name(worker, queue):
    with worker.refusing("LJ003") as caught:
        worker.execute("select claim(%s)", (queue,))

    assert caught.value.diag.message_hint == NONE


def test_the_nearest_of_several_queues_is_named(worker, owner):
    owner.execute("insert into queue values ('emai'), ('emailer'), ('Email')")

    with worker.refusing("LJ003") as caught:
        worker.execute("select claim('emaile')")

    assert caught.value.diag.message_hint in {
        "Did you mean email?",
        "Did you mean emailer?",
        "Did you mean Email?",
    }


def test_an_undeclared_caller_learns_no_queue(connect, owner, prefix, new_role):
    role = new_role()
    owner.execute(f'grant {prefix}_worker to "{role}"')
    session = connect(role)

    with session.refusing("LJ003") as caught:
        session.execute("select next_available_at('emial')")
    assert caught.value.diag.message_hint == NONE
    with session.refusing("42501"):
        session.execute("select claim('emial')")


def test_a_malformed_queue_is_refused_by_its_form(producer):
    with producer.refusing("LJ001") as caught:
        producer.execute("select enqueue('emai l', 'send', '{}', 'k')")

    assert "queue must be 1 to 128 characters" in caught.value.diag.message_primary


def test_a_conflict_names_the_job_that_has_the_key_and_nothing_else(
    producer, other_producer, enqueue
):
    job_id = enqueue(key="secret-key", payload={"to": "somebody"})

    with producer.refusing("LJ002") as caught:
        producer.execute("select enqueue('email', 'send', '{\"to\": 1}', 'secret-key')")

    assert caught.value.diag.message_detail == f"job_id={job_id}"
    assert not re.search("secret-key|somebody", str(caught.value))
    assert other_producer.value(
        "select created from enqueue('email', 'send', '{\"to\": 1}', 'secret-key')"
    )
