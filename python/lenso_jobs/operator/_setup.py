"""Bringing an Instance to what its document and this release say."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from lenso_jobs.errors import Unauthorized
from lenso_jobs.operator._findings import (
    UNSEALED,
    given_away,
    object_findings,
    was_given_away,
)
from lenso_jobs.operator._parts import Act, Part, run, steps, unlocking
from lenso_jobs.operator._plan import loaded, require
from lenso_jobs.operator._session import (
    CannotTell,
    OperatorError,
    connected,
    exclusively,
    silent,
    watched,
)
from lenso_jobs.operator._state import State, newest, read

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from lenso_jobs.config import Configuration
    from lenso_jobs.operator._objects import Finding

# Two set-ups may create or grant the same role at once. One of them meets one of these
# errors, and finds the work done when it tries again.
_COLLISIONS = {"23505", "42710", "42P06", "XX000"}
# The session that was waited for may be gone at the next try.
_CONTENDED = {"55P03", "40P01"}
_TRIES = 10
# Without these a worker ends: what it calls, the tables below, and its rights.
_OF_WORKERS = re.compile(
    "function _?(caller|claim|complete|fail|lease|next|queue|release|renew|require|wait)"
    "|index live_job_claimable_idx is missing|(table|schema|routine|function) .*belongs to"
    "|view installed_version|(execute|usage) on .*_worker is missing"
)
PAUSE_SECONDS = 3.0
"""How long callers and workers are let through before a lock is asked for again."""
LOCK_SECONDS = 10.0
"""How long a lock row of the migration tool is waited for."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a set-up or an upgrade did."""

    migrations: tuple[str, ...] = ()
    """The migrations it applied, in order."""
    recorded: tuple[str, ...] = ()
    """The migrations that had been applied, and were only recorded."""
    configured: bool = False
    """Whether the stored configuration changed."""
    repaired: tuple[str, ...] = ()
    """What it mended, in the words of ``check``."""
    rights: tuple[str, ...] = ()
    """The memberships that it granted to declared callers of an Instance that was there,
    and the statements by which it made the rights the release's."""
    differences: tuple[Finding, ...] = ()
    """What ``check`` would still find wrong with the objects."""
    uncompared: str = ""
    """Why objects and rights could not be compared with the release, if so."""


def setup(
    configuration: Configuration,
    conninfo: str,
    *,
    break_lock: bool = False,
    say: Callable[[str], None] = silent,
    pooler_ok: bool = False,
) -> Report:
    """Make schema, roles and grants, apply the migrations, store the configuration.

    Safe to run again, and by two operators at once: the second waits for the first.

    Args:
        configuration: The Instance's document.
        conninfo: The connection string of a role that may create roles, and schemas in
            the database.
        break_lock: Remove the migration tool's lock, left behind by a killed process.
        say: Is called with a sentence about each wait of more than 5 s.
        pooler_ok: Accept a connection through a pooler. Right only for a pooler that
            keeps one server session for each connection.

    Returns:
        What was done, and what is still wrong with the objects.

    Raises:
        JobsError: The document or the database is refused; the hint says what to do.
        OperatorError: The migrations are locked, or the Instance is a newer release's,
            was renamed or was damaged.
        psycopg.Error: The server cannot be reached, or refused a statement.
    """
    with operating(
        conninfo, configuration, say, pooler_ok, break_lock=break_lock
    ) as act:
        report = act.run("setup")
        if act.state.version != newest(act.state.known):
            raise OperatorError(
                f"every migration of schema {configuration.schema_} was applied, but its "
                "view installed_version says otherwise; lenso-jobs check says what mends it"
            )
        return report


