from __future__ import annotations

import asyncio
import json
import re
import traceback
from collections import UserDict
from datetime import UTC, datetime, timedelta, timezone
from inspect import iscoroutinefunction, signature
from types import SimpleNamespace
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import Jobs, JobsError
from lenso_jobs._async_client import AsyncJobs
from lenso_jobs._models import (
    EnqueuedJob,
    FailedJob,
    InspectedJob,
    LeasedJob,
)
from lenso_jobs.capability import AsyncCapability, Capability, ProtocolViolation
from lenso_jobs.errors import REGISTRY, InvalidLease, Unauthorized

SECRET = "hush-hush"
ID = "0198c0de-0000-7000-8000-00000000abcd"
LEASE = {"job_id": ID, "lease_token": SECRET}

# The contract, a second time: every request with the type of each of its fields, and
# every error.
REQUESTS = {
    "enqueue": {
        "queue": "email",
        "kind": "send",
        "payload": {"to": SECRET},
        "idempotency_key": SECRET,
        "available_at": "2040-01-02T03:04:05Z",
        "max_attempts": 3,
    },
    "claim": {"queue": "email"},
    "renew": LEASE,
    "complete": LEASE,
    "fail": {**LEASE, "failure_code": "smtp.timeout", "retryable": True},
    "inspect": {"job_id": ID},
}
TYPES = {
    "payload": "object",
    "available_at": "timestamp",
    "max_attempts": "integer",
    "retryable": "boolean",
}
ERRORS = {
    "enqueue": {"idempotency_conflict", "invalid_job", "unauthorized"},
    "claim": {"invalid_queue", "unauthorized"},
    "renew": {"invalid_lease", "unauthorized"},
    "complete": {"invalid_lease", "unauthorized"},
    "fail": {"invalid_failure", "invalid_lease", "unauthorized"},
    "inspect": {"job_not_found", "unauthorized"},
}
WRONG = {
    "string": [None, 1, True, 1.5, [SECRET], {SECRET: 1}, SECRET.encode(), UUID(ID)],
    "object": [None, 1, True, SECRET, [SECRET], [[SECRET, 1]], b"{}"],
    "timestamp": [1, 1.5, True, [SECRET], {SECRET: 1}, datetime.now(UTC), SECRET],
    "integer": [None, True, False, 3.0, "3", [3], {SECRET: 3}],
    "boolean": [None, 0, 1, "true", SECRET, [True], {}],
}
FIELDS = [(name, field) for name, fields in REQUESTS.items() for field in fields]
EVERY = {field: name for name, field in FIELDS}

every_operation = pytest.mark.parametrize("operation", REQUESTS)
every_field = pytest.mark.parametrize(("operation", "field"), FIELDS)


class Silent:
    """A client or connection that must not be called."""

    def __init__(self, kind=Jobs):
        self.kind = kind

    @property
    def __class__(self):
        return self.kind

    def __getattr__(self, name):
        raise AssertionError(f"{name} was called")


class Double:
    """A client that keeps each call, and returns or raises what it was given."""

    __class__ = Jobs

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.calls.append((name, *arguments, *named.items()))
            answer = self.answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call


class Awaited:
    """A client's methods as coroutines."""

    __class__ = AsyncJobs

    def __init__(self, jobs):
        self._jobs = jobs

    def __getattr__(self, name):
        async def call(*arguments, **named):
            await asyncio.sleep(0)
            return getattr(self._jobs, name)(*arguments, **named)

        return call


def in_a_loop(jobs, operation, request):
    return asyncio.run(AsyncCapability(Awaited(jobs)).dispatch(operation, request))


@pytest.fixture(params=["sync", "async"])
def on(request):
    """Dispatch on a double, as the one class and as the other."""
    if request.param == "async":
        return in_a_loop
    return lambda jobs, *rest: Capability(jobs).dispatch(*rest)


@pytest.fixture
def in_thread(client):
    """Dispatch on the database as a role."""
    return lambda role, *rest: Capability(client(role)).dispatch(*rest)


