"""A store whose renditions lie in a cache that all nodes share, and that may forget them or be away.

Each is one item: the record and the bytes in it (`Record.inline`), so one question gives an answer. Renditions and
coded copies that are small enough go there, and not into the store; they are looked for there first.
Rule: the cache fails nobody. Away it is a miss and keeps nothing, and what comes from it counts only where its seal
fits: a cut or foreign item is a miss too. With a secret nobody else can make a seal.
Surprise: what is made of a deleted image stays in the cache until its time has come, where nobody can ask for it: its
name is behind that of the image's record. When the same bytes are uploaded again it is right again.
"""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from uvimg.core.address import Digest
from uvimg.core.backend import split_cache
from uvimg.core.errors import StoreDown, UvimgError
from uvimg.core.message import Content
from uvimg.core.sharing import may_be_shared
from uvimg.store import Decide, Finding, Incoming, Look, Measures, Near, Record, Store, find_look
from uvimg.store.guard import Guard

log = logging.getLogger("uvimg.store")

T = TypeVar("T")

# With its record, its name and its seal it is still an item of memcached's, which takes a megabyte for all of it.
MAX_SHARED_BYTES = 1_000_000
_MAX_ITEM_BYTES = (1 << 20) - 1024
# A seal of this much takes a seventh of a millisecond; more is worth waking a thread for.
_SEALED_AT_ONCE_BYTES = 262_144
_SEAL_BYTES = 32


class SharedCache(Protocol):
    """Items that may be gone at any time. Every call is bounded in time, and raises none but our own errors."""

    @property
    def guards(self) -> Sequence[Guard]: ...

    async def get(self, key: bytes) -> bytes | None: ...

    async def set(self, key: bytes, item: bytes, ttl_s: int) -> None: ...

    async def delete(self, key: bytes) -> None: ...

    async def close(self) -> None: ...


def open_cache(url: str, timeout_s: float) -> SharedCache | None:
    """The cache that a URL names (core/backend.py), None for "none". ValueError with a sentence for any other."""
    split = split_cache(url)
    match split:
        case None:
            return None
        case "memcached", rest:
            from uvimg.store.memcached_cache import MemcachedCache

            return MemcachedCache(rest, timeout_s)
        case _:
            from uvimg.store.redis_cache import RedisCache

            return RedisCache(url, timeout_s)


