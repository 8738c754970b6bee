"""The measures: figures of every contender in every round.

A measure returns ``{row of the report: {contender: [figure of each round]}}``. What is
compared takes turns in short blocks, in an order drawn anew; only ratios within a round
mean anything.
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
from pathlib import Path
from queue import SimpleQueue as Queue

from psycopg.conninfo import make_conninfo

from contenders import CLAIM, PAYLOAD, TEXT, Floor, Kept, LensoJobs
from lenso_jobs import Jobs, Worker

FLOOR, KEPT, OURS = "plain table", "raw SQL with a key", "lenso-jobs"
NONE, LOADED = "none", "loaded"
OPEN = {FLOOR: Floor, KEPT: Kept, OURS: LensoJobs}
MEASURES, ROWS = {}, {}
PLOTTED = ("held_pairs", "backlog", "producers")
BLOCKS = 20


@dataclass(frozen=True)
class Row:
    """One row of the report."""

    title: str
    unit: str
    wanted: float | None = None
    against: str = FLOOR
    of: str = OURS
    more_is_better: bool = True
    peers: str = ""


def measure(**rows):
    """Register a function under its own name, and its rows of the report."""

    def register(function):
        MEASURES[function.__name__] = function
        ROWS.update(rows)
        return function

    return register


def costs(title, unit, wanted, **more):
    """Describe a row of which less is better, by default beside a load and without."""
    more = {"against": NONE, "of": LOADED} | more
    return Row(title, unit, wanted, more_is_better=False, **more)


def shuffled(things):
    """All of them, in an order drawn anew."""
    return random.sample(list(things), len(things))


def in_turn(calls, size, blocks=BLOCKS, pick=statistics.median):
    """Seconds a call of each contender: the median of its blocks."""
    spans = {name: [] for name in calls}
    for block in range(blocks + 1):
        for name in shuffled(calls):
            call, started = calls[name], time.perf_counter()
            for _ in range(size):
                call()
            if block:  # the first one warms up
                spans[name].append((time.perf_counter() - started) / size)
    return {name: pick(spent) for name, spent in spans.items()}


def rates(it, rounds, size, call, contenders=OPEN, jobs=1, blocks=BLOCKS):
    """Jobs a second of each contender in each round; ``call`` makes what is timed."""
    figures = {name: [] for name in contenders}
    for _ in range(rounds):
        it.empty()
        with contextlib.ExitStack() as stack:
            calls = {
                name: call(contender(stack.enter_context(it.worker())))
                for name, contender in contenders.items()
            }
            for name, seconds in in_turn(calls, size, blocks).items():
                figures[name].append(jobs / seconds)
    return figures


def scaled(count, scale):
    """So many in a rehearsal: at least one."""
    return max(1, int(count * scale))


def of_bytes(size):
    """A payload of so many bytes as text."""
    return PAYLOAD | {"body": "x" * (size - len(TEXT) - len(', "body": ""'))}


PAYLOADS = {60: PAYLOAD, 400: of_bytes(400), 1000: of_bytes(1000)}


@measure(
    **{
        f"enqueue_{size}": Row(
            f"enqueue, one connection, payload of {size} bytes",
            "jobs/s",
            0.8,
            against=KEPT,
            peers="0.72 of the plain table" if size == 60 else "",
        )
        for size in PAYLOADS
    }
)
def enqueue(it, rounds, scale):
    """One job a call, one call a transaction."""

    def call(payload):
        def made(contender):
            contender.carry(payload)
            return contender.enqueue

        return made

    return {
        f"enqueue_{size}": rates(it, rounds, scaled(50, scale), call(payload))
        for size, payload in PAYLOADS.items()
    }


def _produce(it, kinds, order, seconds, barrier, results):
    """Enqueue by each kind in this order, all producers at once."""
    with contextlib.ExitStack() as stack:
        contenders = {
            kind: OPEN[name](stack.enter_context(it.worker()), **more)
            for kind, (name, more) in kinds.items()
        }
        for contender in contenders.values():
            for _ in range(10):
                contender.enqueue()
        for kind in order:
            barrier.wait()
            count, end = 0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                contenders[kind].enqueue()
                count += 1
            results.put((kind, count / seconds))
            barrier.wait()


def in_processes(it, producers, kinds, order, seconds):
    """Yield a kind and the rate of so many processes together, in this order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["measures"])
    barrier, results = context.Barrier(producers), context.Queue()
    arguments = (it, kinds, order, seconds, barrier, results)
    processes = [
        context.Process(target=_produce, args=arguments) for _ in range(producers)
    ]
    for process in processes:
        process.start()
    for kind in order:
        yield kind, sum(results.get(timeout=120)[1] for _ in processes)
    for process in processes:
        process.join()


