from __future__ import annotations

import dataclasses
import os
import re
import traceback
import types
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from uuid import uuid4

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from lenso_jobs import (
    Failure,
    InvalidArgument,
    InvalidFailure,
    InvalidJob,
    InvalidLease,
    InvalidQueue,
    JobNotFound,
    Jobs,
    NewJob,
)

NUL = "a\0b"
SURROGATE = "a\ud800b"
SECRET = "hush-hush"
AT = datetime(2040, 1, 1, tzinfo=UTC)


class Nowhere(tzinfo):
    """A time zone that does not say where it is."""

    def utcoffset(self, _):
        return None


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def circular():
    value = {SECRET: 1}
    value["self"] = value
    return value


@pytest.fixture
def idle():
    """A client whose connection would be in a transaction, had it sent any statement."""
    # Any database will do for that.
    with psycopg.connect(os.environ["LENSO_JOBS_TEST_SERVER"]) as connection:
        yield Jobs(connection, "jobs_email")


def assert_nothing_was_sent(jobs):
    assert jobs._source.info.transaction_status is TransactionStatus.IDLE


BAD_PAYLOADS = {
    "NaN": {"n": float("nan")},
    "infinity": {"n": [float("inf")]},
    "minus infinity": {"n": {"deep": float("-inf")}},
    "NUL in a value": {"n": f"{SECRET}\0"},
    "NUL in a key": {f"{SECRET}\0": 1},
    "NUL behind a backslash": {"n": f"{SECRET}\\\0"},
    "NUL behind two": {"n": f"{SECRET}\\\\\0"},
    "surrogate in a value": {"n": f"{SECRET}\ud800"},
    "surrogate in a key": {f"{SECRET}\udfff": 1},
    "endless nesting": {SECRET: nested(5_000)},
    "too much nesting": {SECRET: nested(200)},
    "nesting a level too deep": {SECRET: nested(128)},
    "itself": circular(),
    "datetime": {SECRET: datetime(2040, 1, 1, tzinfo=UTC)},
    "date": {SECRET: date(2040, 1, 1)},
    "bytes": {SECRET: b"bytes"},
    "set": {SECRET: {1, 2}},
    "Decimal": {SECRET: Decimal("1.5")},
    "UUID": {SECRET: uuid4()},
    "key of no JSON kind": {(SECRET,): 1},
    "integer beyond Python's digits": {SECRET: 10**5000},
    "list": [SECRET],
    "text": SECRET,
    "text of an object": f'{{"{SECRET}": 1}}',
    "number": 5,
    "pairs": [(SECRET, 1)],
    "object": object(),
}
bad_payload = pytest.mark.parametrize(
    "payload", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS
)


@bad_payload
def test_a_bad_payload_is_refused_before_any_sql(payload, idle, key):
    with pytest.raises(InvalidJob, match="payload must") as caught:
        idle.enqueue("email", "send", payload, idempotency_key=key)

    assert_nothing_was_sent(idle)
    assert caught.value.sqlstate == "LJ001"
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def within(value):
    return {"to": "ada", "items": [{}, {"id": 1}, (2, {"id": value})]}


