"""Looking at an Instance: health, explain, stats, inspect, jobs, failures."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal
from uuid import UUID  # noqa: TC003 - typer reads it

import typer

import lenso_jobs
from lenso_jobs.cli import _options, _screen
from lenso_jobs.cli._screen import Column, as_json, name, say, say_aside, text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from datetime import datetime

    from lenso_jobs import ExplainedJob, InspectedAttempt

    Opened = Callable[[], AbstractContextManager[_options.Instance]]


def health(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """List what is wrong with the Instance and what to do; changes nothing.

    For people, cron and monitors. Exit codes: 0 nothing, or notices only; 1 a warning
    or worse, or a schema of another release; 2 the command cannot tell.
    """
    with _options.opened(config, secrets_dir, caller, verified=False) as instance:
        findings = instance.findings()
        now = instance.now()
    is_well = all(each.severity == "notice" for each in findings)
    if json:
        as_json({"healthy": is_well, "findings": [asdict(each) for each in findings]})
    elif not findings:
        say(f"nothing is wrong with {instance.configuration.schema_}")
    for finding in () if json else findings:
        for line in _screen.finding_lines(finding, now):
            say(line)
    if not is_well:
        raise typer.Exit(1)


def explain(
    job_id: _options.JobId,
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """Say why a job is not being claimed, and what to do; changes nothing."""
    # A fault of the Instance may be the reason, so it is not verified.
    with _options.opened(config, secrets_dir, caller, verified=False) as instance:
        instance.version()
        explained = instance.jobs.explain_job(job_id)
        now = instance.now()
    if json:
        as_json(asdict(explained))
        return
    queue = f" in queue {explained.queue}" if explained.queue else ""
    say(f"Job {explained.job_id}{queue}: {explained.reason}", style="bold")
    say(explained.meaning)
    facts = ", ".join(_facts(explained, now))
    if facts:
        say(f"{facts[0].upper()}{facts[1:]}.")
    for line in (explained.detail or "").splitlines():
        say(f"  {line}")
    say(f"What to do: {explained.remedy}")


# What since, until and who of a reason are.
_FACTS = {
    **dict.fromkeys(
        (
            *("ready", "scheduled", "retry_waiting", "queue_not_declared"),
            *("no_declared_worker", "no_worker_connected", "queue_silent"),
        ),
        ("due since", "due", "by"),
    ),
    "queue_paused": ("paused", "until", "by"),
    "instance_damaged": ("due since", "until", "what is wrong:"),
    "leased": ("leased", "until", "to"),
    "lease_expired": ("expired", "until", "was held by"),
    "attempts_exhausted": ("expired", "until", "was held by"),
    "row_locked": ("in a transaction since", "until", "by"),
    "table_locked": ("in a transaction since", "until", "by"),
    "succeeded": ("ended", "until", "by"),
    "failed": ("ended", "until", "by"),
    "purged_or_unknown": ("the id was made", "purged are jobs that ended before", "by"),
}


def _facts(explained: ExplainedJob, now: datetime) -> Iterator[str]:
    words = _FACTS.get(explained.reason, ("since", "until", "by"))
    ahead = explained.ahead
    for word, fact in (
        (f"{words[0]} {{}}", explained.since and _screen.ago(explained.since, now)),
        (f"{words[1]} {{}}", explained.until and _screen.ago(explained.until, now)),
        (f"{words[2]} {{}}", explained.who),
        ("process {}", explained.pid),
        (f"attempt {{}} of {explained.max_attempts}", explained.attempt or None),
        ("last failure code {}", explained.failure_code),
        ("{} before it", None if ahead is None else _screen.jobs(ahead)),
    ):
        if fact is not None:
            yield word.format(fact)


def inspect(  # noqa: PLR0913, PLR0917 - a command's options
    config: _options.Config,
    job_id: Annotated[
        UUID | None, typer.Argument(metavar="JOB_ID", help="The job's UUID.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The job with this idempotency key instead."),
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE", help="The producer of `--key`. Default: the caller itself."
        ),
    ] = None,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """Show the durable evidence of one job; never its payload or key.

    Observers and operators see the history of its attempts, too.
    """
    if (key is None) == (job_id is None):
        raise typer.BadParameter("give either JOB_ID or --key")
    if key is None and producer is not None:
        raise typer.BadParameter("--producer goes with --key")
    with _options.opened(config, secrets_dir, caller) as instance:
        jobs = instance.jobs
        try:
            job = (
                jobs.inspect(job_id)
                if job_id
                else jobs.inspect_key(key or "", producer)
            )
        except lenso_jobs.JobNotFound as error:
            if key is not None and producer is None:
                error.hint = (
                    "It may be purged or erased. If another role enqueued it, name that "
                    "role: --producer ROLE."
                )
            raise
        try:
            history = jobs.inspect_attempts(job.job_id)
        except lenso_jobs.Unauthorized:
            history = None
    if json:
        attempts = None if history is None else [asdict(each) for each in history]
        as_json({**asdict(job), "history": attempts})
        return
    _screen.print_fields(asdict(job))
    if not history:
        return

    def at(instant: datetime | None) -> str:
        return _screen.time(instant) if instant else "-"

    def took(each: InspectedAttempt) -> str:
        return _screen.age(each.ended_at - each.leased_at) if each.ended_at else "-"

    say("")
    _screen.print_grid(
        history,
        Column("attempt", lambda each: str(each.attempt)),
        text("outcome", lambda each: each.outcome),
        text("failure code", lambda each: each.failure_code or "-"),
        text("worker", lambda each: each.worker),
        text("holder", lambda each: each.holder or "-"),
        text("leased", lambda each: at(each.leased_at)),
        text("took", took),
        text("next due", lambda each: at(each.retry_at)),
        text("lease ends", lambda each: at(each.lease_expires_at)),
    )


_Limit = Annotated[int, typer.Option(min=1, max=10_000, help="The most jobs to list.")]


def jobs(  # noqa: PLR0913, PLR0917 - a command's options
    config: _options.Config,
    queue: _options.Queue,
    status: Annotated[
        Literal["queued", "running", "succeeded", "failed", "lost"],
        typer.Option(help="Jobs in this status."),
    ],
    kind: _options.Kind = None,
    limit: _Limit = 100,
    before: Annotated[
        UUID | None,
        typer.Option(metavar="JOB_ID", help="Jobs enqueued before this one."),
    ] = None,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """List the jobs of a queue in one status, newest first; never payloads or keys.

    Looks at 10,000 jobs at most, and says where to continue.
    """
    with _options.opened(config, secrets_dir, caller, queue=queue) as instance:
        page = instance.jobs.inspect_jobs(
            queue, status, kind=kind, limit=limit, before=before
        )
    if json:
        found = [asdict(each) for each in page]
        as_json({"jobs": found, "next_before": page.next_before})
        return
    if page:
        _screen.print_grid(
            page,
            text("job", lambda each: str(each.job_id)),
            name("kind", lambda each: each.kind),
            text("created", lambda each: _screen.time(each.created_at)),
            text("due", lambda each: _screen.time(each.available_at)),
            text("updated", lambda each: _screen.time(each.updated_at)),
            name("failure code", lambda each: each.last_failure_code or "-"),
            name("worker", lambda each: each.worker or "-"),
            Column("attempts", lambda each: f"{each.attempts}/{each.max_attempts}"),
        )
    elif page.next_before is None:
        say(f"no job of {queue} is {status}")
    if page.next_before is not None:
        say_aside(f"for older jobs: --before {page.next_before}")


def failures(  # noqa: PLR0913, PLR0917 - the arguments are SQL's
    config: _options.Config,
    queue: Annotated[
        str | None, typer.Argument(help="A declared queue; all when left out.")
    ] = None,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    since: _options.Since = None,
    before: _options.Before = None,
    code: _options.Code = None,
    kind: _options.Kind = None,
    limit: _Limit = 100,
    json: _options.Json = False,
) -> None:
    """List the jobs that have failed and were not redriven, newest first."""
    with _options.opened(config, secrets_dir, caller, queue=queue) as instance:
        now = instance.now()
        found = instance.jobs.inspect_failures(
            queue,
            since=since.at(now) if since else None,
            limit=limit,
            failure_code=code,
            before=before.at(now) if before else None,
            kind=kind,
        )
    if json:
        as_json({"failures": [asdict(each) for each in found]})
        return
    if not found:
        say("no job has failed")
        return
    _screen.print_grid(
        found,
        text("job", lambda each: str(each.job_id)),
        name("failure code", lambda each: each.failure_code),
        text("ended", lambda each: _screen.time(each.ended_at)),
        name("queue", lambda each: each.queue),
        name("kind", lambda each: each.kind),
        name("worker", lambda each: each.worker),
        Column("attempts", lambda each: str(each.attempts)),
    )
    if len(found) == limit:
        say_aside(f"the newest {limit}; more with --limit")


def stats(  # noqa: PLR0913, PLR0917 - a command's options
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.2, metavar="SECONDS", help="The pause of `--watch`.")
    ] = 2.0,
    json: _options.Json = False,
) -> None:
    """Show findings, queues, failures and workers; changes nothing.

    A `~` marks a count that is estimated from a sample. Rates and failures are those of
    the last minutes. `--watch` goes on after an error; with `--json` it prints one
    object a line. Each time it reads at most 64 MB of live jobs.
    """
    opened = partial(_options.opened, config, secrets_dir, caller, verified=False)
    out = _screen.out
    with (
        suppress(KeyboardInterrupt) if watch else nullcontext(),
        closing(snapshots_of(opened, every)) as snapshots,
    ):
        if watch and not json and out.is_terminal and not out.is_dumb_terminal:
            live(snapshots, f"every {every:g} s, Ctrl-C ends")
            return
        for each in snapshots:
            if isinstance(each, str):
                say_aside(f"no answer: {each}")
            elif json:
                as_json(asdict(each))
            else:
                _screen.print_wide(_screen.Screen(each))
            if not watch:
                return


def snapshot(instance: _options.Instance) -> _screen.Snapshot:
    """Read findings, queues and workers at one time."""
    from psycopg import errors

    from lenso_jobs._prepare import SCHEMA_VERSION

    version = instance.version().version
    findings = instance.findings()
    try:
        with instance.without_waiting():
            queues = instance.jobs.inspect_queues()
            workers = instance.jobs.inspect_workers()
    except (errors.LockNotAvailable, errors.UndefinedTable):
        queues, workers = None, []
    except errors.UndefinedFunction as error:
        raise lenso_jobs.SchemaNotReady(
            f"{error.diag.message_primary}; the schema is at version {version}, and "
            f"this release needs {SCHEMA_VERSION}",
            hint="Run lenso-jobs health: it says what is wrong and what to do.",
        ) from None
    schema = instance.configuration.schema_
    return _screen.Snapshot(schema, instance.now(), version, findings, queues, workers)


def snapshots_of(opened: Opened, every: float) -> Generator[_screen.Snapshot | str]:
    """Yield one snapshot after another, or why there is none; but raise a first error."""
    import psycopg

    has_begun = False
    while True:
        try:
            with opened() as instance:
                while True:
                    yield snapshot(instance)
                    has_begun = True
                    time.sleep(every)
        except (psycopg.Error, lenso_jobs.JobsError) as error:
            if not has_begun:
                raise
            said, hint = " ".join(str(error).split()), getattr(error, "hint", None)
            yield f"{said}\n{hint}" if hint else said
        time.sleep(every)


def live(snapshots: Iterator[_screen.Snapshot | str], caption: str) -> None:
    """Show one snapshot after another on the whole screen."""
    from rich.live import Live

    first = next(snapshots)
    assert not isinstance(first, str)  # noqa: S101 - else it was raised
    screen = _screen.Screen(first, caption=caption, fits=True)
    # It draws by itself once a second: the terminal may have another size by then.
    shown = Live(screen, console=_screen.out, screen=True, refresh_per_second=1)
    try:
        # Not by entering it: a signal meanwhile would leave the screen as it is.
        shown.start(refresh=True)
        for each in snapshots:
            if isinstance(each, str):
                last = _screen.time(screen.snapshot.at)
                screen.trouble = f"no answer since {last}, trying again: {each}"
            else:
                screen.snapshot, screen.trouble = each, ""
            shown.refresh()
    finally:
        shown.stop()
