"""A front-end over an app that is as slow, large or uninterested as a test wants it, in a process of its own.

    python -m tests.wire_server transport uvloop '{"HEAD_S": 0.5}' '{"keepalive_s": 1}'

The third argument overrides the deadlines of core/http1.py, which are no settings: nobody should need others.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from uvimg.core import http1
from uvimg.core.errors import BadRequest, NotFound, TooLarge, UvimgError
from uvimg.core.message import FilePart, Request, Response
from uvimg.service import Service


class WireApp:
    """See `App`. Every answer names its request, so that one given to another is seen."""

    name = "wire"

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="wire-", suffix=".blob")  # noqa: SIM115
        self._file.write(bytes(range(256)) * 16_384)
        self._file.flush()
        self._cancelled = 0

    def try_now(self, request: Request) -> Response | None:
        kind = request.path.strip("/").partition("/")[0]
        if kind == "now":
            return Response(
                200,
                {"X-For": request.target},
                f"{request.headers.get('host')} {request.target}".encode(errors="replace"),
                lasts="always",
            )
        if kind == "large":
            return Response(200, {"X-For": request.target}, bytes(_number(request.query)))
        if kind == "file":
            return Response(200, {"X-For": request.target}, self._open(_number(request.query)))
        if kind == "cancelled":
            return Response(200, {}, str(self._cancelled).encode())
        return None

    async def handle(self, request: Request) -> Response:
        kind = request.path.strip("/").partition("/")[0]
        if (response := self.try_now(request)) is not None:
            return response
        if kind == "slow":
            await asyncio.sleep(_number(request.query) / 1000)
            return Response(200, {"X-For": request.target}, request.target.encode(errors="replace"))
        if kind == "hang":
            try:
                await asyncio.sleep(3600)
            finally:
                self._cancelled += 1
        if kind == "body":
            digest, size = hashlib.sha256(), 0
            async for piece in request.body:
                digest.update(piece)
                size += len(piece)
            return Response(200, {"X-For": request.target}, f"{size} {digest.hexdigest()}".encode())
        if kind == "early":
            raise TooLarge()
        raise NotFound()

    def refuse(self, request: Request, error: UvimgError) -> Response:
        return Response(error.status, {"X-For": request.target}, error.detail.encode())

    def _open(self, size: int) -> FilePart:
        return FilePart(open(self._file.name, "rb", buffering=0), 0, min(size, 4_194_304))


def _number(query: str) -> int:
    if not query.isascii() or not query.isdecimal() or len(query) > 8:
        raise BadRequest()
    return int(query)


class Wire:
    """This program in a process of its own."""

    def __init__(self, folder: Path, front_end: tuple[str, str], hurry: dict[str, float], **chosen: Any) -> None:
        self._log = folder / f"log-{'-'.join(front_end)}"
        self.front_end = front_end[0]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.wire_server", *front_end, json.dumps(hurry), json.dumps(chosen)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).parent.parent,
            )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.own_sockets = self.open_files("socket:")

    @property
    def failures(self) -> list[str]:
        """What the log says of failures of ours."""
        lines = self._log.read_text().splitlines()
        return [line for line in lines if re.match(r"(ERROR|CRITICAL):|.*never retrieved", line)]

    def connect(self, **options: int) -> socket.socket:
        connection = socket.socket()
        for name, value in options.items():
            connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        connection.settimeout(15)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def talk(self, *pieces: bytes, end: bool = False) -> bytes:
        """What comes back for these bytes until the server closes; `end` says that no more will come."""
        with self.connect() as connection:
            for piece in pieces:
                connection.sendall(piece)
            if end:
                connection.shutdown(socket.SHUT_WR)
            return receive_all(connection)

    def open_files(self, kind: str) -> int:
        links = []
        for path in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(path))
        return sum(kind in link for link in links)

    def open_blobs(self) -> int:
        """How many files it holds open for answers: the app has one itself."""
        return self.open_files("/wire-") - 1

    def memory(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(20)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def receive_all(connection: socket.socket) -> bytes:
    received = bytearray()
    while piece := connection.recv(1 << 20):
        received += piece
    return bytes(received)


def get(target: str, fields: str = "") -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode()


def last(target: str) -> bytes:
    return get(target, "Connection: close\r\n")


@contextlib.asynccontextmanager
async def listening(front_end: str, service: Service, **settings: Any) -> AsyncIterator[int]:
    """A front-end over this service on a free port of 127.0.0.1; the port."""
    # After the deadlines have been overridden: front-ends take them when they are imported.
    from uvimg.app import _make_front_end
    from uvimg.web import WebSettings
    from uvimg.web.listen import bind_sockets
    from uvimg.web.tls import make_context

    chosen = {
        "keepalive_s": 75,
        "grace_s": 5,
        "backlog": 512,
        "max_connections": 1000,
        "memo_bytes": 1 << 20,
        **settings,
    }
    if certificate := chosen.pop("certificate", None):
        chosen["tls"] = make_context(certificate, certificate)
    running = _make_front_end(service, front_end, WebSettings(**chosen))
    listeners = bind_sockets("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    await running.start(listeners)
    try:
        yield port
    finally:
        await running.stop()


async def _serve(front_end: str, settings: dict[str, Any]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with listening(front_end, Service(WireApp(), None, lambda: 0), **settings) as port:
        print(port, flush=True)
        await stop.wait()


if __name__ == "__main__":
    import uvloop

    logging.basicConfig()
    for name, value in json.loads(sys.argv[3]).items():
        assert hasattr(http1, name)
        setattr(http1, name, value)
    factory = uvloop.new_event_loop if sys.argv[2] == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(sys.argv[1], json.loads(sys.argv[4])))
