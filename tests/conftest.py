"""The server, a template database with an Instance in it, and sessions on a copy.

Every test has a database of its own, ``db``, cloned from the template of its process.
Its Instance is in schema ``jobs_email``; the sessions below have it in their
search_path. Roles belong to the whole server, so the group roles carry the name of the
process (``prefix``); the callers are the same everywhere.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row
from pytest_postgresql import factories

import lenso_jobs
from lenso_jobs._assets import asset_dir
from lenso_jobs.config import Configuration
from lenso_jobs.embedded import SERVER_URL, EmbeddedServer, find_programs
from lenso_jobs.operator import _migrations, setup, upgrade

SERVER = "LENSO_JOBS_TEST_SERVER"
# More settings of that server, as a JSON object.
SETTINGS = "LENSO_JOBS_TEST_SETTINGS"
# Set where the Instance that every test gets a copy of shall come out of a backup.
RESTORED = "LENSO_JOBS_TEST_RESTORED"
CALLERS = ("accounts", "organization", "email-worker", "spare-worker", "operations")
KINDS = ("producer", "worker", "observer")
# Tests that need a dead lease or a due job move the clock of the row, not of the server.
LEASE_SECONDS = 30

_server = pytest.StashKey[EmbeddedServer]()


def pytest_configure(config):
    # A job in the background of a shell starts with it ignored, and would hand that on.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput") and SERVER not in os.environ:
        given = os.environ.get(SERVER_URL)
        if given:
            os.environ[SERVER] = make_conninfo(given)
        else:
            server = EmbeddedServer(
                settings={
                    "max_connections": "200",
                    "max_prepared_transactions": "16",
                    **json.loads(os.environ.get(SETTINGS, "{}")),
                }
            )
            server.__enter__()
            config.stash[_server] = server
            os.environ[SERVER] = server.conninfo()
    parameters = conninfo_to_dict(os.environ[SERVER])
    for option in ("host", "port", "user", "password"):
        value = parameters.get(option)
        setattr(config.option, f"postgresql_{option}", value)


def pytest_unconfigure(config):
    server = config.stash.get(_server, None)
    if server is not None:
        server.__exit__()
        del os.environ[SERVER]


def process_name():
    return os.environ.get("PYTEST_XDIST_WORKER", "main")


def document(**changes):
    """The document of the template's Instance, with changes; ``...`` leaves one out."""
    fields = {
        "schema": "jobs_email",
        "role_prefix": f"jobs_test_{process_name()}",
        "database_url_secret": "jobs/database-url",
        "lease_seconds": LEASE_SECONDS,
        "retry_base_seconds": 5,
        "retry_max_seconds": 300,
        "queues": ["email", "slow"],
        "producer_instances": ["accounts", "organization"],
        "worker_instances": ["email-worker", "spare-worker"],
        "observer_instances": ["operations"],
    } | changes
    return json.dumps({k: v for k, v in fields.items() if v is not ...})


def _load(**parameters):
    parameters.pop("autocommit", None)
    conninfo = make_conninfo(**{k: v for k, v in parameters.items() if v is not None})
    configuration = Configuration.from_json(document())
    setup(configuration, conninfo)
    if RESTORED in os.environ:
        _restore(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for caller in CALLERS:
            _retried(connection, f'alter role "{caller}" login')
        prefix = json.loads(document())["role_prefix"]
        for name, group in (
            (f"{prefix}_duty", f"{prefix}_operator"),
            ("stranger", None),
        ):
            _retried(
                connection,
                "do $$ begin"
                f' create role "{name}" login;'
                " exception when duplicate_object or unique_violation then null; end $$",
            )
            if group:
                _retried(connection, f'grant "{group}" to "{name}"')


def _restore(configuration, conninfo):
    with tempfile.TemporaryDirectory() as directory:
        dump = f"{directory}/jobs.dump"
        subprocess.run(
            [_program("pg_dump"), "--format=custom", f"--file={dump}", conninfo],
            check=True,
        )
        with psycopg.connect(conninfo) as connection:
            connection.execute("drop schema jobs_email cascade")
        subprocess.run(
            [_program("pg_restore"), "--exit-on-error", f"--dbname={conninfo}", dump],
            check=True,
        )
    upgrade(configuration, conninfo, repair_too=True)


def _program(name):
    beside = find_programs() / name
    found = beside if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} on this machine")
    return str(found)


