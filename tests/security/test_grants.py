"""Every role against every object: what it may do is this list and nothing else."""

from __future__ import annotations

import psycopg
import pytest

PRODUCER = {"enqueue", "enqueue_many", "inspect", "inspect_key"}
WORKER = {
    "claim",
    "renew",
    "renew_many",
    "complete",
    "complete_many",
    "fail",
    "fail_many",
    "release",
    "release_many",
    "inspect",
    "next_available_at",
    "wait_key",
}
OBSERVER = {
    "inspect",
    "inspect_attempts",
    "inspect_key",
    "inspect_jobs",
    "inspect_queues",
    "inspect_workers",
    "inspect_failures",
    "inspect_acts",
    "inspect_health",
    "explain_job",
}
OPERATOR = {
    *OBSERVER,
    "redrive",
    "redrive_failed",
    "purge",
    "enforce_retention",
    "retire_expired",
    "pause",
    "resume",
    "erase",
}
MAY_CALL = {
    "producer": PRODUCER,
    "worker": WORKER,
    "observer": OBSERVER,
    "operator": OPERATOR,
    "stranger": set(),
}
ASK_WHO = {"enqueue", "enqueue_many", "claim"}
# A caller that may call everything meets the helpers that refuse it too.
REFUSE_THEM = {*ASK_WHO, "_require_producer", "_enqueue_again"}
VIEWS = {"error_code", "explain_reason", "health_finding", "installed_version"}
ROLES = pytest.mark.parametrize("role", MAY_CALL)
GROUPS = ("producer", "worker", "observer", "operator")


@pytest.fixture
def functions(owner):
    """Every function of the Instance: its name, and a call of it with NULLs."""
    return {
        name: f"select jobs_email.{name}({nulls})"
        for name, nulls in owner.rows(
            "select p.proname,"
            " (select coalesce(string_agg('null', ', '), '') from unnest(p.proargtypes))"
            " from pg_proc as p where p.pronamespace = 'jobs_email'::regnamespace"
        )
    }


@pytest.fixture
def relations(owner):
    """Every table, view and sequence of the Instance, and its kind."""
    return dict(
        owner.rows(
            "select c.relname, c.relkind::text from pg_class as c"
            " where c.relnamespace = 'jobs_email'::regnamespace"
            " and c.relkind not in ('i', 'c')"
        )
    )


@pytest.fixture
def types(owner):
    """Every type of the Instance that is not an array: row types too."""
    return [
        name
        for (name,) in owner.rows(
            "select t.typname from pg_type as t"
            " where t.typnamespace = 'jobs_email'::regnamespace and t.typelem = 0"
        )
    ]


def answer(session, statement):
    """How a statement is met: allowed, refused, or refused as undeclared."""
    try:
        with session.transaction(force_rollback=True):
            session.execute(statement)
    except psycopg.errors.InsufficientPrivilege as error:
        if "SET ROLE" in (error.diag.message_hint or ""):
            return "undeclared"
        return "refused"
    except psycopg.Error:
        return "allowed"
    return "allowed"


def answers(session, functions):
    return {name: answer(session, call) for name, call in functions.items()}


def expected(functions, allowed, otherwise="refused", undeclared=frozenset()):
    return {
        name: "undeclared"
        if name in allowed & undeclared
        else "allowed"
        if name in allowed
        else otherwise
        for name in functions
    }


# Functions


@pytest.mark.sampled
@ROLES
def test_a_role_may_call_exactly_the_functions_of_its_kind(role, as_callers, functions):
    answered = answers(as_callers[role], functions)

    assert answered == expected(functions, MAY_CALL[role])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", GROUPS)
def test_a_member_of_a_group_that_is_not_declared_may_neither_enqueue_nor_claim(
    kind, prefix, new_role, connect, functions
):
    member = connect(new_role(members_of=[f"{prefix}_{kind}"]))

    answered = answers(member, functions)

    assert answered == expected(functions, MAY_CALL[kind], undeclared=ASK_WHO)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", GROUPS)
