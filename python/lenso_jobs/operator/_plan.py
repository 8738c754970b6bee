"""What is wrong with an Instance, and what an act would send; nothing is changed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from psycopg import sql

from lenso_jobs.operator._catalogue import load
from lenso_jobs.operator._findings import (
    Changes,
    changes,
    faults,
    findings,
    object_findings,
    refusal,
    was_given_away,
)
from lenso_jobs.operator._parts import Act, Part, bootstrapping, send, steps
from lenso_jobs.operator._session import (
    PATIENCE_SECONDS,
    SETTINGS,
    CannotTell,
    OperatorError,
    connected,
    operator_key,
    rolled_back,
)
from lenso_jobs.operator._state import Catalogue, State, read

if TYPE_CHECKING:
    from collections.abc import Collection

    import psycopg

    from lenso_jobs.config import Configuration
    from lenso_jobs.operator._objects import Finding


@dataclass(frozen=True, slots=True)
class Plan:
    """The statements of an act, in order."""

    act: Act
    schema: str
    parts: tuple[Part, ...]
    key: str
    uncompared: str = ""
    """Why the rights could not be compared with this release's, if so."""

    def script(self) -> str:
        """Write it for psql; a comment where there is nothing to do."""
        head = f"-- lenso-jobs {self.act}, Instance {self.schema}\n"
        if self.uncompared:
            head += f"-- {uncompared(self.uncompared)}\n"
        if not self.parts:
            return f"{head}-- Nothing is to be done.\n"
        # As exclusively waits, and for the same reason not in one statement.
        lock = sql.SQL(
            """\
do $$ declare v_end timestamptz := clock_timestamp() + interval {patience}; begin
    while not pg_try_advisory_lock(hashtextextended({key}, 0)) loop
        commit;
        if clock_timestamp() > v_end then
            raise 'another session is at work on this Instance' using errcode = '55P03';
        end if;
        perform pg_sleep(0.5);
    end loop;
end $$;
"""
        ).format(key=sql.Literal(self.key), patience=f"{PATIENCE_SECONDS:.0f} s")
        preamble = (
            f"{head}-- For psql, connected to the server itself: psql -X -f FILE\n"
            "\\set ON_ERROR_STOP on\n\\encoding UTF8\n\n"
            + "".join(f"{setting};\n" for setting in SETTINGS)
            + "-- Operators at work on one Instance wait for each other.\n"
            + lock.as_string(None)
        )
        parts = (_written(number, part) for number, part in enumerate(self.parts, 1))
        return "\n".join([preamble, *parts])


def check(
    configuration: Configuration, conninfo: str, *, pooler_ok: bool = False
) -> list[Finding]:
    """List every difference; none means the Instance is as release and document say.

    Nothing is changed. The list is in an order in which it can be mended. While
    migrations are pending, only those differences of objects are listed that the
    migrations would meet. While the owner is wrong, no object is compared.

    Args:
        configuration: The Instance's document.
        conninfo: The connection string of a role that owns the Instance, or of a
            superuser; it needs the right to create a schema in the database.
        pooler_ok: As ``setup``.

    Raises:
        OperatorError: There is no Instance, or the role lacks a right.
        psycopg.Error: The server cannot be reached.
    """
    who = "check needs a role that owns the Instance and may create a schema in the database"
    with (
        connected(conninfo, pooler_ok=pooler_ok) as connection,
        rolled_back(connection, who, writes=True),
    ):
        return found(connection, configuration)


