"""What both workers are: their options, checked, and an engine."""

from __future__ import annotations

import os
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from lenso_jobs import _waiting
from lenso_jobs._home import Process
from lenso_jobs.errors import InvalidArgument
from lenso_jobs.worker._engine import Crew, Engine, Stop, Watch
from lenso_jobs.worker._lease import LeaseOfWorker, Terms
from lenso_jobs.worker._ledger import MOST_AT_ONCE, Ledger
from lenso_jobs.worker._line import connector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lenso_jobs.worker.observer import Observer

OnShutdown: TypeAlias = Literal["return", "lapse"]


class BaseWorker:
    """The options of a worker, and how to stop it."""

    _lease: ClassVar[type[LeaseOfWorker]]

    def __init__(  # noqa: PLR0913 - a worker's options
        self,
        conninfo_or_pool: object,
        *,
        schema: str,
        queue: str,
        handler: Callable[[Any], Any],
        concurrency: int,
        batch: int | None,
        caller: str | None,
        lease_margin: float | None,
        grace: float,
        on_shutdown: OnShutdown,
        observers: Sequence[Observer],
        prepare_threshold: int | None,
    ) -> None:
        if not isinstance(conninfo_or_pool, str) and not hasattr(
            conninfo_or_pool, "conninfo"
        ):
            raise InvalidArgument(
                "conninfo_or_pool must be a connection string or a psycopg_pool pool"
            )
        if not callable(handler):
            raise InvalidArgument("handler must be callable")
        if on_shutdown not in ("return", "lapse"):
            raise InvalidArgument('on_shutdown must be "return" or "lapse"')
        margin = (
            None
            if lease_margin is None
            else _waiting.seconds(lease_margin, "lease_margin")
        )
        self._handler = handler
        self._queue = _text(queue, "queue")
        self._terms = Terms(_text(schema, "schema"), caller, margin)
        self._concurrency = _whole(concurrency, "concurrency")
        self._ledger = Ledger(
            self._concurrency,
            max(self._concurrency, 1 if batch is None else _whole(batch, "batch")),
            hands_back=on_shutdown == "return",
        )
        self._grace = _waiting.seconds(grace, "grace")
        self._watch = Watch(observers)
        self._connect = connector(
            conninfo_or_pool, f"lenso-jobs {queue}", prepare_threshold
        )
        self._orders: SimpleQueue[Stop | None] = SimpleQueue()
        self._was_run = False
        # Of run, without which nothing is called.
        self._home: Process

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of queue {self._queue}>"

    def stop(self, grace: float | None = None) -> None:
        """Claim no more, and let ``run`` return once what is running has ended.

        Returns at once, and may be called from any thread, from a signal handler, before
        ``run``, and again: the shorter grace counts.

        Args:
            grace: For how many seconds handlers may go on, their leases kept alive; that
                of the worker when left out.
        """
        seconds = self._grace if grace is None else _waiting.seconds(grace, "grace")
        self._orders.put(Stop(monotonic() + seconds))

    def _end_if_forked(self, code: int) -> None:
        """End a child that the handler forked: it would go on as a worker.

        Its sessions are the parent's, and so are whatever locks were held.
        """
        if not self._home.is_here():
            os._exit(code)

    def _engine(self, crew: Crew) -> Engine:
        if self._was_run:
            raise RuntimeError("a worker runs once: make another")
        self._was_run = True
        self._home = Process()
        return Engine(
            connect=self._connect,
            lease=self._lease,
            terms=self._terms,
            queue=self._queue,
            ledger=self._ledger,
            crew=crew,
            watch=self._watch,
            orders=self._orders,
            grace=self._grace,
        )


def _text(value: object, argument: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{argument} must be text")
    return value


def _whole(value: object, argument: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{argument} must be a whole number")
    if not 1 <= value <= MOST_AT_ONCE:
        raise InvalidArgument(f"{argument} must be 1 to {MOST_AT_ONCE:,}")
    return value