@measure(enqueue_four=Row("enqueue, four connections", "jobs/s", 0.7, peers="0.52"))
def enqueue_four(it, rounds, scale):
    """Four processes, one job a call."""
    figures = {name: [] for name in OPEN}
    kinds = {name: (name, {}) for name in OPEN}
    for _ in range(rounds):
        it.empty()
        blocks = {name: [] for name in OPEN}
        order = [name for _ in range(6) for name in shuffled(OPEN)]
        for name, each in in_processes(it, 4, kinds, order, max(0.05, 0.5 * scale)):
            blocks[name].append(each)
        for name, each in blocks.items():
            figures[name].append(statistics.median(each))
    return {"enqueue_four": figures}


@measure(
    bulk=Row(
        "bulk enqueue by the thousand, one connection",
        "jobs/s",
        0.6,
        against=KEPT,
        peers="0.28 of the plain table (no caller's keys)",
    )
)
def bulk(it, rounds, scale):
    """A thousand a call; the plain table by COPY, which returns nothing."""
    size = scaled(1000, scale)

    def call(contender):
        return lambda: contender.bulk(size)

    return {"bulk": rates(it, rounds, 1, call, jobs=size, blocks=10)}


@measure(
    cycle=Row("enqueue + claim + complete, one at a time", "jobs/s", 0.78, peers="0.53")
)
def cycle(it, rounds, scale):
    """Three calls a job, each a transaction."""

    def call(contender):
        def whole():
            contender.enqueue()
            contender.complete(contender.claim())

        return whole

    return {"cycle": rates(it, rounds, scaled(25, scale), call)}


ACTING = "with caller="


@measure(
    caller=costs("a call with `caller=` ÷ without", "ms", 1.5, against=OURS, of=ACTING)
)
def caller(it, rounds, scale):
    """Enqueue on a kept client: the role is put in force for each call."""
    figures = {OURS: [], ACTING: []}
    with it.worker() as session, it.connect() as other:
        calls = {
            OURS: LensoJobs(session).enqueue,
            ACTING: LensoJobs(other, caller="bench").enqueue,
        }
        for _ in range(rounds):
            it.empty()
            for name, each in in_turn(calls, scaled(50, scale)).items():
                figures[name].append(each * 1000)
    return {"caller": figures}


WORKER = "Worker"


@measure(
    drain=Row(
        "drain of 20,000 no-op jobs, evidence kept",
        "jobs/s",
        1.1,
        peers="0.83 (rows deleted)",
    ),
    worker_drain=Row(
        "drain of 20,000 no-op jobs by a Worker", "jobs/s", 1.2, of=WORKER
    ),
)
def drain(it, rounds, scale):
    """The plain tables 100 at a time; ours 500 a claim, completed on a second one.

    A Worker is idle, and is woken by one commit of all jobs.
    """
    figures = {name: [] for name in (*OPEN, WORKER)}
    count = scaled(20_000, scale)
    for _ in range(rounds):
        for name in shuffled(figures):
            it.empty()
            with it.worker() as session, it.worker() as second:
                if name == WORKER:
                    seconds = _worked(it, session, count)
                else:
                    contender = OPEN[name](session, second)
                    contender.bulk(1000)
                    contender.drain()
                    contender.bulk(count)
                    vacuum(it)
                    started = time.perf_counter()
                    contender.drain()
                    seconds = time.perf_counter() - started
            figures[name].append(count / seconds)
    return {"drain": figures, "worker_drain": figures}


def _worked(it, session, count):
    """Seconds from the commit of so many jobs until a Worker has completed all."""
    contender, begun = LensoJobs(session), []
    contender.bulk(1000)
    with it.connect() as owner, working(it, lambda _: begun.append(None), batch=500):
        until_empty(owner)
        begun.clear()
        with session.transaction():
            contender.bulk(count)
            started = time.perf_counter()
        while len(begun) < count:
            time.sleep(0.005)
        until_empty(owner)
        return time.perf_counter() - started


def until_empty(session):
    """Return once every job has ended, to the next few milliseconds."""
    while session.execute(
        "select exists (select from jobs_bench.live_job)"
    ).fetchone() == (True,):
        time.sleep(0.005)


def vacuum(it):
    """What autovacuum would do, now."""
    with it.connect() as session:
        session.execute(
            "vacuum analyze floor_job, kept_job, jobs_bench.live_job, jobs_bench.job"
        )


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
        self.jobs = Jobs(it.worker(), "jobs_waited")
        self.producer = LensoJobs(it.worker(), schema="jobs_waited")

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
        self.jobs._source.close()
        self.producer.jobs._source.close()


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
        self.producer.jobs._source.close()


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
    return [later - earlier for earlier, later in zip(sent, picked, strict=True)]


