import json
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

INTENT = {
    "queue": "email",
    "kind": "send",
    "payload": '{"to": "hush-payload"}',
    "key": "hush-key",
    "available_at": None,
    "max_attempts": 3,
}
OTHER_INTENTS = {
    "another queue": {"queue": "slow"},
    "another kind": {"kind": "send/again"},
    "another payload": {"payload": '{"to": "other"}'},
    "a member more": {"payload": '{"to": "hush-payload", "cc": null}'},
    "a scheduled time": {"available_at": "2040-01-01T00:00:00Z"},
    "more attempts": {"max_attempts": 4},
}
# A far digit: a number of a few bytes that takes a megabyte of text.
HUGE = "1e131071"


@pytest.fixture
def ask():
    """Enqueue INTENT with changes through a session and return the row."""

    def ask(session, **changes):
        return session.row(
            "select * from enqueue(%s, %s, %s::jsonb, %s,"
            " %s::timestamptz, %s::integer)",
            *(INTENT | changes).values(),
        )

    return ask


@pytest.fixture
def reach(claim, expire, worker):
    """Bring the one job to a state."""

    def reach(state, job_id):
        if state == "queued":
            return
        claimed, token = claim()
        assert claimed == job_id
        if state == "expired":
            expire(job_id)
        elif state == "retrying":
            worker.execute("select fail(%s, %s, 'timeout', true)", (job_id, token))
        elif state == "succeeded":
            worker.execute("select complete(%s, %s)", (job_id, token))
        elif state == "failed":
            worker.execute("select fail(%s, %s, 'refused', false)", (job_id, token))

    return reach


STATES = ("queued", "running", "expired", "retrying", "succeeded", "failed")


def test_enqueue_makes_one_job_and_says_that_it_created_it(producer, owner, ask):
    answer = ask(producer, max_attempts=7)

    job = owner.row("select * from job")
    live = owner.row("select * from live_job")
    assert answer == {"job_id": job["job_id"], "created": True}
    assert job["producer"] == "accounts"
    assert job["queue"] == "email"
    assert job["kind"] == "send"
    assert job["payload"] == {"to": "hush-payload"}
    assert job["idempotency_key"] == "hush-key"
    assert job["available_at"] is None
    assert job["max_attempts"] == 7
    assert live["job_id"] == job["job_id"]
    assert live["queue"] == "email"
    assert live["available_at"] == job["created_at"]
    assert live["attempt"] == 0
    assert live["max_attempts"] == 7
    assert live["lease_owner"] is None


def test_enqueue_leaves_out_schedule_and_attempts_by_default(producer, owner):
    producer.execute("select enqueue('email', 'send', '{}', 'k')")

    job = owner.row("select available_at, max_attempts from job")
    assert job == {"available_at": None, "max_attempts": 3}


def test_enqueue_takes_arguments_by_name(producer, owner):
    producer.execute(
        "select enqueue(p_max_attempts => 2, p_idempotency_key =>"
        " 'k', p_kind => 'send',"
        " p_payload => '{}', p_queue => 'slow',"
        " p_available_at => '2040-01-01 00:00:00+00')"
    )

    job = owner.row("select queue, max_attempts, available_at from job")
    assert job == {
        "queue": "slow",
        "max_attempts": 2,
        "available_at": datetime(2040, 1, 1, tzinfo=UTC),
    }


def test_enqueue_rolls_back_with_the_callers_transaction(producer, ask, state):
    before = state()

    with producer.transaction(force_rollback=True):
        ask(producer)

    assert state() == before
    assert ask(producer)["created"]


def test_enqueue_stores_the_payload_as_it_came(producer, owner, ask):
    payload = {
        "ä": [1, 2.50, -0.0, True, None, {"x": []}],
        "backslash": "\\u0000 is six characters",
        "big": 2**70 + 1,
    }

    ask(producer, payload=json.dumps(payload))

    assert owner.value("select payload from job") == payload


def test_a_large_payload_is_stored_by_lz4_where_the_server_has_it(producer, owner, ask):
    has_lz4 = owner.value(
        "select 'lz4' = any (enumvals) from pg_settings"
        " where name = 'default_toast_compression'"
    )
    payload = json.dumps({"text": "the same words again and again " * 1000})

    ask(producer, payload=payload)

    stored, size, text = owner.rows(
        "select pg_column_compression(payload), pg_column_size(payload), payload::text"
        " from job"
    )[0]
    assert stored == ("lz4" if has_lz4 else "pglz")
    assert size < 1000
    assert json.loads(text) == json.loads(payload)


