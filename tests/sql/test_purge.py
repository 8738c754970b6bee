import pytest

PURGE = "select purge(%s::timestamptz, %s::integer)"


@pytest.fixture
def ended(owner):
    """Insert jobs that ended so many hours ago. Return their ids."""

    def ended(*hours_ago, outcome="succeeded"):
        return [
            job_id
            for hours in hours_ago
            for (job_id,) in owner.rows(
                """
                with made as (
                    insert into job (
                        job_id, created_at, max_attempts, producer, queue, kind,
                        idempotency_key, payload
                    )
                    select
                        _enqueue_job_id(clock_timestamp()),
                        clock_timestamp() - make_interval(hours => %s + 1), 3,
                        'accounts', 'email', 'send', gen_random_uuid()::text, '{}'
                    returning job_id
                )
                insert into attempt (
                    job_id, leased_at, ended_at, attempt, max_attempts, queue, worker, outcome,
                    failure_code, lease_token_hash
                )
                select
                    job_id, clock_timestamp() - make_interval(hours => %s),
                    clock_timestamp() - make_interval(hours => %s), 1, 3,
                    'email', 'email-worker', %s,
                    case when %s = 'lease_expired' then 'attempts_exhausted' end, ''
                from made
                returning job_id
                """,
                *(hours, hours, hours, outcome, outcome),
            )
        ]

    return ended


@pytest.fixture
def cutoff(owner):
    """An instant some hours ago."""

    def cutoff(hours=0):
        return owner.value(
            "select clock_timestamp() - make_interval(hours => %s)", hours
        )

    return cutoff


@pytest.fixture
def left(owner):
    """The jobs that are left."""

    def left():
        return {job_id for (job_id,) in owner.rows("select job_id from job")}

    return left


@pytest.fixture
def end_anew(owner):
    """Let an ended job have failed a second time, an hour ago."""

    def end_anew(job_id):
        owner.execute(
            "insert into attempt (job_id, leased_at, ended_at, attempt, max_attempts,"
            " queue, worker, outcome, lease_token_hash) values (%s, clock_timestamp(),"
            " clock_timestamp() - interval '1 h', 2, 3, 'email', 'email-worker', 'failed', '')",
            (job_id,),
        )

    return end_anew


def test_purge_deletes_jobs_that_ended_before_the_cutoff_with_their_evidence(
    operator, owner, ended, cutoff, left
):
    ended(5, 4, 3)
    ended(5, outcome="failed")
    ended(5, outcome="lease_expired")
    kept = ended(1)

    assert operator.value(PURGE, cutoff(2), 1000) == 5

    assert left() == set(kept)
    assert owner.rows("select job_id from attempt") == [(kept[0],)]
    assert operator.value(PURGE, cutoff(2), 1000) == 0


def test_purge_goes_by_the_end_of_the_last_attempt(
    operator, owner, ended, end_anew, cutoff, left
):
    (job_id,) = ended(5)
    end_anew(job_id)

    assert operator.value(PURGE, cutoff(2), 1000) == 0
    assert left() == {job_id}
    assert operator.value(PURGE, cutoff(0), 1000) == 1
    assert owner.value("select count(*) from attempt") == 0


def test_purge_deletes_the_oldest_first_and_no_more_than_the_limit(
    operator, ended, cutoff, left
):
    by_age = dict(zip((3, 9, 5, 7, 1), ended(3, 9, 5, 7, 1), strict=True))

    assert operator.value(PURGE, cutoff(2), 2) == 2
    assert left() == {by_age[5], by_age[3], by_age[1]}
    assert operator.value(PURGE, cutoff(2), 1) == 1
    assert left() == {by_age[3], by_age[1]}
    assert operator.value(PURGE, cutoff(2), 2) == 1
    assert left() == {by_age[1]}


@pytest.mark.parametrize("status", ["queued", "running", "lapsed", "retrying"])
def test_purge_never_deletes_a_live_job(connect, operator, owner, enqueue, status):
    job_id = enqueue()
    worker = connect("email-worker")
    if status != "queued":
        token = worker.value("select lease_token from claim('email')")
    if status == "retrying":
        worker.execute("select fail(%s, %s, 'timeout', true)", (job_id, token))
    owner.execute("update job set created_at = created_at - interval '9 years'")
    owner.execute("update attempt set ended_at = ended_at - interval '9 years'")
    if status == "lapsed":
        owner.execute(
            "update live_job set leased_at = leased_at - interval '9 years',"
            " lease_expires_at = lease_expires_at - interval '9 years'"
        )

    assert operator.value(PURGE, owner.value("select clock_timestamp()"), 1000) == 0

    assert owner.value("select count(*) from job") == 1
    assert owner.value("select count(*) from live_job") == 1


def test_purge_leaves_a_redriven_job(operator, owner, ended, cutoff, left):
    first, _ = ended(9, 8, outcome="failed")
    operator.execute("select redrive(%s)", (first,))

    assert operator.value(PURGE, cutoff(), 1000) == 1

    assert left() == {first}
    assert owner.value("select count(*) from attempt") == 1
    assert owner.value("select count(*) from live_job") == 1


def test_purge_spends_nothing_of_its_limit_on_a_redriven_job(
    operator, ended, cutoff, left
):
    redriven, kept, oldest = ended(9, 7, 8, outcome="failed")
    operator.execute("select redrive(%s)", (redriven,))

    assert operator.value(PURGE, cutoff(), 1) == 1

    assert left() == {redriven, kept}
    assert oldest not in left()


