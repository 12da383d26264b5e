"""`uvimg import-zimg`: what a zimg has stored becomes originals here, under the ids that its clients know.

zimg trusted what it was sent, so nothing is believed: each file is hashed and decoded like an upload, and one whose
MD5 is not its id, or that is no image, is told and left out. Renditions are not taken along; they are made again.
It can be stopped and begun again: an id that is there already is left.
"""

import asyncio
import contextlib
import itertools
import os
import re
import select
import stat
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

import msgspec

from uvimg.apps.originals import Originals
from uvimg.core.address import image_name
from uvimg.core.backend import parse_servers, split_url
from uvimg.core.errors import StoreDown, StoreFull, UvimgError
from uvimg.core.redis import read_redis_url
from uvimg.store import Finding, Store
from uvimg.store.memcached_servers import Servers
from uvimg.store.redis_servers import open_servers

_PIECE_BYTES = 262_144
_STEP = 1000
_LONGEST_LINE = 1000
_LOOK_S = 0.2
_ID = re.compile(r"[0-9a-f]{32}")


class CannotImport(Exception):
    """There is nothing to be imported from there; the message is one readable line."""


class Zimg(Protocol):
    """What a zimg has stored."""

    def ids(self) -> AsyncIterator[str | Finding]:
        """The MD5s of its originals, and what could not be looked into. CannotImport where nothing can be listed."""

    def read(self, id: str) -> AsyncGenerator[bytes, None]:
        """An original's bytes, as they are. CannotImport where there are none."""

    async def close(self) -> None: ...


class Folder:
    """zimg's mode 1: its `img_path`, where an original is `<a>/<b>/<md5>/0*0`.

    a is `int(md5[0:3], 16) // 4`, b the same of `md5[3:6]`.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path, self._max_bytes = Path(path), max_bytes
        if not self._path.is_dir():
            raise CannotImport(f"{path}: there is no such folder")

    async def ids(self) -> AsyncIterator[str | Finding]:
        try:
            top = await asyncio.to_thread(_list, self._path, r"\d{1,4}")
        except OSError as exc:
            raise CannotImport(f"{self._path}: {exc.strerror}") from exc
        walk = self._walk(top)
        while page := await asyncio.to_thread(lambda: list(itertools.islice(walk, _STEP))):
            for found in page:
                yield found

    def _walk(self, top: list[str]) -> Iterator[str | Finding]:
        for first in top:
            for second in _look_into(self._path / first, r"\d{1,4}"):
                if isinstance(second, Finding):
                    yield second
                    continue
                for id in _look_into(self._path / first / second, _ID.pattern):
                    if isinstance(id, Finding) or (first, second) == _folders(id):
                        yield id

    async def read(self, id: str) -> AsyncGenerator[bytes, None]:
        path = self._path.joinpath(*_folders(id), id, "0*0")
        try:
            with await asyncio.to_thread(_open, path) as file:
                # Also of one that grows.
                for _ in range(0, self._max_bytes + 1, _PIECE_BYTES):
                    if os.fstat(file.fileno()).st_size > self._max_bytes:
                        break
                    piece = await asyncio.to_thread(file.read, _PIECE_BYTES)
                    if not piece:
                        return
                    yield piece
        except OSError as exc:
            raise CannotImport(f"its original cannot be read: {exc.strerror}") from exc
        raise CannotImport(_too_large(self._max_bytes))

    async def close(self) -> None:
        pass


def _list(path: Path, pattern: str) -> list[str]:
    """What has names like this in a folder, in order."""
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if re.fullmatch(pattern, entry.name))


def _look_into(path: Path, pattern: str) -> Iterator[str | Finding]:
    """The same; nothing where it is no folder. One that cannot be read is told, and the others are looked into."""
    try:
        yield from _list(path, pattern)
    except NotADirectoryError:
        pass
    except OSError as exc:
        # A name on a disk need not be text.
        shown = str(path).encode(errors="backslashreplace").decode()
        yield Finding(shown, f"cannot be looked into: {exc.strerror}")


def _open(path: Path) -> FileIO:
    # Nobody may ever write to the other end of a pipe.
    file = FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CannotImport("its original is no file")
    return file


def _too_large(max_bytes: int) -> str:
    return f"its original has more than {max_bytes} bytes"


def _folders(id: str) -> tuple[str, str]:
    return str(int(id[:3], 16) // 4), str(int(id[3:6], 16) // 4)


class RedisKeys:
    """zimg's mode 3: a server that speaks Redis' protocol (SSDB), where an original's key is its MD5."""

    def __init__(self, url: str, max_bytes: int, timeout_s: float) -> None:
        place = read_redis_url(url)
        if place.is_cluster:
            raise CannotImport("a zimg has one server, not a cluster")
        self._servers, self._max_bytes = open_servers(place, timeout_s), max_bytes

    async def ids(self) -> AsyncIterator[str]:
        cursor = b"0"
        while True:
            try:
                # A key may come more than once; it is there already then.
                answer = await self._servers.ask(0, "SCAN", cursor, "MATCH", "?" * 32, "COUNT", _STEP)
                # SSDB has another command of that name, and answers something else.
                cursor, keys = msgspec.convert(answer, tuple[bytes, list[bytes]])
            except (StoreDown, StoreFull):
                raise
            except (UvimgError, msgspec.ValidationError) as exc:
                raise CannotImport("the server cannot list its keys: name the originals with --ids FILE") from exc
            for key in keys:
                if re.fullmatch(_ID.pattern.encode(), key):
                    yield key.decode()
            if cursor == b"0":
                return

    async def read(self, id: str) -> AsyncGenerator[bytes, None]:
        if await self._servers.ask(0, "STRLEN", id) > self._max_bytes:
            raise CannotImport(_too_large(self._max_bytes))
        data = await self._servers.ask(0, "GET", id, is_long=True)
        if data is None:
            raise CannotImport("its original is not there")
        yield data

    async def close(self) -> None:
        await self._servers.close()


