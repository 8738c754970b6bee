"""What the catalogues say of owners, grants and search paths."""

from __future__ import annotations

import json
import os
from uuid import uuid4

import psycopg
import pytest

from lenso_jobs.config import Configuration
from lenso_jobs.operator import setup, upgrade

# Everything of a schema that has an access list, and the one it has by default.
GRANTS = """
    select o.kind, o.name, g.privilege_type
    from (
        select 'schema', n.nspname::text,
            coalesce(n.nspacl, acldefault('n', n.nspowner))
        from pg_namespace as n where n.nspname = %(schema)s
        union all
        select 'relation', c.relname,
            coalesce(
                c.relacl,
                acldefault(
                    case c.relkind when 'S' then 's' else 'r' end::"char", c.relowner
                )
            )
        from pg_class as c
        where c.relnamespace = %(schema)s::regnamespace and c.relkind not in ('i', 'c')
        union all
        select 'function', p.proname, coalesce(p.proacl, acldefault('f', p.proowner))
        from pg_proc as p where p.pronamespace = %(schema)s::regnamespace
        union all
        select 'type', t.typname, coalesce(t.typacl, acldefault('T', t.typowner))
        from pg_type as t
        where t.typnamespace = %(schema)s::regnamespace and t.typelem = 0
    ) as o (kind, name, acl)
    cross join aclexplode(o.acl) as g
    where g.grantee = 0
    order by 1, 2
"""


def granted_to_public(session, schema="jobs_email"):
    return session.execute(GRANTS, {"schema": schema}).fetchall()


def test_public_has_no_privilege_that_postgresql_grants_by_default(owner):
    granted = granted_to_public(owner)

    assert granted == []


def test_every_function_has_an_explicit_access_list(owner):
    bare = owner.rows(
        "select proname from pg_proc"
        " where pronamespace = 'jobs_email'::regnamespace and proacl is null"
    )

    assert bare == []


def test_everything_is_owned_by_the_instances_owner(owner, prefix):
    owners = owner.rows(
        "select distinct o.owner::regrole::text from ("
        " select nspowner from pg_namespace where nspname = 'jobs_email'"
        " union all select relowner from pg_class"
        "  where relnamespace = 'jobs_email'::regnamespace"
        " union all select proowner from pg_proc"
        "  where pronamespace = 'jobs_email'::regnamespace"
        " union all select typowner from pg_type"
        "  where typnamespace = 'jobs_email'::regnamespace) as o (owner)"
    )

    assert owners == [(f"{prefix}_owner",)]


def test_every_definer_function_pins_a_search_path_that_ends_in_pg_temp(owner):
    paths = dict(
        owner.rows(
            "select p.proname, (select c from unnest(p.proconfig) as c"
            "  where c like 'search_path=%')"
            " from pg_proc as p"
            " where p.pronamespace = 'jobs_email'::regnamespace and p.prosecdef"
        )
    )

    assert set(paths.values()) == {"search_path=jobs_email, pg_temp"}


def test_every_function_that_a_group_may_call_is_a_definer_function(owner, prefix):
    others = owner.rows(
        "select p.proname from pg_proc as p"
        " where p.pronamespace = 'jobs_email'::regnamespace and not p.prosecdef"
        " and exists (select from aclexplode(p.proacl) as g"
        "  where g.grantee <> p.proowner)"
    )

    assert others == []


def test_no_grant_in_the_instance_may_be_passed_on(owner):
    passable = owner.rows(
        "select o.name from ("
        " select relname, relacl, relowner from pg_class"
        "  where relnamespace = 'jobs_email'::regnamespace"
        " union all select proname, proacl, proowner from pg_proc"
        "  where pronamespace = 'jobs_email'::regnamespace"
        " union all select nspname, nspacl, nspowner from pg_namespace"
        "  where nspname = 'jobs_email'"
        " ) as o (name, acl, owner) cross join aclexplode(o.acl) as g"
        " where g.is_grantable and g.grantee <> o.owner"
    )

    assert passable == []


def test_only_the_owner_may_create_in_the_schema(owner, prefix):
    creators = owner.rows(
        "select g.grantee::regrole::text from pg_namespace as n"
        " cross join aclexplode(n.nspacl) as g"
        " where n.nspname = 'jobs_email' and g.privilege_type = 'CREATE'"
    )

    assert creators == [(f"{prefix}_owner",)]


def test_no_group_role_can_log_in_or_is_privileged_or_a_member_of_another(
    owner, prefix
):
    groups = [
        f"{prefix}_{kind}"
        for kind in ("owner", "producer", "worker", "observer", "operator")
    ]

    plain = owner.value(
        "select count(*) from pg_roles where rolname = any (%s) and not (rolcanlogin"
        " or rolsuper or rolcreaterole or rolcreatedb or rolreplication"
        " or rolbypassrls)",
        groups,
    )
    memberships = owner.rows(
        "select r.rolname, m.rolname from pg_auth_members as a"
        " join pg_roles as r on r.oid = a.roleid join pg_roles as m on m.oid = a.member"
        " where m.rolname = any (%s)",
        groups,
    )

    assert plain == 5
    assert memberships == []


