"""The pytest plugin: its Instance in this process, its fixtures in a pytest of theirs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import lenso_jobs
from lenso_jobs import (
    Fail,
    InvalidLease,
    JobNotFound,
    Retry,
    Unauthorized,
    embedded,
)
from lenso_jobs.embedded import SERVER_URL, EmbeddedError, find_programs
from lenso_jobs.testing import JobsInstance, _server

ROOT = Path(__file__).parents[2]
PACKAGE = Path(lenso_jobs.__file__).parent
SERVER = "LENSO_JOBS_TEST_SERVER"
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENT = re.search(r"```json\n(.*?)```", README, re.DOTALL).group(1)
OVERRIDE, EXAMPLE = re.findall(
    r"```python\n([^`]*def (?:jobs_configuration|test_)[^`]*)```", README
)


@pytest.fixture
def instance(configuration, conninfo):
    """The plugin's view of this test's own Instance."""
    with JobsInstance(configuration(), conninfo) as instance:
        yield instance


@pytest.fixture
def enqueued(instance):
    """Enqueue a job through the plugin; answers it."""

    def enqueued(kind="send", queue="email", **options):
        return instance.producer.enqueue(
            queue, kind, {"n": 1}, idempotency_key=f"key-{uuid4()}", **options
        )

    return enqueued


@pytest.fixture
def start(tmp_path):
    """Start a pytest with the plugin on files of its own, on the suite's server."""
    started = []

    def start(files, *arguments, server=os.environ[SERVER], **environment):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        kept = ("PG", "PYTEST_", "LENSO_JOBS_")
        process = subprocess.Popen(
            [
                *(sys.executable, "-W", "error", "-m", "pytest"),
                *("-p", "lenso_jobs.testing", "-p", "no:cacheprovider"),
                *("-q", "--rootdir", tmp_path, *arguments),
            ],
            cwd=tmp_path,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith(kept)},
                **{k: v for k, v in os.environ.items() if k == "PG_BINDIR"},
                **({SERVER_URL: server} if server else {}),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "PYTHONPATH": str(PACKAGE.parent),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def left(owner):
    """List the databases and roles on the server whose names hold one of some parts."""

    def left(*parts):
        return owner.rows(
            "select datname from pg_database where datname ~ any (%s)"
            " union all select rolname from pg_roles where rolname ~ any (%s)",
            list(parts),
            list(parts),
        )

    return left


def finished(process):
    """Wait for a pytest to succeed; answers how many tests passed."""
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return re.search(r"\d+ passed", said)[0]


# Who a session is.


def test_a_client_can_do_only_what_its_caller_may(instance, enqueued):
    enqueued()

    with pytest.raises(Unauthorized):
        instance.producer.claim("email")
    with pytest.raises(Unauthorized):
        instance.worker.enqueue("email", "send", {}, idempotency_key="1")
    with pytest.raises(Unauthorized):
        instance.observer.claim("email")
    (lease,) = instance.worker.claim("email")
    assert instance.jobs("operations").inspect(lease.job_id).worker == "email-worker"


def test_a_client_for_asyncio_is_its_caller_until_the_block_ends(instance):
    async def act():
        async with (
            instance.async_jobs("accounts") as accounts,
            instance.async_jobs("email-worker") as worker,
        ):
            job = await accounts.enqueue("email", "send", {}, idempotency_key="1")
            with pytest.raises(Unauthorized):
                await accounts.claim("email")
            (lease,) = await worker.claim("email")
            assert lease.job_id == job.job_id
        with pytest.raises(psycopg.OperationalError):
            await worker.complete(lease)
        with pytest.raises(LookupError):
            async with instance.async_jobs("stranger"):
                pass

    asyncio.run(act())


@pytest.mark.parametrize(
    "statement", ["select * from jobs_email.job", 'set role "email-worker"']
)
def test_a_session_of_a_role_cannot_reach_beyond_it(instance, statement):
    session = instance.connect("accounts")

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        session.execute(statement)
    session.execute("discard all")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        session.execute("select * from jobs_email.job")


