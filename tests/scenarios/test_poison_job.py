"""The fault: a poison job.

It starts exactly `max_attempts` times. All other jobs complete.
"""

from __future__ import annotations

from functools import partial
from signal import SIGTERM

import pytest

GOOD = 50


@pytest.mark.slow
def test_a_job_that_ends_its_process_stops_no_other(
    crews, background, employ, enqueue, starts, attempts, owner, until
):
    def supervise(crew):
        """Start a worker again until nothing is left to do."""
        # One of them may be beside it every time.
        good = partial(enqueue, queue=crew.queue, max_attempts=10)
        jobs = [good() for _ in range(GOOD // 2)]
        poison = enqueue(queue=crew.queue, kind="exit", max_attempts=3)
        jobs += [good() for _ in range(GOOD // 2)]
        for crash in range(1, 4):
            assert employ(crew, concurrency=2).exit_code() == 9
            assert starts(poison) == crash
            # Not before their leases have run out.
            owner.execute(
                "update live_job set lease_expires_at = clock_timestamp()"
                " where queue = %s and lease_owner is not null",
                (crew.queue,),
            )
        last = employ(crew)
        left = "select count(*) from live_job where queue = %s"
        until(lambda: not owner.value(left, crew.queue))
        last.send(SIGTERM)
        assert last.exit_code() == 0
        return attempts(poison), attempts(*jobs), starts(poison)

    for call in [background(supervise, crew) for crew in crews]:
        ended, done, count = call.result(60)
        assert ended == [
            (1, "lease_expired", None),
            (2, "lease_expired", None),
            (3, "lease_expired", "attempts_exhausted"),
        ]
        assert count == 3
        # Jobs that ran beside it, or were not reported yet, ran again.
        assert sum(outcome == "succeeded" for _, outcome, _ in done) == GOOD
        assert {outcome for _, outcome, _ in done} <= {"succeeded", "lease_expired"}
