"""What plan prints is what the server gets; held by the server's own log."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import Configuration
from lenso_jobs.embedded import EmbeddedServer
from lenso_jobs.operator import (
    CannotTell,
    OperatorError,
    check,
    configure,
    plan,
    setup,
    upgrade,
)
from lenso_jobs.operator._session import SETTINGS

HARMLESS = re.compile(r"(BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|select|set)\b")
ACTS = {"setup": setup, "upgrade": upgrade, "configure": configure}
DAMAGES = (
    "alter table jobs_email.live_job owner to postgres",
    "drop index jobs_email.live_job_claimable_idx",
    "drop function jobs_email.inspect(uuid)",
    "drop view jobs_email.installed_version",
    "create view jobs_email.installed_version as select 1 as version, 1 as n",
    "grant select on jobs_email.job to public",
    "alter table jobs_email.live_job set (fillfactor = 90, user_catalog_table = true)",
    "alter table jobs_email.queue disable trigger queue_is_published",
    'revoke {prefix}_worker from "email-worker"',
)


class Logging:
    """A server of our own that keeps what it was sent."""

    def __init__(self, directory):
        self.server = EmbeddedServer(
            directory,
            settings={
                "log_statement": "all",
                "logging_collector": "on",
                "log_destination": "jsonlog",
                "log_directory": "sent",
                "fsync": "off",
            },
        )
        self._log = directory / "data" / "sent"
        self._read = 0

    def database(self):
        """The connection string of a new database."""
        name = f"plan_{uuid4().hex[:12]}"
        with psycopg.connect(self.server.conninfo(), autocommit=True) as connection:
            connection.execute(f"create database {name}")
        return self.server.conninfo(name)

    def next_transaction(self):
        """The transaction id that the next writer on this server gets."""
        with psycopg.connect(self.server.conninfo(), autocommit=True) as connection:
            ask = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
            return connection.execute(ask).fetchone()[0]

    def sent(self):
        """What sessions of the command have sent since the last time."""
        mark = f"select '{uuid4().hex}'"
        with psycopg.connect(self.server.conninfo(), autocommit=True) as connection:
            connection.execute(mark)
        deadline = time.monotonic() + 20
        while True:
            assert time.monotonic() < deadline
            text = "".join(
                path.read_text() for path in sorted(self._log.glob("*.json"))
            )
            if mark in text:
                break
            time.sleep(0.02)
        entries = [json.loads(line) for line in text.splitlines()]
        entries, self._read = entries[self._read :], len(entries)
        return [
            re.sub(r"\A(statement|execute [^:]*): ", "", entry["message"]).strip()
            for entry in entries
            if entry.get("application_name") == "lenso-jobs"
            and re.match("statement|execute", entry["message"])
        ]


@pytest.fixture(scope="module")
def logging():
    directory = Path(tempfile.mkdtemp(prefix="lenso-jobs-plan-"))
    directory.chmod(0o755)  # the server's account must pass through
    logging = Logging(directory)
    try:
        with logging.server:
            yield logging
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def psql(program):
    """Run a script."""

    def psql(conninfo, script):
        subprocess.run(
            [program("psql"), "-Xq", conninfo],
            input=script,
            text=True,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    return psql


def of(document, **changes):
    prefix = f"plan_{uuid4().hex[:10]}"
    return Configuration.from_json(document(**{"role_prefix": prefix} | changes))


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS)
def test_the_printed_statements_are_those_that_the_server_gets_and_printing_sends_none(
    act, logging, document, later
):
    configuration, conninfo = of(document), logging.database()
    if act != "setup":
        setup(configuration, conninfo)
    if act == "upgrade":
        later()
    if act == "configure":
        configuration = of(
            document,
            role_prefix=configuration.prefix,
            lease_seconds=31,
            queues=["email", "other"],
            worker_instances=["email-worker", "o'brien \\ x"],
        )
    before = logging.next_transaction()
    logging.sent()

    planned = plan(configuration, conninfo, act)
    script = planned.script()
    only_read = kept(logging.sent())
    after = logging.next_transaction()
    ACTS[act](configuration, conninfo)
    received = kept(logging.sent())

    statements = [
        statement.strip() for part in planned.parts for statement in part.statements
    ]
    assert statements
    # The release is loaded to compare the rights, and rolled back.
    assert after == before or act == "upgrade"
    assert all(HARMLESS.match(statement) for statement in only_read)
    assert not set(only_read) & (set(statements) - set(SETTINGS))
    rest = iter(received)
    assert all(statement in rest for statement in statements)
    for statement in received:
        assert statement in statements or HARMLESS.match(statement), statement
    assert all(statement in script for statement in statements)
    assert plan(configuration, conninfo, act).parts == ()


def damaged(configuration, conninfo):
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in DAMAGES:
            connection.execute(statement.format(prefix=configuration.prefix))


def kept(statements):
    """What of it was no part of a transaction that was rolled back."""
    pending = []
    for statement in statements:
        pending.append(statement)
        if statement == "ROLLBACK":
            begun = len(pending) - 1 - pending[::-1].index("BEGIN")
            del pending[begun:]
    return pending


@pytest.mark.slow
def test_the_printed_statements_of_a_repair_are_those_that_the_server_gets(
    logging, document
):
    configuration, conninfo = of(document), logging.database()
    setup(configuration, conninfo)
    damaged(configuration, conninfo)
    found = check(configuration, conninfo)
    logging.sent()

    planned = plan(configuration, conninfo, "upgrade", repair_too=True)
    looked = logging.sent()
    still = check(configuration, conninfo)
    logging.sent()
    upgrade(configuration, conninfo, repair_too=True)
    received = kept(logging.sent())

    statements = [
        statement.strip() for part in planned.parts for statement in part.statements
    ]
    assert found
    assert still == found
    assert all(HARMLESS.match(statement) for statement in kept(looked))
    rest = iter(received)
    assert all(statement in rest for statement in statements)
    for statement in received:
        assert statement in statements or HARMLESS.match(statement), statement
    assert all(statement in planned.script() for statement in statements)
    assert plan(configuration, conninfo, "upgrade", repair_too=True).parts == ()
    configure(configuration, conninfo)
    assert check(configuration, conninfo) == []


@pytest.mark.slow
def test_the_script_of_a_repair_mends_in_psql(new_instance, psql):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    damaged(configuration, conninfo)
    words = {finding.what for finding in check(configuration, conninfo)}
    planned = plan(configuration, conninfo, "upgrade", repair_too=True)

    psql(conninfo, planned.script())

    assert words & {what for part in planned.parts for what in part.changes}
    configure(configuration, conninfo)
    assert check(configuration, conninfo) == []


@pytest.mark.slow
def test_of_a_repair_the_pending_migrations_are_planned_first(new_instance, later):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    later()

    planned = plan(configuration, conninfo, "upgrade", repair_too=True)

    assert planned.parts
    assert planned.parts == plan(configuration, conninfo, "upgrade").parts
    assert "pending; run this, then plan the repair again" in planned.script()


@pytest.mark.slow
@pytest.mark.parametrize("act", ["setup", "upgrade"])
def test_the_rights_of_a_role_that_would_be_made_are_planned(act, new_instance, psql):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"drop owned by {configuration.prefix}_operator")
        connection.execute(f"drop role {configuration.prefix}_operator")

    planned = plan(configuration, conninfo, act, repair_too=act == "upgrade")

    script = planned.script()
    assert f"--    role {configuration.prefix}_operator is created" in script
    assert "--    execute on redrive(uuid,integer) to " in script
    psql(conninfo, script)
    assert check(configuration, conninfo) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "act", [pytest.param("setup", marks=pytest.mark.slow), "upgrade"]
)
def test_the_script_does_in_psql_what_the_command_does(act, new_instance, psql, later):
    configuration, conninfo = new_instance()
    if act == "upgrade":
        setup(configuration, conninfo)
        later()

    psql(conninfo, plan(configuration, conninfo, act).script())

    assert plan(configuration, conninfo, act).parts == ()
    assert check(configuration, conninfo) == []


@pytest.mark.slow
@pytest.mark.parametrize("act", ["setup", "upgrade"])
def test_the_rights_that_would_be_changed_are_part_of_the_plan(act, new_instance, psql):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    group = f"{configuration.prefix}_worker"
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "grant select on jobs_email.job to public;"
            f" revoke usage on schema jobs_email from {group};"
            " delete from jobs_email.installed_digest"
        )

    planned = plan(configuration, conninfo, act)
    psql(conninfo, planned.script())

    assert [part.title for part in planned.parts] == [
        "revoke select on table jobs_email.job from public cascade",
        f"grant usage on schema jobs_email to {group}",
        "the digest of the objects",
    ]
    assert plan(configuration, conninfo, act).parts == ()
    assert check(configuration, conninfo) == []


@pytest.mark.slow
def test_a_repair_makes_the_sequences_of_a_claim_floor_that_was_lost(new_instance):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "drop sequence jobs_email.claim_floor_1_at;"
            " alter sequence jobs_email.claim_floor_2_at rename to floor"
        )

    (finding,) = check(configuration, conninfo)
    planned = plan(configuration, conninfo, "upgrade", repair_too=True)
    report = upgrade(configuration, conninfo, repair_too=True)

    assert finding.remedy == "select jobs_email._claim_floors_made()"
    assert [part.title for part in planned.parts] == ["claim floors"]
    assert (report.repaired, report.differences) == ((finding.what,), ())
    assert check(configuration, conninfo) == []


@pytest.mark.slow
def test_a_role_that_may_not_create_a_schema_gets_a_plan_that_says_what_it_leaves_out(
    new_instance, role, later
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    later()
    member = make_conninfo(conninfo, user=role(member_of=[configuration.owner]))

    planned = plan(configuration, member, "upgrade")

    assert "permission denied for database" in planned.uncompared
    assert (
        planned.script()
        .splitlines()[1]
        .startswith(
            "-- objects and rights are not compared with this release: cannot tell: "
        )
    )
    assert any(part.does == "apply" for part in planned.parts)
    upgrade(configuration, member)
    with pytest.raises(CannotTell, match="permission denied for database"):
        plan(configuration, member, "upgrade", repair_too=True)


def test_the_script_says_what_each_part_is_and_what_it_would_find_to_do(
    new_instance, role
):
    name = role()
    configuration, conninfo = new_instance(worker_instances=["email-worker", name])

    script = plan(configuration, conninfo).script()

    lines = script.splitlines()
    assert lines[0] == "-- lenso-jobs setup, Instance jobs_email"
    group = f"{configuration.prefix}_worker"
    for line in (
        "-- 1. bootstrap.sql",
        f"--    role {group} is created",
        "--    schema jobs_email is created",
        f"--    {name} becomes a member of {group}",
        "-- 3. migration 0001-initial",
        "--    the configuration is stored for the first time",
    ):
        assert line in lines


@pytest.mark.slow
def test_a_lock_that_yoyo_left_behind_is_part_of_the_plan(new_instance, psql):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "insert into jobs_email.yoyo_lock values (1, localtimestamp, 7)"
        )

    script = plan(configuration, conninfo, "upgrade").script()
    psql(conninfo, script)

    assert "--    process 7 left it behind; refused where it may be at work" in script
    assert check(configuration, conninfo) == []


@pytest.mark.slow
def test_a_script_that_waits_for_another_operator_keeps_no_snapshot(
    new_instance, psql, background, until
):
    configuration, conninfo = new_instance()
    script = plan(configuration, conninfo).script()
    ask = (
        "select from pg_stat_activity where datname = current_database()"
        " and application_name = 'psql' and query ~ 'pg_try_advisory_lock'"
    )
    with psycopg.connect(conninfo, autocommit=True) as other:
        key = f"lenso-jobs operator {configuration.schema_}"
        other.execute("select pg_advisory_lock(hashtextextended(%s, 0))", (key,))
        running = background(psql, conninfo, script)
        until(lambda: other.execute(ask).fetchall())
        # It lets go of the snapshot between two looks, as an index build waits for.
        other.execute("create table slow (n integer)")
        other.execute("create index concurrently on slow (n)")
        assert not running.done()
    running.result(60)

    assert check(configuration, conninfo) == []


@pytest.mark.slow
def test_where_all_is_done_the_plan_says_so(new_instance):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)

    scripts = [plan(configuration, conninfo, act).script() for act in ACTS]

    assert [script.splitlines()[1] for script in scripts] == (
        ["-- Nothing is to be done."] * 3
    )


def test_a_plan_of_an_act_that_would_be_refused_is_refused(new_instance):
    configuration, conninfo = new_instance()

    for act in ("upgrade", "configure"):
        with pytest.raises(OperatorError, match="lenso-jobs setup"):
            plan(configuration, conninfo, act)


@pytest.mark.slow
def test_a_plan_without_the_right_to_look_is_refused_as_such(new_instance, role):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    login = psycopg.conninfo.make_conninfo(conninfo, user=role())

    with pytest.raises(OperatorError, match="cannot tell"):
        plan(configuration, login)


def test_an_option_of_another_command_is_refused(lenso_jobs):
    for words in (("setup", "--repair"), ("upgrade", "--drop-queues")):
        code, out, err = lenso_jobs("plan", *words)
        assert (code, out) == (2, "")
        assert words[1] in err


def test_the_command_prints_the_script_and_json(lenso_jobs, new_instance):
    configuration, conninfo = new_instance()
    where = {"role_prefix": configuration.prefix, "url": conninfo}

    script = lenso_jobs("plan", **where)
    code, machine, _ = lenso_jobs("plan", "setup", "--json", **where)

    assert script == (0, plan(configuration, conninfo).script(), "")
    assert code == 0
    (first, *_) = json.loads(machine)["parts"]
    assert first["title"] == "bootstrap.sql"
    assert first["transactional"]
