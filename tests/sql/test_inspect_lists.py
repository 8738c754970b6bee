"""The lists that DBAs read: attempts, queues, workers, failures and acts."""

from datetime import timedelta
from uuid import uuid4

import pytest

LATER = "2040-01-01T00:00:00Z"


@pytest.fixture
def fail(worker, claim):
    """Claim one job and fail it permanently."""

    def fail(code="refused", queue="email"):
        job_id, token = claim(queue)
        worker.execute("select fail(%s, %s, %s, false)", (job_id, token, code))
        return job_id

    return fail


# inspect_attempts


def test_each_attempt_of_a_job_is_a_row_and_the_last_may_be_running(
    enqueue, claim, worker, rival, expire, make_due, observer, owner
):
    enqueue()
    worker.execute("select complete(%s, %s)", claim())
    job_id = enqueue()
    worker.execute("select fail(%s, %s, 'timeout', true)", claim())
    make_due(job_id)
    claim(session=rival)
    expire(job_id)
    claim()
    enqueue()
    claim()
    # The order is asked for, and not what the key happens to give.
    owner.execute(
        "alter table attempt drop constraint attempt_pkey;"
        " update attempt set worker = worker where attempt = 1"
    )

    rows = observer.rows(
        "select attempt, worker, outcome, failure_code, retryable, max_attempts,"
        " ended_at is not null, retry_at is not null, lease_expires_at is not null"
        " from inspect_attempts(%s)",
        job_id,
    )

    assert rows == [
        (1, "email-worker", "retried", "timeout", True, 3, True, True, False),
        (2, "spare-worker", "lease_expired", None, None, 3, True, False, False),
        (3, "email-worker", "running", None, None, 3, False, False, True),
    ]


def test_a_job_never_claimed_has_no_attempts(enqueue, observer):
    assert observer.rows("select * from inspect_attempts(%s)", enqueue()) == []


@pytest.mark.parametrize("job_id", [None, uuid4()])
def test_attempts_of_no_job_are_refused(enqueue, observer, job_id):
    enqueue()
    with observer.refusing("LJ006"):
        observer.execute("select * from inspect_attempts(%s)", (job_id,))


# inspect_queues


def test_the_jobs_of_a_queue_are_counted_by_their_state(
    enqueue, claim, worker, expire, observer, owner
):
    for _ in range(5):
        enqueue()
    lapsed, _ = claim()
    claim()
    worker.execute("select fail(%s, %s, 'timeout', true)", claim())
    expire(lapsed)
    owner.execute(
        "update live_job set available_at = clock_timestamp() - interval '1 h'"
        " where lease_owner is null and attempt = 0"
    )
    enqueue(available_at=LATER)

    row = observer.row(
        "select ready, scheduled, retry_waiting, running, expired, is_declared,"
        " is_estimate, oldest_ready_age, oldest_lapse_at, next_due_at"
        " from inspect_queues() where queue = 'email'"
    )

    assert list(row.values())[:7] == [2, 1, 1, 1, 1, True, False]
    assert timedelta(hours=1) <= row["oldest_ready_age"] < timedelta(hours=1, minutes=1)
    assert (row["oldest_lapse_at"], row["next_due_at"]) == (
        owner.value("select min(lease_expires_at) from live_job"),
        owner.value("select available_at from live_job where last_failure_code <> ''"),
    )


def test_each_queue_has_its_own_oldest_ready_and_next_due_job(
    enqueue, claim, observer, owner
):
    enqueue()
    claim()
    owner.execute("update live_job set available_at = '2020-01-01'")
    enqueue()
    enqueue(queue="slow", available_at=LATER)

    rows = observer.rows(
        "select queue, oldest_ready_age < interval '1 min', next_due_at,"
        " oldest_lapse_at from inspect_queues()"
    )

    assert rows == [
        ("email", True, None, None),
        ("slow", None, owner.value("select %s::timestamptz", LATER), None),
    ]


def test_the_first_of_a_queue_are_asked_for_and_not_what_an_index_gives(
    enqueue, observer, owner
):
    for available_at in (None, "2020-01-01T00:00:00Z", "2041-01-01T00:00:00Z", LATER):
        enqueue(available_at=available_at)
    owner.execute(
        "update live_job set available_at = '2020-01-01' where available_at = ("
        "select min(available_at) from live_job)"
    )
    owner.execute("drop index live_job_claimable_idx")
    owner.execute("create index live_job_claimable_idx on live_job (queue)")

    assert observer.row(
        "select oldest_ready_age > interval '1 year' as is_oldest, next_due_at"
        " from inspect_queues() where queue = 'email'"
    ) == {
        "is_oldest": True,
        "next_due_at": owner.value("select %s::timestamptz", LATER),
    }


