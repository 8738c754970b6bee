"""The fault: the reply is lost after the commit.

A worker loses the reply to a call after the commit, or never gets one: nothing is lost
and nothing is done twice.

Every job ends once, as its handler said.
"""

from __future__ import annotations

import socket
import time
from asyncio import CancelledError
from collections import Counter
from contextlib import suppress
from threading import Event, Lock, Thread

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs.worker import Fail, Retry, Tally, _run


@pytest.fixture
def through(cutter, conninfo):
    """The connection string of email-worker through the proxy."""
    return make_conninfo(conninfo, user="email-worker", **cutter.address)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "words", "ended", "tally"),
    [
        ("good", ".complete_many(", (1, "succeeded", None), {"succeeded": 1}),
        ("later", ".fail_many(", (1, "retried", "later"), {"retried": 1}),
        ("never", ".fail_many(", (1, "failed", "never"), {"failed": 1}),
        ("own", "commit", (1, "succeeded", None), {"succeeded": 1}),
        (
            "own",
            ".complete(",
            (1, "retried", "completion_rolled_back"),
            {"retried": 1},
        ),
        ("own", ".renew_many(", (1, "succeeded", None), {"succeeded": 1}),
    ],
)
def test_a_report_whose_reply_is_lost_is_repeated(
    kind, words, ended, tally, crews, hire, through, cutter, enqueue, attempts
):
    # A handler's own transaction is lost with its connection, unless it was committed.
    runs = Counter()
    cuts = [cutter.cut(words) for _ in crews]

    async def handler(crew, lease):
        runs[lease.job_id] += 1
        if lease.kind == "later":
            raise Retry("later")
        if lease.kind == "never":
            raise Fail("never")
        if lease.kind == "own":
            with suppress(psycopg.OperationalError):
                await crew.complete(lease, through)

    jobs = [enqueue(queue=crew.queue, kind=kind) for crew in crews]
    hired = [hire(crew, handler, through) for crew in crews]
    done = attempts(*jobs, count=2)
    tallies = [each.stop() for each in hired]

    assert all(cut.happened.is_set() for cut in cuts)
    assert done == [ended] * 2
    assert tallies == [Tally(**tally)] * 2
    assert runs == Counter(jobs)


@pytest.mark.parametrize("words", [".complete_many(", ".fail_many("])
def test_of_a_report_in_two_parts_each_is_counted_once(
    words, crews, hire, through, cutter, enqueue, attempts, until, connect
):
    crew, _ = crews
    first = enqueue(queue=crew.queue)
    holder = connect()
    holder.execute("begin; lock table attempt in access exclusive mode")
    ends = Counter()

    async def handler(_, lease):
        ends[lease.kind] += 1
        if lease.kind == "later":
            raise Retry("later")

    hired = hire(crew, handler, through)
    # While the first is being reported, two more end, to be reported together.
    until(lambda: ends["send"] == 1 and not hired.worker._run.jobs._ended)
    jobs = [enqueue(queue=crew.queue, kind=kind) for kind in ("send", "later")]
    until(lambda: len(hired.worker._run.jobs._ended) == 2)
    cut = cutter.cut(words)
    holder.execute("rollback")

    assert attempts(first, *jobs, count=3) == [
        (1, "succeeded", None),
        (1, "succeeded", None),
        (1, "retried", "later"),
    ]
    until(cut.happened.is_set)
    assert hired.stop() == Tally(succeeded=2, retried=1)


@pytest.mark.usefixtures("read_committed")
def test_jobs_whose_claim_lost_its_reply_come_back_and_run_once(
    crews, hire, through, cutter, enqueue, attempts, expire, until, owner
):
    runs = Counter()
    cuts = [cutter.cut(".claim(") for _ in crews]

    async def handler(crew, lease):
        runs[lease.job_id] += 1

    jobs = [enqueue(queue=crew.queue) for crew in crews for _ in range(5)]
    hired = [hire(crew, handler, through, concurrency=5) for crew in crews]
    leased = "select count(*) from live_job where lease_owner is not null"
    until(lambda: owner.value(leased) == 10)
    assert not runs
    expire(*jobs)
    owner.execute("select _queue_wake('email'), _queue_wake('slow')")
    done = attempts(*jobs, count=20)
    tallies = [each.stop() for each in hired]

    assert all(cut.happened.is_set() for cut in cuts)
    assert done == [(1, "lease_expired", None), (2, "succeeded", None)] * 10
    assert runs == Counter(jobs)
    assert tallies == [Tally(succeeded=5)] * 2


