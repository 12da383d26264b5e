"""One step of a change in a Redis store: a script, and what goes into it.

A change of some names is decided by the records that they have, and carried out in steps, each all at once in one
partition. A step does nothing where a name has another record by then: then it is looked at and decided again.
Rule: a record is written when its blob has a use for it, in the same step or an earlier one.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from uvimg.core.address import Digest, group_of
from uvimg.core.errors import UvimgError
from uvimg.core.redis import find_blob_partition, find_partition
from uvimg.store import Decide, Record
from uvimg.store.redis_servers import Script
from uvimg.store.spool import Spool

# A server does nothing else while it takes in or gives out a value: this much takes it 0.1 ms.
PIECE_BYTES = 262_144
VERSION_BYTES = 16

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode

# Keys: names, due, blobs; for each change its record and the due of its group; for each use and each release uses,
# blob and pieces. Arguments: how many of each; for each change the name, the version that is expected ("" for none),
# its new record ("" for none, "=" for no change) and the seconds of expiry before and after ("" for none); for each
# use digest, use, how the blob comes and it; for each release digest and use.
# Nothing is written before all has been looked at: a script cannot be undone.
# Answers: 0 and the records that the names have; 2 where a blob is missing; 1, and for each use whether its blob is
# there whole.
STEP = Script(
    """
local call = redis.call
local changes, uses, releases = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local names, due, blobs = KEYS[1], KEYS[2], KEYS[3]
for i = 1, changes do
  if call('GETRANGE', KEYS[2 * i + 2], 0, 15) ~= ARGV[5 * i] then
    local now = {0}
    for j = 1, changes do now[j + 1] = call('GET', KEYS[2 * j + 2]) or '' end
    return now
  end
end
local k, a = 3 + 2 * changes, 3 + 5 * changes
local answer = {1}
for i = 1, uses do
  local blob, pieces, how = KEYS[k + 3 * i - 1], KEYS[k + 3 * i], ARGV[a + 4 * i - 1]
  local whole = call('EXISTS', blob) == 1
  if not whole then
    local head = call('HGET', pieces, 'head')
    if how == 'pieces' then head = ARGV[a + 4 * i] end
    if head then
      local size, step = string.match(head, '(%d+) (%d+)')
      local count = call('HLEN', pieces) - call('HEXISTS', pieces, 'head')
      whole = count == math.ceil(size / step)
    end
  end
  if (how == 'pieces' or how == 'there') and not whole then return {2} end
  answer[i + 1] = whole and 1 or 0
end
for i = 1, uses do
  local used, blob, pieces = KEYS[k + 3 * i - 2], KEYS[k + 3 * i - 1], KEYS[k + 3 * i]
  local how = ARGV[a + 4 * i - 1]
  if how == 'data' then call('SET', blob, ARGV[a + 4 * i])
  elseif how == 'pieces' then call('HSET', pieces, 'head', ARGV[a + 4 * i]) end
  call('SADD', used, ARGV[a + 4 * i - 2])
  call('ZADD', blobs, 0, ARGV[a + 4 * i - 3])
end
for i = 1, changes do
  local record, group = KEYS[2 * i + 2], KEYS[2 * i + 3]
  local name, expected, new = ARGV[5 * i - 1], ARGV[5 * i], ARGV[5 * i + 1]
  local before, after = ARGV[5 * i + 2], ARGV[5 * i + 3]
  if new ~= '=' then
    if new == '' then
      call('DEL', record)
      call('ZREM', names, name)
    else
      call('SET', record, new)
      if expected == '' then call('ZADD', names, 0, name) end
    end
    if after ~= '' then
      call('ZADD', due, after, name)
      call('ZADD', group, after, name)
    elseif before ~= '' then
      call('ZREM', due, name)
      call('ZREM', group, name)
    end
  end
end
k, a = k + 3 * uses, a + 4 * uses
for i = 1, releases do
  local used, digest = KEYS[k + 3 * i - 2], ARGV[a + 2 * i - 1]
  call('SREM', used, ARGV[a + 2 * i])
  if call('SCARD', used) == 0 then
    call('UNLINK', KEYS[k + 3 * i - 1], KEYS[k + 3 * i])
    call('ZREM', blobs, digest)
  end
end
return answer
"""
)


class NoBlob(UvimgError):
    """A record was to point at a blob that neither came along nor is there."""


def make_version() -> bytes:
    """Another one every time. It begins with its second, so that what is left over can be told from what is new."""
    return int(time.time()).to_bytes(4, "big") + secrets.token_bytes(VERSION_BYTES - 4)


def read_record(raw: bytes) -> Record:
    """The record in what is kept under a name."""
    return _decode(raw[VERSION_BYTES:])


@dataclass(frozen=True, slots=True)
class Use:
    """What keeps a blob: the version of a record, and its name behind it; of no name while the blob is on its way."""

    digest: Digest
    version: bytes
    name: bytes = b""

    @property
    def member(self) -> bytes:
        return self.version + self.name


@dataclass(slots=True)
class Named:
    """A name, the record that it had when it was looked at, and the one that it is to have."""

    name: bytes
    partition: int
    version: bytes = field(default_factory=make_version)
    expected: bytes = b""
    old: Record | None = None
    new: Record | None = None
    is_done: bool = False
    # The use of its new record's blob, where that is there.
    use: Use | None = None

    @property
    def is_changed(self) -> bool:
        return self.new is not self.old


@dataclass(slots=True)
class Step:
    """What one script does in a partition. With each use goes how its blob comes, and the blob."""

    partition: int
    base: bytes
    changes: list[Named] = field(default_factory=list)
    uses: list[tuple[Use, bytes, bytes]] = field(default_factory=list)
    releases: list[Use] = field(default_factory=list)

    def spell(self) -> tuple[list[bytes], list[bytes | int]]:
        """The script's keys and arguments."""
        base = self.base
        keys = [base + b"names", base + b"due", base + b"blobs"]
        arguments: list[bytes | int] = [len(self.changes), len(self.uses), len(self.releases)]
        for each in self.changes:
            keys += (base + b"n/" + each.name, base + b"due/" + (group_of(each.name) or b""))
            new = b"=" if not each.is_changed else b"" if each.new is None else each.version + _encode(each.new)
            before, after = (b"%d" % of.expires_s if of and of.expires_s else b"" for of in (each.old, each.new))
            arguments += (each.name, each.expected, new, before, after)
        for use, how, data in self.uses:
            keys += self._blob_keys(use.digest)
            arguments += (use.digest, use.member, how, data)
        for use in self.releases:
            keys += self._blob_keys(use.digest)
            arguments += (use.digest, use.member)
        return keys, arguments

    def _blob_keys(self, digest: Digest) -> tuple[bytes, bytes, bytes]:
        return self.base + b"u/" + digest, self.base + b"b/" + digest, self.base + b"c/" + digest


