from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

INSPECT = "select * from inspect(%s::uuid)"
LATER = "2040-01-01T00:00:00Z"


FATES = {
    "queued": "",
    "scheduled": "",
    "running": "claim",
    "lapsed": "claim lapse",
    "running again": "claim lapse reclaim",
    "retrying": "claim retry",
    "running after a failure": "claim retry due claim",
    "succeeded": "claim complete",
    "succeeded after a failure": "claim retry due claim complete",
    "failed": "claim refuse",
    "failed on the last attempt": "claim retry",
    "exhausted": "claim lapse reclaim",
}

MOVES = {
    "lapse": "update live_job set lease_expires_at = clock_timestamp()",
    "due": "update live_job set available_at = clock_timestamp()",
}
CLAIMANTS = {"claim": "email-worker", "reclaim": "spare-worker"}
ENDS = {
    "complete": "select complete(%s, %s)",
    "refuse": "select fail(%s, %s, 'refused', false)",
    "retry": "select fail(%s, %s, 'timeout', true)",
}


@pytest.fixture
def reach(connect, owner, enqueue):
    """Make a job in a state and return its id."""

    def reach(state):
        last = state in ("failed on the last attempt", "exhausted")
        job_id = enqueue(
            available_at=LATER if state == "scheduled" else None,
            max_attempts=1 if last else 3,
        )
        token = None
        for step in FATES[state].split():
            if step in MOVES:
                owner.execute(MOVES[step])
            elif step in CLAIMANTS:
                held = connect(CLAIMANTS[step]).rows("select * from claim('email')")
                token = held[0][6] if held else None
            else:
                connect("email-worker").execute(ENDS[step], (job_id, token))
        return job_id

    return reach


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("queued", ("queued", 0, None, None, False, False)),
        ("scheduled", ("queued", 0, None, None, False, False)),
        ("running", ("running", 1, None, "email-worker", True, False)),
        ("lapsed", ("running", 1, None, "email-worker", True, False)),
        ("running again", ("running", 2, None, "spare-worker", True, False)),
        ("retrying", ("queued", 1, "timeout", "email-worker", False, False)),
        (
            "running after a failure",
            ("running", 2, "timeout", "email-worker", True, False),
        ),
        ("succeeded", ("succeeded", 1, None, "email-worker", False, True)),
        (
            "succeeded after a failure",
            ("succeeded", 2, "timeout", "email-worker", False, True),
        ),
        ("failed", ("failed", 1, "refused", "email-worker", False, True)),
        (
            "failed on the last attempt",
            ("failed", 1, "timeout", "email-worker", False, True),
        ),
        ("exhausted", ("failed", 1, "attempts_exhausted", "email-worker", False, True)),
    ],
)
def test_inspect_returns_the_state_and_history_of_a_job(
    observer, reach, state, expected
):
    job_id = reach(state)

    row = observer.row(INSPECT, job_id)

    assert row["job_id"] == job_id
    assert row["producer"] == "accounts"
    assert row["queue"] == "email"
    assert row["kind"] == "send"
    assert (
        row["status"],
        row["attempts"],
        row["last_failure_code"],
        row["worker"],
        row["lease_expires_at"] is not None,
        row["ended_at"] is not None,
    ) == expected


def test_inspect_returns_evidence_and_never_payload_or_key(observer, worker, enqueue):
    job_id = enqueue(payload={"hush": "hush"}, key="hush-key")
    token = worker.value("select lease_token from claim('email')")

    row = observer.row(INSPECT, job_id)

    assert list(row)[:11] == [
        "job_id",
        "queue",
        "kind",
        "status",
        "attempts",
        "max_attempts",
        "available_at",
        "lease_expires_at",
        "last_failure_code",
        "created_at",
        "updated_at",
    ]
    assert "hush" not in str(row)
    assert token not in str(row)
    assert not [name for name in row if "payload" in name or "key" in name]
    assert not [name for name in row if "token" in name or "hash" in name]


def test_inspect_changes_nothing(observer, reach, state):
    job_id = reach("lapsed")
    before = state()

    observer.row(INSPECT, job_id)

    assert state() == before


def test_inspect_reads_within_a_read_only_transaction(observer, reach):
    job_id = reach("running")
    observer.execute("set default_transaction_read_only to on")

    assert observer.row(INSPECT, job_id)["status"] == "running"


@pytest.mark.parametrize(
    "job_id", [None, uuid4(), "00000000-0000-0000-0000-000000000000"]
)
def test_inspect_refuses_an_unknown_job(observer, enqueue, job_id):
    enqueue()

    with observer.refusing("LJ006"):
        observer.row(INSPECT, job_id)


def test_inspect_serves_producers_workers_observers_and_operators_alike(
    connect, prefix, reach
):
    job_id = reach("running")

    rows = [
        connect(role).row(INSPECT, job_id)
        for role in ("accounts", "email-worker", "operations", f"{prefix}_duty")
    ]

    assert rows == [rows[0]] * 4


