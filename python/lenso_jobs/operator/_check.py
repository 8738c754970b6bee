"""Finding what differs between an Instance, this release, and its document.

The release is loaded beside the Instance, into a schema of the same owner, inside a
transaction that is rolled back; the server itself then describes both, so that nothing
is compared across versions or notations.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from lenso_jobs._assets import asset_dir, sql_files
from lenso_jobs.operator._setup import OperatorError, connected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lenso_jobs.config import Configuration

Described = dict[tuple[str, str], str]

_DESCRIBE = """
select 'function', p.oid::regprocedure::text,
    concat_ws(E'\n', pg_get_functiondef(p.oid), pg_get_userbyid(p.proowner),
        array(select a::text from unnest(p.proacl) as a order by 1),
        obj_description(p.oid, 'pg_proc'))
from pg_proc as p
where p.pronamespace = %(schema)s::regnamespace
union all
select case c.relkind when 'v' then 'view' when 'S' then 'sequence'
        when 'c' then 'type' else 'table' end,
    c.relname,
    concat_ws(E'\n', array(select o from unnest(c.reloptions) as o order by 1),
        pg_get_userbyid(c.relowner),
        array(select a::text from unnest(coalesce(c.relacl, acldefault(
            case c.relkind when 'S' then 's' else 'r' end::"char", c.relowner)))
            as a order by 1),
        c.relpersistence, c.relrowsecurity, c.relforcerowsecurity,
        case c.relkind when 'v' then pg_get_viewdef(c.oid) end,
        obj_description(c.oid, 'pg_class'))
from pg_class as c
where c.relnamespace = %(schema)s::regnamespace
    and c.relkind in ('r', 'v', 'S', 'c', 'm', 'p', 'f')
    and c.relname !~ '^_?yoyo_'
union all
select 'column', c.relname || '.' || a.attname,
    concat_ws(E'\n', a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull,
        a.attidentity, a.attcollation::regcollation,
        array(select g::text from unnest(a.attacl) as g order by 1),
        pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum))
from pg_class as c
join pg_attribute as a on a.attrelid = c.oid
left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
where c.relnamespace = %(schema)s::regnamespace and c.relkind in ('r', 'v', 'c')
    and a.attnum > 0 and not a.attisdropped and c.relname !~ '^_?yoyo_'
union all
select 'constraint', coalesce(c.relname, t.typname) || '.' || k.conname,
    concat_ws(E'\n', pg_get_constraintdef(k.oid), k.convalidated)
from pg_constraint as k
left join pg_class as c on c.oid = k.conrelid
left join pg_type as t on t.oid = k.contypid
where k.connamespace = %(schema)s::regnamespace
    and coalesce(c.relname, t.typname) !~ '^_?yoyo_'
union all
select 'index', c.relname,
    concat_ws(E'\n', pg_get_indexdef(c.oid), i.indisvalid,
        array(select o from unnest(c.reloptions) as o order by 1))
from pg_class as c
join pg_index as i on i.indexrelid = c.oid
join pg_class as r on r.oid = i.indrelid
where c.relnamespace = %(schema)s::regnamespace and r.relname !~ '^_?yoyo_'
union all
select 'trigger', c.relname || '.' || g.tgname,
    concat_ws(E'\n', pg_get_triggerdef(g.oid), g.tgenabled)
from pg_trigger as g
join pg_class as c on c.oid = g.tgrelid
where c.relnamespace = %(schema)s::regnamespace and not g.tgisinternal
union all
select 'domain', t.typname,
    concat_ws(E'\n', format_type(t.typbasetype, t.typtypmod), t.typnotnull,
        t.typcollation::regcollation, pg_get_userbyid(t.typowner),
        array(select a::text from unnest(t.typacl) as a order by 1),
        obj_description(t.oid, 'pg_type'))
from pg_type as t
where t.typnamespace = %(schema)s::regnamespace and t.typtype = 'd'
union all
select 'schema', 'the schema itself',
    concat_ws(E'\n', pg_get_userbyid(n.nspowner),
        array(select a::text from unnest(n.nspacl) as a order by 1))
