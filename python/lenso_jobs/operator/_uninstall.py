"""Taking an Instance down, and nothing that is not its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from lenso_jobs.operator._changes import MEMBERS, groups_of, stored_callers
from lenso_jobs.operator._roles import revoke
from lenso_jobs.operator._session import (
    OperatorError,
    connected,
    exclusively,
    holds,
    schema_exists,
    silent,
)
from lenso_jobs.operator._setup import patiently

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

# What else on this server a role owns or was granted: anything but the schema.
_ELSEWHERE = """
select case
    when d.dbid = 0 then pg_describe_object(d.classid, d.objid, d.objsubid)
    when d.dbid = h.oid then pg_describe_object(d.classid, d.objid, d.objsubid)
    else format('database %%s', x.datname)
end
from pg_shdepend as d
join pg_database as h on h.datname = current_database()
left join pg_database as x on x.oid = d.dbid
where d.refclassid = 'pg_authid'::regclass
    and d.refobjid = (select r.oid from pg_roles as r where r.rolname = %(role)s)
    and not (
        d.dbid = h.oid
        and coalesce((
            select o.schema = quote_ident(%(schema)s)
                or o.type = 'schema' and o.identity = quote_ident(%(schema)s)
            from pg_identify_object(d.classid, d.objid, 0) as o
        ), false)
    )
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


def survey(configuration: Configuration, conninfo: str) -> Removal:
    """Find what ``uninstall`` would drop, and drop nothing.

    Raises:
        OperatorError: There is nothing, or it is somebody else's; or the role may not
            look.
        psycopg.Error: The server cannot be reached.
    """
    with (
        connected(conninfo, configuration, read_only=True) as connection,
        connection.transaction(force_rollback=True),
    ):
        return _survey(connection, configuration)


def uninstall(
    configuration: Configuration,
    conninfo: str,
    *,
    keep_data: bool = False,
    say: Callable[[str], None] = silent,
) -> Removal:
    """Drop the schema with every job, and the group roles; all of it or nothing.

    A group role that owns or was granted anything else on this server is left. The
    callers' roles are left always: they may be anybody's.

    Args:
        configuration: The Instance's document; of it, schema and roles count.
        conninfo: The connection string of a superuser, or of the role that set it up.
        keep_data: Keep schema and roles. Nobody keeps a right to the schema but the
            owner, and nobody stays a member of the other groups, but of those that have
            anything elsewhere; ``upgrade --repair`` gives all that back to what the
            document declares.
        say: Is told, in sentences, of what takes time.

    Raises:
        OperatorError: There is nothing, or it is somebody else's, or others' objects
            depend on it.
        psycopg.Error: The server cannot be reached, or refused a statement.
    """
    act = _close if keep_data else _drop
    with (
        connected(conninfo, configuration) as connection,
        exclusively(connection, configuration),
    ):
        removal: Removal = patiently(
            lambda: act(connection, configuration), "uninstall", say
        )
        return removal


def _survey(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Removal:
    schema = configuration.schema_
    groups = [
        name
        for (name,) in connection.execute(
            "select rolname::text from pg_roles where rolname = any (%s) order by 1",
            ([*groups_of(configuration).values()],),
        )
    ]
    exists = schema_exists(connection, schema)
    if not exists and not groups:
        raise OperatorError(f"there is no schema {schema}, and none of its roles")
    objects: dict[str, int] = {}
    live = kept = 0
    dependents: tuple[str, ...] = ()
    if exists:
        row = connection.execute(
            "select pg_get_userbyid(nspowner) from pg_namespace where nspname = %s",
            (schema,),
        ).fetchone()
        if row != (configuration.owner,):
            raise OperatorError(
                f"schema {schema} does not belong to {configuration.owner}; set the "
                "role_prefix that it was set up with"
            )
        name = {"schema": sql.Identifier(schema).as_string(None)}
        objects = dict(connection.execute(_OBJECTS, name).fetchall())
        dependents = tuple(
            what for (what,) in connection.execute(_DEPENDENTS, name).fetchall()
        )
        if holds(connection, schema, "job", "live_job"):
            counts = connection.execute(
                sql.SQL(
                    "select (select count(*) from {s}.live_job),"
                    " (select count(*) from {s}.job)"
                ).format(s=sql.Identifier(schema))
            ).fetchone() or (0, 0)
            live, kept = counts[0], counts[1] - counts[0]
    left = []
    members = connection.execute(MEMBERS, (_closed(configuration),)).fetchall()
    for group in groups:
        elsewhere = connection.execute(
            _ELSEWHERE, {"role": group, "schema": schema}
        ).fetchall()
        if elsewhere:
            left.append((group, f"it also has {elsewhere[0][0]}"))
    return Removal(
        schema,
        objects,
        live,
        kept,
        tuple(group for group in groups if group not in dict(left)),
        tuple(left),
        tuple(sorted(stored_callers(connection, schema))),
        tuple(
            sorted(
                {
                    (member, group)
                    for group, member, _, is_administrator in members
                    if not is_administrator
                }
            )
        ),
        dependents,
    )


def _drop(connection: psycopg.Connection[Any], configuration: Configuration) -> Removal:
    with connection.transaction():
        connection.execute("set local lock_timeout = '5s'")
        removal = _survey(connection, configuration)
        if removal.dependents:
            raise OperatorError(
                f"others depend on schema {removal.schema}: "
                f"{', '.join(removal.dependents)}; drop them first"
            )
        if removal.objects:
            connection.execute(
                sql.SQL("drop schema {} cascade").format(sql.Identifier(removal.schema))
            )
        dropped, left = [], list(removal.left)
        for role in removal.roles:
            try:
                with connection.transaction():
                    connection.execute(
                        sql.SQL("drop role {}").format(sql.Identifier(role))
                    )
                dropped.append(role)
            except (
                psycopg.errors.InsufficientPrivilege,
                psycopg.errors.DependentObjectsStillExist,
            ) as error:
                left.append((role, f"the server: {error.diag.message_primary}"))
    return replace(removal, roles=tuple(dropped), left=tuple(left))


def _closed(configuration: Configuration) -> list[str]:
    """Name the groups that are to get in no more."""
    _owner, *others = groups_of(configuration).values()
    return others


def _close(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Removal:
    with connection.transaction():
        connection.execute("set local lock_timeout = '5s'")
        removal = _survey(connection, configuration)
        groups = _closed(configuration)
        # What its members may do elsewhere they need: a copy has the same roles. The
        # schema is closed to them by the rights that it loses itself.
        own = [group for group in groups if group not in dict(removal.left)]
        left = list(removal.left)
        for group, member, grantor, is_administrator in connection.execute(
            MEMBERS, (own,)
        ).fetchall():
            if is_administrator:
                continue
            try:
                with connection.transaction():
                    back = revoke(connection, group, member, grantor)
                    connection.execute(back.encode())
            except psycopg.errors.InsufficientPrivilege:
                left.append((group, f"{grantor} granted it to {member}"))
        connection.execute(
            sql.SQL("revoke all on schema {} from public, {}").format(
                sql.Identifier(removal.schema),
                sql.SQL(", ").join(map(sql.Identifier, groups)),
            )
        )
    return replace(removal, roles=(), left=tuple(left))
