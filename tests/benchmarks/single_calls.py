"""Single calls beside a raw-SQL floor, in turn in the same round, as ratios.

    python tests/benchmarks/single_calls.py [--rounds 9] [--calls 1000] [--json FILE]

The floor is a plain six-column table with a jsonb payload: insert; update ... skip
locked; update by id. It keeps no key, no evidence and no fence. The second line pays
for what it can in plain SQL: a unique key, and an evidence row as the job ends.

Every call is a transaction of its own with fsync and synchronous_commit on. The server is
the one in LENSO_JOBS_SERVER_URL, else one of our own on disk (PG_BINDIR chooses which).
Absolute rates mean little on a shared machine; the ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from lenso_jobs.config import Configuration
from lenso_jobs.embedded import SERVER_URL, EmbeddedServer
from lenso_jobs.operator import setup

PAYLOAD = json.dumps({"to": "someone@example.com", "template": "welcome", "n": 1})

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
"""

CLAIM = """
update {0} set state = 'running', lease_until = now() + interval '30 s'
where id = (
    select id from {0}
    where queue = 'email' and state = 'ready' and run_at <= now()
    order by run_at, id limit 1 for update skip locked
)
returning id, payload
"""


def floor(cursor):
    """A plain table."""

    def enqueue():
        cursor.execute(
            "insert into floor_job (queue, payload) values ('email', %s) returning id",
            (PAYLOAD,),
        ).fetchone()

    def cycle():
        enqueue()
        job = cursor.execute(CLAIM.format("floor_job")).fetchone()
        cursor.execute("update floor_job set state = 'done' where id = %s", job[:1])

    return enqueue, cycle


def kept(cursor):
    """A plain table with a unique key, and a row of evidence at the end."""

    def enqueue():
        cursor.execute(
            "insert into kept_job (queue, payload, key) values ('email', %s, %s)"
            " on conflict (key) do nothing returning id",
            (PAYLOAD, str(uuid4())),
        ).fetchone()

    def cycle():
        enqueue()
        job = cursor.execute(CLAIM.format("kept_job")).fetchone()
        cursor.execute(
            "with ended as (update kept_job set state = 'done' where id = %s returning id)"
            " insert into kept_attempt select id, 1, now(), 'succeeded' from ended",
            job[:1],
        )

    return enqueue, cycle


def lenso_jobs(cursor):
    """This project, through its SQL."""

    def enqueue():
        cursor.execute(
            "select * from jobs_bench.enqueue('email', 'send', %s, %s)",
            (PAYLOAD, str(uuid4())),
        ).fetchone()

    def cycle():
        enqueue()
        job = cursor.execute("select * from jobs_bench.claim('email')").fetchone()
        cursor.execute(
            "select jobs_bench.complete(%s, %s)", (job[0], job[6])
        ).fetchone()

    return enqueue, cycle


CONTENDERS = (floor, kept, lenso_jobs)


def rate(call, times):
    """Calls a second, after a few that are not counted."""
    for _ in range(10):
        call()
    started = time.perf_counter()
    for _ in range(times):
        call()
    return times / (time.perf_counter() - started)


def measure(conninfo, rounds, calls):
    """Rates of every contender in every round: {measure: {contender: [rate, ...]}}."""
    rates = {m: {c.__name__: [] for c in CONTENDERS} for m in ("enqueue", "cycle")}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for _ in range(rounds):
            connection.execute(
                "truncate floor_job, kept_job, kept_attempt,"
                " jobs_bench.job, jobs_bench.live_job, jobs_bench.attempt"
            )
            # The order is drawn anew: whoever runs behind another finds colder caches.
            for which, times in (("enqueue", calls), ("cycle", calls // 2)):
                for contender in random.sample(CONTENDERS, len(CONTENDERS)):
                    with (
                        psycopg.connect(
                            conninfo, autocommit=True, options="-c role=bench"
                        ) as session,
                        session.cursor() as cursor,
                    ):
                        enqueue, cycle = contender(cursor)
                        call = enqueue if which == "enqueue" else cycle
                        if which == "cycle":
                            connection.execute(
                                "truncate floor_job, kept_job, jobs_bench.live_job"
                            )
                        rates[which][contender.__name__].append(rate(call, times))
    return rates


def summarize(rates):
    """Median rate, and median of the ratios to the floor of the same round."""
    return {
        which: {
            name: {
                "per_second": round(statistics.median(values)),
                "of_floor": round(
                    statistics.median(
                        value / base
                        for value, base in zip(values, of["floor"], strict=True)
                    ),
                    3,
                ),
            }
            for name, values in of.items()
        }
        for which, of in rates.items()
    }


@contextlib.contextmanager
def database():
    """An Instance jobs_bench and the plain tables, in a database that is dropped."""
    with contextlib.ExitStack() as stack:
        server = os.environ.get(SERVER_URL)
        if not server:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            directory.chmod(0o755)
            settings = {"shared_buffers": "1GB", "max_wal_size": "4GB"}
            server = stack.enter_context(
                EmbeddedServer(directory / "cluster", settings)
            ).conninfo()
        name = f"lenso_jobs_bench_{uuid4().hex[:8]}"
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f"create database {name} template template0")
            stack.callback(drop, server, name)
        conninfo = make_conninfo(server, dbname=name)
        document = {
            "schema": "jobs_bench",
            "database_url_secret": "jobs/database-url",
            "lease_seconds": 30,
            "retry_base_seconds": 5,
            "retry_max_seconds": 300,
            "queues": ["email"],
            "producer_instances": ["bench"],
            "worker_instances": ["bench"],
        }
        setup(Configuration.from_json(json.dumps(document)), conninfo)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(TABLES)
            connection.execute("grant all on all tables in schema public to bench")
        yield conninfo


def drop(server, name):
    """Drop the database and the roles that the Instance made."""
    kinds = ("owner", "producer", "worker", "observer", "operator")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)")
        for role in ("bench", *(f"jobs_bench_{kind}" for kind in kinds)):
            connection.execute(f"drop role if exists {role}")


def main():
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with database() as conninfo:
        with psycopg.connect(conninfo) as connection:
            version = connection.execute("show server_version").fetchone()[0]
        summary = summarize(measure(conninfo, options.rounds, options.calls))
    print(f"PostgreSQL {version}, {options.rounds} rounds of {options.calls} calls\n")
    print("| measure | contender | calls/s | of the floor |\n|---|---|---:|---:|")
    for which, of in summary.items():
        for name, figures in of.items():
            print(
                f"| {which} | {name} | {figures['per_second']} | {figures['of_floor']:.2f} |"
            )
    if options.json:
        options.json.write_text(json.dumps({"server": version, **summary}, indent=2))


if __name__ == "__main__":
    main()
