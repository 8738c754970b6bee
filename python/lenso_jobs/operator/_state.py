"""What the server has of an Instance, read once into one frozen value.

A relation is read only if it and the schema belong to the Instance's owner. In a schema
that another role made under that name, a table may be a view. Its functions would run
with the operator's rights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from yoyo.migrations import (
    get_migration_hash,
    parse_metadata_from_sql_comments,
    read_sql_migration,
)

from lenso_jobs._assets import asset_dir
from lenso_jobs.operator._session import Session, sessions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lenso_jobs.config import Configuration
    from lenso_jobs.operator._objects import Finding

KINDS = ("owner", "producer", "worker", "observer", "operator")
POLICY = (
    *("lease_seconds", "retry_base_seconds", "retry_max_seconds", "retry_jitter"),
    *("notify", "retention_seconds"),
)
YOYO_TABLES = ("yoyo_lock", "_yoyo_version", "_yoyo_log", "_yoyo_migration")

Key = tuple[str, str]
Facts = dict[str, Any]
Objects = dict[Key, Facts]


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of migrations/."""

    name: str
    digest: str
    statements: tuple[str, ...]
    """The whole file as one where it runs in a transaction."""
    transactional: bool

    @property
    def number(self) -> int:
        """What ``installed_version`` says once it is applied."""
        return int(self.name.partition("-")[0])


def released() -> list[Migration]:
    """Read the migrations of this release, in order: each depends on the one before."""
    found = []
    for path in sorted(asset_dir("migrations").glob("*.sql")):
        text = path.read_text(encoding="utf-8")
        directives, _, _ = parse_metadata_from_sql_comments(text)
        transactional = directives.get("transactional") != "false"
        # yoyo takes statements apart, which takes a while where there are many.
        statements = [text] if transactional else read_sql_migration(str(path))[2]
        digest = get_migration_hash(path.stem)
        found.append(Migration(path.stem, digest, tuple(statements), transactional))
    return found


def newest(known: Iterable[Migration]) -> int:
    """Return the version that these migrations lead to; an index alone changes none."""
    return max(each.number for each in known if each.transactional)


@dataclass(frozen=True, slots=True)
class Membership:
    """A role is a member of a group, and inherits its rights."""

    group: str
    member: str
    undone: str
    """The statement that revokes it; from 16 on in the name of its grantor."""
    is_administrator: bool = False
    """Whether the member is also a member of the Instance's owner."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What the tables of an Instance say of it."""

    policy: Mapping[str, Any] | None
    """None: the row is missing."""
    queues: Mapping[str, int]
    """The declared queues; live jobs are counted of those the document leaves out."""
    callers: Mapping[str, tuple[str, ...]]
    """What each declared caller is declared for."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The objects of an Instance, and those of a release loaded beside it."""

    found: Objects
    wanted: Objects
    rows: Mapping[Key, str] = field(default_factory=dict)
    """How much would be deleted with an object that is not the release's."""
    digest_is_stored: bool = True


@dataclass(frozen=True, slots=True)
class State:
    """What the server has of an Instance."""

    schema: str
    prefix: str
    database: str = "postgres"
    user: str = "postgres"
    has_owner: bool = True
    """Whether the user has the rights of the owner's role, or will be a superuser."""
    may_comment: bool = True
    """Whether the user may comment on the owner's role."""
    is_router: bool = False
    """Whether the schema is that of the router of a fleet."""
    known: tuple[Migration, ...] = ()
    """The migrations of this release."""
    owner: str | None = None
    """The role that the schema belongs to; None: the schema does not exist."""
    relations: Mapping[str, str] = field(default_factory=dict)
    """The owner of each table and view in the schema."""
    roles: Mapping[str, str | None] = field(default_factory=dict)
    """Those roles that exist, with their comments."""
    superusers: frozenset[str] = frozenset()
    members: tuple[Membership, ...] = ()
    """The members of the group roles."""
    elsewhere: tuple[tuple[str, str, bool], ...] = ()
    """What a group role has outside of the schema, and whether set-up refuses that."""
    applied: frozenset[str] = frozenset()
    """The migrations that are recorded as applied."""
    version: int = 0
    """The version that the Instance says it has; 0: none."""
    locker: int | None = None
    """The process that wrote the migration lock."""
    writers: tuple[Session, ...] = ()
    """The sessions that may have written it."""
    stored: Stored | None = None
    """None: the tables are missing, damaged or not the owner's."""
    defaults: tuple[tuple[str, str], ...] = ()
    """Default privileges of the owner, each with what revokes it."""
    grants_by_itself: bool = False
    """Whether default privileges or event triggers may grant as objects are made."""
    faults: tuple[Finding, ...] = ()
    """What the release's functions find wrong, as ``inspect_health`` does."""
    worker_sessions: int = 0
    catalogue: Catalogue | None = None
    """None: it was not loaded."""

    @property
    def groups(self) -> dict[str, str]:
        """The names of the group roles, by kind."""
        return {kind: f"{self.prefix}_{kind}" for kind in KINDS}

    @property
    def claim(self) -> str:
        """The comment by which the owner's role says what it owns."""
        return f"owns the Jobs Instance {self.schema} in database {self.database}"

    @property
    def is_ours(self) -> bool:
        """Whether the schema belongs to the Instance's owner."""
        return self.owner == self.groups["owner"]

    def missing(self, *names: str) -> list[str]:
        """List those roles that do not exist."""
        return [name for name in names if name not in self.roles]

    def holds(self, *relations: str) -> bool:
        """Tell whether all these tables are there and belong to the owner."""
        return self.is_ours and all(
            self.relations.get(name) == self.owner for name in relations
        )

    @property
    def strange(self) -> list[str]:
        """The migrations that are recorded and not of this release."""
        return sorted(self.applied - {each.name for each in self.known})

    @property
    def is_newer(self) -> bool:
        """Whether a newer release migrated it."""
        return bool(self.strange) or self.version > self.known[-1].number

    @property
    def is_whole(self) -> bool:
        """Whether all migrations of this release were applied, recorded or not."""
        is_newest = self.version == self.known[-1].number
        return not self.is_newer and (not self.pending or is_newest)

    @property
    def pending(self) -> list[Migration]:
        """The migrations that are not recorded."""
        return [each for each in self.known if each.name not in self.applied]