Local = dataclasses.make_dataclass("Local", ["x"])
PATH = "payload.items[2][1].id is of type "
PATHS = {
    "UUID": (within(uuid4()), f"made of JSON types, .*: {PATH}uuid.UUID"),
    "Decimal": (within(Decimal(1)), f"{PATH}decimal.Decimal"),
    "datetime": (within(AT), f"{PATH}datetime.datetime"),
    "date": (within(AT.date()), f"{PATH}datetime.date"),
    "timedelta": (within(timedelta(1)), f"{PATH}datetime.timedelta"),
    "set": (within({1}), f"{PATH}set"),
    "bytes": (within(b"x"), f"{PATH}bytes"),
    "object": (within(Local(1)), f"{PATH}.*Local"),
    "mapping": (within(types.MappingProxyType({})), f"{PATH}mappingproxy"),
    "generator": (within(x for x in ()), f"{PATH}generator"),
    "NaN": (within(float("nan")), f"must hold finite numbers: {PATH}float"),
    "infinity": (within(-float("inf")), f"must hold finite numbers: {PATH}float"),
    "NUL": (within("a\0"), f"must not hold a NUL character: {PATH}str"),
    "surrogate": (within("\ud800"), f"must not hold a lone surrogate: {PATH}str"),
    "digits": (within(10**5000), f"must hold shorter numbers: {PATH}int"),
    "tuple as key": (
        within({(1, 2): 3}),
        "must have string keys: payload.items[2][1].id has one of type tuple",
    ),
    "UUID as key": ({uuid4(): 3}, "string keys: payload has one of type uuid.UUID"),
    "NaN as key": (
        within({float("nan"): 3}),
        "must hold finite numbers: a key of payload.items[2][1].id is of type float",
    ),
    "NUL in a key": ({"a\0": 1}, "NUL character: a key of payload is of type str"),
    "the first": ({"a": {1}, "b": b"x"}, "payload.a is of type set"),
    "beside it": ({"a-b": 1, "user@example.com": {1}}, "payload[key 2] is of type set"),
    "long key": ({"x" * 41: {1}}, "payload[key 1] is of type set"),
    "itself": (circular(), "payload must be nested at most 128 levels deep"),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_bad_payload_is_refused_by_its_path_and_type(case, idle, key):
    payload, message = PATHS[case]

    with pytest.raises(InvalidJob) as caught:
        idle.enqueue("email", "send", payload, idempotency_key=key)

    pattern = re.escape(message).replace(r"\.\*", ".*") + "$"
    assert re.search(pattern, str(caught.value)), str(caught.value)


def test_a_bad_payload_spoils_no_neighbour(producing, key):
    items = [NewJob("email", "send", {"n": 0}, f"{key}.good")]
    for number, payload in enumerate(BAD_PAYLOADS.values()):
        items.append(NewJob("email", "send", payload, f"{key}.bad.{number}"))
        items.append(NewJob("email", "send", {"n": number}, f"{key}.{number}"))

    outcomes = [item.outcome for item in producing.enqueue_many(items)]

    assert set(outcomes[0::2]) == {"created"}
    assert dict(zip(BAD_PAYLOADS, outcomes[1::2], strict=True)) == dict.fromkeys(
        BAD_PAYLOADS, "invalid_job"
    )


def test_a_mapping_that_is_not_a_dict_is_a_payload(producing, working, key):
    payload = types.MappingProxyType({"to": "ada"})

    producing.enqueue("email", "send", payload, idempotency_key=key)
    (lease,) = working.claim("email")

    assert lease.payload == {"to": "ada"}


BAD_TIMES = {
    "naive": datetime(2040, 1, 1),  # noqa: DTZ001 - what is refused
    "of no place": datetime(2040, 1, 1, tzinfo=Nowhere()),
    "a date": date(2040, 1, 1),
    "a text": "2040-01-01T00:00:00Z",
    "a number": 2_208_988_800,
    "a duration": timedelta(days=1),
}
bad_time = pytest.mark.parametrize("at", BAD_TIMES.values(), ids=BAD_TIMES)


@bad_time
def test_a_time_that_is_not_an_aware_datetime_is_refused_before_any_sql(at, idle, key):
    with pytest.raises(InvalidJob, match="available_at"):
        idle.enqueue("email", "send", {}, idempotency_key=key, available_at=at)

    assert_nothing_was_sent(idle)


def test_a_time_that_is_not_an_aware_datetime_spoils_no_neighbour(producing, key):
    items = [
        NewJob("email", "send", {}, f"{key}.{number}", at)
        for number, at in enumerate([*BAD_TIMES.values(), AT])
    ]

    outcomes = [item.outcome for item in producing.enqueue_many(items)]

    assert outcomes == ["invalid_job"] * len(BAD_TIMES) + ["created"]


@pytest.mark.parametrize("hours", [-14, -1, 0, 1, 14])
def test_a_time_of_any_offset_is_the_same_instant(hours, producing, observing, key):
    zone = timezone(timedelta(hours=hours, minutes=30))

    job = producing.enqueue(
        "email", "send", {}, idempotency_key=key, available_at=AT.astimezone(zone)
    )
    (item,) = producing.enqueue_many(
        [NewJob("email", "send", {}, key, AT.astimezone(zone))]
    )

    assert observing.inspect(job.job_id).available_at == AT
    assert item.outcome == "existing"


def test_a_time_beyond_the_year_9999_is_invalid_also_in_a_batch(producing, key):
    west = datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))

    with pytest.raises(InvalidJob):
        producing.enqueue("email", "send", {}, idempotency_key=key, available_at=west)
    (item,) = producing.enqueue_many([NewJob("email", "send", {}, key, west)])

    assert item.outcome == "invalid_job"


