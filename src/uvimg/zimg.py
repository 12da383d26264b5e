"""`uvimg import-zimg`: what a zimg has stored becomes originals here, under the ids that its clients know.

zimg trusted what it was sent, so nothing is believed: each file is hashed and decoded like an upload, and one whose
MD5 is not its id, or that is no image, is told and left out. Renditions are not taken along; they are made again.
It can be stopped and begun again: an id that is there already is left.
"""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
_ID = re.compile(r"[0-9a-f]{32}")


class CannotImport(Exception):
    """There is nothing to be imported from there; the message is one readable line."""


class Zimg(Protocol):
    """What a zimg has stored."""

    def ids(self) -> AsyncIterator[str]:
        """The MD5s of its originals."""

    def read(self, id: str) -> AsyncGenerator[bytes, None]:
        """An original's bytes, as they are. CannotImport where there are none."""

    async def close(self) -> None: ...


class Folder:
    """zimg's mode 1: its `img_path`, where an original is `<a>/<b>/<md5>/0*0`.

    a is `int(md5[0:3], 16) // 4`, b the same of `md5[3:6]`.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        if not self._path.is_dir():
            raise CannotImport(f"{path}: there is no such folder")

    async def ids(self) -> AsyncIterator[str]:
        walk = self._walk()
        while page := await asyncio.to_thread(lambda: [id for id, _ in zip(walk, range(_STEP), strict=False)]):
            for id in page:
                yield id

    def _walk(self) -> Iterator[str]:
        for first in _list(self._path, r"\d{1,4}"):
            for second in _list(self._path / first, r"\d{1,4}"):
                for id in _list(self._path / first / second, _ID.pattern):
                    if (first, second) == _folders(id):
                        yield id

    async def read(self, id: str) -> AsyncGenerator[bytes, None]:
        path = self._path.joinpath(*_folders(id), id, "0*0")
        try:
            with await asyncio.to_thread(path.open, "rb", 0) as file:
                while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                    yield piece
        except OSError as exc:
            raise CannotImport(f"its original cannot be read: {exc.strerror}") from exc

    async def close(self) -> None:
        pass


def _list(path: Path, pattern: str) -> list[str]:
    """The folders in a folder whose names are like this, in order."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if re.fullmatch(pattern, entry.name) and entry.is_dir())
    except OSError as exc:
        raise CannotImport(f"{path}: {exc.strerror}") from exc


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
                cursor, keys = await self._servers.ask(0, "SCAN", cursor, "MATCH", "?" * 32, "COUNT", _STEP)
            except (StoreDown, StoreFull):
                raise
            except UvimgError as exc:
                raise CannotImport("the server cannot list its keys: name the originals with --ids FILE") from exc
            for key in keys:
                if re.fullmatch(_ID.pattern.encode(), key):
                    yield key.decode()
            if cursor == b"0":
                return

    async def read(self, id: str) -> AsyncGenerator[bytes, None]:
        if await self._servers.ask(0, "STRLEN", id) > self._max_bytes:
            raise CannotImport(f"its original has more than {self._max_bytes} bytes")
        data = await self._servers.ask(0, "GET", id)
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
        try:
            with sys.stdin if self._path == "-" else open(self._path, errors="replace") as file:
                for number, line in enumerate(file, 1):
                    id = line.strip().lower()
                    if id and not _ID.fullmatch(id):
                        raise CannotImport(f"{self._path}, line {number}: not 32 hex digits: {id[:50]!a}")
                    if id:
                        yield id
        except OSError as exc:
            raise CannotImport(f"{self._path}: {exc.strerror}") from exc


def open_zimg(origin: str, ids: str, max_bytes: int, timeout_s: float) -> Zimg:
    """What a zimg has stored, by the folder or the server; `ids` is a file, "" for all. CannotImport, ValueError."""
    scheme, _, rest = origin.partition(":")
    if rest.startswith("//") and scheme in ("redis", "rediss", "redis+cluster", "rediss+cluster"):
        zimg: Zimg = RedisKeys(origin, max_bytes, timeout_s)
    elif rest.startswith("//") and scheme == "memcached":
        split_url(origin)
        zimg = MemcachedKeys(rest, max_bytes, timeout_s)
    else:
        zimg = Folder(origin)
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
