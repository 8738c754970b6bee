from uuid import uuid4

import pytest

MANY = "select * from complete_many(%s::uuid[], %s::text[])"
NO_TOKEN = "job_lease_" + 64 * "0"


@pytest.fixture
def hold(producer, worker):
    """Enqueue and claim jobs; answers their ids and tokens, in two lists."""

    def hold(count):
        producer.execute(
            "select count(*) from generate_series(1, %s) as n,"
            " lateral enqueue('email', 'send', '{}', 'key-' || n)",
            (count,),
        )
        rows = worker.rows(
            "select job_id, lease_token from claim('email', %s::integer)", count
        )
        return [row[0] for row in rows], [row[1] for row in rows]

    return hold


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_complete_many_ends_every_job_and_answers_in_input_order(
    worker, owner, hold, count
):
    job_ids, tokens = hold(count)
    job_ids.reverse()
    tokens.reverse()
    leases = dict(owner.rows("select job_id, lease_token_hash from live_job"))

    answers = worker.rows(MANY, job_ids, tokens)

    assert answers == [(n, job_id, "completed") for n, job_id in enumerate(job_ids, 1)]
    assert owner.value("select count(*) from live_job") == 0
    assert dict(owner.rows("select job_id, lease_token_hash from attempt")) == leases
    assert owner.rows(
        "select distinct outcome, worker, attempt, max_attempts, failure_code, retry_at"
        " from attempt"
    ) == [("succeeded", "email-worker", 1, 3, None, None)]


def test_complete_many_names_its_columns(worker, hold):
    assert list(worker.row(MANY, *hold(1))) == ["position", "job_id", "outcome"]


def test_complete_many_answers_invalid_lease_item_by_item_and_spoils_no_other(
    worker, owner, hold, expire
):
    (first, expired, failed, last), tokens = hold(4)
    expire(expired)
    worker.execute("select fail(%s, %s, 'timeout', true)", (failed, tokens[2]))
    unknown = uuid4()

    answers = worker.rows(
        MANY,
        [first, expired, failed, last, last, unknown, None, last, None],
        [*tokens, tokens[0], NO_TOKEN, tokens[0], None, None],
    )

    assert answers == [
        (1, first, "completed"),
        (2, expired, "invalid_lease"),
        (3, failed, "invalid_lease"),
        (4, last, "completed"),
        (5, last, "invalid_lease"),
        (6, unknown, "invalid_lease"),
        (7, None, "invalid_lease"),
        (8, last, "invalid_lease"),
        (9, None, "invalid_lease"),
    ]
    left = owner.rows("select job_id, lease_owner from live_job order by job_id")
    assert left == [(expired, "email-worker"), (failed, None)]
    assert owner.rows("select job_id, outcome from attempt order by job_id") == [
        (first, "succeeded"),
        (failed, "retried"),
        (last, "succeeded"),
    ]


def test_complete_many_answers_an_item_given_twice_twice(worker, owner, hold):
    (job_id,), (token,) = hold(1)

    answers = worker.rows(MANY, [job_id, job_id], [token, token])

    assert answers == [(1, job_id, "completed"), (2, job_id, "completed")]
    assert owner.value("select count(*) from attempt") == 1


def test_complete_many_tells_a_jobs_good_token_from_a_bad_one(worker, hold):
    (job_id,), (token,) = hold(1)

    answers = worker.rows(MANY, [job_id] * 3, [NO_TOKEN, token, NO_TOKEN])

    assert [row[2] for row in answers] == [
        "invalid_lease",
        "completed",
        "invalid_lease",
    ]


def test_complete_many_repeated_answers_the_same_and_changes_nothing(
    worker, hold, state
):
    held = hold(3)
    first = worker.rows(MANY, *held)
    before = state()

    assert worker.rows(MANY, *held) == first
    assert [
        worker.value("select complete(%s, %s)", *one) for one in zip(*held, strict=True)
    ] == ([True] * 3)

    assert state() == before


def test_complete_many_repeats_the_answer_of_complete(worker, hold):
    job_ids, tokens = hold(2)
    worker.execute("select complete(%s, %s)", (job_ids[0], tokens[0]))

    answers = worker.rows(MANY, job_ids, tokens)

    assert [row[2] for row in answers] == ["completed", "completed"]


