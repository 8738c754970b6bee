from __future__ import annotations

import io
import json
import os
import signal
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import Jobs
from lenso_jobs.cli import _acts

BULK = ("redrive", "--queue", "email", "--since", "1h")
PURGE = ("purge", "--older-than", "0s")


@pytest.fixture
def small(monkeypatch):
    """Let redrive take two jobs a call, and a count four at most."""
    monkeypatch.setattr(_acts, "_REDRIVE_BATCH", 2)
    monkeypatch.setattr(_acts, "_COUNTED", 4)
    monkeypatch.setattr(_acts, "_MANY", 4)


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
    """Type an answer at a terminal."""

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


def test_redrive_of_one_job_prints_json(lenso_jobs, fail):
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
    lenso_jobs, small, fail, observing, acts, monkeypatch
):
    monkeypatch.setattr(_acts, "_MANY", 9)
    fail("smtp.timeout", number=5)
    (other,) = fail("address.unknown")

    code, out, err = lenso_jobs(*BULK, "--code", "smtp.timeout", "--yes")

    assert (code, out, err) == (0, "queued again 5 jobs\n", "")
    assert [row.job_id for row in observing.inspect_failures()] == [other]
    assert acts() == [("redrive_failed", count) for count in (2, 2, 1)]


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


def test_redrive_over_seconds_spreads_when_the_jobs_fall_due(
    lenso_jobs, small, fail, owner, monkeypatch
):
    monkeypatch.setattr(_acts, "_REDRIVE_BATCH", 4)
    jobs = fail(number=6)

    code, out, err = lenso_jobs(*BULK, "--over", "400", "--yes")

    assert (code, out, err) == (0, "queued again 6 jobs\n", "")
    due = owner.rows(
        "select job_id, round(date_part('epoch', available_at - clock_timestamp()) / 10)"
        " from live_job order by available_at"
    )
    # Each call spreads its own jobs: four, and then two.
    assert sorted(tens * 10 for _, tens in due) == [0, 0, 100, 200, 200, 300]
    assert {job for job, _ in due} == set(jobs)
    assert owner.rows(
        "select distinct arguments ->> 'over_seconds' from operator_act"
        " where act = 'redrive_failed'"
    ) == [("400",)]


@pytest.mark.parametrize("seconds", ["86401", "-1", "1.5", "1h"])
def test_redrive_over_a_malformed_time_names_the_limit(lenso_jobs, fail, acts, seconds):
    fail()

    code, out, err = lenso_jobs(*BULK, "--over", seconds, "--yes")

    assert (code, out) == (2, "")
    told = " ".join(err.replace("│", " ").split())
    assert (
        f"'--over': {seconds} is not a whole number of seconds from 0 to 86400" in told
    )
    assert acts() == []


def test_the_question_about_a_redrive_says_over_how_many_seconds(
    lenso_jobs, fail, person
):
    fail()
    person("n")

    _, _, err = lenso_jobs(*BULK, "--over", "3600")

    assert "Queue 1 job of email again, over 3,600 s?" in err


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
        ("redrive", job, "--over", "60"),
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
    monkeypatch.setattr(_acts, "time", SimpleNamespace(sleep=pauses.append))
    fail(number=3)

    code, out, err = lenso_jobs(*PURGE, "--batch", "2", "--pause", "0.5", "--yes")

    assert (code, out, err) == (0, "deleted 3 jobs\n", "")
    assert acts() == [("purge", 2), ("purge", 1)]
    assert pauses == [0.5, 0.5]


def test_purge_keeps_jobs_that_ended_since(lenso_jobs, fail):
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


