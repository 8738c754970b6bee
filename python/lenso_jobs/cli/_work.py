"""Running a handler: import it, hand signals to its worker, and report the stop."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from difflib import get_close_matches
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lenso_jobs.cli import LEAVING, _options, left
from lenso_jobs.cli._screen import err, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from lenso_jobs.worker import (
        AsyncFleetWorkers,
        AsyncWorker,
        FleetWorkers,
        Tally,
        Worker,
    )

FORCED = 3
"""The exit code of a worker whose stop was not clean."""
wrappers: list[Callable[[Any], Any]] = []
"""What a framework that calls this command puts around the handler."""
_LAST_RESORT_SECONDS = 10.0


def work(  # noqa: PLR0913, PLR0917 - a worker's options
    context: typer.Context,
    queue: Annotated[
        list[str],
        typer.Option(
            metavar="QUEUE[:CONCURRENCY]",
            help="A declared queue, and how many of its handlers run at once. May be "
            "given several times.",
        ),
    ],
    handler: Annotated[
        str,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="The function to call with each lease, or a Kinds. Coroutine functions "
            "run on asyncio. The current directory is searched first.",
        ),
    ],
    config: _options.MaybeConfig = None,
    fleet: _options.MaybeFleet = None,
    shard: Annotated[
        list[int] | None,
        typer.Option(
            metavar="NUMBER",
            help="A shard of the fleet to work. May be given several times. Default: "
            "all of them.",
        ),
    ] = None,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    concurrency: Annotated[
        int, typer.Option(help="How many handlers of a queue run at once.")
    ] = 4,
    batch: Annotated[
        int | None,
        typer.Option(help="How many jobs of a queue to hold. Default: concurrency."),
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds that handlers may go on after a signal.")
    ] = 30.0,
    on_shutdown: Annotated[
        Literal["return", "lapse"],
        typer.Option(help="Hand unfinished jobs back, or let their leases expire."),
    ] = "return",
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that a handler may run.")
    ] = None,
    tracebacks: Annotated[
        bool,
        typer.Option(
            "--tracebacks",
            help="Log the tracebacks of handlers. They can hold parts of payloads.",
        ),
    ] = False,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End once no job is due.")
    ] = False,
    observer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE.MODULE:OBSERVER",
            help="An Observer, or its class. May be given several times.",
        ),
    ] = None,
    prepare_statements: Annotated[
        bool,
        typer.Option(
            "--prepare/--no-prepare",
            help="PgBouncer before 1.21 needs --no-prepare.",
        ),
    ] = True,
) -> None:
    """Run a handler for every job of its queues, until a signal ends it.

    SIGTERM, Ctrl-C, SIGHUP and SIGQUIT let running handlers end within the grace; a
    second signal ends the grace. Exit code 0 after a clean stop. Exit code 3 if the
    grace was over before handlers had ended, or if ends of jobs could not be reported.

    With --fleet, one worker for each shard runs in this process. Queues and concurrency
    count for each shard. A shard that cannot be worked is tried again.
    """
    config, fleet = _options.either(context, config=config, fleet=fleet)
    if shard and fleet is None:
        raise typer.BadParameter("needs --fleet", param_hint="--shard")
    sys.path.insert(0, "")
    function = _imported(handler, "--handler")
    for wrapper in wrappers:
        function = wrapper(function)
    observers = [_imported(each, "--observer", made=True) for each in observer or ()]
    if left:  # a signal whose exception one of the modules caught
        sys.exit(128 + left[-1])
    import logging

    from lenso_jobs import Configuration, Fleet
    from lenso_jobs.errors import InvalidArgument, Unauthorized
    from lenso_jobs.worker import (
        FleetWorkers,
        Worker,
        WorkerOptions,
        prepare_fleet_workers,
        prepare_worker,
    )

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    document = Fleet.from_file(fleet) if fleet else Configuration.from_file(str(config))
    configuration = document.instance if isinstance(document, Fleet) else document
    queues = _queues(queue, concurrency, configuration.queues)
    secrets = _options.resolver(secrets_dir)
    options: WorkerOptions = {
        "queues": queues,
        "batch": batch,
        "grace": grace,
        "on_shutdown": on_shutdown,
        "timeout": timeout,
        "tracebacks": tracebacks,
        "observers": observers,
        "prepare_threshold": 5 if prepare_statements else None,
    }
    worker: Any
    try:
        if isinstance(document, Fleet):
            worker = prepare_fleet_workers(
                *(document, secrets, function, caller, shard or None), **options
            )
        else:
            worker = prepare_worker(document, secrets, function, caller, **options)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    _stop_by_signals(worker, grace)
    try:
        with _options.hinting(configuration, *queues):
            tally = (
                worker.run(until_idle=until_idle)
                if isinstance(worker, Worker | FleetWorkers)
                else asyncio.run(_run(worker, until_idle=until_idle))
            )
    except Unauthorized as error:
        error.hint = (
            "Act as one of worker_instances: log in as it, or name it with --caller. If "
            "it is declared, it or its group lost a right: run lenso-jobs check."
        )
        raise
    if not tally.is_clean:
        raise typer.Exit(FORCED)


def _queues(
    given: list[str], concurrency: int, declared: Sequence[str]
) -> dict[str, int]:
    """Return the concurrency of each queue. The name of a queue may have a colon."""
    queues: dict[str, int] = {}
    for each in given:
        name, colon, count = each.rpartition(":")
        is_counted = colon and count.isascii() and count.isdigit()
        if each in declared or not is_counted:
            name, count = each, str(concurrency)
        if name in queues:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--queue")
        queues[name] = int(count)
    return queues


# The handler and the observers.


def _imported(name: str, option: str, *, made: bool = False) -> Any:  # noqa: ANN401
    """Import what is named, and call it if it is a class and *made* is true."""
    module_name, _, path = name.partition(":")
    refuse = partial(typer.BadParameter, param_hint=option)
    if not all(
        each.isidentifier() for each in (*module_name.split("."), *path.split("."))
    ):
        raise refuse(f"{name} is not of the form PACKAGE.MODULE:NAME")
    try:
        module = found = importlib.import_module(module_name)
        for part in path.split("."):
            if not hasattr(found, part):
                close = get_close_matches(part, dir(found), 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                where = getattr(module, "__file__", None) or "a package without a file"
                raise refuse(  # noqa: TRY301 - it passes through
                    f"cannot find {name}: {where} has no {part}{hint}"
                )
            found = getattr(found, part)
        return found() if made and isinstance(found, type) else found
    except (typer.BadParameter, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise refuse(
                f"cannot find {name}: {error} in the current directory or on the Python path"
            ) from None
        _refuse(name, option, error)
    except BaseException as error:  # a module may call sys.exit, too
        if left:
            raise
        _refuse(name, option, error)
    raise typer.Exit(2)


def _refuse(name: str, option: str, error: BaseException) -> None:
    """Print where the application's code failed, then the traceback of its part."""
    libraries = {sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")}

    def is_ours(frame: traceback.FrameSummary) -> bool:
        foreign = ("<frozen importlib", __file__, *libraries)
        return not frame.filename.startswith(foreign)

    told = traceback.TracebackException.from_exception(error)
    while told.stack and not is_ours(told.stack[0]):
        del told.stack[0]  # those of this command and of the import system
    places = [(each.filename, each.lineno) for each in told.stack if is_ours(each)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    where = "{}, line {}: ".format(*places[-1]) if places else ""
    (said, *_) = [*told.format_exception_only()][-1].splitlines() or [""]
    refuse(f"{where}{said}", f"{option} {name} cannot be imported:")
    err.print("".join(told.format()), markup=False, soft_wrap=True, end="")


# Signals.


async def _run(worker: AsyncWorker | AsyncFleetWorkers, *, until_idle: bool) -> Tally:
    """Run a worker in a loop that every signal wakes.

    One that comes just before the loop waits for events would be handled after them.
    """
    # A loop that handles any signal is woken by all signals.
    asyncio.get_running_loop().add_signal_handler(signal.SIGURG, lambda: None)
    return await worker.run(until_idle=until_idle)


def _stop_by_signals(worker: Worker | FleetWorkers, grace: float) -> None:
    from lenso_jobs._home import Process

    graces = chain((grace,), repeat(0.0))
    home = Process()

    def stop(number: int, _frame: FrameType | None) -> None:
        if not home.is_here():
            # A process that a handler forked is no worker: the signal ends it.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        left = next(graces)
        worker.stop(left)
        # A handler may block the interpreter's end, or the event loop.
        threading.Thread(target=_leave_after, args=(left,), daemon=True).start()

    for number in (signal.SIGINT, *LEAVING):
        if number in (signal.SIGINT, signal.SIGTERM) or (
            signal.getsignal(number) is not signal.SIG_IGN
        ):
            signal.signal(number, stop)


def _leave_after(grace: float) -> None:
    time.sleep(grace + _LAST_RESORT_SECONDS)
    refuse("handlers do not let the process end")
    os._exit(FORCED)
