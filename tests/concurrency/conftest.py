"""Locks held on purpose, and waits that must not happen."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_wait_is_for_ever(postgresql_database):
    """Let a wait that nobody ends fail the test (55P03) instead of hanging it."""
    database = postgresql_database.info.dbname
    postgresql_database.autocommit = True
    postgresql_database.execute(f'alter database "{database}" set lock_timeout = 8000')


@pytest.fixture
def hold(connect):
    """Lock the rows of jobs from a session of its own, until that session ends it."""

    def hold(*job_ids, table="live_job"):
        holder = connect()
        holder.execute("begin")
        holder.execute(
            f"select from {table} where job_id = any (%s) for update", (list(job_ids),)
        )
        return holder

    return hold


@pytest.fixture
def impatient():
    """Turn a wait that would last into a failure (55P03)."""

    def impatient(session):
        session.execute("set lock_timeout = '2s'")
        return session

    return impatient


@pytest.fixture
def colleague(connect, worker):
    """Another session of ``email-worker``."""
    return connect("email-worker")


@pytest.fixture
def second_operator(connect, operator, prefix):
    """Another session of the operator."""
    return connect(f"{prefix}_duty")


@pytest.fixture
def lapse_soon(owner):
    """Let a job's lease end shortly, by the clock; answers when."""

    def lapse_soon(job_id):
        return owner.value(
            "update live_job"
            " set lease_expires_at = clock_timestamp() + interval '800 ms'"
            " where job_id = %s returning lease_expires_at",
            job_id,
        )

    return lapse_soon


@pytest.fixture
def pass_by(owner):
    """Wait until the server's clock has passed an instant."""

    def pass_by(instant):
        while not owner.value("select clock_timestamp() > %s", instant):
            owner.execute("select pg_sleep_until(%s)", (instant,))

    return pass_by


@pytest.fixture
def failed_job(enqueue, claim, worker):
    """Bring a job to its failed end; answers its id."""

    def failed_job(key=None, payload=None):
        job_id = enqueue(key=key, payload=payload)
        _, token = claim()
        worker.execute("select fail(%s, %s, 'smtp.down', false)", (job_id, token))
        return job_id

    return failed_job


@pytest.fixture
def orphans(owner):
    """Count the rows that lack the job they belong to."""

    def orphans():
        return owner.value(
            "select count(*) from (select job_id from live_job"
            " union all select job_id from attempt) as r"
            " where not exists (select from job as j where j.job_id = r.job_id)"
        )

    return orphans
