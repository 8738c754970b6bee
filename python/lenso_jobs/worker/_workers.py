"""The workers: their options, how they stop, and how they call handlers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from inspect import (
    isasyncgen,
    isasyncgenfunction,
    isawaitable,
    iscoroutine,
    isgenerator,
    isgeneratorfunction,
    signature,
)
from math import inf
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, cast

from lenso_jobs import _waiting
from lenso_jobs.errors import InvalidArgument
from lenso_jobs.worker._lease import AsyncHeldLease, HeldLease, LeaseState, WorkerLease
from lenso_jobs.worker._outcome import (
    DONE,
    HANDED_BACK,
    RELEASED,
    TIMED_OUT,
    UNJUDGED,
    Fail,
    Release,
    Retry,
    Verdict,
    chosen,
    verdict_on,
)
from lenso_jobs.worker._run import Run
from lenso_jobs.worker._settings import (
    ByKind,
    OnShutdown,
    Settings,
    called,
    is_coroutine_function,
    is_plain_kind,
    queues_of,
)
from lenso_jobs.worker.observer import Observer, log, origin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from psycopg_pool import AsyncConnectionPool, ConnectionPool

    from lenso_jobs.worker._outcome import Tally

Lease = TypeVar("Lease")
Returned = TypeVar("Returned")
Handler: TypeAlias = Callable[[Lease], Returned]


class UnfitHandler(Exception):
    """A handler returned something that has yet to be run: its worker is of no use."""


class BaseWorker(Generic[Lease, Returned]):
    """What ``Worker`` and ``AsyncWorker`` have in common."""

    _lease: ClassVar[type[WorkerLease]]
    cancel_seconds: ClassVar[float] = 0.0
    """How long a cancelled handler may take to end, 0 if none can be cancelled."""

    def __init__(  # noqa: PLR0913 - a worker's options
        self,
        conninfo_or_pool: str | ConnectionPool[Any] | AsyncConnectionPool[Any],
        *,
        schema: str,
        queue: str | None = None,
        queues: Mapping[str, int] | None = None,
        handler: Handler[Lease, Returned] | Mapping[str, Handler[Lease, Returned]],
        concurrency: int | None = None,
        batch: int | None = None,
        caller: str | None = None,
        grace: float = 30.0,
        on_shutdown: OnShutdown = "return",
        timeout: float | None = None,
        tracebacks: bool = False,
        observers: Sequence[Observer] = (),
        prepare_threshold: int | None = 5,
    ) -> None:
        """Check the options. The worker connects when it runs.

        Args:
            conninfo_or_pool: Where to connect: a connection string, or a pool whose
                conninfo, kwargs, connection_class and configure are used. The worker
                takes no connection from the pool, which may be exhausted. So the pool
                need not be open, and its check, reset and reconnect_failed are not
                called.
            schema: The schema of the Instance.
            queue: A declared queue, of which *concurrency* handlers run at once.
            queues: Instead of these two: the concurrency of each of several queues, as
                ``{"email": 4, "billing": 2}``.
            handler: Called with a lease, on several threads or in several tasks. Or the
                handlers by kind: a ``Kinds``, or any mapping. A job of another kind is
                released for a minute.
            concurrency: How many handlers run at once, 1 to 1,000. 4 by default.
            batch: How many jobs of a queue to hold at once, running and waiting for a
                handler, 1 to 1,000. At least its concurrency, which is the default, so
                that other workers may take the rest. A few hundred suit jobs of a few
                milliseconds.
            caller: The declared worker to act as, by ``SET LOCAL ROLE``. By default the
                connection's own role.
            grace: For how many seconds handlers may go on after ``stop``.
            on_shutdown: What becomes of jobs whose handlers still run then. "return":
                they are handed back, by a retryable failure with code
                ``worker_shutdown``. "lapse": their leases run out. Jobs that were not
                begun are always released, which uses up no attempt.
            timeout: For how many seconds a handler may run. Then a coroutine is
                cancelled, and the lease of a function on a thread is given up. The
                attempt fails with code ``handler_timeout``. A thread cannot be stopped:
                it takes no other job until its handler ends.
            tracebacks: Whether to log the tracebacks of what handlers raise. They can
                hold parts of payloads.
            observers: A list of observers, told what the worker does.
            prepare_threshold: As psycopg's. None behind PgBouncer before 1.21 in
                transaction mode.

        Raises:
            InvalidArgument: An argument is out of range, or cannot work.
        """
        if isinstance(handler, Mapping):
            if not handler:
                raise InvalidArgument(
                    "handler has no kinds: import the modules that register them"
                )
            for kind, each in handler.items():
                self._check(each, f"the handler of kind {kind}")
            handler = ByKind(handler)
        self._check(handler, "handler")
        self._handler = handler
        self._settings = Settings(
            *(schema, queues_of(queue, concurrency, queues), caller, batch, grace),
            *(on_shutdown, prepare_threshold),
            *(inf if timeout is None else timeout, tracebacks),
        )
        self._run = Run(conninfo_or_pool, self._settings, self._lease, self, observers)
        self._pid: int | None = None  # of the process that runs it

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of queue {self._settings.name}>"

    def run(self, *, until_idle: bool = False) -> Any:  # noqa: ANN401 - typed below
        """Work until ``stop`` is called; return what became of the jobs, a ``Tally``.

        Args:
            until_idle: Whether to return once no job is due and none is held. A job that
                falls due later is left to another run.

        Raises:
            JobsError: The server refused a claim, for instance because the queue is not
                declared or the role is no worker. Running handlers have ended.
            InvalidArgument: What the handler returned has yet to be run: an awaitable or
                a generator, or no awaitable where one is wanted. Its job was released.
            RuntimeError: The worker ran before, or the system has no thread left.
        """
        raise NotImplementedError

    def stop(self, grace: float | None = None) -> None:
        """Claim and begin no more jobs, and let ``run`` return once handlers have ended.

        Returns at once. It may be called from any thread, from a signal handler, before
        ``run``, and again: the earliest end counts.

        Args:
            grace: For how many seconds handlers may go on, their leases kept alive. By
                default the worker's own grace.

        Raises:
            InvalidArgument: *grace* is no number of seconds.
        """
        self._run.stop(
            self._settings.grace if grace is None else _waiting.seconds(grace, "grace")
        )

    @property
    def is_gone(self) -> bool:
        """Whether no handler can run any more."""
        return False

    def offer(self) -> None:
        """Begin handlers, unless their threads wait for jobs."""

    def cancel(self, state: LeaseState) -> None:
        """Cancel a handler, if that is possible."""

    def _check(self, handler: object, name: str) -> None:
        """Refuse a handler that certainly cannot work."""
        if not callable(handler):
            raise InvalidArgument(f"{name} must be callable")
        if isinstance(handler, type):
            raise InvalidArgument(
                f"{name} is a class: give a function, or an instance to call"
            )
        with suppress(ValueError):  # of some that are written in C
            try:
                signature(handler, follow_wrapped=False).bind(None)
            except TypeError:
                raise InvalidArgument(
                    f"{name} must take one argument, the lease"
                ) from None
        if any(
            isgeneratorfunction(f) or isasyncgenfunction(f) for f in called(handler)
        ):
            raise InvalidArgument(
                f"{name} is a generator function, and calling it runs nothing: use "
                "return instead of yield"
            )

    def _begin(self) -> None:
        if self._pid is not None:
            raise RuntimeError("a worker runs once: make another")
        self._pid = os.getpid()

    def _judge(self, state: LeaseState, error: BaseException | None = None) -> Verdict:
        """Return what the end of a handler means for its job.

        The class of an exception is the application's, and may raise anything.
        """
        if os.getpid() != self._pid:
            # The handler forked. Its child would go on as a worker, with the sessions
            # of the parent and all locks that were held.
            os._exit(0 if error is None else 1)
        if error is None:
            return DONE
        if type(error) is UnfitHandler:  # isinstance asks the class of the exception
            self._run.stop_with(InvalidArgument(str(error)))
            return RELEASED
        is_chosen = False
        with suppress(BaseException):
            is_chosen = isinstance(chosen(error), Retry | Fail | Release)
        # A task that was cancelled may have gone on: clients cancel it when they time
        # out, and not all of them take that back.
        is_cut_short = state.is_cancelled or (
            state.task is not None
            and state.task.cancelling() > 0
            and issubclass(type(error), asyncio.CancelledError)
        )
        if self._run.observers:
            state.error = error
        if is_cut_short and not is_chosen:
            return TIMED_OUT if state.is_overdue else HANDED_BACK
        try:
            if not is_chosen:
                traceback = error if self._settings.tracebacks else None
                raised = f"handler raised {origin(error)}"
                log(logging.WARNING, raised, state.lease, error=traceback)
            return verdict_on(error)
        except BaseException:  # noqa: BLE001 - the next job waits
            return UNJUDGED


class Worker(BaseWorker[HeldLease, object]):
    """Runs a handler for every job of its queues that falls due, until it is stopped.

    - A handler that returns completes its job.
    - A handler that raises ``Retry(code)`` or ``Fail(code)`` chooses the failure. One
      that raises ``Release(code, after)`` gives the job back, and uses up no attempt.
      The same holds for one of these alone in an exception group.
    - Any other exception fails the attempt, with the name of its class as failure code.
      The job is retried.

    Handlers run on threads. Another thread keeps their leases alive, on another
    connection. ``lease.lost`` tells a handler that its lease is gone and its work no
    longer counts. The worker opens three connections, and opens them again after they
    broke. Handlers that still run after the grace go on, on daemon threads, but their
    leases are lost. Jobs run at least once. ``help(Worker.__init__)`` describes the
    arguments.
    """

    _lease = HeldLease

    def run(self, *, until_idle: bool = False) -> Tally:
        self._begin()
        try:
            for queue, concurrency in self._settings.queues.items():
                for number in range(concurrency):
                    name = f"lenso-jobs {queue} {number + 1}"
                    Thread(
                        target=self._work, args=(queue,), name=name, daemon=True
                    ).start()
            return self._run.work(until_idle=until_idle)
        finally:
            self._run.jobs.finish()  # so that no thread waits for ever

    def _check(self, handler: object, name: str) -> None:
        super()._check(handler, name)
        if is_coroutine_function(handler):
            raise InvalidArgument(f"{name} is a coroutine function: use AsyncWorker")

    def _work(self, queue: str) -> None:
        ended: LeaseState | None = None
        verdict: Verdict | None = None
        while True:
            try:
                state = self._run.jobs.next(queue, ended, verdict)
                if state is None:
                    return
                ended, verdict = state, UNJUDGED
                verdict = self._verdict(state)
            except BaseException:  # noqa: BLE001, S112 - as the next line says
                continue  # a time limit thrown into the thread, too late for its handler

    def _verdict(self, state: LeaseState) -> Verdict:
        try:
            with self._run.observers.around(state.lease):
                copy_context().run(self._call, cast("HeldLease", state.lease))
        except BaseException as error:  # noqa: BLE001 - the next job waits
            return self._judge(state, error)
        return self._judge(state)

    def _call(self, lease: HeldLease) -> None:
        result = self._handler(lease)
        if result is None:
            return
        if isawaitable(result) or isgenerator(result) or isasyncgen(result):
            if iscoroutine(result):
                result.close()
            raise UnfitHandler(
                "handler returned an awaitable or a generator, of which nothing runs: for "
                "a coroutine function use AsyncWorker"
            )


class AsyncWorker(BaseWorker[AsyncHeldLease, "Awaitable[object]"]):
    """Runs a coroutine for every job of its queues that falls due, until it is stopped.

    - A coroutine that returns completes its job.
    - A coroutine that raises ``Retry(code)`` or ``Fail(code)`` chooses the failure. One
      that raises ``Release(code, after)`` gives the job back, and uses up no attempt.
      The same holds for one of these alone in an exception group.
    - Any other exception fails the attempt, with the name of its class as failure code.
      The job is retried.

    Handlers are tasks of the event loop that runs ``run``. Threads claim, renew and
    report, on three connections: a handler that blocks the loop loses no lease. A handler
    is cancelled if its lease is lost, or if it still runs after the grace. If the task
    that runs ``run`` is cancelled, the worker stops at once: handlers are cancelled and
    their jobs handed back. Jobs run at least once. ``help(AsyncWorker.__init__)``
    describes the arguments.
    """

    _lease = AsyncHeldLease
    cancel_seconds = 1.0

    def _check(self, handler: object, name: str) -> None:
        super()._check(handler, name)
        if is_plain_kind(handler):
            raise InvalidArgument(
                f"{name} is a plain function: make it a coroutine function, or use Worker"
            )

    async def run(self, *, until_idle: bool = False) -> Tally:
        self._begin()
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._free = dict(self._settings.queues)
        self._tasks: set[asyncio.Task[tuple[LeaseState, Verdict] | None]] = set()
        ended: asyncio.Future[Tally] = self._loop.create_future()
        Thread(
            target=self._drive,
            args=(ended, until_idle),
            name=f"lenso-jobs {self._settings.name}",
            daemon=True,
        ).start()
        try:
            return await asyncio.shield(ended)
        except GeneratorExit:  # the loop is gone, and there is no waiting for tasks
            self._tasks.clear()
            raise
        except asyncio.CancelledError:
            self.stop(0)
            await asyncio.wait((ended,))
            ended.exception()
            raise
        finally:
            # They were cancelled; what they do about it is given a second.
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=1.0)

    def _drive(self, ended: asyncio.Future[Tally], until_idle: bool) -> None:
        try:
            tally = self._run.work(until_idle=until_idle)
        except BaseException as error:  # noqa: BLE001 - the loop's to raise
            self._call_in_loop(ended.set_exception, error)
        else:
            self._call_in_loop(ended.set_result, tally)

    @property
    def is_gone(self) -> bool:
        """Whether the loop was closed."""
        return self._loop.is_closed()

    def offer(self) -> None:
        """Begin handlers, in the loop."""
        for queue in self._free:
            self._call_in_loop(self._fill, queue)

    def cancel(self, state: LeaseState) -> None:
        """Cancel the handler, in the loop."""
        self._call_in_loop(_cancel, state)

    def _call_in_loop(self, act: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(act, *arguments)

    def _fill(self, queue: str) -> None:
        for _ in range(min(self._free[queue], self._run.jobs.waiting(queue))):
            self._free[queue] -= 1
            # In a context of its own: this may be called at the end of another task.
            task = asyncio.Task(self._handle(queue), context=self._context.copy())
            self._tasks.add(task)
            # Also called for a task that is cancelled before its first step.
            task.add_done_callback(partial(self._end, queue))

    def _end(
        self, queue: str, task: asyncio.Task[tuple[LeaseState, Verdict] | None]
    ) -> None:
        if not task.cancelled() and (ended := task.result()) is not None:
            ended[0].task = None  # its result refers to the state
            self._run.jobs.end(*ended)
        self._tasks.discard(task)
        self._free[queue] += 1
        self._fill(queue)

    async def _handle(self, queue: str) -> tuple[LeaseState, Verdict] | None:
        # Not before the task runs: the worker may stop, or the loop may block.
        state = self._run.jobs.take(queue)
        if state is None:
            return None
        state.task = asyncio.current_task()
        try:
            with self._run.observers.around(state.lease):
                await self._awaitable(cast("AsyncHeldLease", state.lease))
        except BaseException as error:
            if self.is_gone:  # what the closed loop left is being collected
                raise
            return state, self._judge(state, error)
        return state, self._judge(state)

    def _awaitable(self, lease: AsyncHeldLease) -> Awaitable[object]:
        try:
            awaitable = self._handler(lease)
        except RuntimeError as error:
            if "event loop" in str(error):  # as asyncio.run says
                raise UnfitHandler("handler runs an event loop: use Worker") from None
            raise
        if not isawaitable(awaitable):
            raise UnfitHandler(
                "handler returned no awaitable, as a coroutine function does: for a "
                "plain function use Worker"
            )
        return awaitable


def _cancel(state: LeaseState) -> None:
    state.is_cancelled = True
    if state.task is not None:
        state.task.cancel()
