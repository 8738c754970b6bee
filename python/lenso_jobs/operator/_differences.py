"""What an Instance's objects are, what this release says they are, and what mends each.

The release is loaded beside the Instance, into a schema of the same owner, inside a
transaction that is rolled back; the server itself then describes both, so that nothing
is compared across versions or notations.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg import sql

from lenso_jobs._assets import asset_dir, sql_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import psycopg

Fields = dict[str, Any]
Described = dict[tuple[str, str], Fields]

# Privileges as a list of "grantee privilege", with the defaults where none are stored.
_ACL = (
    "(select coalesce(jsonb_agg(concat(coalesce(quote_ident(r.rolname), 'public'), ' ',"
    " x.privilege_type, case when x.is_grantable then ' with grant option' end)"
    " order by r.rolname collate \"C\", x.privilege_type), '[]') from aclexplode({})"
    " as x left join pg_roles as r on r.oid = x.grantee)"
)

# Nothing of it comes from outside.
_DESCRIBE = f"""
with o as (select %(schema)s::regnamespace as oid)
select 'function', p.oid::regprocedure::text, jsonb_build_object(
    'definition', case when p.prokind in ('f', 'p') then pg_get_functiondef(p.oid) end,
    'signature', concat(pg_get_function_arguments(p.oid), ' ',
        pg_get_function_result(p.oid)),
    'called', quote_ident(p.proname),
    'arguments', (
        select coalesce(jsonb_agg(
            case when t.typnamespace = o.oid then jsonb_build_array(t.typname)
            else to_jsonb(format_type(t.oid, null)) end order by a.i), '[]')
        from unnest(p.proargtypes::oid[]) with ordinality as a (oid, i)
        join pg_type as t on t.oid = a.oid),
    'owner', pg_get_userbyid(p.proowner),
    'grants', {_ACL.format("coalesce(p.proacl, acldefault('f', p.proowner))")},
    'comment', obj_description(p.oid, 'pg_proc'))
from pg_proc as p, o
where p.pronamespace = o.oid
union all
select case c.relkind when 'v' then 'view' when 'S' then 'sequence'
        when 'c' then 'type' else 'table' end,
    c.relname, jsonb_build_object(
    'relkind', c.relkind,
    'options', (select jsonb_agg(x order by x) from unnest(c.reloptions) as x),
    'owner', pg_get_userbyid(c.relowner),
    'grants', case c.relkind when 'c' then '[]' else {
    _ACL.format(
        "coalesce(c.relacl, acldefault(case c.relkind when 'S' then 's' else 'r' end"
        '::"char", c.relowner))'
    )
} end,
    'type grants', (
        select {_ACL.format("coalesce(t.typacl, acldefault('T', t.typowner))")}
        from pg_type as t where t.oid = c.reltype),
    'persistence', c.relpersistence,
    'made', c.oid::bigint,
    'columns', case c.relkind when 'v' then (
        select jsonb_agg(concat(a.attname, ' ', a.atttypid::regtype) order by a.attnum)
        from pg_attribute as a where a.attrelid = c.oid and a.attnum > 0) end,
    'table', case c.relkind when 'S' then (
        select d.refobjid::regclass::text from pg_depend as d
        where d.classid = 'pg_class'::regclass and d.objid = c.oid
            and d.deptype in ('a', 'i') and d.refclassid = 'pg_class'::regclass) end,
    'row security', concat(c.relrowsecurity, c.relforcerowsecurity),
    'definition', case c.relkind when 'v' then pg_get_viewdef(c.oid)
        when 'c' then (
            select string_agg(concat(quote_ident(a.attname), ' ',
                format_type(a.atttypid, a.atttypmod)), ', ' order by a.attnum)
            from pg_attribute as a where a.attrelid = c.oid and not a.attisdropped
        ) end,
    'comment', obj_description(c.oid, 'pg_class'))
from pg_class as c, o
where c.relnamespace = o.oid and c.relkind in ('r', 'v', 'S', 'c', 'm', 'p', 'f')
    and c.relname !~ '^_?yoyo_'
