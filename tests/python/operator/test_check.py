from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs import InvalidArgument
from lenso_jobs.operator import (
    OperatorError,
    check,
    configure,
    plan,
    setup,
    uninstall,
    upgrade,
)

DRIFT = {
    "drop index {index}": "index {index} is missing",
    "alter table live_job add column note text": "column live_job.note is not part",
    "alter table live_job set (fillfactor = 99)": "table live_job differs",
    "alter table live_job set unlogged": "table live_job differs",
    "alter table live_job enable row level security": "table live_job differs",
    "alter table job owner to postgres": "table jobs_email.job belongs to postgres",
    "create table stray (n integer)": "table stray is not part",
    "create view stray as select 1 as n": "view stray is not part",
    "create materialized view stray as select 1 as n": "table stray is not part",
    "create sequence stray": "sequence stray is not part",
    "create type stray as (n integer)": "type stray is not part",
    "create function stray() returns void language sql as ''": (
        "function stray() is not part"
    ),
    "create function claim(text) returns void language sql as ''": (
        "function claim(text) is not part"
    ),
    "drop function complete(uuid, text)": "function complete(uuid,text) is missing",
    "alter function claim(text, integer) reset all": "differs",
    "alter function claim(text, integer) security invoker": "differs",
    "alter function claim(text, integer) owner to postgres": (
        "routine jobs_email.claim(text,integer) belongs to postgres"
    ),
    "comment on function claim(text, integer) is 'x'": "differs",
    "grant select on job to public": "select on job to public is not part of",
    "grant select (payload) on job to {prefix}_observer": (
        "select on job.payload to {prefix}_observer is not part of the Instance"
    ),
    "grant execute on function claim(text, integer) to stranger": (
        "execute on claim(text,integer) to stranger is not part of the Instance"
    ),
    "grant select on live_job to stranger with grant option": (
        "select on live_job to stranger is not part of the Instance"
    ),
    "grant usage on type leased_job to public": (
        "usage on type leased_job to public is not part of the Instance"
    ),
    "revoke usage on schema jobs_email from {prefix}_worker": (
        "usage on the schema to {prefix}_worker is missing"
    ),
    "revoke execute on function claim(text, integer) from {prefix}_worker": (
        "execute on claim(text,integer) to {prefix}_worker is missing"
    ),
    "grant create on schema jobs_email to stranger": (
        "create on the schema to stranger is not part of the Instance"
    ),
    "alter table job alter column queue drop not null": "column job.queue differs",
    "alter table live_job alter column max_attempts type bigint": (
        "column live_job.max_attempts differs from this release: type"
    ),
    "alter table instance alter column notify set default false": (
        "column instance.notify differs from this release: default"
    ),
    "alter table live_job drop column last_failure_code": (
        "column live_job.last_failure_code is missing"
    ),
    "comment on table job is null": "table job differs",
    "comment on column job.kind is 'x'": "column job.kind differs",
    "update pg_index set indisvalid = false"
    " where indexrelid = 'attempt_failed_idx'::regclass": (
        "index attempt_failed_idx is not valid: it is being built"
    ),
    "create index stray_idx on job (kind)": "index stray_idx is not part",
    "alter index {index} set (fillfactor = 50)": "index {index} is not as it was installed",
    "drop trigger caller_is_published on caller": (
        "trigger caller.caller_is_published is missing"
    ),
    "alter table queue disable trigger queue_is_published": (
        "trigger queue.queue_is_published differs from this release: enabled"
    ),
    "create rule stray as on delete to operator_act do instead nothing": (
        "rule operator_act.stray is not part"
    ),
    "create policy stray on job": "policy job.stray is not part",
    "create or replace view error_code as select e.sqlstate, e.name, 'x'::text"
    " as meaning from (values ('42501'::text, 'unauthorized'::text))"
    " as e (sqlstate, name)": "view error_code differs",
    "drop view installed_version; create view installed_version as select 1 as version,"
    " 'x' as note": "view installed_version differs",
    "drop function inspect(uuid); create function inspect(id uuid) returns text"
    " language sql as 'select null'": "function inspect(uuid) differs",
    "alter table caller drop constraint caller_pkey": (
        "constraint caller.caller_pkey is missing"
    ),
    "alter table job add constraint stray check (kind <> 'x')": (
        "constraint job.stray is not part"
    ),
    "alter table instance drop constraint instance_lease_seconds_in_range,"
    " add constraint instance_lease_seconds_in_range check (lease_seconds > 0)": (
        "constraint instance.instance_lease_seconds_in_range differs"
    ),
    "alter table job drop constraint job_producer_idempotency_key_key": (
        "constraint job.job_producer_idempotency_key_key is missing"
    ),
    "alter domain instant drop constraint instant_is_finite": (
        "constraint instant.instant_is_finite is missing"
    ),
    "create trigger stray before update on job for each row"
    " execute function suppress_redundant_updates_trigger()": (
        "trigger job.stray is not part"
    ),
    "update instance set lease_seconds = 31": (
        "the document is not stored: lease_seconds changes from 31 to 30"
    ),
    "update instance set retry_jitter = 0.5": (
        "the document is not stored: retry_jitter changes from 0.5 to 0"
    ),
    "update instance set retention_seconds = 5": (
        "the document is not stored: retention_seconds changes from 5 to none"
    ),
    "set local session_replication_role = replica; delete from instance": "instance holds no configuration",
    "insert into queue values ('stray')": (
        "the document is not stored: queue stray is dropped"
    ),
    "delete from queue where queue = 'slow'": (
        "the document is not stored: queue slow is declared"
    ),
    "delete from caller where caller = 'accounts'": (
        "the document is not stored: caller accounts is declared as producer"
    ),
    "update caller set is_worker = true where caller = 'accounts'": (
        "the document is not stored: caller accounts is declared"
    ),
    "update instance set workers = '{{accounts}}'": "the row of instance does not repeat",
    "insert into live_job (job_id, available_at, attempt, max_attempts, queue)"
    " values (gen_random_uuid(), clock_timestamp(), 0, 1, 'gone')": (
        "gone is not declared and has 1 live job"
    ),
    "delete from _yoyo_migration": "migration 0001-initial is applied and not recorded",
    "insert into yoyo_lock (locked, ctime, pid) values (1, localtimestamp, 7)": (
        "yoyo_lock was taken by process 7"
    ),
    "alter table _yoyo_log owner to postgres": (
        "table jobs_email._yoyo_log belongs to postgres"
    ),
    "update _yoyo_migration set migration_id = '9999-later'": (
        "migration 9999-later is not part of this release"
    ),
}


