"""An Instance broken in one way at a time, and what inspect_health says of it."""

import re
from types import SimpleNamespace

import pytest
from psycopg import sql

LAPSED = "update live_job set lease_expires_at = clock_timestamp() - interval '2 min'"
DUE = "update live_job set available_at = clock_timestamp() - interval '{}'"


@pytest.fixture
def health(observer):
    """The findings, as (severity, finding, subject)."""

    def health():
        return [
            row[:3]
            for row in observer.rows(
                "select severity, finding, subject from inspect_health()"
            )
        ]

    return health


@pytest.fixture
def details(observer):
    def details(finding):
        return observer.row(
            "select since, detail, remedy from inspect_health() where finding = %s",
            finding,
        )

    return details


def test_nothing_is_found_while_all_is_well(health, enqueue, claim, worker):
    enqueue()
    enqueue()
    worker.execute("select complete(%s, %s)", claim())
    claim()

    assert health() == []


def test_every_finding_is_listed_once_with_words(observer):
    rows = observer.rows(
        "select finding, severity, meaning, remedy from health_finding"
    )

    assert len({row[0] for row in rows}) == len(rows)
    assert {severity for _, severity, _, _ in rows} == {"critical", "warning", "notice"}
    assert all(meaning and remedy for _, _, meaning, remedy in rows)


CHANGED = ("critical", "object_changed", "objects")
OBJECTS = {
    "drop index live_job_claimable_idx": (
        "critical",
        "index_unusable",
        "index live_job_claimable_idx",
    ),
    "drop index attempt_failed_idx;"
    " create index attempt_failed_idx on attempt (worker)": (
        "critical",
        "index_unusable",
        "index attempt_failed_idx",
    ),
    "update pg_index set indisvalid = false"
    " where indexrelid = 'attempt_failed_idx'::regclass": (
        "critical",
        "index_unusable",
        "index attempt_failed_idx",
    ),
    "create or replace function _enqueue_job_id(p_at timestamptz) returns uuid"
    " language sql volatile as 'select gen_random_uuid()'": CHANGED,
    "alter function claim(text, integer) reset search_path": CHANGED,
    "alter function claim(text, integer) owner to current_role": CHANGED,
    "drop trigger caller_is_published on caller": CHANGED,
    "alter table job set unlogged": CHANGED,
    "drop view error_code": CHANGED,
    "alter table job drop constraint job_producer_idempotency_key_key": CHANGED,
    "alter domain instant drop constraint instant_is_finite": CHANGED,
    "revoke execute on function enqueue_many(jsonb) from {prefix}_producer": (
        "critical",
        "grant_missing",
        "execute on enqueue_many(jsonb) to {prefix}_producer",
    ),
    "revoke usage on schema jobs_email from {prefix}_worker": (
        "critical",
        "grant_missing",
        "usage on the schema to {prefix}_worker",
    ),
    "grant execute on function purge(timestamptz, integer) to stranger": (
        "warning",
        "grant_stray",
        "execute on purge(timestamp with time zone,integer) to stranger",
    ),
    "grant select (payload) on job to {prefix}_observer": (
        "warning",
        "grant_stray",
        "select on job.payload to {prefix}_observer",
    ),
    "grant update on live_job to public": (
        "warning",
        "grant_stray",
        "update on live_job to public",
    ),
    "grant usage on type leased_job to public": (
        "warning",
        "grant_stray",
        "usage on type leased_job to public",
    ),
    'revoke {prefix}_worker from "email-worker"': (
        "critical",
        "membership_missing",
        "email-worker",
    ),
    "grant {prefix}_producer to stranger": (
        "warning",
        "membership_stray",
        "stranger",
    ),
    "update caller set caller = 'nobody-of-that-name' where caller = 'operations'": (
        "critical",
        "role_missing",
        "nobody-of-that-name",
    ),
    "alter table live_job set (autovacuum_enabled = off)": (
        "critical",
        "autovacuum_off",
        "live_job",
    ),
    "update caller set is_producer = true where caller = 'operations'": (
        "critical",
        "membership_missing",
        "operations",
    ),
    "grant {prefix}_worker to operations": (
        "warning",
        "membership_stray",
        "operations",
    ),
    "set local session_replication_role = replica; truncate instance": (
        "critical",
        "not_configured",
        "instance",
    ),
    "alter table live_job enable row level security, force row level security": (
        "critical",
        "object_changed",
        "table live_job",
    ),
    "create rule lost as on insert to attempt do instead nothing": CHANGED,
    "alter table attempt drop column retry_at": CHANGED,
    "alter table live_job add column note text": CHANGED,
    "alter function enqueue(text, text, jsonb, text, timestamptz, integer) strict": CHANGED,
    "create unique index note_idx on job (kind)": CHANGED,
    "select purge(clock_timestamp());"
    " alter sequence operator_act_operator_act_id_seq restart": (
        "critical",
        "sequence_behind",
        "sequence operator_act_operator_act_id_seq",
    ),
    "insert into yoyo_lock values (1, clock_timestamp(), 4711)": (
        "critical",
        "migration_unfinished",
        "yoyo_lock",
    ),
    "update _yoyo_migration set migration_id = '0000-none'"
    " where migration_id ~ '^0001'": (
        "critical",
        "migration_unfinished",
        "installed_version",
    ),
}


