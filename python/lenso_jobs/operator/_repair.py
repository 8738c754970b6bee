"""Making an Instance again what this release says it is, without losing a row."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from psycopg import sql

from lenso_jobs.operator._differences import (
    REPAIR,
    UNSEALED,
    Described,
    Difference,
    compare,
    describe,
    is_sealed,
    load,
    released,
)
from lenso_jobs.operator._plan import send
from lenso_jobs.operator._session import SETTINGS, OperatorError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from lenso_jobs.config import Configuration


def repair(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> tuple[str, ...]:
    """Mend what ``check`` says this mends; answers what that was, in its words.

    What somebody's data or objects would go with, it leaves: the server refuses to drop
    what others depend on.

    Raises:
        OperatorError: Something seems to have been renamed: an empty one would be made.
    """
    schema = configuration.schema_
    with connection.transaction(force_rollback=True):
        found = describe(connection, schema)
        wanted = released(connection, schema, configuration.owner)
    differences = compare(schema, found, wanted)
    for difference in differences:
        if difference.was is not None:
            ((what, remedy),) = difference.findings()
            raise OperatorError(f"{what}; run this first: {remedy}")
    mended = tuple(
        what
        for difference in differences
        for what, remedy in difference.findings()
        if remedy == REPAIR
    )
    if mended:
        with _briefly(connection):
            _meanwhile(connection, configuration, differences, found)
        with connection.transaction():
            _at_once(connection, configuration, differences, wanted)
    elif not differences:
        with connection.transaction():
            connection.execute(
                "select set_config('role', %s, true)", (configuration.owner,)
            )
            if not is_sealed(connection, schema):
                load(connection, "9")
                mended = (UNSEALED,)
    return mended


def _meanwhile(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    differences: list[Difference],
    found: Described,
) -> None:
    """Do what needs no transaction, or must not be in one: indexes are built slowly."""
    for difference in differences:
        for statement in difference.rightful():
            send(connection, statement)
    owner = sql.SQL("set role {}").format(sql.Identifier(configuration.owner))
    connection.execute(owner)
    for difference in differences:
        if ("table", (difference.wanted or {}).get("of")) in found:
            for statement in difference.rebuilt():
                send(connection, statement)


def _at_once(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    differences: list[Difference],
    wanted: Described,
) -> None:
    """Load sql/ over the Instance, and mend what that leaves."""
    schema = configuration.schema_
    connection.execute("set local lock_timeout = '5s'")
    connection.execute("select set_config('role', %s, true)", (configuration.owner,))
    for difference in differences:
        for statement in difference.replaced():
            send(connection, statement)
    connection.execute("select set_config('search_path', %s, true)", (schema,))
    load(connection)
    for difference in compare(schema, describe(connection, schema), wanted):
        for statement in difference.touches():
            send(connection, statement)
    # The last rooms again: they record what there is.
    connection.execute("select set_config('search_path', %s, true)", (schema,))
    load(connection, "9")


@contextmanager
def _briefly(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Wait for no lock as long as others may have to wait behind us."""
    connection.execute("set lock_timeout = '5s'")
    try:
        yield
    finally:
        if not connection.broken:
            connection.execute("reset role")
            for setting in SETTINGS:
                send(connection, setting)
