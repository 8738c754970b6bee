import json
from contextlib import contextmanager

import pytest

TABLES = ("job", "live_job", "attempt")
CLAIMABLE = "jobs_email.live_job_claimable_idx"


@pytest.fixture(
    params=[
        "empty",
        "stale",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("large", "none")),
    ]
)
def statistics(request, owner, fill):
    """The planner believes: no jobs, and so it is; or that, wrongly; or the truth."""
    huge = {"ended": 20000, "scheduled": 5000, "due": 200}
    if request.param in ("empty", "stale"):
        owner.execute("analyze")
    if request.param in ("stale", "large", "none"):
        fill(**huge)
    if request.param == "large":
        owner.execute("analyze")
    return request.param


@pytest.fixture
def scans():
    """Yield what the block scans: sequential scans by table, claimable index scans."""

    @contextmanager
    def scans(session):
        counts = (
            "select relname, seq_scan from pg_stat_xact_user_tables"
            " where schemaname = 'jobs_email' and relname = any (%s)"
        )
        index = "select pg_stat_get_xact_numscans(%s::regclass)"
        seen = {}
        with session.transaction():
            before = dict(session.rows(counts, list(TABLES)))
            walked = session.value(index, CLAIMABLE)
            yield seen
            seen["index"] = session.value(index, CLAIMABLE) - walked
            after = dict(session.rows(counts, list(TABLES)))
        seen["sequential"] = {
            name: after[name] - before[name]
            for name in TABLES
            if after[name] != before[name]
        }

    return scans


def items(name, count):
    return json.dumps(
        [
            {
                "queue": "email",
                "kind": "send",
                "payload": {"n": n},
                "idempotency_key": f"{name}-{n}",
            }
            for n in range(count)
        ]
    )


@pytest.mark.slow
def test_no_verb_scans_a_table_under_any_statistics(
    statistics, producer, worker, scans
):
    with scans(producer) as enqueued:
        for n in range(8):
            producer.execute("select enqueue('email', 'send', '{}', %s)", (f"k{n}",))
        producer.execute("select enqueue('email', 'send', '{}', 'k1')")
    with scans(producer) as offered:
        producer.execute("select enqueue_many(%s)", (items("a", 50),))
        producer.execute("select enqueue_many(%s)", (items("a", 60),))
    with scans(worker) as claimed:
        one = [worker.row("select * from claim('email')") for _ in range(7)]
        many = worker.rows("select * from claim('email', 30)")
    held = [(row["job_id"], row["lease_token"]) for row in one]
    job_ids, tokens = [row[0] for row in many], [row[6] for row in many]
    with scans(worker) as renewed:
        for each in held:
            worker.execute("select renew(%s, %s)", each)
        worker.execute("select renew_many(%s, %s)", (job_ids, tokens))
    with scans(worker) as inspected:
        for job_id, _ in held:
            worker.execute("select inspect(%s)", (job_id,))
        worker.execute("select next_available_at('email')")
    with scans(worker) as completed:
        for each in held[:4]:
            worker.execute("select complete(%s, %s)", each)
        worker.execute("select complete(%s, %s)", held[0])
        worker.execute("select complete_many(%s, %s)", (job_ids[:15], tokens[:15]))
    with scans(worker) as failed:
        for each in held[4:]:
            worker.execute("select fail(%s, %s, 'timeout', true)", each)
        worker.execute("select fail(%s, %s, 'timeout', true)", held[4])
        worker.execute(
            "select fail_many(%s, %s, %s, %s)",
            (job_ids[15:], tokens[15:], ["c"] * 15, [True, False, True] * 5),
        )

    assert [
        verb["sequential"]
        for verb in (enqueued, offered, claimed, renewed, inspected, completed, failed)
    ] == [{}] * 7
    assert claimed["index"] >= 8


@pytest.mark.slow
def test_claim_scans_no_table_while_it_reclaims_and_ends(
    statistics, owner, worker, enqueue, scans
):
    for n in range(20):
        enqueue(max_attempts=1 if n % 2 else 3)
    owner.execute(
        "update live_job set attempt = 1, leased_at = clock_timestamp(),"
        " lease_expires_at = clock_timestamp(), lease_owner = 'spare-worker',"
        " lease_token_hash = 't', available_at = clock_timestamp() - interval '1 min'"
        " where job_id in (select job_id from job where idempotency_key like 'key-%')"
    )

    with scans(worker) as seen:
        claimed = worker.rows("select * from claim('email', 20)")

    assert len([row for row in claimed if row[4] == 2]) == 10
    assert seen["sequential"] == {}