def test_a_connection_string_puts_its_role_in_force_and_keeps_its_options(
    instance, conninfo, configuration, owner
):
    name = f"o'dd \"role\\ {uuid4()}"
    owner.execute(
        psycopg.sql.SQL("create role {}").format(psycopg.sql.Identifier(name))
    )
    given = make_conninfo(conninfo, options="-c work_mem=1MB")

    try:
        with psycopg.connect(
            JobsInstance(configuration(), given).conninfo(name)
        ) as connection:
            found = connection.execute(
                "select current_user, current_setting('role'),"
                " current_setting('work_mem')"
            ).fetchone()
        with psycopg.connect(instance.conninfo()) as connection:
            is_superuser = connection.info.parameter_status("is_superuser")
    finally:
        owner.execute(
            psycopg.sql.SQL("drop role {}").format(psycopg.sql.Identifier(name))
        )

    assert found == (name, name, "1MB")
    assert is_superuser == "on"


def test_a_caller_that_is_not_declared_is_refused_with_those_that_are(instance):
    with pytest.raises(LookupError, match="declared: accounts, email-worker, operat"):
        instance.jobs("stranger")


def test_a_missing_observer_is_said_to_be_missing(configuration, conninfo):
    instance = JobsInstance(configuration(observer_instances=...), conninfo)

    with pytest.raises(LookupError, match="declares no observer_instances"):
        _ = instance.observer


def test_a_caller_has_one_session_which_ends_with_the_test(configuration, conninfo):
    with JobsInstance(configuration(), conninfo) as instance:
        producer, session = instance.producer, instance.connect("accounts")

        assert instance.producer is instance.jobs("accounts") is producer
        assert session.autocommit

    assert session.closed
    with pytest.raises(psycopg.OperationalError):
        producer.inspect(uuid4())


# What was enqueued, and when.


def test_what_was_enqueued_is_listed_as_it_was_asked_for(instance, enqueued):
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    first = enqueued("first")
    second = enqueued("second", "slow", available_at=tomorrow, max_attempts=5)
    instance.drain(lambda _: None)

    every = instance.enqueued()
    (slow,) = instance.enqueued("slow")

    assert [job.job_id for job in every] == [first.job_id, second.job_id]
    assert slow == every[1]
    assert (slow.producer, slow.kind, slow.payload) == ("accounts", "second", {"n": 1})
    assert (slow.available_at, slow.max_attempts) == (tomorrow, 5)


@pytest.mark.parametrize("name", [lambda lease: lease, lambda lease: lease.job_id])
def test_an_expired_lease_is_lost_to_the_next_claim(instance, enqueued, name):
    for _ in range(2):
        enqueued()
    lease, bystander = instance.worker.claim("email", 2)

    instance.expire(name(lease))

    with pytest.raises(InvalidLease):
        instance.worker.complete(lease)
    assert instance.worker.complete(bystander)
    (taken,) = instance.jobs("spare-worker").claim("email")
    assert (taken.job_id, taken.attempt) == (lease.job_id, 2)


@pytest.mark.parametrize("name", [lambda job: job, lambda job: str(job.job_id)])
def test_a_scheduled_job_can_be_made_due(instance, enqueued, name):
    job = enqueued(available_at=datetime.now(UTC) + timedelta(days=1))
    bystander = enqueued(available_at=datetime.now(UTC) + timedelta(days=1))
    before = instance.worker.claim("email")

    instance.make_due(name(job))

    assert before == []
    assert [lease.job_id for lease in instance.worker.claim("email", 2)] == [job.job_id]
    assert instance.inspect(bystander).status == "queued"


def test_moving_time_wakes_a_worker_that_waits(instance, enqueued, connect):
    job = enqueued(available_at=datetime.now(UTC) + timedelta(days=1))
    listener = connect()
    listener.execute("listen jobs_email")

    instance.make_due(job)
    (lease,) = instance.worker.claim("email")
    instance.expire(lease)

    notified = listener.notifies(timeout=5, stop_after=2)
    assert [note.payload for note in notified] == ["email", "email"]


