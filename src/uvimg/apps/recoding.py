"""Kept renditions coded anew, smaller, while the service has nothing else to do.

Goes through the store in order, a page of names at a time, from another place in each process. What has been done
says so in its record, so no rendition is done twice, whoever did it, also after a restart.
Rule: everybody else comes first. A job begins when all workers are idle, in the lane behind all others, and is
followed by a pause as long as itself.
"""

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass

import msgspec

from uvimg.apps.originals import read_source
from uvimg.apps.renditions import close, hash_bytes, is_whole, keep_rendition
from uvimg.core.address import original_of
from uvimg.core.errors import Overloaded, UvimgError
from uvimg.core.formats import media_type
from uvimg.core.plan import Plan, Source
from uvimg.core.recoding import plan_recoding
from uvimg.imaging import Render, Rendered
from uvimg.imaging.pool import Lane, Pool
from uvimg.store import Record, Store

log = logging.getLogger("uvimg.recoding")

_LANE: Lane = "background"
_PREFIX = b"renditions/"
# Names in one step, which takes less than a millisecond of the loop.
_PAGE = 200
# Between two looks whether the workers are idle.
_LOOK_S = 0.1
# After a job for which there was no time: longer than a burst of requests.
_BURST_S = 5.0
_LEAST_PAUSE_S = 0.2
# Between two walks, and of them the share of the time that looking at names may take.
_REST_S = 30.0
_REST_RATIO = 50
# In the record of a rendition: this has been done with it, whatever came of it.
_DONE = msgspec.msgpack.encode("coded anew")


@dataclass(slots=True)
class Counts:
    """Since the start, for the metrics: renditions that became smaller, those that did not, and bytes saved."""

    smaller: int = 0
    left: int = 0
    saved_bytes: int = 0


class Recoder:
    """`run` walks for ever, until it is cancelled, at any moment: what is half done is left as it was."""

    def __init__(self, store: Store, pool: Pool) -> None:
        self._store, self._pool = store, pool
        self._looked_s = 0.0
        self.counts = Counts()

    async def run(self) -> None:
        walked_at: int | None = None
        while True:
            self._looked_s = 0.0
            try:
                version = self._version()
                if version is None or version != walked_at:
                    await self.walk()
                    walked_at = version
            except UvimgError as exc:
                log.warning("renditions could not be coded anew: %s", exc.detail)
            except Exception:
                log.exception("coding renditions anew failed")
            await asyncio.sleep(max(_REST_S, _REST_RATIO * self._looked_s))

    def _version(self) -> int | None:
        return None if self._store.near is None else self._store.near.version()

    async def walk(self) -> None:
        """Every rendition once, from anywhere to the end and from the beginning to there."""
        smaller, saved_bytes = self.counts.smaller, self.counts.saved_bytes
        middle = _PREFIX + secrets.token_hex(32).encode()
        await self._walk_between(middle, _PREFIX + b"g")
        await self._walk_between(_PREFIX, middle)
        if smaller := self.counts.smaller - smaller:
            saved_bytes = self.counts.saved_bytes - saved_bytes
            log.info("%d renditions were coded anew and are %d bytes smaller", smaller, saved_bytes)

    async def _walk_between(self, after: bytes, end: bytes) -> None:
        while True:
            started = time.perf_counter()
            page = await self._store.scan(_PREFIX, after, _PAGE)
            self._looked_s += time.perf_counter() - started
            for name, record in page:
                if name >= end:
                    return
                await self._look_at(name, record)
                after = name
            if len(page) < _PAGE:
                return
            # Names that need nothing must not take the loop from those who wait for it.
            await asyncio.sleep(0.01)

    async def _look_at(self, name: bytes, record: Record) -> None:
        if record.facts:
            return
        started = time.perf_counter()
        original = await self._store.record(original_of(name))
        if original is None or original.digest == record.digest:
            return
        source = read_source(original)
        plan = plan_recoding(name.rpartition(b"/")[2].decode(), source, original.size)
        self._looked_s += time.perf_counter() - started
        if plan is None:
            return
        while True:
            if await self._recode(name, record, original, source, plan):
                return
            await asyncio.sleep(_BURST_S)

    async def _recode(self, name: bytes, record: Record, original: Record, source: Source, plan: Plan) -> bool:
        """Whether that is done: False when there was no time for it."""
        await self._wait_until_idle()
        content = await self._store.get(original.digest)
        if content is None or not is_whole(original, content):
            close(content)
            return True
        started = time.perf_counter()
        try:
            rendered, body = await self._pool.run(Render(source.format, plan), content, _LANE)
        except Overloaded:
            return False
        except UvimgError as exc:
            log.warning("a rendition could not be coded anew, and is left as it is: %s", exc.detail)
            rendered, body = None, b""
        finally:
            close(content)
        await self._replace(name, record, rendered, body)
        await asyncio.sleep(max(_LEAST_PAUSE_S, time.perf_counter() - started))
        return True

    async def _replace(self, name: bytes, record: Record, rendered: object, body: bytes) -> None:
        """Keep the smaller one of both, and that this has been done."""
        if await self._store.record(name) != record:
            # Deleted meanwhile, or another process was here.
            return
        if isinstance(rendered, Rendered) and not rendered.as_original and len(body) < record.size:
            type = media_type(rendered.format)
            smaller = Record(await hash_bytes(body), len(body), type, int(time.time()), _DONE)
            if await keep_rendition(self._store, name, smaller, body):
                self.counts.smaller += 1
                self.counts.saved_bytes += record.size - len(body)
            return
        if await keep_rendition(self._store, name, msgspec.structs.replace(record, facts=_DONE), None):
            self.counts.left += 1

    async def _wait_until_idle(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._pool.is_quiet and not self._pool.workers[0]:
                return
