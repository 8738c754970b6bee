"""What is wrong with an Instance: pure functions of its state and its document."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lenso_jobs.operator._objects import REPAIR, Finding, differences, quoted
from lenso_jobs.operator._state import KINDS, YOYO_TABLES, Catalogue, State, declared

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lenso_jobs.config import Configuration
    from lenso_jobs.operator._state import Key, Objects


SETUP = "lenso-jobs setup"
UPGRADE = "lenso-jobs upgrade"
CONFIGURE = "lenso-jobs configure"
UNSEALED = "installed_digest is out of date, so inspect_health cannot be trusted"
_OF_OBJECTS = ("grant_stray", "grant_missing", "index_unusable", "object_changed")
_COMMANDS = (SETUP, UPGRADE, REPAIR, CONFIGURE)


# Refusals.


def refusal(state: State, *, instance: bool, stored: bool = False) -> str | None:
    """Say why no command may touch the schema, or None.

    Some commands need an Instance that is there, some its stored configuration.
    """
    schema, owner, refused = state.schema, state.groups["owner"], None
    renamed = [
        what
        for role, what, _ in state.elsewhere
        if role == owner and what.startswith("schema ")
    ]
    is_empty = state.is_ours and not (state.relations or state.applied or state.version)
    if state.is_router:
        refused = (
            f"schema {schema} is the router of a fleet; use the commands of lenso-jobs "
            "fleet, with --fleet"
        )
    elif renamed and (state.owner is None or is_empty):
        lacks = "does not exist" if state.owner is None else "is empty"
        refused = (
            f"schema {schema} {lacks}, and role {owner} owns {renamed[0]}: if "
            "the schema of this Instance was renamed, rename it back; if that schema "
            "is another Instance's, set role_prefix in the document"
        )
    elif state.owner is None:
        if instance:
            refused = f"schema {schema} does not exist; run: {SETUP}"
    elif not state.is_ours:
        its = "the role_prefix that it was set up with"
        if _other_prefix(state):
            its = f"role_prefix in the document to {_other_prefix(state)}, which it was set up with"
        todo = f"set {its}, or choose another schema"
        if was_given_away(state):
            todo = "lenso-jobs check prints the statements that give everything back"
        refused = f"schema {schema} belongs to {state.owner}, not to {owner}; {todo}"
    elif state.is_newer:
        version = state.strange[-1] if state.strange else f"version {state.version}"
        refused = (
            f"schema {schema} is newer than this release: it has {version}; install the "
            "release of lenso-jobs that migrated it"
        )
    elif (stored or (instance and not (state.applied or state.version))) and (
        not state.holds("instance")
    ):
        refused = f"schema {schema} holds no Instance; run: {SETUP}"
    return refused


def _other_prefix(state: State) -> str | None:
    """Tell under which other prefix the schema has all its group roles."""
    prefix = (state.owner or "").removesuffix("_owner")
    has_all = not state.missing(*(f"{prefix}_{kind}" for kind in KINDS))
    return prefix if has_all and not state.is_ours else None


def was_given_away(state: State) -> bool:
    """Tell whether a schema of another owner is this Instance, and no trap.

    Only a DBA can comment on the owner's role, and a superuser has all rights anyway.
    """
    if state.owner is None or state.is_ours or _other_prefix(state):
        return False
    return state.claim in map(
        state.roles.get, (state.owner, state.groups["owner"])
    ) or (
        {"job", "live_job"} <= state.relations.keys()
        and state.owner in {*state.superusers, state.user}
    )


def given_away(state: State) -> str | None:
    """Name wrong owners, with all statements that give everything back, or None."""
    found = wrong_owners(state)
    statements = "".join(f"\n    {each.remedy};" for each in found)
    return (
        f"{found[0].what}; run all of these first, and then this command again:{statements}"
        if found
        else None
    )


# Findings.


def findings(state: State, configuration: Configuration) -> list[Finding]:
    """List everything that is wrong, in an order in which it can be mended."""
    found = [
        # Sessions that begin read-only cannot mend. The others name roles as they are.
        *sorted(
            (each for each in state.faults if each.finding not in _OF_OBJECTS),
            key=lambda each: (
                each.finding != "setting_harmful",
                " rename " in each.remedy,
            ),
        ),
        *_lock(state),
        *_migrations(state),
        *object_findings(state),
        *_seal(state),
        *_declarations(state, configuration),
    ]
    # Commands come last: what is done by hand may be in the way of one.
    turns = {command: turn for turn, command in enumerate(_COMMANDS, 1)}
    return sorted(found, key=lambda each: turns.get(each.remedy, 0))


def _seal(state: State) -> Iterator[Finding]:
    # The digest is of the owners, too.
    if not is_sealed(state) and not wrong_owners(state):
        yield Finding(UNSEALED, REPAIR)


def is_sealed(state: State) -> bool:
    """Tell whether the digest is stored, or cannot be because objects differ."""
    return state.catalogue is None or state.catalogue.digest_is_stored


def object_findings(state: State) -> list[Finding]:
    """List what is wrong with the objects and the rights on them."""
    found = [*wrong_owners(state), *(_other(*each) for each in state.defaults)]
    if state.catalogue is None or not state.is_ours:
        return found
    found += faults(state, "grant_stray", "object_changed")
    different = differences(state.schema, state.catalogue)
    if not state.is_whole:
        return found + [told for each in different for told in each.obstacles()]
    # In the words of inspect_health, where it has some.
    unusable = {
        each.what.partition(" is ")[0]: each
        for each in state.faults
        if each.finding == "index_unusable"
    }
    for each in different:
        said = unusable.get(f"{each.kind} {each.own}")
        if said is None:
            found += each.findings()
        elif each.fields:
            found.append(said)
        else:
            found += (replace(told, finding=said.finding) for told in each.findings())
    return found + faults(state, "grant_missing")


def faults(state: State, *kinds: str) -> list[Finding]:
    """List what the release's functions find: rights, and lost claim floors."""
    return [each for each in state.faults if each.finding in kinds]


