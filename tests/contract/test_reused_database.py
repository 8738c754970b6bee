"""The database that tests share is the same at the start of each of them."""

import os

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

ROWS = """
    set role accounts;
    select enqueue('email', 'send', '{"n": 1}', 'key-' || n)
    from generate_series(1, 3) as n;
    set role "email-worker";
    select complete(job_id, lease_token) from claim('email', 1);
    select fail(job_id, lease_token, 'smtp.down', false) from claim('email', 1);
    reset role;
    select purge(clock_timestamp(), 1000);
"""
# Undone without another copy of the template.
EMPTIED = {
    "rows": ROWS,
    "rows in both halves of a batch that failed": f"begin; {ROWS} rollback",
    "a policy": "select configure(%(document)s)",
    "a policy without a row": "set session_replication_role = replica;"
    " delete from instance",
    "declarations": "insert into queue values ('further');"
    " delete from caller where caller = 'accounts'",
    "a number drawn": "select nextval('operator_act_operator_act_id_seq')",
    "a vacuum": "vacuum live_job",
    "a setting of the database": "alter database current set lock_timeout = 1",
    "a setting of a role": "alter role accounts in database current set work_mem = 64",
    "a lock": "select pg_advisory_lock(1)",
    "a transaction": "begin; lock table live_job",
    "a transaction that wrote": f"begin; {ROWS}",
    "a prepared transaction": f"begin; {ROWS} prepare transaction 'left-%(pid)s'",
    "a session that waits": "listen jobs_email",
}
# The database is replaced.
REPLACED = {
    "a table": "create table public.further (n integer)",
    "a table made and dropped": "create table further (); drop table further",
    "a table that was rolled back": "begin; create table further (); rollback",
    "a table of a prepared transaction": "begin; create table further ();"
    " prepare transaction 'left-%(pid)s'",
    "a temporary table": "create temp table further (n integer)",
    "a column": "alter table job add column further integer",
    "a function": "alter function purge(timestamptz, integer) cost 7",
    "a comment": "comment on table job is 'further'",
    "a grant": "grant select on job to public",
    "a default privilege": "alter default privileges grant select on tables to public",
    "statistics of a table": f"{ROWS} analyze job",
    "a statistics object": "create statistics further on queue, kind from job",
    "a storage parameter": "alter table live_job set (fillfactor = 70)",
    "a rule": "create rule further as on delete to job do instead nothing",
    "a row-level policy": "create policy further on job using (true)",
    "a trigger turned off": "alter table queue disable trigger all",
    "a large object": "select lo_create(0)",
    "a schema": "create schema further",
    "a migration's row": "delete from _yoyo_migration",
    "another owner of the database": 'alter database current owner to "accounts"',
    "a limit of connections": "alter database current connection limit 5",
    "counters set to zero": "create table further (); select pg_stat_reset()",
}
# The columns that differ between a copy that was emptied and a new one are left out.
ROW = {
    "pg_class": "(to_jsonb(t) - '{relfilenode,relfrozenxid,relminmxid}'::text[])::text"
}


def picture(connection):
    """Everything in the database, its catalogues included."""
    tables = connection.execute(
        "select oid::regclass::text from pg_class where relkind = 'r'"
        " and not relisshared and relnamespace in"
        " ('pg_catalog'::regnamespace, 'jobs_email'::regnamespace)"
    ).fetchall()
    seen = {
        table: connection.execute(
            f"select sha256(convert_to(string_agg(r, '' order by r), 'UTF8')) from"
            f" (select {ROW.get(table, 't::text')} as r from {table} as t) as t"
        ).fetchone()[0]
        for (table,) in tables
    }
    about = {
        "database": "select datdba, datacl, datconnlimit from pg_database"
        " where datname = current_database()",
        "settings": "select setrole, setconfig from pg_db_role_setting where setdatabase"
        " = (select oid from pg_database where datname = current_database())",
        "sessions": "select pid from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()",
        "locks": "select locktype from pg_locks where pid <> pg_backend_pid() and"
        " database = (select oid from pg_database where datname = current_database())",
        "prepared": "select gid from pg_prepared_xacts"
        " where database = current_database()",
        "counters": "select relname, n_live_tup, n_dead_tup, n_mod_since_analyze"
        " from pg_stat_user_tables where schemaname = 'jobs_email' and"
        " relname in ('job', 'live_job', 'attempt', 'operator_act') order by 1",
        "large objects": "select oid from pg_largeobject_metadata",
        "numbers drawn": "select last_value, is_called"
        " from jobs_email.operator_act_operator_act_id_seq",
        "sizes": "select relname, pg_relation_size(oid) from pg_class"
        " where relnamespace = 'jobs_email'::regnamespace order by 1",
    }
    return seen | {
        name: connection.execute(query).fetchall() for name, query in about.items()
    }


