"""Rights that the server gives by itself, and objects that were given away."""

from __future__ import annotations

import psycopg
import pytest

from lenso_jobs.operator import OperatorError, _setup, check, plan, setup, upgrade

pytestmark = pytest.mark.slow

STRAYS = (
    "select x.grantee::regrole::text from pg_class as c"
    " cross join aclexplode(c.relacl) as x"
    " where c.relnamespace = 'jobs_email'::regnamespace and x.grantee = %(who)s::regrole"
    " union all select x.grantee::regrole::text from pg_proc as p"
    " cross join aclexplode(p.proacl) as x"
    " where p.pronamespace = 'jobs_email'::regnamespace and x.grantee = %(who)s::regrole"
    " union all select x.grantee::regrole::text from pg_type as t"
    " cross join aclexplode(t.typacl) as x"
    " where t.typnamespace = 'jobs_email'::regnamespace and x.grantee = %(who)s::regrole"
    " union all select x.grantee::regrole::text from pg_namespace as n"
    " cross join aclexplode(n.nspacl) as x"
    " where n.nspname = 'jobs_email' and x.grantee = %(who)s::regrole"
)
DEFAULTS = [
    "grant select on tables to {r}",
    "grant execute on functions to {r} with grant option",
    "grant usage on sequences to {r}",
    "grant usage on types to {r}",
    "grant usage, create on schemas to {r}",
]


@pytest.fixture
def reporting(role):
    """A role that should have no right in the Instance."""
    return role("nologin")


@pytest.fixture
def sql_in():
    """Run statements as superuser in a database."""

    def sql_in(conninfo, *statements):
        with psycopg.connect(
            conninfo, autocommit=True, options="-c search_path=jobs_email"
        ) as connection:
            for statement in statements:
                connection.execute(statement)

    return sql_in


def strays(conninfo, who):
    with psycopg.connect(conninfo) as connection:
        return connection.execute(STRAYS, {"who": who}).fetchall()


@pytest.mark.parametrize("default", DEFAULTS)
def test_setup_leaves_no_right_that_default_privileges_of_before_would_give(
    default, new_instance, reporting, sql_in
):
    configuration, conninfo = new_instance()
    grant = default.format(r=reporting)
    sql_in(
        conninfo,
        f"create role {configuration.owner} nologin",
        f"alter default privileges for role {configuration.owner} {grant}",
    )

    report = setup(configuration, conninfo)

    assert strays(conninfo, reporting) == []
    assert all(reporting in each.what for each in report.differences)
    assert report.differences
    for each in check(configuration, conninfo):
        assert each.remedy.startswith("alter default privileges for role")
        sql_in(conninfo, each.remedy)
    assert check(configuration, conninfo) == []


