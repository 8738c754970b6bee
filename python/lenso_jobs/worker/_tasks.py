"""The worker whose handlers are coroutines, each a task of one event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from inspect import isawaitable
from threading import Thread
from typing import TYPE_CHECKING, Any

from lenso_jobs.worker._base import BaseWorker, OnShutdown
from lenso_jobs.worker._engine import judged, logger
from lenso_jobs.worker._lease import AsyncHeldLease
from lenso_jobs.worker._outcome import DONE, HANDED_BACK, Verdict, is_chosen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextvars import Context

    from psycopg_pool import AsyncConnectionPool

    from lenso_jobs.worker._engine import Engine, Tally
    from lenso_jobs.worker._lease import Holding, LeaseOfWorker
    from lenso_jobs.worker.observer import Observer


class AsyncWorker(BaseWorker):
    """As ``Worker``, for handlers that are coroutine functions.

    Handlers are tasks of the loop that runs ``run``. Claims, renewals and reports are
    made by threads: a handler that blocks the loop loses no lease. One whose lease is
    lost, or that is running when the grace is over, is cancelled.

    Args:
        conninfo_or_pool: As for ``Worker``; no connection is taken from a pool.
        schema: The schema of the Instance.
        queue: A declared queue.
        handler: Called with an ``AsyncHeldLease``, up to *concurrency* at once.
        concurrency: As for ``Worker``.
        batch: As for ``Worker``.
        caller: As for ``Worker``.
        lease_margin: As for ``Worker``.
        grace: As for ``Worker``.
        on_shutdown: As for ``Worker``.
        observers: As for ``Worker``.
        prepare_threshold: As for ``Worker``.

    Raises:
        InvalidArgument: An argument is out of range.
    """

    _lease = AsyncHeldLease
    ends_within = 1.0

    def __init__(  # noqa: PLR0913 - a worker's options
        self,
        conninfo_or_pool: str | AsyncConnectionPool[Any],
        *,
        schema: str,
        queue: str,
        handler: Callable[[AsyncHeldLease], Awaitable[object]],
        concurrency: int = 4,
        batch: int | None = None,
        caller: str | None = None,
        lease_margin: float | None = None,
        grace: float = 30.0,
        on_shutdown: OnShutdown = "return",
        observers: Sequence[Observer] = (),
        prepare_threshold: int | None = 5,
    ) -> None:
        super().__init__(
            conninfo_or_pool,
            schema=schema,
            queue=queue,
            handler=handler,
            concurrency=concurrency,
            batch=batch,
            caller=caller,
            lease_margin=lease_margin,
            grace=grace,
            on_shutdown=on_shutdown,
            observers=observers,
            prepare_threshold=prepare_threshold,
        )
        self._free = self._concurrency
        self._tasks: set[asyncio.Task[Verdict]] = set()
        # Of run, without which nothing is called.
        self._loop: asyncio.AbstractEventLoop
        self._context: Context

    async def run(self) -> Tally:
        """Work until ``stop`` is called; answers what became of the jobs.

        Where the task that runs it is cancelled, it stops at once: handlers are
        cancelled and their jobs handed back.

        Raises:
            JobsError: The server refused a claim, for instance since the queue is not
                declared or the role no worker; what was running has ended.
            RuntimeError: It was run before, or the system has no thread left.
        """
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        ended: asyncio.Future[Tally] = self._loop.create_future()
        engine = self._engine(self)
        try:
            Thread(
                target=self._drive,
                args=(engine, ended),
                name=f"lenso-jobs {self._queue}",
                daemon=True,
            ).start()
        except BaseException:
            engine.abandon()
            raise
        try:
            return await asyncio.shield(ended)
        except GeneratorExit:  # the loop is gone, where one could wait for tasks
            self._tasks.clear()
            raise
        except asyncio.CancelledError:
            self.stop(0)
            await asyncio.wait((ended,))
            ended.exception()
            raise
        finally:
            # They were cancelled; what they do about it is not waited for for long.
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=1.0)

    def _drive(self, engine: Engine, ended: asyncio.Future[Tally]) -> None:
        try:
            tally = engine.run()
        except BaseException as error:  # noqa: BLE001 - the loop's to raise
            self._call(ended.set_exception, error)
        else:
            self._call(ended.set_result, tally)

    @property
    def is_gone(self) -> bool:
        """Whether the loop was closed."""
        return self._loop.is_closed()

    def alert(self) -> None:
        """Begin runs in the loop."""
        self._call(self._fill)

    def tell(self, holding: Holding) -> None:
        """Cancel the handler, in the loop."""
        self._call(_cancel, holding)

    def _call(self, act: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        """Act in the loop; where it was closed, nobody is left to act for."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, *arguments)

    def _fill(self) -> None:
        while self._free and (holding := self._ledger.take()) is not None:
            self._free -= 1
            # In a context of its own: this may be called at the end of another run.
            holding.task = task = asyncio.Task(
                self._run(holding), context=self._context.copy()
            )
            self._tasks.add(task)
            # Also of one that is cancelled before it began.
            task.add_done_callback(partial(self._end, holding))

    def _end(self, holding: Holding, task: asyncio.Task[Verdict]) -> None:
        self._ledger.end(holding, HANDED_BACK if task.cancelled() else task.result())
        self._tasks.discard(task)
        self._free += 1
        self._fill()

    def _call_handler(self, lease: LeaseOfWorker) -> Awaitable[object]:
        awaitable: Awaitable[object] = self._handler(lease)
        if not isawaitable(awaitable):
            logger.error("a handler answered no awaitable: use Worker")
            raise TypeError("a handler answered no awaitable")
        return awaitable

    async def _run(self, holding: Holding) -> Verdict:
        lease = holding.lease
        try:
            with self._watch.around(lease):
                await self._call_handler(lease)
        except BaseException as error:  # noqa: BLE001 - the other jobs go on
            self._end_if_forked(1)
            return (
                HANDED_BACK if _is_cut_short(holding, error) else judged(lease, error)
            )
        self._end_if_forked(0)
        return DONE


def _cancel(holding: Holding) -> None:
    holding.is_told = True
    if holding.task is not None:
        holding.task.cancel()


def _is_cut_short(holding: Holding, error: BaseException) -> bool:
    """Whether a handler ended because it was cancelled by us, or by who ends the loop.

    A task that was cancelled may have gone on: clients cancel it when they time out, and
    not all of them take that back.
    """
    is_cancelled = holding.task is not None and holding.task.cancelling() > 0
    return (
        holding.is_told
        or (is_cancelled and issubclass(type(error), asyncio.CancelledError))
    ) and not is_chosen(error)