union all
select 'column', format('%%I.%%I', c.relname, a.attname), jsonb_build_object(
    'table', c.relname, 'column', a.attname, 'relkind', c.relkind,
    'position', a.attnum,
    'type', case when c.relkind <> 'v' then concat(
        format_type(a.atttypid, a.atttypmod), case
        when a.attcollation <> t.typcollation
        then concat(' collate ', a.attcollation::regcollation) end) end,
    'domain', case when t.typnamespace = o.oid then t.typname end,
    'not null', a.attnotnull, 'identity', a.attidentity,
    'default', pg_get_expr(d.adbin, d.adrelid),
    'grants', {_ACL.format("a.attacl")},
    'comment', col_description(c.oid, a.attnum))
from o
join pg_class as c on c.relnamespace = o.oid
join pg_attribute as a on a.attrelid = c.oid
join pg_type as t on t.oid = a.atttypid
left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
where c.relkind in ('r', 'v', 'p', 'f') and a.attnum > 0 and not a.attisdropped
    and c.relname !~ '^_?yoyo_'
union all
select 'constraint', format('%%I.%%I', coalesce(c.relname, t.typname), k.conname),
    jsonb_build_object(
    'of', case when c.oid is null then 'domain' else 'table' end,
    'on', coalesce(c.relname, t.typname), 'name', k.conname,
    'columns', (
        select jsonb_agg(format('%%I.%%I', c.relname, a.attname))
        from pg_attribute as a where a.attrelid = c.oid and a.attnum = any (k.conkey)),
    'definition', regexp_replace(pg_get_constraintdef(k.oid), ' NOT VALID$', ''),
    'validated', k.convalidated)
from o
join pg_constraint as k on k.connamespace = o.oid
left join pg_class as c on c.oid = k.conrelid
left join pg_type as t on t.oid = k.contypid
where coalesce(c.relname, t.typname) !~ '^_?yoyo_'
union all
select 'index', c.relname, jsonb_build_object(
    'of', r.relname, 'definition', pg_get_indexdef(c.oid),
    'columns', (
        select jsonb_agg(format('%%I.%%I', r.relname, a.attname))
        from pg_attribute as a where a.attrelid = r.oid and a.attnum = any (i.indkey)),
    'valid', i.indisvalid and i.indisready and i.indislive,
    'constraint', exists (select from pg_constraint as k where k.conindid = c.oid),
    'options', (select jsonb_agg(x order by x) from unnest(c.reloptions) as x))
from o
join pg_class as c on c.relnamespace = o.oid
join pg_index as i on i.indexrelid = c.oid
join pg_class as r on r.oid = i.indrelid
where r.relname !~ '^_?yoyo_'
    and not exists (
        select from pg_stat_progress_create_index as p
        where p.datname = current_database() and p.index_relid = c.oid)
union all
select 'trigger', format('%%I.%%I', c.relname, g.tgname), jsonb_build_object(
    'of', c.relname, 'name', g.tgname,
    'definition', pg_get_triggerdef(g.oid), 'enabled', g.tgenabled)
from o
join pg_class as c on c.relnamespace = o.oid
join pg_trigger as g on g.tgrelid = c.oid
where not g.tgisinternal
union all
select 'rule', format('%%I.%%I', c.relname, w.rulename), jsonb_build_object(
    'of', c.relname, 'name', w.rulename)
from o
join pg_class as c on c.relnamespace = o.oid
join pg_rewrite as w on w.ev_class = c.oid
where w.rulename <> '_RETURN'
union all
select 'policy', format('%%I.%%I', c.relname, y.polname), jsonb_build_object(
    'of', c.relname, 'name', y.polname)
from o
join pg_class as c on c.relnamespace = o.oid
join pg_policy as y on y.polrelid = c.oid
union all
select 'domain', t.typname, jsonb_build_object(
    'type', concat(format_type(t.typbasetype, t.typtypmod), ' ',
        t.typcollation::regcollation),
    'not null', t.typnotnull,
    'owner', pg_get_userbyid(t.typowner),
    'grants', {_ACL.format("coalesce(t.typacl, acldefault('T', t.typowner))")},
    'comment', obj_description(t.oid, 'pg_type'))
from pg_type as t, o
where t.typnamespace = o.oid and t.typtype = 'd'
union all
select 'schema', n.nspname, jsonb_build_object(
    'owner', pg_get_userbyid(n.nspowner),
    'grants', {_ACL.format("coalesce(n.nspacl, acldefault('n', n.nspowner))")})
