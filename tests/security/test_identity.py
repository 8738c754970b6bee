"""Who a caller is: the role in force, which nothing but membership can change."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

ENQUEUE = "select job_id from jobs_email.enqueue('email', 'send', %s, %s)"


@pytest.fixture
def whose(owner):
    """Return which producer a key was enqueued by."""

    def whose(key):
        return [
            p
            for (p,) in owner.rows(
                "select producer from job where idempotency_key = %s order by 1", key
            )
        ]

    return whose


def enqueue_as(session, key="k", payload="{}"):
    return session.value(ENQUEUE, payload, key)


def set_role(session, role, *, local=False):
    session.execute(
        sql.SQL("set {} role {}").format(
            sql.SQL("local" if local else ""), sql.Identifier(role)
        )
    )


# The role in force


def test_a_login_is_itself(producer, whose):
    enqueue_as(producer)

    assert whose("k") == ["accounts"]


def test_set_role_makes_a_member_the_role_until_it_is_reset(
    new_caller, new_role, connect, whose
):
    first, second = new_caller("producer"), new_caller("producer")
    session = connect(new_role(members_of=[first, second]))

    set_role(session, first)
    enqueue_as(session, "one")
    set_role(session, second)
    enqueue_as(session, "two")
    session.execute("reset role")

    assert (whose("one"), whose("two")) == ([first], [second])
    with session.refusing("42501"):
        enqueue_as(session, "three")


def test_set_local_role_lasts_for_its_transaction(new_caller, new_role, connect, whose):
    caller = new_caller("producer")
    session = connect(new_role(members_of=[caller]))

    with session.transaction():
        set_role(session, caller, local=True)
        enqueue_as(session)

    assert whose("k") == [caller]
    with session.refusing("42501"):
        enqueue_as(session, "afterwards")


def test_a_caller_that_becomes_another_caller_is_the_other(
    new_caller, connect, owner, whose
):
    mine, other = new_caller("producer"), new_caller("producer")
    owner.execute(f'grant "{other}" to "{mine}"')
    session = connect(mine)

    enqueue_as(session)
    set_role(session, other)
    enqueue_as(session)
    session.execute("set role none")

    assert whose("k") == sorted([mine, other])
    assert (
        session.value(
            "select created from jobs_email.enqueue('email', 'send', '{}', 'k')"
        )
        is False
    )


def test_a_superuser_that_sets_a_declared_role_is_that_role(connect, whose):
    session = connect()
    set_role(session, "accounts")

    enqueue_as(session)

    assert whose("k") == ["accounts"]


def test_a_superuser_that_sets_session_authorization_is_that_role(connect, whose):
    session = connect()
    session.execute("set session authorization accounts")

    enqueue_as(session)

    assert whose("k") == ["accounts"]


def test_logins_that_share_a_role_share_its_leases(
    new_caller, new_role, connect, enqueue
):
    caller = new_caller("worker", attributes="nologin")
    one, two = (connect(new_role(members_of=[caller])) for _ in range(2))
    set_role(one, caller)
    set_role(two, caller)
    enqueue()

    (lease,) = one.rows("select job_id, lease_token from jobs_email.claim('email')")
    completed = two.value("select jobs_email.complete(%s, %s)", *lease)

    assert completed


# What does not change it


@pytest.mark.parametrize(
    "statement",
    [
        "set role organization",
        "set local role organization",
        "select set_config('role', 'organization', false)",
        "select set_config('role', 'organization', true)",
        "set session authorization organization",
        "select set_config('session_authorization', 'organization', false)",
        "alter role accounts set role = 'organization'; set role organization",
    ],
)
def test_a_role_without_membership_cannot_be_set(statement, producer, whose):
    with producer.refusing("42501"):
        producer.execute(statement)

    enqueue_as(producer)

    assert whose("k") == ["accounts"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("application_name", "organization"),
        ("lenso_jobs.caller", "organization"),
        ("lenso_jobs.document", '{"producer_instances": ["organization"]}'),
        ("jobs_email.caller", "organization"),
        ("x.user", "organization"),
        ("search_path", "organization, pg_temp"),
    ],
)
def test_no_other_setting_changes_the_caller(setting, value, producer, whose):
    producer.execute("select set_config(%s, %s, false)", (setting, value))

    enqueue_as(producer)

    assert whose("k") == ["accounts"]


def test_a_role_in_the_connections_options_takes_membership(
    new_caller, new_role, connect, whose
):
    caller = new_caller("producer")
    member = connect(new_role(members_of=[caller]), options=f"-c role={caller}")

    enqueue_as(member)

    assert whose("k") == [caller]
    with pytest.raises(psycopg.OperationalError):
        connect("stranger", options=f"-c role={caller}")


def test_a_role_that_alter_role_sets_takes_membership(
    new_caller, new_role, connect, owner, whose
):
    caller, intruder = new_caller("producer"), new_caller("producer")
    member = new_role(members_of=[caller])
    for role in (intruder, member):
        owner.execute(f'alter role "{role}" set role = "{caller}"')

    enqueue_as(connect(intruder), "intruder")
    enqueue_as(connect(member), "member")

    assert (whose("intruder"), whose("member")) == ([intruder], [caller])


# Functions in between


@pytest.fixture
def lend(owner):
    """Make a function of another role's that enqueues; everybody may call it."""

    def lend(lender, clauses="security definer", body=None):
        owner.execute(
            sql.SQL(
                "create function public.lent() returns uuid language sql {} as {};"
                " alter function public.lent() owner to {}"
            ).format(
                sql.SQL(clauses),
                sql.Literal(
                    body
                    or "select job_id from jobs_email.enqueue('email','send','{}','k')"
                ),
                sql.Identifier(lender),
            )
        )

    return lend


