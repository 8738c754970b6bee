"""What a job costs: log, processor, disk; and what jobs that are kept cost the others.

    python tests/benchmarks/capacity.py [--kept 10000000] [--out DIR]

The processor's time is read of the server's process, so the server has to be on this
machine. Takes about ten minutes and ten gigabytes at ten million.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from contenders import LensoJobs
from measures import pairs
from stage import describe, serving, stage

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


def kept(it, count):
    """Disk of a job that is kept, and the single calls beside so many of them."""
    it.fill("jobs_bench", ended=10_000)
    it.instance("jobs_kept")
    it.fill("jobs_kept", ended=count)
    disk = {name: size / count for name, size in sizes(it, "jobs_kept").items()}
    calls = ("enqueue", "claim", "complete", "inspect")
    seconds = pairs(it, "jobs_kept", 12, 300, calls=calls)
    return {
        "kept": count,
        "bytes_a_job": {name: round(size, 1) for name, size in disk.items()},
        "bytes_a_job_in_all": round(sum(disk.values())),
        "ratio_to_10000_kept": {
            call: round(
                statistics.median(
                    many / few
                    for many, few in zip(
                        seconds["jobs_kept"][call],
                        seconds["jobs_bench"][call],
                        strict=True,
                    )
                ),
                3,
            )
            for call in calls
        },
    }


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kept", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    options = parser.parse_args()
    with serving() as server, stage(server) as it:
        answer = {"machine": describe(it), "a_job": costs(it, 5000)}
        it.empty()
        answer |= kept(it, options.kept)
    text = json.dumps(answer, indent=1)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "capacity.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