def test_inspect_tells_the_attempts_as_asked_and_as_granted(operator, observer, reach):
    job_id = reach("failed")
    asked = observer.row(INSPECT, job_id)["max_attempts"]

    operator.execute("select redrive(%s, 4)", (job_id,))

    assert asked == 3
    assert observer.row(INSPECT, job_id)["max_attempts"] == 5


def test_inspect_tells_of_a_redriven_job(operator, observer, reach):
    job_id = reach("failed")

    operator.execute("select redrive(%s)", (job_id,))

    row = observer.row(INSPECT, job_id)
    assert row["status"] == "queued"
    assert row["attempts"] == 1
    assert row["last_failure_code"] == "refused"
    assert row["ended_at"] is None


def test_inspect_tells_when_a_job_may_be_claimed(observer, reach):
    at_once = observer.row(INSPECT, reach("queued"))
    scheduled = observer.row(INSPECT, reach("scheduled"))

    assert at_once["available_at"] == at_once["created_at"]
    assert scheduled["available_at"] == datetime(2040, 1, 1, tzinfo=UTC)


def test_inspect_tells_when_a_failed_attempt_is_repeated(owner, observer, reach):
    row = observer.row(INSPECT, reach("retrying"))

    assert row["available_at"] == owner.value("select retry_at from attempt")


def test_inspect_tells_when_the_lease_ends(owner, observer, reach):
    row = observer.row(INSPECT, reach("running"))

    assert row["lease_expires_at"] == owner.value(
        "select lease_expires_at from live_job"
    )


def test_inspect_dates_its_result_by_the_latest_of_created_leased_and_ended(
    connect, owner, enqueue, make_due
):
    observer = connect("operations")
    read = "select updated_at from inspect(%s)"
    job_id = enqueue()
    created_at = owner.value("select created_at from job")
    assert observer.value(read, job_id) == created_at

    token = connect("email-worker").value("select lease_token from claim('email')")
    leased_at = owner.value("select leased_at from live_job")
    assert leased_at > created_at
    assert observer.value(read, job_id) == leased_at

    worker = connect("email-worker")
    worker.execute("select fail(%s, %s, 'timeout', true)", (job_id, token))
    ended_at = owner.value("select ended_at from attempt")
    assert ended_at > leased_at
    assert observer.value(read, job_id) == ended_at

    make_due(job_id)
    token = connect("email-worker").value("select lease_token from claim('email')")
    leased_at = owner.value("select leased_at from live_job")
    assert leased_at > ended_at
    assert observer.value(read, job_id) == leased_at

    worker.execute("select complete(%s, %s)", (job_id, token))
    ended_at = owner.value("select max(ended_at) from attempt")
    assert ended_at > leased_at
    assert observer.value(read, job_id) == ended_at
    assert observer.value("select ended_at from inspect(%s)", job_id) == ended_at


def test_inspect_tells_equal_instants_in_every_time_zone(connect, reach):
    job_id = reach("running")
    rows = []

    for zone in ("UTC", "Asia/Kathmandu", "Pacific/Kiritimati", "America/New_York"):
        session = connect("operations")
        session.execute(f"set timezone to '{zone}'")
        rows.append(session.row(INSPECT, job_id))

    assert rows == [rows[0]] * 4
    assert rows[0]["lease_expires_at"] - rows[0]["updated_at"] == timedelta(seconds=30)


def test_a_producer_inspects_its_own_job_alone(enqueue, connect, prefix):
    job_id = enqueue()  # by accounts
    organization = connect("organization")

    with organization.refusing("LJ006") as of_another:
        organization.execute(INSPECT, (job_id,))
    with organization.refusing("LJ006") as unknown:
        organization.execute(INSPECT, (uuid4(),))

    assert str(of_another.value) == str(unknown.value)
    for role in ("accounts", "email-worker", "operations", f"{prefix}_duty", None):
        assert connect(role).row(INSPECT, job_id)["job_id"] == job_id


@pytest.mark.parametrize(
    ("groups", "is_shown"),
    [
        (["producer"], False),
        (["producer", "worker"], True),
        (["producer", "observer"], True),
        (["producer", "operator"], True),
    ],
)
def test_the_rights_of_the_role_in_force_decide_what_inspect_shows(
    groups, is_shown, enqueue, connect, prefix, new_role
):
    job_id = enqueue()
    role = new_role(members_of=[f"{prefix}_{group}" for group in groups])
    login = new_role(members_of=[role])
    session = connect(login)
    session.execute(f'set role "{role}"')

    if is_shown:
        assert session.row(INSPECT, job_id)["producer"] == "accounts"
    else:
        with session.refusing("LJ006"):
            session.execute(INSPECT, (job_id,))
