"""The worker for Node of docs/applications/other-languages.md, against the Instance."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from threading import Timer
from urllib.parse import urlencode

import pytest
from psycopg.conninfo import conninfo_to_dict

PAGE = Path(__file__).parents[3] / "docs" / "applications" / "other-languages.md"
WORKER, MAIN = re.findall(
    r"<!-- run by \S+test_node\.py -->\n```js\n(.*?)```",
    PAGE.read_text("utf-8"),
    re.DOTALL,
)
DEADLINE = 20


def _has_pg():
    node = shutil.which("node")
    return bool(node) and (
        subprocess.run(
            [node, "-e", "require.resolve('pg')"], capture_output=True, check=False
        ).returncode
        == 0
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "not _has_pg()",
        reason="needs node, and its package pg where NODE_PATH says",
    ),
]


@pytest.fixture
def node(tmp_path, conninfo, locks):
    """Start the worker, with a handler and changes, and wait until it listens."""
    given = conninfo_to_dict(conninfo)
    query = urlencode({"host": given["host"], "port": given["port"]})
    url = f"postgresql://email-worker@/{given['dbname']}?{query}"
    started = []

    def node(body, *changes):
        worker = WORKER
        for old, new in changes:
            assert old in worker
            worker = worker.replace(old, new)
        (tmp_path / "worker.js").write_text(worker)
        main = re.sub(
            r"(?<=lost\) \{\n).*?(?=^\})", body, MAIN, flags=re.MULTILINE | re.DOTALL
        )
        assert body in main
        (tmp_path / "main.js").write_text(main)
        process = subprocess.Popen(
            ["node", "main.js"],
            cwd=tmp_path,
            env={**os.environ, "JOBS_DATABASE_URL": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # A worker that sleeps for ever must not block the test.
        watch = Timer(60, process.kill)
        watch.start()
        started.append((process, watch))
        deadline = time.monotonic() + DEADLINE
        while not locks():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    yield node
    for process, watch in started:
        watch.cancel()
        process.kill()
        process.communicate()


def stopped(process):
    """Stop the worker as an operator does; it must leave cleanly."""
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said
    return said


def test_a_job_enqueued_after_an_empty_claim_ends_the_wait(node, enqueue):
    (pauses,) = re.findall(r"PAUSES = \[(.*)\]", WORKER)
    process = node(
        "console.log(job.payload.n);\n",
        (pauses, "600_000"),
        ("due.ms ?? Infinity", "Infinity"),
        ("const due =", "console.log('empty'); await sleep(100); const due ="),
    )

    for n in range(5):
        assert process.stdout.readline() == "empty\n"
        enqueue(payload={"n": n})
        assert process.stdout.readline() == f"{n}\n"

    stopped(process)


def test_a_lease_is_renewed_while_its_handler_runs(node, enqueue, owner, configure):
    configure(lease_seconds=1)
    process = node(
        "await new Promise((end) => setTimeout(end, 2500)); console.log(lost.aborted);\n",
        # This machine's clock does not matter.
        ("const pg =", "Date.now = () => 0; const pg ="),
    )

    enqueue()

    assert process.stdout.readline() == "false\n"
    stopped(process)
    assert owner.rows("select attempt, outcome from attempt") == [(1, "succeeded")]


def test_a_lost_lease_ends_the_work(node, enqueue, owner, configure):
    configure(lease_seconds=1)
    process = node(
        "if (job.attempt === 1) {\n"
        "console.log('begun');"
        " await new Promise((end) => lost.addEventListener('abort', end));"
        " console.log('lost'); throw new Error('late');\n"
        "}\n"
    )

    job = enqueue()
    assert process.stdout.readline() == "begun\n"
    owner.execute(
        "update live_job set lease_expires_at = clock_timestamp() - interval '1 s'"
        " where job_id = %s",
        (job,),
    )
    assert process.stdout.readline() == "lost\n"

    deadline = time.monotonic() + DEADLINE
    while owner.value("select exists (table live_job)"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stopped(process)
    assert owner.rows("select attempt, outcome from attempt order by 1") == [
        (1, "lease_expired"),
        (2, "succeeded"),
    ]


def test_a_handler_that_throws_fails_the_attempt(node, enqueue, owner):
    process = node("console.log('begun'); throw new Error('secret');\n")

    enqueue(max_attempts=1)
    assert process.stdout.readline() == "begun\n"

    assert stopped(process) == ""
    assert owner.rows("select outcome, failure_code from attempt") == [
        ("failed", "handler_failed")
    ]


def test_the_worker_survives_the_loss_of_its_connections(node, enqueue, owner, locks):
    process = node("console.log(job.payload.n);\n")
    owner.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where usename = 'email-worker' and pid <> pg_backend_pid()"
    )

    enqueue(payload={"n": 1})

    assert process.stdout.readline() == "1\n"
    assert stopped(process) == ""


def test_a_refusal_of_the_queue_ends_the_worker(node, owner, configure):
    process = node("")
    configure(queues=["slow"])

    said, _ = process.communicate(timeout=DEADLINE)

    assert process.returncode == 1
    assert "LJ003" in said
