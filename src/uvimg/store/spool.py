"""Blobs on their way into a store that is far away: held here until all of them has come.

Their address is known at their end only. Until then small ones are in memory and larger ones in a temporary file
that has no name, so that nothing is left of one that is given up, however this process ends.
"""

import asyncio
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable
from typing import BinaryIO, cast

from uvimg.core.address import Digest
from uvimg.core.errors import StoreDown, StoreFull
from uvimg.core.message import Content, FilePart

# Up to here a blob stays in memory.
_MEMORY_BYTES = 1 << 20
# Hashing so much takes a fifth of a millisecond: worth waking a thread for.
_WRITE_BYTES = 262_144


class Spooled:
    """An `Incoming` that is `content` alone; what is done with it is the store's business."""

    def __init__(self, watch: Callable[[bytes], object] | None = None) -> None:
        self.size = 0
        self.digest: Digest = b""
        self._watch = watch
        self._sha256 = hashlib.sha256()
        self._pieces: list[bytes] = []
        self._held = 0
        self._data = b""
        self._file: BinaryIO | None = None
        self._working = asyncio.Lock()

    async def write(self, data: bytes) -> None:
        self.size += len(data)
        self._held += len(data)
        self._pieces.append(data)
        if self._held >= _WRITE_BYTES:
            await self._in_thread()

    async def finish(self) -> Digest:
        if self._held >= _WRITE_BYTES or self._file is not None:
            await self._in_thread()
        else:
            self._flush()
        self.digest = self._sha256.digest()
        return self.digest

    async def _in_thread(self) -> None:
        # Also when nobody waits any more: a file that is being written must not be closed meanwhile.
        await asyncio.shield(asyncio.ensure_future(self._flush_in_thread()))

    async def _flush_in_thread(self) -> None:
        async with self._working:
            await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        pieces, self._pieces, self._held = self._pieces, [], 0
        if not pieces:
            return
        data = b"".join(pieces)
        self._sha256.update(data)
        if self._watch is not None:
            self._watch(data)
        if self._file is None and len(self._data) + len(data) <= _MEMORY_BYTES:
            self._data += data
            return
        try:
            if self._file is None:
                self._file = open_nameless()
                _write(self._file, self._data)
                self._data = b""
            _write(self._file, data)
        except OSError as exc:
            raise StoreFull() if is_full(exc) else StoreDown() from exc

    def content(self) -> Content:
        return self._data if self._file is None else open_again(self._file, self.size)

    async def __aenter__(self) -> "Spooled":
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._working:
            self._pieces = []
            if self._file is not None:
                self._file.close()


def open_nameless() -> BinaryIO:
    """A temporary file that is gone when it is closed."""
    return cast(BinaryIO, tempfile.TemporaryFile(buffering=0))


def open_again(file: BinaryIO, size: int) -> FilePart:
    """The same file with a place and an end of its own."""
    return FilePart(open(f"/proc/self/fd/{file.fileno()}", "rb", buffering=0), 0, size)


def is_full(exc: OSError) -> bool:
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def _write(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file.fileno(), rest) :]
