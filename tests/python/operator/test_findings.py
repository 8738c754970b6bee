"""What is judged wrong with an Instance, and what is printed for it; without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from lenso_jobs import Configuration
from lenso_jobs.operator._findings import (
    changes,
    findings,
    given_away,
    refusal,
    was_given_away,
)
from lenso_jobs.operator._objects import Finding, differences, quoted
from lenso_jobs.operator._parts import repairing
from lenso_jobs.operator._session import OperatorError, Session, waits_for
from lenso_jobs.operator._state import (
    POLICY,
    Catalogue,
    Membership,
    Migration,
    State,
    Stored,
)

DOCUMENT = Configuration.from_json(
    json.dumps(
        {
            "schema": "jobs",
            "database_url_secret": "jobs/url",
            "lease_seconds": 30,
            "retry_base_seconds": 5,
            "retry_max_seconds": 300,
            "queues": ["email"],
            "producer_instances": ["app"],
            "worker_instances": ["mailer"],
        }
    )
)
OWNER = {"owner": "jobs_owner", "grants": [], "type grants": [], "comment": None}
LIVE = ("job_id", "queue", "attempt", "max_attempts")


def table(name, *columns, **facts):
    """Describe a table and its columns, as _catalogue_objects would."""
    its = {
        **OWNER,
        "relkind": "r",
        "persistence": "p",
        "place": f"table jobs.{name}",
        "options": [],
        "row security": "ff",
        "made": 1,
        **facts,
    }
    return {("table", name): its} | {
        ("column", f"{name}.{column}"): {
            "table": name,
            "column": column,
            "relkind": "r",
            "type": "text",
            "domain": None,
            "not null": False,
            "default": None,
            "identity": "",
            "grants": [],
            "type grants": [],
            "place": f"table jobs.{name}",
            "comment": None,
        }
        for column in columns
    }


def index(name, of="live_job", on="(queue)", **facts):
    """Describe an index."""
    definition = f"CREATE INDEX {name} ON jobs.{of} USING btree {on}"
    its = {"of": of, "definition": definition, "valid": True, "constraint": False}
    return {
        ("index", f"{of}.{name}"): {
            **its,
            "options": [],
            "columns": [f"{of}.queue"],
            "grants": [],
            "type grants": [],
            "place": None,
            **facts,
        }
    }


def function(name, **facts):
    """Describe a function without arguments that the workers may execute."""
    its = {"place": f"routine jobs.{name}()", "definition": "x", "signature": "y"}
    grants = ["jobs_owner EXECUTE", "jobs_worker EXECUTE"]
    return {("function", f"{name}()"): {**OWNER, **its, "grants": grants, **facts}}


OBJECTS = {
    ("schema", "jobs"): {
        **OWNER,
        "place": "schema jobs",
        "grants": ["jobs_worker USAGE"],
    },
    **table("live_job", *LIVE),
    **index("live_job_claimable_idx"),
    **function("claim"),
}
GROUPS = (
    "jobs_owner",
    "jobs_producer",
    "jobs_worker",
    "jobs_observer",
    "jobs_operator",
)
CLAIM = "owns the Jobs Instance jobs in database postgres"
SOUND = State(
    "jobs",
    "jobs",
    known=(Migration("0001-initial", "", (), transactional=True),),
    owner="jobs_owner",
    relations=dict.fromkeys(("instance", "live_job", "yoyo_lock"), "jobs_owner"),
    roles={**dict.fromkeys((*GROUPS, "app", "mailer")), "jobs_owner": CLAIM},
    members=(
        Membership("jobs_producer", "app", ""),
        Membership("jobs_worker", "mailer", ""),
    ),
    applied=frozenset(["0001-initial"]),
    version=1,
    stored=Stored(
        {name: getattr(DOCUMENT, name) for name in POLICY},
        {"email": 0},
        {"app": ("producer",), "mailer": ("worker",)},
    ),
    catalogue=Catalogue(OBJECTS, OBJECTS),
)


def printed(state):
    """List what check would print."""
    return [(each.what, each.advice) for each in findings(state, DOCUMENT)]


def having(*additions, rows=(), without=()):
    """Return the sound state with other objects."""
    found = {key: facts for key, facts in OBJECTS.items() if key not in without}
    for each in additions:
        found |= each
    catalogue = Catalogue(found, OBJECTS, dict(rows))
    return replace(SOUND, catalogue=catalogue)


def test_a_sound_instance_has_no_findings_and_no_changes():
    assert printed(SOUND) == []
    assert not changes(SOUND, DOCUMENT)
    assert refusal(SOUND, instance=True) is None


@pytest.mark.parametrize("instance", [True, False])
def test_the_router_of_a_fleet_is_refused(instance):
    told = refusal(replace(SOUND, is_router=True), instance=instance)

    assert "is the router of a fleet" in told
    assert "lenso-jobs fleet" in told


# Rights.


STRAY = Finding("a on b to c is not part of the Instance", "revoke", "", "grant_stray")
MISSING = Finding("d on e to f is missing", "grant", "", "grant_missing")


def test_stray_rights_come_before_objects_and_missing_ones_after_them():
    state = replace(having(table("note", "n")), faults=(MISSING, STRAY))

    assert [what for what, _ in printed(state)] == [
        STRAY.what,
        "table note is not part of this release",
        MISSING.what,
    ]


def test_rights_that_the_copy_received_are_not_the_release_s():
    wanted = {**OBJECTS, **table("live_job", *LIVE, grants=["reporting SELECT"])}
    state = replace(SOUND, catalogue=Catalogue(OBJECTS, wanted))

    assert printed(state) == []


def test_a_default_privilege_is_printed_with_the_statement_that_ends_it():
    default = ("default privileges of a give b", "alter default privileges")

    assert printed(replace(SOUND, defaults=(default,))) == [
        ("default privileges of a give b", "mend: alter default privileges")
    ]


# Owners.


AWAY = {
    ("schema", "jobs"): {**OBJECTS["schema", "jobs"], "owner": "heir"},
    **table("live_job", *LIVE, owner="heir"),
    **function("claim", owner="heir"),
    **table("kept", "n"),
}
GIVEN_AWAY = replace(
    SOUND,
    owner="heir",
    roles={**SOUND.roles, "heir": None},
    stored=None,
    applied=frozenset(),
    version=0,
    catalogue=Catalogue(AWAY, OBJECTS),
)


def test_of_an_instance_that_was_given_away_everything_is_given_back_schema_first():
    assert was_given_away(GIVEN_AWAY)
    assert given_away(GIVEN_AWAY).splitlines() == [
        (
            "schema jobs belongs to heir, not to jobs_owner; run all of these first, and then"
            " this command again:"
        ),
        "    alter schema jobs owner to jobs_owner;",
        "    alter table jobs.live_job owner to jobs_owner;",
        "    alter routine jobs.claim() owner to jobs_owner;",
    ]


def test_where_the_owner_s_role_is_missing_it_is_made_first():
    roles = {
        name: role for name, role in GIVEN_AWAY.roles.items() if name != "jobs_owner"
    }
    relations = dict.fromkeys(("job", "live_job"), "heir")
    superusers = frozenset(["heir"])
    state = replace(GIVEN_AWAY, roles=roles, relations=relations, superusers=superusers)

    assert was_given_away(state)
    assert given_away(state).splitlines()[1:3] == [
        "    create role jobs_owner nologin;",
        "    alter schema jobs owner to jobs_owner;",
    ]


def test_an_owner_s_role_that_was_renamed_is_renamed_back():
    roles = {**GIVEN_AWAY.roles, "heir": CLAIM}
    del roles["jobs_owner"]

    told = given_away(replace(GIVEN_AWAY, roles=roles))

    assert told.splitlines()[1:] == ["    alter role heir rename to jobs_owner;"]


def test_the_schema_of_a_role_that_a_dba_never_named_is_not_taken_over():
    roles = {**GIVEN_AWAY.roles, "jobs_owner": None}

    state = replace(GIVEN_AWAY, roles=roles)

    told = refusal(state, instance=True)

    assert not was_given_away(state)
    assert "belongs to heir, not to jobs_owner" in told


def test_single_objects_that_were_given_away_are_given_back():
    state = having(function("claim", owner="heir", grants=["heir EXECUTE"]))

    assert printed(state)[0] == (
        "routine jobs.claim() belongs to heir, not to jobs_owner",
        "mend: alter routine jobs.claim() owner to jobs_owner",
    )


# Objects.


def test_a_stray_table_is_dropped_by_hand_with_the_number_of_its_rows():
    state = having(table("note", "n"), rows={("table", "note"): "7 rows"})

    assert printed(state) == [
        (
            "table note is not part of this release",
            "by hand, and it deletes data (7 rows): drop table jobs.note",
        )
    ]


def test_a_stray_column_is_dropped_by_hand_with_the_number_of_its_values():
    state = having(
        table("live_job", *LIVE, "note"),
        rows={("column", "live_job.note"): "3 values"},
    )

    assert [advice for _, advice in printed(state)] == [
        (
            "by hand, and it deletes data (3 values): "
            "alter table jobs.live_job drop column note"
        )
    ]


@pytest.mark.parametrize("kind", ["function", "view", "trigger", "index"])
def test_a_stray_object_that_holds_no_data_is_dropped(kind):
    stray = {
        "function": function("stray"),
        "view": table("stray", relkind="v"),
        "trigger": {
            ("trigger", "live_job.stray"): {
                "of": "live_job",
                "name": "stray",
                "definition": "",
                "enabled": "O",
                "grants": [],
                "type grants": [],
                "place": None,
            }
        },
        "index": index("stray", on="(attempt)"),
    }[kind]
    if kind == "view":
        stray = {("view", "stray"): stray["table", "stray"]}

    ((_, advice),) = printed(having(stray))

    assert advice.startswith("mend: drop ")


def test_what_makes_sessions_read_only_is_mended_first():
    found = [Finding(name, "", "", name) for name in ("role_unsafe", "setting_harmful")]

    assert [what for what, _ in printed(replace(SOUND, faults=tuple(found)))] == [
        "setting_harmful",
        "role_unsafe",
    ]


def test_an_interrupted_swap_is_reported_in_an_order_that_works():
    old = table("live_job_old", *LIVE)
    state = having(
        old,
        index("live_job_claimable_idx", of="live_job_old"),
        index("live_job_queue_idx"),
        without=[("index", "live_job.live_job_claimable_idx")],
        rows={("table", "live_job_old"): "5 rows"},
    )

    (table_first, then_index) = printed(state)

    assert table_first[0] == (
        "table live_job_old is not part of this release, has the columns of live_job, "
        "and holds 5 rows"
    )
    assert table_first[1].startswith("mend: keep it: its rows may be those of live_job")
    assert then_index == (
        "index live_job_claimable_idx is missing; live_job_queue_idx is equal",
        "mend: lenso-jobs upgrade --repair",
    )


def test_names_are_quoted_where_the_server_quotes_them(owner):
    words = owner.value("select array_agg(word) from pg_get_keywords()")
    names = [*words, "jobs", "_job2", "2jobs", "Jobs", "jobs-email", 'a"b', "é", ""]

    # Words that one version alone reserves are quoted in all.
    assert [
        (name, its)
        for name in names
        if (its := owner.value("select quote_ident(%s)", name)) != quoted(name)
        and its != name
    ] == []
    assert quoted("jobs") == "jobs"


@pytest.mark.parametrize(
    "other",
    [
        index("other", on="(attempt)"),
        index("other", on="(queue) WHERE (attempt > 0)"),
        index("other", valid=False),
        index("other", options=["fillfactor=50"]),
    ],
)
def test_an_index_that_is_not_equal_does_not_take_the_place_of_a_missing_one(other):
    missing = ("index", "live_job.live_job_claimable_idx")

    told = printed(having(other, without=[missing]))

    assert [advice.split()[1] for _, advice in told] == ["drop", "lenso-jobs"]


def test_a_missing_table_of_jobs_is_restored_and_never_made():
    live = [key for key in OBJECTS if "live_job" in key[1]]
    state = having(without=live)

    ((what, advice),) = printed(state)

    assert what == (
        "table live_job is missing; if it was renamed or moved, put it back"
    )
    assert "restore it from a backup" in advice
    with pytest.raises(OperatorError, match="restore it from a backup"):
        repairing(state, DOCUMENT)


def test_a_missing_column_beside_a_stray_one_is_to_be_renamed_back_if_it_was():
    state = having(
        table("live_job", "job_id", "queue", "max_attempts", "tries"),
        without=[("column", "live_job.attempt")],
        rows={("column", "live_job.tries"): "4 values"},
    )

    assert printed(state) == [
        (
            "column live_job.tries is not part of this release",
            (
                "by hand, and it deletes data (4 values): "
                "alter table jobs.live_job drop column tries"
            ),
        ),
        (
            "column live_job.attempt is missing; if it was renamed or moved, put it back",
            "mend: alter table jobs.live_job add column attempt text",
        ),
    ]


@pytest.mark.parametrize("state_of_index", ["missing", "invalid"])
def test_without_workers_a_plain_index_is_tried_before_a_concurrent_one(
    state_of_index,
):
    key = ("index", "live_job.live_job_claimable_idx")
    broken = {key: {**OBJECTS[key], "valid": False}}
    missing = state_of_index == "missing"
    (one,) = differences(
        "jobs", having(*[broken] * (not missing), without=[key]).catalogue
    )

    *cleaned, plain, slow = one.rebuilt()

    name = "live_job_claimable_idx" + "_new" * (not missing)
    assert plain.startswith(
        "do $$ begin set local lock_timeout = '5s'; CREATE INDEX IF"
    )
    assert slow.startswith(f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON jobs.")
    assert len(cleaned) == (not missing)


def test_any_other_index_is_built_while_everybody_goes_on():
    other = index("attempt_idx", of="live_job", on="(attempt)")
    catalogue = Catalogue(OBJECTS, {**OBJECTS, **other})

    (one,) = differences("jobs", catalogue)

    assert [each[:25] for each in one.rebuilt()] == ["CREATE INDEX CONCURRENTLY"]


# Migrations, roles, declarations.


WRITER = Session(
    71, "ann", "active", datetime(2026, 1, 2, 3, 4, tzinfo=UTC), "create index x on 'y'"
)


def test_a_migration_lock_that_no_session_can_have_written_is_the_command_s_to_remove():
    told = printed(replace(SOUND, locker=7))

    assert told == [
        (
            "yoyo_lock was taken by process 7",
            "mend: lenso-jobs upgrade",
        )
    ]


def test_a_migration_lock_in_use_is_reported_with_its_session_and_without_a_command():
    ((what, advice),) = printed(replace(SOUND, locker=7, writers=(WRITER,)))

    assert what == "yoyo_lock was taken by process 7"
    assert advice.startswith(
        "mend: it may be session 71 (role ann, active since 2026-01-02 03:04:00+0000), "
        "whose query is: create index x on: wait until that session has ended"
    )
    assert "lenso-jobs" not in advice


def test_pending_migrations_come_before_what_they_would_mend():
    known = (*SOUND.known, Migration("0002-next", "", (), transactional=True))
    state = having(table("live_job", *LIVE, comment="x"), table("note", "n"))

    told = printed(replace(state, known=known))

    assert told == [
        ("table note is not part of this release", "mend: drop table jobs.note"),
        ("migration 0002-next is pending", "mend: lenso-jobs upgrade"),
    ]


@pytest.mark.parametrize(
    "newer", [{"applied": frozenset(["0001-initial", "0009-x"])}, {"version": 9}]
)
def test_an_instance_of_a_newer_release_is_refused_and_reported(newer):
    state = replace(SOUND, catalogue=None, **newer)

    assert "install the release" in refusal(state, instance=True)
    assert all("install the release" in advice for _, advice in printed(state))


@pytest.mark.parametrize("owner", [None, "jobs_owner"])
@pytest.mark.parametrize("instance", [True, False])
def test_a_schema_that_was_renamed_is_not_set_up_beside(instance, owner):
    elsewhere = (("jobs_owner", "schema other", True),)
    nothing = {"relations": {}, "applied": frozenset(), "version": 0}
    state = replace(SOUND, owner=owner, elsewhere=elsewhere, **nothing)

    told = refusal(state, instance=instance)

    assert "role jobs_owner owns schema other" in told
    assert "lenso-jobs setup" not in told


def test_the_release_s_own_judgement_of_roles_is_printed_as_it_stands():
    fault = Finding("app does not exist", "lenso-jobs setup", "", "role_missing")

    assert printed(replace(SOUND, faults=(fault,))) == [
        ("app does not exist", "mend: lenso-jobs setup")
    ]


def test_commands_come_last_and_in_the_order_in_which_they_are_run():
    state = having(function("claim", comment="x"), table("note", "n"))
    stored = replace(SOUND.stored, queues={"other": 0})

    told = printed(replace(state, stored=stored, locker=7))

    assert [advice.partition(": ")[2] for _, advice in told] == [
        "drop table jobs.note",
        "lenso-jobs upgrade",
        "lenso-jobs upgrade --repair",
        "lenso-jobs configure",
        "lenso-jobs configure",
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"queues": {"email": 0, "old": 3}}, "queue old is dropped (live jobs: 3)"),
        ({"callers": {}}, "caller app is declared as producer"),
    ],
)
def test_a_difference_from_the_document_is_configured(change, what):
    told = printed(replace(SOUND, stored=replace(SOUND.stored, **change)))

    assert told[0] == (
        f"the document is not stored: {what}",
        "mend: lenso-jobs configure",
    )


def test_changes_of_callers_are_said_in_words():
    stored = replace(
        SOUND.stored, callers={"app": ("producer",), "old": ("worker", "observer")}
    )
    members = (*SOUND.members[:1], Membership("jobs_worker", "old", ""))

    told = changes(replace(SOUND, stored=stored, members=members), DOCUMENT)

    assert told.roles == (
        "mailer becomes a member of jobs_worker",
        "old is no longer a member of jobs_worker",
    )
    assert told.stored == (
        "caller mailer is declared as worker",
        "caller old is dropped",
    )


# Sessions that are waited for.


def test_a_wait_names_the_session_and_says_what_can_be_done():
    assert waits_for([WRITER]) == (
        "waits for session 71 (role ann, active since 2026-01-02 03:04:00+0000): end "
        "session 71 or wait; Ctrl-C is safe"
    )


def test_a_wait_for_a_prepared_transaction_names_its_gid():
    prepared = Session(None, "app", "prepared", WRITER.since, gid="o'x")

    assert waits_for([prepared]) == (
        "waits for prepared transaction 'o''x' (role app since 2026-01-02 "
        "03:04:00+0000): end it with ROLLBACK PREPARED 'o''x' or COMMIT PREPARED; "
        "Ctrl-C is safe"
    )


def test_the_query_of_a_session_is_shown_up_to_the_first_literal():
    session = Session(1, "x", "idle", None, "select f(1, 'secret', $$secret$$)")

    assert session.with_query.endswith("whose query is: select f(1,")
    assert "secret" not in session.with_query
