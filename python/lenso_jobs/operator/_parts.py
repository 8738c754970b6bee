"""The statements that acts send, in parts, and sending them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import psycopg
from psycopg import sql

from lenso_jobs._assets import asset_dir
from lenso_jobs.errors import Translated
from lenso_jobs.operator._catalogue import texts
from lenso_jobs.operator._findings import (
    UNSEALED,
    changes,
    faults,
    is_sealed,
    object_findings,
    role_changes,
    wrong_owners,
)
from lenso_jobs.operator._objects import REPAIR, Difference, differences
from lenso_jobs.operator._session import SETTINGS, OperatorError
from lenso_jobs.operator._state import YOYO_TABLES, Migration, State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from lenso_jobs.config import Configuration

Act = Literal["setup", "upgrade", "configure"]

# Every session waits behind one that waits for a lock on a table.
_BRIEFLY = "set lock_timeout = '5s'"
# After statements without a transaction.
_RESET = ("reset role", *SETTINGS)
# An object of these kinds is mended by 2_tables.sql.
_OF_TABLES = {"table", "column", "sequence", "domain", "constraint"}


@dataclass(frozen=True, slots=True)
class Part:
    """Statements that are sent together."""

    title: str
    statements: tuple[str, ...]
    changes: tuple[str, ...] = ()
    """What it does, in words, where the SQL finds that out by itself."""
    transactional: bool = True
    does: str = ""
    """apply or record a migration, store, right, repair or seal."""
    is_idle: bool = False
    """Whether its SQL would find nothing to do; plan leaves it out then."""


class Look(Protocol):
    """Returns the state as it is by now, or as plan has it.

    Once the lock of the migration tool is free; compared with this release; after those
    findings were mended.
    """

    def __call__(
        self,
        *,
        unlocked: bool = False,
        compared: bool = False,
        mended: Collection[str] = (),
    ) -> State: ...


def steps(
    act: Act,
    look: Look,
    configuration: Configuration,
    *,
    drop_queues: bool = False,
    repair_too: bool = False,
) -> Iterator[Part]:
    """Prepare what an act sends, in order, each part when those before it were sent."""
    state = look()
    found = changes(state, configuration, drop_queues=drop_queues)
    store = _configure(configuration, drop_queues=drop_queues)
    if act == "configure":
        # Together: a refusal must not leave memberships behind.
        statements = (*bootstrapping(configuration).statements, store)
        words = (*found.roles, *found.stored)
        title = "bootstrap.sql and configure"
        yield Part(title, statements, words, does="store", is_idle=not found)
        return
    is_new = not (state.applied or state.version)
    is_done = not found and not any(migrating(state, configuration))
    roles = tuple(role_changes(state))
    if act == "setup":
        yield bootstrapping(configuration, found.roles, is_idle=is_done)
    elif repair_too and roles:
        yield bootstrapping(configuration, roles, memberships=False)
    # A pending migration may drop an object. If the state was compared, as plan does,
    # the rights on it are revoked before.
    if not repair_too:
        yield from _granting(state, configuration)
    yield from migrating(look(unlocked=True), configuration)
    if act == "setup":
        # All of it is sent again, because it refuses before it changes anything.
        yield Part("configure", (store,), found.stored, does="store", is_idle=is_done)
    if is_new and not look().grants_by_itself:
        return
    state = look(compared=True)
    if repair_too:
        parts = repairing(state, configuration)
        yield from parts
        if parts:
            mended = [what for part in parts for what in part.changes]
            state = look(compared=True, mended=mended)
    else:
        yield from _granting(state, configuration)
    # It is compared only where no object differs.
    if not is_sealed(state) and not wrong_owners(state):
        statements = (*_as_owner(configuration), "select _catalogue_store_digest(true)")
        yield Part("the digest of the objects", statements, (UNSEALED,), does="seal")


def bootstrapping(
    configuration: Configuration,
    words: tuple[str, ...] = (),
    *,
    memberships: bool = True,
    is_idle: bool = False,
) -> Part:
    """Prepare bootstrap.sql: schema, roles and memberships."""
    of = "select set_config('lenso_jobs.document', {document}, true)"
    without = "select set_config('lenso_jobs.memberships', 'off', true)"
    statements = (
        _sql(configuration, of),
        *(() if memberships else (without,)),
        (asset_dir("sql") / "bootstrap.sql").read_text(encoding="utf-8"),
    )
    return Part("bootstrap.sql", statements, words, is_idle=is_idle)


def _configure(configuration: Configuration, *, drop_queues: bool) -> str:
    dropping = ", true" if drop_queues else ""
    return _sql(
        configuration, f"select {{schema}}.configure({{document}}::jsonb{dropping})"
    )


# Migrations. They are recorded in yoyo's tables, so that yoyo and the command can take
# turns. yoyo commits a migration and records it in two steps, and leaves its lock behind
# when it is killed. Here both are one transaction, and the lock is PostgreSQL's.

_BOOKKEEPING = """\
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
"""
_OPENING = """\
set local lock_timeout = '5s';
set local role {owner};
set local search_path = {schema};
lock table {schema}.yoyo_lock in exclusive mode;
"""
_MARK = """\
insert into {schema}._yoyo_log (
    id, migration_hash, migration_id, operation, username, hostname, created_at_utc
)
values (
    gen_random_uuid()::text, {digest}, {name}, 'apply', session_user,
    coalesce(host(inet_client_addr()), 'local'), clock_timestamp() at time zone 'utc'
);
insert into {schema}._yoyo_migration (migration_hash, migration_id, applied_at_utc)
values ({digest}, {name}, clock_timestamp() at time zone 'utc') on conflict do nothing;
"""


def migrating(state: State, configuration: Configuration) -> Iterator[Part]:
    """Prepare the pending migrations."""
    if state.locker is not None:
        yield unlocking(state, configuration)
    if not state.holds(*YOYO_TABLES):
        make = _sql(configuration, _BOOKKEEPING)
        yield Part("the tables of the migration tool", (make,))
    for migration in state.pending:
        if migration.number > state.version:
            yield from applying(migration, configuration)
        else:
            # Applied again, it would make a renamed table anew, and empty.
            yield _recording(migration, configuration, does="record")


def unlocking(state: State, configuration: Configuration) -> Part:
    """Prepare what removes yoyo's lock."""
    remove = _sql(
        configuration, "set local role {owner};\ndelete from {schema}.yoyo_lock;\n"
    )
    words = f"process {state.locker} left it behind; refused where it may be at work"
    return Part("the lock of the migration tool", (remove,), (words,))


