"""The fault: a schema or a database is renamed.

The Instance goes on in a renamed database, and a repair mends a renamed schema.
"""

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs.operator import check, setup, upgrade


@pytest.mark.slow
def test_an_instance_whose_schema_was_renamed_is_mended_by_a_repair(
    databases, instance_of
):
    instance, conninfo = instance_of(), databases()
    setup(instance, conninfo)
    moved = instance_of("jobs_post", role_prefix=instance.prefix)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("alter schema jobs_email rename to jobs_post")
        assert {each.remedy for each in check(moved, conninfo)} == {
            "lenso-jobs upgrade --repair"
        }

        upgrade(moved, conninfo, repair_too=True)

        assert not check(moved, conninfo)
        connection.execute("set role accounts")
        connection.execute(
            "select * from jobs_post.enqueue('email', 'send', '{}', 'k')"
        )


@pytest.mark.slow
def test_an_instance_goes_on_in_a_database_that_was_renamed(databases, instance_of):
    instance, conninfo = instance_of(), databases()
    setup(instance, conninfo)
    name = conninfo_to_dict(conninfo)["dbname"]
    with psycopg.connect(conninfo, dbname="postgres", autocommit=True) as connection:
        connection.execute(f"alter database {name} rename to {name}_moved")
        try:
            moved = make_conninfo(conninfo, dbname=f"{name}_moved")
            assert not check(instance, moved)
            assert not setup(instance, moved).migrations
        finally:
            connection.execute(f"alter database {name}_moved rename to {name}")
