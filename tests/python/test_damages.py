"""Instances damaged in several ways at once, and mended by what check prints alone."""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass, field

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs.operator import setup

pytestmark = pytest.mark.slow

# Others can be tried, as FIRST:NUMBER.
FIRST, NUMBER = map(int, os.environ.get("LENSO_JOBS_TEST_DAMAGES", "1:10").split(":"))
ROUNDS = 6

EDIT = (
    "do $$ begin execute replace(pg_get_functiondef('{}'::regprocedure), '{}', '{}');"
    " end $$"
)
IN_DATABASE = "alter database {{db}} set {}"

# What inspect_health must have a finding about, while nothing else is wrong.
SEEN = [
    # Functions.
    EDIT.format("_caller()", "coalesce", "greatest"),
    EDIT.format("claim(text, integer)", "for update", "for no key update"),
    EDIT.format("inspect_queues()", "begin", "begin perform 1;"),
    EDIT.format("_faults_of_roles()", "is a member of", "is member of"),
    "drop function complete(uuid, text)",
    "drop function configure(jsonb, boolean)",
    "drop function _objects()",
    "drop function _lease_due",
    "drop function redrive(uuid, integer)",
    "alter function fail(uuid, text, text, boolean) owner to postgres",
    "alter function claim(text, integer) owner to stranger",
    "alter function claim(text, integer) stable",
    "alter function renew(uuid, text) reset all",
    "alter function inspect(uuid) security invoker",
    "alter function complete(uuid, text) strict",
    "alter function purge(timestamptz, integer) rename to purged",
    "alter function renew_many(uuid[], text[]) set schema public",
    "alter function enqueue_many(jsonb) set search_path = public",
    "revoke execute on function claim(text, integer) from {p}_worker",
    "revoke execute on all functions in schema jobs_email from {p}_observer",
    "grant execute on all functions in schema jobs_email to public",
    "grant execute on function _caller() to public",
    "grant execute on function purge(timestamptz, integer) to stranger with grant option",
    "grant execute on function claim(text, integer) to {p}_producer",
    "create function claim(text) returns void language sql as ''",
    "create procedure stray() language sql as ''",
    "create function stray(leased_job) returns text language sql as 'select null'",
    (
        "create function stray() returns trigger language plpgsql as 'begin end';"
        " create trigger stray before insert on job execute function stray()"
    ),
    "create aggregate stray (integer) (sfunc = int4pl, stype = integer)",
    (
        "drop function inspect(uuid); create function inspect(id uuid) returns text"
        " language sql as 'select null'"
    ),
    # Views.
    "drop view error_code",
    "drop view health_finding; create table health_finding (finding text)",
    (
        "drop view installed_version; create view installed_version as"
        " select 1 as version, 'x' as note"
    ),
    "alter view explain_reason rename to explain_reasons",
    "revoke select on error_code from {p}_producer",
    # Triggers, rules, policies.
    "drop trigger caller_is_published on caller",
    "alter table queue disable trigger queue_is_published",
    "alter table caller disable trigger all",
    "alter trigger queue_is_published on queue rename to published",
    (
        "create trigger stray before update on job for each row"
        " execute function suppress_redundant_updates_trigger()"
    ),
    "create rule stray as on delete to operator_act do instead nothing",
    "create rule stray as on insert to attempt do instead nothing",
    # Indexes.
    "drop index live_job_claimable_idx",
    "drop index attempt_failed_idx; drop index attempt_ended_at_idx",
    (
        "update pg_index set indisvalid = false"
        " where indexrelid = 'live_job_claimable_idx'::regclass"
    ),
    (
        "update pg_index set indisready = false, indisvalid = false"
        " where indexrelid = 'attempt_failed_idx'::regclass"
    ),
    "alter index live_job_claimable_idx rename to claimable",
    "drop index attempt_failed_idx; create index attempt_failed_idx on attempt (worker)",
    "create index stray_idx on job (kind)",
    "create unique index stray_idx on live_job (job_id, attempt)",
    # Constraints.
    "alter table job drop constraint job_producer_idempotency_key_key",
    "alter table caller drop constraint caller_pkey",
    "alter table live_job drop constraint live_job_pkey",
    "alter table attempt rename constraint attempt_pkey to attempt_key",
    (
        "alter table instance drop constraint instance_lease_seconds_in_range,"
        " add constraint instance_lease_seconds_in_range"
        " check (lease_seconds between 1 and 3600) not valid"
    ),
    "alter table job add constraint stray check (kind <> 'x')",
    "alter domain instant drop constraint instant_is_finite",
    (
        "alter domain object_payload drop constraint object_payload_is_an_object,"
        " add constraint stray check (value is not null) not valid"
    ),
    # Columns and tables.
    "alter table job alter column queue drop not null",
    "alter table live_job alter column max_attempts type bigint",
    "alter table live_job drop column last_failure_code",
    "alter table queue add column note text",
    "alter table caller add column note text not null default '' check (note <> 'x')",
    "alter table job alter column max_attempts type integer",
    "alter table job drop column available_at",
    "alter table live_job rename column attempt to tries",
    "alter table attempt rename column outcome to fate",
    "alter table instance rename column queues to names",
    "alter table live_job rename to live_jobs",
    "alter table caller rename to callers",
    "alter table operator_act rename to acts",
    "alter table attempt set unlogged",
    (
        "alter table live_job enable row level security;"
        " alter table live_job force row level security"
    ),
    (
        "alter table job enable row level security; alter table job force row level security;"
        " create policy stray on job using (kind = 'x')"
    ),
    "create table stray (n integer primary key)",
    "create materialized view stray as select 1 as n",
    (
        "create table stray (n serial primary key);"
        " create view stray_view as select n from stray"
    ),
    "create view stray as select max_attempts, last_failure_code from live_job",
    "drop table queue",
    "drop table caller",
    "drop table installed_object",
    "drop table operator_act",
    "grant select on job to public",
    "grant select (payload) on job to {p}_observer",
    "grant all on live_job to stranger with grant option",
    "grant usage on type leased_job to public",
    "grant create on schema jobs_email to stranger",
    "grant usage on schema jobs_email to public",
    "revoke usage on schema jobs_email from {p}_worker",
    "revoke all on schema jobs_email from {p}_producer, {p}_observer, {p}_operator",
    "alter sequence operator_act_operator_act_id_seq rename to act_seq",
    # What is recorded.
    "delete from instance",
    "drop table instance",
    "delete from installed_object",
    "update installed_object set digest = 'x' where kind = 'function'",
    "delete from installed_object where kind in ('grant', 'index')",
    "select setval('operator_act_operator_act_id_seq', 1, false)",
    # Roles.
    "alter role {p}_worker rename to {p}_workers",
    "alter role {p}_owner rename to {p}_owners",
    "drop owned by {p}_observer; drop role {p}_observer",
    (
        "drop owned by {p}_operator; drop role {p}_operator;"
        " drop owned by {p}_producer; drop role {p}_producer"
    ),
    "alter role {worker} rename to {worker}_now",
    "drop role {producer}",
    "revoke {p}_worker from {worker}",
    "revoke {p}_producer from {producer}; revoke {p}_worker from {worker}",
    "grant {p}_producer to stranger",
    "grant {p}_worker to {producer} with admin option",
]
# What nothing is said of, or by check alone.
UNSEEN = [
    (
        "create or replace view error_code as select e.sqlstate, e.name, 'x'::text"
        " as meaning from (values ('42501'::text, 'unauthorized'::text))"
        " as e (sqlstate, name)"
    ),
    "comment on function claim(text, integer) is 'x'",
    "comment on table job is null",
    "comment on column job.kind is 'x'",
    "comment on type leased_job is 'x'",
    "alter function renew(uuid, text) cost 7",
    "alter table live_job set (fillfactor = 99)",
    "alter table live_job reset (autovacuum_vacuum_threshold, fillfactor)",
    "alter table job set (autovacuum_analyze_scale_factor = 0.5)",
    "alter index live_job_claimable_idx set (fillfactor = 50)",
    "alter table job enable row level security",
    "create policy stray on job",
    "alter table job owner to postgres",
    "alter view error_code owner to postgres",
    "alter domain instant owner to postgres",
    "alter type leased_job owner to stranger",
    "alter table instance alter column notify set default false",
    "alter table operator_act alter column acted_at drop default",
    "create type stray as (n integer)",
    "create domain stray as text",
    "create type stray as enum ('a', 'b')",
    "alter type enqueued_item rename to enqueued",
    "alter domain asked_attempts rename to attempts",
    "create sequence stray",
    "drop type failed_item cascade",
    "alter schema jobs_email owner to postgres",
    "update instance set lease_seconds = 31, retry_jitter = 0.5",
    "update instance set retention_seconds = 5000000, notify = false",
    "update instance set workers = '{{}}', queues = '{{email}}'",
    "insert into queue values ('stray')",
    "delete from queue",
    "delete from queue where queue = 'slow'",
    "update caller set is_worker = not is_worker, is_producer = true",
    "delete from caller",
    "insert into caller values ('stranger', true, true, true)",
    "delete from _yoyo_migration",
    "delete from _yoyo_migration where migration_id like '0002%'",
    "delete from _yoyo_migration where migration_id not like '0001%'",
    "drop table _yoyo_log, yoyo_lock",
    "drop table _yoyo_migration",
    "insert into yoyo_lock (locked, ctime, pid) values (1, localtimestamp, 7)",
    "alter table _yoyo_log owner to postgres",
    "alter role {p}_producer login",
    "alter role {p}_worker superuser",
    "alter role {p}_owner bypassrls createdb",
    "alter role {p}_owner superuser login",
    "alter role {worker} superuser",
    "grant {p}_owner to {worker}",
    "grant {p}_operator to {producer} with admin option",
    "grant {p}_owner to {p}_worker",
    "grant {p}_worker to {p}_producer",
    "grant pg_read_all_data to {observer}",
    "alter default privileges for role {p}_owner grant select on tables to public",
    (
        "alter default privileges for role {p}_owner in schema jobs_email"
        " grant all on functions to stranger"
    ),
    "alter default privileges for role {p}_owner revoke execute on functions from public",
    "alter default privileges for role {p}_owner revoke all on tables from {p}_owner",
    IN_DATABASE.format("default_transaction_read_only = on"),
    "alter role {worker} set default_transaction_read_only = on",
    "alter role {producer} in database {db} set default_transaction_read_only = on",
    IN_DATABASE.format("default_transaction_isolation = 'serializable'"),
    IN_DATABASE.format("search_path = 'nowhere'"),
    IN_DATABASE.format("quote_all_identifiers = on"),
    IN_DATABASE.format("standard_conforming_strings = off"),
    IN_DATABASE.format("bytea_output = 'escape'"),
    IN_DATABASE.format("DateStyle = 'German, DMY'"),
    IN_DATABASE.format("check_function_bodies = off"),
    IN_DATABASE.format("row_security = off"),
    IN_DATABASE.format("extra_float_digits = -3"),
    IN_DATABASE.format("client_min_messages = 'error'"),
]

