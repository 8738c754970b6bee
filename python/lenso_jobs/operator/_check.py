"""Finding what differs between an Instance, this release, and its document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from lenso_jobs.operator._changes import (
    KINDS,
    MEMBERS,
    declared,
    groups_of,
    policy,
    stored_callers,
)
from lenso_jobs.operator._differences import (
    REPAIR,
    UNSEALED,
    differences,
    is_sealed,
)
from lenso_jobs.operator._migrations import (
    YOYO_TABLES,
    installed_version,
    locker,
    recorded,
    released,
)
from lenso_jobs.operator._roles import (
    missing,
    of_others,
    other_prefix,
    rename,
    renamed_callers,
    renamed_group,
    renamed_schema,
    revoke,
)
from lenso_jobs.operator._session import (
    OperatorError,
    connected,
    holds,
    owner_of,
    taken_back,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lenso_jobs.config import Configuration
    from lenso_jobs.operator._migrations import Migration

_SETUP = "lenso-jobs setup"
_UPGRADE = "lenso-jobs upgrade"
_CONFIGURE = "lenso-jobs configure"
# Their members read, write or lock every table, whatever was granted there.
_BEYOND_GRANTS = ("pg_read_all_data", "pg_write_all_data", "pg_maintain")


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, and what mends it."""

    what: str
    remedy: str
    """A command of lenso-jobs, with the same document; else SQL, as the owner."""


def check(configuration: Configuration, conninfo: str) -> list[Finding]:
    """List every difference; none means the Instance is as release and document say.

    Changes nothing. Where migrations are pending, of the objects only what is in their
    way is told, and nothing where a group role is missing.

    Raises:
        OperatorError: The Instance is missing, or the role may not look.
        psycopg.Error: The server cannot be reached.
    """
    schema = configuration.schema_
    with connected(conninfo, configuration) as connection:
        owner = owner_of(connection, schema)
        if owner is None:
            raise OperatorError(
                renamed_schema(connection, configuration)
                or f"schema {schema} does not exist; run: lenso-jobs setup"
            )
        if owner != configuration.owner:
            return _of_roles(connection, configuration, owner)
        if not (
            holds(connection, schema, "instance")
            or recorded(connection, schema)
            or installed_version(connection, schema)
        ):
            raise OperatorError(
                f"schema {schema} holds no whole Instance; run: lenso-jobs setup"
            )
        who = (
            "check needs a role that owns the Instance and may create a schema in the "
            "database"
        )
        with taken_back(connection, who, writes=True):
            found = _findings(connection, configuration)
    # What the commands leave comes first: it may be in the way of one.
    return sorted(found, key=_turn)


def _turn(finding: Finding) -> int:
    commands = [f"{_UPGRADE} --break-lock", _SETUP, _UPGRADE, REPAIR, _CONFIGURE]
    is_command = finding.remedy in commands
    return 1 + commands.index(finding.remedy) if is_command else 0


def _of_roles(
    connection: psycopg.Connection[Any], configuration: Configuration, owner: str
) -> list[Finding]:
    """List what is wrong with the roles alone: what is in the schema may be anybody's."""
    other = other_prefix(connection, configuration)
    if other is not None:
        raise OperatorError(other)
    groups = [*_groups(connection, configuration)]
    given_away = []
    if _owns_tables(connection, configuration):
        back = (configuration.schema_, configuration.owner)
        given_away.append(
            Finding(
                f"schema {configuration.schema_} belongs to {owner}",
                _sql("alter schema {} owner to {}", *back),
            )
        )
    elif not groups:
        raise OperatorError(
            f"schema {configuration.schema_} belongs to {owner}, not to "
            f"{configuration.owner}; set the role_prefix that it was set up with, or "
            "choose another schema and run: lenso-jobs setup"
        )
    found = [
        *given_away,
        *_members(connection, configuration),
        *_powers(connection, configuration),
        *groups,
    ]
    return sorted(found, key=_turn)


