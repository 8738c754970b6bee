"""Where each call goes, and that a router is called as an Instance is."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lenso_jobs import Jobs, NewJob, shard_of

pytestmark = pytest.mark.slow

# A caller, and a call that is refused or that finds nothing: on the router as on a shard.
REFUSED = [
    ("accounts", "enqueue(null, null, null, null)"),
    ("accounts", "enqueue('email', 'send', '{}', '')"),
    ("accounts", "enqueue('nope', 'send', '{}', 'k')"),
    ("accounts", "enqueue('email', 'send', '[]', 'k')"),
    ("accounts", "enqueue('email', 'send', '{}', 'k', null, 0)"),
    ("accounts", "enqueue('email', 'send', '{}', 'k', 'infinity')"),
    ("accounts", "enqueue_many(null)"),
    ("accounts", "enqueue_many('{}')"),
    ("accounts", "enqueue_many('[]')"),
    ("accounts", "enqueue_many('[1, null, {}, [2]]')"),
    ("accounts", """enqueue_many('[{"queue": "email", "idempotency_key": 5}]')"""),
    ("accounts", "enqueue_many((select jsonb_agg(1) from generate_series(1, 1001)))"),
    ("accounts", "inspect(null)"),
    ("accounts", "inspect(gen_random_uuid())"),
    ("accounts", "inspect_key(null)"),
    ("accounts", "inspect_key('a', 'organization')"),
    ("operations", "inspect_key('a', 'nobody')"),
    ("operations", "inspect_jobs('email', 'queued', null, 0)"),
    ("operations", "inspect_jobs('email', 'queued', null, -1)"),
    ("operations", "inspect_jobs('email', 'queued', null, null)"),
    ("operations", "inspect_jobs('nope', 'queued')"),
    ("operations", "inspect_jobs('email', 'nonsense')"),
    ("operations", "inspect_failures('email', null, 0)"),
    ("operations", "inspect_failures('email', null, -1)"),
    ("operations", "inspect_failures('email', null, null)"),
    ("operations", "inspect_acts(0)"),
    ("operations", "inspect_acts(-1)"),
    ("operations", "inspect_acts(null)"),
    ("operations", "inspect_acts(10, 0)"),
    ("operations", "inspect_acts(10, -9223372036854775808)"),
    ("operations", "inspect_acts(10, 9223372036854775807)"),
    ("operations", "inspect_attempts(null)"),
    ("operations", "inspect_attempts(gen_random_uuid())"),
    ("operations", "explain_job(null)"),
    ("duty", "redrive(null)"),
    ("duty", "redrive(gen_random_uuid())"),
    ("duty", "redrive(gen_random_uuid(), 0)"),
    ("duty", "redrive_failed('email', now(), null, null, 0)"),
    ("duty", "redrive_failed('email', now(), null, null, null)"),
    ("duty", "redrive_failed('nope', now())"),
    ("duty", "purge(null)"),
    ("duty", "purge(now(), 0)"),
    ("duty", "purge(now(), null)"),
    ("duty", "purge(now(), 1000000)"),
    ("duty", "enforce_retention(0)"),
    ("duty", "enforce_retention(5)"),
    ("duty", "retire_expired(null)"),
    ("duty", "pause('nope')"),
    ("duty", "resume('nope')"),
    ("duty", "erase(null)"),
    ("duty", "erase(gen_random_uuid())"),
    ("postgres", "enqueue('email', 'send', '{}', 'k')"),
]
SIGNATURES = """
    select p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
        array(
            select r.rolname from pg_roles as r
            where r.rolname ~ %s and has_function_privilege(r.oid, p.oid, 'execute')
            order by 1
        )
    from pg_proc as p
    where p.pronamespace = %s::regnamespace and p.proname !~ '^_'
    order by 1, 2