WITH_IT = {"index_unusable", "grant_missing", "grant_stray", "membership_stray"}


@pytest.mark.sampled
@pytest.mark.parametrize("damage", OBJECTS)
def test_each_damage_is_found_and_named(owner, connect, prefix, damage):
    expected = tuple(word.format(prefix=prefix) for word in OBJECTS[damage])

    # In a transaction: roles and their memberships belong to every test.
    with owner.transaction(force_rollback=True):
        owner.execute(damage.format(prefix=prefix))
        found = owner.rows("select severity, finding, subject from inspect_health()")

    assert expected in found
    # What goes with a thing that is gone, or belongs to it, is found with it.
    assert all(
        finding in WITH_IT for row in found if row != expected for finding in row[1:2]
    )


def revoked(session, group, member):
    """Return the statement that takes back what the superuser granted."""
    by = " granted by postgres" if session.info.server_version >= 160000 else ""
    return f"revoke {group} from {member}{by}"


def test_each_fault_is_reported_once_and_changed_objects_together(owner, prefix):
    with owner.transaction(force_rollback=True):
        owner.execute(
            "drop trigger queue_is_published on queue;"
            " alter function claim(text, integer) security invoker;"
            f' revoke {prefix}_worker from "email-worker";'
            f" grant {prefix}_producer to stranger"
        )
        found = owner.rows("select subject, detail, remedy from inspect_health()")

    assert sorted(found) == [
        (
            "email-worker",
            f"is not a member of {prefix}_worker",
            "lenso-jobs configure",
        ),
        ("objects", "differ from what was installed", "lenso-jobs check"),
        (
            "stranger",
            f"is a member of {prefix}_producer and not declared",
            revoked(owner, f"{prefix}_producer", "stranger"),
        ),
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "statement",
    [
        "create table note (job_id uuid primary key references job, n serial)",
        "create view note as select job_id from job",
        "create index note_idx on job (kind)",
        (
            "create index note_idx on job (kind); update pg_index"
            " set indisvalid = false where indexrelid = 'note_idx'::regclass"
        ),
        "comment on function claim(text, integer) is 'note'",
        "alter table live_job set (fillfactor = 50)",
        "alter table job alter column kind set statistics 500",
    ],
)
def test_an_addition_that_no_verb_meets_is_not_a_finding(owner, statement):
    with owner.transaction(force_rollback=True):
        owner.execute(statement)

        assert owner.rows("select finding, subject from inspect_health()") == []


@pytest.mark.parametrize("role", ["owner", "dba"])
def test_a_grant_on_a_foreign_object_is_not_a_stray_grant(
    role, owner, new_role, prefix
):
    with owner.transaction(force_rollback=True):
        if role == "dba":
            dba = new_role()
            owner.execute(f"grant create, usage on schema jobs_email to {dba}")
        else:
            dba = f"{prefix}_owner"
        owner.execute(f"set local role {dba}")
        owner.execute(
            "create table note (n serial, word text);"
            " create view notes as select n from note;"
            " create function note_it() returns integer language sql return 1;"
            " grant select, insert on note, notes to stranger;"
            " grant update (word) on note to stranger;"
            " grant usage on sequence note_n_seq to stranger"
        )
        owner.execute("reset role")
        found = owner.rows("select finding, subject from inspect_health()")

    stray = {f"{right} on the schema to {dba}" for right in ("create", "usage")}
    assert ("object_changed", "objects") in found
    assert set(found) - {("object_changed", "objects")} == (
        {("grant_stray", each) for each in stray} if role == "dba" else set()
    )