from pg_namespace as n, o
where n.oid = o.oid
"""  # noqa: S608

# What would be there, had nobody moved it: only the Instance's owner has such things.
_MOVED = """
select k.kind, k.name, quote_ident(n.nspname)
from (
    select case relkind when 'r' then 'table' else 'type' end,
        relname::text, relnamespace, relowner
    from pg_class
    where relkind in ('r', 'c')
    union all
    select 'domain', typname::text, typnamespace, typowner
    from pg_type
    where typtype = 'd'
) as k (kind, name, namespace, owner)
join pg_namespace as n on n.oid = k.namespace
where k.owner = (select nspowner from pg_namespace where nspname = %(schema)s)
    and n.nspname <> %(schema)s and n.nspname !~ '^pg_'
"""

# What loading sql/ anew mends, or the statements of ``touches``; nothing of it can lose
# what the tables hold.
_REPAIRED = {
    "function": {"definition", "signature", "owner", "grants", "comment"},
    "view": {"definition", "owner", "grants", "type grants", "options", "comment"},
    "table": {
        *("owner", "grants", "type grants", "options", "row security", "comment"),
    },
    "sequence": {"owner", "grants"},
    "type": {"owner", "type grants", "comment"},
    "column": {"grants", "comment"},
    "index": {"definition", "valid", "options"},
    "trigger": {"definition", "enabled"},
    "domain": {"owner", "grants", "comment"},
    "schema": {"grants"},
}
# What is known of an object for its own sake, and not compared.
_ASIDE = {
    *("position", "domain", "table", "called", "arguments", "columns", "made"),
}
# What others may be built upon is dropped after them.
_DROPPED = (
    *("policy", "rule", "trigger", "view", "function", "constraint", "index"),
    *("column", "table", "sequence", "domain", "type"),
)
# So many columns of one name are no chance.
_FEW = 3
# What holds the jobs, and what became of them.
_JOBS = {"job", "live_job", "attempt"}
# What the name of an index ends in while it is built anew.
_ANEW = "_new"
REPAIR = "lenso-jobs upgrade --repair"
UNSEALED = "what inspect_health compares with is not what is there"


@dataclass(frozen=True, slots=True)
class Difference:
    """One object that is not what this release says."""

    schema: str
    kind: str
    name: str
    found: Fields | None
    wanted: Fields | None
    was: str | None = None
    """Under which other name it seems to be there; there is no ``found`` then."""
    like: str | None = None
    """Which tables may have its rows, or it theirs: they have the same columns."""
    home: str | None = None
    """In which other schema it seems to be, as SQL; there is no ``found`` then."""

    @property
    def is_lost(self) -> bool:
        """Whether jobs went with it."""
        return (
            self.kind == "table"
            and self.name in _JOBS
            and self.found is None
            and not self.is_there
        )

    @property
    def is_there(self) -> bool:
        """Whether it seems to be there, though not where it should be."""
        return (
            self.was is not None
            or self.home is not None
            or (self.like is not None and self.found is None)
        )

    @property
    def fields(self) -> list[str]:
        """What of it differs, where both have it."""
        if self.found is None or self.wanted is None:
            return []
        return [
            name
            for name, value in self.wanted.items()
            if self.found[name] != value and name not in _ASIDE
        ]

    def findings(self) -> Iterator[tuple[str, str]]:
        """Say what differs, each time with the command or the SQL that mends it."""
        if self.found is None:
            yield self._missing()
        elif self.wanted is None:
            yield self._stray()
        else:
            repaired = _REPAIRED.get(self.kind, set())
            by_repair = [name for name in self.fields if name in repaired]
            if by_repair:
                yield (
                    self._what(f"differs from this release: {', '.join(by_repair)}"),
                    REPAIR,
                )
            for name in self.fields:
                if name not in repaired:
                    yield (
                        self._what(f"differs from this release: {name}"),
                        self._change(name),
                    )

    def _missing(self) -> tuple[str, str]:
        if self.was is not None:
            state = f"; it seems to be {self.was} now"
            remedy = self._name()
        elif self.home is not None:
            state = f"; it seems to be in schema {self.home} now"
            place = f"{self.home}.{_quoted(self.name)}"
            remedy = f"alter {self.kind} {place} set schema {_quoted(self.schema)}"
        elif self.like is not None:
            state = f"; it may be one of {self.like}"
            remedy = f"give the one that it is its name again: {self._renamed()}"
        elif self.is_lost:
            state = ""
            remedy = "restore it from a backup; an empty one would only hide the loss"
        else:
            state, remedy = "", self._make() or REPAIR
        return self._what(f"is missing{state}"), remedy

    def _stray(self) -> tuple[str, str]:
        if self.like is None:
            return self._what("is not part of this release"), self._drop()
        if self.kind == "column":
            return (
                self._what(f"is not part of this release; it may be {self.like}"),
                "give it that name again if it is, and drop it if it is not",
            )
        return (
            self._what(f"is not part of this release, and like {self.like}"),
            (
                f"compare its rows with those of {self.like}: one of the two is to be "
                "dropped, and what is left to have that name"
            ),
        )

    def obstacles(self) -> Iterator[tuple[str, str]]:
        """Say what a pending migration may not get past; it replaces the rest."""
        if self.kind == "table" and self.found is None and not self.is_there:
            yield (
                self._what("is missing"),
                "restore it from a backup: migrations that are pending need it",
            )
        else:
            for statement in self.rightful():
                yield self._what("belongs to somebody else"), statement
            for what, remedy in self.findings():
                if remedy != REPAIR:
                    yield what, remedy

    def touches(self) -> Iterator[str]:
        """Write the statements of a repair that loading sql/ does not make needless."""
        if self.found is None or self.wanted is None:
            return
        for name in self.fields:
            if name in ("grants", "type grants"):
                yield from self._regrant(name)
            elif name == "options" and not self.rebuilt():
                yield from self._options()
            elif name == "enabled":
                yield f"alter table {self._of()} enable trigger {_quoted(self.wanted['name'])}"
            elif name == "comment" and self.wanted["comment"] is None:
                yield f"comment on {self._noun()} {self.place} is null"

    @property
    def place(self) -> str:
        """The object's name as SQL."""
        if self.kind == "function":
            fields = self.wanted or self.found or {}
            arguments = ", ".join(
                each if isinstance(each, str) else self._type_of_ours(*each)
                for each in fields["arguments"]
            )
            return f"{_quoted(self.schema)}.{fields['called']}({arguments})"
        if self.kind == "schema":
            return _quoted(self.schema)
        if self.kind == "column":
            return f"{_quoted(self.schema)}.{self.name}"
        return f"{_quoted(self.schema)}.{_quoted(self.name)}"

    def rightful(self) -> Iterator[str]:
        """Write what gives the object back to the owner."""
        if "owner" in self.fields and self.kind != "schema" and self.wanted:
            owner = _quoted(self.wanted["owner"])
            yield f"alter {self._noun()} {self.place} owner to {owner}"

    def replaced(self) -> Iterator[str]:
        """Write what takes away an object that CREATE OR REPLACE would not replace."""
        # Of a view with the same columns CREATE OR REPLACE makes another, and what
        # somebody built upon it stays.
        if (self.kind == "function" and "signature" in self.fields) or (
            self.kind == "view"
            and "definition" in self.fields
            and (self.found or {})["columns"] != (self.wanted or {})["columns"]
        ):
            yield f"drop {self._noun()} {self.place}"

    def rebuilt(self) -> tuple[str, ...]:
        """Write what builds an index, under another name, while everybody goes on.

        The verbs ask for an index by its name, usable or not: what is there keeps it
        until the other has been built.
        """
        if (
            self.kind != "index"
            or self.wanted is None
            or self.wanted["constraint"]
            or self.is_there
        ):
            return ()
        # What is missing is looked for by its name: it is of use from the moment at
        # which its building begins.
        name = self.name if self.found is None else self._built()
        build = (
            self.wanted["definition"]
            .replace(" INDEX ", " INDEX CONCURRENTLY ", 1)
            .replace(f" ON {self.schema}.", f" ON {_quoted(self.schema)}.", 1)
            .replace(f" {self.name} ", f" {name} ", 1)
        )
        if self.found is None:
            return (build.replace(" CONCURRENTLY ", " CONCURRENTLY IF NOT EXISTS ", 1),)
        # A build that was cut off leaves one that is not valid.
        place = f"{_quoted(self.schema)}.{_quoted(name)}"
        return f"drop index concurrently if exists {place}", build

    def alone(self) -> tuple[str, ...]:
        """Write what shuts everybody out for a moment.

        It is done in a transaction of its own: whoever has one lock and then asks for a
        stronger one, or for one on another table, meets the verbs in a deadlock.
        """
        if self.rebuilt() and self.found is not None:
            place = f"{_quoted(self.schema)}.{_quoted(self._built())}"
            rename = f"alter index {place} rename to {_quoted(self.name)}"
            return f"drop index {self.place}", rename
        if "row security" in self.fields:
            alter = f"alter table {self.place}"
            return (f"{alter} disable row level security, no force row level security",)
        return ()

    def _built(self) -> str:
        return f"{self.name}{_ANEW}"

    def _what(self, state: str) -> str:
        if self.kind == "schema":
            return f"schema {self.schema} itself {state}"
        return f"{self.kind} {self.name} {state}"

    def _noun(self) -> str:
        fields = self.wanted or self.found or {}
        if self.kind == "function":
            return "routine"
        if self.kind == "table":
            return {"m": "materialized view", "f": "foreign table"}.get(
                fields["relkind"], "table"
            )
        return self.kind

    def _of(self) -> str:
        fields = self.wanted or self.found or {}
        return f"{_quoted(self.schema)}.{_quoted(fields['of'])}"

    def _renamed(self) -> str:
        wanted = self.wanted or {}
        if self.kind == "column":
            column = _quoted(wanted["column"])
            return f"{self._table(wanted)} rename column … to {column}"
        return f"alter table {_quoted(self.schema)}.… rename to {_quoted(self.name)}"

    def _name(self) -> str:
        wanted, was = self.wanted or {}, _quoted(self.was or "")
        if self.kind == "column":
            column = _quoted(wanted["column"])
            return f"{self._table(wanted)} rename column {was} to {column}"
        if self.kind == "constraint":
            name = _quoted(wanted["name"])
            return (
                f"alter {self._constrained(wanted)} rename constraint {was} to {name}"
            )
        return (
            f"alter {self.kind} {_quoted(self.schema)}.{was} rename to "
            f"{_quoted(self.name)}"
        )

    def _drop(self) -> str:
        found = self.found or {}
        if self.kind == "column":
            return f"{self._table(found)} drop column {_quoted(found['column'])}"
        if self.kind == "constraint":
            return f"alter {self._constrained(found)} drop constraint {_quoted(found['name'])}"
        if self.kind in ("trigger", "rule", "policy"):
            return f"drop {self.kind} {_quoted(found['name'])} on {self._of()}"
        if self.kind == "index":
            # At once it would wait behind its own building, and everybody behind it.
            return f"drop index concurrently {self.place}"
        return f"drop {self._noun()} {self.place}"

    def _make(self) -> str | None:
        wanted = self.wanted or {}
        if self.kind == "column":
            rest = f" default {wanted['default']}" if wanted["default"] else ""
            make = (
                f"{self._table(wanted)} add column {_quoted(wanted['column'])} "
                f"{self._type()}{rest}"
            )
            if not wanted["not null"]:
                return make
            if rest:
                return f"{make} not null"
            return (
                f"in one transaction: {make}; its values, from a backup for instance; "
                f"{self._column()} set not null"
            )
        if self.kind == "constraint":
            return (
                f"alter {self._constrained(wanted)} add constraint "
                f"{_quoted(wanted['name'])} {wanted['definition']}"
            )
        return None

    def _change(self, field: str) -> str:
        wanted = self.wanted or {}
        if self.kind == "column":
            value = self._type() if field == "type" else wanted[field]
            name = _quoted(wanted["column"])
            cast = f" using {name}::{value}" if field == "type" else ""
            return f"{self._column()} {_of_column(field, value)}{cast}"
        if self.kind == "constraint":
            return self._change_constraint(field)
        if self.kind == "domain" and field == "not null":
            verb = "set" if wanted[field] else "drop"
            return f"alter domain {self.place} {verb} not null"
        return {
            "type": "restore the Instance from a dump: a domain's type is for good",
            "relkind": f"alter table {self.place} rename to {_quoted(f'{self.name}_old')}",
            "persistence": f"alter table {self.place} set logged",
            "owner": f"alter schema {self.place} owner to {_quoted(str(wanted[field]))}",
        }.get(field, f"drop {self._noun()} {self.place} cascade")

    def _type(self) -> str:
        """Name a column's type as it is named where the search_path is another."""
        wanted = self.wanted or {}
        if wanted["domain"] is None:
            return str(wanted["type"])
        return self._type_of_ours(wanted["domain"])

    def _type_of_ours(self, name: str) -> str:
        return f"{_quoted(self.schema)}.{_quoted(name)}"

    def _column(self) -> str:
        wanted = self.wanted or {}
        return f"{self._table(wanted)} alter column {_quoted(wanted['column'])}"

    def _table(self, fields: Fields) -> str:
        return f"alter table {_quoted(self.schema)}.{_quoted(fields['table'])}"

    def _change_constraint(self, field: str) -> str:
        wanted = self.wanted or {}
        where, name = f"alter {self._constrained(wanted)}", _quoted(wanted["name"])
        if field == "validated":
            return f"{where} validate constraint {name}"
        # ALTER DOMAIN takes one at a time.
        also = "," if wanted["of"] == "table" else f"; {where}"
        return (
            f"{where} drop constraint {name}{also} "
            f"add constraint {name} {wanted['definition']}"
        )

    def _constrained(self, fields: Fields) -> str:
        return f"{fields['of']} {_quoted(self.schema)}.{_quoted(fields['on'])}"

    def _regrant(self, field: str) -> Iterator[str]:
        found, wanted = (
            (fields or {})[field] or [] for fields in (self.found, self.wanted)
        )
        place, noun = self.place, self._noun()
        if field == "type grants" or self.kind == "domain":
            noun = "on type"
        elif self.kind == "column":
            fields = self.wanted or {}
            noun = f"({_quoted(fields['column'])}) on table"
            place = f"{_quoted(self.schema)}.{_quoted(fields['table'])}"
        else:
            noun = "on table" if self.kind == "view" else f"on {noun}"
        for grant in found:
            if grant not in wanted:
                grantee, privilege = _split(grant)
                yield f"revoke {privilege} {noun} {place} from {grantee} cascade"
        for grant in wanted:
            if grant not in found:
                grantee, privilege = _split(grant)
                yield f"grant {privilege} {noun} {place} to {grantee}"

    def _options(self) -> Iterator[str]:
        found, wanted = (
            dict(option.split("=", 1) for option in fields["options"] or [])
            for fields in (self.found or {}, self.wanted or {})
        )
        stray = sorted(found.keys() - wanted.keys())
        if stray:
            yield f"alter {self._noun()} {self.place} reset ({', '.join(stray)})"
        settings = ", ".join(
            f"{k} = {v}" for k, v in wanted.items() if found.get(k) != v
        )
        if settings:
            yield f"alter {self._noun()} {self.place} set ({settings})"


