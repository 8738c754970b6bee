"""Acts on a fleet: on one shard after the other, and on the router last."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs._assets import asset_dir
from lenso_jobs._prepare import connection_string
from lenso_jobs.errors import JobsError, Translated
from lenso_jobs.operator import _setup
from lenso_jobs.operator._parts import Act, bootstrapping, send
from lenso_jobs.operator._session import (
    OperatorError,
    connected,
    exclusively,
    silent,
)
from lenso_jobs.operator._setup import Report, patiently
from lenso_jobs.operator._state import KINDS, declared
from lenso_jobs.secrets import SecretNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lenso_jobs.config import Configuration
    from lenso_jobs.fleet import Fleet

T = TypeVar("T")
Connection = psycopg.Connection[Any]
Objects = dict[tuple[str, str], Any]

FLEET = "lenso-jobs fleet "
# Of a shard's URL, what also the router's server needs. Roles are the callers' own, and
# everybody may read the options of a foreign server.
_KEPT = re.compile(
    "host|hostaddr|port|dbname|sslmode|sslrootcert|sslcrl|sslsni|channel_binding"
    "|gssencmode|krbsrvname|target_session_attrs|keepalives.*|tcp_user_timeout"
)
# Rows come as text. A default of the shard's database could make another time of it.
_OPTIONS = "-c datestyle=ISO -c intervalstyle=postgres"
_SHARD = """
select concat_ws(
        ' ', c.system_identifier, d.oid, extract(epoch from pg_postmaster_start_time())
    ), obj_description(n.oid, 'pg_namespace'),
    exists (select from pg_class where relnamespace = n.oid and relname = 'job'),
    exists (select from pg_proc where pronamespace = n.oid and proname = '_shards')
from pg_control_system() as c
join pg_database as d on d.datname = current_database()
left join pg_namespace as n on n.nspname = %s
"""
# Nothing of the passwords may be kept by the server, apart from the user mappings.
_QUIETLY = """
set local track_activities = off; set local log_statement = 'none';
set local log_parameter_max_length = 0; set local log_parameter_max_length_on_error = 0;
set local log_min_error_statement = 'panic'; set local log_min_duration_statement = -1;
set local pg_stat_statements.track = 'none'; set local pgaudit.log = 'none'
"""
_MARK = re.compile(r"shard \d+ of \d+")
_PASSWORDS = "select set_config('lenso_jobs.passwords', {}, true)"
_OTHERS = """
select 'role', rolname::text, '' from pg_roles where rolname = any (%(roles)s)
union all
select 'membership', format('of %%s in %%s', m.member::regrole, m.roleid::regrole), ''
from pg_auth_members as m join pg_roles as r on r.oid = m.roleid
where r.rolname = any (%(roles)s)
union all
select 'server', s.srvname::text, format('%%s %%s', s.srvoptions, s.srvacl)
from pg_foreign_server as s where s.srvname = %(server)s
union all
select 'user mapping of', usename::text, umoptions::text
from pg_user_mappings where srvname = %(server)s
union all
select 'event trigger', evtname::text, format('%%s %%s %%s', evtenabled, evttags, evtfoid)
from pg_event_trigger where evtname in (%(server)s, %(server)s || '_drop')
"""


class FleetError(OperatorError):
    """A part of a fleet failed. What was done stays; run the command again."""

    def __init__(
        self, done: Mapping[str, Any], errors: Mapping[str, Exception]
    ) -> None:
        self.done = dict(done)
        """What was done, by the name of the shard or the router."""
        self.errors = dict(errors)
        """What failed, by the same names."""
        lines = [f"{name}: {str(error).strip()}" for name, error in errors.items()]
        super().__init__("\n".join([*lines, "run this again: what was done stays"]))


def setup_fleet(
    fleet: Fleet,
    secrets: Callable[[str], str],
    *,
    break_lock: bool = False,
    say: Callable[[str], None] = silent,
    pooler_ok: bool = False,
) -> dict[str, Report]:
    """Make the Instance on each shard, and the functions of the router.

    Safe to run again. The router is made when all shards are well.

    Args:
        fleet: The fleet's document.
        secrets: Turns the references of the document into URLs and passwords. The
            router's URL must be a superuser's.
        break_lock: As ``setup``.
        say: As ``setup``.
        pooler_ok: As ``setup``.

    Returns:
        What was done, by the name of the shard or the router.

    Raises:
        SecretNotFound: A secret is missing, or is no URL.
        OperatorError: The document does not fit the fleet that is there.
        JobsError: The router refuses.
        FleetError: A shard failed. The others are done, and the router is not.
        psycopg.Error: The router cannot be reached, or refused a statement.
    """
    act = partial(_setup.setup, break_lock=break_lock, say=say, pooler_ok=pooler_ok)
    return _through(_Places.of(fleet, secrets, pooler_ok), "setup", act, _made, say=say)


@dataclass(frozen=True, slots=True)
class _Places:
    """The shards and the router of a fleet, with their secrets resolved."""

    fleet: Fleet
    router: str
    shards: tuple[str, ...]
    passwords: dict[str, str]
    pooler_ok: bool

    @classmethod
    def of(
        cls, fleet: Fleet, secrets: Callable[[str], str], pooler_ok: bool
    ) -> _Places:
        """Resolve all secrets, so that nothing is begun while one is missing."""
        numbers = range(len(fleet.shards))
        found = cls(
            fleet,
            connection_string(fleet.instance, secrets),
            tuple(connection_string(fleet.shard(n), secrets) for n in numbers),
            {caller: secrets(name) for caller, name in fleet.passwords.items()},
            pooler_ok,
        )
        for number in numbers:
            found.server(number)
        return found

    @property
    def schema(self) -> str:
        return self.fleet.instance.schema_

    def name(self, number: int | None = None) -> str:
        """Name a shard, or the router, with its secret."""
        if number is None:
            return f"router ({self.fleet.instance.database_url_secret})"
        return f"shard {number} ({self.fleet.shards[number]})"

    def server(self, number: int) -> str:
        """Return how the router's server reaches a shard."""
        given = conninfo_to_dict(self.shards[number])
        kept = {name: str(given[name]) for name in given if _KEPT.fullmatch(name)}
        if not ({"host", "hostaddr"} & kept.keys() and "dbname" in kept):
            raise SecretNotFound(
                f"the secret {self.fleet.shards[number]} must name host and database, "
                "because the router's server connects to it, too"
            )
        return make_conninfo(**{"connect_timeout": "10", **kept, "options": _OPTIONS})

    def mark(self, number: int) -> str:
        """Say which shard it is; kept as the comment of the schema."""
        return f"shard {number} of {len(self.shards)}"

    def marking(self, number: int) -> str:
        """Write the statement that marks a shard."""
        schema, mark = sql.Identifier(self.schema), sql.Literal(self.mark(number))
        text = "comment on schema {} is {}"
        return sql.SQL(text).format(schema, mark).as_string(None)


