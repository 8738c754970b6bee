"""Checks of what constructors are given. Each message says what to pass instead."""

from __future__ import annotations

import re
import sys
from inspect import iscoroutine
from typing import Any

import psycopg

from lenso_jobs.errors import InvalidArgument

_KINDS = {
    "Jobs": ("Connection", "ConnectionPool"),
    "AsyncJobs": ("AsyncConnection", "AsyncConnectionPool"),
}
_OPENED = {
    "Jobs": "psycopg.connect(url)",
    "AsyncJobs": "await psycopg.AsyncConnection.connect(url)",
}
_ON_SQLALCHEMY = "use lenso_jobs.contrib.sqlalchemy.jobs_on(it, schema)"
_ON_ONE_OF_IT = (
    "use lenso_jobs.contrib.sqlalchemy.jobs_on with a session or connection of it"
)
_ON_DJANGO = "use lenso_jobs.contrib.django.jobs_on(schema)"
_SESSIONS = (
    *("Session", "scoped_session", "Connection"),
    *("AsyncSession", "async_scoped_session", "AsyncConnection"),
)
_ENGINES = "Engine", "AsyncEngine", "sessionmaker", "async_sessionmaker"
_DJANGO = (
    *("ConnectionProxy", "BaseDatabaseWrapper", "BaseConnectionHandler"),
    "CursorWrapper",
)
_OTHER_DRIVER = "pass a connection of psycopg 3"
# What to pass instead, by library and class. The libraries are not imported.
_INSTEAD = {
    **{("sqlalchemy", name): _ON_SQLALCHEMY for name in _SESSIONS},
    **{("sqlalchemy", name): _ON_ONE_OF_IT for name in _ENGINES},
    ("sqlalchemy", "_ConnectionFairy"): "pass its driver_connection",
    ("sqlalchemy", "AdaptedConnection"): "pass its driver_connection",
    **{("django", name): _ON_DJANGO for name in _DJANGO},
    ("psycopg", "BaseCursor"): "pass cursor.connection",
    ("psycopg2", "connection"): _OTHER_DRIVER,
    ("asyncpg", "Connection"): _OTHER_DRIVER,
    ("lenso_jobs", "Jobs"): "pass the connection or pool of that client",
    ("lenso_jobs", "AsyncJobs"): "pass the connection or pool of that client",
}
_OWN_NAMES = re.compile(r"none|public|pg_.*", re.IGNORECASE | re.DOTALL)
_LONGEST_NAME = 63  # NAMEDATALEN - 1


def check(given: Any, schema: str, caller: str | None, client: str) -> None:  # noqa: ANN401
    """Refuse arguments that *client*, Jobs or AsyncJobs, cannot use."""
    connection, pool = _KINDS[client]
    # If the pool's module was not imported, it is no pool.
    pools = getattr(sys.modules.get("psycopg_pool"), pool, ())
    if not isinstance(given, (getattr(psycopg, connection), pools)):
        raise InvalidArgument(
            f"connection_or_pool must be a psycopg.{connection} or a psycopg_pool."
            f"{pool}, not {kind(given)}: {_instead(given, client)}"
        )
    check_names(schema, caller)


def check_names(schema: str, caller: str | None) -> None:
    """Refuse a schema or a caller that PostgreSQL cannot have."""
    refuse(name_fault(schema), "schema")
    if caller is not None:
        refuse(role_fault(caller), "caller")


def _instead(given: object, client: str) -> str:
    if iscoroutine(given):
        return "await it first"
    for base in type(given).__mro__:
        library = base.__module__.partition(".")[0]
        for other, kinds in _KINDS.items():
            if library in {"psycopg", "psycopg_pool"} and base.__name__ in kinds:
                return f"use {other} for it"
        if what := _INSTEAD.get((library, base.__name__)):
            return what
    return f"pass {_OPENED[client]}, or let lenso_jobs.prepare open a pool"


def kind(value: object) -> str:
    """Name the type of a value, for a message."""
    module, name = type(value).__module__, type(value).__qualname__
    if value is None:
        return "None"
    return name if module == "builtins" else f"{module}.{name}"


def name_fault(given: object) -> str | None:
    """Say why a value is no name that PostgreSQL can have; None if it is one."""
    if not isinstance(given, str):
        return f"must be a string, not {kind(given)}"
    try:
        size = len(given.encode())
    except UnicodeEncodeError:
        return "must be valid Unicode"
    if not 1 <= size <= _LONGEST_NAME or "\0" in given:
        return "must be a name of 1 to 63 bytes"
    return None


def role_fault(given: object) -> str | None:
    """Say why a value is no name that a caller can have; None if it is one."""
    fault = name_fault(given)
    if fault is None and _OWN_NAMES.fullmatch(str(given)):
        fault = "must not be none, public or pg_*"
    return fault


def refuse(fault: str | None, argument: str) -> None:
    """Raise InvalidArgument if an argument has a fault."""
    if fault is not None:
        raise InvalidArgument(f"{argument} {fault}")
