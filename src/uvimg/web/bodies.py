"""Bodies on their way: a request's as it comes, at a rate; an answer's as its file is read."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable

from uvimg.core.errors import RequestTimeout
from uvimg.core.http1 import BODY_BYTES_PER_S, BODY_START_S
from uvimg.core.message import FilePart

# Files are sent in such pieces: so much of each waits in memory for a client that does not read.
PIECE_BYTES = 262_144
# Those of files up to here are read in the call itself, from the page cache mostly, which takes 10 µs a piece; in a
# thread it takes 63 µs, and a file of 900 KiB cost 1.1 ms where it costs 0.6. Larger ones are seldom and may be far
# from the cache: a disk may take its time.
READ_AT_ONCE_BYTES = 1 << 20


async def read_paced(read: Callable[[float], Awaitable[bytes]]) -> AsyncIterator[bytes]:
    """A request's body. RequestTimeout when it is too slow.

    `read` waits for more of it until the loop's time that it is given, and returns nothing at the end.
    """
    now = asyncio.get_running_loop().time
    until = now() + BODY_START_S
    while True:
        try:
            piece = await read(until)
        except TimeoutError:
            raise RequestTimeout() from None
        if not piece:
            return
        given = now()
        yield piece
        # The time that passes while nobody asks for more is not the client's.
        until += len(piece) / BODY_BYTES_PER_S + now() - given


async def read_piece(part: FilePart, at: int) -> bytes:
    """The piece of a file that begins at this place of it."""
    size = min(PIECE_BYTES, part.size - at)
    if part.size <= READ_AT_ONCE_BYTES:
        return read_part(part, at, size)
    return await asyncio.to_thread(read_part, part, at, size)


def read_part(part: FilePart, at: int, size: int) -> bytes:
    """Bytes of a file that is being sent. ConnectionResetError when it has become shorter: a body must not be.

    What follows a short body on its connection would be taken for the rest of it.
    """
    data = os.pread(part.file.fileno(), size, part.start + at)
    if len(data) != size:
        raise ConnectionResetError("a file has become shorter while it was sent")
    return data