def test_enqueue_lets_the_last_of_duplicate_members_win(producer, owner, ask):
    ask(producer, payload='{"a": 1, "a": 2}')

    assert owner.value("select payload from job") == {"a": 2}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        (
            "queue",
            [
                None,
                "",
                "a" * 129,
                "nowhere",
                "Email",
                "email ",
                " email",
                "email\n",
                "e mail",
            ],
        ),
        (
            "kind",
            [
                None,
                "",
                "k" * 257,
                "a b",
                "a\n",
                "a\tb",
                "é",
                "a\\b",
                "a%b",
                "a,b",
            ],
        ),
        (
            "idempotency_key",
            [
                None,
                "",
                "h" * 257,
                "hush key",
                "hush\n",
                "hush@key",
                "hush;",
            ],
        ),
        (
            "max_attempts",
            [
                None,
                0,
                -1,
                101,
                2147483647,
            ],
        ),
        (
            "available_at",
            [
                "infinity",
                "-infinity",
                "10000-01-01 00:00:00+00",
                "20000-01-01 00:00:00+00",
                "294276-12-31 23:59:59+00",
                "0001-12-31 00:00:00+00 BC",
            ],
        ),
        (
            "payload",
            [
                None,
                "null",
                "[]",
                '[{"a": "hush"}]',
                '"hush"',
                "1",
                "true",
                '{"hush": 1.1e308}',
                '{"hush": -1.1e308}',
                '{"hush": [[{"deep": 1e309}]]}',
                '{"hush": 1e131071}',
            ],
        ),
    ],
)
def test_enqueue_refuses_an_argument_out_of_bounds_by_its_name_and_writes_nothing(
    producer, ask, state, field, values
):
    before = state()
    argument = "key" if field == "idempotency_key" else field

    for value in values:
        with producer.refusing("LJ001") as caught:
            ask(producer, **{argument: value})
        assert field in caught.value.diag.message_primary, value

    assert state() == before


def test_enqueue_accepts_an_argument_at_its_bound(producer, ask):
    for field, value in [
        ("queue", "slow"),
        ("kind", "k"),
        ("kind", "k" * 256),
        ("kind", "AZaz09._:/-"),
        ("key", "k"),
        ("key", "k" * 256),
        ("key", "AZaz09._:/-"),
        ("key", "-"),
        ("max_attempts", 1),
        ("max_attempts", 100),
        ("available_at", "9999-12-31 23:59:59.999999+00"),
        ("available_at", "1970-01-01 00:00:00+00"),
        ("payload", "{}"),
        ("payload", '{"a": 1e308, "b": -1e308, "c": 1e-16383, "d": -1e-324, "e": 0}'),
    ]:
        changes = {"key": f"{field}-{str(value)[:9]}".encode().hex(), field: value}
        assert ask(producer, **changes)["created"], (field, value)


def test_enqueue_accepts_a_declared_queue_of_128_characters(producer, owner, ask):
    name = "AZaz09._:/-".ljust(128, "q")
    owner.execute("insert into queue values (%s)", (name,))

    assert ask(producer, queue=name)["created"]


def test_enqueue_blames_the_wrong_argument_and_no_name_at_its_limit(
    producer, owner, ask
):
    queue, name = "q" * 128, "k" * 256
    owner.execute("insert into queue values (%s)", (queue,))

    for blamed, changes in (
        ("queue", {"queue": "q" * 129}),
        ("kind", {"queue": queue, "kind": "no kind"}),
        ("idempotency_key", {"kind": name, "key": "no key"}),
        ("max_attempts", {"queue": queue, "max_attempts": 0}),
        ("max_attempts", {"kind": name, "max_attempts": 0}),
        ("max_attempts", {"key": name, "max_attempts": 0}),
    ):
        with producer.refusing("LJ001") as caught:
            ask(producer, **changes)
        assert caught.value.diag.message_primary.startswith(f"{blamed} must be ")


