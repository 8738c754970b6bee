from datetime import timedelta
from uuid import uuid4

import pytest

MANY = "select * from renew_many(%s::uuid[], %s::text[])"
LEASE = timedelta(seconds=30)
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
def test_renew_many_renews_every_lease_in_input_order(worker, owner, hold, count):
    job_ids, tokens = hold(count)
    job_ids.reverse()
    tokens.reverse()
    before = owner.value("select clock_timestamp()")

    answers = worker.rows(MANY, job_ids, tokens)

    after = owner.value("select clock_timestamp()")
    assert [row[:2] for row in answers] == list(enumerate(job_ids, 1))
    assert {row[3] for row in answers} == {"renewed"}
    assert all(before + LEASE <= row[2] <= after + LEASE for row in answers)
    stored = dict(owner.rows("select job_id, lease_expires_at from live_job"))
    assert stored == {row[1]: row[2] for row in answers}


def test_renew_many_names_its_columns(worker, hold):
    assert list(worker.row(MANY, *hold(1))) == [
        "position",
        "job_id",
        "lease_expires_at",
        "outcome",
    ]


def test_renew_many_never_shortens_a_lease(worker, owner, hold):
    held = hold(2)
    owner.execute(
        "update live_job set lease_expires_at = clock_timestamp() + interval '1 day'"
        " where job_id = %s",
        (held[0][0],),
    )
    end = owner.value("select max(lease_expires_at) from live_job")

    answers = worker.rows(MANY, *held)

    assert answers[0][2:] == (end, "renewed")
    assert answers[1][2] < end
    assert owner.value("select max(lease_expires_at) from live_job") == end


def test_renew_many_counts_from_the_clock_not_the_statements_start(worker, hold):
    (job_id,), (token,) = hold(1)

    held = worker.value(
        "select r.lease_expires_at - statement_timestamp()"
        " from (select pg_sleep(0.05)::text as nothing offset 0) as s,"
        " lateral renew_many(array[%s]::uuid[], array[%s || s.nothing]) as r",
        job_id,
        token,
    )

    assert held >= LEASE + timedelta(milliseconds=50)


def test_renew_many_answers_invalid_lease_item_by_item_and_spoils_no_other(
    worker, owner, hold, expire
):
    (first, expired, done, last), tokens = hold(4)
    expire(expired)
    worker.execute("select complete(%s, %s)", (done, tokens[2]))
    before = dict(owner.rows("select job_id, lease_expires_at from live_job"))
    unknown = uuid4()

    answers = worker.rows(
        MANY,
        [first, expired, done, last, last, unknown, None, last, None],
        [*tokens, tokens[0], NO_TOKEN, tokens[0], None, None],
    )

    assert [(row[0], row[1], row[3]) for row in answers] == [
        (1, first, "renewed"),
        (2, expired, "invalid_lease"),
        (3, done, "invalid_lease"),
        (4, last, "renewed"),
        (5, last, "invalid_lease"),
        (6, unknown, "invalid_lease"),
        (7, None, "invalid_lease"),
        (8, last, "invalid_lease"),
        (9, None, "invalid_lease"),
    ]
    assert [row[0] for row in answers if row[2] is not None] == [1, 4]
    after = dict(owner.rows("select job_id, lease_expires_at from live_job"))
    assert after[expired] == before[expired]
    assert after[first] > before[first]


def test_renew_many_answers_an_item_given_twice_twice(worker, hold):
    (job_id,), (token,) = hold(1)

    answers = worker.rows(MANY, [job_id, job_id], [token, token])

    assert [row[3] for row in answers] == ["renewed", "renewed"]
    assert answers[0][2] == answers[1][2]


def test_renew_many_refuses_any_other_token_or_job(worker, hold, state):
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
        assert {row[3] for row in answers} == {"invalid_lease"}

    assert state() == before


def test_renew_many_leaves_anothers_leases_alone(rival, hold, state):
    held = hold(3)
    before = state()

    answers = rival.rows(MANY, *held)

    assert {row[3] for row in answers} == {"invalid_lease"}
    assert {row[2] for row in answers} == {None}
    assert state() == before


def test_renew_many_answers_busy_for_a_row_that_another_session_holds(
    worker, owner, hold
):
    held = hold(3)

    with owner.transaction():
        owner.execute(
            "select from live_job where job_id = %s for update", (held[0][1],)
        )
        answers = worker.rows(MANY, *held)

    assert [row[3] for row in answers] == ["renewed", "busy", "renewed"]
    assert [row[2] is None for row in answers] == [False, True, False]


@pytest.mark.parametrize(
    ("job_ids", "tokens"),
    [
        ("null", "null"),
        ("null", "array['a']"),
        ("array[gen_random_uuid()]", "null"),
        ("'{}'", "'{}'"),
        ("array[gen_random_uuid()]", "'{}'"),
        ("'{}'", "array['a']"),
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
def test_renew_many_refuses_other_than_parallel_lists_of_1_to_1000(
    worker, hold, state, job_ids, tokens
):
    hold(1)
    before = state()

    with worker.refusing("LJ007") as caught:
        worker.rows(f"select * from renew_many({job_ids}, {tokens})")

    assert "job_ids" in caught.value.diag.message_primary
    assert "lease_tokens" in caught.value.diag.message_primary
    assert state() == before


@pytest.mark.parametrize("bounds", ["[0:1]", "[5:6]", "[-3:-2]"])
def test_renew_many_counts_positions_from_1_whatever_the_arrays_bounds(
    worker, hold, bounds
):
    (first, second), (one, two) = hold(2)

    answers = worker.rows(
        MANY, f"{bounds}={{{first},{second}}}", f"{{{one},{two}}}"
    ) + worker.rows(MANY, f"{{{first},{second}}}", f"{bounds}={{{one},{two}}}")

    assert [(row[0], row[1], row[3]) for row in answers] == [
        (1, first, "renewed"),
        (2, second, "renewed"),
    ] * 2


def test_renew_many_shows_no_token_in_a_refusal(worker, hold):
    (job_id,), (token,) = hold(1)

    with worker.refusing("LJ007") as caught:
        worker.rows(MANY, [job_id], [token, token])

    assert token not in str(caught.value)
    assert token not in (caught.value.diag.context or "")


def test_renew_many_counts_from_the_clock_not_the_transactions_start(
    worker, owner, hold
):
    held = hold(2)

    with worker.transaction():
        worker.execute("select 1")
        passed = owner.value("select clock_timestamp()")
        answers = worker.rows(MANY, *held)

    assert all(row[2] > passed + LEASE for row in answers)


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
def test_renew_many_answers_the_same_under_any_setting_of_the_session(
    worker, hold, settings
):
    (first, second), (one, two) = hold(2)
    worker.execute(settings)

    answers = worker.rows(MANY, [second, first, first], [two, one, two])

    assert [row[3] for row in answers] == ["renewed", "renewed", "invalid_lease"]
