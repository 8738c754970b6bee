"""A primary and its synchronous standby: what survives, and what waits.

In short; ``python tests/chaos/failover.py`` is the long form.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from urllib.parse import urlencode

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool

from failover import fail_over_under_load
from lenso_jobs import AsyncJobs, InvalidLease, Jobs
from load import QUEUE, SCHEMA
from pair import Pair, until
from servers import DBNAME, DOCUMENT, PRODUCER, WORKER, found_instance, ground

pytestmark = pytest.mark.slow
READ_ONLY = "show transaction_read_only"


@pytest.fixture(scope="module")
def founded():
    """A pair with an Instance, without the witness that slows it down."""
    with ground() as directory, Pair(directory) as pair:
        found_instance(pair.primary.conninfo("postgres"), lease_seconds=30)
        with pair.primary.connect() as session:
            session.execute("drop schema witness cascade")
        yield pair


@pytest.fixture
def pair(founded):
    """The pair, whole and without a job."""
    with founded.primary.connect() as session:
        standbys = session.execute("select from pg_stat_replication").fetchall()
        if standbys:
            founded.require_standby()
        else:
            founded.standby.end()
            founded.add_standby()
        tables = ("job", "live_job", "attempt", "operator_act")
        named = ", ".join(f"{SCHEMA}.{table}" for table in tables)
        session.execute(f"truncate {named}")
    return founded


@pytest.fixture
def connect(pair):
    """Open a session as a role, on whichever server takes writes."""
    with ExitStack() as stack:

        def connect(role, **parameters):
            way = {**pair.way, "user": role, "dbname": DBNAME, **parameters}
            connection = psycopg.connect(make_conninfo(**way), autocommit=True)
            return stack.enter_context(connection)

        yield connect


@pytest.fixture
def enqueue(connect):
    """Enqueue a job on a new connection, and return the job."""

    def enqueue(key, connection=None):
        jobs = Jobs(connection or connect(PRODUCER), SCHEMA)
        return jobs.enqueue(QUEUE, "send", {}, idempotency_key=key)

    return enqueue


@pytest.fixture
def background(pair):
    """Run a call on a thread; one that waits for the standby is let go at the end."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit
        with suppress(psycopg.OperationalError), pair.primary.connect() as session:
            turn(session, "alter system reset synchronous_standby_names")


@pytest.fixture
def keys(pair):
    """The keys of the jobs that a server, the primary by default, holds."""

    def keys(server=None):
        with (server or pair.primary).connect() as session:
            rows = session.execute(f"select idempotency_key from {SCHEMA}.job")
            return [key for (key,) in rows]

    return keys


@pytest.fixture
def waits(pair):
    """Wait until so many sessions wait for the standby, and so many for a lock."""

    def waits(*, standby, lock=0):
        with pair.primary.connect() as session:
            until(
                lambda: (
                    session.execute(
                        "select count(*) filter (where wait_event = 'SyncRep'),"
                        " count(*) filter (where wait_event_type = 'Lock')"
                        " from pg_stat_activity where backend_type = 'client backend'"
                    ).fetchone()
                    == (standby, lock)
                )
            )

    return waits


def test_nothing_acknowledged_is_lost_in_a_failover_and_all_go_on():
    roles = ("producer", "producer", "loop", "worker", "async-worker")

    with ground() as directory, Pair(directory) as pair:
        happened, found = fail_over_under_load(pair, directory, 4, 1, 1, roles)

    assert found == {}
    for gaps in happened["seconds without an answer"].values():
        assert max(gaps) < 20


def test_leases_mean_the_same_on_the_new_primary(pair, connect, enqueue):
    ids = [enqueue(f"key-{n}").job_id for n in range(4)]
    worker = Jobs(connect(WORKER), SCHEMA)
    done, kept, lapsed, lost = worker.claim(QUEUE, 4)
    assert worker.complete(done)

    pair.fail_over()
    worker = Jobs(connect(WORKER), SCHEMA)
    with pair.primary.connect() as session:
        session.execute(
            f"update {SCHEMA}.live_job set lease_expires_at = clock_timestamp()"
            " where job_id = any (%s)",
            ([lapsed.job_id, lost.job_id],),
        )
    (again,) = worker.claim(QUEUE)

    assert worker.complete(done)
    assert worker.inspect(kept.job_id).lease_expires_at == kept.lease_expires_at
    assert worker.renew(kept) > kept.lease_expires_at
    assert worker.complete(kept)
    with pytest.raises(InvalidLease):
        worker.complete(lapsed)
    assert (again.job_id, again.attempt) == (lapsed.job_id, lapsed.attempt + 1)
    assert worker.complete(again)
    assert [*map(str, ids)] == [str(x.job_id) for x in (done, kept, lapsed, lost)]


