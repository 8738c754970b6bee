"""The SQL text of each call, once, for every client.

Parameters are cast, so that a call means the same function whatever the driver makes
of a value.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from psycopg import sql

from lenso_jobs import _models


@dataclass(frozen=True, slots=True)
class Calls:
    """The statements of one Instance."""

    enqueue: bytes
    enqueue_many: bytes
    claim: bytes
    renew: bytes
    renew_many: bytes
    complete: bytes
    complete_many: bytes
    fail: bytes
    fail_many: bytes
    inspect: bytes
    inspect_attempts: bytes
    inspect_queues: bytes
    inspect_workers: bytes
    inspect_failures: bytes
    inspect_acts: bytes
    inspect_health: bytes
    explain_job: bytes
    redrive: bytes
    redrive_failed: bytes
    purge: bytes
    enforce_retention: bytes
    retire_expired: bytes
    next_available_at: bytes
    due_in: bytes
    wait_state: bytes
    hold: bytes
    prolong: bytes
    end: bytes
    end_badly: bytes


def _every(answer: type[Any]) -> str:
    """Name the columns, so that a later release may add some while clients run."""
    names = ", ".join(field.name for field in fields(answer))
    return f"select {names} from "  # noqa: S608 - the names are ours


_TEMPLATES = {
    "enqueue": _every(_models.EnqueuedJob) + "{}.enqueue("
    "%s::text, %s::text, %s::jsonb, %s::text, %s::timestamptz, %s::integer)",
    "enqueue_many": _every(_models.EnqueuedItem) + "{}.enqueue_many(%s::jsonb)",
    # A payload in UTF-8, whatever the connection can say of it.
    "claim": "select c.job_id, c.queue, c.kind,"
    " pg_catalog.convert_to(c.payload::text, 'UTF8'),"
    " c.attempt, c.max_attempts, c.lease_token, c.lease_expires_at, c.created_at"
    " from {}.claim(%s::text, %s::integer) as c",
    "renew": "select {}.renew(%s::uuid, %s::text)",
    "renew_many": _every(_models.RenewedItem) + "{}.renew_many(%b::uuid[], %b::text[])",
    "complete": "select {}.complete(%s::uuid, %s::text)",
    "complete_many": _every(_models.CompletedItem)
    + "{}.complete_many(%b::uuid[], %b::text[])",
    "fail": _every(_models.FailedJob)
    + "{}.fail(%s::uuid, %s::text, %s::text, %s::boolean)",
    "fail_many": _every(_models.FailedItem) + "{}.fail_many("
    "%b::uuid[], %b::text[], %b::text[], %b::boolean[])",
    "inspect": _every(_models.InspectedJob) + "{}.inspect(%s::uuid)",
    "inspect_attempts": _every(_models.InspectedAttempt)
    + "{}.inspect_attempts(%s::uuid)",
    "inspect_queues": _every(_models.InspectedQueue) + "{}.inspect_queues()",
    "inspect_workers": _every(_models.InspectedWorker) + "{}.inspect_workers()",
    "inspect_failures": _every(_models.InspectedFailure) + "{}.inspect_failures("
    "%s::text, %s::timestamptz, %s::integer, %s::text, %s::timestamptz, %s::uuid)",
    "inspect_acts": _every(_models.InspectedAct)
    + "{}.inspect_acts(%s::integer, %s::bigint)",
    "inspect_health": _every(_models.InspectedFinding) + "{}.inspect_health()",
    "explain_job": _every(_models.ExplainedJob) + "{}.explain_job(%s::uuid)",
    "redrive": _every(_models.FailedJob) + "{}.redrive(%s::uuid, %s::integer)",
    "redrive_failed": "select {}.redrive_failed(%s::text, %s::timestamptz,"
    " %s::timestamptz, %s::text, %s::integer, %s::integer)",
    "purge": "select {}.purge(%s::timestamptz, %s::integer)",
    "enforce_retention": "select {}.enforce_retention(%s::integer)",
    "retire_expired": "select {}.retire_expired(%s::integer)",
    "next_available_at": "select {}.next_available_at(%s::text)",
    # What is left until then by the server's clock, in seconds.
    "due_in": "select date_part('epoch',"
    " {}.next_available_at(%s::text) - clock_timestamp())",
    # Behind a transaction pooler the process is not the one that answered at first.
    "wait_state": "select {}.wait_key(%s::text), pg_backend_pid(),"
    " %s::text = any (array(select pg_listening_channels()))",
    # A worker's own, with nothing in them that costs time to read. What is left of a
    # lease is told by the server's clock, after its end was set: counted from before the
    # call it is never too long, whatever the client's clock says.
    "hold": "select c.job_id, c.queue, c.kind, c.payload::text, c.attempt,"
    " c.max_attempts, c.lease_token, date_part('epoch', c.lease_expires_at),"
    " date_part('epoch', c.created_at),"
    " date_part('epoch', c.lease_expires_at - clock_timestamp())"
    " from {}.claim(%s::text, %s::integer) as c",
    "prolong": "select r.outcome, date_part('epoch', r.lease_expires_at),"
    " date_part('epoch', r.lease_expires_at - clock_timestamp())"
    " from {}.renew_many(%b::uuid[], %b::text[]) as r order by r.position",
    "end": "select c.outcome from {}.complete_many(%b::uuid[], %b::text[]) as c"
    " order by c.position",
    "end_badly": "select f.outcome from {}.fail_many("
    "%b::uuid[], %b::text[], %b::text[], %b::boolean[]) as f order by f.position",
}

ROLE = b"select current_setting('role'), set_config('role', %s, true)"
"""Puts a role in force for the transaction, and tells the one before."""


def calls(schema: str) -> Calls:
    """Write the statements of the Instance in *schema*."""
    name = sql.Identifier(schema)
    return Calls(
        **{
            verb: sql.SQL(template).format(name).as_bytes(None)
            for verb, template in _TEMPLATES.items()
        }
    )
