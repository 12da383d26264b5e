"""Renditions in the store: how bytes become one, and what holds for whatever is kept beside an original.

Rule: what is kept goes with its original. Deleting takes the original's names first and looks for renditions
then, and whoever keeps one looks for the original afterwards: one of the two sees it, so none is left behind.
"""

import asyncio
import hashlib
import os

import msgspec

from uvimg.core.address import Digest, original_of
from uvimg.core.message import Content, FilePart
from uvimg.store import Record, Store

# Hashing this much takes a fifth of a millisecond; more is worth waking a thread for.
_HASH_AT_ONCE_BYTES = 262_144


async def keep_rendition(store: Store, name: bytes, record: Record, body: bytes | None) -> bool:
    """Bind a rendition, `body` along with it unless its blob is there already. Whether it is kept."""
    if body is None:
        bound = await store.bind([name], record)
    else:
        async with store.incoming() as incoming:
            await incoming.write(body)
            await incoming.finish()
            bound = await store.bind([name], record, incoming)
    if await store.record(original_of(name)) is None:
        await store.unbind([name])
        return False
    return bound[0] is not None


async def find_bytes(store: Store, record: Record) -> Content | None:
    """The bytes of a rendition or a coded copy. They come with its record where a cache that nodes share had it."""
    return record.inline if record.inline is not None else await store.get(record.digest)


def without_bytes(record: Record) -> Record:
    """The record alone, as it would be in the store."""
    return record if record.inline is None else msgspec.structs.replace(record, inline=None)


async def hash_bytes(data: bytes) -> Digest:
    if len(data) <= _HASH_AT_ONCE_BYTES:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


async def hash_content(content: Content) -> Digest:
    """Of a file too, which stays open."""
    if isinstance(content, bytes):
        return await hash_bytes(content)
    return await asyncio.to_thread(_hash_file, content)


def _hash_file(part: FilePart) -> Digest:
    hasher = hashlib.sha256()
    at, rest = part.start, part.size
    while rest and (data := os.pread(part.file.fileno(), min(1 << 20, rest), at)):
        hasher.update(data)
        at, rest = at + len(data), rest - len(data)
    return hasher.digest()


def is_whole(record: Record, content: Content) -> bool:
    return (content.size if isinstance(content, FilePart) else len(content)) == record.size


def close(content: Content | None) -> None:
    if isinstance(content, FilePart):
        content.close()