@pytest.fixture
def in_task(conninfo):
    """The same on asyncio."""

    async def dispatch(role, *rest):
        where = make_conninfo(conninfo, user=role)
        async with await psycopg.AsyncConnection.connect(
            where, autocommit=True
        ) as connection:
            jobs = AsyncJobs(connection, "jobs_email")
            return await AsyncCapability(jobs).dispatch(*rest)

    return lambda *arguments: asyncio.run(dispatch(*arguments))


@pytest.fixture(params=["sync", "async"])
def ask(request, in_thread, in_task):
    """Dispatch on the database as a role, as the one class and as the other."""
    return in_thread if request.param == "sync" else in_task


def job(payload=b"{}", **changes):
    given = {
        "job_id": UUID(ID),
        "queue": "email",
        "kind": "send",
        "payload_json": payload,
        "attempt": 1,
        "max_attempts": 3,
        "lease_token": SECRET,
        "lease_expires_at": datetime(2040, 1, 1, tzinfo=UTC).timestamp(),
        "created_at": datetime(2040, 1, 1, tzinfo=UTC).timestamp(),
        "seconds_left": 30.0,
    }
    return LeasedJob(*(given | changes).values())


def evidence(**changes):
    given = {
        "job_id": UUID(ID),
        "queue": "email",
        "kind": "send",
        "status": "queued",
        "attempts": 0,
        "max_attempts": 3,
        "available_at": datetime(2040, 1, 1, tzinfo=UTC),
        "lease_expires_at": None,
        "last_failure_code": None,
        "created_at": datetime(2040, 1, 1, tzinfo=UTC),
        "updated_at": datetime(2040, 1, 1, tzinfo=UTC),
        "producer": "accounts",
        "worker": "email-worker",
        "ended_at": datetime(2040, 1, 1, tzinfo=UTC),
    }
    return InspectedJob(**given | changes)


def violation(on, *arguments):
    """The message of the violation, once nothing shows what it must not."""
    with pytest.raises(ProtocolViolation) as caught:
        on(Silent(), *arguments)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert SECRET not in shown
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


# The shape of a request, before any call.


@pytest.mark.parametrize("operation", ["", "purge", "Claim", "claim ", "__class__"])
def test_an_unknown_operation_is_a_violation_that_names_it(on, operation):
    message = violation(on, operation, {"queue": "email"})

    assert message == f"{operation!r} is not an operation"


@pytest.mark.parametrize("operation", [None, 1, b"claim", ["claim"], {SECRET: 1}])
def test_an_operation_that_is_not_a_string_is_a_violation(on, operation):
    message = violation(on, operation, {"queue": "email"})

    assert message == "a name that is no string is not an operation"


@every_operation
@pytest.mark.parametrize("given", [None, 1, SECRET, [SECRET], [("queue", "email")]])
def test_a_request_that_is_not_an_object_is_a_violation(on, operation, given):
    message = violation(on, operation, given)

    assert message == f"{operation}: the request must be an object"


@every_field
def test_a_missing_field_is_a_violation_that_names_it(on, operation, field):
    request = {k: v for k, v in REQUESTS[operation].items() if k != field}

    message = violation(on, operation, request)

    assert message == f"{operation}: {field} is missing"


@every_operation
@pytest.mark.parametrize("field", ["limit", "Queue", "job-id", "", "a\nb", "a\ud800"])
def test_an_unknown_field_is_a_violation_that_names_it(on, operation, field):
    message = violation(on, operation, {**REQUESTS[operation], field: SECRET})

    assert message == f"{operation}: {field!r} is not a field"


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        (name, field)
        for name in REQUESTS
        for field in EVERY
        if field not in REQUESTS[name]
    ],
)
def test_a_field_of_another_operation_is_unknown(on, operation, field):
    message = violation(on, operation, {**REQUESTS[operation], field: SECRET})

    assert message == f"{operation}: {field!r} is not a field"


