from datetime import timedelta
from uuid import uuid4

import pytest

RELEASE = "select * from release(%s, %s, %s::integer)"
MANY = "select * from release_many(%s::uuid[], %s::text[], %s::integer[])"
NO_TOKEN = "job_lease_" + 64 * "0"


@pytest.fixture
def release_one(request):
    """Release one lease through either verb; returns (outcome, available_at)."""

    def by_one(session, job_id, token, delay=0):
        row = session.row(RELEASE, job_id, token, delay)
        return row["status"], row["available_at"]

    def by_many(session, job_id, token, delay=0):
        row = session.row(MANY, [job_id], [token], [delay])
        assert (row["position"], row["job_id"]) == (1, job_id)
        return row["outcome"], row["available_at"]

    return by_one if request.param == "release" else by_many


EITHER = pytest.mark.parametrize(
    "release_one", ["release", "release_many"], indirect=True
)


@EITHER
def test_release_queues_the_job_at_its_old_place_with_one_attempt_more(
    worker, owner, enqueue, claim, release_one
):
    first, _ = enqueue(max_attempts=1), enqueue()
    due = owner.value("select available_at from live_job where job_id = %s", first)
    held = claim()

    assert release_one(worker, *held) == ("queued", due)

    assert owner.rows(
        "select available_at, attempt, max_attempts, leased_at, lease_expires_at,"
        " lease_owner, lease_token_hash, last_failure_code from live_job"
        " where job_id = %s",
        first,
    ) == [(due, 1, 2, None, None, None, None, None)]
    again = worker.row("select * from claim('email')")
    assert (again["job_id"], again["attempt"], again["max_attempts"]) == (first, 2, 2)


@EITHER
def test_release_with_a_delay_queues_the_job_for_that_many_seconds_later(
    worker, owner, enqueue, claim, release_one
):
    job_id = enqueue()
    before = owner.value("select clock_timestamp()")

    outcome, due = release_one(worker, *claim(), 3600)

    after = owner.value("select clock_timestamp()")
    hour = timedelta(hours=1)
    assert outcome == "queued"
    assert before + hour <= due <= after + hour
    assert worker.rows("select * from claim('email')") == []
    assert worker.value("select next_available_at('email')") == due
    assert owner.value("select retry_at - ended_at from attempt") == hour
    assert owner.value("select available_at from live_job where job_id = %s", job_id)


@EITHER
def test_release_records_an_attempt_that_is_not_a_failure(
    worker, owner, observer, enqueue, claim, release_one
):
    job_id = enqueue(max_attempts=1)
    token_hash = "sha256(convert_to(%s, 'UTF8'))"
    held = claim()

    _, due = release_one(worker, *held, 60)

    assert owner.row(
        "select attempt, max_attempts, worker, outcome, failure_code, retryable,"
        f" retry_at, lease_token_hash = {token_hash} as is_hash, leased_at < ended_at"
        " as is_after from attempt where job_id = %s",
        held[1],
        job_id,
    ) == {
        "attempt": 1,
        "max_attempts": 1,
        "worker": "email-worker",
        "outcome": "released",
        "failure_code": None,
        "retryable": None,
        "retry_at": due,
        "is_hash": True,
        "is_after": True,
    }
    seen = observer.row("select * from inspect(%s)", job_id)
    assert (seen["status"], seen["attempts"], seen["max_attempts"]) == ("queued", 1, 2)
    assert seen["last_failure_code"] is None
    assert observer.value("select outcome from inspect_attempts(%s)", job_id) == (
        "released"
    )
    assert observer.value("select reason from explain_job(%s)", job_id) == "scheduled"
    queue = observer.row("select * from inspect_queues() where queue = 'email'")
    assert (queue["scheduled"], queue["retry_waiting"]) == (1, 0)
    assert (queue["failed"], queue["failure_codes"]) == (0, {})
    assert observer.rows("select * from inspect_failures()") == []


@EITHER
def test_release_keeps_the_code_of_an_earlier_failure_without_waiting_for_a_retry(
    worker, observer, enqueue, claim, make_due, release_one
):
    job_id = enqueue()
    worker.execute("select fail(%s, %s, 'timeout', true)", claim())
    make_due(job_id)

    release_one(worker, *claim(), 60)

    assert observer.row(
        "select status, last_failure_code from inspect(%s)", job_id
    ) == {"status": "queued", "last_failure_code": "timeout"}
    assert observer.value("select reason from explain_job(%s)", job_id) == "scheduled"


@EITHER
def test_a_released_job_uses_up_all_its_attempts_and_no_more(
    worker, owner, enqueue, claim, release_one
):
    job_id = enqueue(max_attempts=2)

    for outcome in ("release", "fail", "release", "release", "fail"):
        held = claim()
        if outcome == "release":
            release_one(worker, *held)
        else:
            worker.execute("select fail(%s, %s, 'c', true)", held)
            owner.execute("update live_job set available_at = clock_timestamp()")

    assert owner.rows("select * from live_job") == []
    assert owner.rows(
        "select attempt, max_attempts, outcome from attempt where job_id = %s"
        " order by attempt",
        job_id,
    ) == [
        (1, 2, "released"),
        (2, 3, "retried"),
        (3, 3, "released"),
        (4, 4, "released"),
        (5, 5, "failed"),
    ]


