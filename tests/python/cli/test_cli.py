from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import datetime
from importlib.metadata import version
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs._assets import asset_dir
from lenso_jobs._prepare import SCHEMA_VERSION
from lenso_jobs.cli import _screen
from lenso_jobs.operator import _setup

PASSWORD = "hush-hush"
MIGRATIONS = sorted(each.stem for each in asset_dir("migrations").glob("*.sql"))


@pytest.fixture
def fresh(lenso_jobs, new_database, fresh_prefix):
    """The same, against an empty database."""
    conninfo = new_database(fresh_prefix)

    def fresh(*arguments, **changes):
        changes = {"role_prefix": fresh_prefix, "url": conninfo} | changes
        return lenso_jobs(*arguments, **changes)

    fresh.conninfo = conninfo
    return fresh


# Each command.


@pytest.mark.slow
def test_setup_prints_its_changes_and_then_that_nothing_is_left_to_do(fresh):
    first = fresh("setup")
    second = fresh("setup")

    code, out, err = first
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        *(f"applied {name}" for name in MIGRATIONS),
        "stored the configuration",
        "Instance jobs_email is ready",
    ]
    assert second == (0, "Instance jobs_email is ready\n", "")


@pytest.mark.slow
def test_setup_prints_json(fresh):
    _, first, _ = fresh("setup", "--json")
    _, second, _ = fresh("setup", "--json")

    assert json.loads(first)["configured"] is True
    assert json.loads(second) == {
        "migrations": [],
        "recorded": [],
        "repaired": [],
        "rights": [],
        "configured": False,
        "differences": [],
        "uncompared": "",
    }


@pytest.mark.slow
def test_a_stale_lock_is_reported_and_broken_on_request(fresh, monkeypatch):
    monkeypatch.setattr(_setup, "LOCK_SECONDS", 0.0)
    fresh("setup")
    with psycopg.connect(fresh.conninfo, autocommit=True) as perhaps_its_holder:
        perhaps_its_holder.execute(
            "insert into jobs_email.yoyo_lock (locked, ctime, pid)"
            " values (1, localtimestamp, 999999)"
        )
        code, out, err = fresh("setup")
        broken = fresh("setup", "--break-lock")

    assert (code, out) == (1, "")
    assert "lenso-jobs setup --break-lock" in err
    assert broken[:2] == fresh("setup")[:2] == (0, "Instance jobs_email is ready\n")
    assert "removed the migration lock" in broken[2]


@pytest.mark.slow
def test_configure_says_whether_anything_changed(fresh):
    fresh("setup")

    assert fresh("configure") == (0, "nothing changed\n", "")
    code, out, err = fresh("configure", lease_seconds=31)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "stored the configuration"
    assert json.loads(fresh("configure", "--json")[1])["configured"] is True


def test_configure_before_setup_is_refused(fresh):
    code, out, err = fresh("configure")

    assert (code, out) == (1, "")
    assert "run: lenso-jobs setup" in err


@pytest.mark.slow
def test_a_refused_configure_says_code_and_hint(fresh, lenso_jobs):
    fresh("setup")
    code, _, err = fresh("setup", schema="jobs_other")

    assert code == 1
    assert err.startswith("error: role ")
    assert "(LJ007 invalid_argument)" in err
    assert "role_prefix" in err


def test_check_of_a_sound_instance_exits_0(lenso_jobs):
    assert lenso_jobs("check") == (0, "Instance jobs_email is as it should be\n", "")
    assert json.loads(lenso_jobs("check", "--json")[1]) == {"findings": []}


@pytest.mark.slow
def test_check_that_finds_a_difference_exits_1_and_says_what_mends_it(
    lenso_jobs, owner
):
    owner.execute("create table stray (n integer)")

    code, out, err = lenso_jobs("check")
    as_json = lenso_jobs("check", "--json")

    assert (code, err) == (1, "")
    assert (
        "table stray is not part of this release\n    by hand, and it deletes data (0 rows): drop table "
        in out
    )
    assert as_json[0] == 1
    assert {finding["what"] for finding in json.loads(as_json[1])["findings"]} >= {
        "table stray is not part of this release"
    }


def test_check_that_cannot_tell_exits_2(fresh):
    code, out, err = fresh("check")

    assert (code, out) == (2, "")
    assert "does not exist; run: lenso-jobs setup" in err


