"""Write the generated parts of the documentation from the product itself.

    .venv/bin/python tools/reference.py

Sets an Instance up on a PostgreSQL of its own, and writes the SQL functions, the error
codes, the commands, and the words of each finding and reason in the runbook and the
alerts.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

import psycopg
import typer

from lenso_jobs import Configuration
from lenso_jobs.cli._app import app
from lenso_jobs.embedded import EmbeddedServer
from lenso_jobs.errors import REGISTRY
from lenso_jobs.operator import setup

if TYPE_CHECKING:
    from collections.abc import Iterator

    import click

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RUNBOOK = DOCS / "operators" / "runbook.md"
ALERTS = DOCS / "operators" / "monitoring" / "alerts.yml"
FINDINGS, REASONS = "What inspect_health finds", "What explain_job returns"
WIDTH = 76
MANY = 5
GROUPS = ("producer", "worker", "observer", "operator")
TYPES = {
    "timestamp with time zone": "timestamptz",
    "integer": "int",
    "double precision": "float8",
}


def between(page: str, name: str, text: str) -> str:
    """Replace the generated part *name* of a page."""
    start, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"no part {name} between {start} and {end}")
    return f"{before}{start}\n\n{text.strip()}\n\n{end}{after}"


def errors(connection: psycopg.Connection[Any]) -> str:
    """Write the table of error codes."""
    rows = connection.execute(
        "select sqlstate, name, meaning from error_code order by sqlstate"
    )
    return "\n".join(
        [
            "| SQLSTATE | name | meaning | in Python |",
            "|---|---|---|---|",
            *(
                f"| {code} | `{name}` | {meaning} | `{REGISTRY[code].__name__}` |"
                for code, name, meaning in rows
            ),
        ]
    )


def roles(connection: psycopg.Connection[Any]) -> str:
    """Write the table of the groups and what each may call."""
    rows = connection.execute(
        """
        select
            substring(pg_get_userbyid(a.grantee) from '_([a-z]+)$'), array_agg(p.proname)
        from pg_proc as p, aclexplode(p.proacl) as a
        where
            p.pronamespace = current_schema()::regnamespace
            and a.grantee <> p.proowner
        group by 1
        """
    )
    granted: dict[str, list[str]] = dict(rows.fetchall())

    def order(name: str) -> tuple[bool, str]:
        return (name in granted["observer"], name)

    return "\n".join(
        [
            "| role | may call |",
            "|---|---|",
            "| `jobs_email_owner` | owns the schema; the functions run as it; cannot log in |",
            *(
                f"| `jobs_email_{group}` | "
                + ", ".join(f"`{name}`" for name in sorted(granted[group], key=order))
                + " |"
                for group in GROUPS
            ),
        ]
    )


def functions(connection: psycopg.Connection[Any]) -> str:
    """Write every function that a group may call."""
    rows = connection.execute(
        """
        select
            p.proname, pg_get_function_arguments(p.oid),
            pg_get_function_result(p.oid), obj_description(p.oid, 'pg_proc'),
            array(
                select substring(pg_get_userbyid(a.grantee) from '_([a-z]+)$')
                from aclexplode(p.proacl) as a
                where a.grantee <> p.proowner
            ) as groups,
            array(
                select t.attname || ' ' || format_type(t.atttypid, null)
                from pg_attribute as t
                where t.attrelid = y.typrelid and t.attnum > 0 and not t.attisdropped
                order by t.attnum
            ) as columns
        from pg_proc as p
        join pg_type as y on y.oid = p.prorettype
        where p.pronamespace = current_schema()::regnamespace
        order by 1
        """
    ).fetchall()
    granted = [row for row in rows if set(row[4]) & set(GROUPS)]

    def order(row: tuple[Any, ...]) -> tuple[Any, ...]:
        groups = set(row[4])
        if "producer" in groups:
            return (0 if groups == {"producer"} else 2, row[0])
        return (1 if "worker" in groups else 3 if "observer" in groups else 4, row[0])

    titles = (
        "For producers",
        "For workers",
        "For everybody",
        "For observers and operators",
        "For operators",
    )
    lines: list[str] = []
    granted.sort(key=order)
    for number, group in groupby(granted, key=lambda row: order(row)[0]):
        lines += [f"## {titles[number]}", ""]
        for name, arguments, result, comment, _, columns in group:
            lines += [
                f"### {name}",
                "",
                "```text",
                f"{name}({_arguments(arguments)})",
                "```",
                "",
                *_sentences(comment),
                "",
                f"Returns {_result(result, columns)}.",
                "",
            ]
    return "\n".join(lines)


def _plain(type_name: str) -> str:
    for long, short in TYPES.items():
        type_name = type_name.replace(long, short)
    return type_name


def _arguments(text: str) -> str:
    parts = re.sub(r"::[\w ]+(?=,|$)", "", text).split(", ")
    parts = [_plain(part).replace(" DEFAULT ", " = ") for part in parts if part]
    parts = [part.replace("NULL", "null") for part in parts]
    line = ", ".join(parts)
    if len(line) <= WIDTH:
        return line
    return "\n    " + ",\n    ".join(parts) + "\n"


def _result(result: str, columns: list[str]) -> str:
    rows = "rows of " if result.startswith("SETOF") else ""
    if not columns:
        return rows + f"`{_plain(result.removeprefix('SETOF '))}`"
    listed = ", ".join(f"`{_plain(column)}`" for column in columns)
    return f"{rows or 'one row of '}{listed}"


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z(`])", text.strip())


def commands() -> str:
    """Write every command with its options, as its help has them."""
    command = typer.main.get_command(app)
    every = dict(sorted(_flat(command)))
    rows = {name: [_row(each) for each in every[name].params] for name in every}
    used = Counter(row for listed in rows.values() for row in listed)
    common = [row for row, count in used.items() if count >= MANY]
    lines = ["## Options of many commands", "", *_table(common), ""]
    for name, each in every.items():
        help_text = re.sub(r"(?<!\n)\n(?!\n)", " ", (each.help or "").strip())
        lines += [f"## {name}", "", *_paragraphs(help_text)]
        shared = [option for option, text in rows[name] if (option, text) in common]
        if shared:
            lines += [f"Takes {', '.join(shared)}.", ""]
        own = [row for row in rows[name] if row not in common]
        if own:
            lines += [*_table(own), ""]
    return "\n".join(lines)


def _flat(group: Any, before: str = "") -> Iterator[tuple[str, click.Command]]:  # noqa: ANN401
    """Yield each command by its name, those of a group with the group's before it."""
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from _flat(each, f"{before}{name} ")
        else:
            yield f"{before}{name}", each


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return [
        "| argument or option | meaning |",
        "|---|---|",
        *(f"| {option} | {text} |" for option, text in rows),
    ]