def test_queues_are_listed_by_name(configure, observer):
    names = [f"q{n}" for n in range(20)]
    configure(queues=["email", "slow", *names])

    rows = observer.rows("select queue from inspect_queues()")

    assert [name for (name,) in rows] == sorted(["email", "slow", *names])


def test_a_lease_of_now_is_newer_than_that_of_a_job_that_has_ended(
    enqueue, claim, worker, observer, owner
):
    enqueue()
    worker.execute("select complete(%s, %s)", claim())
    enqueue()
    claim()

    assert observer.value(
        "select last_claimed_at from inspect_queues() where queue = 'email'"
    ) == owner.value("select leased_at from live_job")


@pytest.mark.slow
def test_of_the_last_ends_10000_are_counted(observer, owner):
    # A millisecond apart, and the newest first on the disk.
    owner.execute(
        "with made as (insert into job (job_id, created_at, max_attempts, producer,"
        " queue, kind, idempotency_key, payload) select gen_random_uuid(), '2026-01-01',"
        " 3, 'accounts', 'email', 'send', n::text, '{}' from generate_series(1, 10001)"
        " as n returning job_id, idempotency_key::integer as n)"
        " insert into attempt (job_id, leased_at, ended_at, attempt, max_attempts,"
        " queue, worker, outcome, lease_token_hash) select job_id, t, t - n * interval '1 ms',"
        " 1, 3, 'email', 'email-worker', 'succeeded', '' from made, clock_timestamp() as t"
    )

    assert observer.row(
        "select succeeded, counted_since from inspect_queues() where queue = 'email'"
    ) == {
        "succeeded": 10000,
        "counted_since": owner.value(
            "select ended_at from attempt order by ended_at offset 1 limit 1"
        ),
    }


def test_the_reads_go_by_the_clock_and_not_by_when_their_statement_began(
    enqueue, claim, observer, owner
):
    enqueue()
    job_id, _ = claim()
    soon = owner.value(
        "update live_job set lease_expires_at = clock_timestamp() + interval '150 ms'"
        " where job_id = %s returning lease_expires_at",
        job_id,
    )

    assert observer.rows(
        "with slept as materialized (select pg_sleep_until(%s))"
        " select (select sum(expired) from inspect_queues()),"
        " (select sum(expired) from inspect_workers()) from slept",
        soon,
    ) == [(1, 1)]


@pytest.fixture
def share(owner):
    """Let that percentage of live_job be read."""

    def share(percentage):
        owner.execute(
            "create or replace function _queue_share_to_read() returns real language sql"
            f" as 'select {percentage}::real'"
        )

    return share


def test_of_a_sample_alone_the_counts_are_estimates(share, observer):
    statement = (
        "select is_estimate from inspect_queues()"
        " union all select is_estimate from inspect_workers()"
    )
    for percentage, is_estimate in ((99.5, True), (100, False)):
        share(percentage)
        assert set(observer.rows(statement)) == {(is_estimate,)}


def test_a_sample_that_shows_nothing_hides_no_lease(
    share, enqueue, claim, expire, observer, owner
):
    for _ in range(2):
        enqueue()
    first, _ = claim()
    claim()
    expire(first)
    enqueue(queue="slow")
    claim("slow")
    # So little that not one page is read.
    share(0.000001)

    assert observer.rows(
        "select queue, running, last_claimed_at, oldest_lapse_at from inspect_queues()"
    ) == owner.rows(
        "select queue, 0, max(leased_at), min(lease_expires_at)"
        " filter (where lease_expires_at < clock_timestamp())"
        " from live_job group by queue order by queue"
    )


def test_the_oldest_lapse_is_reported_from_every_place(
    share, enqueue, claim, expire, observer, owner
):
    for _ in range(2):
        enqueue()
    first, second = claim()[0], claim()[0]
    expire(first)
    expire(second)
    # Not among the due, where the few that run are looked for.
    owner.execute(
        "update live_job set available_at = '2040-01-01' where job_id = %s", (first,)
    )
    share(99.9999)

    assert observer.rows(
        "select oldest_lapse_at, retry_waiting from inspect_queues()"
        " where queue = 'email'"
    ) == owner.rows("select min(lease_expires_at), 0 from live_job")