NO_INT = [True, False, 3.0, 3.5, "3", 2**31, -(2**31) - 1, 10**30, Decimal(3), b"3"]


@pytest.mark.parametrize("number", NO_INT, ids=repr)
def test_max_attempts_that_is_not_an_integer_is_refused_before_any_sql(
    number, idle, key
):
    with pytest.raises(InvalidJob, match="max_attempts"):
        idle.enqueue("email", "send", {}, idempotency_key=key, max_attempts=number)

    assert_nothing_was_sent(idle)


def test_max_attempts_that_is_not_an_integer_spoils_no_neighbour(producing, key):
    items = [
        NewJob("email", "send", {}, f"{key}.{number}", max_attempts=attempts)
        for number, attempts in enumerate([*NO_INT, 3])
    ]

    outcomes = [item.outcome for item in producing.enqueue_many(items)]

    assert outcomes == ["invalid_job"] * len(NO_INT) + ["created"]


@pytest.mark.parametrize("number", NO_INT, ids=repr)
def test_a_limit_that_is_not_an_integer_is_refused_before_any_sql(number, idle):
    with pytest.raises(InvalidArgument, match="limit"):
        idle.claim("email", limit=number)

    assert_nothing_was_sent(idle)


@pytest.mark.parametrize("limit", [-(2**31), -1, 0, 1001, 2**31 - 1])
def test_a_limit_out_of_range_is_the_server_s_to_refuse(limit, working):
    with pytest.raises(InvalidArgument):
        working.claim("email", limit=limit)


BAD_TEXTS = {
    "NUL": NUL,
    "surrogate": SURROGATE,
    "bytes": b"email",
    "number": 5,
    "list": ["email"],
}
bad_text = pytest.mark.parametrize("text", BAD_TEXTS.values(), ids=BAD_TEXTS)


@bad_text
@pytest.mark.parametrize("field", ["queue", "kind", "idempotency_key"])
def test_a_name_postgresql_cannot_hold_is_refused_before_any_sql(
    field, text, idle, key
):
    fields = {"queue": "email", "kind": "send", "idempotency_key": key, field: text}

    with pytest.raises(InvalidJob, match=f"{field} must"):
        idle.enqueue(payload={}, **fields)

    assert_nothing_was_sent(idle)


