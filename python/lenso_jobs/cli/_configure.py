from __future__ import annotations

from typing import Annotated

import typer

from lenso_jobs.cli import _options, _render
from lenso_jobs.operator import configure as store
from lenso_jobs.operator import find_changes


def configure(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    drop_queues: _options.DropQueues = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and stop.")
    ] = False,
    json: _options.Json = False,
) -> None:
    """Store a changed document: policy, queues, callers and their memberships.

    Shows each change before it makes them, all or none. A caller that the document no
    longer has loses its membership. A queue that it leaves out is dropped once it has no
    live jobs; until then all of it is refused. `lenso-jobs plan configure` prints the SQL.
    """
    configuration, conninfo = _options.load(config, secrets_dir)
    changes = find_changes(configuration, conninfo, drop_queues=drop_queues)
    words = (*changes.roles, *changes.stored)
    if not json:
        for each in words:
            _render.say(each)
    changed = (
        False if dry_run else store(configuration, conninfo, drop_queues=drop_queues)
    )
    if json:
        configured = not dry_run and (changed or bool(words))
        _render.as_json(
            {"dry_run": dry_run, "configured": configured, "changes": words}
        )
    elif dry_run:
        _render.out.print("nothing was changed" if words else "nothing would change")
    elif changed:
        _render.out.print("stored the configuration")
    elif words:
        _render.out.print("done; the stored configuration was right already")
    else:
        _render.out.print("nothing changed")
