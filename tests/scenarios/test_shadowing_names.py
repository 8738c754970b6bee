"""The fault: shadowing names.

A caller's own names and settings change nothing.

Through SQL, and with every kind of name and setting: security/test_shadowing.py.
"""

import pytest

SHADOWS = """
    create temp table job (job_id uuid);
    create temp table live_job (job_id uuid);
    create temp table attempt (job_id uuid);
    create temp table instance (producers text[], workers text[], queues text[]);
    insert into instance values (array['nobody'], array['nobody'], array['nowhere']);
    create temp table caller (caller text);
    create type pg_temp.leased_job as enum ('shadow')
"""
# Where the path does not name pg_temp, its types come before PostgreSQL's own, and break
# every cast that a session writes, those of the client too.
BUILT_IN = """;
    create domain pg_temp.timestamptz as bytea;
    create domain pg_temp.uuid as bytea;
    create domain pg_temp.jsonb as bytea
"""
PATHS = ("pg_temp, evil, jobs_email", "evil, pg_catalog", '"$user", evil')


@pytest.fixture
def evil(owner):
    """Functions, operators and casts with other results, and schemas of the callers."""
    owner.execute(
        "create schema evil; grant usage on schema evil to public;"
        " create table evil.job (); grant select on evil.job to public;"
        " create function evil.clock_timestamp() returns timestamptz language sql"
        "  as $$ select 'infinity'::timestamptz $$;"
        " create function evil.sha256(bytea) returns bytea language sql"
        "  as $$ select ''::bytea $$;"
        " create function evil.enqueue(text, text, jsonb, text, timestamptz, integer)"
        "  returns integer language sql as 'select 7';"
        " create function evil.claim(text, integer) returns integer language sql"
        "  as 'select 7';"
        " create function evil.eq(text, text) returns boolean language sql"
        "  as 'select false';"
        " create operator evil.= (leftarg = text, rightarg = text, function = evil.eq);"
        ' create schema accounts authorization "accounts";'
        ' create schema "email-worker" authorization "email-worker";'
        ' create table "email-worker".live_job ();'
        ' alter table "email-worker".live_job owner to "email-worker"'
    )


def life(producer, worker):
    """Walk through a job's life, and tell what each step answered."""
    first = producer.enqueue("email", "send", {"n": 1}, idempotency_key="k")
    yield first.created
    yield producer.enqueue("email", "send", {"n": 1}, idempotency_key="k") == (
        type(first)(first.job_id, created=False)
    )
    item = {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": "m"}
    yield [x.outcome for x in producer.enqueue_many([item, item])]
    one, other = worker.claim("email", 5)
    yield one.payload, one.attempt, other.payload
    yield worker.renew(one) > one.lease_expires_at
    yield [x.outcome for x in worker.renew_many([one, other])]
    yield worker.fail(other, "down", retryable=True).status
    yield worker.complete(one), worker.complete(one)
    yield worker.claim("email")
    yield worker.inspect(other.job_id).last_failure_code
    yield worker.next_available_at("email") is not None


EXPECTED = [
    *(True, True, ["created", "existing"], ({"n": 1}, 1, {}), True),
    *(["renewed", "renewed"], "queued", (True, True), [], "down", True),
]


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("path", PATHS)
def test_names_of_the_sessions_own_are_not_used(path, evil, client, shadowed):
    producer, worker = (client(name) for name in ("accounts", "email-worker"))
    shadows = SHADOWS + BUILT_IN if "pg_temp" in path else SHADOWS
    for jobs in (producer, worker):
        shadowed(jobs, f"{shadows}; set search_path = {path}")

    assert list(life(producer, worker)) == EXPECTED


@pytest.fixture
def shadowed():
    """Execute statements on the connection that a client stands on."""

    def shadowed(jobs, statements):
        if hasattr(jobs, "_runner"):
            jobs._runner.run(jobs._jobs._source.execute(statements))
        else:
            jobs._source.execute(statements)

    return shadowed