@every_operation
@pytest.mark.parametrize("field", [1, None, b"queue", (SECRET,)])
def test_a_field_whose_name_is_not_a_string_is_a_violation(on, operation, field):
    message = violation(on, operation, {**REQUESTS[operation], field: SECRET})

    assert message == f"{operation}: a name that is no string is not a field"


def test_a_name_without_end_is_cut_short_in_the_message(on):
    messages = (
        violation(on, "x" * 10_000, {}),
        violation(on, "claim", {"queue": "email", "x" * 10_000: 1}),
    )

    assert max(map(len, messages)) < 120


@pytest.mark.parametrize(
    ("operation", "field", "value"),
    [
        (operation, field, value)
        for operation, field in FIELDS
        for value in WRONG[TYPES.get(field, "string")]
    ],
)
def test_a_wrong_type_is_a_violation_that_names_the_field(on, operation, field, value):
    message = violation(on, operation, {**REQUESTS[operation], field: value})

    assert message.startswith(f"{operation}: {field} must be ")


def test_a_request_may_be_any_mapping_and_is_left_as_it_was(on):
    payload = UserDict(REQUESTS["enqueue"]["payload"])
    request = UserDict(REQUESTS["enqueue"], payload=payload)
    before = dict(request)

    answer = on(Double(EnqueuedJob(UUID(ID), created=True)), "enqueue", request)

    assert answer == {"job_id": ID, "created": True}
    assert dict(request) == before


def test_both_classes_are_called_alike():
    sync, asynchronous = Capability.dispatch, AsyncCapability.dispatch

    assert signature(sync) == signature(asynchronous)
    assert iscoroutinefunction(asynchronous)


# From fields to calls.


@pytest.mark.parametrize(
    ("operation", "answer", "call"),
    [
        (
            "enqueue",
            EnqueuedJob(UUID(ID), created=False),
            (
                "enqueue",
                ("queue", "email"),
                ("kind", "send"),
                ("payload", {"to": SECRET}),
                ("idempotency_key", SECRET),
                ("available_at", datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC)),
                ("max_attempts", 3),
            ),
        ),
        ("claim", [], ("claim", "email")),
        ("inspect", evidence(), ("inspect", ID)),
    ],
)
def test_an_operation_makes_one_call_with_its_fields(on, operation, answer, call):
    jobs = Double(answer)

    on(jobs, operation, REQUESTS[operation])

    assert jobs.calls == [call]


@pytest.mark.parametrize(
    ("operation", "answer", "rest"),
    [
        ("renew", datetime(2040, 1, 1, tzinfo=UTC), ()),
        ("complete", True, ()),
        (
            "fail",
            FailedJob("failed", None),
            (("failure_code", "smtp.timeout"), ("retryable", True)),
        ),
    ],
)
def test_an_operation_presents_its_lease_and_hides_the_token(
    on, operation, answer, rest
):
    jobs = Double(answer)

    on(jobs, operation, REQUESTS[operation])

    ((name, lease, *others),) = jobs.calls
    assert (name, lease.job_id, lease.lease_token) == (operation, ID, SECRET)
    assert tuple(others) == rest
    assert SECRET not in repr(lease)


@pytest.mark.parametrize(
    ("operation", "changes", "error"),
    [
        ("enqueue", {"max_attempts": 2**31}, "invalid_job"),
        ("enqueue", {"max_attempts": -(10**5000)}, "invalid_job"),
        ("enqueue", {"queue": "a\0b"}, "invalid_job"),
        ("enqueue", {"idempotency_key": "a\ud800"}, "invalid_job"),
        ("enqueue", {"payload": {"n": float("nan")}}, "invalid_job"),
        ("claim", {"queue": "a\0b"}, "invalid_queue"),
        ("renew", {"job_id": "no UUID"}, "invalid_lease"),
        ("renew", {"lease_token": "a\0b"}, "invalid_lease"),
        ("complete", {"job_id": ""}, "invalid_lease"),
        ("fail", {"job_id": "no UUID"}, "invalid_lease"),
        ("fail", {"failure_code": "a\ud800"}, "invalid_failure"),
        ("inspect", {"job_id": "no UUID"}, "job_not_found"),
    ],
)
def test_a_value_that_only_the_domain_can_refuse_is_an_error_and_no_violation(
    on, operation, changes, error
):
    jobs = Jobs(Silent(psycopg.Connection), "jobs_email")

    assert on(jobs, operation, REQUESTS[operation] | changes) == error


