import hashlib
import re
from datetime import timedelta
from itertools import combinations

import pytest

CLAIM = "select * from claim(%s, %s::integer)"
LEASE = timedelta(seconds=30)


@pytest.fixture
def fill(owner):
    """Insert due jobs with a lapsed lease by the dozen and return their ids."""

    def fill(count, attempt=3, max_attempts=3, seconds_ago=100, queue="email"):
        return [
            job_id
            for (job_id,) in owner.execute(
                """
                with made as (
                    insert into job (
                        job_id, created_at, max_attempts, producer, queue, kind,
                        idempotency_key, payload
                    )
                    select
                        _enqueue_job_id(clock_timestamp()), clock_timestamp(), 3,
                        'accounts', %(queue)s, 'send', gen_random_uuid()::text, '{}'
                    from generate_series(1, %(count)s::integer)
                    returning job_id
                )
                insert into live_job (
                    job_id, available_at, leased_at, lease_expires_at, attempt,
                    max_attempts, queue, lease_owner, lease_token_hash
                )
                select
                    job_id, clock_timestamp() - make_interval(secs => %(ago)s::float8),
                    clock_timestamp() - interval '61 s',
                    clock_timestamp() - interval '1 s',
                    %(attempt)s::integer, %(max)s::integer, %(queue)s, 'spare-worker',
                    sha256(uuid_send(job_id))
                from made
                returning job_id
                """,
                {
                    "count": count,
                    "attempt": attempt,
                    "max": max_attempts,
                    "ago": seconds_ago,
                    "queue": queue,
                },
            )
        ]

    return fill


def test_claim_returns_no_row_where_nothing_is_due(worker, enqueue, state):
    enqueue(queue="slow")
    enqueue(available_at="2040-01-01T00:00:00Z")
    before = state()

    assert worker.rows(CLAIM, "email", 1000) == []
    assert state() == before


def test_claim_leases_one_job_by_default(worker, enqueue):
    for _ in range(3):
        enqueue()

    assert len(worker.rows("select * from claim('email')")) == 1
    assert (
        len(worker.rows("select * from claim(p_limit => 1, p_queue => 'email')")) == 1
    )


def test_claim_returns_the_job_and_its_lease(worker, owner, enqueue):
    job_id = enqueue(kind="send/mail", payload={"to": "ann"}, max_attempts=7)
    created_at = owner.value("select created_at from job")
    before = owner.value("select clock_timestamp()")

    row = worker.row(CLAIM, "email", 10)

    after = owner.value("select clock_timestamp()")
    assert list(row) == [
        "job_id",
        "queue",
        "kind",
        "payload",
        "attempt",
        "max_attempts",
        "lease_token",
        "lease_expires_at",
        "created_at",
    ]
    assert row["job_id"] == job_id
    assert row["queue"] == "email"
    assert row["kind"] == "send/mail"
    assert row["payload"] == {"to": "ann"}
    assert row["attempt"] == 1
    assert row["max_attempts"] == 7
    assert row["created_at"] == created_at
    assert re.fullmatch("job_lease_[0-9a-f]{64}", row["lease_token"])
    assert before + LEASE <= row["lease_expires_at"] <= after + LEASE


def test_claim_writes_the_lease_into_the_live_row(worker, owner, enqueue):
    enqueue()
    available_at = owner.value("select available_at from live_job")

    row = worker.row(CLAIM, "email", 1)

    live = owner.row("select * from live_job")
    assert live["attempt"] == 1
    assert live["lease_owner"] == "email-worker"
    assert live["lease_expires_at"] == row["lease_expires_at"]
    assert live["lease_expires_at"] - live["leased_at"] == LEASE
    assert live["available_at"] == available_at
    assert live["last_failure_code"] is None


def test_claim_stores_the_sha_256_of_the_token_and_nowhere_the_token(
    worker, owner, enqueue, state
):
    enqueue()

    token = worker.row(CLAIM, "email", 1)["lease_token"]

    stored = owner.value("select lease_token_hash from live_job")
    assert stored == hashlib.sha256(token.encode()).digest()
    assert token.removeprefix("job_lease_") not in str(state())


def test_claim_gives_every_lease_a_unique_token(worker, enqueue):
    for _ in range(50):
        enqueue()

    tokens = {row[6] for row in worker.rows(CLAIM, "email", 50)}

    assert len(tokens) == 50
    assert len({token[10:42] for token in tokens}) == 50
    assert len({token[42:] for token in tokens}) == 50


