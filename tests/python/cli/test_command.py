"""The command in surroundings that lack something: a width, a stream, a package."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs.cli import _app

COMMAND = [sys.executable, "-c", "from lenso_jobs.cli import main; main()"]
COMMANDS = (
    *("setup", "plan", "upgrade", "check", "configure", "uninstall"),
    *("health", "explain", "stats", "inspect", "jobs", "failures"),
    *("redrive", "purge", "retire", "erase", "pause", "resume", "enqueue"),
    *("work", "metrics", "demo", "dev"),
)


@pytest.fixture
def here(tmp_path, document):
    """A folder with the Instance's document."""
    (tmp_path / "jobs.json").write_text(document())
    return tmp_path


@pytest.fixture
def run(environment, here):
    """Run the command there; a variable that is None is left out."""

    def run(*arguments, shell="", python=(), **variables):
        env = {k: v for k, v in (environment | variables).items() if v is not None}
        command = [sys.executable, *python, *COMMAND[1:], *arguments]
        if shell:
            command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
        return subprocess.run(
            command,
            cwd=here,
            env=env,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


# The size of the terminal.


@pytest.mark.slow
@pytest.mark.parametrize("size", ["0", "00", "-1", "", "x", "²", "1", "99999999999"])
def test_an_unusable_terminal_size_counts_as_unset(lenso_jobs, monkeypatch, size):
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, size)
    check = lenso_jobs("check")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, size)
    _, _, usage = lenso_jobs("purge")

    assert check == (0, "Instance jobs_email is as it should be\n", "")
    assert "give one of --before, --older-than and --retention" in " ".join(
        usage.replace("│", " ").split()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"COLUMNS": "0", "LINES": "0"},
        {"COLUMNS": None, "LINES": None},
        {"TERM": "dumb"},
        {"TERM": None},
        {"NO_COLOR": "1"},
    ],
    ids=str,
)
def test_the_live_screen_shows_its_tables_on_any_terminal(environment, here, variables):
    ours, theirs = pty.openpty()  # its size is 0 by 0
    env = {"TERM": "xterm", **environment} | variables
    with subprocess.Popen(
        [*COMMAND, "stats", "--watch", "--config", "jobs.json"],
        cwd=here,
        env={k: v for k, v in env.items() if v is not None},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        seen, deadline = "", time.monotonic() + 20
        while "spare-worker" not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 65536).decode()
        process.send_signal(signal.SIGTERM)
        while select.select([ours], [], [], 5)[0]:
            try:
                rest = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            seen += rest.decode()
    os.close(ours)

    assert process.returncode == 128 + signal.SIGTERM
    assert "nothing is wrong" in seen
    # The screen that was there before is shown again.
    assert seen.count("\x1b[?1049h") == seen.count("\x1b[?1049l")


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fills_the_lines_of_80_columns(monkeypatch, capsys, name):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["lenso-jobs", *name.split(), "--help"])
    with pytest.raises(SystemExit):
        _app.run()
    lines = capsys.readouterr().out.splitlines()

    assert all(len(line) <= 80 for line in lines)
    # Of the paragraphs above the panels; those are one space in.
    text = [line.rstrip() for line in lines if line.startswith(" ")]
    for line, following in pairwise(text):
        if line.strip() and re.match(r" \w", following):
            first = following.split()[0]
            assert len(line) + 1 + len(first) > 79, f"{line!r} breaks before {first!r}"


def test_help_groups_the_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lenso-jobs", "--help"])
    with pytest.raises(SystemExit):
        _app.run()
    out = capsys.readouterr().out

    for panel in ("Manage an Instance", "Look", "Act on jobs", "Run"):
        assert f"─ {panel} ─" in out
    assert all(re.search(rf"^│ {name} ", out, re.MULTILINE) for name in COMMANDS)


