"""Answers in pieces that break off in the middle, on every front-end: none of them looks whole."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import uvloop

from tests.wire_server import listening
from uvimg.core.errors import NotFound, UvimgError
from uvimg.core.message import Pieces, Request, Response
from uvimg.service import Service

EVERY_FRONT_END = True


class Breaking:
    """See `App`."""

    name = "breaking"
    released = 0

    def try_now(self, request: Request) -> Response | None:
        return None

    async def handle(self, request: Request) -> Response:
        if request.path == "/missing":
            raise NotFound

        async def pieces() -> AsyncIterator[bytes]:
            yield b"a line\n"
            await asyncio.sleep(0.05)
            if request.path == "/breaks":
                raise UvimgError("the store has gone")

        return Response(200, {}, Pieces(pieces(), self.let_go))

    def refuse(self, request: Request, error: UvimgError) -> Response:
        return Response(error.status)

    def let_go(self) -> None:
        self.released += 1


def receive(port: int, version: str, path: str) -> tuple[bytes, bool]:
    """What came, and whether it ended as it should."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"GET {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        found = b""
        try:
            while data := connection.recv(65_536):
                found += data
        except ConnectionResetError:
            return found, False
    return found, version == "1.0" or found.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_answer_that_breaks_off_does_not_look_whole(front_end: dict[str, str], version: str) -> None:
    app = Breaking()

    async def ask(path: str) -> tuple[bytes, bool]:
        async with listening(front_end["front_end"], Service(app, None, lambda: 0)) as port:
            return await asyncio.to_thread(receive, port, version, path)

    make_loop = uvloop.new_event_loop if front_end["loop"] == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        whole, ended = runner.run(ask("/whole"))
        assert (b"a line" in whole, ended) == (True, True)
        assert app.released >= 1
        cut, ended = runner.run(ask("/breaks"))
        assert (b"200 OK" in cut, ended) == (True, False)
        assert app.released >= 2
