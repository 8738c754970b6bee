from __future__ import annotations

import dataclasses
import json
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads

from lenso_jobs import (
    Failure,
    IdempotencyConflict,
    InvalidArgument,
    InvalidFailure,
    InvalidJob,
    InvalidLease,
    JobNotFound,
    Jobs,
    NewJob,
    Unauthorized,
    _calls,
)
from lenso_jobs.errors import PayloadUndecodable

ENQUEUED = ("email", "send", {"to": "ada"})
VERBS = {
    "enqueue": (
        "accounts",
        lambda jobs, _, key: jobs.enqueue(*ENQUEUED, idempotency_key=key),
    ),
    "enqueue_many": (
        "accounts",
        lambda jobs, _, key: jobs.enqueue_many([NewJob(*ENQUEUED, key)]),
    ),
    "claim": ("email-worker", lambda jobs, *_: jobs.claim("slow")),
    "renew": ("email-worker", lambda jobs, lease, _: jobs.renew(lease)),
    "renew_many": ("email-worker", lambda jobs, lease, _: jobs.renew_many([lease])),
    "complete": ("email-worker", lambda jobs, lease, _: jobs.complete(lease)),
    "complete_many": (
        "email-worker",
        lambda jobs, lease, _: jobs.complete_many([lease]),
    ),
    "fail": (
        "email-worker",
        lambda jobs, lease, _: jobs.fail(lease, "smtp.timeout", retryable=True),
    ),
    "fail_many": (
        "email-worker",
        lambda jobs, lease, _: jobs.fail_many([(lease, "smtp.timeout", True)]),
    ),
    "release": ("email-worker", lambda jobs, lease, _: jobs.release(lease)),
    "release_many": ("email-worker", lambda jobs, lease, _: jobs.release_many([lease])),
}
every_verb = pytest.mark.parametrize("verb", VERBS)


@pytest.fixture
def due(enqueue):
    """One job waiting in the queue that ``claim`` above looks at."""
    return enqueue(queue="slow")


def role_in_force(connection):
    return connection.execute("select current_setting('role')").fetchone()[0]


# A connection: the transaction is the application's.


@pytest.mark.sampled
@every_verb
def test_a_call_on_a_connection_is_undone_by_its_rollback(
    verb, client, leased, due, key, state
):
    name, act = VERBS[verb]
    jobs = client(name, autocommit=False)
    before = state()

    act(jobs, leased, key)
    jobs._source.rollback()

    assert state() == before


@every_verb
def test_a_call_on_a_connection_is_seen_by_others_once_committed_and_not_before(
    verb, client, leased, due, key, state
):
    name, act = VERBS[verb]
    jobs = client(name, autocommit=False)
    before = state()

    act(jobs, leased, key)
    meanwhile = state()
    jobs._source.commit()

    assert meanwhile == before
    assert state() != before


@every_verb
def test_a_call_on_an_autocommit_connection_commits_by_itself(
    verb, client, leased, due, key, state
):
    name, act = VERBS[verb]
    jobs = client(name)
    before = state()

    act(jobs, leased, key)

    assert state() != before
    assert jobs._source.info.transaction_status is TransactionStatus.IDLE


@pytest.mark.sampled
@every_verb
def test_a_call_on_an_autocommit_connection_joins_a_transaction_block(
    verb, client, leased, due, key, state
):
    name, act = VERBS[verb]
    jobs = client(name)
    before = state()

    with jobs._source.transaction(force_rollback=True):
        act(jobs, leased, key)

    assert state() == before


def test_the_first_refusal_aborts_the_transaction_it_joined(client):
    jobs = client("email-worker", autocommit=False)

    with pytest.raises(InvalidLease):
        jobs.complete(
            dataclasses.make_dataclass("L", ["job_id", "lease_token"])(
                uuid4(), "job_lease_no"
            )
        )

    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        jobs.claim("email")


# A pool: each call is one transaction.


@pytest.mark.slow
@every_verb
@pytest.mark.parametrize(("autocommit", "acting"), [(True, False), (False, True)])
def test_a_call_on_a_pool_is_a_separate_transaction(
    verb, autocommit, acting, pool, replica, leased, due, key, state
):
    name, act = VERBS[verb]
    connections = pool(replica if acting else name, autocommit=autocommit)
    jobs = Jobs(connections, "jobs_email", caller=name if acting else None)
    before = state()

    act(jobs, leased, key)

    assert state() != before
    with connections.connection() as connection:
        assert connection.info.transaction_status is TransactionStatus.IDLE
        assert role_in_force(connection) == "none"


@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize("acting", [True, False])
def test_a_refusal_leaves_the_pool_s_connection_usable(
    autocommit, acting, pool, replica, key
):
    connections = pool(replica if acting else "accounts", autocommit=autocommit)
    jobs = Jobs(connections, "jobs_email", caller="accounts" if acting else None)

    with pytest.raises(InvalidJob):
        jobs.enqueue("undeclared", "send", {}, idempotency_key=key)

    assert jobs.enqueue("email", "send", {}, idempotency_key=key).created
    with connections.connection() as connection:
        assert role_in_force(connection) == "none"


