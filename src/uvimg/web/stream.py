"""A socket as a stream, in curio's manner: read, read_until, write, async with, async for.

Thin over the loop's watching of sockets, so it runs on uvloop and on asyncio alike. The socket is watched
for as long as the stream lives (adding and removing it for every read costs two system calls a request),
and not while as much is read ahead as may be: back-pressure is the socket's own.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Self

from uvimg.web.connections import reset_at_end
from uvimg.web.tls import RECORD_BYTES, Tls

_PIECE_BYTES = 65_536
_MAX_AHEAD_BYTES = 131_072


class Stream:
    """One connection. Reads and writes raise OSError when it breaks.

    `shortcut` is asked about what comes while nothing waits to be read, in the call in which it comes: whether it is
    done with. To wake a coroutine for it takes as long as to answer.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.shortcut: Callable[[bytes], bool] | None = None
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._ended = False
        self._broken: OSError | None = None
        self._watched = False
        # Who waits for bytes, and who for the end.
        self._waiting: list[asyncio.Future[None]] = []
        self._watch()

    async def open(self) -> None:
        """Whatever has to be said before the first byte can be read."""

    async def read(self, most: int = _PIECE_BYTES) -> bytes:
        """Some bytes, at least one and at most `most`; none at the end."""
        while not self._buffer:
            if self._ended:
                return self._at_end()
            await self._change()
        piece, self._buffer = self._buffer[:most], self._buffer[most:]
        self._watch()
        return piece

    async def read_until(self, mark: bytes, check: Callable[[bytes], None]) -> bytes:
        """The bytes up to and with `mark`; EOFError when the end comes before.

        `check` sees what has come while the mark has not, and raises when it is too much or cannot be right.
        """
        seen = 0
        while (end := self._buffer.find(mark, seen)) < 0:
            check(self._buffer)
            if self._ended:
                raise self._broken or EOFError
            # The mark may have come in half.
            seen = max(0, len(self._buffer) - len(mark) + 1)
            await self._change()
        end += len(mark)
        found, self._buffer = self._buffer[:end], self._buffer[end:]
        self._watch()
        return found

    @property
    def is_ahead(self) -> bool:
        """Whether bytes have come that nobody has read."""
        return bool(self._buffer)

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def unread(self, data: bytes) -> None:
        """Put bytes back that belong to whoever reads next."""
        self._buffer = data + self._buffer

    async def gone(self) -> None:
        """Returns when the peer has ended its side; it is not seen while more than may be read ahead has come."""
        while not self._ended:
            await self._change()

    def write_now(self, data: bytes | memoryview) -> int:
        """How many of these bytes there was room for."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    async def write(self, data: bytes | memoryview) -> None:
        """All of the bytes, as fast as the peer takes them."""
        # Nearly always there is room, and then the loop need not hear of it.
        sent = self.write_now(data)
        if sent < len(data):
            await self._loop.sock_sendall(self._socket, memoryview(data)[sent:])

    def end(self) -> None:
        """No more will be written; the peer may still be read."""
        self._socket.shutdown(socket.SHUT_WR)

    def reset_at_end(self) -> None:
        """What was written last is no end: see `connections.reset_at_end`."""
        reset_at_end(self._socket)

    def close(self) -> None:
        if self._watched:
            self._loop.remove_reader(self._socket)
        self._ended, self._watched = True, False
        self._socket.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self.read():
            yield piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _at_end(self) -> bytes:
        if self._broken is not None:
            raise self._broken
        return b""

    async def _change(self) -> None:
        """Wait until something has come, the end included."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if future in self._waiting:
                self._waiting.remove(future)

    def _watch(self) -> None:
        if not self._watched and not self._ended and len(self._buffer) < _MAX_AHEAD_BYTES:
            self._loop.add_reader(self._socket, self._take)
            self._watched = True

    def _take(self) -> None:
        """The socket has something to be read."""
        try:
            data = self._receive()
            if self.shortcut is not None and not (self._ended or self._buffer) and self.shortcut(data):
                return
        except BlockingIOError:
            return
        except OSError as exc:
            self._broken, data, self._ended = exc, b"", True
        self._buffer += data
        if self._ended or len(self._buffer) >= _MAX_AHEAD_BYTES:
            self._loop.remove_reader(self._socket)
            self._watched = False
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def _receive(self) -> bytes:
        """What has come. Sees the end too."""
        data = self._socket.recv(_PIECE_BYTES)
        if not data:
            self._ended = True
        return data


class TlsStream(Stream):
    """A stream whose bytes go through TLS. What is written counts as taken when all of its record has gone."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self._tls = Tls(context)
        # Records on their way, in order, and how many of the bytes to be written stand in them.
        self._unsent = b""
        self._sealed = 0
        self._sending = False
        super().__init__(connection)

    async def open(self) -> None:
        while not self._tls.established:
            if self._ended:
                raise self._broken or EOFError
            await self._change()

    def write_now(self, data: bytes | memoryview) -> int:
        taken = 0
        while True:
            self._send()
            if self._unsent or self._sending:
                # Whoever tries again begins with the bytes that are sealed already.
                return taken
            taken += self._sealed
            self._sealed = 0
            if taken >= len(data):
                return taken
            piece = memoryview(data)[taken : taken + RECORD_BYTES]
            self._unsent, self._sealed = self._tls.seal(piece), len(piece)

    async def write(self, data: bytes | memoryview) -> None:
        taken = self.write_now(data)
        while taken < len(data):
            records, self._unsent, self._sending = self._unsent, b"", True
            try:
                await self._loop.sock_sendall(self._socket, records)
            finally:
                self._sending = False
            taken += self.write_now(memoryview(data)[taken:])

    def end(self) -> None:
        self._unsent += self._tls.end()
        self._send()
        super().end()

    def _receive(self) -> bytes:
        data = super()._receive()
        try:
            plain = self._tls.receive(data)
        finally:
            # Also what tells the peer why it was refused.
            self._unsent += self._tls.take()
            self._send()
        self._ended = self._ended or self._tls.ended
        return plain

    def _send(self) -> None:
        """As much as there is room for. Not into a record that is on its way."""
        while self._unsent and not self._sending:
            sent = super().write_now(self._unsent)
            if not sent:
                return
            self._unsent = self._unsent[sent:]
