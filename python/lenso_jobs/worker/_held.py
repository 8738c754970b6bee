"""The jobs that a worker holds, and what is to be done about each: no database here."""

from __future__ import annotations

from collections import deque
from math import inf
from threading import TIMEOUT_MAX, Condition, RLock
from time import monotonic
from typing import TYPE_CHECKING

from lenso_jobs.worker._outcome import HANDED_BACK, RELEASED, TIMED_OUT, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from lenso_jobs.worker._lease import LeaseState

MOST_AT_ONCE = 1000
"""How many jobs one call may concern."""
_UNDIVIDED = 100
"""Up to so many jobs are claimed together: two claims would cost more than they gain."""
MOST_UNREPORTED = 2000
"""How many ended jobs may wait for their report before no more is claimed."""


class _Queue:
    """The jobs of one queue that wait for a handler or run, and how many may.

    At most *capacity* jobs run and wait together.
    """

    def __init__(self, concurrency: int, capacity: int, lock: RLock) -> None:
        self._concurrency = concurrency
        self.capacity = capacity
        self.waiting: deque[LeaseState] = deque()
        self.running: set[LeaseState] = set()
        self.work = Condition(lock)

    def wanted(self) -> int:
        """Return how many jobs to claim now."""
        free = self.capacity - len(self.waiting) - len(self.running)
        idle = self._concurrency - len(self.running)
        # Half of the capacity at a time, so that the handlers have the other half while
        # it is claimed, unless a handler could begin at once.
        if free * 2 >= self.capacity or idle > len(self.waiting):
            half = max(_UNDIVIDED, (self.capacity + 1) // 2)
            return min(free, max(half, idle - len(self.waiting)))
        return 0


class HeldJobs:
    """The jobs of one worker. Every method may be called from any thread.

    A job waits, runs and ends. It is held until the server has confirmed its outcome. A
    job whose handler was not begun is released if the worker stops or its lease runs
    short. That uses up no attempt. Jobs whose handlers are given up are handed back if
    *hands_back*, or their leases run out. *queues* has the concurrency of each queue.
    """

    def __init__(
        self, queues: Mapping[str, int], batch: int | None = None, *, hands_back: bool
    ) -> None:
        self._hands_back = hands_back
        # To be reported, or without a verdict: their leases are lost.
        self._ended: deque[LeaseState] = deque()
        self._put_off: list[tuple[float, LeaseState]] = []
        self._held: set[LeaseState] = set()
        self._is_open = True
        self._is_over = False
        self._renewal_at = inf
        self._lock = RLock()
        self._queues = {
            name: _Queue(concurrency, max(concurrency, batch or 0), self._lock)
            for name, concurrency in queues.items()
        }
        self._most = MOST_UNREPORTED + sum(q.capacity for q in self._queues.values())
        # The queues that had no room when the others were last asked for.
        self._unasked: set[str] = set()
        self.ring: Callable[[], object] = int  # nobody to be rung
        self._room = Condition(self._lock)
        self._is_room_awaited = False
        self._news = Condition(self._lock)
        self._renewals = Condition(self._lock)

    # Claims.

    def wanted(self) -> dict[str, int]:
        """Return how many jobs to claim now, of each queue that has room.

        ``ring`` is called once another queue has room, unless none has it now.
        """
        with self._lock:
            wanted = self._wanted()
            self._unasked = self._queues.keys() - wanted.keys() if wanted else set()
            return wanted

    def _wanted(self) -> dict[str, int]:
        if not self._is_open or len(self._held) >= self._most:
            return {}
        return {name: n for name, q in self._queues.items() if (n := q.wanted())}

    def wait_for_room(self) -> bool:
        """Block until jobs are wanted; return False if none will be."""
        with self._lock:
            while self._is_open and not self._wanted():
                self._is_room_awaited = True
                self._room.wait()
            return self._is_open

    def wait_until_empty(self, seconds: float) -> None:
        """Block until no job is held or more are wanted, for so many seconds at most."""
        with self._lock:
            if self._held and self._is_open:
                self._is_room_awaited = True
                self._room.wait(seconds)

    def add(self, states: list[LeaseState]) -> None:
        """Take jobs of one queue that were claimed together: their leases end together."""
        with self._lock:
            if states[0].renew_at < self._renewal_at:
                self._renewals.notify()
            self._held.update(states)
            queue = self._queues[states[0].lease.queue]
            queue.waiting.extend(states)
            if not self._is_open:
                self._release_waiting()
            queue.work.notify(len(states))

    # Handlers.

    def next(
        self,
        queue: str,
        ended: LeaseState | None = None,
        verdict: Verdict | None = None,
    ) -> LeaseState | None:
        """Note how a run ended; block until another begins, or return None at the end."""
        with self._lock:
            if ended is not None:
                self.end(ended, verdict)
            while (state := self.take(queue)) is None and not self._is_over:
                self._queues[queue].work.wait()
            return state

    def take(self, queue: str) -> LeaseState | None:
        """Begin a job of a queue; return None if none waits."""
        with self._lock:
            now, places = monotonic(), self._queues[queue]
            while self._is_open and places.waiting:
                state = places.waiting.popleft()
                if not state.is_over(now):
                    state.began_at = now
                    places.running.add(state)
                    return state
                self._give_up(state, RELEASED)
            return None

    def end(self, state: LeaseState, verdict: Verdict | None) -> None:
        """Note how a run ended."""
        with self._lock:
            running = self._queues[state.lease.queue].running
            if state not in running:
                return  # given up meanwhile
            now = monotonic()
            running.remove(state)
            if state.is_ended:
                self._make_room()
                return
            state.seconds = now - state.began_at
            if verdict is RELEASED or verdict is HANDED_BACK:
                self._give_up(state, verdict)
            elif state.is_over(now):
                self._give_up(state, None)
            else:
                state.verdict = verdict
                self._report(state)
            self._make_room()

    def waiting(self, queue: str) -> int:
        """Return how many jobs of a queue could begin."""
        return len(self._queues[queue].waiting) if self._is_open else 0

    def _give_up(self, state: LeaseState, verdict: Verdict | None) -> None:
        """Release a job, hand it back, or let its lease run out."""
        is_left = verdict is HANDED_BACK and not self._hands_back
        state.verdict = None if state.is_lost or is_left else verdict
        state.is_lost = True
        self._report(state)

    def _make_room(self) -> None:
        if not (self._is_room_awaited or self._unasked):
            return
        wanted = self._wanted()
        if wanted or not self._held:
            self._is_room_awaited = False
            self._room.notify()
        if not self._unasked.isdisjoint(wanted):
            self._unasked = set()
            self.ring()

    def _report(self, state: LeaseState) -> None:
        state.is_ended = True
        self._ended.append(state)
        if len(self._ended) == 1:
            self._news.notify()

    # Reports.

    def collect(self) -> list[LeaseState]:
        """Block until jobs have ended; return at most 1,000 of them, or none at the end.

        Those without a verdict have lost their leases.
        """
        with self._lock:
            while not (self._ended or self._is_over):
                now = monotonic()
                self._ended.extend(s for at, s in self._put_off if at <= now)
                self._put_off = [(at, s) for at, s in self._put_off if at > now]
                if not self._ended:
                    next_at = min((at for at, _ in self._put_off), default=inf)
                    self._news.wait(min(next_at - now, TIMEOUT_MAX))
            count = min(len(self._ended), MOST_AT_ONCE)
            return [self._ended.popleft() for _ in range(count)]

    def put_off(self, states: Iterable[LeaseState]) -> None:
        """Have jobs reported again, later each time: from 20 ms to half a second."""
        now = monotonic()
        with self._lock:
            for state in states:
                state.pause = min(0.5, state.pause * 2)
                self._put_off.append((now + state.pause, state))

    def forget(self, states: Iterable[LeaseState]) -> None:
        """Let go of jobs whose outcome the server has confirmed."""
        with self._lock:
            self._held.difference_update(states)
            self._make_room()

    # Leases.

    def wait_for_renewals(self) -> list[LeaseState]:
        """Block until leases are due; return at most 1,000 of them, or none at the end.

        Leases that are due soon are returned with the ones that are due.
        """
        with self._lock:
            while not self._is_over:
                now = monotonic()
                held = [s for s in self._held if not s.is_lost]
                due = [
                    s for s in held if s.renew_at - (s.ends_at - s.renew_at) / 8 <= now
                ]
                if due:
                    return sorted(due, key=lambda s: s.ends_at)[:MOST_AT_ONCE]
                self._renewal_at = min((s.renew_at for s in held), default=inf)
                self._renewals.wait(min(self._renewal_at - now, TIMEOUT_MAX))
            return []

    def lapse(self) -> list[LeaseState]:
        """Give up the leases that run short; return the running jobs among them."""
        now = monotonic()
        with self._lock:
            for queue in self._queues.values():
                for state in [s for s in queue.waiting if s.is_over(now)]:
                    queue.waiting.remove(state)  # they are mostly the first ones
                    self._give_up(state, RELEASED)
            lapsed = [s for s in self.running if not s.is_lost and s.is_over(now)]
            for state in lapsed:
                state.is_lost = True
            return lapsed

    def time_out(self, timeout: float, patience: float) -> list[LeaseState]:
        """Return the jobs whose handlers have just had all their time.

        Those that go on for *patience* more seconds are given up: their attempts fail,
        and their places stay taken until the handlers end.
        """
        now = monotonic()
        with self._lock:
            late = [s for s in self.running if now - s.began_at >= timeout]
            news = [state for state in late if not state.is_overdue]
            for state in late:
                state.is_overdue = True
                state.seconds = now - state.began_at
                if state.seconds >= timeout + patience and not state.is_lost:
                    self._give_up(state, TIMED_OUT)
            return news

    def lose(self, state: LeaseState) -> bool:
        """Note that the server refused a lease; return whether its handler runs.

        If the job has ended, or its handler completes it, the report will tell.
        """
        with self._lock:
            queue = self._queues[state.lease.queue]
            is_news = state in queue.running and not (
                state.completes_itself or state.is_lost
            )
            if is_news or state in queue.waiting:
                state.is_lost = True
            return is_news

    # The end.

    def stop(self) -> None:
        """Let no further job begin. Takes no lock: a signal handler may call it."""
        self._is_open = False

    def close(self) -> None:
        """Stop, and release every job that waits."""
        with self._lock:
            self._is_open = False
            self._release_waiting()
            self._room.notify_all()
            for queue in self._queues.values():
                queue.work.notify_all()

    def _release_waiting(self) -> None:
        for queue in self._queues.values():
            while queue.waiting:
                self._give_up(queue.waiting.popleft(), RELEASED)

    def abandon(self) -> None:
        """Give up every job whose handler runs."""
        with self._lock:
            now = monotonic()
            for queue in self._queues.values():
                while queue.running:
                    state = queue.running.pop()
                    if not state.is_ended:
                        state.seconds = now - state.began_at
                        self._give_up(state, HANDED_BACK)

    def finish(self) -> list[LeaseState]:
        """End it; return the jobs that are still held."""
        with self._lock:
            self._is_open = False
            self._is_over = True
            work = (queue.work for queue in self._queues.values())
            for condition in (self._room, self._news, self._renewals, *work):
                condition.notify_all()
            return list(self._held)

    @property
    def running(self) -> list[LeaseState]:
        """The jobs whose handlers run and have not been given up."""
        with self._lock:
            queues = self._queues.values()
            return [s for q in queues for s in q.running if not s.is_ended]

    @property
    def is_stuck(self) -> bool:
        """Whether handlers run that have been given up."""
        with self._lock:
            return any(s.is_ended for q in self._queues.values() for s in q.running)

    @property
    def has_work(self) -> bool:
        """Whether a job waits, runs or is to be reported."""
        with self._lock:
            return bool(self._held)
