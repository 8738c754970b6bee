"""Managing an Instance: setup, plan, upgrade, check, configure, uninstall."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lenso_jobs.cli import _options
from lenso_jobs.cli._screen import as_is, as_json, refuse, say, say_aside

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lenso_jobs.operator import Finding, Removal, Report


def setup(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    break_lock: _options.BreakLock = False,
    through_pooler: _options.ThroughPooler = False,
    json: _options.Json = False,
) -> None:
    """Create the schema and its roles, apply the migrations, store the document.

    You may run it again: it finishes what a killed run left. Two at once wait for each
    other. `lenso-jobs plan setup` prints the SQL beforehand. Exits with 1 if `check`
    would find an object that differs, with 2 if the role may not compare.
    """
    from lenso_jobs import operator

    configuration, conninfo = _options.load(config, secrets_dir)
    report = operator.setup(
        configuration,
        conninfo,
        break_lock=break_lock,
        say=say_aside,
        pooler_ok=through_pooler,
    )
    done = ["stored the configuration"] * report.configured
    if not (report.differences or report.uncompared):
        done.append(f"Instance {configuration.schema_} is ready")
    _tell(report, done, json)


def plan(  # noqa: PLR0913, PLR0917 - the options of three commands
    config: _options.Config,
    act: Annotated[
        Literal["setup", "upgrade", "configure"],
        typer.Argument(metavar="[setup|upgrade|configure]", help="The command."),
    ] = "setup",
    secrets_dir: _options.SecretsDir = None,
    drop_queues: _options.DropQueues = False,
    repair: _options.Repair = False,
    through_pooler: _options.ThroughPooler = False,
    json: _options.Json = False,
) -> None:
    """Print the SQL of setup, upgrade or configure, and run none of it.

    The output is a script for `psql -X -f`. It reads in a read-only transaction; for
    `setup` and `upgrade` it also loads this release beside the Instance and rolls that
    back, to compare the rights.
    """
    from lenso_jobs import operator

    require_act(act, drop_queues=drop_queues, repair=repair)
    found = operator.plan(
        *_options.load(config, secrets_dir),
        act,
        drop_queues=drop_queues,
        repair_too=repair,
        pooler_ok=through_pooler,
    )
    if json:
        names = ("title", "changes", "transactional", "statements")
        parts = [{name: getattr(part, name) for name in names} for part in found.parts]
        as_json({"act": found.act, "parts": parts, "uncompared": found.uncompared})
    else:
        as_is(found.script())


def require_act(act: str, *, drop_queues: bool, repair: bool) -> None:
    """Refuse an option that the planned command does not have."""
    for option, given, of in (
        ("--drop-queues", drop_queues, "configure"),
        ("--repair", repair, "upgrade"),
    ):
        if given and act != of:
            raise typer.BadParameter(f"is an option of {of}", param_hint=option)


def upgrade(  # noqa: PLR0913, PLR0917 - a command's options
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    repair: _options.Repair = False,
    break_lock: _options.BreakLock = False,
    through_pooler: _options.ThroughPooler = False,
    json: _options.Json = False,
) -> None:
    """Apply the pending migrations while producers and workers go on.

    Waits at most 5 s for a lock that blocks others, then gives way and tries again, up
    to 10 times. An index waits for older transactions and blocks nobody. You may run it
    again: it finishes what a killed run left. `lenso-jobs plan upgrade` prints the SQL
    beforehand. Exits with 1 if `check` would still find an object that differs, with 2
    if the role may not create the schema that the comparison needs.
    """
    from lenso_jobs import operator

    report = operator.upgrade(
        *_options.load(config, secrets_dir),
        repair_too=repair,
        break_lock=break_lock,
        say=say_aside,
        pooler_ok=through_pooler,
    )
    done = [f"repaired: {each}" for each in report.repaired]
    if not any(asdict(report).values()):
        done = ["there is nothing to do"]
    _tell(report, done, json)


def _tell(report: Report, done: Iterable[str], machine: bool) -> None:
    """Print what was done, and exit as ``check`` would."""
    from lenso_jobs.operator import uncompared

    if machine:
        as_json(asdict(report))
    else:
        print_report(report, done)
    if report.uncompared:
        refuse(uncompared(report.uncompared))
        raise typer.Exit(2)
    if report.differences:
        raise typer.Exit(1)


def print_report(report: Report, done: Iterable[str]) -> None:
    """Print what was done, and what is left."""
    for name in report.migrations:
        say(f"applied {name}")
    for name in report.recorded:
        say(f"recorded {name}, which was applied before")
    for each in report.rights:
        say(f"done: {each}")
    print_findings(report.differences)
    for each in done:
        say(each)


def print_findings(findings: Iterable[Finding]) -> None:
    """Print differences, each with its remedy."""
    for finding in findings:
        say(finding.what)
        say(f"    {finding.advice}", style="dim")


def check(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    through_pooler: _options.ThroughPooler = False,
    json: _options.Json = False,
) -> None:
    """Compare the Instance with this release and its document; changes nothing.

    Below each difference is its remedy. Do that in the printed order, then check
    again: pending migrations and missing roles hide other differences. Exit codes: 0
    no difference, 1 differences, 2 the command cannot tell.
    """
    from lenso_jobs import operator

    configuration, conninfo = _options.load(config, secrets_dir)
    try:
        findings = operator.check(configuration, conninfo, pooler_ok=through_pooler)
    except operator.OperatorError as error:
        refuse(str(error))
        raise typer.Exit(2) from None
    if json:
        as_json({"findings": [asdict(finding) for finding in findings]})
    else:
        print_findings(findings)
    if findings:
        raise typer.Exit(1)
    if not json:
        say(f"Instance {configuration.schema_} is as it should be")


def configure(  # noqa: PLR0913, PLR0917 - a command's options
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    drop_queues: _options.DropQueues = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the changes, and make none.")
    ] = False,
    through_pooler: _options.ThroughPooler = False,
    json: _options.Json = False,
) -> None:
    """Store a changed document: policy, queues, callers and their memberships.

    Makes all changes or none, and prints them. A caller that the document leaves out
    loses its membership. A queue that it leaves out is dropped if it has no live jobs;
    if it has some, the document is refused. `lenso-jobs plan configure` prints the SQL.
    """
    from lenso_jobs import operator

    loaded = _options.load(config, secrets_dir)
    changes = operator.find_changes(
        *loaded, drop_queues=drop_queues, pooler_ok=through_pooler
    )
    words = (*changes.roles, *changes.stored)
    # Nothing is printed before the changes are made: they may be refused.
    changed = not dry_run and operator.configure(
        *loaded, drop_queues=drop_queues, pooler_ok=through_pooler
    )
    if json:
        configured = not dry_run and (changed or bool(words))
        as_json({"dry_run": dry_run, "configured": configured, "changes": words})
        return
    for each in words:
        say(each)
    if dry_run:
        say("nothing was changed" if words else "nothing would change")
    elif changed:
        say("stored the configuration")
    elif words:
        say("done; the stored configuration was right already")
    else:
        say("nothing changed")


def uninstall(  # noqa: PLR0913, PLR0917 - a command's options
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without this it is only listed.")
    ] = False,
    keep_data: Annotated[
        bool,
        typer.Option(
            "--keep-data",
            help="Keep schema, jobs and roles, and revoke every right and membership. "
            "`upgrade --repair` and `configure` bring the Instance back.",
        ),
    ] = False,
    through_pooler: _options.ThroughPooler = False,
    json: _options.Json = False,
) -> None:
    """Drop the Instance: its schema with every job, and its group roles.

    Without `--yes` it lists what it would drop and exits with 1. It keeps the roles of
    callers, and each group role that owns anything else or has other rights on the
    server, and names them. It refuses while other objects depend on the schema.
    """
    from lenso_jobs import operator

    loaded = _options.load(config, secrets_dir)
    removal = (
        operator.uninstall(
            *loaded, keep_data=keep_data, say=say_aside, pooler_ok=through_pooler
        )
        if yes
        else operator.survey(*loaded, pooler_ok=through_pooler)
    )
    if json:
        as_json({**asdict(removal), "done": yes})
    elif keep_data:
        _print_kept(removal, "was" if yes else "would be")
    else:
        _print_dropped(removal, "dropped" if yes else "would drop")
    if not yes:
        refuse("nothing was done: pass --yes to do it")
        raise typer.Exit(1)


def _holds(removal: Removal) -> str:
    objects = ", ".join(f"{count} {kind}" for kind, count in removal.objects.items())
    return f"{objects}, {removal.live_jobs} live and {removal.kept_jobs} kept jobs"


def _print_dropped(removal: Removal, verb: str) -> None:
    if removal.objects:
        say(f"{verb} schema {removal.schema}: {_holds(removal)}")
    for role in removal.roles:
        say(f"{verb} role {role}")
    for role, reason in removal.left:
        say(f"role {role} is left: {reason}")
    for role in removal.callers:
        say(f"caller {role} is left: other applications may use the role")
    for each in removal.dependents:
        say(f"in the way: {each} depends on the schema")


def _print_kept(removal: Removal, verb: str) -> None:
    say(f"schema {removal.schema} {verb} left to its owner: {_holds(removal)}")
    left = dict(removal.left)
    for member, group in removal.members:
        if group not in left:
            say(f"{group} {verb} revoked from {member}")
    for group, reason in removal.left:
        say(f"members of {group} are left: {reason}")
