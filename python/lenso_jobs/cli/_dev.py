"""Trying lenso-jobs out: a demonstration on a throw-away database, and enqueue."""

from __future__ import annotations

import json as json_module
import os
import secrets
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from lenso_jobs.cli import _options, _screen

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from lenso_jobs import Jobs, LeasedJob


def demo() -> None:
    """Run a job of each fate through an Instance on a throw-away database.

    Starts a server, or uses that of LENSO_JOBS_SERVER_URL, the URL of a superuser. It
    removes everything that it created.
    """
    from lenso_jobs import Configuration
    from lenso_jobs._instances import Templates
    from lenso_jobs.embedded import SERVER_URL, server_conninfo

    with server_conninfo() as server, ExitStack() as leftovers:
        # Roles belong to the whole server, and others may use this one.
        token = secrets.token_hex(4)
        mark = f"_{token}" if os.environ.get(SERVER_URL) else ""
        configuration = Configuration(
            schema="jobs_email",
            database_url_secret="jobs/database-url",  # noqa: S106 - a reference
            lease_seconds=1,
            retry_base_seconds=1,
            retry_max_seconds=60,
            queues=("email",),
            producer_instances=(f"accounts{mark}",),
            worker_instances=(f"email-worker{mark}", f"spare-worker{mark}"),
            observer_instances=(f"operations{mark}",),
        )
        templates = Templates(server, f"lenso_jobs_demo_{token}", leftovers)
        with templates.copy(configuration, lambda _: None) as instance:
            callers = chain(*configuration.callers.values())
            _Tour(*map(instance.jobs, callers)).run()


def enqueue(  # noqa: PLR0913, PLR0917 - the arguments are SQL's
    config: _options.Config,
    queue: _options.Queue,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="The job's kind.")],
    payload: Annotated[
        str,
        typer.Argument(
            metavar="PAYLOAD",
            help="A JSON object; `-` reads it from standard input, so that no list of "
            "processes shows it.",
        ),
    ],
    key: Annotated[str, typer.Option(metavar="KEY", help="The idempotency key.")],
    max_attempts: Annotated[
        int, typer.Option(min=1, max=100, help="How many attempts the job gets.")
    ] = 3,
    at: Annotated[
        datetime | None,
        typer.Option(
            parser=_options.instant,
            metavar="TIME",
            help="When the job falls due: a time with an offset, such as "
            "2026-01-31T18:00:00Z. Default: at once.",
        ),
    ] = None,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """Enqueue one job, as a declared producer.

    The same key with the same arguments enqueues nothing, and names the first job.
    """
    from lenso_jobs import IdempotencyConflict, Unauthorized

    try:
        read = json_module.loads(sys.stdin.read() if payload == "-" else payload)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise typer.BadParameter("PAYLOAD must be a JSON object")
    with _options.opened(config, secrets_dir, caller) as instance:
        try:
            job = instance.jobs.enqueue(
                *(queue, kind, read),
                idempotency_key=key,
                available_at=at,
                max_attempts=max_attempts,
            )
        except Unauthorized as error:
            error.hint = "Act as one of producer_instances: log in as it, or --caller."
            raise
        except IdempotencyConflict as error:
            error.hint = f"Job {error.job_id} has the key. Choose another one."
            raise
    if json:
        _screen.as_json(asdict(job))
    else:
        word = "enqueued" if job.created else "the key belongs to"
        _screen.say(f"{word} job {job.job_id}")