def test_purge_by_retention_without_a_retention_is_refused(lenso_jobs, fail):
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
    fail(number=5)

    assert lenso_jobs(*PURGE, "--dry-run") == (
        0,
        "would delete at least 4 jobs; nothing was changed\n",
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


# The question.


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
        (("retire",), "End 0 jobs whose last lease has expired?"),
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
    assert err == "error: interrupted\n"
    assert acts() == []


def test_an_act_is_done_after_the_answer_yes(lenso_jobs, fail, person, observing):
    (job,) = fail()
    person("y")

    code, out, err = lenso_jobs("redrive", job)

    assert (code, out.strip()) == (0, f"queued job {job} again")
    assert "which is failed after attempt 1 of 3?" in out + err
    assert observing.inspect(job).status == "queued"


EVERY_ACT = (
    BULK,
    ("redrive", "01900000-0000-7000-8000-000000000000"),
    PURGE,
    ("purge", "--retention"),
    ("retire",),
)


@pytest.mark.parametrize("option", ["--yes", "--dry-run", None])
def test_a_caller_without_the_right_is_refused_before_any_output_or_question(
    lenso_jobs, fail, acts, person, option
):
    fail()

    for act in EVERY_ACT:
        person("y")
        options = (option,) if option else ()
        code, out, err = lenso_jobs(*act, *options, "--caller", "operations")

        assert (code, out) == (1, ""), act
        assert err.startswith("error: permission denied for function "), act
        assert "(42501 unauthorized)" in err
        assert "_operator may change jobs" in err
    assert acts() == []


@pytest.mark.parametrize("option", ["--dry-run", None])
def test_what_would_be_tried_and_rolled_back_is_refused_at_the_router_of_a_fleet(
    lenso_jobs, fail, acts, person, owner, option
):
    # There a call commits by itself.
    owner.execute(
        "create function _shards() returns integer[] language sql as 'select array[0]'"
    )
    (job,) = fail()

    for act in (PURGE, ("purge", "--retention"), ("retire",), ("erase", job)):
        person("y")
        options = (option,) if option else ()
        code, out, err = lenso_jobs(*act, *options)

        assert (code, out) == (1, ""), act
        assert "this is the router of a fleet, and cannot take back what" in err
        assert "To act at the router, pass --yes." in " ".join(err.split())
    assert lenso_jobs("redrive", job, "--dry-run")[0] == 1
    assert acts() == []
    assert lenso_jobs("erase", job, "--yes") == (0, f"erased job {job}\n", "")


# The text above the question.


def said(output):
    return " ".join((output[1] + output[2]).split())


def test_a_purge_is_asked_about_with_its_share_and_what_goes_with_it(
    lenso_jobs, fail, person, owner, acts
):
    fail(number=3)
    owner.execute(
        "update attempt set ended_at = ended_at - interval '1 h', leased_at = leased_at"
        " - interval '1 h' where job_id = (select job_id from attempt limit 1)"
    )
    person("n")

    some = said(lenso_jobs("purge", "--older-than", "30m"))
    person("n")
    all_of_them = said(lenso_jobs(*PURGE, retention_seconds=30 * 86_400))
    person("n")
    old = said(lenso_jobs("purge", "--older-than", "31d", retention_seconds=86_400))

    assert "That is 33% of 3 ended jobs." in some
    assert "Their evidence and idempotency keys go, too" in some
    assert "retention_seconds" not in some
    assert "Delete 1 job that ended before 20" in some
    assert "That is 100% of 3 ended jobs." in all_of_them
    assert (
        "The document keeps ended jobs for 30d 0h (retention_seconds)." in all_of_them
    )
    assert all_of_them.index("30d 0h") < all_of_them.index("[y/N]")
    assert "retention_seconds" not in old
    assert acts() == []


def test_the_question_for_a_large_purge_estimates_how_many_jobs_have_ended(
    lenso_jobs, small, fail, person, owner
):
    fail(number=9)
    owner.execute("analyze job, live_job")
    person("n")

    large = said(lenso_jobs(*PURGE))

    assert "The Instance has about 9 ended jobs." in large
    assert "Delete at least 4 jobs that ended before" in large


def test_a_large_redrive_warns_that_it_comes_before_later_jobs(lenso_jobs, small, fail):
    fail(number=2)
    few = lenso_jobs(*BULK, "--yes")
    fail(number=5)
    many = lenso_jobs(*BULK, "--yes")

    fail(number=5)
    spread = lenso_jobs(*BULK, "--over", "60", "--yes")

    assert few == (0, "queued again 2 jobs\n", "")
    assert spread == (0, "queued again 5 jobs\n", "")
    assert many[:2] == (0, "queued again 5 jobs\n")
    assert "run before jobs that are enqueued later" in many[2]
    assert "--over SECONDS or --pause SECONDS" in many[2]


def test_a_redrive_pauses_between_its_calls(lenso_jobs, small, fail, monkeypatch, acts):
    pauses = []
    monkeypatch.setattr(_acts, "time", SimpleNamespace(sleep=pauses.append))
    fail(number=3)

    code, out, _ = lenso_jobs(*BULK, "--pause", "0.5", "--yes")

    assert (code, out) == (0, "queued again 3 jobs\n")
    assert acts() == [("redrive_failed", count) for count in (2, 1)]
    assert pauses == [0.5, 0.5]


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

    monkeypatch.setattr(_acts, "time", SimpleNamespace(sleep=sleep))
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

    fail(number=3)
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


def test_redrive_and_failures_keep_to_a_kind(
    lenso_jobs, enqueue, working, owner, observing
):
    for kind in ("send", "call", "send"):
        enqueue(kind=kind)
        (lease,) = working.claim("email")
        working.fail(lease, "smtp.timeout", retryable=False)

    _, machine, _ = lenso_jobs("failures", "--kind", "call", "--json")
    code, out, _ = lenso_jobs(*BULK, "--kind", "send", "--yes")

    assert [row["kind"] for row in json.loads(machine)["failures"]] == ["call"]
    assert (code, out) == (0, "queued again 2 jobs\n")
    assert [job.kind for job in observing.inspect_failures()] == ["call"]


# Pausing and erasing.


def test_pause_and_resume_say_what_they_did(lenso_jobs, operating, prefix):
    said = [
        lenso_jobs(*words, "--caller", f"{prefix}_duty")
        for words in (
            ("pause", "email"),
            ("pause", "email", "--json"),
            ("resume", "email"),
            ("resume", "email"),
        )
    ]

    assert [(code, out) for code, out, _ in said] == [
        (0, "paused email\n"),
        (0, '{"queue": "email", "changed": false}\n'),
        (0, "resumed email\n"),
        (0, "email: nothing to do\n"),
    ]
    assert operating.inspect_acts(2)[0].act == "resume"
    code, _, err = lenso_jobs("pause", "emial")
    assert code == 1
    assert "LJ003 invalid_queue" in err


def test_erase_deletes_an_ended_job_after_a_yes(
    lenso_jobs, person, leased, working, acts
):
    refused = lenso_jobs("erase", leased.job_id, "--yes")
    working.complete(leased)
    unasked = lenso_jobs("erase", leased.job_id)
    tried = lenso_jobs("erase", leased.job_id, "--dry-run")
    person("n")
    declined = lenso_jobs("erase", leased.job_id)
    assert acts() == []
    person("y")
    erased = lenso_jobs("erase", leased.job_id)

    assert (refused[0], "has not ended" in refused[2]) == (1, True)
    assert unasked[0] == 2
    assert tried[:2] == (0, "would erase 1 job; nothing was changed\n")
    assert declined[0] == 1
    assert "its payload, its evidence and its key?" in declined[2]
    assert (erased[0], erased[1].strip()) == (0, f"erased job {leased.job_id}")
    assert acts() == [("erase", 1)]
    assert lenso_jobs("erase", leased.job_id, "--yes")[0] == 1


# Enqueueing.


def test_enqueue_enqueues_once_for_a_key(lenso_jobs, monkeypatch, observing):
    words = ("enqueue", "email", "send", '{"to": "ada"}', "--key", "welcome:1")

    first = lenso_jobs(*words, "--caller", "accounts")
    (job,) = observing.inspect_jobs("email", "queued")
    again = lenso_jobs(*words, "--caller", "accounts", "--json")
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"to": "bob"}'))
    words = (*words[:3], "-", *words[4:])
    other = lenso_jobs(*words, "--caller", "accounts")

    assert first == (0, f"enqueued job {job.job_id}\n", "")
    assert json.loads(again[1]) == {"job_id": str(job.job_id), "created": False}
    assert other[0] == 1
    assert f"Job {job.job_id} has the key" in other[2]
    assert "bob" not in other[2]


