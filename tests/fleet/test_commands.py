"""The commands on a fleet: what they do, refuse, find, and leave after a kill."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs.cli import main
from lenso_jobs.operator import OperatorError, _router, check, configure, setup, upgrade

pytestmark = pytest.mark.slow

# docs/operators/fleet.md
PAGE = Path(__file__).parents[2] / "docs" / "operators" / "fleet.md"
SHARDS = 2
PROGRAM = [sys.executable, "-c", "from lenso_jobs.cli import main; main()"]
NO_SERVER = "host=127.0.0.1 port=1 dbname=none user=postgres"


class Command:
    """Runs ``lenso-jobs fleet`` with the document and the secrets of a fleet as files."""

    def __init__(self, directory, monkeypatch, capsys):
        self._directory, self._monkeypatch, self._capsys = (
            directory,
            monkeypatch,
            capsys,
        )

    def arguments(self, fleet, name, *more, document=None, **secrets):
        """Write document and secrets, and return the arguments of the command."""
        document = document or json.loads(fleet.document.model_dump_json(by_alias=True))
        references = {
            document["instance"]["database_url_secret"],
            *document["shards"],
            *document.get("passwords", {}).values(),
        }
        for reference in references:
            path = self._directory / reference
            path.parent.mkdir(exist_ok=True)
            given = secrets.get(reference.replace("/", "_"))
            path.write_text(given or fleet.secrets(reference), encoding="utf-8")
        path = self._directory / "fleet.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        secrets_dir = f"--secrets-dir={self._directory}"
        return ["fleet", name, *more, f"--fleet={path}", secrets_dir]

    def __call__(self, fleet, name, *more, **changes):
        """Run it in this process: (exit code, output, errors)."""
        arguments = self.arguments(fleet, name, *more, **changes)
        self._monkeypatch.setattr(sys, "argv", ["lenso-jobs", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        said = self._capsys.readouterr()
        for password in passwords(fleet).values():
            assert password not in said.out + said.err
        return caught.value.code or 0, said.out, said.err

    def begin(self, fleet, name, *more):
        """Begin it in a new process."""
        return subprocess.Popen(
            [*PROGRAM, *self.arguments(fleet, name, *more)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def passwords(fleet):
    return {
        role: fleet.secrets(name) for role, name in fleet.document.passwords.items()
    }


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return Command(tmp_path, monkeypatch, capsys)


@pytest.fixture
def fresh_fleet(new_fleet):
    """Make fleets whose sessions are closed after the test."""
    made = []

    def make(*given, **changes):
        made.append(new_fleet(*given, **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def kept(new_fleet):
    """A fleet that the tests leave as it should be."""
    fleet = new_fleet("kept")
    yield fleet
    fleet.close()


def changed(fleet, **changes):
    """Return the document of a fleet with a changed Instance, as JSON has it."""
    document = json.loads(fleet.document.model_dump_json(by_alias=True))
    document["instance"] |= changes
    return document


def on(conninfo, statement):
    with psycopg.connect(conninfo, autocommit=True) as session:
        cursor = session.execute(statement)
        return cursor.fetchall() if cursor.description else None


NAMES = ["shard 0 (shard/0)", "shard 1 (shard/1)", "router (router/url)"]
WELL = "".join(f"{name} is as it should be\n" for name in NAMES)


def test_the_commands_alone_make_a_fleet_that_works(fresh_fleet, command):
    fleet = fresh_fleet(is_set_up=False)

    code, said, errors = command(fleet, "setup")
    assert (code, errors) == (0, "")
    assert said.splitlines() == [
        *(NAMES[0], "applied 0001-initial", "stored the configuration"),
        *(NAMES[1], "applied 0001-initial", "stored the configuration"),
        *(NAMES[2], "done: the router is made"),
    ]
    assert command(fleet, "check") == (0, WELL, "")
    jobs = fleet.jobs("accounts")
    for shard in range(SHARDS):
        job = jobs.enqueue("email", "send", {}, idempotency_key=fleet.key(shard))
        assert fleet.jobs("operations", shard).inspect(job.job_id).queue == "email"

    code, said, _ = command(fleet, "setup")
    assert (code, said.splitlines()) == (
        0,
        [line for name in NAMES for line in (name, "there is nothing to do")],
    )


def test_a_set_up_without_a_shard_does_the_others_and_is_finished_later(
    fresh_fleet, command
):
    fleet = fresh_fleet(is_set_up=False)

    code, said, errors = command(fleet, "setup", shard_0=NO_SERVER)
    assert code == 2
    assert said.splitlines()[0] == NAMES[1]
    assert errors.startswith(f"error: {NAMES[0]}: the server cannot be reached")
    assert "What was done stays: run this again." in errors
    assert on(fleet.router, "select 1 from pg_namespace where nspname ~ '^jobs'") == []
    told = f"the router of {fleet.schema} is not set up; run: lenso-jobs fleet setup"
    assert command(fleet, "upgrade") == (1, "", f"error: {told}\n")
    assert command(fleet, "check") == (2, "", f"error: {told}\n")

    code, said, _ = command(fleet, "setup", "--json")
    found = json.loads(said)
    assert code == 0
    assert found["errors"] == {}
    assert [len(found["done"][name]["migrations"]) for name in NAMES] == [1, 0, 0]
    assert command(fleet, "check") == (0, WELL, "")


def test_a_set_up_that_is_killed_at_any_time_is_finished_by_the_next(
    fresh_fleet, command
):
    fleet = fresh_fleet(is_set_up=False)
    began = time.monotonic()
    command.begin(fresh_fleet(is_set_up=False), "setup").communicate(timeout=60)
    whole = time.monotonic() - began

    for part in range(2, 9):
        process = command.begin(fleet, "setup")
        with suppress(subprocess.TimeoutExpired):
            process.wait(whole * part / 9)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)

    assert command(fleet, "setup")[::2] == (0, "")
    assert command(fleet, "check") == (0, WELL, "")


def test_two_set_ups_at_once_wait_for_each_other(fresh_fleet, command):
    fleet = fresh_fleet(is_set_up=False)

    both = [command.begin(fleet, "setup") for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]

    assert [process.returncode for process in both] == [0, 0], said
    assert sum("the router is made" in each for each in said) == 1
    assert command(fleet, "check") == (0, WELL, "")


REFUSED = {
    "another number of shards": (
        lambda fleet: {"document": changed(fleet) | {"shards": ["shard/0"]}},
        "shard 0 (shard/0) is shard 0 of 2 already: keep the number and the order",
    ),
    "another order of the shards": (
        lambda fleet: {"document": changed(fleet) | {"shards": ["shard/1", "shard/0"]}},
        "shard 0 (shard/1) is shard 1 of 2 already: keep the number and the order",
    ),
    "one database for two shards": (
        lambda fleet: {"shard_1": fleet.shards[0]},
        "shard 1 (shard/1) is the database of shard 0 (shard/0), too",
    ),
    "the router as a shard": (
        lambda fleet: {"shard_1": fleet.router},
        "shard 1 (shard/1) is the router of a fleet",
    ),
    "a shard as the router": (
        lambda fleet: {"router_url": fleet.shards[1]},
        "shard 1 (shard/1) is the database of router (router/url), too",
    ),
    "two shards on one server": (
        lambda fleet: {"shard_1": make_conninfo(fleet.shards[0], dbname="postgres")},
        "shard 1 (shard/1) is on the server of shard 0 (shard/0): each needs a server",
    ),
    "an Instance as the router": (
        lambda fleet: {"router_url": fleet.shards[1], "shard_1": NO_SERVER},
        "holds an Instance, and cannot be the router of a fleet",
    ),
    "an empty database for a shard that has jobs": (
        lambda fleet: {"shard_1": make_conninfo(fleet.shards[1], dbname="postgres")},
        "shard 1 (shard/1) has no Instance, but the fleet has its jobs",
    ),
    "a role that is no superuser": (
        lambda fleet: {"router_url": make_conninfo(fleet.router, user="duty")},
        "the secret router/url must hold a superuser's URL",
    ),
    "a URL without a database": (
        lambda _: {"shard_1": "host=127.0.0.1 user=postgres"},
        "the secret shard/1 must name host and database",
    ),
    "no URL": (lambda _: {"shard_0": "http://x"}, "the secret shard/0 is not a URL"),
}


def test_what_does_not_fit_the_fleet_is_refused_before_anything_is_written(
    kept, command
):
    for change, (changes, told) in REFUSED.items():
        code, said, errors = command(kept, "setup", **changes(kept))
        assert (code in {1, 2}, said) == (True, ""), change
        assert told in errors, change
    assert command(kept, "check") == (0, WELL, "")


def test_the_commands_of_an_instance_refuse_a_router(kept):
    for act in (setup, upgrade, configure, check):
        with pytest.raises(OperatorError, match="is the router of a fleet"):
            act(kept.document.instance, kept.router)


SERVER = "kept0_shards"
DAMAGES = {
    "drop function resume(text)": "function resume(text) is missing",
    "create or replace function pause(p_queue text) returns boolean "
    "language sql as 'select true'": "function pause(text) differs",
    "create function stray() returns integer language sql as 'select 1'": (
        "function stray() belongs neither to the release nor to the document"
    ),
    "grant execute on function purge(timestamptz, integer) to public": (
        "function purge(timestamp with time zone,integer) differs"
    ),
    "comment on function purge(timestamptz, integer) is 'x'": (
        "function purge(timestamp with time zone,integer) differs"
    ),
    "alter type enqueued_item add attribute more integer": "type enqueued_item differs",
    "drop view health_finding": "view health_finding is missing",
    "create or replace view installed_version as select 9 as version, 9 as oldest_client": (
        "view installed_version differs"
    ),
    "revoke {schema}_producer from accounts": (
        "membership of accounts in {schema}_producer is missing"
    ),
    "alter server {schema}_shards options (set p0 'host=127.0.0.1')": (
        "server {schema}_shards differs"
    ),
    "grant usage on foreign server {schema}_shards to public": (
        "server {schema}_shards differs"
    ),
    "drop user mapping for accounts server {schema}_shards": (
        "user mapping of accounts is missing"
    ),
    "alter user mapping for organization server {schema}_shards "
    "options (set password 'other')": "user mapping of organization differs",
    "alter event trigger {schema}_shards disable": (
        "event trigger {schema}_shards differs"
    ),
    "drop event trigger {schema}_shards_drop": (
        "event trigger {schema}_shards_drop is missing"
    ),
}


def test_a_damaged_router_is_found_and_upgraded(kept, command):
    with psycopg.connect(kept.router, autocommit=True) as session:
        session.execute(f"set search_path = {kept.schema}")
        for damage in DAMAGES:
            session.execute(damage.format(schema=kept.schema))

    code, said, errors = command(kept, "check")
    assert (code, errors) == (1, "")
    for finding in DAMAGES.values():
        assert f"\n{finding.format(schema=kept.schema)}" in said
    assert said.count("mend: lenso-jobs fleet upgrade") == said.count("\n    ")
    code, said, _ = command(kept, "upgrade")
    assert code == 0
    assert "done: " in said
    assert command(kept, "check") == (0, WELL, "")


def test_a_damaged_shard_is_found_and_repaired(kept, command):
    on(kept.shards[1], f"drop function {kept.schema}.pause(text)")

    code, said, _ = command(kept, "check", "--json")
    assert code == 1
    (finding,) = json.loads(said)["done"][NAMES[1]]
    assert finding["what"] == "function pause(text) is missing"
    assert finding["remedy"] == "lenso-jobs fleet upgrade --repair"
    assert command(kept, "upgrade", "--repair")[0] == 0
    assert command(kept, "check") == (0, WELL, "")


def test_a_caller_that_a_shard_does_not_let_in_is_found(fresh_fleet, command):
    fleet = fresh_fleet(passwords=False)

    code, said, _ = command(fleet, "check")
    assert code == 1
    for caller in ("accounts", "email-worker", "operations"):
        for shard in range(SHARDS):
            assert f"caller {caller} cannot reach shard {shard}: " in said
    assert "name its password in passwords" in said

    with pytest.raises(psycopg.OperationalError, match="cannot be reached") as caught:
        fleet.jobs("accounts").inspect_key("any")
    assert "run lenso-jobs fleet configure" in caught.value.diag.message_hint


def test_a_host_that_leads_the_router_elsewhere_is_found(
    fresh_fleet, command, monkeypatch
):
    fleet = fresh_fleet(is_set_up=False)
    server = _router.Places.server
    monkeypatch.setattr(_router.Places, "server", lambda places, _: server(places, 1))
    assert command(fleet, "setup")[0] == 0

    code, said, _ = command(fleet, "check")
    assert code == 1
    assert "shard 0 is another database for the router's server" in said
    assert "shard 1 is another" not in said


def test_a_changed_document_is_stored_on_all_shards_and_the_router(
    fresh_fleet, command
):
    fleet = fresh_fleet()
    document = changed(fleet, queues=["email", "slow", "sms"], observer_instances=[])
    del document["passwords"]["operations"]
    gone = f"membership of operations in {fleet.schema}_observer is dropped"

    code, said, _ = command(fleet, "configure", "--dry-run", document=document)
    assert code == 0
    assert said.count("queue sms is declared") == SHARDS
    assert gone in said
    assert command(fleet, "check")[0] == 0

    code, said, _ = command(fleet, "configure", document=document)
    assert code == 0
    assert gone in said
    assert "user mapping of operations is dropped" in said
    assert command(fleet, "check", document=document)[0] == 0
    job = fleet.jobs("accounts").enqueue("sms", "send", {}, idempotency_key="a")
    assert job.created


def test_no_shard_is_changed_if_one_would_refuse_to_drop_a_queue(fresh_fleet, command):
    fleet = fresh_fleet()
    fleet.jobs("accounts").enqueue("slow", "x", {}, idempotency_key=fleet.key(1))
    document = changed(fleet, queues=["email"])

    code, said, errors = command(fleet, "configure", document=document)
    assert (code, said) == (1, "")
    assert f"{NAMES[1]}: queue slow is dropped (live jobs: 1; refused" in errors
    assert command(fleet, "check") == (0, WELL, "")
    assert command(fleet, "configure", "--drop-queues", document=document)[0] == 0
    # The shard says that jobs wait for the queue.
    assert command(fleet, "check", document=document)[0] == 1


def test_an_instance_with_jobs_cannot_become_one_of_two_shards(fresh_fleet, command):
    fleet = fresh_fleet(is_set_up=False)
    setup(fleet.document.shard(0), fleet.shards[0])
    fleet.jobs("accounts", 0).enqueue("email", "x", {}, idempotency_key="a")

    code, said, errors = command(fleet, "setup")
    assert (code, said) == (1, "")
    assert f"{NAMES[0]} has jobs from before the fleet" in errors
    on(fleet.shards[0], f"truncate {fleet.schema}.job, {fleet.schema}.live_job")
    assert command(fleet, "setup")[0] == 0


def test_a_router_of_another_release_is_upgraded_before_it_is_configured(kept, command):
    statement = f"create or replace view {kept.schema}.installed_version as select {{}}"
    on(kept.router, statement.format("0 as version, 0 as oldest_client"))

    code, said, errors = command(kept, "configure")
    assert (code, said) == (1, "")
    assert "is of another release; run: lenso-jobs fleet upgrade" in errors
    assert command(kept, "upgrade")[0] == 0
    assert command(kept, "configure")[0] == 0


@pytest.fixture
def psql(program):
    def psql(conninfo, script):
        return subprocess.run(
            [program("psql"), "-X", "-q", "-f", "-", conninfo],
            input=script,
            check=True,
            capture_output=True,
            text=True,
        )

    return psql


def test_the_planned_scripts_make_the_fleet_and_hold_no_password(
    fresh_fleet, command, psql, tmp_path
):
    fleet = fresh_fleet(is_set_up=False)

    code, said, _ = command(fleet, "plan", "setup", "--json")
    assert code == 0
    scripts = json.loads(said)["done"]
    file = tmp_path / "passwords.json"
    file.write_text(json.dumps(passwords(fleet)), encoding="utf-8")
    for name, conninfo in zip(NAMES, [*fleet.shards, fleet.router], strict=True):
        psql(conninfo, f"\\set passwords `cat {file}`\n{scripts[name]}")
    assert command(fleet, "check") == (0, WELL, "")

    code, said, _ = command(fleet, "plan")
    assert (code, said.count("-- Nothing is to be done.")) == (0, SHARDS + 1)
    assert all(f"-- {name}\n" in said for name in NAMES)


def test_an_option_that_the_planned_command_lacks_is_refused(kept, command):
    code, _, errors = command(kept, "plan", "setup", "--repair")
    assert code == 2
    assert "is an option of upgrade" in errors


def test_a_fleet_is_taken_down_as_docs_operators_fleet_md_says(
    fresh_fleet, command, program, tmp_path
):
    fleet = fresh_fleet()
    (script,) = re.findall(
        r"test_commands.py -->\n```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
    )
    instance = changed(fleet, database_url_secret="jobs/database-url")["instance"]
    (tmp_path / "jobs.json").write_text(json.dumps(instance), encoding="utf-8")
    binary = tmp_path / "lenso-jobs"
    binary.write_text(f'#!/bin/sh\nexec {shlex.join(PROGRAM)} "$@"\n', "utf-8")
    binary.chmod(0o755)
    programs = f"{tmp_path}:{Path(program('psql')).parent}:{os.environ['PATH']}"
    urls = zip(
        ("JOBS_DATABASE_URL", "JOBS_SHARD_0", "JOBS_SHARD_1"),
        (fleet.router, *fleet.shards),
        strict=True,
    )
    environment = {**os.environ, **dict(urls), "PATH": programs}

    script = script.replace("jobs_email", fleet.schema)
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, check=True)

    for conninfo in (fleet.router, *fleet.shards):
        schemas = on(conninfo, "select 1 from pg_namespace where nspname ~ '^jobs_'")
        roles = on(
            conninfo,
            f"select 1 from pg_roles where rolname ~ '^{fleet.schema}_'",
        )
        assert (schemas, roles) == ([], [])


def test_health_names_the_shard_of_each_finding(kept, command):
    on(kept.shards[1], f"drop function {kept.schema}.pause(text)")

    code, said, _ = command(kept, "health", "--caller", "operations")
    assert code == 1
    (changed,) = [line for line in said.splitlines() if "object_changed" in line]
    assert changed.startswith("  1  CRITICAL")
    assert "→ lenso-jobs fleet check\n" in said
    assert command(kept, "upgrade", "--repair")[0] == 0
    assert "object_changed" not in command(kept, "health", "--caller", "operations")[1]


def test_a_shard_that_is_not_reached_is_a_critical_finding(kept, command):
    code, said, errors = command(
        kept, "health", "--caller", "operations", "--json", shard_0=NO_SERVER
    )
    found = json.loads(said)
    assert (code, errors, found["healthy"]) == (1, "", False)
    (lost,) = [each for each in found["findings"] if each["shard"] == 0]
    words = on(
        kept.router,
        f"select remedy from {kept.schema}.health_finding "
        "where finding = 'shard_unreachable'",
    )
    assert (lost["finding"], lost["severity"]) == ("shard_unreachable", "critical")
    assert [(lost["remedy"],)] == words
    assert "cannot be reached" in lost["detail"]


def test_health_and_stats_refuse_a_secret_of_another_shard(kept, command):
    first, second = kept.document.shards
    wrong = {second.replace("/", "_"): kept.secrets(first)}

    code, said, _ = command(kept, "health", **wrong)
    assert code == 1
    assert "is shard 0 of 2, not shard 1 of 2" in said
    assert "Correct the URL in the secret of this shard." in said

    code, said, errors = command(kept, "stats", **wrong)
    assert code == 1
    assert "shard 1: schema" in errors
    assert "is shard 0 of 2, not shard 1 of 2" in errors


def test_stats_have_the_shard_in_the_first_column(kept, command):
    kept.empty()
    kept.jobs("accounts").enqueue("email", "x", {}, idempotency_key=kept.key(1))

    code, said, _ = command(kept, "stats", "--caller", "operations")
    assert code == 0
    rows = [line.split() for line in said.splitlines()]
    assert ["0", "email", "0"] in [row[:3] for row in rows]
    assert ["1", "email", "1"] in [row[:3] for row in rows]
    assert [row[:2] for row in rows].count(["1", "email-worker"]) == 1

    code, said, errors = command(
        kept, "stats", "--caller", "operations", "--json", shard_1=NO_SERVER
    )
    assert code == 2
    assert list(json.loads(said)["done"]) == ["shard 0"]
    assert errors.startswith("error: shard 1: the server cannot be reached")
    kept.empty()


def test_a_role_without_rights_is_refused_by_health_and_stats(kept, command):
    for name in ("health", "stats"):
        code, said, errors = command(kept, name, "--caller", "accounts")
        assert (code, said) == (1, "")
        assert "permission denied" in errors
