"""The streams front-end: one coroutine a connection, read a head, hand it on, write the answer.

The one to read first: what HTTP asks for stands in core/http1.py, what a socket does in stream.py, and here
the conversation. Deadlines are absolute, not per read: a client that drips bytes gains nothing by it.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import Self

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
from uvimg.web.stream import Stream, TooLong

log = logging.getLogger("uvimg.web")

# Files are sent in such pieces. A large one is read in a thread: a disk may take its time.
_PIECE_BYTES = 262_144
_READ_AT_ONCE_BYTES = 1 << 20
# How late a deadline may be noticed.
_WATCH_S = 0.25


class StreamsFrontEnd:
    """See `FrontEnd`."""

    def __init__(self, service: Service, settings: WebSettings) -> None:
        self._service, self._settings = service, settings
        self._accepting: list[asyncio.Task[None]] = []
        self._talking: dict[asyncio.Task[None], _Conversation] = {}

    async def start(self, listeners: list[socket.socket]) -> None:
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(self._settings.backlog)
            self._accepting.append(asyncio.create_task(self._accept(listener)))

        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for task, conversation in self._talking.items():
            conversation.last = True
            if conversation.idle:
                task.cancel()
        if self._talking:
            await asyncio.wait(self._talking, timeout=self._settings.grace_s)
        for task in [*self._talking, self._watching]:
            task.cancel()
        await asyncio.gather(*self._talking, self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        """End what is past its deadline. One look at all of them costs less than a timer for each step of each."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_S)
            now = loop.time()
            for task, conversation in self._talking.items():
                if conversation.deadline < now:
                    conversation.expire(task)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, peer = await loop.sock_accept(listener)
                except OSError as exc:
                    # Out of descriptors, say: those in use will be given back.
                    log.warning("a connection could not be accepted: %s", exc)
                    await asyncio.sleep(0.1)
                    continue
                if len(self._talking) >= self._settings.max_connections:
                    connection.close()
                    continue
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                conversation = _Conversation(
                    self._service, Stream(connection), str(peer[0]), self._settings.keepalive_s
                )
                task = asyncio.create_task(conversation.hold())
                self._talking[task] = conversation
                task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        del self._talking[task]
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a connection failed", exc_info=exc)


class _Conversation:
    """One connection from its first head to its end."""

    def __init__(self, service: Service, stream: Stream, peer: str, keepalive_s: float) -> None:
        self._service, self._stream, self._peer, self._keepalive_s = service, stream, peer, keepalive_s
        self.idle = True
        # Whether the answer at hand is the last one on this connection.
        self.last = False
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

    async def hold(self) -> None:
        async with self._stream as stream:
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                while not self.last:
                    data = await self._read_head(stream)
                    if not data:
                        return
                    await self._answer(stream, data)

    async def _read_head(self, stream: Stream) -> bytes:
        """The next head, none at the end. Waiting for its first byte is idling; from then on time counts."""
        self.idle = True
        with self.within(self._keepalive_s):
            first = await stream.read()
            while first.startswith(b"\r\n"):
                # A blank line before a request line is let pass (RFC 9112 2.2).
                first = first[2:] or await stream.read()
        self.idle = False
        stream.unread(first)
        try:
            with self.within(HEAD_S):
                return await stream.read_until(b"\r\n\r\n", MAX_HEAD_BYTES)
        except TooLong as exc:
            line = exc.read.partition(b"\r\n")[0]
            await self._refuse(stream, TargetTooLong() if len(line) > MAX_TARGET_BYTES else HeadTooLarge())
        except TimeoutError:
            await self._refuse(stream, RequestTimeout("The head of the request arrived too slowly."))
        return b""

    async def _refuse(self, stream: Stream, error: UvimgError) -> None:
        """Say why, and let the client read it: closing with bytes unread would take the answer back."""
        self.last = True
        await self._send(stream, refuse_head(error), None)
        await self._linger(stream)

    async def _answer(self, stream: Stream, data: bytes) -> None:
        try:
            head = parse_head(data)
        except UvimgError as exc:
            await self._refuse(stream, exc)
            return
        body = _Body(stream, head)
        request = Request(
            head.method, head.target, head.path, head.query, head.headers, self._peer, head.length, aiter(body)
        )
        response = self._service.try_now(request)
        if response is None:
            response = await (self._service.handle(request) if head.has_body else self._work(stream, request))
        self.last = self.last or not head.keep_alive or not body.ended
        try:
            await self._send(stream, response, head)
        finally:
            response.release()
        if not body.ended:
            await self._linger(stream)

    async def _work(self, stream: Stream, request: Request) -> Response:
        """Have a request worked on for as long as its client is there: one that goes away frees what works for it."""
        work = asyncio.create_task(self._service.handle(request))
        gone = asyncio.create_task(stream.gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise ConnectionAbortedError
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _send(self, stream: Stream, response: Response, head: Head | None) -> None:
        start = encode_head(
            response,
            http_date(int(time.time())),
            keep_alive=not self.last,
            is_1_0=head is not None and head.is_1_0,
        )
        body = response.body
        if head is not None and head.method == "HEAD":
            body = b""
        if not isinstance(body, FilePart):
            with self.within(WRITE_STALL_S + len(body) / BODY_BYTES_PER_S):
                await stream.write(start + body)
            return
        for at in range(0, max(body.size, 1), _PIECE_BYTES):
            size, place = min(_PIECE_BYTES, body.size - at), body.start + at
            if body.size <= _READ_AT_ONCE_BYTES:
                piece = os.pread(body.file.fileno(), size, place)
            else:
                piece = await asyncio.to_thread(os.pread, body.file.fileno(), size, place)
            with self.within(WRITE_STALL_S):
                await stream.write(start + piece)
            start = b""

    async def _linger(self, stream: Stream) -> None:
        stream.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
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
        if self._head.expects_continue:
            await self._stream.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        loop = asyncio.get_running_loop()
        started, received = loop.time(), 0
        chunks = Chunks() if self._head.length is None else None
        left = self._head.length or 0
        while not self.ended:
            try:
                async with asyncio.timeout_at(started + BODY_START_S + received / BODY_BYTES_PER_S):
                    data = await self._stream.read(min(left, _PIECE_BYTES) if chunks is None else _PIECE_BYTES)
            except TimeoutError:
                raise RequestTimeout() from None
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
                yield data
