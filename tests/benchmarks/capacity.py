"""What a job costs: log, processor, disk; and what jobs that are kept cost the others.

    python tests/benchmarks/capacity.py [--kept 30000000] [--out DIR]

The processor's time is read of the server's process, so the server has to be on this
machine. Takes about an hour and 40 gigabytes at 30 million.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from uuid import uuid4

from contenders import PAYLOAD, LensoJobs
from measures import pairs
from stage import describe, save, serving, stage

BATCH = 500


def spent(pid):
    """Microseconds of processor time a process has had."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1000


def logged(session):
    """Bytes of log written so far."""
    return session.execute(
        "select (pg_current_wal_insert_lsn() - '0/0')::bigint"
    ).fetchone()[0]


def costs(it, count):
    """Log bytes and processor time of a job by verb, alone and in batches."""
    answers = {}
    with it.connect() as watcher, it.worker() as session:
        contender, pid = LensoJobs(session), session.info.backend_pid
        leases = []

        def claim_all():
            while batch := contender.jobs.claim("email", BATCH):
                leases.extend(batch)

        def complete_all():
            for first in range(0, len(leases), BATCH):
                contender.jobs.complete_many(leases[first : first + BATCH])

        def each(call, arguments):
            return lambda: [call(*argument) for argument in arguments()]

        steps = {
            "enqueue": each(contender.enqueue, lambda: [()] * count),
            "claim": lambda: leases.extend(contender.claim() for _ in range(count)),
            "complete": each(contender.complete, lambda: [(x,) for x in leases]),
            "enqueue_many": lambda: contender.bulk(count),
            f"claim({BATCH})": claim_all,
            "complete_many": complete_all,
        }
        contender.bulk(1000)
        claim_all()
        complete_all()
        for name, step in steps.items():
            if name == "claim" or name.startswith("claim("):
                leases.clear()
            watcher.execute("checkpoint")
            log, cpu = logged(watcher), spent(pid)
            step()
            answers[name] = {
                "log_bytes": round((logged(watcher) - log) / count),
                "cpu_us": round((spent(pid) - cpu) / count, 1),
            }
    return answers


def sizes(it, schema):
    """Bytes of each table and index of an Instance."""
    with it.connect() as session:
        return dict(
            session.execute(
                "select c.relname, pg_relation_size(c.oid) from pg_class as c"
                " where c.relnamespace = %s::regnamespace and c.relkind in ('r', 'i')"
                " and pg_relation_size(c.oid) > 65536 order by 2 desc",
                (schema,),
            ).fetchall()
        )


# Ended jobs, as enqueue, claim and complete leave them, one for each millisecond.
KEEP = """
with made as (
    insert into job (
        job_id, created_at, max_attempts, producer, queue, kind, idempotency_key, payload
    )
    select
        (
            lpad(to_hex(1700000000000 + n), 12, '0') || '70008'
            || lpad(to_hex(n), 15, '0')
        )::uuid,
        to_timestamp(1700000000 + n / 1000.0), 3, 'bench', 'email', 'send', {key},
        '{{"to": "someone@example.com", "template": "welcome"}}'
    from generate_series(%s::bigint, %s::bigint) as n
    returning job_id, created_at
)
insert into attempt (
    job_id, leased_at, ended_at, attempt, max_attempts, queue, worker, outcome,
    lease_token_hash
)
select
    job_id, created_at, created_at, 1, 3, 'email', 'bench', 'succeeded',
    sha256(uuid_send(job_id))
from made
"""
# Keys of one length, in the order of time or in none.
KEYS = {"ordered": "lpad(n::text, 36, '0')", "random": "gen_random_uuid()::text"}


def keep(it, schema, kind, first, last):
    """Put ended jobs into an Instance; the index of their keys is built anew."""
    # Inserts in random order leave a B-tree 70 % full.
    fill = 70 if kind == "random" else 90
    with it.connect(options=f"-c search_path={schema}") as session:
        session.execute("set maintenance_work_mem = '1GB'")
        session.execute(
            "alter table job drop constraint job_producer_idempotency_key_key"
        )
        for number in range(first, last, 500_000):
            session.execute(
                KEEP.format(key=KEYS[kind]), (number, min(number + 499_999, last - 1))
            )
        session.execute(
            "alter table job add constraint job_producer_idempotency_key_key"
            f" unique (idempotency_key, producer) with (fillfactor = {fill})"
        )
        session.execute("vacuum analyze job, live_job, attempt")


def enqueues(it, schema, kind, count=10_000):
    """What an enqueue costs with keys of this kind, after a checkpoint and later."""
    answer = {}
    with it.connect() as watcher, it.worker() as session:
        jobs, pid = LensoJobs(session, schema=schema).jobs, session.info.backend_pid
        for when in ("after_a_checkpoint", "later"):
            if when == "after_a_checkpoint":
                watcher.execute("checkpoint")
            log, cpu = logged(watcher), spent(pid)
            for _ in range(count):
                key = uuid4() if kind == "random" else f"{time.time_ns():036}"
                jobs.enqueue("email", "send", PAYLOAD, idempotency_key=str(key))
            answer[when] = {
                "log_bytes": round((logged(watcher) - log) / count),
                "cpu_us": round((spent(pid) - cpu) / count, 1),
            }
    return answer


def kept(it, counts):
    """Disk of a job that is kept, and single calls and keys beside so many of them."""
    it.fill("jobs_bench", ended=10_000)
    answer = {"keys": {kind: {} for kind in KEYS}}
    calls = ("enqueue", "claim", "complete", "inspect")
    for kind in KEYS:
        schema, done = it.instance(f"jobs_{kind}"), 0
        for count in counts:
            keep(it, schema, kind, done, count)
            done = count
            if kind == "ordered" and count == counts[-1]:
                disk = {name: size / count for name, size in sizes(it, schema).items()}
                seconds = pairs(it, schema, 12, 300, calls=calls)
                answer |= {
                    "kept": count,
                    "bytes_a_job": {
                        name: round(size, 1) for name, size in disk.items()
                    },
                    "bytes_a_job_in_all": round(sum(disk.values())),
                    "ratio_to_10000_kept": {
                        call: round(
                            statistics.median(
                                many / few
                                for many, few in zip(
                                    seconds[schema][call],
                                    seconds["jobs_bench"][call],
                                    strict=True,
                                )
                            ),
                            3,
                        )
                        for call in calls
                    },
                }
            answer["keys"][kind][count] = enqueues(it, schema, kind)
        with it.connect() as session:
            session.execute(
                f"truncate {schema}.job, {schema}.live_job, {schema}.attempt"
            )
    return answer


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kept", type=int, default=30_000_000)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    options = parser.parse_args()
    with serving() as server, stage(server) as it:
        answer = {"machine": describe(it), "a_job": costs(it, 5000)}
        it.empty()
        answer |= kept(it, sorted({options.kept // 10, options.kept}))
    print(save(answer, options.out, "capacity"))


if __name__ == "__main__":
    main()
