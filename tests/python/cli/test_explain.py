from __future__ import annotations

import inspect
import json
import re
from uuid import uuid4

import pytest

from lenso_jobs._prepare import SCHEMA_VERSION
from lenso_jobs.cli._app import app

# Why a job is not being claimed.


def test_explain_says_the_reason_its_facts_and_what_to_do(lenso_jobs, leased):
    code, out, err = lenso_jobs("explain", leased.job_id)

    assert (code, err) == (0, "")
    first, meaning, facts, remedy = out.splitlines()
    assert first == f"Job {leased.job_id} in queue email: leased"
    assert meaning == "A worker holds the lease of the job."
    assert facts.startswith("Leased 20")
    end = f"{leased.lease_expires_at:%Y-%m-%d %H:%M:%SZ}"
    assert re.search(rf"\(\ds ago\), until {end} \(in 2", facts)
    assert facts.endswith(", to email-worker, attempt 1 of 3.")
    assert remedy.startswith("What to do: Wait for the worker.")


def test_explain_counts_what_comes_before_a_job_that_is_due(
    lenso_jobs, enqueue, worker
):
    enqueue()
    job = enqueue()

    _, out, _ = lenso_jobs("explain", job)

    assert out.splitlines()[0].endswith(": ready")
    assert out.splitlines()[2].endswith(", 1 job before it.")


def test_explain_of_a_job_that_is_not_there_says_so(lenso_jobs):
    code, out, _ = lenso_jobs("explain", uuid4())

    assert code == 0
    assert out.splitlines()[0].endswith(": purged_or_unknown")


def test_explain_returns_a_reason_in_a_damaged_instance(lenso_jobs, enqueue, owner):
    job = enqueue()
    owner.execute("drop function complete_many(uuid[], text[])")

    code, out, _ = lenso_jobs("explain", job)

    assert code == 0
    assert out.splitlines()[0].endswith(": instance_damaged")
    assert "what is wrong: " in out
    assert "complete_many" in out


def test_explain_prints_json(lenso_jobs, fail):
    (job,) = fail("smtp.timeout")

    _, out, _ = lenso_jobs("explain", job, "--json", "--caller", "operations")

    answer = json.loads(out)
    assert (answer["job_id"], answer["reason"]) == (str(job), "failed")
    assert (answer["failure_code"], answer["who"]) == ("smtp.timeout", "email-worker")
    assert answer["since"].endswith("+00:00")


def test_a_value_that_is_not_a_uuid_exits_2(lenso_jobs):
    for command in ("explain", "inspect", "redrive"):
        code, out, err = lenso_jobs(command, "no-uuid", url="")

        assert (code, out) == (2, "")
        assert "valid UUID" in " ".join(err.replace("│", "").split())


# The history of a job.


def test_inspect_shows_the_history_of_attempts(lenso_jobs, working, enqueue, make_due):
    job = enqueue()
    working.fail(*working.claim("email"), "smtp.timeout", retryable=True)
    make_due(job)
    working.claim("email")

    _, out, _ = lenso_jobs("inspect", job)
    _, machine, _ = lenso_jobs("inspect", job, "--json")

    _, history = out.split("\n\n")
    header, first, second = (line.split() for line in history.splitlines())
    assert header[:4] == ["attempt", "outcome", "failure", "code"]
    assert first[:4] == ["1", "retried", "smtp.timeout", "email-worker"]
    assert second[:4] == ["2", "running", "-", "email-worker"]
    history = json.loads(machine)["history"]
    assert [each["outcome"] for each in history] == ["retried", "running"]


def test_inspect_by_a_producer_goes_without_the_history(lenso_jobs, leased):
    code, out, err = lenso_jobs("inspect", leased.job_id, "--caller", "accounts")
    _, machine, _ = lenso_jobs(
        "inspect", leased.job_id, "--caller", "accounts", "--json"
    )

    assert (code, err) == (0, "")
    assert "running" in out
    assert "outcome" not in out
    assert json.loads(machine)["history"] is None


# Failures.


def test_failures_lists_them_newest_first(lenso_jobs, fail):
    (first,) = fail("smtp.timeout")
    (second,) = fail("address.unknown")

    code, out, err = lenso_jobs("failures", "email", "--since", "1h")
    _, one, aside = lenso_jobs("failures", "--limit", "1")
    _, machine, _ = lenso_jobs("failures", "--json", "--code", "smtp.timeout")

    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [
        [str(second), "address.unknown"],
        [str(first), "smtp.timeout"],
    ]
    assert [line.split()[0] for line in one.splitlines()[1:]] == [str(second)]
    assert aside == "the newest 1; more with --limit\n"
    (found,) = json.loads(machine)["failures"]
    assert (found["job_id"], found["attempts"]) == (str(first), 1)


def test_no_failures_is_said_in_words(lenso_jobs, fail):
    fail()

    assert lenso_jobs("failures", "slow") == (0, "no job has failed\n", "")
    assert lenso_jobs("failures", "--before", "1h")[1] == "no job has failed\n"


