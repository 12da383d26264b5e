"""A way to a server on which a test can have its connections delayed, cut or swallowed."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Literal

# through: as it is. delay: each piece waits. cut: a connection ends after some bytes. silent: what is sent is lost,
# on connections that were there before as on new ones. refuse: a connection ends at once.
Mode = Literal["through", "delay", "cut", "silent", "refuse"]


class Proxy:
    """Before a server at `target` of this machine; its own port is `port`."""

    def __init__(self, target: int, seed: int = 4869) -> None:
        self.mode: Mode = "through"
        self.delay_s = 0.02
        self.port = 0
        self._target, self._chance = target, random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.mode == "refuse":
                return
            answers, asked = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                ways = [
                    asyncio.create_task(self._pass(reader, asked)),
                    asyncio.create_task(self._pass(answers, writer)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
            finally:
                asked.transport.abort()
        except (OSError, asyncio.CancelledError):
            # A server that is away, or the end of the test.
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            if self.mode == "delay":
                await asyncio.sleep(self.delay_s)
            if self.mode == "cut" and self._chance.random() < 0.2:
                writer.write(data[: self._chance.randrange(len(data) + 1)])
                await writer.drain()
                return
            if self.mode != "silent":
                writer.write(data)
                await writer.drain()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def proxying(target: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.stop()
