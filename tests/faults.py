"""A network that fails on purpose: a proxy between a store and its server, in a thread of its own.

    with Network(server.port) as network:
        store = open_store(f"…127.0.0.1:{network.port}")
        network.fault = "black hole"

Faults hold for connections that are open and for new ones alike, but where that is said:

    ""            none
    "delay"       each piece of bytes is `delay_s` late
    "cut"         a connection is reset after `cut_after` bytes of answers
    "half open"   connections that were open say nothing any more and are not closed; new ones work
    "black hole"  bytes go in and nothing ever comes out
    "away"        connections are refused, by a reset
"""

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Literal, Self

Fault = Literal["", "delay", "cut", "half open", "black hole", "away"]


class Network:
    """`sent` and `received` count the bytes that went to the server and came back, whatever became of them."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._fault: Fault = ""
        self.delay_s, self.cut_after = 0.1, 1000
        self.sent = self.received = self.connections = 0
        # Connections from before the fault, by their number.
        self._old = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0

    @property
    def fault(self) -> Fault:
        return self._fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        self._old = self.connections
        self._fault = fault

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        async def start() -> asyncio.Server:
            return await asyncio.start_server(self._serve, "127.0.0.1", 0)

        server = self._loop.run_until_complete(start())
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        if self._fault == "away":
            _reset(writer)
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            _reset(writer)
            return
        ways = [
            asyncio.create_task(self._pass(reader, far_writer, number, "sent")),
            asyncio.create_task(self._pass(far_reader, writer, number, "received")),
        ]
        # At the end of all everything is cancelled, and asyncio would tell of it.
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for each in (writer, far_writer):
                _reset(each)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, way: Literal["sent", "received"]
    ) -> None:
        """One way of a connection. Its end is an exception where the other way has to end with it."""
        passed = 0
        while data := await reader.read(65_536):
            setattr(self, way, getattr(self, way) + len(data))
            match self._fault:
                case "away":
                    raise ConnectionResetError
                case "delay":
                    await asyncio.sleep(self.delay_s)
                case "cut" if way == "received":
                    if passed + len(data) > self.cut_after:
                        writer.write(data[: max(0, self.cut_after - passed)])
                        with contextlib.suppress(OSError):
                            await writer.drain()
                        raise ConnectionResetError
                case "black hole":
                    continue
                case "half open" if number < self._old:
                    continue
            passed += len(data)
            writer.write(data)
            await writer.drain()
        if self._fault in ("black hole", "half open") and number < self._old:
            # The word that a connection has ended gets lost too.
            await asyncio.sleep(3600)
        with contextlib.suppress(OSError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection without a word of farewell."""
    found = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
