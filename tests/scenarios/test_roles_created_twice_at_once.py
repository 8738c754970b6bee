"""The fault: roles made twice at once.

All succeed. Roles that exist are used as they are.

Roles that are refused, and callers that exist: security/test_set_up_refusals.py. Two that
want one role_prefix: concurrency/test_installs.py.
"""

from threading import Barrier

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs.operator import setup


@pytest.fixture
def callers(new_prefix):
    """What the names of the callers of all Instances begin with."""
    return new_prefix()


@pytest.fixture
def targets(databases, instance_of, callers):
    """Four Instances for each of two empty databases."""
    return [
        (
            instance_of(
                f"jobs_{n}",
                producer_instances=[f"{callers}_app"],
                worker_instances=[f"{callers}_mailer"],
                observer_instances=[],
            ),
            conninfo,
        )
        for conninfo in (databases(), databases())
        for n in range(4)
    ]


@pytest.fixture
def set_up_at_once(background):
    """Set all of them up at the same time and return the reports."""

    def set_up_at_once(targets):
        start = Barrier(len(targets), timeout=20)

        def install(*target):
            start.wait()
            return setup(*target)

        return [x.result() for x in [background(install, *each) for each in targets]]

    return set_up_at_once


@pytest.fixture
def roles(owner):
    """Everything the server knows of roles with these prefixes, and their memberships."""

    def roles(*prefixes):
        return owner.rows(
            "select r::text from pg_authid as r where rolname ~ %s order by 1",
            f"^({'|'.join(prefixes)})_",
        ), owner.rows(
            "select roleid::regrole::text, member::regrole::text, admin_option"
            " from pg_auth_members where member::regrole::text ~ %s order by 1, 2",
            f"^({'|'.join(prefixes)})_",
        )

    return roles


def run_a_job(instance, conninfo):
    """Enqueue, claim and complete a job as the declared callers."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"set search_path = {instance.schema_}")
        connection.execute(f"set role {instance.producer_instances[0]}")
        connection.execute("select enqueue('email', 'send', '{}', 'k')")
        connection.execute(f"set role {instance.worker_instances[0]}")
        lease = connection.execute(
            "select job_id, lease_token from claim('email')"
        ).fetchone()
        return connection.execute("select complete(%s, %s)", lease).fetchone()[0]


@pytest.mark.slow
def test_eight_at_once_succeed_with_new_roles_and_with_those_that_are_there(
    targets, callers, set_up_at_once, roles, new_prefix, owner
):
    prefixes = [callers, *(instance.prefix for instance, _ in targets)]

    first = set_up_at_once(targets)

    assert all(report.migrations and report.configured for report in first)
    assert all(run_a_job(*target) for target in targets)
    made = roles(*prefixes)
    again = [setup(*target) for target in targets[3:5]]
    assert not any(report.migrations or report.configured for report in again)
    assert roles(*prefixes) == made

    # The databases go, the roles stay; some are changed by somebody else.
    for conninfo in {conninfo for _, conninfo in targets}:
        name = conninfo_to_dict(conninfo)["dbname"]
        owner.execute(f"drop database {name} with (force)")
        owner.execute(f"create database {name} template template0")
    club = f"{new_prefix()}_club"
    for statement in (
        f"create role {club}",
        f"grant {club} to {callers}_mailer",
        f"alter role {callers}_app login password 'p' connection limit 7",
        f"alter role {targets[0][0].prefix}_worker login password 'p'",
    ):
        owner.execute(statement)
    left = roles(*prefixes)

    half = targets[::2]
    second = set_up_at_once(half)

    assert all(report.migrations and report.configured for report in second)
    assert all(run_a_job(*target) for target in half)
    assert roles(*prefixes) == left
    assert (club, f"{callers}_mailer", False) in left[1]
