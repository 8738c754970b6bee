"""Set-up refuses names that cannot be callers, and roles that another Instance has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs._prepare import verify
from lenso_jobs.config import Configuration, ConfigurationError
from lenso_jobs.errors import InvalidArgument, SchemaNotReady
from lenso_jobs.operator import setup

BOOTSTRAP = Path(__file__).parents[2] / "sql" / "bootstrap.sql"
KINDS = ("owner", "producer", "worker", "observer", "operator")
FIELDS = pytest.mark.parametrize(
    "field", ["producer_instances", "worker_instances", "observer_instances"]
)


def document(schema, prefix, **changes):
    return {
        "schema": schema,
        "role_prefix": prefix,
        "database_url_secret": "jobs/database-url",
        "lease_seconds": 30,
        "retry_base_seconds": 5,
        "retry_max_seconds": 300,
        "queues": ["email"],
        "producer_instances": ["accounts"],
        "worker_instances": ["email-worker"],
    } | changes


def bootstrap(session, fields):
    """Run the DBA's script with this document, all or nothing."""
    with session.transaction():
        session.execute(
            "select set_config('lenso_jobs.document', %s, true)", (json.dumps(fields),)
        )
        session.execute(BOOTSTRAP.read_bytes())


@pytest.fixture
def fresh():
    """A role prefix nobody has; its roles are dropped at the end."""
    prefix = f"fresh_{uuid4().hex[:10]}"
    yield prefix
    with psycopg.connect(
        os.environ["LENSO_JOBS_TEST_SERVER"], autocommit=True
    ) as connection:
        for kind in KINDS:
            connection.execute(f"drop role if exists {prefix}_{kind}")


@pytest.fixture
def elsewhere(fresh, new_database):
    """Make an empty database, dropped before the roles of ``fresh`` are."""
    return new_database


@pytest.fixture
def made(owner, fresh):
    """What a bootstrap would have left: schemas, and roles of the fresh prefix."""

    def made():
        return owner.rows(
            "select nspname::text from pg_namespace where nspname = 'jobs_other'"
            " union all select rolname from pg_roles where rolname ^@ %s",
            fresh,
        )

    return made


@pytest.mark.slow
@FIELDS
@pytest.mark.parametrize(
    "name",
    [
        "none",
        "NONE",
        "public",
        "Public",
        "pg_monitor",
        "PG_mine",
        "",
        "x" * 64,
        "é" * 32,
    ],
)
def test_bootstrap_refuses_a_caller_whose_name_is_not_a_role_name(
    field, name, fresh, connect, made
):
    admin = connect()

    with admin.refusing("LJ007"):
        bootstrap(admin, document("jobs_other", fresh, **{field: [name]}))

    assert made() == []


@FIELDS
def test_bootstrap_refuses_a_superuser_as_a_caller(
    field, fresh, connect, new_role, made
):
    admin = connect()
    superuser = new_role(attributes="superuser nologin")

    with admin.refusing("LJ007"):
        bootstrap(admin, document("jobs_other", fresh, **{field: [superuser]}))

    assert made() == []


@FIELDS
@pytest.mark.parametrize("kind", KINDS)
def test_bootstrap_refuses_the_instances_own_roles_as_callers(
    field, kind, fresh, connect, made
):
    admin = connect()

    with admin.refusing("LJ007"):
        bootstrap(admin, document("jobs_other", fresh, **{field: [f"{fresh}_{kind}"]}))

    assert made() == []


@pytest.mark.slow
@FIELDS
@pytest.mark.parametrize("kind", KINDS)
def test_bootstrap_refuses_another_instances_roles_as_callers(
    field, kind, fresh, prefix, connect, made
):
    admin = connect()

    with admin.refusing("LJ007"):
        bootstrap(admin, document("jobs_other", fresh, **{field: [f"{prefix}_{kind}"]}))

    assert made() == []


@pytest.mark.parametrize(
    "name", ["none", "public", "pg_monitor", "", "x" * 64, "jobs_own_producer"]
)
def test_the_document_is_refused_before_a_server_is_reached(name):
    fields = document("jobs_other", "jobs_own", worker_instances=[name])

    with pytest.raises(ConfigurationError):
        Configuration.from_json(json.dumps(fields))


@pytest.mark.parametrize("which", ["superuser", "another Instance's group"])
def test_set_up_refuses_callers_that_only_the_server_can_know(
    which, fresh, prefix, conninfo, new_role, made
):
    name = {
        "superuser": new_role(attributes="superuser nologin"),
        "another Instance's group": f"{prefix}_producer",
    }[which]
    fields = document("jobs_other", fresh, worker_instances=[name])

    with pytest.raises(InvalidArgument):
        setup(Configuration.from_json(json.dumps(fields)), conninfo)

    assert made() == []


