"""Rules every object of the schema keeps, read from the catalogue and the files."""

import os
import re
from pathlib import Path

import pytest

from lenso_jobs._assets import asset_dir, sql_files

NOBODYS = "p.proname !~ '^_' and p.proname <> 'configure'"


def test_no_function_name_is_used_twice(owner):
    twice = owner.rows(
        "select proname from pg_proc where pronamespace = 'jobs_email'::regnamespace"
        " group by 1 having count(*) > 1"
    )

    assert twice == []


def test_every_granted_function_is_a_definer_with_a_pinned_path(owner):
    wrong = owner.rows(
        "select p.proname from pg_proc as p"
        f" where p.pronamespace = 'jobs_email'::regnamespace and {NOBODYS}"
        " and not (p.prosecdef"
        " and 'search_path=jobs_email, pg_temp' = any (p.proconfig))"
    )

    assert wrong == []


# Each was measured with every other choice left to the planner, and to the session.
BY_KEY = {"plan_cache_mode=force_generic_plan", "jit=off", "enable_seqscan=off"}
BY_INDEX = BY_KEY | {"enable_indexscan=on"}
BY_ROW = BY_INDEX | {"enable_bitmapscan=off"}
IN_LOOPS = BY_ROW | {
    *("enable_nestloop=on", "enable_hashjoin=off", "enable_mergejoin=off"),
}
IN_ORDER = IN_LOOPS | {"enable_sort=off", "enable_incremental_sort=off"}
IN_BATCHES = IN_LOOPS | {"enable_tidscan=on"}
PINNED = {
    # Its insert reads one row; what else it reads, _enqueue_again does.
    "enqueue": {"plan_cache_mode=force_generic_plan", "jit=off"},
    "_enqueue_again": BY_INDEX,
    "claim": BY_ROW | {"enable_sort=off", "enable_tidscan=on"},
    "renew": BY_ROW,
    "complete": BY_ROW,
    "fail": BY_ROW,
    "enqueue_many": IN_BATCHES,
    "renew_many": IN_BATCHES,
    "complete_many": IN_BATCHES,
    "_lease_give_back": IN_BATCHES,
    "fail_many": set(),
    "release": set(),
    "release_many": set(),
    "retire_expired": {"jit=off"},
}


def test_every_verb_has_its_plans_pinned(owner):
    settings = dict(
        owner.rows(
            "select p.proname, p.proconfig from pg_proc as p"
            " where p.pronamespace = 'jobs_email'::regnamespace"
            f" and ({NOBODYS} or p.proname in ('_enqueue_again', '_lease_give_back'))"
        )
    )

    assert {
        name: set(pins) - {"search_path=jobs_email, pg_temp"}
        for name, pins in settings.items()
    } == {name: PINNED.get(name, IN_ORDER) for name in settings}


def test_every_object_belongs_to_the_owner(owner, prefix):
    owners = owner.rows(
        "select pg_get_userbyid(relowner) from pg_class"
        " where relnamespace = 'jobs_email'::regnamespace"
        " union select pg_get_userbyid(proowner) from pg_proc"
        " where pronamespace = 'jobs_email'::regnamespace"
        " union select pg_get_userbyid(typowner) from pg_type"
        " where typnamespace = 'jobs_email'::regnamespace"
    )

    assert owners == [(f"{prefix}_owner",)]


def test_every_function_is_commented(owner):
    silent = owner.rows(
        "select proname from pg_proc where pronamespace = 'jobs_email'::regnamespace"
        " and obj_description(oid, 'pg_proc') is null"
    )

    assert silent == []


def test_every_table_view_and_type_is_commented(owner):
    silent = owner.rows(
        "select relname from pg_class where relnamespace = 'jobs_email'::regnamespace"
        " and relkind in ('r', 'v') and relname !~ '^_?yoyo_'"
        " and obj_description(oid, 'pg_class') is null"
        " union all select typname from pg_type as t"
        " left join pg_class as c on c.oid = t.typrelid"
        " where typnamespace = 'jobs_email'::regnamespace"
        " and (typtype = 'd' or typtype = 'c' and c.relkind = 'c')"
        " and obj_description(t.oid, 'pg_type') is null"
    )

    assert silent == []


def test_only_the_owner_may_create_in_the_schema(owner, prefix):
    creators = owner.rows(
        "select pg_get_userbyid(a.grantee) from pg_namespace as n,"
        " aclexplode(n.nspacl) as a"
        " where n.nspname = 'jobs_email' and a.privilege_type = 'CREATE'"
    )

    assert creators == [(f"{prefix}_owner",)]


