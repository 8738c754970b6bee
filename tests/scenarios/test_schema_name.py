"""The fault: the name of the schema.

An Instance works in exactly its schema, or the name is refused before anything is
written.

A migration without the schema in its URL: contract/test_schema.py.
"""

import asyncio

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs import AsyncJobs, Configuration, Jobs
from lenso_jobs.config import ConfigurationError
from lenso_jobs.operator import check, setup

# Both are words that may be a schema's name; the second takes quotes.
NAMES = ("jobs", "select")
REFUSED = (
    "Jobs",
    "jobs-eu",
    "a.b",
    "o'brien",
    'a"b',
    "é" * 31 + "e",
    "s" * 49,
    "s" * 63,
    "s" * 64,
    "x; drop table t",
    "",
    "1st",
    "public",
    "pg_jobs",
    "information_schema",
)


@pytest.fixture
def written(owner):
    """Everything of this database, and the roles that would be made for these names."""

    def written(*prefixes):
        return owner.rows(
            "select 'schema', nspname::text from pg_namespace"
            " where not pg_is_other_temp_schema(oid)"
            " union all select 'relation', oid::text from pg_class"
            " where not pg_is_other_temp_schema(relnamespace)"
            " union all select 'role', rolname from pg_roles"
            " where rolname ~ '_(owner|producer|worker|observer|operator)$'"
            " and regexp_replace(rolname, '_[a-z]+$', '') = any (%s)"
            " order by 1, 2",
            list(prefixes),
        )

    return written


@pytest.mark.parametrize("field", ["schema", "role_prefix"])
def test_any_other_name_is_refused_and_nothing_is_written(
    field, document, new_prefix, owner, written, bootstrap
):
    owner.execute("create table public.t ()")
    fields = {"schema": "jobs_other", "role_prefix": new_prefix()}
    names = (*REFUSED, fields["role_prefix"])
    before = written(*names)

    for name in REFUSED:
        text = document(**fields | {field: name})
        with pytest.raises(ConfigurationError, match=field):
            Configuration.from_json(text)
        with owner.refusing("LJ007") as caught:
            bootstrap(owner, text)
        assert "schema and role_prefix" in str(caught.value)

    assert written(*names) == before


@pytest.fixture
def installed(databases, instance_of):
    """Two Instances in one database, the second set up beside the first."""
    conninfo = databases()
    instances = [instance_of(name) for name in NAMES]
    reports = [setup(instance, conninfo) for instance in instances]
    assert all(report.migrations and report.configured for report in reports)
    return conninfo, instances


@pytest.mark.slow
def test_two_instances_work_each_in_the_schema_it_is_named_for(
    installed, connect, crews, hire, only_woken, until
):
    conninfo, instances = installed
    dbname = conninfo_to_dict(conninfo)["dbname"]
    owner = connect(dbname=dbname)
    rows = "select count(*) from {}.{}".format

    async def handler(crew, lease):
        pass

    hired = [
        hire(crew, handler, make_conninfo(conninfo, user="email-worker"), schema=name)
        for name in NAMES
        for crew in crews
    ]
    only_woken(4, dbname=dbname)

    as_accounts = make_conninfo(conninfo, user="accounts")
    with psycopg.connect(as_accounts, autocommit=True) as producer:
        # The same keys in both: neither knows those of the other.
        for name in NAMES:
            created = [
                producer.execute(
                    f"select created from \"{name}\".enqueue('email', 'send', '{{}}', 'a')"
                ).fetchone()[0],
                Jobs(producer, name)
                .enqueue("email", "send", {}, idempotency_key="b")
                .created,
                asyncio.run(enqueue_async(as_accounts, name)),
            ]
            assert created == [True] * 3
            until(lambda n=name: owner.value(rows(f'"{n}"', "attempt")) == 3)
            if name == NAMES[0]:
                assert owner.value(rows(f'"{NAMES[1]}"', "job")) == 0

    assert [each.stop().succeeded for each in hired] == [2, 1] * 2
    for instance in instances:
        owner.execute(f"set role {instance.prefix}_operator")
        purge = f'select "{instance.schema_}".purge(clock_timestamp())'
        assert owner.value(purge) == 3
        owner.execute("reset role")
        assert owner.value(rows(f'"{instance.schema_}"', "job")) == 0
        assert check(instance, conninfo) == []
    assert set(
        owner.rows(
            "select n.nspname, s from pg_proc as p"
            " join pg_namespace as n on n.oid = p.pronamespace,"
            " unnest(p.proconfig) as s where s like 'search_path=%'"
        )
    ) == {
        ("jobs", "search_path=jobs, pg_temp"),
        ("select", 'search_path="select", pg_temp'),
    }
    assert owner.rows(
        "select distinct n.nspname from pg_class as c join pg_namespace as n"
        " on n.oid = c.relnamespace where c.oid >= 16384 and n.nspname !~ '^pg_'"
        " order by 1"
    ) == [(name,) for name in NAMES]


async def enqueue_async(conninfo, schema):
    async with await psycopg.AsyncConnection.connect(
        conninfo, autocommit=True
    ) as connection:
        jobs = AsyncJobs(connection, schema)
        job = await jobs.enqueue("slow", "send", {}, idempotency_key="c")
    return job.created
