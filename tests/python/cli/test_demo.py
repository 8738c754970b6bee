from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from fixtures.commands import PROGRAM, is_running, read_rest, read_until
from lenso_jobs.embedded import SERVER_URL


@pytest.fixture
def demo(environment):
    """Start a demonstration, and end it after the test."""
    started = []

    def demo(**changes):
        env = {k: v for k, v in environment.items() if k != SERVER_URL}
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "demo"],
            env={**env, **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield demo
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def server_of(process):
    """Find the server that a demonstration started: its process id and directory."""
    task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    (child,) = task.read_text().split()
    arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    data = Path(os.fsdecode(arguments[arguments.index(b"-D") + 1]))
    return int(child), data.parent


def assert_all_four_fates(output):
    chapters = re.split(r"\n\d\. ", output)
    assert [chapter.splitlines()[0] for chapter in chapters[1:]] == [
        "Success",
        "Retry, then success",
        "Terminal failure",
        "A lost lease, reclaimed; the stale worker fenced",
    ]
    success, retry, failure, lost = chapters[1:]
    assert re.search(r"refused LJ002 idempotency_conflict", success)
    assert re.search(r"refused 42501 unauthorized", success)
    assert re.search(r"status +succeeded", success)
    assert re.search(r"fail smtp.timeout, retryable → queued", retry)
    assert re.search(r"attempts +2", retry)
    assert re.search(r"status +succeeded", retry)
    assert re.search(r"refused LJ004 invalid_lease", failure)
    assert re.search(r"status +failed", failure)
    assert re.search(r"last_failure_code +address.unknown", failure)
    assert lost.count("refused LJ004 invalid_lease") == 2
    assert re.search(r"fencing token 2", lost)
    assert re.search(r"status +succeeded", lost)
    assert "All four fates as promised" in lost
    assert "job_lease_" not in output


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.mark.slow
@linux
def test_a_demonstration_on_its_own_server_shows_four_fates_and_leaves_nothing(demo):
    process = demo()
    begun = read_until(process, "2. Retry")
    server, directory = server_of(process)
    assert directory.is_dir()

    rest, err = read_rest(process)

    assert (process.returncode, err) == (0, "")
    assert_all_four_fates(begun + rest)
    assert not directory.exists()
    assert not is_running(server)


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_demonstration_that_is_stopped_leaves_nothing(number, code, demo):
    process = demo()
    read_until(process, "2. Retry")
    server, directory = server_of(process)

    process.send_signal(number)
    _, err = read_rest(process)

    assert process.returncode == code
    assert "Traceback" not in err
    assert not directory.exists()
    assert not is_running(server)


@pytest.fixture
def shared(conninfo):
    """A server that others use too: its URL, and what a demonstration left on it."""
    with psycopg.connect(conninfo, dbname="postgres", autocommit=True) as connection:

        def names(pattern=r"demo_|_[0-9a-f]{8}$"):
            return {
                name
                for (name,) in connection.execute(
                    "select rolname::text from pg_roles union all"
                    " select datname::text from pg_database"
                )
                if re.search(pattern, name)
            }

        yield psycopg.conninfo.make_conninfo(conninfo, dbname="postgres"), names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(None, 0), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_demonstration_on_a_given_server_leaves_no_database_and_no_role(
    number, code, demo, shared
):
    url, names = shared
    process = demo(**{SERVER_URL: url})
    begun = read_until(process, "2. Retry")
    made = {
        name
        for name in names()
        if name.startswith(("demo_", "lenso_jobs_demo_", "accounts_"))
    }

    if number is not None:
        process.send_signal(number)
    rest, err = read_rest(process)

    assert process.returncode == code, err
    assert len(made) >= 7
    # Another process may be running a demonstration on the same server.
    deadline = time.monotonic() + 30
    while made & names():
        assert time.monotonic() < deadline, made & names()
    if number is None:
        assert_all_four_fates(begun + rest)


@pytest.mark.slow
def test_a_demonstration_where_no_server_can_be_found_exits_1(demo):
    process = demo(PG_BINDIR="/nowhere")

    out, err = process.communicate(timeout=60)

    assert (process.returncode, out) == (1, "")
    assert err.startswith("error: PG_BINDIR is /nowhere")
