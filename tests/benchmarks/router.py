"""Enqueues through the router of a fleet, beside enqueues directly on its shards.

    PG_BINDIR=/usr/lib/postgresql/15/bin python tests/benchmarks/router.py [--out DIR]

Two shards and the router are three servers on this machine, of a PostgreSQL that has
PL/Proxy, connected by TCP. A direct producer chooses the shard by ``shard_of``, with a
connection to each. Takes about three minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from capacity import spent
from contenders import PAYLOAD
from lenso_jobs import Fleet, Jobs, shard_of
from lenso_jobs.embedded import EmbeddedServer
from lenso_jobs.operator import setup_fleet
from stage import INSTANCE, SETTINGS, describe, save

SHARDS, SCHEMA, DATABASE = 2, "jobs_bench", "fleet"
BATCH = 1000
DOCUMENT = {
    "instance": INSTANCE | {"schema": SCHEMA, "database_url_secret": "router"},
    "shards": [f"{number}" for number in range(SHARDS)],
}
USED = 0.6  # of the processors, as in the table of one server
CORES, SIZES = 8, (2, 8, 32)
BY_LOG = 55_000  # jobs a second of one server whose log grows by 100 MB/s


@dataclass
class Site:
    """A fleet on this machine; ``urls`` are those of the router and of the shards."""

    urls: dict[str, str]

    def connect(self, url="router", user=None):
        """Open a session in autocommit, as the superuser or as a role."""
        given = {"user": user} if user else {}
        return psycopg.connect(make_conninfo(self.urls[url], **given), autocommit=True)


@contextlib.contextmanager
def site():
    """Yield a fleet on three new servers."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.chmod(0o755)
        urls = {}
        for name in ("router", *DOCUMENT["shards"]):
            settings = SETTINGS | {
                "listen_addresses": "127.0.0.1",
                "shared_buffers": "128MB",
            }
            server = EmbeddedServer(directory / name, settings)
            with socket.create_server(("127.0.0.1", 0)) as free:
                server.port = free.getsockname()[1]
            stack.enter_context(server)
            with psycopg.connect(server.conninfo(), autocommit=True) as session:
                session.execute("create role bench login")
                session.execute(f"create database {DATABASE}")
            urls[name] = server.conninfo(DATABASE, host="127.0.0.1")
        setup_fleet(Fleet.from_json(json.dumps(DOCUMENT)), urls.__getitem__)
        yield Site(urls)


class Routed:
    """A producer that connects to the router."""

    def __init__(self, it):
        self.jobs = Jobs(it.connect(user="bench"), SCHEMA)

    def of(self, key):
        """Return the client for a key."""
        del key
        return self.jobs

    def enqueue(self):
        """Enqueue one job."""
        key = str(uuid4())
        self.of(key).enqueue("email", "send", PAYLOAD, idempotency_key=key)

    def enqueue_many(self):
        """Enqueue a thousand jobs."""
        parts = {}
        for _ in range(BATCH):
            key = str(uuid4())
            job = {"queue": "email", "kind": "send", "payload": PAYLOAD}
            part = parts.setdefault(self.of(key), [])
            part.append(job | {"idempotency_key": key})
        for jobs, part in parts.items():
            jobs.enqueue_many(part)


class Direct(Routed):
    """A producer that connects to each shard, and chooses it by the key."""

    def __init__(self, it):
        self.shards = [
            Jobs(it.connect(each, "bench"), SCHEMA) for each in DOCUMENT["shards"]
        ]

    def of(self, key):
        """Return the client for a key."""
        return self.shards[shard_of(key, SHARDS)]


WAYS = {"direct": Direct, "router": Routed}


def in_turns(it, verb, blocks, size):
    """Calls a second of one producer each way, and their ratio block by block."""
    acts = {name: getattr(kind(it), verb) for name, kind in WAYS.items()}
    rates = {name: [] for name in acts}
    for block in range(blocks + 1):
        for name in random.sample(list(acts), len(acts)):
            started = time.perf_counter()
            for _ in range(size):
                acts[name]()
            if block:  # the first one warms up
                rates[name].append(size / (time.perf_counter() - started))
    return summary(rates, BATCH if verb == "enqueue_many" else 1)


