from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import psycopg
import pytest
from rich.console import Console

from lenso_jobs import InspectedFinding, InspectedQueue, InspectedWorker
from lenso_jobs._prepare import SCHEMA_VERSION
from lenso_jobs.cli import _look, _screen
from lenso_jobs.cli._screen import Screen, Snapshot

NOW = datetime(2026, 1, 31, 18, tzinfo=UTC)
QUIET = InspectedQueue(
    queue="email",
    is_declared=True,
    is_estimate=False,
    ready=0,
    scheduled=0,
    retry_waiting=0,
    running=0,
    expired=0,
    oldest_ready_age=None,
    oldest_lapse_at=None,
    next_due_at=None,
    last_claimed_at=None,
    counted_since=NOW - timedelta(minutes=5),
    succeeded=0,
    failed=0,
    failure_codes={},
    workers_waiting=0,
)
BUSY = replace(
    QUIET,
    ready=12_345,
    running=7,
    oldest_ready_age=timedelta(minutes=3, seconds=20),
    next_due_at=NOW + timedelta(hours=2, minutes=5),
    last_claimed_at=NOW - timedelta(days=4, hours=3),
    succeeded=595,
    failed=5,
    failure_codes={"address.unknown": 1, "smtp.timeout": 4},
)
WORKER = InspectedWorker(
    worker="email-worker",
    is_declared=True,
    is_estimate=False,
    leases=7,
    expired=2,
    oldest_leased_at=NOW - timedelta(seconds=59),
    next_lease_expires_at=NOW + timedelta(seconds=9),
    sessions=3,
)
SILENT = InspectedFinding(
    "critical",
    "queue_silent",
    "email",
    NOW - timedelta(minutes=3, seconds=20),
    "12345 ready",
    "Start workers.",
)


@pytest.fixture
def shown():
    """What is seen of a snapshot on a terminal of some size, line by line."""

    def shown(
        queues=(BUSY,), findings=(), workers=(WORKER,), size=(120, 40), **options
    ):
        console = Console(
            file=io.StringIO(), width=size[0], height=size[1], emoji=False
        )
        snapshot = Snapshot("jobs_email", NOW, 3, findings, queues, workers)
        console.print(Screen(snapshot, **options))
        lines = console.file.getvalue().splitlines()
        assert all(len(line) <= size[0] for line in lines)
        return [line.rstrip() for line in lines]

    return shown


def rows(lines, title):
    """The rows of a section by their first word, with its header, words only."""
    start = next(n for n, each in enumerate(lines) if each.startswith(title)) + 1
    end = lines.index("", start) if "" in lines[start:] else None
    found = [" ".join(each.split()) for each in lines[start:end]]
    return {each.partition(" ")[0]: each.partition(" ")[2] for each in found}


# What is seen.


def test_a_queue_is_shown_by_counts_ages_and_rates_right_aligned(shown):
    lines = shown()

    assert rows(lines, "Queues") == {
        "queue": "ready oldest running failed done last claim expired retrying next due"
        " scheduled waiting",
        "email": "12,345 3m 20s 7 5 (1%) 2.0/s 4d 3h ago 0 0 in 2h 5m 0 0",
    }
    start = lines.index("Queues")
    header, numbers = lines[start + 1 : start + 3]
    for title, value in (("ready", "12,345"), ("failed", "5 (1%)")):
        end = header.index(title) + len(title)
        assert numbers[:end].endswith(value)


def test_failures_are_listed_by_code_the_most_frequent_first(shown):
    lines = shown()

    start = lines.index("Failed in the last 5m 0s")
    assert [each.split() for each in lines[start + 2 : start + 4]] == [
        ["email", "smtp.timeout", "4", "1%"],
        ["email", "address.unknown", "1", "0%"],
    ]


def test_workers_are_counted_by_sessions_and_leases(shown):
    assert rows(shown(), "Workers")["email-worker"] == "7 3 2 59s ago in 9s"


def test_a_paused_queue_is_marked(shown):
    lines = shown([replace(BUSY, queue="old", paused_at=NOW)])

    assert rows(lines, "Queues")["old"].startswith("(paused) 12,345 ")


def test_an_estimate_is_marked_and_so_is_an_undeclared_queue(shown):
    queue = replace(BUSY, queue="old", is_declared=False, is_estimate=True)
    worker = replace(WORKER, is_declared=False, is_estimate=True)

    lines = shown([queue], workers=[worker])

    # What is counted in full, and what is not there, has no mark.
    assert rows(lines, "Queues")["old"] == (
        "(undeclared) ~12,345 3m 20s ~7 5 (1%) 2.0/s 4d 3h ago 0 0 in 2h 5m 0 0"
    )
    assert rows(lines, "Workers")["email-worker"].startswith("(undeclared) ~7 3 ~2 ")


def test_findings_are_printed_by_severity_with_their_remedies(shown):
    lines = shown(findings=[SILENT])

    assert lines[0] == "jobs_email  1 CRITICAL  2026-01-31 18:00:00Z  schema 3"
    start = lines.index("Health")
    assert lines[start + 1 : start + 3] == [
        "  CRITICAL  queue_silent  email  since 3m 20s: 12345 ready",
        "            → Start workers.",
    ]


