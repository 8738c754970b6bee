"""The fault: in a deploy, old and new processes work beside each other.

Both go on through the migration. An old one can be restarted after it. No acknowledged job
is lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

import lenso_jobs
import release
from lenso_jobs import _assets
from lenso_jobs.operator import check, setup, upgrade
from lenso_jobs.worker import Worker

# A process of a release, with a worker and a producer, until its input ends. It writes the
# key of each job that was acknowledged.
PROCESS = """
import pathlib, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from lenso_jobs import Configuration, EnvironmentSecrets, SchemaNotReady
from lenso_jobs import _assets, _prepare, prepare
from lenso_jobs.worker import prepare_worker

name, package, version, document = sys.argv[1:]
_assets._PACKAGE = pathlib.Path(package)
_prepare.SCHEMA_VERSION = int(version)
instance = Configuration.from_file(document), EnvironmentSecrets()

def handler(lease):
    time.sleep(0.001)

while True:
    try:
        worker = prepare_worker(*instance, handler, "email-worker", queue="email")
        break
    except SchemaNotReady as error:
        if name != "new" or "older than this release" not in str(error):
            raise
        print("waits", file=sys.stderr, flush=True)
        time.sleep(0.05)

over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
with ThreadPoolExecutor() as pool, prepare(*instance, "accounts") as jobs:
    working = pool.submit(worker.run)
    number = 0
    try:
        while not over.wait(0.002) and not working.done():
            number += 1
            jobs.enqueue("email", "send", {}, idempotency_key=f"{name}-{number}")
            print(f"{name}-{number}", flush=True)
    finally:
        worker.stop()
    assert working.result().is_clean
"""
OLD, NEW = 1, len(release.NAMES)
HOLDERS = "select distinct holder from jobs_email.attempt where leased_at > %s"


class Process:
    """A running process of one release."""

    def __init__(self, name, package, version, document, conninfo):
        self.keys = document.with_name(f"{name}.keys")
        self.errors = document.with_name(f"{name}.errors")
        with self.keys.open("w") as keys, self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROCESS, name, package, str(version), document],
                stdin=subprocess.PIPE,
                stdout=keys,
                stderr=errors,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(lenso_jobs.__file__).parents[1]),
                    "JOBS_DATABASE_URL": conninfo,
                },
            )

    @property
    def pid(self):
        return self._process.pid

    def acknowledged(self):
        return self.keys.read_text().split()

    def goes_on(self):
        """Return a condition: it has had some more jobs acknowledged."""
        before = len(self.acknowledged())

        def goes_on():
            assert self._process.poll() is None, self.errors.read_text()
            return len(self.acknowledged()) > before + 20

        return goes_on

    def waits(self):
        assert self._process.poll() is None, self.errors.read_text()
        return "waits" in self.errors.read_text()

    def stop(self):
        self._process.communicate(timeout=40)
        return self._process.returncode, self.errors.read_text()

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


@pytest.mark.slow
def test_old_and_new_processes_go_on_through_a_migration_and_lose_no_job(
    instance_of, databases, later, document, tmp_path, until
):
    configuration, conninfo = instance_of(), databases()
    setup(configuration, conninfo)
    path = tmp_path / "jobs.json"
    path.write_text(document(role_prefix=configuration.prefix))
    packages = {OLD: _assets._PACKAGE, NEW: later()}
    started = []

    def start(name, version):
        started.append(Process(name, packages[version], version, path, conninfo))
        return started[-1]

    def has_claimed(process):
        with psycopg.connect(conninfo) as session:
            holders = [holder for (holder,) in session.execute(HOLDERS, (migrated_at,))]
        return any(holder.endswith(f":{process.pid}") for holder in holders)

    try:
        old, new = start("old", OLD), start("new", NEW)
        until(old.goes_on())
        until(new.waits)
        assert new.acknowledged() == []

        upgrade(configuration, conninfo)
        with psycopg.connect(conninfo) as session:
            (migrated_at,) = session.execute("select clock_timestamp()").fetchone()

        until(old.goes_on())
        until(new.goes_on())
        restarted = start("restarted", OLD)
        for process in (old, new, restarted):
            until(process.goes_on())
            until(lambda process=process: has_claimed(process))
        ends = [process.stop() for process in (old, restarted, new)]
    finally:
        for process in started:
            process.kill()

    assert [code for code, _ in ends] == [0, 0, 0], ends
    Worker(
        conninfo,
        schema="jobs_email",
        queue="email",
        handler=lambda _: None,
        caller="email-worker",
    ).run(until_idle=True)
    with psycopg.connect(conninfo) as session:
        rows = session.execute(
            "select j.idempotency_key from jobs_email.job as j"
            " join jobs_email.attempt as a using (job_id) where a.outcome = 'succeeded'"
        ).fetchall()
        version = session.execute("select version from jobs_email.installed_version")
        assert version.fetchone() == (NEW,)
    acknowledged = [key for process in started for key in process.acknowledged()]
    assert sorted(key for (key,) in rows) == sorted(acknowledged)
    assert check(configuration, conninfo) == []
