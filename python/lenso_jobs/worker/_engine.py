"""What claims, renews and reports for a worker, each on a thread and a connection.

None of them runs a handler, so that no handler, however long it blocks, keeps a lease
from being renewed, nor a slow report a claim from being made.
"""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from math import inf
from queue import Empty
from threading import Event, Lock, Thread, current_thread, main_thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import psycopg
from psycopg.rows import args_row

from lenso_jobs._waiting import POLLING_SECONDS, pauses
from lenso_jobs.errors import JobsError
from lenso_jobs.worker._lease import holding_of, renewed
from lenso_jobs.worker._ledger import MOST_AT_ONCE
from lenso_jobs.worker._line import Backoff, Line, is_passing, is_servers_own
from lenso_jobs.worker._outcome import (
    DONE,
    HANDED_BACK,
    ROLLED_BACK,
    UNJUDGED,
    Fail,
    Retry,
    chosen,
    code_of,
    verdict_on,
)
from lenso_jobs.worker.observer import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from queue import SimpleQueue

    from lenso_jobs.worker._lease import Holding, LeaseOfWorker, Terms
    from lenso_jobs.worker._ledger import Ledger
    from lenso_jobs.worker._line import WorkersJobs
    from lenso_jobs.worker._outcome import Outcome, Verdict
    from lenso_jobs.worker.observer import Observer


class _Log(logging.LoggerAdapter[logging.Logger]):
    """The log of workers, whose filters may raise and do them no harm."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ANN401 - as logging's
        with suppress(Exception):
            self.logger.log(level, msg, *args, **kwargs, stacklevel=2)


logger = _Log(logging.getLogger("lenso_jobs.worker"), {})

ANSWER_SECONDS = 30.0
"""How long a call may take before its connection is given up."""
HAND_BACK_SECONDS = 5.0
"""How long a worker that was forced to stop tries to hand its jobs back."""
_QUIET_SECONDS = 60.0
_TICK = 0.1
_NEVER = 1e300
_GIVE_WAY = 0.0001


@dataclass(slots=True)
class Tally:
    """What became of the jobs of a worker that has stopped.

    ``is_clean`` is False where handlers were still running when the grace was over, or
    where, once it was stopped, ends of jobs could not be reported.
    """

    succeeded: int = 0
    retried: int = 0
    failed: int = 0
    lost: int = 0
    handed_back: int = 0
    is_clean: bool = True


class Crew(Protocol):
    """Who runs handlers.

    ``ends_within`` is how many seconds those take to end that are told to; 0 where they
    cannot be.
    """

    ends_within: float

    @property
    def is_gone(self) -> bool:
        """Whether nobody is left to run them."""

    def alert(self) -> None:
        """There may be jobs to run."""

    def tell(self, holding: Holding) -> None:
        """The lease is lost, or the grace over: let the handler know."""


class _Trouble:
    """Tells once of a database that gives no answers, and once that it does again."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock = Lock()
        self._lines: set[Line] = set()
        self._since = 0.0
        self._told_at = -inf

    def note(self, line: Line, error: psycopg.Error) -> None:
        now = monotonic()
        with self._lock:
            if not self._lines:
                self._since, self._told_at = now, -inf
                self._watch.tell("disconnected", error)
            self._lines.add(line)
            if now - self._told_at > _QUIET_SECONDS:
                self._told_at = now
                logger.warning(
                    "the database gives no answers since %.0f s (%s)",
                    now - self._since,
                    _cause(error),
                )

    def over(self, line: Line) -> None:
        if not self._lines:
            return
        with self._lock:
            if self._lines != {line}:
                self._lines.discard(line)
                return
            self._lines.clear()
            seconds = monotonic() - self._since
            logger.warning("the database answers again, after %.1f s", seconds)
            self._watch.tell("reconnected", seconds)


_CAUSES = (
    *("Connection refused", "Connection timed out", "timeout expired"),
    *("No such file or directory", "could not translate host name"),
    *("password authentication failed", "no pg_hba.conf entry", "does not exist"),
    *("too many", "starting up", "shutting down", "closed the connection"),
)


def _cause(error: psycopg.Error) -> str:
    """Name what is wrong, in words of ours: the text may hold the connection string."""
    text = str(error)
    known = next((cause for cause in _CAUSES if cause in text), None)
    cause = None if error.__cause__ is None else type(error.__cause__).__name__
    facts = (
        *(type(error).__name__, error.sqlstate, cause),
        None if error.sqlstate else known,
    )
    return ", ".join(filter(None, facts))


_NOTHING = nullcontext()


