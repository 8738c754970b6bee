"""Who is notified of a job, and when nothing is sent."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest

EMAIL = ("jobs_email", "email")
SLOW = ("jobs_email", "slow")
ENQUEUE = "select enqueue('email', 'send', '{}', %s)"
ADVISORY = (
    "select pid, mode from pg_locks where locktype = 'advisory' and database ="
    " (select oid from pg_database where datname = current_database())"
)


def item(queue="email", key=None, **changes):
    return {
        "queue": queue,
        "kind": "send",
        "payload": {},
        "idempotency_key": key or f"key-{uuid4()}",
    } | changes


@pytest.fixture
def enqueue_many(producer):
    """Enqueue items as ``accounts`` and return their outcomes."""

    def enqueue_many(*items):
        return [
            outcome
            for (outcome,) in producer.rows(
                "select outcome from enqueue_many(%s::jsonb)", json.dumps(items)
            )
        ]

    return enqueue_many


@pytest.fixture(params=["enqueue", "enqueue_many", "fail", "fail_many", "redrive"])
def put(request, enqueue, enqueue_many, claim, worker, operator):
    """Put a job into ``email``, each way in turn; what comes before is done by now."""
    if request.param == "enqueue":
        return enqueue
    if request.param == "enqueue_many":
        return lambda: enqueue_many(item(), item())
    enqueue()
    lease = claim()
    if request.param == "fail":
        return lambda: worker.execute("select fail(%s, %s, 'down', true)", lease)
    if request.param == "fail_many":
        return lambda: worker.execute(
            "select fail_many(array[%s], array[%s], array['down'], array[true])", lease
        )
    worker.execute("select fail(%s, %s, 'down', false)", lease)
    return lambda: operator.execute("select redrive(%s)", lease[:1])


def test_a_notification_holds_the_queue_s_name_and_nothing_else(put, waiting, heard):
    waiter, another = waiting("email"), waiting("email")

    put()

    assert heard(waiter) == heard(another) == [EMAIL]


def test_nothing_is_sent_while_no_session_waits_for_the_queue(
    put, waiting, heard, enqueue
):
    enqueue(queue="slow")
    listener, elsewhere = waiting(), waiting("slow")

    put()

    assert heard(listener) == heard(elsewhere) == []


def test_nothing_is_sent_where_the_document_says_so(put, waiting, heard, configure):
    waiter = waiting("email")
    configure(notify=False)

    put()

    assert heard(waiter) == []
    assert waiter.value("select wait_key('email')") is None


def test_nothing_is_sent_once_the_last_waiter_has_gone(enqueue, waiting, heard):
    listener, waiter, another = waiting(), waiting("email"), waiting("email")

    waiter.execute("select pg_advisory_unlock_shared(wait_key('email'))")
    enqueue()
    while_one_waits = heard(listener)
    another.execute("select pg_advisory_unlock_shared(wait_key('email'))")
    enqueue()

    assert while_one_waits == [EMAIL]
    assert heard(listener) == []


def test_a_notification_is_sent_as_the_transaction_commits(producer, waiting, heard):
    waiter = waiting("email")

    with producer.transaction():
        producer.execute(ENQUEUE, ("a",))
        producer.execute(ENQUEUE, ("b",))
        before = heard(waiter)

    assert before == []
    assert heard(waiter) == [EMAIL]


def test_a_rollback_sends_no_notification(producer, waiting, heard):
    waiter = waiting("email")

    with producer.transaction(force_rollback=True):
        producer.execute(ENQUEUE, ("a",))
    with producer.transaction():
        with producer.transaction(force_rollback=True):
            producer.execute(ENQUEUE, ("b",))
        producer.execute("select enqueue('slow', 'send', '{}', 'c')")

    assert heard(waiter) == []


def test_a_repeated_enqueue_sends_no_notification(enqueue, waiting, heard):
    enqueue(key="a")
    waiter = waiting("email")

    enqueue(key="a")

    assert heard(waiter) == []


def test_a_refused_enqueue_sends_no_notification(enqueue, producer, waiting, heard):
    enqueue(key="a")
    waiter = waiting("email")

    with producer.refusing("LJ002"):
        enqueue(key="a", kind="other")
    with producer.refusing("LJ001"):
        enqueue(key="b", kind="no kind")

    assert heard(waiter) == []


def test_a_batch_sends_one_notification_for_each_queue_that_got_a_job(
    enqueue_many, waiting, heard
):
    waiter = waiting("email", "slow")

    outcomes = enqueue_many(item(), item("slow"), item(), item("slow"), item())

    assert outcomes == ["created"] * 5
    assert sorted(heard(waiter)) == [EMAIL, SLOW]


def test_a_batch_notifies_of_the_queues_that_are_waited_for_only(
    enqueue_many, waiting, heard
):
    waiter = waiting("slow")

    enqueue_many(item(), item("slow"))

    assert heard(waiter) == [SLOW]


def test_items_that_make_no_job_send_no_notification(
    enqueue, enqueue_many, waiting, heard
):
    enqueue(key="a", kind="send")
    waiter = waiting("email", "slow")
    useless = (
        item(key="a"),
        item(key="a", kind="other"),
        item(kind="no kind"),
        item("undeclared"),
    )

    outcomes = enqueue_many(*useless)
    alone = heard(waiter)
    enqueue_many(*useless, item("slow"))

    assert outcomes == ["existing", "conflict", "invalid_job", "invalid_job"]
    assert alone == []
    assert heard(waiter) == [SLOW]


def test_a_scheduled_job_is_notified_of_when_it_is_enqueued(enqueue, waiting, heard):
    waiter = waiting("email")

    enqueue(available_at="2040-01-01 00:00:00+00")

    assert heard(waiter) == [EMAIL]


def test_the_end_of_a_job_sends_no_notification(enqueue, claim, worker, waiting, heard):
    enqueue(max_attempts=1)
    enqueue()
    enqueue()
    last_attempt, refused, done = claim(), claim(), claim()
    waiter = waiting("email")

    worker.execute("select fail(%s, %s, 'down', true)", last_attempt)
    worker.execute("select fail(%s, %s, 'down', false)", refused)
    worker.execute("select complete(%s, %s)", done)

    assert heard(waiter) == []


def test_a_failure_reported_twice_is_notified_of_once(
    enqueue, claim, worker, waiting, heard
):
    enqueue()
    lease = claim()
    waiter = waiting("email")

    worker.execute("select fail(%s, %s, 'down', true)", lease)
    worker.execute("select fail(%s, %s, 'down', true)", lease)

    assert heard(waiter) == [EMAIL]


def test_failures_notify_of_the_queues_that_got_a_job_back(
    enqueue, claim, worker, waiting, heard
):
    leases = []
    for queue in ("email", "email", "slow", "slow"):
        enqueue(queue)
        leases.append(claim(queue))
    waiter = waiting("email", "slow")

    outcomes = worker.rows(
        "select outcome from fail_many("
        "%s, %s, array['a', 'a', 'a', 'no code'], array[true, true, false, true])",
        [job_id for job_id, _ in leases],
        [token for _, token in leases],
    )

    assert outcomes == [("queued",), ("queued",), ("failed",), ("invalid_failure",)]
    assert heard(waiter) == [EMAIL]


# The key.


def test_an_enqueue_leaves_no_advisory_lock_behind(
    producer, enqueue_many, waiting, owner
):
    with producer.transaction():
        producer.execute(ENQUEUE, ("a",))
        enqueue_many(item())
        while_nobody_waits = owner.rows(ADVISORY)
    waiter = waiting("email")
    with producer.transaction():
        producer.execute(ENQUEUE, ("b",))
        enqueue_many(item())
        while_somebody_waits = owner.rows(ADVISORY)

    assert while_nobody_waits == []
    assert while_somebody_waits == [(waiter.pid, "ShareLock")]
    assert owner.rows(ADVISORY) == [(waiter.pid, "ShareLock")]


def test_a_session_that_waits_itself_keeps_its_key_through_an_enqueue(
    producer, worker, enqueue, enqueue_many, owner
):
    key = worker.value("select wait_key('email')")
    producer.execute("select pg_advisory_lock_shared(%s)", (key,))

    with producer.transaction():
        enqueue()
        enqueue_many(item())

    assert owner.rows(ADVISORY) == [(producer.pid, "ShareLock")]
    assert producer.value("select pg_advisory_unlock_shared(%s)", key)
    assert owner.rows(ADVISORY) == []


def test_a_stranger_with_the_key_delays_no_caller_and_wakes_waiting_workers(
    stranger, worker, producer, operator, waiting, heard, enqueue_many
):
    key = worker.value("select wait_key('email')")
    stranger.execute("select pg_advisory_lock(%s)", (key,))
    waiter = waiting()
    for session in (producer, worker, operator, waiter):
        session.execute("set lock_timeout = '1s'")

    got_it = waiter.value("select pg_try_advisory_lock_shared(wait_key('email'))")
    producer.execute(ENQUEUE, ("a",))
    producer.execute("reset all")  # else it would be silent for 20 ms
    enqueue_many(item())
    leases = worker.rows("select job_id, lease_token from claim('email', 2)")
    for lease, retryable in zip(leases, (True, False), strict=True):
        worker.execute("select fail(%s, %s, 'down', %s)", (*lease, retryable))
    operator.execute("select redrive(%s)", leases[1][:1])

    assert not got_it
    assert heard(waiter) == [EMAIL] * 4


def test_every_worker_gets_the_same_key_and_each_queue_has_another(worker, rival):
    email, slow = (worker.value("select wait_key(%s)", q) for q in ("email", "slow"))

    assert rival.value("select wait_key('email')") == email
    assert email != slow


@pytest.mark.parametrize("queue", ["undeclared", "Email", "", None])
def test_an_undeclared_queue_has_no_key(queue, worker):
    with worker.refusing("LJ003"):
        worker.value("select wait_key(%s)", queue)


@pytest.mark.parametrize("role", ["producer", "observer", "operator", "stranger"])
def test_only_workers_get_the_key(role, request):
    session = request.getfixturevalue(role)

    with session.refusing("42501"):
        session.value("select jobs_email.wait_key('email')")


# PREPARE TRANSACTION.


@pytest.fixture
def gid(owner):
    """The name of a prepared transaction, which is rolled back if it is left."""
    if owner.value("show max_prepared_transactions") == "0":
        pytest.skip("the server's max_prepared_transactions is 0")
    gid = f"wake-ups-{uuid4()}"
    yield gid
    if owner.rows("select from pg_prepared_xacts where gid = %s", gid):
        owner.execute(f"rollback prepared '{gid}'")


def test_an_enqueue_can_be_prepared_while_no_session_waits(
    gid, producer, enqueue, claim, worker
):
    producer.execute("begin")
    job_id = enqueue()
    producer.execute(f"prepare transaction '{gid}'")
    prepared = worker.rows("select * from claim('email')")
    producer.execute(f"commit prepared '{gid}'")

    assert prepared == []
    assert claim()[0] == job_id


def test_an_enqueue_can_be_prepared_at_any_time_where_nothing_is_sent(
    gid, producer, enqueue, enqueue_many, worker, waiting, configure
):
    waiting("email")
    configure(notify=False)

    producer.execute("begin")
    enqueue()
    enqueue_many(item())
    producer.execute(f"prepare transaction '{gid}'")
    producer.execute(f"commit prepared '{gid}'")

    assert len(worker.rows("select * from claim('email', 10)")) == 2


def test_an_enqueue_that_notifies_cannot_be_prepared(
    gid, producer, enqueue, waiting, heard, state
):
    waiter = waiting("email")
    before = state()

    producer.execute("begin")
    enqueue()
    with producer.refusing("0A000") as refused:
        producer.execute(f"prepare transaction '{gid}'")

    assert "NOTIFY" in str(refused.value)
    assert state() == before
    assert heard(waiter) == []


NOW = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint"


@pytest.fixture
def notified_at(producer, worker):
    """Say that the producer's session notified ``email``, as its setting keeps it."""
    key = worker.value("select wait_key('email')")

    def notified_at(value):
        return producer.value(
            f"select set_config('lenso_jobs.woke_' || to_hex(%s::bigint), {value}, false)",
            key,
        )

    return notified_at


