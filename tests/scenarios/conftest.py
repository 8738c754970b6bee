"""One client three ways, a proxy that loses answers, and workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from itertools import chain, repeat
from pathlib import Path
from urllib.parse import urlencode
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import namedtuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from yoyo import get_backend, read_migrations

from cutter import Cutter
from fixtures.workers import DEADLINE, wait_until
from lenso_jobs import AsyncJobs, Jobs, JobsError, _waiting
from lenso_jobs.config import Configuration
from lenso_jobs.worker import AsyncWorker, Worker, _claims

ROOT = Path(__file__).parents[2]
SCHEMA = "jobs_email"

# One client three ways.


class Plain:
    """The verbs in SQL, answering rows; JSON in text is sent as it is."""

    def __init__(self, connection):
        self._connection = connection

    def enqueue(
        self,
        queue,
        kind,
        payload,
        *,
        idempotency_key,
        available_at=None,
        max_attempts=3,
    ):
        return self._row(
            "enqueue(%s, %s, %s::jsonb, %s, %s::timestamptz, %s::integer)",
            queue,
            kind,
            payload if isinstance(payload, str | None) else json.dumps(payload),
            idempotency_key,
            available_at,
            max_attempts,
        )

    def enqueue_many(self, items):
        return self._rows("enqueue_many(%s::jsonb)", json.dumps(list(items)))

    def claim(self, queue, limit=1):
        return self._rows("claim(%s, %s)", queue, limit)

    def renew(self, lease):
        return self._value("renew(%s, %s)", lease.job_id, lease.lease_token)

    def renew_many(self, leases):
        return self._rows("renew_many(%s, %s)", *self._columns(leases))

    def complete(self, lease):
        return self._value("complete(%s, %s)", lease.job_id, lease.lease_token)

    def complete_many(self, leases):
        return self._rows("complete_many(%s, %s)", *self._columns(leases))

    def fail(self, lease, code, *, retryable):
        return self._row(
            "fail(%s, %s, %s, %s)", lease.job_id, lease.lease_token, code, retryable
        )

    def fail_many(self, failures):
        leases, codes, retryable = zip(*failures, strict=True)
        return self._rows(
            "fail_many(%s, %s, %s, %s)",
            *self._columns(leases),
            list(codes),
            list(retryable),
        )

    def release(self, lease):
        return self._row("release(%s, %s)", lease.job_id, lease.lease_token)

    def release_many(self, leases):
        return self._rows(
            "release_many(%s, %s, %s)", *self._columns(leases), [0] * len(leases)
        )

    def inspect(self, job_id):
        return self._row("inspect(%s)", job_id)

    def next_available_at(self, queue):
        return self._value("next_available_at(%s)", queue)

    def close(self):
        self._connection.close()

    def _rows(self, call, *parameters):
        with self._connection.cursor(row_factory=namedtuple_row, binary=True) as cursor:
            cursor.execute(f"select * from {SCHEMA}.{call}", parameters)
            return cursor.fetchall()

    def _row(self, call, *parameters):
        (row,) = self._rows(call, *parameters)
        return row

    def _value(self, call, *parameters):
        ((value,),) = self._rows(call, *parameters)
        return value

    @staticmethod
    def _columns(leases):
        leases = list(leases)
        return [x.job_id for x in leases], [x.lease_token for x in leases]


class Blocking:
    """An AsyncJobs whose methods block, all in one event loop."""

    def __init__(self, runner, jobs):
        self._runner = runner
        self._jobs = jobs

    @property
    def _source(self):
        return Blocking(self._runner, self._jobs._source)

    def __getattr__(self, name):
        method = getattr(self._jobs, name)

        def call(*arguments, **named):
            return self._runner.run(method(*arguments, **named))

        return call


WAYS = ("sql", "sync", "async")
POOLED_WAYS = ("sync on a pool", "async on a pool")


@pytest.fixture(params=WAYS)
def way(request):
    """What makes the calls: plain SQL, Jobs or AsyncJobs."""
    return request.param


@contextlib.contextmanager
def opened(way, url, caller=None, **options):
    """Open a client on a connection, or a pool of one, that commits each call."""
    options = {"autocommit": True, **options}
    if way == "sql":
        with psycopg.connect(url, **options) as connection:
            yield Plain(connection)
    elif way == "sync":
        with psycopg.connect(url, **options) as connection:
            yield Jobs(connection, SCHEMA, caller)
    elif way == "sync on a pool":
        with ConnectionPool(
            url, min_size=1, max_size=1, open=True, kwargs=options
        ) as pool:
            yield Jobs(pool, SCHEMA, caller)
    else:

        async def start():
            if way == "async":
                source = await psycopg.AsyncConnection.connect(url, **options)
            else:
                source = AsyncConnectionPool(
                    url, min_size=1, max_size=1, open=False, kwargs=options
                )
                await source.open()
            return AsyncJobs(source, SCHEMA, caller)

        with asyncio.Runner() as runner:
            jobs = runner.run(start())
            try:
                yield Blocking(runner, jobs)
            finally:
                runner.run(jobs._source.close())


@pytest.fixture
def open_client(conninfo):
    """Open a client as a role, for a with statement; as a superuser's caller if told."""

    def open_client(way, role=None, *, caller=None, connecting=None, **parameters):
        if role is not None:
            parameters["user"] = role
        url = make_conninfo(conninfo, **parameters)
        return opened(way, url, caller, **connecting or {})

    return open_client