def test_a_login_that_becomes_the_group_itself_is_not_a_declared_caller(
    kind, prefix, new_role, connect, functions
):
    member = connect(new_role(members_of=[f"{prefix}_{kind}"]))
    member.execute(f'set role "{prefix}_{kind}"')

    answered = answers(member, functions)

    assert answered == expected(functions, MAY_CALL[kind], undeclared=ASK_WHO)


def test_a_superuser_is_not_a_declared_caller(connect, functions):
    superuser = connect()

    answered = answers(superuser, functions)

    assert answered == expected(functions, {*functions}, undeclared=REFUSE_THEM)


@pytest.mark.slow
def test_the_owner_is_not_a_declared_caller(connect, prefix, functions):
    session = connect()
    session.execute(f'set role "{prefix}_owner"')

    answered = answers(session, functions)

    assert answered == expected(functions, {*functions}, undeclared=REFUSE_THEM)


@pytest.mark.parametrize(
    ("declared", "granted", "call"),
    [
        ("worker", "producer", "select enqueue('email', 'send', '{}', 'k')"),
        ("observer", "producer", "select enqueue_many('[{}]')"),
        ("producer", "worker", "select claim('email')"),
        ("observer", "worker", "select claim('email')"),
    ],
)
def test_a_caller_declared_for_one_thing_may_not_do_another_it_was_granted(
    declared, granted, call, new_caller, connect, owner, prefix
):
    name = new_caller(declared)
    owner.execute(f'grant "{prefix}_{granted}" to "{name}"')

    with connect(name).refusing("42501") as refusal:
        connect(name).execute(call)

    assert "SET ROLE" in refusal.value.diag.message_hint


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "select enqueue('email', 'send', '{}', 'k')",
        "select enqueue('', '', '[]', '')",
        "select enqueue('nowhere', 'send', '{}', 'k')",
        "select enqueue(null, null, null, null, 'infinity', 0)",
        """select enqueue_many('[{"queue": "email", "kind": "send", "payload": {},
            "idempotency_key": "k"}]')""",
        "select enqueue_many('{}')",
        "select enqueue_many('[]')",
        "select enqueue_many(null)",
        "select claim('email')",
        "select claim('nowhere')",
        "select claim('email', 0)",
        "select claim(null, null)",
    ],
)
@pytest.mark.parametrize("who", ["superuser", "member"])
def test_an_undeclared_caller_is_refused_before_any_argument_is_judged(
    who, call, new_role, connect, prefix, enqueue, state
):
    enqueue()
    member = new_role(members_of=[f"{prefix}_producer", f"{prefix}_worker"])
    session = connect(None if who == "superuser" else member)
    before = state()

    with session.refusing("42501") as refusal:
        session.execute(call)

    assert "SET ROLE" in refusal.value.diag.message_hint
    assert state() == before


def test_a_declared_caller_that_lost_its_membership_is_refused_by_the_server(
    new_caller, connect, owner, prefix
):
    name = new_caller("producer")
    owner.execute(f'revoke "{prefix}_producer" from "{name}"')

    with connect(name).refusing("42501") as refusal:
        connect(name).execute("select jobs_email.enqueue('email', 'send', '{}', 'k')")

    assert refusal.value.diag.message_hint is None


def test_a_role_becomes_a_caller_by_set_role_and_only_then(
    new_caller, new_role, connect
):
    caller = new_caller("producer", attributes="nologin")
    session = connect(new_role(members_of=[caller]))
    call = "select created from enqueue('email', 'send', '{}', 'k')"

    with session.refusing("42501"):
        session.execute(call)
    session.execute(f'set role "{caller}"')

    assert session.value(call)


# Tables, views, sequences


@pytest.mark.sampled
@ROLES
def test_a_role_may_do_to_tables_views_and_sequences_nothing_but_read_two_views(
    role, as_callers, relations
):
    session = as_callers[role]
    statements = {
        "r": (
            "select from {}",
            "select 1 from {} for share",
            "insert into {} default values",
            "delete from {}",
            "truncate {}",
            "lock table {} in access share mode",
            "lock table {} in access exclusive mode",
            "copy {} to stdout",
            "alter table {} set (fillfactor = 10)",
            "create temp table copy (like {})",
            "drop table {}",
        ),
        "v": ("select from {}",),
        "S": ("select nextval('{}')", "select setval('{}', 1)", "select from {}"),
    }

    allowed = {
        statement.format(f"jobs_email.{relation}")
        for relation, kind in relations.items()
        for statement in statements[kind]
        if answer(session, statement.format(f"jobs_email.{relation}")) == "allowed"
    }

    assert allowed == (
        set()
        if role == "stranger"
        else {f"select from jobs_email.{view}" for view in VIEWS}
    )


