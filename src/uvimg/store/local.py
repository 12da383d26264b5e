"""The embedded store: LMDB for names and small blobs, files for large ones.

Several processes may use one folder at once. Every change goes through one thread of each process, which
commits what arrived together in one LMDB transaction: one fsync for many writes. LMDB's writer lock is
shared between processes, so it guards the files too: a blob's file is moved into place or removed only
while it is held.
Surprise: a file whose last name goes is removed in a second transaction. Removed in the first, a commit
that then failed would leave a name without its bytes.

    DIR/format           which layout this is, written last
    DIR/names/           LMDB: names, small (blobs), uses (how many names point at a blob, and its size),
                         groups (how many names each has), due (second and group → names that expire then)
    DIR/blobs/ab/ab…     files of large blobs, by address
    DIR/blobs/incoming/  uploads on their way; locked by the process that writes them
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import queue
import secrets
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from uvimg.core.address import Digest, blob_path, group_of, original_of, parse_blob_path
from uvimg.core.coding import CODINGS, coded_digest
from uvimg.core.errors import Overloaded, StoreDown, StoreFull, UvimgError
from uvimg.core.message import Content, FilePart
from uvimg.store import MAX_NAME_BYTES, SMALL_BLOB_BYTES, Decide, Durability, Finding, Incoming, Measures, Record
from uvimg.store.guard import Guard

log = logging.getLogger("uvimg.store")

_LAYOUT = b"uvimg store 1\n"
# Address space, not disk: the file grows as it fills.
_MAP_BYTES = 1 << 40
_MAX_BATCH = 1000
_MAX_QUEUE = 20_000
# Hashing and writing this much takes half a millisecond: worth waking a thread for.
_WRITE_BYTES = 262_144
# Names or blobs looked at in one read transaction: a long one keeps LMDB from reusing pages.
_STEP = 1000
# A younger file may belong to a process that has not locked it yet.
_ORPHAN_AGE_S = 60

_USES = struct.Struct(">QQ")
_COUNT = struct.Struct(">Q")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class LocalStore:
    """A store in a folder. StoreDown when it cannot be opened.

    With the durability "os" LMDB's page that names the last commit is left for the system to write (MDB_NOMETASYNC):
    a power cut may undo the last commit, and no other, for the next one's fsync writes that page too. Less is not to
    be had: with MDB_NOSYNC a power cut may leave a store that cannot be read. The end of the process loses nothing.
    """

    def __init__(self, path: str, *, create: bool = True, durability: Durability = "commit") -> None:
        self._path = Path(path)
        self._is_synced = durability == "commit"
        if not create and not (self._path / "format").exists():
            raise StoreDown(f"There is no store in {path}.")
        try:
            _make_folders(self._path)
            fresh = not (self._path / "names" / "data.mdb").exists()
            self._env = lmdb.open(
                str(self._path / "names"),
                map_size=_MAP_BYTES,
                max_dbs=5,
                max_readers=1024,
                readahead=False,
                metasync=self._is_synced,
            )
            self._names, self._small, self._uses = (self._env.open_db(key) for key in (b"names", b"small", b"uses"))
            self._groups, self._due = self._env.open_db(b"groups"), self._env.open_db(b"due", dupsort=True)
            if fresh:
                # LMDB syncs its file, and nobody yet the folder that the file has come into.
                _sync_folder(self._path / "names")
            # Slots of readers that were killed would keep old pages alive.
            self._env.reader_check()
        except (OSError, lmdb.Error) as exc:
            raise StoreDown(f"The store in {path} cannot be opened: {exc}.") from exc
        self.guards: Sequence[Guard] = ()
        self.near = _Near(self._env, self._names, self._small, self._path)
        self._threads = concurrent.futures.ThreadPoolExecutor(8, "uvimg-store")
        self._writer = _Writer(self._env, self._remove_unused, self._add_to_groups)

    def incoming(self, watch: Callable[[bytes], object] | None = None) -> "LocalIncoming":
        return LocalIncoming(self._path / "blobs", self._threads, self._drop, watch)

    async def record(self, name: bytes) -> Record | None:
        return self.near.record(name)

    async def get(self, digest: Digest) -> Content | None:
        return self.near.get(digest)

    async def bind(
        self, names: Sequence[bytes], record: Record, blob: Incoming | None = None, *, replace: bool = True
    ) -> list[Record | None]:
        assert all(0 < len(name) <= MAX_NAME_BYTES for name in names)
        assert blob is None or isinstance(blob, LocalIncoming)

        def change(txn: lmdb.Transaction, batch: _Batch) -> list[Record | None]:
            return [self._bind(txn, batch, name, record, blob, replace) for name in names]

        bound: list[Record | None] = await self._writer.submit(change)
        if blob is not None and any(each is not None and each.digest == record.digest for each in bound):
            blob.named = True
        return bound

    async def unbind(self, names: Sequence[bytes], digest: Digest | None = None) -> list[Record | None]:
        def change(txn: lmdb.Transaction, batch: _Batch) -> list[Record | None]:
            return [self._unbind(txn, batch, name, digest) for name in names]

        taken: list[Record | None] = await self._writer.submit(change)
        return taken

    async def change(
        self, names: Sequence[bytes], decide: Decide, blob: Incoming | None = None
    ) -> list[tuple[Record | None, Record | None]]:
        assert all(0 < len(name) <= MAX_NAME_BYTES for name in names)
        assert len(set(names)) == len(names)
        assert blob is None or isinstance(blob, LocalIncoming)

        def change(txn: lmdb.Transaction, batch: _Batch) -> list[tuple[Record | None, Record | None]]:
            # All is decided before anything is done: where one is refused, nothing is.
            decided = [(name, old, decide(name, old)) for name in names for old in (self._read(txn, name),)]
            for _, old, new in decided:
                if new is not None and new is not old and new.inline is None:
                    self._provide(txn, batch, new.digest, blob)
            for name, old, new in decided:
                if new is not old:
                    self._write(txn, batch, name, old, new)
            return [(old, new) for _, old, new in decided]

        changed: list[tuple[Record | None, Record | None]] = await self._writer.submit(change)
        if blob is not None and any(new is not None and new.digest == blob.digest for _, new in changed):
            blob.named = True
        return changed

    async def scan(
        self, prefix: bytes, after: bytes = b"", limit: int = 1000, *, backward: bool = False
    ) -> list[tuple[bytes, Record]]:
        if backward:
            found = self._page_back(prefix, after, limit)
            return [(name, _decode(data)) for name, data in found if name.startswith(prefix)]
        found = self._page(self._names, max(prefix, after), limit + 1)
        return [(name, _decode(data)) for name, data in found if name > after and name.startswith(prefix)][:limit]

    async def is_named(self, digest: Digest) -> bool:
        with _translated(), self._env.begin() as txn:
            return bool(self._uses_of(txn, digest)[0])

    async def counts(self, prefix: bytes, now_s: int) -> dict[bytes, int]:
        return await asyncio.to_thread(self._count_groups, prefix, now_s)

    async def sweep(self, now_s: int, limit: int = 1000) -> int:
        names = await asyncio.to_thread(self._find_due, now_s, limit)
        if not names:
            return 0
        changed = await self.change(names, lambda _, old: None if old is None or not old.is_live(now_s) else old)
        return sum(old is not None and new is None for old, new in changed)

    async def sync(self) -> None:
        try:
            await asyncio.to_thread(self._env.sync, True)
        except lmdb.Error as exc:
            raise _translate(exc) from exc

    async def size(self) -> int:
        with _translated(), self._env.begin() as txn:
            return int(txn.stat(self._uses)["entries"])

    def measure(self) -> Measures | None:
        with _translated(), self._env.begin() as txn:
            names, small, uses = (txn.stat(db) for db in (self._names, self._small, self._uses))
        pages = sum(
            db[kind] for db in (names, small, uses) for kind in ("branch_pages", "leaf_pages", "overflow_pages")
        )
        try:
            disk = os.statvfs(self._path)
        except OSError as exc:
            raise _translate(exc) from exc
        # The files' bytes are not among them: to add those up takes a walk over all blobs.
        return Measures(uses["entries"], names["entries"], pages * names["psize"], disk.f_bavail * disk.f_frsize)

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.stop)
        self._threads.shutdown()
        self._env.close()

    # Changes, made by the writer's thread inside its transaction

    def _bind(
        self,
        txn: lmdb.Transaction,
        batch: "_Batch",
        name: bytes,
        record: Record,
        blob: "LocalIncoming | None",
        replace: bool,
    ) -> Record | None:
        old = self._read(txn, name)
        if blob is None and not self._uses_of(txn, record.digest)[0]:
            return old if old is not None and not replace else None
        # Also over a blob that is there already: it may have been damaged since.
        comes_along = blob is not None and (replace or old is None or old.digest == record.digest)
        if blob is not None and comes_along and not self._place(txn, batch, record.digest, blob):
            return None
        if old is not None and not replace:
            return old
        self._write(txn, batch, name, old, record)
        return record

    def _unbind(self, txn: lmdb.Transaction, batch: "_Batch", name: bytes, digest: Digest | None) -> Record | None:
        record = self._read(txn, name)
        if record is None or digest not in (None, record.digest):
            return None
        self._write(txn, batch, name, record, None)
        return record

    def _read(self, txn: lmdb.Transaction, name: bytes) -> Record | None:
        data = txn.get(name, db=self._names)
        return None if data is None else _decode(data)

    def _write(
        self, txn: lmdb.Transaction, batch: "_Batch", name: bytes, old: Record | None, new: Record | None
    ) -> None:
        """Put one record in the place of another, and keep right all that is counted of both."""
        if new is not None and new.inline is None:
            self._count(txn, batch, new, +1)
        if old is not None and old.inline is None:
            self._count(txn, batch, old, -1)
        group = group_of(name)
        if group is not None and (old is None) != (new is None):
            batch.groups[group] = batch.groups.get(group, 0) + (1 if old is None else -1)
        before, after = (0 if each is None else each.expires_s for each in (old, new))
        if before != after:
            # A name is no longer than what LMDB takes for one of several values of a key.
            if before:
                txn.delete(_COUNT.pack(before) + (group or b""), name, db=self._due)
            if after:
                txn.put(_COUNT.pack(after) + (group or b""), name, db=self._due)
        if new is None:
            txn.delete(name, db=self._names)
        else:
            txn.put(name, _encode(new), db=self._names)

    def _provide(self, txn: lmdb.Transaction, batch: "_Batch", digest: Digest, blob: "LocalIncoming | None") -> None:
        """See to a blob that a record is about to point at. UvimgError where there is none."""
        if blob is not None and blob.digest == digest:
            # Also over one that is there already: it may have been damaged since.
            if self._place(txn, batch, digest, blob):
                return
        elif self._uses_of(txn, digest)[0]:
            return
        raise UvimgError("A record has no blob to point at.")

    def _place(self, txn: lmdb.Transaction, batch: "_Batch", digest: Digest, blob: "LocalIncoming") -> bool:
        """Put a blob where it belongs. False when its upload was given up meanwhile."""
        if blob.file is None:
            txn.put(digest, blob.data, db=self._small)
            return True
        with blob.moving:
            if blob.given_up:
                return False
            target = self._path / "blobs" / blob_path(digest)
            if blob.placed:
                # Bound before: it may have lost that name, and its file, since.
                return target.exists()
            os.rename(blob.path, target)
            blob.placed = True
            batch.folders.add(target.parent)
        return True

    def _uses_of(self, txn: lmdb.Transaction, digest: Digest) -> tuple[int, int]:
        """How many names point at a blob, and its size."""
        data = txn.get(digest, db=self._uses)
        count, size = (0, 0) if data is None else _USES.unpack(data)
        return count, size

    def _count(self, txn: lmdb.Transaction, batch: "_Batch", record: Record, change: int) -> None:
        count = self._uses_of(txn, record.digest)[0] + change
        assert count >= 0, f"more names were taken from {record.digest.hex()} than it had"
        if count == 0 and record.size <= SMALL_BLOB_BYTES:
            txn.delete(record.digest, db=self._small)
            txn.delete(record.digest, db=self._uses)
            return
        txn.put(record.digest, _USES.pack(count, record.size), db=self._uses)
        if count == 0:
            batch.unused.add(record.digest)

    def _add_to_groups(self, txn: lmdb.Transaction, changes: dict[bytes, int]) -> None:
        for group, change in changes.items():
            data = txn.get(group, db=self._groups)
            count = (0 if data is None else _COUNT.unpack(data)[0]) + change
            if count:
                txn.put(group, _COUNT.pack(count), db=self._groups)
            else:
                txn.delete(group, db=self._groups)

    def _remove_unused(self, txn: lmdb.Transaction, batch: "_Batch", digest: Digest) -> bool:
        """Remove a large blob that no name points at, under the writer's lock. Whether it was so.

        Not one that lost its last name in this very transaction, which may still fail: it has its turn in another.
        """
        if self._uses_of(txn, digest)[0] or digest in batch.unused:
            return False
        if not self._is_synced and not batch.synced:
            # With the durability "os" a power cut may undo the commit that took the last name away: not after this.
            self._env.sync(True)
            batch.synced = True
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path / "blobs" / blob_path(digest))
        txn.delete(digest, db=self._uses)
        return True

    def _drop(self, digest: Digest) -> None:
        """Look again, later, whether anybody names a blob whose upload was given up."""
        self._writer.submit_unheard(lambda txn, batch: self._remove_unused(txn, batch, digest))

    # Long walks, a step at a time

    def _page(self, db: Any, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to `limit` entries from `start` on."""
        with _translated(), self._env.begin(db=db) as txn, txn.cursor() as cursor:
            found: list[tuple[bytes, bytes]] = []
            if cursor.set_range(start):
                for entry in cursor:
                    found.append(entry)
                    if len(found) == limit:
                        break
            return found

    def _page_back(self, prefix: bytes, before: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to `limit` names from the last one down that is before this one and may have this prefix."""
        # Where nothing is before: no name with the prefix is behind this.
        end = before or prefix.ljust(MAX_NAME_BYTES, b"\xff")
        with _translated(), self._env.begin(db=self._names) as txn, txn.cursor() as cursor:
            there = cursor.prev() if cursor.set_range(end) else cursor.last()
            found: list[tuple[bytes, bytes]] = []
            while there and len(found) < limit and cursor.key() >= prefix:
                found.append(cursor.item())
                there = cursor.prev()
            return found

    def _count_groups(self, prefix: bytes, now_s: int) -> dict[bytes, int]:
        with _translated(), self._env.begin() as txn:
            counts: dict[bytes, int] = {}
            with txn.cursor(self._groups) as cursor:
                there = cursor.set_range(prefix)
                while there and cursor.key().startswith(prefix):
                    counts[cursor.key()] = _COUNT.unpack(cursor.value())[0]
                    there = cursor.next()
            # What has expired and is not swept: a look for each second, however many expired in it.
            with txn.cursor(self._due) as cursor:
                there = cursor.first()
                while there and _COUNT.unpack_from(cursor.key())[0] <= now_s:
                    group = cursor.key()[_COUNT.size :]
                    if group in counts:
                        counts[group] -= cursor.count()
                    there = cursor.next_nodup()
        return {group: count for group, count in counts.items() if count}

    def _find_due(self, now_s: int, limit: int) -> list[bytes]:
        """Up to so many names that have expired, the earliest first."""
        found: list[bytes] = []
        with _translated(), self._env.begin(db=self._due) as txn, txn.cursor() as cursor:
            for key, name in cursor:
                if len(found) == limit or _COUNT.unpack_from(key)[0] > now_s:
                    break
                found.append(name)
        return found

    def _walk(self, db: Any, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Every entry with this prefix, in steps that hold no transaction between them."""
        start = prefix
        while page := self._page(db, start, _STEP):
            for key, value in page:
                if not key.startswith(prefix):
                    return
                yield key, value
            start = page[-1][0] + b"\0"

    async def scrub(self) -> AsyncIterator[Finding]:
        for digest, uses in self._walk(self._uses):
            if _USES.unpack(uses)[0]:
                trouble = await asyncio.to_thread(self._examine, digest)
                yield Finding(digest.hex(), trouble)
        for name, data in self._walk(self._names):
            record = _decode(data)
            if record.inline is not None:
                if hashlib.sha256(record.inline).digest() != record.digest:
                    yield Finding(name.decode(errors="backslashreplace"), "its bytes are not those of its digest")
                continue
            with _translated(), self._env.begin() as txn:
                named = self._uses_of(txn, record.digest)[0] or txn.get(name, db=self._names) != data
            if not named:
                yield Finding(name.decode(errors="backslashreplace"), "it names a blob that is not there")

    def _examine(self, digest: Digest) -> str:
        """What is wrong with a blob's bytes, "" for nothing."""
        try:
            content = self.near.get(digest)
            if content is None:
                with _translated(), self._env.begin() as txn:
                    return "its bytes are missing" if self._uses_of(txn, digest)[0] else ""
            if isinstance(content, bytes):
                found = hashlib.sha256(content).digest()
            else:
                with content.file as file:
                    found = hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
        except (OSError, StoreDown) as exc:
            return f"its bytes cannot be read: {exc}"
        return "" if found == digest else "its bytes are not those of its address"

    async def collect(self, *, dry_run: bool = False) -> AsyncIterator[Finding]:
        for name, _ in self._walk(self._names, b"renditions/"):
            if self.near.record(original_of(name)) is None:
                if not dry_run:
                    await self.unbind([name])
                yield Finding(name.decode(), "a rendition of an image that is gone")
        for name, _ in self._walk(self._names, CODINGS):
            if not await self.is_named(coded_digest(name)):
                if not dry_run:
                    await self.unbind([name])
                yield Finding(name.decode(), "a coded copy of what is gone")
        for path in self._files():
            digest = parse_blob_path(path)
            if digest is None:
                continue
            with _translated(), self._env.begin() as txn:
                unused = not self._uses_of(txn, digest)[0]
            if unused and (dry_run or await self._writer.submit(self._unused_remover(digest))):
                yield Finding(digest.hex(), "a blob that nobody names")
        for digest, uses in self._walk(self._uses):
            if not _USES.unpack(uses)[0] and not dry_run:
                await self._writer.submit(self._unused_remover(digest))
        for path in await asyncio.to_thread(_remove_orphans, self._path / "blobs" / "incoming", dry_run):
            yield Finding(path, "the remains of an interrupted upload")

    def _unused_remover(self, digest: Digest) -> "Callable[[lmdb.Transaction, _Batch], bool]":
        return lambda txn, batch: self._remove_unused(txn, batch, digest)

    def _files(self) -> Iterator[str]:
        """The files of large blobs, as `blob_path` spells them."""
        for folder in _blob_folders():
            with contextlib.suppress(FileNotFoundError), os.scandir(self._path / "blobs" / folder) as entries:
                yield from (f"{folder}/{entry.name}" for entry in entries)


class _Near:
    """Reads that wait for nothing but the page cache."""

    def __init__(self, env: lmdb.Environment, names: Any, small: Any, path: Path) -> None:
        self._begin, self._names, self._small = env.begin, names, small
        self._blobs = f"{path}/blobs/"

    def version(self) -> int:
        # LMDB numbers its transactions. Without `with`, here and below, which would double the 0.5 µs that this takes.
        try:
            txn = self._begin()
            version: int = txn.id()
            txn.abort()
        except lmdb.Error as exc:
            raise _translate(exc) from exc
        return version

    def record(self, name: bytes) -> Record | None:
        try:
            txn = self._begin(db=self._names)
            data = txn.get(name)
            txn.abort()
        except lmdb.Error as exc:
            raise _translate(exc) from exc
        return None if data is None else _decode(data)

    def get(self, digest: Digest) -> Content | None:
        try:
            with self._begin(db=self._small) as txn:
                data = txn.get(digest)
            if data is not None:
                return bytes(data)
            file = open(self._blobs + blob_path(digest), "rb", buffering=0)  # noqa: SIM115 - the caller closes it
            return FilePart(file, 0, os.fstat(file.fileno()).st_size)
        except FileNotFoundError:
            return None
        except (OSError, lmdb.Error) as exc:
            raise _translate(exc) from exc


class LocalIncoming:
    """An upload: small ones stay in memory, larger ones go to a locked temporary file as they come."""

    def __init__(
        self,
        blobs: Path,
        threads: concurrent.futures.Executor,
        drop: Callable[[Digest], None],
        watch: Callable[[bytes], object] | None,
    ) -> None:
        self.size = 0
        self.data = self.digest = b""
        self.file: int | None = None
        self.path = blobs / "incoming" / secrets.token_hex(16)
        self.placed = self.named = self.given_up = False
        # The writer's thread moves the file into place, another may be removing it.
        self.moving = threading.Lock()
        self._threads, self._drop, self._watch = threads, drop, watch
        self._pieces: list[bytes] = []
        self._held = 0
        self._sha256 = hashlib.sha256()
        self._working: concurrent.futures.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        self.size += len(data)
        self._held += len(data)
        self._pieces.append(data)
        if self._held >= _WRITE_BYTES:
            await self._in_thread(self._flush)

    async def finish(self) -> Digest:
        if self.size <= SMALL_BLOB_BYTES:
            self.data = b"".join(self._pieces)
            self._digest(self.data)
        else:
            await self._in_thread(self._flush_and_sync)
        self.digest = self._sha256.digest()
        return self.digest

    def content(self) -> Content:
        if self.file is None:
            return self.data
        return FilePart(open(self.path, "rb", buffering=0), 0, self.size)

    async def __aenter__(self) -> "LocalIncoming":
        return self

    async def __aexit__(self, *_: object) -> None:
        # Not `file`: a cancelled first write may be opening it at this moment.
        if self._working is not None:
            await self._in_thread(self._close)
            if self.placed and not self.named:
                self._drop(self._sha256.digest())

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """One piece of work after the other. What was begun is done to its end, also when nobody waits any more."""
        before = self._working

        def in_turn() -> None:
            if before is not None:
                concurrent.futures.wait([before])
            work()

        self._working = self._threads.submit(in_turn)
        await asyncio.shield(asyncio.wrap_future(self._working))

    def _digest(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._watch is not None:
            self._watch(data)

    def _flush(self) -> None:
        data = b"".join(self._pieces)
        self._pieces, self._held = [], 0
        try:
            if self.file is None:
                self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                # gc leaves alone what is locked; the lock goes with this process, however it ends.
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self.file, rest) :]
        except OSError as exc:
            raise _translate(exc) from exc
        self._digest(data)

    def _flush_and_sync(self) -> None:
        self._flush()
        assert self.file is not None
        try:
            os.fsync(self.file)
        except OSError as exc:
            raise _translate(exc) from exc

    def _close(self) -> None:
        with self.moving:
            self.given_up = not self.placed
            if self.given_up:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path)
        if self.file is not None:
            os.close(self.file)


