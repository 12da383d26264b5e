"""aiohttp in front: `application` for somebody's aiohttp application, and the front-end of a process of our own.

One handler serves both. The front-end runs it on `web.Server`, without aiohttp's router, which would cost 6 µs a
request, and behind a gate that holds clients to HTTP before aiohttp hears of them. In an application of others
there is no gate: what aiohttp has read there is held against the same rules, as far as it can still be seen.
Surprise: aiohttp knows nothing of Expect below its router, so it is met here, and only when somebody really wants
the body.
"""

import asyncio
import dataclasses
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any
from urllib.parse import unquote

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from uvimg.assembly import assemble
from uvimg.config import Settings
from uvimg.core.errors import BadRequest, UvimgError
from uvimg.core.http1 import HANDSHAKE_S, PHRASES, Head, encode_head, parse_head
from uvimg.core.message import NO_BODY, FilePart, Pieces, Request, Response
from uvimg.core.negotiate import http_date
from uvimg.service import Service
from uvimg.web import WebSettings, name_peer
from uvimg.web.bodies import PIECE_BYTES, read_paced, read_piece
from uvimg.web.connections import reset_at_end
from uvimg.web.gate import Gate, Gates
from uvimg.web.listen import close_servers
from uvimg.web.memo import Memo, Watch, is_memorable
from uvimg.web.tls import TlsTransport

# When the grace is over: for tasks that have been told to end.
_LAST_STEPS_S = 1.0
# For what is nobody's business but ours.
_NEVER_S = 1e9


def application(settings: Settings) -> web.Application:
    """The whole service as an aiohttp application: run it, or mount it with `add_subapp`.

    It starts when the application around it starts, on the loop that runs that, and stops with it. Of the settings,
    those of the process (host, port, front_end, loop, connections, log and their like) say nothing here: that is the
    host's business. Starting raises what `uvimg serve` would complain of.
    """
    # Listening for itself is no business of a guest: /health and /metrics are pages like others here.
    alone = dataclasses.replace(settings, operations_listen=())
    app = web.Application()
    mounted = _Mounted()
    # Without Expect's own handler: nobody is asked for a body before somebody wants it.
    route = app.router.add_route("*", "/{path:.*}", mounted.handle, expect_handler=_expect_nothing)
    app.router.add_route("*", "", mounted.add_slash)

    async def run(_: web.Application) -> AsyncIterator[None]:
        assert route.resource is not None
        mounted.prefix = unquote(route.resource.canonical.removesuffix("/{path}"))
        async with assemble(alone) as parts:
            mounted.service = parts.service
            yield

    app.cleanup_ctx.append(run)
    app.on_shutdown.append(mounted.stop)
    return app


class _Mounted:
    """The service in an application, under a prefix that is known when it starts: "" or "/pictures"."""

    service: Service
    prefix: str = ""
    stopping: bool = False

    async def stop(self, _: web.Application) -> None:
        self.stopping = self.service.draining = True

    async def add_slash(self, incoming: web.Request) -> web.StreamResponse:
        # The page's links are relative to the folder that it is in.
        url = incoming.rel_url
        raise web.HTTPPermanentRedirect(f"{url.raw_path}/?{url.raw_query_string}".removesuffix("?"))

    async def handle(self, incoming: web.Request) -> web.StreamResponse:
        try:
            head = parse_head(_spell(incoming))
        except UvimgError as exc:
            answer = _encode(self.service.refuse_head(exc))
            answer.force_close()
            return answer
        if not head.path.startswith(self.prefix + "/"):
            raise web.HTTPNotFound
        body = _read_body(incoming, head, None) if head.has_body else NO_BODY
        path = head.path[len(self.prefix) :]
        request = _make_request(
            head, head.headers, incoming.remote or name_peer(incoming.transport), body, path, self.prefix
        )
        response = self.service.try_now(request)
        if response is None:
            response = await self.service.handle(request)
        answer = _encode(response)
        if self.stopping or not incoming.content.at_eof():
            answer.force_close()
        return answer


async def _expect_nothing(_: web.Request) -> None:
    pass


