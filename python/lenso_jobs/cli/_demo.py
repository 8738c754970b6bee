from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from lenso_jobs import Configuration, Jobs, JobsError
from lenso_jobs.cli import _render
from lenso_jobs.embedded import SERVER_URL, server_conninfo
from lenso_jobs.operator import setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from uuid import UUID

    from lenso_jobs import LeasedJob


def say(what: str) -> None:
    """Print one line, however narrow the terminal."""
    _render.out.print(what, soft_wrap=True)


def demo() -> None:
    """Run a job of each fate through an Instance on a throw-away database.

    The server is one of our own, or the one whose superuser URL is in
    LENSO_JOBS_SERVER_URL. Whatever it makes is gone when it ends.
    """
    signal.signal(signal.SIGTERM, _leave)
    with server_conninfo() as server:
        # Roles belong to the whole server, and this one may have others' on it.
        token = secrets.token_hex(4)
        mark = f"_{token}" if os.environ.get(SERVER_URL) else ""
        configuration = Configuration.from_json(
            json.dumps(
                {
                    "schema": "jobs_email",
                    "role_prefix": f"demo_{token}",
                    "database_url_secret": "jobs/database-url",
                    "lease_seconds": 1,
                    "retry_base_seconds": 1,
                    "retry_max_seconds": 60,
                    "queues": ["email"],
                    "producer_instances": [f"accounts{mark}"],
                    "worker_instances": [f"email-worker{mark}", f"spare-worker{mark}"],
                    "observer_instances": [f"operations{mark}"],
                }
            )
        )
        with _roles(server, configuration), _database(server) as conninfo:
            setup(configuration, conninfo)
            with psycopg.connect(conninfo, autocommit=True) as connection:
                _Tour(connection, configuration).run()


def _leave(signum: int, _: FrameType | None) -> None:
    sys.exit(128 + signum)


@contextmanager
def _database(server: str) -> Iterator[str]:
    name = f"lenso_jobs_demo_{secrets.token_hex(4)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(
            sql.SQL("create database {} encoding 'UTF8' template template0").format(
                sql.Identifier(name)
            )
        )
        try:
            yield make_conninfo(server, dbname=name)
        finally:
            connection.execute(
                sql.SQL("drop database {} with (force)").format(sql.Identifier(name))
            )


@contextmanager
def _roles(server: str, configuration: Configuration) -> Iterator[None]:
    """Drop the roles that the demo made, after the database they own things in."""
    roles = [
        *(
            f"{configuration.prefix}_{kind}"
            for kind in ("owner", "producer", "worker", "observer", "operator")
        ),
        *configuration.producer_instances,
        *configuration.worker_instances,
        *configuration.observer_instances,
    ]
    try:
        yield
    finally:
        with psycopg.connect(server, autocommit=True) as connection:
            for role in roles:
                connection.execute(
                    sql.SQL("drop role if exists {}").format(sql.Identifier(role))
                )


