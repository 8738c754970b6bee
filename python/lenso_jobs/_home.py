"""The process and the event loop that a client belongs to."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

_FORKED = (
    "this client was made in another process: make one after the fork, on connections "
    "of its own (two processes on one connection read each other's results)"
)
_ELSEWHERE = (
    "this client belongs to another event loop: make one, and its connection or pool, "
    "in the loop that uses it"
)
_ENDING_SECONDS = 5.0
"""How long a cancelled call may still take: as long as psycopg lets a cancel."""


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


async def uncancelled(call: Coroutine[Any, Any, None]) -> None:
    """Let a call end although its task is cancelled, within 5 seconds."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=_ENDING_SECONDS)
        raise
