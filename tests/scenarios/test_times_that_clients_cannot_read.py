"""The fault: times that a client cannot read.

Such a time is refused at `enqueue`. One that was put there by hand hinders no other
job.
"""

from datetime import UTC, datetime, timedelta

import pytest

OUT_OF_RANGE = (
    "infinity",
    "-infinity",
    "20000-01-01 00:00:00+00",
    "10000-01-01 00:00:00+00",
    "0001-12-31 23:59:59+00 BC",
    "4713-01-01 00:00:00+00 BC",
)
FIRST, LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def test_a_time_out_of_range_is_refused_and_nothing_is_stored(
    client, way, refused, owner
):
    jobs = client("accounts")

    for at in OUT_OF_RANGE:
        with refused("LJ001") as caught:
            jobs.enqueue("email", "send", {}, idempotency_key="k", available_at=at)
        # In Python it is no datetime to begin with.
        assert "must be finite" in str(caught.value) or way != "sql"
    items = jobs.enqueue_many(
        {
            "queue": "email",
            "kind": "send",
            "payload": {},
            "idempotency_key": f"k{n}",
            "available_at": at,
        }
        for n, at in enumerate(OUT_OF_RANGE)
    )

    assert [item.outcome for item in items] == ["invalid_job"] * len(OUT_OF_RANGE)
    assert owner.value("select count(*) from job") == 0


def test_the_first_and_the_last_time_in_range_are_kept(client):
    jobs = client("accounts", options="-c TimeZone=UTC")

    seen = [
        jobs.inspect(
            jobs.enqueue(
                *("email", "send", {}), idempotency_key=f"k{n}", available_at=at
            ).job_id
        )
        for n, at in enumerate([FIRST, LAST])
    ]

    # What has passed means now.
    assert abs(seen[0].available_at - seen[0].created_at) < timedelta(seconds=1)
    assert seen[1].available_at == LAST


def test_times_out_of_range_put_there_by_hand_hinder_no_other_job(
    client, enqueue, owner
):
    bad = [enqueue() for _ in range(3)]
    good = [enqueue() for _ in range(9)]
    for job_id, at in zip(
        bad, ("4713-01-01 BC", "0044-03-15 BC", "20000-01-01"), strict=True
    ):
        owner.execute(
            "update live_job set available_at = %s::timestamptz where job_id = %s",
            (at, job_id),
        )
    worker = client("email-worker")

    leases = worker.claim("email", 20)

    assert [lease.job_id for lease in leases] == [*bad[:2], *good]
    assert [i.outcome for i in worker.complete_many(leases)] == ["completed"] * 11
    assert owner.rows("select job_id, attempt, lease_owner from live_job") == [
        (bad[2], 0, None)
    ]
    assert {worker.inspect(job_id).status for job_id in good} == {"succeeded"}


def changing_clocks(moment):
    """Name a time zone whose clocks are put forward by an hour at that moment."""

    def day_and_time(at):
        return f"{at.timetuple().tm_yday - 1}/{at:%H:%M:%S}"

    back = moment + timedelta(days=60)
    return f"LJW0LJS-1,{day_and_time(moment)},{day_and_time(back)}"


def test_a_day_is_24_hours_where_the_clocks_change(client, connect, configure, owner):
    configure(lease_seconds=3600, retry_base_seconds=86400, retry_max_seconds=86400)
    now = owner.value("select clock_timestamp()").astimezone(UTC)
    zone = changing_clocks(now + timedelta(hours=12))
    there = {"options": f"-c search_path=jobs_email -c TimeZone={zone}"}
    calendar_day = connect(**there).value("select %s + interval '1 day'", now) - now
    producer, worker = client("accounts", **there), client("email-worker", **there)

    producer.enqueue("email", "send", {}, idempotency_key="k")
    (lease,) = worker.claim("email")
    failed = worker.fail(lease, "down", retryable=True)

    assert calendar_day == timedelta(hours=23)
    assert (
        timedelta(0)
        <= lease.lease_expires_at - now - timedelta(hours=1)
        < (timedelta(seconds=20))
    )
    assert (
        timedelta(0)
        <= failed.available_at - now - timedelta(hours=24)
        < (timedelta(seconds=20))
    )


@pytest.mark.parametrize(
    "field", ["lease_seconds", "retry_max_seconds", "retention_seconds"]
)
def test_a_length_is_a_number_of_seconds(field, configure, owner, refused):
    before = owner.rows("select * from instance")

    for length in ("1 day", "1 month", "P1M", -1, 0, 1.5):
        with refused("LJ007"):
            configure(**{field: length})

    assert owner.rows("select * from instance") == before
