"""The fault: two callers with the same key.

Two independent jobs. The effective role alone says whose job it is.
"""

from uuid import uuid4

import pytest
from psycopg import sql

MINE, THEIRS = {"of": "accounts"}, {"of": "organization"}


@pytest.fixture
def jobs(owner):
    """Whose job is which, and with which payload."""
    return lambda: owner.rows(
        "select producer, idempotency_key, job_id, payload from job order by 1, 2"
    )


def test_two_callers_with_one_key_have_two_jobs_and_learn_nothing(client, verbs, jobs):
    alice, bob = client("accounts"), client("organization")

    for verb, ask in verbs.items():
        mine = ask(alice, verb, MINE)
        theirs = ask(bob, verb, THEIRS)
        again = ask(bob, verb, MINE)

        assert (mine[1], theirs[1], again) == ("created", "created", (None, "conflict"))
        assert mine[0] != theirs[0]
        assert ask(alice, verb, MINE) == (mine[0], "existing")
        assert ask(bob, verb, THEIRS) == (theirs[0], "existing")
    assert [(producer, payload) for producer, _, _, payload in jobs()] == [
        *[("accounts", MINE)] * 2,
        *[("organization", THEIRS)] * 2,
    ]


@pytest.fixture
def app(new_caller):
    """A declared caller that nobody logs in as."""
    return new_caller("producer", "worker", attributes="nologin")


@pytest.fixture
def member(new_caller, owner, app):
    """A declared caller that is a member of the other one."""
    name = new_caller("producer", "worker")
    owner.execute(f'grant "{app}" to "{name}"')
    return name


def set_role(name, *, local=False):
    return (
        sql.SQL("set {} role {}")
        .format(sql.SQL("local" if local else ""), sql.Identifier(name))
        .as_string()
    )


def test_the_caller_is_the_role_in_force(
    client, way, beneath, verbs, jobs, app, member
):
    session = client(member)
    ask = verbs["enqueue"]

    alone = ask(session, "k", {})
    beneath(session).execute("begin")
    beneath(session).execute(set_role(app, local=True))
    locally = ask(session, "k", {})
    beneath(session).execute("commit")
    afterwards = ask(session, "k", {})
    beneath(session).execute(set_role(app))
    as_app = [ask(session, "k", {}) for ask in verbs.values()]
    options = [client(member, options=f"-c role={app}")]
    if way != "sql":
        options.append(client(member, caller=app))
    as_told = [ask(each, "k", {}) for each in options]

    assert (alone[1], locally[1]) == ("created", "created")
    assert afterwards == (alone[0], "existing")
    assert {*as_app, *as_told} == {(locally[0], "existing")}
    assert {(producer, job_id) for producer, _, job_id, _ in jobs()} == {
        (member, alone[0]),
        (app, locally[0]),
    }


def test_a_lease_is_of_the_role_in_force_too(
    client, beneath, enqueue, refused, app, member
):
    enqueue()
    session = client(member)
    beneath(session).execute(set_role(app))
    (lease,) = session.claim("email")
    alone = client(member)

    for call in (
        alone.renew,
        alone.complete,
        lambda lease: alone.fail(lease, "down", retryable=True),
    ):
        with refused("LJ004"):
            call(lease)
    assert alone.renew_many([lease])[0].outcome == "invalid_lease"
    assert alone.complete_many([lease])[0].outcome == "invalid_lease"
    assert alone.fail_many([(lease, "down", True)])[0].outcome == "invalid_lease"
    assert session.renew(lease) > lease.lease_expires_at
    assert session.complete(lease)


def test_no_setting_forges_a_caller(client, beneath, refused, verbs, jobs):
    session = client("accounts", options="-c x.user=organization")

    for statement in (
        "set x.\"user\" = 'organization'",
        "set lenso_jobs.caller = 'organization'",
        "set application_name = 'organization'",
    ):
        beneath(session).execute(statement)
    with refused("42501"):
        beneath(session).execute("set role organization")
    answers = [ask(session, verb, {}) for verb, ask in verbs.items()]

    assert [outcome for _, outcome in answers] == ["created"] * 2
    assert {producer for producer, *_ in jobs()} == {"accounts"}


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_caller_without_membership_is_refused(client, refused, jobs):
    session = client("accounts", caller="organization")

    with refused("42501"):
        session.enqueue("email", "send", {}, idempotency_key="k")

    assert jobs() == []


def test_names_and_keys_that_run_together_to_one_text_are_two_jobs(
    client, new_caller, verbs, jobs
):
    name = uuid4().hex
    joined, plain = (
        client(new_caller("producer", name=each)) for each in (f"{name}:b", name)
    )

    first = verbs["enqueue"](joined, "c", {"of": "joined"})
    second = verbs["enqueue"](plain, "b:c", {"of": "plain"})

    assert jobs() == [
        (name, "b:c", second[0], {"of": "plain"}),
        (f"{name}:b", "c", first[0], {"of": "joined"}),
    ]


def test_a_renamed_role_is_undeclared_and_a_new_role_of_its_name_is_the_caller(
    client, new_caller, owner, prefix, refused, verbs, jobs
):
    name = new_caller("producer")
    renamed = f"{name}_new"
    alice = client(name)
    made = [ask(alice, verb, {}) for verb, ask in verbs.items()]

    owner.execute(f'alter role "{name}" rename to "{renamed}"')
    nobody = client(renamed)
    for verb, ask in verbs.items():
        with refused("42501") as caught:
            ask(nobody, verb, {})
        assert "is not a declared producer" in str(caught.value)
    owner.execute(f'alter role "{renamed}" rename to "{name}"')
    owner.execute(f'drop role "{name}"')
    owner.execute(f'create role "{name}" login in role "{prefix}_producer"')
    alice = client(name)
    again = [ask(alice, verb, {}) for verb, ask in verbs.items()]

    assert again == [(job_id, "existing") for job_id, _ in made]
    assert {producer for producer, *_ in jobs()} == {name}
