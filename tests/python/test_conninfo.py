"""Every place that takes a connection string refuses the same ones, and quotes none."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs import AsyncWorker, InvalidArgument, SecretNotFound, Worker, prepare
from lenso_jobs._conninfo import checked

SECRET = "hush-hush"
Url = type(
    "URL", (), {"__module__": "sqlalchemy.engine.url", "__str__": lambda _: SECRET}
)

REFUSED = {
    "driver": (
        f"postgresql+psycopg://ada:{SECRET}@db/jobs",
        "begin with postgresql://",
    ),
    "asyncpg": (f"postgres+asyncpg://ada:{SECRET}@db/jobs", "begin with postgresql://"),
    "driver and option": (
        f"postgresql+psycopg2://ada:{SECRET}@db/jobs?sslmode=require",
        "begin with postgresql://",
    ),
    "upper case": (f"POSTGRESQL://ada:{SECRET}@db/jobs", "begin with postgresql://"),
    "jdbc": (
        f"jdbc:postgresql://db/jobs?password={SECRET}",
        "begin with postgresql://",
    ),
    "another database": (f"mysql://ada:{SECRET}@db/jobs", "begin with postgresql://"),
    "leading blank": (
        f" postgresql://ada:{SECRET}@db/jobs",
        "begin with postgresql://",
    ),
    "stray @": (f"postgresql://ada:x@{SECRET}@db/jobs", "percent-encode"),
    "stray /": (f"postgresql://ada:x/{SECRET}@db/jobs", "percent-encode"),
    "password as port": (f"postgresql://ada:{SECRET}", "not a PostgreSQL URL"),
    "bad escape": (f"postgresql://ada:%zz{SECRET}@db/jobs", "not a PostgreSQL URL"),
    "unknown option": (f"passwort={SECRET}", "not a PostgreSQL URL"),
    "word": (SECRET, "not a PostgreSQL URL"),
    "NUL": (f"dbname=jobs\0password={SECRET}", "not a PostgreSQL URL"),
    "surrogate": (f"password={SECRET}\ud800", "not a PostgreSQL URL"),
    "URL as database": (
        f"dbname=postgresql://ada:{SECRET}@db/jobs",
        "give the URL alone",
    ),
    "URL as host": (f"host=postgresql://ada:{SECRET}@db", "give the URL alone"),
    "empty": ("", "is empty"),
    "blank": (" \n", "is empty"),
    "None": (None, "None: is a setting missing"),
    "bytes": (f"postgresql://ada:{SECRET}@db/jobs".encode(), "decode it"),
    "dict": ({"host": "db", "password": SECRET}, r"make_conninfo\(\*\*parameters\)"),
    "SQLAlchemy URL": (Url(), "render_as_string"),
    "path": (Path(SECRET), "must be a connection string, not pathlib"),
    "number": (5432, "must be a connection string, not int"),
}

ACCEPTED = [
    "postgresql://ada:p%40s%2Fs@db.example:5433/jobs?sslmode=require",
    "postgres:///jobs",
    "postgresql://ada:p?s#s@localhost",
    "postgresql://a,b:1/jobs?target_session_attrs=read-write",
    "postgresql://a:1,b:2,[::1]:3/jobs?application_name=x@y/z",
    "dbname=jobs password=p@s/s@s://x",
    "service=jobs",
    "host=/var/run/postgresql",
]

WORK = {"schema": "jobs_email", "queue": "email"}


def one(lease):
    """Handle a job."""


async def other(lease):
    """Handle a job."""


PLACES = {
    "checked": lambda given, _: checked(given, "conninfo"),
    "prepare": lambda given, configuration: prepare(configuration(), lambda _: given),
    "Worker": lambda given, _: Worker(given, handler=one, **WORK),
    "AsyncWorker": lambda given, _: AsyncWorker(given, handler=other, **WORK),
}


@pytest.mark.parametrize("given", REFUSED)
@pytest.mark.parametrize("place", PLACES)
def test_a_bad_connection_string_is_refused_and_not_quoted(given, place, configuration):
    conninfo, message = REFUSED[given]

    with pytest.raises((InvalidArgument, SecretNotFound), match=message) as caught:
        PLACES[place](conninfo, configuration)

    error = caught.value
    assert error.__cause__ is error.__context__ is None
    # The lines of source in the traceback hold nothing but names.
    assert SECRET not in "".join(traceback.format_exception(error))
    assert SECRET not in repr(vars(error))


@pytest.mark.parametrize("given", ACCEPTED)
def test_a_sound_connection_string_is_returned_as_it_is(given):
    assert checked(given, "conninfo") is given
    assert conninfo_to_dict(given)


def test_the_message_holds_the_name_and_the_error_is_the_caller_s():
    with pytest.raises(LookupError, match="the secret jobs/url must be a connection"):
        checked(None, "the secret jobs/url", LookupError)
