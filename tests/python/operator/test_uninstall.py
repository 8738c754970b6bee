from __future__ import annotations

import json

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs import Configuration, Jobs, Unauthorized
from lenso_jobs.operator import (
    OperatorError,
    check,
    configure,
    setup,
    survey,
    uninstall,
    upgrade,
)

pytestmark = pytest.mark.slow

KINDS = ("observer", "operator", "owner", "producer", "worker")


@pytest.fixture
def installed(new_instance, role):
    """An Instance with a live job, an ended job, and a new caller."""
    worker = role()
    configuration, conninfo = new_instance(worker_instances=["email-worker", worker])
    setup(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        jobs = Jobs(connection, "jobs_email", caller="accounts")
        for key in "ab":
            jobs.enqueue("email", "send", {}, idempotency_key=key)
        working = Jobs(connection, "jobs_email", caller=worker)
        working.complete(working.claim("email")[0])
    return configuration, conninfo


@pytest.fixture
def execute(installed):
    """Say something as superuser in the Instance's database."""
    with psycopg.connect(installed[1], autocommit=True) as connection:
        yield lambda statement: connection.execute(
            statement.format(p=installed[0].prefix)
        )


def roles(configuration, conninfo):
    with psycopg.connect(conninfo) as connection:
        return [
            name
            for (name,) in connection.execute(
                "select rolname from pg_roles where rolname ^@ %s order by 1",
                (f"{configuration.prefix}_",),
            )
        ]


def schema_is_there(conninfo):
    with psycopg.connect(conninfo) as connection:
        row = connection.execute("select to_regnamespace('jobs_email')").fetchone()
    return row != (None,)


def test_a_survey_names_what_would_be_dropped_and_drops_nothing(installed):
    configuration, conninfo = installed
    before = roles(configuration, conninfo)

    found = survey(configuration, conninfo)

    assert (found.live_jobs, found.kept_jobs) == (1, 1)
    assert found.objects["functions"] > 20
    assert found.objects["tables"] >= 7
    assert list(found.roles) == [f"{configuration.prefix}_{kind}" for kind in KINDS]
    assert "email-worker" in found.callers
    assert found.left == found.dependents == ()
    assert check(configuration, conninfo) == []
    assert roles(configuration, conninfo) == before


def test_an_uninstall_leaves_nothing_but_the_callers(installed):
    configuration, conninfo = installed
    promised = survey(configuration, conninfo)

    done = uninstall(configuration, conninfo)

    assert done == promised
    assert not schema_is_there(conninfo)
    assert roles(configuration, conninfo) == []
    with psycopg.connect(conninfo) as connection:
        left = connection.execute(
            "select count(*) from pg_roles where rolname = any (%s)",
            (list(done.callers),),
        )
        assert left.fetchone() == (len(done.callers),)
    with pytest.raises(OperatorError, match="there is no schema"):
        uninstall(configuration, conninfo)
    assert setup(configuration, conninfo).configured


@pytest.mark.parametrize(
    "shared",
    [
        "create table other (n integer); grant select on other to {p}_worker",
        "create schema other authorization {p}_worker",
        "grant connect on database {d} to {p}_worker",
    ],
)
def test_a_role_that_has_anything_else_is_left_and_named(shared, installed, execute):
    configuration, conninfo = installed
    execute(shared.replace("{d}", conninfo_to_dict(conninfo)["dbname"]))

    done = uninstall(configuration, conninfo)

    worker = f"{configuration.prefix}_worker"
    assert [role for role, _ in done.left] == [worker]
    assert worker not in done.roles
    assert not schema_is_there(conninfo)
    assert roles(configuration, conninfo) == [worker]


def test_a_role_that_the_server_keeps_is_left_with_the_reason(installed, execute):
    configuration, conninfo = installed
    execute(
        "alter default privileges for role {p}_owner grant select on tables to {p}_worker"
    )

    done = dict(uninstall(configuration, conninfo).left)

    assert "default privileges" in done[configuration.owner]
    assert "default privileges" in done[f"{configuration.prefix}_worker"]


def test_a_role_that_another_database_knows_is_left(installed, new_database):
    configuration, conninfo = installed
    other = new_database()
    with psycopg.connect(other, autocommit=True) as connection:
        connection.execute("create table other (n integer)")
        connection.execute(f"grant select on other to {configuration.prefix}_observer")

    done = uninstall(configuration, conninfo)

    name = conninfo_to_dict(other)["dbname"]
    observer = f"{configuration.prefix}_observer"
    assert done.left == ((observer, f"it also has database {name}"),)
    assert roles(configuration, conninfo) == [observer]


def test_another_instance_in_the_database_is_not_touched(
    installed, document, fresh_prefix, new_database
):
    configuration, conninfo = installed
    other_prefix = f"{fresh_prefix}b"
    new_database(other_prefix)  # so that its roles are dropped too
    other = Configuration.from_json(
        document(schema="jobs_other", role_prefix=other_prefix)
    )
    setup(other, conninfo)

    uninstall(configuration, conninfo)

    assert check(other, conninfo) == []
    with psycopg.connect(conninfo, autocommit=True) as connection:
        jobs = Jobs(connection, "jobs_other", caller="accounts")
        assert jobs.enqueue("email", "send", {}, idempotency_key="a").created


@pytest.mark.parametrize(
    "statement",
    [
        "create view other as select * from jobs_email.error_code",
        "create table other (due jobs_email.instant)",
        (
            "create function other() returns jobs_email.leased_job language sql"
            " as 'select null::jobs_email.leased_job'"
        ),
    ],
)
def test_foreign_objects_that_depend_on_the_schema_are_in_the_way(
    statement, installed, execute
):
    configuration, conninfo = installed
    execute(statement)

    (dependent,) = survey(configuration, conninfo).dependents[:1]
    with pytest.raises(OperatorError, match="drop them first") as refused:
        uninstall(configuration, conninfo)

    assert "other" in dependent
    assert dependent in str(refused.value)
    assert check(configuration, conninfo) == []


def test_the_schema_of_another_owner_is_not_dropped(installed, document, role):
    _, conninfo = installed
    strange = Configuration.from_json(document(role_prefix=role()))

    for act in (survey, uninstall):
        with pytest.raises(OperatorError, match="does not belong to"):
            act(strange, conninfo)

    assert schema_is_there(conninfo)


def test_kept_data_is_the_owner_s_alone_until_a_repair_brings_it_back(
    installed, role, execute
):
    configuration, conninfo = installed
    execute(f"grant {{p}}_operator to {role()}")
    before = roles(configuration, conninfo)

    uninstall(configuration, conninfo, keep_data=True)

    with psycopg.connect(conninfo, autocommit=True) as connection:
        for caller in ("accounts", "email-worker"):
            jobs = Jobs(connection, "jobs_email", caller=caller)
            with pytest.raises(Unauthorized):
                jobs.claim("email")
        members = connection.execute(
            "select count(*) from pg_auth_members as m where m.roleid::regrole::text ^@ %s"
            " and coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, true)",
            (configuration.prefix,),
        )
        assert members.fetchone() == (0,)
        assert roles(configuration, conninfo) == before
        found = {finding.remedy for finding in check(configuration, conninfo)}
        assert {each.partition(" to ")[0] for each in found} == {
            "lenso-jobs configure",
            "grant usage on schema jobs_email",
        }
        done = upgrade(configuration, conninfo, repair_too=True)
        assert not [each for each in done.repaired if "member" in each]
        configure(configuration, conninfo)
        jobs = Jobs(connection, "jobs_email", caller="email-worker")
        assert len(jobs.claim("email")) == 1
    assert check(configuration, conninfo) == []


def test_the_callers_of_the_original_stay_when_a_copy_s_data_is_kept(
    installed, new_database, lenso_jobs
):
    configuration, conninfo = installed
    copy = new_database()
    template, dbname = (conninfo_to_dict(url)["dbname"] for url in (conninfo, copy))
    with psycopg.connect(copy, dbname="postgres", autocommit=True) as connection:
        connection.execute(f"drop database {dbname}")
        connection.execute(f"create database {dbname} template {template}")
    where = {"role_prefix": configuration.prefix, "url": copy}

    _, listed, _ = lenso_jobs("uninstall", "--keep-data", **where)
    code, told, _ = lenso_jobs("uninstall", "--keep-data", "--yes", **where)

    reason = f"it also has database {template}"
    for text in (listed, told):
        assert f"members of {configuration.prefix}_worker are left: {reason}" in text
    assert code == 0
    with psycopg.connect(conninfo, autocommit=True) as connection:
        assert Jobs(connection, "jobs_email", caller="email-worker").claim("email")
    with psycopg.connect(copy, autocommit=True) as connection:
        closed = Jobs(connection, "jobs_email", caller="email-worker")
        with pytest.raises(Unauthorized):
            closed.claim("email")


def test_removed_memberships_are_printed_beforehand_and_afterwards(
    installed, role, execute, lenso_jobs
):
    configuration, conninfo = installed
    operator = role()
    execute(f"grant {{p}}_operator to {operator}")
    where = {"role_prefix": configuration.prefix, "url": conninfo}

    _, listed, _ = lenso_jobs("uninstall", "--keep-data", **where)
    _, told, _ = lenso_jobs("uninstall", "--keep-data", "--yes", **where)

    group = f"{configuration.prefix}_operator"
    assert f"{group} would be revoked from {operator}" in listed
    assert told == listed.replace("would be", "was")


@pytest.mark.parametrize("keep_data", [False, True])
def test_a_database_owner_without_superuser_takes_down_what_it_set_up(
    keep_data, unprivileged
):
    configuration, conninfo = unprivileged
    setup(configuration, conninfo)

    done = uninstall(configuration, conninfo, keep_data=keep_data)

    assert done.left == ()
    assert schema_is_there(conninfo) is keep_data
    assert bool(roles(configuration, conninfo)) is keep_data


def test_a_role_that_one_may_not_drop_is_left_and_named(
    unprivileged, conninfo, fresh_prefix
):
    configuration, as_dba = unprivileged
    superuser = make_conninfo(as_dba, user=conninfo_to_dict(conninfo)["user"])
    with psycopg.connect(superuser, autocommit=True) as connection:
        connection.execute(f"create role {fresh_prefix}_observer nologin")
        dba = conninfo_to_dict(as_dba)["user"]
        connection.execute(f"grant {fresh_prefix}_observer to {dba} with admin option")
        setup(configuration, as_dba)
        connection.execute(f"revoke {fresh_prefix}_observer from {dba} cascade")
        connection.execute(f"alter role {dba} nocreaterole")

        done = uninstall(configuration, as_dba)

    assert f"{fresh_prefix}_observer" in dict(done.left)
    assert not schema_is_there(as_dba)


def test_the_command_needs_yes(installed, lenso_jobs):
    configuration, conninfo = installed
    where = {"role_prefix": configuration.prefix, "url": conninfo}

    code, listed, err = lenso_jobs("uninstall", **where)
    still = schema_is_there(conninfo)
    _, machine, _ = lenso_jobs("uninstall", "--json", **where)
    done = lenso_jobs("uninstall", "--yes", **where)

    assert code == 1
    assert "pass --yes" in err
    assert still
    first, second, *_ = listed.splitlines()
    assert first.startswith("would drop schema jobs_email: ")
    assert first.endswith("1 live and 1 kept jobs")
    assert second == f"would drop role {configuration.prefix}_observer"
    assert "caller email-worker is left: other applications may use the role" in listed
    assert json.loads(machine)["live_jobs"] == 1
    assert (done[0], done[2]) == (0, "")
    assert done[1] == listed.replace("would drop", "dropped")
    assert not schema_is_there(conninfo)
