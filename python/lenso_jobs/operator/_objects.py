"""How the objects of an Instance differ from the release's, and what mends each.

Pure functions of a catalogue that was read before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lenso_jobs.operator._state import Catalogue, Facts, Key, Objects

REPAIR = "lenso-jobs upgrade --repair"
CLAIM_INDEX = "live_job_claimable_idx"
# Loading sql/ again mends these, or the statements of ``touches``. No row is lost by it.
_REPAIRED = {
    "function": {"definition", "signature", "comment"},
    "view": {"definition", "options", "comment"},
    "table": {"options", "row security", "comment"},
    "type": {"comment"},
    "column": {"comment"},
    "index": {"definition", "valid", "options"},
    "trigger": {"definition", "enabled"},
    "domain": {"comment"},
}
# Facts that are read for the statements; owners and grants are judged apart.
_ASIDE = {
    *("position", "domain", "table", "columns", "made", "place", "unique", "on", "of"),
    *("column", "name", "owner", "grants", "type grants"),
}
_DROP = {
    "column": "{table} drop column {own}",
    "constraint": "{on} drop constraint {own}",
    # Otherwise everybody waits behind it while it waits for its own building.
    "index": "drop index concurrently {place}",
    "trigger": "drop trigger {own} on {of}",
    "rule": "drop rule {own} on {of}",
    "policy": "drop policy {own} on {of}",
}
_CHANGE = {
    ("column", "type"): "{table} alter column {own} type {type} using {own}::{type}",
    ("column", "not null"): "{table} alter column {own} {verb} not null",
    ("column", "default"): "{table} alter column {own} {default}",
    ("column", "identity"): "{table} alter column {own} {identity}",
    ("constraint", "validated"): "{on} validate constraint {own}",
    ("constraint", "definition"): (
        "{on} drop constraint {own}{also} add constraint {own} {definition}"
    ),
    ("domain", "not null"): "alter domain {place} {verb} not null",
    ("domain", "type"): (
        "restore the Instance from a dump: a domain's type cannot be changed"
    ),
    ("table", "relkind"): "keep it, and move its rows into a table of this release",
    ("table", "persistence"): "alter {noun} {place} set logged",
    ("table", "replica identity"): "alter {noun} {place} replica identity default",
    ("sequence", "persistence"): "alter {noun} {place} set logged",
    ("sequence", "definition"): "alter {noun} {place} {definition}",
}
# An object is dropped before those that it may be built upon.
_DROPPED = (
    *("policy", "rule", "trigger", "view", "function", "constraint", "index"),
    *("column", "table", "sequence", "domain", "type"),
)
# The rights on the schema are judged with those on other objects.
_APART = {"schema", "migration table"}
# Tables with so many columns in common are no coincidence.
_FEW = 3
# The jobs, and the evidence of their attempts.
_JOBS = {"job", "live_job", "attempt"}
# The words that quote_ident quotes, of PostgreSQL 15 to 18.
_KEYWORDS = """
    all analyse analyze and any array as asc asymmetric authorization between bigint
    binary bit boolean both case cast char character check coalesce collate
    collation column concurrently constraint create cross current_catalog
    current_date current_role current_schema current_time current_timestamp
    current_user dec decimal default deferrable desc distinct do else end except
    exists extract false fetch float for foreign freeze from full grant greatest
    group grouping having ilike in initially inner inout int integer intersect
    interval into is isnull join json json_array json_arrayagg json_exists
    json_object json_objectagg json_query json_scalar json_serialize json_table
    json_value lateral leading least left like limit localtime localtimestamp
    merge_action national natural nchar none normalize not notnull null nullif
    numeric offset on only or order out outer overlaps overlay placing position
    precision primary real references returning right row select session_user setof
    similar smallint some substring symmetric system_user table tablesample then
    time timestamp to trailing treat trim true union unique user using values
    varchar variadic verbose when where window with xmlattributes xmlconcat
    xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi xmlroot xmlserialize
    xmltable
