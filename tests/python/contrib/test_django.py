"""Jobs in Django's transactions, in its worker, and behind its tasks.

docs/applications/frameworks.md has parts of the project's files.
"""

# ruff: noqa: PLC0415 - once the project is loaded

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs import AsyncWorker, IdempotencyConflict, Kinds, Release, Worker

django = pytest.importorskip("django", reason="the extra django")
PROJECT = Path(__file__).parent / "project"


@pytest.fixture(scope="module")
def project():
    """Load the project into this process, once."""
    sys.path.insert(0, str(PROJECT))
    os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
    django.setup()


@pytest.fixture
def alias(project, conninfo):
    """Connect Django's database to that of this test."""
    from django.db import connections

    given = conninfo_to_dict(conninfo)
    settings = connections.settings["default"]
    settings.update(NAME=given["dbname"], HOST=given["host"], PORT=given["port"])
    settings["USER"] = given["user"]
    yield "default"
    connections["default"].close()
    del connections["default"]


@pytest.fixture
def jobs(alias):
    from lenso_jobs.contrib.django import jobs_on

    return jobs_on("jobs_email", caller="accounts")


@pytest.fixture
def done(alias):
    from shop import tasks

    tasks.done.clear()
    return tasks.done


@pytest.fixture
def committed(owner):
    """Return how many jobs are committed."""
    return lambda: owner.value("select count(*) from job")


@pytest.fixture
def worked(conninfo):
    def worked(handler, kind=Worker):
        worker = kind(
            conninfo,
            schema="jobs_email",
            queue="email",
            handler=handler,
            caller="email-worker",
            concurrency=1,
        )
        run = worker.run(until_idle=True)
        return run if kind is Worker else asyncio.run(run)

    return worked


def enqueue(jobs, key="k", kind="send"):
    return jobs.enqueue("email", kind, {}, idempotency_key=key)


def test_a_job_is_committed_and_rolled_back_with_atomic(jobs, committed):
    from django.db import transaction

    with transaction.atomic():
        enqueue(jobs)
        transaction.set_rollback(True)
    assert committed() == 0

    with transaction.atomic():
        enqueue(jobs)
        assert committed() == 0
    assert committed() == 1

    with transaction.atomic():
        enqueue(jobs, "second")
        with pytest.raises(IdempotencyConflict), transaction.atomic():
            enqueue(jobs, kind="other")
    assert committed() == 2


def test_a_call_outside_of_atomic_is_refused(jobs, committed):
    from django.db import connection, transaction
    from django.db.transaction import TransactionManagementError

    with pytest.raises(TransactionManagementError, match=r"within transaction\.atomic"):
        enqueue(jobs)
    connection.ensure_connection()
    with pytest.raises(TransactionManagementError, match=r"within transaction\.atomic"):
        enqueue(jobs)
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError, match="until the end of"):
            enqueue(jobs)
    assert committed() == 0


def test_a_client_goes_on_with_the_connection_that_django_has_now(jobs, committed):
    from django.db import connection, transaction

    for key in ("k", "second"):
        with transaction.atomic():
            enqueue(jobs, key)
        connection.close()

    assert committed() == 2


def test_a_worker_gives_each_job_a_connection_that_lives(done, worked, owner):
    from django.db import connection
    from shop import orders

    from lenso_jobs.contrib.django import with_connections

    kinds = Kinds()

    @kinds("receipt", queue="email")
    def receipt(lease, payload):
        orders.receipt(lease)
        done.append(connection.connection.info.backend_pid)

    orders.place(1)
    orders.place(2)

    # Django keeps no connection longer than a request, unless CONN_MAX_AGE says so.
    assert worked(with_connections(kinds)).succeeded == 2
    assert len(set(done)) == 2
    assert (
        owner.value("select count(*) from pg_stat_activity where pid = any (%s)", done)
        == 0
    )