def differences(
    connection: psycopg.Connection[Any],
    schema: str,
    scripts: Iterable[str] | None = None,
) -> list[Difference]:
    """List what an Instance has otherwise than this release; changes nothing.

    Than what *scripts* make, where those are given.
    """
    with connection.transaction(force_rollback=True):
        connection.execute("set local lock_timeout = '5s'")
        found = describe(connection, schema)
        elsewhere = {
            (kind, name): home
            for kind, name, home in connection.execute(_MOVED, {"schema": schema})
        }
        owner = found["schema", schema]["owner"]
        made = texts() if scripts is None else scripts
        wanted = _described(connection, schema, owner, made)
    return _compare(schema, found, wanted, elsewhere)


def _compare(
    schema: str,
    found: Described,
    wanted: Described,
    elsewhere: dict[tuple[str, str], str],
) -> list[Difference]:
    moved = {
        key: elsewhere[key] for key in elsewhere.keys() & (wanted.keys() - found.keys())
    }
    renames = _renames(found, {k: v for k, v in wanted.items() if k not in moved})
    told = {*renames, *renames.values(), *moved}
    # What is on a table comes and goes with it, an index of a constraint with the
    # constraint, a column of a view with the view's definition, and either with a
    # column that goes; what is no table any more is told as a whole.
    other_kinds = {
        key
        for key in found.keys() & wanted.keys()
        if found[key].get("relkind") != wanted[key].get("relkind")
    }
    implied = {
        key
        for one, other in ((found, wanted), (wanted, found))
        for key, fields in one.items()
        if (
            key not in other
            and (
                (key[0] == "index" and fields["constraint"])
                or (key[0] == "column" and fields["relkind"] == "v")
                or any(
                    ("column", name) in one and ("column", name) not in other
                    for name in fields.get("columns") or ()
                    if key[0] in ("constraint", "index")
                )
            )
        )
        or any(
            place in other_kinds or (place in one and place not in other)
            for place in _places(key, fields)
        )
    }
    # What refers to a renamed column or domain is as it was once that is put back.
    tables = {found[old]["table"] for old in renames.values() if old[0] == "column"}
    types = {old[1] for old in renames.values() if old[0] == "domain"}
    types |= {f"{home}.{name}" for (_, name), home in moved.items()}
    told |= {
        key
        for key in found.keys() & wanted.keys()
        for fields in [Difference(schema, *key, found[key], wanted[key]).fields]
        if not fields
        or (
            fields == ["definition"]
            and any(name in tables for _, name in _places(key, wanted[key]))
        )
        or (fields == ["type"] and found[key]["type"] in types)
    }
    return [
        *(
            Difference(schema, *new, None, wanted[new], _own_name(old, found[old]))
            for new, old in sorted(renames.items())
        ),
        *(
            Difference(schema, *key, None, wanted[key], home=home)
            for key, home in sorted(moved.items())
        ),
        *(
            Difference(
                schema,
                *key,
                found.get(key),
                wanted.get(key),
                like=_like(key, found, wanted),
            )
            for key in sorted(
                (found.keys() | wanted.keys()) - implied - told,
                key=lambda key: (key in wanted, _dropped(key, found), key),
            )
        ),
    ]