@pytest.fixture
def generous(new_database):
    """A database whose owner-to-be gives everything it makes to everybody."""
    prefix = f"generous_{uuid4().hex[:10]}"
    conninfo = new_database(prefix)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"create role {prefix}_owner nologin")
        for kind in ("tables", "sequences", "functions", "types", "schemas"):
            for role in (f"for role {prefix}_owner", ""):
                connection.execute(
                    f"alter default privileges {role} grant all on {kind} to public"
                )
    return prefix, conninfo


@pytest.mark.slow
def test_public_has_nothing_where_default_privileges_would_give_it_everything(generous):
    prefix, conninfo = generous
    document = {
        "schema": "jobs_email",
        "role_prefix": prefix,
        "database_url_secret": "jobs/database-url",
        "lease_seconds": 30,
        "retry_base_seconds": 5,
        "retry_max_seconds": 300,
        "queues": ["email"],
        "producer_instances": [f"{prefix}_producers"],
        "worker_instances": [f"{prefix}_workers"],
    }
    configuration = Configuration.from_json(json.dumps(document))

    try:
        setup(configuration, conninfo)
        with psycopg.connect(conninfo) as connection:
            granted = granted_to_public(connection)
    finally:
        with psycopg.connect(
            os.environ["LENSO_JOBS_TEST_SERVER"], autocommit=True
        ) as connection:
            connection.execute(f"drop role if exists {prefix}_producers")
            connection.execute(f"drop role if exists {prefix}_workers")

    assert granted == []


# What the one list names, and nothing else


def listed(session):
    """Return what _catalogue_grants gives: (kind of role, object as the server identifies it)."""
    return {
        (
            kind,
            "jobs_email" if each == "schema" else f"jobs_email.{each.split(' ', 1)[1]}",
        )
        for kind, each in session.execute(
            "select role_kind, object from jobs_email._catalogue_grants()"
        )
    }


@pytest.fixture
def upgraded(new_database, later, document):
    """An Instance that began as the first release's, and its prefix."""
    prefix = f"upgraded_{uuid4().hex[:10]}"
    conninfo = new_database(prefix)
    configuration = Configuration.from_json(document(role_prefix=prefix))
    setup(configuration, conninfo)
    later()
    upgrade(configuration, conninfo)
    with psycopg.connect(conninfo) as connection:
        yield connection, prefix


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fresh", "upgraded"])
def test_every_grant_in_the_database_is_on_the_list(how, owner, prefix, request):
    session, prefix = (
        (owner, prefix) if how == "fresh" else request.getfixturevalue("upgraded")
    )

    # Every object with an access list depends on the roles in it.
    granted = {
        (role.removeprefix(f"{prefix}_"), name.replace("pg_catalog.", ""))
        for role, name in session.execute(
            "select d.refobjid::regrole::text,"
            " (pg_identify_object(d.classid, d.objid, d.objsubid)).identity"
            " from pg_shdepend as d join pg_database as b on b.oid = d.dbid"
            " where b.datname = current_database() and d.deptype = 'a'"
        )
    }
    defaults = session.execute("select from pg_default_acl").fetchall()
    columns = session.execute(
        "select from pg_attribute as a join pg_class as c on c.oid = a.attrelid"
        " where c.relnamespace = 'jobs_email'::regnamespace and a.attacl is not null"
    ).fetchall()

    assert granted == listed(session)
    assert granted_to_public(session) == []
    assert (defaults, columns) == ([], [])


def test_a_grant_that_the_list_does_not_name_is_a_finding(owner, observer, prefix):
    for grant in (
        "select on job to stranger",
        "select (payload) on job to {0}_observer",
        "usage on sequence operator_act_operator_act_id_seq to {0}_worker",
        "usage on type instant to public",
        "usage on type leased_job to stranger",
        "select on installed_digest to {0}_operator",
        "execute on function _catalogue_objects(text) to public",
        "create on schema jobs_email to stranger",
    ):
        owner.execute(f"grant {grant.format(prefix)}")

    found = observer.rows("select finding, subject from inspect_health()")

    assert found == [
        ("grant_stray", subject.format(prefix))
        for subject in (
            "create on the schema to stranger",
            "execute on _catalogue_objects(text) to public",
            "select on installed_digest to {0}_operator",
            "select on job to stranger",
            "select on job.payload to {0}_observer",
            "usage on operator_act_operator_act_id_seq to {0}_worker",
            "usage on type instant to public",
            "usage on type leased_job to stranger",
        )
    ]