@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_leaving_the_client_leaves_the_connection_and_its_transaction_alone(
    error, autocommit, client, key, owner
):
    jobs = client("accounts", autocommit=autocommit)
    connection = jobs._source
    connection.execute("create temporary table sale (n integer)")

    with suppress(ZeroDivisionError), jobs:
        jobs.enqueue("email", "send", {}, idempotency_key=key)
        connection.execute("insert into sale values (1)")
        if error:
            raise error
    jobs.close()

    assert not connection.closed
    status = TransactionStatus.IDLE if autocommit else TransactionStatus.INTRANS
    assert connection.info.transaction_status is status
    assert connection.rows("select n from sale") == [(1,)]
    connection.commit()
    assert owner.value("select count(*) from job") == 1


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_leaving_the_client_leaves_the_pool_open(error, pool, key):
    connections = pool("accounts")

    with suppress(ZeroDivisionError), Jobs(connections, "jobs_email") as jobs:
        jobs.enqueue("email", "send", {}, idempotency_key=key)
        if error:
            raise error

    assert not connections.closed
    assert not jobs.enqueue("email", "send", {}, idempotency_key=key).created


def test_a_client_for_each_request_writes_no_statement_again(working, monkeypatch):
    def refuse(*_):
        raise AssertionError("a statement was written again")

    working.claim("email")
    monkeypatch.setattr(_calls.Call, "statement", refuse)

    assert Jobs(working._source, "jobs_email").claim("email") == []
    with pytest.raises(AssertionError, match="written again"):
        Jobs(working._source, "jobs_other").claim("email")


# release.


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [(90, 90), (89.2, 90), (timedelta(minutes=1.5), 90), (True, None)],
)
def test_a_job_is_released_for_seconds_or_a_timedelta(
    delay, seconds, working, leased, observing
):
    if seconds is None:
        with pytest.raises(InvalidArgument, match="delay must be seconds or a"):
            working.release(leased, delay=delay)
        return
    before = datetime.now(UTC)

    released = working.release(leased, delay=delay)

    assert released.status == "queued"
    wait = (released.available_at - before).total_seconds()
    assert seconds - 1 <= wait <= seconds + 10
    job = observing.inspect(leased.job_id)
    assert (job.status, job.max_attempts) == ("queued", leased.max_attempts + 1)


def test_a_job_released_without_a_delay_is_claimed_next(working, leased):
    working.release(leased)

    (again,) = working.claim(leased.queue)
    assert (again.job_id, again.attempt) == (leased.job_id, leased.attempt + 1)


@pytest.mark.parametrize("delay", [math.nan, math.inf, "1", 2**40])
def test_a_malformed_delay_is_refused_before_any_sql(delay, working, leased):
    working._source.close()

    for call in (
        working.release,
        lambda *_, delay: working.release_many([], delay=delay),
    ):
        with pytest.raises(InvalidArgument, match="delay must be "):
            call(leased, delay=delay)


@pytest.mark.parametrize("delay", [None, -1, 86_401])
def test_a_delay_out_of_range_releases_nothing(delay, working, leased):
    with pytest.raises(InvalidArgument, match="delay_seconds must be from 0 to 86400"):
        working.release(leased, delay=delay)
    (item,) = working.release_many([leased], delay=delay)

    assert item.outcome == "invalid_argument"
    assert working.renew(leased)


def test_release_many_reports_each_lease_in_its_place(working, leased, held):
    items = working.release_many([held(uuid4(), "job_lease_no"), leased], delay=60)

    assert [item.outcome for item in items] == ["invalid_lease", "queued"]
    assert items[1].available_at > leased.created_at


# caller=: the role in force for one call.


@every_verb
def test_a_caller_joins_the_transaction_and_never_commits(
    verb, client, replica, leased, due, key, state
):
    name, act = VERBS[verb]
    jobs = client(replica, caller=name, autocommit=False)
    before = state()

    act(jobs, leased, key)
    meanwhile = state()
    status = jobs._source.info.transaction_status
    jobs._source.rollback()

    assert status is TransactionStatus.INTRANS
    assert meanwhile == state() == before


@pytest.mark.sampled
@every_verb
def test_a_caller_on_an_autocommit_connection_commits_and_leaves_nothing_behind(
    verb, client, replica, leased, due, key, state
):
    name, act = VERBS[verb]
    jobs = client(replica, caller=name)
    before = state()

    act(jobs, leased, key)

    assert state() != before
    assert role_in_force(jobs._source) == "none"


def test_the_caller_and_not_the_login_is_the_producer(client, replica, key, owner):
    job = client(replica, caller="accounts").enqueue(*ENQUEUED, idempotency_key=key)

    assert (
        owner.value("select producer from job where job_id = %s", job.job_id)
        == "accounts"
    )


@pytest.mark.parametrize("before", ["none", "email-worker"])
def test_the_earlier_role_is_back_after_a_call_in_a_transaction(
    before, client, replica, key
):
    jobs = client(replica, caller="accounts", autocommit=False)
    connection = jobs._source
    connection.execute(f'set local role "{before}"')

    jobs.enqueue(*ENQUEUED, idempotency_key=key)

    assert role_in_force(connection) == before
    connection.commit()
    assert role_in_force(connection) == "none"


@pytest.mark.parametrize("before", ["none", "email-worker"])
def test_the_earlier_role_is_back_after_an_error_caught_in_a_savepoint(
    before, client, replica, key
):
    jobs = client(replica, caller="accounts", autocommit=False)
    connection = jobs._source
    connection.execute(f'set local role "{before}"')

    with pytest.raises(InvalidJob), connection.transaction():
        jobs.enqueue("undeclared", "send", {}, idempotency_key=key)

    assert role_in_force(connection) == before


