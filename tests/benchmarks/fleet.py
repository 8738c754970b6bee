"""A fleet of workers beside a snapshot that is held for an hour: a simulation.

    python tests/benchmarks/fleet.py [--dead 1000000] [--out DIR]

No machine here runs 500 workers. So the costs are measured on one session, and the rules
of the claim floor are played for each claim of the fleet. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from pathlib import Path

from capacity import costs, sizes
from stage import describe, save, serving, stage

PAUSES = 50  # how many times as long as it took, until the next full scan
SHORTEST, LONGEST = 1, 30  # seconds between the beginnings of full scans


def scans(it, dead):
    """Microseconds and bytes of each dead entry, and a claim that begins at the floor."""
    with it.connect() as held, it.connect() as owner, it.worker() as worker:
        owner.execute("set search_path to jobs_bench")
        held.autocommit = False
        held.execute("set transaction isolation level repeatable read")
        held.execute("select from pg_class limit 1")
        it.fill("jobs_bench", queued=dead)
        owner.execute("delete from live_job")
        taken = {"scan": [], "floor": []}
        for _ in range(5):
            owner.execute(
                "select setval(f, 0, false) from queue as q, unnest(q.floor) as f"
            )
            for kind, seconds in taken.items():
                for _ in range(1 if kind == "scan" else 20):
                    started = time.perf_counter()
                    worker.execute("select from jobs_bench.claim('email')").fetchall()
                    seconds.append(time.perf_counter() - started)
        size = sum(
            size for name, size in sizes(it, "jobs_bench").items() if "live_job" in name
        )
    return {
        "scan_us_an_entry": round(statistics.median(taken["scan"]) / dead * 1e6, 3),
        "claim_at_the_floor_us": round(statistics.median(taken["floor"]) * 1e6),
        "bytes_an_entry": round(size / dead),
    }


def play(cost, *, workers, rate, seconds, seed=1):
    """Play the claims of a fleet second by second; returns a row for each ten minutes."""
    chance = random.Random(seed)
    # Each worker claims what falls due in a second, at its own moments.
    claims = [(chance.random(), worker) for worker in range(workers)]
    heapq.heapify(claims)
    scanned, took = 0.0, 0.0
    rows, waits, spent = [], [], 0.0
    step = seconds // 6
    while claims:
        now, worker = heapq.heappop(claims)
        if now >= (len(rows) + 1) * step:
            work = rate * cost["job_us"] / 1e6
            rows.append(
                {
                    "minutes": round((len(rows) + 1) * step / 60),
                    "dead": int(rate * now),
                    "gigabytes": round(rate * now * cost["bytes_an_entry"] / 1e9, 1),
                    "cores_for_scans": round(spent / step, 2),
                    "cores_for_jobs": round(work, 2),
                    "claim_ms_median": round(statistics.median(waits) * 1e3, 1),
                    "claim_s_longest": round(max(waits), 2),
                    "below_the_floor_s": round(
                        max(SHORTEST, min(LONGEST, PAUSES * took)) + took, 1
                    ),
                }
            )
            waits, spent = [], 0.0
            if len(rows) == 6:
                return rows
        wait = cost["claim_us"] / 1e6
        if now >= scanned + max(SHORTEST, min(LONGEST, PAUSES * took)):
            # It announces itself as a scan of 1 s, so no other begins for 30 s.
            scanned, took = now, rate * now * cost["scan_us_an_entry"] / 1e6
            wait += took
            spent += took
        waits.append(wait)
        heapq.heappush(claims, (now + wait + chance.uniform(0.9, 1.1), worker))
    return rows


def main():
    """Measure, play and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dead", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    options = parser.parse_args()
    with serving() as server, stage(server) as it:
        machine = describe(it)
        each = costs(it, 5000)
        it.empty()
        cost = scans(it, options.dead)
    batches = ("enqueue_many", "claim(500)", "complete_many")
    cost["job_us"] = round(sum(each[name]["cpu_us"] for name in batches), 1)
    # A call for 20 jobs: what one call costs, and what each further job adds.
    cost["claim_us"] = cost["claim_at_the_floor_us"] + 19 * each["claim(500)"]["cpu_us"]
    answer = {
        "machine": machine,
        "a_job": each,
        "cost": cost,
        "fleet": {"workers": 500, "jobs_a_second": 10_000, "seconds": 3600},
        "played": play(cost, workers=500, rate=10_000, seconds=3600),
    }
    print(save(answer, options.out, "fleet"))


if __name__ == "__main__":
    main()
