"""What a front-end knows of its connections: one that fails is forgotten like any other."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from uvimg.web import WebSettings
from uvimg.web.gate import Gate, Gates

SETTINGS = WebSettings(keepalive_s=5, grace_s=5, backlog=5, max_connections=5, memo_bytes=0)


class Failing(asyncio.Protocol):
    """A handler with a fault of its own."""

    def connection_lost(self, exc: Exception | None) -> None:
        raise ValueError("a fault")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_connection_whose_handler_fails_at_its_end_keeps_nobody_from_theirs(
    run: Callable[[Coroutine[Any, Any, list[object]]], list[object]],
) -> None:
    async def serve() -> list[object]:
        loop = asyncio.get_running_loop()
        complaints: list[object] = []
        loop.set_exception_handler(lambda _, context: complaints.append(context["exception"]))
        gates = Gates(Failing, SETTINGS, memo=None)  # type: ignore[arg-type]  # nothing is asked
        server = await loop.create_server(lambda: Gate(gates), "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()):
            while not len(gates):
                await asyncio.sleep(0.005)
        server.close()
        async with asyncio.timeout(10):
            await gates.see_off()
        assert len(gates) == 0
        return complaints

    (complaint,) = run(serve())
    # It is told all the same.
    assert isinstance(complaint, ValueError)
