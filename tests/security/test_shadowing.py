"""Names and settings of a caller's own make no difference to what the functions do."""

from __future__ import annotations

import pytest

SCHEMA = "jobs_email"
CALLERS = ("accounts", "email-worker", "operations")
EXPECTED = [
    ("enqueue", True),
    ("enqueue again", False),
    ("enqueue otherwise", "LJ002"),
    ("enqueue badly", "LJ001"),
    ("enqueue_many", ["created", "existing", "conflict", "invalid_job"]),
    ("claim", [("send", {"to": 1}, 1, 3), ("send", {"to": 3}, 1, 2)]),
    ("renew", True),
    ("renew_many", ["renewed", "renewed"]),
    ("fail", "queued"),
    ("complete", True),
    ("complete again", True),
    ("claim nothing", []),
    ("inspect", ("succeeded", 1, "accounts", "email-worker")),
    ("inspect the other", ("queued", 1, "accounts", "email-worker")),
    ("next", True),
    ("redrive", "LJ007"),
    ("erase", "LJ007"),
    ("retire_expired", 0),
    ("pause", True),
    ("resume", True),
    ("inspect_key", [("succeeded",)]),
    ("inspect_jobs", [(1,)]),
    ("attempts", [(1, "retried")]),
    ("failures", []),
    ("queues", [("email", 0, 1, 0), ("slow", 0, 0, 0)]),
    ("workers", [("email-worker", 0), ("spare-worker", 0)]),
    ("health", []),
    ("explain the other", "retry_waiting"),
    ("purge", 1),
    ("enforce_retention", 0),
    ("redrive_failed", 0),
    ("inspect the purged", "LJ006"),
    ("explain the purged", ("purged_or_unknown", "OPERATOR")),
    # An act that changed nothing leaves no row.
    ("acts", ["purge", "resume", "pause", "configure"]),
]


