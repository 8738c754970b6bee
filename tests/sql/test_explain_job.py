"""Each reason of explain_job, in a real Instance brought to it."""

from uuid import UUID, uuid4

import pytest

EXPLAIN = "select * from explain_job(%s::uuid)"
LATER = "2040-01-01T00:00:00Z"


@pytest.fixture
def explain(observer):
    def explain(job_id):
        return observer.row(EXPLAIN, job_id)

    return explain


@pytest.fixture
def facts(explain):
    """The reason, and those of its facts that are known."""

    def facts(job_id):
        row = explain(job_id)
        words = {"job_id", "queue", "meaning", "remedy"}
        return {k: v for k, v in row.items() if v is not None and k not in words}

    return facts


def test_every_reason_is_explained_in_words(observer):
    rows = observer.rows("select reason, meaning, remedy from explain_reason")

    assert len({reason for reason, _, _ in rows}) == len(rows) == 18
    assert all(len(meaning) > 10 and remedy for _, meaning, remedy in rows)


def test_a_due_job_is_ready_behind_those_before_it(worker, enqueue, explain):
    enqueue(queue="slow")
    first, second = enqueue(), enqueue()

    assert (explain(first)["reason"], explain(first)["ahead"]) == ("ready", 0)
    assert (explain(second)["reason"], explain(second)["ahead"]) == ("ready", 1)


def test_a_running_job_is_not_ahead_of_a_ready_job(worker, enqueue, claim, explain):
    enqueue()
    claim()
    second = enqueue()

    assert (explain(second)["reason"], explain(second)["ahead"]) == ("ready", 0)


def test_those_ahead_are_due_earlier_or_enqueued_before_at_one_instant(
    worker, enqueue, explain, owner
):
    jobs = enqueue(), enqueue(), enqueue()
    owner.execute(
        "update live_job set available_at = clock_timestamp() - interval '1 min'"
        " * case job_id when %s then 2 else 1 end from (select) as one",
        (jobs[2],),
    )
    owner.execute(
        "update live_job set available_at = (select max(available_at) from live_job)"
        " where job_id <> %s",
        (jobs[2],),
    )

    assert [explain(job_id)["ahead"] for job_id in jobs] == [1, 2, 0]


@pytest.mark.slow
def test_no_more_than_10000_are_counted_ahead(worker, enqueue, explain, owner):
    job_id = enqueue()
    owner.execute(
        "insert into live_job (job_id, available_at, attempt, max_attempts, queue)"
        " select gen_random_uuid(), '2020-01-01', 0, 3, 'email'"
        " from generate_series(1, 10001)"
    )

    assert explain(job_id)["ahead"] == 10000


def test_a_lapsed_lease_is_ahead_of_a_ready_job(
    worker, enqueue, claim, expire, explain
):
    enqueue()
    expire(claim()[0])

    assert explain(enqueue())["ahead"] == 1


def test_a_reason_has_its_meaning_and_its_remedy(worker, enqueue, explain):
    job_id = enqueue()
    enqueue()

    row = explain(job_id)

    assert row["job_id"] == job_id
    assert row["queue"] == "email"
    assert "due" in row["meaning"]
    assert "workers" in row["remedy"]
    assert explain(enqueue(available_at=LATER))["meaning"] != row["meaning"]


def test_a_job_for_later_is_scheduled(enqueue, facts, owner):
    job_id = enqueue(available_at=LATER)

    assert facts(job_id) == {
        "reason": "scheduled",
        "until": owner.value("select %s::timestamptz", LATER),
        "attempt": 0,
        "max_attempts": 3,
    }


def test_a_job_between_attempts_waits_for_its_retry(enqueue, claim, worker, facts):
    job_id = enqueue()
    lease = claim()
    row = worker.row("select * from fail(%s, %s, 'timeout', true)", *lease)

    assert facts(job_id) == {
        "reason": "retry_waiting",
        "until": row["available_at"],
        "attempt": 1,
        "max_attempts": 3,
        "failure_code": "timeout",
    }


def test_a_running_job_is_leased_by_its_worker_until_then(enqueue, claim, owner, facts):
    job_id = enqueue()
    claim()
    live = owner.row("select leased_at, lease_expires_at from live_job")

    assert facts(job_id) == {
        "reason": "leased",
        "since": live["leased_at"],
        "until": live["lease_expires_at"],
        "who": "email-worker",
        "attempt": 1,
        "max_attempts": 3,
    }


