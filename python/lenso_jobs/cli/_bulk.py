"""Acts of operators: asked for, tried out, or done in bounded calls."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import psycopg
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from lenso_jobs.cli import _render, _words
from lenso_jobs.errors import JobsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from lenso_jobs.cli._instance import Instance

MOST = 10_000
"""The most that one call takes, and the most that is counted beforehand by one."""


@dataclass(frozen=True, slots=True)
class Count:
    """How many jobs an act would take."""

    jobs: int
    is_exact: bool

    def __str__(self) -> str:
        """Say so; honestly, where there may be more."""
        return f"{'' if self.is_exact else 'at least '}{_words.jobs(self.jobs)}"


@dataclass(slots=True)
class Tally:
    """How many jobs were taken so far."""

    jobs: int = 0
    is_interrupted: bool = False


def require_terminal_or(yes: bool) -> None:
    """Refuse to change anything that nobody can be asked about."""
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter(
            "this changes jobs, and nobody is here to be asked: give --yes, or --dry-run"
        )


def ask(question: str) -> None:
    """Go on only where somebody says so."""
    code = 1
    try:
        if typer.confirm(question, err=True):
            return
    except typer.Abort as error:
        code = 130 if isinstance(error.__context__, KeyboardInterrupt) else 1
        _render.err.print()
    _render.refuse("nothing was done", None)
    raise typer.Exit(code)


def tried(instance: Instance, act: Callable[[int], int]) -> Count:
    """Count by doing one call in a transaction that is rolled back."""
    with instance.connection.transaction(force_rollback=True):
        count = int(act(MOST))
    return Count(count, is_exact=count < MOST)


def repeated(  # noqa: PLR0913 - what differs between the acts
    act: Callable[[int], int],
    what: str,
    *,
    batch: int,
    limit: int | None = None,
    total: int | None = None,
    pause: float = 0.0,
    until_none: bool = True,
) -> Tally:
    """Call again and again, each time for so many jobs, until there are no more.

    Args:
        act: One bounded call, which answers how many it took.
        what: What it does, in a word or two.
        batch: For how many a call.
        limit: For how many at most in all.
        total: How many there are, if that is known.
        pause: Seconds to wait between two calls.
        until_none: Until a call takes none; else until one takes fewer than it might,
            which also comes to an end where new ones turn up all the time.
    """
    tally = Tally()
    with _Interrupts() as interrupts, _bar(what, total) as advance:
        while limit is None or tally.jobs < limit:
            asked = batch if limit is None else min(batch, limit - tally.jobs)
            try:
                count = act(asked)
            except (psycopg.Error, JobsError, KeyboardInterrupt):
                _render.say_aside(f"{what}: {_words.jobs(tally.jobs)} until this:")
                raise
            tally.jobs += count
            advance(count)
            if count == 0 or (count < asked and not until_none):
                break
            if interrupts.stop_after(pause):
                tally.is_interrupted = True
                break
    return tally


def report(tally: Tally, done: str, *, machine: bool) -> None:
    """Say what was done; exits with 130 after an interrupt."""
    if machine:
        _render.as_json({"jobs": tally.jobs, "interrupted": tally.is_interrupted})
    else:
        _render.say(f"{done} {_words.jobs(tally.jobs)}")
    if tally.is_interrupted:
        _render.refuse("interrupted; what was done stays", None)
        raise typer.Exit(130)


def report_count(count: Count, would: str, *, machine: bool) -> None:
    """Say what a dry run found."""
    if machine:
        _render.as_json(
            {"dry_run": True, "jobs": count.jobs, "is_exact": count.is_exact}
        )
    else:
        _render.say(f"would {would} {count}; nothing was changed")


class _Interrupts:
    """Lets Ctrl-C and SIGTERM end a loop between two calls, and the second one at once."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._is_asked = False
        self._is_pausing = False

    def __enter__(self) -> Self:
        self._before = [signal.signal(each, self._note) for each in self._SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for each, before in zip(self._SIGNALS, self._before, strict=True):
            signal.signal(each, before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_asked or self._is_pausing:
            raise KeyboardInterrupt
        self._is_asked = True

    def stop_after(self, pause: float) -> bool:
        """Tell whether it is to end; waits before it goes on."""
        try:
            self._is_pausing = True
            if not self._is_asked and pause:
                time.sleep(pause)
        except KeyboardInterrupt:
            self._is_asked = True
        finally:
            self._is_pausing = False
        return self._is_asked


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    with Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=_render.err,
        transient=True,
        disable=not _render.err.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.update(task, advance=count)