@dataclass
class _Tour:
    producer: Jobs
    worker: Jobs
    spare: Jobs
    observer: Jobs

    def run(self) -> None:
        _say("[bold]One job of each fate[/], in a PostgreSQL of its own.")
        _say(
            "In schema jobs_email: one queue, email; a producer, two workers and an "
            "observer,\neach a database role of its own. A lease lasts 1 s."
        )
        self.success()
        self.retry()
        self.failure()
        self.lost_lease()
        _say("\n[green]All four fates as promised.[/] What was made here is removed.")

    def success(self) -> None:
        _say("\n[bold cyan]1. Success[/]")
        job_id = self.enqueue("send-welcome", "welcome:1")
        again = self.producer.enqueue(
            "email", "send-welcome", {}, idempotency_key="welcome:1"
        )
        _step("producer", f"the same again → the same job, created = {again.created}")
        self.refused(
            "producer",
            "another intent under that key",
            lambda: self.producer.enqueue(
                "email", "send-goodbye", {}, idempotency_key="welcome:1"
            ),
        )
        self.refused("producer", "claim", lambda: self.producer.claim("email"))
        lease = self.claim("worker", self.worker)
        self.worker.complete(lease)
        _step("worker", "complete → done")
        self.worker.complete(lease)
        _step("worker", "complete once more, as if the answer was lost → done")
        self.show(job_id)

    def retry(self) -> None:
        _say("\n[bold cyan]2. Retry, then success[/]")
        job_id = self.enqueue("send-invoice", "invoice:7")
        lease = self.claim("worker", self.worker)
        failed = self.worker.fail(lease, "smtp.timeout", retryable=True)
        _step("worker", f"fail smtp.timeout, retryable → {failed.status}, due in 1 s")
        none = self.worker.claim("email")
        _step("worker", f"claim at once → {len(none)} jobs: it is not due yet")
        _wait_until(failed.available_at)
        self.worker.complete(self.claim("worker", self.worker))
        _step("worker", "complete → done")
        self.show(job_id)

    def failure(self) -> None:
        _say("\n[bold cyan]3. Terminal failure[/]")
        job_id = self.enqueue("send-invoice", "invoice:8")
        lease = self.claim("worker", self.worker)
        failed = self.worker.fail(lease, "address.unknown", retryable=False)
        _step("worker", f"fail address.unknown, not retryable → {failed.status}")
        self.refused(
            "worker", "complete after all", lambda: self.worker.complete(lease)
        )
        self.show(job_id)

    def lost_lease(self) -> None:
        _say("\n[bold cyan]4. A lost lease, reclaimed; the stale worker fenced[/]")
        job_id = self.enqueue("send-report", "report:9")
        stale = self.claim("worker", self.worker)
        _step("worker", "… hangs, and its lease expires")
        _wait_until(stale.lease_expires_at)
        self.refused(
            "worker", "complete, too late", lambda: self.worker.complete(stale)
        )
        fresh = self.claim("spare worker", self.spare)
        self.refused("worker", "renew", lambda: self.worker.renew(stale))
        self.spare.complete(fresh)
        _step("spare worker", "complete → done")
        self.refused("observer", "complete", lambda: self.observer.complete(fresh))
        self.show(job_id)

    def enqueue(self, kind: str, key: str) -> UUID:
        job = self.producer.enqueue("email", kind, {}, idempotency_key=key)
        _step("producer", f"enqueue → job {_short(job.job_id)}, created")
        return job.job_id

    def claim(self, who: str, jobs: Jobs) -> LeasedJob:
        (lease,) = jobs.claim("email")
        _step(
            who,
            f"claim → job {_short(lease.job_id)}, fencing token {lease.attempt}, and a "
            "lease token that is hidden here",
        )
        return lease

    def refused(self, who: str, what: str, call: Callable[[], object]) -> None:
        from lenso_jobs import JobsError

        try:
            call()
        except JobsError as error:
            _step(who, f"{what} → [yellow]refused[/] {error.sqlstate} {error.code}")
        else:
            raise AssertionError(f"{what} was not refused")

    def show(self, job_id: UUID) -> None:
        _step("observer", "inspect →")
        _screen.print_fields(asdict(self.observer.inspect(job_id)), indent=4)


def _wait_until(instant: datetime | None) -> None:
    if instant is not None:
        time.sleep(max(0, (instant - datetime.now(UTC)).total_seconds()) + 0.05)


def _say(line: str) -> None:
    _screen.out.print(line, soft_wrap=True)


def _step(who: str, what: str) -> None:
    _say(f"  [b]{who:<12}[/] {what}")


def _short(job_id: UUID) -> str:
    return f"…{str(job_id)[-6:]}"
