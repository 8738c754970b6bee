from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from lenso_jobs.cli import _options, _render
from lenso_jobs.operator import upgrade as bring_up


def upgrade(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    repair: _options.Repair = False,
    break_lock: Annotated[
        bool,
        typer.Option(
            "--break-lock",
            help="Remove the migration lock that a killed process left behind.",
        ),
    ] = False,
    json: _options.Json = False,
) -> None:
    """Apply the pending migrations while producers and workers go on.

    No lock that others wait behind is waited for longer than 5 seconds; then everybody
    is let through, and it is tried again, ten times in all. An index waits for older
    transactions, and holds up nobody. Killed at any point, the next run finishes the
    work. Refuses where there is no Instance, or one
    that a newer release migrated. `lenso-jobs plan upgrade` prints the SQL beforehand.
    """
    configuration, conninfo = _options.load(config, secrets_dir)
    report = bring_up(
        configuration,
        conninfo,
        repair_too=repair,
        break_lock=break_lock,
        say=_render.say_aside,
    )
    if json:
        _render.as_json(asdict(report))
        return
    _render.migrations(report.migrations, report.recorded)
    for what in report.repaired:
        _render.say(f"mended: {what}")
    if not any(asdict(report).values()):
        _render.out.print("nothing is to be done")
