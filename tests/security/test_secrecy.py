"""No error, log line or repr shows a payload, a key or a token."""

from __future__ import annotations

import json

import psycopg
import pytest

SECRET = "s3cr3t"
PAYLOAD = json.dumps({"card": f"{SECRET}-payload"})
KEY = f"{SECRET}-key"
TOKEN = f"job_lease_{SECRET}"
FIELDS = (
    "message_primary",
    "message_detail",
    "message_hint",
    "context",
    "internal_query",
    "column_name",
    "constraint_name",
    "datatype_name",
)
LONG = "x" * 300_000


def item(**changes):
    fields = {"queue": "email", "kind": "send", "payload": {"card": SECRET}}
    return fields | {"idempotency_key": KEY} | changes


ENQUEUE = "select enqueue(%s, %s, %s, %s, %s, %s::integer)"
REFUSALS = {
    "another intent": (
        "producer",
        "LJ002",
        ENQUEUE,
        ("email", "another", PAYLOAD, KEY, None, 3),
    ),
    "another payload": (
        "producer",
        "LJ002",
        ENQUEUE,
        ("email", "send", json.dumps({"card": f"{SECRET}2"}), KEY, None, 3),
    ),
    "malformed queue": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("no queue", "send", PAYLOAD, KEY, None, 3),
    ),
    "undeclared queue": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("nowhere", "send", PAYLOAD, KEY, None, 3),
    ),
    "malformed kind": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("email", "no kind", PAYLOAD, KEY, None, 3),
    ),
    "malformed key": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("email", "send", PAYLOAD, f"{KEY} ?", None, 3),
    ),
    "long key": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("email", "send", PAYLOAD, KEY * 30, None, 3),
    ),
    "huge key": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("email", "send", PAYLOAD, KEY * 3000, None, 3),
    ),
    "no object": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("email", "send", json.dumps([SECRET]), KEY, None, 3),
    ),
    "big payload": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("email", "send", json.dumps({SECRET: LONG}), KEY, None, 3),
    ),
    "huge number": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("email", "send", f'{{"{SECRET}": 1e400}}', KEY, None, 3),
    ),
    "deep payload": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("email", "send", f'{{"{SECRET}": {"[" * 200}{"]" * 200}}}', KEY, None, 3),
    ),
    "infinite time": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("email", "send", PAYLOAD, KEY, "infinity", 3),
    ),
    "no attempts": (
        "producer",
        "LJ001",
        ENQUEUE,
        ("email", "send", PAYLOAD, KEY, None, 0),
    ),
    "a worker that enqueues": (
        "worker",
        "42501",
        ENQUEUE,
        ("email", "send", PAYLOAD, KEY, None, 3),
    ),
    "an undeclared enqueue": (
        "owner",
        "42501",
        ENQUEUE,
        ("email", "send", PAYLOAD, KEY, None, 3),
    ),
    "no array": (
        "producer",
        "LJ001",
        "select enqueue_many(%s)",
        (json.dumps(item()),),
    ),
    "a long array": (
        "producer",
        "LJ007",
        "select enqueue_many(%s)",
        (json.dumps([item()] * 1001),),
    ),
    "an undeclared batch": (
        "owner",
        "42501",
        "select enqueue_many(%s)",
        (json.dumps([item()]),),
    ),
    "claim of a token": ("worker", "LJ003", "select claim(%s)", (TOKEN,)),
    "renew": (
        "worker",
        "LJ004",
        "select renew(gen_random_uuid(), %s)",
        (TOKEN,),
    ),
    "complete": (
        "worker",
        "LJ004",
        "select complete(gen_random_uuid(), %s)",
        (TOKEN,),
    ),
    "fail": (
        "worker",
        "LJ004",
        "select fail(gen_random_uuid(), %s, 'smtp.down', true)",
        (TOKEN,),
    ),
    "malformed failure": (
        "worker",
        "LJ005",
        "select fail(gen_random_uuid(), %s, %s, true)",
        (TOKEN, f"{SECRET} did not work"),
    ),
    "unmarked failure": (
        "worker",
        "LJ005",
        "select fail(gen_random_uuid(), %s, 'smtp.down', null)",
        (TOKEN,),
    ),
    "uneven renew_many": (
        "worker",
        "LJ007",
        "select renew_many(array[]::uuid[], array[%s]::text[])",
        (TOKEN,),
    ),
    "uneven complete_many": (
        "worker",
        "LJ007",
        "select complete_many(array[]::uuid[], array[%s]::text[])",
        (TOKEN,),
    ),
    "uneven fail_many": (
        "worker",
        "LJ007",
        (
            "select fail_many(array[]::uuid[], array[%s]::text[],"
            " array['smtp.down'], array[true])"
        ),
        (TOKEN,),
    ),
    "an operator's complete": (
        "operator",
        "42501",
        "select complete(gen_random_uuid(), %s)",
        (TOKEN,),
    ),
}


