"""The README's own blocks, run as they stand, in their order."""

import re
import sys
import time
from pathlib import Path

import psycopg
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_a_newcomer_gets_from_the_document_to_a_completed_job(newcomer, psql):
    _, _, first, _ = blocks("bash")
    setup = "\n".join(line for line in first.splitlines() if "export" not in line)
    in_sql = "".join(blocks("sql"))

    assert "is ready" in newcomer("bash", "-ec", setup)
    answer = newcomer(
        psql, "-qAt", "-v", "ON_ERROR_STOP=1", newcomer.url, text=newcomer.ours(in_sql)
    )

    _, completed, inspected, explained = answer.splitlines()
    assert (completed, inspected) == ("t", "succeeded|1")
    assert explained.startswith("succeeded|email-worker")
    for block in blocks("python"):
        if "def jobs_configuration" in block or "def test_" in block:
            continue  # the plugin's tests run them
        if "HeldLease)" in block:
            (name,) = re.findall(r"Save this as `(\w+\.py)`", README)
            if "def send" in block:
                (newcomer.directory / name).write_text(block)
        elif "worker.run()" in block:
            worked(newcomer, sys.executable, "-W", "error", "-c", newcomer.ours(block))
        else:
            newcomer(sys.executable, "-W", "error", "-c", newcomer.ours(block))
    with psycopg.connect(newcomer.conninfo) as connection:
        assert connection.execute(
            "select outcome, failure_code, count(*) from jobs_email.attempt"
            " group by 1, 2 order by 3"
        ).fetchall() == [("failed", "no_recipient", 1), ("succeeded", None, 5)]


@pytest.mark.slow
def test_the_command_of_a_worker_runs_the_handlers_of_the_readme(newcomer):
    _, _, first, _ = blocks("bash")
    setup = "\n".join(line for line in first.splitlines() if "export" not in line)
    newcomer("bash", "-ec", setup)
    for handler in (block for block in blocks("python") if "HeldLease)" in block):
        name = "welcomes.py" if "def welcome" in handler else "emails.py"
        (newcomer.directory / name).write_text(handler)
    (command,) = (block for block in blocks("sh") if "lenso-jobs work" in block)
    first, second, *_ = (block for block in blocks("python") if "idempotency" in block)

    newcomer(sys.executable, "-c", newcomer.ours(first.split("    worker =")[0]))
    said = worked(newcomer, "bash", "-c", "exec " + newcomer.ours_in_sh(command))
    newcomer(sys.executable, "-c", newcomer.ours(second))
    in_its_own = command.replace("emails:send", "welcomes:welcome")
    worked(newcomer, "bash", "-c", "exec " + newcomer.ours_in_sh(in_its_own))

    assert "send to grace@example.com" in said
    with psycopg.connect(newcomer.conninfo) as connection:
        assert connection.execute("select email from account").fetchall() == [
            ("joan@example.com",)
        ]
        assert connection.execute(
            "select outcome, attempt from jobs_email.attempt"
        ).fetchall() == [("succeeded", 1), ("succeeded", 1)]


def worked(newcomer, *command):
    """Run a worker until nothing is left to do, and ask it to stop."""
    process = newcomer.start(*command)
    deadline = time.monotonic() + 20
    with psycopg.connect(newcomer.conninfo, autocommit=True) as connection:
        while connection.execute(
            "select exists (table jobs_email.live_job)"
        ).fetchone()[0]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    process.terminate()
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
def test_an_operator_needs_only_psql_and_yoyo(newcomer, psql):
    *_, by_hand = blocks("bash")

    newcomer("bash", "-ec", newcomer.ours(by_hand))

    with psycopg.connect(newcomer.conninfo) as connection:
        assert connection.execute("select queue from jobs_email.queue").fetchall() == [
            ("email",)
        ]
        foreign = connection.execute(
            "select count(*) from pg_class where relnamespace = 'jobs_email'::regnamespace"
            " and pg_get_userbyid(relowner) !~ '_owner$'"
        ).fetchone()
        assert foreign == (0,)
    assert "as it should be" in newcomer("lenso-jobs", "check", "--config", "jobs.json")


def test_the_roles_table_says_what_was_granted(owner, prefix):
    said = {
        (kind, name)
        for kind, names in re.findall(
            r"^\| `jobs_email_(producer|worker|observer|operator)` \| (.+) \|$",
            README,
            re.MULTILINE,
        )
        for name in re.findall(r"`(\w+)`", names)
    }

    granted = set(
        owner.rows(
            "select replace(r.rolname, %s || '_', ''), p.proname"
            " from pg_proc as p, aclexplode(p.proacl) as a"
            " join pg_roles as r on r.oid = a.grantee"
            " where p.pronamespace = 'jobs_email'::regnamespace"
            " and a.grantee <> p.proowner",
            prefix,
        )
    )

    assert granted == said


def test_the_figures_are_those_that_were_measured():
    results = ROOT / "tests" / "benchmarks" / "results" / "results.md"

    assert results.read_text(encoding="utf-8") in README
