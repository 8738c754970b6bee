"""A call under a caller in one round trip, for the client that blocks.

A task that is cancelled would leave its connection in pipeline mode, so the client for
asyncio sends the same statements in turn.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from lenso_jobs import _calls

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def pipelined(
    connection: psycopg.Connection[Any], caller: str
) -> Iterator[psycopg.Connection[Any]]:
    """Put a role in force for one call, and then the role before it.

    If no transaction is in progress and the connection commits by itself, the call is a
    transaction. If it fails, so does its transaction, and the rollback puts the role
    back.
    """
    is_whole = connection.autocommit and (
        connection.info.transaction_status is TransactionStatus.IDLE
    )
    was = connection.info.pipeline_status
    failure: BaseException | None = None
    try:
        with connection.pipeline(), psycopg.Cursor(connection) as cursor:
            try:
                if is_whole:
                    # Without it psycopg could not report a commit that fails.
                    cursor.execute("begin")
                cursor.execute(_calls.ROLE, (caller,))
                yield connection
                cursor.execute(b"commit" if is_whole else _calls.ROLE_BEFORE)
            except BaseException as error:  # noqa: BLE001 - raised below
                # Raised here, it would make psycopg log the end of the pipeline.
                failure = error
                status = connection.info.pipeline_status
                if not is_whole and status is PipelineStatus.ON:
                    with suppress(psycopg.Error):
                        cursor.execute(_calls.ROLE_BEFORE)
    except BaseException as error:  # noqa: BLE001 - raised below
        failure = failure or error
    if failure is not None:
        if was is PipelineStatus.OFF and connection.info.pipeline_status is not was:
            connection.close()  # interrupted: psycopg cannot leave pipeline mode
        elif is_whole and not connection.closed:
            connection.rollback()
        raise failure