def _through(  # noqa: PLR0913 - two functions, and how they are used
    places: _Places,
    act: Act,
    of_shard: Callable[[Configuration, str], T],
    of_router: Callable[[Connection, _Places], T],
    *,
    say: Callable[[str], None] = silent,
    keeps: bool = True,
) -> dict[str, T]:
    """Do an act on each shard, then on the router if all shards are well."""
    done: dict[str, T] = {}
    with connected(places.router, pooler_ok=places.pooler_ok) as connection:
        with exclusively(connection, places.schema, say):
            errors = _look(connection, places, act)
        with exclusively(connection, places.schema, say) if keeps else nullcontext():
            for number, conninfo in enumerate(places.shards):
                name = places.name(number)
                if name in errors:
                    continue
                try:
                    done[name] = of_shard(places.fleet.shard(number), conninfo)
                    if act == "setup" and keeps:
                        _mark(places, number)
                except (JobsError, OperatorError, psycopg.Error) as error:
                    errors[name] = error
            if not (errors and keeps):
                done[places.name()] = of_router(connection, places)
    if errors:
        raise FleetError(done, errors)
    return done


def _look(connection: Connection, places: _Places, act: Act) -> dict[str, Exception]:
    """Refuse what does not fit, before anything is changed; return who is not reached."""
    schema = places.schema
    errors: dict[str, Exception] = {}
    seen: dict[str, str] = {}
    is_known = _is_router(connection, schema)
    if not is_known and act != "setup":
        raise OperatorError(f"the router of {schema} is not set up; run: {FLEET}setup")
    for number, conninfo in enumerate(places.shards):
        name = places.name(number)
        try:
            with connected(
                conninfo, read_only=True, pooler_ok=places.pooler_ok
            ) as shard:
                ((server, mark, has_jobs, is_router),) = shard.execute(
                    _SHARD, (schema,)
                ).fetchall()
        except (OperatorError, psycopg.Error) as error:
            errors[name] = error
            continue
        fault = None
        if server in seen:
            fault = f"is the database of {seen[server]}, too: each needs its own"
        elif is_router:
            fault = "is the router of a fleet"
        elif mark not in {None, places.mark(number)} and _MARK.fullmatch(mark):
            fault = f"is {mark} already: keep the number and the order of the shards"
        elif is_known and not has_jobs and act == "setup":
            fault = (
                "has no Instance, but the fleet has its jobs: bring its data here first. "
                "If they are lost, run lenso-jobs setup with the document of this shard"
            )
        if fault is not None:
            raise OperatorError(f"{name} {fault}")
        seen[server] = name
    with Translated(), connection.transaction(force_rollback=True):
        for statement in _script(places)[:_FIRST_STEPS]:
            send(connection, statement)
    return errors