@pytest.mark.parametrize("caller", [None, "accounts"])
def test_an_error_fails_the_transaction_in_progress_with_a_caller_or_without(
    caller, client, replica, key
):
    user = replica if caller else "accounts"
    jobs = client(user, caller=caller, autocommit=False)
    connection = jobs._source
    before = role_in_force(connection)

    with pytest.raises(InvalidJob):
        jobs.enqueue("undeclared", "send", {}, idempotency_key=key)

    assert connection.info.transaction_status is TransactionStatus.INERROR
    connection.rollback()
    assert role_in_force(connection) == before
    assert jobs.enqueue(*ENQUEUED, idempotency_key=key).created


def test_calls_under_a_caller_use_one_transaction_id_together(
    client, replica, owner, key
):
    jobs = client(replica, caller="accounts", autocommit=False)

    for n in range(5):
        jobs.enqueue(*ENQUEUED, idempotency_key=f"{key}{n}")
    jobs._source.commit()

    # A savepoint that writes has another id, which its rows show.
    assert owner.rows("select count(*), count(distinct xmin::text) from job") == [
        (5, 1)
    ]


def test_two_callers_on_one_connection_never_act_as_each_other(
    client, replica, owner, background, conninfo
):
    connection = client(replica, caller="accounts", autocommit=True)._source
    owner.execute(f'grant organization to "{connection.info.user}"')

    def enqueue(caller):
        jobs = Jobs(connection, "jobs_email", caller=caller)
        for n in range(30):
            jobs.enqueue("email", "send", {"by": caller}, idempotency_key=f"k{n}")

    try:
        both = [background(enqueue, each) for each in ("accounts", "organization")]
        for each in both:
            each.result(20)
    finally:
        owner.execute(f'revoke organization from "{connection.info.user}"')

    assert owner.rows(
        "select count(*), bool_and(payload ->> 'by' = producer) from job"
    ) == [(60, True)]


@pytest.mark.parametrize("has_pipeline", [True, False])
def test_a_refusal_under_a_caller_logs_nothing(
    has_pipeline, client, replica, key, caplog, monkeypatch
):
    monkeypatch.setattr(psycopg.Pipeline, "is_supported", lambda: has_pipeline)
    for autocommit in (True, False):
        jobs = client(replica, caller="accounts", autocommit=autocommit)
        for _ in range(5):
            with pytest.raises(InvalidJob):
                jobs.enqueue("undeclared", "send", {}, idempotency_key=key)
            jobs._source.rollback()

    assert caplog.records == []


@pytest.mark.parametrize("has_pipeline", [True, False])
def test_a_commit_that_fails_under_a_caller_raises_its_error(
    has_pipeline, client, owner, replica, key, monkeypatch
):
    monkeypatch.setattr(psycopg.Pipeline, "is_supported", lambda: has_pipeline)
    owner.execute(
        "create function refuse() returns trigger language plpgsql"
        " as $$ begin raise exception 'refused'; end $$;"
        "create constraint trigger refused after insert on job"
        " deferrable initially deferred for each row execute function refuse()"
    )
    jobs = client(replica, caller="accounts", autocommit=True)

    with pytest.raises(psycopg.errors.RaiseException):
        jobs.enqueue(*ENQUEUED, idempotency_key=key)

    owner.execute("drop trigger refused on job")
    assert jobs.enqueue(*ENQUEUED, idempotency_key=key).created
    assert role_in_force(jobs._source) == "none"


@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize("has_pipeline", [True, False])
def test_an_error_on_the_way_to_the_server_leaves_the_role_as_it_was(
    has_pipeline, autocommit, client, replica, key, monkeypatch
):
    monkeypatch.setattr(psycopg.Pipeline, "is_supported", lambda: has_pipeline)
    jobs = client(replica, caller="accounts", autocommit=autocommit)
    connection = jobs._source

    connection.execute("set client_encoding to latin1")

    with pytest.raises(UnicodeEncodeError):
        jobs.enqueue(*ENQUEUED, idempotency_key="\u20ac")

    assert role_in_force(connection) == "none" or not has_pipeline
    connection.rollback()
    assert role_in_force(connection) == "none"
    assert jobs.enqueue(*ENQUEUED, idempotency_key=key).created


def test_a_role_of_the_session_is_back_after_the_transaction(client, replica, key):
    jobs = client(replica, caller="accounts", autocommit=False)
    connection = jobs._source
    connection.execute('set role "email-worker"')
    connection.commit()

    jobs.enqueue(*ENQUEUED, idempotency_key=key)
    within = role_in_force(connection)
    connection.commit()

    assert within == role_in_force(connection) == "email-worker"


def test_a_role_set_in_the_transaction_outlives_a_call_and_the_commit(
    client, replica, key
):
    jobs = client(replica, caller="accounts", autocommit=False)
    connection = jobs._source
    connection.execute('set role "email-worker"')

    jobs.enqueue(*ENQUEUED, idempotency_key=key)
    connection.commit()

    assert role_in_force(connection) == "email-worker"


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_caller_the_login_is_not_a_member_of_is_unauthorized(autocommit, client, key):
    jobs = client("organization", caller="accounts", autocommit=autocommit)

    with pytest.raises(Unauthorized):
        jobs.enqueue(*ENQUEUED, idempotency_key=key)

    jobs._source.rollback()
    assert role_in_force(jobs._source) == "none"


def test_a_caller_that_is_not_a_role_passes_through_as_psycopg_s_own(owner, key):
    jobs = Jobs(owner, "jobs_email", caller=f"nobody_{uuid4().hex}")

    with pytest.raises(psycopg.errors.InvalidParameterValue):
        jobs.enqueue(*ENQUEUED, idempotency_key=key)


# The verbs and their results.


