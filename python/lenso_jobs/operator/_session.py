"""The sessions of an operator: opened, excluded from each other, and watched."""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from lenso_jobs._conninfo import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import datetime

PATIENCE_SECONDS = 60.0
"""How long one operator waits for another, and for a lock outside of migrations."""
SAY_AFTER_SECONDS = 5.0
"""After how long a wait is reported, with the session that is waited for."""

# plan prints these at the head of its script.
SETTINGS = (
    # First of all: in the search_path of the session another schema could come before
    # pg_catalog, with functions that match more closely.
    "set search_path = pg_catalog, pg_temp",
    "set default_transaction_isolation = 'read committed'",
    # Descriptions of the server are compared by name.
    "set quote_all_identifiers = off",
    # Off, every read of a table with forced row security is an error.
    "set row_security = on",
    # The build of an index may take hours, and waits for locks have their own limit.
    "set statement_timeout = 0",
    "set idle_in_transaction_session_timeout = 0",
    f"set lock_timeout = '{PATIENCE_SECONDS:.0f}s'",
)


class OperatorError(RuntimeError):
    """The command was refused or gave up; the message says why and what to do."""


class CannotTell(OperatorError):
    """This server, or this role, cannot show what is asked for."""


def silent(_sentence: str) -> None:
    """Report nothing."""


@contextmanager
def connected(
    conninfo: str, *, read_only: bool = False, pooler_ok: bool = False
) -> Iterator[psycopg.Connection[Any]]:
    """Open an operator's session in autocommit mode; refuse one through a pooler."""
    # Never prepared: one string that is tried again may hold several statements.
    with psycopg.connect(
        checked(conninfo, "conninfo"),
        autocommit=True,
        prepare_threshold=None,
        # Statements are sent as bytes.
        client_encoding="utf8",
        application_name="lenso-jobs",
    ) as connection:
        # A pooler could give our settings to the sessions of others.
        row = connection.execute("select pg_catalog.pg_backend_pid()").fetchone()
        if row != (connection.info.backend_pid,) and not pooler_ok:
            raise OperatorError(
                "this is a connection through a pooler: use the server's own address. "
                "If the pooler keeps one server session for each connection (PgBouncer: "
                "pool_mode = session), pass --through-pooler"
            )
        for setting in SETTINGS:
            connection.execute(setting.encode())
        if read_only:
            connection.execute("set default_transaction_read_only = on")
        yield connection


@contextmanager
def rolled_back(
    connection: psycopg.Connection[Any], who: str, *, writes: bool
) -> Iterator[None]:
    """Read in a transaction that is rolled back; it may write if *writes*.

    Raises CannotTell on a standby, or if the role lacks a right; *who* says who has it.
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


# Sessions that are waited for.


@dataclass(frozen=True, slots=True)
class Session:
    """A session of the server, or a prepared transaction, which has no session."""

    pid: int | None
    role: str
    state: str | None = None
    """None: this role may not see it."""
    since: datetime | None = None
    query: str = ""
    gid: str = ""
    """The name of a prepared transaction."""

    def __str__(self) -> str:
        """Name it, with what tells whose it is."""
        since = f" since {self.since:%Y-%m-%d %H:%M:%S%z}" if self.since else ""
        if self.gid:
            gid = sql.Literal(self.gid).as_string(None)
            return f"prepared transaction {gid} (role {self.role}{since})"
        state = f", {self.state}{since}" if self.state else ""
        return f"session {self.pid} (role {self.role}{state})"

    @property
    def with_query(self) -> str:
        """Name it with the beginning of its query, up to a literal: a payload is one."""
        text = " ".join(re.split("['$]", self.query, maxsplit=1)[0].split())[:60]
        return f"{self}, whose query is: {text}" if text else str(self)


_SESSIONS = """
select pid, usename::text, state, coalesce(xact_start, state_change, backend_start),
    coalesce(query, ''), ''
from pg_stat_activity
where pid = any (%(pids)s) and usename is not null
union all
select null, x.owner::text, 'prepared', x.prepared, '', x.gid
from pg_prepared_xacts as x
join pg_locks as t on t.transactionid = x.transaction and t.pid is null
join pg_locks as h on h.virtualtransaction = t.virtualtransaction and h.pid is null
join pg_locks as w
    on w.pid = %(waiter)s and not w.granted
    and (w.locktype, w.database, w.relation, w.transactionid, w.virtualxid, w.objid)
    is not distinct from
    (h.locktype, h.database, h.relation, h.transactionid, h.virtualxid, h.objid)
