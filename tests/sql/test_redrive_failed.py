from datetime import timedelta

import pytest

REDRIVE = "select redrive_failed(%s, %s::timestamptz, %s, %s, %s::integer, %s::integer)"
EVER = "2000-01-01"


@pytest.fixture
def redrive(operator):
    def redrive(session=operator, **changes):
        given = {
            "queue": "email",
            "since": EVER,
            "before": None,
            "code": None,
            "limit": 100,
            "extra": 1,
        } | changes
        return session.value(REDRIVE, *given.values())

    return redrive


@pytest.fixture
def fail(enqueue, claim, worker):
    """Enqueue a job, claim it and fail it permanently."""

    def fail(code="refused", queue="email"):
        enqueue(queue=queue)
        job_id, token = claim(queue)
        worker.execute("select fail(%s, %s, %s, false)", (job_id, token, code))
        return job_id

    return fail


@pytest.fixture
def live(owner):
    def live():
        return {job_id for (job_id,) in owner.rows("select job_id from live_job")}

    return live


def test_failed_jobs_are_queued_again_with_their_history(redrive, fail, owner, worker):
    job_id = fail()
    other = fail(queue="slow")

    assert redrive(extra=2) == 1

    assert (
        owner.row("select * from inspect(%s)", job_id).items()
        >= {
            "status": "queued",
            "attempts": 1,
            "max_attempts": 3,
            "last_failure_code": "refused",
        }.items()
    )
    assert owner.value("select status from inspect(%s)", other) == "failed"
    assert worker.value("select attempt from claim('email')") == 2


def test_jobs_fall_due_evenly_over_the_time_given_oldest_failure_first(
    fail, operator, owner, worker, enqueue
):
    failed = [fail() for _ in range(4)]
    before = owner.value("select clock_timestamp()")

    taken = operator.value(
        "select redrive_failed('email', 'epoch', p_over_seconds => 400)"
    )

    after = owner.value("select clock_timestamp()")
    rows = owner.rows("select job_id, available_at from live_job order by available_at")
    assert taken == 4
    assert [job_id for job_id, _ in rows] == failed
    for number, (_, due) in enumerate(rows):
        late = timedelta(seconds=100 * number)
        assert before + late <= due <= after + late
    fresh = enqueue()
    claimed = worker.rows("select job_id from claim('email', 10)")
    assert claimed == [(failed[0],), (fresh,)]


@pytest.mark.parametrize("seconds", [None, -1, 86401])
def test_a_time_out_of_range_is_refused(fail, operator, state, seconds):
    fail()
    before = state()

    with operator.refusing("LJ007") as caught:
        operator.execute(
            "select redrive_failed('email', 'epoch', p_over_seconds => %s::integer)",
            (seconds,),
        )

    assert "over_seconds must be from 0 to 86400" in caught.value.diag.message_primary
    assert state() == before


def test_only_those_with_the_code_are_taken(redrive, fail, live):
    fail("refused")
    timed_out = fail("timeout")

    assert redrive(code="timeout") == 1
    assert live() == {timed_out}


def test_only_those_that_failed_in_the_time_are_taken(redrive, fail, live, owner):
    jobs = fail(), fail(), fail()
    _, since, before = (
        owner.value("select ended_at from attempt where job_id = %s", job_id)
        for job_id in jobs
    )

    assert redrive(since=since, before=before) == 1
    assert live() == {jobs[1]}


def test_those_that_failed_first_are_taken_first(redrive, fail, live, owner):
    third, second, first = fail(), fail(), fail()
    # Asked for, and not what an index happens to give.
    owner.execute("drop index attempt_failed_idx, attempt_ended_at_idx")
    for age, job_id in enumerate((third, second, first)):
        owner.execute(
            "update attempt set ended_at = ended_at - make_interval(mins => %s)"
            " where job_id = %s",
            (age, job_id),
        )

    assert redrive(limit=2) == 2
    assert live() == {first, second}
    assert redrive(limit=2) == 1
    assert live() == {first, second, third}
    assert redrive(limit=2) == 0


def test_it_is_the_last_attempt_that_counts(redrive, fail, worker, claim, owner):
    again = fail("a")
    redrive()
    worker.execute("select fail(%s, %s, 'b', false)", claim())
    once = fail("b")

    assert redrive(code="a") == 0
    assert redrive(code="b", extra=5) == 2
    assert set(owner.rows("select job_id, attempt, max_attempts from live_job")) == {
        (again, 2, 7),
        (once, 1, 6),
    }