"""
# The suffix of an index that is built beside the one that it replaces.
_ANEW = "_new"


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, and what mends it."""

    what: str
    remedy: str
    """A command of lenso-jobs, with the same document; else SQL, as the owner."""
    deletes: str = ""
    """What of the data the remedy deletes; a person decides on such a remedy."""
    finding: str = "object_changed"
    """The finding of ``inspect_health``; empty: that does not look for it."""

    @property
    def advice(self) -> str:
        """The remedy as it is printed below the finding."""
        if self.deletes:
            return f"by hand, and it deletes data ({self.deletes}): {self.remedy}"
        return f"mend: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One object that is not as the release has it."""

    schema: str
    kind: str
    name: str
    found: Facts | None
    wanted: Facts | None
    was: str | None = None
    """An equal index or constraint of the same table, under another name."""
    holder: str | None = None
    """Another table whose index or sequence has the name of this one, which is missing."""
    like: str | None = None
    """A table on the other side with the same columns; the rows may be there."""
    deletes: str = ""

    @property
    def facts(self) -> Facts:
        """The facts of the release, or of a stray object."""
        return self.wanted or self.found or {}

    @property
    def is_lost(self) -> bool:
        """Whether an empty table in its place would hide that rows are gone."""
        is_table = self.kind == "table" and self.found is None
        return is_table and (self.name in _JOBS or self.like is not None)

    @property
    def fields(self) -> list[str]:
        """The facts that differ, where both have the object."""
        if self.found is None or self.wanted is None:
            return []
        return [
            name
            for name, value in self.wanted.items()
            if self.found.get(name) != value and name not in _ASIDE
        ]

    def findings(self) -> Iterator[Finding]:
        """Say what differs, each time with the command or the SQL that mends it."""
        if self.found is None:
            yield self._missing()
        elif self.wanted is None:
            yield self._stray()
        repaired = _REPAIRED.get(self.kind, set())
        mended = [name for name in self.fields if name in repaired]
        if mended:
            what = f"differs from this release: {', '.join(mended)}"
            yield Finding(self._what(what), REPAIR)
        for name in self.fields:
            if name not in repaired:
                template = _CHANGE.get((self.kind, name), "drop {noun} {place} cascade")
                yield Finding(
                    self._what(f"differs from this release: {name}"),
                    self._written(template),
                    self.deletes if "cascade" in template else "",
                )

    def _missing(self) -> Finding:
        what, made = self._what("is missing"), self._make()
        if self.was is not None:
            return Finding(f"{what}; {self.was} is equal", REPAIR)
        if self.kind in ("table", "column", "domain", "type", "sequence"):
            what += "; if it was renamed or moved, put it back"
        if self.is_lost:
            made = "restore it from a backup; an empty table would hide the loss"
        return Finding(what, made)

    def _stray(self) -> Finding:
        what = self._what("is not part of this release")
        if self.like is not None:
            return Finding(
                f"{what}, has the columns of {self.like}, and holds {self.deletes}",
                f"keep it: its rows may be those of {self.like}. Compare the two, move "
                f"every row into one table, and give that the name {self.like}",
            )
        drop = self._written(_DROP.get(self.kind, "drop {noun} {place}"))
        return Finding(what, drop, self.deletes)

    def obstacles(self) -> Iterator[Finding]:
        """Say what a pending migration needs and will not find."""
        for each in self.findings():
            if self.kind == "table" and self.found is None:
                needed = "restore it from a backup: migrations that are pending need it"
                yield Finding(each.what, needed)
            elif each.remedy != REPAIR:
                yield each

    # Statements of a repair.

    def touches(self) -> Iterator[str]:
        """Write what loading sql/ does not do by itself."""
        for name in self.fields:
            if name == "options" and not self.rebuilt():
                yield from self._options()
            elif name == "enabled":
                yield self._written("alter table {of} enable trigger {own}")
            elif name == "comment" and self.facts["comment"] is None:
                yield self._written("comment on {noun} {place} is null")

    def replaced(self) -> Iterator[str]:
        """Write what drops an object that CREATE OR REPLACE would not replace."""
        # CREATE OR REPLACE keeps what others built upon a view of the same columns.
        columns = (self.found or {}).get("columns")
        if (self.kind == "function" and "signature" in self.fields) or (
            self.kind == "view"
            and "definition" in self.fields
            and columns != self.facts["columns"]
        ):
            yield self._written("drop {noun} {place}")

    def rebuilt(self) -> tuple[str, ...]:
        """Write what builds an index, under another name where there is one.

        The verbs ask for an index by its name, usable or not: the one that is there
        keeps it until the other has been built.
        """
        is_one = self.kind == "index" and self.wanted and not self.facts["constraint"]
        if not is_one or self.was is not None:
            return ()
        name = self.own if self.found is None else f"{self.own}{_ANEW}"
        build = self.facts["definition"].replace(f" {self.own} ", f" {name} ", 1)
        build = build.replace(" INDEX ", " INDEX IF NOT EXISTS ", 1)
        slowly = build.replace(" INDEX ", " INDEX CONCURRENTLY ", 1)
        # A build that was cut off leaves one that is not valid.
        cut_off = f"drop index concurrently if exists {self._in(name)}"
        first = () if self.found is None else (cut_off,)
        if self.own == CLAIM_INDEX and not (self.found or {}).get("valid"):
            # Nobody can claim: short locks come before a wait for every snapshot.
            at_once = (
                f"do $$ begin set local lock_timeout = '5s'; {build};"
                " exception when lock_not_available then null; end $$"
            )
            return (*first, at_once, slowly)
        return (*first, slowly)

    def freed(self) -> tuple[str, ...]:
        """Write what takes its name from an object of another table."""
        if self.holder is None:
            return ()
        other = quoted(f"{self.holder}_{self.own}"[:63])
        return (f"alter table {self._in(self.own)} rename to {other}",)

    def alone(self) -> tuple[str, ...]:
        """Write what locks a table against everybody for a moment.

        It is a transaction of its own: with one lock held, a stronger one, or one on
        another table, would meet the verbs in a deadlock.
        """
        if self.was is not None:
            return (self._renamed(self.was),)
        if self.rebuilt() and self.found is not None:
            new, old = self._in(self.own + _ANEW), quoted(self.own)
            return (
                f"drop index {self._in(self.own)}",
                f"alter index {new} rename to {old}",
            )
        if self.kind == "table" and "row security" in self.fields:
            off = "disable row level security, no force row level security"
            return (self._written(f"alter table {{place}} {off}"),)
        return ()

    # Words and names.

    @property
    def own(self) -> str:
        """The object's own name, without its table's."""
        key = (self.kind, self.name)
        return _own(key, {key: self.facts})

    def _what(self, state: str) -> str:
        name = self.own if self.kind in ("index", "sequence") else self.name
        return f"{self.kind} {name} {state}"

    def _in(self, name: str) -> str:
        return f"{quoted(self.schema)}.{quoted(name)}"

    def _written(self, template: str) -> str:
        """Fill in a statement."""
        facts = self.facts
        noun = {"function": "routine"}.get(self.kind, self.kind)
        if self.kind == "table":
            kinds = {"m": "materialized view", "f": "foreign table"}
            noun = kinds.get(facts["relkind"], "table")
        place, default = self._in(self.own), facts.get("default")
        if self.kind == "function":
            place = str(facts["place"]).removeprefix("routine ")
        elif self.kind == "column":
            place = f"{quoted(self.schema)}.{self.name}"
        # The type of a column, as it is named where the search_path is another.
        domain = facts.get("domain")
        on, table = (self._in(facts.get(name) or "") for name in ("on", "table"))
        return template.format(
            noun=noun,
            place=place,
            own=quoted(self.own),
            of=self._in(facts.get("of") or ""),
            on=f"alter {facts.get('of')} {on}",
            table=f"alter table {table}",
            type=self._in(domain) if domain else facts.get("type"),
            verb="set" if facts.get("not null") else "drop",
            default=f"set default {default}" if default else "drop default",
            identity=(
                "add generated always as identity"
                if facts.get("identity")
                else "drop identity"
            ),
            # ALTER DOMAIN takes one change at a time.
            also="," if facts.get("of") == "table" else f"; alter domain {on}",
            definition=facts.get("definition"),
        )

    def _renamed(self, old: str) -> str:
        if self.kind == "constraint":
            return self._written(f"{{on}} rename constraint {quoted(old)} to {{own}}")
        return self._written(f"alter {{noun}} {self._in(old)} rename to {{own}}")

    def _make(self) -> str:
        facts = self.facts
        if self.kind == "constraint":
            return self._written("{on} add constraint {own} {definition}")
        if self.kind != "column":
            return REPAIR
        default = f" default {facts['default']}" if facts["default"] else ""
        make = self._written(f"{{table}} add column {{own}} {{type}}{default}")
        if not facts["not null"]:
            return make
        if default:
            return f"{make} not null"
        then = self._written("{table} alter column {own} set not null")
        return f"in one transaction: {make}; its values, for instance from a backup; {then}"

    def _options(self) -> Iterator[str]:
        alter = self._written("alter {noun} {place}")
        found, wanted = (
            (facts or {}).get("options") for facts in (self.found, self.wanted)
        )
        if found:
            names = ", ".join(option.partition("=")[0] for option in found)
            yield f"{alter} reset ({names})"
        if wanted:
            yield f"{alter} set ({', '.join(wanted)})"


