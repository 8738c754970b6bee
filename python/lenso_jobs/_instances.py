"""The Jobs Instances of the pytest plugin and of the demonstration."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import inf
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar
from uuid import uuid4

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import args_row

from lenso_jobs import _wire
from lenso_jobs._async_client import AsyncJobs
from lenso_jobs._client import Jobs
from lenso_jobs._conninfo import checked
from lenso_jobs._models import NewJob
from lenso_jobs.errors import InvalidLease, InvalidQueue
from lenso_jobs.kinds import Kind
from lenso_jobs.operator import setup
from lenso_jobs.worker import (
    AsyncHeldLease,
    AsyncWorker,
    Fail,
    HeldLease,
    Observer,
    Release,
    Retry,
    Worker,
)
from lenso_jobs.worker._outcome import chosen
from lenso_jobs.worker._settings import Settings, is_coroutine_function

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
    from datetime import datetime
    from uuid import UUID

    from lenso_jobs._models import InspectedJob
    from lenso_jobs.config import Configuration
    from lenso_jobs.worker import Ended, Outcome, Tally
    from lenso_jobs.worker._lease import WorkerLease
    from lenso_jobs.worker._workers import Handler

    Connection = psycopg.Connection[Any]
    Load = Callable[[str], object]

_DUE = """
    select distinct queue from live_job
    where coalesce(lease_expires_at, available_at) <= clock_timestamp()
"""
W = TypeVar("W", Worker, AsyncWorker)
L = TypeVar("L", HeldLease, AsyncHeldLease)
_UNIT_TEST = "unit-test"  # in place of a schema, a key and a token
_HOUR = 3600.0
_MARK = "made by the pytest plugin of lenso-jobs"
_EXPIRE = """
    update live_job set lease_expires_at = clock_timestamp() - interval '1 s'
    where job_id = %s and lease_owner is not null returning _queue_wake(queue)
"""
_MAKE_DUE = """
    update live_job set available_at = clock_timestamp() - interval '1 s'
    where job_id = %s and lease_owner is null returning _queue_wake(queue)
"""
_ENQUEUED = """
    select job_id, producer, queue, kind, payload, idempotency_key, available_at,
        max_attempts
    from job order by job_id
"""
_SEARCH = "select set_config('search_path', %s, false)"
# Such a session can become only a role that the caller is a member of.
_AS_LOGGED_IN = "select set_config('session_authorization', %s, false)"
_LOCK = "select pg_advisory_lock(hashtextextended(%s, 0))"
_IS_ROLE = "select from pg_roles where rolname = %s"
_MAKE_ROLE = sql.SQL("create role {0}; comment on role {0} is {1}")
_UNUSED_CALLERS = """
    select r.rolname from pg_roles as r
    where r.rolname = any (%s) and shobj_description(r.oid, 'pg_authid') = %s
        and not exists (
            select from pg_auth_members as m where r.oid in (m.roleid, m.member)
        )
