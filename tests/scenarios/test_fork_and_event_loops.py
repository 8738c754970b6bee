"""The fault: fork and event loops.

A clear error at the first use. The parent goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import traceback
from typing import NamedTuple
from uuid import UUID

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg_pool import AsyncConnectionPool

from lenso_jobs import AsyncJobs, Jobs

# Other threads of the process, such as a pool's, do not matter: the child only makes a
# new client.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

CHILDREN, JOBS = 4, 100
ALARM = 5
LONGEST = 30
EVERY_WAY = ("sync", "async", "sync on a pool", "async on a pool")
every_way = pytest.mark.parametrize("way", EVERY_WAY)


class Lost(NamedTuple):
    job_id: UUID = UUID("01900000-0000-7000-8000-000000000000")
    lease_token: str = "job_lease_no"


ITEM = {"queue": "email", "kind": "send", "payload": {}, "idempotency_key": "no"}
CALLS = (
    lambda jobs: jobs.enqueue("email", "send", {}, idempotency_key="no"),
    lambda jobs: jobs.enqueue_many([ITEM]),
    lambda jobs: jobs.claim("email"),
    lambda jobs: jobs.claim("email", 2),
    lambda jobs: jobs.claim("email", wait=60),
    lambda jobs: jobs.wait("email", 60),
    lambda jobs: jobs.renew(Lost()),
    lambda jobs: jobs.renew_many([Lost()]),
    lambda jobs: jobs.complete(Lost()),
    lambda jobs: jobs.complete_many([Lost()]),
    lambda jobs: jobs.fail(Lost(), "x", retryable=True),
    lambda jobs: jobs.fail_many([(Lost(), "x", True)]),
    lambda jobs: jobs.inspect(Lost().job_id),
    lambda jobs: jobs.next_available_at("email"),
)


@pytest.fixture(autouse=True)
def _no_hang_is_for_ever():
    """Interrupt a test that hangs, which is what sharing a connection comes to."""

    def interrupt(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def mortal(act, *arguments):
    """What a child does: it ends in time, with 0 only if all was as it should be."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(ALARM)
    try:
        act(*arguments)
    except BaseException:  # noqa: BLE001 - it must not become a second pytest
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def forked(act, *arguments):
    pid = os.fork()
    if pid == 0:
        mortal(act, *arguments)
    return pid


