"""The command ``lenso-jobs work``, as a process that is sent signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from psycopg.conninfo import make_conninfo

import lenso_jobs
from lenso_jobs.cli import _work, main
from lenso_jobs.worker import Observer, Tally

COMMAND = [sys.executable, "-c", "from lenso_jobs.cli import main; main()"]
PACKAGE = str(Path(lenso_jobs.__file__).parents[1])

HANDLERS = """
import asyncio, pathlib, time
from lenso_jobs import Fail
from lenso_jobs.worker import Observer

def note(lease):
    pathlib.Path("ran").open("a").write(lease.payload["secret"] + chr(10))

async def note_async(lease):
    await asyncio.sleep(0)
    note(lease)

class Note:
    async def __call__(self, lease):
        note(lease)

instance = Note()

def stay(lease):
    note(lease)
    time.sleep(60)

async def block(lease):
    stay(lease)

def fail(lease):
    note(lease)
    raise Fail("no_good")

class Watching(Observer):
    def ended(self, ended):
        pathlib.Path("watched").open("a").write(ended.outcome)

no_function = 7
"""


@pytest.fixture
def directory(tmp_path, document):
    (tmp_path / "jobs.json").write_text(document())
    (tmp_path / "handlers.py").write_text(HANDLERS)
    return tmp_path


@pytest.fixture
def work(directory, conninfo):
    """Start the command as the role email-worker."""
    started = []

    def work(handler, *options, queue="email", **parameters):
        process = subprocess.Popen(
            [
                *COMMAND,
                *("work", "--config", "jobs.json", "--queue", queue),
                *("--handler", f"handlers:{handler}", *options),
            ],
            cwd=directory,
            env={
                **os.environ,
                "PYTHONPATH": PACKAGE,
                "JOBS_DATABASE_URL": make_conninfo(
                    conninfo, **({"user": "email-worker"} | parameters)
                ),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield work
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def work_here(directory, conninfo, monkeypatch):
    """Run the command in this process, without its signals; answers the exit code."""
    monkeypatch.setattr(_work, "_stop_by_signals", lambda *_: None)
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))

    def work_here(*options, user="email-worker"):
        monkeypatch.setenv("JOBS_DATABASE_URL", make_conninfo(conninfo, user=user))
        command = ("lenso-jobs", "work", "--config", "jobs.json", "--queue", "email")
        arguments = [*command, "--handler", "handlers:note", *options]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code

    yield work_here
    sys.modules.pop("handlers", None)


@pytest.fixture
def ran(directory):
    """Wait until handlers have begun with so many jobs."""

    def ran(count):
        path, deadline = directory / "ran", time.monotonic() + 20
        while not path.exists() or len(path.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, "no handler began"
            time.sleep(0.01)

    return ran


@pytest.fixture
def status(owner):
    def status(job_id):
        return owner.rows("select status, last_failure_code from inspect(%s)", job_id)[
            0
        ]

    return status


def ended(process):
    """The exit code, and what was logged."""
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("handler", "number"),
    [
        ("note", signal.SIGTERM),
        pytest.param("note_async", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("instance", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_it_cleanly(work, ran, enqueue, status, handler, number):
    jobs = [enqueue(payload={"secret": f"hush-{n}"}) for n in range(3)]
    process = work(handler, "--observer", "handlers:Watching")
    ran(3)

    process.send_signal(number)

    code, errors = ended(process)
    assert code == 0, errors
    assert [status(job_id) for job_id in jobs] == [("succeeded", None)] * 3
    assert "Traceback" not in errors
    assert "hush" not in errors


@pytest.mark.slow
def test_what_runs_when_the_grace_is_over_is_handed_back(work, ran, enqueue, status):
    job_id = enqueue(payload={"secret": "hush"})
    process = work("stay", "--grace", "0.2")
    ran(1)

    process.terminate()

    code, errors = ended(process)
    assert code == 3, errors
    assert status(job_id) == ("queued", "worker_shutdown")


@pytest.mark.slow
def test_a_second_signal_ends_the_grace(work, ran, enqueue, status, directory):
    job_id = enqueue(payload={"secret": "hush"})
    process = work("stay", "--grace", "600", "--on-shutdown", "lapse")
    ran(1)

    process.terminate()
    process.send_signal(signal.SIGINT)

    code, errors = ended(process)
    assert code == 3, errors
    assert status(job_id) == ("running", None)
    assert not (directory / "watched").exists()


@pytest.mark.slow
def test_an_event_loop_that_is_blocked_does_not_outlive_the_last_resort(
    work, ran, enqueue, status, directory
):
    (directory / "handlers.py").write_text(
        HANDLERS + "\nfrom lenso_jobs.cli import _work"
        "\n_work._LAST_RESORT_SECONDS = 2.0\n"
    )
    job_id = enqueue(payload={"secret": "hush"})
    process = work("block", "--grace", "0")
    ran(1)

    process.terminate()

    code, errors = ended(process)
    assert code == 3, errors
    assert status(job_id) == ("queued", "worker_shutdown")
    assert "handlers do not let the process end" in errors


def test_what_cannot_work_is_refused_at_once(work):
    code, errors = ended(work("note", queue="nowhere"))

    assert code == 1, errors
    assert "LJ003 invalid_queue" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("user", "says"),
    [("operations", "42501 unauthorized"), ("stranger", "LJ008 schema_not_ready")],
)
def test_who_may_not_work_is_refused_at_once(work_here, capsys, user, says):
    assert work_here(user=user) == 1

    errors = capsys.readouterr().err
    assert says in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--concurrency", "0", "concurrency must be 1 to 1,000"),
        ("--batch", "1001", "batch must be 1 to 1,000"),
        ("--grace", "-1", "grace must be 0 seconds or more"),
        ("--observer", "handlers:note", "handlers:note is no Observer"),
        ("--observer", "handlers:nothing", "cannot find handlers:nothing"),
        ("--handler", "no module", "no module is not of the form"),
        ("--handler", "handlers", "handlers is not of the form"),
        ("--handler", "handlers:nothing", "cannot find handlers:nothing"),
        ("--handler", "handlers:no_function", "handlers:no_function cannot be called"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    work_here, capsys, option, value, says
):
    code = work_here(option, value)

    errors = capsys.readouterr().err
    assert code == 2, errors
    assert says in " ".join(errors.replace("│", " ").split())
    assert "Traceback" not in errors


def test_the_options_reach_the_worker(monkeypatch, work_here):
    made = {}

    class Made:
        def __init__(self, _conninfo, **options):
            made.update(options)

        def run(self):
            return Tally()

    monkeypatch.setattr(_work, "Worker", Made)
    code = work_here(
        *("--queue", "slow", "--caller", "spare-worker", "--batch", "9"),
        *("--concurrency", "7", "--grace", "1.5", "--on-shutdown", "lapse"),
        *("--no-prepare", "--observer", "handlers:Watching"),
        user=None,  # the superuser, who may act as any caller
    )

    assert not code
    assert made.pop("handler").__name__ == "note"
    assert isinstance(made.pop("observers")[0], Observer)
    assert made == {
        "schema": "jobs_email",
        "queue": "slow",
        "concurrency": 7,
        "batch": 9,
        "caller": "spare-worker",
        "grace": 1.5,
        "on_shutdown": "lapse",
        "prepare_threshold": None,
    }


def test_the_last_resort_comes_after_the_grace(monkeypatch):
    slept, left = [], []
    monkeypatch.setattr(_work, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(_work.os, "_exit", left.append)

    _work._leave_after(30)

    assert slept == [30 + _work._LAST_RESORT_SECONDS]
    assert left == [_work.FORCED]
