"""Looking for jobs on the command line: by key, by status, of the document in force."""

from __future__ import annotations

import json
import sys

import pytest

from lenso_jobs.cli import main


def test_inspect_finds_a_job_by_its_key(lenso_jobs, enqueue):
    job_id = enqueue(key="order:1")

    by_key = lenso_jobs("inspect", "--key", "order:1", "--producer", "accounts")
    mine = lenso_jobs("inspect", "--key", "order:1", "--caller", "accounts")

    assert by_key == lenso_jobs("inspect", job_id)
    assert str(job_id) in mine[1]
    assert lenso_jobs("inspect", "--key", "order:2", "--producer", "accounts")[0] == 1
    without = lenso_jobs("inspect", "--key", "order:1")
    assert without[0] == 1
    assert "--producer ROLE" in " ".join(without[2].split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give either JOB_ID or --key"),
        (("0190b2a0-0000-7000-8000-000000000000", "--key", "k"), "give either JOB_ID"),
        (
            ("0190b2a0-0000-7000-8000-000000000000", "--producer", "p"),
            "--producer goes with --key",
        ),
    ],
)
def test_inspect_takes_a_job_or_a_key(lenso_jobs, words, said):
    code, _, err = lenso_jobs("inspect", *words)

    assert code == 2
    assert said in " ".join(err.replace("│", " ").split())


def test_jobs_lists_a_status_page_by_page(lenso_jobs, enqueue, leased):
    first, second = enqueue(), enqueue(kind="call")

    code, out, err = lenso_jobs("jobs", "email", "--status", "queued", "--limit", "1")
    _, rest, end = lenso_jobs(
        "jobs", "email", "--status", "queued", "--before", second, "--json"
    )
    none = lenso_jobs("jobs", "email", "--status", "queued", "--kind", "other")

    assert code == 0
    assert str(second) in out
    assert str(first) not in out
    assert err == f"for older jobs: --before {second}\n"
    page = json.loads(rest)
    assert ([job["job_id"] for job in page["jobs"]], page["next_before"], end) == (
        [str(first)],
        None,
        "",
    )
    assert none == (0, "no job of email is queued\n", "")
    assert str(leased.job_id) in lenso_jobs("jobs", "email", "--status", "running")[1]
    assert lenso_jobs("jobs", "email", "--status", "retried")[0] == 2


def test_the_document_may_be_named_by_the_environment(
    monkeypatch, capsys, lenso_jobs, tmp_path
):
    expected = lenso_jobs("health")
    monkeypatch.setenv("LENSO_JOBS_CONFIG", str(tmp_path / "jobs.json"))
    monkeypatch.setattr(sys, "argv", ["lenso-jobs", "health"])

    with pytest.raises(SystemExit) as ended:
        main()

    said = capsys.readouterr()
    assert (ended.value.code or 0, said.out, said.err) == expected
