from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from itertools import islice

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

from lenso_jobs import (
    InvalidArgument,
    InvalidQueue,
    Jobs,
    Unauthorized,
    _client,
    _waiting,
)

FOR_EVER = 60.0
LOOKS = {
    "claim": lambda jobs, seconds, queue="email": jobs.claim(queue, wait=seconds),
    "wait": lambda jobs, seconds, queue="email": jobs.wait(queue, seconds),
}


@pytest.fixture(params=LOOKS)
def look(request):
    """The two calls that wait."""
    return LOOKS[request.param]


@pytest.fixture
def naps(monkeypatch, acts):
    """The lengths of all sleeps that waits meant to take."""
    naps = []
    sleep = _client.Waiter.sleep

    def noted(waiter, seconds):
        naps.append(seconds)
        if acts:
            acts.popleft()()
        sleep(waiter, seconds)

    monkeypatch.setattr(_client.Waiter, "sleep", noted)
    return naps


LISTENERS = {
    "connection": lambda client, *_: client("email-worker"),
    "connection with a caller": lambda client, _, replica: client(
        replica, caller="email-worker"
    ),
    "pool": lambda _, pool, __: Jobs(pool("email-worker"), "jobs_email"),
    "pool in autocommit": lambda _, pool, __: Jobs(
        pool("email-worker", autocommit=True), "jobs_email"
    ),
    "pool with a caller": lambda _, pool, replica: Jobs(
        pool(replica), "jobs_email", caller="email-worker"
    ),
}


@pytest.fixture(params=LISTENERS)
def listener(request, client, pool, replica):
    """A client that can listen, on each thing it may stand on."""
    return LISTENERS[request.param](client, pool, replica)


@pytest.fixture(params=["in a transaction", "without autocommit"])
def joined(request, client, replica):
    """A client whose calls join a transaction, which it must not end."""
    jobs = client(
        replica, caller="email-worker", autocommit=request.param == "in a transaction"
    )
    if request.param == "in a transaction":
        jobs._source.execute("begin")
    return jobs


@contextlib.contextmanager
def connection_of(jobs):
    if isinstance(jobs._source, psycopg.Connection):
        yield jobs._source
    else:
        with jobs._source.connection() as connection:
            yield connection


@pytest.fixture
def untouched(locks):
    """Insist that a session is idle and listens to nothing, and that nobody has a lock."""

    def untouched(jobs, autocommit):
        with connection_of(jobs) as connection:
            assert connection.info.transaction_status is TransactionStatus.IDLE
            assert connection.autocommit == autocommit
            assert locks() == []
            listening = connection.execute("select pg_listening_channels()").fetchall()
            assert listening == []

    return untouched


# Woken.


def test_an_enqueue_ends_the_sleep_of_the_session_that_holds_the_queue_s_key(
    listener, naps, acts, pausing, enqueue, locks
):
    before = []
    asked = pausing(FOR_EVER)
    acts.append(lambda: before.extend(locks()) or enqueue())
    start = time.monotonic()

    found = listener.wait("email", 20)

    assert found
    assert time.monotonic() - start < 10
    assert len(naps) == 1
    assert asked == [10]
    assert before == [("ShareLock", True)]
    assert locks() == []


def test_claim_returns_up_to_the_limit_once_there_is_something(
    working, naps, acts, pausing, producing
):
    def enqueue():
        producing.enqueue_many(
            {
                "queue": "email",
                "kind": "send",
                "payload": {},
                "idempotency_key": f"k{n}",
            }
            for n in range(3)
        )

    pausing(FOR_EVER)
    acts.append(enqueue)

    leases = working.claim("email", 2, wait=20)

    assert len(leases) == 2
    assert len(naps) == 1


def test_a_job_that_is_due_already_is_returned_at_once(look, working, naps, enqueue):
    enqueue()

    assert look(working, math.inf)
    assert naps == []


def test_infinity_is_a_time_to_wait(look, working, naps, acts, pausing, enqueue):
    pausing(FOR_EVER)
    acts.append(enqueue)

    assert look(working, math.inf)
    assert naps == [FOR_EVER]


def test_a_number_beyond_any_float_is_infinity():
    assert _waiting.seconds(10**400, "wait") == math.inf


