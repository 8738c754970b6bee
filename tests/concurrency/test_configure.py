"""A queue left out by configure while somebody enqueues to it.

At READ COMMITTED no job is left in a queue that nobody may claim from; a producer with
an older snapshot may put one there, and it is kept until the queue is declared again.
"""

from __future__ import annotations

import json
from contextlib import suppress

import psycopg
import pytest

CONFIGURE = "select configure(%s::jsonb)"
ENQUEUE = "select enqueue('slow', 'send', '{}', 'k')"
ENQUEUE_MANY = (
    "select outcome from enqueue_many(jsonb_build_array(jsonb_build_object("
    " 'queue', 'slow', 'kind', 'send', 'payload', '{}'::jsonb,"
    " 'idempotency_key', 'k')))"
)


@pytest.fixture
def fewer(prefix):
    """The document without the queue ``slow``."""
    return json.dumps(
        {
            "schema": "jobs_email",
            "role_prefix": prefix,
            "database_url_secret": "jobs/database-url",
            "lease_seconds": 30,
            "retry_base_seconds": 5,
            "retry_max_seconds": 300,
            "queues": ["email"],
            "producer_instances": ["accounts", "organization"],
            "worker_instances": ["email-worker", "spare-worker"],
            "observer_instances": ["operations"],
        }
    )


@pytest.fixture
def stranded(owner):
    """Count the live jobs of queues that are not declared."""

    def stranded():
        return owner.value(
            "select count(*) from live_job as l"
            " where l.queue not in (select q.queue from queue as q)"
        )

    return stranded


@pytest.mark.parametrize("call", [ENQUEUE, ENQUEUE_MANY])
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_configure_waits_for_an_enqueue_to_the_queue_it_leaves_out(
    call, ending, fewer, producer, connect, stranded, blocked, background
):
    admin = connect()
    producer.execute("begin")
    producer.execute(call)
    answer = background(admin.value, CONFIGURE, fewer)
    blocked(admin, producer)
    producer.execute(ending)

    if ending == "commit":
        with admin.refusing("LJ007"):
            answer.result()
    else:
        assert answer.result()

    assert stranded() == 0
    assert admin.value("select count(*) from queue") == (2 if ending == "commit" else 1)


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_configure_in_an_old_snapshot_strands_no_job_enqueued_since(
    isolation, fewer, producer, connect, stranded
):
    admin = connect()
    admin.execute(f"begin isolation level {isolation}")
    admin.execute("select")
    producer.execute(ENQUEUE)

    with suppress(psycopg.Error):
        admin.execute(CONFIGURE, (fewer,))
        admin.execute("commit")
    admin.execute("rollback")

    assert stranded() == 0


@pytest.mark.parametrize("call", [ENQUEUE, ENQUEUE_MANY])
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_an_enqueue_waits_for_the_configure_that_leaves_its_queue_out(
    call, ending, fewer, producer, connect, stranded, blocked, background
):
    admin = connect()
    admin.execute("begin")
    admin.execute(CONFIGURE, (fewer,))
    answer = background(producer.rows, call)
    blocked(producer, admin)
    admin.execute(ending)

    if ending == "rollback":
        answer.result()
    elif call == ENQUEUE:
        with producer.refusing("LJ001"):
            answer.result()
    else:
        assert answer.result() == [("invalid_job",)]

    assert stranded() == 0
    assert admin.value("select count(*) from live_job") == (ending == "rollback")


@pytest.mark.parametrize("call", [ENQUEUE, ENQUEUE_MANY])
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_job_enqueued_to_a_dropped_queue_from_an_old_snapshot_waits_for_its_return(
    call, isolation, fewer, producer, worker, owner
):
    producer.execute(f"begin isolation level {isolation}")
    producer.execute("select")
    owner.execute(CONFIGURE, (fewer,))
    producer.execute(call)
    producer.execute("commit")

    owner.execute(CONFIGURE, (fewer.replace('["email"]', '["email", "slow"]'),))

    assert len(worker.rows("select from claim('slow')")) == 1


