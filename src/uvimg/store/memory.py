"""A store in a dictionary, for tests and for services that may forget. Same contract, no disk."""

import bisect
import hashlib
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from uvimg.core.address import Digest, group_of
from uvimg.core.errors import UvimgError
from uvimg.store import Decide, Finding, Incoming, Measures, Record
from uvimg.store.guard import Guard


class MemoryStore:
    def __init__(self) -> None:
        self.guards: Sequence[Guard] = ()
        self.near = self._Near(self)
        self._names: dict[bytes, Record] = {}
        self._blobs: dict[Digest, bytes] = {}
        self._counts: Counter[Digest] = Counter()
        # Names in order, until one comes or goes; how many each group has; when which expires, perhaps no longer.
        self._order: list[bytes] | None = []
        self._groups: Counter[bytes] = Counter()
        self._due: list[tuple[int, bytes]] = []
        self._version = 0

    class _Near:
        def __init__(self, store: "MemoryStore") -> None:
            self._store = store

        def version(self) -> int:
            return self._store._version

        def record(self, name: bytes) -> Record | None:
            return self._store._names.get(name)

        def get(self, digest: Digest) -> bytes | None:
            return self._store._blobs.get(digest)

    def incoming(self, watch: Callable[[bytes], object] | None = None) -> "MemoryIncoming":
        return MemoryIncoming(watch)

    async def record(self, name: bytes) -> Record | None:
        return self._names.get(name)

    async def get(self, digest: Digest) -> bytes | None:
        return self._blobs.get(digest)

    async def bind(
        self, names: Sequence[bytes], record: Record, blob: Incoming | None = None, *, replace: bool = True
    ) -> list[Record | None]:
        return [self._bind(name, record, blob, replace) for name in names]

    def _bind(self, name: bytes, record: Record, blob: Incoming | None, replace: bool) -> Record | None:
        old = self._names.get(name)
        if old is not None and not replace:
            return old
        if record.digest not in self._blobs:
            if not isinstance(blob, MemoryIncoming):
                return None
            self._blobs[record.digest] = blob.content()
        self._write(name, old, record)
        return record

    async def unbind(self, names: Sequence[bytes], digest: Digest | None = None) -> list[Record | None]:
        taken: list[Record | None] = []
        for name in names:
            old = self._names.get(name)
            if old is not None and digest in (None, old.digest):
                self._write(name, old, None)
                taken.append(old)
            else:
                taken.append(None)
        return taken

    async def change(
        self, names: Sequence[bytes], decide: Decide, blob: Incoming | None = None
    ) -> list[tuple[Record | None, Record | None]]:
        assert len(set(names)) == len(names)
        decided = [(name, old, decide(name, old)) for name in names for old in (self._names.get(name),)]
        for _, old, new in decided:
            if new is None or new is old or new.inline is not None or new.digest in self._blobs:
                continue
            if not isinstance(blob, MemoryIncoming) or hashlib.sha256(blob.content()).digest() != new.digest:
                raise UvimgError("A record has no blob to point at.")
            self._blobs[new.digest] = blob.content()
        for name, old, new in decided:
            if new is not old:
                self._write(name, old, new)
        return [(old, new) for _, old, new in decided]

    def _write(self, name: bytes, old: Record | None, new: Record | None) -> None:
        """Put one record in the place of another."""
        self._version += 1
        if (old is None) != (new is None):
            self._order = None
            if (group := group_of(name)) is not None:
                self._groups[group] += 1 if old is None else -1
        if new is None:
            del self._names[name]
        else:
            self._names[name] = new
            if new.inline is None:
                self._counts[new.digest] += 1
            if new.expires_s:
                heapq.heappush(self._due, (new.expires_s, name))
                if len(self._due) > 2 * len(self._names) + 1000:
                    # Most are of records that have been replaced since.
                    self._due = [(each.expires_s, key) for key, each in self._names.items() if each.expires_s]
                    heapq.heapify(self._due)
        if old is not None and old.inline is None:
            self._release(old)

    def _release(self, record: Record) -> None:
        self._counts[record.digest] -= 1
        if not self._counts[record.digest]:
            del self._counts[record.digest], self._blobs[record.digest]

    async def scan(
        self, prefix: bytes, after: bytes = b"", limit: int = 1000, *, backward: bool = False
    ) -> list[tuple[bytes, Record]]:
        if self._order is None:
            self._order = sorted(self._names)
        if backward:
            # Behind all names with the prefix: there is none as long as this.
            end = bisect.bisect_left(self._order, after or prefix + b"\xff" * 512)
            names = self._order[max(0, end - limit) : end][::-1]
        else:
            start = (
                bisect.bisect_right(self._order, after) if after >= prefix else bisect.bisect_left(self._order, prefix)
            )
            names = self._order[start : start + limit]
        return [(name, self._names[name]) for name in names if name.startswith(prefix)]

    async def is_named(self, digest: Digest) -> bool:
        return digest in self._blobs

    async def counts(self, prefix: bytes, now_s: int) -> dict[bytes, int]:
        gone = Counter(map(group_of, {name for name in self._names_due(now_s) if name.startswith(prefix)}))
        counts = {group: count - gone[group] for group, count in self._groups.items() if group.startswith(prefix)}
        return {group: count for group, count in counts.items() if count}

    async def sweep(self, now_s: int, limit: int = 1000) -> int:
        swept = 0
        while self._due and self._due[0][0] <= now_s and swept < limit:
            _, name = heapq.heappop(self._due)
            old = self._names.get(name)
            if old is not None and not old.is_live(now_s):
                self._write(name, old, None)
                swept += 1
        return swept

    def _names_due(self, now_s: int) -> Iterator[bytes]:
        return (
            name
            for at, name in self._due
            if at <= now_s and name in self._names and not self._names[name].is_live(now_s)
        )

    async def sync(self) -> None:
        pass

    async def scrub(self) -> AsyncIterator[Finding]:
        for digest, data in list(self._blobs.items()):
            damaged = hashlib.sha256(data).digest() != digest
            yield Finding(digest.hex(), "its bytes are not those of its address" if damaged else "")

    async def collect(self, *, dry_run: bool = False) -> AsyncIterator[Finding]:
        # Nothing here outlives its last name.
        nothing: tuple[Finding, ...] = ()
        for finding in nothing:
            yield finding

    async def size(self) -> int:
        return len(self._blobs)

    def measure(self) -> Measures | None:
        # Nobody counts its bytes, which are the process' own.
        return None

    async def close(self) -> None:
        pass


class MemoryIncoming:
    def __init__(self, watch: Callable[[bytes], object] | None) -> None:
        self._watch = watch
        self._pieces: list[bytes] = []
        self._data = b""
        self.size = 0

    async def write(self, data: bytes) -> None:
        self.size += len(data)
        self._pieces.append(data)
        if self._watch is not None:
            self._watch(data)

    async def finish(self) -> Digest:
        self._data = b"".join(self._pieces)
        return hashlib.sha256(self._data).digest()

    def content(self) -> bytes:
        return self._data

    async def __aenter__(self) -> "MemoryIncoming":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pieces = []