def test_wait_takes_no_job_and_says_only_true(working, naps, acts, pausing, enqueue):
    pausing(FOR_EVER)
    acts.append(enqueue)

    assert working.wait("email", 20) is True
    assert working.wait("email", 0) is True
    assert len(working.claim("email")) == 1
    assert working.wait("email", 0) is False


def test_a_redriven_job_ends_the_sleep(
    look, working, naps, acts, pausing, enqueue, claim, worker, operator
):
    job_id = enqueue()
    worker.execute("select fail(%s, %s, 'down', false)", claim())
    pausing(FOR_EVER)
    acts.append(lambda: operator.execute("select redrive(%s)", (job_id,)))
    start = time.monotonic()

    assert look(working, 20)
    assert time.monotonic() - start < 10
    assert len(naps) == 1


@pytest.mark.slow
def test_notifications_for_others_do_not_end_the_sleep(
    look, working, naps, acts, pausing, enqueue, owner
):
    def chatter():
        enqueue("slow")
        owner.execute("notify jobs_email, 'slow'")
        owner.execute("notify jobs_email, ''")
        owner.execute("notify other, 'email'")

    working._source.execute("listen other")
    pausing(FOR_EVER)
    acts.append(chatter)
    start = time.monotonic()

    found = look(working, 0.4)

    assert not found
    assert time.monotonic() - start >= 0.4
    assert len(naps) == 1


def test_a_stranger_with_the_key_blocks_no_call_and_no_wake_up(
    look, working, naps, acts, pausing, enqueue, stranger, worker, locks
):
    stranger.execute(
        "select pg_advisory_lock(%s)", (worker.value("select wait_key('email')"),)
    )
    working._source.execute("set lock_timeout = '5s'")
    pausing(FOR_EVER)
    acts.append(enqueue)
    start = time.monotonic()

    assert look(working, 20)
    assert time.monotonic() - start < 10
    assert len(naps) == 1
    assert locks() == [("ExclusiveLock", True)]
    assert working._source.rows("select pg_listening_channels()") == []


def test_a_key_that_was_taken_is_asked_for_again(
    working, naps, acts, pausing, enqueue, stranger, worker, locks
):
    key = worker.value("select wait_key('email')")
    stranger.execute("select pg_advisory_lock(%s)", (key,))
    working._source.execute("set lock_timeout = '5s'")
    later = []
    pausing(0.01)
    acts.append(lambda: stranger.execute("select pg_advisory_unlock(%s)", (key,)))
    acts.append(lambda: later.extend(locks()) or enqueue())

    assert working.wait("email", 20)
    assert later == [("ShareLock", True)]


def test_an_enqueue_that_began_before_the_wait_is_found_soon_after_its_commit(
    look, working, naps, acts, producer, enqueue
):
    producer.execute("begin")
    enqueue()
    acts.extend([lambda: None, lambda: None, lambda: producer.execute("commit")])

    assert look(working, 20)
    assert naps == [0.02, 0.05, 0.1]


@pytest.mark.parametrize("longest", [_waiting.LISTENING_SECONDS, 1])
def test_pauses_grow_to_the_longest(longest):
    expected = [0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]

    pauses = islice(_waiting.pauses(longest), len(expected))

    assert list(pauses) == [min(pause, longest) for pause in expected]


# A job that falls due by itself.


@pytest.fixture(params=["scheduled", "retried", "leased"])
def due_soon(request, enqueue, claim, worker, owner, soon):
    """A job that falls due in a moment, and of which nothing more is sent."""
    if request.param == "scheduled":
        return enqueue(available_at=soon())
    job_id = enqueue()
    lease = claim()
    column = "lease_expires_at"
    if request.param == "retried":
        worker.execute("select fail(%s, %s, 'down', true)", lease)
        column = "available_at"
    owner.execute(f"update live_job set {column} = %s", (soon(),))
    return job_id


def test_a_job_that_falls_due_ends_the_sleep(working, naps, pausing, due_soon):
    pausing(FOR_EVER)

    (lease,) = working.claim("email", wait=20)

    assert lease.job_id == due_soon
    assert max(naps, default=0) <= 0.3


def test_wait_ends_when_a_job_falls_due(working, naps, pausing, enqueue, soon):
    enqueue(available_at=soon())
    pausing(FOR_EVER)

    assert working.wait("email", 20) is True
    assert max(naps, default=0) <= 0.3


