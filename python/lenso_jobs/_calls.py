"""The one table of calls: each function, its arguments with their checks, and its rows.

A new argument of a verb is an entry here, a line of its help at the end of the file, and
a parameter of the client's method. The batch form of a verb takes it from here.
"""

# ruff: noqa: ANN401 - what the clients are given is checked here

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from psycopg import sql
from psycopg.rows import BaseRowFactory, args_row, scalar_row, tuple_row

from lenso_jobs import _models as m
from lenso_jobs import _wire
from lenso_jobs.errors import (
    InvalidArgument,
    InvalidFailure,
    InvalidJob,
    InvalidLease,
    InvalidQueue,
    JobNotFound,
    JobsError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime
    from uuid import UUID


Row = TypeVar("Row")
Other = TypeVar("Other")
if TYPE_CHECKING:
    RowMaker: TypeAlias = BaseRowFactory[Row]
    Refusal: TypeAlias = type[JobsError]

ROLE = (
    b"select pg_catalog.set_config('lenso_jobs.role',"
    b" pg_catalog.current_setting('role'), true),"
    b" pg_catalog.set_config('role', %s, true)"
)
"""Puts a role in force for the transaction, and keeps the one before in a setting."""

ROLE_BEFORE = (
    b"select pg_catalog.set_config('role',"
    b" pg_catalog.current_setting('lenso_jobs.role'), true)"
)
"""Puts the role that was kept in force again."""


# Qualified, because a session may have names of its own before those of pg_catalog.
_SECONDS_UNTIL = (
    "pg_catalog.date_part('epoch',"
    " {} operator(pg_catalog.-) pg_catalog.clock_timestamp())"
)


class Argument(NamedTuple):
    """One argument: its type in SQL, its check, and its name for messages."""

    type: str
    check: Callable[[Any, Refusal, str], Any]
    name: str
    error: Refusal = InvalidArgument
    malformed: Any = None
    """What a batch sends for a value that its check refuses."""


@dataclass(eq=False, slots=True)
class Call(Generic[Row]):
    """A function of the Instance, its arguments in SQL's order, and what makes its rows.

    In *select* ``{call}`` is the call of the function, and ``{schema}`` the schema as a
    literal. The arguments of a batch are parallel arrays, the leases first.
    """

    function: str
    make: RowMaker[Row]
    arguments: Sequence[Argument]
    select: str = "select {call}"
    is_batch: bool = False
    _statements: dict[str, bytes] = field(default_factory=dict, init=False)

    def returning(self, make: RowMaker[Other]) -> Call[Other]:
        """The same call with other rows."""
        return replace(self, make=make)  # type: ignore[arg-type, return-value]

    def request(
        self, schema: str, values: Sequence[Any]
    ) -> tuple[bytes, Sequence[Any]]:
        """Return the statement for an Instance, and its checked and encoded arguments.

        The values of a batch are its items, and then the arguments that all items share.
        ``Argument.malformed`` takes the place of an item's value that PostgreSQL could
        not read. The server reports that item, and its neighbours are not affected.
        """
        statement = self._statements.get(schema) or self.statement(schema)
        if self.is_batch:
            return statement, self._columns(*values)
        return statement, _checked(self.arguments, values)

    def statement(self, schema: str) -> bytes:
        """Write the statement for an Instance, once."""
        name = sql.Identifier(schema).as_string(None).replace("%", "%%")
        # Casts: the types that the driver gives to values must not matter.
        cast = "%b::{}[]" if self.is_batch else "%s::{}"
        values = ", ".join(cast.format(a.type) for a in self.arguments)
        statement = self.select.format(
            call=f"{name}.{self.function}({values})",
            schema=sql.Literal(schema).as_string(None).replace("%", "%%"),
        ).encode()
        return self._statements.setdefault(schema, statement)

    def _columns(self, items: Iterable[Any] | None, *shared: object) -> Sequence[Any]:
        width = len(self.arguments) - len(shared)
        tail = _checked(self.arguments[width:], shared)
        if items is None:
            return [None] * len(self.arguments)
        are_leases = width == len(_LEASE)
        given = _listed(items, InvalidArgument, "leases" if are_leases else "failures")
        if are_leases and all(isinstance(item, m.LeasedJob) for item in given):
            # Those that claim returned need no check.
            claimed = [item._columns for item in given]  # noqa: SLF001 - our own
            columns = [[row[0] for row in claimed], [row[6] for row in claimed]]
        else:
            rows = [
                _item((i,) if are_leases else i, self.arguments[:width]) for i in given
            ]
            columns = [[row[n] for row in rows] for n in range(width)]
        return columns + [[value] * len(given) for value in tail]


def _checked(arguments: Sequence[Argument], values: Sequence[Any]) -> list[Any]:
    return [
        check(value, error, name)
        for (_, check, name, error, _), value in zip(arguments, values)  # noqa: B905 - quicker
    ]


def _item(item: Any, arguments: Sequence[Argument]) -> list[Any]:
    try:
        lease, *rest = item
    except (TypeError, ValueError):
        lease, rest = None, []
    try:
        key = lease_of(lease)
    except InvalidLease:
        key = None, None
    # The last arguments may be left out.
    padded = [*key, *rest, *[None] * len(arguments)]
    return [_or_malformed(a, padded[n]) for n, a in enumerate(arguments)]


def _or_malformed(argument: Argument, value: object) -> Any:
    try:
        return argument.check(value, argument.error, argument.name)
    except JobsError:
        return argument.malformed


def _listed(items: Iterable[Any], error: Refusal, argument: str) -> list[Any]:
    try:
        iterator = iter(items)
    except TypeError:
        raise error(f"{argument} must be an iterable") from None
    return list(iterator)


def lease_of(lease: m.Lease | None) -> tuple[UUID | str | None, str | None]:
    """Take the two arguments of a lease, or raise InvalidLease."""
    if lease is None:
        return None, None
    try:
        return lease.job_id, lease.lease_token
    except AttributeError:
        raise InvalidLease("lease must have a job_id and a lease_token") from None


def _documents(jobs: Iterable[Any] | None, error: Refusal, argument: str) -> str | None:
    if jobs is None:
        return None
    items = _listed(jobs, error, argument)
    return _wire.jobs([i.as_dict() if isinstance(i, m.NewJob) else i for i in items])


def _act(before: m.InspectedAct | None, error: Refusal, argument: str) -> int | None:
    if before is not None and not isinstance(before, m.InspectedAct):
        raise error(f"{argument} must be the last row of the page before")
    return None if before is None else before.act_id


def _columns_of(row: type[Any]) -> str:
    # By name, so that a later release may add columns while clients run.
    return f"select {', '.join(each.name for each in fields(row))} from {{call}}"  # noqa: S608 - our names


def _rows(function: str, row: type[Row], *arguments: Argument) -> Call[Row]:
    return Call(function, args_row(row), arguments, _columns_of(row))


def _value(function: str, *arguments: Argument) -> Call[Any]:
    return Call(function, scalar_row, arguments)


def _batch(verb: Call[Any], row: type[Row]) -> Call[Row]:
    function, select = f"{verb.function}_many", _columns_of(row)
    return Call(function, args_row(row), verb.arguments, select, is_batch=True)


_text = partial(Argument, "text", _wire.text)
_integer = partial(Argument, "integer", _wire.integer)
_instant = partial(Argument, "timestamptz", _wire.instant)
_uuid = partial(Argument, "uuid", _wire.job_id)

_JOB = _uuid("job_id", JobNotFound)
_LEASE = (_uuid("job_id", InvalidLease), _text("lease_token", InvalidLease))
_QUEUE = _text("queue", InvalidQueue)
_CODE = _text("failure_code", InvalidFailure)
_LIMIT = _integer("limit")

ENQUEUE = _rows(
    "enqueue",
    m.EnqueuedJob,
    _text("queue", InvalidJob),
    _text("kind", InvalidJob),
    Argument("jsonb", _wire.payload, "payload", InvalidJob),
    _text("idempotency_key", InvalidJob),
    _instant("available_at", InvalidJob),
    _integer("max_attempts", InvalidJob),
)
ENQUEUE_MANY = _rows(
    "enqueue_many", m.EnqueuedItem, Argument("jsonb", _documents, "jobs", InvalidJob)
)
# The payload in UTF-8, in any encoding of the connection. Times as epochs, which cost
# nothing to load. What is left of a lease is computed after its end was set.
CLAIM = Call(
    "claim",
    args_row(m.LeasedJob),
    (_QUEUE, _LIMIT),
    "select job_id, queue, kind, pg_catalog.convert_to(payload::text, 'UTF8'), attempt,"  # noqa: S608
    " max_attempts, lease_token, pg_catalog.date_part('epoch', lease_expires_at),"
    " pg_catalog.date_part('epoch', created_at),"
    f" {_SECONDS_UNTIL.format('lease_expires_at')} from {{call}}",
)
RENEW: Call[datetime] = _value("renew", *_LEASE)
RENEW_MANY = Call(
    "renew_many",
    args_row(m.RenewedItem),
    _LEASE,
    "select position, job_id, lease_expires_at, outcome,"  # noqa: S608
    f" {_SECONDS_UNTIL.format('lease_expires_at')} from {{call}}",
    is_batch=True,
)
COMPLETE: Call[bool] = _value("complete", *_LEASE)
COMPLETE_MANY = _batch(COMPLETE, m.CompletedItem)
FAIL = _rows(
    "fail",
    m.FailedJob,
    *_LEASE,
    _CODE,
    Argument("boolean", _wire.boolean, "retryable", InvalidFailure),
    Argument("integer", _wire.delay, "retry_after", InvalidFailure, -1),
)
FAIL_MANY = _batch(FAIL, m.FailedItem)
RELEASE = _rows(
    "release", m.FailedJob, *_LEASE, Argument("integer", _wire.delay, "delay")
)
RELEASE_MANY = _batch(RELEASE, m.FailedItem)
INSPECT = _rows("inspect", m.InspectedJob, _JOB)
INSPECT_KEY = _rows(
    "inspect_key",
    m.InspectedJob,
    _text("idempotency_key", JobNotFound),
    _text("producer", JobNotFound),
)
INSPECT_JOBS = _rows(
    "inspect_jobs",
    m.InspectedJob,
    *(_QUEUE, _text("status"), _text("kind"), _LIMIT, _uuid("before")),
)
INSPECT_ATTEMPTS = _rows("inspect_attempts", m.InspectedAttempt, _JOB)
INSPECT_QUEUES = _rows("inspect_queues", m.InspectedQueue)
INSPECT_WORKERS = _rows("inspect_workers", m.InspectedWorker)
INSPECT_FAILURES = _rows(
    "inspect_failures",
    m.InspectedFailure,
    *(_QUEUE, _instant("since"), _LIMIT, _CODE, _instant("before")),
    _uuid("before_job_id"),
    _text("kind"),
)
INSPECT_ACTS = _rows(
    "inspect_acts", m.InspectedAct, _LIMIT, Argument("bigint", _act, "before")
)
INSPECT_HEALTH = _rows("inspect_health", m.InspectedFinding)
EXPLAIN_JOB = _rows("explain_job", m.ExplainedJob, _JOB)
REDRIVE = _rows("redrive", m.FailedJob, _JOB, _integer("extra_attempts"))
REDRIVE_FAILED: Call[int] = _value(
    "redrive_failed",
    *(_QUEUE, _instant("since"), _instant("before"), _CODE, _LIMIT),
    _integer("extra_attempts"),
    _integer("over_seconds"),
    _text("kind"),
)
PURGE: Call[int] = _value("purge", _instant("before"), _LIMIT)
ENFORCE_RETENTION: Call[int] = _value("enforce_retention", _LIMIT)
RETIRE_EXPIRED: Call[int] = _value("retire_expired", _LIMIT)
PAUSE: Call[bool] = _value("pause", _QUEUE)
RESUME: Call[bool] = _value("resume", _QUEUE)
ERASE: Call[bool] = _value("erase", _JOB)
NEXT_AVAILABLE_AT: Call[datetime | None] = _value("next_available_at", _QUEUE)
# The seconds until then by the server's clock.
DUE_IN: Call[float | None] = Call(
    "next_available_at",
    scalar_row,
    (_QUEUE,),
    f"select {_SECONDS_UNTIL.format('{call}')}",
)
# Behind a transaction pooler the next statement may reach another process.
WAIT_STATE: Call[tuple[int | None, int, bool]] = Call(
    "wait_key",
    tuple_row,
    (_QUEUE,),
    "select {call}, pg_backend_pid(),"
    " {schema} = any (array(select pg_listening_channels()))",
)


class Cursors:
    """Makes the cursors of one client, and keeps those that are wanted again.

    With a kept cursor psycopg keeps the types of a statement, a tenth of the cost of a
    call for one job.
    """

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        self._kept: dict[Call[Any], Any] = {}
        self._encoding: bytes | None = None

    def of(self, connection: Any, call: Call[Any], *, keep: bool) -> Any:
        """Return a cursor for a call."""
        if keep:
            # A cursor goes on with the encoding it first met.
            encoding = connection.pgconn.parameter_status(b"client_encoding")
            if encoding != self._encoding:
                self._kept.clear()
                self._encoding = encoding
            if (kept := self._kept.get(call)) is not None:
                return kept
        # Not the connection's own cursor class: one that binds on the client knows no
        # binary results, which is what frees times from the session's DateStyle.
        cursor = self._kind(connection, row_factory=call.make)
        _wire.register_adapters(cursor)
        if keep:
            self._kept[call] = cursor
        return cursor


class Verbs:
    """The methods of both clients, as ``help`` and editors describe them.

    Each client overrides all of them, with their types.
    """

    def close(self, *_: Any, **__: Any) -> Any:
        """Close the pool that ``prepare`` opened.

        A connection or pool of yours stays open, and its transaction as it was.
        """

    def enqueue(self, *_: Any, **__: Any) -> Any:
        """Enqueue one job.

        On a connection the job exists once you commit. If the result was lost, repeat
        the call: the same key with the same arguments returns the first job.

        Args:
            queue: A declared queue.
            kind: 1 to 256 characters of ``A-Z a-z 0-9 . _ : / -``.
            payload: A JSON object of at most 262,144 bytes as text.
            idempotency_key: 1 to 256 characters, as *kind*; unique to the producer.
            available_at: An aware time; the job is not claimed before. None: at once.
            max_attempts: 1 to 100. A crash is an attempt.

        Returns:
            The job, and whether this call created it.

        Raises:
            InvalidJob: An argument is out of bounds. Nothing was written.
            IdempotencyConflict: The key was used for another intent.
            Unauthorized: The role is not a declared producer.
        """

    def enqueue_many(self, *_: Any, **__: Any) -> Any:
        """Enqueue 1 to 1,000 jobs: ``NewJob`` values, or mappings with the same fields.

        Returns:
            One item for each job, in the same order. An ``invalid_job``, or a
            ``conflict`` with the intent of the same key, affects no other job.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
            Unauthorized: The role is not a declared producer.
        """

    def claim(self, *_: Any, **__: Any) -> Any:
        """Lease due jobs. Commit before you work on them: the leases are running.

        Args:
            queue: A declared queue.
            limit: The most jobs to lease, 1 to 1,000.
            wait: How many seconds to wait for a job if none is due, as ``wait`` does.

        Returns:
            Up to *limit* jobs; an empty list if none is due.

        Raises:
            InvalidQueue: The queue is not declared.
            InvalidArgument: *limit* or *wait* is out of range.
            Unauthorized: The role is not a declared worker.
        """

    def wait(self, *_: Any, **__: Any) -> Any:
        """Wait until a job of a queue is due.

        On a pool the wait has a connection to itself. It listens for notifications. It
        also looks after 20, 50, 100 ms and so on, at least every 10 seconds, and when
        the next job falls due. No other call can use the connection meanwhile, and only
        its handlers see other notifications.

        It cannot listen within a transaction or a pipeline, on a connection without
        autocommit, behind a transaction pooler, or if the document says
        ``notify: false``. It then looks at least once a second.

        Args:
            queue: A declared queue.
            timeout: The longest wait in seconds, 0 or more.

        Returns:
            Whether a job is due.

        Raises:
            InvalidQueue: The queue is not declared.
            InvalidArgument: *timeout* is out of range.
        """

    def renew(self, *_: Any, **__: Any) -> Any:
        """Extend a lease by the Instance's lease length, counted from now.

        Returns:
            The new end of the lease.

        Raises:
            InvalidLease: It has expired, was superseded or has ended: stop working.
        """

    def renew_many(self, *_: Any, **__: Any) -> Any:
        """Extend 1 to 1,000 leases.

        Returns:
            One item for each lease, in the same order.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
        """

    def complete(self, *_: Any, **__: Any) -> Any:
        """End a job as succeeded.

        On a connection, what the job wrote and its end are committed together.

        Returns:
            True, also if repeated under the same lease.

        Raises:
            InvalidLease: It has expired or was superseded: discard the result.
        """

    def complete_many(self, *_: Any, **__: Any) -> Any:
        """End 1 to 1,000 jobs as succeeded.

        Returns:
            One item for each lease, in the same order.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
        """

    def fail(self, *_: Any, **__: Any) -> Any:
        """Record a failed attempt.

        Args:
            lease: The lease of the attempt.
            failure_code: 1 to 128 characters of ``A-Z a-z 0-9 . _ : / -``, stable and
                without secrets: observers read it.
            retryable: Whether another attempt may help.
            retry_after: How long a retry waits, as a server asked: a timedelta, or
                seconds from 0, rounded up. Never longer than ``retry_max_seconds``.
                None for the wait of the policy.

        Returns:
            Whether the job is queued again and when it is due, or that it has failed.

        Raises:
            InvalidFailure: *failure_code*, *retryable* or *retry_after* is malformed.
            InvalidLease: It has expired or was superseded. Nothing was recorded.
        """

    def fail_many(self, *_: Any, **__: Any) -> Any:
        """Record 1 to 1,000 failed attempts: ``Failure`` values, or tuples of the same.

        Returns:
            One item for each failure, in the same order.

        Raises:
            InvalidArgument: There are none, or more than 1,000.
        """

    def release(self, *_: Any, **__: Any) -> Any:
        """Give a lease back without using up the attempt, at most 100 times a job.

        Args:
            lease: The lease of a job that was not begun.
            delay: When the job is due again: a timedelta, or seconds from 0 to 86,400,
                rounded up. With 0 it keeps its place in the queue.

        Returns:
            When the job is due.

        Raises:
            InvalidLease: It has expired, was superseded or has ended.
            InvalidArgument: *delay* is out of range, or the job was released 100 times.
        """

    def release_many(self, *_: Any, **__: Any) -> Any:
        """Give 1 to 1,000 leases back with the same delay, as ``release`` does.

        Returns:
            One item for each lease, in the same order.

        Raises:
            InvalidArgument: There are none, or more than 1,000; or *delay* is malformed.
        """

    def inspect(self, *_: Any, **__: Any) -> Any:
        """Read the durable evidence of one job.

        Returns:
            The evidence, without payload and key.

        Raises:
            JobNotFound: No such job. It may be purged or erased.
        """

    def inspect_key(self, *_: Any, **__: Any) -> Any:
        """Read the durable evidence of the job that has an idempotency key.

        Args:
            idempotency_key: The key.
            producer: The producer that enqueued the job. None for the caller itself.

        Returns:
            The evidence, as ``inspect`` returns it.

        Raises:
            JobNotFound: No such job, or the caller may not see that producer's jobs.
        """

    def inspect_jobs(self, *_: Any, **__: Any) -> Any:
        """List jobs of a queue, newest first, without payloads and keys.

        A call looks at 10,000 jobs at most, so a page may be short although more jobs
        follow. Continue until ``next_before`` of the page is None.

        Args:
            queue: A declared queue.
            status: ``queued``, ``running``, ``succeeded``, ``failed`` or ``lost``.
            kind: The kind. None for any.
            limit: 1 to 10,000.
            before: ``next_before`` of the previous page: only older jobs are listed.

        Returns:
            A list of the jobs with the attribute ``next_before``.

        Raises:
            InvalidQueue: The queue is not declared.
            InvalidArgument: *status* or *kind* is malformed, or *limit* out of range.
            Unauthorized: The role is no observer and no operator.
        """

    def inspect_attempts(self, *_: Any, **__: Any) -> Any:
        """Read the history of one job.

        Returns:
            Its attempts in order; a running one is the last.

        Raises:
            JobNotFound: No such job. It may be purged or erased.
            Unauthorized: The role is no observer and no operator.
        """

    def inspect_queues(self, *_: Any, **__: Any) -> Any:
        """Count the live jobs of each queue by state, and how the last ones ended.

        Returns:
            Each queue that is declared or has live jobs. A call reads up to 64 MB of
            jobs: ask every few seconds at most.

        Raises:
            Unauthorized: The role is no observer and no operator.
        """

    def inspect_workers(self, *_: Any, **__: Any) -> Any:
        """Count the leases and the sessions of each worker; reads as ``inspect_queues``.

        Returns:
            Each declared worker, and each that still holds leases.

        Raises:
            Unauthorized: The role is no observer and no operator.
        """

    def inspect_failures(self, *_: Any, **__: Any) -> Any:
        """List the jobs that have failed and were not redriven.

        Args:
            queue: A declared queue. None for all.
            since: An aware time; jobs that failed before it are left out.
            limit: 1 to 10,000.
            failure_code: The last failure code. None for any.
            before: The last row of the previous page; or an aware time, for the jobs
                that failed before it.
            kind: The kind. None for any.

        Returns:
            The jobs, newest failure first.

        Raises:
            InvalidQueue: The queue is not declared.
            InvalidFailure: *failure_code* is malformed.
            InvalidArgument: *limit* is out of range, or a time is naive.
            Unauthorized: The role is no observer and no operator.
        """

    def inspect_acts(self, *_: Any, **__: Any) -> Any:
        """Read the audit of what operators did.

        Args:
            limit: 1 to 10,000.
            before: The last row of the previous page, for the next page.

        Returns:
            The acts, newest first.

        Raises:
            InvalidArgument: *limit* is out of range, or *before* is not such a row.
            Unauthorized: The role is no observer and no operator.
        """

    def inspect_health(self, *_: Any, **__: Any) -> Any:
        """List what is wrong with the Instance, a table that a session locks included.

        Returns:
            The findings, worst first; an empty list if nothing is wrong.

        Raises:
            Unauthorized: The role is no observer and no operator.
        """

    def explain_job(self, *_: Any, **__: Any) -> Any:
        """Say why a job is not being claimed. Changes and locks nothing.

        Returns:
            The reason and what to do, also for a job that does not exist.

        Raises:
            JobNotFound: *job_id* is not a UUID.
            Unauthorized: The role is no observer and no operator.
        """

    def redrive(self, *_: Any, **__: Any) -> Any:
        """Queue a failed job again, due at once; its history and fencing token go on.

        Args:
            job_id: The job.
            extra_attempts: How many more attempts it gets, 1 to 100.

        Returns:
            When the job is due.

        Raises:
            JobNotFound: No such job.
            InvalidArgument: It has not failed, or *extra_attempts* is out of range.
            Unauthorized: The role is not an operator.
        """

    def redrive_failed(self, *_: Any, **__: Any) -> Any:
        """Queue failed jobs of a queue again, oldest failure first.

        In a loop, pass the same *before*, or a job that fails again is queued again.

        Args:
            queue: A declared queue.
            since: An aware time; jobs that failed before it are left out.
            before: An aware time; jobs that failed then or later are left out.
            failure_code: The last failure code. None for any.
            limit: 1 to 10,000.
            extra_attempts: How many more attempts each gets, 1 to 100.
            over_seconds: The jobs fall due evenly over so many seconds, 0 to 86,400,
                with later jobs between them. With 0 they are due at once, before those.
            kind: The kind. None for any.

        Returns:
            How many jobs were queued.

        Raises:
            InvalidQueue: The queue is not declared.
            InvalidFailure: *failure_code* is malformed.
            InvalidArgument: A number is out of range, or a time is naive.
            Unauthorized: The role is not an operator.
        """

    def purge(self, *_: Any, **__: Any) -> Any:
        """Delete ended jobs with their evidence and keys, oldest end first.

        Args:
            before: An aware time that has passed; jobs that ended later are kept.
            limit: 1 to 10,000. Call again until 0 is returned.

        Returns:
            How many jobs were deleted.

        Raises:
            InvalidArgument: *before* is naive or yet to come, or *limit* out of range.
            Unauthorized: The role is not an operator.
        """

    def enforce_retention(self, *_: Any, **__: Any) -> Any:
        """Delete jobs that ended longer than ``retention_seconds`` ago.

        Args:
            limit: 1 to 10,000. Call again until fewer are deleted.

        Returns:
            How many jobs were deleted; 0 if the document sets no ``retention_seconds``.

        Raises:
            InvalidArgument: *limit* is out of range.
            Unauthorized: The role is not an operator.
        """

    def retire_expired(self, *_: Any, **__: Any) -> Any:
        """End jobs whose last attempt's lease has expired, as claims do.

        Args:
            limit: 1 to 10,000. Each call reads all live jobs: do not loop.

        Returns:
            How many jobs were ended.

        Raises:
            InvalidArgument: *limit* is out of range.
            Unauthorized: The role is not an operator.
        """

    def pause(self, *_: Any, **__: Any) -> Any:
        """Stop claims of a queue until ``resume``.

        Running jobs go on, and producers enqueue as before.

        Returns:
            True; False if the queue was paused already.

        Raises:
            InvalidQueue: The queue is not declared.
            Unauthorized: The role is not an operator.
        """

    def resume(self, *_: Any, **__: Any) -> Any:
        """Let workers claim jobs of a paused queue again, and wake those that wait.

        Returns:
            True; False if the queue was not paused.

        Raises:
            InvalidQueue: The queue is not declared.
            Unauthorized: The role is not an operator.
        """

    def erase(self, *_: Any, **__: Any) -> Any:
        """Delete one job that has ended, with its payload, evidence and key.

        Returns:
            True.

        Raises:
            JobNotFound: No such job.
            InvalidArgument: It is queued or running.
            Unauthorized: The role is not an operator.
        """

    def next_available_at(self, *_: Any, **__: Any) -> Any:
        """Read when the next job of a queue falls due, expiring leases included.

        Returns:
            The time; None if the queue is empty or paused. With thousands of running jobs this
            takes milliseconds: call it when idle.

        Raises:
            InvalidQueue: The queue is not declared.
        """
