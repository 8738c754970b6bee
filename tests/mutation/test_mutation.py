"""The command itself, on a handful of mutants."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def mutation(*arguments):
    process = subprocess.run(
        [sys.executable, Path(__file__).parent, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.stderr == ""
    return process.returncode, process.stdout


def test_a_broken_guard_is_noticed_and_the_test_that_did_is_named():
    code, output = mutation(
        "--near", "--only", "^5_api/renew.sql (extreme|branch: if. v_expires_at)"
    )

    assert code == 0, output
    assert "3 mutants: 3 killed, 0 survived" in output
    assert "tests/sql/test_lease_rules.py::test_" in output


def test_a_surviving_mutant_is_reported_and_fails_the_command():
    code, output = mutation(
        "--near",
        "--unchecked",
        "--equivalents",
        "--only",
        "^5_api/next_available_at.sql branch",
    )

    assert code == 1, output
    assert "\nSURVIVED  5_api/next_available_at.sql branch" in output


def test_every_equivalent_mutant_has_a_reason_and_is_there():
    _, output = mutation("--list")
    there = set(output.splitlines())
    lines = Path(__file__).with_name("equivalents.txt").read_text().splitlines()

    for line in lines[1:]:
        name, _, reason = line.partition("  # ")
        assert name in there
        assert reason
