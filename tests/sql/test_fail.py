from datetime import timedelta
from uuid import uuid4

import pytest

FAIL = "select * from fail(%s::uuid, %s, %s, %s::boolean)"
AFTER = "select * from fail(%s::uuid, %s, %s, %s::boolean, %s::integer)"
RETRYABLE, FINAL = True, False
NO_TOKEN = "job_lease_" + 64 * "0"
CODES = ("c", "c" * 128, "AZaz09._:/-", "smtp/550:mailbox.full", "-")
BAD_CODES = (
    None,
    "",
    "c" * 129,
    "a b",
    " a",
    "a ",
    "a\n",
    "a\tb",
    "é",
    "a\\b",
    "a;b",
    "a'b",
    "a%b",
    "c" * 100000,
)


@pytest.fixture
def policy(owner):
    """Set the retry policy."""

    def policy(base, most, jitter=0):
        owner.execute(
            "update instance set retry_base_seconds = %s, retry_max_seconds = %s,"
            " retry_jitter = %s",
            (base, most, jitter),
        )

    return policy


@pytest.fixture
def fail_at(owner, enqueue, claim):
    """Fail a job of some attempt. Return the wait, counted from the evidence."""

    def fail_at(attempt, worker):
        enqueue()
        held = claim(session=worker)
        owner.execute(
            "update live_job set attempt = %s, max_attempts = %s where job_id = %s",
            (attempt, attempt + 1, held[0]),
        )
        answer = worker.row(FAIL, *held, "timeout", RETRYABLE)
        assert answer["status"] == "queued"
        ended_at = owner.value(
            "select ended_at from attempt where job_id = %s", held[0]
        )
        return answer["available_at"] - ended_at

    return fail_at


def test_fail_queues_a_retryable_failure_again_with_evidence(
    worker, owner, enqueue, claim
):
    job_id = enqueue()
    held = claim()
    live = owner.row("select * from live_job")
    before = owner.value("select clock_timestamp()")

    answer = worker.row(FAIL, *held, "smtp/550", RETRYABLE)

    after = owner.value("select clock_timestamp()")
    evidence = owner.row("select * from attempt")
    assert answer == {"status": "queued", "available_at": evidence["retry_at"]}
    assert evidence["job_id"] == job_id
    assert evidence["attempt"] == 1
    assert evidence["max_attempts"] == 3
    assert evidence["outcome"] == "retried"
    assert evidence["failure_code"] == "smtp/550"
    assert evidence["retryable"] is True
    assert evidence["worker"] == "email-worker"
    assert evidence["leased_at"] == live["leased_at"]
    assert evidence["lease_token_hash"] == live["lease_token_hash"]
    assert before < evidence["ended_at"] < after
    assert evidence["retry_at"] - evidence["ended_at"] == timedelta(seconds=5)
    assert owner.row("select * from live_job") == live | {
        "available_at": answer["available_at"],
        "leased_at": None,
        "lease_expires_at": None,
        "lease_owner": None,
        "lease_token_hash": None,
        "last_failure_code": "smtp/550",
    }


def test_fail_ends_a_job_that_is_not_to_be_retried(worker, owner, enqueue, claim):
    enqueue()

    answer = worker.row(FAIL, *claim(), "refused", FINAL)

    evidence = owner.row("select * from attempt")
    assert answer == {"status": "failed", "available_at": None}
    assert evidence["outcome"] == "failed"
    assert evidence["failure_code"] == "refused"
    assert evidence["retryable"] is False
    assert evidence["retry_at"] is None
    assert owner.value("select count(*) from live_job") == 0


def test_fail_ends_a_job_on_its_last_attempt_with_the_reported_code(
    worker, owner, enqueue, claim
):
    enqueue(max_attempts=1)

    answer = worker.row(FAIL, *claim(), "timeout", RETRYABLE)

    evidence = owner.row("select * from attempt")
    assert answer == {"status": "failed", "available_at": None}
    assert evidence["outcome"] == "failed"
    assert evidence["failure_code"] == "timeout"
    assert evidence["retryable"] is True
    assert evidence["retry_at"] is None
    assert owner.value("select count(*) from live_job") == 0


