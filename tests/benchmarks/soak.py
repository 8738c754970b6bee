"""Mixed load for minutes, with retries and lost leases: does the hot table stay small?

    python tests/benchmarks/soak.py [--minutes 10] [--out DIR]

Producers enqueue in bursts, workers claim, complete, fail with or without a retry, and
lose a lease now and then. The sizes are recorded every ten seconds. Exits with 1 if a
job was lost, or if the hot table or its indexes have doubled since a quarter of the
time.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from contenders import PAYLOAD
from lenso_jobs import Jobs
from stage import describe, save, serving, stage

SCHEMA = "jobs_soak"
SIZES = """
select
    pg_relation_size('live_job') as table_bytes,
    pg_indexes_size('live_job') as index_bytes,
    (select count(*) from live_job) as live,
    (select count(*) from attempt) as attempts,
    s.n_dead_tup as dead, s.n_tup_upd as updates, s.n_tup_hot_upd as hot_updates,
    s.autovacuum_count as vacuums
from pg_stat_user_tables as s
where s.relid = 'live_job'::regclass
"""


class Load:
    """The threads, and what they have done."""

    def __init__(self, it):
        self.it = it
        self.stop = threading.Event()
        self.drained = threading.Event()
        self.done = Counter()

    def produce(self, name):
        """Bursts of jobs; a pause while the queue is long."""
        with self.it.worker() as session, self.it.connect() as watcher:
            jobs, made = Jobs(session, SCHEMA), 0
            while not self.stop.is_set():
                size = random.choice((1, 10, 100, 300))
                jobs.enqueue_many(
                    {
                        "queue": "email",
                        "kind": "send",
                        "payload": PAYLOAD,
                        "idempotency_key": f"{name}-{made + n}",
                        "max_attempts": 3,
                    }
                    for n in range(size)
                )
                made += size
                self.done["enqueued"] += size
                (queued,) = watcher.execute(
                    f"select count(*) from {SCHEMA}.live_job"
                ).fetchone()
                self.stop.wait(0.02 if queued < 3000 else 0.5)

    def work(self):
        """Batches of jobs with every fate."""
        with self.it.worker() as session:
            jobs = Jobs(session, SCHEMA)
            while not self.drained.is_set():
                leases = jobs.claim("email", random.choice((1, 5, 50)), wait=0.2)
                fates = random.choices(
                    ("complete", "retry", "fail", "lose"), (85, 8, 3, 4), k=len(leases)
                )
                by_fate = {fate: [] for fate in fates}
                for fate, lease in zip(fates, leases, strict=True):
                    by_fate[fate].append(lease)
                if good := by_fate.get("complete"):
                    jobs.complete_many(good)
                bad = [
                    (lease, "soak.failed", fate == "retry")
                    for fate in ("retry", "fail")
                    for lease in by_fate.get(fate, ())
                ]
                if bad:
                    jobs.fail_many(bad)
                self.done.update(fates)


def soak(it, seconds):
    """Run the load and return the samples."""
    it.instance(SCHEMA, lease_seconds=2)
    load = Load(it)
    producers = [
        threading.Thread(target=load.produce, args=(name,)) for name in ("a", "b")
    ]
    workers = [threading.Thread(target=load.work) for _ in range(3)]
    samples, started = [], time.monotonic()
    with it.connect(options=f"-c search_path={SCHEMA}") as session:
        for thread in producers + workers:
            thread.start()
        while (now := time.monotonic() - started) < seconds:
            row = session.execute(SIZES)
            names = [column.name for column in row.description]
            samples.append(
                {"seconds": round(now)} | dict(zip(names, row.fetchone(), strict=True))
            )
            print(samples[-1], flush=True)
            time.sleep(min(10, seconds / 20))
        load.stop.set()
        for thread in producers:
            thread.join()
        while session.execute("select exists (select from live_job)").fetchone()[0]:
            time.sleep(0.2)
        load.drained.set()
        for thread in workers:
            thread.join()
        ended = session.execute(
            "select count(distinct job_id) from attempt as a"
            " where outcome in ('succeeded', 'failed')"
            " or failure_code = 'attempts_exhausted'"
        ).fetchone()[0]
    return samples, dict(load.done), ended


def main():
    """Soak, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    options = parser.parse_args()
    with serving() as server, stage(server) as it:
        machine = describe(it)
        samples, done, ended = soak(it, options.minutes * 60)
    answer = {"machine": machine, "done": done, "ended": ended, "samples": samples}
    save(answer, options.out, "soak")
    early = samples[len(samples) // 4]
    last = samples[-3:]
    bounded = all(
        sample[part] <= 2 * early[part]
        for part in ("table_bytes", "index_bytes")
        for sample in last
    )
    print(f"{done}; ended {ended}; bounded: {bounded}")
    sys.exit(0 if bounded and ended == done["enqueued"] else 1)


if __name__ == "__main__":
    main()
