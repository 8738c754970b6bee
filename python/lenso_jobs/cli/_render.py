"""How things look: to people as tables and sentences, to machines as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import ConsoleOptions, RenderableType

    from lenso_jobs import InspectedJob

# What a terminal obeys instead of showing it, or shows in another order.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class _Plain(Console):
    """Shows text and sends none of it as a command: a role's name may hold anything.

    What the encoding of the output has no sign for is shown as a question mark.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control is None and not (text.isascii() and text.isprintable()):
                text = _COMMANDS.sub("\N{REPLACEMENT CHARACTER}", text)
                text = text.encode(encoding, "replace").decode(encoding)
                yield Segment(text, segment.style)
            else:
                yield segment


# Without emoji: names of jobs may hold what looks like the code of one.
out = _Plain(highlight=False, emoji=False)
err = _Plain(stderr=True, highlight=False, emoji=False)
_WIDE = 240


def refuse(message: str, hint: str | None) -> None:
    """Say on the error stream what went wrong, and what to do next."""
    err.print("error:", message, style="bold red", markup=False, soft_wrap=True)
    if hint:
        err.print(hint, markup=False, soft_wrap=True)


def say(what: str, style: str | None = None) -> None:
    """Print one line as it is, however narrow the terminal."""
    out.print(what, style=style, markup=False, soft_wrap=True)


def say_aside(what: str) -> None:
    """Tell of what goes on, on the error stream."""
    err.print(what, style="dim", markup=False, soft_wrap=True)


def migrations(applied: Iterable[str], recorded: Iterable[str]) -> None:
    """Tell which migrations were applied now, and which had been."""
    for name in applied:
        out.print(f"applied {name}")
    for name in recorded:
        out.print(f"recorded {name}, which had been applied")


def as_is(text: str) -> None:
    """Print text for a machine to read."""
    if out.is_terminal:
        out.print(text, markup=False, soft_wrap=True, end="")
    else:
        out.file.write(text)
        out.file.flush()


def as_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object; times as RFC 3339, lengths of time in seconds."""
    out.print(json.dumps(dict(fields), default=_plain), markup=False, soft_wrap=True)


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def wide() -> Console:
    """Answer where tables go: as wide as they are, where that is no terminal."""
    if out.is_terminal:
        return out
    return _Plain(file=out.file, width=_WIDE, highlight=False, emoji=False)


def evidence(job: InspectedJob, *, machine: bool = False, indent: int = 0) -> None:
    """Print what inspect answers."""
    fields = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in asdict(job).items()
    }
    if machine:
        as_json(fields)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if value is not None:
            table.add_row(name, Text(str(value)))
    out.print(Padding(table, (0, 0, 0, indent)))