def _spell(incoming: web.BaseRequest) -> bytes:
    """A request's head as its client may have written it, for a parser that is stricter than aiohttp's."""
    version = incoming.version
    line = f"{incoming.method} {incoming.raw_path} HTTP/{version.major}.{version.minor}\r\n"
    fields = b"".join(b"%b: %b\r\n" % field for field in incoming.raw_headers)
    return line.encode("utf-8", "surrogateescape") + fields + b"\r\n"


class AiohttpFrontEnd:
    """See `FrontEnd`. `server` makes the protocol of a connection, and counts requests, for who listens himself."""

    def __init__(self, service: Service, settings: WebSettings) -> None:
        self._service, self._settings = service, settings
        logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
        self._servers: list[asyncio.Server] = []
        self._listeners: list[socket.socket] = []
        self._memo = Memo(service, settings.memo_bytes)

    async def start(self, listeners: list[socket.socket]) -> None:
        self.server = _GatedServer(
            self._handle,
            # A client that goes away frees what works for it.
            handler_cancellation=True,
            # The gate knows when a connection is idle: it answers by itself too.
            keepalive_timeout=_NEVER_S,
            # An image is no text: a body that says it is compressed is taken as it is, and refused.
            auto_decompress=False,
            # The gate lingers.
            lingering_time=0,
            # Ours says the same for every front-end.
            access_log=None,
        )
        self.server.gates = gates = Gates(self.server.make_inner, self._settings, self._memo)
        self._drain = gates.drain
        self.server.tls = self._settings.tls
        self._listeners = listeners
        loop = asyncio.get_running_loop()
        for listener in listeners:
            make = self.server.make_gate if self._settings.tls_for(listener) is None else self.server
            self._servers.append(await loop.create_server(make, sock=listener, backlog=self._settings.backlog))

    @property
    def open_connections(self) -> int:
        return len(self.server.gates)

    async def stop(self) -> None:
        self._memo.stop()
        await close_servers(self._servers, self._listeners)
        await self.server.gates.see_off()
        await self.server.shutdown(_LAST_STEPS_S)

    async def _handle(self, incoming: web.BaseRequest) -> web.StreamResponse:
        gate: object = incoming.transport
        if gate is None:
            # It has gone, and aiohttp has not yet heard of it.
            return web.Response(status=400)
        assert isinstance(gate, Gate)
        head, data = gate.take()
        if isinstance(head, UvimgError):
            response, body = self._service.refuse_head(head), False
        else:
            pieces = _read_body(incoming, head, gate) if head.has_body else NO_BODY
            # To HTTP/1.0 aiohttp writes another status line than we do.
            watch = self._memo.begin(head) if is_memorable(head, data) and not head.is_1_0 else None
            headers = watch.headers if watch else head.headers
            request = _make_request(head, headers, gate.peer, pieces, head.path, "")
            tried = self._service.try_now(request)
            if tried is not None:
                self._remember(watch, request, tried)
            else:
                if not head.has_body:
                    gate.work()
                tried = await self._service.handle(request)
            response, body = tried, head.has_body
        try:
            response.headers["Server"] = "uvimg"
            answer = _encode(response)
            last = self._drain.is_over or (self._drain.begun and not gate.has_more)
            if last or (body and not incoming.content.at_eof()):
                answer.force_close()
            if isinstance(answer, _FileAnswer | _PiecesAnswer):
                # aiohttp would do so behind us; here it is known when all of it has been written.
                await answer.prepare(incoming)
                await answer.write_eof()
            return answer
        finally:
            response.release()
            gate.answered()

    def _remember(self, watch: Watch | None, request: Request, response: Response) -> None:
        body = b"" if request.method == "HEAD" else response.body
        if watch is None or not isinstance(body, bytes):
            return
        keep_alive = watch.head.keep_alive
        start = encode_head(response, http_date(int(time.time())), keep_alive=keep_alive)
        self._memo.keep(watch, start + body, not keep_alive, request, response)


def _is_our_fault(record: logging.LogRecord) -> bool:
    """aiohttp tells what a client did and failures of our handler alike, as errors with their exception."""
    exc = record.exc_info[1] if record.exc_info else None
    return not isinstance(exc, HttpProcessingError | ConnectionError)


