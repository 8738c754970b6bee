"""Arguments made to cost much are refused at little cost, and hold up nobody."""

from __future__ import annotations

import pytest

LONG = "repeat('x', 2000000)"
IDS = "(select array_agg(gen_random_uuid()) from generate_series(1, 100000))"
MANY = "array_fill('x'::text, array[200000])"


@pytest.mark.slow
def test_huge_arguments_are_refused_in_time(producer, worker, operator, enqueue, claim):
    job_id = enqueue()
    calls = {
        producer: {
            f"enqueue({LONG}, 'send', '{{}}', 'k')": "LJ001",
            f"enqueue('email', {LONG}, '{{}}', 'k')": "LJ001",
            f"enqueue('email', 'send', '{{}}', {LONG})": "LJ001",
            f"enqueue('email', 'send', jsonb_build_object('k', {LONG}), 'k')": "LJ001",
            "enqueue('email', 'send', jsonb_build_object('k',"
            " array_fill(1e130000, array[100])), 'k')": "LJ001",
            "enqueue('email', 'send',"
            " (repeat('{\"a\":', 5000) || '1' || repeat('}', 5000))::jsonb, 'k')": "LJ001",
            "enqueue_many(to_jsonb(array_fill(1, array[100000])))": "LJ007",
            f"enqueue_many(to_jsonb({LONG}))": "LJ001",
        },
        worker: {
            "claim('email', 2147483647)": "LJ007",
            f"claim({LONG})": "LJ003",
            f"next_available_at({LONG})": "LJ003",
            f"wait_key({LONG})": "LJ003",
            f"complete('{job_id}', {LONG})": "LJ004",
            f"fail('{job_id}', 'x', {LONG}, true)": "LJ005",
            f"renew_many({IDS}, {MANY})": "LJ007",
            f"complete_many({IDS}, {MANY})": "LJ007",
            f"fail_many({IDS}, {MANY}, {MANY}, array_fill(true, array[200000]))": (
                "LJ007"
            ),
        },
        operator: {
            "purge(now(), 2147483647)": "LJ007",
            f"redrive_failed({LONG}, now())": "LJ003",
            "redrive_failed('email', now(), p_limit => 2147483647)": "LJ007",
            "redrive_failed('email', now(), p_extra_attempts => 2147483647)": "LJ007",
            "enforce_retention(2147483647)": "LJ007",
            "retire_expired(2147483647)": "LJ007",
            f"pause({LONG})": "LJ003",
            f"inspect_key({LONG}, {LONG})": "LJ006",
            f"inspect_jobs('email', {LONG})": "LJ007",
            f"inspect_jobs('email', 'queued', {LONG})": "LJ007",
        },
    }

    for session, refused in calls.items():
        session.execute("set statement_timeout = '4s'")
        for call, sqlstate in refused.items():
            with session.refusing(sqlstate) as refusal:
                session.execute(f"select {call}")
            assert len(str(refusal.value)) < 1000

    assert claim()[0] == job_id
