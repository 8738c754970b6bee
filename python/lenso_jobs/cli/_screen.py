"""How results look: tables and sentences for people, JSON for programs."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from lenso_jobs import InspectedFinding, InspectedQueue, InspectedWorker

STYLES = {"critical": "bold red", "warning": "yellow", "notice": "cyan"}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SLOW, _STANDING = timedelta(minutes=1), timedelta(minutes=10)
_WIDE = 240
_ROOMY = 10_000
# Control characters, and marks that change the order of the text.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class _Plain(Console):
    """Prints names as text: a role's name may hold commands for the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            if control is None:
                text = _COMMANDS.sub("\N{REPLACEMENT CHARACTER}", text)  # noqa: PLW2901
            yield Segment(text, style, control)

    def on_broken_pipe(self) -> None:
        # Rich would exit with 1, which says that something was refused.
        raise BrokenPipeError


# Without emoji: a job's kind may look like the code of one.
out = _Plain(highlight=False, emoji=False)
err = _Plain(stderr=True, highlight=False, emoji=False)


# Sentences and JSON.


def refuse(message: str, hint: str | None = None) -> None:
    """Print an error and what to do next on standard error."""
    err.print("error:", message, style="bold red", markup=False, soft_wrap=True)
    if hint:
        err.print(hint, markup=False, soft_wrap=True)


def say(line: str | Text, style: str | None = None) -> None:
    """Print one line, unwrapped."""
    out.print(line, style=style, markup=False, soft_wrap=True)


def say_aside(line: str) -> None:
    """Print one line about progress on standard error."""
    err.print(line, style="dim", markup=False, soft_wrap=True)


def as_is(text: str) -> None:
    """Print text that a program reads, byte for byte unless on a terminal."""
    if out.is_terminal:
        out.print(text, markup=False, soft_wrap=True, end="")
    else:
        text.encode(getattr(out.file, "encoding", None) or "utf-8")
        out.file.write(text)
        out.file.flush()