def test_enqueue_accepts_262144_bytes_of_payload_and_no_more(producer, ask):
    for key, fill in (("one", "x"), ("two", "é"), ("six", "\\u0007")):
        width = len(fill.encode())
        room = 262144 - len('{"a": ""}')
        text = fill * (room // width) + "x" * (room % width)

        assert ask(producer, payload=f'{{"a": "{text}"}}', key=key)["created"], fill
        with producer.refusing("LJ001") as caught:
            ask(producer, payload=f'{{"a": "{text}y"}}', key="over")

        assert "payload" in caught.value.diag.message_primary
        assert "262144" in caught.value.diag.message_primary


@pytest.mark.slow
def test_enqueue_accepts_262144_bytes_of_the_smallest_items(producer, ask):
    for item in ("0", "[]", "{}", "null", '""', "[0]", '{"": 0}'):
        count = (262144 - len('{"a": []}') + 2) // (len(item) + 2)
        payload = '{"a": [' + ", ".join([item] * count) + "]}"
        assert len(payload) > 262144 - len(item) - 2

        assert ask(producer, payload=payload, key=item.encode().hex())["created"], item


def test_enqueue_measures_the_payload_as_jsonb_writes_it(producer, ask):
    blanks = " " * 300000

    assert ask(producer, payload='{"a":' + blanks + "1}")["created"]


@pytest.mark.parametrize(
    "number",
    [
        "1e131071",
        "1e309",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("-1e131071", "1e-16383", "0e-16383")
        ),
    ],
)
def test_enqueue_refuses_a_digit_bomb_without_writing_it_out(
    producer, ask, state, number
):
    before = state()
    bomb = '{"hush": [' + ",".join([number] * 75000) + "]}"

    with producer.refusing("LJ001") as caught:
        ask(producer, payload=bomb)

    assert "payload" in caught.value.diag.message_primary
    assert state() == before


def test_enqueue_refuses_few_numbers_whose_text_is_too_long(producer, ask):
    payload = '{"hush": [' + ",".join(["1e-16383"] * 16) + "]}"

    with producer.refusing("LJ001") as caught:
        ask(producer, payload=payload)

    assert "262144 bytes" in caught.value.diag.message_primary


@pytest.mark.slow
def test_enqueue_refuses_a_bomb_of_decimal_places(producer, state):
    before = state()

    with producer.refusing("LJ001") as caught:
        producer.execute(
            "with recursive doubled (n, items) as ("
            " select 0, jsonb_build_array(round(1::numeric, 16383))"
            " union all select n + 1, items || items from doubled where n < 16)"
            " select enqueue('email', 'send', jsonb_build_object('hush', items), 'k')"
            " from doubled where n = 16"
        )

    assert "payload" in caught.value.diag.message_primary
    assert state() == before


@pytest.mark.slow
def test_enqueue_refuses_a_vast_document_without_writing_it_out(producer, state):
    before = state()

    with producer.refusing("LJ001") as caught:
        producer.execute(
            "with recursive doubled (n, items) as ("
            " select 0, jsonb_build_array(1e308::numeric)"
            " union all select n + 1, items || items from doubled where n < 22)"
            " select enqueue('email', 'send', jsonb_build_object('hush', items), 'k')"
            " from doubled where n = 22"
        )

    assert "payload" in caught.value.diag.message_primary
    assert state() == before


def test_enqueue_refuses_a_digit_bomb_that_comes_compressed(producer, state):
    before = state()
    producer.execute("create temporary table bomb (payload jsonb)")
    producer.execute(
        "insert into bomb values"
        f" (('{{\"hush\": [' || repeat('{HUGE},', 20000) || '0]}}')::jsonb)"
    )
    assert producer.value("select pg_column_size(payload) from bomb") < 8192

    with producer.refusing("LJ001") as caught:
        producer.execute("select enqueue('email', 'send', payload, 'k') from bomb")

    assert "payload" in caught.value.diag.message_primary
    assert state() == before


def test_enqueue_refuses_a_long_text_that_comes_compressed(producer, state):
    before = state()
    producer.execute("create temporary table bomb (payload jsonb)")
    producer.execute(
        "insert into bomb select jsonb_build_object('hush', repeat('x', 5000000))"
    )

    with producer.refusing("LJ001"):
        producer.execute("select enqueue('email', 'send', payload, 'k') from bomb")

    assert state() == before