def test_nothing_of_the_limit_is_spent_on_jobs_that_ended_well(
    redrive, fail, enqueue, claim, worker, live
):
    enqueue()
    worker.execute("select complete(%s, %s)", claim())
    job_id = fail()

    assert redrive(limit=1) == 1
    assert live() == {job_id}


def test_jobs_are_due_from_the_moment_they_are_queued_again(
    redrive, fail, operator, owner
):
    fail()
    with operator.transaction():
        operator.execute("select")
        began = operator.value(
            "select t from clock_timestamp() as t, lateral redrive_failed("
            "'email', 'epoch', t) as count where count = 1"
        )

    assert owner.value("select available_at > %s from live_job", began)


@pytest.mark.usefixtures("read_committed")
@pytest.mark.parametrize("ending", ["still queued", "succeeded", "failed"])
def test_a_job_that_another_redrive_took_meanwhile_is_left_as_it_is(
    redrive,
    fail,
    gated_evidence,
    connect,
    operator,
    worker,
    claim,
    blocked,
    background,
    observer,
    ending,
):
    job_id = fail()
    admin = connect()
    admin.execute("select pg_advisory_lock(1)")
    answer = background(redrive)
    blocked(operator, admin)

    admin.execute("select redrive(%s)", (job_id,))
    if ending == "succeeded":
        worker.execute("select complete(%s, %s)", claim())
    elif ending == "failed":
        worker.execute("select fail(%s, %s, 'again', false)", claim())
    admin.execute("select pg_advisory_unlock(1)")

    assert answer.result() == (ending == "failed")
    assert (
        observer.row("select status, attempts from inspect(%s)", job_id)
        == {
            "still queued": {"status": "queued", "attempts": 1},
            "succeeded": {"status": "succeeded", "attempts": 2},
            "failed": {"status": "queued", "attempts": 2},
        }[ending]
    )


def test_neither_ended_well_nor_live_jobs_are_taken(
    redrive, fail, enqueue, claim, worker, state, operator
):
    job_id = fail()
    assert redrive() == 1
    worker.execute("select complete(%s, %s)", claim())
    enqueue()
    enqueue()
    claim()
    before = state()

    assert redrive() == 0

    after = state()
    assert {k: after[k] for k in ("job", "live_job", "attempt")} == {
        k: before[k] for k in ("job", "live_job", "attempt")
    }
    assert job_id


def test_jobs_that_ran_out_of_leases_are_taken(
    redrive, enqueue, claim, expire, operator, live
):
    job_id = enqueue(max_attempts=1)
    claim()
    expire(job_id)
    operator.execute("select retire_expired()")

    assert redrive(code="attempts_exhausted") == 1
    assert live() == {job_id}


def test_a_job_that_another_session_holds_is_passed_over(
    redrive, fail, owner, live, connect
):
    first, second = fail(), fail()
    with owner.transaction():
        owner.execute("select from job where job_id = %s for update", (first,))
        assert redrive() == 1

    assert live() == {second}


@pytest.mark.usefixtures("read_committed")
def test_two_redrives_at_once_take_each_job_once(
    redrive, fail, connect, prefix, live, owner
):
    jobs = {fail() for _ in range(4)}
    other = connect(f"{prefix}_duty")
    with other.transaction():
        assert redrive(session=other, limit=2) == 2
        assert redrive() == 2

    assert live() == jobs
    assert owner.value("select sum(job_count) from operator_act") == 4


def test_the_act_is_on_record(redrive, fail, operator):
    fail()
    redrive(extra=7, code="refused")

    assert operator.row(
        "select operator, act, job_count, arguments ->> 'failure_code' as code,"
        " arguments ->> 'extra_attempts' as extra from inspect_acts(1)"
    ) == {
        "operator": operator.info.user,
        "act": "redrive_failed",
        "job_count": 1,
        "code": "refused",
        "extra": "7",
    }


def test_waiting_workers_are_woken_once_if_there_is_anything(
    redrive, fail, connect, owner
):
    for _ in range(3):
        fail()
    waiting = connect("email-worker")
    waiting.execute("listen jobs_email")
    waiting.execute("select pg_try_advisory_lock_shared(wait_key('email'))")

    assert [redrive(code="other"), redrive()] == [0, 3]
    owner.execute("notify jobs_email, 'no more'")

    heard = [n.payload for n in waiting.notifies(timeout=5, stop_after=2)]
    assert heard == ["email", "no more"]


