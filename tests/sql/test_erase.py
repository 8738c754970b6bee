"""Erase deletes one job that has ended, and nothing else."""

from uuid import uuid4

import pytest


@pytest.mark.parametrize("end", ["complete(%s, %s)", "fail(%s, %s, 'refused', false)"])
def test_erase_deletes_an_ended_job_with_its_evidence_and_frees_its_key(
    operator, worker, owner, enqueue, claim, end
):
    other = enqueue(key="other")
    worker.execute("select complete(%s, %s)", claim())
    job_id = enqueue(key="key")
    worker.execute(f"select {end}", claim())

    assert operator.value("select erase(%s)", job_id) is True

    assert owner.rows("select job_id from job") == [(other,)]
    assert owner.rows("select job_id from attempt") == [(other,)]
    assert enqueue(key="key") != job_id


def test_erase_is_audited_and_explained(operator, worker, enqueue, claim, prefix):
    job_id = enqueue()
    worker.execute("select complete(%s, %s)", claim())
    operator.execute("select erase(%s)", (job_id,))

    ((acted_at, who, *act),) = operator.rows(
        "select acted_at, operator, act, arguments, job_count from inspect_acts(1)"
    )
    assert (who, act) == (f"{prefix}_duty", ["erase", {"job_id": str(job_id)}, 1])
    assert operator.rows("select reason, until, who from explain_job(%s)", job_id) == [
        ("purged_or_unknown", acted_at, who)
    ]
    assert operator.rows(
        "select until, who from explain_job(%s)",
        f"{str(job_id)[:-1]}{'1' if str(job_id)[-1] == '0' else '0'}",
    ) == [(None, None)]


def test_erase_refuses_a_live_or_unknown_job_and_changes_nothing(
    operator, owner, enqueue, claim, expire, state
):
    running, queued = enqueue(), enqueue()
    claim()
    before = state()

    for job_id, sqlstate in (
        (queued, "LJ007"),
        (running, "LJ007"),
        (uuid4(), "LJ006"),
        (None, "LJ006"),
    ):
        with operator.refusing(sqlstate):
            operator.execute("select erase(%s::uuid)", (job_id,))
    assert state() == before


def test_erase_deletes_a_lost_job(operator, owner, enqueue):
    job_id = enqueue()
    owner.execute("delete from live_job")

    assert operator.value("select erase(%s)", job_id) is True
