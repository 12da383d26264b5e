"""A store in a bucket of an object store: S3 and its likes, Google's, Azure's.

Such a store changes one object at a time, on the condition that nobody else has changed it; everything here is made
of that. A name is a small object that holds its record, and a change is a look and a conditional write, repeated
where somebody was faster. A blob lies under its address and is never changed, so who meets it there sends nothing.

    names/_…                        a record, or for a moment the mark of one that is being removed
    blobs/ab/ab…                    blobs, by address
    uses/ab/ab…/NONCE               the name that was, or was about to be, bound to a blob
    condemned/ab…                   a blob that gc is about to remove
    due/SECOND/names/_…             that a name expires then

Removing is what such a store has no condition for, and there are two rules for it.
A name: a mark takes the record's place, which is conditional; then the mark is removed. Nobody writes over a mark
that is younger than _MARK_S, and nobody removes one that he has written longer ago than _REMOVAL_S.
A blob: gc condemns it first and then looks who uses it; who binds a name says so first (uses/) and then looks
whether the blob is condemned. One of the two sees the other, as each writes before it looks. What nobody has named
is left alone for a while all the same (`grace_s`), for a binder may have stopped half-way, or just begun.

Several names are changed one after the other, in an order in which stopping leaves nothing wrong; those of one image
are looked at again at the end, until both are there or none.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from uvimg.core.address import Digest, group_of, original_of, parse_blob_path
from uvimg.core.bucket import BucketPlace
from uvimg.core.coding import CODINGS, coded_digest
from uvimg.core.errors import BadRequest, NotImplementedHere, StoreDown, UvimgError
from uvimg.core.message import Content, FilePart, Pieces
from uvimg.core.object_keys import (
    BLOBS,
    CONDEMNED,
    DUE,
    USES,
    blob_key,
    condemned_key,
    due_folder,
    due_key,
    fits,
    folder_of,
    read_due,
    read_name,
    read_use,
    spell_name,
    spell_prefix,
    use_key,
    uses_folder,
)
from uvimg.store import Decide, Finding, Incoming, Measures, Record
from uvimg.store.bucket import Bucket, Found, Listed, Tag
from uvimg.store.guard import Guard
from uvimg.store.spool import Spool, open_nameless, translate_file_error

log = logging.getLogger("uvimg.store")

T = TypeVar("T")
R = TypeVar("R")

# What nobody names is left alone for so long: longer than any upload takes, and than clocks are apart.
GRACE_S = 86_400.0
# See the rules above. Between the two is more than any call takes, and than clocks may differ.
_MARK_S = 60.0
_REMOVAL_S = 15.0
# Whoever binds has to come to its end before gc may take his use for a stale one.
_BINDING_S = 3600.0
# How long somebody else's removal is waited for; it takes some milliseconds.
_PATIENCE_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
# A change that others are faster than so often is given up.
_MOST_TRIES = 100
# To ask whether a blob is there costs less than to send more than this in vain.
_ASK_FIRST_BYTES = 4096
# A larger blob goes up in parts, and comes down into a file.
_LARGE_BYTES = 1 << 20
_LEAST_PARTS_BYTES = 8 << 20
# What is sent on while it comes does so in steps; so much of each waits in memory for its client.
_STEP_BYTES = 1 << 20
# Of one request, beside which others have their turn.
_AT_ONCE = 32
# Names that one question may look through; see `counts` and `scan`.
_MOST_LISTED = 100_000
# A record has its digest; a mark is shorter.
_LEAST_RECORD_BYTES = 32

_NONCE_BYTES = 8


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """What a name's object holds. `nonce` is that of its use, where there is a blob."""

    nonce: bytes
    record: Record


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Kept).decode


@dataclass(frozen=True, slots=True)
class _Seen:
    """A name as it was at a moment. Without a tag there is no object; a mark has a tag and no record."""

    record: Record | None = None
    nonce: bytes = b""
    tag: Tag | None = None
    modified_s: float = 0.0

    @property
    def is_mark(self) -> bool:
        return self.tag is not None and self.record is None