@pytest.mark.parametrize("place", ["", "in schema jobs_email"])
def test_default_privileges_are_reported_and_a_repair_gives_nothing_to_their_grantee(
    place, new_instance, reporting, sql_in
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    sql_in(
        conninfo,
        *(
            f"alter default privileges for role {configuration.owner} {place} "
            + each.format(r=reporting)
            for each in DEFAULTS[:4]
        ),
        "drop function inspect(uuid)",
        "drop view error_code",
    )

    report = upgrade(configuration, conninfo, repair_too=True)

    assert strays(conninfo, reporting) == []
    assert len(report.repaired) >= 2
    assert len(report.differences) == 4
    for each in report.differences:
        sql_in(conninfo, each.remedy)
    assert check(configuration, conninfo) == []


def test_an_event_trigger_that_grants_is_undone_by_setup_and_upgrade(
    new_instance, reporting, sql_in
):
    configuration, conninfo = new_instance()
    sql_in(
        conninfo,
        "create function public.opened() returns event_trigger language plpgsql as $$"
        " declare r record; begin for r in select * from"
        " pg_event_trigger_ddl_commands() where object_type = 'table' loop"
        f" execute format('grant select on %s to {reporting}', r.object_identity);"
        " end loop; end $$",
        "create event trigger opened on ddl_command_end when tag in ('CREATE TABLE')"
        " execute function public.opened()",
    )

    report = setup(configuration, conninfo)

    assert report.differences == ()
    assert strays(conninfo, reporting) == []
    assert check(configuration, conninfo) == []


GRANTS = [
    "grant select on job to {r}",
    "grant update (queue) on live_job to {r}",
    "grant execute on function purge(timestamptz, integer) to {r}",
    "grant usage on sequence operator_act_operator_act_id_seq to {r}",
    "grant usage on domain instant to {r}",
    "grant usage on type leased_job to {r}",
    "grant create on schema jobs_email to {r}",
    "grant select on error_code to {r} with grant option",
    "grant select on _yoyo_log to {r}",
    "grant execute on function claim(text, integer) to {p}_producer",
    (
        "grant usage on schema jobs_email to {r};"
        " grant select on job to {r} with grant option; set role {r};"
        " grant select on jobs_email.job to public; reset role"
    ),
]


@pytest.mark.parametrize("grant", GRANTS)
def test_an_upgrade_revokes_a_right_that_is_not_on_the_list_and_says_so(
    grant, new_instance, reporting, sql_in
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    names = {"r": reporting, "p": configuration.prefix}
    sql_in(conninfo, grant.format(**names))
    told = check(configuration, conninfo)

    report = upgrade(configuration, conninfo)

    assert told
    assert all(each.remedy.startswith("revoke ") for each in told)
    assert set(report.rights) <= {each.remedy for each in told}
    assert report.rights
    assert report.differences == ()
    assert strays(conninfo, reporting) == []
    assert check(configuration, conninfo) == []


@pytest.mark.parametrize("grant", GRANTS)
def test_the_remedies_of_check_revoke_a_right_that_is_not_on_the_list(
    grant, new_instance, reporting, sql_in
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    sql_in(conninfo, grant.format(r=reporting, p=configuration.prefix))

    for each in check(configuration, conninfo):
        sql_in(conninfo, each.remedy)

    assert check(configuration, conninfo) == []


def test_a_database_owner_without_superuser_leaves_no_stray_right(
    unprivileged, reporting, conninfo
):
    configuration, as_dba = unprivileged
    setup(configuration, as_dba)
    with psycopg.connect(as_dba, autocommit=True) as connection:
        connection.execute(f"grant select on jobs_email.job to {reporting}")

    report = upgrade(configuration, as_dba)

    assert report.rights == (
        f"revoke select on table jobs_email.job from {reporting} cascade",
    )
    assert strays(as_dba, reporting) == []


# Owners.


@pytest.mark.parametrize("heir", ["another role", "a superuser"])
def test_an_instance_that_was_reassigned_is_given_back_by_what_is_printed(
    heir, new_instance, role, sql_in
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    name = "postgres" if heir == "a superuser" else role("nologin")
    sql_in(conninfo, f"reassign owned by {configuration.owner} to {name}")

    found = check(configuration, conninfo)
    for act in (setup, upgrade):
        with pytest.raises(OperatorError, match=f"belongs to {name}") as refused:
            act(configuration, conninfo)
        assert all(
            each.remedy in str(refused.value)
            for each in found
            if "owner to" in each.remedy
        )
    with pytest.raises(OperatorError, match="lenso-jobs check prints"):
        plan(configuration, conninfo)
    for each in found:
        sql_in(conninfo, each.remedy)

    assert found[0].remedy.startswith("alter schema jobs_email owner to")
    assert len(found) > 50
    left = check(configuration, conninfo)
    assert [each.what for each in left] == []


# Damage before an upgrade.


def test_an_upgrade_of_a_damaged_instance_ends_with_what_differs(
    new_instance, later, sql_in, lenso_jobs
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    sql_in(
        conninfo,
        "drop index live_job_claimable_idx",
        "alter table instance drop constraint instance_is_one_row",
    )
    later()

    code, out, _ = lenso_jobs("upgrade", role_prefix=configuration.prefix, url=conninfo)

    assert code == 1
    assert "applied 0003-note" in out
    assert "index live_job_claimable_idx is missing" in out
    assert "instance_is_one_row is missing" in out
    with psycopg.connect(conninfo) as connection:
        health = connection.execute(
            "select finding from jobs_email.inspect_health()"
        ).fetchall()
    assert {("object_changed",), ("index_unusable",)} <= set(health)


def test_a_swap_of_tables_that_was_cut_off_is_mended_in_the_printed_order(
    new_instance, sql_in
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    sql_in(
        conninfo,
        "set role accounts; select enqueue('email', 'send', '{}', 'k'); reset role",
        "alter table live_job rename to live_job_old",
        "create table live_job (like live_job_old including all)",
        f"alter table live_job owner to {configuration.owner}",
    )

    found = check(configuration, conninfo)
    (first,) = [each for each in found if each.what.startswith("table live_job_old")]
    rest = [each for each in found if each != first]

    assert first.what == (
        "table live_job_old is not part of this release, has the columns of live_job, "
        "and holds 1 row"
    )
    assert first.remedy.startswith("keep it: ")
    assert not [each for each in rest if each.remedy.startswith("drop ")]
    sql_in(
        conninfo,
        "insert into live_job select * from live_job_old",
        "drop table live_job_old",
    )
    for each in rest:
        if not each.remedy.startswith("lenso-jobs"):
            sql_in(conninfo, each.remedy)
    upgrade(configuration, conninfo, repair_too=True)
    assert check(configuration, conninfo) == []


@pytest.mark.parametrize("is_kept", ["live_job", "live_job_old"])
def test_a_repair_gives_a_swapped_table_the_names_of_its_indexes(
    is_kept, new_instance, sql_in
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    sql_in(
        conninfo,
        "alter table live_job rename to live_job_old",
        "create table live_job (like live_job_old including all)",
        f"alter table live_job owner to {configuration.owner}",
    )

    report = upgrade(configuration, conninfo, repair_too=True)

    (left,) = report.differences
    assert left.what.startswith("table live_job_old is not part of this release")
    assert left.remedy.startswith("keep it: ")
    with psycopg.connect(conninfo) as connection:
        ((found,),) = connection.execute(
            "select array_agg(finding) from jobs_email.inspect_health()"
        )
    assert found is None
    if is_kept == "live_job":
        sql_in(conninfo, "drop table live_job_old")
    else:
        sql_in(
            conninfo,
            "drop table live_job",
            "alter table live_job_old rename to live_job",
        )
        upgrade(configuration, conninfo, repair_too=True)
    assert check(configuration, conninfo) == []


# Waiting.


def test_a_repair_tries_a_plain_index_first_and_waits_for_no_snapshot(
    new_instance, sql_in
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    sql_in(conninfo, "drop index live_job_claimable_idx")
    said = []
    with psycopg.connect(conninfo) as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("select count(*) from pg_class")

        upgrade(configuration, conninfo, repair_too=True, say=said.append)

    assert said == ["no session of a worker is connected: start the workers again"]
    assert check(configuration, conninfo) == []


def test_a_lock_of_a_prepared_transaction_is_named_by_its_gid(
    new_instance, sql_in, monkeypatch
):
    monkeypatch.setattr(_setup, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(_setup, "_TRIES", 1)
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    sql_in(conninfo, "drop trigger caller_is_published on caller")
    gid = f"of {configuration.prefix}"
    with psycopg.connect(conninfo) as connection:
        connection.execute("lock table jobs_email.caller in share mode")
        connection.execute(f"prepare transaction '{gid}'")
        connection.execute("commit")
    try:
        with pytest.raises(OperatorError, match=f"prepared transaction '{gid}'"):
            upgrade(configuration, conninfo, repair_too=True)
    finally:
        sql_in(conninfo, f"rollback prepared '{gid}'")
    upgrade(configuration, conninfo, repair_too=True)
    assert check(configuration, conninfo) == []
