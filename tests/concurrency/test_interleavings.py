"""Two acts on one job at once: which waits for the other, and what each returns.

The table has a row for every pair. The first act is done in a transaction left open.
Then the second act starts:

- ``waits``: whether it waits for the first. Otherwise it returns before the first ends.
- ``commit``, ``rollback``: what it returns when the first ends so, and the job's state.
- ``old snapshot``: what it returns at REPEATABLE READ, with a snapshot from before the
  commit of the first.

A refusal has its name. ``=`` repeats the cell to its left.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import chain
from uuid import uuid4

import psycopg
import pytest

# A job is brought to these by its first lease, whose token the acts below show.
#
#   absent   not enqueued                  lapsed   leased, ran out, two attempts left
#   ready    due                           spent    leased, ran out, none left
#   leased   leased, two attempts left     done     completed
#   last     leased, no attempt left       failed   given up
TABLE = """
first                                start   second                                       waits  commit                rollback              old snapshot   left by commit  left by rollback

claim                                ready   claim                                        no     nothing               =                     40001          running 1       queued 0
claim                                ready   enqueue                                      no     existing              =                     =              running 1       queued 0
claim                                ready   enqueue_other                                no     idempotency_conflict  =                     =              running 1       queued 0
claim                                ready   purge                                        no     purged 0              =                     =              running 1       queued 0
claim                                ready   redrive                                      no     invalid_argument      =                     =              running 1       queued 0
claim                                ready   retire                                       no     retired 0             =                     =              running 1       queued 0

claim                                lapsed  claim                                        no     nothing               =                     40001          running 2       running 1
claim                                lapsed  renew                                        yes    invalid_lease         =                     40001          running 2       running 1
claim                                lapsed  renew_many                                   no     busy                  =                     40001          running 2       running 1
claim                                lapsed  complete,complete_many                       yes    invalid_lease         =                     40001          running 2       running 1
claim                                lapsed  fail,fail_many,release,release_many,give_up  yes    invalid_lease         =                     40001          running 2       running 1
claim                                lapsed  enqueue                                      no     existing              =                     =              running 2       running 1
claim                                lapsed  enqueue_other                                no     idempotency_conflict  =                     =              running 2       running 1
claim                                lapsed  purge                                        no     purged 0              =                     =              running 2       running 1
claim                                lapsed  redrive                                      no     invalid_argument      =                     =              running 2       running 1
claim                                lapsed  retire                                       no     retired 0             =                     =              running 2       running 1

claim,retire                         spent   claim                                        no     nothing               =                     40001          failed 1        running 1
claim,retire                         spent   renew                                        yes    invalid_lease         =                     40001          failed 1        running 1
claim,retire                         spent   renew_many                                   no     busy                  =                     40001          failed 1        running 1
claim,retire                         spent   complete,complete_many                       yes    invalid_lease         =                     40001          failed 1        running 1
claim,retire                         spent   fail,fail_many,release,release_many,give_up  yes    invalid_lease         =                     40001          failed 1        running 1
claim,retire                         spent   enqueue                                      no     existing              =                     =              failed 1        running 1
claim,retire                         spent   enqueue_other                                no     idempotency_conflict  =                     =              failed 1        running 1
claim,retire                         spent   purge                                        no     purged 0              =                     =              failed 1        running 1
claim,retire                         spent   redrive                                      no     invalid_argument      =                     =              failed 1        running 1
claim,retire                         spent   retire                                       no     retired 0             =                     40001          failed 1        running 1

renew,renew_many                     leased  claim                                        no     nothing               =                     =              running 1       running 1
renew,renew_many                     leased  renew                                        yes    renewed               =                     40001          running 1       running 1
renew,renew_many                     leased  renew_many                                   no     busy                  =                     40001          running 1       running 1
renew,renew_many                     leased  complete,complete_many                       yes    completed             =                     40001          succeeded 1     succeeded 1
renew,renew_many                     leased  fail,fail_many,release,release_many          yes    queued                =                     40001          queued 1        queued 1
renew,renew_many                     leased  give_up                                      yes    failed                =                     40001          failed 1        failed 1
renew,renew_many                     leased  enqueue                                      no     existing              =                     =              running 1       running 1
renew,renew_many                     leased  enqueue_other                                no     idempotency_conflict  =                     =              running 1       running 1
renew,renew_many                     leased  purge                                        no     purged 0              =                     =              running 1       running 1
renew,renew_many                     leased  redrive                                      no     invalid_argument      =                     =              running 1       running 1
renew,renew_many                     leased  retire                                       no     retired 0             =                     =              running 1       running 1