def test_a_job_scheduled_meanwhile_shortens_the_sleep(
    look, working, naps, acts, pausing, enqueue, soon
):
    pausing(FOR_EVER)
    acts.append(lambda: enqueue(available_at=soon()))

    assert look(working, 20)
    assert naps[0] > 10
    assert max(naps[1:], default=0) <= 0.3


def test_a_retry_reported_meanwhile_shortens_the_sleep(
    look, working, naps, acts, pausing, enqueue, claim, rival, owner, soon
):
    def fail():
        rival.execute("select fail(%s, %s, 'down', true)", lease)
        owner.execute("update live_job set available_at = %s", (soon(),))

    enqueue()
    lease = claim(session=rival)
    pausing(FOR_EVER)
    acts.append(fail)

    assert look(working, 20)
    assert naps[0] > 10
    assert max(naps[1:], default=0) <= 0.3


def test_a_due_job_that_another_holds_on_to_is_looked_for_again(
    working, naps, acts, pausing, enqueue, worker
):
    job_id = enqueue()
    worker.execute("begin")
    worker.execute("select claim('email')")
    pausing(0.01)
    acts.extend([lambda: None, lambda: worker.execute("rollback")])

    (lease,) = working.claim("email", wait=20)

    assert lease.job_id == job_id
    assert naps == [0.01, 0.01]


# The end of the time.


@pytest.mark.parametrize(("look", "nothing"), [("claim", []), ("wait", False)])
def test_a_wait_for_nothing_ends_with_the_time_and_leaves_nothing_behind(
    look, nothing, working, untouched
):
    start = time.monotonic()

    found = LOOKS[look](working, 0.2)

    assert 0.2 <= time.monotonic() - start < 10
    assert (found, type(found)) == (nothing, type(nothing))
    untouched(working, autocommit=True)


@pytest.mark.parametrize("seconds", [0, 0.0, 20])
def test_a_call_that_need_not_wait_does_not_listen(
    seconds, look, working, owner, enqueue
):
    if seconds:
        enqueue()

    found = look(working, seconds)

    last = owner.value(
        "select query from pg_stat_activity where pid = %s", working._source.pid
    )
    assert bool(found) == bool(seconds)
    assert '"jobs_email".claim(' in last or '"jobs_email".next_available_at(' in last


def test_a_claim_without_a_wait_does_not_sleep(working, naps):
    assert working.claim("email") == []
    assert naps == []


def test_a_value_that_is_not_a_time_is_refused_before_any_sql(client, pool):
    bad = (-1, -0.001, -math.inf, math.nan, True, False, "1", "", None, [1], 1j)
    for jobs in (client("email-worker"), Jobs(pool("email-worker"), "jobs_email")):
        jobs._source.close()
        for seconds in bad:
            with pytest.raises(InvalidArgument, match=r"^wait must be"):
                jobs.claim("email", wait=seconds)
            with pytest.raises(InvalidArgument, match=r"^timeout must be"):
                jobs.wait("email", seconds)


@pytest.mark.parametrize("queue", [1, b"email", "a\0b", "\ud800"], ids=ascii)
def test_a_value_that_is_not_a_queue_is_refused_before_any_sql(queue, working):
    working._source.close()

    for look in LOOKS.values():
        with pytest.raises(InvalidQueue, match="queue must"):
            look(working, 20, queue)


@pytest.mark.parametrize("queue", ["undeclared", "", None])
def test_an_undeclared_queue_is_refused_at_once(queue, look, working, naps):
    with pytest.raises(InvalidQueue):
        look(working, 20, queue)

    assert naps == []


def test_only_workers_wait(look, producing, untouched):
    with pytest.raises(Unauthorized):
        look(producing, 20)

    untouched(producing, autocommit=True)


# After each kind of end the session is as it was.


class Interrupted(KeyboardInterrupt):
    pass


def interrupt(*_):
    raise Interrupted


@pytest.fixture
def ways_out(acts, enqueue, configure):
    """Each way out of a wait; what is called makes a client take it."""

    def found(jobs):
        acts.append(enqueue)
        assert jobs.claim("email", wait=20)

    def timeout(jobs):
        assert jobs.claim("email", wait=0.05) == []

    def refusal(jobs):
        with pytest.raises(InvalidQueue):
            jobs.claim("undeclared", wait=20)

    def interruption(jobs):
        acts.append(interrupt)
        with pytest.raises(Interrupted):
            jobs.claim("email", wait=20)

    def refusal_meanwhile(jobs):
        acts.append(lambda: configure(queues=["email"]))
        with pytest.raises(InvalidQueue):
            jobs.claim("slow", wait=20)

    return found, timeout, refusal, interruption, refusal_meanwhile


