"""Where the command writes: a pipe, a full disk, an encoding that lacks characters."""

import os
import socket
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from lenso_jobs.cli import main; main()"]


@pytest.fixture
def command(environment, document, tmp_path, enqueue, worker):
    """Have the command run where there is something to tell and return its process."""
    (tmp_path / "jobs.json").write_text(document())
    for _ in range(20):
        enqueue()
    worker.execute(
        "select f.* from (select array_agg(c.job_id) as jobs,"
        " array_agg(c.lease_token) as tokens from claim('email', 20) as c) as held,"
        " fail_many(jobs, tokens, array_fill('smtp'::text, array[20]),"
        " array_fill(false, array[20])) as f"
    )

    def command(*arguments, variables=None, **options):
        return subprocess.Popen(
            [*COMMAND, *arguments, "--config", "jobs.json"],
            cwd=tmp_path,
            env=environment | (variables or {}),
            stderr=subprocess.PIPE,
            **options,
        )

    return command


READS = ["stats", "health", "failures", "check", "plan", "metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("read", READS)
def test_a_reader_that_has_read_enough_sees_no_traceback(read, command):
    reading, writing = os.pipe()
    os.close(reading)

    with command(read, stdout=writing) as process:
        os.close(writing)
        said = process.stderr.read()

    assert said == b""


@pytest.mark.slow
@pytest.mark.parametrize("read", READS)
def test_a_full_disk_is_reported_and_is_not_a_finding(read, command):
    with Path("/dev/full").open("wb") as full, command(read, stdout=full) as process:
        said = process.stderr.read().decode()

    assert said == "error: cannot write the output: No space left on device\n"
    assert process.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("read", ["stats", "health"])
@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["latin-1", "C"],
)
def test_an_output_that_knows_few_signs_shows_the_others(read, variables, command):
    with command(read, variables=variables, stdout=subprocess.PIPE) as process:
        answer, said = process.communicate()

    assert said == b""
    assert b"most jobs fail" in answer or b"jobs_failing" in answer, answer
    assert process.returncode == (read == "health")


@pytest.mark.slow
def test_a_script_is_not_written_in_an_encoding_that_lacks_a_character(
    command, document, tmp_path
):
    (tmp_path / "jobs.json").write_text(document(observer_instances=["Zoë 中"]))

    with command(
        "plan", variables={"PYTHONIOENCODING": "latin-1"}, stdout=subprocess.PIPE
    ) as process:
        answer, said = process.communicate()

    assert answer == b""
    assert said.decode() == (
        "error: the output is in latin-1, which lacks a character\n"
        "Set PYTHONIOENCODING=utf-8.\n"
    )
    assert process.returncode == 2


@pytest.mark.slow
def test_clients_that_hang_and_that_hang_up_keep_no_scrape_waiting(command, until):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()

    def asking(what):
        asking = socket.create_connection(address, timeout=20)
        asking.sendall(what)
        return asking

    def is_served():
        try:
            socket.create_connection(address).close()
        except OSError:
            return False
        return True

    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with command("metrics", "--listen", f"127.0.0.1:{address[1]}") as process:
        try:
            until(is_served)
            with closing(asking(b"GET /met")):
                for _ in range(3):
                    gone = asking(request)
                    gone.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    gone.close()
                with closing(asking(request)) as scrape:
                    assert scrape.recv(15) == b"HTTP/1.0 200 OK"
        finally:
            process.terminate()
        said = process.stderr.read()

    assert b"Traceback" not in said
    assert process.returncode == 0