@dataclass(slots=True)
class _Batch:
    """What the changes of one transaction ask for beside it."""

    folders: set[Path] = field(default_factory=set)
    # Names that groups have gained. Written once for all: most writes of one moment are to one database.
    groups: dict[bytes, int] = field(default_factory=dict)
    unused: set[Digest] = field(default_factory=set)
    # All that was committed before is on the disk.
    synced: bool = False


_Change = Callable[[lmdb.Transaction, _Batch], Any]
_Job = tuple[_Change, "asyncio.Future[Any] | None"]


class _Writer:
    """The one thread that changes the store. Whoever submits a change hears of it when it is on the disk."""

    def __init__(
        self,
        env: lmdb.Environment,
        remove_unused: "Callable[[lmdb.Transaction, _Batch, Digest], bool]",
        count_groups: Callable[[lmdb.Transaction, dict[bytes, int]], None],
    ) -> None:
        self._env, self._remove_unused, self._count_groups = env, remove_unused, count_groups
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="uvimg-store-writer", daemon=True)
        self._thread.start()

    async def submit(self, change: _Change) -> Any:
        """What `change` returns, once it is committed. Its errors are StoreDown and StoreFull."""
        if self._queue.qsize() >= _MAX_QUEUE:
            raise Overloaded()
        if not self._thread.is_alive():
            raise StoreDown()
        future = asyncio.get_running_loop().create_future()
        self._queue.put((change, future))
        try:
            return await future
        finally:
            # An error would hold this frame, and this frame the error.
            del future

    def submit_unheard(self, change: _Change) -> None:
        self._queue.put((change, None))

    def stop(self) -> None:
        """Do what was submitted, then end."""
        self._queue.put(None)
        self._thread.join()

    def _remover(self, digest: Digest) -> _Change:
        return lambda txn, batch: self._remove_unused(txn, batch, digest)

    def _run(self) -> None:
        going_on = True
        while going_on:
            jobs: list[_Job] = []
            while not jobs or (len(jobs) < _MAX_BATCH and not self._queue.empty()):
                job = self._queue.get()
                if job is None:
                    going_on = False
                    break
                jobs.append(job)
            if jobs:
                self._commit(jobs)

    def _commit(self, jobs: list[_Job]) -> None:
        batch = _Batch()
        outcomes: list[Any]
        try:
            with self._env.begin(write=True) as txn:
                outcomes = [_attempt(change, txn, batch) for change, _ in jobs]
                self._count_groups(txn, batch.groups)
                for folder in batch.folders:
                    _sync_folder(folder)
        except (lmdb.Error, OSError) as exc:
            # LMDB calls a write that was cut short by a full disk an input/output error.
            full = _is_full(self._env.path())
            log.error("%d writes failed: %s", len(jobs), exc)
            outcomes = [StoreFull() if full else _translate(exc) for _ in jobs]
        except Exception as exc:
            # Our own bug fails these writes, not this thread and with it all that follow.
            log.exception("%d writes failed", len(jobs))
            outcomes = [exc] * len(jobs)
        else:
            for digest in batch.unused:
                self.submit_unheard(self._remover(digest))
        heard = [(future, outcome) for (_, future), outcome in zip(jobs, outcomes, strict=True) if future is not None]
        for loop in {future.get_loop() for future, _ in heard}:
            mine = [(future, outcome) for future, outcome in heard if future.get_loop() is loop]
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody listens
                loop.call_soon_threadsafe(_tell, mine)