@pytest.mark.slow
def test_purge_and_redrive_scan_no_table(statistics, operator, owner, scans, fill):
    fill(ended=300)
    (job_id,) = owner.rows("update attempt set outcome = 'failed' returning job_id")[0]

    with scans(operator) as purged:
        operator.execute("select redrive(%s)", (job_id,))
        assert operator.value("select purge(clock_timestamp(), 100)") == 100

    assert purged["sequential"] == {}


@pytest.mark.slow
def test_jobs_are_found_and_erased_without_a_scan_of_a_table(
    statistics, operator, owner, fill, scans
):
    fill(ended=300)
    keys = [
        key
        for (key,) in owner.rows(
            "select idempotency_key from job where job_id in"
            " (select job_id from attempt) limit 8"
        )
    ]

    with scans(operator) as seen:
        for key in keys:
            job_id = operator.value(
                "select job_id from inspect_key(%s, 'accounts')", key
            )
            operator.execute("select erase(%s)", (job_id,))

    assert seen["sequential"] == {}


@pytest.mark.slow
def test_buffers_do_not_grow_with_the_number_of_jobs_kept(
    owner, connect, fill, buffers
):
    def measure(name):
        producer, worker = connect("accounts"), connect("email-worker")
        spent = {}
        for n in range(12):
            key, token = f"{name}-{n}", f"{name}-token-{n}"
            spent["enqueue"] = buffers(
                producer, "select enqueue('email', 'send', '{}', %s)", key
            )
            spent["claim"] = buffers(worker, "select claim('email')")
            job_id = owner.value(
                "select job_id from job where idempotency_key = %s", key
            )
            owner.execute(
                "update live_job set lease_token_hash = sha256(%s) where job_id = %s",
                (token.encode(), job_id),
            )
            spent["renew"] = buffers(worker, "select renew(%s, %s)", job_id, token)
            spent["inspect"] = buffers(worker, "select inspect(%s)", job_id)
            verb = "complete(%s, %s)" if n % 2 else "fail(%s, %s, 'c', false)"
            spent[verb] = buffers(worker, f"select {verb}", job_id, token)
        return spent

    owner.execute("analyze")
    few = measure("few")
    fill(ended=20000, scheduled=5000)
    owner.execute("vacuum analyze")

    many = measure("many")

    assert {
        verb: (few[verb], many[verb]) for verb in few if many[verb] > 2 * few[verb] + 20
    } == {}


@pytest.mark.slow
def test_the_many_verbs_stay_linear(statistics, owner, producer, worker, buffers):
    per_item = {}

    for name, count in (("warm", 100), ("few", 100), ("many", 1000)):
        seen = {}
        seen["enqueue_many"] = buffers(
            producer, "select enqueue_many(%s)", items(name, count)
        )
        seen["claim"] = buffers(
            worker, "select count(*) from claim('email', %s::integer)", count
        )
        owner.execute(
            "update live_job set lease_token_hash = sha256(job_id::text::bytea)"
            " where lease_owner is not null"
        )
        job_ids = [
            job_id
            for (job_id,) in owner.rows(
                "select job_id from live_job where lease_owner is not null"
            )
        ]
        assert len(job_ids) == count
        tokens = [str(job_id) for job_id in job_ids]
        half = count // 2
        seen["renew_many"] = buffers(
            worker, "select renew_many(%s, %s)", job_ids, tokens
        )
        seen["complete_many"] = buffers(
            worker, "select complete_many(%s, %s)", job_ids[:half], tokens[:half]
        )
        seen["fail_many"] = buffers(
            worker,
            "select fail_many(%s, %s, %s, %s)",
            job_ids[half:],
            tokens[half:],
            ["timeout"] * half,
            [n % 2 == 0 for n in range(half)],
        )
        seen["existing"] = buffers(
            producer, "select enqueue_many(%s)", items(name, count)
        )
        per_item[name] = {verb: spent / count for verb, spent in seen.items()}

    assert {
        verb: (per_item["few"][verb], per_item["many"][verb])
        for verb in per_item["few"]
        if per_item["many"][verb] > 3 * per_item["few"][verb]
    } == {}


