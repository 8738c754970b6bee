"""The fault: a migration is killed, or waits for a reader.

The schema is that of one version. Nobody waits long, and the next run finishes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import psycopg
import pytest

import lenso_jobs
import release
from lenso_jobs import Jobs, _assets
from lenso_jobs.operator import (
    OperatorError,
    _setup,
    check,
    setup,
    upgrade,
)

ALL = release.NAMES
LOCK_TIMEOUT = 5.0
COMMAND = """
import pathlib, sys
from lenso_jobs import _assets, cli
_assets._PACKAGE = pathlib.Path(sys.argv.pop(1))
cli.main()
"""
# What somebody else does so that the upgrade waits there.
STEPS = {
    "before it begins": "lock table yoyo_lock in share mode",
    "in a step of its own transactions": "lock table attempt in access exclusive mode",
    "as it records a step": "lock table _yoyo_migration in share mode",
    "in the middle of a transaction": "select from error_code",
}


@pytest.fixture
def first(instance_of, databases, later):
    """An Instance of this release, with a job that has ended once; a later one is installed."""
    configuration, conninfo = instance_of(), databases()
    setup(configuration, conninfo)
    later()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        producing = Jobs(connection, "jobs_email", caller="accounts")
        producing.enqueue("email", "send", {}, idempotency_key="first")
        working = Jobs(connection, "jobs_email", caller="email-worker")
        (lease,) = working.claim("email")
        working.fail(lease, "broken", retryable=False)
    return configuration, conninfo


@pytest.fixture
def session(first):
    """Open sessions of the superuser in that Instance."""
    opened = []

    def session(**parameters):
        opened.append(
            psycopg.connect(first[1], options="-c search_path=jobs_email", **parameters)
        )
        return opened[-1]

    yield session
    for each in opened:
        each.close()


def version(session):
    (row,) = session(autocommit=True).execute("select version from installed_version")
    return row[0]


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_an_upgrade_whose_process_is_killed_in_a_step_is_finished_by_the_next(
    step, first, session, until, document, tmp_path
):
    configuration, conninfo = first
    path = tmp_path / "jobs.json"
    path.write_text(document(role_prefix=configuration.prefix))
    holder, onlooker = session(), session(autocommit=True)
    holder.execute(STEPS[step])
    ask = (
        "select from pg_stat_activity where application_name = 'lenso-jobs'"
        f" and {holder.info.backend_pid} = any (pg_blocking_pids(pid))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, _assets._PACKAGE, "upgrade", "--config", path],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(lenso_jobs.__file__).parents[1]),
            "JOBS_DATABASE_URL": conninfo,
        },
    )
    until(lambda: process.poll() is not None or onlooker.execute(ask).fetchall())
    process.kill()
    assert process.wait(20) == -9
    holder.rollback()
    between = version(session)

    upgrade(configuration, conninfo)

    assert between in (1, len(ALL))
    assert check(configuration, conninfo) == []


@pytest.mark.slow
def test_a_lock_left_behind_is_reported_with_the_way_to_break_it(
    first, session, monkeypatch
):
    monkeypatch.setattr(_setup, "LOCK_SECONDS", 0.05)
    holder = session(autocommit=True)
    holder.execute(
        "insert into yoyo_lock (locked, ctime, pid) values (1, localtimestamp, 7)"
    )

    with pytest.raises(OperatorError, match=r"process 7.*upgrade --break-lock"):
        upgrade(*first)
    between = version(session)
    report = upgrade(*first, break_lock=True)

    assert between == 1
    assert list(report.migrations) == ALL[1:]


@pytest.mark.slow
def test_a_reader_in_the_way_delays_the_upgrade_and_no_worker_for_long(
    first, session, background, until, monkeypatch
):
    monkeypatch.setattr(_setup, "PAUSE_SECONDS", 0.2)
    reader, report, onlooker = session(), session(), session(autocommit=True)
    # The index waits for the one's snapshot, what comes after it for the other's lock.
    report.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    for each in (reader, report):
        each.execute("select from job, live_job, attempt, error_code")
    over, said = Event(), []

    def say(sentence):
        said.append((sentence, invalid(session)))
        reader.rollback()

    def go_on():
        longest, done = 0.0, 0
        with psycopg.connect(first[1], autocommit=True) as connection:
            producing = Jobs(connection, "jobs_email", caller="accounts")
            working = Jobs(connection, "jobs_email", caller="email-worker")
            while not over.wait(0.01):
                began = time.monotonic()
                producing.enqueue("email", "send", {}, idempotency_key=f"k{done}")
                (lease,) = working.claim("email")
                working.renew(lease)
                working.complete(lease)
                longest = max(longest, time.monotonic() - began)
                done += 1
        return longest, done

    worker = background(go_on)
    running = background(upgrade, *first, say=say)
    try:
        until(
            lambda: onlooker.execute(
                "select from pg_stat_activity where wait_event = 'virtualxid'"
                " and %s = any (pg_blocking_pids(pid))",
                (report.info.backend_pid,),
            ).fetchall()
        )
        building = invalid(session)
        report.rollback()
        migrations = running.result(60).migrations
    finally:
        over.set()
    longest, done = worker.result(20)

    assert list(migrations) == ALL[1:]
    ((sentence, broken),) = said
    assert f"waited for session {reader.info.backend_pid} (role postgres" in sentence
    assert sentence.startswith(f"migration {ALL[2]}: ")
    assert "again in 0.2 s (1 of 10)" in sentence
    assert building == ["attempt_worker_idx"]
    assert broken == invalid(session) == []
    assert done > 50
    assert longest < LOCK_TIMEOUT
    assert check(*first) == []


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["select 1/0", "create table job (n integer)"])
def test_a_migration_that_fails_half_way_changes_nothing_and_can_be_tried_again(
    statement, first, session
):
    broken = _assets.asset_dir("migrations") / f"{ALL[-1]}.sql"
    text = broken.read_text()
    middle = text.index("create or replace function")
    broken.write_text(f"{text[:middle]}{statement};\n{text[middle:]}")

    with pytest.raises(psycopg.Error):
        upgrade(*first)
    between = version(session)
    broken.write_text(text)
    report = upgrade(*first)

    assert between == 1
    assert list(report.migrations) == ALL[-1:]
    assert check(*first) == []


@pytest.mark.slow
def test_a_broken_index_that_a_killed_run_left_is_made_anew(first, session):
    owner = session(autocommit=True)
    owner.execute(
        "create index attempt_worker_idx on attempt (worker, ended_at);"
        " update pg_index set indisvalid = false"
        " where indexrelid = 'attempt_worker_idx'::regclass"
    )
    before = invalid(session)

    upgrade(*first)

    assert before == ["attempt_worker_idx"]
    assert invalid(session) == []


def invalid(session):
    rows = session(autocommit=True).execute(
        "select indexrelid::regclass::text from pg_index where not indisvalid"
    )
    return [name for (name,) in rows]