def _attempt(change: _Change, txn: lmdb.Transaction, batch: _Batch) -> Any:
    """What a change comes to; one that is refused, which it is before it has done anything, fails nobody else's."""
    try:
        return change(txn, batch)
    except UvimgError as exc:
        # Its frames would hold all that came in the same batch, and that holds it.
        return exc.with_traceback(None)


def _tell(heard: "list[tuple[asyncio.Future[Any], Any]]") -> None:
    for future, outcome in heard:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _blob_folders() -> Iterator[str]:
    return (f"{number:02x}" for number in range(256))


def _make_folders(path: Path) -> None:
    """Lay out a new store, or check that this is one we know."""
    layout = path / "format"
    try:
        known = layout.read_bytes()
    except FileNotFoundError:
        pass
    else:
        if known != _LAYOUT:
            raise OSError(f"{layout} says {known[:40]!r}, and this version knows {_LAYOUT!r} alone")
        return
    for folder in (path / "names", path / "blobs" / "incoming", *(path / "blobs" / name for name in _blob_folders())):
        folder.mkdir(parents=True, exist_ok=True)
    draft = path / f"format.{secrets.token_hex(8)}"
    with open(draft, "xb") as file:
        file.write(_LAYOUT)
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, layout)
    for folder in (path / "blobs", path, *path.absolute().parents):
        # Any of these may have been made just now; those above may not be ours to open.
        with contextlib.suppress(PermissionError):
            _sync_folder(folder)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_orphans(incoming: Path, dry_run: bool) -> list[str]:
    """Remove temporary files that no living process holds; their names."""
    removed: list[str] = []
    for path in sorted(incoming.iterdir()):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), open(path, "rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < _ORPHAN_AGE_S:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not dry_run:
                path.unlink()
            removed.append(path.name)
    return removed


def _is_full(path: str) -> bool:
    """Whether a file system has less room than the largest write of a commit may need."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < (1 << 20)


def _translate(exc: Exception) -> UvimgError:
    """Our error for one of LMDB's or the operating system's."""
    number = exc.errno if isinstance(exc, OSError) else None
    no_room = number in (errno.ENOSPC, errno.EDQUOT) or (
        isinstance(exc, lmdb.Error) and (isinstance(exc, lmdb.MapFullError) or os.strerror(errno.ENOSPC) in str(exc))
    )
    return StoreFull() if no_room else StoreDown()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except lmdb.Error as exc:
        raise _translate(exc) from exc