@pytest.mark.slow
def test_claim_of_one_reads_neither_scheduled_nor_ended_jobs(
    owner, worker, enqueue, fill, buffers
):
    fill(ended=5000, scheduled=10000)
    for _ in range(10):
        enqueue()

    spent = [buffers(worker, "select claim('email')") for _ in range(10)]
    idle = [buffers(worker, "select claim('email')") for _ in range(3)]

    assert owner.value("select count(*) from live_job where attempt = 1") == 10
    assert spent[-1] < 60
    assert idle[-1] < 60


@pytest.mark.parametrize("known", ["stale", "fresh", "none"])
def test_claim_of_one_reads_no_more_of_a_long_queue(
    owner, worker, fill, buffers, known
):
    if known == "stale":
        owner.execute("analyze")
    fill(due=5000)
    if known == "fresh":
        owner.execute("analyze")

    spent = [buffers(worker, "select claim('email')") for _ in range(8)]

    assert spent[-1] < 60


def lives(producer, worker, operator, owner, buffers, name, count):
    """Lead jobs through every verb. Return the buffers that each verb took per job."""
    spent = {}

    def spend(verb, jobs, session, statement, *parameters):
        spent[verb] = buffers(session, f"select {statement}", *parameters) / jobs

    spend("enqueue", 1, producer, "enqueue('email', 'send', '{}', %s)", name)
    spend("enqueue again", 1, producer, "enqueue('email', 'send', '{}', %s)", name)
    batch = items(name, count)
    other = batch.replace('"send"', '"call"')
    spend("enqueue_many", count, producer, "enqueue_many(%s)", batch)
    spend("existing", count, producer, "enqueue_many(%s)", batch)
    spend("conflict", count, producer, "enqueue_many(%s)", other)
    # Both may have to pass by the dead of the round before.
    for _ in range(2):
        spend("claim", 1, worker, "claim('email')")
    spend("claim many", count, worker, "claim('email', %s::integer)", count - 1)
    owner.execute(
        "update live_job set lease_token_hash = sha256(job_id::text::bytea)"
        " where lease_owner = 'email-worker'"
    )
    job_ids = [
        job_id
        for (job_id,) in owner.rows(
            "select job_id from live_job where lease_owner = 'email-worker'"
        )
    ]
    assert len(job_ids) == count + 1
    one, another, *rest = job_ids
    half = len(rest) // 2
    done, failed = rest[:half], rest[half:]
    tokens = {job_id: str(job_id) for job_id in job_ids}
    many = (done, [tokens[j] for j in done])
    failures = (
        failed,
        [tokens[j] for j in failed],
        ["timeout"] * len(failed),
        [n % 2 == 1 for n in range(len(failed))],
    )
    spend("renew", 1, worker, "renew(%s, %s)", one, tokens[one])
    spend(
        "renew_many",
        len(job_ids),
        worker,
        "renew_many(%s, %s)",
        job_ids,
        [tokens[j] for j in job_ids],
    )
    for verb in ("complete", "complete again"):
        spend(verb, 1, worker, "complete(%s, %s)", one, tokens[one])
    for verb in ("fail", "fail again"):
        spend(verb, 1, worker, "fail(%s, %s, 'c', false)", another, tokens[another])
    for verb in ("complete_many", "complete_many again"):
        spend(verb, half, worker, "complete_many(%s, %s)", *many)
    for verb in ("fail_many", "fail_many again"):
        spend(verb, len(failed), worker, "fail_many(%s, %s, %s, %s)", *failures)
    spend("redrive", 1, operator, "redrive(%s)", failed[0])
    return spent


@pytest.mark.slow
def test_plans_of_a_session_that_saw_the_tables_empty_hold_once_they_are_large(
    by_hand, owner, producer, worker, operator, fill, buffers
):
    session = (producer, worker, operator, owner, buffers)
    lives(*session, "first", 4)
    few = lives(*session, "few", 50)
    fill(ended=20000, scheduled=10000)

    many = lives(*session, "many", 50)

    assert many.pop("claim") < 150
    assert {
        verb: (few[verb], spent)
        for verb, spent in many.items()
        if spent > 2 * few[verb] + 20
    } == {}