def as_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object; times as RFC 3339, lengths of time in seconds."""
    say(json.dumps(dict(fields), default=_plain))


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


# Numbers, lengths of time and instants.


def jobs(count: int) -> str:
    """Return a number of jobs in words."""
    return f"{count:,} job{'' if count == 1 else 's'}"


def age(length: timedelta) -> str:
    """Return a length of time in its two largest units."""
    seconds = max(0, int(length.total_seconds()))
    for large, small in (("d", "h"), ("h", "m"), ("m", "s")):
        if seconds >= UNITS[large]:
            many, rest = divmod(seconds, UNITS[large])
            return f"{many:,}{large} {rest // UNITS[small]}{small}"
    return f"{seconds}s"


def time(instant: datetime) -> str:
    """Return an instant in UTC, to the second."""
    return f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def ago(instant: datetime, now: datetime) -> str:
    """Return an instant with its distance from now."""
    is_past = instant <= now
    distance = f"{age(now - instant)} ago" if is_past else f"in {age(instant - now)}"
    return f"{time(instant)} ({distance})"


def _rate(count: int, length: timedelta) -> str:
    if not count or length <= timedelta(0):
        return "0/s"
    each = count / length.total_seconds()
    if each < 1:
        return f"{each * 60:.1f}/min"
    return f"{each:,.0f}/s" if each >= 100 else f"{each:.1f}/s"  # noqa: PLR2004


# Tables.


class Column(NamedTuple):
    """A column: its title, and what it shows of a row."""

    title: str
    cell: Callable[[Any], str | Text]
    is_number: bool = True
    is_name: bool = False
    """Whether long cells are cut, so that the numbers beside them stay."""


text = partial(Column, is_number=False)
"""A column of text that is never cut."""
name = partial(Column, is_number=False, is_name=True)
"""A column of names, which may be cut."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; without its last columns where the terminal is too narrow for them."""

    rows: Sequence[Any]
    columns: Sequence[Column]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        """Print the columns that there is room for."""
        table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
        for column in self.columns:
            table.add_column(
                column.title,
                justify="right" if column.is_number else "left",
                max_width=max(12, options.max_width // 3) if column.is_name else None,
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in self.rows:
            # Text: a string could hold rich's markup.
            table.add_row(*(Text.assemble(each.cell(row)) for each in self.columns))
        roomy = options.update(max_width=_ROOMY)
        while len(table.columns) > 1 and (
            Measurement.get(console, roomy, table).maximum > options.max_width
        ):
            table.columns.pop()
        yield table


def print_wide(what: RenderableType) -> None:
    """Print what has tables; in full where the output is no terminal."""
    console = out
    if not out.is_terminal:
        console = _Plain(file=out.file, width=_WIDE, highlight=False, emoji=False)
    console.print(what)


def print_grid(rows: Sequence[Any], *columns: Column) -> None:
    """Print a table."""
    print_wide(Grid(rows, columns))


def print_fields(fields: Mapping[str, object], indent: int = 0) -> None:
    """Print names and values, one a line, without those that are None."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for field, value in fields.items():
        if value is not None:
            shown = value.isoformat() if isinstance(value, datetime) else str(value)
            table.add_row(Text(" " * indent + field), Text(shown))
    out.print(table)


# The screen of an Instance.


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was read at one time; *queues* is None where a table was locked or is gone."""

    schema: str
    at: datetime
    version: int
    findings: Sequence[InspectedFinding]
    queues: Sequence[InspectedQueue] | None
    workers: Sequence[InspectedWorker]


class Section(NamedTuple):
    """A title, and below it as many rows as there is room for."""

    title: str
    rows: Sequence[Any] = ()
    """Lines, or what *columns* show."""
    columns: Sequence[Column] = ()
    nothing: str = "none"

    def height(self, shown: int) -> int:
        """Return how many lines so many rows take, with one before them."""
        rest = bool(self.columns) + (shown < len(self.rows))
        return 2 + shown + rest if shown else 2

    def lines(self, shown: int) -> Iterator[RenderableType]:
        """Yield so many rows, and how many are left out."""
        left = len(self.rows) - shown
        yield Text()
        if not shown:
            note = f"{left} not shown" if left else self.nothing
            yield Text.assemble((self.title, "bold"), "  ", (note, "dim"))
            return
        yield Text(self.title, "bold")
        if self.columns:
            yield Grid(self.rows[:shown], self.columns)
        else:
            yield from self.rows[:shown]
        if left:
            yield Text(f"  … {left} more", "dim")


@dataclass(slots=True)
class Screen:
    """The latest snapshot: in full, or what fits the terminal."""

    snapshot: Snapshot
    caption: str = ""
    fits: bool = False
    trouble: str = ""
    """Why there is no newer snapshot."""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        """Print the sections below one line about all."""
        alarm = "bold white on red"
        lines: list[RenderableType] = [self._head()]
        lines += (Text(each, alarm) for each in self.trouble.splitlines())
        sections = list(_sections(self.snapshot))
        shown = [len(section.rows) for section in sections]
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
        found = Counter[str](each.severity for each in self.snapshot.findings)
        counts = [
            Text(f"{found[severity]} {severity.upper()}", style)
            for severity, style in STYLES.items()
            if found[severity]
        ]
        rest = f"  {time(self.snapshot.at)}  schema {self.snapshot.version}"
        return Text.assemble(
            (f"{self.snapshot.schema}  ", "bold"),
            Text(", ").join(counts or [Text("OK", "bold green")]),
            (f"{rest}  {self.caption}".rstrip(), "dim"),
        )


def _height(sections: Sequence[Section], shown: Sequence[int]) -> int:
    return sum(each.height(n) for each, n in zip(sections, shown, strict=True))


def _shares(sections: Sequence[Section], room: int) -> list[int]:
    """Divide the lines of the screen among the sections, one row after another."""
    shown = [0] * len(sections)
    for most in range(1, room):
        for number, section in enumerate(sections):
            grown = [*shown]
            grown[number] = min(most, len(section.rows))
            if _height(sections, grown) <= room:
                shown = grown
    return shown


def finding_lines(finding: InspectedFinding, now: datetime) -> tuple[Text, Text]:
    """Return two lines: what is wrong, and what to do."""
    line = Text.assemble(
        "  ",
        (f"{finding.severity.upper():<8}", STYLES.get(finding.severity, "bold")),
        (f"  {finding.finding}", "bold"),
        f"  {finding.subject}",
    )
    if finding.since is not None:
        line.append(f"  since {age(now - finding.since)}")
    if finding.detail:
        line.append(f": {finding.detail}")
    return line, Text(f"            → {finding.remedy}", "dim")


def _sections(snapshot: Snapshot, *, is_brief: bool = False) -> Iterator[Section]:
    """Yield the sections; brief ones without remedies, and the most urgent rows first."""
    now, findings = snapshot.at, snapshot.findings
    queues, workers = snapshot.queues, snapshot.workers
    if is_brief:
        seen = Counter[str]()

        def rank(finding: InspectedFinding) -> tuple[int, int]:
            # One of each kind of finding comes before the second of any.
            seen[finding.finding] += 1
            return list(STYLES).index(finding.severity), seen[finding.finding]

        findings = sorted(findings, key=rank)
        queues = queues and sorted(queues, key=_urgency, reverse=True)
        workers = sorted(workers, key=lambda w: (w.expired, w.leases), reverse=True)
    most = 1 if is_brief else 2
    lines = [line for each in findings for line in finding_lines(each, now)[:most]]
    yield Section("Health", lines, nothing="nothing is wrong")
    if queues is None:
        nothing = "a table is locked or missing, so nothing was read"
        yield Section("Queues", nothing=nothing)
        return
    yield Section("Queues", queues, list(queue_columns(now)))
    codes = [(q, code, n) for q in queues for code, n in q.failure_codes.items()]
    codes.sort(key=lambda each: (-each[2], each[0].queue, each[1]))
    since = min((each.counted_since for each in queues), default=now)
    yield Section(f"Failed in the last {age(now - since)}", codes, _CODES)
    yield Section("Workers", workers, list(worker_columns(now)))


def _urgency(queue: InspectedQueue) -> tuple[timedelta, int, int]:
    oldest = queue.oldest_ready_age or timedelta(0)
    return oldest, queue.failed + queue.expired, queue.ready + queue.running


# The columns that matter least come last: a narrow terminal leaves those out.


def queue_columns(now: datetime) -> Iterator[Column]:
    """Yield what is shown of a queue."""
    yield name("queue", lambda q: _declared(q.queue, q.is_declared, q.paused_at))
    yield Column("ready", lambda q: _count(q.ready, q))
    yield Column("oldest", lambda q: _waiting(q.oldest_ready_age))
    yield Column("running", lambda q: _count(q.running, q))
    yield Column("failed", _failed)
    yield Column("done", lambda q: _rate(q.succeeded + q.failed, now - q.counted_since))
    yield Column("last claim", lambda q: _since(q.last_claimed_at, now))
    yield Column("expired", lambda q: _count(q.expired, q, "yellow"))
    yield Column("retrying", lambda q: _count(q.retry_waiting, q))
    yield Column("next due", lambda q: _until(q.next_due_at, now))
    yield Column("scheduled", lambda q: _count(q.scheduled, q))
    yield Column("waiting", lambda q: _count(q.workers_waiting))


_CODES = (
    name("queue", lambda c: c[0].queue),
    name("code", lambda c: c[1]),
    Column("jobs", lambda c: _count(c[2])),
    Column("of all ends", lambda c: f"{c[2] / (c[0].succeeded + c[0].failed):.0%}"),
)


def worker_columns(now: datetime) -> Iterator[Column]:
    """Yield what is shown of a worker."""
    yield name("worker", lambda w: _declared(w.worker, w.is_declared))
    yield Column("leases", lambda w: _count(w.leases, w))
    yield Column("sessions", _sessions)
    yield Column("expired", lambda w: _count(w.expired, w, "yellow"))
    yield Column("oldest lease", lambda w: _since(w.oldest_leased_at, now))
    yield Column("next to end", lambda w: _until(w.next_lease_expires_at, now))


def _declared(name: str, is_declared: bool, paused_at: datetime | None = None) -> Text:
    if not is_declared or paused_at:
        word = "paused" if is_declared else "undeclared"
        return Text(f"{name} ({word})", "yellow")
    return Text(name)


def _count(
    count: int | None,
    of: InspectedQueue | InspectedWorker | None = None,
    style: str = "",
) -> Text:
    if count is None:
        return Text("?", "yellow")  # the server hides it
    mark = "~" if count and of is not None and of.is_estimate else ""
    return Text(f"{mark}{count:,}", style if count else "dim")


def _waiting(length: timedelta | None) -> Text:
    if length is None:
        return Text("-", "dim")
    style = "bold red" if length > _STANDING else "yellow" if length > _SLOW else ""
    return Text(age(length), style)


def _failed(queue: InspectedQueue) -> Text:
    if not queue.failed:
        return Text("0", "dim")
    share = queue.failed / (queue.succeeded + queue.failed)
    # The share at which inspect_health finds jobs_failing.
    style = "red" if share >= 0.5 else "yellow"  # noqa: PLR2004
    return Text(f"{queue.failed:,} ({share:.0%})", style)


def _sessions(worker: InspectedWorker) -> Text:
    is_missing = worker.is_declared and worker.sessions == 0
    return Text("0", "yellow") if is_missing else _count(worker.sessions)


def _since(instant: datetime | None, now: datetime) -> Text:
    return Text(f"{age(now - instant)} ago") if instant else Text("-", "dim")


def _until(instant: datetime | None, now: datetime) -> Text:
    return Text(f"in {age(instant - now)}") if instant else Text("-", "dim")
