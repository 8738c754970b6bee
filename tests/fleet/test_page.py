"""The page docs/operators/fleet.md, followed from its first command to its last."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg import sql

import lenso_jobs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operators" / "fleet.md").read_text("utf-8")
(README_HANDLER,) = re.findall(
    r"```python\n(from dataclasses.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
)
BLOCK = re.compile(
    r"<!-- run by tests/fleet/test_page.py -->\n```(\w+)\n(.*?)^```",
    re.DOTALL | re.MULTILINE,
)


@pytest.fixture
def reader(machines, new_machine, password_of, tmp_path):
    """A directory, and an environment, as the page asks for them."""
    router, *shards = machines
    new = new_machine("new")
    for server in machines:
        with server.connect("postgres") as session:
            session.execute("create database jobs")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, command in (
        ("lenso-jobs", "-c 'from lenso_jobs.cli import main; main()'"),
        ("python", ""),
    ):
        path = binaries / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n', "utf-8")
        path.chmod(0o755)
    (document_of_page,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "fleet.json").write_text(document_of_page, "utf-8")
    (tmp_path / "handlers.py").write_text(README_HANDLER, "utf-8")
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("PG")},
        "PATH": f"{binaries}:{new.programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(lenso_jobs.__file__).parents[1]),
        "LENSO_JOBS_FLEET": str(tmp_path / "fleet.json"),
        "JOBS_DATABASE_URL": router.conninfo("jobs"),
        "JOBS_SHARD_0": shards[0].conninfo("jobs"),
        "JOBS_SHARD_1": shards[1].conninfo("jobs"),
        "JOBS_ACCOUNTS_PASSWORD": "one 'and' one",
        "JOBS_WORKER_PASSWORD": "two\\two",
        "JOBS_OPERATIONS_PASSWORD": "three",
    }

    def read(language, text):
        if "fleet upgrade --repair" in text:
            environment["JOBS_SHARD_1"] = new.conninfo("jobs")
        environment["NEW_SERVER_URL"] = new.conninfo("postgres")
        command = {
            "bash": ["bash", "-ec", text],
            "python": [sys.executable, "-W", "error", "-c", text],
        }[language]
        result = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, (text, result.stdout, result.stderr)
        return result.stdout

    yield read, shards, new
    # As other tests of this process expect them.
    for server in machines:
        with server.connect("postgres") as session:
            for role in ("accounts", "email-worker", "operations"):
                session.execute(
                    sql.SQL("alter role {} login password {}").format(
                        sql.Identifier(role), sql.Literal(password_of(role))
                    )
                )


def test_the_page_sets_a_fleet_up_and_moves_a_shard(reader):
    read, shards, new = reader

    printed = "".join(read(*block) for block in BLOCK.findall(PAGE))

    assert "router (jobs/database-url) is as it should be" in printed
    assert "queued" in printed
    assert "send receipt 7 to ada@example.com" in printed
    (shard,) = re.findall(r"^([01])$", printed, re.MULTILINE)
    states = []
    for server in (*shards, new):
        with server.connect("jobs") as session:
            states += session.execute(
                "select count(*), count(*) filter (where outcome = 'succeeded'),"
                " (select datconnlimit from pg_database"
                "  where datname = current_database())"
                " from jobs_email.job as j left join jobs_email.attempt using (job_id)"
            ).fetchall()
    # The old database of shard 1 stays as it was, closed.
    expected = {"0": [(1, 1, -1), (0, 0, 0), (0, 0, -1)]}
    expected["1"] = [(0, 0, -1), (1, 1, 0), (1, 1, -1)]
    assert states == expected[shard]