def test_inspect_shows_the_evidence_as_a_table(lenso_jobs, enqueue, claim):
    job = enqueue(payload={"to": PASSWORD}, key=PASSWORD)
    claim()

    code, out, err = lenso_jobs("inspect", job)

    assert (code, err) == (0, "")
    evidence, _, _ = out.partition("\n\n")
    rows = dict(line.split(maxsplit=1) for line in evidence.splitlines())
    assert rows["job_id"].strip() == str(job)
    assert rows["status"].strip() == "running"
    assert rows["worker"].strip() == "email-worker"
    assert "last_failure_code" not in rows
    assert PASSWORD not in out


def test_inspect_prints_json_with_rfc_3339_times(lenso_jobs, enqueue):
    job = enqueue(payload={"to": PASSWORD}, key=PASSWORD)

    code, out, _ = lenso_jobs("inspect", job, "--json")

    evidence = json.loads(out)
    assert code == 0
    assert evidence["job_id"] == str(job)
    assert evidence["lease_expires_at"] is None
    assert datetime.fromisoformat(evidence["created_at"]).utcoffset() is not None
    assert PASSWORD not in out


def test_names_that_look_like_markup_or_emoji_are_shown_as_they_are(
    lenso_jobs, role, owner, enqueue, conninfo
):
    job = enqueue(kind="job:fire:smile:")
    owner.execute("update job set producer = '[red]x[/]' where job_id = %s", (job,))

    _, text, _ = lenso_jobs("inspect", job)
    _, machine, _ = lenso_jobs("inspect", job, "--json")

    for out in (text, machine):
        assert "job:fire:smile:" in out
        assert "[red]x[/]" in out


def test_inspect_acts_as_the_caller_that_is_named(lenso_jobs, enqueue, conninfo, role):
    login = role(member_of=("operations",))
    url = make_conninfo(conninfo, user=login)
    job = enqueue()

    code, out, _ = lenso_jobs("inspect", job, "--caller", "operations", url=url)

    assert code == 0
    assert str(job) in out


def test_inspect_of_no_job_exits_1(lenso_jobs):
    code, out, err = lenso_jobs("inspect", uuid4())

    assert (code, out) == (1, "")
    assert "(LJ006 job_not_found)" in err


def test_inspect_of_an_instance_that_is_not_ready_exits_1_with_a_hint(fresh):
    code, _, err = fresh("inspect", uuid4())

    assert code == 1
    assert "(LJ008 schema_not_ready)" in err
    assert "Run lenso-jobs setup" in err


# What is wrong before anything is done exits 2.

COMMANDS = [
    *(("setup",), ("configure",), ("check",), ("stats",), ("health",)),
    ("inspect", str(uuid4())),
    ("redrive", str(uuid4()), "--yes"),
]
every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each[0])


@every_command
def test_a_malformed_document_exits_2_with_field_and_bound(command, lenso_jobs):
    code, out, err = lenso_jobs(*command, lease_seconds=0, unknown=1)

    assert (code, out) == (2, "")
    assert "lease_seconds: Input should be greater than or equal to 1" in err
    assert "unknown: " in err


@every_command
def test_a_missing_secret_exits_2_and_names_the_variable(command, lenso_jobs):
    code, out, err = lenso_jobs(*command, url="")

    assert (code, out) == (2, "")
    assert "set JOBS_DATABASE_URL" in err


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://ada:p@{}@localhost/jobs",
        "postgresql+psycopg://ada:{}@localhost/jobs",
        "mysql://ada:{}@localhost/jobs",
        "dbname=postgresql+psycopg://ada:{}@localhost/jobs",
    ],
)
@every_command
def test_a_malformed_secret_exits_2_and_is_not_shown(command, lenso_jobs, given):
    url = given.format(PASSWORD)

    code, out, err = lenso_jobs(*command, url=url)

    assert (code, out) == (2, "")
    assert "jobs/database-url" in err
    assert PASSWORD not in err


@every_command
def test_a_server_that_cannot_be_reached_exits_2_without_the_password(
    command, lenso_jobs, tmp_path
):
    url = f"postgresql://ada:{PASSWORD}@/jobs?host={tmp_path}"

    code, out, err = lenso_jobs(*command, url=url)

    assert (code, out) == (2, "")
    assert "the server cannot be reached" in err
    assert PASSWORD not in err


