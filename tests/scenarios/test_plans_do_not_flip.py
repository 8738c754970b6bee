"""The fault: a plan flips.

No verb reads more in later calls than in its first, and none reads a table from end to
end.

A claim takes a queue and a limit, and no kinds.
"""

import json
from itertools import product
from statistics import median
from uuid import uuid4

import pytest

ENDED = [20_000, pytest.param(2_000_000, marks=pytest.mark.long)]
DUE = 50
CALLS = 20
LIMITS = (1, 3, 50)
ENDS = ("complete(%s, %s)", "fail(%s, %s, 'c', false)")
MODES = ("auto", "force_generic_plan", "force_custom_plan")


@pytest.fixture
def enqueue_many(producer):
    """Enqueue so many jobs of several kinds."""

    def enqueue_many(name, count):
        items = [
            {
                "queue": "email",
                "kind": f"kind-{n % 7}",
                "payload": {},
                "idempotency_key": f"{name}-{n}",
            }
            for n in range(count)
        ]
        producer.execute("select enqueue_many(%s)", (json.dumps(items),))

    return enqueue_many


@pytest.fixture
def held(owner):
    """What email-worker holds, each with a token that is known."""

    def held():
        return [
            (job_id, str(job_id))
            for (job_id,) in owner.rows(
                "update live_job set lease_token_hash = sha256(job_id::text::bytea)"
                " where lease_owner = 'email-worker' returning job_id"
            )
        ]

    return held


@pytest.fixture
def planned(by_hand, connect, enqueue_many, held):
    """A session for each mode and limit that has planned every verb on empty tables."""
    sessions = {}
    for mode, limit in product(MODES, LIMITS):
        session = sessions[mode, limit] = connect("email-worker")
        session.execute(f"set statement_timeout = '1s'; set plan_cache_mode = {mode}")
        for end in ENDS * 2:
            enqueue_many(f"{uuid4()}", 1)
            session.execute(f"select claim('email', {limit})")
            (lease,) = held()
            session.execute("select renew(%s, %s)", lease)
            session.execute(f"select {end}", lease)
    return sessions


@pytest.mark.slow
@pytest.mark.parametrize("ended", ENDED)
def test_the_later_calls_of_a_session_read_no_more_than_its_first(
    ended, planned, fill, enqueue_many, held, buffers
):
    fill(ended=ended)
    enqueue_many("kept", DUE)
    first, later = {}, {}

    for (mode, limit), session in planned.items():

        def spend(spent, verb, *lease, on=session, plan=(mode, limit)):
            read = buffers(on, f"select {verb}", *lease)
            spent.setdefault((*plan, verb), []).append(read)

        for n in range(CALLS):
            spent = first if n < 5 else later
            enqueue_many(f"{mode}-{limit}-{n}", limit)
            spend(spent, f"claim('email', {limit})")
            one, *rest = leases = held()
            assert len(leases) == limit
            spend(spent, "renew(%s, %s)", *one)
            spend(spent, ENDS[n % 2], *one)
            if rest:
                columns = tuple(map(list, zip(*rest, strict=True)))
                session.execute("select complete_many(%s, %s)", columns)

    # The least of the first five, and the most of the later ones but for a few: what a
    # session reads of the catalogues, again when others make roles, is apart. A plan that
    # flipped stays as it is, and a scan would be hundreds.
    assert {
        verb: (first[verb], later[verb])
        for verb in first
        if median(later[verb]) > 2 * min(first[verb]) + 20
        or sorted(later[verb])[-4] > 20 * verb[1] + 300
    } == {}
    assert len(first) == 4 * len(MODES) * len(LIMITS)