def upgrade(  # noqa: PLR0913 - each is an option of the command
    configuration: Configuration,
    conninfo: str,
    *,
    repair_too: bool = False,
    break_lock: bool = False,
    say: Callable[[str], None] = silent,
    pooler_ok: bool = False,
) -> Report:
    """Apply the pending migrations while callers and workers go on.

    Waits at most 5 s for a lock that blocks callers or workers, then gives way and
    tries again, up to ten times. Safe to run again, whenever it was killed.

    Args:
        configuration: The Instance's document; of it, schema and roles count.
        conninfo: The connection string of a superuser or a member of the owner.
        repair_too: Mend also what ``check`` finds wrong with roles, functions, triggers,
            indexes and grants. Nothing is deleted, and no membership changes.
        break_lock: Remove the migration tool's lock, left behind by a killed process.
        say: Is called with a sentence about each wait of more than 5 s.
        pooler_ok: As ``setup``.

    Returns:
        What was done, and what is still wrong with the objects.

    Raises:
        JobsError: The Instance refuses.
        OperatorError: There is no Instance, or it is a newer release's or another
            role's; the migrations are locked; or a lock could not be had.
        psycopg.Error: The server cannot be reached, or refused a statement.
    """
    with operating(
        conninfo, configuration, say, pooler_ok, break_lock=break_lock
    ) as act:
        return act.run("upgrade", repair_too=repair_too)


def configure(
    configuration: Configuration,
    conninfo: str,
    *,
    drop_queues: bool = False,
    pooler_ok: bool = False,
) -> bool:
    """Store a changed document: policy, queues, callers and their memberships.

    All of it is stored, or nothing.

    Args:
        configuration: The changed document.
        conninfo: As ``setup``.
        drop_queues: Drop queues that the document leaves out although they have live
            jobs. The jobs stay, and wait until their queue is declared again.
        pooler_ok: As ``setup``.

    Returns:
        Whether anything changed.

    Raises:
        JobsError: The change is refused, for instance because a queue that the document
            leaves out still has live jobs.
        OperatorError: There is no Instance, or an older one than this needs.
        psycopg.Error: The server cannot be reached, or refused a statement.
    """
    with operating(conninfo, configuration, silent, pooler_ok) as act:
        return act.run("configure", drop_queues=drop_queues).configured