def _like(key: tuple[str, str], found: Described, wanted: Described) -> str | None:
    """Tell which tables may have the rows of one that is missing, or too much."""
    if key in found and key in wanted:
        return None
    its, others = (found, wanted) if key in found else (wanted, found)
    if key[0] == "column" and its[key]["relkind"] == "r":
        beside = (
            fields["column"]
            for (kind, name), fields in sorted(others.items())
            if kind == "column"
            and (kind, name) not in its
            and fields["table"] == its[key]["table"]
        )
        return ", ".join(beside) or None
    if key[0] != "table":
        return None
    columns = _columns(key[1], its)
    alike = []
    for kind, other in sorted(others):
        if kind == "table" and (key in found or (kind, other) not in wanted):
            theirs = _columns(other, others)
            ours = columns if key in wanted else theirs
            # Generously: somebody may have added or retyped some since.
            if len(columns & theirs) >= max(_FEW, len(ours) / 2):
                alike.append(other)
    return ", ".join(alike) or None


def _columns(table: str, described: Described) -> set[str]:
    return {
        fields["column"]
        for (kind, _), fields in described.items()
        if kind == "column" and fields["table"] == table
    }


def _dropped(key: tuple[str, str], found: Described) -> tuple[int, int]:
    """Order what is dropped; of two views the later may be built upon the earlier."""
    rank = _DROPPED.index(key[0]) if key[0] in _DROPPED else len(_DROPPED)
    return rank, -found.get(key, {}).get("made", 0)


