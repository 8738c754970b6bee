from __future__ import annotations

import json
import time
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs import (
    Configuration,
    InvalidArgument,
    InvalidQueue,
    Jobs,
    Unauthorized,
)
from lenso_jobs.operator import (
    OperatorError,
    Report,
    _setup,
    check,
    configure,
    find_changes,
    setup,
    upgrade,
)


@pytest.fixture
def rows():
    """Ask the server something as superuser."""

    def rows(conninfo, statement, *parameters):
        with psycopg.connect(conninfo, autocommit=True) as connection:
            return connection.execute(statement, parameters or None).fetchall()

    return rows


@pytest.fixture
def members(rows):
    """List the members of an Instance's groups, as (group, member)."""

    def members(configuration, conninfo):
        return {
            (group.removeprefix(f"{configuration.prefix}_"), member)
            for group, member in rows(
                conninfo,
                "select m.roleid::regrole::text, r.rolname from pg_auth_members as m"
                " join pg_roles as r on r.oid = m.member"
                " where m.roleid::regrole::text like %s"
                " and coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, true)",
                f"{configuration.prefix}\\_%",
            )
        }

    return members


@pytest.fixture
def changed(document, fresh_prefix):
    """Read the document of the fresh Instance with changes."""

    def changed(**changes):
        return Configuration.from_json(document(role_prefix=fresh_prefix, **changes))

    return changed


def test_setup_makes_an_instance_that_works_and_that_check_finds_sound(new_instance):
    configuration, conninfo = new_instance()

    report = setup(configuration, conninfo)

    assert report.migrations
    assert report.configured
    assert check(configuration, conninfo) == []
    with psycopg.connect(conninfo, autocommit=True) as connection:
        jobs = Jobs(connection, "jobs_email", caller="accounts")
        assert jobs.enqueue("email", "send", {}, idempotency_key="key").created


@pytest.mark.slow
def test_setup_again_reports_nothing_to_do(new_instance):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)

    again = setup(configuration, conninfo)

    assert again == Report(migrations=(), configured=False)


@pytest.mark.slow
def test_setup_again_with_a_changed_document_stores_it(new_instance, changed):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)

    again = setup(changed(lease_seconds=31), conninfo)

    assert again == Report(migrations=(), configured=True)
    assert check(changed(lease_seconds=31), conninfo) == []


@pytest.mark.slow
def test_setup_again_says_which_memberships_it_grants(new_instance):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    group = f"{configuration.prefix}_worker"
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f'revoke {group} from "email-worker"')

    again = setup(configuration, conninfo)

    assert again == Report(rights=(f"email-worker becomes a member of {group}",))


@pytest.mark.slow
def test_two_setups_at_once_do_the_work_once(new_instance, background):
    configuration, conninfo = new_instance()

    first, second = [background(setup, configuration, conninfo) for _ in range(2)]
    reports = [first.result(), second.result()]

    assert () in [report.migrations for report in reports]
    assert sorted(report.configured for report in reports) == [False, True]
    assert check(configuration, conninfo) == []


@pytest.mark.slow
@pytest.mark.parametrize("act", [setup, configure])
def test_an_operator_waits_for_another_one_at_work(act, new_instance, background):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    key = "lenso-jobs operator jobs_email"

    with psycopg.connect(conninfo, autocommit=True) as other:
        other.execute("select pg_advisory_lock(hashtextextended(%s, 0))", (key,))
        waiting = background(act, configuration, conninfo)
        deadline = time.monotonic() + 20
        while not other.execute(
            "select from pg_stat_activity where datname = current_database()"
            " and application_name = 'lenso-jobs' and query ~ 'pg_try_advisory_lock'"
        ).fetchall():
            assert not waiting.done(), "nobody waited"
            assert time.monotonic() < deadline

    assert waiting.result() in (False, Report((), configured=False))


@pytest.mark.slow
def test_everything_in_the_schema_belongs_to_the_owner(new_instance, rows):
    configuration, conninfo = new_instance()

    setup(configuration, conninfo)

    owners = rows(
        conninfo,
        "select distinct relowner::regrole::text from pg_class"
        " where relnamespace = 'jobs_email'::regnamespace",
    )
    assert owners == [(configuration.owner,)]
    assert rows(
        conninfo,
        "select count(*) from pg_class where relnamespace = 'public'::regnamespace",
    ) == [(0,)]


@pytest.mark.slow
def test_setup_refuses_the_group_roles_of_another_database(new_instance, new_database):
    configuration, conninfo = new_instance()
    other = new_database()
    setup(configuration, conninfo)

    with pytest.raises(InvalidArgument) as caught:
        setup(configuration, other)

    assert "role_prefix" in caught.value.hint
    with pytest.raises(OperatorError, match="does not exist"):
        check(configuration, other)


