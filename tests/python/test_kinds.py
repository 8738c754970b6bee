"""Kinds and their payloads, without a server. The worker's part is in worker/."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Annotated
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypedDict

from lenso_jobs import (
    InvalidArgument,
    InvalidJob,
    Kind,
    Kinds,
    LeasedJob,
    PayloadInvalid,
    PayloadUndecodable,
)


class Model(BaseModel):
    model_config = ConfigDict(strict=True)

    order: int
    to: str = Field(alias="recipient", default="nobody")
    at: datetime | None = None


@dataclass
class Data:
    order: int
    price: Decimal = Decimal("1.50")


class Typed(TypedDict):
    order: int


HELD = UUID(int=1)


def lease(payload_json):
    columns = HELD, "email", "receipt", payload_json, 1, 3, "token", 0.0, 0.0, 30.0
    return LeasedJob(*columns)


@pytest.fixture
def kinds():
    return Kinds()


@pytest.fixture
def kind(kinds):
    """Register a handler that returns its arguments."""

    def kind(payload=dict, **options):
        decorator = kinds("receipt", queue="email", payload=payload, **options)
        return decorator(lambda lease, payload: (lease, payload))

    return kind


class Recorder:
    """A client that returns what it is asked to enqueue."""

    def enqueue(self, **arguments):
        return arguments


# The payload.


@pytest.mark.parametrize(
    ("type_", "payload", "as_json"),
    [
        (dict, {"order": 1}, {"order": 1}),
        (Model, Model(order=1), {"order": 1, "recipient": "nobody", "at": None}),
        (Data, Data(1), {"order": 1, "price": "1.50"}),
        (Typed, {"order": 1}, {"order": 1}),
    ],
)
def test_a_payload_is_enqueued_as_json_and_read_as_its_type(
    type_, payload, as_json, kind
):
    receipt = kind(type_)

    job = receipt.new_job(payload, idempotency_key="k")
    text = type_.__name__ == "Model" and Model(order=1).model_dump_json(by_alias=True)

    assert job.payload == as_json
    held = lease((text or '{"order": 1}').encode())
    assert receipt(held) == (held, payload)


def test_a_strict_model_reads_the_time_that_it_wrote(kind):
    receipt = kind(Model)
    payload = Model(order=1, at=datetime(2026, 1, 2))  # noqa: DTZ001 - any

    job = receipt.new_job(payload, idempotency_key="k")

    assert job.payload["at"] == "2026-01-02T00:00:00"
    held = lease(b'{"order": 1, "at": "2026-01-02T00:00:00"}')
    assert receipt(held) == (held, payload)


@pytest.mark.parametrize(
    ("type_", "payload"),
    [
        (Data, Data("secret")),
        (Data, None),
        (Typed, {"amount": "secret"}),
        (Typed, {"order": object()}),
        (Model, Model.model_construct(order="secret")),
    ],
)
def test_a_payload_that_does_not_fit_is_refused_without_its_text(type_, payload, kind):
    receipt = kind(type_)

    with pytest.raises(InvalidJob, match=f"payload does not fit {type_.__name__}") as e:
        receipt.new_job(payload, idempotency_key="k")

    assert "secret" not in str(e.value)
    assert e.value.__context__ is None


@pytest.mark.parametrize("type_", [Data, Model, Typed])
def test_a_job_that_does_not_fit_is_refused_without_its_text(type_, kind):
    with pytest.raises(PayloadInvalid, match=r"order \(int_") as e:
        kind(type_)(lease(b'{"order": "secret"}'))

    assert e.value.code == "payload_invalid"
    assert "secret" not in str(e.value)
    assert e.value.__context__ is None


class Deep(BaseModel):
    model_config = ConfigDict(extra="forbid")

    counts: dict[str, int] = {}
    by_number: dict[int, int] = {}
    shapes: list[
        Annotated[
            Annotated[Data, Tag("data")] | Annotated[Model, Tag("model")],
            Discriminator(lambda value: value.get("kind")),
        ]
    ] = []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"counts": {"secret@b": "x"}}', r"counts.… \(int_parsing\)"),
        ('{"by_number": {"secret": 1}}', r"by_number.….… \(int_parsing\)"),
        ('{"secret": 1}', r"… \(extra_forbidden\)"),
        ('{"shapes": [{"kind": "secret"}]}', r"shapes.0 \(union_tag_invalid\)"),
        ('{"shapes": [{"kind": "data"}]}', r"shapes.0.….order \(missing\), shapes.*"),
    ],
)
def test_a_refusal_shows_the_names_of_fields_and_no_key_of_the_payload(
    text, path, kind
):
    with pytest.raises(
        PayloadInvalid, match=f"^the payload does not fit Deep: {path}$"
    ):
        kind(Deep)(lease(text.encode()))


def test_a_payload_that_is_no_json_is_undecodable_rather_than_invalid(kind):
    with pytest.raises(PayloadUndecodable) as e:
        kind(Data)(lease(b'{"order": '))

    assert e.value.code == "payload_undecodable"


# Enqueuing.


def test_enqueue_passes_the_queue_the_kind_and_its_attempts(kind):
    receipt = kind(Data, max_attempts=5)

    asked = receipt.enqueue(Recorder(), Data(1), idempotency_key="k")
    again = receipt.enqueue(Recorder(), Data(1), idempotency_key="k", max_attempts=1)

    assert asked == {
        "queue": "email",
        "kind": "receipt",
        "payload": {"order": 1, "price": "1.50"},
        "idempotency_key": "k",
        "available_at": None,
        "max_attempts": 5,
    }
    assert again["max_attempts"] == 1


def test_enqueue_awaits_an_asyncio_client(kind):
    class Client:
        async def enqueue(self, **arguments):
            return arguments["kind"]

    coroutine = kind().enqueue(Client(), {}, idempotency_key="k")

    assert asyncio.run(coroutine) == "receipt"


# The registry.


def test_a_decorated_function_can_be_called_with_a_payload_alone(kinds):
    @kinds("receipt", queue="email", payload=Data)
    async def receipt(lease, payload):
        """Send a receipt."""
        return lease, payload

    assert asyncio.run(receipt(SimpleNamespace(), Data(1)))[1] == Data(1)
    assert receipt.__doc__ == "Send a receipt."
    assert repr(receipt) == "<Kind receipt of queue email>"


def test_kinds_are_a_mapping_of_what_was_registered(kinds, kind):
    receipt = kind()

    assert isinstance(receipt, Kind)
    assert dict(kinds) == {"receipt": receipt}


def test_a_second_handler_of_a_kind_is_refused_and_the_first_is_named(kind, kinds):
    kind()

    with pytest.raises(InvalidArgument, match=r"kind receipt has a handler: .*lambda"):
        kind()
    assert len(kinds) == 1


@pytest.mark.parametrize("func", [lambda: 0, lambda _: 0, lambda _, __, ___: 0])
def test_a_function_of_other_than_two_arguments_is_refused(func, kinds):
    with pytest.raises(InvalidArgument, match="must take two arguments"):
        kinds("receipt", queue="email")(func)
    assert not kinds
