import json
from datetime import UTC, datetime, timedelta

import pytest

MANY = "select * from enqueue_many(%s::jsonb)"
JOB = {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": "hush-key"}


@pytest.fixture
def offer(producer):
    """Enqueue items, each JOB with changes. Return ``(position, job_id, outcome)``."""

    def offer(*changes, session=None):
        items = [
            {
                k: v
                for k, v in (JOB | {"idempotency_key": f"key-{n}"} | change).items()
                if v is not ...
            }
            for n, change in enumerate(changes, 1)
        ]
        return (session or producer).rows(MANY, json.dumps(items))

    return offer


@pytest.fixture
def outcomes(offer):
    def outcomes(*changes):
        return [outcome for _, _, outcome in offer(*changes)]

    return outcomes


def test_enqueue_many_makes_every_job_and_returns_in_input_order(offer, owner):
    answers = offer(
        {"idempotency_key": "z", "max_attempts": 9},
        {"idempotency_key": "a", "queue": "slow", "payload": {"n": 2}},
        {"idempotency_key": "m", "available_at": "2040-01-01T00:00:00Z"},
    )

    assert [(position, outcome) for position, _, outcome in answers] == [
        (1, "created"),
        (2, "created"),
        (3, "created"),
    ]
    jobs = owner.rows(
        "select job_id, idempotency_key, queue, payload, available_at, max_attempts,"
        " producer, kind from job order by job_id"
    )
    later = datetime(2040, 1, 1, tzinfo=UTC)
    assert jobs == [
        (answers[0][1], "z", "email", {}, None, 9, "accounts", "send"),
        (answers[1][1], "a", "slow", {"n": 2}, None, 3, "accounts", "send"),
        (answers[2][1], "m", "email", {}, later, 3, "accounts", "send"),
    ]
    assert owner.rows(
        "select l.job_id, l.queue, l.attempt, l.max_attempts,"
        " l.available_at = coalesce(j.available_at, j.created_at)"
        " from live_job as l join job as j using (job_id) order by 1"
    ) == [
        (answers[0][1], "email", 0, 9, True),
        (answers[1][1], "slow", 0, 3, True),
        (answers[2][1], "email", 0, 3, True),
    ]


def test_enqueue_many_accepts_1_and_1000_items(offer, owner):
    assert len(offer({})) == 1

    answers = offer(*({"idempotency_key": f"of-{n}"} for n in range(1000)))

    assert [position for position, _, _ in answers] == list(range(1, 1001))
    assert {outcome for _, _, outcome in answers} == {"created"}
    assert owner.value("select count(*) from live_job") == 1001


@pytest.mark.parametrize("count", [0, 1001])
def test_enqueue_many_refuses_0_and_1001_items(producer, state, count):
    before = state()
    items = json.dumps([JOB | {"idempotency_key": f"k{n}"} for n in range(count)])

    with producer.refusing("LJ007") as caught:
        producer.rows(MANY, items)

    assert "jobs" in caught.value.diag.message_primary
    assert state() == before


def test_enqueue_many_refuses_a_value_that_is_not_an_array(producer, state):
    before = state()

    for document in (None, "null", "{}", '"x"', "1", json.dumps(JOB)):
        with producer.refusing("LJ001") as caught:
            producer.rows(MANY, document)
        assert "jobs" in caught.value.diag.message_primary

    assert state() == before


def test_enqueue_many_refuses_the_caller_before_it_looks_at_an_argument(owner, state):
    before = state()

    for document in (None, "[]", "{}", "[1]", json.dumps([JOB])):
        with owner.refusing("42501") as caught:
            owner.rows(MANY, document)
        assert "SET ROLE" in caught.value.diag.message_hint

    assert state() == before


def test_enqueue_many_returns_invalid_job_for_a_bad_item_and_spoils_no_other(
    offer, owner
):
    bad = [
        {"queue": ...},
        {"queue": None},
        {"queue": ""},
        {"queue": 1},
        {"queue": ["email"]},
        {"queue": {"email": 1}},
        {"queue": True},
        {"queue": "nowhere"},
        {"queue": "e mail"},
        {"queue": "email\n"},
        {"queue": "q" * 129},
        {"kind": ...},
        {"kind": None},
        {"kind": ""},
        {"kind": 1},
        {"kind": ["send"]},
        {"kind": "a b"},
        {"kind": "k" * 257},
        {"idempotency_key": ...},
        {"idempotency_key": None},
        {"idempotency_key": ""},
        {"idempotency_key": 1},
        {"idempotency_key": ["k"]},
        {"idempotency_key": "a b"},
        {"idempotency_key": "k" * 257},
        {"payload": ...},
        {"payload": None},
        {"payload": []},
        {"payload": [{}]},
        {"payload": "{}"},
        {"payload": 1},
        {"payload": False},
        {"payload": {"a": "x" * 262136}},
        {"payload": {"a": 10**309}},
        {"max_attempts": None},
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"max_attempts": 101},
        {"max_attempts": 2.5},
        {"max_attempts": 100.5},
        {"max_attempts": 0.5},
        {"max_attempts": "3"},
        {"max_attempts": ""},
        {"max_attempts": True},
        {"max_attempts": []},
        {"max_attempts": [3]},
        {"max_attempts": {}},
        {"max_attempts": {"3": 3}},
        {"max_attempts": 10**30},
        {"max_attempts": -(10**300)},
        {"available_at": 0},
        {"available_at": 2208988800},
        {"available_at": False},
        {"available_at": []},
        {"available_at": ["2040-01-01T00:00:00Z"]},
        {"available_at": {}},
        {"available_at": ""},
        {"priority": 1},
        {"Queue": "email"},
        {"p_queue": "email"},
        {"": None},
    ]
    changes = [change for each in bad for change in ({}, each)]

    answers = offer(*changes, {})

    assert [position for position, _, _ in answers] == list(range(1, len(answers) + 1))
    assert [
        change
        for change, (_, _, outcome) in zip(bad, answers[1::2], strict=True)
        if outcome != "invalid_job"
    ] == []
    assert {job_id for _, job_id, _ in answers[1::2]} == {None}
    assert {outcome for _, _, outcome in answers[::2]} == {"created"}
    created = [(job_id,) for _, job_id, _ in answers[::2]]
    assert owner.rows("select job_id from job order by 1") == created
    assert owner.rows("select job_id from live_job order by 1") == created