def test_a_coroutine_gives_each_job_a_connection_that_lives(jobs, done, worked):
    from asgiref.sync import sync_to_async
    from django.db import connection, transaction

    from lenso_jobs.contrib.django import with_connections

    def look():
        connection.ensure_connection()
        done.append(connection.connection.info.backend_pid)

    @with_connections
    async def handler(lease):
        await sync_to_async(look)()

    with transaction.atomic():
        enqueue(jobs)
        enqueue(jobs, "second")

    assert worked(handler, AsyncWorker).succeeded == 2
    assert len(set(done)) == 2


# django.tasks.


def test_a_task_runs_with_its_arguments(done, worked, owner):
    from django.db import transaction
    from shop.tasks import note, send, wave

    from lenso_jobs.contrib.django.tasks import run_task

    with transaction.atomic():
        send.enqueue("ada", copy=["grace"])
        assert owner.value("select count(*) from job") == 0
    noted = note.enqueue("hello")
    asyncio.run(wave.aenqueue("mary"))

    assert worked(run_task).succeeded == 3
    assert done == [("ada", ["grace"]), ("hello", 1, noted.id), "mary"]


def test_a_task_waits_until_its_time(done, owner):
    from shop.tasks import send

    later = datetime.now(UTC) + timedelta(hours=1)
    result = send.using(run_after=later).enqueue("ada")

    job = owner.row("select kind, max_attempts from job")
    assert job == {"kind": "shop.tasks.send", "max_attempts": 2}
    (due,) = owner.rows(
        "select available_at from live_job where job_id = %s", result.id
    )
    assert due == (later,)


def test_what_the_backend_cannot_do_is_refused(alias, committed):
    from django.core.exceptions import ImproperlyConfigured
    from shop.tasks import send

    from lenso_jobs.contrib.django.tasks import JobsBackend

    # Its class has one name in Django 6, and another in the package before it.
    with pytest.raises(Exception, match="does not support setting priority"):
        send.using(priority=3)
    with pytest.raises(TypeError, match="Unsupported type"):
        send.enqueue(object())
    with pytest.raises(NotImplementedError):
        send.get_result("1")
    for options in ({}, {"schema": "jobs_email", "queue": "email"}):
        with pytest.raises(ImproperlyConfigured, match="OPTIONS must have schema"):
            JobsBackend("default", {"OPTIONS": options})
    assert committed() == 0


def test_a_kind_that_is_no_task_of_an_application_is_not_run(alias):
    from lenso_jobs.contrib.django.tasks import run_task

    for kind in ("shop.tasks.gone", "shop.orders.place", "os.getcwd", "this.s", "send"):
        with pytest.raises(Release):
            run_task(SimpleNamespace(kind=kind))
    assert "this" not in sys.modules


def test_the_page_shows_files_of_the_project():
    page = Path(__file__).parents[3] / "docs" / "applications" / "frameworks.md"
    project = [each.read_text("utf-8") for each in PROJECT.glob("**/*.py")]
    shown = re.findall(
        r"<!-- run by \S+/test_django\.py -->\n```python\n(.*?)```",
        page.read_text("utf-8"),
        re.DOTALL,
    )

    assert shown
    for block in shown:
        assert any(block.rstrip() in text for text in project), block


@pytest.mark.slow
def test_manage_py_works_a_queue_until_a_signal_ends_it(
    environment, enqueue, document, tmp_path
):
    (tmp_path / "jobs.json").write_text(document())
    enqueue(kind="receipt", payload={"order": 7})
    process = subprocess.Popen(
        [
            *(sys.executable, "-W", "error", "-m", "django", "lenso_work"),
            *("--settings", "settings", "--pythonpath", PROJECT),
            *("--config", tmp_path / "jobs.json", "--queue", "email"),
            *("--handler", "shop.orders:receipt", "--caller", "email-worker"),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    first = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=30)

    assert first == "receipt 7\n", errors + said
    assert process.returncode == 0, errors


@pytest.mark.slow
def test_manage_py_refuses_what_the_command_refuses(environment):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "django", "lenso_work"),
            *("--settings", "settings", "--pythonpath", PROJECT, "--queue", "email"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 2
    assert "Missing option" in result.stderr
