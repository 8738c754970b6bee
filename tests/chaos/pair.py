"""A primary and its synchronous standby, from the same programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

from psycopg.conninfo import conninfo_to_dict

from lenso_jobs.embedded import find_programs
from servers import Server

STANDBY = "standby"
PATIENCE = 60.0


class Pair:
    """Two servers; a commit on the primary waits until the standby has it, too.

    Clients find whichever takes writes by ``way``.
    """

    def __init__(self, directory):
        self.primary = Server(directory / "one", {"wal_keep_size": "256MB"})
        self.standby = Server(directory / "two", {"wal_keep_size": "256MB"})

    def __enter__(self):
        self.primary.start()
        self.add_standby()
        return self

    def __exit__(self, *_):
        # A primary that ends first may wait for its standby.
        self.standby.end()
        self.primary.end()

    @property
    def way(self):
        one, two = (
            conninfo_to_dict(server.conninfo())
            for server in (self.primary, self.standby)
        )
        return {
            "host": f"{one['host']},{two['host']}",
            "port": f"{one['port']},{two['port']}",
            "target_session_attrs": "read-write",
        }

    def add_standby(self):
        """Copy the primary, and have it wait for the copy from now on."""
        data = self.standby.data
        shutil.rmtree(data, ignore_errors=True)
        data.parent.mkdir(exist_ok=True)
        source = self.primary.conninfo("postgres", application_name=STANDBY)
        subprocess.run(
            [
                find_programs() / "pg_basebackup",
                *("--pgdata", data, "--dbname", source),
                *("--checkpoint", "fast", "--wal-method", "stream"),
                "--write-recovery-conf",
            ],
            check=True,
            capture_output=True,
        )
        # Of the socket, which lies with the data here.
        for lock in data.glob(".s.PGSQL.*.lock"):
            lock.unlink()
        owner = self.primary.data.stat()
        for path in (data, *data.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
        self.standby.start()
        self.require_standby()

    def require_standby(self):
        """Have commits wait for the standby from now on."""
        with self.primary.connect("postgres") as session:
            session.execute(f"alter system set synchronous_standby_names = '{STANDBY}'")
            session.execute("select pg_reload_conf()")
        self.await_standby()

    def await_standby(self):
        """Wait until commits wait for the standby, and it answers."""
        with self.primary.connect("postgres") as session:
            until(
                lambda: (
                    session.execute(
                        "select sync_state from pg_stat_replication"
                    ).fetchall()
                    == [("sync",)]
                )
            )

    def fail_over(self):
        """Stop the primary at once and promote the standby, which waits for nobody."""
        self.primary.crash()
        self.promote()

    def promote(self):
        """Make the standby the primary; the other one is down."""
        self.primary, self.standby = self.standby, self.primary
        with self.primary.connect("postgres") as session:
            session.execute("select pg_promote()")
            session.execute("alter system reset synchronous_standby_names")
            session.execute("select pg_reload_conf()")


def until(condition):
    """Block until it holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
