"""Acts on a fleet: on one shard after the other, and on the router last."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import sql

from lenso_jobs._prepare import SHARD_MARK, for_fleet, is_router
from lenso_jobs.errors import JobsError
from lenso_jobs.operator import _plan, _router, _setup
from lenso_jobs.operator._objects import Finding
from lenso_jobs.operator._parts import Act, Part
from lenso_jobs.operator._router import Connection, Places
from lenso_jobs.operator._session import (
    OperatorError,
    connected,
    exclusively,
    operator_key,
    silent,
)
from lenso_jobs.operator._setup import Report, patiently
from lenso_jobs.operator._state import declared, newest, released

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from lenso_jobs.fleet import Fleet

T = TypeVar("T")

_SHARD = """
select concat_ws(
        ' ', c.system_identifier, d.oid, extract(epoch from pg_postmaster_start_time())
    ), obj_description(n.oid, 'pg_namespace'),
    exists (
        select from pg_class
        where relnamespace = n.oid and relname = 'job' and relkind = 'r'
            and pg_get_userbyid(relowner) = %s
    )
from pg_control_system() as c
join pg_database as d on d.datname = current_database()
left join pg_namespace as n on n.nspname = %s
"""
_CONFIGURE = "lenso-jobs fleet configure"
_LET_IN = (
    "let the role log in there, name its password in passwords, and run lenso-jobs "
    "fleet configure; or let the router's server in by pg_hba.conf"
)
_DONE = {
    _router.MISSING: "is made",
    _router.DIFFERENT: "is changed",
    _router.STRAY: "is dropped",
}
_FOUND = {
    _router.MISSING: "is missing",
    _router.DIFFERENT: "differs from the release or the document",
    _router.STRAY: "belongs neither to the release nor to the document",
}


class FleetError(OperatorError):
    """A part of a fleet failed. What was done stays; run the command again."""

    def __init__(
        self, done: Mapping[str, Any], errors: Mapping[str, Exception]
    ) -> None:
        self.done = dict(done)
        """What was done, by the name of the shard or the router."""
        self.errors = dict(errors)
        """What failed, by the same names."""
        lines = [f"{name}: {str(error).strip()}" for name, error in errors.items()]
        super().__init__("\n".join(lines))


def setup_fleet(
    fleet: Fleet,
    secrets: Callable[[str], str],
    *,
    break_lock: bool = False,
    say: Callable[[str], None] = silent,
    pooler_ok: bool = False,
) -> dict[str, Report]:
    """Make the Instance on each shard, and the functions of the router.

    Safe to run again. The router is made last, if no shard failed.

    Args:
        fleet: The fleet's document.
        secrets: Turns the references of the document into URLs and passwords. The
            router's URL must be a superuser's.
        break_lock: As ``setup``.
        say: As ``setup``.
        pooler_ok: As ``setup``.

    Returns:
        What was done, by the name of the shard or the router.

    Raises:
        SecretNotFound: A secret is missing, or cannot be used.
        OperatorError: The document does not fit the fleet that is there.
        JobsError: The router refuses.
        FleetError: A shard failed. Other shards are done, and the router is not.
        psycopg.Error: The router cannot be reached, or refused a statement.
    """
    places = Places.of(fleet, secrets, pooler_ok)
    act = partial(_setup.setup, break_lock=break_lock, pooler_ok=pooler_ok)

    def of_shard(number: int, _: _Seen) -> Report:
        configuration, conninfo = fleet.shard(number), places.shards[number]
        report = act(configuration, conninfo, say=_named(places.name(number), say))
        report = replace(report, differences=_worded(report.differences))
        with connected(conninfo, pooler_ok=pooler_ok) as connection:
            connection.execute(places.marking(number).encode())
        return report

    return _through(places, "setup", of_shard, _reported(places), say=say)


def upgrade_fleet(  # noqa: PLR0913 - each is an option of the command
    fleet: Fleet,
    secrets: Callable[[str], str],
    *,
    repair_too: bool = False,
    break_lock: bool = False,
    say: Callable[[str], None] = silent,
    pooler_ok: bool = False,
) -> dict[str, Report]:
    """Apply the pending migrations to each shard, then load the router's functions.

    Callers and workers go on. Safe to run again.

    Args:
        fleet: The fleet's document.
        secrets: As ``setup_fleet``.
        repair_too: As ``upgrade``. The router is always repaired.
        break_lock: As ``setup``.
        say: As ``setup``.
        pooler_ok: As ``setup``.

    Returns:
        What was done, by the name of the shard or the router.

    Raises:
        SecretNotFound: A secret is missing, or cannot be used.
        OperatorError: The router is not set up, or the document does not fit it.
        JobsError: The router refuses.
        FleetError: A shard failed.
        psycopg.Error: The router cannot be reached.
    """
    places = Places.of(fleet, secrets, pooler_ok)
    act = partial(_setup.upgrade, repair_too=repair_too, break_lock=break_lock)

    def of_shard(number: int, _: _Seen) -> Report:
        said = _named(places.name(number), say)
        conninfo = places.shards[number]
        report = act(fleet.shard(number), conninfo, say=said, pooler_ok=pooler_ok)
        return replace(report, differences=_worded(report.differences))

    return _through(places, "upgrade", of_shard, _reported(places), say=say)


def configure_fleet(
    fleet: Fleet,
    secrets: Callable[[str], str],
    *,
    drop_queues: bool = False,
    dry_run: bool = False,
    pooler_ok: bool = False,
) -> dict[str, tuple[str, ...]]:
    """Store a changed document on each shard, then bring the router to it.

    Args:
        fleet: The changed document.
        secrets: As ``setup_fleet``.
        drop_queues: As ``configure``.
        dry_run: Make no change.
        pooler_ok: As ``setup``.

    Returns:
        The changes in words, by the name of the shard or the router.

    Raises:
        SecretNotFound: A secret is missing, or cannot be used.
        OperatorError: The router is not set up, or the document does not fit it.
        JobsError: The router refuses.
        FleetError: A shard failed, or refused the change.
        psycopg.Error: The router cannot be reached.
    """
    places = Places.of(fleet, secrets, pooler_ok)

    def of_shard(number: int, _: _Seen) -> tuple[str, ...]:
        given = fleet.shard(number), places.shards[number]
        changes = _plan.find_changes(
            *given, drop_queues=drop_queues, pooler_ok=pooler_ok
        )
        if not dry_run:
            _setup.configure(*given, drop_queues=drop_queues, pooler_ok=pooler_ok)
        return (*changes.roles, *changes.stored)

    def of_router(connection: Connection, _: _Seen) -> tuple[str, ...]:
        return _loaded(connection, places, _DONE, keeps=not dry_run)

    if not (dry_run or drop_queues):
        _refuse_to_drop(fleet, secrets, pooler_ok=pooler_ok)

    return _through(places, "configure", of_shard, of_router, keeps=not dry_run)


def _refuse_to_drop(
    fleet: Fleet, secrets: Callable[[str], str], *, pooler_ok: bool
) -> None:
    """If one shard would refuse the change, refuse it before any shard is changed."""
    try:
        changes = configure_fleet(fleet, secrets, dry_run=True, pooler_ok=pooler_ok)
    except FleetError as error:
        changes = error.done
    refused = [
        f"{name}: {each}"
        for name, words in changes.items()
        for each in words
        if "refused without" in each
    ]
    if refused:
        raise OperatorError(for_fleet("\n".join(refused)))


def plan_fleet(  # noqa: PLR0913 - the options of three commands
    fleet: Fleet,
    secrets: Callable[[str], str],
    act: Act = "setup",
    *,
    drop_queues: bool = False,
    repair_too: bool = False,
    pooler_ok: bool = False,
) -> dict[str, str]:
    """Return the scripts for psql of an act, and run none of them.

    They hold no password: the router's takes the passwords from a variable of psql.

    Args:
        fleet: The fleet's document.
        secrets: As ``setup_fleet``.
        act: The name of the act.
        drop_queues: As ``configure``.
        repair_too: As ``upgrade``.
        pooler_ok: As ``setup``.

    Returns:
        The script, by the name of the shard or the router.

    Raises:
        SecretNotFound: A secret is missing, or cannot be used.
        OperatorError: The document does not fit the fleet that is there.
        JobsError: The router refuses.
        FleetError: A shard failed, or would refuse.
        psycopg.Error: The router cannot be reached.
    """
    places = Places.of(fleet, secrets, pooler_ok)
    plan = partial(_plan.plan, drop_queues=drop_queues, repair_too=repair_too)

    def of_shard(number: int, seen: _Seen) -> str:
        given = fleet.shard(number), places.shards[number]
        found = plan(*given, act, pooler_ok=pooler_ok)
        if act == "setup" and seen.marks[number] != places.mark(number):
            marking = Part("which shard it is", (places.marking(number),))
            found = replace(found, parts=(*found.parts, marking))
        return found.script()

    def of_router(connection: Connection, _: _Seen) -> str:
        words = _loaded(connection, places, _DONE, keeps=False)
        if words and places.passwords:
            words += ("first: \\set passwords `cat FILE`, a JSON object by caller",)
        parts = (Part("the router", _router.for_psql(places), words),) if words else ()
        key = operator_key(places.schema)
        return _plan.Plan(act, places.schema, parts, key).script()

    return _through(places, act, of_shard, of_router, keeps=False)


def check_fleet(
    fleet: Fleet, secrets: Callable[[str], str], *, pooler_ok: bool = False
) -> dict[str, list[Finding]]:
    """List every difference of the shards and of the router, and change nothing.

    The router's part also calls each shard as each declared caller.

    Args:
        fleet: The fleet's document.
        secrets: As ``setup_fleet``.
        pooler_ok: As ``setup``.

    Returns:
        The differences, by the name of the shard or the router.

    Raises:
        SecretNotFound: A secret is missing, or cannot be used.
        OperatorError: The router is not set up, or the document does not fit it.
        JobsError: The router refuses.
        FleetError: A shard cannot be checked.
        psycopg.Error: The router cannot be reached.
    """
    places = Places.of(fleet, secrets, pooler_ok)

    def of_shard(number: int, seen: _Seen) -> list[Finding]:
        given = fleet.shard(number), places.shards[number]
        found = [*_worded(_plan.check(*given, pooler_ok=pooler_ok))]
        if seen.marks[number] != places.mark(number):
            what = f"schema {places.schema} is not marked as {places.mark(number)}"
            found.append(Finding(what, "lenso-jobs fleet setup", finding=""))
        return found

    def of_router(connection: Connection, seen: _Seen) -> list[Finding]:
        words = _loaded(connection, places, _FOUND, keeps=False)
        found = [
            Finding(each, "lenso-jobs fleet upgrade", finding="") for each in words
        ]
        # Before the functions are there, each call would fail.
        return found or [*_unreached(places, seen)]

    return _through(places, "upgrade", of_shard, of_router, keeps=False)


@dataclass(slots=True)
class _Seen:
    """What the shards were before anything was done."""

    servers: dict[int | None, str] = field(default_factory=dict)
    """Which server and database each is, the router as None; those that are reached."""
    marks: dict[int, str | None] = field(default_factory=dict)
    is_known: bool = False
    """Whether the router has been set up."""
    errors: dict[str, Exception] = field(default_factory=dict)


def _through(  # noqa: PLR0913 - two functions, and how they are used
    places: Places,
    act: Act,
    of_shard: Callable[[int, _Seen], T],
    of_router: Callable[[Connection, _Seen], T],
    *,
    say: Callable[[str], None] = silent,
    keeps: bool = True,
) -> dict[str, T]:
    """Do an act on each shard, then on the router.

    An act that *keeps* its changes stops before the router if a shard failed.
    """
    done: dict[str, T] = {}
    with connected(places.router, pooler_ok=places.pooler_ok) as connection:
        # A migration of a shard may take hours.
        connection.execute("set idle_session_timeout = 0")
        alone = partial(exclusively, connection, places.schema, say)
        with alone() if keeps else nullcontext():
            with alone():
                seen = _look(connection, places, act)
            errors = seen.errors
            for number in seen.marks:
                name = places.name(number)
                try:
                    done[name] = of_shard(number, seen)
                except (JobsError, OperatorError, psycopg.Error) as error:
                    errors[name] = error
            if not (errors and keeps):
                with alone():
                    done[places.name()] = of_router(connection, seen)
    if errors:
        raise FleetError(done, errors)
    return done


def _look(connection: Connection, places: Places, act: Act) -> _Seen:
    """Refuse what does not fit, before anything is changed."""
    seen = _Seen()
    seen.servers[None] = _identified(connection, places)[0]
    seen.is_known = is_router(connection, places.schema)
    if not seen.is_known and act != "setup":
        raise OperatorError(
            f"the router of {places.schema} is not set up; run: lenso-jobs fleet setup"
        )
    for number, conninfo in enumerate(places.shards):
        name = places.name(number)
        try:
            with connected(
                conninfo, read_only=True, pooler_ok=places.pooler_ok
            ) as shard:
                fault = _fault(shard, places, number, seen, act)
        except (OperatorError, psycopg.Error) as error:
            seen.errors[name] = error
            continue
        if fault is not None:
            raise OperatorError(f"{name} {fault}")
    _router.refuse(connection, places)
    made_for = _router.version(connection, places.schema)
    if act == "configure" and made_for != newest(released()):
        # It would get the functions of this release before the shards have theirs.
        raise OperatorError(
            f"the router of {places.schema} is of another release; run: lenso-jobs fleet "
            "upgrade"
        )
    return seen


def _fault(
    shard: Connection, places: Places, number: int, seen: _Seen, act: Act
) -> str | None:
    """Note what a shard is; say why it cannot be that of this number, or None."""
    schema = places.schema
    server, mark, has_instance = _identified(shard, places)
    is_new = mark is None and not seen.is_known and len(places.shards) > 1
    if is_router(shard, schema):
        return "is the router of a fleet"
    shared = _shared(places, seen, server)
    if shared is not None:
        return shared
    if SHARD_MARK.fullmatch(mark or "") and mark != places.mark(number):
        return f"is {mark} already: keep the number and the order of the shards"
    if seen.is_known and not has_instance and act == "setup":
        return (
            "has no Instance, but the fleet has its jobs: bring its data here first. "
            "If they are lost, run lenso-jobs setup with the document of this shard"
        )
    if is_new and has_instance and _has_rows(shard, schema):
        return (
            "has jobs from before the fleet, and their keys may belong to another shard: "
            "begin with a database that has no jobs"
        )
    seen.servers[number], seen.marks[number] = server, mark
    return None


def _shared(places: Places, seen: _Seen, server: str) -> str | None:
    """Say which other part of the fleet is on this server, or None."""
    for number, other in seen.servers.items():
        if other == server:
            return (
                f"is the database of {places.name(number)}, too: give each a server of "
                "its own"
            )
        if other.split()[::2] == server.split()[::2]:
            return (
                f"is on the server of {places.name(number)}: each needs a server of its "
                "own, because roles belong to the server"
            )
    return None


def _identified(connection: Connection, places: Places) -> tuple[str, str | None, bool]:
    """Return which server and database it is, the mark, and whether it has a table job."""
    of = places.fleet.instance.owner, places.schema
    ((server, mark, has_instance),) = connection.execute(_SHARD, of).fetchall()
    return server, mark, has_instance


def _has_rows(connection: Connection, schema: str) -> bool:
    statement = sql.SQL("select from {} limit 1").format(sql.Identifier(schema, "job"))
    return connection.execute(statement).fetchone() is not None


def _worded(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(replace(each, remedy=for_fleet(each.remedy)) for each in findings)


def _named(name: str, say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda sentence: say(f"{name}: {sentence}")


# The router.


def _reported(places: Places) -> Callable[[Connection, _Seen], Report]:
    def of_router(connection: Connection, _: _Seen) -> Report:
        is_new = not is_router(connection, places.schema)
        words = _loaded(connection, places, _DONE, keeps=True)
        return Report(rights=("the router is made",) if is_new else words)

    return of_router


def _loaded(
    connection: Connection, places: Places, words: Mapping[str, str], *, keeps: bool
) -> tuple[str, ...]:
    """Load the router's functions; return in words what changes."""
    load = partial(_router.load, connection, places, keeps=keeps)
    found = patiently(load, "the router", silent)
    return tuple(f"{name} {words[word]}" for name, word in found)


