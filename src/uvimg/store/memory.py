"""A store in a dictionary, for tests and for services that may forget. Same contract, no disk."""

import hashlib
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from uvimg.core.address import Digest
from uvimg.store import Finding, Incoming, Measures, Record


class MemoryStore:
    def __init__(self) -> None:
        self.near = self._Near(self)
        self._names: dict[bytes, Record] = {}
        self._blobs: dict[Digest, bytes] = {}
        self._counts: Counter[Digest] = Counter()
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
        self._version += 1
        self._names[name] = record
        self._counts[record.digest] += 1
        if old is not None:
            self._release(old)
        return record

    async def unbind(self, names: Sequence[bytes], digest: Digest | None = None) -> list[Record | None]:
        taken: list[Record | None] = []
        for name in names:
            old = self._names.get(name)
            if old is not None and digest in (None, old.digest):
                self._version += 1
                del self._names[name]
                self._release(old)
                taken.append(old)
            else:
                taken.append(None)
        return taken

    def _release(self, record: Record) -> None:
        self._counts[record.digest] -= 1
        if not self._counts[record.digest]:
            del self._counts[record.digest], self._blobs[record.digest]

    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[tuple[bytes, Record]]:
        names = heapq.nsmallest(limit, (name for name in self._names if name.startswith(prefix) and name > after))
        return [(name, self._names[name]) for name in names]

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
