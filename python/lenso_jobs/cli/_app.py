"""The commands together, and what becomes of an error."""

from __future__ import annotations

import errno
import os
import sys
from functools import wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, ParamSpec

import psycopg
import typer

from lenso_jobs._prepare import SCHEMA_VERSION
from lenso_jobs.cli import _render
from lenso_jobs.cli._check import check
from lenso_jobs.cli._configure import configure
from lenso_jobs.cli._demo import demo
from lenso_jobs.cli._explain import explain
from lenso_jobs.cli._failures import failures
from lenso_jobs.cli._health import health
from lenso_jobs.cli._inspect import inspect
from lenso_jobs.cli._metrics import metrics
from lenso_jobs.cli._plan import plan
from lenso_jobs.cli._purge import purge
from lenso_jobs.cli._redrive import redrive
from lenso_jobs.cli._render import refuse
from lenso_jobs.cli._retire import retire
from lenso_jobs.cli._setup import setup
from lenso_jobs.cli._stats import stats
from lenso_jobs.cli._uninstall import uninstall
from lenso_jobs.cli._upgrade import upgrade
from lenso_jobs.cli._work import work
from lenso_jobs.config import ConfigurationError
from lenso_jobs.embedded import EmbeddedError
from lenso_jobs.errors import JobsError
from lenso_jobs.operator import CannotTell, OperatorError
from lenso_jobs.secrets import SecretNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")


def _interruptible(command: Callable[P, None]) -> Callable[P, None]:
    """Say a word at Ctrl-C, which typer would end without one."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            refuse("interrupted", None)
            raise typer.Exit(130) from None

    return run


app = typer.Typer(
    name="lenso-jobs",
    help="A durable single-step job queue that lives in PostgreSQL.\n\n"
    "Exit codes: 0 done; 1 refused, check found differences, or health a warning or "
    "worse; 2 the command line, the document or a secret is wrong, or the server cannot "
    "be reached; 3 a worker's stop was not clean; 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    # A traceback with local variables would show the database URL.
    pretty_exceptions_enable=False,
)
for command in (
    *(setup, plan, upgrade, check, configure, uninstall),
    *(stats, health, explain, inspect, failures),
    *(redrive, purge, retire, metrics, work, demo),
):
    app.command()(_interruptible(command))


def _say_version(wanted: bool) -> None:
    if wanted:
        _render.say(f"lenso-jobs {version('lenso-jobs')}, schema {SCHEMA_VERSION}")
        raise typer.Exit


@app.callback()
def _before_any_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_say_version,
            is_eager=True,
            help="Say which release this is, and for which version of the schema.",
        ),
    ] = False,
) -> None: ...


_HINTS = {
    "42501": (
        "Use a role that may: set-up needs CREATEROLE and CREATE on the database, "
        "or a database owner with roles made beforehand; what somebody else owns, they "
        "or a superuser must give back."
    ),
    "42P05": "Behind a pooler in transaction mode: use --no-prepare.",
    "26000": "Behind a pooler in transaction mode: use --no-prepare.",
    "55P03": "Something holds a lock; look at pg_stat_activity and try again.",
}


_UNWRITTEN = {errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}


def main() -> None:
    """Run the command line; every expected error becomes a sentence and an exit code."""
    try:
        app(standalone_mode=True)
    except (ConfigurationError, SecretNotFound) as error:
        refuse(str(error), None)
        sys.exit(2)
    except JobsError as error:
        refuse(
            f"{error} ({error.sqlstate} {error.code})",
            error.hint or _HINTS.get(error.sqlstate),
        )
        sys.exit(1)
    except (OperatorError, EmbeddedError) as error:
        refuse(str(error), None)
        sys.exit(2 if isinstance(error, CannotTell) else 1)
    except psycopg.Error as error:
        refuse(*_of_the_server(error))
        sys.exit(2)
    except KeyboardInterrupt:
        refuse("interrupted", None)
        sys.exit(130)
    except UnicodeEncodeError as error:
        refuse(
            f"the output is in {error.encoding}, which lacks a character",
            "Set PYTHONIOENCODING=utf-8.",
        )
        sys.exit(2)
    except OSError as error:
        if error.errno not in _UNWRITTEN:
            raise
        # What is left of the output would fail once more as the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        refuse(os.strerror(error.errno), None)
        sys.exit(2)


def _of_the_server(error: psycopg.Error) -> tuple[str, str | None]:
    """Say what the server said, and what usually mends it."""
    if error.sqlstate is None and "FATAL" in str(error):
        return (
            f"the server refuses the connection: {str(error).strip()}",
            (
                "Check that the role of the secret named by database_url_secret may log "
                "in, with that password, and that a connection is free."
            ),
        )
    if error.sqlstate is None:
        return (
            f"the server cannot be reached: {str(error).strip()}",
            (
                "Check that PostgreSQL runs and that the secret named by "
                "database_url_secret holds the right URL."
            ),
        )
    hint = error.diag.message_hint or _HINTS.get(error.sqlstate)
    if error.sqlstate == "2BP01":
        # The server would have us drop them, too; these are their names.
        hint = error.diag.message_detail
    return f"{error.diag.message_primary} ({error.sqlstate})", hint
