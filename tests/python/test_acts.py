from __future__ import annotations

import io
import json
import os
import signal
import sys
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import Jobs
from lenso_jobs.cli import _bulk, _redrive

BULK = ("redrive", "--queue", "email", "--since", "1h")
PURGE = ("purge", "--older-than", "0s")


@pytest.fixture
def small(monkeypatch):
    """Let redrive take two jobs a call, and a count that many as the most."""
    monkeypatch.setattr(_redrive, "_BATCH", 2)
    monkeypatch.setattr(_redrive, "_MOST", 4)
    monkeypatch.setattr(_bulk, "MOST", 2)


@pytest.fixture
def after_each(monkeypatch):
    """Do something after each call of a client's method."""

    def after_each(method, act):
        original = getattr(Jobs, method)

        def call(*arguments, **options):
            answer = original(*arguments, **options)
            act()
            return answer

        monkeypatch.setattr(Jobs, method, call)

    return after_each


@pytest.fixture
def person(monkeypatch):
    """Somebody who answers at a terminal."""

    def person(answer):
        keyboard = io.StringIO(f"{answer}\n")
        keyboard.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", keyboard)

    return person


@pytest.fixture
def acts(owner):
    """The operators' acts so far, but for set-up's, with how many jobs each took."""

    def acts():
        return owner.rows(
            "select act, job_count from operator_act where act <> 'configure'"
            " order by operator_act_id"
        )

    return acts


# Redriving.


def test_redrive_queues_one_job_again(lenso_jobs, fail, observing, prefix):
    (job,) = fail()

    code, out, err = lenso_jobs(
        *("redrive", job, "--yes", "--extra-attempts", "2"),
        *("--caller", f"{prefix}_duty"),
    )

    assert (code, out, err) == (0, f"queued job {job} again\n", "")
    assert observing.inspect(job).max_attempts == 3
    assert observing.inspect_acts(1)[0].operator == f"{prefix}_duty"


def test_redrive_of_one_job_answers_in_json(lenso_jobs, fail):
    (job,) = fail()

    answer = json.loads(lenso_jobs("redrive", job, "--yes", "--json")[1])

    assert (answer["job_id"], answer["status"]) == (str(job), "queued")


def test_a_dry_run_of_one_job_counts_it(lenso_jobs, fail, acts):
    (job,) = fail()

    code, out, _ = lenso_jobs("redrive", job, "--dry-run", "--json")

    assert code == 0
    assert out == '{"dry_run": true, "jobs": 1, "is_exact": true}\n'
    assert acts() == []


def test_redrive_of_a_job_that_has_not_failed_is_refused(lenso_jobs, enqueue, acts):
    job = enqueue()

    for option in ("--yes", "--dry-run"):
        code, out, err = lenso_jobs("redrive", job, option)

        assert (code, out) == (1, "")
        assert "the job has not failed (LJ007 invalid_argument)" in err
    assert acts() == []


def test_redrive_in_bulk_takes_call_after_call_until_none_is_left(
    lenso_jobs, small, fail, observing, acts
):
    fail("smtp.timeout", number=5)
    (other,) = fail("address.unknown")

    code, out, err = lenso_jobs(*BULK, "--code", "smtp.timeout", "--yes")

    assert (code, out, err) == (0, "queued again 5 jobs\n", "")
    assert [row.job_id for row in observing.inspect_failures()] == [other]
    assert acts() == [("redrive_failed", count) for count in (2, 2, 1, 0)]


def test_redrive_in_bulk_takes_a_job_that_fails_once_more_only_once(
    lenso_jobs, small, fail, working, after_each, observing
):
    calls = []

    def fail_again():
        calls.append(len(calls))
        assert len(calls) < 9, "it goes on and on"
        for lease in working.claim("email", 9):
            working.fail(lease, "smtp.timeout", retryable=False)

    jobs = fail(number=3)
    after_each("redrive_failed", fail_again)

    _, out, _ = lenso_jobs(*BULK, "--yes")

    assert out == "queued again 3 jobs\n"
    assert {observing.inspect(job).attempts for job in jobs} == {2}


def test_redrive_in_bulk_keeps_to_its_limit(lenso_jobs, small, fail, acts):
    fail(number=4)

    answer = lenso_jobs(*BULK, "--limit", "3", "--yes", "--json")

    assert json.loads(answer[1]) == {"jobs": 3, "interrupted": False}
    assert acts() == [("redrive_failed", 2), ("redrive_failed", 1)]


