"""The pytest plugin: its Instance in this process, its fixtures in a pytest of theirs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import lenso_jobs
from lenso_jobs import (
    AsyncHeldLease,
    Fail,
    HeldLease,
    InvalidArgument,
    InvalidJob,
    InvalidLease,
    InvalidQueue,
    JobNotFound,
    Kinds,
    PayloadInvalid,
    Release,
    Retry,
    Unauthorized,
    embedded,
)
from lenso_jobs.embedded import SERVER_URL, EmbeddedError, find_programs
from lenso_jobs.testing import (
    JobsInstance,
    _server,
    async_held_lease,
    held_lease,
)

ROOT = Path(__file__).parents[2]
PACKAGE = Path(lenso_jobs.__file__).parent
SERVER = "LENSO_JOBS_TEST_SERVER"
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENT = re.search(r"```json\n(.*?)```", README, re.DOTALL).group(1)
GUIDE = (ROOT / "docs" / "applications" / "testing.md").read_text(encoding="utf-8")
UNIT, OVERRIDE, EXAMPLE, ENGINE, LOAD, OWN = re.findall(r"```python\n([^`]*)```", GUIDE)


@pytest.fixture
def instance(configuration, conninfo):
    """The plugin's view of this test's own Instance."""
    with JobsInstance(configuration(), conninfo) as instance:
        yield instance


@pytest.fixture
def enqueued(instance):
    """Enqueue a job through the plugin; return it."""

    def enqueued(kind="send", queue="email", **options):
        return instance.producer.enqueue(
            queue, kind, {"n": 1}, idempotency_key=f"key-{uuid4()}", **options
        )

    return enqueued


@pytest.fixture
def start(tmp_path):
    """Start a pytest with the plugin on given files, on the suite's server."""
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
    """Wait for a pytest to succeed; return how many tests passed."""
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return re.search(r"\d+ passed", said)[0]


# A lease without a server.


@dataclass
class Receipt:
    order: int


@pytest.fixture
def receipt():
    """A kind whose handler returns what it is given."""
    decorator = Kinds()("receipt", queue="email", payload=Receipt, max_attempts=5)
    return decorator(lambda lease, payload: (lease, payload))


@pytest.mark.parametrize("make", [held_lease, async_held_lease])
def test_a_lease_for_a_unit_test_is_as_a_worker_s(make):
    lease = make("send", {"to": "ada"}, attempt=2)

    kind = HeldLease if make is held_lease else AsyncHeldLease
    assert type(lease) is kind
    assert (lease.kind, lease.payload, lease.attempt) == ("send", {"to": "ada"}, 2)
    assert lease.max_attempts == 3
    assert lease.created_at < datetime.now(UTC) < lease.lease_expires_at
    assert not lease.lost
    assert make("send", lost=True).lost
    assert make("send").payload == {}
    assert make("send") != make("send", attempt=2)


def test_a_lease_of_a_kind_has_its_queue_and_a_payload_that_fits(receipt):
    lease = held_lease(receipt, Receipt(7))

    assert receipt(lease) == (lease, Receipt(7))
    assert (lease.queue, lease.kind, lease.max_attempts) == ("email", "receipt", 5)
    with pytest.raises(InvalidJob, match="does not fit Receipt"):
        held_lease(receipt, {"order": "x"})
    with pytest.raises(InvalidJob, match="payload"):
        held_lease("send", {"at": object()})


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


def test_an_async_client_acts_as_its_caller_until_the_block_ends(instance):
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


def test_a_document_without_observers_has_no_observer_client(configuration, conninfo):
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


def test_enqueued_returns_jobs_as_their_producer_asked_for_them(instance, enqueued):
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
    enqueued(queue="slow")
    (lease,) = instance.worker.claim("slow")
    listener = connect()
    listener.execute("listen jobs_email")

    instance.make_due(job)
    instance.expire(lease)

    notified = listener.notifies(timeout=5, stop_after=2)
    assert [note.payload for note in notified] == ["email", "slow"]


