"""What docs/ says in SQL runs in its order, and names what there is."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
RUNBOOK = (DOCS / "runbook.md").read_text(encoding="utf-8")
PAGES = sorted(DOCS.glob("**/*.md"))


def sections(title):
    """The words below each third heading of a part, by the heading."""
    (part,) = re.findall(
        rf"^## {title}\n(.*?)(?=^## |\Z)", RUNBOOK, re.DOTALL | re.MULTILINE
    )
    return dict(
        re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", part, re.DOTALL | re.MULTILINE)
    )


def test_the_runbook_has_a_section_for_each_finding_and_its_severity(owner):
    listed = dict(owner.rows("select finding, severity from health_finding"))
    said = sections("What inspect_health finds")

    assert said.keys() == listed.keys()
    for finding, severity in listed.items():
        assert said[finding].startswith(f"*{severity.capitalize()}.*"), finding


def test_the_runbook_has_a_section_for_each_reason(owner):
    listed = {reason for (reason,) in owner.rows("select reason from explain_reason")}

    assert sections("What explain_job answers").keys() == listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sql_of_a_page_runs_as_it_stands(owner, enqueue, claim, worker, prefix, page):
    enqueue()
    job_id, token = claim()
    worker.execute("select fail(%s, %s, 'smtp.timeout', false)", (job_id, token))
    enqueue()
    owner.execute("reset search_path")
    text = page.read_text(encoding="utf-8").replace("jobs_email_", f"{prefix}_")
    blocks = re.findall(r"^ *```sql\n(.*?)```", text, re.DOTALL | re.MULTILINE)

    # Roles belong to every test.
    with owner.transaction(force_rollback=True):
        owner.execute("create role metrics")  # as configure would, once it is declared
        for block in blocks:
            if not block.startswith("vacuum"):
                owner.execute(block)
    for block in blocks:
        if block.startswith("vacuum"):
            owner.execute(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        assert "://" in target or (page.parent / target).exists(), target