def test_enqueue_many_returns_invalid_job_for_an_item_that_is_not_a_job(producer):
    items = [
        None,
        1,
        "email",
        "queue",
        True,
        [],
        {},
        ["queue", "kind", "payload", "idempotency_key"],
        [JOB],
        [[]],
    ]

    answers = producer.rows(MANY, json.dumps([*items, JOB]))

    outcomes = [outcome for _, _, outcome in answers]
    assert outcomes == ["invalid_job"] * len(items) + ["created"]


def test_enqueue_many_accepts_an_item_at_its_bound(outcomes):
    changes = [
        {"max_attempts": 1},
        {"max_attempts": 100},
        {"available_at": None},
        {"kind": "k" * 256},
        {"idempotency_key": "k" * 256},
        {"payload": {"a": "x" * 262135}},
        {"payload": {"a": 10**308}},
    ]

    assert outcomes(*changes) == ["created"] * len(changes)


def test_enqueue_many_accepts_a_whole_number_of_attempts_however_written(
    producer, owner
):
    items = [json.dumps(JOB | {"idempotency_key": f"k{n}"})[:-1] for n in range(3)]
    written = zip(items, ("3.0", "30e-1", "0.3e1"), strict=True)

    answers = producer.rows(
        MANY, "[" + ",".join(f'{i}, "max_attempts": {n}}}' for i, n in written) + "]"
    )

    assert {outcome for _, _, outcome in answers} == {"created"}
    assert owner.rows("select distinct max_attempts from live_job") == [(3,)]


