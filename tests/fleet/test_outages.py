"""Shards that are away, and a fleet that is changed while its callers go on."""

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from fixtures.workers import wait_until
from lenso_jobs import Jobs, NewJob, prepare_fleet_workers
from lenso_jobs.operator import check_fleet, setup_fleet, upgrade_fleet

pytestmark = pytest.mark.slow

ENQUEUE = "select created from enqueue('email', 'send', '{}', %s)"


def batch_of(keys):
    items = [
        {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": key}
        for key in keys
    ]
    return json.dumps(items)


@pytest.fixture
def down(fleet):
    """Crash a shard, and start it again."""
    crashed = []

    @contextmanager
    def down(shard):
        machine = fleet.machines[shard + 1]
        machine.crash()
        crashed.append(machine)
        yield
        machine.start()
        crashed.remove(machine)

    yield down
    for machine in crashed:
        machine.start()


@pytest.fixture
def frozen(fleet):
    """Stop all processes of a shard, until the block ends or calls what it is given."""

    @contextmanager
    def frozen(shard):
        pid = (fleet.machines[shard + 1].data / "postmaster.pid").read_text().split()[0]
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", pid],
            capture_output=True,
            text=True,
            check=True,
        )
        processes = [int(each) for each in (pid, *listed.stdout.split())]

        def send(number):
            for process in processes:
                os.kill(process, number)

        send(signal.SIGSTOP)
        try:
            yield partial(send, signal.SIGCONT)
        finally:
            send(signal.SIGCONT)

    return frozen


# One call at a time.


def test_a_shard_that_is_down_fails_its_own_keys_and_the_session_recovers(fleet, down):
    producer = fleet.open("accounts")
    keys = [fleet.key(shard) for shard in (0, 1, 0, 1)]
    assert producer.value(ENQUEUE, keys[0]) is producer.value(ENQUEUE, keys[1]) is True

    with down(1):
        for _ in range(2):
            with pytest.raises(psycopg.OperationalError) as refused:
                producer.execute(ENQUEUE, [keys[3]])
            assert producer.value(ENQUEUE, keys[2]) in {True, False}
        assert refused.value.sqlstate == "08006"
        assert refused.value.diag.message_primary.startswith(
            "a shard cannot be reached"
        )
        assert not producer.broken

    assert producer.value(ENQUEUE, keys[3]) is True
    assert producer.value(ENQUEUE, keys[1]) is False


def test_a_batch_of_which_half_failed_is_repeated_unchanged(fleet, down):
    producer = fleet.open("accounts")
    keys = [fleet.key(n % 2) for n in range(40)]
    for shard in range(2):
        producer.execute(ENQUEUE, [fleet.key(shard)])

    with down(1), pytest.raises(psycopg.OperationalError):
        producer.execute("select enqueue_many(%s)", [batch_of(keys)])
    first = producer.rows("select * from enqueue_many(%s)", batch_of(keys))
    again = producer.rows("select * from enqueue_many(%s)", batch_of(keys))

    # The connection to shard 0 was open: its half was sent, and was committed.
    assert [outcome for *_, outcome in first] == ["existing", "created"] * 20
    assert [outcome for *_, outcome in again] == ["existing"] * 40
    assert [row[:2] for row in first] == [row[:2] for row in again]


def test_reads_and_acts_reach_the_shards_that_are_there(fleet, down):
    jobs, duty = fleet.jobs("accounts"), fleet.open("duty")
    observer = fleet.open("operations")
    ids = [
        jobs.enqueue("email", "send", {}, idempotency_key=fleet.key(shard)).job_id
        for shard in range(2)
    ]
    worker = fleet.open("email-worker", 1)
    worker.execute(
        "select fail(job_id, lease_token, 'smtp.timeout', false) from claim('email')"
    )
    worker.close()

    with down(0):
        assert observer.row("select * from inspect(%s)", ids[1])["status"] == "failed"
        found = observer.row("select * from explain_job(%s)", ids[1])
        with observer.refusing("08006"):
            observer.execute("select inspect(%s)", [ids[0]])
        with observer.refusing("08006"):
            observer.execute("select explain_job(%s)", [ids[0]])
        with observer.refusing("08006"):
            observer.execute("select inspect_queues()")
        health = observer.rows("select finding, subject from inspect_health()")
        for act in (
            "pause('email')",
            "redrive_failed('email', now() - interval '1 hour', now())",
        ):
            with duty.refusing("08006"):
                duty.execute(f"select {act}")

    assert found["reason"] == "failed"
    assert ("shard_unreachable", "shard 0") in health
    there = fleet.open("operations", 1)
    assert there.row("select * from inspect(%s)", ids[1])["status"] == "queued"
    assert [act for (act,) in there.rows("select act from inspect_acts()")] == [
        "redrive_failed",
        "pause",
    ]
    assert duty.value("select pause('email')") is True
    assert duty.value("select resume('email')") is True


