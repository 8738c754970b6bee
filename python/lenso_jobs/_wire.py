"""Checks and adapters between Python values and what PostgreSQL can store.

A check takes a value, the exception to raise and the name of the argument, and returns
the value to send. The server refuses NULL.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from psycopg.adapt import Dumper, Loader
from psycopg.pq import Format

from lenso_jobs._given import kind
from lenso_jobs.errors import InvalidJob, JobsError

if TYPE_CHECKING:
    from psycopg.abc import AdaptContext, Buffer

    Refusal = type[JobsError]

_INT4 = range(-(2**31), 2**31)
# 128 levels below the payload itself; PostgreSQL's parser fails far beyond.
_DEEPEST = 129
_TOO_DEEP = "must be nested at most 128 levels deep"
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_LONGEST_NAME = 40


class UtcLoader(Loader):
    """Reads timestamptz as aware UTC, with any TimeZone and DateStyle of the session.

    The binary form is microseconds since 2000-01-01 UTC:
    https://www.postgresql.org/docs/current/datatype-datetime.html
    """

    format = Format.BINARY
    _EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

    def load(self, data: Buffer) -> datetime:
        """Decode eight big-endian bytes."""
        microseconds = int.from_bytes(data, "big", signed=True)
        return self._EPOCH + timedelta(microseconds=microseconds)


class JsonLoader(Loader):
    """Reads jsonb without the decoder that an application may give to psycopg."""

    format = Format.BINARY

    def load(self, data: Buffer) -> Any:  # noqa: ANN401 - any JSON
        """Decode what follows the version byte."""
        text = bytes(data[1:])
        encoding = self.connection.info.encoding if self.connection else "utf-8"
        return json.loads(text if encoding == "ascii" else text.decode(encoding))


class Utf8Loader(Loader):
    """Reads text on a connection without an encoding: the Instance's is UTF-8."""

    format = Format.BINARY

    def load(self, data: Buffer) -> str:
        """Decode."""
        return bytes(data).decode()


class JsonText(str):
    """JSON as text, which any connection can carry."""

    __slots__ = ()


class AsciiDumper(Dumper):
    """Writes JSON in ASCII, on a connection whose encoding may lack a character."""

    def dump(self, obj: str) -> bytes:
        """Escape all characters beyond ASCII."""
        escaped = _BEYOND_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], obj)
        return escaped.encode("ascii")


def register_adapters(context: AdaptContext) -> None:
    """Give a cursor the adapters above. Its connection keeps its own."""
    adapters = context.adapters
    encoding = context.connection.info.encoding if context.connection else "utf-8"
    if encoding != "utf-8":
        adapters.register_dumper(JsonText, AsciiDumper)
    if encoding == "ascii":
        adapters.register_loader("text", Utf8Loader)
    adapters.register_loader("timestamptz", UtcLoader)
    adapters.register_loader("jsonb", JsonLoader)


def text(value: str | None, error: Refusal, argument: str) -> str | None:
    """Refuse a string that PostgreSQL's text cannot hold."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise error(f"{argument} must be a string, not {kind(value)}")
    if "\0" in value:
        raise error(f"{argument} must not hold a NUL character")
    if not value.isascii() and _is_surrogate(value):
        raise error(f"{argument} must not hold a lone surrogate")
    return value


def integer(value: int | None, error: Refusal, argument: str) -> int | None:
    """Refuse a number that is no 4-byte integer."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(f"{argument} must be a whole number, not {kind(value)}")
    number = int(value)  # a range searches for a subclass of int one by one
    if number not in _INT4:
        raise error(f"{argument} must be a whole number of at most 4 bytes")
    return number


def boolean(value: bool | None, error: Refusal, argument: str) -> bool | None:
    """Refuse a value other than True and False."""
    if value is not None and not isinstance(value, bool):
        raise error(f"{argument} must be True or False, not {kind(value)}")
    return value


def instant(value: datetime | None, error: Refusal, argument: str) -> datetime | None:
    """Refuse a naive datetime."""
    if value is None:
        return None
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise error(f"{argument} must be an aware datetime")
    return value


def delay(value: float | timedelta | None, error: Refusal, argument: str) -> int | None:
    """Return whole seconds, rounded up, from seconds or a timedelta."""
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise error(f"{argument} must be seconds or a timedelta, not {kind(value)}")
    if isinstance(seconds, float) and not math.isfinite(seconds):
        raise error(f"{argument} must be finite")
    return integer(math.ceil(seconds), error, argument)