def test_enqueue_says_whether_this_call_created_the_job(producing, key):
    first = producing.enqueue(*ENQUEUED, idempotency_key=key)
    second = producing.enqueue(*ENQUEUED, idempotency_key=key)

    assert (first.created, second.created) == (True, False)
    assert first.job_id == second.job_id


def test_claim_returns_everything_a_worker_needs(producing, working, key):
    job = producing.enqueue(*ENQUEUED, idempotency_key=key, max_attempts=7)

    before = datetime.now(UTC)
    (lease,) = working.claim("email")

    assert lease.job_id == job.job_id
    assert (lease.queue, lease.kind) == ("email", "send")
    assert (lease.attempt, lease.max_attempts) == (1, 7)
    assert lease.payload == {"to": "ada"}
    assert lease.lease_token.startswith("job_lease_")
    assert lease.created_at <= before
    assert lease.lease_expires_at > before + timedelta(seconds=29)
    assert lease.lease_expires_at.tzinfo is lease.created_at.tzinfo is UTC


def test_claim_takes_up_to_the_limit_and_returns_an_empty_list_if_no_job_is_due(
    working, enqueue
):
    jobs = [enqueue() for _ in range(3)]

    first = working.claim("email", limit=2)
    second = working.claim("email", limit=1000)
    third = working.claim("email")

    assert [lease.job_id for lease in (*first, *second)] == jobs
    assert third == []


def test_renew_returns_the_new_end(working, leased):
    end = working.renew(leased)

    assert end > leased.lease_expires_at
    assert end.tzinfo is UTC


def test_complete_returns_true_also_when_repeated(working, leased):
    assert working.complete(leased) is True
    assert working.complete(leased) is True


def test_fail_returns_when_the_next_attempt_is_due(working, leased):
    failed = working.fail(leased, "smtp.timeout", retryable=True)

    assert failed.status == "queued"
    assert failed.available_at.tzinfo is UTC
    assert working.fail(leased, "smtp.timeout", retryable=True) == failed


@pytest.mark.parametrize("after", [2, 1.5, timedelta(seconds=1.5)])
def test_a_failure_is_retried_after_seconds_or_a_timedelta(
    after, working, enqueue, observing
):
    enqueue(), enqueue()
    first, second = working.claim("email", 2)

    failed = working.fail(first, "http_429", retryable=True, retry_after=after)
    (item,) = working.fail_many([(second, "http_429", True, after)])

    assert (failed.status, item.outcome) == ("queued", "queued")
    for lease in (first, second):
        (attempt,) = observing.inspect_attempts(lease.job_id)
        assert attempt.retry_at - attempt.ended_at == timedelta(seconds=2)


@pytest.mark.parametrize("after", [-1, math.nan, math.inf, "1", True, 2**40])
def test_a_malformed_wait_fails_nothing(after, working, leased):
    with pytest.raises(InvalidFailure, match="retry_after"):
        working.fail(leased, "http_429", retryable=True, retry_after=after)
    (item,) = working.fail_many([(leased, "http_429", True, after)])

    assert item.outcome == "invalid_failure"
    assert working.renew(leased)


def test_a_permanent_fail_returns_that_no_attempt_is_left(working, leased):
    failed = working.fail(leased, "address.unknown", retryable=False)

    assert (failed.status, failed.available_at) == ("failed", None)


def test_inspect_returns_the_evidence_by_uuid_and_by_text(observing, leased):
    job = observing.inspect(leased.job_id)

    assert (job.status, job.attempts, job.worker) == ("running", 1, "email-worker")
    assert (job.producer, job.queue, job.kind) == ("accounts", "email", "send")
    assert job.lease_expires_at == leased.lease_expires_at
    assert job.created_at.tzinfo is job.updated_at.tzinfo is UTC
    assert (job.ended_at, job.last_failure_code) == (None, None)
    assert observing.inspect(str(leased.job_id)) == job


def test_next_available_at_is_null_while_the_queue_is_empty(working, producing, key):
    empty = working.next_available_at("email")
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    producing.enqueue(*ENQUEUED, idempotency_key=key, available_at=tomorrow)

    assert empty is None
    assert working.next_available_at("email") == tomorrow
    assert working.next_available_at("email").tzinfo is UTC


def test_enqueue_many_returns_each_item_in_input_order(producing, key):
    first = producing.enqueue(*ENQUEUED, idempotency_key=key)

    items = producing.enqueue_many(
        [
            NewJob(*ENQUEUED, key),
            {
                "queue": "email",
                "kind": "send",
                "payload": {},
                "idempotency_key": f"{key}.a",
                "available_at": datetime(2040, 1, 1, tzinfo=UTC),
                "max_attempts": 9,
            },
            NewJob("email", "other", {}, key),
            NewJob("undeclared", "send", {}, f"{key}.b"),
        ]
    )

    assert [item.position for item in items] == [1, 2, 3, 4]
    assert [item.outcome for item in items] == [
        "existing",
        "created",
        "conflict",
        "invalid_job",
    ]
    assert items[0].job_id == first.job_id
    assert items[2].job_id is items[3].job_id is None