def _places(key: tuple[str, str], fields: Fields) -> Iterator[tuple[str, str]]:
    """Name the tables, views and domains that an object may belong to."""
    places = {"column": "table", "sequence": "table", "constraint": "on"}
    owner = fields.get(places.get(key[0], "of"))
    if owner is not None:
        yield from ((kind, owner) for kind in ("table", "view", "domain"))


def _renames(
    found: Described, wanted: Described
) -> dict[tuple[str, str], tuple[str, str]]:
    """Tell which missing object is the stray object that is like it.

    To make what is missing anew, and to drop what is too much, would lose its rows.
    """
    missing = {key: _alike(key, wanted) for key in wanted.keys() - found.keys()}
    strays = {key: _alike(key, found) for key in found.keys() - wanted.keys()}
    for kind, name in wanted:
        # What a repair that was cut off has built of an index that is there.
        if kind == "index":
            strays.pop((kind, f"{name}{_ANEW}"), None)
    renames: dict[tuple[str, str], tuple[str, str]] = {}
    for like in missing.values():
        new, old = (
            sorted(
                (key for key, its in keys.items() if its == like),
                key=lambda key: described[key].get("position", 0),
            )
            for keys, described in ((missing, wanted), (strays, found))
        )
        # Columns keep their order, whatever they are called.
        if like and len(new) == len(old) and (len(new) == 1 or like[0] == "column"):
            renames |= dict(zip(new, old, strict=True))
    return renames


