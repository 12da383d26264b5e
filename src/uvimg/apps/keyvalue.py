"""The key-value app: OlegDB's and Kyoto Tycoon's requests on the same values.

What a request means is decided in core/keyvalue.py, what becomes of the values in values.py, Kyoto Tycoon's procedures
in procedures.py; here stand the answers over plain HTTP.
Surprise: an answer to GET is kept by the front-ends as long as the store is unchanged, but not that of a value which
expires: time passes without a change.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache

from uvimg.apps.codings import code_tagged, nothing, takes_plain
from uvimg.apps.procedures import Procedures
from uvimg.apps.values import INLINE_BYTES, Received, Values, close, read_pieces, receive_bytes, whole
from uvimg.coders import AT_ONCE_BYTES, Coders, code_now
from uvimg.core.access import AccessRules, Network, find_client, is_cross_site, is_rebound
from uvimg.core.coding import QUICK, Coding
from uvimg.core.errors import (
    BadRequest,
    Forbidden,
    LogicalError,
    NotFound,
    Overloaded,
    PreconditionFailed,
    RangeNotSatisfiable,
    TooLarge,
    UnsupportedType,
    UvimgError,
)
from uvimg.core.keyvalue import (
    MISSING,
    NO_KEY,
    NO_MATCHES,
    NO_RECORDS,
    Call,
    Describe,
    Dialect,
    Listing,
    Mode,
    Neighbour,
    Options,
    Query,
    Read,
    Remove,
    Squish,
    Unjar,
    Uptime,
    Write,
    is_inert,
    name_record,
    read_expiry,
    read_keys,
    read_mode,
    read_type,
    route,
    show_key,
    spell_key,
)
from uvimg.core.kyoto import tell_error
from uvimg.core.message import Content, FilePart, Pieces, Request, Response
from uvimg.core.negotiate import (
    Failed,
    NotModified,
    Part,
    Unsatisfiable,
    Whole,
    allows_change,
    choose_answer,
    http_date,
)
from uvimg.store import Record, Store

# A browser must not run what a value may hold.
_LOCKED_DOWN = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
_TEXT = "text/plain; charset=utf-8"
_STORED = "無駄".encode()
# Answers up to here are put together before they are sent, larger ones while they are.
_GATHER_BYTES = 1 << 20
_GATHER_KEYS = 1000
# Bodies that are taken apart in memory: of one request, and of all at once with the objects that are made of a line.
_MAX_BODY_BYTES = 8 << 20
_MAX_BODIES_BYTES = 128 << 20
_LINE_BYTES = 200
_TOO_LARGE_A_BODY = f"A body has at most {_MAX_BODY_BYTES} bytes here; PUT a larger value by itself."

_known_route = lru_cache(4096)(route)
_LONGEST_KNOWN = 256


@dataclass(frozen=True, slots=True)
class KeyValueSettings:
    """The configuration as this app sees it. `depth` is how many segments of a path come before ours."""

    dialect: Dialect
    max_bytes: int
    read_rule: AccessRules
    write_rule: AccessRules
    trusted_proxies: tuple[Network, ...]
    depth: int = 0


class KeyValue:
    """See `App` in service.py for its doors. `clock` tells POSIX time, by which values expire."""

    name = "kv"

    def __init__(
        self, settings: KeyValueSettings, store: Store, coders: Coders, clock: Callable[[], float] = time.time
    ) -> None:
        self._settings, self._store, self._coders, self._clock = settings, store, coders, clock
        self.values = Values(store, settings.max_bytes, clock)
        self._procedures = Procedures(self.values, settings.dialect)
        self._started = time.monotonic()
        self._held = 0

    # The two doors

    def try_now(self, request: Request) -> Response | None:
        query = self._route(request)
        if isinstance(query, Read):
            near = self._store.near
            if near is None:
                return None
            self._admit(request, query)
            record = near.record(query.record)
            lasts = self._settings.read_rule.allows_everybody
            if record is None or not record.is_live(self._clock()):
                response = _answer_text(404, MISSING)
            else:
                lasts = lasts and not record.expires_s
                body = record.inline if record.inline is not None else whole(record, near.get(record.digest))
                if body is None:
                    return None
                answer = _answer_value(request, record, body)
                if isinstance(answer, _ToCode):
                    close(body)
                    return None
                response = answer
            if lasts:
                response.lasts = "while the store is unchanged"
        elif isinstance(query, Options):
            response = Response(204, {"Allow": query.allow}, lasts="always")
        else:
            return None
        response.route = query.name
        return response

    async def handle(self, request: Request) -> Response:
        query = self._route(request)
        self._admit(request, query)
        response = await self._answer(request, query)
        response.route = query.name
        return response

    async def _answer(self, request: Request, query: Query) -> Response:
        match query:
            case Read(name):
                return await self._read(request, name)
            case Write(name):
                return await self._write(request, name)
            case Remove(name):
                return await self._remove(request, name)
            case Neighbour():
                return await self._find_neighbour(request, query)
            case Listing():
                return await self._list(query)
            case Describe():
                return await self._describe(query)
            case Unjar(database):
                return await self._take_apart(request, lambda body: self._unjar(body, database))
            case Squish():
                await self.values.sweep()
                return _answer_text(200, "Squished: what has expired is gone.")
            case Uptime():
                return _answer_text(200, str(int(time.monotonic() - self._started)))
            case Options(allow):
                return Response(204, {"Allow": allow})
            case Call(procedure):
                kind = request.headers.get("content-type", "")
                return await self._take_apart(request, lambda body: self._procedures.call(procedure, body, kind))

    def refuse(self, request: Request, error: UvimgError) -> Response:
        """An error as this path's dialect tells it. The body of the request may not have been read."""
        query: Query | None = None
        with contextlib.suppress(UvimgError):
            query = self._route(request)
        if isinstance(query, Call):
            response = Response(error.status, *tell_error(error.detail))
        else:
            response = _answer_text(error.status, error.detail)
        response.route = query.name if query else "none"
        response.headers.update(error.headers)
        return response

    def _route(self, request: Request) -> Query:
        target, prefix = request.target, request.prefix
        decide = _known_route if len(target) <= _LONGEST_KNOWN else route
        depth = self._settings.depth + prefix.count("/") if prefix else self._settings.depth
        return decide(request.method, target, depth, self._settings.dialect)

    def _admit(self, request: Request, query: Query) -> None:
        """Forbidden for who may not; a procedure counts as a write, whichever it is."""
        settings = self._settings
        writes = isinstance(query, (Write, Remove, Squish, Call))
        if writes and is_cross_site(request.headers):
            raise Forbidden("A page of another site may have asked for this.")
        rules = settings.write_rule if writes else settings.read_rule
        # A browser says in Origin whose page writes; who is no browser may call this machine what he likes.
        is_page = writes and "origin" in request.headers
        if rules.allows_everybody and not is_page:
            return
        client = find_client(request.peer, request.headers, settings.trusted_proxies)
        if not rules.allows(client):
            raise Forbidden()
        if is_page and is_rebound(client, request.headers):
            raise Forbidden("A page of another site may have asked for this.")

    # One value

    async def _read(self, request: Request, name: bytes) -> Response:
        found = await self.values.read(name)
        return _answer_text(404, MISSING) if found is None else await self._answer_value(request, *found)

    async def _answer_value(self, request: Request, record: Record, content: Content) -> Response:
        """An answer with a value that is there, coded a piece at a time where it is long."""
        answer = _answer_value(request, record, content)
        if isinstance(answer, Response):
            return answer
        if request.method == "HEAD":
            # How long it would be takes making it.
            close(content)
            return Response(200, answer.headers, Pieces(nothing()))
        try:
            coded = await self._coders.start(content, answer.coding, QUICK[answer.coding])
        except Overloaded:
            again = await self.values.content(record) if takes_plain(request) else None
            if again is None:
                raise
            plain = _answer_value(request, record, again, plain=True)
            assert isinstance(plain, Response)
            return plain
        return Response(200, answer.headers, Pieces(coded, coded.close))

    async def _write(self, request: Request, name: bytes) -> Response:
        headers = request.headers
        if (request.length or 0) > self._settings.max_bytes:
            raise TooLarge(f"A value has at most {self._settings.max_bytes} bytes.")
        if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            # It would be given back without a word of it.
            raise UnsupportedType("Values are stored as they are: send this one without Content-Encoding.")
        if "content-range" in headers:
            # RFC 9110 14.5: else a part would take the place of the whole.
            raise BadRequest("A value is written whole: there are no writes with Content-Range.")
        mode, media_type = read_mode(headers), read_type(headers)
        read_expiry(headers, self.values.now_s())

        def allow(old: Record | None) -> None:
            _check(request, mode, old)

        async def write(received: Received) -> tuple[Record | None, Record | None]:
            # Seconds from now are seconds from when it is there.
            expires_s = read_expiry(headers, self.values.now_s())
            return await self.values.write(name, received, media_type, expires_s, allow)

        if request.length is not None and request.length <= INLINE_BYTES:
            # Most are; with nothing to be cleaned up behind them that saves 4 of the 40 µs a write costs here.
            old, new = await write(receive_bytes(b"".join([piece async for piece in request.body])))
        else:
            async with self.values.receive(request.body) as received:
                old, new = await write(received)
        told = {} if new is None else {"ETag": _etag(new)}
        if self._settings.dialect == "kyoto":
            return Response(201, told)
        return Response(201 if old is None else 200, {"Content-Type": _TEXT, **told}, _STORED)

    async def _remove(self, request: Request, name: bytes) -> Response:
        removed = await self.values.remove(name, lambda old: _check(request, "set", old))
        if removed is None:
            raise NotFound(MISSING)
        if self._settings.dialect == "kyoto":
            return Response(204)
        return _answer_text(200, "Key deleted successfully!")

    async def _describe(self, query: Describe) -> Response:
        record = await self.values.record(query.record)
        if record is None:
            raise NotFound(NO_KEY)
        response = _answer_text(200, "")
        response.headers["X-Olegdb-Rcrd-Cnt"] = str(await self.values.count(query.database))
        if record.expires_s:
            response.headers["Expires"] = str(record.expires_s)
        return response

    # Several

    async def _find_neighbour(self, request: Request, query: Neighbour) -> Response:
        backward = query.side in ("last", "prev")
        if query.side == "prev" and not query.key:
            raise NotFound(NO_RECORDS)
        async for key, record in self.values.live(query.database, after=query.key, backward=backward):
            content = await self.values.content(record)
            # One that has been replaced since has a value still: that of now.
            found = (
                (record, content) if content is not None else await self.values.read(name_record(query.database, key))
            )
            if found is not None:
                response = await self._answer_value(request, *found)
                response.headers["X-Olegdb-Key"] = spell_key(key)
                return response
        raise NotFound(NO_RECORDS)

    async def _list(self, query: Listing) -> Response:
        """Keys, a line each: at once where they are few, else while they are sent."""
        walk = self._walk(query)
        first: list[bytes] = []
        async for key in walk:
            first.append(key)
            if len(first) == _GATHER_KEYS:
                break
        if not first:
            raise NotFound(NO_MATCHES)
        headers = {"Content-Type": _TEXT}
        limit = query.limit or (1 << 62)
        if len(first) < _GATHER_KEYS or limit <= _GATHER_KEYS:
            headers["X-Olegdb-Num-Matches"] = str(len(first))
            return Response(200, headers, b"\n".join(map(show_key, first)))
        if not query.prefix and not query.after:
            count = await self.values.count(query.database)
        else:
            # A field comes before what it counts: they are walked over twice.
            count = 0
            async for _ in self._walk(query):
                count += 1
        headers["X-Olegdb-Num-Matches"] = str(min(count, limit))

        async def pieces() -> AsyncIterator[bytes]:
            yield b"\n".join(map(show_key, first))
            held: list[bytes] = []
            async for key in walk:
                held.append(b"\n" + show_key(key))
                if len(held) == _GATHER_KEYS:
                    yield b"".join(held)
                    held.clear()
            yield b"".join(held)

        return Response(200, headers, Pieces(pieces()))

    async def _walk(self, query: Listing) -> AsyncIterator[bytes]:
        left = query.limit
        async for key, _ in self.values.live(query.database, query.prefix, query.after):
            yield key
            if left is not None:
                left -= 1
                if not left:
                    return

    async def _unjar(self, body: bytes, database: bytes) -> Response:
        keys = read_keys(body)

        async def pieces() -> AsyncIterator[bytes]:
            for key in keys:
                found = None
                # What can be no key is none that is there.
                with contextlib.suppress(BadRequest):
                    found = await self.values.read(name_record(database, key))
                if found is None:
                    yield b"00000000"
                    continue
                yield b"%08d" % found[0].size
                async for piece in read_pieces(found[1]):
                    yield piece

        return Response(200, {"Content-Type": "application/octet-stream"}, await _gather(pieces()))

    async def _take_apart(self, request: Request, answer: Callable[[bytes], Awaitable[Response]]) -> Response:
        """The answer to a body in memory. What is made of it lasts until the answer has gone, and counts until then."""
        if (request.length or 0) > _MAX_BODY_BYTES:
            raise TooLarge(_TOO_LARGE_A_BODY)
        weight = 0

        def let_go() -> None:
            nonlocal weight
            self._held -= weight
            weight = 0

        response = None
        try:
            held: list[bytes] = []
            size = 0
            async for piece in request.body:
                size += len(piece)
                if size > _MAX_BODY_BYTES:
                    raise TooLarge(_TOO_LARGE_A_BODY)
                more = len(piece) + _LINE_BYTES * piece.count(b"\n")
                weight += more
                self._held += more
                if self._held > _MAX_BODIES_BYTES:
                    raise Overloaded()
                held.append(piece)
            response = await answer(b"".join(held))
            if isinstance(response.body, Pieces):
                response.body = Pieces(response.body.pieces, let_go)
            return response
        finally:
            if response is None or not isinstance(response.body, Pieces):
                let_go()


