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
    def column(title: str, values: Iterator[str], spare: int) -> Column:
        return Column(title, [Text(each) for each in values], spare, is_number=False)

    yield column("job", (str(each.job_id) for each in found), 0)
    yield column("failure code", (each.failure_code for each in found), 1)
    yield column("ended", (_words.time(each.ended_at) for each in found), 2)
    yield column("queue", (each.queue for each in found), 3)
    yield column("kind", (each.kind for each in found), 4)
    yield Column("attempts", [Text(f"{each.attempts}") for each in found], 6)
    yield column("worker", (each.worker for each in found), 5)