@ROLES
def test_a_role_has_no_privilege_on_a_table_column_or_sequence(
    role, as_callers, relations, owner
):
    name = as_callers[role].info.user
    privileges = ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES"]
    privileges += [
        "TRIGGER",
        *(["MAINTAIN"] if owner.info.server_version >= 170000 else []),
    ]

    held = {
        (relation, privilege)
        for relation, kind in relations.items()
        if kind != "S"
        for privilege in privileges
        if owner.value(
            "select has_table_privilege(%s, %s, %s)",
            name,
            f"jobs_email.{relation}",
            privilege,
        )
    }
    columns = owner.rows(
        "select attrelid::regclass::text, attname from pg_attribute"
        " join pg_class on pg_class.oid = attrelid"
        " where relnamespace = 'jobs_email'::regnamespace and attacl is not null"
    )
    sequences = owner.rows(
        "select oid::regclass::text from pg_class"
        " where relnamespace = 'jobs_email'::regnamespace and case when relkind = 'S'"
        "  then has_sequence_privilege(%s, oid, 'USAGE, SELECT, UPDATE') end",
        name,
    )

    assert held == (
        set() if role == "stranger" else {(view, "SELECT") for view in VIEWS}
    )
    assert (columns, sequences) == ([], [])


@ROLES
def test_no_role_may_build_on_a_type_or_row_type_of_the_instance(
    role, as_callers, types
):
    session = as_callers[role]

    built = [
        name
        for name in types
        if answer(session, f"create temp table mine (field jobs_email.{name})")
        == "allowed"
    ]

    assert built == []


# The schema


INTRUSIONS = (
    "create table jobs_email.intruder (field text)",
    "create view jobs_email.intruder as select 1",
    "create function jobs_email.intruder() returns int language sql as 'select 1'",
    (
        "create or replace function jobs_email._caller() returns text"
        " language sql as $$ select 'accounts' $$"
    ),
    "create type jobs_email.intruder as (field text)",
    "create domain jobs_email.intruder as text",
    "create sequence jobs_email.intruder",
    (
        "create operator jobs_email.= (leftarg = text, rightarg = uuid,"
        " function = pg_catalog.texteq)"
    ),
    "alter schema jobs_email rename to mine",
    "alter function jobs_email.claim(text, integer) set search_path = public",
    "comment on schema jobs_email is 'mine'",
    "drop schema jobs_email cascade",
    "drop function jobs_email._caller() cascade",
)


@ROLES
def test_no_role_may_create_replace_or_drop_in_the_schema(role, as_callers):
    for statement in INTRUSIONS:
        with as_callers[role].refusing("42501"):
            as_callers[role].execute(statement)


@ROLES
def test_no_role_can_give_away_what_it_was_given(role, as_callers, prefix, functions):
    session = as_callers[role]

    for statement in (
        "grant usage on schema jobs_email to stranger",
        f'grant "{prefix}_producer" to stranger',
        f'grant "{prefix}_worker" to stranger',
    ):
        # Without the right to grant, PostgreSQL refuses or warns and grants nothing.
        answer(session, statement)
    for statement in (
        f'set role "{prefix}_owner"',
        "set session authorization postgres",
    ):
        with session.refusing("42501"):
            session.execute(statement)

    assert not session.value(
        "select has_schema_privilege('stranger', 'jobs_email', 'USAGE')"
    )


@pytest.mark.parametrize("name", ["job", "error_code", "nothing_of_that_name"])
def test_a_stranger_learns_of_a_name_only_that_the_schema_is_closed(name, stranger):
    with stranger.refusing("42501") as refusal:
        stranger.execute(f"select from jobs_email.{name}")

    assert (
        refusal.value.diag.message_primary == "permission denied for schema jobs_email"
    )
