"""The aiohttp front-end: one handler on `web.Server`, without its router, which would cost 6 µs a request.

Surprises: aiohttp's low-level server knows nothing of Expect, so it is met here, and only when somebody
really wants the body; and a body that nobody read to its end closes the connection behind the answer.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from uvimg.core.errors import BadRequest, ExpectationFailed, RequestTimeout
from uvimg.core.http1 import HANDSHAKE_S
from uvimg.core.message import FilePart, Request, Response, fold_headers, split_target
from uvimg.service import Service
from uvimg.web import WebSettings, name_peer, read_part

# When requests have been answered, or their grace is over: for what is still in a buffer.
_LAST_WRITES_S = 1.0
# A body must come at this rate after a start that is free: slower ones only hold a place.
_BODY_START_S = 20.0
_BODY_BYTES_PER_S = 1024
# Files are sent in such pieces. A large one is read in a thread: a disk may take its time.
_PIECE_BYTES = 262_144
_READ_AT_ONCE_BYTES = 1 << 20


class AiohttpFrontEnd:
    """See `FrontEnd`."""

    def __init__(self, service: Service, settings: WebSettings) -> None:
        self._service, self._settings = service, settings
        server = web.Server(
            self._handle,
            # A client that goes away frees what works for it.
            handler_cancellation=True,
            keepalive_timeout=settings.keepalive_s,
            # An image is no text: a body that says it is compressed is taken as it is, and refused.
            auto_decompress=False,
            lingering_time=2.0,
            # Ours says the same for every front-end.
            access_log=None,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=_LAST_WRITES_S)
        self._servers: list[asyncio.Server] = []
        self._stopping = False
        self._in_flight = 0
        self._quiet = asyncio.Event()

    async def start(self, listeners: list[socket.socket]) -> None:
        await self._runner.setup()
        assert self._runner.server is not None
        for listener in listeners:
            # Not by aiohttp's sites, which leave a handshake a minute.
            tls = self._settings.tls_for(listener)
            server = await asyncio.get_running_loop().create_server(
                self._runner.server,
                sock=listener,
                backlog=self._settings.backlog,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls else None,
                # From the close on, whatever is still to be taken: past this a slow client's answer is cut off.
                ssl_shutdown_timeout=self._settings.keepalive_s if tls else None,
            )
            self._servers.append(server)

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        self._stopping = True
        if self._in_flight:
            # Not aiohttp's own shutdown yet: from its first moment on it reads no more of any body.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.grace_s):
                    await self._quiet.wait()
        await self._runner.cleanup()

    async def _handle(self, incoming: web.BaseRequest) -> web.StreamResponse:
        self._in_flight += 1
        self._quiet.clear()
        try:
            request = _translate(incoming)
            response = self._service.try_now(request)
            if response is None:
                response = await self._service.handle(request)
            if self._stopping:
                response.headers["Connection"] = "close"
            try:
                return await _send(incoming, response)
            finally:
                response.release()
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._quiet.set()


def _translate(incoming: web.BaseRequest) -> Request:
    target = incoming.raw_path
    path, query = split_target(target)
    headers = fold_headers(incoming.headers.items())
    length = incoming.content_length if incoming.body_exists else 0
    body = _read_body(incoming, headers.get("expect"))
    return Request(
        incoming.method, target, path, query, headers, incoming.remote or name_peer(incoming.transport), length, body
    )


async def _read_body(incoming: web.BaseRequest, expect: str | None) -> AsyncIterator[bytes]:
    """The body as it comes. RequestTimeout when too slow, BadRequest when it ends before its end."""
    if expect is not None and incoming.version >= (1, 1):
        if expect.lower() != "100-continue":
            raise ExpectationFailed()
        if incoming.transport is not None:
            incoming.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    loop = asyncio.get_running_loop()
    started, received = loop.time(), 0
    try:
        while True:
            async with asyncio.timeout_at(started + _BODY_START_S + received / _BODY_BYTES_PER_S):
                chunk = await incoming.content.readany()
            if not chunk:
                return
            received += len(chunk)
            yield chunk
    except TimeoutError:
        raise RequestTimeout() from None
    except (ClientError, HttpProcessingError, ConnectionError) as exc:
        raise BadRequest("The body is malformed, or ended before its declared length.") from exc


async def _send(incoming: web.BaseRequest, response: Response) -> web.StreamResponse:
    headers = response.headers
    headers["Server"] = "uvimg"
    if not incoming.content.at_eof():
        headers["Connection"] = "close"
    body = response.body
    if not isinstance(body, FilePart):
        return web.Response(status=response.status, headers=headers, body=body)
    answer = web.StreamResponse(status=response.status, headers=headers)
    answer.content_length = body.size
    await answer.prepare(incoming)
    if incoming.method == "HEAD":
        return answer
    for at in range(0, body.size, _PIECE_BYTES):
        size = min(_PIECE_BYTES, body.size - at)
        if body.size <= _READ_AT_ONCE_BYTES:
            piece = read_part(body, at, size)
        else:
            piece = await asyncio.to_thread(read_part, body, at, size)
        await answer.write(piece)
    return answer