@pytest.mark.parametrize(
    ("queue", "hint"),
    [
        ("emial", "Did you mean email?"),
        ("none", "Queues of the document are email, slow."),
    ],
)
def test_a_queue_that_is_not_declared_is_refused_with_those_that_are(
    lenso_jobs, queue, hint
):
    options = {
        "failures": (),
        "jobs": ("--status=queued",),
        "pause": (),
        "resume": (),
        "redrive": ("--since=1h", "--dry-run", "--queue"),
    }
    # Other tests cover the other two.
    takes_one = {
        each.callback.__name__
        for each in app.registered_commands
        if "queue" in inspect.signature(each.callback).parameters
    }
    assert takes_one == {*options, "enqueue", "work"}

    for command, more in options.items():
        assert lenso_jobs(command, *more, queue) == (
            1,
            "",
            f"error: queue {queue} is not declared (LJ003 invalid_queue)\n{hint}\n",
        )


def test_a_time_that_names_no_instant_exits_2(lenso_jobs):
    for time in ("2026-01-31T18:00:00", "yesterday", "9999999w"):
        code, out, err = lenso_jobs("failures", f"--since={time}")

        assert (code, out) == (2, ""), time
        assert "Error" in err


# What is wrong.


def test_health_that_finds_nothing_exits_0(lenso_jobs):
    assert lenso_jobs("health") == (0, "nothing is wrong with jobs_email\n", "")
    answer = json.loads(lenso_jobs("health", "--json")[1])
    assert answer == {"healthy": True, "findings": []}


def test_health_that_finds_a_warning_or_worse_exits_1(lenso_jobs, owner):
    owner.execute("alter table live_job set (autovacuum_enabled = off)")

    code, out, err = lenso_jobs("health", "--caller", "operations")
    machine = lenso_jobs("health", "--json")

    assert (code, err) == (1, "")
    first, second = out.splitlines()
    assert first == ("  CRITICAL  autovacuum_off  live_job: has autovacuum_enabled off")
    assert second.startswith("            → alter table ")
    assert machine[0] == 1
    assert json.loads(machine[1])["healthy"] is False


def test_health_that_finds_notices_only_exits_0(lenso_jobs, owner, configure, fail):
    configure(retention_seconds=60)
    fail()
    owner.execute(
        "update attempt set ended_at = ended_at - interval '3 h',"
        " leased_at = leased_at - interval '3 h'"
    )

    code, out, _ = lenso_jobs("health")

    assert code == 0
    assert out.startswith("  NOTICE    retention_overdue  ")


@pytest.mark.parametrize(
    ("version", "finding", "remedy"),
    [
        (
            SCHEMA_VERSION - 1,
            "schema_older",
            "Run lenso-jobs upgrade with the document",
        ),
        (SCHEMA_VERSION + 1, "schema_newer", "Install the release"),
    ],
)
def test_health_finds_a_schema_of_another_release(
    version, finding, remedy, lenso_jobs, owner
):
    owner.execute(
        f"create or replace view installed_version (version, oldest_client)"
        f" as values ({version}, {version})"
    )
    if version < SCHEMA_VERSION:
        owner.execute("drop function inspect_health()")

    code, out, _ = lenso_jobs("health")
    _, machine, _ = lenso_jobs("health", "--json")

    assert code == 1
    assert f"{finding}  schema jobs_email: is at version {version}, " in out
    assert f"→ {remedy}" in out
    (first, *_) = json.loads(machine)["findings"]
    assert (first["finding"], first["severity"]) == (finding, "critical")


def test_health_and_stats_of_an_instance_without_its_functions_say_what_mends_it(
    lenso_jobs, owner
):
    owner.execute("drop function inspect_health(), inspect_queues()")

    health = lenso_jobs("health")
    stats = lenso_jobs("stats")

    assert health[0] == 1
    assert "object_changed" in health[1]
    assert "lenso-jobs check" in health[1]
    assert (stats[0], stats[1]) == (1, "")
    assert "inspect_queues() does not exist; the schema is at" in stats[2]
    assert "(LJ008 schema_not_ready)" in stats[2]


@pytest.mark.parametrize(
    "command", ["health", "explain", "stats", "failures", "metrics"]
)
def test_an_owner_that_lost_its_table_is_reported_and_no_role_is_blamed(
    lenso_jobs, enqueue, owner, command
):
    arguments = (enqueue(),) if command == "explain" else ()
    owner.execute("alter table live_job owner to current_user")

    code, out, err = lenso_jobs(command, *arguments)

    assert code == (0 if command == "explain" else 1)
    assert "table live_job" in out + err
    assert "lost" in out + err
    assert "lenso-jobs check" in out + err
    assert "observer_instances" not in out + err


def test_health_without_an_instance_exits_1_with_a_hint(lenso_jobs, new_database):
    code, _, err = lenso_jobs("health", url=new_database())

    assert code == 1
    assert "lenso-jobs setup" in err