def applying(migration: Migration, configuration: Configuration) -> Iterator[Part]:
    """Prepare one migration, and the record of it."""
    title = f"migration {migration.name}"
    record = _recording(migration, configuration)
    if migration.transactional:
        opening, mark = record.statements
        statements = (opening, *migration.statements, mark)
        yield Part(title, statements, does="apply")
        return
    statements = (
        _sql(configuration, "set role {owner}"),
        _sql(configuration, "set search_path = {schema}"),
        *migration.statements,
        *_RESET,
    )
    yield Part(title, statements, transactional=False, does="apply")
    yield record


def _recording(
    migration: Migration, configuration: Configuration, does: str = ""
) -> Part:
    name, digest = sql.Literal(migration.name), sql.Literal(migration.digest)
    mark = _sql(configuration, _MARK, name=name, digest=digest)
    statements = (_sql(configuration, _OPENING), mark)
    title = f"the record of migration {migration.name}"
    return Part(title, statements, does=does)


# Repairs.


def repairing(state: State, configuration: Configuration) -> tuple[Part, ...]:
    """Prepare what mends the findings that this mends; their words are the changes.

    It deletes nothing: the server refuses to drop what others depend on. It refuses if a
    table of jobs is missing: an empty one would hide the loss.
    """
    if state.catalogue is None:
        return ()
    found = differences(state.schema, state.catalogue)
    for each in found:
        if each.is_lost:
            (told,) = each.findings()
            raise OperatorError(f"{told.what}; {told.remedy}")
    owners = wrong_owners(state)
    done = {*owners, *faults(state, "grant_stray", "grant_missing")}
    mended = tuple(
        each.what
        for each in object_findings(state)
        if each.remedy == REPAIR or each in done
    )
    lost = tuple(each.what for each in faults(state, "object_changed"))
    make = (*_as_owner(configuration), "select _claim_floors_made()")
    floors = (Part("claim floors", make, lost, does="repair"),) if lost else ()
    if not mended:
        return floors
    return (
        *_meanwhile(configuration, found, [each.remedy for each in owners]),
        *(
            Part(f"{one.kind} {one.name}", (*_as_owner(configuration), *one.alone()))
            for one in found
            if one.alone()
        ),
        _at_once(configuration, found, mended),
        *floors,
    )