class Change:
    """A change of some names, step by step. What is in `loose` in the end are uses that no record has."""

    def __init__(self, names: Sequence[bytes], decide: Decide, blob: Spool | None, bases: Sequence[bytes]) -> None:
        self._decide, self._blob, self._bases = decide, blob, bases
        self._names = {name: Named(name, find_partition(name, len(bases))) for name in names}
        self.loose: list[Use] = []

    @property
    def outcome(self) -> list[tuple[Record | None, Record | None]]:
        return [(each.old, each.new) for each in self._names.values()]

    def look(self, names: Sequence[bytes], raws: Sequence[bytes | None]) -> None:
        """Decide by what is kept under these names. All are decided before any is changed."""
        for name, raw in zip(names, raws, strict=True):
            each = self._names[name]
            each.expected = b"" if raw is None else raw[:VERSION_BYTES]
            each.old = None if raw is None else read_record(raw)
        for name in names:
            each = self._names[name]
            each.new = self._decide(name, each.old)

    def next_step(self) -> Step | None:
        """The next partition's, None when all is done."""
        left = self._left()
        wanting: dict[int, list[Named]] = {}
        for each in left:
            if self._wants_use(each):
                wanting.setdefault(self._partition_of(each.new), []).append(each)
        own = {
            each.partition for each in left if each.old is not None and self._partition_of(each.old) == each.partition
        }
        partitions = {each.partition for each in left} | wanting.keys()
        if not partitions:
            return None
        # Blobs come before what points at them; an image's own name goes after its others.
        partition = min(partitions, key=lambda each: (0 if each in wanting else 2 if each in own else 1, each))
        step = Step(partition, self._bases[partition])
        for each in wanting.get(partition, ()):
            self._add_use(step, each)
        placed = {use.name for use, _, _ in step.uses}
        for each in self._names.values():
            if each.is_done or each.partition != partition:
                continue
            if not self._wants_use(each) or each.name in placed:
                step.changes.append(each)
                if each.is_changed and each.old is not None and each.old.inline is None:
                    use = Use(each.old.digest, each.expected, each.name)
                    if find_blob_partition(use.digest, len(self._bases)) == partition:
                        step.releases.append(use)
        if len(partitions) == 1:
            # The last one also lets go of what held blobs until their records had uses.
            wanted = {each.use for each in left}
            step.releases += [
                use
                for use in self.loose
                if use not in wanted and find_blob_partition(use.digest, len(self._bases)) == partition
            ]
        return step

    def complete(self, step: Step) -> None:
        """A step has been carried out."""
        for use, _, _ in step.uses:
            if use.name:
                self._names[use.name].use = use
                self.loose.append(use)
        settled = set(step.releases)
        for each in step.changes:
            each.is_done = True
            if not each.is_changed:
                continue
            if each.use is not None and each.new is not None and each.use.digest == each.new.digest:
                settled.add(each.use)
            if each.old is not None and each.old.inline is None:
                self.loose.append(Use(each.old.digest, each.expected, each.name))
        self.loose = [use for use in self.loose if use not in settled]

    def doubt(self, step: Step) -> None:
        """Nobody knows whether a step has been carried out. The uses that its records would have must stay."""
        names = {each.name for each in step.changes}
        self.loose = [use for use in self.loose if use.name not in names]

    def _left(self) -> list[Named]:
        return [each for each in self._names.values() if each.is_changed and not each.is_done]

    def _wants_use(self, each: Named) -> bool:
        if not each.is_changed or each.new is None or each.new.inline is not None:
            return False
        return each.use is None or each.use.digest != each.new.digest

    def _partition_of(self, record: Record | None) -> int:
        assert record is not None
        return find_blob_partition(record.digest, len(self._bases))

    def _add_use(self, step: Step, each: Named) -> None:
        assert each.new is not None
        use = Use(each.new.digest, each.version, each.name)
        if self._blob is None or self._blob.digest != use.digest:
            step.uses.append((use, b"there", b""))
        elif any(known.digest == use.digest for known, _, _ in step.uses):
            step.uses.append((use, b"claim", b""))
        elif self._blob.size > PIECE_BYTES:
            step.uses.append((use, b"there", b""))
        else:
            data = self._blob.content()
            assert isinstance(data, bytes)
            step.uses.append((use, b"data", data))
