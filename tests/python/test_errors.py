from __future__ import annotations

import copy
import logging
import pickle
import traceback
from uuid import UUID, uuid4

import psycopg
import pytest

import lenso_jobs
from lenso_jobs import (
    IdempotencyConflict,
    InvalidArgument,
    InvalidFailure,
    InvalidJob,
    InvalidLease,
    InvalidQueue,
    JobNotFound,
    Jobs,
    JobsError,
    NewJob,
    SchemaNotReady,
    Unauthorized,
)
from lenso_jobs.errors import REGISTRY

CODES = {
    "42501": ("unauthorized", Unauthorized),
    "LJ001": ("invalid_job", InvalidJob),
    "LJ002": ("idempotency_conflict", IdempotencyConflict),
    "LJ003": ("invalid_queue", InvalidQueue),
    "LJ004": ("invalid_lease", InvalidLease),
    "LJ005": ("invalid_failure", InvalidFailure),
    "LJ006": ("job_not_found", JobNotFound),
    "LJ007": ("invalid_argument", InvalidArgument),
    "LJ008": ("schema_not_ready", SchemaNotReady),
}


def test_there_is_one_exception_for_each_code():
    assert {code: kind for code, (_, kind) in CODES.items()} == REGISTRY
    for sqlstate, (code, kind) in CODES.items():
        assert (kind.sqlstate, kind.code) == (sqlstate, code)
        assert kind.__base__ is JobsError
        assert getattr(lenso_jobs, kind.__name__) is kind


def test_the_codes_are_those_of_the_view(observer):
    rows = observer.rows("select sqlstate, name, meaning from error_code")

    assert {row[0]: row[1] for row in rows} == {s: c for s, (c, _) in CODES.items()}
    assert {row[0]: row[2] for row in rows} == {
        sqlstate: kind.__doc__ for sqlstate, kind in REGISTRY.items()
    }


REFUSALS = {
    "42501": (
        "email-worker",
        lambda jobs, _: jobs.enqueue("email", "send", {}, idempotency_key="k"),
    ),
    "LJ001": (
        "accounts",
        lambda jobs, _: jobs.enqueue("no", "send", {}, idempotency_key="k"),
    ),
    "LJ003": ("email-worker", lambda jobs, _: jobs.claim("no")),
    "LJ004": ("email-worker", lambda jobs, lease: jobs.complete(lease)),
    "LJ005": (
        "email-worker",
        lambda jobs, lease: jobs.fail(lease, "not a code", retryable=True),
    ),
    "LJ006": ("operations", lambda jobs, _: jobs.inspect(uuid4())),
    "LJ007": ("email-worker", lambda jobs, _: jobs.claim("email", limit=0)),
}


@pytest.mark.parametrize("sqlstate", REFUSALS)
def test_a_refusal_of_the_server_is_its_exception_with_psycopg_s_as_the_cause(
    sqlstate, client, held
):
    role, act = REFUSALS[sqlstate]

    with pytest.raises(JobsError) as caught:
        act(client(role), held(uuid4(), "job_lease_no"))

    error = caught.value
    assert type(error) is CODES[sqlstate][1]
    assert isinstance(error.__cause__, psycopg.Error)
    assert error.__cause__.sqlstate == error.sqlstate == sqlstate
    assert str(error) == error.__cause__.diag.message_primary
    assert error.hint == error.__cause__.diag.message_hint


def test_a_conflict_carries_the_server_s_hint(producing, key):
    first = producing.enqueue("email", "send", {}, idempotency_key=key)

    with pytest.raises(IdempotencyConflict) as caught:
        producing.enqueue("email", "other", {}, idempotency_key=key)

    assert caught.value.job_id == first.job_id

    assert caught.value.hint.startswith("Repeat the first intent")
    assert caught.value.code == "idempotency_conflict"


@pytest.mark.parametrize(
    ("detail", "job_id"),
    [
        (None, None),
        ("", None),
        ("job_id=", None),
        ("job_id=not-a-uuid", None),
        ("job_id=01a22ee3-54fa-702d-9e25-c95175f71ac0", True),
        ("A key. job_id=01a22ee3-54fa-702d-9e25-c95175f71ac0.", True),
    ],
)
def test_a_conflict_names_the_job_that_has_the_key_if_the_server_does(detail, job_id):
    error = IdempotencyConflict("used", detail=detail)
    expected = UUID("01a22ee3-54fa-702d-9e25-c95175f71ac0") if job_id else None

    for twin in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert twin.job_id == expected


