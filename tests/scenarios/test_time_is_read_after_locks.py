"""The fault: the clock of the transaction's start.

Leases, retries and due times count from the clock after every lock wait.
"""

from datetime import timedelta

import pytest

LEASE, BACK_OFF = timedelta(seconds=30), timedelta(seconds=5)
ANSWERS = {
    "renew": lambda worker, lease: worker.renew(lease),
    "complete": lambda worker, lease: worker.complete(lease),
    "fail": lambda worker, lease: worker.fail(lease, "down", retryable=True),
    "complete_many": lambda worker, lease: worker.complete_many([lease])[0],
    "fail_many": lambda worker, lease: worker.fail_many([(lease, "down", True)])[0],
}

pytestmark = pytest.mark.usefixtures("no_wait_is_for_ever", "read_committed")


@pytest.fixture
def now(owner):
    return lambda: owner.value("select clock_timestamp()")


@pytest.fixture
def age(now, pass_by):
    """Let a while pass by the server's clock. Return the end of it."""

    def age():
        pass_by(now() + timedelta(milliseconds=150))
        return now()

    return age


@pytest.fixture
def waiting(client, beneath, enqueue, background, blocked, hold):
    """Have every verb of a worker wait for the row of one job each."""

    def waiting(prepare=lambda *_: None):
        for _ in ANSWERS:
            enqueue()
        leases = client("email-worker").claim("email", 9)
        prepare(*(lease.job_id for lease in leases))
        holder = hold(*(lease.job_id for lease in leases))
        answers = {}
        for (verb, answer), lease in zip(ANSWERS.items(), leases, strict=True):
            worker = client("email-worker")
            answers[verb] = background(answer, worker, lease)
            blocked(beneath(worker), holder)
        return holder, answers

    return waiting


@pytest.mark.slow
def test_a_granted_lease_counts_from_the_end_of_the_call_s_wait(waiting, age, owner):
    holder, answers = waiting()
    released = age()

    holder.execute("commit")

    assert answers["renew"].result() >= released + LEASE
    assert answers["fail"].result().available_at >= released + BACK_OFF
    assert answers["fail_many"].result().available_at >= released + BACK_OFF
    assert answers["complete"].result() is True
    assert answers["complete_many"].result().outcome == "completed"
    assert owner.value("select min(ended_at) from attempt") >= released


@pytest.mark.slow
@pytest.mark.parametrize("touched", [True, False])
def test_a_lease_that_runs_out_while_the_call_waits_is_lost(
    touched, waiting, owner, lapse_soon, pass_by, refused
):
    lapses = []
    holder, answers = waiting(
        lambda *job_ids: None if touched else lapses.extend(map(lapse_soon, job_ids))
    )

    if touched:
        holder.execute("update live_job set lease_expires_at = clock_timestamp()")
    else:
        pass_by(lapses[-1])
    holder.execute("commit")

    for verb, answer in answers.items():
        if verb.endswith("_many"):
            assert answer.result().outcome == "invalid_lease"
        else:
            with refused("LJ004"):
                answer.result()
    assert owner.value("select count(*) from attempt") == 0
    assert owner.rows(
        "select lease_owner, attempt, count(*) from live_job group by 1, 2"
    ) == [("email-worker", 1, len(ANSWERS))]


@pytest.mark.slow
def test_a_lease_granted_to_an_old_transaction_counts_from_the_call(
    client, beneath, enqueue, age, now
):
    for _ in range(3):
        enqueue()
    worker = client("email-worker")
    beneath(worker).execute("begin")
    claimed_from = age()
    leases = worker.claim("email") + worker.claim("email", 2)
    renewed_from = age()
    renewed = [
        worker.renew(leases[0]),
        *(item.lease_expires_at for item in worker.renew_many(leases[1:])),
    ]
    failed_from = age()
    failed = [
        worker.fail(leases[0], "down", retryable=True),
        *worker.fail_many([(lease, "down", True) for lease in leases[1:]]),
    ]
    beneath(worker).execute("commit")

    ends = [lease.lease_expires_at for lease in leases]
    assert claimed_from + LEASE <= min(ends)
    assert max(ends) <= renewed_from + LEASE <= min(renewed)
    assert max(renewed) <= failed_from + LEASE
    for answer in failed:
        assert failed_from + BACK_OFF <= answer.available_at <= now() + BACK_OFF


@pytest.mark.slow
def test_a_job_of_an_old_transaction_is_due_when_it_was_enqueued_and_claimed_after_it(
    client, beneath, verbs, age, now
):
    jobs, worker = client("accounts"), client("email-worker")
    beneath(jobs).execute("begin")
    called = age()
    made = [ask(jobs, verb, {})[0] for verb, ask in verbs.items()]
    returned = now()
    meanwhile = worker.claim("email")
    beneath(jobs).execute("commit")
    claimed = worker.claim("email", 9)

    assert meanwhile == []
    assert [lease.job_id for lease in claimed] == made
    for job_id in made:
        job = jobs.inspect(job_id)
        assert called <= job.available_at <= returned
        assert called <= job.created_at <= returned
