"""A cache in memcached: items that may be gone at any time."""

from collections.abc import Sequence

from uvimg.core.backend import parse_servers
from uvimg.store.guard import Guard
from uvimg.store.memcached_servers import Servers, exptime_in


class MemcachedCache:
    """`rest` is what is behind the scheme of its URL."""

    def __init__(self, rest: str, timeout_s: float) -> None:
        self._servers = Servers(parse_servers(rest), timeout_s, "shared cache memcached")
        self.guards: Sequence[Guard] = self._servers.guards

    async def get(self, key: bytes) -> bytes | None:
        return await self._servers.get(key)

    async def set(self, key: bytes, item: bytes, ttl_s: int) -> None:
        await self._servers.set(key, item, exptime_in(ttl_s))

    async def delete(self, key: bytes) -> None:
        await self._servers.delete(key)

    async def close(self) -> None:
        await self._servers.close()