def test_a_dry_run_of_redrive_counts_honestly_and_changes_nothing(
    lenso_jobs, small, fail, acts, observing
):
    fail("smtp.timeout", number=3)
    fail("address.unknown", number=2)

    for options, words in (
        ((), "at least 4 jobs"),
        (("--limit", "3"), "3 jobs"),
        (("--code", "smtp.timeout"), "3 jobs"),
        (("--before", "1m"), "0 jobs"),
    ):
        code, out, _ = lenso_jobs(*BULK, *options, "--dry-run")
        assert (code, out) == (0, f"would queue again {words}; nothing was changed\n")
    assert json.loads(lenso_jobs(*BULK, "--dry-run", "--json")[1]) == {
        "dry_run": True,
        "jobs": 4,
        "is_exact": False,
    }
    assert acts() == []
    assert len(observing.inspect_failures()) == 5


def test_a_command_line_that_does_not_say_what_is_meant_exits_2(lenso_jobs):
    job = "01900000-0000-7000-8000-000000000000"
    for arguments in (
        ("redrive",),
        ("redrive", "--queue", "email"),
        ("redrive", job, "--queue", "email"),
        ("purge",),
        (*PURGE, "--retention"),
        ("purge", "--older-than", "2026-01-31T18:00:00Z"),
    ):
        code, out, err = lenso_jobs(*arguments, "--yes", url="")

        assert (code, out) == (2, ""), arguments
        assert "Error" in err


# Purging and retiring.


def test_purge_deletes_call_after_call_and_pauses_in_between(
    lenso_jobs, fail, acts, monkeypatch
):
    pauses = []
    monkeypatch.setattr(_bulk, "time", SimpleNamespace(sleep=pauses.append))
    fail(number=3)

    code, out, err = lenso_jobs(*PURGE, "--batch", "2", "--pause", "0.5", "--yes")

    assert (code, out, err) == (0, "deleted 3 jobs\n", "")
    assert acts() == [("purge", 2), ("purge", 1), ("purge", 0)]
    assert pauses == [0.5, 0.5]


def test_purge_leaves_alone_what_ended_since(lenso_jobs, fail):
    fail()

    assert lenso_jobs("purge", "--older-than", "1h", "--yes")[1] == "deleted 0 jobs\n"
    code, _, err = lenso_jobs("purge", "--before", "2999-01-01T00:00:00Z", "--yes")
    assert code == 1
    assert "(LJ007 invalid_argument)" in err


def test_purge_by_retention_ends_although_jobs_go_on_growing_old(
    lenso_jobs, configure, fail, owner, after_each, acts
):
    def grow_old(seconds=61):
        owner.execute(
            "update attempt set ended_at = ended_at - %(s)s, leased_at = leased_at"
            " - %(s)s where job_id = (select job_id from attempt where ended_at"
            " > clock_timestamp() - interval '60 s' limit 1)".replace(
                "%(s)s", f"interval '{seconds} s'"
            )
        )

    configure(retention_seconds=60)
    fail(number=5)
    grow_old()
    after_each("enforce_retention", grow_old)

    code, out, err = lenso_jobs(
        *("purge", "--retention", "--batch", "2", "--yes"), retention_seconds=60
    )

    assert (code, out, err) == (0, "deleted 1 job\n", "")
    assert acts() == [("purge", 1)]


def test_purge_by_retention_says_that_none_is_set(lenso_jobs, fail):
    fail()

    code, out, err = lenso_jobs("purge", "--retention", "--yes")

    assert (code, out) == (0, "deleted 0 jobs\n")
    assert err == "the document sets no retention_seconds\n"


def test_a_dry_run_of_purge_deletes_nothing(lenso_jobs, fail, acts, observing):
    (job,) = fail()

    assert lenso_jobs(*PURGE, "--dry-run") == (
        0,
        "would delete 1 job; nothing was changed\n",
        "",
    )
    assert observing.inspect(job).status == "failed"
    assert acts() == []


def test_a_dry_run_that_reaches_its_bound_says_at_least(lenso_jobs, small, fail):
    fail(number=3)

    assert lenso_jobs(*PURGE, "--batch", "2", "--dry-run") == (
        0,
        "would delete at least 2 jobs; nothing was changed\n",
        "",
    )


def test_retire_ends_jobs_whose_last_lease_ran_out(
    lenso_jobs, enqueue, working, expire, observing
):
    job = enqueue(max_attempts=1)
    working.claim("email")
    expire(job)

    tried = lenso_jobs("retire", "--dry-run")
    before = observing.inspect(job).status
    done = lenso_jobs("retire", "--yes")

    assert tried == (0, "would end 1 job; nothing was changed\n", "")
    assert (before, observing.inspect(job).status) == ("running", "failed")
    assert done == (0, "ended 1 job\n", "")