@pytest.mark.sampled
@pytest.mark.parametrize("limit", [1, 2, 7, 1000])
def test_claim_leases_never_more_than_the_limit(worker, owner, producer, limit):
    producer.execute(
        "select count(*) from generate_series(1, 1100) as n,"
        " lateral enqueue('email', 'send', '{}', 'k' || n)"
    )

    assert len(worker.rows(CLAIM, "email", limit)) == limit

    leased = owner.value("select count(*) from live_job where lease_owner is not null")
    assert leased == limit


def test_claim_leases_fewer_jobs_if_fewer_are_due(worker, enqueue):
    job_ids = [enqueue() for _ in range(3)]

    assert [row[0] for row in worker.rows(CLAIM, "email", 1000)] == job_ids


def test_claim_refuses_a_limit_out_of_bounds(worker, enqueue, state):
    enqueue()
    before = state()

    for limit in (None, 0, -1, 1001, 2147483647, -2147483648):
        with worker.refusing("LJ007") as caught:
            worker.rows(CLAIM, "email", limit)
        assert "limit" in caught.value.diag.message_primary, limit

    assert state() == before


def test_claim_refuses_a_queue_that_is_not_declared(worker, enqueue, state):
    enqueue()
    before = state()

    for queue in (None, "", "nowhere", "Email", "email ", "email\n", "q" * 1000):
        with worker.refusing("LJ003") as caught:
            worker.rows(CLAIM, queue, 1)
        assert "queue" in caught.value.diag.message_primary, queue

    assert state() == before


def test_claim_refuses_the_caller_before_it_looks_at_an_argument(owner, enqueue, state):
    enqueue()
    before = state()

    for queue, limit in (("email", 1), (None, None), ("nowhere", 0)):
        with owner.refusing("42501") as caught:
            owner.rows(CLAIM, queue, limit)
        assert "SET ROLE" in caught.value.diag.message_hint

    assert state() == before


def test_claim_refuses_a_declared_producer_that_is_not_a_worker(owner, prefix, enqueue):
    enqueue()

    with owner.refusing("42501"), owner.transaction():
        owner.execute(f'grant "{prefix}_worker" to accounts')
        owner.execute("set local role accounts")
        owner.rows(CLAIM, "email", 1)


def test_claim_leases_to_the_role_that_set_role_put_in_force(owner, enqueue):
    enqueue()

    with owner.transaction():
        owner.execute('set local role "spare-worker"')
        owner.rows(CLAIM, "email", 1)

    assert owner.value("select lease_owner from live_job") == "spare-worker"


def test_claim_takes_no_job_of_another_queue(worker, owner, enqueue):
    mine = [enqueue(queue="slow") for _ in range(3)]
    for _ in range(3):
        enqueue()

    assert [row[0] for row in worker.rows(CLAIM, "slow", 1000)] == mine
    assert owner.rows("select distinct queue from live_job where attempt = 1") == [
        ("slow",)
    ]


def test_claim_skips_a_job_that_is_leased(worker, rival, enqueue):
    first, second = enqueue(), enqueue()

    assert worker.row(CLAIM, "email", 1)["job_id"] == first
    assert rival.row(CLAIM, "email", 1)["job_id"] == second
    assert worker.rows(CLAIM, "email", 10) == []
    assert rival.rows(CLAIM, "email", 10) == []


def test_claim_takes_the_oldest_due_first_then_the_first_enqueued(
    connect, owner, enqueue
):
    job_ids = [enqueue() for _ in range(6)]
    for job_id, seconds in zip(job_ids, (30, 10, 20, 10, 40, 10), strict=True):
        owner.execute(
            "update live_job set available_at ="
            " date_trunc('minute', clock_timestamp()) -"
            " make_interval(mins => 1, secs => %s)"
            " where job_id = %s",
            (seconds, job_id),
        )
    expected = [job_ids[n] for n in (4, 0, 2, 1, 3, 5)]

    first = connect("email-worker").rows(CLAIM, "email", 4)
    second = connect("email-worker").rows(CLAIM, "email", 4)

    assert [row[0] for row in first + second] == expected


def test_claim_takes_the_older_due_before_the_first_enqueued_one_by_one(
    worker, owner, enqueue
):
    job_ids = [enqueue() for _ in range(4)]
    owner.execute(
        "update live_job set available_at = date_trunc('hour', clock_timestamp())"
        " - interval '1 h'"
    )

    claimed = [worker.row(CLAIM, "email", 1)["job_id"] for _ in range(4)]

    assert claimed == job_ids


