"""Roles of an Instance that are there under another name, or are somebody else's too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql

from lenso_jobs.operator._changes import (
    KINDS,
    MEMBERS,
    declared,
    groups_of,
    stored_callers,
)
from lenso_jobs.operator._session import OperatorError, owner_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from lenso_jobs.config import Configuration

# Who may call all of these that there are, and nobody else, is the group.
_VERBS = {
    "producer": ["enqueue", "enqueue_many"],
    "worker": ["claim", "renew", "complete", "fail"],
    "observer": ["inspect", "inspect_queues", "inspect_health", "explain_job"],
    "operator": ["purge", "redrive", "retire_expired"],
}
_OWNER = """
select r.rolname::text
from pg_namespace as n
join pg_class as c on c.relnamespace = n.oid and c.relname in ('job', 'live_job')
join pg_roles as r on r.oid = c.relowner
where n.nspname = %(schema)s and r.rolname <> %(owner)s and not r.rolcanlogin
group by 1
having count(*) = 2
"""
_SCHEMA = """
select n.nspname::text
from pg_namespace as n
join pg_class as c on c.relnamespace = n.oid and c.relname in ('job', 'live_job')
join pg_roles as r on r.oid = n.nspowner
where r.rolname = %(owner)s
    and shobj_description(r.oid, 'pg_authid') = format(
        'owns the Jobs Instance %%s in database %%s', %(schema)s::text,
        current_database()
    )
group by 1
having count(*) = 2
"""
_GROUP = """
select r.rolname::text
from pg_proc as p
join pg_namespace as n on n.oid = p.pronamespace
cross join aclexplode(p.proacl) as x
join pg_roles as r on r.oid = x.grantee
where n.nspname = %(schema)s and p.proname = any (%(verbs)s)
    and r.oid <> p.proowner and r.rolname <> all (%(groups)s) and not r.rolcanlogin
group by 1
having count(distinct p.proname) = (
    select count(distinct p.proname)
    from pg_proc as p
    join pg_namespace as n on n.oid = p.pronamespace
    where n.nspname = %(schema)s and p.proname = any (%(verbs)s)
)
"""
_ELSEWHERE = """
select r.rolname::text, min(
    case when d.datname = current_database() then format('schema %%I', n.nspname)
    else format('database %%I', d.datname) end)
from pg_shdepend as s
join pg_roles as r on r.oid = s.refobjid
join pg_database as d on d.oid = s.dbid
left join pg_namespace as n
    on s.classid = 'pg_namespace'::regclass and n.oid = s.objid
    and d.datname = current_database()
where s.refclassid = 'pg_authid'::regclass and r.rolname = any (%(groups)s)
    and case when d.datname = current_database() then n.nspname <> %(schema)s
    else not d.datistemplate end
group by 1
order by 1
"""


def other_prefix(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> str | None:
    """Say so where the schema is another document's, with five groups of its own."""
    owner = owner_of(connection, configuration.schema_) or ""
    prefix = owner.removesuffix("_owner")
    if prefix in (owner, configuration.prefix) or missing(
        connection, *(f"{prefix}_{kind}" for kind in KINDS)
    ):
        return None
    return (
        f"schema {configuration.schema_} belongs to {owner}; set role_prefix in the "
        f"document to {prefix}, which it was set up with, or choose another schema"
    )


def missing(connection: psycopg.Connection[Any], *names: str) -> list[str]:
    """Tell which roles do not exist."""
    rows = connection.execute(
        "select rolname::text from pg_roles where rolname = any (%s)", (list(names),)
    )
    there = {name for (name,) in rows}
    return [name for name in names if name not in there]


def renamed_group(
    connection: psycopg.Connection[Any], configuration: Configuration, kind: str
) -> str | None:
    """Find the one other role that has what the group would have."""
    groups = groups_of(configuration)
    rows = connection.execute(
        _OWNER if kind == "owner" else _GROUP,
        {
            "schema": configuration.schema_,
            "owner": configuration.owner,
            "groups": [*groups.values()],
            "verbs": _VERBS.get(kind),
        },
    ).fetchall()
    return rows[0][0] if len(rows) == 1 else None


