"""The SQL that set-up, upgrade and configure send, as one thing to print or to run."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import psycopg
from psycopg import sql

from lenso_jobs._assets import asset_dir
from lenso_jobs.operator._changes import Changes, changes, groups_of
from lenso_jobs.operator._migrations import (
    YOYO_TABLES,
    Migration,
    bookkeeping,
    installed_version,
    locker,
    mark,
    opening,
    require_known,
    unlocking,
)
from lenso_jobs.operator._parts import Part
from lenso_jobs.operator._repair import repairing
from lenso_jobs.operator._roles import (
    missing,
    require_named,
    require_own,
)
from lenso_jobs.operator._session import (
    PATIENCE_SECONDS,
    SETTINGS,
    CannotTell,
    OperatorError,
    connected,
    holds,
    operator_key,
    taken_back,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lenso_jobs.config import Configuration

Act = Literal["setup", "upgrade", "configure"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What an act would send, in order."""

    act: Act
    schema: str
    parts: tuple[Part, ...]
    key: str

    def script(self) -> str:
        """Write it for psql; a comment where there is nothing to do."""
        head = f"-- lenso-jobs {self.act}, Instance {self.schema}\n"
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


def plan(
    configuration: Configuration,
    conninfo: str,
    act: Act = "setup",
    *,
    drop_queues: bool = False,
    repair_too: bool = False,
) -> Plan:
    """Find what an act would do, and do none of it.

    Args:
        configuration: The Instance's document.
        conninfo: The connection string that the act would use.
        act: Which.
        drop_queues: As ``configure``.
        repair_too: As ``upgrade``. Only then does it write, in a transaction that is
            rolled back: the release is loaded beside the Instance, as ``check`` does.

    Raises:
        OperatorError: The act would be refused, or the role may not look; or what would
            be repaired cannot be told yet, since migrations are pending.
        psycopg.Error: The server cannot be reached.
    """
    with _looking(conninfo, configuration, read_only=not repair_too) as connection:
        parts = tuple(
            _upgrading(connection, configuration, repair_too=repair_too)
            if act == "upgrade"
            else _parts(connection, configuration, act, drop_queues=drop_queues)
        )
    return Plan(act, configuration.schema_, parts, operator_key(configuration))


def find_changes(
    configuration: Configuration, conninfo: str, *, drop_queues: bool = False
) -> Changes:
    """Say in words what ``configure`` would change, and change nothing.

    Raises:
        OperatorError: There is no Instance, or the role may not look.
        psycopg.Error: The server cannot be reached.
    """
    with _looking(conninfo, configuration) as connection:
        require_named(connection, configuration)
        require_instance(connection, configuration.schema_)
        return changes(connection, configuration, drop_queues=drop_queues)


@contextmanager
def _looking(
    conninfo: str, configuration: Configuration, *, read_only: bool = True
) -> Iterator[psycopg.Connection[Any]]:
    who = (
        f"use a superuser or a member of {configuration.owner}, which setup makes of "
        "whoever runs it"
    )
    with (
        connected(conninfo, configuration, read_only=read_only) as connection,
        taken_back(connection, who, writes=not read_only),
    ):
        yield connection


def _parts(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    act: Act,
    *,
    drop_queues: bool,
) -> Iterator[Part]:
    require_own(connection, configuration)
    found = changes(connection, configuration, drop_queues=drop_queues)
    if act == "configure":
        require_instance(connection, configuration.schema_)
        if found:
            words = (*found.roles, *found.stored)
            yield configuring(configuration, words, drop_queues=drop_queues)
        return
    migrations = tuple(migrating(connection, configuration, instance=False))
    # All of it is sent again, since it refuses before it changes anything.
    if found or migrations:
        yield bootstrapping(configuration, found.roles)
        yield from migrations
        yield storing(configuration, found.stored)


def _upgrading(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    *,
    repair_too: bool,
) -> Iterator[Part]:
    migrations = tuple(migrating(connection, configuration, instance=True))
    if not repair_too:
        yield from migrations
        return
    if any(part.applies for part in migrations):
        raise _untold("migrations are pending", "upgrade")
    require_named(connection, configuration)
    if missing(connection, *groups_of(configuration).values()):
        raise _untold("group roles are missing", "setup")
    roles = changes(connection, configuration).roles
    if roles:
        yield bootstrapping(configuration, roles)
    yield from migrations
    yield from repairing(connection, configuration)