def test_claim_asks_for_its_order_and_does_not_take_what_an_index_gives(
    worker, owner, enqueue
):
    job_ids = [enqueue() for _ in range(3)]
    owner.execute("drop index live_job_claimable_idx")
    owner.execute("create index live_job_claimable_idx on live_job (queue)")
    owner.execute(
        "update live_job set available_at = clock_timestamp()"
        " - make_interval(mins => array_position(%s, job_id))",
        (job_ids,),
    )

    claimed = [worker.row(CLAIM, "email", 1)["job_id"] for _ in range(3)]

    assert claimed == job_ids[::-1]


def test_claim_takes_a_scheduled_job_once_it_is_due(connect, enqueue, make_due):
    job_id = enqueue(available_at="2040-01-01T00:00:00Z")
    assert connect("email-worker").rows(CLAIM, "email", 1) == []

    make_due(job_id)

    assert connect("email-worker").row(CLAIM, "email", 1)["job_id"] == job_id


def test_claim_counts_every_attempt_and_never_beyond_max_attempts(
    connect, owner, enqueue, expire
):
    job_id = enqueue(max_attempts=4)
    attempts, tokens = [], set()

    for _ in range(4):
        row = connect("email-worker").row(CLAIM, "email", 1)
        attempts.append(row["attempt"])
        tokens.add(row["lease_token"])
        expire(job_id)

    assert attempts == [1, 2, 3, 4]
    assert len(tokens) == 4
    assert connect("email-worker").rows(CLAIM, "email", 1) == []
    assert owner.value("select count(*) from attempt") == 4
    assert owner.value("select count(*) from live_job") == 0


def test_claim_reclaims_a_lapsed_lease_with_evidence(
    worker, connect, owner, enqueue, expire
):
    job_id = enqueue()
    first = worker.row(CLAIM, "email", 1)
    leased_at = owner.value("select leased_at from live_job")
    expire(job_id)
    before = owner.value("select clock_timestamp()")

    second = connect("spare-worker").row(CLAIM, "email", 1)

    evidence = owner.row("select * from attempt")
    assert second["job_id"] == job_id
    assert second["attempt"] == 2
    assert second["lease_token"] != first["lease_token"]
    assert evidence["job_id"] == job_id
    assert evidence["attempt"] == 1
    assert evidence["max_attempts"] == 3
    assert evidence["outcome"] == "lease_expired"
    assert evidence["failure_code"] is None
    assert evidence["retryable"] is None
    assert evidence["retry_at"] is None
    assert evidence["worker"] == "email-worker"
    assert evidence["leased_at"] == leased_at
    assert evidence["ended_at"] > before
    assert evidence["lease_token_hash"] == (
        hashlib.sha256(first["lease_token"].encode()).digest()
    )
    assert owner.value("select lease_owner from live_job") == "spare-worker"
    assert second["lease_expires_at"] > before + LEASE


def test_claim_reclaims_its_own_lapsed_lease(worker, connect, enqueue, expire):
    job_id = enqueue()
    worker.row(CLAIM, "email", 1)
    expire(job_id)

    assert connect("email-worker").row(CLAIM, "email", 1)["attempt"] == 2


def test_claim_keeps_the_last_failure_code_over_a_lapsed_lease(
    connect, owner, enqueue, expire
):
    job_id = enqueue()
    connect("email-worker").row(CLAIM, "email", 1)
    owner.execute("update live_job set attempt = 2, last_failure_code = 'timeout'")
    expire(job_id)

    row = connect("email-worker").row(CLAIM, "email", 1)

    assert row["attempt"] == 3
    assert owner.value("select last_failure_code from live_job") == "timeout"


def test_claim_ends_a_job_whose_last_lease_lapsed(connect, owner, enqueue, expire):
    job_id = enqueue(max_attempts=2)
    worker = connect("email-worker")
    held = worker.row(CLAIM, "email", 1)
    worker.execute(
        "select fail(%s, %s, 'timeout', true)", (job_id, held["lease_token"])
    )
    owner.execute("update live_job set available_at = clock_timestamp()")
    token = connect("email-worker").row(CLAIM, "email", 1)["lease_token"]
    leased_at = owner.value("select leased_at from live_job")
    expire(job_id)

    assert connect("spare-worker").rows(CLAIM, "email", 1) == []

    evidence = owner.row("select * from attempt where attempt = 2")
    assert evidence["outcome"] == "lease_expired"
    assert evidence["failure_code"] == "attempts_exhausted"
    assert evidence["worker"] == "email-worker"
    assert evidence["leased_at"] == leased_at
    assert evidence["max_attempts"] == 2
    assert evidence["lease_token_hash"] == hashlib.sha256(token.encode()).digest()
    assert (
        owner.value("select failure_code from attempt where attempt = 1") == "timeout"
    )
    assert owner.value("select count(*) from live_job") == 0
    assert owner.value("select status from inspect(%s)", job_id) == "failed"