@pytest.mark.slow
def test_setup_refuses_the_group_roles_of_another_schema(new_instance, changed):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)

    with pytest.raises(InvalidArgument) as caught:
        setup(changed(schema="jobs_other"), conninfo)

    assert "role_prefix" in caught.value.hint


def test_setup_refuses_a_schema_of_another_owner(new_instance, rows):
    configuration, conninfo = new_instance()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("create schema jobs_email")

    with pytest.raises(InvalidArgument, match="schema jobs_email exists"):
        setup(configuration, conninfo)

    assert rows(conninfo, "select to_regrole(%s)", configuration.owner) == [(None,)]


def test_setup_refuses_a_superuser_as_a_caller(new_instance, role):
    configuration, conninfo = new_instance(worker_instances=[role("superuser")])

    with pytest.raises(InvalidArgument, match="superuser"):
        setup(configuration, conninfo)


@pytest.mark.slow
def test_a_database_may_have_any_name(new_instance):
    configuration, conninfo = new_instance()
    name = f"a#b%41 c/d?e=f&g'\"{uuid4().hex[:6]}"
    server = make_conninfo(conninfo, dbname="postgres")
    identifier = sql.Identifier(name)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(
            sql.SQL("create database {} template template0").format(identifier)
        )
        try:
            odd = make_conninfo(conninfo, dbname=name)

            report = setup(configuration, odd)

            assert report.migrations
            assert check(configuration, odd) == []
        finally:
            connection.execute(
                sql.SQL("drop database {} with (force)").format(identifier)
            )


@pytest.mark.slow
def test_options_in_the_url_are_kept(new_instance, rows):
    configuration, conninfo = new_instance()
    options = make_conninfo(
        conninfo, options="-c statement_timeout=30000 -c search_path=x"
    )

    setup(configuration, options)

    assert check(configuration, options) == []


# The migration tool's lock.


@pytest.fixture
def locked(new_instance, monkeypatch):
    """An Instance with a lock of the migration tool's, and no patience with it."""
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "insert into jobs_email.yoyo_lock (locked, ctime, pid)"
            " values (1, localtimestamp, 999999)"
        )
    monkeypatch.setattr(_setup, "LOCK_SECONDS", 0.05)
    return configuration, conninfo


@pytest.fixture
def bystander(locked):
    """A session that could have taken the lock."""
    with psycopg.connect(locked[1], autocommit=True) as session:
        yield session


@pytest.mark.slow
@pytest.mark.parametrize("act", [setup, upgrade])
def test_a_lock_with_a_possible_holder_is_reported_with_the_way_to_break_it(
    act, locked, bystander
):
    with pytest.raises(OperatorError, match=r"999999.*lenso-jobs setup --break-lock"):
        act(*locked)


@pytest.mark.slow
def test_breaking_the_lock_finishes_the_setup(locked, bystander):
    report = setup(*locked, break_lock=True)

    assert report == Report(migrations=(), configured=False)
    assert setup(*locked) == report


@pytest.mark.slow
def test_a_lock_without_a_possible_holder_is_removed_and_reported(locked):
    said = []

    report = setup(*locked, say=said.append)

    assert report == Report(migrations=(), configured=False)
    assert said == ["removed the migration lock of process 999999"]


@pytest.mark.slow
def test_callers_connected_meanwhile_do_not_keep_a_stale_lock(locked, role):
    configuration, conninfo = locked
    with psycopg.connect(make_conninfo(conninfo, user=role())):
        assert setup(configuration, conninfo).migrations == ()


# A set-up without a superuser.


@pytest.mark.slow
def test_a_database_owner_with_createrole_sets_up_and_checks(unprivileged):
    configuration, conninfo = unprivileged

    report = setup(configuration, conninfo)

    assert report.migrations
    assert setup(configuration, conninfo) == Report((), configured=False)
    assert check(configuration, conninfo) == []


@pytest.mark.slow
def test_a_database_owner_with_createrole_configures(unprivileged, changed, members):
    configuration, conninfo = unprivileged
    setup(configuration, conninfo)

    configure(changed(worker_instances=["spare-worker"]), conninfo)

    assert ("worker", "email-worker") not in members(configuration, conninfo)
    assert ("worker", "spare-worker") in members(configuration, conninfo)


def test_setup_without_createrole_is_refused_as_such(role, new_instance):
    login = role()
    configuration, conninfo = new_instance()

    with pytest.raises(Unauthorized):
        setup(configuration, make_conninfo(conninfo, user=login))