def _alike(key: tuple[str, str], described: Described) -> list[Any] | None:
    """Tell what an object is apart from its name; None where that is not asked."""
    kind, name = key
    fields = described[key]
    if kind == "table":
        return [
            kind,
            sorted(
                (each["column"], each["type"])
                for (other, _), each in described.items()
                if other == "column" and each["table"] == name
            ),
        ]
    if kind == "index":
        if fields["constraint"]:
            return None
        return [kind, fields["of"], fields["definition"].replace(f" {name} ", " ", 1)]
    what = {
        "column": ("relkind", "table", "type", "not null", "default", "identity"),
        "constraint": ("of", "on", "definition"),
        "sequence": ("relkind", "persistence", "table"),
        "domain": ("type", "not null"),
        "type": ("definition",),
    }.get(kind)
    return None if what is None else [kind, *(fields[each] for each in what)]


def _own_name(key: tuple[str, str], fields: Fields) -> str:
    kind, name = key
    own: str = fields.get("column" if kind == "column" else "name", name)
    return own


def is_sealed(connection: psycopg.Connection[Any], schema: str) -> bool:
    """Tell whether what inspect_health compares with is what is there.

    To be asked where nothing differs: the function is the Instance's own.
    """
    connection.execute("select set_config('search_path', %s, true)", (schema,))
    return (
        connection.execute(
            "select from installed_object as i full join _objects() as o"
            " using (kind, name) where i.digest is distinct from o.digest limit 1"
        ).fetchone()
        is None
    )


