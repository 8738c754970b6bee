"""Two shards and a router, on three servers of this test process.

The router's PostgreSQL has PL/Proxy, and one shard's is that of all tests, mostly a
newer one. Their directories are temporary. Each fleet has its own database on all three.
The router trusts everybody. The shards ask everybody but the superuser for a password,
except in the database ``trusted``.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from unittest import mock
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import servers
from fixtures.server import LEASE_SECONDS, skip_unless_required
from fixtures.sessions import Session
from lenso_jobs import Fleet, Jobs, shard_of
from lenso_jobs.embedded import _account, _give, find_programs
from lenso_jobs.operator import setup_fleet

SHARDS = 2
DUTY = "duty"
CALLERS = {
    "producer_instances": ["accounts", "organization", 'o\'hara \\ "mail"'],
    "worker_instances": ["email-worker"],
    "observer_instances": ["operations"],
}
HBA = """
local all     postgres trust
local trusted all      trust
local all     all      scram-sha-256
"""


def password_of(caller):
    """The password that the shards know, with all that could break a quotation."""
    return f"the 'trout\\fish' of \"{caller}\" = %s"


@pytest.fixture(name="password_of", scope="session")
def password_of_a_caller():
    return password_of


def _programs():
    """Return the programs of a PostgreSQL that has PL/Proxy."""
    given = [Path(os.environ["PG_BINDIR"])] if "PG_BINDIR" in os.environ else []
    for programs in (*given, *sorted(Path("/usr/lib/postgresql").glob("*/bin"))):
        if (programs.parent / "lib" / "plproxy.so").exists():
            return programs
    return skip_unless_required("plproxy")


class Machine(servers.Server):
    """A server of a given PostgreSQL, with its own password file."""

    def __init__(self, directory, programs, settings, password_file):
        super().__init__(directory, settings)
        self._begin = self.start
        self.programs = programs
        self._environment = {
            "PG_BINDIR": str(self.programs),
            "PGPASSFILE": str(password_file),
        }
        self.start = self._start

    def _start(self):
        with mock.patch.dict(os.environ, self._environment):
            return self._begin()


@pytest.fixture(scope="session")
def new_machine():
    """Start a server. All but routers ask for passwords.

    Routers and shard 0 have PL/Proxy's version, and the others that of all tests.
    """
    settings = {
        "fsync": "off",
        "full_page_writes": "off",
        "shared_buffers": "16MB",
        "autovacuum_naptime": "1d",
        "log_statement": "all",
        "log_min_duration_statement": "0",
        "logging_collector": "on",
        "log_directory": "log",
        "log_filename": "all.log",
    }
    with_plproxy = _programs()
    with servers.ground() as ground, ExitStack() as stack:
        hba = ground / "pg_hba.conf"
        hba.write_text(HBA, encoding="utf-8")
        # Operators are declared nowhere, so the document has no password for them.
        passwords = ground / "pgpass"
        passwords.write_text(f"*:*:*:{DUTY}:{_escaped(password_of(DUTY))}\n", "utf-8")
        _give(passwords, _account())
        passwords.chmod(0o600)

        def new_machine(name):
            is_router = name.startswith("router")
            of_shard = {} if is_router else {"hba_file": str(hba)}
            server = Machine(
                ground / name,
                with_plproxy if is_router or name == "0" else find_programs(),
                settings | of_shard,
                passwords,
            )
            return stack.enter_context(server)

        yield new_machine


@pytest.fixture(scope="session")
def machines(new_machine):
    """The router and the shards, as servers: ``[router, shard 0, shard 1]``."""
    return [new_machine(name) for name in ("router", *map(str, range(SHARDS)))]


def _escaped(password):
    return password.replace("\\", "\\\\").replace(":", "\\:")


class Fleeted:
    """One fleet on the servers: its document, its URLs, and sessions on it."""

    def __init__(self, machines, dbname, document):
        self.machines = machines
        self.dbname = dbname
        self.document = Fleet.from_json(json.dumps(document))
        self.schema = document["instance"]["schema"]
        self.router, *self.shards = (
            make_conninfo(server.conninfo(dbname)) for server in machines
        )
        self._keys = count()
        self._open = []

    def secrets(self, reference):
        """Resolve the references of the document."""
        kind, _, rest = reference.partition("/")
        if kind == "shard":
            return self.shards[int(rest)]
        if kind == "password":
            return password_of(list(self.document.passwords)[int(rest)])
        return self.router

    password_of = staticmethod(password_of)

    def open(self, role=None, shard=None, **parameters):
        """Open a session at the router, or at a shard; it is closed with the test."""
        conninfo = self.router if shard is None else self.shards[shard]
        parameters.setdefault("options", f"-c search_path={self.schema}")
        if role is not None:
            parameters["user"] = role
            if shard is not None:
                parameters.setdefault("password", password_of(role))
        session = Session.connect(
            make_conninfo(conninfo, **parameters), autocommit=True
        )
        self._open.append(session)
        return session

    def log(self, machine):
        """Return what a server has logged: every statement, and how long it took."""
        return (self.machines[machine].data / "log" / "all.log").read_text("utf-8")

    def jobs(self, role, shard=None):
        """Open a client at the router, or at a shard."""
        return Jobs(self.open(role, shard), self.schema)

    def key(self, shard):
        """Return a new key of a shard."""
        while True:
            key = f"key-{next(self._keys)}-{uuid4()}"
            if shard_of(key, SHARDS) == shard:
                return key

    def close(self):
        """Close the sessions."""
        for session in self._open:
            session.close()
        self._open.clear()

    def empty(self):
        """Close the sessions, and delete the jobs of all shards."""
        self.close()
        for shard in range(SHARDS):
            with psycopg.connect(self.shards[shard], autocommit=True) as session:
                session.execute(
                    sql.SQL("truncate {}, {}, {}, {}").format(
                        *(
                            sql.Identifier(self.schema, table)
                            for table in ("job", "live_job", "attempt", "operator_act")
                        )
                    )
                )


@pytest.fixture(scope="session")
def new_fleet(machines):
    """Make a fleet's databases and its callers, with passwords; set up unless told not to."""
    numbers = count()

    def new_fleet(name="fleet", *, passwords=True, is_set_up=True, **changes):
        dbname = f"{name}{next(numbers)}" if name != "trusted" else name
        callers = CALLERS | {k: v for k, v in changes.items() if k in CALLERS}
        names = [each for kind in callers.values() for each in kind]
        document = {
            "instance": {
                "schema": f"jobs_{dbname}",
                "database_url_secret": "router/url",
                "lease_seconds": LEASE_SECONDS,
                "retry_base_seconds": 5,
                "retry_max_seconds": 300,
                "queues": ["email", "slow"],
                **callers,
                **changes,
            },
            "shards": [f"shard/{number}" for number in range(SHARDS)],
        }
        if passwords:
            document["passwords"] = {
                caller: f"password/{n}" for n, caller in enumerate(names)
            }
        fleet = Fleeted(machines, dbname, document)
        for server in machines:
            with server.connect("postgres") as session:
                for role in (*names, DUTY):
                    if not session.execute(
                        "select to_regrole(quote_ident(%s))", [role]
                    ).fetchone()[0]:
                        session.execute(
                            sql.SQL("create role {} login password {}").format(
                                sql.Identifier(role), sql.Literal(password_of(role))
                            )
                        )
                session.execute(
                    sql.SQL("create database {}").format(sql.Identifier(dbname))
                )
        if is_set_up:
            setup_fleet(fleet.document, fleet.secrets)
            let_duty_operate(fleet)
        return fleet

    return new_fleet


def let_duty_operate(fleet):
    """Give the operator's rights to the role ``duty`` on all servers."""
    for conninfo in (fleet.router, *fleet.shards):
        with psycopg.connect(conninfo, autocommit=True) as session:
            session.execute(
                f"grant {fleet.document.instance.prefix}_operator to {DUTY}"
            )


@pytest.fixture(scope="session")
def _fleet(new_fleet):
    fleet = new_fleet()
    fleet.empty()  # the audit has the set-up
    return fleet


@pytest.fixture(scope="session")
def _trusting_fleet(new_fleet):
    return new_fleet("trusted", passwords=False)


@pytest.fixture
def trusting_fleet(_trusting_fleet):
    """A fleet whose shards trust the router, without a job."""
    yield _trusting_fleet
    _trusting_fleet.empty()


@pytest.fixture
def fleet(_fleet):
    """The fleet of this test process, without a job. Its shards ask for passwords."""
    yield _fleet
    _fleet.empty()
