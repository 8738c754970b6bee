"""A schema that somebody made beforehand under the name of an Instance to be."""

from __future__ import annotations

from uuid import uuid4

import pytest

from lenso_jobs import JobsError
from lenso_jobs.config import Configuration
from lenso_jobs.operator import (
    OperatorError,
    check,
    configure,
    find_changes,
    plan,
    setup,
    survey,
    uninstall,
    upgrade,
)

COLUMNS = {
    "_yoyo_migration": "{} as migration_id",
    "_yoyo_log": "{} as id",
    "_yoyo_version": "1 as version",
    "yoyo_lock": "length({}) as pid",
    "installed_version": "length({}) as version",
    "instance": "{} as lease_seconds, 1 as retry_base_seconds, 1 as retry_max_seconds,"
    " 0 as retry_jitter, true as notify, 0 as retention_seconds",
    "queue": "{} as queue",
    "caller": "{} as caller, true as is_producer, true as is_worker,"
    " true as is_observer",
    "job": "{} as queue",
    "live_job": "{} as queue",
}


@pytest.fixture(params=[None, "public"])
def squatted(request, owner, new_role, connect, document):
    """The document of an Instance that a role without rights was quicker to make.

    Also in a database where every role may create objects in ``public``.
    """
    name = new_role()
    owner.execute(f'grant create on database "{owner.info.dbname}" to "{name}"')
    squatter = connect(name, options="")
    squatter.execute(
        "create schema jobs_other; grant usage on schema jobs_other to public;"
        " create function jobs_other.trap() returns text language plpgsql"
        " as $$ begin raise 'trapped %', current_user; end $$;"
        " create function jobs_other.configure(jsonb) returns boolean language sql"
        " as 'select jobs_other.trap() is null'"
    )
    if request.param:
        owner.execute(f'grant create on schema public to "{name}"')
    for table, columns in COLUMNS.items():
        trap = columns.format("jobs_other.trap()")
        for schema in ("jobs_other", request.param):
            if schema:
                squatter.execute(f"create view {schema}.{table} as select {trap}")
                squatter.execute(f"grant all on {schema}.{table} to public")
    return Configuration.from_json(
        document(schema="jobs_other", role_prefix=f"other_{uuid4().hex[:10]}")
    )


@pytest.mark.slow
def test_nothing_of_it_runs_in_any_act_of_a_superuser(squatted, conninfo):
    for act in (
        setup,
        upgrade,
        check,
        plan,
        configure,
        find_changes,
        survey,
        uninstall,
    ):
        try:
            act(squatted, conninfo)
        except (OperatorError, JobsError) as error:
            told = str(error)
        else:
            told = "jobs_other" if act in {check, plan, find_changes} else ""

        assert "jobs_other" in told, act


def test_no_statement_is_printed_that_would_take_it_over(squatted, conninfo):
    for act in (check, plan, upgrade, configure):
        with pytest.raises(OperatorError, match="choose another schema") as refused:
            act(squatted, conninfo)

        assert "alter " not in str(refused.value)