@pytest.fixture(scope="session")
def program():
    """Where a program of PostgreSQL is: beside the server's, or on this machine."""
    return _program


def _retried(connection, statement):
    """Alter a role that another test process may be altering at the same moment."""
    for attempt in range(20):
        try:
            connection.execute(statement)
        except psycopg.errors.InternalError_:  # tuple concurrently updated
            if attempt == 19:
                raise
        else:
            return


postgresql_server = factories.postgresql_noproc(
    dbname=f"lenso_jobs_test_{process_name()}_{os.getpid()}", load=[_load]
)
postgresql_database = factories.postgresql("postgresql_server")


class Session(psycopg.Connection):
    """A connection of one role; every statement commits, unless in a transaction.

    Values are read in binary, which is the same whatever the server's DateStyle is.
    """

    def rows(self, statement, *parameters):
        """All rows, as tuples."""
        return self.execute(statement, parameters or None, binary=True).fetchall()

    def row(self, statement, *parameters):
        """The one row, as a dictionary."""
        with self.cursor(row_factory=dict_row, binary=True) as cursor:
            (row,) = cursor.execute(statement, parameters or None).fetchall()
        return row

    def value(self, statement, *parameters):
        """The one value."""
        ((value,),) = self.rows(statement, *parameters)
        return value

    @contextmanager
    def refusing(self, sqlstate):
        """Insist that the block raises exactly this SQLSTATE; yields the ExceptionInfo."""
        with pytest.raises(psycopg.Error) as caught:
            yield caught
        assert caught.value.sqlstate == sqlstate, caught.value

    @property
    def pid(self):
        return self.info.backend_pid


@pytest.fixture
def conninfo(postgresql_database):
    """The superuser's connection string of this test's own database."""
    parameters = conninfo_to_dict(os.environ[SERVER])
    return make_conninfo(**{**parameters, "dbname": postgresql_database.info.dbname})


@pytest.fixture
def connect(conninfo):
    """Open a session as a role (the server's superuser when left out)."""
    opened = []

    def connect(role=None, **parameters):
        parameters.setdefault("options", "-c search_path=jobs_email")
        if role is not None:
            parameters["user"] = role
        session = Session.connect(
            make_conninfo(conninfo, **parameters), autocommit=True
        )
        opened.append(session)
        return session

    yield connect
    for session in opened:
        session.close()


@pytest.fixture
def prefix():
    """What the names of the Instance's group roles begin with."""
    return json.loads(document())["role_prefix"]


@pytest.fixture(name="document")
def document_with_changes():
    """The document of the template's Instance, with changes; ``...`` leaves one out."""
    return document


@pytest.fixture
def owner(connect):
    """The superuser: moves time, breaks rows, reads tables, and configures."""
    session = connect()
    session.execute("set default_transaction_isolation = 'read committed'")
    return session


@pytest.fixture
def producer(connect):
    return connect("accounts")


@pytest.fixture
def other_producer(connect):
    return connect("organization")


@pytest.fixture
def worker(connect):
    return connect("email-worker")


@pytest.fixture
def rival(connect):
    return connect("spare-worker")


@pytest.fixture
def observer(connect):
    return connect("operations")


@pytest.fixture
def operator(connect, prefix):
    return connect(f"{prefix}_duty")


@pytest.fixture
def stranger(connect):
    return connect("stranger")


