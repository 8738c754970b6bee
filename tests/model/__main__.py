"""A long run of random histories against the model, on a server of our own.

    python tests/model [--steps 10000] [--seed N] [--length 50]

The server is the one in LENSO_JOBS_SERVER_URL, else an embedded one (PG_BINDIR chooses
which). Prints the seed, the steps, how often each call ran and each outcome was seen; a
history that differs from the model is shrunk and printed instead, with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
import traceback
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from jobs_machine import POLICY, PRODUCERS, WORKERS, Bench, run
from lenso_jobs.config import Configuration
from lenso_jobs.embedded import server_conninfo
from lenso_jobs.operator import setup

HISTORIES = 40  # of one seed


def main():
    """Run until there are steps enough, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--length", type=int, default=50)
    options = parser.parse_args()

    number, started = options.seed, time.monotonic()
    with server_conninfo() as server, bench_on(server) as bench:
        while bench.steps.total() < options.steps:
            try:
                run(bench, HISTORIES, number, options.length)
            except AssertionError as error:
                traceback.print_exception(error, limit=-1)
                print(f"differs: --seed {number} --steps 1 --length {options.length}")
                return 1
            number += 1
    print(f"seed {options.seed}, {bench.steps.total()} steps of {options.length}")
    print(f"in {time.monotonic() - started:.0f} s; nothing differs from the model")
    for title, counts in (("ran", bench.steps), ("answered", bench.outcomes)):
        print(f"\n{title}:")
        for name, count in sorted(counts.items()):
            print(f"  {count:7}  {name}")
    return 0


@contextlib.contextmanager
def bench_on(server):
    """Yield a bench with a new Instance, in a database that is dropped."""
    mark = uuid4().hex[:8]
    name, prefix = f"lenso_jobs_model_{mark}", f"jobs_model_{mark}"
    roles = {role: f"{prefix}_as_{role}" for role in (*PRODUCERS, *WORKERS, "operator")}
    conninfo = make_conninfo(server, dbname=name)
    with psycopg.connect(server, autocommit=True) as session:
        session.execute(f"create database {name} template template0")
    try:
        document = {
            "schema": "jobs_email",
            "role_prefix": prefix,
            "database_url_secret": "jobs/database-url",
            "producer_instances": [roles[role] for role in PRODUCERS],
            "worker_instances": [roles[role] for role in WORKERS],
            "observer_instances": [roles["operator"]],
            **POLICY,
        }
        setup(Configuration.from_json(json.dumps(document)), conninfo)
        with psycopg.connect(conninfo, autocommit=True) as session:
            for role in roles.values():
                session.execute(f'alter role "{role}" login')
            session.execute(f'grant {prefix}_operator to "{roles["operator"]}"')
        bench = Bench(conninfo, roles)
        yield bench
        bench.close()
    finally:
        with psycopg.connect(server, autocommit=True) as session:
            session.execute(f"drop database {name} with (force)")
            groups = ("owner", "producer", "worker", "observer", "operator")
            for role in (*roles.values(), *(f"{prefix}_{g}" for g in groups)):
                session.execute(f'drop role if exists "{role}"')


if __name__ == "__main__":
    sys.exit(main())