WAITING = {FLOOR: FloorWorker, OURS: OurWorker, WORKER: OurRunningWorker}
PERCENTILES = {
    "p50": ("median", statistics.median, "1.7"),
    "p95": ("95th percentile", lambda s: sorted(s)[-len(s) // 20], "1.9"),
}


@measure(
    **{
        f"{name}_{short}": costs(
            f"pick-up latency of {who}, {long}",
            "ms",
            1.2,
            against=FLOOR,
            of=of,
            peers=peers,
        )
        for name, who, of in (
            ("wait", "`claim(wait=)`", OURS),
            ("worker", "an idle Worker", WORKER),
        )
        for short, (long, _, peers) in PERCENTILES.items()
    }
)
def latency(it, rounds, scale):
    """Producer and worker are threads of one process; the raw one listens, too."""
    it.instance("jobs_waited")
    figures = {short: {name: [] for name in WAITING} for short in PERCENTILES}
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, kind in WAITING.items():
            workers[name] = stack.enter_context(contextlib.closing(kind(it)))
            pick_ups(workers[name], 5)
        for _ in range(rounds):
            spans = {name: [] for name in WAITING}
            for _ in range(10):
                for name in shuffled(WAITING):
                    spans[name] += pick_ups(workers[name], scaled(20, scale))
            for short, (_, pick, _) in PERCENTILES.items():
                for name in WAITING:
                    figures[short][name].append(pick(spans[name]) * 1000)
    return {
        f"{name}_{short}": figures[short]
        for name in ("wait", "worker")
        for short in PERCENTILES
    }


def pairs(it, schema, blocks, size, calls=("claim", "complete"), beside=None):
    """Seconds of blocks of single calls on one Instance and on another, in turn.

    Return ``{schema: {call: [seconds of each block]}}``. ``beside`` makes a context
    manager around each block of the second Instance.
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
    figures = {NONE: [], LOADED: []}
    it.instance(schema)
    prepare(schema)
    for _ in range(rounds):
        renew()
        spent = pairs(it, schema, 8, size, **more)
        for name, key in (("jobs_bench", NONE), (schema, LOADED)):
            figures[key].append(
                sum(map(statistics.median, spent[name].values())) / size * 1e6
            )
    return figures


@measure(
    growth=costs(
        "2,000 claims with 1,000,000 queued ÷ with 10,000",
        "µs a claim and complete",
        1.05,
        peers="0.83 to 25",
    )
)
def growth(it, rounds, scale):
    """Blocks in turn on two Instances, single calls."""

    def renew():
        it.empty()
        it.fill("jobs_bench", queued=10_000)

    figures = _flat(
        it,
        "jobs_million",
        rounds,
        int(250 * scale),
        lambda schema: it.fill(schema, queued=int(1_000_000 * scale)),
        renew,
    )
    return {"growth": figures}


@measure(
    running=costs(
        "5,000 running jobs in front of a claim ÷ none",
        "µs an enqueue, claim and complete",
        1.2,
    )
)
def running(it, rounds, scale):
    """The same."""
    it.empty()
    figures = _flat(
        it,
        "jobs_running",
        rounds,
        int(250 * scale),
        lambda schema: it.fill(schema, running=5000),
        calls=("enqueue", "claim", "complete"),
    )
    return {"running": figures}


@measure(
    kept=costs(
        "1,000,000 scheduled and 1,000,000 ended jobs kept ÷ none",
        "µs an enqueue, claim and complete",
        1.1,
    )
)
def kept(it, rounds, scale):
    """The same."""
    it.empty()
    count = int(1_000_000 * scale)
    figures = _flat(
        it,
        "jobs_kept",
        rounds,
        int(250 * scale),
        lambda schema: it.fill(schema, scheduled=count, ended=count),
        calls=("enqueue", "claim", "complete"),
    )
    return {"kept": figures}


@measure(
    purging=costs(
        "claims while 1,000,000 ended jobs are purged ÷ not",
        "µs an enqueue, claim and complete",
        1.2,
    )
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

    figures = _flat(
        it,
        "jobs_purged",
        rounds,
        int(250 * scale),
        lambda schema: it.fill(schema, ended=int(1_000_000 * scale)),
        calls=("enqueue", "claim", "complete"),
        beside=purge,
    )
    return {"purging": figures}


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


def _last_to_first(title, wanted):
    return Row(
        title,
        "jobs/s",
        wanted,
        against="first two chunks",
        of="last two chunks",
        peers="0.89 at 15,000/s, 0.75 at 31,000/s",
    )


@measure(
    held=_last_to_first(
        "snapshot held elsewhere, 50,000 jobs in ten chunks: last ÷ first", 0.95
    )
)
def held(it, rounds, scale):
    """One worker all the while; the plain table's own ratio stands beside."""
    return {"held": _held(it, rounds, scale, fresh=False)}


@measure(
    held_fresh=_last_to_first("the same, with new connections for every chunk", None)
)
def held_fresh(it, rounds, scale):
    """A worker that has just started."""
    return {"held_fresh": _held(it, rounds, scale, fresh=True)}


IDLE = (20, 200)


@measure(
    next_beside_dead=costs(
        "`next_available_at` beside 100,000 dead entries ÷ without", "ms", 1.5
    ),
    first_claim_beside_dead=costs(
        "first claim of a new connection, likewise", "ms", 1.5
    ),
    **{
        f"idle_{count}_beside_dead": costs(
            f"{count} idle sessions, likewise",
            "ms of processor a second",
            1.5,
        )
        for count in IDLE
    },
)
def dead(it, rounds, scale):
    """A snapshot is held elsewhere; two Instances, through one of which jobs went.

    The processor's time is that of the sessions, so the server has to be on this machine.
    """
    schemas = {NONE: "jobs_bench", LOADED: it.instance("jobs_dead")}
    names = ("next", "first_claim", *(f"idle_{count}" for count in IDLE))
    figures = {name: {key: [] for key in schemas} for name in names}
    with held_snapshot(it), it.worker() as session, it.worker() as second:
        passing = LensoJobs(session, second, "jobs_dead")
        passing.bulk(scaled(100_000, scale))
        passing.drain()
        for _ in range(rounds):
            spent = {
                "next": in_turn(
                    {
                        key: _next_due(LensoJobs(session, schema=schema))
                        for key, schema in schemas.items()
                    },
                    scaled(20, scale),
                ),
                "first_claim": _first_claims(it, schemas, scaled(40, scale)),
            }
            for name, each in spent.items():
                for key in schemas:
                    figures[name][key].append(each[key] * 1000)
            for count in IDLE:
                for key in shuffled(schemas):
                    figures[f"idle_{count}"][key].append(
                        _idle(it, schemas[key], scaled(count, scale), 8 * scale + 0.2)
                    )
    return {f"{name}_beside_dead": each for name, each in figures.items()}


def _next_due(contender):
    return lambda: contender.jobs.next_available_at("email")


def _first_claims(it, schemas, count):
    """Seconds of the first claim on a new connection: the median."""
    spans = {key: [] for key in schemas}
    with it.worker() as session:
        for _ in range(count):
            for key in shuffled(schemas):
                LensoJobs(session, schema=schemas[key]).enqueue()
                with it.worker() as new:
                    contender = LensoJobs(new, schema=schemas[key])
                    started = time.perf_counter()
                    lease = contender.claim()
                    spans[key].append(time.perf_counter() - started)
                    contender.complete(lease)
    return {key: statistics.median(each) for key, each in spans.items()}


def _idle(it, schema, count, seconds):
    """Server time a second of so many sessions that each look ten times a second.

    It is counted by look, because on two cores 200 of them do not come to look so often.
    """
    over, looks = threading.Event(), []

    def look(jobs):
        while not over.wait(0.1):
            jobs.claim("email")
            jobs.next_available_at("email")
            looks.append(jobs)

    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(it.worker()) for _ in range(count)]
        threads = [
            threading.Thread(target=look, args=(Jobs(session, schema),))
            for session in sessions
        ]
        files = [
            Path(f"/proc/{session.info.backend_pid}/schedstat") for session in sessions
        ]

        def spent():
            return sum(int(file.read_text().split()[0]) for file in files) / 1e6

        for thread in threads:
            thread.start()
        time.sleep(min(2.0, seconds))
        before, seen = spent(), len(looks)
        time.sleep(seconds)
        figure = (spent() - before) / max(1, len(looks) - seen)
        over.set()
        for thread in threads:
            thread.join()
    return figure * count * 10


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
        for repeat in range(3 if scale >= 1 else 1):
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
    it.instance("jobs_awaited")
    kinds = {
        "nobody waits": (OURS, {}),
        "somebody waits": (OURS, {"schema": "jobs_awaited"}),
        "notify: false": (OURS, {"schema": "jobs_silent"}),
    }
    curves = {kind: [] for kind in kinds}
    with it.connect(options="-c search_path=jobs_awaited") as session:
        session.execute("select pg_advisory_lock_shared(wait_key('email'))")
        session.execute("listen jobs_awaited")
        for count in (1, 2, 4, 8, 16)[: 5 if scale >= 1 else 3]:
            blocks = {kind: [] for kind in kinds}
            order = [kind for _ in range(3) for kind in shuffled(kinds)]
            for kind, each in in_processes(it, count, kinds, order, max(0.05, scale)):
                blocks[kind].append(each)
            for kind, each in blocks.items():
                curves[kind].append((count, statistics.median(each)))
    return curves