def test_purge_spends_nothing_of_its_limit_on_a_job_that_has_ended_anew_since(
    operator, ended, end_anew, cutoff, left
):
    first, _ = ended(9, 8, outcome="failed")
    end_anew(first)

    assert operator.value(PURGE, cutoff(2), 1) == 1
    assert left() == {first}


def test_purge_takes_the_time_of_its_own_call_for_a_cutoff(operator, ended):
    ended(1)

    assert operator.value("select purge(clock_timestamp())") == 1


def test_purge_sets_the_key_of_an_ended_job_free_again(
    operator, producer, owner, ended, cutoff
):
    (job_id,) = ended(5)
    owner.execute("update job set idempotency_key = 'k'")
    statement = "select * from enqueue('slow', 'other', '{\"a\": 1}', 'k')"
    with producer.refusing("LJ002"):
        producer.row(statement)

    operator.value(PURGE, cutoff(), 1000)

    answer = producer.row(statement)
    assert answer["created"]
    assert answer["job_id"] != job_id


def test_purge_makes_a_job_unknown(operator, observer, ended, cutoff):
    (job_id,) = ended(5)

    operator.value(PURGE, cutoff(), 1000)

    with observer.refusing("LJ006"):
        observer.execute("select inspect(%s)", (job_id,))
    with operator.refusing("LJ006"):
        operator.execute("select redrive(%s)", (job_id,))


def test_purge_makes_a_repeated_report_an_invalid_lease(
    connect, operator, enqueue, owner
):
    job_id = enqueue()
    worker = connect("email-worker")
    token = worker.value("select lease_token from claim('email')")
    worker.execute("select complete(%s, %s)", (job_id, token))

    operator.value(PURGE, owner.value("select clock_timestamp()"), 1)

    with worker.refusing("LJ004"):
        worker.execute("select complete(%s, %s)", (job_id, token))


def test_purge_takes_1000_jobs_by_default(operator, owner, cutoff):
    owner.execute(
        """
        with made as (
            insert into job (
                job_id, created_at, max_attempts, producer, queue, kind,
                idempotency_key, payload
            )
            select
                gen_random_uuid(), clock_timestamp(), 3, 'accounts', 'email', 'send',
                n::text, '{}'
            from generate_series(1, 1001) as n
            returning job_id
        )
        insert into attempt (
            job_id, leased_at, ended_at, attempt, max_attempts, queue, worker, outcome,
            lease_token_hash
        )
        select
            job_id, clock_timestamp(), clock_timestamp() - interval '1 h', 1, 3,
            'email', 'email-worker', 'succeeded', ''
        from made
        """
    )

    assert operator.value("select purge(p_before => %s)", cutoff()) == 1000
    assert operator.value("select purge(p_before => %s)", cutoff()) == 1


def test_purge_refuses_a_cutoff_that_is_null_infinite_or_yet_to_come(
    operator, ended, state
):
    ended(5)
    before = state()

    for bad in (
        "null",
        "'infinity'",
        "'-infinity'",
        "clock_timestamp() + interval '1 s'",
    ):
        with operator.refusing("LJ007") as caught:
            operator.execute(f"select purge({bad}, 10)")
        assert "before" in caught.value.diag.message_primary, bad

    assert state() == before


def test_purge_refuses_a_limit_out_of_bounds(operator, ended, cutoff, state):
    ended(5)
    before = state()

    for limit in (None, 0, -1, 10001, 2147483647):
        with operator.refusing("LJ007") as caught:
            operator.value(PURGE, cutoff(), limit)
        assert "limit" in caught.value.diag.message_primary, limit

    assert state() == before


def test_purge_accepts_a_limit_of_1_and_of_10000(operator, ended, cutoff):
    ended(5, 4, 3)

    assert operator.value(PURGE, cutoff(), 1) == 1
    assert operator.value(PURGE, cutoff(), 10000) == 2


def test_purge_writes_an_audit_row(operator, owner, prefix, ended, cutoff):
    ended(5, 4, 3)
    before = cutoff(2)

    operator.value(PURGE, before, 2)

    act = owner.row("select * from operator_act where act = 'purge'")
    assert act["operator"] == f"{prefix}_duty"
    assert act["job_count"] == 2
    assert act["arguments"]["limit"] == 2
    assert (
        owner.value(
            "select (arguments ->> 'before')::timestamptz from operator_act"
            " where act = 'purge'"
        )
        == before
    )


def test_purge_rolls_back_with_the_callers_transaction(operator, ended, cutoff, state):
    ended(5)
    before = state()

    with operator.transaction(force_rollback=True):
        operator.value(PURGE, cutoff(), 10)

    assert state() == before


def test_purge_does_not_walk_the_attempts_that_were_followed_by_another(
    operator, owner, ended, cutoff
):
    ended(5, 4)
    owner.execute(
        "insert into attempt (job_id, leased_at, ended_at, retry_at, attempt,"
        " max_attempts, retryable, queue, worker, outcome, failure_code, lease_token_hash)"
        " select gen_random_uuid(), t, t, t, 1, 3, true, 'email', 'w', 'retried', 'x', ''"
        " from generate_series(1, 20000),"
        " (select clock_timestamp() - interval '9 h') as c (t)"
    )
    owner.execute("analyze attempt")
    operator.execute(PURGE, (cutoff(2), 1))

    plan = operator.value(
        "explain (analyze, buffers, format json) select purge(%s, 1)", cutoff(2)
    )

    buffers = plan[0]["Plan"]
    assert buffers["Shared Hit Blocks"] + buffers["Shared Read Blocks"] < 100
