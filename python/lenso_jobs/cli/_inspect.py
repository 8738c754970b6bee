from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from lenso_jobs import Unauthorized
from lenso_jobs.cli import _instance, _options, _render, _words
from lenso_jobs.cli._screen import Column, Grid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lenso_jobs import InspectedAttempt


def inspect(
    job_id: _options.JobId,
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """Show the durable evidence of one job; never its payload or key.

    Observers and operators are shown the history of its attempts, too.
    """
    with _instance.opened(config, secrets_dir, caller) as instance:
        job = instance.jobs.inspect(job_id)
        try:
            history = instance.jobs.inspect_attempts(job_id)
        except Unauthorized:
            history = None
    if json:
        attempts = None if history is None else [asdict(each) for each in history]
        _render.as_json({**asdict(job), "history": attempts})
        return
    _render.evidence(job)
    if history:
        _render.out.print()
        _render.wide().print(Grid(list(_columns(history))))


def _columns(history: Sequence[InspectedAttempt]) -> Iterator[Column]:
    def column(title: str, values: Iterator[object], spare: int) -> Column:
        cells = [Text("-" if each is None else str(each)) for each in values]
        return Column(title, cells, spare, is_number=False)

    yield Column("attempt", [Text(str(each.attempt)) for each in history])
    yield column("outcome", (each.outcome for each in history), 1)
    yield column("failure code", (each.failure_code for each in history), 2)
    yield column("worker", (each.worker for each in history), 3)
    yield column("leased", (_words.time(each.leased_at) for each in history), 4)
    yield column(
        "took",
        (
            each.ended_at and _words.age(each.ended_at - each.leased_at)
            for each in history
        ),
        5,
    )
    yield column(
        "next due",
        (each.retry_at and _words.time(each.retry_at) for each in history),
        6,
    )
    yield column(
        "lease ends",
        (
            each.lease_expires_at and _words.time(each.lease_expires_at)
            for each in history
        ),
        7,
    )
