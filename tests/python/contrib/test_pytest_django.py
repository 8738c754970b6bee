"""A test of an application with pytest-django.

It is that of docs/applications/frameworks.md, with the fixtures of testing.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytest_django", reason="pytest-django")
PAGES = Path(__file__).parents[3] / "docs" / "applications"
PROJECT = Path(__file__).parent / "project"


def blocks(page, runner):
    text = (PAGES / page).read_text("utf-8")
    mark = rf"<!-- run by \S+{runner} -->\n```python\n(.*?)```"
    return re.findall(mark, text, re.DOTALL)


@pytest.mark.slow
def test_the_page_s_test_passes_in_a_test_database_of_django(
    environment, fresh_prefix, new_database, document, tmp_path
):
    url, test = blocks("frameworks.md", r"test_pytest_django\.py")
    (fixtures,) = (
        block
        for block in blocks("testing.md", r"test_testing\.py")
        if "_jobs(" in block
    )
    conninfo = new_database(fresh_prefix)
    (tmp_path / "conftest.py").write_text(url + fixtures)
    (tmp_path / "test_shop.py").write_text(test)
    (tmp_path / "jobs.json").write_text(document(role_prefix=fresh_prefix))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {PROJECT}\n")

    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--ds", "settings"],
        cwd=tmp_path,
        env={**environment, "JOBS_DATABASE_URL": conninfo},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
