"""From a document and a resolver to a verified, ready client."""

from __future__ import annotations

import asyncio
import hashlib
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs._assets import sql_files
from lenso_jobs._async_client import AsyncJobs
from lenso_jobs._client import Jobs
from lenso_jobs.errors import SchemaNotReady
from lenso_jobs.secrets import SecretNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from lenso_jobs.config import Configuration

SCHEMA_VERSION = 3
"""The version of the schema that this release is made for."""

_SETUP = (
    "Run lenso-jobs setup with the document of {}; if that was done, lenso-jobs check "
    "says what is missing."
)
_UPGRADE = "Run lenso-jobs upgrade with the document of {}."
_URL = re.compile(r"postgres(ql)?://")
_FUNCTION = re.compile(
    r"^create or replace function (\w+)\(.*?^as \$\$(.*?)^\$\$;",
    re.DOTALL | re.MULTILINE,
)
_NEEDED = {
    "producer": ("enqueue", "enqueue_many", "inspect"),
    "worker": (
        *("claim", "renew", "renew_many", "complete", "complete_many"),
        *("fail", "fail_many", "inspect", "next_available_at", "wait_key"),
    ),
    "observer": (
        *("inspect", "inspect_attempts", "inspect_queues", "inspect_workers"),
        *("inspect_failures", "inspect_acts", "inspect_health", "explain_job"),
    ),
}


def connection_string(
    configuration: Configuration, secrets: Callable[[str], str], **overrides: str
) -> str:
    """Resolve the database URL, with nothing of it in what may go wrong.

    Raises:
        SecretNotFound: The resolver does not know the reference, or what it answers is
            no connection string.
    """
    reference = configuration.database_url_secret
    url = secrets(reference)
    # A password with a bare @ or / in it would be taken for part of the host, and every
    # message about that host would show it.
    authority, _, path = _URL.sub("", url).partition("/")
    if _URL.match(url) and (authority.count("@") > 1 or "@" in path.partition("?")[0]):
        raise SecretNotFound(
            f"the secret {reference} is a URL with a stray @ or /: "
            "percent-encode what is in its user name and password"
        )
    try:
        parameters: dict[str, Any] = {**conninfo_to_dict(url), **overrides}
        return make_conninfo(**parameters)
    except (psycopg.Error, ValueError):
        raise SecretNotFound(
            f"the secret {reference} is not a PostgreSQL URL or connection string"
        ) from None


def prepare(
    configuration: Configuration,
    secrets: Callable[[str], str],
    caller: str | None = None,
    *,
    max_size: int = 4,
    prepare_threshold: int | None = 5,
) -> Jobs:
    """Open a pool on the Instance, verify it, and answer a client on that pool.

    Close the client when done, or use it as a context manager.

    Args:
        configuration: The Instance's document.
        secrets: Turns ``database_url_secret`` into the database URL.
        caller: The caller Instance to act as, by ``SET LOCAL ROLE``; the role that the
            URL logs in as when left out.
        max_size: The most connections the pool opens.
        prepare_threshold: After how many uses psycopg prepares a statement; None never,
            which PgBouncer before 1.21 needs in transaction mode.

    Raises:
        SecretNotFound: The resolver does not know the reference, or what it answers is
            no connection string.
        SchemaNotReady: The schema is missing, older, newer or changed, or the role has
            no rights in it; the hint says what to run.
        psycopg.OperationalError: The server cannot be reached.
    """
    from psycopg_pool import ConnectionPool  # noqa: PLC0415 - only here is one opened

    conninfo = verified(configuration, secrets, caller)
    pool = ConnectionPool[Any](
        conninfo,
        min_size=1,
        max_size=max_size,
        open=True,
        kwargs={"autocommit": True, "prepare_threshold": prepare_threshold},
    )
    return Jobs(pool, schema=configuration.schema_, caller=caller)


async def prepare_async(
    configuration: Configuration,
    secrets: Callable[[str], str],
    caller: str | None = None,
    *,
    max_size: int = 4,
    prepare_threshold: int | None = 5,
) -> AsyncJobs:
    """Do as ``prepare``, for the event loop in use.

    The verification, and the resolver with it, runs in a thread.
    """
    from psycopg_pool import AsyncConnectionPool  # noqa: PLC0415 - as above

    conninfo = await asyncio.to_thread(verified, configuration, secrets, caller)
    pool = AsyncConnectionPool[Any](
        conninfo,
        min_size=1,
        max_size=max_size,
        open=False,
        kwargs={"autocommit": True, "prepare_threshold": prepare_threshold},
    )
    await pool.open()
    return AsyncJobs(pool, schema=configuration.schema_, caller=caller)


def verified(
    configuration: Configuration, secrets: Callable[[str], str], caller: str | None
) -> str:
    """Answer the connection string of an Instance that is as it should be.

    Raises:
        SecretNotFound: As ``prepare``.
        SchemaNotReady: As ``prepare``.
    """
    conninfo = connection_string(configuration, secrets)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        verify(connection, configuration, caller)
    return conninfo