def test_public_holds_nothing(owner):
    held = owner.rows(
        "select o.name, a.privilege_type from ("
        " select relname, coalesce(relacl, acldefault('r', relowner)) from pg_class"
        "  where relnamespace = 'jobs_email'::regnamespace"
        "  and relkind in ('r', 'v', 'S')"
        " union all select proname, coalesce(proacl, acldefault('f', proowner))"
        "  from pg_proc where pronamespace = 'jobs_email'::regnamespace"
        " union all select nspname, nspacl from pg_namespace where nspname = 'jobs_email'"
        " union all select typname, coalesce(typacl, acldefault('T', typowner))"
        "  from pg_type as t left join pg_class as c on c.oid = t.typrelid"
        "  where typnamespace = 'jobs_email'::regnamespace and typtype in ('d', 'c')"
        "  and coalesce(c.relkind, 'c') = 'c'"
        ") as o (name, acl), aclexplode(o.acl) as a where a.grantee = 0"
    )

    assert held == []


def test_hot_rows_are_stored_for_it(owner):
    options = dict(
        option.split("=")
        for option in owner.value(
            "select reloptions from pg_class where oid = 'live_job'::regclass"
        )
    )

    assert int(options["fillfactor"]) < 100
    assert options["vacuum_truncate"] == "off"
    assert options["autovacuum_vacuum_scale_factor"] == "0"


TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sql_files()}
CODE = {name: re.sub(r"--.*", "", text) for name, text in TEXTS.items()}


def test_every_refusal_has_a_code_of_ours():
    codes = {
        name: re.findall(r"errcode = '(\w+)'", each) for name, each in TEXTS.items()
    }

    assert [
        name
        for name in TEXTS
        if len(codes[name]) != TEXTS[name].count("raise exception")
    ] == []
    assert {code for each in codes.values() for code in each if code[:2] != "LJ"} == {
        "42501"
    }


def test_no_function_reads_the_clock_of_the_transaction():
    clock = re.compile(
        r"\bnow\(\)|current_timestamp|localtimestamp|transaction_timestamp|"
        r"statement_timestamp"
    )

    assert [name for name, code in CODE.items() if clock.search(code)] == []


def test_dynamic_sql_sets_grants_and_plans_and_makes_sequences_and_nothing_else():
    static = re.compile("execute (on )?function|'execute'|'EXECUTE'")

    assert [
        name
        for name, code in CODE.items()
        if re.search(r"\bexecute\b", static.sub("", code))
    ] == ["_claim_floors_made.sql", "8_plans.sql", "9_grants.sql"]


def test_no_literal_holds_a_backslash():
    # A caller may turn standard_conforming_strings off, which changes its meaning.
    assert [name for name, text in TEXTS.items() if "\\" in text] == []


def test_every_function_has_a_file_of_the_same_name(owner):
    files = {
        path.stem
        for path in sql_files()
        if path.parent.name[:1].isdigit() and path.parent != asset_dir("sql")
    }
    functions = {
        name
        for (name,) in owner.rows(
            "select proname from pg_proc where pronamespace = 'jobs_email'::regnamespace"
        )
    }

    assert files == functions


def test_every_function_is_valid_by_itself(owner):
    """A migration loads functions unchecked, because some call later ones."""
    definitions = owner.rows(
        "select pg_get_functiondef(oid) from pg_proc"
        " where pronamespace = 'jobs_email'::regnamespace"
    )

    with owner.transaction(force_rollback=True):
        for (definition,) in definitions:
            owner.execute(definition.encode())


def test_the_files_load_in_the_order_of_their_paths():
    root = asset_dir("sql")
    names = [path.relative_to(root).as_posix() for path in sql_files()]

    assert names == sorted(names)
    assert names[0] == "0_open.sql"
    assert names[-2:] == ["9_grants.sql", "9_seal.sql"]
    assert Path(root, "bootstrap.sql").exists()


def test_plpgsql_check_finds_nothing(owner):
    available = owner.value(
        "select count(*) from pg_available_extensions where name = 'plpgsql_check'"
    )
    if not available and not os.environ.get("LENSO_JOBS_REQUIRE_PLPGSQL_CHECK"):
        pytest.skip("this server has no plpgsql_check; the gate runs on one that has")
    owner.execute("create extension plpgsql_check schema public")

    findings = owner.rows(
        "select p.oid::regprocedure::text, c.finding from pg_proc as p"
        " join pg_language as l on l.oid = p.prolang,"
        " lateral public.plpgsql_check_function(p.oid,"
        "  relid => case when p.prorettype = 'trigger'::regtype"
        "   then 'jobs_email.queue'::regclass::oid else 0::oid end,"
        "  fatal_errors => false, extra_warnings => true,"
        "  performance_warnings => true, security_warnings => true)"
        " as c (finding)"
        " where p.pronamespace = 'jobs_email'::regnamespace and l.lanname = 'plpgsql'"
    )

    assert findings == [], "\n".join(map(str, findings))
