"""Roles of a test's own, dropped with whatever they came to own."""

from __future__ import annotations

import os
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

KINDS = ("producer", "worker", "observer")


@pytest.fixture(autouse=True)
def _no_wait_is_for_ever(postgresql_database):
    """Let a wait that nobody ends fail the test (55P03) instead of hanging it."""
    database = postgresql_database.info.dbname
    postgresql_database.autocommit = True
    postgresql_database.execute(f'alter database "{database}" set lock_timeout = 8000')


@pytest.fixture
def new_role(connect, conninfo):
    """Make a role that may log in; it is dropped at the end, its sessions first."""
    made = []
    server = os.environ["LENSO_JOBS_TEST_SERVER"]

    def new_role(name=None, attributes="login", members_of=()):
        name = name or f"role_{uuid4().hex[:12]}"
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(
                sql.SQL("create role {} {}").format(
                    sql.Identifier(name), sql.SQL(attributes)
                )
            )
            made.append(name)
            for group in members_of:
                connection.execute(
                    sql.SQL("grant {} to {}").format(
                        sql.Identifier(group), sql.Identifier(name)
                    )
                )
        return name

    yield new_role
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        for name in made:
            role = sql.Identifier(name)
            connection.execute(sql.SQL("drop owned by {} cascade").format(role))
            connection.execute(sql.SQL("drop role {}").format(role))


@pytest.fixture
def new_caller(new_role, owner, prefix):
    """Make a role and declare it, as set-up does, for ``producer`` and so on."""

    def new_caller(*kinds, name=None, attributes="login"):
        name = new_role(
            name, attributes, members_of=[f"{prefix}_{kind}" for kind in kinds]
        )
        owner.execute(
            "insert into caller (caller, is_producer, is_worker, is_observer)"
            " values (%s, %s, %s, %s)",
            (name, *(kind in kinds for kind in KINDS)),
        )
        return name

    return new_caller


@pytest.fixture
def as_callers(producer, worker, observer, operator, stranger):
    """The sessions by what their role may do."""
    return {
        "producer": producer,
        "worker": worker,
        "observer": observer,
        "operator": operator,
        "stranger": stranger,
    }
