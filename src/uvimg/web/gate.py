"""What stands between the loop's transport and aiohttp's handler of a connection, and is strict where aiohttp is not.

Heads are read by core/http1.py, as for every front-end. aiohttp is then told of a request only what it needs to take
its body and frame its answer; whoever answers takes the head itself from here (`take`). A head that is refused
reaches aiohttp as a request too: so the refusal stands in its place, behind the answers to what came before it.
What came before, to the byte, and stands alone is answered here (web/memo.py).
Between them two objects would each see half of a connection: this one is aiohttp's transport and the transport's
protocol.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from uvimg.core.errors import BadRequest, UvimgError
from uvimg.core.http1 import Chunks, Head, parse_head
from uvimg.web import WebSettings
from uvimg.web.connections import Connection, Connections
from uvimg.web.memo import Known, Memo, is_memorable

# What may wait behind requests that are being answered, in bytes; and in requests that aiohttp has been told of.
_MAX_AHEAD_BYTES = 131_072
_MAX_AHEAD = 4

# All that aiohttp is told of a request without a body: whether its answer has one, and what becomes of the connection.
_TOLD = {
    (is_head, is_1_0, keep_alive): b"%b / HTTP/1.%d\r\nHost: x\r\nConnection: %b\r\n\r\n"
    % (b"HEAD" if is_head else b"GET", 0 if is_1_0 else 1, b"keep-alive" if keep_alive else b"close")
    for is_head in (False, True)
    for is_1_0 in (False, True)
    for keep_alive in (False, True)
}


class Gates(Connections["Gate"]):
    """All connections of one front-end. `make_inner` makes aiohttp's handler of one."""

    def __init__(self, make_inner: Callable[[], asyncio.Protocol], settings: WebSettings, memo: Memo) -> None:
        super().__init__(settings)
        self.make_inner, self.memo = make_inner, memo
        self.loop = asyncio.get_running_loop()
        self.watch()