renew_many,complete_many             lapsed  claim                                        no     nothing               =                     leased 2       running 1       running 1
renew_many,fail_many                 lapsed  renew,complete,fail                          yes    invalid_lease         =                     =              running 1       running 1
renew_many,fail_many                 lapsed  renew_many                                   no     busy                  =                     invalid_lease  running 1       running 1
complete_many,fail_many              spent   retire                                       no     retired 0             =                     retired 1      running 1       running 1
renew,complete,fail                  lapsed  claim                                        no     leased 2              =                     =              running 2       running 2
renew,complete,fail                  lapsed  renew,complete,fail                          no     invalid_lease         =                     =              running 1       running 1

complete,complete_many               leased  claim                                        no     nothing               =                     =              succeeded 1     running 1
complete,complete_many               leased  renew                                        yes    invalid_lease         renewed               40001          succeeded 1     running 1
complete,complete_many               leased  renew_many                                   no     busy                  =                     40001          succeeded 1     running 1
complete,complete_many               leased  complete,complete_many                       yes    completed             =                     40001          succeeded 1     succeeded 1
complete,complete_many               leased  fail,fail_many,release,release_many          yes    invalid_lease         queued                40001          succeeded 1     queued 1
complete,complete_many               leased  give_up                                      yes    invalid_lease         failed                40001          succeeded 1     failed 1
complete,complete_many               leased  enqueue                                      no     existing              =                     =              succeeded 1     running 1
complete,complete_many               leased  enqueue_other                                no     idempotency_conflict  =                     =              succeeded 1     running 1
complete,complete_many               leased  purge                                        no     purged 0              =                     =              succeeded 1     running 1
complete,complete_many               leased  redrive                                      no     invalid_argument      =                     =              succeeded 1     running 1
complete,complete_many               leased  retire                                       no     retired 0             =                     =              succeeded 1     running 1
complete                             done    complete,complete_many                       no     completed             =                     =              succeeded 1     succeeded 1
complete                             done    purge                                        no     purged 1              =                     =              gone            gone
complete                             done    redrive                                      no     invalid_argument      =                     =              succeeded 1     succeeded 1

fail,fail_many,release,release_many  leased  claim                                        no     nothing               =                     =              queued 1        running 1
fail,fail_many,release,release_many  leased  renew                                        yes    invalid_lease         renewed               40001          queued 1        running 1
fail,fail_many,release,release_many  leased  renew_many                                   no     busy                  =                     40001          queued 1        running 1
fail,fail_many,release,release_many  leased  complete,complete_many                       yes    invalid_lease         completed             40001          queued 1        succeeded 1
fail,fail_many                       leased  fail,fail_many                               yes    queued                =                     40001          queued 1        queued 1
fail,fail_many                       leased  release,release_many                         yes    invalid_lease         queued                40001          queued 1        queued 1
release,release_many                 leased  fail,fail_many                               yes    invalid_lease         queued                40001          queued 1        queued 1
release,release_many                 leased  release,release_many                         yes    queued                =                     40001          queued 1        queued 1
fail,fail_many,release,release_many  leased  give_up                                      yes    invalid_lease         failed                40001          queued 1        failed 1
fail,fail_many,release,release_many  leased  enqueue                                      no     existing              =                     =              queued 1        running 1
fail,fail_many,release,release_many  leased  enqueue_other                                no     idempotency_conflict  =                     =              queued 1        running 1
fail,fail_many,release,release_many  leased  purge                                        no     purged 0              =                     =              queued 1        running 1
fail,fail_many,release,release_many  leased  redrive                                      no     invalid_argument      =                     =              queued 1        running 1
fail,fail_many,release,release_many  leased  retire                                       no     retired 0             =                     =              queued 1        running 1

fail                                 last    claim                                        no     nothing               =                     =              failed 1        running 1
fail                                 last    renew                                        yes    invalid_lease         renewed               40001          failed 1        running 1
fail                                 last    complete,complete_many                       yes    invalid_lease         completed             40001          failed 1        succeeded 1
fail                                 last    fail,fail_many                               yes    failed                =                     40001          failed 1        failed 1
fail                                 last    give_up                                      yes    invalid_lease         failed                40001          failed 1        failed 1
fail                                 last    redrive                                      no     invalid_argument      =                     =              failed 1        running 1

