"""What docs/applications/frameworks.md says of servers that fork."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket

import pytest

pytest.importorskip("gunicorn", reason="gunicorn")
PAGE = Path(__file__).parents[3] / "docs" / "applications" / "frameworks.md"


class Client(HTTPConnection):
    """A client of a Unix socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self):
        self.sock = socket(AF_UNIX, SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(self._path)


@pytest.fixture
def gunicorn(open_directory, environment):
    """Run the page's application with the page's configuration."""
    application, configuration = re.findall(
        r"<!-- run by \S+test_web\.py -->\n```python\n(.*?)```",
        PAGE.read_text("utf-8"),
        re.DOTALL,
    )
    (open_directory / "web.py").write_text(application)
    (open_directory / "gunicorn.conf.py").write_text(configuration)
    path = str(open_directory / "http")
    process = subprocess.Popen(
        [sys.executable, "-m", "gunicorn", "--bind", f"unix:{path}", "web:app"],
        cwd=open_directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def post(key):
        client = Client(path)
        client.request("POST", f"/{key}")
        return client.getresponse().status

    deadline = time.monotonic() + 20
    while not Path(path).exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield post
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0, said


@pytest.mark.slow
def test_preloaded_workers_enqueue_on_connections_of_their_own(gunicorn, owner):
    processes = set()
    number = 0
    while len(processes) < 2:
        assert number < 300, "one process answers all requests"
        assert gunicorn(f"receipt:{number}") == 202
        number += 1
        processes = set(owner.rows("select distinct payload->>'process' from job"))

    assert owner.value("select count(*) from job") == number
