from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lenso_jobs.cli import _options, _render
from lenso_jobs.operator import survey
from lenso_jobs.operator import uninstall as take_down

if TYPE_CHECKING:
    from lenso_jobs.operator import Removal


def uninstall(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it; else it is only listed.")
    ] = False,
    keep_data: Annotated[
        bool,
        typer.Option(
            "--keep-data",
            help="Keep schema, jobs and roles, and take every right and membership "
            "away; upgrade --repair brings the Instance back.",
        ),
    ] = False,
    json: _options.Json = False,
) -> None:
    """Drop the Instance: its schema with every job, and its group roles.

    Lists what would go, and does nothing without --yes (exit code 1). A group role that
    owns or was granted anything else on the server is left, and so are the callers'
    roles, always; both are named. Refuses while objects of others depend on the schema.
    """
    configuration, conninfo = _options.load(config, secrets_dir)
    removal = (
        take_down(configuration, conninfo, keep_data=keep_data, say=_render.say_aside)
        if yes
        else survey(configuration, conninfo)
    )
    if json:
        _render.as_json({**asdict(removal), "done": yes})
    else:
        _tell(removal, keep_data=keep_data, done=yes)
    if not yes:
        _render.refuse("nothing was done; say --yes to do it", None)
        raise typer.Exit(1)


def _tell(removal: Removal, *, keep_data: bool, done: bool) -> None:
    objects = ", ".join(f"{count} {kind}" for kind, count in removal.objects.items())
    holds = f"{objects}, {removal.live_jobs} live and {removal.kept_jobs} kept jobs"
    if keep_data:
        _tell_kept(removal, holds, "was" if done else "would be")
        return
    verb = "dropped" if done else "would drop"
    if removal.objects:
        _render.say(f"{verb} schema {removal.schema}: {holds}")
    for role in removal.roles:
        _render.say(f"{verb} role {role}")
    for role, reason in removal.left:
        _render.say(f"role {role} is left: {reason}")
    for role in removal.callers:
        _render.say(f"caller {role} is left: its role may be anybody's")
    if not done:
        for each in removal.dependents:
            _render.say(f"in the way: {each} depends on the schema")


def _tell_kept(removal: Removal, holds: str, verb: str) -> None:
    _render.say(f"schema {removal.schema} {verb} left to its owner: {holds}")
    left = dict(removal.left)
    for member, group in removal.members:
        if group not in left:
            _render.say(f"{group} {verb} revoked from {member}")
    for group, reason in removal.left:
        _render.say(f"members of {group} are left: {reason}")