def test_fail_lets_a_job_run_max_attempts_times_and_no_more(
    connect, owner, enqueue, make_due
):
    job_id = enqueue(max_attempts=3)
    statuses = []

    for n in range(3):
        worker = connect("email-worker")
        row = worker.row("select * from claim('email')")
        answer = worker.row(FAIL, job_id, row["lease_token"], f"code-{n}", RETRYABLE)
        statuses.append((row["attempt"], answer["status"]))
        make_due(job_id)

    assert statuses == [(1, "queued"), (2, "queued"), (3, "failed")]
    assert connect("email-worker").rows("select * from claim('email')") == []
    assert owner.rows("select attempt, failure_code from attempt order by 1") == [
        (1, "code-0"),
        (2, "code-1"),
        (3, "code-2"),
    ]
    assert owner.value("select last_failure_code from inspect(%s)", job_id) == "code-2"


def test_fail_does_not_let_a_job_be_claimed_before_its_retry(connect, enqueue, claim):
    enqueue()
    worker = connect("email-worker")
    worker.row(FAIL, *claim(session=worker), "timeout", RETRYABLE)

    assert connect("email-worker").rows("select * from claim('email', 10)") == []


def test_fail_leaves_the_code_readable_until_the_end(
    connect, owner, enqueue, make_due, expire
):
    job_id = enqueue()
    read = "select last_failure_code from inspect(%s)"
    codes = [owner.value(read, job_id)]
    worker = connect("email-worker")
    token = worker.value("select lease_token from claim('email')")
    codes.append(owner.value(read, job_id))
    worker.row(FAIL, job_id, token, "timeout", RETRYABLE)
    codes.append(owner.value(read, job_id))
    make_due(job_id)
    worker = connect("email-worker")
    token = worker.value("select lease_token from claim('email')")
    codes.append(owner.value(read, job_id))
    worker.execute("select complete(%s, %s)", (job_id, token))
    codes.append(owner.value(read, job_id))

    assert codes == [None, None, "timeout", "timeout", "timeout"]


def test_fail_doubles_the_wait_and_never_exceeds_its_maximum(worker, policy, fail_at):
    for base, most, waits in [
        (
            5,
            300,
            {
                1: 5,
                2: 10,
                3: 20,
                6: 160,
                7: 300,
                10: 300,
                31: 300,
                32: 300,
                63: 300,
                64: 300,
                99: 300,
                1024: 300,
                2147483646: 300,
            },
        ),
        (1, 86400, {1: 1, 2: 2, 16: 32768, 17: 65536, 18: 86400, 19: 86400, 99: 86400}),
        (86400, 86400, {1: 86400, 2: 86400, 64: 86400}),
        (1, 1, {1: 1, 2: 1, 99: 1}),
        (7, 100, {1: 7, 2: 14, 4: 56, 5: 100, 33: 100}),
    ]:
        policy(base, most)

        measured = {attempt: fail_at(attempt, worker) for attempt in waits}

        assert measured == {n: timedelta(seconds=wait) for n, wait in waits.items()}


def test_fail_waits_as_long_as_the_worker_says_and_never_above_the_maximum(
    worker, owner, policy, enqueue, claim
):
    policy(5, 300, 1)
    waits = {0: 0, 7: 7, 299: 299, 300: 300, 301: 300, 2**31 - 1: 300}

    for after in waits:
        enqueue(key=f"after-{after}")
        answer = worker.row(AFTER, *claim(), "http_429", RETRYABLE, after)
        assert answer["status"] == "queued"
        # The one that waits 0 s would be claimed next.
        owner.execute("delete from live_job")

    assert owner.rows("select retry_at - ended_at from attempt order by ended_at") == [
        (timedelta(seconds=wait),) for wait in waits.values()
    ]


