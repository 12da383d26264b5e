"""The aiohttp front-end: one handler on `web.Server`, without its router, which would cost 6 µs a request.

Surprises: aiohttp's low-level server knows nothing of Expect, so it is met here, and only when somebody
really wants the body; and a body that nobody read to its end closes the connection behind the answer.
"""

import asyncio
import socket
from collections.abc import AsyncIterator

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from uvimg.core.errors import BadRequest, ExpectationFailed, RequestTimeout
from uvimg.core.http1 import HANDSHAKE_S
from uvimg.core.message import FilePart, Request, Response, fold_headers, split_target
from uvimg.service import Service
from uvimg.web import WebSettings, name_peer, read_part
from uvimg.web.drain import Drain
from uvimg.web.listen import close_servers

# When requests have been answered, or their grace is over: for what is still in a buffer.
_LAST_WRITES_S = 1.0
# How late the end of the last connection may be noticed.
_LOOK_S = 0.02
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
        self._server = server
        self._runner = web.ServerRunner(server, shutdown_timeout=_LAST_WRITES_S)
        self._servers: list[asyncio.Server] = []
        self._drain = Drain()
        # The connections with a request in flight.
        self._busy: set[object] = set()

    async def start(self, listeners: list[socket.socket]) -> None:
        await self._runner.setup()
        assert self._runner.server is not None
        self._listeners = listeners
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

    @property
    def open_connections(self) -> int:
        return len(self._server.connections)

    async def stop(self) -> None:
        await close_servers(self._servers, self._listeners)
        # Not aiohttp's own shutdown yet: from its first moment on it reads no more of any body.
        await self._drain.run(self._all_closed, self._close_idle, self._settings.grace_s)
        await self._runner.cleanup()

    async def _all_closed(self) -> None:
        assert self._runner.server is not None
        # aiohttp tells nobody when one ends.
        while self._runner.server.connections:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    def _close_idle(self) -> None:
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection not in self._busy:
                # Its `close` leaves idle connections open. What has been written is still sent.
                connection.force_close()

    async def _handle(self, incoming: web.BaseRequest) -> web.StreamResponse:
        self._busy.add(incoming.protocol)
        try:
            request = _translate(incoming)
            response = self._service.try_now(request)
            if response is None:
                response = await self._service.handle(request)
            try:
                return await _send(incoming, response, last=self._drain.begun)
            finally:
                response.release()
        finally:
            self._busy.discard(incoming.protocol)


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


async def _send(incoming: web.BaseRequest, response: Response, *, last: bool) -> web.StreamResponse:
    headers = response.headers
    headers["Server"] = "uvimg"
    if not incoming.content.at_eof():
        headers["Connection"] = "close"
    body = response.body
    answer: web.StreamResponse
    if isinstance(body, FilePart):
        answer = web.StreamResponse(status=response.status, headers=headers)
        answer.content_length = body.size
    else:
        answer = web.Response(status=response.status, headers=headers, body=body)
    if last:
        # The header alone would leave it to the client.
        answer.force_close()
    if not isinstance(body, FilePart):
        return answer
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
