"""The fault: the same key with a changed request.

Equal JSON is the same request. Any real difference is a conflict, in every state of the
job.
"""

from datetime import UTC, datetime

import pytest

PAYLOAD = {"a": 1, "b": {"c": 2}}
AT, LATER = datetime(2001, 1, 1, tzinfo=UTC), datetime(2040, 1, 1, tzinfo=UTC)
SAME = (
    {"payload": {"b": {"c": 2}, "a": 1}},
    {"payload": {"a": 1.0, "b": {"c": 2}}},
    {"payload": {"a": 1, "b": {"c": 2.0}}},
)
TEXTS = (
    ' { "a" :\n1,\t"b": {"c" : 2 } } ',
    '{"a": 1.00, "b": {"c": 20e-1}}',
    '{"a": 1, "a": 1, "b": {"c": 2}}',
    '{"a": 0, "b": {"c": 2, "c": 2}, "a": 1}',
    '{"\\u0061": 1, "b": {"c": 2}}',
)
OTHER = (
    {"payload": {"a": 1, "b": {"c": 3}}},
    {"payload": {"a": 1, "b": {"c": 2}, "d": None}},
    {"payload": {"a": 1}},
    {"payload": {"a": "1", "b": {"c": 2}}},
    {"payload": {"a": True, "b": {"c": 2}}},
    {"payload": {"a": [1], "b": {"c": 2}}},
    {"payload": {"A": 1, "b": {"c": 2}}},
    {"payload": {}},
    {"kind": "other"},
    {"queue": "slow"},
    {"available_at": LATER},
    {"max_attempts": 4},
)


@pytest.fixture
def first_jobs(client):
    """One job in each state, by key."""
    jobs, worker = client("accounts"), client("email-worker")

    def enqueue(key):
        return jobs.enqueue("email", "send", PAYLOAD, idempotency_key=key).job_id

    made = {key: enqueue(key) for key in ("completed", "failed", "retrying", "leased")}
    leases = worker.claim("email", 4)
    worker.complete(leases[0])
    worker.fail(leases[1], "down", retryable=False)
    worker.fail(leases[2], "down", retryable=True)
    return made | {"ready": enqueue("ready")}


def told(way, options):
    """The options as this way passes them."""
    if way == "sql" and "available_at" in options:
        return options | {"available_at": options["available_at"].isoformat()}
    return options


@pytest.mark.slow
def test_the_same_request_is_existing_and_another_a_conflict_in_every_state(
    client, way, first_jobs, verbs, state
):
    jobs = client("accounts")
    before = state()
    same = [*SAME, *({"payload": text} for text in TEXTS if way == "sql")]

    for key, job_id in first_jobs.items():
        for verb, ask in verbs.items():
            for options in same:
                if verb == "enqueue" or isinstance(options["payload"], dict):
                    assert ask(jobs, key, **options) == (job_id, "existing")
            for options in OTHER:
                asked = {"payload": PAYLOAD} | told(way, options)
                assert ask(jobs, key, **asked) == (None, "conflict"), (key, options)

    assert state() == before


def test_the_schedule_is_compared_as_asked(client, way, verbs):
    jobs = client("accounts")
    at, later = (told(way, {"available_at": at}) for at in (AT, LATER))

    for n, ask in enumerate(verbs.values()):
        outcomes = [
            ask(jobs, f"{n}.{key}", {}, **options)[1]
            for key, options in (
                *(("past", at), ("past", at), ("past", {}), ("past", later)),
                *(("later", later), ("later", later), ("later", {})),
            )
        ]

        assert outcomes == [
            *("created", "existing", "conflict", "conflict"),
            *("created", "existing", "conflict"),
        ]


def test_fields_that_run_together_to_one_text_are_two_requests(client, verbs, owner):
    jobs = client("accounts")

    answers = [
        ask(jobs, key, {}, **options)
        for ask in verbs.values()
        for key, options in (
            *(("c", {"kind": "ab"}), ("bc", {"kind": "a"})),
            *(("1", {"max_attempts": 11}), ("11", {"max_attempts": 1})),
        )
    ]

    assert [outcome for _, outcome in answers] == ["created"] * 4 + ["existing"] * 4
    assert owner.value("select count(*) from job") == 4


def test_a_key_lives_until_its_job_is_purged(client, first_jobs, verbs, operator):
    jobs = client("accounts")

    purged = operator.value("select purge(clock_timestamp())")
    again = {key: verbs["enqueue"](jobs, key, {}) for key in first_jobs}

    assert purged == 2
    assert {key for key, (_, outcome) in again.items() if outcome == "created"} == {
        "completed",
        "failed",
    }
    assert not {job_id for job_id, _ in again.values()} & {*first_jobs.values()}