# Options that are given twice.


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("work --queue a --handler h:h --handler i:i", "--handler"),
        ("work --queue a --handler h:h --prepare --no-prepare", "--prepare"),
        ("redrive --queue a --queue=a --since 1h", "--queue"),
        ("purge --older-than 30d --older-than 1d --yes", "--older-than"),
        ("purge --retention --batch 1 --batch 2", "--batch"),
        ("check --config other.json", "--config"),
        ("stats --every 1 --every 2", "--every"),
        ("metrics --listen a:1 --listen b:1", "--listen"),
    ],
)
def test_an_option_for_one_value_is_refused_the_second_time(
    lenso_jobs, command, option
):
    code, out, err = lenso_jobs(*command.split(), url="")

    assert (code, out) == (2, "")
    said = " ".join(err.replace("│", " ").split())
    assert re.search(rf"'?{option}\b.* takes one value, and is given 2 times", said)


@pytest.mark.slow
def test_a_switch_and_an_option_for_several_may_be_repeated(lenso_jobs):
    assert lenso_jobs("check", "--json", "--json")[0] == 0
    _, _, err = lenso_jobs(
        *("work", "--queue", "email", "--handler", "os:fspath"),
        *("--observer", "no form", "--observer", "no form"),
    )
    assert "times" not in err


# Streams that are closed.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "arguments", "code", "says"),
    [
        ("<&-", ("purge", "--retention"), 2, "pass --yes or --dry-run"),
        pytest.param("<&-", ("check",), 0, "", marks=pytest.mark.slow),
        pytest.param(">&-", ("stats",), 0, "", marks=pytest.mark.slow),
        pytest.param("2>&-", ("health",), 0, "", marks=pytest.mark.slow),
        pytest.param("<&- >&- 2>&-", ("check",), 0, "", marks=pytest.mark.slow),
        ("<&- >&-", ("inspect", "no-uuid"), 2, "valid UUID"),
    ],
)
def test_a_closed_stream_ends_no_command(run, closed, arguments, code, says):
    result = run(*arguments, "--config", "jobs.json", shell=closed)

    assert result.returncode == code
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("check", "--config", "jobs.json"),
        pytest.param(("stats", "--config", "jobs.json"), marks=pytest.mark.slow),
        pytest.param(
            ("stats", "--watch", "--json", "--config", "jobs.json"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("plan", "--config", "jobs.json"), marks=pytest.mark.slow),
        pytest.param(("metrics", "--config", "jobs.json"), marks=pytest.mark.slow),
        pytest.param(("health", "--config", "none.json"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_closed_pipe_ends_the_command_as_sigpipe_would(environment, here, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=here,
        env=environment,
        stdout=writing,
        stderr=writing,
    ) as process:
        os.close(writing)

    assert process.returncode == 128 + signal.SIGPIPE


# Packages and variables that are missing.


def without(here, *modules):
    """Return the folder of a sitecustomize that has some modules missing."""
    folder = here / "without"
    folder.mkdir()
    missing = "".join(f"sys.modules[{each!r}] = None\n" for each in modules)
    (folder / "sitecustomize.py").write_text(f"import sys\n{missing}")
    return f"{folder}{os.pathsep}{Path(_app.__file__).parents[2]}"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("typer", ("--version",), "cli"),
        ("rich", ("--version",), "cli"),
        ("yoyo", ("setup", "--config", "jobs.json"), "cli"),
        ("prometheus_client", ("metrics", "--config", "jobs.json"), "prometheus"),
    ],
)
def test_a_missing_extra_is_named(run, here, module, arguments, extra):
    result = run(*arguments, PYTHONPATH=without(here, module))

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: lenso-jobs needs {module}: pip install 'lenso-jobs[{extra}]'\n"
    )


