"""Values out of a store as a dump, and into any other store: a line at a time, however many there are.

A dump is no snapshot: what is written meanwhile may be in it or not, but each record is whole.
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import BinaryIO

from uvimg.apps.values import INLINE_BYTES, Values, read_pieces, receive_bytes
from uvimg.core.dump import (
    HEAD,
    MAX_LINE_BYTES,
    BadDump,
    Entry,
    Totals,
    check_head,
    decode_line,
    encode_end,
    encode_entry,
    encode_more,
    name_of,
    unpack,
)
from uvimg.core.errors import BadRequest, TooLarge
from uvimg.core.keyvalue import LAST_SECOND, name_record
from uvimg.store import Record

# Small records that are stored in one transaction.
_STEP = 1000


async def dump(values: Values, databases: list[bytes], watch: Callable[[], object]) -> AsyncIterator[bytes]:
    """The lines. `watch` is called for each record."""
    signed, records = hashlib.sha256(HEAD), 0
    yield HEAD
    for database in databases:
        async for key, record in values.live(database):
            content = await values.content(record)
            found = (record, content) if content is not None else await values.read(name_record(database, key))
            if found is None:
                # Deleted since.
                continue
            async for line in _spell(database, key, found[0], read_pieces(found[1])):
                signed.update(line)
                yield line
            records += 1
            watch()
    yield encode_end(records, signed.hexdigest())


async def _spell(database: bytes, key: bytes, record: Record, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield encode_entry(
        *(database, key),
        type=record.type,
        created_s=record.created_s,
        expires_s=record.expires_s,
        size=record.size,
        digest=record.digest,
        part=await anext(pieces, b""),
    )
    async for piece in pieces:
        yield encode_more(piece)


async def load(values: Values, file: BinaryIO, watch: Callable[[int], object]) -> int:
    """Store what a dump holds; how many records. `watch` hears of so many more.

    BadDump says where it is damaged or cut, and how much was stored before; what was stored stays.
    """
    loader = _Loader(values, watch)
    lines = _Lines(file)
    try:
        await loader.load(lines)
    except (BadDump, BadRequest, TooLarge) as exc:
        raise BadDump(f"line {lines.number}: {exc.detail}; {loader.stored} records were loaded before") from exc
    return loader.stored


class _Lines:
    """The lines of a file, one ahead, with what they are signed by."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.number = file, 0
        self._signed = hashlib.sha256()

    def __iter__(self) -> Iterator[Entry | bytes | Totals]:
        check_head(self._read())
        while True:
            before = self._signed.hexdigest()
            decoded = decode_line(self._read())
            if isinstance(decoded, Totals) and decoded.sha256 != before:
                raise BadDump("the dump is not what was signed at its end")
            yield decoded

    def _read(self) -> bytes:
        self.number += 1
        line = self._file.readline(MAX_LINE_BYTES)
        if not line:
            raise BadDump("the dump is cut here" if self.number > 1 else "this is no dump of values, it is empty")
        self._signed.update(line)
        return line


class _Loader:
    def __init__(self, values: Values, watch: Callable[[int], object]) -> None:
        self._values, self._watch = values, watch
        self._held: dict[bytes, Record] = {}
        self._read = self.stored = 0

    async def load(self, lines: _Lines) -> None:
        decoded = iter(lines)
        try:
            for line in decoded:
                match line:
                    case Entry():
                        await self._take(line, decoded)
                        self._read += 1
                    case Totals():
                        if line.records != self._read:
                            raise BadDump(f"{line.records} records were dumped, and {self._read} are here")
                        return
                    case _:
                        raise BadDump("there is more of a value than it has")
        finally:
            # What was read well is kept, also when the rest is damaged: the message counts it.
            await self._flush()

    async def _take(self, entry: Entry, lines: Iterator[Entry | bytes | Totals]) -> None:
        database, key = name_of(entry)
        name = name_record(database, key)
        first = unpack(entry.value)
        if entry.size < len(first) or entry.size > self._values.max_bytes:
            raise BadDump(f"the value has {entry.size} bytes, and {self._values.max_bytes} are allowed")

        async def pieces() -> AsyncIterator[bytes]:
            yield first
            left = entry.size - len(first)
            while left:
                more = next(lines)
                if not isinstance(more, bytes) or not 0 < len(more) <= left:
                    raise BadDump("this is not the rest of the value before")
                left -= len(more)
                yield more

        if entry.size <= INLINE_BYTES and entry.size == len(first):
            received = receive_bytes(first)
            self._check(entry, received.digest)
            self._held[name] = _make_record(entry, received.digest, first)
            if len(self._held) >= _STEP:
                await self._flush()
            return
        await self._flush()
        async with self._values.receive(pieces()) as received:
            self._check(entry, received.digest)
            record = _make_record(entry, received.digest, received.data)
            await self._values.store.change([name], lambda _, old: record, received.blob)
        self._count(1)

    def _check(self, entry: Entry, digest: bytes) -> None:
        if digest.hex() != entry.sha256:
            raise BadDump("the value's bytes are not those of its sha256")

    async def _flush(self) -> None:
        held, self._held = self._held, {}
        if held:
            await self._values.store.change(list(held), lambda name, _: held[name])
            self._count(len(held))

    def _count(self, stored: int) -> None:
        self.stored += stored
        self._watch(stored)


def _make_record(entry: Entry, digest: bytes, data: bytes | None) -> Record:
    """Also of one that has expired since: it is swept like others."""
    if not 0 <= entry.expires_s <= LAST_SECOND or not 0 <= entry.created_s <= LAST_SECOND:
        raise BadDump("the record's times cannot be")
    if len(entry.type) > 255 or not entry.type.isascii() or not entry.type.isprintable():
        raise BadDump("the record's type cannot be")
    return Record(digest, entry.size, entry.type, entry.created_s, expires_s=entry.expires_s, inline=data)