def _row(parameter: click.Parameter) -> tuple[str, str]:
    text = (getattr(parameter, "help", None) or "").replace("\n", " ").strip()
    default = getattr(parameter.default, "value", parameter.default)
    if parameter.required:
        text += " Required."
    elif getattr(parameter, "show_default", False) and not isinstance(
        default, bool | None
    ):
        text += f" Default: {default}."
    return _usage(parameter), text


def _paragraphs(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        lines += [*_sentences(paragraph), ""]
    return lines


def _usage(parameter: click.Parameter) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = ", ".join(
        f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts)
    )
    return names + (f" `{parameter.metavar}`" if parameter.metavar else "")


def runbook(connection: psycopg.Connection[Any], page: str) -> str:
    """Write the first lines of each section of the runbook, and sections that lack."""
    findings = {
        finding: (f"*{severity.capitalize()}.* {meaning}", remedy)
        for finding, severity, meaning, remedy in connection.execute(
            "select finding, severity, meaning, remedy from health_finding"
        )
    }
    reasons = {
        reason: (meaning, remedy)
        for reason, meaning, remedy in connection.execute(
            "select reason, meaning, remedy from explain_reason"
        )
    }
    parts = re.split(r"(?=^## )", page, flags=re.MULTILINE)
    for index, part in enumerate(parts):
        title = part.partition("\n")[0].removeprefix("## ")
        words = {FINDINGS: findings, REASONS: reasons}.get(title)
        if words is not None:
            parts[index] = _sections(part, words)
    return "".join(parts)