def test_a_call_that_waits_at_a_shard_is_cancelled_there_too(fleet):
    producer, key = fleet.open("accounts"), fleet.key(1)
    producer.execute("set statement_timeout = '500ms'")
    holder, looker = fleet.open(shard=1), fleet.open(shard=1)
    holder.execute("begin; lock table job")

    with producer.refusing("57014"):
        producer.execute(ENQUEUE, [key])

    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
    wait_until(lambda: looker.value(waiting) == 0)
    assert producer.value(ENQUEUE, fleet.key(0)) is True
    holder.execute("rollback")
    assert producer.value(ENQUEUE, key) is True


def test_a_frozen_shard_holds_up_its_own_keys_until_it_goes_on(fleet, frozen):
    producer, other = fleet.open("accounts"), fleet.open("accounts")
    keys = [fleet.key(1), fleet.key(0)]
    for session in (producer, other):
        for shard in range(2):
            session.execute(ENQUEUE, [fleet.key(shard)])
    producer.execute("set statement_timeout = '100ms'")

    with frozen(1) as go_on, ThreadPoolExecutor() as pool:
        call = pool.submit(producer.execute, ENQUEUE, [keys[0]])
        assert other.value(ENQUEUE, keys[1]) is True
        with pytest.raises(TimeoutError):
            call.result(0.5)  # five times what the session allows
        go_on()
        with pytest.raises(psycopg.errors.QueryCanceled):
            call.result(20)

    assert producer.value(ENQUEUE, fleet.key(0)) is True
    assert producer.value(ENQUEUE, keys[0]) in {True, False}
    assert producer.value(ENQUEUE, keys[0]) is False


def test_a_session_that_a_shard_ended_is_replaced(fleet):
    producer = fleet.open("accounts")
    producer.execute(ENQUEUE, [fleet.key(1)])
    looker = fleet.open(shard=1)
    of_callers = "from pg_stat_activity where usename = 'accounts'"

    looker.execute(f"select pg_terminate_backend(pid) {of_callers}")
    wait_until(lambda: looker.value(f"select count(*) {of_callers}") == 0)
    # PL/Proxy looks at a connection that was idle for 2 s, and replaces it at once.
    with suppress(psycopg.OperationalError):
        producer.execute(ENQUEUE, [fleet.key(1)])

    assert producer.value(ENQUEUE, fleet.key(1)) is True


def test_a_router_that_was_lost_is_made_again(new_fleet):
    fleet = new_fleet("lost")
    keys = [fleet.key(shard) for shard in range(2)]
    for key in keys:
        fleet.jobs("accounts").enqueue("email", "send", {}, idempotency_key=key)
    fleet.close()
    with fleet.machines[0].connect("postgres") as session:
        session.execute(f"drop database {fleet.dbname} with (force)")
        session.execute(f"create database {fleet.dbname}")

    setup_fleet(fleet.document, fleet.secrets)

    jobs = fleet.jobs("accounts")
    for key in keys:
        assert jobs.inspect_key(key).status == "queued"
        assert not jobs.enqueue("email", "send", {}, idempotency_key=key).created
    fleet.close()


def test_two_routers_of_a_fleet_make_one_job_of_a_key(fleet, new_machine):
    second = new_machine("router-2")
    with second.connect("postgres") as session:
        session.execute(f"create database {fleet.dbname}")
        session.execute("create role accounts login")
    url = second.conninfo(fleet.dbname)
    setup_fleet(
        fleet.document,
        lambda name: url if name == "router/url" else fleet.secrets(name),
    )
    jobs = fleet.jobs("accounts")
    keys = [fleet.key(shard) for shard in range(2)]

    with psycopg.connect(make_conninfo(url, user="accounts")) as connection:
        others = Jobs(connection, fleet.schema)
        for key in keys:
            first = jobs.enqueue("email", "send", {}, idempotency_key=key)
            again = others.enqueue("email", "send", {}, idempotency_key=key)
            assert (again.job_id, again.created) == (first.job_id, False)

    assert [*check_fleet(fleet.document, fleet.secrets).values()] == [[], [], []]


# Under load.


