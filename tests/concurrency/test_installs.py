"""Set-ups at the same time: of one Instance, of many, and of two that want one name."""

from __future__ import annotations

import json
import os
from threading import Barrier
from uuid import uuid4

import psycopg
import pytest

from lenso_jobs.config import Configuration
from lenso_jobs.operator import setup

KINDS = ("owner", "producer", "worker", "observer", "operator")


def document(schema, prefix, callers):
    return Configuration.from_json(
        json.dumps(
            {
                "schema": schema,
                "role_prefix": prefix,
                "database_url_secret": "jobs/database-url",
                "lease_seconds": 30,
                "retry_base_seconds": 5,
                "retry_max_seconds": 300,
                "queues": ["email"],
                "producer_instances": [f"{callers}_app"],
                "worker_instances": [f"{callers}_mailer"],
            }
        )
    )


@pytest.fixture
def names():
    """Make up names that begin role names; the roles are dropped at the end."""
    made = []

    def names():
        made.append(f"race_{uuid4().hex[:10]}")
        return made[-1]

    yield names
    with psycopg.connect(
        os.environ["LENSO_JOBS_TEST_SERVER"], autocommit=True
    ) as connection:
        for name in made:
            for kind in (*KINDS, "app", "mailer"):
                connection.execute(f"drop role if exists {name}_{kind}")


@pytest.fixture
def databases(names, new_database):
    """Make empty databases; they are dropped before the roles of ``names`` are."""
    return new_database


def run_a_job(conninfo, schema, callers):
    """Enqueue, claim and complete a job as the declared callers."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"set search_path = {schema}")
        connection.execute(f"set role {callers}_app")
        connection.execute("select enqueue('email', 'send', '{}', 'k')")
        connection.execute(f"set role {callers}_mailer")
        lease = connection.execute(
            "select job_id, lease_token from claim('email')"
        ).fetchone()
        return connection.execute("select complete(%s, %s)", lease).fetchone()[0]


@pytest.mark.slow
def test_two_set_ups_of_one_instance_queue_up_and_the_second_finds_it_done(
    names, databases, background
):
    prefix = names()
    conninfo = databases()
    start = Barrier(2, timeout=20)

    def install():
        start.wait()
        return setup(document("jobs_email", prefix, prefix), conninfo)

    installs = [background(install) for _ in range(2)]
    reports = [install.result() for install in installs]

    assert sorted(bool(report.migrations) for report in reports) == [False, True]
    assert sorted(report.configured for report in reports) == [False, True]
    assert run_a_job(conninfo, "jobs_email", prefix)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["two databases", "two schemas"])
def test_of_two_set_ups_that_reach_for_one_role_prefix_one_is_refused(
    where, names, databases, background
):
    prefix = names()
    conninfo = databases()
    targets = {
        "two databases": [(conninfo, "jobs_email"), (databases(), "jobs_email")],
        "two schemas": [(conninfo, "jobs_email"), (conninfo, "jobs_mail")],
    }[where]
    start = Barrier(2, timeout=20)

    def install(conninfo, schema):
        start.wait()
        return setup(document(schema, prefix, prefix), conninfo)

    installs = [background(install, *target) for target in targets]
    refusals = [install.exception() for install in installs]

    (refusal,) = filter(None, refusals)
    assert refusal.sqlstate == "LJ007", refusal
    assert "role_prefix" in refusal.hint
    winner = targets[refusals.index(None)]
    assert run_a_job(*winner, prefix)
    (loser,) = [target for target in targets if target != winner]
    with psycopg.connect(loser[0]) as connection:
        (made,) = connection.execute(
            "select count(*) from pg_namespace where nspname = %s", (loser[1],)
        ).fetchone()
    assert made == 0
