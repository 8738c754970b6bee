"""The fault: overflow in the retry formula.

The wait doubles up to its maximum, for any attempt number. Jitter spreads many retries.
"""

import json
from datetime import timedelta

import pytest

ATTEMPTS = (1, 2, 3, 10, 31, 32, 63, 64, 1023, 1024, 4999)
WAITS = [timedelta(seconds=min(10 * 2 ** (n - 1), 3600)) for n in ATTEMPTS]


def test_the_wait_doubles_up_to_the_cap_at_any_attempt(
    client, enqueue, configure, owner
):
    configure(retry_base_seconds=10, retry_max_seconds=3600)
    for _ in ATTEMPTS * 2:
        enqueue()
    worker = client("email-worker")
    leases = worker.claim("email", 100)
    for lease, attempt in zip(leases, ATTEMPTS * 2, strict=True):
        owner.execute(
            "update live_job set attempt = %s, max_attempts = 5000 where job_id = %s",
            (attempt, lease.job_id),
        )
    one, many = leases[: len(ATTEMPTS)], leases[len(ATTEMPTS) :]

    answers = [worker.fail(lease, "down", retryable=True) for lease in one]
    answers += worker.fail_many([(lease, "down", True) for lease in many])

    ended = dict(owner.rows("select job_id, ended_at from attempt"))
    assert [
        answer.available_at - ended[lease.job_id]
        for answer, lease in zip(answers, leases, strict=True)
    ] == WAITS * 2
    assert [worker.inspect(lease.job_id).available_at for lease in leases] == [
        answer.available_at for answer in answers
    ]


@pytest.mark.slow
@pytest.mark.parametrize("batches", [2, pytest.param(10, marks=pytest.mark.long)])
def test_many_jobs_that_fail_at_once_come_back_spread_out(
    batches, producer, worker, configure, owner
):
    configure(retry_base_seconds=100, retry_max_seconds=100, retry_jitter=1)
    for batch in range(batches):
        items = [
            {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": key}
            for key in (f"{batch}.{n}" for n in range(1000))
        ]
        producer.execute("select enqueue_many(%s)", (json.dumps(items),))
        worker.execute(
            "select count(*) from (select array_agg(job_id), array_agg(lease_token)"
            " from claim('email', 1000)) as c (job_ids, tokens),"
            " fail_many(c.job_ids, c.tokens, array_fill('down'::text, array[1000]),"
            " array_fill(true, array[1000]))"
        )
        # None of them falls due before the next batch is claimed.
        owner.execute(
            "update live_job set available_at = available_at + interval '1 h'"
        )

    waits = [
        wait
        for (wait,) in owner.rows(
            "select extract(epoch from retry_at - ended_at)::float8 from attempt"
        )
    ]
    tenths = [sum(n * 10 <= wait < n * 10 + 10 for wait in waits) for n in range(10)]
    assert all(0 <= wait <= 100 for wait in waits)
    assert len(waits) == batches * 1000
    assert min(tenths) > batches * 1000 / 20
