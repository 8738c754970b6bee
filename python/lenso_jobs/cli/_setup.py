from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from lenso_jobs.cli import _options, _render
from lenso_jobs.operator import setup as set_up


def setup(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    break_lock: Annotated[
        bool,
        typer.Option(
            "--break-lock",
            help="Remove the migration lock that a killed process left behind.",
        ),
    ] = False,
    json: _options.Json = False,
) -> None:
    """Make the schema, its roles and grants, apply the migrations, store the document.

    Safe to run again; two at once wait for each other. Killed at any point, the next
    run finishes the work. `lenso-jobs plan setup` prints the SQL beforehand.
    """
    configuration, conninfo = _options.load(config, secrets_dir)
    report = set_up(
        configuration, conninfo, break_lock=break_lock, say=_render.say_aside
    )
    if json:
        _render.as_json(asdict(report))
        return
    _render.migrations(report.migrations, report.recorded)
    if report.configured:
        _render.out.print("stored the configuration")
    _render.out.print(f"Instance {configuration.schema_} is ready")
