"""From a document and a resolver to a verified, ready client."""

from __future__ import annotations

import asyncio
import hashlib
import re
from functools import cache
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs import _given
from lenso_jobs._assets import asset_dir, sql_files
from lenso_jobs._async_client import AsyncJobs
from lenso_jobs._client import Jobs
from lenso_jobs._conninfo import checked
from lenso_jobs.errors import InvalidArgument, SchemaNotReady
from lenso_jobs.secrets import SecretNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from lenso_jobs.config import Configuration

    Connection = psycopg.Connection[Any]

SCHEMA_VERSION = 1
"""The version of the schema that this release is made for."""

SHARD_MARK = re.compile(r"shard \d+ of \d+")
"""How ``fleet setup`` marks the schema of a shard."""


class Installed(NamedTuple):
    """The version that a schema is at, and the oldest client that it serves."""

    version: int
    oldest_client: int


_FUNCTION = re.compile(
    r"^create or replace function (\w+)\(.*?\bas \$\$(\n.*?)^\$\$;",
    re.DOTALL | re.MULTILINE,
)
_GRANT = re.compile(r"\(\s*'([a-z ]+)',\s*'function (?:'\s*')?(\w+)\(")


def connection_string(
    configuration: Configuration, secrets: Callable[[str], str]
) -> str:
    """Resolve the database URL. No error message shows any part of it."""
    reference = configuration.database_url_secret
    return checked(secrets(reference), f"the secret {reference}", SecretNotFound)


def prepare(
    configuration: Configuration,
    secrets: Callable[[str], str],
    caller: str | None = None,
    *,
    max_size: int = 4,
    prepare_threshold: int | None = 5,
) -> Jobs:
    """Open a pool on the Instance and verify the Instance.

    The router of a fleet is prepared in the same way, with the fleet's ``instance``.
    Close the client when done, or use it as a context manager: that closes the pool.

    Args:
        configuration: The Instance's document.
        secrets: Turns ``database_url_secret`` into the database URL.
        caller: The caller Instance to act as, by ``SET LOCAL ROLE``. None for the role
            that the URL logs in as.
        max_size: The most connections the pool opens.
        prepare_threshold: After how many uses psycopg prepares a statement. None for
            never, which PgBouncer before 1.21 needs in transaction mode.

    Returns:
        A client on the pool.

    Raises:
        InvalidArgument: An argument is of another kind.
        SecretNotFound: The resolver does not know the reference, or returns no
            connection string.
        SchemaNotReady: The schema is missing, older, newer or changed, or the role has
            no rights in it. The hint says what to run.
        psycopg.OperationalError: The server cannot be reached.
    """
    from psycopg_pool import ConnectionPool  # noqa: PLC0415 - only here is one opened

    conninfo = verified(configuration, secrets, caller)
    kwargs = {"autocommit": True, "prepare_threshold": prepare_threshold}
    pool = ConnectionPool[Any](
        conninfo, min_size=1, max_size=max_size, open=True, kwargs=kwargs
    )
    jobs = Jobs(pool, configuration.schema_, caller)
    jobs._is_opened_by_prepare = True  # noqa: SLF001 - so that it closes the pool
    return jobs


async def prepare_async(
    configuration: Configuration,
    secrets: Callable[[str], str],
    caller: str | None = None,
    *,
    max_size: int = 4,
    prepare_threshold: int | None = 5,
) -> AsyncJobs:
    """Do as ``prepare`` for the running event loop. The resolver runs in a thread.

    Returns:
        A client on an open pool.

    Raises:
        InvalidArgument: As ``prepare``, and so the others.
        SecretNotFound: The database URL is not to be had.
        SchemaNotReady: The Instance cannot be used.
        psycopg.OperationalError: The server cannot be reached.
    """
    from psycopg_pool import AsyncConnectionPool  # noqa: PLC0415 - as above

    conninfo = await asyncio.to_thread(verified, configuration, secrets, caller)
    kwargs = {"autocommit": True, "prepare_threshold": prepare_threshold}
    pool = AsyncConnectionPool[Any](
        conninfo, min_size=1, max_size=max_size, open=False, kwargs=kwargs
    )
    await pool.open()
    jobs = AsyncJobs(pool, configuration.schema_, caller)
    jobs._is_opened_by_prepare = True  # noqa: SLF001 - as above
    return jobs


