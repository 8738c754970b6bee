"""Jobs in Django: in its transactions, in a worker, and behind ``django.tasks``.

::

    with transaction.atomic():
        order.save()
        jobs_on("jobs_shop").enqueue(
            "email", "receipt", {"order": order.pk}, idempotency_key=f"receipt:{order.pk}"
        )

Install ``lenso-jobs[django]``. For ``manage.py lenso_work`` add ``lenso_jobs.contrib.django``
to ``INSTALLED_APPS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from lenso_jobs._client import Jobs
from lenso_jobs._given import check_names, kind
from lenso_jobs.contrib._joined import JoinedJobs
from lenso_jobs.errors import InvalidArgument
from lenso_jobs.worker._settings import is_for_asyncio

try:
    from asgiref.sync import sync_to_async
    from django.db import (
        DEFAULT_DB_ALIAS,
        close_old_connections,
        connections,
        reset_queries,
    )
    from django.db.transaction import TransactionManagementError
except ImportError as error:
    raise ImportError("pip install 'lenso-jobs[django]'") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["jobs_on", "with_connections"]


def jobs_on(
    schema: str, using: str = DEFAULT_DB_ALIAS, caller: str | None = None
) -> Jobs:
    """Return a client whose calls join the transaction of ``atomic()``.

    The client costs nothing to make. You may also keep it: all threads may share it,
    since each call uses the connection that Django has for its thread.

    A refusal aborts the transaction. To go on after a refusal, make the call within
    another ``atomic()``.

    Args:
        schema: The schema of the Instance.
        using: The alias of the database.
        caller: The role to act as, as for ``Jobs``.

    Returns:
        The client. ``HeldLease.complete`` takes it, too.

    Raises:
        InvalidArgument: An argument is of another kind. By each call, if the database
            is not PostgreSQL with psycopg 3.
        TransactionManagementError: By each call outside of ``atomic()``.
    """
    check_names(schema, caller)

    def current() -> Jobs:
        wrapper = connections[using]
        if not wrapper.in_atomic_block:
            raise TransactionManagementError(
                "jobs_on joins a transaction, and none is in progress: make the call "
                f"within transaction.atomic(using={using!r})"
            )
        wrapper.validate_no_broken_transaction()
        connection = wrapper.connection
        if not isinstance(connection, psycopg.Connection):
            raise InvalidArgument(
                f"database {using!r} must be PostgreSQL with psycopg 3, not "
                f"{kind(connection)}"
            )
        made: dict[Any, Jobs] = wrapper.__dict__.setdefault("_lenso_jobs", {})
        client = made.get((schema, caller))
        if client is None or client._source is not connection:  # noqa: SLF001 - our own
            client = made[schema, caller] = Jobs(connection, schema, caller)
        return client

    return JoinedJobs(current, caller)


def with_connections(handler: Any) -> Any:  # noqa: ANN401 - of several types
    """Close Django's old connections before and after each job, as around a request.

    ``manage.py lenso_work`` does this for its handler. Use it for a worker of your own.

    Args:
        handler: A handler as ``Worker`` or ``AsyncWorker`` takes it. May be ``Kinds``.

    Returns:
        A handler of the same sort.
    """
    if isinstance(handler, Mapping):
        return {name: with_connections(each) for name, each in handler.items()}
    around = _around_async if is_for_asyncio(handler) else _around
    wrapped: Any = around(handler)
    wrapped.__wrapped__ = handler
    return wrapped


def _around(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def with_connections(lease: Any) -> Any:  # noqa: ANN401 - of several types
        with _closing():
            return handler(lease)

    return with_connections


def _around_async(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def with_connections(lease: Any) -> Any:  # noqa: ANN401 - of several types
        # Django's connections belong to the thread on which its ORM runs.
        await sync_to_async(_close)()
        try:
            return await handler(lease)
        finally:
            await sync_to_async(_close)()

    return with_connections


@contextmanager
def _closing() -> Iterator[None]:
    _close()
    try:
        yield
    finally:
        _close()


def _close() -> None:
    reset_queries()
    close_old_connections()
