"""What the pages say: every block runs, every link leads somewhere, every list is whole."""

import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import psycopg
import pytest
import typer
import yaml

import lenso_jobs.errors
from lenso_jobs import Configuration, Jobs
from lenso_jobs.cli._app import app
from lenso_jobs.embedded import EmbeddedServer
from lenso_jobs.operator import check, setup

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
(DOCUMENT,) = re.findall(r"```json\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
SCENARIOS = ROOT / "tests" / "scenarios"
PAGES = sorted(DOCS.glob("**/*.md"))
ALL = [
    *PAGES,
    README,
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    ROOT / "migrations" / "README.md",
    SCENARIOS / "README.md",
    ROOT / "tests" / "failover" / "README.md",
]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def fences(path):
    return [match.groupdict() for match in FENCE.finditer(path.read_text("utf-8"))]


def languages(path):
    return {block["language"] for block in fences(path) if not block["mark"]}


def masked(printed):
    """Leave out of an output what differs from run to run."""
    printed = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", printed)
    printed = re.sub(r"\d{4}-\d\d-\d\d [\d:,]+", "TIME", printed)
    printed = re.sub(r"-worker-[0-9a-f]{8}", "-worker", printed)
    return re.sub(r" +", " ", printed)


RUN = [path for path in PAGES if languages(path) & {"bash", "python"}]
IN_SQL = [path for path in PAGES if "sql" in languages(path) and path not in RUN]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_blocks_of_a_page_run_as_they_stand(newcomer, read, page):
    if page.stem != "install":
        newcomer("lenso-jobs", "setup", "--config", "jobs.json")
    if page.parent.name == "start":  # its reader has sourced .lenso-jobs/env
        newcomer.environment["LENSO_JOBS_CONFIG"] = "jobs.json"

    printed = set(masked("".join(read(page))).splitlines())

    if page.parent.name == "start":
        for block in fences(page):
            if block["language"] == "text":
                # A pipe takes the lines of a handler later than those of the log.
                assert set(masked(block["text"]).splitlines()) <= printed


@pytest.mark.parametrize("page", IN_SQL, ids=name_of)
def test_sql_of_a_page_runs_as_it_stands(owner, enqueue, claim, worker, prefix, page):
    enqueue()
    job_id, token = claim()
    worker.execute("select fail(%s, %s, 'smtp.timeout', false)", (job_id, token))
    enqueue()
    owner.execute("reset search_path")
    blocks = [
        block["text"].replace("jobs_email_", f"{prefix}_")
        for block in fences(page)
        if block["language"] == "sql"
    ]

    # Roles belong to every test.
    with owner.transaction(force_rollback=True):
        owner.execute("create role metrics")  # as configure would, once it is declared
        for block in blocks:
            if not block.startswith("vacuum"):
                owner.execute(block)
    for block in blocks:
        if block.startswith("vacuum"):
            owner.execute(block)


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_every_block_of_a_page_is_run_or_says_why_not(page):
    for block in fences(page):
        language, text, mark = block["language"], block["text"], block["mark"] or ""
        if mark.startswith("run by "):
            runner = ROOT / mark.removeprefix("run by ")
            assert page.name in runner.read_text("utf-8"), mark
        elif mark:
            assert re.match(r"not run: \S", mark), text
        elif language == "json":
            json.loads(text)
        elif language == "yaml":
            yaml.safe_load(text)
        elif language in {"bash", "python", "sql"}:
            assert page in RUN + IN_SQL or page.name == "README.md", text
        else:
            assert language in {"mermaid", "text"}, text


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(
        r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_is_linked_from_the_readme():
    linked = {
        (ROOT / path).resolve()
        for path in re.findall(r"\]\(([^)#]+\.md)", README.read_text("utf-8"))
    }

    assert set(PAGES) - {DOCS / "index.md"} <= linked  # the site's own list of pages


def test_the_extras_that_pages_name_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])

    for page in ALL:
        for named in re.findall(r"lenso-jobs\[([\w,]+)\]", page.read_text("utf-8")):
            assert set(named.split(",")) <= extras, name_of(page)
    packages = (DOCS / "operators" / "install.md").read_text("utf-8")
    for extra in extras - {"test", "bench", "docs", "lint"}:
        assert f"`lenso-jobs[{extra}]`" in packages, extra


def test_the_generated_parts_are_those_of_the_product(owner, prefix):
    spec = importlib.util.spec_from_file_location(
        "reference", ROOT / "tools" / "reference.py"
    )
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)

    for path, text in reference.written(owner).items():
        said = path.read_text("utf-8")
        assert said == text, f"{name_of(path)}: run tools/reference.py"


def test_the_reference_of_python_has_each_public_name_once():
    page = (DOCS / "reference" / "python.rst").read_text("utf-8")
    listed = re.findall(
        r"^\.\. auto(?:class|exception|function):: (\w+)$", page, re.MULTILINE
    )
    of_errors = set(vars(lenso_jobs.errors))  # automodule lists them

    assert sorted(listed) == sorted(set(lenso_jobs.__all__) - of_errors)


