"""Originals: how bytes become one, with its two names.

Its names are its SHA-256 and its MD5 (zimg's id), with equal records, which hold the facts that a plan is made of.
Rule: nothing is bound before a worker has decoded it to its end.
"""

import contextlib
import hashlib
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgspec

from uvimg.apps.renditions import close
from uvimg.core.address import image_name
from uvimg.core.errors import BadRequest, DigestConflict, UnsupportedType
from uvimg.core.formats import HEAD_BYTES, Format, media_type, recognise
from uvimg.core.plan import Source
from uvimg.imaging import Inspect, Inspected, Limits
from uvimg.imaging.pool import Pool
from uvimg.store import Incoming, Record, Store


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """The facts in an original's record."""

    md5: str
    source: Source


@dataclass(frozen=True, slots=True)
class Staged:
    """An image that is all there and sound, and has no name yet."""

    incoming: Incoming
    record: Record
    md5: str


@dataclass(frozen=True, slots=True)
class Stored:
    """An image in the store."""

    record: Record
    facts: Facts
    conflict: DigestConflict | None = None


_encode = msgspec.msgpack.Encoder().encode
read_facts = msgspec.msgpack.Decoder(Facts).decode


def read_source(original: Record) -> Source:
    """The facts about an original that its record holds."""
    return read_facts(original.facts).source


class Originals:
    """What is taken into a store: images of these formats, within these limits."""

    def __init__(self, store: Store, pool: Pool, limits: Limits, formats: tuple[Format, ...]) -> None:
        self._store, self._pool, self._limits, self._formats = store, pool, limits, formats

    @contextlib.asynccontextmanager
    async def stage(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[Staged]:
        """One image received, recognised and decoded to its end; it goes away again unless it is bound."""
        md5 = hashlib.md5(usedforsecurity=False)
        async with self._store.incoming(md5.update) as incoming:
            format = await self._receive(chunks, incoming.write)
            digest = await incoming.finish()
            record = await self._store.record(image_name(digest.hex()))
            if record is None:
                content = incoming.content()
                try:
                    inspected, _ = await self._pool.run(Inspect(format, self._limits), content, "uploads")
                finally:
                    close(content)
                assert isinstance(inspected, Inspected)
                facts = _encode(Facts(md5.hexdigest(), inspected.source))
                record = Record(digest, incoming.size, media_type(inspected.source.format), int(time.time()), facts)
            yield Staged(incoming, record, md5.hexdigest())

    async def bind(self, staged: Staged) -> Stored:
        """Give an image its two names, both or none."""
        digest = staged.record.digest
        names = [image_name(digest.hex()), image_name(staged.md5)]
        bound, alias = await self._store.bind(names, staged.record, staged.incoming, replace=False)
        assert bound is not None
        assert alias is not None
        conflict = DigestConflict(digest.hex()) if alias.digest != digest else None
        return Stored(bound, read_facts(bound.facts), conflict)

    async def _receive(self, chunks: AsyncIterable[bytes], write: Callable[[bytes], Awaitable[None]]) -> Format:
        """Pass the bytes on. What is no image is refused as soon as its first bytes say so."""
        head = b""
        format: Format | None = None
        async for chunk in chunks:
            if format is None:
                head += chunk
                if len(head) < HEAD_BYTES:
                    continue
                chunk, format = head, self._recognise(head)
            await write(chunk)
        if format is None:
            if not head:
                raise BadRequest("The body is empty.")
            format = self._recognise(head)
            await write(head)
        return format

    def _recognise(self, head: bytes) -> Format:
        format = recognise(head[:HEAD_BYTES])
        if format is None or format not in self._formats:
            raise UnsupportedType(f"This is not an image of a type taken here ({', '.join(self._formats)}).")
        return format