@pytest.mark.parametrize("field", ["queue", "kind", "idempotency_key"])
def test_a_name_postgresql_cannot_hold_spoils_no_neighbour(field, producing, key):
    good = {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": key}

    items = producing.enqueue_many(
        [*({**good, field: text} for text in BAD_TEXTS.values()), good]
    )

    outcomes = [item.outcome for item in items]
    assert outcomes == ["invalid_job"] * len(BAD_TEXTS) + ["created"]


@bad_text
@pytest.mark.parametrize("verb", ["claim", "next_available_at"])
def test_a_queue_postgresql_cannot_hold_is_refused_before_any_sql(verb, text, idle):
    with pytest.raises(InvalidQueue):
        getattr(idle, verb)(text)

    assert_nothing_was_sent(idle)


@bad_text
@pytest.mark.parametrize("verb", ["renew", "complete", "fail"])
def test_a_token_postgresql_cannot_hold_is_refused_before_any_sql(
    verb, text, idle, held
):
    rest = ("code",) if verb == "fail" else ()
    named = {"retryable": True} if verb == "fail" else {}

    with pytest.raises(InvalidLease):
        getattr(idle, verb)(held(uuid4(), text), *rest, **named)

    assert_nothing_was_sent(idle)


@bad_text
def test_a_token_postgresql_cannot_hold_spoils_no_neighbour(
    text, working, leased, held
):
    bad = held(leased.job_id, text)

    renewed = working.renew_many([bad, leased])
    failed = working.fail_many([(bad, "code", True), (leased, "code", True)])
    completed = working.complete_many([bad, leased])

    assert [item.outcome for item in renewed] == ["invalid_lease", "renewed"]
    assert [item.outcome for item in failed] == ["invalid_lease", "queued"]
    assert [item.outcome for item in completed] == ["invalid_lease", "invalid_lease"]


@bad_text
def test_a_code_postgresql_cannot_hold_is_refused_before_any_sql(text, idle, held):
    with pytest.raises(InvalidFailure):
        idle.fail(held(uuid4(), "job_lease_no"), text, retryable=True)

    assert_nothing_was_sent(idle)


@bad_text
def test_a_code_postgresql_cannot_hold_spoils_no_neighbour(text, working, enqueue):
    enqueue(), enqueue()
    first, second = working.claim("email", limit=2)

    items = working.fail_many([(first, text, True), (second, "code", True)])

    assert [item.outcome for item in items] == ["invalid_failure", "queued"]


@pytest.mark.parametrize("mark", [0, 1, "true", "f", [], 1.0], ids=repr)
def test_retryable_that_is_not_a_boolean_is_refused_before_any_sql(
    mark, idle, working, leased
):
    with pytest.raises(InvalidFailure, match="retryable"):
        idle.fail(leased, "code", retryable=mark)
    (item,) = working.fail_many([Failure(leased, "code", mark)])

    assert_nothing_was_sent(idle)
    assert item.outcome == "invalid_failure"


@pytest.mark.parametrize("job_id", ["", "no uuid", NUL, 5, b"5", []], ids=repr)
def test_a_job_id_that_is_not_a_uuid_is_refused_before_any_sql(job_id, idle, held):
    with pytest.raises(JobNotFound):
        idle.inspect(job_id)
    with pytest.raises(InvalidLease):
        idle.complete(held(job_id, "job_lease_no"))

    assert_nothing_was_sent(idle)


@pytest.mark.parametrize("job_id", [None, "no uuid", NUL, 5])
def test_a_job_id_that_is_not_a_uuid_spoils_no_neighbour(job_id, working, leased, held):
    bad = held(job_id, leased.lease_token)

    renewed = working.renew_many([bad, leased])
    completed = working.complete_many([leased, bad])

    assert [item.outcome for item in renewed] == ["invalid_lease", "renewed"]
    assert [item.outcome for item in completed] == ["completed", "invalid_lease"]


def test_a_lease_kept_as_text_is_as_good_as_one_just_claimed(working, leased, held):
    kept = held(str(leased.job_id), leased.lease_token)

    assert working.renew(kept)
    assert working.renew_many([kept, leased])[0].outcome == "renewed"
    assert working.complete(kept)


def test_an_item_that_is_not_a_job_spoils_no_neighbour(producing, key):
    good = NewJob("email", "send", {}, key)

    items = producing.enqueue_many(
        [None, 5, "text", [], {}, {"unknown": 1}, {("a",): 1}, object(), good]
    )

    assert [item.outcome for item in items] == ["invalid_job"] * 8 + ["created"]


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"idempotency_key": ...},
        {"queue": ...},
        {"kind": None},
        {"payload": ...},
        {"payload": None},
        {"max_attempts": 0},
        {"max_attempts": 101},
        {"max_attempts": None},
    ],
    ids=repr,
)
def test_an_item_that_breaks_a_bound_spoils_no_neighbour(change, producing, key):
    good = {"queue": "email", "kind": "send", "payload": {}}
    bad = {**good, "idempotency_key": f"{key}.2", **change}
    bad = {name: value for name, value in bad.items() if value is not ...}

    items = producing.enqueue_many([{**good, "idempotency_key": f"{key}.1"}, bad])

    assert [item.outcome for item in items] == ["created", "invalid_job"]


def test_an_empty_batch_is_an_invalid_argument(producing, working):
    for call in (
        producing.enqueue_many,
        working.renew_many,
        working.complete_many,
        working.fail_many,
    ):
        for empty in ([], (), iter([])):
            with pytest.raises(InvalidArgument):
                call(empty)


def test_a_batch_of_1001_items_is_an_invalid_argument(
    producing, working, held, key, state
):
    lease = held(uuid4(), "job_lease_no")
    before = state()

    with pytest.raises(InvalidArgument):
        producing.enqueue_many(
            NewJob("email", "send", {}, f"{key}.{n}") for n in range(1001)
        )
    with pytest.raises(InvalidArgument):
        working.renew_many([lease] * 1001)
    with pytest.raises(InvalidArgument):
        working.complete_many([lease] * 1001)
    with pytest.raises(InvalidArgument):
        working.fail_many([(lease, "code", True)] * 1001)

    assert state() == before


@pytest.mark.slow
def test_a_batch_of_1000_items_is_taken(producing, working, key):
    items = producing.enqueue_many(
        NewJob("email", "send", {"n": n}, f"{key}.{n}") for n in range(1000)
    )
    leases = working.claim("email", limit=1000)

    assert {item.outcome for item in items} == {"created"}
    assert [lease.payload["n"] for lease in leases] == list(range(1000))
    assert {item.outcome for item in working.renew_many(leases)} == {"renewed"}
    assert {item.outcome for item in working.complete_many(leases)} == {"completed"}


