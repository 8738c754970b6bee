"""An Instance is dumped and restored: into an empty server, and beside the original."""

from __future__ import annotations

import json
import subprocess
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
            server = stack.enter_context(Server(directory / name))
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
    """Dump the Instance and the roles, as the page tells; answers where."""

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


def test_what_was_restored_is_sound_and_leases_go_on(original, dump, restored):
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
