"""Making an Instance again what this release says it is, without losing a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql

from lenso_jobs.operator._differences import (
    REPAIR,
    UNSEALED,
    Difference,
    differences,
    is_sealed,
    texts,
)
from lenso_jobs.operator._parts import Part
from lenso_jobs.operator._session import SETTINGS, OperatorError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from lenso_jobs.config import Configuration

# Others wait behind whoever waits for a lock.
_BRIEFLY = "set lock_timeout = '5s'"


def repairing(
    connection: psycopg.Connection[Any], configuration: Configuration
) -> tuple[Part, ...]:
    """Prepare what mends what ``check`` says this mends, with its words as changes.

    What somebody's data or objects would go with, it leaves: the server refuses to drop
    what others depend on.

    Raises:
        OperatorError: Something seems to have been renamed or moved: an empty one would
            be made.
    """
    schema = configuration.schema_
    with connection.transaction(force_rollback=True):
        found = differences(connection, schema)
        sealed = bool(found) or is_sealed(connection, schema)
    mended = []
    for difference in found:
        for what, remedy in difference.findings():
            if difference.is_there or difference.is_lost:
                raise OperatorError(f"{what}; run this first: {remedy}")
            if remedy == REPAIR:
                mended.append(what)
    if not sealed:
        sealing = (*_as_owner(configuration), "".join(texts("9")))
        return (Part("what inspect_health compares with", sealing, (UNSEALED,)),)
    if not mended:
        return ()
    return (
        *_meanwhile(configuration, found),
        *(
            Part(f"{one.kind} {one.name}", (*_as_owner(configuration), *one.alone()))
            for one in found
            if one.alone()
        ),
        _at_once(configuration, found, tuple(mended)),
    )


def _meanwhile(configuration: Configuration, found: list[Difference]) -> Iterator[Part]:
    """Do what needs no transaction, or must not be in one."""
    rightful = tuple(each for one in found for each in one.rightful())
    if rightful:
        statements = (_BRIEFLY, *rightful, *SETTINGS)
        yield Part("owners", statements, transactional=False)
    built = tuple(each for one in found for each in one.rebuilt())
    if built:
        # It is slow, and nobody but another DDL waits behind it.
        owner = sql.SQL("set role {}").format(sql.Identifier(configuration.owner))
        slowly = ("set lock_timeout = '1h'", owner.as_string(None))
        statements = (*slowly, *built, "reset role", *SETTINGS)
        yield Part("indexes", statements, transactional=False)


def _at_once(
    configuration: Configuration, found: list[Difference], mended: tuple[str, ...]
) -> Part:
    """Load sql/ over the Instance, and mend what that leaves.

    The tables only where one of them is not as it should be: their indexes take a lock
    on each even where they are there.
    """
    tables = {"table", "column", "sequence", "domain", "constraint"}
    of_tables = any(one.kind in tables for one in found)
    statements = (
        *_as_owner(configuration),
        *(_locked(configuration, found) if of_tables else ()),
        *(each for one in found for each in one.replaced()),
        "".join(texts(but=None if of_tables else "2")),
        *(each for one in found for each in one.touches()),
        # The last rooms again: they record what there is.
        "".join(texts("9")),
    )
    return Part("sql/ of this release", statements, mended)


def _locked(configuration: Configuration, found: list[Difference]) -> Iterator[str]:
    """Write what locks the tables that the verbs write to.

    They lock them in both orders, so once it has one of them this gives up before the
    server would look for a deadlock, and end somebody.
    """
    missing = {one.name for one in found if one.found is None}
    for name in ("job", "live_job", "attempt"):
        if name not in missing:
            table = sql.Identifier(configuration.schema_, name)
            lock = sql.SQL("lock table {} in share mode").format(table)
            yield lock.as_string(None)
            yield "set local lock_timeout = '500ms'"
    yield _BRIEFLY.replace("set", "set local")


def _as_owner(configuration: Configuration) -> tuple[str, ...]:
    names = {
        "owner": sql.Identifier(configuration.owner),
        "schema": sql.Identifier(configuration.schema_),
    }
    return (
        _BRIEFLY.replace("set", "set local"),
        sql.SQL("set local role {owner}").format(**names).as_string(None),
        sql.SQL("set local search_path = {schema}").format(**names).as_string(None),
    )
