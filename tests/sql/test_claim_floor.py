"""The claim floor: where claims begin, when a full scan comes, and what it finds."""

from typing import NamedTuple

import psycopg
import pytest

from fixtures.floors import entries, take

LIMITS = pytest.mark.parametrize("limit", [1, 10])
# The longest that a full scan takes, as far as is believed: in steps of 200 us.
LONGEST = 3000


class Floor(NamedTuple):
    at: float  # seconds ago
    id: int
    scanned: float  # seconds ago
    took: int


@pytest.fixture
def floor(owner):
    """The floor of a queue, or None."""

    def floor(queue="email"):
        ((at, *rest),) = owner.rows(
            """
            select
                date_part('epoch', clock_timestamp())
                    - pg_sequence_last_value(floor[1]) / 1e6,
                pg_sequence_last_value(floor[2]),
                date_part('epoch', clock_timestamp())
                    - (pg_sequence_last_value(floor[3]) >> 12) / 1e3,
                (pg_sequence_last_value(floor[3]) & 4095)::integer
            from queue where queue = %s
            """,
            queue,
        )
        return None if at is None else Floor(at, *rest)

    return floor


@pytest.fixture
def force(owner):
    """Set the floor so many seconds ago, and the last full scan."""

    def force(at=30, scanned=0, took=LONGEST, queue="email"):
        owner.execute(
            """
            select
                setval(floor[1], (c.now * 1e6)::bigint - (%s * 1e6)::bigint),
                setval(floor[2], 0),
                setval(
                    floor[3],
                    (floor((c.now - %s) * 1e3)::bigint << 12) + %s::bigint
                )
            from queue
            cross join (select date_part('epoch', clock_timestamp())) as c (now)
            where queue = %s
            """,
            (at, scanned, took, queue),
        )

    return force


@pytest.fixture
def due(enqueue, owner):
    """Enqueue a job that fell due so many seconds ago."""

    def due(ago, **fields):
        job_id = enqueue(**fields)
        owner.execute(
            "update live_job"
            " set available_at = clock_timestamp() - make_interval(secs => %s)"
            " where job_id = %s",
            (ago, job_id),
        )
        return job_id

    return due


def reading(session, limit=1):
    return entries(
        session, "select job_id from jobs_email.claim('email', %s::integer)", limit
    )


def place(owner, job_id):
    """The due time of a job, seconds ago, and the number of its id, as a floor has them."""
    (row,) = owner.rows(
        "select date_part('epoch', clock_timestamp() - available_at),"
        " ('x' || left(replace(job_id::text, '-', ''), 15))::bit(60)::bigint"
        " from live_job where job_id = %s",
        job_id,
    )
    return row


@pytest.mark.parametrize("limit", [1, 3])
def test_a_claim_that_passes_few_entries_sets_no_floor(
    worker, due, running, floor, limit
):
    running(90)
    for _ in range(3):
        jobs = [due(50) for _ in range(limit)]

        assert take(worker, limit) == jobs
        assert floor() is None


@LIMITS
def test_a_claim_that_passes_over_100_entries_sets_the_floor_where_it_stopped(
    worker, owner, due, running, floor, limit
):
    running()
    jobs = [due(50 - n) for n in range(limit + 1)]

    assert take(worker, limit) == jobs[:limit]

    at, number = place(owner, jobs[limit - 1])
    assert floor().at == pytest.approx(at, abs=0.5)
    assert floor().id == number
    assert floor().scanned < 20


@LIMITS
def test_every_session_begins_at_the_floor_that_one_has_set(
    worker, rival, connect, due, running, limit
):
    running()
    jobs = [due(50 - n) for n in range(4 * limit)]
    assert take(worker, limit) == jobs[:limit]

    for n, session in enumerate((rival, worker, connect("email-worker")), 1):
        claimed, read = reading(session, limit)

        assert claimed == jobs[n * limit : (n + 1) * limit]
        assert read <= limit + 100


def test_the_next_due_time_is_read_behind_the_floor(worker, due, running, force):
    running()
    due(-60)
    force()

    (found,), read = entries(worker, "select next_available_at('email') is not null")

    assert found
    assert read < 10


def test_the_next_due_time_is_no_later_than_the_next_full_scan(worker, due, force):
    until = "select date_part('epoch', next_available_at('email') - clock_timestamp())"
    due(-60)
    force(took=1000)

    assert 8 < worker.value(until) < 10.1
    force(took=0)
    assert 0 < worker.value(until) < 1.1


