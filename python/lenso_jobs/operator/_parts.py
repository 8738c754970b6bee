"""Statements that are done together, and sending them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lenso_jobs.errors import Translated
from lenso_jobs.operator._session import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg


@dataclass(frozen=True, slots=True)
class Part:
    """Statements that are done together."""

    title: str
    statements: tuple[str, ...]
    changes: tuple[str, ...] = ()
    """What it does, in words, where the SQL finds that out for itself."""
    transactional: bool = True
    applies: str = ""
    """The migration that it applies, where it does."""
    records: str = ""
    """The migration that had been applied, and only is recorded."""


def run(connection: psycopg.Connection[Any], part: Part) -> Any:  # noqa: ANN401
    """Send a part; answers the one value of its last statement, if that has any.

    Raises:
        JobsError: The Instance refuses.
        psycopg.Error: The server does.
    """
    with Translated(), _together(connection, part):
        for statement in part.statements:
            cursor = send(connection, statement)
        if cursor.description is None:
            return None
        row = cursor.fetchone()
        return row and row[0]


def send(connection: psycopg.Connection[Any], statement: str) -> psycopg.Cursor[Any]:
    """Send text as it is; there may be several statements in it."""
    return connection.execute(statement.encode())


@contextmanager
def _together(connection: psycopg.Connection[Any], part: Part) -> Iterator[None]:
    if part.transactional:
        with connection.transaction():
            yield
        return
    try:
        yield
    except BaseException:
        if not connection.broken:
            for statement in ("reset role", *SETTINGS):
                send(connection, statement)
        raise