def test_however_a_wait_ends_the_session_is_as_it_was(
    ways_out, listener, naps, untouched
):
    with connection_of(listener) as connection:
        autocommit = connection.autocommit

    for way in ways_out:
        way(listener)

        untouched(listener, autocommit)
        assert listener.wait("email", 0) is False


def test_however_a_wait_ends_the_application_s_own_channels_and_locks_stay(
    ways_out, working, naps, locks
):
    session = working._source
    session.execute("listen jobs_email")
    session.execute("listen other")
    session.execute("select pg_advisory_lock_shared(wait_key('email'))")

    for way in ways_out:
        way(working)

        listening = session.rows("select * from pg_listening_channels() order by 1")
        assert listening == [("jobs_email",), ("other",)]
        assert locks() == [("ShareLock", True)]
    assert session.value("select pg_advisory_unlock_shared(wait_key('email'))")
    assert locks() == []


@pytest.fixture
def alarm():
    """Interrupt this thread in a moment, as a signal does."""
    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.1)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_ends_the_sleep_and_nothing_is_left_behind(
    alarm, look, working, naps, acts, pausing, untouched
):
    pausing(FOR_EVER)
    acts.append(alarm)

    with pytest.raises(Interrupted):
        look(working, 20)

    untouched(working, autocommit=True)


def test_a_connection_that_is_lost_ends_the_wait(
    listener, naps, acts, pausing, owner, locks
):
    before = []

    def terminate():
        before.extend(locks())
        owner.execute(
            "select pg_terminate_backend(pid, 20000) from pg_locks"
            " where locktype = 'advisory' and database ="
            " (select oid from pg_database where datname = current_database())"
        )

    pausing(FOR_EVER)
    acts.append(terminate)
    start = time.monotonic()

    with pytest.raises(psycopg.OperationalError):
        listener.wait("email", 20)

    assert time.monotonic() - start < 10
    assert before == [("ShareLock", True)]
    assert locks() == []


def test_a_pool_replaces_the_connection_that_a_wait_has_lost(
    pool, naps, acts, owner, enqueue, untouched
):
    jobs = Jobs(pool("email-worker"), "jobs_email")
    acts.append(
        lambda: owner.execute(
            "select pg_terminate_backend(pid, 20000) from pg_stat_activity"
            " where usename = 'email-worker' and datname = current_database()"
        )
    )
    with pytest.raises(psycopg.OperationalError):
        jobs.claim("email", wait=20)
    acts.append(enqueue)

    assert jobs.claim("email", wait=20)
    untouched(jobs, autocommit=False)


