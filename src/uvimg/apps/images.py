"""The images app: an original once, any rendition of it, in zimg's dialect and in today's.

A rendition's name is the SHA-256 of its original and the key of its plan. Renditions are kept, and may be lost: they
are made again.
"""

import asyncio
import contextlib
import html
import logging
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

import msgspec
from cachetools import FIFOCache, LRUCache

from uvimg.apps.codings import Codings
from uvimg.apps.intermediates import Intermediates
from uvimg.apps.originals import Facts, Originals, Staged, Stored, read_facts, read_source
from uvimg.apps.renditions import close, find_bytes, hash_bytes, is_whole, keep_rendition, without_bytes
from uvimg.apps.streaming import stream_blob
from uvimg.cache import Cache
from uvimg.core.access import AccessRules, Network, find_client, is_cross_site, is_rebound
from uvimg.core.address import Digest, image_name, rendition_name, renditions_prefix
from uvimg.core.cost import choose_lane
from uvimg.core.errors import (
    BadParameter,
    BadRequest,
    DigestConflict,
    Forbidden,
    MethodNotAllowed,
    NoLength,
    NotFound,
    NotImplementedHere,
    RangeNotSatisfiable,
    TooLarge,
    Undecodable,
    UnsupportedType,
    UvimgError,
)
from uvimg.core.form import FormReader, PartBegins, PartData, PartEnds
from uvimg.core.formats import Format, media_type
from uvimg.core.message import Content, FilePart, Pieces, Request, Response
from uvimg.core.negotiate import Failed, NotModified, Part, Unsatisfiable, Whole, choose_answer, http_date
from uvimg.core.params import Params
from uvimg.core.plan import Plan, Rules, Source, make_plan
from uvimg.core.route import Describe, Options, Page, Query, Remove, Show, Upload, face_of, read_fields, route
from uvimg.core.types import Types
from uvimg.imaging import Limits, Planned, Rendered, RenderType, rendering
from uvimg.imaging.pool import Pool
from uvimg.store import Near, Record, Store, find_look

log = logging.getLogger("uvimg.images")