class MemcachedKeys:
    """zimg's mode 2: a server that speaks memcached's protocol (beansdb) and cannot tell what it holds."""

    def __init__(self, rest: str, max_bytes: int, timeout_s: float) -> None:
        self._servers = Servers(parse_servers(rest), timeout_s, most_bytes=max_bytes)

    async def ids(self) -> AsyncIterator[str]:
        raise CannotImport("such a server cannot list its keys: name the originals with --ids FILE")
        yield ""

    async def read(self, id: str) -> AsyncGenerator[bytes, None]:
        data = await self._servers.get(id.encode())
        if data is None:
            raise CannotImport("its original is not there")
        yield data

    async def close(self) -> None:
        await self._servers.close()


class Chosen:
    """A zimg whose originals are named in a file, an MD5 a line."""

    def __init__(self, zimg: Zimg, path: str) -> None:
        self._path = path
        self.read, self.close = zimg.read, zimg.close

    async def ids(self) -> AsyncIterator[str]:
        number = 0
        try:
            with sys.stdin.buffer if self._path == "-" else open(self._path, "rb") as file:
                async for line in _read_lines(file.fileno()):
                    number += 1
                    id = line.strip().lower().decode("ascii", "replace")
                    if id and not _ID.fullmatch(id):
                        raise CannotImport(f"{self._path}, line {number}: not 32 hex digits: {id[:50]!a}")
                    if id:
                        yield id
        except OSError as exc:
            raise CannotImport(f"{self._path}: {exc.strerror}") from exc


async def _read_lines(fd: int) -> AsyncIterator[bytes]:
    """Lines, as they come; of one that is too long to hold an id, a piece."""
    rest = b""
    while True:
        # In steps, so that no thread that waits for a terminal keeps this process from ending.
        while not (await asyncio.to_thread(select.select, [fd], [], [], _LOOK_S))[0]:
            pass
        data = await asyncio.to_thread(os.read, fd, _PIECE_BYTES)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
        if rest and (not data or len(rest) > _LONGEST_LINE):
            yield rest
            rest = b""
        if not data:
            return


def open_zimg(origin: str, ids: str, max_bytes: int, timeout_s: float) -> Zimg:
    """What a zimg has stored, by the folder or the server; `ids` is a file, "" for all. CannotImport, ValueError."""
    scheme, _, rest = origin.partition(":")
    if rest.startswith("//") and scheme in ("redis", "rediss", "redis+cluster", "rediss+cluster"):
        zimg: Zimg = RedisKeys(origin, max_bytes, timeout_s)
    elif rest.startswith("//") and scheme == "memcached":
        split_url(origin)
        zimg = MemcachedKeys(rest, max_bytes, timeout_s)
    else:
        zimg = Folder(origin, max_bytes)
    return Chosen(zimg, ids) if ids else zimg


@dataclass(slots=True)
class Counts:
    imported: int = 0
    there: int = 0
    failed: int = 0


async def import_images(
    zimg: Zimg, originals: Originals, store: Store, counts: Counts, at_once: int
) -> AsyncIterator[Finding]:
    """Take in all originals, so many at once. One finding an original; the store's errors end it."""
    running: dict[asyncio.Task[str], str] = {}
    try:
        async for id in zimg.ids():
            if isinstance(id, Finding):
                counts.failed += 1
                yield id
                continue
            running[asyncio.create_task(_import(zimg, originals, store, id, counts))] = id
            if len(running) >= at_once:
                for finding in await _take_done(running):
                    yield finding
        while running:
            for finding in await _take_done(running):
                yield finding
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _take_done(running: dict[asyncio.Task[str], str]) -> list[Finding]:
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    return [Finding(running.pop(task), task.result()) for task in done]


async def _import(zimg: Zimg, originals: Originals, store: Store, id: str, counts: Counts) -> str:
    """One original; what is wrong with it, "" for nothing."""
    if await store.record(image_name(id)) is not None:
        counts.there += 1
        return ""
    trouble = await _take_in(zimg, originals, id)
    if trouble:
        counts.failed += 1
    else:
        counts.imported += 1
    return trouble


async def _take_in(zimg: Zimg, originals: Originals, id: str) -> str:
    try:
        async with contextlib.aclosing(zimg.read(id)) as pieces, originals.stage(pieces) as staged:
            if staged.md5 != id:
                return f"its bytes have another MD5, {staged.md5}"
            stored = await originals.bind(staged)
            return stored.conflict.detail if stored.conflict else ""
    except CannotImport as exc:
        return str(exc)
    except UvimgError as exc:
        if isinstance(exc, (StoreDown, StoreFull)):
            raise
        # It may have brought down the worker that looked at it: the others are not to suffer from that.
        return exc.detail
