"""Taking an Instance down, and nothing that is not its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from lenso_jobs.operator._session import OperatorError, connected, silent
from lenso_jobs.operator._setup import operating, patiently
from lenso_jobs.operator._state import Membership, State, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from lenso_jobs.config import Configuration

_OBJECTS = """
select 'tables', count(*) from pg_class
where relnamespace = %(schema)s::regnamespace and relkind in ('r', 'p')
union all
select 'views', count(*) from pg_class
where relnamespace = %(schema)s::regnamespace and relkind in ('v', 'm')
union all
select 'functions', count(*) from pg_proc
where pronamespace = %(schema)s::regnamespace
union all
select 'types', count(*) from pg_type as t left join pg_class as c on c.oid = t.typrelid
where typnamespace = %(schema)s::regnamespace
    and (typtype in ('d', 'e') or c.relkind = 'c')
"""

# Objects elsewhere that DROP SCHEMA ... CASCADE would take along.
_DEPENDENTS = """
with ours (classid, objid) as (
    select 'pg_class'::regclass, oid from pg_class
    where relnamespace = %(schema)s::regnamespace
    union all
    select 'pg_proc'::regclass, oid from pg_proc
    where pronamespace = %(schema)s::regnamespace
    union all
    select 'pg_type'::regclass, oid from pg_type
    where typnamespace = %(schema)s::regnamespace
)
select distinct pg_describe_object(d.classid, d.objid, d.objsubid)
from ours as o
join pg_depend as d on d.refclassid = o.classid and d.refobjid = o.objid
left join pg_rewrite as w on d.classid = 'pg_rewrite'::regclass and w.oid = d.objid
left join pg_attrdef as a on d.classid = 'pg_attrdef'::regclass and a.oid = d.objid
left join pg_trigger as g on d.classid = 'pg_trigger'::regclass and g.oid = d.objid
left join pg_policy as y on d.classid = 'pg_policy'::regclass and y.oid = d.objid
left join pg_constraint as k
    on d.classid = 'pg_constraint'::regclass and k.oid = d.objid
left join ours as same
    on same.classid = case
        when k.contypid <> 0 then 'pg_type'::regclass
        when coalesce(w.oid, a.oid, g.oid, y.oid, k.oid) is not null
        then 'pg_class'::regclass
        else d.classid
    end
    and same.objid = coalesce(
        w.ev_class, a.adrelid, g.tgrelid, y.polrelid,
        case when k.contypid <> 0 then k.contypid else k.conrelid end, d.objid
    )
