"""What the command shows of names that somebody else chose."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.text import Text

from lenso_jobs import InspectedFinding
from lenso_jobs.cli import _screen
from lenso_jobs.cli._screen import finding_lines
from lenso_jobs.config import Configuration
from lenso_jobs.exposition import InstanceCollector
from lenso_jobs.operator import check, configure, plan, setup

COMMANDS = (
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\x9b31m",
    "\r",
    "\x08",
    "\x7f",
    "\u202e",
    "\u2066",
)
HOSTILE = f"x[red]%s{{0}}{''.join(COMMANDS)}é"


@pytest.fixture(params=[False, True])
def terminal(request, monkeypatch):
    """What the command has printed, to a terminal or elsewhere."""
    file = io.StringIO()
    for console in (_screen.out, _screen.err):
        monkeypatch.setattr(console, "_file", file)
        monkeypatch.setattr(console, "_force_terminal", request.param)
    return file


def grid():
    _screen.print_grid([HOSTILE], _screen.name("worker", Text))


def finding():
    now = datetime.now(UTC)
    found = InspectedFinding(
        "warning", "membership_stray", HOSTILE, now, HOSTILE, HOSTILE
    )
    for line in finding_lines(found, now):
        _screen.out.print(line, soft_wrap=True)


def test_a_name_is_shown_and_commands_no_terminal(terminal):
    for show in (
        lambda: _screen.say(HOSTILE, "bold"),
        lambda: _screen.say_aside(HOSTILE),
        lambda: _screen.refuse(HOSTILE, HOSTILE),
        grid,
        finding,
    ):
        terminal.truncate(0)
        show()

        shown = terminal.getvalue()
        assert "x[red]%s{0}" in shown
        assert not [command for command in COMMANDS if command in shown]
        assert "\ufffd" in shown


def test_output_for_machines_keeps_every_character(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(_screen.out, "_file", file)

    _screen.as_is(HOSTILE)
    _screen.as_json({"name": HOSTILE})

    text, value = file.getvalue().split("é{")[0] + "é", file.getvalue().split("é{")[1]
    assert text == HOSTILE
    assert json.loads("{" + value) == {"name": HOSTILE}
    assert not [command for command in COMMANDS if command in value]


@pytest.fixture
def names(new_role):
    """Names of roles that exist, each an attack on something that prints or parses."""
    return [
        new_role(template.format(uuid4().hex[:12]))
        for template in (
            "{}'; drop schema jobs_email cascade; --",
            '{}"; select 1; --',
            "{}\n\\! touch /tmp/x\n-- ",
            "{}\x1b[31m\u202e",
            "{} %s %(x)s {{0}} $$ :'v'",
            "{}\\",
            "{},public=X/postgres",
        )
    ]


@pytest.mark.slow
def test_a_document_with_hostile_names_is_declared_and_nothing_else_is_done(
    names, document, new_database
):
    prefix = f"hostile_{uuid4().hex[:10]}"
    conninfo = new_database(prefix)

    def configuration(names):
        return Configuration.from_json(
            document(
                role_prefix=prefix,
                producer_instances=["accounts", *names],
                worker_instances=["email-worker", *names],
            )
        )

    setup(configuration(names), conninfo)
    found = check(configuration(names), conninfo)
    script = plan(configuration([]), conninfo, "configure").script()
    configure(configuration([]), conninfo)
    found_without_them = check(configuration([]), conninfo)

    # Of each: no member of two groups any more, and no caller.
    told = [line for line in script.splitlines() if line.startswith("--    ")]
    assert len(told) == 3 * len(names)
    assert not [line for line in script.splitlines() if line.startswith("\\!")]
    assert (found, found_without_them) == ([], [])


def test_labels_hold_any_name(names, owner, prefix, conninfo):
    for name in names:
        owner.execute(
            "insert into caller (caller, is_producer, is_worker, is_observer)"
            " values (%s, false, true, false)",
            (name,),
        )
    registry = CollectorRegistry()
    collector = InstanceCollector(conninfo, "jobs_email", "operations")
    registry.register(collector)

    text = generate_latest(registry).decode()
    collector.close()

    workers = {
        sample.labels["worker"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name == "lenso_jobs_worker_sessions"
    }
    assert workers == {"email-worker", "spare-worker", *names}
    assert "lenso_jobs_up{" in text