give_up                              leased  claim                                        no     nothing               =                     =              failed 1        running 1
give_up                              leased  renew                                        yes    invalid_lease         renewed               40001          failed 1        running 1
give_up                              leased  renew_many                                   no     busy                  =                     40001          failed 1        running 1
give_up                              leased  complete,complete_many                       yes    invalid_lease         completed             40001          failed 1        succeeded 1
give_up                              leased  fail,fail_many,release,release_many          yes    invalid_lease         queued                40001          failed 1        queued 1
give_up                              leased  give_up                                      yes    failed                =                     40001          failed 1        failed 1
give_up                              leased  enqueue                                      no     existing              =                     =              failed 1        running 1
give_up                              leased  enqueue_other                                no     idempotency_conflict  =                     =              failed 1        running 1
give_up                              leased  purge                                        no     purged 0              =                     =              failed 1        running 1
give_up                              leased  redrive                                      no     invalid_argument      =                     =              failed 1        running 1
give_up                              leased  retire                                       no     retired 0             =                     =              failed 1        running 1
give_up                              failed  redrive                                      no     queued                =                     =              queued 1        queued 1
give_up                              failed  purge                                        no     purged 1              =                     =              gone            gone

enqueue                              absent  enqueue                                      yes    existing              created               40001          queued 0        queued 0
enqueue                              absent  enqueue_other                                yes    idempotency_conflict  created               40001          queued 0        queued 0
enqueue                              absent  claim                                        no     nothing               =                     =              queued 0        gone
enqueue                              absent  purge                                        no     purged 0              =                     =              queued 0        gone
enqueue                              absent  redrive                                      no     job_not_found         =                     =              queued 0        gone
enqueue                              absent  retire                                       no     retired 0             =                     =              queued 0        gone

enqueue,enqueue_other                ready   claim                                        no     leased 1              =                     =              running 1       running 1
enqueue,enqueue_other                ready   enqueue                                      no     existing              =                     =              queued 0        queued 0
enqueue,enqueue_other                ready   enqueue_other                                no     idempotency_conflict  =                     =              queued 0        queued 0
enqueue,enqueue_other                ready   redrive                                      no     invalid_argument      =                     =              queued 0        queued 0
enqueue                              leased  renew,renew_many                             no     renewed               =                     =              running 1       running 1
enqueue                              leased  complete,complete_many                       no     completed             =                     =              succeeded 1     succeeded 1
enqueue                              leased  fail,fail_many,release,release_many          no     queued                =                     =              queued 1        queued 1
enqueue                              leased  give_up                                      no     failed                =                     =              failed 1        failed 1
enqueue                              lapsed  claim                                        no     leased 2              =                     =              running 2       running 2
enqueue                              spent   claim                                        no     nothing               =                     =              failed 1        failed 1
enqueue                              spent   retire                                       no     retired 1             =                     =              failed 1        failed 1
enqueue,enqueue_other                done    purge                                        no     purged 1              =                     =              gone            gone
enqueue,enqueue_other                failed  redrive                                      no     queued                =                     =              queued 1        queued 1

purge                                done    claim                                        no     nothing               =                     =              gone            succeeded 1
purge                                done    renew,renew_many                             no     invalid_lease         =                     =              gone            succeeded 1
purge                                done    complete,complete_many                       no     completed             =                     =              gone            succeeded 1
purge                                done    fail,fail_many,release,release_many,give_up  no     invalid_lease         =                     =              gone            succeeded 1
purge                                done    enqueue                                      yes    created               existing              created        queued 0        succeeded 1
purge                                done    enqueue_other                                yes    created               idempotency_conflict  created        queued 0        succeeded 1
purge                                done    purge                                        no     purged 0              =                     40001          gone            succeeded 1
purge                                done    redrive                                      yes    job_not_found         invalid_argument      40001          gone            succeeded 1
purge                                done    retire                                       no     retired 0             =                     =              gone            succeeded 1

purge                                failed  give_up                                      no     failed                =                     =              gone            failed 1
purge                                failed  renew,complete,fail                          no     invalid_lease         =                     =              gone            failed 1
purge                                failed  enqueue                                      yes    created               existing              created        queued 0        failed 1
purge                                failed  enqueue_other                                yes    created               idempotency_conflict  created        queued 0        failed 1
purge                                failed  purge                                        no     purged 0              =                     40001          gone            failed 1
purge                                failed  redrive                                      yes    job_not_found         queued                40001          gone            queued 1

purge                                ready   claim                                        no     leased 1              =                     =              running 1       running 1
purge                                leased  complete                                     no     completed             =                     =              succeeded 1     succeeded 1
purge                                spent   claim                                        no     nothing               =                     =              failed 1        failed 1
purge                                spent   retire                                       no     retired 1             =                     =              failed 1        failed 1