def found(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> list[Finding]:
    """List every difference, in a transaction that the caller rolls back."""
    state = read(connection, configuration)
    refused = refusal(state, instance=True)
    if refused and not (was_given_away(state) or state.is_newer):
        raise OperatorError(refused)
    if not state.is_newer:
        state = load(connection, state, configuration)
    return findings(state, configuration)


def plan(  # noqa: PLR0913 - the options of three commands
    configuration: Configuration,
    conninfo: str,
    act: Act = "setup",
    *,
    drop_queues: bool = False,
    repair_too: bool = False,
    pooler_ok: bool = False,
) -> Plan:
    """Return the statements that an act would send, and send none of them.

    For ``setup`` and ``upgrade`` the release is loaded beside the Instance, as ``check``
    does, in a transaction that is rolled back. Missing group roles are made in it, too.
    If the role may not do that, the plan says so, since the act would leave the rights as
    they are. While migrations are pending, it plans them without a repair, and says so.

    Args:
        configuration: The Instance's document.
        conninfo: The connection string that the act would use.
        act: The name of the act.
        drop_queues: As ``configure``.
        repair_too: As ``upgrade``.
        pooler_ok: As ``setup``.

    Raises:
        OperatorError: The act would be refused, or the role may not read what it needs.
        psycopg.Error: The server cannot be reached.
    """
    reason = ""
    with connected(conninfo, read_only=True, pooler_ok=pooler_ok) as connection:
        with rolled_back(connection, _who(configuration), writes=False):
            state = read(connection, configuration)
        require(state, instance=act != "setup", stored=act == "configure")
        if repair_too and any(each.number > state.version for each in state.pending):
            repair_too = False
            reason = "migrations are pending; run this, then plan the repair again"
        if act != "upgrade":
            _require_groups(state)
        if act != "configure" and state.is_ours:
            try:
                makes_groups = repair_too or act == "setup"
                if makes_groups and state.missing(*state.groups.values()):
                    state = _with_groups(connection, state, configuration)
                else:
                    state = loaded(connection, state, configuration)
            except CannotTell as error:
                if repair_too:
                    raise
                reason = reason or str(error)

    def look(*, mended: Collection[str] = (), **_: bool) -> State:
        left = {each.what for each in object_findings(state) if each.finding}
        floors = {each.what for each in faults(state, "object_changed")}
        if {*mended} <= floors or left - {*mended}:
            return state
        return replace(state, catalogue=Catalogue({}, {}, digest_is_stored=False))

    parts = dict.fromkeys(
        part
        for part in steps(
            act, look, configuration, drop_queues=drop_queues, repair_too=repair_too
        )
        if not part.is_idle
    )
    schema = configuration.schema_
    return Plan(act, schema, tuple(parts), operator_key(schema), reason)


def find_changes(
    configuration: Configuration,
    conninfo: str,
    *,
    drop_queues: bool = False,
    pooler_ok: bool = False,
) -> Changes:
    """Return in words what ``configure`` would change, and change nothing.

    Raises:
        OperatorError: There is no Instance, or the role may not read it.
        psycopg.Error: The server cannot be reached.
    """
    with (
        connected(conninfo, read_only=True, pooler_ok=pooler_ok) as connection,
        rolled_back(connection, _who(configuration), writes=False),
    ):
        state = read(connection, configuration)
    require(state, instance=True, stored=True)
    return changes(state, configuration, drop_queues=drop_queues)


def loaded(
    connection: psycopg.Connection[Any], state: State, configuration: Configuration
) -> State:
    """Compare with this release in a transaction of its own, which is rolled back."""
    who = "run lenso-jobs check as a role that may create a schema in the database"
    with rolled_back(connection, who, writes=True):
        return load(connection, state, configuration)


def _with_groups(
    connection: psycopg.Connection[Any], state: State, configuration: Configuration
) -> State:
    """Compare as if the missing group roles were there, which the act would make."""
    who = "run this as a role that may create roles, and a schema in the database"
    with rolled_back(connection, who, writes=True):
        for statement in bootstrapping(configuration, memberships=False).statements:
            send(connection, statement)
        made = load(connection, read(connection, configuration), configuration)
    return replace(state, catalogue=made.catalogue, faults=made.faults)


def uncompared(reason: str) -> str:
    """Say what an upgrade leaves out where it cannot load the release."""
    return f"objects and rights are not compared with this release: {reason}"


def _who(configuration: Configuration) -> str:
    return (
        f"use a superuser or a member of {configuration.owner}; setup makes the role that "
        "runs it a member"
    )


def require(state: State, *, instance: bool, stored: bool = False) -> None:
    """Refuse a schema that is another role's or a newer release's, or is missing."""
    refused = refusal(state, instance=instance, stored=stored)
    if refused is not None:
        raise OperatorError(refused)


def _require_groups(state: State) -> None:
    """Refuse group roles that bootstrap.sql would refuse."""
    for role, place, is_refused in state.elsewhere:
        if is_refused:
            raise OperatorError(
                f"role {role} owns something or has a right in {place}; set role_prefix "
                "in the document if another Instance is there, else revoke it there"
            )


def _written(number: int, part: Part) -> str:
    lines = [f"-- {number}. {part.title}"]
    # The name of a role may hold anything, a line break too.
    lines += [
        f"--    {json.dumps(each, ensure_ascii=False)[1:-1]}" for each in part.changes
    ]
    body = [
        statement if statement.rstrip().endswith(";") else f"{statement};"
        for statement in part.statements
    ]
    if part.transactional:
        body = ["begin;", *body, "commit;"]
    return "\n".join([*lines, *(each.strip("\n") for each in body)]) + "\n"
