"""Servers of our own that may be treated badly, and an Instance that is watched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from checker import Evidence
from lenso_jobs import Configuration
from lenso_jobs.embedded import EmbeddedServer
from lenso_jobs.operator import setup
from load import LEASE_SECONDS, QUEUE, SCHEMA

DBNAME = "chaos"
PRODUCER, WORKER, DUTY = "accounts", "email-worker", "duty"
DOCUMENT = {
    "schema": SCHEMA,
    "database_url_secret": "jobs/database-url",
    "lease_seconds": LEASE_SECONDS,
    "retry_base_seconds": 1,
    "retry_max_seconds": 2,
    "queues": [QUEUE],
    "producer_instances": [PRODUCER],
    "worker_instances": [WORKER],
}
# The witness keeps what the Instance forgets: how long leases were given for, and what
# was purged. It is written in the transaction that does it, so it holds what committed.
WITNESS = f"""
create schema witness;
create table witness.lease (
    job_id uuid, attempt integer, lease text, leased_at timestamptz,
    lease_expires_at timestamptz
);
create table witness.job (like {SCHEMA}.job);
create table witness.attempt (like {SCHEMA}.attempt);
create table witness.effect (job_id uuid, lease text);
create function witness.note_lease() returns trigger
language plpgsql security definer set search_path = witness, pg_temp as $$ begin
    insert into lease values (
        new.job_id, new.attempt, encode(new.lease_token_hash, 'hex'), new.leased_at,
        new.lease_expires_at
    );
    return null;
end $$;
create function witness.note_job() returns trigger
language plpgsql security definer set search_path = witness, pg_temp as $$ begin
    insert into job values (old.*);
    return null;
end $$;
create function witness.note_attempt() returns trigger
language plpgsql security definer set search_path = witness, pg_temp as $$ begin
    insert into attempt values (old.*);
    return null;
end $$;
create trigger witnessed after update on {SCHEMA}.live_job for each row
when (new.lease_token_hash is not null) execute function witness.note_lease();
create trigger witnessed after delete on {SCHEMA}.job for each row
execute function witness.note_job();
create trigger witnessed after delete on {SCHEMA}.attempt for each row
execute function witness.note_attempt();
create role {DUTY} login;
grant {SCHEMA}_operator to {DUTY};
alter role {PRODUCER} login;
alter role "{WORKER}" login;
grant usage on schema witness to "{WORKER}";
grant insert on witness.effect to "{WORKER}";
"""
TABLES = {
    "jobs": f"""
        select job_id, producer, idempotency_key, max_attempts, is_purged,
            payload->>'fate' as fate
        from (
            select *, false as is_purged from {SCHEMA}.job
            union all select *, true from witness.job
        ) as j
    """,
    "live": f"""
        select job_id, attempt, max_attempts, encode(lease_token_hash, 'hex') as lease
        from {SCHEMA}.live_job
    """,
    "attempts": f"""
        with purged as (select job_id from witness.job)
        select job_id, attempt, max_attempts, leased_at, ended_at, retry_at,
            outcome::text, failure_code, encode(lease_token_hash, 'hex') as lease
        from (
            select * from {SCHEMA}.attempt
            union all select * from witness.attempt natural join purged
        ) as a
    """,
    "leases": "select * from witness.lease",
    "effects": "select * from witness.effect",
    "acts": f"""
        select act, job_count, arguments->>'job_id' as job_id,
            (arguments->>'extra_attempts')::integer as extra_attempts,
            (arguments->>'before')::timestamptz as before
        from {SCHEMA}.operator_act
    """,
}


def found_instance(conninfo, **changes):
    """Make the database and the Instance, its document changed, with its witness."""
    with psycopg.connect(conninfo, autocommit=True) as session:
        session.execute(f"create database {DBNAME}")
    conninfo = make_conninfo(conninfo, dbname=DBNAME)
    setup(Configuration.from_json(json.dumps(DOCUMENT | changes)), conninfo)
    with psycopg.connect(conninfo, autocommit=True) as session:
        session.execute(WITNESS)


def evidence(conninfo, journal):
    """Read the tables as of one time: the load may go on."""
    with psycopg.connect(
        make_conninfo(conninfo, dbname=DBNAME), row_factory=dict_row
    ) as session:
        session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        tables = {name: session.execute(TABLES[name]).fetchall() for name in TABLES}
    for rows in tables.values():
        for row in rows:
            row["job_id"] = row["job_id"] and str(row["job_id"])
    return Evidence(journal=journal, **tables)


@contextmanager
def ground():
    """Yield a directory that a server's account can pass through, in memory if it fits.

    A server that is stopped at once loses no more there than on a disk.
    """
    memory = Path("/dev/shm")
    is_roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30
    directory = Path(
        tempfile.mkdtemp(prefix="lenso-jobs-chaos-", dir=memory if is_roomy else None)
    )
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


class Server:
    """A server whose cluster is kept, and whose address stays what it is."""

    def __init__(self, directory, settings=None):
        self.data = Path(directory) / "data"
        self._server = EmbeddedServer(directory, settings)
        self.start = self._server.__enter__
        self.end = self._server.__exit__

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.end()

    def conninfo(self, dbname=DBNAME, **parameters):
        return self._server.conninfo(dbname, **parameters)

    def connect(self, dbname=DBNAME, **parameters):
        """Open a superuser's session that may write even if the server is read only by default."""
        parameters.setdefault("options", "-c default_transaction_read_only=off")
        return psycopg.connect(self.conninfo(dbname, **parameters), autocommit=True)

    def crash(self):
        """Stop as ``pg_ctl stop -m immediate`` does."""
        pid = (self.data / "postmaster.pid").read_text().split()[0]
        os.kill(int(pid), signal.SIGQUIT)
        self.end()
