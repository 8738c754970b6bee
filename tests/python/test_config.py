from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from lenso_jobs.config import Configuration, ConfigurationError

NAME_TAKEN = "is one of PostgreSQL's own names"
REQUIRED = (
    "schema",
    "database_url_secret",
    "lease_seconds",
    "retry_base_seconds",
    "retry_max_seconds",
    "queues",
    "producer_instances",
    "worker_instances",
)


@pytest.fixture
def refusal(document):
    """Read a document that is to be refused, and return the message."""

    def refusal(**changes):
        with pytest.raises(ConfigurationError) as caught:
            Configuration.from_json(document(**changes))
        return str(caught.value)

    return refusal


GOOD = [
    ("schema", "a"),
    ("schema", "jobs_2"),
    ("schema", "a" * 48),
    ("schema", "pgjobs"),
    ("role_prefix", "a" * 48),
    ("role_prefix", None),
    ("database_url_secret", "a"),
    ("database_url_secret", "A.b_c-9/d"),
    ("database_url_secret", "a" * 256),
    ("database_url_secret", "..."),
    ("database_url_secret", ".hidden/..data"),
    ("lease_seconds", 1),
    ("lease_seconds", 3600),
    ("retry_base_seconds", 1),
    ("retry_base_seconds", 300),
    ("retry_max_seconds", 86400),
    ("retry_max_seconds", 5),
    ("queues", ["a"]),
    ("queues", ["A-Z.a:z/0_9", "a" * 128]),
    ("queues", [f"q{n}" for n in range(500)]),
    ("producer_instances", ["a"]),
    ("producer_instances", ["ü" * 31, "x" * 63]),
    ("worker_instances", ["pgbouncer", "Nones", "a b;'\""]),
    ("observer_instances", []),
    ("observer_instances", ["accounts"]),
    ("retry_jitter", 0),
    ("retry_jitter", 1),
    ("retry_jitter", 0.25),
    ("notify", False),
    ("retention_seconds", None),
    ("retention_seconds", 1),
    ("retention_seconds", 3_155_760_000),
]
CHARACTERS = "must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -"
PATTERN = "must match ^[a-z][a-z0-9_]{0,47}$"
REFERENCE = "must be 1 to 256 of A-Z a-z 0-9 . _ / - without stray slashes"
ROLE = "must be a name of 1 to 63 bytes"
RESERVED = "must not be none, public or pg_*"
BAD = [
    *(
        (field, value, PATTERN)
        for field in ("schema", "role_prefix")
        for value in ("", "Jobs", "1a", "_a", "a-b", "a b", "a" * 49, "a\n", "é")
    ),
    *(
        (field, value, NAME_TAKEN)
        for field in ("schema", "role_prefix")
        for value in ("public", "information_schema", "pg_jobs")
    ),
    *(
        ("database_url_secret", value, REFERENCE)
        for value in ("", "/a", "a/", "a//b", "a b", "a\n", "ü", "a" * 257, "a\\b")
    ),
    *(
        ("database_url_secret", value, "must have no . or .. segment")
        for value in (".", "..", "../a", "a/../b", "a/.", "./a")
    ),
    ("lease_seconds", 0, "greater than or equal to 1"),
    ("lease_seconds", 3601, "less than or equal to 3600"),
    ("retry_base_seconds", 0, "greater than or equal to 1"),
    ("retry_base_seconds", 86401, "less than or equal to 86400"),
    ("retry_max_seconds", 0, "greater than or equal to 1"),
    ("retry_max_seconds", 86401, "less than or equal to 86400"),
    *(
        (field, value, "valid integer")
        for field in ("lease_seconds", "retry_base_seconds", "retry_max_seconds")
        for value in (True, "5", 5.5, 5.0, None, [5])
    ),
    ("queues", [], "at least 1 item"),
    ("queues", ["a", "b", "a"], "must not name anything twice"),
    ("queues", "email", "valid tuple"),
    ("queues", None, "valid tuple"),
    ("queues", {"a": 1}, "valid tuple"),
    *(("queues", ["a", value], CHARACTERS) for value in ("", "a b", "a" * 129, "a\n")),
    *(("queues", [value], "valid string") for value in (1, None, True, ["a"])),
    *(
        (field, [], "at least 1 item")
        for field in ("producer_instances", "worker_instances")
    ),
    *(
        case
        for field in ("producer_instances", "worker_instances", "observer_instances")
        for case in (
            (field, ["a", "a"], "must not name anything twice"),
            (field, None, "valid tuple"),
            (field, [""], ROLE),
            (field, ["x" * 64], ROLE),
            (field, ["ü" * 32], ROLE),
            (field, ["a\0b"], ROLE),
            (field, ["none"], RESERVED),
            (field, ["Public"], RESERVED),
            (field, ["pg_monitor"], RESERVED),
            (field, ["PG_x"], RESERVED),
            (field, ["\ud800"], "valid"),
            (field, [5], "valid string"),
        )
    ),
    ("retry_jitter", -0.001, "greater than or equal to 0"),
    ("retry_jitter", 1.001, "less than or equal to 1"),
    ("retry_jitter", float("nan"), "than or equal to"),
    ("retry_jitter", float("inf"), "less than or equal to 1"),
    ("retry_jitter", "0.5", "valid number"),
    ("retry_jitter", True, "valid number"),
    ("notify", 1, "valid boolean"),
    ("notify", "true", "valid boolean"),
    ("notify", None, "valid boolean"),
    ("retention_seconds", 0, "greater than or equal to 1"),
    ("retention_seconds", 3_155_760_001, "less than or equal to 3155760000"),
    ("retention_seconds", "1", "valid integer"),
]