def wrong_owners(state: State) -> list[Finding]:
    """List what does not belong to the owner; the schema comes first.

    Giving an object to a role takes that role's right to create in the schema.
    """
    owner, found = state.groups["owner"], []
    if state.owner and state.missing(owner):
        if state.roles.get(state.owner) == state.claim:
            what = f"{state.owner} owns the Instance and is not named {owner}"
            rename = _sql("alter role {} rename to {}", state.owner, owner)
            return [Finding(what, rename, finding="role_missing")]
        create = _sql("create role {} nologin", owner)
        what = f"role {owner} does not exist"
        found.append(Finding(what, create, finding="role_missing"))
    for key, facts in sorted(
        _ours(state).items(), key=lambda its: its[0][0] != "schema"
    ):
        # The sequence of a column follows its table.
        if facts.get("owner", owner) != owner and not facts.get("table"):
            place = _place(state, key)
            what = f"{place} belongs to {facts['owner']}, not to {owner}"
            found.append(Finding(what, f"alter {place} owner to {_sql('{}', owner)}"))
    return found


def _lock(state: State) -> Iterator[Finding]:
    if state.locker is None:
        return
    remedy = UPGRADE
    if state.writers:
        who = " or ".join(each.with_query for each in state.writers)
        remedy = (
            f"it may be {who}: wait until that session has ended, or end it if it applies "
            "no migration; then check again"
        )
    what = f"yoyo_lock was taken by process {state.locker}"
    yield Finding(what, remedy, finding="migration_unfinished")


def _migrations(state: State) -> Iterator[Finding]:
    """Tell what is pending, not recorded, or too new."""
    if state.owner is None or not state.is_ours:
        return
    for each in state.pending:
        was_applied = each.number <= state.version
        word = "applied and not recorded" if was_applied else "pending"
        # Where nothing says that there is an Instance, set-up takes care of it.
        remedy = UPGRADE if state.applied or state.version else SETUP
        yield _other(f"migration {each.name} is {word}", remedy)
    install = "install the release that applied it"
    for name in state.strange:
        yield _other(f"migration {name} is not part of this release", install)
    if state.is_newer and not state.strange:
        yield _other(f"version {state.version} is newer than this release", install)


def _ours(state: State) -> Objects:
    """Return the facts of those objects that are the release's, or its migrations'."""
    catalogue = state.catalogue or Catalogue({}, {})
    return {
        key: facts
        for key, facts in catalogue.found.items()
        if key in catalogue.wanted or key[1] in YOYO_TABLES or key[0] == "schema"
    }


