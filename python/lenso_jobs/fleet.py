"""The document of a fleet of Instances, and the shard of a key."""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from lenso_jobs import _given
from lenso_jobs.config import Configuration, Document, Reference, unique
from lenso_jobs.errors import InvalidArgument

MOST_SHARDS = 256


def _is_power_of_two(number: int) -> bool:
    return 1 <= number <= MOST_SHARDS and number & (number - 1) == 0


def _shards(references: tuple[str, ...]) -> tuple[str, ...]:
    if not _is_power_of_two(len(references)):
        raise ValueError(
            f"must be 1, 2, 4, ... {MOST_SHARDS} shards, a power of two, not "
            f"{len(references)}"
        )
    return references


class Fleet(Document):
    """Instances that share one document, each on its own server, and a router.

    The router is the database of ``instance.database_url_secret``. Like that, ``shards``
    are references to secrets: the URL of the administrator of each shard. The number of
    shards is chosen once. ``passwords`` gives, for callers of the Instance, references
    to the passwords by which the router logs in to the shards as that caller.
    """

    instance: Configuration
    shards: Annotated[
        tuple[Reference, ...],
        AfterValidator(unique),
        AfterValidator(_shards),
        Field(strict=False),
    ]
    passwords: dict[str, Reference] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _is_of_a_fleet(cls, fields: object) -> object:
        if isinstance(fields, dict) and "schema" in fields and "instance" not in fields:
            raise ValueError(
                "is that of one Instance: put it into the field instance, and name the "
                "shards"
            )
        return fields

    @model_validator(mode="after")
    def _holds_together(self) -> Fleet:
        if self.instance.database_url_secret in self.shards:
            raise ValueError(
                "shards must not name the router, instance.database_url_secret"
            )
        strangers = sorted(
            set(self.passwords).difference(*self.instance.callers.values())
        )
        if strangers:
            raise ValueError(
                f"passwords names {strangers[0]}, which instance does not declare as a caller"
            )
        return self

    def shard(self, number: int) -> Configuration:
        """Return the document of one shard.

        Args:
            number: The shard, from 0.

        Returns:
            The Instance's document with the shard's secret.

        Raises:
            InvalidArgument: There is no such shard.
        """
        if isinstance(number, bool) or number not in range(len(self.shards)):
            raise InvalidArgument(f"number must be from 0 to {len(self.shards) - 1}")
        secret = {"database_url_secret": self.shards[number]}
        return self.instance.model_copy(update=secret)


def shard_of(key: str, shards: int) -> int:
    """Return the shard of an idempotency key, as the router of a fleet does.

    A producer that connects to the shards itself calls it to choose the right one.

    Args:
        key: The job's idempotency key.
        shards: The number of shards of the fleet: a power of two, from 1 to 256.

    Returns:
        The number of the shard, from 0.

    Raises:
        InvalidArgument: The key is no string, or the number is no power of two.
    """
    if not isinstance(key, str):
        raise InvalidArgument(f"key must be a string, not {_given.kind(key)}")
    if type(shards) is not int or not _is_power_of_two(shards):
        raise InvalidArgument(f"shards must be a power of two, from 1 to {MOST_SHARDS}")
    try:
        digest = sha256(key.encode()).digest()
    except UnicodeEncodeError:
        raise InvalidArgument("key must be valid Unicode") from None
    return int.from_bytes(digest[:4]) & (shards - 1)