@pytest.mark.parametrize(
    ("attempts", "of_that_reason"),
    [
        (2, {"reason": "lease_expired", "ahead": 0}),
        (1, {"reason": "attempts_exhausted"}),
    ],
)
def test_a_lapsed_lease_waits_for_the_next_claim(
    enqueue, claim, expire, owner, facts, attempts, of_that_reason
):
    job_id = enqueue(max_attempts=attempts)
    claim()
    expire(job_id)

    assert facts(job_id) == of_that_reason | {
        "since": owner.value("select lease_expires_at from live_job"),
        "who": "email-worker",
        "attempt": 1,
        "max_attempts": attempts,
    }


def test_a_job_without_an_attempt_left_is_reported_with_any_workers(
    enqueue, claim, expire, owner, explain
):
    job_id = enqueue(max_attempts=1)
    claim()
    expire(job_id)
    owner.execute("update caller set is_worker = false, is_observer = true")

    assert explain(job_id)["reason"] == "attempts_exhausted"


@pytest.mark.parametrize(
    "statement",
    [
        "select from live_job for update",
        "select from claim('email')",
        "savepoint s; select from claim('email')",
    ],
)
def test_a_row_that_a_transaction_holds_is_locked_by_its_session(
    enqueue, worker, owner, facts, statement
):
    job_id = enqueue()
    holder = owner if "for update" in statement else worker

    with holder.transaction():
        holder.execute(statement)
        answer = facts(job_id)

    assert (answer["reason"], answer["pid"]) == ("row_locked", holder.pid)
    assert answer["who"] == holder.info.user
    assert facts(job_id)["reason"] != "row_locked"


def test_a_savepoint_since_released_holds_its_row_without_a_name(
    enqueue, worker, facts
):
    job_id = enqueue()

    with worker.transaction():
        worker.execute("savepoint s; select from claim('email')")
        assert facts(job_id)["pid"] == worker.pid
        worker.execute("rollback to s")
        assert facts(job_id)["reason"] == "ready"
        worker.execute("select from claim('email'); release s")
        answer = facts(job_id)

    assert answer == {"reason": "row_locked", "attempt": 0, "max_attempts": 3}
    assert facts(job_id)["reason"] == "leased"


@pytest.mark.parametrize("has_written", [False, True])
def test_its_own_released_savepoint_is_not_in_the_way(
    enqueue, worker, owner, has_written
):
    job_id = enqueue()

    with owner.transaction():
        if has_written:
            owner.execute("select pg_current_xact_id()")
        owner.execute("savepoint s; select from live_job for update; release s")

        assert owner.value("select reason from explain_job(%s)", job_id) == "ready"


def test_only_the_number_of_an_open_transaction_is_in_progress(owner, connect):
    other = connect()
    ended = other.value("select pg_current_xact_id()::text::bigint")
    other.execute("begin")
    begun = other.value("select pg_current_xact_id()::text::bigint")
    distant = (begun + offset for offset in (-(2**31), 2**31 - 1, 2**31, 1000))
    numbers = [begun, ended, 0, 1, 2, 3, 2**32 - 1, *(n % 2**32 for n in distant)]

    found = owner.value(
        "select array_agg(n) from unnest(%s::bigint[]) as u (n)"
        " where _session_is_in_progress(n::text::xid)",
        numbers,
    )

    assert found == [begun]


def test_a_result_goes_by_the_clock_and_not_by_the_start_of_its_statement(
    worker, enqueue, claim, observer, owner
):
    enqueue()
    lapsing, _ = claim()
    falling_due = enqueue(available_at=LATER)
    soon = owner.value("select clock_timestamp() + interval '150 ms'")
    owner.execute(
        "update live_job set lease_expires_at = %s where lease_owner is not null",
        (soon,),
    )
    owner.execute(
        "update live_job set available_at = %s where lease_owner is null", (soon,)
    )

    assert observer.rows(
        "with slept as materialized (select pg_sleep_until(%s))"
        " select (explain_job(%s)).reason, (explain_job(%s)).reason from slept",
        *(soon, lapsing, falling_due),
    ) == [("lease_expired", "ready")]


def test_locks_of_the_reader_s_transaction_are_not_in_the_way(worker, enqueue, owner):
    job_id = enqueue()

    with owner.transaction():
        owner.execute("select from live_job for update")
        held = owner.value("select reason from explain_job(%s)", job_id)
        owner.execute("lock table job")
        shut = owner.value("select reason from explain_job(%s)", job_id)

    assert (held, shut) == ("ready", "ready")


