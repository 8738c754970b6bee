"""The server's clock jumps forwards and back, and operators see a finding about it.

The rows are moved instead: what lies in the past of a clock lies in the future of one
that is behind.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "operators" / "high-availability.md"
HOUR = timedelta(hours=1)


@pytest.fixture
def jump(owner):
    """Move the clock, by all times on record."""

    def jump(by):
        for table, times in (
            ("job", ("created_at", "available_at")),
            ("live_job", ("available_at", "leased_at", "lease_expires_at")),
            ("attempt", ("leased_at", "ended_at", "retry_at")),
        ):
            moved = ", ".join(f"{time} = {time} - %(by)s" for time in times)
            owner.execute(f"update {table} set {moved}", {"by": by})

    return jump


@pytest.fixture
def mend(owner):
    """Run what the page tells the operator to, of this table's rows."""
    blocks = re.findall(r"```sql\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    updates = [block for block in blocks if block.startswith("update")]

    def mend():
        assert len(updates) == 2
        for update in updates:
            owner.execute(update)

    return mend


def complete(session, lease):
    return session.value("select complete(%s, %s)", *lease)


def test_a_clock_that_goes_forward_ends_leases_and_waits(
    owner, worker, rival, enqueue, claim, jump
):
    running, last, scheduled = (
        enqueue(),
        enqueue(max_attempts=1),
        enqueue(available_at=owner.value("select clock_timestamp() + %s", HOUR / 2)),
    )
    leases = dict(claim() for _ in range(2))

    jump(HOUR)

    for lease in leases.items():
        with worker.refusing("LJ004"):
            complete(worker, lease)
    claimed = rival.rows("select job_id, attempt from claim('email', 10)")
    assert sorted(claimed) == sorted([(running, 2), (scheduled, 1)])
    assert owner.rows(
        "select attempt, outcome, failure_code from attempt where job_id = %s", last
    ) == [(1, "lease_expired", "attempts_exhausted")]


def test_a_clock_that_goes_back_makes_leases_and_jobs_wait(
    worker, rival, enqueue, claim, jump
):
    held, due = enqueue(), enqueue()
    lease = claim()

    jump(-HOUR)
    later = enqueue()

    assert lease[0] == held
    assert rival.rows("select job_id from claim('email', 10)") == [(later,)]
    ends_at = worker.value("select lease_expires_at from inspect(%s)", held)
    assert worker.value("select renew(%s, %s)", *lease) == ends_at
    assert complete(worker, lease)
    assert worker.value("select status from inspect(%s)", held) == "succeeded"
    assert worker.value("select status from inspect(%s)", due) == "queued"


def test_evidence_may_end_before_it_began(owner, worker, enqueue, claim, jump):
    enqueue()
    lease = claim()
    jump(-HOUR)

    assert complete(worker, lease)

    assert owner.value("select ended_at < leased_at from attempt")


def test_ids_of_after_a_jump_back_sort_before_those_of_before(owner, enqueue, jump):
    ahead = owner.value("select _enqueue_job_id(clock_timestamp() + %s)", HOUR)

    assert owner.value("select %s < %s::uuid", enqueue(), ahead)


def test_the_page_s_remedy_mends_a_jump_back(
    owner, worker, rival, enqueue, claim, jump, mend
):
    scheduled = enqueue(
        available_at=owner.value("select clock_timestamp() + 3 * %s", HOUR)
    )
    retried, held, due = enqueue(), enqueue(), enqueue()
    assert worker.row("select * from fail(%s, %s, 'again', true)", *claim())
    lease = claim()
    jump(-HOUR)

    mend()

    assert lease[0] == held
    claimed = rival.rows("select job_id from claim('email', 10)")
    assert sorted(claimed) == sorted([(retried,), (due,)])
    assert owner.value(
        "select lease_expires_at - clock_timestamp() <= make_interval(secs => i"
        ".lease_seconds) from live_job cross join instance as i where job_id = %s",
        held,
    )
    assert complete(worker, lease)
    assert worker.value("select status from inspect(%s)", scheduled) == "queued"
