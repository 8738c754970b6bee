from __future__ import annotations

import copy
import dataclasses
import pickle
from datetime import UTC, datetime
from uuid import uuid4

import pytest

import lenso_jobs
from lenso_jobs import Failure, LeasedJob, NewJob
from lenso_jobs.errors import PayloadUndecodable

NOW = datetime(2040, 1, 1, tzinfo=UTC)


def leased(payload=b'{"pay": "load"}', **changes):
    columns = {
        "job_id": uuid4(),
        "queue": "email",
        "kind": "send",
        "payload": payload,
        "attempt": 1,
        "max_attempts": 3,
        "lease_token": "job_lease_token",
        "lease_expires_at": NOW.timestamp(),
        "created_at": NOW.timestamp(),
        "seconds_left": 30.0,
    }
    return LeasedJob(*(columns | changes).values())


LEASE = leased()
NEW = NewJob("email", "send", {"pay": "load"}, "the-key")


def test_the_repr_of_a_lease_shows_neither_payload_nor_token():
    shown = f"{LEASE!r} {LEASE} {[LEASE]} {Failure(LEASE, 'code', retryable=True)}"

    assert str(LEASE.job_id) in shown
    assert "pay" not in shown.replace("payload", "")
    assert "job_lease_" not in shown


def test_the_repr_of_a_new_job_shows_neither_payload_nor_key():
    shown = f"{NEW!r} {NEW} {[NEW]}"

    assert "send" in shown
    assert "load" not in shown
    assert "the-key" not in shown


def test_the_repr_of_a_client_shows_its_role_and_no_connection_string(client):
    jobs = client("accounts", caller="accounts", application_name="hush-hush")

    assert repr(jobs) == "<Jobs as accounts>"
    assert repr(client("accounts")) == "<Jobs as the connected role>"


MODELS = [
    value
    for value in vars(lenso_jobs).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_frozen_and_slotted(model):
    parameters = model.__dataclass_params__

    assert parameters.frozen
    assert model.__slots__ == tuple(field.name for field in dataclasses.fields(model))


@pytest.mark.parametrize("value", [LEASE, NEW, Failure(LEASE, "code", retryable=True)])
def test_a_value_can_be_copied_pickled_and_compared(value):
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value


@pytest.mark.parametrize("value", [LEASE, NEW])
def test_a_field_cannot_be_set(value):
    for field in ("kind", "payload", "other"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(value, field, "x")


def test_the_payload_of_a_lease_is_decoded_once():
    lease = leased(b'{"attempts": [1]}')

    lease.payload["attempts"].append(2)
    lease.payload["seen"] = True

    assert lease.payload == {"attempts": [1, 2], "seen": True}
    assert lease.payload_json == b'{"attempts": [1]}'


@pytest.mark.parametrize(
    "payload", [b'{"n": ' + b"9" * 5000 + b"}", b"[" * 100_000, b"{", b'{"s": "\xff"}']
)
def test_an_undecodable_payload_raises_each_time_it_is_read(payload):
    lease = leased(payload)

    for _ in range(2):
        with pytest.raises(PayloadUndecodable, match="the payload cannot be decoded"):
            lease.payload  # noqa: B018
    assert lease.kind == "send"


def test_leases_are_equal_if_they_hold_one_job_by_one_token():
    same = leased(job_id=LEASE.job_id, attempt=2)

    assert same == LEASE
    assert hash(same) == hash(LEASE)
    assert leased() != LEASE
    assert leased(job_id=LEASE.job_id, lease_token="other") != LEASE
    assert LEASE != "another thing"


def test_the_times_of_a_lease_are_aware_and_exact():
    # The last microsecond that an epoch in float8 keeps is in the year 2255.
    for moment in (NOW, datetime(2026, 8, 1, 12, 0, 0, 1, UTC)):
        lease = leased(lease_expires_at=moment.timestamp(), created_at=NOW.timestamp())

        assert lease.lease_expires_at == moment
        assert lease.lease_expires_at.tzinfo is UTC
        assert lease.created_at == NOW