order by 1
"""
_BLOCKING = """
select array(
    select unnest(pg_blocking_pids(%(waiter)s))
    union
    select current_locker_pid::integer from pg_stat_progress_create_index
    where pid = %(waiter)s
), coalesce(extract(epoch from clock_timestamp() - (
    select min(waitstart) from pg_locks where pid = %(waiter)s and not granted
)), 0)
"""
_HOLDING_KEY = """
select array(
    select pid from pg_locks
    where locktype = 'advisory' and granted and objsubid = 1
        and database = (select oid from pg_database where datname = current_database())
        and (classid::bigint << 32 | objid::bigint) = hashtextextended(%(key)s, 0)
)
"""


def sessions(
    connection: psycopg.Connection[Any], pids: Iterable[int], waiter: int = 0
) -> list[Session]:
    """Describe sessions, and the prepared transactions that *waiter* waits for."""
    rows = connection.execute(_SESSIONS, {"pids": [*pids], "waiter": waiter})
    return list(dict.fromkeys(Session(*row) for row in rows))


def waits_for(found: Iterable[Session]) -> str:
    """Word a wait for a person who can end it."""
    advice = "; ".join(
        f"end it with ROLLBACK PREPARED {sql.Literal(each.gid).as_string(None)} or COMMIT "
        "PREPARED"
        if each.gid
        else f"end session {each.pid} or wait"
        for each in found
    )
    return f"waits for {' and '.join(map(str, found))}: {advice}; Ctrl-C is safe"


@contextmanager
def watched(
    connection: psycopg.Connection[Any], conninfo: str, say: Callable[[str], None]
) -> Iterator[Callable[[], str]]:
    """Watch what a session waits for, from a second session, while the block runs.

    A wait of 5 s is reported once. Yields what names the sessions of the latest wait,
    and forgets them.
    """
    seen: list[Session] = []

    def waited_for() -> str:
        words = " and ".join(map(str, seen))
        seen.clear()
        return words

    over = threading.Event()
    ((pid,),) = connection.execute("select pg_catalog.pg_backend_pid()").fetchall()
    thread = threading.Thread(
        target=_watch, args=(conninfo, pid, say, over, seen), name="lenso-jobs-watch"
    )
    thread.daemon = True
    thread.start()
    try:
        yield waited_for
    finally:
        over.set()
        thread.join()


def _watch(
    conninfo: str,
    pid: int,
    say: Callable[[str], None],
    over: threading.Event,
    seen: list[Session],
) -> None:
    # Most commands end sooner, and need no second session. Without it a command works
    # as well, and says less.
    if over.wait(1):
        return
    said: object = None
    with suppress(psycopg.Error), connected(conninfo, pooler_ok=True) as connection:
        while not over.wait(0.5):
            ((pids, seconds),) = connection.execute(
                _BLOCKING, {"waiter": pid}
            ).fetchall()
            found = sessions(connection, pids, pid) if pids else []
            if not found:
                continue
            seen[:] = found
            names = {(each.pid, each.gid) for each in found}
            # A lock with a limit of 5 s is reported when that has passed.
            if seconds > SAY_AFTER_SECONDS and names != said:
                said = names
                say(waits_for(found))


def operator_key(schema: str) -> str:
    """Name the lock that the operators of an Instance exclude each other by."""
    return f"lenso-jobs operator {schema}"


@contextmanager
def exclusively(
    connection: psycopg.Connection[Any],
    schema: str,
    say: Callable[[str], None] = silent,
) -> Iterator[None]:
    """Wait at most 60 s for another operator at work on this Instance.

    Each try is a separate statement. A session that waits within one statement keeps its
    snapshot, and CREATE INDEX CONCURRENTLY in the other session waits for snapshots.
    """
    key = {"key": operator_key(schema)}
    take = "select pg_try_advisory_lock(hashtextextended(%(key)s, 0))"
    began, pause, has_said = time.monotonic(), 0.02, False
    while connection.execute(take, key).fetchone() != (True,):
        waited = time.monotonic() - began
        if waited > PATIENCE_SECONDS or (waited > SAY_AFTER_SECONDS and not has_said):
            row = connection.execute(_HOLDING_KEY, key).fetchone()
            holders = sessions(connection, row[0] if row else ())
            if waited > PATIENCE_SECONDS:
                raise OperatorError(
                    f"another operator has been at work on {schema} for "
                    f"{PATIENCE_SECONDS:.0f} s: {' and '.join(map(str, holders))}; end "
                    "it or wait, and run this again"
                )
            if holders:
                has_said = True
                say(waits_for(holders))
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    try:
        yield
    finally:
        if not connection.broken:
            connection.execute(
                "select pg_advisory_unlock(hashtextextended(%(key)s, 0))", key
            )
