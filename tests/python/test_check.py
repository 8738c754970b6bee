from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs.operator import OperatorError, check, setup

DRIFT = {
    "drop index {index}": "index {index} is missing",
    "alter table live_job add column note text": "column live_job.note is not part",
    "alter table live_job set (fillfactor = 99)": "table live_job differs",
    "alter table live_job set unlogged": "table live_job differs",
    "alter table live_job enable row level security": "table live_job differs",
    "alter table job owner to postgres": "table job differs",
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
    "alter function claim(text, integer) owner to postgres": "differs",
    "comment on function claim(text, integer) is 'x'": "differs",
    "grant select on job to public": "table job differs",
    "grant select (payload) on job to {prefix}_observer": "column job.payload differs",
    "grant execute on function claim(text, integer) to stranger": "differs",
    "revoke execute on function claim(text, integer) from {prefix}_worker": "differs",
    "grant create on schema jobs_email to stranger": "schema the schema itself differs",
    "alter table job alter column queue drop not null": "column job.queue differs",
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
    "update instance set lease_seconds = 31": "lease_seconds is 31",
    "update instance set retry_jitter = 0.5": "retry_jitter is 0.5",
    "update instance set retention_seconds = 5": "retention_seconds is 5",
    "delete from instance": "no configuration is stored",
    "insert into queue values ('stray')": "queue stray is not in the document",
    "delete from queue where queue = 'slow'": "queue slow is not declared",
    "delete from caller where caller = 'accounts'": "caller accounts is not declared",
    "update caller set is_worker = true where caller = 'accounts'": (
        "caller accounts is not declared"
    ),
    "update instance set workers = '{{accounts}}'": "what instance repeats",
    "insert into live_job (job_id, available_at, attempt, max_attempts, queue)"
    " values (gen_random_uuid(), clock_timestamp(), 0, 1, 'gone')": (
        "queue gone has live jobs and is not declared"
    ),
    "delete from _yoyo_migration": "migration 0001-initial is pending",
    "update _yoyo_migration set migration_id = '9999-later'": (
        "migration 9999-later is not part of this release"
    ),
}


@pytest.fixture
def found(configuration, conninfo):
    """What check finds now, as sentences."""

    def found(**changes):
        return [finding.what for finding in check(configuration(**changes), conninfo)]

    return found


def test_a_sound_instance_has_no_findings(found):
    assert found() == []


@pytest.mark.parametrize("statement", DRIFT)
def test_check_finds(statement, found, owner, prefix):
    index = owner.value(
        "select indexrelid::regclass::text from pg_index"
        " where indrelid = 'live_job'::regclass and not indisprimary limit 1"
    )
    names = {"index": index, "prefix": prefix}
    owner.execute(statement.format(**names))

    findings = found()

    assert any(DRIFT[statement].format(**names) in what for what in findings), findings


@pytest.mark.parametrize("kind", ["owner", "operator"])
def test_check_finds_a_caller_that_may_do_more_than_callers_may(
    kind, found, owner, prefix
):
    owner.execute(f'grant "{prefix}_{kind}" to operations')
    try:
        findings = found()
    finally:
        owner.execute(f'revoke "{prefix}_{kind}" from operations')

    assert findings == [f"caller operations is a member of {prefix}_{kind}"]


def test_options_set_away_and_back_are_no_difference(found, owner):
    owner.execute("alter table live_job set (fillfactor = 90)")
    owner.execute("alter table live_job set (fillfactor = 35)")

    assert found() == []


def test_check_finds_an_edited_function(found, owner):
    definition = owner.value("select pg_get_functiondef('_caller()'::regprocedure)")
    owner.execute(definition.replace("coalesce", "greatest"))

    assert found() == ["function _caller() differs from this release"]


def test_every_finding_says_what_mends_it(configuration, conninfo, owner):
    owner.execute("create table stray (n integer)")
    owner.execute("update instance set lease_seconds = 31")
    owner.execute("grant select on job to public")

    findings = check(configuration(), conninfo)

    assert len(findings) > 2
    assert all(finding.remedy for finding in findings)


def test_a_grant_taken_away_and_given_back_is_no_difference(found, owner, prefix):
    for statement in (
        "{} execute on function inspect(uuid) {} %s_producer",
        "{} select on error_code {} %s_producer",
        "{} usage on schema jobs_email {} %s_producer",
    ):
        for words in (("revoke", "from"), ("grant", "to")):
            owner.execute(statement.format(*words) % prefix)

    assert found() == []


def test_the_contents_of_the_tables_are_no_difference(found, enqueue, claim):
    enqueue()
    claim()

    assert found() == []


def test_a_document_that_differs_from_what_is_stored_is_found(found):
    findings = found(lease_seconds=29, queues=["email"])

    assert findings == [
        "lease_seconds is 30, the document says 29",
        "queue slow is not in the document",
    ]


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


def test_check_looks_from_an_own_session_whatever_its_search_path(
    configuration, conninfo
):
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
    return spoil


def test_check_finds_a_missing_membership(instance):
    findings = instance('revoke {p}_worker from "email-worker"')

    assert findings == [f"role email-worker is no member of {instance.prefix}_worker"]


def test_check_finds_a_stray_membership(instance, role):
    name = role()

    findings = instance(f"grant {{p}}_producer to {name}")

    assert findings == [
        f"role {name} is a member of {instance.prefix}_producer and not in the document"
    ]


@pytest.mark.parametrize(
    "kind", ["owner", "producer", "worker", "observer", "operator"]
)
def test_check_finds_a_group_role_that_can_log_in(instance, kind):
    findings = instance(f"alter role {{p}}_{kind} login")

    assert findings == [f"role {instance.prefix}_{kind} can log in"]


def test_check_finds_a_group_role_that_is_a_superuser(instance):
    findings = instance("alter role {p}_operator superuser")

    assert findings == [f"role {instance.prefix}_operator is a superuser"]


# What cannot be told.


def test_a_missing_instance_is_an_error(configuration, conninfo):
    with pytest.raises(OperatorError, match="lenso-jobs setup"):
        check(configuration(schema="jobs_missing"), conninfo)


def test_a_schema_without_an_instance_is_an_error(configuration, conninfo, owner):
    owner.execute("create schema jobs_other")

    with pytest.raises(OperatorError, match="lenso-jobs setup"):
        check(configuration(schema="jobs_other"), conninfo)


def test_a_role_that_may_not_look_is_an_error(configuration, conninfo):
    with pytest.raises(OperatorError, match="cannot tell"):
        check(configuration(), make_conninfo(conninfo, user="accounts"))