"""


class _Named(Protocol):
    @property
    def job_id(self) -> UUID: ...


Job: TypeAlias = "_Named | UUID | str"
"""A lease, any other object with the id of a job, or that id."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A job as its producer asked for it."""

    job_id: UUID
    producer: str
    queue: str
    kind: str
    payload: dict[str, Any]
    idempotency_key: str
    available_at: datetime | None
    max_attempts: int


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt that ``drain`` made, and its outcome."""

    job_id: UUID
    kind: str
    attempt: int
    outcome: Outcome
    code: str | None = None


class _Here(Worker):
    """A worker whose handler is called on the thread that calls ``run``."""

    def run(self, *, until_idle: bool = False) -> Tally:
        """Work as ``Worker``."""
        self._begin()
        with ThreadPoolExecutor(1) as thread:
            tally = thread.submit(self._run.work, until_idle=until_idle)
            tally.add_done_callback(lambda _: self._run.jobs.finish())
            try:
                (queue,) = self._settings.queues
                state = self._run.jobs.next(queue)
                while state:
                    state = self._run.jobs.next(queue, state, self._verdict(state))
            except BaseException:  # an interrupt
                self.stop(0)
                raise
            return tally.result()


class _Drain(Observer):
    """Notes how jobs end, and stops the worker at the limit or after the first bug."""

    def __init__(self, limit: int, *, raising: bool) -> None:
        self.runs: list[Run] = []
        self.left = limit
        self.held: WorkerLease | None = None
        self.bug: BaseException | None = None
        self.worker: Worker | AsyncWorker
        self._raising = raising

    @contextmanager
    def running(self, lease: WorkerLease) -> Iterator[None]:
        """Note which job runs."""
        self.held = lease
        self.left -= 1
        try:
            if not self.left:
                self.worker.stop(inf)
            yield
        except BaseException as error:
            is_chosen = isinstance(chosen(error), Retry | Fail | Release | InvalidLease)
            if not isinstance(error, Exception) or (self._raising and not is_chosen):
                self.bug = error
                self.worker.stop(inf)
            raise
        finally:
            self.held = None

    def ended(self, ended: Ended) -> None:
        """Note how a job ended."""
        lease = ended.lease
        run = Run(lease.job_id, lease.kind, lease.attempt, ended.outcome, ended.code)
        self.runs.append(run)


class JobsInstance:
    """A Jobs Instance in a database of one test. Its sessions end with the test.

    Args:
        configuration: The document it was set up with.
        conninfo: The connection string of a superuser.
    """

    def __init__(self, configuration: Configuration, conninfo: str) -> None:
        self.configuration = configuration
        self._conninfo = checked(conninfo, "conninfo")
        self._sessions = ExitStack()
        self._clients: dict[str, Jobs] = {}
        self._drain: _Drain | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # With the error: after an interrupt a session may be in the middle of a call.
        self._sessions.__exit__(*error)  # type: ignore[arg-type]

    @property
    def schema(self) -> str:
        """The schema of the Instance."""
        return self.configuration.schema_

    def conninfo(self, role: str | None = None) -> str:
        """Return the connection string of a role, or of the superuser.

        It is the superuser's, and puts the role in force. So the role needs no LOGIN
        and no password.
        """
        if role is None:
            return self._conninfo
        given = conninfo_to_dict(self._conninfo).get("options") or ""
        escaped = re.sub(r"([\\\s])", r"\\\1", role)
        return make_conninfo(self._conninfo, options=f"{given} -c role={escaped}")

    def connect(self, role: str | None = None) -> Connection:
        """Return a session of a role, or of the superuser, in autocommit."""
        session = psycopg.connect(self.conninfo(role), autocommit=True)
        self._sessions.enter_context(session)
        if role is not None:
            session.execute(_AS_LOGGED_IN, (role,))
        return session

    def jobs(self, caller: str) -> Jobs:
        """Return the client of a declared caller, on a session of that role.

        Raises:
            LookupError: The document does not declare the caller.
        """
        self._declared(caller)
        if caller not in self._clients:
            self._clients[caller] = Jobs(self.connect(caller), self.schema)
        return self._clients[caller]

    @asynccontextmanager
    async def async_jobs(self, caller: str) -> AsyncIterator[AsyncJobs]:
        """Yield the asyncio client of a declared caller, in the running loop.

        Raises:
            LookupError: The document does not declare the caller.
        """
        self._declared(caller)
        async with await psycopg.AsyncConnection.connect(
            self.conninfo(caller), autocommit=True
        ) as connection:
            await connection.execute(_AS_LOGGED_IN, (caller,))
            yield AsyncJobs(connection, self.schema)

    @property
    def producer(self) -> Jobs:
        """The client of the first declared producer."""
        return self.jobs(self.configuration.producer_instances[0])

    @property
    def worker(self) -> Jobs:
        """The client of the first declared worker."""
        return self.jobs(self.configuration.worker_instances[0])

    @property
    def observer(self) -> Jobs:
        """The client of the first declared observer.

        Raises:
            LookupError: The document declares none.
        """
        if not self.configuration.observer_instances:
            raise LookupError("the document declares no observer_instances")
        return self.jobs(self.configuration.observer_instances[0])

    def enqueued(self, queue: str | None = None) -> list[Enqueued]:
        """Return all jobs that were enqueued, to one queue or to any, oldest first."""
        with self._superuser.cursor(row_factory=args_row(Enqueued)) as cursor:
            every = cursor.execute(_ENQUEUED).fetchall()
        return [job for job in every if queue in {None, job.queue}]

    def inspect(self, job: Job) -> InspectedJob:
        """Return the evidence of a job.

        Raises:
            JobNotFound: There is no such job.
        """
        return self.worker.inspect(_job_id(job))

    def expire(self, job: Job) -> None:
        """Let the lease of a job run out, as of a second ago.

        A handler within ``drain`` sees it at once, a ``Worker`` when it next renews.

        Raises:
            ValueError: The job is not running.
        """
        self._move(_EXPIRE, job, "running")
        held = self._drain and self._drain.held
        if held and str(held.job_id) == str(_job_id(job)):
            held._state.is_lost = True  # noqa: SLF001

    def make_due(self, job: Job) -> None:
        """Let a scheduled or retrying job fall due, as of a second ago.

        Raises:
            ValueError: The job is not queued.
        """
        self._move(_MAKE_DUE, job, "queued")

    def clear(self) -> None:
        """Delete all jobs, for a database that several tests use.

        It waits for sessions that are in the middle of a transaction on jobs.
        """
        self._superuser.execute("truncate job, live_job, attempt")

    def drain(
        self,
        handler: Handler[HeldLease, object] | Mapping[str, Handler[HeldLease, object]],
        queue: str | None = None,
        *,
        limit: int = 1000,
        raising: bool = True,
    ) -> list[Run]:
        """Run the jobs that are due, one after the other, until none is.

        A ``Worker`` runs them as the first declared worker. The handler is called on the
        thread that calls ``drain``.

        Args:
            handler: Called with a ``HeldLease``; or handlers by kind, as a ``Kinds``.
                For coroutine functions use ``drain_async``.
            queue: The queue to drain. All queues by default.
            limit: After how many attempts to stop.
            raising: Whether to raise what a handler raised, once it is recorded.
                ``Retry``, ``Fail``, ``Release`` and ``InvalidLease`` are never raised.

        Returns:
            The attempts, in the order in which they ended.

        Raises:
            TypeError: *handler* is a coroutine function.
            InvalidArgument: *handler* returned an awaitable or a generator. Its job was
                released.
            InvalidQueue: *queue* is not declared.
        """
        if is_coroutine_function(handler):
            raise TypeError(
                "drain calls plain functions; for a coroutine function: "
                "await jobs_instance.drain_async(handler)"
            )
        self._drain = drain = _Drain(limit, raising=raising)
        for worker in self._workers(_Here, handler, queue, drain):
            worker.run(until_idle=True)
        return drain.runs

    async def drain_async(
        self,
        handler: Handler[AsyncHeldLease, Awaitable[object]]
        | Mapping[str, Handler[AsyncHeldLease, Awaitable[object]]],
        queue: str | None = None,
        *,
        limit: int = 1000,
        raising: bool = True,
    ) -> list[Run]:
        """Run the jobs that are due, one after the other, until none is.

        An ``AsyncWorker`` runs them as the first declared worker, in the running event
        loop.

        Args:
            handler: A coroutine function, called with an ``AsyncHeldLease``; or such
                functions by kind.
            queue: The queue to drain. All queues by default.
            limit: After how many attempts to stop.
            raising: Whether to raise what a handler raised, once it is recorded.
                ``Retry``, ``Fail``, ``Release`` and ``InvalidLease`` are never raised.

        Returns:
            The attempts, in the order in which they ended.

        Raises:
            InvalidArgument: *handler* returned no awaitable. Its job was released.
            InvalidQueue: *queue* is not declared.
        """
        self._drain = drain = _Drain(limit, raising=raising)
        for worker in self._workers(AsyncWorker, handler, queue, drain):
            await worker.run(until_idle=True)
        return drain.runs

    def _workers(
        self,
        kind: type[W],
        handler: Any,  # noqa: ANN401 - as each takes it
        queue: str | None,
        drain: _Drain,
    ) -> Iterator[W]:
        """Yield workers of queues in which a job is due, until there is none."""
        queues = self.configuration.queues
        if queue is not None and queue not in queues:
            raise InvalidQueue(f"queue {queue} is not declared")
        ran = -1
        while ran < len(drain.runs):
            ran = len(drain.runs)
            due = {name for (name,) in self._superuser.execute(_DUE)}
            for name in queues if queue is None else (queue,):
                if name in due and drain.left > 0 and drain.bug is None:
                    worker = drain.worker = kind(
                        self.conninfo(),
                        schema=self.schema,
                        queue=name,
                        handler=handler,
                        concurrency=1,
                        caller=self.configuration.worker_instances[0],
                        observers=[drain],
                    )
                    yield worker
        if drain.bug is not None:
            raise drain.bug

    def _declared(self, caller: str) -> None:
        declared = sorted(_callers(self.configuration))
        if caller not in declared:
            raise LookupError(
                f"{caller!r} is not a declared caller; declared: {', '.join(declared)}"
            )

    @cached_property
    def _superuser(self) -> Connection:
        connection = self.connect()
        connection.execute(_SEARCH, (self.schema,))
        return connection

    def _move(self, statement: str, job: Job, status: str) -> None:
        if not self._superuser.execute(statement, (_job_id(job),)).rowcount:
            found = self.inspect(job)
            raise ValueError(f"job {found.job_id} is {found.status}, not {status}")


def held_lease(
    kind: str | Kind[Any, Any, Any],
    payload: Any = None,  # noqa: ANN401 - as the kind says
    attempt: int = 1,
    *,
    lost: bool = False,
) -> HeldLease:
    """Make a lease for a unit test of a handler. No job is behind it, and no server.

    Its ``complete`` needs a job, which ``jobs_instance`` has.

    Args:
        kind: The kind of the job, or what ``Kinds`` made of its handler.
        payload: The payload, of the type of the kind. By default an empty one.
        attempt: Which attempt it is; 3 are allowed, or as many as the kind says.
        lost: Whether the lease is lost.

    Returns:
        A lease for a function.

    Raises:
        InvalidJob: *payload* does not fit the kind.
    """
    return _made(HeldLease, kind, payload, attempt, lost=lost)


def async_held_lease(
    kind: str | Kind[Any, Any, Any],
    payload: Any = None,  # noqa: ANN401 - as above
    attempt: int = 1,
    *,
    lost: bool = False,
) -> AsyncHeldLease:
    """Do as ``held_lease`` for a coroutine function.

    Returns:
        A lease for a coroutine function.

    Raises:
        InvalidJob: *payload* does not fit the kind.
    """
    return _made(AsyncHeldLease, kind, payload, attempt, lost=lost)


def _made(
    lease: type[L],
    kind: str | Kind[Any, Any, Any],
    payload: Any,  # noqa: ANN401 - as above
    attempt: int,
    *,
    lost: bool,
) -> L:
    payload = {} if payload is None else payload
    if isinstance(kind, Kind):
        job = kind.new_job(payload, idempotency_key=_UNIT_TEST)
    else:
        job = NewJob("default", kind, payload, _UNIT_TEST)
    text, now = _wire.payload(job.payload) or "", time()
    made = lease(
        Settings(_UNIT_TEST, {job.queue: 1}),
        *(uuid4(), job.queue, job.kind, text.encode(), attempt, job.max_attempts),
        *(_UNIT_TEST, now + _HOUR, now, _HOUR),
    )
    made._state.extend(monotonic(), _HOUR)  # noqa: SLF001
    made._state.is_lost = lost  # noqa: SLF001
    return made


def _job_id(job: Job) -> UUID | str:
    return job.job_id if hasattr(job, "job_id") else job


def _callers(configuration: Configuration) -> set[str]:
    return set().union(*configuration.callers.values())


class Templates:
    """The databases that tests get copies of: one for each document and load.

    The names of databases and group roles begin with *stem*. *leftovers* drops them.
    """

    def __init__(self, server: str, stem: str, leftovers: ExitStack) -> None:
        self._server = server
        self._leftovers = leftovers
        self._names = (f"{stem}_{n}" for n in count(1))
        self._ready: dict[tuple[Configuration, Load], Configuration] = {}

    @contextmanager
    def copy(self, configuration: Configuration, load: Load) -> Iterator[JobsInstance]:
        """Yield a copy of the Instance of a document, with what *load* makes in it."""
        template = self._ready.get((configuration, load))
        if template is None:
            template = self._set_up(configuration, load)
            self._ready[configuration, load] = template
        with (
            self._database(next(self._names), template.prefix) as conninfo,
            JobsInstance(template, conninfo) as instance,
        ):
            yield instance

    def _set_up(self, configuration: Configuration, load: Load) -> Configuration:
        # Database and group roles share a name; the document's may be in use elsewhere.
        name = next(self._names)
        configuration = configuration.model_copy(update={"role_prefix": name})
        self._leftovers.callback(self._drop_roles, configuration)
        conninfo = self._leftovers.enter_context(self._database(name, "template0"))
        with self._session(alone=True) as connection:
            for caller in _callers(configuration):
                # The mark lets the last process that uses the role drop it.
                if not connection.execute(_IS_ROLE, (caller,)).rowcount:
                    role = sql.Identifier(caller)
                    connection.execute(_MAKE_ROLE.format(role, sql.Literal(_MARK)))
            setup(configuration, conninfo)
        load(conninfo)
        return configuration

    @contextmanager
    def _database(self, name: str, template: str) -> Iterator[str]:
        with self._session() as connection:
            statement = f"create database {name} encoding 'UTF8' template {template}"
            connection.execute(statement)
        try:
            yield make_conninfo(self._server, dbname=name)
        finally:
            with self._session() as connection:
                connection.execute(f"drop database if exists {name} with (force)")

    def _drop_roles(self, configuration: Configuration) -> None:
        drop = sql.SQL("drop role if exists {}")
        callers = list(_callers(configuration))
        with self._session(alone=True) as connection:
            for kind in ("owner", "producer", "worker", "observer", "operator"):
                group = sql.Identifier(f"{configuration.prefix}_{kind}")
                connection.execute(drop.format(group))
            unused = connection.execute(_UNUSED_CALLERS, (callers, _MARK)).fetchall()
            for (caller,) in unused:
                with suppress(errors.DependentObjectsStillExist):
                    connection.execute(drop.format(sql.Identifier(caller)))

    @contextmanager
    def _session(self, *, alone: bool = False) -> Iterator[Connection]:
        """Yield a superuser's session; alone, no other process changes callers."""
        with psycopg.connect(self._server, autocommit=True) as connection:
            if alone:
                connection.execute("set lock_timeout = '60s'")
                connection.execute(_LOCK, (_MARK,))
            yield connection