def verified(
    configuration: Configuration,
    secrets: Callable[[str], str],
    caller: str | None,
    *,
    for_worker: bool = False,
    shard: str | None = None,
) -> str:
    """Return the connection string of an Instance that this release can use."""
    _require_arguments(configuration, secrets, caller)
    conninfo = connection_string(configuration, secrets)
    parameters: dict[str, Any] = conninfo_to_dict(conninfo)
    if for_worker:
        parameters = {"connect_timeout": 10, **parameters}
    with psycopg.connect(autocommit=True, **parameters) as connection:
        on_router = verify(connection, configuration, caller)
        if for_worker and on_router:
            raise SchemaNotReady(
                f"schema {configuration.schema_} is the router of a fleet, and workers "
                "connect to the shards",
                hint="Run lenso-jobs work --fleet FILE, or call prepare_fleet_workers.",
            )
        if shard is not None:
            require_shard(connection, configuration.schema_, shard)
    return conninfo


def _require_arguments(configuration: object, secrets: object, caller: object) -> None:
    if not hasattr(configuration, "database_url_secret"):
        raise InvalidArgument(
            f"configuration must be a Configuration, not {_given.kind(configuration)}: "
            "pass Configuration.from_file(path)"
        )
    if isinstance(secrets, type):
        raise InvalidArgument(f"secrets must be a resolver: pass {secrets.__name__}()")
    if not callable(secrets) or iscoroutinefunction(secrets):
        raise InvalidArgument(
            "secrets must be a function that returns the database URL, not "
            f"{'a coroutine function' if callable(secrets) else _given.kind(secrets)}"
        )
    if caller is not None:
        _given.refuse(_given.role_fault(caller), "caller")


def verify(
    connection: Connection, configuration: Configuration, caller: str | None = None
) -> bool:
    """Refuse an Instance that does not serve this release, and say what to run.

    Returns:
        Whether it is the router of a fleet.
    """
    # In one transaction: behind a pooler the next may have another session.
    with connection.transaction():
        if caller is not None:
            become(connection, caller)
        _verify_owner(connection, configuration)
        schema = configuration.schema_
        installed = installed_version(connection, schema)
        on_router = is_router(connection, schema)
        fault = version_fault(schema, installed)
        if fault is not None:
            said, hint = fault
            if on_router:
                hint = for_fleet(hint)
            raise SchemaNotReady(f"schema {schema} {said}", hint=hint)
        if installed.version == SCHEMA_VERSION and not on_router:
            # A newer one has other functions, and says that they serve.
            _verify_functions(connection, configuration.schema_)
        _verify_grants(connection, configuration)
    return on_router


def for_fleet(hint: str) -> str:
    """Name the commands of a fleet instead of those of an Instance."""
    return re.sub(
        "lenso-jobs (?=(setup|check|configure|upgrade))", "lenso-jobs fleet ", hint
    )


def is_router(connection: Connection, schema: str) -> bool:
    """Return whether a schema is the router of a fleet, and no Instance."""
    row = connection.execute(
        "select from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace"
        " where n.nspname = %s and p.proname = '_shards'",
        (schema,),
    ).fetchone()
    return row is not None


def fleet_mark(number: int, shards: int) -> str:
    """Say which shard of a fleet it is; the comment of the shard's schema."""
    return f"shard {number} of {shards}"


def require_shard(connection: Connection, schema: str, shard: str) -> None:
    """Raise SchemaNotReady if a schema is marked as another shard than ``shard N of M``."""
    row = connection.execute(
        "select obj_description(oid, 'pg_namespace') from pg_namespace"
        " where nspname = %s",
        (schema,),
    ).fetchone()
    mark = row[0] if row and row[0] else ""
    # Somebody may have replaced the comment: that alone is no reason to stop the work.
    if SHARD_MARK.fullmatch(mark) and mark != shard:
        raise SchemaNotReady(
            f"schema {schema} is {mark}, not {shard}",
            hint="Correct the URL in the secret of this shard.",
        )


