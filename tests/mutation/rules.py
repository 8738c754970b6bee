"""What is broken, one place at a time: rules over the text of ``sql/``.

Nothing here knows a function by name, so a new one is covered as it comes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Edit = tuple[int, int, str]
    Rule = Callable[[str, str], Iterator[Edit]]

KINDS = ("producer", "worker", "observer", "operator")
# What ends a condition, outside its parentheses.
_END = re.compile(
    r"[();,]|\b(?:and|or|then|order|group|limit|for|offset|returning|union|on|end|loop"
    r"|else|when|left|cross|join|as|between|case)\b"
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file of ``sql/`` with one guard broken."""

    name: str
    path: str
    rule: str
    text: str


def mutants(root: Path, paths: list[Path]) -> list[Mutant]:
    """Break each guard in each file."""
    made = []
    for path in paths:
        where = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        seen = Counter[str]()
        done = set()
        for rule, files, edits in RULES:
            if not re.match(files, where):
                continue
            for start, end, put in edits(text, masked(text)):
                broken = text[:start] + put + text[end:]
                if broken in done or broken == text:
                    continue
                done.add(broken)
                what = f"{where} {rule}: {_shown(text, start, end, put)}"
                seen[what] += 1
                name = what if seen[what] == 1 else f"{what} ({seen[what]})"
                made.append(Mutant(name, where, rule, broken))
    return made


def _shown(text: str, start: int, end: int, put: str) -> str:
    """The line, or lines, with what is broken in brackets."""
    before = text[text.rfind("\n", 0, start) + 1 : start]
    after = text[end:].partition("\n")[0]
    return (
        f"{_short(before)}[{_short(text[start:end])} -> {_short(put)}]{_short(after)}"
    ).strip()


