"""A store in Redis, in a Redis Cluster, or in what speaks their protocol (Valkey, Kvrocks).

Every change is one script (redis_step.py): it does nothing where a name has another record than the one that it was
decided by, and then it is decided again. So all names of a partition change at once; on one server that is all names
there are. On a cluster the names of one call may lie in several partitions (core/redis.py): these change one after the
other, a blob's own before the others when it comes and after them when it goes, and a lease keeps others away from
that image meanwhile. Whoever dies in the middle leaves an image under one of its names, or a blob to collect.

A blob stays as long as it has uses: one for each record that points at it, told apart by the record's version, so
that adding or removing one twice does no harm. A use is there before its record, and goes after it.
What is acknowledged is as durable as the server makes it (appendfsync): this asks for nothing more.

Keys of a partition, behind its prefix and tag:
    n/NAME         version (16 bytes, 4 of them its second) and record
    names          all names, in order          due, due/GROUP  names that expire, by their second
    b/DIGEST       a blob in one piece          c/DIGEST        one in several: a hash of pieces, and `head`
    u/DIGEST       its uses: version and name   blobs           digests of all that have a use
    l/NAME         the lease on an image, by the name of its digest
"""

import asyncio
import contextlib
import hashlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from uvimg.core.address import VALUES, Digest, group_of
from uvimg.core.errors import Overloaded, StoreDown, UvimgError
from uvimg.core.message import Content, FilePart
from uvimg.core.redis import find_blob_partition, find_partition, find_partitions, name_after, read_redis_url
from uvimg.store import MAX_NAME_BYTES, Decide, Finding, Incoming, Measures, Record
from uvimg.store.guard import Guard
from uvimg.store.redis_servers import Command, Script, open_servers, run_script
from uvimg.store.redis_step import (
    PIECE_BYTES,
    STEP,
    VERSION_BYTES,
    Change,
    NoBlob,
    Step,
    Use,
    make_version,
    read_record,
)
from uvimg.store.spool import Spool, open_nameless, translate_file_error, write_all
from uvimg.store.strays import find_strays

# Up to here a blob is given out as bytes, above as a file.
_MOST_HELD_BYTES = 1 << 20
# Names or blobs that are looked at in one go.
_PAGE = 500
# Names that are taken away in one script, which stops the server for a millisecond.
_SWEPT_AT_ONCE = 200
# From an uploader who has been silent for so long nothing more comes.
_GRACE_S = 900
# How often it is decided again, where other processes change the same names all the time.
_MOST_TRIES = 60
# An image's names change in a few calls, each of which may take all its time: whoever has not stopped in the middle
# is done before the lease is, and whoever has keeps others waiting no longer.
_LEASED_CALLS = 5
# A record begins with its digest, behind the version and three bytes of msgpack (tests/test_redis.py).
_LOOK = Script(
    """
local answer = redis.call('MGET', unpack(KEYS))
local last = answer[#KEYS]
if last then
  local blob = ARGV[1] .. 'b/' .. string.sub(last, 20, 51)
  if redis.call('STRLEN', blob) <= 65536 then answer[#KEYS + 1] = redis.call('GET', blob) end
end
return answer
"""
)
_END_LEASE = Script("if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end")


