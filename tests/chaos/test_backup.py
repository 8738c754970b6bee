"""An Instance is dumped and restored, or replicated, to another place."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import ExitStack

import psycopg
import pytest

from lenso_jobs import Configuration, InvalidLease, Jobs
from lenso_jobs.errors import InvalidArgument
from lenso_jobs.operator import check, setup, upgrade
from load import QUEUE, SCHEMA
from servers import DBNAME, DOCUMENT, PRODUCER, WORKER, Server, found_instance, ground

pytestmark = pytest.mark.slow

CHANGES = {"lease_seconds": 300}
CONFIGURATION = Configuration.from_json(json.dumps(DOCUMENT | CHANGES))
COPIED = "select srsubstate::text from pg_subscription_rel"
REPLAYED = (
    "select bool_and(coalesce(replay_lsn >= pg_current_wal_lsn(), false))"
    " from pg_stat_replication"
)


class Site:
    """A server, and clients of the Instance on it."""

    def __init__(self, server, stack):
        self.conninfo = server.conninfo
        self._connect = lambda **parameters: stack.enter_context(
            server.connect(**parameters)
        )

    def execute(self, statement, dbname="postgres"):
        return self._connect(dbname=dbname).execute(statement)

    def jobs(self, user, dbname=DBNAME):
        return Jobs(self._connect(dbname=dbname, user=user), SCHEMA)

    def enqueue(self, key):
        return self.jobs(PRODUCER).enqueue(QUEUE, "send", {}, idempotency_key=key)


@pytest.fixture
def directory():
    with ground() as directory:
        yield directory


@pytest.fixture
def open_site(directory):
    """Start a server."""
    with ExitStack() as stack:

        def open_site(name):
            server = Server(directory / name, {"wal_level": "logical"})
            stack.enter_context(server)
            return Site(server, stack)

        yield open_site


@pytest.fixture
def original(open_site):
    """A server with an Instance, without the witness that tests keep."""
    site = open_site("original")
    found_instance(site.conninfo("postgres"), **CHANGES)
    site.execute("drop schema witness cascade", DBNAME)
    return site


def difference(conninfo):
    """What ``check`` finds once ``upgrade --repair`` has put back what no dump holds."""
    upgrade(CONFIGURATION, conninfo, repair_too=True)
    return check(CONFIGURATION, conninfo)


@pytest.fixture
def run(program):
    def run(name, *arguments):
        subprocess.run([program(name), *arguments], check=True, capture_output=True)

    return run


@pytest.fixture
def dump(directory, original, run):
    """Dump the Instance and the roles as the page says; return the directory."""

    def dump():
        database, roles = directory / "jobs.dump", directory / "roles.sql"
        source = original.conninfo()
        run("pg_dump", "--format=custom", f"--file={database}", source)
        options = ("--roles-only", "--no-role-passwords", f"--file={roles}")
        run("pg_dumpall", *options, f"--dbname={source}")
        return database, roles

    return dump


@pytest.fixture
def restored(open_site, run):
    """Restore into an empty server, roles first."""

    def restored(database, roles):
        site = open_site("other")
        other = site.conninfo("postgres")
        run("psql", "--quiet", f"--file={roles}", other)
        options = ("--create", "--exit-on-error")
        run("pg_restore", *options, f"--dbname={other}", database)
        return site

    return restored


def test_a_restored_instance_is_sound_and_leases_go_on(original, dump, restored):
    original.enqueue("a")
    (lease,) = original.jobs(WORKER).claim(QUEUE)

    site = restored(*dump())

    assert difference(site.conninfo()) == []
    assert setup(CONFIGURATION, site.conninfo()).migrations == ()
    assert not site.enqueue("a").created
    assert site.jobs(WORKER).complete(lease)


def test_an_old_backup_brings_back_the_past(original, dump, restored):
    before = [original.enqueue(key) for key in ("done-since", "lapsed-since")]
    worker = original.jobs(WORKER)
    worker.claim(QUEUE, 2)
    original.execute(
        f"update {SCHEMA}.live_job set lease_expires_at = clock_timestamp()", DBNAME
    )
    backup = dump()
    for lease in worker.claim(QUEUE, 2):
        worker.complete(lease)
    purge = f"select {SCHEMA}.purge(clock_timestamp())"
    assert original.execute(purge, DBNAME).fetchone() == (2,)
    assert original.enqueue("done-since").created
    lost = original.enqueue("acknowledged-since")

    site = restored(*backup)
    worker = site.jobs(WORKER)
    leases = worker.claim(QUEUE, 2)

    assert [lease.job_id for lease in leases] == [job.job_id for job in before]
    # The same fencing tokens once more, and other leases.
    assert [lease.attempt for lease in leases] == [2, 2]
    again = site.enqueue("acknowledged-since")
    assert again.created
    assert again.job_id != lost.job_id
    assert not site.enqueue("done-since").created


def test_a_lease_of_after_the_backup_is_unknown(original, dump, restored):
    original.enqueue("a")
    backup = dump()
    (lease,) = original.jobs(WORKER).claim(QUEUE)

    site = restored(*backup)

    with pytest.raises(InvalidLease):
        site.jobs(WORKER).complete(lease)


def test_a_copy_beside_the_original_has_its_callers_and_stops_setup(
    original, dump, run
):
    original.enqueue("a")
    database, _ = dump()
    original.execute("create database jobs_copy template template0")

    copy = original.conninfo("jobs_copy")
    run("pg_restore", "--exit-on-error", f"--dbname={copy}", database)

    assert original.jobs(WORKER, "jobs_copy").claim(QUEUE)
    for conninfo in (copy, original.conninfo()):
        with pytest.raises(InvalidArgument, match="belongs to another Instance"):
            setup(CONFIGURATION, conninfo)
    original.execute("revoke connect on database jobs_copy from public")
    with pytest.raises(psycopg.OperationalError):
        original.jobs(WORKER, "jobs_copy")
    original.execute("drop database jobs_copy with (force)")
    assert setup(CONFIGURATION, original.conninfo()).migrations == ()


def test_a_database_that_was_dropped_comes_back_where_the_roles_are(
    original, dump, run
):
    original.enqueue("a")
    database, _ = dump()
    original.execute(f"drop database {DBNAME} with (force)")

    other = original.conninfo("postgres")
    run("pg_restore", "--create", "--exit-on-error", f"--dbname={other}", database)

    assert difference(original.conninfo()) == []
    assert not original.enqueue("a").created


def test_logical_replication_moves_an_instance(original, open_site, run, directory):
    original.enqueue("before")
    roles, schema = directory / "roles.sql", directory / "schema.sql"
    source = original.conninfo()
    run("pg_dumpall", "--roles-only", f"--file={roles}", f"--dbname={source}")
    run("pg_dump", "--schema-only", "--create", f"--file={schema}", source)
    site = open_site("other")
    other = site.conninfo("postgres")
    run("psql", "--quiet", f"--file={roles}", other)
    run("psql", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={schema}", other)

    publication = f"create publication jobs for tables in schema {SCHEMA}"
    original.execute(publication, DBNAME)
    subscription = f"create subscription jobs connection '{source}' publication jobs"
    site.execute(subscription, DBNAME)
    (lease,) = original.jobs(WORKER).claim(QUEUE)
    original.enqueue("meanwhile")
    deadline = time.monotonic() + 30
    while not (
        all(state == "r" for (state,) in site.execute(COPIED, DBNAME))
        and all(is_there for (is_there,) in original.execute(REPLAYED, DBNAME))
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    site.execute("drop subscription jobs", DBNAME)

    (behind,) = difference(site.conninfo())
    assert behind.what.startswith("sequence ")
    health = f"select remedy from {SCHEMA}.inspect_health() where finding = %s"
    with psycopg.connect(site.conninfo(), autocommit=True) as connection:
        (remedy,) = connection.execute(health, ["sequence_behind"]).fetchone()
        connection.execute(remedy)
    assert difference(site.conninfo()) == []
    assert not site.enqueue("meanwhile").created
    assert site.jobs(WORKER).complete(lease)
