"""A method of a client returns, or raises an error of ours, for every object."""

import asyncio
import inspect
import math
import time
from collections import UserDict
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import SimpleNamespace
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lenso_jobs import AsyncJobs, Jobs, JobsError, NewJob
from lenso_jobs.errors import InvalidArgument, InvalidJob, InvalidLease

FEW = 1
EXAMPLES = 4
MANY = 50 * EXAMPLES

SECRET = "hunter2"
NOT_A_CALL = {"close"}
CALLERS = {
    "enqueue": "accounts",
    "enqueue_many": "accounts",
    **dict.fromkeys(
        (
            *("claim", "wait", "next_available_at"),
            *("renew", "renew_many", "complete", "complete_many", "fail", "fail_many"),
            *("release", "release_many"),
        ),
        "email-worker",
    ),
}


class HostileError(Exception):
    """Raised by an object that was given."""


class Hostile:
    """Raises at every access."""

    def _raise(self, *_):
        raise HostileError

    __str__ = __repr__ = __iter__ = __eq__ = __hash__ = __len__ = __bool__ = _raise
    __getitem__ = __int__ = __float__ = __contains__ = keys = items = _raise


class HostileMapping(dict):
    """A mapping that cannot be read."""

    def _raise(self, *_):
        raise HostileError

    __iter__ = __getitem__ = keys = items = values = get = _raise


class HostileZone(tzinfo):
    """A zone that does not know its offset."""

    def utcoffset(self, _):
        raise HostileError

    dst = tzname = utcoffset


class Text(str):
    """A kind of text."""

    __slots__ = ()

    def __str__(self):
        return "other"


class Number(int):
    """A kind of number."""

    def __str__(self):
        return "other"

    __repr__ = __str__


class Fields(dict):
    """A kind of dict."""


class Limit(IntEnum):
    FEW = 2


class Colour(Enum):
    RED = "red"


class Word(StrEnum):
    RED = "red"


def endless():
    """A list that holds itself."""
    items = [SECRET]
    items.append(items)
    return items


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


