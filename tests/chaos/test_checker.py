"""The checker finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

from copy import deepcopy
from datetime import UTC, datetime, timedelta

import pytest

from checker import CHECKS, Evidence, findings


def at(seconds):
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


def told(what, job, attempt, **more):
    return {
        "what": what,
        "job_id": job,
        "attempt": attempt,
        "lease": f"{job}{attempt}",
        **more,
    }


def lease(job, attempt, since):
    return {
        "job_id": job,
        "attempt": attempt,
        "lease": f"{job}{attempt}",
        "leased_at": at(since),
        "lease_expires_at": at(since + 2),
    }


def ended(job, attempt, since, until, outcome, code=None, retry_at=None):
    return {
        "job_id": job,
        "attempt": attempt,
        "max_attempts": 3,
        "lease": f"{job}{attempt}",
        "leased_at": at(since),
        "ended_at": at(until),
        "outcome": outcome,
        "failure_code": code,
        "retry_at": retry_at and at(retry_at),
    }


@pytest.fixture
def evidence():
    """What a small storm leaves where all is well: a job of each fate.

    ``a`` was retried, has lapsed, and was completed with its effect; ``b`` has failed and
    was purged; ``c`` is running its first attempt.
    """
    items = [
        {"key": f"k{job}", "job_id": job, "outcome": "created"} for job in ("a", "b")
    ]
    return Evidence(
        journal=[
            {"what": "intends", "keys": ["ka", "kb", "kc"]},
            {"what": "acknowledged", "items": items},
            {"what": "acknowledged", "items": [{**items[0], "outcome": "existing"}]},
            told("claimed", "a", 1, until=at(2).isoformat()),
            told(
                "answered",
                "a",
                1,
                call="fail",
                answer="queued",
                code="again",
                available_at=at(2).isoformat(),
            ),
            told("claimed", "a", 2, until=at(4).isoformat()),
            told("answered", "a", 2, call="complete", answer="invalid_lease"),
            told("claimed", "a", 3, until=at(7).isoformat()),
            told("renewed", "a", 3, until=at(8).isoformat()),
            told("answered", "a", 3, call="complete", answer="completed"),
            told("answered", "b", 1, call="fail", answer="failed", code="never"),
            told("claimed", "c", 1, until=at(9).isoformat()),
            {"what": "acted", "act": "purge", "answer": 1},
            {"what": "exited", "name": "w", "code": 0, "is_killed": False, "said": ""},
        ],
        jobs=[
            {
                "job_id": job,
                "producer": "accounts",
                "idempotency_key": f"k{job}",
                "max_attempts": 3,
                "is_purged": job == "b",
                "fate": fate,
            }
            for job, fate in (("a", "effect"), ("b", "fail"), ("c", "complete"))
        ],
        live=[{"job_id": "c", "attempt": 1, "max_attempts": 3, "lease": "c1"}],
        attempts=[
            ended("a", 1, 0, 1, "retried", "again", retry_at=2),
            ended("a", 2, 2, 5, "lease_expired"),
            ended("a", 3, 5, 7.5, "succeeded"),
            ended("b", 1, 0, 1, "failed", "never"),
        ],
        leases=[
            lease("a", 1, 0),
            lease("a", 2, 2),
            lease("a", 3, 5),
            {**lease("a", 3, 5), "lease_expires_at": at(8)},
            lease("b", 1, 0),
            lease("c", 1, 7),
        ],
        effects=[{"job_id": "a", "lease": "a3"}],
        acts=[{"act": "purge", "job_count": 1, "before": at(3)}],
    )


@pytest.fixture
def found(evidence):
    """The names of the checks that find something, once the evidence was doctored."""
    expected = findings(evidence)

    def found(doctor):
        doctored = deepcopy(evidence)
        doctor(doctored)
        return set(findings(doctored)) - set(expected)

    return found


def entry(evidence, what, number=0):
    return evidence.noted(what)[number]


def test_a_storm_that_broke_nothing_is_found_sound(evidence):
    evidence.live.clear()
    evidence.jobs.pop()
    evidence.leases.pop()
    evidence.journal.remove(entry(evidence, "claimed", -1))

    assert findings(evidence) == {}


def test_every_check_has_a_test_that_sees_it_fail(request):
    module = request.path.read_text(encoding="utf-8")

    assert [c.__name__ for c in CHECKS if f'"{c.__name__}"' not in module] == []


def test_a_job_that_was_acknowledged_and_is_gone_is_found(found):
    def doctor(evidence):
        items = entry(evidence, "acknowledged")["items"]
        items.append({"key": "kc", "job_id": "d", "outcome": "created"})

    assert found(doctor) == {"no_acknowledged_job_is_lost"}


def test_a_key_of_two_jobs_is_found(found):
    def doctor(evidence):
        twin = {**evidence.jobs[0], "job_id": "c", "fate": "complete"}
        evidence.jobs[2] = twin

    assert found(doctor) == {"every_key_is_one_job"}


def test_a_key_with_two_jobs_in_its_replies_is_found(found):
    def doctor(evidence):
        entry(evidence, "acknowledged", 1)["items"][0]["job_id"] = "b"

    assert found(doctor) == {"every_key_is_one_job"}


def test_a_conflict_where_intents_are_equal_is_found(found):
    def doctor(evidence):
        entry(evidence, "acknowledged", 1)["items"][0] |= {
            "job_id": None,
            "outcome": "conflict",
        }

    assert found(doctor) == {"every_key_is_one_job"}


def test_a_job_without_a_request_is_found(found):
    assert found(lambda e: entry(e, "intends")["keys"].remove("kc")) == {
        "every_job_was_asked_for"
    }


@pytest.mark.parametrize(
    "act", [{"job_count": 2}, {"job_count": 0}, {"before": at(0.5)}]
)
def test_a_purge_that_the_audit_does_not_account_for_is_found(found, act):
    assert found(lambda e: e.acts[0].update(act)) == {"every_purge_is_in_the_audit"}


def test_two_replies_to_completions_of_two_leases_are_found(found):
    def doctor(evidence):
        entry(evidence, "answered", 1)["answer"] = "completed"

    assert found(doctor) == {
        "no_job_is_completed_twice",
        "answers_are_what_the_tables_say",
    }


def test_two_rows_of_success_are_found(found):
    def doctor(evidence):
        evidence.attempts[0] |= {"outcome": "succeeded", "failure_code": None}
        evidence.journal.remove(entry(evidence, "answered"))
        evidence.effects.append({"job_id": "a", "lease": "a1"})

    assert found(doctor) == {"no_job_is_completed_twice"}


def test_a_completion_after_the_end_of_its_lease_is_found(found):
    def doctor(evidence):
        evidence.attempts[2]["ended_at"] = at(9)

    assert found(doctor) == {"no_dead_lease_ends_anything"}


def test_a_live_lease_that_was_taken_for_lapsed_is_found(found):
    def doctor(evidence):
        evidence.leases[1]["lease_expires_at"] = at(5.5)

    assert found(doctor) == {
        "no_dead_lease_ends_anything",
        "no_two_leases_of_a_job_are_live_at_once",
    }


def test_an_end_under_a_lease_that_was_never_given_is_found(found):
    def doctor(evidence):
        evidence.attempts[3]["lease"] = "b7"
        evidence.journal.remove(entry(evidence, "answered", 3))

    assert found(doctor) == {"no_dead_lease_ends_anything"}


def test_attempts_that_overlap_are_found(found):
    def doctor(evidence):
        evidence.attempts[2]["leased_at"] = at(4.9)

    assert found(doctor) == {"no_two_leases_of_a_job_are_live_at_once"}


def test_a_fencing_token_that_was_given_twice_is_found(found):
    def doctor(evidence):
        for row in evidence.leases[2:4]:
            row["attempt"] = 2
        for number, what in ((2, "claimed"), (0, "renewed")):
            entry(evidence, what, number)["attempt"] = 2

    assert found(doctor) == {"fencing_tokens_grow"}


def test_an_attempt_above_the_limit_is_found(found):
    def doctor(evidence):
        evidence.jobs[0]["max_attempts"] = 2

    assert found(doctor) == {"attempts_stay_within_their_limit"}


def test_an_attempt_above_what_a_redrive_granted_is_found(found):
    def doctor(evidence):
        evidence.attempts[2]["max_attempts"] = 5
        evidence.acts.append({"act": "redrive", "job_id": "a", "extra_attempts": 1})

    assert found(doctor) == {"attempts_stay_within_their_limit"}


def test_an_attempt_that_left_no_evidence_is_found(found):
    def doctor(evidence):
        evidence.attempts.pop(1)
        evidence.journal.remove(entry(evidence, "answered", 1))

    assert found(doctor) == {"every_end_has_its_evidence"}


def test_an_end_that_left_no_evidence_is_found(found):
    assert found(lambda e: e.live.clear()) == {"every_end_has_its_evidence"}


def test_an_ended_job_whose_last_attempt_was_not_the_last_is_found(found):
    def doctor(evidence):
        evidence.attempts.pop(2)
        evidence.journal.remove(entry(evidence, "answered", 2))
        evidence.effects.clear()

    assert found(doctor) == {"every_end_has_its_evidence"}


def test_a_job_that_has_succeeded_and_is_alive_is_found(found):
    def doctor(evidence):
        evidence.live.append(
            {"job_id": "a", "attempt": 3, "max_attempts": 3, "lease": None}
        )

    assert found(doctor) == {"no_ended_job_is_alive"}


def test_a_live_row_without_its_job_is_found(found):
    assert found(lambda e: e.jobs.pop()) == {"no_ended_job_is_alive"}


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (0, {"answer": "failed"}),
        (0, {"code": "other"}),
        (0, {"available_at": at(3).isoformat()}),
        (2, {"answer": "invalid_lease"}),
        (2, {"answer": "23505"}),
        (0, {"answer": "invalid_lease"}),
    ],
)
def test_a_reply_that_the_tables_contradict_is_found(found, number, fields):
    assert found(lambda e: entry(e, "answered", number).update(fields)) == {
        "answers_are_what_the_tables_say"
    }


def test_a_repetition_that_came_after_the_purge_is_sound(found):
    def doctor(evidence):
        evidence.journal.append(
            told("answered", "b", 1, call="fail", answer="invalid_lease", code="never")
        )

    assert found(doctor) == set()


@pytest.mark.parametrize(
    "fields", [{"until": at(8.1).isoformat()}, {"lease": "a9"}, {"attempt": 2}]
)
def test_a_lease_that_differs_from_its_reply_is_found(found, fields):
    assert found(lambda e: entry(e, "renewed").update(fields)) == {
        "leases_are_what_workers_were_told"
    }


@pytest.mark.parametrize(
    "effects",
    [
        [],
        [{"job_id": "a", "lease": "a3"}] * 2,
        [{"job_id": "a", "lease": "a3"}, {"job_id": "a", "lease": "a2"}],
    ],
)
def test_an_effect_without_its_completion_or_the_reverse_is_found(found, effects):
    def doctor(evidence):
        evidence.effects[:] = effects

    assert found(doctor) == {"effects_are_those_of_completions"}


def test_a_job_that_does_not_end_is_found(evidence):
    assert set(findings(evidence)) == {"every_job_has_ended"}


def test_a_process_that_died_by_itself_is_found(found):
    assert found(lambda e: entry(e, "exited").update(code=1)) == {
        "every_process_ends_when_told"
    }
