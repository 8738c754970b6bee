"""Commands on a fleet: setup, plan, check, upgrade, stats, health, configure."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.text import Text

import lenso_jobs
from lenso_jobs.cli import _look, _manage, _options, _screen
from lenso_jobs.cli._screen import Column, as_is, as_json, refuse, say, say_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from lenso_jobs import InspectedFinding
    from lenso_jobs.operator import Report

T = TypeVar("T")

_AGAIN = "What was done stays: run this again."


def setup(
    fleet: _options.Fleet,
    secrets_dir: _options.SecretsDir = None,
    break_lock: _options.BreakLock = False,
    through_pooler: _options.ThroughPooler = False,
    json: _options.Json = False,
) -> None:
    """Make the Instance on each shard, then the functions of the router.

    The router's URL must be a superuser's, because PL/Proxy needs one. You may run it
    again: it finishes what a killed run left. If a shard fails, the others are done and
    the router is not. The number and the order of the shards cannot change.
    """
    from lenso_jobs import operator

    done, errors = _tried(
        operator.setup_fleet,
        *(fleet, secrets_dir),
        break_lock=break_lock,
        say=say_aside,
        pooler_ok=through_pooler,
    )
    _tell(done, errors, json)


def upgrade(  # noqa: PLR0913, PLR0917 - a command's options
    fleet: _options.Fleet,
    secrets_dir: _options.SecretsDir = None,
    repair: _options.Repair = False,
    break_lock: _options.BreakLock = False,
    through_pooler: _options.ThroughPooler = False,
    json: _options.Json = False,
) -> None:
    """Apply the pending migrations to each shard, then load the router's functions.

    Producers and workers go on. You may run it again. If a shard fails, the others are
    done and the router is not.
    """
    from lenso_jobs import operator

    done, errors = _tried(
        operator.upgrade_fleet,
        *(fleet, secrets_dir),
        repair_too=repair,
        break_lock=break_lock,
        say=say_aside,
        pooler_ok=through_pooler,
    )
    _tell(done, errors, json)


def plan(  # noqa: PLR0913, PLR0917 - the options of three commands
    fleet: _options.Fleet,
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
    """Print the SQL for each shard and for the router, and run none of it.

    Each part is a script for `psql -X -f` on its own server. None holds a password: the
    router's takes the passwords from a variable of psql.
    """
    from lenso_jobs import operator

    _manage.require_act(act, drop_queues=drop_queues, repair=repair)
    done, errors = _tried(
        partial(operator.plan_fleet, act=act),
        *(fleet, secrets_dir),
        drop_queues=drop_queues,
        repair_too=repair,
        pooler_ok=through_pooler,
    )
    if json:
        _print_json(done, errors)
    else:
        for name, script in done.items():
            as_is(f"-- {name}\n{script}\n")
    _end(errors)


def check(
    fleet: _options.Fleet,
    secrets_dir: _options.SecretsDir = None,
    through_pooler: _options.ThroughPooler = False,
    json: _options.Json = False,
) -> None:
    """Compare each shard and the router with this release; changes nothing.

    Also calls each shard through the router, as each declared caller. Below each
    difference is its remedy. Exit codes: 0 no difference, 1 differences, 2 the
    command cannot tell, for instance because a shard is not reached.
    """
    from lenso_jobs import operator

    try:
        done, errors = _tried(
            operator.check_fleet, fleet, secrets_dir, pooler_ok=through_pooler
        )
    except operator.OperatorError as error:
        refuse(str(error))
        raise typer.Exit(2) from None
    if json:
        findings = {n: [asdict(each) for each in found] for n, found in done.items()}
        _print_json(findings, errors)
    else:
        for name, found in done.items():
            say(name if found else f"{name} is as it should be", style="bold")
            _manage.print_findings(found)
    _end(errors, 2 if errors else int(any(done.values())))


def configure(  # noqa: PLR0913, PLR0917 - a command's options
    fleet: _options.Fleet,
    secrets_dir: _options.SecretsDir = None,
    drop_queues: _options.DropQueues = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the changes, and make none.")
    ] = False,
    through_pooler: _options.ThroughPooler = False,
    json: _options.Json = False,
) -> None:
    """Store a changed document on each shard, then on the router.

    Nothing changes if a queue that the document leaves out has live jobs on any shard.
    If a shard fails, the others are done and the router is not.
    """
    from lenso_jobs import operator

    done, errors = _tried(
        operator.configure_fleet,
        *(fleet, secrets_dir),
        drop_queues=drop_queues,
        dry_run=dry_run,
        pooler_ok=through_pooler,
    )
    if json:
        _print_json(done, errors)
    else:
        for name, changes in done.items():
            say(name, style="bold")
            for each in changes or ["nothing changes"]:
                say(each)
        if dry_run:
            say("nothing was changed")
    _end(errors, again=not dry_run)


def health(
    fleet: _options.Fleet,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """List what is wrong with each shard and what to do; changes nothing.

    It connects to the shards, not to the router. Exit codes: 0 nothing, or notices only;
    1 a warning or worse, or a shard that is not reached; 2 the command cannot tell.
    """
    read = _read(fleet, secrets_dir, caller, lambda each: (each.findings(), each.now()))
    found: list[tuple[int, InspectedFinding, datetime]] = []
    for number, result in read.items():
        if isinstance(result, Exception):
            found.append((number, _unreachable(number, result), datetime.now(UTC)))
        else:
            found += ((number, each, result[1]) for each in _worded(result[0]))
    is_well = all(each.severity == "notice" for _, each, _ in found)
    if json:
        findings = [{"shard": number, **asdict(each)} for number, each, _ in found]
        as_json({"healthy": is_well, "findings": findings})
    elif not found:
        say("nothing is wrong with any shard")
    else:
        _print_health(found)
    if not is_well:
        raise typer.Exit(1)


def stats(
    fleet: _options.Fleet,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """Show findings, queues and workers of each shard; changes nothing.

    As `lenso-jobs stats`, with the shard in the first column. It connects to the shards,
    not to the router. Exits with 2 if a shard is not reached.
    """
    read = _read(fleet, secrets_dir, caller, _look.snapshot)
    found = {
        number: replace(each, findings=_worded(each.findings))
        for number, each in read.items()
        if isinstance(each, _screen.Snapshot)
    }
    errors = {f"shard {n}": e for n, e in read.items() if isinstance(e, Exception)}
    if json:
        _print_json({f"shard {n}": asdict(each) for n, each in found.items()}, errors)
    elif found:
        _print_health(
            (n, finding, each.at)
            for n, each in found.items()
            for finding in each.findings
        )
        for n, each in found.items():
            if each.queues is None:
                say_aside(
                    f"shard {n}: a table is locked or missing, so no queue is read"
                )
        _print_rows(found, _screen.queue_columns, lambda each: each.queues or ())
        say("")
        _print_rows(found, _screen.worker_columns, lambda each: each.workers)
    _end(errors)


def _tried(
    act: Callable[..., dict[str, T]],
    fleet: Path,
    secrets_dir: Path | None,
    **options: Any,  # noqa: ANN401
) -> tuple[dict[str, T], dict[str, Exception]]:
    """Return what an act did, and what of it failed."""
    from lenso_jobs.operator import FleetError

    document = lenso_jobs.Fleet.from_file(fleet)
    try:
        return act(document, _options.resolver(secrets_dir), **options), {}
    except FleetError as error:
        return error.done, error.errors


def _tell(
    done: Mapping[str, Report], errors: Mapping[str, Exception], machine: bool
) -> None:
    """Print what was done, and exit as ``check`` would."""
    from lenso_jobs.operator import uncompared

    if machine:
        _print_json({name: asdict(each) for name, each in done.items()}, errors)
    code = 0
    for name, report in done.items():
        if not machine:
            say(name, style="bold")
            words = ["stored the configuration"] * report.configured
            words += (f"repaired: {each}" for each in report.repaired)
            if not any(asdict(report).values()):
                words = ["there is nothing to do"]
            _manage.print_report(report, words)
        if report.uncompared:
            refuse(f"{name}: {uncompared(report.uncompared)}")
        code = max(code, 2 if report.uncompared else int(bool(report.differences)))
    _end(errors, code, again=True)


def _print_json(done: Mapping[str, Any], errors: Mapping[str, Exception]) -> None:
    words = {name: _told(error)[1] for name, error in errors.items()}
    as_json({"done": done, "errors": words})


def _end(
    errors: Mapping[str, Exception], code: int = 0, *, again: bool = False
) -> None:
    """Print what failed, and exit with the highest code."""
    for number, (name, error) in enumerate(errors.items(), 1):
        of_error, message, hint = _told(error)
        code = max(code, of_error)
        last = _AGAIN if again and number == len(errors) else None
        refuse(f"{name}: {message}", "\n".join(filter(None, [hint, last])))
    if code:
        raise typer.Exit(code)


def _told(error: Exception) -> tuple[int, str, str | None]:
    from lenso_jobs._prepare import for_fleet
    from lenso_jobs.cli._app import URL, told

    found = told(error)
    if found is None:
        raise error
    code, message, hint = found
    hint = hint and for_fleet(hint.replace(URL, "its secret"))
    return code, for_fleet(message), hint


def _read(
    fleet: Path,
    secrets_dir: Path | None,
    caller: str | None,
    read: Callable[[_options.Instance], T],
) -> dict[int, T | Exception]:
    """Read from each shard, or return why not. Wrong rights end the command."""
    import psycopg

    from lenso_jobs._prepare import connection_string, fleet_mark, require_shard

    document = lenso_jobs.Fleet.from_file(fleet)
    secrets = _options.resolver(secrets_dir)
    shards = [document.shard(number) for number in range(len(document.shards))]
    urls = [connection_string(shard, secrets) for shard in shards]
    found: dict[int, T | Exception] = {}
    for number, (shard, url) in enumerate(zip(shards, urls, strict=True)):
        try:
            with _options.opened_on(shard, url, caller, verified=False) as instance:
                mark = fleet_mark(number, len(shards))
                require_shard(instance.connection, shard.schema_, mark)
                found[number] = read(instance)
        except lenso_jobs.Unauthorized:
            raise
        except (lenso_jobs.JobsError, psycopg.Error) as error:
            found[number] = error
    return found


def _worded(findings: Iterable[InspectedFinding]) -> list[InspectedFinding]:
    from lenso_jobs._prepare import for_fleet

    return [replace(each, remedy=for_fleet(each.remedy)) for each in findings]


def _unreachable(number: int, error: Exception) -> InspectedFinding:
    _, message, hint = _told(error)
    if not (isinstance(error, lenso_jobs.JobsError) and hint):
        hint = (
            "Start its server, or mend the way to it. Then run lenso-jobs fleet check."
        )
    return lenso_jobs.InspectedFinding(
        "critical",
        "shard_unreachable",
        f"shard {number}",
        None,
        " ".join(message.split()),
        hint,
    )


def _print_health(found: Iterable[tuple[int, InspectedFinding, datetime]]) -> None:
    for number, finding, now in found:
        for line in _screen.finding_lines(finding, now):
            say(Text.assemble(f"{number:>3}", line))


def _print_rows(
    found: Mapping[int, _screen.Snapshot],
    columns: Callable[[datetime], Iterator[Column]],
    rows: Callable[[_screen.Snapshot], Iterable[Any]],
) -> None:
    """Print a table of all shards; ages are by the clock of each."""
    of_shard = {number: list(columns(each.at)) for number, each in found.items()}

    def cell(place: int, row: tuple[int, Any]) -> str | Text:
        return of_shard[row[0]][place].cell(row[1])

    _screen.print_grid(
        [(number, row) for number, each in found.items() for row in rows(each)],
        Column("shard", lambda row: str(row[0])),
        *(
            column._replace(cell=partial(cell, place))
            for place, column in enumerate(next(iter(of_shard.values())))
        ),
    )