def shown(error):
    """Everything that an error tells its caller."""
    return [str(error), *(getattr(error.diag, field) or "" for field in FIELDS)]


@pytest.fixture
def listening():
    """Collect everything that the server sends a session besides results and errors."""

    def listening(session):
        heard = []
        session.add_notice_handler(lambda notice: heard.extend(shown_notice(notice)))
        session.execute("set client_min_messages = debug5")
        return heard

    def shown_notice(diag):
        return [getattr(diag, field) or "" for field in FIELDS]

    return listening


@pytest.mark.parametrize("refusal", REFUSALS)
def test_no_refusal_shows_a_payload_a_key_or_a_token(
    refusal, producer, request, listening
):
    producer.execute(ENQUEUE, ("email", "send", PAYLOAD, KEY, None, 3))
    role, sqlstate, call, arguments = REFUSALS[refusal]
    session = request.getfixturevalue(role)
    heard = listening(session)

    with session.refusing(sqlstate) as refused:
        session.execute(call, arguments)

    assert not [text for text in [*shown(refused.value), *heard] if SECRET in text]


@pytest.mark.parametrize(
    ("sqlstate", "setting"),
    [
        ("55P03", "lock_timeout = '50 ms'"),
        ("57014", "statement_timeout = '100 ms'"),
        ("25006", "default_transaction_read_only = on"),
    ],
)
@pytest.mark.parametrize("verb", ["enqueue", "enqueue_many"])
def test_no_error_of_the_servers_own_shows_a_payload_or_a_key(
    sqlstate, setting, verb, connect, producer, listening
):
    producer.execute("begin")
    producer.execute(ENQUEUE, ("email", "send", PAYLOAD, KEY, None, 3))
    session = connect("accounts")
    heard = listening(session)
    session.execute(f"set {setting}")

    with session.refusing(sqlstate) as refused:
        if verb == "enqueue":
            session.execute(ENQUEUE, ("email", "send", PAYLOAD, KEY, None, 3))
        else:
            session.execute("select enqueue_many(%s)", (json.dumps([item()]),))

    assert not [text for text in [*shown(refused.value), *heard] if SECRET in text]


def test_a_serialization_failure_shows_neither_payload_nor_key(connect, producer):
    session = connect("accounts")
    session.execute("begin isolation level repeatable read")
    session.execute("select")
    producer.execute(ENQUEUE, ("email", "send", PAYLOAD, KEY, None, 3))

    with session.refusing("40001") as refused:
        session.execute(ENQUEUE, ("email", "send", PAYLOAD, KEY, None, 3))

    assert not [text for text in shown(refused.value) if SECRET in text]


def test_a_broken_row_of_evidence_shows_no_token(enqueue, claim, worker, owner):
    job_id = enqueue(payload={"card": SECRET}, key=KEY)
    _, token = claim()
    owner.execute(
        "insert into attempt (job_id, attempt, leased_at, ended_at, max_attempts,"
        " queue, worker, outcome, lease_token_hash)"
        " values (%s, 1, now(), now(), 1, 'email', 'x', 'retried', '')",
        (job_id,),
    )

    with pytest.raises(psycopg.Error) as refused:
        worker.execute("select complete(%s, %s)", (job_id, token))

    assert not [
        text
        for text in shown(refused.value)
        if SECRET in text or token in text or token.removeprefix("job_lease_") in text
    ]


@pytest.mark.parametrize("verb", ["enqueue", "claim", "complete", "fail"])
def test_success_is_not_reported_either(
    verb, producer, worker, enqueue, claim, listening
):
    heard = listening(producer) if verb == "enqueue" else listening(worker)
    enqueue(payload={"card": SECRET}, key=KEY)
    job_id, token = claim()
    if verb != "fail":
        worker.execute("select complete(%s, %s)", (job_id, token))
    else:
        worker.execute("select fail(%s, %s, 'smtp.down', true)", (job_id, token))

    assert not [text for text in heard if SECRET in text or token[10:] in text]