TABLES = {
    "job": "job_id",
    "live_job": "job_id",
    "attempt": "job_id, attempt",
    "operator_act": "operator_act_id",
}
# What of the rows goes with a damage, and no remedy could bring back.
TAKEN = {
    "alter table live_job drop column last_failure_code": (
        "live_job",
        "last_failure_code",
    ),
    "alter table job drop column available_at": ("job", "available_at"),
    "drop table operator_act": ("operator_act", None),
}
DRIFT = re.compile(
    "object|index|constraint|grant|role|membership|migration|not_configured|locked"
)
# What check prints, and a refusal that goes on.
HELPFUL = re.compile("mend: |run this first: |run: lenso-jobs |lenso-jobs check says")
SQL = re.compile("(alter|begin|create|drop|grant|revoke|select|update) ")


@dataclass
class Damaged:
    """An Instance, and what it held before it was damaged."""

    configuration: object
    conninfo: str
    names: dict[str, str]
    held: dict = field(default_factory=dict)
    running: tuple = ()
    failed: object = None
    done: list = field(default_factory=list)

    def session(self, role=None):
        connection = psycopg.connect(
            self.conninfo, autocommit=True, options="-c search_path=jobs_email"
        )
        connection.execute("set default_transaction_read_only = off")
        connection.execute("set bytea_output = 'hex'")
        if role:
            connection.execute("select set_config('role', %s, false)", (role,))
        return connection

    def as_role(self, role, ask, *values):
        with self.session(role) as connection:
            return connection.execute(ask, values or None).fetchall()

    def rows(self):
        with self.session() as connection:
            return {
                table: dict(
                    connection.execute(
                        f"select concat_ws(' ', {key}), to_jsonb(t) from {table} as t"
                    )
                )
                for table, key in TABLES.items()
            }

    def damage(self, statement):
        """Do that, unless an earlier damage left nothing to do it to."""
        with self.session() as connection:
            try:
                connection.execute(statement.format(**self.names))
            except psycopg.Error:
                return False
        self.done.append(statement)
        return True


