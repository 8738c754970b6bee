"""What one caller can find out about another caller's jobs.

Every role that can connect sees that there is an Instance, the text of its functions,
the sizes of its tables, and the sessions. By listening it sees in which queue a job fell
due while a worker waited. Everything else is tried here.
"""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

ENQUEUE = "select created from enqueue('email', %s, %s, %s)"
MINE = ("send", '{"mine": true}', "k")
FIELDS = ("message_primary", "message_detail", "message_hint", "context")


def told(session, statement, *parameters):
    """Everything that a result or a refusal shows, but for the caller's own ids."""
    try:
        return session.rows(statement, *parameters)
    except psycopg.Error as error:
        return [error.sqlstate, *(getattr(error.diag, field) for field in FIELDS)]


@pytest.mark.parametrize(
    "theirs", ["nothing", "uncommitted", "queued", "running", "ended", "another intent"]
)
def test_a_key_of_another_producer_is_treated_as_a_new_key(
    theirs, producer, other_producer, worker, claim
):
    other_producer.execute("begin")
    if theirs != "nothing":
        kind, payload, key = MINE
        given = "other" if theirs == "another intent" else kind
        other_producer.execute(ENQUEUE, (given, payload, key))
    if theirs != "uncommitted":
        other_producer.execute("commit")
    if theirs in {"running", "ended"}:
        lease = claim()
        if theirs == "ended":
            worker.execute("select complete(%s, %s)", lease)
    producer.execute("set lock_timeout = '500ms'")

    answers = [told(producer, ENQUEUE, *MINE), told(producer, ENQUEUE, *MINE)]

    assert answers == [[(True,)], [(False,)]]


@pytest.mark.parametrize(
    "call",
    [
        "select renew(%s, %s)",
        "select complete(%s, %s)",
        "select fail(%s, %s, 'smtp.down', true)",
        "select outcome from renew_many(array[%s]::uuid[], array[%s]::text[])",
        "select outcome from complete_many(array[%s]::uuid[], array[%s]::text[])",
        (
            "select outcome, available_at from fail_many(array[%s]::uuid[],"
            " array[%s]::text[], array['smtp.down'], array[true])"
        ),
    ],
)
def test_no_verb_shows_a_worker_whether_a_job_exists(
    call, enqueue, claim, worker, rival
):
    queued, ended, locked = (enqueue() for _ in range(3))
    leases = dict(claim() for _ in range(3))
    worker.execute("select complete(%s, %s)", (ended, leases[ended]))
    worker.execute("begin")
    worker.execute("select renew(%s, %s)", (locked, leases[locked]))
    rival.execute("set lock_timeout = '500ms'")

    answers = [
        told(rival, call, job_id, leases.get(job_id, leases[queued]))
        for job_id in (uuid4(), queued, ended, locked)
    ]

    assert answers == [answers[0]] * 4


def test_an_uncommitted_or_purged_job_reads_as_no_job_for_every_role(
    as_callers, other_producer, operator, enqueue, claim, worker
):
    purged = enqueue()
    worker.execute("select complete(%s, %s)", claim())
    operator.execute("select purge(clock_timestamp())")
    other_producer.execute("begin")
    pending = enqueue(session=other_producer)

    for role in ("producer", "worker", "observer", "operator"):
        answers = [
            told(as_callers[role], "select inspect(%s)", job_id)
            for job_id in (uuid4(), purged, pending)
        ]

        assert answers[0][0] == "LJ006"
        assert answers == [answers[0]] * 3


def test_statistics_and_sequences_show_no_row_of_the_tables(
    as_callers, enqueue, owner, operator
):
    for _ in range(3):
        enqueue(payload={"card": "s3cr3t"})
    operator.execute("select purge(clock_timestamp())")
    owner.execute("analyze job, live_job, operator_act")

    assert owner.value("select count(*) from pg_stats where tablename = 'job'") > 0
    for session in as_callers.values():
        for statement in (
            "select 1 from pg_stats where schemaname = 'jobs_email'",
            "select last_value from pg_sequences where schemaname = 'jobs_email'",
        ):
            assert {value for (value,) in session.rows(statement)} <= {None}
        with session.refusing("42501"):
            session.execute("select from pg_statistic")


# The server's log


@pytest.fixture
def logged(owner):
    """Return what the server has logged since."""
    process = Path(f"/proc/{owner.pid}")
    log = process / "fd" / "2"
    is_ours = process.exists() and b"postgres" in (process / "cmdline").read_bytes()
    if not is_ours or not os.access(log, os.R_OK) or not log.is_file():
        pytest.skip("the server's log is not a file that this process can read")
    begun = log.stat().st_size

    def logged():
        with log.open("rb") as file:
            file.seek(begun)
            return file.read().decode(errors="replace")

    return logged


def test_a_refusal_is_logged_without_the_values_of_its_parameters(
    logged, producer, worker, observer, operator
):
    secret, marker = f"p{uuid4().hex}", f"m{uuid4().hex}"
    for session, statement, parameters in (
        (producer, ENQUEUE, ("no kind", f'{{"card": "{secret}"}}', secret)),
        (producer, "select enqueue_many(%s)", (f'{{"card": "{secret}"}}',)),
        (worker, "select complete(gen_random_uuid(), %s)", (secret,)),
        (worker, "select fail(gen_random_uuid(), %s, %s, true)", (secret, "no code")),
        (observer, "select inspect_failures(%s)", (secret,)),
        (operator, "select redrive_failed(%s, now())", (secret,)),
    ):
        with pytest.raises(psycopg.Error):
            session.execute(f"{statement} /* {marker} */", parameters)

    text = logged()

    assert text.count(marker) == 6
    assert secret not in text


def test_a_refused_call_is_logged_with_what_stands_in_its_text(logged, producer):
    marker = uuid4().hex

    with pytest.raises(psycopg.Error):
        producer.execute(f"select enqueue('email', 'no kind', '{{}}', '{marker}')")

    assert (
        f"STATEMENT:  select enqueue('email', 'no kind', '{{}}', '{marker}')"
        in logged()
    )