def test_complete_many_refuses_any_other_token_or_job(worker, hold, state):
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
        answers = worker.rows(MANY, job_ids, tokens)
        assert {row[2] for row in answers} == {"invalid_lease"}

    assert state() == before


def test_complete_many_leaves_anothers_leases_alone(worker, rival, hold, state):
    held = hold(2)
    before = state()

    assert {row[2] for row in rival.rows(MANY, *held)} == {"invalid_lease"}
    assert state() == before

    worker.rows(MANY, *held)

    assert {row[2] for row in rival.rows(MANY, *held)} == {"invalid_lease"}


@pytest.mark.usefixtures("read_committed")
def test_complete_many_judges_the_lease_by_the_clock_not_the_transactions_start(
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
        answers = worker.rows(MANY, *held)

    assert [row[2] for row in answers] == ["invalid_lease", "completed"]
    assert owner.value("select ended_at from attempt") > passed


def test_complete_many_rolls_back_with_the_callers_transaction(worker, hold, state):
    held = hold(2)
    before = state()

    with worker.transaction(force_rollback=True):
        worker.rows(MANY, *held)

    assert state() == before


@pytest.mark.parametrize(
    ("job_ids", "tokens"),
    [
        ("null", "null"),
        ("null", "array['a']"),
        ("array[gen_random_uuid()]", "null"),
        ("'{}'", "'{}'"),
        ("array[gen_random_uuid()]", "'{}'"),
        ("array[gen_random_uuid()]", "array['a', 'b']"),
        ("array[gen_random_uuid(), gen_random_uuid()]", "array['a']"),
        ("array[array[gen_random_uuid()]]", "array[array['a']]"),
        ("array[array[gen_random_uuid()]]", "array['a']"),
        ("array[gen_random_uuid()]", "array[array['a']]"),
        (
            "array_fill(gen_random_uuid(), array[1001])",
            "array_fill('a'::text, array[1001])",
        ),
        (
            "array_fill(gen_random_uuid(), array[2, 500])",
            "array_fill('a'::text, array[2, 500])",
        ),
    ],
)
def test_complete_many_refuses_other_than_parallel_lists_of_1_to_1000(
    worker, hold, state, job_ids, tokens
):
    hold(1)
    before = state()

    with worker.refusing("LJ007") as caught:
        worker.rows(f"select * from complete_many({job_ids}, {tokens})")

    assert "job_ids" in caught.value.diag.message_primary
    assert "lease_tokens" in caught.value.diag.message_primary
    assert state() == before


def test_complete_many_counts_positions_from_1_whatever_the_arrays_bounds(worker, hold):
    (first, second), (one, two) = hold(2)

    for bounds, other in (("[0:1]=", ""), ("", "[0:1]="), ("[-3:-2]=", "[5:6]=")):
        answers = worker.rows(
            MANY, f"{bounds}{{{first},{second}}}", f"{other}{{{one},{two}}}"
        )

        assert answers == [(1, first, "completed"), (2, second, "completed")]


def test_complete_many_shows_no_token_in_a_refusal(worker, hold):
    (job_id,), (token,) = hold(1)

    with worker.refusing("LJ007") as caught:
        worker.rows(MANY, [job_id], [token, token])

    assert token not in str(caught.value)
    assert token not in (caught.value.diag.context or "")


@pytest.mark.parametrize(
    "settings",
    [
        "set standard_conforming_strings to off; set escape_string_warning to off",
        "set bytea_output to 'escape'; set timezone to 'Asia/Kathmandu'",
        "set default_transaction_isolation to 'serializable'",
        "set plan_cache_mode to force_custom_plan; set enable_nestloop to off",
        (
            "set enable_hashjoin to off; set enable_sort to off; set"
            " enable_material to off"
        ),
        "set array_nulls to off; set search_path to pg_temp, jobs_email",
    ],
)
def test_complete_many_answers_the_same_under_any_setting_of_the_session(
    worker, hold, settings
):
    (first, second), (one, two) = hold(2)
    worker.execute(settings)

    answers = worker.rows(MANY, [second, first, first], [two, one, two])

    assert [row[2] for row in answers] == ["completed", "completed", "invalid_lease"]
