from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated
from uuid import UUID  # noqa: TC003 - typer reads it

import typer

from lenso_jobs.cli import _bulk, _instance, _options, _render

if TYPE_CHECKING:
    from datetime import datetime

    from lenso_jobs import InspectedFailure, Jobs

_BATCH = 1_000
_MOST = 10 * _bulk.MOST


def redrive(  # noqa: PLR0913, PLR0917 - the arguments are SQL's
    config: _options.Config,
    job_id: Annotated[
        UUID | None, typer.Argument(metavar="JOB_ID", help="One job's UUID.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option(help="The failed jobs of this queue instead.")
    ] = None,
    since: _options.Since = None,
    before: _options.Before = None,
    code: _options.Code = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many jobs at most; all by default.")
    ] = None,
    extra_attempts: Annotated[
        int,
        typer.Option(
            "--extra-attempts", min=1, max=100, help="How many more attempts for each."
        ),
    ] = 1,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    yes: _options.Yes = False,
    dry_run: _options.DryRun = False,
    json: _options.Json = False,
) -> None:
    """Queue failed jobs again: one by its UUID, or those of a queue since a time.

    Those that failed first come first, 1,000 a call, each call its own transaction.
    A job that fails once more meanwhile is not taken again: only those count that
    failed before --before, or else before the command began. Ctrl-C ends it between
    two calls, with 130; what was done stays.
    """
    is_bulk = queue is not None
    if is_bulk == (job_id is not None):
        raise typer.BadParameter("give either JOB_ID or --queue")
    if is_bulk and since is None:
        raise typer.BadParameter("--queue needs --since, too")
    if not is_bulk and (since or before or code or limit):
        raise typer.BadParameter(
            "--since, --before, --code and --limit go with --queue"
        )
    if not dry_run:
        _bulk.require_terminal_or(yes)
    with _instance.opened(config, secrets_dir, caller) as instance:
        if job_id is not None and dry_run:
            count = _bulk.tried(
                instance, lambda _: bool(instance.jobs.redrive(job_id, extra_attempts))
            )
            _bulk.report_count(count, "queue again", machine=json)
            return
        if job_id is not None:
            _one(instance.jobs, job_id, extra_attempts, yes=yes, machine=json)
            return
        assert queue is not None and since is not None  # noqa: PT018, S101 - as above
        now = instance.now()
        failed = _Failed(
            queue, since.at(now), before.at(now) if before else now, code, limit
        )
        count = failed.count(instance.jobs)
        if dry_run:
            _bulk.report_count(count, "queue again", machine=json)
            return
        if not yes:
            _bulk.ask(f"Queue {count} of {queue} again?")
        tally = _bulk.repeated(
            lambda asked: failed.redrive(instance.jobs, asked, extra_attempts),
            "queue again",
            batch=_BATCH,
            limit=limit,
            total=count.jobs if count.is_exact else None,
        )
    _bulk.report(tally, "queued again", machine=json)


@dataclass(frozen=True, slots=True)
class _Failed:
    """Which jobs are meant; *before* stays as it is from call to call."""

    queue: str
    since: datetime
    before: datetime
    code: str | None
    limit: int | None

    def count(self, jobs: Jobs) -> _bulk.Count:
        """Count by reading, up to a hundred thousand."""
        most = min(self.limit or _MOST, _MOST)
        count = 0
        before: InspectedFailure | datetime = self.before
        while count < most:
            page = jobs.inspect_failures(
                self.queue,
                since=self.since,
                limit=_bulk.MOST,
                failure_code=self.code,
                before=before,
            )
            count += len(page)
            if len(page) < _bulk.MOST:
                break
            before = page[-1]
        is_exact = count < most or most == self.limit
        return _bulk.Count(min(count, most), is_exact=is_exact)

    def redrive(self, jobs: Jobs, limit: int, extra_attempts: int) -> int:
        """Queue so many of them again."""
        return jobs.redrive_failed(
            self.queue,
            since=self.since,
            before=self.before,
            failure_code=self.code,
            limit=limit,
            extra_attempts=extra_attempts,
        )


def _one(
    jobs: Jobs, job_id: UUID, extra_attempts: int, *, yes: bool, machine: bool
) -> None:
    if not yes:
        job = jobs.inspect(job_id)
        _bulk.ask(
            f"Queue job {job_id} of {job.queue} again, which is {job.status} after "
            f"attempt {job.attempts} of {job.max_attempts}?"
        )
    again = jobs.redrive(job_id, extra_attempts)
    if machine:
        _render.as_json({"job_id": job_id, **asdict(again)})
    else:
        _render.say(f"queued job {job_id} again")
