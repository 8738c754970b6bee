"""A newcomer's directory, and a reader who runs every block of a page in it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlencode
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs.embedded import find_programs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
(DOCUMENT,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
# The comment above a block that no reader runs, the words above it, its language, itself.
BLOCK = re.compile(
    r"(?P<before>[^\n]*)\n\n"
    r"(?:<!-- (?P<mark>(?:not run: |run by )[^\n]+) -->\n)?"
    r"```(?P<language>\w+)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
ROLES = re.compile(r"^(create|alter|drop) role |^(grant|revoke) ", re.MULTILINE)


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
    names = ("accounts", "email-worker", "operations")
    conninfo = new_database(f"jobs_email_{mark}")
    parameters = {k: str(v) for k, v in conninfo_to_dict(conninfo).items()}
    dbname = parameters.pop("dbname")
    renamed = {name: f"{name}-{mark}" for name in names}

    def ours(text):
        for name, new in renamed.items():
            text = re.sub(
                rf'(?<=["\'])(?:{name})(?=["\'])|(?<=role |rant ){name}\b', new, text
            )
        text = re.sub(r"(?<=role |rant )(\w+-\w+)", r'"\1"', text)
        text = text.replace("--caller email-worker", f"--caller email-worker-{mark}")
        return text.replace("jobs_email_", f"jobs_email_{mark}_").replace(
            '"schema": "jobs_email",',
            f'"schema": "jobs_email", "role_prefix": "jobs_email_{mark}",',
        )

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
    (binaries / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (binaries / "yoyo").write_text(
        f"#!/bin/sh\nexec {sys.executable} -c"
        " 'from yoyo.scripts.main import main; main()' \"$@\"\n"
    )
    for name in ("lenso-jobs", "python", "yoyo"):
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
    run.environment = environment
    run.directory = tmp_path
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


@pytest.fixture
def blocks():
    """The code blocks of a page: what stands above, its mark, its language, its text."""

    def blocks(path):
        return [match.groupdict() for match in BLOCK.finditer(path.read_text("utf-8"))]

    return blocks


@pytest.fixture
def worked(newcomer):
    """Run a worker until nothing is left to do, and ask it to stop."""

    def worked(*command):
        deadline = time.monotonic() + 20
        with psycopg.connect(newcomer.conninfo, autocommit=True) as connection:

            def is_idle():
                return connection.execute(
                    "select not exists (table jobs_email.live_job)"
                ).fetchone()[0]

            if is_idle():
                connection.execute(newcomer.ours("set role 'accounts'"))
                connection.execute(
                    "select jobs_email.enqueue("
                    " 'email', 'send', '{\"to\": \"a worker\"}', gen_random_uuid()::text)"
                )
                connection.execute("reset role")
            process = newcomer.start(*command)
            while not is_idle():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        process.terminate()
        said, _ = process.communicate(timeout=20)
        assert process.returncode == 0, said
        return said

    return worked


@pytest.fixture
def read(newcomer, blocks, psql, worked):
    """Do what a page says, block by block; returns what each block printed."""

    def in_python(text):
        run = worked if ".run()" in text else newcomer
        return run(sys.executable, "-W", "error", "-c", text)

    def in_bash(text):
        if "lenso-jobs work" in text:
            return worked("bash", "-c", f"exec {text}")
        shell = re.sub(r"^export .*\n", "", text, flags=re.MULTILINE)
        return newcomer("bash", "-ec", shell)

    def in_sql(text):
        if ROLES.search(text):  # roles belong to every test
            text = f"begin;\n{text}\nrollback;"
        return newcomer(psql, "-qAt", "-v", "ON_ERROR_STOP=1", newcomer.url, text=text)

    languages = {"python": in_python, "bash": in_bash, "sql": in_sql}

    def read(path):
        printed = []
        for block in blocks(path):
            text = newcomer.ours(block["text"])
            named = re.search(
                r"(?:[Ss]ave this as|wrote this) `([\w.]+)`", block["before"]
            )
            if named and not block["mark"]:
                (newcomer.directory / named[1]).write_text(text)
            elif block["language"] in languages and not block["mark"]:
                printed.append(languages[block["language"]](text))
        return printed

    return read
