"""What an idle worker does between two looks at its queue."""

from __future__ import annotations

import math
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus

from lenso_jobs.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

LISTENING_SECONDS = 10.0
"""The longest sleep while listening: retries and lapsing leases send nothing."""
POLLING_SECONDS = 1.0
"""The longest sleep where it cannot listen."""


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


class Waiter:
    """Sleeps until somebody enqueues to a queue, or for a while.

    It listens on the channel named as the schema, and holds the queue's advisory lock
    shared, which is what makes enqueue send a notification. The lock is taken by the try
    form, since anybody in the database may hold the key.

    Args:
        connection: Idle and in autocommit, unless *key* is None.
        schema: The schema of the Instance.
        queue: The queue.
        key: What ``wait_key`` answered; None to sleep only.
        unlisten: Whether to stop listening at the end.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        schema: str,
        queue: str,
        key: int | None,
        *,
        unlisten: bool,
    ) -> None:
        self._connection = connection
        self._wanted = (schema, queue)
        self._is_waker = key is not None
        self._is_held = False
        self.longest = POLLING_SECONDS if key is None else LISTENING_SECONDS
        # Written beforehand: the last of them stands between a job and its handler.
        channel, lock = sql.Identifier(schema), sql.Literal(key)
        self._listen, self._lock, self._unlock, self._end = (
            sql.SQL(text).format(channel=channel, lock=lock).as_bytes(connection)
            for text in (
                "listen {channel}; select pg_try_advisory_lock_shared({lock})",
                "select pg_try_advisory_lock_shared({lock})",
                ("unlisten {channel}; " if unlisten else "")
                + "select pg_advisory_unlock_shared({lock})",
                "unlisten {channel}" if unlisten else "",
            )
        )

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
            self._ask(self._unlock if self._is_held else self._end)

    def sleep(self, seconds: float) -> None:
        """Return when the queue's name arrives, or after *seconds*."""
        if not self._is_waker:
            time.sleep(seconds)
            return
        if not self._is_held:
            self._is_held = self._ask(self._lock)
        with closing(self._connection.notifies(timeout=seconds)) as notifications:
            for notification in notifications:
                if (notification.channel, notification.payload) == self._wanted:
                    return

    def _ask(self, statements: bytes) -> bool:
        """Send statements without parameters together; answers the last one's value."""
        # libpq's own call, in half the time of a cursor's. It leaves notifications that
        # came with the answer in libpq, where psycopg does not look.
        pgconn = self._connection.pgconn
        with self._connection.lock:
            result = pgconn.exec_(statements)
            while pgconn.notify_handler and (notification := pgconn.notifies()):
                pgconn.notify_handler(notification)
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            raise psycopg.errors.error_from_result(result)
        return bool(result.ntuples) and result.get_value(0, 0) == b"t"