def test_a_definer_function_of_another_caller_acts_as_the_session(
    lend, producer, other_producer, whose
):
    lend("organization")

    producer.execute("select public.lent()")
    other_producer.execute("select public.lent()")

    assert whose("k") == ["accounts", "organization"]


def test_a_definer_function_of_a_caller_lends_its_name_to_no_stranger(
    lend, stranger, whose
):
    lend("organization")

    with stranger.refusing("42501") as refusal:
        stranger.execute("select public.lent()")

    assert "SET ROLE" in refusal.value.diag.message_hint
    assert whose("k") == []


@pytest.mark.parametrize("lender", ["organization", "postgres"])
def test_a_definer_function_cannot_set_a_role(lender, lend, producer):
    lend(
        lender,
        "security definer",
        "select set_config('role', 'organization', false); select null::uuid",
    )

    with producer.refusing("42501"):
        producer.execute("select public.lent()")


def test_definer_functions_in_definer_functions_keep_the_sessions_role(
    lend, owner, producer, whose
):
    lend("organization")
    owner.execute(
        "create function public.outer() returns uuid language sql security definer"
        " as 'select public.lent()';"
        " alter function public.outer() owner to postgres"
    )

    producer.execute("select public.outer()")

    assert whose("k") == ["accounts"]


def test_a_function_that_sets_a_role_takes_membership_of_its_caller(
    new_caller, lend, connect, owner, stranger, new_role, whose
):
    caller = new_caller("producer")
    lend(caller, f'set role = "{caller}"')

    with stranger.refusing("42501"):
        stranger.execute("select public.lent()")
    connect(new_role(members_of=[caller])).execute("select public.lent()")

    assert whose("k") == [caller]


def test_a_trigger_of_another_caller_acts_as_the_session(
    lend, owner, producer, other_producer, whose
):
    lend("organization")
    owner.execute(
        "create table public.account (id integer);"
        " grant insert on public.account to accounts;"
        " create function public.enqueue_it() returns trigger language plpgsql"
        "  security definer as 'begin perform public.lent(); return new; end';"
        " alter function public.enqueue_it() owner to organization;"
        " create trigger enqueues after insert on public.account"
        "  for each row execute function public.enqueue_it()"
    )

    producer.execute("insert into public.account values (1)")

    assert whose("k") == ["accounts"]


