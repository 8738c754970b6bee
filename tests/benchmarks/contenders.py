"""What is measured: two plain tables in raw SQL, and this project by its client."""

from __future__ import annotations

import json
import threading
from math import inf
from queue import Queue
from uuid import uuid4

from lenso_jobs import Jobs

PAYLOAD = {"to": "someone@example.com", "template": "welcome", "n": 1}
TEXT = json.dumps(PAYLOAD)

CLAIM = """
update {table} set state = 'running', lease_until = now() + interval '30 s'
where id in (
    select id from {table}
    where queue = 'email' and state = 'ready' and run_at <= now()
    order by run_at, id limit {limit} for update skip locked
)
returning id, payload
"""


class Floor:
    """A plain table: no key, no evidence, no fence, no roles."""

    table = "floor_job"
    batch = 100
    text = TEXT

    def __init__(self, session, second=None):  # noqa: ARG002 - as the others are opened
        self.cursor = session.cursor()
        self.claim_one = CLAIM.format(table=self.table, limit=1)

    def carry(self, payload):
        """Enqueue with this payload from now on."""
        self.text = json.dumps(payload)

    def enqueue(self):
        """Insert a row."""
        self.cursor.execute(
            "insert into floor_job (queue, payload) values ('email', %s) returning id",
            (self.text,),
        ).fetchone()

    def claim(self):
        """Update the first row that is ready and return what complete takes."""
        return self.cursor.execute(self.claim_one).fetchone()

    def complete(self, job):
        """Update the row again."""
        self.cursor.execute(
            "update floor_job set state = 'done' where id = %s", (job[0],)
        )

    def bulk(self, count):
        """COPY rows in, which returns no ids."""
        with self.cursor.copy("copy floor_job (queue, payload) from stdin") as copy:
            for _ in range(count):
                copy.write_row(("email", TEXT))

    def drain(self, most=inf):
        """Claim and complete batches until none is left, or so many are done."""
        statement, done = CLAIM.format(table=self.table, limit=self.batch), 0
        while done < most and (jobs := self.cursor.execute(statement).fetchall()):
            self.complete_many([job[0] for job in jobs])
            done += len(jobs)

    def complete_many(self, ids):
        """Update the rows again."""
        self.cursor.execute(
            "update floor_job set state = 'done' where id = any (%s)", (ids,)
        )


class Kept(Floor):
    """A plain table with a unique key, and a row of evidence at the end."""

    table = "kept_job"

    def enqueue(self):
        """Insert a row under a key."""
        self.cursor.execute(
            "insert into kept_job (queue, payload, key) values ('email', %s, %s)"
            " on conflict (key) do nothing returning id",
            (self.text, str(uuid4())),
        ).fetchone()

    def complete(self, job):
        """Update the row again and insert its evidence."""
        self.cursor.execute(
            "with ended as (update kept_job set state = 'done'"
            " where id = %s returning id)"
            " insert into kept_attempt select id, 1, now(), 'succeeded' from ended",
            (job[0],),
        )

    def bulk(self, count):
        """Insert rows from arrays, under keys."""
        for first in range(0, count, 1000):
            size = min(1000, count - first)
            self.cursor.execute(
                "insert into kept_job (queue, payload, key)"
                " select 'email', %s, k from unnest(%b::text[]) as k"
                " on conflict (key) do nothing",
                (TEXT, [str(uuid4()) for _ in range(size)]),
            )

    def complete_many(self, ids):
        """Update the rows again and insert their evidence."""
        self.cursor.execute(
            "with ended as (update kept_job set state = 'done'"
            " where id = any (%s) returning id)"
            " insert into kept_attempt select id, 1, now(), 'succeeded' from ended",
            (ids,),
        )


class LensoJobs:
    """This project, through its own client."""

    batch = 500
    payload = PAYLOAD

    def __init__(self, session, second=None, schema="jobs_bench", caller=None):
        self.jobs = Jobs(session, schema, caller)
        self.second = second and Jobs(second, schema)

    def carry(self, payload):
        """Enqueue with this payload from now on."""
        self.payload = payload

    def enqueue(self):
        """Enqueue one job under a key that no other job has."""
        return self.jobs.enqueue(
            "email", "send", self.payload, idempotency_key=str(uuid4())
        )

    def claim(self):
        """Lease one job."""
        (lease,) = self.jobs.claim("email")
        return lease

    def complete(self, lease):
        """Complete it."""
        self.jobs.complete(lease)

    def bulk(self, count):
        """Enqueue by the thousand."""
        for first in range(0, count, 1000):
            self.jobs.enqueue_many(
                [
                    {
                        "queue": "email",
                        "kind": "send",
                        "payload": PAYLOAD,
                        "idempotency_key": str(uuid4()),
                    }
                    for _ in range(min(1000, count - first))
                ]
            )

    def drain(self, most=inf):
        """Claim on one connection and complete on the other, as above."""
        batches = Queue(4)
        worker = threading.Thread(target=self._complete_all, args=(batches,))
        worker.start()
        done = 0
        while done < most and (leases := self.jobs.claim("email", self.batch)):
            batches.put(leases)
            done += len(leases)
        batches.put(None)
        worker.join()

    def _complete_all(self, batches):
        while (leases := batches.get()) is not None:
            self.second.complete_many(leases)
