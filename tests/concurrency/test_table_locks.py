"""Verbs that wait for a lock on a table read the clock behind it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

TABLES = ("instance", "queue", "caller", "job", "live_job", "attempt")
LOCKS = [(table, mode) for table in TABLES for mode in ("access exclusive", "share")]
LEASE = timedelta(seconds=30)
RETRY = timedelta(seconds=5)
DELAY = timedelta(seconds=60)
ONE = "%(job)s, %(token)s"
MANY = "array[%(job)s]::uuid[], array[%(token)s]"
ITEM = "'email', 'send', '{}', 'new-' || %(number)s"
DOCUMENT = (
    "jsonb_build_array(jsonb_build_object('queue', 'email', 'kind', 'send',"
    " 'payload', '{}'::jsonb, 'idempotency_key', 'new-' || %(number)s))"
)

# What each session is, what it calls, and how long after the lock the instant must be.
INSTANTS = {
    "claim": ("email-worker", "select lease_expires_at from claim('slow')", LEASE),
    "claim of one that reclaims": (
        "email-worker",
        "select lease_expires_at from claim('email')",
        LEASE,
    ),
    "claim of many": (
        "email-worker",
        "select min(lease_expires_at) from claim('email', 5)",
        LEASE,
    ),
    "claim of more than 64": (
        "email-worker",
        "select min(lease_expires_at) from claim('email', 100)",
        LEASE,
    ),
    "claim that reclaims": (
        "spare-worker",
        "select min(lease_expires_at) from claim('email', 5)",
        LEASE,
    ),
    "renew": ("email-worker", f"select renew({ONE})", LEASE),
    "renew_many": (
        "email-worker",
        f"select lease_expires_at from renew_many({MANY})",
        LEASE,
    ),
    "fail": (
        "email-worker",
        f"select available_at from fail({ONE}, 'timeout', true)",
        RETRY,
    ),
    "fail_many": (
        "email-worker",
        f"select available_at from fail_many({MANY}, array['timeout'], array[true])",
        RETRY,
    ),
    "release": ("email-worker", f"select available_at from release({ONE}, 60)", DELAY),
    "release_many": (
        "email-worker",
        f"select available_at from release_many({MANY}, array[60])",
        DELAY,
    ),
    "redrive": (
        "operator",
        "select available_at from redrive(%(failed)s)",
        timedelta(),
    ),
}
# What is read from the tables afterwards.
RECORDED = {
    "enqueue": (
        "accounts",
        f"select enqueue({ITEM})",
        (
            "select j.created_at, l.available_at, job_id from job as j join live_job as l"
            " using (job_id) order by job_id desc limit 1"
        ),
    ),
    "enqueue_many": (
        "accounts",
        f"select enqueue_many({DOCUMENT})",
        (
            "select j.created_at, l.available_at, job_id from job as j join live_job as l"
            " using (job_id) order by job_id desc limit 1"
        ),
    ),
    "complete": (
        "email-worker",
        f"select complete({ONE})",
        "select max(ended_at) from attempt",
    ),
    "complete_many": (
        "email-worker",
        f"select complete_many({MANY})",
        "select max(ended_at) from attempt",
    ),
    "retire_expired": (
        "operator",
        "select retire_expired()",
        "select max(ended_at) from attempt",
    ),
    "redrive_failed": (
        "operator",
        "select redrive_failed('email', '2020-01-01')",
        "select max(available_at) from live_job",
    ),
}
ENDINGS = {
    "renew": f"select renew({ONE})",
    "renew_many": f"select outcome from renew_many({MANY})",
    "complete": f"select complete({ONE})",
    "complete_many": f"select outcome from complete_many({MANY})",
    "fail": f"select fail({ONE}, 'timeout', true)",
    "fail, final": f"select fail({ONE}, 'timeout', false)",
    "fail_many": (
        f"select outcome from fail_many({MANY}, array['timeout'], array[true])"
    ),
    "release": f"select release({ONE})",
    "release_many": f"select outcome from release_many({MANY}, array[0])",
}

pytestmark = pytest.mark.usefixtures("read_committed", "no_wait_is_for_ever")


@pytest.fixture
def scene(owner, enqueue, claim, worker, expire):
    """Make a leased, a lapsed, a spent, a failed and some queued jobs."""
    numbers = iter(range(1000))

    def scene():
        owner.execute("delete from live_job; delete from attempt; delete from job")
        number = next(numbers)
        held = {}
        for name, max_attempts in (("failed", 3), ("lapsed", 3), ("spent", 1)):
            enqueue(key=f"{name}-{number}", max_attempts=max_attempts)
            held[name] = claim()
        worker.execute("select fail(%s, %s, 'timeout', false)", held["failed"])
        expire(held["lapsed"][0], held["spent"][0])
        enqueue(key=f"leased-{number}", queue="slow")
        job, token = claim("slow")
        for n in range(3):
            enqueue(key=f"queued-{number}-{n}")
            enqueue(key=f"slow-{number}-{n}", queue="slow")
        return {
            "job": job,
            "token": token,
            "number": number,
            "failed": held["failed"][0],
        }

    return scene


@pytest.fixture
def behind(connect, background, owner, prefix):
    """Call while a table is locked; returns when it was let go, and the first value."""
    holder = connect()

    def behind(lock, role, statement, arguments, *, until=None):
        table, mode = lock
        session = connect(f"{prefix}_duty" if role == "operator" else role)
        holder.execute(f"begin; lock table {table} in {mode} mode")
        call = background(lambda: session.execute(statement, arguments).fetchall())
        deadline = time.monotonic() + 20
        while not call.done():
            assert time.monotonic() < deadline
            if holder.pid in owner.value("select pg_blocking_pids(%s)", session.pid):
                if until is not None:
                    owner.execute("select pg_sleep_until(%s)", (until,))
                break
        has_waited = not call.done()
        let_go_at = owner.value("select clock_timestamp()")
        holder.execute("commit")
        try:
            value = call.result()[0][0]
        except psycopg.Error as error:
            value = error.sqlstate
        session.close()
        return has_waited, let_go_at, value

    return behind


@pytest.mark.sampled
@pytest.mark.parametrize("verb", INSTANTS)
def test_an_instant_counts_from_behind_the_lock(verb, scene, behind):
    role, statement, wait = INSTANTS[verb]
    waited = 0

    for lock in LOCKS:
        has_waited, let_go_at, instant = behind(lock, role, statement, scene())
        if has_waited:
            assert let_go_at + wait <= instant, lock
            waited += 1

    assert waited


@pytest.mark.sampled
@pytest.mark.parametrize("verb", RECORDED)
def test_an_instant_on_record_is_behind_the_lock(verb, scene, behind, owner):
    role, statement, read = RECORDED[verb]
    waited = 0

    for lock in LOCKS:
        has_waited, let_go_at, _ = behind(lock, role, statement, scene())
        if has_waited:
            *instants, last = owner.rows(read)[0]
            if isinstance(last, datetime):
                instants.append(last)
            else:
                made_at = datetime.fromtimestamp((last.int >> 80) / 1000, UTC)
                instants.append(made_at + timedelta(milliseconds=1))
            assert all(let_go_at <= instant for instant in instants), lock
            waited += 1

    assert waited


@pytest.mark.slow
@pytest.mark.parametrize("verb", ENDINGS)
def test_a_lease_that_lapses_behind_the_lock_is_refused(verb, scene, behind, owner):
    waited = 0

    for lock in LOCKS:
        arguments = scene()
        lapses_at = owner.value(
            "update live_job set lease_expires_at = clock_timestamp() + interval '0.2 s'"
            " where job_id = %s returning lease_expires_at",
            arguments["job"],
        )
        has_waited, _, answer = behind(
            lock, "email-worker", ENDINGS[verb], arguments, until=lapses_at
        )
        if has_waited:
            assert answer in {"LJ004", "invalid_lease"}, lock
            assert owner.rows(
                "select lease_expires_at from live_job where job_id = %s",
                arguments["job"],
            ) == [(lapses_at,)]
            waited += 1

    assert waited
