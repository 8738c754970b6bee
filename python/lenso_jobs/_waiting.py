"""What an idle worker does between two looks at its queue."""

from __future__ import annotations

import math
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

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
        self._schema = schema
        self._queue = queue
        self._key = key
        self._unlisten = unlisten
        self._is_held = False
        self.longest = POLLING_SECONDS if key is None else LISTENING_SECONDS

    def __enter__(self) -> Self:
        if self._key is not None:
            try:
                self._is_held = self._ask(
                    "listen {0}; select pg_try_advisory_lock_shared({1})"
                )
            except BaseException:
                self._is_held = True  # nobody can tell: let go of what there may be
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._key is None or self._connection.closed:
            return
        self._ask(
            ("unlisten {0};" if self._unlisten else "")
            + (
                "select pg_advisory_unlock_shared({1})"
                if self._is_held
                else "select true"
            )
        )

    def sleep(self, seconds: float) -> None:
        """Return when the queue's name arrives, or after *seconds*."""
        if self._key is None:
            time.sleep(seconds)
            return
        if not self._is_held:
            self._is_held = self._ask("select pg_try_advisory_lock_shared({1})")
        with closing(self._connection.notifies(timeout=seconds)) as notifications:
            for notification in notifications:
                if (notification.channel, notification.payload) == (
                    self._schema,
                    self._queue,
                ):
                    return

    def _ask(self, statements: str) -> bool:
        """Send statements without parameters together; answers the last one's value."""
        text = sql.SQL(statements).format(
            sql.Identifier(self._schema), sql.Literal(self._key)
        )
        with psycopg.Cursor(self._connection, row_factory=tuple_row) as cursor:
            cursor.execute(text, prepare=False)
            while cursor.nextset():
                pass
            row = cursor.fetchone()
        return bool(row and row[0])