def summary(rates, jobs=1):
    """Return the median rates in jobs a second, and the ratios of the blocks."""
    ratios = [r / d for r, d in zip(rates["router"], rates["direct"], strict=True)]
    return {
        "direct_jobs_s": round(statistics.median(rates["direct"]) * jobs),
        "router_jobs_s": round(statistics.median(rates["router"]) * jobs),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def _produce(it, name, starts, counts, seconds):
    producer = WAYS[name](it)
    for _ in range(20):
        producer.enqueue()
    while starts.wait() is not None:
        done, until = 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            producer.enqueue()
            done += 1
        counts.put(done)


def at_once(it, producers, blocks, seconds):
    """Jobs a second of several producers, each in a process and with one job a call."""
    context = multiprocessing.get_context("fork")
    teams = {}
    for name in WAYS:
        starts, counts = context.Barrier(producers + 1), context.Queue()
        team = [
            context.Process(
                target=_produce, args=(it, name, starts, counts, seconds), daemon=True
            )
            for _ in range(producers)
        ]
        for process in team:
            process.start()
        teams[name] = starts, counts, team
    rates = {name: [] for name in WAYS}
    for _ in range(blocks):
        for name in random.sample(list(WAYS), len(WAYS)):
            starts, counts, _ = teams[name]
            starts.wait()
            done = sum(counts.get() for _ in range(producers))
            rates[name].append(done / seconds)
    for _, _, team in teams.values():
        for process in team:
            process.terminate()
            process.join()
    return summary(rates)


def processors(it, rounds, count):
    """Microseconds of processor time that a job takes of each server, by verb."""
    with contextlib.ExitStack() as stack:
        watchers = {each: stack.enter_context(it.connect(each)) for each in it.urls}

        def spent_by_now():
            return {
                each: sum(
                    spent(pid)
                    for (pid,) in watcher.execute(
                        "select pid from pg_stat_activity where usename = 'bench'"
                    ).fetchall()
                )
                for each, watcher in watchers.items()
            }

        def measured(act, jobs):
            act()  # connects, plans
            before, done = spent_by_now(), 0
            while done < count:
                act()
                done += jobs
            after = spent_by_now()
            cost = {each: (after[each] - before[each]) / done for each in it.urls}
            return cost.pop("router"), sum(cost.values())

        worker = Jobs(it.connect("0", "bench"), SCHEMA)

        def one():
            (lease,) = worker.claim("email")
            worker.complete(lease)

        def many():
            worker.complete_many(worker.claim("email", 500))

        producers = {name: kind(it) for name, kind in WAYS.items()}
        acts = {
            **{f"enqueue, {name}": (p.enqueue, 1) for name, p in producers.items()},
            **{
                f"enqueue_many, {name}": (p.enqueue_many, BATCH)
                for name, p in producers.items()
            },
            # What a shard has to do with a job after that.
            "claim + complete": (one, 1),
            "claim(500) + complete_many": (many, 500),
        }
        costs = {name: [] for name in acts}
        for _ in range(rounds):
            for name, (act, jobs) in acts.items():
                costs[name].append(measured(act, jobs))
    # The least of the rounds: the machine has other work, which costs caches.
    return {
        name: {
            server: round(min(each), 1)
            for server, each in zip(
                ("router_us", "shard_us"), zip(*rows, strict=True), strict=True
            )
        }
        for name, rows in costs.items()
    }


def carried(costs):
    """Calculate what fleets of several sizes carry, and where the router is the limit."""
    answer = {}
    for name, enqueue, rest in (
        ("one at a time", "enqueue, router", "claim + complete"),
        ("in batches", "enqueue_many, router", "claim(500) + complete_many"),
    ):
        shard_us = costs[enqueue]["shard_us"] + costs[rest]["shard_us"]
        shard = min(CORES * USED * 1e6 / shard_us, BY_LOG)
        router = CORES * USED * 1e6 / costs[enqueue]["router_us"]
        answer[name] = {
            "router_us": costs[enqueue]["router_us"],
            "shard_us": round(shard_us, 1),
            "shard_jobs_s": round(shard),
            "router_jobs_s": round(router),
            "shards_that_one_router_feeds": round(router / shard, 1),
            "fleet_jobs_s": {n: round(n * shard) for n in SIZES},
            "routers": {n: math.ceil(n * shard / router) for n in SIZES},
        }
    return answer


def main():
    """Measure, calculate and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    options = parser.parse_args()
    scale = options.scale
    with site() as it:
        answer = {
            "machine": describe(it),
            "enqueue": in_turns(it, "enqueue", 40, max(1, int(100 * scale))),
            "enqueue_many": in_turns(it, "enqueue_many", 10, max(1, int(4 * scale))),
            "four_producers": at_once(it, 4, 10, 1.0 * scale),
            "processor": processors(it, max(1, int(20 * scale)), 500),
        }
        answer["cores_of_a_server"] = CORES
        answer["carried"] = carried(answer["processor"])
    print(save(answer, options.out, "router"))


if __name__ == "__main__":
    main()
