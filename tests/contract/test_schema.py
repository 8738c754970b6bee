"""What operators run and what reviewers read are held to be the same schema."""

import difflib
import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from lenso_jobs._assets import asset_dir, sql_files
from lenso_jobs.config import Configuration
from lenso_jobs.operator import setup
from lenso_jobs.operator._parts import applying, bootstrapping, run
from lenso_jobs.operator._session import connected
from lenso_jobs.operator._state import released

ROOT = Path(__file__).parents[2]
MIGRATIONS = ROOT / "migrations"
YOYO_TABLES = ("_yoyo_log", "_yoyo_migration", "_yoyo_version", "yoyo_lock")


def configuration(prefix, schema="jobs_email"):
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
                "producer_instances": ["accounts"],
                "worker_instances": ["email-worker"],
            }
        )
    )


@pytest.fixture
def role_prefix():
    return f"jobs_{uuid4().hex[:12]}"


@pytest.fixture
def dump(program):
    """Dump a schema without the migration tool's tables, line by line."""

    def dump(conninfo, schema="jobs_email"):
        result = subprocess.run(
            [
                program("pg_dump"),
                "--schema-only",
                f"--schema={schema}",
                *(f"--exclude-table={schema}.{table}" for table in YOYO_TABLES),
                # configure makes these.
                f"--exclude-table={schema}.claim_floor_*",
                f"--dbname={conninfo}",
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        text = re.sub(r"^\\(un)?restrict .*$", "", result.stdout, flags=re.MULTILINE)
        assert "CREATE FUNCTION" in text
        return text.splitlines()

    return dump


def load_sql(conninfo, of):
    """Load sql/ fresh, as a reviewer reads it."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        run(connection, bootstrapping(of))
        with connection.transaction():
            connection.execute(
                "select set_config('search_path', %s, true)", (of.schema_,)
            )
            for path in sql_files():
                connection.execute(path.read_bytes())


def difference(one, other):
    return "\n".join(difflib.unified_diff(one, other, lineterm="", n=1))


def test_all_migrations_together_make_what_sql_says(new_database, dump, role_prefix):
    of = configuration(role_prefix)
    migrated = new_database()
    setup(of, migrated)
    by_migrations = dump(migrated)
    with psycopg.connect(migrated, autocommit=True) as connection:
        connection.execute("drop schema jobs_email cascade")
    loaded = new_database(role_prefix)

    load_sql(loaded, of)

    assert difference(by_migrations, dump(loaded)) == ""


@pytest.mark.slow
def test_a_migration_applied_twice_changes_nothing(new_database, dump, role_prefix):
    of = configuration(role_prefix)
    conninfo = new_database(role_prefix)
    setup(of, conninfo)
    before = dump(conninfo)

    with connected(conninfo) as connection:
        for migration in released():
            for part in applying(migration, of):
                run(connection, part)

    assert difference(before, dump(conninfo)) == ""


@pytest.mark.slow
def test_setup_run_again_finds_nothing_to_do(new_database, dump, role_prefix):
    of = configuration(role_prefix)
    conninfo = new_database(role_prefix)
    setup(of, conninfo)
    before = dump(conninfo)

    report = setup(of, conninfo)

    assert report.migrations == ()
    assert not report.configured
    assert difference(before, dump(conninfo)) == ""


def test_the_first_migration_is_composed_from_sql():
    whole = b"".join(path.read_bytes() for path in sql_files())

    assert (MIGRATIONS / "0001-initial.sql").read_bytes() == whole


def test_every_migration_follows_the_one_before():
    names = [path.stem for path in sorted(MIGRATIONS.glob("*.sql"))]

    assert [name[:5] for name in names] == [f"{n + 1:04}-" for n in range(len(names))]
    for before, name in pairwise(names):
        first, *_ = (MIGRATIONS / f"{name}.sql").read_text().splitlines()
        assert first == f"-- depends: {before}"


def test_a_migration_in_a_transaction_opens_with_who_and_where_and_carries_whole_files():
    opening = (ROOT / "sql" / "0_open.sql").read_text()
    whole = [path.read_text() for path in sql_files()]

    for path in sorted(MIGRATIONS.glob("*.sql"))[1:]:
        text = path.read_text()
        if "\n-- transactional: false\n" in text:
            continue
        _, rest = text.split("\n", 1)
        assert rest.startswith(opening), path
        # A later migration may have replaced what this one carries.
        if path == max(MIGRATIONS.glob("*.sql")):
            for each in whole:
                rest = rest.replace(each, "")
            assert not re.search(
                r"^create or replace|^grant |^revoke |^\$\$", rest, re.MULTILINE
            ), rest


def test_no_file_of_a_migration_names_an_instance():
    for path in asset_dir("migrations").glob("*.sql"):
        assert "jobs_email" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("schema", ["public", "other"])
def test_a_migration_outside_an_instance_is_refused(new_database, schema):
    conninfo = new_database()
    text = (ROOT / "migrations" / "0001-initial.sql").read_bytes()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("create schema other")

        connection.execute("select set_config('search_path', %s, false)", (schema,))
        with pytest.raises(psycopg.Error) as caught:
            connection.execute(text)

        assert caught.value.sqlstate == "LJ008"
        assert "?schema=" in caught.value.diag.message_hint
        assert connection.execute(
            "select count(*) from pg_class as c join pg_namespace as n"
            " on n.oid = c.relnamespace where n.nspname in ('public', 'other')"
        ).fetchone() == (0,)


def test_a_migration_outside_a_transaction_is_refused_before_it_makes_anything(
    new_database, role_prefix
):
    conninfo = new_database(role_prefix)
    first, second, *_ = re.split(
        r"(?<=;)\n\n(?=\S)", (ROOT / "sql" / "0_open.sql").read_text(encoding="utf-8")
    )
    with psycopg.connect(conninfo, autocommit=True) as connection:
        run(connection, bootstrapping(configuration(role_prefix)))
        connection.execute("set search_path = jobs_email")

        connection.execute(first)
        with pytest.raises(psycopg.Error) as caught:
            connection.execute(second)

    assert caught.value.sqlstate == "LJ008"
    assert "psql: -1" in caught.value.diag.message_hint