class Gate(Connection):
    """One connection. Above: the loop calls it as a protocol. Below: aiohttp uses it as a transport."""

    def __init__(self, gates: Gates) -> None:
        super().__init__(gates, gates.loop)
        self._gates = gates
        self._inner: asyncio.Protocol | None = None
        # What is still to come of a body: so many bytes, or chunks.
        self._left = 0
        self._chunks: Chunks | None = None
        # Heads that nobody has taken, each with its bytes, and how many requests are not answered to their end.
        self._heads: deque[tuple[Head | UvimgError, bytes]] = deque()
        self._unanswered = 0
        # Who reads a body, and why there will be no more of it.
        self._reader: asyncio.StreamReader | Any = None
        self._broken: UvimgError | None = None
        # Somebody works for a client of whom nothing more is awaited.
        self._working = False
        # The client has ended its side; we have ended ours.
        self._ended = self._closing = False
        self._dropped = 0
        # The socket is read unless one of us has no room.
        self._inner_full = self._full = self._paused = False

    # The protocol: what the loop's transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._meet(transport):
            return
        with contextlib.suppress(OSError):
            # As web/listen.py does for its own listeners, and says why; gunicorn brings others.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 131_072)
        self._inner = self._gates.make_inner()
        # To aiohttp it is a transport, though not asyncio's by its class.
        self._inner.connection_made(cast(asyncio.Transport, self))
        # Not 0, which TLS takes for a buffer that is above its mark while it is empty; and not earlier, for with bytes
        # of the handshake in it writing is paused in this call.
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
        self._closing = True
        try:
            self._break_body(BadRequest("The body ended before its declared length."))
            inner, self._inner = self._inner, None
            if inner is not None:
                inner.connection_lost(exc)
        finally:
            # Whatever it did: one that is not forgotten would be waited for when the process is to end.
            self._gates.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._last and not self._left and self._chunks is None:
            # Read away, so that closing does not take the last answer back; but not without end before it is written.
            self._dropped += len(data)
            if self._dropped > _MAX_AHEAD_BYTES and not self._closing:
                self._full = True
                self._regulate()
            return
        if self._buffer:
            data = self._buffer + data
        elif (
            # Nearly always it is one whole head and nothing else.
            len(data) > 4
            and data.find(b"\r\n\r\n") == len(data) - 4
            and not self._left
            and self._chunks is None
            and len(self._heads) < _MAX_AHEAD
        ):
            alone = not self._unanswered and self._writable
            if alone and self._give(self._gates.memo.recall(data, self.peer)):
                return
            try:
                head = parse_head(data)
            except UvimgError as exc:
                self._refuse(exc)
                return
            if not (
                alone and is_memorable(head, data) and self._give(self._gates.memo.recall_like(head, data, self.peer))
            ):
                self._pass_head(head, data)
            return
        self._buffer = data
        self._advance()

    def eof_received(self) -> bool:
        self._ended = self._last = True
        self._buffer = b""
        self.expect_nothing()
        if self._closing:
            return False
        if self._left or self._chunks is not None:
            # It waits to hear what became of a body that ended too soon.
            self._break_body(BadRequest("The body ended before its declared length."))
            return True
        # Whether it has gone or only ended its side cannot be told apart: nobody works for it any more, but what is
        # at hand is still written.
        return bool(self._unanswered) and not self._working

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._closing:
            self._loop.call_soon(self._end_writing)
        if self._inner is not None:
            self._inner.resume_writing()

    # The transport: what aiohttp calls

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def writelines(self, pieces: Any) -> None:
        if self._transport is not None:
            self._transport.writelines(pieces)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default if self._transport is None else self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._inner_full = True
        self._regulate()

    def resume_reading(self) -> None:
        self._inner_full = False
        self._regulate()

    def close(self) -> None:
        """No more is answered. The client may read its last answer: closing with bytes unread would take it back."""
        if self._closing:
            return
        self._last = self._closing = True
        self._forget_incoming()
        if self._transport is None:
            return
        if self._ended or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._regulate()
        # Not in this call, which may be asyncio's own writing: it would end the socket a second time.
        self._loop.call_soon(self._end_writing)

    _linger = close

    # What whoever answers calls

    def take(self) -> tuple[Head | UvimgError, bytes]:
        """The next request's head, or why it is none, and its bytes."""
        taken = self._heads.popleft()
        if self._buffer:
            self._advance()
        return taken

    @property
    def has_more(self) -> bool:
        """Whether aiohttp has been told of requests behind the one that was taken."""
        return bool(self._heads)

    def read_by(self, reader: Any) -> None:
        """Somebody begins to read a body; raises why there is none."""
        self._reader = reader
        if self._broken is not None:
            raise self._broken

    def work(self) -> None:
        """Work begins for a client of whom nothing more is awaited: only while it is there."""
        self._working = True
        if self._ended:
            self.abort()

    def answered(self) -> None:
        """An answer has been written, or is written in the call in which this is said."""
        self._unanswered -= 1
        self._working = False
        self._reader = None
        if not self._unanswered and (self._ended or (self._gates.drain.is_over and self.awaited != "head")):
            # Behind the call that aiohttp writes it in.
            self._loop.call_soon(self.close)
        else:
            self.touched = True

    @property
    def is_idle(self) -> bool:
        return not self._unanswered and self.awaited != "head" and self._writable and not self._closing

    # Requests

    def _advance(self) -> None:
        """Hand on what has come, as far as there is a place for it."""
        data, at = self._buffer, 0
        while at < len(data):
            if self._left or self._chunks is not None:
                at = self._pass_body(data, at)
                continue
            if self._last or len(self._heads) >= _MAX_AHEAD:
                break
            end = data.find(b"\r\n\r\n", at or self._searched) + 4
            if end < 4:
                break
            try:
                head = parse_head(data[at:end])
            except UvimgError as exc:
                self._refuse(exc)
                return
            self._searched = 0
            self._pass_head(head, data[at:end])
            at = end
        if self._last:
            self._buffer = b""
        elif at:
            self._buffer = data[at:]
        if self._buffer and len(self._heads) < _MAX_AHEAD:
            self._await_head()
        full = len(self._buffer) > _MAX_AHEAD_BYTES
        if full != self._full:
            self._full = full
            self._regulate()

    def _give(self, known: Known | None) -> bool:
        """Give an answer that was given before, if there is one."""
        if known is None:
            return False
        self.touched = True
        self.write(known.whole)
        if known.last:
            self.close()
        return True

    def _pass_head(self, head: Head, data: bytes) -> None:
        self._last = self._last or not head.keep_alive
        self.expect_nothing()
        self._heads.append((head, data))
        self._unanswered += 1
        if not head.has_body:
            self._tell(_TOLD[head.method == "HEAD", head.is_1_0, head.keep_alive])
            return
        if head.length is None:
            self._chunks = Chunks()
            framing = "Transfer-Encoding: chunked"
        else:
            self._left = head.length
            framing = f"Content-Length: {head.length}"
        method = "HEAD" if head.method == "HEAD" else "POST"
        connection = "keep-alive" if head.keep_alive else "close"
        version = 0 if head.is_1_0 else 1
        told = f"{method} / HTTP/1.{version}\r\nHost: x\r\nConnection: {connection}\r\n{framing}\r\n\r\n"
        self._tell(told.encode())

    def _pass_body(self, data: bytes, at: int) -> int:
        """Hand on what of a body begins at this place; where it ends."""
        if self._chunks is None:
            piece = data[at : at + self._left] if at or self._left < len(data) else data
            self._left -= len(piece)
            self._tell(piece)
            return at + len(piece)
        try:
            piece = self._chunks.feed(data[at:])
        except UvimgError as exc:
            self._break_body(exc)
            return len(data)
        # aiohttp is told the data alone, in chunks of ours: no extensions, no trailers.
        if piece:
            self._tell(b"%x\r\n%b\r\n" % (len(piece), piece))
        rest = self._chunks.rest
        if rest is None:
            return len(data)
        self._chunks = None
        self._tell(b"0\r\n\r\n")
        return len(data) - len(rest)

    def _break_body(self, error: UvimgError) -> None:
        """No more of the body can come; its answer is the last."""
        if not self._left and self._chunks is None:
            return
        self._forget_incoming()
        self._last, self._broken = True, error
        if self._reader is not None:
            self._reader.set_exception(error)

    def _refuse(self, error: UvimgError) -> None:
        self._last = True
        self._forget_incoming()
        self._heads.append((error, b""))
        self._unanswered += 1
        self._tell(_TOLD[False, False, False])

    def _forget_incoming(self) -> None:
        self._buffer, self._left, self._chunks = b"", 0, None
        self._searched = 0
        self._inner_full = self._full = False
        self.expect_nothing()

    def _tell(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def _regulate(self) -> None:
        """Read the socket only where there is a place for what comes."""
        wanted = (self._inner_full or self._full) and not self._closing
        if wanted != self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = wanted
            if wanted:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