@pytest.mark.slow
def test_claims_and_batches_hold_that_were_planned_before_there_was_any_job(
    by_hand, owner, producer, worker, fill, buffers
):
    producer.execute("select enqueue_many('[{}]')")
    for _ in range(3):
        worker.execute("select claim('email')")
        worker.execute("select claim('email', 20)")
    fill(ended=20000, scheduled=10000, due=5000)

    spent = {
        "enqueue_many": buffers(producer, "select enqueue_many(%s)", items("many", 100))
        / 100,
        "claim": buffers(worker, "select claim('email')"),
        "claim many": buffers(worker, "select claim('email', 100)") / 100,
    }

    assert {verb: each for verb, each in spent.items() if each > 80} == {}


@pytest.mark.slow
def test_claims_and_batches_read_no_more_under_any_planner_setting(
    by_hand, owner, connect, prefix, fill, buffers
):
    fill(ended=20000, scheduled=10000)
    spent = []

    for name in ("free", "bound"):
        sessions = [
            connect(role) for role in ("accounts", "email-worker", f"{prefix}_duty")
        ]
        for session in sessions if name == "bound" else ():
            for off in (
                "indexscan",
                "indexonlyscan",
                "tidscan",
                "nestloop",
                "material",
                "sort",
                "incremental_sort",
            ):
                session.execute(f"set enable_{off} to off")
            session.execute("set enable_seqscan to on; set enable_bitmapscan to on")
        lives(*sessions, owner, buffers, f"{name}-warm", 4)
        # A transaction elsewhere on the server may keep dead rows. The lesser of two
        # rounds is what the plans read.
        rounds = [lives(*sessions, owner, buffers, f"{name}-{n}", 50) for n in range(2)]
        spent.append({verb: min(each[verb] for each in rounds) for verb in rounds[0]})

    # One scan of any of the tables would be five a job.
    free, bound = spent
    others = ("enqueue again", "existing", "conflict")
    batches = [verb for verb in free if "many" in verb or verb in others]
    assert {
        verb: (free[verb], bound[verb])
        for verb in batches
        if bound[verb] > free[verb] + 4
    } == {}
    assert bound["claim"] < 150


@pytest.fixture
def drained(by_hand, owner):
    """Leave a queue as it is when it was drained and vacuumed: pages, and no rows."""
    owner.execute(
        "insert into live_job (job_id, available_at, attempt, max_attempts, queue)"
        " select gen_random_uuid(), clock_timestamp(), 0, 3, 'email'"
        " from generate_series(1, 20)"
    )
    owner.execute("delete from live_job")
    owner.execute("vacuum analyze live_job")


@pytest.fixture
def lease(owner):
    """Lease so many jobs to email-worker by hand and return ids and tokens."""

    def lease(count):
        job_ids = [
            job_id
            for (job_id,) in owner.rows(
                "update live_job set lease_owner = 'email-worker', attempt = 1,"
                " leased_at = clock_timestamp(),"
                " lease_expires_at = clock_timestamp() + interval '1 h',"
                " lease_token_hash = sha256(job_id::text::bytea) where job_id in"
                " (select job_id from live_job where lease_owner is null limit %s)"
                " returning job_id",
                count,
            )
        ]
        return job_ids, [str(job_id) for job_id in job_ids]

    return lease


ENDINGS = {
    "renew": "renew(%s, %s)",
    "complete": "complete(%s, %s)",
    "fail": "fail(%s, %s, 'c', false)",
    "renew_many": "renew_many(%s, %s)",
    "complete_many": "complete_many(%s, %s)",
    "fail_many": "fail_many(%s, %s, array_fill('c'::text, %s), array_fill(false, %s))",
    "inspect": "inspect(%s)",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(verb, marks=[] if "many" in verb else pytest.mark.slow)
        for verb in ENDINGS
    ],
)
def test_a_plan_made_on_a_drained_queue_holds_once_it_is_full(
    verb, drained, owner, connect, fill, lease, buffers
):
    worker = connect("email-worker")
    worker.execute("set enable_indexscan to off")

    def spend(count):
        job_ids, tokens = lease(count)
        arguments = [job_ids, tokens, [count], [count]]
        if not verb.endswith("_many"):
            arguments = [job_ids[0], tokens[0]]
        statement = f"select {ENDINGS[verb]}"
        needed = statement.count("%s")
        return buffers(worker, statement, *arguments[:needed]) / (
            count if verb.endswith("_many") else 1
        )

    fill(due=1)
    spend(1)
    fill(scheduled=10000)

    assert spend(50) < 60


