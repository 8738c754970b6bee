"""A server, an Instance or two, and the plain tables that are the floor.

The server is the one in LENSO_JOBS_SERVER_URL, else one of our own on disk with fsync and
synchronous_commit on (PG_BINDIR chooses which). Everything lies in a database that is
dropped at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from lenso_jobs.config import Configuration
from lenso_jobs.embedded import SERVER_URL, EmbeddedServer
from lenso_jobs.operator import setup

SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "min_wal_size": "1GB",
    "max_connections": "300",
}
INSTANCE = {
    "database_url_secret": "jobs/database-url",
    "lease_seconds": 3600,
    "retry_base_seconds": 1,
    "retry_max_seconds": 2,
    "queues": ["email"],
    "producer_instances": ["bench"],
    "worker_instances": ["bench"],
}
GROUPS = ("owner", "producer", "worker", "observer", "operator")

TABLES = """
create table floor_job (
    id bigint generated always as identity primary key,
    queue text not null,
    state text not null default 'ready',
    payload jsonb not null,
    run_at timestamptz not null default now(),
    lease_until timestamptz
);
create index on floor_job (queue, run_at, id) where state = 'ready';
create table kept_job (like floor_job including all, key text not null unique);
create table kept_attempt (
    id bigint, attempt integer, ended_at timestamptz, outcome text,
    primary key (id, attempt)
);
grant all on all tables in schema public to bench;
"""


@dataclass(frozen=True)
class Stage:
    """A database with the Instance jobs_bench and the plain tables."""

    conninfo: str

    def connect(self, user=None, **parameters):
        """Open a session in autocommit; as the superuser, or as the role ``bench``."""
        if user is not None:
            parameters["options"] = f"-c role={user}"
        return psycopg.connect(
            make_conninfo(self.conninfo, **parameters), autocommit=True
        )

    def worker(self):
        """Open a session as the caller Instance that produces and works."""
        return self.connect("bench")

    def instance(self, schema, **changes):
        """Set up one more Instance with the same caller, and return its schema."""
        document = INSTANCE | {"schema": schema} | changes
        setup(Configuration.from_json(json.dumps(document)), self.conninfo)
        return schema

    def empty(self, *schemas):
        """Take every job out of these Instances and of the plain tables."""
        tables = [
            f"{schema}.{name}"
            for schema in ("jobs_bench", *schemas)
            for name in ("job", "live_job", "attempt")
        ]
        with self.connect() as session:
            session.execute(
                f"truncate floor_job, kept_job, kept_attempt, {', '.join(tables)}"
            )

    def fill(self, schema, *, queued=0, scheduled=0, running=0, ended=0):
        """Put jobs of each kind into an Instance, older than any that follows."""
        kinds = {
            "queued": (queued, "interval '1 hour'", "null"),
            "scheduled": (scheduled, "interval '-30 days'", "null"),
            "running": (running, "interval '2 hours'", "1"),
        }
        mark = uuid4().hex[:8]
        with self.connect(options=f"-c search_path={schema}") as session:
            for kind, (count, age, attempt) in kinds.items():
                for first in range(1, count + 1, 100_000):
                    session.execute(
                        f"""
                        with made as (
                            insert into job (
                                job_id, created_at, max_attempts, producer, queue, kind,
                                idempotency_key, payload
                            )
                            select
                                _enqueue_job_id(clock_timestamp()), clock_timestamp(), 3,
                                'bench', 'email', 'send', format('{kind}-{mark}-%%s', n), '{{}}'
                            from generate_series(%s::integer, %s::integer) as n
                            returning job_id
                        )
                        insert into live_job (
                            job_id, available_at, attempt, max_attempts, queue,
                            leased_at, lease_expires_at, lease_owner, lease_token_hash
                        )
                        select
                            job_id,
                            clock_timestamp() - {age}
                            + row_number() over () * interval '1 us',
                            coalesce({attempt}, 0), 3, 'email',
                            case when {attempt} = 1 then clock_timestamp() end,
                            case when {attempt} = 1
                                then clock_timestamp() + interval '9 hours'
                            end,
                            case when {attempt} = 1 then 'bench' end,
                            case when {attempt} = 1 then sha256(uuid_send(job_id)) end
                        from made
                        """,
                        (first, min(first + 99_999, count)),
                    )
            for first in range(1, ended + 1, 100_000):
                session.execute(
                    f"""
                    with made as (
                        insert into job (
                            job_id, created_at, max_attempts, producer, queue, kind,
                            idempotency_key, payload
                        )
                        select
                            _enqueue_job_id(clock_timestamp()), clock_timestamp(), 3,
                            'bench', 'email', 'send', format('ended-{mark}-%%s', n),
                            '{{"to": "someone@example.com", "template": "welcome"}}'
                        from generate_series(%s::integer, %s::integer) as n
                        returning job_id
                    )
                    insert into attempt (
                        job_id, leased_at, ended_at, attempt, max_attempts, queue, worker,
                        outcome, lease_token_hash
                    )
                    select
                        job_id, clock_timestamp(), clock_timestamp(), 1, 3, 'email', 'bench',
                        'succeeded', sha256(uuid_send(job_id))
                    from made
                    """,
                    (first, min(first + 99_999, ended)),
                )
            session.execute("vacuum analyze job, live_job, attempt")


@contextlib.contextmanager
def serving(scale=1.0):
    """Yield the superuser's connection string of a server that has been running."""
    with contextlib.ExitStack() as stack:
        server = os.environ.get(SERVER_URL)
        if not server:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            directory.chmod(0o755)
            server = stack.enter_context(
                EmbeddedServer(directory / "cluster", SETTINGS)
            ).conninfo()
            # A new server creates its WAL files as they are needed, and the contender
            # that writes more waits longer. A server that has run for a while reuses
            # them.
            with psycopg.connect(server, autocommit=True) as session:
                session.execute(
                    "create table made as select n, repeat('x', 200) as filler"
                    " from generate_series(1, %s::integer) as n",
                    (int(4_000_000 * min(1, scale)),),
                )
                session.execute("drop table made")
                session.execute("checkpoint")
                session.execute("checkpoint")
        yield server


@contextlib.contextmanager
def stage(server):
    """Yield a Stage, in a database that is dropped."""
    name = f"lenso_jobs_bench_{uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as session:
        session.execute(f"create database {name} template template0")
    try:
        it = Stage(make_conninfo(server, dbname=name))
        it.instance("jobs_bench")
        with it.connect() as session:
            session.execute(TABLES)
        yield it
    finally:
        _drop(server, name)


def _drop(server, name):
    """Drop the database and the roles of the Instances that were in it."""
    with psycopg.connect(make_conninfo(server, dbname=name)) as session:
        schemas = session.execute(
            "select nspname from pg_namespace where nspname like 'jobs%'"
        ).fetchall()
    with psycopg.connect(server, autocommit=True) as session:
        session.execute(f"drop database {name} with (force)")
        for role in ("bench", *(f"{s}_{g}" for (s,) in schemas for g in GROUPS)):
            session.execute(f"drop role if exists {role}")


def save(answer, directory, name):
    """Write what was measured into a directory, and return it as text."""
    text = json.dumps(answer, indent=1)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(text + "\n")
    return text


def describe(it):
    """Tell what the figures were taken on."""
    names = ("server_version", "fsync", "synchronous_commit", "shared_buffers")
    with it.connect() as session:
        server = {name: session.execute(f"show {name}").fetchone()[0] for name in names}
    return {
        **server,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "psycopg": psycopg.__version__,
    }
