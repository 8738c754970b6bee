"""Break each guard of ``sql/`` in turn, and see that a test fails.

    python tests/mutation [--list] [--only PATTERN] [--near]

It works on copies, and exits with 1 if a mutant survived.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING

from ground import ROOT, Ground, sql_files
from rules import Mutant, masked, mutants

if TYPE_CHECKING:
    from pathlib import Path

EQUIVALENTS = ROOT / "tests" / "mutation" / "equivalents.txt"
ROOMS = ("sql", "security", "concurrency", "contract", "scenarios", "chaos")
# These read files, and not what the files make.
NOT_ASKED = ("contract/test_schema.py", "contract/test_readme.py")
QUICK = "not benchmark and not slow and not combination and not long"
SLOW = "slow or combination"
# Where a broken one of these is likely to be noticed first.
FIRST = {
    "definer": ("contract/test_house_rules.py", "security/test_catalogue.py"),
    "pin": ("contract/test_house_rules.py", "sql/test_plans.py"),
    "fence": ("sql/test_plans.py",),
    "grant": ("security/test_grants.py", "security/test_catalogue.py"),
    "constraint": ("sql/test_tables.py",),
    "index": ("sql/test_plans.py",),
    "lock": ("concurrency/test_interleavings.py", "concurrency/test_claims.py"),
    "order": ("concurrency/test_deadlocks.py",),
    "clock": ("scenarios/test_time_is_read*.py",),
}
# The same by what is in the broken line, or in its file's name.
MENTIONED = {
    r"_queue_wake|_queue_is_awaited|_queue_key|wait_key": "sql/test_wake_ups.py",
    r"inspect/inspect_|_queue_share_to_read|_session_workers|_session_waiting": (
        "sql/test_inspect_lists.py"
    ),
    r"enforce_retention": "sql/test_redrive_failed.py",
    r"_claim_due|/purge": "sql/test_plans.py",
    r"_claim_due|_claim_reclaim": "sql/test_claim.py",
    r"_policy_published": "sql/test_tables.py",
    r"/(renew|complete|fail|release)": "sql/test_lease_rules.py",
    r"/(pause|resume)": "sql/test_pause.py",
    r"/(purge|redrive)": "concurrency/test_redrive_and_purge.py",
    r"_document_fault": "sql/test_configure.py",
}


def equivalents() -> dict[str, str]:
    """The mutants that no test can tell from the original, and why."""
    known = {}
    for line in EQUIVALENTS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, reason = line.partition("  # ")
            known[name] = reason
    return known


def callers(sql: Path) -> dict[str, set[str]]:
    """The functions, by name, with those that call them, however indirectly."""
    code = {
        path.stem: masked(path.read_text(encoding="utf-8")) for path in sql_files(sql)
    }
    called_by = {
        name: {other for other in code if re.search(rf"\b{name}\(", code[other])}
        - {name}
        for name in code
    }
    for _ in code:
        for name, found in called_by.items():
            called_by[name] = found.union(*(called_by[other] for other in found))
    return called_by


class Assignment:
    """Which tests are asked of a mutant: those likely to notice first."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._called_by = callers(root / "sql")
        self._texts = {
            path: path.read_text(encoding="utf-8")
            for room in ROOMS
            for path in sorted((root / "tests" / room).glob("test_*.py"))
            if f"{room}/{path.name}" not in NOT_ASKED
        }

    def tests(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """The files made for what is broken, and all others, by how often it occurs."""
        name = mutant.path.rpartition("/")[2].removesuffix(".sql")
        names = {name, *self._called_by[name]}
        patterns = [*FIRST.get(mutant.rule, ()), f"*/test_{name.strip('_')}*.py"]
        if len(names) <= 8:
            patterns += [f"sql/test_{each}*.py" for each in sorted(names)]
        if mutant.path in {"1_types.sql", "2_tables.sql"}:
            patterns.append("sql/test_tables.py")
        patterns += [
            file for text, file in MENTIONED.items() if re.search(text, mutant.name)
        ]
        near = [
            path
            for pattern in dict.fromkeys(patterns)
            for path in sorted((self._root / "tests").glob(pattern))
            if path in self._texts
        ]
        mention = re.compile(rf"\b(?:{'|'.join(names)})\b")
        far = sorted(
            self._texts.keys() - set(near),
            key=lambda path: (-len(mention.findall(self._texts[path])), path),
        )
        # Where nobody is likely to, those that name it most often come first.
        near = list(dict.fromkeys(near)) or far[:4]
        return self._named(near), self._named([p for p in far if p not in near])

    def _named(self, paths: list[Path]) -> list[str]:
        return [path.relative_to(self._root).as_posix() for path in paths]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument(
        "--near", action="store_true", help="only ask the tests likely to notice"
    )
    parser.add_argument(
        "--equivalents", action="store_true", help="those of equivalents.txt instead"
    )
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="take it that every test passes while nothing is broken",
    )
    asked = parser.parse_args()

    if asked.list:
        made = mutants(ROOT / "sql", sql_files(ROOT / "sql"))
        print("\n".join(m.name for m in made if re.search(asked.only, m.name)))
        return 0

    os.nice(3)
    with ExitStack() as stack:
        grounds = [stack.enter_context(closing(Ground(ROOT)))]
        grounds.append(stack.enter_context(closing(Ground(grounds[0].root))))
        return report(asked, grounds)