def test_the_ends_of_the_last_minutes_are_counted_by_failure_code(
    enqueue, claim, fail, worker, observer, owner
):
    enqueue()
    worker.execute("select fail(%s, %s, 'timeout', true)", claim())
    for _ in range(5):
        enqueue()
    enqueue(queue="slow")
    worker.execute("select complete(%s, %s)", claim())
    for code in ("refused", "timeout", "timeout"):
        fail(code)
    fail("odd", queue="slow")
    old = fail("ancient")
    owner.execute(
        "update attempt set ended_at = clock_timestamp() - interval '6 min'"
        " where job_id = %s",
        (old,),
    )

    rows = observer.rows(
        "select queue, succeeded, failed, failure_codes,"
        " clock_timestamp() - counted_since > interval '299 s',"
        " last_claimed_at is not null from inspect_queues()"
    )

    assert rows == [
        ("email", 1, 3, {"refused": 1, "timeout": 2}, True, True),
        ("slow", 0, 1, {"odd": 1}, True, True),
    ]


def test_an_exhausted_job_counts_as_failed(enqueue, claim, expire, operator, observer):
    enqueue(max_attempts=1)
    expire(claim()[0])
    operator.execute("select retire_expired()")

    assert observer.row(
        "select failed, failure_codes from inspect_queues() where queue = 'email'"
    ) == {"failed": 1, "failure_codes": {"attempts_exhausted": 1}}


def test_a_queue_that_is_not_declared_is_listed_while_it_has_jobs(
    enqueue, owner, observer
):
    enqueue(queue="slow")
    owner.execute("delete from queue where queue = 'slow'")

    assert observer.rows("select queue, is_declared, ready from inspect_queues()") == [
        ("email", True, 0),
        ("slow", False, 1),
    ]


