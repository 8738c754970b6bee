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
README = (ROOT / "README.md").read_text(encoding="utf-8")

# The floors of the package, from the ground up: each may import what stands before it.
FLOORS = (
    ("errors", "_assets", "_home"),
    ("_models",),
    ("_wire", "_calls"),
    ("_requests",),
    ("config", "secrets", "embedded"),
    ("_waiting",),
    ("_client", "_async_client"),
    ("_prepare", "operator"),
    ("worker",),
    ("__init__",),
    ("capability", "exposition", "metrics", "tracing", "testing"),
    ("cli",),
)


def test_error_codes_are_the_same_in_sql_python_and_readme(owner):
    in_sql = owner.rows("select sqlstate, name, meaning from error_code order by 1")
    in_python = sorted(
        (code, kind.code, kind.__doc__) for code, kind in errors.REGISTRY.items()
    )
    in_readme = re.findall(r"^\| (\w{5}) \| `(\w+)` \| (.+) \|$", README, re.MULTILINE)

    assert in_sql == in_python
    assert in_sql == sorted(in_readme)


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
            "select proname, md5(prosrc) from pg_proc"
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
            "p_job_id uuid, p_lease_token text, p_failure_code text, p_retryable boolean",
        ),
        (
            "fail_many",
            (
                "p_job_ids uuid[], p_lease_tokens text[], p_failure_codes text[],"
                " p_retryable boolean[]"
            ),
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
                " integer DEFAULT 1"
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
                " DEFAULT NULL::uuid"
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


@pytest.mark.parametrize(
    "verb",
    [
        *("enqueue", "claim", "next_available_at", "inspect"),
        *("inspect_attempts", "inspect_failures", "inspect_acts", "explain_job"),
        *("redrive", "redrive_failed", "purge", "enforce_retention", "retire_expired"),
    ],
)
def test_the_client_takes_what_the_function_takes(owner, verb):
    arguments = [
        name.removeprefix("p_")
        for name in owner.value(
            "select proargnames from pg_proc"
            " where pronamespace = 'jobs_email'::regnamespace and proname = %s",
            verb,
        )
    ]

    taken = list(inspect.signature(getattr(Jobs, verb)).parameters)[1:]

    # wait is the client's alone, and the last row of a page stands for its key.
    assert [name for name in taken if name != "wait"] == [
        name for name in arguments if name != "before_job_id"
    ]


@pytest.mark.parametrize(
    ("model", "composite"),
    [
        (EnqueuedJob, "enqueued_job"),
        (EnqueuedItem, "enqueued_item"),
        (LeasedJob, "leased_job"),
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
    attributes = [
        "payload_json" if name == "payload" else name
        for (name,) in owner.rows(
            "select attname from pg_attribute where attrelid = %s::regclass"
            " and attnum > 0 order by attnum",
            composite,
        )
    ]

    assert list(model.__dataclass_fields__) == attributes


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
        ("pydantic", {"config"}),
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
