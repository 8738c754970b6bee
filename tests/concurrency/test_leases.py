"""Renew, complete and fail behind locks: the lease is judged when the lock is held."""

from __future__ import annotations

import itertools

import pytest

ONE = {
    "renew": "select renew(%s, %s)",
    "complete": "select complete(%s, %s)",
    "fail": "select fail(%s, %s, 'smtp.down', true)",
}
MANY = {
    "renew_many": (
        "select outcome from renew_many(array[%s]::uuid[], array[%s]::text[])"
    ),
    "complete_many": (
        "select outcome from complete_many(array[%s]::uuid[], array[%s]::text[])"
    ),
    "fail_many": (
        "select outcome from fail_many(array[%s]::uuid[], array[%s]::text[],"
        " array['smtp.down'], array[true])"
    ),
}
WAITING = {verb: MANY[verb] for verb in ("complete_many", "fail_many")}


@pytest.mark.parametrize("verb", [*ONE, *WAITING])
def test_a_call_that_waited_for_a_lock_that_changed_nothing_goes_through(
    verb, enqueue, claim, worker, hold, blocked, background
):
    job_id = enqueue()
    _, token = claim()
    holder = hold(job_id)
    answer = background(worker.value, (ONE | WAITING)[verb], job_id, token)
    blocked(worker, holder)

    holder.execute("commit")

    assert answer.result() not in (None, "invalid_lease")


@pytest.mark.slow
@pytest.mark.parametrize("verb", WAITING)
def test_a_lease_that_runs_out_while_its_batch_waits_for_another_row_is_lost(
    verb, enqueue, claim, worker, owner, hold, blocked, background, lapse_soon, pass_by
):
    enqueue()
    enqueue()
    leases = dict(sorted((claim(), claim())))
    first, second = leases
    call = (
        MANY[verb]
        .replace("array[%s]", "%s")
        .replace(
            "array['smtp.down'], array[true]",
            "array['smtp.down', 'smtp.down'], array[true, true]",
        )
    )
    holder = hold(second)
    lapses = lapse_soon(first)
    answer = background(worker.rows, call, [*leases], [*leases.values()])
    blocked(worker, holder)

    pass_by(lapses)
    holder.execute("commit")

    ends = {"complete_many": "completed", "fail_many": "queued"}
    assert answer.result() == [("invalid_lease",), (ends[verb],)]
    assert owner.rows("select job_id from attempt") == [(second,)]


# Only the holder of the lease takes or waits for the row's lock


@pytest.mark.parametrize("verb", [*ONE, *MANY])
@pytest.mark.parametrize("forgery", ["garbage token", "another worker"])
def test_a_call_without_the_lease_returns_at_once_while_the_row_is_locked(
    verb, forgery, enqueue, claim, worker, rival, hold, impatient
):
    job_id = enqueue()
    _, token = claim()
    hold(job_id)
    caller, shown = {
        "garbage token": (worker, f"job_lease_{'0' * 64}"),
        "another worker": (rival, token),
    }[forgery]
    impatient(caller)

    if verb in ONE:
        with caller.refusing("LJ004"):
            caller.execute(ONE[verb], (job_id, shown))
    else:
        assert caller.value(MANY[verb], job_id, shown) == "invalid_lease"


@pytest.mark.parametrize("verb", MANY)
@pytest.mark.parametrize("forgery", ["garbage token", "another worker"])
def test_a_batch_without_the_lease_locks_nobodys_row(
    verb, forgery, enqueue, claim, worker, rival, connect, impatient
):
    job_id = enqueue()
    _, token = claim()
    caller, shown = {
        "garbage token": (connect("email-worker"), f"job_lease_{'0' * 64}"),
        "another worker": (rival, token),
    }[forgery]
    caller.execute("begin")
    caller.execute(MANY[verb], (job_id, shown))

    completed = impatient(worker).value("select complete(%s, %s)", job_id, token)
    caller.execute("rollback")

    assert completed


# renew_many passes over what somebody holds


def test_renew_many_is_busy_with_a_job_being_completed_and_renews_the_rest(
    enqueue, claim, worker, colleague, impatient, owner
):
    enqueue(), enqueue(), enqueue()
    leases = [claim() for _ in range(3)]
    worker.execute("begin")
    worker.execute("select complete(%s, %s)", leases[1])
    called = owner.value("select clock_timestamp()")

    items = impatient(colleague).rows(
        "select position, job_id, outcome, lease_expires_at from renew_many(%s, %s)",
        [job_id for job_id, _ in leases],
        [token for _, token in leases],
    )
    worker.execute("commit")

    assert [item[:3] for item in items] == [
        (1, leases[0][0], "renewed"),
        (2, leases[1][0], "busy"),
        (3, leases[2][0], "renewed"),
    ]
    assert items[1][3] is None
    assert all((items[i][3] - called).total_seconds() >= 30 for i in (0, 2))