@pytest.mark.parametrize("words", [b"listen", b"unlisten"])
def test_a_connection_that_is_lost_beneath_a_wait_s_own_words_is_so(
    words, working, naps, monkeypatch
):
    ask, asked = _client.Waiter._ask, []

    def cut_off(waiter, statements):
        asked.append(statements)
        if words in statements.split():
            with socket.socket(fileno=os.dup(working._source.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)
        return ask(waiter, statements)

    monkeypatch.setattr(_client.Waiter, "_ask", cut_off)

    with pytest.raises(psycopg.OperationalError):
        working.wait("email", 0.01)
    assert words in asked[-1].split()


# Where it cannot listen, it polls.


def test_a_wait_in_a_transaction_looks_and_ends_no_transaction(
    look, joined, naps, acts, pausing, enqueue, locks, state
):
    before = []
    asked = pausing(0.01)
    acts.append(lambda: before.extend([locks(), enqueue(), state()]))

    found = look(joined, 20)

    assert found
    assert (naps, asked, before[0]) == ([0.01], [1], [])
    assert joined._source.info.transaction_status is TransactionStatus.INTRANS
    assert joined._source.rows("select pg_listening_channels()") == []
    assert state() == before[2]
    joined._source.rollback()
    assert state() == before[2]


def test_a_wait_for_nothing_in_a_transaction_leaves_it_open(look, joined, naps):
    start = time.monotonic()

    assert not look(joined, 0.1)
    assert time.monotonic() - start >= 0.1
    assert joined._source.info.transaction_status is TransactionStatus.INTRANS


def test_a_wait_in_a_pipeline_looks(look, working, naps, acts, enqueue, untouched):
    acts.append(enqueue)

    with working._source.pipeline():
        assert look(working, 20)

    assert naps
    untouched(working, autocommit=True)


def test_an_interruption_while_it_begins_to_listen_leaves_nothing_behind(
    look, working, monkeypatch, untouched
):
    ask, asked = _client.Waiter._ask, []

    def interrupted(waiter, statements):
        answer = ask(waiter, statements)
        asked.append(statements)
        if len(asked) == 1:
            raise Interrupted
        return answer

    monkeypatch.setattr(_client.Waiter, "_ask", interrupted)

    with pytest.raises(Interrupted):
        look(working, 20)

    assert asked[0].startswith(b"listen")
    untouched(working, autocommit=True)


def test_a_caller_acts_on_a_pool_that_binds_by_postgresql_s_placeholders(
    pool, replica, enqueue
):
    connections = pool(replica, cursor_factory=psycopg.RawCursor)
    job_id = enqueue()

    (lease,) = Jobs(connections, "jobs_email", caller="email-worker").claim("email")

    assert lease.job_id == job_id


def test_a_wait_looks_where_nothing_is_sent(
    listener, naps, acts, pausing, enqueue, locks, configure, untouched
):
    with connection_of(listener) as connection:
        autocommit = connection.autocommit
    before = []
    configure(notify=False)
    asked = pausing(0.01)
    acts.append(lambda: before.extend([locks(), enqueue()]))

    assert listener.claim("email", wait=20)
    assert (naps, asked, before[0]) == ([0.01], [1], [])
    untouched(listener, autocommit)


# Several workers.


def test_one_job_goes_to_one_of_the_workers_that_wait(
    client, naps, pausing, background, until, enqueue, owner, other_producer
):
    pausing(FOR_EVER)
    workers = [client("email-worker") for _ in range(3)]
    calls = [background(worker.claim, "email", wait=20) for worker in workers]
    until(
        lambda: (
            len(naps) == 3
            and owner.value(
                "select count(*) from pg_stat_activity as a join pg_locks as l"
                " using (pid) where l.locktype = 'advisory' and a.state = 'idle'"
                " and a.datname = current_database()"
            )
            == 3
        )
    )

    first = enqueue()
    until(lambda: len(naps) == 5)
    until(lambda: any(call.done() for call in calls))
    done = [call for call in calls if call.done()]
    # One notification, by a session that is not silent for 20 ms after another.
    with other_producer.transaction():
        others = [enqueue(session=other_producer) for _ in range(2)]
    leases = [call.result(timeout=20) for call in calls]

    assert [lease.job_id for lease in done[0].result()] == [first]
    assert len(done) == 1
    assert sorted(lease.job_id for (lease,) in leases) == sorted([first, *others])


def test_workers_of_one_pool_wait_side_by_side(
    pool, naps, pausing, background, until, enqueue, producer
):
    connections = pool("email-worker")
    connections.resize(1, 2)
    jobs = Jobs(connections, "jobs_email")
    pausing(FOR_EVER)
    calls = [background(jobs.claim, "email", wait=20) for _ in range(2)]
    until(lambda: len(naps) == 2)

    with producer.transaction():
        made = [enqueue(), enqueue()]
    leases = [call.result(timeout=20) for call in calls]

    assert sorted(lease.job_id for (lease,) in leases) == sorted(made)


# Connections with settings of the application.


HABITS = {
    "dictionaries for rows": {"row_factory": dict_row},
    "binding on the client": {"cursor_factory": psycopg.ClientCursor},
    "PostgreSQL's placeholders": {"cursor_factory": psycopg.RawCursor},
    "prepared at once": {"prepare_threshold": 0},
}


@pytest.mark.parametrize("habit", HABITS)
def test_the_habits_of_a_connection_change_no_wait(
    habit, look, working, naps, acts, pausing, enqueue, untouched
):
    for attribute, value in HABITS[habit].items():
        setattr(working._source, attribute, value)
    pausing(FOR_EVER)
    acts.append(enqueue)

    assert look(working, 20)
    working._source.row_factory = psycopg.rows.tuple_row
    untouched(working, autocommit=True)


@pytest.mark.parametrize("acting", [True, False])
def test_calls_for_one_job_work_on_a_connection_that_binds_on_the_client(
    acting, connect, replica, key
):
    def client(name):
        connection = connect(replica if acting else name)
        connection.cursor_factory = psycopg.ClientCursor
        return Jobs(connection, "jobs_email", caller=name if acting else None)

    producer, worker = client("accounts"), client("email-worker")

    for n in range(3):
        job = producer.enqueue("email", "send", {"n": n}, idempotency_key=f"{key}.{n}")
        (lease,) = worker.claim("email", 1)

        assert (lease.job_id, lease.payload) == (job.job_id, {"n": n})
        assert worker.complete(lease)


def test_the_encoding_may_change_between_two_calls(working, producing, owner, key):
    payload = {"to": "Zoë"}
    leases = []
    for n, encoding in enumerate(["UTF8", "LATIN1", "WIN1252", "UTF8"]):
        producing._source.execute(f"set client_encoding = '{encoding}'")
        producing.enqueue("email", "send", payload, idempotency_key=f"{key}.{n}")
    stored = owner.rows("select payload from job")
    for encoding in ("UTF8", "LATIN1", "WIN1252", "UTF8"):
        working._source.execute(f"set client_encoding = '{encoding}'")
        leases += working.claim("email")

    assert stored == [(payload,)] * 4
    assert [lease.payload for lease in leases] == [payload] * 4


@pytest.mark.parametrize("caller", ["accounts", None])
def test_threads_on_one_connection_get_their_own_results(
    caller, client, replica, background, owner
):
    jobs = client(replica if caller else "accounts", caller=caller)

    def enqueue(thread):
        return {
            f"{thread}.{n}": jobs.enqueue(
                "email", "send", {}, idempotency_key=f"{thread}.{n}"
            ).job_id
            for n in range(25)
        }

    calls = [background(enqueue, thread) for thread in range(2)]

    answered = calls[0].result(timeout=20) | calls[1].result(timeout=20)
    assert answered == dict(owner.rows("select idempotency_key, job_id from job"))


def test_a_result_does_not_change_with_the_next_call(working, enqueue):
    enqueue(payload={"n": 1})
    enqueue(payload={"n": 2})

    first = working.claim("email")
    second = working.claim("email")
    nothing = working.claim("email")

    assert [len(answer) for answer in (first, second, nothing)] == [1, 1, 0]
    assert (first[0].payload, second[0].payload) == ({"n": 1}, {"n": 2})
    assert first[0].lease_token != second[0].lease_token


def test_a_call_after_a_refusal_is_as_before(working, enqueue):
    for _ in range(8):  # more than it takes until psycopg prepares a statement
        enqueue()
        with pytest.raises(InvalidQueue):
            working.claim("undeclared")
        assert len(working.claim("email")) == 1


def test_a_connection_closed_in_between_is_psycopg_s_own_error(
    look, client, enqueue, working
):
    enqueue()
    assert working.claim("email")

    working._source.close()

    with pytest.raises(psycopg.OperationalError):
        working.claim("email")
    with pytest.raises(psycopg.OperationalError):
        look(working, 20)
    assert client("email-worker").claim("email") == []


# Behind a transaction pooler.


@pytest.mark.parametrize("pooler", [1], indirect=True)
def test_a_wait_behind_a_transaction_pooler_looks_and_holds_on_to_nothing(
    look, pooler, naps, acts, pausing, enqueue, locks, owner
):
    def connection():
        return psycopg.connect(
            make_conninfo(user="email-worker", **pooler),
            autocommit=True,
            prepare_threshold=None,
        )

    with connection() as one, connection() as other:
        seen = []

        def meanwhile():
            seen.append(
                owner.value(
                    "select count(*) from pg_stat_activity"
                    " where usename = 'email-worker' and datname = current_database()"
                )
            )
            seen.append(locks())
            # The same session of the server serves all.
            seen.append(other.execute("select pg_listening_channels()").fetchall())
            enqueue()

        asked = pausing(0.01)
        acts.append(meanwhile)

        assert look(Jobs(one, "jobs_email"), 20)
        assert (naps, asked, seen) == ([0.01], [1], [1, [], []])