def test_a_member_that_inherits_nothing_is_not_a_stray(owner, prefix):
    with owner.transaction(force_rollback=True):
        # The first says so before version 16, the second since.
        owner.execute("alter role stranger noinherit")
        owner.execute(f"grant {prefix}_producer to stranger")
        found = owner.rows("select from inspect_health()")

    assert found == []


def test_an_instance_without_the_books_of_the_migration_tool_is_well(owner, health):
    owner.execute("drop table yoyo_lock, _yoyo_migration")

    assert health() == []


def test_a_group_role_that_was_renamed_is_missed(owner, prefix):
    with owner.transaction(force_rollback=True):
        owner.execute(f"alter role {prefix}_worker rename to {prefix}_helper")
        found = owner.rows("select finding, subject from inspect_health()")

    assert ("role_missing", f"{prefix}_worker") in found
    # It has kept its rights, and no remedy takes them away.
    assert not {"grant_missing", "grant_stray"} & dict(found).keys()


def test_a_renamed_owner_is_reported_once_and_by_its_name(owner, prefix):
    with owner.transaction(force_rollback=True):
        owner.execute(f"alter role {prefix}_owner rename to {prefix}_other")
        found = owner.rows(
            "select finding, subject from inspect_health() where finding ~ '^role|^member'"
        )

    assert found == [("role_missing", f"{prefix}_other")]


def test_a_role_with_admin_option_is_a_stray_only_if_declared(owner, prefix, new_role):
    administrator = new_role()
    with owner.transaction(force_rollback=True):
        owner.execute(f"grant {prefix}_owner to {administrator}, operations")
        for name in (administrator, "operations"):
            owner.execute(f'grant {prefix}_worker to "{name}" with admin option')
            # Set-up needs it.
            owner.execute(
                sql.SQL("grant create on database {} to {}").format(
                    sql.Identifier(owner.info.dbname), sql.Identifier(name)
                )
            )
        found = owner.rows("select finding, subject from inspect_health()")

    assert found == [
        ("membership_stray", "operations"),
        ("role_unsafe", "operations"),
    ]


def test_causes_are_reported_before_their_effects(owner, enqueue):
    enqueue()
    owner.execute(
        "update live_job set available_at = clock_timestamp() - interval '9 min'"
    )
    owner.execute("drop function purge(timestamptz, integer)")

    found = owner.rows("select severity, finding from inspect_health()")

    assert [finding for severity, finding in found if severity == "critical"] == [
        "grant_missing",
        "object_changed",
        "queue_silent",
    ]


def test_a_queue_without_claims_is_silent(enqueue, owner, health, details):
    job_id = enqueue()
    owner.execute(DUE.format("2 min"))

    assert health() == [("critical", "queue_silent", "email")]
    # Its id is what explain_job asks for.
    assert re.fullmatch(
        r"has 1 job ready, the oldest for 00:02:0\d", details("queue_silent")["detail"]
    )
    assert details("queue_silent")["remedy"] == f"lenso-jobs explain {job_id}"


def test_all_is_found_while_others_are_at_work(
    enqueue, producer, owner, health, hold, connect, twin, background, blocked, seeing
):
    job_id = enqueue()
    owner.execute(DUE.format("2 min"))
    twin = connect(dbname=twin)
    elsewhere, waiter = connect(), connect()
    owner.execute("create table public.other (n integer)")

    with producer.transaction(), elsewhere.transaction(), twin.transaction():
        enqueue(queue="slow")
        elsewhere.execute("lock table public.other")
        twin.execute("lock table live_job")
        holder = hold(job_id)
        waiting = background(waiter.execute, "select from live_job for update")
        blocked(waiter, holder)
        found = health()
        holder.execute("rollback")
        waiting.result()
    twin.close()

    # Two Instances that share their roles are a separate finding.
    assert [row for row in found if row[1] != "role_unsafe"] == [
        ("critical", "queue_silent", "email")
    ]