@pytest.mark.slow
def test_setup_of_1500_new_callers_takes_less_than_ten_seconds(
    new_instance, rows, members
):
    _, conninfo = new_instance()
    names = [f"many_{uuid4().hex[:8]}_{n}" for n in range(1500)]
    configuration, _ = new_instance(producer_instances=names)
    began = time.monotonic()

    setup(configuration, conninfo)
    taken = time.monotonic() - began
    again = setup(configuration, conninfo)

    assert taken < 10
    assert again == Report((), configured=False)
    assert {("producer", name) for name in names} <= members(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"drop role {', '.join(names)}")


# configure


@pytest.mark.slow
def test_configure_returns_whether_anything_changed(new_instance, changed):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)

    assert configure(configuration, conninfo) is False
    assert configure(changed(retry_jitter=0.5), conninfo) is True
    assert configure(changed(retry_jitter=0.5), conninfo) is False


def test_configure_adds_and_removes_callers_and_their_memberships(
    role, new_instance, changed, members
):
    old, new = role(), role()
    configuration, conninfo = new_instance(worker_instances=["email-worker", old])
    setup(configuration, conninfo)
    before = members(configuration, conninfo)

    configure(changed(worker_instances=["email-worker", new]), conninfo)

    after = members(configuration, conninfo)
    assert before - after == {("worker", old)}
    assert after - before == {("worker", new)}
    with psycopg.connect(make_conninfo(conninfo, user=new)) as connection:
        assert Jobs(connection, "jobs_email").claim("email") == []


@pytest.mark.slow
def test_configure_moves_a_caller_from_one_group_to_another(
    role, new_instance, changed, members
):
    name = role()
    configuration, conninfo = new_instance(producer_instances=["accounts", name])
    setup(configuration, conninfo)

    configure(changed(observer_instances=["operations", name]), conninfo)

    now = members(configuration, conninfo)
    assert ("producer", name) not in now
    assert ("observer", name) in now


def test_configure_makes_a_caller_that_does_not_exist_and_lets_it_log_in_nowhere(
    role, new_instance, changed, rows
):
    name = role()
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"drop role {name}")

    configure(changed(worker_instances=["email-worker", name]), conninfo)

    assert rows(
        conninfo, "select rolcanlogin from pg_roles where rolname = %s", name
    ) == [(False,)]


@pytest.mark.slow
def test_a_dba_s_own_grant_is_left_alone(role, new_instance, changed, members):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    own = role(member_of=(f"{configuration.prefix}_worker",))

    configure(changed(lease_seconds=31), conninfo)
    setup(changed(worker_instances=["email-worker"]), conninfo)

    assert ("worker", own) in members(configuration, conninfo)


@pytest.mark.slow
def test_a_caller_s_password_and_other_memberships_are_never_touched(
    role, new_instance, changed, rows
):
    group = role("nologin")
    name = role("login password 'its own'", member_of=(group,))
    configuration, conninfo = new_instance(worker_instances=["email-worker", name])
    ask = (
        "select rolpassword, rolcanlogin, pg_has_role(oid, %s, 'member')"
        " from pg_authid where rolname = %s"
    )
    before = rows(conninfo, ask, group, name)

    setup(configuration, conninfo)
    configure(changed(), conninfo)

    assert rows(conninfo, ask, group, name) == before


