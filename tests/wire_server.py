"""A front-end over an app that is as slow, large or uninterested as a test wants it, in a process of its own.

    python -m tests.wire_server transport uvloop '{"HEAD_S": 0.5}' '{"keepalive_s": 1}'

The third argument overrides the deadlines of core/http1.py, which are no settings: nobody should need others.
"""

import asyncio
import hashlib
import json
import logging
import signal
import sys
import tempfile
from typing import Any

from uvimg.core import http1
from uvimg.core.errors import BadRequest, NotFound, TooLarge, UvimgError
from uvimg.core.message import FilePart, Request, Response


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


async def _serve(front_end: str, settings: dict[str, Any]) -> None:
    # After the deadlines have been overridden: front-ends take them when they are imported.
    from uvimg.app import _FRONT_ENDS
    from uvimg.service import Service
    from uvimg.web import WebSettings
    from uvimg.web.listen import bind_sockets
    from uvimg.web.tls import make_context

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
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
    running = _FRONT_ENDS[front_end](Service(WireApp(), None, lambda: 0), WebSettings(**chosen))
    listeners = bind_sockets("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    await running.start(listeners)
    print(port, flush=True)
    await stop.wait()
    await running.stop()


if __name__ == "__main__":
    import uvloop

    logging.basicConfig()
    for name, value in json.loads(sys.argv[3]).items():
        assert hasattr(http1, name)
        setattr(http1, name, value)
    factory = uvloop.new_event_loop if sys.argv[2] == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(sys.argv[1], json.loads(sys.argv[4])))
