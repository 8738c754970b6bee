"""Constructors refuse what they cannot use, and say what to pass instead."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from lenso_jobs import (
    AsyncJobs,
    DirectorySecrets,
    EnvironmentSecrets,
    InvalidArgument,
    Jobs,
    SecretNotFound,
    prepare,
    prepare_async,
)
from lenso_jobs.capability import AsyncCapability, Capability

SECRET = "hush-hush"


def of(path, *bases):
    """An instance of a class as a library that is not installed here has it."""
    module, _, name = path.rpartition(".")
    return type(name, bases or (), {"__module__": module})()


class Session(type(of("sqlalchemy.orm.session.Session"))):
    """A session as Flask-SQLAlchemy and SQLModel derive theirs."""


async def awaited():
    """What psycopg.AsyncConnection.connect() is before it is awaited."""


SQLALCHEMY = "use lenso_jobs.contrib.sqlalchemy.jobs_on(it, schema)"
ENGINE = "use lenso_jobs.contrib.sqlalchemy.jobs_on with a session or connection of it"
DJANGO = "use lenso_jobs.contrib.django.jobs_on(schema)"
WRONG = {
    "None": (lambda: None, "not None: pass {opened}"),
    "URL": (lambda: f"postgresql://u:{SECRET}@db/jobs", "not str: pass {opened}"),
    "bytes": (SECRET.encode, "not bytes: pass {opened}"),
    "a class": (lambda: psycopg.Connection, "not type: pass {opened}"),
    "a dict": (lambda: {"password": SECRET}, "not dict: pass {opened}"),
    "SQLAlchemy session": (
        lambda: of("sqlalchemy.orm.session.Session"),
        f"not sqlalchemy.orm.session.Session: {SQLALCHEMY}",
    ),
    "derived session": (
        Session,
        SQLALCHEMY,
    ),
    "scoped session": (
        lambda: of("sqlalchemy.orm.scoping.scoped_session"),
        SQLALCHEMY,
    ),
    "SQLAlchemy connection": (
        lambda: of("sqlalchemy.engine.base.Connection"),
        SQLALCHEMY,
    ),
    "SQLAlchemy engine": (
        lambda: of("sqlalchemy.engine.base.Engine"),
        ENGINE,
    ),
    "raw connection": (
        lambda: of("sqlalchemy.pool.base._ConnectionFairy"),
        "pass its driver_connection",
    ),
    "asyncio session": (
        lambda: of("sqlalchemy.ext.asyncio.session.AsyncSession"),
        SQLALCHEMY,
    ),
    "asyncio connection": (
        lambda: of("sqlalchemy.ext.asyncio.engine.AsyncConnection"),
        SQLALCHEMY,
    ),
    "asyncio engine": (
        lambda: of("sqlalchemy.ext.asyncio.engine.AsyncEngine"),
        ENGINE,
    ),
    "adapted connection": (
        lambda: of(
            "sqlalchemy.dialects.postgresql.psycopg.AsyncAdapt_psycopg_connection",
            type(of("sqlalchemy.engine.interfaces.AdaptedConnection")),
        ),
        "pass its driver_connection",
    ),
    "Django proxy": (lambda: of("django.utils.connection.ConnectionProxy"), DJANGO),
    "Django wrapper": (
        lambda: of(
            "django.db.backends.postgresql.base.DatabaseWrapper",
            type(of("django.db.backends.base.base.BaseDatabaseWrapper")),
        ),
        DJANGO,
    ),
    "Django cursor": (lambda: of("django.db.backends.utils.CursorWrapper"), DJANGO),
    "psycopg2": (
        lambda: of("psycopg2.extensions.connection"),
        "pass a connection of psycopg 3",
    ),
    "asyncpg": (
        lambda: of("asyncpg.connection.Connection"),
        "pass a connection of psycopg 3",
    ),
}


def refused(client, *arguments):
    with pytest.raises(InvalidArgument) as caught:
        client(*arguments)
    assert SECRET not in str(caught.value)
    return caught


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("client", [Jobs, AsyncJobs])
def test_another_thing_than_a_connection_or_pool_is_refused(client, wrong):
    given, message = WRONG[wrong]
    kind, opened = "", "psycopg.connect(url)"
    if client is AsyncJobs:
        kind, opened = "Async", "await psycopg.AsyncConnection.connect(url)"

    said = str(refused(client, given(), "jobs_email").value)

    assert said.startswith(
        f"connection_or_pool must be a psycopg.{kind}Connection or a "
        f"psycopg_pool.{kind}ConnectionPool, not "
    )
    assert message.format(opened=opened) in said


def test_a_coroutine_is_refused_until_it_is_awaited():
    given = awaited()

    refused(AsyncJobs, given, "jobs_email").match("not coroutine: await it first")
    given.close()


def test_a_source_of_the_other_client_is_refused(conninfo):
    with psycopg.connect(conninfo) as connection:
        refused(AsyncJobs, connection, "jobs_email").match("use Jobs for it")
        refused(Jobs, connection.cursor(), "jobs_email").match("cursor.connection")
        refused(Jobs, Jobs(connection, "jobs_email"), "jobs_email").match(
            "the connection or pool of that client"
        )
    refused(AsyncJobs, ConnectionPool(open=False), "jobs_email").match("use Jobs for")
    refused(Jobs, AsyncConnectionPool(open=False), "jobs_email").match(
        "use AsyncJobs for it"
    )


@pytest.mark.parametrize("client", [Jobs, AsyncJobs])
@pytest.mark.parametrize(
    "name", [None, 5, b"jobs", ["jobs"], "", "a\0b", "\ud800", "é" * 32]
)
def test_a_schema_that_is_not_a_name_is_refused(client, name):
    pool = (AsyncConnectionPool if client is AsyncJobs else ConnectionPool)(open=False)

    refused(client, pool, name).match(
        "^schema must be (a string, not|a name of 1 to 63|valid)"
    )


@pytest.mark.parametrize("client", [Jobs, AsyncJobs])
@pytest.mark.parametrize(
    "role", [5, b"role", "", "a\0b", "\ud800", "x" * 64, "none", "Public", "pg_monitor"]
)
def test_a_caller_that_is_not_a_role_is_refused(client, role):
    pool = (AsyncConnectionPool if client is AsyncJobs else ConnectionPool)(open=False)

    refused(client, pool, "jobs_email", role).match("^caller must ")


def test_a_name_with_a_percent_sign_is_a_name(owner):
    owner.execute('create schema "100%s"')

    with pytest.raises(psycopg.errors.UndefinedFunction, match=r"100%s\.claim"):
        Jobs(owner, "100%s").claim("email")


# The capability and prepare.


@pytest.mark.parametrize("capability", [Capability, AsyncCapability])
def test_a_capability_takes_the_client_of_its_kind_only(capability, conninfo):
    with psycopg.connect(conninfo) as connection:
        blocking = Jobs(connection, "jobs_email")
        other = (
            AsyncJobs(AsyncConnectionPool(open=False), "jobs_email")
            if capability is Capability
            else blocking
        )
        for wrong in (None, connection, "jobs_email", Jobs, other):
            refused(capability, wrong).match("^jobs must be an? (Async)?Jobs, not ")


async def a_resolver(reference):
    return reference


NOT_PREPARED = {
    "no document": (None, EnvironmentSecrets(), None, "pass Configuration.from_file"),
    "path": ("jobs.json", EnvironmentSecrets(), None, "Configuration, not str: pass"),
    "mapping": ({"schema": "jobs"}, EnvironmentSecrets(), None, "not dict: pass"),
    "no resolver": ("sound", None, None, "secrets must be a function that"),
    "URL": ("sound", f"postgresql://u:{SECRET}@db", None, "database URL, not str"),
    "class": ("sound", EnvironmentSecrets, None, r"pass EnvironmentSecrets\(\)"),
    "other class": ("sound", DirectorySecrets, None, r"pass DirectorySecrets\("),
    "coroutine": ("sound", a_resolver, None, "not a coroutine function"),
    "caller": ("sound", EnvironmentSecrets(), 5, "caller must be a string, not int"),
    "none": ("sound", EnvironmentSecrets(), "none", "caller must not be none"),
}


@pytest.mark.parametrize("wrong", NOT_PREPARED)
@pytest.mark.parametrize("way", [prepare, prepare_async])
def test_prepare_refuses_an_argument_of_another_kind(way, wrong, configuration):
    document, secrets, caller, message = NOT_PREPARED[wrong]
    document = configuration() if document == "sound" else document

    def act():
        if way is prepare:
            prepare(document, secrets, caller)
        else:
            asyncio.run(prepare_async(document, secrets, caller))

    refused(act).match(message)


@pytest.mark.parametrize("directory", [None, 5, "", b"secrets"])
def test_a_directory_of_secrets_is_a_path(directory):
    refused(DirectorySecrets, directory).match("^directory must be a path")


@pytest.mark.parametrize("reference", [None, 5, b"jobs/url"])
def test_a_reference_is_a_string(reference, tmp_path):
    for resolver in (EnvironmentSecrets(), DirectorySecrets(tmp_path)):
        with pytest.raises(SecretNotFound, match="must be a string"):
            resolver(reference)