@pytest.mark.slow
def test_a_repeated_complete_reads_no_more_of_the_evidence_there_is(
    drained, owner, worker, fill, lease, buffers
):
    fill(due=1)
    (job_id,), (token,) = lease(1)
    for _ in range(2):
        worker.execute("select complete(%s, %s)", (job_id, token))
    fill(ended=10000)

    assert buffers(worker, "select complete(%s, %s)", job_id, token) < 60


@pytest.mark.slow
def test_purge_planned_on_empty_tables_holds_once_they_are_large(
    by_hand, operator, fill, buffers
):
    operator.execute("select purge(clock_timestamp())")
    fill(ended=5000, scheduled=5000)

    assert buffers(operator, "select purge(clock_timestamp(), 20)") / 20 < 100


def test_purge_reads_no_row_that_it_keeps(by_hand, operator, fill, buffers):
    operator.execute("select purge(clock_timestamp())")
    fill(ended=2000)

    kept = "select purge(clock_timestamp() - interval '1 h', 1000)"
    assert buffers(operator, kept) < 100


@pytest.mark.slow
@pytest.mark.parametrize("off", ["nestloop", "hashagg", "sort"])
def test_a_claim_that_reclaims_reads_no_whole_index(
    off, by_hand, owner, worker, fill, buffers
):
    worker.execute(f"set enable_{off} to off")
    lapse = (
        "update live_job set attempt = 1, leased_at = clock_timestamp(),"
        " lease_expires_at = clock_timestamp(), lease_owner = 'spare-worker',"
        " lease_token_hash = 't' where available_at < clock_timestamp()"
    )
    fill(due=5, scheduled=10000)
    owner.execute(lapse)
    worker.execute("select claim('email', 5)")
    fill(due=5)
    owner.execute(lapse)

    assert buffers(worker, "select claim('email', 5)") < 150


READS = {
    "explain_job": "select * from explain_job(%(job_id)s)",
    "inspect_attempts": "select * from inspect_attempts(%(job_id)s)",
    "inspect_failures": "select * from inspect_failures('email', p_limit => 10)",
    "the failures since": "select * from inspect_failures(null, %(since)s, 10)",
    "inspect_jobs": "select * from inspect_jobs('email', 'failed', null, 10)",
    "inspect_jobs, live": "select * from inspect_jobs('email', 'queued', null, 10)",
    "inspect_acts": "select * from inspect_acts(10)",
    "inspect_queues": "select * from inspect_queues()",
    "inspect_workers": "select * from inspect_workers()",
    "inspect_health": "select * from inspect_health()",
    "redrive_failed": "select redrive_failed('email', %(since)s, p_limit => 5)",
}


@pytest.fixture
def readable(owner):
    """Age what was filled in, and let 200 of the ended jobs have failed."""

    def readable():
        owner.execute(
            "update attempt set ended_at = clock_timestamp() - interval '1 h'"
            " - random() * interval '9 d'"
        )
        owner.execute(
            "update attempt set outcome = 'failed', failure_code = 'timeout'"
            " where job_id in (select job_id from attempt order by job_id limit 200)"
        )

    return readable


@pytest.mark.slow
def test_no_read_scans_a_table_under_any_statistics(
    statistics, operator, owner, enqueue, readable, scans
):
    readable()
    asked = {
        "job_id": enqueue(),
        "since": owner.value("select clock_timestamp() - interval '1 d'"),
    }
    seen = {}
    for name, statement in READS.items():
        with scans(operator) as read:
            for _ in range(2):
                operator.execute(statement, asked)
        seen[name] = read["sequential"]

    # A sample is none, and goes no further than _queue_share_to_read lets it.
    assert seen == {name: {} for name in READS}


