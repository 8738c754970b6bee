"""A worker's connection: opened when needed, and anew after it broke."""

from __future__ import annotations

import contextlib
import random
import socket
from contextlib import contextmanager
from inspect import iscoroutinefunction
from math import inf
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs._client import Jobs
from lenso_jobs.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lenso_jobs._models import Lease
    from lenso_jobs._requests import RowMaker
    from lenso_jobs._waiting import Waiter

Row = TypeVar("Row")

# https://www.postgresql.org/docs/current/errcodes-appendix.html
_AGAIN_AT_ONCE = ("40001", "40P01")
_FULL = "54000"  # the server's queue of notifications
_PASSING = (*_AGAIN_AT_ONCE, "55P03", "57014", _FULL)
_SERVERS_OWN = ("58", "XX")
_BROKEN = ("08", "53", "57P", "25006")
_SESSION_ENDS = ("FATAL", "PANIC")


def is_again_at_once(error: psycopg.Error) -> bool:
    """Whether a call lost to another one, and may win the next time."""
    return error.sqlstate in _AGAIN_AT_ONCE


def is_broken(error: psycopg.Error) -> bool:
    """Whether the connection is of no use any more.

    So it is where the server is a standby by now, and where whoever answered, a pooler
    perhaps, said that it ends the session, whatever the reason.
    """
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return (
        error.sqlstate.startswith(_BROKEN)
        or error.diag.severity_nonlocalized in _SESSION_ENDS
    )


def is_passing(error: psycopg.Error) -> bool:
    """Whether the same call may succeed later."""
    return error.sqlstate in _PASSING or is_broken(error)


def is_servers_own(error: BaseException) -> bool:
    """Whether something is wrong within the server, and may be put right there.

    Or it is so for good with what one call concerns: a row that cannot be read.
    """
    return isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith(
        _SERVERS_OWN
    )


class Backoff:
    """How long to wait after each failure in a row: from 0.1 to 5 s, half by chance."""

    def __init__(self) -> None:
        self._failures = 0

    def failed(self, error: psycopg.Error) -> float:
        """Answer how long to wait now."""
        self._failures += 1
        if is_again_at_once(error) and self._failures <= 10:  # noqa: PLR2004
            return 0.0
        longest = min(5.0, 0.1 * 2.0 ** min(self._failures - 1, 10))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


