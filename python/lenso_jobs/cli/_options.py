"""The options that commands share, and the session they open with them."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

import lenso_jobs
from lenso_jobs.cli._screen import UNITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from lenso_jobs import InspectedFinding, Jobs
    from lenso_jobs._prepare import Installed
    from lenso_jobs.config import Configuration

_LONGEST_SPREAD = 86_400


@dataclass(frozen=True, slots=True)
class Moment:
    """A time on the command line: an instant, or an age by the server's clock."""

    given: datetime | timedelta

    def at(self, now: datetime) -> datetime:
        """Return the instant."""
        if isinstance(self.given, datetime):
            return self.given
        try:
            return now - self.given
        except OverflowError:
            raise typer.BadParameter("that is before the year 1") from None


def moment(text: str) -> Moment:
    """Read an RFC 3339 time, or an age such as 90s, 30m, 12h, 7d, 2w."""
    # So many weeks are within what a timedelta holds.
    age = re.fullmatch(r"(\d{1,7})([smhdw])", text)
    if age:
        return Moment(timedelta(seconds=int(age[1]) * UNITS[age[2]]))
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.utcoffset() is None:
        raise typer.BadParameter(
            f"{text} is neither a time with an offset, such as 2026-01-31T18:00:00Z, "
            "nor an age, such as 90s, 30m, 12h, 7d or 2w"
        )
    return Moment(instant)


def age(text: str) -> Moment:
    """Read an age, and no instant."""
    found = moment(text)
    if isinstance(found.given, datetime):
        raise typer.BadParameter(f"{text} is no age, such as 90s, 30m, 12h, 7d or 2w")
    return found


def instant(text: str) -> datetime:
    """Read an RFC 3339 time, and no age: the same command must ask for the same job."""
    try:
        found = moment(text).given
    except typer.BadParameter:
        found = None
    if not isinstance(found, datetime):
        raise typer.BadParameter(
            f"{text} is no time with an offset, such as 2026-01-31T18:00:00Z"
        )
    return found


def spread(given: str | int) -> int:
    """Read over how many seconds jobs fall due, as redrive_failed takes it."""
    if not re.fullmatch("[0-9]{1,5}", str(given)) or int(given) > _LONGEST_SPREAD:
        raise typer.BadParameter(
            f"{given} is not a whole number of seconds from 0 to {_LONGEST_SPREAD}"
        )
    return int(given)


