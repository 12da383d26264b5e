"""Results at hand, bounded by bytes, and one maker for equal requests in flight.

A maker belongs to nobody: it ends early only when the last of those who wait for it has gone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
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
        loop = asyncio.get_running_loop()
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            flight.task = loop.create_task(self._make(key, make, flight))
        waiter: asyncio.Future[V] = loop.create_future()
        flight.waiters.append(waiter)
        try:
            return await waiter
        finally:
            flight.waiters.remove(waiter)
            if not flight.waiters and flight.task is not None:
                # Nobody may join a maker that is being stopped.
                if self._flights.get(key) is flight:
                    del self._flights[key]
                flight.task.cancel()
            # An error would hold this frame, and all that it was about, and this frame the error.
            del waiter

    async def _make(self, key: K, make: Callable[[], Awaitable[V]], flight: "_Flight[V]") -> None:
        try:
            value = await make()
            self.keep(key, value)
        except asyncio.CancelledError:
            # Nobody waits; or this process ends, and then nobody shall wait for ever.
            for waiter in flight.waiters:
                waiter.cancel()
            raise
        except Exception as exc:
            flight.fail(exc)
        else:
            flight.end(value)
        finally:
            # From now on it is no maker any more, to be joined or stopped.
            flight.task = None
            if self._flights.get(key) is flight:
                del self._flights[key]


@dataclass(eq=False, slots=True)
class _Flight(Generic[V]):
    """A maker, while there is one, and those who wait for it. Each has a future of its own: `asyncio.shield` around
    one task costs three times as much."""

    task: "asyncio.Task[None] | None" = None
    waiters: "list[asyncio.Future[V]]" = field(default_factory=list)

    def end(self, value: V) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(value)

    def fail(self, error: Exception) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)
