"""The fault: a server with other settings than the developer's.

Every verb works and returns the same.
"""

import psycopg
import pytest

from lenso_jobs.operator import check, setup


@pytest.fixture
def every_verb(connect, operator, claim, make_due):
    """Take jobs through all that may become of one, each caller with some options."""

    def every_verb(options=""):
        options = f"-c search_path=jobs_email {options}"
        producer, worker, acting = (
            connect(role, options=options)
            for role in ("accounts", "email-worker", operator.info.user)
        )
        for key in ("a", "a", "b"):
            producer.execute("select * from enqueue('email', 'send', '{}', %s)", (key,))
        ((_, _, outcome),) = producer.rows(
            "select * from enqueue_many("
            """'[{"queue": "email", "kind": "send", "payload": {}, """
            """"idempotency_key": "b"}]')"""
        )
        assert outcome == "existing"

        job, token = claim(session=worker)
        lease = (job, token)
        assert worker.value("select renew(%s, %s)", *lease)
        many = "array[%s::uuid], array[%s]"
        assert worker.row(f"select * from renew_many({many})", *lease)["outcome"] == (
            "renewed"
        )
        worker.execute("select * from fail(%s, %s, 'smtp', false)", lease)
        acting.execute("select * from redrive(%s)", (job,))
        other, token = claim(session=worker)
        worker.execute(
            f"select * from fail_many({many}, array['smtp'], array[true])",
            (other, token),
        )
        make_due(other)
        for _ in range(2):
            lease = claim(session=worker)
            assert worker.row(f"select * from complete_many({many})", *lease)[
                "outcome"
            ] == ("completed")
        assert worker.value("select complete(%s, %s)", *lease)

        for read in (
            *("inspect_queues()", "inspect_workers()", "inspect_failures()"),
            *("inspect_health()", "inspect_acts()", "retire_expired()"),
            *("enforce_retention()", f"explain_job('{job}')", f"inspect('{job}')"),
            f"inspect_attempts('{job}')",
            *("pause('email')", "resume('email')", "inspect_jobs('email', 'queued')"),
            "redrive_failed('email', clock_timestamp() - interval '1 h')",
        ):
            acting.execute(f"select * from {read}")
        return acting.value("select purge(clock_timestamp() - interval '1 us')")

    return every_verb


@pytest.mark.slow
def test_every_verb_works_where_everything_is_published(every_verb, owner, configure):
    owner.execute("create publication everything for all tables")

    assert every_verb() == 2
    configure(lease_seconds=40, queues=["email"], producer_instances=["accounts"])


@pytest.mark.slow
def test_an_instance_is_set_up_where_everything_is_published(databases, instance_of):
    instance, conninfo = instance_of(), databases()
    with psycopg.connect(conninfo) as connection:
        connection.execute("create publication everything for all tables")

    setup(instance, conninfo)

    assert not check(instance, conninfo)


@pytest.mark.slow
@pytest.mark.parametrize("conflict", ["use_variable", "use_column"])
def test_no_setting_of_the_language_changes_a_result(conflict, every_verb, owner):
    database = owner.info.dbname
    for setting, value in (
        ("variable_conflict", conflict),
        ("extra_errors", "all"),
        ("extra_warnings", "all"),
    ):
        owner.execute(f'alter database "{database}" set plpgsql.{setting} = {value!r}')

    assert every_verb() == 2


@pytest.mark.slow
def test_every_verb_works_where_queries_run_in_parallel(every_verb, owner):
    name = (
        "debug_parallel_query"
        if owner.info.server_version >= 160000
        else "force_parallel_mode"
    )

    assert every_verb(f"-c {name}=regress") == 2