ACCEPTED = {
    "2040-01-02T03:04:05Z": datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC),
    "2040-01-02t03:04:05z": datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC),
    "2040-01-02T03:04:05+00:00": datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC),
    "2040-01-02T03:04:05-00:00": datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC),
    "2040-01-02T03:04:05+05:45": datetime(2040, 1, 1, 21, 19, 5, tzinfo=UTC),
    "2040-01-02T03:04:05-12:00": datetime(2040, 1, 2, 15, 4, 5, tzinfo=UTC),
    "2040-01-02T03:04:05+14:00": datetime(2040, 1, 1, 13, 4, 5, tzinfo=UTC),
    "2040-01-02T03:04:05.5Z": datetime(2040, 1, 2, 3, 4, 5, 500000, tzinfo=UTC),
    "2040-01-02T03:04:05.000001Z": datetime(2040, 1, 2, 3, 4, 5, 1, tzinfo=UTC),
    "2040-01-02T03:04:05.123456789Z": None,
    "2040-02-29T00:00:00Z": datetime(2040, 2, 29, tzinfo=UTC),
    "2400-02-29T00:00:00Z": datetime(2400, 2, 29, tzinfo=UTC),
    "2040-12-31T23:59:59Z": datetime(2040, 12, 31, 23, 59, 59, tzinfo=UTC),
    "2040-11-10T00:00:00Z": datetime(2040, 11, 10, tzinfo=UTC),
    "9999-12-31T23:59:59.999999Z": None,
    "2001-01-01T00:00:00Z": datetime(2001, 1, 1, tzinfo=UTC),
    "0001-01-01T00:00:00Z": datetime(1, 1, 1, tzinfo=UTC),
    "0031-12-11T00:00:00Z": datetime(31, 12, 11, tzinfo=UTC),
}


@pytest.mark.parametrize("datestyle", ["ISO, MDY", "German, DMY", "SQL, YMD"])
def test_enqueue_many_accepts_rfc_3339_with_an_offset(
    producer, owner, outcomes, datestyle
):
    producer.execute(
        f"set datestyle to '{datestyle}'; set timezone to 'Asia/Kathmandu'"
    )

    made = outcomes(*({"available_at": text} for text in ACCEPTED))

    assert dict(zip(ACCEPTED, made, strict=True)) == dict.fromkeys(ACCEPTED, "created")
    owner.execute("set timezone to 'UTC'")
    asked = [at for (at,) in owner.rows("select available_at from job order by job_id")]
    assert [
        (text, at)
        for (text, instant), at in zip(ACCEPTED.items(), asked, strict=True)
        if instant is not None and instant != at
    ] == []


def test_enqueue_many_refuses_a_time_that_is_not_rfc_3339_with_an_offset(outcomes):
    texts = [
        "2040-01-02T03:04:05",
        "2040-01-02 03:04:05Z",
        "2040-01-02T03:04Z",
        "2040-01-02",
        "2040-01-02T03:04:05+0000",
        "2040-01-02T03:04:05+00",
        "2040-01-02T03:04:05 +00:00",
        "2040-01-02T03:04:05+24:00",
        "2040-01-02T03:04:05+00:60",
        "2040-01-02T03:04:05.Z",
        "2040-01-02T03:04:05,5Z",
        "2040-01-02T24:00:00Z",
        "2040-01-02T03:60:00Z",
        "2040-01-02T03:04:61Z",
        "2040-00-02T03:04:05Z",
        "2040-13-02T03:04:05Z",
        "2040-01-00T03:04:05Z",
        "2040-01-32T03:04:05Z",
        "2040-04-31T03:04:05Z",
        "2040-02-30T03:04:05Z",
        "2041-02-29T03:04:05Z",
        "2100-02-29T03:04:05Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01",
        "9999-12-31T23:59:59.9999999Z",
        "10000-01-01T00:00:00Z",
        "12040-01-02T03:04:05Z",
        "-2040-01-02T03:04:05Z",
        "+2040-01-02T03:04:05Z",
        "40-01-02T03:04:05Z",
        "2040-1-2T03:04:05Z",
        "20400102T030405Z",
        "2040-W01-1T03:04:05Z",
        "02.01.2040T03:04:05Z",
        "2040-01-02T03:04:05Z BC",
        "2040-01-02T03:04:05 UTC",
        "2040-01-02T03:04:05Europe/Berlin",
        "2040-01-02T03:04:05Z\n",
        "\n2040-01-02T03:04:05Z",
        " 2040-01-02T03:04:05Z",
        "٢٠٤٠-01-02T03:04:05Z",
        "now",
        "today",
        "tomorrow",
        "epoch",
        "infinity",
        "-infinity",
        "allballs",
        "null",
    ]

    made = outcomes(*({"available_at": text} for text in texts))

    assert [t for t, o in zip(texts, made, strict=True) if o != "invalid_job"] == []


