"""The fault: dump, restore and other versions.

PostgreSQL's own tools carry an Instance elsewhere, with jobs in every state.

The roles come first: the bootstrap script makes them, as for a new Instance, and the empty
schema it makes too is dropped for the restore. Last comes the repair: pg_dump carries no
access list of a table's row type. CI runs all tests on several versions.
"""

import contextlib
import os
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs.embedded import (
    EmbeddedServer,
    _account,
    _has_programs,
    _reachable,
    _system_programs,
    _wheel_programs,
)
from lenso_jobs.errors import InvalidArgument
from lenso_jobs.operator import Report, check, setup, upgrade

WAYS = ("sql", "sync", "async")
TABLES = (
    *("job", "live_job", "attempt", "operator_act"),
    *("instance", "queue", "caller"),
)
STATES = {
    "queued": "queued",
    "scheduled": "queued",
    "retrying": "queued",
    "live": "running",
    "lapsed": "running",
    "succeeded": "succeeded",
    "failed": "failed",
    "exhausted": "failed",
}


@pytest.fixture
def contents():
    """Everything that an Instance holds."""

    def contents(conninfo):
        with psycopg.connect(conninfo) as connection:
            return {
                table: connection.execute(
                    f"select t::text from jobs_email.{table} as t order by 1"
                ).fetchall()
                for table in TABLES
            }

    return contents


class Populace:
    """Jobs in every state, three of each: one for each way to call."""

    def __init__(self, conninfo):
        self.tokens = {}
        with psycopg.connect(conninfo, autocommit=True) as connection:
            self._run = connection.execute
            self._run("set search_path = jobs_email")
            self.jobs = {
                (way, name): self._become(way, name) for way in WAYS for name in STATES
            }
            self._run("reset role")
            for (way, name), job_id in self.jobs.items():
                token = self.tokens.get((way, name))
                call = {
                    "retrying": "fail(%s, %s, 'down', true)",
                    "succeeded": "complete(%s, %s)",
                    "failed": "fail(%s, %s, 'broken', false)",
                }.get(name)
                self._run('set role "email-worker"')
                if call:
                    self._run(f"select {call}", (job_id, token))
                self._run("reset role")
                if name == "lapsed":
                    self._lapse(job_id, attempt=1)
                if name == "exhausted":
                    self._lapse(job_id, attempt=3)
                if name in ("scheduled", "retrying"):
                    self._run(
                        "update live_job set available_at = '2040-01-01' where job_id ="
                        " %s",
                        (job_id,),
                    )
            assert self._run("select retire_expired()").fetchone() == (len(WAYS),)

    def _become(self, way, name):
        self._run("set role accounts")
        queue = "slow" if name in ("queued", "scheduled") else "email"
        (job_id,) = self._run(
            "select job_id from enqueue(%s, 'send', '{\"n\": 1}', %s)",
            (queue, f"{way}.{name}"),
        ).fetchone()
        if queue == "email":
            self._run('set role "email-worker"')
            (self.tokens[way, name],) = self._run(
                "select lease_token from claim('email')"
            ).fetchone()
        return job_id

    def _lapse(self, job_id, attempt):
        self._run(
            "update live_job set attempt = %s, leased_at = clock_timestamp() - interval"
            " '1 min', lease_expires_at = clock_timestamp() - interval '1 s'"
            " where job_id = %s",
            (attempt, job_id),
        )


def left_behind(instance, conninfo):
    """List what check finds after a restore: what pg_dump does not carry."""
    return {" ".join(each.what.split()[:3]) for each in check(instance, conninfo)}


def mend(instance, conninfo):
    """Repair what pg_dump leaves behind, and find nothing else to do."""
    assert left_behind(instance, conninfo) <= {"usage on type"}
    upgrade(instance, conninfo, repair_too=True)
    assert check(instance, conninfo) == []
    assert setup(instance, conninfo) == Report((), configured=False)


@pytest.fixture
def works(open_client, connect, refused, contents):
    """Insist that the same jobs are there, and that every verb works on them."""

    def works(populace, before, instance, conninfo):
        where = conninfo_to_dict(conninfo)
        assert contents(conninfo) == before
        mend(instance, conninfo)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("reindex schema jobs_email")
            connection.execute("vacuum full")
            connection.execute("analyze")
        for way in WAYS:
            with contextlib.ExitStack() as stack:
                clients = [
                    stack.enter_context(open_client(way, **where | {"user": role}))
                    for role in ("accounts", "email-worker", "operations")
                ]
                _as_before(way, populace, refused, *clients)
                if way == WAYS[-1]:
                    _what_is_due(populace, *clients)
        operator = connect(**where)
        operator.execute(f"set role {instance.prefix}_operator")
        failed = populace.jobs["sql", "failed"]
        assert operator.row("select * from redrive(%s)", failed)["status"] == "queued"
        assert operator.value("select retire_expired()") == 0
        assert operator.value("select purge(clock_timestamp())") > len(WAYS)
        operator.execute("reset role")
        assert operator.value("select wait_key('email') is not null")

    return works


