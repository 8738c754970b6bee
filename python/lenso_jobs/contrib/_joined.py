"""Clients that find their connection anew at each call.

A framework may take its connection back after a commit and lend it to somebody else. A
client that kept it would then write into a transaction of another session.
"""

# ruff: noqa: SLF001 - of our own clients

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from lenso_jobs._async_client import AsyncJobs
from lenso_jobs._client import Jobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from lenso_jobs._calls import Call

Row = TypeVar("Row")
Found = TypeVar("Found")


class JoinedJobs(Jobs):
    """``Jobs`` on the connection that a framework uses at the moment of each call."""

    _is_opened_by_prepare = False

    def __init__(self, current: Callable[[], Jobs], caller: str | None) -> None:  # pyright: ignore[reportMissingSuperCall]
        self._current = current
        self._caller = caller

    def _ask(
        self, call: Call[Row], values: tuple[object, ...], *, keep: bool = False
    ) -> list[Row]:
        return self._current()._ask(call, values, keep=keep)

    def _until(
        self, queue: str, longest: float, look: Callable[[Jobs], Found]
    ) -> Found:
        return self._current()._until(queue, longest, look)


class AsyncJoinedJobs(AsyncJobs):
    """``AsyncJobs`` on the connection that a framework uses at the moment of each call."""

    _is_opened_by_prepare = False

    def __init__(
        self, current: Callable[[], Awaitable[AsyncJobs]], caller: str | None
    ) -> None:
        self._current = current
        self._caller = caller

    async def _ask(
        self, call: Call[Row], values: tuple[object, ...], *, keep: bool = False
    ) -> list[Row]:
        jobs = await self._current()
        return await jobs._ask(call, values, keep=keep)

    async def _until(
        self,
        queue: str,
        longest: float,
        look: Callable[[AsyncJobs], Awaitable[Found]],
    ) -> Found:
        jobs: Any = await self._current()
        found: Found = await jobs._until(queue, longest, look)
        return found