def test_bootstrap_refuses_a_schema_of_another_owner(fresh, connect, owner):
    owner.execute("create schema jobs_other")
    admin = connect()

    with admin.refusing("LJ007"):
        bootstrap(admin, document("jobs_other", fresh))

    assert (
        owner.value(
            "select nspowner::regrole::text from pg_namespace"
            " where nspname = 'jobs_other'"
        )
        == "postgres"
    )


# Group roles are one Instance's


def test_set_up_refuses_the_group_roles_of_an_instance_in_another_schema(
    prefix, conninfo, owner
):
    fields = document("jobs_other", prefix)

    with pytest.raises(InvalidArgument) as refusal:
        setup(Configuration.from_json(json.dumps(fields)), conninfo)

    assert "role_prefix" in refusal.value.hint
    assert owner.value("select to_regnamespace('jobs_other')") is None


def test_set_up_refuses_the_group_roles_of_an_instance_in_another_database(
    prefix, elsewhere, conninfo
):
    other = elsewhere()
    fields = document("jobs_email", prefix)

    with pytest.raises(InvalidArgument) as refusal:
        setup(Configuration.from_json(json.dumps(fields)), other)

    assert "role_prefix" in refusal.value.hint
    with psycopg.connect(other) as connection:
        (schema,) = connection.execute(
            "select to_regnamespace('jobs_email')"
        ).fetchone()
    assert schema is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holding", ["owns", "was granted"])
def test_set_up_refuses_a_group_role_that_holds_something_in_another_database(
    kind, holding, fresh, elsewhere, connect, made
):
    with psycopg.connect(elsewhere(), autocommit=True) as other:
        other.execute(f"create role {fresh}_{kind}")
        other.execute("create table secret (field text)")
        other.execute(
            f"alter table secret owner to {fresh}_{kind}"
            if holding == "owns"
            else f"grant select on secret to {fresh}_{kind}"
        )
    admin = connect()

    with admin.refusing("LJ007") as refusal:
        bootstrap(admin, document("jobs_other", fresh))

    assert "role_prefix" in refusal.value.diag.message_hint
    assert made() == [(f"{fresh}_{kind}",)]


def test_a_bootstrap_waits_for_one_elsewhere_that_reaches_for_the_same_roles(
    fresh, elsewhere, connect, owner, blocked, background
):
    for kind in KINDS:
        owner.execute(f"create role {fresh}_{kind}")
    first = connect(dbname=conninfo_to_dict(elsewhere())["dbname"])
    second = connect(dbname=conninfo_to_dict(elsewhere())["dbname"])
    fields = document("jobs_other", fresh)
    first.execute("begin")
    bootstrap(first, fields)
    answer = background(bootstrap, second, fields)
    blocked(second, first)

    first.execute("commit")

    assert answer.exception() is not None
    with second.refusing("LJ007") as refusal:
        bootstrap(second, fields)
    assert "role_prefix" in refusal.value.diag.message_hint
    assert second.value("select to_regnamespace('jobs_other')") is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_set_up_refuses_a_group_role_that_is_a_superuser(kind, fresh, connect, owner):
    owner.execute(f"create role {fresh}_{kind} superuser")
    admin = connect()

    with admin.refusing("LJ007") as refusal:
        bootstrap(admin, document("jobs_other", fresh))

    assert "role_prefix" in refusal.value.diag.message_hint


@pytest.mark.parametrize(
    ("group", "member"),
    [
        ("owner", "producer"),
        ("owner", "operator"),
        ("producer", "worker"),
        ("worker", "producer"),
        ("operator", "observer"),
    ],
)
def test_set_up_refuses_group_roles_that_are_members_of_each_other(
    group, member, fresh, connect, owner
):
    owner.execute(f"create role {fresh}_{group}")
    owner.execute(f"create role {fresh}_{member} in role {fresh}_{group}")
    admin = connect()

    with admin.refusing("LJ007"):
        bootstrap(admin, document("jobs_other", fresh))

    assert owner.value("select to_regnamespace('jobs_other')") is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_set_up_refuses_a_group_role_that_is_a_member_of_any_role(
    kind, fresh, new_role, connect, owner
):
    club = new_role()
    owner.execute(f'create role {fresh}_{kind} in role "{club}"')
    admin = connect()

    with admin.refusing("LJ007") as refusal:
        bootstrap(admin, document("jobs_other", fresh))

    assert "role_prefix" in refusal.value.diag.message_hint
    assert owner.value("select to_regnamespace('jobs_other')") is None


