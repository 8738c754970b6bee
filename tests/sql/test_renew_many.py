from datetime import timedelta
from uuid import uuid4

import pytest

MANY = "select * from renew_many(%s::uuid[], %s::text[])"
LEASE = timedelta(seconds=30)
NO_TOKEN = "job_lease_" + 64 * "0"


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_renew_many_renews_every_lease_in_input_order(worker, owner, lease_many, count):
    job_ids, tokens = lease_many(count)
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


def test_renew_many_names_its_columns(worker, lease_many):
    assert list(worker.row(MANY, *lease_many(1))) == [
        "position",
        "job_id",
        "lease_expires_at",
        "outcome",
    ]


def test_renew_many_never_shortens_a_lease(worker, owner, lease_many):
    held = lease_many(2)
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


def test_renew_many_counts_from_the_clock_not_the_statements_start(worker, lease_many):
    (job_id,), (token,) = lease_many(1)

    held = worker.value(
        "select r.lease_expires_at - statement_timestamp()"
        " from (select pg_sleep(0.05)::text as nothing offset 0) as s,"
        " lateral renew_many(array[%s]::uuid[], array[%s || s.nothing]) as r",
        job_id,
        token,
    )

    assert held >= LEASE + timedelta(milliseconds=50)


def test_renew_many_returns_invalid_lease_item_by_item_and_spoils_no_other(
    worker, owner, lease_many, expire
):
    (first, expired, done, last), tokens = lease_many(4)
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


def test_renew_many_returns_an_item_given_twice_twice(worker, lease_many):
    (job_id,), (token,) = lease_many(1)

    answers = worker.rows(MANY, [job_id, job_id], [token, token])

    assert [row[3] for row in answers] == ["renewed", "renewed"]
    assert answers[0][2] == answers[1][2]


def test_renew_many_returns_busy_for_a_row_that_another_session_holds(
    worker, owner, lease_many
):
    held = lease_many(3)

    with owner.transaction():
        owner.execute(
            "select from live_job where job_id = %s for update", (held[0][1],)
        )
        answers = worker.rows(MANY, *held)

    assert [row[3] for row in answers] == ["renewed", "busy", "renewed"]
    assert [row[2] is None for row in answers] == [False, True, False]


def test_renew_many_counts_from_the_clock_not_the_transactions_start(
    worker, owner, lease_many
):
    held = lease_many(2)

    with worker.transaction():
        worker.execute("select 1")
        passed = owner.value("select clock_timestamp()")
        answers = worker.rows(MANY, *held)

    assert all(row[2] > passed + LEASE for row in answers)