def test_neither_message_nor_traceback_shows_payload_key_or_token(
    producing, working, leased, held, caplog
):
    caplog.set_level(logging.DEBUG)
    said = []
    hush = "hush-hush"
    for call in (
        lambda: producing.enqueue("email", "two", {hush: 1}, idempotency_key=hush),
        lambda: producing.enqueue("email", "s p", {hush: hush}, idempotency_key=hush),
        lambda: producing.enqueue("email", "s", {hush: 1}, idempotency_key=hush * 99),
        lambda: producing.enqueue(
            "email", "s", {"n": hush * 99_999}, idempotency_key=hush
        ),
        lambda: working.complete(held(leased.job_id, hush)),
        lambda: working.renew(held(leased.job_id, f"{hush}\0")),
        lambda: working.fail(held(leased.job_id, hush), "code", retryable=False),
    ):
        producing.enqueue_many([NewJob("email", "one", {hush: 1}, hush)])
        with pytest.raises(JobsError) as caught:
            call()
        error = caught.value
        # Only what an exception says of itself: the lines of this file hold the values.
        for each in traceback.TracebackException.from_exception(error).format(
            chain=True
        ):
            said.extend(line for line in each.splitlines() if not line.startswith("  "))
        cause = error.__cause__
        if cause is not None:
            said += [cause.diag.message_detail or "", cause.diag.context or ""]

    assert len(said) > 7
    assert hush not in "\n".join(said)
    assert hush not in caplog.text


def test_an_error_can_be_copied_and_pickled_with_its_hint():
    error = InvalidQueue("no such queue", hint="declare it")

    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is InvalidQueue
        assert (str(twin), twin.hint) == ("no such queue", "declare it")
        assert (twin.sqlstate, twin.code) == ("LJ003", "invalid_queue")


# Errors that are not ours.


def test_a_statement_timeout_passes_through_as_psycopg_s_own(working, leased, connect):
    holder = connect()
    holder.execute("begin")
    holder.execute("lock table live_job")
    working._source.execute("set statement_timeout = '50ms'")

    with pytest.raises(psycopg.errors.QueryCanceled) as caught:
        working.complete(leased)

    assert caught.value.__cause__ is None


def test_a_lock_timeout_passes_through_as_psycopg_s_own(working, leased, connect):
    holder = connect()
    holder.execute("begin")
    holder.execute("lock table live_job")
    working._source.execute("set lock_timeout = '50ms'")

    with pytest.raises(psycopg.errors.LockNotAvailable):
        working.complete(leased)


def test_a_read_only_transaction_passes_through_as_psycopg_s_own(producing, key):
    producing._source.execute("set default_transaction_read_only = on")

    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        producing.enqueue("email", "send", {}, idempotency_key=key)


def test_a_serialization_failure_passes_through_as_psycopg_s_own(
    client, leased, working
):
    other = client("email-worker", autocommit=False)
    other._source.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    other._source.execute("select 1 from error_code")
    working.renew(leased)

    with pytest.raises(psycopg.errors.SerializationFailure):
        other.renew(leased)


def test_a_broken_connection_passes_through_as_psycopg_s_own(working, owner):
    owner.execute("select pg_terminate_backend(%s, 5000)", (working._source.pid,))

    with pytest.raises(psycopg.OperationalError):
        working.claim("email")


def test_a_closed_connection_passes_through_as_psycopg_s_own(working):
    working._source.close()

    with pytest.raises(psycopg.OperationalError, match="closed"):
        working.claim("email")


def test_a_missing_function_passes_through_as_psycopg_s_own(owner):
    with pytest.raises(psycopg.errors.UndefinedFunction):
        Jobs(owner, "public").claim("email")


def test_a_caller_without_execute_is_unauthorized(client):
    with pytest.raises(Unauthorized) as caught:
        client("stranger").claim("email")

    assert isinstance(caught.value.__cause__, psycopg.errors.InsufficientPrivilege)