def test_enqueue_and_enqueue_many_mean_the_same_intent(producing, key):
    at = datetime(2040, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
    payload = {"text": "žluťoučký \\u0000 \u2028", "n": 10**300, "x": [1.5, None, True]}

    (item,) = producing.enqueue_many(iter([NewJob("email", "k", payload, key, at, 5)]))
    job = producing.enqueue(
        "email", "k", payload, idempotency_key=key, available_at=at, max_attempts=5
    )

    assert (item.outcome, job.created) == ("created", False)
    assert item.job_id == job.job_id


def test_renew_many_returns_each_item_in_input_order(working, leased, held):
    answers = working.renew_many([held(leased.job_id, "job_lease_no"), leased])

    assert [answer.outcome for answer in answers] == ["invalid_lease", "renewed"]
    assert [answer.position for answer in answers] == [1, 2]
    assert answers[0].lease_expires_at is None
    assert answers[1].lease_expires_at > leased.lease_expires_at
    assert answers[1].lease_expires_at.tzinfo is UTC


def test_complete_many_returns_each_item_in_input_order(working, leased, held):
    answers = working.complete_many(iter([held(uuid4(), "job_lease_no"), leased]))

    assert [answer.outcome for answer in answers] == ["invalid_lease", "completed"]
    assert answers[1].job_id == leased.job_id


def test_fail_many_takes_failures_and_plain_tuples(working, enqueue):
    for _ in range(3):
        enqueue()
    first, second, third = working.claim("email", limit=3)

    answers = working.fail_many(
        [
            Failure(first, "smtp.timeout", retryable=True),
            (second, "address.unknown", False),
            Failure(lease=third, failure_code="not a code", retryable=True),
        ]
    )

    assert [answer.outcome for answer in answers] == [
        "queued",
        "failed",
        "invalid_failure",
    ]
    assert answers[0].available_at.tzinfo is UTC
    assert answers[1].available_at is None


# What observers and operators read.


def test_inspect_attempts_tells_the_history_and_a_running_attempt_last(
    working, observing, enqueue, make_due
):
    job = enqueue()
    queued = observing.inspect_attempts(job)
    (first,) = working.claim("email")
    retry = working.fail(first, "smtp.timeout", retryable=True)
    make_due(job)
    (second,) = working.claim("email")

    ended, running = observing.inspect_attempts(str(job))

    assert queued == []
    assert (ended.attempt, ended.outcome, ended.worker) == (
        1,
        "retried",
        "email-worker",
    )
    assert (ended.failure_code, ended.retryable) == ("smtp.timeout", True)
    assert ended.retry_at == retry.available_at
    assert ended.leased_at <= ended.ended_at
    assert ended.leased_at.tzinfo is ended.ended_at.tzinfo is UTC
    assert (ended.lease_expires_at, ended.max_attempts) == (None, 3)
    assert (running.attempt, running.outcome) == (2, "running")
    assert running.lease_expires_at == second.lease_expires_at
    assert (running.ended_at, running.failure_code, running.retryable) == (None,) * 3


def test_inspect_queues_counts_states_ends_and_codes(
    working, observing, enqueue, fail, expire
):
    fail("smtp.timeout", number=2)
    enqueue(), enqueue()
    working.complete(*working.claim("email"))
    (lapsed,) = working.claim("email")
    expire(lapsed.job_id)
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    enqueue(available_at=tomorrow)
    enqueue()

    email, slow = observing.inspect_queues()

    assert (email.queue, email.is_declared, email.is_estimate) == ("email", True, False)
    assert (email.ready, email.scheduled, email.retry_waiting) == (1, 1, 0)
    assert (email.running, email.expired) == (0, 1)
    assert timedelta(0) < email.oldest_ready_age < timedelta(minutes=1)
    assert email.next_due_at == tomorrow
    assert email.oldest_lapse_at < email.next_due_at
    assert (email.succeeded, email.failed) == (1, 2)
    assert email.failure_codes == {"smtp.timeout": 2}
    assert email.counted_since.tzinfo is email.last_claimed_at.tzinfo is UTC
    assert (slow.queue, slow.ready, slow.failure_codes) == ("slow", 0, {})
    assert (slow.oldest_ready_age, slow.next_due_at, slow.workers_waiting) == (
        None,
        None,
        0,
    )


def test_inspect_workers_counts_leases_and_sessions(leased, observing):
    busy, idle = observing.inspect_workers()

    assert (busy.worker, busy.is_declared) == ("email-worker", True)
    assert (busy.leases, busy.expired, busy.sessions) == (1, 0, 1)
    assert busy.next_lease_expires_at == leased.lease_expires_at
    assert busy.oldest_leased_at < leased.lease_expires_at
    assert (idle.worker, idle.leases, idle.sessions) == ("spare-worker", 0, 0)
    assert (idle.oldest_leased_at, idle.next_lease_expires_at) == (None, None)


def test_inspect_key_finds_the_job_that_a_conflict_names(client, observing, enqueue):
    job = enqueue(key="order:1")
    producing = client("accounts")

    with pytest.raises(IdempotencyConflict) as conflict:
        producing.enqueue("email", "call", {}, idempotency_key="order:1")

    assert conflict.value.job_id == job
    assert producing.inspect_key("order:1") == producing.inspect(job)
    assert observing.inspect_key("order:1", producer="accounts").job_id == job
    with pytest.raises(JobNotFound):
        observing.inspect_key("order:1")


def test_inspect_jobs_lists_page_by_page(observing, enqueue, leased):
    first, second = enqueue(), enqueue()

    page = observing.inspect_jobs("email", "queued", limit=1)
    rest = observing.inspect_jobs("email", "queued", before=page.next_before)

    assert [[job.job_id for job in jobs] for jobs in (page, rest)] == [
        [second],
        [first],
    ]
    assert rest.next_before is None
    (running,) = observing.inspect_jobs(leased.queue, "running")
    assert running == observing.inspect(leased.job_id)
    assert observing.inspect_jobs("email", "queued", kind="other") == []


def test_a_page_that_the_server_cut_short_says_where_to_continue(
    observing, owner, enqueue
):
    wanted = enqueue(queue="slow")
    owner.execute(
        "insert into live_job (job_id, available_at, attempt, max_attempts, queue)"
        " select ('ffff' || right(gen_random_uuid()::text, -4))::uuid, now(), 0, 3, 'x'"
        " from generate_series(1, 10000)"
    )

    page = observing.inspect_jobs("slow", "queued")
    (job,) = observing.inspect_jobs("slow", "queued", before=page.next_before)

    assert page == []
    assert job.job_id == wanted


def test_a_paused_queue_gives_out_jobs_again_once_it_is_resumed(
    operating, working, enqueue, conninfo
):
    job = enqueue()
    assert operating.pause("email") is True
    assert working.claim("email") == []
    assert working.wait("email", 0) is False
    assert working.next_available_at("email") is None
    assert operating.inspect_queues()[0].paused_at < datetime.now(UTC)

    with ThreadPoolExecutor() as threads:
        claimed = threads.submit(working.claim, "email", wait=30)
        while not operating.inspect_queues()[0].workers_waiting:
            pass
        assert operating.resume("email") is True

    (lease,) = claimed.result()
    assert lease.job_id == job


def test_erase_deletes_an_ended_job(operating, working, leased):
    with pytest.raises(InvalidArgument, match="has not ended"):
        operating.erase(leased.job_id)
    working.complete(leased)

    assert operating.erase(leased.job_id) is True
    with pytest.raises(JobNotFound):
        operating.inspect(leased.job_id)


def test_inspect_failures_goes_on_after_the_last_row_of_a_page(observing, fail, owner):
    expected = {*fail(number=3)}
    # Their ids alone tell them apart.
    owner.execute("update attempt set ended_at = (select max(ended_at) from attempt)")
    expected |= {*fail("address.unknown")}

    pages = [observing.inspect_failures(limit=1)]
    while pages[-1]:
        pages.append(observing.inspect_failures("email", limit=1, before=pages[-1][0]))
    rows = [row for page in pages for row in page]

    assert len(rows) == 4
    assert {row.job_id for row in rows} == expected
    assert (rows[0].failure_code, rows[0].attempts) == ("address.unknown", 1)
    assert (rows[0].queue, rows[0].kind) == ("email", "send")
    assert rows[0].worker == "email-worker"
    assert rows == sorted(rows, key=lambda row: (row.ended_at, row.job_id))[::-1]


def test_inspect_failures_keeps_to_a_time_and_a_code(observing, fail):
    fail()
    fail("address.unknown")
    newest, oldest = observing.inspect_failures()

    ask = observing.inspect_failures
    assert ask(since=newest.ended_at) == [newest]
    assert ask(before=newest.ended_at) == [oldest]
    assert ask(failure_code="smtp.timeout") == [oldest]
    assert ask("slow") == []


def test_inspect_acts_reads_the_audit_page_by_page(
    operating, observing, fail, prefix, enqueue, working, expire
):
    (job,) = fail()
    operating.redrive(job, 2)
    enqueue(queue="slow", max_attempts=1)
    (lapsed,) = working.claim("slow")
    expire(lapsed.job_id)
    operating.retire_expired()

    (last,) = observing.inspect_acts(1)
    first, configured = observing.inspect_acts(limit=9, before=last)

    assert (last.act, last.job_count, last.arguments) == (
        "retire_expired",
        1,
        {"limit": 1000},
    )
    assert (first.act, first.job_count, first.operator) == (
        "redrive",
        1,
        f"{prefix}_duty",
    )
    assert first.arguments == {"job_id": str(job), "extra_attempts": 2}
    assert first.acted_at.tzinfo is UTC
    assert configured.act == "configure"
    assert observing.inspect_acts(before=first) == [configured]
    assert observing.inspect_acts(before=configured) == []


def test_inspect_health_lists_each_fault(observing, owner):
    well = observing.inspect_health()
    owner.execute("alter table live_job set (autovacuum_enabled = off)")

    (finding,) = observing.inspect_health()

    assert well == []
    assert (finding.severity, finding.finding) == ("critical", "autovacuum_off")
    assert (finding.subject, finding.since) == ("live_job", None)
    assert finding.detail == "has autovacuum_enabled off"
    assert finding.remedy


@pytest.mark.parametrize("threshold", [0, None])
def test_a_later_release_may_add_to_a_result_while_clients_run(
    leased, connect, owner, threshold
):
    connection = connect("operations")
    connection.prepare_threshold = threshold
    jobs = Jobs(connection, "jobs_email")
    before = jobs.explain_job(leased.job_id)

    owner.execute("alter type explained_job add attribute note text")

    assert jobs.explain_job(leased.job_id) == before
    calls = [call for call in vars(_calls).values() if isinstance(call, _calls.Call)]
    assert len(calls) > 25
    assert not [call for call in calls if b"*" in call.statement("jobs_email")]


def test_explain_job_gives_the_reason_with_its_facts(leased, observing):
    held = observing.explain_job(leased.job_id)
    unknown = observing.explain_job(str(uuid4()))

    assert (held.reason, held.queue, held.who) == ("leased", "email", "email-worker")
    assert held.until == leased.lease_expires_at
    assert (held.attempt, held.max_attempts) == (1, 3)
    assert held.meaning == "A worker holds the lease of the job."
    assert (unknown.reason, unknown.queue, unknown.ahead) == (
        "purged_or_unknown",
        None,
        None,
    )


# What operators do.


def test_redrive_returns_that_the_job_is_due(operating, fail):
    (job,) = fail()

    again = operating.redrive(str(job), extra_attempts=2)

    assert again.status == "queued"
    assert again.available_at.tzinfo is UTC
    assert (operating.inspect(job).status, operating.inspect(job).max_attempts) == (
        "queued",
        3,
    )


def test_redrive_failed_takes_the_selected_jobs_and_returns_their_number(
    operating, fail, owner
):
    (early,) = fail("smtp.timeout")
    since = owner.value("select clock_timestamp()")
    first, second = fail("smtp.timeout", number=2)
    other = fail("address.unknown")
    before = owner.value("select clock_timestamp()")
    late = fail("smtp.timeout")

    def redrive(**changes):
        options = {"since": since, "before": before, "failure_code": "smtp.timeout"}
        return operating.redrive_failed("email", **options | changes)

    counts = [redrive(limit=1), redrive(extra_attempts=7), redrive()]

    assert counts == [1, 1, 0]
    assert {row.job_id for row in operating.inspect_failures()} == {
        early,
        *other,
        *late,
    }
    assert {operating.inspect(job).max_attempts for job in (first, second)} == {2, 8}


def test_purge_and_enforce_retention_return_the_number_of_jobs(
    operating, fail, configure, owner
):
    configure(retention_seconds=60)
    jobs = fail(number=3)
    owner.execute(
        "update attempt set ended_at = ended_at - interval '61 s',"
        " leased_at = leased_at - interval '61 s' where job_id = %s",
        (jobs[0],),
    )

    retained = [operating.enforce_retention(), operating.enforce_retention(limit=5)]
    now = owner.value("select clock_timestamp()")
    counts = [operating.purge(now, limit=1), operating.purge(now), operating.purge(now)]

    assert retained == [1, 0]
    assert counts == [1, 1, 0]


def test_retire_expired_returns_the_number_of_jobs(operating, working, enqueue, expire):
    job = enqueue(max_attempts=1)
    working.claim("email")
    expire(job)

    counts = [operating.retire_expired(limit=1), operating.retire_expired()]

    assert counts == [1, 0]
    assert operating.inspect(job).last_failure_code == "attempts_exhausted"


NAIVE = datetime(2040, 1, 1)  # noqa: DTZ001 - what is refused


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda jobs: jobs.inspect_failures(since=NAIVE), "since"),
        (lambda jobs: jobs.inspect_failures(before=NAIVE), "before"),
        (lambda jobs: jobs.redrive_failed("email", since=NAIVE), "since"),
        (
            lambda jobs: jobs.redrive_failed(
                "email", since=datetime.now(UTC), before=NAIVE
            ),
            "before",
        ),
        (lambda jobs: jobs.purge(NAIVE), "before"),
        (lambda jobs: jobs.purge("2040-01-01"), "before"),
        (lambda jobs: jobs.inspect_acts(before=7), "before"),
        (lambda jobs: jobs.inspect_acts(limit=True), "limit"),
        (lambda jobs: jobs.redrive(uuid4(), extra_attempts=1.5), "extra_attempts"),
        (lambda jobs: jobs.retire_expired("1"), "limit"),
    ],
)
def test_a_bad_argument_is_refused_before_any_sql(call, argument, working):
    working._source.close()

    with pytest.raises(InvalidArgument, match=f"^{argument} must be "):
        call(working)


