"""What a worker tells its log and its observers."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, TypeAlias

from lenso_jobs._log import Log
from lenso_jobs.errors import InvalidArgument, PayloadInvalid
from lenso_jobs.worker._outcome import Outcome, chosen, code_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lenso_jobs.worker._lease import AsyncHeldLease, HeldLease, WorkerLease

AnyLease: TypeAlias = "HeldLease | AsyncHeldLease"
logger = Log("lenso_jobs.worker")
_NOTHING = nullcontext()


def log(
    level: int,
    what: str,
    lease: WorkerLease,
    code: str | None = None,
    error: BaseException | None = None,
) -> None:
    """Log what happened to a job: never its payload, key or token.

    The traceback of an error can hold them. It is logged if the application says so.
    """
    names = "job_id", "queue", "kind", "attempt"
    facts = {name: getattr(lease, name) for name in names}
    facts["job_id"] = str(lease.job_id)
    if code is not None:
        facts["failure_code"] = code
    told = " ".join(f"{name}={value}" for name, value in facts.items())
    logger.log(level, "%s: %s", what, told, extra=facts, exc_info=error)


def origin(error: BaseException) -> str:
    """Return the class of an exception, and where it was raised. Not its text.

    If a payload does not fit its kind, return the code and the fields instead.
    """
    alone = chosen(error)
    if type(alone) is PayloadInvalid and alone.fault is not None:
        return f"{alone.code}: {alone.fault}"
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return code_of(error)
    return f"{code_of(error)} at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job left the worker that held it.

    ``code`` is the failure code that was reported, or the code of a ``Release``, if any.
    ``seconds`` is how long the handler ran, 0 if it was never begun. ``error`` is what
    the handler raised, if anything. Its text can hold parts of the payload.
    """

    lease: HeldLease | AsyncHeldLease
    outcome: Outcome
    code: str | None
    seconds: float
    error: BaseException | None = field(default=None, repr=False)


class Observer:
    """Is told what a worker does. Derive from it and override the methods you need.

    ``claimed`` is called before any other method about a job. ``ended`` is called
    exactly once for each lease. It may be called while the handler still runs, if the
    worker gave the handler up after the grace.

    The worker calls these methods on its own threads, ``running`` on the thread or in
    the task of the handler. They must be quick. An exception that they raise is logged
    by its class, without its text, and otherwise ignored.
    """

    def claimed(self, queue: str, count: int) -> None:
        """Note that jobs were leased."""

    def running(
        self, lease: HeldLease | AsyncHeldLease
    ) -> AbstractContextManager[object]:
        """Return a context manager that the worker enters around the handler."""
        del lease
        return nullcontext()

    def lost(self, lease: HeldLease | AsyncHeldLease) -> None:
        """Note that a lease was lost while its handler runs, not because of a stop."""

    def ended(self, ended: Ended) -> None:
        """Note that a job has left the worker; the server has confirmed its outcome."""

    def disconnected(self, error: BaseException) -> None:
        """Note that the database cannot be reached or does not respond."""

    def reconnected(self, seconds: float) -> None:
        """Note that the database responds again, after so many seconds."""


class Observers:
    """The observers of a worker, none of which can harm it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        if not isinstance(observers, list | tuple) or not all(
            isinstance(each, Observer) for each in observers
        ):
            raise InvalidArgument("observers must be a list or tuple of Observer")
        self._observers = tuple(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def tell(self, event: str, *facts: Any) -> None:  # noqa: ANN401 - of several types
        """Call one method of every observer."""
        for observer in self._observers:
            try:
                getattr(observer, event)(*facts)
            except BaseException as error:  # noqa: BLE001 - an observer does no harm
                _pass_over(event, error)

    def around(self, lease: AnyLease) -> AbstractContextManager[None]:
        """Return a context manager that enters the one of every observer."""
        return self._around(lease) if self._observers else _NOTHING

    @contextmanager
    def _around(self, lease: AnyLease) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self._observers:
                try:
                    inner = observer.running(lease)
                    inner.__enter__()
                except BaseException as error:  # noqa: BLE001 - as above
                    _pass_over("running", error)
                else:
                    stack.push(partial(_leave, inner))
            yield


def _leave(inner: Any, *error: Any) -> None:  # noqa: ANN401 - as __exit__ takes them
    try:
        inner.__exit__(*error)
    except BaseException as raised:  # noqa: BLE001 - as above
        if raised is not error[1]:
            _pass_over("running", raised)


def _pass_over(event: str, error: BaseException) -> None:
    # A signal may have come meanwhile, whose handler raises in the main thread.
    is_exit = issubclass(type(error), KeyboardInterrupt | SystemExit)
    if is_exit and current_thread() is main_thread():
        raise error
    # Without its text: that text, or that of its cause, may come from a payload.
    try:
        where = origin(error)
    except Exception:  # noqa: BLE001 - a class of the application's may raise anything
        where = "an exception"
    logger.error("an observer failed at %s: %s", event, where)