def test_enqueue_many_takes_a_time_that_has_passed_for_now(offer, owner):
    offer({"available_at": "2001-01-01T00:00:00Z"})

    assert owner.value(
        "select l.available_at = j.created_at from live_job as l join job as j"
        " using (job_id)"
    )


def test_enqueue_many_returns_existing_and_conflict_for_keys_in_use(offer, owner):
    ((_, first, _),) = offer({"idempotency_key": "k"})

    answers = offer(
        {"idempotency_key": "new-1"},
        {"idempotency_key": "k"},
        {"idempotency_key": "k", "kind": "other"},
        {"idempotency_key": "k", "queue": "slow"},
        {"idempotency_key": "k", "payload": {"a": 1}},
        {"idempotency_key": "k", "max_attempts": 4},
        {"idempotency_key": "k", "available_at": "2040-01-01T00:00:00Z"},
        {"idempotency_key": "k", "max_attempts": 3, "available_at": None},
        {"idempotency_key": "new-2"},
    )

    assert [outcome for _, _, outcome in answers] == [
        "created",
        "existing",
        "conflict",
        "conflict",
        "conflict",
        "conflict",
        "conflict",
        "existing",
        "created",
    ]
    assert [job_id for _, job_id, _ in answers[1:8]] == [
        first,
        None,
        None,
        None,
        None,
        None,
        first,
    ]
    assert owner.value("select count(*) from job") == 3
    assert owner.value("select count(*) from live_job") == 3


def test_enqueue_many_judges_a_key_twice_in_one_batch_by_its_first_item(offer, owner):
    answers = offer(
        {"idempotency_key": "twin", "payload": {"n": 1}},
        {"idempotency_key": "twin", "payload": {"n": 1.0}},
        {"idempotency_key": "twin", "payload": {"n": 2}},
        {"idempotency_key": "other"},
    )

    assert [outcome for _, _, outcome in answers] == [
        "created",
        "existing",
        "conflict",
        "created",
    ]
    assert answers[1][1] == answers[0][1]
    assert owner.value("select payload from job where idempotency_key = 'twin'") == {
        "n": 1
    }
    assert owner.value("select count(*) from live_job") == 2


def test_enqueue_many_makes_the_first_of_hundreds_with_one_key(offer):
    keys = [f"key-{n * 7919 % 10}" for n in range(1000)]

    answers = offer(*({"idempotency_key": key} for key in keys))

    assert [position for position, _, outcome in answers if outcome == "created"] == [
        *range(1, 11)
    ]
    assert {outcome for _, _, outcome in answers[10:]} == {"existing"}


def test_enqueue_many_does_not_count_a_bad_item_as_the_first_of_its_key(outcomes):
    assert outcomes(
        {"idempotency_key": "twin", "kind": "a b"},
        {"idempotency_key": "twin"},
        {"idempotency_key": "twin", "payload": []},
        {"idempotency_key": "twin"},
    ) == ["invalid_job", "created", "invalid_job", "existing"]


def test_enqueue_many_repeated_returns_existing_throughout(offer, state):
    first = offer({}, {}, {})
    before = state()

    second = offer({}, {}, {})

    assert [job_id for _, job_id, _ in second] == [job_id for _, job_id, _ in first]
    assert {outcome for _, _, outcome in second} == {"existing"}
    assert state() == before