def test_findings_go_by_the_clock_and_not_by_when_their_statement_began(
    enqueue, claim, worker, observer, owner
):
    for _ in range(4):
        enqueue()
    for _ in range(2):
        worker.execute("select complete(%s, %s)", claim())
    claim()
    soon = owner.value("select clock_timestamp() + interval '200 ms'")
    owner.execute("update instance set retention_seconds = 10")
    owner.execute(
        "update live_job set available_at = clock_timestamp() - interval '5 min',"
        " leased_at = %(soon)s - case when lease_owner is null then null"
        "  else interval '1 min' end,"
        " lease_expires_at = %(soon)s - case when lease_owner is null then null"
        "  else interval '1 min' end",
        {"soon": soon},
    )
    # One that ended a second from then, and one that should be gone since.
    owner.execute(
        "update attempt set leased_at = %(soon)s - interval '1 h',"
        " ended_at = %(soon)s - interval '1 h' * 2 + interval '1 s'"
        "  * case job_id when (select max(job_id::text)::uuid from attempt)"
        "   then 7201 else 3589 end",
        {"soon": soon},
    )

    found = observer.rows(
        "with slept as materialized (select pg_sleep_until(%s))"
        " select h.finding, h.since from slept, lateral"
        " (select * from inspect_health() where pg_sleep_until(%s) is not null) as h",
        *(soon, soon),
    )

    assert [finding for finding, _ in found] == [
        "queue_silent",
        "leases_expired",
        "retention_overdue",
    ]
    assert found[0][1] >= owner.value(
        "select available_at from live_job where lease_owner is null"
    )


def test_a_queue_whose_workers_lag_is_behind(enqueue, claim, owner, health):
    enqueue()
    enqueue()
    claim()
    owner.execute(DUE.format("9 min") + " where lease_owner is null")
    assert health() == []
    owner.execute(DUE.format("11 min") + " where lease_owner is null")

    assert health() == [("warning", "queue_behind", "email")]


def test_jobs_of_a_queue_that_is_not_declared_are_counted(enqueue, owner, health):
    enqueue(queue="slow")
    owner.execute("delete from queue where queue = 'slow'")
    owner.execute(DUE.format("20 min"))

    assert health() == [("warning", "queue_undeclared", "slow")]


def test_expired_leases_without_a_claim_are_found(
    enqueue, claim, owner, health, details
):
    enqueue()
    claim()
    owner.execute(LAPSED)

    assert health() == [("warning", "leases_expired", "email")]
    assert details("leases_expired")["since"] == owner.value(
        "select lease_expires_at from live_job"
    )


def test_a_queue_most_of_whose_jobs_fail_is_failing(
    enqueue, worker, health, details, operator
):
    for _ in range(21):
        enqueue()
    worker.execute(
        "select fail(job_id, lease_token, 'timeout', false) from claim('email', 19)"
    )
    assert health() == []
    worker.execute(
        "select fail(job_id, lease_token, 'refused', false) from claim('email', 1)"
    )
    worker.execute("select complete(job_id, lease_token) from claim('email', 1)")

    assert health() == [("warning", "jobs_failing", "email")]
    assert details("jobs_failing")["detail"] == (
        "has 20 failures among the last 21 ends, most often timeout"
    )
    # Redriven, they have not failed, whether they wait or have succeeded since.
    operator.execute("select redrive_failed('email', '-infinity')")
    assert health() == []
    worker.execute("select complete(job_id, lease_token) from claim('email', 20)")
    assert health() == []


@pytest.mark.parametrize(
    ("mode", "is_found"),
    [
        ("row exclusive", False),
        ("share", True),
        ("share row exclusive", True),
        ("access exclusive", True),
    ],
)
def test_a_table_that_a_session_locks_is_found_without_waiting(
    owner, observer, enqueue, mode, is_found
):
    with owner.transaction():
        owner.execute(f"lock table live_job in {mode} mode")
        observer.execute("set lock_timeout = '1s'")
        found = observer.rows("select finding, subject, detail from inspect_health()")

    assert [row[:2] for row in found] == (
        [("table_locked", f"session {owner.pid}")] if is_found else []
    )
    if found:
        by, age = found[0][2].split(", ")
        assert by == "has locked live_job (role postgres"
        assert age.endswith(("since when is hidden)", " transactions old)"))


