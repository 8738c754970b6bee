"""The fault: a crash on the last attempt.

The next claim ends the job with the code `attempts_exhausted`.
"""

from __future__ import annotations

from signal import SIGKILL

import pytest


@pytest.mark.slow
def test_a_job_whose_workers_are_killed_ends_after_its_last_attempt(
    crews, employ, enqueue, starts, expire, rival, connect, until
):
    jobs = {
        crew: enqueue(queue=crew.queue, payload={"seconds": 60}, max_attempts=granted)
        for crew, granted in zip(crews, (1, 2), strict=True)
    }
    for crew, granted in zip(crews, (1, 2), strict=True):
        for attempt in range(1, granted + 1):
            process = employ(crew)
            until(lambda: starts(jobs[crew]) == attempt)  # noqa: B023
            process.send(SIGKILL)
            assert process.exit_code() == -SIGKILL
            expire(jobs[crew])
        assert rival.rows("select from claim(%s)", crew.queue) == []

        job = connect("operations").row("select * from inspect(%s)", jobs[crew])
        assert job["status"] == "failed"
        assert job["last_failure_code"] == "attempts_exhausted"
        assert job["attempts"] == starts(jobs[crew]) == granted
