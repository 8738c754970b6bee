from __future__ import annotations

from dataclasses import asdict

import typer

from lenso_jobs.cli import _instance, _options, _render
from lenso_jobs.cli._screen import finding_lines


def health(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """List what is wrong with the Instance and what to do; changes nothing.

    For a scheduler or a monitor. Exit codes: 0 nothing, or notices only; 1 a warning or
    worse, also where this release and the schema do not agree; 2 it cannot be told.
    """
    with _instance.opened(config, secrets_dir, caller, verifying=False) as instance:
        findings = instance.findings()
        now = instance.now()
    is_well = all(each.severity == "notice" for each in findings)
    if json:
        _render.as_json(
            {"healthy": is_well, "findings": [asdict(each) for each in findings]}
        )
    elif findings:
        for finding in findings:
            for line in finding_lines(finding, now):
                _render.out.print(line, soft_wrap=True)
    else:
        _render.say(f"nothing is wrong with {instance.configuration.schema_}")
    if not is_well:
        raise typer.Exit(1)
