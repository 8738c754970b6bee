"""A process of the load: a producer, or a worker of one of three kinds.

Told what to do by a JSON object as its argument; ends when terminated. Everything goes
to its journal: what is going to be asked, and what was answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
import sys
import time
from contextlib import contextmanager
from itertools import count

import psycopg
from psycopg.rows import dict_row

from journal import Journal
from lenso_jobs import Jobs
from lenso_jobs.worker import AsyncWorker, Fail, Observer, Retry, Worker

SCHEMA = "jobs_chaos"
QUEUE = "email"
LEASE_SECONDS = 2
# Dawdling is longer than a lease; giving up is to forget the job; an effect is written
# in the transaction that completes the job.
FATES = {
    "complete": 60,
    "retry": 7,
    "fail": 6,
    "crash": 5,
    "dawdle": 2,
    "give up": 2,
    "effect": 15,
}
EFFECT = "insert into witness.effect (job_id, lease) values (%s, %s)"


class Producer:
    """Enqueues, and asks again with the same keys until it is answered."""

    def __init__(self, settings, journal):
        self._settings = settings
        self._journal = journal
        self._is_stopped = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_):
        self._is_stopped = True

    def run(self):
        batches = self._batches()
        batch = next(batches)
        while not self._is_stopped:
            with weathered(), connect(self._settings) as connection:
                jobs = Jobs(connection, SCHEMA)
                while not self._is_stopped:
                    self._enqueue(jobs, batch)
                    # Now and then what was answered is asked once more.
                    if random.random() < 0.1:
                        self._enqueue(jobs, batch)
                    batch = next(batches)
                    time.sleep(self._settings["pause"])

    def _batches(self):
        name, shared = self._settings["name"], count()
        for number in count():
            size = random.choice((1, 1, 5, 20))
            keys = [f"{name}-{number}-{n}" for n in range(size)]
            # Every producer asks for these, at about the same time.
            if random.random() < 0.3:
                keys[-1] = f"{self._settings['seed']}-{next(shared)}"
            self._journal.note("intends", keys=keys)
            yield [intent(key, self._settings["fates"]) for key in keys]

    def _enqueue(self, jobs, batch):
        keys = [item["idempotency_key"] for item in batch]
        if len(batch) == 1:
            job = jobs.enqueue(**batch[0])
            outcome = "created" if job.created else "existing"
            answers = [(keys[0], job.job_id, outcome)]
        else:
            answers = [
                (key, item.job_id, item.outcome)
                for key, item in zip(keys, jobs.enqueue_many(batch), strict=True)
            ]
        self._journal.note(
            "acknowledged",
            items=[
                {"key": key, "job_id": job_id and str(job_id), "outcome": outcome}
                for key, job_id, outcome in answers
            ],
        )


def intent(key, fates):
    """What is always asked for under a key."""
    chance = random.Random(key)
    (fate,) = chance.choices([*fates], [*fates.values()])
    return {
        "queue": QUEUE,
        "kind": "send",
        "payload": {"fate": fate},
        "idempotency_key": key,
        "max_attempts": chance.choice((3, 4, 20)),
    }


@contextmanager
def weathered():
    """Let an outage end the block, after a moment; a refusal goes on."""
    try:
        yield
    except psycopg.Error as error:
        if not is_weather(error):
            raise
        time.sleep(0.1)


def connect(settings):
    return psycopg.connect(settings["conninfo"], autocommit=True, connect_timeout=5)


def is_weather(error):
    """Whether it is an outage and not a refusal; as README's Errors has it."""
    passing = ("40", "08", "57", "53", "25006", "55P03")
    return error.sqlstate is None or error.sqlstate.startswith(passing)


def name_of(token):
    """What a lease is called in journals and tables."""
    return hashlib.sha256(token.encode()).hexdigest()


class Noting(Observer):
    """Keeps the journal of a worker."""

    def __init__(self, journal):
        self._journal = journal

    def running(self, lease):
        self._journal.note(
            "claimed", **facts(lease), until=lease.lease_expires_at.isoformat()
        )
        return super().running(lease)

    def ended(self, ended):
        call, answer = {
            "succeeded": ("complete", "completed"),
            "retried": ("fail", "queued"),
            "failed": ("fail", "failed"),
            "handed_back": ("fail", "handed_back"),
            "released": ("release", "released"),
            "lost": ("end", "lost"),
        }[ended.outcome]
        self._journal.note(
            "answered", **facts(ended.lease), call=call, answer=answer, code=ended.code
        )


def facts(lease):
    return {
        "lease": name_of(lease.lease_token),
        "job_id": str(lease.job_id),
        "attempt": lease.attempt,
    }


def decide(lease):
    """Choose what becomes of a job; return how long to work on it."""
    fate = lease.payload["fate"]
    if fate == "retry" and lease.attempt == 1:
        raise Retry("again")
    if fate == "fail":
        raise Fail("never")
    if fate == "crash" and lease.attempt == 1:
        raise ValueError("out of the blue")
    if fate in {"dawdle", "give up"}:
        return LEASE_SECONDS * random.uniform(0.5, 1.5)
    return random.choice((0, 0, 0.01, 0.05))


