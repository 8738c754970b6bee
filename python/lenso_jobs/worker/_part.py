"""A part of a worker: a thread that calls the database until it responds."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from math import inf
from threading import Event, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

import psycopg

from lenso_jobs.worker._connection import WorkerJobs
from lenso_jobs.worker.observer import Observers, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from lenso_jobs.worker._run import Run

# https://www.postgresql.org/docs/current/errcodes-appendix.html
_AGAIN_AT_ONCE = ("40001", "40P01")
# The last: the server's queue of notifications is full.
_PASSING = (*_AGAIN_AT_ONCE, "55P03", "57014", "54000")
_BROKEN = ("08", "53", "57P", "25006")
_TIMES_AT_ONCE = 10
_LOG_EVERY_SECONDS = 60.0
ANSWER_SECONDS = 30.0
"""How long a call may take before its connection is closed."""


def is_broken(error: psycopg.Error) -> bool:
    """Return whether the connection must be closed and opened anew.

    This is so if the server has become a standby, and if the server or a pooler said
    that it ends the session, for any reason.
    """
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    is_end = error.diag.severity_nonlocalized in ("FATAL", "PANIC")
    return is_end or error.sqlstate.startswith(_BROKEN)


def is_passing(error: psycopg.Error) -> bool:
    """Return whether the same call may succeed later."""
    return error.sqlstate in _PASSING or is_broken(error)


def is_servers_own(error: BaseException) -> bool:
    """Return whether the server itself has a fault, which may pass or stay.

    It stays if it concerns the data of one call, such as a row that cannot be read.
    """
    sqlstate = error.sqlstate if isinstance(error, psycopg.Error) else None
    return (sqlstate or "").startswith(("58", "XX"))


class Part(Thread):
    """A thread of a worker, and its connection. Another thread may cut that off.

    The connection is opened when it is needed, and again after it broke. An error that
    ends the thread before its time stops the worker.
    """

    def __init__(self, run: Run) -> None:
        name = f"lenso-jobs {run.settings.name} {type(self).__name__.lower()}"
        super().__init__(name=name, daemon=True)
        self._run = run
        self._connection: psycopg.Connection[Any] | None = None
        self._jobs: WorkerJobs | None = None
        self._guard = Lock()
        self._is_cut = False
        self._answer_by = inf

    def run(self) -> None:
        """Work until the worker ends."""
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - the worker raises it
            if not self._run.ending.is_set():
                self._run.stop_with(error)
        finally:
            self.close()
            self._run.orders.put(None)

    def work(self) -> None:
        """Do what this part is for."""
        raise NotImplementedError

    def call(self, ending: Event, act: Callable[[WorkerJobs], None]) -> bool:
        """Act on the connection until it succeeds; return False if the end came first.

        Wait 0.1 to 5 s after a failure, half by chance. A call that lost to another one
        is repeated at once, ten times.
        """
        failures = 0
        while not ending.is_set():
            try:
                self._act(act)
            except psycopg.Error as error:
                if is_broken(error) or self._jobs is None:
                    self.close()
                if not (is_passing(error) or is_servers_own(error)):
                    raise
                failures += 1
                if error.sqlstate in _AGAIN_AT_ONCE and failures <= _TIMES_AT_ONCE:
                    continue
                longest = min(5.0, 0.1 * 2.0 ** min(failures - 1, 10))
                pause = longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
                if not ending.wait(pause):
                    self._run.outage.note(self, error)
            else:
                self._run.outage.over(self)
                return True
        return False

    def _act(self, act: Callable[[WorkerJobs], None]) -> None:
        try:
            if self._jobs is None:
                connection = self._run.connect()
                with self._guard:
                    self._connection = connection
                self.expect()
                settings = self._run.settings
                self._jobs = WorkerJobs(connection, settings.schema, settings.caller)
            act(self._jobs)
        except OSError as error:  # this process may open no more files, perhaps
            raise psycopg.OperationalError("the connection cannot be used") from error
        finally:
            self._answer_by = inf

    def expect(self, seconds: float | None = None, *, rest: float = 0.0) -> None:
        """Have the connection cut off unless the next call returns in time.

        That is within so many seconds, 30 by default, and what it rests on purpose.
        """
        longest = ANSWER_SECONDS if seconds is None else seconds
        self._answer_by = monotonic() + longest + rest
        if self._is_cut:
            raise psycopg.OperationalError("the worker has ended")

    def hurry(self, seconds: float) -> None:
        """Have the connection cut off unless the current call returns sooner."""
        if self._answer_by < inf:
            self._answer_by = min(self._answer_by, monotonic() + seconds)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def close(self) -> None:
        """Close the connection, if there is one."""
        with self._guard:
            connection, self._connection = self._connection, None
        self._jobs = None
        if connection is not None:
            connection.close()

    def cut_if_overdue(self, now: float) -> None:
        """Wake the thread whose call does not return in time."""
        if now > self._answer_by:
            self._answer_by = inf
            self._shut()

    def cut(self) -> None:
        """Let no call succeed any more."""
        self._is_cut = True
        self._shut()

    def _shut(self) -> None:
        # A socket that was shut down behaves as if its other end were gone. libpq's is
        # closed by its own thread only, under the same guard.
        with self._guard, suppress(OSError, psycopg.Error):
            if self._connection is not None and not self._connection.closed:
                # No copy of it: this process may open no more files.
                its_socket = socket.socket(fileno=self._connection.fileno())
                try:
                    its_socket.shutdown(socket.SHUT_RDWR)
                finally:
                    its_socket.detach()


class Outage:
    """Logs once that the database does not respond, each minute, and once that it does."""

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._lock = Lock()
        self._parts: set[Part] = set()
        self._since = 0.0
        self._logged_at = -inf

    def note(self, part: Part, error: psycopg.Error) -> None:
        """Note that a call of a part failed."""
        now = monotonic()
        with self._lock:
            if not self._parts:
                self._since, self._logged_at = now, -inf
                self._observers.tell("disconnected", error)
            self._parts.add(part)
            if now - self._logged_at > _LOG_EVERY_SECONDS:
                self._logged_at = now
                logger.warning(
                    "the database has not responded for %.0f s (%s)",
                    now - self._since,
                    cause(error),
                )

    def over(self, part: Part) -> None:
        """Note that a call of a part succeeded."""
        if not self._parts:
            return
        with self._lock:
            if self._parts != {part}:
                self._parts.discard(part)
                return
            self._parts.clear()
            seconds = monotonic() - self._since
            logger.warning("the database responds again, after %.1f s", seconds)
            self._observers.tell("reconnected", seconds)


# The login was refused, or no server was found to log in to: no log says more.
_LOGIN = (
    *("password authentication failed", "no pg_hba.conf entry", "does not exist"),
    *("not permitted to log in", "no password supplied", "authentication failed"),
    *("could not translate host name", "Connection refused"),
    "No such file or directory",
)
_KNOWN = (
    *_LOGIN,
    *("Connection timed out", "timeout expired", "too many", "starting up"),
    *("shutting down", "closed the connection"),
)


def cause(error: psycopg.Error) -> str:
    """Name what is wrong in words of ours: the text may hold the connection string."""
    text = str(error)
    known = None if error.sqlstate else next((k for k in _KNOWN if k in text), None)
    raised_from = None if error.__cause__ is None else type(error.__cause__).__name__
    is_login = known in _LOGIN or (error.sqlstate or "").startswith("28")
    facts = (
        *(type(error).__name__, error.sqlstate, raised_from, known),
        None if is_login or raised_from else "the server's log says why",
    )
    return ", ".join(filter(None, facts))