def test_a_claim_waits_for_the_configure_that_leaves_its_queue_out(
    fewer, worker, connect, blocked, background
):
    admin = connect()
    admin.execute("begin")
    admin.execute(CONFIGURE, (fewer,))
    answer = background(worker.rows, "select from claim('slow')")
    blocked(worker, admin)
    admin.execute("commit")

    with worker.refusing("LJ003"):
        answer.result()


def test_two_configures_at_once_queue_up_and_the_second_finds_it_done(
    fewer, connect, owner, blocked, background
):
    first, second = connect(), connect()
    first.execute("begin")
    mine = first.value(CONFIGURE, fewer)
    answer = background(second.value, CONFIGURE, fewer)
    blocked(second, first)

    first.execute("commit")

    assert (mine, answer.result()) == (True, False)
    assert owner.value("select count(*) from operator_act where act = 'configure'") == 2


def test_a_configure_that_waits_is_not_in_the_way_of_the_one_it_waits_for(
    fewer, document, connect, owner, blocked, background
):
    first, second = connect(), connect()
    first.execute("begin")
    first.execute(CONFIGURE, (document(lease_seconds=40),))
    answer = background(second.value, CONFIGURE, document(lease_seconds=50))
    blocked(second, first)

    first.execute(CONFIGURE, (fewer,))
    first.execute("commit")

    assert answer.result() is True
    declared = [("email",), ("slow",)]
    assert owner.rows("select queue from queue order by 1") == declared
    assert owner.rows("select unnest(queues) from instance order by 1") == declared
    assert owner.value("select lease_seconds from instance") == 50


@pytest.mark.slow
def test_configure_gives_up_if_a_session_keeps_the_table_locked(
    fewer, producer, connect
):
    admin = connect()
    admin.execute("set lock_timeout = 0; set statement_timeout = '7s'")
    with producer.transaction():
        producer.execute("select enqueue('email', 'send', '{}', 'k')")

        with admin.refusing("55P03"):
            admin.execute(CONFIGURE, (fewer,))


def test_a_producer_no_longer_declared_is_refused_from_the_commit_on(
    fewer, producer, connect, owner
):
    document = json.loads(fewer) | {"producer_instances": ["organization"]}
    admin = connect()
    admin.execute("begin")
    admin.execute(CONFIGURE, (json.dumps(document | {"queues": ["email", "slow"]}),))

    before = producer.value("select created from enqueue('email', 'send', '{}', 'k')")
    admin.execute("commit")

    assert before
    with producer.refusing("42501"):
        producer.execute("select enqueue('email', 'send', '{}', 'k2')")


@pytest.mark.parametrize("act", ["pause", "resume"])
def test_pause_and_resume_wait_for_a_configure_and_never_deadlock(
    act, fewer, owner, operator, connect, blocked, background
):
    if act == "resume":
        operator.execute("select pause('email')")
    # A queue that is left out would lock the table against readers, too.
    changed = json.loads(fewer) | {"queues": ["email", "slow"], "lease_seconds": 31}
    configuring = connect()
    configuring.execute("begin")
    configuring.execute(CONFIGURE, (json.dumps(changed),))

    answer = background(operator.value, f"select {act}('email')")
    blocked(operator, configuring)
    configuring.execute("update queue set floor = floor")
    configuring.execute("commit")

    assert answer.result() is True
    assert owner.value("select paused from instance") == (
        ["email"] if act == "pause" else []
    )


@pytest.mark.parametrize("act", ["pause", "resume"])
def test_pause_and_resume_refuse_a_queue_that_a_configure_drops_meanwhile(
    act, fewer, owner, operator, blocked, background
):
    owner.execute("begin")
    owner.execute(CONFIGURE, (fewer,))
    asked = background(operator.execute, f"select {act}('slow')")
    blocked(operator, owner)

    owner.execute("commit")

    with pytest.raises(psycopg.Error) as caught:
        asked.result()
    assert caught.value.sqlstate == "LJ003"
