"""Between Python values and what PostgreSQL can store; refuses before any SQL."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from psycopg.adapt import Dumper, Loader
from psycopg.pq import Format

from lenso_jobs.errors import InvalidJob, JobsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.abc import AdaptContext, Buffer

_INT4 = range(-(2**31), 2**31)
# A NUL is always escaped by the encoder; the escape of a backslash before it means that
# the text holds those six characters and no NUL.
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
# 128 levels below the payload itself; PostgreSQL's parser fails far beyond.
_DEEPEST = 129
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]')


class UtcLoader(Loader):
    """Reads timestamptz as aware UTC, whatever the session's TimeZone and DateStyle.

    The binary form is microseconds since 2000-01-01 UTC:
    https://www.postgresql.org/docs/current/datatype-datetime.html
    """

    format = Format.BINARY
    _EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

    def load(self, data: Buffer) -> datetime:
        """Decode eight big-endian bytes."""
        microseconds = int.from_bytes(data, "big", signed=True)
        return self._EPOCH + timedelta(microseconds=microseconds)


class RawJsonLoader(Loader):
    """Leaves jsonb as the UTF-8 of its text, to be decoded one job at a time."""

    format = Format.BINARY

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        encoding = self.connection.info.encoding if self.connection else "utf-8"
        self._foreign = None if encoding in {"utf-8", "ascii"} else encoding

    def load(self, data: Buffer) -> bytes:
        """Drop the version byte."""
        text = bytes(data[1:])
        return text.decode(self._foreign).encode() if self._foreign else text


class Utf8Loader(Loader):
    """Reads text where the connection promises no encoding: the Instance's is UTF-8."""

    format = Format.BINARY

    def load(self, data: Buffer) -> str:
        """Decode."""
        return bytes(data).decode()


class JsonText(str):
    """JSON, as text that any connection can carry."""

    __slots__ = ()


class AsciiDumper(Dumper):
    """Writes JSON in ASCII, for a connection whose encoding may lack a character."""

    def dump(self, obj: str) -> bytes:
        """Escape what is beyond."""
        return _BEYOND_ASCII.sub(_escaped, obj).encode("ascii")


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def register_adapters(context: AdaptContext) -> None:
    """Give a cursor the adapters above, and its connection none."""
    adapters = context.adapters
    encoding = context.connection.info.encoding if context.connection else "utf-8"
    if encoding != "utf-8":
        adapters.register_dumper(JsonText, AsciiDumper)
    if encoding == "ascii":
        adapters.register_loader("text", Utf8Loader)
    adapters.register_loader("timestamptz", UtcLoader)
    adapters.register_loader("jsonb", RawJsonLoader)


def text(value: str | None, error: type[JobsError], argument: str) -> str | None:
    """Refuse what PostgreSQL's text cannot hold; NULL is the server's to refuse."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise error(f"{argument} must be text")
    if "\0" in value:
        raise error(f"{argument} must not hold a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise error(f"{argument} must not hold a lone surrogate") from None
    return value


def text_or_null(value: str | None) -> str | None:
    """Make of an unusable item of a batch one that the server refuses by itself."""
    try:
        return text(value, InvalidJob, "")
    except InvalidJob:
        return None


def integer(value: int | None, error: type[JobsError], argument: str) -> int | None:
    """Refuse what is no 4-byte integer; NULL is the server's to refuse."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(f"{argument} must be a whole number within 4 bytes")
    number = int(value)  # a range searches for a kind of int one by one
    if number not in _INT4:
        raise error(f"{argument} must be a whole number within 4 bytes")
    return number


def boolean(value: bool | None, error: type[JobsError], argument: str) -> bool | None:
    """Refuse what is neither True nor False; NULL is the server's to refuse."""
    if value is not None and not isinstance(value, bool):
        raise error(f"{argument} must be True or False")
    return value


def instant(
    value: datetime | None,
    error: type[JobsError] = InvalidJob,
    argument: str = "available_at",
) -> datetime | None:
    """Refuse a time that does not say where it is noon."""
    if value is None:
        return None
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise error(f"{argument} must be an aware datetime")
    return value


def job_id(value: UUID | str | None, error: type[JobsError]) -> UUID | None:
    """Accept a UUID or its text; NULL is the server's to refuse."""
    if value is None or isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (AttributeError, TypeError, ValueError):
        raise error("job_id must be a UUID") from None


def payload(value: Mapping[str, Any] | None) -> str | None:
    """Encode a payload as JSON that PostgreSQL will accept.

    Tuples become arrays and keys become strings, as in the json module. NaN, infinities,
    NUL, lone surrogates, endless nesting and unknown types are refused; none of the
    messages shows the value.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidJob("payload must be a mapping")
    try:
        encoded = _ENCODER.encode(dict(value))
        encoded.encode()
    except UnicodeEncodeError:
        raise InvalidJob("payload must not hold a lone surrogate") from None
    except RecursionError:
        raise InvalidJob("payload must be nested at most 128 levels deep") from None
    except (TypeError, ValueError):
        raise InvalidJob(
            "payload must be made of what JSON knows, without NaN and infinities"
        ) from None
    if "\\u0000" in encoded and _ESCAPED_NUL.search(encoded):
        raise InvalidJob("payload must not hold a NUL character")
    if _is_too_deep(encoded):
        raise InvalidJob("payload must be nested at most 128 levels deep")
    return JsonText(encoded)


def _is_too_deep(encoded: str) -> bool:
    if encoded.count("{") + encoded.count("[") <= _DEEPEST:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(encoded):
        if match[0] in "{[":
            depth += 1
            if depth > _DEEPEST:
                return True
        elif match[0] in "}]":
            depth -= 1
    return False


def jobs(items: Sequence[object] | None) -> str | None:
    """Encode the items of enqueue_many as one JSON array.

    An item that cannot be encoded becomes null, which the server answers as
    invalid_job: it spoils none of its neighbours.
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
            moment = instant(fields["available_at"])
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