def test_enqueue_at_a_time_makes_a_job_that_falls_due_then(lenso_jobs, observing):
    words = ("enqueue", "email", "send", "{}", "--key", "k", "--caller", "accounts")

    made = lenso_jobs(*words, "--at", "2100-01-31T18:00:00+02:00")
    age = lenso_jobs(*words, "--at", "30m")

    (job,) = observing.inspect_jobs("email", "queued")
    assert made[0] == 0
    assert job.available_at == datetime(2100, 1, 31, 16, tzinfo=UTC)
    assert age[0] == 2
    assert "--at" in age[2]
    assert "30m is no time with an offset" in " ".join(age[2].split())


@pytest.mark.parametrize("payload", ["{", "[]", "1", "", "s3cr3t"])
def test_enqueue_refuses_a_payload_that_is_no_object_without_showing_it(
    lenso_jobs, payload
):
    code, out, err = lenso_jobs("enqueue", "email", "send", payload, "--key", "k")

    assert (code, out) == (2, "")
    assert "PAYLOAD must be a JSON object" in " ".join(err.replace("│", " ").split())
    assert "s3cr3t" not in err


def test_enqueue_as_another_role_names_the_producers(lenso_jobs):
    code, _, err = lenso_jobs(
        *("enqueue", "email", "send", "{}", "--key", "k", "--caller", "operations")
    )

    assert code == 1
    assert "producer_instances" in err