def test_nothing_wrong_and_nothing_there_is_said_in_words(shown):
    lines = shown([QUIET], workers=())

    assert lines[0].startswith("jobs_email  OK  ")
    assert "Health  nothing is wrong" in lines
    assert "Workers  none" in lines


@pytest.mark.parametrize("size", [(80, 24), (60, 15), (40, 16), (200, 60)])
def test_the_screen_fits_the_terminal_with_what_needs_a_look_first(shown, size):
    calm = [replace(QUIET, queue=f"calm-{n:02}") for n in range(40)]

    lines = shown(
        [*calm, replace(BUSY, queue="late")],
        findings=[SILENT] * 20,
        size=size,
        fits=True,
        trouble="no answer: the server closed the connection",
    )

    assert len(lines) <= size[1]
    assert any(each.startswith("  CRITICAL  queue_silent") for each in lines)
    queues = lines.index("Queues")
    assert lines[queues + 2].split()[0] == "late"
    assert any(each.startswith("  … ") for each in lines[queues:])
    assert lines[1].startswith("no answer: the server closed")


@pytest.mark.slow
def test_a_screen_that_does_not_fit_is_shown_in_full_where_it_can_scroll(shown):
    lines = shown([replace(QUIET, queue=f"calm-{n}") for n in range(90)])

    assert sum(each.startswith("  calm-") for each in lines) == 90


@pytest.mark.parametrize("width", [80, 120])
def test_a_long_name_is_cut_before_a_number_is_left_out(shown, width):
    long = [
        replace(BUSY, queue=letter * 128, failure_codes={letter * 128: 5})
        for letter in "abc"
    ]

    lines = shown([BUSY, *long], size=(width, 40))

    header, *numbers = lines[lines.index("Queues") + 1 :][:5]
    for title in ("ready", "oldest", "running", "failed"):
        assert title in header
    assert [each.split()[1] for each in numbers] == ["12,345"] * 4
    assert "aaaaaaaaaa…" in numbers[1]
    assert [each.split()[2] for each in lines if "…" in each][-3:] == ["5"] * 3


def test_a_name_that_is_not_shown_takes_no_room(shown):
    queues = [replace(BUSY, queue=f"busy-{n:02}") for n in range(30)]

    lines = shown([*queues, replace(QUIET, queue="q" * 128)], size=(80, 24), fits=True)

    (header,) = [each for each in lines if each.strip().startswith("queue  ")][:1]
    assert "last claim" in header
    assert "code" in header or "failed" in header


def test_on_a_small_screen_each_fault_is_shown_once_and_first(shown):
    locked = replace(SILENT, finding="table_locked", subject="session 7")
    behind = replace(SILENT, severity="warning", finding="queue_behind")

    lines = shown(
        findings=[*[SILENT] * 9, locked, behind], size=(80, 20), fits=True, workers=()
    )

    first = lines.index("Health") + 1
    assert [each.split()[:2] for each in lines[first : first + 3]] == [
        ["CRITICAL", "queue_silent"],
        ["CRITICAL", "table_locked"],
        ["CRITICAL", "queue_silent"],
    ]


# The command.


def test_stats_reads_queues_workers_and_findings(lenso_jobs, enqueue, fail):
    fail("smtp.timeout")
    enqueue()

    code, out, err = lenso_jobs("stats")

    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert rows(lines, "Queues")["email"].startswith("1 0s 0 ")
    assert rows(lines, "Queues")["slow"].startswith("0 - 0 ")
    assert rows(lines, "Failed in ")["email"] == "smtp.timeout 1 100%"
    assert rows(lines, "Workers")["spare-worker"] == "0 0 0 - -"
    assert "Health  nothing is wrong" in lines


def test_stats_prints_json_with_durations_in_seconds(lenso_jobs, enqueue):
    enqueue()

    code, out, _ = lenso_jobs("stats", "--json")

    answer = json.loads(out)
    assert code == 0
    assert (answer["schema"], answer["version"]) == ("jobs_email", SCHEMA_VERSION)
    assert (answer["findings"], len(answer["workers"])) == ([], 2)
    email, slow = answer["queues"]
    assert (email["ready"], slow["oldest_ready_age"]) == (1, None)
    assert 0 < email["oldest_ready_age"] < 60
    assert datetime.fromisoformat(answer["at"]).utcoffset() == timedelta(0)


def test_stats_names_the_roles_that_may_look(lenso_jobs):
    code, out, err = lenso_jobs("stats", "--caller", "accounts")

    assert (code, out) == (1, "")
    assert "(42501 unauthorized)" in err
    assert "observer_instances" in err


@pytest.mark.slow
def test_stats_does_not_wait_behind_a_locked_table(lenso_jobs, connect, owner):
    holder = connect()
    holder.execute("begin; lock table live_job")

    code, out, _ = lenso_jobs("stats")

    assert code == 0
    assert f"table_locked  session {holder.pid}" in out
    assert "Queues  a table is locked or missing, so nothing was read" in out