def test_only_the_tables_of_jobs_are_looked_after(owner, health):
    owner.execute(
        "create table public.other (n integer check (n > 0));"
        " create domain public.small as integer check (value < 9);"
        " create function public.f() returns integer language sql return 1"
    )
    with owner.transaction():
        owner.execute("lock table operator_act in share mode")
        owner.execute("lock table public.other")
        assert health() == []


@pytest.mark.parametrize(
    "statement",
    [
        "reindex index concurrently live_job_claimable_idx",
        "create index concurrently note_idx on live_job (attempt)",
    ],
)
def test_an_index_that_is_being_built_concurrently_is_not_a_fault(
    enqueue, connect, background, blocked, owner, observer, health, seeing, statement
):
    job_id = enqueue()
    holder, builder = connect(), connect()
    holder.execute("begin isolation level repeatable read")
    holder.execute("select from live_job")
    building = background(builder.execute, statement)
    blocked(builder, holder)
    broken = owner.value("select count(*) from pg_index where not indisvalid")

    found, reason = (
        health(),
        observer.value("select reason from explain_job(%s)", job_id),
    )
    holder.execute("rollback")
    building.result()

    assert broken == 1
    assert (found, reason) == ([], "no_worker_connected")


def test_a_claim_ahead_of_the_clock_hides_no_silence(enqueue, claim, owner, health):
    claim_of = enqueue()
    claim()
    enqueue()
    owner.execute(DUE.format("5 min") + " where lease_owner is null")
    owner.execute(
        "update live_job set leased_at = clock_timestamp() + interval '1 d',"
        " lease_expires_at = clock_timestamp() + interval '2 d' where job_id = %s",
        (claim_of,),
    )

    assert health() == [
        ("critical", "clock_went_back", "email"),
        ("critical", "queue_silent", "email"),
    ]


def test_how_the_session_quotes_names_is_not_a_difference(observer, health):
    observer.execute("set quote_all_identifiers = on")

    assert health() == []


def test_locks_of_the_reader_s_transaction_are_not_found(owner):
    with owner.transaction():
        owner.execute("lock table live_job")
        assert owner.rows("select from inspect_health()") == []


def test_a_prepared_transaction_that_locks_a_table_is_found_by_its_name(
    owner, connect, enqueue, health, blocked, background, seeing
):
    enqueue()
    waiter = connect()
    name = f"locks-{owner.info.dbname}"
    other = "begin; select pg_current_xact_id(); prepare transaction '{}'"
    connect().execute(other.format(f"{name}-before"))
    connect().execute(
        "begin; lock table live_job in share mode; select from live_job for update;"
        f" prepare transaction '{name}'"
    )
    connect().execute(other.format(f"{name}-after"))
    try:
        waiting = background(waiter.execute, "select from live_job for update")
        blocked(waiter, SimpleNamespace(pid=0))
        found = health()
    finally:
        for end in ("", "-before", "-after"):
            owner.execute(f"rollback prepared '{name}{end}'")
    waiting.result()

    assert found == [("critical", "table_locked", f"prepared transaction {name}")]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("statement", "is_found"),
    [
        ("lock table live_job", True),
        ("lock table live_job in share mode", True),
        ("create index on live_job (attempt)", True),
        ("lock table instance in share mode", False),
        ("lock table live_job in share update exclusive mode", False),
        ("select from live_job for update", False),
    ],
)
def test_a_waiting_session_is_found_if_all_wait_behind_it(
    enqueue, hold, connect, observer, background, blocked, seeing, statement, is_found
):
    holder, waiter = hold(enqueue()), connect()
    holder.execute(
        "lock table live_job in row exclusive mode; lock table instance in row exclusive"
        " mode; lock table live_job in share update exclusive mode"
    )
    waiting = background(waiter.execute, f"begin; {statement}")
    blocked(waiter, holder)

    observer.execute("set lock_timeout = '1s'")
    found = observer.rows("select subject, detail from inspect_health()")
    holder.execute("rollback")
    waiting.result()

    assert [subject for subject, _ in found] == (
        [f"session {waiter.pid}"] if is_found else []
    )
    if is_found:
        assert found[0][1].startswith("waits to lock live_job (role postgres, ")


