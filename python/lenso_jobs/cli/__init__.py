"""The command ``lenso-jobs``.

Nothing that takes time is imported here. As process 1 of a container a signal without a
handler is lost, so ``main`` handles signals before it imports the rest.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType

LEAVING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end a command, beside Ctrl-C."""
left: list[int] = []
"""Those that came, if a command caught the exception by which they end it."""

_INSTALL = {
    "lenso-jobs[cli]": {"typer", "rich", "yoyo"},
    "lenso-jobs[prometheus]": {"prometheus_client"},
    "lenso-jobs": {"psycopg_pool", "pydantic"},
}


def main() -> None:
    """Run the command line; an expected error is one sentence and an exit code."""
    left.clear()
    with handled(LEAVING, leave):
        _main()


def _main() -> None:
    try:
        _open_standard_streams()
        if isinstance(sys.stdout, TextIOWrapper):
            # A question mark for a character that the output's encoding lacks.
            sys.stdout.reconfigure(errors="replace")
        for name, least in (("COLUMNS", 20), ("LINES", 1)):
            size = os.environ.get(name, "80")
            # Rich would show nothing at a width of 0.
            if not re.fullmatch("[0-9]{1,4}", size) or int(size) < least:
                del os.environ[name]
        from lenso_jobs.cli._app import run

        run()
    except ImportError as error:
        print(f"error: {_what_to_install(error)}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(unread())


@contextmanager
def handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals, but for those that are ignored: nohup has SIGHUP ignored."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, earlier in before.items():
            if earlier is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def leave(number: int, _frame: FrameType | None) -> None:
    """End the command because of a signal, and let it clean up."""
    left.append(number)
    sys.exit(128 + number)


def unread() -> int:
    """Return the exit code for a closed pipe, and discard all other output."""
    null = os.open(os.devnull, os.O_WRONLY)
    # The interpreter's last flush would fail as well.
    os.dup2(null, 1)
    os.dup2(null, 2)
    return 128 + signal.SIGPIPE


def _open_standard_streams() -> None:
    """Open the null device where a standard stream is closed.

    Otherwise the next connection takes its number, and gets what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def _what_to_install(error: ImportError) -> str:
    """Name the package that is missing, or raise an error of another kind."""
    missing = (error.name or "").partition(".")[0]
    for package, modules in _INSTALL.items():
        if missing in modules:
            return f"lenso-jobs needs {missing}: pip install '{package}'"
    try:
        import lenso_jobs.errors  # noqa: F401 - names what psycopg lacks
    except ImportError as cause:
        return str(cause)
    raise error
