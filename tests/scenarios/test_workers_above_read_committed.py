"""The fault: workers above READ COMMITTED.

Workers above READ COMMITTED run each job once, and do not wait for what they can repeat
at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from threading import Lock

import pytest

JOBS, WORKERS = 1000, 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "caller"),
    [
        ("serializable", None),
        ("repeatable read", None),
        ("serializable", "email-worker"),
    ],
)
def test_eight_workers_run_each_job_once(
    level, caller, crews, hire, owner, producer, attempts, caplog, conninfo, until
):
    role = owner.info.user if caller else "email-worker"
    owner.execute(
        f'alter role "{role}" in database "{owner.info.dbname}"'
        f" set default_transaction_isolation = '{level}'"
    )
    runs, lock = Counter(), Lock()

    async def handler(crew, lease):
        with lock:
            runs[lease.job_id] += 1

    options = {"source": conninfo, "caller": caller} if caller else {}
    hired = [
        hire(crew, handler, queue="email", concurrency=2, batch=5, **options)
        for crew in crews * (WORKERS // 2)
    ]
    producer.execute(
        "select count(*) from enqueue_many((select jsonb_agg(jsonb_build_object("
        "'queue', 'email', 'kind', 'send', 'payload', '{}'::jsonb,"
        " 'idempotency_key', 'k' || n)) from generate_series(1, %s) as n))",
        (JOBS,),
    )
    until(lambda: not owner.value("select count(*) from live_job"))
    for each in hired:
        each.worker.stop()
    tallies = [each.stop() for each in hired]

    assert len(runs) == JOBS
    assert set(runs.values()) == {1}
    assert sum(tally.succeeded for tally in tallies) == JOBS
    assert all(tally.lost == tally.retried == 0 for tally in tallies)
    assert owner.rows(
        "select attempt, outcome, count(*) from attempt group by 1, 2"
    ) == [(1, "succeeded", JOBS)]
    # Nobody slept on a transaction that lost to another.
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
