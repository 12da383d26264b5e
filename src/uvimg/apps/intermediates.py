"""Intermediates: reduced versions of large originals, kept so that later renditions are made of less.

`find` gives what a plan may start from; `want` has an original's levels made some time, and nobody waits for that.
They are made one original after the other, only while workers have nothing else to do, each level of the one above.
The smallest is bound last: where it is, the others have been made, or left out for their size.
Rule: whatever is wrong with an intermediate, the answer is right: it is made of the original then.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

from uvimg.apps.renditions import close, hash_bytes, hash_content, is_whole, keep_rendition
from uvimg.core.address import Digest, image_name, rendition_name
from uvimg.core.errors import Overloaded, StoreDown, StoreFull, UvimgError
from uvimg.core.formats import media_type
from uvimg.core.message import Content
from uvimg.core.plan import Plan, Source
from uvimg.core.pyramid import (
    Level,
    PyramidRules,
    choose_kept,
    describe_level,
    find_levels,
    list_levels,
    plan_level,
    start_from_level,
)
from uvimg.imaging import Render, Rendered
from uvimg.imaging.pool import Lane, Pool
from uvimg.store import Record, Store

log = logging.getLogger("uvimg.intermediates")

_LANE: Lane = "background"
# Originals that wait for their levels, a few hundred bytes each. More come again with their next rendition.
_MAX_WANTED = 1_000
# Digests remembered: of intermediates whose bytes were held against their address, of originals not to be tried again.
_MAX_REMEMBERED = 10_000
# Before the next look at workers that had no time.
_BUSY_S = 0.5


@dataclass(frozen=True, slots=True)
class Start:
    """What a worker is given instead of the original. Whoever holds it closes its content."""

    content: Content
    source: Source
    plan: Plan


@dataclass(slots=True)
class Counts:
    """Since the start, for the metrics."""

    made: int = 0
    made_bytes: int = 0
    used: int = 0
    failed: int = 0


class Intermediates:
    def __init__(self, rules: PyramidRules, store: Store, pool: Pool) -> None:
        self._rules, self._store, self._pool = rules, store, pool
        self._wanted: OrderedDict[Digest, tuple[Record, Source]] = OrderedDict()
        self._maker: asyncio.Task[None] | None = None
        self._sound, self._hopeless = _Remembered(), _Remembered()
        self.counts = Counts()

    async def find(self, original: Record, source: Source, plan: Plan) -> Start | None:
        """The smallest intermediate that a plan may start from, None where there is none that is sound."""
        for level in find_levels(plan, source, self._rules):
            record = await self._store.record(rendition_name(original.digest, level.key))
            if record is None:
                continue
            content = await self._store.get(record.digest)
            try:
                sound = content is not None and await self._is_sound(record, content)
            except BaseException:
                close(content)
                raise
            if sound:
                assert content is not None
                self.counts.used += 1
                return Start(content, describe_level(level, source), start_from_level(plan))
            close(content)
            await self.forget(original, source, "missing or damaged")
            return None
        return None

    def want(self, original: Record, source: Source) -> None:
        """Have the levels of an original made, unless they are, or cannot be."""
        digest = original.digest
        if not list_levels(source, self._rules) or digest in self._wanted or digest in self._hopeless:
            return
        if len(self._wanted) < _MAX_WANTED:
            self._wanted[digest] = original, source
            if self._maker is None or self._maker.done():
                self._maker = asyncio.create_task(self._run())

    async def forget(self, original: Record, source: Source, reason: str) -> None:
        """Take an original's intermediates away, so that they are made anew."""
        log.warning("the intermediates of %s are %s; they will be made anew", original.digest.hex(), reason)
        try:
            await self._store.unbind(
                [rendition_name(original.digest, level.key) for level in list_levels(source, self._rules)]
            )
        except UvimgError as exc:
            log.warning("intermediates could not be removed: %s", exc.detail)

    async def stop(self) -> None:
        """Make no more. What is half made is left out; it is made another time."""
        self._wanted.clear()
        if self._maker is not None:
            self._maker.cancel()
            await asyncio.gather(self._maker, return_exceptions=True)

    async def _is_sound(self, record: Record, content: Content) -> bool:
        """Whether these are the bytes of their address: looked at once for each intermediate and process.

        A picture of the original's that is damaged can be uploaded again; of a level nobody would know.
        """
        if not is_whole(record, content):
            return False
        if record.digest not in self._sound:
            if await hash_content(content) != record.digest:
                return False
            self._sound.add(record.digest)
        return True

    # Making

    async def _run(self) -> None:
        while self._wanted:
            digest, (original, source) = next(iter(self._wanted.items()))
            try:
                await self._make(original, source)
            except Overloaded:
                await asyncio.sleep(_BUSY_S)
                continue
            except (StoreDown, StoreFull) as exc:
                # No fault of the image's: with its next rendition they are wanted again.
                self.counts.failed += 1
                log.warning("the intermediates of %s could not be kept: %s", digest.hex(), exc.detail)
            except UvimgError as exc:
                self._give_up(digest, exc.detail)
            except Exception:
                log.exception("making the intermediates of %s failed", digest.hex())
                self._give_up(digest, "a fault of ours")
            self._wanted.pop(digest, None)

    def _give_up(self, digest: Digest, reason: str) -> None:
        # The same bytes would fail again, with every rendition that is asked for.
        self._hopeless.add(digest)
        self.counts.failed += 1
        log.warning("the intermediates of %s cannot be made: %s", digest.hex(), reason)

    async def _make(self, original: Record, source: Source) -> None:
        levels = list_levels(source, self._rules)
        names = [rendition_name(original.digest, level.key) for level in levels]
        if await self._store.record(names[-1]) is not None:
            return
        if not self._pool.is_quiet:
            raise Overloaded()
        bodies: list[bytes] = []
        above = source
        for level in levels:
            content = bodies[-1] if bodies else await self._get_original(original)
            if content is None:
                return
            try:
                bodies.append(await self._render(content, level, above))
            finally:
                close(content)
            above = describe_level(level, source)
        kept = choose_kept([len(body) for body in bodies], original.size, self._rules)
        for index in kept:
            body = bodies[index]
            record = Record(await hash_bytes(body), len(body), media_type("jpeg"), int(time.time()))
            if await keep_rendition(self._store, names[index], record, body):
                self._sound.add(record.digest)
                self.counts.made += 1
                self.counts.made_bytes += len(body)
        if not kept:
            self._give_up(original.digest, "even the smallest is larger than they may be in all")

    async def _get_original(self, original: Record) -> Content | None:
        """None when it is gone: deleted, or lost, which others will tell."""
        if await self._store.record(image_name(original.digest.hex())) is None:
            return None
        content = await self._store.get(original.digest)
        if content is not None and is_whole(original, content):
            return content
        close(content)
        return None

    async def _render(self, content: Content, level: Level, above: Source) -> bytes:
        rendered, body = await self._pool.run(Render(above.format, plan_level(level, above)), content, _LANE)
        assert isinstance(rendered, Rendered)
        assert (rendered.width, rendered.height) == (level.width, level.height)
        return body


class _Remembered:
    """The last so many that were added."""

    def __init__(self) -> None:
        self._known: OrderedDict[Digest, None] = OrderedDict()

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._known

    def add(self, digest: Digest) -> None:
        self._known[digest] = None
        if len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
