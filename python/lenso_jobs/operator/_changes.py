"""What a document would change, in words: roles and memberships, policy, declarations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg import sql

from lenso_jobs.operator._session import holds, schema_exists

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from lenso_jobs.config import Configuration

KINDS = ("owner", "producer", "worker", "observer", "operator")
POLICY = (
    "lease_seconds",
    "retry_base_seconds",
    "retry_max_seconds",
    "retry_jitter",
    "notify",
    "retention_seconds",
)

# Who is a member of what, and inherits it: from 16 on whoever made a role administers
# it, without inheriting anything. Whoever set the Instance up is a member of the owner.
MEMBERS = """
select g.rolname::text, r.rolname::text, b.rolname::text,
    coalesce((
        select pg_has_role(m.member, o.oid, 'member')
        from pg_roles as o where o.rolname = current_setting('lenso_jobs.owner')
    ), false)
from pg_auth_members as m
join pg_roles as r on r.oid = m.member
join pg_roles as g on g.oid = m.roleid
join pg_roles as b on b.oid = m.grantor
where g.rolname = any (%s)
    and coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, true)
order by 1, 2
"""


@dataclass(frozen=True, slots=True)
class Changes:
    """What would change; nothing where both are empty."""

    roles: tuple[str, ...]
    """By bootstrap.sql: the schema, roles, memberships."""
    stored: tuple[str, ...]
    """By the function configure: policy, queues, callers."""

    def __bool__(self) -> bool:
        """Whether anything would."""
        return bool(self.roles or self.stored)


def changes(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    *,
    drop_queues: bool = False,
) -> Changes:
    """Compare a document with what the server has."""
    return Changes(
        tuple(_roles(connection, configuration)),
        tuple(_stored(connection, configuration, drop_queues=drop_queues)),
    )


def groups_of(configuration: Configuration) -> dict[str, str]:
    """Name the group roles, by kind."""
    return {kind: f"{configuration.prefix}_{kind}" for kind in KINDS}


def declared(configuration: Configuration) -> dict[str, tuple[str, ...]]:
    """Turn the document's callers round: what each is declared for."""
    callers: dict[str, tuple[str, ...]] = {}
    for kind, names in configuration.callers.items():
        for name in names:
            callers[name] = (*callers.get(name, ()), kind)
    return callers


def stored_callers(
    connection: psycopg.Connection[Any], schema: str
) -> dict[str, tuple[str, ...]]:
    """Read what each caller of an Instance is declared for."""
    if not holds(connection, schema, "caller"):
        return {}
    statement = sql.SQL(
        "select caller, is_producer, is_worker, is_observer from {}.caller"
    ).format(sql.Identifier(schema))
    return {
        name: tuple(kind for kind, held in zip(KINDS[1:4], kinds, strict=True) if held)
        for name, *kinds in connection.execute(statement)
    }


def _roles(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[str]:
    schema, of = configuration.schema_, groups_of(configuration)
    groups = [*of.values()]
    wanted = declared(configuration)
    there = {
        name
        for (name,) in connection.execute(
            "select rolname::text from pg_roles where rolname = any (%s)",
            ([*groups, *wanted],),
        )
    }
    yield from (f"role {group} is created" for group in groups if group not in there)
    yield from _ownership(connection, configuration)
    if not schema_exists(connection, schema):
        yield f"schema {schema} is created"
    for name in wanted:
        if name not in there:
            yield f"role {name} is created, without login"
    members = {
        (group, name)
        for group, name, *_ in connection.execute(MEMBERS, (groups,)).fetchall()
    }
    memberships = {(of[kind], name) for name, kinds in wanted.items() for kind in kinds}
    for group, name in sorted(memberships - members):
        yield f"{name} becomes a member of {group}"
    stored = {
        (of[kind], name)
        for name, kinds in stored_callers(connection, schema).items()
        for kind in kinds
    }
    for group, name in sorted((stored & members) - memberships):
        yield f"{name} is no longer a member of {group}"


def _ownership(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[str]:
    owner = configuration.owner
    row = connection.execute(
        "select format('owns the Jobs Instance %%s in database %%s', %s::text,"
        " current_database()) is distinct from shobj_description(r.oid, 'pg_authid')"
        # Who may say so: from 16 on CREATEROLE alone is not enough.
        " and (u.rolsuper or u.rolcreaterole"
        "  and (current_setting('server_version_num')::integer < 160000"
        "   or pg_has_role(r.oid, 'usage with admin option'))),"
        " pg_has_role(r.oid, 'usage')"
        " from pg_roles as r join pg_roles as u on u.rolname = current_user"
        " where r.rolname = %s",
        (configuration.schema_, owner),
    ).fetchone()
    unnamed, usable = row or (False, False)
    if unnamed:
        yield f"role {owner} is said to own {configuration.schema_} in this database"
    if not usable and not _is_superuser(connection):
        yield f"the current user becomes a member of {owner}"


def _is_superuser(connection: psycopg.Connection[Any]) -> bool:
    row = connection.execute(
        "select rolsuper from pg_roles where rolname = current_user"
    ).fetchone()
    return row == (True,)


def _stored(
    connection: psycopg.Connection[Any],
    configuration: Configuration,
    *,
    drop_queues: bool,
) -> Iterator[str]:
    schema = configuration.schema_
    if not holds(connection, schema, "instance", "queue", "caller", "live_job"):
        yield "the configuration is stored for the first time"
        return
    for name, value in policy(connection, schema).items():
        wanted = getattr(configuration, name)
        if value != wanted:
            yield f"{name} changes from {_said(value)} to {_said(wanted)}"

    queues = {
        name
        for (name,) in connection.execute(
            sql.SQL("select queue from {}.queue").format(sql.Identifier(schema))
        )
    }
    for name in sorted(set(configuration.queues) - queues):
        yield f"queue {name} is declared"
    live = sql.SQL("select count(*) from {}.live_job where queue = %s").format(
        sql.Identifier(schema)
    )
    for name in sorted(queues - set(configuration.queues)):
        row = connection.execute(live, (name,)).fetchone()
        count = row[0] if row else 0
        refused = "" if drop_queues else "; refused without configure --drop-queues"
        held = f" (live jobs: {count}{refused})" if count else ""
        yield f"queue {name} is dropped{held}"

    callers, wanted_callers = (
        stored_callers(connection, schema),
        declared(configuration),
    )
    for name in sorted(callers.keys() | wanted_callers.keys()):
        had, gets = callers.get(name, ()), wanted_callers.get(name, ())
        if not had:
            yield f"caller {name} is declared as {' and '.join(gets)}"
        elif not gets:
            yield f"caller {name} is dropped"
        elif had != gets:
            yield f"caller {name} changes from {' and '.join(had)} to {' and '.join(gets)}"


def policy(connection: psycopg.Connection[Any], schema: str) -> dict[str, Any]:
    """Read the stored policy; every value None where there is none."""
    statement = sql.SQL("select {} from {}.instance").format(
        sql.SQL(", ").join(map(sql.Identifier, POLICY)), sql.Identifier(schema)
    )
    row = connection.execute(statement).fetchone() or (None,) * len(POLICY)
    return dict(zip(POLICY, row, strict=True))


def _said(value: object) -> str:
    if value is None:
        return "none"
    # Of 0.0 the document says 0.
    return (
        str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")
    )
