from __future__ import annotations

import time
from collections import Counter
from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from lenso_jobs.worker import _held
from lenso_jobs.worker._held import MOST_AT_ONCE, MOST_UNREPORTED, HeldJobs
from lenso_jobs.worker._lease import LeaseState
from lenso_jobs.worker._outcome import DONE, HANDED_BACK, RELEASED, TIMED_OUT


class Clock:
    """The time that a jobs believes it is."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_held, "monotonic", clock)
    return clock


def lease_until(now, seconds=30.0, queue="email"):
    """The state of a lease that was given now."""
    state = LeaseState(SimpleNamespace(queue=queue))
    state.extend(now, seconds)
    return state


@pytest.fixture
def lease(clock):
    def lease(seconds=30.0, queue="email"):
        return lease_until(clock.now, seconds, queue)

    return lease


def collected(jobs):
    """The jobs to report now, and those whose leases are lost; a test does not wait."""
    assert jobs._ended
    return parted(jobs.collect())


def parted(ended):
    lost = [state for state in ended if state.verdict is None]
    return [state for state in ended if state not in lost], lost


@pytest.fixture
def opened(lease, background):
    """A jobs that holds so many leases, of which so many run."""
    made = []

    def opened(
        waiting=0,
        running=0,
        *,
        concurrency=2,
        batch=None,
        hands_back=True,
        seconds=30.0,
    ):
        jobs = HeldJobs({"email": concurrency}, batch, hands_back=hands_back)
        made.append(jobs)
        held = [lease(seconds) for _ in range(waiting + running)]
        if held:
            jobs.add(held)
        began = [jobs.take("email") for _ in range(running)]
        assert began == held[:running]
        return jobs, held

    yield opened
    for jobs in made:
        jobs.finish()  # so that no thread waits for ever


@pytest.fixture
def waits(background):
    """Begin a call that must block; return its future once it does."""

    def waits(condition, call, *arguments):
        future = background(call, *arguments)
        deadline = time.monotonic() + 20
        while not condition._waiters:
            assert not future.done(), future.result()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return future

    return waits


# The state of a lease.


def test_a_lease_is_renewed_after_a_third_and_lost_a_tenth_before_its_end(lease):
    state = lease(6.0)

    assert (state.ends_at, state.renew_at) == (1006.0, 1002.0)
    assert not state.is_over(1005.3)
    assert state.is_over(1005.5)


def test_a_lease_counts_as_lost_at_most_a_second_before_its_end(lease):
    state = lease(600.0)

    assert not state.is_over(1598.9)
    assert state.is_over(1599.0)


def test_a_lost_lease_is_over_before_its_end(lease):
    state = lease()
    state.is_lost = True

    assert state.is_over(1000.0)


def test_a_job_that_its_handler_completes_is_not_over_by_the_clock(lease):
    state = lease()
    state.completes_itself = True

    assert not state.is_over(inf)
    state.is_lost = True
    assert state.is_over(1000.0)


def test_a_renewal_counts_from_before_its_call(lease):
    state = lease(6.0)
    state.extend(1004.0, 5.5)

    assert state.ends_at == 1009.5


# How many are wanted.


@pytest.mark.parametrize(("running", "wanted"), [(0, 4), (1, 3), (3, 1), (4, 0)])
def test_as_many_jobs_are_wanted_as_handlers_are_free(running, wanted, opened):
    jobs, _ = opened(0, running, concurrency=4)

    assert jobs.wanted().get("email", 0) == wanted


@pytest.mark.parametrize("waiting", [1, 2, 3, 4])
def test_a_waiting_job_takes_the_place_of_a_free_handler(waiting, opened):
    jobs, _ = opened(waiting, 0, concurrency=4)

    assert jobs.wanted().get("email", 0) == 4 - waiting


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
def test_a_batch_is_filled_by_halves_unless_a_handler_is_idle(
    waiting, running, wanted, opened
):
    jobs, _ = opened(waiting, running, concurrency=2, batch=10)

    assert jobs.wanted().get("email", 0) == wanted


@pytest.mark.parametrize(
    ("batch", "waiting", "wanted"),
    [(500, 0, 250), (500, 250, 250), (499, 0, 250), (150, 0, 100), (80, 0, 80)],
)
def test_a_large_batch_is_claimed_in_two_halves(batch, waiting, wanted, opened):
    jobs, _ = opened(waiting, batch=batch)

    assert jobs.wanted().get("email", 0) == wanted


def test_as_many_as_could_begin_are_claimed_at_once(opened):
    jobs, _ = opened(concurrency=400, batch=500)

    assert jobs.wanted().get("email", 0) == 400


@pytest.fixture
def two_queues(lease):
    """Jobs of two queues, one of which is full, and how often they rang."""
    jobs, rings = HeldJobs({"email": 1, "slow": 2}, hands_back=True), []
    jobs.ring = lambda: rings.append(jobs)
    state = lease()
    jobs.add([state])
    return jobs, jobs.take("email"), rings


def test_each_queue_has_its_own_concurrency_and_its_own_jobs(two_queues, lease):
    jobs, _, _ = two_queues
    other = lease(queue="slow")
    jobs.add([other])

    assert jobs.wanted() == {"slow": 1}
    assert (jobs.waiting("email"), jobs.waiting("slow")) == (0, 1)
    assert jobs.take("email") is None
    assert jobs.take("slow") is other


def test_room_in_a_queue_that_had_none_rings_once(two_queues, lease):
    jobs, first, rings = two_queues
    assert jobs.wanted() == {"slow": 2}

    jobs.end(first, DONE)

    assert len(rings) == 1
    jobs.forget([first])
    assert len(rings) == 1
    assert jobs.wanted() == {"email": 1, "slow": 2}


def test_room_does_not_ring_while_no_queue_is_waited_for(two_queues, lease):
    jobs, first, rings = two_queues
    jobs.add([lease(queue="slow"), lease(queue="slow")])
    assert jobs.wanted() == {}

    jobs.end(first, DONE)

    assert rings == []


def test_one_idle_handler_is_enough_to_claim(opened):
    jobs, _ = opened(0, 9, concurrency=10, batch=12)

    assert jobs.wanted().get("email", 0) == 3


def test_at_most_1000_jobs_are_wanted_at_once(opened):
    jobs, _ = opened(concurrency=1000, batch=1000)

    assert jobs.wanted().get("email", 0) == MOST_AT_ONCE == 1000


def test_ended_jobs_take_no_place_until_too_many_are_unreported(opened, lease, clock):
    jobs, _ = opened(concurrency=1000)

    for _ in range(MOST_UNREPORTED // 1000 + 1):
        assert jobs.wanted().get("email", 0) == 1000
        jobs.add([lease() for _ in range(1000)])
        while (state := jobs.take("email")) is not None:
            jobs.end(state, DONE)
    assert jobs.wanted().get("email", 0) == 0

    done, _ = collected(jobs)
    jobs.forget(done)
    assert jobs.wanted().get("email", 0) == 1000


def test_no_jobs_are_wanted_after_close(opened):
    jobs, _ = opened()
    jobs.close()

    assert jobs.wanted().get("email", 0) == 0
    assert not jobs.wait_for_room()


@pytest.mark.parametrize("way", ["close", "finish"])
def test_a_wait_for_room_returns_false_at_the_end(way, opened, waits):
    jobs, _ = opened(0, 2)
    room = waits(jobs._room, jobs.wait_for_room)

    getattr(jobs, way)()

    assert room.result(20) is False


def test_the_end_of_a_run_makes_room(opened, waits):
    jobs, (first, _) = opened(0, 2)
    room = waits(jobs._room, jobs.wait_for_room)

    jobs.end(first, DONE)

    assert room.result(20) is True


def test_a_report_makes_room_if_too_many_jobs_were_unreported(opened, lease, waits):
    jobs, _ = opened(concurrency=1000)
    for _ in range(MOST_UNREPORTED // 1000 + 1):
        jobs.add([lease() for _ in range(1000)])
        while (state := jobs.take("email")) is not None:
            jobs.end(state, DONE)
    room = waits(jobs._room, jobs.wait_for_room)

    jobs.forget(collected(jobs)[0])

    assert room.result(20) is True


# What begins.


def test_jobs_begin_in_the_order_in_which_they_came(opened, clock):
    jobs, (first, second) = opened(2)

    assert [jobs.take("email"), jobs.take("email"), jobs.take("email")] == [
        first,
        second,
        None,
    ]
    assert first.began_at == clock.now


def test_a_lease_that_is_over_never_begins(opened, lease, clock):
    jobs, (stale,) = opened(1)
    clock.now += 20
    fresh = lease()
    jobs.add([fresh])
    clock.now += 9.5

    assert jobs.take("email") is fresh
    assert collected(jobs) == ([stale], [])
    assert stale.verdict is RELEASED
    assert stale.is_lost


def test_a_waiting_job_whose_lease_was_refused_never_begins(opened):
    jobs, (gone, other) = opened(2)

    assert not jobs.lose(gone)  # no handler runs
    assert jobs.take("email") is other
    assert collected(jobs) == ([], [gone])


def test_next_waits_for_a_job(opened, lease, waits):
    jobs, _ = opened()
    taken = waits(jobs._queues["email"].work, jobs.next, "email")
    state = lease()

    jobs.add([state])

    assert taken.result(20) is state


def test_each_waiting_thread_gets_one_of_the_added_jobs(
    opened, lease, background, waits
):
    jobs, _ = opened(concurrency=3)
    taken = [waits(jobs._queues["email"].work, jobs.next, "email")]
    taken += [background(jobs.next, "email") for _ in range(2)]
    deadline = time.monotonic() + 20
    while len(jobs._queues["email"].work._waiters) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    states = [lease() for _ in range(3)]

    jobs.add(states)

    assert {each.result(20) for each in taken} == set(states)


def test_next_returns_none_at_the_end(opened, waits):
    jobs, _ = opened()
    taken = waits(jobs._queues["email"].work, jobs.next, "email")

    jobs.finish()

    assert taken.result(20) is None


def test_next_notes_how_the_run_before_ended(opened, clock):
    jobs, (first, second) = opened(1, 1)
    clock.now += 2

    assert jobs.next("email", first, DONE) is second
    assert collected(jobs) == ([first], [])
    assert (first.verdict, first.seconds) == (DONE, 2)


# What has ended.


def test_a_run_that_ends_after_its_lease_is_lost(opened, clock):
    jobs, (state,) = opened(0, 1)
    clock.now += 29.5

    jobs.end(state, DONE)

    assert collected(jobs) == ([], [state])
    assert state.is_lost
    assert state.verdict is None


def test_a_job_that_its_handler_completed_is_reported_after_its_lease(opened, clock):
    jobs, (state,) = opened(0, 1)
    state.completes_itself = True
    clock.now += 100

    jobs.end(state, DONE)

    assert collected(jobs) == ([state], [])


def test_at_most_1000_jobs_are_reported_at_once(opened):
    jobs, held = opened(0, 1001, concurrency=1001)
    for state in held:
        jobs.end(state, DONE)

    assert [len(collected(jobs)[0]) for _ in range(2)] == [1000, 1]


def test_collect_waits_for_the_end_of_a_run(opened, waits):
    jobs, (state,) = opened(0, 1)
    news = waits(jobs._news, jobs.collect)

    jobs.end(state, DONE)

    assert news.result(20) == [state]


def test_collect_returns_nothing_at_the_end(opened, waits):
    jobs, _ = opened(0, 1)
    news = waits(jobs._news, jobs.collect)

    jobs.finish()

    assert news.result(20) == []


def test_a_job_that_is_put_off_is_reported_again_later_each_time_and_never_dropped(
    opened, clock, monkeypatch
):
    jobs, (state,) = opened(0, 1)
    jobs.end(state, DONE)
    assert collected(jobs) == ([state], [])
    clock.now += 40  # its lease has ended
    monkeypatch.setattr(jobs._news, "wait", clock.sleep)

    pauses = []
    for _ in range(8):
        before = clock.now
        jobs.put_off([state])
        assert jobs.has_work
        assert jobs.collect() == [state]
        pauses.append(clock.now - before)

    expected = [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    assert pauses == pytest.approx(expected)


def test_jobs_that_are_put_off_wait_independently(opened, clock, monkeypatch):
    jobs, (first, second) = opened(0, 2)
    for state in (first, second):
        jobs.end(state, DONE)
    collected(jobs)
    monkeypatch.setattr(jobs._news, "wait", clock.sleep)
    jobs.put_off([first])
    jobs.collect()
    before = clock.now

    jobs.put_off([first, second])

    assert jobs.collect() == [second]
    assert clock.now - before == pytest.approx(0.02)
    assert jobs.collect() == [first]
    assert clock.now - before == pytest.approx(0.04)


def test_a_job_that_is_put_off_delays_no_other(opened, waits):
    jobs, (first, second) = opened(0, 2)
    jobs.end(first, DONE)
    collected(jobs)
    jobs.put_off([first])
    news = waits(jobs._news, jobs.collect)

    jobs.end(second, DONE)

    assert news.result(20) == [second]


def test_work_is_over_once_every_outcome_is_confirmed(opened):
    jobs, (state,) = opened(0, 1)
    assert jobs.has_work

    jobs.end(state, DONE)
    done, _ = collected(jobs)
    assert jobs.has_work

    jobs.forget(done)
    assert not jobs.has_work


# Renewals.


def test_the_leases_that_end_first_are_renewed_first(opened, lease, clock):
    jobs, (first,) = opened(1, seconds=30)
    second, third = lease(27), lease(33)
    jobs.add([third])
    jobs.add([second])
    clock.now += 12

    assert jobs.wait_for_renewals() == [second, first, third]


def test_leases_that_are_due_soon_are_renewed_with_the_due_ones(opened, lease, clock):
    jobs, (first,) = opened(1)
    clock.now += 2
    second = lease()
    jobs.add([second])
    clock.now += 4
    third = lease()
    jobs.add([third])
    clock.now += 4

    # Due since now, in 2 s of the 20 that would be left, and in 6.
    assert jobs.wait_for_renewals() == [first, second]


def test_an_ended_job_s_lease_is_renewed_until_its_outcome_is_confirmed(opened, clock):
    jobs, (state,) = opened(0, 1)
    jobs.end(state, DONE)
    collected(jobs)
    clock.now += 10

    assert jobs.wait_for_renewals() == [state]


def test_a_lost_lease_is_not_renewed(opened, clock):
    jobs, (lost, kept) = opened(0, 2)
    jobs.lose(lost)
    clock.now += 10

    assert jobs.wait_for_renewals() == [kept]


def test_at_most_1000_leases_are_renewed_at_once(opened, lease, clock):
    jobs, held = opened(1000, concurrency=1000)
    for _ in held:
        jobs.end(jobs.take("email"), DONE)
    jobs.add([lease(40) for _ in range(3)])
    clock.now += 20

    assert set(jobs.wait_for_renewals()) == set(held)


@pytest.mark.parametrize("longest", [None, 3600.0])
def test_a_new_lease_that_is_due_sooner_wakes_the_renewals(
    longest, opened, lease, waits
):
    jobs, _ = opened(0 if longest is None else 1, seconds=longest, concurrency=2)
    due = waits(jobs._renewals, jobs.wait_for_renewals)
    state = lease(0.0)

    jobs.add([state])

    assert due.result(20) == [state]


def test_nothing_is_renewed_at_the_end(opened, waits):
    jobs, _ = opened(0, 1)
    due = waits(jobs._renewals, jobs.wait_for_renewals)

    jobs.finish()

    assert due.result(20) == []


# Lost leases.


def test_a_handler_that_runs_too_long_is_named_once_and_then_given_up(opened, clock):
    jobs, (first, _) = opened(1, 1, concurrency=1, batch=2, seconds=600.0)

    clock.sleep(9.9)
    assert jobs.time_out(10.0, patience=1.0) == []
    clock.sleep(0.1)
    assert jobs.time_out(10.0, patience=1.0) == [first]
    assert jobs.running == [first]
    clock.sleep(1.0)
    assert jobs.time_out(10.0, patience=1.0) == []

    assert collected(jobs) == ([first], [])
    assert (first.verdict, first.seconds, first.is_lost) == (TIMED_OUT, 11.0, True)
    assert jobs.running == []


def test_the_place_of_a_handler_that_was_given_up_is_free_once_it_ends(opened, clock):
    jobs, (state,) = opened(0, 1, concurrency=1, seconds=600.0)
    clock.sleep(10.0)
    jobs.time_out(10.0, patience=0.0)
    jobs.forget(collected(jobs)[0])

    assert not jobs.has_work
    assert jobs.is_stuck
    assert jobs.wanted() == {}
    jobs.end(state, DONE)
    assert not jobs.is_stuck
    assert jobs.wanted() == {"email": 1}
    assert not jobs._ended


def test_a_handler_that_was_given_up_is_not_handed_back_as_well(opened, clock):
    jobs, (state,) = opened(0, 1, seconds=600.0)
    clock.sleep(10.0)
    jobs.time_out(10.0, patience=0.0)

    jobs.abandon()

    assert collected(jobs) == ([state], [])
    assert state.verdict is TIMED_OUT


def test_a_lost_job_is_named_at_its_timeout_and_not_reported(opened, clock):
    jobs, (state,) = opened(0, 1, seconds=600.0)
    jobs.lose(state)
    clock.sleep(10.0)

    assert jobs.time_out(10.0, patience=0.0) == [state]
    assert not jobs._ended


def test_lapse_returns_each_running_job_whose_lease_is_over_once(opened, lease, clock):
    jobs, (running, waiting) = opened(1, 1)
    clock.now += 15
    young = lease()
    jobs.add([young])
    assert jobs.lapse() == []
    clock.now += 14.5

    assert jobs.lapse() == [running]
    assert jobs.lapse() == []
    assert collected(jobs) == ([waiting], [])
    assert waiting.verdict is RELEASED
    assert jobs.take("email") is young


def test_lapse_skips_a_job_that_its_handler_completes(opened, clock):
    jobs, (state,) = opened(0, 1)
    state.completes_itself = True
    clock.now += 100

    assert jobs.lapse() == []


def test_a_refused_lease_is_noted_once(opened):
    jobs, (state,) = opened(0, 1)

    assert jobs.lose(state)
    assert not jobs.lose(state)
    assert jobs.lapse() == []


def test_a_run_that_ends_under_a_refused_lease_is_lost(opened):
    jobs, (state,) = opened(0, 1)
    jobs.lose(state)

    jobs.end(state, DONE)

    assert collected(jobs) == ([], [state])


@pytest.mark.parametrize("where", ["own", "done"])
def test_a_refused_lease_of_a_job_that_may_have_ended_is_not_lost(where, opened):
    jobs, (state,) = opened(0, 1)
    if where == "own":
        state.completes_itself = True
    else:
        jobs.end(state, DONE)

    assert not jobs.lose(state)
    assert not state.is_lost


# Stops.


def test_close_releases_every_job_that_was_not_begun(opened):
    jobs, (running, waiting) = opened(1, 1, concurrency=2, batch=10)

    jobs.close()

    assert collected(jobs) == ([waiting], [])
    assert waiting.verdict is RELEASED
    assert waiting.is_lost
    assert running.verdict is None
    assert jobs.running == [running]


@pytest.mark.parametrize("hands_back", [True, False])
def test_jobs_that_a_late_claim_brings_are_released(hands_back, opened, lease):
    jobs, _ = opened(hands_back=hands_back)
    jobs.close()
    late = [lease(), lease()]

    jobs.add(late)

    assert collected(jobs) == (late, [])
    assert {state.verdict for state in late} == {RELEASED}
    assert jobs.take("email") is None


def test_a_stop_lets_no_job_begin_and_needs_no_lock(opened):
    jobs, (waiting,) = opened(1)

    with jobs._lock:
        jobs.stop()

    assert jobs.take("email") is None
    assert (jobs.wanted().get("email", 0), jobs.waiting("email")) == (0, 0)
    jobs.close()
    assert collected(jobs) == ([waiting], [])
    assert waiting.verdict is RELEASED


def test_a_waiting_job_whose_lease_was_refused_is_not_released(opened):
    jobs, (waiting,) = opened(1)
    jobs.lose(waiting)

    jobs.close()

    assert collected(jobs) == ([], [waiting])


@pytest.mark.parametrize("hands_back", [True, False])
def test_a_running_job_that_is_given_up_is_handed_back_or_left(hands_back, opened):
    jobs, (running, waiting) = opened(1, 1, hands_back=hands_back)
    jobs.close()

    jobs.abandon()

    assert jobs.running == []
    handed_back, left = collected(jobs)
    assert handed_back == ([waiting, running] if hands_back else [waiting])
    assert left == ([] if hands_back else [running])
    assert waiting.verdict is RELEASED
    assert running.verdict is (HANDED_BACK if hands_back else None)
    assert running.is_lost  # so that its handler can see it


@pytest.mark.parametrize("hands_back", [True, False])
def test_a_job_of_which_nothing_was_run_is_released_as_it_ends(hands_back, opened):
    jobs, (running,) = opened(0, 1, hands_back=hands_back)

    jobs.end(running, RELEASED)

    assert collected(jobs) == ([running], [])
    assert running.verdict is RELEASED


def test_a_run_that_ends_after_it_was_abandoned_changes_nothing(opened):
    jobs, (running,) = opened(0, 1)
    jobs.close()
    jobs.abandon()

    jobs.end(running, DONE)

    assert collected(jobs) == ([running], [])
    assert running.verdict is HANDED_BACK


def test_finish_returns_the_jobs_that_the_server_has_not_confirmed(opened):
    jobs, (running, waiting) = opened(1, 1)

    assert set(jobs.finish()) == {running, waiting}


# Idle.


def test_a_wait_for_no_job_ends_when_the_last_one_was_reported(opened, waits):
    jobs, (state,) = opened(0, 1, concurrency=1)
    empty = waits(jobs._room, jobs.wait_until_empty, 20)

    jobs.end(state, DONE)
    jobs.forget(collected(jobs)[0])

    assert empty.result(20) is None
    assert not jobs.has_work


@pytest.mark.parametrize("way", ["close", "finish"])
def test_a_wait_for_no_job_ends_with_the_worker(way, opened, waits):
    jobs, _ = opened(0, 1, concurrency=1)
    empty = waits(jobs._room, jobs.wait_until_empty, 20)

    getattr(jobs, way)()

    assert empty.result(20) is None


# Any events, in any order.


class Histories(RuleBasedStateMachine):
    """The jobs of a worker, and where each must be."""

    @initialize(
        concurrency=st.integers(1, 3), more=st.integers(0, 4), hands_back=st.booleans()
    )
    def open(self, concurrency, more, hands_back):
        self.clock = Clock()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(_held, "monotonic", self.clock)
        self.concurrency, self.batch = concurrency, concurrency + more
        self.hands_back = hands_back
        self.jobs = HeldJobs({"email": concurrency}, self.batch, hands_back=hands_back)
        self.is_open = True
        self.added = []
        self.running = []
        self.stuck = []  # their handlers run, and they were given up
        self.was_abandoned = []
        self.unanswered = []
        self.not_before = {}
        self.left = Counter()

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0]))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule(
        data=st.data(),
        late=st.integers(0, 2),
        seconds=st.sampled_from([10.0, 20.0]),
    )
    def claim(self, data, late, seconds):
        wanted = self.jobs.wanted().get("email", 0)
        # A claim on its way when the jobs was closed comes back after that.
        most = wanted if self.is_open else late
        if most:
            leases = [
                lease_until(self.clock.now, seconds)
                for _ in range(data.draw(st.integers(1, most)))
            ]
            self.added += leases
            self.jobs.add(leases)

    @precondition(lambda self: len(self.running + self.stuck) < self.concurrency)
    @rule()
    def take(self):
        state = self.jobs.take("email")
        if state is not None:
            assert self.clock.now < state.safe_until
            assert not state.is_lost
            assert state not in self.running
            self.running.append(state)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        state = data.draw(st.sampled_from(self.running))
        self.running.remove(state)
        self.jobs.end(state, DONE)

    @rule(timeout=st.sampled_from([3.0, 12.0]))
    def time_out(self, timeout):
        late = self.jobs.time_out(timeout, patience=1.0)
        assert set(late) <= set(self.running)
        self.stuck += [state for state in self.running if state.is_ended]
        self.running = [state for state in self.running if not state.is_ended]

    @precondition(lambda self: self.stuck)
    @rule()
    def end_what_was_stuck(self):
        self.jobs.end(self.stuck.pop(), DONE)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def complete_in_a_transaction(self, data):
        data.draw(st.sampled_from(self.running)).completes_itself = True

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def renew(self, data):
        state = data.draw(st.sampled_from(self.added))
        if not state.is_lost and not self.left[state]:
            state.extend(self.clock.now, 10.0)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def lose(self, data):
        state = data.draw(st.sampled_from(self.added))
        if not self.left[state]:
            is_news = self.jobs.lose(state)
            assert not is_news or state in self.running

    @rule()
    def lapse(self):
        lapsed = self.jobs.lapse()
        assert set(lapsed) <= set(self.running)

    def has_news(self):
        due = any(at <= self.clock.now for at, _ in self.jobs._put_off)
        return due or self.jobs._ended

    @precondition(has_news)
    @rule()
    def collect(self):
        done, dropped = parted(self.jobs.collect())
        for state in done:
            assert state not in self.running
            assert self.clock.now >= self.not_before.get(state, 0)
            if state.began_at:
                assert state.verdict in (DONE, HANDED_BACK, TIMED_OUT)
                assert self.hands_back or state.verdict is not HANDED_BACK
            else:
                assert state.verdict is RELEASED
        for state in dropped:
            assert state.is_lost
        self.unanswered += done
        self.jobs.forget(dropped)
        self.left.update(dropped)

    @precondition(lambda self: self.unanswered)
    @rule(count=st.integers(1, 5))
    def answer(self, count):
        answered, self.unanswered = self.unanswered[:count], self.unanswered[count:]
        self.jobs.forget(answered)
        self.left.update(answered)

    @precondition(lambda self: self.unanswered)
    @rule()
    def put_off(self):
        self.jobs.put_off(self.unanswered)
        for state in self.unanswered:
            assert state.pause <= 0.5
            self.not_before[state] = self.clock.now + state.pause
        self.unanswered = []

    @rule()
    def stop(self):
        self.jobs.stop()
        self.is_open = False

    @rule()
    def close(self):
        self.jobs.close()
        self.is_open = False

    @precondition(lambda self: not self.is_open)
    @rule()
    def abandon(self):
        assert set(self.jobs.running) == set(self.running)
        self.jobs.abandon()
        self.was_abandoned += self.running + self.stuck
        self.running, self.stuck = [], []
        assert not self.jobs.is_stuck
        assert self.jobs.take("email") is None

    @precondition(lambda self: self.was_abandoned)
    @rule()
    def end_what_was_abandoned(self):
        self.jobs.end(self.was_abandoned.pop(), DONE)

    @invariant()
    def no_lease_is_lost_sight_of(self):
        if hasattr(self, "jobs"):
            held = [h for h in self.added if not self.left[h]]
            assert self.jobs._held == set(held)
            assert self.jobs.has_work == bool(held)

    @invariant()
    def no_more_are_wanted_than_there_is_room_for(self):
        if hasattr(self, "jobs"):
            waiting = self.jobs.waiting("email")
            wanted = self.jobs.wanted().get("email", 0)
            assert wanted >= 0
            busy = len(self.running + self.stuck)
            assert self.jobs.is_stuck == bool(self.stuck)
            if self.is_open:
                assert wanted + waiting + busy <= self.batch
                # No hand is idle for want of asking.
                assert wanted or busy + waiting >= self.concurrency
            else:
                assert not wanted

    def teardown(self):
        if not hasattr(self, "jobs"):
            return
        self.close()
        self.jobs.abandon()
        self.answer_all()
        assert self.left == Counter(self.added)
        assert self.jobs.finish() == []
        assert self.jobs.collect() == []
        self.patch.undo()

    def answer_all(self):
        self.clock.now += 0.5  # the longest that anything is put off
        self.running, self.stuck = [], []
        while self.has_news():
            self.collect()
        assert self.jobs._put_off == []
        self.jobs.forget(self.unanswered)
        self.left.update(self.unanswered)


class ManyHistories(Histories):
    pass


def tried(machine, examples):
    """Return the test case of a machine, with so many histories of 40 steps."""
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        # A machine at work on other things as well is slow, and no fault.
        suppress_health_check=[HealthCheck.too_slow],
    )
    return machine.TestCase


test_every_lease_that_was_added_leaves_exactly_once = tried(Histories, 15)
test_every_lease_leaves_exactly_once_in_many_histories = pytest.mark.slow(
    tried(ManyHistories, 100)
)
