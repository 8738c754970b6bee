"""What an idle worker does between two looks at its queue."""

from __future__ import annotations

import math
import selectors
import time
from asyncio import CancelledError, ensure_future, shield, sleep, wait
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import sql
from psycopg.pq import DiagnosticField, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from lenso_jobs.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator
    from socket import socket

LISTENING_SECONDS = 10.0
"""The longest sleep while listening: retries and lapsing leases send nothing."""
POLLING_SECONDS = 1.0
"""The longest sleep where it cannot listen."""
_ENDING_SECONDS = 5.0
"""How long a cancelled wait lets its end take: as long as psycopg lets a cancel."""
# Needs no file of its own: a process may have opened all it may.
_Selector = getattr(selectors, "PollSelector", selectors.DefaultSelector)


def pauses(longest: float) -> Iterator[float]:
    """Count up from 20 ms: an enqueue that commits now may not have seen us wait."""
    yield 0.02
    yield 0.05
    pause = 0.1
    while True:
        yield min(pause, longest)
        pause *= 2


def seconds(value: float, argument: str) -> float:
    """Refuse what is no number of seconds; infinity is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"{argument} must be a number of seconds")
    if not value >= 0:  # NaN is not
        raise InvalidArgument(f"{argument} must be 0 seconds or more")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def can_listen(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
) -> bool:
    """Whether a connection is idle and commits by itself."""
    return (
        connection.autocommit
        and connection.info.transaction_status is TransactionStatus.IDLE
        and connection.info.pipeline_status is PipelineStatus.OFF
    )


@dataclass(frozen=True, slots=True)
class Wake:
    """What wakes a waiter: a channel, the queue as payload, and a lock to hold.

    The channel is named as the schema. Holding the queue's advisory lock shared is what
    makes enqueue send a notification; it is taken by the try form, since anybody in the
    database may hold the key.

    Args:
        schema: The schema of the Instance.
        queue: The queue.
        key: What ``wait_key`` answered; None to sleep only.
        unlisten: Whether to stop listening at the end.
    """

    schema: str
    queue: str
    key: int | None
    unlisten: bool

    @property
    def longest(self) -> float:
        """The longest sleep, in seconds."""
        return POLLING_SECONDS if self.key is None else LISTENING_SECONDS

    def words(
        self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
    ) -> tuple[bytes, bytes, bytes, bytes]:
        """The statements that begin, lock again, end holding the lock, and end."""
        channel, lock = sql.Identifier(self.schema), sql.Literal(self.key)
        unlisten = "unlisten {channel}" if self.unlisten else ""
        listen, again, unlock, end = (
            sql.SQL(text).format(channel=channel, lock=lock).as_bytes(connection)
            for text in (
                "listen {channel}; select pg_try_advisory_lock_shared({lock})",
                "select pg_try_advisory_lock_shared({lock})",
                (unlisten and f"{unlisten}; ")
                + "select pg_advisory_unlock_shared({lock})",
                unlisten,
            )
        )
        return listen, again, unlock, end

    def is_told_by(self, notification: psycopg.Notify) -> bool:
        """Whether somebody enqueued to the queue."""
        told = notification.channel, notification.payload
        return told == (self.schema, self.queue)


class Waiter:
    """Sleeps until somebody enqueues to a queue, or for a while.

    Args:
        connection: Idle and in autocommit, unless there is no key.
        wake: What to wait for.
    """

    def __init__(self, connection: psycopg.Connection[Any], wake: Wake) -> None:
        self._connection = connection
        self._wake = wake
        self._is_waker = wake.key is not None
        self._is_held = False
        self.longest = wake.longest
        # Written beforehand: the last of them stands between a job and its handler.
        self._listen, self._lock, self._unlock, self._end = wake.words(connection)

    def __enter__(self) -> Self:
        if self._is_waker:
            try:
                self._is_held = self._ask(self._listen)
            except BaseException:
                self._is_held = True  # nobody can tell: let go of what there may be
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_waker and not self._connection.closed:
            words = self._unlock if self._is_held else self._end
            try:
                self._ask(words)
            except psycopg.errors.QueryCanceled:
                self._ask(words)  # the connection is somebody else's next

    def sleep(self, seconds: float) -> None:
        """Return when the queue's name arrives, or after *seconds*."""
        if not self._is_waker:
            time.sleep(seconds)
            return
        self._hold()
        self._is_told(seconds)

    def sleep_until(self, alarm: socket, seconds: float) -> None:
        """Sleep, but no longer than until *alarm* can be read."""
        deadline = time.monotonic() + seconds
        with _Selector() as selector:
            selector.register(alarm, selectors.EVENT_READ)
            if self._is_waker:
                self._hold()
                selector.register(self._connection.fileno(), selectors.EVENT_READ)
            # What arrived with an earlier answer is in no socket any more.
            while not (self._is_waker and self._is_told(0)):
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready or any(key.fileobj is alarm for key, _ in ready):
                    return

    def _hold(self) -> None:
        if not self._is_held:
            self._is_held = self._ask(self._lock)

    def _is_told(self, seconds: float) -> bool:
        with closing(self._connection.notifies(timeout=seconds)) as notifications:
            return any(map(self._wake.is_told_by, notifications))

    def _ask(self, statements: bytes) -> bool:
        """Send statements without parameters together; answers the last one's value."""
        if not statements:
            return False
        # libpq's own call, in half the time of a cursor's. It leaves notifications that
        # came with the answer in libpq, where psycopg does not look.
        pgconn = self._connection.pgconn
        with self._connection.lock:
            result = pgconn.exec_(statements)
            while pgconn.notify_handler and (notification := pgconn.notifies()):
                pgconn.notify_handler(notification)
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            if result.error_field(DiagnosticField.SQLSTATE) is None:
                # libpq's own words: the connection is lost.
                raise psycopg.OperationalError(result.get_error_message())
            raise psycopg.errors.error_from_result(result)
        return bool(result.ntuples) and result.get_value(0, 0) == b"t"


