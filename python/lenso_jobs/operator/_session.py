"""An operator's session: its own server connection, and alone at its Instance."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from lenso_jobs._assets import asset_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lenso_jobs.config import Configuration

PATIENCE_SECONDS = 60.0
"""How long one operator waits for another, and for a lock outside of migrations."""

# Whatever is set here is printed by plan too, at the head of its script.
SETTINGS = (
    # Before anything else is called: whoever may create in a schema of the operator's
    # own search_path could put a closer match in front of PostgreSQL's functions.
    "set search_path = pg_catalog, pg_temp",
    "set default_transaction_isolation = 'read committed'",
    # What the server describes is compared by name.
    "set quote_all_identifiers = off",
    # Off, it makes an error of every read of a table whose row security is forced.
    "set row_security = on",
    # An index waits as long as it must, and the waits for locks have their own end.
    "set statement_timeout = 0",
    f"set lock_timeout = '{PATIENCE_SECONDS:.0f}s'",
)


class OperatorError(RuntimeError):
    """An act could not be done; the message says why and what to do next."""


class CannotTell(OperatorError):
    """What is asked cannot be told here, now, or by this role."""


def silent(_sentence: str) -> None:
    """Say nothing of what goes on."""


@contextmanager
def connected(
    conninfo: str, configuration: Configuration, *, read_only: bool = False
) -> Iterator[psycopg.Connection[Any]]:
    """Open an operator's session, every statement its own transaction.

    Raises:
        OperatorError: A pooler stands in between.
    """
    # Never prepared: what is tried again and again may be several statements.
    with psycopg.connect(
        conninfo,
        autocommit=True,
        prepare_threshold=None,
        # What is sent as bytes is.
        client_encoding="utf8",
        application_name="lenso-jobs",
    ) as connection:
        # What is set here would stay in a session that others use after us.
        row = connection.execute("select pg_catalog.pg_backend_pid()").fetchone()
        if row != (connection.info.backend_pid,):
            raise OperatorError(
                "this is a connection through a pooler, whose sessions are shared: "
                "give what operates on the Instance the server's own address"
            )
        for setting in SETTINGS:
            connection.execute(setting.encode())
        # For holds.
        connection.execute(
            "select set_config('lenso_jobs.owner', %s, false)", (configuration.owner,)
        )
        if read_only:
            connection.execute("set default_transaction_read_only = on")
        yield connection


@contextmanager
def taken_back(
    connection: psycopg.Connection[Any], who: str, *, writes: bool
) -> Iterator[None]:
    """Look in a transaction that is rolled back, and where need be write in it.

    Raises:
        CannotTell: Not here, or not by this role; says by *who*.
    """
    try:
        with connection.transaction(force_rollback=True):
            if writes:
                connection.execute("set transaction read write")
                connection.execute("set local lock_timeout = '5s'")
            yield
    except psycopg.errors.FeatureNotSupported as error:
        raise CannotTell(
            f"cannot tell: {error.diag.message_primary}; ask the primary"
        ) from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise CannotTell(f"cannot tell: {error.diag.message_primary}; {who}") from None


def operator_key(configuration: Configuration) -> str:
    """Name what the operators of an Instance exclude each other by."""
    return f"lenso-jobs operator {configuration.schema_}"


@contextmanager
def exclusively(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[None]:
    """Wait for any other operator at work on this Instance, but not for ever.

    Anybody who may connect can hold the key, so the wait has an end. It asks again and
    again: a session that waited in one statement would keep its snapshot, and an index
    that the other builds CONCURRENTLY waits for every snapshot.
    """
    key = (operator_key(configuration),)
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = 0.02
    while True:
        row = connection.execute(
            "select pg_try_advisory_lock(hashtextextended(%s, 0))", key
        ).fetchone()
        if row == (True,):
            break
        if time.monotonic() > deadline:
            raise OperatorError(
                f"another session has been at work on {configuration.schema_} for "
                f"{PATIENCE_SECONDS:.0f} s; look for its advisory lock in pg_locks, "
                "and run this again"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    try:
        yield
    finally:
        if not connection.broken:
            connection.execute(
                "select pg_advisory_unlock(hashtextextended(%s, 0))", key
            )


def schema_exists(connection: psycopg.Connection[Any], schema: str) -> bool:
    """Tell whether there is such a schema."""
    found = connection.execute(
        "select from pg_namespace where nspname = %s", (schema,)
    ).fetchone()
    return found is not None


def owner_of(connection: psycopg.Connection[Any], schema: str) -> str | None:
    """Tell whose a schema is, if there is such a schema."""
    row = connection.execute(
        "select pg_get_userbyid(nspowner)::text from pg_namespace where nspname = %s",
        (schema,),
    ).fetchone()
    return None if row is None else str(row[0])


def holds(connection: psycopg.Connection[Any], schema: str, *relations: str) -> bool:
    """Tell whether a schema of the Instance's owner has all of these tables.

    Nothing is read before this was asked: in a schema that somebody else made under
    that name a table may be a view, whose functions would run with the operator's rights.
    """
    row = connection.execute(
        "select count(*) from pg_class as c join pg_namespace as n"
        " on n.oid = c.relnamespace where n.nspname = %s and c.relname = any (%s)"
        " and pg_get_userbyid(n.nspowner) = current_setting('lenso_jobs.owner')",
        (schema, list(relations)),
    ).fetchone()
    return row == (len(relations),)


def asset(name: str) -> str:
    """Read a file of sql/."""
    return (asset_dir("sql") / name).read_text(encoding="utf-8")
