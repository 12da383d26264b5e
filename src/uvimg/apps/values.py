"""Values under keys in the store, for whoever asks and in whatever dialect: read, written, listed, swept.

A small value lies in its record; a larger one is a blob, so equal ones are kept once. Every change is decided inside
the store's own transaction, by the record that is there then: whoever asks at the same time, in this process or in
another, comes before or after it.
Rule: nobody sees a record that has expired, swept or not.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from weakref import WeakValueDictionary

import msgspec

from uvimg.core.address import VALUES, Digest, value_name, values_prefix
from uvimg.core.errors import TooLarge, UvimgError
from uvimg.core.message import Content, FilePart
from uvimg.store import Incoming, Record, Store, find_look

log = logging.getLogger("uvimg.kv")

# With the longest key and type it still lies in a leaf of LMDB's tree, beside its name: one page is read for both.
INLINE_BYTES = 1024
UNTYPED = "application/octet-stream"
# Names looked at in one step; between two of them others have their turn.
_STEP = 1000
_SWEEP_EVERY_S = 1.0
# A multiple of three, so that base64 of pieces is base64 of all.
_PIECE_BYTES = 196_608

# Looks at the bytes of one and the same record: between two another process may delete and store it again.
_MOST_TRIES = 3

# Raises where a change may not be, by the record that is there.
Allow = Callable[[Record | None], None]


class Received(msgspec.Struct, frozen=True):
    """A value's bytes, all there: `data`, or the blob on its way in."""

    digest: Digest
    size: int
    data: bytes | None
    blob: Incoming | None = None


def receive_bytes(data: bytes) -> Received:
    """A small value that is at hand."""
    return Received(hashlib.sha256(data).digest(), len(data), data)