def _sections(part: str, words: dict[str, tuple[str, str]]) -> str:
    start, *sections = re.split(r"(?=^### )", part, flags=re.MULTILINE)
    own = {
        section.partition("\n")[0].removeprefix("### "): re.sub(
            r"^### \w+\n(?:.*?^<!-- end: words -->\n)?",
            "",
            section,
            flags=re.DOTALL | re.MULTILINE,
        ).strip("\n")
        for section in sections
    }
    for name, (meaning, remedy) in words.items():
        remedied = _sentences(f"*Remedy:* {remedy}")
        start += (
            f"### {name}\n\n"
            + "\n".join([*_sentences(meaning), "", *remedied])
            + "\n<!-- end: words -->\n\n"
            + (f"{own[name]}\n\n" if own.get(name) else "")
        )
    return start


def alerts(connection: psycopg.Connection[Any], text: str) -> str:
    """Write an alert for each finding that is more than a notice; *for* stays."""
    start, down, *rules = re.split(r"(?=^      - alert: )", text, flags=re.MULTILINE)
    waits: dict[str, str] = {}
    for rule in rules:
        waits.update(re.findall(r'finding="(\w+)"\}.*?for: (\w+)', rule, re.DOTALL))
    text = start + down
    for finding, severity, meaning, remedy in connection.execute(
        "select finding, severity, meaning, remedy from health_finding"
        " where severity <> 'notice'"
    ):
        wait = waits.get(finding, "1m" if severity == "critical" else "5m")
        summary = f"{{{{ $labels.schema }}}} on {{{{ $labels.instance }}}}: {meaning}"
        description = (
            f"{remedy.removesuffix('.')}. See docs/operators/runbook.md#{finding}."
        )
        text += (
            f"      - alert: LensoJobs{finding.title().replace('_', '')}\n"
            f'        expr: lenso_jobs_health_findings{{finding="{finding}"}} > 0\n'
            f"        for: {wait}\n"
            "        labels:\n"
            f"          severity: {severity}\n"
            "        annotations:\n"
            f"          summary: >-\n{_folded(summary)}\n"
            f"          description: >-\n{_folded(description)}\n\n"
        )
    return text.rstrip() + "\n"


def _folded(text: str) -> str:
    return indent(
        fill(text, WIDTH, break_on_hyphens=False, break_long_words=False), " " * 12
    )


def written(connection: psycopg.Connection[Any]) -> dict[Path, str]:
    """Return the text that each page must have, by its path."""
    reference = DOCS / "reference"
    parts = {
        reference / "errors.md": errors(connection),
        reference / "functions.md": functions(connection),
        reference / "commands.md": commands(),
        DOCS / "operators" / "roles.md": roles(connection),
    }
    pages = {
        path: between(path.read_text(encoding="utf-8"), path.stem, part)
        for path, part in parts.items()
    }
    page = runbook(connection, RUNBOOK.read_text(encoding="utf-8"))
    pages[RUNBOOK] = page.rstrip() + "\n"
    pages[ALERTS] = alerts(connection, ALERTS.read_text(encoding="utf-8"))
    return pages


def main() -> None:
    """Write all of them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (document,) = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    configuration = Configuration.from_json(document)
    with EmbeddedServer() as server:
        setup(configuration, server.conninfo())
        with psycopg.connect(
            server.conninfo(options="-c search_path=jobs_email")
        ) as connection:
            for path, text in written(connection).items():
                if path.read_text(encoding="utf-8") != text:
                    path.write_text(text, encoding="utf-8")
                    sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