@dataclass(slots=True)
class _Claim:
    """A name that is about to be bound to a blob which is there, and stays. `began_s` is monotonic."""

    digest: Digest
    nonce: bytes
    began_s: float
    used: bool = False


class ObjectStore:
    """A store in a bucket. Nothing is asked before the first call."""

    near = None

    def __init__(self, place: BucketPlace, timeout_s: float, grace_s: float = GRACE_S) -> None:
        self._bucket = Bucket(place, timeout_s)
        self.guards: Sequence[Guard] = (self._bucket.guard,)
        self.grace_s = grace_s
        # Of this process; else all but one would try in vain, where many change one name.
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def incoming(self, watch: Callable[[bytes], object] | None = None) -> Spool:
        return Spool(watch)

    # Reading

    async def record(self, name: bytes) -> Record | None:
        if not fits(name, self._bucket.prefix):
            return None
        return (await self._look(name)).record

    async def get(self, digest: Digest) -> Content | None:
        opened = await self._bucket.open(blob_key(digest))
        if opened is None:
            return None
        size, pieces = opened
        async with contextlib.aclosing(pieces):
            if size <= _LARGE_BYTES:
                return b"".join([piece async for piece in pieces])
            return await _fill_file(pieces, size)

    async def stream(self, digest: Digest, start: int, stop: int) -> Pieces | None:
        """See `Streams`."""
        first = await self._bucket.read(blob_key(digest), start, min(start + _STEP_BYTES, stop))
        if first is None or first[0] < stop:
            return None
        return Pieces(self._read_on(digest, start, stop, first[1]), size=stop - start)

    async def _read_on(self, digest: Digest, start: int, stop: int, first: bytes) -> AsyncIterator[bytes]:
        """In requests of their own, for a client may be slower than a server has patience."""
        piece = first
        while True:
            if len(piece) != min(_STEP_BYTES, stop - start):
                raise StoreDown()
            yield piece
            start += len(piece)
            if start == stop:
                return
            found = await self._bucket.read(blob_key(digest), start, min(start + _STEP_BYTES, stop))
            piece = b"" if found is None else found[1]

    async def is_named(self, digest: Digest) -> bool:
        async for page in self._bucket.list(uses_folder(digest)):
            for listed in page:
                if await self._is_used(listed.key):
                    return True
        return False

    async def _is_used(self, key: str) -> bool:
        """Whether the name that an object below uses/ tells has the blob still, by that very binding."""
        use = read_use(key)
        found = None if use is None else await self._bucket.get(key)
        if use is None or found is None:
            return False
        seen = await self._look(found.data)
        return seen.record is not None and (seen.record.digest, seen.nonce) == use

    async def _look(self, name: bytes) -> _Seen:
        return _read(await self._bucket.get(spell_name(name)))

    # Changing

    async def bind(
        self, names: Sequence[bytes], record: Record, blob: Incoming | None = None, *, replace: bool = True
    ) -> list[Record | None]:
        self._check(names)
        async with self._in_turn(names):
            before = await _gather(map(self._look, names))
            if not replace and all(seen.record is not None for seen in before):
                return [seen.record for seen in before]
            if blob is None and not await self.is_named(record.digest):
                return [None if replace else seen.record for seen in before]
            async with self._claiming(names, record, blob) as claims:

                def decide(_: bytes, old: Record | None) -> Record | None:
                    return record if replace or old is None else old

                async def bind_one(place: int) -> Record | None:
                    return (await self._swap(names[place], decide, claims[place], before[place]))[1]

                # What an image is found by comes first, and its other name when that is there.
                bound = [await bind_one(0), *await _gather(map(bind_one, range(1, len(names))))]
                if len(names) > 1:
                    await self._settle(names, record.digest, record, claims)
                return bound

    async def unbind(self, names: Sequence[bytes], digest: Digest | None = None) -> list[Record | None]:
        self._check(names)

        def decide(_: bytes, old: Record | None) -> Record | None:
            return None if old is None or digest in (None, old.digest) else old

        async def unbind_one(name: bytes) -> Record | None:
            old, new = await self._swap(name, decide)
            return old if new is None else None

        async with self._in_turn(names):
            if digest is None or len(names) < 2:
                return list(await _gather(map(unbind_one, names)))
            others = await _gather(map(unbind_one, names[1:]))
            taken = [await unbind_one(names[0]), *others]
            await self._settle(names, digest)
            return taken

    async def change(
        self, names: Sequence[bytes], decide: Decide, blob: Incoming | None = None
    ) -> list[tuple[Record | None, Record | None]]:
        assert len(set(names)) == len(names)
        self._check(names)
        async with self._in_turn(names), contextlib.AsyncExitStack() as stack:
            before = await _gather(map(self._look, names))
            # Where one is refused, nothing is done.
            decided = [decide(name, seen.record) for name, seen in zip(names, before, strict=True)]
            claims: dict[bytes, _Claim] = {}
            for name, seen, new in zip(names, before, decided, strict=True):
                if new is not None and new is not seen.record and new.inline is None:
                    mine = blob if isinstance(blob, Spool) and blob.digest == new.digest else None
                    if mine is None and not await self.is_named(new.digest):
                        raise UvimgError("A record has no blob to point at.")
                    (claims[name],) = await stack.enter_async_context(self._claiming([name], new, mine))
            done: list[tuple[bytes, Record | None, Record | None]] = []

            async def change_one(place: int) -> tuple[Record | None, Record | None]:
                name = names[place]
                old, new = await self._swap(name, decide, claims.get(name), before[place])
                done.append((name, old, new))
                return old, new

            try:
                others = await _gather(map(change_one, range(1, len(names))))
                # What the others are for comes last.
                return [await change_one(0), *others] if names else []
            except UvimgError:
                await self._undo(done)
                raise

    async def _undo(self, done: Sequence[tuple[bytes, Record | None, Record | None]]) -> None:
        """Take back what was changed before somebody was faster elsewhere, and what it was then refused for."""
        for name, old, new in done:
            if old is new or (old is not None and old.inline is None):
                # A blob that has lost its name may be gone; and who took the name away meant to.
                continue

            def restore(
                _: bytes, now: Record | None, old: Record | None = old, new: Record | None = new
            ) -> Record | None:
                return old if now == new else now

            with contextlib.suppress(UvimgError):
                await self._swap(name, restore)

    async def _settle(
        self, names: Sequence[bytes], digest: Digest, record: Record | None = None, claims: Sequence[_Claim] = ()
    ) -> None:
        """See to it that the names of one image are all there or none, whoever binds and unbinds them elsewhere.

        Whoever has changed one of them looks at all of them afterwards, so the last one to do so sees what remains.
        """
        for _ in range(_MOST_TRIES):
            first, *others = await _gather(map(self._look, names))
            is_there = first.record is not None and first.record.digest == digest
            known = first.record if is_there else None
            wrong = [
                name
                for name, seen in zip(names[1:], others, strict=True)
                if (seen.record is None if is_there else seen.record is not None and seen.record.digest == digest)
            ]
            if not wrong:
                return
            for name in wrong:
                if known is None:
                    await self._swap(name, lambda _, old: None if old is not None and old.digest == digest else old)
                else:
                    async with self._claiming([name], known, None) as (claim,):
                        await self._swap(name, lambda _, old, known=known: old or known, claim)  # type: ignore[misc]
            await _pause(1)
        raise StoreDown("The names of an image are changed too often at this moment.")

    async def _swap(
        self, name: bytes, decide: Decide, claim: _Claim | None = None, seen: _Seen | None = None
    ) -> tuple[Record | None, Record | None]:
        """Have it decided what a name is to have, and give it that; the records before and after."""
        key = spell_name(name)
        until_s = time.monotonic() + _PATIENCE_S
        for tried in range(_MOST_TRIES):
            seen = seen or await self._look(name)
            if seen.is_mark and seen.modified_s > time.time() - _MARK_S:
                # In between two steps of somebody else; or he was stopped there.
                if time.monotonic() > until_s:
                    raise StoreDown("A removal of this has not come to its end; try again in a minute.")
                await _pause(tried)
                seen = None
                continue
            old = seen.record
            new = decide(name, old)
            if new is old or (new is None and old is None):
                return old, old
            if new is None:
                if await self._remove(name, key, seen):
                    return old, None
            elif await self._write(name, key, seen, new, claim):
                return old, new
            # Somebody was faster.
            await _pause(tried)
            seen = None
        raise StoreDown("This is changed by too many at this moment.")

    async def _write(self, name: bytes, key: str, seen: _Seen, new: Record, claim: _Claim | None) -> bool:
        if new.inline is not None:
            claim = None
        elif claim is None or claim.digest != new.digest or time.monotonic() - claim.began_s > _BINDING_S:
            # It was decided otherwise before somebody was faster, or that took too long.
            raise StoreDown()
        if new.expires_s and (seen.record is None or seen.record.expires_s != new.expires_s):
            await self._bucket.put(due_key(new.expires_s, name), b"")
        nonce = os.urandom(_NONCE_BYTES) if claim is None else claim.nonce
        data = _encode(_Kept(nonce, new))
        if claim is not None:
            # Also when it is not known how the next call has ended.
            claim.used = True
        if not await (
            self._bucket.create(key, data) if seen.tag is None else self._bucket.replace(key, data, seen.tag)
        ):
            if claim is not None:
                claim.used = False
            return False
        await self._clear(name, seen, new)
        return True

    async def _remove(self, name: bytes, key: str, seen: _Seen) -> bool:
        assert seen.tag is not None
        began_s = time.monotonic()
        if not await self._bucket.replace(key, b"gone" + os.urandom(_NONCE_BYTES), seen.tag):
            return False
        # It is gone by that; what follows may fail.
        try:
            if time.monotonic() - began_s < _REMOVAL_S:
                await self._bucket.delete(key)
            await self._clear(name, seen, None)
        except UvimgError as exc:
            log.warning("what is left of a removed name has to wait for gc: %s", exc.detail)
        return True

    async def _clear(self, name: bytes, seen: _Seen, new: Record | None) -> None:
        """Remove what belonged to the record that a name has lost. What stays behind does no harm."""
        old = seen.record
        if old is None:
            return
        keys = [use_key(old.digest, seen.nonce)] if old.inline is None else []
        if old.expires_s and (new is None or new.expires_s != old.expires_s):
            keys.append(due_key(old.expires_s, name))
        with contextlib.suppress(StoreDown):
            await self._bucket.delete(*keys)

    @contextlib.asynccontextmanager
    async def _claiming(
        self, names: Sequence[bytes], record: Record, blob: Incoming | None
    ) -> AsyncIterator[list[_Claim]]:
        """See to it that a blob is there and stays, for these names. What is not used of that is let go."""
        assert blob is None or isinstance(blob, Spool)
        claims = [_Claim(record.digest, os.urandom(_NONCE_BYTES), time.monotonic()) for _ in names]

        async def say(place: int) -> None:
            await self._bucket.put(use_key(record.digest, claims[place].nonce), names[place])

        try:
            await _gather(map(say, range(len(names))))
            await self._wait_for_judgement(record.digest)
            await self._provide(record.digest, record.size, blob)
            yield claims
        finally:
            unused = [use_key(record.digest, claim.nonce) for claim in claims if not claim.used]
            with contextlib.suppress(UvimgError):
                await self._bucket.delete(*unused)

    async def _wait_for_judgement(self, digest: Digest) -> None:
        """Until gc has removed a blob that it has condemned, or has seen that it is used."""
        until_s = time.monotonic() + _PATIENCE_S
        tried = 0
        while (condemned_s := await self._bucket.modified_s(condemned_key(digest))) is not None:
            if condemned_s < time.time() - _MARK_S:
                # By one that was stopped: it will not go on.
                return
            if time.monotonic() > until_s:
                raise StoreDown("These bytes are being removed; try again in a minute.")
            await _pause(tried)
            tried += 1

    async def _provide(self, digest: Digest, size: int, blob: Spool | None) -> None:
        key = blob_key(digest)
        if blob is None:
            if await self._bucket.size_of(key) is None:
                raise UvimgError("A record has no blob to point at.")
            return
        if size > _ASK_FIRST_BYTES and await self._bucket.size_of(key) == size:
            return
        content = blob.content()
        if isinstance(content, bytes):
            if not await self._bucket.create(key, content) and await self._bucket.size_of(key) != size:
                # It is damaged, and what comes in its place is no other.
                await self._bucket.put(key, content)
            return
        with contextlib.closing(content):
            if size < _LEAST_PARTS_BYTES:
                await self._bucket.put(key, await asyncio.to_thread(os.pread, content.file.fileno(), size, 0))
            else:
                # Parts know no condition; but whoever writes this key writes the same bytes, and whole.
                await self._bucket.put_file(key, content.file.fileno(), size)

    def _check(self, names: Sequence[bytes]) -> None:
        for name in names:
            assert name
            if not fits(name, self._bucket.prefix):
                raise BadRequest("This name is too long for the store; what is no letter or digit counts thrice.")

    @contextlib.asynccontextmanager
    async def _in_turn(self, names: Iterable[bytes]) -> AsyncIterator[None]:
        """One change of a name after the other, in this process."""
        async with contextlib.AsyncExitStack() as stack:
            for name in sorted(names):
                await stack.enter_async_context(self._turns.setdefault(name, asyncio.Lock()))
            yield

    # Walks

    async def scan(
        self, prefix: bytes, after: bytes = b"", limit: int = 1000, *, backward: bool = False
    ) -> list[tuple[bytes, Record]]:
        """Backward there is no listing: names are listed from the first one on, _MOST_LISTED at most.

        NotImplementedHere where there are more before `after`.
        """
        if backward:
            names = await self._list_before(prefix, after, limit)
            return await self._read_all(names)
        found: list[tuple[bytes, Record]] = []
        names = []
        async for listed, name in self._list_names(prefix, after):
            if listed.size < _LEAST_RECORD_BYTES:
                continue
            names.append(name)
            if len(names) + len(found) == limit:
                found += await self._read_all(names)
                names = []
                if len(found) == limit:
                    return found
        return found + await self._read_all(names)

    async def _list_before(self, prefix: bytes, before: bytes, limit: int) -> list[bytes]:
        # A few more, as some may go before they are read.
        last: deque[bytes] = deque(maxlen=limit + 8)
        count = 0
        async for listed, name in self._list_names(prefix):
            if before and name >= before:
                break
            count += 1
            if count > _MOST_LISTED:
                raise NotImplementedHere(f"This store goes backward through {_MOST_LISTED} names at most.")
            if listed.size >= _LEAST_RECORD_BYTES:
                last.append(name)
        return list(reversed(last))[:limit]

    async def _list_names(self, prefix: bytes, after: bytes = b"") -> AsyncIterator[tuple[Listed, bytes]]:
        spelt = spell_prefix(prefix)
        # No name is spelt like a prefix, and all with that prefix are behind it.
        start = max(spell_name(after) if after else spelt, spelt)
        async for page in self._bucket.list(folder_of(spelt), start):
            for listed in page:
                if not listed.key.startswith(spelt):
                    if listed.key > spelt:
                        return
                    continue
                name = read_name(listed.key)
                if name is not None:
                    yield listed, name

    async def _read_all(self, names: Sequence[bytes]) -> list[tuple[bytes, Record]]:
        seen = await _gather(map(self._look, names))
        return [(name, each.record) for name, each in zip(names, seen, strict=True) if each.record is not None]

    async def counts(self, prefix: bytes, now_s: int) -> dict[bytes, int]:
        """By listing them. NotImplementedHere above _MOST_LISTED."""
        counts: Counter[bytes] = Counter()
        listed_names = 0
        async for listed, name in self._list_names(prefix):
            group = group_of(name)
            if group is not None and listed.size >= _LEAST_RECORD_BYTES:
                counts[group] += 1
            listed_names += 1
            if listed_names > _MOST_LISTED:
                raise NotImplementedHere(f"This store counts {_MOST_LISTED} names at most.")
        expired = {name async for _, name in self._list_due(now_s) if name.startswith(prefix)}
        for name, record in await self._read_all(sorted(expired)):
            if not record.is_live(now_s) and (group := group_of(name)) is not None:
                counts[group] -= 1
        return {group: count for group, count in counts.items() if count > 0}

    async def _list_due(self, now_s: int) -> AsyncIterator[tuple[Listed, bytes]]:
        """What tells of names that expire by then; they may have been prolonged since."""
        async for page in self._bucket.list(DUE.rstrip("/")):
            for listed in page:
                if listed.key >= due_folder(now_s + 1):
                    return
                due = read_due(listed.key)
                if due is not None:
                    yield listed, due[1]

    async def sweep(self, now_s: int, limit: int = 1000) -> int:
        swept = 0

        async def sweep_one(listed: Listed, name: bytes) -> bool:
            old, new = await self._swap(name, lambda _, old: None if old is None or not old.is_live(now_s) else old)
            if old is not None and new is None:
                return True
            if listed.modified_s < time.time() - _MARK_S:
                # Not one of a name that is being written at this moment.
                await self._bucket.delete(listed.key)
            return False

        due: list[tuple[Listed, bytes]] = []
        async for each in self._list_due(now_s):
            due.append(each)
            if len(due) + swept == limit:
                swept += sum(await _gather(sweep_one(*each) for each in due))
                due = []
                if swept == limit:
                    return swept
        return swept + sum(await _gather(sweep_one(*each) for each in due))

    async def sync(self) -> None:
        # What was answered is where it stays.
        pass

    async def scrub(self) -> AsyncIterator[Finding]:
        async for page in self._bucket.list(BLOBS.rstrip("/")):
            for start in range(0, len(page), _AT_ONCE // 4):
                digests = [read for each in page[start : start + _AT_ONCE // 4] if (read := _digest_of(each))]
                for digest, trouble in zip(digests, await _gather(map(self._examine, digests)), strict=True):
                    yield Finding(digest.hex(), trouble)
        async for digest, blob, uses in self._join():
            if blob is None:
                for use in uses:
                    if await self._is_used(use.key) and await self._bucket.size_of(blob_key(digest)) is None:
                        found = await self._bucket.get(use.key)
                        name = (found.data if found else b"").decode(errors="backslashreplace")
                        yield Finding(name, "it names a blob that is not there")

    async def _examine(self, digest: Digest) -> str:
        """What is wrong with a blob's bytes, "" for nothing."""
        opened = await self._bucket.open(blob_key(digest))
        if opened is None:
            return "its bytes are missing" if await self.is_named(digest) else ""
        hasher = hashlib.sha256()
        async with contextlib.aclosing(opened[1]):
            async for piece in opened[1]:
                await asyncio.to_thread(hasher.update, piece)
        return "" if hasher.digest() == digest else "its bytes are not those of its address"

    async def _join(self) -> AsyncIterator[tuple[Digest, Listed | None, list[Listed]]]:
        """Every blob with what tells of its uses, also uses without a blob: two listings, side by side."""
        blobs, uses = self._flat(BLOBS), self._flat(USES)
        blob, use = await anext(blobs, None), await anext(uses, None)
        while blob is not None or use is not None:
            mine = None if blob is None else _digest_of(blob)
            theirs = None if use is None else read_use(use.key)
            if blob is not None and mine is None:
                blob = await anext(blobs, None)
                continue
            if use is not None and theirs is None:
                use = await anext(uses, None)
                continue
            digest = min(each for each in (mine, None if theirs is None else theirs[0]) if each is not None)
            found: list[Listed] = []
            while use is not None and (theirs := read_use(use.key)) is not None and theirs[0] == digest:
                found.append(use)
                use = await anext(uses, None)
            if mine == digest:
                yield digest, blob, found
                blob = await anext(blobs, None)
            else:
                yield digest, None, found

    async def _flat(self, folder: str) -> AsyncIterator[Listed]:
        async for page in self._bucket.list(folder.rstrip("/")):
            for listed in page:
                yield listed

    async def collect(self, *, dry_run: bool = False) -> AsyncIterator[Finding]:
        async for _, name in self._list_names(b"renditions/"):
            if await self.record(original_of(name)) is None and await self.record(name) is not None:
                if not dry_run:
                    await self.unbind([name])
                yield Finding(name.decode(), "a rendition of an image that is gone")
        async for _, name in self._list_names(CODINGS):
            if not await self.is_named(coded_digest(name)) and await self.record(name) is not None:
                if not dry_run:
                    await self.unbind([name])
                yield Finding(name.decode(), "a coded copy of what is gone")
        async for listed, name in self._list_names(b""):
            if listed.size < _LEAST_RECORD_BYTES and self._is_old(listed.modified_s) and not dry_run:
                await self._finish_removal(name)
        async for digest, blob, uses in self._join():
            stale = [use.key for use in uses if self._is_old(use.modified_s) and not await self._is_used(use.key)]
            if stale and not dry_run:
                await self._bucket.delete(*stale)
            if blob is None or len(stale) < len(uses) or not self._is_old(blob.modified_s):
                continue
            if dry_run or await self._condemn(digest):
                yield Finding(digest.hex(), "a blob that nobody names")
        async for page in self._bucket.list(CONDEMNED.rstrip("/")):
            for listed in page:
                if listed.modified_s < time.time() - max(self.grace_s, 2 * _MARK_S) and not dry_run:
                    await self._bucket.delete(listed.key)

    def _is_old(self, modified_s: float) -> bool:
        return modified_s <= time.time() - self.grace_s

    async def _condemn(self, digest: Digest) -> bool:
        """Remove a blob that nobody names, unless somebody is about to. Whether it was removed."""
        began_s = time.monotonic()
        key = condemned_key(digest)
        if not await self._bucket.create(key, b"1"):
            # Another gc is at it; or was, and has left that behind.
            return False
        try:
            async for page in self._bucket.list(uses_folder(digest)):
                if page:
                    return False
            if time.monotonic() - began_s > _REMOVAL_S:
                return False
            await self._bucket.delete(blob_key(digest))
            return True
        finally:
            await self._bucket.delete(key)

    async def _finish_removal(self, name: bytes) -> None:
        """Remove the mark that an interrupted removal has left."""
        seen = await self._look(name)
        if seen.is_mark and seen.modified_s < time.time() - _MARK_S:
            # By a mark of our own first, over which nobody writes while we remove it.
            await self._remove(name, spell_name(name), seen)

    async def size(self) -> int:
        count = 0
        async for page in self._bucket.list(BLOBS.rstrip("/")):
            count += len(page)
        return count

    def measure(self) -> Measures | None:
        return None

    async def close(self) -> None:
        pass


def _read(found: Found | None) -> _Seen:
    if found is None:
        return _Seen()
    if len(found.data) < _LEAST_RECORD_BYTES:
        return _Seen(tag=found.tag, modified_s=found.modified_s)
    try:
        kept = _decode(found.data)
    except msgspec.DecodeError as exc:
        raise StoreDown("A record in the store is damaged.") from exc
    return _Seen(kept.record, kept.nonce, found.tag, found.modified_s)


def _digest_of(listed: Listed) -> Digest | None:
    return parse_blob_path(listed.key.removeprefix(BLOBS))


async def _pause(tried: int) -> None:
    """Longer each time, and for nobody as long as for another."""
    await asyncio.sleep(random.uniform(0.5, 1) * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 1.5**tried))


async def _gather(calls: "Iterable[Coroutine[Any, Any, T]]") -> list[T]:
    """All of them, some at a time. What was begun is done before the first error is raised."""
    todo = deque(enumerate(calls))
    answers: dict[int, T] = {}
    errors: list[BaseException] = []

    async def work() -> None:
        while todo:
            place, call = todo.popleft()
            if errors:
                call.close()
                continue
            try:
                answers[place] = await call
            except Exception as exc:
                errors.append(exc)

    if len(todo) == 1:
        return [await todo[0][1]]
    await asyncio.gather(*(work() for _ in range(min(_AT_ONCE, len(todo)))))
    if errors:
        raise errors[0]
    return [answers[place] for place in range(len(answers))]


async def _fill_file(pieces: AsyncIterator[bytes], size: int) -> FilePart:
    file = open_nameless()
    try:
        async for piece in pieces:
            await asyncio.to_thread(file.write, piece)
    except OSError as exc:
        file.close()
        raise translate_file_error(exc) from exc
    except BaseException:
        file.close()
        raise
    return FilePart(file, 0, size)
