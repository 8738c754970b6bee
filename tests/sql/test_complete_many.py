from uuid import uuid4

import pytest

MANY = "select * from complete_many(%s::uuid[], %s::text[])"
NO_TOKEN = "job_lease_" + 64 * "0"


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_complete_many_ends_every_job_and_returns_in_input_order(
    worker, owner, lease_many, count
):
    job_ids, tokens = lease_many(count)
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


def test_complete_many_names_its_columns(worker, lease_many):
    assert list(worker.row(MANY, *lease_many(1))) == ["position", "job_id", "outcome"]


def test_complete_many_returns_invalid_lease_item_by_item_and_spoils_no_other(
    worker, owner, lease_many, expire
):
    (first, expired, failed, last), tokens = lease_many(4)
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


def test_complete_many_returns_an_item_given_twice_twice(worker, owner, lease_many):
    (job_id,), (token,) = lease_many(1)

    answers = worker.rows(MANY, [job_id, job_id], [token, token])

    assert answers == [(1, job_id, "completed"), (2, job_id, "completed")]
    assert owner.value("select count(*) from attempt") == 1


def test_complete_many_tells_a_jobs_good_token_from_a_bad_one(worker, lease_many):
    (job_id,), (token,) = lease_many(1)

    answers = worker.rows(MANY, [job_id] * 3, [NO_TOKEN, token, NO_TOKEN])

    assert [row[2] for row in answers] == [
        "invalid_lease",
        "completed",
        "invalid_lease",
    ]


def test_complete_many_repeated_returns_the_same_and_changes_nothing(
    worker, lease_many, state
):
    held = lease_many(3)
    first = worker.rows(MANY, *held)
    before = state()

    assert worker.rows(MANY, *held) == first
    assert [
        worker.value("select complete(%s, %s)", *one) for one in zip(*held, strict=True)
    ] == ([True] * 3)

    assert state() == before


def test_complete_many_repeats_the_result_of_complete(worker, lease_many):
    job_ids, tokens = lease_many(2)
    worker.execute("select complete(%s, %s)", (job_ids[0], tokens[0]))

    answers = worker.rows(MANY, job_ids, tokens)

    assert [row[2] for row in answers] == ["completed", "completed"]


def test_complete_many_leaves_anothers_leases_alone(worker, rival, lease_many, state):
    held = lease_many(2)
    before = state()

    assert {row[2] for row in rival.rows(MANY, *held)} == {"invalid_lease"}
    assert state() == before

    worker.rows(MANY, *held)

    assert {row[2] for row in rival.rows(MANY, *held)} == {"invalid_lease"}


@pytest.mark.usefixtures("read_committed")
def test_complete_many_judges_the_lease_by_the_clock_not_the_transactions_start(
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
        answers = worker.rows(MANY, *held)

    assert [row[2] for row in answers] == ["invalid_lease", "completed"]
    assert owner.value("select ended_at from attempt") > passed