@pytest.fixture
def client(way, open_client):
    """A client as a role, with parameters of its connection; open until the end."""
    with contextlib.ExitStack() as stack:

        def client(role=None, **parameters):
            return stack.enter_context(open_client(way, role, **parameters))

        yield client


@pytest.fixture
def refused():
    """Insist that the block is refused with this SQLSTATE in each of the three ways."""

    @contextlib.contextmanager
    def refused(sqlstate):
        with pytest.raises((psycopg.Error, JobsError)) as caught:
            yield caught
        assert caught.value.sqlstate == sqlstate, caught.value

    return refused


# A proxy that loses an answer.


@pytest.fixture
def cutter(conninfo):
    """A proxy to the server that loses a reply on request."""
    with Cutter(conninfo) as cutter:
        yield cutter


# Workers, both ways.


class Threads:
    """A ``Worker``, whose handlers are coroutines that block where they would wait."""

    name, queue, worker = "Worker", "email", Worker

    def adapt(self, handler):
        def adapted(lease):
            with contextlib.suppress(StopIteration):
                handler(self, lease).send(None)
                raise AssertionError("it waits")

        return adapted

    def run(self, worker):
        return worker.run()

    async def until(self, condition):
        wait_until(condition)

    async def complete(self, lease, conninfo):
        """Complete a job in a new transaction."""
        with psycopg.connect(conninfo) as connection:
            lease.complete(connection)


class Tasks:
    """An ``AsyncWorker``."""

    name, queue, worker = "AsyncWorker", "slow", AsyncWorker

    def adapt(self, handler):
        return lambda lease: handler(self, lease)

    def run(self, worker):
        return asyncio.run(worker.run())

    async def until(self, condition):
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)

    async def complete(self, lease, conninfo):
        async with await psycopg.AsyncConnection.connect(conninfo) as connection:
            await lease.complete(connection)


@pytest.fixture
def crews():
    """Both kinds of worker, with one queue each."""
    return Threads(), Tasks()


@pytest.fixture(params=[0, 1], ids=["Worker", "AsyncWorker"])
def crew(crews, request):
    """Each kind of worker in turn."""
    return crews[request.param]


@pytest.fixture
def hire(conninfo, on_a_thread):
    """Begin to run a worker, as email-worker by default; stopped with the test.

    The handler is a coroutine function of the crew, which knows how to wait, and the
    lease.
    """

    def hire(crew, handler, source=None, **options):
        worker = crew.worker(
            source or make_conninfo(conninfo, user="email-worker"),
            handler=crew.adapt(handler),
            **{"schema": SCHEMA, "queue": crew.queue} | options,
        )
        hired = on_a_thread(crew, worker)
        hired.start()
        return hired

    return hire