def test_time_is_moved_only_for_jobs_that_it_concerns(instance, enqueued):
    job = enqueued()
    with pytest.raises(ValueError, match=f"job {job.job_id} is queued, not running"):
        instance.expire(job)
    (lease,) = instance.worker.claim("email")
    with pytest.raises(ValueError, match="is running, not queued"):
        instance.make_due(lease)
    instance.worker.complete(lease)
    with pytest.raises(ValueError, match="is succeeded, not queued"):
        instance.make_due(job)
    with pytest.raises(JobNotFound):
        instance.expire(uuid4())


# What a drain runs.


def test_a_drain_ends_each_job_as_its_handler_did(instance, enqueued):
    jobs = {
        kind: enqueued(kind, max_attempts=1 if kind == "last" else 3).job_id
        for kind in ("good", "again", "never", "last", "bug")
    }

    def handler(lease):
        match lease.kind:
            case "again" | "last":
                raise Retry("smtp.timeout")
            case "never":
                raise Fail("address.unknown")
            case "bug":
                raise ZeroDivisionError

    ran = {run.kind: run for run in instance.drain(handler, raising=False)}

    assert {run.kind: run.job_id for run in ran.values()} == jobs
    assert {kind: (run.outcome, run.code) for kind, run in ran.items()} == {
        "good": ("succeeded", None),
        "again": ("retried", "smtp.timeout"),
        "never": ("failed", "address.unknown"),
        "last": ("failed", "smtp.timeout"),
        "bug": ("retried", "ZeroDivisionError"),
    }
    assert {kind: instance.inspect(job).status for kind, job in jobs.items()} == {
        "good": "succeeded",
        "again": "queued",
        "never": "failed",
        "last": "failed",
        "bug": "queued",
    }


def test_a_bug_in_a_handler_reaches_the_test_once_it_is_recorded(instance, enqueued):
    job = enqueued()

    with pytest.raises(ZeroDivisionError):
        instance.drain(lambda _: 1 / 0)

    found = instance.inspect(job)
    assert (found.status, found.last_failure_code) == ("queued", "ZeroDivisionError")


@pytest.mark.parametrize("verdict", [Retry, Fail])
def test_a_verdict_of_the_handler_is_no_bug(instance, enqueued, verdict):
    enqueued()

    def handler(lease):
        raise verdict("smtp.timeout")

    (run,) = instance.drain(handler)

    assert run.code == "smtp.timeout"


def test_a_retry_runs_in_the_drain_after_it_was_made_due(instance, enqueued):
    job = enqueued()

    def handler(lease):
        if lease.attempt == 1:
            raise Retry("later")

    runs = [instance.drain(handler), instance.drain(handler)]
    instance.make_due(job)
    runs.append(instance.drain(handler))

    assert [[(run.attempt, run.outcome) for run in each] for each in runs] == [
        [(1, "retried")],
        [],
        [(2, "succeeded")],
    ]


@pytest.mark.parametrize("name", [lambda lease: lease, lambda lease: str(lease.job_id)])
def test_a_lease_lost_in_the_handler_is_seen_there_and_run_again(
    instance, enqueued, name
):
    job = enqueued(max_attempts=2)
    seen = []

    def handler(lease):
        seen.append(lease.lost)
        instance.expire(name(lease))
        seen.append(lease.lost)
        lease.complete(instance.connect())

    ran = instance.drain(handler)

    assert [(run.attempt, run.outcome) for run in ran] == [(1, "lost"), (2, "lost")]
    assert seen == [False, True] * 2
    assert instance.inspect(job).last_failure_code == "attempts_exhausted"


def test_a_completion_that_its_handler_rolled_back_is_a_failure(instance, enqueued):
    job = enqueued()

    def handler(lease):
        with instance.connect() as connection, connection.transaction() as transaction:
            lease.complete(connection)
            raise psycopg.Rollback(transaction)

    (run,) = instance.drain(handler)

    assert (run.outcome, run.code) == ("retried", "completion_rolled_back")
    assert instance.inspect(job).status == "queued"