class WorkersJobs(Jobs):
    """The client of a worker, which also asks how long its leases last.

    Each call is a transaction at READ COMMITTED, whatever the role's default is.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], schema: str, caller: str | None
    ) -> None:
        super().__init__(connection, schema, caller)
        with psycopg.Cursor(connection) as cursor:
            cursor.execute("show default_transaction_isolation")
            row = cursor.fetchone()
        # READ UNCOMMITTED is the same.
        self._is_strict = row not in {("read committed",), ("read uncommitted",)}
        if self._is_strict:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection[Any]]:
        with contextlib.ExitStack() as stack:
            connection = self._source
            if self._is_strict and isinstance(connection, psycopg.Connection):
                stack.enter_context(connection.transaction())
            yield stack.enter_context(super()._transaction())

    def hold(self, make: RowMaker[Row], queue: str, limit: int) -> list[Row]:
        """Claim, as a worker reads it."""
        request = self._requests.hold(make, queue, limit)
        # The kept cursor is quicker, and keeps the payloads until the next call.
        if limit == 1 and not self._is_strict:
            return self._few(request)
        return self._all(request)

    def prolong(
        self, leases: Sequence[Lease]
    ) -> list[tuple[str, float | None, float | None]]:
        """Renew; answers outcome, end as an epoch, and seconds left."""
        return self._all(self._requests.prolong(leases))

    def end(
        self,
        leases: Sequence[Lease],
        failures: Sequence[tuple[str | None, bool]] | None,
    ) -> list[str]:
        """Complete, or fail where failures are given; answers the outcomes."""
        return self._all(self._requests.end(leases, failures))

    def due_in(self, queue: str) -> float:
        """Ask in how many seconds the next job falls due."""
        return self._due_in(queue)

    def waiter(self, queue: str) -> Waiter:
        """Wait for a queue on this connection."""
        assert isinstance(self._source, psycopg.Connection)  # noqa: S101 - for types
        return self._waiter(self._source, queue)


class Line:
    """One connection, for one thread; another may cut it off.

    Args:
        connect: Opens a connection in autocommit.
        schema: The schema of the Instance.
        caller: The role to act as.
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        schema: str,
        caller: str | None,
    ) -> None:
        self._connect = connect
        self._schema = schema
        self._caller = caller
        self._connection: psycopg.Connection[Any] | None = None
        self._jobs: WorkersJobs | None = None
        self._guard = Lock()
        self._is_cut = False
        self._answer_by = inf

    def open(self) -> WorkersJobs:
        """The client on the connection, which is opened where there is none."""
        if self._jobs is None:
            connection = self._connect()
            with self._guard:
                self._connection = connection
            self.expect(30)
            self._jobs = WorkersJobs(connection, self._schema, self._caller)
        return self._jobs

    def expect(self, seconds: float) -> None:
        """Have the connection cut off unless the next answer comes in so many seconds."""
        self._answer_by = monotonic() + seconds
        if self._is_cut:
            raise psycopg.OperationalError("the worker has ended")

    def hurry(self, seconds: float) -> None:
        """Have the connection cut off unless the answer in sight comes sooner."""
        if self._answer_by < inf:
            self._answer_by = min(self._answer_by, monotonic() + seconds)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    @contextmanager
    def in_use(self) -> Iterator[WorkersJobs]:
        """Yield the client; the connection is dropped where it turns out broken."""
        try:
            yield self.open()
        except psycopg.Error as error:
            if is_broken(error) or self._jobs is None:
                self.close()
            raise
        except OSError as error:  # this process may open no more files, perhaps
            self.close()
            raise psycopg.OperationalError("the connection cannot be used") from error
        finally:
            self._answer_by = inf

    def close(self) -> None:
        """Let go of the connection."""
        with self._guard:
            connection, self._connection = self._connection, None
        self._jobs = None
        if connection is not None:
            connection.close()

    def cut_if_overdue(self, now: float) -> None:
        """Wake the thread that waits for an answer which does not come."""
        if now > self._answer_by:
            self._answer_by = inf
            self._shut()

    def cut(self) -> None:
        """Let no call succeed any more."""
        self._is_cut = True
        self._shut()

    def _shut(self) -> None:
        # A socket that was shut down answers as one whose other end is gone. libpq's is
        # closed by its own thread only, under the same guard.
        with self._guard, contextlib.suppress(OSError, psycopg.Error):
            if self._connection is not None and not self._connection.closed:
                # No copy of it: this process may open no more files.
                line = socket.socket(fileno=self._connection.fileno())
                try:
                    line.shutdown(socket.SHUT_RDWR)
                finally:
                    line.detach()


def connector(
    source: object, name: str, prepare_threshold: int | None
) -> Callable[[], psycopg.Connection[Any]]:
    """Answer how to connect: to a connection string, or to where a pool connects."""
    kwargs: dict[str, Any] = {}
    conninfo: Any = source
    if not isinstance(source, str):
        conninfo = source.conninfo  # type: ignore[attr-defined]
        kwargs = source.kwargs or {}  # type: ignore[attr-defined]
        if iscoroutinefunction(conninfo) or iscoroutinefunction(kwargs):
            raise InvalidArgument(
                "conninfo_or_pool must say where to connect without being awaited"
            )

    def connect() -> psycopg.Connection[Any]:
        try:
            given = dict(kwargs() if callable(kwargs) else kwargs)
            where = conninfo() if callable(conninfo) else conninfo
        except Exception as error:  # who answers passwords may not be there for a while
            raise psycopg.OperationalError(
                "the pool tells nowhere to connect"
            ) from error
        for unfit in ("row_factory", "cursor_factory", "server_cursor_factory"):
            given.pop(unfit, None)
        parameters = conninfo_to_dict(where)
        return psycopg.Connection.connect(
            **{
                "connect_timeout": 10,
                "fallback_application_name": name,
                "prepare_threshold": prepare_threshold,
                **parameters,
                **given,
                "autocommit": True,
                # In another one a payload may be impossible to read, and would end
                # every worker of its queue.
                "client_encoding": "utf8",
            }
        )

    return connect