def life(producer, worker, observer, operator):
    """Walk every function, and tell what each answered."""
    told = []

    def tell(step, session, statement, *parameters):
        try:
            with session.transaction():
                answer = session.rows(statement, *parameters)
        except Exception as error:  # noqa: BLE001
            answer = error.sqlstate
        told.append((step, answer))
        return answer

    def one(step, session, statement, *parameters):
        answer = tell(step, session, statement, *parameters)
        if isinstance(answer, list):
            ((value,),) = answer
            told[-1] = (step, value)

    def column(step, session, statement, *parameters):
        tell(step, session, statement, *parameters)
        told[-1] = (step, [value for (value,) in told[-1][1]])

    enqueue = f"select created from {SCHEMA}.enqueue('email', %s, %s, 'k')"
    one("enqueue", producer, enqueue, "send", '{"to": 1}')
    one("enqueue again", producer, enqueue, "send", '{"to": 1.0}')
    one("enqueue otherwise", producer, enqueue, "send", '{"to": 2}')
    one("enqueue badly", producer, enqueue, "send it", "{}")
    column(
        "enqueue_many",
        producer,
        f"select outcome from {SCHEMA}.enqueue_many(%s)",
        """[{"queue": "email", "kind": "send", "payload": {"to": 3}, "max_attempts": 2,
             "idempotency_key": "m", "available_at": "2020-02-29T12:00:00+01:00"},
            {"queue": "email", "kind": "send", "payload": {"to": 1},
             "idempotency_key": "k"},
            {"queue": "email", "kind": "send", "payload": {"to": 2},
             "idempotency_key": "k"},
            {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": "d",
             "available_at": "2023-02-29T12:00:00Z"}]""",
    )
    rows = worker.rows(
        "select kind, payload, attempt, max_attempts, job_id, lease_token"
        f" from {SCHEMA}.claim('email', 10)"
    )
    told.append(("claim", [row[:4] for row in rows]))
    done, retried = (row[4:] for row in rows)
    one("renew", worker, f"select {SCHEMA}.renew(%s, %s) is not null", *done)
    column(
        "renew_many",
        worker,
        f"select outcome from {SCHEMA}.renew_many(%s, %s)",
        [done[0], retried[0]],
        [done[1], retried[1]],
    )
    one(
        "fail",
        worker,
        f"select status from {SCHEMA}.fail(%s, %s, 'smtp.down', true)",
        *retried,
    )
    one("complete", worker, f"select {SCHEMA}.complete(%s, %s)", *done)
    one("complete again", worker, f"select {SCHEMA}.complete(%s, %s)", *done)
    tell("claim nothing", worker, f"select job_id from {SCHEMA}.claim('email')")
    inspect = f"select status, attempts, producer, worker from {SCHEMA}.inspect(%s)"
    told.append(("inspect", observer.rows(inspect, done[0])[0]))
    told.append(("inspect the other", observer.rows(inspect, retried[0])[0]))
    one("next", worker, f"select {SCHEMA}.next_available_at('email') is not null")
    for act, argument in {
        "redrive": f"'{retried[0]}'",
        "erase": f"'{retried[0]}'",
        "retire_expired": "",
        "pause": "'email'",
        "resume": "'email'",
    }.items():
        one(act, operator, f"select {SCHEMA}.{act}({argument})")
    for step, statement in {
        "inspect_key": "status from {}.inspect_key('k', 'accounts')",
        "inspect_jobs": "attempts from {}.inspect_jobs('email', 'queued', 'send')",
        "attempts": "attempt, outcome from {}.inspect_attempts(%s)",
        "failures": "job_id from {}.inspect_failures('email')",
        "queues": "queue, ready, retry_waiting, running from {}.inspect_queues()",
        "workers": "worker, leases from {}.inspect_workers()",
        "health": "finding, subject from {}.inspect_health()",
    }.items():
        of_a_job = [retried[0]] if "%s" in statement else []
        tell(step, observer, f"select {statement.format(SCHEMA)}", *of_a_job)
    explain = f"select reason, who from {SCHEMA}.explain_job(%s)"
    told.append(("explain the other", observer.rows(explain, retried[0])[0][0]))
    one(
        "purge",
        operator,
        f"select {SCHEMA}.purge(pg_catalog.clock_timestamp())",
    )
    one("enforce_retention", operator, f"select {SCHEMA}.enforce_retention()")
    one(
        "redrive_failed",
        operator,
        f"select {SCHEMA}.redrive_failed('email', 'epoch', p_failure_code => 'x')",
    )
    one("inspect the purged", observer, f"select {SCHEMA}.inspect(%s)", done[0])
    reason, who = observer.rows(explain, done[0])[0]
    whose = "OPERATOR" if who == operator.info.user else who
    told.append(("explain the purged", (reason, whose)))
    column("acts", observer, f"select act from {SCHEMA}.inspect_acts()")
    return told


@pytest.fixture
def sessions(producer, worker, observer, operator):
    return producer, worker, observer, operator


@pytest.fixture
def names(owner):
    """The Instance's own names: relations, types, and functions with arguments."""
    return {
        "relations": [
            name
            for (name,) in owner.rows(
                "select relname from pg_class where relkind in ('r', 'v', 'S')"
                " and relnamespace = 'jobs_email'::regnamespace"
            )
        ],
        "types": [
            name
            for (name,) in owner.rows(
                "select t.typname from pg_type as t where t.typelem = 0"
                " and t.typnamespace = 'jobs_email'::regnamespace"
                " and (t.typrelid = 0 or exists (select from pg_class as c"
                "  where c.oid = t.typrelid and c.relkind = 'c'))"
            )
        ],
        "functions": owner.rows(
            "select proname, oid::regprocedure::text from pg_proc"
            " where pronamespace = 'jobs_email'::regnamespace"
        ),
    }


def test_every_call_returns_as_expected_without_shadowing_names(sessions):
    assert life(*sessions) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("path", ["jobs_email", "pg_temp, jobs_email", "pg_temp"])