def test_enqueue_accepts_a_payload_out_of_a_table_of_the_callers_own(producer, owner):
    producer.execute("create temporary table letter (payload jsonb)")
    producer.execute(
        "insert into letter select jsonb_build_object('a', repeat('x', 200000))"
    )

    producer.execute("select enqueue('email', 'send', payload, 'k') from letter")

    assert owner.value("select length(payload ->> 'a') from job") == 200000


def test_enqueue_accepts_128_levels_of_nesting_and_no_more(producer, ask):
    for key, opening, closing in (("objects", '{"a":', "}"), ("arrays", "[", "]")):
        just = '{"a":' + opening * 127 + "0" + closing * 127 + "}"
        over = '{"a":' + opening * 128 + "0" + closing * 128 + "}"

        assert ask(producer, payload=just, key=key)["created"], key
        with producer.refusing("LJ001") as caught:
            ask(producer, payload=over, key="over")

        assert "payload" in caught.value.diag.message_primary


def test_enqueue_refuses_deep_nesting_however_deep(producer, ask):
    for levels in (130, 1000, 5000):
        with producer.refusing("LJ001"):
            ask(producer, payload='{"a":' + "[" * levels + "]" * levels + "}")


def test_enqueue_refuses_the_caller_before_it_looks_at_an_argument(
    owner, connect, prefix, state
):
    before = state()
    heir = f"{prefix}_heir"
    owner.execute(f'create role "{heir}" login')
    owner.execute(f'grant "{prefix}_producer" to "{heir}"')
    try:
        for session in (owner, connect(heir)):
            for arguments in (
                "'email', 'send', '{}', 'k'",
                "null, null, null, null, null, null",
                "'nowhere', 'a b', '[]', '', 'infinity', 0",
            ):
                with session.refusing("42501") as caught:
                    session.execute(f"select enqueue({arguments})")
                assert "SET ROLE" in caught.value.diag.message_hint
    finally:
        owner.execute(f'revoke "{prefix}_producer" from "{heir}"')
        owner.execute(f'drop role "{heir}"')

    assert state() == before


def test_enqueue_refuses_a_declared_worker_that_is_not_a_producer(
    owner, ask, prefix, state
):
    before = state()

    with owner.refusing("42501"), owner.transaction():
        owner.execute('set local role "email-worker"')
        ask(owner)

    with owner.refusing("42501"), owner.transaction():
        owner.execute(f'grant "{prefix}_producer" to "email-worker"')
        owner.execute('set local role "email-worker"')
        ask(owner)

    assert state() == before


def test_enqueue_refuses_an_argument_before_a_conflict(producer, ask):
    ask(producer)

    with producer.refusing("LJ001"):
        ask(producer, payload="[]")


@pytest.mark.parametrize("state_name", STATES)
def test_enqueue_repeated_returns_the_first_job_in_every_state(
    producer, ask, reach, state, state_name
):
    first = ask(producer)
    reach(state_name, first["job_id"])
    before = state()

    second = ask(producer)

    assert second == {"job_id": first["job_id"], "created": False}
    assert state() == before


@pytest.mark.parametrize("state_name", STATES)
def test_enqueue_refuses_every_other_intent_under_a_key_in_every_state(
    producer, ask, reach, state, state_name
):
    reach(state_name, ask(producer)["job_id"])
    before = state()

    for change in OTHER_INTENTS.values():
        with producer.refusing("LJ002") as caught:
            ask(producer, **change)
        assert "idempotency_key" in caught.value.diag.message_primary

    assert state() == before


def test_enqueue_takes_equal_payloads_for_the_same_intent(producer, ask):
    for first, second in [
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 1.50}', '{"a": 15e-1}'),
        ('{"a": -0}', '{"a": 0}'),
        ('{"a": 1, "b": {"c": 2, "d": 3}}', '{"b": {"d": 3, "c": 2}, "a": 1}'),
        ('{"a": [1, 2]}', ' { "a" : [ 1,2 ] } '),
        ('{"a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": "é"}', '{"a": "\\u00e9"}'),
    ]:
        job_id = ask(producer, payload=first, key=first.encode().hex())["job_id"]

        answer = ask(producer, payload=second, key=first.encode().hex())

        assert answer == {"job_id": job_id, "created": False}, second


def test_enqueue_takes_different_payloads_for_a_conflict(producer, ask):
    for first, second in [
        ('{"a": 1.5}', '{"a": 2}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": {"b": 1}}', '{"a": {"b": 1, "c": null}}'),
        ('{"a": null}', "{}"),
        ('{"a": "x"}', '{"a": "X"}'),
    ]:
        ask(producer, payload=first, key=first.encode().hex())

        with producer.refusing("LJ002"):
            ask(producer, payload=second, key=first.encode().hex())