@EITHER
def test_release_repeated_under_the_same_lease_returns_the_same(
    worker, enqueue, claim, state, make_due, release_one
):
    job_id = enqueue()
    for delay in (0, 60):
        held = claim()
        first = release_one(worker, *held, delay)
        before = state()

        assert release_one(worker, *held, delay) == first
        assert state() == before

        make_due(job_id)
        again = claim()
        assert release_one(worker, *held, delay) == first
        worker.execute("select release(%s, %s)", again)


@EITHER
def test_release_after_another_end_under_the_same_lease_is_an_invalid_lease(
    worker, enqueue, claim, state, release_one
):
    enqueue()
    enqueue()
    for end in ("complete(%s, %s)", "fail(%s, %s, 'c', true)"):
        held = claim()
        worker.execute(f"select {end}", held)
        before = state()

        refused(release_one, worker, "invalid_lease", *held)

        assert state() == before


def refused(release_one, session, outcome, job_id, token, delay=0):
    if "by_one" in release_one.__qualname__:
        code = {"invalid_lease": "LJ004", "invalid_argument": "LJ007"}[outcome]
        with session.refusing(code) as caught:
            release_one(session, job_id, token, delay)
        if token:
            assert token not in str(caught.value)
    else:
        assert release_one(session, job_id, token, delay) == (outcome, None)


@EITHER
@pytest.mark.parametrize("delay", [None, -1, 86401, 2147483647])
def test_release_refuses_a_delay_that_is_not_0_to_86400_seconds(
    worker, enqueue, claim, state, release_one, delay
):
    enqueue()
    held = claim()
    before = state()

    refused(release_one, worker, "invalid_argument", *held, delay)
    refused(release_one, worker, "invalid_argument", uuid4(), NO_TOKEN, delay)
    assert state() == before

    assert release_one(worker, *held, 86400)[0] == "queued"
    refused(release_one, worker, "invalid_argument", *held, delay)


@pytest.mark.slow
@EITHER
def test_release_refuses_a_job_that_was_released_100_times(
    worker, owner, enqueue, claim, state, release_one
):
    enqueue(max_attempts=100)
    for _ in range(100):
        held = claim()
        assert release_one(worker, *held)[0] == "queued"
    last = claim()
    before = state()

    refused(release_one, worker, "invalid_argument", *last)

    assert state() == before
    assert release_one(worker, *held)[0] == "queued"
    assert worker.value("select complete(%s, %s)", *last) is True
    assert owner.value("select count(*) from attempt where outcome = 'released'") == 100


def test_release_many_returns_an_outcome_for_each_item_in_input_order(
    worker, owner, enqueue, claim
):
    for number in range(4):
        enqueue(key=f"key-{number}")
    (a, b, c, d), tokens = zip(*(claim() for _ in range(4)), strict=True)
    tokens = dict(zip((a, b, c, d), tokens, strict=True))
    stranger = uuid4()

    rows = worker.rows(
        MANY,
        [d, stranger, b, a, b, c],
        [tokens[d], NO_TOKEN, tokens[b], tokens[a], tokens[b], NO_TOKEN],
        [0, 0, 60, -1, 0, 0],
    )

    assert [row[:3] for row in rows] == [
        (1, d, "queued"),
        (2, stranger, "invalid_lease"),
        (3, b, "queued"),
        (4, a, "invalid_argument"),
        (5, b, "queued"),
        (6, c, "invalid_lease"),
    ]
    assert rows[4][3] == rows[2][3] > rows[0][3]
    assert owner.rows(
        "select job_id, lease_owner is null from live_job order by job_id"
    ) == [(a, False), (b, True), (c, False), (d, True)]


@pytest.mark.slow
def test_release_many_releases_a_thousand(worker, owner, producer):
    producer.execute(
        "select count(*) from generate_series(1, 1000) as n,"
        " lateral enqueue('email', 'send', '{}', 'key-' || n)"
    )
    rows = worker.rows("select job_id, lease_token from claim('email', 1000)")

    released = worker.rows(
        MANY, [row[0] for row in rows], [row[1] for row in rows], [0] * 1000
    )

    assert [row[:3] for row in released] == [
        (n, row[0], "queued") for n, row in enumerate(rows, 1)
    ]
    again = worker.rows("select job_id from claim('email', 1000)")
    assert again == [(row[0],) for row in rows]


@EITHER
def test_release_wakes_a_waiting_worker(worker, connect, enqueue, claim, release_one):
    enqueue()
    held = claim()
    waiting = connect("spare-worker")
    key = waiting.value("select wait_key('email')")
    waiting.execute("select pg_try_advisory_lock_shared(%s)", (key,))
    waiting.execute("listen jobs_email")

    release_one(worker, *held)

    assert [n.payload for n in waiting.notifies(timeout=5, stop_after=1)] == ["email"]