from pg_namespace as n
where n.oid = %(schema)s::regnamespace
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, and what mends it."""

    what: str
    remedy: str


def check(configuration: Configuration, conninfo: str) -> list[Finding]:
    """List every difference; none means the Instance is as release and document say.

    Changes nothing.

    Raises:
        OperatorError: The Instance is missing, or the role may not look.
        psycopg.Error: The server cannot be reached.
    """
    with connected(conninfo) as connection:
        if not _exists(connection, configuration.schema_):
            raise OperatorError(
                f"schema {configuration.schema_} does not exist; run: lenso-jobs setup"
            )
        try:
            with connection.transaction(force_rollback=True):
                connection.execute("set local lock_timeout = '5s'")
                return [
                    *_pending(connection, configuration),
                    *_drift(connection, configuration),
                    *_policy(connection, configuration),
                    *_roles(connection, configuration),
                    *_powers(connection, configuration),
                ]
        except psycopg.errors.InsufficientPrivilege as error:
            raise OperatorError(
                f"cannot tell: {error.diag.message_primary}; check needs a role that owns "
                "the Instance and may create a schema in the database"
            ) from None
        except psycopg.errors.UndefinedTable:
            raise OperatorError(
                f"schema {configuration.schema_} holds no whole Instance; "
                "run: lenso-jobs setup"
            ) from None


def _exists(connection: psycopg.Connection[Any], schema: str) -> bool:
    found = connection.execute(
        "select from pg_namespace where nspname = %s", (schema,)
    ).fetchone()
    return found is not None


def _pending(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    statement = sql.SQL("select migration_id from {}._yoyo_migration").format(
        sql.Identifier(configuration.schema_)
    )
    applied = {name for (name,) in connection.execute(statement)}
    known = {path.stem for path in asset_dir("migrations").glob("*.sql")}
    for name in sorted(known - applied):
        yield Finding(f"migration {name} is pending", "lenso-jobs setup")
    for name in sorted(applied - known):
        yield Finding(
            f"migration {name} is not part of this release",
            "install the release that applied it",
        )


def _drift(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    schema = configuration.schema_
    actual = _describe(connection, schema)
    owner = actual["schema", "the schema itself"].split("\n")[0]
    reference = f"lenso_jobs_check_{secrets.token_hex(8)}"
    with connection.transaction(force_rollback=True):
        connection.execute(
            sql.SQL("create schema {} authorization {}").format(
                sql.Identifier(reference), sql.Identifier(owner)
            )
        )
        connection.execute("select set_config('search_path', %s, true)", (reference,))
        for path in sql_files():
            connection.execute(path.read_bytes())
        expected = {
            key: what.replace(reference, schema)
            for key, what in _describe(connection, reference).items()
        }

    remedy = f"restore what {asset_dir('sql')} says of it, as the owner"
    for kind, name in sorted(expected.keys() - actual.keys()):
        yield Finding(f"{kind} {name} is missing", remedy)
    for kind, name in sorted(actual.keys() - expected.keys()):
        yield Finding(
            f"{kind} {name} is not part of this release",
            "drop it, or move it elsewhere",
        )
    for kind, name in sorted(actual.keys() & expected.keys()):
        # A schema named like a word of SQL is quoted where the other is not.
        found, wanted = (
            each[kind, name].replace(f'"{schema}"', schema)
            for each in (actual, expected)
        )
        if found != wanted:
            yield Finding(f"{kind} {name} differs from this release", remedy)


def _describe(connection: psycopg.Connection[Any], schema: str) -> Described:
    connection.execute("select set_config('search_path', %s, true)", (schema,))
    rows = connection.execute(_DESCRIBE, {"schema": schema}).fetchall()
    return {(kind, name): what for kind, name, what in rows}


def _policy(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    connection.execute(
        "select set_config('search_path', %s, true)", (configuration.schema_,)
    )
    stored = connection.execute(
        "select lease_seconds, retry_base_seconds, retry_max_seconds, retry_jitter,"
        " notify, retention_seconds from instance"
    ).fetchone()
    remedy = "lenso-jobs configure"
    if stored is None:
        yield Finding("no configuration is stored", remedy)
        return
    names = (
        "lease_seconds",
        "retry_base_seconds",
        "retry_max_seconds",
        "retry_jitter",
        "notify",
        "retention_seconds",
    )
    for name, value in zip(names, stored, strict=True):
        wanted = getattr(configuration, name)
        if value != wanted:
            yield Finding(f"{name} is {value}, the document says {wanted}", remedy)

    copied = connection.execute(
        "select array(select unnest(queues) order by 1),"
        " array(select unnest(producers) order by 1),"
        " array(select unnest(workers) order by 1),"
        " array(select queue::text from queue order by 1),"
        " array(select caller::text from caller where is_producer order by 1),"
        " array(select caller::text from caller where is_worker order by 1)"
        " from instance"
    ).fetchone()
    if copied and copied[:3] != copied[3:]:
        yield Finding(
            "what instance repeats of the tables queue and caller is not what they hold",
            "update queue set queue = queue, as the owner: a trigger copies all of it",
        )

    stranded = connection.execute(
        "select distinct l.queue from live_job as l"
        " where l.queue not in (select q.queue from queue as q)"
    )
    for (name,) in stranded:
        yield Finding(
            f"queue {name} has live jobs and is not declared",
            "declare it until its jobs have ended, and run lenso-jobs configure",
        )

    queues = {name for (name,) in connection.execute("select queue from queue")}
    for name in sorted(queues ^ set(configuration.queues)):
        state = "is not in the document" if name in queues else "is not declared"
        yield Finding(f"queue {name} {state}", remedy)

    callers: set[tuple[Any, ...]] = {
        (name, *kinds)
        for name, *kinds in connection.execute(
            "select caller, is_producer, is_worker, is_observer from caller"
        )
    }
    declared: set[tuple[Any, ...]] = {
        (name, *(name in held for held in configuration.callers.values()))
        for names in configuration.callers.values()
        for name in names
    }
    for name in sorted({caller[0] for caller in callers ^ declared}):
        yield Finding(f"caller {name} is not declared as the document has it", remedy)


def _roles(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    for kind in ("owner", "producer", "worker", "observer", "operator"):
        group = f"{configuration.prefix}_{kind}"
        row = connection.execute(
            "select rolcanlogin, rolsuper from pg_roles where rolname = %s", (group,)
        ).fetchone()
        if row is None:
            yield Finding(f"role {group} does not exist", "lenso-jobs setup")
        elif row[1]:
            yield Finding(
                f"role {group} is a superuser", f"alter role {group} nosuperuser"
            )
        elif row[0]:
            yield Finding(f"role {group} can log in", f"alter role {group} nologin")
        for (name,) in connection.execute(
            "select g.rolname from pg_auth_members as m"
            " join pg_roles as r on r.oid = m.member join pg_roles as g on g.oid = m.roleid"
            " where r.rolname = %s order by 1",
            (group,),
        ):
            yield Finding(
                f"role {group} is a member of {name}", f"revoke {name} from {group}"
            )

    for kind, callers in configuration.callers.items():
        group = f"{configuration.prefix}_{kind}"
        # From 16 on whoever made a role administers it, without inheriting anything.
        members = {
            name
            for (name,) in connection.execute(
                "select r.rolname from pg_auth_members as m"
                " join pg_roles as r on r.oid = m.member"
                " join pg_roles as g on g.oid = m.roleid"
                " where g.rolname = %s"
                " and coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, r.rolinherit)",
                (group,),
            )
        }
        for name in sorted(set(callers) - members):
            yield Finding(
                f"role {name} is no member of {group}", "lenso-jobs configure"
            )
        for name in sorted(members - set(callers)):
            yield Finding(
                f"role {name} is a member of {group} and not in the document",
                f"declare it, or revoke {group} from it",
            )


def _powers(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    """Find callers that may do what no caller should."""
    for name in sorted(
        {name for names in configuration.callers.values() for name in names}
    ):
        powers = connection.execute(
            "select r.rolsuper, pg_has_role(r.oid, %s, 'member'),"
            " pg_has_role(r.oid, %s, 'member') from pg_roles as r where r.rolname = %s",
            (configuration.owner, f"{configuration.prefix}_operator", name),
        ).fetchone()
        if powers and powers[0]:
            yield Finding(
                f"caller {name} is a superuser", f"alter role {name} nosuperuser"
            )
        elif powers:
            for kind, held in zip(("owner", "operator"), powers[1:], strict=True):
                group = f"{configuration.prefix}_{kind}"
                if held:
                    yield Finding(
                        f"caller {name} is a member of {group}",
                        f"revoke {group} from {name}",
                    )