def test_claim_does_not_end_a_last_attempt_whose_lease_is_live(
    worker, connect, owner, enqueue
):
    enqueue(max_attempts=1)
    worker.row(CLAIM, "email", 1)

    assert connect("spare-worker").rows(CLAIM, "email", 1) == []
    assert owner.value("select count(*) from live_job") == 1
    assert owner.value("select count(*) from attempt") == 0


@pytest.mark.parametrize("limit", [1, 5, 64, 65, 1000])
def test_claim_finds_the_due_jobs_behind_hundreds_that_have_run_out(
    connect, owner, enqueue, fill, limit
):
    fill(200)
    job_id = enqueue()

    claimed = connect("email-worker").rows(CLAIM, "email", limit)

    assert [row[0] for row in claimed] == [job_id]
    assert owner.value("select count(*) from attempt") == 64
    assert owner.value("select count(*) from live_job") == 137


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_claim_ends_at_most_64_jobs_at_a_time_and_all_of_them_in_the_end(
    connect, owner, fill, limit
):
    job_ids = fill(130)
    seen = []

    for _ in range(4):
        assert connect("email-worker").rows(CLAIM, "email", limit) == []
        seen.append(owner.value("select count(*) from attempt"))

    assert seen == [64, 128, 130, 130]
    assert owner.value("select count(*) from live_job") == 0
    assert owner.rows("select distinct outcome, failure_code from attempt") == [
        ("lease_expired", "attempts_exhausted")
    ]
    assert {j for (j,) in owner.rows("select job_id from attempt")} == set(job_ids)


def test_claim_ends_those_first_that_fell_due_first(connect, owner, fill):
    job_ids = sorted(fill(66), key=str)
    owner.execute(
        "update live_job set available_at = clock_timestamp() - interval '1 min'"
        " * array_position(%s, job_id)",
        (job_ids,),
    )

    assert connect("email-worker").rows(CLAIM, "email", 100) == []

    left = owner.rows("select job_id from live_job order by job_id")
    assert [job_id for (job_id,) in left] == job_ids[:2]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_claim_fills_its_limit_through_jobs_that_have_run_out(
    connect, owner, enqueue, fill, limit
):
    due, expected = [], []
    for ago in range(40, 0, -1):
        fill(3, seconds_ago=ago)
        due += fill(1, attempt=1, seconds_ago=ago - 0.5)
    expected = due[:limit]

    claimed = connect("email-worker").rows(CLAIM, "email", limit)

    assert [row[0] for row in claimed] == expected
    assert {row[4] for row in claimed} == {2}
    leased = owner.rows(
        "select job_id from live_job where lease_expires_at > clock_timestamp()"
    )
    assert {job_id for (job_id,) in leased} == set(expected)


def test_claim_reclaims_many_lapsed_leases_at_once(connect, owner, fill):
    job_ids = fill(300, attempt=1)

    claimed = connect("email-worker").rows(CLAIM, "email", 1000)

    assert {row[0] for row in claimed} == set(job_ids)
    assert owner.rows(
        "select outcome, attempt, count(*) from attempt group by 1, 2"
    ) == [("lease_expired", 1, 300)]


@pytest.mark.parametrize("limit", [1, 1000])
def test_claim_is_not_stopped_by_evidence_that_exists_already(
    connect, owner, enqueue, fill, limit
):
    (going_on,) = fill(1, attempt=1, seconds_ago=50)
    (run_out,) = fill(1, seconds_ago=60)
    fresh = enqueue()
    owner.execute(
        "insert into attempt (job_id, leased_at, ended_at, attempt,"
        " max_attempts, queue, worker,"
        " outcome, lease_token_hash) select job_id, leased_at, leased_at, attempt, 3,"
        " 'email', 'email-worker', 'lease_expired', lease_token_hash from live_job"
        " where lease_owner is not null"
    )

    claimed = [
        row[0]
        for _ in range(2)
        for row in connect("email-worker").rows(CLAIM, "email", limit)
    ]

    assert claimed == [going_on, fresh]
    assert owner.value("select count(*) from attempt") == 2
    assert owner.rows("select from live_job where job_id = %s", run_out) == []