def report(asked: argparse.Namespace, grounds: list[Ground]) -> int:
    """Try the mutants; print what became of each."""
    root = grounds[0].root
    known = equivalents()
    made = mutants(root / "sql", sql_files(root / "sql"))
    stale = known.keys() - {mutant.name for mutant in made}
    chosen = [mutant for mutant in made if re.search(asked.only, mutant.name)]
    tried = [m for m in chosen if (m.name in known) == asked.equivalents]
    survivors = run(tried, grounds, asked)
    print(
        f"\n{len(tried)} mutants: {len(tried) - len(survivors)} killed,"
        f" {len(survivors)} survived; {len(chosen) - len(tried)} left out"
    )
    for name in survivors:
        print(f"SURVIVED  {name}")
    for name in sorted(stale):
        print(f"NO SUCH MUTANT  {name}")
    return 1 if survivors or stale else 0


def run(
    tried: list[Mutant], grounds: list[Ground], options: argparse.Namespace
) -> list[str]:
    """Try each mutant, one on each ground at a time. Return the survivors."""
    assignment = Assignment(grounds[0].root)
    asked = {}
    for mutant in tried:
        near, far = assignment.tests(mutant)
        rounds = [(half, marks) for half in (near, far) for marks in (QUICK, SLOW)]
        asked[mutant.name] = [
            each for each in rounds[: 4 - 2 * options.near] if each[0]
        ]
    every = sorted(
        {test for each in asked.values() for tests, _ in each for test in tests}
    )
    free: SimpleQueue[Ground] = SimpleQueue()
    for ground in grounds:
        free.put(ground)
    survivors = []
    count = Counter[str]()

    def judge(mutant: Mutant) -> None:
        ground = free.get()
        began = monotonic()
        killer = None
        try:
            for tests, marks in asked[mutant.name]:
                killer = killer or ground.killer(mutant, tests, marks, 600)
        finally:
            free.put(ground)
        count["done"] += 1
        if not killer:
            survivors.append(mutant.name)
        print(
            f"{count['done']}/{len(tried)}  {monotonic() - began:.0f} s  {mutant.name}"
            f"\n    {killer or 'SURVIVED'}",
            flush=True,
        )

    pool = ThreadPoolExecutor(len(grounds))
    try:
        halves = [every[n :: len(grounds)] for n in range(len(grounds))]
        sound = [
            pool.submit(ground.failures, half, f"({QUICK}) or {SLOW}", 1200)
            for ground, half in zip(grounds, halves, strict=True)
            if half and not options.unchecked
        ]
        failing = [test for each in sound for test in each.result()]
        for test in failing:
            print(f"PASSED OVER, it fails as things are  {test}")
        for ground in grounds:
            ground.passed_over = failing
        list(pool.map(judge, tried))
    finally:
        pool.shutdown(cancel_futures=True)
    return sorted(survivors)


if __name__ == "__main__":
    sys.exit(main())
