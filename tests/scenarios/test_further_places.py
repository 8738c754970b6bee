"""Further faults of servers, of what operators do to one, and of where the command
writes: an Instance works in any of these places, and tells what it cannot do."""

import os
import socket
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs.operator import check, setup, upgrade

COMMAND = [sys.executable, "-c", "from lenso_jobs.cli import main; main()"]


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
            "redrive_failed('email', clock_timestamp() - interval '1 h')",
        ):
            acting.execute(f"select * from {read}")
        return acting.value("select purge(clock_timestamp() - interval '1 us')")

    return every_verb


# Servers.


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
def test_no_setting_of_the_language_changes_an_answer(conflict, every_verb, owner):
    database = owner.info.dbname
    for setting, value in (
        ("variable_conflict", conflict),
        ("extra_errors", "all"),
        ("extra_warnings", "all"),
    ):
        owner.execute(f'alter database "{database}" set plpgsql.{setting} = {value!r}')

    assert every_verb() == 2


@pytest.mark.slow
def test_every_verb_works_where_whatever_may_runs_in_parallel(every_verb, owner):
    name = (
        "debug_parallel_query"
        if owner.info.server_version >= 160000
        else "force_parallel_mode"
    )

    assert every_verb(f"-c {name}=regress") == 2


def test_repetitions_use_up_no_number(owner, enqueue):
    numbers = (
        "select data_type::text, last_value from pg_sequences order by sequencename"
    )
    before = owner.rows(numbers)

    for _ in range(3):
        enqueue(key="same")

    assert owner.rows(numbers) == before
    assert {kind for kind, _ in before} == {"bigint"}


def test_a_queue_gives_no_job_of_one_whose_name_looks_alike(
    configure, enqueue, worker, claim
):
    configure(queues=["email", "slow", "a_b", "axb", "A_b", "a_b."])
    for queue in ("axb", "A_b", "a_b."):
        enqueue(queue)

    assert worker.rows("select * from claim('a_b')") == []
    assert claim("A_b")


# What operators do.


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


# Where the command writes.


@pytest.fixture
def command(environment, document, tmp_path, enqueue, worker):
    """Have the command run where there is something to tell; answers its process."""
    (tmp_path / "jobs.json").write_text(document())
    for _ in range(20):
        enqueue()
    worker.execute(
        "select f.* from (select array_agg(c.job_id) as jobs,"
        " array_agg(c.lease_token) as tokens from claim('email', 20) as c) as held,"
        " fail_many(jobs, tokens, array_fill('smtp'::text, array[20]),"
        " array_fill(false, array[20])) as f"
    )

    def command(*arguments, variables=None, **options):
        return subprocess.Popen(
            [*COMMAND, *arguments, "--config", "jobs.json"],
            cwd=tmp_path,
            env=environment | (variables or {}),
            stderr=subprocess.PIPE,
            **options,
        )

    return command


READS = ["stats", "health", "failures", "check", "plan", "metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("read", READS)
def test_a_reader_that_has_read_enough_sees_no_traceback(read, command):
    reading, writing = os.pipe()
    os.close(reading)

    with command(read, stdout=writing) as process:
        os.close(writing)
        said = process.stderr.read()

    assert said == b""


@pytest.mark.slow
@pytest.mark.parametrize("read", READS)
def test_a_disk_that_is_full_is_told_and_is_no_finding(read, command):
    with Path("/dev/full").open("wb") as full, command(read, stdout=full) as process:
        said = process.stderr.read().decode()

    assert said == "error: No space left on device\n"
    assert process.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("read", ["stats", "health"])
@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["latin-1", "C"],
)
def test_an_output_that_knows_few_signs_shows_the_others(read, variables, command):
    with command(read, variables=variables, stdout=subprocess.PIPE) as process:
        answer, said = process.communicate()

    assert said == b""
    assert b"most jobs fail" in answer or b"jobs_failing" in answer, answer
    assert process.returncode == (read == "health")


@pytest.mark.slow
def test_a_script_is_not_written_in_an_encoding_that_lacks_a_character(
    command, document, tmp_path
):
    (tmp_path / "jobs.json").write_text(document(observer_instances=["Zoë 中"]))

    with command(
        "plan", variables={"PYTHONIOENCODING": "latin-1"}, stdout=subprocess.PIPE
    ) as process:
        answer, said = process.communicate()

    assert answer == b""
    assert said.decode() == (
        "error: the output is in latin-1, which lacks a character\n"
        "Set PYTHONIOENCODING=utf-8.\n"
    )
    assert process.returncode == 2


@pytest.mark.slow
def test_clients_that_hang_and_that_hang_up_keep_no_scrape_waiting(command, until):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()

    def asking(what):
        asking = socket.create_connection(address, timeout=20)
        asking.sendall(what)
        return asking

    def is_served():
        try:
            socket.create_connection(address).close()
        except OSError:
            return False
        return True

    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with command("metrics", "--listen", f"127.0.0.1:{address[1]}") as process:
        try:
            until(is_served)
            with closing(asking(b"GET /met")):
                for _ in range(3):
                    gone = asking(request)
                    gone.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    gone.close()
                with closing(asking(request)) as scrape:
                    assert scrape.recv(15) == b"HTTP/1.0 200 OK"
        finally:
            process.terminate()
        said = process.stderr.read()

    assert b"Traceback" not in said
    assert process.returncode == 0
