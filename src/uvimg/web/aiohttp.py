"""The aiohttp front-end: one handler on `web.Server`, without its router, which would cost 6 µs a request.

It stands behind a gate that holds clients to HTTP before aiohttp hears of them.
Surprise: aiohttp's low-level server knows nothing of Expect, so it is met here, and only when somebody really wants
the body.
"""

import asyncio
import socket
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from uvimg.core.errors import BadRequest, RequestTimeout, UvimgError
from uvimg.core.http1 import BODY_BYTES_PER_S, BODY_START_S, Head, refuse_head
from uvimg.core.message import FilePart, Request, Response
from uvimg.service import Service
from uvimg.web import WebSettings, read_part
from uvimg.web.gate import Gate, Gates

# How long an idle connection may still begin a request when the end has come: its client cannot know yet.
_LAST_CALL_S = 1.0
# When the grace is over: for tasks that have been told to end.
_LAST_STEPS_S = 1.0
# Files are sent in such pieces. A large one is read in a thread: a disk may take its time.
_PIECE_BYTES = 262_144
_READ_AT_ONCE_BYTES = 1 << 20


class AiohttpFrontEnd:
    """See `FrontEnd`."""

    def __init__(self, service: Service, settings: WebSettings) -> None:
        self._service, self._settings = service, settings
        self._listening: list[asyncio.Server] = []
        self._stopping = False

    async def start(self, listeners: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self.server = _GatedServer(
            self._handle,
            # A client that goes away frees what works for it.
            handler_cancellation=True,
            keepalive_timeout=self._settings.keepalive_s,
            # An image is no text: a body that says it is compressed is taken as it is, and refused.
            auto_decompress=False,
            # The gate lingers.
            lingering_time=0,
            # Ours says the same for every front-end.
            access_log=None,
        )
        self.gates = self.server.gates = Gates(self.server.make_handler, self._settings.max_connections)
        for listener in listeners:
            server = await loop.create_server(self.server, sock=listener, backlog=self._settings.backlog)
            self._listening.append(server)

    async def stop(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.grace_s
        for server in self._listening:
            server.close()
        self._stopping = True
        await self.gates.all_gone(min(_LAST_CALL_S, self._settings.grace_s))
        self.gates.finish()
        await self.gates.all_gone(end - loop.time())
        await self.gates.close()
        await self.server.shutdown(_LAST_STEPS_S)

    async def _handle(self, incoming: web.BaseRequest) -> web.StreamResponse:
        gate = incoming.transport
        if gate is None:
            # It has gone, and aiohttp has not yet heard of it.
            return web.Response(status=400)
        assert isinstance(gate, Gate)
        head = gate.take()
        if isinstance(head, UvimgError):
            response, body = refuse_head(head), False
        else:
            pieces = _read_body(incoming, head, gate) if head.has_body else _NOTHING
            request = _make_request(head, gate.peer, pieces, head.path)
            tried = self._service.try_now(request)
            if tried is None:
                if not head.has_body:
                    gate.work()
                tried = await self._service.handle(request)
            response, body = tried, head.has_body
        try:
            response.headers["Server"] = "uvimg"
            answer = _encode(response)
            if (self._stopping and not gate.has_more) or (body and not incoming.content.at_eof()):
                answer.force_close()
            if isinstance(answer, _FileAnswer):
                # aiohttp would do so behind us; here it is known when all of it has been written.
                await answer.prepare(incoming)
                await answer.write_eof()
            return answer
        finally:
            response.release()
            gate.answered()


class _GatedServer(web.Server):
    """aiohttp's server, which makes a gate for each connection, and aiohttp's own handler behind it."""

    gates: Gates

    def make_handler(self) -> web.RequestHandler:
        return super().__call__()

    def __call__(self) -> Gate:  # type: ignore[override]
        return Gate(self.gates)


def _make_request(head: Head, peer: str, body: AsyncIterable[bytes], path: str) -> Request:
    return Request(head.method, head.target, path, head.query, head.headers, peer, head.length, body)


async def _read_body(incoming: web.BaseRequest, head: Head, gate: Gate | None) -> AsyncIterator[bytes]:
    """The body as it comes. RequestTimeout when too slow, BadRequest when it ends before its end."""
    reader = incoming.content
    if gate is not None:
        gate.read_by(reader)
    if head.expects_continue and incoming.transport is not None and not reader.total_bytes:
        incoming.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    now = asyncio.get_running_loop().time
    # The time that passes while nobody asks for more is not the client's.
    free_until, received = now() + BODY_START_S, 0
    try:
        while True:
            async with asyncio.timeout_at(free_until + received / BODY_BYTES_PER_S):
                chunk = await reader.readany()
            if not chunk:
                return
            received += len(chunk)
            given = now()
            yield chunk
            free_until += now() - given
    except TimeoutError:
        raise RequestTimeout() from None
    except (ClientError, HttpProcessingError, ConnectionError) as exc:
        raise BadRequest("The body is malformed, or ended before its declared length.") from exc


def _encode(response: Response) -> web.StreamResponse:
    body = response.body
    if not isinstance(body, FilePart):
        return web.Response(status=response.status, headers=response.headers, body=body)
    return _FileAnswer(response, body)


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
        for at in range(0, part.size, _PIECE_BYTES):
            size = min(_PIECE_BYTES, part.size - at)
            if part.size <= _READ_AT_ONCE_BYTES:
                piece = read_part(part, at, size)
            else:
                piece = await asyncio.to_thread(read_part, part, at, size)
            await self.write(piece)


class _Nothing:
    """The body of a request that has none."""

    def __aiter__(self) -> "_Nothing":
        return self

    async def __anext__(self) -> bytes:
        raise StopAsyncIteration


_NOTHING = _Nothing()