# Names


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        '{}"quoted"',
        "{} with spaces ",
        "{}'s",
        "{}\\back",
        "{}.dotted",
        "{},comma",
        "UPPER{}",
        "{}äöü",
        "{:é<47}x",
        '"{}"',
        "$user{}",
        "default{}",
    ],
)
def test_a_caller_may_have_any_name_that_a_role_may_have(
    name, new_caller, new_role, connect, owner, whose
):
    name = new_caller("producer", "worker", name=name.format(uuid4().hex))
    login = connect(name)
    replica = connect(new_role(members_of=[name]))
    set_role(replica, name)

    enqueue_as(login)
    enqueue_as(replica)
    (lease,) = replica.rows("select job_id, lease_token from jobs_email.claim('email')")
    completed = login.value("select jobs_email.complete(%s, %s)", *lease)

    assert whose("k") == [name]
    assert owner.rows("select worker from attempt") == [(name,)]
    assert completed


def test_names_that_differ_in_case_alone_are_two_callers(new_caller, connect, whose):
    name = f"role_{uuid4().hex}"
    lower, upper = (
        new_caller("producer", name=cased) for cased in (name, name.upper())
    )

    enqueue_as(connect(lower))
    enqueue_as(connect(upper))

    assert whose("k") == sorted([lower, upper])


# A lease is its worker's alone


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        ("select renew(%s, %s)", None),
        ("select complete(%s, %s)", None),
        ("select fail(%s, %s, 'smtp.down', true)", None),
        (
            "select outcome from renew_many(array[%s]::uuid[], array[%s]::text[])",
            "invalid_lease",
        ),
        (
            "select outcome from complete_many(array[%s]::uuid[], array[%s]::text[])",
            "invalid_lease",
        ),
        (
            (
                "select outcome from fail_many(array[%s]::uuid[], array[%s]::text[],"
                " array['smtp.down'], array[true])"
            ),
            "invalid_lease",
        ),
    ],
)
@pytest.mark.parametrize("ended", [False, True])
def test_the_right_token_is_worth_nothing_in_another_workers_hands(
    call, outcome, ended, enqueue, claim, worker, rival, state
):
    job_id = enqueue()
    _, token = claim()
    if ended:
        worker.execute(
            "select fail(%s, %s, 'smtp.down', true)"
            if "fail" in call
            else "select complete(%s, %s)",
            (job_id, token),
        )
    before = state()

    if outcome is None:
        with rival.refusing("LJ004"):
            rival.execute(call, (job_id, token))
    else:
        assert rival.value(call, job_id, token) == outcome

    assert state() == before


def test_a_lease_is_not_ones_own_after_becoming_another_worker(
    new_caller, connect, owner, enqueue
):
    first, second = new_caller("worker"), new_caller("worker")
    owner.execute(f'grant "{second}" to "{first}"')
    session = connect(first)
    enqueue()
    (lease,) = session.rows("select job_id, lease_token from claim('email')")
    set_role(session, second)

    with session.refusing("LJ004"):
        session.execute("select complete(%s, %s)", lease)
    session.execute("reset role")

    assert session.value("select complete(%s, %s)", *lease)


@pytest.mark.parametrize("token", ["", "job_lease_", "{}", "{} ", "\\x{}"])
def test_the_hash_or_a_part_of_a_token_is_not_a_token(
    token, enqueue, claim, worker, owner
):
    enqueue()
    job_id, _ = claim()
    shown = token.format(
        owner.value("select encode(lease_token_hash, 'hex') from live_job")
    )

    with worker.refusing("LJ004"):
        worker.execute("select complete(%s, %s)", (job_id, shown))