where d.deptype in ('n', 'a') and same.objid is null
order by 1
"""


@dataclass(frozen=True, slots=True)
class Removal:
    """What an Instance is, and what becomes of it."""

    schema: str
    objects: dict[str, int]
    """How many of each kind the schema holds; empty where it is gone already."""
    live_jobs: int
    kept_jobs: int
    """Jobs that have ended, and are kept as evidence."""
    roles: tuple[str, ...]
    """The group roles that are dropped."""
    left: tuple[tuple[str, str], ...]
    """The group roles that are left, and why."""
    callers: tuple[str, ...]
    """The declared callers: roles that are never dropped."""
    members: tuple[tuple[str, str], ...]
    """Who is a member of which group role; without the owner's, and without the members
    of the owner, who administer the others."""
    dependents: tuple[str, ...]
    """Objects of others that are in the way."""


def survey(
    configuration: Configuration, conninfo: str, *, pooler_ok: bool = False
) -> Removal:
    """Return what ``uninstall`` would drop, and drop nothing.

    Raises:
        OperatorError: There is nothing, or it is another role's; or the role may not
            read it.
        psycopg.Error: The server cannot be reached.
    """
    with (
        connected(conninfo, read_only=True, pooler_ok=pooler_ok) as connection,
        connection.transaction(force_rollback=True),
    ):
        return _survey(connection, read(connection, configuration))


def uninstall(
    configuration: Configuration,
    conninfo: str,
    *,
    keep_data: bool = False,
    say: Callable[[str], None] = silent,
    pooler_ok: bool = False,
) -> Removal:
    """Drop the schema with every job, and the group roles; all of it or nothing.

    A group role that owns or was granted anything else on this server is left. The
    roles of callers are never dropped: others may use them.

    Args:
        configuration: The Instance's document; of it, schema and roles count.
        conninfo: The connection string of a superuser, or of the role that set it up.
        keep_data: Keep schema and roles. Every right on the schema but the owner's is
            revoked, and so are the memberships in the other groups, unless the group
            has anything elsewhere. ``upgrade --repair`` and ``configure`` give all that
            back to the callers of the document.
        say: Is called with a sentence about each wait of more than 5 s.
        pooler_ok: As ``setup``.

    Returns:
        What was dropped, and what was left.

    Raises:
        OperatorError: There is nothing, or it is another role's, or objects of others
            depend on it.
        psycopg.Error: The server cannot be reached, or refused a statement.
    """
    with operating(conninfo, configuration, say, pooler_ok) as acting:
        act = partial(_take_down, acting.connection, configuration, keep_data=keep_data)
        removal: Removal = patiently(act, "uninstall", say, acting.waited_for)
        return removal


def _take_down(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    *,
    keep_data: bool,
) -> Removal:
    with connection.transaction():
        connection.execute("set local lock_timeout = '5s'")
        state = read(connection, configuration)
        act = _close if keep_data else _drop
        return act(connection, state, _survey(connection, state))


def _survey(connection: psycopg.Connection[Any], state: State) -> Removal:
    schema, owner = state.schema, state.groups["owner"]
    groups = sorted(name for name in state.groups.values() if name in state.roles)
    if state.owner is None and not groups:
        raise OperatorError(f"there is no schema {schema}, and none of its roles")
    if state.owner not in (None, owner):
        raise OperatorError(
            f"schema {schema} does not belong to {owner}; set the role_prefix that it was "
            "set up with"
        )
    objects: dict[str, int] = {}
    live = kept = 0
    dependents: list[tuple[str]] = []
    if state.owner is not None:
        name = {"schema": sql.Identifier(schema).as_string(None)}
        objects = dict(connection.execute(_OBJECTS, name).fetchall())
        dependents = connection.execute(_DEPENDENTS, name).fetchall()
        if state.holds("job", "live_job"):
            counts = connection.execute(
                sql.SQL(
                    "select (select count(*) from {s}.live_job),"
                    " (select count(*) from {s}.job)"
                ).format(s=sql.Identifier(schema))
            ).fetchone() or (0, 0)
            live, kept = counts[0], counts[1] - counts[0]
    left = {role: f"it also has {what}" for role, what, _ in reversed(state.elsewhere)}
    members = {(each.member, each.group) for each in _revocable(state)}
    return Removal(
        schema,
        objects,
        live,
        kept,
        tuple(group for group in groups if group not in left),
        tuple((group, left[group]) for group in groups if group in left),
        tuple(sorted(state.stored.callers)) if state.stored else (),
        tuple(sorted(members)),
        tuple(what for (what,) in dependents),
    )


def _revocable(state: State) -> list[Membership]:
    """List the memberships in the groups that are shut out, but not of administrators."""
    _owner, *others = state.groups.values()
    return [
        each
        for each in state.members
        if each.group in others and not each.is_administrator
    ]


def _drop(
    connection: psycopg.Connection[Any], state: State, removal: Removal
) -> Removal:
    if removal.dependents:
        raise OperatorError(
            f"others depend on schema {state.schema}: "
            f"{', '.join(removal.dependents)}; drop them first"
        )
    if removal.objects:
        drop = sql.SQL("drop schema {} cascade").format(sql.Identifier(state.schema))
        connection.execute(drop)
    left = dict(removal.left)
    for role in removal.roles:
        drop = sql.SQL("drop role {}").format(sql.Identifier(role))
        if refused := _refused(connection, drop.as_bytes(None)):
            left[role] = f"the server: {refused}"
    dropped = tuple(role for role in removal.roles if role not in left)
    return replace(removal, roles=dropped, left=tuple(left.items()))


def _close(
    connection: psycopg.Connection[Any], state: State, removal: Removal
) -> Removal:
    left = dict(removal.left)
    # A copy of the database has the same roles, and callers that need them. The schema
    # is closed to those by the rights that it loses itself.
    for each in _revocable(state):
        if each.group not in dict(removal.left) and _refused(
            connection, each.undone.encode()
        ):
            left[each.group] = f"another role granted it to {each.member}"
    _owner, *groups = state.groups.values()
    names = map(sql.Identifier, (state.schema, *groups))
    revoke = sql.SQL("revoke all on schema {} from public, {}")
    connection.execute(revoke.format(next(names), sql.SQL(", ").join(names)))
    return replace(removal, roles=(), left=tuple(left.items()))


def _refused(connection: psycopg.Connection[Any], statement: bytes) -> str | None:
    """Run a statement; return why the server refuses it, or None."""
    try:
        with connection.transaction():
            connection.execute(statement)
    except (
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.DependentObjectsStillExist,
    ) as error:
        said, which = error.diag.message_primary, error.diag.message_detail
        return ": ".join(filter(None, (said, which))).replace("\n", "; ")
    return None
