"""Breaks of an Instance: what inspect_health says of each, and what its advice mends."""

from __future__ import annotations

from contextlib import ExitStack

import psycopg
import pytest
from psycopg import sql

from lenso_jobs.config import Configuration
from lenso_jobs.embedded import EmbeddedServer
from lenso_jobs.operator import setup

HEALTH = "select finding, subject, detail, remedy from inspect_health()"


@pytest.fixture
def findings(observer):
    """Return the findings of inspect_health by name, each as (subject, detail, remedy)."""

    def findings():
        return {name: rest for name, *rest in observer.rows(HEALTH)}

    return findings


@pytest.fixture
def caller(new_caller):
    return new_caller("producer", "worker")


BREAKS = {
    "alter role {caller} set default_transaction_read_only = on": "setting_harmful",
    (
        "alter role {caller} in database {db} set default_transaction_read_only = true"
    ): "setting_harmful",
    "alter database {db} set default_transaction_read_only = on": "setting_harmful",
    "alter role {caller} set statement_timeout = '1ms'": "setting_harmful",
    "alter role {caller} set statement_timeout = 1": "setting_harmful",
    "alter table live_job set (autovacuum_enabled = off)": "autovacuum_off",
    (
        "insert into operator_act (operator, act, arguments, job_count)"
        " values ('x', 'purge', '{{}}', 0);"
        " alter sequence operator_act_operator_act_id_seq restart"
    ): "sequence_behind",
    "drop sequence claim_floor_1_at": "object_changed",
    "grant select (payload) on job to {caller}": "grant_stray",
    "grant usage on sequence claim_floor_1_at to {caller}": "grant_stray",
    "grant usage on type leased_job to {caller}": "grant_stray",
    "grant execute on function purge(timestamptz, integer) to {caller}": "grant_stray",
    "grant execute on function configure(jsonb, boolean) to {caller}": "grant_stray",
    (
        "grant execute on function claim(text, integer) to {prefix}_worker"
        " with grant option"
    ): "grant_stray",
    "grant select on yoyo_lock to {caller}": "grant_stray",
    "revoke execute on function claim(text, integer) from {prefix}_worker": (
        "grant_missing"
    ),
    "revoke usage on schema jobs_email from {prefix}_worker": "grant_missing",
    "revoke select on error_code from {prefix}_producer": "grant_missing",
    "grant {prefix}_observer to {caller}": "membership_stray",
    "grant pg_read_all_data to {caller}": "role_unsafe",
    "grant {prefix}_operator to {caller}": "role_unsafe",
}


@pytest.mark.sampled
@pytest.mark.parametrize("statement", BREAKS)
def test_a_finding_goes_once_its_remedy_was_run(
    statement, owner, connect, caller, findings, prefix
):
    finding = BREAKS[statement]
    names = {"caller": caller, "prefix": prefix, "db": owner.info.dbname}
    owner.execute(statement.format(**names))
    try:
        subject, detail, remedy = findings()[finding]
    finally:
        mender = connect()
        if finding in findings():
            for each in remedy.split(";"):
                mender.execute(each)

    assert subject
    assert detail
    assert finding not in findings()


# Lost rows.


@pytest.mark.slow
@pytest.mark.parametrize("retried", [False, True])
def test_a_job_whose_live_row_was_deleted_is_lost_and_can_be_put_back(
    retried, enqueue, claim, worker, owner, observer, operator, findings
):
    job_id = enqueue()
    if retried:
        worker.execute("select fail(%s, %s, 'timeout', true)", claim())
    owner.execute("delete from live_job")

    subject, detail, remedy = findings()["job_lost"]
    status = observer.value("select status from inspect(%s)", job_id)
    with operator.refusing("LJ007"):
        operator.execute("select redrive(%s)", (job_id,))
    explained = observer.row("select reason, remedy from explain_job(%s)", job_id)

    assert (subject, detail) == (f"job {job_id}", "is neither live nor ended")
    assert remedy == f"lenso-jobs explain {job_id}"
    assert (status, explained["reason"]) == ("lost", "evidence_missing")
    assert "under a new key" in explained["remedy"]
    owner.execute(explained["remedy"].partition("as the owner: ")[2])
    assert claim()[0] == job_id
    assert findings() == {}


