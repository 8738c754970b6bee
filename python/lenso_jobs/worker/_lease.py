"""The lease that a handler is given, and the state that its worker keeps of it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from lenso_jobs._async_client import AsyncJobs
from lenso_jobs._client import Jobs
from lenso_jobs._models import LeasedJob
from lenso_jobs.errors import InvalidLease

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Coroutine, Iterator
    from datetime import datetime

    import psycopg

    from lenso_jobs.worker._outcome import Verdict
    from lenso_jobs.worker._settings import Settings
    from lenso_jobs.worker.observer import AnyLease


MARGIN = 0.1
"""How much of a lease counts as lost before its end. At most 1 s of it does."""


@dataclass(slots=True, eq=False)
class LeaseState:
    """Until when a lease is safe, and how its job ended.

    Times are those of ``time.monotonic``. The end of a lease is counted from before the
    call that gave it, so it is never later than the server's.
    """

    lease: AnyLease
    ends_at: float = 0.0
    renew_at: float = 0.0
    safe_until: float = 0.0
    renewed_until: datetime | None = None  # by the server's clock
    is_lost: bool = False
    is_cancelled: bool = False  # the worker has cancelled the handler
    is_overdue: bool = False  # the handler has had all its time
    is_ended: bool = False  # its verdict is there, though the handler may run
    completes_itself: bool = False  # the handler does, in a transaction of its own
    pause: float = 0.01  # before the next report
    verdict: Verdict | None = None
    error: BaseException | None = None  # for observers
    began_at: float = 0.0
    seconds: float = 0.0
    task: Task[Verdict] | None = None

    def extend(self, called_at: float, seconds: float) -> None:
        """Note that a call made at *called_at* gave the lease for so many seconds."""
        self.ends_at = called_at + seconds
        self.renew_at = called_at + seconds / 3
        self.safe_until = self.ends_at - min(1.0, seconds * MARGIN)

    def let_go(self) -> None:
        """Leave the lease to the handler: what refers to each other is freed late."""
        self.lease = LeasedJob(*self.lease._columns)  # type: ignore[assignment]  # noqa: SLF001

    def is_over(self, now: float) -> bool:
        """Return whether nothing more may be done under this lease.

        If the handler completes the job itself, only the server can tell.
        """
        return self.is_lost or (now >= self.safe_until and not self.completes_itself)


class WorkerLease(LeasedJob):
    """A job that a worker holds for its handler: ``HeldLease`` or ``AsyncHeldLease``.

    The worker renews the lease while the handler runs. ``attempt`` starts at 1 and only
    grows: give it to outside systems as the fencing token. A copy of the lease in
    another process does not see renewals.
    """

    __slots__ = ("_settings", "_state")

    def __init__(self, settings: Settings, *columns: Any) -> None:  # noqa: ANN401 - of claim
        # Not by way of super(): half the cost of a lease.
        self._columns = columns
        self._payload = None
        self._settings = settings
        self._state = LeaseState(self)  # type: ignore[arg-type]

    @property
    def lease_expires_at(self) -> datetime:
        """The end of the lease by the server's clock, as last confirmed, in UTC."""
        return self._state.renewed_until or super().lease_expires_at

    @property
    def lost(self) -> bool:
        """Whether the lease is lost, so that the handler's work no longer counts.

        It becomes True a little before the last confirmed end of the lease, or earlier,
        and never False again. Stop then: another worker may have the job.
        """
        return self._state.is_over(monotonic())

    def complete(self, connection: Any) -> Any:  # noqa: ANN401 - typed below
        """Complete the job within a transaction of yours, exactly once.

        The one of an ``AsyncHeldLease`` is to be awaited.

        Your writes on *connection* and the completion are committed together. Commit
        before the handler returns. The worker then asks the server what became of the
        job and completes nothing twice.

        If the transaction was rolled back, the attempt has failed. Its failure code is
        that of the exception which the handler raised, or ``completion_rolled_back`` if
        the handler returned.

        Args:
            connection: A psycopg connection, or the ``Jobs`` that ``jobs_on`` of
                ``lenso_jobs.contrib`` returned.

        Raises:
            InvalidLease: The lease is gone: let your transaction roll back.
        """
        raise NotImplementedError

    @contextmanager
    def _completing(self) -> Iterator[Settings]:
        """Note that the handler completes the job itself, or that its lease is lost."""
        self._state.completes_itself = True
        try:
            yield self._settings
        except InvalidLease:
            self._state.is_lost = True
            raise


class HeldLease(WorkerLease):
    """A job that a ``Worker`` holds for its handler; see ``WorkerLease``."""

    __slots__ = ()

    def complete(self, connection: psycopg.Connection[Any] | Jobs) -> None:
        with self._completing() as settings:
            jobs = connection
            if not isinstance(jobs, Jobs):
                jobs = Jobs(jobs, settings.schema, settings.caller)
            jobs.complete(self)


class AsyncHeldLease(WorkerLease):
    """A job that an ``AsyncWorker`` holds for its handler; see ``WorkerLease``."""

    __slots__ = ()

    def complete(
        self, connection: psycopg.AsyncConnection[Any] | AsyncJobs
    ) -> Coroutine[Any, Any, None]:
        # Before it is awaited: a handler that forgets to await has completed nothing.
        self._state.completes_itself = True
        return self._complete(connection)

    async def _complete(
        self, connection: psycopg.AsyncConnection[Any] | AsyncJobs
    ) -> None:
        with self._completing() as settings:
            jobs = connection
            if not isinstance(jobs, AsyncJobs):
                jobs = AsyncJobs(jobs, settings.schema, settings.caller)
            await jobs.complete(self)