@pytest.mark.parametrize("bug", [None, ZeroDivisionError()])
def test_a_job_that_its_handler_ended_by_itself_is_ended_once(instance, enqueued, bug):
    enqueued()

    def handler(lease):
        with instance.connect() as connection, connection.transaction():
            lease.complete(connection)
        if bug:
            raise bug

    ran = instance.drain(handler, raising=False)

    assert [(run.outcome, run.code) for run in ran] == [("succeeded", None)]


def test_a_job_that_another_worker_ended_is_lost(instance, enqueued):
    enqueued()

    def handler(lease):
        instance.expire(lease)
        rival = instance.jobs("spare-worker")
        (taken,) = rival.claim("email")
        rival.complete(taken)

    (run,) = instance.drain(handler)

    assert run.outcome == "lost"


def test_another_jobs_lease_is_not_the_handlers(instance, enqueued):
    enqueued()
    (other,) = instance.worker.claim("email")
    enqueued()
    seen = []

    def handler(lease):
        if not seen:
            instance.expire(other)
            seen.append(lease.lost)

    instance.drain(handler)

    assert seen == [False]


def test_a_drain_goes_on_until_nothing_is_due_in_any_queue(instance, enqueued):
    enqueued("parent", "slow")

    def handler(lease):
        if lease.kind == "parent":
            enqueued("child", "email")

    assert [run.kind for run in instance.drain(handler)] == ["parent", "child"]


def test_a_drain_keeps_to_its_queue_and_its_limit(instance, enqueued):
    for queue in ("email", "email", "email", "slow"):
        enqueued(queue, queue)

    ran = instance.drain(lambda _: None, "email", limit=2)

    assert [run.kind for run in ran] == ["email", "email"]
    found = [instance.inspect(job).status for job in instance.enqueued()]
    assert found == ["succeeded", "succeeded", "queued", "queued"]


def test_a_drain_refuses_a_handler_that_nobody_would_await(instance, enqueued):
    job = enqueued()

    async def handler(lease):
        pass

    with pytest.raises(TypeError, match="plain functions"):
        instance.drain(handler)
    assert instance.inspect(job).attempts == 0


def test_a_drain_counts_nothing_that_nobody_has_run_as_done(instance, enqueued):
    job = enqueued(max_attempts=1)

    with pytest.raises(TypeError, match="generator"):
        instance.drain(lambda lease: (lease for _ in ()))

    assert instance.inspect(job).last_failure_code == "TypeError"


# Where the server comes from.


def test_without_any_server_one_is_told_what_to_install(monkeypatch):
    for variable in (SERVER_URL, "PG_BINDIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(embedded, "_wheel_programs", lambda: iter(()))
    monkeypatch.setattr(embedded, "_system_programs", lambda: iter(()))

    with (
        pytest.raises(pytest.fail.Exception, match=r"lenso-jobs\[embedded\]") as caught,
        _server(),
    ):
        pass

    assert not caught.value.pytrace


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("dbname=postgres user=accounts", "is not the URL of a superuser"),
        ("host=/nowhere", "/nowhere"),
        ("postgres//ada:secret@host", "is no connection string"),
    ],
)
def test_a_given_server_that_cannot_serve_is_told(conninfo, monkeypatch, given, said):
    if "user" in given:
        given = make_conninfo(conninfo, **conninfo_to_dict(given))
    monkeypatch.setenv(SERVER_URL, given)

    with pytest.raises(pytest.fail.Exception, match=said) as caught, _server():
        pass

    assert not caught.value.pytrace
    assert caught.value.__context__ is None
    assert "secret" not in str(caught.value)


def test_without_libpq_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with (
        pytest.raises(pytest.fail.Exception, match=r"lenso-jobs\[embedded\]"),
        _server(),
    ):
        pass


@pytest.mark.slow
def test_without_a_given_server_one_of_our_own_comes_and_goes(start, tmp_path):
    try:
        find_programs()
    except EmbeddedError:
        pytest.skip("this machine has no PostgreSQL to start")
    text = """
from pathlib import Path

def test_it_runs(jobs_server, jobs_instance):
    with jobs_instance.connect() as session:
        directory = session.execute("show data_directory").fetchone()[0]
    Path("directory").write_text(directory)
    assert f"host={directory}" in jobs_server
    assert jobs_instance.schema == "jobs_test"
"""

    assert finished(start({"test_it.py": text}, server=None)) == "1 passed"
    assert not Path((tmp_path / "directory").read_text()).exists()