# Refusals.


@every_operation
@pytest.mark.parametrize("kind", REGISTRY.values(), ids=lambda kind: kind.code)
def test_a_refusal_is_its_name_where_the_contract_lists_it_and_raised_elsewhere(
    on, operation, kind
):
    refusal = kind("the message")
    jobs = Double(refusal)

    if kind.code in ERRORS[operation]:
        assert on(jobs, operation, REQUESTS[operation]) == kind.code
    else:
        with pytest.raises(JobsError) as caught:
            on(jobs, operation, REQUESTS[operation])
        assert caught.value is refusal


@every_operation
@pytest.mark.parametrize(
    "error", [psycopg.OperationalError(), psycopg.errors.DeadlockDetected(), OSError()]
)
def test_an_error_that_is_not_a_refusal_passes_through(on, operation, error):
    with pytest.raises(type(error)) as caught:
        on(Double(error), operation, REQUESTS[operation])

    assert caught.value is error


# Answers.


def test_a_claimed_job_has_the_fields_of_the_contract(on):
    answer = on(Double([job(b'{"to": ["ada"]}')]), "claim", {"queue": "email"})

    assert answer == {
        "job_id": ID,
        "queue": "email",
        "kind": "send",
        "payload": {"to": ["ada"]},
        "attempt": 1,
        "max_attempts": 3,
        "lease_token": SECRET,
        "lease_expires_at": "2040-01-01T00:00:00.000000Z",
    }


def test_evidence_omits_missing_parts(on):
    answer = on(Double(evidence()), "inspect", {"job_id": ID})

    assert answer == {
        "job_id": ID,
        "queue": "email",
        "kind": "send",
        "status": "queued",
        "attempts": 0,
        "max_attempts": 3,
        "available_at": "2040-01-01T00:00:00.000000Z",
        "created_at": "2040-01-01T00:00:00.000000Z",
        "updated_at": "2040-01-01T00:00:00.000000Z",
    }


@pytest.mark.parametrize(
    ("field", "value", "written"),
    [
        (
            "lease_expires_at",
            datetime(2040, 1, 1, tzinfo=UTC),
            "2040-01-01T00:00:00.000000Z",
        ),
        ("last_failure_code", "smtp.timeout", "smtp.timeout"),
    ],
)
def test_evidence_has_each_optional_field_by_itself(on, field, value, written):
    bare = on(Double(evidence()), "inspect", {"job_id": ID})

    answer = on(Double(evidence(**{field: value})), "inspect", {"job_id": ID})

    assert answer == bare | {field: written}


@pytest.mark.parametrize(
    ("instant", "written"),
    [
        (datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC), "2040-01-02T03:04:05.000000Z"),
        (datetime(2040, 1, 2, 3, 4, 5, 60, tzinfo=UTC), "2040-01-02T03:04:05.000060Z"),
        (
            datetime(2040, 1, 2, 3, tzinfo=timezone(timedelta(hours=5, minutes=45))),
            "2040-01-01T21:15:00.000000Z",
        ),
        (datetime(1, 1, 1, tzinfo=UTC), "0001-01-01T00:00:00.000000Z"),
        (datetime.max.replace(tzinfo=UTC), "9999-12-31T23:59:59.999999Z"),
    ],
)
def test_an_instant_is_written_in_utc_with_six_digits(on, instant, written):
    failed = FailedJob("queued", instant)

    assert on(Double(instant), "renew", LEASE) == {"lease_expires_at": written}
    assert on(Double(failed), "fail", REQUESTS["fail"]) == {
        "status": "queued",
        "available_at": written,
    }


