"""The fault: a NULL argument loses work.

An optional NULL means its default. Any other NULL is refused by name, and nothing is
written.
"""

from types import SimpleNamespace

import psycopg
import pytest

FIELDS = {
    "queue": "email",
    "kind": "send",
    "payload": {},
    "idempotency_key": "k",
    "available_at": None,
    "max_attempts": 3,
}
REQUIRED = [name for name in FIELDS if name != "available_at"]


def without(field):
    return FIELDS | {field: None}


def test_enqueue_refuses_every_null_but_the_schedule(client, refused, state):
    jobs = client("accounts")
    before = state()

    for field in REQUIRED:
        with refused("LJ001") as caught:
            jobs.enqueue(**without(field))
        assert field in str(caught.value)

    assert state() == before
    assert jobs.enqueue(**FIELDS).created
    assert jobs.enqueue(**FIELDS).created is False


def test_enqueue_many_refuses_the_items_with_a_null_and_no_other(
    client, refused, owner
):
    jobs = client("accounts")

    with refused("LJ007"):
        jobs.enqueue_many([])
    items = jobs.enqueue_many([*map(without, REQUIRED), None, FIELDS])

    assert [item.position for item in items] == [*range(1, 8)]
    assert [item.outcome for item in items] == ["invalid_job"] * 6 + ["created"]
    assert [item.job_id for item in items[:6]] == [None] * 6
    assert owner.rows("select job_id from job") == [(items[6].job_id,)]


@pytest.fixture
def leases(enqueue, client):
    """A lease, one without a job, one without a token, and one without either."""
    enqueue()
    (lease,) = client("email-worker").claim("email")
    job_id, token = lease.job_id, lease.lease_token
    return [
        SimpleNamespace(job_id=job_id, lease_token=token)
        for job_id, token in (
            (job_id, token),
            (None, token),
            (job_id, None),
            (None,) * 2,
        )
    ]


def test_no_verb_of_a_worker_takes_null(client, leases, refused, state):
    worker = client("email-worker")
    lease, *broken = leases
    before = state()

    with refused("LJ003"):
        worker.claim(None)
    with refused("LJ003"):
        worker.next_available_at(None)
    with refused("LJ007"):
        worker.claim("email", None)
    for each in broken:
        for call in (
            worker.renew,
            worker.complete,
            lambda each: worker.fail(each, "down", retryable=True),
        ):
            with refused("LJ004"):
                call(each)
    for code, retryable in ((None, True), ("down", None), (None, None)):
        with refused("LJ005"):
            worker.fail(lease, code, retryable=retryable)
    with refused("LJ006"):
        worker.inspect(None)

    assert state() == before


def test_batches_refuse_the_leases_with_a_null_and_no_other(client, leases, state):
    worker = client("email-worker")
    lease, *broken = leases
    before = state()

    ended = worker.complete_many(broken)
    failed = worker.fail_many(
        [
            *((each, "down", True) for each in broken),
            (lease, None, True),
            (lease, "down", None),
        ]
    )
    unchanged = state() == before
    renewed = worker.renew_many(leases)

    assert unchanged
    assert [item.outcome for item in ended] == ["invalid_lease"] * 3
    assert [item.outcome for item in failed] == [
        *["invalid_lease"] * 3,
        *["invalid_failure"] * 2,
    ]
    assert [item.outcome for item in renewed] == ["renewed"] + ["invalid_lease"] * 3
    assert [item.lease_expires_at for item in renewed[1:]] == [None] * 3


@pytest.mark.parametrize("way", ["sync", "async"])
def test_none_is_not_a_batch_and_not_a_lease(client, refused):
    worker = client("email-worker")

    with refused("LJ001"):
        client("accounts").enqueue_many(None)
    for many in (worker.renew_many, worker.complete_many, worker.fail_many):
        with refused("LJ007"):
            many(None)
    for one in (worker.renew, worker.complete):
        with refused("LJ004"):
            one(None)
    with refused("LJ004"):
        worker.fail(None, "down", retryable=True)


# By the type of a parameter, something that is not NULL.
VALUES = {
    "text": "email",
    "jsonb": "{}",
    "timestamp with time zone": "2001-01-01",
    "integer": "1",
    "bigint": "1",
    "boolean": "true",
    "uuid": "{00000000-0000-7000-8000-000000000000}",
    "text[]": "{email}",
    "boolean[]": "{true}",
    "integer[]": "{0}",
    "uuid[]": "{00000000-0000-7000-8000-000000000000}",
}
ROLES = {"enqueue": "accounts", "enqueue_many": "accounts", "claim": "email-worker"}


def test_every_function_refuses_every_null_that_is_not_a_default(owner):
    parameters = owner.rows(
        "select p.proname, array_agg(format_type(a.type, null) order by a.ordinality),"
        " array_agg(a.name order by a.ordinality), array_agg(coalesce("
        "  pg_get_function_arg_default(p.oid, a.ordinality::integer) like 'NULL::%',"
        "  false) order by a.ordinality)"
        " from pg_proc as p, unnest(p.proargtypes::oid[], p.proargnames)"
        "  with ordinality as a (type, name, ordinality)"
        " where p.pronamespace = 'jobs_email'::regnamespace and a.type is not null"
        " and left(p.proname, 1) <> '_' group by p.oid, p.proname"
    )
    optional = set()

    def code(call, values):
        try:
            owner.execute(f"select * from {call}", values)
        except psycopg.Error as error:
            return error.sqlstate
        return None

    for function, types, names, may_be_null in parameters:
        owner.execute(f'set role "{ROLES.get(function, owner.info.user)}"')
        arguments = ", ".join(
            f"{name} => %s::{kind}" for name, kind in zip(names, types, strict=True)
        )
        for n, name in enumerate(names):
            values = [None if i == n else VALUES[kind] for i, kind in enumerate(types)]
            sqlstate = code(f"{function}({arguments})", values)
            if sqlstate is None:
                optional.add((function, name))
                assert may_be_null[n], (function, name)
            else:
                assert sqlstate.startswith("LJ"), (function, name, sqlstate)

    assert len(parameters) > 12
    assert ("enqueue", "p_available_at") in optional
    assert (
        owner.value(
            "select count(*) from pg_proc where proisstrict and"
            " pronamespace = 'jobs_email'::regnamespace and left(proname, 1) <> '_'"
        )
        == 0
    )


def test_the_length_of_a_lease_cannot_be_null(configure, owner, refused):
    before = owner.rows("select * from instance")

    for field in ("lease_seconds", "retry_base_seconds", "retry_max_seconds"):
        with refused("LJ007"):
            configure(**{field: None})

    assert owner.rows("select * from instance") == before
