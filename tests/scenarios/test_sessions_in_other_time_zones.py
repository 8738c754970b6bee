"""The fault: sessions in other time zones.

An instant is the same for everybody. A naive datetime is refused.
"""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

NEW_YORK = ZoneInfo("America/New_York")
KIRITIMATI = ZoneInfo("Pacific/Kiritimati")
KATHMANDU = ZoneInfo("Asia/Kathmandu")


def living_in(zone):
    return {"options": f"-c search_path=jobs_email -c TimeZone={zone}"}


@pytest.fixture
def producer_there(client):
    return client("accounts", **living_in("America/New_York"))


@pytest.fixture
def worker_there(client):
    return client("email-worker", **living_in("Pacific/Kiritimati"))


@pytest.fixture
def rival_there(client):
    return client("spare-worker", **living_in("UTC"))


@pytest.fixture
def observer_there(client):
    return client("operations", **living_in("Asia/Kathmandu"))


@pytest.fixture
def now(owner):
    def now():
        return owner.value("select clock_timestamp()")

    return now


def test_a_job_is_due_at_one_instant_for_all(
    producer_there, worker_there, rival_there, observer_there, now
):
    instant, zones = now(), (NEW_YORK, KIRITIMATI, UTC)
    later = instant + timedelta(hours=1)
    past = instant - timedelta(seconds=1)

    scheduled, due = (
        [
            producer_there.enqueue(
                queue,
                *("send", {}),
                idempotency_key=f"{queue}.{n}",
                available_at=at.astimezone(zone),
            ).job_id
            for n, zone in enumerate(zones)
        ]
        for queue, at in (("email", later), ("slow", past))
    )

    for session in (producer_there, worker_there, observer_there):
        seen = [session.inspect(job_id).available_at for job_id in scheduled]
        assert seen == [later] * 3
    for worker in (worker_there, rival_there):
        assert worker.next_available_at("email") == later
        assert worker.claim("email") == []
    assert {lease.job_id for lease in rival_there.claim("slow", 9)} == set(due)


def test_the_repeated_hour_is_two_instants(producer_there, observer_there):
    once = datetime(2040, 11, 4, 1, 30, tzinfo=NEW_YORK)
    times = (once, once.replace(fold=1))

    seen = [
        observer_there.inspect(
            producer_there.enqueue(
                "email", "send", {}, idempotency_key=f"k{n}", available_at=at
            ).job_id
        ).available_at
        for n, at in enumerate(times)
    ]

    assert seen[1] - seen[0] == timedelta(hours=1)
    assert [at.astimezone(UTC).hour for at in seen] == [5, 6]


def test_a_lease_runs_from_the_same_to_the_same_instant_for_all(
    producer_there, worker_there, rival_there, observer_there, now
):
    lasts = timedelta(seconds=30)
    producer_there.enqueue("email", "send", {}, idempotency_key="k")
    before = now()
    (lease,) = worker_there.claim("email")
    after = now()

    assert before + lasts <= lease.lease_expires_at <= after + lasts
    assert before - timedelta(seconds=20) < lease.created_at < before
    assert rival_there.claim("email") == []
    for session in (rival_there, observer_there):
        assert session.inspect(lease.job_id).lease_expires_at == lease.lease_expires_at
        assert session.inspect(lease.job_id).status == "running"

    end = worker_there.renew(lease)

    assert lease.lease_expires_at < end <= now() + lasts
    assert rival_there.claim("email") == []
    assert worker_there.complete(lease)


def test_purge_keeps_jobs_that_ended_at_the_cutoff_in_every_timezone(
    producer_there, worker_there, observer_there, connect, prefix
):
    producer_there.enqueue("email", "send", {}, idempotency_key="k")
    (lease,) = worker_there.claim("email")
    worker_there.complete(lease)
    end = observer_there.inspect(lease.job_id).ended_at
    operator = connect(f"{prefix}_duty", **living_in("America/New_York"))

    kept = operator.value("select purge(%s)", end.astimezone(KATHMANDU))
    gone = operator.value(
        "select purge(%s)", (end + timedelta(microseconds=1)).astimezone(KIRITIMATI)
    )

    assert (kept, gone) == (0, 1)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_time_that_is_not_an_aware_datetime_is_refused(
    producer_there, refused, owner
):
    naive = datetime(2040, 1, 1)  # noqa: DTZ001 - what is refused
    times = (naive, naive.time(), naive.date(), "2040-01-01T00:00:00Z", 2208988800)

    for at in times:
        with refused("LJ001") as caught:
            producer_there.enqueue(
                "email", "send", {}, idempotency_key="k", available_at=at
            )
        assert str(caught.value) == "available_at must be an aware datetime"
    items = producer_there.enqueue_many(
        {
            "queue": "email",
            "kind": "send",
            "payload": {},
            "idempotency_key": f"k{n}",
            "available_at": at,
        }
        for n, at in enumerate(times)
    )

    assert [item.outcome for item in items] == ["invalid_job"] * len(times)
    assert owner.value("select count(*) from job") == 0
