"""Blobs that came from far away, kept in a folder within so many bytes, for all processes that share it.

What nobody has asked for lately goes first: a hand goes around the index, spares what was used since it came by
last, and removes the rest (the clock algorithm). How much there is, and where the hand stands, is kept in the same
LMDB transaction as what is there, so the bound holds however many processes there are and however they end. Small
blobs lie in the database, whose file never becomes smaller, so they have half of the room at most, and larger ones
what the file leaves of it.
Rule: nothing that is kept here is missed when it is gone, and nothing is believed because it lies here. Before a
process gives a blob for the first time it holds it against its address; later it looks whether the file is the same
one, of the same size and not written to since.

    DIR/format           which layout this is
    DIR/index/           LMDB: small (blobs); size of each blob and whether it was used (minor, major); sums and hands
    DIR/blobs/ab/ab…     larger blobs
    DIR/incoming/        files on their way
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb

from uvimg.core.address import Digest, blob_path, parse_blob_path
from uvimg.core.errors import StoreDown
from uvimg.core.message import Content, FilePart
from uvimg.store import SMALL_BLOB_BYTES

log = logging.getLogger("uvimg.store")

_LAYOUT = b"uvimg tier 1\n"
_PAGE_BYTES = 4096
# A leaf's share for an entry, and the header of the pages of a value.
_ENTRY_BYTES = 256
_ENTRY = struct.Struct(">Q?")
_SUM = struct.Struct(">Q")
# One that took more of the room would push out too much for the sake of one.
_LARGEST_SHARE = 4
# On their way in; more are not kept.
_MOST_WAITING_BYTES = 128 << 20
# Blobs that this process knows to be sound.
_MOST_TRUSTED = 200_000
# How soon the index knows what was used.
_MARK_EVERY_S = 10.0
# A younger file may be about to be moved into place.
_ORPHAN_AGE_S = 600

# What a file is known by: device, inode, size and the time of its last change.
_Marks = tuple[int, int, int, int]


class _Kind:
    """Blobs that share a bound: those in the database, or those in files."""

    def __init__(self, name: bytes, entries: Any) -> None:
        self.entries, self.sum, self.hand = entries, name + b" sum", name + b" hand"


class Shelf:
    """StoreDown when the folder cannot be used. `max_bytes` bounds the disk space of what is kept."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        try:
            _make_folders(folder)
            # Twice, for pages are free again only after the next commit, and no two processes need agree.
            self._env = lmdb.open(
                str(folder / "index"),
                map_size=2 * max_bytes + (1 << 30),
                max_dbs=4,
                max_readers=1024,
                readahead=False,
                # What is lost of it is fetched again; but a page must not be lost without those that point at it.
                metasync=False,
            )
            self._small, self._state = (self._env.open_db(name) for name in (b"small", b"state"))
            self._minor, self._major = (_Kind(name, self._env.open_db(name)) for name in (b"minor", b"major"))
            self._env.reader_check()
        except (OSError, lmdb.Error) as exc:
            raise StoreDown(f"The tier in {folder} cannot be opened: {exc}.") from exc
        self._blobs = f"{folder}/blobs/"
        # None is a small one, which was held against its address when it was read.
        self._trusted: dict[Digest, _Marks | None] = {}
        self._used: set[Digest] = set()
        self._waiting_bytes = 0
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="uvimg-tier", daemon=True)
        self._thread.start()
        self._queue.put(self._remove_orphans)

    @property
    def kept_bytes(self) -> int:
        """What all that is kept takes."""
        with contextlib.suppress(lmdb.Error), self._env.begin() as txn:
            return self._sum(txn, self._minor) + self._sum(txn, self._major)
        return 0

    def get(self, digest: Digest) -> Content | None:
        """A blob, in this very call, where this process knows that it is sound. The caller closes a file."""
        try:
            txn = self._env.begin(db=self._small)
            data = txn.get(digest)
            txn.abort()
            if data is not None:
                if digest not in self._trusted and not self._examine_small(digest, data):
                    return None
                self._used.add(digest)
                return bytes(data)
            marks = self._trusted.get(digest)
            if marks is None:
                return None
            file = open(self._blobs + blob_path(digest), "rb", buffering=0)  # noqa: SIM115 - the caller closes it
        except (OSError, lmdb.Error):
            return None
        if _marks_of(file.fileno()) != marks:
            file.close()
            self._trusted.pop(digest, None)
            return None
        self._used.add(digest)
        return FilePart(file, 0, marks[2])

    def has(self, digest: Digest) -> bool:
        """Whether a blob is known to be here, and sound."""
        return digest in self._trusted

    async def look(self, digest: Digest) -> Content | None:
        """The same, but for one that has to be held against its address first."""
        content = self.get(digest)
        return content if content is not None else await asyncio.to_thread(self._examine_file, digest)

    def put(self, digest: Digest, content: Content, done: Callable[[], None] = lambda: None) -> None:
        """Keep a blob, sooner or later, if there is room for it. `content` has been held against its address.

        A file is closed then; `done` is called when it is over, perhaps in another thread.
        """
        size = content.size if isinstance(content, FilePart) else len(content)
        if _weigh(size) > self._max_bytes // _LARGEST_SHARE or self._waiting_bytes + size > _MOST_WAITING_BYTES:
            _close(content)
            done()
            return
        self._waiting_bytes += size

        def keep() -> None:
            try:
                self._keep(digest, content, size)
            finally:
                self._waiting_bytes -= size
                _close(content)
                done()

        self._queue.put(keep)

    def discard(self, digest: Digest) -> None:
        """Keep a blob no longer."""
        self._queue.put(lambda: self._change(lambda txn: self._remove(txn, digest)))

    def close(self) -> None:
        """Come to the end of what is on its way."""
        self._queue.put(None)
        self._thread.join()
        self._env.close()

    # Whether what lies here is what it should be

    def _examine_small(self, digest: Digest, data: bytes) -> bool:
        if hashlib.sha256(data).digest() == digest:
            self._trust(digest, None)
            return True
        self._reject(digest)
        return False

    def _examine_file(self, digest: Digest) -> Content | None:
        try:
            file = open(self._blobs + blob_path(digest), "rb", buffering=0)  # noqa: SIM115 - the caller closes it
        except OSError:
            return None
        try:
            # Before its bytes: a change meanwhile is one since.
            marks = _marks_of(file.fileno())
            found = hashlib.file_digest(file, "sha256").digest()
        except OSError:
            found = b""
        if found != digest:
            file.close()
            self._reject(digest)
            return None
        self._trust(digest, marks)
        self._used.add(digest)
        return FilePart(file, 0, marks[2])

    def _trust(self, digest: Digest, marks: _Marks | None) -> None:
        if len(self._trusted) >= _MOST_TRUSTED:
            # Nothing is lost by it but the time to look again.
            self._trusted.clear()
        self._trusted[digest] = marks

    def _reject(self, digest: Digest) -> None:
        log.error("the tier's copy of %s is damaged, and is fetched anew", digest.hex())
        self.discard(digest)

    # The thread that changes the folder

    def _run(self) -> None:
        marked_s = time.monotonic()
        while True:
            try:
                job = self._queue.get(timeout=_MARK_EVERY_S)
            except queue.Empty:
                job = self._note_used
            if job is None:
                return
            try:
                job()
                if time.monotonic() - marked_s > _MARK_EVERY_S:
                    marked_s = time.monotonic()
                    self._note_used()
            except (OSError, lmdb.Error) as exc:
                if not self._failing:
                    log.error("the tier in %s cannot be written to: %s", self._folder, exc)
                self._failing = True
            except Exception:
                log.exception("the tier in %s failed", self._folder)
            else:
                self._failing = False

    def _change(self, change: Callable[[lmdb.Transaction], None]) -> None:
        with self._env.begin(write=True) as txn:
            change(txn)

    def _note_used(self) -> None:
        if self._used:
            self._change(self._mark_used)

    def _mark_used(self, txn: lmdb.Transaction) -> None:
        used, self._used = self._used, set()
        # A list in one step: another thread may be adding to it at this moment.
        for digest in list(used):
            for kind in (self._minor, self._major):
                entry = txn.get(digest, db=kind.entries)
                if entry is not None:
                    txn.put(digest, _ENTRY.pack(_ENTRY.unpack(entry)[0], True), db=kind.entries)

    def _keep(self, digest: Digest, content: Content, size: int) -> None:
        if isinstance(content, bytes) and size <= SMALL_BLOB_BYTES:
            self._change(lambda txn: self._enter(txn, digest, size, content))
            self._trust(digest, None)
            return
        path = self._folder / "incoming" / secrets.token_hex(16)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _copy(content, file)

            def enter(txn: lmdb.Transaction) -> None:
                # Under the lock of all processes, as every removal is; and first, for the hand may stop at this one.
                os.rename(path, self._blobs + blob_path(digest))
                self._enter(txn, digest, size, None)

            self._change(enter)
            self._trust(digest, _marks_of(file))
        finally:
            os.close(file)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _enter(self, txn: lmdb.Transaction, digest: Digest, size: int, data: bytes | None) -> None:
        if self._used:
            self._mark_used(txn)
        # The file of one that was there before is about to be replaced.
        self._remove(txn, digest, unlink=False)
        kind = self._major if data is None else self._minor
        if data is not None:
            self._make_room(txn, self._minor, self._max_bytes // 2 - _weigh(size))
            txn.put(digest, data, db=self._small)
        txn.put(digest, _ENTRY.pack(size, False), db=kind.entries)
        txn.put(kind.sum, _SUM.pack(self._sum(txn, kind) + _weigh(size)), db=self._state)
        index = (self._env.info()["last_pgno"] + 1) * _PAGE_BYTES
        self._make_room(txn, self._major, self._max_bytes - max(index, self._sum(txn, self._minor)))

    def _make_room(self, txn: lmdb.Transaction, kind: "_Kind", limit: int) -> None:
        """Remove what has not been used, until what is left is no more than this."""
        total = self._sum(txn, kind)
        if total <= limit:
            return
        hand = txn.get(kind.hand, b"", db=self._state)
        with txn.cursor(kind.entries) as cursor:
            while total > limit and (cursor.set_range(hand) or cursor.first()):
                digest = bytes(cursor.key())
                size, used = _ENTRY.unpack(cursor.value())
                hand = digest + b"\0"
                if used:
                    cursor.put(digest, _ENTRY.pack(size, False))
                    continue
                cursor.delete()
                total -= _weigh(size)
                self._drop(txn, digest)
        txn.put(kind.hand, hand, db=self._state)
        txn.put(kind.sum, _SUM.pack(total), db=self._state)

    def _remove(self, txn: lmdb.Transaction, digest: Digest, *, unlink: bool = True) -> None:
        for kind in (self._minor, self._major):
            entry = txn.get(digest, db=kind.entries)
            if entry is None:
                continue
            txn.delete(digest, db=kind.entries)
            txn.put(kind.sum, _SUM.pack(self._sum(txn, kind) - _weigh(_ENTRY.unpack(entry)[0])), db=self._state)
            if unlink:
                self._drop(txn, digest)
            else:
                txn.delete(digest, db=self._small)

    def _drop(self, txn: lmdb.Transaction, digest: Digest) -> None:
        """The bytes of an entry that has gone. Where this is not committed after all, one is missing: it may be."""
        self._trusted.pop(digest, None)
        if not txn.delete(digest, db=self._small):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._blobs + blob_path(digest))

    def _sum(self, txn: lmdb.Transaction, kind: "_Kind") -> int:
        data = txn.get(kind.sum, db=self._state)
        return 0 if data is None else int(_SUM.unpack(data)[0])

    def _remove_orphans(self) -> None:
        """Files of which the index knows nothing: those of processes that were killed at the wrong moment."""
        for path in (self._folder / "incoming").iterdir():
            _remove_old(path)
        for path in self._files():
            digest = parse_blob_path("/".join(path.parts[-2:]))
            if digest is None:
                continue
            with self._env.begin(db=self._major.entries) as txn:
                known = txn.get(digest) is not None
            if not known:
                with self._env.begin(write=True) as txn:
                    if txn.get(digest, db=self._major.entries) is None:
                        _remove_old(path)

    def _files(self) -> Iterator[Path]:
        for folder in (self._folder / "blobs").iterdir():
            yield from folder.iterdir()