class AsyncWaiter:
    """As ``Waiter``, on an ``AsyncConnection``."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], wake: Wake) -> None:
        self._connection = connection
        self._wake = wake
        self._is_waker = wake.key is not None
        self._is_held = False
        self.longest = wake.longest
        self._listen, self._lock, self._unlock, self._end = wake.words(connection)

    async def __aenter__(self) -> Self:
        if self._is_waker:
            try:
                self._is_held = await self._ask(self._listen)
            except BaseException:
                self._is_held = True  # nobody can tell: let go of what there may be
                await self.__aexit__()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._is_waker and not self._connection.closed:
            words = self._unlock if self._is_held else self._end
            # Cancelled on its way, it would leave the lock or the channel behind.
            end = ensure_future(self._ask_at_last(words))
            try:
                await shield(end)
            except CancelledError:
                await wait([end], timeout=_ENDING_SECONDS)
                raise

    async def _ask_at_last(self, words: bytes) -> None:
        try:
            await self._ask(words)
        except psycopg.errors.QueryCanceled:
            await self._ask(words)  # the connection is somebody else's next

    async def sleep(self, seconds: float) -> None:
        """Return when the queue's name arrives, or after *seconds*."""
        if not self._is_waker:
            await sleep(seconds)
            return
        if not self._is_held:
            self._is_held = await self._ask(self._lock)
        async with aclosing(
            self._connection.notifies(timeout=seconds)
        ) as notifications:
            async for notification in notifications:
                if self._wake.is_told_by(notification):
                    return

    async def _ask(self, statements: bytes) -> bool:
        """Send statements without parameters together; answers the last one's value."""
        if not statements:
            return False
        async with psycopg.AsyncCursor(
            self._connection, row_factory=tuple_row
        ) as cursor:
            await cursor.execute(statements, prepare=False)
            while cursor.nextset():
                pass
            row = await cursor.fetchone() if cursor.description else None
        return row is not None and row[0] is True