redrive                              failed  claim                                        no     nothing               =                     =              queued 1        failed 1
redrive                              failed  renew,renew_many                             no     invalid_lease         =                     =              queued 1        failed 1
redrive                              failed  complete,complete_many                       no     invalid_lease         =                     =              queued 1        failed 1
redrive                              failed  fail,fail_many,release,release_many          no     invalid_lease         =                     =              queued 1        failed 1
redrive                              failed  give_up                                      no     failed                =                     =              queued 1        failed 1
redrive                              failed  enqueue                                      yes    existing              =                     40001          queued 1        failed 1
redrive                              failed  enqueue_other                                yes    idempotency_conflict  =                     40001          queued 1        failed 1
redrive                              failed  purge                                        no     purged 0              =                     40001          queued 1        failed 1
redrive                              failed  redrive                                      yes    invalid_argument      queued                40001          queued 1        queued 1
redrive                              failed  retire                                       no     retired 0             =                     =              queued 1        failed 1
redrive                              done    purge                                        no     purged 1              =                     =              gone            gone
redrive                              spent   claim                                        no     nothing               =                     =              failed 1        failed 1
redrive                              spent   retire                                       no     retired 1             =                     =              failed 1        failed 1

retire                               lapsed  claim                                        no     leased 2              =                     =              running 2       running 2
retire                               leased  renew,renew_many                             no     renewed               =                     =              running 1       running 1
retire                               leased  complete,complete_many                       no     completed             =                     =              succeeded 1     succeeded 1
retire                               failed  purge                                        no     purged 1              =                     =              gone            gone
retire                               failed  redrive                                      no     queued                =                     =              queued 1        queued 1
"""
LEASE = "%(job)s, %(token)s"
LEASES = "array[%(job)s]::uuid[], array[%(token)s]::text[]"
ENQUEUE = "select case when created then 'created' else 'existing' end from enqueue"
ACTS = {
    "claim": ("spare-worker", "select 'leased ' || attempt from claim('email')"),
    "renew": ("email-worker", f"select 'renewed' from renew({LEASE})"),
    "renew_many": ("email-worker", f"select outcome from renew_many({LEASES})"),
    "complete": ("email-worker", f"select 'completed' where complete({LEASE})"),
    "complete_many": ("email-worker", f"select outcome from complete_many({LEASES})"),
    "fail": ("email-worker", f"select status from fail({LEASE}, 'smtp.down', true)"),
    "fail_many": (
        "email-worker",
        f"select outcome from fail_many({LEASES}, array['smtp.down'], array[true])",
    ),
    "release": ("email-worker", f"select status from release({LEASE})"),
    "release_many": (
        "email-worker",
        f"select outcome from release_many({LEASES}, array[0])",
    ),
    "give_up": (
        "email-worker",
        f"select status from fail({LEASE}, 'smtp.down', false)",
    ),
    "enqueue": (
        "accounts",
        f"{ENQUEUE}('email', 'send', '{{}}', 'k', null, %(limit)s)",
    ),
    "enqueue_other": (
        "accounts",
        f"{ENQUEUE}('email', 'send', '{{\"to\": 2}}', 'k', null, %(limit)s)",
    ),
    "purge": ("operator", "select 'purged ' || purge(clock_timestamp())"),
    "redrive": ("operator", "select status from redrive(%(job)s)"),
    "retire": ("operator", "select 'retired ' || retire_expired(10)"),
}
REFUSALS = {
    "LJ002": "idempotency_conflict",
    "LJ004": "invalid_lease",
    "LJ006": "job_not_found",
    "LJ007": "invalid_argument",
}


def cells():
    """The rows of the table, one pair of acts each, by the first."""
    by_first = defaultdict(list)
    for line in filter(None, TABLE.splitlines()[2:]):
        firsts, start, seconds, waits, committed, undone, old, left, left_otherwise = (
            re.split(" {2,}", line)
        )
        undone = committed if undone == "=" else undone
        cell = {
            "start": start,
            "waits": waits == "yes",
            "commit": (committed, left),
            "rollback": (undone, left_otherwise),
            "old snapshot": undone if old == "=" else old,
        }
        for first in firsts.split(","):
            for second in seconds.split(","):
                by_first[first].append({**cell, "first": first, "second": second})
    return by_first


CELLS = cells()
# One cell for each act and start that others wait for.
WAITED_FOR = list(
    {
        (cell["first"], cell["start"]): cell
        for cell in chain.from_iterable(CELLS.values())
        if cell["waits"]
    }.values()
)
FIRSTS = pytest.mark.parametrize("first", CELLS)


@pytest.fixture
def stage(enqueue, claim, worker, expire, owner):
    """Bring the one job there is to a start and return what the acts refer to."""

    def stage(start):
        for table in ("live_job", "attempt", "job", "operator_act"):
            owner.execute(f"delete from {table}")
        limit = 1 if start in {"last", "spent"} else 3
        scene = {"job": uuid4(), "token": None, "limit": limit}
        if start == "absent":
            return scene
        scene["job"] = enqueue(key="k", max_attempts=limit)
        if start != "ready":
            _, scene["token"] = claim()
        if start in {"lapsed", "spent"}:
            expire(scene["job"])
        if start == "done":
            worker.execute(ACTS["complete"][1], scene)
        if start == "failed":
            worker.execute(ACTS["give_up"][1], scene)
        return scene

    return stage


@pytest.fixture
def pair(connect):
    """Two sessions, each of which can be anybody."""
    return connect(), connect()


@pytest.fixture
def act(prefix):
    """Do an act and return its result in a word or two."""

    def act(session, name, scene):
        role, statement = ACTS[name]
        role = f"{prefix}_duty" if role == "operator" else role
        session.execute("select set_config('role', %s, false)", (role,))
        try:
            row = session.execute(statement, scene).fetchone()
        except psycopg.Error as error:
            return REFUSALS.get(error.sqlstate, error.sqlstate)
        return row[0] if row else "nothing"

    return act


@pytest.fixture
def left(owner):
    """What is left of the job, and that its evidence agrees."""

    def left():
        status, attempts, ended, orphans = owner.rows(
            "select coalesce(i.status, 'gone'), i.attempts,"
            " (select count(*) from attempt),"
            " (select count(*) from live_job) from (select) as one"
            " left join (job as j cross join lateral inspect(j.job_id) as i) on true"
        )[0]
        if status == "gone":
            assert (ended, orphans) == (0, 0)
            return status
        assert ended == attempts - (status == "running")
        return f"{status} {attempts}"

    return left


@pytest.fixture
def play(pair, stage, act, left, blocked, background):
    """Do both acts of a cell, then end the first. Return the second's result and the state."""
    one, other = pair

    def play(cell, ending, *, savepoint=False):
        scene = stage(cell["start"])
        one.execute("begin")
        if savepoint:
            one.execute("savepoint here")
        act(one, cell["first"], scene)
        if cell["waits"]:
            answer = background(act, other, cell["second"], scene)
            blocked(other, one)
            one.execute(ending)
            answer = answer.result()
        else:
            answer = act(other, cell["second"], scene)
            one.execute(ending)
        one.execute("commit")
        return answer, left()

    return play


