"""The transport front-end: a Protocol on the loop's transports. What is at hand is answered in the very call
in which its bytes arrived: no task, one write for all the requests that came together, in their order. A head
that came before, to the byte, is not even read (web/memo.py).

What takes waiting (a body, a rendition to be made, a large file) has a task of its connection's own, and the
requests behind it wait in the buffer, which is bounded: above its mark the socket is not read. Nor is it while
the client has not taken an answer: who does not read is asked for nothing more.
"""

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import cast

from uvimg.core.errors import BadRequest, RequestTimeout, UvimgError
from uvimg.core.http1 import (
    BODY_BYTES_PER_S,
    BODY_START_S,
    HANDSHAKE_S,
    HEAD_S,
    LINGER_S,
    WRITE_STALL_BYTES,
    WRITE_STALL_S,
    Chunks,
    Head,
    check_start,
    encode_head,
    encode_pieces,
    parse_head,
)
from uvimg.core.message import NO_BODY, FilePart, Pieces, Request, Response
from uvimg.core.negotiate import http_date
from uvimg.service import Service
from uvimg.web import WebSettings, name_peer, read_part
from uvimg.web.drain import Drain
from uvimg.web.listen import close_servers, watch_often
from uvimg.web.memo import Memo, is_memorable
from uvimg.web.tls import TlsTransport

log = logging.getLogger("uvimg.web")

# What may wait behind a request that is being worked on, and what of a body may wait to be taken.
_MAX_AHEAD_BYTES = 131_072
_MAX_UNWRITTEN_BYTES = 65_536
# Files up to here are read in the call itself, from the page cache mostly.
_READ_AT_ONCE_BYTES = 262_144
_PIECE_BYTES = 262_144
# How late a deadline may be noticed.
_WATCH_S = 0.25


