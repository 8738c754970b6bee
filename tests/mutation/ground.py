"""Where mutants are tried: a copy of the checkout, and a new server."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from threading import Timer
from typing import TYPE_CHECKING

import psycopg
import pytest

from lenso_jobs.embedded import EmbeddedServer

if TYPE_CHECKING:
    from rules import Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("python", "sql", "tests", "migrations", "docs")
# A mutant that goes round and round is stopped by the server, and so found out.
SERVER = {
    "max_connections": "200",
    "max_prepared_transactions": "16",
    "statement_timeout": "30s",
}
OPTIONS = (
    *("--override-ini=addopts=", "--import-mode=importlib", "--strict-markers"),
    *("-q", "--tb=short", "-rfE"),
    *("-p", "no:xdist", "-p", "no:randomly", "-p", "no:cacheprovider"),
    *("-p", "no:hypothesispytest"),
)


class Ground:
    """One copy, one server, one mutant at a time."""

    def __init__(self, source: Path) -> None:
        self._stack = ExitStack()
        self.root = Path(mkdtemp(prefix="lenso-jobs-mutation-"))
        self._stack.callback(shutil.rmtree, self.root)
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source / name, self.root / name, ignore=ignored)
        for file in source.iterdir():
            if file.is_file():
                shutil.copy(file, self.root)
        self._server = self._stack.enter_context(EmbeddedServer(settings=SERVER))
        # One migration that is sql/ as it stands, under the name of the last. So a break
        # of sql/ is in every Instance that a test sets up.
        *earlier, self._migration = sorted((self.root / "migrations").glob("*.sql"))
        for migration in earlier:
            migration.unlink()
        self.passed_over: list[str] = []
        self._warm = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, self.root / "tests/mutation/warm.py"],
                cwd=self.root,
                env=os.environ
                | {
                    "PYTHONPATH": str(self.root / "python"),
                    "PYTHONDONTWRITEBYTECODE": "",
                    "PYTHONPYCACHEPREFIX": str(self.root / "compiled"),
                    "LENSO_JOBS_TEST_SERVER": self._server.conninfo(),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def close(self) -> None:
        self._stack.close()

    def failures(self, tests: list[str], marks: str, timeout: float) -> list[str]:
        """What fails of these tests, those so marked, while nothing is broken."""
        return self._run(tests, timeout, "-m", marks, "--maxfail=20")

    def killer(
        self, mutant: Mutant, tests: list[str], marks: str, timeout: float
    ) -> str | None:
        """The first of these tests, of those so marked, that a mutant fails."""
        path = self.root / "sql" / mutant.path
        sound = path.read_bytes()
        path.write_text(mutant.text, encoding="utf-8")
        try:
            failed = self._run(tests, timeout, "-m", marks, "--exitfirst")
        finally:
            path.write_bytes(sound)
        return failed[0] if failed else None

    def _run(self, tests: list[str], timeout: float, *options: str) -> list[str]:
        self._migration.write_bytes(
            b"".join(path.read_bytes() for path in sql_files(self.root / "sql"))
        )
        output = self.root / "output"
        arguments = [*OPTIONS, *options]
        arguments += [f"--deselect={test}" for test in self.passed_over]
        print(
            json.dumps([str(output), *arguments, *tests]),
            file=self._warm.stdin,
            flush=True,
        )
        child = int(self._warm.stdout.readline())
        late = Timer(timeout, os.killpg, (child, signal.SIGKILL))
        late.start()
        code = int(self._warm.stdout.readline())
        late.cancel()
        self._sweep()
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return []
        if code == -signal.SIGKILL:
            return [f"timeout after {timeout:.0f} s"]
        said = output.read_text(encoding="utf-8", errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        # A file that cannot be collected says nothing of the mutant.
        is_told = failed and all("::" in name for name in failed)
        if code != pytest.ExitCode.TESTS_FAILED or not is_told:
            raise RuntimeError(said)
        return ["it does not load"] if "in _load" in said else failed

    def _sweep(self) -> None:
        """Drop what a run that was cut short has left on the server."""
        with psycopg.connect(self._server.conninfo(), autocommit=True) as connection:
            left = connection.execute(
                "select datname from pg_database where datname like 'lenso%'"
            ).fetchall()
            for (name,) in left:
                connection.execute(f'drop database "{name}" with (force)')


def sql_files(root: Path) -> list[Path]:
    """List the files of ``sql`` that make a schema, in the order they load."""
    return sorted(
        path
        for path in root.rglob("*.sql")
        if path.relative_to(root).parts[0][0].isdigit()
    )