@pytest.fixture
def attempts(owner):
    """The attempts of jobs that have ended, as (attempt, outcome, code), by job."""

    def attempts(*job_ids, count=0):
        """Once there are so many of them."""
        query = (
            "select attempt, outcome, failure_code from attempt"
            " where job_id = any (%s) order by job_id, attempt"
        )
        if count:
            wait_until(lambda: len(owner.rows(query, list(job_ids))) >= count)
        return owner.rows(query, list(job_ids))

    return attempts


# Workers that are processes.

PROCESS = """
import asyncio, json, os, signal, sys, time
import psycopg
from lenso_jobs import worker as workers

conninfo = os.environ["CONNINFO"]
options = json.loads(os.environ["OPTIONS"])
graces = [None, *options.pop("graces", ())]

def begin(lease):
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "insert into public.start values (%s, %s)", (lease.job_id, os.getpid())
        )
    if lease.kind == "exit":
        os._exit(9)
    return lease.payload.get("seconds", 0)

def handler(lease):
    time.sleep(begin(lease))

async def async_handler(lease):
    await asyncio.sleep(begin(lease))

async def run():
    task = asyncio.ensure_future(worker.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, task.cancel)
    return await task

kind = getattr(workers, options.pop("kind"))
is_async = kind is workers.AsyncWorker
worker = kind(conninfo, handler=async_handler if is_async else handler, **options)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: worker.stop(graces.pop(0)))
print("ready", flush=True)
try:
    tally = asyncio.run(run()) if is_async else worker.run()
except asyncio.CancelledError:
    sys.exit(4)
sys.exit(0 if tally.is_clean else 3)
"""


