"""Bytes on their way between a client and a server of ours: a few in memory, more in a temporary file.

For stores that send a blob whole, once its digest is known, and get it piece by piece.
Surprise: the file is no more than a longer memory. It is gone with the spool, and nobody syncs it.
"""

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator

from uvimg.core.address import Digest
from uvimg.core.errors import StoreFull
from uvimg.core.message import Content, FilePart

# Most originals are smaller, and all renditions.
_MEMORY_BYTES = 1 << 20
# Hashing this much takes 70 µs, less than to wake a thread for it.
_AT_ONCE_BYTES = 131_072
_FLUSH_BYTES = 262_144


class Spool:
    """A blob on its way (`Incoming`). `watch` is called with each piece, in order, perhaps in another thread."""

    def __init__(self, watch: Callable[[bytes], object] | None = None) -> None:
        self.size = 0
        self.digest: Digest = b""
        self._watch = watch
        self._sha256 = hashlib.sha256()
        # Not hashed yet; hashed and in memory; the file with all that was hashed.
        self._pieces: list[bytes] = []
        self._held = 0
        self._memory: list[bytes] = []
        self._file: int | None = None
        self._path = ""
        self._working: asyncio.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        self.size += len(data)
        self._held += len(data)
        self._pieces.append(data)
        if self._held >= _FLUSH_BYTES:
            await self._in_thread(self._flush)

    async def finish(self) -> Digest:
        if self._held <= _AT_ONCE_BYTES:
            self._flush()
        else:
            await self._in_thread(self._flush)
        self.digest = self._sha256.digest()
        return self.digest

    def content(self) -> Content:
        """The bytes after `finish`. A file that it opens outlives the spool, and is the caller's to close."""
        if self._file is None:
            if len(self._memory) > 1:
                self._memory = [b"".join(self._memory)]
            return self._memory[0]
        return FilePart(open(self._path, "rb", buffering=0), 0, self.size)

    async def read(self, start: int, size: int) -> bytes:
        """A piece of the bytes after `finish`."""
        if self._file is None:
            content = self.content()
            assert isinstance(content, bytes)
            return content[start : start + size]
        return await asyncio.to_thread(os.pread, self._file, size, start)

    async def __aenter__(self) -> "Spool":
        return self

    async def __aexit__(self, *_: object) -> None:
        # A cancelled write goes on in its thread.
        if self._working is not None:
            await asyncio.gather(self._working, return_exceptions=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        self._working = asyncio.ensure_future(asyncio.to_thread(work))
        await asyncio.shield(self._working)

    def _flush(self) -> None:
        data, self._pieces, self._held = b"".join(self._pieces), [], 0
        self._sha256.update(data)
        if self._watch is not None:
            self._watch(data)
        self._memory.append(data)
        if self._file is None and self.size <= _MEMORY_BYTES:
            return
        with _told_when_full():
            if self._file is None:
                self._file, self._path = tempfile.mkstemp(prefix="uvimg-")
            for piece in self._memory:
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
        self._memory = []


@contextlib.contextmanager
def _told_when_full() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StoreFull("There is no room for a temporary file.") from exc
