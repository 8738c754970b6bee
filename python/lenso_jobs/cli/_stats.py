from __future__ import annotations

import signal
import sys
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import psycopg
import typer
from rich.live import Live

from lenso_jobs._prepare import SCHEMA_VERSION
from lenso_jobs.cli import _instance, _options, _render, _words
from lenso_jobs.cli._screen import Screen, Snapshot
from lenso_jobs.errors import SchemaNotReady

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType

    Opened = Callable[[], AbstractContextManager[_instance.Instance]]

_SHORTEST = 0.2


def stats(  # noqa: PLR0913, PLR0917 - a command's options
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Show it again and again, until Ctrl-C ends it with 0."
        ),
    ] = False,
    every: Annotated[
        float,
        typer.Option(
            min=_SHORTEST, metavar="SECONDS", help="How long --watch waits in between."
        ),
    ] = 2.0,
    json: _options.Json = False,
) -> None:
    """Show what is wrong, and what queues and workers are doing; changes nothing.

    ~ marks what was counted from a sample; rates and failures are those of the last
    minutes. --watch goes on after a lost connection; with --json it prints one object a
    line. It reads up to 64 MB of live jobs each time.
    """

    def opened() -> AbstractContextManager[_instance.Instance]:
        return _instance.opened(config, secrets_dir, caller, verifying=False)

    if watch:
        _watch(opened, every, machine=json)
        return
    with opened() as instance:
        _show(_snapshot(instance), machine=json)


def _snapshot(instance: _instance.Instance) -> Snapshot:
    schema = instance.configuration.schema_
    version = instance.version()
    findings = instance.findings()
    try:
        with instance.without_waiting():
            queues = instance.jobs.inspect_queues()
            workers = instance.jobs.inspect_workers()
    except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable):
        queues, workers = None, []
    except psycopg.errors.UndefinedFunction as error:
        raise SchemaNotReady(
            f"{error.diag.message_primary}; the schema is at version {version}, and "
            f"this release is made for {SCHEMA_VERSION}",
            hint="lenso-jobs health says what is wrong, and what mends it.",
        ) from None
    return Snapshot(schema, instance.now(), version, findings, queues, workers)


def _show(snapshot: Snapshot, *, machine: bool) -> None:
    if machine:
        _render.as_json(_fields(snapshot))
    else:
        _render.wide().print(Screen(snapshot))


def _fields(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "schema": snapshot.schema,
        "at": snapshot.at,
        "version": snapshot.version,
        "findings": [asdict(each) for each in snapshot.findings],
        "queues": snapshot.queues and [asdict(each) for each in snapshot.queues],
        "workers": [asdict(each) for each in snapshot.workers],
    }


def _watch(opened: Opened, every: float, *, machine: bool) -> None:
    with suppress(KeyboardInterrupt), closing(_snapshots(opened, every)) as snapshots:
        # Nothing is drawn where a terminal cannot be drawn on.
        console = _render.out
        if not machine and console.is_terminal and not console.is_dumb_terminal:
            _live(snapshots, every)
            return
        for each in snapshots:
            if isinstance(each, Snapshot):
                _show(each, machine=machine)
            else:
                _render.say_aside(f"no answer: {each}")


def _snapshots(opened: Opened, every: float) -> Generator[Snapshot | str]:
    """Take one after another; says why where none could be had.

    What is wrong from the start is raised, as by any command.
    """
    has_begun = False
    while True:
        try:
            with opened() as instance:
                while True:
                    yield _snapshot(instance)
                    has_begun = True
                    time.sleep(every)
        except psycopg.OperationalError as error:
            if not has_begun:
                raise
            yield " ".join(str(error).split())
        time.sleep(every)


def _live(snapshots: Iterator[Snapshot | str], every: float) -> None:
    first = next(snapshots)
    assert isinstance(first, Snapshot)  # noqa: S101 - else it was raised
    screen = Screen(first, caption=f"every {every:g} s, Ctrl-C ends", fits=True)
    # It draws by itself once a second: the terminal may have another size by then.
    with (
        _leaving_on_sigterm(),
        Live(screen, console=_render.out, screen=True, refresh_per_second=1) as live,
    ):
        for each in snapshots:
            if isinstance(each, Snapshot):
                screen.snapshot, screen.trouble = each, ""
            else:
                last = _words.time(screen.snapshot.at)
                screen.trouble = f"no answer since {last}, trying again: {each}"
            live.refresh()


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """Leave the terminal as it was found."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