# The server is silent.


class Hole:
    """A proxy that may swallow what is sent, without closing anything.

    ``address`` is what takes a connection through it.
    """

    def __init__(self, conninfo):
        server = conninfo_to_dict(conninfo)
        self._server = f"{server['host']}/.s.PGSQL.{server.get('port', 5432)}"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = {
            "host": "127.0.0.1",
            "port": self._listener.getsockname()[1],
            "sslmode": "disable",
            "gssencmode": "disable",
        }
        self._lock = Lock()
        self._sockets = set()
        self._threads = []
        self._is_dead = Event()  # of the connections there are
        self._stays_dead = False
        self._begin(self._accept)

    def _begin(self, act, *arguments):
        self._threads.append(Thread(target=act, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                with self._lock:
                    self._sockets |= {client, server}
                    is_dead = self._is_dead
                self._begin(self._pass_on, client, server, is_dead)
                self._begin(self._pass_on, server, client, is_dead)

    def _pass_on(self, source, target, is_dead):
        with suppress(OSError):
            while data := source.recv(65536):
                if not is_dead.is_set():
                    target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def swallow(self, *, also_new=False):
        """Pass nothing on any more of what there is, and of new connections if told."""
        with self._lock:
            self._is_dead.set()
            if not also_new:
                self._is_dead = Event()

    def close(self):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (*self._sockets, self._listener):
            each.close()


@pytest.fixture
def hole(conninfo):
    hole = Hole(conninfo)
    yield hole
    hole.close()


@pytest.fixture
def swallowed(hole, crews, configure, hire, conninfo, enqueue, gate, until, owner):
    """Workers whose leases were renewed once, and whose connections then hang."""

    def swallowed(lease_seconds, **how):
        configure(lease_seconds=lease_seconds)
        end, seen = gate(), {}

        async def handler(crew, lease):
            try:
                await crew.until(lambda: lease.lost or end.is_set())
            finally:
                seen[lease.job_id] = lease.lost
                # Its worker has no free hand until others have claimed the job.
                while not end.is_set():
                    with suppress(CancelledError):
                        await crew.until(end.is_set)

        source = make_conninfo(conninfo, user="email-worker", **hole.address)
        jobs = [enqueue(queue=crew.queue) for crew in crews]
        hired = [hire(crew, handler, source, concurrency=1) for crew in crews]
        renewed = (
            "select count(*) from live_job where lease_expires_at >"
            " leased_at + make_interval(secs => %s)"
        )
        until(lambda: owner.value(renewed, lease_seconds + 0.1) == 2)
        hole.swallow(**how)
        return hired, jobs, end, seen

    return swallowed


@pytest.mark.slow
def test_a_lease_outlives_the_connection_it_was_kept_on(
    swallowed, attempts, until, owner, monkeypatch
):
    monkeypatch.setattr(_run, "HAND_BACK_SECONDS", 0.5)
    hired, jobs, end, seen = swallowed(2)
    last = owner.value("select max(lease_expires_at) from live_job")

    # On another connection, in time.
    renewed = "select count(*) from live_job where lease_expires_at > %s"
    until(lambda: owner.value(renewed, last) == 2)
    assert seen == {}
    end.set()

    assert attempts(*jobs, count=2) == [(1, "succeeded", None)] * 2
    # The claims, whose connections hang as well, are not waited for all that time.
    for each in hired:
        each.worker.stop()
    began = time.monotonic()
    assert [each.stop() for each in hired] == [Tally(succeeded=1)] * 2
    assert time.monotonic() - began < 5
    assert seen == dict.fromkeys(jobs, False)


@pytest.mark.slow
def test_a_lease_is_lost_by_its_confirmed_end_while_no_server_replies(
    swallowed, hole, rival, until, attempts
):
    hired, jobs, end, seen = swallowed(1, also_new=True)

    claimed = []
    until(
        lambda: (
            claimed.extend(rival.rows("select job_id from claim('email')"))
            or claimed.extend(rival.rows("select job_id from claim('slow')"))
            or len(claimed) == 2
        )
    )
    # Before anybody could have had them.
    assert seen == dict.fromkeys(jobs, True)
    for each in hired:
        each.worker.stop(0)
    end.set()
    hole.close()

    assert [each.stop(0).lost for each in hired] == [1, 1]
    assert attempts(*jobs) == [(1, "lease_expired", None)] * 2
