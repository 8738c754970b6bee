"""Write a release of version 3 that only the tests have.

It has one migration of each kind on top of 0001-initial: 0002 builds an index beside the
workers, outside of a transaction; 0003 adds a column and replaces functions and a view,
within one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from lenso_jobs._assets import asset_dir

HERE = Path(__file__).parent
SQL, MIGRATIONS = asset_dir("sql"), asset_dir("migrations")
NAMES = ["0001-initial", "0002-worker-index", "0003-note"]
INDEX = "create index if not exists attempt_worker_idx on attempt (worker, ended_at);\n"
# A file of sql/, and what the later release says in it.
CHANGED = {
    "3_errors.sql": ("(values (1, 1))", "(values (3, 1))"),
    "5_api/wait_key.sql": ("The advisory lock", "In this release, the advisory lock"),
    "7_operator/retire_expired.sql": ("Ends", "In this release, ends"),
}


def write(package: Path) -> None:
    """Write its ``_sql`` and ``_migrations`` into the directory of a package."""
    sql, migrations = package / "_sql", package / "_migrations"
    shutil.copytree(SQL, sql)
    shutil.copytree(MIGRATIONS, migrations)
    note = (HERE / "note.sql").read_text(encoding="utf-8")
    tables = sql / "2_tables.sql"
    tables.write_text(tables.read_text(encoding="utf-8") + INDEX + note, "utf-8")
    for name, (before, after) in CHANGED.items():
        text = (sql / name).read_text(encoding="utf-8")
        assert before in text, name
        (sql / name).write_text(text.replace(before, after, 1), encoding="utf-8")

    shutil.copy(HERE / "0002-worker-index.sql", migrations)
    parts = [sql / "0_open.sql", HERE / "note.sql", *(sql / name for name in CHANGED)]
    parts += sorted(sql.glob("[89]_*.sql"))
    (migrations / "0003-note.sql").write_text(
        "-- depends: 0002-worker-index\n"
        + "".join(part.read_text(encoding="utf-8") for part in parts),
        encoding="utf-8",
    )
