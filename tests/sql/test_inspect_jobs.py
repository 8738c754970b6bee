"""Pages of jobs by queue, status and kind, each call bounded."""

from uuid import UUID

import pytest

JOBS = "select job_id from inspect_jobs('email', %s, p_limit => %s, p_before => %s)"
STATUSES = ("queued", "running", "succeeded", "failed", "lost")


@pytest.fixture
def of_each(enqueue, claim, worker, owner):
    """Make two jobs of each status, in turn; returns their ids by status, newest first."""
    found = {status: [] for status in STATUSES}
    for _ in range(2):
        for status in ("succeeded", "failed", "running", "lost", "queued"):
            job_id = enqueue(queue="email")
            found[status].insert(0, job_id)
            if status == "lost":
                owner.execute("delete from live_job where job_id = %s", (job_id,))
            if status in {"queued", "lost"}:
                owner.execute(
                    "update live_job set available_at = now() + interval '1 h'"
                    " where job_id = %s",
                    (job_id,),
                )
                continue
            held = claim()
            if status == "succeeded":
                worker.execute("select complete(%s, %s)", held)
            if status == "failed":
                worker.execute("select fail(%s, %s, 'refused', false)", held)
    enqueue(queue="slow")
    return found


def test_inspect_jobs_lists_the_jobs_of_each_status_newest_first(of_each, observer):
    found = {
        status: observer.rows("select * from inspect_jobs('email', %s)", status)
        for status in STATUSES
    }

    assert {
        status: [row[0] for row in rows] for status, rows in found.items()
    } == of_each
    for rows in found.values():
        for row in rows:
            assert observer.rows("select * from inspect(%s)", row[0]) == [row]


def test_inspect_jobs_keeps_to_a_kind(producer, observer):
    for kind in ("send", "call", "send"):
        producer.execute(
            "select enqueue('email', %s, '{}', %s || random())", (kind, kind)
        )
    count = "select count(*) from inspect_jobs('email', 'queued', %s)"

    kinds = ("send", "call", "none", "k" * 256)
    assert [observer.value(count, kind) for kind in kinds] == [2, 1, 0, 0]


def test_inspect_jobs_is_paged_by_the_last_job(of_each, observer):
    for status, (newest, oldest) in of_each.items():
        pages = [None]
        while rows := observer.rows(JOBS, status, 1, pages[-1]):
            pages.append(*rows[-1])
        assert pages[1:] == [newest, oldest]


def test_inspect_jobs_never_shows_a_payload_or_key(observer, enqueue):
    enqueue(key="s3cr3t", payload={"card": "s3cr3t"})

    assert "s3cr3t" not in str(
        observer.row("select * from inspect_jobs('email', 'queued')")
    )


@pytest.mark.parametrize(
    ("arguments", "sqlstate"),
    [
        ("'none', 'queued'", "LJ003"),
        ("null, 'queued'", "LJ003"),
        ("'email', 'retried'", "LJ007"),
        ("'email', null", "LJ007"),
        ("'email', 'queued', 'a b'", "LJ007"),
        ("'email', 'queued', repeat('k', 257)", "LJ007"),
        ("'email', 'queued', null, 0", "LJ007"),
        ("'email', 'queued', null, 10001", "LJ007"),
        ("'email', 'queued', null, null", "LJ007"),
    ],
)
def test_inspect_jobs_refuses_an_argument_out_of_bounds(observer, arguments, sqlstate):
    with observer.refusing(sqlstate):
        observer.execute(f"select inspect_jobs({arguments})")


def test_inspect_jobs_finds_live_jobs_below_any_number_of_ended_ones(
    observer, owner, enqueue
):
    wanted = enqueue()
    owner.execute(
        "insert into job (job_id, created_at, max_attempts, producer, queue, kind,"
        " idempotency_key, payload)"
        " select ('ffff' || right(gen_random_uuid()::text, -4))::uuid, now(), 3,"
        " 'accounts', 'slow', 'send', n, '{}' from generate_series(1, 10000) as n"
    )

    assert observer.rows(JOBS, "queued", 9, None) == [(wanted,)]
    ((mark,),) = observer.rows(JOBS, "succeeded", 9, None)
    assert observer.rows(JOBS, "succeeded", 9, mark) == []


@pytest.mark.slow
@pytest.mark.parametrize("status", ["succeeded", "queued"])
def test_inspect_jobs_reads_10000_jobs_a_call_and_says_where_to_continue(
    observer, owner, enqueue, fill, buffers, status
):
    wanted = enqueue(queue="slow")
    if status == "succeeded":
        owner.execute(
            "with l as (delete from live_job returning *) insert into attempt"
            " (job_id, leased_at, ended_at, attempt, max_attempts, queue, worker,"
            " outcome, lease_token_hash) select job_id, now(), now(), 1, 3, queue, 'w',"
            " 'succeeded', '' from l"
        )
        fill(ended=20001)
    else:
        fill(scheduled=20001)
    # Newer than the wanted one.
    for table in ("job", "live_job", "attempt"):
        owner.execute(
            f"update {table} set job_id = overlay(job_id::text placing 'f' from 1)::uuid"
            " where job_id <> %s",
            (wanted,),
        )
    owner.execute("vacuum analyze")
    page = "select job_id, status from inspect_jobs('slow', %s, null, 100, %s)"

    before, told = None, []
    while rows := observer.rows(page, status, before):
        told += rows
        before = rows[-1][0]

    assert [each for _, each in told] == [None, None, status]
    assert isinstance(told[0][0], UUID)
    assert told[-1][0] == wanted
    few = buffers(observer, f"select count(*) from inspect_jobs('slow', '{status}')")
    assert few < 130000


@pytest.mark.usefixtures("by_hand")
def test_a_page_planned_on_few_jobs_has_the_newest_of_them(enqueue, operator):
    newest = [enqueue() for _ in range(3)][:0:-1]
    assert operator.rows(JOBS, "queued", 2, None) == [(job_id,) for job_id in newest]
