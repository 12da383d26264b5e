"""Conversations with front-ends in this very process: bytes in pieces, each of which arrives alone.

Server and client take turns on one loop, so a piece has been read before the next one is sent: without sleeping,
and not only when the machine is idle. The sockets are real.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import uvloop

from tests.wire_server import WireApp, listening
from uvimg.app import start_service
from uvimg.config import Settings
from uvimg.service import Service

Result = TypeVar("Result")

# asyncio reads a socket one turn after it has become readable, and a coroutine that waits for it wakes one later.
_TURNS = 3
# Only what fails waits so long.
_PATIENCE_S = 5


class Hall:
    """Front-ends of one kind on one loop, which runs while somebody talks."""

    def __init__(self, front_end: str, loop: str) -> None:
        self.front_end = front_end
        self._runner = asyncio.Runner(
            loop_factory=uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
        )
        self._stack = contextlib.AsyncExitStack()

    def __enter__(self) -> Self:
        self._runner.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stack.aclose())
        self._runner.close()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(coroutine)

    def serve_wire(self) -> int:
        """tests/wire_server.py's app; the port."""
        return self.run(self._serve(Service(WireApp(), None, lambda: 0)))

    def serve_images(self, **settings: Any) -> int:
        """The images app with a store in memory; the port."""

        async def start() -> int:
            chosen = Settings(**{"store": "memory:", "workers": 1, "access_log": False, **settings})
            service, _ = await self._stack.enter_async_context(start_service(chosen))
            return await self._serve(service)

        return self.run(start())

    async def _serve(self, service: Service) -> int:
        return await self._stack.enter_async_context(listening(self.front_end, service))


async def talk(port: int, pieces: Sequence[bytes], *, hang_up: float = _PATIENCE_S) -> bytes:
    """What comes back for these pieces until the server ends its side.

    After `hang_up` seconds of silence the client ends its own: what still waits for bytes is told that none will come.
    """
    async with Client.connected(port) as client:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                await client.send(piece)
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
        reading = asyncio.ensure_future(client.rest())
        for patience in (hang_up, _PATIENCE_S):
            await asyncio.wait([reading], timeout=patience)
            if reading.done():
                break
            assert hang_up < _PATIENCE_S, f"no end behind {client.taken!r}"
            client.end()
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reading, 0)
        return client.taken


async def talk_all(port: int, conversations: Sequence[Sequence[bytes]], at_once: int = 64) -> list[bytes]:
    """`talk` for each of them, many at a time: a turn of the loop costs the same for all."""
    gate = asyncio.Semaphore(at_once)

    async def one(pieces: Sequence[bytes]) -> bytes:
        async with gate:
            return await talk(port, pieces)

    return await asyncio.gather(*map(one, conversations))


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    # Names in lower case.
    fields: dict[str, str]
    body: bytes
    # aiohttp answers HTTP/1.0, and bad requests, in HTTP/1.0.
    is_1_0: bool

    @property
    def is_last(self) -> bool:
        said = self.fields.get("connection", "").lower()
        return said == "close" or (self.is_1_0 and said != "keep-alive")


class Unreadable(Exception):
    """What came is not answers behind each other."""


def read_answers(received: bytes, bodiless: Sequence[int] = ()) -> list[Answer]:
    """The answers that came, 100 Continue among them; those whose number without 100s is in `bodiless` answer HEAD."""
    answers: list[Answer] = []
    number = 0
    while received:
        head, mark, received = received.partition(b"\r\n\r\n")
        start, *lines = head.split(b"\r\n")
        found = re.fullmatch(rb"HTTP/1\.([01]) (\d{3}) [ -~]+", start)
        if not mark or found is None:
            raise Unreadable(head)
        status, fields = int(found[2]), {}
        for line in lines:
            name, _, value = line.decode("latin-1").partition(": ")
            if name.lower() in fields:
                raise Unreadable(f"{name} stands twice in {head!r}")
            fields[name.lower()] = value
        size = int(fields.get("content-length", "0"))
        if status in (204, 304) or number in bodiless or status == 100:
            size = 0
        if len(received) < size:
            raise Unreadable(f"a body is cut: {head!r}")
        answers.append(Answer(status, fields, received[:size], found[1] == b"0"))
        received = received[size:]
        number += status != 100
    return answers


def one_at_a_time(data: bytes) -> Iterator[bytes]:
    """Byte by byte; of what is very long, the middle as one piece."""
    for at in range(min(len(data), 600)):
        yield data[at : at + 1]
    if len(data) > 600:
        yield data[600 : max(600, len(data) - 60)]
        for at in range(max(600, len(data) - 60), len(data)):
            yield data[at : at + 1]


def answer_size(received: bytes, *, bodiless: bool = False) -> int:
    """How long the first answer is; 0 while its head has not come."""
    end = received.find(b"\r\n\r\n") + 4
    if end < 4:
        return 0
    found = re.search(rb"(?i)\r\nContent-Length: (\d+)", received[:end])
    return end + (int(found[1]) if found and not bodiless else 0)


class Client:
    """A connection that is kept, and read an answer at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._loop = connection, asyncio.get_running_loop()
        # What has come and has not been asked for.
        self.taken = b""

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, port: int) -> AsyncIterator["Client"]:
        with socket.socket() as connection:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield cls(connection)

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    async def take(self, *, bodiless: bool = False) -> bytes:
        """The bytes of the next answer. EOFError when the connection ends before."""
        while not (size := answer_size(self.taken, bodiless=bodiless)) or len(self.taken) < size:
            if not (piece := await self._loop.sock_recv(self._socket, 1 << 20)):
                raise EOFError("closed before its answer")
            self.taken += piece
        found, self.taken = self.taken[:size], self.taken[size:]
        return found

    async def rest(self) -> bytes:
        """Everything until the server closes; what came before a reset is in `taken`."""
        while piece := await self._loop.sock_recv(self._socket, 1 << 20):
            self.taken += piece
        found, self.taken = self.taken, b""
        return found