def test_jobs_behind_a_table_that_was_swapped_are_counted_as_lost(
    enqueue, owner, prefix, findings
):
    for _ in range(3):
        enqueue()
    owner.execute(
        f"set role {prefix}_owner;"
        " alter table live_job rename to live_job_old;"
        " create table live_job (like live_job_old including all)"
    )

    assert (
        findings()["job_lost"][1] == "and at least 2 others are neither live nor ended"
    )


def test_a_live_row_without_its_job_is_found(enqueue, owner, findings):
    job_id = enqueue()
    owner.execute("delete from job")

    subject, detail, remedy = findings()["live_row_stray"]

    assert (subject, detail) == (f"live row {job_id}", "has no job")
    assert "it deletes data" in remedy


@pytest.mark.slow
@pytest.mark.parametrize(
    "column", ["lease_owner", "lease_token_hash", "lease_expires_at", "leased_at"]
)
def test_half_a_lease_is_found_and_its_job_claimed_after_the_remedy(
    column, enqueue, claim, owner, findings
):
    job_id = enqueue()
    claim()
    owner.execute(f"update live_job set {column} = null")

    owner.execute(findings()["lease_broken"][2])

    assert "lease_broken" not in findings()
    assert claim()[0] == job_id


def test_a_lease_held_for_longer_than_a_day_is_found_with_its_job(
    enqueue, claim, owner, findings, observer
):
    job_id = enqueue()
    claim()
    owner.execute("update live_job set leased_at = leased_at - interval '23 hours'")
    assert "lease_held_long" not in findings()
    owner.execute("update live_job set leased_at = leased_at - interval '2 hours'")

    subject, detail, remedy = findings()["lease_held_long"]
    explained = observer.row("select reason, detail from explain_job(%s)", job_id)

    assert subject == "email"
    assert detail.endswith("held by email-worker")
    assert remedy == f"lenso-jobs explain {job_id}"
    assert explained["reason"] == "leased"
    assert "its handler is slow, or hangs" in explained["detail"]


@pytest.mark.slow
def test_jobs_that_are_due_in_more_than_ten_years_are_found(
    enqueue, owner, observer, findings
):
    enqueue(available_at="2035-01-01T00:00:00Z")
    assert findings() == {}
    job_id = enqueue(available_at="2262-01-01T00:00:00Z")

    subject, detail, remedy = findings()["jobs_far_ahead"]

    assert subject == "email"
    assert detail.startswith("has 1 job due in more than ten years")
    assert remedy == f"lenso-jobs explain {job_id}"


@pytest.mark.slow
def test_a_kind_that_fails_below_half_of_its_queue_is_found(enqueue, worker, findings):
    for kind, number in (("bad", 20), ("good", 30)):
        for _ in range(number):
            enqueue(kind=kind)
    worker.execute(
        "select case kind when 'bad' then (fail(job_id, lease_token, 'no', false)).status"
        " else complete(job_id, lease_token)::text end from claim('email', 100)"
    )

    assert list(findings()) == ["kind_failing"]
    assert findings()["kind_failing"][:2] == [
        "kind bad of queue email",
        "has 20 failures among the last 20 ends, most often no",
    ]


# What cannot be read.


