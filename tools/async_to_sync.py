"""Write ``_client.py``, the client that blocks, from ``_async_client.py``.

Run it after each change of the source: ``python tools/async_to_sync.py``. A test
compares the file with what this would write.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "python" / "lenso_jobs"
SOURCE = PACKAGE / "_async_client.py"
TARGET = PACKAGE / "_client.py"
HEAD = """\
# Written by tools/async_to_sync.py from _async_client.py: change that one.
# ruff: noqa: SIM117
"""

# Each pattern, and what takes its place, in this order.
RULES = (
    ("The client for asyncio:", "The client:"),
    ("Tasks share", "Threads share"),
    (r" If a call is cancelled\s+its result is lost,.*", ""),
    ("another process or event loop", "another process"),
    ("from asyncio import Lock, sleep\n", ""),
    ("from time import monotonic\n", "from threading import Lock\n"),
    ("from threading import Lock\n", "\\g<0>from time import monotonic, sleep\n"),
    ("import Loop, uncancelled", "import Process"),
    (r"Loop\(\)", "Process()"),
    (
        r"return _in_turn\(connection, caller\)",
        "return (pipelined if psycopg.Pipeline.is_supported() else _in_turn)(connection, caller)",
    ),
    (
        "from lenso_jobs.errors import Translated\n",
        "from lenso_jobs._pipelined import pipelined\n\\g<0>",
    ),
    (r"await uncancelled\((.*)\)", r"\1"),
    ("  # noqa: ASYNC109.*", ""),
    (" Awaitable,", ""),
    (r"Awaitable\[(\w+)\]", r"\1"),
    (r"\basync (?=def|for|with)", ""),
    (r"\bawait ", ""),
    (r"\b__a(enter|exit)__", r"__\1__"),
    (r"\baclosing\b", "closing"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\b(Abstract)?Async([A-Z]\w+)", r"\1\2"),
)


def converted(source: str) -> str:
    """Turn the source of the one client into that of the other."""
    for pattern, replacement in RULES:
        source, count = re.subn(pattern, replacement, source)
        if not count:
            raise ValueError(f"nothing matches {pattern}")
    for command in (["check", "--fix", "--select", "I"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet"]
        source = subprocess.run(  # noqa: S603 - the arguments are above
            [*ruff, "--stdin-filename", TARGET, "-"],
            input=source,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    return HEAD + source


if __name__ == "__main__":
    TARGET.write_text(converted(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
