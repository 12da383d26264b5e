"""An upload on its way to a server: hashed while it comes, held in memory while it is short, else in a file without a
name, which goes with this process however it ends.
"""

import asyncio
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from uvimg.core.address import Digest
from uvimg.core.errors import StoreDown, StoreFull, UvimgError
from uvimg.core.message import Content, FilePart

# Longer ones go to a file.
MEMORY_BYTES = 1 << 20
# Hashing this much takes a third of a millisecond: worth waking a thread for.
_STEP_BYTES = 262_144


class Spool:
    """See `Incoming` in store/__init__.py. `digest` is there after `finish`, and the bytes until it is left."""

    def __init__(self, watch: Callable[[bytes], object] | None = None) -> None:
        self.size = 0
        self.digest: Digest = b""
        self._watch = watch
        self._sha256 = hashlib.sha256()
        # What has come and is not hashed yet, and what is and is held in memory.
        self._pieces: list[bytes] = []
        self._coming = 0
        self._held: list[bytes] = []
        self._file: BinaryIO | None = None
        self._working: asyncio.Future[Any] | None = None

    async def write(self, data: bytes) -> None:
        self.size += len(data)
        self._coming += len(data)
        self._pieces.append(data)
        if self._coming >= _STEP_BYTES:
            await self._in_thread()

    async def finish(self) -> Digest:
        if self._coming > _STEP_BYTES // 4 or self.size > MEMORY_BYTES:
            await self._in_thread()
        else:
            self._take()
        self.digest = self._sha256.digest()
        return self.digest

    def content(self) -> Content:
        if self._file is None:
            return b"".join(self._held)
        # Opened anew: whoever reads has a place in it of his own.
        return FilePart(open(f"/proc/self/fd/{self._file.fileno()}", "rb", buffering=0), 0, self.size)

    async def part(self, start: int, size: int) -> bytes:
        """Some of the bytes, after `finish`."""
        if self._file is None:
            if len(self._held) > 1:
                self._held = [b"".join(self._held)]
            return self._held[0][start : start + size]
        return await asyncio.to_thread(os.pread, self._file.fileno(), size, start)

    async def __aenter__(self) -> "Spool":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._working is not None:
            # What a thread is at is done to its end, also when nobody waits any more.
            await asyncio.gather(self._working, return_exceptions=True)
        if self._file is not None:
            self._file.close()

    async def _in_thread(self) -> None:
        if self._working is not None and not self._working.done():
            await asyncio.gather(self._working, return_exceptions=True)
        self._working = asyncio.ensure_future(asyncio.to_thread(self._take))
        await asyncio.shield(self._working)

    def _take(self) -> None:
        data = b"".join(self._pieces)
        self._pieces, self._coming = [], 0
        self._sha256.update(data)
        if self._watch is not None:
            self._watch(data)
        self._held.append(data)
        if self._file is not None or self.size > MEMORY_BYTES:
            try:
                self._spill()
            except OSError as exc:
                raise translate_file_error(exc) from exc

    def _spill(self) -> None:
        if self._file is None:
            self._file = open_nameless()
        for data in self._held:
            _write_all(self._file, data)
        self._held = []


def open_nameless() -> BinaryIO:
    """A temporary file that nobody else sees."""
    return cast(BinaryIO, tempfile.TemporaryFile(buffering=0))


async def write_all(file: BinaryIO, data: bytes) -> None:
    """Write to an unbuffered file, in a thread, and wait for that in any case: whoever goes closes the file."""
    writing = asyncio.ensure_future(asyncio.to_thread(_write_all, file, data))
    try:
        await asyncio.shield(writing)
    finally:
        await asyncio.gather(writing, return_exceptions=True)


def _write_all(file: BinaryIO, data: bytes) -> None:
    # One write may take less than it is given.
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def translate_file_error(exc: OSError) -> UvimgError:
    return StoreFull() if exc.errno in (errno.ENOSPC, errno.EDQUOT) else StoreDown()
