"""A granted function returns, or refuses as documented, for every argument."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jobs_machine import NO_JOB, NO_TOKEN, WATCH

SQL = Path(__file__).parents[2] / "sql"
FEW = 1
EXAMPLES = 8
MANY = 50 * EXAMPLES

# The refusals of each function; any other SQLSTATE is a fault.
REFUSALS = {
    "enqueue": {"LJ001", "LJ002"},
    "enqueue_many": {"LJ001", "LJ007"},
    "claim": {"LJ003", "LJ007"},
    "renew": {"LJ004"},
    "renew_many": {"LJ007"},
    "complete": {"LJ004"},
    "complete_many": {"LJ007"},
    "fail": {"LJ004", "LJ005"},
    "fail_many": {"LJ007"},
    "release": {"LJ004", "LJ007"},
    "release_many": {"LJ007"},
    "next_available_at": {"LJ003"},
    "wait_key": {"LJ003"},
    "inspect": {"LJ006"},
    "inspect_attempts": {"LJ006"},
    "inspect_queues": set(),
    "inspect_workers": set(),
    "inspect_failures": {"LJ003", "LJ005", "LJ007"},
    "inspect_acts": {"LJ007"},
    "inspect_health": set(),
    "explain_job": {"LJ006"},
    "redrive": {"LJ006", "LJ007"},
    "redrive_failed": {"LJ003", "LJ005", "LJ007"},
    "purge": {"LJ007"},
    "enforce_retention": {"LJ007"},
    "retire_expired": {"LJ007"},
    "pause": {"LJ003"},
    "resume": {"LJ003"},
    "erase": {"LJ006", "LJ007"},
    "inspect_key": {"LJ006"},
    "inspect_jobs": {"LJ003", "LJ007"},
}
# An example for each argument, and for each of what a document holds.
WEIGHTS = {"enqueue_many": 8}
OUTCOMES = {
    "enqueue_many": {"created", "existing", "conflict", "invalid_job"},
    "renew_many": {"renewed", "invalid_lease", "busy"},
    "complete_many": {"completed", "invalid_lease"},
    "fail_many": {"queued", "failed", "invalid_lease", "invalid_failure"},
    "release_many": {"queued", "invalid_lease", "invalid_argument"},
}
# Outcomes under which an item of a batch has left everything as it was.
UNTOUCHED = {
    *("existing", "conflict", "invalid_job"),
    *("invalid_lease", "invalid_failure", "invalid_argument"),
}
MAY_BE_NULL = {
    "enqueue": {"p_available_at"},
    "fail": {"p_retry_after_seconds"},
    "fail_many": {"p_retry_after_seconds"},
    "redrive_failed": {"p_before", "p_failure_code", "p_kind"},
    "inspect_acts": {"p_before"},
    "inspect_key": {"p_producer"},
    "inspect_jobs": {"p_kind", "p_before"},
    "inspect_failures": {
        "p_queue",
        "p_since",
        "p_failure_code",
        "p_before",
        "p_before_job_id",
        "p_kind",
    },
}
SECRET = {"p_payload", "p_idempotency_key", "p_lease_token", "p_lease_tokens", "p_jobs"}
NAME = re.compile("[A-Za-z0-9._:/-]+")

CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXTS = st.one_of(
    st.text(CHARACTERS, max_size=300),
    st.from_regex(r"[A-Za-z0-9._:/-]{1,260}", fullmatch=True),
    st.sampled_from(
        [
            "",
            " ",
            "a" * 128,
            "a" * 129,
            "a" * 256,
            "a" * 257,
            "a" * 100_000,
            "name\n",
            "\nname",
            "na\tme",
            "na\x7fme",
            "\x01",
            "é",
            "\uff41",
            "name\u200b",
            "\u202ename",
            "e\u0301",
            "ß",
            "\U0001f600" * 128,
            "\U0010ffff",
            "na\\me",
            "'; drop table job; --",
            "$$",
            "%s %I %",
            "null",
            "NULL",
        ]
    ),
)
INTEGERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 100, 101, 1000, 1001, 10000, 10001]),
    st.sampled_from([2**31 - 1, -(2**31)]),
    st.integers(-(2**31), 2**31 - 1),
)
LARGE_INTEGERS = st.one_of(INTEGERS, st.integers(-(2**63), 2**63 - 1))
MOMENTS = st.one_of(
    st.sampled_from(
        [
            "infinity",
            "-infinity",
            "4714-11-24 00:00:00+00 BC",
            "4713-01-01 00:00:00+00 BC",
            "0001-01-01 00:00:00+00 BC",
            "0001-12-31 23:59:59.999999+00 BC",
            "0001-01-01 00:00:00+00",
            "1500-02-28 12:00:00+00",
            "1582-10-10 00:00:00+00",
            "1970-01-01 00:00:00+00",
            "2016-12-31 23:59:60+00",
            "9999-12-31 23:59:59.999999+00",
            "10000-01-01 00:00:00+00",
            "294276-12-31 23:59:59.999999+00",
        ]
    ),
    st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat),
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([10**308, 10**309, -(10**309), 1, 100, 101, 0, 3]),
)
DOCUMENTS = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(CHARACTERS, max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(CHARACTERS, max_size=10), inner, max_size=4),
    ),
    max_leaves=15,
).map(json.dumps)


def nested(depth, opening='{"a":', inside="1", closing="}"):
    return depth * opening + inside + depth * closing


PAYLOADS = st.one_of(
    st.just("{}"),
    DOCUMENTS,
    DOCUMENTS.map('{{"a": {}}}'.format),
    st.sampled_from(
        [
            '{"a": 1e308}',
            '{"a": 1e309}',
            '{"a": [{"b": -1e309}]}',
            '{"a": 1e-16000}',
            '{"a": 1e131071}',
            f'{{"a": [{",".join(["1e131071"] * 2000)}]}}',
            f'{{"a": [{",".join(["1e-16383"] * 2000)}]}}',
            f'{{"a": "{"x" * 262_134}"}}',
            f'{{"a": "{"x" * 262_135}"}}',
            f'{{"a": "{"é" * 131_068}"}}',
            nested(128),
            nested(129),
            nested(130),
            nested(1500),
            f'{{"a": {nested(128, "[", "1", "]")}}}',
            f'{{"a": {nested(129, "[", "1", "]")}}}',
            '{"": {"": {"": ""}}}',
            r'{"a": "\u0001\u001f\ufffe"}',
            '{"a": 1, "a": 2}',
        ]
    ),
)
JSON_TEXTS = TEXTS.map(json.dumps)
JSON_MOMENTS = st.one_of(
    MOMENTS.map(json.dumps),
    st.sampled_from(
        [
            '"2030-01-01T00:00:00Z"',
            '"2030-01-01t00:00:00.123456789z"',
            '"2030-01-01T00:00:00.1234567890Z"',
            '"2030-02-30T00:00:00Z"',
            '"2030-01-01T24:00:00Z"',
            '"2030-01-01T23:59:60Z"',
            '"2030-01-01T00:00:00"',
            '"2030-01-01T00:00:00+15:59"',
            '"2030-01-01T00:00:00+16:00"',
            '"2030-01-01T00:00:00-24:00"',
            '"0000-01-01T00:00:00Z"',
            '"0001-01-01T00:00:00+01:00"',
            '"9999-12-31T23:59:59.9999999Z"',
            '"9999-12-31T23:59:59-00:01"',
            '"2030-01-01T00:00:00Z\\n"',
            '"now"',
            '"tomorrow"',
            '"allballs"',
            "null",
        ]
    ),
)
MEMBERS = {
    "queue": (st.just('"email"'), JSON_TEXTS),
    "kind": (st.just('"send"'), JSON_TEXTS),
    "payload": (st.just("{}"), PAYLOADS),
    "idempotency_key": (st.sampled_from(['"a"', '"b"', '"c"']), JSON_TEXTS),
    "available_at": (JSON_MOMENTS, JSON_MOMENTS),
    "max_attempts": (
        st.sampled_from(["1", "3", "100"]),
        st.sampled_from(["0", "101", "1.0", "1.5", "1e2", "1e9", '"3"', "-1"]),
    ),
    "unknown": (st.nothing(), DOCUMENTS),
}


@st.composite
def items(draw):
    """An item of enqueue_many: sound but for a few of its members."""
    if not draw(st.integers(0, 9)):
        return draw(DOCUMENTS)
    members = {}
    odd = draw(st.sets(st.sampled_from(list(MEMBERS)), max_size=1))
    for name, (usual, unusual) in MEMBERS.items():
        if name not in odd:
            if not usual.is_empty:
                members[name] = draw(usual)
        elif not draw(st.integers(0, 3)):
            continue
        else:
            members[name] = draw(st.one_of(unusual, DOCUMENTS))
    return "{" + ",".join(f'"{name}":{value}' for name, value in members.items()) + "}"


BATCHES = st.one_of(
    st.lists(items(), max_size=4).map(",".join).map("[{}]".format),
    DOCUMENTS,
    st.sampled_from(
        ["[]", f"[{','.join(['null'] * 1001)}]", nested(1500, "[", "", "]")]
    ),
)


@st.composite
def arrays(draw, sound, count, odd):
    """An array of so many elements as a literal; an odd one has other ones or shapes."""
    inside = [
        sound[n] if isinstance(sound, list) else draw(sound) for n in range(count)
    ]
    if odd is None:
        return f"{{{','.join(map(quoted, inside))}}}"
    shape = draw(st.integers(0, 7))
    if shape == 0:
        many = f"{{{','.join(['NULL'] * 1001)}}}"
        return draw(st.sampled_from([None, "{}", "{NULL}", many]))
    if shape == 1:
        inside.append(None)
    elif shape == 2:
        inside.pop()
    elif shape > 4:
        inside[draw(st.integers(0, count - 1))] = draw(st.one_of(odd, st.none()))
    text = ",".join(map(quoted, inside))
    if shape == 3:
        return f"{{{{{text}}},{{{text}}}}}"
    if shape == 4:
        lower = draw(st.sampled_from([0, -5, 2, 2**31 - 1 - count]))
        return f"[{lower}:{lower + count - 1}]={{{text}}}"
    return f"{{{text}}}"


def quoted(element):
    if element is None:
        return "NULL"
    text = str(element).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


@pytest.fixture
def given_jobs(enqueue, claim, worker, owner):
    """Make a job of each status, two of them running. Return ids and tokens to try."""
    enqueue(key="first")
    enqueue(key="second")
    enqueue(key="third")
    leased = [claim(), claim()]
    job_id, token = claim()
    worker.execute("select fail(%s, %s, 'smtp.down', false)", (job_id, token))
    enqueue(key="known", queue="slow")
    owner.execute(WATCH)
    return leased, [job_id, NO_JOB], [token, NO_TOKEN]


@pytest.fixture
def leases(given_jobs):
    """What the sound values are drawn from: leases, then a failed job's."""
    leased, (failed, _), (token, _) = given_jobs
    return [*leased, (failed, token)]