class _Tour:
    def __init__(
        self, connection: psycopg.Connection[Any], configuration: Configuration
    ) -> None:
        def client(caller: str) -> Jobs:
            return Jobs(connection, configuration.schema_, caller=caller)

        (self.producer,) = map(client, configuration.producer_instances)
        self.worker, self.spare = map(client, configuration.worker_instances)
        (self.observer,) = map(client, configuration.observer_instances)

    def run(self) -> None:
        say("[bold]One job of each fate[/], in a PostgreSQL of its own.")
        say(
            "In schema jobs_email: one queue, email; a producer, two workers and an "
            "observer,\neach a database role of its own. A lease lasts 1 s."
        )
        self.success()
        self.retry()
        self.failure()
        self.lost_lease()
        say("\n[green]All four fates as promised.[/] What was made here is removed.")

    def success(self) -> None:
        _chapter("1", "Success")
        payload = {"to": "ada@example.com", "template": "welcome"}
        first = self.producer.enqueue(
            "email", "send-welcome", payload, idempotency_key="welcome:1"
        )
        _step("producer", f"enqueue → job {_short(first.job_id)}, created")
        again = self.producer.enqueue(
            "email", "send-welcome", payload, idempotency_key="welcome:1"
        )
        _step("producer", f"the same again → the same job, created = {again.created}")
        self.refused(
            "producer",
            "another intent under that key",
            lambda: self.producer.enqueue(
                "email", "send-goodbye", payload, idempotency_key="welcome:1"
            ),
        )
        self.refused("producer", "claim", lambda: self.producer.claim("email"))
        lease = self.claim("worker", self.worker)
        self.worker.complete(lease)
        _step("worker", "complete → done")
        self.worker.complete(lease)
        _step("worker", "complete once more, as if the answer was lost → done")
        self.show(first.job_id)

    def retry(self) -> None:
        _chapter("2", "Retry, then success")
        job = self.producer.enqueue(
            "email", "send-invoice", {"invoice": 7}, idempotency_key="invoice:7"
        )
        lease = self.claim("worker", self.worker)
        failed = self.worker.fail(lease, "smtp.timeout", retryable=True)
        _step("worker", f"fail smtp.timeout, retryable → {failed.status}, due in 1 s")
        none = self.worker.claim("email")
        _step("worker", f"claim at once → {len(none)} jobs: it is not due yet")
        self.wait_until(failed.available_at)
        self.worker.complete(self.claim("worker", self.worker))
        _step("worker", "complete → done")
        self.show(job.job_id)

    def failure(self) -> None:
        _chapter("3", "Terminal failure")
        job = self.producer.enqueue(
            "email", "send-invoice", {"invoice": 8}, idempotency_key="invoice:8"
        )
        lease = self.claim("worker", self.worker)
        failed = self.worker.fail(lease, "address.unknown", retryable=False)
        _step("worker", f"fail address.unknown, not retryable → {failed.status}")
        self.refused(
            "worker",
            "complete after all",
            lambda: self.worker.complete(lease),
        )
        self.show(job.job_id)

    def lost_lease(self) -> None:
        _chapter("4", "A lost lease, reclaimed; the stale worker fenced")
        job = self.producer.enqueue(
            "email", "send-report", {"report": 9}, idempotency_key="report:9"
        )
        stale = self.claim("worker", self.worker)
        _step("worker", "… hangs, and its lease runs out")
        self.wait_until(stale.lease_expires_at)
        self.refused(
            "worker", "complete, too late", lambda: self.worker.complete(stale)
        )
        fresh = self.claim("spare worker", self.spare)
        self.refused("worker", "renew", lambda: self.worker.renew(stale))
        self.spare.complete(fresh)
        _step("spare worker", "complete → done")
        self.refused("observer", "complete", lambda: self.observer.complete(fresh))
        self.show(job.job_id)

    def claim(self, who: str, jobs: Jobs) -> LeasedJob:
        (lease,) = jobs.claim("email")
        _step(
            who,
            f"claim → job {_short(lease.job_id)}, fencing token {lease.attempt}, and a "
            "lease token that is hidden here",
        )
        return lease

    def refused(self, who: str, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except JobsError as error:
            _step(who, f"{what} → [yellow]refused[/] {error.sqlstate} {error.code}")
        else:
            raise AssertionError(f"{what} was not refused")

    def show(self, job_id: UUID) -> None:
        _step("observer", "inspect →")
        _render.evidence(self.observer.inspect(job_id), indent=4)

    def wait_until(self, moment: datetime | None) -> None:
        if moment is not None:
            time.sleep(max(0, (moment - datetime.now(UTC)).total_seconds()) + 0.05)


def _chapter(number: str, title: str) -> None:
    say(f"\n[bold cyan]{number}. {title}[/]")


def _step(who: str, what: str) -> None:
    say(f"  [b]{who:<12}[/] {what}")


def _short(job_id: UUID) -> str:
    return f"…{str(job_id)[-6:]}"