def test_a_call_that_waits_for_a_row_locks_no_table(
    enqueue, hold, connect, facts, background, blocked
):
    job_id = enqueue()
    holder, waiter = hold(job_id), connect()
    waiting = background(waiter.execute, "select from live_job for update")
    blocked(waiter, holder)

    answer = facts(job_id)
    holder.execute("rollback")
    waiting.result()

    assert (answer["reason"], answer["pid"]) == ("row_locked", holder.pid)


def test_the_session_that_locked_a_table_is_named_before_those_that_wait(
    enqueue, owner, connect, facts, background, blocked
):
    job_id = enqueue()
    reader = connect()
    reader.execute("begin; select from instance, operator_act")
    waiters = {table: connect() for table in ("instance", "operator_act")}
    with owner.transaction():
        owner.execute("lock table live_job")
        waiting = [
            background(waiter.execute, f"begin; lock table {table}")
            for table, waiter in waiters.items()
        ]
        for waiter in waiters.values():
            blocked(waiter, reader)
        answer = facts(job_id)
    reader.execute("rollback")
    for each in waiting:
        each.result()

    assert answer["pid"] == owner.pid


def test_locks_on_other_tables_of_the_server_are_not_in_the_way(
    worker, enqueue, facts, owner, connect, twin
):
    job_id = enqueue()
    twin = connect(dbname=twin)
    other = connect()
    names = [f"public.other_{n}" for n in range(20)]
    for name in names:
        owner.execute(f"create table {name} (n integer)")
    with twin.transaction(), other.transaction():
        twin.execute("lock table live_job, job, attempt, queue, caller")
        other.execute("select from job, attempt, queue, caller")
        for name in names:
            other.execute(f"lock table {name}")
        assert facts(job_id)["reason"] == "ready"
        with owner.transaction():
            owner.execute("lock table live_job")
            assert facts(job_id)["pid"] == owner.pid
    twin.close()


def test_a_row_that_a_prepared_transaction_holds_is_locked_by_its_owner(
    enqueue, claim, worker, facts, configure, owner
):
    configure(notify=False)
    job_id = enqueue()
    lease = claim()
    other = "begin; select pg_current_xact_id(); prepare transaction '{}'"
    names = [f"{n}-{job_id}" for n in range(6)]
    for name in names[:3]:
        owner.execute(other.format(name))
    worker.execute("begin")
    worker.execute("select complete(%s, %s)", lease)
    worker.execute(f"prepare transaction 'held-{job_id}'")
    for name in names[3:]:
        owner.execute(other.format(name))
    try:
        answer = facts(job_id)
    finally:
        worker.execute(f"rollback prepared 'held-{job_id}'")
        for name in names:
            owner.execute(f"rollback prepared '{name}'")

    assert (answer["reason"], answer["who"]) == ("row_locked", "email-worker")
    assert answer["since"] is not None
    assert "pid" not in answer


def test_an_owner_with_the_right_sees_since_when_a_row_is_locked(
    enqueue, owner, facts, prefix
):
    job_id = enqueue()

    with owner.transaction(force_rollback=True):
        owner.execute("select from live_job for update")
        assert "since" not in facts(job_id)
    owner.execute(f"grant pg_read_all_stats to {prefix}_owner")
    try:
        with owner.transaction(force_rollback=True):
            owner.execute("select from live_job for update")
            since = owner.value(
                "select xact_start from pg_stat_activity where pid = pg_backend_pid()"
            )
            assert facts(job_id)["since"] == since
    finally:
        owner.execute(f"revoke pg_read_all_stats from {prefix}_owner")


@pytest.mark.parametrize("table", ["instance", "job", "live_job", "attempt"])
def test_it_returns_while_a_whole_table_is_locked(enqueue, owner, facts, table):
    job_id = enqueue()

    with owner.transaction():
        owner.execute(f"lock table {table}")
        answer = facts(job_id)

    assert answer == {"reason": "table_locked", "pid": owner.pid, "who": "postgres"}


@pytest.mark.parametrize("mode", ["share", "share row exclusive", "exclusive"])
def test_a_table_that_is_locked_against_writing_alone_is_named_too(
    mode, enqueue, owner, facts
):
    job_id = enqueue()
    with owner.transaction():
        owner.execute(f"lock table live_job in {mode} mode")
        answer = facts(job_id)
    with owner.transaction():
        owner.execute(f"lock table job, attempt, instance in {mode} mode")
        other = facts(job_id)

    assert answer == {
        "reason": "table_locked",
        "pid": owner.pid,
        "who": "postgres",
        "attempt": 0,
        "max_attempts": 3,
    }
    assert other["reason"] == "no_worker_connected"


