"""Jobs in the transaction of a SQLAlchemy session or connection."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs import Failure, IdempotencyConflict, InvalidArgument, Worker

sqlalchemy = pytest.importorskip("sqlalchemy", reason="the extra sqlalchemy")
from sqlalchemy import create_engine, text  # noqa: E402
from sqlalchemy.ext.asyncio import (  # noqa: E402
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker  # noqa: E402
from sqlalchemy.pool import NullPool, StaticPool  # noqa: E402

from lenso_jobs.contrib.sqlalchemy import jobs_on  # noqa: E402

WRITES = text("select pg_current_xact_id_if_assigned() is not null")


@pytest.fixture
def url(conninfo, replica):
    """The URL of a role that may act as accounts."""
    given = conninfo_to_dict(conninfo)
    return sqlalchemy.URL.create(
        "postgresql+psycopg",
        username=replica,
        database=given["dbname"],
        query={"host": given["host"], "port": str(given["port"])},
    )


@pytest.fixture
def engine(url):
    engine = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    yield engine
    engine.dispose()


@pytest.fixture
def committed(owner):
    """Return how many jobs are committed."""
    return lambda: owner.value("select count(*) from job")


def enqueue(jobs, key="k", kind="send"):
    return jobs.enqueue("email", kind, {}, idempotency_key=key)


GIVEN = {
    "session": Session,
    "scoped session": lambda engine: scoped_session(sessionmaker(engine)),
    "connection": lambda engine: engine.connect(),
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_job_is_committed_and_rolled_back_with_the_transaction(
    given, engine, committed
):
    with closing(GIVEN[given](engine)) as of:
        jobs = jobs_on(of, "jobs_email", caller="accounts")
        enqueue(jobs)
        assert of.scalar(WRITES)
        of.rollback()
        assert committed() == 0

        assert not of.scalar(WRITES)
        enqueue(jobs)
        assert committed() == 0
        of.commit()
        assert committed() == 1

        # Nothing has told SQLAlchemy of a transaction but the call itself.
        enqueue(jobs, "second")
        of.commit()
    assert committed() == 2


def test_a_client_goes_on_with_the_connection_that_its_session_has_now(
    engine, committed
):
    with Session(engine) as first, Session(engine) as second:
        jobs = jobs_on(first, "jobs_email", caller="accounts")
        enqueue(jobs)
        first.commit()

        # The pool has one connection, which is the second session's now.
        second.scalar(WRITES)
        with pytest.raises(sqlalchemy.exc.TimeoutError):
            enqueue(jobs, "another's")
        second.commit()

    assert committed() == 1


def test_a_refusal_within_a_savepoint_leaves_the_rest_of_the_transaction(
    engine, committed
):
    with Session(engine) as session:
        jobs = jobs_on(session, "jobs_email", caller="accounts")
        enqueue(jobs)
        with pytest.raises(IdempotencyConflict), session.begin_nested():
            enqueue(jobs, kind="other")
        enqueue(jobs, "second")
        session.commit()

    assert committed() == 2


def test_a_savepoint_that_is_rolled_back_takes_its_jobs_along(engine, committed):
    with Session(engine) as session:
        jobs = jobs_on(session, "jobs_email", caller="accounts")
        nested = session.begin_nested()
        enqueue(jobs)
        nested.rollback()
        enqueue(jobs, "other")
        session.commit()

    assert committed() == 1


def test_all_sessions_share_the_client_of_a_pooled_connection(engine):
    clients = set()
    for _ in range(2):
        with Session(engine) as session:
            enqueue(jobs_on(session, "jobs_email", caller="accounts"))
            info = session.connection().info
            clients.add(info["lenso_jobs", "jobs_email", "accounts"])
            session.commit()

    assert len(clients) == 1


def test_a_job_is_worked_within_sessions(engine, enqueue, owner):
    enqueue()
    with Session(engine) as session:
        jobs = jobs_on(session, "jobs_email", caller="email-worker")
        (lease,) = jobs.claim("email", wait=1)
        session.commit()
        (item,) = jobs.fail_many([Failure(lease, "smtp.timeout", retryable=False)])
        assert item.outcome == "failed"
        session.commit()

    assert owner.value("select count(*) from attempt") == 1


def test_a_handler_completes_its_job_within_a_session(engine, enqueue, owner):
    enqueue()
    enqueue()

    def handler(lease):
        with Session(engine) as session:
            lease.complete(jobs_on(session, "jobs_email", caller="email-worker"))
            if lease.attempt == 1 and not done:
                done.append(lease)
                session.commit()

    done = []
    tally = Worker(
        str(owner.info.dsn),
        schema="jobs_email",
        queue="email",
        handler=handler,
        caller="email-worker",
        concurrency=1,
    ).run(until_idle=True)

    assert (tally.succeeded, tally.retried) == (1, 1)
    failed = owner.value("select failure_code from attempt where outcome = 'retried'")
    assert failed == "completion_rolled_back"


@pytest.mark.parametrize("given", ["session", "scoped session", "connection"])
def test_the_same_holds_for_asyncio(given, url, committed):
    async def act():
        engine = create_async_engine(url, poolclass=NullPool)
        of = {
            "session": lambda: AsyncSession(engine),
            "scoped session": lambda: async_scoped_session(
                async_sessionmaker(engine), asyncio.current_task
            ),
            "connection": engine.connect,
        }[given]()
        if given == "connection":
            await of.start()
        jobs = jobs_on(of, "jobs_email", caller="accounts")
        await enqueue(jobs)
        assert await of.scalar(WRITES)
        await of.rollback()
        assert committed() == 0

        for key in ("k", "second"):
            await enqueue(jobs, key)
            await of.commit()
        assert committed() == 2

        with pytest.raises(IdempotencyConflict):
            async with of.begin_nested():
                await enqueue(jobs, kind="other")
        await enqueue(jobs, "third")
        await of.commit()
        assert committed() == 3
        await of.close()

    asyncio.run(act())


def test_what_is_no_session_of_psycopg_3_is_refused(engine):
    with pytest.raises(InvalidArgument, match=r"Session, .*, not sqlalchemy\..*Engine"):
        jobs_on(engine, "jobs_email")
    with pytest.raises(InvalidArgument, match="schema must be a string"):
        jobs_on(Session(engine), None)
    with pytest.raises(InvalidArgument, match="caller must not be none"):
        jobs_on(Session(engine), "jobs_email", "none")
    other = create_engine(
        "sqlite://", creator=lambda: sqlite3.connect(":memory:"), poolclass=StaticPool
    )
    with (
        Session(other) as session,
        pytest.raises(
            InvalidArgument, match=r"psycopg 3, not sqlite3\.Connection: .*\+psycopg://"
        ),
    ):
        enqueue(jobs_on(session, "jobs_email"))
    other.dispose()
