"""The fault: no superuser.

A database owner with CREATEROLE can do everything. Others learn what is missing.
"""

import contextlib

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import JobsError
from lenso_jobs.operator import check, configure, setup

KINDS = ("owner", "producer", "worker", "observer", "operator")
TENANT = """
    select n.nspname, n.nspacl::text, n.nspowner::regrole::text, c.relname,
        c.relacl::text, c.relowner::regrole::text, c.xmin::text
    from pg_namespace as n join pg_class as c on c.relnamespace = n.oid
    where n.nspname = 'tenant'
"""


@pytest.fixture
def instance(instance_of, new_prefix):
    """An Instance whose callers are nobody else's."""
    prefix = new_prefix()
    return instance_of(
        role_prefix=prefix,
        producer_instances=[f"{prefix}_app"],
        worker_instances=[f"{prefix}_mailer"],
        observer_instances=[],
    )


@pytest.fixture
def place(databases, instance):
    """A database of two tenants where nobody may create in public; a superuser's session."""
    conninfo, prefix = databases(), instance.prefix
    with psycopg.connect(conninfo, autocommit=True) as superuser:
        for statement in (
            f"create role {prefix}_dba login nocreaterole",
            f"create role {prefix}_tenant",
            f"create schema tenant authorization {prefix}_tenant",
            f"set role {prefix}_tenant",
            "create table tenant.job (job_id uuid); create table tenant.caller (c text)",
            "reset role",
            "revoke all on schema public from public",
        ):
            superuser.execute(statement)
        before = superuser.execute(TENANT).fetchall()
        yield superuser, make_conninfo(conninfo, user=f"{prefix}_dba")
        assert superuser.execute(TENANT).fetchall() == before
        assert len(before) == 2


def run_a_job(superuser, instance, key):
    """Enqueue, claim and complete a job as the declared callers."""
    superuser.execute(f"set role {instance.prefix}_app")
    superuser.execute("select jobs_email.enqueue('email', 'send', '{}', %s)", (key,))
    superuser.execute(f"set role {instance.prefix}_mailer")
    done = superuser.execute(
        "select jobs_email.complete(c.job_id, c.lease_token)"
        " from jobs_email.claim('email', 10) as c"
    ).fetchall()
    superuser.execute("reset role")
    return done


def left_of(superuser, instance):
    """What there is of an Instance: its schema, and the roles that set-up makes."""
    made = [f"{instance.prefix}_{kind}" for kind in (*KINDS, "app", "mailer")]
    return superuser.execute(
        "select nspname::text from pg_namespace where nspname = 'jobs_email'"
        " union all select rolname from pg_roles where rolname = any (%s)",
        (made,),
    ).fetchall()


@pytest.mark.slow
def test_a_database_owner_who_may_create_roles_installs_upgrades_and_uninstalls(
    place, instance, bootstrap, migrate
):
    superuser, as_dba = place
    superuser.execute(f"alter role {instance.prefix}_dba createrole")
    superuser.execute(
        f"alter database {superuser.info.dbname} owner to {instance.prefix}_dba"
    )

    with psycopg.connect(as_dba, autocommit=True) as dba:
        bootstrap(dba, instance.document())
        with contextlib.closing(migrate(instance, as_dba)) as migrations:
            assert next(migrations) == "0001-initial"
        dba.execute("set default_transaction_isolation = 'read committed'")
        dba.execute("select jobs_email.configure(%s::jsonb)", (instance.document(),))
    superuser.execute(f"set role {instance.prefix}_app")
    superuser.execute("select jobs_email.enqueue('email', 'send', '{}', 'before')")
    superuser.execute("reset role")
    setup(instance, as_dba)

    assert check(instance, as_dba) == []
    assert run_a_job(superuser, instance, "after") == [(True,), (True,)]
    assert configure(instance.model_copy(update={"lease_seconds": 31}), as_dba)
    with psycopg.connect(as_dba, autocommit=True) as dba:
        dba.execute("drop schema jobs_email cascade")
        for kind in (*KINDS, "app", "mailer"):
            dba.execute(f"drop role {instance.prefix}_{kind}")
    assert left_of(superuser, instance) == []


def grants_of(instance, version):
    """What a superuser makes beforehand, by what it is for."""
    prefix = instance.prefix
    options = " with inherit true, set true" if version >= 160000 else ""
    roles = [f"create role {prefix}_{kind}" for kind in (*KINDS, "app", "mailer")]
    return {
        "roles": roles,
        "owner": [f"grant {prefix}_owner to {prefix}_dba{options}"],
        "producer": [f"grant {prefix}_producer to {prefix}_app"],
        "worker": [f"grant {prefix}_worker to {prefix}_mailer"],
        "database": [f"grant create on database {{}} to {prefix}_dba"],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("roles", "permission denied to create role"),
        ("owner", "_owner"),
        ("database", "permission denied for database"),
        ("producer", "_producer"),
        ("worker", "_worker"),
        (None, None),
    ],
)
def test_setup_without_createrole_needs_the_roles_beforehand(
    missing, named, place, instance
):
    superuser, as_dba = place
    grants = grants_of(instance, superuser.info.server_version)
    for name, statements in grants.items():
        for statement in statements:
            if missing not in (name, "roles"):
                superuser.execute(statement.format(superuser.info.dbname))
    before = left_of(superuser, instance)

    if missing:
        with pytest.raises((psycopg.Error, JobsError)) as caught:
            setup(instance, as_dba)
        assert caught.value.sqlstate == "42501"
        assert named in str(caught.value)
        assert left_of(superuser, instance) == before
        return

    assert setup(instance, as_dba).migrations
    assert not setup(instance, as_dba).migrations
    assert check(instance, as_dba) == []
    assert run_a_job(superuser, instance, "k") == [(True,)]
    assert configure(instance.model_copy(update={"lease_seconds": 31}), as_dba)
    with psycopg.connect(as_dba, autocommit=True) as dba:
        dba.execute("drop schema jobs_email cascade")
    superuser.execute(f"drop owned by {instance.prefix}_dba")
    assert left_of(superuser, instance) == before
