"""The claim floor: what a session may pass by, for how long, and never for longer."""

import json
from typing import NamedTuple
from uuid import uuid4

import pytest

from lenso_jobs.config import Configuration
from lenso_jobs.operator import setup

CLAIMABLE = "jobs_email.live_job_claimable_idx"
FIRST, LAST = "0" * 32, "f" * 32
FAR = "8" * 16
LIMITS = pytest.mark.parametrize("limit", [1, 10])


class Floor(NamedTuple):
    at: int
    job_id: str
    walked: int
    took: int
    slow: int


@pytest.fixture
def name(owner):
    """The setting that holds the floor of a queue."""

    def name(queue="email"):
        return owner.value(
            "select 'lenso_jobs.floor_' || to_hex(wait_key(%s))", (queue)
        )

    return name


@pytest.fixture
def now(owner):
    """The server's clock, so many seconds ago, in microseconds."""

    def now(ago=0):
        return owner.value(
            "select (extract(epoch from clock_timestamp()) * 1000000)::bigint"
        ) - int(ago * 1_000_000)

    return now


@pytest.fixture
def put(name):
    """Give a session a floor, word for word."""

    def put(session, text, queue="email"):
        session.execute("select set_config(%s, %s, false)", (name(queue), text))

    return put


@pytest.fixture
def force(put, now):
    """Give a session a floor so many seconds ago, walked so many seconds ago."""

    def force(session, at=30, walked=0, took=100, slow=2, queue="email"):
        put(session, f"{now(at)} {FIRST} {now(walked)} {took} {slow}", queue)

    return force


@pytest.fixture
def floor(name):
    """The floor that a session holds, or None."""

    def floor(session, queue="email"):
        text = session.value("select current_setting(%s, true)", name(queue))
        if not text:
            return None
        at, job_id, walked, took, slow = text.split(" ")
        return Floor(int(at), job_id, int(walked), int(took), int(slow))

    return floor


@pytest.fixture
def age(floor, put, now):
    """Move a floor's last walk to now, or to just beyond the longest it may hold."""

    def age(session, *, bound):
        held = floor(session)
        longest = max(held.slow - 1, 50 * held.took / 1e6) + 0.1
        walked = now(longest if bound else 0)
        put(session, f"{held.at} {held.job_id} {walked} {held.took} {held.slow}")

    return age


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


@pytest.fixture
def running(owner):
    """Put running jobs in front of what is due."""

    def running(count, ago=60):
        owner.execute(
            "insert into live_job (job_id, available_at, leased_at, lease_expires_at,"
            " attempt, max_attempts, queue, lease_owner, lease_token_hash)"
            " select gen_random_uuid(),"
            " clock_timestamp() - make_interval(secs => %s::float8),"
            " clock_timestamp(), clock_timestamp() + interval '1 h',"
            " 1, 3, 'email', 'spare-worker', 't'"
            " from generate_series(1, %s::integer)",
            (ago, count),
        )

    return running


@pytest.fixture
def floored(running, due, floor, age):
    """Let a session come to its floor by itself, at a job due 40 seconds ago."""

    def floored(session):
        running(150)
        jobs = [due(50), due(40)]
        assert [take(session), take(session)] == [[jobs[0]], [jobs[1]]]
        assert floor(session).slow == 2
        age(session, bound=False)

    return floored


@pytest.fixture
def found_in_time(age, enqueue):
    """Insist that a job below the floor is found in time, and was below it."""

    def found_in_time(session, job_id):
        age(session, bound=False)
        newer = enqueue()
        assert take(session) == [newer]
        age(session, bound=True)
        newest = enqueue()
        assert take(session, 2)[0] == job_id
        assert newest != job_id

    return found_in_time


def take(session, limit=1, queue="email"):
    return [
        job_id
        for (job_id,) in session.rows(
            "select job_id from jobs_email.claim(%s, %s)", queue, limit
        )
    ]


def reading(session, limit=1):
    """Claim; answers the jobs and how many index entries that read."""
    read = "select pg_stat_get_xact_tuples_returned(%s::regclass)"
    with session.transaction():
        before = session.value(read, CLAIMABLE)
        jobs = take(session, limit)
        return jobs, session.value(read, CLAIMABLE) - before


def entry(owner, job_id):
    """Where a job stands in the index, as a floor has it."""
    (row,) = owner.rows(
        "select (extract(epoch from available_at) * 1000000)::bigint,"
        " replace(job_id::text, '-', '') from live_job where job_id = %s",
        job_id,
    )
    return row