@pytest.fixture
def enqueue(producer):
    """Enqueue a job as ``accounts``; answers its id."""

    def enqueue(
        queue="email",
        kind="send",
        payload=None,
        key=None,
        available_at=None,
        max_attempts=3,
        session=None,
    ):
        return (session or producer).value(
            "select job_id from enqueue(%s, %s, %s, %s, %s, %s::integer)",
            queue,
            kind,
            json.dumps(payload or {}),
            key or f"key-{uuid4()}",
            available_at,
            max_attempts,
        )

    return enqueue


@pytest.fixture
def claim(worker):
    """Claim one due job as ``email-worker``; answers ``(job_id, lease_token)``."""

    def claim(queue="email", session=None):
        row = (session or worker).row("select * from claim(%s)", queue)
        return row["job_id"], row["lease_token"]

    return claim


@pytest.fixture
def expire(owner):
    """Let a job's lease run out, as of a second ago."""

    def expire(*job_ids):
        owner.execute(
            "update live_job set lease_expires_at = clock_timestamp() - interval '1 s'"
            " where job_id = any (%s)",
            (list(job_ids),),
        )

    return expire


@pytest.fixture
def make_due(owner):
    """Let a scheduled or retrying job fall due, as of a second ago."""

    def make_due(*job_ids):
        owner.execute(
            "update live_job set available_at = clock_timestamp() - interval '1 s'"
            " where job_id = any (%s)",
            (list(job_ids),),
        )

    return make_due


@pytest.fixture
def configure(owner):
    """Store the document in force, with changes."""

    def configure(**changes):
        assert owner.value("select configure(%s::jsonb)", document(**changes))

    return configure


@pytest.fixture
def state(owner):
    """Everything the Instance holds, to compare before and after."""

    def state():
        return {
            table: owner.rows(f"select t::text from {table} as t order by 1")
            for table in ("job", "live_job", "attempt", "operator_act")
        }

    return state


@pytest.fixture
def blocked(owner):
    """Wait until a session waits for a lock that another holds."""

    def blocked(waiter, holder):
        deadline = time.monotonic() + 20
        while holder.pid not in owner.value("select pg_blocking_pids(%s)", waiter.pid):
            assert time.monotonic() < deadline, "nobody waited"

    return blocked


@pytest.fixture
def no_wait_is_for_ever(postgresql_database):
    """Let a wait that nobody ends fail the test (55P03) instead of hanging it."""
    _set(postgresql_database, "lock_timeout", 8000)


@pytest.fixture
def read_committed(postgresql_database):
    """Begin at READ COMMITTED: above it who met another's change is only told 40001."""
    _set(postgresql_database, "default_transaction_isolation", "'read committed'")


def _set(connection, setting, value):
    connection.autocommit = True
    connection.execute(
        f'alter database "{connection.info.dbname}" set {setting} = {value}'
    )


@pytest.fixture
def hold(connect):
    """Lock the rows of jobs from a session of its own, until that session ends it."""

    def hold(*job_ids, table="live_job"):
        holder = connect()
        holder.execute("begin")
        holder.execute(
            f"select from {table} where job_id = any (%s) for update", (list(job_ids),)
        )
        return holder

    return hold


@pytest.fixture
def impatient():
    """Turn a wait that would last into a failure (55P03)."""

    def impatient(session):
        session.execute("set lock_timeout = '2s'")
        return session

    return impatient


@pytest.fixture
def lapse_soon(owner):
    """Let a job's lease end shortly, by the clock; answers when."""

    def lapse_soon(job_id):
        return owner.value(
            "update live_job"
            " set lease_expires_at = clock_timestamp() + interval '800 ms'"
            " where job_id = %s returning lease_expires_at",
            job_id,
        )

    return lapse_soon


@pytest.fixture
def pass_by(owner):
    """Wait until the server's clock has passed an instant."""

    def pass_by(instant):
        while not owner.value("select clock_timestamp() > %s", instant):
            owner.execute("select pg_sleep_until(%s)", (instant,))

    return pass_by