def verify(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    caller: str | None = None,
) -> None:
    """Refuse an Instance that is not what this release was made for.

    Raises:
        SchemaNotReady: The hint says what to run.
    """
    schema = configuration.schema_
    # In one transaction: behind a pooler the session is another's after it.
    with connection.transaction():
        if caller is not None:
            become(connection, caller)
        _verify_owner(connection, configuration)
        _verify_version(connection, schema)
        _verify_functions(connection, schema)
        _verify_grants(connection, configuration)


def become(connection: psycopg.Connection[Any], caller: str) -> None:
    """Act as a role until the end of the transaction.

    Raises:
        SchemaNotReady: The login may not.
    """
    try:
        connection.execute("select set_config('role', %s, true)", (caller,))
    except (
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.InvalidParameterValue,
    ) as error:
        raise SchemaNotReady(
            f"cannot act as {caller}: {error.diag.message_primary}",
            hint="Declare it in the document, run lenso-jobs setup, or lenso-jobs "
            "configure if it was added since, and grant it to the role of the URL.",
        ) from None


def installed_version(connection: psycopg.Connection[Any], schema: str) -> int:
    """Tell which version the schema of an Instance is at.

    Raises:
        SchemaNotReady: There is no Instance, or the role may not look.
    """
    try:
        statement = sql.SQL("select version from {}.installed_version")
        row = connection.execute(statement.format(sql.Identifier(schema))).fetchone()
    except psycopg.errors.UndefinedTable:
        raise SchemaNotReady(
            f"schema {schema} holds no Instance", hint=_SETUP.format(schema)
        ) from None
    except psycopg.errors.InsufficientPrivilege:
        raise SchemaNotReady(
            f"the role has no rights in schema {schema}",
            hint="Connect as, or name as caller, a role that the document declares, and "
            "run lenso-jobs configure if it was added since setup.",
        ) from None
    return row[0] if row else 0


def _verify_owner(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> None:
    """Refuse what somebody else made under the schema's name, before any of it runs."""
    schema = configuration.schema_
    row = connection.execute(
        "select pg_get_userbyid(n.nspowner) from pg_namespace as n where n.nspname = %s",
        (schema,),
    ).fetchone()
    if row is not None and row != (configuration.owner,):
        raise SchemaNotReady(
            f"schema {schema} holds no Instance of {configuration.owner}'s",
            hint="Set role_prefix in the document to what it was set up with; or, if "
            "somebody else made that schema, choose another and run lenso-jobs setup.",
        )


def _verify_version(connection: psycopg.Connection[Any], schema: str) -> None:
    version = installed_version(connection, schema)
    if version < SCHEMA_VERSION:
        raise SchemaNotReady(
            f"schema {schema} is at version {version}, older than this release",
            hint=_UPGRADE.format(schema),
        )
    if version > SCHEMA_VERSION:
        raise SchemaNotReady(
            f"schema {schema} is at version {version}, newer than this release",
            hint="Install the release of lenso-jobs that the schema was migrated with.",
        )


def _verify_functions(connection: psycopg.Connection[Any], schema: str) -> None:
    installed = dict(
        connection.execute(
            "select p.proname, md5(p.prosrc) from pg_proc as p"
            " join pg_namespace as n on n.oid = p.pronamespace"
            " where n.nspname = %s",
            (schema,),
        ).fetchall()
    )
    for name, digest in function_digests().items():
        if installed.get(name) != digest:
            state = "differs from this release" if name in installed else "is missing"
            raise SchemaNotReady(
                f"function {schema}.{name} {state}",
                hint="Run lenso-jobs check to see every difference.",
            )


@cache
def function_digests() -> dict[str, str]:
    """Hash the body of every function in ``sql``, as PostgreSQL stores it."""
    return {
        name: hashlib.md5(body.encode(), usedforsecurity=False).hexdigest()
        for path in sql_files()
        for name, body in _FUNCTION.findall(path.read_text(encoding="utf-8"))
    }


def _verify_grants(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> None:
    row = connection.execute(
        "select coalesce(nullif(current_setting('role'), 'none'), session_user)::text"
    ).fetchone()
    role = row[0] if row else ""
    needed = {
        function
        for kind, callers in configuration.callers.items()
        if role in callers
        for function in _NEEDED[kind]
    }
    missing = connection.execute(
        "select p.proname from pg_proc as p"
        " join pg_namespace as n on n.oid = p.pronamespace"
        " where n.nspname = %s and p.proname = any (%s)"
        " and not has_function_privilege(p.oid, 'execute') order by 1",
        (configuration.schema_, sorted(needed)),
    ).fetchall()
    if missing:
        raise SchemaNotReady(
            f"role {role} may not call {', '.join(name for (name,) in missing)}",
            hint="Run lenso-jobs configure with the document that declares it.",
        )
