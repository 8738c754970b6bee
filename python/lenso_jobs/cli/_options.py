"""The options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from lenso_jobs._prepare import connection_string
from lenso_jobs.cli._words import Moment, moment
from lenso_jobs.config import Configuration
from lenso_jobs.secrets import DirectorySecrets, EnvironmentSecrets

if TYPE_CHECKING:
    from collections.abc import Callable

Config = Annotated[
    Path,
    typer.Option("--config", metavar="FILE", help="The Instance's JSON document."),
]
SecretsDir = Annotated[
    Path | None,
    typer.Option(
        "--secrets-dir",
        metavar="DIR",
        help="Read secrets from files below DIR instead of the environment, where "
        "jobs/database-url is JOBS_DATABASE_URL.",
    ),
]
Caller = Annotated[
    str | None,
    typer.Option("--caller", metavar="ROLE", help="Act as this role, by SET ROLE."),
]
DropQueues = Annotated[
    bool,
    typer.Option(
        "--drop-queues",
        help="Drop queues that the document leaves out although they have live jobs; "
        "those stay, and wait until their queue is declared again.",
    ),
]
Repair = Annotated[
    bool,
    typer.Option(
        "--repair",
        help="Then make roles, functions, triggers, indexes and grants again what "
        "this release says. Tables are never dropped, nor rows.",
    ),
]
JobId = Annotated[UUID, typer.Argument(metavar="JOB_ID", help="The job's UUID.")]
Since = Annotated[
    Moment | None,
    typer.Option(
        parser=moment,
        metavar="TIME",
        help="Those that failed since then: a time with an offset, such as "
        "2026-01-31T18:00:00Z, or how long ago, such as 30m, 12h, 7d.",
    ),
]
Before = Annotated[
    Moment | None,
    typer.Option(
        parser=moment,
        metavar="TIME",
        help="Those that ended before then: a time with an offset, or how long ago.",
    ),
]
Code = Annotated[
    str | None, typer.Option(metavar="CODE", help="Those with this failure code.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it without being asked.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Count what would be done, and change nothing."),
]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]


def resolver(secrets_dir: Path | None) -> Callable[[str], str]:
    """Choose where secrets come from."""
    return (
        EnvironmentSecrets() if secrets_dir is None else DirectorySecrets(secrets_dir)
    )


def load(config: Path, secrets_dir: Path | None) -> tuple[Configuration, str]:
    """Read the document, and resolve its database URL."""
    configuration = Configuration.from_file(config)
    return configuration, connection_string(configuration, resolver(secrets_dir))
