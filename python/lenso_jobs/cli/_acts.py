"""Acts on jobs: redrive, purge, retire, erase ask first; pause and resume do not."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from uuid import UUID  # noqa: TC003 - typer reads it

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from lenso_jobs.cli import LEAVING, _options, _screen, handled
from lenso_jobs.cli._screen import as_json, refuse, say, say_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from lenso_jobs.cli._options import Instance

MOST = 10_000
"""The most jobs that one call takes."""
_COUNTED = MOST
"""The most jobs that are counted beforehand, by one call."""
_REDRIVE_BATCH = 1_000
_MANY = 1_000


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
    kind: _options.Kind = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="The most jobs to requeue. Default: all.")
    ] = None,
    extra_attempts: Annotated[
        int, typer.Option(min=1, max=100, help="How many more attempts each gets.")
    ] = 1,
    over: Annotated[
        int,
        typer.Option(
            parser=_options.spread,
            metavar="SECONDS",
            help="Let the jobs of each call fall due evenly over so many seconds, 0 to "
            "86,400, so that later jobs run between them. With 0 they are due at once.",
        ),
    ] = 0,
    pause: _options.Pause = 0.0,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    yes: _options.Yes = False,
    dry_run: _options.DryRun = False,
    json: _options.Json = False,
) -> None:
    """Requeue failed jobs: one by its UUID, or those of a queue since a time.

    Takes the oldest failures first, 1,000 a call, and commits after each call. A job
    that fails again meanwhile is not taken again: it counts only if it failed before
    `--before`, or before the command began. Requeued jobs run before jobs that are
    enqueued later; `--over` and `--pause` leave room for those. Ctrl-C ends it between
    two calls with exit code 130, and what was done stays.
    """
    if (queue is not None) == (job_id is not None):
        raise typer.BadParameter("give either JOB_ID or --queue")
    if queue is not None and since is None:
        raise typer.BadParameter("--queue needs --since, such as --since 2h")
    if queue is None and (since or before or code or kind or limit or over or pause):
        raise typer.BadParameter(
            "--since, --before, --code, --kind, --limit, --over and --pause go with "
            "--queue"
        )
    _require_terminal_or(yes or dry_run)
    with _options.opened(config, secrets_dir, caller, queue=queue) as instance:
        jobs = instance.jobs
        if job_id is not None:
            instance.require("redrive")
            if dry_run:
                with instance.trying():
                    jobs.redrive(job_id, extra_attempts)
                _report_count(_Count(1, is_exact=True), "queue again", machine=json)
                return
            if not yes:
                job = jobs.inspect(job_id)
                _ask(
                    f"Queue job {job_id} of {job.queue} again, which is {job.status} "
                    f"after attempt {job.attempts} of {job.max_attempts}?"
                )
            again = {"job_id": job_id, **asdict(jobs.redrive(job_id, extra_attempts))}
            as_json(again) if json else say(f"queued job {job_id} again")
            return
        assert queue is not None  # noqa: S101 - as above
        instance.require("redrive_failed")
        now = instance.now()
        which: dict[str, Any] = {
            "since": since and since.at(now),
            # The same in every call: a job that fails again meanwhile has failed later.
            "before": before.at(now) if before else now,
            "failure_code": code,
            "kind": kind,
        }
        most = min(limit or _COUNTED, _COUNTED)
        found = len(jobs.inspect_failures(queue, limit=most, **which))
        count = _Count(found, is_exact=found < most or most == limit)
        if dry_run:
            _report_count(count, "queue again", machine=json)
            return
        if count.jobs >= _MANY and not over:
            say_aside(
                f"{count} become due at once, and run before jobs that are enqueued "
                "later. --over SECONDS or --pause SECONDS leaves room for those."
            )
        if not yes:
            spread = f", over {over:,} s" if over else ""
            _ask(f"Queue {count} of {queue} again{spread}?")
        which |= {"extra_attempts": extra_attempts, "over_seconds": over}
        _repeat(
            lambda asked: jobs.redrive_failed(queue, limit=asked, **which),
            ("queue again", "queued again"),
            machine=json,
            batch=_REDRIVE_BATCH,
            limit=limit,
            total=count.jobs if count.is_exact else None,
            pause=pause,
        )


def purge(  # noqa: PLR0913, PLR0917 - the arguments are SQL's
    config: _options.Config,
    before: _options.Before = None,
    older_than: Annotated[
        _options.Moment | None,
        typer.Option(
            parser=_options.age,
            metavar="AGE",
            help="Jobs that ended longer ago than this, such as 30d.",
        ),
    ] = None,
    retention: Annotated[
        bool,
        typer.Option("--retention", help="Jobs kept longer than retention_seconds."),
    ] = False,
    batch: Annotated[
        int, typer.Option(min=1, max=MOST, help="The most jobs a call deletes.")
    ] = 1_000,
    pause: _options.Pause = 0.0,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    yes: _options.Yes = False,
    dry_run: _options.DryRun = False,
    json: _options.Json = False,
) -> None:
    """Delete jobs that ended before a time, with their evidence and keys.

    Deletes the oldest first, and commits after each call. The time is fixed as the
    command begins. `--dry-run` deletes up to 10,000 jobs in a transaction that it rolls
    back. Ctrl-C ends it between two calls with exit code 130, and what was done stays.
    """
    if (before is not None) + (older_than is not None) + retention != 1:
        raise typer.BadParameter("give one of --before, --older-than and --retention")
    _require_terminal_or(yes or dry_run)
    given = before or older_than
    with _options.opened(config, secrets_dir, caller) as instance:
        instance.require("enforce_retention" if given is None else "purge")
        end = given.at(instance.now()) if given else None
        jobs = instance.jobs
        act = partial(jobs.purge, end) if end else jobs.enforce_retention
        if dry_run:
            _report_count(_tried(instance, act), "delete", machine=json)
            return
        if not yes:
            _ask_to_purge(instance, act, end)
        if retention and instance.configuration.retention_seconds is None:
            say_aside("the document sets no retention_seconds")
        # By retention jobs grow old enough all the time.
        _repeat(
            act,
            ("delete", "deleted"),
            machine=json,
            batch=batch,
            pause=pause,
            until_none=end is not None,
        )


def _ask_to_purge(
    instance: Instance, act: Callable[[int], int], end: datetime | None
) -> None:
    """Ask, and say how much would go and what the document says."""
    now = instance.now()
    count = _tried(instance, act)
    ended = _tried(instance, partial(instance.jobs.purge, now))
    if not ended.is_exact:
        about = max(_estimated(instance), ended.jobs)
        say_aside(f"The Instance has about {about:,} ended jobs.")
    elif ended.jobs:
        # Jobs end between the two counts.
        share = min(1, count.jobs / ended.jobs)
        say_aside(f"That is {share:.0%} of {ended.jobs:,} ended jobs.")
    say_aside(
        "Their evidence and idempotency keys go, too: a producer that repeats a key "
        "then creates a new job."
    )
    kept_for = timedelta(seconds=instance.configuration.retention_seconds or 0)
    if end and end > now - kept_for:
        length = _screen.age(kept_for)
        say_aside(f"The document keeps ended jobs for {length} (retention_seconds).")
    which = (
        f"that ended before {_screen.time(end)}" if end else "past retention_seconds"
    )
    _ask(f"Delete {count} {which}?")


def _estimated(instance: Instance) -> int:
    """Estimate from the catalogue how many jobs have ended; 0 if it does not know."""
    row = instance.connection.execute(
        "select sum(case c.relname when 'job' then 1 else -1 end * c.reltuples)::bigint"
        " from pg_class as c where c.relname in ('job', 'live_job') and c.relnamespace"
        " = to_regnamespace(quote_ident(%s)) having bool_and(c.reltuples >= 0)",
        (instance.configuration.schema_,),
    ).fetchone()
    return max(row[0], 0) if row else 0


def retire(  # noqa: PLR0913, PLR0917 - as the other acts
    config: _options.Config,
    batch: Annotated[
        int, typer.Option(min=1, max=MOST, help="The most jobs a call ends.")
    ] = MOST,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    yes: _options.Yes = False,
    dry_run: _options.DryRun = False,
    json: _options.Json = False,
) -> None:
    """End the jobs whose last attempt's lease has expired, as claims do in passing.

    Each call reads all live jobs. `--dry-run` does one call in a transaction that it
    rolls back. Ctrl-C ends it between two calls with exit code 130, and what was done
    stays.
    """
    _require_terminal_or(yes or dry_run)
    with _options.opened(config, secrets_dir, caller) as instance:
        instance.require("retire_expired")
        act = instance.jobs.retire_expired
        if dry_run:
            _report_count(_tried(instance, act), "end", machine=json)
            return
        if not yes:
            _ask(f"End {_tried(instance, act)} whose last lease has expired?")
        _repeat(act, ("end", "ended"), machine=json, batch=batch, until_none=False)


def erase(  # noqa: PLR0913, PLR0917 - as the other acts
    job_id: _options.JobId,
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    yes: _options.Yes = False,
    dry_run: _options.DryRun = False,
    json: _options.Json = False,
) -> None:
    """Delete one job that has ended, with its payload, evidence and key.

    The audit keeps its id. `--dry-run` deletes it in a transaction that it rolls back.
    """
    _require_terminal_or(yes or dry_run)
    with _options.opened(config, secrets_dir, caller) as instance:
        instance.require("erase")
        if dry_run or not yes:  # what is refused is refused before any question
            with instance.trying():
                instance.jobs.erase(job_id)
        if dry_run:
            _report_count(_Count(1, is_exact=True), "erase", machine=json)
            return
        if not yes:
            _ask(f"Erase job {job_id}, its payload, its evidence and its key?")
        instance.jobs.erase(job_id)
    as_json({"job_id": job_id}) if json else say(f"erased job {job_id}")


def pause(
    queue: _options.Queue,
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """Stop claims of a queue until `resume`; running jobs go on."""
    with _options.opened(config, secrets_dir, caller, queue=queue) as instance:
        instance.require("pause")
        _report_queue(queue, "paused", instance.jobs.pause(queue), machine=json)


def resume(
    queue: _options.Queue,
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """Let workers claim jobs of a paused queue again."""
    with _options.opened(config, secrets_dir, caller, queue=queue) as instance:
        instance.require("resume")
        _report_queue(queue, "resumed", instance.jobs.resume(queue), machine=json)


def _report_queue(queue: str, done: str, has_changed: bool, *, machine: bool) -> None:
    if machine:
        as_json({"queue": queue, "changed": has_changed})
    else:
        say(f"{done} {queue}" if has_changed else f"{queue}: nothing to do")


# What the acts have in common.


class _Count(NamedTuple):
    """How many jobs an act would take."""

    jobs: int
    is_exact: bool

    def __str__(self) -> str:
        return f"{'' if self.is_exact else 'at least '}{_screen.jobs(self.jobs)}"


def _require_terminal_or(settled: bool) -> None:
    """Refuse to change jobs where nobody can confirm it."""
    if not settled and not sys.stdin.isatty():
        raise typer.BadParameter(
            "no terminal to ask for confirmation: pass --yes or --dry-run"
        )


def _ask(question: str) -> None:
    """Go on only after a yes."""
    code = 1
    try:
        if typer.confirm(question, err=True):
            return
    except typer.Abort as error:
        code = 130 if isinstance(error.__context__, KeyboardInterrupt) else 1
        _screen.err.print()
    refuse("nothing was done")
    raise typer.Exit(code)


def _tried(instance: Instance, act: Callable[[int], int]) -> _Count:
    """Count by one call in a transaction that is rolled back."""
    with instance.trying():
        count = int(act(_COUNTED))
    return _Count(count, is_exact=count < _COUNTED)


def _report_count(count: _Count, would: str, *, machine: bool) -> None:
    if machine:
        as_json({"dry_run": True, "jobs": count.jobs, "is_exact": count.is_exact})
    else:
        say(f"would {would} {count}; nothing was changed")


def _repeat(  # noqa: PLR0913 - what differs between the acts
    act: Callable[[int], int],
    words: tuple[str, str],
    *,
    machine: bool,
    batch: int,
    limit: int | None = None,
    total: int | None = None,
    pause: float = 0.0,
    until_none: bool = True,
) -> None:
    """Call *act* until it takes no more jobs, and report; exits 130 after a signal.

    *words* are the verb and its past tense, *total* is how many jobs there are, if that
    is known. Without *until_none* it stops at a call that takes fewer jobs than it may:
    that ends even if new jobs turn up all the time.
    """
    jobs, is_stopped = 0, False
    with _interrupts() as stop_after, _bar(words[0], total) as advance:
        while limit is None or jobs < limit:
            asked = batch if limit is None else min(batch, limit - jobs)
            try:
                count = act(asked)
            except BaseException:
                if jobs:
                    say_aside(f"{words[0]}: {_screen.jobs(jobs)} until this:")
                raise
            jobs += count
            advance(count)
            if count == 0 or (count < asked and not until_none):
                break
            is_stopped = stop_after(pause)
            if is_stopped:
                break
    if machine:
        as_json({"jobs": jobs, "interrupted": is_stopped})
    else:
        say(f"{words[1]} {_screen.jobs(jobs)}")
    if is_stopped:
        refuse("interrupted; what was done stays")
        raise typer.Exit(130)


@contextmanager
def _interrupts() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits between two calls, and returns whether to stop.

    A signal during a call is noted. A second one ends the call.
    """
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    def stop_after(pause: float) -> bool:
        if not noted and pause:
            try:
                noted.append(0)  # so that the first signal ends the pause
                time.sleep(pause)
                noted.clear()
            except KeyboardInterrupt:
                return True
        return bool(noted)

    with handled((signal.SIGINT, *LEAVING), note):
        yield stop_after


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Callable[[int], object]]:
    if not _screen.err.is_terminal:
        yield lambda _: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(what, *columns, console=_screen.err, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.update(task, advance=count)