@pytest.mark.parametrize("limit", [1, 2, 1000])
@pytest.mark.parametrize("attempt", [0, 1, 3])
def test_claim_is_not_stopped_by_live_rows_whose_job_is_gone(
    connect, owner, fill, limit, attempt
):
    orphans = fill(5, attempt=attempt)
    owner.execute("delete from job where job_id = any (%s)", (orphans,))
    if attempt == 0:
        owner.execute(
            "update live_job set leased_at = null, lease_expires_at = null,"
            " lease_owner = null, lease_token_hash = null"
        )
    job_ids = fill(2, attempt=1, seconds_ago=10)

    claimed = [
        row[0]
        for _ in range(2)
        for row in connect("email-worker").rows(CLAIM, "email", limit)
    ]

    assert claimed == job_ids


@pytest.mark.parametrize("limit", [1, 1000])
def test_claim_is_not_stopped_by_unleased_rows_without_an_attempt_left(
    connect, owner, enqueue, fill, limit
):
    fill(100)
    owner.execute(
        "update live_job set leased_at = null, lease_expires_at = null,"
        " lease_owner = null, lease_token_hash = null"
    )
    job_id = enqueue()

    claimed = connect("email-worker").rows(CLAIM, "email", limit)

    assert [row[0] for row in claimed] == [job_id]


@pytest.mark.slow
def test_claim_updates_most_rows_in_their_page_and_writes_no_index(worker, producer):
    producer.execute(
        "select count(*) from generate_series(1, 400) as n,"
        " lateral enqueue('email', 'send', '{}', 'k' || n)"
    )
    counts = (
        "select n_tup_upd, n_tup_hot_upd from pg_stat_xact_user_tables"
        " where relname = 'live_job'"
    )
    updated = in_page = 0

    for _ in range(40):
        with worker.transaction():
            (before,) = worker.rows(counts)
            worker.rows(CLAIM, "email", 5)
            (after,) = worker.rows(counts)
        updated += after[0] - before[0]
        in_page += after[1] - before[1]

    assert updated == 200
    assert in_page > 100


def test_claim_rolls_back_with_the_callers_transaction(worker, connect, enqueue, state):
    job_id = enqueue()
    before = state()

    with worker.transaction(force_rollback=True):
        worker.row(CLAIM, "email", 1)

    assert state() == before
    row = connect("email-worker").row(CLAIM, "email", 1)
    assert (row["job_id"], row["attempt"]) == (job_id, 1)


def test_claim_counts_the_lease_from_the_clock_not_the_transactions_start(
    worker, owner, enqueue
):
    enqueue()

    with worker.transaction():
        worker.execute("select 1")
        passed = owner.value("select clock_timestamp()")
        row = worker.row(CLAIM, "email", 1)

    assert row["lease_expires_at"] > passed + LEASE


@pytest.mark.parametrize("limit", [1, 2])
def test_claim_counts_the_lease_from_the_clock_not_the_statements_start(
    worker, enqueue, limit
):
    enqueue()

    held = worker.value(
        "select c.lease_expires_at - statement_timestamp()"
        " from (select %s + length(pg_sleep(0.05)::text) as n offset 0) as s,"
        " lateral claim('email', s.n) as c",
        limit,
    )

    assert held >= LEASE + timedelta(milliseconds=50)


def test_a_lapsed_lease_ends_by_the_clock_and_not_with_the_call_s_beginning(
    worker, owner, enqueue, claim, expire
):
    job_id = enqueue()
    claim()
    expire(job_id)

    with worker.transaction():
        began = worker.value(
            "select statement_timestamp() from"
            " (select 1 + length(pg_sleep(0.05)::text) as n offset 0) as s,"
            " lateral claim('email', s.n)"
        )

    ended = owner.value("select ended_at from attempt where outcome = 'lease_expired'")
    assert ended >= began + timedelta(milliseconds=50)


@pytest.mark.parametrize("limit", [1, 2])
def test_claim_goes_by_the_moment_at_which_it_looks(worker, owner, enqueue, limit):
    enqueue()
    due = owner.value(
        "update live_job set available_at = clock_timestamp() + interval '100 ms'"
        " returning available_at"
    )

    expires_at = worker.value(
        "with slept as materialized (select pg_sleep_until(%s)::text as text)"
        " select c.lease_expires_at from slept, lateral"
        " (select * from claim('email', %s) where slept.text is not null) as c",
        *(due, limit),
    )

    assert expires_at >= due + LEASE