@pytest.fixture
def gated_evidence(owner, operator):
    """Hold up the operator's reads of evidence, each once begun, while a lock is held.

    A row-level policy is evaluated inside the statement, behind its snapshot.
    """
    owner.execute(
        "create function public.gate() returns boolean language plpgsql as $$ begin"
        f" if session_user = '{operator.info.user}' then"
        "  perform pg_advisory_xact_lock_shared(1);"
        " end if;"
        " return true; end $$;"
        " alter table attempt enable row level security;"
        " alter table attempt force row level security;"
        " create policy open on attempt using (true) with check (true);"
        " create policy gated on attempt as restrictive for select"
        "  using (public.gate())"
    )


@pytest.fixture
def background():
    """Run a call on a thread; ``.result()`` joins it and raises what it raised."""
    with ThreadPoolExecutor(max_workers=24) as pool:
        yield pool.submit


@pytest.fixture
def environment(conninfo):
    """The environment of the command, with the superuser's URL as the secret."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("PG")},
        "PYTHONPATH": str(Path(lenso_jobs.__file__).parents[1]),
        "JOBS_DATABASE_URL": conninfo,
        "COLUMNS": "80",
    }


@pytest.fixture
def new_role(connect, conninfo):
    """Make a role that may log in; it is dropped at the end, its sessions first."""
    made = []
    server = os.environ["LENSO_JOBS_TEST_SERVER"]

    def new_role(name=None, attributes="login", members_of=()):
        name = name or f"role_{uuid4().hex[:12]}"
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(
                sql.SQL("create role {} {}").format(
                    sql.Identifier(name), sql.SQL(attributes)
                )
            )
            made.append(name)
            for group in members_of:
                connection.execute(
                    sql.SQL("grant {} to {}").format(
                        sql.Identifier(group), sql.Identifier(name)
                    )
                )
        return name

    yield new_role
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        for name in made:
            role = sql.Identifier(name)
            connection.execute(sql.SQL("drop owned by {} cascade").format(role))
            connection.execute(sql.SQL("drop role {}").format(role))


@pytest.fixture
def new_caller(new_role, owner, prefix):
    """Make a role and declare it, as set-up does, for ``producer`` and so on."""

    def new_caller(*kinds, name=None, attributes="login"):
        name = new_role(
            name, attributes, members_of=[f"{prefix}_{kind}" for kind in kinds]
        )
        owner.execute(
            "insert into caller (caller, is_producer, is_worker, is_observer)"
            " values (%s, %s, %s, %s)",
            (name, *(kind in kinds for kind in KINDS)),
        )
        return name

    return new_caller


@pytest.fixture
def new_database(request):
    """Make an empty database; it and the roles of the prefixes it used are dropped."""
    made: list[tuple[str, str]] = []
    server = os.environ[SERVER]

    def new_database(prefix: str = "", options: str = "") -> Any:
        name = f"lenso_jobs_new_{uuid4().hex[:12]}"
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f"create database {name} template template0 {options}")
        made.append((name, prefix))
        return make_conninfo(server, dbname=name)

    yield new_database
    with psycopg.connect(server, autocommit=True) as connection:
        for name, _ in made:
            connection.execute(f"drop database {name} with (force)")
        for prefix in {prefix for _, prefix in made if prefix}:
            for kind in ("owner", "producer", "worker", "observer", "operator"):
                connection.execute(f"drop role if exists {prefix}_{kind}")


@pytest.fixture
def earlier(monkeypatch, tmp_path):
    """Let the first migrations be all there are; answers their directory, and an undo."""

    def earlier(count=1):
        directory = tmp_path / f"migrations-{count}"
        directory.mkdir()
        for path in sorted(asset_dir("migrations").glob("*.sql"))[:count]:
            shutil.copy(path, directory)
        monkeypatch.setattr(_migrations, "asset_dir", lambda _: directory)
        return directory, lambda: monkeypatch.setattr(
            _migrations, "asset_dir", asset_dir
        )

    return earlier


@pytest.fixture
def pooler(request, conninfo):
    """The parameters of a connection through a transaction pooler with two sessions.

    With as many as an indirect parameter says.
    """
    program = shutil.which(
        "pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    )
    if program is None:
        pytest.skip("there is no pgbouncer on this machine")
    server = conninfo_to_dict(conninfo)
    account = {}
    directory = Path(tempfile.mkdtemp(prefix="lenso-jobs-"))
    if os.geteuid() == 0:  # it refuses to be root, and must reach the server's socket
        socket = Path(server["host"])
        user = socket.stat().st_uid if socket.is_dir() else 0
        entry = pwd.getpwuid(user) if user else pwd.getpwnam("nobody")
        account = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        os.chown(directory, entry.pw_uid, entry.pw_gid)
    users = directory / "users"
    names = (server["user"], "accounts", "email-worker", "operations")
    users.write_text("".join(f'"{name}" ""\n' for name in names))
    settings = directory / "pgbouncer.ini"
    settings.write_text(
        "[databases]\n"
        f"* = host={server['host']} port={server.get('port', 5432)}\n"
        "[pgbouncer]\n"
        f"unix_socket_dir = {directory}\n"
        "listen_port = 6432\n"
        "pool_mode = transaction\n"
        f"default_pool_size = {getattr(request, 'param', 2)}\n"
        "query_wait_timeout = 20\n"
        "auth_type = trust\n"
        f"auth_file = {users}\n"
        "ignore_startup_parameters = extra_float_digits\n"
    )
    with (directory / "log").open("w+b") as log:
        process = subprocess.Popen(
            [program, settings],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            **account,
        )
        try:
            deadline = time.monotonic() + 20
            while not (directory / ".s.PGSQL.6432").exists():
                log.seek(0)
                assert process.poll() is None, log.read().decode()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield {"host": str(directory), "port": 6432, "dbname": server["dbname"]}
        finally:
            process.terminate()
            process.wait(timeout=20)
            shutil.rmtree(directory)


class Hired:
    """A worker that runs on a thread."""

    def __init__(self, crew, worker):
        self.worker = worker
        self._crew = crew
        self._answer = Future()
        self._thread = Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self._answer.set_result(self._crew.run(self.worker))
        except BaseException as error:  # noqa: BLE001 - the test's to raise
            self._answer.set_exception(error)

    def start(self):
        self._thread.start()

    def is_running(self):
        return self._thread.is_alive()

    def tally(self):
        """What run answers, or raises."""
        return self._answer.result(20)

    def stop(self, grace=20):
        self.worker.stop(grace)
        return self.tally()


@pytest.fixture
def on_a_thread():
    """Have a crew run a worker on a thread; it is stopped with the test."""
    hired = []

    def on_a_thread(crew, worker):
        hired.append(Hired(crew, worker))
        return hired[-1]

    yield on_a_thread
    running = [each for each in hired if each.is_running()]
    for each in running:
        each.worker.stop(0)
    for each in running:
        each._thread.join(20)


@pytest.fixture
def gate(on_a_thread):
    """Make an event that a handler may wait for; it is set before workers are stopped."""
    gates = []

    def gate():
        gates.append(Event())
        return gates[-1]

    yield gate
    for each in gates:
        each.set()


# Tables by the thousand rows, and what a statement reads of them.


@pytest.fixture
def fill(owner):
    """Insert ended, scheduled and due jobs by the thousand, as the owner."""

    def fill(ended=0, scheduled=0, due=0):
        owner.execute(
            """
            with made as (
                insert into job (
                    job_id, created_at, max_attempts, producer, queue, kind,
                    idempotency_key, payload
                )
                select
                    gen_random_uuid(), clock_timestamp(), 3, 'accounts', 'email',
                    'send', 'old-' || n || '-' || random(), '{}'
                from generate_series(1, %(all)s::integer) as n
                returning job_id
            ),
            numbered as materialized (
                select job_id, row_number() over () as n from made
            ),
            live as (
                insert into live_job (
                    job_id, available_at, attempt, max_attempts, queue
                )
                select
                    job_id,
                    clock_timestamp() + case when n <= %(due)s::integer
                        then interval '-9 s' else interval '9 h'
                    end,
                    0, 3, 'email'
                from numbered
                where n <= %(live)s::integer
            )
            insert into attempt (
                job_id, leased_at, ended_at, attempt, max_attempts, worker, outcome,
                lease_token_hash
            )
            select
                job_id, clock_timestamp(), clock_timestamp(), 1, 3, 'email-worker',
                'succeeded', sha256(uuid_send(job_id))
            from numbered
            where n > %(live)s::integer
            """,
            {"all": ended + scheduled + due, "live": scheduled + due, "due": due},
        )

    return fill


@pytest.fixture
def buffers():
    """Run a statement; answers how many buffers it touched, nested statements' too."""

    def buffers(session, statement, *parameters):
        (plan,) = session.value(
            f"explain (analyze, buffers, format json) {statement}", *parameters
        )
        plan = plan["Plan"]
        return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]

    return buffers


