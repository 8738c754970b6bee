"""The one check of a connection string. No message shows any part of the string."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs._given import kind
from lenso_jobs.errors import InvalidArgument

_URL = re.compile(r"postgres(ql)?://")
_OTHER_URL = re.compile(r"\s*[a-z][a-z0-9+.:-]*://", re.IGNORECASE)
_PORTS = re.compile(r"[0-9]{0,5}(,[0-9]{0,5})*")


def checked(
    conninfo: object, name: str, error: type[Exception] = InvalidArgument
) -> str:
    """Return a connection string that libpq accepts.

    Args:
        conninfo: The string that was given.
        name: What the message calls it.
        error: The exception to raise; it is given the message only.

    Raises:
        InvalidArgument: It is not a string, or libpq cannot use it. Raised as *error*.
    """
    if not isinstance(conninfo, str):
        raise error(
            f"{name} must be a connection string, not {kind(conninfo)}"
            f"{_instead(conninfo)}"
        )
    fault = _fault(conninfo)
    # Not within an except block: psycopg's message quotes the string.
    if fault is not None:
        raise error(f"{name} {fault}")
    return conninfo


def _fault(given: str) -> str | None:
    if not given.strip():
        return (
            "is empty: write a URL such as postgresql://user@host/database, or "
            "dbname=NAME to take the rest from the PG* environment variables"
        )
    url = _URL.match(given)
    if url is None and _OTHER_URL.match(given):
        return (
            "is not a URL of libpq: it must begin with postgresql://, without the name "
            "of a driver such as +psycopg"
        )
    if url is not None:
        # libpq would take a part of the password for the host, and messages name that.
        authority, _, path = given[url.end() :].partition("/")
        if authority.count("@") > 1 or "@" in path.partition("?")[0]:
            return (
                "is a URL with a stray @ or /: percent-encode the user name and the "
                "password in it"
            )
    parameters = _parameters(given)
    if parameters is None or not _PORTS.fullmatch(str(parameters.get("port", ""))):
        return "is not a PostgreSQL URL or connection string"
    if any("://" in str(parameters.get(key, "")) for key in ("dbname", "host", "user")):
        return "holds a URL in one of its fields: give the URL alone"
    return None


def _parameters(conninfo: str) -> dict[str, Any] | None:
    try:
        return None if "\0" in conninfo else conninfo_to_dict(conninfo)
    except (psycopg.Error, ValueError):
        return None


def _instead(given: object) -> str:
    if given is None:
        return ": is a setting missing?"
    if isinstance(given, bytes | bytearray):
        return ": decode it"
    if isinstance(given, dict):
        return ": pass psycopg.conninfo.make_conninfo(**parameters)"
    if (type(given).__module__, type(given).__name__) == (
        "sqlalchemy.engine.url",
        "URL",
    ):
        return (
            ': pass url.set(drivername="postgresql")'
            ".render_as_string(hide_password=False)"
        )
    return ""
