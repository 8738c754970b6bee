"""The fault: PgBouncer in transaction mode.

Workers run through PgBouncer in transaction mode. They poll where they cannot listen,
and say so.
"""

from __future__ import annotations

import logging
from collections import Counter

import psycopg
from psycopg.conninfo import make_conninfo

from lenso_jobs.worker import Tally

JOBS = 30
LEFT_BEHIND = """
    select pg_backend_pid(), current_setting('role'),
        (select count(*) from pg_prepared_statements)
        + (select count(*) from pg_listening_channels())
        + (select count(*) from pg_locks
           where pid = pg_backend_pid() and locktype = 'advisory')
"""


def test_workers_run_every_job_once_and_leave_nothing_in_a_session(
    crews, hire, pooler, enqueue, attempts, caplog
):
    source = make_conninfo(user="email-worker", **pooler)
    runs = Counter()

    async def handler(crew, lease):
        runs[lease.job_id] += 1

    jobs = [enqueue(queue=crew.queue) for crew in crews for _ in range(JOBS - 1)]
    hired = [
        hire(crew, handler, source, prepare_threshold=None, concurrency=2)
        for crew in crews
    ]
    attempts(*jobs, count=len(jobs))
    jobs += [enqueue(queue=crew.queue) for crew in crews]
    ended = attempts(*jobs, count=len(jobs))
    tallies = [each.stop() for each in hired]

    assert ended == [(1, "succeeded", None)] * 2 * JOBS
    assert runs == Counter(jobs)
    assert tallies == [Tally(succeeded=JOBS)] * 2
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 2
    assert all("cannot listen" in line for line in lines)
    with (
        psycopg.connect(source, prepare_threshold=None) as one,
        psycopg.connect(source, prepare_threshold=None) as other,
    ):
        found = [c.execute(LEFT_BEHIND).fetchone() for c in (one, other)]
    assert len({pid for pid, _, _ in found}) == 2
    assert [state for _, *state in found] == [["none", 0]] * 2