def test_a_session_that_has_just_notified_a_queue_does_not_notify_it_again(
    notified_at, producer, enqueue, enqueue_many, waiting, heard
):
    waiter = waiting("email", "slow")

    def takes_less_than_the_pause():
        producer.execute("reset all")
        began = int(notified_at(f"{NOW}::text"))
        enqueue()
        enqueue_many(item(), item(queue="slow"))
        enqueue_many(item(), item())
        return producer.value(f"select {NOW}") - began < 20_000

    while not takes_less_than_the_pause():  # a busy machine may be slower
        heard(waiter)

    assert heard(waiter) == [SLOW]


@pytest.mark.parametrize(
    "value",
    [
        f"({NOW} - 20000)::text",
        f"({NOW} + 3600000000)::text",
        *("''", "'0'", "'garbage'", "'-1'", "repeat('9', 400)", "'1e3'", "' 1'"),
    ],
)
def test_an_old_or_forged_notification_silences_nothing(
    value, notified_at, enqueue, waiting, heard
):
    waiter = waiting("email")
    notified_at(value)

    enqueue()

    assert heard(waiter) == [EMAIL]


def test_a_notification_that_was_rolled_back_silences_nothing(
    producer, enqueue, waiting, heard
):
    waiter = waiting("email")
    with producer.transaction(force_rollback=True):
        enqueue()

    enqueue()

    assert heard(waiter) == [EMAIL]
