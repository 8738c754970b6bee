"""Where a client was made, which is the only place it can be used in."""

from __future__ import annotations

import asyncio
import os

_FORKED = (
    "this client was made in another process: make one after the fork, on connections "
    "of its own (two processes on one connection read each other's answers)"
)
_ELSEWHERE = (
    "this client belongs to another event loop: make one, and its connection or pool, "
    "in the loop that uses it"
)


class Process:
    """The process a client was made in."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_here(self) -> bool:
        """Whether this is still that process."""
        return os.getpid() == self._pid

    def enter(self) -> None:
        """Refuse any other.

        Raises:
            RuntimeError: The process was forked in between.
        """
        if not self.is_here():
            raise RuntimeError(_FORKED)


class Loop(Process):
    """The process, and the event loop that a client was made in or first used in."""

    __slots__ = ("_loop",)

    def __init__(self) -> None:
        super().__init__()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    def enter(self) -> None:
        """Refuse any other.

        Raises:
            RuntimeError: The process was forked, or another loop runs.
        """
        super().enter()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(_ELSEWHERE)