@pytest.fixture
def no_libpq(here):
    """Variables under which psycopg finds no libpq."""
    path = without(here, "psycopg_binary", "psycopg_c")
    customize = here / "without" / "sitecustomize.py"
    found_none = "import ctypes.util\nctypes.util.find_library = lambda name: None\n"
    customize.write_text(customize.read_text() + found_none)
    return {"PYTHONPATH": path}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "--config", "jobs.json"),
        pytest.param(("--version",), marks=pytest.mark.slow),
        pytest.param(("demo",), marks=pytest.mark.slow),
        pytest.param(
            (
                *("work", "--config", "jobs.json", "--queue", "email"),
                *("--handler", "os:fspath"),
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_without_libpq_the_command_names_the_extra(run, no_libpq, arguments):
    result = run(*arguments, **no_libpq)

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: psycopg finds no libpq (")
    assert result.stderr.endswith("): pip install 'lenso-jobs[binary]'\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "from lenso_jobs import Jobs",
        pytest.param("import lenso_jobs.worker", marks=pytest.mark.slow),
        pytest.param("import lenso_jobs.errors", marks=pytest.mark.slow),
    ],
)
def test_without_libpq_the_import_names_the_extra(environment, no_libpq, statement):
    result = subprocess.run(
        [sys.executable, "-c", statement],
        env=environment | no_libpq,
        check=False,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 1
    (last, *_) = result.stderr.splitlines()[::-1]
    assert last.startswith("ImportError: psycopg finds no libpq (")
    assert "pip install 'lenso-jobs[binary]'" in last


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        (
            "import lenso_jobs, lenso_jobs.capability; lenso_jobs.Worker",
            "typer rich yoyo prometheus_client",
        ),
        (
            "import sys; sys.argv[1:] = ['--help']; import lenso_jobs.cli as c; c.main()",
            "psycopg pydantic yoyo prometheus_client",
        ),
        (
            (
                "import sys; sys.argv[1:] = 'work --config none.json --queue email"
                " --handler os:fspath'.split(); import lenso_jobs.cli as c; c.main()"
            ),
            "yoyo prometheus_client lenso_jobs.operator lenso_jobs.embedded",
        ),
    ],
    ids=["import", "help", "work"],
)
def test_no_more_is_imported_than_needed(environment, here, statement, unwanted):
    report = (
        "import atexit, sys; atexit.register(lambda: print('loaded', *sorted(sys.modules),"
        " file=sys.stderr)); "
    )
    result = subprocess.run(
        [sys.executable, "-c", report + statement],
        cwd=here,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )

    (loaded, *_) = result.stderr.splitlines()[::-1]
    assert loaded.startswith("loaded ")
    assert set(loaded.split()) & set(unwanted.split()) <= (
        {"lenso_jobs.embedded"} if "work" in statement else set()
    )


@pytest.mark.slow
def test_no_variable_is_needed_but_the_secret(run, environment):
    bare = dict.fromkeys(environment) | {
        name: environment[name] for name in ("PYTHONPATH", "JOBS_DATABASE_URL")
    }

    result = run("check", "--config", "jobs.json", **bare)

    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="root and setpriv only"
)
def test_a_user_without_an_entry_and_a_home_sets_an_instance_up(
    environment, document, new_database, fresh_prefix, open_directory
):
    path = open_directory / "jobs.json"
    path.write_text(document(role_prefix=fresh_prefix))
    url = new_database(fresh_prefix)
    # May read all files, for an interpreter that lives in root's home.
    command = [
        *("setpriv", "--reuid=4000000", "--regid=4000000", "--clear-groups"),
        *("--inh-caps=+dac_override", "--ambient-caps=+dac_override"),
        *("env", "-i", f"PYTHONPATH={environment['PYTHONPATH']}", f"PATH={os.defpath}"),
        f"JOBS_DATABASE_URL={url}",
        *(*COMMAND, "setup", "--config", path),
    ]
    if subprocess.run([*command[:6], "true"], check=False).returncode:
        pytest.skip("root may not hand capabilities on here")

    result = subprocess.run(command, check=False, capture_output=True, text=True)

    assert (result.stderr, result.returncode) == ("", 0)
    assert result.stdout.endswith("Instance jobs_email is ready\n")