@pytest.mark.parametrize("limit", [1, 3])
def test_no_floor_is_left_behind_while_few_entries_are_passed(
    worker, due, running, floor, limit
):
    running(90)
    for _ in range(3):
        jobs = [due(50) for _ in range(limit)]

        assert take(worker, limit) == jobs
        assert floor(worker) is None


@LIMITS
def test_a_second_slow_walk_puts_a_floor_in_force_for_a_second(
    worker, owner, due, running, floor, age, limit
):
    running(150)
    first = [due(50) for _ in range(limit)]
    second = [due(40) for _ in range(limit)]
    assert take(worker, limit) == first
    once = floor(worker)
    age(worker, bound=True)
    below = due(55)

    assert take(worker, limit) == [below, *second][:limit]
    twice = floor(worker)
    age(worker, bound=False)
    due(58)
    third = take(worker, limit)

    assert once.slow == 1
    assert twice.slow == 2
    assert twice[:2] == entry(owner, [below, *second][limit - 1])
    assert third == second[limit - 1 :]


def test_the_first_slow_walk_of_single_claims_puts_no_floor_in_force(
    worker, due, running, floor
):
    running(150)
    due(50)
    take(worker)
    assert floor(worker) == (0, FIRST, 0, 0, 1)
    older = due(55)

    assert take(worker) == [older]


def test_the_first_slow_walk_of_a_batch_puts_a_floor_in_force_for_fifty_times_as_long(
    worker, owner, due, running, floor, put, now
):
    running(150)
    job_id = due(50)
    since = now()
    assert take(worker, 10) == [job_id]

    once = floor(worker)

    assert once[:2] == entry(owner, job_id)
    assert since <= once.walked <= now()
    assert 0 < once.took < now() - since
    assert once.slow == 1


@LIMITS
def test_slow_walks_that_find_nothing_count_too(
    worker, running, floor, age, now, limit
):
    running(150)
    seen = []
    for _ in range(2):
        assert take(worker, limit) == []
        seen.append(floor(worker))
        age(worker, bound=True)

    assert [once.slow for once in seen] == [1, 2]
    assert seen[1].at <= now(1)


@LIMITS
@pytest.mark.parametrize("slow", [1, 2])
@pytest.mark.parametrize("walked", [None, 2])
def test_a_floor_is_dropped_once_a_walk_is_quick(
    worker, due, running, force, put, floor, limit, walked, slow
):
    if walked is None:
        put(worker, f"0 {FIRST} 0 0 {slow}")
    else:
        force(worker, walked=walked, slow=slow)
    older, newer = due(60), due(50)

    assert take(worker, limit) == [older, newer][:limit]
    dropped = floor(worker)
    running(150, ago=70)
    due(40)
    take(worker, limit)

    assert dropped is None
    assert floor(worker).slow == 1


@pytest.mark.parametrize("limit", [1, 5])
def test_a_floored_claim_reads_nothing_below_the_floor(
    worker, due, running, force, limit
):
    running(150)
    jobs = [due(10) for _ in range(5)]
    with worker.transaction(force_rollback=True):
        _, without = reading(worker, limit)
    force(worker)

    claimed, read = reading(worker, limit)

    assert claimed == jobs[:limit]
    assert without > 150
    assert read <= limit + 1


@pytest.mark.parametrize("limit", [1, 5])
def test_a_session_comes_to_read_no_more_than_it_takes(
    worker, due, running, age, limit
):
    running(150)
    jobs = [due(10) for _ in range(5 * limit)]
    spent = []

    for n in range(5):
        claimed, read = reading(worker, limit)
        assert claimed == jobs[n * limit : (n + 1) * limit]
        spent.append(read)
        age(worker, bound=n == 0)

    assert min(spent[:2]) > 150
    assert max(spent[2:]) <= limit + 1


