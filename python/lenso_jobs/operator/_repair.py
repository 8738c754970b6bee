"""Making an Instance again what this release says it is, without losing a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql

from lenso_jobs.operator._differences import (
    REPAIR,
    UNSEALED,
    differences,
    is_sealed,
    texts,
)
from lenso_jobs.operator._parts import Part
from lenso_jobs.operator._session import SETTINGS, OperatorError

if TYPE_CHECKING:
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
            if difference.is_there:
                raise OperatorError(f"{what}; run this first: {remedy}")
            if remedy == REPAIR:
                mended.append(what)
    if not sealed:
        sealing = (*_as_owner(configuration), "".join(texts("9")))
        return (Part("what inspect_health compares with", sealing, (UNSEALED,)),)
    if not mended:
        return ()
    # What needs no transaction, or must not be in one: indexes are built slowly, and
    # nobody but another DDL waits behind that.
    owner = sql.SQL("set role {}").format(sql.Identifier(configuration.owner))
    rightful = tuple(each for one in found for each in one.rightful())
    built = tuple(each for one in found for each in one.rebuilt())
    parts = []
    if rightful:
        statements = (_BRIEFLY, *rightful, *SETTINGS)
        parts.append(Part("owners", statements, transactional=False))
    if built:
        slowly = ("set lock_timeout = '1h'", owner.as_string(None))
        statements = (*slowly, *built, "reset role", *SETTINGS)
        parts.append(Part("indexes", statements, transactional=False))
    at_once = (
        *_as_owner(configuration),
        *(each for one in found for each in one.replaced()),
        "".join(texts()),
        *(each for one in found for each in one.touches()),
        # Late, since it shuts everybody out until the end.
        *(each for one in found for each in one.swapped()),
        # The last rooms again: they record what there is.
        "".join(texts("9")),
    )
    parts.append(Part("sql/ of this release", at_once, tuple(mended)))
    return tuple(parts)


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
