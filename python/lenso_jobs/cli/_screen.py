"""What goes on in an Instance, as tables that fit a terminal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from lenso_jobs.cli import _words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from lenso_jobs import InspectedFinding, InspectedQueue, InspectedWorker

STYLES = {"critical": "bold red", "warning": "yellow", "notice": "cyan"}
_GAP = 2
# What is left of a name on the narrowest terminal.
_LEAST = 12
_SLOW, _STANDING = timedelta(minutes=1), timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was read at one time; no queues where a table was locked or is gone."""

    schema: str
    at: datetime
    version: int
    findings: Sequence[InspectedFinding]
    queues: Sequence[InspectedQueue] | None
    workers: Sequence[InspectedWorker]


class Column(NamedTuple):
    """A column, and how gladly it is left out where there is no room."""

    title: str
    cells: Sequence[Text]
    spare: int = 0
    is_number: bool = True
    is_name: bool = False
    """Whether it is cut before a number is left out."""

    @property
    def width(self) -> int:
        """Tell how wide its widest cell is."""
        return max(cell_len(self.title), *(each.cell_len for each in self.cells), 0)

    def least(self, most: int) -> int:
        """Tell how narrow it may be."""
        return min(self.width, most) if self.is_name else self.width


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of the columns that there is room for."""

    columns: Sequence[Column]
    rows: int | None = None

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Cut names, then leave out the columns that are most easily spared."""
        kept = [each._replace(cells=each.cells[: self.rows]) for each in self.columns]
        most = max(_LEAST, options.max_width // 3)
        while len(kept) > 1 and _width(kept, most) > options.max_width:
            kept.remove(max(kept, key=lambda each: each.spare))
        room = max(0, options.max_width - _width(kept, most))
        table = Table(box=None, padding=(0, 0, 0, _GAP), header_style="dim")
        for column in kept:
            more = min(column.width - column.least(most), room)
            room -= more
            table.add_column(
                Text(column.title),
                justify="right" if column.is_number else "left",
                max_width=column.least(most) + more,
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in zip(*(each.cells for each in kept), strict=True):
            table.add_row(*row)
        yield table


def _width(columns: Sequence[Column], most: int) -> int:
    return sum(each.least(most) + _GAP for each in columns)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and below it a table or entries of a few lines each."""

    title: str
    columns: Sequence[Column] = ()
    entries: Sequence[Sequence[Text]] = ()
    nothing: str = "none"

    @property
    def count(self) -> int:
        """Tell how many rows or entries there are."""
        return len(self.columns[0].cells if self.columns else self.entries)

    def height(self, shown: int) -> int:
        """Tell how many lines it takes to show so many, and one before."""
        if not shown:
            return 2
        lines = 1 + shown if self.columns else sum(map(len, self.entries[:shown]))
        return 2 + lines + (shown < self.count)

    def lines(self, shown: int) -> Iterator[RenderableType]:
        """Show so many."""
        yield Text()
        if not shown:
            note = f"{self.count} not shown" if self.count else self.nothing
            yield Text.assemble((self.title, "bold"), "  ", (note, "dim"))
            return
        yield Text(self.title, "bold")
        if self.columns:
            yield Grid(self.columns, shown)
        for entry in self.entries[:shown]:
            yield from entry
        if shown < self.count:
            yield Text(f"  … {self.count - shown} more", "dim")


@dataclass(slots=True)
class Screen:
    """The latest snapshot, cut to the room there is."""

    snapshot: Snapshot
    caption: str = ""
    fits: bool = False
    """Whether what does not fit is left out."""
    trouble: str = ""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        """Lay out the sections, each as tall as there is room for."""
        lines: list[RenderableType] = [self._head()]
        if self.trouble:
            lines.append(Text(self.trouble, "bold white on red"))
        sections = list(_sections(self.snapshot))
        shown = [section.count for section in sections]
        room = (options.height or console.height) - len(lines)
        if self.fits and _height(sections, shown) > room:
            sections = list(_sections(self.snapshot, is_brief=True))
            shown = _shares(sections, room)
        for section, count in zip(sections, shown, strict=True):
            lines += section.lines(count)
        for line in lines:
            if self.fits and isinstance(line, Text):
                line.truncate(options.max_width, overflow="ellipsis")
            yield line

    def _head(self) -> Text:
        found = {
            severity: sum(f.severity == severity for f in self.snapshot.findings)
            for severity in STYLES
        }
        head = Text.assemble((self.snapshot.schema, "bold"), "  ")
        if any(found.values()):
            parts = [
                Text(f"{count} {severity.upper()}", STYLES[severity])
                for severity, count in found.items()
                if count
            ]
            head.append_text(Text(", ").join(parts))
        else:
            head.append("OK", "bold green")
        rest = f"{_words.time(self.snapshot.at)}  schema {self.snapshot.version}"
        if self.caption:
            rest += f"  {self.caption}"
        return head.append(f"  {rest}", "dim")


def finding_lines(finding: InspectedFinding, now: datetime) -> tuple[Text, ...]:
    """Say what is wrong, and what to do."""
    what = Text("  ").append(
        f"{finding.severity.upper():<8}", STYLES.get(finding.severity, "bold")
    )
    what.append(f"  {finding.finding}", "bold").append(f"  {finding.subject}")
    if finding.since is not None:
        what.append(f"  since {_words.age(now - finding.since)}")
    if finding.detail:
        what.append(f": {finding.detail}")
    return what, Text(f"            → {finding.remedy}", "dim")


def _height(sections: Sequence[Section], shown: Sequence[int]) -> int:
    return sum(
        section.height(count) for section, count in zip(sections, shown, strict=True)
    )


def _shares(sections: Sequence[Section], room: int) -> list[int]:
    """Divide the lines there are among the sections, one entry after another."""
    shown = [0] * len(sections)
    growing = set(range(len(sections)))
    while growing:
        for number, section in enumerate(sections):
            if number in growing:
                shown[number] += 1
                if shown[number] > section.count or _height(sections, shown) > room:
                    shown[number] -= 1
                    growing.discard(number)
    return shown


def _sections(snapshot: Snapshot, *, is_brief: bool = False) -> Iterator[Section]:
    """Lay out everything; briefly, without remedies, and what needs a look first."""
    now = snapshot.at
    findings = snapshot.findings
    if is_brief:
        findings = _each_first(findings)
    entries = [finding_lines(each, now)[: 1 if is_brief else None] for each in findings]
    yield Section("Health", entries=entries, nothing="nothing is wrong")
    if snapshot.queues is None:
        yield Section(
            "Queues", nothing="a table is locked or missing, so nothing was read"
        )
        return
    queues, workers = snapshot.queues, snapshot.workers
    if is_brief:
        queues = sorted(queues, key=_urgency, reverse=True)
        workers = sorted(workers, key=lambda w: (w.expired, w.leases), reverse=True)
    yield Section("Queues", list(_queues(queues, now)))
    codes = [
        (queue, code, count)
        for queue in queues
        for code, count in queue.failure_codes.items()
    ]
    codes.sort(key=lambda each: (-each[2], each[0].queue, each[1]))
    since = min((each.counted_since for each in queues), default=now)
    yield Section(f"Failed in the last {_words.age(now - since)}", list(_codes(codes)))
    yield Section("Workers", list(_workers(workers, now)))


def _each_first(findings: Sequence[InspectedFinding]) -> list[InspectedFinding]:
    """Tell of each thing that is wrong before any is told again of another object."""
    seen = Counter[str]()
    places = []
    for each in findings:
        places.append((list(STYLES).index(each.severity), seen[each.finding]))
        seen[each.finding] += 1
    order = sorted(range(len(findings)), key=places.__getitem__)
    return [findings[number] for number in order]


def _urgency(queue: InspectedQueue) -> tuple[timedelta, int, int]:
    age = queue.oldest_ready_age or timedelta(0)
    return age, queue.failed + queue.expired, queue.ready + queue.running


def _queues(queues: Sequence[InspectedQueue], now: datetime) -> Iterator[Column]:
    def counts(name: str) -> Iterable[Text]:
        for queue in queues:
            yield _count(getattr(queue, name), is_estimate=queue.is_estimate)

    yield Column(
        "queue",
        [_name(q.queue, q.is_declared) for q in queues],
        is_number=False,
        is_name=True,
    )
    yield Column("ready", list(counts("ready")), 1)
    yield Column("oldest", [_waiting(q.oldest_ready_age) for q in queues], 2)
    yield Column("running", list(counts("running")), 3)
    yield Column(
        "expired",
        [_alarming(each, "yellow") for each in counts("expired")],
        7,
    )
    yield Column("retrying", list(counts("retry_waiting")), 8)
    yield Column("scheduled", list(counts("scheduled")), 10)
    yield Column("next due", [_until(q.next_due_at, now) for q in queues], 9)
    yield Column(
        "done",
        [
            Text(_words.rate(q.succeeded + q.failed, now - q.counted_since))
            for q in queues
        ],
        5,
    )
    yield Column("failed", [_failed(q) for q in queues], 4)
    yield Column("last claim", [_since(q.last_claimed_at, now) for q in queues], 6)
    yield Column("waiting", [_count(q.workers_waiting) for q in queues], 11)


def _codes(codes: Sequence[tuple[InspectedQueue, str, int]]) -> Iterator[Column]:
    yield Column(
        "queue", [Text(q.queue) for q, _, _ in codes], is_number=False, is_name=True
    )
    yield Column(
        "code", [Text(code) for _, code, _ in codes], 1, is_number=False, is_name=True
    )
    yield Column("jobs", [_count(count) for _, _, count in codes], 2)
    yield Column(
        "of all ends",
        [Text(f"{count / (q.succeeded + q.failed):.0%}") for q, _, count in codes],
        3,
    )


def _workers(workers: Sequence[InspectedWorker], now: datetime) -> Iterator[Column]:
    yield Column(
        "worker",
        [_name(w.worker, w.is_declared) for w in workers],
        is_number=False,
        is_name=True,
    )
    yield Column("sessions", [_sessions(w) for w in workers], 2)
    yield Column(
        "leases", [_count(w.leases, is_estimate=w.is_estimate) for w in workers], 1
    )
    yield Column(
        "expired",
        [
            _alarming(_count(w.expired, is_estimate=w.is_estimate), "yellow")
            for w in workers
        ],
        3,
    )
    yield Column("oldest lease", [_since(w.oldest_leased_at, now) for w in workers], 4)
    yield Column(
        "next to end", [_until(w.next_lease_expires_at, now) for w in workers], 5
    )


def _name(name: str, is_declared: bool) -> Text:
    return Text(name) if is_declared else Text(f"{name} (undeclared)", "yellow")


def _count(count: int, *, is_estimate: bool = False) -> Text:
    return Text(_words.number(count, is_estimate=is_estimate), "" if count else "dim")


def _alarming(text: Text, style: str) -> Text:
    if text.plain != "0":
        text.stylize(style)
    return text


def _waiting(age: timedelta | None) -> Text:
    if age is None:
        return Text("-", "dim")
    style = "bold red" if age > _STANDING else "yellow" if age > _SLOW else ""
    return Text(_words.age(age), style)


def _failed(queue: InspectedQueue) -> Text:
    if not queue.failed:
        return Text("0", "dim")
    share = queue.failed / (queue.succeeded + queue.failed)
    return Text(
        f"{queue.failed:,} ({share:.0%})",
        "red" if share >= 0.5 else "yellow",  # noqa: PLR2004 - as jobs_failing
    )


def _sessions(worker: InspectedWorker) -> Text:
    is_missing = worker.is_declared and not worker.sessions
    return Text(f"{worker.sessions:,}", "yellow" if is_missing else "")


def _since(instant: datetime | None, now: datetime) -> Text:
    if instant is None:
        return Text("-", "dim")
    return Text(f"{_words.age(now - instant)} ago")


def _until(instant: datetime | None, now: datetime) -> Text:
    if instant is None:
        return Text("-", "dim")
    return Text(f"in {_words.age(instant - now)}")