def test_the_floor_tells_jobs_apart_that_fell_due_at_one_instant(
    worker, owner, producer, put, now
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
    at, last = entry(owner, jobs[149])
    put(worker, f"{at} {last} {now()} 100 2")

    one, first = reading(worker, 1)
    ten, second = reading(worker, 10)

    assert one + ten == jobs[150:161]
    assert first <= 2
    assert second <= 11


@LIMITS
def test_a_floored_claim_moves_the_floor_and_not_its_last_walk(
    worker, owner, due, force, floor, limit
):
    force(worker, took=700)
    before = floor(worker)
    jobs = [due(20 - n) for n in range(10)]

    take(worker, limit)

    after = floor(worker)
    assert after[:2] == entry(owner, jobs[limit - 1])
    assert after[2:] == before[2:]


def test_a_floored_claim_is_content_with_less_than_its_limit(worker, due, force):
    due(60)
    newer = due(10)
    force(worker)

    assert take(worker, 10) == [newer]


@LIMITS
@pytest.mark.parametrize(
    ("slow", "took", "held", "over"),
    [
        (1, 10000, 0.2, 0.501),
        (1, 999999999, 29, 30.001),
        (2, 0, 0.6, 1.001),
        (2, 1999, 0.6, 1.001),
        (2, 40000, 1.5, 2.001),
        (2, 600000, 29, 30.001),
        (2, 999999999, 29, 30.001),
    ],
)
def test_a_floor_holds_fifty_times_its_walk_or_a_second_and_30_seconds_at_most(
    worker, due, force, limit, slow, took, held, over
):
    older, newer = due(60), due(10)
    force(worker, walked=held, took=took, slow=slow)
    assert take(worker, limit) == [newer]
    newest = due(5)
    force(worker, walked=over, took=took, slow=slow)

    assert take(worker, limit) == [older, newest][:limit]


@LIMITS
def test_a_floor_far_in_the_future_is_held_30_seconds_at_most(
    worker, due, put, floor, now, limit
):
    job_id = due(10)
    for ago in (0, 29):
        put(worker, f"{FAR} {LAST} {now(ago)} 999999999 2")
        walked = floor(worker).walked
        for _ in range(2):
            assert take(worker, limit) == []
            assert floor(worker).walked == walked
    put(worker, f"{FAR} {LAST} {now(30.001)} 999999999 2")

    assert take(worker, limit) == [job_id]
    assert floor(worker) is None


@LIMITS
@pytest.mark.parametrize("ahead", [5, 86400])
def test_a_last_walk_yet_to_come_is_no_floor(worker, due, force, limit, ahead):
    older, newer = due(60), due(10)
    force(worker, walked=-ahead, took=999999999)

    assert take(worker, limit) == [older, newer][:limit]


@LIMITS
def test_a_clock_that_stepped_back_behind_the_floor_costs_a_bound_at_most(
    worker, due, force, limit
):
    job_id = due(1)
    force(worker, at=-3600, walked=0.5, took=20000)
    assert take(worker, limit) == []
    force(worker, at=-3600, walked=1.1, took=20000)

    assert take(worker, limit) == [job_id]


GARBAGE = {
    "nothing": "",
    "a space": " ",
    "words": "floor of the queue",
    "four words": "one two three four",
    "injection": "'; drop table job; --",
    "a field too few": "{at} {id} {now} 100",
    "two fields too few": "{at} {id} {now}",
    "a field too many": "{at} {id} {now} 100 2 2",
    "an empty field": "{at}  {now} 100 2",
    "two spaces": "{at} {id}  {now} 100 2",
    "tabs": "{at}\t{id}\t{now}\t100\t2",
    "a space before": " {at} {id} {now} 100 2",
    "a space behind": "{at} {id} {now} 100 2 ",
    "a newline before": "\n{at} {id} {now} 100 2",
    "a newline behind": "{at} {id} {now} 100 2\n",
    "two lines": "{at} {id} {now} 100 2\n{at} {id} {now} 100 2",
    "a negative floor": "-{at} {id} {now} 100 2",
    "a negative walk": "{at} {id} -{now} 100 2",
    "a negative duration": "{at} {id} {now} -100 2",
    "a sign": "+{at} {id} {now} 100 2",
    "a fraction": "{at}.0 {id} {now} 100 2",
    "an exponent": "1e15 {id} {now} 100 2",
    "hexadecimal": "0x1 {id} {now} 100 2",
    "infinity": "-infinity {id} {now} 100 2",
    "no number": "NaN {id} {now} 100 2",
    "null": "{at} {id} {now} null 2",
    "a long floor": "0{at} {id} {now} 100 2",
    "a long walk": "{at} {id} 0{now} 100 2",
    "a long duration": "{at} {id} {now} 0000000100",
    "an overflow": "{nines} {id} {now} 100 2",
    "another overflow": "{at} {id} {now} {nines} 2",
    "31 digits": "{at} {id31} {now} 100 2",
    "33 digits": "{at} {id}0 {now} 100 2",
    "a dashed id": "{at} 00000000-0000-0000-0000-000000000000 {now} 100 2",
    "no hexadecimal": "{at} {id31}g {now} 100 2",
    "other digits": "{at} {id} {now} \u0661\u0660\u0660 2",
    "wide digits": "{at} {id} {now} \uff11\uff10\uff10 2",
    "other letters": "{at} {id31}\u00e9 {now} 100 2",
    "a wide space": "{at}\u00a0{id} {now} 100 2",
    "never slow": "{at} {id} {now} 100000 0",
    "slow three times": "{at} {id} {now} 100 3",
    "slow for long": "{at} {id} {now} 100 22",
    "slow beyond counting": "{at} {id} {now} 100 {nines}",
    "slow in words": "{at} {id} {now} 100 two",
    "a face": "\U0001f600",
    "a megabyte": "{zeros}",
    "a megabyte of spaces": "{at} {id} {now} 100 2{spaces}",
    "a megabyte of a field": "{zeros}{at} {id} {now} 100 2",
    "a megabyte of an id": "{at} {zeros} {now} 100 2",
}


@LIMITS
def test_garbage_is_no_floor(worker, owner, due, put, floor, now, limit):
    for kind, text in GARBAGE.items():
        older, newer = due(60), due(10)
        put(
            worker,
            text.format(
                at=now(30),
                now=now(),
                id=FIRST,
                id31=FIRST[1:],
                nines="9" * 30,
                zeros="0" * 1_000_000,
                spaces=" " * 1_000_000,
            ),
        )

        assert take(worker, limit) == [older, newer][:limit], kind
        assert floor(worker) is None, kind
        owner.execute("truncate live_job")  # dead entries would make a walk slow


@LIMITS
def test_a_floor_that_is_no_text_at_all_is_none(connect, due, name, monkeypatch, limit):
    monkeypatch.setenv("PGOPTIONS", f"-c {name()}=1\udcff\udcc3")
    job_id = due(60)

    assert take(connect("email-worker", options=None), limit) == [job_id]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_claim_that_finds_nothing_walks_at_once_after_a_quick_walk(
    worker, due, force, limit
):
    for took, slow in ((0, 2), (1999, 2), (1999, 1)):
        older = due(60)
        force(worker, took=took, slow=slow)

        assert take(worker, limit) == [older]


@LIMITS
def test_a_walk_after_nothing_was_found_goes_by_its_own_moment(
    worker, due, force, owner, limit
):
    job_id = due(-0.1)
    falls_due = owner.value("select available_at from live_job")
    force(worker, at=-60)

    claimed = worker.rows(
        "with slept as materialized (select pg_sleep_until(%s)::text as text)"
        " select c.job_id from slept, lateral"
        " (select * from claim('email', %s) where slept.text is not null) as c",
        *(falls_due, limit),
    )

    assert claimed == [(job_id,)]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_claim_that_finds_nothing_walks_after_fifty_times_a_slow_walk(
    worker, due, force, floor, limit
):
    older = due(60)
    for took, walked in ((6000, 0), (20000, 0.5), (400000, 15)):
        force(worker, walked=walked, took=took)
        before = floor(worker)
        assert take(worker, limit) == []
        assert floor(worker)[2:] == before[2:]
    force(worker, walked=0.4, took=6000)

    assert take(worker, limit) == [older]


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("slow", [1, 2])
def test_a_walk_after_nothing_was_found_keeps_the_floor_in_force_if_it_is_slow(
    worker, owner, due, running, force, floor, now, limit, slow
):
    running(150, ago=90)
    older = due(60)
    force(worker, took=1999, slow=slow)
    since = now()

    assert take(worker, limit) == [older]
    held = floor(worker)
    assert held[:2] == entry(owner, older)
    assert held.walked >= since
    assert held.slow == slow


def test_an_idle_claim_reads_nothing_below_the_floor(worker, running, force):
    running(150)
    force(worker, took=20000)

    spent = [reading(worker, limit) for limit in (1, 10, 1)]

    assert [jobs for jobs, _ in spent] == [[], [], []]
    assert max(read for _, read in spent) <= 1


@LIMITS
def test_a_claim_that_finds_nothing_moves_the_floor_to_a_second_ago(
    worker, force, floor, now, limit
):
    force(worker, at=30, took=20000)
    before = now()

    assert take(worker, limit) == []

    assert before - 1_000_000 <= floor(worker).at <= now(1)


@LIMITS
def test_a_claim_that_finds_nothing_moves_no_floor_back(
    worker, force, floor, now, put, limit
):
    for at in (now(0.2), now(-100)):
        put(worker, f"{at} {LAST} {now()} 20000 2")

        assert take(worker, limit) == []

        assert floor(worker)[:2] == (at, LAST)


@LIMITS
def test_what_commits_within_a_second_of_a_floored_claim_is_above_the_floor(
    worker, owner, producer, enqueue, force, limit
):
    with producer.transaction():
        late = enqueue()
        force(worker, took=20000)
        assert take(worker, limit) == []
    at = owner.value("select available_at from live_job where job_id = %s", late)

    claimed = take(worker, limit)

    # Only a machine that stood still meanwhile puts it below.
    if owner.value("select clock_timestamp() < %s + interval '1 s'", at):
        assert claimed == [late]


@pytest.mark.parametrize("ending", ["rollback", "rollback to savepoint here"])
def test_a_rollback_brings_back_the_job_and_the_floor(
    worker, due, floored, floor, age, ending
):
    floored(worker)
    age(worker, bound=False)
    before = floor(worker)
    job_id = due(10)

    worker.execute("begin")
    worker.execute("savepoint here")
    assert take(worker) == [job_id]
    moved = floor(worker)
    worker.execute(ending)
    after = floor(worker)
    again = take(worker)
    worker.execute("commit")

    assert moved != before
    assert after == before
    assert again == [job_id]


@pytest.mark.parametrize("ending", ["rollback", "rollback to savepoint here"])
def test_a_rollback_forgets_the_slow_walks_it_undid(
    worker, due, running, floor, ending
):
    running(150)
    job_id = due(10)
    worker.execute("begin")
    worker.execute("savepoint here")
    take(worker, 1)
    take(worker, 1)
    held = floor(worker)

    worker.execute(ending)

    assert held.slow == 2
    assert floor(worker) is None
    assert take(worker) == [job_id]
    worker.execute("commit")
    assert floor(worker).slow == 1


def test_an_enqueue_that_commits_late_is_claimed_in_time(
    worker, producer, other_producer, enqueue, floored, found_in_time
):
    floored(worker)
    with producer.transaction():
        late = enqueue()
        newer = enqueue(session=other_producer)
        assert take(worker) == [newer]

    found_in_time(worker, late)


def test_a_lease_that_lapses_below_the_floor_is_reclaimed_in_time(
    worker, rival, due, expire, floored, found_in_time
):
    job_id = due(70)
    assert take(rival) == [job_id]
    floored(worker)
    expire(job_id)

    found_in_time(worker, job_id)


def test_a_job_redriven_is_above_the_floor(
    worker, operator, due, enqueue, floored, age
):
    job_id = due(70)
    token = worker.value("select lease_token from claim('email')")
    worker.execute("select fail(%s, %s, 'timeout', false)", (job_id, token))
    floored(worker)
    age(worker, bound=False)
    first = enqueue()
    operator.execute("select redrive(%s)", (job_id,))
    last = enqueue()

    assert [take(worker) for _ in range(3)] == [[first], [job_id], [last]]


@pytest.mark.usefixtures("read_committed")
def test_a_redrive_that_commits_late_is_claimed_in_time(
    worker, operator, due, enqueue, floored, found_in_time
):
    job_id = due(70)
    token = worker.value("select lease_token from claim('email')")
    worker.execute("select fail(%s, %s, 'timeout', false)", (job_id, token))
    floored(worker)
    with operator.transaction():
        operator.execute("select redrive(%s)", (job_id,))
        newer = enqueue()
        assert take(worker) == [newer]

    found_in_time(worker, job_id)


def test_a_retry_that_fell_due_below_the_floor_is_claimed_in_time(
    worker, owner, due, floored, found_in_time
):
    job_id = due(70)
    token = worker.value("select lease_token from claim('email')")
    worker.execute("select fail(%s, %s, 'timeout', true)", (job_id, token))
    floored(worker)
    owner.execute(
        "update live_job set available_at = clock_timestamp() - interval '65 s'"
        " where job_id = %s",
        (job_id,),
    )

    found_in_time(worker, job_id)


@LIMITS
def test_a_job_of_another_queue_knows_no_floor_of_this_one(
    worker, due, force, floor, put, now, limit
):
    put(worker, f"{FAR} {LAST} {now()} 999999999 2")
    before = floor(worker)
    job_id = due(60, queue="slow")

    assert take(worker, limit, "slow") == [job_id]
    assert floor(worker) == before
    assert floor(worker, "slow") is None


@LIMITS
def test_the_floors_of_two_queues_do_not_disturb_each_other(
    worker, owner, due, force, floor, limit
):
    for queue in ("email", "slow"):
        due(60, queue=queue)
    force(worker, at=30)
    force(worker, at=5, queue="slow")
    mine, theirs = due(10), due(1, queue="slow")
    due(10, queue="slow")

    assert take(worker, limit) == [mine]
    assert take(worker, limit, "slow") == [theirs]
    assert floor(worker)[:2] == entry(owner, mine)
    assert floor(worker, "slow")[:2] == entry(owner, theirs)


@pytest.fixture
def other_instance(owner, conninfo):
    """Another Instance in the same database; answers its schema."""
    prefix = f"jobs_{uuid4().hex[:12]}"
    fields = {
        "schema": "jobs_other",
        "role_prefix": prefix,
        "database_url_secret": "jobs/database-url",
        "lease_seconds": 30,
        "retry_base_seconds": 5,
        "retry_max_seconds": 300,
        "queues": ["email"],
        "producer_instances": ["accounts"],
        "worker_instances": ["email-worker"],
    }
    setup(Configuration.from_json(json.dumps(fields)), conninfo)
    yield "jobs_other"
    for kind in ("producer", "worker", "observer", "operator", "owner"):
        owner.execute(f"drop owned by {prefix}_{kind} cascade")
        owner.execute(f"drop role {prefix}_{kind}")


def test_a_job_of_another_instance_knows_no_floor_of_this_one(
    worker, producer, other_instance, put, floor, now
):
    put(worker, f"{FAR} {LAST} {now()} 999999999 2")
    before = floor(worker)
    job_id = producer.value(
        f"select job_id from {other_instance}.enqueue('email', 'send', '{{}}', 'k')"
    )

    claimed = worker.rows(f"select job_id from {other_instance}.claim('email')")

    assert claimed == [(job_id,)]
    assert floor(worker) == before


@pytest.mark.parametrize("become", ["role", "session authorization"])
@pytest.mark.parametrize("handing", ["select 1", "discard all", "reset all"])
def test_a_session_handed_on_is_floored_in_time_or_not_at_all(
    connect, due, force, age, handing, become
):
    pooled = connect()
    pooled.execute(f'set {become} "email-worker"')
    force(pooled)
    older, first = due(60), due(10)
    assert take(pooled) == [first]
    second = due(5)

    pooled.execute(handing)
    pooled.execute("reset session authorization")
    pooled.execute(f'set {become} "spare-worker"')

    if handing == "select 1":
        assert take(pooled) == [second]
        due(1)
        age(pooled, bound=True)
    assert take(pooled) == [older]


SETTINGS = (
    "datestyle to 'German, DMY'",
    "datestyle to 'SQL, MDY'",
    "intervalstyle to 'sql_standard'",
    "intervalstyle to 'iso_8601'",
    "timezone to 'Pacific/Kiritimati'",
    "timezone to 'America/New_York'",
    "standard_conforming_strings to off",
    "search_path to pg_temp",
    "search_path to ''",
    "bytea_output to 'escape'",
    "extra_float_digits to -15",
    "client_encoding to 'LATIN1'",
    "lc_numeric to 'C'",
    "backslash_quote to off",
    "transform_null_equals to on",
    "quote_all_identifiers to on",
    "default_transaction_isolation to 'serializable'",
    "plan_cache_mode to 'force_custom_plan'",
    "enable_indexscan to off",
    "enable_indexonlyscan to off",
    "enable_tidscan to off",
    "enable_nestloop to off",
    "enable_material to off",
)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_floor_is_the_same_under_any_setting_of_the_session(
    connect, owner, due, running, put, floor, age, limit
):
    running(150)
    worker = connect("email-worker")
    worker.execute("set escape_string_warning to off")
    for setting in SETTINGS:
        worker.execute(f"set {setting}")
        put(worker, "")
        jobs = [due(10) for _ in range(4 * limit)]

        spent = []
        for n in range(4):
            claimed, read = reading(worker, limit)
            assert claimed == jobs[n * limit : (n + 1) * limit], setting
            spent.append(read)
            if n > 0:
                assert floor(worker)[:2] == entry(owner, claimed[-1]), setting
            age(worker, bound=n == 0)

        assert min(spent[:2]) > 150, setting
        assert max(spent[2:]) <= limit + 1, setting
        worker.execute(f"reset {setting.split(' ')[0]}")