def become(connection: Connection, caller: str) -> None:
    """Act as a role until the end of the transaction, or raise SchemaNotReady."""
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


def installed_version(connection: Connection, schema: str) -> Installed:
    """Return which schema is installed, or raise SchemaNotReady."""
    try:
        # The column may be missing: somebody made the view by hand.
        statement = sql.SQL(
            "select version, coalesce((to_jsonb(v) ->> 'oldest_client')::integer,"
            " version) from {}.installed_version as v"
        )
        row = connection.execute(statement.format(sql.Identifier(schema))).fetchone()
    except psycopg.errors.UndefinedTable:
        raise SchemaNotReady(
            f"schema {schema} holds no Instance",
            hint=f"Run lenso-jobs setup with the document of {schema}; if that was done, "
            "lenso-jobs check says what is missing.",
        ) from None
    except psycopg.errors.InsufficientPrivilege:
        raise SchemaNotReady(
            f"the role has no rights in schema {schema}",
            hint="Connect as, or name as caller, a role that the document declares, and "
            "run lenso-jobs configure if it was added since setup.",
        ) from None
    return Installed(*row) if row else Installed(0, 0)


def _verify_owner(connection: Connection, configuration: Configuration) -> None:
    # Before a function of the schema runs: another role may have made it.
    row = connection.execute(
        "select pg_get_userbyid(n.nspowner) from pg_namespace as n where n.nspname = %s",
        (configuration.schema_,),
    ).fetchone()
    if row not in {None, (configuration.owner,)}:
        raise SchemaNotReady(
            f"schema {configuration.schema_} holds no Instance of {configuration.owner}",
            hint="Set role_prefix in the document to the one of its setup. If another "
            "role made that schema, choose another and run lenso-jobs setup.",
        )


def version_fault(schema: str, installed: Installed) -> tuple[str, str] | None:
    """Say that a schema does not serve this release, and what to do; or nothing."""
    version, oldest_client = installed
    if version == SCHEMA_VERSION or oldest_client <= SCHEMA_VERSION < version:
        return None
    word, remedy = "newer", "Install the release that the schema was migrated with."
    if version < SCHEMA_VERSION:
        word, remedy = "older", f"Run lenso-jobs upgrade with the document of {schema}."
    return f"is at version {version}, {word} than this release", remedy


def _verify_functions(connection: Connection, schema: str) -> None:
    installed = dict(
        connection.execute(
            "select p.proname, encode(sha256(convert_to(p.prosrc, 'UTF8')), 'hex')"
            " from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace"
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
        name: hashlib.sha256(body.encode()).hexdigest()
        for path in sql_files()
        for name, body in _FUNCTION.findall(path.read_text(encoding="utf-8"))
    }


def _verify_grants(connection: Connection, configuration: Configuration) -> None:
    ((role,),) = connection.execute(
        "select coalesce(nullif(current_setting('role'), 'none'), session_user)::text"
    ).fetchall()
    kinds = {kind for kind, names in configuration.callers.items() if role in names}
    grants = asset_dir("sql") / "4_internal" / "_catalogue_grants.sql"
    needed = [
        function
        for group, function in _GRANT.findall(grants.read_text(encoding="utf-8"))
        if kinds & set(group.split())
    ]
    missing = connection.execute(
        "select p.proname from pg_proc as p"
        " join pg_namespace as n on n.oid = p.pronamespace"
        " where n.nspname = %s and p.proname = any (%s)"
        " and not has_function_privilege(p.oid, 'execute') order by 1",
        (configuration.schema_, needed),
    ).fetchall()
    if missing:
        raise SchemaNotReady(
            f"role {role} may not call {', '.join(name for (name,) in missing)}",
            hint="Run lenso-jobs configure with the document that declares it.",
        )