@pytest.mark.parametrize(
    "end", ["queued", "running", "retrying", "succeeded", "failed"]
)
def test_enqueue_many_compares_with_the_first_intent_in_every_state(
    outcomes, claim, worker, end
):
    outcomes({})
    if end != "queued":
        held = claim()
        if end == "succeeded":
            worker.execute("select complete(%s, %s)", held)
        elif end != "running":
            worker.execute(
                "select fail(%s, %s, 'timeout', %s)", (*held, end == "retrying")
            )

    assert outcomes({}) == ["existing"]
    assert outcomes({"kind": "other"}) == ["conflict"]


def test_enqueue_many_and_enqueue_share_their_keys(producer, offer):
    ((_, first, _),) = offer({"idempotency_key": "k"})

    single = producer.row("select * from enqueue('email', 'send', '{}', 'k')")
    producer.execute("select enqueue('email', 'send', '{}', 'single')")

    assert single == {"job_id": first, "created": False}
    assert [o for _, _, o in offer({"idempotency_key": "single"})] == ["existing"]


def test_enqueue_many_keeps_the_keys_of_producers_apart(offer, other_producer, owner):
    first = offer({}, {})

    answers = offer({"kind": "other"}, {"kind": "other"}, session=other_producer)

    assert {outcome for _, _, outcome in answers} == {"created"}
    assert offer({}, {}) == [(n, job_id, "existing") for n, job_id, _ in first]
    assert owner.value("select count(*) from job") == 4


def test_enqueue_many_keeps_input_order_when_claimed(offer, worker):
    keys = [f"{n * 7919 % 1000:03}" for n in range(1000)]
    answers = offer(*({"idempotency_key": key, "payload": {"n": key}} for key in keys))
    job_ids = [job_id for _, job_id, _ in answers]

    claimed = worker.rows("select job_id, payload ->> 'n' from claim('email', 1000)")

    assert job_ids == sorted(job_ids)
    assert claimed == list(zip(job_ids, keys, strict=True))


def test_enqueue_many_keeps_input_order_of_jobs_scheduled_for_one_instant(
    offer, worker, make_due, owner
):
    when = "2040-01-01T00:00:00Z"
    answers = offer(*({"available_at": when} for _ in range(50)))
    owner.execute(
        "update live_job set available_at = clock_timestamp() - interval '1 s'"
    )
    owner.execute(
        "update live_job set available_at = (select min(available_at) from live_job)"
    )

    claimed = worker.rows("select job_id from claim('email', 50)")

    assert claimed == [(job_id,) for _, job_id, _ in answers]


def test_enqueue_many_makes_uuids_of_version_7(offer):
    answers = offer({}, {}, {})

    assert {job_id.version for _, job_id, _ in answers} == {7}


def test_enqueue_many_dates_its_jobs_by_the_clock_not_the_statements_start(
    producer, owner
):
    started = producer.value(
        "select statement_timestamp()"
        " from (select 'k' || pg_sleep(0.05)::text as key offset 0) as s,"
        " lateral enqueue_many(jsonb_build_array(jsonb_build_object("
        " 'queue', 'email', 'kind', 'send', 'payload', '{}'::jsonb,"
        " 'idempotency_key', s.key))) as e"
    )

    passed = started + timedelta(milliseconds=50)
    assert owner.value("select created_at from job") >= passed
    assert owner.value("select available_at from live_job") >= passed


def test_enqueue_many_dates_its_jobs_by_the_clock(producer, offer, owner):
    with producer.transaction():
        producer.execute("select 1")
        before = owner.value("select clock_timestamp()")
        offer({}, {})
    after = owner.value("select clock_timestamp()")

    first, second = (
        at for (at,) in owner.rows("select created_at from job order by 1")
    )
    assert before < first < second < after
    assert second - first == timedelta(microseconds=1)


def test_enqueue_many_rolls_back_with_the_callers_transaction(producer, offer, state):
    before = state()

    with producer.transaction(force_rollback=True):
        offer({}, {})

    assert state() == before