@pytest.mark.usefixtures("read_committed")
@pytest.mark.parametrize("limit", [1, 2])
def test_claim_sees_a_job_that_fell_due_within_the_transaction(worker, enqueue, limit):
    with worker.transaction():
        worker.execute("select 1")
        job_id = enqueue()

        assert worker.row(CLAIM, "email", limit)["job_id"] == job_id


def test_claim_gives_the_lease_that_the_policy_says(worker, owner, enqueue):
    owner.execute("update instance set lease_seconds = 3600")
    enqueue()

    row = worker.row(CLAIM, "email", 1)

    left = row["lease_expires_at"] - owner.value("select clock_timestamp()")
    assert timedelta(seconds=3590) < left <= timedelta(seconds=3600)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        "set timezone to 'Pacific/Kiritimati'",
        "set timezone to 'America/New_York'",
        "set datestyle to 'German, DMY'",
        "set datestyle to 'SQL, MDY'",
        "set intervalstyle to 'sql_standard'",
        "set intervalstyle to 'iso_8601'",
        "set standard_conforming_strings to off; set escape_string_warning to off",
        "set bytea_output to 'escape'",
        "set extra_float_digits to -15",
        "set default_transaction_isolation to 'serializable'",
        "set default_transaction_isolation to 'repeatable read'",
        "set search_path to pg_temp, jobs_email",
        "set jit_above_cost to 0; set jit to on",
    ],
)
def test_claim_leases_the_same_under_any_setting_of_the_session(
    connect, owner, enqueue, expire, settings
):
    job_id = enqueue()
    worker = connect("email-worker")
    worker.execute(settings)

    token = worker.value("select lease_token from claim('email')")
    seconds = owner.value(
        "select extract(epoch from lease_expires_at - leased_at)::int from live_job"
    )
    stored = owner.value("select lease_token_hash from live_job")
    worker.execute("select renew(%s, %s)", (job_id, token))
    expire(job_id)
    again = connect("email-worker")
    again.execute(settings)
    second = again.value("select lease_token from claim('email')")

    assert re.fullmatch("job_lease_[0-9a-f]{64}", token)
    assert stored == hashlib.sha256(token.encode()).digest()
    assert seconds == 30
    assert again.value("select complete(%s, %s)", job_id, second) is True


def test_claim_tells_its_caller_from_hundreds_of_others(owner, connect, enqueue):
    enqueue()
    owner.execute(
        "insert into caller select 'stand-in-' || n, false, true, false"
        " from generate_series(1, 200) as n"
    )

    assert len(connect("email-worker").rows(CLAIM, "email", 1)) == 1
    assert owner.value("select lease_owner from live_job") == "email-worker"


@pytest.mark.parametrize("attempt", [0, 1, 3])
@pytest.mark.parametrize("limit", [1, 100])
def test_claim_is_not_stopped_by_a_lease_that_is_broken(
    owner, worker, enqueue, attempt, limit
):
    fields = {
        "leased_at": "clock_timestamp() - interval '9 s'",
        "lease_expires_at": "clock_timestamp() - interval '1 s'",
        "lease_owner": "'email-worker'",
        "lease_token_hash": "'x'",
    }
    broken = []
    for count in (1, 2, 3):
        for kept in combinations(fields, count):
            job_id = enqueue()
            broken.append(job_id)
            owner.execute(
                f"update live_job set attempt = {attempt}, "
                + ", ".join(f"{name} = {fields[name]}" for name in kept)
                + " where job_id = %s",
                (job_id,),
            )
    sound = enqueue()

    claimed = set()
    for _ in range(len(broken) + 1):
        claimed |= {
            job_id
            for (job_id,) in worker.rows("select job_id from claim('email', %s)", limit)
        }

    assert sound in claimed
    assert claimed - {sound} == (set() if attempt == 3 else set(broken))


def test_a_queue_gives_no_job_of_a_queue_with_a_similar_name(
    configure, enqueue, worker, claim
):
    configure(queues=["email", "slow", "a_b", "axb", "A_b", "a_b."])
    for queue in ("axb", "A_b", "a_b."):
        enqueue(queue)

    assert worker.rows("select * from claim('a_b')") == []
    assert claim("A_b")
