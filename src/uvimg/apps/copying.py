"""All that is in one store into another: names, records and blobs, whatever either stands on.

It can be stopped and begun again: what is there already, equal, is left. Every blob is hashed on its way, and one
whose bytes are not those of its address, or cannot be read, is told and not copied.
A copy is no snapshot: what is written meanwhile may be in it or not, but each record is whole. Nothing is taken away
from the target.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from uvimg.apps.renditions import close, is_whole
from uvimg.apps.values import read_pieces
from uvimg.core.coding import CODINGS
from uvimg.core.errors import StoreDown, UvimgError
from uvimg.core.message import Content
from uvimg.store import Finding, Record, Store

# Names read from the source in one step, and copied at once: the target commits what comes together together.
_STEP = 1000
_AT_ONCE = 32
# Looks at one and the same name, whose record may change each time.
_MOST_TRIES = 3
_UNREADABLE = "its bytes cannot be read"


@dataclass(slots=True)
class Counts:
    """What became of the names. `bytes` are those of blobs that were sent."""

    copied: int = 0
    there: int = 0
    failed: int = 0
    bytes: int = 0


async def copy(source: Store, target: Store, counts: Counts, *, renditions: bool = True) -> AsyncIterator[Finding]:
    """Copy everything, renditions and coded copies among it unless told otherwise. One finding a name.

    The errors of either store end it, when what was begun has come to its end.
    """
    last = b""
    while page := await source.scan(b"", last, _STEP):
        last = page[-1][0]
        wanted = [(name, record) for name, record in page if renditions or not _may_be_lost(name)]
        for start in range(0, len(wanted), _AT_ONCE):
            tasks = [
                asyncio.create_task(_copy(source, target, name, record, counts))
                for name, record in wanted[start : start + _AT_ONCE]
            ]
            try:
                await asyncio.wait(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for (name, _), task in zip(wanted[start : start + _AT_ONCE], tasks, strict=True):
                yield Finding(_show(name), task.result())


def _show(name: bytes) -> str:
    """A name for a terminal, which clients may have chosen: nothing in it is to be obeyed there."""
    return repr(name)[2:-1]


def _may_be_lost(name: bytes) -> bool:
    """Whether what a name points at can be made again."""
    return name.startswith((b"renditions/", CODINGS))


async def _copy(source: Store, target: Store, name: bytes, record: Record | None, counts: Counts) -> str:
    """One name; what is wrong with it, "" for nothing."""
    trouble = ""
    for _ in range(_MOST_TRIES):
        if record is None or not record.is_live(time.time()):
            # Gone since it was listed.
            return ""
        if await target.record(name) == record:
            counts.there += 1
            return ""
        try:
            trouble = await _bind(source, target, name, record, counts)
        except UvimgError as exc:
            if exc.status >= 500:
                raise
            # Such as a name that the target cannot have.
            trouble = exc.detail
        if not trouble:
            counts.copied += 1
            return ""
        before, record = record, await source.record(name)
        if record == before:
            break
    counts.failed += 1
    return trouble


async def _bind(source: Store, target: Store, name: bytes, record: Record, counts: Counts) -> str:
    """Give the target the record, and the blob with it; why that cannot be, "" where it is done."""
    if record.inline is not None:
        if hashlib.sha256(record.inline).digest() != record.digest:
            return "its bytes are not those of its digest"
        await target.change([name], lambda _, old: record)
        return ""
    if (await target.bind([name], record))[0] is not None:
        # Another name brought the blob.
        return ""
    try:
        content = await source.get(record.digest)
    except StoreDown:
        # One bad place on a disk is not to keep the rest there; if all of the store is away, this says so.
        await source.record(name)
        return _UNREADABLE
    if content is None:
        return "its bytes are missing"
    try:
        if not is_whole(record, content):
            return "its bytes are not all there"
        async with target.incoming() as incoming:
            async for piece in _read(content):
                await incoming.write(piece)
            if await incoming.finish() != record.digest:
                return "its bytes are not those of its address"
            await target.bind([name], record, incoming)
            counts.bytes += incoming.size
    except _Unreadable:
        return _UNREADABLE
    finally:
        close(content)
    return ""


class _Unreadable(Exception):
    """The source's fault, not the target's."""


async def _read(content: Content) -> AsyncIterator[bytes]:
    try:
        async for piece in read_pieces(content):
            yield piece
    except (OSError, UvimgError) as exc:
        raise _Unreadable from exc