def test_an_old_snapshot_is_found_by_its_age_in_transactions(
    owner, connect, twin, health, details, burn
):
    holder = connect()
    twin, prepared = (connect(dbname=twin) for _ in range(2))
    name = f"elsewhere-{owner.info.dbname}"
    prepared.execute("begin; lock table live_job in share mode")
    prepared.execute(f"prepare transaction '{name}'")
    with holder.transaction(), twin.transaction():
        for session in (holder, twin):
            session.execute("set transaction isolation level repeatable read")
            session.execute("select from job")
        burn(owner, 6000)
        found, words = health(), details("snapshot_held")
    prepared.execute(f"rollback prepared '{name}'")
    twin.close()
    prepared.close()

    assert [row for row in found if row[1] != "role_unsafe"] == [
        ("warning", "snapshot_held", f"session {holder.pid}")
    ]
    assert words["since"] is None
    assert words["detail"].startswith("holds an old snapshot (role postgres, ")
    assert words["detail"].endswith(" transactions old)")


def test_a_transaction_that_wrote_here_long_ago_is_found(
    owner, connect, enqueue, worker, health, burn
):
    enqueue()
    elsewhere, locking = connect(), connect()
    with worker.transaction(), elsewhere.transaction(), locking.transaction():
        worker.execute("select from claim('email')")
        elsewhere.execute("set transaction isolation level serializable")
        elsewhere.execute("select pg_current_xact_id() from live_job")
        locking.execute("select pg_current_xact_id()")
        locking.execute("lock table attempt in share mode")
        burn(owner, 1100)
        found = health()

    # Others may burn enough beside it for the reader's snapshot to be an old one.
    assert [row for row in found if row[1] != "snapshot_held"] == [
        ("critical", "table_locked", f"session {locking.pid}"),
        ("warning", "transaction_open", f"session {worker.pid}"),
    ]


def test_a_prepared_transaction_is_found_by_its_name(owner, connect, enqueue, burn):
    holder = connect()
    job_id = enqueue()
    holder.execute("begin; select from live_job for update")
    holder.execute(f"prepare transaction 'old-{job_id}'")
    try:
        # Prepared a moment ago.
        assert owner.rows("select finding from inspect_health()") == []
    finally:
        holder.execute(f"rollback prepared 'old-{job_id}'")


def test_an_owner_that_may_see_them_judges_transactions_by_the_clock(
    owner, connect, health, burn, seeing
):
    holder = connect()
    with holder.transaction():
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select from job")
        burn(owner, 6000)

        # Old in transactions, young by the clock.
        assert health() == []


@pytest.fixture
def look_later(owner):
    """Let transactions of this database look as if they were that much older."""

    def look_later(interval):
        view = owner.value("select pg_get_viewdef('pg_stat_activity')")
        column = "s.xact_start"
        assert view.count(column) == 1
        with owner.transaction():
            owner.execute("set local allow_system_table_mods = on")
            owner.execute(
                "create or replace view pg_catalog.pg_stat_activity as "
                + view.replace(
                    column, f"{column} - interval '{interval}' as xact_start"
                )
            )

    return look_later


