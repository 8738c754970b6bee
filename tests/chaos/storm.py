"""The load, and what is done to it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

import psycopg
from psycopg.conninfo import make_conninfo

import lenso_jobs
from journal import Journal
from load import FATES, LEASE_SECONDS, SCHEMA
from servers import DBNAME, DUTY, PRODUCER, WORKER

ROLES = ("producer", "producer", "loop", "worker", "async-worker", "loop")
LOAD = Path(__file__).with_name("load.py")
PATIENCE = 60.0
"""How long a process may take to end, and how long the last jobs may take."""


class Process:
    """A process of the load."""

    def __init__(self, settings):
        self.settings = settings
        self.is_killed = self.is_leaving = False
        self._errors = open(f"{settings['journal']}.err", "w+")  # noqa: PTH123, SIM115
        self._process = subprocess.Popen(
            [sys.executable, LOAD, json.dumps(settings)],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("PG")},
                "PYTHONPATH": str(Path(lenso_jobs.__file__).parents[1]),
            },
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        self.send = self._process.send_signal

    def kill(self):
        self.is_killed = True
        self._process.kill()

    def is_running(self):
        return self._process.poll() is None

    def end(self):
        """Wait until the process has ended after the order to stop; return its exit code."""
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = "no end"
        with self._errors:
            self._errors.seek(0)
            said = self._errors.read()
        return {
            "name": self.settings["name"],
            "code": code,
            "is_killed": self.is_killed,
            "said": said,
        }


class Load:
    """Producers and workers, each of which is followed by another when it ends."""

    def __init__(self, directory, seed, ways, fates):
        """Each process goes to the server by one of *ways*, parameters to connect."""
        self._directory = directory
        self._seed = seed
        self._ways = ways
        self._fates = fates
        self._journal = Journal(directory / "storm.journal")
        self._started = 0
        self.processes = []

    def start(self, role, pause=0.0):
        self._started += 1
        name = f"{role}-{self._started}"
        way = self._ways[self._started % len(self._ways)]
        user = PRODUCER if role == "producer" else WORKER
        self.processes.append(
            Process(
                {
                    "role": role,
                    "name": name,
                    "seed": self._seed,
                    "pause": pause,
                    "fates": self._fates,
                    "journal": str(self._directory / f"{name}.journal"),
                    "conninfo": make_conninfo(
                        **{**way, "user": user, "dbname": DBNAME}
                    ),
                }
            )
        )

    def await_start(self):
        """Wait until all have come so far as to open their journals."""
        deadline = time.monotonic() + PATIENCE
        for process in self.processes:
            while not Path(process.settings["journal"]).exists():
                assert process.is_running()
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def running(self, *, producers):
        return [
            process
            for process in self.processes
            if (process.settings["role"] == "producer") == producers
            and process.is_running()
            and not process.is_leaving
        ]

    def replace(self, process):
        """Start another of its kind, as one ends."""
        process.is_leaving = True
        self.start(process.settings["role"], process.settings["pause"])

    def note(self, what, **facts):
        self._journal.note(what, **facts)

    def stop(self, *, producers):
        """Let the producers, or the workers, end; notes how they did."""
        kind = [
            process
            for process in self.processes
            if (process.settings["role"] == "producer") == producers
        ]
        for process in kind:
            process.send(signal.SIGCONT)
            if not process.is_leaving:
                process.send(signal.SIGTERM)
        for process in kind:
            self.processes.remove(process)
            self.note("exited", **process.end())

    def end(self):
        """Kill every process that still runs."""
        for process in self.processes:
            process.kill()
            process.end()


@contextmanager
def loading(directory, seed, ways, *, roles=ROLES, pause=0.15, fates=FATES):
    """Yield a Load that runs."""
    load = Load(directory, seed, ways, fates)
    try:
        for role in roles:
            load.start(role, pause)
        load.await_start()
        yield load
    finally:
        load.end()


def drain(load, server):
    """End the producers, wait for the last job, end the workers."""
    load.stop(producers=True)
    deadline = time.monotonic() + PATIENCE
    with server.connect() as session:
        while session.execute(f"select count(*) from {SCHEMA}.live_job").fetchone()[0]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    load.stop(producers=False)


class Storm:
    """What may happen to a server and a load, one at a time."""

    def __init__(self, server, load, cutter, seed):
        self._server = server
        self.load = load
        self._cutter = cutter
        self._chance = random.Random(seed)
        self._cuts = []
        self.done = Counter()

    def blow(self, seconds, acts):
        """Do one of the acts, each so often as its weight says, until it is over."""
        until = time.monotonic() + seconds
        first = list(acts)
        while (left := until - time.monotonic()) > 0 or first:
            time.sleep(min(max(left, 0.1), self._chance.uniform(0.1, 0.6)))
            # Each at least once.
            act = (
                first.pop(0)
                if first
                else self._chance.choices([*acts], [*acts.values()])[0]
            )
            with suppress(psycopg.OperationalError):
                self.done[act] += getattr(self, act)()

    def answers_lost(self):
        return sum(cut.happened.is_set() for cut in self._cuts)

    def terminate_backends(self):
        with self._server.connect() as session:
            return session.execute(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity"
                " where datname = %s and pid <> pg_backend_pid()"
                " and hashtext(pid::text || %s) %% 2 = 0",
                (DBNAME, str(self._chance.random())),
            ).fetchone()[0]

    def crash_server(self):
        self._server.crash()
        time.sleep(self._chance.uniform(0, 0.5))
        self._server.start()
        return 1

    def kill_worker(self):
        return self._replace(producers=False, how=Process.kill)

    def kill_producer(self):
        return self._replace(producers=True, how=Process.kill)

    def terminate_worker(self):
        return self._replace(
            producers=False, how=lambda process: process.send(signal.SIGTERM)
        )

    def _replace(self, *, producers, how):
        running = self.load.running(producers=producers)
        if not running:
            return 0
        process = self._chance.choice(running)
        how(process)
        self.load.replace(process)
        return 1

    def pause_worker(self):
        """Let one sleep past the end of its leases."""
        running = self.load.running(producers=False)
        if not running:
            return 0
        process = self._chance.choice(running)
        process.send(signal.SIGSTOP)
        seconds = LEASE_SECONDS * self._chance.uniform(0.6, 1.2)
        Timer(seconds, process.send, [signal.SIGCONT]).start()
        return 1

    def lose_answers(self):
        """Lose answers to what is committed by itself, or to commits."""
        words = ("enqueue", "enqueue_many", "claim", "complete", "fail", "commit")
        self._cuts += [self._cutter.cut(f"{word}") for word in words]
        return 1

    def turn_read_only(self):
        with self._server.connect() as session:
            for value in ("on", "off"):
                session.execute(
                    f"alter system set default_transaction_read_only = {value}"
                )
                session.execute("select pg_reload_conf()")
                time.sleep(self._chance.uniform(0.2, 0.6))
        return 1

    def purge(self):
        """Purge what ended a while ago."""
        with self._server.connect(user=DUTY) as session:
            answer = session.execute(
                f"select {SCHEMA}.purge(clock_timestamp() - interval '3 s', 200)"
            ).fetchone()[0]
        self.load.note("acted", act="purge", answer=answer)
        return 1

    def redrive(self):
        """Queue some of the failed jobs again."""
        with self._server.connect() as session:
            failed = session.execute(
                f"select job_id from {SCHEMA}.attempt where outcome = 'failed'"
                " order by random() limit 5"
            ).fetchall()
        with self._server.connect(user=DUTY) as session:
            for row in failed:
                with suppress(psycopg.errors.RaiseException, psycopg.DatabaseError):
                    session.execute(f"select {SCHEMA}.redrive(%s)", row)
        return 1

    def retire_expired(self):
        with self._server.connect(user=DUTY) as session:
            session.execute(f"select {SCHEMA}.retire_expired()")
        return 1


ACTS = {
    "lose_answers": 5,
    "kill_worker": 4,
    "pause_worker": 3,
    "terminate_backends": 4,
    "crash_server": 2,
    "kill_producer": 2,
    "terminate_worker": 1,
    "turn_read_only": 1,
    "purge": 3,
    "redrive": 3,
    "retire_expired": 2,
}
