"""What the runbook tells the person on call to do: make the break, then follow the page."""

import re
from pathlib import Path

import pytest

RUNBOOK = Path(__file__).parents[2] / "docs" / "operators" / "runbook.md"


def statements(section, beginning):
    """The SQL blocks of a section that begin with these words."""
    # A name can be a finding and a reason.
    parts = re.findall(
        rf"^### {section}\n(.*?)(?=^###? |\Z)",
        RUNBOOK.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    found = [
        block
        for part in parts
        for block in re.findall(r"```sql\n(.*?)```", part, re.DOTALL)
        if block.startswith(beginning)
    ]
    assert found, beginning
    return found


def test_jobs_of_a_wrong_year_are_made_due(owner, enqueue, worker):
    wrong = {enqueue(available_at=f"2262-01-0{day}T00:00:00Z") for day in (1, 2, 3)}
    right = enqueue(available_at="2035-01-01T00:00:00Z")
    other = enqueue(queue="slow", available_at="2262-01-01T00:00:00Z")
    (look,) = statements("scheduled", "select job_id, available_at")
    (make_due,) = statements("scheduled", "update")

    assert {job_id for job_id, _ in owner.rows(look)} == wrong
    assert owner.execute(make_due).rowcount == 3
    assert owner.execute(make_due).rowcount == 0

    claimed = {
        job_id for (job_id,) in worker.rows("select job_id from claim('email', 9)")
    }
    assert claimed == wrong
    assert {
        job_id
        for (job_id,) in owner.rows("select job_id from live_job where attempt = 0")
    } == {right, other}


def test_the_producer_of_a_wrong_year_finds_its_job_by_the_same_call(
    owner, enqueue, producer
):
    job_id = enqueue(key="k", available_at="2262-01-01T00:00:00Z")
    (make_due,) = statements("scheduled", "update")
    owner.execute(make_due)

    assert enqueue(key="k", available_at="2262-01-01T00:00:00Z") == job_id
    with producer.refusing("LJ002"):
        enqueue(key="k", available_at="2027-01-01T00:00:00Z")


def test_deleted_live_rows_are_put_back(owner, enqueue, claim, worker, expire):
    fresh, retried, ended = (enqueue(key=key) for key in ("a", "b", "c"))
    leases = dict(worker.rows("select job_id, lease_token from claim('email', 3)"))
    worker.execute("select complete(%s, %s)", (ended, leases[ended]))
    worker.execute("select fail(%s, %s, 'x', true)", (retried, leases[retried]))
    owner.execute("delete from live_job")
    (put_back,) = statements("evidence_missing", "insert")

    # Under its key the producer gets the job that never runs.
    assert enqueue(key="a") == fresh
    assert worker.rows("select job_id from claim('email', 9)") == []
    assert owner.execute(put_back).rowcount == 2
    assert owner.execute(put_back).rowcount == 0

    # The attempt that may have been running keeps its number to itself.
    claimed = worker.rows("select job_id, attempt, lease_token from claim('email', 9)")
    assert {(job_id, attempt) for job_id, attempt, _ in claimed} == {
        (fresh, 2),
        (retried, 3),
    }
    for job_id, _, token in claimed:
        assert worker.value("select complete(%s, %s)", job_id, token)
        assert owner.value("select status from inspect(%s)", job_id) == "succeeded"


def test_a_prepared_transaction_that_locks_a_table_is_rolled_back(connect, owner):
    holder = connect()
    holder.execute("begin")
    holder.execute("lock table jobs_email.live_job")
    holder.execute("prepare transaction 'a colleague''s'")
    (listing,) = statements("table_locked", "select gid")

    assert "table_locked" in [
        finding for (finding,) in owner.rows("select finding from inspect_health()")
    ]
    ((gid, *_, statement),) = owner.rows(listing)
    owner.execute(statement)

    assert gid == "a colleague's"
    assert owner.rows("select finding from inspect_health()") == []


@pytest.mark.parametrize(
    ("act", "status"), [("commit", "succeeded"), ("rollback", "running")]
)
def test_a_prepared_complete_ends_as_the_runbook_says(
    connect, owner, enqueue, claim, expire, act, status
):
    enqueue()
    job_id, token = claim()
    holder = connect("email-worker")
    holder.execute("begin")
    holder.execute("select complete(%s, %s)", (job_id, token))
    holder.execute("prepare transaction 'x'")

    owner.execute(f"{act} prepared 'x'")

    assert owner.value("select status from inspect(%s)", job_id) == status
    if act == "rollback":
        expire(job_id)
        assert claim()[0] == job_id
        assert owner.value("select attempt from live_job") == 2


def test_a_redriven_job_whose_live_row_was_deleted_is_put_back(
    owner, enqueue, claim, worker, connect, prefix
):
    job_id = enqueue(max_attempts=1)
    worker.execute("select fail(%s, %s, 'x', true)", claim())
    connect(f"{prefix}_duty").execute("select redrive(%s, 2)", (job_id,))
    worker.execute("select fail(%s, %s, 'y', true)", claim())
    owner.execute("delete from live_job")
    (put_back,) = statements("evidence_missing", "insert")

    assert "job_lost" in [
        finding for (finding,) in owner.rows("select finding from inspect_health()")
    ]
    assert owner.execute(put_back).rowcount == 1
    assert owner.rows("select finding from inspect_health()") == []
    assert owner.value("select attempt from live_job") == 3
