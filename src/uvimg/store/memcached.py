"""A store in memcached, or in what speaks its protocol and keeps what it is given: gets, cas, add, set, touch, delete.

A name's record is one item; a blob is one item with the bytes in it, or with where the chunks of a larger one are.
Such an item counts the names that point at it, by a token for each binding, so that a change that was made twice, or
whose answer was lost, counts once. Only `cas` changes it, and only `cas` removes it: no blob goes that has a name.
Surprise: a server may forget anything at any time. What has lost a piece is not there, and never comes back cut; it
is whole again when it is bound with its bytes. A token that was left over costs room until the blob is forgotten.
Rule: several names are changed one after the other, in the order given, each by itself: there is no transaction.
"""

import asyncio
import base64
import contextlib
import hashlib
import logging
import random
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from uvimg.core.address import Digest
from uvimg.core.backend import parse_servers
from uvimg.core.errors import NotImplementedHere, Overloaded, UvimgError
from uvimg.core.message import Content
from uvimg.store import MAX_NAME_BYTES, Decide, Finding, Incoming, Measures, Near, Record
from uvimg.store.guard import Guard
from uvimg.store.memcached_servers import Servers, exptime_at
from uvimg.store.spool import Spool

log = logging.getLogger("uvimg.store")

T = TypeVar("T")

# Up to here the bytes are in the item that tells of a blob: one question, where a chunk takes another and 0.1 ms more.
_WITHIN_BYTES = 256 << 10
# Half of what a server takes as one item, so that one with a lower limit does too.
CHUNK_BYTES = 512 << 10
# A head that says more is none of ours, and nobody asks for its chunks.
_LARGEST_BLOB_BYTES = 1 << 40
_TOKEN_BYTES = 8
# Names of one blob that are counted. One with more stays until the server forgets it.
_MOST_TOKENS = 16_384
# Changes of one item by several nodes at once: each try but one is in vain.
_MOST_TRIES = 100
_LONGEST_PAUSE_S = 0.05
# Who reads looks at his own clock, and a server at its own: it may be ahead by so much.
_CLOCKS_DIFFER_S = 60

