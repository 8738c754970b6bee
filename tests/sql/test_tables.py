import pytest

LIVE = {
    "job_id": "gen_random_uuid()",
    "available_at": "clock_timestamp()",
    "leased_at": "clock_timestamp()",
    "lease_expires_at": "clock_timestamp() + interval '9 s'",
    "attempt": "1",
    "max_attempts": "3",
    "queue": "'email'",
    "lease_owner": "'email-worker'",
    "lease_token_hash": "sha256('t')",
    "last_failure_code": "null",
}
JOB = {
    "job_id": "gen_random_uuid()",
    "created_at": "clock_timestamp()",
    "available_at": "null",
    "max_attempts": "3",
    "producer": "'accounts'",
    "queue": "'email'",
    "kind": "'send'",
    "idempotency_key": "gen_random_uuid()::text",
    "payload": "'{}'",
}
ATTEMPT = {
    "job_id": "gen_random_uuid()",
    "leased_at": "clock_timestamp()",
    "ended_at": "clock_timestamp()",
    "retry_at": "null",
    "attempt": "1",
    "max_attempts": "3",
    "retryable": "null",
    "queue": "'email'",
    "worker": "'email-worker'",
    "outcome": "'succeeded'",
    "failure_code": "null",
    "lease_token_hash": "sha256('t')",
}
UNLEASED = dict.fromkeys(
    ("leased_at", "lease_expires_at", "lease_owner", "lease_token_hash"), "null"
)
ROWS = {"live_job": LIVE, "job": JOB, "attempt": ATTEMPT}


@pytest.fixture
def insert(owner):
    """Insert a good row with changes, as the owner."""

    def insert(table, **changes):
        row = ROWS[table] | changes
        owner.execute(
            f"insert into {table} ({', '.join(row)}) values ({', '.join(row.values())})"
        )

    return insert


@pytest.mark.parametrize(
    "changes",
    [
        {},
        UNLEASED,
        UNLEASED | {"attempt": "0"},
        {"attempt": "3"},
        {"attempt": "100", "max_attempts": "100"},
        {"attempt": "101", "max_attempts": "200"},
        {"last_failure_code": "'timeout'"},
    ],
)
def test_live_job_takes_a_sound_row(insert, owner, changes):
    insert("live_job", **changes)

    assert owner.value("select count(*) from live_job") == 1


@pytest.mark.parametrize(
    ("sqlstate", "rows"),
    [
        (
            "23514",
            [
                {"available_at": "'infinity'"},
                {"available_at": "'-infinity'"},
                {"leased_at": "'infinity'"},
                {"leased_at": "'-infinity'"},
                {"lease_expires_at": "'infinity'"},
                {"lease_expires_at": "'-infinity'"},
            ],
        ),
        (
            "23502",
            [
                {name: "null"}
                for name in (
                    "job_id",
                    "available_at",
                    "attempt",
                    "max_attempts",
                    "queue",
                )
            ],
        ),
    ],
)
def test_live_job_refuses_a_row_that_would_stop_its_queue(
    insert, owner, sqlstate, rows
):
    for changes in rows:
        with owner.refusing(sqlstate):
            insert("live_job", **changes)

    assert owner.value("select count(*) from live_job") == 0


def test_live_job_refuses_to_become_unsound(insert, owner):
    insert("live_job")

    for change in (
        "available_at = 'infinity'",
        "lease_expires_at = 'infinity'",
    ):
        with owner.refusing("23514"):
            owner.execute(f"update live_job set {change}")


def test_live_job_holds_a_job_once(insert, owner):
    one = {"job_id": "'00000000-0000-7000-8000-000000000000'"}
    insert("live_job", **one)

    with owner.refusing("23505"):
        insert("live_job", **one)


def test_job_refuses_a_row_that_enqueue_would_not_write(insert, owner):
    for changes in (
        {"available_at": "'infinity'"},
        {"available_at": "'-infinity'"},
        {"max_attempts": "0"},
        {"max_attempts": "101"},
        {"payload": "'[]'"},
        {"payload": "'null'"},
        {"payload": "'1'"},
    ):
        with owner.refusing("23514"):
            insert("job", **changes)
    for name in set(JOB) - {"available_at"}:
        with owner.refusing("23502"):
            insert("job", **{name: "null"})

    assert owner.value("select count(*) from job") == 0