# Who is asked.


def test_without_a_terminal_and_yes_nothing_is_changed(lenso_jobs, fail, acts):
    (job,) = fail()

    for command in (BULK, PURGE, ("retire",), ("redrive", job)):
        code, out, err = lenso_jobs(*command)

        assert (code, out) == (2, "")
        assert "--yes" in err
    assert acts() == []


def test_a_person_is_asked_with_a_count_and_may_say_no(lenso_jobs, fail, person, acts):
    fail(number=2)

    for command, question in (
        (BULK, "Queue 2 jobs of email again?"),
        (PURGE, "Delete 2 jobs that ended before 20"),
        (("retire",), "End 0 jobs whose last lease ran out?"),
    ):
        person("n")
        code, out, err = lenso_jobs(*command)

        assert code == 1
        assert question in out + err
        assert "nothing was done" in err
    assert acts() == []


def test_ctrl_c_at_the_question_does_nothing_and_exits_130(
    lenso_jobs, fail, person, acts
):
    fail()

    def interrupted():
        raise KeyboardInterrupt

    for answer, exit_code in ((interrupted, 130), (str, 1)):
        person("")
        sys.stdin.readline = answer
        code, _, err = lenso_jobs(*BULK)

        assert code == exit_code
        assert err.splitlines()[-1] == "error: nothing was done"
    assert acts() == []


def test_ctrl_c_within_a_call_says_so(lenso_jobs, fail, monkeypatch, acts):
    fail()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Jobs, "redrive_failed", interrupted)
    code, _, err = lenso_jobs(*BULK, "--yes")

    assert code == 130
    assert err.splitlines() == [
        "queue again: 0 jobs until this:",
        "error: interrupted",
    ]
    assert acts() == []


def test_a_person_who_says_yes_has_it_done(lenso_jobs, fail, person, observing):
    (job,) = fail()
    person("y")

    code, out, err = lenso_jobs("redrive", job)

    assert (code, out.strip()) == (0, f"queued job {job} again")
    assert "which is failed after attempt 1 of 3?" in out + err
    assert observing.inspect(job).status == "queued"


def test_an_observer_may_not_act(lenso_jobs, fail):
    fail()

    code, out, err = lenso_jobs(*BULK, "--yes", "--caller", "operations")

    assert (code, out) == (1, "")
    assert "(42501 unauthorized)" in err
    assert "_operator" in err


# What cuts it short.


def test_an_interrupt_lets_the_call_end_and_says_how_many_were_done(
    lenso_jobs, small, fail, after_each, acts
):
    before = signal.getsignal(signal.SIGINT)
    fail(number=5)
    after_each("redrive_failed", lambda: os.kill(os.getpid(), signal.SIGINT))

    code, out, err = lenso_jobs(*BULK, "--yes")

    assert (code, out) == (130, "queued again 2 jobs\n")
    assert "interrupted; what was done stays" in err
    assert acts() == [("redrive_failed", 2)]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_ends_a_pause_at_once(lenso_jobs, fail, monkeypatch):
    def sleep(_):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(_bulk, "time", SimpleNamespace(sleep=sleep))
    fail(number=3)

    code, out, _ = lenso_jobs(*PURGE, "--batch", "2", "--pause", "9", "--yes", "--json")

    assert code == 130
    assert json.loads(out) == {"jobs": 2, "interrupted": True}


def test_a_lost_connection_says_how_many_were_done_before(
    lenso_jobs, small, fail, after_each, owner, acts
):
    def cut():
        owner.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where application_name = 'lenso-jobs' and datname = current_database()"
        )

    fail(number=5)
    after_each("redrive_failed", cut)

    code, out, err = lenso_jobs(*BULK, "--yes")

    assert (code, out) == (2, "")
    assert err.startswith("queue again: 2 jobs until this:\n")
    assert acts() == [("redrive_failed", 2)]


@pytest.mark.parametrize("pooler", [1], indirect=True)
def test_acts_work_behind_a_pooler(lenso_jobs, pooler, fail, prefix):
    fail(number=2)
    url = make_conninfo(**pooler, user="postgres")
    duty = ("--caller", f"{prefix}_duty")

    tried = lenso_jobs(*BULK, *duty, "--dry-run", url=url)
    done = lenso_jobs(*BULK, *duty, "--yes", url=url)

    assert tried[1] == "would queue again 2 jobs; nothing was changed\n"
    assert done == (0, "queued again 2 jobs\n", "")
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as next_one:
        role = next_one.execute("select current_setting('role')").fetchone()
    assert role == ("none",)