def test_expire_and_make_due_refuse_jobs_of_another_status(instance, enqueued):
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
def test_retry_and_fail_are_not_raised_to_the_test(instance, enqueued, verdict):
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
def test_a_lease_that_expires_in_a_handler_is_seen_there_and_the_job_runs_again(
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


def test_a_completion_that_its_handler_rolled_back_fails_the_attempt(
    instance, enqueued
):
    job = enqueued()

    def handler(lease):
        with instance.connect() as connection, connection.transaction() as transaction:
            lease.complete(connection)
            raise psycopg.Rollback(transaction)

    (run,) = instance.drain(handler)

    assert (run.outcome, run.code) == ("retried", "completion_rolled_back")
    assert instance.inspect(job).status == "queued"


@pytest.mark.parametrize("bug", [None, ZeroDivisionError()])
def test_a_job_that_its_handler_completed_is_completed_once(instance, enqueued, bug):
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


def test_expire_of_another_job_does_not_touch_the_handler_s_lease(instance, enqueued):
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


def test_a_drain_of_kinds_runs_each_handler_and_raises_no_release(
    instance, enqueued, receipt
):
    kinds = Kinds()
    seen = []

    @kinds("send", queue="email", payload=dict)
    def send(lease, payload):
        seen.append(payload)

    @kinds("later", queue="email")
    def later(lease, payload):
        raise Release("not_yet", after=30)

    send.enqueue(instance.producer, {"n": 1}, idempotency_key="send")
    later.enqueue(instance.producer, {}, idempotency_key="later")
    enqueued("unknown")

    ran = [(run.kind, run.outcome, run.code) for run in instance.drain(kinds)]

    assert ran == [
        ("send", "succeeded", None),
        ("later", "released", "not_yet"),
        ("unknown", "released", "unknown_kind"),
    ]
    assert seen == [{"n": 1}]


def test_a_payload_that_does_not_fit_reaches_the_test(instance, enqueued):
    kinds = Kinds()
    kinds("send", queue="email", payload=Receipt)(lambda _, __: None)
    job = enqueued()

    with pytest.raises(PayloadInvalid, match=r"Receipt: order \(missing\)"):
        instance.drain(kinds)
    assert instance.inspect(job).last_failure_code == "payload_invalid"


def test_coroutine_functions_by_kind_are_for_drain_async(instance, enqueued):
    kinds = Kinds()

    @kinds("send", queue="email")
    async def send(lease, payload):
        seen.append(payload)

    seen = []
    enqueued()

    with pytest.raises(TypeError, match="for a coroutine function"):
        instance.drain(kinds)
    (run,) = asyncio.run(instance.drain_async(kinds))
    assert run.outcome == "succeeded"
    assert seen == [{"n": 1}]


def test_clear_deletes_all_jobs_and_their_evidence(instance, enqueued):
    job = enqueued()
    instance.drain(lambda _: None)
    enqueued()

    instance.clear()

    assert instance.enqueued() == []
    with pytest.raises(JobNotFound):
        instance.inspect(job)
    assert instance.drain(lambda _: None) == []
    enqueued()
    assert len(instance.drain(lambda _: None)) == 1


def test_drain_refuses_a_coroutine_function_and_names_drain_async(instance, enqueued):
    job = enqueued()

    async def handler(lease):
        pass

    with pytest.raises(TypeError, match=r"await jobs_instance\.drain_async\(handler\)"):
        instance.drain(handler)
    assert instance.inspect(job).attempts == 0


def test_a_drain_records_no_success_for_a_generator_that_was_not_run(
    instance, enqueued
):
    job = enqueued(max_attempts=1)

    with pytest.raises(InvalidArgument, match="generator"):
        instance.drain(lambda lease: (lease for _ in ()))

    assert instance.inspect(job).status == "queued"


def test_a_handler_runs_on_the_thread_that_drains_and_sees_its_context(
    instance, enqueued
):
    tenant = ContextVar("tenant", default=None)
    tenant.set("acme")
    enqueued()
    seen = []

    def handler(lease):
        seen.extend((threading.get_ident(), tenant.get()))

    (run,) = instance.drain(handler)

    assert run.outcome == "succeeded"
    assert seen == [threading.get_ident(), "acme"]


@pytest.mark.parametrize("raising", [True, False])
def test_an_interrupt_in_a_handler_reaches_the_test(instance, enqueued, raising):
    job = enqueued()

    def handler(lease):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        instance.drain(handler, raising=raising)

    assert instance.inspect(job).last_failure_code == "KeyboardInterrupt"


def test_a_drain_of_a_queue_that_is_not_declared_is_refused(instance):
    with pytest.raises(InvalidQueue, match="queue biling is not declared"):
        instance.drain(lambda _: None, "biling")


# Coroutines.


def test_drain_async_runs_a_handler_that_completes_in_its_own_transaction(
    instance, enqueued
):
    job = enqueued()
    instance.connect().execute("create table public.effect (kind text)")

    async def handler(lease):
        async with await psycopg.AsyncConnection.connect(instance.conninfo()) as own:
            await own.execute("insert into public.effect values (%s)", (lease.kind,))
            await lease.complete(own)

    async def test():
        return await instance.drain_async(handler)

    (run,) = asyncio.run(test())

    assert (run.job_id, run.outcome, run.code) == (job.job_id, "succeeded", None)
    effects = instance.connect().execute("select kind from public.effect").fetchall()
    assert effects == [("send",)]


def test_drain_async_ends_each_job_as_its_handler_did(instance, enqueued):
    for kind in ("good", "again", "never", "bug"):
        enqueued(kind)
    running = []

    async def handler(lease):
        running.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        match lease.kind:
            case "again":
                raise Retry("smtp.timeout")
            case "never":
                raise Fail("address.unknown")
            case "bug":
                raise ZeroDivisionError

    async def test():
        ran = await instance.drain_async(handler, raising=False)
        assert set(running) == {asyncio.get_running_loop()}
        return ran

    assert [(run.kind, run.outcome, run.code) for run in asyncio.run(test())] == [
        ("good", "succeeded", None),
        ("again", "retried", "smtp.timeout"),
        ("never", "failed", "address.unknown"),
        ("bug", "retried", "ZeroDivisionError"),
    ]


def test_a_bug_in_a_coroutine_reaches_the_test_once_it_is_recorded(instance, enqueued):
    job = enqueued()
    later = enqueued()

    async def handler(lease):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(instance.drain_async(handler))

    assert instance.inspect(job).last_failure_code == "ZeroDivisionError"
    assert instance.inspect(later).attempts == 0


def test_a_lease_that_expires_in_a_coroutine_is_seen_there(instance, enqueued):
    enqueued(max_attempts=1)
    seen = []

    async def handler(lease):
        instance.expire(lease)
        seen.append(lease.lost)

    (run,) = asyncio.run(instance.drain_async(handler))

    assert run.outcome == "lost"
    assert seen == [True]


def test_drain_works_within_a_running_loop(instance, enqueued):
    enqueued()

    async def test():
        return instance.drain(lambda _: None)

    assert [run.outcome for run in asyncio.run(test())] == ["succeeded"]


def test_drain_async_refuses_a_plain_function(instance, enqueued):
    job = enqueued(max_attempts=1)

    with pytest.raises(InvalidArgument, match="use Worker"):
        asyncio.run(instance.drain_async(lambda _: None))

    assert instance.inspect(job).status == "queued"


# Where the server comes from.


def test_without_any_server_the_failure_says_what_to_install(monkeypatch):
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
        ("postgres//ada:secret@host", "LENSO_JOBS_SERVER_URL is not a PostgreSQL URL"),
    ],
)
def test_a_given_server_that_cannot_be_used_is_named_in_the_failure(
    conninfo, monkeypatch, given, said
):
    if "user" in given:
        given = make_conninfo(conninfo, **conninfo_to_dict(given))
    monkeypatch.setenv(SERVER_URL, given)

    with pytest.raises(pytest.fail.Exception, match=said) as caught, _server():
        pass

    assert not caught.value.pytrace
    assert caught.value.__context__ is None
    assert "secret" not in str(caught.value)


