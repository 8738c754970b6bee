"""The package's types hold in a user's strictly checked code, and catch mistakes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

APPLICATION = Path(__file__).parent / "application" / "application.py"

MISTAKES = {
    "jobs.enqueue('email', 'send', {}, 'key')": "enqueue",
    "jobs.enqueue('email', 'send', {}, idempotency_key=7)": "idempotency_key",
    "jobs.complete('job_lease_0')": "complete",
    "Worker('', schema='s', queue='q', handler=lambda: None)": "handler",
    "Worker('', schema='s', queue='q', handler=print, on_shutdown='drop')": "on_shutdown",
    "print(jobs.claim('email')[0].token)": "token",
    "Worker('', schema='s', queue='q', handler={'kind': lambda: None})": "handler",
    "Release('not_yet', after='7')": "after",
    "receipt.enqueue(jobs, {'order': 1}, idempotency_key='k')": "payload",
    "receipt.enqueue(jobs, Receipt(order=1))": "idempotency_key",
    "receipt.enqueue(asyncio, Receipt(order=1), idempotency_key='k')": "jobs",
    "receipt(1, Receipt(order=1))": "lease",
    "reminder.new_job(Receipt(order=1), idempotency_key='k')": "payload",
    "kinds('x', queue='q', payload=Reminder)(receipt.func)": "payload",
    "kinds('x', queue='q')(handle)": "handler",
    "prepare_worker(configuration, str, lambda: None)": "handler",
    "prepare_worker(configuration, str, handle, timeout='600')": "timeout",
    "prepare_fleet_workers(configuration, str, handle, queue='q')": "fleet",
    "prepare_fleet_workers(fleet, str, handle, shards=1, queue='q')": "shards",
    "prepare_fleet_workers(fleet, str, handle, timeout='600')": "timeout",
}


@pytest.fixture
def mypy(tmp_path):
    def mypy(*sources):
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "mypy",
                "--strict",
                "--cache-dir",
                tmp_path,
                *sources,
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

    return mypy


@pytest.mark.slow
def test_mypy_finds_nothing_in_an_application_and_every_mistake(mypy, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import asyncio\n"
        "from lenso_jobs import Configuration, Fleet, Jobs, Release, Worker, "
        "prepare_fleet_workers, prepare_worker\n"
        "from application import handle, kinds, receipt, reminder, Receipt, Reminder\n"
        "def act(jobs: Jobs, configuration: Configuration, fleet: Fleet) -> None:\n"
        + "".join(f"    {line}\n" for line in MISTAKES)
    )

    result = mypy(APPLICATION, wrong)

    found = {
        (Path(line.split(":")[0]).name, int(line.split(":")[1]))
        for line in result.stdout.splitlines()
        if ": error:" in line
    }
    assert found == {("wrong.py", 5 + number) for number in range(len(MISTAKES))}


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("basedpyright") is None, reason="without basedpyright"
)
def test_pyright_finds_nothing_in_an_application(tmp_path):
    (tmp_path / "application.py").write_text(APPLICATION.read_text(encoding="utf-8"))
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", "pythonVersion": "3.11"})
    )

    result = subprocess.run(
        [
            sys.executable,
            *("-m", "basedpyright", "--pythonpath", sys.executable, "-p", tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr
