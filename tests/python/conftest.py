"""The wrapper on the sessions of the Instance, and the command in a process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool

from lenso_jobs import Configuration, Jobs, _waiting
from lenso_jobs.cli import main

COMMAND = [sys.executable, "-c", "from lenso_jobs.cli import main; main()"]


@pytest.fixture
def configuration(document):
    """The document of the template's Instance, with changes, validated."""

    def configuration(**changes):
        return Configuration.from_json(document(**changes))

    return configuration


@pytest.fixture
def fresh_prefix():
    """Name a set of group roles that nobody has."""
    return f"fresh_{uuid4().hex[:12]}"


@pytest.fixture
def new_instance(new_database, document, fresh_prefix):
    """Make an empty database, and the document of an Instance to set up there."""

    def new_instance(**changes):
        conninfo = new_database(fresh_prefix)
        changes.setdefault("role_prefix", fresh_prefix)
        return Configuration.from_json(document(**changes)), conninfo

    return new_instance


@pytest.fixture
def role(conninfo):
    """Make a role with a unique name. It is dropped afterwards."""
    made = []

    def role(attributes="login", *, member_of=(), admin=conninfo):
        name = f"role_{uuid4().hex[:12]}"
        made.append(name)
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(f"create role {name} {attributes}")
            for group in member_of:
                connection.execute(
                    sql.SQL("grant {} to {}").format(
                        sql.Identifier(group), sql.Identifier(name)
                    )
                )
        return name

    yield role
    with psycopg.connect(conninfo, dbname="postgres", autocommit=True) as connection:
        for name in reversed(made):
            connection.execute(f"drop role if exists {name}")


@pytest.fixture
def unprivileged(role, new_instance):
    """A database owner that may create roles, and nothing else."""
    dba = role("login createrole")
    configuration, conninfo = new_instance()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        dbname = conninfo_to_dict(conninfo)["dbname"]
        connection.execute(f"alter database {dbname} owner to {dba}")
    return configuration, make_conninfo(conninfo, user=dba)


@pytest.fixture
def replica(role):
    """A login that is a member of two callers, and so may act as either."""
    return role(member_of=("accounts", "email-worker"))


@pytest.fixture
def client(connect):
    """A client on a session of a role."""

    def client(role="accounts", *, caller=None, autocommit=True, **parameters):
        connection = connect(role, **parameters)
        connection.autocommit = autocommit
        return Jobs(connection, "jobs_email", caller=caller)

    return client


@pytest.fixture
def producing(session_for):
    return Jobs(session_for("producing", "accounts"), "jobs_email")


@pytest.fixture
def working(session_for):
    return Jobs(session_for("working", "email-worker"), "jobs_email")


@pytest.fixture
def observing(session_for):
    return Jobs(session_for("observing", "operations"), "jobs_email")


@pytest.fixture
def operating(session_for, prefix):
    return Jobs(session_for("operating", f"{prefix}_duty"), "jobs_email")


@pytest.fixture
def pool(conninfo):
    """Open a pool of one connection as a role."""
    opened = []

    def pool(role, **parameters):
        opened.append(
            ConnectionPool(
                psycopg.conninfo.make_conninfo(conninfo, user=role),
                min_size=1,
                max_size=1,
                open=True,
                kwargs=parameters,
            )
        )
        return opened[-1]

    yield pool
    for each in opened:
        each.close()


@pytest.fixture
def key():
    """An idempotency key that nobody has used."""
    return f"key-{uuid4()}"


@pytest.fixture
def leased(enqueue, working):
    """A job that email-worker holds."""
    enqueue()
    (lease,) = working.claim("email")
    return lease


@pytest.fixture
def fail(enqueue, working):
    """Let new jobs fail permanently, at one instant and with one code. Return their ids."""

    def fail(code="smtp.timeout", *, number=1, queue="email"):
        for _ in range(number):
            enqueue(queue)
        leases = working.claim(queue, number)
        working.fail_many([(lease, code, False) for lease in leases])
        return [lease.job_id for lease in leases]

    return fail


@dataclass
class Held:
    """A lease kept by hand. Its fields may hold anything."""

    job_id: UUID | str | None
    lease_token: str | None


@pytest.fixture
def held():
    return Held


@pytest.fixture
def lenso_jobs(monkeypatch, capsys, conninfo, tmp_path, document):
    """Run the command in this process: (exit code, output, errors)."""

    def lenso_jobs(*arguments, url=conninfo, config=None, **changes):
        path = tmp_path / "jobs.json"
        path.write_text(document(**changes) if config is None else config)
        monkeypatch.setenv("JOBS_DATABASE_URL", url)
        monkeypatch.setattr(
            sys,
            "argv",
            ["lenso-jobs", *map(str, arguments), "--config", str(path)],
        )
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return caught.value.code or 0, said.out, said.err

    return lenso_jobs


@pytest.fixture
def as_dropped():
    """Choose what an operator does who knows that nothing was renamed.

    Where a remedy depends on that, it says "if it was renamed: A; if it was dropped: B",
    or "if it is X under a new name: A; else B".
    """

    def as_dropped(remedy):
        return re.split("; if it was dropped: |; else ", remedy)[-1]

    return as_dropped


@pytest.fixture
def command(environment, tmp_path):
    """Run the command with a document and return the finished process."""

    def command(*arguments, document=None, **changes):
        file = []
        if document is not None:
            path = tmp_path / f"{uuid4().hex}.json"
            path.write_text(document, encoding="utf-8")
            file = ["--config", path]
        return subprocess.run(
            [*COMMAND, *arguments, *file],
            env={**environment, **changes},
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return command


@pytest.fixture
def open_directory():
    """A directory that every account may pass through."""
    root = Path(tempfile.mkdtemp(prefix="test-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root, ignore_errors=True)


# Waiting.


@pytest.fixture
def acts():
    """What is done as the next sleeps of a wait begin, one at each."""
    return deque()


@pytest.fixture
def pausing(monkeypatch):
    """Let every pause last so many seconds. Return the longest pause of each wait."""

    def pausing(seconds):
        asked = []

        def pauses(longest):
            asked.append(longest)
            return repeat(seconds)

        monkeypatch.setattr(_waiting, "pauses", pauses)
        return asked

    return pausing


@pytest.fixture
def soon(owner):
    """The server's time in 300 ms."""

    def soon():
        return owner.value("select clock_timestamp() + interval '300 ms'")

    return soon