def test_the_floor_tells_apart_jobs_that_fell_due_at_one_instant(
    worker, rival, owner, producer
):
    producer.execute(
        "select count(*) from generate_series(1, 200) as n,"
        " lateral enqueue('email', 'send', '{}', 'k' || n)"
    )
    owner.execute(
        "update live_job set available_at = date_trunc('minute', clock_timestamp())"
        " - interval '1 min'"
    )
    jobs = [j for (j,) in owner.rows("select job_id from live_job order by 1")]
    with worker.transaction():  # its own leases are passed over
        for job_id in jobs[:120]:
            assert take(worker) == [job_id]

    claimed, read = reading(rival, 10)

    assert claimed == jobs[120:130]
    assert read < 120  # without the floor, all 120 and the ten


@LIMITS
def test_the_floor_stays_20_ms_behind_for_what_commits_late(
    worker, producer, enqueue, running, floor, limit
):
    running()
    with producer.transaction():
        late = enqueue()
        assert take(worker, limit) == []
        assert floor().at > 0.02
        committed_soon = floor().at < 0.5
    if committed_soon:  # only a machine that stood still meanwhile puts it below
        assert set(take(worker, limit)) <= {late}


@LIMITS
@pytest.mark.parametrize(
    ("took", "held", "over"),
    [
        (0, 0.6, 1.1),
        (99, 0.6, 1.1),
        (200, 1.5, 2.1),
        (LONGEST, 29, 30.1),
        (4095, 29, 30.1),
    ],
)
def test_a_full_scan_comes_after_50_times_the_last_one_and_a_second_at_least(
    worker, due, force, limit, took, held, over
):
    older, newer = due(60), due(10)
    force(scanned=held, took=took)
    assert take(worker, limit) == [newer]
    newest = due(5)
    force(scanned=over, took=took)

    assert take(worker, limit) == [older, newest][:limit]


@LIMITS
@pytest.mark.parametrize(
    ("took", "held", "over"),
    [(9, None, 0), (10, 0, 0.2), (30, 0, 0.4), (2000, 15, 20.1)],
)
def test_a_claim_that_finds_nothing_scans_after_50_times_the_last_scan(
    worker, due, force, limit, took, held, over
):
    older = due(60)
    if held is not None:
        force(scanned=held, took=took)
        assert take(worker, limit) == []
    force(scanned=over, took=took)

    assert take(worker, limit) == [older]


def test_no_other_session_scans_while_one_does(
    worker, rival, owner, connect, due, force, blocked, background
):
    exhausted, older = due(60), due(50)
    owner.execute(
        "update live_job set attempt = max_attempts where job_id = %s", (exhausted,)
    )
    force(scanned=31)
    holder = connect()
    holder.execute("begin")
    holder.execute("lock table attempt in access exclusive mode")

    scanning = background(take, worker)
    blocked(worker, holder)
    assert take(rival) == []

    holder.execute("rollback")
    assert scanning.result(20) == [older]


@pytest.mark.parametrize(("took", "taken"), [(0, 100), (500, 500)])
def test_a_full_scan_that_dies_is_made_again_after_the_pause_of_the_one_before(
    worker, owner, connect, due, force, floor, blocked, background, took, taken
):
    exhausted = due(60)
    owner.execute(
        "update live_job set attempt = max_attempts where job_id = %s", (exhausted,)
    )
    force(scanned=31, took=took)
    holder = connect()
    holder.execute("begin")
    holder.execute("lock table attempt in access exclusive mode")
    scanning = background(take, worker)
    blocked(worker, holder)

    owner.execute("select pg_cancel_backend(%s)", (worker.pid,))

    with pytest.raises(psycopg.errors.QueryCanceled):
        scanning.result(20)
    assert floor().scanned < 20
    assert floor().took == taken


def test_a_full_scan_records_when_it_was_and_how_long_it_took(
    worker, due, running, force, floor
):
    running()
    due(50)
    force(scanned=100)

    take(worker)

    assert floor().scanned < 20
    assert floor().took < LONGEST


@LIMITS
def test_a_full_scan_that_passes_few_entries_removes_the_floor(
    worker, due, force, floor, limit
):
    force(scanned=31)
    older, newer = due(60), due(50)

    assert take(worker, limit) == [older, newer][:limit]
    assert floor() is None