def test_temporary_tables_named_like_the_instances_are_not_read(path, sessions, names):
    for session in sessions:
        for name in names["relations"]:
            session.execute(f"create temp table {name} (caller text, queue text)")
            session.execute(f"insert into pg_temp.{name} values ('x', 'nowhere')")
        session.execute(f"set search_path = {path}")

    assert life(*sessions) == EXPECTED


def test_a_temporary_table_declares_no_caller_and_no_queue(prefix, new_role, connect):
    member = connect(new_role(members_of=[f"{prefix}_producer"]))
    member.execute(
        "create temp table caller as select current_user::text as caller,"
        " true as is_producer, true as is_worker, true as is_observer"
    )
    member.execute("create temp table queue as select 'mine'::text as queue")
    member.execute("set search_path = pg_temp, jobs_email")

    with member.refusing("42501"):
        member.execute("select jobs_email.enqueue('mine', 'send', '{}', 'k')")


@pytest.mark.slow
def test_temporary_types_and_functions_named_like_the_instances_are_not_used(
    sessions, names
):
    for session in sessions:
        for name in names["types"]:
            session.execute(f"create type pg_temp.{name} as enum ('shadow')")
        for name in ("timestamptz", "uuid", "jsonb", "text", "int4"):
            session.execute(f"create domain pg_temp.{name} as bytea")
        session.execute(
            "create function pg_temp._caller() returns pg_catalog.text language sql"
            " as $$ select 'organization'::pg_catalog.text $$"
        )
        session.execute(
            "create function pg_temp._is_name(pg_catalog.text, integer)"
            " returns boolean language sql as 'select true'"
        )
        session.execute("set search_path = pg_temp, jobs_email")

    assert life(*sessions) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("path", ["evil, jobs_email", "evil, pg_catalog, jobs_email"])
def test_a_schema_with_foreign_functions_operators_and_casts_is_not_used(
    path, sessions, owner
):
    owner.execute("create schema evil")
    for arguments, result, name, body in (
        ("", "timestamptz", "now", "select 'infinity'::timestamptz"),
        ("", "timestamptz", "clock_timestamp", "select 'infinity'::timestamptz"),
        ("bytea", "bytea", "sha256", r"select ''::bytea"),
        ("", "uuid", "gen_random_uuid", "select null::uuid"),
        ("text", "integer", "length", "select 1000"),
        ("text", "integer", "octet_length", "select 1000000"),
        ("jsonb", "text", "jsonb_typeof", "select 'array'::text"),
        ("text, name", "bytea", "convert_to", r"select ''::bytea"),
        ("", "text", "_caller", "select 'organization'::text"),
        ("text, integer", "boolean", "_is_name", "select true"),
        ("uuid[]", "integer", "cardinality", "select 7"),
        ("text, boolean", "text", "current_setting", "select 'organization'::text"),
        ("text", "regclass", "to_regclass", "select null::regclass"),
        ("text, text", "text", "format", "select ''::text"),
        ("text", "text", "md5", "select ''::text"),
        ("oid, oid, text", "boolean", "pg_has_role", "select false"),
        ("text, timestamptz", "double precision", "date_part", "select 0"),
        ("regclass", "bigint", "pg_relation_size", "select 1000000000000"),
        ("text", "text", "current_setting", "select 'organization'::text"),
    ):
        owner.execute(
            f"create function evil.{name}({arguments}) returns {result}"
            f" language sql as $body$ {body} $body$"
        )
    for operator, left, right, answer in (
        ("=", "text", "text", "true"),
        ("=", "uuid", "uuid", "true"),
        ("=", "jsonb", "jsonb", "true"),
        ("=", "bytea", "bytea", "true"),
        (">", "timestamptz", "timestamptz", "false"),
        ("<=", "timestamptz", "timestamptz", "false"),
        ("<=", "integer", "integer", "false"),
        ("~", "text", "text", "true"),
        ("?", "jsonb", "text", "true"),
        ("=", "oid", "oid", "false"),
        ("=", "name", "name", "false"),
        ("<>", "text", "text", "true"),
        ("-", "jsonb", "text[]", "null"),
    ):
        result = "jsonb" if answer == "null" else "boolean"
        function = f'evil."{operator}{left}{right}"'
        owner.execute(
            f"create function {function}({left}, {right}) returns {result}"
            f" language sql as 'select {answer}::{result}'"
        )
        owner.execute(
            f"create operator evil.{operator}"
            f" (leftarg = {left}, rightarg = {right}, function = {function})"
        )
    owner.execute(
        "create domain evil.instant as timestamptz;"
        " create type evil.enqueued_job as enum ('shadow');"
        " create table evil.caller (caller text);"
        " create table evil.job (job_id text);"
        " grant usage on schema evil to public;"
        " grant select on all tables in schema evil to public"
    )
    for session in sessions:
        session.execute(f"set search_path = {path}")

    assert life(*sessions) == EXPECTED


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["view", "table"])
def test_an_optional_object_is_not_looked_for_among_temporary_relations(
    kind, owner, observer
):
    owner.execute("drop table yoyo_lock, _yoyo_migration")
    before = observer.rows("select finding, subject from inspect_health()")
    observer.execute(
        "create function pg_temp.trap() returns integer language plpgsql"
        " as $$ begin raise 'as %', current_user; end $$"
    )
    for name, columns in (
        ("yoyo_lock", "{} as pid, 'now'::timestamp as ctime"),
        ("_yoyo_migration", "'0009-' || {} as migration_id"),
    ):
        value = "pg_temp.trap()" if kind == "view" else "1"
        observer.execute(f"create temp {kind} {name} as select {columns.format(value)}")
        observer.execute(f"grant select on {name} to public")

    found = observer.rows("select finding, subject from inspect_health()")

    assert found == before == []


