from __future__ import annotations

import copy
import dataclasses
import pickle
from datetime import UTC, datetime
from uuid import uuid4

import pytest

import lenso_jobs
from lenso_jobs import Failure, LeasedJob, NewJob

NOW = datetime(2040, 1, 1, tzinfo=UTC)
LEASE = LeasedJob(
    uuid4(), "email", "send", b'{"pay": "load"}', 1, 3, "job_lease_token", NOW, NOW
)
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


def test_a_field_cannot_be_written():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LEASE.attempt = 2


@pytest.mark.parametrize("model", [each for each in MODELS if each is not NewJob])
def test_a_model_has_the_fields_of_its_composite_type(model, owner):
    words = "".join(
        f"_{letter.lower()}" if letter.isupper() else letter
        for letter in model.__name__
    ).lstrip("_")
    names = {"payload_json": "payload"}

    columns = owner.value(
        "select array_agg(attname::text order by attnum) from pg_attribute"
        " where attrelid = to_regclass(%s) and attnum > 0 and not attisdropped",
        words,
    )

    fields = [field.name for field in dataclasses.fields(model)]
    assert columns == [names.get(name, name) for name in fields]
