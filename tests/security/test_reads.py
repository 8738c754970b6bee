"""The operators' reads, beside work and locks: they hold up nobody and wait for nobody."""

from __future__ import annotations

READS = (
    "select count(*) from inspect_queues()",
    "select count(*) from inspect_workers()",
    "select count(*) from inspect_failures()",
    "select count(*) from inspect_jobs('email', 'failed')",
    "select count(*) from inspect_acts()",
    "select count(*) from inspect_health()",
    "select reason from explain_job(%s)",
    "select status from inspect(%s)",
    "select count(*) from inspect_attempts(%s)",
)


def read(session, job_id):
    """Call every read."""
    for statement in READS:
        session.execute(statement, [job_id] if "%s" in statement else None)


def test_an_observer_that_reads_and_stays_in_its_transaction_holds_up_no_verb(
    observer, producer, worker, operator, owner, enqueue, claim
):
    job_id = enqueue(max_attempts=1)
    enqueue()
    with observer.transaction():
        read(observer, job_id)
        held = owner.rows(
            "select distinct locktype, mode from pg_locks where pid = %s and granted",
            observer.pid,
        )
        for session in (producer, worker, operator):
            session.execute("set lock_timeout = '1s'")

        enqueue()
        lease, other = claim(), claim()
        worker.execute("select renew(%s, %s)", lease)
        worker.execute("select fail(%s, %s, 'smtp.down', true)", lease)
        worker.execute("select complete(%s, %s)", other)
        redriven = operator.value("select redrive_failed('email', 'epoch')")
        purged = operator.value("select purge(clock_timestamp())")

    assert set(held) == {
        ("relation", "AccessShareLock"),
        ("virtualxid", "ExclusiveLock"),
    }
    assert (redriven, purged) == (1, 1)


def test_reads_change_nothing_and_may_be_asked_on_a_read_only_session(
    observer, enqueue, claim, state
):
    job_id = enqueue()
    claim()
    before = state()
    observer.execute("set default_transaction_read_only = on")

    read(observer, job_id)

    assert state() == before


def test_explain_and_health_return_behind_any_lock_on_the_instance(
    enqueue, owner, observer, impatient
):
    job_id = enqueue()
    impatient(observer)

    for statement in (
        "lock table job",
        "lock table queue",
        "lock table caller",
        "lock table operator_act",
        "lock table installed_digest",
        "reindex index live_job_claimable_idx",
        "reindex index attempt_ended_at_idx",
    ):
        with owner.transaction(force_rollback=True):
            owner.execute(statement)
            explained = observer.row("select reason, pid from explain_job(%s)", job_id)
            found = observer.rows("select finding, subject from inspect_health()")

        assert explained == {"reason": "table_locked", "pid": owner.pid}, statement
        assert ("table_locked", f"session {owner.pid}") in found, statement


def test_findings_are_returned_behind_a_session_that_waits_for_such_a_lock(
    enqueue, connect, observer, impatient, background, blocked, seeing
):
    job_id = enqueue()
    impatient(observer)
    reader, waiter = connect(), connect()
    reader.execute("begin")
    reader.execute("select from live_job")
    answer = background(waiter.execute, "alter table live_job alter queue set not null")
    blocked(waiter, reader)

    explained = observer.row("select reason, pid from explain_job(%s)", job_id)
    (found,) = observer.rows("select subject, detail from inspect_health()")
    reader.execute("commit")
    answer.result(20)

    assert explained == {"reason": "table_locked", "pid": waiter.pid}
    assert found[0] == f"session {waiter.pid}"
    assert found[1].startswith("waits to lock live_job (role postgres")


def test_a_lock_in_another_instance_or_another_database_shuts_nothing(
    enqueue, connect, observer, conninfo
):
    job_id = enqueue()
    other, elsewhere = connect(), connect(dbname="postgres")
    other.execute("create schema jobs_other; create table jobs_other.live_job ()")
    other.execute("begin")
    other.execute("lock table jobs_other.live_job")
    elsewhere.execute("begin")
    elsewhere.execute("create temp table live_job (job_id uuid)")

    assert (
        observer.value("select reason from explain_job(%s)", job_id) != "table_locked"
    )
    assert observer.rows("select finding from inspect_health()") == []


def test_listeners_and_advisory_locks_by_the_thousand_change_no_result(
    stranger, observer, enqueue, claim, waiting, heard
):
    listener = waiting("email")
    stranger.execute(
        "do $$ begin for n in 1..2000 loop execute 'listen c' || n; end loop; end $$"
    )
    stranger.execute(
        "select pg_advisory_lock_shared(n) from generate_series(1, 2000) n"
    )

    job_id = enqueue()
    told = heard(listener)
    queues = observer.rows("select queue, ready, workers_waiting from inspect_queues()")
    claimed, _ = claim()

    assert told == [("jobs_email", "email")]
    assert queues == [("email", 1, 1), ("slow", 0, 0)]
    assert claimed == job_id


def test_an_unreadable_document_is_refused(observer):
    for call, sqlstate in {
        "select inspect_failures(p_limit => 2147483647)": "LJ007",
        "select inspect_failures(p_limit => null)": "LJ007",
        "select inspect_failures(repeat('q', 10000000))": "LJ003",
        "select inspect_failures(p_failure_code => repeat('(a+)+', 1000000))": "LJ005",
        "select inspect_acts(10001)": "LJ007",
        "select inspect_acts(0, -9223372036854775808)": "LJ007",
        "select explain_job(null)": "LJ006",
        "select inspect_attempts(null)": "LJ006",
    }.items():
        with observer.refusing(sqlstate):
            observer.execute(call)


def test_bounds_however_far_are_just_bounds(observer):
    for call in (
        "inspect_failures(p_since => 'infinity', p_before => '-infinity')",
        "inspect_failures(p_since => '4714-11-24 00:00:00+00 BC', p_limit => 10000)",
        "inspect_failures(p_before => 'infinity', p_before_job_id => null)",
        "inspect_acts(10000, -9223372036854775808)",
    ):
        assert observer.rows(f"select from {call}") == []


def test_an_id_from_any_time_is_explained(observer, operator, enqueue, worker, claim):
    enqueue()
    worker.execute("select complete(%s, %s)", claim())
    operator.execute("select purge('4000-01-01 BC')")
    operator.execute("select purge(clock_timestamp())")
    operator.execute("select redrive_failed('email', '-infinity', 'infinity')")

    reasons = {
        observer.value("select reason from explain_job(%s)", job_id)
        for job_id in (
            "ffffffff-ffff-7fff-ffff-ffffffffffff",
            "00000000-0000-7000-8000-000000000000",
            "00000000-0000-0000-0000-000000000000",
            "ffffffff-ffff-ffff-ffff-ffffffffffff",
        )
    }

    assert reasons == {"purged_or_unknown"}
