"""A newcomer's directory, and the environment that the README and docs/ speak of."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs.embedded import find_programs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENT = re.search(r"```json\n(.*?)```", README, re.DOTALL).group(1)


@pytest.fixture
def psql(program):
    return program("psql")


@pytest.fixture
def newcomer(new_database, tmp_path):
    """A directory with jobs.json, and the environment the README speaks of.

    The callers' and the groups' names are made this run's own, since roles belong to
    the whole server.
    """
    mark = uuid4().hex[:8]
    names = ("accounts", "organization", "email-worker", "operations")
    conninfo = new_database(f"jobs_email_{mark}")
    parameters = {k: str(v) for k, v in conninfo_to_dict(conninfo).items()}
    dbname = parameters.pop("dbname")
    renamed = {name: f"{name}-{mark}" for name in names}

    def ours(text):
        for name, new in renamed.items():
            text = re.sub(
                rf'(?<=["\'])(?:{name})(?=["\'])|(?<=role ){name}\b', new, text
            )
        text = re.sub(r"(?<=role )(\w+-\w+)", r'"\1"', text)
        return text.replace(
            '"schema": "jobs_email",',
            f'"schema": "jobs_email", "role_prefix": "jobs_email_{mark}",',
        ).replace("jobs_email_owner", f"jobs_email_{mark}_owner")

    (tmp_path / "jobs.json").write_text(ours(DOCUMENT))
    for asset in ("sql", "migrations"):
        (tmp_path / asset).symlink_to(ROOT / asset)
    # The yoyo command of this interpreter, and psql of this PostgreSQL.
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "lenso-jobs").write_text(
        f"#!/bin/sh\nexec {sys.executable} -c"
        " 'from lenso_jobs.cli import main; main()' \"$@\"\n"
    )
    (binaries / "yoyo").write_text(
        f"#!/bin/sh\nexec {sys.executable} -c"
        " 'from yoyo.scripts.main import main; main()' \"$@\"\n"
    )
    for name in ("lenso-jobs", "yoyo"):
        (binaries / name).chmod(0o755)
    environment = {
        **os.environ,
        "JOBS_DATABASE_URL": f"postgresql:///{dbname}?{urlencode(parameters)}",
        # The README appends its own query to a URL that has none.
        "YOYO_URL": f"postgresql+psycopg:///{dbname}",
        **{
            variable: parameters[key]
            for key, variable in (
                ("host", "PGHOST"),
                ("port", "PGPORT"),
                ("user", "PGUSER"),
                ("password", "PGPASSWORD"),
            )
            if key in parameters
        },
        "PATH": f"{binaries}:{find_programs()}:{os.environ['PATH']}",
    }

    def run(*command, text=None):
        result = subprocess.run(
            command,
            input=text,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def start(*command):
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    started = []
    run.start = start
    run.directory = tmp_path
    run.ours_in_sh = lambda text: text.replace("email-worker", renamed["email-worker"])
    run.conninfo = conninfo
    run.ours = ours
    run.url = environment["JOBS_DATABASE_URL"]
    yield run
    for process in started:
        process.kill()
        process.communicate()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("drop schema if exists jobs_email cascade")
        for name in renamed.values():
            connection.execute(f'drop role if exists "{name}"')