def test_enqueue_compares_the_schedule_as_asked(producer, ask):
    past = "2001-01-01T00:00:00Z"
    first = ask(producer, available_at=past)

    assert not ask(producer, available_at=past)["created"]
    assert (
        ask(producer, available_at="2001-01-01T01:00:00+01")["job_id"]
        == (first["job_id"])
    )
    for other in (None, "2001-01-01T00:00:01Z"):
        with producer.refusing("LJ002"):
            ask(producer, available_at=other)


def test_enqueue_does_not_run_fields_together(producer, ask):
    first = ask(producer, kind="ab", key="c")
    second = ask(producer, kind="a", key="bc")
    third = ask(producer, kind="a", key="b:c")

    assert len({first["job_id"], second["job_id"], third["job_id"]}) == 3


@pytest.mark.parametrize("attempts", [1, 100])
def test_enqueue_accepts_bounds_beside_a_payload_that_is_examined_in_full(
    producer, configure, ask, attempts
):
    configure(queues=["email", "slow", "q" * 128])

    answer = ask(
        producer,
        queue="q" * 128,
        max_attempts=attempts,
        payload=json.dumps({"letter": "x" * 1000}),
    )

    assert answer["created"]


def test_enqueue_repeated_finds_each_key_among_others(producer, ask):
    keys = ("first", "second", "third")
    jobs = [ask(producer, key=key)["job_id"] for key in keys]

    assert [ask(producer, key=key)["job_id"] for key in keys] == jobs


def test_enqueue_keeps_the_keys_of_producers_apart(
    producer, other_producer, owner, ask
):
    mine = ask(producer)
    yours = ask(other_producer, payload='{"other": true}')

    assert mine["created"]
    assert yours["created"]
    assert ask(other_producer, payload='{"other": true}')["job_id"] == yours["job_id"]
    assert ask(producer)["job_id"] == mine["job_id"]
    assert owner.rows("select producer from job order by 1") == [
        ("accounts",),
        ("organization",),
    ]


def test_enqueue_acts_for_the_role_that_set_role_put_in_force(owner, ask):
    owner.execute("set role accounts")
    first = ask(owner)
    owner.execute("set role organization")
    second = ask(owner)
    owner.execute("reset role")

    assert second["created"]
    assert owner.rows("select job_id, producer from job order by producer") == [
        (first["job_id"], "accounts"),
        (second["job_id"], "organization"),
    ]


def test_enqueue_sees_key_case_as_difference(producer, ask):
    assert ask(producer, key="k")["created"]
    assert ask(producer, key="K", payload="{}")["created"]


def test_enqueue_shows_neither_payload_nor_key_in_a_refusal(producer, ask):
    ask(producer)

    for change in (
        *OTHER_INTENTS.values(),
        {"payload": '["hush"]'},
        {"payload": '{"hush": 1e309}'},
        {"kind": "hush kind"},
        {"key": "hush hush"},
    ):
        with pytest.raises(producer.Error) as caught:
            ask(producer, **change)
        diagnosis = caught.value.diag
        for part in (
            diagnosis.message_primary,
            diagnosis.message_detail,
            diagnosis.message_hint,
            diagnosis.context,
        ):
            assert "hush" not in (part or ""), change


def test_enqueue_makes_uuids_of_version_7_that_tell_the_time(producer, owner, ask):
    before = owner.value("select clock_timestamp()")
    job_id = ask(producer)["job_id"]
    after = owner.value("select clock_timestamp()")

    assert job_id.version == 7
    assert job_id.variant == "specified in RFC 4122"
    made_at = datetime.fromtimestamp((job_id.int >> 80) / 1000, UTC)
    assert before - timedelta(milliseconds=1) <= made_at <= after
    created_at = owner.value("select created_at from job")
    assert made_at <= created_at < made_at + timedelta(milliseconds=1)


def test_enqueue_makes_ids_that_sort_in_order_of_enqueueing(producer, enqueue):
    with producer.transaction():
        job_ids = [enqueue() for _ in range(100)]

    assert job_ids == sorted(job_ids)
    assert len(set(job_ids)) == 100


