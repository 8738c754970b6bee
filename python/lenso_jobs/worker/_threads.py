"""The worker whose handlers are functions, each on a thread."""

from __future__ import annotations

from contextvars import copy_context
from inspect import iscoroutinefunction
from threading import Thread
from typing import TYPE_CHECKING, Any

from lenso_jobs.errors import InvalidArgument
from lenso_jobs.worker._base import BaseWorker, OnShutdown
from lenso_jobs.worker._engine import judged, logger
from lenso_jobs.worker._lease import HeldLease
from lenso_jobs.worker._outcome import DONE, UNJUDGED, Verdict, is_never_run, is_unbegun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg_pool import ConnectionPool

    from lenso_jobs.worker._engine import Tally
    from lenso_jobs.worker._lease import Holding, LeaseOfWorker
    from lenso_jobs.worker.observer import Observer


class Worker(BaseWorker):
    """Runs a handler for every job of a queue that falls due, until it is stopped.

    A handler that returns has its job completed. One that raises ``Retry(code)`` or
    ``Fail(code)``, also alone in an exception group, chooses the failure; any other
    exception is a failure worth a retry, with the name of its class as code. Handlers
    run on threads; leases are kept alive by another thread on a connection of its own,
    whatever they do. A handler learns by ``lease.lost`` that its lease is gone and that
    nothing it does counts any more.

    Three connections are opened, and anew after they broke. Jobs are run at least once.

    Args:
        conninfo_or_pool: Where to connect: a connection string, or a pool whose
            connection string and keyword arguments are used. No connection is taken
            from a pool: it may be exhausted.
        schema: The schema of the Instance.
        queue: A declared queue.
        handler: Called with a ``HeldLease``, on up to *concurrency* threads at once.
        concurrency: How many handlers run at once, 1 to 1,000.
        batch: How many jobs to hold at once, running and waiting for a thread, 1 to
            1,000. As many as run when left out: another worker may be free for the rest.
            A few hundred are for jobs of a few milliseconds.
        caller: The declared worker to act as, by ``SET LOCAL ROLE``; the connection's
            own role when left out.
        lease_margin: How many seconds before its end a lease counts as lost, half the
            lease at most; a tenth of it, and a second at most, when left out.
        grace: For how many seconds handlers may go on after ``stop``.
        on_shutdown: What becomes of jobs that have not ended by then, or not begun: they
            are handed back by a retryable failure with code ``worker_shutdown``
            ("return"), or left until their leases run out ("lapse").
        observers: Told of everything that happens.
        prepare_threshold: As psycopg's; None behind PgBouncer before 1.21 in transaction
            mode.

    Raises:
        InvalidArgument: An argument is out of range.
    """

    _lease = HeldLease
    ends_within = 0.0
    is_gone = False

    def __init__(  # noqa: PLR0913 - a worker's options
        self,
        conninfo_or_pool: str | ConnectionPool[Any],
        *,
        schema: str,
        queue: str,
        handler: Callable[[HeldLease], object],
        concurrency: int = 4,
        batch: int | None = None,
        caller: str | None = None,
        lease_margin: float | None = None,
        grace: float = 30.0,
        on_shutdown: OnShutdown = "return",
        observers: Sequence[Observer] = (),
        prepare_threshold: int | None = 5,
    ) -> None:
        if iscoroutinefunction(handler):
            raise InvalidArgument("handler is a coroutine function: use AsyncWorker")
        if is_never_run(handler):
            raise InvalidArgument(
                "handler is a generator function: nobody would run it"
            )
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

    def run(self) -> Tally:
        """Work until ``stop`` is called; answers what became of the jobs.

        Handlers that are still running when the grace is over are left to themselves, on
        daemon threads; their leases are lost.

        Raises:
            JobsError: The server refused a claim, for instance since the queue is not
                declared or the role no worker; what was running has ended.
            RuntimeError: It was run before, or the system has no thread left.
        """
        engine = self._engine(self)
        try:
            for number in range(self._concurrency):
                Thread(
                    target=self._work,
                    name=f"lenso-jobs {self._queue} {number + 1}",
                    daemon=True,
                ).start()
        except BaseException:
            engine.abandon()
            raise
        return engine.run()

    def alert(self) -> None:
        """Nothing to do: whoever waits for a job is woken by the ledger."""

    def tell(self, holding: Holding) -> None:
        """Nothing to do: the handler asks the lease."""

    def _work(self) -> None:
        ended: Holding | None = None
        verdict: Verdict | None = None
        while True:
            try:
                holding = self._ledger.next(ended, verdict)
                if holding is None:
                    return
                ended, verdict = holding, UNJUDGED
                verdict = self._verdict(holding)
            except BaseException:  # noqa: BLE001, S112 - as the next line says
                continue  # a time limit thrown into the thread, too late for its handler

    def _verdict(self, holding: Holding) -> Verdict:
        lease = holding.lease
        try:
            with self._watch.around(lease):
                copy_context().run(self._call, lease)
        except BaseException as error:  # noqa: BLE001 - the next job waits
            self._end_if_forked(1)
            return judged(lease, error)
        self._end_if_forked(0)
        return DONE

    def _call(self, lease: LeaseOfWorker) -> None:
        result = self._handler(lease)
        if is_unbegun(result):
            logger.error("a handler answered what nobody has run: use AsyncWorker")
            raise TypeError("a handler answered an awaitable or a generator")