def test_set_up_refuses_an_owner_that_can_log_in(fresh, connect, owner):
    owner.execute(f"create role {fresh}_owner login")
    admin = connect()

    with admin.refusing("LJ007"):
        bootstrap(admin, document("jobs_other", fresh))

    assert owner.value("select to_regnamespace('jobs_other')") is None


def test_bootstrap_refuses_a_caller_that_would_not_inherit_its_rights(
    fresh, new_role, connect, owner
):
    name = new_role(attributes="login noinherit")
    fields = document("jobs_other", fresh, producer_instances=[name])
    admin = connect()

    if owner.info.server_version >= 160000:
        bootstrap(admin, fields)
        assert owner.value(
            "select inherit_option from pg_auth_members as m"
            " join pg_roles as r on r.oid = m.member where r.rolname = %s",
            name,
        )
        owner.execute("drop schema jobs_other cascade")
    else:
        with admin.refusing("LJ007") as refusal:
            bootstrap(admin, fields)
        assert "inherit" in refusal.value.diag.message_hint


@pytest.mark.slow
def test_an_operator_calls_no_foreign_object_in_the_search_path(fresh, elsewhere):
    conninfo = elsewhere()
    traps = {
        "hashtextextended(text, integer)": "bigint",
        "format(text, text)": "text",
        "format(text, text, name)": "text",
        "format(text, text, text)": "text",
        "left(name, integer)": "text",
        "right(name, integer)": "text",
        "set_config(text, text, text)": "text",
    }
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for signature, answer in traps.items():
            connection.execute(
                f"create function public.{signature} returns {answer}"
                " language plpgsql as $$ begin raise 'trapped'; end $$"
            )
    fields = json.dumps(document("jobs_other", fresh))

    setup(Configuration.from_json(fields), conninfo)

    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "select pg_catalog.set_config('lenso_jobs.document', %s, false)", (fields,)
        )
        connection.execute(BOOTSTRAP.read_bytes())
        assert connection.execute("show search_path").fetchone() == ('"$user", public',)
        with pytest.raises(psycopg.Error) as caught, connection.transaction():
            connection.execute((BOOTSTRAP.parent / "0_open.sql").read_bytes())
        assert caught.value.sqlstate == "LJ008"


# Roles that exist are used as they are


def test_a_caller_that_exists_keeps_its_password_attributes_and_memberships(
    fresh, new_role, connect, conninfo, owner
):
    club = new_role(attributes="nologin")
    name = new_role(
        attributes=(
            "login createdb connection limit 7 password 'p' valid until '2099-1-1'"
        ),
        members_of=[club],
    )
    before = owner.rows("select * from pg_authid where rolname = %s", name)
    fields = document("jobs_other", fresh, producer_instances=[name])

    for _ in range(2):
        bootstrap(connect(), fields)

    assert owner.rows("select * from pg_authid where rolname = %s", name) == before
    assert owner.rows(
        "select roleid::regrole::text from pg_auth_members as m"
        " join pg_roles as r on r.oid = m.member where r.rolname = %s order by 1",
        name,
    ) == sorted([(club,), (f"{fresh}_producer",)])
    owner.execute("drop schema jobs_other cascade")


def test_a_caller_that_does_not_exist_is_made_without_a_login(
    fresh, new_role, connect, owner
):
    name = new_role()
    owner.execute(f'drop role "{name}"')

    bootstrap(connect(), document("jobs_other", fresh, worker_instances=[name]))

    assert owner.row(
        "select rolcanlogin, rolsuper, rolcreaterole, rolinherit, rolpassword"
        " from pg_authid where rolname = %s",
        name,
    ) == {
        "rolcanlogin": False,
        "rolsuper": False,
        "rolcreaterole": False,
        "rolinherit": True,
        "rolpassword": None,
    }
    owner.execute("drop schema jobs_other cascade")


def test_a_client_runs_nothing_of_a_schema_of_another_owner(
    new_role, connect, owner, conninfo, fresh
):
    name = new_role()
    owner.execute(f'grant create on database "{owner.info.dbname}" to "{name}"')
    connect(name).execute(
        "create schema jobs_other; grant usage on schema jobs_other to public;"
        " create function jobs_other.trap() returns integer language plpgsql"
        " as $$ begin raise 'trapped %', session_user; end $$;"
        " create view jobs_other.installed_version as"
        "  select jobs_other.trap() as version;"
        " grant select on jobs_other.installed_version to public"
    )
    configuration = Configuration.from_json(json.dumps(document("jobs_other", fresh)))

    with (
        psycopg.connect(make_conninfo(conninfo, user="accounts")) as connection,
        pytest.raises(SchemaNotReady, match="holds no Instance"),
    ):
        verify(connection, configuration)
