"""Bringing an Instance to what its document and this release say."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from lenso_jobs.operator._changes import changes
from lenso_jobs.operator._migrations import require_known, require_version, unlock
from lenso_jobs.operator._parts import Part, run
from lenso_jobs.operator._plan import (
    bootstrapping,
    configuring,
    migrating,
    require_instance,
    storing,
)
from lenso_jobs.operator._repair import repairing
from lenso_jobs.operator._roles import require_named
from lenso_jobs.operator._session import (
    OperatorError,
    connected,
    exclusively,
    silent,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lenso_jobs.config import Configuration

# Two set-ups that make or grant the same role at once: the loser is told one of these,
# and finds the work done when it looks again.
_COLLISIONS = {"23505", "40P01", "42710", "42P06", "XX000"}
# Whoever was waited for may be gone the next time.
_CONTENDED = {"55P03", "40P01"}
_TRIES = 10


@dataclass(frozen=True, slots=True)
class SetupReport:
    """What a set-up found to do."""

    migrations: tuple[str, ...]
    """The migrations it applied, in order."""
    configured: bool
    """Whether the stored configuration changed."""
    recorded: tuple[str, ...] = ()
    """The migrations that had been applied, and were only recorded."""


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """What an upgrade found to do."""

    migrations: tuple[str, ...]
    """The migrations it applied, in order."""
    repaired: tuple[str, ...] = ()
    """What it mended: the differences that ``check`` would have found."""
    recorded: tuple[str, ...] = ()
    """The migrations that had been applied, and were only recorded."""


def setup(
    configuration: Configuration,
    conninfo: str,
    *,
    break_lock: bool = False,
    say: Callable[[str], None] = silent,
) -> SetupReport:
    """Make schema, roles and grants, apply the migrations, store the configuration.

    Safe to run again, and by two operators at once: the second waits for the first.

    Args:
        configuration: The Instance's document.
        conninfo: The connection string of a role that may create roles, and schemas in
            the database.
        break_lock: Remove the migration tool's lock, left behind by a killed process.
        say: Is told, in sentences, of what takes time.

    Raises:
        JobsError: The document or the database is refused; the hint says what to do.
        OperatorError: The migrations are locked, or the Instance is a newer release's,
            or was renamed or damaged.
        psycopg.Error: The server cannot be reached, or refused a statement.
    """
    with (
        connected(conninfo, configuration) as connection,
        exclusively(connection, configuration),
    ):
        require_named(connection, configuration)
        bootstrap(connection, configuration)
        applied, recorded = _migrate(
            connection, configuration, say, instance=False, break_lock=break_lock
        )
        with _whole(configuration.schema_):
            stored = bool(run(connection, storing(configuration)))
        require_version(connection, configuration.schema_)
        return SetupReport(applied, stored, recorded)


def upgrade(
    configuration: Configuration,
    conninfo: str,
    *,
    repair_too: bool = False,
    break_lock: bool = False,
    say: Callable[[str], None] = silent,
) -> UpgradeReport:
    """Apply the pending migrations while callers and workers go on.

    No lock that others wait behind is waited for longer than 5 s; it is tried again, up
    to ten times. Safe to run again, whenever it was killed.

    Args:
        configuration: The Instance's document; of it, schema and roles count.
        conninfo: The connection string of a superuser or a member of the owner.
        repair_too: Make the Instance again what this release says, as ``check`` finds
            that it is not: roles, functions, triggers, indexes, grants. What would take
            data with it is left.
        break_lock: Remove the migration tool's lock, left behind by a killed process.
        say: Is told, in sentences, of what takes time.

    Raises:
        JobsError: The Instance refuses.
        OperatorError: There is no Instance, or a newer release's; the migrations are
            locked; or a lock was not to be had.
        psycopg.Error: The server cannot be reached, or refused a statement.
    """
    with (
        connected(conninfo, configuration) as connection,
        exclusively(connection, configuration),
    ):
        require_known(connection, configuration.schema_, instance=True)
        if repair_too:
            require_named(connection, configuration)
            if changes(connection, configuration).roles:
                bootstrap(connection, configuration)
        applied, recorded = _migrate(
            connection, configuration, say, instance=True, break_lock=break_lock
        )
        repaired = _repair(connection, configuration, say) if repair_too else ()
        return UpgradeReport(applied, repaired, recorded)


def configure(
    configuration: Configuration, conninfo: str, *, drop_queues: bool = False
) -> bool:
    """Store a changed document: policy, queues, callers and their memberships.

    Answers whether anything changed. All or nothing.

    Args:
        configuration: The changed document.
        conninfo: As ``setup``.
        drop_queues: Drop queues that the document leaves out although they have live
            jobs. Those stay, and wait until their queue is declared again.

    Raises:
        JobsError: The change is refused, for instance because a queue that the document
            leaves out still has live jobs.
        OperatorError: There is no Instance, or an older one than this needs.
        psycopg.Error: The server cannot be reached, or refused a statement.
    """
    schema = configuration.schema_
    with (
        connected(conninfo, configuration) as connection,
        exclusively(connection, configuration),
    ):
        require_named(connection, configuration)
        require_instance(connection, schema)
        part = configuring(configuration, drop_queues=drop_queues)
        with _whole(schema):
            return bool(_colliding(connection, part))


@contextmanager
def _whole(schema: str) -> Iterator[None]:
    """Say what is the matter where something is missed."""
    try:
        yield
    except (
        psycopg.errors.UndefinedFunction,
        psycopg.errors.UndefinedTable,
        psycopg.errors.UndefinedColumn,
    ) as error:
        raise OperatorError(
            f"schema {schema} is not as this release has it: "
            f"{error.diag.message_primary}; lenso-jobs check says what mends it"
        ) from None


def bootstrap(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> None:
    """Run sql/bootstrap.sql."""
    _colliding(connection, bootstrapping(configuration))


def patiently(act: Callable[[], Any], what: str, say: Callable[[str], None]) -> Any:  # noqa: ANN401
    """Do what takes locks, again while others hold them.

    Raises:
        OperatorError: They held them every time.
    """
    for attempt in range(1, _TRIES + 1):
        try:
            return act()
        except psycopg.Error as error:
            if error.sqlstate not in _CONTENDED:
                raise
            if attempt == _TRIES:
                raise OperatorError(
                    f"{what} could not get a lock {_TRIES} times "
                    f"({error.diag.message_primary}); look in pg_stat_activity for old "
                    "transactions, end them, and run this again: what was done stays"
                ) from None
            say(
                f"{what}: {error.diag.message_primary}; again in {PAUSE_SECONDS:g} s "
                f"({attempt} of {_TRIES})"
            )
        time.sleep(PAUSE_SECONDS)
    raise AssertionError


PAUSE_SECONDS = 3.0
"""How long callers and workers are let through before a lock is asked for again."""


def _migrate(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    say: Callable[[str], None],
    *,
    instance: bool,
    break_lock: bool,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    unlock(connection, configuration, say, break_lock=break_lock)
    parts = tuple(migrating(connection, configuration, instance=instance))
    _run_patiently(connection, parts, say)
    return (
        tuple(part.applies for part in parts if part.applies),
        tuple(part.records for part in parts if part.records),
    )


def _repair(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    say: Callable[[str], None],
) -> tuple[str, ...]:
    repaired: dict[str, None] = {}
    # Twice: what is made anew is also given what ALTER DEFAULT PRIVILEGES says.
    for _ in range(2):
        try:
            parts = repairing(connection, configuration)
        except OperatorError:
            if repaired:
                break  # what was in the way of a name is for check to tell
            raise
        with _whole(configuration.schema_):
            _run_patiently(connection, parts, say)
        repaired |= dict.fromkeys(what for part in parts for what in part.changes)
    return tuple(repaired)


def _run_patiently(
    connection: psycopg.Connection[Any],
    parts: tuple[Part, ...],
    say: Callable[[str], None],
) -> None:
    for part in parts:
        patiently(lambda part=part: run(connection, part), part.title, say)  # type: ignore[misc]


def _colliding(connection: psycopg.Connection[Any], part: Part) -> Any:  # noqa: ANN401
    """Run a part, again where another Instance's set-up got in between."""
    for attempt in range(_TRIES):
        try:
            return run(connection, part)
        except psycopg.Error as error:
            if error.sqlstate not in _COLLISIONS or attempt == _TRIES - 1:
                raise
    raise AssertionError
