"""The fault: PUBLIC can execute.

A role can call what is on its list and nothing else, after every migration.

Every function, table, view and type, for every role, in SQL: security/test_grants.py and
test_catalogue.py.
"""

from types import SimpleNamespace
from uuid import uuid4

import psycopg
import pytest

ITEM = {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": "many"}
CALLS = {
    "enqueue": lambda jobs, _: jobs.enqueue("email", "send", {}, idempotency_key="one"),
    "enqueue_many": lambda jobs, _: jobs.enqueue_many([ITEM]),
    "claim": lambda jobs, _: jobs.claim("email"),
    "renew": lambda jobs, lease: jobs.renew(lease),
    "renew_many": lambda jobs, lease: jobs.renew_many([lease]),
    "complete": lambda jobs, lease: jobs.complete(lease),
    "complete_many": lambda jobs, lease: jobs.complete_many([lease]),
    "fail": lambda jobs, lease: jobs.fail(lease, "down", retryable=True),
    "fail_many": lambda jobs, lease: jobs.fail_many([(lease, "down", True)]),
    "release": lambda jobs, lease: jobs.release(lease),
    "release_many": lambda jobs, lease: jobs.release_many([lease]),
    "inspect": lambda jobs, lease: jobs.inspect(lease.job_id),
    "next_available_at": lambda jobs, _: jobs.next_available_at("email"),
}
MAY_CALL = {
    "accounts": {"enqueue", "enqueue_many", "inspect"},
    "email-worker": CALLS.keys() - {"enqueue", "enqueue_many"},
    "operations": {"inspect"},
    "stranger": set(),
}


@pytest.mark.parametrize("role", MAY_CALL)
def test_a_client_may_call_what_its_role_may_and_nothing_else(role, client, state):
    jobs = client(role)
    lease = SimpleNamespace(job_id=uuid4(), lease_token=f"job_lease_{'0' * 64}")
    before = state()

    answers = {}
    for name, call in CALLS.items():
        try:
            call(jobs, lease)
        except Exception as error:  # noqa: BLE001 - by its code
            answers[name] = error.sqlstate
        else:
            answers[name] = "answered"

    assert {n for n, answer in answers.items() if answer != "42501"} == MAY_CALL[role]
    assert set(answers.values()) <= {"answered", "42501", "LJ004", "LJ006"}
    assert role == "accounts" or state() == before


# List what PUBLIC may do, and the objects without an access list, on which it has the default privileges.
OPEN_TO_ALL = """
    select o.name, g.privilege_type
    from (
        select proname, coalesce(proacl, acldefault('f', proowner))
        from pg_proc where pronamespace = 'jobs_email'::regnamespace
        union all
        select relname, relacl
        from pg_class where relnamespace = 'jobs_email'::regnamespace
        union all
        select typname, coalesce(typacl, acldefault('T', typowner))
        from pg_type where typnamespace = 'jobs_email'::regnamespace and typelem = 0
        union all
        select nspname, nspacl from pg_namespace where nspname = 'jobs_email'
    ) as o (name, acl)
    cross join aclexplode(o.acl) as g
    where g.grantee = 0
"""


@pytest.mark.slow
def test_public_may_do_nothing_after_any_migration(
    databases, instance_of, bootstrap, migrate
):
    instance, conninfo = instance_of(), databases()

    with psycopg.connect(conninfo, autocommit=True) as connection:
        bootstrap(connection, instance.document())
        for name in migrate(instance, conninfo):
            assert connection.execute(OPEN_TO_ALL).fetchall() == [], name
        granted = connection.execute(
            "select g.grantee::regrole::text, p.proname from pg_proc as p"
            " cross join aclexplode(p.proacl) as g"
            " where p.pronamespace = 'jobs_email'::regnamespace"
        ).fetchall()

    for kind, role, beside in (
        ("producer", "accounts", {"inspect_key"}),
        ("worker", "email-worker", {"wait_key"}),
    ):
        names = {
            name for group, name in granted if group == f"{instance.prefix}_{kind}"
        }
        assert names == MAY_CALL[role] | beside