"""


@pytest.fixture
def on_shard(fleet):
    """Return which keys a shard has."""

    def on_shard(shard):
        rows = fleet.open(shard=shard).rows("select idempotency_key from job")
        return {key for (key,) in rows}

    return on_shard


@pytest.fixture
def producer(fleet):
    return fleet.open("accounts")


def attributes(error):
    d = error.diag
    return d.sqlstate, d.message_primary, d.message_detail, d.message_hint


def outcome(session, call):
    try:
        return session.rows(f"select * from {call}")
    except psycopg.Error as error:
        return type(error), *attributes(error)


def test_names_arguments_results_and_rights_are_those_of_an_instance(fleet):
    given = [f"^{fleet.schema}_(?!owner)|^accounts$", fleet.schema]

    router, shard = (
        [call for call in session.rows(SIGNATURES, *given) if call[-1]]
        for session in (fleet.open(), fleet.open(shard=0))
    )

    assert len(router) > 25
    assert router == shard


def test_views_say_what_those_of_an_instance_say(fleet):
    for view in ("error_code", "explain_reason", "health_finding", "installed_version"):
        at_the_router = fleet.open("accounts").rows(f"select * from {view} order by 1")
        assert at_the_router, view
        assert at_the_router == fleet.open("accounts", 0).rows(
            f"select * from {view} order by 1"
        )


def test_a_call_is_refused_in_the_words_of_the_shard(fleet):
    roles = {role for role, _ in REFUSED}
    sessions = {role: (fleet.open(role), fleet.open(role, 0)) for role in roles}
    for role, call in REFUSED:
        router, shard = sessions[role]
        assert outcome(router, call) == outcome(shard, call), (role, call)


def test_a_conflict_names_the_job_as_an_instance_does(fleet):
    producer, key = fleet.open("accounts"), fleet.key(1)
    producer.execute("select enqueue('email', 'send', '{}', %s)", [key])

    with producer.refusing("LJ002") as refused:
        producer.execute("select enqueue('email', 'other', '{}', %s)", [key])

    with fleet.open("accounts", 1).refusing("LJ002") as expected:
        fleet.open("accounts", 1).execute(
            "select enqueue('email', 'other', '{}', %s)", [key]
        )
    assert attributes(refused.value) == attributes(expected.value)
    assert refused.value.diag.message_detail.startswith("job_id=")


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1)
)
def test_the_router_and_python_choose_the_same_shard(producer, keys):
    rows = producer.rows(
        "select _shard_of(k) from unnest(%s::text[]) with ordinality as k (k, n)"
        " order by n",
        keys,
    )

    assert [shard for (shard,) in rows] == [shard_of(key, 2) for key in keys]


def test_a_key_goes_to_its_shard_and_no_other(fleet, on_shard):
    jobs = fleet.jobs("accounts")
    keys = [fleet.key(n % 2) for n in range(20)]

    first = [
        jobs.enqueue("email", "send", {"ü": "😀"}, idempotency_key=k) for k in keys
    ]
    again = [
        jobs.enqueue("email", "send", {"ü": "😀"}, idempotency_key=k) for k in keys
    ]

    assert {each.created for each in first} == {True}
    assert [(each.job_id, False) for each in first] == [
        (each.job_id, each.created) for each in again
    ]
    for shard in range(2):
        assert on_shard(shard) == {key for key in keys if shard_of(key, 2) == shard}


def test_a_batch_is_split_and_answered_in_its_order(fleet, on_shard):
    producer = fleet.open("accounts")
    keys = [fleet.key(int(n % 3 == 0)) for n in range(300)]
    items = [
        {"queue": "email", "kind": "send", "payload": {"n": n}, "idempotency_key": key}
        for n, key in enumerate(keys)
    ]
    known, bad = items[7], items[11]
    job_id = producer.value(
        "select job_id from enqueue('email', 'send', '{\"n\": 7}', %s)",
        known["idempotency_key"],
    )
    bad["queue"] = "nope"
    items += [items[0], {**items[1], "kind": "other"}, 5]

    rows = producer.rows("select * from enqueue_many(%s)", json.dumps(items))

    assert [position for position, _, _ in rows] == list(range(1, 304))
    outcomes = [outcome for *_, outcome in rows]
    assert outcomes[7] == "existing"
    assert rows[7][1] == job_id
    assert outcomes[11] == "invalid_job"
    assert outcomes[300:] == ["created", "conflict", "invalid_job"] or outcomes[
        300:
    ] == ["existing", "conflict", "invalid_job"]
    assert rows[300][1] == rows[0][1]
    assert on_shard(0) | on_shard(1) == set(keys) - {bad["idempotency_key"]}
    for n in (0, 1, 298, 299):
        found = producer.row("select * from inspect_key(%s)", keys[n])
        assert found["job_id"] == rows[n][1]


def test_the_client_uses_a_router_as_an_instance(fleet):
    jobs = fleet.jobs("accounts")
    keys = [fleet.key(n % 2) for n in range(6)]
    at = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)

    made = jobs.enqueue_many(
        [
            NewJob("email", "send", {"n": n}, idempotency_key=key, available_at=at)
            for n, key in enumerate(keys)
        ]
    )

    for item, key in zip(made, keys, strict=True):
        found = jobs.inspect_key(key)
        assert found.job_id == item.job_id
        assert found == jobs.inspect(item.job_id)
        assert found.available_at == at
        assert found.producer == "accounts"


@pytest.mark.parametrize("shard", [0, 1])
def test_a_job_is_found_on_whichever_shard_it_is(fleet, shard):
    key = fleet.key(shard)
    job_id = (
        fleet.jobs("accounts").enqueue("email", "send", {}, idempotency_key=key).job_id
    )
    worker = fleet.open("email-worker", shard)
    lease = worker.row("select * from claim('email')")
    assert lease["job_id"] == job_id
    worker.execute(
        "select fail(%s, %s, 'smtp.timeout', false)", [job_id, lease["lease_token"]]
    )
    observer, duty = fleet.open("operations"), fleet.open("duty")

    assert observer.row("select * from inspect(%s)", job_id)["status"] == "failed"
    assert observer.row("select * from inspect_attempts(%s)", job_id)["attempt"] == 1
    assert observer.row("select * from explain_job(%s)", job_id)["reason"] == "failed"
    assert observer.row("select * from inspect_failures()")["job_id"] == job_id
    assert duty.row("select * from redrive(%s)", job_id)["status"] == "queued"
    assert observer.row("select * from explain_job(%s)", job_id)["reason"] == "ready"
    lease = worker.row("select * from claim('email')")
    worker.execute("select complete(%s, %s)", [job_id, lease["lease_token"]])
    assert duty.value("select erase(%s)", job_id) is True
    with observer.refusing("LJ006"):
        observer.execute("select inspect(%s)", [job_id])
    found = observer.row("select * from explain_job(%s)", job_id)
    assert (found["reason"], found["who"]) == ("purged_or_unknown", "duty")


def test_queues_and_workers_are_added_up_and_acts_name_their_shard(fleet):
    jobs = fleet.jobs("accounts")
    for n in range(5):
        jobs.enqueue("email", "send", {}, idempotency_key=fleet.key(int(n > 1)))
    for shard in range(2):
        fleet.open("email-worker", shard).execute("select claim('email')")
    observer, duty = fleet.open("operations"), fleet.open("duty")

    queues = observer.rows("select queue, ready, running from inspect_queues()")
    workers = observer.rows("select worker, leases from inspect_workers()")
    paused = duty.value("select pause('slow')"), duty.value("select pause('slow')")
    acts = observer.rows("select act, arguments ->> 'shard' from inspect_acts()")
    resumed = duty.value("select resume('slow')")

    assert queues == [("email", 3, 2), ("slow", 0, 0)]
    assert workers == [("email-worker", 2)]
    assert (paused, resumed) == ((True, False), True)
    assert sorted(acts) == [("pause", "0"), ("pause", "1")]


def test_pages_of_jobs_have_each_job_once(fleet):
    jobs, observer = fleet.jobs("accounts"), fleet.jobs("operations")

    def enqueue(count):
        return {
            jobs.enqueue("email", "send", {}, idempotency_key=fleet.key(n % 2)).job_id
            for n in range(count)
        }

    # A call looks at 10,000 jobs, so shard 0 ends its page early, and shard 1 does not.
    ids = enqueue(3)
    for _ in range(10):
        new = [
            NewJob("slow", "send", {}, idempotency_key=fleet.key(0))
            for _ in range(1000)
        ]
        jobs.enqueue_many(new)
    ids |= enqueue(5)

    for size in (2, 3, 100):
        page = observer.inspect_jobs("email", "queued", limit=size)
        listed = [*page]
        while page.next_before is not None:
            before = page.next_before
            page = observer.inspect_jobs("email", "queued", limit=size, before=before)
            listed += page

        assert [job.job_id for job in listed] == sorted(ids, reverse=True)
        assert {job.queue for job in listed} == {"email"}


def test_pages_of_failures_have_each_failure_once(fleet):
    jobs, observer = fleet.jobs("accounts"), fleet.jobs("operations")
    ids = {
        jobs.enqueue("email", "send", {}, idempotency_key=fleet.key(n % 2)).job_id
        for n in range(9)
    }
    for _ in range(5):
        for shard in range(2):
            fleet.open("email-worker", shard).execute(
                "select fail(job_id, lease_token, 'smtp.timeout', false)"
                " from claim('email')"
            )

    for size in (1, 2, 100):
        page = listed = observer.inspect_failures("email", limit=size)
        while page:
            page = observer.inspect_failures("email", limit=size, before=listed[-1])
            listed += page

        assert {failure.job_id for failure in listed} == ids
        times = [failure.ended_at for failure in listed]
        assert times == sorted(times, reverse=True)
        assert len(listed) == 9


def test_pages_of_acts_have_each_act_once(fleet):
    duty, observer = fleet.open("duty"), fleet.open("operations")
    # The acts of one shard have higher numbers.
    fleet.open(shard=0).execute(
        "select setval(pg_get_serial_sequence('operator_act', 'operator_act_id'), 1000)"
    )
    for _ in range(4):
        duty.execute("select pause('slow')")
        duty.execute("select resume('slow')")

    for size in (1, 2, 3):
        acts, last = [], None
        while page := observer.rows("select * from inspect_acts(%s, %s)", size, last):
            acts += page
            last = page[-1][0]

        numbers = [act[0] for act in acts]
        assert numbers == sorted(set(numbers), reverse=True)
        assert Counter(act[4]["shard"] for act in acts) == {0: 8, 1: 8}


def test_redrive_and_purge_go_over_the_shards_until_their_limit(fleet):
    jobs, duty = fleet.jobs("accounts"), fleet.open("duty")
    for n in range(6):
        jobs.enqueue("email", "send", {}, idempotency_key=fleet.key(n % 2))
    for shard in range(2):
        worker = fleet.open("email-worker", shard)
        worker.execute(
            "select fail(job_id, lease_token, 'smtp.timeout', false)"
            " from claim('email', 10)"
        )
    since = "now() - interval '1 hour'"

    counts = [
        duty.value(f"select redrive_failed('email', {since}, now(), null, 4)")
        for _ in range(3)
    ]
    for shard in range(2):
        worker = fleet.open("email-worker", shard)
        worker.execute("select complete(job_id, lease_token) from claim('email', 10)")
    purged = [duty.value("select purge(clock_timestamp(), 4)") for _ in range(3)]

    assert counts == [4, 2, 0]
    assert purged == [4, 2, 0]


def test_verbs_of_workers_refuse_and_name_the_command(fleet):
    worker = fleet.open("email-worker")
    calls = worker.rows(
        "select proname, array(select format('null::%%s', format_type(a, null))"
        "  from unnest(proargtypes) as a) from pg_proc"
        " where pronamespace = %s::regnamespace and prosrc ~ 'LJ008'",
        fleet.schema,
    )

    assert len(calls) == 11
    for name, arguments in calls:
        with worker.refusing("LJ008") as refused:
            worker.execute(f"select {name}({', '.join(arguments)})")
        assert "lenso-jobs work --fleet" in refused.value.diag.message_hint


def test_a_call_commits_by_itself(fleet):
    producer, key = fleet.open("accounts"), fleet.key(1)

    with producer.transaction(force_rollback=True):
        producer.execute("select enqueue('email', 'send', '{}', %s)", [key])

    assert producer.row("select * from inspect_key(%s)", key)["status"] == "queued"


def test_in_a_security_definer_function_the_caller_is_its_owner(fleet):
    router = fleet.open()
    router.execute(
        f"""
        create schema app authorization accounts;
        create function app.enqueue(p_key text) returns void language sql
        security definer as $$
            select {fleet.schema}.enqueue('email', 'send', '{{}}', p_key)
        $$;
        alter function app.enqueue(text) owner to accounts;
        grant usage on schema app to organization;
        """
    )
    try:
        fleet.open("organization").execute("select app.enqueue(%s)", [fleet.key(0)])
    finally:
        router.execute("drop schema app cascade")

    assert fleet.open(shard=0).value("select producer from job") == "accounts"


def test_settings_of_sessions_and_databases_change_no_value(fleet):
    at = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    odd = {
        "datestyle": "'SQL, DMY'",
        "intervalstyle": "sql_standard",
        "timezone": "'America/St_Johns'",
        "extra_float_digits": "-10",
        "bytea_output": "escape",
        "search_path": "''",
        "client_encoding": "latin1",
        "standard_conforming_strings": "off",
    }
    for shard in range(2):
        session = fleet.open(shard=shard)
        for name, value in odd.items():
            session.execute(f"alter database {fleet.dbname} set {name} = {value}")
    try:
        producer, key = fleet.open("accounts"), fleet.key(1)
        producer.execute("set datestyle = 'German'; set timezone = 'Asia/Kathmandu'")
        producer.execute(
            "select enqueue('email', 'send', '{\"é\": \"😀\"}', %s, %s)", [key, at]
        )
        found = producer.row("select * from inspect_key(%s)", key)
        observer = fleet.open("operations")
        observer.execute("set intervalstyle = 'sql_standard'")
        listed = observer.row("select * from inspect_jobs('email', 'queued')")
        (queue, _) = observer.rows("select counted_since from inspect_queues()")
    finally:
        for shard in range(2):
            fleet.open(shard=shard).execute(f"alter database {fleet.dbname} reset all")

    assert found["available_at"] == listed["available_at"] == at
    assert timedelta(0) < datetime.now(UTC) - queue[0] < timedelta(hours=1)
    assert fleet.open(shard=1).value("select payload from job") == {"é": "😀"}


def test_a_fleet_whose_shards_trust_the_router_needs_no_password(trusting_fleet):
    fleet = trusting_fleet
    for caller in ("accounts", "organization"):
        for shard in range(2):
            key = fleet.key(shard)
            fleet.jobs(caller).enqueue("email", "send", {}, idempotency_key=key)

    for shard in range(2):
        assert fleet.open(shard=shard).rows(
            "select producer, count(*) from job group by 1 order by 1"
        ) == [("accounts", 1), ("organization", 1)]
    mappings = fleet.open().rows(
        "select usename, umoptions from pg_user_mappings where srvname ^@ %s",
        fleet.schema,
    )
    assert mappings == [("public", None)]


def test_a_client_that_is_given_a_caller_acts_as_that_caller(fleet):
    for caller in ("accounts", "organization"):
        with psycopg.connect(fleet.router) as connection:
            jobs = Jobs(connection, fleet.schema, caller=caller)
            key = fleet.key(0)
            jobs.enqueue("email", "send", {}, idempotency_key=key)
        assert fleet.open(shard=0).rows(
            "select producer from job where idempotency_key = %s", key
        ) == [(caller,)]


def test_the_planner_inlines_the_shard_of_a_key(fleet):
    # As a call it takes longer than all else that the router does for a job.
    plan = fleet.open("accounts").rows(
        "explain verbose select _shard_of(concat(now()))"
    )

    assert "sha256" in str(plan)
    assert "_shard_of" not in str(plan)