def test_job_holds_a_key_once_a_producer(insert, owner):
    insert("job", idempotency_key="'k'")
    insert("job", idempotency_key="'k'", producer="'organization'")

    with owner.refusing("23505"):
        insert("job", idempotency_key="'k'")


@pytest.mark.parametrize("outcome", ["succeeded", "retried", "failed", "lease_expired"])
def test_attempt_takes_the_known_outcomes(insert, owner, outcome):
    insert("attempt", outcome=f"'{outcome}'")

    assert owner.value("select outcome from attempt") == outcome


def test_attempt_refuses_a_row_that_is_not_evidence(insert, owner):
    for changes in (
        {"outcome": "'completed'"},
        {"outcome": "''"},
    ):
        with owner.refusing("23514"):
            insert("attempt", **changes)
    for name in set(ATTEMPT) - {"retry_at", "retryable", "failure_code"}:
        with owner.refusing("23502"):
            insert("attempt", **{name: "null"})


def test_attempt_holds_each_attempt_of_a_job_once(insert, owner):
    one = {"job_id": "'00000000-0000-7000-8000-000000000000'"}
    insert("attempt", **one)
    insert("attempt", **one, attempt="2")

    with owner.refusing("23505"):
        insert("attempt", **one)


def test_instance_holds_one_row(owner):
    for is_only, sqlstate in ((True, "23505"), (False, "23514")):
        with owner.refusing(sqlstate):
            owner.execute(
                "insert into instance (is_only, lease_seconds, retry_base_seconds,"
                " retry_max_seconds) values (%s, 1, 1, 1)",
                (is_only,),
            )


def test_instance_refuses_a_policy_out_of_bounds(owner):
    for change in (
        "lease_seconds = 0",
        "lease_seconds = 3601",
        "retry_base_seconds = 0",
        "retry_base_seconds = 86401, retry_max_seconds = 86401",
        "retry_max_seconds = 0",
        "retry_max_seconds = 86401",
        "retry_base_seconds = 10, retry_max_seconds = 9",
        "retry_jitter = -0.1",
        "retry_jitter = 1.1",
        "retry_jitter = 'NaN'",
        "retention_seconds = 0",
        "retention_seconds = 3155760001",
    ):
        with owner.refusing("23514"):
            owner.execute(f"update instance set {change}")


def test_instance_takes_a_policy_at_its_bounds(owner):
    for change in (
        "lease_seconds = 1, retry_base_seconds = 1, retry_max_seconds = 1",
        "lease_seconds = 3600, retry_base_seconds = 86400, retry_max_seconds = 86400",
        "retry_jitter = 0, retention_seconds = 1",
        "retry_jitter = 1, retention_seconds = 3155760000",
        "retention_seconds = null",
    ):
        owner.execute(f"update instance set {change}")


def test_job_takes_as_many_attempts_as_may_be_asked(insert):
    insert("job", max_attempts="1")
    insert("job", max_attempts="100")


def test_names_at_their_shortest_and_longest_are_accepted(owner):
    for name in ("q", "q" * 128):
        owner.execute("insert into queue values (%s)", (name,))
    for name in ("c", "c" * 63, "é" * 31):
        owner.execute("insert into caller values (%s, true, false, false)", (name,))


def test_declarations_are_published_under_any_search_path(owner):
    owner.execute("set search_path = pg_catalog")

    owner.execute("insert into jobs_email.queue values ('late')")

    assert owner.value("select 'late' = any (queues) from jobs_email.instance")


def test_queue_refuses_a_name_that_is_not_plain(owner):
    for name in ("", "a b", "q" * 129, "a\n", "é"):
        with owner.refusing("23514"):
            owner.execute("insert into queue values (%s)", (name,))