@pytest.mark.slow
def test_a_queue_with_live_jobs_is_not_dropped_and_memberships_stay_as_they_were(
    role, new_instance, changed, members
):
    new = role()
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    before = members(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        jobs = Jobs(connection, "jobs_email", caller="accounts")
        jobs.enqueue("slow", "send", {}, idempotency_key="key")
    change = changed(queues=["email"], worker_instances=["email-worker", new])

    with pytest.raises(InvalidArgument, match="live jobs"):
        configure(change, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        worker = Jobs(connection, "jobs_email", caller="email-worker")
        refused = members(configuration, conninfo)
        worker.complete(*worker.claim("slow"))
    ended = configure(change, conninfo)

    assert refused == before
    assert ended is True
    assert check(change, conninfo) == []


@pytest.mark.slow
def test_a_queue_with_live_jobs_is_dropped_on_request_and_its_jobs_wait(
    new_instance, changed
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    fewer = changed(queues=["email"])
    with psycopg.connect(conninfo, autocommit=True) as connection:
        jobs = Jobs(connection, "jobs_email", caller="accounts")
        worker = Jobs(connection, "jobs_email", caller="email-worker")
        held, waiting = (
            jobs.enqueue("slow", "send", {}, idempotency_key=key).job_id for key in "ab"
        )
        (lease,) = worker.claim("slow")

        with pytest.raises(InvalidArgument, match=r"slow \(2\)") as refused:
            configure(fewer, conninfo)
        dropped = configure(fewer, conninfo, drop_queues=True)
        with pytest.raises(InvalidQueue):
            worker.claim("slow")
        worker.complete(lease)
        again = configure(changed(queues=["email", "other"]), conninfo)
        configure(configuration, conninfo)
        (found,) = worker.claim("slow")

    assert "--drop-queues" in refused.value.hint
    assert dropped
    assert again
    assert lease.job_id == held
    assert found.job_id == waiting


@pytest.mark.slow
def test_the_changes_of_configure_are_printed_beforehand(
    role, new_instance, changed, rows
):
    old, new = role(), role()
    configuration, conninfo = new_instance(worker_instances=["email-worker", old])
    setup(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        jobs = Jobs(connection, "jobs_email", caller="accounts")
        jobs.enqueue("slow", "send", {}, idempotency_key="key")
    change = changed(
        lease_seconds=31,
        retry_jitter=0.25,
        retention_seconds=60,
        queues=["email", "new"],
        worker_instances=["email-worker", new, f"{new}_made"],
        producer_instances=["accounts", "organization", "email-worker"],
    )

    told = find_changes(change, conninfo)

    group = f"{configuration.prefix}_worker"
    assert told.roles == (
        f"role {new}_made is created, without login",
        f"email-worker becomes a member of {configuration.prefix}_producer",
        f"{new} becomes a member of {group}",
        f"{new}_made becomes a member of {group}",
        f"{old} is no longer a member of {group}",
    )
    assert told.stored == (
        "lease_seconds changes from 30 to 31",
        "retry_jitter changes from 0 to 0.25",
        "retention_seconds changes from none to 60",
        "queue new is declared",
        "queue slow is dropped (live jobs: 1; refused without configure --drop-queues)",
        "caller email-worker changes from worker to producer and worker",
        *sorted(
            [
                f"caller {new} is declared as worker",
                f"caller {new}_made is declared as worker",
                f"caller {old} is dropped",
            ]
        ),
    )
    assert rows(conninfo, "select to_regrole(%s)", f"{new}_made") == [(None,)]
    configure(change, conninfo, drop_queues=True)
    assert not find_changes(change, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"drop role {new}_made")


@pytest.mark.slow
def test_a_membership_that_another_operator_gave_is_taken_back_too(
    unprivileged, changed, conninfo, members
):
    configuration, as_dba = unprivileged
    setup(configuration, as_dba)
    superuser = conninfo_to_dict(conninfo)["user"]

    configure(
        changed(worker_instances=["spare-worker"]),
        make_conninfo(as_dba, user=superuser),
    )

    assert ("worker", "email-worker") not in members(configuration, as_dba)


@pytest.mark.slow
def test_a_name_is_sent_in_utf8_in_every_environment(new_instance, rows, monkeypatch):
    name = f"{uuid4().hex[:8]}_\N{LATIN SMALL LETTER E WITH ACUTE}"
    configuration, conninfo = new_instance(worker_instances=[name])
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")

    setup(configuration, conninfo)

    monkeypatch.delenv("PGCLIENTENCODING")
    assert rows(conninfo, "select caller from jobs_email.caller where is_worker") == [
        (name,)
    ]
    assert rows(conninfo, "select to_regrole(%s) is null", f'"{name}"') == [(False,)]
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("drop schema jobs_email cascade")
        connection.execute(f'drop role "{name}"')


def test_configure_where_nothing_is_set_up_leaves_nothing_behind(new_instance, rows):
    configuration, conninfo = new_instance()

    with pytest.raises(OperatorError, match="lenso-jobs setup"):
        configure(configuration, conninfo)

    assert rows(conninfo, "select to_regnamespace('jobs_email')") == [(None,)]
    assert rows(conninfo, "select to_regrole(%s)", configuration.owner) == [(None,)]


@pytest.mark.slow
def test_configuring_is_audited_without_the_secret(new_instance, rows):
    configuration, conninfo = new_instance()

    setup(configuration, conninfo)

    ((act, arguments),) = rows(
        conninfo, "select act, arguments from jobs_email.operator_act"
    )
    assert act == "configure"
    document = json.loads(configuration.document())
    assert "database_url_secret" not in arguments
    assert {
        name: change["to"] for name, change in arguments.items() if name in document
    } == {name: document[name] for name in arguments if name in document}