_SVG = "image/svg+xml"
# A browser must not run anything that an uploaded svg holds (nor a type that it guesses).
_LOCKED_DOWN = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
_PAGE_POLICY = (
    "default-src 'none'; img-src 'self' blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class ImagesSettings:
    """The configuration as this app sees it. `max_bytes` bounds one upload's body.

    `script_tag` is another one for another script, or for other rules.
    """

    rules: Rules
    limits: Limits
    formats: tuple[Format, ...]
    max_bytes: int
    save_new: int
    recode: bool
    disable_args: bool
    types: Types
    script_tag: str
    upload_rule: AccessRules
    download_rule: AccessRules
    admin_rule: AccessRules
    trusted_proxies: tuple[Network, ...]
    image_headers: tuple[tuple[str, str], ...]
    port: int
    index_page: bytes
    admin_page: bytes


@dataclass(frozen=True, slots=True)
class Rendition:
    """A rendition's record, and its bytes where they are at hand. Not every one `lasts` longer than its answer."""

    record: Record
    body: bytes | None
    lasts: bool = True


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What came along with the record of an original: that of a rendition, and perhaps the bytes of the last one."""

    name: bytes = b""
    record: Record | None = None
    body: bytes | None = None


_NOTHING_AHEAD = _Ahead()


class _CodedAnew(Exception):
    """A rendition has another blob by now, or none."""


_encode_json = msgspec.json.Encoder().encode

# What a request means is a pure function of method, path and query, and most requests repeat one. Long ones
# are an attack on the memory, or a mistake.
_LONGEST_KNOWN = 256
# What a script said of a type, for images of equal facts.
_MOST_ASKED = 4096
# Originals of which it is guessed what will be asked for next.
_MOST_KNOWN = 8192
_NO_TYPE = "There is no such type of this image."

# Renditions on their way into a slow store, held in memory meanwhile; more are not kept.
_MAX_KEEPING_BYTES = 256 << 20


class Images:
    """See `App` in service.py for its doors."""

    name = "images"

    def __init__(
        self,
        settings: ImagesSettings,
        store: Store,
        pool: Pool,
        cache: Cache[tuple[Digest, str], Rendition],
        intermediates: Intermediates,
        codings: Codings,
    ) -> None:
        self._settings, self._codings = settings, codings
        self._originals = Originals(store, pool, settings.limits, settings.formats)
        self._store, self._pool, self._cache, self._intermediates = store, pool, cache, intermediates
        self._keeping: set[asyncio.Task[None]] = set()
        self._keeping_bytes = 0

        @lru_cache(8192)
        def plan(params: Params, digest: Digest, facts: bytes, size: int) -> tuple[Plan, str]:
            made = make_plan(params, read_facts(facts).source, size, settings.rules)
            return made, made.key

        @lru_cache(4096)
        def known_route(method: str, path: str, query: str) -> Query:
            return route(method, path, query, settings.types)

        self._plan, self._known_route = plan, known_route
        self._look = find_look(store)
        # Records of originals as they were when last seen, by their ids. To find the one that was asked for least
        # would cost more than the look that it saves.
        self._known: FIFOCache[str, Record] = FIFOCache(_MOST_KNOWN)
        # Plans of types, and whether renditions of them last; None where there is no such type.
        self._asked: LRUCache[tuple[str, Source], tuple[Plan, bool] | None] = LRUCache(_MOST_ASKED)

    async def drain(self) -> None:
        """Wait until every rendition that is on its way into the store is there."""
        await asyncio.gather(*self._keeping, return_exceptions=True)

    def _route(self, request: Request) -> Query:
        if len(request.target) <= _LONGEST_KNOWN:
            return self._known_route(request.method, request.path, request.query)
        return route(request.method, request.path, request.query, self._settings.types)

    def _name_route(self, request: Request) -> str:
        """What the metrics call that which was asked for; "none" where there is no such thing."""
        try:
            return self._route(request).name
        except UvimgError:
            return "none"

    # The two doors

    def try_now(self, request: Request) -> Response | None:
        query = self._route(request)
        response = None
        match query:
            case Show() if self._store.near is not None:
                self._admit(request, self._settings.download_rule)
                response = self._show_now(request, query)
                if response is not None and self._settings.download_rule.allows_everybody:
                    response.lasts = "while the store is unchanged"
            case Page() | Options():
                response = self._answer_page(request, query)
        if response is not None:
            response.route = query.name
        return response

    async def handle(self, request: Request) -> Response:
        query = self._route(request)
        response = await self._answer(request, query)
        response.route = query.name
        return response

    async def _answer(self, request: Request, query: Query) -> Response:
        match query:
            case Show():
                self._admit(request, self._settings.download_rule)
                return await self._show(request, query)
            case Describe():
                self._admit(request, self._settings.download_rule)
                return await self._describe(request, query)
            case Upload():
                self._admit(request, self._settings.upload_rule)
                return await self._upload(request)
            case Remove():
                self._admit(request, self._settings.admin_rule)
                return await self._remove(request, query)
            case Page() | Options():
                return self._answer_page(request, query)

    def refuse(self, request: Request, error: UvimgError) -> Response:
        """An error as this path's dialect tells it. The body of the request may not have been read."""
        response = _refuse(request, error)
        response.route = self._name_route(request)
        response.headers.update(error.headers)
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    def _admit(self, request: Request, rules: AccessRules) -> None:
        if rules.allows_everybody:
            return
        if not rules.allows(find_client(request.peer, request.headers, self._settings.trusted_proxies)):
            raise Forbidden()

    # Showing

    def _show_now(self, request: Request, query: Show) -> Response | None:
        near = self._store.near
        assert near is not None
        original = near.record(image_name(query.image_id))
        if original is None:
            raise NotFound()
        params = self._effective(query)
        if params.original:
            if original.type == _SVG:
                return self._codings.show_now(near, request, original, self._svg_headers())
            answer = self._choose_answer(request, original)
            if isinstance(answer, Response):
                return answer
            return self._answer_at_hand(answer, original, near.get(original.digest), "original")
        _, key = self._choose(query, params, original)
        name = rendition_name(original.digest, key)
        found, origin = self._peek((original.digest, key), name, near), "cache"
        if found is None:
            record = near.record(name)
            if record is None:
                return None
            found, origin = Rendition(record, None), "store"
        answer = self._choose_answer(request, found.record)
        if isinstance(answer, Response):
            return answer
        body = found.body if found.body is not None else near.get(found.record.digest)
        return self._answer_at_hand(answer, found.record, body, origin)

    def _peek(self, key: tuple[Digest, str], name: bytes, near: Near) -> Rendition | None:
        """A rendition that is at hand, and has not been coded anew by any process."""
        found = self._cache.peek(key)
        if found is None or not self._settings.recode:
            return found
        record = near.record(name)
        if record is None or record.digest == found.record.digest:
            return found
        self._cache.forget(lambda known: known == key)
        return None

    async def _show(self, request: Request, query: Show) -> Response:
        original, ahead = await self._look_ahead(request, query)
        if original is None:
            raise NotFound()
        params = self._effective(query)
        if params.original and original.type == _SVG:
            # The one image that is text.
            shown = await self._codings.show(request, original, self._svg_headers())
            if shown is not None:
                return shown
        record, body, origin, key = original, ahead.body, "original", ""
        if not params.original:
            plan, key = self._choose(query, params, original)
            # Unless it is our own maker that goes, it is that of another request.
            origin = "shared"

            async def make() -> Rendition:
                nonlocal origin
                rendition, origin = await self._find_or_make(query, original, plan, key, ahead)
                return rendition

            rendition = self._take_ahead(original, key, ahead)
            if rendition is None:
                rendition = await self._cache.get((original.digest, key), make)
            else:
                origin = "store"
            record, body = rendition.record, rendition.body
        answer = self._choose_answer(request, record)
        if isinstance(answer, Response):
            return answer
        try:
            pieces = None if body else await stream_blob(self._store, request, record, answer)
            content = body or pieces or await self._fetch(original, record, key)
        except _CodedAnew:
            # Since it was found, and once only.
            return await self._show(request, query)
        return self._answer_image(answer, record, content, origin)

    async def _look_ahead(self, request: Request, query: Show) -> tuple[Record | None, _Ahead]:
        """The record of an original, and what will be wanted next where one way to the store brings both.

        Which rendition that is follows from the original's record, and which that is from what it was before: it is a
        guess, so whoever takes what is ahead looks at its name.
        """
        name = image_name(query.image_id)
        if self._look is None:
            return await self._store.record(name), _NOTHING_AHEAD
        params, ahead = self._effective(query), _NOTHING_AHEAD
        if params.original and "if-none-match" not in request.headers:
            (original,), body = await self._look([name])
            if original is not None and body is not None and is_whole(original, body):
                ahead = _Ahead(body=body)
            return original, ahead
        wanted = None if params.original else self._guess_rendition(query, params)
        if wanted is not None:
            (original, record), body = await self._look([name, wanted])
            ahead = _Ahead(wanted, record, body)
        else:
            original = await self._store.record(name)
        if original is None:
            self._known.pop(query.image_id, None)
        else:
            self._known[query.image_id] = original
        return original, ahead

    def _guess_rendition(self, query: Show, params: Params) -> bytes | None:
        """The name of what will be wanted if the original is still what it was; None where that says nothing."""
        known = self._known.get(query.image_id)
        if known is None:
            return None
        try:
            _, key = self._choose(query, params, known)
        except BadParameter:
            # Whether it is one is for the original to say that is there by now, if there is any.
            return None
        return None if self._cache.peek((known.digest, key)) is not None else rendition_name(known.digest, key)

    def _effective(self, query: Show) -> Params:
        return Params() if self._settings.disable_args and not query.typed else query.params

    def _choose(self, query: Show, params: Params, original: Record) -> tuple[Plan | None, str]:
        """What is to be done, None where a script has to say it first, and the rendition's key."""
        if query.script:
            return None, f"type-{query.script}-{self._settings.script_tag}"
        return self._plan(params, original.digest, original.facts, original.size)

    def _answer_at_hand(
        self, answer: Whole | Part, record: Record, body: Content | None, origin: str
    ) -> Response | None:
        """The answer when the body is there and whole; what else it may be takes a second look."""
        if body is not None and is_whole(record, body):
            return self._answer_image(answer, record, body, origin)
        close(body)
        return None

    async def _fetch(self, original: Record, record: Record, key: str = "") -> Content:
        """The blob of an image, or of its rendition `key`. NotFound where the image has been deleted meanwhile."""
        for _ in range(2):
            content = await self._store.get(record.digest)
            if content is not None and is_whole(record, content):
                return content
            close(content)
            if await self._store.record(image_name(original.digest.hex())) is None:
                raise NotFound()
            if key and await self._is_another(original, record, key):
                raise _CodedAnew
            # Deleted, and uploaded again between these two looks? Then it is there now.
        # A cut file would be sent as if it were all of it.
        log.error("the blob %s is missing from the store, or cut", record.digest.hex())
        raise UvimgError("The image's bytes are missing from the store.")

    async def _is_another(self, original: Record, rendition: Record, key: str) -> bool:
        """Whether the rendition of this key is another one by now, or gone with its image."""
        found = await self._store.record(rendition_name(original.digest, key))
        known = None if found is None else without_bytes(found)
        # One that is the original itself need not be kept.
        return known != rendition and (known is not None or rendition.digest != original.digest)

    def _choose_answer(self, request: Request, record: Record) -> Response | Whole | Part:
        """A whole 304 or 412, or how much of a representation to send. RangeNotSatisfiable for none of it."""
        answer = choose_answer(
            request.headers, _etag(record), record.created_s, record.size, ranges=request.method == "GET"
        )
        match answer:
            case NotModified():
                return Response(304, self._image_headers(record), origin="not_modified")
            case Failed():
                return Response(412, {"ETag": _etag(record), "Cache-Control": "no-store"})
            case Unsatisfiable():
                raise RangeNotSatisfiable(record.size)
        return answer

    def _image_headers(self, record: Record) -> dict[str, str]:
        headers = dict(self._settings.image_headers)
        headers["ETag"] = _etag(record)
        headers["Last-Modified"] = http_date(record.created_s)
        return headers

    def _svg_headers(self) -> dict[str, str]:
        return {**dict(self._settings.image_headers), "Content-Security-Policy": _LOCKED_DOWN}

    def _answer_image(self, answer: Whole | Part, record: Record, body: Content | Pieces, origin: str) -> Response:
        """200 or 206 with a representation, of which pieces are what is to be sent already.

        `origin` says for the metrics how it was come by.
        """
        headers = self._image_headers(record)
        headers["Content-Type"] = record.type
        headers["Accept-Ranges"] = "bytes"
        if record.type == _SVG:
            headers["Content-Security-Policy"] = _LOCKED_DOWN
        if isinstance(answer, Whole):
            return Response(200, headers, body, origin=origin)
        headers["Content-Range"] = f"bytes {answer.start}-{answer.stop - 1}/{record.size}"
        if isinstance(body, Pieces):
            return Response(206, headers, body, origin=origin)
        if isinstance(body, FilePart):
            return Response(206, headers, body.part(answer.start, answer.stop), origin=origin)
        return Response(206, headers, body[answer.start : answer.stop], origin=origin)

    # Making

    def _take_ahead(self, original: Record, key: str, ahead: _Ahead) -> Rendition | None:
        """The rendition that came along, if it is the right one and whole."""
        record, body = ahead.record, ahead.body
        if record is None or body is None or len(body) != record.size:
            return None
        if ahead.name != rendition_name(original.digest, key):
            return None
        rendition = Rendition(record, body)
        self._cache.keep((original.digest, key), rendition)
        return rendition

    async def _find_or_make(
        self, query: Show, original: Record, plan: Plan | None, key: str, ahead: _Ahead
    ) -> tuple[Rendition, str]:
        """A rendition, and whether it came from the store or was made."""
        name = rendition_name(original.digest, key)
        record = ahead.record if ahead.name == name else await self._store.record(name)
        content = None if record is None else await find_bytes(self._store, record)
        close(content)
        if record is not None and content is not None and is_whole(record, content):
            return Rendition(without_bytes(record), content if isinstance(content, bytes) else None), "store"
        rendered, body, lasts = await self._render(query, original, plan)
        if rendered.as_original:
            record = msgspec.structs.replace(original, facts=b"")
        else:
            digest = await hash_bytes(body)
            record = Record(digest, len(body), media_type(rendered.format), int(time.time()))
        rendition = Rendition(record, None if rendered.as_original else body, lasts)
        wanted = lasts and (self._settings.save_new == 1 or (self._settings.save_new == 2 and query.typed))
        if wanted and self._keeping_bytes + len(body) <= _MAX_KEEPING_BYTES:
            self._keeping_bytes += len(body)
            task = asyncio.create_task(self._keep(name, rendition))
            self._keeping.add(task)
            task.add_done_callback(self._keeping.discard)
        return rendition, "made"

    async def _render(self, query: Show, original: Record, plan: Plan | None) -> tuple[Rendered, bytes, bool]:
        """Have it made, on an intermediate where one will do; whether it lasts is for a script to say.

        A script knows nothing but a type's name and an image's facts, so what it said once it would say again. It is
        asked every time where it has something to log.
        """
        source = read_source(original)
        if plan is not None:
            return *await self._carry_out(plan, original, source), True
        asked = query.script, source
        if asked not in self._asked:
            return await self._ask(query.script, original, source)
        known = self._asked[asked]
        if known is None:
            raise NotFound(_NO_TYPE)
        plan, lasts = known
        return *await self._carry_out(plan, original, source), lasts

    async def _ask(self, type: str, original: Record, source: Source) -> tuple[Rendered, bytes, bool]:
        """Have the script asked and its answer carried out, at once where that is fast."""
        content = await self._fetch(original, original)
        try:
            answer, body = await self._pool.run(RenderType(type, source), content, "fast")
        except NotFound:
            self._asked[type, source] = None
            raise
        finally:
            close(content)
        assert isinstance(answer, Rendered | Planned)
        assert answer.plan is not None
        if not answer.printed:
            self._asked[type, source] = answer.plan, answer.lasts
        if isinstance(answer, Planned):
            return *await self._carry_out(answer.plan, original, source), answer.lasts
        self._intermediates.want(original, source)
        return answer, body, answer.lasts

    async def _carry_out(self, plan: Plan, original: Record, source: Source) -> tuple[Rendered, bytes]:
        """Have a plan carried out, on an intermediate where one will do."""
        start = await self._intermediates.find(original, source, plan)
        if start is not None:
            try:
                return await self._run_plan(start.source, start.plan, start.content)
            except Undecodable:
                await self._intermediates.forget(original, source, "not to be decoded")
        rendered = await self._run_plan(source, plan, await self._fetch(original, original))
        self._intermediates.want(original, source)
        return rendered

    async def _run_plan(self, source: Source, plan: Plan, content: Content) -> tuple[Rendered, bytes]:
        """A job for a worker. Closes the content."""
        job = rendering(plan, source)
        try:
            rendered, body = await self._pool.run(job, content, choose_lane(plan, source, job.engine))
        finally:
            close(content)
        assert isinstance(rendered, Rendered)
        return rendered, body

    async def _keep(self, name: bytes, rendition: Rendition) -> None:
        """Put a rendition into the store. Nobody waits for it, and nothing is lost when it fails."""
        try:
            await keep_rendition(self._store, name, rendition.record, rendition.body)
        except UvimgError as exc:
            log.warning("a rendition could not be kept: %s", exc.detail)
        finally:
            self._keeping_bytes -= len(rendition.body or b"")

    # Uploading

    async def _upload(self, request: Request) -> Response:
        if request.length == 0:
            raise NoLength()
        if (request.length or 0) > self._settings.max_bytes:
            raise TooLarge()
        face = face_of(request.path)
        content_type = request.headers.get("content-type", "")
        body = _bounded(request.body, self._settings.max_bytes)
        if content_type.partition(";")[0].strip().lower() == "multipart/form-data":
            return await self._upload_form(request, _Files(FormReader(content_type), body))
        async with self._originals.stage(body) as staged:
            stored = await self._originals.bind(staged)
        if face == "images":
            return _answer_created(request, stored)
        if stored.conflict:
            raise stored.conflict
        return _json({"ret": True, "info": {"md5": stored.facts.md5, "size": stored.record.size}})

    async def _upload_form(self, request: Request, files: "_Files") -> Response:
        """The files of a form. Nothing is bound before it has come to its end; a bad file does not undo the others."""
        only_one = face_of(request.path) == "images"
        outcomes: list[tuple[str, Stored | UvimgError]] = []
        async with contextlib.AsyncExitStack() as stack:
            received: list[tuple[str, Staged | UvimgError]] = []
            async for filename in files:
                if only_one and received:
                    raise BadRequest("Send one file at a time here; POST /upload takes many.")
                try:
                    received.append((filename, await stack.enter_async_context(self._originals.stage(files.data()))))
                except UvimgError as exc:
                    if files.broken or only_one or exc.status >= 500:
                        raise
                    received.append((filename, exc))
            for filename, staged in received:
                outcomes.append(
                    (filename, await self._originals.bind(staged) if isinstance(staged, Staged) else staged)
                )
        if only_one:
            if not outcomes:
                raise BadRequest("The form holds no file.")
            only = outcomes[0][1]
            assert isinstance(only, Stored)
            return _answer_created(request, only)
        if "application/json" in request.headers.get("accept", ""):
            return _tell_form_as_json(outcomes)
        return _html(_tell_form(request, outcomes, self._settings.port))

    # Facts, removal, pages

    async def _describe(self, request: Request, query: Describe) -> Response:
        modern = face_of(request.path) == "images"
        if query.image_id is None:
            raise BadParameter("md5", "md5 must be 32 hex digits (or the 64 of a SHA-256).")
        record = await self._store.record(image_name(query.image_id))
        if record is None:
            raise NotFound()
        facts = read_facts(record.facts)
        return _json(_describe(record, facts) if modern else {"ret": True, "info": _describe_as_zimg(record, facts)})

    async def _remove(self, request: Request, query: Remove) -> Response:
        client = find_client(request.peer, request.headers, self._settings.trusted_proxies)
        if is_cross_site(request.headers) or is_rebound(client, request.headers):
            raise Forbidden("A page of another site may have asked for this.")
        record = await self._store.record(image_name(query.image_id))
        if record is None:
            raise NotFound()
        # After a conflict the MD5 is another image's name, and stays.
        names = [image_name(record.digest.hex()), image_name(read_facts(record.facts).md5)]
        await self._store.unbind(names, record.digest)
        await self._forget_renditions(record.digest)
        await self._codings.forget(record.digest)
        if not query.by_get:
            return Response(204)
        return _html(_tell_command("Successful", request.query))

    async def _forget_renditions(self, digest: Digest) -> None:
        prefix = renditions_prefix(digest)
        # Where nothing can be listed they are left: whoever asks for one is asked for its image first.
        with contextlib.suppress(NotImplementedHere):
            while page := await self._store.scan(prefix, limit=100):
                await self._store.unbind([name for name, _ in page])
        self._cache.forget(lambda key: key[0] == digest)

    def _answer_page(self, request: Request, query: Page | Options) -> Response:
        match query:
            case Options(allow):
                response = Response(204, {"Allow": allow})
            case Page("echo"):
                response = _html("<html><body><h1>zimg works!</h1></body></html>")
            case Page("favicon"):
                headers = {"Content-Type": "image/svg+xml", "Cache-Control": "max-age=86400"}
                response = Response(200, headers, _FAVICON)
            case Page("admin"):
                self._admit(request, self._settings.admin_rule)
                return _page(self._settings.admin_page)
            case _:
                response = _page(self._settings.index_page)
        response.lasts = "always"
        return response


_FAVICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#2b59c3"/>'
    b'<path d="M2 13 6 6l3 4 2-2 3 5z" fill="#fff"/><circle cx="11.5" cy="4.5" r="1.5" fill="#ffd23f"/></svg>'
)


