"""The client for asyncio: the methods of ``Jobs`` as coroutines."""

from __future__ import annotations

from asyncio import Lock
from contextlib import asynccontextmanager
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from lenso_jobs import _waiting, _wire
from lenso_jobs._calls import ROLE
from lenso_jobs._home import Loop
from lenso_jobs._requests import Requests
from lenso_jobs.errors import InvalidQueue, Translated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
    from datetime import datetime
    from uuid import UUID

    from psycopg.rows import AsyncRowFactory
    from psycopg_pool import AsyncConnectionPool

    from lenso_jobs._models import (
        CompletedItem,
        EnqueuedItem,
        EnqueuedJob,
        ExplainedJob,
        FailedItem,
        FailedJob,
        Failure,
        InspectedAct,
        InspectedAttempt,
        InspectedFailure,
        InspectedFinding,
        InspectedJob,
        InspectedQueue,
        InspectedWorker,
        Lease,
        LeasedJob,
        NewJob,
        RenewedItem,
    )
    from lenso_jobs._requests import Request

    Connection = psycopg.AsyncConnection[Any]
    Pool = AsyncConnectionPool[Any]

Row = TypeVar("Row")
Found = TypeVar("Found")


class AsyncJobs:
    """The verbs of one Jobs Instance, for asyncio.

    Every method answers and raises what the method of ``Jobs`` by its name does, where
    it is documented. On a connection each call joins the transaction in progress, and
    nothing is ever committed for you; on a pool each call is a transaction of its own.
    Tasks share a pool, not a connection: a transaction belongs to one of them. Where a
    call is cancelled its answer is lost, and it may have been committed.

    Args:
        connection_or_pool: A ``psycopg.AsyncConnection`` or
            ``psycopg_pool.AsyncConnectionPool`` of the event loop in use.
        schema: The schema of the Instance.
        caller: The role to act as, by ``SET LOCAL ROLE`` around each call; the
            connection's own role when left out. The connection's role must be a member
            of it.

    Raises:
        RuntimeError: By any call in another event loop or process than it was made in.
    """

    def __init__(
        self,
        connection_or_pool: Connection | Pool,
        schema: str,
        caller: str | None = None,
    ) -> None:
        self._source = connection_or_pool
        self._schema = schema
        self._requests = Requests(schema)
        self._caller = caller
        self._home = Loop()
        self._kept: dict[bytes, psycopg.AsyncCursor[Any]] = {}
        self._kept_encoding = ""
        self._kept_lock = Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} as {self._caller or 'the connected role'}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection or pool this client stands on."""
        if self._home.is_here():
            await self._source.close()

    async def enqueue(  # noqa: PLR0913 - the arguments are SQL's
        self,
        queue: str,
        kind: str,
        payload: Mapping[str, Any],
        *,
        idempotency_key: str,
        available_at: datetime | None = None,
        max_attempts: int = 3,
    ) -> EnqueuedJob:
        """Make a job durable, and say whether this call created it."""
        return await self._one(
            self._requests.enqueue(
                queue, kind, payload, idempotency_key, available_at, max_attempts
            )
        )

    async def enqueue_many(
        self, items: Iterable[NewJob | Mapping[str, Any]]
    ) -> list[EnqueuedItem]:
        """Make 1 to 1,000 jobs durable, and answer one item each in input order."""
        return await self._all(self._requests.enqueue_many(items))

    async def claim(
        self, queue: str, limit: int = 1, *, wait: float = 0.0
    ) -> list[LeasedJob]:
        """Lease up to *limit* (1 to 1,000) due jobs; an empty list means none is due."""
        request = self._requests.claim(queue, limit)
        longest = _waiting.seconds(wait, "wait")
        ask = self._few if limit == 1 else self._all
        if not longest:
            return await ask(request)
        if not isinstance(self._source, psycopg.AsyncConnection):
            async with self._alone(self._source) as jobs:
                return await jobs.claim(queue, limit, wait=longest)
        return await self._until(self._source, queue, longest, lambda: ask(request))

    async def wait(self, queue: str, timeout: float) -> bool:  # noqa: ASYNC109 - as Jobs
        """Wait until a job of a queue is due; False if none was for *timeout* seconds."""
        longest = _waiting.seconds(timeout, "timeout")
        _wire.text(queue, InvalidQueue, "queue")
        if not isinstance(self._source, psycopg.AsyncConnection):
            async with self._alone(self._source) as jobs:
                return await jobs.wait(queue, longest)

        async def look() -> bool:
            return await self._due_in(queue) <= 0

        return await self._until(self._source, queue, longest, look)

    async def renew(self, lease: Lease) -> datetime:
        """Extend a lease by the Instance's lease length from now; answers its new end."""
        return await self._one(self._requests.renew(lease))

    async def renew_many(self, leases: Iterable[Lease]) -> list[RenewedItem]:
        """Extend 1 to 1,000 leases at once, and answer one item each in input order."""
        return await self._all(self._requests.renew_many(leases))

    async def complete(self, lease: Lease) -> bool:
        """End the job as succeeded; True, also when repeated under the same lease."""
        return await self._one(self._requests.complete(lease))

    async def complete_many(self, leases: Iterable[Lease]) -> list[CompletedItem]:
        """End 1 to 1,000 jobs as succeeded, and answer one item each in input order."""
        return await self._all(self._requests.complete_many(leases))

    async def fail(self, lease: Lease, code: str, *, retryable: bool) -> FailedJob:
        """Record a failed attempt; answers when the next is due, or that none is left."""
        return await self._one(self._requests.fail(lease, code, retryable))

    async def fail_many(
        self, failures: Iterable[Failure | tuple[Lease, str, bool]]
    ) -> list[FailedItem]:
        """Record 1 to 1,000 failed attempts, and answer one item each in input order."""
        return await self._all(self._requests.fail_many(failures))

    async def inspect(self, job_id: UUID | str) -> InspectedJob:
        """Read the durable evidence of one job; changes nothing."""
        return await self._one(self._requests.inspect(job_id))

    async def inspect_attempts(self, job_id: UUID | str) -> list[InspectedAttempt]:
        """Read the history of one job: its attempts in order, a running one last."""
        return await self._all(self._requests.inspect_attempts(job_id))

    async def inspect_queues(self) -> list[InspectedQueue]:
        """Count the live jobs of each queue by state, and how the last ones ended."""
        return await self._all(self._requests.inspect_queues())

    async def inspect_workers(self) -> list[InspectedWorker]:
        """Count the leases and the sessions of each worker; reads as ``inspect_queues``."""
        return await self._all(self._requests.inspect_workers())

    async def inspect_failures(
        self,
        queue: str | None = None,
        *,
        since: datetime | None = None,
        limit: int = 100,
        failure_code: str | None = None,
        before: InspectedFailure | datetime | None = None,
    ) -> list[InspectedFailure]:
        """List the jobs that have failed and were not redriven, newest first."""
        return await self._all(
            self._requests.inspect_failures(queue, since, limit, failure_code, before)
        )

    async def inspect_acts(
        self, limit: int = 100, before: InspectedAct | None = None
    ) -> list[InspectedAct]:
        """Read the audit: what operators did, newest first."""
        return await self._all(self._requests.inspect_acts(limit, before))

    async def inspect_health(self) -> list[InspectedFinding]:
        """List what is wrong with the Instance, worst first; nothing while all is well."""
        return await self._all(self._requests.inspect_health())

    async def explain_job(self, job_id: UUID | str) -> ExplainedJob:
        """Tell why a job is not being claimed, with what to do; changes and locks nothing."""
        return await self._one(self._requests.explain_job(job_id))

    async def redrive(self, job_id: UUID | str, extra_attempts: int = 1) -> FailedJob:
        """Queue a failed job again, with that many more attempts; it is due at once."""
        return await self._one(self._requests.redrive(job_id, extra_attempts))

    async def redrive_failed(  # noqa: PLR0913 - the arguments are SQL's
        self,
        queue: str,
        *,
        since: datetime,
        before: datetime | None = None,
        failure_code: str | None = None,
        limit: int = 100,
        extra_attempts: int = 1,
    ) -> int:
        """Queue failed jobs of a queue again, those first that failed first; answers how many."""
        return await self._one(
            self._requests.redrive_failed(
                queue, since, before, failure_code, limit, extra_attempts
            )
        )

    async def purge(self, before: datetime, limit: int = 1000) -> int:
        """Delete jobs that ended before a time, oldest first; answers how many."""
        return await self._one(self._requests.purge(before, limit))

    async def enforce_retention(self, limit: int = 1000) -> int:
        """Delete jobs that ended longer than ``retention_seconds`` ago; answers how many."""
        return await self._one(self._requests.enforce_retention(limit))

    async def retire_expired(self, limit: int = 1000) -> int:
        """End jobs whose last attempt's lease ran out, as claims do; answers how many."""
        return await self._one(self._requests.retire_expired(limit))

    async def next_available_at(self, queue: str) -> datetime | None:
        """Tell when the next job of a queue falls due, lapsing leases included."""
        return await self._one(self._requests.next_available_at(queue))

    async def _one(self, request: Request[Row]) -> Row:
        (answer,) = await self._few(request)
        return answer

    async def _few(self, request: Request[Row]) -> list[Row]:
        """Call with a kept cursor, which holds the answer until the next call."""
        source = self._source
        if not isinstance(source, psycopg.AsyncConnection):
            return await self._all(request)
        self._home.enter()
        with Translated():
            async with self._kept_lock, _acting_as(source, self._caller):
                cursor = self._kept_cursor(source, request)
                await cursor.execute(request[1], request[2], binary=True)
                return await cursor.fetchall()

    def _kept_cursor(
        self, connection: Connection, request: Request[Row]
    ) -> psycopg.AsyncCursor[Row]:
        # A cursor goes on with the encoding it first met.
        encoding = connection.info.encoding
        if encoding != self._kept_encoding:
            self._kept.clear()
            self._kept_encoding = encoding
        row, statement, _ = request
        cursor = self._kept.get(statement)
        if cursor is None:
            cursor = self._kept[statement] = _cursor(connection, row)
        return cursor

    async def _all(self, request: Request[Row]) -> list[Row]:
        row, statement, arguments = request
        self._home.enter()
        with Translated():
            async with (
                self._transaction() as connection,
                _cursor(connection, row) as cursor,
            ):
                await cursor.execute(statement, arguments, binary=True)
                return await cursor.fetchall()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        if isinstance(self._source, psycopg.AsyncConnection):
            async with _acting_as(self._source, self._caller):
                yield self._source
        else:
            async with self._source.connection() as connection:
                if self._caller is None and connection.autocommit:
                    yield connection  # one statement is a transaction already
                    return
                async with connection.transaction():
                    if self._caller is not None:
                        async with psycopg.AsyncCursor(connection) as cursor:
                            await cursor.execute(ROLE, (self._caller,))
                    yield connection

    @asynccontextmanager
    async def _alone(self, pool: Pool) -> AsyncIterator[AsyncJobs]:
        """Lend a client on one connection of the pool, which commits by itself."""
        self._home.enter()
        async with pool.connection() as connection:
            autocommit = connection.autocommit
            await connection.set_autocommit(True)
            try:
                yield AsyncJobs(connection, self._schema, self._caller)
            finally:
                if not connection.closed:
                    await connection.set_autocommit(autocommit)

    async def _until(
        self,
        connection: Connection,
        queue: str,
        longest: float,
        look: Callable[[], Awaitable[Found]],
    ) -> Found:
        """Look for something until it is there, or for so many seconds."""
        deadline = monotonic() + longest
        found = await look()
        if found or not longest:
            return found
        async with await self._waiter(connection, queue) as waiter:
            for pause in _waiting.pauses(waiter.longest):
                found = await look()
                left = deadline - monotonic()
                if found or left <= 0:
                    break
                due_in = await self._due_in(queue)
                await waiter.sleep(min(pause, left, due_in if due_in > 0 else pause))
        return found

    async def _due_in(self, queue: str) -> float:
        due_in = await self._one(self._requests.due_in(queue))
        return inf if due_in is None else due_in

    async def _waiter(self, connection: Connection, queue: str) -> _waiting.AsyncWaiter:
        key, is_listening = None, False
        if _waiting.can_listen(connection):
            key, process, is_listening = await self._one(
                self._requests.wait_state(queue)
            )
            if process != connection.info.backend_pid:
                key = None
        return _waiting.AsyncWaiter(
            connection,
            _waiting.Wake(self._schema, queue, key, unlisten=not is_listening),
        )


def _cursor(
    connection: Connection, row: AsyncRowFactory[Row]
) -> psycopg.AsyncCursor[Row]:
    # Not the connection's own cursor class: one that binds on the client knows no
    # binary results, which is what frees times from the session's DateStyle.
    cursor = psycopg.AsyncCursor(connection, row_factory=row)
    _wire.register_adapters(cursor)
    return cursor


@asynccontextmanager
async def _acting_as(connection: Connection, caller: str | None) -> AsyncIterator[None]:
    """Put a role in force for one call, and the one before it back."""
    if caller is None:
        yield
        return
    async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
        # As in the client that blocks.
        is_idle = connection.info.transaction_status is TransactionStatus.IDLE
        if is_idle and not connection.autocommit:
            await cursor.execute("select")
        async with connection.transaction():
            before = await (await cursor.execute(ROLE, (caller,))).fetchone()
            yield
            if not (is_idle and connection.autocommit):
                await cursor.execute(ROLE, before and before[:1])
