"""The options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lenso_jobs._prepare import connection_string
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