def test_fail_ends_a_job_whatever_wait_the_worker_names(worker, enqueue, claim):
    enqueue(), enqueue(max_attempts=1)

    for retryable in (FINAL, RETRYABLE):
        answer = worker.row(AFTER, *claim(), "refused", retryable, 7)
        assert answer == {"status": "failed", "available_at": None}


def test_fail_repeated_with_another_wait_returns_the_first_result(
    worker, enqueue, claim, state
):
    enqueue()
    held = claim()
    first = worker.row(AFTER, *held, "http_429", RETRYABLE, 7)
    before = state()

    for after in (None, 0, 8):
        assert worker.row(AFTER, *held, "http_429", RETRYABLE, after) == first
    assert state() == before


def test_fail_refuses_a_negative_wait_by_its_name_and_writes_nothing(
    worker, enqueue, claim, state
):
    enqueue()
    held = claim()
    before = state()

    for retryable in (RETRYABLE, FINAL):
        with worker.refusing("LJ005") as caught:
            worker.row(AFTER, *held, "timeout", retryable, -1)
        assert "retry_after_seconds" in caught.value.diag.message_primary

    assert state() == before


def test_fail_spreads_retries_by_the_jitter_and_stays_within_it(
    worker, policy, fail_at
):
    policy(100, 400, 0.5)

    first = [fail_at(1, worker) for _ in range(20)]
    late = [fail_at(40, worker) for _ in range(20)]

    assert all(
        timedelta(seconds=50) <= wait <= timedelta(seconds=100) for wait in first
    )
    assert all(
        timedelta(seconds=200) <= wait <= timedelta(seconds=400) for wait in late
    )
    assert len(set(first)) == 20
    assert max(late) - min(late) > timedelta(seconds=20)


def test_fail_never_lets_a_full_jitter_reach_into_the_past(worker, policy, fail_at):
    policy(100, 400, 1)

    waits = [fail_at(1, worker) for _ in range(20)]

    assert all(timedelta(0) <= wait <= timedelta(seconds=100) for wait in waits)
    assert len(set(waits)) == 20


def test_fail_counts_the_wait_from_the_clock_not_the_transactions_start(
    worker, owner, enqueue, claim
):
    enqueue()
    held = claim()

    with worker.transaction():
        worker.execute("select 1")
        passed = owner.value("select clock_timestamp()")
        answer = worker.row(FAIL, *held, "timeout", RETRYABLE)

    assert answer["available_at"] > passed + timedelta(seconds=5)


def test_fail_accepts_a_code_of_1_to_128_plain_characters(
    worker, owner, enqueue, claim
):
    for n, code in enumerate(CODES):
        enqueue(key=f"code-{n}")
        worker.row(FAIL, *claim(), code, FINAL)

    codes = owner.rows("select failure_code from attempt order by ended_at")
    assert codes == [(code,) for code in CODES]


def test_fail_refuses_a_malformed_code_by_its_name_and_writes_nothing(
    worker, enqueue, claim, state
):
    enqueue()
    held = claim()
    before = state()

    for code in BAD_CODES:
        for retryable in (True, False):
            with worker.refusing("LJ005") as caught:
                worker.row(FAIL, *held, code, retryable)
            assert "failure_code" in caught.value.diag.message_primary, code

    assert state() == before


def test_fail_refuses_a_null_mark_by_its_name_and_writes_nothing(
    worker, enqueue, claim, state
):
    enqueue()
    held = claim()
    before = state()

    with worker.refusing("LJ005") as caught:
        worker.row(FAIL, *held, "timeout", None)

    assert "retryable" in caught.value.diag.message_primary
    assert state() == before


def test_fail_refuses_an_argument_before_a_lease(worker):
    for code, retryable in (("a b", True), (None, None), ("timeout", None)):
        with worker.refusing("LJ005"):
            worker.row(FAIL, uuid4(), NO_TOKEN, code, retryable)
        with worker.refusing("LJ005"):
            worker.row(FAIL, None, None, code, retryable)