@pytest.mark.slow
@pytest.mark.parametrize("pooler", [1], indirect=True)
def test_stats_works_behind_a_pooler_and_leaves_no_role_behind(lenso_jobs, pooler):
    url = psycopg.conninfo.make_conninfo(**pooler, user="postgres")

    code, out, err = lenso_jobs("stats", "--caller", "operations", url=url)

    assert (code, err) == (0, "")
    assert "Queues" in out
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as next_one:
        role = next_one.execute("select current_setting('role')").fetchone()
    assert role == ("none",)


# Watching.


@pytest.fixture
def pauses(monkeypatch):
    """Do one thing after another instead of pausing; Ctrl-C at the end."""

    def pauses(*acts):
        left = iter(acts)

        def sleep(_):
            act = next(left, None)
            if act is None:
                raise KeyboardInterrupt
            act()

        monkeypatch.setattr(_look, "time", SimpleNamespace(sleep=sleep))

    return pauses


@pytest.fixture
def terminal(monkeypatch):
    """Let the output be a terminal; return what was written so far."""
    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        legacy_windows=False,
        width=120,
        height=40,
        _environ={"TERM": "xterm"},
    )
    monkeypatch.setattr(_screen, "out", console)
    return console.file.getvalue


@pytest.fixture
def cut(owner):
    """End the command's own session."""

    def cut():
        assert owner.value(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where application_name = 'lenso-jobs' and datname = current_database()"
        )

    return cut


@pytest.mark.slow
def test_a_terminal_that_cannot_be_drawn_on_is_shown_one_screen_after_another(
    lenso_jobs, pauses, terminal, monkeypatch
):
    monkeypatch.setattr(_screen.out, "_environ", {"TERM": "dumb"})
    pauses(lambda: None)

    code, _, _ = lenso_jobs("stats", "--watch")

    assert code == 0
    assert terminal().count("Health") == 2
    assert "\x1b[?1049h" not in terminal()


@pytest.mark.slow
def test_watching_survives_a_lost_connection_and_says_so(
    lenso_jobs, pauses, terminal, cut, enqueue
):
    seen = []
    pauses(
        lambda: seen.append(terminal()),
        cut,
        lambda: seen.append(terminal()),
        lambda: seen.append(terminal()),
    )

    code, _, err = lenso_jobs("stats", "--watch", "--every", "9")

    assert (code, err) == (0, "")
    first, lost, found = seen
    assert "\x1b[?1049h" in first
    assert "every 9 s, Ctrl-C ends" in first
    assert "no answer since" in lost.removeprefix(first)
    assert "terminating connection" in lost.removeprefix(first)
    assert "no answer since" not in found.removeprefix(lost).rpartition("Health")[2]
    assert terminal().endswith("\x1b[?25h\x1b[?1049l")


@pytest.fixture
def lost(owner):
    """Take the Instance's owner a table, and give it back."""

    def lost(give_back=None):
        owner.execute(f"alter table live_job owner to {give_back or 'current_user'}")

    return lost


@pytest.mark.slow
def test_watching_goes_on_where_the_instance_refuses(
    lenso_jobs, pauses, terminal, lost, prefix
):
    seen = []
    pauses(
        lost,
        lambda: seen.append(terminal()),
        lambda: lost(f"{prefix}_owner"),
        lambda: seen.append(terminal()),
    )

    code, _, err = lenso_jobs("stats", "--watch")

    assert (code, err) == (0, "")
    refused, found = seen
    assert "no answer since" in refused
    assert "table live_job is lost" in refused
    assert "run lenso-jobs check" in " ".join(refused.split())
    assert "no answer since" not in found.removeprefix(refused).rpartition("Health")[2]


def test_an_error_at_the_first_read_ends_the_command_at_once(lenso_jobs, lost):
    lost()

    code, _, err = lenso_jobs("stats", "--watch")

    assert code == 1
    assert "the Instance's owner has lost its own table" in err


def test_watching_leaves_the_terminal_as_it_was_when_it_is_terminated(
    lenso_jobs, pauses, terminal
):
    before = signal.getsignal(signal.SIGTERM)
    pauses(lambda: os.kill(os.getpid(), signal.SIGTERM))

    code, _, _ = lenso_jobs("stats", "--watch")

    assert code == 128 + signal.SIGTERM
    assert terminal().endswith("\x1b[?25h\x1b[?1049l")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_watching_for_a_machine_prints_one_object_a_line(
    lenso_jobs, pauses, cut, enqueue
):
    pauses(enqueue, cut, lambda: None)

    code, out, err = lenso_jobs("stats", "--watch", "--json")

    assert code == 0
    assert [json.loads(each)["queues"][0]["ready"] for each in out.splitlines()] == [
        0,
        1,
        1,
    ]
    assert err.startswith("no answer: ")


def test_watching_an_unreachable_server_fails_at_once(lenso_jobs, tmp_path):
    code, _, err = lenso_jobs("stats", "--watch", url=f"host={tmp_path} dbname=jobs")

    assert code == 2
    assert "the server cannot be reached" in err