def _unreached(places: Places, seen: _Seen) -> Iterator[Finding]:
    """Call each shard from the router, as each declared caller."""
    fleet = places.fleet
    schema = sql.Identifier(places.schema)
    ask = sql.SQL("select item from {}._shard_inspect(array[%s], gen_random_uuid())")
    which = sql.SQL("select item from {}._shard_server(array[%s])")
    mistaken = set()
    for caller in declared(fleet.instance):
        # One session for each caller: PL/Proxy keeps its connections to the shards.
        with connected(places.router, pooler_ok=places.pooler_ok) as connection:
            connection.execute("select set_config('role', %s, false)", (caller,))
            # PL/Proxy itself has no time limit.
            connection.execute("set statement_timeout = '20s'")
            for number in seen.marks:
                error = _refusal_of(connection, ask.format(schema), number)
                if error is None:
                    ((found,),) = connection.execute(
                        which.format(schema), (number,)
                    ).fetchall()
                    if found != seen.servers[number] and number not in mistaken:
                        mistaken.add(number)
                        yield Finding(
                            f"shard {number} is another database for the router's server "
                            "than for this command",
                            f"name a host in the secret {fleet.shards[number]} that both "
                            "reach; then: lenso-jobs fleet upgrade",
                            finding="",
                        )
                    continue
                what = f"caller {caller} cannot reach shard {number}: {error}"
                is_let_in = error.startswith("REMOTE ")
                yield Finding(what, _CONFIGURE if is_let_in else _LET_IN, finding="")


def _refusal_of(
    connection: Connection, statement: sql.Composed, number: int
) -> str | None:
    """Ask a shard for a job that is not there; None if it says so."""
    try:
        connection.execute(statement, (number,))
    except psycopg.Error as error:
        if error.sqlstate == "LJ006":
            return None
        said = (error.diag.message_primary or str(error)).partition("\n")[0]
        return re.sub(r"^.*?\[[^]]*\] (PQ\w+: )?", "", said)
    return "it has the job of a random id"
