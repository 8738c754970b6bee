"""Bringing an Instance to what its document and this release say."""

from __future__ import annotations

import getpass
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from yoyo import get_backend, read_migrations
from yoyo.exceptions import LockTimeout

from lenso_jobs._assets import asset_dir
from lenso_jobs.errors import JobsError, Translated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lenso_jobs.config import Configuration

# Two set-ups that make or grant the same role at once: the loser is told one of these,
# and finds the work done when it looks again.
_COLLISIONS = {"23505", "40P01", "42710", "42P06", "XX000"}
_TRIES = 10
_PATIENCE = "60s"


class OperatorError(RuntimeError):
    """An act could not be done; the message says why and what to do next."""


@dataclass(frozen=True, slots=True)
class SetupReport:
    """What a set-up found to do."""

    migrations: tuple[str, ...]
    """The migrations it applied, in order."""
    configured: bool
    """Whether the stored configuration changed."""


def setup(
    configuration: Configuration, conninfo: str, *, break_lock: bool = False
) -> SetupReport:
    """Make schema, roles and grants, apply the migrations, store the configuration.

    Safe to run again, and by two operators at once: the second waits for the first.

    Args:
        configuration: The Instance's document.
        conninfo: The connection string of a role that may create roles, and schemas in
            the database.
        break_lock: Remove the migration tool's lock, left behind by a killed process.

    Raises:
        JobsError: The document or the database is refused; the hint says what to do.
        OperatorError: The migrations are locked.
        psycopg.Error: The server cannot be reached, or refused a statement.
    """
    with connected(conninfo) as connection, exclusively(connection, configuration):
        bootstrap(connection, configuration)
        applied = _migrate(configuration, conninfo, break_lock=break_lock)
        return SetupReport(applied, _configure(connection, configuration))


def configure(configuration: Configuration, conninfo: str) -> bool:
    """Store a changed document: policy, queues, callers and their memberships.

    Answers whether anything changed.

    Raises:
        JobsError: The change is refused, for instance because a queue that the document
            leaves out still has live jobs.
        psycopg.Error: The server cannot be reached, or refused a statement.
    """
    # One transaction: what the Instance refuses must not leave memberships behind.
    with (
        connected(conninfo) as connection,
        exclusively(connection, configuration),
        connection.transaction(),
    ):
        bootstrap(connection, configuration)
        return _configure(connection, configuration)


@contextmanager
def connected(conninfo: str) -> Iterator[psycopg.Connection[Any]]:
    """Open an operator's session, every statement its own transaction.

    Raises:
        OperatorError: A pooler stands in between.
    """
    with psycopg.connect(
        conninfo, autocommit=True, application_name="lenso-jobs"
    ) as connection:
        # What is set here would stay in a session that others use after us.
        row = connection.execute("select pg_catalog.pg_backend_pid()").fetchone()
        if row != (connection.info.backend_pid,):
            raise OperatorError(
                "this is a connection through a pooler, whose sessions are shared: "
                "give set-up, configure and check the server's own address"
            )
        # Before anything else is called: whoever may create in a schema of the operator's
        # own search_path could put a closer match in front of PostgreSQL's functions.
        connection.execute("set search_path = pg_catalog, pg_temp")
        connection.execute("set default_transaction_isolation = 'read committed'")
        connection.execute(f"set lock_timeout = '{_PATIENCE}'")
        yield connection


@contextmanager
def exclusively(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[None]:
    """Wait for any other operator at work on this Instance, but not for ever.

    Anybody who may connect can hold the key, so the wait has an end.
    """
    key = f"lenso-jobs operator {configuration.schema_}"
    try:
        connection.execute("select pg_advisory_lock(hashtextextended(%s, 0))", (key,))
    except psycopg.errors.LockNotAvailable:
        raise OperatorError(
            f"another session has been at work on {configuration.schema_} for "
            f"{_PATIENCE}; look for its advisory lock in pg_locks, and run this again"
        ) from None
    try:
        yield
    finally:
        if not connection.broken:
            connection.execute(
                "select pg_advisory_unlock(hashtextextended(%s, 0))", (key,)
            )


def bootstrap(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> None:
    """Run sql/bootstrap.sql, again where another Instance's set-up got in between."""
    script = (asset_dir("sql") / "bootstrap.sql").read_text(encoding="utf-8")
    for attempt in range(_TRIES):
        try:
            with Translated(), connection.transaction():
                connection.execute(
                    "select set_config('lenso_jobs.document', %s, true)",
                    (configuration.document(),),
                )
                connection.execute(script.encode())
        except psycopg.Error as error:
            if error.sqlstate not in _COLLISIONS or attempt == _TRIES - 1:
                raise
        else:
            return


def _migrate(
    configuration: Configuration, conninfo: str, *, break_lock: bool
) -> tuple[str, ...]:
    # The tool records who applied a migration after it has committed, and fails there
    # where the account has no name.
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = "operator"

    # Acting as the owner: what the tool keeps belongs to the Instance, not to whoever
    # happened to run it first.
    parameters = {
        **{k: str(v) for k, v in conninfo_to_dict(conninfo).items() if v is not None},
        "application_name": "lenso-jobs",
        # The tool puts it into its SET search_path as it is.
        "schema": f'"{configuration.schema_}"',
    }
    parameters["options"] = (
        f"{parameters.get('options', '')} -c role={configuration.owner}".strip()
    )
    # The database too is a parameter: in its own place it would not be decoded.
    backend = get_backend(f"postgresql+psycopg:///?{urlencode(parameters)}")
    try:
        migrations = read_migrations(str(asset_dir("migrations")))
        if break_lock:
            backend.break_lock()
        with backend.lock():
            pending = backend.to_apply(migrations)
            names = tuple(migration.id for migration in pending)
            backend.apply_migrations(pending)
    except LockTimeout:
        raise OperatorError(
            f"the migrations of {configuration.schema_} are locked by another process "
            "or by one that was killed; if none is at work, run: "
            "lenso-jobs setup --break-lock"
        ) from None
    finally:
        backend.connection.close()
    return names


def _configure(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> bool:
    statement = sql.SQL("select {}.configure(%s::jsonb)").format(
        sql.Identifier(configuration.schema_)
    )
    try:
        with Translated():
            row = connection.execute(statement, (configuration.document(),)).fetchone()
    except (psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName):
        raise OperatorError(
            f"schema {configuration.schema_} holds no Instance; run: lenso-jobs setup"
        ) from None
    return bool(row and row[0])


__all__ = [
    "JobsError",
    "OperatorError",
    "SetupReport",
    "bootstrap",
    "configure",
    "connected",
    "exclusively",
    "setup",
]
