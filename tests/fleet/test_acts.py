"""The commands that act on jobs, at the router."""

from __future__ import annotations

import json
import sys

import pytest

from lenso_jobs.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture
def lenso_jobs(fleet, tmp_path, monkeypatch, capsys):
    """Run a command with the Instance's document, at the router as the superuser."""
    path = tmp_path / "jobs.json"
    path.write_text(fleet.document.instance.document(), "utf-8")
    monkeypatch.setenv("ROUTER_URL", fleet.router)

    def lenso_jobs(*arguments):
        command = ["lenso-jobs", *map(str, arguments), "--config", str(path)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return lenso_jobs


@pytest.fixture
def ended(fleet):
    """Fail a job on each shard; return their ids."""
    producer, jobs = fleet.jobs("accounts"), []
    for shard in range(2):
        key = fleet.key(shard)
        jobs.append(producer.enqueue("email", "send", {}, idempotency_key=key).job_id)
        worker = fleet.jobs("email-worker", shard)
        (lease,) = worker.claim("email")
        worker.fail(lease, "no_good", retryable=False)
    return jobs


def test_a_dry_run_at_the_router_is_refused_and_changes_nothing(
    fleet, lenso_jobs, ended
):
    for act in (
        ("purge", "--older-than", "0s"),
        ("purge", "--retention"),
        ("retire",),
        ("erase", ended[0]),
        ("redrive", ended[1]),
    ):
        code, out, err = lenso_jobs(*act, "--dry-run")

        assert (code, out) == (1, ""), act
        assert "the router of a fleet" in err

    observer = fleet.jobs("operations")
    assert [observer.inspect(job).status for job in ended] == ["failed", "failed"]


def test_acts_at_the_router_reach_all_shards(fleet, lenso_jobs, ended):
    bulk = ("redrive", "--queue", "email", "--since", "1h")
    tried = lenso_jobs(*bulk, "--dry-run", "--json")
    assert (tried[0], json.loads(tried[1])["jobs"]) == (0, 2)
    assert lenso_jobs("erase", ended[0], "--yes")[0] == 0

    assert lenso_jobs(*bulk, "--yes") == (0, "queued again 1 job\n", "")
    assert fleet.jobs("operations").inspect(ended[1]).status == "queued"

    worker = fleet.jobs("email-worker", 1)
    worker.complete_many(worker.claim("email"))
    purged = lenso_jobs("purge", "--older-than", "0s", "--yes")
    assert purged == (0, "deleted 1 job\n", "")
