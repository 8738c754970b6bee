"""Compose migrations/0001-initial.sql from sql/, which is the truth.

    python3 tools/compose.py

Until the first release is tagged, 0001 holds every file of sql/ in load order, unchanged.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INITIAL = ROOT / "migrations" / "0001-initial.sql"


def composed() -> str:
    """Return the text of the first migration."""
    root = ROOT / "sql"
    paths = sorted(root.glob("[0-9]*.sql")) + sorted(root.glob("[0-9]*/*.sql"))
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    return "".join(path.read_text(encoding="utf-8") for path in paths)


if __name__ == "__main__":
    INITIAL.write_text(composed(), encoding="utf-8")
