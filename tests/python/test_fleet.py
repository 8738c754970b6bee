"""The document of a fleet, and the shard of a key."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from lenso_jobs import (
    Configuration,
    ConfigurationError,
    Fleet,
    InvalidArgument,
    shard_of,
)


@pytest.fixture
def fleet_document(document):
    """A document of two shards, with changes; ``...`` leaves a field out."""

    def fleet_document(**changes):
        fields = {
            "instance": json.loads(document()),
            "shards": ["jobs/shard-0", "jobs/shard-1"],
        } | changes
        return json.dumps({k: v for k, v in fields.items() if v is not ...})

    return fleet_document


@pytest.mark.parametrize("number", [1, 2, 4, 256])
def test_a_power_of_two_of_shards_is_accepted(number, fleet_document):
    shards = [f"jobs/{n}" for n in range(number)]
    assert Fleet.from_json(fleet_document(shards=shards)).shards == tuple(shards)


POWER = "shards: must be 1, 2, 4, ... 256 shards, a power of two, not"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("shards", [], f"{POWER} 0"),
        ("shards", ["a", "b", "c"], f"{POWER} 3"),
        ("shards", [f"s{n}" for n in range(512)], f"{POWER} 512"),
        ("shards", ["a", "a"], "shards: must not name anything twice"),
        ("shards", ["a", "../b"], "shards.1: must have no . or .. segment"),
        ("shards", ["a", 1], "shards.1: Input should be a valid string"),
        ("shards", ["jobs/database-url", "b"], "shards must not name the router"),
        ("shards", ..., "shards: Field required"),
        ("instance", {"schema": "a"}, "instance.queues: Field required"),
        ("passwords", {"stranger": "a"}, "passwords names stranger, which instance"),
        ("passwords", {"accounts": "/a"}, "passwords.accounts: must be 1 to 256"),
        ("passwords", ["accounts"], "passwords: Input should be a valid dictionary"),
        ("routers", 1, "routers: Extra inputs are not permitted"),
    ],
)
def test_a_document_out_of_bounds_is_refused_by_field_and_bound(
    field, value, message, fleet_document
):
    with pytest.raises(ConfigurationError) as caught:
        Fleet.from_json(fleet_document(**{field: value}))
    assert message in str(caught.value)


def test_the_document_of_an_instance_is_refused_with_what_to_do(document):
    with pytest.raises(ConfigurationError) as caught:
        Fleet.from_json(document())
    assert str(caught.value) == (
        "document: is that of one Instance: put it into the field instance, and name the "
        "shards"
    )


def test_the_document_of_a_fleet_is_refused_as_one_of_an_instance(fleet_document):
    with pytest.raises(ConfigurationError) as caught:
        Configuration.from_json(fleet_document())
    assert str(caught.value).startswith(
        "document: is that of a fleet: use the commands of lenso-jobs fleet"
    )


def test_a_refusal_shows_no_value_of_the_document(fleet_document):
    with pytest.raises(ConfigurationError) as caught:
        Fleet.from_json(fleet_document(passwords={"accounts": "se cret"}))
    assert "se cret" not in str(caught.value)


def test_a_file_is_read_as_its_text_is(fleet_document, tmp_path):
    path = tmp_path / "fleet.json"
    path.write_text(fleet_document(), encoding="utf-8")
    assert Fleet.from_file(path) == Fleet.from_json(fleet_document())


def test_a_shard_has_the_instance_s_document_and_its_own_secret(fleet_document):
    fleet = Fleet.from_json(fleet_document())
    shard = fleet.shard(1)
    assert shard.database_url_secret == "jobs/shard-1"
    as_router = {"database_url_secret": fleet.instance.database_url_secret}
    assert shard.model_copy(update=as_router) == fleet.instance
    assert '"jobs/shard-1"' in shard.document()


@pytest.mark.parametrize("number", [-1, 2, True, "0", None])
def test_a_shard_that_the_fleet_has_not_is_refused(number, fleet_document):
    with pytest.raises(InvalidArgument, match="number must be from 0 to 1"):
        Fleet.from_json(fleet_document()).shard(number)


@pytest.mark.parametrize("key", ["", "order-1", "ключ", "\U0001f600", "a\0b"])
@pytest.mark.parametrize("shards", [1, 2, 64, 256])
def test_the_shard_is_the_first_four_bytes_of_the_sha_256_modulo_the_number(
    key, shards
):
    first = sha256(key.encode()).hexdigest()[:8]
    assert shard_of(key, shards) == int(first, 16) % shards


@pytest.mark.parametrize(
    ("key", "shards", "message"),
    [
        (b"a", 2, "key must be a string, not bytes"),
        (None, 2, "key must be a string, not None"),
        ("\ud800", 2, "key must be valid Unicode"),
        ("a", 0, "shards must be a power of two, from 1 to 256"),
        ("a", 3, "shards must be a power of two"),
        ("a", 512, "shards must be a power of two"),
        ("a", True, "shards must be a power of two"),
        ("a", 2.0, "shards must be a power of two"),
    ],
)
def test_a_key_or_a_number_that_has_no_shard_is_refused(key, shards, message):
    with pytest.raises(InvalidArgument, match=message):
        shard_of(key, shards)
