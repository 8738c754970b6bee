"""Things that are written down twice, held equal."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import lenso_jobs
from lenso_jobs import Jobs, errors
from lenso_jobs._assets import sql_files
from lenso_jobs._models import (
    CompletedItem,
    EnqueuedItem,
    EnqueuedJob,
    ExplainedJob,
    FailedItem,
    FailedJob,
    InspectedAct,
    InspectedAttempt,
    InspectedFailure,
    InspectedFinding,
    InspectedJob,
    InspectedQueue,
    InspectedWorker,
    LeasedJob,
    RenewedItem,
)
from lenso_jobs._prepare import SCHEMA_VERSION, function_digests

ROOT = Path(__file__).parents[2]

# The floors of the package, from the ground up: each may import what stands before it.
FLOORS = (
    ("errors", "_assets", "_home", "_log"),
    ("_models", "_given"),
    ("_conninfo",),
    ("_wire",),
    ("_calls",),
    ("config", "secrets", "embedded"),
    ("fleet",),
    ("_waiting", "_pipelined"),
    ("_client", "_async_client"),
    ("_prepare", "kinds"),
    ("operator", "worker"),
    ("_instances",),
    ("__init__",),
    ("capability", "exposition", "metrics", "tracing", "testing"),
    ("cli",),
    ("contrib",),
)


def test_error_codes_are_the_same_in_sql_and_python(owner):
    in_sql = owner.rows("select sqlstate, name, meaning from error_code order by 1")
    in_python = sorted(
        (code, kind.code, kind.__doc__) for code, kind in errors.REGISTRY.items()
    )

    assert in_sql == in_python


def test_every_code_that_sql_raises_is_listed(owner):
    raised = {
        code
        for path in sql_files()
        for code in re.findall(r"errcode = '(\w+)'", path.read_text(encoding="utf-8"))
    }
    listed = {code for (code,) in owner.rows("select sqlstate from error_code")}

    assert raised <= listed
    # 08 is the client's as well; everything else is raised somewhere in sql/.
    assert raised == listed


def test_the_client_is_made_for_the_installed_version(owner):
    assert owner.value("select version from installed_version") == SCHEMA_VERSION


def test_the_client_knows_every_function_body(owner):
    bodies = dict(
        owner.rows(
            "select proname, encode(sha256(convert_to(prosrc, 'UTF8')), 'hex') from pg_proc"
            " where pronamespace = 'jobs_email'::regnamespace"
        )
    )

    assert function_digests() == bodies


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        (
            "enqueue",
            (
                "p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,"
                " p_available_at timestamp with time zone DEFAULT NULL"
                "::timestamp with time zone, p_max_attempts integer DEFAULT 3"
            ),
        ),
        ("enqueue_many", "p_jobs jsonb"),
        ("claim", "p_queue text, p_limit integer DEFAULT 1"),
        ("renew", "p_job_id uuid, p_lease_token text"),
        ("renew_many", "p_job_ids uuid[], p_lease_tokens text[]"),
        ("complete", "p_job_id uuid, p_lease_token text"),
        ("complete_many", "p_job_ids uuid[], p_lease_tokens text[]"),
        (
            "fail",
            (
                "p_job_id uuid, p_lease_token text, p_failure_code text, p_retryable"
                " boolean, p_retry_after_seconds integer DEFAULT NULL::integer"
            ),
        ),
        (
            "fail_many",
            (
                "p_job_ids uuid[], p_lease_tokens text[], p_failure_codes text[],"
                " p_retryable boolean[], p_retry_after_seconds integer[] DEFAULT"
                " NULL::integer[]"
            ),
        ),
        (
            "release",
            "p_job_id uuid, p_lease_token text, p_delay_seconds integer DEFAULT 0",
        ),
        (
            "release_many",
            "p_job_ids uuid[], p_lease_tokens text[], p_delays_seconds integer[]",
        ),
        ("inspect", "p_job_id uuid"),
        ("next_available_at", "p_queue text"),
        ("wait_key", "p_queue text"),
        ("redrive", "p_job_id uuid, p_extra_attempts integer DEFAULT 1"),
        ("purge", "p_before timestamp with time zone, p_limit integer DEFAULT 1000"),
        ("retire_expired", "p_limit integer DEFAULT 1000"),
        ("enforce_retention", "p_limit integer DEFAULT 1000"),
        (
            "redrive_failed",
            (
                "p_queue text, p_since timestamp with time zone, p_before timestamp with"
                " time zone DEFAULT NULL::timestamp with time zone, p_failure_code text"
                " DEFAULT NULL::text, p_limit integer DEFAULT 100, p_extra_attempts"
                " integer DEFAULT 1, p_over_seconds integer DEFAULT 0, p_kind text"
                " DEFAULT NULL::text"
            ),
        ),
        ("pause", "p_queue text"),
        ("resume", "p_queue text"),
        ("erase", "p_job_id uuid"),
        (
            "inspect_key",
            "p_idempotency_key text, p_producer text DEFAULT NULL::text",
        ),
        (
            "inspect_jobs",
            (
                "p_queue text, p_status text, p_kind text DEFAULT NULL::text, p_limit"
                " integer DEFAULT 100, p_before uuid DEFAULT NULL::uuid"
            ),
        ),
        ("inspect_attempts", "p_job_id uuid"),
        ("inspect_queues", ""),
        ("inspect_workers", ""),
        (
            "inspect_failures",
            (
                "p_queue text DEFAULT NULL::text, p_since timestamp with time zone"
                " DEFAULT NULL::timestamp with time zone, p_limit integer DEFAULT 100,"
                " p_failure_code text DEFAULT NULL::text, p_before timestamp with time"
                " zone DEFAULT NULL::timestamp with time zone, p_before_job_id uuid"
                " DEFAULT NULL::uuid, p_kind text DEFAULT NULL::text"
            ),
        ),
        (
            "inspect_acts",
            "p_limit integer DEFAULT 100, p_before bigint DEFAULT NULL::bigint",
        ),
        ("inspect_health", ""),
        ("explain_job", "p_job_id uuid"),
    ],
)
def test_functions_keep_their_signatures(owner, verb, arguments):
    assert (
        owner.value(
            "select pg_get_function_arguments(oid) from pg_proc"
            " where pronamespace = 'jobs_email'::regnamespace and proname = %s",
            verb,
        )
        == arguments
    )


def test_python_takes_what_sql_takes_but_for_what_the_reference_says(owner):
    rows = owner.rows(
        "select p.proname, p.proargnames from pg_proc as p"
        " where p.pronamespace = 'jobs_email'::regnamespace and exists ("
        "  select from aclexplode(p.proacl) as a where a.grantee <> p.proowner)"
    )
    for name, arguments in rows:
        wanted = [argument.removeprefix("p_") for argument in arguments or ()]
        if "lease_token" in wanted or "lease_tokens" in wanted:
            wanted = ["lease" if wanted[0] == "job_id" else "leases", *wanted[2:]]
        if name.startswith("release"):
            wanted[1] = "delay"
        if name == "fail":
            wanted[-1] = "retry_after"
        if name == "fail_many":
            wanted = ["failures"]
        if name == "inspect_failures":
            wanted.remove("before_job_id")  # *before* takes the last row of a page
        if name == "wait_key":
            wanted = ["queue", "timeout"]  # of Jobs.wait

        method = getattr(Jobs, name.replace("wait_key", "wait"))
        _, *taken = inspect.signature(method).parameters
        assert taken == wanted + (["wait"] if name == "claim" else []), name


@pytest.mark.parametrize(
    ("model", "composite"),
    [
        (EnqueuedJob, "enqueued_job"),
        (EnqueuedItem, "enqueued_item"),
        (RenewedItem, "renewed_item"),
        (CompletedItem, "completed_item"),
        (FailedJob, "failed_job"),
        (FailedItem, "failed_item"),
        (InspectedJob, "inspected_job"),
        (InspectedAttempt, "inspected_attempt"),
        (InspectedQueue, "inspected_queue"),
        (InspectedWorker, "inspected_worker"),
        (InspectedFailure, "inspected_failure"),
        (InspectedAct, "inspected_act"),
        (InspectedFinding, "inspected_finding"),
        (ExplainedJob, "explained_job"),
    ],
)
def test_every_composite_type_has_its_dataclass(owner, model, composite):
    # The statements add the seconds that are left of a lease.
    fields = [name for name in model.__dataclass_fields__ if name != "seconds_left"]

    assert fields == attributes(owner, composite)


def test_a_lease_has_a_property_for_each_attribute_of_its_composite_type(owner):
    properties = [
        name
        for name, field in vars(LeasedJob).items()
        if isinstance(field, property) and name not in {"payload_json", "seconds_left"}
    ]

    assert sorted(properties) == sorted(attributes(owner, "leased_job"))


def attributes(owner, composite):
    return [
        name
        for (name,) in owner.rows(
            "select attname from pg_attribute where attrelid = %s::regclass"
            " and attnum > 0 order by attnum",
            composite,
        )
    ]


def test_the_public_names_are_all_there_is():
    tree = ast.parse(Path(lenso_jobs.__file__).read_text(encoding="utf-8"))
    checked = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("lenso_jobs")
        for alias in node.names
    }

    assert sorted(lenso_jobs.__all__) == lenso_jobs.__all__ == sorted(checked)
    for name, module in checked.items():
        assert getattr(lenso_jobs, name) is getattr(import_module(module), name)
    assert set(lenso_jobs.__all__) <= set(dir(lenso_jobs))
    with pytest.raises(AttributeError, match="has no attribute 'Job'"):
        _ = lenso_jobs.Job


@pytest.mark.slow
def test_the_package_by_itself_imports_nothing_but_the_standard_library():
    listed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, lenso_jobs.testing; print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    assert not {"psycopg", "pydantic", "psycopg_pool", "yoyo"} & set(listed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "unloaded"),
    [
        (["Jobs", "AsyncJobs", "NewJob", "JobsError"], "pydantic psycopg_pool"),
        (sorted(lenso_jobs.__all__), ""),
    ],
)
def test_an_application_loads_nothing_of_an_extra(names, unloaded):
    listed = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; from lenso_jobs import {', '.join(names)}; print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    extras = "yoyo typer click rich prometheus_client opentelemetry sqlalchemy django"
    assert not set(f"{extras} {unloaded}".split()) & set(listed)


def imports(path):
    """The rooms of the package that a module imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "lenso_jobs"
        ):
            parts = node.module.split(".")
            if len(parts) > 1:
                yield parts[1]
            else:
                known = {room for floor in FLOORS for room in floor}
                yield from (
                    alias.name if alias.name in known else "__init__"
                    for alias in node.names
                )