# What no command mends by itself: another release, and jobs that somebody must decide on.
BY_HAND = {
    "update _yoyo_migration set migration_id = '9999-later'",
    (
        "insert into live_job (job_id, available_at, attempt, max_attempts, queue)"
        " values (gen_random_uuid(), clock_timestamp(), 0, 1, 'gone')"
    ),
}
# What leaves the other breaks out of sight, or has no room beside them.
ALONE = {
    *BY_HAND,
    # Rights on another role's table are told once it is the owner's again.
    "alter table job owner to postgres",
    "alter function claim(text, integer) owner to postgres",
    "delete from _yoyo_migration",
    "set local session_replication_role = replica; delete from instance",
    "update instance set workers = '{{accounts}}'",
    "drop index {index}",
    # It might be the other column's, once there is one too many.
    "alter table live_job drop column last_failure_code",
    "drop function complete(uuid, text)",
    "alter function claim(text, integer) reset all",
    "alter table live_job set unlogged",
    "create table stray (n integer)",
    "create materialized view stray as select 1 as n",
    "create sequence stray",
    "create type stray as (n integer)",
}


@pytest.fixture
def found(configuration, conninfo):
    """What check finds now, as sentences."""

    def found(**changes):
        return [finding.what for finding in check(configuration(**changes), conninfo)]

    return found


def test_a_sound_instance_has_no_findings(found):
    assert found() == []


@pytest.mark.slow
@pytest.mark.parametrize("statement", sorted(ALONE))
def test_check_finds(statement, found, owner, prefix):
    index = owner.value(
        "select indexrelid::regclass::text from pg_index"
        " where indrelid = 'live_job'::regclass and not indisprimary limit 1"
    )
    names = {"index": index, "prefix": prefix}
    owner.execute(statement.format(**names))

    findings = found()

    assert any(DRIFT[statement].format(**names) in what for what in findings), findings


@pytest.fixture
def mend(as_dropped):
    """Do what check says, until it says nothing more; return what it said."""

    def mend(of, conninfo):
        said = []
        for _ in range(4):
            findings = check(of, conninfo)
            said += findings
            for remedy in dict.fromkeys(finding.remedy for finding in findings):
                carry_out(as_dropped(remedy), of, conninfo)
            if not findings:
                return said
        raise AssertionError(findings)

    return mend


def carry_out(remedy, of, conninfo):
    if remedy.startswith("lenso-jobs upgrade"):
        upgrade(of, conninfo, repair_too="--repair" in remedy)
    elif remedy in ("lenso-jobs configure", "lenso-jobs setup"):
        {"configure": configure, "setup": setup}[remedy[11:]](of, conninfo)
    else:
        assert not remedy.startswith("lenso-jobs"), remedy
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(remedy)