def test_a_pool_finds_the_new_primary(pair):
    conninfo = make_conninfo(**{**pair.way, "user": PRODUCER, "dbname": DBNAME})
    with ConnectionPool(
        conninfo,
        min_size=2,
        max_size=2,
        open=True,
        kwargs={"autocommit": True},
        check=ConnectionPool.check_connection,
    ) as pool:
        jobs = Jobs(pool, SCHEMA)
        job = jobs.enqueue(QUEUE, "send", {}, idempotency_key="a")

        pair.fail_over()
        again = jobs.enqueue(QUEUE, "send", {}, idempotency_key="a")

    assert (job.created, again.created) == (True, False)
    assert again.job_id == job.job_id


def test_an_enqueue_waits_for_the_standby_and_its_repetition_for_it(
    pair, enqueue, keys, waits, background
):
    pair.standby.end()

    first = background(enqueue, "a")
    waits(standby=1)
    again = background(enqueue, "a")
    waits(standby=1, lock=1)
    assert keys() == []
    pair.standby.start()

    assert first.result(20).created
    assert not again.result(20).created
    assert again.result().job_id == first.result().job_id


def give_up(connection):
    """Cut the connection while another thread waits for an answer."""
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def test_a_client_that_gave_up_repeats_and_there_is_one_job(
    pair, connect, enqueue, keys, waits, background
):
    pair.standby.end()
    for key in ("a", "b"):
        connection = connect(PRODUCER)
        background(enqueue, key, connection)
        waits(standby="ab".index(key) + 1)
        give_up(connection)

    # The sessions go on waiting after the clients have gone.
    waits(standby=2)
    pair.standby.start()
    until(lambda: len(keys()) == 2)
    assert not enqueue("a").created

    pair.standby.end()
    connection = connect(PRODUCER)
    background(enqueue, "c", connection)
    waits(standby=1)
    give_up(connection)
    pair.primary.crash()
    pair.standby.start()
    pair.promote()
    assert sorted(keys()) == ["a", "b"]
    assert enqueue("c").created
    assert not enqueue("b").created


def test_a_statement_timeout_does_not_end_the_wait(
    pair, connect, enqueue, waits, background
):
    connection = connect(PRODUCER, options="-c statement_timeout=100ms")
    pair.standby.end()

    job = background(enqueue, "a", connection)
    waits(standby=1)
    with pytest.raises(TimeoutError):
        job.result(0.3)
    pair.standby.start()

    assert job.result(20).created


def test_waiting_calls_return_once_no_standby_is_required(
    pair, connect, enqueue, waits, background
):
    pair.standby.end()
    job = background(enqueue, "a")
    waits(standby=1)

    with pair.primary.connect() as session:
        turn(session, "alter system reset synchronous_standby_names")

    assert job.result(20).created
    assert not enqueue("a").created


def test_a_session_that_does_not_wait_for_the_standby_loses_jobs_and_leases(
    pair, connect, enqueue, keys
):
    enqueue("a")
    hasty = {"options": "-c synchronous_commit=local"}
    pair.standby.end()
    assert enqueue("b", connect(PRODUCER, **hasty)).created
    (lease,) = Jobs(connect(WORKER, **hasty), SCHEMA).claim(QUEUE)

    pair.primary.crash()
    pair.standby.start()
    pair.promote()

    assert keys() == ["a"]
    worker = Jobs(connect(WORKER), SCHEMA)
    (again,) = worker.claim(QUEUE)
    assert (again.job_id, again.attempt) == (lease.job_id, lease.attempt)
    with pytest.raises(InvalidLease):
        worker.complete(lease)
    assert worker.complete(again)


def test_a_standby_serves_reads_and_refuses_the_rest(pair, enqueue):
    job = enqueue("a").job_id
    with pair.standby.connect(user=WORKER) as session:
        jobs = Jobs(session, SCHEMA)
        until(lambda: jobs.inspect(job).status == "queued")
        assert jobs.next_available_at(QUEUE)
        calls = ("claim('email')", f"complete('{job}', 'x')", f"renew('{job}', 'x')")
        for call in calls:
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                session.execute(f"select {SCHEMA}.{call}")
    with (
        pair.standby.connect(user=PRODUCER) as session,
        pytest.raises(psycopg.errors.ReadOnlySqlTransaction),
    ):
        enqueue("b", session)