def test_fail_refuses_a_stale_lease_and_does_not_revive_a_job_that_failed(
    connect, enqueue, claim, expire, state
):
    job_id = enqueue(max_attempts=2)
    stale, fresh = connect("email-worker"), connect("spare-worker")
    held = claim(session=stale)
    expire(job_id)
    fresh.row(FAIL, *claim(session=fresh), "last", RETRYABLE)
    before = state()

    for statement in (
        "select fail(%s, %s, 'old', true)",
        "select fail(%s, %s, 'last', true)",
        "select complete(%s, %s)",
        "select renew(%s, %s)",
    ):
        with stale.refusing("LJ004"):
            stale.execute(statement, held)

    assert state() == before
    assert connect("email-worker").rows("select * from claim('email')") == []


def test_fail_repeated_returns_the_first_result_and_changes_nothing(
    worker, enqueue, claim, state
):
    for max_attempts in (3, 1):
        for retryable in (True, False):
            enqueue(max_attempts=max_attempts)
            arguments = (*claim(), "timeout", retryable)
            first = worker.row(FAIL, *arguments)
            before = state()

            assert worker.row(FAIL, *arguments) == first
            assert worker.row(FAIL, *arguments) == first

            assert state() == before


def test_fail_repeated_returns_the_first_result_in_every_later_state(
    connect, owner, enqueue, claim, make_due
):
    job_id = enqueue()
    worker = connect("email-worker")
    held = claim(session=worker)
    first = worker.row(FAIL, *held, "timeout", RETRYABLE)
    answers = []

    make_due(job_id)
    answers.append(worker.row(FAIL, *held, "timeout", RETRYABLE))
    fresh = connect("email-worker")
    again = claim(session=fresh)
    answers.append(worker.row(FAIL, *held, "timeout", RETRYABLE))
    fresh.row(FAIL, *again, "refused", FINAL)
    answers.append(worker.row(FAIL, *held, "timeout", RETRYABLE))

    assert answers == [first] * 3


@pytest.mark.parametrize("retryable", [True, False])
def test_fail_repeated_otherwise_is_an_invalid_lease(
    connect, enqueue, claim, state, retryable
):
    enqueue()
    worker, rival = connect("email-worker"), connect("spare-worker")
    job_id, token = claim(session=worker)
    worker.row(FAIL, job_id, token, "timeout", retryable)
    before = state()

    for session, *arguments in (
        (worker, job_id, token, "other", retryable),
        (worker, job_id, token, "Timeout", retryable),
        (worker, job_id, token, "timeout", not retryable),
        (worker, job_id, NO_TOKEN, "timeout", retryable),
        (worker, uuid4(), token, "timeout", retryable),
        (rival, job_id, token, "timeout", retryable),
    ):
        with session.refusing("LJ004"):
            session.row(FAIL, *arguments)

    assert state() == before


def test_fail_refuses_a_last_lease_that_ran_out_with_any_code(
    connect, enqueue, claim, expire, state
):
    job_id = enqueue(max_attempts=1)
    worker = connect("email-worker")
    held = claim(session=worker)
    expire(job_id)
    connect("spare-worker").execute("select claim('email')")
    before = state()

    for code in ("timeout", "attempts_exhausted"):
        for retryable in (True, False):
            with worker.refusing("LJ004"):
                worker.row(FAIL, *held, code, retryable)

    assert state() == before


@pytest.mark.parametrize(
    "settings",
    [
        "set standard_conforming_strings to off; set escape_string_warning to off",
        "set bytea_output to 'escape'; set timezone to 'Asia/Kathmandu'",
        "set intervalstyle to 'sql_standard'; set datestyle to 'ISO, DMY'",
        "set default_transaction_isolation to 'serializable'",
        "set extra_float_digits to -15",
        "set search_path to pg_temp, jobs_email",
    ],
)
def test_fail_returns_the_same_under_any_setting_of_the_session(
    worker, fail_at, settings
):
    worker.execute(settings)

    assert fail_at(3, worker) == timedelta(seconds=20)
    for code in ("a\\b", "a b", "d\n"):
        with worker.refusing("LJ005"):
            worker.row(FAIL, uuid4(), NO_TOKEN, code, RETRYABLE)
