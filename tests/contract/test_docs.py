"""What docs/ says in SQL runs in its order, and names what there is."""

import re
from pathlib import Path

import psycopg
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"
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


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_run_as_they_stand(page, request):
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    if not blocks:
        return
    newcomer = request.getfixturevalue("newcomer")
    newcomer("lenso-jobs", "setup", "--config", "jobs.json")

    for block in blocks:
        newcomer("bash", "-ec", newcomer.ours(block))


ANSWERS = {
    "setup": ("", "is ready"),
    "plan": ("", "Nothing is to be done"),
    "upgrade": ("", "nothing is to be done"),
    "check": ("", "as it should be"),
    "configure": ("", ""),
    "health": ("", ""),
    "explain": ("{job_id}", "ended"),
    "stats": ("", "email"),
    "inspect": ("{job_id}", "failed"),
    "failures": ("", "smtp.timeout"),
    "redrive": ("{job_id} --yes", "queued"),
    "purge": ("--older-than 30d --yes", "0 jobs"),
    "retire": ("--yes", "0 jobs"),
    "metrics": ("", "lenso_jobs_up"),
    "uninstall": ("--yes", ""),
}


@pytest.mark.slow
def test_every_command_of_the_readme_does_what_it_is_there_for(newcomer):
    (table,) = re.findall(
        r"^\| command \| does \|\n(.*?)\n\n", README, re.DOTALL | re.MULTILINE
    )
    listed = re.findall(r"(?:^\|| or|,) `(\w+)", table, re.MULTILINE)
    assert set(listed) == ANSWERS.keys()
    newcomer("lenso-jobs", "setup", "--config", "jobs.json")
    with psycopg.connect(newcomer.conninfo, autocommit=True) as connection:
        accounts, worker = newcomer.ours('"accounts" "email-worker"').split()
        connection.execute(f"set role {accounts}")
        (job_id,) = connection.execute(
            "select job_id from jobs_email.enqueue('email', 'send', '{}', 'k')"
        ).fetchone()
        connection.execute(f"set role {worker}")
        connection.execute(
            "select jobs_email.fail(job_id, lease_token, 'smtp.timeout', false)"
            " from jobs_email.claim('email')"
        )

    for name, (options, answer) in ANSWERS.items():
        arguments = options.format(job_id=job_id).split()
        said = newcomer("lenso-jobs", name, "--config", "jobs.json", *arguments)
        assert answer in said, (name, said)
