"""How things look: to people as tables and sentences, to machines as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lenso_jobs import InspectedJob

# Without emoji: names of jobs may hold what looks like the code of one.
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


def refuse(message: str, hint: str | None) -> None:
    """Say on the error stream what went wrong, and what to do next."""
    err.print("error:", message, style="bold red", markup=False, soft_wrap=True)
    if hint:
        err.print(hint, markup=False, soft_wrap=True)


def say(what: str, style: str | None = None) -> None:
    """Print one line as it is, however narrow the terminal."""
    out.print(what, style=style, markup=False, soft_wrap=True)


def as_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object; times as RFC 3339."""
    out.print(json.dumps(dict(fields), default=str), markup=False, soft_wrap=True)


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