@pytest.mark.parametrize(
    "call",
    [
        lambda jobs: jobs.inspect_queues(),
        lambda jobs: jobs.explain_job(uuid4()),
        lambda jobs: jobs.retire_expired(),
    ],
)
def test_a_worker_neither_looks_around_nor_operates(call, working):
    with pytest.raises(Unauthorized):
        call(working)


# Times.


@pytest.mark.parametrize(
    ("style", "zone"),
    [
        ("ISO, DMY", "UTC"),
        ("SQL, DMY", "Pacific/Kiritimati"),
        ("German", "America/St_Johns"),
        ("Postgres, MDY", "Asia/Kathmandu"),
    ],
)
def test_times_are_the_same_under_every_timezone_and_datestyle(
    style, zone, client, key
):
    jobs = client("accounts")
    jobs._source.execute("select set_config('DateStyle', %s, false)", (style,))
    jobs._source.execute("select set_config('TimeZone', %s, false)", (zone,))
    at = datetime(2040, 2, 3, 4, 5, 6, 789012, tzinfo=UTC)

    job = jobs.enqueue(*ENQUEUED, idempotency_key=key, available_at=at)
    (item,) = jobs.enqueue_many([NewJob(*ENQUEUED, key, at)])
    answer = jobs.inspect(job.job_id)

    assert answer.available_at == at
    assert answer.available_at.tzinfo is UTC
    assert item.outcome == "existing"