def test_the_command_line_takes_several_hosts(pair, enqueue, tmp_path):
    way = urlencode(pair.way)
    document = {**DOCUMENT, "lease_seconds": 30}
    (tmp_path / "jobs.json").write_text(json.dumps(document))
    (tmp_path / "handler.py").write_text("def handle(lease):\n    pass\n")
    environment = os.environ | {
        "JOBS_DATABASE_URL": f"postgresql://postgres@/{DBNAME}?{way}"
    }
    command = [sys.executable, "-c", "from lenso_jobs.cli import main; main()"]

    def status(job):
        with pair.primary.connect() as session:
            return Jobs(session, SCHEMA).inspect(job).status

    checked = subprocess.run(
        [*command, "check", "--config", "jobs.json"],
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    work = ("--queue", QUEUE, "--handler", "handler:handle", "--caller", WORKER)
    with subprocess.Popen(
        [*command, "work", "--config", "jobs.json", *work],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            first = enqueue("a").job_id
            until(lambda: status(first) == "succeeded")
            pair.fail_over()
            second = enqueue("b").job_id
            until(lambda: status(second) == "succeeded")
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.fixture
def conninfo(pair):
    """What a pooler is put before: the standby."""
    return pair.standby.conninfo()


def test_a_primary_is_found_beside_a_pooler_that_leads_to_the_standby(
    pair, pooler, enqueue, connect
):
    primary = pair.primary.conninfo()
    hosts = [pooler, conninfo_to_dict(primary)]

    connection = connect(
        PRODUCER,
        **{key: ",".join(str(x[key]) for x in hosts) for key in ("host", "port")},
    )

    assert connection.info.host == hosts[1]["host"]
    assert enqueue("a", connection).created


def test_a_pool_keeps_connections_to_what_turned_read_only(pair, keys):
    conninfo = make_conninfo(**{**pair.way, "user": PRODUCER, "dbname": DBNAME})
    with (
        pair.primary.connect() as session,
        ConnectionPool(
            conninfo,
            min_size=1,
            max_size=1,
            open=True,
            kwargs={"autocommit": True},
            check=ConnectionPool.check_connection,
        ) as pool,
    ):
        jobs = Jobs(pool, SCHEMA)
        jobs.enqueue(QUEUE, "send", {}, idempotency_key="a")
        turn(session, "alter system set default_transaction_read_only = on")
        with pool.connection() as connection:
            until(lambda: connection.execute(READ_ONLY).fetchone() == ("on",))

        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            jobs.enqueue(QUEUE, "send", {}, idempotency_key="b")
        turn(session, "alter system reset default_transaction_read_only")
    assert keys() == ["a"]


def test_an_old_snapshot_on_a_standby_is_found_on_the_primary(pair, burn):
    slot = "replication slot standby"

    with pair.primary.connect() as primary:

        def sender():
            rows = primary.execute(
                "select pid from pg_stat_replication where backend_xmin is not null"
            ).fetchall()
            return "".join(f"session {pid}" for (pid,) in rows)

        def held():
            return dict(
                primary.execute(
                    f"select subject, detail from {SCHEMA}.inspect_health()"
                    " where finding = 'snapshot_held'"
                ).fetchall()
            )

        primary.execute("select pg_create_physical_replication_slot('standby', true)")
        with pair.standby.connect() as reader:
            turn(reader, "alter system set hot_standby_feedback = on")
            reader.execute("begin isolation level repeatable read")
            reader.execute(f"select from {SCHEMA}.job")
            until(sender)
            burn(primary, 6000)
            assert sender() not in held()
            burn(primary, 100000)
            assert held()[sender()].startswith("holds an old snapshot (role postgres, ")
            with pair.standby.connect() as other:
                turn(other, "alter system set primary_slot_name = 'standby'")
            until(lambda: slot in held())
            assert held()[slot].startswith("holds an old snapshot (active, ")
        pair.standby.end()
        until(lambda: "(not active, " in held()[slot])
        primary.execute("select pg_drop_replication_slot('standby')")

        assert held() == {}


def turn(session, setting):
    session.execute(setting)
    session.execute("select pg_reload_conf()")


def cancel(pair, connection, enqueue, waits, background):
    job = background(enqueue, "a", connection)
    waits(standby=1)
    with pair.primary.connect() as session:
        session.execute("select pg_cancel_backend(%s)", (connection.info.backend_pid,))
    return job.result(20).created


def terminate(pair, connection, enqueue, waits, background):
    job = background(enqueue, "a", connection)
    waits(standby=1)
    with pair.primary.connect() as session:
        pid = connection.info.backend_pid
        session.execute("select pg_terminate_backend(%s)", (pid,))
    with pytest.raises(psycopg.OperationalError):
        job.result(20)


def time_out(pair, connection, enqueue, waits, background):
    async def enqueue_for_a_second():
        async with await psycopg.AsyncConnection.connect(
            connection.info.dsn, autocommit=True
        ) as own:
            jobs = AsyncJobs(own, SCHEMA)
            async with asyncio.timeout(1):
                await jobs.enqueue(QUEUE, "send", {}, idempotency_key="a")

    with pytest.raises(TimeoutError):
        asyncio.run(enqueue_for_a_second())


@pytest.mark.parametrize("end_waiting", [cancel, terminate, time_out])
def test_a_cancelled_wait_for_the_standby_confirms_nothing(
    pair, connect, enqueue, keys, waits, background, end_waiting
):
    connection = connect(PRODUCER)
    told = []
    connection.add_notice_handler(lambda notice: told.append(notice.sqlstate))
    pair.standby.end()

    answer = end_waiting(pair, connection, enqueue, waits, background)

    # The job is there for everybody, and on one server only.
    if end_waiting is cancel:
        assert (answer, told) == (True, ["01000"])
    assert keys() == ["a"]
    assert not enqueue("a").created
    pair.primary.crash()
    pair.standby.start()
    pair.promote()
    assert keys() == []
    assert enqueue("a").created
