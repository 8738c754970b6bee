from datetime import timedelta
from uuid import uuid4

import pytest

MANY = "select * from fail_many(%s::uuid[], %s::text[], %s::text[], %s::boolean[])"
NO_TOKEN = "job_lease_" + 64 * "0"


@pytest.fixture
def hold(producer, worker):
    """Enqueue and claim jobs; answers their ids and tokens, in two lists."""

    def hold(count, max_attempts=3):
        producer.execute(
            "select count(*) from generate_series(1, %s) as n,"
            " lateral enqueue('email', 'send', '{}', 'key-' || n, null, %s::integer)",
            (count, max_attempts),
        )
        rows = worker.rows(
            "select job_id, lease_token from claim('email', %s::integer)", count
        )
        return [row[0] for row in rows], [row[1] for row in rows]

    return hold


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_fail_many_queues_every_job_again_and_answers_in_input_order(
    worker, owner, hold, count
):
    job_ids, tokens = hold(count)
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


def test_fail_many_names_its_columns(worker, hold):
    row = worker.row(MANY, *hold(1), ["timeout"], [True])

    assert list(row) == ["position", "job_id", "outcome", "available_at"]


def test_fail_many_ends_what_is_not_to_be_retried_or_out_of_attempts(
    worker, owner, hold
):
    (first, second, third), tokens = hold(3)
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


def test_fail_many_doubles_the_wait_and_never_exceeds_its_maximum(worker, owner, hold):
    attempts = [1, 2, 3, 10, 31, 32, 63, 64, 99, 2147483646]
    job_ids, tokens = hold(len(attempts))
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
    worker, owner, hold
):
    owner.execute("update instance set retry_base_seconds = 100, retry_jitter = 0.5")
    held = hold(50)

    worker.rows(MANY, *held, ["c"] * 50, [True] * 50)

    waits = [w for (w,) in owner.rows("select retry_at - ended_at from attempt")]
    assert all(
        timedelta(seconds=50) <= wait <= timedelta(seconds=100) for wait in waits
    )
    assert len(set(waits)) == 50


def test_fail_many_answers_item_by_item_and_spoils_no_other(
    worker, owner, hold, expire
):
    (first, expired, done, last), tokens = hold(4)
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


def test_fail_many_answers_invalid_failure_before_invalid_lease(worker, owner, hold):
    (first, second), tokens = hold(2)
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


def test_fail_many_takes_an_item_given_twice_once_and_answers_it_twice(
    worker, owner, hold
):
    (job_id,), (token,) = hold(1)

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


def test_fail_many_repeated_answers_the_same_and_changes_nothing(worker, hold, state):
    held = hold(3)
    arguments = (*held, ["a", "b", "c"], [True, False, True])
    first = worker.rows(MANY, *arguments)
    before = state()

    assert worker.rows(MANY, *arguments) == first
    assert worker.row(
        "select * from fail(%s, %s, 'a', true)", held[0][0], held[1][0]
    ) == {"status": "queued", "available_at": first[0][3]}

    assert state() == before


def test_fail_many_repeats_the_answer_of_fail(worker, hold):
    (job_id,), (token,) = hold(1)
    first = worker.row("select * from fail(%s, %s, 'a', true)", job_id, token)

    answer = worker.row(MANY, [job_id], [token], ["a"], [True])

    assert answer["outcome"] == first["status"]
    assert answer["available_at"] == first["available_at"]


def test_fail_many_repeated_otherwise_is_an_invalid_lease(worker, rival, hold, state):
    (job_id,), (token,) = hold(1)
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


def test_fail_many_refuses_any_other_token_or_job(worker, hold, state):
    (job_id, other_id), (token, other_token) = hold(2)
    before = state()

    wrong = (
        (job_id, other_token),
        (other_id, token),
        (job_id, NO_TOKEN),
        (job_id, None),
        (uuid4(), token),
        (None, token),
    )
    for batch in (wrong, *([pair] for pair in wrong)):
        job_ids, tokens = ([pair[n] for pair in batch] for n in range(2))
        answers = worker.rows(
            MANY, job_ids, tokens, ["a"] * len(batch), [True] * len(batch)
        )
        assert {row[2] for row in answers} == {"invalid_lease"}

    assert state() == before


def test_fail_many_leaves_anothers_leases_alone(rival, hold, state):
    held = hold(2)
    before = state()

    answers = rival.rows(MANY, *held, ["a", "a"], [True, False])

    assert {row[2] for row in answers} == {"invalid_lease"}
    assert state() == before


@pytest.mark.usefixtures("read_committed")
def test_fail_many_judges_the_lease_by_the_clock_not_the_transactions_start(
    worker, owner, hold
):
    held = hold(2)

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


def test_fail_many_rolls_back_with_the_callers_transaction(worker, hold, state):
    held = hold(2)
    before = state()

    with worker.transaction(force_rollback=True):
        worker.rows(MANY, *held, ["a", "a"], [True, False])

    assert state() == before


GOOD = (
    "array[gen_random_uuid()]",
    "array['t']",
    "array['c']",
    "array[true]",
)


@pytest.mark.parametrize("place", range(4))
def test_fail_many_refuses_other_than_parallel_lists_of_1_to_1000(
    worker, hold, state, place
):
    hold(1)
    before = state()
    one = GOOD[place]
    item = one.removeprefix("array[").removesuffix("]")

    for bad in ("null", "'{}'", f"array[{item}, {item}]", f"array[{one}]"):
        arguments = [*GOOD[:place], bad, *GOOD[place + 1 :]]
        with worker.refusing("LJ007") as caught:
            worker.rows(f"select * from fail_many({', '.join(arguments)})")
        for name in ("job_ids", "lease_tokens", "failure_codes", "retryable"):
            assert name in caught.value.diag.message_primary, bad

    assert state() == before


@pytest.mark.parametrize("dimensions", ["1001", "2, 500", "1, 1"])
def test_fail_many_refuses_lists_too_long_or_of_lists(worker, dimensions):
    with worker.refusing("LJ007"):
        worker.rows(
            "select * from fail_many("
            f"array_fill(gen_random_uuid(), array[{dimensions}]),"
            f" array_fill('t'::text, array[{dimensions}]),"
            f" array_fill('c'::text, array[{dimensions}]),"
            f" array_fill(true, array[{dimensions}]))"
        )


def test_fail_many_refuses_empty_and_null_lists_throughout(worker):
    for arguments in ("null, null, null, null", "'{}', '{}', '{}', '{}'"):
        with worker.refusing("LJ007"):
            worker.rows(f"select * from fail_many({arguments})")


def test_fail_many_counts_positions_from_1_whatever_the_arrays_bounds(worker, hold):
    (first, second), (one, two) = hold(2)

    answers = worker.rows(
        MANY,
        f"[0:1]={{{first},{second}}}",
        f"{{{one},{two}}}",
        "[7:8]={a,b}",
        "[-1:0]={f,f}",
    )

    assert [row[:3] for row in answers] == [(1, first, "failed"), (2, second, "failed")]


def test_fail_many_shows_no_token_in_a_refusal(worker, hold):
    (job_id,), (token,) = hold(1)

    with worker.refusing("LJ007") as caught:
        worker.rows(MANY, [job_id], [token, token], ["a"], [True])

    assert token not in str(caught.value)
    assert token not in (caught.value.diag.context or "")


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
def test_fail_many_answers_the_same_under_any_setting_of_the_session(
    worker, hold, settings
):
    (first, second), (one, two) = hold(2)
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
