from __future__ import annotations

from typing import Annotated

import typer

from lenso_jobs import prepare
from lenso_jobs.cli import _options, _render
from lenso_jobs.config import Configuration


def inspect(
    job_id: Annotated[str, typer.Argument(metavar="JOB_ID", help="The job's UUID.")],
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """Show the durable evidence of one job; never its payload or key."""
    configuration = Configuration.from_file(config)
    secrets = _options.resolver(secrets_dir)
    with prepare(configuration, secrets, caller=caller) as jobs:
        _render.evidence(jobs.inspect(job_id), machine=json)
