from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from lenso_jobs.cli import _options, _render
from lenso_jobs.operator import plan as find


class Act(StrEnum):
    """What can be planned."""

    SETUP = "setup"
    UPGRADE = "upgrade"
    CONFIGURE = "configure"


def plan(  # noqa: PLR0913, PLR0917 - the options of three commands
    config: _options.Config,
    act: Annotated[
        Act, typer.Argument(metavar="[setup|upgrade|configure]", help="Which command.")
    ] = Act.SETUP,
    secrets_dir: _options.SecretsDir = None,
    drop_queues: _options.DropQueues = False,
    repair: _options.Repair = False,
    json: _options.Json = False,
) -> None:
    """Print the exact SQL that setup, upgrade or configure would send; send none.

    The script runs in psql as it is, and does the same. Comments say which step each
    part is, and what those that look for themselves would find to do. It reads in a
    read-only transaction; with --repair it loads the release beside the Instance, as
    check does, in one that is rolled back.
    """
    for option, given, of in (
        ("--drop-queues", drop_queues, Act.CONFIGURE),
        ("--repair", repair, Act.UPGRADE),
    ):
        if given and act is not of:
            raise typer.BadParameter(f"is an option of {of}", param_hint=option)
    configuration, conninfo = _options.load(config, secrets_dir)
    found = find(
        configuration,
        conninfo,
        act.value,
        drop_queues=drop_queues,
        repair_too=repair,
    )
    if json:
        _render.as_json(
            {
                "act": found.act,
                "parts": [
                    {
                        "title": part.title,
                        "changes": part.changes,
                        "transactional": part.transactional,
                        "statements": part.statements,
                    }
                    for part in found.parts
                ],
            }
        )
    else:
        _render.as_is(found.script())