@pytest.fixture
def burn():
    """Use up transaction ids."""

    def burn(session, count):
        # Each block with a handler is a subtransaction, and takes an id as it writes.
        session.execute(
            sql.SQL(
                "do $$ begin create temp table ash (n int) on commit drop;"
                " for i in 1..{} loop begin insert into ash values (i);"
                " exception when division_by_zero then null; end; end loop; end $$"
            ).format(count)
        )

    return burn


@pytest.fixture
def seeing(owner, prefix):
    """Let the owner see since when transactions are open.

    Else it judges them by how many began since, and so do other tests' on this server.
    """
    owner.execute(f"grant pg_read_all_stats to {prefix}_owner")
    yield
    owner.execute(f"revoke pg_read_all_stats from {prefix}_owner")


@pytest.fixture
def locks(owner):
    """Each advisory lock in the database: its mode, and whether it is that of email."""

    def locks():
        return owner.rows(
            "select mode, classid::bigint << 32 | objid::bigint ="
            " _advisory_key('email') from pg_locks where locktype = 'advisory'"
            " and granted and database ="
            " (select oid from pg_database where datname = current_database())"
        )

    return locks


@pytest.fixture
def by_hand(owner):
    """Leave the tables as they are: nobody vacuums or analyzes them but the test."""
    for table in ("job", "live_job", "attempt"):
        owner.execute(f"alter table {table} set (autovacuum_enabled = off)")
    owner.execute("analyze")


# Who is notified.


@pytest.fixture
def waiting(connect):
    """Open a session that waits for queues as a worker does."""

    def waiting(*queues, **parameters):
        session = connect("email-worker", **parameters)
        session.execute(f"listen {session.value('select current_schema()')}")
        for queue in queues:
            assert session.value(
                "select pg_try_advisory_lock_shared(wait_key(%s))", queue
            )
        return session

    return waiting


@pytest.fixture
def heard():
    """Tell what a session has been notified of so far: all that precedes a marker."""
    markers = set()

    def heard(session):
        marker = uuid4().hex
        markers.add(marker)
        session.execute("select pg_notify(current_schema(), %s)", (marker,))
        found = []
        with closing(session.notifies(timeout=20)) as notifications:
            for notification in notifications:
                if notification.payload == marker:
                    return found
                if notification.payload not in markers:
                    found.append((notification.channel, notification.payload))
        raise AssertionError("the marker did not arrive")

    return heard
