"""A developer's own database: kept in a folder of the project while the command runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from lenso_jobs.cli import _look, _options, _screen
from lenso_jobs.cli._screen import say, say_aside

_DOCUMENT = Path("jobs.json")
_HANDLERS = Path("handlers.py")
_STARTER: dict[str, Any] = {
    "schema": "jobs_email",
    "database_url_secret": "jobs/database-url",
    "lease_seconds": 30,
    "retry_base_seconds": 5,
    "retry_max_seconds": 300,
    "queues": ["email"],
    "producer_instances": ["accounts"],
    "worker_instances": ["email-worker"],
    "observer_instances": ["operations"],
}
_HANDLER = """\
from dataclasses import dataclass

from lenso_jobs import Fail, HeldLease, Kinds

kinds = Kinds()


@dataclass
class Receipt:
    to: str
    order: int


@kinds("receipt", queue="email", payload=Receipt)
def receipt(lease: HeldLease, payload: Receipt) -> None:
    if "@" not in payload.to:
        raise Fail("address_malformed")
    print("send receipt", payload.order, "to", payload.to)
"""


def dev(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar="LENSO_JOBS_CONFIG",
            show_envvar=False,
            metavar="FILE",
            help="The Instance's JSON document. Default: `jobs.json`, which is written, "
            "with `handlers.py`, if it is missing.",
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Where to keep the database.")
    ] = Path(".lenso-jobs"),
    reset: Annotated[
        bool, typer.Option("--reset", help="Remove the database first.")
    ] = False,
) -> None:
    """Run a PostgreSQL for development, with the Instance of a document set up.

    The database is kept in a folder of the project, and runs until Ctrl-C. Start the
    command again after a change of the document. Shows the queues meanwhile.
    """
    from lenso_jobs import Configuration, operator
    from lenso_jobs.embedded import EmbeddedError, EmbeddedServer
    from lenso_jobs.secrets import variable_of

    try:
        if config is None:
            config = _DOCUMENT
            _write_starter(config)
        configuration = Configuration.from_file(config)
        _require_free(folder / "data")
        if reset:
            with suppress(FileNotFoundError):
                shutil.rmtree(folder / "data")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    except OSError as error:
        raise EmbeddedError(
            f"cannot write {error.filename}: {error.strerror}"
        ) from None
    with EmbeddedServer(folder) as server:
        host = quote(server.socket_directory, safe="")
        url = f"postgresql://postgres@/postgres?host={host}&port={server.port}"
        variable = variable_of(configuration.database_url_secret)
        os.environ[variable] = url
        operator.setup(configuration, url, say=say_aside)
        env = folder / "env"
        env.write_text(
            f"export {variable}={shlex.quote(url)}\n"
            f"export LENSO_JOBS_CONFIG={shlex.quote(str(config.resolve()))}\n",
            encoding="utf-8",
        )
        say(f"Instance {configuration.schema_} is ready at {url}")
        say("Try, in another terminal:")
        for line in _lines(configuration, env):
            say(f"  {line}")
        _show(config, f"source {env}; Ctrl-C ends")
    say("The database is stopped and kept.")


def _write_starter(document: Path) -> None:
    with suppress(FileExistsError), document.open("x", encoding="utf-8") as file:
        file.write(json.dumps(_STARTER, indent=2) + "\n")
        say(f"wrote {document}")
        with _HANDLERS.open("x", encoding="utf-8") as handlers:
            handlers.write(_HANDLER)
        say(f"wrote {_HANDLERS}")


def _require_free(data: Path) -> None:
    import psycopg

    from lenso_jobs.embedded import EmbeddedError

    with suppress(OSError, ValueError, psycopg.OperationalError):
        process, _, _, port, host, *_ = (
            (data / "postmaster.pid").read_text("utf-8").splitlines()
        )
        psycopg.connect(
            host=host, port=port, user="postgres", connect_timeout=5
        ).close()
        raise EmbeddedError(
            f"the database in {data} is in use by process {process}: stop it first"
        )


def _lines(configuration: Any, env: Path) -> list[str]:  # noqa: ANN401 - Configuration
    queue = configuration.queues[0]
    producer = configuration.producer_instances[0]
    worker = configuration.worker_instances[0]
    handler = "handlers:kinds" if _HANDLERS.exists() else "MODULE:NAME"
    payload = json.dumps({"to": "ada@example.com", "order": 7})
    enqueue = f"{queue} receipt '{payload}' --key receipt:7"
    work = f"--queue {queue} --handler {handler} --caller {shlex.quote(worker)}"
    return [
        f"source {shlex.quote(str(env))}",
        f"lenso-jobs enqueue {enqueue} --caller {shlex.quote(producer)}",
        f"lenso-jobs work {work}",
    ]


def _show(config: Path, caption: str) -> None:
    """Show the queues until Ctrl-C, or wait where the output is no terminal."""
    out = _screen.out
    with suppress(KeyboardInterrupt):
        if not out.is_terminal or out.is_dumb_terminal:
            signal.pause()
        opened = partial(_options.opened, config, None, None, verified=False)
        with closing(_look.snapshots_of(opened, 2.0)) as snapshots:
            _look.live(snapshots, caption)
