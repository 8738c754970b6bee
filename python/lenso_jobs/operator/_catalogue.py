"""The objects of an Instance beside those of this release, read in one transaction.

The release is loaded beside the Instance, into a schema of the same owner. Its own query
describes both, so that nothing is compared across versions or notations. No function of
the Instance runs, because it may be damaged. The caller rolls the transaction back.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from lenso_jobs._assets import asset_dir, sql_files
from lenso_jobs.operator._objects import Finding, columns_of, differences
from lenso_jobs.operator._state import Catalogue, Facts, Key, Objects, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lenso_jobs.config import Configuration

# What inspect_health finds, too. The differences of objects are told one by one instead.
_FAULTS = """
select concat_ws(' ', f.subject, f.detail), coalesce(f.remedy, h.remedy), '', f.finding
from (
    select f.*
    from unnest(array['roles', 'settings', 'history']) as p (part)
    cross join _health_part(p.part) as f
    union all
    select f.* from _health_objects(%(schema)s) as f
) as f
left join health_finding as h using (finding)
where coalesce(f.remedy, h.remedy) <> 'lenso-jobs check'
    and f.detail <> 'is missing with its object'
"""
_DATA = (
    """
select 'the row of instance does not repeat the tables queue and caller',
    format('update %%I.queue set queue = queue', %(schema)s::text), '', 'not_configured'
where not {1}._policy_is_published()
""",
    """
select format('%%s is not declared and has %%s', l.queue,
        {1}._health_counted(count(*), 'live job')),
    case when l.queue = any (%(queues)s) then 'lenso-jobs configure' else h.remedy end,
    '', h.finding
from {0}.live_job as l
join {1}.health_finding as h on h.finding = 'queue_undeclared'
where l.queue not in (select queue from {0}.queue)
group by l.queue, h.finding, h.remedy
""",
)
# The sequences of queues, which configure makes. A renamed one is used as well.
_FLOOR = re.compile("claim_floor_[0-9]+_(at|id|scan)")
_COPY = "insert into {copy} ({columns}) select {columns} from {table} returning 1"
_ACTS = "operator_act_operator_act_id_seq"
_COPIES = {
    "operator_act": """