def test_the_last_microsecond_of_the_year_9999_is_read_in_every_timezone(client, key):
    jobs = client("accounts")
    jobs._source.execute("set timezone = 'Pacific/Kiritimati'")
    at = datetime.max.replace(tzinfo=UTC)

    job = jobs.enqueue(*ENQUEUED, idempotency_key=key, available_at=at)

    assert jobs.inspect(job.job_id).available_at == at


# What the application does to its connection or to psycopg changes nothing.


def test_a_payload_is_decoded_only_when_asked_for_and_strands_no_neighbour(
    working, enqueue, owner
):
    hopeless, fine = enqueue(), enqueue(payload={"to": "ada"})
    owner.execute(
        "update job set payload = jsonb_build_object('n', repeat('9', 5000)::numeric)"
        " where job_id = %s",
        (hopeless,),
    )

    first, second = working.claim("email", limit=2)

    assert second.payload == {"to": "ada"}
    assert second.job_id == fine
    with pytest.raises(PayloadUndecodable):
        _ = first.payload
    assert working.complete(first)


def test_a_payload_is_decoded_once(working, enqueue):
    enqueue(payload={"list": [1]})
    (lease,) = working.claim("email")

    lease.payload["list"].append(2)

    assert lease.payload == {"list": [1, 2]}
    assert json.loads(lease.payload_json) == {"list": [1]}


