"""The migrations of this release, and which of them an Instance has.

They are yoyo's: read by it, and recorded in its tables as it would, so that ``yoyo``
and the command can take turns. They are sent on a connection of our own, since yoyo
commits a migration and records it in two steps and leaves its lock behind when killed;
here both are one transaction, and the lock is PostgreSQL's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from yoyo.migrations import (
    get_migration_hash,
    parse_metadata_from_sql_comments,
    read_sql_migration,
)

from lenso_jobs._assets import asset_dir
from lenso_jobs.operator._session import OperatorError, holds, schema_exists

if TYPE_CHECKING:
    from collections.abc import Callable

    from lenso_jobs.config import Configuration

YOYO_TABLES = ("yoyo_lock", "_yoyo_version", "_yoyo_log", "_yoyo_migration")
LOCK_SECONDS = 10.0
"""How long a lock row of yoyo's is waited for."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of migrations/."""

    name: str
    digest: str
    statements: tuple[str, ...]
    """The whole file as one where it runs in a transaction."""
    transactional: bool

    @property
    def number(self) -> int:
        """What ``installed_version`` says once it is applied."""
        return int(self.name.partition("-")[0])


def released() -> list[Migration]:
    """Read the migrations of this release, in order: each depends on the one before."""
    found = []
    for path in sorted(asset_dir("migrations").glob("*.sql")):
        text = path.read_text(encoding="utf-8")
        directives, _, _ = parse_metadata_from_sql_comments(text)
        transactional = directives.get("transactional") != "false"
        # yoyo takes statements apart, which takes a while where there are many.
        statements = [text] if transactional else read_sql_migration(str(path))[2]
        digest = get_migration_hash(path.stem)
        found.append(Migration(path.stem, digest, tuple(statements), transactional))
    return found


def recorded(connection: psycopg.Connection[Any], schema: str) -> set[str]:
    """List the migrations that an Instance says it has."""
    if not holds(connection, schema, "_yoyo_migration"):
        return set()
    statement = sql.SQL("select migration_id from {}._yoyo_migration").format(
        sql.Identifier(schema)
    )
    return {name for (name,) in connection.execute(statement)}


def installed_version(connection: psycopg.Connection[Any], schema: str) -> int:
    """Read the version of an Instance; 0 where there is none."""
    if not holds(connection, schema, "installed_version"):
        return 0
    statement = sql.SQL("select version from {}.installed_version").format(
        sql.Identifier(schema)
    )
    row = connection.execute(statement).fetchone()
    return int(row[0]) if row else 0


def require_known(
    connection: psycopg.Connection[Any], schema: str, *, instance: bool
) -> list[Migration]:
    """Answer the migrations that are pending.

    Raises:
        OperatorError: The Instance is newer than this release; or there is none, where
            one is needed.
    """
    known = released()
    has = recorded(connection, schema)
    version = installed_version(connection, schema)
    strange = sorted(has - {each.name for each in known})
    if strange or version > known[-1].number:
        raise OperatorError(
            f"schema {schema} is newer than this release: it has "
            f"{strange[-1] if strange else f'version {version}'}; "
            "install the release of lenso-jobs that migrated it"
        )
    if instance and not has and not version:
        exists = schema_exists(connection, schema)
        state = "holds no Instance" if exists else "does not exist"
        raise OperatorError(f"schema {schema} {state}; run: lenso-jobs setup")
    return [each for each in known if each.name not in has]


def require_version(connection: psycopg.Connection[Any], schema: str) -> None:
    """Refuse to call ready what does not say that it is.

    Raises:
        OperatorError: The view installed_version was dropped or edited.
    """
    newest = max(each.number for each in released() if each.transactional)
    if installed_version(connection, schema) != newest:
        raise OperatorError(
            f"every migration of schema {schema} was applied, and its view "
            "installed_version says otherwise; lenso-jobs check says what mends it"
        )