def test_without_libpq_the_failure_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with (
        pytest.raises(pytest.fail.Exception, match=r"lenso-jobs\[embedded\]"),
        _server(),
    ):
        pass


@pytest.mark.slow
def test_without_a_given_server_an_embedded_one_starts_and_stops(start, tmp_path):
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


# The fixtures, in another pytest.


@pytest.mark.slow
def test_each_test_has_its_own_instance_and_nothing_is_left(start, left, tmp_path):
    alone = """
import pytest

@pytest.mark.parametrize("_", "ab")
def test_the_instance_is_fresh(jobs_instance, worker_id, _):
    assert jobs_instance.enqueued() == []
    (queue,) = jobs_instance.configuration.queues
    jobs_instance.producer.enqueue(queue, "send", {}, idempotency_key="1")
    jobs_instance.observer.inspect(jobs_instance.enqueued()[0].job_id)
    prefix = jobs_instance.configuration.prefix
    assert worker_id in prefix
    with open("names", "a") as names:
        names.write(f"{prefix} {jobs_instance.configuration.worker_instances[0]} ")
"""
    own = """
def test_the_document_and_the_tables_are_those_of_the_application(
    jobs_instance, engine
):
    configuration = jobs_instance.configuration
    assert jobs_instance.schema == "jobs_email"
    assert configuration.prefix != "jobs_email"
    assert configuration.producer_instances == ("accounts",)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("select * from orders").all() == []
"""
    files = {
        "jobs.json": DOCUMENT,
        "test_alone.py": alone,
        "app/conftest.py": OVERRIDE + ENGINE + LOAD,
        "app/test_own.py": own,
        "app/test_welcome.py": EXAMPLE,
        "app/test_receipt.py": UNIT,
    }

    process = start(files, "-p", "xdist.plugin", "-n2", "--dist=loadfile")

    assert finished(process) == "6 passed"
    names = (tmp_path / "names").read_text().split()
    assert len(names) == 4
    assert left(*names) == []
    assert left("^email-worker$") != []


@pytest.mark.slow
def test_an_instance_in_the_application_s_database_is_empty_for_each_test(
    start, new_database
):
    prefix = f"own_{uuid4().hex[:8]}"
    text = """
import os
import pytest

@pytest.fixture(scope="session")
def database_url():
    return os.environ["DATABASE_URL"]
"""
    test = """
import pytest

@pytest.mark.parametrize("run", range(2))
def test_it_is_empty(jobs, run):
    assert jobs.enqueued() == []
    jobs.producer.enqueue("email", "send", {}, idempotency_key="1")
    assert [run.outcome for run in jobs.drain(lambda _: None)] == ["succeeded"]
"""
    files = {
        "jobs.json": json.dumps(json.loads(DOCUMENT) | {"role_prefix": prefix}),
        "conftest.py": f"{text}\n{OWN}",
        "test_own.py": test,
    }

    process = start(files, DATABASE_URL=new_database(prefix))

    assert finished(process) == "2 passed"


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


@pytest.mark.slow
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
