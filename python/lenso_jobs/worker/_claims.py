"""How a worker claims jobs, and keeps their leases."""

from __future__ import annotations

from functools import partial
from math import inf
from operator import eq
from time import monotonic, sleep
from typing import TYPE_CHECKING

from psycopg.rows import args_row

from lenso_jobs._calls import CLAIM
from lenso_jobs._waiting import POLLING_SECONDS, pauses
from lenso_jobs.worker._held import MOST_AT_ONCE
from lenso_jobs.worker._part import Part
from lenso_jobs.worker.observer import logger

if TYPE_CHECKING:
    from collections.abc import KeysView, Mapping
    from socket import socket

    from lenso_jobs.worker._connection import WorkerJobs, WorkerWaiter
    from lenso_jobs.worker._lease import LeaseState
    from lenso_jobs.worker._run import Run

_GIVE_WAY_SECONDS = 0.0001
_LONGEST_REST = 0.1
_IN_VAIN_SECONDS = 2.0
"""How long a job may be due that no claim returns, before a queue counts as idle."""


class Renewals(Part):
    """Renews leases, on a thread that no handler can block."""

    def work(self) -> None:
        """Renew leases until the worker ends."""
        ending = self._run.ending
        # Now rather than when it is needed: there may be no free connection then.
        self.call(ending, lambda _: None)
        while due := self._run.jobs.wait_for_renewals():
            self.call(ending, partial(self._renew, due))

    def _renew(self, due: list[LeaseState], jobs: WorkerJobs) -> None:
        called_at = monotonic()
        due = [state for state in due if not state.is_lost]
        if not due:
            return
        first_end = min(state.ends_at for state in due)
        self.expect(max(1.0, first_end - called_at) / 2)
        items = jobs.renew_many([state.lease for state in due])
        for state, item in zip(due, items, strict=True):
            if item.outcome == "renewed" and item.seconds_left is not None:
                state.extend(called_at, item.seconds_left)
                state.renewed_until = item.lease_expires_at
            elif item.outcome == "busy":
                now = monotonic()
                state.renew_at = now + max(0.05, (state.ends_at - now) / 4)
            else:
                state.renew_at = inf
                if self._run.jobs.lose(state):
                    self._run.note_lost(state)


class Claims(Part):
    """Claims as many jobs as there is room for, as soon as they are due.

    It does so while there is a connection for renewals. An alarm ends its sleep.
    """

    def __init__(
        self, run: Run, renewals: Renewals, alarm: socket, *, until_idle: bool
    ) -> None:
        super().__init__(run)
        self._renewals = renewals
        self._alarm = alarm
        self._until_idle = until_idle
        self._claim = CLAIM.returning(args_row(partial(run.lease, run.settings)))
        self._is_polling_logged = False

    def work(self) -> None:
        """Claim until the worker stops."""
        look = self._look_until_idle if self._until_idle else self._look
        while (
            self._run.jobs.wait_for_room()
            and self._wait_until_renewable()
            and self.call(self._run.closing, look)
        ):
            pass

    def _wait_until_renewable(self) -> bool:
        """Wait until leases can be renewed; return False if the end came first.

        The role may have no connection left for that. Jobs must not begin whose leases
        would run out.
        """
        rest = 0.001
        while not self._renewals.is_open:
            if self._run.closing.wait(rest):
                return False
            rest = min(rest * 2, _LONGEST_REST)
        return True

    def _look(self, jobs: WorkerJobs) -> None:
        """Claim the jobs that are due; if none is, wait for one and claim it."""
        queues = self._run.jobs.wanted()
        if not queues or any(self._take(jobs, queues)):
            return
        with jobs.waiter(*queues) as waiter:
            if waiter.longest == POLLING_SECONDS:
                self._log_polling(jobs, *queues)
            self._wait(jobs, waiter, queues.keys())

    def _wait(
        self, jobs: WorkerJobs, waiter: WorkerWaiter, queues: KeysView[str]
    ) -> None:
        """Claim what falls due, until many jobs are due or other queues have room."""
        held, closing = self._run.jobs, self._run.closing
        rests, most = pauses(waiter.longest), MOST_AT_ONCE
        while (wanted := held.wanted()).keys() == queues and self._renewals.is_open:
            is_woken, most = most == 1, MOST_AT_ONCE
            if is_woken:
                wanted = dict.fromkeys(wanted, 1)
            taken = self._take(jobs, wanted)
            if closing.is_set():
                return
            if any(taken):
                rests = pauses(waiter.longest)
            if any(map(eq, taken, wanted.values())):
                if is_woken:
                    # The handler's thread first: this one would keep the interpreter
                    # until its next call waits for the server.
                    sleep(_GIVE_WAY_SECONDS)
                    continue
                # The jobs are with their handlers before the waiting ends, and so many
                # more may be due that waiting is of no use.
                return
            rest = next(rests)
            # A short one needs no query.
            if rest > _LONGEST_REST and waiter.longest > POLLING_SECONDS:
                due_in = [jobs.due_in(queue) for queue in queues]
                rest = min(rest, min((d for d in due_in if d > 0), default=rest))
            self.expect(rest=rest)
            waiter.sleep_until(self._alarm, rest)
            if closing.is_set():
                return
            # One job is claimed in half the time of several, and mostly it is one.
            most = 1

    def _look_until_idle(self, jobs: WorkerJobs) -> None:
        """Claim the jobs that are due; stop the worker once none is and none is held."""
        held, closing = self._run.jobs, self._run.closing
        rests, in_vain = pauses(POLLING_SECONDS), 0.0
        while (wanted := held.wanted()) and self._renewals.is_open:
            was_idle = not held.has_work
            if any(self._take(jobs, wanted)):
                return
            # A job may be due and locked by another session, or overlooked for a while.
            if was_idle and (
                in_vain > _IN_VAIN_SECONDS
                or all(jobs.due_in(queue) > 0 for queue in wanted)
            ):
                self._run.stop(inf)
                return
            rest = next(rests)
            if was_idle:
                in_vain += rest
                closing.wait(rest)
            else:
                held.wait_until_empty(rest)

    def _log_polling(self, jobs: WorkerJobs, queue: str, *others: str) -> None:
        if not self._is_polling_logged:
            self._is_polling_logged = True
            logger.warning(
                "queue %s is looked at every %.0f s: %s",
                ", ".join((queue, *others)),
                POLLING_SECONDS,
                jobs.why_polling(queue),
            )

    def _take(self, jobs: WorkerJobs, wanted: Mapping[str, int]) -> list[int]:
        """Claim so many jobs of each queue, and return how many there were."""
        return [self._take_of(jobs, *each) for each in wanted.items()]

    def _take_of(self, jobs: WorkerJobs, queue: str, wanted: int) -> int:
        self.expect()
        called_at = monotonic()
        leases = jobs.claim_as(self._claim, queue, wanted)
        self._run.outage.over(self)
        if leases:
            states = [lease._state for lease in leases]  # noqa: SLF001 - not for handlers
            for state in states:
                state.extend(called_at, state.lease.seconds_left)
            self._run.observers.tell("claimed", queue, len(leases))
            self._run.jobs.add(states)
            self._run.executor.offer()
        return len(leases)
