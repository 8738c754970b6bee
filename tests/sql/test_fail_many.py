from datetime import timedelta
from uuid import uuid4

import pytest

MANY = "select * from fail_many(%s::uuid[], %s::text[], %s::text[], %s::boolean[])"
NO_TOKEN = "job_lease_" + 64 * "0"


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_fail_many_queues_every_job_again_and_returns_in_input_order(
    worker, owner, lease_many, count
):
    job_ids, tokens = lease_many(count)
    job_ids.reverse()
    tokens.reverse()
    codes = [f"code-{n}" for n in range(count)]

    answers = worker.rows(MANY, job_ids, tokens, codes, [True] * count)

    assert [row[:3] for row in answers] == [
        (n, job_id, "queued") for n, job_id in enumerate(job_ids, 1)
    ]
    evidence = owner.rows(
        "select job_id, failure_code, retry_at, retry_at - ended_at,"
        " outcome, retryable,"
        " worker, attempt, max_attempts from attempt order by job_id desc"
    )
    assert evidence == [
        (
            *(row[1], code, row[3], timedelta(seconds=5)),
            *("retried", True, "email-worker", 1, 3),
        )
        for row, code in zip(answers, codes, strict=True)
    ]
    assert owner.rows(
        "select job_id, available_at, last_failure_code from live_job"
        " where lease_owner is null order by job_id desc"
    ) == [(row[1], row[3], code) for row, code in zip(answers, codes, strict=True)]


def test_fail_many_names_its_columns(worker, lease_many):
    row = worker.row(MANY, *lease_many(1), ["timeout"], [True])

    assert list(row) == ["position", "job_id", "outcome", "available_at"]


def test_fail_many_ends_jobs_that_are_not_retryable_or_out_of_attempts(
    worker, owner, lease_many
):
    (first, second, third), tokens = lease_many(3)
    owner.execute("update live_job set max_attempts = 1 where job_id = %s", (third,))

    answers = worker.rows(
        MANY, [first, second, third], tokens, ["a", "b", "c"], [True, False, True]
    )

    assert [row[2] for row in answers] == ["queued", "failed", "failed"]
    assert [row[3] is None for row in answers] == [False, True, True]
    assert owner.rows("select job_id from live_job") == [(first,)]
    assert owner.rows(
        "select outcome, failure_code, retryable, retry_at is null from attempt"
        " order by job_id"
    ) == [
        ("retried", "a", True, False),
        ("failed", "b", False, True),
        ("failed", "c", True, True),
    ]


def test_fail_many_waits_as_long_as_each_item_says(worker, owner, lease_many):
    waits = {0: 0, 7: 7, 301: 300, 2**31 - 1: 300, None: 5}
    held, count = lease_many(len(waits) + 1), len(waits)

    answers = worker.rows(
        "select * from fail_many(%s::uuid[], %s, %s, %s, %s::integer[])",
        *held,
        ["http_429"] * (count + 1),
        [True] * (count + 1),
        [*waits, -1],
    )

    assert [row[2] for row in answers] == ["queued"] * count + ["invalid_failure"]
    assert owner.rows(
        "select retry_at, retry_at - ended_at from attempt order by job_id"
    ) == [
        (row[3], timedelta(seconds=wait))
        for row, wait in zip(answers, waits.values(), strict=False)
    ]
    assert (
        owner.value("select count(*) from live_job where lease_owner is not null") == 1
    )


def test_fail_many_doubles_the_wait_and_never_exceeds_its_maximum(
    worker, owner, lease_many
):
    attempts = [1, 2, 3, 10, 31, 32, 63, 64, 99, 2147483646]
    job_ids, tokens = lease_many(len(attempts))
    for job_id, attempt in zip(job_ids, attempts, strict=True):
        owner.execute(
            "update live_job set attempt = %s, max_attempts = 2147483647"
            " where job_id = %s",
            (attempt, job_id),
        )

    worker.rows(MANY, job_ids, tokens, ["c"] * 10, [True] * 10)

    waits = owner.rows(
        "select attempt, retry_at - ended_at from attempt order by job_id"
    )
    expected = [5, 10, 20, 300, 300, 300, 300, 300, 300, 300]
    assert waits == [
        (n, timedelta(seconds=s)) for n, s in zip(attempts, expected, strict=True)
    ]


def test_fail_many_spreads_retries_by_the_jitter_and_stays_within_it(
    worker, owner, lease_many
):
    owner.execute("update instance set retry_base_seconds = 100, retry_jitter = 0.5")
    held = lease_many(50)

    worker.rows(MANY, *held, ["c"] * 50, [True] * 50)

    waits = [w for (w,) in owner.rows("select retry_at - ended_at from attempt")]
    assert all(
        timedelta(seconds=50) <= wait <= timedelta(seconds=100) for wait in waits
    )
    assert len(set(waits)) == 50


