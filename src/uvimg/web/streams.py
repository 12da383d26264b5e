"""The streams front-end: one coroutine a connection, read a head, hand it on, write the answer.

The one to read first: what HTTP asks for stands in core/http1.py, what a socket does in stream.py, and here
the conversation. Deadlines are absolute, not per read: a client that drips bytes gains nothing by it.
"""

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import AsyncIterator
from typing import Self

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
from uvimg.core.message import FilePart, Pieces, Request, Response
from uvimg.core.negotiate import http_date
from uvimg.service import Service
from uvimg.web import LOCAL_PEER, WebSettings, read_part
from uvimg.web.drain import Drain
from uvimg.web.memo import Memo, is_memorable
from uvimg.web.stream import Stream, TlsStream

log = logging.getLogger("uvimg.web")

# Files are sent in such pieces. A large one is read in a thread: a disk may take its time.
_PIECE_BYTES = 262_144
_READ_AT_ONCE_BYTES = 1 << 20
# Others wait to be served meanwhile.
_ACCEPT_AT_ONCE = 100
# How late a deadline may be noticed.
_WATCH_S = 0.25


class StreamsFrontEnd:
    """See `FrontEnd`."""

    def __init__(self, service: Service, settings: WebSettings) -> None:
        self._service, self._settings = service, settings
        self._memo, self._drain = Memo(service, settings.memo_bytes), Drain()
        self._listeners: list[socket.socket] = []
        self._talking: dict[asyncio.Task[None], _Conversation] = {}

    async def start(self, listeners: list[socket.socket]) -> None:
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(self._settings.backlog)
            self._listeners.append(listener)
            self._hear(listener)
        self._watching = asyncio.create_task(self._watch())

    @property
    def open_connections(self) -> int:
        return len(self._talking)

    async def stop(self) -> None:
        loop = asyncio.get_running_loop()
        self._memo.stop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            # Whoever waits in the queue is let in: closing would reset the connection.
            self._accept(listener, most=self._settings.backlog)
            listener.close()
        await self._drain.run(self._all_closed, self._close_idle, self._settings.grace_s)
        for task in [*self._talking, self._watching]:
            task.cancel()
        await asyncio.gather(*self._talking, self._watching, return_exceptions=True)

    async def _all_closed(self) -> None:
        while self._talking:
            await asyncio.wait(self._talking)

    def _close_idle(self) -> None:
        for task, conversation in self._talking.items():
            if conversation.idle and not conversation.is_ahead:
                task.cancel()

    async def _watch(self) -> None:
        """End what is past its deadline. One look at all of them costs less than a timer for each step of each."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_S)
            now = loop.time()
            for task, conversation in self._talking.items():
                repeated, conversation.repeated = conversation.repeated, False
                if repeated and conversation.idle:
                    conversation.deadline = now + self._settings.keepalive_s
                elif conversation.deadline < now:
                    conversation.expire(task)

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
            if len(self._talking) >= self._settings.max_connections:
                connection.close()
                continue
            self._welcome(listener, connection, peer)

    def _welcome(self, listener: socket.socket, connection: socket.socket, peer: tuple[str, int] | str) -> None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = self._settings.tls_for(listener)
        stream = Stream(connection) if tls is None else TlsStream(connection, tls)
        address = peer[0] if isinstance(peer, tuple) else LOCAL_PEER
        conversation = _Conversation(
            self._service, stream, address, self._settings.keepalive_s, self._drain, self._memo
        )
        task = asyncio.create_task(conversation.hold())
        self._talking[task] = conversation
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        # Also of a task that was cancelled before it began.
        self._talking.pop(task).close()
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a connection failed", exc_info=exc)


class _Conversation:
    """One connection from its first head to its end."""

    def __init__(
        self, service: Service, stream: Stream, peer: str, keepalive_s: float, drain: Drain, memo: Memo
    ) -> None:
        self._service, self._stream, self._peer, self._keepalive_s = service, stream, peer, keepalive_s
        self._drain, self._memo = drain, memo
        # Of an answer that has begun in the call in which its request came.
        self._unsent = b""
        # Since a watcher last looked, there was such an answer: it is idle from then on.
        self.repeated = False
        self.idle = True
        # Whether the answer at hand is the last one on this connection.
        self._last = False
        # In the loop's time.
        self.deadline = math.inf
        self._expired = False
        self._now = asyncio.get_running_loop().time

    def within(self, seconds: float) -> Self:
        """`with` this, what takes longer ends in TimeoutError."""
        self.deadline = self._now() + seconds
        return self

    def expire(self, task: "asyncio.Task[None]") -> None:
        self._expired, self.deadline = True, math.inf
        task.cancel()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.deadline = math.inf
        if self._expired:
            self._expired = False
            task = asyncio.current_task()
            assert task is not None
            if task.uncancel() == 0 and kind is asyncio.CancelledError:
                raise TimeoutError from None

    @property
    def is_ahead(self) -> bool:
        """Whether something has come that it has not yet been woken for."""
        return self._stream.is_ahead

    def close(self) -> None:
        self._stream.close()

    async def hold(self) -> None:
        async with self._stream as stream:
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                with self.within(HANDSHAKE_S):
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
        self.idle = True
        with self.within(self._keepalive_s):
            first = await stream.read()
        self.idle = False
        if not first:
            raise EOFError
        stream.unread(first)
        try:
            with self.within(HEAD_S):
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
        if not self.idle or (known := self._memo.recall(data, self._peer)) is None:
            return False
        self.repeated, self._last = True, known.last
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
        # Without chunks a body in pieces ends with its connection.
        self._last = self._last or (is_1_0 and isinstance(response.body, Pieces))
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
            async for piece in encode_pieces(body, is_1_0=is_1_0):
                await self._write(stream, start + piece)
                start = b""
            await self._write(stream, start)
            return None
        if not isinstance(body, FilePart):
            await self._write(stream, start + body)
            return start + body
        for at in range(0, max(body.size, 1), _PIECE_BYTES):
            size = min(_PIECE_BYTES, body.size - at)
            if body.size <= _READ_AT_ONCE_BYTES:
                piece = read_part(body, at, size)
            else:
                piece = await asyncio.to_thread(read_part, body, at, size)
            await self._write(stream, start + piece)
            start = b""
        return None

    async def _write(self, stream: Stream, data: bytes) -> None:
        """Bytes to a client that takes them: what the kernel has no room for must go at a rate."""
        left = memoryview(data)[stream.write_now(data) :]
        while left:
            with self.within(WRITE_STALL_S):
                await stream.write(left[:WRITE_STALL_BYTES])
            left = left[WRITE_STALL_BYTES:]
            left = left[stream.write_now(left) :]

    async def _linger(self, stream: Stream) -> None:
        """Let the client read its last answer: closing with bytes unread would take it back."""
        stream.end()
        with self.within(LINGER_S):
            async for _ in stream:
                pass


class _Body:
    """A request's body as it comes from the stream. RequestTimeout when too slow, BadRequest when it is none."""

    def __init__(self, stream: Stream, head: Head) -> None:
        self._stream, self._head = stream, head
        self.ended = not head.has_body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.ended:
            return
        loop = asyncio.get_running_loop()
        chunks = Chunks() if self._head.length is None else None
        left = self._head.length or 0
        # The time that passes while nobody asks for more is not the client's.
        free_until, received = loop.time() + BODY_START_S, 0
        invite = self._head.expects_continue and not self._stream.is_ahead
        while not self.ended:
            try:
                async with asyncio.timeout_at(free_until + received / BODY_BYTES_PER_S):
                    if invite:
                        await self._stream.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                        invite = False
                    data = await self._stream.read(min(left, _PIECE_BYTES) if chunks is None else _PIECE_BYTES)
            except TimeoutError:
                raise RequestTimeout() from None
            except OSError as exc:
                raise BadRequest("The body ended before its declared length.") from exc
            if not data:
                raise BadRequest("The body ended before its declared length.")
            if chunks is None:
                left -= len(data)
                self.ended = not left
            else:
                data = chunks.feed(data)
                if chunks.rest is not None:
                    self._stream.unread(chunks.rest)
                    self.ended = True
            received += len(data)
            if data:
                given = loop.time()
                yield data
                free_until += loop.time() - given