@pytest.mark.parametrize(("field", "value"), GOOD, ids=lambda each: str(each)[:30])
def test_a_value_within_its_bound_is_accepted(field, value, document):
    configuration = Configuration.from_json(document(**{field: value}))

    attribute = "schema_" if field == "schema" else field
    stored = getattr(configuration, attribute)
    assert stored == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("field", "value", "bound"), BAD, ids=lambda each: str(each)[:30]
)
def test_a_value_out_of_bounds_is_refused_by_field_and_bound(
    field, value, bound, refusal
):
    message = refusal(**{field: value})

    assert message.startswith(field)
    assert bound in message


@pytest.mark.parametrize("field", REQUIRED)
def test_a_required_field_that_is_missing_is_named(field, refusal):
    assert refusal(**{field: ...}) == f"{field}: Field required"


def test_an_optional_part_has_the_guide_s_behaviour(document):
    configuration = Configuration.from_json(
        document(observer_instances=..., role_prefix=...)
    )

    assert configuration.observer_instances == ()
    assert configuration.retry_jitter == 0
    assert configuration.notify is True
    assert configuration.retention_seconds is None
    assert configuration.prefix == "jobs_email"
    assert configuration.owner == "jobs_email_owner"


def test_every_problem_is_printed_on_a_separate_line(refusal):
    lines = refusal(lease_seconds=0, queues=[], unknown=1).splitlines()

    assert [line.split(":")[0] for line in lines] == [
        "lease_seconds",
        "queues",
        "unknown",
    ]


@pytest.mark.parametrize("field", ["unknown", "schema_", "Schema", "prefix"])
def test_an_unknown_field_is_refused_by_name(field, refusal):
    assert refusal(**{field: 1}) == f"{field}: Extra inputs are not permitted"


def test_a_field_named_twice_is_refused_by_name(document):
    text = document().replace("{", '{"lease_seconds": 5, ', 1)

    with pytest.raises(ConfigurationError, match=r"lease_seconds: .* twice"):
        Configuration.from_json(text)


def test_a_base_above_the_maximum_is_refused(document, refusal):
    message = refusal(retry_base_seconds=301)

    assert "retry_base_seconds must not be above retry_max_seconds" in message
    assert Configuration.from_json(document(retry_base_seconds=300))


@pytest.mark.parametrize(
    "kind", ["owner", "producer", "worker", "observer", "operator"]
)
@pytest.mark.parametrize(
    "field", ["producer_instances", "worker_instances", "observer_instances"]
)
@pytest.mark.parametrize("role_prefix", ["mine", ...])
def test_an_instance_s_own_role_is_not_a_caller(role_prefix, field, kind, refusal):
    own = f"{'jobs_email' if role_prefix is ... else role_prefix}_{kind}"

    message = refusal(role_prefix=role_prefix, **{field: ["fine", own]})

    assert f"{own} is the Instance's own role" in message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "{",
        '{"a": }',
        "\ufeff{}",
        "[" * 100_000,
        '{"lease_seconds": ' + "9" * 5000 + "}",
    ],
    ids=lambda text: text[:20],
)
def test_a_value_that_is_not_json_is_refused(text):
    with pytest.raises(ConfigurationError, match="document: is not JSON"):
        Configuration.from_json(text)


@pytest.mark.parametrize("text", ["[]", "null", "5", '"text"', "true", "NaN"])
def test_json_that_is_not_an_object_is_refused(text):
    with pytest.raises(ConfigurationError, match="document: "):
        Configuration.from_json(text)


def test_a_message_never_shows_the_value(refusal):
    hush = "hush hush"

    message = refusal(
        schema=hush, database_url_secret=hush, queues=[hush], lease_seconds=hush
    )

    assert hush not in message


def test_the_document_written_is_the_document_read(document):
    for changes in ({}, {"retry_jitter": 0.5, "notify": False}, {"role_prefix": ...}):
        text = document(**changes)

        assert json.loads(Configuration.from_json(text).document()) == json.loads(text)


def test_a_configuration_is_a_frozen_value(document):
    configuration = Configuration.from_json(document())

    with pytest.raises(ValidationError, match="frozen"):
        configuration.lease_seconds = 5
    assert configuration == Configuration.from_json(document())
    assert hash(configuration) == hash(Configuration.from_json(document()))
    assert isinstance(configuration.queues, tuple)


def test_a_file_is_read_as_utf_8(document, tmp_path):
    path = tmp_path / "jobs.json"
    path.write_text(
        document(worker_instances=["müller"]).encode().decode("unicode_escape"),
        encoding="utf-8",
    )

    assert Configuration.from_file(path).worker_instances == ("müller",)
    assert Configuration.from_file(str(path)).worker_instances == ("müller",)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    garbled = tmp_path / "garbled.json"
    garbled.write_bytes(b"\xff\xfe{}")

    for path in (tmp_path / "missing.json", tmp_path, garbled):
        with pytest.raises(ConfigurationError, match="cannot be read") as caught:
            Configuration.from_file(path)
        assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("given", [None, 5, {"schema": "jobs"}, ["jobs"]])
def test_another_thing_than_a_text_or_a_path_is_not_a_document(given):
    with pytest.raises(ConfigurationError, match="document: is not JSON"):
        Configuration.from_json(given)
    if not isinstance(given, int):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            Configuration.from_file(given)


def test_a_path_with_a_nul_character_cannot_be_read():
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Configuration.from_file("jobs\0.json")
