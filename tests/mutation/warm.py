"""Run pytest again and again, each time in a fork of a process that has imported much.

A line on the input is a list: the file for the output, then pytest's arguments. The
answer is two lines: the process that runs them, and its exit code.
"""

import json
import os
import sys

import psycopg_pool  # noqa: F401
import pydantic  # noqa: F401
import pytest
import rich.console  # noqa: F401
import typer  # noqa: F401
import yoyo  # noqa: F401

for line in sys.stdin:
    output, *arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 3
        try:
            code = pytest.main(arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