class TransportFrontEnd:
    """See `FrontEnd`."""

    def __init__(self, service: Service, settings: WebSettings) -> None:
        self.service, self.settings = service, settings
        self.memo = Memo(service, settings.memo_bytes)
        self.connections: set[_Connection] = set()
        self._changed = asyncio.Event()
        self.drain = Drain()
        self._servers: list[asyncio.Server] = []

    async def start(self, listeners: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self._listeners = [each for listener in listeners for each in watch_often(listener)]
        for listener in self._listeners:
            tls = self.settings.tls_for(listener)
            make = self._connect if tls is None else partial(self._connect_by_tls, tls)
            self._servers.append(await loop.create_server(make, sock=listener, backlog=self.settings.backlog))
        self._watching = asyncio.create_task(self._watch())

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
        await self.drain.run(self._all_closed, self._close_idle, self.settings.grace_s)
        self._watching.cancel()
        for connection in list(self.connections):
            connection.abort()
        await self._all_closed()

    def forget(self, connection: "_Connection") -> None:
        self.connections.discard(connection)
        self._changed.set()

    async def _all_closed(self) -> None:
        while self.connections:
            self._changed.clear()
            await self._changed.wait()

    def _close_idle(self) -> None:
        for connection in list(self.connections):
            connection.close_idle()

    async def _watch(self) -> None:
        """End what is past its deadline. One look at all of them costs less than a timer for each step of each."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_S)
            now = loop.time()
            for connection in list(self.connections):
                try:
                    if connection.repeated:
                        connection.rest(now)
                    elif connection.deadline < now or connection.write_deadline < now:
                        connection.expire(now)
                except Exception:
                    # One that fails must not take all others' deadlines with it.
                    log.exception("a deadline could not be kept")
                    connection.abort()


class _Connection(asyncio.Protocol):
    """One connection from its first head to its end."""

    # There may be tens of thousands.
    __slots__ = (
        *("_body", "_buffer", "_front_end", "_in_head", "_last", "_lingering", "_loop", "_peer", "_reading"),
        *("_resumed", "_searched", "_task", "_transport", "_untaken", "_writable"),
        *("deadline", "now", "repeated", "write_deadline"),
    )

    def __init__(self, front_end: TransportFrontEnd, loop: asyncio.AbstractEventLoop) -> None:
        self._front_end = front_end
        self._loop, self.now = loop, loop.time
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        # No head ends before this place of the buffer: it is not searched twice.
        self._searched = 0
        # What is being worked on, and its body while that has not ended.
        self._task: asyncio.Task[None] | None = None
        self._body: _Body | None = None
        # Whether the kernel has all that was written.
        self._writable = True
        self._resumed: asyncio.Future[None] | None = None
        self._reading = True
        # Nothing more is read as a request: the last answer has been written or is being worked on.
        self._last = False
        self._lingering = False
        # Within a head, its first byte's time counts, not its last's.
        self._in_head = False
        # Until when the client must have sent what is awaited, and until when taken what was written.
        self.deadline = self.write_deadline = math.inf
        self._untaken = 0
        # Since a watcher last looked, there was an answer from memory: it is idle from then on.
        self.repeated = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._peer = name_peer(transport)
        if not self._peer or len(self._front_end.connections) >= self._front_end.settings.max_connections:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=0)
        self._front_end.connections.add(self)
        self.rest(self.now())

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._last = True
        self._buffer = b""
        self.deadline = self.write_deadline = math.inf
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
        self._front_end.forget(self)

    def data_received(self, data: bytes) -> None:
        # Nearly all requests of a busy service came before, to the byte, and stand alone.
        if self._task is None and not self._buffer and self._writable and not self._last:
            known = self._front_end.memo.recall(data, self._peer)
            if known is not None:
                assert self._transport is not None
                self.repeated = True
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
        assert self._transport is not None
        self._writable = False
        self._untaken = self._transport.get_write_buffer_size()
        self.write_deadline = self.now() + WRITE_STALL_S
        if self._body is None:
            self.deadline = math.inf
        self.regulate()

    def resume_writing(self) -> None:
        self._resume()
        self.write_deadline = math.inf
        if self._lingering:
            self._loop.call_soon(self._end_writing)
        elif self._task is None:
            self._advance()
        self.regulate()

    def _resume(self) -> None:
        self._writable = True
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)

    async def _until_writable(self) -> None:
        while not self._writable:
            self._resumed = self._loop.create_future()
            await self._resumed

    # Ends

    def close_idle(self) -> None:
        """Unless a request is in flight; a head that has begun is one."""
        # What is unwritten goes on first: `_advance` ends it, for the drain is over.
        idle = self._task is None and self._writable and not (self._lingering or self._in_head)
        if idle and self._transport is not None:
            self._last = True
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def expire(self, now: float) -> None:
        """A deadline has passed: of a write, of lingering, of a body, of a head or of idling."""
        if self.write_deadline < now and self._transport is not None:
            untaken = self._transport.get_write_buffer_size()
            if untaken > self._untaken - WRITE_STALL_BYTES:
                self.abort()
            self._untaken, self.write_deadline = untaken, now + WRITE_STALL_S
            return
        self.deadline = math.inf
        if self._body is not None:
            self._body.expire()
        elif self._in_head and not self._lingering:
            self._refuse(RequestTimeout("The head of the request arrived too slowly."))
        else:
            self.abort()

    def _allow(self, seconds: float) -> None:
        self.deadline = self.now() + seconds

    def rest(self, now: float) -> None:
        """Between requests, unless something else has begun since."""
        self.repeated = False
        if self._task is None and not self._buffer and self._writable and not self._last:
            self._in_head = False
            self.deadline = now + self._front_end.settings.keepalive_s

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
            self._buffer = data[at:]
            self._searched, self._in_head = 0, False
        self._write(written)
        if self._task is not None:
            if self._body is not None and self._buffer:
                behind, self._buffer = self._buffer, b""
                self._body.feed(behind)
            self.regulate()
        elif not self._writable:
            pass
        elif self._last:
            self._linger()
        else:
            self._await_head()

    def _await_head(self) -> None:
        if not self._buffer:
            if self._front_end.drain.is_over:
                self._linger()
            else:
                self.rest(self.now())
            return
        try:
            check_start(self._buffer)
        except UvimgError as exc:
            self._refuse(exc)
            return
        # The end may have come in part.
        self._searched = max(0, len(self._buffer) - 3)
        if not self._in_head:
            self._in_head = True
            self._allow(HEAD_S)

    def _begin(self, data: bytes) -> bytes | None:
        """The answer to a request, where it is at hand; else a task begins with it."""
        if (known := self._front_end.memo.recall(data, self._peer)) is not None:
            self._last = known.last
            return known.whole
        head = parse_head(data)
        memo, watch = self._front_end.memo, None
        if is_memorable(head, data):
            if (known := memo.recall_like(head, data, self._peer)) is not None:
                self._last = known.last
                return known.whole
            watch = memo.begin(head)
        body = _Body(self, head) if head.has_body else None
        request = Request(
            *(head.method, head.target, head.path, head.query, watch.headers if watch else head.headers),
            *(self._peer, head.length),
            NO_BODY if body is None else aiter(body),
        )
        response = self._front_end.service.try_now(request)
        if response is not None and body is None and _is_at_hand(response):
            self._last = self._last or not head.keep_alive or self._front_end.drain.begun
            answer = self._encode(response, head)
            if watch is not None:
                memo.keep(watch, answer, self._last, request, response)
            return answer
        self.deadline = math.inf
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
            self._last = self._last or not head.keep_alive or unread or self._front_end.drain.begun
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
        await self._until_writable()
        part = response.body
        if isinstance(part, Pieces) and head.method != "HEAD":
            self._last = self._last or head.is_1_0
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
        for at in range(0, part.size, _PIECE_BYTES):
            piece = await asyncio.to_thread(read_part, part, at, min(_PIECE_BYTES, part.size - at))
            await self._until_writable()
            self._write([start, piece])
            start = b""

    def _write(self, pieces: list[bytes]) -> None:
        if pieces and self._transport is not None:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    # The last answer

    def _refuse(self, error: UvimgError) -> None:
        """Say why a head is none; nothing behind it can be told apart."""
        self._last = True
        response = self._front_end.service.refuse_head(error)
        assert isinstance(response.body, bytes)
        self._write([encode_head(response, http_date(int(time.time())), keep_alive=False), response.body])
        self._linger()

    def _linger(self) -> None:
        """Let the client read its last answer: closing with bytes unread would take it back."""
        self._last = self._lingering = True
        self._buffer, self._body = b"", None
        self.regulate()
        # Not in this call, which may be asyncio's own writing: it would end the socket a second time.
        self._loop.call_soon(self._end_writing)

    def _end_writing(self) -> None:
        """Once all is written; before that, asyncio would end a socket that its client may have reset by then."""
        if self._transport is not None and not self._transport.is_closing() and self._writable:
            self._allow(LINGER_S)
            with contextlib.suppress(OSError):
                self._transport.write_eof()

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
    return isinstance(body, bytes) or (isinstance(body, FilePart) and body.size <= _READ_AT_ONCE_BYTES)


class _Body:
    """A request's body as it comes. RequestTimeout when too slow, BadRequest when it is none."""

    def __init__(self, connection: _Connection, head: Head) -> None:
        self._connection, self._head = connection, head
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

    def expire(self) -> None:
        self._error = self._error or RequestTimeout()
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        now = self._connection.now
        if self._head.expects_continue and not self._held and not self.ended:
            self._connection.invite_body()
        # The time that passes while nobody asks for more is not the client's.
        free_until, received = now() + BODY_START_S, 0
        while True:
            if self._pieces:
                data = b"".join(self._pieces)
                self._pieces, self._held = [], 0
                self._connection.regulate()
                received += len(data)
                given = now()
                yield data
                free_until += now() - given
            elif self._error is not None:
                raise self._error
            elif self.ended:
                return
            else:
                self._connection.deadline = free_until + received / BODY_BYTES_PER_S
                self._changed.clear()
                await self._changed.wait()
                self._connection.deadline = math.inf
