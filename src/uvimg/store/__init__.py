"""Where bytes live: blobs under the hash of their bytes, and names that point at them.

A blob is kept once, whichever app brought it, as long as a name points at it. Names are bytes of at
most MAX_NAME_BYTES; they order as bytes do. What a write returns has happened for good: it survives
the end of the process and of the power.
Rule: a backend's foreign errors become StoreDown and StoreFull at its own edge.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec

from uvimg.core.address import Digest
from uvimg.core.message import Content

# LMDB's longest key.
MAX_NAME_BYTES = 511
# Blobs up to here lie in the database itself: one read is 0.8 µs there, 8.6 µs from a file.
SMALL_BLOB_BYTES = 65_536


class Record(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a name points at: a blob of `size` bytes and media type `type`; `facts` are the app's own, msgpack."""

    digest: Digest
    size: int
    type: str
    created_s: int
    facts: bytes = b""


class Finding(msgspec.Struct, frozen=True):
    """One step of a long walk over the store: what was looked at, and what is wrong with it, "" for nothing."""

    subject: str
    note: str = ""


class Measures(msgspec.Struct, frozen=True):
    """How much there is. `database_bytes` are pages in use; `free_bytes` is the room left beside them."""

    blobs: int
    names: int
    database_bytes: int
    free_bytes: int


class Near(Protocol):
    """The reads of a store that can answer in this very call."""

    def version(self) -> int:
        """Another number after every change, whichever process made it; a change that was answered is counted."""

    def record(self, name: bytes) -> Record | None: ...

    def get(self, digest: Digest) -> Content | None:
        """A blob's bytes, or an open file of them, which the caller closes."""


class Incoming(Protocol):
    """A blob on its way in: hashed while it is written, seen by nobody until a name is bound to it.

    An async context manager; leaving it throws away what was not bound.
    """

    size: int

    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> Digest:
        """The end of the bytes. They are on the disk when this returns."""

    def content(self) -> Content:
        """The bytes after `finish`; what it opens the caller closes."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """One contract for every backend; tests/test_store.py is its long form."""

    @property
    def near(self) -> Near | None:
        """None where every read has to wait."""

    def incoming(self, watch: Callable[[bytes], object] | None = None) -> Incoming:
        """Room for a new blob. `watch` is called with each piece, in order, perhaps in another thread."""

    async def record(self, name: bytes) -> Record | None: ...

    async def get(self, digest: Digest) -> Content | None: ...

    async def bind(
        self, names: Sequence[bytes], record: Record, blob: Incoming | None = None, *, replace: bool = True
    ) -> list[Record | None]:
        """Point names at a blob, all at once; it comes along as `blob` unless another name has it already.

        Returns the record that each name has now: with `replace` False an existing one stays. None, and
        nothing done, when the blob neither comes along nor is there.
        """

    async def unbind(self, names: Sequence[bytes], digest: Digest | None = None) -> list[Record | None]:
        """Take names away, all at once, and their blobs too when no other name points at them.

        With `digest` only those that point at that blob. Returns the records that were taken.
        """

    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[tuple[bytes, Record]]:
        """Names with this prefix and behind `after`, in order, and their records."""

    def scrub(self) -> AsyncIterator[Finding]:
        """Read every blob and hold it against its address. One finding a blob."""

    def collect(self, *, dry_run: bool = False) -> AsyncIterator[Finding]:
        """Remove blobs that nobody names and what interrupted uploads left. One finding a removal."""

    async def size(self) -> int:
        """How many blobs there are."""

    def measure(self) -> Measures | None:
        """What can be said in this very call; None where it takes waiting."""

    async def close(self) -> None: ...


def open_store(url: str, *, create: bool = True) -> Store:
    """The store that a URL names: `local:DIR` or `memory:`. ValueError with a sentence for any other.

    StoreDown when it cannot be used, or is not there and `create` is False.
    """
    scheme, colon, rest = url.partition(":")
    match scheme:
        case "local" if colon and rest:
            from uvimg.store.local import LocalStore

            return LocalStore(rest, create=create)
        case "memory" if colon and not rest:
            if not create:
                raise ValueError("memory: is empty at every start, so there is nothing to look at")
            from uvimg.store.memory import MemoryStore

            return MemoryStore()
    raise ValueError(f"'{url}' is not a store: write local:DIR or memory:")
