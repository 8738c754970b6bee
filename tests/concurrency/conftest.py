"""Locks held on purpose, and waits that must not happen."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _as_it_is_meant(no_wait_is_for_ever, read_committed):
    """A wait that nobody ends fails the test, and each call sees what it waited for."""


@pytest.fixture
def colleague(connect, worker):
    """Another session of ``email-worker``."""
    return connect("email-worker")


@pytest.fixture
def second_operator(connect, operator, prefix):
    """Another session of the operator."""
    return connect(f"{prefix}_duty")


@pytest.fixture
def failed_job(enqueue, claim, worker):
    """Bring a job to its failed end and return its id."""

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