# From 16 on CREATEROLE alone is not enough to comment on a role.
_FIRST = """
select current_database()::text, u.rolname::text,
    (select pg_get_userbyid(nspowner)::text from pg_namespace where nspname = %(schema)s),
    u.rolsuper or coalesce(pg_has_role(r.oid, 'usage'), false),
    u.rolsuper or r.oid is null or u.rolcreaterole and (
        current_setting('server_version_num')::integer < 160000
        or pg_has_role(r.oid, 'usage with admin option')),
    exists (select from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
        where n.nspname = %(schema)s and p.proname = '_shards')
from pg_roles as u left join pg_roles as r on r.rolname = %(owner)s
where u.rolname = current_user
"""
_RELATIONS = """
select c.relname::text, pg_get_userbyid(c.relowner)::text
from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
where n.nspname = %(schema)s and c.relkind in ('r', 'v')
"""
_ROLES = """
select rolname::text, shobj_description(oid, 'pg_authid'), rolsuper
from pg_roles where rolname = any (%s)
"""
# From 16 on the creator of a role is a member of it, and inherits nothing.
_MEMBERS = """
select g.rolname::text, r.rolname::text,
    format('revoke %%I from %%I%%s', g.rolname, r.rolname, case
        when current_setting('server_version_num')::integer >= 160000
        then format(' granted by %%I', pg_get_userbyid(m.grantor)) end),
    coalesce(pg_has_role(m.member, o.oid, 'member'), false)
from pg_auth_members as m
join pg_roles as r on r.oid = m.member
join pg_roles as g on g.oid = m.roleid
left join pg_roles as o on o.rolname = %(owner)s
where g.rolname = any (%(groups)s)
    and coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, true)
order by 1, 2, 3
"""
_ELSEWHERE = """
select r.rolname::text,
    case when d.dbid in (0, h.oid)
        then pg_describe_object(d.classid, d.objid, d.objsubid)
        else format('database %%I', x.datname) end,
    case when d.dbid = h.oid then d.classid = 'pg_namespace'::regclass
        else d.dbid <> 0 and not x.datistemplate end
from pg_shdepend as d
join pg_database as h on h.datname = current_database()
join pg_roles as r on r.oid = d.refobjid
left join pg_database as x on x.oid = d.dbid
where d.refclassid = 'pg_authid'::regclass and r.rolname = any (%(groups)s)
    and not (d.dbid = h.oid and coalesce((
        select quote_ident(%(schema)s) = case o.type when 'schema' then o.identity
            else o.schema end
        from pg_identify_object(d.classid, d.objid, 0) as o
    ), d.classid = 'pg_default_acl'::regclass))
group by 1, 2, 3
order by 1, 2
"""
_DEFAULTS = """
select format('default privileges of %%s give %%s%%s to %%s', g.owner, g.what, g.place,
        g.grantee),
    format('alter default privileges for role %%I%%s revoke %%s from %%s', g.owner, g.place,
        g.what, g.grantee)
from pg_default_acl as a
left join pg_namespace as n on n.oid = a.defaclnamespace
cross join aclexplode(a.defaclacl) as x
left join pg_roles as r on r.oid = x.grantee
cross join lateral (
    select pg_get_userbyid(a.defaclrole), ' in schema ' || quote_ident(n.nspname),
        coalesce(quote_ident(r.rolname), 'public'),
        concat(lower(x.privilege_type), ' on ', case a.defaclobjtype when 'r' then 'tables'
            when 'S' then 'sequences' when 'f' then 'functions' when 'T' then 'types'
            else 'schemas' end)
) as g (owner, place, grantee, what)
where pg_get_userbyid(a.defaclrole) = %(owner)s and x.grantee <> a.defaclrole
    and (n.nspname is null or n.nspname = %(schema)s)
    and a.defaclobjtype in ('r', 'S', 'f', 'T', 'n')
    -- PostgreSQL's own default is stored, too, once another was added to it.
    and not (n.nspname is null and x.grantee = 0 and a.defaclobjtype in ('f', 'T'))
order by 1, 2
"""
# A session begun by one of these may have written the lock.
_WRITERS = """
select array_agg(pid) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and usesysid is not null
    and application_name <> 'lenso-jobs' and (pg_has_role(usesysid, %(owner)s, 'member')
        or has_table_privilege(usesysid, format('%%I.yoyo_lock', %(schema)s::text), 'insert'))
"""