_CONFIG = typer.Option(
    "--config",
    envvar="LENSO_JOBS_CONFIG",
    show_envvar=False,
    metavar="FILE",
    help="The Instance's JSON document; else the file that the environment variable "
    "`LENSO_JOBS_CONFIG` names.",
)
Config = Annotated[Path, _CONFIG]
MaybeConfig = Annotated[Path | None, _CONFIG]
Fleet = Annotated[
    Path,
    typer.Option(
        "--fleet",
        envvar="LENSO_JOBS_FLEET",
        show_envvar=False,
        metavar="FILE",
        help="The fleet's JSON document; else the file that the environment variable "
        "`LENSO_JOBS_FLEET` names.",
    ),
]
MaybeFleet = Annotated[
    Path | None,
    typer.Option(
        "--fleet",
        envvar="LENSO_JOBS_FLEET",
        show_envvar=False,
        metavar="FILE",
        help="Instead: a fleet's JSON document; else the file that the environment "
        "variable `LENSO_JOBS_FLEET` names.",
    ),
]
SecretsDir = Annotated[
    Path | None,
    typer.Option(
        "--secrets-dir",
        metavar="DIR",
        help="Read secrets from files below DIR. Without it they are read from the "
        "environment: `jobs/database-url` is `JOBS_DATABASE_URL`.",
    ),
]
Caller = Annotated[
    str | None,
    typer.Option("--caller", metavar="ROLE", help="Act as this role, by SET ROLE."),
]
DropQueues = Annotated[
    bool,
    typer.Option(
        "--drop-queues",
        help="Drop queues that the document leaves out even if they have live jobs. "
        "Those jobs stay, and wait until their queue is declared again.",
    ),
]
Repair = Annotated[
    bool,
    typer.Option(
        "--repair",
        help="Then restore roles, functions, triggers, indexes and grants of this "
        "release. Drops no table and no row.",
    ),
]
BreakLock = Annotated[
    bool,
    typer.Option(
        "--break-lock",
        help="Remove the migration lock that a killed process left behind.",
    ),
]
ThroughPooler = Annotated[
    bool,
    typer.Option(
        "--through-pooler",
        help="Connect through a pooler. Use it only if the pooler keeps one server "
        "session for each connection (PgBouncer: pool_mode = session).",
    ),
]
JobId = Annotated[UUID, typer.Argument(metavar="JOB_ID", help="The job's UUID.")]
Since = Annotated[
    Moment | None,
    typer.Option(
        parser=moment,
        metavar="TIME",
        help="Jobs that failed since then: a time with an offset, such as "
        "2026-01-31T18:00:00Z, or an age, such as 30m, 12h, 7d.",
    ),
]
Before = Annotated[
    Moment | None,
    typer.Option(
        parser=moment,
        metavar="TIME",
        help="Jobs that ended before then: a time with an offset, or an age.",
    ),
]
Code = Annotated[
    str | None, typer.Option(metavar="CODE", help="Jobs with this failure code.")
]
Kind = Annotated[str | None, typer.Option(metavar="KIND", help="Jobs of this kind.")]
Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="A declared queue.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Count the jobs, and change nothing.")
]
Pause = Annotated[
    float,
    typer.Option(min=0.0, metavar="SECONDS", help="Wait so long between two calls."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def either(context: typer.Context, **given: Path | None) -> tuple[Path | None, ...]:
    """Return these options with None for all but one, the one that was given.

    The command line counts before the environment.
    """
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        typed = {
            name
            for name in named
            if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        }
        named = [name for name in named if name in typed] or named
    if len(named) != 1:
        raise typer.BadParameter(
            f"{len(named) or 'none'} of them given, and the command needs one",
            param_hint=" or ".join(f"--{name}" for name in given),
        )
    return tuple(value if name in named else None for name, value in given.items())


def resolver(secrets_dir: Path | None) -> Callable[[str], str]:
    """Return the resolver of secrets that the options choose."""
    if secrets_dir is None:
        return lenso_jobs.EnvironmentSecrets()
    return lenso_jobs.DirectorySecrets(secrets_dir)


def load(config: Path, secrets_dir: Path | None) -> tuple[Configuration, str]:
    """Return the document, and the connection string that its secret holds."""
    from lenso_jobs._prepare import connection_string

    configuration = lenso_jobs.Configuration.from_file(config)
    return configuration, connection_string(configuration, resolver(secrets_dir))


@dataclass(frozen=True, slots=True)
class Instance:
    """One Instance on one connection in autocommit mode."""

    configuration: Configuration
    connection: psycopg.Connection[Any]
    caller: str | None
    jobs: Jobs

    @contextmanager
    def _as_caller(self) -> Iterator[None]:
        from lenso_jobs._prepare import become

        with self.connection.transaction():
            if self.caller is not None:
                become(self.connection, self.caller)
            yield

    def now(self) -> datetime:
        """Return the server's time."""
        # As a number: a session's settings may write a time in any form.
        statement = "select date_part('epoch', clock_timestamp())::float8"
        ((seconds,),) = self.connection.execute(statement).fetchall()
        return datetime.fromtimestamp(seconds, UTC)

    def version(self) -> Installed:
        """Return which schema is installed."""
        from lenso_jobs._prepare import installed_version

        with self._as_caller():
            return installed_version(self.connection, self.configuration.schema_)

    def require(self, function: str) -> None:
        """Check a right before anything is printed, asked or done, or raise Unauthorized."""
        with self._as_caller():
            refused = self.connection.execute(
                "select from pg_proc as p where p.proname = %s"
                " and p.pronamespace = to_regnamespace(quote_ident(%s))"
                " and not has_function_privilege(p.oid, 'execute')",
                (function, self.configuration.schema_),
            ).fetchone()
        if refused is not None:
            message = f"permission denied for function {function}"
            raise lenso_jobs.Unauthorized(message)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Roll back what is done within. The router of a fleet cannot, and is refused."""
        from lenso_jobs._prepare import is_router

        if is_router(self.connection, self.configuration.schema_):
            raise lenso_jobs.InvalidArgument(
                "this is the router of a fleet, and cannot take back what shards did",
                hint="To count before you act, use a document whose "
                "database_url_secret is a shard. To act at the router, pass --yes.",
            )
        with self.connection.transaction(force_rollback=True):
            yield

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Read in one transaction that fails with 55P03 rather than wait 2 s."""
        with self.connection.transaction():
            self.connection.execute("set local lock_timeout = '2s'")
            yield

    def findings(self) -> list[InspectedFinding]:
        """Return the findings of inspect_health, even if the Instance is damaged."""
        import psycopg

        found = self._of_the_version()
        try:
            with self.without_waiting():
                return [*found, *self.jobs.inspect_health()]
        except (lenso_jobs.Unauthorized, psycopg.ProgrammingError) as error:
            if not (isinstance(error, psycopg.Error) or _is_of_the_owner(error)):
                raise
            said = str(error).partition("\n")[0]
            subject = "function inspect_health"
            remedy = "Run lenso-jobs check: it says what to do."
            return found or [_critical("object_changed", subject, said, remedy)]

    def _of_the_version(self) -> list[InspectedFinding]:
        from lenso_jobs._prepare import SCHEMA_VERSION, version_fault

        installed, schema = self.version(), self.configuration.schema_
        fault = version_fault(schema, installed)
        if fault is None:
            return []
        is_older = installed.version < SCHEMA_VERSION
        finding = "schema_older" if is_older else "schema_newer"
        return [_critical(finding, f"schema {schema}", *fault)]


def _critical(finding: str, subject: str, detail: str, remedy: str) -> InspectedFinding:
    return lenso_jobs.InspectedFinding(
        "critical", finding, subject, None, detail, remedy
    )


def _is_of_the_owner(error: BaseException) -> bool:
    """Return whether the right is missing inside a function: the owner lacks it."""
    diag = getattr(error.__cause__, "diag", None)
    return bool(diag and diag.context)


@contextmanager
def opened(
    config: Path,
    secrets_dir: Path | None,
    caller: str | None,
    *,
    queue: str | None = None,
    verified: bool = True,
) -> Iterator[Instance]:
    """Open a session on the Instance of a document; a pooler may be in between.

    Refuse an Instance that is not as this release needs it, if it is to be *verified*.
    A refusal of the *queue* names it.
    """
    given = load(config, secrets_dir)
    with opened_on(*given, caller, queue=queue, verified=verified) as instance:
        yield instance


@contextmanager
def opened_on(
    configuration: Configuration,
    conninfo: str,
    caller: str | None,
    *,
    queue: str | None = None,
    verified: bool = True,
) -> Iterator[Instance]:
    """Do as ``opened`` with a document and a URL that are loaded."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    from lenso_jobs._prepare import verify

    parameters: dict[str, Any] = {
        "connect_timeout": "10",
        "tcp_user_timeout": "20000",
        "fallback_application_name": "lenso-jobs",
        **conninfo_to_dict(conninfo),
    }
    with psycopg.connect(
        autocommit=True, prepare_threshold=None, **parameters
    ) as connection:
        if verified:
            verify(connection, configuration, caller)
        jobs = lenso_jobs.Jobs(connection, configuration.schema_, caller)
        with hinting(configuration, *filter(None, [queue])):
            yield Instance(configuration, connection, caller, jobs)


@contextmanager
def hinting(configuration: Configuration, *queues: str) -> Iterator[None]:
    """Add to a refusal which role may, which queues are there, or that it is damaged."""
    try:
        yield
    except lenso_jobs.InvalidQueue as error:
        strange = [each for each in queues if each not in configuration.queues]
        error.args = (f"queue {', '.join(strange or queues)} is not declared",)
        if "Did you mean" not in (error.hint or ""):
            some = ", ".join(configuration.queues[:10])
            error.hint = f"Queues of the document are {some}."
        raise
    except lenso_jobs.Unauthorized as error:
        error.hint = error.hint or (
            "The Instance's owner has lost a right to its own objects: run "
            "lenso-jobs check."
            if _is_of_the_owner(error)
            else "Act as one of observer_instances. Only a member of "
            f"{configuration.prefix}_operator may change jobs. Log in as the role, or "
            "name it with --caller."
        )
        raise
