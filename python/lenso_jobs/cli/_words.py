"""Numbers, ages and times, for people."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import typer

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
# So many weeks are within what a timedelta holds.
_AGE = re.compile(r"(\d{1,7})([smhdw])")


@dataclass(frozen=True, slots=True)
class Moment:
    """A time on the command line: an instant, or so long ago by the server's clock."""

    told: datetime | timedelta

    def at(self, now: datetime) -> datetime:
        """Tell which instant is meant."""
        if isinstance(self.told, datetime):
            return self.told
        try:
            return now - self.told
        except OverflowError:
            raise typer.BadParameter("that is before the year 1") from None


def at(told: Moment | None, now: datetime) -> datetime | None:
    """Tell which instant is meant, if any."""
    return None if told is None else told.at(now)


def moment(text: str) -> Moment:
    """Read an RFC 3339 time, or an age such as 90s, 30m, 12h, 7d, 2w."""
    age = _AGE.fullmatch(text)
    if age:
        return Moment(int(age[1]) * timedelta(seconds=_UNITS[age[2]]))
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.utcoffset() is None:
        raise typer.BadParameter(
            f"{text} is neither a time with an offset, such as 2026-01-31T18:00:00Z, "
            "nor an age, such as 90s, 30m, 12h, 7d or 2w"
        )
    return Moment(instant)


def length(text: str) -> Moment:
    """Read an age, and nothing else."""
    if not _AGE.fullmatch(text):
        raise typer.BadParameter(f"{text} is no age, such as 90s, 30m, 12h, 7d or 2w")
    return moment(text)


def number(count: float, *, is_estimate: bool = False) -> str:
    """Write a count; ~ where it was scaled up from a sample."""
    return f"{'~' if is_estimate and count else ''}{count:,}"


def jobs(count: int) -> str:
    """Write how many jobs."""
    return f"{count:,} job{'' if count == 1 else 's'}"


def age(length: timedelta) -> str:
    """Write a length of time by its two largest units."""
    seconds = max(0, int(length.total_seconds()))
    for large, small in (("d", "h"), ("h", "m"), ("m", "s")):
        if seconds >= _UNITS[large]:
            many, rest = divmod(seconds, _UNITS[large])
            return f"{many:,}{large} {rest // _UNITS[small]}{small}"
    return f"{seconds}s"


def time(instant: datetime) -> str:
    """Write a time to the second."""
    return f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def ago(instant: datetime, now: datetime) -> str:
    """Write a time, and how long ago it was or in how long it will be."""
    distance = now - instant
    if distance >= timedelta(0):
        return f"{time(instant)} ({age(distance)} ago)"
    return f"{time(instant)} (in {age(-distance)})"


def rate(count: int, length: timedelta) -> str:
    """Write so many in such a time as a rate."""
    seconds = length.total_seconds()
    if not count or seconds <= 0:
        return "0/s"
    each = count / seconds
    if each >= 100:  # noqa: PLR2004 - more digits say nothing
        return f"{each:,.0f}/s"
    return f"{each:.1f}/s" if each >= 1 else f"{each * 60:.1f}/min"