ODD = (
    lambda: None,
    lambda: True,
    lambda: False,
    lambda: 0,
    lambda: -1,
    lambda: 1001,
    lambda: 2**31,
    lambda: -(2**63) - 1,
    lambda: 10**400,
    lambda: Number(2),
    lambda: Limit.FEW,
    lambda: 1.0,
    lambda: 1.5,
    lambda: math.nan,
    lambda: -math.inf,
    lambda: Decimal("NaN"),
    lambda: Decimal(1),
    lambda: 1j,
    lambda: "",
    lambda: "a\0b",
    lambda: "\ud800",
    lambda: "na me",
    lambda: "a" * 2000,
    lambda: Text("email"),
    lambda: Word.RED,
    lambda: Colour.RED,
    lambda: b"email",
    lambda: bytearray(b"email"),
    lambda: memoryview(b"email"),
    list,
    lambda: (),
    dict,
    set,
    lambda: range(3),
    lambda: [None],
    lambda: [[]],
    lambda: [1, "a", {}],
    lambda: [{"queue": SECRET}],
    lambda: [Hostile()],
    lambda: [HostileMapping(a=1)],
    lambda: (n for n in [None, 1]),
    lambda: (_ for _ in ()),
    lambda: iter([{}]),
    lambda: [None] * 1001,
    endless,
    lambda: UserDict(a=SECRET),
    lambda: Fields(a=1),
    lambda: {"field": [SECRET, math.nan]},
    lambda: {"field": [SECRET, "\0"]},
    lambda: {"field": [SECRET, "\ud800"]},
    lambda: {"\ud800": SECRET},
    lambda: {"field": [SECRET, b""]},
    lambda: {"field": [SECRET, {1, 2}]},
    lambda: {"field": [SECRET, Hostile()]},
    lambda: {"field": [SECRET, endless()]},
    lambda: {1: 1, None: 2, False: 3, 1.5: 4},
    lambda: {(1, SECRET): 1},
    lambda: {"field": [SECRET, 10**5000]},
    lambda: {"field": [SECRET, 1e308]},
    lambda: {"field": [SECRET, Number(3)]},
    lambda: {"field": [SECRET, Colour.RED]},
    lambda: {"field": [SECRET, datetime(2030, 1, 1, tzinfo=UTC)]},
    lambda: nested(129),
    lambda: nested(5000),
    lambda: HostileMapping(a=1),
    Hostile,
    object,
    lambda: object,
    lambda: len,
    lambda: datetime(2030, 1, 1),  # noqa: DTZ001 - what is tried
    lambda: datetime(2030, 1, 1, tzinfo=HostileZone()),
    lambda: datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))),
    lambda: datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=-14))),
    lambda: datetime.max.replace(tzinfo=timezone(timedelta(hours=-23))),
    lambda: datetime.max.replace(tzinfo=UTC),
    lambda: datetime(1582, 10, 10, tzinfo=timezone(timedelta(seconds=1))),
    lambda: date(2030, 1, 1),
    lambda: timedelta(seconds=1),
    lambda: UUID(int=0),
    lambda: "{00000000-0000-0000-0000-000000000000}",
    lambda: "not a UUID",
    lambda: SimpleNamespace(job_id="x", lease_token=SECRET),
    lambda: SimpleNamespace(job_id=UUID(int=0), lease_token=1),
    lambda: SimpleNamespace(job_id=UUID(int=0), lease_token="\0" + SECRET),
    lambda: SimpleNamespace(job_id=Hostile(), lease_token=Hostile()),
    lambda: SimpleNamespace(job_id=UUID(int=0)),
    lambda: [SimpleNamespace(job_id=5, lease_token=b"")],
    lambda: [(None, None, None)],
    lambda: [(SimpleNamespace(job_id=UUID(int=0), lease_token=SECRET), 1, "x")],
    lambda: [(1, 2)],
    lambda: [NewJob("email", "send", {"a": math.nan}, SECRET)],
    lambda: [NewJob(None, 5, [], b"", "now", "3")],
    lambda: [{"payload": SECRET, 5: 5}],
    lambda: [{"queue": "email", "available_at": datetime(2030, 1, 1)}],  # noqa: DTZ001
)
SOUND = {
    "queue": "email",
    "kind": "send",
    "payload": {"to": SECRET},
    "idempotency_key": f"{SECRET}-new",
    "available_at": None,
    "max_attempts": 3,
    "jobs": [NewJob("email", "send", {"to": SECRET}, f"{SECRET}-many")],
    "limit": 1,
    "wait": 0,
    "timeout": 0,
    "failure_code": "smtp.down",
    "delay": 0,
    "retryable": True,
    "retry_after": 60,
    "extra_attempts": 1,
    "over_seconds": 0,
    "since": datetime(2020, 1, 1, tzinfo=UTC),
    "before": None,
    "status": "queued",
    "producer": "accounts",
}


@pytest.fixture
def sound(enqueue, claim):
    """What is sound, for each argument."""
    enqueue(key="first")
    enqueue(key="second")
    job_id, token = claim()
    lease = SimpleNamespace(job_id=job_id, lease_token=token)
    return SOUND | {
        "lease": lease,
        "leases": [lease],
        "failures": [(lease, "smtp.down", True)],
        "job_id": job_id,
    }


