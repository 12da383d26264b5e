"""A store that is far away, with what a node has seen of it near: blobs in a folder, records in memory.

Blobs never change, so what is kept of them is right for ever. Names do change: a record counts for `valid_s` from
when it was asked for, is asked for again in the background when it is used in the second half of that time, and is
forgotten at once when this process changes its name. That a name is not there is never remembered. So what other
processes delete and replace is seen within `valid_s`, and what they add at once.
What takes waiting (`record`) always asks the store: only answers in the very call rest on what is remembered.
While the store is away what is known counts on, however long that takes; changes fail.
Surprise: `near.version` changes with the clock too, for answers that last are made of what is remembered.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from uvimg.core.address import Digest
from uvimg.core.errors import Elsewhere, StoreDown, UvimgError
from uvimg.core.message import Content, FilePart
from uvimg.core.sharing import may_be_shared
from uvimg.store import Decide, Finding, Incoming, Measures, Near, Record, Store
from uvimg.store.guard import Guard
from uvimg.store.shelf import Shelf

log = logging.getLogger("uvimg.store")

DEFAULT_VALID_S = 5.0
# Answers are remembered elsewhere for no longer than this, and what they were made of counts for so much less.
_LONGEST_TICK_S = 1.0
# Records in memory, of about 600 bytes each.
_MOST_KNOWN = 65_536
# Names that are asked for again in the background at a time; who is not among them is asked for when he is needed.
_MOST_REFRESHED = 32
# Blobs that are on their way into the folder; more are not kept.
_MOST_KEPT = 64
# Blobs that are fetched at a time.
_MOST_FETCHED = 16
# Hashing so much takes a fifth of a millisecond: worth waking a thread for.
_HASH_AT_ONCE_BYTES = 262_144


@dataclass(frozen=True, slots=True)
class _Known:
    record: Record
    asked_s: float


@dataclass(slots=True)
class _Writing:
    """Changes of one name that are on their way; of several at once nobody here knows which came last."""

    count: int = 0
    several: bool = False


@dataclass(slots=True)
class _Fetch:
    task: "asyncio.Task[Content | None]"
    waiting: int = 0


class TieredStore:
    """`folder` keeps `max_bytes` of blobs for all processes that share it. StoreDown when it cannot be used."""

    def __init__(self, remote: Store, folder: Path, max_bytes: int, valid_s: float = DEFAULT_VALID_S) -> None:
        self._remote, self._shelf = remote, Shelf(folder, max_bytes)
        self._tick_s = min(_LONGEST_TICK_S, valid_s / 4)
        # Together with a tick that is what was promised.
        self._valid_s = valid_s - self._tick_s
        self.near: Near = _Nearby(self)
        # In the order of asking, so that what is used stays.
        self._known: dict[bytes, _Known] = {}
        self._writing: dict[bytes, _Writing] = {}
        # Questions on their way, those behind them, and those whose answer may be older than a change of ours.
        self._asked: dict[bytes, asyncio.Task[Record | None]] = {}
        self._queued: dict[bytes, asyncio.Task[Record | None]] = {}
        self._spoilt: set[bytes] = set()
        self._refreshing: set[asyncio.Task[None]] = set()
        self._keeping: dict[Digest, asyncio.Task[None]] = {}
        self._fetching: dict[Digest, _Fetch] = {}
        self._fetches = asyncio.Semaphore(_MOST_FETCHED)
        self._changes = 0
        # For the metrics: blobs that were here, and that had to be fetched.
        self.hits = self.misses = 0

    @property
    def guards(self) -> Sequence[Guard]:
        return self._remote.guards

    @property
    def kept_bytes(self) -> int:
        return self._shelf.kept_bytes

    # Records

    def version(self) -> int:
        return self._changes << 40 | int(time.monotonic() / self._tick_s)

    def record_now(self, name: bytes) -> Record:
        """Elsewhere for what is not known, or no longer."""
        known = self._known.get(name)
        if known is None:
            raise Elsewhere
        age_s = time.monotonic() - known.asked_s
        if age_s > self._valid_s / 2:
            self._refresh(name)
            if age_s > self._valid_s and not any(guard.is_away for guard in self._remote.guards):
                raise Elsewhere
        return known.record

    async def record(self, name: bytes) -> Record | None:
        try:
            return await self._ask(name)
        except StoreDown:
            known = self._known.get(name)
            if known is None:
                raise
            return known.record

    async def _ask(self, name: bytes) -> Record | None:
        """By one question for all who ask at a time; never by one that was on its way before, for he who has just
        changed something else may ask for what was changed since.
        """
        task = self._queued.get(name)
        if task is None:
            before = self._asked.get(name)
            task = asyncio.create_task(self._ask_behind(name, before))
            # Where all who wait for it have gone, nobody hears how it failed.
            task.add_done_callback(_hear)
            if before is None:
                self._asked[name] = task
            else:
                self._queued[name] = task
        # One who goes away must not take the answer from the others.
        return await asyncio.shield(task)

    async def _ask_behind(self, name: bytes, before: "asyncio.Task[Record | None] | None") -> Record | None:
        task = asyncio.current_task()
        assert task is not None
        if before is not None:
            await asyncio.wait([before])
            self._asked[name] = task
            del self._queued[name]
        self._spoilt.discard(name)
        asked_s = time.monotonic()
        try:
            record = await self._remote.record(name)
            if name not in self._spoilt and name not in self._writing:
                self._learn(name, record, asked_s)
            return record
        finally:
            if self._asked.get(name) is task and name not in self._queued:
                del self._asked[name]
            self._spoilt.discard(name)

    def _learn(self, name: bytes, record: Record | None, asked_s: float) -> None:
        before = self._known.pop(name, None)
        if record is not None and record.inline is not None and may_be_shared(name):
            # Out of a cache that nodes share: bytes have their bound in the folder.
            self._keep_bytes(record.digest, record.inline)
            record = msgspec.structs.replace(record, inline=None)
        if before is not None and before.record != record:
            # What was made of it is no longer right: that is known now, before the next tick.
            self._changes += 1
        if record is not None:
            self._known[name] = _Known(record, asked_s)
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]

    def _refresh(self, name: bytes) -> None:
        if name in self._asked or len(self._refreshing) >= _MOST_REFRESHED:
            return

        async def refresh() -> None:
            # A store that is away tells so in its log.
            with contextlib.suppress(UvimgError):
                await self._ask(name)

        task = asyncio.create_task(refresh())
        self._refreshing.add(task)
        task.add_done_callback(self._refreshing.discard)

    # Blobs

    def get_now(self, digest: Digest) -> Content | None:
        content = self._shelf.get(digest)
        if content is not None:
            self.hits += 1
        return content

    async def get(self, digest: Digest) -> Content | None:
        content = await self._shelf.look(digest)
        if content is not None:
            self.hits += 1
            return content
        self.misses += 1
        fetch = self._fetching.get(digest)
        if fetch is None:
            fetch = self._fetching[digest] = _Fetch(asyncio.create_task(self._fetch(digest)))
        fetch.waiting += 1
        try:
            content = await asyncio.shield(fetch.task)
            # Each has a place of his own in a file.
            return _open_again(content) if isinstance(content, FilePart) else content
        finally:
            fetch.waiting -= 1
            if not fetch.waiting:
                if self._fetching.get(digest) is fetch:
                    del self._fetching[digest]
                fetch.task.cancel()
                fetch.task.add_done_callback(_close_result)

    async def _fetch(self, digest: Digest) -> Content | None:
        async with self._fetches:
            content = await self._remote.get(digest)
            if content is None:
                return None
            try:
                if await _hash(content) != digest:
                    log.error("the store gave other bytes for the blob %s", digest.hex())
                    raise UvimgError("The store gave other bytes than those that were asked for.")
                mine = _open_again(content) if isinstance(content, FilePart) else content
                self._shelf.put(digest, mine)
            except BaseException:
                _close(content)
                raise
            return content

    def _keep(self, digest: Digest, blob: Incoming | None) -> None:
        """What was uploaded here has been seen here."""
        if blob is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._keep_bytes(digest, blob.content())

    def _keep_bytes(self, digest: Digest, content: Content) -> None:
        """Bytes that come with no promise but of those who brought them."""
        if len(self._keeping) >= _MOST_KEPT or digest in self._keeping or self._shelf.has(digest):
            _close(content)
            return

        def end(task: "asyncio.Task[None]") -> None:
            if self._keeping.get(digest) is task:
                del self._keeping[digest]
            if task.cancelled() or task.exception() is not None:
                _close(content)

        task = self._keeping[digest] = asyncio.create_task(self._keep_if_right(digest, content))
        task.add_done_callback(end)

    async def _keep_if_right(self, digest: Digest, content: Content) -> None:
        if await _hash(content) == digest:
            self._shelf.put(digest, content)
        else:
            _close(content)

    # Changes

    def incoming(self, watch: Callable[[bytes], object] | None = None) -> Incoming:
        return self._remote.incoming(watch)

    async def bind(
        self, names: Sequence[bytes], record: Record, blob: Incoming | None = None, *, replace: bool = True
    ) -> list[Record | None]:
        before = [known.record for name in names if (known := self._known.get(name)) is not None]
        with self._changing(names) as learn:
            bound = await self._remote.bind(names, record, blob, replace=replace)
            learn(bound)
        if replace:
            self._discard([old for old in before if old.digest != record.digest])
        if any(each is not None and each.digest == record.digest for each in bound):
            self._keep(record.digest, blob)
        return bound

    async def unbind(self, names: Sequence[bytes], digest: Digest | None = None) -> list[Record | None]:
        with self._changing(names):
            taken = await self._remote.unbind(names, digest)
        self._discard(taken)
        return taken

    async def change(
        self, names: Sequence[bytes], decide: Decide, blob: Incoming | None = None
    ) -> list[tuple[Record | None, Record | None]]:
        with self._changing(names) as learn:
            changed = await self._remote.change(names, decide, blob)
            learn([new for _, new in changed])
        for digest in {new.digest for _, new in changed if new is not None and new.inline is None}:
            self._keep(digest, blob)
        self._discard([old for old, new in changed if old is not new])
        return changed

    def _discard(self, lost: Sequence[Record | None]) -> None:
        """Blobs that have lost a name are hardly asked for again; who has another one is fetched anew."""
        for digest in {record.digest for record in lost if record is not None and record.inline is None}:
            if (keeping := self._keeping.get(digest)) is not None:
                keeping.cancel()
            self._shelf.discard(digest)

    @contextlib.contextmanager
    def _changing(self, names: Sequence[bytes]) -> Iterator[Callable[[Sequence[Record | None]], None]]:
        """Forget what is known of names that are changed meanwhile, unless one alone tells what they have now.

        Where that fails, what was known counts while the store is away and no longer: it may have happened.
        """
        now: dict[bytes, Record] = {}
        before = {name: known.record for name in names if (known := self._known.get(name)) is not None}
        began_s, done = time.monotonic(), False
        for name in names:
            writing = self._writing.setdefault(name, _Writing())
            writing.count += 1
            writing.several = writing.several or writing.count > 1

        def learn(records: Sequence[Record | None]) -> None:
            now.update({name: record for name, record in zip(names, records, strict=True) if record is not None})

        try:
            yield learn
            done = True
        finally:
            if not done:
                now, began_s = before, -math.inf
            for name in names:
                writing = self._writing[name]
                writing.count -= 1
                if not writing.count:
                    del self._writing[name]
                if name in self._asked:
                    # Nobody knows whether it was answered before or after this.
                    self._spoilt.add(name)
                self._learn(name, None if writing.several else now.get(name), began_s)
            self._changes += 1

    # What is the store's alone

    async def scan(
        self, prefix: bytes, after: bytes = b"", limit: int = 1000, *, backward: bool = False
    ) -> list[tuple[bytes, Record]]:
        return await self._remote.scan(prefix, after, limit, backward=backward)

    async def is_named(self, digest: Digest) -> bool:
        return await self._remote.is_named(digest)

    async def counts(self, prefix: bytes, now_s: int) -> dict[bytes, int]:
        return await self._remote.counts(prefix, now_s)

    async def sweep(self, now_s: int, limit: int = 1000) -> int:
        return await self._remote.sweep(now_s, limit)

    async def sync(self) -> None:
        await self._remote.sync()

    def scrub(self) -> AsyncIterator[Finding]:
        return self._remote.scrub()

    def collect(self, *, dry_run: bool = False) -> AsyncIterator[Finding]:
        return self._remote.collect(dry_run=dry_run)

    async def size(self) -> int:
        return await self._remote.size()

    def measure(self) -> Measures | None:
        return self._remote.measure()

    async def close(self) -> None:
        while tasks := {*self._refreshing, *self._keeping.values(), *self._asked.values(), *self._queued.values()}:
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._shelf.close)
        await self._remote.close()


class _Nearby:
    """What a tiered store has at hand."""

    def __init__(self, tier: TieredStore) -> None:
        self.version, self.record, self.get = tier.version, tier.record_now, tier.get_now


async def _hash(content: Content) -> Digest:
    if isinstance(content, bytes) and len(content) <= _HASH_AT_ONCE_BYTES:
        return hashlib.sha256(content).digest()
    return await asyncio.to_thread(_hash_now, content)


def _hash_now(content: Content) -> Digest:
    if isinstance(content, bytes):
        return hashlib.sha256(content).digest()
    hasher = hashlib.sha256()
    at, end = content.start, content.start + content.size
    while at < end and (data := os.pread(content.file.fileno(), min(1 << 20, end - at), at)):
        hasher.update(data)
        at += len(data)
    return hasher.digest()


def _open_again(part: FilePart) -> FilePart:
    """The same bytes with a place of one's own in them."""
    return FilePart(open(f"/proc/self/fd/{part.file.fileno()}", "rb", buffering=0), part.start, part.size)


def _close(content: Content | None) -> None:
    if isinstance(content, FilePart):
        content.close()


def _hear(task: "asyncio.Task[Record | None]") -> None:
    if not task.cancelled():
        task.exception()


def _close_result(task: "asyncio.Task[Content | None]") -> None:
    if not task.cancelled() and task.exception() is None:
        _close(task.result())