# For each argument, by its name and type, what is sound; those of a lease are drawn
# together. And what else to try.
SOUND = {
    ("p_queue", "text"): st.sampled_from(["email", "slow"]),
    ("p_kind", "text"): st.just("send"),
    ("p_payload", "jsonb"): st.sampled_from(["{}", '{"to": "somebody"}']),
    ("p_idempotency_key", "text"): st.sampled_from(["new", "newer", "first", "known"]),
    ("p_available_at", "timestamp with time zone"): st.none(),
    ("p_max_attempts", "integer"): st.just(3),
    ("p_extra_attempts", "integer"): st.just(1),
    ("p_over_seconds", "integer"): st.sampled_from([0, 60]),
    ("p_limit", "integer"): st.sampled_from([1, 2, 100]),
    ("p_jobs", "jsonb"): st.lists(items(), min_size=1, max_size=4)
    .map(",".join)
    .map("[{}]".format),
    ("p_failure_code", "text"): st.just("smtp.down"),
    ("p_retryable", "boolean"): st.booleans(),
    ("p_before", "timestamp with time zone"): st.just("2020-01-01"),
    ("p_since", "timestamp with time zone"): st.just("2020-01-01"),
    ("p_before", "bigint"): st.none(),
    ("p_before", "uuid"): st.none(),
    ("p_status", "text"): st.sampled_from(["queued", "running", "failed", "lost"]),
    ("p_producer", "text"): st.sampled_from(["accounts", "organization"]),
    ("p_before_job_id", "uuid"): st.just(NO_JOB),
    ("p_job_id", "uuid"): None,
    ("p_lease_token", "text"): None,
    ("p_job_ids", "uuid[]"): None,
    ("p_lease_tokens", "text[]"): None,
    ("p_failure_codes", "text[]"): st.just("smtp.down"),
    ("p_retryable", "boolean[]"): st.booleans(),
    ("p_retry_after_seconds", "integer"): st.sampled_from([0, 60]),
    ("p_retry_after_seconds", "integer[]"): st.sampled_from([0, 60]),
    ("p_delay_seconds", "integer"): st.sampled_from([0, 60]),
    ("p_delays_seconds", "integer[]"): st.sampled_from([0, 60]),
}
ODD = {
    "text": TEXTS,
    "jsonb": PAYLOADS,
    "timestamp with time zone": MOMENTS,
    "integer": INTEGERS,
    "bigint": LARGE_INTEGERS,
    "boolean": st.none(),
    "uuid": st.sampled_from([NO_JOB, UUID(int=0), UUID(int=2**128 - 1)]),
}