class Watch:
    """The observers of a worker, none of which can do it any harm."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = tuple(observers)

    def tell(self, event: str, *facts: Any) -> None:  # noqa: ANN401 - whatever it takes
        for observer in self.observers:
            try:
                getattr(observer, event)(*facts)
            except BaseException as error:  # noqa: BLE001 - an observer does no harm
                _pass_over(event, error)

    def around(self, lease: LeaseOfWorker) -> AbstractContextManager[None]:
        """Answer what enters what every observer wants around a handler."""
        return self._around(lease) if self.observers else _NOTHING

    @contextmanager
    def _around(self, lease: LeaseOfWorker) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self.observers:
                try:
                    inner = observer.running(lease)
                    inner.__enter__()
                except BaseException as error:  # noqa: BLE001 - as above
                    _pass_over("running", error)
                else:
                    stack.push(partial(_leave, inner))
            yield


def _leave(inner: Any, *error: Any) -> None:  # noqa: ANN401 - as __exit__ takes them
    try:
        inner.__exit__(*error)
    except BaseException as raised:  # noqa: BLE001 - as above
        if raised is not error[1]:
            _log_observer("running", raised)


def _pass_over(event: str, error: BaseException) -> None:
    # A signal may have come meanwhile, whose handler raises in the main thread.
    is_exit = issubclass(type(error), KeyboardInterrupt | SystemExit)
    if is_exit and current_thread() is main_thread():
        raise error
    _log_observer(event, error)


def _log_observer(event: str, error: BaseException) -> None:
    # Without its text: that, or the text of what it was raised from, may be a payload's.
    try:
        origin = _origin(error)
    except Exception:  # noqa: BLE001 - a class of the application's may raise anything
        origin = "an exception"
    logger.error("an observer failed at %s: %s", event, origin)


class Stop(NamedTuple):
    """An order to end by a time, as ``time.monotonic`` tells it."""

    by: float


class Engine:
    """Holds leases for a crew, until it is stopped."""

    def __init__(  # noqa: PLR0913 - a worker's options
        self,
        *,
        connect: Callable[[], psycopg.Connection[Any]],
        lease: Callable[..., LeaseOfWorker],
        terms: Terms,
        queue: str,
        ledger: Ledger,
        crew: Crew,
        watch: Watch,
        orders: SimpleQueue[Stop | None],
        grace: float,
    ) -> None:
        self._lease = args_row(partial(lease, terms))
        self._queue = queue
        self._ledger = ledger
        self._crew = crew
        self._watch = watch
        self._grace = grace
        # The one kind of queue that a signal handler may put into.
        self._orders = orders
        self._deadline = inf
        self._trouble = _Trouble(watch)
        self._tally = Tally()
        self._error: BaseException | None = None
        self._ending = Event()
        self._closing = Event()
        self._told_polling = False
        self._is_unwatched = not (watch.observers or logger.isEnabledFor(logging.DEBUG))
        self._alarm, self._bell = socket.socketpair()
        self._lines = tuple(Line(connect, terms.schema, terms.caller) for _ in range(3))
        claims, keeps, reports = self._lines
        self._threads = [
            Thread(target=self._guarded, args=(act, line), name=name, daemon=True)
            for act, line, name in (
                (self._claim_all, claims, f"lenso-jobs {queue} claims"),
                (self._keep_all, keeps, f"lenso-jobs {queue} leases"),
                (self._report_all, reports, f"lenso-jobs {queue} reports"),
            )
        ]

    def run(self) -> Tally:
        """Work until stopped; answers what became of all jobs.

        Raises:
            JobsError: The server refused a claim, a renewal or a report as such.
        """
        logger.info("worker of queue %s starts", self._queue)
        try:
            self._tick(0)
            self._close_if_stopped()
            for thread in self._threads:
                thread.start()
            while not self._closing.is_set():
                self._tick()
                self._close_if_stopped()
            # What a claim on its way has leased is not to be left behind.
            claims, claiming = self._threads[0], self._lines[0]
            self._supervise(
                lambda: claims.is_alive() and claiming.is_open, at_least=1.0
            )
            self._supervise(lambda: self._ledger.has_work)
            if self._ledger.has_work:
                self._force()
        except BaseException:
            # Somebody interrupts: what the jobs were claimed for is not left behind.
            self._deadline = monotonic()
            self._ledger.close()
            self._force()
            raise
        finally:
            self._end()
        logger.info("worker of queue %s has stopped: %s", self._queue, self._tally)
        if self._error is not None:
            raise self._error
        return self._tally

    def abandon(self) -> None:
        """End what has not been run."""
        self._ledger.finish()
        self._alarm.close()
        self._bell.close()

    def _close_if_stopped(self) -> None:
        if self._deadline < inf:
            self._closing.set()
            self._ledger.close()
            self._lines[0].hurry(HAND_BACK_SECONDS)
            self._bell.send(b".")

    def _supervise(self, is_going: Callable[[], bool], at_least: float = 0.0) -> None:
        """Look after leases and connections while something is going on."""
        earliest = monotonic() + at_least
        while is_going() and monotonic() < max(self._deadline, earliest):
            self._tick()

    def _tick(self, longest: float = _TICK) -> None:
        with suppress(Empty):
            order = self._orders.get(timeout=longest)
            while True:
                if order is not None:
                    # One without an end in sight is an order, too.
                    self._deadline = min(self._deadline, order.by, _NEVER)
                order = self._orders.get_nowait()
        for holding in self._ledger.lapse():
            self._tell_lost(holding)
        now = monotonic()
        if self._crew.is_gone:
            self._deadline = min(self._deadline, now)
        for line in self._lines:
            line.cut_if_overdue(now)

    def _force(self) -> None:
        """Give up what has not ended, and try to hand it back."""
        self._tally.is_clean = False
        running = self._ledger.abandon_waiting()
        for holding in running:
            log(logging.WARNING, "the grace is over, its handler runs", holding.lease)
            self._crew.tell(holding)
        # One that is cancelled cleans up before somebody else begins with its job.
        self._supervise(
            lambda: self._ledger.is_running, at_least=self._crew.ends_within
        )
        self._ledger.abandon_running()
        self._supervise(lambda: self._ledger.has_work, at_least=HAND_BACK_SECONDS)

    def _end(self) -> None:
        self._closing.set()
        self._ending.set()
        self._ledger.finish()
        self._bell.send(b".")
        for seconds in (1.0, 0.0 if self._tally.is_clean else 1.0):
            for thread in self._threads:
                if thread.ident is not None:  # there may have been none left to start
                    thread.join(seconds)
            for line in self._lines:
                line.cut()
        self._alarm.close()
        self._bell.close()
        for holding in self._ledger.finish():
            self._tally.is_clean = False
            self._leave(holding, "lost")

    def _guarded(self, act: Callable[[Line], None], line: Line) -> None:
        """Let what ends a thread before its time end the worker."""
        try:
            act(line)
        except BaseException as error:  # noqa: BLE001 - run raises it
            if not self._ending.is_set():
                self._error = self._error or error
                self._orders.put(Stop(monotonic() + self._grace))
        finally:
            line.close()
            self._orders.put(None)  # look again what there is to wait for

    def _again(
        self, line: Line, ending: Event, act: Callable[[WorkersJobs], None]
    ) -> bool:
        """Act on a connection until it succeeds; False if the end came before."""
        backoff = Backoff()
        while not ending.is_set():
            try:
                with line.in_use() as jobs:
                    act(jobs)
            except psycopg.Error as error:
                if not (is_passing(error) or is_servers_own(error)):
                    raise
                pause = backoff.failed(error)
                if pause and not ending.wait(pause):
                    self._trouble.note(line, error)
            else:
                self._trouble.over(line)
                return True
        return False

    # Claims.

    def _claim_all(self, line: Line) -> None:
        look = partial(self._look, line)
        while (
            self._ledger.wait_for_room()
            and self._wait_until_kept()
            and self._again(line, self._closing, look)
        ):
            pass

    @property
    def _can_keep(self) -> bool:
        return self._lines[1].is_open

    def _wait_until_kept(self) -> bool:
        """Wait until leases can be kept alive; False if the end came.

        The role may have no connection left for that: jobs are not to be begun whose
        leases would run out.
        """
        rest = 0.001
        while not self._can_keep:
            if self._closing.wait(rest):
                return False
            rest = min(rest * 2, _TICK)
        return True

    def _look(self, line: Line, jobs: WorkersJobs) -> None:
        """Claim what there is, or wait until there is something and claim that."""
        wanted = self._ledger.wanted()
        if not wanted or self._take(line, jobs, wanted):
            return
        with jobs.waiter(self._queue) as waiter:
            can_listen = waiter.longest > POLLING_SECONDS
            if not (can_listen or self._told_polling):
                self._told_polling = True
                logger.warning(
                    "queue %s is looked at every %.0f s: this connection cannot listen",
                    self._queue,
                    POLLING_SECONDS,
                )
            rests, most = pauses(waiter.longest), MOST_AT_ONCE
            while (wanted := min(self._ledger.wanted(), most)) and self._can_keep:
                is_woken, most = most == 1, MOST_AT_ONCE
                taken = self._take(line, jobs, wanted)
                if self._closing.is_set():
                    return
                if taken:
                    rests = pauses(waiter.longest)
                if taken == wanted:
                    if is_woken:
                        # The handler's thread first: this one would keep the
                        # interpreter until its next call waits for an answer.
                        sleep(_GIVE_WAY)
                        continue
                    # The jobs are with their handlers before the waiting ends, and so
                    # many more may be due that it is no use.
                    return
                rest = next(rests)
                if can_listen and rest > 0.1:  # noqa: PLR2004 - a short one needs no query
                    due_in = jobs.due_in(self._queue)
                    rest = min(rest, due_in) if due_in > 0 else rest
                line.expect(rest + ANSWER_SECONDS)
                waiter.sleep_until(self._alarm, rest)
                if self._closing.is_set():
                    return
                # One job is claimed in half the time of several, and mostly it is one.
                most = 1

    def _take(self, line: Line, jobs: WorkersJobs, wanted: int) -> int:
        line.expect(ANSWER_SECONDS)
        asked_at = monotonic()
        leases = jobs.hold(self._lease, self._queue, wanted)
        self._trouble.over(line)
        if leases:
            holdings = [holding_of(lease) for lease in leases]
            for holding in holdings:
                holding.count_from(asked_at)
            self._watch.tell("claimed", self._queue, len(leases))
            self._ledger.add(holdings)
            self._crew.alert()
        return len(leases)

    # Leases.

    def _keep_all(self, line: Line) -> None:
        # Now rather than when it is needed: there may be no free connection then.
        self._again(line, self._ending, lambda _: None)
        while due := self._ledger.wait_for_renewals():
            self._again(line, self._ending, partial(self._keep, line, due))

    def _keep(self, line: Line, due: list[Holding], jobs: WorkersJobs) -> None:
        asked_at = monotonic()
        due = [h for h in due if not h.is_lost]
        if not due:
            return
        line.expect(max(1.0, min(h.ends_at for h in due) - asked_at) / 2)
        rows = jobs.prolong(_leases(due))
        for holding, (outcome, end, left) in zip(due, rows, strict=True):
            if outcome == "renewed" and end is not None and left is not None:
                holding.extend(asked_at, left)
                renewed(holding.lease, end)
            elif outcome == "busy":
                now = monotonic()
                holding.renew_at = now + max(0.05, (holding.ends_at - now) / 4)
            else:
                holding.renew_at = inf
                if self._ledger.lose(holding):
                    self._tell_lost(holding)

    def _tell_lost(self, holding: Holding) -> None:
        log(logging.WARNING, "lease lost while its handler runs", holding.lease)
        self._crew.tell(holding)
        self._watch.tell("lost", holding.lease)

    # Reports.

    def _report_all(self, line: Line) -> None:
        while True:
            done, dropped = self._ledger.collect()
            if not (done or dropped):
                return
            for holding in dropped:
                self._leave(holding, "lost")
            self._forget(dropped)
            if done and not self._again(
                line, self._ending, partial(self._report, line, done)
            ):
                return

    def _report(self, line: Line, done: list[Holding], jobs: WorkersJobs) -> None:
        """Report what has not been; what is reported is taken off the list at once."""
        now = monotonic()
        late = [h for h in done if now >= h.ends_at and not h.is_own]
        if late and self._closing.is_set():
            self._tally.is_clean = False
        self._reported(done, late, repeat("lost"))
        own = [h for h in done if h.is_own]
        if own:
            line.expect(ANSWER_SECONDS)
            self._ask_of_own(done, own, jobs)
        succeeded = [h for h in done if h.verdict is DONE]
        failed = [h for h in done if h.verdict is not DONE]
        for group, report in ((succeeded, _completed), (failed, _failed)):
            if not group:
                continue
            self._reported(done, group, self._outcomes(line, jobs, report, group))

    def _outcomes(
        self,
        line: Line,
        jobs: WorkersJobs,
        report: Callable[[WorkersJobs, list[Holding]], list[Outcome]],
        group: list[Holding],
        pauses_left: tuple[float, ...] = (0.05, 0.2),
    ) -> list[Outcome]:
        """Report together, or one by one: what is wrong with one harms no other."""
        line.expect(ANSWER_SECONDS)
        try:
            return report(jobs, group)
        except (psycopg.Error, JobsError) as error:
            if isinstance(error, psycopg.Error) and is_passing(error):
                raise
            if len(group) > 1:
                return [
                    outcome
                    for holding in group
                    for outcome in self._outcomes(line, jobs, report, [holding])
                ]
            if is_servers_own(error) and pauses_left:
                sleep(pauses_left[0])
                return self._outcomes(line, jobs, report, group, pauses_left[1:])
            # Its text is the server's, and may be anything.
            refusal = f"the server refuses a report ({type(error).__name__})"
            log(logging.ERROR, refusal, group[0].lease)
            return ["lost"]

    def _ask_of_own(
        self, done: list[Holding], own: list[Holding], jobs: WorkersJobs
    ) -> None:
        """Find out what became of jobs that their handlers ended themselves.

        A renewal passes by what is locked: a completion that is not committed yet. One
        that succeeds tells of a rollback. Else the job has ended, which repeating the
        completion confirms, or the lease is gone.
        """
        busy: list[Holding] = []
        ended: list[Holding] = []
        rows = jobs.prolong(_leases(own))
        for holding, (outcome, *_) in zip(own, rows, strict=True):
            if outcome == "renewed":
                holding.is_own = False
                if holding.verdict is DONE:
                    holding.verdict = ROLLED_BACK
            else:
                (busy if outcome == "busy" else ended).append(holding)
        if ended:
            outcomes = _completed(jobs, ended)
            for holding in ended:
                holding.verdict = DONE
            self._reported(done, ended, outcomes)
        if busy:
            done[:] = [holding for holding in done if holding not in busy]
            self._ledger.put_off(busy)

    def _reported(
        self, done: list[Holding], group: list[Holding], outcomes: Iterable[Outcome]
    ) -> None:
        for holding, outcome in zip(group, outcomes, strict=False):
            if outcome == "succeeded" and self._is_unwatched:
                self._tally.succeeded += 1
            else:
                self._leave(holding, outcome)
        reported = set(group)
        done[:] = [holding for holding in done if holding not in reported]
        self._forget(group)

    def _forget(self, group: list[Holding]) -> None:
        self._ledger.forget(group)
        if self._closing.is_set():
            self._orders.put(None)

    def _leave(self, holding: Holding, outcome: Outcome) -> None:
        """Count what became of a job, and tell."""
        code = holding.verdict.code if holding.verdict and outcome != "lost" else None
        if holding.verdict is HANDED_BACK and outcome != "lost":
            outcome = "handed_back"
        setattr(self._tally, outcome, getattr(self._tally, outcome) + 1)
        if outcome == "succeeded":
            if logger.isEnabledFor(logging.DEBUG):
                log(logging.DEBUG, outcome, holding.lease)
        else:
            log(logging.WARNING, outcome, holding.lease, code)
        self._watch.tell("ended", Ended(holding.lease, outcome, code, holding.seconds))


def _leases(holdings: list[Holding]) -> list[LeaseOfWorker]:
    return [holding.lease for holding in holdings]


def _completed(jobs: WorkersJobs, group: list[Holding]) -> list[Outcome]:
    return [_OUTCOMES.get(end, "lost") for end in jobs.end(_leases(group), None)]


def _failed(jobs: WorkersJobs, group: list[Holding]) -> list[Outcome]:
    failures = [holding.verdict for holding in group if holding.verdict is not None]
    return [_OUTCOMES.get(end, "lost") for end in jobs.end(_leases(group), failures)]


_OUTCOMES: dict[str, Outcome] = {
    "completed": "succeeded",
    "queued": "retried",
    "failed": "failed",
}


def log(level: int, what: str, lease: LeaseOfWorker, code: str | None = None) -> None:
    """Write what happened to a job; never its payload, key or token."""
    facts = {
        "job_id": str(lease.job_id),
        "queue": lease.queue,
        "kind": lease.kind,
        "attempt": lease.attempt,
    }
    if code is not None:
        facts["failure_code"] = code
    logger.log(
        level,
        "%s: %s",
        what,
        " ".join(f"{name}={value}" for name, value in facts.items()),
        extra=facts,
    )


def log_failure(lease: LeaseOfWorker, error: BaseException) -> None:
    """Write which exception a handler raised and where; its text may be the payload's."""
    if not isinstance(chosen(error), Retry | Fail):
        log(logging.WARNING, f"handler raised {_origin(error)}", lease)


def judged(lease: LeaseOfWorker, error: BaseException) -> Verdict:
    """Judge what a handler raised, and write it down, whatever that raises."""
    try:
        log_failure(lease, error)
        return verdict_on(error)
    except BaseException:  # noqa: BLE001 - the next job waits
        return UNJUDGED


def _origin(error: BaseException) -> str:
    """The class of an exception, and where it was raised."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return code_of(error)
    return f"{code_of(error)} at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