def _short(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= 80 else f"{text[:50]}…{text[-27:]}"


def masked(text: str) -> str:
    """Blank comments and what is in quotes; every other character keeps its place."""
    text = re.sub(
        r"--[^\n]*|'(?:[^']|'')*'",
        lambda m: " " * len(m[0]) if m[0][0] == "-" else f"'{'x' * (len(m[0]) - 2)}'",
        text,
    )
    return re.sub(
        r"^comment on [^;]*;", lambda m: " " * len(m[0]), text, flags=re.MULTILINE
    )


def _replace(pattern: str, put: str) -> Rule:
    """Replace each match."""

    def edits(_: str, code: str) -> Iterator[Edit]:
        for match in re.finditer(pattern, code, re.MULTILINE):
            yield *match.span(), put

    return edits


def _move(pattern: str) -> Rule:
    """Move each number in the first group of a match by one, either way."""

    def edits(_: str, code: str) -> Iterator[Edit]:
        for match in re.finditer(pattern, code):
            start, end = match.span(1)
            for step in (-1, 1):
                yield start, end, str(int(match[1]) + step)

    return edits


def _conditions(opening: str, put: str) -> Rule:
    """Replace what stands between an opening word and the end of its condition."""

    def edits(_: str, code: str) -> Iterator[Edit]:
        for match in re.finditer(opening, code, re.MULTILINE):
            end = _end_of_condition(code, match.end())
            if code[match.end() : end].strip() not in {"", "true", "false"}:
                yield match.end(), end, f" {put} "

    return edits


def _end_of_condition(code: str, start: int) -> int:
    depth = cases = betweens = 0
    for match in _END.finditer(code, start):
        word = match[0]
        if word in {"(", "case"}:
            depth += word == "("
            cases += word == "case"
        elif word == ")":
            depth -= 1
            if depth < 0:
                return match.start()
        elif depth:
            continue
        elif cases:
            cases -= word == "end"
        elif word == "between":
            betweens += 1
        elif word == "and" and betweens:
            betweens -= 1
        else:
            return match.start()
    return len(code)


def _branches(text: str, code: str) -> Iterator[Edit]:
    """Take, or never take, each branch; of a refusal only the latter says anything."""
    for match in re.finditer(r"\b(?:els)?if\b(?!\s+(?:not\s+)?exists\s+\w)", code):
        end = match.end()
        while (word := re.compile(r"\bthen\b|;").search(code, end)) is not None:
            condition = code[match.end() : word.start()]
            cases = len(re.findall(r"\bcase\b", condition))
            if word[0] == ";" or len(re.findall(r"\bend\b", condition)) == cases:
                break
            end = word.end()
        if word is None or word[0] == ";":
            continue
        yield match.end(), word.start(), " false "
        if not re.match(r"\s+raise\b", code[word.end() :]):
            yield match.end(), word.start(), " true "


def _fields(text: str, code: str) -> Iterator[Edit]:
    """Leave one column out where rows are compared."""
    row = r"\(([^()]*,[^()]*)\)"
    pattern = rf"{row}(\s*(?:=|is distinct from)\s*){row}"
    for match in re.finditer(pattern, code):
        sides = [
            text[slice(*match.span(n))].split(",") if n != 2 else [] for n in (1, 3)
        ]
        for n in range(len(sides[0])):
            one, other = (
                ", ".join(["0" if m == n else f.strip() for m, f in enumerate(side)])
                for side in sides
            )
            yield (
                match.start(),
                match.end(),
                f"({one}){text[slice(*match.span(2))]}({other})",
            )


def _compared(_: str, code: str) -> Iterator[Edit]:
    """Move each comparison onto or off its limit, but for those with the clock.

    No test can be there in the microsecond that would tell.
    """
    swap = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
    for match in re.finditer(r"^(?!.*(?:clock_timestamp|v_now)).*", code, re.MULTILINE):
        for sign in re.finditer(r"(?<=\s)[<>]=?(?=\s|$)", match[0]):
            start, end = sign.span()
            yield match.start() + start, match.start() + end, swap[sign[0]]


def _constraints(_: str, code: str) -> Iterator[Edit]:
    """Drop each named constraint."""
    opening = r",?\s*\bconstraint \w+\s+(?:check|unique|primary key)\s*\("
    for match in re.finditer(opening, code):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        yield match.start(), end, ""


def _not_nulls(_: str, code: str) -> Iterator[Edit]:
    """Let each column be NULL that no primary key keeps from it."""
    for table in re.finditer(r"create table [^;]*;", code):
        key = re.search(r"primary key \(([^)]*)\)", table[0])
        kept = re.findall(r"\w+", key[1]) if key else []
        for column in re.finditer(r"^ +(\w+) .*?( +not null)", table[0], re.MULTILINE):
            if column[1] not in kept and "identity" not in column[0]:
                start, end = column.span(2)
                yield table.start() + start, table.start() + end, ""


def _grants(text: str, _: str) -> Iterator[Edit]:
    """Take a grant from each group that has it, and give it to each that has not."""
    for match in re.finditer(r"\('([a-z ]+)', '\w+\([^']*\)'\),?", text):
        given = match[1].split()
        for kind in KINDS:
            changed = [k for k in KINDS if (k in given) != (k == kind)]
            yield *match.span(1), " ".join(changed)


def _statements(_: str, code: str) -> Iterator[Edit]:
    """Leave out each statement of the permission model."""
    for match in re.finditer(r"^ *execute format\([^;]*;", code, re.MULTILINE):
        yield *match.span(), "null;"


FUNCTIONS = r"[4-8]_"
TABLES = r"[12]_"
GRANTS = r"9_grants"
ALL = r"[1-8]_"

# Name, the files it is for, what it does.
RULES: list[tuple[str, str, Rule]] = [
    ("branch", FUNCTIONS, _branches),
    ("check", FUNCTIONS, _replace(r"^ *perform [^;]*;", "null;")),
    ("exit", FUNCTIONS, _replace(r"exit when [^;]*;", "exit;")),
    ("exit", FUNCTIONS, _replace(r"exit when [^;]*;", "null;")),
    ("audit", FUNCTIONS, _replace(r"^ *insert into operator_act\b[^;]*;", "null;")),
    ("condition", FUNCTIONS, _conditions(r"\bwhere\b", "true")),
    ("condition", FUNCTIONS, _conditions(r"^ *and\b", "true")),
    ("condition", FUNCTIONS, _conditions(r"^ *or\b", "false")),
    (
        "condition",
        FUNCTIONS,
        _conditions(r"(?<!distinct )(?<!= )\bon\b(?! conflict| true)(?=\s)", "true"),
    ),
    ("case", FUNCTIONS, _conditions(r"(?<!exception )(?<!exit )\bwhen\b", "false")),
    ("fields", FUNCTIONS, _fields),
    ("null", ALL, _replace(r"\bis not true\b", "is false")),
    ("null", ALL, _replace(r"\bis not distinct from\b", "=")),
    ("bound", ALL, _move(r"\bbetween (\d+) and\b")),
    ("bound", ALL, _move(r"\bbetween [^,;]*? and (\d+)\b")),
    ("bound", ALL, _move(r"[<>]=? (\d+)\b(?!\.)")),
    ("bound", FUNCTIONS, _move(r"\b_is_name\([\w.]+, (\d+)\)")),
    ("bound", FUNCTIONS, _move(r"\blimit (\d+)\b")),
    ("bound", FUNCTIONS, _move(r":= (\d+);")),
    ("compare", ALL, _compared),
    ("extreme", FUNCTIONS, _replace(r"\bgreatest(?=\()", "least")),
    ("extreme", FUNCTIONS, _replace(r"\bleast(?=\()", "greatest")),
    (
        "lock",
        FUNCTIONS,
        _replace(r"\n *for update(?: of \w+)?(?: skip locked)?(?=[;\n])", ""),
    ),
    ("lock", FUNCTIONS, _replace(r" skip locked\b", "")),
    ("lock", FUNCTIONS, _replace(r"\block table [^;]*;", "null;")),
    ("clock", ALL, _replace(r"\bclock_timestamp\(\)", "now()")),
    ("clock", FUNCTIONS, _replace(r"\bclock_timestamp\(\)", "statement_timestamp()")),
    ("conflict", FUNCTIONS, _replace(r"\bon conflict \([^)]*\) do nothing", "")),
    ("conflict", FUNCTIONS, _replace(r"\bdo update\s+set\b[^;]*;", "do nothing;")),
    ("order", FUNCTIONS, _replace(r"\n *order by [^\n;)]*(?=[\n;])", "")),
    ("limit", FUNCTIONS, _replace(r"\n *limit [^\n;)]*(?=[\n;])", "")),
    ("fence", FUNCTIONS, _replace(r"\n *offset 0(?=\n)", "")),
    ("definer", FUNCTIONS, _replace(r"\bsecurity definer(?= as \$\$$|$)", "")),
    (
        "pin",
        FUNCTIONS,
        _replace(r"^set \w+ (?:= (?:\w+|'x+')|from current)(?= as \$\$$|$)", ""),
    ),
    ("trigger", FUNCTIONS, _replace(r"^create or replace trigger [^;]*;", "")),
    ("constraint", TABLES, _constraints),
    ("null", TABLES, _not_nulls),
    ("index", TABLES, _replace(r"^create (?:unique )?index [^;]*;", "")),
    ("grant", GRANTS, _grants),
    ("grant", GRANTS, _statements),
]