def methods():
    """The calls of a client, with the names of their arguments."""
    return {
        name: inspect.signature(method).parameters.keys() - {"self"}
        for name, method in inspect.getmembers(Jobs, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_A_CALL
    }


def test_every_argument_of_a_client_has_its_bad_objects(sound):
    missing = {
        f"{name}({argument})"
        for name, arguments in methods().items()
        for argument in arguments
        if argument not in sound
    }

    assert missing == set(), "say in SOUND what is sound for these"


@pytest.fixture
def jobs(worker):
    """A client of email-worker."""
    return Jobs(worker, "jobs_email")


@pytest.mark.slow
def test_a_number_of_a_kind_is_not_searched_for_one_by_one(jobs, sound):
    started = time.process_time()

    leased = jobs.claim("email", Limit.FEW)

    assert len(leased) == 1
    assert time.process_time() - started < 1


@pytest.mark.parametrize("odd", [5, "text", {"job_id": 1}, object()])
def test_an_object_that_is_not_a_lease_is_an_invalid_lease(jobs, sound, odd):
    with pytest.raises(InvalidLease, match="job_id and a lease_token"):
        jobs.complete(odd)
    outcomes = [item.outcome for item in jobs.complete_many([odd, sound["lease"]])]

    assert outcomes == ["invalid_lease", "completed"]


@pytest.mark.parametrize("odd", [5, None, (), (1, 2), "text"])
def test_an_item_that_is_not_a_failure_spoils_no_other(jobs, sound, odd):
    items = jobs.fail_many([odd, *sound["failures"]])

    assert [item.outcome for item in items] == ["invalid_failure", "queued"]


@pytest.mark.parametrize("verb", ["renew_many", "complete_many", "fail_many"])
def test_an_argument_that_cannot_be_iterated_is_invalid(jobs, verb):
    with pytest.raises(InvalidArgument, match="must be an iterable"):
        getattr(jobs, verb)(5)


def test_items_that_cannot_be_gone_through_are_no_jobs(jobs):
    with pytest.raises(InvalidJob, match="jobs must be an iterable"):
        jobs.enqueue_many(5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "examples",
    [
        FEW,
        pytest.param(EXAMPLES, marks=pytest.mark.slow),
        pytest.param(MANY, marks=pytest.mark.long),
    ],
)
def test_clients_return_or_refuse_for_every_object(
    conninfo, connect, sound, state, prefix, examples
):
    before = state()
    callers = dict.fromkeys(methods(), f"{prefix}_duty") | CALLERS

    with asyncio.Runner() as runner:
        connection = connect()
        connection.autocommit = False
        also = runner.run(psycopg.AsyncConnection.connect(conninfo))
        try:
            for name, arguments in methods().items():
                clients = (
                    Jobs(connection, "jobs_email", callers[name]),
                    AsyncJobs(also, "jobs_email", callers[name]),
                )
                trying(runner, clients, name, sorted(arguments), sound, examples)
        finally:
            runner.run(also.close())

    assert state() == before


def trying(runner, clients, name, arguments, sound, examples):
    jobs, async_jobs = clients

    @settings(
        max_examples=examples * len(arguments) or 1,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        odd=st.dictionaries(
            st.sampled_from(arguments or ["none"]),
            st.integers(0, len(ODD) - 1),
            min_size=1,
            max_size=2,
        )
    )
    def attempt(odd):
        def values():
            tried = {argument: ODD[n]() for argument, n in odd.items()}
            return {key: tried.get(key, sound[key]) for key in arguments}

        if any(is_long(values().get(argument)) for argument in ("wait", "timeout")):
            return
        told = outcome(lambda: getattr(jobs, name)(**values()))
        jobs._source.rollback()

        async def call():
            return await getattr(async_jobs, name)(**values())

        also = outcome(lambda: runner.run(call()))
        runner.run(async_jobs._source.rollback())
        assert told == also

    attempt()


def is_long(value):
    """Whether a wait would not end."""
    return isinstance(value, int | float) and value > 0 and value is not True


def outcome(call):
    """The kind of the answer, or the refusal."""
    try:
        return type(call())
    except (JobsError, psycopg.Error) as error:
        said = f"{error} {error!r} {error.__cause__}"
        assert SECRET not in said
        return type(error), str(error)
    except HostileError:
        return HostileError
