"""The fault: a lease expires while its completion is not yet committed.

How the first transaction ends decides. An expired lease is lost either way.
"""

import pytest

pytestmark = pytest.mark.usefixtures("no_wait_is_for_ever", "read_committed")


@pytest.fixture
def hasty(client):
    """A client that waits for nobody."""

    def hasty(role="spare-worker"):
        return client(role, options="-c lock_timeout=2s")

    return hasty


@pytest.mark.slow
def test_a_completion_open_past_its_lease_s_end_stands_as_it_ends(
    client, beneath, enqueue, lapse_soon, pass_by, hasty, state, owner
):
    sessions = [client("email-worker") for _ in range(4)]
    ended, undone = [], []
    for number, session in enumerate(sessions):
        enqueue()
        (lease,) = session.claim("email")
        (ended if number < 2 else undone).append(lease)
    for session, lease in zip(sessions, ended + undone, strict=True):
        lapses = lapse_soon(lease.job_id)
        beneath(session).execute("begin")
        if lease in (ended[0], undone[0]):
            assert session.complete(lease) is True
        else:
            assert session.complete_many([lease])[0].outcome == "completed"
    pass_by(lapses)

    meanwhile = hasty().claim("email") + hasty().claim("email", 9)
    for session, ending in zip(
        sessions, ("commit", "commit", "rollback", "rollback"), strict=True
    ):
        beneath(session).execute(ending)
    evidence = state()["attempt"]
    afterwards = hasty().claim("email", 9)

    assert meanwhile == []
    assert len(evidence) == 2
    assert {(lease.job_id, lease.attempt) for lease in afterwards} == {
        (lease.job_id, 2) for lease in undone
    }
    assert hasty().claim("email", 9) == []
    for lease in ended:
        job = sessions[0].inspect(lease.job_id)
        assert (job.status, job.attempts, job.last_failure_code) == (
            "succeeded",
            1,
            None,
        )
    assert set(evidence) < set(state()["attempt"])
    assert owner.rows("select distinct lease_owner from live_job") == [
        ("spare-worker",)
    ]


ANSWERS = {
    "renew": lambda worker, lease: worker.renew(lease),
    "complete": lambda worker, lease: worker.complete(lease),
    "fail": lambda worker, lease: worker.fail(lease, "down", retryable=True),
    "complete_many": lambda worker, lease: worker.complete_many([lease])[0].outcome,
    "fail_many": lambda worker, lease: (
        worker.fail_many([(lease, "down", True)])[0].outcome
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_stale_worker_that_waited_for_a_reclaim_has_lost_its_lease(
    ending,
    client,
    beneath,
    enqueue,
    expire,
    hasty,
    background,
    blocked,
    refused,
    state,
):
    stale = []
    for _ in ANSWERS:
        enqueue()
    colleague = client("email-worker")
    leases = colleague.claim("email", 9)
    expire(*(lease.job_id for lease in leases))
    before = state()
    # Of the same role, so that nothing but the token tells the two apart.
    rival = hasty("email-worker")
    beneath(rival).execute("begin")
    taken = rival.claim("email", 9)
    for (verb, answer), lease in zip(ANSWERS.items(), leases, strict=True):
        worker = client("email-worker")
        stale.append((verb, background(answer, worker, lease)))
        blocked(beneath(worker), beneath(rival))
    during = colleague.renew_many(leases), state()

    beneath(rival).execute(ending)

    for verb, answer in stale:
        if verb.endswith("_many"):
            assert answer.result() == "invalid_lease"
        else:
            with refused("LJ004"):
                answer.result()
    assert [lease.attempt for lease in taken] == [2] * len(ANSWERS)
    assert {item.outcome for item in during[0]} == {"busy"}
    assert during[1] == before
    assert {i.outcome for i in colleague.renew_many(leases)} == {"invalid_lease"}
    if ending == "rollback":
        assert state() == before
        assert len(hasty().claim("email", 9)) == len(ANSWERS)
    else:
        assert {item.outcome for item in rival.renew_many(taken)} == {"renewed"}
        assert len(state()["attempt"]) == len(ANSWERS)
