"""The fault: one big delete.

A purge goes in bounded steps that keep their progress. Live jobs are never touched.

Arguments that are refused: sql/test_purge.py. That no step walks a table: sql/test_plans.py.
What claims lose by it is the benchmarks' to measure. There is one cut-off for every outcome.
"""

import json
from threading import Event

import psycopg
import pytest

SIZES = [
    pytest.param(5_000, 500, id="5,000 jobs"),
    pytest.param(500_000, 5_000, id="500,000 jobs", marks=pytest.mark.long),
]
LIVE = 1_000


@pytest.fixture
def leased(configure, producer, rival):
    """Three hundred jobs that spare-worker holds for an hour."""
    configure(lease_seconds=3600)
    items = [
        {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": f"h{n}"}
        for n in range(300)
    ]
    producer.execute("select enqueue_many(%s)", (json.dumps(items),))
    return [
        job_id for (job_id,) in rival.rows("select job_id from claim('email', 300)")
    ]


@pytest.fixture
def ended(owner, fill):
    """Insert ended jobs, half of them failed. Return when they had ended."""

    def ended(count):
        fill(ended=count)
        owner.execute(
            "update attempt set outcome = 'failed', failure_code = 'down',"
            " retryable = false where job_id::text < '8'"
        )
        owner.execute("analyze")
        return owner.value("select clock_timestamp()")

    return ended


@pytest.mark.slow
@pytest.mark.parametrize(("count", "step"), SIZES)
def test_steps_that_fit_a_timeout_purge_all_that_ended_and_nothing_else(
    count,
    step,
    leased,
    fill,
    ended,
    operator,
    owner,
    crews,
    hire,
    enqueue,
    connect,
    background,
    until,
):
    before = ended(count)
    fill(scheduled=LIVE - len(leased))
    live = owner.rows("select l::text from live_job as l order by 1")
    is_over = Event()

    async def handler(crew, lease):
        pass

    def produce():
        session, made = connect("accounts"), 0
        session.execute("set statement_timeout = '2s'")
        while not (is_over.is_set() and made > 10):
            for crew in crews:
                enqueue(queue=crew.queue, session=session)
                made += 1
        return made

    hired = [hire(crew, handler) for crew in crews]
    produced = background(produce)
    operator.execute("set statement_timeout = '2s'")
    steps = []
    try:
        while not steps or steps[-1]:
            steps.append(operator.value("select purge(%s, %s)", before, step))
    finally:
        is_over.set()
    made = produced.result()
    until(lambda: owner.value("select count(*) from live_job") == LIVE)

    assert steps == [step] * (count // step) + [0]
    assert sum(each.stop().succeeded for each in hired) == made
    assert owner.rows("select l::text from live_job as l order by 1") == live
    assert owner.value("select count(*) from job") == LIVE + made
    assert owner.value("select count(*) from attempt") == made


@pytest.mark.slow
def test_a_purge_that_is_killed_loses_its_last_step_alone(
    ended, operator, owner, connect, background, blocked, prefix
):
    before = ended(300)
    assert operator.value("select purge(%s, 100)", before) == 100
    holder = connect()

    with holder.transaction():
        holder.execute("lock table operator_act in exclusive mode")
        killed = background(operator.value, "select purge(%s, 100)", before)
        blocked(operator, holder)
        owner.execute("select pg_terminate_backend(%s, 10000)", (operator.pid,))
        with pytest.raises(psycopg.OperationalError):
            killed.result()

    again = connect(f"{prefix}_duty")
    assert owner.value("select count(*) from job") == 200
    assert owner.value("select count(*) from attempt") == 200
    steps = [again.value("select purge(%s, 150)", before) for _ in range(3)]
    assert steps == [150, 50, 0]
