"""A failover by Patroni under load: is anything lost that was acknowledged?

    python tests/failover/patroni.py [--seconds 30] [--seed N]

Needs ``etcd`` and ``patroni``, as the README beside this tells. Two PostgreSQL servers,
each kept by a Patroni in synchronous mode, and one etcd, all on the loopback. The load of
``python tests/chaos`` runs while the leader changes twice: once by a switchover, and once
because the leader and its Patroni are killed. Then the journals are compared with the
tables. Exits with 1 where something was found.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

sys.path.append(str(Path(__file__).parents[1] / "chaos"))

from checker import findings
from failover import gap
from journal import read
from lenso_jobs import embedded
from servers import DBNAME, evidence, found_instance, ground
from storm import drain, loading

TTL = 20
PATIENCE = 90.0


class Node:
    """A PostgreSQL and the Patroni that keeps it."""

    def __init__(self, name, directory, etcd_port, programs, start):
        self.port, self._rest = free_port(), free_port()
        self._data = directory / name
        self._name = name
        self._start = start
        self._settings = directory / f"{name}.json"
        parameters = {"wal_log_hints": "on", "wal_keep_size": "256MB"}
        accounts = {
            "superuser": {"username": "postgres"},
            "rewind": {"username": "postgres"},
            "replication": {"username": "replicator"},
        }
        # What is JSON is YAML.
        self._settings.write_text(
            json.dumps(
                {
                    "scope": "chaos",
                    "name": name,
                    "etcd3": {"host": f"127.0.0.1:{etcd_port}"},
                    "restapi": {
                        "listen": f"127.0.0.1:{self._rest}",
                        "connect_address": f"127.0.0.1:{self._rest}",
                    },
                    "bootstrap": {
                        "dcs": {
                            "ttl": TTL,
                            "loop_wait": 2,
                            "retry_timeout": 5,
                            "synchronous_mode": True,
                            "postgresql": {
                                "use_pg_rewind": True,
                                "use_slots": True,
                                "parameters": parameters,
                            },
                        },
                        "initdb": ["no-sync", "no-locale", {"encoding": "UTF8"}],
                    },
                    "postgresql": {
                        "listen": f"127.0.0.1:{self.port}",
                        "connect_address": f"127.0.0.1:{self.port}",
                        "data_dir": str(self._data),
                        "pgpass": str(directory / f"{name}.pgpass"),
                        "bin_dir": str(programs),
                        "authentication": accounts,
                        "parameters": {"unix_socket_directories": str(directory)},
                        "pg_hba": [
                            "local all all trust",
                            "host all all 127.0.0.1/32 trust",
                            "host replication all 127.0.0.1/32 trust",
                        ],
                    },
                },
                indent=1,
            )
        )
        self._process = None

    def start(self):
        self._process = self._start(self._name, ["patroni", self._settings])

    def kill(self):
        """As when the machine goes: the keeper first, so that it cannot mend."""
        self._process.kill()
        self._process.wait()
        postmaster = (self._data / "postmaster.pid").read_text().split()[0]
        os.kill(int(postmaster), signal.SIGKILL)

    def is_a(self, role):
        """Ask its Patroni: leader, or synchronous."""
        try:
            urllib.request.urlopen(self._url(role), timeout=2).close()
        except OSError:
            return False
        return True

    def switch_over(self, other):
        """Hand the lead over."""
        body = json.dumps({"leader": self._name, "candidate": other._name}).encode()
        request = urllib.request.Request(self._url("switchover"), body)
        urllib.request.urlopen(request, timeout=60).close()

    def _url(self, path):
        return f"http://127.0.0.1:{self._rest}/{path}"


class Cluster:
    """Both nodes, and the way to whichever takes writes."""

    def __init__(self, nodes):
        self._nodes = nodes
        self.way = {
            "host": ",".join("127.0.0.1" for _ in nodes),
            "port": ",".join(str(node.port) for node in nodes),
            "target_session_attrs": "read-write",
        }

    def conninfo(self, dbname=DBNAME):
        return make_conninfo(**self.way, user="postgres", dbname=dbname)

    def connect(self):
        return psycopg.connect(self.conninfo(), autocommit=True)

    def roles(self):
        """The leader and the other, once there are a leader and its standby in step."""

        def found():
            for leader, other in (self._nodes, self._nodes[::-1]):
                if leader.is_a("leader") and other.is_a("synchronous"):
                    return leader, other
            return None

        return until(found)


def until(condition):
    """Wait until it returns something true, and return that."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("the cluster is not as it should be")
        time.sleep(0.2)
    return answer


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def started(stack, directory, account):
    """Return how to start a program that ends with this one."""

    def start(name, command):
        log = stack.enter_context((directory / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            command,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=embedded._die_with_parent,  # noqa: PLW1509 - it is one call
            **account,
        )
        stack.callback(process.wait, 60)
        stack.callback(process.terminate)
        return process

    return start


def cluster(stack, directory):
    """Start etcd and both nodes."""
    account = embedded._account()
    programs = embedded._reachable(embedded.find_programs(), account, stack)
    place = directory / "patroni"
    place.mkdir(mode=0o700)
    if account:
        os.chown(place, account["user"], account["group"])
    start = started(stack, directory, account)
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    start(
        "etcd",
        [
            "etcd",
            *("--data-dir", place / "etcd"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
        ],
    )
    etcd_port = client.rpartition(":")[2]
    nodes = [Node(name, place, etcd_port, programs, start) for name in ("one", "two")]
    for node in nodes:
        node.start()
    return Cluster(nodes)


def run(directory, seconds, seed):
    """Change the leader twice; return what happened, and findings."""
    with ExitStack() as stack:
        them = cluster(stack, directory)
        them.roles()
        found_instance(them.conninfo("postgres"))
        changes = {}
        with loading(directory, seed, [them.way]) as load:
            time.sleep(seconds / 3)
            leader, other = them.roles()
            changes["switchover"] = time.time()
            leader.switch_over(other)
            leader, other = them.roles()
            time.sleep(seconds / 3)
            changes["crash"] = time.time()
            leader.kill()
            until(lambda: other.is_a("leader"))
            time.sleep(seconds / 3)
            # The lost one comes back as a standby, and is waited for again.
            leader.start()
            assert them.roles() == (other, leader)
            drain(load, them)
        seen = evidence(them.conninfo(), read(directory))
    answers = seen.noted("acknowledged"), seen.noted("answered")
    happened = {
        "jobs": len(seen.jobs),
        "answers to producers": len(seen.acknowledged()),
        "answers to workers": len(seen.noted("answered")),
        **{
            f"seconds without an answer, {name}": [
                round(gap(entries, at), 1) for entries in answers
            ]
            for name, at in changes.items()
        },
    }
    return happened, findings(seen)


def main():
    """Change leaders, check, tell."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    options = parser.parse_args()
    for program in ("etcd", "patroni"):
        if shutil.which(program) is None:
            parser.error(f"there is no {program}; see tests/failover/README.md")
    print(f"seed: {options.seed}", flush=True)
    with ground() as directory:
        try:
            happened, found = run(directory, options.seconds, options.seed)
        except TimeoutError:
            for log in directory.glob("*.log"):
                print(f"{log.stem}: {log.read_text(encoding='utf-8')[-2000:]}")
            raise
    for name, value in {**happened, **found}.items():
        print(f"{name}: {value}")
    print(f"{len(found)} checks found something")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