def _is_router(connection: Connection, schema: str) -> bool:
    found = connection.execute(
        "select from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace"
        " where n.nspname = %s and p.proname = '_shards'",
        (schema,),
    )
    return found.fetchone() is not None


def _mark(places: _Places, number: int) -> None:
    with connected(places.shards[number], pooler_ok=places.pooler_ok) as connection:
        send(connection, places.marking(number))


# The router.

# bootstrap.sql with its document, then the servers and 0_server.sql: these refuse.
_FIRST_STEPS = 5


def _script(places: _Places) -> list[str]:
    """Write what makes the router, apart from the passwords."""
    root, schema = asset_dir("sql"), sql.Identifier(places.schema)
    servers = json.dumps([places.server(n) for n in range(len(places.shards))])

    def text(name: str) -> str:
        return (root / name).read_text(encoding="utf-8")

    def path(of: sql.Identifier) -> str:
        return sql.SQL("set local search_path = {}, pg_temp").format(of).as_string(None)

    given = sql.SQL("select set_config('lenso_jobs.servers', {}, true)")
    beside = "_lenso_jobs_types"
    return [
        *bootstrapping(places.fleet.instance).statements,
        given.format(sql.Literal(servers)).as_string(None),
        path(schema),
        text("router/0_server.sql"),
        f"create schema {beside}",
        path(sql.Identifier(beside)),
        text("1_types.sql"),
        path(schema),
        text("router/0_types.sql"),
        text("1_types.sql"),
        text("3_errors.sql"),
        text("3_reasons.sql"),
        text("4_internal/_catalogue_grants.sql"),
        *map(
            text, sorted(f"router/{path.name}" for path in root.glob("router/[1-9]*"))
        ),
    ]


def _made(connection: Connection, places: _Places) -> Report:
    words = patiently(partial(_load, connection, places), "the router", silent)
    return Report(rights=words)


def _load(
    connection: Connection, places: _Places, *, keeps: bool = True
) -> tuple[str, ...]:
    """Load the router's functions, and return in words what that changes.

    Rolled back where it changes nothing, so that sessions keep their plans.
    """
    is_known = _is_router(connection, places.schema)
    with Translated(), connection.transaction(force_rollback=not keeps) as transaction:
        send(connection, "set local lock_timeout = '5s'")
        send(connection, "set local client_min_messages = warning")
        before = _described(connection, places)
        if places.passwords:
            send(connection, _QUIETLY)
            passwords = json.dumps(places.passwords)
            connection.execute(_PASSWORDS.format("%s"), (passwords,))
        for statement in _script(places):
            send(connection, statement)
        after = _described(connection, places)
        words = tuple(_changes(before, after))
        if not words:
            raise psycopg.Rollback(transaction)
    return words if is_known or not keeps else ("the router is made",)


def _changes(before: Objects, after: Objects) -> Iterator[str]:
    for kind, name in sorted(before.keys() | after.keys()):
        key = (kind, name)
        if key not in before:
            yield f"{kind} {name} is missing"
        elif key not in after:
            yield f"{kind} {name} does not belong to this release"
        elif before[key] != after[key]:
            yield f"{kind} {name} differs"


def _described(connection: Connection, places: _Places) -> Objects:
    """Describe everything that the script makes."""
    schema, instance = places.schema, places.fleet.instance
    path = sql.SQL("set local search_path = {}, pg_temp").format(sql.Identifier(schema))
    connection.execute(path)
    file = asset_dir("sql") / "4_internal" / "_catalogue_objects.sql"
    own = "function pg_temp._catalogue_objects("
    send(
        connection,
        file.read_text(encoding="utf-8").replace("function _catalogue_objects(", own),
    )
    rows = connection.execute(
        "select kind, name, facts - 'made' from pg_temp._catalogue_objects(%s)",
        (schema,),
    )
    found = {(kind, name): facts for kind, name, facts in rows.fetchall()}
    groups = [f"{instance.prefix}_{kind}" for kind in KINDS]
    of = {"roles": [*groups, *declared(instance)], "server": f"{schema}_shards"}
    return found | {
        (kind, name): facts
        for kind, name, facts in connection.execute(_OTHERS, of).fetchall()
    }