@st.composite
def calls(draw, parameters, leases):
    """The values of one call: sound, but for one or two of them most of the time."""
    odd = draw(st.sets(st.sampled_from(parameters), max_size=2)) if parameters else ()
    chosen = draw(st.lists(st.sampled_from(leases), min_size=1, max_size=3))
    values = {}
    for name, kind in parameters:
        sound, element = SOUND[name, kind], kind.removesuffix("[]")
        is_odd = (name, kind) in odd
        if name == "p_jobs":
            strategy = BATCHES if is_odd else sound
        elif kind != element:
            of_lease = [lease["token" in name] for lease in chosen]
            each = of_lease if sound is None else sound
            strategy = arrays(each, len(chosen), ODD[element] if is_odd else None)
        elif is_odd:
            strategy = st.one_of(ODD[element], ODD[element], ODD[element], st.none())
        else:
            strategy = st.just(chosen[0]["token" in name]) if sound is None else sound
        values[name] = draw(strategy)
    return values


@pytest.fixture
def granted(owner, connect, prefix):
    """The functions that a group may execute, each with a session and its arguments."""
    sessions = {
        "producer": connect("accounts"),
        "worker": connect("email-worker"),
        "observer": connect("operations"),
        "operator": connect(f"{prefix}_duty"),
    }
    found = {}
    for name, names, types, groups in owner.rows(
        "select p.proname, coalesce(p.proargnames, '{}'),"
        " array(select format_type(t, null) from unnest(p.proargtypes) as t),"
        " array(select g from unnest(%s::text[]) as g"
        "  where has_function_privilege(%s || '_' || g, p.oid, 'execute'))"
        " from pg_proc as p where p.pronamespace = 'jobs_email'::regnamespace"
        " order by 1",
        list(sessions),
        prefix,
    ):
        if groups:
            parameters = list(zip(names[: len(types)], types, strict=True))
            found[name] = (sessions[groups[0]], parameters)
    return found


