"""A raw TCP echo server in five shapes, to measure what each of them costs.

Rule: back-pressure is the client's own. Who does not read is not read from, so it holds a buffer or two and no more.
Surprise: there are no deadlines; a client may stay for ever. It is a yardstick, not a service.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Literal, cast, get_args

from uvimg.web.listen import close_servers
from uvimg.web.stream import Stream

Style = Literal["protocol", "buffered", "streams", "curio-streams", "sockets"]
STYLES: tuple[Style, ...] = get_args(Style)

# The largest message of the published tables, 100 KiB, is what their servers read at a time.
_MESSAGE_BYTES = 102_400
# For what has come before the end and was not sent back yet.
_LAST_WORDS_S = 1.0
# Out of descriptors, say: those in use will be given back.
_ACCEPT_PAUSE_S = 0.1


class EchoServer:
    """Serves on listening sockets, its own from `start` on; `stop` sends back what has come and lets everybody go."""

    def __init__(self, style: Style, backlog: int = 4096) -> None:
        self._style, self._backlog = style, backlog
        self._listeners: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = _Connections()
        self._buffers: list[bytearray] = []

    async def start(self, listeners: list[socket.socket]) -> None:
        for listener in listeners:
            if listener.family != socket.AF_UNIX:
                # Whoever is let in inherits it.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._listeners.append(listener)
            match self._style:
                case "protocol":
                    await self._serve(listener, lambda: _Protocol(self._connections))
                case "buffered":
                    await self._serve(listener, lambda: _BufferedProtocol(self._connections, self._buffers))
                case "streams":
                    self._servers.append(
                        await asyncio.start_server(self._echo_streams, sock=listener, backlog=self._backlog)
                    )
                case "curio-streams":
                    self._keep(self._accept(listener, self._echo_stream))
                case "sockets":
                    self._keep(self._accept(listener, self._echo_socket))

    async def stop(self) -> None:
        await close_servers(self._servers, self._listeners)
        for listener in self._listeners:
            listener.close()
        for fd in self._connections:
            # In whichever shape it is read, that comes to its end behind what has come by now.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.shutdown(socket.SHUT_RD)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._connections.all_gone()
        for abort in list(self._connections.values()):
            abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, listener: socket.socket, make: Callable[[], asyncio.BaseProtocol]) -> None:
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(make, sock=listener, backlog=self._backlog))

    async def _accept(
        self, listener: socket.socket, echo: Callable[[socket.socket], Coroutine[None, None, None]]
    ) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(self._backlog)
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._keep(echo(connection))

    async def _echo_streams(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._holding(writer.get_extra_info("socket").fileno(), writer.transport.abort):
            with contextlib.suppress(OSError):
                while data := await reader.read(_MESSAGE_BYTES):
                    writer.write(data)
                    await writer.drain()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _echo_stream(self, connection: socket.socket) -> None:
        with self._holding(connection.fileno()), contextlib.suppress(OSError):
            async with Stream(connection) as stream:
                async for data in stream:
                    await stream.write(data)

    async def _echo_socket(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with self._holding(connection.fileno()), contextlib.suppress(OSError), connection:
            while data := await loop.sock_recv(connection, _MESSAGE_BYTES):
                await loop.sock_sendall(connection, data)

    @contextlib.contextmanager
    def _holding(self, fd: int, abort: Callable[[], object] | None = None) -> Iterator[None]:
        """A connection that this task looks after."""
        task = asyncio.current_task()
        assert task is not None
        self._connections[fd] = abort or task.cancel
        try:
            yield
        finally:
            self._connections.remove(fd)

    def _keep(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Connections(dict[int, Callable[[], object]]):
    """By descriptor, and what ends each at once."""

    _gone: asyncio.Event | None = None

    def remove(self, fd: int) -> None:
        del self[fd]
        if self._gone is not None and not self:
            self._gone.set()

    async def all_gone(self) -> None:
        self._gone = asyncio.Event()
        if self:
            await self._gone.wait()


class _Protocol(asyncio.Protocol):
    """What comes is written as it is. At the end of what comes the transport closes, behind what is still to go."""

    def __init__(self, connections: _Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._fd = transport.get_extra_info("socket").fileno()
        self._connections[self._fd] = self._transport.abort

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self._fd)


class _BufferedProtocol(asyncio.BufferedProtocol):
    """All connections are read into one buffer, and written from it without a copy.

    That goes well as long as the transport takes all of it at once. A connection whose client does not read keeps the
    buffer until it does, and the next one to be read gets another.
    """

    def __init__(self, connections: _Connections, spare: list[bytearray]) -> None:
        self._connections, self._spare = connections, spare
        self._buffer: bytearray | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Whatever is not taken at once pauses us, and what is written is tried at once.
        self._transport.set_write_buffer_limits(high=0)
        self._fd = transport.get_extra_info("socket").fileno()
        self._connections[self._fd] = self._transport.abort

    def get_buffer(self, sizehint: int) -> bytearray:
        if self._buffer is None:
            self._buffer = self._spare.pop() if self._spare else bytearray(_MESSAGE_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        assert self._buffer is not None
        self._transport.write(memoryview(self._buffer)[:nbytes])
        if self._transport.get_write_buffer_size() == 0:
            self._give_back()

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._give_back()
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._give_back()
        self._connections.remove(self._fd)

    def _give_back(self) -> None:
        if self._buffer is not None:
            self._spare.append(self._buffer)
            self._buffer = None