def declared(configuration: Configuration) -> dict[str, tuple[str, ...]]:
    """Turn the document's callers round: what each is declared for."""
    callers: dict[str, tuple[str, ...]] = {}
    for kind, names in configuration.callers.items():
        for name in names:
            callers[name] = (*callers.get(name, ()), kind)
    return callers


def read(connection: psycopg.Connection[Any], configuration: Configuration) -> State:
    """Read what the server has of an Instance, but not its objects."""
    schema = configuration.schema_
    groups = [f"{configuration.prefix}_{kind}" for kind in KINDS]
    of = {"groups": groups, "owner": configuration.owner, "schema": schema}

    def asked(statement: str) -> list[tuple[Any, ...]]:
        return connection.execute(statement, of).fetchall()

    ((database, user, owner, has_owner, may_comment, is_router),) = asked(_FIRST)
    relations = dict(asked(_RELATIONS))

    def rows(table: str, columns: str, more: str = "", *values: object) -> list[Any]:
        """Read from a table; nothing where it is missing, damaged or not the owner's."""
        if {owner, relations.get(table)} != {configuration.owner}:
            return []
        text = f"select {columns} from {{}} {more}"  # noqa: S608 - of ours
        name = sql.Identifier(schema, table)
        try:
            with connection.transaction():
                statement = sql.SQL(text).format(name)
                return connection.execute(statement, values or None).fetchall()
        except psycopg.errors.UndefinedColumn:
            return []

    stored = None
    tables = {"instance", "queue", "caller", "live_job"}
    if owner == configuration.owner and tables <= relations.keys():
        policy = rows("instance", ", ".join(POLICY))
        queues = dict.fromkeys((name for (name,) in rows("queue", "queue")), 0)
        for name in queues.keys() - set(configuration.queues):
            ((queues[name],),) = rows(
                "live_job", "count(*)", "where queue = %s", name
            ) or [(0,)]
        kinds = rows("caller", "caller, is_producer, is_worker, is_observer")
        stored = Stored(
            dict(zip(POLICY, policy[0], strict=True)) if policy else None,
            queues,
            {
                name: tuple(
                    kind for kind, held in zip(KINDS[1:], held, strict=False) if held
                )
                for name, *held in kinds
            },
        )
    names = {*groups, *declared(configuration), *(stored.callers if stored else ())}
    if owner is not None:
        names |= {owner, *(f"{owner.removesuffix('_owner')}_{kind}" for kind in KINDS)}
    roles = connection.execute(_ROLES, (sorted(names),)).fetchall()
    locks = rows("yoyo_lock", "pid")
    defaults = asked(_DEFAULTS)
    return State(
        schema,
        configuration.prefix,
        database=database,
        user=user,
        has_owner=has_owner,
        may_comment=may_comment,
        is_router=is_router,
        known=tuple(released()),
        owner=owner,
        relations=relations,
        roles={name: comment for name, comment, _ in roles},
        superusers=frozenset(name for name, _, is_superuser in roles if is_superuser),
        members=tuple(Membership(*row) for row in asked(_MEMBERS)),
        elsewhere=tuple(asked(_ELSEWHERE)),
        applied=frozenset(name for (name,) in rows("_yoyo_migration", "migration_id")),
        version=max(
            (row[0] for row in rows("installed_version", "version")), default=0
        ),
        locker=locks[0][0] if locks else None,
        writers=tuple(sessions(connection, asked(_WRITERS)[0][0] or ()))
        if locks
        else (),
        stored=stored,
        defaults=tuple(defaults),
        grants_by_itself=bool(
            defaults or asked("select from pg_event_trigger where evtenabled <> 'D'")
        ),
    )