class _Files:
    """The files of a form, one after the other: iterate, and read each by `data` before the next."""

    def __init__(self, form: FormReader, body: AsyncIterable[bytes]) -> None:
        self._form = form
        self._events = self._read(body)
        # Whether the form itself, rather than a file in it, was at fault.
        self.broken = False

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self._events:
            # A plain field has no file name; a file that was not chosen has an empty one.
            if isinstance(event, PartBegins) and event.filename:
                yield event.filename

    async def data(self) -> AsyncIterator[bytes]:
        async for event in self._events:
            match event:
                case PartData(data):
                    yield data
                case PartEnds():
                    return

    async def _read(self, body: AsyncIterable[bytes]) -> AsyncIterator[PartBegins | PartData | PartEnds]:
        try:
            async for chunk in body:
                for event in self._form.feed(chunk):
                    yield event
            self._form.close()
        except UvimgError:
            self.broken = True
            raise


async def _bounded(body: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """A body of undeclared size is counted while it comes."""
    size = 0
    async for chunk in body:
        size += len(chunk)
        if size > max_bytes:
            raise TooLarge()
        yield chunk


def _etag(record: Record) -> str:
    """Strong, from the hash of the very bytes that are sent."""
    return f'"{record.digest.hex()[:32]}"'


# Telling


def _json(value: object, status: int = 200, type: str = "application/json") -> Response:
    return Response(status, {"Content-Type": type, "Cache-Control": "no-store"}, _encode_json(value))


def _html(text: str, status: int = 200) -> Response:
    return Response(status, {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"}, text.encode())


def _page(body: bytes) -> Response:
    headers = {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-cache"}
    return Response(200, headers | {"Content-Security-Policy": _PAGE_POLICY, "Referrer-Policy": "same-origin"}, body)


def _describe(record: Record, facts: Facts) -> dict[str, object]:
    source = facts.source
    return {
        "id": record.digest.hex(),
        "md5": facts.md5,
        "sha256": record.digest.hex(),
        "size": record.size,
        "type": record.type,
        "format": source.format,
        "width": source.width,
        "height": source.height,
        "orientation": source.orientation,
        "frames": source.frames,
        "has_alpha": source.has_alpha,
        "quality": source.quality,
        "created": record.created_s,
    }


def _describe_as_zimg(record: Record, facts: Facts) -> dict[str, object]:
    source = facts.source
    return {
        "size": record.size,
        "width": source.width,
        "height": source.height,
        "quality": source.quality,
        "format": source.format.upper(),
        "orientation": source.orientation,
        "frames": source.frames,
        "has_alpha": source.has_alpha,
        "sha256": record.digest.hex(),
    }


def _answer_created(request: Request, stored: Stored) -> Response:
    if stored.conflict:
        raise stored.conflict
    url = f"{quote(request.prefix)}/images/{stored.record.digest.hex()}"
    response = _json({"url": url, **_describe(stored.record, stored.facts)}, 201)
    response.headers["Location"] = url
    return response


def _tell_form(request: Request, outcomes: Sequence[tuple[str, Stored | UvimgError]], port: int) -> str:
    """zimg's answer to a form, to the byte: clients take it apart."""
    blocks = ["<html>\n<head>\n<title>Upload Result</title>\n</head>\n<body>\n"]
    for filename, outcome in outcomes:
        match outcome:
            case Stored(conflict=None):
                md5 = outcome.facts.md5
                path = html.escape(f"{quote(request.prefix)}/{md5}")
                blocks.append(
                    f"<h1>MD5: {md5}</h1>\nImage upload successfully! You can get this image via this address:"
                    f'<br/><br/>\n<a href="{path}">http://yourhostname:{port}{path}</a>'
                    "?w=width&h=height&g=isgray&x=position_x&y=position_y&r=rotate&q=quality&f=format\n"
                )
            case UnsupportedType():
                blocks.append(f"<h1>File: {html.escape(filename)}</h1>\n<p>File type is not supported!</p>\n")
            case _:
                blocks.append("<h1>Failed!</h1>\n<p>File save failed!</p>\n")
    if not outcomes:
        blocks.append("<h1>Upload Failed!</h1>\n")
    return "".join(blocks) + "</body>\n</html>\n"


def _tell_form_as_json(outcomes: Sequence[tuple[str, Stored | UvimgError]]) -> Response:
    info: list[dict[str, object]] = []
    for filename, outcome in outcomes:
        error = outcome.conflict if isinstance(outcome, Stored) else outcome
        if error is not None:
            info.append({"name": filename, "error": {"code": error.code, "message": error.detail}})
        elif isinstance(outcome, Stored):
            info.append({"name": filename, "md5": outcome.facts.md5, "size": outcome.record.size})
    return _json({"ret": any("md5" in entry for entry in info), "info": info})


_ZIMG_MESSAGES = (
    "Internal error.",
    "File type not support.",
    "Request method error.",
    "Access error.",
    "Request body parse error.",
    "Content-Length error.",
    "Content-Type error.",
    "File too large.",
    "Request url illegal.",
    "Image not existed.",
)

# zimg tells every error of these doors with 200. A client that reads its JSON goes on working; what a
# proxy, a client library or the connection itself must see keeps its own status.
_TOLD_BY_STATUS = frozenset({408, 409, 413, 417, 500, 501, 503, 507})


def _refuse(request: Request, error: UvimgError) -> Response:
    path = request.path
    if face_of(path) == "images":
        problem: dict[str, object] = {"type": "about:blank", "title": error.title, "status": error.status}
        problem["detail"] = error.detail
        if isinstance(error, BadParameter):
            problem["parameter"] = error.parameter
        if isinstance(error, DigestConflict):
            problem["sha256"] = error.sha256
        return _json(problem, error.status, "application/problem+json")
    status = error.status if error.status in _TOLD_BY_STATUS else 200
    upload = path == "/upload" or (path == "/" and request.method == "POST")
    if upload or path == "/info":
        code = 8 if path == "/info" and isinstance(error, BadParameter) else error.code
        told: dict[str, object] = {"code": code, "message": _ZIMG_MESSAGES[code]}
        if upload:
            told["detail"] = error.detail
        if isinstance(error, DigestConflict):
            # zimg has no number for it, and nothing went wrong inside.
            told |= {"message": error.detail, "sha256": error.sha256}
        return _json({"ret": False, "error": told}, status)
    if path == "/admin" and not isinstance(error, Forbidden | MethodNotAllowed):
        reason = "Image Not Found." if isinstance(error, NotFound) else "Command Failed."
        return _html(_tell_command("Failed", request.query, f"<p>{reason}</p>"), status)
    if isinstance(error, NotFound):
        return _html("<html><body><h1>404 Not Found!</h1></body></html>", 404)
    reason = html.escape(error.detail)
    return _html(f"<html><body><h1>{error.status} {error.title}!</h1><p>{reason}</p></body></html>", error.status)


def _tell_command(outcome: str, query: str, reason: str = "") -> str:
    """zimg's answer to a command of its admin page."""
    try:
        fields = read_fields(query)
    except BadRequest:
        fields = {}
    md5, command = (html.escape(fields.get(name, "")) for name in ("md5", "t"))
    return (
        f"<html><body><h1>Admin Command {outcome}!</h1>"
        f"<p>MD5: {md5}</p> <p>Command Type: {command}</p> {reason}</body></html>"
    )


def weigh(rendition: Rendition) -> int:
    """What a rendition costs the cache, in bytes; one whose bytes are not at hand is not worth keeping."""
    return sys.maxsize if rendition.body is None or not rendition.lasts else len(rendition.body) + 512