def differences(schema: str, catalogue: Catalogue) -> list[Difference]:
    """List the objects that are not as the release has them, in an order to mend them."""
    found, wanted = (
        {key: facts for key, facts in objects.items() if key[0] not in _APART}
        for objects in (catalogue.found, catalogue.wanted)
    )
    renamed = _equal(found, wanted)
    implied = _implied(found, wanted) | set(renamed.values())
    differing = [
        Difference(
            schema,
            *key,
            found.get(key),
            wanted.get(key),
            was=_own(renamed[key], found) if key in renamed else None,
            holder=None if key in found else _holder(key, found, wanted),
            like=_like(key, found, wanted),
            deletes=catalogue.rows.get(key, ""),
        )
        for key in sorted(
            (found.keys() | wanted.keys()) - implied,
            key=lambda key: (key in renamed, _order(key, found, wanted)),
        )
    ]
    return [
        each
        for each in differing
        if each.fields or each.found is None or each.wanted is None
    ]


def columns_of(table: str, objects: Objects) -> set[str]:
    """List the columns of a table."""
    return {
        facts["column"]
        for (kind, _), facts in objects.items()
        if kind == "column" and facts["table"] == table
    }


def _own(key: Key, objects: Objects) -> str:
    """Name an object without its table."""
    facts = objects[key]
    if key[0] in ("index", "sequence"):
        of = facts["of" if key[0] == "index" else "table"]
        return key[1].removeprefix(f"{of}.")
    return str(facts.get("column" if key[0] == "column" else "name", key[1]))