@pytest.fixture
def broken(new_instance, reused_database):
    """An Instance of its own with a job in it, broken by statements of DRIFT."""

    def broken(*statements):
        configuration, conninfo = new_instance()
        setup(configuration, conninfo)
        with psycopg.connect(
            conninfo, autocommit=True, options="-c search_path=jobs_email"
        ) as connection:
            connection.execute("set role accounts")
            connection.execute("select enqueue('email', 'send', '{}', 'k')")
            connection.execute("reset role")
            for statement in statements:
                names = {"index": "live_job_claimable_idx"}
                connection.execute(
                    statement.format(prefix=configuration.prefix, **names)
                )
        return configuration, conninfo

    return broken


@pytest.mark.slow
def test_the_remedies_of_check_mend_an_instance_broken_in_forty_ways(broken, mend):
    together = [statement for statement in DRIFT if statement not in ALONE]
    configuration, conninfo = broken(*together)

    said = "\n".join(finding.what for finding in mend(configuration, conninfo))

    assert len(together) >= 40
    for statement in together:
        names = {"index": "live_job_claimable_idx", "prefix": configuration.prefix}
        assert DRIFT[statement].format(**names) in said
    assert claims(conninfo)


@pytest.mark.long
@pytest.mark.parametrize("statement", sorted(DRIFT.keys() - BY_HAND))
def test_the_remedies_of_check_mend(statement, broken, mend):
    configuration, conninfo = broken(statement)

    said = mend(configuration, conninfo)

    assert said
    assert claims(conninfo)