def test_every_granted_function_has_its_bad_input(granted):
    missing = [
        f"{function}({name} {kind})"
        for function, (_, parameters) in granted.items()
        for name, kind in parameters
        if (name, kind) not in SOUND or kind.removesuffix("[]") not in ODD
    ]

    assert granted.keys() == REFUSALS.keys(), "say in REFUSALS what a function refuses"
    assert missing == [], "say in SOUND and ODD what to try for these"


@pytest.mark.slow
@pytest.mark.parametrize(
    "examples",
    [
        FEW,
        pytest.param(EXAMPLES, marks=pytest.mark.slow),
        pytest.param(MANY, marks=pytest.mark.long),
    ],
)
def test_sql_returns_or_refuses_by_our_code_for_every_argument(
    granted, leases, state, examples
):
    before = state()

    for function, (session, parameters) in granted.items():
        trying(session, function, parameters, leases, examples)

    assert state() == before


def trying(session, function, parameters, leases, examples):
    @settings(
        max_examples=examples * WEIGHTS.get(function, len(parameters)) or 1,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(values=calls(parameters, leases))
    def attempt(values):
        hold(session, function, parameters, values)

    attempt()


def hold(session, function, parameters, values):
    """Call a function in a transaction that is rolled back, and judge what it did."""
    call = ", ".join(f"{name} => %s::{kind}" for name, kind in parameters)
    texts = [
        value if value is None or isinstance(value, str) else str(value)
        for value in values.values()
    ]
    session.execute("begin")
    try:
        before = session.value("select watch.tables()")
        try:
            rows = session.rows(f"select * from {function}({call})", *texts)
        except psycopg.Error as error:
            refused(function, error, values)
            return
        answered(
            function, rows, values, session.value("select watch.tables()") != before
        )
    finally:
        session.execute("rollback")


def refused(function, error, values):
    said = str(error)
    assert error.sqlstate in REFUSALS[function], (error.sqlstate, said[:500])
    if error.sqlstate in {"LJ001", "LJ005", "LJ007"} and "the job has not " not in said:
        named = [name[2:] for name in values if name[2:] in said]
        assert named or "queue" in said, (function, said)
    # A queue that is well-formed is shown, and may be what the key is, too.
    said = said.replace(values.get("p_queue") or "\0", "")
    shown = [
        word
        for name in SECRET & values.keys()
        for word in re.findall(r"[^\W_]{5,}", str(values[name]))
        if re.search(rf"\b{word}\b", said)
    ]
    assert set(shown) <= PLAIN_WORDS, (function, shown, said)


# Words of our messages, and of what the server says of a statement. A value may hold them
# by chance: Hypothesis also draws the texts that stand in our own Python.
PLAIN_WORDS = {
    word
    for said in [
        *(file.read_text() for file in SQL.rglob("*.sql")),
        (
            "CONTEXT DETAIL HINT ERROR PL/pgSQL function line statement at RAISE, assignment,"
            " expression, during exception cleanup, block variables initialization"
        ),
    ]
    for word in re.findall(r"[^\W_]{5,}", said)
}


def answered(function, rows, values, has_changed):
    nulls = {name for name, value in values.items() if value is None}
    assert nulls <= MAY_BE_NULL.get(function, set()), "NULL was taken for a value"
    if function.startswith(("inspect", "explain", "next", "wait")):
        assert not has_changed
    if function in OUTCOMES:
        outcomes = [next(v for v in row if isinstance(v, str)) for row in rows]
        assert set(outcomes) <= OUTCOMES[function]
        assert [row[0] for row in rows] == list(range(1, len(rows) + 1))
        if set(outcomes) <= UNTOUCHED:
            assert not has_changed
    if function == "enqueue":
        is_sound_job(
            values["p_queue"],
            values["p_kind"],
            json.loads(values["p_payload"]),
            values["p_idempotency_key"],
            values["p_max_attempts"],
        )
    # What is nested deeper than Python reads it is never sound.
    if function == "enqueue_many" and set(outcomes) != {"invalid_job"}:
        for (_, _, outcome), item in zip(
            rows, json.loads(values["p_jobs"]), strict=True
        ):
            if outcome != "invalid_job":
                assert item.keys() <= MEMBERS.keys() - {"unknown"}
                is_sound_job(
                    item["queue"],
                    item["kind"],
                    item["payload"],
                    item["idempotency_key"],
                    item.get("max_attempts", 3),
                )


def is_sound_job(queue, kind, payload, key, max_attempts):
    assert queue in {"email", "slow"}
    for name in (kind, key):
        assert NAME.fullmatch(name)
        assert len(name) <= 256
    assert isinstance(payload, dict)
    assert depth(payload) <= 129
    assert len(json.dumps(payload, ensure_ascii=False).encode()) <= 300_000
    assert 1 <= max_attempts <= 100


def depth(value):
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0