def bookkeeping(configuration: Configuration) -> str:
    """Write what makes yoyo's tables, as yoyo makes them."""
    return _statement(
        """\
set local role {owner};
create table if not exists {schema}.yoyo_lock (
    locked integer default 1, ctime timestamp, pid integer not null,
    primary key (locked)
);
create table if not exists {schema}._yoyo_log (
    id varchar(36), migration_hash varchar(64), migration_id varchar(255),
    operation varchar(10), username varchar(255), hostname varchar(255),
    comment varchar(255), created_at_utc timestamp,
    primary key (id)
);
create table if not exists {schema}._yoyo_version (
    version integer not null primary key, installed_at_utc timestamp
);
create table if not exists {schema}._yoyo_migration (
    migration_hash varchar(64), migration_id varchar(255), applied_at_utc timestamp,
    primary key (migration_hash)
);
insert into {schema}._yoyo_version
values (2, clock_timestamp() at time zone 'utc') on conflict do nothing;
""",
        configuration,
    )


def opening(configuration: Configuration) -> str:
    """Write what a migration in a transaction begins with: who, where, and alone."""
    return _statement(
        """\
set local lock_timeout = '5s';
set local role {owner};
set local search_path = {schema};
lock table {schema}.yoyo_lock in exclusive mode;
""",
        configuration,
    )


def mark(migration: Migration, configuration: Configuration) -> str:
    """Write what records that a migration was applied."""
    return _statement(
        """\
insert into {schema}._yoyo_log (
    id, migration_hash, migration_id, operation, username, hostname, created_at_utc
)
values (
    gen_random_uuid()::text, {digest}, {name}, 'apply', session_user,
    coalesce(host(inet_client_addr()), 'local'), clock_timestamp() at time zone 'utc'
);
insert into {schema}._yoyo_migration (migration_hash, migration_id, applied_at_utc)
values ({digest}, {name}, clock_timestamp() at time zone 'utc') on conflict do nothing;
""",
        configuration,
        digest=sql.Literal(migration.digest),
        name=sql.Literal(migration.name),
    )


def locker(connection: psycopg.Connection[Any], schema: str) -> int | None:
    """Tell which process holds yoyo's lock, or left it behind."""
    if not holds(connection, schema, "yoyo_lock"):
        return None
    row = connection.execute(
        sql.SQL("select pid from {}").format(sql.Identifier(schema, "yoyo_lock"))
    ).fetchone()
    return row and int(row[0])


def unlocking(configuration: Configuration) -> str:
    """Write what removes yoyo's lock."""
    return _statement(
        """\
set local role {owner};
delete from {schema}.yoyo_lock;
""",
        configuration,
    )


def unlock(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    say: Callable[[str], None],
    *,
    break_lock: bool,
) -> None:
    """Wait for yoyo's lock; remove it where it is nobody's any more.

    What the command itself holds is never in the way: it excludes its like by an
    advisory lock, which we have. A row is left by a ``yoyo`` at work, by one that was
    killed, or by an early release of the command that was. Whoever wrote it has kept
    a session open since.

    Raises:
        OperatorError: It may be somebody's.
    """
    schema = configuration.schema_
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        pid = locker(connection, schema)
        if pid is None:
            return
        if break_lock or not _others(connection, configuration):
            with connection.transaction():
                connection.execute(unlocking(configuration).encode())
            say(f"removed the migration lock that process {pid} left behind")
            return
        if time.monotonic() > deadline:
            raise OperatorError(
                f"the migrations of {schema} are locked by process {pid}, another "
                "one at work or one that was killed; if none is at work, run: "
                "lenso-jobs setup --break-lock (or upgrade --break-lock)"
            )
        time.sleep(min(0.5, LOCK_SECONDS))


def _others(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> list[int]:
    """List the sessions that could be a migration's: those that may become the owner."""
    return [
        pid
        for (pid,) in connection.execute(
            "select a.pid from pg_stat_activity as a"
            " where a.datname = current_database() and a.pid <> pg_backend_pid()"
            " and a.usesysid is not null and ("
            "  pg_has_role(a.usesysid, %s, 'member')"
            "  or has_table_privilege(a.usesysid, %s, 'insert'))",
            (configuration.owner, f"{configuration.schema_}.yoyo_lock"),
        )
    ]


def _statement(
    text: str, configuration: Configuration, **values: sql.Composable
) -> str:
    return (
        sql.SQL(text)
        .format(
            schema=sql.Identifier(configuration.schema_),
            owner=sql.Identifier(configuration.owner),
            **values,
        )
        .as_string(None)
    )