@pytest.mark.slow
def test_secrets_are_read_from_a_directory_when_one_is_named(
    lenso_jobs, tmp_path, conninfo
):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "database-url").write_text(f"{conninfo}\n")

    code, _, err = lenso_jobs("check", "--secrets-dir", tmp_path, url="")

    assert (code, err) == (0, "")


def test_a_secrets_directory_hides_the_environment(lenso_jobs, tmp_path):
    code, _, err = lenso_jobs("check", "--secrets-dir", tmp_path)

    assert code == 2
    assert "cannot be read" in err


def test_a_role_that_may_make_no_roles_exits_1_with_a_hint(fresh, role):
    url = make_conninfo(fresh.conninfo, user=role())

    code, _, err = fresh("setup", url=url)

    assert code == 1
    assert "(42501 unauthorized)" in err
    assert "set-up needs CREATEROLE" in err


def test_messages_are_not_wrapped_to_the_width_of_the_terminal(fresh, monkeypatch):
    monkeypatch.setattr(_screen.err, "_width", 20)

    _, _, err = fresh("check")

    assert err.count("\n") == 1


# The command as a process.


@pytest.mark.sampled
@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        pytest.param(("explain", "no-uuid", "--config", "x"), marks=pytest.mark.slow),
        pytest.param(("setup",), marks=pytest.mark.slow),
        pytest.param(("inspect", "--config", "x"), marks=pytest.mark.slow),
        pytest.param(("check", "--config"), marks=pytest.mark.slow),
        ("setup", "--config", "missing.json"),
    ],
)
def test_a_wrong_command_line_exits_2_without_a_traceback(arguments, command):
    result = command(*arguments)

    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr


@pytest.mark.slow
def test_the_version_is_printed_with_that_of_the_schema(command):
    result = command("--version")

    assert result.returncode == 0
    assert (
        result.stdout
        == f"lenso-jobs {version('lenso-jobs')}, schema {SCHEMA_VERSION}\n"
    )


@pytest.mark.slow
def test_help_tells_the_exit_codes(command):
    result = command("--help")

    assert result.returncode == 0
    for word in ("setup", "check", "stats", "explain", "redrive", "demo", "Exit codes"):
        assert word in result.stdout


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(
            f"postgresql://ada:{PASSWORD}@localhost:1/jobs", marks=pytest.mark.slow
        ),
        pytest.param(
            f"postgresql://ada:p@{PASSWORD}@localhost:1/jobs", marks=pytest.mark.slow
        ),
        pytest.param(
            f"postgresql://ada:p/{PASSWORD}@localhost:1/jobs", marks=pytest.mark.slow
        ),
        pytest.param(f"password='{PASSWORD}", marks=pytest.mark.slow),
        pytest.param(
            b"postgresql://ada:hush-hush\xff@localhost:1/jobs", marks=pytest.mark.slow
        ),
    ],
)
def test_no_command_shows_the_url_or_a_traceback(url, command, document):
    for arguments in (("setup",), ("inspect", str(uuid4()))):
        result = command(
            *arguments, document=document(), JOBS_DATABASE_URL=os.fsdecode(url)
        )

        assert result.returncode == 2
        assert PASSWORD not in result.stdout + result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_an_interrupt_exits_130_and_undoes_what_was_begun(
    new_database, fresh_prefix, environment, document, tmp_path
):
    conninfo = new_database(fresh_prefix)
    path = tmp_path / "jobs.json"
    path.write_text(document(role_prefix=fresh_prefix))
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from lenso_jobs.cli import main; main()"
    )
    with psycopg.connect(conninfo, autocommit=True) as holder:
        holder.execute(
            "select pg_advisory_lock(hashtextextended(%s, 0))",
            ("lenso-jobs operator jobs_email",),
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program, "setup", "--config", path],
            env={**environment, "JOBS_DATABASE_URL": conninfo},
            stderr=subprocess.PIPE,
            text=True,
        )
        waiting = (
            "select from pg_stat_activity where datname = current_database()"
            " and application_name = 'lenso-jobs' and query ~ 'pg_try_advisory_lock'"
        )
        while not holder.execute(waiting).fetchall():
            assert process.poll() is None

        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)

        assert process.returncode == 130
        assert "Traceback" not in err
        assert holder.execute("select to_regnamespace('jobs_email')").fetchone() == (
            None,
        )
