"""From a document and a resolver to a worker of a verified Instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, overload

from lenso_jobs._prepare import verified
from lenso_jobs.worker._settings import is_for_asyncio
from lenso_jobs.worker._workers import AsyncWorker, Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from typing import Unpack

    from lenso_jobs.config import Configuration
    from lenso_jobs.worker._lease import AsyncHeldLease, HeldLease
    from lenso_jobs.worker._settings import OnShutdown
    from lenso_jobs.worker.observer import Observer

    Secrets = Callable[[str], str]


class WorkerOptions(TypedDict, total=False):
    """The options of a worker that the document does not have; see ``Worker``."""

    queue: str | None
    queues: Mapping[str, int] | None
    concurrency: int | None
    batch: int | None
    grace: float
    on_shutdown: OnShutdown
    timeout: float | None
    tracebacks: bool
    observers: Sequence[Observer]
    prepare_threshold: int | None


@overload
def prepare_worker(
    configuration: Configuration,
    secrets: Secrets,
    handler: Callable[[AsyncHeldLease], Awaitable[object]],
    caller: str | None = None,
    **options: Unpack[WorkerOptions],
) -> AsyncWorker: ...
@overload
def prepare_worker(
    configuration: Configuration,
    secrets: Secrets,
    handler: Callable[[HeldLease], object],
    caller: str | None = None,
    **options: Unpack[WorkerOptions],
) -> Worker: ...
@overload
def prepare_worker(
    configuration: Configuration,
    secrets: Secrets,
    handler: Mapping[str, Callable[[Any], Any]],
    caller: str | None = None,
    **options: Unpack[WorkerOptions],
) -> Worker | AsyncWorker: ...
def prepare_worker(
    configuration: Configuration,
    secrets: Secrets,
    handler: Any,
    caller: str | None = None,
    **options: Any,
) -> Any:
    """Verify an Instance, and make a worker of it, as ``lenso-jobs work`` does.

    Args:
        configuration: The Instance's document.
        secrets: Turns ``database_url_secret`` into the database URL.
        handler: A function of a lease, a coroutine function, or handlers by kind. A
            decorator that hides a coroutine function should set ``__wrapped__``, as
            ``functools.wraps`` does.
        caller: The declared worker to act as. None for the role of the URL.
        **options: ``queue`` or ``queues``, and the other options of ``Worker``.

    Returns:
        An ``AsyncWorker`` if the handler is a coroutine function, else a ``Worker``.

    Raises:
        InvalidArgument: An argument is of another kind or out of range.
        SecretNotFound: The resolver does not know the reference, or returns no
            connection string.
        SchemaNotReady: The Instance cannot be used, or is the router of a fleet. The
            hint says what to run.
        psycopg.OperationalError: The server cannot be reached.
    """
    conninfo = verified(configuration, secrets, caller, for_worker=True)
    kind: Any = AsyncWorker if is_for_asyncio(handler) else Worker
    return kind(
        conninfo,
        schema=configuration.schema_,
        handler=handler,
        caller=caller,
        **options,
    )