# What the server says.


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ('FATAL:  password authentication failed for user "ada"', "the password in"),
        ('FATAL:  role "ada" does not exist', "the password in"),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1"', "the password in"),
        ('FATAL:  role "ada" is not permitted to log in', "the password in"),
        ('FATAL:  database "none" does not exist', "name of the database"),
        ("FATAL:  sorry, too many clients already", "when a connection is free"),
        (
            "FATAL:  remaining connection slots are reserved for roles with SUPERUSER",
            "when a connection is free",
        ),
        (
            'FATAL:  could not write to file "pg_wal/xlogtemp.7": No space left on device',
            "The server's log says why.",
        ),
        ("FATAL:  the database system is starting up", "The server's log says why."),
        ("ВАЖНО:  FATAL", "The server's log says why."),
        ("local user with ID 4000000 does not exist", "user=NAME"),
        ("could not translate host name", "the host and port"),
    ],
)
def test_a_refused_connection_has_the_hint_of_its_fault(said, hint):
    _, told, found = _app.told(psycopg.OperationalError(f"connection failed: {said}"))

    assert said in told
    assert hint in found
    assert ("password" in found) == (hint == "the password in")


def test_a_role_that_does_not_exist_is_reported_with_the_secret_to_check(
    lenso_jobs, conninfo
):
    code, out, err = lenso_jobs(
        "check", url=make_conninfo(conninfo, user="nobody-here")
    )

    assert (code, out) == (2, "")
    assert "the server refuses the connection" in err
    assert "Check the role and the password" in err


# Signals.


@pytest.fixture
def started(environment, here):
    """Start the command; it is killed at the end."""
    processes = []

    def started(*arguments, before=(), **variables):
        process = subprocess.Popen(
            [*before, *COMMAND, *arguments],
            cwd=here,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


AS_PROCESS_1 = ("unshare", "-pf", "--mount-proc", "--kill-child")
HANGS = "import time; print('importing', flush=True); time.sleep(60)\n"
GOES_ON = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException:
    pass
def handle(lease): pass
"""


@pytest.fixture
def importing(started, here):
    """Start a worker whose module is being imported; return process and worker."""

    def importing(module, before=()):
        (here / "handlers.py").write_text(module)
        process = started(
            *("work", "--config", "jobs.json", "--queue", "email"),
            *("--handler", "handlers:handle"),
            before=before,
        )
        assert process.stdout.readline() == "importing\n"
        if not before:
            return process, process.pid
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return process, int(children.read_text())

    return importing


def may_unshare():
    return (
        shutil.which("unshare") is not None
        and subprocess.run(
            [*AS_PROCESS_1, "true"], check=False, capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(not may_unshare(), reason="no new process namespace is allowed")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGQUIT, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_process_1_is_ended_by_a_signal_while_a_module_is_imported(importing, number):
    process, worker = importing(HANGS, AS_PROCESS_1)

    os.kill(worker, number)

    _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors


@pytest.mark.skipif(not may_unshare(), reason="no new process namespace is allowed")
def test_process_1_is_ended_by_a_signal_before_anything_is_imported(started, here):
    # As main begins: nothing but its first line has run.
    (here / "late.py").write_text(
        "import os, signal, sys\n"
        "class Late:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('typer', 'lenso_jobs.cli._app'):\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Late())\n"
        "from lenso_jobs.cli import main\n"
        "main()\n"
    )
    process = started("--version", before=(*AS_PROCESS_1, sys.executable, "late.py"))

    process.communicate(timeout=20)

    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_module_that_catches_everything_does_not_hold_up_a_signal(importing):
    process, worker = importing(GOES_ON)

    os.kill(worker, signal.SIGTERM)

    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
