"""The measures, one function each: figures of every contender in every round.

A measure answers ``{contender: [figure of each round]}``. What is compared runs in the
same round, in an order drawn anew; only ratios within a round mean anything.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass
from queue import SimpleQueue as Queue
from typing import Any

from psycopg.conninfo import make_conninfo

from contenders import CLAIM, TEXT, Floor, Kept, LensoJobs
from lenso_jobs import Jobs, Worker

FLOOR, KEPT, OURS = "plain table", "with key and evidence", "lenso-jobs"
OPEN = {FLOOR: Floor, KEPT: Kept, OURS: LensoJobs}
MEASURES = {}
PLOTTED = ("held_pairs", "backlog", "producers")


@dataclass(frozen=True)
class Measure:
    """One row of the report."""

    title: str
    unit: str
    run: Any
    against: str = FLOOR
    more_is_better: bool = True
    must: float | None = None
    aim: float | None = None
    peers: str = ""


def measure(title, unit, **more):
    """Register a function as a measure under its own name."""

    def register(function):
        MEASURES[function.__name__] = Measure(title, unit, function, **more)
        return function

    return register


def shuffled(things):
    """All of them, in an order drawn anew."""
    return random.sample(list(things), len(things))


def rate(call, times, warm=20):
    """Calls a second, after a few that are not counted."""
    for _ in range(warm):
        call()
    started = time.perf_counter()
    for _ in range(times):
        call()
    return times / (time.perf_counter() - started)


@measure(
    "enqueue, one connection",
    "jobs/s",
    must=0.8,
    aim=0.9,
    peers="0.72",
)
def enqueue_one(it, rounds, scale):
    """One job a call, one call a transaction."""
    figures = {name: [] for name in OPEN}
    for _ in range(rounds):
        it.empty()
        for name in shuffled(OPEN):
            with it.worker() as session:
                call = OPEN[name](session).enqueue
                figures[name].append(rate(call, int(2000 * scale)))
    return figures


def _enqueue_for(it, name, more, seconds, results):
    with it.worker() as session:
        contender = OPEN[name](session, **more)
        for _ in range(20):
            contender.enqueue()
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            contender.enqueue()
            count += 1
        results.put(count / seconds)


def in_processes(it, producers, name, seconds, **more):
    """The rate of so many producers together, each a process."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_enqueue_for, args=(it, name, more, seconds, results))
        for _ in range(producers)
    ]
    for process in processes:
        process.start()
    total = sum(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return total


@measure("enqueue, four connections", "jobs/s", must=0.65, aim=0.85, peers="0.52")
def enqueue_four(it, rounds, scale):
    """Four processes, one job a call."""
    figures = {name: [] for name in OPEN}
    for _ in range(rounds):
        it.empty()
        for name in shuffled(OPEN):
            figures[name].append(in_processes(it, 4, name, 3 * scale))
    return figures


@measure(
    "bulk enqueue of 10,000, one connection",
    "jobs/s",
    peers="0.28 (no caller's keys)",
)
def bulk_one(it, rounds, scale):
    """A thousand a call; the plain table by COPY, which answers nothing."""
    figures = {name: [] for name in OPEN}
    for _ in range(rounds):
        it.empty()
        for name in shuffled(OPEN):
            with it.worker() as session:
                contender, count = OPEN[name](session), int(10_000 * scale)
                contender.bulk(1000)
                started = time.perf_counter()
                contender.bulk(count)
                figures[name].append(count / (time.perf_counter() - started))
    return figures


def _bulk_for(it, name, count, ready, results):
    with it.worker() as session:
        contender = OPEN[name](session)
        contender.bulk(1000)
        ready.wait()
        started = time.time()
        contender.bulk(count)
        results.put((started, time.time()))


@measure("bulk enqueue of 20,000, two connections", "jobs/s")
def bulk_two(it, rounds, scale):
    """Two processes, each as above."""
    figures = {name: [] for name in OPEN}
    context = multiprocessing.get_context("spawn")
    count = int(10_000 * scale)
    for _ in range(rounds):
        it.empty()
        for name in shuffled(OPEN):
            ready, results = context.Barrier(2), context.Queue()
            processes = [
                context.Process(
                    target=_bulk_for, args=(it, name, count, ready, results)
                )
                for _ in range(2)
            ]
            for process in processes:
                process.start()
            spans = [results.get(timeout=120) for _ in processes]
            for process in processes:
                process.join()
            took = max(end for _, end in spans) - min(start for start, _ in spans)
            figures[name].append(2 * count / took)
    return figures


@measure(
    "drain of 20,000 no-op jobs, evidence kept",
    "jobs/s",
    must=1.1,
    aim=1.3,
    peers="0.83 (rows deleted)",
)
def drain(it, rounds, scale):
    """The plain tables 100 at a time; ours 500 a claim, completed on a second one."""
    figures = {name: [] for name in OPEN}
    count = int(20_000 * scale)
    for _ in range(rounds):
        for name in shuffled(OPEN):
            it.empty()
            with it.worker() as session, it.worker() as second:
                contender = OPEN[name](session, second)
                contender.bulk(1000)
                contender.drain()
                contender.bulk(count)
                vacuum(it)
                started = time.perf_counter()
                contender.drain()
                figures[name].append(count / (time.perf_counter() - started))
    return figures


def vacuum(it):
    """What autovacuum would do, now."""
    with it.connect() as session:
        session.execute(
            "vacuum analyze floor_job, kept_job, jobs_bench.live_job, jobs_bench.job"
        )


@measure(
    "enqueue + claim + complete, one at a time",
    "jobs/s",
    must=0.7,
    aim=0.85,
    peers="0.53",
)
def cycle(it, rounds, scale):
    """Three calls a job, each a transaction."""
    figures = {name: [] for name in OPEN}
    for _ in range(rounds):
        it.empty()
        for name in shuffled(OPEN):
            with it.worker() as session:
                contender = OPEN[name](session)

                def whole(contender=contender):
                    contender.enqueue()
                    contender.complete(contender.claim())

                figures[name].append(rate(whole, int(1000 * scale)))
    return figures


@contextlib.contextmanager
def working(it, handler, **options):
    """Run a Worker beside what follows, and stop it."""
    worker = Worker(
        make_conninfo(it.conninfo, options="-c role=bench"),
        schema="jobs_bench",
        queue="email",
        handler=handler,
        **options,
    )
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()


@measure("drain of 20,000 no-op jobs by a Worker", "jobs/s", must=1.1)
def worker_drain(it, rounds, scale):
    """As above; a worker that idles is woken by one commit of all jobs."""
    figures = {FLOOR: [], OURS: []}
    count = int(20_000 * scale)
    for _ in range(rounds):
        for name in shuffled(figures):
            it.empty()
            with it.worker() as session, it.connect() as owner:
                contender = OPEN[name](session)
                contender.bulk(1000)
                if name == FLOOR:
                    contender.drain()
                    contender.bulk(count)
                    vacuum(it)
                    started = time.perf_counter()
                    contender.drain()
                else:
                    begun = []
                    with working(it, begun.append, batch=500):
                        until_empty(owner)
                        begun.clear()
                        with session.transaction():
                            contender.bulk(count)
                            started = time.perf_counter()
                        while len(begun) < count:
                            time.sleep(0.005)
                        until_empty(owner)
                figures[name].append(count / (time.perf_counter() - started))
    return figures


def until_empty(session):
    """Return once every job has ended, to the next few milliseconds."""
    while session.execute(
        "select exists (select from jobs_bench.live_job)"
    ).fetchone() == (True,):
        time.sleep(0.005)


class FloorWorker:
    """Listens for every insert, and claims with raw SQL."""

    def __init__(self, it):
        self.session = it.worker()
        self.session.execute("listen floor")
        self.claim = CLAIM.format(table="floor_job", limit=1)
        self.producer = it.worker()

    def next(self):
        """Wait for a job and take it."""
        while not (job := self.session.execute(self.claim).fetchone()):
            for _ in self.session.notifies(timeout=10, stop_after=1):
                pass
        return job, time.perf_counter()

    def done(self, job):
        """Complete it."""
        self.session.execute(
            "update floor_job set state = 'done' where id = %s", (job[0],)
        )

    def enqueue(self):
        """Insert a row and notify."""
        self.producer.execute(
            "with made as (insert into floor_job (queue, payload)"
            " values ('email', %s) returning id)"
            " select id, pg_notify('floor', '') from made",
            (TEXT,),
        ).fetchone()

    def close(self):
        """Close both connections."""
        self.session.close()
        self.producer.close()


class OurWorker:
    """``Jobs.claim(wait=)``, as an application would."""

    def __init__(self, it):
        self.jobs = Jobs(it.worker(), "jobs_bench")
        self.producer = LensoJobs(it.worker())

    def next(self):
        """Wait for a job and lease it."""
        (lease,) = self.jobs.claim("email", wait=30)
        return lease, time.perf_counter()

    def done(self, lease):
        """Complete it."""
        self.jobs.complete(lease)

    def enqueue(self):
        """Enqueue one job."""
        self.producer.enqueue()

    def close(self):
        """Close both connections."""
        self.jobs.close()
        self.producer.jobs.close()


class OurRunningWorker:
    """A ``Worker``, whose handler looks at the clock."""

    def __init__(self, it):
        self.producer = LensoJobs(it.worker())
        self.picked = Queue()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(working(it, self.note))

    def note(self, lease):
        """Handle a job."""
        self.picked.put((lease, time.perf_counter()))

    def next(self):
        """Wait until a handler has begun."""
        return self.picked.get(timeout=30)

    def done(self, lease):
        """Nothing: the worker completes it."""

    def enqueue(self):
        """Enqueue one job."""
        self.producer.enqueue()

    def close(self):
        """Stop."""
        self.stack.close()
        self.producer.jobs.close()


def pick_ups(worker, count):
    """Seconds from before each enqueue until an idle worker has the job."""
    picked, taken = [], threading.Semaphore(0)

    def work():
        for _ in range(count):
            job, at = worker.next()
            picked.append(at)
            worker.done(job)
            taken.release()

    thread = threading.Thread(target=work)
    thread.start()
    sent = []
    for _ in range(count):
        time.sleep(random.uniform(0.02, 0.04))  # it is waiting again by then
        sent.append(time.perf_counter())
        worker.enqueue()
        taken.acquire()
    thread.join()
    worker.close()
    return [later - earlier for earlier, later in zip(sent, picked, strict=True)]


def _latency(it, rounds, scale, pick, ours=OurWorker):
    figures = {FLOOR: [], OURS: []}
    kinds = {FLOOR: FloorWorker, OURS: ours}
    for _ in range(rounds):
        it.empty()
        for name in shuffled(kinds):
            spans = pick_ups(kinds[name](it), int(200 * scale))
            figures[name].append(pick(spans) * 1000)
    return figures


@measure(
    "pick-up latency of an idle worker, median",
    "ms",
    more_is_better=False,
    must=1.2,
    peers="1.7",
)
def latency_p50(it, rounds, scale):
    """Producer and worker are threads of one process."""
    return _latency(it, rounds, scale, statistics.median)


@measure(
    "pick-up latency of an idle worker, 95th percentile",
    "ms",
    more_is_better=False,
    must=1.2,
    peers="1.9",
)
def latency_p95(it, rounds, scale):
    """The same."""
    return _latency(it, rounds, scale, lambda spans: sorted(spans)[-len(spans) // 20])


@measure(
    "pick-up latency of an idle Worker, median",
    "ms",
    more_is_better=False,
    must=1.2,
    peers="1.7",
)
def worker_p50(it, rounds, scale):
    """Until its handler begins."""
    return _latency(it, rounds, scale, statistics.median, OurRunningWorker)


@measure(
    "pick-up latency of an idle Worker, 95th percentile",
    "ms",
    more_is_better=False,
    must=1.2,
    peers="1.9",
)
def worker_p95(it, rounds, scale):
    """The same."""
    return _latency(
        it,
        rounds,
        scale,
        lambda spans: sorted(spans)[-len(spans) // 20],
        OurRunningWorker,
    )


def pairs(it, schema, blocks, size, calls=("claim", "complete"), beside=None):
    """Seconds of blocks of single calls on one Instance and on another, in turn.

    Answers ``{schema: {call: [seconds of each block]}}``; ``beside`` is a context
    manager made anew around each block of the second Instance.
    """
    spent = {name: {call: [] for call in calls} for name in ("jobs_bench", schema)}
    with contextlib.ExitStack() as stack:
        contenders = {
            name: LensoJobs(stack.enter_context(it.worker()), schema=name)
            for name in spent
        }
        for block in range(blocks + 1):
            for name in shuffled(contenders):
                contender, seconds = contenders[name], Counter()
                around = beside if beside and name == schema else contextlib.nullcontext
                with around():
                    for _ in range(size):
                        if "enqueue" in calls:
                            made = _timed(seconds, "enqueue", contender.enqueue)
                        lease = _timed(seconds, "claim", contender.claim)
                        _timed(seconds, "complete", contender.complete, lease)
                        if "inspect" in calls:
                            _timed(
                                seconds, "inspect", contender.jobs.inspect, made.job_id
                            )
                if block:  # the first one warms up
                    for call in calls:
                        spent[name][call].append(seconds[call])
    return spent


def _timed(seconds, name, call, *arguments):
    started = time.perf_counter()
    answer = call(*arguments)
    seconds[name] += time.perf_counter() - started
    return answer


def _flat(it, schema, rounds, size, prepare, renew=lambda: None, **more):
    figures = {"none": [], "loaded": []}
    it.instance(schema)
    prepare(schema)
    for _ in range(rounds):
        renew()
        spent = pairs(it, schema, 8, size, **more)
        for name, key in (("jobs_bench", "none"), (schema, "loaded")):
            figures[key].append(
                sum(map(statistics.median, spent[name].values())) / size * 1e6
            )
    return figures


@measure(
    "2,000 claims with 1,000,000 queued ÷ with 10,000",
    "µs a claim and complete",
    against="none",
    more_is_better=False,
    must=1.05,
    peers="0.83 to 25",
)
def growth(it, rounds, scale):
    """Blocks in turn on two Instances, single calls."""

    def renew():
        it.empty()
        it.fill("jobs_bench", queued=10_000)

    return _flat(
        it,
        "jobs_million",
        rounds,
        int(250 * scale),
        lambda schema: it.fill(schema, queued=int(1_000_000 * scale)),
        renew,
    )


@measure(
    "5,000 running jobs in front of a claim ÷ none",
    "µs an enqueue, claim and complete",
    against="none",
    more_is_better=False,
    must=1.2,
)
def running(it, rounds, scale):
    """The same."""
    it.empty()
    return _flat(
        it,
        "jobs_running",
        rounds,
        int(250 * scale),
        lambda schema: it.fill(schema, running=5000),
        calls=("enqueue", "claim", "complete"),
    )


@measure(
    "1,000,000 scheduled and 1,000,000 ended jobs kept ÷ none",
    "µs an enqueue, claim and complete",
    against="none",
    more_is_better=False,
    must=1.1,
)
def kept(it, rounds, scale):
    """The same."""
    it.empty()
    count = int(1_000_000 * scale)
    return _flat(
        it,
        "jobs_kept",
        rounds,
        int(250 * scale),
        lambda schema: it.fill(schema, scheduled=count, ended=count),
        calls=("enqueue", "claim", "complete"),
    )


@measure(
    "claims while 1,000,000 ended jobs are purged ÷ not",
    "µs an enqueue, claim and complete",
    against="none",
    more_is_better=False,
    must=1.2,
)
def purging(it, rounds, scale):
    """A second connection purges 1,000 a call and pauses thrice as long as that took."""
    it.empty()

    @contextlib.contextmanager
    def purge():
        stop = threading.Event()

        def loop():
            with it.connect("jobs_purged_operator") as session:
                while not stop.is_set():
                    started = time.perf_counter()
                    session.execute("select jobs_purged.purge(clock_timestamp(), 1000)")
                    stop.wait(3 * (time.perf_counter() - started))

        thread = threading.Thread(target=loop)
        thread.start()
        yield
        stop.set()
        thread.join()

    return _flat(
        it,
        "jobs_purged",
        rounds,
        int(250 * scale),
        lambda schema: it.fill(schema, ended=int(1_000_000 * scale)),
        calls=("enqueue", "claim", "complete"),
        beside=purge,
    )


@contextlib.contextmanager
def held_snapshot(it):
    """Somebody else's transaction, open all the while."""
    with it.connect() as session:
        session.execute("begin isolation level repeatable read")
        session.execute("select count(*) from floor_job")
        yield
        session.execute("rollback")


def _chunks(it, name, chunks, size, *, fresh):
    """Rates of drains of chunks, each enqueued just before."""
    rates = []
    with contextlib.ExitStack() as stack:
        opened = None
        for _ in range(chunks):
            if opened is None or fresh:
                opened = [stack.enter_context(it.worker()) for _ in range(2)]
            contender = OPEN[name](*opened)
            contender.bulk(size)
            vacuum(it)
            started = time.perf_counter()
            contender.drain()
            rates.append(size / (time.perf_counter() - started))
    return rates


def _held(it, rounds, scale, *, fresh):
    figures = {"first two chunks": [], "last two chunks": [], FLOOR: []}
    size = int(5000 * scale)
    for _ in range(rounds):
        for name in (OURS, FLOOR):
            it.empty()
            with held_snapshot(it):
                rates = _chunks(it, name, 10, size, fresh=fresh)
            if name == OURS:
                figures["first two chunks"].append(statistics.mean(rates[:2]))
                figures["last two chunks"].append(statistics.mean(rates[-2:]))
            else:
                figures[FLOOR].append(
                    statistics.mean(rates[-2:]) / statistics.mean(rates[:2])
                )
    return figures


@measure(
    "snapshot held elsewhere, 50,000 jobs in ten chunks: last ÷ first",
    "jobs/s",
    against="first two chunks",
    must=0.95,
    peers="0.89 at 15,000/s, 0.75 at 31,000/s",
)
def held(it, rounds, scale):
    """One worker all the while; the plain table's own ratio stands beside."""
    return _held(it, rounds, scale, fresh=False)


@measure(
    "the same, with new connections for every chunk",
    "jobs/s",
    against="first two chunks",
    peers="0.89 at 15,000/s, 0.75 at 31,000/s",
)
def held_fresh(it, rounds, scale):
    """A worker that has just started walks over what is dead, once."""
    return _held(it, rounds, scale, fresh=True)


def held_pairs(it, scale):
    """Milliseconds of one claim and complete, by jobs done under a held snapshot."""
    count, step = int(30_000 * scale), int(1500 * scale)
    curves = {}
    for name in (FLOOR, OURS):
        it.empty()
        curve = []
        with held_snapshot(it), it.worker() as session:
            contender = OPEN[name](session)
            contender.bulk(count)
            vacuum(it)
            for done in range(step, count + 1, step):
                started = time.perf_counter()
                for _ in range(step):
                    contender.complete(contender.claim())
                spent = time.perf_counter() - started
                curve.append((done, spent / step * 1000))
                if name == FLOOR and curve[-1][1] > 12 * curve[0][1]:
                    break  # the point is made
        curves[name] = curve
    return curves


def backlog(it, scale):
    """Drain rate of 10,000 jobs with more and more behind them: the median of three."""
    curves = {FLOOR: [], OURS: []}
    for behind in (10_000, 30_000, 100_000, 300_000, 1_000_000):
        behind = int(behind * scale)  # noqa: PLW2901
        count, rates = min(10_000, behind), {FLOOR: [], OURS: []}
        for repeat in range(3):
            if behind < 3 * count or not repeat:
                it.empty()
                it.fill("jobs_bench", queued=behind)
                with it.connect() as session:
                    session.execute(
                        "insert into floor_job (queue, payload) select 'email', %s"
                        " from generate_series(1, %s::integer)",
                        (TEXT, behind),
                    )
                vacuum(it)
            for name in shuffled(rates):
                with it.worker() as session, it.worker() as second:
                    contender = OPEN[name](session, second)
                    started = time.perf_counter()
                    contender.drain(count)
                    rates[name].append(count / (time.perf_counter() - started))
        for name, each in rates.items():
            curves[name].append((behind, statistics.median(each)))
    return curves


def producers(it, scale):
    """Enqueues a second by producers: nobody waits, somebody does, or never notified."""
    it.instance("jobs_silent", notify=False)
    kinds = ("nobody waits", "somebody waits", "notify: false")
    curves = {kind: [] for kind in kinds}
    for count in (1, 2, 4, 8, 16):
        for kind in shuffled(kinds):
            it.empty("jobs_silent")
            with it.connect() as session:
                if kind == "somebody waits":
                    session.execute("set search_path = jobs_bench")
                    session.execute("select pg_advisory_lock_shared(wait_key('email'))")
                    session.execute("listen jobs_bench")
                schema = "jobs_silent" if kind == "notify: false" else "jobs_bench"
                total = in_processes(it, count, OURS, 3 * scale, schema=schema)
            curves[kind].append((count, total))
    return curves