def _order(key: Key, found: Objects, wanted: Objects) -> tuple[int, int, int, Key]:
    """Order differences so that each can be mended.

    Strays come first, whose names may be in the way, but types after their columns. Of
    two views the later may be built upon the earlier.
    """
    is_type = key[0] in ("sequence", "domain", "type")
    rank = _DROPPED.index(key[0]) if key[0] in _DROPPED else len(_DROPPED)
    turn = 1 if key in wanted else 2 * is_type
    return turn, rank, -found.get(key, {}).get("made", 0), key


def _equal(found: Objects, wanted: Objects) -> dict[Key, Key]:
    """Find an equal index or constraint under another name for each that is missing.

    To drop the one and build the other would leave its table without either meanwhile.
    """

    def apart_from_its_name(key: Key, objects: Objects) -> tuple[Any, ...] | None:
        facts = objects[key]
        if key[0] == "sequence" and facts["table"]:
            return ("sequence", facts["table"])
        if key[0] == "constraint":
            return (*key[:1], facts["of"], facts["on"], facts["definition"])
        if key[0] != "index" or facts["constraint"] or not facts["valid"]:
            return None
        definition = facts["definition"].replace(f" {_own(key, objects)} ", " ", 1)
        return ("index", facts["of"], definition, *facts["options"])

    strays = {
        apart_from_its_name(key, found): key
        for key in sorted(found.keys() - wanted.keys())
        # A repair that was cut off has built it beside the one that it replaces.
        if (key[0], key[1].removesuffix(_ANEW)) not in wanted
    }
    strays.pop(None, None)
    return {
        key: strays.pop(alike)
        for key in sorted(wanted.keys() - found.keys())
        if (alike := apart_from_its_name(key, wanted)) in strays
    }


