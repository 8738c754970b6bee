"""The fault: the reply is lost after the commit.

The same call with the same arguments loses nothing and does nothing twice.
"""

import psycopg
import pytest

EVERY_WAY = ("sql", "sync", "async", "sync on a pool", "async on a pool")
every_way = pytest.mark.parametrize("way", EVERY_WAY)
ITEM = {"queue": "email", "kind": "send", "payload": {}}


@pytest.fixture
def losing(client, cutter, way):
    """Make a call whose reply is lost, and repeat it. Return the second reply."""

    def losing(role, words, call, caller=None):
        jobs = client(role, caller=caller, **cutter.address)
        cut = cutter.cut(words)

        with pytest.raises(psycopg.OperationalError):
            call(jobs)

        assert cut.happened.is_set()
        assert cut.status == "I"  # committed
        # A pool replaces the connection; on a connection the client is gone with it.
        return call(
            jobs if "pool" in way else client(role, caller=caller, **cutter.address)
        )

    return losing


@pytest.fixture
def leases(enqueue, client):
    """Three jobs that email-worker holds."""
    for _ in range(3):
        enqueue()
    return client("email-worker").claim("email", 3)


@every_way
def test_enqueue_repeated_returns_the_job_of_the_lost_reply(losing, owner):
    again = losing(
        "accounts",
        ".enqueue(",
        lambda jobs: jobs.enqueue("email", "send", {}, idempotency_key="k"),
    )

    assert again.created is False
    assert owner.rows("select job_id from job") == [(again.job_id,)]


def test_enqueue_many_repeated_returns_the_jobs_of_the_lost_reply(losing, owner):
    again = losing(
        "accounts",
        ".enqueue_many(",
        lambda jobs: jobs.enqueue_many(
            [ITEM | {"idempotency_key": key} for key in ("a", "b")]
        ),
    )

    assert [item.outcome for item in again] == ["existing", "existing"]
    assert [(item.job_id,) for item in again] == owner.rows(
        "select job_id from job order by idempotency_key"
    )


def test_no_client_repeats_a_call_by_itself(client, cutter, owner, way):
    jobs = client("accounts", **cutter.address)
    cut = cutter.cut(".enqueue(")
    second = cutter.cut(".enqueue(")

    with pytest.raises(psycopg.OperationalError):
        jobs.enqueue("email", "send", {}, idempotency_key="k")

    assert cut.happened.is_set()
    assert not second.happened.is_set()
    assert owner.value("select count(*) from job") == 1


@every_way
def test_claimed_jobs_come_back_after_one_lease(losing, client, enqueue, expire, owner):
    made = [enqueue() for _ in range(5)]

    meanwhile = losing("email-worker", ".claim(", lambda jobs: jobs.claim("email", 5))
    expire(*made)
    again = client("email-worker").claim("email", 5)

    assert meanwhile == []
    assert [lease.job_id for lease in again] == made
    assert {lease.attempt for lease in again} == {2}
    assert owner.rows("select distinct attempt, outcome from attempt") == [
        (1, "lease_expired")
    ]


def test_renew_repeated_extends_the_lease(losing, leases):
    end = losing("email-worker", ".renew(", lambda jobs: jobs.renew(leases[0]))

    assert end > leases[0].lease_expires_at


def test_complete_repeated_returns_true(losing, leases, owner):
    again = losing("email-worker", ".complete(", lambda jobs: jobs.complete(leases[0]))

    assert again is True
    assert owner.rows("select job_id, attempt, outcome from attempt") == [
        (leases[0].job_id, 1, "succeeded")
    ]


def test_fail_repeated_returns_the_first_result(losing, leases, owner):
    again = [
        losing(
            "email-worker",
            ".fail(",
            lambda jobs, n=n: jobs.fail(leases[n], "down", retryable=n == 0),
        )
        for n in range(2)
    ]

    assert [answer.status for answer in again] == ["queued", "failed"]
    assert owner.rows("select outcome, retry_at from attempt order by job_id") == [
        ("retried", again[0].available_at),
        ("failed", None),
    ]


def test_the_many_forms_repeated_return_the_first_results(losing, leases, owner):
    renewed = losing(
        "email-worker", ".renew_many(", lambda jobs: jobs.renew_many(leases)
    )
    completed = losing(
        "email-worker", ".complete_many(", lambda jobs: jobs.complete_many(leases[:1])
    )
    failed = losing(
        "email-worker",
        ".fail_many(",
        lambda jobs: jobs.fail_many([(x, "down", True) for x in leases[1:]]),
    )

    assert [item.outcome for item in renewed] == ["renewed"] * 3
    assert [item.outcome for item in completed] == ["completed"]
    assert [item.outcome for item in failed] == ["queued"] * 2
    assert owner.rows("select outcome, retry_at from attempt order by job_id") == [
        ("succeeded", None),
        *(("retried", item.available_at) for item in failed),
    ]


@pytest.mark.parametrize("way", EVERY_WAY[1:])
def test_a_call_under_a_caller_whose_reply_is_lost_was_committed(losing, owner, way):
    again = losing(
        None,
        # The client that blocks commits in the same round trip.
        "commit" if way.startswith("async") else ".enqueue(",
        lambda jobs: jobs.enqueue("email", "send", {}, idempotency_key="k"),
        caller="accounts",
    )

    assert again.created is False
    assert owner.rows("select job_id, producer from job") == [
        (again.job_id, "accounts")
    ]
