"""How a client waits for a job: its pauses, and what wakes it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus

from lenso_jobs.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from psycopg.pq.abc import PGresult

    Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

LISTENING_SECONDS = 10.0
"""The longest sleep while listening: retries and expiring leases notify nobody."""
POLLING_SECONDS = 1.0
"""The longest sleep of a session that cannot listen."""


def pauses(longest: float) -> Iterator[float]:
    """Count up from 20 ms: an enqueue that commits now may not have seen the lock."""
    yield 0.02
    yield 0.05
    pause = 0.1
    while True:
        yield min(pause, longest)
        pause *= 2


def seconds(value: float, argument: str) -> float:
    """Refuse a value that is no number of seconds; infinity is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"{argument} must be a number of seconds")
    if not value >= 0:  # NaN is not
        raise InvalidArgument(f"{argument} must be 0 seconds or more")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def can_listen(connection: Connection) -> bool:
    """Whether a connection is idle and commits by itself."""
    return (
        connection.autocommit
        and connection.info.transaction_status is TransactionStatus.IDLE
        and connection.info.pipeline_status is PipelineStatus.OFF
    )


class Wake:
    """The notification that ends a sleep, and the lock that makes enqueue send it.

    The channel is named as the schema, and the payload is the queue. Enqueue notifies
    while a session holds the queue's advisory lock shared. The lock is taken by the try
    form, since any session in the database may hold the key. Without keys, the results
    of ``wait_key``, nothing ends a sleep. Only a worker waits for several queues.
    """

    def __init__(
        self,
        connection: Connection,
        schema: str,
        queues: Sequence[str],
        keys: Sequence[int],
        *,
        unlisten: bool,
    ) -> None:
        self._connection: Any = connection
        self._told = {(schema, queue) for queue in queues}
        self._is_waker = bool(keys)
        self._is_held = False
        self.longest = LISTENING_SECONDS if keys else POLLING_SECONDS
        # Written beforehand: the last of them stands between a job and its handler.
        self._listen, self._lock, self._unlock, self._end = words(
            sql.Identifier(schema).as_bytes(connection), keys, unlisten=unlisten
        )


def words(
    channel: bytes, keys: Sequence[int], *, unlisten: bool
) -> tuple[bytes, bytes, bytes, bytes]:
    """Write the statements that begin, lock again, end with the lock held, and end."""
    end = b"unlisten " + channel if unlisten else b""
    lock = b"select pg_try_advisory_lock_shared(%d)" % (*keys, 0)[0]
    unlock = b"select pg_advisory_unlock_shared(%d)" % (*keys, 0)[0]
    if len(keys) > 1:
        # Some locks may be had and others not. The session has no other locks.
        array = b",".join(b"%d" % key for key in keys)
        lock = (
            b"select bool_and(pg_try_advisory_lock_shared(k))"
            b" from unnest(array[" + array + b"]::bigint[]) as k"
        )
        unlock = b"select pg_advisory_unlock_all()"
        end = end + b"; " + unlock if end else unlock
        return b"listen " + channel + b"; " + lock, lock, end, end
    end_with_lock = end + b"; " + unlock if end else unlock
    return b"listen " + channel + b"; " + lock, lock, end_with_lock, end


def is_true(result: PGresult) -> bool:
    """Return whether a result has the value true, or raise its error."""
    if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
        raise psycopg.errors.error_from_result(result)
    return bool(result.ntuples) and result.get_value(0, 0) == b"t"