def test_the_figures_are_those_that_were_measured():
    results = ROOT / "tests" / "benchmarks" / "results" / "results.md"

    assert results.read_text("utf-8") in (DOCS / "benchmarks.md").read_text("utf-8")


def test_the_table_of_scenarios_names_every_file_once():
    table = (SCENARIOS / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", table, re.MULTILINE)
    linked = [name for row in rows for name in re.findall(r"\((\w+\.py)\)", row[3])]

    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert sorted(linked) == sorted(path.name for path in SCENARIOS.glob("test_*.py"))


@pytest.mark.slow
def test_the_line_for_cron_runs_in_the_environment_of_cron(newcomer):
    newcomer("lenso-jobs", "setup", "--config", "jobs.json")
    etc, programs = newcomer.directory / "etc", newcomer.directory / "opt"
    secret = etc / "secrets" / "jobs" / "database-url"
    secret.parent.mkdir(parents=True)
    secret.write_text(newcomer.url)
    document = json.loads((newcomer.directory / "jobs.json").read_text())
    document["retention_seconds"] = 86400
    (etc / "jobs.json").write_text(json.dumps(document))
    newcomer("lenso-jobs", "configure", "--config", str(etc / "jobs.json"))
    (newcomer.directory / "bin").rename(programs)
    (line,) = (
        block["text"]
        for block in fences(DOCS / "operators" / "retention.md")
        if block["language"] == "cron"
    )

    minute, *when, command = line.split(None, 5)
    command = command.replace("/opt/lenso-jobs/bin", str(programs))
    command = command.replace("/etc/lenso-jobs", str(etc))
    result = subprocess.run(
        [
            *shlex.split("env -i LOGNAME=jobs HOME=/ SHELL=/bin/sh PATH=/usr/bin:/bin"),
            *("/bin/sh", "-c", command),
        ],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )

    assert (minute, when) == ("*/10", ["*"] * 4)
    assert result.returncode == 0, result.stderr
    assert "0 jobs" in result.stdout


@pytest.mark.slow
def test_a_check_writes_a_megabyte_of_wal_and_health_writes_none():
    configuration = Configuration.from_json(DOCUMENT)
    # A server to itself: WAL is the whole server's.
    with EmbeddedServer(settings={"autovacuum": "off"}) as server:
        conninfo = server.conninfo()
        setup(configuration, conninfo)
        with psycopg.connect(conninfo, autocommit=True) as connection:

            def written(act):
                position = "select pg_current_wal_insert_lsn()"
                (before,) = connection.execute(position).fetchone()
                act()
                return connection.execute(
                    "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", [before]
                ).fetchone()[0]

            jobs = Jobs(connection, "jobs_email")
            jobs.inspect_health()

            assert 400_000 < written(lambda: check(configuration, conninfo)) < 2_000_000
            assert written(jobs.inspect_health) < 10_000


ANSWERS = {
    "setup": ("", "is ready"),
    "plan": ("", "Nothing is to be done"),
    "upgrade": ("", "there is nothing to do"),
    "check": ("", "as it should be"),
    "configure": ("", ""),
    "health": ("", ""),
    "explain": ("{job_id}", "ended"),
    "stats": ("", "email"),
    "jobs": ("email --status failed", "send"),
    "enqueue": ("email send {{}} --key again --caller {accounts}", "enqueued job"),
    "pause": ("email", "email"),
    "resume": ("email", "email"),
    "inspect": ("{job_id}", "failed"),
    "failures": ("", "smtp.timeout"),
    "erase": ("{job_id} --dry-run", "nothing was changed"),
    "redrive": ("{job_id} --yes", "queued"),
    "purge": ("--older-than 30d --yes", "0 jobs"),
    "retire": ("--yes", "0 jobs"),
    "metrics": ("", "lenso_jobs_up"),
    "uninstall": ("--yes", ""),
}


@pytest.mark.slow
def test_every_command_does_its_task(newcomer):
    listed = set(typer.main.get_command(app).commands)
    assert listed == ANSWERS.keys() | {"work", "demo", "dev", "fleet"}  # of other tests
    newcomer("lenso-jobs", "setup", "--config", "jobs.json")
    with psycopg.connect(newcomer.conninfo, autocommit=True) as connection:
        accounts, worker = newcomer.ours('"accounts" "email-worker"').split()
        connection.execute(f"set role {accounts}")
        (job_id,) = connection.execute(
            "select job_id from jobs_email.enqueue('email', 'send', '{}', 'k')"
        ).fetchone()
        connection.execute(f"set role {worker}")
        connection.execute(
            "select jobs_email.fail(job_id, lease_token, 'smtp.timeout', false)"
            " from jobs_email.claim('email')"
        )

    for name, (options, answer) in ANSWERS.items():
        arguments = options.format(job_id=job_id, accounts=accounts.strip('"')).split()
        said = newcomer("lenso-jobs", name, "--config", "jobs.json", *arguments)
        assert answer in said, (name, said)
