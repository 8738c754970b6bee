"""Every verb joins the caller's transaction: it happens with it, or not at all."""

from __future__ import annotations

import pytest

ENQUEUE_MANY = (
    "select outcome from enqueue_many(jsonb_build_array("
    " jsonb_build_object('queue', 'email', 'kind', 'send', 'payload', '{}'::jsonb,"
    "  'idempotency_key', 'm-1'),"
    " jsonb_build_object('queue', 'email', 'kind', 'send', 'payload', '{}'::jsonb,"
    "  'idempotency_key', 'm-2')))"
)
# Who calls it, the call, and what the tables hold more of once it is committed:
# jobs, live jobs, attempts, audited acts.
VERBS = {
    "enqueue": ("producer", "select enqueue('email', 'send', '{}', 'k')", (1, 1, 0, 0)),
    "enqueue_many": ("producer", ENQUEUE_MANY, (2, 2, 0, 0)),
    "claim": ("worker", "select claim('email', 10)", (0, 0, 0, 0)),
    "renew": ("worker", "select renew(%(job)s, %(token)s)", (0, 0, 0, 0)),
    "renew_many": (
        "worker",
        "select renew_many(array[%(job)s]::uuid[], array[%(token)s]::text[])",
        (0, 0, 0, 0),
    ),
    "complete": ("worker", "select complete(%(job)s, %(token)s)", (0, -1, 1, 0)),
    "complete_many": (
        "worker",
        "select complete_many(array[%(job)s]::uuid[], array[%(token)s]::text[])",
        (0, -1, 1, 0),
    ),
    "fail, retryable": (
        "worker",
        "select fail(%(job)s, %(token)s, 'smtp.down', true)",
        (0, 0, 1, 0),
    ),
    "fail, final": (
        "worker",
        "select fail(%(job)s, %(token)s, 'smtp.down', false)",
        (0, -1, 1, 0),
    ),
    "fail_many": (
        "worker",
        (
            "select fail_many(array[%(job)s]::uuid[], array[%(token)s]::text[],"
            " array['smtp.down'], array[false])"
        ),
        (0, -1, 1, 0),
    ),
    "redrive": ("operator", "select redrive(%(failed)s)", (0, 1, 0, 1)),
    "purge": ("operator", "select purge(clock_timestamp())", (-1, 0, -1, 1)),
    "erase": ("operator", "select erase(%(failed)s)", (-1, 0, -1, 1)),
    "retire_expired": ("operator", "select retire_expired(10)", (0, -1, 1, 1)),
}


@pytest.fixture
def scene(enqueue, claim, failed_job, expire):
    """A failed job, one whose last lease ran out, one leased, and one due."""
    failed = failed_job()
    lapsed = enqueue(max_attempts=1)
    claim()
    job_id = enqueue()
    _, token = claim()
    enqueue()
    expire(lapsed)
    return {"failed": failed, "job": job_id, "token": token}


def sizes(state):
    return [len(rows) for rows in state.values()]


@pytest.mark.sampled
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_in_a_transaction_rolled_back_leaves_nothing(
    verb, scene, state, request
):
    caller, call, _ = VERBS[verb]
    session = request.getfixturevalue(caller)
    before = state()

    session.execute("begin")
    session.execute(call, scene)
    session.execute("rollback")

    assert state() == before


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_in_a_transaction_is_invisible_before_the_commit_and_visible_after(
    verb, scene, state, request
):
    caller, call, growth = VERBS[verb]
    session = request.getfixturevalue(caller)
    before = state()

    session.execute("begin")
    session.execute(call, scene)
    during = state()
    session.execute("commit")
    after = state()

    assert during == before
    assert after != before
    if verb != "claim":
        assert sizes(after) == [
            size + more for size, more in zip(sizes(before), growth, strict=True)
        ]


@pytest.mark.sampled
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_undone_by_a_savepoint_leaves_nothing_of_itself_alone(
    verb, scene, state, request
):
    caller, call, _ = VERBS[verb]
    session = request.getfixturevalue(caller)
    before = state()

    session.execute("begin")
    session.execute("savepoint here")
    session.execute(call, scene)
    session.execute("rollback to here")
    session.execute("commit")

    assert state() == before


def test_effects_in_the_same_database_stand_with_a_complete_that_stands(
    scene, worker, owner
):
    owner.execute("create table public.mail (sent text)")
    owner.execute('grant insert, select on public.mail to "email-worker"')

    with worker.transaction():
        worker.execute("insert into public.mail values ('letter')")
        worker.execute("select complete(%(job)s, %(token)s)", scene)

    assert owner.rows("select sent from public.mail") == [("letter",)]


def test_effects_in_the_same_database_fall_with_a_lease_that_is_gone(
    scene, worker, owner, expire
):
    owner.execute("create table public.mail (sent text)")
    owner.execute('grant insert, select on public.mail to "email-worker"')
    expire(scene["job"])

    with worker.refusing("LJ004"), worker.transaction():
        worker.execute("insert into public.mail values ('letter')")
        worker.execute("select complete(%(job)s, %(token)s)", scene)

    assert owner.rows("select sent from public.mail") == []


def test_a_refused_verb_leaves_what_the_transaction_did_before_its_savepoint(
    producer, owner
):
    with producer.transaction():
        producer.execute("select enqueue('email', 'send', '{}', 'k')")
        with producer.refusing("LJ002"), producer.transaction():
            producer.execute("select enqueue('email', 'another', '{}', 'k')")

    assert owner.rows("select kind from job") == [("send",)]


def test_a_job_moves_from_one_queue_to_the_next_in_one_transaction(
    owner, connect, enqueue
):
    enqueue()
    session = connect()

    with session.transaction():
        session.execute('set local role "email-worker"')
        (lease,) = session.rows("select job_id, lease_token from claim('email')")
        session.execute("set local role accounts")
        session.execute("select enqueue('slow', 'follow', '{}', 'next')")
        session.execute('set local role "email-worker"')
        session.execute("select complete(%s, %s)", lease)

    assert owner.rows("select queue from live_job") == [("slow",)]
