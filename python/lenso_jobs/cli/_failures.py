from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lenso_jobs.cli import _instance, _options, _render, _words
from lenso_jobs.cli._screen import Column, Grid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lenso_jobs import InspectedFailure


def failures(  # noqa: PLR0913, PLR0917 - the arguments are SQL's
    config: _options.Config,
    queue: Annotated[
        str | None, typer.Argument(help="A declared queue; all when left out.")
    ] = None,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    since: _options.Since = None,
    before: _options.Before = None,
    code: _options.Code = None,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="How many at most.")
    ] = 100,
    json: _options.Json = False,
) -> None:
    """List the jobs that have failed and were not redriven, newest first."""
    with _instance.opened(config, secrets_dir, caller) as instance:
        now = instance.now()
        found = instance.jobs.inspect_failures(
            queue,
            since=_words.at(since, now),
            limit=limit,
            failure_code=code,
            before=_words.at(before, now),
        )
    if json:
        _render.as_json({"failures": [asdict(each) for each in found]})
    elif found:
        _render.wide().print(Grid(list(_columns(found))))
        if len(found) == limit:
            _render.say_aside(f"the newest {limit}; more with --limit")
    else:
        _render.say("no job has failed")


def _columns(found: Sequence[InspectedFailure]) -> Iterator[Column]:
    def column(title: str, name: str, spare: int) -> Column:
        cells = [Text(getattr(each, name)) for each in found]
        return Column(title, cells, spare, is_number=False, is_name=True)

    yield Column("job", [Text(str(each.job_id)) for each in found], is_number=False)
    yield column("failure code", "failure_code", 1)
    ends = [Text(_words.time(each.ended_at)) for each in found]
    yield Column("ended", ends, 2, is_number=False)
    yield column("queue", "queue", 3)
    yield column("kind", "kind", 4)
    yield Column("attempts", [Text(f"{each.attempts}") for each in found], 6)
    yield column("worker", "worker", 5)
