"""A session on an Instance, for those who look after it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs import InspectedFinding, Jobs, Unauthorized, _wire
from lenso_jobs._prepare import SCHEMA_VERSION, become, installed_version, verify
from lenso_jobs.cli import _options
from lenso_jobs.operator._migrations import released

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from pathlib import Path

    from lenso_jobs.config import Configuration

# Whoever looks must not wait with everybody else, nor for a network that is gone.
_LOCK_TIMEOUT = b"set local lock_timeout = '2s'"
_PATIENCE = {"connect_timeout": "10", "tcp_user_timeout": "20000"}


@dataclass(frozen=True, slots=True)
class Instance:
    """One Instance, on one connection; statements commit by themselves."""

    configuration: Configuration
    connection: psycopg.Connection[Any]
    caller: str | None
    jobs: Jobs

    def now(self) -> datetime:
        """Tell the server's time."""
        with psycopg.Cursor(self.connection) as cursor:
            _wire.register_adapters(cursor)
            cursor.execute("select clock_timestamp()", binary=True)
            row: tuple[datetime] | None = cursor.fetchone()
        assert row is not None  # noqa: S101 - a select of one row
        return row[0]

    def version(self) -> int:
        """Tell which version the schema is at.

        Raises:
            SchemaNotReady: There is none, or the role may not look.
        """
        with self.connection.transaction():
            if self.caller is not None:
                become(self.connection, self.caller)
            return installed_version(self.connection, self.configuration.schema_)

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Do what reads in one transaction, and fail with 55P03 rather than wait."""
        with self.connection.transaction():
            self.connection.execute(_LOCK_TIMEOUT)
            yield

    def findings(self) -> list[InspectedFinding]:
        """List what is wrong, also where this release and the schema do not agree.

        Raises:
            SchemaNotReady: There is no Instance, or the role may not look.
        """
        found = list(_of_the_version(self.version(), self.configuration.schema_))
        try:
            with self.without_waiting():
                return [*found, *self.jobs.inspect_health()]
        except psycopg.ProgrammingError as error:
            if not found:
                found = [_damage(error)]
            return found


def _of_the_version(version: int, schema: str) -> Iterator[InspectedFinding]:
    if version == SCHEMA_VERSION:
        return
    is_older = version < SCHEMA_VERSION
    detail = f"at version {version}, and this release is made for {SCHEMA_VERSION}"
    if is_older:
        pending = [each.name for each in released() if each.number > version]
        detail += f"; pending: {', '.join(pending)}"
    yield InspectedFinding(
        "critical",
        "schema_older" if is_older else "schema_newer",
        f"schema {schema}",
        None,
        detail,
        "lenso-jobs upgrade"
        if is_older
        else "Install the release of lenso-jobs that the schema was migrated with.",
    )


def _damage(error: psycopg.Error) -> InspectedFinding:
    return InspectedFinding(
        "critical",
        "object_changed",
        "function inspect_health",
        None,
        error.diag.message_primary,
        "lenso-jobs check says what mends it.",
    )


@contextmanager
def opened(
    config: Path,
    secrets_dir: Path | None,
    caller: str | None,
    *,
    verifying: bool = True,
) -> Iterator[Instance]:
    """Open a session on the Instance of a document, also through a pooler.

    Raises:
        SchemaNotReady: *verifying*, and it is not as this release needs it.
        Unauthorized: By what is done in the session; says what role it takes.
    """
    configuration, conninfo = _options.load(config, secrets_dir)
    parameters: dict[str, Any] = {
        **_PATIENCE,
        "fallback_application_name": "lenso-jobs",
        **conninfo_to_dict(conninfo),
    }
    with psycopg.connect(
        autocommit=True, prepare_threshold=None, **parameters
    ) as connection:
        if verifying:
            verify(connection, configuration, caller)
        jobs = Jobs(connection, configuration.schema_, caller)
        try:
            yield Instance(configuration, connection, caller, jobs)
        except Unauthorized as error:
            error.hint = error.hint or (
                "Act as one of observer_instances, or as a member of "
                f"{configuration.prefix}_operator, who alone may change jobs: log in as "
                "it, or name it by --caller."
            )
            raise