RENAMES = {
    "alter table live_job rename to live_jobs": "alter table live_jobs rename to live_job",
    "alter table instance rename to instances": "alter table instances rename to instance",
    "alter table live_job rename column attempt to tries": (
        "alter table live_job rename column tries to attempt"
    ),
    "alter domain instant rename to moment": "alter domain moment rename to instant",
    "alter type enqueued_job rename to enqueued": (
        "alter type enqueued rename to enqueued_job"
    ),
    "alter sequence operator_act_operator_act_id_seq rename to act_seq": None,
    "alter index {index} rename to other_idx": None,
    "alter table job rename constraint job_producer_idempotency_key_key to job_key": None,
    **{
        f"create schema other; alter table {name} set schema other": (
            f"alter table other.{name} set schema jobs_email; drop schema other"
        )
        for name in ("live_job", "job", "attempt")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("statement", RENAMES)
def test_nothing_that_was_renamed_or_moved_is_dropped_or_made_anew(
    statement, broken, mend
):
    configuration, conninfo = broken(statement)

    findings = check(configuration, conninfo)

    remedies = [finding.remedy for finding in findings]
    assert not [
        each.remedy for each in findings if "drop " in each.remedy and not each.deletes
    ]
    if RENAMES[statement] is None:
        # In the words of inspect_health, which does not look for the new name.
        assert set(remedies) == {"lenso-jobs upgrade --repair"}
        assert all(each.what.endswith(" is equal") for each in findings)
    else:
        assert any(
            "if it was renamed or moved, put it back" in each.what for each in findings
        )
        with psycopg.connect(
            conninfo, autocommit=True, options="-c search_path=jobs_email"
        ) as connection:
            connection.execute(RENAMES[statement])
    mend(configuration, conninfo)
    assert claims(conninfo)


LOST = [
    "alter table live_job rename to live_jobs",
    "alter table live_job set schema public",
]


@pytest.mark.slow
@pytest.mark.parametrize("statement", LOST)
def test_a_repair_makes_no_empty_table_beside_a_renamed_or_moved_table(
    statement, broken
):
    configuration, conninfo = broken(statement)

    with pytest.raises(OperatorError, match="restore it from a backup"):
        upgrade(configuration, conninfo, repair_too=True)


REMEDIES = {
    # A swap that was cut off: the release's own table is the empty one.
    "alter table live_job rename to live_jobs;"
    " create table live_job (like live_jobs including all)": (
        (
            "table live_jobs is not part of this release, has the columns of live_job, "
            "and holds 1 row"
        ),
        "keep it: its rows may be those of live_job",
    ),
    "create table copy (like live_job including all);"
    " alter table live_job rename to live_jobs": (
        "table live_job is missing; if it was renamed or moved, put it back",
        "restore it from a backup; an empty table would hide the loss",
    ),
    "alter table job alter column max_attempts type integer": (
        "column job.max_attempts differs from this release: type",
        (
            "alter table jobs_email.job alter column max_attempts"
            " type jobs_email.asked_attempts"
            " using max_attempts::jobs_email.asked_attempts"
        ),
    ),
    "alter table job drop column queue": (
        "column job.queue is missing; if it was renamed or moved, put it back",
        (
            "in one transaction: alter table jobs_email.job add column queue text"
            ' collate "C";'
            " its values, for instance from a backup; alter table jobs_email.job"
            " alter column queue set not null"
        ),
    ),
    "create function stray(leased_job, integer[]) returns text language sql"
    " as 'select null'": (
        "function stray(leased_job,integer[]) is not part of this release",
        "drop routine jobs_email.stray(jobs_email.leased_job,integer[])",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("statement", REMEDIES)
def test_a_remedy_says_what_can_be_done_anywhere_and_loses_nothing(statement, broken):
    configuration, conninfo = broken(statement)

    findings = {each.what: each.remedy for each in check(configuration, conninfo)}

    what, remedy = REMEDIES[statement]
    assert findings[what].startswith(remedy)


TOGETHER = [
    # The sequence goes with its table, and a stray one is not it.
    ["drop table operator_act", "create sequence stray"],
    # The index, and PostgreSQL 18's constraint, go with the column.
    ["alter table job add column note text not null default '' check (note = '')",
     "create index note_idx on job (note)"],
    # What is built upon another comes first.
    ["create domain dom as text; create table stray (n dom)",
     "create view a_view as select n from stray; create view b_view as table a_view",
     "create function stray_fn(stray) returns dom language sql as 'select null'",
     ("create function trigger_fn() returns trigger language plpgsql as"
     " 'begin return new; end'; create trigger a_trigger before insert on job"
     " for each row execute function trigger_fn()")],
    ["alter database {d} set quote_all_identifiers = on",
     "alter index {index} rename to other_idx", "create sequence stray"],
    ["alter database {d} set row_security = off",
     "alter table live_job force row level security",
     "alter table live_job enable row level security"],
    ["alter database {d} set default_transaction_read_only = on",
     "begin read write; create sequence stray; commit"],
    ["delete from _yoyo_migration",
     "alter table queue add column note text", "drop index {index}"],
    ["delete from _yoyo_migration", "drop table operator_act", "drop view error_code"],
    ["alter role {p}_worker rename to {p}_workers", "alter role {p}_owner login",
     "grant {p}_owner to {p}_workers"],
    ["alter role {p}_operator superuser login"],
    ["alter schema jobs_email owner to postgres",
     "alter role {p}_owner rename to {p}_owners"],
    ["alter schema jobs_email owner to postgres",
     "drop owned by {p}_observer; drop role {p}_observer"],
    ["create view public.of_somebody as select name from error_code",
     ("create or replace view error_code as select ''::text as sqlstate,"
     " ''::text as name, ''::text as meaning")],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("statements", TOGETHER, ids=lambda each: each[-1][:40])
def test_the_remedies_of_check_for_several_breaks_run_in_their_order(
    statements, broken, mend
):
    configuration, conninfo = broken()
    names = {
        "p": configuration.prefix,
        "d": conninfo_to_dict(conninfo)["dbname"],
        "index": "live_job_claimable_idx",
    }
    for statement in statements:
        with psycopg.connect(
            conninfo, autocommit=True, options="-c search_path=jobs_email"
        ) as connection:
            connection.execute(statement.format(**names))

    assert mend(configuration, conninfo)

    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("drop view if exists public.of_somebody")
        connection.execute(f"alter database {names['d']} reset all")
    assert claims(conninfo)


@pytest.mark.slow
def test_a_renamed_table_is_not_made_anew_where_no_migration_is_recorded(broken):
    configuration, conninfo = broken(
        "alter table live_job rename to live_jobs",
        "alter index live_job_pkey rename to live_jobs_pkey",
        "alter index {index} rename to live_jobs_idx",
        "delete from _yoyo_migration",
    )

    report = upgrade(configuration, conninfo)

    assert report.migrations == ()
    assert [name[:4] for name in report.recorded] == ["0001"]
    assert report.differences[0].what == (
        "table live_jobs is not part of this release, has the columns of live_job, "
        "and holds 1 row"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["", "0001"])
def test_an_instance_that_says_nothing_of_itself_is_not_a_stray(kept, broken, mend):
    configuration, conninfo = broken(
        f"delete from _yoyo_migration where migration_id !~ '^{kept or 'x'}'",
        "drop view installed_version",
    )

    said = [each.remedy for each in check(configuration, conninfo)]
    mend(configuration, conninfo)

    assert all(remedy.startswith("lenso-jobs ") for remedy in said)
    assert claims(conninfo)


IN_THE_WAY = [
    "alter table attempt alter column worker drop not null",
    "alter table attempt add column note text",
    "alter function claim(text, integer) owner to postgres",
    "alter domain instant drop constraint instant_is_finite",
    "alter table job drop constraint job_pkey cascade",
]


@pytest.mark.slow
@pytest.mark.parametrize("applied", [1, 2])
@pytest.mark.parametrize("statement", IN_THE_WAY)
def test_an_obstacle_to_a_pending_migration_is_reported_before_it(
    statement, applied, new_instance, later, mend
):
    configuration, conninfo = new_instance()
    if applied > 1:
        later(applied)
    setup(configuration, conninfo)
    with psycopg.connect(
        conninfo, autocommit=True, options="-c search_path=jobs_email"
    ) as connection:
        connection.execute("set role accounts")
        connection.execute("select enqueue('email', 'send', '{}', 'k')")
        connection.execute("reset role")
        connection.execute(statement)
    later()

    first = [finding.remedy for finding in check(configuration, conninfo)]
    mend(configuration, conninfo)

    by_hand = [not remedy.startswith("lenso-jobs") for remedy in first]
    assert by_hand == [True] * (len(first) - 3 + applied) + [False] * (3 - applied)
    assert len(first) > 3 - applied
    assert claims(conninfo)


@pytest.mark.slow
def test_a_migration_cut_off_within_its_index_is_the_only_report(new_instance, later):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    later()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "create index attempt_worker_idx on jobs_email.attempt (worker, ended_at);"
            " update pg_index set indisvalid = false"
            " where indexrelid = 'jobs_email.attempt_worker_idx'::regclass"
        )

    findings = check(configuration, conninfo)

    assert [finding.what[:14] for finding in findings] == [
        "migration 0002",
        "migration 0003",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("drop table instance", "holds no Instance|lenso-jobs check"),
        ("drop view installed_version", "installed_version says otherwise"),
    ],
)
def test_a_setup_that_cannot_do_says_where_to_look(
    statement, words, broken, fresh_prefix
):
    configuration, conninfo = broken(statement)

    with pytest.raises(OperatorError, match=words):
        setup(configuration, conninfo)


@pytest.mark.slow
@pytest.mark.parametrize("and_its_table", [False, True])
def test_a_renamed_schema_is_named_and_no_command_makes_another(and_its_table, broken):
    configuration, conninfo = broken(
        *["alter table live_job rename to live_jobs"] * and_its_table,
        "alter schema jobs_email rename to other",
    )

    told = []
    for act in (check, plan, configure, upgrade, setup):
        with pytest.raises((OperatorError, InvalidArgument)) as refused:
            act(configuration, conninfo)
        told.append(f"{refused.value} {getattr(refused.value, 'hint', '')}")

    assert all(f"{configuration.owner} owns schema other" in each for each in told)
    assert all("rename it back" in each for each in told)
    assert not [each for each in told if "lenso-jobs setup" in each]


@pytest.mark.slow
def test_the_objects_of_a_missing_table_are_not_reported_beside_it(broken):
    configuration, conninfo = broken(
        "drop table operator_act; create table stray"
        " (n integer primary key, m integer not null check (m > 0));"
        " create index on stray (m)"
    )

    assert sorted(finding.what for finding in check(configuration, conninfo)) == [
        "table operator_act is missing; if it was renamed or moved, put it back",
        "table stray is not part of this release",
    ]


UNDONE = {
    "delete from installed_digest": "installed_digest is out of date",
    "update installed_digest set digest = 'x'": "installed_digest is out of date",
    "select purge(clock_timestamp()), purge(clock_timestamp());"
    " alter sequence operator_act_operator_act_id_seq restart": (
        "sequence operator_act_operator_act_id_seq gives a number that is taken"
    ),
    "truncate operator_act; alter sequence operator_act_operator_act_id_seq restart;"
    " insert into operator_act (operator, act, arguments, job_count)"
    " values ('x', 'y', '{{}}', 0);"
    " alter sequence operator_act_operator_act_id_seq restart": (
        "sequence operator_act_operator_act_id_seq gives a number that is taken"
    ),
    "do $$ begin execute format('alter database %I set"
    " default_transaction_read_only = on', current_database()); end $$": ("database "),
    'do $$ begin execute format(\'alter role "email-worker" in database %I set'
    " default_transaction_read_only = on', current_database()); end $$": (
        "role email-worker in database "
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("statement", UNDONE)
def test_a_fault_that_no_object_shows_is_found_and_mended(statement, broken, mend):
    configuration, conninfo = broken(statement)

    said = [finding.what for finding in mend(configuration, conninfo)]

    assert len(said) == 1
    assert said[0].startswith(UNDONE[statement])
    assert claims(conninfo)
    with psycopg.connect(
        conninfo, autocommit=True, options="-c search_path=jobs_email"
    ) as connection:
        connection.execute("select purge(clock_timestamp())")
        findings = connection.execute("select finding from inspect_health()")
        assert findings.fetchall() == []


def claims(conninfo):
    """Claim the one job there is, as a worker would."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute('set role "email-worker"')
        cursor = connection.execute("select kind from jobs_email.claim('email')")
        return cursor.fetchall() == [("send",)]


@pytest.mark.slow
def test_a_finding_without_a_command_says_what_to_do(configuration, conninfo, owner):
    owner.execute(
        "insert into live_job (job_id, available_at, attempt, max_attempts, queue)"
        " values (gen_random_uuid(), clock_timestamp(), 0, 1, 'gone')"
    )

    (finding,) = check(configuration(), conninfo)

    assert finding.what == "gone is not declared and has 1 live job"
    assert finding.remedy == (
        "Declare it again until its jobs have ended: lenso-jobs configure."
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["owner", "operator"])
def test_check_finds_a_caller_that_may_do_more_than_callers_may(
    kind, found, owner, prefix
):
    owner.execute(f'grant "{prefix}_{kind}" to operations')
    try:
        findings = found()
    finally:
        owner.execute(f'revoke "{prefix}_{kind}" from operations')

    assert f"operations is a caller and a member of {prefix}_{kind}" in findings


@pytest.mark.slow
@pytest.mark.parametrize("group", ["pg_read_all_data", "pg_write_all_data"])
def test_check_finds_a_caller_that_needs_no_grants_on_tables(
    group, found, owner, new_role, configure, prefix
):
    # Its own: others look at the callers they share with it.
    caller, between = new_role(members_of=(f"{prefix}_observer",)), new_role()
    observers = {"observer_instances": ["operations", caller]}
    configure(**observers)
    assert found(**observers) == []

    owner.execute(f'grant "{group}" to "{between}"; grant "{between}" to "{caller}"')

    assert found(**observers) == [
        f"{caller} is a caller and a member of {group} through {between}"
    ]


@pytest.mark.slow
def test_options_set_away_and_back_are_no_difference(found, owner):
    owner.execute("alter table live_job set (fillfactor = 90)")
    owner.execute("alter table live_job set (fillfactor = 32)")

    assert found() == []


def test_check_finds_an_edited_function(found, owner):
    definition = owner.value("select pg_get_functiondef('_caller()'::regprocedure)")
    owner.execute(definition.replace("coalesce", "greatest"))

    assert found() == ["function _caller() differs from this release: definition"]


@pytest.mark.slow
def test_every_finding_says_what_mends_it(configuration, conninfo, owner):
    owner.execute("create table stray (n integer)")
    owner.execute("update instance set lease_seconds = 31")
    owner.execute("grant select on job to public")

    findings = check(configuration(), conninfo)

    assert len(findings) > 2
    assert all(finding.remedy for finding in findings)


@pytest.mark.slow
def test_a_grant_taken_away_and_given_back_is_not_a_difference(found, owner, prefix):
    for statement in (
        "{} execute on function inspect(uuid) {} %s_producer",
        "{} select on error_code {} %s_producer",
        "{} usage on schema jobs_email {} %s_producer",
    ):
        for words in (("revoke", "from"), ("grant", "to")):
            owner.execute(statement.format(*words) % prefix)

    assert found() == []


@pytest.mark.slow
def test_the_contents_of_the_tables_are_no_difference(found, enqueue, claim):
    enqueue()
    claim()

    assert found() == []


@pytest.mark.slow
def test_a_document_that_differs_from_what_is_stored_is_found(found):
    findings = found(lease_seconds=29, queues=["email"])

    assert findings == [
        "the document is not stored: lease_seconds changes from 30 to 29",
        "the document is not stored: queue slow is dropped",
    ]


@pytest.mark.slow
def test_check_changes_nothing(found, owner):
    def everything():
        return owner.rows(
            "select nspname::text, xmin::text from pg_namespace union all"
            " select rolname::text, oid::text from pg_roles order by 1"
        ), owner.rows("select * from operator_act")

    before = everything()

    found()

    schemas = [row for row in everything()[0] if row[0].startswith("lenso_jobs_check")]
    assert schemas == []
    assert everything()[1] == before[1]


@pytest.mark.slow
def test_check_looks_from_a_new_session_with_any_search_path(configuration, conninfo):
    odd = make_conninfo(conninfo, options="-c search_path=pg_catalog -c role=none")

    assert check(configuration(), odd) == []


# Roles.


@pytest.fixture
def instance(new_instance):
    """An Instance whose roles a test may spoil."""
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)

    def spoil(statement):
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(statement.format(p=configuration.prefix))
        return [finding.what for finding in check(configuration, conninfo)]

    spoil.prefix = configuration.prefix
    spoil.configuration, spoil.conninfo = configuration, conninfo
    return spoil


def test_check_finds_a_missing_membership(instance):
    findings = instance('revoke {p}_worker from "email-worker"')

    assert findings == [f"email-worker is not a member of {instance.prefix}_worker"]


@pytest.mark.slow
def test_check_finds_a_stray_membership(instance, role):
    name = role()

    findings = instance(f"grant {{p}}_producer to {name}")

    assert findings == [
        f"{name} is a member of {instance.prefix}_producer and not declared"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["owner", "producer", "worker", "observer", "operator"]
)
def test_check_finds_a_group_role_that_can_log_in(instance, kind):
    findings = instance(f"alter role {{p}}_{kind} login")

    assert findings == [f"{instance.prefix}_{kind} can log in"]


@pytest.mark.slow
def test_check_finds_a_group_role_that_is_a_superuser(instance):
    findings = instance("alter role {p}_operator superuser")

    assert findings == [f"{instance.prefix}_operator is a superuser"]


@pytest.mark.slow
def test_an_owner_with_pg_read_all_stats_is_no_finding_either(new_instance):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"grant pg_read_all_stats to {configuration.prefix}_owner")

    assert check(configuration, conninfo) == []
    assert setup(configuration, conninfo).migrations == ()
    assert configure(configuration, conninfo) is False


@pytest.mark.slow
def test_a_forgotten_role_prefix_is_named(new_instance, fresh_prefix):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    forgotten, _ = new_instance(role_prefix=f"{fresh_prefix}_b")

    for act in (check, plan, configure):
        with pytest.raises(
            OperatorError, match=f"role_prefix in the document to {fresh_prefix}, which"
        ):
            act(forgotten, conninfo)
    with pytest.raises(InvalidArgument, match="exists and does not belong to"):
        setup(forgotten, conninfo)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["superuser", "operator"])
def test_an_unrelated_role_is_not_taken_for_a_dropped_caller(kind, new_instance, role):
    caller = role()
    configuration, conninfo = new_instance(observer_instances=[caller])
    setup(configuration, conninfo)
    groups = {
        name: f"{configuration.prefix}_{name}" for name in ("observer", "operator")
    }
    if kind == "operator":
        other = role(member_of=groups.values())
    else:
        role("superuser", member_of=[groups["observer"]])
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"drop role {caller}")

    configure(configuration, conninfo)

    found = [finding.what for finding in check(configuration, conninfo)]
    assert found == (
        [f"{other} is a member of {groups['observer']} and not declared"]
        if kind == "operator"
        else []
    )


JOBS_AT_STAKE = [
    (
        "create table swap (like live_job); alter table live_job rename to old;"
        " create table live_job (like swap) partition by list (queue); drop table swap;"
        " drop table old"
    ),
    "alter table live_job rename to older; alter table older add column note text",
    "alter table job rename to jobs; alter table jobs alter column kind type varchar(300)",
    (
        "alter table job rename column payload to body;"
        " alter table job alter column body type text"
    ),
    "drop table live_job",
    "drop table attempt",
]


@pytest.mark.slow
@pytest.mark.parametrize("statement", JOBS_AT_STAKE)
def test_no_command_and_no_drop_is_printed_where_jobs_are_at_stake(statement, broken):
    configuration, conninfo = broken(statement)

    findings = check(configuration, conninfo)

    assert findings
    assert not [each for each in findings if each.remedy.startswith("drop table")]
    assert all(each.deletes for each in findings if " drop column " in each.remedy)
    if "drop table" in statement and "swap" not in statement:
        with pytest.raises(OperatorError, match="restore it from a backup"):
            upgrade(configuration, conninfo, repair_too=True)


@pytest.mark.slow
def test_a_role_with_admin_option_on_the_groups_is_not_a_stray(
    unprivileged, fresh_prefix, conninfo, role
):
    configuration, as_dba = unprivileged
    dba, dbname = (conninfo_to_dict(as_dba)[name] for name in ("user", "dbname"))
    superuser = make_conninfo(conninfo, dbname=dbname)
    with psycopg.connect(superuser, autocommit=True) as connection:
        connection.execute(f"alter role {dba} nocreaterole")
        for kind in ("owner", "producer", "worker", "observer", "operator"):
            connection.execute(f"create role {fresh_prefix}_{kind}")
            connection.execute(
                f"grant {fresh_prefix}_{kind} to {dba} with admin option"
            )
        connection.execute(f"grant {fresh_prefix}_operator to {role()}")
    setup(configuration, as_dba)

    with psycopg.connect(superuser) as connection:
        health = connection.execute(
            "select finding, subject from jobs_email.inspect_health()"
        ).fetchall()

    assert check(configuration, as_dba) == []
    assert ("membership_stray", dba) not in health
    assert plan(configuration, as_dba).parts == ()
    done = uninstall(configuration, as_dba, keep_data=True)
    assert dba not in [member for member, _ in done.members]
    upgrade(configuration, as_dba, repair_too=True)
    configure(configuration, as_dba)
    assert check(configuration, as_dba) == []


@pytest.mark.slow
def test_a_group_with_rights_in_another_database_is_reported(
    instance, new_database, lenso_jobs
):
    other = new_database()
    with psycopg.connect(other, autocommit=True) as connection:
        connection.execute("create table of_somebody (n integer)")
        connection.execute(f"grant select on of_somebody to {instance.prefix}_worker")
    dbname = conninfo_to_dict(other)["dbname"]
    told = (
        f"{instance.prefix}_worker owns something or has a right in database {dbname}"
    )

    assert instance("select 1") == [told]
    with pytest.raises(OperatorError, match=told):
        plan(instance.configuration, instance.conninfo)
    with pytest.raises(InvalidArgument, match=f"in database {dbname}"):
        setup(instance.configuration, instance.conninfo)
    with psycopg.connect(other, autocommit=True) as connection:
        connection.execute("drop table of_somebody")
    assert instance("select 1") == []


ROLES = {
    "alter role {p}_worker rename to {p}_renamed": (
        "{p}_worker is a group role and does not exist"
    ),
    "alter role {p}_owner rename to {p}_renamed": "{p}_renamed owns the Instance and is not named",
    "drop owned by {p}_observer; drop role {p}_observer": (
        "{p}_observer is a group role and does not exist"
    ),
    "drop role {c}": "{c} is a declared caller and does not exist",
    "revoke {p}_worker from {c}": "{c} is not a member of {p}_worker",
    "grant {p}_producer to {c}": "{c} is a member of {p}_producer and not declared",
    "grant {p}_operator to {c}": "{c} is a caller and a member of {p}_operator",
    "grant {p}_owner to {p}_worker": "{p}_worker is a member of {p}_owner",
    "alter role {c} superuser": "{c} is a caller and a superuser",
    "alter role {p}_producer login": "{p}_producer can log in",
    "alter role {p}_owner superuser": "{p}_owner is a superuser",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "statements", [list(ROLES)[:1], list(ROLES)[3:4], list(ROLES)[5:]], ids=len
)
def test_the_remedies_of_check_mend_the_roles(statements, new_instance, role, mend):
    mends_the_roles(statements, new_instance, role, mend)


@pytest.mark.long
@pytest.mark.parametrize("statement", ROLES)
def test_the_remedies_of_check_mend_a_role(statement, new_instance, role, mend):
    mends_the_roles([statement], new_instance, role, mend)


def mends_the_roles(statements, new_instance, role, mend):
    caller = role()
    configuration, conninfo = new_instance(worker_instances=["email-worker", caller])
    setup(configuration, conninfo)
    names = {"p": configuration.prefix, "c": caller}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.format(**names))

    said = " | ".join(finding.what for finding in mend(configuration, conninfo))

    for statement in statements:
        assert ROLES[statement].format(**names) in said
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"set role {caller}")
        assert connection.execute("select jobs_email.claim('email')").fetchall() == []


# What check cannot see.


def test_a_missing_instance_is_an_error(new_instance):
    with pytest.raises(OperatorError, match="lenso-jobs setup"):
        check(*new_instance())


def test_a_schema_without_an_instance_is_an_error(configuration, conninfo, owner):
    owner.execute("create schema jobs_other")

    with pytest.raises(OperatorError, match="choose another schema"):
        check(configuration(schema="jobs_other"), conninfo)


def test_a_role_that_may_not_look_is_an_error(configuration, conninfo):
    with pytest.raises(OperatorError, match="cannot tell"):
        check(configuration(), make_conninfo(conninfo, user="accounts"))