class Load:
    """Producers that repeat what failed, and workers behind an outside system.

    The outside system takes each attempt of a job once, as fencing tokens let it.
    """

    def __init__(self, fleet):
        self.fleet = fleet
        self.shards = list(fleet.shards)
        self.acknowledged = set()
        self.refused = Counter()
        self.errors = []
        self.attempts = Counter()
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._produce, args=(n,)) for n in range(3)
        ]
        self._path = f"-c search_path={fleet.schema}"
        self.workers = self._workers()
        self._threads.append(threading.Thread(target=self._work))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        for thread in self._threads[:-1]:
            thread.join(60)
        self.workers.stop(20)
        self._threads[-1].join(60)

    def goes_on(self, count=60):
        """Wait until so many more jobs are acknowledged."""
        goal = len(self.acknowledged) + count
        wait_until(lambda: self.errors or len(self.acknowledged) >= goal)

    def _secrets(self, reference):
        url = self.shards[int(reference.removeprefix("shard/"))]
        password = self.fleet.password_of("email-worker")
        return make_conninfo(url, user="email-worker", password=password)

    def _workers(self):
        return prepare_fleet_workers(
            self.fleet.document, self._secrets, self._handle, queue="email"
        )

    def _handle(self, lease):
        self.attempts[lease.job_id, lease.attempt] += 1

    def _work(self):
        try:
            self.workers.run()
        except BaseException as error:  # noqa: BLE001 - the test's to see
            self.errors.append(error)

    def _produce(self, number):
        try:
            conninfo = make_conninfo(self.fleet.router, user="accounts")
            with psycopg.connect(conninfo, autocommit=True) as connection:
                jobs = Jobs(connection, self.fleet.schema)
                count = 0
                # Paced, to leave the processors to what is tested.
                while not self._is_over.wait(0.01):
                    keys = [f"load-{number}-{count}-{n}" for n in range(1 + count % 4)]
                    self._repeat(jobs, keys)
                    self.acknowledged.update(keys)
                    count += 1
        except BaseException as error:  # noqa: BLE001 - the test's to see
            self.errors.append(error)

    def _repeat(self, jobs, keys):
        deadline = time.monotonic() + 120
        new = [NewJob("email", "send", {}, idempotency_key=key) for key in keys]
        while True:
            try:
                if len(keys) == 1:
                    jobs.enqueue("email", "send", {}, idempotency_key=keys[0])
                else:
                    jobs.enqueue_many(new)
            except psycopg.OperationalError as error:
                assert time.monotonic() < deadline
                self.refused[error.sqlstate] += 1
                self._is_over.wait(0.02)
            else:
                return

    def _drain(self):
        """Let new workers end what is left, as if all leases had expired."""
        for url in self.shards:
            with psycopg.connect(url, options=self._path) as connection:
                connection.execute(
                    "update live_job set available_at = clock_timestamp(),"
                    " lease_expires_at = least(lease_expires_at, clock_timestamp())"
                )
        self._workers().run(until_idle=True)

    def check(self):
        """Insist that no key is lost or doubled, and no attempt was given twice."""
        assert self.errors == []
        self._drain()
        keys = Counter()
        for url in self.shards:
            with psycopg.connect(url, options=self._path) as connection:
                rows = connection.execute("select idempotency_key from job").fetchall()
                keys.update(key for (key,) in rows)
                assert connection.execute("table live_job").fetchall() == []
        assert self.acknowledged <= keys.keys()
        assert set(keys.values()) == {1}
        assert set(self.attempts.values()) == {1}
        return len(keys)


def test_no_key_is_lost_or_doubled_when_a_shard_crashes_under_load(fleet, down):
    with Load(fleet) as load:
        load.goes_on()
        for shard in (1, 0):
            with down(shard):
                refused = sum(load.refused.values())
                wait_until(lambda: sum(load.refused.values()) > refused + 5)  # noqa: B023
            load.goes_on()

    assert load.check() > 180
    assert "08006" in load.refused


def test_a_later_release_is_brought_to_a_fleet_under_load(new_fleet, later):
    fleet = new_fleet("later")
    with Load(fleet) as load:
        load.goes_on()
        later()
        done = upgrade_fleet(fleet.document, fleet.secrets)
        load.goes_on()

    assert load.check() > 120
    assert not load.refused
    assert [len(report.migrations) for report in done.values()] == [2, 2, 0]
    found = check_fleet(fleet.document, fleet.secrets)
    assert [each for name in found for each in found[name]] == []


def test_a_shard_moves_to_another_server_under_load(new_fleet, new_machine):
    fleet = new_fleet("moving")
    old, dbname = fleet.machines[2], fleet.dbname
    with Load(fleet) as load:
        load.goes_on()
        new = new_machine("spare")
        with old.connect("postgres") as session:
            session.execute(f"alter database {dbname} connection limit 0")
            end = (
                "select pg_terminate_backend(pid) from pg_stat_activity"
                f" where datname = '{dbname}' and backend_type = 'client backend'"
            )
            wait_until(lambda: not session.execute(end).fetchall())
        roles, dump = new.data.parent / "roles.sql", new.data.parent / "jobs.dump"
        for command in (
            ["pg_dumpall", "--roles-only", "-d", old.conninfo("postgres"), "-f", roles],
            ["psql", "-q", "-f", roles, new.conninfo("postgres")],
            ["pg_dump", "-Fc", "-d", old.conninfo(dbname), "-f", dump],
            ["pg_restore", "--create", "-e", "-d", new.conninfo("postgres"), dump],
        ):
            subprocess.run([old.programs / command[0], *command[1:]], check=True)
        fleet.shards[1] = load.shards[1] = new.conninfo(dbname)
        upgrade_fleet(fleet.document, fleet.secrets, repair_too=True)
        refused = sum(load.refused.values())
        with new.connect("postgres") as session:
            closed = session.execute(
                "select datconnlimit from pg_database where datname = %s", [dbname]
            ).fetchone()
            session.execute(f"alter database {dbname} connection limit -1")
        load.goes_on()

    assert refused > 0
    assert closed == (0,)
    assert load.check() > 120
    found = check_fleet(fleet.document, fleet.secrets)
    assert [each for name in found for each in found[name]] == []
