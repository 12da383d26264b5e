"""A bare aiohttp `web.Server` on uvloop that has every answer in memory: what the aiohttp front-end is held against.

python -m bench.rivals.aiohttp_server PORT FOLDER     serves FOLDER's files under their names
"""

import asyncio
import hashlib
import sys
from pathlib import Path

import uvloop
from aiohttp import web

_TYPES = {".jpg": "image/jpeg", ".html": "text/html"}


async def _serve(port: int, folder: Path) -> None:
    answers = {}
    for file in folder.iterdir():
        body = file.read_bytes()
        headers = {
            "Content-Type": _TYPES[file.suffix],
            "ETag": f'"{hashlib.md5(body).hexdigest()}"',
            "Cache-Control": "max-age=7776000",
        }
        answers[f"/{file.name}"] = headers, body

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        headers, body = answers[request.path]
        if request.headers.get("If-None-Match") == headers["ETag"]:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers)

    runner = web.ServerRunner(web.Server(handle, access_log=None, keepalive_timeout=75.0))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


def main() -> None:
    port, folder = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(int(port), Path(folder)))


if __name__ == "__main__":
    main()