@LIMITS
@pytest.mark.parametrize("where", [{"at": -5}, {"at": -86400}, {"scanned": -5}])
def test_a_floor_or_a_scan_in_the_future_does_not_count(
    worker, due, force, limit, where
):
    older, newer = due(60), due(10)
    force(**where)

    assert take(worker, limit) == [older, newer][:limit]


@LIMITS
def test_a_queue_without_sequences_is_scanned_from_the_beginning(
    worker, owner, due, running, limit
):
    owner.execute("update queue set floor = null where queue = 'email'")
    running()
    for _ in range(2):
        jobs = [due(50) for _ in range(limit)]

        assert take(worker, limit) == jobs
    assert worker.value("select next_available_at('email') is not null")


def below_by_a_late_commit(owner, worker, job_id, due):
    """Hide nothing more: the job was due long before it was committed."""


def below_by_a_lapsed_lease(owner, worker, job_id, due):
    owner.execute(
        "update live_job set attempt = 1, leased_at = clock_timestamp() - interval '1 min',"
        " lease_expires_at = clock_timestamp() - interval '1 s',"
        " lease_owner = 'spare-worker', lease_token_hash = 't' where job_id = %s",
        (job_id,),
    )


@LIMITS
@pytest.mark.parametrize("below", [below_by_a_late_commit, below_by_a_lapsed_lease])
def test_a_job_below_the_floor_is_found_by_the_next_full_scan(
    worker, owner, due, force, scan_is_due, limit, below
):
    job_id = due(60)
    below(owner, worker, job_id, due)
    force()
    newer = due(10)
    assert take(worker, limit) == [newer]

    scan_is_due()

    assert take(worker, limit) == [job_id]


@pytest.mark.parametrize("ending", ["rollback", "rollback to savepoint here"])
def test_a_job_of_a_claim_that_was_rolled_back_is_found_by_the_next_full_scan(
    worker, rival, due, force, scan_is_due, ending
):
    jobs = [due(50), due(40)]
    worker.execute("begin")
    worker.execute("savepoint here")
    assert take(worker) == jobs[:1]
    force(at=45)
    worker.execute(ending)
    worker.execute("commit")
    assert take(rival) == jobs[1:]

    scan_is_due()

    assert take(rival) == jobs[:1]


def test_a_released_job_keeps_its_place_and_is_found_by_the_next_full_scan(
    worker, due, force, scan_is_due
):
    job_id = due(50)
    ((token,),) = worker.rows("select lease_token from claim('email')")
    force()
    worker.execute("select release(%s, %s)", (job_id, token))
    assert take(worker) == []

    scan_is_due()

    assert take(worker) == [job_id]


def test_a_job_that_is_retried_or_redriven_lies_above_the_floor(
    worker, operator, owner, due, force
):
    jobs = [due(60), due(50)]
    leases = dict(worker.rows("select job_id, lease_token from claim('email', 2)"))
    force(at=0.001)
    worker.execute("select fail(%s, %s, 'timeout', false)", (jobs[0], leases[jobs[0]]))
    operator.execute("select redrive(%s)", (jobs[0],))
    worker.execute("select fail(%s, %s, 'timeout', true)", (jobs[1], leases[jobs[1]]))
    retried = owner.value(
        "select available_at from live_job where job_id = %s", jobs[1]
    )

    assert take(worker, 2) == jobs[:1]
    assert worker.value("select next_available_at('email') <= %s", retried)


def test_a_floor_that_another_session_has_set_meanwhile_is_left_alone(
    owner, worker, force, floor
):
    force(at=30)
    was = owner.value(
        "select pg_sequence_last_value(floor[1]) from queue where queue = 'email'"
    )
    move = (
        "select _claim_floor_move(floor, %s, clock_timestamp(), false,"
        " clock_timestamp() - interval '5 s', gen_random_uuid())"
        " from queue where queue = 'email'"
    )

    owner.execute(move, (was - 1,))
    assert floor().at > 29
    owner.execute(move, (was,))
    assert floor().at < 29


@LIMITS
def test_each_queue_has_a_floor_of_its_own(worker, due, force, floor, limit):
    force(queue="slow")
    older = due(60)

    assert take(worker, limit) == [older]
    assert floor() is None
    assert floor("slow").at > 29


def test_the_sequences_belong_to_the_owner_and_are_logged(owner, prefix):
    assert owner.rows(
        "select distinct c.relpersistence::text, pg_get_userbyid(c.relowner)::text"
        " from pg_class as c join queue as q on c.oid = any (q.floor)"
    ) == [("p", f"{prefix}_owner")]