def test_workers_that_wait_for_a_queue_are_counted(
    connect, observer, background, blocked
):
    for _ in range(2):
        session = connect("email-worker")
        session.execute("select pg_try_advisory_lock_shared(wait_key('email'))")
    # Others that hold something like it: in another database, for itself alone, and
    # by two numbers instead of one.
    key = session.value("select wait_key('slow')")
    elsewhere = connect("email-worker", dbname="postgres")
    elsewhere.execute("select pg_try_advisory_lock_shared(%s)", (key,))
    halves = key >> 32, (key & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
    session.execute("select pg_try_advisory_lock_shared(%s, %s)", halves)
    session.execute("select pg_try_advisory_lock(%s)", (key,))
    # And one that does not hold it yet.
    late = connect("email-worker")
    waiting = background(late.execute, "select pg_advisory_lock_shared(%s)", (key,))
    blocked(late, session)

    counted = observer.rows("select queue, workers_waiting from inspect_queues()")
    session.execute("select pg_advisory_unlock(%s)", (key,))
    waiting.result()

    assert counted == [("email", 2), ("slow", 0)]


@pytest.fixture
def swell(owner):
    """Make live_job larger than what is read whole, of rows for all queues alike."""
    owner.execute(
        "alter table live_job set (autovacuum_enabled = off, fillfactor = 10)"
    )
    owner.execute(
        "insert into live_job (job_id, available_at, attempt, max_attempts, queue,"
        " lease_owner, lease_expires_at, leased_at)"
        " select gen_random_uuid(), '2020-01-01', 1, 3,"
        " case when n % 2 = 0 then 'email' else 'slow' end, 'email-worker',"
        " '2040-01-01', '2020-01-01' from generate_series(1, 100000) as n"
    )


@pytest.mark.slow
def test_counts_of_a_large_table_are_estimates_that_say_so(observer, owner, swell):
    assert owner.value("select _queue_share_to_read()") < 90

    rows = observer.rows("select is_estimate, running from inspect_queues()")
    (leases,) = observer.rows(
        "select is_estimate, leases from inspect_workers() where leases > 0"
    )

    assert all(is_estimate for is_estimate, _ in rows)
    assert sum(running for _, running in rows) == pytest.approx(100000, rel=0.1)
    assert leases == (True, pytest.approx(100000, rel=0.1))


@pytest.mark.slow
def test_a_sample_misses_no_sign_of_life(observer, owner, swell):
    owner.execute(
        "update live_job set lease_owner = null, lease_expires_at = null,"
        " leased_at = null"
    )
    owner.execute(
        "update live_job set lease_owner = 'email-worker', leased_at = '2021-01-01',"
        " lease_expires_at = '2021-01-02' where job_id in (select job_id from live_job"
        " where queue = 'email' order by available_at, job_id limit 1)"
    )
    assert owner.value("select _queue_share_to_read()") < 90

    seen = observer.rows(
        "select last_claimed_at::date::text, oldest_lapse_at::date::text"
        " from inspect_queues() where queue = 'email'"
    )

    assert seen == [("2021-01-01", "2021-01-02")]


# inspect_workers


def test_each_worker_is_listed_with_its_leases_and_sessions(
    enqueue, claim, expire, worker, observer, owner, connect
):
    connect("spare-worker", dbname="postgres")
    for _ in range(4):
        enqueue()
    claim()
    claim()
    expire(claim()[0])

    rows = observer.rows("select * from inspect_workers()")

    oldest, following, job_id = owner.row(
        "select min(leased_at), min(lease_expires_at)"
        " filter (where lease_expires_at > clock_timestamp()) as next,"
        " (array_agg(job_id order by leased_at))[1] as job_id from live_job"
    ).values()
    assert rows == [
        ("email-worker", True, False, 3, 1, oldest, following, 1, job_id, None),
        ("spare-worker", True, False, 0, 0, None, None, 0, None, None),
    ]


def test_the_reader_s_session_is_not_a_worker_session(new_caller, connect):
    name = new_caller("worker", "observer")
    ask = "select sessions from inspect_workers() where worker = %s"

    alone = connect(name).value(ask, name)
    with connect(name) as asking:
        beside = asking.value(ask, name)

    assert (alone, beside) == (0, 1)


def test_the_maker_of_a_worker_s_role_is_not_a_worker_session(owner, new_role, connect):
    if owner.info.server_version < 160000:
        pytest.skip("whoever is a member may take the role")
    maker = new_role()
    with owner.transaction(force_rollback=True):
        owner.execute(
            f'grant "spare-worker" to {maker} with admin true, inherit false, set false'
        )
        with connect(maker):
            sessions = owner.value(
                "select sessions from inspect_workers() where worker = 'spare-worker'"
            )

    assert sessions == 0


def test_a_worker_that_is_not_declared_is_listed_while_it_holds_leases(
    enqueue, claim, owner, observer
):
    enqueue()
    claim()
    owner.execute("delete from caller where caller = 'email-worker'")

    assert observer.rows(
        "select worker, is_declared, leases from inspect_workers()"
    ) == [
        ("email-worker", False, 1),
        ("spare-worker", True, 0),
    ]


# inspect_failures

FAILURES = "select job_id, failure_code, queue, attempts from inspect_failures"


def test_failed_jobs_are_listed_newest_first(enqueue, fail, observer, claim, worker):
    for _ in range(3):
        enqueue()
    enqueue(queue="slow")
    enqueue(available_at=LATER)
    first, second = fail("a"), fail("b")
    worker.execute("select complete(%s, %s)", claim())
    third = fail("c", queue="slow")

    assert observer.rows(f"{FAILURES}()") == [
        (third, "c", "slow", 1),
        (second, "b", "email", 1),
        (first, "a", "email", 1),
    ]
    assert [r[0] for r in observer.rows(f"{FAILURES}('email')")] == [second, first]
    assert [r[0] for r in observer.rows(f"{FAILURES}(p_failure_code => 'a')")] == [
        first
    ]


def test_pages_of_failures_meet_where_jobs_ended_at_one_instant(
    enqueue, worker, observer, owner
):
    jobs = {enqueue() for _ in range(7)}
    worker.execute(
        "select fail_many(array_agg(job_id), array_agg(lease_token),"
        " array_agg('x'::text), array_agg(false)) from claim('email', 7)"
    )
    owner.execute("update attempt set ended_at = (select max(ended_at) from attempt)")

    seen, page = [], (None, None)
    while rows := observer.rows(
        "select job_id, ended_at from inspect_failures("
        "p_limit => 2, p_before => %s, p_before_job_id => %s)",
        *page,
    ):
        seen += [job_id for job_id, _ in rows]
        assert len(rows) <= 2
        assert len(seen) <= 7
        page = rows[-1][1], rows[-1][0]

    assert len(seen) == 7
    assert set(seen) == jobs


def test_failures_since_a_time_leave_out_the_older_ones(enqueue, fail, owner, observer):
    enqueue()
    enqueue()
    fail()
    second = fail()
    since = owner.value("select max(ended_at) from attempt")

    rows = observer.rows(f"{FAILURES}(null, %s)", since)

    assert [row[0] for row in rows] == [second]


def test_a_job_that_was_redriven_is_not_a_failure_until_it_fails_again(
    enqueue, fail, operator, observer, owner, claim, worker
):
    job_id = enqueue()
    fail("a")
    operator.execute("select redrive(%s)", (job_id,))
    assert observer.rows(f"{FAILURES}()") == []

    fail("b")
    enqueue()
    other = fail("c")
    assert observer.rows(f"{FAILURES}()") == [
        (other, "c", "email", 1),
        (job_id, "b", "email", 2),
    ]
    assert observer.rows(f"{FAILURES}(p_failure_code => 'a')") == []

    operator.execute("select redrive(%s)", (job_id,))
    worker.execute("select complete(%s, %s)", claim())
    assert observer.rows(f"{FAILURES}()") == [(other, "c", "email", 1)]


@pytest.mark.parametrize("of", ["inspect_failures", "inspect_acts"])
def test_a_limit_at_its_bound_is_accepted(enqueue, fail, observer, of):
    enqueue()
    fail()
    for limit in (1, 10000):
        assert len(observer.rows(f"select from {of}(p_limit => %s)", limit)) == 1


@pytest.mark.parametrize("limit", [None, 0, -1, 10001])
@pytest.mark.parametrize("of", ["inspect_failures", "inspect_acts"])
def test_a_limit_out_of_range_is_refused(observer, of, limit):
    with observer.refusing("LJ007") as caught:
        observer.execute(f"select from {of}(p_limit => %s::integer)", (limit,))

    assert "limit must be from 1 to 10000" in str(caught.value)


def test_failures_with_a_malformed_code_are_refused(observer):
    with observer.refusing("LJ005"):
        observer.execute("select from inspect_failures(p_failure_code => 'no code')")


def test_failures_of_a_queue_that_is_not_declared_are_refused(observer):
    with observer.refusing("LJ003"):
        observer.execute("select from inspect_failures('nope')")


# inspect_acts


def test_acts_are_listed_newest_first_and_page_by_page(
    enqueue, claim, expire, fail, operator, observer
):
    job_id = enqueue()
    fail()
    lapsed = enqueue(queue="slow", max_attempts=1)
    claim("slow")
    expire(lapsed)
    operator.execute("select redrive(%s, 2)", (job_id,))
    operator.execute("select retire_expired(5)")

    last, before = observer.rows(
        "select act_id, operator, act, arguments, job_count from inspect_acts(2)"
    )

    assert last[1:] == (operator.info.user, "retire_expired", {"limit": 5}, 1)
    assert before[1:] == (
        operator.info.user,
        "redrive",
        {"job_id": str(job_id), "extra_attempts": 2},
        1,
    )
    older = observer.rows("select act from inspect_acts(p_before => %s)", before[0])
    assert older == [("configure",)]


def test_an_act_under_a_group_s_name_names_the_login_too(
    new_role, prefix, connect, observer, enqueue, fail
):
    name, group = new_role(members_of=[f"{prefix}_operator"]), f"{prefix}_operator"
    session = connect(name)
    for statement in ("select", f"set role {group}"):
        job_id = enqueue()
        fail()
        session.execute(statement)
        session.execute("select redrive(%s)", (job_id,))
        fail()

    assert observer.rows("select operator, login from inspect_acts(2)") == [
        (group, name),
        (name, name),
    ]


def test_the_reads_show_no_payload_key_or_token(enqueue, claim, fail, observer):
    secret, key = f"secret-{uuid4()}", f"key-{uuid4()}"
    job_id = enqueue(payload={"of": secret}, key=key)
    enqueue(payload={"of": secret})
    fail()
    _, token = claim()

    shown = [
        row
        for read in (
            "inspect_attempts(%(job_id)s)",
            "explain_job(%(job_id)s)",
            "inspect_queues()",
            "inspect_workers()",
            "inspect_failures()",
            "inspect_jobs('email', 'queued')",
            "inspect_key(%(key)s, 'accounts')",
            "inspect_acts()",
            "inspect_health()",
        )
        for row in observer.execute(
            f"select t::text from {read} as t", {"job_id": job_id, "key": key}
        )
    ]

    assert shown
    assert not any(word in str(shown) for word in (secret, key, token))