_NO_SCANS = "The store is memcached, which cannot list what it holds."


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """The item of a name, whole: keys are hashes of names."""

    name: bytes
    record: Record
    token: bytes


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The item of a blob: its bytes, or which chunks they are in. `tokens` is None where nobody counts any more."""

    size: Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_BLOB_BYTES)]
    tokens: bytes | None
    data: bytes | None
    upload: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(_Entry).decode
_decode_head = msgspec.msgpack.Decoder(_Head).decode


class _NoBlob(UvimgError):
    """Nothing was done: `found` are the records that there are."""

    def __init__(self, found: list[Record | None]) -> None:
        super().__init__("A record has no blob to point at.")
        self.found = found


class MemcachedStore:
    """`rest` is what is behind the scheme of its URL, and `timeout_s` bounds each call to a server."""

    def __init__(self, rest: str, *, timeout_s: float) -> None:
        self._servers = Servers(parse_servers(rest), timeout_s)
        self.guards: Sequence[Guard] = self._servers.guards
        self.near: Near | None = None
        # In one process one after the other, else all but one would be in vain.
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def incoming(self, watch: Callable[[bytes], object] | None = None) -> Spool:
        return Spool(watch)

    async def close(self) -> None:
        await self._servers.close()

    # Reading

    async def record(self, name: bytes) -> Record | None:
        entry = _read_entry(name, await self._servers.get(_name_key(name)))
        return None if entry is None else entry.record

    async def get(self, digest: Digest) -> Content | None:
        before: _Head | None = None
        while True:
            head = _read_head(await self._servers.get(_blob_key(digest)))
            # Sent again while it was read? Then its chunks are others by now.
            if head is None or (before is not None and head.upload == before.upload):
                return None
            if head.data is not None:
                return head.data if _is_true(digest, head) else None
            content = await self._join(digest, head)
            if content is not None:
                return content
            before = head

    async def _join(self, digest: Digest, head: _Head) -> Content | None:
        """A blob out of its chunks; None where one is missing or damaged."""
        async with Spool() as spool:
            for number, size in _chunks(head.size):
                chunk = await self._servers.get(_chunk_key(head.upload, number))
                if chunk is None or len(chunk) != size:
                    return None
                await spool.write(chunk)
            # Half a millisecond for a megabyte, a tenth of what it took to come here.
            if await spool.finish() == digest:
                return spool.content()
        log.error("the chunks of %s are not its own", digest.hex())
        return None

    async def is_named(self, digest: Digest) -> bool:
        return _read_head(await self._servers.get(_blob_key(digest))) is not None

    # Changing

    async def bind(
        self, names: Sequence[bytes], record: Record, blob: Incoming | None = None, *, replace: bool = True
    ) -> list[Record | None]:
        try:
            changed = await self.change(names, lambda _, old: record if replace or old is None else old, blob)
        except _NoBlob as exc:
            return [None if replace else old for old in exc.found]
        return [new for _, new in changed]

    async def unbind(self, names: Sequence[bytes], digest: Digest | None = None) -> list[Record | None]:
        def decide(_: bytes, old: Record | None) -> Record | None:
            return None if old is None or digest in (None, old.digest) else old

        return [old if new is None else None for old, new in await self.change(names, decide)]

    async def change(
        self, names: Sequence[bytes], decide: Decide, blob: Incoming | None = None
    ) -> list[tuple[Record | None, Record | None]]:
        assert all(0 < len(name) <= MAX_NAME_BYTES for name in names)
        assert len(set(names)) == len(names)
        assert blob is None or isinstance(blob, Spool)
        return await _to_its_end(self._change(names, decide, blob))

    async def _change(
        self, names: Sequence[bytes], decide: Decide, blob: Spool | None
    ) -> list[tuple[Record | None, Record | None]]:
        async with contextlib.AsyncExitStack() as stack:
            # In one order, whoever asks: two that wait for each other would wait for ever.
            for name in sorted(names):
                await stack.enter_async_context(self._turn(_name_key(name)))
            found = [await self._find(name) for name in names]
            # All is decided before anything is done: where one is refused, nothing is.
            steps = [
                _Step(name, entry, cas, decide(name, None if entry is None else entry.record))
                for name, (entry, cas) in zip(names, found, strict=True)
            ]
            await self._provide_all(steps, blob)
            return [await self._take_step(step, decide, blob) for step in steps]

    async def _provide_all(self, steps: "Sequence[_Step]", blob: Spool | None) -> None:
        """See to all blobs, each once. _NoBlob where there is none, and nothing is done then."""
        by_digest: dict[Digest, list[_Step]] = {}
        for step in steps:
            new = step.new
            if new is not None and new.inline is None and (not step.stays or (blob and blob.digest == new.digest)):
                by_digest.setdefault(new.digest, []).append(step)
        provided: list[tuple[Digest, _Step]] = []
        for digest, each in by_digest.items():
            if not await self._provide(digest, [step.token for step in each], blob):
                for other, step in provided:
                    if step.is_new_token:
                        await self._release(other, step.token)
                raise _NoBlob([step.old for step in steps])
            provided += [(digest, step) for step in each]

    async def _take_step(
        self, step: "_Step", decide: Decide, blob: Spool | None
    ) -> tuple[Record | None, Record | None]:
        """Change one name; decided again where somebody else was first."""
        for tries in range(_MOST_TRIES):
            if step.stays:
                return step.old, step.new
            if await self._write(step):
                if step.entry is not None and step.entry.record.inline is None and step.entry.token != step.token:
                    await self._release(step.entry.record.digest, step.entry.token)
                return step.old, step.new
            await _pause(tries)
            entry, cas = await self._find(step.name)
            if step.new is not None and step.new.inline is None and (entry is None or entry.token != step.token):
                # A binding that has not come about, or is no more.
                await self._release(step.new.digest, step.token)
            step = _Step(step.name, entry, cas, decide(step.name, None if entry is None else entry.record))
            try:
                await self._provide_all([step], blob)
            except _NoBlob as exc:
                # It was there when this began.
                raise Overloaded() from exc
        raise Overloaded()

    async def _write(self, step: "_Step") -> bool:
        """Whether nobody else has changed the name."""
        key, new = _name_key(step.name), step.new
        if new is None:
            return step.cas is None or await self._servers.take(key, step.cas)
        item = _encode(_Entry(step.name, new, b"" if new.inline is not None else step.token))
        exptime = exptime_at(new.expires_s + _CLOCKS_DIFFER_S) if new.expires_s else 0
        if step.cas is None:
            return await self._servers.add(key, item, exptime)
        return await self._servers.cas(key, item, step.cas, exptime)

    async def _find(self, name: bytes) -> tuple[_Entry | None, int | None]:
        item, cas = await self._servers.gets(_name_key(name))
        return _read_entry(name, item), cas

    # Blobs and who names them

    async def _provide(self, digest: Digest, tokens: Sequence[bytes], blob: Spool | None) -> bool:
        """See that a blob is there, and that these bindings count. False where it is not, and does not come along."""
        own = blob if blob is not None and blob.digest == digest else None
        sent: _Head | None = None
        async with self._turn(_blob_key(digest)):
            for tries in range(_MOST_TRIES):
                head, cas = await self._find_head(digest)
                is_whole = head is not None and await self._is_whole(digest, head)
                if not is_whole:
                    if own is None:
                        return False
                    sent = sent or await self._send(own)
                known = head if is_whole else sent
                assert known is not None
                counted = _count_in(tokens, b"" if head is None else head.tokens)
                wanted = msgspec.structs.replace(known, tokens=counted)
                if wanted == head or await self._write_head(digest, wanted, cas):
                    # One of both uploads is nobody's any more.
                    left = head if not is_whole else sent
                    if left is not None:
                        await self._remove_chunks(left)
                    return True
                await _pause(tries)
        raise Overloaded()

    async def _release(self, digest: Digest, token: bytes) -> None:
        """One binding less; the blob goes with the last one. The name has gone already, so nobody fails by this."""
        try:
            async with self._turn(_blob_key(digest)):
                for tries in range(_MOST_TRIES):
                    head, cas = await self._find_head(digest)
                    if head is None or cas is None or head.tokens is None:
                        return
                    rest = _count_out(token, head.tokens)
                    if rest == head.tokens:
                        return
                    if rest:
                        wanted = msgspec.structs.replace(head, tokens=rest)
                        if await self._write_head(digest, wanted, cas):
                            return
                    elif await self._servers.take(_blob_key(digest), cas):
                        await self._remove_chunks(head)
                        return
                    await _pause(tries)
        except UvimgError as exc:
            log.warning("a blob that may have lost its last name is left to be forgotten: %s", exc.detail)

    async def _find_head(self, digest: Digest) -> tuple[_Head | None, int | None]:
        item, cas = await self._servers.gets(_blob_key(digest))
        return _read_head(item), cas

    async def _write_head(self, digest: Digest, head: _Head, cas: int | None) -> bool:
        key, item = _blob_key(digest), _encode(head)
        return await self._servers.add(key, item) if cas is None else await self._servers.cas(key, item, cas)

    async def _is_whole(self, digest: Digest, head: _Head) -> bool:
        if head.data is not None:
            return _is_true(digest, head)
        for number, _ in _chunks(head.size):
            if not await self._servers.touch(_chunk_key(head.upload, number)):
                return False
        return True

    async def _send(self, blob: Spool) -> _Head:
        """Send a blob's bytes; nobody can find them before its head is written."""
        if blob.size <= _WITHIN_BYTES:
            return _Head(blob.size, b"", await blob.part(0, blob.size))
        # Of its own: what removes the chunks of one upload never meets those of another.
        head = _Head(blob.size, b"", None, secrets.token_bytes(16))
        for number, size in _chunks(head.size):
            await self._servers.set(_chunk_key(head.upload, number), await blob.part(number * CHUNK_BYTES, size))
        return head

    async def _remove_chunks(self, head: _Head) -> None:
        if head.data is not None:
            return
        try:
            for number, _ in _chunks(head.size):
                await self._servers.delete(_chunk_key(head.upload, number))
        except UvimgError as exc:
            log.warning("chunks of a blob that is gone are left to be forgotten: %s", exc.detail)

    @contextlib.asynccontextmanager
    async def _turn(self, what: bytes) -> AsyncIterator[None]:
        async with self._turns.setdefault(what, asyncio.Lock()):
            yield

    # What takes more than memcached can do

    async def scan(
        self, prefix: bytes, after: bytes = b"", limit: int = 1000, *, backward: bool = False
    ) -> list[tuple[bytes, Record]]:
        raise NotImplementedHere(_NO_SCANS)

    async def counts(self, prefix: bytes, now_s: int) -> dict[bytes, int]:
        raise NotImplementedHere(_NO_SCANS)

    async def size(self) -> int:
        raise NotImplementedHere(_NO_SCANS)

    async def scrub(self) -> AsyncIterator[Finding]:
        raise NotImplementedHere(_NO_SCANS)
        yield

    async def collect(self, *, dry_run: bool = False) -> AsyncIterator[Finding]:
        raise NotImplementedHere(_NO_SCANS)
        yield

    async def sweep(self, now_s: int, limit: int = 1000) -> int:
        # The server does.
        return 0

    async def sync(self) -> None:
        pass

    def measure(self) -> Measures | None:
        return None