def _meanwhile(
    configuration: Configuration, found: list[Difference], owners: list[str]
) -> Iterator[Part]:
    """Do what needs no transaction, or must not be in one."""
    if owners:
        yield Part("owners", (_BRIEFLY, *owners, *SETTINGS), transactional=False)
    freed = tuple(each for one in found for each in one.freed())
    if freed:
        briefly = _BRIEFLY.replace("set", "set local")
        yield Part("names that other tables hold", (briefly, *freed))
    built = tuple(each for one in found for each in one.rebuilt())
    if built:
        # It is slow, and only other DDL waits behind it.
        slowly = ("set lock_timeout = '1h'", _sql(configuration, "set role {owner}"))
        statements = (*slowly, *built, *_RESET)
        yield Part("indexes", statements, transactional=False)


def _at_once(
    configuration: Configuration, found: list[Difference], mended: tuple[str, ...]
) -> Part:
    """Load sql/ over the Instance, and mend what that leaves.

    The tables only where one of them differs: their indexes take a lock on each of them
    even where they are there.
    """
    of_tables = any(one.kind in _OF_TABLES for one in found)
    loaded = texts("0", "8") if of_tables else (*texts("0", "1"), *texts("3", "8"))
    statements = (
        *_as_owner(configuration),
        *(_locked(configuration, found) if of_tables else ()),
        *(each for one in found for each in one.replaced()),
        "".join(loaded),
        *(each for one in found for each in one.touches()),
        "".join(texts("9")),
    )
    return Part("sql/ of this release", statements, mended, does="repair")


def _locked(configuration: Configuration, found: list[Difference]) -> Iterator[str]:
    """Write what locks the tables that the verbs write to.

    The verbs lock them in both orders. With one of them locked, this gives up before
    the server would look for a deadlock, and end a verb.
    """
    missing = {one.name for one in found if one.found is None}
    for name in ("job", "live_job", "attempt"):
        if name not in missing:
            table = sql.Identifier(name)
            lock = "lock table {schema}.{table} in share mode"
            yield _sql(configuration, lock, table=table)
            yield "set local lock_timeout = '500ms'"
    yield _BRIEFLY.replace("set", "set local")


def _granting(state: State, configuration: Configuration) -> Iterator[Part]:
    """Prepare what makes the rights those of the release's list."""
    for each in faults(state, "grant_stray", "grant_missing"):
        statements = (*_as_owner(configuration), each.remedy)
        yield Part(each.remedy, statements, (each.what,), does="right")


def _as_owner(configuration: Configuration) -> tuple[str, ...]:
    return (
        _BRIEFLY.replace("set", "set local"),
        _sql(configuration, "set local role {owner}"),
        _sql(configuration, "set local search_path = {schema}"),
    )


def _sql(configuration: Configuration, text: str, **values: sql.Composable) -> str:
    """Write a statement of an Instance: {schema}, {owner}, {document}."""
    return (
        sql.SQL(text)
        .format(
            schema=sql.Identifier(configuration.schema_),
            owner=sql.Identifier(configuration.owner),
            document=sql.Literal(configuration.document()),
            **values,
        )
        .as_string(None)
    )


# Sending.


def run(connection: psycopg.Connection[Any], part: Part) -> Any:  # noqa: ANN401
    """Send a part; return the one value of its last statement, if that has any."""
    try:
        with Translated(), _together(connection, part):
            for statement in part.statements:
                cursor = send(connection, statement)
            row = cursor.fetchone() if cursor.description else None
            return row and row[0]
    except (
        psycopg.errors.UndefinedFunction,
        psycopg.errors.UndefinedTable,
        psycopg.errors.UndefinedColumn,
    ) as error:
        raise OperatorError(
            f"the Instance is not as this release has it: {error.diag.message_primary}; "
            "lenso-jobs check says what mends it"
        ) from None


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
            for statement in _RESET:
                send(connection, statement)
        raise
