"""The files of SQL: in the package when installed, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def asset_dir(name: str) -> Path:
    """Return the directory of ``sql`` or ``migrations``.

    An editable install points at ``python/`` and carries neither, so the checkout is
    looked at second.
    """
    for candidate in (_PACKAGE / f"_{name}", _PACKAGE.parents[1] / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"lenso_jobs was installed without its {name} directory")


def sql_files() -> list[Path]:
    """List the files of ``sql`` that make a schema, in the order they load."""
    root = asset_dir("sql")
    numbered = [
        path
        for path in root.rglob("*.sql")
        if path.relative_to(root).parts[0][0].isdigit()
    ]
    return sorted(numbered, key=lambda path: path.relative_to(root).as_posix())