class Values:
    """All databases of one store. `clock` tells POSIX time."""

    def __init__(self, store: Store, max_bytes: int, clock: Callable[[], float]) -> None:
        self.store, self.max_bytes, self.clock = store, max_bytes, clock
        self._look = find_look(store)
        # Of values that take more than one step to change: one after the other, else all but one would be in vain.
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def now_s(self) -> int:
        return int(self.clock())

    # Reading

    async def record(self, name: bytes) -> Record | None:
        return self._live(await self.store.record(name))

    def _live(self, record: Record | None) -> Record | None:
        """A record by the clock of now; in a transaction, which may have waited for its turn, of its own now."""
        return record if record is not None and record.is_live(self.clock()) else None

    async def read(self, name: bytes) -> tuple[Record, Content] | None:
        """A value and its record; a file among it is the caller's to close."""
        data = None
        if self._look is None:
            record = await self.record(name)
        else:
            (found,), data = await self._look([name])
            record = self._live(found)
        tries = 0
        while record is not None:
            if data is not None and record.inline is None and len(data) == record.size:
                return record, data
            data, content = None, await self.content(record)
            if content is not None:
                return record, content
            # It has been replaced since, perhaps by an equal one; else its bytes are lost.
            before, record = record, await self.record(name)
            tries = tries + 1 if record == before else 0
            if tries == _MOST_TRIES:
                log.error("the blob %s is missing from the store, or cut", before.digest.hex())
                raise UvimgError("The value's bytes are missing from the store.")
        return None

    async def content(self, record: Record) -> Content | None:
        """A value's bytes; None where they are not there, whole."""
        return record.inline if record.inline is not None else whole(record, await self.store.get(record.digest))

    async def live(
        self, database: bytes, prefix: bytes = b"", after: bytes = b"", *, backward: bool = False
    ) -> AsyncIterator[tuple[bytes, Record]]:
        """Keys with this prefix behind `after` (backward: before it) and their records, in order, in bounded memory."""
        beginning = values_prefix(database)
        last, step = (beginning + after if after else b""), 10
        while page := await self.store.scan(beginning + prefix, last, step, backward=backward):
            now_s = self.clock()
            for name, record in page:
                if record.is_live(now_s):
                    yield name[len(beginning) :], record
            # Whoever wants the first one alone shall not read a thousand.
            last, step = page[-1][0], _STEP
            await asyncio.sleep(0)

    async def count(self, database: bytes) -> int:
        counts = await self.store.counts(values_prefix(database), self.now_s())
        return counts.get(values_prefix(database), 0)

    async def databases(self) -> dict[bytes, int]:
        """Those that have a record, and how many."""
        counts = await self.store.counts(VALUES, self.now_s())
        return {prefix[len(VALUES) : -1]: count for prefix, count in counts.items()}

    # Writing

    @contextlib.asynccontextmanager
    async def receive(self, pieces: AsyncIterable[bytes]) -> AsyncIterator[Received]:
        """A value as it comes; it is gone again unless it is written within."""
        data, size, blob = b"", 0, None
        async with contextlib.AsyncExitStack() as stack:
            async for piece in pieces:
                size += len(piece)
                if size > self.max_bytes:
                    raise TooLarge(f"A value has at most {self.max_bytes} bytes.")
                if blob is None:
                    data += piece
                    if size <= INLINE_BYTES:
                        continue
                    blob, piece = await stack.enter_async_context(self.store.incoming()), data
                await blob.write(piece)
            if blob is None:
                yield receive_bytes(data)
            else:
                yield Received(await blob.finish(), size, None, blob)

    async def write(
        self, name: bytes, received: Received, media_type: str, expires_s: int | None, allow: Allow
    ) -> tuple[Record | None, Record | None]:
        """The live record before, and the one now: None where its time had come already."""
        now_s = self.now_s()
        record = make_record(received, media_type, now_s, expires_s)
        before: Record | None = None

        def decide(_: bytes, old: Record | None) -> Record | None:
            nonlocal before
            before = self._live(old)
            allow(before)
            return record

        await self.store.change([name], decide, received.blob)
        return before, record

    async def write_all(self, database: bytes, values: dict[bytes, bytes], expires_s: int | None) -> None:
        """Small values, all at once."""
        now_s = self.now_s()
        records = {
            value_name(database, key): make_record(receive_bytes(value), UNTYPED, now_s, expires_s)
            for key, value in values.items()
        }
        await self.store.change(list(records), lambda name, _: records[name])

    async def compute(
        self, name: bytes, make: Callable[[Record | None], tuple[bytes, str] | None], expires_s: int | None
    ) -> Record | None:
        """Replace a value by what `make` makes of the live record: bytes and type, or None to take it away.

        `make` is asked inside the transaction. The new value is a small one.
        """
        now_s = self.now_s()

        def decide(_: bytes, old: Record | None) -> Record | None:
            made = make(self._live(old))
            if made is None:
                return None
            return make_record(receive_bytes(made[0]), made[1], now_s, expires_s)

        ((_, new),) = await self.store.change([name], decide)
        return new

    async def append(self, name: bytes, suffix: bytes, expires_s: int | None) -> None:
        """Put bytes behind a value, which need not exist."""

        def join(old: Record | None) -> tuple[bytes, str]:
            if old is None:
                data, media_type = suffix, UNTYPED
            elif old.inline is None:
                raise _TooLong
            else:
                data, media_type = old.inline + suffix, old.type
            if len(data) > min(INLINE_BYTES, self.max_bytes):
                raise _TooLong
            return data, media_type

        try:
            await self.compute(name, join, expires_s)
            return
        except _TooLong:
            pass
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            while not await self._append_at_length(name, suffix, expires_s):
                pass

    async def _append_at_length(self, name: bytes, suffix: bytes, expires_s: int | None) -> bool:
        """Whether nobody else was there first, in another process."""
        found = await self.read(name)

        async def pieces() -> AsyncIterator[bytes]:
            if found is not None:
                async for piece in read_pieces(found[1]):
                    yield piece
            yield suffix

        def expect(old: Record | None) -> None:
            if old != (None if found is None else found[0]):
                raise _Changed

        try:
            async with self.receive(pieces()) as received:
                await self.write(name, received, UNTYPED if found is None else found[0].type, expires_s, expect)
        except _Changed:
            return False
        finally:
            close(None if found is None else found[1])
        return True

    async def remove(self, name: bytes, allow: Allow) -> Record | None:
        """Take a value away; the live record that there was."""
        before: Record | None = None

        def decide(_: bytes, old: Record | None) -> None:
            nonlocal before
            before = self._live(old)
            allow(before)

        await self.store.change([name], decide)
        return before

    async def remove_all(self, names: Sequence[bytes]) -> int:
        """Take names away, all at once; how many of them were live."""
        now_s = self.now_s()
        changed = await self.store.change(names, lambda name, old: None)
        return sum(old is not None and old.is_live(now_s) for old, _ in changed)

    async def seize(self, name: bytes) -> tuple[Record, Content] | None:
        """Read a value and take it away: nobody else gets it too."""
        while (found := await self.read(name)) is not None:
            record, content = found

            def expect(old: Record | None, record: Record = record) -> None:
                if old != record:
                    raise _Changed

            try:
                await self.remove(name, expect)
                return record, content
            except _Changed:
                close(content)
            except BaseException:
                close(content)
                raise
        return None

    async def clear(self, database: bytes) -> None:
        """Take all of a database away, in steps. What is written behind its back stays: it comes to an end."""
        beginning = values_prefix(database)
        last = b""
        while page := await self.store.scan(beginning, last, _STEP):
            last = page[-1][0]
            await self.store.change([name for name, _ in page], lambda name, old: None)

    # What has expired

    async def sweep(self) -> None:
        """Remove all that has expired by now, in bounded steps."""
        now_s = self.now_s()
        while await self.store.sweep(now_s, _STEP) == _STEP:  # noqa: ASYNC110 - it is the work
            await asyncio.sleep(0)

    async def keep_sweeping(self) -> None:
        """For ever. A store that is full or down is no reason to end."""
        well = True
        while True:
            try:
                await self.sweep()
                well = True
            except UvimgError as exc:
                if well:
                    log.warning("what has expired cannot be removed: %s", exc.detail)
                well = False
            except Exception:
                # Our own bug; and what expires shall not pile up behind it unseen.
                log.exception("what has expired cannot be removed")
            await asyncio.sleep(_SWEEP_EVERY_S)


class _TooLong(UvimgError):
    """What cannot be done in one step."""


class _Changed(UvimgError):
    """Somebody else was first."""


def make_record(received: Received, media_type: str, now_s: int, expires_s: int | None) -> Record | None:
    """The record of a value; None where its time has come already."""
    if expires_s is not None and expires_s <= now_s:
        return None
    return Record(*(received.digest, received.size, media_type, now_s), expires_s=expires_s or 0, inline=received.data)


def whole(record: Record, content: Content | None) -> Content | None:
    """The content if it is all of it: a cut file would be sent as if it were."""
    if content is None or (content.size if isinstance(content, FilePart) else len(content)) == record.size:
        return content
    close(content)
    return None


def close(content: Content | None) -> None:
    if isinstance(content, FilePart):
        content.close()


async def read_pieces(content: Content) -> AsyncIterator[bytes]:
    """A value piece by piece; its file is closed behind it."""
    if isinstance(content, bytes):
        yield content
        return
    with contextlib.closing(content):
        for at in range(0, content.size, _PIECE_BYTES):
            size = min(_PIECE_BYTES, content.size - at)
            data = await asyncio.to_thread(os.pread, content.file.fileno(), size, content.start + at)
            if len(data) != size:
                raise UvimgError("A file has become shorter while it was read.")
            yield data