@pytest.mark.usefixtures("read_committed")
@pytest.mark.parametrize(
    ("statement", "minutes", "finding"),
    [
        ("update live_job set queue = queue", 1, "transaction_open"),
        ("lock table live_job in share mode", 1, "table_locked"),
        ("set transaction isolation level repeatable read", 5, "snapshot_held"),
    ],
)
def test_an_age_is_judged_by_the_clock_at_the_moment_of_looking(
    owner,
    connect,
    enqueue,
    observer,
    background,
    blocked,
    seeing,
    look_later,
    statement,
    minutes,
    finding,
):
    enqueue()
    admin, holder, idle = connect(), connect(), connect()
    admin.execute("select pg_advisory_lock(1)")
    idle.execute("begin; select from job")
    look_later(f"{minutes} min")

    answer = background(
        observer.rows,
        "with gate as materialized (select pg_advisory_lock_shared(1)::text as opened)"
        " select h.finding, h.subject, h.since, h.detail from gate, lateral"
        " (select * from inspect_health() where gate.opened is not null) as h",
    )
    blocked(observer, admin)
    holder.execute(f"begin; {statement}; select from job")
    began = holder.value(f"select now() - interval '{minutes} min'")
    admin.execute("select pg_advisory_unlock(1)")

    # A session that is idle, or reads without keeping a snapshot, holds up no clean-up.
    # An autovacuum of the moment looks as old as they do.
    ours = {f"session {session.pid}" for session in (holder, idle)}
    found = [row for row in answer.result() if row[1] in ours]
    assert [row[:3] for row in found] == [(finding, f"session {holder.pid}", began)]
    assert re.search(rf"role postgres, open for 00:0{minutes}:00", found[0][3])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        (
            "update job set created_at = clock_timestamp() + interval '1 min' where {}",
            "clock_went_back",
        ),
        (
            (
                "update attempt set ended_at = clock_timestamp() + interval '1 min'"
                " where {}"
            ),
            "clock_went_back",
        ),
        (
            (
                "update attempt set ended_at = clock_timestamp() + interval '1 min',"
                " outcome = 'lease_expired', failure_code = 'attempts_exhausted'"
                " where {}"
            ),
            "clock_went_back",
        ),
        (
            (
                "update attempt set ended_at = clock_timestamp() - interval '2 days',"
                " outcome = 'lease_expired', failure_code = 'attempts_exhausted'"
                " where {}; update instance set retention_seconds = 86400"
            ),
            "retention_overdue",
        ),
        (
            (
                "update attempt set ended_at = clock_timestamp() - interval '2 days'"
                " where {}; update instance set retention_seconds = 86400"
            ),
            "retention_overdue",
        ),
    ],
)
def test_times_that_cannot_be_right_are_found(
    owner, enqueue, claim, worker, health, statement, finding
):
    for _ in range(2):
        enqueue()
        worker.execute("select complete(%s, %s)", claim())
    # Of two the one that matters.
    last = finding == "clock_went_back"
    owner.execute(
        statement.format(
            f"job_id = (select {'max' if last else 'min'}(job_id::text)::uuid from job)"
        )
    )

    assert [row[1] for row in health()] == [finding]


@pytest.mark.parametrize("when", ["+ interval '1 min'", "- interval '9 days'"])
def test_attempts_that_were_followed_by_another_are_no_measure(
    owner, enqueue, claim, worker, health, when
):
    enqueue()
    worker.execute("select fail(%s, %s, 'timeout', true)", claim())
    owner.execute(
        f"update attempt set ended_at = clock_timestamp() {when};"
        " update instance set retention_seconds = 86400"
    )

    assert health() == []


@pytest.mark.slow
def test_dead_rows_that_no_vacuum_removes_are_counted(owner, enqueue, health):
    enqueue()
    enqueue()
    owner.execute("alter table live_job set (autovacuum_enabled = off)")
    found = []
    for count in (50000, 1):
        with owner.transaction(force_rollback=True):
            owner.execute(
                "insert into live_job (job_id, available_at, attempt, max_attempts,"
                " queue) select gen_random_uuid(), '2040-01-01', 0, 3, 'slow'"
                " from generate_series(1, %s)",
                (count,),
            )
        owner.execute("select pg_stat_force_next_flush()")
        owner.execute("select")
        found.append([row[1] for row in health()])

    assert found == [["autovacuum_off"], ["autovacuum_off", "autovacuum_behind"]]


def test_a_table_that_says_what_is_so_anyway_is_not_left_out(owner):
    with owner.transaction(force_rollback=True):
        owner.execute("alter table live_job set (autovacuum_enabled = on)")

        assert owner.rows("select subject from inspect_health()") == []


@pytest.mark.slow
def test_the_jobs_to_do_are_bloated_by_pages_without_them_and_no_other_table_is(
    by_hand, owner, health, details
):
    # A row a page, taken back: 258 MB.
    owner.execute("alter table live_job alter last_failure_code set storage plain")
    owner.execute("alter table job alter payload set storage plain")
    with owner.transaction(force_rollback=True):
        owner.execute(
            "with made as (insert into live_job (job_id, available_at, attempt,"
            "  max_attempts, queue, last_failure_code)"
            " select gen_random_uuid(), '2040-01-01', 0, 3, 'slow', repeat('.', 7000)"
            " from generate_series(1, 33000) returning *)"
            " insert into job (job_id, created_at, max_attempts, producer, queue, kind,"
            "  idempotency_key, payload)"
            " select job_id, '2026-01-01', 3, 'accounts', queue, 'send', job_id,"
            "  jsonb_build_object('to', last_failure_code) from made"
        )
    owner.execute("select pg_stat_force_next_flush()")
    owner.execute("select")

    found = [row for row in health() if row[1] != "autovacuum_off"]

    assert found == [("notice", "table_bloated", "live_job")]
    assert details("table_bloated")["detail"] == "takes 258 MB for 0 live rows"