class Counts(msgspec.Struct):
    """Since the start, for the metrics. `damaged` is what was there and did not count."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    failed: int = 0
    kept: int = 0
    dropped: int = 0


class SharingStore:
    """A store before `store`. `ttl_s` is how long an item may be kept, `secret` what only the nodes know."""

    def __init__(self, store: Store, cache: SharedCache, ttl_s: int, secret: bytes = b"") -> None:
        self._store, self._cache, self._ttl_s, self._secret = store, cache, ttl_s, secret
        self._store_look = find_look(store)
        self.look: Look | None = None if self._store_look is None else self._look_in_both
        self._is_full = False
        self.tally = Counts()

    @property
    def near(self) -> Near | None:
        """The store's: what it does not have of renditions, nobody takes for missing who has not waited."""
        return self._store.near

    @property
    def guards(self) -> Sequence[Guard]:
        """The store's alone: all is well while the cache is away."""
        return self._store.guards

    @property
    def cache_guards(self) -> Sequence[Guard]:
        return self._cache.guards

    async def close(self) -> None:
        try:
            await self._cache.close()
        finally:
            await self._store.close()

    # Reading

    async def record(self, name: bytes) -> Record | None:
        if may_be_shared(name):
            found = await self._look(name)
            if found is not None:
                return found
        return await self._store.record(name)

    async def get(self, digest: Digest) -> Content | None:
        return await self._store.get(digest)

    async def _look_in_both(self, names: Sequence[bytes]) -> tuple[list[Record | None], bytes | None]:
        """`look` of a store that has one. What is asked for last, behind its original, may be in the cache."""
        look, last, others = self._store_look, names[-1], names[:-1]
        assert look is not None
        if not may_be_shared(last):
            return await look(names)
        if others:
            (records, _), found = await asyncio.gather(look(others), self._look(last))
        else:
            records, found = [], await self._look(last)
        if found is not None:
            return [*records, found], None
        (record,), body = await look([last])
        return [*records, record], body

    async def _look(self, name: bytes) -> Record | None:
        """What the cache has under a name."""
        try:
            item = await self._cache.get(_key(name))
        except UvimgError:
            self.tally.failed += 1
            return None
        if item is None:
            self.tally.misses += 1
            return None
        record = await self._unseal(name, item)
        if record is None:
            self.tally.damaged += 1
            if self.tally.damaged == 1:
                log.warning(
                    "the shared cache has an item that is none of ours; it and all others like it are made anew"
                )
        else:
            self.tally.hits += 1
        return record

    # Changing

    def incoming(self, watch: Callable[[bytes], object] | None = None) -> Incoming:
        # What somebody watches is an original.
        return _Incoming(self._store) if watch is None else self._store.incoming(watch)

    async def bind(
        self, names: Sequence[bytes], record: Record, blob: Incoming | None = None, *, replace: bool = True
    ) -> list[Record | None]:
        shared = [name for name in names if may_be_shared(name)]
        held = blob.held if isinstance(blob, _Incoming) else None
        is_ours = replace and len(shared) == len(names) and (blob is None or held is not None)
        # What the store has already stays there: a second one, which may be the better one, would not be found.
        if is_ours and not [name for name in shared if await self._store.record(name) is not None]:
            for name in shared:
                await self._keep(name, msgspec.structs.replace(record, inline=held))
            return [record] * len(names)
        bound = await self._store.bind(names, record, await _give_to_store(blob), replace=replace)
        await self._forget(shared)
        return bound

    async def unbind(self, names: Sequence[bytes], digest: Digest | None = None) -> list[Record | None]:
        taken = await self._store.unbind(names, digest)
        await self._forget(names)
        return taken

    async def change(
        self, names: Sequence[bytes], decide: Decide, blob: Incoming | None = None
    ) -> list[tuple[Record | None, Record | None]]:
        changed = await self._store.change(names, decide, await _give_to_store(blob))
        await self._forget(names)
        return changed

    async def _keep(self, name: bytes, record: Record) -> None:
        item = await self._seal(name, record)
        try:
            if len(item) > _MAX_ITEM_BYTES:
                self.tally.dropped += 1
                return
            await self._cache.set(_key(name), item, self._ttl_s)
            self.tally.kept += 1
            self._is_full = False
        except UvimgError as exc:
            self.tally.dropped += 1
            # Of one that is away its guard tells.
            if not isinstance(exc, StoreDown):
                if not self._is_full:
                    log.warning("the shared cache takes no more: %s", exc.detail)
                self._is_full = True

    async def _forget(self, names: Sequence[bytes]) -> None:
        """Have the cache forget what has another place now, or none. One that is away may show it again later."""
        for name in names:
            if may_be_shared(name):
                try:
                    await self._cache.delete(_key(name))
                except UvimgError:
                    self.tally.failed += 1

    # Items

    async def _seal(self, name: bytes, record: Record) -> bytes:
        content = _encode((name, record))
        return await _hash_aside(len(content), lambda: self._make_seal(content)) + content

    async def _unseal(self, name: bytes, item: bytes) -> Record | None:
        content = item[_SEAL_BYTES:]
        seal = await _hash_aside(len(content), lambda: self._make_seal(content))
        if not hmac.compare_digest(seal, item[:_SEAL_BYTES]):
            return None
        try:
            named, record = _decode(content)
        except msgspec.MsgspecError:
            return None
        is_sound = named == name and (record.inline is None or len(record.inline) == record.size)
        return record if is_sound else None

    def _make_seal(self, content: bytes) -> bytes:
        # 4 µs for 3 KB, 57 for 100 KB. Without a secret it finds damage alone.
        return hmac.digest(self._secret, content, "sha256")

    # What is the store's alone

    async def scan(
        self, prefix: bytes, after: bytes = b"", limit: int = 1000, *, backward: bool = False
    ) -> list[tuple[bytes, Record]]:
        return await self._store.scan(prefix, after, limit, backward=backward)

    async def is_named(self, digest: Digest) -> bool:
        return await self._store.is_named(digest)

    async def counts(self, prefix: bytes, now_s: int) -> dict[bytes, int]:
        return await self._store.counts(prefix, now_s)

    async def sweep(self, now_s: int, limit: int = 1000) -> int:
        return await self._store.sweep(now_s, limit)

    async def sync(self) -> None:
        await self._store.sync()

    def scrub(self) -> AsyncIterator[Finding]:
        return self._store.scrub()

    def collect(self, *, dry_run: bool = False) -> AsyncIterator[Finding]:
        return self._store.collect(dry_run=dry_run)

    async def size(self) -> int:
        return await self._store.size()

    def measure(self) -> Measures | None:
        return self._store.measure()


class _Incoming:
    """A blob that may be for the cache: the store hears of it when it is too large for that, or gets another name."""

    def __init__(self, store: Store) -> None:
        self.size = 0
        self._store = store
        self._pieces: list[bytes] = []
        self._own: Incoming | None = None

    @property
    def held(self) -> bytes | None:
        """All of its bytes, unless the store has them."""
        return None if self._own is not None else self._join()

    async def write(self, data: bytes) -> None:
        self.size += len(data)
        if self._own is None and self.size <= MAX_SHARED_BYTES:
            self._pieces.append(data)
            return
        await (await self._begin()).write(data)

    async def finish(self) -> Digest:
        if self._own is not None:
            return await self._own.finish()
        data = self._join()
        return await _hash_aside(len(data), lambda: hashlib.sha256(data).digest())

    def content(self) -> Content:
        return self._join() if self._own is None else self._own.content()

    async def give_to_store(self) -> Incoming:
        """The same for the store, after `finish`."""
        if self._own is None:
            await (await self._begin()).finish()
        assert self._own is not None
        return self._own

    async def _begin(self) -> Incoming:
        """Hand what is there over to the store, where that has not been done."""
        if self._own is None:
            own = self._store.incoming()
            await own.__aenter__()
            self._own = own
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                await own.write(piece)
        return self._own

    def _join(self) -> bytes:
        if len(self._pieces) != 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0]

    async def __aenter__(self) -> "_Incoming":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._own is not None:
            await self._own.__aexit__(None, None, None)


async def _give_to_store(blob: Incoming | None) -> Incoming | None:
    return await blob.give_to_store() if isinstance(blob, _Incoming) else blob


async def _hash_aside(size: int, work: Callable[[], T]) -> T:
    """Hash so many bytes, in a thread where it takes long."""
    return work() if size <= _SEALED_AT_ONCE_BYTES else await asyncio.to_thread(work)


def _key(name: bytes) -> bytes:
    """Short enough for memcached, and nobody's name."""
    return b"uvimg1:s:" + hashlib.sha256(name).hexdigest().encode()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, Record]).decode
