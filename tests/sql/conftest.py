"""Leases by the hundred."""

import pytest


@pytest.fixture
def lease_many(producer, worker):
    """Enqueue and claim jobs; returns their ids and their tokens, in two lists."""

    def lease_many(count, max_attempts=3):
        producer.execute(
            "select count(*) from generate_series(1, %s) as n,"
            " lateral enqueue('email', 'send', '{}', 'key-' || n, null, %s::integer)",
            (count, max_attempts),
        )
        rows = worker.rows(
            "select job_id, lease_token from claim('email', %s::integer)", count
        )
        return [row[0] for row in rows], [row[1] for row in rows]

    return lease_many