def test_json_loads_set_by_the_application_changes_nothing(working, enqueue):
    def refuse(_):
        raise AssertionError("the application's decoder was called")

    enqueue(payload={"to": "ada"})
    set_json_loads(refuse, working._source)

    (lease,) = working.claim("email")

    assert lease.payload == {"to": "ada"}


def test_the_connection_keeps_its_own_loaders(working, leased):
    working.renew(leased)

    row = working._source.execute("select '{\"a\": 1}'::jsonb").fetchone()

    assert row == ({"a": 1},)


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "WIN1252"])
def test_a_payload_is_read_in_every_encoding_of_the_connection(
    encoding, client, enqueue
):
    enqueue(payload={"to": "Zoë"})
    worker = client("email-worker", client_encoding=encoding)

    (lease,) = worker.claim("email")

    assert lease.payload == {"to": "Zoë"}


APPLICATION = {
    "dictionaries for rows": {"row_factory": dict_row},
    "binding on the client": {"cursor_factory": psycopg.ClientCursor},
    "no prepared statements": {"prepare_threshold": None},
    "prepared at once": {"prepare_threshold": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("acting", [True, False])
@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize("habit", APPLICATION)
def test_every_verb_works_on_a_connection_with(
    habit, acting, autocommit, connect, replica, key
):
    def client(name):
        connection = connect(replica if acting else name)
        for attribute, value in APPLICATION[habit].items():
            setattr(connection, attribute, value)
        connection.autocommit = autocommit
        return Jobs(connection, "jobs_email", caller=name if acting else None)

    producer, worker = client("accounts"), client("email-worker")
    for number in range(2):
        job = producer.enqueue(*ENQUEUED, idempotency_key=f"{key}.{number}")
        producer.enqueue_many([NewJob(*ENQUEUED, f"{key}.many.{number}")])
        producer._source.commit()
        first, second = worker.claim("email", limit=2)
        worker.renew(first)
        worker.renew_many([second])
        worker.complete(first)
        worker.fail(second, "smtp.timeout", retryable=False)
        worker.complete_many([first])
        worker.fail_many([(second, "smtp.timeout", False)])
        worker._source.commit()

        evidence = producer.inspect(job.job_id)
        due = worker.next_available_at("email")

        assert (evidence.status, due) == ("succeeded", None)


@pytest.mark.parametrize("factory", APPLICATION)
@pytest.mark.parametrize("autocommit", [True, False])
def test_a_pool_of_such_connections_works_too(factory, autocommit, pool, replica, key):
    connections = pool(replica, autocommit=autocommit, **APPLICATION[factory])
    producer = Jobs(connections, "jobs_email", caller="accounts")
    worker = Jobs(connections, "jobs_email", caller="email-worker")

    producer.enqueue(*ENQUEUED, idempotency_key=key)
    (lease,) = worker.claim("email")

    assert worker.complete(lease)


def test_a_pipeline_of_the_application_s_is_joined(client, replica, key, state):
    jobs = client(replica, caller="accounts", autocommit=False)
    before = state()

    with jobs._source.pipeline():
        job = jobs.enqueue(*ENQUEUED, idempotency_key=key)
        jobs._source.rollback()

    assert job.created
    assert state() == before


def test_the_schema_may_have_any_name_and_is_quoted(owner):
    jobs = Jobs(owner, 'no "such" schema')

    with pytest.raises(psycopg.errors.InvalidSchemaName):
        jobs.claim("email")


def test_legal_look_alikes_of_an_escaped_nul_are_stored_unchanged(
    producing, working, key
):
    payload = {
        "text": "\\u0000",
        "more": "\\\\u0000 \\\\\\u0000",
        "\\u0000": 1,
        "surrogate": "\\ud800",
    }

    producing.enqueue("email", "send", payload, idempotency_key=key)
    producing.enqueue_many([NewJob("email", "send", payload, f"{key}.many")])

    assert [lease.payload for lease in working.claim("email", limit=2)] == [payload] * 2


def test_big_integers_are_exact(producing, working, key):
    payload = {"n": 2**1000 + 1, "minus": -(10**300) - 7}

    producing.enqueue("email", "send", payload, idempotency_key=key)
    producing.enqueue_many([NewJob("email", "send", payload, f"{key}.many")])

    assert [lease.payload for lease in working.claim("email", limit=2)] == [payload] * 2


def test_a_payload_at_the_deepest_is_stored(producing, working, key):
    payload = {"list": []}
    for _ in range(126):
        payload = {"deeper": payload}

    producing.enqueue("email", "send", payload, idempotency_key=key)
    (lease,) = working.claim("email")

    assert lease.payload == payload


def test_brackets_within_text_count_for_no_depth(producing, working, key):
    payload = {"text": "[{" * 500 + '"\\' + "[" * 500, "[" * 200: "\\"}

    producing.enqueue("email", "send", payload, idempotency_key=key)
    (lease,) = working.claim("email")

    assert lease.payload == payload


def test_json_s_own_conveniences_work(producing, working, key):
    producing.enqueue("email", "send", {1: (2, 3)}, idempotency_key=key)

    (lease,) = working.claim("email")

    assert lease.payload == {"1": [2, 3]}
    assert json.loads(lease.payload_json) == lease.payload