def _owns_tables(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> bool:
    # Nobody makes a table somebody else's who is not of them.
    row = connection.execute(
        "select count(*) from pg_class as c join pg_namespace as n"
        " on n.oid = c.relnamespace where n.nspname = %s"
        " and c.relname in ('instance', 'job', 'live_job')"
        " and pg_get_userbyid(c.relowner) = %s",
        (configuration.schema_, configuration.owner),
    ).fetchone()
    return row is not None and row[0] > 0


def _findings(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> list[Finding]:
    schema = configuration.schema_
    books = _Books(
        released(), recorded(connection, schema), installed_version(connection, schema)
    )
    groups = [*_groups(connection, configuration)]
    found = [
        # First, since nothing that is told below could be done.
        *_read_only(connection, configuration),
        *books.findings(),
        # Before the groups have their names again: it is told by those they have.
        *_members(connection, configuration),
        *_powers(connection, configuration),
        *groups,
    ]
    if not groups:
        found += _bookkeeping(connection, configuration)
    if not groups and books.is_whole:
        different = differences(connection, schema)
        found += (
            Finding(what, remedy)
            for difference in different
            for what, remedy in difference.findings()
        )
        if not different and not is_sealed(connection, schema):
            found.append(Finding(UNSEALED, REPAIR))
    elif not groups:
        found += _obstacles(connection, schema, books.applied())
    # The tables may be what is missing.
    connection.execute("savepoint policy")
    try:
        found += _policy(connection, configuration)
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
        connection.execute("rollback to savepoint policy")
    return found


@dataclass(frozen=True, slots=True)
class _Books:
    """What an Instance says of its migrations."""

    known: list[Migration]
    has: set[str]
    """Those that are recorded."""
    version: int

    @property
    def is_known(self) -> bool:
        """Whether all that it says is of this release."""
        names = {each.name for each in self.known}
        return self.has <= names and self.version <= self.known[-1].number

    @property
    def is_whole(self) -> bool:
        """Whether every migration was applied and no other, recorded or not."""
        is_newest = self.version == self.known[-1].number
        return self.is_known and (len(self.has) == len(self.known) or is_newest)

    def findings(self) -> Iterator[Finding]:
        """Tell what is pending, not recorded, or too new."""
        for each in self.known:
            if each.name not in self.has:
                was_applied = each.number <= self.version
                state = "applied and not recorded" if was_applied else "pending"
                # Of an Instance that says nothing of itself set-up takes care.
                remedy = _UPGRADE if self.has or self.version else _SETUP
                yield Finding(f"migration {each.name} is {state}", remedy)
        strange = sorted(self.has - {each.name for each in self.known})
        for name in strange:
            yield Finding(
                f"migration {name} is not part of this release",
                "install the release that applied it",
            )
        if not strange and not self.is_known:
            yield Finding(
                f"version {self.version} is newer than this release",
                "install the release that made it",
            )

    def applied(self) -> list[Migration]:
        """List those that were applied; none where that cannot be told."""
        recorded = [each.number for each in self.known if each.name in self.has]
        newest = max([self.version, *recorded]) if self.is_known else 0
        return [each for each in self.known if each.number <= newest]


def _obstacles(
    connection: psycopg.Connection[Any], schema: str, applied: list[Migration]
) -> Iterator[Finding]:
    """Find what is in the way of pending migrations, by those that were applied."""
    if not applied:
        return
    scripts = [
        script
        for each in applied
        for script in each.statements
        # An index of an empty table is made at once; the other way is no transaction's.
        if each.transactional or "concurrently" not in script
    ]
    # What this release has is no stray, whatever the records say.
    strays = {
        (each.kind, each.name)
        for each in differences(connection, schema)
        if each.wanted is None
    }
    for each in differences(connection, schema, scripts):
        if each.wanted is not None or (each.kind, each.name) in strays:
            yield from (Finding(*told) for told in each.obstacles())


def _bookkeeping(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    schema = configuration.schema_
    pid = locker(connection, schema)
    if pid is not None:
        yield Finding(
            f"process {pid} holds the migration lock, or left it behind",
            f"{_UPGRADE} --break-lock",
        )
    for name, owner in connection.execute(
        "select c.relname, pg_get_userbyid(c.relowner) from pg_class as c"
        " join pg_namespace as n on n.oid = c.relnamespace"
        " where n.nspname = %s and c.relname = any (%s)"
        " and pg_get_userbyid(c.relowner) <> %s order by 1",
        (schema, list(YOYO_TABLES), configuration.owner),
    ).fetchall():
        yield Finding(
            f"table {name} of the migration tool belongs to {owner}",
            _sql(
                "alter table {} owner to {}",
                (schema, name),
                configuration.owner,
            ),
        )


def _policy(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    schema = configuration.schema_
    connection.execute("select set_config('search_path', %s, true)", (schema,))
    if connection.execute("select from instance").fetchone() is None:
        yield Finding("no configuration is stored", _CONFIGURE)
        return
    for name, value in policy(connection, schema).items():
        wanted = getattr(configuration, name)
        if value != wanted:
            yield Finding(f"{name} is {value}, the document says {wanted}", _CONFIGURE)

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
            # A trigger copies all of it.
            _sql("update {} set queue = queue", (schema, "queue")),
        )

    # Logical replication, and a dump of the rows alone, leave a sequence behind.
    behind = connection.execute(
        "select max(a.operator_act_id), s.name from operator_act as a"
        " cross join pg_get_serial_sequence('operator_act', 'operator_act_id') as s (name)"
        " group by s.name"
        " having max(a.operator_act_id) > coalesce(pg_sequence_last_value(s.name), 0)"
    ).fetchone()
    if behind:
        yield Finding(
            "the next number of operator_act is taken, and every operator act fails",
            sql.SQL("select setval({}, {})")
            .format(sql.Literal(behind[1]), sql.Literal(behind[0]))
            .as_string(None),
        )

    queues = {name for (name,) in connection.execute("select queue from queue")}
    for name in sorted(queues ^ set(configuration.queues)):
        state = "is not in the document" if name in queues else "is not declared"
        yield Finding(f"queue {name} {state}", _CONFIGURE)
    stranded = connection.execute(
        "select l.queue, count(*) from live_job as l"
        " where l.queue <> all (%s) group by 1 order by 1",
        (sorted(queues | set(configuration.queues)),),
    )
    for name, count in stranded:
        yield Finding(
            f"queue {name} has live jobs and is not declared: {count}",
            f"declare it in the document until they have ended, and run: {_CONFIGURE}",
        )

    stored, wanted_callers = (
        stored_callers(connection, schema),
        declared(configuration),
    )
    for name in sorted(stored.keys() | wanted_callers.keys()):
        if stored.get(name) != wanted_callers.get(name):
            yield Finding(
                f"caller {name} is not declared as the document has it", _CONFIGURE
            )


def _groups(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    """Find group roles that are missing, or renamed."""
    for kind, group in groups_of(configuration).items():
        if missing(connection, group):
            renamed = renamed_group(connection, configuration, kind)
            yield Finding(
                f"role {group} does not exist"
                + (f"; it seems to be {renamed} now" if renamed else ""),
                rename(renamed, group) if renamed else REPAIR,
            )


def _members(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    groups = [*groups_of(configuration).values()]
    for name, can_log_in, is_super in connection.execute(
        "select rolname::text, rolcanlogin, rolsuper from pg_roles"
        " where rolname = any (%s) order by array_position(%s, rolname::text)",
        (groups, groups),
    ).fetchall():
        if is_super:
            yield Finding(
                f"role {name} is a superuser", _sql("alter role {} nosuperuser", name)
            )
        if can_log_in:
            yield Finding(
                f"role {name} can log in", _sql("alter role {} nologin", name)
            )
    for group, name, grantor in connection.execute(
        "select g.rolname::text, r.rolname::text, b.rolname::text"
        " from pg_auth_members as m join pg_roles as r on r.oid = m.member"
        " join pg_roles as g on g.oid = m.roleid join pg_roles as b on b.oid = m.grantor"
        " where r.rolname = any (%s) order by 1, 2",
        (groups,),
    ).fetchall():
        if (group, name) == ("pg_read_all_stats", configuration.owner):
            continue  # so that inspect_health can tell since when
        yield Finding(
            f"role {name} is a member of {group}",
            revoke(connection, group, name, grantor),
        )

    for what, remedy in of_others(connection, configuration):
        yield Finding(what, remedy)
    yield from _callers(connection, configuration)


def _callers(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    of = groups_of(configuration)
    groups = [of[kind] for kind in KINDS[1:4]]
    wanted = declared(configuration)
    members = connection.execute(MEMBERS, (groups,)).fetchall()
    renamed = renamed_callers(connection, configuration)
    # A group that has another name, or none, has its members, or gets them, with it.
    there = set(groups) - set(missing(connection, *groups))
    for name, kinds in wanted.items():
        if name in renamed:
            yield Finding(
                f"role {name} does not exist; it seems to be {renamed[name]} now",
                rename(renamed[name], name),
            )
            continue
        held = {group for group, member, *_ in members if member == name}
        for group in sorted({of[kind] for kind in kinds} & there - held):
            yield Finding(f"role {name} is no member of {group}", _CONFIGURE)
    for group, name, grantor, is_administrator in sorted(members):
        kind = group.removeprefix(f"{configuration.prefix}_")
        if (
            kind not in wanted.get(name, ())
            and name not in renamed.values()
            and not (is_administrator and name not in wanted)
        ):
            yield Finding(
                f"role {name} is a member of {group} and not in the document",
                revoke(connection, group, name, grantor),
            )


def _powers(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    """Find callers that may do what no caller should."""
    for name in sorted(declared(configuration)):
        row = connection.execute(
            "select rolsuper from pg_roles where rolname = %s", (name,)
        ).fetchone()
        if row is None:
            continue  # told as missing, and to ask what it may do would be an error
        if row == (True,):
            yield Finding(
                f"caller {name} is a superuser", _sql("alter role {} nosuperuser", name)
            )
            continue
        of = groups_of(configuration)
        for group in (of["owner"], of["operator"], *_BEYOND_GRANTS):
            for through, grantor, direct in connection.execute(
                "select r.rolname::text, b.rolname::text, r.rolname = %s"
                " from pg_auth_members as m join pg_roles as r on r.oid = m.member"
                " join pg_roles as g on g.oid = m.roleid"
                " join pg_roles as b on b.oid = m.grantor"
                " where g.rolname = %s and pg_has_role(%s, r.oid, 'member')",
                (name, group, name),
            ).fetchall():
                yield Finding(
                    f"caller {name} is a member of {group}"
                    + ("" if direct else f", through {through}"),
                    revoke(connection, group, through, grantor),
                )


def _read_only(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> Iterator[Finding]:
    """Find what makes the callers' transactions read only, so that verbs are refused."""
    row = connection.execute(
        "select source from pg_settings where name = 'default_transaction_read_only'"
        " and reset_val = 'on' and source in ('configuration file', 'command line')"
    ).fetchone()
    if row:
        yield Finding(
            "transactions are read only by default: the whole server",
            "set default_transaction_read_only to off in the server's configuration",
        )
    for database, role in connection.execute(
        "select d.datname::text, r.rolname::text from pg_db_role_setting as s"
        " left join pg_database as d on d.oid = s.setdatabase"
        " left join pg_roles as r on r.oid = s.setrole"
        " cross join pg_options_to_table(s.setconfig) as o"
        " where o.option_name = 'default_transaction_read_only'"
        " and o.option_value::boolean"
        " and (s.setdatabase = 0 or d.datname = current_database())"
        " and (s.setrole = 0 or r.rolname = any (%s)) order by 1, 2",
        (list(declared(configuration)),),
    ).fetchall():
        whose = [f"role {role or 'all'}"] * (role is not None or database is None)
        whose += [f"database {database}"] * (database is not None)
        if role is None:
            reset = (
                _sql("alter database {} reset", database)
                if database
                else "alter role all reset"
            )
        elif database is None:
            reset = _sql("alter role {} reset", role)
        else:
            reset = _sql("alter role {} in database {} reset", role, database)
        yield Finding(
            f"transactions are read only by default: {' in '.join(whose)}",
            # The session keeps what it had when it began.
            f"begin read write; {reset} default_transaction_read_only; commit; "
            "set default_transaction_read_only = off",
        )


def _sql(template: str, *names: str | tuple[str, ...]) -> str:
    identifiers = [
        sql.Identifier(*((name,) if isinstance(name, str) else name)) for name in names
    ]
    return sql.SQL(template).format(*identifiers).as_string(None)
