"""A worker at work: its parts, its deadline and its end."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any

from lenso_jobs.worker._claims import Claims, Renewals
from lenso_jobs.worker._connection import connector
from lenso_jobs.worker._held import HeldJobs
from lenso_jobs.worker._outcome import HANDED_BACK, Outcome, Tally
from lenso_jobs.worker._part import Outage, Part
from lenso_jobs.worker._reports import Reports
from lenso_jobs.worker.observer import Ended, Observer, Observers, log, logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lenso_jobs.worker._lease import LeaseState, WorkerLease
    from lenso_jobs.worker._settings import Settings
    from lenso_jobs.worker._workers import BaseWorker

HAND_BACK_SECONDS = 5.0
"""How long a worker tries to report its last jobs once the grace is over."""
_SAY_EVERY_SECONDS = 10.0
_TICK_SECONDS = 0.1
_LEVELS = {"released": logging.INFO, "failed": logging.ERROR}
_NEVER = 1e300  # an order to stop that sets no limit


class Run:
    """The one run of a worker, which all its threads share.

    Claims, renewals and reports have a thread and a connection each. So no blocking handler
    and no slow report keeps a lease from being renewed.
    """

    def __init__(
        self,
        source: object,
        settings: Settings,
        lease: type[WorkerLease],
        executor: BaseWorker[Any, Any],
        observers: Sequence[Observer],
    ) -> None:
        self.connect = connector(source, settings)
        self.settings = settings
        self.lease = lease
        self.executor = executor
        self.observers = Observers(observers)
        self.jobs = HeldJobs(
            settings.queues,
            settings.batch,
            hands_back=settings.on_shutdown == "return",
        )
        self.outage = Outage(self.observers)
        self.tally = Tally()
        # No more claims; no more calls.
        self.closing, self.ending = Event(), Event()
        # When to be over, or None: to look again what there is to wait for. A signal
        # handler may put into this kind of queue.
        self.orders: SimpleQueue[float | None] = SimpleQueue()
        self._deadline, self._say_at = inf, -inf
        self._error: BaseException | None = None
        self._parts: tuple[Part, ...] = ()

    def stop(self, grace: float) -> None:
        """Begin no more handlers, and give those that run so many seconds."""
        self.jobs.stop()
        self.orders.put(monotonic() + grace)

    def stop_with(self, error: BaseException) -> None:
        """Stop because of an error, which ``work`` raises."""
        self._error = self._error or error
        self.stop(self.settings.grace)

    def note_lost(self, state: LeaseState) -> None:
        """Tell the log, the handler and the observers that a lease was lost."""
        log(logging.WARNING, "lease lost while its handler runs", state.lease)
        self.executor.cancel(state)
        self.observers.tell("lost", state.lease)

    def settle(self, state: LeaseState, outcome: Outcome) -> None:
        """Count what became of a job, and tell the log and the observers."""
        code = state.verdict.code if state.verdict and outcome != "lost" else None
        if state.verdict is HANDED_BACK and outcome == "retried":
            outcome = "handed_back"
        setattr(self.tally, outcome, getattr(self.tally, outcome) + 1)
        if outcome == "succeeded":
            if logger.isEnabledFor(logging.DEBUG):
                log(logging.DEBUG, outcome, state.lease)
        else:
            log(_LEVELS.get(outcome, logging.WARNING), outcome, state.lease, code)
        facts = outcome, code, state.seconds, state.error
        self.observers.tell("ended", Ended(state.lease, *facts))
        state.error = None  # its traceback refers to the state

    def work(self, *, until_idle: bool) -> Tally:
        """Work until stopped, or until idle; return what became of the jobs."""
        logger.info("worker of queue %s starts", self.settings.name)
        alarm, bell = socket.socketpair()
        with alarm, bell:
            self.jobs.ring = partial(bell.send, b".")
            renewals = Renewals(self)
            claims = Claims(self, renewals, alarm, until_idle=until_idle)
            self._parts = (claims, renewals, Reports(self))
            try:
                self._tick(0)  # it may have been stopped before
                for part in self._parts:
                    part.start()
                while self._deadline == inf:
                    self._tick()
                self.closing.set()
                self.jobs.close()
                claims.hurry(HAND_BACK_SECONDS)
                bell.send(b".")
                # What a claim on its way has leased is to be released.
                self._supervise(
                    lambda: claims.is_alive() and claims.is_open, at_least=1.0
                )
                self._supervise(lambda: self.jobs.has_work)
                self._give_up_handlers()
            except BaseException:
                # An interrupt, for instance: the jobs are released or handed back.
                self._deadline = monotonic()
                self.jobs.close()
                self._give_up_handlers()
                raise
            finally:
                self._end(bell)
        logger.info(
            "worker of queue %s has stopped: %s", self.settings.name, self.tally
        )
        if self._error is not None:
            raise self._error
        return self.tally

    def _supervise(self, is_going: Callable[[], object], at_least: float = 0.0) -> None:
        """Look after leases and connections while something goes on."""
        earliest = monotonic() + at_least
        while is_going() and monotonic() < max(self._deadline, earliest):
            self._say_what_runs()
            self._tick()

    def _tick(self, longest: float = _TICK_SECONDS) -> None:
        with suppress(Empty):
            order = self.orders.get(timeout=longest)
            while True:
                if order is not None:
                    self._deadline = min(self._deadline, order, _NEVER)
                order = self.orders.get_nowait()
        for state in self.jobs.lapse():
            self.note_lost(state)
        timeout = self.settings.timeout
        for state in self.jobs.time_out(timeout, self.executor.cancel_seconds):
            log(logging.WARNING, f"its handler has run for {timeout:g} s", state.lease)
            self.executor.cancel(state)
        now = monotonic()
        if self.executor.is_gone:
            self._deadline = min(self._deadline, now)
        for part in self._parts:
            part.cut_if_overdue(now)

    def _say_what_runs(self) -> None:
        now, running = monotonic(), len(self.jobs.running)
        if running and now >= self._say_at:
            self._say_at = now + _SAY_EVERY_SECONDS
            left = max(0.0, self._deadline - now)
            logger.info(
                "stopping: %d handler%s, grace %s",
                running,
                " runs" if running == 1 else "s run",
                f"{left:.0f} s" if left < _NEVER / 2 else "without limit",
            )

    def _give_up_handlers(self) -> None:
        """Cancel the handlers that still run after the grace, and hand back their jobs."""
        if self.jobs.is_stuck:
            self.tally.is_clean = False
        for state in self.jobs.running:
            self.tally.is_clean = False
            log(logging.WARNING, "the grace is over, its handler runs", state.lease)
            self.executor.cancel(state)
        # A handler that is cancelled cleans up before another worker begins its job.
        self._supervise(
            lambda: self.jobs.running, at_least=self.executor.cancel_seconds
        )
        self.jobs.abandon()
        self._supervise(lambda: self.jobs.has_work, at_least=HAND_BACK_SECONDS)

    def _end(self, bell: socket.socket) -> None:
        self.closing.set()
        self.ending.set()
        is_clean = not self.jobs.finish()
        bell.send(b".")
        for seconds in (1.0, 0.0 if is_clean else 1.0):
            for part in self._parts:
                if part.ident is not None:  # no thread may have been left for it
                    part.join(seconds)
            for part in self._parts:
                part.cut()
        for state in self.jobs.finish():
            self.tally.is_clean = False
            self.settle(state, "lost")
