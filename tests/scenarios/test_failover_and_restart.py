"""The fault: failover and restart.

Workers go on by themselves. Nothing is lost, and nothing runs twice without a lapsed
lease.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path
from threading import Event
from uuid import uuid4

import psycopg
import pytest

from lenso_jobs import Configuration, Jobs
from lenso_jobs.embedded import EmbeddedServer
from lenso_jobs.operator import setup
from lenso_jobs.worker import Observer, Tally

OUTAGE = 0.7
DOCUMENT = {
    "schema": "jobs_email",
    "role_prefix": "t29",
    "database_url_secret": "jobs/database-url",
    "lease_seconds": 30,
    "retry_base_seconds": 5,
    "retry_max_seconds": 300,
    "queues": ["email", "slow"],
    "producer_instances": ["accounts"],
    "worker_instances": ["email-worker"],
    "observer_instances": [],
}


class Server:
    """A server of our own that may be treated badly."""

    def __init__(self, directory):
        self._directory = directory
        self._server = EmbeddedServer(directory)
        self.start = self._server.__enter__
        self.end = self._server.__exit__
        self.conninfo = self._server.conninfo

    def crash(self):
        """Stop as ``pg_ctl stop -m immediate`` does."""
        pid = (self._directory / "data" / "postmaster.pid").read_text().split()[0]
        os.kill(int(pid), signal.SIGQUIT)
        self.end()

    def connect(self):
        """Connect so that the session may write on a server that is read-only by default."""
        options = "-c default_transaction_read_only=off -c search_path=jobs_email"
        return psycopg.connect(self.conninfo(options=options), autocommit=True)

    def rows(self, *statements):
        """The last statement's answer."""
        with self.connect() as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall()

    def is_read_only(self):
        with psycopg.connect(self.conninfo()) as connection:
            cursor = connection.execute("show transaction_read_only")
            return cursor.fetchone() == ("on",)

    def enqueue(self, queue, kind):
        with self.connect() as connection:
            jobs = Jobs(connection, "jobs_email", caller="accounts")
            return jobs.enqueue(queue, kind, {}, idempotency_key=str(uuid4())).job_id


@pytest.fixture(scope="module")
def server():
    """A server with an Instance in it, whose cluster is kept."""
    directory = Path(tempfile.mkdtemp(prefix="lenso-jobs-t29-"))
    directory.chmod(0o755)  # the server's account must pass through
    server = Server(directory)
    server.start()
    try:
        setup(Configuration.from_json(json.dumps(DOCUMENT)), server.conninfo())
        yield server
    finally:
        server.end()
        shutil.rmtree(directory)


class States(Observer):
    """Notes whether there is a database."""

    def __init__(self):
        self.seen = []

    def disconnected(self, _):
        self.seen.append("disconnected")

    def reconnected(self, _):
        self.seen.append("reconnected")


@pytest.fixture
def working(server, crews, hire, gate, until):
    """Start workers on two jobs each. Return the workers and the gates of their handlers."""
    gates = {"ends-meanwhile": gate(), "ends-later": gate()}
    begun = []

    async def handler(crew, lease):
        begun.append(lease.job_id)
        if lease.kind in gates:
            await crew.until(gates[lease.kind].is_set)

    watches = [States() for _ in crews]
    hired = [
        hire(
            crew,
            handler,
            server.conninfo(),
            caller="email-worker",
            observers=[watch],
        )
        for crew, watch in zip(crews, watches, strict=True)
    ]
    for crew in crews:
        for kind in gates:
            server.enqueue(crew.queue, kind)
    until(lambda: len(begun) == 4)
    return hired, watches, *gates.values()


def lines_about_the_database(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "database" in record.getMessage()
    ]


OUTCOMES = (
    "select distinct attempt, outcome from attempt natural join job"
    " where created_at >= clock_timestamp() - interval '1 minute'"
)


@pytest.mark.slow
def test_workers_go_on_when_the_server_takes_writes_again(
    server, crews, working, caplog, until
):
    hired, watches, meanwhile, later = working
    before = server.rows("select count(*) from attempt")

    server.rows(
        "alter system set default_transaction_read_only = on",
        "select pg_reload_conf()",
    )
    try:
        until(server.is_read_only)
        for crew in crews:
            server.enqueue(crew.queue, "begins-late")
        meanwhile.set()
        until(lambda: all(watch.seen for watch in watches))
        Event().wait(OUTAGE)
        assert server.rows("select count(*) from attempt") == before
    finally:
        server.rows(
            "alter system reset default_transaction_read_only",
            "select pg_reload_conf()",
        )
    server.rows(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name like 'lenso-jobs%'"
    )
    later.set()
    until(lambda: server.rows("select count(*) from live_job") == [(0,)])
    tallies = [each.stop() for each in hired]

    assert tallies == [Tally(succeeded=3)] * 2
    assert server.rows(OUTCOMES) == [(1, "succeeded")]
    for watch in watches:
        assert watch.seen[:2] == ["disconnected", "reconnected"]
        assert len(watch.seen) <= 4
    assert len(lines_about_the_database(caplog)) <= 6


@pytest.mark.slow
def test_workers_go_on_after_a_crash_of_the_server(
    server, crews, working, caplog, until
):
    hired, watches, meanwhile, later = working

    server.crash()
    try:
        meanwhile.set()
        until(lambda: all(watch.seen for watch in watches))
        Event().wait(OUTAGE)
    finally:
        server.start()
    for crew in crews:
        server.enqueue(crew.queue, "begins-late")
    later.set()
    until(lambda: server.rows("select count(*) from live_job") == [(0,)])
    tallies = [each.stop() for each in hired]

    assert tallies == [Tally(succeeded=3)] * 2
    assert server.rows(OUTCOMES) == [(1, "succeeded")]
    for watch in watches:
        assert watch.seen == ["disconnected", "reconnected"]
    assert 2 <= len(lines_about_the_database(caplog)) <= 6