@pytest.mark.slow
def test_enqueue_many_refuses_bombs_one_by_one(producer):
    numbers = {
        "huge": '{"a": [' + ",".join(["1e131071"] * 5000) + "]}",
        "tiny": '{"a": [' + ",".join(["1e-16383"] * 5000) + "]}",
        "deep": '{"a":' + "[" * 200 + "]" * 200 + "}",
        "sound": '{"a": 1}',
    }
    items = [
        f'{{"queue": "email", "kind": "send", "idempotency_key": "{key}",'
        f' "payload": {payload}}}'
        for key, payload in numbers.items()
    ]

    answers = producer.rows(MANY, f"[{','.join(items)}]")

    assert [outcome for _, _, outcome in answers] == ["invalid_job"] * 3 + ["created"]


@pytest.mark.slow
def test_enqueue_many_refuses_a_bomb_of_decimal_places(producer):
    bomb = '{"a": [' + ",".join(["0e-16383"] * 75000) + "]}"
    item = json.dumps(JOB)[:-1] + f', "payload": {bomb}}}'

    answers = producer.rows(MANY, f"[{item}, {json.dumps(JOB)}]")

    assert [outcome for _, _, outcome in answers] == ["invalid_job", "created"]


def test_enqueue_many_writes_out_no_bomb_in_another_place(producer):
    for item in (
        '{"unknown": [%s]}',
        '{"max_attempts": [%s]}',
        '{"queue": [%s]}',
        '{"available_at": [%s]}',
        "[%s]",
    ):
        bomb = item % ",".join(["1e131071"] * 20000)
        outcome = "created" if item == '{"unknown": [%s]}' else "existing"

        answers = producer.rows(MANY, f"[{bomb}, {json.dumps(JOB)}]")

        assert [o for _, _, o in answers] == ["invalid_job", outcome], item


def test_enqueue_many_updates_or_locks_no_job_that_exists(offer, owner):
    offer({}, {})
    versions = "select xmin::text, xmax::text from job union all"
    versions += " select xmin::text, xmax::text from live_job"
    before = owner.rows(versions)

    offer({}, {"kind": "other"})

    assert owner.rows(versions) == before


@pytest.mark.parametrize(
    "settings",
    [
        "set standard_conforming_strings to off; set escape_string_warning to off",
        (
            "set enable_hashjoin to off; set enable_mergejoin to off;"
            " set enable_nestloop to off; set enable_sort to off;"
            " set enable_hashagg to off; set enable_material to off"
        ),
        "set plan_cache_mode to force_custom_plan",
        "set default_transaction_isolation to 'serializable'",
        "set intervalstyle to 'sql_standard'",
        "set bytea_output to 'escape'",
        "set extra_float_digits to -15",
        "set search_path to pg_temp, jobs_email",
    ],
)
def test_enqueue_many_returns_the_same_under_any_setting_of_the_session(
    producer, outcomes, settings
):
    producer.execute(settings)

    assert outcomes(
        {"idempotency_key": "twin"},
        {"idempotency_key": "a\\b"},
        {"idempotency_key": "twin"},
        {"idempotency_key": "twin", "kind": "other"},
        {"available_at": "2040-01-01T00:00:00.5+01:00"},
        {"available_at": "2040-01-01T00:00:00x5Z"},
    ) == ["created", "invalid_job", "existing", "conflict", "created", "invalid_job"]


@pytest.mark.parametrize("zone", ["Z5", "T5", "<T>5", "Asia/Kathmandu"])
def test_enqueue_many_reads_a_time_the_same_in_a_zone_of_any_name(
    producer, owner, zone
):
    producer.execute("select set_config('timezone', %s, false)", (zone,))
    item = {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": "k"}
    jobs = [item | {"available_at": "2030-01-01t00:00:00z"}]

    assert producer.row(MANY, json.dumps(jobs))["outcome"] == "created"

    assert owner.value("select available_at = '2030-01-01 00:00:00+00' from job")