def test_a_job_kept_for_less_than_its_retention_is_not_overdue(
    owner, enqueue, claim, worker, health
):
    enqueue()
    worker.execute("select complete(%s, %s)", claim())
    owner.execute(
        "update attempt set ended_at = clock_timestamp() - interval '25 hours';"
        "update instance set retention_seconds = 86400"
    )

    assert health() == []


def test_findings_come_by_severity(owner, enqueue):
    enqueue()
    with owner.transaction(force_rollback=True):
        owner.execute("grant select on job to stranger")
        owner.execute("drop index live_job_claimable_idx")
        found = owner.rows("select severity from inspect_health()")

    assert found == [("critical",), ("warning",)]


def test_the_digest_covers_the_objects_and_not_their_grants(owner):
    digest = owner.value("select digest from installed_digest")

    owner.execute("grant select on job to stranger")

    assert digest == owner.value("select _catalogue_digest()")


def test_objects_of_which_no_digest_is_stored_are_not_trusted(owner, health):
    owner.execute("select _catalogue_store_digest(false)")
    without = health()
    owner.execute("delete from installed_digest")

    assert without == health() == [CHANGED]


FINGERPRINT = "select fingerprint = _catalogue_fingerprint() from installed_digest"


def test_work_and_statistics_leave_the_fingerprint_as_it_was(owner, enqueue, claim):
    owner.execute("select _catalogue_store_digest(true)")

    enqueue()
    claim()
    owner.execute("analyze")
    owner.execute("vacuum job, live_job, attempt")
    with owner.transaction(force_rollback=True):
        owner.execute("insert into queue (queue) values ('new')")
        owner.execute("select _claim_floors_made()")

        assert owner.value("select count(*) from queue where floor is null") == 0
        assert owner.value(FINGERPRINT) is True


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "create or replace function _caller() returns text language sql return 'x'",
        "alter function claim(text, integer) security invoker",
        "drop function _caller()",
        "alter table job add n integer; alter table job drop n",
        "alter table job alter kind set default 'x'",
        "alter table instance drop constraint instance_is_one_row",
        "alter domain instant set default clock_timestamp()",
        "alter table queue disable trigger all",
        "drop trigger queue_is_published on queue",
        "create rule quiet as on insert to job do instead nothing",
        "create policy none on job using (false)",
        "update pg_index set indisvalid = false where indrelid = 'job'::regclass",
        "create or replace view installed_version as select 9 as version, 9 as oldest_client",
        "grant select on job to stranger",
        "grant update (kind) on job to stranger",
        "grant usage on type instant to stranger",
        "grant update on sequence claim_floor_1_at to stranger",
        "alter sequence claim_floor_1_at owner to stranger",
        "revoke usage on schema jobs_email from {0}_worker",
        "alter role {0}_worker rename to {0}_worked",
        "update installed_digest set digest = 'x'",
    ],
)
def test_a_change_of_an_object_or_right_changes_the_fingerprint(
    statement, owner, prefix
):
    with owner.transaction(force_rollback=True):
        owner.execute("select _catalogue_store_digest(true)")
        assert owner.value(FINGERPRINT) is True
        owner.execute(statement.format(prefix))

        assert owner.value(FINGERPRINT) is False


def test_a_group_s_role_made_anew_after_a_renaming_lacks_its_rights(owner, prefix):
    with owner.transaction(force_rollback=True):
        owner.execute(
            f"alter role {prefix}_worker rename to {prefix}_worked;"
            f" create role {prefix}_worker"
        )
        found = {
            finding for (finding,) in owner.rows("select finding from inspect_health()")
        }

    assert "grant_missing" in found


def test_the_tables_that_are_looked_for_are_all_there_are(owner):
    tables = owner.value(
        "select array_agg(relname::text) from pg_class where relkind = 'r'"
        " and relnamespace = 'jobs_email'::regnamespace and relname !~ 'yoyo'"
    )

    assert sorted(tables) == sorted(owner.value("select _catalogue_tables()"))