@pytest.mark.parametrize(
    "statement",
    [
        "alter table live_job owner to current_user",
        "revoke all on live_job from {prefix}_owner",
        "revoke select on operator_act from {prefix}_owner",
        "revoke insert on attempt from {prefix}_owner",
    ],
)
def test_a_table_that_the_owner_lost_is_named_by_every_read(
    statement, owner, observer, enqueue, prefix
):
    job_id = enqueue()
    owner.execute(statement.format(prefix=prefix))

    (found,) = observer.rows(HEALTH)
    explained = observer.row(
        "select reason, detail, remedy from explain_job(%s)", job_id
    )
    for read in (
        *("inspect_queues()", "inspect_workers()", "inspect_failures()"),
        *("inspect_jobs('email', 'queued')", "inspect_key('key', 'accounts')"),
    ):
        with observer.refusing("LJ008") as refusal:
            observer.execute(f"select * from {read}")
        assert "has lost its own table" in refusal.value.diag.message_primary

    assert found[0] == "object_changed"
    assert found[2:] == (
        "is lost: the Instance's owner has lost its own table",
        "lenso-jobs check",
    )
    assert explained["reason"] == "instance_damaged"
    assert explained["remedy"] == "lenso-jobs check"


HIDDEN = [
    *(
        f"select on pg_catalog.{view}"
        for view in (
            *("pg_stat_activity", "pg_locks", "pg_prepared_xacts", "pg_roles"),
            *("pg_replication_slots", "pg_stat_replication", "pg_stat_user_tables"),
            *("pg_db_role_setting", "pg_auth_members", "pg_settings", "pg_shdepend"),
        )
    ),
    "execute on function pg_notification_queue_usage()",
    "execute on function pg_relation_size(regclass, text)",
]


@pytest.mark.sampled
@pytest.mark.parametrize("what", HIDDEN)
def test_a_hidden_object_takes_only_its_part_from_the_reads(
    what, owner, observer, enqueue
):
    job_id = enqueue()
    with owner.transaction(force_rollback=True):
        owner.execute("drop index live_job_claimable_idx")
        owner.execute(f"revoke {what} from public")
        found = owner.rows(HEALTH)
        owner.execute("select * from explain_job(%s)", (job_id,))

    names = {name for name, *_ in found}
    assert "not_readable" in names
    if "pg_roles" not in what and "pg_relation_size" not in what:
        assert {"index_unusable", "not_readable"} <= names


# Roles.


@pytest.mark.slow
def test_a_remedy_for_a_renamed_caller_never_locks_it_out(
    owner, new_caller, connect, findings
):
    name = new_caller("producer")
    with owner.transaction(force_rollback=True):
        owner.execute(f"alter role {name} rename to {name}_now")
        found = {row[0]: row[1:] for row in owner.rows(HEALTH)}

    assert found["role_missing"][0] == name
    assert f"rename to {name}" in found["role_missing"][2]
    assert found["membership_stray"][0] == f"{name}_now"
    assert found["membership_stray"][2].startswith(
        f"if it is {name} under a new name, rename it back; else revoke "
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind", ["producer", "worker", "observer", "operator", "owner"]
)
def test_a_renamed_group_is_renamed_back_by_the_remedy(kind, owner, prefix):
    with owner.transaction(force_rollback=True):
        owner.execute(f"alter role {prefix}_{kind} rename to {prefix}_other")
        found = {row[0]: row[1:] for row in owner.rows(HEALTH)}
        owner.execute(found["role_missing"][2])

        assert owner.rows(HEALTH) == []


# Prepared transactions, and silence.


@pytest.mark.parametrize("statement", ["lock table live_job", "complete"])
def test_a_prepared_transaction_is_ended_by_its_name(
    statement, owner, connect, enqueue, claim, worker, observer, configure, findings
):
    configure(notify=False)
    job_id = enqueue()
    lease = claim()
    gid = f"it's-{job_id}"
    worker.execute("begin")
    if statement == "complete":
        worker.execute("select complete(%s, %s)", lease)
        worker.execute(f"prepare transaction 'it''s-{job_id}'")
    else:
        worker.execute("rollback")
        locker = connect()
        locker.execute(f"begin; {statement}; prepare transaction 'it''s-{job_id}'")

    explained = observer.row("select reason, remedy from explain_job(%s)", job_id)
    found = findings()
    owner.execute(f"rollback prepared 'it''s-{job_id}'")

    quoted = gid.replace("'", "''")
    assert f"rollback prepared '{quoted}'" in explained["remedy"]
    assert f"commit prepared '{quoted}'" in explained["remedy"]
    assert "pg_terminate_backend" not in explained["remedy"]
    if statement != "complete":
        assert found["table_locked"][2] == f"rollback prepared '{quoted}'"


