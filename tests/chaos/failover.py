"""A failover under load: is anything lost that was acknowledged?

    python tests/chaos/failover.py [--seconds 60] [--times 3] [--seed N]

The load of ``python tests/chaos`` goes to a primary with a synchronous standby. The
standby is away for longer than a lease, and comes back; then the primary is stopped at
once and the standby promoted. So often as told, and each time the stopped server is made
the new standby. The clients know both servers and find the one
that takes writes. Then the journals are compared with the tables. Exits with 1 where
something was found.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from itertools import pairwise

from checker import findings
from journal import read
from load import LEASE_SECONDS
from pair import Pair
from servers import evidence, found_instance, ground
from storm import ROLES, drain, loading

OUTAGE = LEASE_SECONDS * 1.2


def fail_over_under_load(pair, directory, seconds, times, seed, roles=ROLES):
    """Stop the standby for a while, then fail over; return what happened, and findings."""
    found_instance(pair.primary.conninfo("postgres"))
    failed_at = []
    with loading(directory, seed, [pair.way], roles=roles) as load:
        for number in range(times):
            time.sleep(seconds / (times + 1))
            if number:
                pair.add_standby()
            pair.standby.end()
            time.sleep(OUTAGE)
            pair.standby.start()
            pair.await_standby()
            failed_at.append(time.time())
            pair.fail_over()
        time.sleep(seconds / (times + 1))
        drain(load, pair.primary)
    seen = evidence(pair.primary.conninfo(), read(directory))
    happened = {
        "jobs": len(seen.jobs),
        "answers to producers": len(seen.acknowledged()),
        "answers to workers": len(seen.noted("answered")),
        "attempts": dict(Counter(row["outcome"] for row in seen.attempts)),
        "seconds without an answer": {
            what: [round(gap(seen.noted(what), at), 2) for at in failed_at]
            for what in ("acknowledged", "answered")
        },
    }
    return happened, findings(seen)


def gap(entries, at):
    """How long nobody was answered, around a time."""
    times = sorted(entry["at"] for entry in entries)
    gaps = [b - a for a, b in pairwise(times) if a <= at + 1 and b > at]
    return max(gaps, default=float("inf"))


def main():
    """Fail over, check, tell."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    options = parser.parse_args()
    print(f"seed: {options.seed}", flush=True)
    with ground() as directory, Pair(directory) as pair:
        happened, found = fail_over_under_load(
            pair, directory, options.seconds, options.times, options.seed
        )
    for name, value in {**happened, **found}.items():
        print(f"{name}: {value}")
    print(f"{len(found)} checks found something")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