@pytest.mark.sampled
@FIRSTS
def test_the_second_act_waits_and_returns_as_the_table_says(first, play):
    wrong = []

    for cell in CELLS[first]:
        for ending in ("commit", "rollback"):
            found = play(cell, ending)
            if found != cell[ending]:
                wrong.append((cell["start"], cell["second"], ending, found))

    assert wrong == []


@pytest.mark.slow
@FIRSTS
def test_in_an_older_snapshot_the_second_act_returns_as_the_table_says(
    first, pair, stage, act, state
):
    one, other = pair
    wrong = []

    for cell in CELLS[first]:
        scene = stage(cell["start"])
        other.execute("begin isolation level repeatable read")
        other.execute("select")
        act(one, first, scene)
        before = state()
        answer = act(other, cell["second"], scene)
        other.execute("commit")
        if answer != cell["old snapshot"]:
            wrong.append((cell["start"], cell["second"], answer))
        if answer == "40001" and state() != before:
            wrong.append((cell["start"], cell["second"], "something was written"))

    assert wrong == []


@pytest.mark.slow
def test_an_act_undone_by_a_savepoint_lets_the_second_go_on_as_after_a_rollback(play):
    wrong = []

    for cell in WAITED_FOR:
        found = play(cell, "rollback to here", savepoint=True)
        if found != cell["rollback"]:
            wrong.append((cell["first"], cell["start"], cell["second"], found))

    assert wrong == []


@pytest.mark.slow
def test_an_act_that_gives_up_waiting_has_written_nothing(pair, stage, act, state):
    one, other = pair
    other.execute("set lock_timeout = '50ms'")
    wrong = []

    for cell in WAITED_FOR:
        scene = stage(cell["start"])
        before = state()
        one.execute("begin")
        act(one, cell["first"], scene)
        answer = act(other, cell["second"], scene)
        one.execute("rollback")
        if (answer, state()) != ("55P03", before):
            wrong.append((cell["first"], cell["start"], cell["second"], answer))

    assert wrong == []
