"""What a process has done, a line each, on the disk before it goes on."""

from __future__ import annotations

import json
import os
import time


class Journal:
    """One process's; lines are appended."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, what, **facts):
        """Write one line, and wait until the disk has it."""
        line = (
            json.dumps({"at": time.time(), "what": what, **facts}, default=str) + "\n"
        )
        os.write(self._file, line.encode())
        os.fdatasync(self._file)


def read(directory):
    """Return the lines of every journal in a directory, each in its order."""
    entries = []
    for path in sorted(directory.glob("*.journal")):
        *lines, torn = path.read_text(encoding="utf-8").split("\n")
        entries += [{"by": path.stem, **json.loads(line)} for line in lines]
        # A process that was killed may have been about to write.
        assert not torn.endswith("}"), torn
    return entries