@pytest.fixture
def instance(new_instance, role):
    """An Instance with callers of its own and jobs in every state."""
    callers = {kind: role("nologin") for kind in ("producer", "worker", "observer")}
    configuration, conninfo = new_instance(
        lease_seconds=3600,
        retry_base_seconds=300,
        **{f"{kind}_instances": [name] for kind, name in callers.items()},
    )
    setup(configuration, conninfo)
    names = {
        "p": configuration.prefix,
        "db": conninfo_to_dict(conninfo)["dbname"],
        **callers,
    }
    it = Damaged(configuration, conninfo, names)
    producer, worker = it.session(callers["producer"]), it.session(callers["worker"])

    def enqueue(key, more=""):
        return producer.execute(
            f"select job_id from enqueue('email', %s, '{{}}', %s{more})", (key, key)
        ).fetchone()[0]

    def claimed(key, more=""):
        enqueue(key, more)
        return worker.execute(
            "select job_id, lease_token from claim('email')"
        ).fetchone()

    worker.execute("select complete(%s, %s)", claimed("succeeded"))
    failed = claimed("failed")
    worker.execute("select fail(%s, %s, 'smtp.no', false)", failed)
    it.failed = failed[0]
    worker.execute("select fail(%s, %s, 'smtp.no', true)", claimed("retried"))
    expired = claimed("expired")
    it.running = claimed("running")
    enqueue("queued")
    enqueue("scheduled", ", clock_timestamp() + interval '1 day'")
    with it.session() as connection:
        connection.execute(
            "update live_job set available_at = clock_timestamp() - interval '1 s',"
            " lease_expires_at = clock_timestamp() - interval '1 s'"
            " where job_id = %s",
            expired[:1],
        )
        connection.execute("select purge(clock_timestamp() - interval '1 day')")
    producer.close()
    worker.close()
    it.held = it.rows()
    return it


