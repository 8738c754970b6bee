"""What a worker holds and what is to be done about it: decisions, no database.

A lease waits for a free hand, runs, is done, and leaves once the server has answered.
Every method may be called from any thread.
"""

from __future__ import annotations

from collections import deque
from math import inf
from threading import Condition, Lock
from time import monotonic
from typing import TYPE_CHECKING

from lenso_jobs.worker._outcome import HANDED_BACK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lenso_jobs.worker._lease import Holding
    from lenso_jobs.worker._outcome import Verdict

MOST_AT_ONCE = 1000
"""How many jobs a call may concern."""
MOST_UNREPORTED = 2000
"""How many ended jobs may wait for the server before nothing more is claimed."""


class Ledger:
    """The leases of one worker.

    Args:
        concurrency: How many handlers run at once.
        batch: How many jobs may run and wait for a free hand together.
        hands_back: Whether a closed ledger hands waiting jobs back; else they lapse.
    """

    def __init__(self, concurrency: int, batch: int, *, hands_back: bool) -> None:
        self._concurrency = concurrency
        self._batch = batch
        self._hands_back = hands_back
        self._waiting: deque[Holding] = deque()
        self._running: set[Holding] = set()
        self._done: deque[Holding] = deque()
        self._dropped: deque[Holding] = deque()
        self._put_off: list[tuple[float, Holding]] = []
        self._held: set[Holding] = set()
        self._is_open = True
        self._is_over = False
        self._renewal_at = inf
        self._is_full = self._is_quiet = False
        self._lock = Lock()
        self._room = Condition(self._lock)
        self._work = Condition(self._lock)
        self._news = Condition(self._lock)
        self._renewals = Condition(self._lock)

    def wanted(self) -> int:
        """How many jobs to claim now."""
        with self._lock:
            return self._wanted()

    def _wanted(self) -> int:
        if not self._is_open or len(self._held) >= self._batch + MOST_UNREPORTED:
            return 0
        free = self._batch - len(self._waiting) - len(self._running)
        idle = self._concurrency - len(self._running)
        # Half a batch at a time, unless a hand would have nothing to do.
        if free * 2 >= self._batch or idle > len(self._waiting):
            return min(free, MOST_AT_ONCE)
        return 0

    def wait_for_room(self) -> bool:
        """Block until jobs are wanted; False once none ever will be."""
        with self._lock:
            while self._is_open and not self._wanted():
                self._is_full = True
                self._room.wait()
            return self._is_open

    def add(self, holdings: list[Holding]) -> None:
        """Take leases that were claimed."""
        with self._lock:
            # They were given together, and so end together.
            if holdings[0].renew_at < self._renewal_at:
                self._renewals.notify()
            self._held.update(holdings)
            self._waiting.extend(holdings)
            if not self._is_open:
                self._clear()
            self._work.notify(len(holdings))

    def next(
        self, ended: Holding | None = None, verdict: Verdict | None = None
    ) -> Holding | None:
        """Note how a run ended, and block until there is another; None for no more."""
        with self._lock:
            now = monotonic()
            if ended is not None:
                self._end(ended, verdict, now)
            while True:
                holding = self._take(now)
                if holding is not None or self._is_over:
                    return holding
                self._work.wait()
                now = monotonic()

    def take(self) -> Holding | None:
        """Begin the next run; None if none waits."""
        with self._lock:
            return self._take(monotonic())

    def end(self, holding: Holding, verdict: Verdict) -> None:
        """Note how a run ended."""
        with self._lock:
            self._end(holding, verdict, monotonic())

    def _take(self, now: float) -> Holding | None:
        while self._waiting:
            holding = self._waiting.popleft()
            if holding.is_over(now):
                self._drop(holding)
                continue
            holding.began_at = now
            self._running.add(holding)
            return holding
        return None

    def _end(self, holding: Holding, verdict: Verdict | None, now: float) -> None:
        if holding not in self._running:
            return  # handed back meanwhile
        self._running.remove(holding)
        holding.seconds = now - holding.began_at
        if holding.is_over(now) or (verdict is HANDED_BACK and not self._hands_back):
            self._drop(holding)
        else:
            holding.verdict = verdict
            holding.is_lost = verdict is HANDED_BACK
            self._done.append(holding)
            self._bring_news()
        self._make_room()

    def _make_room(self) -> None:
        # Asked for every job: a condition would take its time to find nobody waiting.
        if self._is_full and self._wanted():
            self._is_full = False
            self._room.notify()

    def _bring_news(self) -> None:
        if self._is_quiet:
            self._is_quiet = False
            self._news.notify()

    def _drop(self, holding: Holding) -> None:
        holding.is_lost = True
        self._dropped.append(holding)
        self._bring_news()

    def collect(self) -> tuple[list[Holding], list[Holding]]:
        """Block until jobs ended; answers those to report, and those that were lost.

        Nothing at all once the ledger is over.
        """
        with self._lock:
            while not (self._done or self._dropped or self._is_over):
                now = monotonic()
                self._done.extend(h for at, h in self._put_off if at <= now)
                self._put_off = [(at, h) for at, h in self._put_off if at > now]
                if not self._done:
                    self._is_quiet = True
                    next_at = min((at for at, _ in self._put_off), default=inf)
                    self._news.wait(None if next_at == inf else next_at - now)
            done = [
                self._done.popleft() for _ in range(min(len(self._done), MOST_AT_ONCE))
            ]
            dropped = list(self._dropped)
            self._dropped.clear()
            return done, dropped

    def put_off(self, holdings: Iterable[Holding]) -> None:
        """Have jobs reported again, later each time: from 20 ms to half a second."""
        now = monotonic()
        with self._lock:
            for holding in holdings:
                holding.patience = min(0.5, holding.patience * 2)
                self._put_off.append((now + holding.patience, holding))

    def forget(self, holdings: Iterable[Holding]) -> None:
        """Let go of jobs that the server has answered on."""
        with self._lock:
            self._held.difference_update(holdings)
            self._make_room()

    def wait_for_renewals(self) -> list[Holding]:
        """Block until leases are to be renewed; nothing once the ledger is over."""
        with self._lock:
            while not self._is_over:
                now = monotonic()
                # Who is due soon goes along.
                due = [
                    holding
                    for holding in self._held
                    if not holding.is_lost
                    and holding.renew_at
                    <= now + (holding.ends_at - holding.renew_at) / 8
                ]
                if due:
                    due.sort(key=lambda holding: holding.ends_at)
                    return due[:MOST_AT_ONCE]
                self._renewal_at = min(
                    (h.renew_at for h in self._held if not h.is_lost), default=inf
                )
                self._renewals.wait(
                    None if self._renewal_at == inf else self._renewal_at - now
                )
            return []

    def lapse(self) -> list[Holding]:
        """Note the leases that are lost by now; answers the running ones among them."""
        now = monotonic()
        with self._lock:
            for _ in range(len(self._waiting)):
                holding = self._waiting.popleft()
                if holding.is_over(now):
                    self._drop(holding)
                else:
                    self._waiting.append(holding)
            lapsed = [
                holding
                for holding in self._running
                if not holding.is_lost and holding.is_over(now)
            ]
            for holding in lapsed:
                holding.is_lost = True
            return lapsed

    def lose(self, holding: Holding) -> bool:
        """Note that the server does not know a lease; whether a handler runs under it.

        Of a job that ended or that its handler ends itself, its report will tell.
        """
        with self._lock:
            is_news = holding in self._running and not (
                holding.is_own or holding.is_lost
            )
            if is_news or holding in self._waiting:
                holding.is_lost = True
            return is_news

    def close(self) -> None:
        """Claim no more, and let go of what waits.

        A job on its last attempt goes on waiting: handed back it would have failed
        without having been run.
        """
        with self._lock:
            self._is_open = False
            self._clear()
            self._room.notify_all()
            self._work.notify_all()

    def _clear(self) -> None:
        for _ in range(len(self._waiting)):
            holding = self._waiting.popleft()
            if holding.lease.attempt == holding.lease.max_attempts:
                self._waiting.append(holding)
            else:
                self._hand_back(holding)

    def abandon_waiting(self) -> list[Holding]:
        """Give up whatever has not begun; answers what is running."""
        with self._lock:
            while self._waiting:
                self._hand_back(self._waiting.popleft())
            return list(self._running)

    def abandon_running(self) -> None:
        """Give up whatever has not ended."""
        with self._lock:
            now = monotonic()
            while self._running:
                holding = self._running.pop()
                holding.seconds = now - holding.began_at
                self._hand_back(holding)

    def _hand_back(self, holding: Holding) -> None:
        was_lost = holding.is_lost
        holding.is_lost = True
        if self._hands_back and not was_lost:
            holding.verdict = HANDED_BACK
            self._done.append(holding)
        else:
            self._dropped.append(holding)
        self._bring_news()

    def finish(self) -> list[Holding]:
        """End it; answers what is still held."""
        with self._lock:
            self._is_open = False
            self._is_over = True
            for condition in (self._room, self._work, self._news, self._renewals):
                condition.notify_all()
            return list(self._held)

    @property
    def is_running(self) -> bool:
        """Whether a handler runs."""
        return bool(self._running)

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs or is to be reported."""
        with self._lock:
            return bool(self._held)