def _untold(state: str, command: str) -> CannotTell:
    return CannotTell(
        f"what would be repaired cannot be told while {state}; "
        f"run: lenso-jobs {command}"
    )


def require_instance(connection: psycopg.Connection[Any], schema: str) -> None:
    """Refuse where there is nothing to configure.

    Raises:
        OperatorError: There is no Instance.
    """
    if not holds(connection, schema, "instance"):
        raise OperatorError(f"schema {schema} holds no Instance; run: lenso-jobs setup")


def bootstrapping(configuration: Configuration, words: tuple[str, ...] = ()) -> Part:
    """Prepare bootstrap.sql: schema, roles and memberships."""
    return Part("bootstrap.sql", _bootstrap(configuration), words)


def storing(configuration: Configuration, words: tuple[str, ...] = ()) -> Part:
    """Prepare the function configure."""
    return Part("configure", (_configure(configuration),), words)


def configuring(
    configuration: Configuration,
    words: tuple[str, ...] = (),
    *,
    drop_queues: bool = False,
) -> Part:
    """Prepare both together: what is refused must not leave memberships behind."""
    store = _configure(configuration, drop_queues=drop_queues)
    statements = (*_bootstrap(configuration), store)
    return Part("bootstrap.sql and configure", statements, words)


def migrating(
    connection: psycopg.Connection[Any], configuration: Configuration, *, instance: bool
) -> Iterator[Part]:
    """Prepare the pending migrations.

    Raises:
        OperatorError: As ``require_known``.
    """
    schema = configuration.schema_
    pending = require_known(connection, schema, instance=instance)
    pid = locker(connection, schema)
    if pid is not None:
        yield Part(
            "the lock of the migration tool",
            (unlocking(configuration),),
            (f"process {pid} left it behind; refused where it may be at work",),
        )
    if not holds(connection, schema, *YOYO_TABLES):
        yield Part("the tables of the migration tool", (bookkeeping(configuration),))
    version = installed_version(connection, schema)
    for migration in pending:
        if migration.number > version:
            yield from applying(migration, configuration)
        else:
            # Where something was renamed since, it would be made anew, and be empty.
            yield _recording(migration, configuration, migration.name)


def applying(migration: Migration, configuration: Configuration) -> Iterator[Part]:
    """Prepare one migration, and the record of it."""
    title = f"migration {migration.name}"
    if migration.transactional:
        yield Part(
            title,
            (
                opening(configuration),
                *migration.statements,
                mark(migration, configuration),
            ),
            applies=migration.name,
        )
        return
    names = {
        "owner": sql.Identifier(configuration.owner),
        "schema": sql.Identifier(configuration.schema_),
    }
    yield Part(
        title,
        (
            sql.SQL("set role {owner}").format(**names).as_string(None),
            sql.SQL("set search_path = {schema}").format(**names).as_string(None),
            *migration.statements,
            "reset role",
            *SETTINGS,
        ),
        transactional=False,
        applies=migration.name,
    )
    yield _recording(migration, configuration)


def _recording(
    migration: Migration, configuration: Configuration, records: str = ""
) -> Part:
    return Part(
        f"the record of migration {migration.name}",
        (opening(configuration), mark(migration, configuration)),
        records=records,
    )


def _bootstrap(configuration: Configuration) -> tuple[str, ...]:
    document = sql.SQL("select set_config('lenso_jobs.document', {}, true)").format(
        sql.Literal(configuration.document())
    )
    script = (asset_dir("sql") / "bootstrap.sql").read_text(encoding="utf-8")
    return document.as_string(None), script


def _configure(configuration: Configuration, *, drop_queues: bool = False) -> str:
    return (
        sql.SQL("select {}.configure({}::jsonb{})")
        .format(
            sql.Identifier(configuration.schema_),
            sql.Literal(configuration.document()),
            sql.SQL(", true" if drop_queues else ""),
        )
        .as_string(None)
    )


def _written(number: int, part: Part) -> str:
    lines = [f"-- {number}. {part.title}"]
    # A role's name may hold anything, a line break too.
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