def test_a_lease_that_was_busy_is_lost_or_kept_as_its_complete_ends(
    enqueue, claim, worker, colleague
):
    enqueue(), enqueue()
    kept, ended = claim(), claim()
    worker.execute("begin")
    worker.execute("select complete(%s, %s)", kept)
    worker.execute("rollback")
    worker.execute("select complete(%s, %s)", ended)

    outcomes = colleague.rows(
        "select outcome from renew_many(%s, %s)",
        [kept[0], ended[0]],
        [kept[1], ended[1]],
    )

    assert outcomes == [("renewed",), ("invalid_lease",)]


@pytest.mark.slow
def test_renew_many_in_flight_keeps_another_worker_from_reclaiming(
    enqueue, claim, worker, rival, lapse_soon, pass_by, impatient
):
    job_id = enqueue()
    _, token = claim()
    lapses = lapse_soon(job_id)
    worker.execute("begin")
    renewed = worker.value(MANY["renew_many"], job_id, token)
    pass_by(lapses)

    meanwhile = impatient(rival).rows("select from claim('email')")
    worker.execute("commit")
    afterwards = rival.rows("select from claim('email')")

    assert renewed == "renewed"
    assert (meanwhile, afterwards) == ([], [])


# Two answers to one lease at the same time

COMPLETES = {
    "complete": "select complete(%s, %s)::text",
    "complete_many": MANY["complete_many"],
}
FAILS = {
    "fail": "select status from fail(%s, %s, 'smtp.down', true)",
    "fail_many": MANY["fail_many"],
}


@pytest.mark.parametrize(
    ("first", "second"), [*itertools.product(COMPLETES, COMPLETES)]
)
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_two_completes_at_once_both_return_true_and_leave_one_row_of_evidence(
    first, second, ending, enqueue, claim, worker, colleague, owner, blocked, background
):
    job_id = enqueue()
    _, token = claim()
    worker.execute("begin")
    mine = worker.value(COMPLETES[first], job_id, token)
    answer = background(colleague.value, COMPLETES[second], job_id, token)
    blocked(colleague, worker)

    worker.execute(ending)

    assert {mine, answer.result()} <= {"true", "completed"}
    assert owner.rows("select job_id, attempt, outcome from attempt") == [
        (job_id, 1, "succeeded")
    ]
    assert owner.value("select count(*) from live_job") == 0


@pytest.mark.parametrize(("first", "second"), [*itertools.product(FAILS, FAILS)])
def test_two_equal_fails_at_once_return_the_same_and_count_once(
    first, second, enqueue, claim, worker, colleague, owner, blocked, background
):
    job_id = enqueue()
    _, token = claim()
    worker.execute("begin")
    mine = worker.value(FAILS[first], job_id, token)
    answer = background(colleague.value, FAILS[second], job_id, token)
    blocked(colleague, worker)

    worker.execute("commit")

    assert (mine, answer.result()) == ("queued", "queued")
    assert owner.rows("select attempt, outcome from attempt") == [(1, "retried")]
    assert owner.value("select attempt from live_job") == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [*itertools.product(COMPLETES, FAILS), *itertools.product(FAILS, COMPLETES)],
)
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_of_a_complete_and_a_fail_under_one_lease_exactly_one_wins(
    first, second, ending, enqueue, claim, worker, colleague, owner, blocked, background
):
    verbs = COMPLETES | FAILS
    job_id = enqueue()
    _, token = claim()
    worker.execute("begin")
    worker.execute(verbs[first], (job_id, token))
    answer = background(colleague.value, verbs[second], job_id, token)
    blocked(colleague, worker)

    worker.execute(ending)

    if ending == "rollback":
        assert answer.result() in {"true", "completed", "queued"}
    elif second in MANY:
        assert answer.result() == "invalid_lease"
    else:
        with colleague.refusing("LJ004"):
            answer.result()
    winner = first if ending == "commit" else second
    assert owner.rows("select outcome from attempt") == [
        ("succeeded" if winner in COMPLETES else "retried",)
    ]
    assert owner.value("select count(*) from live_job") == (winner in FAILS)


@pytest.mark.parametrize("verb", COMPLETES)
def test_a_renewal_that_waited_for_a_complete_fails_as_the_lease_has_ended(
    verb, enqueue, claim, worker, colleague, blocked, background
):
    job_id = enqueue()
    _, token = claim()
    worker.execute("begin")
    worker.execute(COMPLETES[verb], (job_id, token))
    answer = background(colleague.value, ONE["renew"], job_id, token)
    blocked(colleague, worker)
    worker.execute("commit")

    with colleague.refusing("LJ004"):
        answer.result()
