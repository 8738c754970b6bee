from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from lenso_jobs.cli import _instance, _options, _render, _words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from lenso_jobs import ExplainedJob


class _Facts(NamedTuple):
    """What since, until and who are for one reason."""

    since: str = "since"
    until: str = "until"
    who: str = "by"


_DUE = _Facts(since="due since", until="due")
_FACTS = {
    "ready": _DUE,
    "scheduled": _DUE,
    "retry_waiting": _DUE,
    "leased": _Facts("leased", "until", "to"),
    "lease_expired": _Facts("ran out", who="was held by"),
    "attempts_exhausted": _Facts("ran out", who="was held by"),
    "row_locked": _Facts("in a transaction since"),
    "table_locked": _Facts("in a transaction since"),
    "queue_not_declared": _DUE,
    "instance_damaged": _Facts("due since", who="first of all"),
    "no_declared_worker": _DUE,
    "no_worker_connected": _DUE,
    "succeeded": _Facts("ended"),
    "failed": _Facts("ended"),
    "purged_or_unknown": _Facts(
        "the id was made", "what ended before was purged", "by"
    ),
}


def explain(
    job_id: _options.JobId,
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    json: _options.Json = False,
) -> None:
    """Say why a job is not being claimed, and what to do; changes nothing."""
    # An Instance that is not as it should be may be the reason.
    with _instance.opened(config, secrets_dir, caller, verifying=False) as instance:
        instance.version()
        explained = instance.jobs.explain_job(job_id)
        now = instance.now()
    if json:
        _render.as_json(asdict(explained))
        return
    queue = f" in queue {explained.queue}" if explained.queue else ""
    _render.say(f"Job {explained.job_id}{queue}: {explained.reason}", style="bold")
    _render.say(explained.meaning)
    facts = ", ".join(_facts(explained, now))
    if facts:
        _render.say(f"{facts[0].upper()}{facts[1:]}.")
    _render.say(f"What to do: {explained.remedy}")


def _facts(explained: ExplainedJob, now: datetime) -> Iterator[str]:
    words = _FACTS.get(explained.reason, _Facts())
    if explained.since is not None:
        yield f"{words.since} {_words.ago(explained.since, now)}"
    if explained.until is not None:
        yield f"{words.until} {_words.ago(explained.until, now)}"
    if explained.who is not None:
        yield f"{words.who} {explained.who}"
    if explained.pid is not None:
        yield f"process {explained.pid}"
    if explained.attempt:
        yield f"attempt {explained.attempt} of {explained.max_attempts}"
    if explained.failure_code is not None:
        yield f"last failure code {explained.failure_code}"
    if explained.ahead is not None:
        yield f"{_words.jobs(explained.ahead)} before it"