def _implied(found: Objects, wanted: Objects) -> set[Key]:
    """Tell which differences come and go with another.

    An object on a table goes with the table, and with a column that it uses. The index
    of a constraint goes with the constraint. The column of a view goes with the view's
    definition. A table that became something else is one difference.
    """
    both = found.keys() & wanted.keys()
    whole = {k for k in both if found[k].get("relkind") != wanted[k].get("relkind")}
    whole |= found.keys() ^ wanted.keys()
    implied = set()
    for key, facts in (*found.items(), *wanted.items()):
        columns = {("column", name) for name in facts.get("columns") or ()}
        goes = key in whole and (
            (key[0] == "index" and facts["constraint"])
            or (key[0] == "column" and facts["relkind"] == "v")
        )
        if goes or whole & columns or whole.intersection(_places(key, facts)):
            implied.add(key)
    # A column differs until its domain is there again, and a function until its type.
    for kind in ("domain", "type"):
        missing = {k for k in wanted.keys() - found.keys() if k[0] == kind}
        implied |= {k for k in found.keys() - wanted.keys() if k[0] == kind and missing}
        for key in both:
            if key[0] == "column" and (kind, wanted[key]["domain"]) in missing:
                implied.add(key)
    return implied


def _places(key: Key, facts: Facts) -> Iterator[Key]:
    """Name the tables, views and domains that an object may belong to."""
    owner = facts.get({"column": "table", "sequence": "table"}.get(key[0], "of"))
    if key[0] == "constraint":
        owner = facts["on"]
    if owner is not None:
        yield from ((kind, owner) for kind in ("table", "view", "domain"))


def _holder(key: Key, found: Objects, wanted: Objects) -> str | None:
    """Name the table whose index or sequence has the name of one that is missing."""
    if key[0] not in ("index", "constraint", "sequence"):
        return None
    name = _own(key, wanted)
    others = (
        facts.get("of") or facts["table"]
        for other, facts in found.items()
        if other[0] in ("index", "sequence") and _own(other, found) == name
    )
    return next(others, None)


def _like(key: Key, found: Objects, wanted: Objects) -> str | None:
    """Name a table with the same columns: the swap of a table that was cut off."""
    if key[0] != "table" or (key in found and key in wanted):
        return None
    its, others = (found, wanted) if key in found else (wanted, found)
    mine, alike = columns_of(key[1], its), []
    for other in sorted(others):
        theirs = columns_of(other[1], others)
        ours, shared = mine if key in wanted else theirs, len(mine & theirs)
        is_alike = other[0] == "table" and shared >= max(_FEW, len(ours) / 2)
        if is_alike and (key in found or other not in wanted):
            # Tables of jobs have columns in common, too.
            alike.append((shared / len(mine | theirs), other[1]))
    return max(alike)[1] if alike else None


def quoted(name: str) -> str:
    """Quote a name where it needs that, as quote_ident does."""
    is_plain = re.fullmatch("[a-z_][a-z0-9_]*", name) and name not in _KEYWORDS.split()
    return name if is_plain else sql.Identifier(name).as_string(None)