def test_caller_refuses_a_name_that_is_not_a_role_name(owner):
    for name in (
        "",
        "none",
        "public",
        "PUBLIC",
        "pg_monitor",
        "PG_x",
        "c" * 64,
        "é" * 32,
    ):
        with owner.refusing("23514"):
            owner.execute("insert into caller values (%s, true, true, true)", (name,))
    with owner.refusing("23514"):
        owner.execute("insert into caller values ('idle', false, false, false)")


def test_live_job_has_one_index_besides_its_key(owner):
    indexes = owner.rows(
        "select pg_get_indexdef(indexrelid) from pg_index"
        " where indrelid = 'live_job'::regclass and not indisprimary"
    )

    assert len(indexes) == 1
    assert indexes[0][0].endswith(
        "(queue, available_at, job_id) WHERE (queue IS NOT NULL)"
    )


# Besides what the types of columns say; the others must be known.
MAY_BE_NULL = {
    "instance": {"retention_seconds"},
    "queue": {"floor", "paused_at", "paused_by"},
    "job": {"available_at"},
    "live_job": {*UNLEASED, "last_failure_code", "payload_bytes", "holder"},
    "attempt": {"retry_at", "retryable", "failure_code", "holder"},
    "operator_act": {"login"},
    "installed_digest": {"digest", "fingerprint"},
}
KEYS = {
    "instance": "is_only",
    "queue": "queue",
    "caller": "caller",
    "job": "job_id",
    "live_job": "job_id",
    "attempt": "job_id, attempt",
    "operator_act": "operator_act_id",
    "installed_digest": "is_only",
}


def test_every_column_is_known_but_those_that_say_something_by_null(owner):
    nullable = owner.rows(
        "select c.relname, a.attname from pg_attribute as a"
        " join pg_class as c on c.oid = a.attrelid"
        " where c.relnamespace = 'jobs_email'::regnamespace and c.relkind = 'r'"
        " and a.attnum > 0 and not a.attnotnull and c.relname !~ 'yoyo'"
    )

    assert sorted(nullable) == sorted(
        (table, column) for table, columns in MAY_BE_NULL.items() for column in columns
    )


def test_every_table_has_its_key(owner):
    keys = owner.rows(
        "select c.relname, pg_get_constraintdef(k.oid) from pg_constraint as k"
        " join pg_class as c on c.oid = k.conrelid"
        " where k.connamespace = 'jobs_email'::regnamespace and k.contype = 'p'"
        " and c.relname !~ 'yoyo'"
    )

    assert dict(keys) == {
        table: f"PRIMARY KEY ({columns})" for table, columns in KEYS.items()
    }


def test_acts_and_policy_are_dated_by_the_moment_they_are_written(owner, configure):
    with owner.transaction():
        configure(lease_seconds=7)

        assert owner.value(
            "select configured_at > now() and max(acted_at) > now()"
            " from instance, operator_act group by configured_at"
        )


def test_every_column_of_text_is_compared_by_its_bytes(owner):
    assert (
        owner.rows(
            "select c.relname, a.attname from pg_attribute as a"
            " join pg_class as c on c.oid = a.attrelid"
            " join pg_collation as l on l.oid = a.attcollation"
            " where c.relnamespace = 'jobs_email'::regnamespace and c.relkind = 'r'"
            " and a.attnum > 0 and l.collname <> 'C' and c.relname in"
            " ('job', 'live_job', 'attempt', 'queue', 'caller', 'operator_act')"
        )
        == []
    )


def test_every_table_and_its_every_index_is_valid_and_commented(owner):
    assert (
        owner.rows(
            "select c.relname from pg_class as c"
            " where c.relnamespace = 'jobs_email'::regnamespace"
            " and c.relkind in ('r', 'v') and c.relname !~ 'yoyo'"
            " and obj_description(c.oid, 'pg_class') is null"
        )
        == []
    )
    assert (
        owner.rows(
            "select i.indexrelid::regclass from pg_index as i"
            " join pg_class as c on c.oid = i.indexrelid"
            " where c.relnamespace = 'jobs_email'::regnamespace and not i.indisvalid"
        )
        == []
    )