def test_enqueue_makes_ids_that_cannot_be_guessed(enqueue):
    tails = {enqueue().int & (1 << 62) - 1 for _ in range(20)}

    assert len(tails) == 20


def test_enqueue_takes_a_time_that_has_passed_for_now(producer, owner, ask):
    ask(producer, available_at="2001-01-01T00:00:00Z")

    assert owner.value(
        "select l.available_at = j.created_at from live_job as l join job as j"
        " using (job_id)"
    )
    assert owner.value("select available_at from job") == datetime(
        2001, 1, 1, tzinfo=UTC
    )


def test_enqueue_keeps_a_time_to_come(producer, worker, owner, ask):
    ask(producer, available_at="2040-01-01T00:00:00Z")

    assert owner.value("select available_at from live_job") == (
        datetime(2040, 1, 1, tzinfo=UTC)
    )
    assert worker.rows("select * from claim('email')") == []


def test_enqueue_reads_the_clock_and_not_the_transactions_start(producer, owner, ask):
    with producer.transaction():
        producer.execute("select 1")
        passed = owner.value("select clock_timestamp()")
        ask(producer)

    assert owner.value("select created_at from job") > passed
    assert owner.value("select available_at from live_job") > passed


def test_enqueue_reads_the_clock_and_not_the_statements_start(producer, owner):
    started = producer.value(
        "select statement_timestamp()"
        " from (select 1 + length(pg_sleep(0.05)::text) as one offset 0) as s,"
        " lateral enqueue('email', 'send', '{}', 'k', null, s.one) as e"
    )

    passed = started + timedelta(milliseconds=50)
    assert owner.value("select created_at from job") >= passed
    assert owner.value("select available_at from live_job") >= passed


def test_enqueue_updates_or_locks_no_job_that_exists(producer, owner, ask):
    ask(producer)
    versions = "select xmin::text, xmax::text from job union all"
    versions += " select xmin::text, xmax::text from live_job"
    before = owner.rows(versions)

    ask(producer)
    with producer.refusing("LJ002"):
        ask(producer, kind="other")

    assert owner.rows(versions) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        "set timezone to 'Pacific/Kiritimati'",
        "set datestyle to 'German, DMY'",
        "set datestyle to 'Postgres, MDY'",
        "set datestyle to 'SQL, YMD'",
        "set intervalstyle to 'sql_standard'",
        "set standard_conforming_strings to off; set escape_string_warning to off",
        "set bytea_output to 'escape'",
        "set extra_float_digits to -15",
        "set plan_cache_mode to force_custom_plan",
        "set default_transaction_isolation to 'serializable'",
        "set default_transaction_isolation to 'repeatable read'",
        "set transform_null_equals to on",
        "set array_nulls to off",
        "set xmloption to document",
        "set search_path to pg_temp, jobs_email",
    ],
)
def test_enqueue_judges_the_same_under_any_setting_of_the_session(
    producer, owner, ask, settings
):
    producer.execute(settings)

    first = ask(producer, available_at="2040-02-03T00:00:00Z")
    again = ask(producer, available_at="2040-02-03T00:00:00Z")

    assert first["created"]
    assert again == {"job_id": first["job_id"], "created": False}
    assert first["job_id"].version == 7
    assert owner.value("select available_at from live_job") == (
        datetime(2040, 2, 3, tzinfo=UTC)
    )
    for change in (
        {"kind": "a b"},
        {"kind": "a\\b"},
        {"kind": "a\n"},
        {"available_at": "infinity"},
        {"payload": '{"a": 1e309}'},
    ):
        with producer.refusing("LJ001"):
            ask(producer, **change)
    assert ask(producer, key="AZaz09._:/-")["created"]
    assert ask(producer, key="ends", available_at="9999-12-31T23:59:59Z")["created"]


def test_enqueue_makes_a_separate_job_for_every_key(producer, ask):
    job_ids = {ask(producer, key=f"key-{uuid4()}")["job_id"] for _ in range(10)}

    assert len(job_ids) == 10


def test_repetitions_use_up_no_number(owner, enqueue):
    numbers = (
        "select data_type::text, last_value from pg_sequences order by sequencename"
    )
    before = owner.rows(numbers)

    for _ in range(3):
        enqueue(key="same")

    assert owner.rows(numbers) == before
    assert {kind for kind, _ in before} == {"bigint"}