def _weigh(size: int) -> int:
    """What a blob takes on the disk, in a file or in pages of LMDB."""
    return -(-(size + 16) // _PAGE_BYTES) * _PAGE_BYTES + _ENTRY_BYTES


def _marks_of(descriptor: int) -> _Marks:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _copy(content: Content, target: int) -> None:
    if isinstance(content, bytes):
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(target, rest) :]
        return
    at = content.start
    end = at + content.size
    while at < end:
        data = os.pread(content.file.fileno(), min(1 << 20, end - at), at)
        if not data:
            raise OSError("a file has become shorter while it was copied")
        at += len(data)
        while data:
            data = data[os.write(target, data) :]


def _close(content: Content) -> None:
    if isinstance(content, FilePart):
        content.close()


def _remove_old(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if time.time() - path.stat().st_mtime > _ORPHAN_AGE_S:
            path.unlink()


def _make_folders(folder: Path) -> None:
    """Lay out a new tier, or check that this is one: in any other folder files are not ours to remove."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        layout = folder / "format"
        if layout.exists():
            if layout.read_bytes() != _LAYOUT:
                raise OSError(f"{layout} tells that it is something else")
            return
        if {path.name for path in folder.iterdir()} - {".lock", "index", "incoming", "blobs"}:
            raise OSError("it is not empty, and no tier")
        for name in ("index", "incoming", "blobs", *(f"blobs/{number:02x}" for number in range(256))):
            (folder / name).mkdir(exist_ok=True)
        layout.write_bytes(_LAYOUT)
