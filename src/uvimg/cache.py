"""Results at hand, bounded by bytes, and one maker for equal requests in flight.

A maker belongs to nobody: it ends early only when the last of those who wait for it has gone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachetools import LRUCache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """The least recently used go first. `weigh` is a result's size in bytes; one over an eighth of all is not kept."""

    def __init__(self, max_bytes: int, weigh: Callable[[V], int]) -> None:
        self._weigh = weigh
        self._most = max_bytes // 8
        self._kept: LRUCache[K, V] = LRUCache(max_bytes, getsizeof=weigh)
        self._flights: dict[K, _Flight[V]] = {}

    def peek(self, key: K) -> V | None:
        """The result, if it is at hand."""
        return self._kept.get(key)

    @property
    def size_bytes(self) -> int:
        """What all that is kept weighs."""
        return int(self._kept.currsize)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: K, value: V) -> None:
        if self._weigh(value) <= self._most:
            self._kept[key] = value

    def forget(self, unwanted: Callable[[K], bool]) -> None:
        """Drop what is kept under such keys."""
        for key in [key for key in self._kept if unwanted(key)]:
            self._kept.pop(key, None)

    async def get(self, key: K, make: Callable[[], Awaitable[V]]) -> V:
        """The result, at hand or made now; whoever asks for it meanwhile waits for the same maker."""
        if (value := self.peek(key)) is not None:
            return value
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.ensure_future(self._make(key, make)))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                # Nobody may join a maker that is being stopped.
                if self._flights.get(key) is flight:
                    del self._flights[key]
                flight.task.cancel()

    async def _make(self, key: K, make: Callable[[], Awaitable[V]]) -> V:
        value = await make()
        self.keep(key, value)
        return value


@dataclass(eq=False, slots=True)
class _Flight(Generic[V]):
    task: asyncio.Future[V]
    waiting: int = 0
