"""The database of a developer, in a folder of the project.

docs/applications/testing.md says what it does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from fixtures.commands import PROGRAM, is_running, read_rest, read_until


@pytest.fixture
def dev(environment, open_directory):
    """Start the command in a folder, and end it after the test."""
    started = []
    env = {k: v for k, v in environment.items() if k != "JOBS_DATABASE_URL"}

    def dev(*options, **changes):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "dev", *options],
            cwd=open_directory,
            env={**env, **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield dev
    for process in started:
        process.terminate()
        process.communicate()


@pytest.fixture
def shell(environment, open_directory):
    """Run a line in the folder, with the command on the path."""
    programs = open_directory / "bin"
    programs.mkdir()
    program = programs / "lenso-jobs"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{PROGRAM}' \"$@\"\n")
    program.chmod(0o755)
    env = {k: v for k, v in environment.items() if k != "JOBS_DATABASE_URL"}

    def shell(line):
        return subprocess.run(
            ["bash", "-ec", line],
            cwd=open_directory,
            env={**env, "PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    return shell


def url_of(output):
    return re.search(r"is ready at (\S+)", output)[1]


def interrupted(process):
    process.send_signal(signal.SIGINT)
    said, errors = read_rest(process)
    assert (process.returncode, errors) == (0, "")
    assert said.endswith("The database is stopped and kept.\n")


@pytest.mark.slow
def test_from_an_empty_folder_to_a_job_that_was_worked(dev, shell, open_directory):
    process = dev()
    begun = read_until(process, "lenso-jobs work")
    source, enqueue, work = begun.splitlines()[-3:]

    # As it stands, but for an end.
    said = shell(f"{source}\n{enqueue}\n{work} --until-idle")

    assert "send receipt 7 to ada@example.com" in said
    assert begun.startswith("wrote jobs.json\nwrote handlers.py\n")
    pid = (open_directory / ".lenso-jobs" / "data" / "postmaster.pid").read_text()
    interrupted(process)
    assert not is_running(int(pid.split()[0]))
    assert (open_directory / ".lenso-jobs" / ".gitignore").read_text() == "*\n"


@pytest.mark.slow
def test_the_database_is_kept_until_it_is_reset(dev, document, open_directory):
    file = open_directory / "jobs.json"
    file.write_text(document())
    first = dev()
    url = url_of(read_until(first, "lenso-jobs work"))
    assert not (open_directory / "handlers.py").exists()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set role accounts")
        connection.execute("select jobs_email.enqueue('email', 'send', '{}', 'k')")

    for options in ((), ("--reset",)):
        other = dev(*options)
        _, errors = other.communicate(timeout=60)
        assert other.returncode == 1
        assert re.search(r"is in use by process \d+: stop it first", errors)
    interrupted(first)

    # The document has changed meanwhile.
    queues = [*json.loads(document())["queues"], "billing"]
    file.write_text(document(queues=queues))
    second = dev(LENSO_JOBS_CONFIG=str(Path("jobs.json")))
    with psycopg.connect(url_of(read_until(second, "lenso-jobs work"))) as connection:
        assert connection.execute("select from jobs_email.job").rowcount == 1
        declared = connection.execute("table jobs_email.queue")
        assert declared.rowcount == 3
    interrupted(second)

    third = dev("--reset")
    with psycopg.connect(url_of(read_until(third, "lenso-jobs work"))) as connection:
        assert connection.execute("select from jobs_email.job").rowcount == 0
    interrupted(third)


def test_a_folder_that_cannot_be_made_is_refused(lenso_jobs, tmp_path):
    folder = tmp_path / "jobs.json" / "database"

    code, out, errors = lenso_jobs("dev", "--folder", folder)

    assert (code, out) == (1, "")
    assert errors == f"error: cannot write {folder}: Not a directory\n"