@pytest.mark.slow
def test_the_cost_of_the_reads_does_not_grow_with_the_jobs_kept(
    owner, operator, enqueue, fill, readable, buffers, by_hand
):
    job_id = enqueue()
    since = owner.value("select clock_timestamp() - interval '1 d'")

    def measure():
        with operator.transaction(force_rollback=True):
            return {
                name: [
                    buffers(
                        operator,
                        statement.replace("%(job_id)s", f"'{job_id}'").replace(
                            "%(since)s", f"'{since}'"
                        ),
                    )
                    for _ in range(2)
                ][-1]
                for name, statement in READS.items()
            }

    fill(ended=12000)  # the reads look at the last 10,000 ends
    readable()
    owner.execute("vacuum analyze")
    few = measure()
    fill(ended=30000)
    readable()
    owner.execute("vacuum analyze")

    many = measure()

    assert {
        name: (few[name], many[name])
        for name in READS
        if many[name] > 1.5 * few[name] + 30
    } == {}


@pytest.mark.slow
@pytest.mark.parametrize("known", ["stale", "fresh"])
def test_health_reads_a_bounded_part_of_each_index(
    known, by_hand, owner, operator, enqueue, fill, readable
):
    fill(ended=15000, scheduled=12000)
    readable()
    owner.execute(
        "update attempt set outcome = 'failed', failure_code = 'timeout',"
        " ended_at = clock_timestamp() where job_id in"
        " (select job_id from attempt limit 100);"
        " update live_job set available_at = available_at + interval '20 y'"
    )
    stray, held = enqueue(), enqueue()
    owner.execute(
        "update live_job set attempt = 1, lease_owner = 'email-worker',"
        " leased_at = clock_timestamp() - interval '2 d', lease_token_hash = 't',"
        " lease_expires_at = clock_timestamp() + interval '1 h' where job_id = %s",
        (held,),
    )
    owner.execute("delete from job where job_id = %s", (stray,))
    owner.execute(
        "delete from attempt where job_id ="
        " (select job_id from attempt order by job_id desc limit 1)"
    )
    # An index returns dead entries, too, until they are vacuumed.
    owner.execute("vacuum" if known == "stale" else "vacuum analyze")
    counts = (
        "select indexrelid::regclass::text,"
        " pg_stat_get_xact_tuples_returned(indexrelid) from pg_index"
        " where indrelid = any (array['job', 'live_job', 'attempt']::regclass[])"
    )

    with operator.transaction():
        before = dict(operator.rows(counts))
        found = operator.rows("select finding, detail from inspect_health()")
        read = {name: n - before[name] for name, n in operator.rows(counts)}

    # It comes to each bound: 2,000 and 500 rows twice, and 10,000 jobs ahead.
    assert {name for name, _ in found} >= {
        "job_lost",
        "jobs_failing",
        "jobs_far_ahead",
        "lease_held_long",
        "live_row_stray",
    }
    assert "has 10000 jobs due" in dict(found)["jobs_far_ahead"]
    assert {name: n for name, n in read.items() if n > 11000} == {}
    assert read["job_pkey"] < 6000


@pytest.mark.slow
@pytest.mark.parametrize("planned", ["empty", "full"])
def test_the_failures_of_one_queue_are_found_among_those_of_others(
    planned, owner, observer, operator, buffers
):
    calls = {
        observer: "select count(*) from inspect_failures('email', p_limit => 10)",
        operator: "select redrive_failed('email', '-infinity', p_limit => 1)",
    }
    if planned == "empty":
        for session, call in calls.items():
            session.execute(call)
    owner.execute(
        """
        with made as (
            insert into job (job_id, created_at, max_attempts, producer, queue, kind,
                idempotency_key, payload)
            select gen_random_uuid(), clock_timestamp(), 3, 'accounts',
                case when n % 2500 = 0 then 'email' else 'slow' end, 'send', 'k' || n,
                '{}'
            from generate_series(1, 10000) as n
            returning job_id, queue
        )
        insert into attempt (job_id, leased_at, ended_at, attempt, max_attempts,
            queue, worker, outcome, failure_code, lease_token_hash)
        select job_id, clock_timestamp(), clock_timestamp(), 1, 3, queue,
            'email-worker', 'failed', 'timeout', ''
        from made
        """
    )
    owner.execute("analyze")

    for session, call in calls.items():  # what a first call reads of the catalogues
        session.execute(call)
    spent = [buffers(session, call) for session, call in calls.items()]

    assert max(spent) < 400
    assert observer.value(calls[observer]) == 2