def _place(state: State, key: Key) -> str:
    """Name an object as ALTER does."""
    kind, name = key
    if kind in ("schema", "function"):
        return str(_ours(state)[key]["place"])
    noun = "table" if kind == "migration table" else kind
    return f"{noun} {_sql('{}.{}', state.schema, name)}"


# Declarations.


def _declarations(state: State, configuration: Configuration) -> Iterator[Finding]:
    """Say what of the document is not stored, as ``configure`` says that it changes it."""
    if state.stored is None or state.stored.policy is None:
        return
    told = {
        f"queue {each.what.partition(' ')[0]} is declared"
        for each in state.faults
        if each.finding == "queue_undeclared"
    }
    for each in _stored(state, configuration, drop_queues=True):
        if each not in told:
            yield _other(f"the document is not stored: {each}", CONFIGURE)


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that a document would make; none where both lists are empty."""

    roles: tuple[str, ...]
    """By bootstrap.sql: the schema, roles, memberships."""
    stored: tuple[str, ...]
    """By the function configure: policy, queues, callers."""

    def __bool__(self) -> bool:
        """Tell whether anything would change."""
        return bool(self.roles or self.stored)


def changes(
    state: State, configuration: Configuration, *, drop_queues: bool = False
) -> Changes:
    """Compare a document with what the server has."""
    return Changes(
        (*role_changes(state), *_memberships(state, configuration)),
        tuple(_stored(state, configuration, drop_queues=drop_queues)),
    )


def role_changes(state: State) -> Iterator[str]:
    """Say what bootstrap.sql would change apart from callers."""
    owner = state.groups["owner"]
    for group in state.missing(*state.groups.values()):
        yield f"role {group} is created"
    if state.roles.get(owner, state.claim) != state.claim and state.may_comment:
        yield f"role {owner} is said to own {state.schema} in this database"
    if not state.has_owner:
        yield f"the current user becomes a member of {owner}"
    if state.owner is None:
        yield f"schema {state.schema} is created"


def _memberships(state: State, configuration: Configuration) -> Iterator[str]:
    wanted = declared(configuration)
    for name in state.missing(*wanted):
        yield f"role {name} is created, without login"
    of = state.groups
    members = {(each.group, each.member) for each in state.members}
    callers = state.stored.callers if state.stored else {}
    due, stored = (
        {(of[kind], name) for name, kinds in each.items() for kind in kinds}
        for each in (wanted, callers)
    )
    for group, name in sorted(due - members):
        yield f"{name} becomes a member of {group}"
    for group, name in sorted((stored & members) - due):
        yield f"{name} is no longer a member of {group}"


def _stored(
    state: State, configuration: Configuration, *, drop_queues: bool
) -> Iterator[str]:
    if state.stored is None:
        yield "the configuration is stored for the first time"
        return
    if state.stored.policy is None:
        yield "the policy is stored again"
    for name, value in (state.stored.policy or {}).items():
        wanted = getattr(configuration, name)
        if value != wanted:
            yield f"{name} changes from {_said(value)} to {_said(wanted)}"
    queues = state.stored.queues
    for name in sorted(set(configuration.queues) - queues.keys()):
        yield f"queue {name} is declared"
    for name in sorted(queues.keys() - set(configuration.queues)):
        refused = "" if drop_queues else "; refused without configure --drop-queues"
        held = f" (live jobs: {queues[name]}{refused})" if queues[name] else ""
        yield f"queue {name} is dropped{held}"
    yield from _callers(state.stored.callers, declared(configuration))


def _callers(
    stored: Mapping[str, tuple[str, ...]], wanted: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    for name in sorted(stored.keys() | wanted.keys()):
        had, gets = (" and ".join(each.get(name, ())) for each in (stored, wanted))
        if not had:
            yield f"caller {name} is declared as {gets}"
        elif not gets:
            yield f"caller {name} is dropped"
        elif had != gets:
            yield f"caller {name} changes from {had} to {gets}"


def _said(value: object) -> str:
    if value is None:
        return "none"
    # The document says 0 for 0.0.
    return (
        str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")
    )


def _other(what: str, remedy: str) -> Finding:
    """Make a finding that ``inspect_health`` does not look for."""
    return Finding(what, remedy, finding="")


def _sql(template: str, *names: str) -> str:
    return template.format(*map(quoted, names))
