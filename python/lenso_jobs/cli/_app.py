"""All commands together, and the sentence and exit code of each error."""

from __future__ import annotations

import errno
import os
import re
import sys
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lenso_jobs.cli import (
    _acts,
    _dev,
    _fleet,
    _local,
    _look,
    _manage,
    _metrics,
    _work,
    unread,
)
from lenso_jobs.cli._screen import refuse, say

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg


class _Command(TyperCommand):
    """One command, with what typer does otherwise."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Refuse an option given twice; typer would take the last."""
        order: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        for option in (each for each in order if each.param_type_name == "option"):
            is_switch = option.is_flag and not option.secondary_opts
            if order.count(option) > 1 and not (option.multiple or is_switch):
                raise typer.BadParameter(
                    f"takes one value, and is given {order.count(option)} times",
                    ctx=ctx,
                    param=option,
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Handle what typer would end without a sentence, or with exit code 1."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            refuse("interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise typer.Exit(unread()) from None


app = typer.Typer(
    name="lenso-jobs",
    help="""A durable single-step job queue that lives in PostgreSQL.

Exit codes:

- 0: done
- 1: refused; `check` found differences, or `health` a warning or worse
- 2: the command line, the document or a secret is wrong, or the server cannot be reached
- 3: a worker's stop was not clean
- 128 and more: ended by a signal; 130 is Ctrl-C, 143 is SIGTERM
""",
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    # A traceback with local variables would show the database URL.
    pretty_exceptions_enable=False,
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Manage an Instance": (
        *(_manage.setup, _manage.plan, _manage.upgrade, _manage.check),
        *(_manage.configure, _manage.uninstall),
    ),
    "Look": (
        *(_look.health, _look.explain, _look.stats, _look.inspect),
        *(_look.jobs, _look.failures),
    ),
    "Act on jobs": (
        *(_acts.redrive, _acts.purge, _acts.retire, _acts.erase),
        *(_acts.pause, _acts.resume, _dev.enqueue),
    ),
    "Run": (_work.work, _metrics.metrics, _dev.demo, _local.dev),
}
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(cls=_Command, rich_help_panel=panel)(command)
_of_fleets = typer.Typer(
    name="fleet",
    help="Commands on a fleet: Instances on several servers, behind a router.",
    no_args_is_help=True,
)
for command in (
    *(_fleet.setup, _fleet.plan, _fleet.upgrade, _fleet.check, _fleet.configure),
    *(_fleet.health, _fleet.stats),
):
    _of_fleets.command(cls=_Command)(command)
app.add_typer(_of_fleets, rich_help_panel="Manage an Instance")


def _print_version(wanted: bool) -> None:
    if wanted:
        from lenso_jobs._prepare import SCHEMA_VERSION

        say(f"lenso-jobs {version('lenso-jobs')}, schema {SCHEMA_VERSION}")
        raise typer.Exit


@app.callback()
def _before_any_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print this release, and the version of the schema that it needs.",
        ),
    ] = False,
) -> None: ...


@cache
def _commands() -> Callable[..., None]:
    """Build the commands once: reading their signatures takes 30 ms."""
    return typer.main.get_command(app)


def run() -> None:
    """Run the command line; every expected error becomes a sentence and an exit code."""
    try:
        _commands()(standalone_mode=True)
    except KeyboardInterrupt:
        refuse("interrupted")
        sys.exit(130)
    except Exception as error:
        found = told(error)
        if found is None:
            raise
        code, message, hint = found
        refuse(message, hint)
        sys.exit(code)


_UNWRITTEN = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}
_POOLER = "Behind a pooler in transaction mode: use --no-prepare."
_HINTS = {
    "42501": (
        "Use a role that may: set-up needs CREATEROLE and CREATE on the database, or a "
        "database owner with roles made beforehand. What another role owns, that role "
        "or a superuser must give back."
    ),
    "42P05": _POOLER,
    "26000": _POOLER,
    "55P03": "Another session holds a lock: look at pg_stat_activity and try again.",
}
URL = "the secret named by database_url_secret"
# What the server says where it refuses a connection, and what to do about it.
_REFUSALS = {
    r"password|authentic|pg_hba|role .* does not exist|permitted to log in|no user": (
        f"Check the role and the password in {URL}, and that the role may log in."
    ),
    r"database .* does not exist": f"Check the name of the database in {URL}.",
    r"local user with ID": f"Name the user with user=NAME in {URL}.",
    r"too many|connection slots": "Try again when a connection is free.",
}


def told(error: Exception) -> tuple[int, str, str | None] | None:
    """Return exit code, sentence and hint of an expected error."""
    import psycopg

    from lenso_jobs.config import ConfigurationError
    from lenso_jobs.embedded import EmbeddedError
    from lenso_jobs.errors import JobsError
    from lenso_jobs.secrets import SecretNotFound

    code, message, hint = 1, str(error), None
    match error:
        case ConfigurationError() | SecretNotFound():
            code = 2
        case JobsError():
            message = f"{error} ({error.sqlstate} {error.code})"
            hint = error.hint or _HINTS.get(error.sqlstate)
        case EmbeddedError():
            pass
        case psycopg.Error():
            code = 2
            message, hint = _of_the_server(error)
        case UnicodeEncodeError():
            code = 2
            message = f"the output is in {error.encoding}, which lacks a character"
            hint = "Set PYTHONIOENCODING=utf-8."
        case OSError() if error.errno in _UNWRITTEN:
            code = 2
            message = f"cannot write the output: {os.strerror(error.errno)}"
            # What is left of it would fail once more as the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        case _:
            operator = sys.modules.get("lenso_jobs.operator")
            if operator is None or not isinstance(error, operator.OperatorError):
                return None
            code = 2 if isinstance(error, operator.CannotTell) else 1
    return code, message, hint


def _of_the_server(error: psycopg.Error) -> tuple[str, str | None]:
    """Return what the server said, and what usually mends it."""
    said = str(error).strip()
    hint: str | None
    shard = re.match(r"shard \d+ \((.+?)\): ", said)
    if error.sqlstate is None:
        message, hint = _of_the_connection(said)
        secret = f"the secret {shard[1]}" if shard else URL
        return message, hint.replace(URL, secret)
    hint = error.diag.message_hint or _HINTS.get(error.sqlstate)
    if error.sqlstate == "2BP01":
        # The server's hint is to drop the objects in the way; these are their names.
        hint = error.diag.message_detail
    place = shard[0] if shard else ""
    return f"{place}{error.diag.message_primary} ({error.sqlstate})", hint


def _of_the_connection(said: str) -> tuple[str, str]:
    hints = (hint for words, hint in _REFUSALS.items() if re.search(words, said))
    if "FATAL" in said:
        hint = next(hints, "The server's log says why.")
        return f"the server refuses the connection: {said}", hint
    unreached = f"Check that PostgreSQL runs, and the host and port in {URL}."
    return f"the server cannot be reached: {said}", next(hints, unreached)