def run_worker(settings, journal):
    def handle(lease):
        until = time.monotonic() + decide(lease)
        while time.monotonic() < until and not lease.lost:
            time.sleep(0.02)
        if lease.payload["fate"] == "effect":
            with psycopg.connect(settings["conninfo"], connect_timeout=5) as connection:
                connection.execute(EFFECT, (lease.job_id, name_of(lease.lease_token)))
                lease.complete(connection)

    worker = Worker(settings["conninfo"], handler=handle, **options(journal))
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    return worker.run()


def run_async_worker(settings, journal):
    async def handle(lease):
        if random.random() < 0.01:
            time.sleep(LEASE_SECONDS / 2)  # noqa: ASYNC251 - a bad handler
        await asyncio.sleep(decide(lease))
        if lease.payload["fate"] == "effect":
            async with await psycopg.AsyncConnection.connect(
                settings["conninfo"], connect_timeout=5
            ) as connection:
                await connection.execute(
                    EFFECT, (lease.job_id, name_of(lease.lease_token))
                )
                await lease.complete(connection)

    worker = AsyncWorker(settings["conninfo"], handler=handle, **options(journal))
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    return asyncio.run(worker.run())


def options(journal):
    return {
        "schema": SCHEMA,
        "queue": QUEUE,
        "concurrency": 16,
        "batch": random.choice((16, 50, 200)),
        "grace": 1,
        "observers": [Noting(journal)],
    }


class Loop:
    """A worker in plain SQL, which knows of its leases only what the server returned."""

    def __init__(self, settings, journal):
        self._settings = settings
        self._journal = journal
        self._is_stopped = False
        self._unanswered = None
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_):
        self._is_stopped = True

    def run(self):
        reports = []
        while not self._is_stopped:
            with weathered(), connect(self._settings) as connection:
                connection.row_factory = dict_row
                while not self._is_stopped:
                    # What was not answered is asked again. A transaction with an effect
                    # is not, unless it is known that it has not happened.
                    if reports and reports[0] == self._unanswered:
                        call, lease, _ = reports[0]
                        if call == "effect" and not self._renew(connection, lease):
                            reports.pop(0)
                    while reports:
                        self._unanswered = reports[0]
                        self._report(connection, *reports[0])
                        reports.pop(0)
                    reports = self._work(connection)
                    if not reports:
                        time.sleep(0.05)

    def _work(self, connection):
        """Claim and work and return what there is to report."""
        leases = connection.execute(
            f"select * from {SCHEMA}.claim(%s, %s)", (QUEUE, random.choice((1, 1, 5)))
        ).fetchall()
        reports = []
        for lease in leases:
            lease["lease"] = name_of(lease["lease_token"])
            self._note("claimed", lease, until=lease["lease_expires_at"].isoformat())
        for lease in leases:
            fate = lease["payload"]["fate"]
            if fate in {"dawdle", "give up"}:
                time.sleep(LEASE_SECONDS * random.uniform(0.3, 1.6))
            if fate == "dawdle" and random.random() < 0.5:
                self._renew(connection, lease)
            if fate == "give up" and random.random() < 0.5:
                continue
            if fate in {"retry", "crash"} and lease["attempt"] == 1:
                reports.append(("fail", lease, ("again", True)))
            elif fate == "fail":
                reports.append(("fail", lease, ("never", False)))
            else:
                call = "effect" if fate == "effect" else "complete"
                reports.append((call, lease, ()))
        return reports

    def _renew(self, connection, lease):
        """Return whether the lease is live."""
        call = f"select {SCHEMA}.renew(%s, %s) as until"
        try:
            row = connection.execute(call, self._named(lease)).fetchone()
        except psycopg.Error as error:
            if error.sqlstate != "LJ004":
                raise
            return False
        self._note("renewed", lease, until=row["until"].isoformat())
        return True

    def _report(self, connection, call, lease, arguments):
        marks = ", ".join(["%s"] * (2 + len(arguments)))
        verb = "fail" if call == "fail" else "complete"
        parameters = (*self._named(lease), *arguments)
        self._note("asks", lease, call=verb)
        code = arguments[0] if arguments else None
        available_at = None
        try:
            with connection.transaction():
                if call == "effect":
                    connection.execute(EFFECT, (lease["job_id"], lease["lease"]))
                row = connection.execute(
                    f"select * from {SCHEMA}.{verb}({marks})", parameters
                ).fetchone()
        except psycopg.Error as error:
            if is_weather(error):
                raise
            answer = "invalid_lease" if error.sqlstate == "LJ004" else error.sqlstate
        else:
            if call == "fail":
                answer, available_at = row["status"], row["available_at"]
            else:
                answer = "completed" if row["complete"] else "nothing"
        self._note(
            "answered",
            lease,
            call=verb,
            answer=answer,
            code=code,
            available_at=available_at and available_at.isoformat(),
        )

    @staticmethod
    def _named(lease):
        return lease["job_id"], lease["lease_token"]

    def _note(self, what, lease, **more):
        named = {name: lease[name] for name in ("lease", "job_id", "attempt")}
        self._journal.note(what, **named, **more)


def main():
    settings = json.loads(sys.argv[1])
    random.seed(f"{settings['seed']} {settings['name']}")
    journal = Journal(settings["journal"])
    role = settings["role"]
    if role == "producer":
        Producer(settings, journal).run()
    elif role == "loop":
        Loop(settings, journal).run()
    else:
        run = run_worker if role == "worker" else run_async_worker
        tally = run(settings, journal)
        sys.exit(0 if tally.is_clean else 3)


if __name__ == "__main__":
    main()
