"""The README, followed from its first line to its last by a newcomer."""

import json
from pathlib import Path

import psycopg
import pytest

from lenso_jobs import Configuration
from lenso_jobs.cli import _local

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "start" / "tutorial.md"


@pytest.mark.slow
def test_a_newcomer_gets_from_the_handler_to_a_completed_job(newcomer, read):
    newcomer("lenso-jobs", "setup", "--config", "jobs.json")  # as dev does
    newcomer.environment["LENSO_JOBS_CONFIG"] = "jobs.json"

    enqueued, worked, in_sql, set_up = read(README)

    assert enqueued == ""
    assert "send receipt 7 to ada@example.com" in worked
    assert in_sql.splitlines()[-2:] == ["t", "succeeded|1"]
    assert "is ready" in set_up
    with psycopg.connect(newcomer.conninfo) as connection:
        assert connection.execute("select id, email from orders").fetchall() == [
            (7, "ada@example.com")
        ]
        assert connection.execute(
            "select outcome, attempt, count(*) from jobs_email.attempt group by 1, 2"
        ).fetchall() == [("succeeded", 1, 2)]


def test_dev_writes_the_document_and_the_handler_that_the_pages_show(blocks):
    shown = blocks(README)
    document, of_tutorial = (
        json.loads(block["text"])
        for page in (shown, blocks(TUTORIAL))
        for block in page
        if block["language"] == "json"
    )

    assert document == of_tutorial == _local._STARTER
    assert _local._HANDLER in [block["text"] for block in shown]


def test_what_dev_prints_is_what_the_readme_says(blocks, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.json").write_text(json.dumps(_local._STARTER))
    (tmp_path / "handlers.py").touch()
    configuration = Configuration.from_file("jobs.json")

    source, _, work = _local._lines(configuration, Path(".lenso-jobs/env"))

    assert {source, work} <= {block["text"].rstrip() for block in blocks(README)}


def test_the_readme_fits_on_two_hundred_lines():
    text = README.read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 200
    # The gate finds its first command here.
    assert text.count("\npython3 -m venv .venv && ") == 2
