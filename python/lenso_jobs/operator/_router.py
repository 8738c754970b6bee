"""The router of a fleet: the places it connects, and the script that makes it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs._assets import asset_dir
from lenso_jobs._prepare import connection_string, fleet_mark
from lenso_jobs.errors import Translated
from lenso_jobs.operator._parts import bootstrapping, send
from lenso_jobs.operator._session import OperatorError
from lenso_jobs.operator._state import KINDS, declared
from lenso_jobs.secrets import SecretNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lenso_jobs.fleet import Fleet

Connection = psycopg.Connection[Any]
Objects = dict[tuple[str, str], Any]

MISSING, DIFFERENT, STRAY = "missing", "different", "stray"
# The parts of a shard's URL that the router's server needs. Each caller has its own role.
# Every role can read the options of a foreign server, so none of them may be a secret.
_KEPT = re.compile(
    "host|hostaddr|port|dbname|sslmode|sslrootcert|sslcrl|sslsni|channel_binding"
    "|gssencmode|krbsrvname|target_session_attrs|keepalives.*|tcp_user_timeout"
)
# PL/Proxy ignores connect_timeout. These settings let the kernel notice a lost server.
_WAITS = {
    "tcp_user_timeout": "10000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}
# Rows arrive as text. A default of the shard's database could change how a time is
# written.
_OPTIONS = "-c datestyle=ISO -c intervalstyle=postgres"
# The server may keep a password in a user mapping, and nowhere else.
_QUIETLY = """
set local track_activities = off; set local log_statement = 'none';
set local log_parameter_max_length = 0; set local log_parameter_max_length_on_error = 0;
set local log_min_error_statement = 'panic'; set local log_min_duration_statement = -1;
set local pg_stat_statements.track = 'none'; set local pgaudit.log = 'none'
"""
_GENTLY = "set local lock_timeout = '5s'; set local client_min_messages = warning"
_PASSWORDS = "select set_config('lenso_jobs.passwords', {}, true) is not null"
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


@dataclass(frozen=True, slots=True)
class Places:
    """The shards and the router of a fleet, with their secrets resolved."""

    fleet: Fleet
    router: str = field(repr=False)
    shards: tuple[str, ...] = field(repr=False)
    passwords: dict[str, str] = field(repr=False)
    pooler_ok: bool

    @classmethod
    def of(cls, fleet: Fleet, secrets: Callable[[str], str], pooler_ok: bool) -> Places:
        """Resolve all secrets, so that a missing one is refused before anything is done."""
        numbers = range(len(fleet.shards))
        found = cls(
            fleet,
            _hurried(connection_string(fleet.instance, secrets)),
            tuple(
                _hurried(connection_string(fleet.shard(n), secrets)) for n in numbers
            ),
            {c: _password(name, secrets) for c, name in fleet.passwords.items()},
            pooler_ok,
        )
        for number in numbers:
            found.server(number)
        return found

    @property
    def schema(self) -> str:
        """The schema of the Instance, on the shards and on the router."""
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
        server = make_conninfo(**{**_WAITS, **kept, "options": _OPTIONS})
        if "user=" in server:  # PL/Proxy would take it for a role, and name no caller
            raise SecretNotFound(
                f"the secret {self.fleet.shards[number]} must not have user= within a "
                "host, a database or a file's name"
            )
        return server

    def mark(self, number: int) -> str:
        """Say which shard it is; kept as the comment of the schema."""
        return fleet_mark(number, len(self.shards))

    def marking(self, number: int) -> str:
        """Write the statement that marks a shard."""
        schema, mark = sql.Identifier(self.schema), sql.Literal(self.mark(number))
        text = "comment on schema {} is {}"
        return sql.SQL(text).format(schema, mark).as_string(None)


def _hurried(conninfo: str) -> str:
    """Wait at most 10 s for a server that does not respond, then go on to the next."""
    given: dict[str, Any] = {"connect_timeout": 10, **conninfo_to_dict(conninfo)}
    return make_conninfo(**given)


def _password(name: str, secrets: Callable[[str], str]) -> str:
    given = secrets(name)
    if not isinstance(given, str) or not given or "\0" in given:
        raise SecretNotFound(f"the secret {name} is no password")
    return given


# The statements that can refuse: the last of them is 0_server.sql.
_REFUSALS = 5


def script(places: Places) -> list[str]:
    """Write what makes the router, apart from the passwords."""
    root = asset_dir("sql")
    numbered = sorted(path.name for path in root.glob("router/[1-9]*.sql"))
    servers = json.dumps([places.server(n) for n in range(len(places.shards))])
    given = "select set_config('lenso_jobs.servers', {}, true)"
    path, beside = _path(places.schema), "_lenso_jobs_types"

    def texts(*names: str) -> list[str]:
        return [(root / name).read_text(encoding="utf-8") for name in names]

    return [
        *bootstrapping(places.fleet.instance).statements,
        sql.SQL(given).format(sql.Literal(servers)).as_string(None),
        path,
        *texts("router/0_server.sql"),
        f"create schema {beside}",
        _path(beside),
        *texts("1_types.sql"),
        path,
        *texts("router/0_types.sql", "1_types.sql", "3_errors.sql", "3_reasons.sql"),
        *texts("4_internal/_catalogue_grants.sql"),
        *texts(*(f"router/{name}" for name in numbered)),
    ]


def for_psql(places: Places) -> tuple[str, ...]:
    """Write what makes the router for psql, which has the passwords in a variable."""
    passwords = (_QUIETLY, _PASSWORDS.format(":'passwords'"))
    return (*(passwords if places.passwords else ()), _GENTLY, *script(places))


def refuse(connection: Connection, places: Places) -> None:
    """Raise what the script would refuse, and change nothing."""
    if connection.execute("show is_superuser").fetchone() != ("on",):
        raise OperatorError(
            f"the secret {places.fleet.instance.database_url_secret} must hold a "
            "superuser's URL, because PL/Proxy is an untrusted language"
        )
    with Translated(), connection.transaction(force_rollback=True):
        send(connection, _GENTLY)
        for statement in script(places)[:_REFUSALS]:
            send(connection, statement)


def version(connection: Connection, schema: str) -> int:
    """Return the version of the schema that the router was made for; 0: it is damaged."""
    statement = sql.SQL("select version from {}.installed_version")
    try:
        row = connection.execute(statement.format(sql.Identifier(schema))).fetchone()
    except psycopg.errors.UndefinedTable:
        row = None
    return row[0] if row else 0


def load(
    connection: Connection, places: Places, *, keeps: bool
) -> list[tuple[str, str]]:
    """Load the router's functions, and return each object and how it changes.

    Rolled back where nothing changes, so that sessions keep their plans.

    Args:
        connection: A superuser's session on the router.
        places: The shards and the router.
        keeps: False to roll it back in any case.

    Returns:
        Names of objects, each with one of the words ``MISSING``, ``DIFFERENT``, ``STRAY``.
    """
    with Translated(), connection.transaction(force_rollback=not keeps) as transaction:
        send(connection, _GENTLY)
        before = _described(connection, places)
        if places.passwords:
            send(connection, _QUIETLY)
            passwords = json.dumps(places.passwords)
            connection.execute(_PASSWORDS.format("%s"), (passwords,))
        for statement in script(places):
            send(connection, statement)
        changes = list(_changes(before, _described(connection, places)))
        if not changes:
            raise psycopg.Rollback(transaction)
    return changes


def _changes(before: Objects, after: Objects) -> Iterator[tuple[str, str]]:
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            word = DIFFERENT if key in before else MISSING
            yield " ".join(key), word if key in after else STRAY


def _described(connection: Connection, places: Places) -> Objects:
    """Describe everything that the script makes."""
    instance = places.fleet.instance
    file = asset_dir("sql") / "4_internal" / "_catalogue_objects.sql"
    name = " _catalogue_objects("
    # Not the installed function: it may have been replaced.
    made = file.read_text(encoding="utf-8").replace(name, f" pg_temp.{name.strip()}")
    send(connection, _path(places.schema))
    send(connection, made)
    rows = connection.execute(
        "select kind, name, facts - 'made' from pg_temp._catalogue_objects(%s)",
        (places.schema,),
    ).fetchall()
    groups = [f"{instance.prefix}_{kind}" for kind in KINDS]
    of = {"roles": [*groups, *declared(instance)], "server": f"{places.schema}_shards"}
    rows += connection.execute(_OTHERS, of).fetchall()
    return {(kind, name): facts for kind, name, facts in rows}


def _path(schema: str) -> str:
    path = sql.SQL("set local search_path = {}, pg_temp").format(sql.Identifier(schema))
    return path.as_string(None)
