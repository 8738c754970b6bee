"""Jobs in the transaction of a SQLAlchemy session or connection.

::

    with Session(engine) as session:
        session.add(Order(id=1))
        jobs_on(session, "jobs_shop").enqueue(
            "email", "receipt", {"order": 1}, idempotency_key="receipt:1"
        )
        session.commit()

The engine must use psycopg 3: ``postgresql+psycopg://``. Install ``lenso-jobs[sqlalchemy]``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar, overload

import psycopg

from lenso_jobs._async_client import AsyncJobs
from lenso_jobs._client import Jobs
from lenso_jobs._given import check_names, kind
from lenso_jobs.contrib._joined import AsyncJoinedJobs, JoinedJobs
from lenso_jobs.errors import InvalidArgument

try:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session, scoped_session
except ImportError as error:
    raise ImportError("pip install 'lenso-jobs[sqlalchemy]'") from error

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncSession,
        async_scoped_session,
    )

    Given: TypeAlias = Session | scoped_session[Any] | Connection
    AsyncGiven: TypeAlias = AsyncSession | async_scoped_session[Any] | AsyncConnection

Client = TypeVar("Client", Jobs, AsyncJobs)


@overload
def jobs_on(
    session_or_connection: Given, schema: str, caller: str | None = None
) -> Jobs: ...
@overload
def jobs_on(
    session_or_connection: AsyncGiven, schema: str, caller: str | None = None
) -> AsyncJobs: ...
def jobs_on(
    session_or_connection: Given | AsyncGiven, schema: str, caller: str | None = None
) -> Jobs | AsyncJobs:
    """Return a client whose calls join the transaction of a session or connection.

    Each call begins that transaction if none is in progress, as a statement of your own
    does, and never commits. The client costs nothing to make, and you may keep it as
    long as the session: after a commit its calls join the next transaction.

    A call that is refused aborts the transaction. To go on after a refusal, make the
    call within ``begin_nested()``.

    Args:
        session_or_connection: A ``Session``, ``scoped_session`` or ``Connection``, or
            one of their twins for asyncio.
        schema: The schema of the Instance.
        caller: The role to act as, as for ``Jobs``.

    Returns:
        A ``Jobs``, or an ``AsyncJobs`` for asyncio.

    Raises:
        InvalidArgument: An argument is of another kind. By each call, if the engine
            does not use psycopg 3.
    """
    check_names(schema, caller)
    given = session_or_connection
    if _is_for_asyncio(given):

        async def current_async() -> AsyncJobs:
            connection = given if _is_connection(given) else await given.connection()
            return await connection.run_sync(_client, AsyncJobs, schema, caller)

        return AsyncJoinedJobs(current_async, caller)
    if isinstance(given, Session | scoped_session | Connection):

        def current() -> Jobs:
            connection = given if isinstance(given, Connection) else given.connection()
            return _client(connection, Jobs, schema, caller)

        return JoinedJobs(current, caller)
    raise InvalidArgument(
        "session_or_connection must be a Session, a Connection, an AsyncSession or an "
        f"AsyncConnection of SQLAlchemy, not {kind(given)}"
    )


def _is_for_asyncio(given: object) -> TypeGuard[AsyncGiven]:
    return any(
        _is_of_asyncio(given, name)
        for name in ("AsyncSession", "async_scoped_session", "AsyncConnection")
    )


def _is_connection(given: object) -> TypeGuard[AsyncConnection]:
    return _is_of_asyncio(given, "AsyncConnection")


def _is_of_asyncio(given: object, name: str) -> bool:
    # Importing it needs greenlet, which an application without asyncio may lack.
    module = sys.modules.get("sqlalchemy.ext.asyncio")
    return isinstance(given, getattr(module, name, ()))


def _client(
    connection: Connection, kind_of: type[Client], schema: str, caller: str | None
) -> Client:
    """Return the client of the psycopg connection below, made once for each of them."""
    if not connection.in_transaction():
        # Without it SQLAlchemy's commit would send nothing, and the pool roll back.
        connection.begin()
    lent = connection.connection
    key = "lenso_jobs", schema, caller
    client: Client | None = lent.info.get(key)
    if client is None:
        driver = lent.driver_connection
        if not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
            raise InvalidArgument(
                f"the engine must use psycopg 3, not {kind(driver)}: give "
                "create_engine a URL that begins with postgresql+psycopg://"
            )
        client = lent.info[key] = kind_of(driver, schema, caller)  # type: ignore[arg-type]
    return client