def _as_before(way, populace, refused, producer, worker, observer):
    jobs = {name: populace.jobs[way, name] for name in STATES}
    leases = {
        name: SimpleNamespace(job_id=jobs[name], lease_token=populace.tokens[way, name])
        for name in ("live", "lapsed", "succeeded", "failed")
    }

    assert {name: observer.inspect(jobs[name]).status for name in STATES} == STATES
    assert observer.inspect(jobs["exhausted"]).last_failure_code == "attempts_exhausted"
    assert worker.complete(leases["succeeded"])
    assert worker.fail(leases["failed"], "broken", retryable=False).status == "failed"
    for name in ("lapsed", "failed"):
        with refused("LJ004"):
            worker.complete(leases[name])
    assert worker.renew(leases["live"]) > observer.inspect(jobs["live"]).created_at
    assert [x.outcome for x in worker.renew_many([leases["live"]])] == ["renewed"]
    assert worker.complete(leases["live"])
    for name, job_id in jobs.items():
        queue = "slow" if name in ("queued", "scheduled") else "email"
        key = {"idempotency_key": f"{way}.{name}"}
        again = producer.enqueue(queue, "send", {"n": 1}, **key)
        assert (again.job_id, again.created) == (job_id, False)
        with refused("LJ002"):
            producer.enqueue(queue, "send", {"n": 2}, **key)


def _what_is_due(populace, producer, worker, observer):
    lapsed = [populace.jobs[way, "lapsed"] for way in WAYS]
    queued = [populace.jobs[way, "queued"] for way in WAYS]
    new = producer.enqueue("email", "send", {}, idempotency_key="new")
    item = {"queue": "slow", "kind": "send", "payload": {}, "idempotency_key": "newer"}
    (newer,) = producer.enqueue_many([item])

    leases = worker.claim("email", 10)
    assert [x.job_id for x in leases] == [*lapsed, new.job_id]
    assert [x.attempt for x in leases] == [2, 2, 2, 1]
    failed = worker.fail_many([(x, "down", False) for x in leases])
    assert [x.outcome for x in failed] == ["failed"] * 4
    leases = worker.claim("slow", 10)
    assert [x.job_id for x in leases] == [*queued, newer.job_id]
    assert [x.outcome for x in worker.complete_many(leases)] == ["completed"] * 4
    assert worker.next_available_at("slow").year == 2040
    assert observer.inspect(new.job_id).last_failure_code == "down"


# Dump and restore.


@pytest.fixture
def instance(instance_of):
    return instance_of()


def let_in(connection, instance):
    """Let the callers of an Instance log in."""
    for name in {name for names in instance.callers.values() for name in names}:
        connection.execute(f'alter role "{name}" login')


