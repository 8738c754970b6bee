"""The fault: the cost of NOTIFY to the whole server.

None is sent while no worker waits, or if the document says so. Our listeners hold up
nobody.

What 32 producers lose by it is the benchmarks' to measure.
"""

import re
import subprocess

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs.config import Configuration
from lenso_jobs.embedded import EmbeddedServer, find_programs
from lenso_jobs.operator import configure, setup
from lenso_jobs.worker import Retry

PATIENCE = "-c search_path=jobs_email -c lock_timeout=5s -c statement_timeout=10s"
LISTENERS = (
    "select state, xact_start is null and backend_xmin is null from pg_stat_activity"
    " where datname = current_database() and usename in ('email-worker', 'spare-worker')"
)


def test_an_uncommitted_enqueue_blocks_no_call(
    client, producer, enqueue, claim, waiting, heard, worker
):
    other = client("organization", options=PATIENCE)
    enqueue()
    lease = claim()
    waiter = waiting("email")

    with producer.transaction():
        enqueue()
        created = other.enqueue("email", "send", {}, idempotency_key="k").created
        told_of_the_other = heard(waiter)
        worker.execute("select fail(%s, %s, 'down', true)", lease)
        told_of_the_failure = heard(waiter)

    assert created
    assert told_of_the_other == told_of_the_failure == heard(waiter)
    assert told_of_the_other == [("jobs_email", "email")]


@pytest.mark.usefixtures("read_committed")
@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_listening_session_is_in_no_transaction(
    client, crews, hire, enqueue, owner, only_woken, background, until
):
    async def handler(crew, lease):
        pass

    jobs = client("spare-worker")
    hired = [hire(crew, handler) for crew in crews]
    wait = background(jobs.wait, "email", 60)
    only_woken(3)
    seen = []
    until(lambda: set(owner.rows(LISTENERS)) == {("idle", True)})

    for n in range(20):
        enqueue(("email", "slow")[n % 2])
        seen += owner.rows(LISTENERS)
    # The producer's session is silent for a while after it has notified a queue.
    wake = "select _queue_wake(q) from unnest(array['email', 'slow']) as q"
    until(lambda: owner.rows(wake) and not owner.value("select count(*) from live_job"))

    assert wait.result() is True
    assert "idle in transaction" not in {state for state, _ in seen}
    assert sum(each.stop().succeeded for each in hired) == 20


# On a server of its own: the queue and the lock are every database's.


@pytest.fixture(scope="module")
def apart():
    """A server with a small queue, where a commit may be made to wait for a standby."""
    settings = {"synchronous_commit": "local", "synchronous_standby_names": "nobody"}
    said = subprocess.run(
        [find_programs() / "postgres", "--version"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    if int(re.search(r"\d+", said)[0]) >= 17:
        settings["max_notify_queue_pages"] = "64"
    with EmbeddedServer(settings=settings) as server:
        yield server.conninfo()


@pytest.fixture
def silence(apart, document):
    """Store a document in an Instance there, set up anew, that sends no notifications."""

    def as_document(**changes):
        return Configuration.from_json(document(role_prefix="jobs_email", **changes))

    with psycopg.connect(apart, autocommit=True) as connection:
        connection.execute("drop schema if exists jobs_email cascade")
    setup(as_document(), apart)
    with psycopg.connect(apart, autocommit=True) as connection:
        connection.execute('alter role accounts login; alter role "email-worker" login')
    return lambda: configure(as_document(notify=False), apart)


@pytest.fixture
def there(apart, silence):
    """The parameters of a session on that Instance."""
    return conninfo_to_dict(apart) | {"options": PATIENCE}


ENQUEUE = "select created from enqueue('email', 'send', '{}', gen_random_uuid()::text)"


@pytest.mark.slow
def test_a_commit_that_sends_nothing_waits_for_no_other(
    there, silence, connect, waiting, background, until
):
    owner, standing = connect(**there), connect(**there)
    producer, another = (connect("accounts", **there) for _ in range(2))
    standing.execute("set synchronous_commit = on; set statement_timeout = 0")
    write = "create table public.written (); notify anything"
    stuck = background(standing.execute, write)
    until(
        lambda: owner.rows(
            "select from pg_stat_activity where pid = %s and wait_event = 'SyncRep'",
            standing.pid,
        )
    )

    try:
        assert producer.value(ENQUEUE)
        waiting("email", **there)
        delayed = background(producer.value, ENQUEUE)
        until(
            lambda: owner.value(
                "select %s = any (pg_blocking_pids(%s))", standing.pid, producer.pid
            )
        )
        silence()
        assert another.value(ENQUEUE)
        assert not delayed.done()
    finally:
        owner.execute("select pg_cancel_backend(%s)", (standing.pid,))
    stuck.result(20)

    assert delayed.result(20)


@pytest.fixture
def fill_the_queue(there, connect, until):
    """Fill the queue of notifications behind a listener in a transaction; empty it."""
    owner = connect(**there)
    if owner.info.server_version < 170000:
        pytest.skip("the queue of notifications is 8 GB before PostgreSQL 17")
    parked = connect(**there)
    parked.execute("listen anything")

    def fill_the_queue():
        parked.execute("begin; select 1")
        with owner.refusing("54000"):
            for n in range(1000):
                owner.execute(
                    "select pg_notify('anything', repeat('.', 7900) || %s)", (n,)
                )

    def empty():
        parked.execute("rollback")
        until(lambda: owner.value("select pg_notification_queue_usage()") < 0.5)

    fill_the_queue.empty = empty
    return fill_the_queue


@pytest.mark.slow
def test_a_full_queue_fails_the_commits_that_notify_by_its_name_and_no_other(
    fill_the_queue, there, silence, connect, client, waiting, refused
):
    owner = connect(**there)
    jobs = client(**there | {"user": "accounts"})
    fill_the_queue()

    def enqueue(key):
        return jobs.enqueue("email", "send", {}, idempotency_key=key).created

    assert enqueue("nobody.waits")
    waiting("email", **there)
    with refused("54000") as caught:
        enqueue("somebody.waits")
    assert "too many notifications in the NOTIFY queue" in str(caught.value)
    assert owner.value("select count(*) from job") == 1
    assert owner.value("select pg_notification_queue_usage()") > 0.9
    assert owner.rows("select finding, subject from inspect_health()") == [
        ("notify_queue_filling", "the server's queue of notifications")
    ]
    silence()
    assert enqueue("somebody.waits")

    fill_the_queue.empty()


@pytest.mark.slow
def test_a_worker_reports_a_failure_once_the_queue_has_room_again(
    fill_the_queue, there, connect, crews, hire, gate, until, caplog
):
    owner, producer = connect(**there), connect("accounts", **there)
    source = make_conninfo(**there | {"user": "email-worker"})
    is_full, begun = gate(), []

    async def handler(crew, lease):
        begun.append(lease)
        await crew.until(is_full.is_set)
        raise Retry("down")

    for queue in ("email", "slow"):
        producer.execute("select enqueue(%s, 'send', '{}', %s)", (queue, queue))
    hired = [hire(crew, handler, source, concurrency=2) for crew in crews]
    until(lambda: len(begun) == 2)
    fill_the_queue()
    is_full.set()
    until(lambda: caplog.text.count("has not responded") == 2)
    fill_the_queue.empty()
    until(lambda: owner.value("select count(*) from attempt") == 2)

    assert (
        owner.rows("select outcome, failure_code from attempt")
        == [("retried", "down")] * 2
    )
    assert [each.stop().retried for each in hired] == [1, 1]