@every_operation
def test_every_result_is_json(on, operation):
    answers = {
        "enqueue": EnqueuedJob(UUID(ID), created=True),
        "claim": [job()],
        "renew": datetime(2040, 1, 1, tzinfo=UTC),
        "complete": True,
        "fail": FailedJob("failed", None),
        "inspect": evidence(),
    }

    answer = on(Double(answers[operation]), operation, REQUESTS[operation])

    assert json.loads(json.dumps(answer, allow_nan=False)) == answer


# Timestamps.

WELL_FORMED = [
    "2040-01-02T03:04:05Z",
    "2040-01-02t03:04:05z",
    "2040-01-02T03:04:05+00:00",
    "2040-01-02T03:04:05-00:00",
    "2040-01-02T03:04:05+05:45",
    "2040-01-02T03:04:05-12:00",
    "2040-01-02t03:04:05.25+15:59",
    "2040-01-02T03:04:05.5Z",
    "2040-01-02T03:04:05.000001Z",
    "2040-01-02T03:04:05.123456z",
    "2040-01-02T03:04:05.1234564Z",
    "2040-01-02T03:04:05.1234565Z",
    "2040-01-02T03:04:05.1234566Z",
    "2040-01-02T03:04:05.0000005Z",
    "2040-01-02T03:04:05.0000015Z",
    "2040-01-02T03:04:05.000002500Z",
    "2040-01-02T03:04:05.999999499Z",
    "2040-12-31T23:59:59.999999999Z",
    "2040-02-29T00:00:00Z",
    "2400-02-29T00:00:00Z",
    "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00-01:00",
    "9999-12-31T23:59:59.999999Z",
    "9999-12-31T23:59:59.9999999+00:01",
    "1999-12-31T23:59:59Z",
]
NOT_TO_BE_KEPT = [
    "0000-01-01T00:00:00Z",
    "0000-02-29T00:00:00Z",
    "0001-01-01T00:00:00+00:01",
    "0001-01-01T00:59:59.999999+01:00",
    "9999-12-31T23:59:59-00:01",
    "9999-12-31T23:59:59.9999999Z",
    "2040-12-31T23:59:60Z",
    "2040-12-31T23:59:60.5+01:00",
    "2040-01-02T03:04:05+16:00",
    "2040-01-02T03:04:05-23:59",
    "2040-01-02T03:04:05.1234567890Z",
    f"2040-01-02T03:04:05.{'0' * 10_000}Z",
]
NOT_RFC_3339 = [
    "",
    "now",
    "infinity",
    "2040-01-02T03:04:05",
    "2040-01-02 03:04:05Z",
    "2040-01-02T03:04Z",
    "2040-01-02",
    "2040-01-02T03:04:05+0000",
    "2040-01-02T03:04:05+00",
    "2040-01-02T03:04:05 +00:00",
    "2040-01-02T03:04:05+24:00",
    "2040-01-02T03:04:05+00:60",
    "2040-01-02T03:04:05\u221201:00",
    "2040-01-02T03:04:05.Z",
    "2040-01-02T03:04:05,5Z",
    "2040-01-02T24:00:00Z",
    "2040-01-02T03:60:00Z",
    "2040-01-02T03:04:61Z",
    "2040-00-02T03:04:05Z",
    "2040-13-02T03:04:05Z",
    "2040-01-00T03:04:05Z",
    "2040-01-32T03:04:05Z",
    "2040-04-31T03:04:05Z",
    "2040-02-30T03:04:05Z",
    "2041-02-29T03:04:05Z",
    "2100-02-29T03:04:05Z",
    "10000-01-01T00:00:00Z",
    "-2040-01-02T03:04:05Z",
    "40-01-02T03:04:05Z",
    "2040-1-2T03:04:05Z",
    "20400102T030405Z",
    "2040-W01-1T03:04:05Z",
    "2040-01-02T03:04:05Z BC",
    "2040-01-02T03:04:05Z\n",
    "\n2040-01-02T03:04:05Z",
    "٢٠٤٠-01-02T03:04:05Z",
    "2040-01-02T03:04:05Z\0",
]


