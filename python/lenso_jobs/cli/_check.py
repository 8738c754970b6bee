from __future__ import annotations

from dataclasses import asdict

import typer

from lenso_jobs.cli import _options, _render
from lenso_jobs.operator import OperatorError
from lenso_jobs.operator import check as find


def check(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    json: _options.Json = False,
) -> None:
    """Compare the Instance with this release and its document; changes nothing.

    Below each difference stands what mends it: a command with the same document, or SQL
    where data could go with it. Do it in that order, then check again: while migrations
    are pending, or a group role is missing, the rest cannot be told.
    Exit codes: 0 they agree, 1 they differ, 2 it cannot be told.
    """
    configuration, conninfo = _options.load(config, secrets_dir)
    try:
        findings = find(configuration, conninfo)
    except OperatorError as error:
        _render.refuse(str(error), None)
        raise typer.Exit(2) from None
    if json:
        _render.as_json({"findings": [asdict(finding) for finding in findings]})
    elif findings:
        for finding in findings:
            _render.say(finding.what)
            _render.say(f"    mend: {finding.remedy}", style="dim")
    else:
        _render.out.print(f"Instance {configuration.schema_} is as it should be")
    if findings:
        raise typer.Exit(1)
