from __future__ import annotations

from typing import Annotated

import typer

from lenso_jobs.cli import _bulk, _instance, _options


def retire(  # noqa: PLR0913, PLR0917 - as the other acts
    config: _options.Config,
    batch: Annotated[
        int, typer.Option(min=1, max=_bulk.MOST, help="How many jobs a call.")
    ] = _bulk.MOST,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    yes: _options.Yes = False,
    dry_run: _options.DryRun = False,
    json: _options.Json = False,
) -> None:
    """End the jobs whose last attempt's lease ran out, as claims do in passing.

    Each call walks over the live jobs. --dry-run does one in a transaction that it
    rolls back. Ctrl-C ends it between two calls, with 130; what was done stays.
    """
    if not dry_run:
        _bulk.require_terminal_or(yes)
    with _instance.opened(config, secrets_dir, caller) as instance:
        act = instance.jobs.retire_expired
        if dry_run:
            _bulk.report_count(_bulk.tried(instance, act), "end", machine=json)
            return
        if not yes:
            _bulk.ask(f"End {_bulk.tried(instance, act)} whose last lease ran out?")
        tally = _bulk.repeated(act, "end", batch=batch, until_none=False)
    _bulk.report(tally, "ended", machine=json)
