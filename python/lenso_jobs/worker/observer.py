"""What a worker tells whoever watches it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lenso_jobs.worker._lease import LeaseOfWorker
    from lenso_jobs.worker._outcome import Outcome


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a job that a worker held.

    ``code`` is the failure code that was reported, if any; ``seconds`` is how long the
    handler ran, 0 if it was never started.
    """

    lease: LeaseOfWorker
    outcome: Outcome
    code: str | None
    seconds: float


class Observer:
    """Override what you need; each lease that was claimed ends exactly once.

    ``claimed`` comes before anything else about a job. ``ended`` may come before its
    handler has ended, where that was abandoned when the grace was over.

    Methods are called from the threads of the worker, ``running`` from the one that runs
    the handler, and must be quick. What they raise is logged by its class, without its
    text, and otherwise ignored.
    """

    def claimed(self, queue: str, count: int) -> None:
        """Jobs were leased."""

    def running(self, lease: LeaseOfWorker) -> AbstractContextManager[object]:
        """Answer what is entered around the handler, in its thread or task."""
        del lease
        return nullcontext()

    def lost(self, lease: LeaseOfWorker) -> None:
        """A lease was lost while the handler runs, for another reason than a stop."""

    def ended(self, ended: Ended) -> None:
        """A job has left the worker, by the server's answer."""

    def disconnected(self, error: BaseException) -> None:
        """The database cannot be reached, or gives no answers."""

    def reconnected(self, seconds: float) -> None:
        """It answers again, after so many seconds."""
