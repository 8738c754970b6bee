from __future__ import annotations

import time
from collections import Counter
from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from lenso_jobs.worker import _ledger
from lenso_jobs.worker._lease import Holding, Terms
from lenso_jobs.worker._ledger import MOST_AT_ONCE, MOST_UNREPORTED, Ledger
from lenso_jobs.worker._outcome import DONE, HANDED_BACK

TERMS = Terms("jobs_email", None, None)


class Clock:
    """The time that a ledger believes it is."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_ledger, "monotonic", clock)
    return clock


def lease_until(now, seconds=30.0, *, is_last=False, terms=TERMS):
    """A lease that was given now."""
    lease = SimpleNamespace(attempt=3 if is_last else 1, max_attempts=3)
    holding = Holding(lease, terms, seconds)
    holding.count_from(now)
    return holding


@pytest.fixture
def lease(clock):
    def lease(seconds=30.0, *, is_last=False, terms=TERMS):
        return lease_until(clock.now, seconds, is_last=is_last, terms=terms)

    return lease


def collected(ledger):
    """What there is to collect now; a test is not to wait for it."""
    assert ledger._done or ledger._dropped
    return ledger.collect()


@pytest.fixture
def opened(lease, background):
    """A ledger that holds so many leases, of which so many run."""
    ledgers = []

    def opened(
        waiting=0,
        running=0,
        *,
        concurrency=2,
        batch=None,
        hands_back=True,
        seconds=30.0,
    ):
        ledger = Ledger(concurrency, batch or concurrency, hands_back=hands_back)
        ledgers.append(ledger)
        held = [lease(seconds) for _ in range(waiting + running)]
        if held:
            ledger.add(held)
        began = [ledger.take() for _ in range(running)]
        assert began == held[:running]
        return ledger, held

    yield opened
    for ledger in ledgers:
        ledger.finish()  # nobody waits for ever


@pytest.fixture
def waits(background):
    """Begin a call that must block; answers its future once it does."""

    def waits(condition, call, *arguments):
        future = background(call, *arguments)
        deadline = time.monotonic() + 20
        while not condition._waiters:
            assert not future.done(), future.result()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return future

    return waits


# What a holding is.


def test_a_holding_is_renewed_after_a_third_and_over_a_tenth_before_its_end(lease):
    holding = lease(6.0)

    assert (holding.ends_at, holding.renew_at) == (1006.0, 1002.0)
    assert not holding.is_over(1005.3)
    assert holding.is_over(1005.5)


def test_a_holding_is_over_no_more_than_a_second_before_its_end(lease):
    holding = lease(600.0)

    assert not holding.is_over(1598.9)
    assert holding.is_over(1599.0)


def test_a_margin_that_was_given_counts(lease):
    holding = lease(30.0, terms=Terms("jobs_email", None, 4.0))

    assert not holding.is_over(1025.9)
    assert holding.is_over(1026.0)


def test_what_is_lost_is_over_whatever_the_time(lease):
    holding = lease()
    holding.is_lost = True

    assert holding.is_over(1000.0)


def test_what_the_handler_ends_itself_is_over_by_no_clock(lease):
    holding = lease()
    holding.is_own = True

    assert not holding.is_over(inf)
    holding.is_lost = True
    assert holding.is_over(1000.0)


def test_a_renewal_counts_from_when_it_was_asked_for(lease):
    holding = lease(6.0)
    holding.extend(1004.0, 5.5)

    assert holding.ends_at == 1009.5


# How many are wanted.


@pytest.mark.parametrize(("running", "wanted"), [(0, 4), (1, 3), (3, 1), (4, 0)])
def test_as_many_are_wanted_as_there_are_free_hands(running, wanted, opened):
    ledger, _ = opened(0, running, concurrency=4)

    assert ledger.wanted() == wanted


@pytest.mark.parametrize("waiting", [1, 2, 3, 4])
def test_jobs_that_wait_for_a_hand_take_its_place(waiting, opened):
    ledger, _ = opened(waiting, 0, concurrency=4)

    assert ledger.wanted() == 4 - waiting


@pytest.mark.parametrize(
    ("waiting", "running", "wanted"),
    [
        (0, 0, 10),
        (8, 2, 0),
        (6, 2, 0),  # two free, less than half, and both hands are busy
        (4, 2, 0),
        (3, 2, 5),  # half
        (2, 2, 6),
        (8, 0, 0),  # enough wait for the hands
        (2, 0, 8),
        (1, 0, 9),
        (0, 1, 9),  # a hand has nothing to do
    ],
)
def test_a_batch_is_filled_by_halves_unless_a_hand_is_idle(
    waiting, running, wanted, opened
):
    ledger, _ = opened(waiting, running, concurrency=2, batch=10)

    assert ledger.wanted() == wanted


def test_one_idle_hand_is_enough_to_ask_for_a_job_or_two(opened):
    ledger, _ = opened(0, 9, concurrency=10, batch=12)

    assert ledger.wanted() == 3


def test_no_more_are_wanted_than_a_call_may_concern(opened):
    ledger, _ = opened(concurrency=1000, batch=1000)

    assert ledger.wanted() == MOST_AT_ONCE == 1000


def test_what_has_ended_takes_no_place_until_too_much_is_unreported(
    opened, lease, clock
):
    ledger, _ = opened(concurrency=1000)

    for _ in range(MOST_UNREPORTED // 1000 + 1):
        assert ledger.wanted() == 1000
        ledger.add([lease() for _ in range(1000)])
        while (holding := ledger.take()) is not None:
            ledger.end(holding, DONE)
    assert ledger.wanted() == 0

    done, _ = collected(ledger)
    ledger.forget(done)
    assert ledger.wanted() == 1000


def test_none_are_wanted_once_it_is_closed(opened):
    ledger, _ = opened()
    ledger.close()

    assert ledger.wanted() == 0
    assert not ledger.wait_for_room()


@pytest.mark.parametrize("way", ["close", "finish"])
def test_whoever_waits_for_room_is_told_that_there_will_be_none(way, opened, waits):
    ledger, _ = opened(0, 2)
    room = waits(ledger._room, ledger.wait_for_room)

    getattr(ledger, way)()

    assert room.result(20) is False


def test_the_end_of_a_run_makes_room(opened, waits):
    ledger, (first, _) = opened(0, 2)
    room = waits(ledger._room, ledger.wait_for_room)

    ledger.end(first, DONE)

    assert room.result(20) is True


def test_a_report_makes_room_where_too_much_was_unreported(opened, lease, waits):
    ledger, _ = opened(concurrency=1000)
    for _ in range(MOST_UNREPORTED // 1000 + 1):
        ledger.add([lease() for _ in range(1000)])
        while (holding := ledger.take()) is not None:
            ledger.end(holding, DONE)
    room = waits(ledger._room, ledger.wait_for_room)

    ledger.forget(collected(ledger)[0])

    assert room.result(20) is True


# What begins.


def test_jobs_begin_in_the_order_in_which_they_came(opened, clock):
    ledger, (first, second) = opened(2)

    assert [ledger.take(), ledger.take(), ledger.take()] == [first, second, None]
    assert first.began_at == clock.now


def test_a_lease_that_is_over_never_begins(opened, lease, clock):
    ledger, (stale,) = opened(1)
    clock.now += 20
    fresh = lease()
    ledger.add([fresh])
    clock.now += 9.5

    assert ledger.take() is fresh
    assert collected(ledger) == ([], [stale])
    assert stale.is_lost


def test_a_waiting_lease_that_the_server_does_not_know_never_begins(opened):
    ledger, (gone, other) = opened(2)

    assert not ledger.lose(gone)  # no handler runs that could be told
    assert ledger.take() is other
    assert collected(ledger) == ([], [gone])


def test_next_waits_for_a_job(opened, lease, waits):
    ledger, _ = opened()
    taken = waits(ledger._work, ledger.next)
    holding = lease()

    ledger.add([holding])

    assert taken.result(20) is holding


def test_every_hand_that_waits_gets_one_of_the_jobs_that_come(
    opened, lease, background, waits
):
    ledger, _ = opened(concurrency=3)
    taken = [waits(ledger._work, ledger.next)]
    taken += [background(ledger.next) for _ in range(2)]
    deadline = time.monotonic() + 20
    while len(ledger._work._waiters) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    holdings = [lease() for _ in range(3)]

    ledger.add(holdings)

    assert {each.result(20) for each in taken} == set(holdings)


def test_next_answers_nothing_once_it_is_over(opened, waits):
    ledger, _ = opened()
    taken = waits(ledger._work, ledger.next)

    ledger.finish()

    assert taken.result(20) is None


def test_next_notes_how_the_run_before_ended(opened, clock):
    ledger, (first, second) = opened(1, 1)
    clock.now += 2

    assert ledger.next(first, DONE) is second
    assert collected(ledger) == ([first], [])
    assert (first.verdict, first.seconds) == (DONE, 2)


# What has ended.


def test_a_run_that_ends_after_its_lease_is_lost(opened, clock):
    ledger, (holding,) = opened(0, 1)
    clock.now += 29.5

    ledger.end(holding, DONE)

    assert collected(ledger) == ([], [holding])
    assert holding.is_lost
    assert holding.verdict is None


def test_a_run_that_ended_its_job_itself_is_asked_about_whatever_the_time(
    opened, clock
):
    ledger, (holding,) = opened(0, 1)
    holding.is_own = True
    clock.now += 100

    ledger.end(holding, DONE)

    assert collected(ledger) == ([holding], [])


def test_no_more_is_reported_at_once_than_a_call_may_concern(opened):
    ledger, held = opened(0, 1001, concurrency=1001)
    for holding in held:
        ledger.end(holding, DONE)

    assert [len(collected(ledger)[0]) for _ in range(2)] == [1000, 1]


def test_collect_waits_for_the_end_of_a_run(opened, waits):
    ledger, (holding,) = opened(0, 1)
    news = waits(ledger._news, ledger.collect)

    ledger.end(holding, DONE)

    assert news.result(20) == ([holding], [])


def test_collect_answers_nothing_once_it_is_over(opened, waits):
    ledger, _ = opened(0, 1)
    news = waits(ledger._news, ledger.collect)

    ledger.finish()

    assert news.result(20) == ([], [])


def test_what_is_put_off_is_reported_again_later_each_time_and_never_dropped(
    opened, clock, monkeypatch
):
    ledger, (holding,) = opened(0, 1)
    ledger.end(holding, DONE)
    assert collected(ledger) == ([holding], [])
    clock.now += 40  # its lease has ended
    monkeypatch.setattr(ledger._news, "wait", clock.sleep)

    pauses = []
    for _ in range(8):
        before = clock.now
        ledger.put_off([holding])
        assert ledger.has_work
        assert ledger.collect() == ([holding], [])
        pauses.append(clock.now - before)

    expected = [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    assert pauses == pytest.approx(expected)


def test_each_job_that_is_put_off_has_a_patience_of_its_own(opened, clock, monkeypatch):
    ledger, (first, second) = opened(0, 2)
    for holding in (first, second):
        ledger.end(holding, DONE)
    collected(ledger)
    monkeypatch.setattr(ledger._news, "wait", clock.sleep)
    ledger.put_off([first])
    ledger.collect()
    before = clock.now

    ledger.put_off([first, second])

    assert ledger.collect() == ([second], [])
    assert clock.now - before == pytest.approx(0.02)
    assert ledger.collect() == ([first], [])
    assert clock.now - before == pytest.approx(0.04)


def test_what_is_put_off_holds_up_nothing_else(opened, waits):
    ledger, (first, second) = opened(0, 2)
    ledger.end(first, DONE)
    collected(ledger)
    ledger.put_off([first])
    news = waits(ledger._news, ledger.collect)

    ledger.end(second, DONE)

    assert news.result(20) == ([second], [])


def test_work_is_over_when_the_server_has_answered_on_everything(opened):
    ledger, (holding,) = opened(0, 1)
    assert ledger.has_work

    ledger.end(holding, DONE)
    done, _ = collected(ledger)
    assert ledger.has_work

    ledger.forget(done)
    assert not ledger.has_work


# Renewals.


def test_the_leases_that_end_first_are_renewed_first(opened, lease, clock):
    ledger, (first,) = opened(1, seconds=30)
    second, third = lease(27), lease(33)
    ledger.add([third])
    ledger.add([second])
    clock.now += 12

    assert ledger.wait_for_renewals() == [second, first, third]


def test_leases_that_are_due_soon_go_along(opened, lease, clock):
    ledger, (first,) = opened(1)
    clock.now += 2
    second = lease()
    ledger.add([second])
    clock.now += 4
    third = lease()
    ledger.add([third])
    clock.now += 4

    # Due since now, in 2 s of the 20 that would be left, and in 6.
    assert ledger.wait_for_renewals() == [first, second]


def test_what_ended_is_renewed_until_the_server_has_answered(opened, clock):
    ledger, (holding,) = opened(0, 1)
    ledger.end(holding, DONE)
    collected(ledger)
    clock.now += 10

    assert ledger.wait_for_renewals() == [holding]


def test_what_is_lost_is_not_renewed(opened, clock):
    ledger, (lost, kept) = opened(0, 2)
    ledger.lose(lost)
    clock.now += 10

    assert ledger.wait_for_renewals() == [kept]


def test_no_more_are_renewed_at_once_than_a_call_may_concern(opened, lease, clock):
    ledger, held = opened(1000, concurrency=1000)
    for _ in held:
        ledger.end(ledger.take(), DONE)
    ledger.add([lease(40) for _ in range(3)])
    clock.now += 20

    assert set(ledger.wait_for_renewals()) == set(held)


@pytest.mark.parametrize("longest", [None, 3600.0])
def test_a_new_lease_that_is_due_sooner_wakes_whoever_waits_to_renew(
    longest, opened, lease, waits
):
    ledger, _ = opened(0 if longest is None else 1, seconds=longest, concurrency=2)
    due = waits(ledger._renewals, ledger.wait_for_renewals)
    holding = lease(0.0)

    ledger.add([holding])

    assert due.result(20) == [holding]


def test_nothing_is_renewed_once_it_is_over(opened, waits):
    ledger, _ = opened(0, 1)
    due = waits(ledger._renewals, ledger.wait_for_renewals)

    ledger.finish()

    assert due.result(20) == []


# Lost leases.


def test_lapse_answers_each_running_lease_that_is_over_once(opened, lease, clock):
    ledger, (running, waiting) = opened(1, 1)
    clock.now += 15
    young = lease()
    ledger.add([young])
    assert ledger.lapse() == []
    clock.now += 14.5

    assert ledger.lapse() == [running]
    assert ledger.lapse() == []
    assert collected(ledger) == ([], [waiting])
    assert ledger.take() is young


def test_lapse_passes_by_what_the_handler_ends_itself(opened, clock):
    ledger, (holding,) = opened(0, 1)
    holding.is_own = True
    clock.now += 100

    assert ledger.lapse() == []


def test_a_lost_lease_is_news_once(opened):
    ledger, (holding,) = opened(0, 1)

    assert ledger.lose(holding)
    assert not ledger.lose(holding)
    assert ledger.lapse() == []


def test_the_end_of_a_run_under_a_lost_lease_is_not_reported(opened):
    ledger, (holding,) = opened(0, 1)
    ledger.lose(holding)

    ledger.end(holding, DONE)

    assert collected(ledger) == ([], [holding])


@pytest.mark.parametrize("where", ["own", "done"])
def test_a_lease_that_the_server_forgot_may_have_ended_well(where, opened):
    ledger, (holding,) = opened(0, 1)
    if where == "own":
        holding.is_own = True
    else:
        ledger.end(holding, DONE)

    assert not ledger.lose(holding)
    assert not holding.is_lost


# Closing.


def test_close_hands_back_what_waits_but_for_last_attempts(opened, lease):
    ledger, (running, waiting) = opened(1, 1, concurrency=2, batch=10)
    last = lease(is_last=True)
    ledger.add([last])

    ledger.close()

    assert collected(ledger) == ([waiting], [])
    assert waiting.verdict is HANDED_BACK
    assert running.verdict is None
    assert ledger.take() is last


def test_close_lets_what_waits_lapse_where_it_is_so_configured(opened):
    ledger, (_, waiting) = opened(1, 1, hands_back=False)

    ledger.close()

    assert collected(ledger) == ([], [waiting])
    assert waiting.verdict is None


def test_what_a_late_claim_brings_is_handed_back_at_once(opened, lease):
    ledger, _ = opened()
    ledger.close()
    late, last = lease(), lease(is_last=True)

    ledger.add([late, last])

    assert collected(ledger) == ([late], [])
    assert ledger.take() is last


def test_a_lost_lease_that_waits_is_not_handed_back(opened):
    ledger, (waiting,) = opened(1)
    ledger.lose(waiting)

    ledger.close()

    assert collected(ledger) == ([], [waiting])
    assert waiting.verdict is None


@pytest.mark.parametrize("hands_back", [True, False])
def test_abandon_gives_up_what_runs_and_what_waits(hands_back, opened, lease):
    ledger, (running,) = opened(0, 1, hands_back=hands_back)
    last = lease(is_last=True)
    ledger.add([last])
    ledger.close()

    assert ledger.abandon_waiting() == [running]
    assert ledger.is_running
    ledger.abandon_running()
    assert not ledger.is_running

    assert collected(ledger) == (
        ([last, running], []) if hands_back else ([], [last, running])
    )
    assert ledger.take() is None
    assert running.is_lost  # so that its handler can see it


def test_a_run_that_ends_after_it_was_abandoned_changes_nothing(opened):
    ledger, (running,) = opened(0, 1)
    ledger.close()
    ledger.abandon_waiting()
    ledger.abandon_running()

    ledger.end(running, DONE)

    assert collected(ledger) == ([running], [])
    assert running.verdict is HANDED_BACK


def test_finish_answers_what_the_server_has_not_answered_on(opened):
    ledger, (running, waiting) = opened(1, 1)

    assert set(ledger.finish()) == {running, waiting}


# Whatever happens, in whatever order.


class Books(RuleBasedStateMachine):
    """A ledger, and where each of its leases must be."""

    @initialize(
        concurrency=st.integers(1, 3), more=st.integers(0, 4), hands_back=st.booleans()
    )
    def open(self, concurrency, more, hands_back):
        self.clock = Clock()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(_ledger, "monotonic", self.clock)
        self.concurrency, self.batch = concurrency, concurrency + more
        self.hands_back = hands_back
        self.ledger = Ledger(concurrency, self.batch, hands_back=hands_back)
        self.is_open = True
        self.added = []
        self.running = []
        self.was_abandoned = []
        self.unanswered = []
        self.not_before = {}
        self.left = Counter()

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0]))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule(
        data=st.data(),
        is_last=st.booleans(),
        late=st.integers(0, 2),
        seconds=st.sampled_from([10.0, 20.0]),
    )
    def claim(self, data, is_last, late, seconds):
        wanted = self.ledger.wanted()
        # A claim on its way when the ledger was closed comes back after that.
        most = wanted if self.is_open else late
        if most:
            leases = [
                lease_until(self.clock.now, seconds, is_last=is_last)
                for _ in range(data.draw(st.integers(1, most)))
            ]
            self.added += leases
            self.ledger.add(leases)

    @precondition(lambda self: len(self.running) < self.concurrency)
    @rule()
    def take(self):
        holding = self.ledger.take()
        if holding is not None:
            assert self.clock.now < holding.safe_until
            assert not holding.is_lost
            assert holding not in self.running
            self.running.append(holding)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        holding = data.draw(st.sampled_from(self.running))
        self.running.remove(holding)
        self.ledger.end(holding, DONE)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def complete_in_a_transaction(self, data):
        data.draw(st.sampled_from(self.running)).is_own = True

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def renew(self, data):
        holding = data.draw(st.sampled_from(self.added))
        if not holding.is_lost and not self.left[holding]:
            holding.extend(self.clock.now, 10.0)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def lose(self, data):
        holding = data.draw(st.sampled_from(self.added))
        if not self.left[holding]:
            is_news = self.ledger.lose(holding)
            assert not is_news or holding in self.running

    @rule()
    def lapse(self):
        lapsed = self.ledger.lapse()
        assert set(lapsed) <= set(self.running)

    def has_news(self):
        due = any(at <= self.clock.now for at, _ in self.ledger._put_off)
        return due or self.ledger._done or self.ledger._dropped

    @precondition(has_news)
    @rule()
    def collect(self):
        done, dropped = self.ledger.collect()
        for holding in done:
            assert holding.verdict in (DONE, HANDED_BACK)
            assert holding not in self.running
            assert self.hands_back or holding.verdict is DONE
            assert self.clock.now >= self.not_before.get(holding, 0)
        for holding in dropped:
            assert holding.is_lost
        self.unanswered += done
        self.ledger.forget(dropped)
        self.left.update(dropped)

    @precondition(lambda self: self.unanswered)
    @rule(count=st.integers(1, 5))
    def answer(self, count):
        answered, self.unanswered = self.unanswered[:count], self.unanswered[count:]
        self.ledger.forget(answered)
        self.left.update(answered)

    @precondition(lambda self: self.unanswered)
    @rule()
    def put_off(self):
        self.ledger.put_off(self.unanswered)
        for holding in self.unanswered:
            assert holding.patience <= 0.5
            self.not_before[holding] = self.clock.now + holding.patience
        self.unanswered = []

    @rule()
    def close(self):
        self.ledger.close()
        self.is_open = False

    @precondition(lambda self: not self.is_open)
    @rule()
    def abandon(self):
        assert set(self.ledger.abandon_waiting()) == set(self.running)
        self.ledger.abandon_running()
        self.was_abandoned += self.running
        self.running = []
        assert self.ledger.take() is None

    @precondition(lambda self: self.was_abandoned)
    @rule()
    def end_what_was_abandoned(self):
        self.ledger.end(self.was_abandoned.pop(), DONE)

    @invariant()
    def no_lease_is_lost_sight_of(self):
        if hasattr(self, "ledger"):
            held = [h for h in self.added if not self.left[h]]
            assert self.ledger._held == set(held)
            assert self.ledger.has_work == bool(held)

    @invariant()
    def no_more_are_wanted_than_there_is_room_for(self):
        if hasattr(self, "ledger"):
            waiting = len(self.ledger._waiting)
            wanted = self.ledger.wanted()
            assert wanted >= 0
            if self.is_open:
                assert wanted + waiting + len(self.running) <= self.batch
                # No hand is idle for want of asking.
                assert wanted or len(self.running) + waiting >= self.concurrency
            else:
                assert not wanted

    def teardown(self):
        if not hasattr(self, "ledger"):
            return
        self.close()
        self.ledger.abandon_waiting()
        self.ledger.abandon_running()
        self.answer_all()
        assert self.left == Counter(self.added)
        assert self.ledger.finish() == []
        assert self.ledger.collect() == ([], [])
        self.patch.undo()

    def answer_all(self):
        self.clock.now += 0.5  # the longest that anything is put off
        self.running = []
        while self.has_news():
            self.collect()
        assert self.ledger._put_off == []
        self.ledger.forget(self.unanswered)
        self.left.update(self.unanswered)


Books.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
test_every_lease_that_was_added_leaves_exactly_once = Books.TestCase
