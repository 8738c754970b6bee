"""The configuration document of one Jobs Instance, validated before anything is touched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from lenso_jobs._given import role_fault

_SCHEMA = re.compile(r"[a-z][a-z0-9_]{0,47}")
_QUEUE = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_REFERENCE = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_KINDS = ("owner", "producer", "worker", "observer", "operator")


class ConfigurationError(ValueError):
    """The document is malformed. Each line of the message names a field and its bound."""


def _schema(name: str) -> str:
    if not _SCHEMA.fullmatch(name):
        raise ValueError("must match ^[a-z][a-z0-9_]{0,47}$")
    if name.startswith("pg_") or name in {"public", "information_schema"}:
        raise ValueError("is one of PostgreSQL's own names")
    return name


def _reference(reference: str) -> str:
    if not 1 <= len(reference) <= 256 or not _REFERENCE.fullmatch(reference):  # noqa: PLR2004
        raise ValueError(
            "must be 1 to 256 of A-Z a-z 0-9 . _ / - without stray slashes"
        )
    if {".", ".."} & set(reference.split("/")):
        raise ValueError("must have no . or .. segment")
    return reference


def _queue(name: str) -> str:
    if not _QUEUE.fullmatch(name):
        raise ValueError("must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -")
    return name


def _caller(name: str) -> str:
    fault = role_fault(name)
    if fault is not None:
        raise ValueError(fault)
    return name


def unique(names: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a list that names anything twice."""
    if len(set(names)) != len(names):
        raise ValueError("must not name anything twice")
    return names


Schema = Annotated[str, AfterValidator(_schema)]
Reference = Annotated[str, AfterValidator(_reference)]
Callers = Annotated[
    tuple[Annotated[str, AfterValidator(_caller)], ...],
    AfterValidator(unique),
    Field(strict=False),
]


class Document(BaseModel):
    """A JSON document, validated when it is read."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, hide_input_in_errors=True
    )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a document.

        Returns:
            The validated document.

        Raises:
            ConfigurationError: It is no JSON, a field is unknown or named twice, or a
                value is out of bounds.
        """
        try:
            fields = json.loads(text, object_pairs_hook=_no_field_twice)
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ConfigurationError(
                "\n".join(
                    f"{'.'.join(map(str, problem['loc'])) or 'document'}: "
                    f"{problem['msg'].removeprefix('Value error, ')}"
                    for problem in error.errors()
                )
            ) from None
        except ConfigurationError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"document: is not JSON: {error}") from None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a document from a file.

        Returns:
            The validated document.

        Raises:
            ConfigurationError: As from_json, or the file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{path}: cannot be read: {error}") from None
        return cls.from_json(text)


class Configuration(Document):
    """The schema, the policy, the queues and the callers of one Jobs Instance.

    Durations are whole seconds. ``database_url_secret`` is a reference that a resolver
    of ``lenso_jobs.secrets`` turns into the URL. The document never holds the URL.
    """

    # The schema is an attribute that older pydantic reserves a method for.
    schema_: Schema = Field(alias="schema")
    database_url_secret: Reference
    lease_seconds: int = Field(ge=1, le=3600)
    retry_base_seconds: int = Field(ge=1, le=86400)
    retry_max_seconds: int = Field(ge=1, le=86400)
    queues: Annotated[
        tuple[Annotated[str, AfterValidator(_queue)], ...],
        AfterValidator(unique),
        Field(min_length=1, strict=False),
    ]
    producer_instances: Annotated[Callers, Field(min_length=1)]
    worker_instances: Annotated[Callers, Field(min_length=1)]
    observer_instances: Callers = ()
    retry_jitter: float = Field(default=0, ge=0, le=1)
    notify: bool = True
    retention_seconds: int | None = Field(default=None, ge=1, le=3_155_760_000)
    role_prefix: Schema | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_of_an_instance(cls, fields: object) -> object:
        if isinstance(fields, dict) and "shards" in fields and "instance" in fields:
            raise ValueError(
                "is that of a fleet: use the commands of lenso-jobs fleet, or save its "
                "part instance as a document"
            )
        return fields

    @model_validator(mode="after")
    def _holds_together(self) -> Configuration:
        if self.retry_base_seconds > self.retry_max_seconds:
            raise ValueError("retry_base_seconds must not be above retry_max_seconds")
        groups = {f"{self.prefix}_{kind}" for kind in _KINDS}
        taken = groups & set().union(*self.callers.values())
        if taken:
            raise ValueError(
                f"{min(taken)} is the Instance's own role and cannot be a caller"
            )
        return self

    @property
    def prefix(self) -> str:
        """The beginning of the names of the Instance's roles."""
        return self.role_prefix or self.schema_

    @property
    def owner(self) -> str:
        """The role that owns the schema and everything in it."""
        return f"{self.prefix}_owner"

    @property
    def callers(self) -> dict[str, tuple[str, ...]]:
        """The caller Instances, by the kind they are declared as."""
        return {
            "producer": self.producer_instances,
            "worker": self.worker_instances,
            "observer": self.observer_instances,
        }

    def document(self) -> str:
        """Return the document as JSON, without the fields that were left out."""
        return self.model_dump_json(by_alias=True, exclude_unset=True)


def _no_field_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ConfigurationError(f"{name}: must not be named twice")
        fields[name] = value
    return fields