class Process:
    """A process that runs a worker."""

    def __init__(self, script, environment):
        self._process = subprocess.Popen(
            [sys.executable, script], env=environment, stdout=subprocess.PIPE
        )
        assert self._process.stdout.readline() == b"ready\n"
        self.send = self._process.send_signal

    def exit_code(self):
        """Wait until it has ended."""
        return self._process.wait(DEADLINE)

    def end(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def employ(conninfo, environment, owner, tmp_path):
    """Run a worker in a process; it exits with 0 if its end was clean, else with 3.

    Handlers note that they began, and sleep for as many seconds as the payload says;
    those of kind "exit" end the process. SIGTERM and SIGINT stop the worker, the second
    and third time with the graces given; SIGUSR1 cancels the task of an AsyncWorker.
    """
    script = tmp_path / "worker.py"
    script.write_text(PROCESS)
    owner.execute("create table public.start (job_id uuid, pid integer)")
    owner.execute('grant insert on public.start to "email-worker"')
    source = make_conninfo(conninfo, user="email-worker")
    employed = []

    def employ(crew, **options):
        options = {"kind": crew.name, "schema": SCHEMA, "queue": crew.queue} | options
        process = Process(
            script, {**environment, "CONNINFO": source, "OPTIONS": json.dumps(options)}
        )
        employed.append(process)
        return process

    yield employ
    for process in employed:
        process.end()


@pytest.fixture
def starts(employ, owner):
    """How often the handler of a job began in a process."""

    def starts(*job_ids):
        query = "select count(*) from public.start where job_id = any (%s)"
        return owner.value(query, list(job_ids))

    return starts


# What is no verb, and both verbs that enqueue alike.


class Beneath:
    """The connection beneath a client."""

    def __init__(self, client):
        self._run = client._runner.run if isinstance(client, Blocking) else None
        jobs = client._jobs if self._run else client
        self._connection = jobs._connection if isinstance(jobs, Plain) else jobs._source

    @property
    def pid(self):
        return self._connection.info.backend_pid

    def execute(self, statement):
        done = self._connection.execute(statement)
        if self._run:
            self._run(done)


@pytest.fixture
def beneath():
    """The connection beneath a client: to begin, commit and roll back, and its pid."""
    return Beneath


class Enqueue:
    """Enqueue a job and return its id, and created, existing or conflict."""

    def __init__(self, *, is_many):
        self._is_many = is_many

    def __call__(self, jobs, key, payload, queue="email", kind="send", **options):
        if self._is_many:
            fields = {"queue": queue, "kind": kind, "payload": payload}
            (item,) = jobs.enqueue_many([fields | {"idempotency_key": key} | options])
            return item.job_id, item.outcome
        try:
            job = jobs.enqueue(queue, kind, payload, idempotency_key=key, **options)
        except (psycopg.Error, JobsError) as error:
            if error.sqlstate != "LJ002":
                raise
            return None, "conflict"
        return job.job_id, "created" if job.created else "existing"


@pytest.fixture
def verbs():
    """enqueue and enqueue_many, alike."""
    return {"enqueue": Enqueue(is_many=False), "enqueue_many": Enqueue(is_many=True)}


# Further Instances.


@pytest.fixture
def new_prefix():
    """Name what a set of role names begins with; the roles are dropped at the end."""
    made = []

    def new_prefix():
        made.append(f"scenario_{uuid4().hex[:10]}")
        return made[-1]

    yield new_prefix
    with psycopg.connect(
        os.environ["LENSO_JOBS_TEST_SERVER"], autocommit=True
    ) as connection:
        roles = connection.execute(
            "select string_agg(quote_ident(rolname), ', ') from pg_roles"
            " where rolname::text ^@ any (%s)",
            (made,),
        ).fetchone()[0]
        if roles:
            connection.execute(f"drop role {roles}")


@pytest.fixture
def databases(new_prefix, new_database):
    """Make empty databases; they are dropped before the roles of ``new_prefix`` are."""
    return new_database


@pytest.fixture
def instance_of(new_prefix, document):
    """Return the document of an Instance with new roles, and with changes."""

    def instance_of(schema="jobs_email", **changes):
        changes.setdefault("role_prefix", new_prefix())
        return Configuration.from_json(document(schema=schema, **changes))

    return instance_of


@pytest.fixture
def quick_detection(owner):
    """Have the server look for a deadlock at once."""
    owner.execute(f'alter database "{owner.info.dbname}" set deadlock_timeout = 20')


@pytest.fixture
def only_woken(monkeypatch, connect):
    """Have idle workers wait for a notification alone; wait for so many that listen."""
    monkeypatch.setattr(_waiting, "LISTENING_SECONDS", 3600)
    monkeypatch.setattr(
        _claims, "pauses", lambda longest: chain([0.02], repeat(longest))
    )

    def only_woken(count, **parameters):
        session = connect(**parameters)
        query = (
            "select count(*) from pg_locks where locktype = 'advisory' and mode ="
            " 'ShareLock' and database = (select oid from pg_database where datname ="
            " current_database())"
        )
        wait_until(lambda: session.value(query) == count)

    return only_woken


@pytest.fixture
def bootstrap():
    """Run the DBA's script with this text for a document, all or nothing."""

    def bootstrap(connection, text):
        with connection.transaction():
            connection.execute(
                "select set_config('lenso_jobs.document', %s, true)", (text,)
            )
            connection.execute((ROOT / "sql" / "bootstrap.sql").read_bytes())

    return bootstrap


@pytest.fixture
def migrate():
    """Apply the migrations one by one, as the README's command does, yielding each name."""

    def migrate(instance, conninfo):
        parameters = conninfo_to_dict(conninfo) | {
            "schema": instance.schema_,
            "options": f"-c role={instance.owner}",
        }
        backend = get_backend(f"postgresql+psycopg:///?{urlencode(parameters)}")
        try:
            with backend.lock():
                for each in backend.to_apply(read_migrations(str(ROOT / "migrations"))):
                    backend.apply_migrations_only([each])
                    yield each.id
        finally:
            backend.connection.close()

    return migrate