def test_a_queue_that_was_left_out_of_the_document_is_said_to_be(
    enqueue, owner, worker, explain
):
    job_id = enqueue(queue="slow", available_at=LATER)
    owner.execute("delete from queue where queue = 'slow'")

    assert explain(job_id)["reason"] == "queue_not_declared"


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ("drop index live_job_claimable_idx", "index live_job_claimable_idx"),
        (
            "alter function claim(text, integer) security invoker",
            "objects",
        ),
        (
            "revoke execute on function claim(text, integer) from {prefix}_worker",
            "execute on claim(text,integer) to {prefix}_worker",
        ),
        (
            "revoke usage on schema jobs_email from {prefix}_worker",
            "usage on the schema to {prefix}_worker",
        ),
        ("alter table queue disable trigger all", "objects"),
    ],
)
def test_damage_to_what_a_claim_needs_is_named(
    enqueue, owner, worker, facts, prefix, damage, what
):
    job_id = enqueue()
    owner.execute(damage.format(prefix=prefix))

    answer = facts(job_id)

    assert answer["reason"] == "instance_damaged"
    assert answer["who"] == what.format(prefix=prefix)


def test_damage_that_no_claim_meets_is_not_in_the_way(worker, enqueue, owner, facts):
    job_id = enqueue()
    owner.execute("create table note (t text)")

    assert facts(job_id)["reason"] == "ready"


def test_of_several_damages_the_first_is_named(worker, enqueue, owner, facts, prefix):
    job_id = enqueue()
    owner.execute(
        "drop trigger caller_is_published on caller;"
        " drop index live_job_claimable_idx;"
        f" revoke execute on function claim(text, integer) from {prefix}_worker"
    )

    answer = facts(job_id)

    assert answer["who"] == "index live_job_claimable_idx"
    assert answer["detail"] == "index live_job_claimable_idx is missing"


def test_without_a_declared_worker_no_role_can_claim(enqueue, owner, explain):
    job_id = enqueue()
    owner.execute("update caller set is_worker = false, is_observer = true")

    assert explain(job_id)["reason"] == "no_declared_worker"


@pytest.mark.parametrize(
    "statement",
    [
        "revoke {p}_worker from {names}",
        "update caller set caller = caller || '-of-no-role' where is_worker",
    ],
)
def test_where_no_worker_has_its_role_the_instance_is_damaged(
    statement, enqueue, owner, prefix
):
    job_id = enqueue()
    workers = owner.value(
        "select array_agg(caller order by caller) from caller where is_worker"
    )
    names = ", ".join(f'"{name}"' for name in workers)
    with owner.transaction(force_rollback=True):
        owner.execute(statement.format(p=prefix, names=names))
        answer = owner.row("select reason, who from explain_job(%s)", job_id)

    assert answer["reason"] == "instance_damaged"
    assert answer["who"].startswith(f"role {workers[0]}")


def test_a_worker_with_a_membership_too_many_is_a_worker(enqueue, owner, prefix):
    job_id = enqueue()
    with owner.transaction(force_rollback=True):
        owner.execute(f'grant {prefix}_producer to "email-worker", "spare-worker"')
        reason = owner.value("select reason from explain_job(%s)", job_id)

    assert reason in ("ready", "no_worker_connected")


@pytest.mark.parametrize("table", ["instance", "live_job", "attempt", "queue"])
def test_a_table_that_is_gone_is_named(table, enqueue, owner):
    job_id = enqueue()
    with owner.transaction(force_rollback=True):
        owner.execute(f"alter table {table} rename to other")
        answer = owner.row("select reason, who from explain_job(%s)", job_id)
        found = owner.rows("select finding, subject, detail from inspect_health()")

    assert tuple(answer.values()) == ("instance_damaged", f"table {table}")
    assert [tuple(each) for each in found] == [
        ("object_changed", f"table {table}", "is missing")
    ]


def test_without_a_session_of_a_worker_no_job_is_claimed(
    enqueue, explain, connect, owner
):
    enqueue(queue="slow")
    owner.execute(
        "update live_job set lease_owner = 'x', lease_expires_at = '2040-01-01'"
    )
    job_id = enqueue()
    assert explain(job_id)["reason"] == "no_worker_connected"

    with connect("spare-worker"):
        assert explain(job_id)["reason"] == "ready"


def test_a_session_that_may_become_a_worker_counts_as_one(
    enqueue, explain, owner, connect
):
    name = f"pool-{uuid4()}"
    owner.execute(f'create role "{name}" login; grant "email-worker" to "{name}"')
    try:
        job_id = enqueue()
        with connect(name):
            assert explain(job_id)["reason"] == "ready"
    finally:
        owner.execute(f'drop role "{name}"')