def test_a_silent_queue_is_explained_by_what_may_stop_its_workers(
    enqueue, claim, worker, owner, observer, new_caller
):
    name = new_caller("worker")
    owner.execute(f"alter role {name} connection limit 0")
    owner.execute(f"alter role {name} set statement_timeout = '1ms'")
    owner.execute(f"alter role {name} set idle_session_timeout = '10min'")
    enqueue()
    claim()
    job_id = enqueue()
    owner.execute(
        "update live_job set available_at = clock_timestamp() - interval '13 min',"
        " leased_at = leased_at - interval '13 min'"
    )

    answer = observer.row("select reason, detail from explain_job(%s)", job_id)

    assert answer["reason"] == "queue_silent"
    lines = answer["detail"].splitlines()
    assert lines[0].startswith("last claim of the queue: 2")
    assert lines[1] == "sessions that wait for the queue: 0"
    assert "sessions that may act as worker email-worker: 1" in lines
    assert any(line.startswith("live leases in the queue: 1, the") for line in lines)
    assert any(
        line.startswith(f"role {name} has idle_session_timeout = 10min: alter role")
        for line in lines
    )
    assert f"role {name} has a connection limit of 0" in lines
    assert len([line for line in lines if "statement_timeout = 1ms" in line]) == 1

    closed = f"role {name} cannot log in to this database"
    assert closed not in answer["detail"]
    with owner.transaction(force_rollback=True):
        database = sql.Identifier(owner.info.dbname).as_string(None)
        owner.execute(f"revoke connect on database {database} from public")
        assert closed in owner.value("select (explain_job(%s)).detail", job_id)


# The settings of the caller.

COSTS = [
    *(
        f"{name} = {value}"
        for name in ("cpu_operator_cost", "cpu_tuple_cost", "random_page_cost")
        for value in ("0", "1e6")
    ),
    *(
        f"enable_{name} = off"
        for name in (
            *(
                "hashagg",
                "hashjoin",
                "indexonlyscan",
                "indexscan",
                "material",
                "memoize",
            ),
            *("mergejoin", "nestloop", "seqscan", "sort", "bitmapscan", "tidscan"),
        )
    ),
    *("jit = on", "jit_above_cost = 0", "from_collapse_limit = 1"),
    *("join_collapse_limit = 1", "geqo_threshold = 2", "constraint_exclusion = on"),
    *("plan_cache_mode = force_custom_plan", "quote_all_identifiers = on"),
    *("DateStyle = 'German, DMY'", "IntervalStyle = iso_8601", "row_security = off"),
    *("bytea_output = escape", "extra_float_digits = -15", "work_mem = 64"),
]


@pytest.mark.sampled
@pytest.mark.parametrize("setting", COSTS)
def test_no_setting_of_the_session_changes_the_findings(
    setting, owner, observer, enqueue
):
    job_id = enqueue()
    owner.execute(
        "alter table job set (autovacuum_analyze_scale_factor = 0.5);"
        " drop index attempt_failed_idx; select purge(clock_timestamp())"
    )
    calm = observer.rows("select finding, subject from inspect_health()")

    observer.execute(f"set {setting}")

    assert observer.rows("select finding, subject from inspect_health()") == calm
    assert observer.value("select reason from explain_job(%s)", job_id) == (
        "instance_damaged"
    )
    observer.execute("select * from inspect_queues()")


# The whole server.