def renamed_callers(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> dict[str, str]:
    """Find the callers whose memberships one undeclared role has, and they have gone.

    Who was never declared may be a new caller, and the other an old one; a superuser or
    an operator is somebody of their own.
    """
    groups = groups_of(configuration)
    wanted = declared(configuration)
    others = {
        name
        for (name,) in connection.execute(
            "select r.rolname::text from pg_roles as r where r.rolsuper or exists ("
            " select from pg_auth_members as m where m.member = r.oid"
            " and pg_get_userbyid(m.roleid) = any (%s))",
            ([groups["owner"], groups["operator"]],),
        )
    }
    held: dict[str, set[str]] = {}
    for group, name, _, is_administrator in connection.execute(
        MEMBERS, ([groups[kind] for kind in KINDS[1:4]],)
    ).fetchall():
        if name not in wanted and name not in others and not is_administrator:
            held.setdefault(name, set()).add(group)
    known = stored_callers(connection, configuration.schema_)
    renamed = {}
    for name in missing(connection, *(known.keys() & wanted.keys())):
        should = {groups[kind] for kind in known[name]}
        alike = [
            stray for stray, has in held.items() if has == should and stray not in known
        ]
        if len(alike) == 1:
            renamed[name] = alike[0]
            del held[alike[0]]
    return renamed


def of_others(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[tuple[str, str]]:
    """Say which group roles are not this Instance's alone, and what to do about it."""
    names = {
        "groups": [*groups_of(configuration).values()],
        "schema": configuration.schema_,
    }
    for role, place in connection.execute(_ELSEWHERE, names).fetchall():
        yield (
            f"role {role} owns or may do something in {place}",
            (
                "set role_prefix in the document if another Instance is there: the "
                "callers of one can act in the other; else revoke it there"
            ),
        )


def rename(old: str, new: str) -> str:
    """Write what gives a role its name back."""
    return (
        sql.SQL("alter role {} rename to {}")
        .format(sql.Identifier(old), sql.Identifier(new))
        .as_string(None)
    )


def revoke(
    connection: psycopg.Connection[Any], group: str, member: str, grantor: str
) -> str:
    """Write what takes a membership back."""
    template = "revoke {} from {}"
    names = [group, member]
    # From 16 on each who granted it takes back their own.
    if connection.info.server_version >= 160000:  # noqa: PLR2004
        template += " granted by {}"
        names.append(grantor)
    return sql.SQL(template).format(*map(sql.Identifier, names)).as_string(None)


def renamed_schema(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> str | None:
    """Say where a schema that is missing seems to be, and what brings it back."""
    schema = configuration.schema_
    if owner_of(connection, schema) is not None:
        return None
    names = {"schema": schema, "owner": configuration.owner}
    rows = connection.execute(_SCHEMA, names).fetchall()
    if len(rows) != 1:
        return None
    (other,) = rows[0]
    back = sql.SQL("alter schema {} rename to {}").format(
        sql.Identifier(other), sql.Identifier(schema)
    )
    return (
        f"schema {schema} does not exist; it seems to be {other} now; "
        f"run this first: {back.as_string(None)}"
    )


def require_named(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> None:
    """Refuse where bootstrap.sql would make a second role, with none of its rights.

    Raises:
        OperatorError: A role of the Instance, or its schema, was renamed.
    """
    for state in (
        renamed_schema(connection, configuration),
        other_prefix(connection, configuration),
    ):
        if state is not None:
            raise OperatorError(state)
    renamed = {
        name: other
        for kind, name in groups_of(configuration).items()
        if missing(connection, name)
        and (other := renamed_group(connection, configuration, kind))
    }
    callers = renamed_callers(connection, configuration)
    for name, other in (renamed | callers).items():
        way_out = f" (or take {other} out of the groups)" if name in callers else ""
        raise OperatorError(
            f"role {name} does not exist; it seems to be {other} now; "
            f"run this first: {rename(other, name)}{way_out}"
        )


def require_own(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> None:
    """Refuse what bootstrap.sql would refuse: the roles and the schema of others.

    Raises:
        OperatorError: They are not this Instance's alone; or as ``require_named``.
    """
    require_named(connection, configuration)
    for what, remedy in of_others(connection, configuration):
        raise OperatorError(f"{what}; {remedy}")
    schema, owner = configuration.schema_, configuration.owner
    if owner_of(connection, schema) not in (None, owner):
        raise OperatorError(
            f"schema {schema} exists and is not {owner}'s; choose another schema, or "
            "the role_prefix it was set up with"
        )