@pytest.mark.parametrize(
    ("changes", "sqlstate", "word"),
    [
        ({"queue": None}, "LJ003", "queue"),
        ({"queue": "nope"}, "LJ003", "queue"),
        ({"since": None}, "LJ007", "since"),
        ({"code": ""}, "LJ005", "failure_code must be 1 to 128 characters"),
        ({"code": "c" * 129}, "LJ005", "failure_code"),
        ({"limit": None}, "LJ007", "limit must be from 1 to 10000"),
        ({"limit": 0}, "LJ007", "limit"),
        ({"limit": 10001}, "LJ007", "limit"),
        ({"extra": None}, "LJ007", "extra_attempts must be from 1 to 100"),
        ({"extra": 0}, "LJ007", "extra_attempts"),
        ({"extra": 101}, "LJ007", "extra_attempts"),
    ],
)
def test_an_argument_out_of_range_is_refused_and_nothing_is_written(
    redrive, fail, state, operator, changes, sqlstate, word
):
    fail()
    before = state()

    with operator.refusing(sqlstate) as caught:
        redrive(**changes)

    assert word in str(caught.value)
    assert state() == before


def test_a_value_at_its_bound_is_accepted(redrive):
    for changes in ({"limit": 1}, {"limit": 10000}, {"extra": 1}, {"extra": 100}):
        assert redrive(**changes) == 0, changes


# enforce_retention


@pytest.fixture
def ended(owner, enqueue, claim, worker):
    """Complete a job, as of some seconds ago."""

    def ended(seconds):
        enqueue()
        job_id, token = claim()
        worker.execute("select complete(%s, %s)", (job_id, token))
        owner.execute(
            "update attempt set ended_at = clock_timestamp()"
            " - make_interval(secs => %s) where job_id = %s",
            (seconds, job_id),
        )
        return job_id

    return ended


def test_retention_purges_jobs_that_ended_before_it(ended, configure, operator, owner):
    configure(retention_seconds=3600)
    ended(3700)
    kept = ended(3500)

    assert operator.value("select enforce_retention()") == 1
    assert owner.rows("select job_id from job") == [(kept,)]
    assert operator.value("select act from inspect_acts(1)") == "purge"


def test_retention_is_bounded_by_its_limit(ended, configure, operator):
    configure(retention_seconds=60)
    for _ in range(3):
        ended(100)

    assert [operator.value("select enforce_retention(2)") for _ in range(3)] == [
        2,
        1,
        0,
    ]


def test_retention_goes_by_the_clock_and_not_by_when_the_transaction_began(
    ended, configure, operator, owner
):
    configure(retention_seconds=1)
    job_id = ended(0)
    soon = owner.value(
        "update attempt set ended_at = clock_timestamp() - interval '900 ms'"
        " where job_id = %s returning ended_at + interval '1 s'",
        job_id,
    )

    assert (
        operator.row("select pg_sleep_until(%s), enforce_retention() as count", soon)[
            "count"
        ]
        == 1
    )


def test_a_retention_takes_a_limit_at_its_bound(operator):
    assert operator.rows("select enforce_retention(1), enforce_retention(10000)") == [
        (0, 0)
    ]


def test_without_a_retention_nothing_is_purged(ended, operator, state):
    ended(10**9)
    before = state()

    assert operator.value("select enforce_retention()") == 0
    assert state() == before


@pytest.mark.parametrize("limit", [None, 0, 10001])
@pytest.mark.parametrize("seconds", [..., 60])
def test_a_retention_with_a_limit_out_of_range_is_refused(
    operator, configure, limit, seconds
):
    if seconds is not ...:
        configure(retention_seconds=seconds)
    with operator.refusing("LJ007"):
        operator.execute("select enforce_retention(%s::integer)", (limit,))


def test_failures_of_one_kind_are_listed_and_redriven_alone(
    enqueue, claim, worker, operator, live
):
    jobs = {"send": [], "call": []}
    for kind in ("send", "call", "send", "call"):
        jobs[kind].append(enqueue(kind=kind))
        worker.execute("select fail(%s, %s, 'refused', false)", claim())
    failures = "select job_id from inspect_failures(%s, p_kind => %s)"
    redrive = "select redrive_failed('email', 'epoch', p_kind => %s, p_limit => %s)"

    for queue in ("email", None):
        found = operator.rows(failures, queue, "call")
        assert [job_id for (job_id,) in found] == jobs["call"][::-1]
    assert operator.rows(failures, "email", "other") == []
    assert operator.value(redrive, "send", 1) == 1
    assert live() == {jobs["send"][0]}
    assert operator.value(redrive, "send", 100) == 1
    assert live() == set(jobs["send"])
    for statement in (
        "select inspect_failures(p_kind => 'a b')",
        "select redrive_failed('email', 'epoch', p_kind => 'a b')",
    ):
        with operator.refusing("LJ007"):
            operator.execute(statement)
