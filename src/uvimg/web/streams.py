"""The streams front-end: one coroutine a connection, read a head, hand it on, write the answer.

The one to read first: what HTTP asks for stands in core/http1.py, what a socket does in stream.py, and here
the conversation. Deadlines are absolute, not per read: a client that drips bytes gains nothing by it.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from typing import Self

from uvimg.core.deadlines import Awaited, Timed
from uvimg.core.errors import BadRequest, RequestTimeout, UvimgError
from uvimg.core.http1 import (
    HANDSHAKE_S,
    HEAD_S,
    LINGER_S,
    WRITE_STALL_BYTES,
    Chunks,
    Head,
    check_start,
    encode_head,
    encode_pieces,
    parse_head,
)
from uvimg.core.message import FilePart, Pieces, Request, Response
from uvimg.core.negotiate import http_date
from uvimg.service import Service
from uvimg.web import LOCAL_PEER, WebSettings
from uvimg.web.bodies import PIECE_BYTES, read_paced, read_piece
from uvimg.web.connections import Connections, has_unread
from uvimg.web.memo import Memo, is_memorable
from uvimg.web.stream import Stream, TlsStream

log = logging.getLogger("uvimg.web")

# Others wait to be served meanwhile.
_ACCEPT_AT_ONCE = 100


class StreamsFrontEnd:
    """See `FrontEnd`."""

    def __init__(self, service: Service, settings: WebSettings) -> None:
        self._service, self._settings = service, settings
        self._memo = Memo(service, settings.memo_bytes)
        self._connections: Connections[_Conversation] = Connections(settings)
        self._listeners: list[socket.socket] = []

    async def start(self, listeners: list[socket.socket]) -> None:
        self._connections.watch()
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(self._settings.backlog)
            self._listeners.append(listener)
            self._hear(listener)

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def stop(self) -> None:
        loop = asyncio.get_running_loop()
        self._memo.stop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            # Whoever waits in the queue is let in: closing would reset the connection.
            self._accept(listener, most=self._settings.backlog)
            listener.close()
        await self._connections.see_off()

    def _hear(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket, most: int = _ACCEPT_AT_ONCE) -> None:
        """Let in who waits."""
        for _ in range(most):
            try:
                connection, peer = listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                # Out of descriptors, say: those in use will be given back.
                log.warning("a connection could not be accepted: %s", exc)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(0.1, self._hear, listener)
                return
            if self._connections.is_full:
                connection.close()
                continue
            self._welcome(listener, connection, peer)

    def _welcome(self, listener: socket.socket, connection: socket.socket, peer: tuple[str, int] | str) -> None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = self._settings.tls_for(listener)
        stream = Stream(connection) if tls is None else TlsStream(connection, tls)
        address = peer[0] if isinstance(peer, tuple) else LOCAL_PEER
        _Conversation(self._service, stream, address, self._connections, self._memo)


class _Conversation(Timed):
    """One connection from its first head to its end."""

    def __init__(
        self, service: Service, stream: Stream, peer: str, connections: "Connections[_Conversation]", memo: Memo
    ) -> None:
        super().__init__()
        # It says itself what it waits for; only answers in `_repeat` are beside that.
        self.touched = False
        self._service, self._stream, self._peer, self._memo = service, stream, peer, memo
        self._connections, self._drain = connections, connections.drain
        self._keepalive_s = connections.settings.keepalive_s
        # Of an answer that has begun in the call in which its request came.
        self._unsent = b""
        # Of what is being written, how much the kernel has not taken.
        self._untaken_now = 0
        # Whether the answer at hand is the last one on this connection.
        self._last = False
        self._expired = False
        self._now = asyncio.get_running_loop().time
        connections.add(self)
        self._task = asyncio.create_task(self._hold())
        # Also of a task that was cancelled before it began.
        self._task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._stream.close()
        self._connections.forget(self)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a connection failed", exc_info=exc)

    # What it is told by who watches it

    def rest(self, now: float) -> None:
        self.touched = False
        if self.awaited == "request":
            self.expect("request", now + self._keepalive_s)

    def expire(self, now: float) -> None:
        if self.find_overdue(self._untaken_now, now) is not None:
            self._interrupt()

    def close_idle(self) -> None:
        # What is to be read already will be answered, and told that it was the last.
        stream = self._stream
        if self.awaited == "request" and not (stream.is_ahead or has_unread(stream.descriptor)):
            self._interrupt()

    def abort(self) -> None:
        self._task.cancel()

    def _interrupt(self) -> None:
        self._expired = True
        self.expect_nothing()
        self._task.cancel()

    def within(self, awaited: Awaited, seconds: float) -> Self:
        """`with` this, what takes longer ends in TimeoutError."""
        self.expect(awaited, self._now() + seconds)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.expect_nothing()
        self.release()
        if self._expired:
            self._expired = False
            if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
                raise TimeoutError from None

    # What it says and hears

    async def _hold(self) -> None:
        async with self._stream as stream:
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                with self.within("request", HANDSHAKE_S):
                    await stream.open()
                stream.shortcut = self._repeat
                while not (self._last or self._drain.is_over):
                    data = await self._read_head(stream)
                    if data is not None:
                        await self._answer(stream, data)
                await self._linger(stream)

    async def _read_head(self, stream: Stream) -> bytes | None:
        """The bytes of the next head; None when it was none and has been refused. EOFError at the end.

        Waiting for its first byte is idling; from then on time counts.
        """
        try:
            with self.within("request", self._keepalive_s):
                first = await stream.read()
        except TimeoutError:
            if not self._drain.is_over:
                raise
            # What crosses our end on its way is read away, so that its client sees an end and no reset.
            return None
        if not first:
            raise EOFError
        stream.unread(first)
        try:
            with self.within("head", HEAD_S):
                return await stream.read_until(b"\r\n\r\n", check_start)
        except UvimgError as exc:
            await self._refuse(stream, exc)
        except TimeoutError:
            await self._refuse(stream, RequestTimeout("The head of the request arrived too slowly."))
        return None

    async def _refuse(self, stream: Stream, error: UvimgError) -> None:
        """Say why a head is none; nothing behind it can be told apart."""
        self._last = True
        await self._send(stream, self._service.refuse_head(error), None)

    def _repeat(self, data: bytes) -> bool:
        """Answer what came before, to the byte, while idle. What it cannot finish at once is left to `_answer`."""
        if self.awaited != "request" or (known := self._memo.recall(data, self._peer)) is None:
            return False
        self.touched, self._last = True, known.last
        sent = 0 if known.last else self._stream.write_now(known.whole)
        self._unsent = known.whole[sent:]
        return not self._unsent

    async def _answer(self, stream: Stream, data: bytes) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, b""
            await self._write(stream, unsent)
            return
        if (known := self._memo.recall(data, self._peer)) is not None:
            self._last = known.last
            await self._write(stream, known.whole)
            return
        try:
            head = parse_head(data)
        except UvimgError as exc:
            await self._refuse(stream, exc)
            return
        watch = None
        if is_memorable(head, data):
            if (known := self._memo.recall_like(head, data, self._peer)) is not None:
                self._last = known.last
                await self._write(stream, known.whole)
                return
            watch = self._memo.begin(head)
        body = _Body(stream, head)
        request = Request(
            *(head.method, head.target, head.path, head.query, watch.headers if watch else head.headers),
            *(self._peer, head.length),
            aiter(body),
        )
        response = self._service.try_now(request)
        if response is None:
            response = await (self._service.handle(request) if head.has_body else self._work(stream, request))
        self._last = self._last or not head.keep_alive or not body.ended or self._drain.begun
        try:
            sent = await self._send(stream, response, head)
            if watch is not None and sent is not None:
                self._memo.keep(watch, sent, self._last, request, response)
        finally:
            response.release()

    async def _work(self, stream: Stream, request: Request) -> Response:
        """Have a request worked on for as long as its client is there: one that goes away frees what works for it."""
        work = asyncio.create_task(self._service.handle(request))
        gone = asyncio.create_task(stream.gone())
        response = None
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ConnectionAbortedError
            response = work.result()
            return response
        finally:
            for task in (work, gone):
                task.cancel()
            late, _ = await asyncio.gather(work, gone, return_exceptions=True)
            if response is None and isinstance(late, Response):
                # It came just when nobody wanted it any more.
                late.release()

    async def _send(self, stream: Stream, response: Response, head: Head | None) -> bytes | None:
        """The answer as it was written, where it was written whole."""
        is_1_0 = head is not None and head.is_1_0
        # Without chunks a body that nobody has counted ends with its connection.
        self._last = self._last or (is_1_0 and isinstance(response.body, Pieces) and response.body.size is None)
        start = encode_head(
            response,
            http_date(int(time.time())),
            keep_alive=not self._last,
            is_1_0=is_1_0,
        )
        body = response.body
        if head is not None and head.method == "HEAD":
            body = b""
        if isinstance(body, Pieces):
            try:
                async for piece in encode_pieces(body, is_1_0=is_1_0):
                    await self._write(stream, start + piece)
                    start = b""
                await self._write(stream, start)
            except BaseException:
                stream.reset_at_end()
                raise
            return None
        if not isinstance(body, FilePart):
            await self._write(stream, start + body)
            return start + body
        for at in range(0, max(body.size, 1), PIECE_BYTES):
            await self._write(stream, start + await read_piece(body, at))
            start = b""
        return None

    async def _write(self, stream: Stream, data: bytes) -> None:
        """Bytes to a client that takes them: what the kernel has no room for must go at a rate."""
        left = memoryview(data)[stream.write_now(data) :]
        if not left:
            return
        self.hold(len(left), self._now())
        with self:
            while left:
                self._untaken_now = len(left)
                await stream.write(left[:WRITE_STALL_BYTES])
                left = left[WRITE_STALL_BYTES:]
                left = left[stream.write_now(left) :]

    async def _linger(self, stream: Stream) -> None:
        """Let the client read its last answer: closing with bytes unread would take it back."""
        stream.end()
        with self.within("end", LINGER_S):
            async for _ in stream:
                pass


class _Body:
    """A request's body as it comes from the stream. RequestTimeout when too slow, BadRequest when it is none."""

    def __init__(self, stream: Stream, head: Head) -> None:
        self._stream = stream
        self.ended = not head.has_body
        self._chunks = Chunks() if head.length is None else None
        self._left = head.length or 0
        self._invites = head.expects_continue

    def __aiter__(self) -> AsyncIterator[bytes]:
        return read_paced(self._read)

    async def _read(self, until: float) -> bytes:
        invites, self._invites = self._invites and not self._stream.is_ahead, False
        while not self.ended:
            try:
                async with asyncio.timeout_at(until):
                    if invites:
                        await self._stream.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                        invites = False
                    data = await self._stream.read(PIECE_BYTES if self._chunks else min(self._left, PIECE_BYTES))
            except TimeoutError:
                # An OSError by its class.
                raise
            except OSError as exc:
                raise BadRequest("The body ended before its declared length.") from exc
            if not data:
                raise BadRequest("The body ended before its declared length.")
            if self._chunks is None:
                self._left -= len(data)
                self.ended = not self._left
                return data
            data = self._chunks.feed(data)
            if self._chunks.rest is not None:
                self._stream.unread(self._chunks.rest)
                self.ended = True
            if data:
                return data
        return b""
