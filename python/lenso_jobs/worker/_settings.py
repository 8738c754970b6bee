"""The options of a worker, checked."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction, isfunction, ismethod, unwrap
from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lenso_jobs import _waiting
from lenso_jobs._given import name_fault
from lenso_jobs.errors import InvalidArgument
from lenso_jobs.kinds import Kind
from lenso_jobs.worker._held import MOST_AT_ONCE
from lenso_jobs.worker._outcome import NAME_RULE, Release, is_name
from lenso_jobs.worker.observer import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OnShutdown: TypeAlias = Literal["return", "lapse"]
_MANY = f"a whole number from 1 to {MOST_AT_ONCE:,}"
_ROLE = "a name of 1 to 63 bytes"


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a worker that are values, or InvalidArgument about one."""

    schema: str
    queues: Mapping[str, int]
    caller: str | None = None
    batch: int | None = None
    grace: float = 30.0
    on_shutdown: OnShutdown = "return"
    prepare_threshold: int | None = 5
    timeout: float = inf
    tracebacks: bool = False

    def __post_init__(self) -> None:
        """Check each value."""
        caller, batch, threshold = self.caller, self.batch, self.prepare_threshold
        is_threshold = threshold is None or _is_whole(threshold, 0, inf)
        is_known = self.on_shutdown in ("return", "lapse")
        for argument, is_met, rule in (
            ("schema", _is_role(self.schema), _ROLE),
            ("caller", caller is None or _is_role(caller), f"{_ROLE}, or None"),
            ("batch", batch is None or _is_whole(batch, 1), f"{_MANY}, or None"),
            ("on_shutdown", is_known, '"return" or "lapse"'),
            ("prepare_threshold", is_threshold, "a whole number of 0 or more, or None"),
            ("tracebacks", isinstance(self.tracebacks, bool), "True or False"),
        ):
            if not is_met:
                raise InvalidArgument(f"{argument} must be {rule}")
        _waiting.seconds(self.grace, "grace")
        if not _waiting.seconds(self.timeout, "timeout"):
            raise InvalidArgument("timeout must be more than 0 seconds")

    @property
    def name(self) -> str:
        """The queues, for people."""
        return ", ".join(self.queues)


def queues_of(queue: object, concurrency: object, queues: object) -> dict[str, int]:
    """Return the concurrency of each queue, from the short form or the long one."""
    if queues is None:
        queues = {queue: 4 if concurrency is None else concurrency}
        names = "queue", "concurrency"
    elif queue is not None or concurrency is not None:
        raise InvalidArgument(
            "queues must be given alone: it has the concurrency of each queue"
        )
    elif not isinstance(queues, Mapping) or not queues:
        raise InvalidArgument('queues must be a mapping such as {"email": 4}')
    else:
        names = "queues must have names as keys: each", "queues: each concurrency"
    for name, count in queues.items():
        if not is_name(name):
            raise InvalidArgument(f"{names[0]} must be {NAME_RULE}")
        if not _is_whole(count, 1):
            raise InvalidArgument(f"{names[1]} must be {_MANY}")
    return dict(queues)


def _is_role(value: object) -> bool:
    return name_fault(value) is None


def _is_whole(value: object, least: int, most: float = MOST_AT_ONCE) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and least <= value <= most  # type: ignore[operator]


# Handlers.

_UNKNOWN_KIND_SECONDS = 60


class ByKind:
    """Calls the handler of a job's kind. A kind without one is another release's."""

    def __init__(self, handlers: Mapping[str, Callable[[Any], Any]]) -> None:
        self._handlers = handlers
        self._unknown: set[str] = set()

    def __call__(self, lease: Any) -> Any:  # noqa: ANN401 - of several types
        """Return what the handler returns, or raise Release."""
        handler = self._handlers.get(lease.kind)
        if handler is None:
            if lease.kind not in self._unknown:
                self._unknown.add(lease.kind)
                logger.warning(
                    "no handler for kind %s: its jobs are released for %d s",
                    *(lease.kind, _UNKNOWN_KIND_SECONDS),
                )
            raise Release("unknown_kind", after=_UNKNOWN_KIND_SECONDS)
        return handler(lease)


def is_coroutine_function(handler: object) -> bool:
    """Return whether a call certainly returns a coroutine."""
    return any(map(iscoroutinefunction, called(handler)))


def is_for_asyncio(handler: object) -> bool:
    """Return whether a handler is meant for ``AsyncWorker``, as far as can be known.

    Looks through ``functools.partial``, callable objects and ``functools.wraps``. A
    wrapper that runs its coroutine function to the end looks the same from outside.
    """
    if isinstance(handler, Mapping):
        return any(map(is_for_asyncio, handler.values()))
    for _ in range(100):  # a wrapper may say that it wraps itself
        if is_coroutine_function(handler):
            return True
        inner = getattr(handler, "func", None)
        handler = getattr(handler, "__wrapped__", inner)
    return False


def is_plain_kind(handler: object) -> bool:
    """Return whether it is a ``Kind`` of a plain function, or wraps one."""
    inner = handler
    with suppress(ValueError):  # of a wrapper that says that it wraps itself
        inner = unwrap(handler)  # type: ignore[arg-type]
    if not isinstance(inner, Kind) or is_for_asyncio(handler):
        return False
    func = next(called(inner))
    return isfunction(func) or ismethod(func)


def called(handler: object) -> Iterator[object]:
    """Yield what a call of the handler calls, or of the handlers by kind."""
    if isinstance(handler, Mapping):
        for each in handler.values():
            yield from called(each)
        return
    while isinstance(handler, partial | Kind):
        handler = handler.func
    yield handler
    yield getattr(type(handler), "__call__", None)  # noqa: B004 - its kind matters
