"""The row of ``instance`` is missing: what needs the policy is refused, changing nothing."""

import json

import pytest

LEASE = "%(job_id)s, %(token)s"
LEASES = "array[%(job_id)s]::uuid[], array[%(token)s]"
ITEM = json.dumps(
    [{"queue": "email", "kind": "send", "payload": {}, "idempotency_key": "new"}]
)
NEEDS_POLICY = {
    "enqueue": ("accounts", "enqueue('email', 'send', '{}', 'new')"),
    "enqueue of an existing job": (
        "accounts",
        "enqueue('email', 'send', '{}', 'leased')",
    ),
    "enqueue of a malformed job": ("accounts", "enqueue('a b', 'send', '{}', 'new')"),
    "enqueue_many": ("accounts", f"enqueue_many('{ITEM}')"),
    "claim": ("email-worker", "claim('email')"),
    "claim of many": ("email-worker", "claim('email', 10)"),
    "renew": ("email-worker", f"renew({LEASE})"),
    "renew_many": ("email-worker", f"renew_many({LEASES})"),
    "fail, retryable": ("email-worker", f"fail({LEASE}, 'timeout', true)"),
    "fail_many, retryable": (
        "email-worker",
        (
            "fail_many(array[%(other_id)s, %(job_id)s]::uuid[],"
            " array[%(other_token)s, %(token)s], array['timeout', 'timeout'],"
            " array[false, true])"
        ),
    ),
    "release": ("email-worker", f"release({LEASE})"),
    "release_many": ("email-worker", f"release_many({LEASES}, array[0])"),
    "wait_key": ("email-worker", "wait_key('email')"),
    "pause": ("operator", "pause('email')"),
    "resume": ("operator", "resume('email')"),
    "redrive": ("operator", "redrive(%(failed_id)s)"),
    "redrive_failed": ("operator", "redrive_failed('email', '2020-01-01')"),
    "enforce_retention": ("operator", "enforce_retention()"),
}
NEEDS_NONE = {
    "complete": ("email-worker", f"complete({LEASE})"),
    "complete_many": ("email-worker", f"complete_many({LEASES})"),
    "fail, final": ("email-worker", f"fail({LEASE}, 'timeout', false)"),
    "fail_many, final": (
        "email-worker",
        f"fail_many({LEASES}, array['timeout'], array[false])",
    ),
    "next_available_at": ("email-worker", "next_available_at('email')"),
    "inspect": ("accounts", "inspect(%(job_id)s)"),
    "inspect_key": ("accounts", "inspect_key('queued')"),
    "inspect_jobs": ("operator", "inspect_jobs('email', 'failed')"),
    "erase": ("operator", "erase(%(failed_id)s)"),
    "inspect_attempts": ("operator", "inspect_attempts(%(job_id)s)"),
    "inspect_queues": ("operator", "inspect_queues()"),
    "inspect_workers": ("operator", "inspect_workers()"),
    "inspect_failures": ("operator", "inspect_failures('email')"),
    "inspect_acts": ("operator", "inspect_acts()"),
    "inspect_health": ("operator", "inspect_health()"),
    "explain_job": ("operator", "explain_job(%(job_id)s)"),
    "purge": ("operator", "purge('2020-01-01')"),
    "retire_expired": ("operator", "retire_expired()"),
}


@pytest.fixture
def jobs(owner, enqueue, claim, worker):
    """Two leased jobs, a failed one and a queued one, and no policy."""
    held = {}
    for name in ("failed", "leased", "other"):
        enqueue(key=name)
        held[name] = claim()
    worker.execute("select fail(%s, %s, 'timeout', false)", held.pop("failed"))
    enqueue(key="queued")
    failed = owner.value("select job_id from job where idempotency_key = 'failed'")
    owner.execute("set session_replication_role = replica")
    owner.execute("delete from instance")
    owner.execute("reset session_replication_role")
    (job_id, token), (other_id, other_token) = held["leased"], held["other"]
    return {
        "job_id": job_id,
        "token": token,
        "failed_id": failed,
        "other_id": other_id,
        "other_token": other_token,
    }


@pytest.fixture
def call(connect, prefix, jobs):
    """Call a function as one of its callers; returns the session."""

    def call(role, statement):
        session = connect(f"{prefix}_duty" if role == "operator" else role)
        return session, f"select * from {statement}", jobs

    return call


@pytest.mark.parametrize("verb", NEEDS_POLICY)
def test_a_verb_that_needs_the_policy_is_refused_and_changes_nothing(verb, call, state):
    session, statement, arguments = call(*NEEDS_POLICY[verb])
    before = state()

    with session.refusing("LJ008") as caught:
        session.execute(statement, arguments)

    assert caught.value.diag.message_primary == "no policy is stored in this Instance"
    assert "lenso-jobs configure" in caught.value.diag.message_hint
    assert state() == before


@pytest.mark.sampled
@pytest.mark.parametrize("verb", NEEDS_NONE)
def test_a_verb_that_needs_no_policy_works_without_one(verb, call):
    session, statement, arguments = call(*NEEDS_NONE[verb])

    session.execute(statement, arguments)


def test_a_job_ends_without_a_policy_and_leaves_its_evidence(worker, owner, jobs):
    worker.execute("select complete(%(job_id)s, %(token)s)", jobs)
    worker.execute("select fail(%(other_id)s, %(other_token)s, 'c', false)", jobs)

    assert owner.rows(
        "select outcome from attempt where job_id in (%s, %s) order by 1",
        jobs["job_id"],
        jobs["other_id"],
    ) == [("failed",), ("succeeded",)]


def test_every_granted_function_is_tried_without_a_policy(owner, prefix):
    granted = {
        name
        for (name,) in owner.rows(
            "select p.proname from pg_proc as p, aclexplode(p.proacl) as a"
            " where p.pronamespace = 'jobs_email'::regnamespace"
            " and a.grantee::regrole::text like %s and a.grantee <> p.proowner",
            f"%{prefix}%",
        )
    }

    tried = [*NEEDS_POLICY.values(), *NEEDS_NONE.values()]
    assert {call.partition("(")[0] for _, call in tried} == granted


@pytest.mark.parametrize(
    "statement",
    [
        "delete from instance",
        "truncate instance",
        "truncate instance, queue",
        "delete from instance where is_only",
    ],
)
def test_the_policy_row_cannot_be_deleted(owner, statement):
    with owner.refusing("LJ007") as caught:
        owner.execute(statement)

    assert "lenso-jobs uninstall" in caught.value.diag.message_hint
    assert owner.value("select count(*) from instance") == 1


def test_a_policy_that_is_restored_serves_again(owner, enqueue, jobs, document):
    owner.execute("select configure(%s::jsonb)", (document(),))

    assert enqueue(key="again")
