"""The limit: a Protocol that parses nothing and writes the same answer to whatever arrives.

    python -m bench.rivals.limit PORT uvloop|asyncio ANSWER_FILE

What a front-end costs above this is its own doing. uvloop writes at the end of its round, or in the call itself
with `set_write_buffer_limits(high=0)`: of seven rounds each the best took 7.6 µs a request either way.
"""

import asyncio
import gc
import sys
from pathlib import Path
from typing import cast

import uvloop


class Limit(asyncio.Protocol):
    answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's.
        self._write = cast(asyncio.Transport, transport).write

    def data_received(self, data: bytes) -> None:
        self._write(self.answer)


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Limit, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    port, loop, answer = sys.argv[1:]
    Limit.answer = Path(answer).read_bytes()
    gc.freeze()
    make_loop = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(_serve(int(port)))


if __name__ == "__main__":
    main()
