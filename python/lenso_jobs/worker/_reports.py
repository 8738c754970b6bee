"""How a worker reports the ends of its jobs to the server."""

from __future__ import annotations

import logging
from functools import partial
from itertools import repeat
from time import monotonic, sleep
from typing import TYPE_CHECKING

import psycopg

from lenso_jobs._models import Failure
from lenso_jobs.errors import JobsError
from lenso_jobs.worker._outcome import (
    DONE,
    HANDED_BACK,
    ROLLED_BACK,
    Outcome,
    Verdict,
)
from lenso_jobs.worker._part import Part, is_passing, is_servers_own
from lenso_jobs.worker.observer import log, logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lenso_jobs.worker._connection import WorkerJobs
    from lenso_jobs.worker._lease import LeaseState
    from lenso_jobs.worker._run import Run

_OUTCOMES: dict[str, Outcome] = {
    "queued": "retried",
    "failed": "failed",
}
_RELEASED: dict[str, Outcome] = {"queued": "released", "invalid_lease": "lost"}


class Reports(Part):
    """Reports jobs that have ended, up to 1,000 a call."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._is_unobserved = not (run.observers or logger.isEnabledFor(logging.DEBUG))

    def work(self) -> None:
        """Report until the worker ends."""
        while ended := self._run.jobs.collect():
            lost = [state for state in ended if state.verdict is None]
            self._settle(ended, lost, repeat("lost"))
            report = partial(self._report, ended)
            if ended and not self.call(self._run.ending, report):
                return

    def _report(self, ended: list[LeaseState], jobs: WorkerJobs) -> None:
        """Report what has not been reported; take each job off the list once it is."""
        now = monotonic()
        late = [s for s in ended if now >= s.ends_at and not s.completes_itself]
        if late and self._run.closing.is_set():
            self._run.tally.is_clean = False
        self._settle(ended, late, repeat("lost"))
        own = [state for state in ended if state.completes_itself]
        if own:
            self.expect()
            self._ask_about(ended, own, jobs)
        groups: dict[Verdict | None, list[LeaseState]] = {}
        for state in ended:
            verdict = state.verdict
            is_alike = verdict and (verdict is DONE or verdict.releases)
            groups.setdefault(verdict if is_alike else None, []).append(state)
        for verdict, group in groups.items():
            report = (
                _fail if verdict is None else partial(_release, after=verdict.after)
            )
            report = _complete if verdict is DONE else report
            self._settle(ended, group, self._outcomes(jobs, report, group))

    def _outcomes(
        self,
        jobs: WorkerJobs,
        report: Callable[[WorkerJobs, list[LeaseState]], list[Outcome]],
        group: list[LeaseState],
        pauses_left: tuple[float, ...] = (0.05, 0.2),
    ) -> list[Outcome]:
        """Report together, or one by one: what is wrong with one harms no other."""
        self.expect()
        try:
            return report(jobs, group)
        except (psycopg.Error, JobsError) as error:
            if isinstance(error, psycopg.Error) and is_passing(error):
                raise
            if len(group) > 1:
                return [
                    outcome
                    for state in group
                    for outcome in self._outcomes(jobs, report, [state])
                ]
            if is_servers_own(error) and pauses_left:
                sleep(pauses_left[0])
                return self._outcomes(jobs, report, group, pauses_left[1:])
            # The text is the server's, and may be anything.
            refusal = f"the server refuses a report ({type(error).__name__})"
            log(logging.ERROR, refusal, group[0].lease)
            return ["lost"]

    def _ask_about(
        self, ended: list[LeaseState], own: list[LeaseState], jobs: WorkerJobs
    ) -> None:
        """Find out what became of jobs that their handlers completed themselves.

        A renewal skips a locked row: a completion that is not committed yet. A renewal
        that succeeds means that the handler rolled back. Otherwise the job has ended, as
        a repeated completion confirms, or the lease is gone.
        """
        busy: list[LeaseState] = []
        gone: list[LeaseState] = []
        items = jobs.renew_many([state.lease for state in own])
        for state, item in zip(own, items, strict=True):
            if item.outcome == "renewed":
                state.completes_itself = False
                if state.verdict is DONE:
                    state.verdict = ROLLED_BACK
            else:
                (busy if item.outcome == "busy" else gone).append(state)
        if gone:
            outcomes = _complete(jobs, gone)
            for state in gone:
                state.verdict = DONE
            self._settle(ended, gone, outcomes)
        if busy:
            ended[:] = [state for state in ended if state not in busy]
            self._run.jobs.put_off(busy)

    def _settle(
        self,
        ended: list[LeaseState],
        group: list[LeaseState],
        outcomes: Iterable[Outcome],
    ) -> None:
        """Count, log and let go of jobs whose outcomes are known."""
        if not group:
            return
        for state, outcome in zip(group, outcomes, strict=False):
            if outcome == "succeeded" and self._is_unobserved:
                self._run.tally.succeeded += 1
            else:
                self._run.settle(state, outcome)
            state.let_go()
        settled = set(group)
        ended[:] = [state for state in ended if state not in settled]
        self._run.jobs.forget(group)
        if self._run.closing.is_set():
            self._run.orders.put(None)


def _complete(jobs: WorkerJobs, group: list[LeaseState]) -> list[Outcome]:
    outcomes: list[Outcome] = ["succeeded"] * len(group)
    for position in jobs.complete_all([state.lease for state in group]):
        outcomes[position - 1] = "lost"
    return outcomes


def _release(
    jobs: WorkerJobs, group: list[LeaseState], after: int | None
) -> list[Outcome]:
    items = jobs.release_many([state.lease for state in group], delay=after or 0)
    outcomes = [item.outcome for item in items]
    # A job that was released too often is handed back, or fails as its handler said.
    refused = [s for s, o in zip(group, outcomes, strict=True) if o not in _RELEASED]
    for state in refused:
        code = state.verdict and state.verdict.code
        state.verdict = Verdict(code, retryable=True) if code else HANDED_BACK
    handed_back = iter(_fail(jobs, refused) if refused else ())
    return [_RELEASED[o] if o in _RELEASED else next(handed_back) for o in outcomes]


def _fail(jobs: WorkerJobs, group: list[LeaseState]) -> list[Outcome]:
    items = jobs.fail_many(
        Failure(state.lease, verdict.code, verdict.retryable, verdict.after)
        for state in group
        if (verdict := state.verdict) and verdict.code
    )
    return [_OUTCOMES.get(item.outcome, "lost") for item in items]
