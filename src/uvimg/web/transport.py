"""The transport front-end: a Protocol on the loop's transports. What is at hand is answered in the very call
in which its bytes arrived: no task, one write for all the requests that came together, in their order.

What takes waiting (a body, a rendition to be made, a large file) has a task of its connection's own, and the
requests behind it wait in the buffer, which is bounded: above its mark the socket is not read.
"""

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import cast

from uvimg.core.errors import BadRequest, HeadTooLarge, RequestTimeout, TargetTooLong, UvimgError
from uvimg.core.http1 import (
    BODY_BYTES_PER_S,
    BODY_START_S,
    HEAD_S,
    LINGER_S,
    MAX_HEAD_BYTES,
    MAX_TARGET_BYTES,
    WRITE_STALL_S,
    Chunks,
    Head,
    encode_head,
    parse_head,
    refuse_head,
)
from uvimg.core.message import FilePart, Request, Response
from uvimg.core.negotiate import http_date
from uvimg.service import Service
from uvimg.web import WebSettings

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
        self.connections: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []

    async def start(self, listeners: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for listener in listeners:
            server = await loop.create_server(
                lambda: _Connection(self, loop), sock=listener, backlog=self.settings.backlog
            )
            self._servers.append(server)
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        deadline = time.monotonic() + self.settings.grace_s
        for connection in list(self.connections):
            connection.finish()
        while self.connections and time.monotonic() < deadline:
            closed = [connection.closed for connection in self.connections]
            await asyncio.wait(closed, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
        self._watching.cancel()
        left = [connection.closed for connection in self.connections]
        for connection in list(self.connections):
            connection.abort()
        await asyncio.gather(self._watching, *left, return_exceptions=True)

    async def _watch(self) -> None:
        """End what is past its deadline. One look at all of them costs less than a timer for each step of each."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_S)
            now = loop.time()
            for connection in [each for each in self.connections if each.deadline < now]:
                connection.expire()


class _Connection(asyncio.Protocol):
    """One connection from its first head to its end."""

    def __init__(self, front_end: TransportFrontEnd, loop: asyncio.AbstractEventLoop) -> None:
        self._front_end, self._service = front_end, front_end.service
        self._loop = loop
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._body: _Body | None = None
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        # Nothing more is read as a request: the last answer has been written or is being worked on.
        self._last = False
        self._reading = True
        self._lingering = False
        # Within a head, its first byte's time counts, not its last's.
        self._in_head = False
        self.deadline = math.inf
        self.closed: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if peer else ""
        if len(self._front_end.connections) >= self._front_end.settings.max_connections:
            self._transport.abort()
            return
        self._front_end.connections.add(self)
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._front_end.connections.discard(self)
        self._last = True
        self._writable.set()
        if self._body is not None:
            self._body.break_off()
        if self._task is not None:
            # A client that goes away frees what works for it.
            self._task.cancel()
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._body is not None:
            self._body.feed(data)
            return
        self._buffer = self._buffer + data if self._buffer else data
        if self._task is None:
            self._advance()
        elif len(self._buffer) > _MAX_AHEAD_BYTES:
            self._read(False)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable.clear()
        self._wait_no_longer_than(WRITE_STALL_S)
        # Who does not read its answers is not asked for more requests.
        self._read(False)

    def resume_writing(self) -> None:
        self._writable.set()
        self._rest()
        if self._task is None and not self._last:
            self._read(True)
            self._advance()

    # Ends

    def finish(self) -> None:
        """What is in flight is finished, and nothing else begun."""
        self._last = True
        if self._task is None and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """The deadline has passed: of a head, of idling, of a body, of a write or of lingering."""
        self.deadline = math.inf
        if self._body is not None and self._writable.is_set():
            self._body.expire()
        elif self._in_head and not self._lingering:
            self._refuse(RequestTimeout("The head of the request arrived too slowly."))
        else:
            self.abort()

    def _wait_no_longer_than(self, seconds: float) -> None:
        self.deadline = self._loop.time() + seconds

    def _rest(self) -> None:
        """Between requests."""
        self._in_head = False
        self._wait_no_longer_than(self._front_end.settings.keepalive_s)

    def _read(self, wanted: bool) -> None:
        if self._transport is None or wanted == self._reading:
            return
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
        while at < len(data) and self._task is None and not self._last and self._writable.is_set():
            if data.startswith(b"\r\n", at):
                # A blank line before a request line is let pass (RFC 9112 2.2).
                at += 2
                continue
            end = data.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES) + 4
            if end < 4:
                break
            try:
                head = parse_head(data[at:end])
            except UvimgError as exc:
                self._write(written)
                self._refuse(exc)
                return
            at = end
            self._begin(head, written)
            if sum(map(len, written)) > _MAX_UNWRITTEN_BYTES:
                # Requests cost a client little, answers cost us memory: is there still room for more?
                self._write(written)
                written = []
        self._buffer = data[at:]
        self._write(written)
        if self._task is None and not self._last and self._writable.is_set():
            self._await_head()
        elif self._last and self._task is None:
            self._close()
        if self._body is not None and self._buffer:
            behind, self._buffer = self._buffer, b""
            self._body.feed(behind)

    def _await_head(self) -> None:
        if not self._buffer:
            self._rest()
            return
        if len(self._buffer) >= MAX_HEAD_BYTES:
            line = self._buffer.partition(b"\r\n")[0]
            self._refuse(TargetTooLong() if len(line) > MAX_TARGET_BYTES else HeadTooLarge())
        elif not self._in_head:
            self._wait_no_longer_than(HEAD_S)
            self._in_head = True

    def _begin(self, head: Head, written: list[bytes]) -> None:
        """Answer a request into `written`, or have a task begin with it."""
        body = _Body(self, head) if head.has_body else None
        request = Request(
            *(head.method, head.target, head.path, head.query, head.headers, self._peer, head.length),
            _nothing() if body is None else aiter(body),
        )
        response = self._service.try_now(request)
        if response is not None and body is None and _is_at_hand(response):
            self._last = self._last or not head.keep_alive
            written.append(self._encode(response, head))
            return
        self._in_head = False
        self.deadline = math.inf
        self._body = body
        self._task = self._loop.create_task(self._work(request, response, head, body))

    def _encode(self, response: Response, head: Head) -> bytes:
        """An answer whose body is at hand, whole."""
        keep_alive = not self._last
        start = encode_head(response, http_date(int(time.time())), keep_alive=keep_alive, is_1_0=head.is_1_0)
        body = response.body
        if isinstance(body, FilePart):
            with body.file as file:
                return start if head.method == "HEAD" else start + os.pread(file.fileno(), body.size, body.start)
        return start if head.method == "HEAD" else start + body

    async def _work(self, request: Request, response: Response | None, head: Head, body: "_Body | None") -> None:
        """One request that takes waiting, to the end of its answer."""
        try:
            if response is None:
                response = await self._service.handle(request)
            self._last = self._last or not head.keep_alive or (body is not None and not body.ended)
            await self._send(response, head)
        except OSError:
            self.abort()
        except Exception:
            log.exception("a connection failed")
            self.abort()
        finally:
            if response is not None:
                response.release()
            self._task = None
        if self._transport is None:
            return
        if body is not None and not body.ended:
            self._linger()
            return
        self._body = None
        self._read(True)
        self._advance()

    async def _send(self, response: Response, head: Head) -> None:
        part = response.body
        if not isinstance(part, FilePart) or head.method == "HEAD" or _is_at_hand(response):
            self._write([self._encode(response, head)])
            return
        self._write([encode_head(response, http_date(int(time.time())), keep_alive=not self._last, is_1_0=head.is_1_0)])
        for at in range(0, part.size, _PIECE_BYTES):
            size = min(_PIECE_BYTES, part.size - at)
            piece = await asyncio.to_thread(os.pread, part.file.fileno(), size, part.start + at)
            await self._writable.wait()
            self._write([piece])
        await self._writable.wait()

    def _write(self, pieces: list[bytes]) -> None:
        if pieces and self._transport is not None:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    # The last answer

    def _refuse(self, error: UvimgError) -> None:
        """Say why a head is none; nothing behind it can be told apart."""
        self._last = True
        response = refuse_head(error)
        self._write([encode_head(response, http_date(int(time.time())), keep_alive=False) + bytes(response.body)])  # type: ignore[arg-type]
        self._linger()

    def _linger(self) -> None:
        """Let the client read its answer: closing with bytes unread would take it back."""
        self._last = self._lingering = True
        self._buffer = b""
        self._wait_no_longer_than(LINGER_S)
        self._read(True)
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # What a body asks of its connection

    def want_body(self, head: Head) -> None:
        if head.expects_continue:
            self._write([b"HTTP/1.1 100 Continue\r\n\r\n"])

    def allow_body_until(self, deadline: float) -> None:
        self.deadline = deadline

    def read_body(self, wanted: bool) -> None:
        self._read(wanted)

    def give_back(self, data: bytes) -> None:
        """What came behind the end of a body belongs to the next request."""
        self._buffer = data + self._buffer
        self._body = None


def _is_at_hand(response: Response) -> bool:
    return not isinstance(response.body, FilePart) or response.body.size <= _READ_AT_ONCE_BYTES


async def _nothing() -> AsyncIterator[bytes]:
    nothing: tuple[bytes, ...] = ()
    for piece in nothing:
        yield piece


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
                if self._held > _MAX_AHEAD_BYTES:
                    self._connection.read_body(False)
            if self.ended:
                self._connection.give_back(behind)
        self._changed.set()

    def break_off(self) -> None:
        if not self.ended:
            self._error = self._error or BadRequest("The body ended before its declared length.")
        self._changed.set()

    def expire(self) -> None:
        self._error = self._error or RequestTimeout()
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        self._connection.want_body(self._head)
        started, received = loop.time(), 0
        while True:
            while self._pieces:
                data = b"".join(self._pieces)
                self._pieces, self._held = [], 0
                received += len(data)
                yield data
            if self._error is not None:
                raise self._error
            if self.ended:
                return
            self._connection.allow_body_until(started + BODY_START_S + received / BODY_BYTES_PER_S)
            self._connection.read_body(True)
            self._changed.clear()
            await self._changed.wait()
            self._connection.allow_body_until(math.inf)