class _GatedServer(web.Server):
    """aiohttp's server, which makes a gate for each connection, aiohttp's own handler behind it, and TLS before it."""

    gates: Gates
    tls: ssl.SSLContext | None

    def make_inner(self) -> web.RequestHandler:
        return super().__call__()

    def make_gate(self) -> Gate:
        return Gate(self.gates)

    def __call__(self) -> Gate | TlsTransport:  # type: ignore[override]
        gate = self.make_gate()
        return gate if self.tls is None else TlsTransport(self.tls, HANDSHAKE_S, gate)


def _make_request(
    head: Head, headers: Mapping[str, str], peer: str, body: AsyncIterable[bytes], path: str, prefix: str
) -> Request:
    return Request(head.method, head.target, path, head.query, headers, peer, head.length, body, prefix)


def _read_body(incoming: web.BaseRequest, head: Head, gate: Gate | None) -> AsyncIterator[bytes]:
    """The body as it comes. RequestTimeout when too slow, BadRequest when it ends before its end."""
    reader = incoming.content
    begun = False

    async def read(until: float) -> bytes:
        nonlocal begun
        if not begun:
            begun = True
            if gate is not None:
                gate.read_by(reader)
            if head.expects_continue and incoming.transport is not None and not reader.total_bytes:
                incoming.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout_at(until):
                return await reader.readany()
        except (ClientError, HttpProcessingError, ConnectionError) as exc:
            raise BadRequest("The body is malformed, or ended before its declared length.") from exc

    return read_paced(read)


def _encode(response: Response) -> web.StreamResponse:
    body = response.body
    if isinstance(body, Pieces):
        return _PiecesAnswer(response, body)
    if not isinstance(body, FilePart):
        if not body and response.status not in (204, 304):
            # aiohttp leaves it out of its answers to HEAD.
            response.headers["Content-Length"] = "0"
        reason = PHRASES[response.status]
        return web.Response(status=response.status, reason=reason, headers=response.headers, body=body)
    return _FileAnswer(response, body)


class _PiecesAnswer(web.StreamResponse):
    """An answer whose body is made when aiohttp writes it: behind the host's middlewares."""

    def __init__(self, response: Response, body: Pieces) -> None:
        super().__init__(status=response.status, headers=response.headers)
        if body.size is not None:
            self.content_length = body.size
        self._response = response
        self._pieces: Pieces | None = body
        self._transport: asyncio.Transport | None = None

    def __del__(self) -> None:
        # Of a client that was gone before aiohttp wrote anything.
        self._response.release()

    async def prepare(self, request: web.BaseRequest) -> Any:
        self._transport = request.transport
        if self.content_length is None:
            if request.version >= (1, 1):
                self.enable_chunked_encoding()
            else:
                self.force_close()
        if request.method == "HEAD":
            self._pieces = None
        return await super().prepare(request)

    async def write_eof(self, data: bytes = b"") -> None:
        pieces, self._pieces = self._pieces, None
        try:
            if pieces is not None:
                async for piece in pieces.pieces:
                    await self.write(piece)
        except BaseException:
            if self._transport is not None:
                reset_at_end(self._transport.get_extra_info("socket"))
                self._transport.abort()
            raise
        finally:
            self._response.release()
        await super().write_eof(data)


class _FileAnswer(web.StreamResponse):
    """An answer whose body is read from a file when aiohttp writes it: behind the host's middlewares."""

    def __init__(self, response: Response, part: FilePart) -> None:
        super().__init__(status=response.status, headers=response.headers)
        self.content_length = part.size
        self._response = response
        self._part: FilePart | None = part

    async def prepare(self, request: web.BaseRequest) -> Any:
        if request.method == "HEAD":
            self._part = None
        return await super().prepare(request)

    async def write_eof(self, data: bytes = b"") -> None:
        part, self._part = self._part, None
        try:
            if part is not None:
                await self._write_part(part)
        finally:
            self._response.release()
        await super().write_eof(data)

    async def _write_part(self, part: FilePart) -> None:
        for at in range(0, part.size, PIECE_BYTES):
            await self.write(await read_piece(part, at))
