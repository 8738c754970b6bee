"""How a worker connects, and its client on that connection."""

from __future__ import annotations

import selectors
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from inspect import isawaitable
from os import getpid
from socket import gethostname
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.rows import scalar_row, tuple_row

from lenso_jobs import _conninfo
from lenso_jobs._calls import COMPLETE_MANY, WAIT_STATE, Call
from lenso_jobs._client import Jobs, Waiter
from lenso_jobs.errors import InvalidArgument
from lenso_jobs.worker._settings import Settings, is_coroutine_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from socket import socket

    from lenso_jobs._models import LeasedJob

Connection: TypeAlias = "psycopg.Connection[Any]"
Row = TypeVar("Row")
_ARGUMENT = "conninfo_or_pool"
_ALARMS = 4096  # more than can be pending
# Most of the time none: reading a row for each job would cost more than the call.
_UNCOMPLETED = replace(
    COMPLETE_MANY.returning(scalar_row),
    select="select position from {call} where outcome operator(pg_catalog.<>) 'completed'",
)
# Needs no file of its own: a process may have opened all it may.
_Selector = getattr(selectors, "PollSelector", selectors.DefaultSelector)


def connector(source: Any, settings: Settings) -> Callable[[], Connection]:  # noqa: ANN401 - checked here
    """Return a function that connects with a connection string, or as a pool does."""
    conninfo = getattr(source, "conninfo", source)
    kwargs = getattr(source, "kwargs", None)
    configure = getattr(source, "_configure", None)
    if conninfo is source or (conninfo and isinstance(conninfo, str)):
        _conninfo.checked(conninfo, _ARGUMENT)
    kind = _class_of(source, configure)
    if is_coroutine_function(conninfo) or is_coroutine_function(kwargs):
        _refuse("coroutine functions")

    def connect() -> Connection:
        where = _value(conninfo) or ""
        if where:  # else the pool's kwargs say it all
            _conninfo.checked(where, _ARGUMENT)
        given = dict(_value(kwargs) or {})
        for unfit in ("row_factory", "cursor_factory", "server_cursor_factory"):
            given.pop(unfit, None)
        parameters: dict[str, Any] = {
            "connect_timeout": 10,
            # The holder of its leases, as observers see it: 63 characters at most.
            "fallback_application_name": f"lenso-jobs {gethostname()[:40]}:{getpid()}",
            "prepare_threshold": settings.prepare_threshold,
            **conninfo_to_dict(where),
            **given,
            "autocommit": True,
            # In another one a payload may be impossible to read, and would end every
            # worker of its queue.
            "client_encoding": "utf8",
        }
        connection: Connection = kind.connect(**parameters)
        if configure is not None:
            _configure(connection, configure)
        return connection

    return connect


def _class_of(source: object, configure: object) -> type[Connection]:
    kind = getattr(source, "connection_class", psycopg.Connection)
    is_pools = kind.__module__.startswith("psycopg_pool")
    if issubclass(kind, psycopg.Connection):
        # The pool's own would return connections to it.
        return psycopg.Connection if is_pools else kind
    if not is_pools and kind is not psycopg.AsyncConnection:
        _refuse(f"connection_class {kind.__qualname__}")
    if configure is not None:
        _refuse("configure")
    return psycopg.Connection


def _refuse(part: str) -> None:
    raise InvalidArgument(
        f"{_ARGUMENT}: a worker connects on threads, and cannot use the pool's {part}: "
        "give it a connection string, or a ConnectionPool(open=False) with the like for "
        "threads"
    )


def _value(given: Any) -> Any:  # noqa: ANN401 - as a pool takes it
    """Return what a pool's conninfo or kwargs are, which may be functions."""
    if not callable(given):
        return given
    try:
        value = given()
    except Exception as error:  # a source of passwords may be down for a while
        raise psycopg.OperationalError(
            "the pool's conninfo or kwargs raised an exception"
        ) from error
    if isawaitable(value):
        _refuse("coroutine functions")
    return value


def _configure(
    connection: Connection, configure: Callable[[Connection], object]
) -> None:
    """Configure a connection as its pool does, and leave it fit for a worker."""
    try:
        configure(connection)
        if connection.info.transaction_status is not TransactionStatus.IDLE:
            raise InvalidArgument(  # noqa: TRY301 - closes the connection, too
                f"{_ARGUMENT}: the pool's configure must commit what it begins"
            )
        connection.autocommit = True
        connection.row_factory, connection.cursor_factory = tuple_row, psycopg.Cursor
    except Exception as error:
        connection.close()
        if isinstance(error, psycopg.Error | InvalidArgument):
            raise
        raise psycopg.OperationalError(
            "the pool's configure raised an exception"
        ) from error


class WorkerJobs(Jobs):
    """The client of a worker. Its transactions are READ COMMITTED, not the default."""

    def __init__(self, connection: Connection, schema: str, caller: str | None) -> None:
        super().__init__(connection, schema, caller)
        with psycopg.Cursor(connection) as cursor:
            cursor.execute("show default_transaction_isolation")
            row = cursor.fetchone()
        # READ UNCOMMITTED is the same.
        self._is_strict = row not in {("read committed",), ("read uncommitted",)}
        if self._is_strict:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        transaction: AbstractContextManager[object] = nullcontext()
        if self._is_strict and isinstance(self._source, psycopg.Connection):
            transaction = self._source.transaction()
        with transaction, super()._transaction() as connection:
            yield connection

    def claim_as(self, call: Call[Row], queue: str, limit: int) -> list[Row]:
        """Claim by a call that makes leases of the worker's own class."""
        # The kept cursor is quicker, and keeps the payloads until the next call.
        return self._ask(call, (queue, limit), keep=limit == 1 and not self._is_strict)

    def complete_all(self, leases: Sequence[LeasedJob]) -> list[int]:
        """Complete; return the positions, from 1, of those whose leases are gone."""
        return self._all(_UNCOMPLETED, leases)

    due_in = Jobs._due_in  # noqa: SLF001
    """Return in how many seconds the next job falls due, 0 or less if one is due."""

    def waiter(self, *queues: str) -> WorkerWaiter:
        """Return what waits for queues on this connection."""
        assert isinstance(self._source, psycopg.Connection)  # noqa: S101 - for types
        return self._waiter(WorkerWaiter, self._source, *queues)

    def why_polling(self, queue: str) -> str:
        """Return why this connection cannot be notified of new jobs."""
        key, *_ = self._one(WAIT_STATE, queue)
        if key is None:
            return "the document says notify: false"
        return "this connection cannot listen: is there a transaction pooler?"


class WorkerWaiter(Waiter):
    """A waiter that an alarm ends."""

    def sleep_until(self, alarm: socket, seconds: float) -> None:
        """Sleep, but no longer than until *alarm* can be read."""
        deadline = monotonic() + seconds
        with _Selector() as selector:
            selector.register(alarm, selectors.EVENT_READ)
            if self._is_waker:
                self._hold()
                selector.register(self._connection.fileno(), selectors.EVENT_READ)
            # What arrived with an earlier result is in no socket any more.
            while not (self._is_waker and self._is_woken(0)):
                left = deadline - monotonic()
                ready = selector.select(left) if left > 0 else []
                if any(key.fileobj is alarm for key, _ in ready):
                    alarm.recv(_ALARMS)
                    return
                if not ready:
                    return