@dataclass(slots=True)
class _Acting:
    """A session that changes an Instance, alone at it, and watched while it waits."""

    connection: psycopg.Connection[Any]
    configuration: Configuration
    say: Callable[[str], None]
    waited_for: Callable[[], str]
    break_lock: bool = False
    act: Act = "setup"
    repair_too: bool = False
    state: State = field(init=False)
    """As it was last read."""
    uncompared: str = ""

    def run(
        self, act: Act, *, drop_queues: bool = False, repair_too: bool = False
    ) -> Report:
        """Send all steps of an act, and report what they did."""
        self.act, self.repair_too = act, repair_too
        sent, configured = [], False
        before = self._read()
        is_new = not (before.applied or before.version)
        for part in steps(
            act,
            self._look,
            self.configuration,
            drop_queues=drop_queues,
            repair_too=repair_too,
        ):
            try:
                value = self._send(part)
            except Unauthorized:
                # An object that it changes may be another role's.
                if part.does == "right":
                    continue
                if part.does not in {"apply", "record"}:
                    raise
                reason = given_away(self._compared(self._read()))
                if reason is None:
                    raise
                raise OperatorError(reason) from None
            sent.append(part)
            configured |= part.does == "store" and bool(value)
        named = {
            does: tuple(
                part.title.rpartition("migration ")[2]
                for part in sent
                if part.does == does
            )
            for does in ("apply", "record", "right", "seal")
        }
        mended = [
            what for part in sent if part.does == "repair" for what in part.changes
        ]
        has_ended_workers = any(map(_OF_WORKERS.match, mended))
        if has_ended_workers and not self.state.worker_sessions:
            self.say("no session of a worker is connected: start the workers again")
        if repair_too and named["seal"] and not mended:
            mended = [UNSEALED]
        # bootstrap.sql grants again what was revoked from a declared caller.
        granted = [
            what
            for part in sent
            for what in part.changes
            if not is_new and " becomes a member of " in what
        ]
        done = {what for part in sent if part.does == "right" for what in part.changes}
        left = object_findings(self.state) if self.state.catalogue else ()
        return Report(
            named["apply"],
            named["record"],
            configured,
            tuple(mended),
            (*granted, *named["right"]),
            tuple(each for each in left if each.what not in done),
            self.uncompared,
        )

    def _send(self, part: Part) -> Any:  # noqa: ANN401
        act = partial(run, self.connection, part)
        return patiently(act, part.title, self.say, self.waited_for)

    def _read(self) -> State:
        return read(self.connection, self.configuration)

    def _compared(self, state: State) -> State:
        return loaded(self.connection, state, self.configuration)

    def _look(
        self,
        *,
        unlocked: bool = False,
        compared: bool = False,
        mended: Collection[str] = (),  # noqa: ARG002 - the server shows that
    ) -> State:
        state = self.state = self._unlock() if unlocked else self._read()
        # bootstrap.sql refuses the schema of another role.
        if self.act != "setup" or state.is_ours or was_given_away(state):
            if self.act != "configure" and was_given_away(state):
                raise OperatorError(given_away(self._compared(state)))
            is_stored = self.act == "configure"
            require(state, instance=self.act != "setup", stored=is_stored)
        if compared:
            try:
                state = self.state = self._compared(state)
            except CannotTell as error:
                if self.repair_too:
                    raise
                self.uncompared = str(error)
        return state

    def _unlock(self) -> State:
        """Wait for the migration tool's lock; remove it where no session can hold it.

        Commands of ours exclude each other by an advisory lock instead. The row is left
        by a ``yoyo`` at work, whose session is still there, or by one that was killed.
        """
        began = time.monotonic()
        while (state := self._read()).locker is not None:
            if self.break_lock or not state.writers:
                run(self.connection, unlocking(state, self.configuration))
                self.say(f"removed the migration lock of process {state.locker}")
            elif time.monotonic() - began > LOCK_SECONDS:
                who = " or ".join(each.with_query for each in state.writers)
                raise OperatorError(
                    f"the migrations of {state.schema} are locked by process "
                    f"{state.locker}; it may be {who}. Wait for it, or end it. If none "
                    "of these applies migrations, run: "
                    "lenso-jobs setup --break-lock (or upgrade --break-lock)"
                )
            else:
                time.sleep(min(0.5, LOCK_SECONDS))
        return state


@contextmanager
def operating(
    conninfo: str,
    configuration: Configuration,
    say: Callable[[str], None],
    pooler_ok: bool,
    *,
    break_lock: bool = False,
) -> Iterator[_Acting]:
    """Open a session that changes the Instance, alone and watched."""
    with (
        connected(conninfo, pooler_ok=pooler_ok) as connection,
        watched(connection, conninfo, say) as waited_for,
        exclusively(connection, configuration.schema_, say),
    ):
        yield _Acting(connection, configuration, say, waited_for, break_lock)


def patiently(
    act: Callable[[], Any],
    what: str,
    say: Callable[[str], None],
    waited_for: Callable[[], str] = str,
) -> Any:  # noqa: ANN401
    """Do what takes locks, at most ten times while others hold them."""
    for attempt in range(1, _TRIES + 1):
        try:
            return act()
        except psycopg.Error as error:
            if error.sqlstate in _COLLISIONS and attempt < _TRIES:
                continue
            if error.sqlstate not in _CONTENDED:
                raise
            who = waited_for()
            reason = f"{error.diag.message_primary}{who and f': waited for {who}'}"
            if attempt == _TRIES:
                raise OperatorError(
                    f"{what} could not get a lock {_TRIES} times ({reason}); end old "
                    "transactions, see pg_stat_activity, and run this again: what was "
                    "done stays"
                ) from None
            say(
                f"{what}: {reason}; again in {PAUSE_SECONDS:g} s ({attempt} of {_TRIES})"
            )
        time.sleep(PAUSE_SECONDS)
    raise AssertionError