def test_imports_point_down_the_floors():
    level = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    package = ROOT / "python" / "lenso_jobs"
    for path in package.rglob("*.py"):
        room = path.relative_to(package).with_suffix("").parts[0]
        for imported in imports(path):
            assert imported == room or level[imported] < level[room], (room, imported)


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("yoyo", {"operator"}),
        ("typer", {"cli"}),
        ("rich", {"cli"}),
        ("sqlalchemy", {"contrib"}),
        ("django", {"contrib"}),
        ("pydantic", {"config", "fleet", "kinds"}),
    ],
)
def test_libraries_stay_in_their_rooms(library, rooms):
    package = ROOT / "python" / "lenso_jobs"
    using = {
        path.relative_to(package).with_suffix("").parts[0]
        for path in package.rglob("*.py")
        if re.search(rf"^\s*(from|import) {library}\b", path.read_text(), re.MULTILINE)
    }

    assert using == rooms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "library", "extra"),
    [
        ("exposition", "prometheus_client", "prometheus"),
        ("metrics", "prometheus_client", "prometheus"),
        ("tracing", "opentelemetry", "otel"),
        ("contrib.sqlalchemy", "sqlalchemy", "sqlalchemy"),
        ("contrib.django", "django", "django"),
    ],
)
def test_a_library_of_an_extra_is_missed_by_its_room_alone(room, library, extra):
    def said(code):
        return (
            subprocess.run(
                [sys.executable, "-c", f"import sys; {code}"],
                check=False,
                capture_output=True,
                text=True,
            )
            .stderr.strip()
            .rpartition("\n")[2]
        )

    without = f"sys.modules[{library!r}] = None; import lenso_jobs.{room}"

    assert (
        said(f"import lenso_jobs.worker; assert {library!r} not in sys.modules") == ""
    )
    assert said(without) == f"ImportError: pip install 'lenso-jobs[{extra}]'"
