"""The fault: numbers and shapes of a payload.

A value that is not JSON fails before any SQL. Integers come back exact. Hooks change
nothing.
"""

import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from psycopg.types.json import set_json_dumps, set_json_loads

PAYLOAD = {
    "big": 2**63,
    "bigger": 2**70 + 1,
    "less": -(10**300) - 7,
    "tenth": 0.1,
    "one": 1.0,
    "none": None,
    "list": [1, [True, {}]],
    "5": "key",
}


def items(payload):
    yield {
        "queue": "email",
        "kind": "send",
        "payload": payload,
        "idempotency_key": "many",
    }


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_value_that_json_cannot_hold_fails_before_any_sql(client, refused):
    jobs = client("accounts")
    jobs._source.close()

    for value in (
        *(float("nan"), float("inf"), -float("inf")),
        *(Decimal("1.5"), datetime(2040, 1, 1, tzinfo=UTC), b"bytes"),
        *({1}, object(), 1j),
    ):
        for payload in ({"n": value}, {"deep": [{"n": value}]}):
            with refused("LJ001"):
                jobs.enqueue("email", "send", payload, idempotency_key="k")


def test_numbers_and_shapes_come_back_equal(client):
    producer, worker = client("accounts"), client("email-worker")

    producer.enqueue("email", "send", PAYLOAD, idempotency_key="k")
    producer.enqueue_many(items(PAYLOAD))
    leases = worker.claim("email", 9)

    for lease in leases:
        assert lease.payload == PAYLOAD
        assert {key: type(value) for key, value in lease.payload.items()} == {
            key: type(value) for key, value in PAYLOAD.items()
        }
        assert lease.payload["bigger"] - 2**70 == 1
    assert len(leases) == 2


@pytest.mark.parametrize("way", ["sync", "async"])
def test_tuples_become_lists_and_keys_text(client):
    producer, worker = client("accounts"), client("email-worker")
    payload = {5: (1, (2,)), None: {True: 0.5}}

    producer.enqueue("email", "send", payload, idempotency_key="k")
    producer.enqueue_many(items(payload))

    for lease in worker.claim("email", 2):
        assert lease.payload == {"5": [1, [2]], "null": {"true": 0.5}}


def test_only_an_object_is_a_payload(client, refused, way, owner):
    jobs = client("accounts")
    shapes = ["x", 1, [], True, 1.5]

    for payload in (
        (*map(json.dumps, shapes), "null", None) if way == "sql" else (*shapes, None)
    ):
        with refused("LJ001") as caught:
            jobs.enqueue("email", "send", payload, idempotency_key="k")
        assert str(caught.value).startswith("payload must be a")
    for payload in (*shapes, None):
        (item,) = jobs.enqueue_many(items(payload))
        assert item.outcome == "invalid_job"

    assert owner.value("select count(*) from job") == 0


def test_a_value_that_only_sql_can_hold_has_one_meaning_for_all(
    client, producer, refused
):
    enqueue = "select enqueue('email', 'send', %s, %s)"
    for number in ("1e400", "-1e400", "1e1000"):
        with refused("LJ001"):
            producer.execute(enqueue, (f'{{"n": {number}}}', "no"))
    for n, payload in enumerate(
        ['{"a": 1, "a": 2}', '{"a": -0}', '{"a": -0.0}', '{"a": 1e3}']
    ):
        producer.execute(enqueue, (payload, f"k{n}"))

    leases = client("email-worker").claim("email", 9)

    assert [lease.payload for lease in leases] == [
        *({"a": 2}, {"a": 0}, {"a": 0}, {"a": 1000}),
    ]


@pytest.fixture
def foreign_json():
    """The application gave psycopg its JSON functions, for the whole process."""

    def refuse(_):
        raise AssertionError("the application's function was called")

    set_json_loads(refuse)
    set_json_dumps(refuse)
    yield
    set_json_loads(json.loads)
    set_json_dumps(json.dumps)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_the_application_s_json_functions_change_nothing(client, foreign_json):
    producer, worker = client("accounts"), client("email-worker")

    job = producer.enqueue("email", "send", PAYLOAD, idempotency_key="k")
    producer.enqueue_many(items(PAYLOAD))

    assert [x.payload for x in worker.claim("email", 2)] == [PAYLOAD] * 2
    assert producer.inspect(job.job_id).status == "running"
