"""The transport front-end: a Protocol on the loop's transports. What is at hand is answered in the very call
in which its bytes arrived: no task, one write for all the requests that came together, in their order. A head
that came before, to the byte, is not even read (web/memo.py).

What takes waiting (a body, a rendition to be made, a large file) has a task of its connection's own, and the
requests behind it wait in the buffer, which is bounded: above its mark the socket is not read. Nor is it while
the client has not taken an answer: who does not read is asked for nothing more.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import cast

from uvimg.core.errors import BadRequest, UvimgError
from uvimg.core.http1 import HANDSHAKE_S, Chunks, Head, encode_head, encode_pieces, parse_head
from uvimg.core.message import NO_BODY, FilePart, Pieces, Request, Response
from uvimg.core.negotiate import http_date
from uvimg.service import Service
from uvimg.web import WebSettings
from uvimg.web.bodies import PIECE_BYTES, read_paced, read_part, read_piece
from uvimg.web.connections import Connection, Connections
from uvimg.web.listen import close_servers, watch_often
from uvimg.web.memo import Memo, is_memorable
from uvimg.web.tls import TlsTransport

log = logging.getLogger("uvimg.web")

# What may wait behind a request that is being worked on, and what of a body may wait to be taken.
_MAX_AHEAD_BYTES = 131_072
_MAX_UNWRITTEN_BYTES = 65_536


class TransportFrontEnd:
    """See `FrontEnd`."""

    def __init__(self, service: Service, settings: WebSettings) -> None:
        self.service, self._settings = service, settings
        self.memo = Memo(service, settings.memo_bytes)
        self.connections: Connections[_Connection] = Connections(settings)
        self._servers: list[asyncio.Server] = []

    async def start(self, listeners: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self.connections.watch()
        self._listeners = [each for listener in listeners for each in watch_often(listener)]
        for listener in self._listeners:
            tls = self._settings.tls_for(listener)
            make = self._connect if tls is None else partial(self._connect_by_tls, tls)
            self._servers.append(await loop.create_server(make, sock=listener, backlog=self._settings.backlog))

    def _connect(self) -> "_Connection":
        return _Connection(self, asyncio.get_running_loop())

    def _connect_by_tls(self, context: ssl.SSLContext) -> TlsTransport:
        return TlsTransport(context, HANDSHAKE_S, self._connect())

    @property
    def open_connections(self) -> int:
        return len(self.connections)

    async def stop(self) -> None:
        self.memo.stop()
        await close_servers(self._servers, self._listeners)
        await self.connections.see_off()


class _Connection(Connection):
    """One connection from its first head to its end."""

    __slots__ = ("_body", "_drain", "_front_end", "_lingering", "_reading", "_resumed", "_task")

    def __init__(self, front_end: TransportFrontEnd, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(front_end.connections, loop)
        self._front_end, self._drain = front_end, front_end.connections.drain
        # What is being worked on, and its body while that has not ended.
        self._task: asyncio.Task[None] | None = None
        self._body: _Body | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._reading = True
        # The last answer has been written.
        self._lingering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._meet(transport):
            cast(asyncio.Transport, transport).set_write_buffer_limits(high=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
        self._resume()
        if self._body is not None:
            self._body.break_off()
        if self._task is None:
            self._end()
        else:
            # A client that goes away frees what works for it.
            self._task.cancel()
            self._task.add_done_callback(self._end)

    def _end(self, _: object = None) -> None:
        self._connections.forget(self)

    def data_received(self, data: bytes) -> None:
        # Nearly all requests of a busy service came before, to the byte, and stand alone.
        if self._task is None and not self._buffer and self._writable and not self._last:
            known = self._front_end.memo.recall(data, self.peer)
            if known is not None:
                assert self._transport is not None
                self.touched = True
                self._transport.write(known.whole)
                if known.last:
                    self._linger()
                return
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._body is not None:
            self._body.feed(data)
            return
        self._buffer = self._buffer + data if self._buffer else data
        if self._task is None:
            self._advance()
        else:
            self.regulate()

    def eof_received(self) -> bool:
        # Whether it has gone or only ended its side cannot be told apart; what was answered is still written.
        if self._body is None or self._body.ended:
            return False
        # It waits to hear what became of a body that ended too soon.
        self._body.break_off()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self.regulate()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resume()
        if self._lingering:
            self._loop.call_soon(self._end_writing)
        elif self._task is None:
            self._advance()
        self.regulate()

    def _resume(self) -> None:
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)

    async def _until_writable(self) -> None:
        while not self._writable:
            self._resumed = self._loop.create_future()
            await self._resumed

    @property
    def is_idle(self) -> bool:
        return self._task is None and not self._buffer and self._writable and not self._last

    def regulate(self) -> None:
        """Read the socket only where there is a place for what comes."""
        if self._transport is None:
            return
        if self._body is not None:
            wanted = self._body.has_room
        else:
            wanted = self._lingering or (self._writable and len(self._buffer) <= _MAX_AHEAD_BYTES)
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # Requests

    def _advance(self) -> None:
        """Answer what is at hand of what has come, in order; stop at what takes waiting."""
        data, at = self._buffer, 0
        written: list[bytes] = []
        size = 0
        while at < len(data) and self._task is None and not self._last and self._writable:
            end = data.find(b"\r\n\r\n", at or self._searched) + 4
            if end < 4:
                break
            try:
                answer = self._begin(data[at:end])
            except UvimgError as exc:
                self._write(written)
                self._refuse(exc)
                return
            at = end
            if answer is not None:
                written.append(answer)
                size += len(answer)
                if size > _MAX_UNWRITTEN_BYTES:
                    # Requests cost a client little, answers cost us memory: is there still room for more?
                    self._write(written)
                    written, size = [], 0
        if at:
            self._buffer, self._searched = data[at:], 0
            if self.awaited == "head":
                self.expect_nothing()
        self._write(written)
        if self._task is not None:
            if self._body is not None and self._buffer:
                behind, self._buffer = self._buffer, b""
                self._body.feed(behind)
            self.regulate()
        elif not self._writable:
            pass
        elif self._last or (not self._buffer and self._drain.is_over):
            self._linger()
        elif self._buffer:
            self._await_head()
        else:
            self.touched = True

    def _begin(self, data: bytes) -> bytes | None:
        """The answer to a request, where it is at hand; else a task begins with it."""
        if (known := self._front_end.memo.recall(data, self.peer)) is not None:
            self._last = known.last
            return known.whole
        head = parse_head(data)
        memo, watch = self._front_end.memo, None
        if is_memorable(head, data):
            if (known := memo.recall_like(head, data, self.peer)) is not None:
                self._last = known.last
                return known.whole
            watch = memo.begin(head)
        body = _Body(self, head) if head.has_body else None
        request = Request(
            *(head.method, head.target, head.path, head.query, watch.headers if watch else head.headers),
            *(self.peer, head.length),
            NO_BODY if body is None else aiter(body),
        )
        response = self._front_end.service.try_now(request)
        if response is not None and body is None and _is_at_hand(response):
            self._last = self._last or not head.keep_alive or self._drain.begun
            answer = self._encode(response, head)
            if watch is not None:
                memo.keep(watch, answer, self._last, request, response)
            return answer
        self.expect_nothing()
        self._body = body
        self._task = self._loop.create_task(self._work(request, response, head, body))
        if response is not None:
            # Also when the task is cancelled before it began.
            self._task.add_done_callback(lambda _: response.release())
        return None

    def _encode(self, response: Response, head: Head) -> bytes:
        """An answer whose body is at hand, whole."""
        body = response.body
        assert head.method == "HEAD" or not isinstance(body, Pieces)
        if isinstance(body, FilePart):
            try:
                body = b"" if head.method == "HEAD" else read_part(body, 0, body.size)
            except OSError as exc:
                log.error("a file could not be sent: %s", exc)
                raise UvimgError() from exc
            finally:
                response.release()
        start = self._encode_head(response, head)
        return start if isinstance(body, Pieces) or head.method == "HEAD" else start + body

    def _encode_head(self, response: Response, head: Head) -> bytes:
        return encode_head(response, http_date(int(time.time())), keep_alive=not self._last, is_1_0=head.is_1_0)

    async def _work(self, request: Request, response: Response | None, head: Head, body: "_Body | None") -> None:
        """One request that takes waiting, to the end of its answer."""
        try:
            if response is None:
                response = await self._front_end.service.handle(request)
            unread = body is not None and not body.ended
            self._last = self._last or not head.keep_alive or unread or self._drain.begun
            await self._send(response, head)
        except Exception:
            log.exception("a connection failed")
            self.abort()
        finally:
            if response is not None:
                response.release()
            self._task = None
        if self._transport is None or self._transport.is_closing():
            return
        if body is not None and not body.ended:
            self._linger()
        else:
            self._advance()
        self.regulate()

    async def _send(self, response: Response, head: Head) -> None:
        if not self._writable:
            await self._until_writable()
        part = response.body
        if isinstance(part, Pieces) and head.method != "HEAD":
            self._last = self._last or (head.is_1_0 and part.size is None)
            start = self._encode_head(response, head)
            async for piece in encode_pieces(part, is_1_0=head.is_1_0):
                self._write([start, piece])
                start = b""
                await self._until_writable()
            # In HTTP/1.0 there may have been nothing.
            self._write([start])
            return
        if not isinstance(part, FilePart) or head.method == "HEAD" or _is_at_hand(response):
            self._write([self._encode(response, head)])
            return
        start = self._encode_head(response, head)
        for at in range(0, part.size, PIECE_BYTES):
            piece = await read_piece(part, at)
            await self._until_writable()
            self._write([start, piece])
            start = b""

    def _write(self, pieces: list[bytes]) -> None:
        if pieces and self._transport is not None:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    # The last answer

    def _refuse(self, error: UvimgError) -> None:
        self._last = True
        response = self._front_end.service.refuse_head(error)
        assert isinstance(response.body, bytes)
        self._write([encode_head(response, http_date(int(time.time())), keep_alive=False), response.body])
        self._linger()

    def _linger(self) -> None:
        self._last = self._lingering = True
        self._buffer, self._body = b"", None
        self.expect_nothing()
        self.regulate()
        # Not in this call, which may be asyncio's own writing: it would end the socket a second time.
        self._loop.call_soon(self._end_writing)

    # What a body asks of its connection

    def invite_body(self) -> None:
        self._write([b"HTTP/1.1 100 Continue\r\n\r\n"])

    def give_back(self, data: bytes) -> None:
        """What came behind the end of a body belongs to the next request."""
        self._body = None
        self._buffer = data
        self.regulate()


def _is_at_hand(response: Response) -> bool:
    body = response.body
    return isinstance(body, bytes) or (isinstance(body, FilePart) and body.size <= PIECE_BYTES)


class _Body:
    """A request's body as it comes. RequestTimeout when too slow, BadRequest when it is none."""

    def __init__(self, connection: _Connection, head: Head) -> None:
        self._connection, self._invites = connection, head.expects_continue
        self._chunks = Chunks() if head.length is None else None
        self._left = head.length or 0
        self._pieces: list[bytes] = []
        self._held = 0
        self._error: UvimgError | None = None
        self._changed = asyncio.Event()
        # Whether all of it has come.
        self.ended = False

    @property
    def has_room(self) -> bool:
        return self._held <= _MAX_AHEAD_BYTES

    def feed(self, data: bytes) -> None:
        if self._error is not None:
            return
        try:
            if self._chunks is None:
                behind = data[self._left :]
                data = data[: self._left]
                self._left -= len(data)
                self.ended = not self._left
            else:
                data = self._chunks.feed(data)
                behind = self._chunks.rest or b""
                self.ended = self._chunks.rest is not None
        except UvimgError as exc:
            self._error = exc
        else:
            if data:
                self._pieces.append(data)
                self._held += len(data)
            if self.ended:
                self._connection.give_back(behind)
            else:
                self._connection.regulate()
        self._changed.set()

    def break_off(self) -> None:
        self._error = self._error or BadRequest("The body ended before its declared length.")
        self._changed.set()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return read_paced(self._read)

    async def _read(self, until: float) -> bytes:
        if self._invites:
            self._invites = False
            if not self._held and not self.ended:
                self._connection.invite_body()
        if not (self._pieces or self._error or self.ended):
            async with asyncio.timeout_at(until):
                while not (self._pieces or self._error or self.ended):
                    self._changed.clear()
                    await self._changed.wait()
        if self._error is not None and not self._pieces:
            raise self._error
        data = b"".join(self._pieces)
        self._pieces, self._held = [], 0
        self._connection.regulate()
        return data