def ends(pids):
    """The exit code or signal of each child."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def refuses(jobs, words):
    """Insist that every call of an inherited client is refused."""
    for call in CALLS:
        with pytest.raises(RuntimeError, match=words):
            call(jobs)


@pytest.fixture
def child(open_client, way):
    """What each child does with the client it inherited, and then with its own."""

    def child(inherited, n):
        refuses(inherited, "was made in another process")
        inherited.close()
        signal.alarm(LONGEST // 2)  # from here on nothing may hang, only take its time
        with (
            open_client(way, "accounts") as producer,
            open_client(way, "email-worker") as worker,
        ):
            for m in range(JOBS):
                job = producer.enqueue("email", "send", {}, idempotency_key=f"{n}.{m}")
                assert job.created
            assert len(worker.claim("email", 10)) == 10

    return child


@pytest.fixture
def as_expected(owner):
    """Insist that there are the children's jobs, and so many of the parent's."""

    def as_expected(own):
        keys = {f"{n}.{m}" for n in range(CHILDREN) for m in range(JOBS)}
        assert {k for (k,) in owner.rows("select idempotency_key from job")} == (
            keys | own
        )
        claimed = owner.value("select count(*) from live_job where attempt = 1")
        assert claimed == 10 * CHILDREN

    return as_expected


@pytest.mark.slow
@pytest.mark.usefixtures("read_committed")
@every_way
def test_a_forked_child_is_refused_and_the_parent_goes_on(client, child, as_expected):
    jobs = client("accounts")
    jobs.enqueue("slow", "send", {}, idempotency_key="before")

    children = [forked(child, jobs, n) for n in range(CHILDREN)]

    # The parent does not wait for them.
    for n in range(20):
        jobs.enqueue("slow", "send", {}, idempotency_key=f"meanwhile.{n}")
    assert ends(children) == [0] * CHILDREN
    assert not jobs.enqueue("slow", "send", {}, idempotency_key="before").created
    as_expected({"before", *(f"meanwhile.{n}" for n in range(20))})


@pytest.mark.slow
@pytest.mark.usefixtures("read_committed")
@pytest.mark.parametrize("way", ["sync", "async on a pool"])
def test_a_process_of_multiprocessing_is_refused(client, child, as_expected):
    jobs = client("accounts")
    jobs.enqueue("slow", "send", {}, idempotency_key="before")
    context = multiprocessing.get_context("fork")

    children = [
        context.Process(target=mortal, args=(child, jobs, n)) for n in range(CHILDREN)
    ]
    for process in children:
        process.start()
    for process in children:
        process.join(LONGEST)

    assert [process.exitcode for process in children] == [0] * CHILDREN
    for process in children:
        process.close()
    assert jobs.enqueue("slow", "send", {}, idempotency_key="after").created
    as_expected({"before", "after"})


@pytest.fixture
def source(conninfo):
    """Open what an AsyncJobs stands on, in the loop that runs."""

    async def source(kind, role="accounts"):
        url = make_conninfo(conninfo, user=role)
        if kind == "connection":
            return await psycopg.AsyncConnection.connect(url, autocommit=True)
        pool = AsyncConnectionPool(url, min_size=1, max_size=2, open=False)
        await pool.open()
        return pool

    return source


every_kind = pytest.mark.parametrize("kind", ["connection", "pool"])


async def refuses_here(jobs, words):
    for call in CALLS:
        with pytest.raises(RuntimeError, match=words):
            await asyncio.wait_for(call(jobs), ALARM)


@every_kind
def test_a_fork_within_a_running_loop_is_refused_and_the_loop_goes_on(
    kind, source, owner
):
    async def of_its_own():
        jobs = AsyncJobs(await source(kind), "jobs_email")
        await jobs.enqueue("email", "send", {}, idempotency_key="child")
        await jobs._source.close()

    async def main():
        async with await source(kind) as opened:
            jobs = AsyncJobs(opened, "jobs_email")
            await jobs.enqueue("email", "send", {}, idempotency_key="before")
            child = forked(
                lambda: (
                    asyncio.run(refuses_here(jobs, "was made in another process")),
                    asyncio.run(jobs.close()),
                    asyncio.run(of_its_own()),
                )
            )
            status = await asyncio.to_thread(ends, [child])
            await jobs.enqueue("email", "send", {}, idempotency_key="after")
            return status

    assert asyncio.run(main()) == [0]
    assert owner.rows("select idempotency_key from job order by job_id") == [
        *(("before",), ("child",), ("after",))
    ]


@every_kind
def test_a_client_of_a_loop_that_has_ended_is_refused_in_another(kind, source, owner):
    async def first():
        jobs = AsyncJobs(await source(kind), "jobs_email")
        if kind == "pool":
            # One that is cancelled while it connects goes on as if it were not; whole,
            # it has nothing to grow for.
            await jobs._source.wait()
        assert (await jobs.enqueue("email", "send", {}, idempotency_key="one")).created
        return jobs

    async def second():
        await refuses_here(jobs, "belongs to another event loop")
        async with await source(kind) as opened:
            own = AsyncJobs(opened, "jobs_email")
            await own.enqueue("email", "send", {}, idempotency_key="two")
        # A pool cannot wait for the tasks of a loop that has ended, and says so.
        with contextlib.suppress(RuntimeError, asyncio.CancelledError):
            await asyncio.wait_for(jobs._source.close(), ALARM)

    jobs = asyncio.run(first())
    asyncio.run(second())

    assert jobs._source.closed
    assert owner.rows("select idempotency_key from job order by 1") == [
        *(("one",), ("two",))
    ]


@every_kind
def test_a_client_of_a_loop_that_still_runs_is_refused_in_another_thread(kind, source):
    async def main():
        async with await source(kind) as opened:
            jobs = AsyncJobs(opened, "jobs_email")
            await asyncio.wait_for(
                asyncio.to_thread(
                    asyncio.run, refuses_here(jobs, "belongs to another event loop")
                ),
                ALARM,
            )
            return await jobs.enqueue("email", "send", {}, idempotency_key="one")

    assert asyncio.run(main()).created


def test_a_client_made_outside_any_loop_belongs_to_the_first_that_uses_it(conninfo):
    pool = AsyncConnectionPool(
        make_conninfo(conninfo, user="accounts"), min_size=1, open=False
    )
    jobs = AsyncJobs(pool, "jobs_email")

    async def use():
        async with pool:
            await jobs.enqueue("email", "send", {}, idempotency_key="one")

    asyncio.run(use())
    asyncio.run(refuses_here(jobs, "belongs to another event loop"))


def test_a_call_outside_any_loop_is_asyncio_s_own_error(conninfo):
    pool = AsyncConnectionPool(conninfo, min_size=1, open=False)
    jobs = AsyncJobs(pool, "jobs_email")

    for call in CALLS:
        with pytest.raises(RuntimeError, match="no running event loop"):
            call(jobs).send(None)


def test_a_client_that_blocks_works_within_a_running_loop(conninfo, owner):
    async def main():
        with psycopg.connect(
            make_conninfo(conninfo, user="accounts"), autocommit=True
        ) as connection:
            jobs = Jobs(connection, "jobs_email")
            jobs.enqueue("email", "send", {}, idempotency_key="here")
            await asyncio.to_thread(
                jobs.enqueue, "email", "send", {}, idempotency_key="in-a-thread"
            )

    asyncio.run(main())

    assert owner.value("select count(*) from job") == 2