def scheduled(text):
    return REQUESTS["enqueue"] | {"available_at": text}


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        (None, None),
        ("2040-01-02T03:04:05Z", datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2040-01-02t03:04:05z", datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2040-01-02T03:04:05+05:45", datetime(2040, 1, 1, 21, 19, 5, tzinfo=UTC)),
        ("2040-01-02T03:04:05-12:00", datetime(2040, 1, 2, 15, 4, 5, tzinfo=UTC)),
        ("2040-01-02T03:04:05.5Z", datetime(2040, 1, 2, 3, 4, 5, 500000, tzinfo=UTC)),
        ("2040-01-02T03:04:05.0000014Z", datetime(2040, 1, 2, 3, 4, 5, 1, tzinfo=UTC)),
        ("2040-01-02T03:04:05.0000016Z", datetime(2040, 1, 2, 3, 4, 5, 2, tzinfo=UTC)),
        ("2040-12-31T23:59:59.9999999Z", datetime(2041, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_timestamp_is_read_as_the_instant_it_names(on, text, instant):
    jobs = Double(EnqueuedJob(UUID(ID), created=True))

    on(jobs, "enqueue", scheduled(text))

    ((_, *arguments),) = jobs.calls
    assert dict(arguments)["available_at"] == instant


@pytest.mark.parametrize("text", NOT_TO_BE_KEPT, ids=lambda text: text[:40])
def test_a_timestamp_that_cannot_be_kept_is_an_invalid_job(on, text):
    assert on(Silent(), "enqueue", scheduled(text)) == "invalid_job"


@pytest.mark.parametrize("text", NOT_RFC_3339)
def test_a_timestamp_that_is_not_rfc_3339_is_a_violation(on, text):
    message = violation(on, "enqueue", scheduled(text))

    assert message == (
        "enqueue: available_at must be null or an RFC 3339 timestamp with an offset"
    )


@pytest.mark.slow
def test_timestamps_are_read_as_enqueue_many_reads_them(in_thread, producer):
    texts = [*WELL_FORMED, *NOT_TO_BE_KEPT, *NOT_RFC_3339[:-1]]
    items = [
        REQUESTS["enqueue"] | {"available_at": text, "idempotency_key": f"key-{i}"}
        for i, text in enumerate(texts)
    ]
    outcomes = producer.rows(
        "select outcome from enqueue_many(%s::jsonb)", json.dumps(items)
    )

    def second(item):
        try:
            answer = in_thread("accounts", "enqueue", item)
        except ProtocolViolation:
            return "invalid_job"
        return "created" if answer != "invalid_job" else answer

    # The same instant under the same key is the same job, another would be a conflict.
    assert [second(item) for item in items] == [outcome for (outcome,) in outcomes]
    assert outcomes.count(("created",)) == len(WELL_FORMED)


# A payload that Python cannot represent.

UNDECODABLE = {
    "too many digits": b'{"n": ' + b"9" * 5000 + b"}",
    "no JSON": b'{"to": "' + SECRET.encode(),
    "no UTF-8": b'{"to": "\xff"}',
    "no end to the nesting": b'{"to": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("payload", UNDECODABLE.values(), ids=list(UNDECODABLE))
def test_an_undecodable_job_is_failed_permanently_and_the_next_job_claimed(on, payload):
    hopeless, fine = job(payload), job(b'{"to": "ada"}', job_id=uuid4())
    jobs = Double([hopeless], FailedJob("failed", None), [fine])

    answer = on(jobs, "claim", {"queue": "email"})

    assert (answer["job_id"], answer["payload"]) == (str(fine.job_id), {"to": "ada"})
    assert jobs.calls == [
        ("claim", "email"),
        ("fail", hopeless, "payload_undecodable", ("retryable", False)),
        ("claim", "email"),
    ]


def test_undecodable_jobs_are_failed_until_none_is_due(on):
    hopeless = job(UNDECODABLE["no JSON"])
    jobs = Double(*[[hopeless], FailedJob("failed", None)] * 3, [])

    answer = on(jobs, "claim", {"queue": "email"})

    assert answer == "no_job_available"
    assert len(jobs.calls) == 7


def test_the_next_job_is_claimed_where_the_lease_of_an_undecodable_one_ran_out(on):
    hopeless = job(UNDECODABLE["no JSON"])
    jobs = Double([hopeless], InvalidLease("it ran out"), [])

    answer = on(jobs, "claim", {"queue": "email"})

    assert answer == "no_job_available"
    assert jobs.answers == []


def test_a_worker_that_may_not_fail_an_undecodable_job_is_unauthorized(on):
    jobs = Double([job(UNDECODABLE["no JSON"])], Unauthorized("no"))

    assert on(jobs, "claim", {"queue": "email"}) == "unauthorized"


def test_an_error_in_failing_an_undecodable_job_shows_nothing_of_the_job(on):
    jobs = Double([job(UNDECODABLE["no JSON"])], psycopg.OperationalError("gone"))

    with pytest.raises(psycopg.OperationalError) as caught:
        on(jobs, "claim", {"queue": "email"})

    assert caught.value.__context__ is None
    assert SECRET not in "".join(traceback.format_exception(caught.value))


# On a database.

WRITTEN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


@pytest.fixture
def taken(ask, key):
    """A job enqueued and claimed by dispatch, as its lease and what was claimed."""
    request = REQUESTS["enqueue"] | {"available_at": None, "idempotency_key": key}
    ask("accounts", "enqueue", request)
    claimed = ask("email-worker", "claim", {"queue": "email"})
    lease = {name: claimed[name] for name in ("job_id", "lease_token")}
    return SimpleNamespace(request=request, claimed=claimed, lease=lease)


def test_a_job_is_enqueued_once_and_waits_until_it_is_available(ask):
    request = scheduled("2040-01-02T03:04:05.25+01:00")

    first = ask("accounts", "enqueue", request)
    again = ask("accounts", "enqueue", request)
    evidence = ask("operations", "inspect", {"job_id": first["job_id"].upper()})

    assert first == {"job_id": str(UUID(first["job_id"])), "created": True}
    assert again == {"job_id": first["job_id"], "created": False}
    created = evidence.pop("created_at")
    assert WRITTEN.fullmatch(created)
    assert evidence == {
        "job_id": first["job_id"],
        "queue": "email",
        "kind": "send",
        "status": "queued",
        "attempts": 0,
        "max_attempts": 3,
        "available_at": "2040-01-02T02:04:05.250000Z",
        "updated_at": created,
    }


def test_a_job_is_claimed_renewed_and_completed(ask, taken):
    renewed = ask("email-worker", "renew", taken.lease)
    running = ask("operations", "inspect", {"job_id": taken.lease["job_id"]})
    completed = ask("email-worker", "complete", taken.lease)
    ended = ask("operations", "inspect", {"job_id": taken.lease["job_id"]})

    assert taken.claimed == {
        **taken.lease,
        "queue": "email",
        "kind": "send",
        "payload": {"to": SECRET},
        "attempt": 1,
        "max_attempts": 3,
        "lease_expires_at": taken.claimed["lease_expires_at"],
    }
    assert renewed["lease_expires_at"] > taken.claimed["lease_expires_at"]
    assert running["status"] == "running"
    assert running["lease_expires_at"] == renewed["lease_expires_at"]
    assert completed == {"completed": True}
    assert ended["status"] == "succeeded"
    assert ended.keys() == running.keys() - {"lease_expires_at"}


def test_a_job_that_may_be_tried_again_is_queued_with_its_time(ask, taken):
    failure = {"failure_code": "smtp.timeout", "retryable": True}

    answer = ask("email-worker", "fail", taken.lease | failure)
    evidence = ask("operations", "inspect", {"job_id": taken.lease["job_id"]})

    assert answer == {"status": "queued", "available_at": evidence["available_at"]}
    assert evidence["available_at"] > evidence["created_at"]
    assert evidence["last_failure_code"] == "smtp.timeout"


def test_a_job_that_may_not_is_failed_without_one(ask, taken):
    failure = {"failure_code": "smtp.timeout", "retryable": False}

    answer = ask("email-worker", "fail", taken.lease | failure)

    assert answer == {"status": "failed", "available_at": None}


def test_enqueue_names_each_of_its_errors(ask, taken):
    other = taken.request | {"payload": {}}
    undeclared = taken.request | {"queue": "nowhere"}

    assert ask("accounts", "enqueue", other) == "idempotency_conflict"
    assert ask("accounts", "enqueue", undeclared) == "invalid_job"
    assert ask("accounts", "enqueue", other | {"max_attempts": 2**40}) == "invalid_job"
    assert ask("email-worker", "enqueue", taken.request) == "unauthorized"
    assert ask("stranger", "enqueue", taken.request) == "unauthorized"


def test_claim_names_each_of_its_errors(ask):
    assert ask("email-worker", "claim", {"queue": "nowhere"}) == "invalid_queue"
    assert ask("email-worker", "claim", {"queue": "email"}) == "no_job_available"
    assert ask("accounts", "claim", {"queue": "email"}) == "unauthorized"


@pytest.mark.parametrize("operation", ["renew", "complete", "fail"])
def test_renew_complete_and_fail_name_each_of_their_errors(ask, taken, operation):
    rest = {"failure_code": "smtp.timeout", "retryable": True}
    lease = taken.lease | (rest if operation == "fail" else {})

    if operation == "fail":
        malformed = lease | {"failure_code": "no code"}
        assert ask("email-worker", "fail", malformed) == "invalid_failure"
    for name, value in (
        ("lease_token", "guessed"),
        ("job_id", ID),
        ("job_id", "no UUID"),
    ):
        forged = lease | {name: value}
        assert ask("email-worker", operation, forged) == "invalid_lease"
    assert ask("spare-worker", operation, lease) == "invalid_lease"
    assert ask("accounts", operation, lease) == "unauthorized"


def test_inspect_names_each_of_its_errors(ask):
    assert ask("operations", "inspect", {"job_id": ID}) == "job_not_found"
    assert ask("operations", "inspect", {"job_id": "no UUID"}) == "job_not_found"
    assert ask("stranger", "inspect", {"job_id": ID}) == "unauthorized"


def test_a_hopeless_payload_ends_failed_and_the_job_behind_it_is_claimed(
    ask, enqueue, owner
):
    hopeless, fine = enqueue(), enqueue(payload={"to": "ada"})
    owner.execute(
        "update job set payload = jsonb_build_object('n', repeat('9', 5000)::numeric)"
        " where job_id = %s",
        (hopeless,),
    )

    claimed = ask("email-worker", "claim", {"queue": "email"})
    evidence = ask("operations", "inspect", {"job_id": str(hopeless)})

    assert claimed["job_id"] == str(fine)
    assert evidence["status"] == "failed"
    assert evidence["last_failure_code"] == "payload_undecodable"


def test_a_missing_instance_is_psycopgs_error(connect):
    capability = Capability(Jobs(connect("accounts"), "jobs_elsewhere"))

    with pytest.raises(psycopg.errors.InvalidSchemaName):
        capability.dispatch("inspect", {"job_id": ID})


def test_dispatch_joins_the_transaction_of_the_client(client, state):
    jobs = client("accounts", autocommit=False)
    before = state()

    Capability(jobs).dispatch("enqueue", REQUESTS["enqueue"])
    jobs._source.rollback()

    assert state() == before
