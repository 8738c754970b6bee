"""Operators' acts through a pooler that keeps one server session a connection."""

from __future__ import annotations

import psycopg
import pytest

from lenso_jobs.operator import (
    OperatorError,
    check,
    configure,
    find_changes,
    plan,
    setup,
    survey,
    uninstall,
    upgrade,
)

ACTS = (setup, upgrade, configure, check, plan, find_changes, survey, uninstall)


@pytest.fixture
def through_pooler(new_instance, monkeypatch):
    """A document and a connection string; clients see a pooler's process number."""
    elsewhere = property(lambda _: 4_000_000)
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", elsewhere)
    return new_instance()


def test_every_act_refuses_a_pooler_and_names_the_option(through_pooler):
    for act in ACTS:
        with pytest.raises(OperatorError, match="pass --through-pooler"):
            act(*through_pooler)


@pytest.mark.slow
def test_every_act_accepts_a_pooler_on_request(through_pooler):
    configuration, conninfo = through_pooler

    done = [act(configuration, conninfo, pooler_ok=True) for act in ACTS]

    assert done[0].configured is True
    assert done[ACTS.index(check)] == []
    with psycopg.connect(conninfo) as connection:
        gone = connection.execute("select to_regnamespace('jobs_email')").fetchone()
    assert gone == (None,)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "command", ["setup", "plan", "upgrade", "check", "configure", "uninstall"]
)
def test_every_command_passes_the_option_on(lenso_jobs, monkeypatch, command):
    elsewhere = property(lambda _: 4_000_000)
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", elsewhere)

    refused = lenso_jobs(command)
    accepted = lenso_jobs(command, "--through-pooler")

    assert refused[0] == (2 if command == "check" else 1)
    assert "pass --through-pooler" in refused[2]
    assert accepted[0] == (command == "uninstall"), accepted  # without --yes