@pytest.fixture
def session_on():
    """Open a session on a database by its name; it stays open until the test ends."""
    opened = []

    def session_on(name):
        session = psycopg.connect(
            make_conninfo(os.environ["LENSO_JOBS_TEST_SERVER"], dbname=name),
            autocommit=True,
            options="-c search_path=jobs_email",
        )
        opened.append(session)
        return session

    yield session_on
    for session in opened:
        session.close()


@pytest.fixture
def run(session_on, document):
    """Run statements in a session on a database, and leave the session open."""

    def run(name, statements):
        session = session_on(name)
        session.execute(
            statements.replace("database current", f'database "{name}"')
            .replace("%(pid)s", str(session.info.backend_pid))
            .replace("%(document)s", f"'{document(lease_seconds=77)}'::jsonb")
        )

    return run


@pytest.fixture(scope="module")
def untouched(reused_database):
    """What a new copy of the template holds."""
    name = reused_database.new_copy("untouched")
    server = os.environ["LENSO_JOBS_TEST_SERVER"]
    with psycopg.connect(server, dbname=name, autocommit=True) as connection:
        seen = picture(connection)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'drop database "{name}" with (force)')
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("harm", EMPTIED)
def test_an_emptied_database_equals_a_copy_of_the_template(
    harm, reused_database, untouched, run
):
    reused_database.open()
    name = reused_database.name
    run(name, EMPTIED[harm])

    changed = reused_database.tidy()
    reused_database.open()

    assert reused_database.name == name, changed
    assert picture(reused_database.keeper) == untouched


@pytest.mark.sampled
@pytest.mark.parametrize("harm", REPLACED)
def test_a_database_changed_in_another_way_is_replaced(harm, reused_database, run):
    reused_database.open()
    name = reused_database.name
    run(name, REPLACED[harm])

    assert reused_database.tidy()
    reused_database.open()

    assert reused_database.name != name


@pytest.mark.slow
def test_a_test_that_ends_the_fixtures_own_session_does_no_harm(
    reused_database, untouched, session_on
):
    reused_database.open()
    session_on(reused_database.name).execute(
        "select pg_terminate_backend(%s, 20000)",
        (reused_database.keeper.info.backend_pid,),
    )

    reused_database.tidy()
    reused_database.open()

    assert picture(reused_database.keeper) == untouched


@pytest.mark.slow
def test_a_database_that_a_test_dropped_is_made_again(reused_database, untouched):
    reused_database.open()
    server = os.environ["LENSO_JOBS_TEST_SERVER"]
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'drop database "{reused_database.name}" with (force)')

    reused_database.tidy()
    reused_database.open()

    assert picture(reused_database.keeper) == untouched


@pytest.mark.parametrize(
    ("harm", "mending"),
    [
        (
            'revoke {p}_worker from "email-worker"',
            'grant {p}_worker to "email-worker" with inherit true',
        ),
        ("alter role {p}_duty set work_mem = 64", "alter role {p}_duty reset all"),
        ("alter role {p}_duty nologin", "alter role {p}_duty login"),
    ],
)
def test_a_test_that_leaves_a_role_changed_fails(
    harm, mending, reused_database, prefix, session_on
):
    reused_database.open()
    session = session_on("postgres")
    if session.info.server_version < 160000:
        mending = mending.removesuffix(" with inherit true")

    session.execute(harm.format(p=prefix))
    changed = reused_database.tidy()
    session.execute(mending.format(p=prefix))

    assert list(changed) == ["roles"]
