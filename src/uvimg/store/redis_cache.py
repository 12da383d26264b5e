"""A cache in Redis: items that may be gone at any time. Needs GET, SET with EX, and DEL."""

from collections.abc import Sequence

from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import OutOfMemoryError, RedisError
from redis.exceptions import TimeoutError as TimedOut

from uvimg.core.backend import hide_secrets
from uvimg.core.errors import StoreDown, StoreFull, UvimgError
from uvimg.store.guard import Guard

_CONNECTIONS = 16


class RedisCache:
    """ValueError for a URL that redis cannot read."""

    def __init__(self, url: str, timeout_s: float) -> None:
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_keepalive=True,
            # Its own three tries would make one call take seconds.
            retry=Retry(NoBackoff(), 0),
        )
        try:
            # Not opened yet; but what the URL says and nobody knows is found out now.
            pool.make_connection()  # type: ignore[no-untyped-call]
        except TypeError as exc:
            raise ValueError("it has a parameter that is not known") from exc
        self._redis = aioredis.Redis.from_pool(pool)
        self._guard = Guard(_name(url), _translate, timeout_s)
        self.guards: Sequence[Guard] = (self._guard,)

    async def get(self, key: bytes) -> bytes | None:
        item = await self._guard.run(lambda: self._redis.get(key))
        return item if isinstance(item, bytes) else None

    async def set(self, key: bytes, item: bytes, ttl_s: int) -> None:
        await self._guard.run(lambda: self._redis.set(key, item, ex=ttl_s))

    async def delete(self, key: bytes) -> None:
        await self._guard.run(lambda: self._redis.delete(key))

    async def close(self) -> None:
        await self._redis.aclose()


def _name(url: str) -> str:
    """Which server it is, for people."""
    return f"shared cache {hide_secrets(url)}"


def _translate(exc: Exception) -> UvimgError | None:
    match exc:
        case OutOfMemoryError():
            return StoreFull()
        case Unreachable() | TimedOut() | OSError() | EOFError():
            return StoreDown()
        case RedisError():
            return UvimgError("The shared cache does not take a command that is needed.")
    return None