def test_fail_many_returns_item_by_item_and_spoils_no_other(
    worker, owner, lease_many, expire
):
    (first, expired, done, last), tokens = lease_many(4)
    expire(expired)
    worker.execute("select complete(%s, %s)", (done, tokens[2]))
    unknown = uuid4()

    answers = worker.rows(
        MANY,
        [first, expired, done, last, last, unknown, None, last, last],
        [*tokens, tokens[0], NO_TOKEN, tokens[0], None, NO_TOKEN],
        ["timeout"] * 9,
        [True] * 9,
    )

    assert [row[:3] for row in answers] == [
        (1, first, "queued"),
        (2, expired, "invalid_lease"),
        (3, done, "invalid_lease"),
        (4, last, "queued"),
        (5, last, "invalid_lease"),
        (6, unknown, "invalid_lease"),
        (7, None, "invalid_lease"),
        (8, last, "invalid_lease"),
        (9, last, "invalid_lease"),
    ]
    assert [row[0] for row in answers if row[3] is not None] == [1, 4]
    assert owner.rows("select job_id, outcome from attempt order by job_id") == [
        (first, "retried"),
        (done, "succeeded"),
        (last, "retried"),
    ]
    assert owner.rows("select job_id from live_job where lease_owner is not null") == [
        (expired,)
    ]


def test_fail_many_returns_invalid_failure_before_invalid_lease(
    worker, owner, lease_many
):
    (first, second), tokens = lease_many(2)
    bad = [None, "", "c" * 129, "a b", "a\n", "é", "a\\b"]
    count = len(bad)

    answers = worker.rows(
        MANY,
        [first] * count + [first, uuid4(), None, second],
        [tokens[0]] * count + [tokens[0], NO_TOKEN, None, tokens[1]],
        [*bad, "timeout", "a b", None, "c" * 128],
        [True] * count + [None, True, None, False],
    )

    assert [row[2] for row in answers] == ["invalid_failure"] * (count + 3) + ["failed"]
    assert {row[3] for row in answers} == {None}
    assert owner.rows("select job_id from attempt") == [(second,)]
    live = owner.row("select job_id, lease_owner from live_job")
    assert live == {"job_id": first, "lease_owner": "email-worker"}


def test_fail_many_takes_an_item_given_twice_once_and_returns_it_twice(
    worker, owner, lease_many
):
    (job_id,), (token,) = lease_many(1)

    answers = worker.rows(
        MANY,
        [job_id] * 4,
        [token] * 4,
        ["first", "first", "second", "first"],
        [True, True, True, False],
    )

    assert [row[2] for row in answers] == [
        "queued",
        "queued",
        "invalid_lease",
        "invalid_lease",
    ]
    assert answers[0][3] == answers[1][3]
    assert owner.rows("select failure_code from attempt") == [("first",)]


def test_fail_many_repeated_returns_the_same_and_changes_nothing(
    worker, lease_many, state
):
    held = lease_many(3)
    arguments = (*held, ["a", "b", "c"], [True, False, True])
    first = worker.rows(MANY, *arguments)
    before = state()

    assert worker.rows(MANY, *arguments) == first
    assert worker.row(
        "select * from fail(%s, %s, 'a', true)", held[0][0], held[1][0]
    ) == {"status": "queued", "available_at": first[0][3]}

    assert state() == before


def test_fail_many_repeats_the_result_of_fail(worker, lease_many):
    (job_id,), (token,) = lease_many(1)
    first = worker.row("select * from fail(%s, %s, 'a', true)", job_id, token)

    answer = worker.row(MANY, [job_id], [token], ["a"], [True])

    assert answer["outcome"] == first["status"]
    assert answer["available_at"] == first["available_at"]


def test_fail_many_repeated_otherwise_is_an_invalid_lease(
    worker, rival, lease_many, state
):
    (job_id,), (token,) = lease_many(1)
    worker.rows(MANY, [job_id], [token], ["a"], [True])
    before = state()

    others = worker.rows(
        MANY,
        [job_id] * 3,
        [token, token, NO_TOKEN],
        ["b", "a", "a"],
        [True, False, True],
    ) + rival.rows(MANY, [job_id], [token], ["a"], [True])

    assert {row[2] for row in others} == {"invalid_lease"}
    assert state() == before


@pytest.mark.usefixtures("read_committed")
def test_fail_many_judges_the_lease_by_the_clock_not_the_transactions_start(
    worker, owner, lease_many
):
    held = lease_many(2)

    with worker.transaction():
        worker.execute("select 1")
        owner.execute(
            "update live_job set lease_expires_at = clock_timestamp()"
            " where job_id = %s",
            (held[0][0],),
        )
        passed = owner.value("select clock_timestamp()")
        answers = worker.rows(MANY, *held, ["a", "a"], [True, True])

    assert [row[2] for row in answers] == ["invalid_lease", "queued"]
    assert answers[1][3] > passed + timedelta(seconds=5)


@pytest.mark.parametrize(
    "settings",
    [
        "set standard_conforming_strings to off; set escape_string_warning to off",
        "set bytea_output to 'escape'; set timezone to 'Asia/Kathmandu'",
        "set intervalstyle to 'sql_standard'; set datestyle to 'ISO, DMY'",
        "set default_transaction_isolation to 'serializable'",
        "set plan_cache_mode to force_custom_plan; set enable_nestloop to off",
        (
            "set enable_hashjoin to off; set enable_sort to off; set"
            " enable_material to off"
        ),
        "set array_nulls to off; set search_path to pg_temp, jobs_email",
    ],
)
def test_fail_many_returns_the_same_under_any_setting_of_the_session(
    worker, lease_many, settings
):
    (first, second), (one, two) = lease_many(2)
    worker.execute(settings)

    answers = worker.rows(
        MANY,
        [second, first, first, first],
        [two, one, two, one],
        ["c", "c", "c", "a\\b"],
        [False, True, True, True],
    )

    assert [row[2] for row in answers] == [
        "failed",
        "queued",
        "invalid_lease",
        "invalid_failure",
    ]