def test_the_sequences_of_a_removed_queue_go_to_the_next_new_one(
    owner, document, worker
):
    floors = "select queue, floor::text from queue order by 1"
    before = dict(owner.rows(floors))
    configure = "select configure(%s::jsonb)"

    owner.execute(configure, (document(queues=["slow"]),))
    owner.execute(configure, (document(queues=["new", "next", "slow"]),))

    after = dict(owner.rows(floors))
    assert after["slow"] == before["slow"]
    assert after["new"] == before["email"]
    assert len(set(after.values())) == 3
    assert worker.rows("select job_id from claim('new')") == []


@pytest.mark.parametrize("grantee", ["public", "stranger"])
def test_default_privileges_give_nobody_a_right_on_a_new_sequence(
    grantee, owner, document, prefix
):
    owner.execute(
        f"alter default privileges for role {prefix}_owner"
        f" grant all on sequences to {grantee}"
    )

    owner.execute(
        "select configure(%s::jsonb)", (document(queues=["email", "new", "slow"]),)
    )

    assert (
        owner.rows(
            "select a.* from queue as q join pg_class as c on c.oid = any (q.floor)"
            " cross join aclexplode(c.relacl) as a where a.grantee <> c.relowner"
        )
        == []
    )


@pytest.mark.parametrize(
    "damage",
    [
        "drop sequence claim_floor_1_at",
        "drop sequence claim_floor_1_id, claim_floor_1_scan, claim_floor_2_id",
        "alter sequence claim_floor_1_at rename to x",
        "update queue set floor = null",
    ],
)
def test_queues_that_lack_sequences_get_their_own_again(
    damage, owner, document, worker
):
    owner.execute(damage)
    owner.execute(
        "select configure(%s::jsonb)", (document(queues=["email", "new", "slow"]),)
    )

    owner.execute("select _claim_floors_made()")

    assert owner.rows(
        "select count(distinct c.oid), count(*) from queue as q"
        " join pg_class as c on c.oid = any (q.floor)"
    ) == [(9, 9)]
    for queue in ("email", "new", "slow"):
        assert take(worker, 1, queue) == []


SETTINGS = (
    "datestyle to 'German, DMY'",
    "intervalstyle to 'iso_8601'",
    "timezone to 'Pacific/Kiritimati'",
    "search_path to ''",
    "bytea_output to 'escape'",
    "extra_float_digits to -15",
    "client_encoding to 'LATIN1'",
    "quote_all_identifiers to on",
    "default_transaction_isolation to 'serializable'",
    "plan_cache_mode to 'force_custom_plan'",
    "enable_indexscan to off",
    "enable_tidscan to off",
    "enable_nestloop to off",
)


@pytest.mark.slow
@LIMITS
def test_the_floor_is_the_same_under_any_setting_of_the_session(
    connect, due, running, owner, limit
):
    running()
    worker = connect("email-worker")
    for setting in SETTINGS:
        worker.execute(f"set {setting}")
        owner.execute("select setval(floor[1], 0, false) from queue")
        jobs = [due(30) for _ in range(2 * limit)]

        assert take(worker, limit) == jobs[:limit], setting
        claimed, read = reading(worker, limit)
        assert claimed == jobs[limit:], setting
        assert read <= limit + 100, setting
        worker.execute(f"reset {setting.split(' ')[0]}")


# Sequences that are gone.


@LIMITS
@pytest.mark.parametrize(
    "damage", ["drop sequence {}", 'alter sequence {} owner to "stranger"']
)
@pytest.mark.parametrize("suffix", ["at", "id", "scan"])
def test_a_claim_goes_on_without_a_floor_that_lost_a_sequence(
    due, force, running, owner, worker, limit, damage, suffix
):
    running()
    force()
    jobs = [due(ago) for ago in (60, 40)]
    owner.execute(damage.format(f"claim_floor_1_{suffix}"))

    assert worker.value("select next_available_at('email') <= clock_timestamp()")
    assert [*take(worker, limit), *take(worker, limit)] == jobs


def test_a_floor_whose_sequence_was_altered_is_found_and_mended(owner, floor):
    owner.execute("alter sequence claim_floor_1_id maxvalue 9 cycle increment 2")

    (subject, remedy), *others = owner.rows(
        "select subject, remedy from inspect_health()"
    )
    owner.execute(remedy)

    assert (subject, others) == ("queue email", [])
    assert owner.rows("select from inspect_health()") == []
    assert floor() is None