# The fixtures, in a pytest of their own.


@pytest.mark.slow
def test_each_test_has_an_instance_of_its_own_and_nothing_is_left(
    start, left, tmp_path
):
    alone = """
import pytest

@pytest.mark.parametrize("_", "ab")
def test_nobody_else_was_here(jobs_instance, worker_id, _):
    assert jobs_instance.enqueued() == []
    (queue,) = jobs_instance.configuration.queues
    jobs_instance.producer.enqueue(queue, "send", {}, idempotency_key="1")
    jobs_instance.observer.inspect(jobs_instance.enqueued()[0].job_id)
    prefix = jobs_instance.configuration.prefix
    assert worker_id in prefix
    with open("names", "a") as names:
        names.write(f"{prefix} {jobs_instance.configuration.worker_instances[0]} ")
"""
    load = """
@pytest.fixture(scope="session")
def jobs_load():
    import psycopg

    def load(conninfo):
        with psycopg.connect(conninfo) as connection:
            connection.execute("create table account (email text)")

    return load
"""
    own = """
def test_the_document_and_the_tables_are_the_applications(jobs_instance):
    configuration = jobs_instance.configuration
    assert jobs_instance.schema == "jobs_email"
    assert configuration.prefix != "jobs_email"
    assert configuration.producer_instances == ("accounts", "organization")
    assert jobs_instance.connect().execute("select * from account").fetchall() == []
"""
    files = {
        "jobs.json": DOCUMENT,
        "test_alone.py": alone,
        "app/conftest.py": OVERRIDE + load,
        "app/test_own.py": own,
        "app/test_welcome.py": EXAMPLE,
    }

    process = start(files, "-p", "xdist.plugin", "-n2", "--dist=loadfile")

    assert finished(process) == "4 passed"
    names = (tmp_path / "names").read_text().split()
    assert len(names) == 4
    assert left(*names) == []
    assert left("^email-worker$") != []


@pytest.mark.slow
def test_processes_on_one_server_share_callers_and_the_last_drops_them(
    start, left, role, tmp_path
):
    existing = role("nologin")
    mark = uuid4().hex[:8]
    document = json.loads(DOCUMENT) | {
        "producer_instances": [existing, f"shared {mark}"],
        "worker_instances": [f"worker {mark}"],
    }
    text = """
import os, time
from pathlib import Path

def wait_for(name):
    deadline = time.monotonic() + 20
    while not Path(name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)

def test_it_runs(jobs_instance):
    me, other = os.environ["ME"], os.environ["OTHER"]
    Path(f"{me}-is-ready").touch()
    wait_for(f"{other}-is-ready")
    if me == "second":
        wait_for("first-is-over")
    (caller,) = jobs_instance.configuration.producer_instances[1:]
    jobs_instance.jobs(caller).enqueue("email", me, {}, idempotency_key="1")
    assert [run.kind for run in jobs_instance.drain(lambda _: None)] == [me]
"""
    files = {
        "jobs.json": json.dumps(document),
        "conftest.py": OVERRIDE,
        "test_it.py": text,
    }

    first = start(files, ME="first", OTHER="second")
    second = start(files, ME="second", OTHER="first")

    assert finished(first) == "1 passed"
    assert len(left(mark)) == 2
    (tmp_path / "first-is-over").touch()
    assert finished(second) == "1 passed"
    assert left(mark) == []
    assert left(existing) == [(existing,)]


def test_loading_the_plugin_loads_nothing_but_pytest():
    # The package's own __init__ is another matter.
    code = f"""
import sys, types
import pytest
package = types.ModuleType("lenso_jobs")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["lenso_jobs"] = package
before = set(sys.modules)
import lenso_jobs.testing
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new - set(sys.stdlib_module_names)))
"""

    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )

    assert said.stdout.strip() == "['lenso_jobs']"