@pytest.mark.slow
def test_scarce_connections_are_found_until_sessions_are_ended(document):
    configuration = Configuration.from_json(document())
    with (
        EmbeddedServer(settings={"max_connections": "16"}) as server,
        ExitStack() as stack,
    ):

        def opened():
            return stack.enter_context(
                psycopg.connect(server.conninfo(), autocommit=True)
            )

        def scarce():
            return dba.execute(
                "select detail, remedy from jobs_email.inspect_health()"
                " where finding = 'connections_scarce'"
            ).fetchall()

        setup(configuration, server.conninfo())
        dba = opened()
        assert scarce() == []
        sessions = [opened()]
        while not (found := scarce()):
            sessions.append(opened())

        # The last three are kept for superusers.
        ((detail, remedy),) = found
        assert detail == (
            "has 12 of 16 connections in use, and keeps 3 of them for superusers"
        )
        assert "End sessions" in remedy
        dba.execute(
            "select pg_terminate_backend(%s, 5000)", (sessions[0].info.backend_pid,)
        )
        assert scarce() == []
        dba.execute("alter database postgres connection limit 2")
        ((detail, remedy),) = scarce()
        assert detail == "has 10 of 2 connections in use"
        dba.execute(remedy)
        assert scarce() == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("status", "finding"),
    [
        ("reserved", None),
        ("extended", "slot_keeps_wal"),
        ("unreserved", "slot_keeps_wal"),
        ("lost", "slot_invalid"),
    ],
)
def test_a_slot_that_keeps_wal_or_was_invalidated_is_found_and_dropped(
    status, finding, owner
):
    view = owner.value("select pg_get_viewdef('pg_replication_slots')")
    assert view.count("l.wal_status") == 1
    name = f"slot_{owner.info.backend_pid}"
    owner.execute("select pg_create_physical_replication_slot(%s, true)", (name,))
    try:
        with owner.transaction(force_rollback=True):
            owner.execute("set local allow_system_table_mods = on")
            owner.execute(
                "create or replace view pg_catalog.pg_replication_slots as "
                + view.replace("l.wal_status", f"'{status}'::text as wal_status")
            )
            found = [
                row
                for row in owner.rows(HEALTH)
                if row[1] == f"replication slot {name}"
            ]
    finally:
        owner.execute("select pg_drop_replication_slot(%s)", (name,))

    assert [row[0] for row in found] == ([finding] if finding else [])
    assert all(row[3] == f"select pg_drop_replication_slot('{name}')" for row in found)


# One judgement.


@pytest.mark.sampled
@pytest.mark.parametrize(
    "statement",
    [
        "drop index live_job_claimable_idx",
        "drop index attempt_failed_idx",
        "drop sequence claim_floor_1_at, claim_floor_2_at",
        "drop function claim(text, integer)",
        "alter function claim(text, integer) security invoker",
        "drop trigger caller_is_published on caller",
        "alter table live_job drop column last_failure_code",
        "drop table operator_act",
        "drop view explain_reason",
        "alter table job owner to current_user",
        "revoke execute on function claim(text, integer) from {prefix}_worker",
        "revoke usage on schema jobs_email from {prefix}_worker",
        'revoke {prefix}_worker from "email-worker", "spare-worker"',
        (
            "update caller set caller = 'gone' where caller = 'email-worker';"
            " delete from caller where caller = 'spare-worker'"
        ),
    ],
)
def test_explain_says_what_health_says_in_the_same_words(
    statement, owner, enqueue, prefix
):
    job_id = enqueue()
    with owner.transaction(force_rollback=True):
        owner.execute(statement.format(prefix=prefix))
        found = {
            f"{subject} {detail}": remedy
            for _, subject, detail, remedy in owner.rows(HEALTH)
        }
        explained = owner.row("select * from explain_job(%s)", job_id)

    assert explained["reason"] == "instance_damaged"
    sentences = explained["detail"].splitlines()
    assert set(sentences) <= found.keys()
    assert explained["remedy"] in {found[each] for each in sentences}