@pytest.mark.parametrize(
    "sign",
    [
        "select pg_try_advisory_lock_shared(_queue_key('email'))",
        (
            "update live_job set lease_owner = 'x', lease_expires_at = '2040-01-01'"
            " where attempt = 7"
        ),
    ],
    ids=["a waiter", "a lease"],
)
def test_a_waiting_worker_or_a_live_lease_in_the_queue_proves_a_worker(
    enqueue, explain, owner, sign
):
    first, job_id = enqueue(max_attempts=9), enqueue()
    owner.execute("update live_job set attempt = 7 where job_id = %s", (first,))
    owner.execute(sign)

    assert explain(job_id)["reason"] == "ready"


@pytest.mark.parametrize("end", ["succeeded", "failed"])
def test_an_ended_job_shows_its_outcome_and_its_worker(
    enqueue, claim, worker, owner, facts, end
):
    job_id = enqueue()
    lease = claim()
    if end == "succeeded":
        worker.execute("select complete(%s, %s)", lease)
    else:
        worker.execute("select fail(%s, %s, 'no_recipient', false)", lease)

    code = {} if end == "succeeded" else {"failure_code": "no_recipient"}
    assert facts(job_id) == {
        "reason": end,
        "since": owner.value("select ended_at from attempt"),
        "who": "email-worker",
        "attempt": 1,
        "max_attempts": 3,
        **code,
    }


def test_the_last_attempt_of_the_job_is_reported(
    enqueue, claim, worker, make_due, facts
):
    first, second = enqueue(), enqueue()
    fail = "select fail(%s, %s, %s, %s)"
    worker.execute(fail, (*claim(), "a", True))
    make_due(first)
    worker.execute(fail, (*claim(), "b", False))
    worker.execute(fail, (*claim(), "c", False))

    assert [
        (answer["attempt"], answer["failure_code"])
        for answer in (facts(first), facts(second))
    ] == [(2, "b"), (1, "c")]


def test_a_job_whose_rows_were_deleted_by_hand_lacks_evidence(enqueue, owner, explain):
    job_id = enqueue()
    owner.execute("delete from live_job")

    assert explain(job_id)["reason"] == "evidence_missing"


def test_a_purged_job_names_the_purge_it_may_have_fallen_to(
    enqueue, claim, worker, operator, owner, facts
):
    created = owner.value("select clock_timestamp()")
    job_id = enqueue()
    for _ in range(2):
        worker.execute("select complete(%s, %s)", claim())
        enqueue()
        before = owner.value("select clock_timestamp()")
        assert operator.value("select purge(%s)", before) == 1
    assert operator.value("select purge(clock_timestamp())") == 0
    worker.execute("select fail(%s, %s, 'refused', false)", claim())
    operator.execute("select redrive_failed('email', 'epoch', clock_timestamp())")

    answer = facts(job_id)

    assert answer["reason"] == "purged_or_unknown"
    assert abs((answer["since"] - created).total_seconds()) < 1
    assert (answer["until"], answer["who"]) == (before, operator.info.user)


@pytest.mark.parametrize("job_id", [uuid4(), UUID(int=0), UUID(int=2**128 - 1)])
def test_a_job_that_never_was_is_unknown(facts, job_id):
    assert facts(job_id) == {"reason": "purged_or_unknown"}


def test_a_job_made_since_the_last_purge_did_not_fall_to_it(
    enqueue, claim, worker, operator, owner, facts
):
    enqueue()
    worker.execute("select complete(%s, %s)", claim())
    operator.execute("select purge(clock_timestamp())")
    job_id = owner.value("select _enqueue_job_id(clock_timestamp() + interval '1 s')")

    assert facts(job_id).keys() == {"reason", "since"}


def test_no_job_is_refused(observer):
    with observer.refusing("LJ006"):
        observer.execute(EXPLAIN, (None,))


@pytest.mark.usefixtures("read_committed")
def test_it_changes_and_locks_nothing(enqueue, observer, owner, state, worker):
    job_id = enqueue()
    before = state()

    with observer.transaction():
        observer.execute("set transaction read only")
        observer.execute(EXPLAIN, (job_id,))
        locks = owner.rows(
            "select distinct mode from pg_locks where pid = %s"
            " and locktype in ('relation', 'tuple', 'transactionid')",
            observer.pid,
        )

    assert locks == [("AccessShareLock",)]
    assert state() == before
