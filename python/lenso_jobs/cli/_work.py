from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
import threading
import time
from functools import reduce
from inspect import iscoroutinefunction
from itertools import chain, repeat
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from lenso_jobs._home import Process
from lenso_jobs._prepare import verified
from lenso_jobs.cli import _options, _render
from lenso_jobs.config import Configuration
from lenso_jobs.errors import InvalidArgument, Unauthorized
from lenso_jobs.worker import AsyncWorker, Observer, Worker

if TYPE_CHECKING:
    from types import FrameType

Made = TypeVar("Made", Worker, AsyncWorker)

FORCED = 3
"""The exit code of a worker whose stop was not clean."""
_LAST_RESORT_SECONDS = 10.0


def work(  # noqa: PLR0913, PLR0917 - a worker's options
    config: _options.Config,
    queue: Annotated[str, typer.Option(help="A declared queue.")],
    handler: Annotated[
        str,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="What to call with each lease; a coroutine function runs on asyncio. "
            "Also looked for in the current directory.",
        ),
    ],
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    concurrency: Annotated[
        int, typer.Option(help="How many handlers run at once.")
    ] = 4,
    batch: Annotated[
        int | None,
        typer.Option(help="How many jobs to hold at once; as many as run by default."),
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds handlers may go on after SIGTERM or SIGINT.")
    ] = 30.0,
    on_shutdown: Annotated[
        Literal["return", "lapse"],
        typer.Option(help="Hand unfinished jobs back, or let their leases run out."),
    ] = "return",
    observer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE.MODULE:OBSERVER",
            help="An Observer, or its class; may be given several times.",
        ),
    ] = None,
    prepare_statements: Annotated[
        bool,
        typer.Option(
            "--prepare/--no-prepare",
            help="Without prepared statements, for PgBouncer before 1.21.",
        ),
    ] = True,
) -> None:
    """Run a handler for every job of a queue, until SIGTERM or SIGINT.

    The first signal lets running handlers end within the grace, the second gives them
    up. Exit code 0 after a clean stop, 3 where the grace was over before handlers had
    ended, or where ends of jobs could not be reported.
    """
    sys.path.insert(0, "")
    function = _named(handler, "--handler")
    observers = [_observer(name) for name in observer or ()]
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    configuration = Configuration.from_file(config)
    conninfo = verified(configuration, _options.resolver(secrets_dir), caller)
    options: dict[str, Any] = {
        "schema": configuration.schema_,
        "queue": queue,
        "handler": function,
        "concurrency": concurrency,
        "batch": batch,
        "caller": caller,
        "grace": grace,
        "on_shutdown": on_shutdown,
        "observers": observers,
        "prepare_threshold": 5 if prepare_statements else None,
    }
    if iscoroutinefunction(function) or iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - its kind is asked for
    ):
        worker: Worker | AsyncWorker = _made(AsyncWorker, conninfo, options)
    else:
        worker = _made(Worker, conninfo, options)
    _stop_by_signals(worker, grace)
    try:
        tally = (
            worker.run() if isinstance(worker, Worker) else asyncio.run(worker.run())
        )
    except Unauthorized as error:
        error.hint = (
            "Act as one of worker_instances: log in as it, or name it by --caller."
        )
        raise
    if not tally.is_clean:
        raise typer.Exit(FORCED)


def _made(kind: type[Made], conninfo: str, options: dict[str, Any]) -> Made:
    try:
        return kind(conninfo, **options)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None


def _named(name: str, option: str) -> Any:  # noqa: ANN401 - whatever it is
    module, _, path = name.partition(":")
    if not module or not path:
        raise typer.BadParameter(
            f"{name} is not of the form PACKAGE.MODULE:NAME", param_hint=option
        )
    try:
        found = reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, ValueError, AttributeError) as error:
        raise typer.BadParameter(
            f"cannot find {name}: {error}", param_hint=option
        ) from None
    if not callable(found) and not isinstance(found, Observer):
        raise typer.BadParameter(f"{name} cannot be called", param_hint=option)
    return found


def _observer(name: str) -> Observer:
    found = _named(name, "--observer")
    made = found() if isinstance(found, type) else found
    if not isinstance(made, Observer):
        raise typer.BadParameter(f"{name} is no Observer", param_hint="--observer")
    return made


def _stop_by_signals(worker: Worker | AsyncWorker, grace: float) -> None:
    graces = chain((grace,), repeat(0.0))
    home = Process()

    def stop(number: int, _frame: FrameType | None) -> None:
        if not home.is_here():
            # A process that a handler forked is no worker, and is to be ended by it.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        left = next(graces)
        worker.stop(left)
        # A handler may block the interpreter's end, or the event loop.
        threading.Thread(target=_leave_after, args=(left,), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _leave_after(grace: float) -> None:
    time.sleep(grace + _LAST_RESORT_SECONDS)
    _render.refuse("handlers do not let the process end", None)
    os._exit(FORCED)
