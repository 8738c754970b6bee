"""The fault: a late failure revives a finished job.

Every call under the old lease is refused, and the job stays as it ended.
"""

import pytest


@pytest.mark.sampled
def test_a_stale_report_after_the_end_changes_nothing(
    client, enqueue, make_due, expire, refused, state, owner
):
    for second in ("spare-worker", "email-worker"):
        job_id = enqueue(max_attempts=3)
        early, late, last = (
            client(role) for role in ("email-worker", "email-worker", second)
        )
        (lease,) = early.claim("email")
        early.fail(lease, "E_FIRST", retryable=True)
        make_due(job_id)
        (stale,) = late.claim("email")
        expire(job_id)
        (lease,) = last.claim("email")
        ended = last.fail(lease, "E_LAST", retryable=True)
        before = state()
        evidence = owner.row("select * from inspect(%s)", job_id)

        for code in ("E_OLD", "E_LAST"):
            with refused("LJ004"):
                late.fail(stale, code, retryable=True)
        with refused("LJ004"):
            late.complete(stale)
        with refused("LJ004"):
            late.renew(stale)
        batches = [
            late.fail_many([(stale, "E_OLD", True)]),
            late.complete_many([stale]),
            late.renew_many([stale]),
        ]

        assert (stale.attempt, lease.attempt, ended.status) == (2, 3, "failed")
        assert [item.outcome for (item,) in batches] == ["invalid_lease"] * 3
        assert state() == before
        assert owner.row("select * from inspect(%s)", job_id) == evidence
        assert (evidence["status"], evidence["attempts"]) == ("failed", 3)
        assert evidence["last_failure_code"] == "E_LAST"
        assert client("email-worker").claim("email") == []