# None is NULL.

NONE = {
    "enqueue queue": (InvalidJob, "accounts", "enqueue", {"queue": None}),
    "enqueue kind": (InvalidJob, "accounts", "enqueue", {"kind": None}),
    "enqueue payload": (InvalidJob, "accounts", "enqueue", {"payload": None}),
    "enqueue key": (InvalidJob, "accounts", "enqueue", {"idempotency_key": None}),
    "enqueue attempts": (InvalidJob, "accounts", "enqueue", {"max_attempts": None}),
    "enqueue_many": (InvalidJob, "accounts", "enqueue_many", {"jobs": None}),
    "claim queue": (InvalidQueue, "email-worker", "claim", {"queue": None}),
    "claim limit": (InvalidArgument, "email-worker", "claim", {"limit": None}),
    "next": (InvalidQueue, "email-worker", "next_available_at", {"queue": None}),
    "renew": (InvalidLease, "email-worker", "renew", {"lease": None}),
    "renew_many": (InvalidArgument, "email-worker", "renew_many", {"leases": None}),
    "complete": (InvalidLease, "email-worker", "complete", {"lease": None}),
    "complete_many": (
        InvalidArgument,
        "email-worker",
        "complete_many",
        {"leases": None},
    ),
    "fail": (InvalidLease, "email-worker", "fail", {"lease": None}),
    "fail code": (InvalidFailure, "email-worker", "fail", {"failure_code": None}),
    "fail mark": (InvalidFailure, "email-worker", "fail", {"retryable": None}),
    "fail_many": (InvalidArgument, "email-worker", "fail_many", {"failures": None}),
    "inspect": (JobNotFound, "operations", "inspect", {"job_id": None}),
}
NULL = {
    "enqueue queue": "enqueue(null, 'k', '{}', 'key')",
    "enqueue kind": "enqueue('email', null, '{}', 'key')",
    "enqueue payload": "enqueue('email', 'k', null, 'key')",
    "enqueue key": "enqueue('email', 'k', '{}', null)",
    "enqueue attempts": "enqueue('email', 'k', '{}', 'key', null, null)",
    "enqueue_many": "enqueue_many(null)",
    "claim queue": "claim(null)",
    "claim limit": "claim('email', null)",
    "next": "next_available_at(null)",
    "renew": "renew(null, null)",
    "renew_many": "renew_many(null, null)",
    "complete": "complete(null, null)",
    "complete_many": "complete_many(null, null)",
    "fail": "fail(null, null, 'code', true)",
    "fail code": "fail(gen_random_uuid(), 'no', null, true)",
    "fail mark": "fail(gen_random_uuid(), 'no', 'code', null)",
    "fail_many": "fail_many(null, null, null, null)",
    "inspect": "inspect(null)",
}


@pytest.mark.parametrize("case", NONE)
def test_none_raises_the_same_error_as_null(case, client, connect, held, key):
    kind, role, verb, change = NONE[case]
    usual = {
        "enqueue": {
            "queue": "email",
            "kind": "send",
            "payload": {},
            "idempotency_key": key,
        },
        "claim": {"queue": "email"},
        "fail": {
            "lease": held(uuid4(), "job_lease_no"),
            "failure_code": "code",
            "retryable": True,
        },
    }

    with pytest.raises(kind):
        getattr(client(role), verb)(**usual.get(verb, {}) | change)
    with connect(role).refusing(kind.sqlstate):
        connect(role).execute(f"select {NULL[case]}")


@pytest.mark.parametrize(
    "half", [(None, "job_lease_no"), (uuid4(), None)], ids=["token", "job"]
)
@pytest.mark.parametrize("verb", ["renew", "complete"])
def test_half_a_lease_is_an_invalid_lease(verb, half, working, held):
    with pytest.raises(InvalidLease):
        getattr(working, verb)(held(*half))
    (item,) = getattr(working, f"{verb}_many")([held(*half)])

    assert item.outcome == "invalid_lease"


def test_none_as_an_item_spoils_no_neighbour(working, leased):
    renewed = working.renew_many([None, leased])
    failed = working.fail_many([(None, "code", True), (leased, None, True)])
    completed = working.complete_many([None, leased])

    assert [item.outcome for item in renewed] == ["invalid_lease", "renewed"]
    assert [item.outcome for item in failed] == ["invalid_lease", "invalid_failure"]
    assert [item.outcome for item in completed] == ["invalid_lease", "completed"]