def job_id(
    value: UUID | str | None, error: Refusal, argument: str = "job_id"
) -> UUID | None:
    """Accept a UUID or its text."""
    if value is None or isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (AttributeError, TypeError, ValueError):
        raise error(f"{argument} must be a UUID") from None


def payload(
    value: Mapping[str, Any] | None,
    error: Refusal = InvalidJob,
    argument: str = "payload",
) -> str | None:
    """Encode a payload as JSON that PostgreSQL accepts.

    Tuples become arrays and keys become strings, as in the json module. A refusal names
    the path of the value and its type, and never shows the value.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise error(f"{argument} must be a mapping, not {kind(value)}")
    try:
        encoded = _ENCODER.encode(dict(value))
        encoded.encode()
    except (TypeError, ValueError, RecursionError):
        encoded = None
    if (
        encoded is None
        # Signs of what PostgreSQL refuses, which are rare in what it takes.
        or "\\u0000" in encoded
        or encoded.count("{") + encoded.count("[") > _DEEPEST
    ):
        fault = _fault(dict(value), argument)
        if fault is not None or encoded is None:
            raise error(f"{argument} {fault or 'must be made of JSON types'}")
    return JsonText(encoded)


def _fault(value: object, path: str, depth: int = 1) -> str | None:
    """Tell what is wrong with the first value that JSON or PostgreSQL cannot hold."""
    fault = None
    if isinstance(value, dict | list | tuple):
        return _TOO_DEEP if depth > _DEEPEST else _fault_within(value, path, depth + 1)
    if isinstance(value, str):
        if "\0" in value:
            fault = "must not hold a NUL character"
        elif _is_surrogate(value):
            fault = "must not hold a lone surrogate"
    elif isinstance(value, float):
        fault = None if math.isfinite(value) else "must hold finite numbers"
    elif isinstance(value, int):
        fault = "must hold shorter numbers" if _is_too_long(value) else None
    elif value is not None:
        fault = "must be made of JSON types, perhaps by str() or list()"
    return fault and f"{fault}: {path} is of type {kind(value)}"


def _fault_within(value: Any, path: str, depth: int) -> str | None:  # noqa: ANN401
    is_dict = isinstance(value, dict)
    for at, (key, item) in enumerate(value.items() if is_dict else enumerate(value), 1):
        step, fault = f"[{key}]", None
        if is_dict:
            # A key that does not look like the name of a field may be data.
            is_name = str.isidentifier(str(key)) and len(str(key)) <= _LONGEST_NAME
            step = f".{key}" if is_name else f"[key {at}]"
            fault = (
                _fault(key, f"a key of {path}")
                if isinstance(key, str | int | float | None)
                else f"must have string keys: {path} has one of type {kind(key)}"
            )
        fault = fault or _fault(item, path + step, depth)
        if fault is not None:
            return fault
    return None


def _is_too_long(number: int) -> bool:
    try:
        return not int.__repr__(number)
    except ValueError:
        return True


def _is_surrogate(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def jobs(items: Sequence[object] | None) -> str | None:
    """Encode the items of enqueue_many as one JSON array.

    An item that cannot be encoded becomes null. The server returns invalid_job for it,
    and its neighbours are enqueued.
    """
    if items is None:
        return None
    # Nearly always all of them can be encoded together, at a third of the cost.
    if all(map(_is_plain, items)):
        try:
            encoded = _ENCODER.encode(items)
            encoded.encode()
        except (TypeError, ValueError, RecursionError):
            pass
        else:
            if "\\u0000" not in encoded:
                return JsonText(encoded)
    return JsonText(f"[{','.join(map(_item, items))}]")


def _is_plain(item: object) -> bool:
    return (
        type(item) is dict
        and item.get("available_at") is None
        and type(item.get("max_attempts", 3)) is int
    )


def _item(item: object) -> str:
    if not isinstance(item, Mapping):
        return "null"
    try:
        fields = {key: value for key, value in item.items() if key != "payload"}
        if "available_at" in fields:
            moment = instant(fields["available_at"], InvalidJob, "available_at")
            fields["available_at"] = moment and moment.astimezone(UTC).isoformat()
        if "max_attempts" in fields:
            integer(fields["max_attempts"], InvalidJob, "max_attempts")
        head = payload(fields)
        body = payload(item["payload"]) if "payload" in item else None
    except (InvalidJob, OverflowError):
        return "null"
    if head is None or body is None:
        return "null"
    return f'{{"payload":{body}{"," if fields else ""}{head[1:]}'