class _Step:
    """What becomes of one name."""

    def __init__(self, name: bytes, entry: _Entry | None, cas: int | None, new: Record | None) -> None:
        self.name, self.entry, self.cas, self.new = name, entry, cas, new
        self.old = None if entry is None else entry.record
        self.stays = new is self.old
        # The binding that it is anyway, or a new one: what is bound to the same blob again after it was taken away
        # must not lose it to whoever took it away.
        of_same = entry is not None and new is not None and entry.record.digest == new.digest
        self.is_new_token = entry is None or not of_same or entry.record.inline is not None
        self.token = secrets.token_bytes(_TOKEN_BYTES) if entry is None or self.is_new_token else entry.token


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """What was begun is done to its end, also when nobody waits any more: half an upload is nobody's wish."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # It reads from what its caller is about to close.
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _pause(tries: int) -> None:
    """Before a change is tried again. Not all at the same moment."""
    await asyncio.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.001 * 2 ** min(tries, 10))))


# Items


def _name_key(name: bytes) -> bytes:
    return b"uvimg1:n:" + _spell(hashlib.sha256(name).digest())


def _blob_key(digest: Digest) -> bytes:
    return b"uvimg1:b:" + _spell(digest)


def _chunk_key(upload: bytes, number: int) -> bytes:
    return b"uvimg1:c:%b:%d" % (_spell(upload), number)


def _spell(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _read_entry(name: bytes, item: bytes | None) -> _Entry | None:
    if item is None:
        return None
    try:
        entry = _decode_entry(item)
    except msgspec.MsgspecError:
        log.error("an item of a name is none of ours, and is taken for none")
        return None
    return entry if entry.name == name else None


def _read_head(item: bytes | None) -> _Head | None:
    if item is None:
        return None
    try:
        return _decode_head(item)
    except msgspec.MsgspecError:
        log.error("an item of a blob is none of ours, and is taken for none")
        return None


def _is_true(digest: Digest, head: _Head) -> bool:
    """Whether the bytes in it are the blob's: 2 µs for 3 KB, 140 for the largest, which takes twice that to get."""
    if head.data is not None and hashlib.sha256(head.data).digest() == digest:
        return True
    log.error("the bytes of %s are not its own", digest.hex())
    return False


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    """The chunks of a blob: the number and the size of each."""
    return ((at // CHUNK_BYTES, min(CHUNK_BYTES, size - at)) for at in range(0, size, CHUNK_BYTES))


def _split(tokens: bytes) -> list[bytes]:
    return [tokens[at : at + _TOKEN_BYTES] for at in range(0, len(tokens), _TOKEN_BYTES)]


def _count_in(tokens: Sequence[bytes], known: bytes | None) -> bytes | None:
    if known is None:
        return None
    there = set(_split(known))
    counted = known + b"".join(token for token in tokens if token not in there)
    return counted if len(counted) <= _MOST_TOKENS * _TOKEN_BYTES else None


def _count_out(token: bytes, known: bytes) -> bytes:
    return b"".join(each for each in _split(known) if each != token)