@pytest.fixture
def restore(program):
    def restore(saved, conninfo):
        subprocess.run(
            [program("psql"), "-qX", "-v", "ON_ERROR_STOP=1", "-f", saved, conninfo],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    return restore


@pytest.mark.slow
def test_a_dump_is_restored_into_an_empty_cluster_and_beside_roles_that_exist(
    databases, instance, contents, bootstrap, works, program, restore, tmp_path
):
    source, target, saved = databases(), databases(), tmp_path / "saved.sql"
    setup(instance, source)
    populace = Populace(source)
    before = contents(source)
    dump = (program("pg_dump"), f"--dbname={source}", f"--file={saved}")
    subprocess.run(dump, check=True)

    with EmbeddedServer() as server:
        elsewhere = server.conninfo()
        with psycopg.connect(elsewhere, autocommit=True) as connection:
            bootstrap(connection, instance.document())
            connection.execute("drop schema jobs_email")
            let_in(connection, instance)
        restore(saved, elsewhere)
        works(populace, before, instance, elsewhere)

    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute("drop schema jobs_email cascade")
    restore(saved, target)
    assert contents(target) == before
    assert left_behind(instance, target) <= {"usage on type"}
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute('set role "email-worker"')
        claimed = connection.execute("select * from jobs_email.claim('email', 10)")
        assert claimed.rowcount == len(WAYS)


# pg_upgrade, where there are programs of two versions.


def version_of(programs):
    said = subprocess.run(
        [programs / "postgres", "--version"], check=True, capture_output=True, text=True
    ).stdout
    return int(said.split()[2].split(".")[0])


@pytest.fixture
def upgrades():
    """The programs of each version there is and of the next, which the account can run."""
    with contextlib.ExitStack() as stack:
        found = {
            version_of(programs): _reachable(programs, _account(), stack)
            for programs in (*_system_programs(), *_wheel_programs())
            if _has_programs(programs) and (programs / "pg_upgrade").exists()
        }
        if len(found) < 2:
            pytest.skip("there are not the programs of two versions of PostgreSQL")
        yield [(found[old], found[new]) for old, new in pairwise(sorted(found))]


@pytest.fixture
def directory():
    """A directory that the server's account can work in."""
    account = _account()
    with tempfile.TemporaryDirectory(prefix="lenso-jobs-") as name:
        if account:
            os.chown(name, account["user"], account["group"])
        yield Path(name)


@pytest.mark.slow
def test_pg_upgrade_carries_an_instance_to_the_next_version(
    upgrades, directory, instance, contents, works, monkeypatch
):
    for old, new in upgrades:
        before_it, after_it = (directory / f"{n}-{new.parent.name}" for n in "ab")
        monkeypatch.setenv("PG_BINDIR", str(old))
        with EmbeddedServer(before_it) as server:
            setup(instance, server.conninfo())
            with psycopg.connect(server.conninfo(), autocommit=True) as connection:
                let_in(connection, instance)
                # Some minor versions store an option with each column, which the
                # pg_upgrade of an older release of the next version does not know.
                options = connection.execute(
                    "select count(*) from pg_attribute where attoptions is not null"
                ).fetchone()
            if options != (0,):
                continue
            populace = Populace(server.conninfo())
            before = contents(server.conninfo())

        def run(*command):
            subprocess.run(
                command,
                check=True,
                cwd=directory,
                stdout=subprocess.DEVNULL,
                **_account(),
            )

        run(
            *(new / "initdb", f"--pgdata={after_it / 'data'}", "--username=postgres"),
            *("--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"),
            *(["--no-data-checksums"] if version_of(new) >= 18 else []),
        )
        run(
            *(new / "pg_upgrade", f"--old-bindir={old}", f"--new-bindir={new}"),
            *(f"--old-datadir={before_it / 'data'}", "--username=postgres"),
            *(f"--new-datadir={after_it / 'data'}", f"--socketdir={directory}"),
        )
        monkeypatch.setenv("PG_BINDIR", str(new))
        with EmbeddedServer(after_it) as server:
            works(populace, before, instance, server.conninfo())


# What else a server may be.


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_another_encoding_is_refused_and_nothing_is_written(
    encoding, databases, instance_of
):
    instance = instance_of()
    conninfo = databases(options=f"encoding '{encoding}' locale 'C'")

    with pytest.raises(InvalidArgument, match="UTF8"):
        setup(instance, conninfo)

    with psycopg.connect(conninfo) as connection:
        assert connection.execute(
            "select to_regnamespace('jobs_email'), to_regrole(%s)", (instance.owner,)
        ).fetchone() == (None, None)


OFF = "-c standard_conforming_strings=off -c escape_string_warning=off"


@pytest.mark.slow
@pytest.mark.parametrize("peculiarity", ["settings", "pgcrypto"])
def test_an_instance_is_the_same_wherever_it_was_set_up(
    peculiarity, databases, instance_of
):
    instance, conninfo = instance_of(), databases()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        if peculiarity == "settings":
            there = make_conninfo(
                conninfo, options=f"{OFF} -c check_function_bodies=off"
            )
        else:
            there = conninfo
            if not connection.execute(
                "select from pg_available_extensions where name = 'pgcrypto'"
            ).fetchall():
                pytest.skip("this PostgreSQL has no pgcrypto, and none is needed")
            name = connection.info.dbname
            connection.execute(
                "create schema extensions; create extension pgcrypto schema extensions;"
                f" alter database {name} set search_path = extensions, pg_catalog"
            )

        setup(instance, there)

        assert check(instance, there) == check(instance, conninfo) == []
        lease = connection.execute(
            "set role accounts;"
            " select jobs_email.enqueue('email', 'send', '{}', 'k');"
            ' set role "email-worker";'
            " select job_id, lease_token from jobs_email.claim('email')"
        )
        while lease.nextset():
            pass
        assert connection.execute(
            "select jobs_email.complete(%s, %s)", lease.fetchone()
        ).fetchone() == (True,)


def test_no_index_default_or_constraint_calls_a_function_of_the_instance(owner):
    callers = owner.rows(
        "select d.classid::regclass, d.objid, d.refobjid::regprocedure"
        " from pg_depend as d join pg_proc as p on p.oid = d.refobjid"
        " where d.refclassid = 'pg_proc'::regclass"
        " and p.pronamespace = 'jobs_email'::regnamespace"
        " and d.classid = any (array["
        "'pg_class', 'pg_attrdef', 'pg_constraint', 'pg_rewrite']::regclass[])"
    )

    assert callers == []
    assert owner.rows("select extname from pg_extension") == [("plpgsql",)]
