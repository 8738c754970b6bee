"""A storm over an Instance, and an Instance with a fault."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack, contextmanager

from psycopg.conninfo import conninfo_to_dict

import sabotage
from checker import findings
from cutter import Cutter
from journal import read
from load import SCHEMA
from servers import evidence, found_instance
from storm import ACTS, Storm, drain, loading

# Workers that know of their leases only what the server returned, and are late.
LATE = {"complete": 50, "dawdle": 50}
LOOPS = ("producer", "loop", "loop", "loop", "loop")
SOUGHT = 20
"""For how many seconds a fault is looked for, at most."""


@contextmanager
def storm_over(server, directory, seed, **options):
    """Yield a Storm over a load that runs, half of it behind a proxy."""
    straight = conninfo_to_dict(server.conninfo())
    with ExitStack() as stack:
        cutter = stack.enter_context(Cutter(server.conninfo()))
        ways = [straight, straight | cutter.address]
        load = stack.enter_context(loading(directory, seed, ways, **options))
        yield Storm(server, load, cutter, seed)


def blow(server, directory, seconds, seed, **options):
    """Run a storm; return what happened, and findings."""
    found_instance(server.conninfo("postgres"))
    with storm_over(server, directory, seed, **options) as storm:
        storm.blow(seconds, ACTS)
        drain(storm.load, server)
    seen = evidence(server.conninfo(), read(directory))
    happened = {
        "jobs": len(seen.jobs),
        "answers to producers": len(seen.acknowledged()),
        "answers to workers": len(seen.noted("answered")),
        "attempts": dict(Counter(row["outcome"] for row in seen.attempts)),
        "acts": dict(storm.done),
        "answers lost": storm.answers_lost(),
    }
    return happened, findings(seen)


def blow_over_fault(server, directory, seed, fault=None):
    """Look for a fault until a check notices it; return the findings."""
    found_instance(server.conninfo("postgres"), lease_seconds=1)
    wanted = None
    if fault:
        wanted, *_ = sabotage.FAULTS[fault]
        with server.connect() as session:
            sabotage.load(fault, session, SCHEMA)
    found = {}
    late = {"roles": LOOPS, "pause": 0.3, "fates": LATE}
    with storm_over(server, directory, seed, **late):
        for _ in range(SOUGHT if fault else 5):
            time.sleep(1)
            # The tables are read after the journals, and know at least as much.
            found = findings(evidence(server.conninfo(), read(directory)))
            if wanted in found:
                break
    found.pop("every_job_has_ended", None)
    return found