def _described(
    connection: psycopg.Connection[Any],
    schema: str,
    owner: str,
    scripts: Iterable[str],
) -> Described:
    """Describe what they would make of the schema, in a transaction."""
    reference = f"lenso_jobs_check_{secrets.token_hex(8)}"
    with connection.transaction(force_rollback=True):
        connection.execute(
            sql.SQL("create schema {} authorization {}").format(
                sql.Identifier(reference), sql.Identifier(owner)
            )
        )
        connection.execute("select set_config('search_path', %s, true)", (reference,))
        for text in scripts:
            connection.execute(text.encode())
        return {
            (kind, name.replace(reference, schema)): _renamed(fields, reference, schema)
            for (kind, name), fields in describe(connection, reference).items()
        }


def texts(first: str = "0", *, but: str | None = None) -> Iterator[str]:
    """Read sql/, from a room on: what makes an Instance of the schema in search_path."""
    root = asset_dir("sql")
    for path in sql_files():
        room = path.relative_to(root).parts[0]
        if room >= first and not (but and room.startswith(but)):
            yield path.read_text(encoding="utf-8")


def describe(connection: psycopg.Connection[Any], schema: str) -> Described:
    """Describe the objects of a schema; leaves it in the search_path."""
    connection.execute("select set_config('search_path', %s, true)", (schema,))
    rows = connection.execute(_DESCRIBE, {"schema": schema}).fetchall()
    # A schema named like a word of SQL is quoted where the other is not.
    return {
        (kind, name): _renamed(fields, f'"{schema}"', schema)
        for kind, name, fields in rows
    }


def _renamed(fields: Fields, old: str, new: str) -> Fields:
    renamed: Fields = json.loads(
        json.dumps(fields).replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1])
    )
    return renamed


def _of_column(field: str, value: Any) -> str:  # noqa: ANN401 - as it was described
    """Write how a column comes to have that."""
    return {
        "type": f"type {value}",
        "not null": f"{'set' if value else 'drop'} not null",
        "default": f"set default {value}" if value else "drop default",
        "identity": "add generated always as identity" if value else "drop identity",
    }[field]


def _split(grant: str) -> tuple[str, str]:
    """Take apart what ``_ACL`` wrote; a quoted name may hold spaces."""
    for privilege in (
        *("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"),
        *("MAINTAIN", "EXECUTE", "USAGE", "CREATE"),
    ):
        for option in ("", " with grant option"):
            if grant.endswith(f" {privilege}{option}"):
                return grant[: -len(f" {privilege}{option}")], privilege
    raise AssertionError(grant)


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string(None)
