"""Where bytes live: blobs under the hash of their bytes, and names that point at them.

A blob is kept once, whichever app brought it, as long as a name points at it. Names are bytes of at
most MAX_NAME_BYTES; they order as bytes do. What a write returns has happened for good: it survives
the end of the process and of the power.
A record may have the bytes themselves instead, where they are few (`inline`), and a second from which it no longer
counts (`expires_s`). Who reads looks at his own clock: an expired one is there until it is swept.
Rule: a backend's foreign errors become StoreDown and StoreFull at its own edge.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

import msgspec

from uvimg.core.address import Digest
from uvimg.core.backend import split_url
from uvimg.core.message import Content, Pieces
from uvimg.store.guard import Guard

Durability = Literal["commit", "os"]

# LMDB's longest key.
MAX_NAME_BYTES = 511
# Blobs up to here lie in the database itself: one read is 0.8 µs there, 8.6 µs from a file.
SMALL_BLOB_BYTES = 65_536
# A server that has not answered by then will not; a client of ours has long lost patience.
DEFAULT_TIMEOUT_S = 2.0


class Record(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a name points at: a blob of `size` bytes and media type `type`; `facts` are the app's own, msgpack.

    With `inline` these are the bytes, and there is no blob. `expires_s` is 0 for never.
    """

    digest: Digest
    size: int
    type: str
    created_s: int
    facts: bytes = b""
    expires_s: int = 0
    inline: bytes | None = None

    def is_live(self, now_s: float) -> bool:
        return not self.expires_s or self.expires_s > now_s


# What becomes of a name that had this record: its new record, the same one for no change, None for none. It may be
# asked more than once, in any thread, for a backend may have to try again: the last answer is the one that counts.
Decide = Callable[[bytes, Record | None], Record | None]


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
    """The reads of a store that can answer in this very call.

    One that has only some of it at hand raises Elsewhere for the record of a name that it does not know, and gives no
    blob (None) that it does not have.
    """

    def version(self) -> int:
        """Another number after every change, whichever process made it; a change that was answered is counted."""

    def record(self, name: bytes) -> Record | None: ...

    def get(self, digest: Digest) -> Content | None:
        """A blob's bytes, or an open file of them, which the caller closes."""


# What a store may offer for which each call is a way to a server and back: the records of several names in one go, and
# the bytes of the blob that the last one points at, where they came along for nothing.
Look = Callable[[Sequence[bytes]], Awaitable[tuple[list[Record | None], bytes | None]]]


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

    @property
    def guards(self) -> Sequence[Guard]:
        """What stands before the servers that this store asks."""

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

    async def change(
        self, names: Sequence[bytes], decide: Decide, blob: Incoming | None = None
    ) -> list[tuple[Record | None, Record | None]]:
        """Have it decided for each name, by the record that it has, which one it is to have; all at once.

        Nobody's change comes between the look and the change, whichever process made it. What `decide` raises is
        raised here, and nothing is done. A record that is not inline needs its blob: the one that comes along, or
        one that another name has already. No name twice. Returns the records before and after.
        """

    async def scan(
        self, prefix: bytes, after: bytes = b"", limit: int = 1000, *, backward: bool = False
    ) -> list[tuple[bytes, Record]]:
        """Names with this prefix and behind `after`, in order, and their records.

        Backward those before `after`, from the last one down; b"" is the end then.
        """

    async def is_named(self, digest: Digest) -> bool:
        """Whether any name points at this blob."""

    async def counts(self, prefix: bytes, now_s: int) -> dict[bytes, int]:
        """How many names each group (`group_of`) with this prefix has that have not expired; without a walk over them.

        A group without any is not among them.
        """

    async def sweep(self, now_s: int, limit: int = 1000) -> int:
        """Take away up to so many names that have expired; how many it were."""

    async def sync(self) -> None:
        """All that was answered is on the disk when this returns, however little was promised."""

    def scrub(self) -> AsyncIterator[Finding]:
        """Read every blob and hold it against its address. One finding a blob."""

    def collect(self, *, dry_run: bool = False) -> AsyncIterator[Finding]:
        """Remove blobs that nobody names and what interrupted uploads left. One finding a removal."""

    async def size(self) -> int:
        """How many blobs there are."""

    def measure(self) -> Measures | None:
        """What can be said in this very call; None where it takes waiting."""

    async def close(self) -> None: ...


@runtime_checkable
class Streams(Protocol):
    """A store that is so far away that a large blob is better sent on while it comes, and a part of it alone."""

    async def stream(self, digest: Digest, start: int, stop: int) -> Pieces | None:
        """The bytes from start to stop; None where there is no such blob, or a shorter one."""


def find_look(store: Store) -> Look | None:
    """`look` of a store that has one."""
    look: Look | None = getattr(store, "look", None)
    return look


def open_store(
    url: str, *, create: bool = True, durability: Durability = "commit", timeout_s: float = DEFAULT_TIMEOUT_S
) -> Store:
    """The store that a URL names (core/backend.py). ValueError with a sentence for any other.

    `durability` is how much of its promise an embedded store keeps (see LocalStore), `timeout_s` how long a server is
    waited for. StoreDown when an embedded one cannot be used, or is not there and `create` is False; a server is not
    asked before the first call.
    """
    scheme, rest = split_url(url)
    match scheme:
        case "local":
            from uvimg.store.local import LocalStore

            return LocalStore(rest, create=create, durability=durability)
        case "memory":
            if not create:
                raise ValueError("memory: is empty at every start, so there is nothing to look at")
            from uvimg.store.memory import MemoryStore

            return MemoryStore()
        case "s3" | "gs" | "az":
            from uvimg.core.bucket import parse_bucket
            from uvimg.store.objects import ObjectStore

            return ObjectStore(parse_bucket(scheme, rest), timeout_s)
        case "redis" | "rediss" | "redis+cluster" | "rediss+cluster":
            # Only here: redis-py takes long to load.
            from uvimg.store.redis import RedisStore

            return RedisStore(url, timeout_s)
        case "memcached":
            from uvimg.store.memcached import MemcachedStore

            return MemcachedStore(rest, timeout_s=timeout_s)
    raise AssertionError(f"nothing opens {scheme}:")