@pytest.fixture
def run(instance, lenso_jobs):
    """Run a command with the document and the secret of the damaged Instance."""

    def run(*arguments):
        return lenso_jobs(
            *arguments, url=instance.conninfo, config=instance.configuration.document()
        )

    return run


@pytest.fixture
def carry_out(instance, run):
    """Do what was printed as it stands; answers what went wrong, in a list."""

    def carry_out(remedy):
        if remedy.startswith("lenso-jobs "):
            code, _, errors = run(*remedy.split()[1:])
            return [f"{remedy}: {errors}"] if code else []
        assert SQL.match(remedy), remedy
        with psycopg.connect(instance.conninfo, autocommit=True) as connection:
            try:
                connection.execute(remedy)
            except psycopg.Error as error:
                return [f"{remedy}: {error.diag.message_primary}"]
        return []

    return carry_out


@pytest.fixture
def mend(run, carry_out):
    """Do what check prints, until it prints nothing; answers all that was said."""

    def mend():
        said = []
        for _ in range(ROUNDS):
            code, out, errors = run("check")
            if code == 0:
                return said
            said.append(out + errors)
            for remedy in remedies(code, out, errors):
                said += carry_out(remedy)
        raise AssertionError("check never ends:\n" + "\n".join(said))

    return mend