async def _gather(pieces: AsyncIterator[bytes]) -> bytes | Pieces:
    """All of a body where it is small, else as it comes, what is at hand first."""
    held, size = [], 0
    async for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size > _GATHER_BYTES:
            break
    else:
        return b"".join(held)

    async def rest() -> AsyncIterator[bytes]:
        yield b"".join(held)
        held.clear()
        async for piece in pieces:
            yield piece

    return Pieces(rest())


def _check(request: Request, mode: Mode, old: Record | None) -> None:
    """Raises where what a write or a removal takes for granted does not hold of the record that is there."""
    if not allows_change(request.headers, None if old is None else _etag(old)):
        raise PreconditionFailed(headers={} if old is None else {"ETag": _etag(old)})
    if mode == "add" and old is not None:
        raise LogicalError("There is a record already.")
    if mode == "replace" and old is None:
        raise LogicalError("There is no record to replace.")


def _etag(record: Record) -> str:
    """Strong, from the hash of the very bytes."""
    return f'"{record.digest.hex()[:32]}"'


@dataclass(frozen=True, slots=True)
class _ToCode:
    """A 200 whose body takes long to code; these are the fields of its head."""

    headers: dict[str, str]
    coding: Coding


def _answer_value(request: Request, record: Record, body: Content, *, plain: bool = False) -> Response | _ToCode:
    """200, 206, 304, 412 or 416 with a value that is there; a `plain` one is not coded, though it could be."""
    headers = {"Content-Type": record.type, "ETag": _etag(record)}
    if record.expires_s:
        headers["Expires"] = str(record.expires_s)
        headers["X-Kt-Xt"] = http_date(record.expires_s)
    if not _known_inert(record.type):
        headers["Content-Security-Policy"] = _LOCKED_DOWN
    ranges = request.method == "GET"
    coding = code_tagged({} if plain else request.headers, headers, record.size)
    # When it was changed is known to the second alone, so dates decide nothing.
    match choose_answer(request.headers, headers["ETag"], None, record.size, ranges=ranges and coding == "identity"):
        case Whole() if coding != "identity" and (isinstance(body, FilePart) or len(body) > AT_ONCE_BYTES):
            return _ToCode(headers, coding)
        case Whole() if coding != "identity":
            assert isinstance(body, bytes)
            return Response(200, headers, code_now(body, coding, QUICK[coding]))
        case Whole():
            return Response(200, headers, body)
        case Part(start, stop):
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{record.size}"
            part = body.part(start, stop) if isinstance(body, FilePart) else body[start:stop]
            return Response(206, headers, part)
        case NotModified():
            close(body)
            headers.pop("Content-Encoding", None)
            return Response(304, headers, origin="not_modified")
        case Failed():
            close(body)
            return Response(412, {"ETag": headers["ETag"]})
        case Unsatisfiable():
            close(body)
            raise RangeNotSatisfiable(record.size)


_known_inert = lru_cache(256)(is_inert)


def _answer_text(status: int, text: str) -> Response:
    return Response(status, {"Content-Type": _TEXT}, text.encode())
