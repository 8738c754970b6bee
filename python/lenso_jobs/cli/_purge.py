from __future__ import annotations

from typing import Annotated

import typer

from lenso_jobs.cli import _bulk, _instance, _options, _render, _words


def purge(  # noqa: PLR0913, PLR0917 - the arguments are SQL's
    config: _options.Config,
    before: _options.Before = None,
    older_than: Annotated[
        _words.Moment | None,
        typer.Option(
            "--older-than",
            parser=_words.length,
            metavar="AGE",
            help="Jobs that ended longer ago than this, such as 30d.",
        ),
    ] = None,
    retention: Annotated[
        bool,
        typer.Option("--retention", help="Jobs older than retention_seconds says."),
    ] = False,
    batch: Annotated[
        int, typer.Option(min=1, max=_bulk.MOST, help="How many jobs a call.")
    ] = 1_000,
    pause: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="How long to wait between two calls."
        ),
    ] = 0.0,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    yes: _options.Yes = False,
    dry_run: _options.DryRun = False,
    json: _options.Json = False,
) -> None:
    """Delete jobs that ended before a time, with their evidence and keys.

    Oldest first, each call its own transaction. The time is fixed as the command
    begins. --dry-run deletes up to 10,000 in a transaction that it rolls back. Ctrl-C
    ends it between two calls, with 130; what was done stays.
    """
    if (before is not None) + (older_than is not None) + retention != 1:
        raise typer.BadParameter("give one of --before, --older-than and --retention")
    if not dry_run:
        _bulk.require_terminal_or(yes)
    told = before or older_than
    with _instance.opened(config, secrets_dir, caller) as instance:
        end = _words.at(told, instance.now())
        which = (
            f"that ended before {_words.time(end)}"
            if end
            else "kept for longer than retention_seconds"
        )

        def act(asked: int) -> int:
            if end is None:
                return instance.jobs.enforce_retention(asked)
            return instance.jobs.purge(end, asked)

        if dry_run:
            _bulk.report_count(_bulk.tried(instance, act), "delete", machine=json)
            return
        if not yes:
            _bulk.ask(f"Delete {_bulk.tried(instance, act)} {which}?")
        tally = _bulk.repeated(
            act, "delete", batch=batch, pause=pause, until_none=end is not None
        )
        if retention and instance.configuration.retention_seconds is None:
            _render.say_aside("the document sets no retention_seconds")
    _bulk.report(tally, "deleted", machine=json)
