"""Tornado's echo server: a coroutine over an IOStream for each connection. Argument: the port."""

import asyncio
import sys

from tornado.iostream import IOStream, StreamClosedError
from tornado.tcpserver import TCPServer


class Echo(TCPServer):
    async def handle_stream(self, stream: IOStream, address: object) -> None:
        stream.set_nodelay(True)
        try:
            while True:
                await stream.write(await stream.read_bytes(102_400, partial=True))
        except StreamClosedError:
            pass


async def main() -> None:
    Echo().listen(int(sys.argv[1]), "127.0.0.1", backlog=4096)
    await asyncio.Event().wait()


asyncio.run(main())
