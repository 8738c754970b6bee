"""What a handler is given, and what its worker notes beside it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any

from lenso_jobs._async_client import AsyncJobs
from lenso_jobs._client import Jobs
from lenso_jobs.errors import InvalidLease
from lenso_jobs.worker._outcome import PayloadUndecodable

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Coroutine, Iterator
    from uuid import UUID

    import psycopg

    from lenso_jobs.worker._outcome import Verdict


@dataclass(frozen=True, slots=True)
class Terms:
    """What all leases of a worker have in common.

    ``margin`` is how many seconds before its end a lease counts as lost, half the lease
    at most; None for a tenth of the lease, and a second at most.
    """

    schema: str
    caller: str | None
    margin: float | None


class Holding:
    """A lease as its worker sees it: until when, how far, and with what verdict.

    Times are those of ``time.monotonic``, and the end of a lease is counted from before
    it was asked for: it is never later than the server's.
    """

    __slots__ = (
        "began_at",
        "ends_at",
        "is_lost",
        "is_own",
        "is_told",
        "lease",
        "patience",
        "renew_at",
        "safe_until",
        "seconds",
        "task",
        "terms",
        "verdict",
    )

    def __init__(self, lease: LeaseOfWorker, terms: Terms, left: float) -> None:
        self.lease = lease
        self.terms = terms
        self.ends_at = self.renew_at = self.safe_until = left
        self.is_lost = False
        # The handler ends the job in a transaction of its own.
        self.is_own = False
        # The handler was told to end.
        self.is_told = False
        self.patience = 0.01
        self.verdict: Verdict | None = None
        self.began_at = self.seconds = 0.0
        self.task: Task[Verdict] | None = None

    def count_from(self, asked_at: float) -> None:
        """Note when the lease was asked for."""
        self.extend(asked_at, self.ends_at)

    def extend(self, asked_at: float, left: float) -> None:
        """Note that the lease was given for *left* seconds, asked for at *asked_at*."""
        margin = self.terms.margin
        self.ends_at = asked_at + left
        self.renew_at = asked_at + left / 3
        self.safe_until = self.ends_at - (
            min(1.0, left / 10) if margin is None else min(margin, left / 2)
        )

    def is_over(self, now: float) -> bool:
        """Whether nothing more may be done under this lease.

        What a handler has ended in its own transaction is for the server to judge.
        """
        return self.is_lost or (now >= self.safe_until and not self.is_own)


class LeaseOfWorker:
    """A job that a worker holds for its handler.

    The lease is kept alive while the handler runs. ``attempt`` counts from 1 and only
    grows: hand it to outside systems as the fencing token.
    """

    __slots__ = (
        "_created_at",
        "_expires_at",
        "_holding",
        "_payload_text",
        "attempt",
        "job_id",
        "kind",
        "lease_token",
        "max_attempts",
        "queue",
    )

    def __init__(  # noqa: PLR0913, PLR0917 - the columns of claim
        self,
        terms: Terms,
        job_id: UUID,
        queue: str,
        kind: str,
        payload_text: str,
        attempt: int,
        max_attempts: int,
        lease_token: str,
        expires_at: float,
        created_at: float,
        left: float,
    ) -> None:
        self.job_id = job_id
        self.queue = queue
        self.kind = kind
        self.attempt = attempt
        self.max_attempts = max_attempts
        self.lease_token = lease_token
        self._payload_text = payload_text
        self._expires_at = expires_at
        self._created_at = created_at
        self._holding = Holding(self, terms, left)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of job {self.job_id}, queue {self.queue}, kind "
            f"{self.kind}, attempt {self.attempt}>"
        )

    @property
    def payload(self) -> dict[str, Any]:
        """The payload, decoded anew at each access.

        Raises:
            PayloadUndecodable: Python cannot represent it. A handler that lets this
                pass ends the job as failed, with code ``payload_undecodable``.
        """
        try:
            decoded: dict[str, Any] = json.loads(self._payload_text)
        except (ValueError, RecursionError):
            raise PayloadUndecodable("the payload cannot be decoded") from None
        return decoded

    @property
    def payload_json(self) -> bytes:
        """The payload as JSON in UTF-8."""
        return self._payload_text.encode()

    @property
    def lease_expires_at(self) -> datetime:
        """The end of the lease by the server's clock, as last confirmed; in UTC."""
        return datetime.fromtimestamp(self._expires_at, UTC)

    @property
    def created_at(self) -> datetime:
        """When the job was enqueued, by the server's clock; in UTC."""
        return datetime.fromtimestamp(self._created_at, UTC)

    @property
    def lost(self) -> bool:
        """Whether the lease is gone, so that nothing the handler does counts any more.

        True by the last confirmed end of the lease at the latest, a little before it,
        and never False again: stop, somebody else may have the job.
        """
        return self._holding.is_over(monotonic())

    @contextmanager
    def _ending(self) -> Iterator[Terms]:
        """Note that the handler ends the job by itself, or that it cannot any more."""
        self._holding.is_own = True
        try:
            yield self._holding.terms
        except InvalidLease:
            self._holding.is_lost = True
            raise


class HeldLease(LeaseOfWorker):
    """A job that a ``Worker`` holds for its handler.

    The lease is kept alive while the handler runs. ``attempt`` counts from 1 and only
    grows: hand it to outside systems as the fencing token.
    A copy in another process learns of no renewal.
    """

    __slots__ = ()

    def complete(self, connection: psycopg.Connection[Any]) -> None:
        """End the job as succeeded within a transaction of yours, exactly once.

        What the handler wrote by *connection* and the end of the job are committed
        together. Commit before the handler returns; the worker then asks what became of
        it and completes nothing twice. Where the transaction was rolled back, the attempt
        has failed: with the code of what the handler raised, or with
        ``completion_rolled_back`` if it returns all the same.

        Raises:
            InvalidLease: The lease is gone: let your transaction roll back.
        """
        with self._ending() as terms:
            Jobs(connection, terms.schema, terms.caller).complete(self)


class AsyncHeldLease(LeaseOfWorker):
    """A job that an ``AsyncWorker`` holds for its handler.

    The lease is kept alive while the handler runs. ``attempt`` counts from 1 and only
    grows: hand it to outside systems as the fencing token.
    """

    __slots__ = ()

    def complete(
        self, connection: psycopg.AsyncConnection[Any]
    ) -> Coroutine[Any, Any, None]:
        """End the job as succeeded within a transaction of yours, exactly once.

        As ``HeldLease.complete``, and to be awaited.

        Raises:
            InvalidLease: The lease is gone: let your transaction roll back.
        """
        # Before it is awaited: one that is not has completed nothing.
        self._holding.is_own = True
        return self._complete(connection)

    async def _complete(self, connection: psycopg.AsyncConnection[Any]) -> None:
        with self._ending() as terms:
            await AsyncJobs(connection, terms.schema, terms.caller).complete(self)


def holding_of(lease: LeaseOfWorker) -> Holding:
    """The worker's notes on a lease."""
    return lease._holding  # noqa: SLF001 - not the handler's


def renewed(lease: LeaseOfWorker, expires_at: float) -> None:
    """Tell a lease its new end."""
    lease._expires_at = expires_at  # noqa: SLF001 - as above
