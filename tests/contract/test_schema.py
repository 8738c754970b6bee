"""What operators run and what reviewers read are held to be the same schema."""

import difflib
import json
import re
import shutil
import subprocess
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from lenso_jobs._assets import asset_dir, sql_files
from lenso_jobs.config import Configuration
from lenso_jobs.embedded import find_programs
from lenso_jobs.operator import SetupReport, check, setup
from lenso_jobs.operator._setup import bootstrap

ROOT = Path(__file__).parents[2]
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
def dump():
    """Dump a schema without the migration tool's tables, line by line."""
    program = find_programs() / "pg_dump"
    if not program.exists():
        found = shutil.which("pg_dump")
        assert found, "pg_dump is needed"
        program = Path(found)

    def dump(conninfo, schema="jobs_email"):
        result = subprocess.run(
            [
                program,
                "--schema-only",
                f"--schema={schema}",
                *(f"--exclude-table={schema}.{table}" for table in YOYO_TABLES),
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
        bootstrap(connection, of)
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


def test_a_migration_applied_twice_changes_nothing(new_database, dump, role_prefix):
    of = configuration(role_prefix)
    conninfo = new_database(role_prefix)
    setup(of, conninfo)
    before = dump(conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("delete from jobs_email._yoyo_migration")

    report = setup(of, conninfo)

    assert report.migrations == ("0001-initial",)
    assert difference(before, dump(conninfo)) == ""


def test_a_restored_instance_works_and_check_finds_it_as_it_should_be(
    new_database, tmp_path, role_prefix
):
    of = configuration(role_prefix)
    source, target = new_database(), new_database(role_prefix)
    setup(of, source)
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute("set role accounts")
        connection.execute("select jobs_email.enqueue('email', 'send', '{}', 'k')")
    saved = tmp_path / "saved.sql"
    programs = find_programs()
    subprocess.run(
        [programs / "pg_dump", f"--dbname={source}", f"--file={saved}"], check=True
    )
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute("drop schema jobs_email cascade")

    subprocess.run(
        [programs / "psql", "-q", "-v", "ON_ERROR_STOP=1", "-f", saved, target],
        check=True,
        stdout=subprocess.DEVNULL,
    )

    assert check(of, target) == []
    assert setup(of, target) == SetupReport((), configured=False)
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute('set role "email-worker"')
        claimed = connection.execute("select * from jobs_email.claim('email')")
        assert len(claimed.fetchall()) == 1


def test_setup_run_again_finds_nothing_to_do(new_database, dump, role_prefix):
    of = configuration(role_prefix)
    conninfo = new_database(role_prefix)
    setup(of, conninfo)
    before = dump(conninfo)

    report = setup(of, conninfo)

    assert report.migrations == ()
    assert not report.configured
    assert difference(before, dump(conninfo)) == ""


def test_the_first_migration_is_sql_in_its_order():
    text = b"".join(path.read_bytes() for path in sql_files())

    assert (ROOT / "migrations" / "0001-initial.sql").read_bytes() == text


def test_no_file_of_a_migration_names_an_instance():
    for path in asset_dir("migrations").glob("*.sql"):
        assert "jobs_email" not in path.read_text(encoding="utf-8")


def test_two_instances_of_one_database_do_not_see_each_other(new_database, role_prefix):
    one, other = f"{role_prefix}a", f"{role_prefix}b"
    conninfo = new_database(one)
    setup(configuration(one, "jobs_a"), conninfo)
    setup(configuration(other, "jobs_b"), conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("set role accounts")
        job_id, _ = connection.execute(
            "select * from jobs_a.enqueue('email', 'send', '{}', 'k')"
        ).fetchone()
        _, created = connection.execute(
            "select * from jobs_b.enqueue('email', 'send', '{}', 'k')"
        ).fetchone()
        connection.execute('set role "email-worker"')

        claimed = connection.execute(
            "select job_id from jobs_b.claim('email', 10)"
        ).fetchall()

        assert created
        assert len(claimed) == 1
        assert claimed[0][0] != job_id
        connection.execute("reset role")
        paths = connection.execute(
            "select distinct n.nspname, s from pg_proc as p"
            " join pg_namespace as n on n.oid = p.pronamespace,"
            " unnest(p.proconfig) as s"
            " where n.nspname in ('jobs_a', 'jobs_b') and s like 'search_path=%'"
        ).fetchall()
        assert sorted(paths) == [
            ("jobs_a", "search_path=jobs_a, pg_temp"),
            ("jobs_b", "search_path=jobs_b, pg_temp"),
        ]
        connection.execute("drop schema jobs_b cascade")
        for kind in ("owner", "producer", "worker", "observer", "operator"):
            connection.execute(f"drop role {other}_{kind}")


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
        bootstrap(connection, configuration(role_prefix))
        connection.execute("set search_path = jobs_email")

        connection.execute(first)
        with pytest.raises(psycopg.Error) as caught:
            connection.execute(second)

    assert caught.value.sqlstate == "LJ008"
    assert "psql: -1" in caught.value.diag.message_hint


def test_a_database_owner_without_superuser_can_set_up(new_database, dump, role_prefix):
    of = configuration(role_prefix)
    name = f"{role_prefix}_dba"
    conninfo = new_database(role_prefix)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"create role {name} login createrole")
        connection.execute(f"alter database {connection.info.dbname} owner to {name}")
    as_dba = psycopg.conninfo.make_conninfo(conninfo, user=name)
    try:
        # A caller that exists already may be somebody else's to grant; this one is new.
        fresh = Configuration.from_json(
            of.document()
            .replace('"accounts"', f'"{role_prefix}_p"')
            .replace('"email-worker"', f'"{role_prefix}_w"')
        )

        report = setup(fresh, as_dba)
        again = setup(fresh, as_dba)

        assert report.migrations == ("0001-initial",)
        assert again.migrations == ()
        assert dump(conninfo)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            owners = connection.execute(
                "select distinct pg_get_userbyid(relowner) from pg_class"
                " where relnamespace = 'jobs_email'::regnamespace"
            ).fetchall()
            assert owners == [(f"{role_prefix}_owner",)]
            connection.execute(f"set role {role_prefix}_p")
            assert connection.execute(
                "select created from jobs_email.enqueue('email', 'send', '{}', 'k')"
            ).fetchone() == (True,)
    finally:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("drop schema jobs_email cascade")
            connection.execute(
                f"alter database {connection.info.dbname} owner to current_user"
            )
            connection.execute(f"drop role if exists {role_prefix}_p, {role_prefix}_w")
            for kind in ("owner", "producer", "worker", "observer", "operator"):
                connection.execute(f"drop role if exists {role_prefix}_{kind}")
            connection.execute(f"drop owned by {name}")
            connection.execute(f"drop role {name}")