def test_a_schema_named_like_the_caller_is_not_used(sessions, owner):
    for caller in CALLERS:
        owner.execute(f'create schema "{caller}" authorization "{caller}"')
        owner.execute(f'create table "{caller}".caller (caller text)')
        owner.execute(f'create table "{caller}".job (job_id text)')
    for session in sessions:
        session.execute("set search_path = default")

    assert life(*sessions) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("search_path", ""),
        ("search_path", "pg_catalog"),
        ("standard_conforming_strings", "off"),
        ("transform_null_equals", "on"),
        ("DateStyle", "German, DMY"),
        ("IntervalStyle", "sql_standard"),
        ("TimeZone", "Pacific/Kiritimati"),
        ("timezone_abbreviations", "Australia"),
        ("bytea_output", "escape"),
        ("extra_float_digits", "-15"),
        ("array_nulls", "off"),
        ("row_security", "off"),
        ("quote_all_identifiers", "on"),
        ("stats_fetch_consistency", "snapshot"),
        ("plan_cache_mode", "force_custom_plan"),
        ("from_collapse_limit", "1"),
        ("enable_nestloop", "off"),
        ("enable_indexscan", "off"),
        ("enable_material", "off"),
        ("enable_hashagg", "off"),
        ("cursor_tuple_fraction", "0"),
        ("jit_above_cost", "0"),
        ("work_mem", "64kB"),
        ("client_encoding", "LATIN1"),
        ("default_transaction_isolation", "serializable"),
        ("default_transaction_deferrable", "on"),
        ("default_toast_compression", "pglz"),
        ("xmloption", "document"),
        ("check_function_bodies", "off"),
    ],
)
def test_settings_of_a_caller_change_no_result(setting, value, sessions):
    for session in sessions:
        session.execute("select set_config(%s, %s, false)", (setting, value))

    assert life(*sessions) == EXPECTED


def test_the_same_statements_prepared_before_and_after_a_change_of_path_agree(
    sessions, owner
):
    producer = sessions[0]
    owner.execute("create schema evil; grant all on schema evil to public")
    call = "select created from jobs_email.enqueue('email', 'send', '{}', %s)"
    before = [producer.value(call, f"a-{n}") for n in range(7)]

    producer.execute("set search_path = evil, jobs_email")
    producer.execute("create table evil.caller (caller text)")
    after = [producer.value(call, f"b-{n}") for n in range(7)]

    assert before == after == [True] * 7