select setval({numbers}, last_value, is_called) from {sequence};
insert into {copy} ({columns}) overriding system value
select {columns} from {table} order by operator_act_id desc limit 1
"""
}


def _floors(
    connection: psycopg.Connection[Any], schema: str, found: Objects
) -> Objects:
    """Return the sequences that queues have or had as their claim floor."""
    floors = sql.SQL("select unnest(floor)::oid::bigint from {}.queue")
    used = {oid for (oid,) in _tried(connection, floors.format(sql.Identifier(schema)))}
    return {
        key: facts
        for key, facts in found.items()
        if key[0] == "sequence" and (_FLOOR.fullmatch(key[1]) or facts["made"] in used)
    }


def load(
    connection: psycopg.Connection[Any], state: State, configuration: Configuration
) -> State:
    """Add what only a comparison with this release shows: objects, rights, faults.

    Where migrations are pending, the objects are compared with those that the applied
    migrations make.
    """
    schema = state.schema
    release = _made(connection, state, texts("1", "8"))
    wanted = _described(connection, release, release, schema)
    found = _described(connection, release, schema, schema)
    floors = _floors(connection, schema, found)
    if not state.is_ours:
        return replace(state, catalogue=Catalogue(found, wanted | floors))
    faults = _faults(connection, state, configuration, release, found, wanted)
    workers = connection.execute(
        "select sum(sessions) from _session_workers()"
    ).fetchone()
    if not state.is_whole and not state.missing(*state.groups.values()):
        newest = wanted
        before = _made(connection, state, _applied(state))
        wanted = _described(connection, release, before, schema)
        # An object of this release is no stray, even if the records lag behind.
        found = {k: v for k, v in found.items() if k in wanted or k not in newest}
    wanted |= floors
    rows = {
        key: _rows(connection, schema, key, facts)
        for key, facts in found.items()
        if key not in wanted or (key[0] == "type" and facts != wanted[key])
    }
    catalogue = Catalogue(found, wanted, rows)
    is_equal = state.is_whole and not differences(schema, catalogue)
    if is_equal and state.holds("installed_digest"):
        # Only here a function of the Instance runs: it was compared.
        _look_in(connection, schema)
        stored = connection.execute(
            "select from installed_digest where digest = _catalogue_digest()"
        )
        catalogue = replace(catalogue, digest_is_stored=stored.rowcount > 0)
    return replace(
        state,
        catalogue=catalogue,
        faults=faults,
        worker_sessions=int((workers and workers[0]) or 0),
    )


def texts(first: str = "0", last: str = "9") -> Iterator[str]:
    """Read the files of sql/, from one numbered folder or file to another."""
    root = asset_dir("sql")
    for path in sql_files():
        if first <= path.relative_to(root).as_posix()[0] <= last:
            yield path.read_text(encoding="utf-8")


def _applied(state: State) -> Iterator[str]:
    applied = [each.number for each in state.known if each.name in state.applied]
    for each in state.known:
        if each.number <= max([state.version, *applied]):
            # An index of an empty table is made at once; the other way is refused in a
            # transaction.
            for text in each.statements:
                if each.transactional or "concurrently" not in text:
                    yield text


def _made(
    connection: psycopg.Connection[Any], state: State, scripts: Iterable[str]
) -> str:
    """Make a schema beside the Instance, of the same owner; return its name."""
    name = f"lenso_jobs_check_{secrets.token_hex(8)}"
    owner = sql.Identifier(state.groups["owner"] if state.is_ours else state.user)
    connection.execute(
        sql.SQL("create schema {} authorization {}; set local role {}").format(
            sql.Identifier(name), owner, owner
        )
    )
    _look_in(connection, f"{name}, pg_temp")
    # As 0_open.sql does.
    connection.execute("set local check_function_bodies = off")
    for script in scripts:
        connection.execute(script.encode())
    connection.execute("reset role")
    return name


def _look_in(connection: psycopg.Connection[Any], path: str) -> None:
    set_path = "select pg_catalog.set_config('search_path', %s, true)"
    connection.execute(set_path, (path,))


def _described(
    connection: psycopg.Connection[Any], release: str, name: str, schema: str
) -> Objects:
    """Describe a schema by the release's query, as if it had the Instance's name."""
    quoted = sql.Identifier(schema).as_string(None)
    row = connection.execute("select pg_catalog.quote_ident(%s)", (schema,)).fetchone()
    as_word = str(row[0]) if row else quoted
    _look_in(connection, quoted if name == schema else name)
    query = sql.SQL("select kind, name, facts from {}(%s)").format(
        sql.Identifier(release, "_catalogue_objects")
    )
    described = {}
    for kind, its_name, facts in connection.execute(query, (name,)).fetchall():
        text = json.dumps(facts)
        if name != schema:
            text = text.replace(f"'{name}'", f"'{schema}'")
            text = text.replace(name, json.dumps(as_word)[1:-1])
        known: Facts = json.loads(text)
        # The table tells two indexes of one definition apart, and sequences of columns.
        of = {"index": "of", "sequence": "table"}.get(kind)
        key = f"{known[of]}.{its_name}" if of and known[of] else its_name
        described[kind, schema if kind == "schema" else key] = known
    return described


def _faults(  # noqa: PLR0913, PLR0917 - two schemas and what was read of them
    connection: psycopg.Connection[Any],
    state: State,
    configuration: Configuration,
    release: str,
    found: Objects,
    wanted: Objects,
) -> tuple[Finding, ...]:
    """Have the functions of the release judge what they can tell of the Instance."""
    schema = sql.Identifier(state.schema)
    # They judge the roles by copies of policy, queues and callers.
    for table in ("queue", "caller", "instance", "operator_act"):
        shared = columns_of(table, found) & columns_of(table, wanted)
        if state.holds(table) and shared:
            _tried(
                connection,
                sql.SQL(_COPIES.get(table, _COPY)).format(
                    copy=sql.Identifier(release, table),
                    columns=sql.SQL(", ").join(map(sql.Identifier, sorted(shared))),
                    table=sql.Identifier(state.schema, table),
                    sequence=sql.Identifier(state.schema, _ACTS),
                    numbers=sql.Literal(f"{release}.{_ACTS}"),
                ),
            )
    # Names within the Instance, while the functions are the release's.
    names = sql.SQL("alter function {}(text) {} search_path{}")
    objects = sql.Identifier(release, "_catalogue_objects")
    to_schema = sql.SQL(" = {}").format(schema)
    connection.execute(names.format(objects, sql.SQL("set"), to_schema))
    _look_in(connection, release)
    of = {"schema": state.schema, "queues": [*configuration.queues]}
    faults = connection.execute(_FAULTS, of).fetchall()
    connection.execute(names.format(objects, sql.SQL("reset"), sql.SQL("")))
    # The tables of the Instance.
    _look_in(connection, f"{schema.as_string(None)}, pg_temp")
    for statement in _DATA:
        named = sql.SQL(statement).format(schema, sql.Identifier(release))
        faults += _tried(connection, named, of)
    _look_in(connection, release)
    # Where a table is lost, so is what it would have declared.
    lost = () if state.stored else ("not_configured", "membership_stray")
    return tuple(
        Finding(*(word.replace(release, state.schema) for word in fault))
        for fault in faults
        if fault[3] not in lost
    )


def _tried(
    connection: psycopg.Connection[Any],
    statement: sql.Composed,
    values: dict[str, Any] | None = None,
) -> list[Any]:
    """Return the rows of a statement, or nothing where the damage makes it fail."""
    try:
        with connection.transaction():
            return connection.execute(statement, values).fetchall()
    except psycopg.Error:
        return []


def _rows(
    connection: psycopg.Connection[Any], schema: str, key: Key, facts: Facts
) -> str:
    """Say how much of the data would go with an object; nothing where none would."""
    kind, name = key
    is_table = facts.get("relkind") in ("r", "p")
    table = sql.Identifier(schema, facts.get("table") or name)
    if kind == "table" and is_table:
        what, ask = "row", sql.SQL("select count(*) from {}").format(table)
    elif kind == "column" and is_table:
        column = sql.Identifier(facts["column"])
        what, ask = "value", sql.SQL("select count({}) from {}").format(column, table)
    elif kind == "type":
        what = "column of that type"
        ask = sql.SQL(
            "select count(*) from pg_attribute as a join pg_class as c on c.oid = a.attrelid"
            " where c.relkind in ('r', 'p', 'm') and not a.attisdropped and a.atttypid in"
            " (select unnest(array[oid, typarray]) from pg_type where oid = {}::regtype)"
        ).format(sql.Literal(table.as_string(None)))
    else:
        return "the number that it has reached" if kind == "sequence" else ""
    # A policy of its owner's would run with our rights.
    connection.execute("set local row_security = off")
    counted = _tried(connection, ask)
    connection.execute("set local row_security = on")
    if not counted:
        return f"an unknown number of {what}s"
    count = counted[0][0]
    if kind == "type" and not count:
        return ""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
