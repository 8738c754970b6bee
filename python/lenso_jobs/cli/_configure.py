from __future__ import annotations

from lenso_jobs.cli import _options, _render
from lenso_jobs.operator import configure as store


def configure(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    json: _options.Json = False,
) -> None:
    """Store a changed document: policy, queues, callers and their memberships."""
    configuration, conninfo = _options.load(config, secrets_dir)
    changed = store(configuration, conninfo)
    if json:
        _render.as_json({"configured": changed})
    elif changed:
        _render.out.print("stored the configuration")
    else:
        _render.out.print("nothing changed")
