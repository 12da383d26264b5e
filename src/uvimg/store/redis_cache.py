"""A cache in Redis or in a Redis Cluster: items that may be gone at any time. Needs GET, SET with EX, and DEL."""

from collections.abc import Sequence

from uvimg.core.redis import find_partition, read_redis_url
from uvimg.store.guard import Guard
from uvimg.store.redis_servers import open_servers


class RedisCache:
    """Beside a store in the same Redis it has keys of its own: `s/KEY`, behind the prefix and a partition's tag."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._place = read_redis_url(url)
        self._servers = open_servers(self._place, timeout_s, "shared cache redis")

    @property
    def guards(self) -> Sequence[Guard]:
        return self._servers.guards

    async def get(self, key: bytes) -> bytes | None:
        partition, own = self._find(key)
        item = await self._servers.ask(partition, "GET", own)
        return item if isinstance(item, bytes) else None

    async def set(self, key: bytes, item: bytes, ttl_s: int) -> None:
        partition, own = self._find(key)
        await self._servers.ask(partition, "SET", own, item, "EX", ttl_s)

    async def delete(self, key: bytes) -> None:
        partition, own = self._find(key)
        await self._servers.ask(partition, "DEL", own)

    async def close(self) -> None:
        await self._servers.close()

    def _find(self, key: bytes) -> tuple[int, bytes]:
        partition = find_partition(key, self._place.partitions)
        return partition, self._place.base(partition) + b"s/" + key
