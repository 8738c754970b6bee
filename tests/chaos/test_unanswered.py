"""A COMMIT with an effect in it was not answered: what to ask before it is repeated."""

from __future__ import annotations

import psycopg
import pytest

from cutter import Cutter


@pytest.fixture
def unanswered(connect, owner, enqueue, claim, conninfo):
    """Complete a job with an effect, and lose the connection at the COMMIT.

    Return the lease.
    """
    owner.execute("create table public.effect (job_id uuid)")
    owner.execute('grant insert on public.effect to "email-worker"')

    def unanswered(words):
        enqueue()
        lease = claim()
        with Cutter(conninfo) as cutter:
            session = connect("email-worker", **cutter.address)
            cutter.cut(words)
            with pytest.raises(psycopg.OperationalError), session.transaction():
                effect(session, lease)
        return lease

    return unanswered


def effect(session, lease):
    session.execute("insert into public.effect values (%s)", lease[:1])
    session.execute("select complete(%s, %s)", lease)


def test_a_repeated_completion_would_let_the_effect_happen_twice(
    owner, worker, unanswered
):
    lease = unanswered("commit")

    with worker.transaction():
        effect(worker, lease)

    assert owner.value("select count(*) from public.effect") == 2


def test_renew_tells_that_the_transaction_has_happened(owner, worker, unanswered):
    lease = unanswered("commit")

    with worker.refusing("LJ004"):
        worker.execute("select renew(%s, %s)", lease)

    assert owner.value("select count(*) from public.effect") == 1


def test_renew_tells_that_the_transaction_has_not_happened(owner, worker, unanswered):
    lease = unanswered("complete")

    assert worker.value("select renew(%s, %s)", *lease)
    with worker.transaction():
        effect(worker, lease)

    assert owner.value("select count(*) from public.effect") == 1