def test_the_token_is_nowhere_in_the_database(enqueue, claim, worker, owner, expire):
    tables = owner.rows(
        "select relname from pg_class where relkind = 'r'"
        " and relnamespace = 'jobs_email'::regnamespace"
    )

    def stored():
        return "".join(
            text
            for (table,) in tables
            for (text,) in owner.rows(f"select t::text from {table} as t")
        )

    job_id = enqueue(max_attempts=5)
    _, lapsed = claim()
    leased = stored()
    expire(job_id)
    _, token = claim()
    worker.execute("select renew(%s, %s)", (job_id, token))
    reclaimed = stored()
    worker.execute("select fail(%s, %s, 'smtp.down', false)", (job_id, token))
    ended = stored()

    for text in (leased, reclaimed, ended):
        assert str(job_id) in text
        for secret in (lapsed, token):
            random = secret.removeprefix("job_lease_")
            assert random not in text
            assert random.encode().hex() not in text


def test_payload_and_key_are_kept_in_the_job_alone(
    enqueue, claim, worker, operator, state
):
    job_id = enqueue(payload={"card": SECRET}, key=KEY)
    _, token = claim()
    worker.execute("select fail(%s, %s, 'smtp.down', false)", (job_id, token))
    operator.execute("select redrive(%s)", (job_id,))

    stored = state()

    assert SECRET in str(stored.pop("job"))
    assert stored["operator_act"]
    assert SECRET not in str(stored)


@pytest.mark.slow
def test_no_read_of_the_instance_shows_a_payload_a_key_or_a_token(
    enqueue, claim, observer, operator, owner, worker
):
    job_id = enqueue(payload={"card": SECRET}, key=KEY)
    _, token = claim()
    digest = owner.value("select encode(lease_token_hash, 'hex') from live_job")
    failed = enqueue(payload={"card": SECRET}, key=f"{KEY}-2")
    lease = claim()
    worker.execute("select fail(%s, %s, 'smtp.down', false)", lease)
    enqueue(key=f"{KEY}-3", queue="slow")
    worker.execute("select complete(%s, %s)", claim("slow"))
    owner.execute(
        "update attempt set ended_at = '2020-01-01', leased_at = '2020-01-01'"
        " where outcome = 'succeeded'"
    )
    assert operator.value("select purge(clock_timestamp() - interval '1 day')") == 1

    reads = owner.rows(
        "select p.proname, p.pronargs - p.pronargdefaults from pg_proc as p"
        " where p.pronamespace = 'jobs_email'::regnamespace"
        " and has_function_privilege('operations', p.oid, 'execute')"
    )
    arguments = {"inspect_key": [KEY, "accounts"], "inspect_jobs": ["email", "failed"]}
    answers = ""
    for name, count in reads:
        given = arguments.get(name, [job_id] * count)
        marks = ", ".join(["%s"] * len(given))
        answers += str(
            observer.rows(f"select r::text from {name}({marks}) as r", *given)
        )

    assert len(reads) == 10
    for shown_to_observers in (str(job_id), str(failed), "purge"):
        assert shown_to_observers in answers
    assert not [
        secret
        for secret in (SECRET, token, token[10:], digest, lease[1][10:])
        if secret in answers
    ]


@pytest.mark.parametrize(
    "role", ["worker", "observer", "operator", "stranger", "other"]
)
def test_other_roles_do_not_see_what_a_caller_runs(
    role, request, other_producer, producer
):
    producer.execute("begin")
    producer.execute(f"select enqueue('email', 'send', '{PAYLOAD}', '{KEY}')".encode())
    session = other_producer if role == "other" else request.getfixturevalue(role)

    seen = session.rows(
        "select query from pg_stat_activity where pid = %s", producer.pid
    )

    assert seen == [("<insufficient privilege>",)]


def test_a_refusal_does_not_tell_whether_a_job_of_that_id_exists(
    enqueue, claim, rival, worker
):
    job_id = enqueue()
    _, token = claim()
    told = []

    for job in (job_id, "00000000-0000-7000-8000-000000000000"):
        with rival.refusing("LJ004") as refused:
            rival.execute("select complete(%s, %s)", (job, token))
        told.append(shown(refused.value))

    assert told[0] == told[1]