def remedies(code, out, errors):
    """Read what is to be done from what check printed: SQL first, then commands."""
    if code == 1:
        found = dict.fromkeys(re.findall("^    mend: (.*)$", out, re.MULTILINE))
    else:
        assert (code, out) == (2, "")
        found = re.findall("run: (lenso-jobs [a-z -]+)", errors)
    assert found, errors
    return sorted(found, key=lambda remedy: remedy.startswith("lenso-jobs "))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUMBER))
def test_what_check_prints_mends_damages_together(seed, instance, mend):
    chosen = random.Random(seed)
    for statement in chosen.sample(SEEN + UNSEEN, chosen.randint(1, 5)):
        instance.damage(statement)
    seen = [each for each in instance.done if each in SEEN]
    health = look(instance)

    said = mend()

    told = "\n".join([f"seed {seed}", *instance.done, str(health), *said])
    assert said or not seen, told
    assert all(HELPFUL.search(each) for each in said), told
    assert health or not seen, told
    is_whole(instance)


def look(instance):
    """Ask inspect_health as an observer; answers its findings, or why it cannot."""
    try:
        return instance.as_role(
            instance.names["observer"], "select finding, subject from inspect_health()"
        )
    except psycopg.Error as error:
        return error.diag.message_primary


def is_whole(instance):
    """What was there is there, nothing is found, and every verb does its work."""
    lost = instance.rows()
    taken = {TAKEN[each] for each in instance.done if each in TAKEN}
    for table, rows in instance.held.items():
        if (table, None) in taken:
            continue
        for key, row in rows.items():
            now = lost[table].get(key)
            for column in row:
                if (table, column) not in taken:
                    assert now is not None, (table, key)
                    assert now[column] == row[column], (table, key, column)

    observer = instance.names["observer"]
    findings = instance.as_role(
        observer, "select finding, subject, detail from inspect_health()"
    )
    assert not [each for each in findings if DRIFT.search(each[0])], findings

    producer, worker = instance.names["producer"], instance.names["worker"]
    ((job, created),) = instance.as_role(
        producer, "select * from enqueue('slow', 'send', '{}', 'after')"
    )
    assert created
    ((reason,),) = instance.as_role(observer, "select reason from explain_job(%s)", job)
    assert reason in ("ready", "no_worker_connected")
    ((token,),) = instance.as_role(worker, "select lease_token from claim('slow')")
    assert instance.as_role(
        worker, "select status from fail(%s, %s, 'x', false)", job, token
    ) == [("failed",)]
    operator = f"{instance.names['p']}_operator"
    for each in (job, instance.failed):
        instance.as_role(operator, "select redrive(%s)", each)
    assert instance.as_role(worker, "select complete(%s, %s)", *instance.running) == [
        (True,)
    ]
    keys = instance.as_role(worker, "select kind from claim('email', 10)")
    assert sorted(keys) == [("expired",), ("failed",), ("queued",)]


@pytest.mark.parametrize(
    "statement",
    [
        (
            "alter table live_job rename to live_jobs;"
            " create table live_job (like live_jobs including all)"
        ),
        (
            "create table copy (like live_job including all);"
            " alter table live_job rename to live_jobs;"
            " alter index live_job_pkey rename to other_key"
        ),
        (
            "alter table live_job rename to live_jobs;"
            " alter index live_job_pkey rename to other_key;"
            " alter index live_job_claimable_idx rename to other_idx;"
            " delete from _yoyo_migration"
        ),
    ],
)
def test_nothing_that_is_printed_drops_a_table_that_may_hold_jobs(
    statement, instance, run, carry_out
):
    assert instance.damage(statement)

    for _ in range(3):
        code, out, errors = run("check")
        for remedy in remedies(code, out, errors) if code else ():
            if SQL.match(remedy) or remedy.startswith("lenso-jobs "):
                carry_out(remedy)

    kept = 0
    for table in ("live_job", "live_jobs", "copy"):
        if instance.as_role(None, "select where to_regclass(%s) is not null", table):
            ((rows,),) = instance.as_role(None, f"select count(*) from {table}")
            kept += rows
    assert kept == len(instance.held["live_job"])
