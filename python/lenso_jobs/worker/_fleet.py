"""The workers of a fleet's shards, in one process."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, overload

import psycopg

from lenso_jobs import _given, _waiting
from lenso_jobs._prepare import connection_string, fleet_mark, for_fleet, verified
from lenso_jobs.errors import InvalidArgument, JobsError
from lenso_jobs.secrets import SecretNotFound
from lenso_jobs.worker._outcome import Tally
from lenso_jobs.worker._part import cause
from lenso_jobs.worker._settings import is_for_asyncio
from lenso_jobs.worker._workers import AsyncWorker, Worker
from lenso_jobs.worker.observer import Observers, logger

if TYPE_CHECKING:
    import logging
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from typing import Unpack

    from lenso_jobs.config import Configuration
    from lenso_jobs.fleet import Fleet
    from lenso_jobs.worker._lease import AsyncHeldLease, HeldLease
    from lenso_jobs.worker._prepared import Secrets, WorkerOptions

Refusal: TypeAlias = "psycopg.Error | JobsError | SecretNotFound"
_REFUSALS = (psycopg.Error, JobsError, SecretNotFound)
_COUNTS = ("succeeded", "retried", "failed", "lost", "handed_back", "released")
_LOG_EVERY_SECONDS = 60.0
_number: ContextVar[int | None] = ContextVar("lenso_jobs_shard", default=None)


def current_shard() -> int | None:
    """Return the number of the shard whose job a handler runs; None without a fleet.

    A handler that calls ``lease.complete(connection)`` needs a connection to that shard.
    """
    return _number.get()


def _name_shard(record: logging.LogRecord) -> bool:
    number = _number.get()
    if number is not None:
        record.shard = number
        record.msg = f"shard {number}: {record.msg}"
    return True


logger.logger.addFilter(_name_shard)


class _Worker(Worker):
    shard: int

    def _work(self, queue: str) -> None:
        _number.set(self.shard)
        super()._work(queue)


class _AsyncWorker(AsyncWorker):
    shard: int

    def _drive(self, ended: asyncio.Future[Tally], until_idle: bool) -> None:
        _number.set(self.shard)
        super()._drive(ended, until_idle)


@dataclass(eq=False)
class _Shard:
    """A shard, its worker if one runs, and else why there is none."""

    number: int
    reference: str
    configuration: Configuration = field(repr=False)
    mark: str
    worker: _Worker | _AsyncWorker | None = None
    begun_at: float = inf
    error: Refusal | None = None
    try_at: float = inf
    tries: int = 0
    logged_at: float = -inf
    lost_at: float | None = None  # since when it cannot be reached

    def named(self, words: object) -> str:
        return f"shard {self.number} ({self.reference}): {words}"


class BaseFleetWorkers:
    """What ``FleetWorkers`` and ``AsyncFleetWorkers`` have in common.

    One thread supervises, and changes the facts about shards. Other threads, and signal
    handlers, put calls for it into ``_events``.
    """

    _kind: ClassVar[type[_Worker | _AsyncWorker]]

    def __init__(
        self,
        fleet: Fleet,
        secrets: Secrets,
        caller: str | None,
        shards: Sequence[int] | None,
        options: dict[str, Any],
    ) -> None:
        self._secrets, self._caller, self._options = secrets, caller, options
        self._shards = _shards_of(fleet, shards)
        self._events: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._has_run = self._until_idle = self._is_stopped = False
        self._context = copy_context()
        self._tally = Tally()
        self._error: BaseException | None = None
        # Refuses options before it connects.
        self._worker(self._shards[0])
        self._observers = Observers(options.get("observers", ()))
        with ThreadPoolExecutor(len(self._shards)) as pool:
            self._refusals = list(pool.map(self._verified, self._shards))
        refused = [error for error in self._refusals if error is not None]
        if len(refused) == len(self._refusals):
            raise refused[0]

    def __repr__(self) -> str:
        numbers = ", ".join(str(shard.number) for shard in self._shards)
        return f"<{type(self).__name__} of shards {numbers}>"

    def run(self, *, until_idle: bool = False) -> Any:  # noqa: ANN401 - typed below
        """Work until ``stop`` is called; return what became of the jobs, a ``Tally``.

        A shard that cannot be reached, or that refuses its worker, is logged and tried
        again. Meanwhile the workers of the other shards go on.

        Args:
            until_idle: Whether to return once no job is due and none is held on any of
                the shards.

        Raises:
            JobsError: No shard is worked any more, because one refused its worker.
            SecretNotFound: The same, because there is no database URL.
            psycopg.Error: The same, because a server cannot be reached.
            InvalidArgument: ``Worker.run`` raised it. The workers of all shards have stopped.
            RuntimeError: These workers ran before, or the system has no thread left.
        """
        raise NotImplementedError

    def stop(self, grace: float | None = None) -> None:
        """Stop the workers of all shards, as ``Worker.stop`` does.

        Args:
            grace: For how many seconds handlers may go on. By default the workers' own
                grace.

        Raises:
            InvalidArgument: *grace* is no number of seconds.
        """
        if grace is not None:
            _waiting.seconds(grace, "grace")
        self._events.put(partial(self._stop, grace))

    # On the thread that supervises.

    def _supervise(self, *, until_idle: bool) -> Tally:
        if self._has_run:
            raise RuntimeError("workers run once: make others")
        self._has_run, self._until_idle = True, until_idle
        with suppress(Empty):  # they may have been stopped before
            while True:
                self._events.get_nowait()()
        try:
            for shard, error in zip(self._shards, self._refusals, strict=True):
                self._note(shard, error)
            self._handle_events()
        except BaseException:
            # An interrupt, for instance: the jobs are released or handed back.
            self._stop(0)
            self._handle_events()
            raise
        if not self._is_stopped:
            refusals = (shard.error for shard in self._shards)
            self._error = next(filter(None, refusals), None)
        if self._error is not None:
            raise self._error
        return self._tally

    def _handle_events(self) -> None:
        while any(shard.worker for shard in self._shards):
            first = min(shard.try_at for shard in self._shards)
            longest = None if first == inf else max(0.0, first - monotonic())
            with suppress(Empty):
                self._events.get(timeout=longest)()
            for shard in self._shards:
                if shard.try_at <= monotonic():
                    shard.try_at = inf
                    self._on_a_thread(shard, self._try)

    def _note(self, shard: _Shard, error: Refusal | None) -> None:
        """Begin a worker where the shard was verified, or try again later."""
        if error is None:
            if not self._is_stopped:
                worker = self._worker(shard)
                self._on_a_thread(shard, self._work, worker)
                shard.worker, shard.begun_at, shard.error = worker, monotonic(), None
                if shard.lost_at is not None:
                    self._tell(shard, "reconnected", monotonic() - shard.lost_at)
                    shard.lost_at = None
            return
        now = monotonic()
        if now - shard.begun_at > _LOG_EVERY_SECONDS:
            shard.tries, shard.logged_at = 0, -inf
        shard.worker, shard.begun_at, shard.error = None, inf, error
        if now - shard.logged_at > _LOG_EVERY_SECONDS:
            shard.logged_at = now
            # The text of psycopg's error may hold the connection string.
            said = str(error)
            if isinstance(error, psycopg.Error):
                said = shard.named(cause(error))
            hint = getattr(error, "hint", None) or "It is tried again."
            logger.warning("no worker of %s. %s", said, hint)
        is_lost = isinstance(error, psycopg.OperationalError)
        if is_lost and shard.lost_at is None:
            shard.lost_at = now
            self._tell(shard, "disconnected", error)
        if not self._is_stopped:
            # Only a server that was not reached is likely to serve again soon.
            most = 5.0 if is_lost else 60.0
            pause = min(most, 0.1 * 2.0 ** min(shard.tries, 10))
            shard.tries += 1
            shard.try_at = now + pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

    def _tell(self, shard: _Shard, event: str, fact: object) -> None:
        token = _number.set(shard.number)
        self._observers.tell(event, fact)
        _number.reset(token)

    def _end(self, shard: _Shard, tally: Tally) -> None:
        shard.worker = None
        for name in _COUNTS:
            count = getattr(self._tally, name) + getattr(tally, name)
            setattr(self._tally, name, count)
        self._tally.is_clean &= tally.is_clean

    def _fail(self, shard: _Shard, error: BaseException) -> None:
        """Stop all workers because of an error that belongs to no shard."""
        shard.worker = None
        self._error = self._error or error
        self._stop(None)

    def _stop(self, grace: float | None) -> None:
        self._is_stopped = True
        for shard in self._shards:
            shard.try_at = inf
            if shard.worker is not None:
                shard.worker.stop(grace)

    def _on_a_thread(self, shard: _Shard, act: Callable[..., None], *rest: Any) -> None:  # noqa: ANN401
        Thread(
            target=self._context.copy().run,
            args=(self._report, shard, act, *rest),
            name=f"lenso-jobs shard {shard.number}",
            daemon=True,
        ).start()

    # On a thread of a shard.

    def _report(self, shard: _Shard, act: Callable[..., None], *rest: Any) -> None:  # noqa: ANN401
        _number.set(shard.number)
        try:
            act(shard, *rest)
        except BaseException as error:  # noqa: BLE001 - run raises it
            is_refusal = isinstance(error, _REFUSALS)
            is_of_shard = is_refusal and not isinstance(error, InvalidArgument)
            done = self._note if is_of_shard else self._fail
            if is_of_shard:
                error.args = (shard.named(error),)
            self._events.put(partial(done, shard, error))  # type: ignore[arg-type]

    def _try(self, shard: _Shard) -> None:
        try:
            error = self._verified(shard)
        except Exception as raised:  # noqa: BLE001 - a source of secrets may be down
            error = psycopg.OperationalError(shard.named("the secrets cannot be read"))
            error.__cause__ = raised
        self._events.put(partial(self._note, shard, error))

    def _verified(self, shard: _Shard) -> Refusal | None:
        """Return what a shard refused, or None if it can be worked."""
        try:
            verified(
                shard.configuration,
                self._secrets,
                self._caller,
                for_worker=True,
                shard=shard.mark,
            )
        except InvalidArgument:
            raise
        except _REFUSALS as error:
            error.args = (shard.named(error),)
            if isinstance(error, JobsError) and error.hint is not None:
                error.hint = for_fleet(error.hint)
            return error
        return None

    def _worker(self, shard: _Shard) -> _Worker | _AsyncWorker:
        def resolved() -> str:
            _number.set(shard.number)  # in each thread of the worker that connects
            return connection_string(shard.configuration, self._secrets)

        source: Any = SimpleNamespace(conninfo=resolved)
        schema = shard.configuration.schema_
        worker = self._kind(source, schema=schema, caller=self._caller, **self._options)
        worker.shard = shard.number
        return worker

    def _work(self, shard: _Shard, worker: Any) -> None:  # noqa: ANN401 - of two classes
        self._events.put(partial(self._end, shard, self._run(worker)))

    def _run(self, worker: Any) -> Tally:  # noqa: ANN401 - as above
        raise NotImplementedError


class FleetWorkers(BaseFleetWorkers):
    """A ``Worker`` for each shard of a fleet. ``prepare_fleet_workers`` makes them."""

    _kind = _Worker

    def run(self, *, until_idle: bool = False) -> Tally:
        return self._supervise(until_idle=until_idle)

    def _run(self, worker: Any) -> Tally:  # noqa: ANN401 - as above
        tally: Tally = worker.run(until_idle=self._until_idle)
        return tally


class AsyncFleetWorkers(BaseFleetWorkers):
    """An ``AsyncWorker`` for each shard, all on the event loop that runs ``run``."""

    _kind = _AsyncWorker

    async def run(self, *, until_idle: bool = False) -> Tally:
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        ended: asyncio.Future[Tally] = self._loop.create_future()
        Thread(
            target=self._drive,
            args=(ended, until_idle),
            name="lenso-jobs fleet",
            daemon=True,
        ).start()
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            self.stop(0)
            await asyncio.wait((ended,))
            ended.exception()
            raise

    def _drive(self, ended: asyncio.Future[Tally], until_idle: bool) -> None:
        settle: Callable[[], None]
        try:
            settle = partial(ended.set_result, self._supervise(until_idle=until_idle))
        except BaseException as error:  # noqa: BLE001 - run raises it
            settle = partial(ended.set_exception, error)
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(settle)

    def _run(self, worker: Any) -> Tally:  # noqa: ANN401 - as above
        run = worker.run(until_idle=self._until_idle)
        tally: Tally = asyncio.run_coroutine_threadsafe(run, self._loop).result()
        return tally


@overload
def prepare_fleet_workers(
    fleet: Fleet,
    secrets: Secrets,
    handler: Callable[[AsyncHeldLease], Awaitable[object]],
    caller: str | None = None,
    shards: Sequence[int] | None = None,
    **options: Unpack[WorkerOptions],
) -> AsyncFleetWorkers: ...
@overload
def prepare_fleet_workers(
    fleet: Fleet,
    secrets: Secrets,
    handler: Callable[[HeldLease], object],
    caller: str | None = None,
    shards: Sequence[int] | None = None,
    **options: Unpack[WorkerOptions],
) -> FleetWorkers: ...
@overload
def prepare_fleet_workers(
    fleet: Fleet,
    secrets: Secrets,
    handler: Mapping[str, Callable[[Any], Any]],
    caller: str | None = None,
    shards: Sequence[int] | None = None,
    **options: Unpack[WorkerOptions],
) -> FleetWorkers | AsyncFleetWorkers: ...
def prepare_fleet_workers(
    fleet: Fleet,
    secrets: Secrets,
    handler: Any,
    caller: str | None = None,
    shards: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Verify the shards of a fleet, and make a worker of each.

    Queues, concurrency and batch count for each shard. An observer is shared by all. A
    shard that cannot be worked yet is tried again by ``run``.

    Args:
        fleet: The fleet's document.
        secrets: Turns the references of ``shards`` into database URLs. It is called on
            several threads, and again for each connection: a shard may move.
        handler: As of ``prepare_worker``. ``current_shard`` names its job's shard.
        caller: The declared worker to act as. None for the role of the URL.
        shards: The numbers of the shards to work. None for all.
        **options: ``queue`` or ``queues``, and the other options of ``Worker``.

    Returns:
        ``AsyncFleetWorkers`` if the handler is a coroutine function, else
        ``FleetWorkers``. Both have ``run`` and ``stop``, as a worker.

    Raises:
        InvalidArgument: An argument is of another kind or out of range.
        SecretNotFound: No shard can be worked, and the first of them has no secret.
        SchemaNotReady: The same, and the first cannot be used. The hint says what to do.
        psycopg.OperationalError: The same, and the first cannot be reached.
    """
    kind = AsyncFleetWorkers if is_for_asyncio(handler) else FleetWorkers
    return kind(fleet, secrets, caller, shards, {"handler": handler, **options})


def _shards_of(fleet: object, shards: object) -> list[_Shard]:
    references = getattr(fleet, "shards", None)
    shard: Any = getattr(fleet, "shard", None)
    if references is None or shard is None:
        raise InvalidArgument(
            f"fleet must be a Fleet, not {_given.kind(fleet)}: pass "
            "Fleet.from_file(path)"
        )
    if shards is None:
        shards = range(len(references))
    if not isinstance(shards, list | tuple | range) or not shards:
        raise InvalidArgument("shards must be a list of numbers, or None for all")
    found = []
    for number in shards:
        try:
            configuration = shard(number)
        except InvalidArgument:
            raise InvalidArgument(
                f"shards must be numbers from 0 to {len(references) - 1}"
            ) from None
        mark = fleet_mark(number, len(references))
        found.append(_Shard(number, references[number], configuration, mark))
    if len({each.number for each in found}) < len(found):
        raise InvalidArgument("shards must not name a shard twice")
    return found