class RedisStore:
    """Nothing is connected before the first call, in whose event loop it lives from then on."""

    near = None

    def __init__(self, url: str, timeout_s: float) -> None:
        place = read_redis_url(url)
        self._partitions = place.partitions
        self._bases = [place.base(partition) for partition in range(place.partitions)]
        self._servers = open_servers(place, timeout_s)
        self._lease_s = _LEASED_CALLS * timeout_s
        # Of names that are being changed: in one process one after the other, else all but one would be in vain.
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self.grace_s = _GRACE_S

    @property
    def guards(self) -> Sequence[Guard]:
        return self._servers.guards

    async def close(self) -> None:
        await self._servers.close()

    # Reading

    async def record(self, name: bytes) -> Record | None:
        partition = find_partition(name, self._partitions)
        raw = await self._servers.ask(partition, "GET", self._bases[partition] + b"n/" + name)
        return None if raw is None else read_record(raw)

    async def get(self, digest: Digest) -> Content | None:
        partition = find_blob_partition(digest, self._partitions)
        base = self._bases[partition]
        data: bytes | None = await self._servers.ask(partition, "GET", base + b"b/" + digest, is_long=True)
        if data is not None:
            return data
        pieces = base + b"c/" + digest
        head: bytes | None = await self._servers.ask(partition, "HGET", pieces, "head")
        if head is None:
            return None
        size, step = map(int, head.split())
        commands: list[Command] = [("HGET", pieces, number) for number in range(-(-size // step))]
        if size <= _MOST_HELD_BYTES:
            found = await self._servers.ask_all([(partition, command) for command in commands])
            return None if None in found else b"".join(found)
        return await self._fetch(partition, commands, size)

    async def _fetch(self, partition: int, commands: Sequence[Command], size: int) -> FilePart | None:
        """The pieces of a blob as a file; None where its last name goes meanwhile."""
        try:
            file = open_nameless()
            try:
                for command in commands:
                    piece = await self._servers.ask(partition, *command, is_long=True)
                    if piece is None:
                        file.close()
                        return None
                    await write_all(file, piece)
            except BaseException:
                file.close()
                raise
        except OSError as exc:
            raise translate_file_error(exc) from exc
        return FilePart(file, 0, size)

    async def look(self, names: Sequence[bytes]) -> tuple[list[Record | None], bytes | None]:
        """See `Look`. On a cluster record and blob lie in different partitions, so the bytes do not come along."""
        if self._partitions > 1:
            raws, data = await self._read_raw(names), None
        else:
            base = self._bases[0]
            answer = await run_script(self._servers, 0, _LOOK, [base + b"n/" + name for name in names], [base])
            raws, data = answer[: len(names)], answer[len(names)] if len(answer) > len(names) else None
        return [None if raw is None else read_record(raw) for raw in raws], data

    async def is_named(self, digest: Digest) -> bool:
        partition = find_blob_partition(digest, self._partitions)
        base = self._bases[partition]
        there, head = await self._servers.ask_all(
            [(partition, ("EXISTS", base + b"b/" + digest)), (partition, ("HEXISTS", base + b"c/" + digest, "head"))]
        )
        return bool(there or head)

    async def size(self) -> int:
        return sum(await self._ask_each(range(self._partitions), lambda base: ("ZCARD", base + b"blobs")))

    def measure(self) -> Measures | None:
        return None

    async def sync(self) -> None:
        """Nothing: how soon what was answered is on a disk is the server's own setting (appendfsync)."""

    async def scan(
        self, prefix: bytes, after: bytes = b"", limit: int = 1000, *, backward: bool = False
    ) -> list[tuple[bytes, Record]]:
        found: list[tuple[bytes, Record]] = []
        while len(found) < limit:
            wanted = limit - len(found)
            names = await self._scan_names(prefix, after, wanted, backward)
            raws = await self._read_raw(names)
            # Some may have gone since their names were read; a page that is not full would be taken for the last.
            found += [(name, read_record(raw)) for name, raw in zip(names, raws, strict=True) if raw is not None]
            if len(names) < wanted:
                break
            after = names[-1]
        return found

    async def _scan_names(self, prefix: bytes, after: bytes, limit: int, backward: bool) -> list[bytes]:
        """The next names, out of all partitions that may have some."""
        places = dict.fromkeys(find_partitions(prefix, self._partitions), after)
        # Of each partition half as much again as its share; one that has given so many is asked for more if need be.
        share = limit if len(places) == 1 else min(limit, limit * 3 // (2 * len(places)) + 4)
        found: list[bytes] = []
        while places:
            commands = [
                (partition, _range_command(self._bases[partition] + b"names", prefix, place, share, backward))
                for partition, place in places.items()
            ]
            pages = await self._servers.ask_all(commands)
            found = sorted((*found, *(name for page in pages for name in page)), reverse=backward)[:limit]
            # What would come behind the last one that is wanted is left where it is.
            is_full, last = len(found) == limit, found[-1] if found else b""
            places = {
                partition: page[-1]
                for partition, page in zip(places, pages, strict=True)
                if len(page) == share and not (is_full and (page[-1] <= last if backward else page[-1] >= last))
            }
        return found

    async def _ask_each(self, partitions: Iterable[int], command: Callable[[bytes], Command]) -> list[Any]:
        return await self._servers.ask_all([(partition, command(self._bases[partition])) for partition in partitions])

    async def _read_raw(self, names: Sequence[bytes]) -> list[bytes | None]:
        """What is kept under each name: of one partition at one moment."""
        shares: dict[int, list[int]] = {}
        for index, name in enumerate(names):
            shares.setdefault(find_partition(name, self._partitions), []).append(index)
        answers = await self._servers.ask_all(
            [
                (partition, ("MGET", *(self._bases[partition] + b"n/" + names[index] for index in indices)))
                for partition, indices in shares.items()
            ]
        )
        raws: list[bytes | None] = [None] * len(names)
        for indices, answer in zip(shares.values(), answers, strict=True):
            for index, raw in zip(indices, answer, strict=True):
                raws[index] = raw
        return raws

    async def counts(self, prefix: bytes, now_s: int) -> dict[bytes, int]:
        counts: dict[bytes, int] = {}
        if not prefix.startswith(VALUES):
            assert VALUES.startswith(prefix), "nothing but values is counted"
            prefix = VALUES
        # Where the prefix is that of one group it is asked for at once, else from one to the next.
        group = prefix if b"/" in prefix[len(VALUES) :] else await self._find_group(prefix, b"")
        while group is not None:
            await self._count(group, now_s, counts)
            # Behind all names of this group.
            group = None if group == prefix else await self._find_group(prefix, group.ljust(MAX_NAME_BYTES, b"\xff"))
        return counts

    async def _find_group(self, prefix: bytes, after: bytes) -> bytes | None:
        names = await self._scan_names(prefix, after, 1, backward=False)
        return group_of(names[0]) if names else None

    async def _count(self, group: bytes, now_s: int, counts: dict[bytes, int]) -> None:
        end = name_after(group)
        assert end is not None
        commands: list[tuple[int, Command]] = []
        for partition, base in enumerate(self._bases):
            commands.append((partition, ("ZLEXCOUNT", base + b"names", b"[" + group, b"(" + end)))
            commands.append((partition, ("ZCOUNT", base + b"due/" + group, "-inf", now_s)))
        found = await self._servers.ask_all(commands)
        if count := sum(found[::2]) - sum(found[1::2]):
            counts[group] = count

    # Changing

    def incoming(self, watch: Callable[[bytes], object] | None = None) -> Spool:
        return Spool(watch)

    async def bind(
        self, names: Sequence[bytes], record: Record, blob: Incoming | None = None, *, replace: bool = True
    ) -> list[Record | None]:
        once, kept = list(dict.fromkeys(names)), dict[bytes, Record | None]()

        def decide(name: bytes, old: Record | None) -> Record | None:
            kept[name] = None if replace else old
            if old is None or replace:
                return record
            # An equal one is written again with the blob that comes along: the one that is there may be damaged.
            return msgspec.structs.replace(old) if blob is not None and old.digest == record.digest else old

        try:
            # Most that is bound is new: taking that for granted saves a look.
            changed = await self._change(once, decide, blob, taken_for_new=True, leased=names[0])
        except NoBlob:
            return [kept[name] for name in names]
        now = dict(zip(once, (new for _, new in changed), strict=True))
        return [now[name] for name in names]

    async def unbind(self, names: Sequence[bytes], digest: Digest | None = None) -> list[Record | None]:
        def decide(_: bytes, old: Record | None) -> Record | None:
            return None if old is None or digest in (None, old.digest) else old

        once = list(dict.fromkeys(names))
        changed = await self._change(once, decide, None, leased=names[0] if names else b"")
        taken = dict(zip(once, (old if new is None else None for old, new in changed), strict=True))
        return [taken.pop(name, None) for name in names]

    async def change(
        self, names: Sequence[bytes], decide: Decide, blob: Incoming | None = None
    ) -> list[tuple[Record | None, Record | None]]:
        assert len(set(names)) == len(names)
        return await self._change(names, decide, blob)

    async def sweep(self, now_s: int, limit: int = 1000) -> int:
        def expire(_: bytes, old: Record | None) -> Record | None:
            return None if old is None or not old.is_live(now_s) else old

        pages = await self._ask_each(
            range(self._partitions),
            lambda base: ("ZRANGEBYSCORE", base + b"due", "-inf", now_s, "LIMIT", 0, limit),
        )
        names = [name for page in pages for name in page][:limit]
        swept = 0
        for start in range(0, len(names), _SWEPT_AT_ONCE):
            changed = await self._change(names[start : start + _SWEPT_AT_ONCE], expire, None)
            swept += sum(old is not None and new is None for old, new in changed)
        return swept

    async def _change(
        self,
        names: Sequence[bytes],
        decide: Decide,
        blob: Incoming | None,
        *,
        taken_for_new: bool = False,
        leased: bytes = b"",
    ) -> list[tuple[Record | None, Record | None]]:
        """`taken_for_new` saves a look where names are; `leased` is leased where they are not in one partition."""
        assert all(0 < len(name) <= MAX_NAME_BYTES for name in names)
        assert blob is None or isinstance(blob, Spool)
        if not names:
            return []
        change = Change(names, decide, blob, self._bases)
        try:
            if blob is not None and blob.size > PIECE_BYTES:
                await self._carry(change, blob)
            async with contextlib.AsyncExitStack() as stack:
                for turn in [self._turns.setdefault(name, asyncio.Lock()) for name in sorted(names)]:
                    await stack.enter_async_context(turn)
                if leased and len({find_partition(name, self._partitions) for name in names}) > 1:
                    await stack.enter_async_context(self._lease(leased))
                change.look(names, [None] * len(names) if taken_for_new else await self._read_raw(names))
                await self._carry_out(change)
        finally:
            # What has a record by now has a use of its own.
            await self._release(change.loose)
        return change.outcome

    async def _carry_out(self, change: Change) -> None:
        tries = 0
        while (step := change.next_step()) is not None:
            try:
                answer = await self._run(step)
            except BaseException:
                change.doubt(step)
                raise
            if answer[0] == 1:
                change.complete(step)
            elif answer[0] == 2:
                raise NoBlob("A record has no blob to point at.")
            else:
                tries += 1
                if tries == _MOST_TRIES:
                    raise Overloaded()
                if tries > 1:
                    await asyncio.sleep(random.random() * min(0.001 * 2 ** min(tries, 5), 0.03))
                change.look([each.name for each in step.changes], [raw or None for raw in answer[1:]])

    async def _carry(self, change: Change, blob: Spool) -> None:
        """See to it that a blob in pieces is there, under a use without a name that holds it until others do."""
        use = Use(blob.digest, make_version())
        change.loose.append(use)
        partition = find_blob_partition(blob.digest, self._partitions)
        claim = Step(partition, self._bases[partition], uses=[(use, b"claim", b"")])
        _, is_whole = await self._run(claim)
        if is_whole:
            return
        pieces = self._bases[partition] + b"c/" + blob.digest
        for number, start in enumerate(range(0, blob.size, PIECE_BYTES)):
            data = await blob.part(start, PIECE_BYTES)
            await self._servers.ask(partition, "HSET", pieces, number, data)
        head = b"%d %d" % (blob.size, PIECE_BYTES)
        answer = await self._run(Step(partition, self._bases[partition], uses=[(use, b"pieces", head)]))
        if answer[0] != 1:
            raise StoreDown("The store has lost a part of this while it came.")

    async def _release(self, uses: Sequence[Use]) -> None:
        """Let go of uses that no record has. Where that fails they are collected some day: it fails nobody."""
        steps: dict[int, Step] = {}
        for use in uses:
            partition = find_blob_partition(use.digest, self._partitions)
            steps.setdefault(partition, Step(partition, self._bases[partition])).releases.append(use)
        with contextlib.suppress(UvimgError):
            for step in steps.values():
                await self._run(step)

    async def _run(self, step: Step) -> list[Any]:
        keys, arguments = step.spell()
        answer: list[Any] = await run_script(self._servers, step.partition, STEP, keys, arguments)
        return answer

    @contextlib.asynccontextmanager
    async def _lease(self, image: bytes) -> AsyncIterator[None]:
        """Nobody else changes an image's names, which lie in several partitions, meanwhile."""
        partition = find_partition(image, self._partitions)
        key, token = self._bases[partition] + b"l/" + image, secrets.token_bytes(16)
        deadline, lease_ms = time.monotonic() + 1.5 * self._lease_s, int(1000 * self._lease_s)
        while not await self._servers.ask(partition, "SET", key, token, "NX", "PX", lease_ms):
            if time.monotonic() > deadline:
                raise Overloaded()
            await asyncio.sleep(0.005 + random.random() * 0.01)
        try:
            yield
        finally:
            with contextlib.suppress(UvimgError):
                await run_script(self._servers, partition, _END_LEASE, [key], [token])

    # Long walks, a page at a time

    async def scrub(self) -> AsyncIterator[Finding]:
        for partition in range(self._partitions):
            async for digests in self._walk(partition, b"blobs"):
                for digest in digests:
                    trouble = await self._examine(partition, digest)
                    if trouble is not None:
                        yield Finding(digest.hex(), trouble)
        for partition in range(self._partitions):
            async for names in self._walk(partition, b"names"):
                for name, trouble in await self._examine_names(names):
                    yield Finding(name.decode(errors="backslashreplace"), trouble)

    async def _walk(self, partition: int, index: bytes) -> AsyncIterator[list[bytes]]:
        """All that is in an index, in pages."""
        last = b""
        key = self._bases[partition] + index
        while page := await self._servers.ask(partition, *_range_command(key, b"", last, _PAGE, False), is_long=True):
            yield page
            last = page[-1]

    async def _examine(self, partition: int, digest: Digest) -> str | None:
        """What is wrong with a blob, "" for nothing; None for one that is on its way in or out."""
        content = await self.get(digest)
        if content is None:
            if await self._is_used(partition, digest):
                return "its bytes are missing"
            return None
        if isinstance(content, bytes):
            found = await asyncio.to_thread(lambda: hashlib.sha256(content).digest())
        else:
            with content.file as file:
                file.seek(content.start)
                found = await asyncio.to_thread(lambda: hashlib.file_digest(file, "sha256").digest())  # type: ignore[arg-type]
        return "" if found == digest else "its bytes are not those of its address"

    async def _is_used(self, partition: int, digest: Digest) -> bool:
        """Whether a record points at a blob, of those that have a use for it."""
        async for uses in self._walk_uses(partition, digest):
            if any(use.name for use in uses) and any(await self._are_held([use for use in uses if use.name])):
                return True
        return False

    async def _walk_uses(self, partition: int, digest: Digest) -> AsyncIterator[list[Use]]:
        cursor: bytes | int = 0
        while True:
            key = self._bases[partition] + b"u/" + digest
            cursor, members = await self._servers.ask(partition, "SSCAN", key, cursor, "COUNT", _PAGE, is_long=True)
            yield [Use(digest, member[:VERSION_BYTES], member[VERSION_BYTES:]) for member in members]
            if cursor == b"0":
                return

    async def _are_held(self, uses: Sequence[Use]) -> list[bool]:
        """Whether the records still are those that these uses are for."""
        commands: list[tuple[int, Command]] = []
        for use in uses:
            partition = find_partition(use.name, self._partitions)
            key = self._bases[partition] + b"n/" + use.name
            commands.append((partition, ("GETRANGE", key, 0, VERSION_BYTES - 1)))
        versions = await self._servers.ask_all(commands)
        return [bool(use.name) and version == use.version for use, version in zip(uses, versions, strict=True)]

    async def _examine_names(self, names: Sequence[bytes]) -> list[tuple[bytes, str]]:
        """What is wrong with some of these names."""
        raws = await self._read_raw(names)
        troubles: list[tuple[bytes, str]] = []
        pointing: list[tuple[bytes, bytes, Use]] = []
        for name, raw in zip(names, raws, strict=True):
            if raw is None:
                continue
            record = read_record(raw)
            if record.inline is None:
                pointing.append((name, raw, Use(record.digest, raw[:VERSION_BYTES], name)))
            elif hashlib.sha256(record.inline).digest() != record.digest:
                troubles.append((name, "its bytes are not those of its digest"))
        commands: list[tuple[int, Command]] = []
        for _, _, use in pointing:
            partition = find_blob_partition(use.digest, self._partitions)
            key = self._bases[partition] + b"u/" + use.digest
            commands.append((partition, ("SISMEMBER", key, use.member)))
        used = await self._servers.ask_all(commands)
        for (name, raw, use), is_used in zip(pointing, used, strict=True):
            if is_used and await self.is_named(use.digest):
                continue
            # It may have been replaced since, and its blob with it.
            if await self._read_raw([name]) == [raw]:
                troubles.append((name, "it names a blob that is not there"))
        return troubles

    async def collect(self, *, dry_run: bool = False) -> AsyncIterator[Finding]:
        async for finding in find_strays(self, dry_run=dry_run):
            yield finding
        for partition in range(self._partitions):
            async for digests in self._walk(partition, b"blobs"):
                for digest in digests:
                    if await self._collect_uses(partition, digest, dry_run=dry_run):
                        yield Finding(digest.hex(), "what an interrupted change has left")

    async def _collect_uses(self, partition: int, digest: Digest, *, dry_run: bool) -> int:
        """Let go of the uses of a blob that no record has any more, and no uploader will have; how many it were."""
        count = 0
        now_s = time.time()
        async for uses in self._walk_uses(partition, digest):
            old = [use for use in uses if int.from_bytes(use.version[:4], "big") + self.grace_s <= now_s]
            left = [use for use, is_held in zip(old, await self._are_held(old), strict=True) if not is_held]
            count += len(left)
            if left and not dry_run:
                await self._run(Step(partition, self._bases[partition], releases=left))
        return count


def _range_command(key: bytes, prefix: bytes, after: bytes, limit: int, backward: bool) -> Command:
    """Up to so many members of an index that begin with `prefix`, behind `after` (backward before it; "" for all)."""
    end = name_after(prefix)
    low, high = b"[" + prefix if prefix else b"-", b"(" + end if end else b"+"
    if backward:
        # Where it is behind all names with the prefix it says nothing.
        if after and (end is None or after < end):
            high = b"(" + after
        return "ZREVRANGEBYLEX", key, high, low, "LIMIT", 0, limit
    if after and after >= prefix:
        low = b"(" + after
    return "ZRANGEBYLEX", key, low, high, "LIMIT", 0, limit
