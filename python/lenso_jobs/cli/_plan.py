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


def plan(
    config: _options.Config,
    act: Annotated[
        Act, typer.Argument(metavar="[setup|upgrade|configure]", help="Which command.")
    ] = Act.SETUP,
    secrets_dir: _options.SecretsDir = None,
    drop_queues: _options.DropQueues = False,
    json: _options.Json = False,
) -> None:
    """Print the exact SQL that setup, upgrade or configure would send; send none.

    The script runs in psql as it is, and does the same. Comments say which step each
    part is, and what those that look for themselves would find to do. It reads in a
    read-only transaction.
    """
    configuration, conninfo = _options.load(config, secrets_dir)
    found = find(configuration, conninfo, act.value, drop_queues=drop_queues)
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
