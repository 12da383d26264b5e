"""Large blobs of a store that is far away, sent on while they come; of a range its bytes alone are fetched."""

from collections.abc import AsyncIterator

from uvimg.core.message import Pieces, Request
from uvimg.core.negotiate import Part, Whole
from uvimg.store import Record, Store, Streams

# A smaller one is here before a client has begun to read.
_LARGE_BYTES = 1 << 20


async def stream_blob(store: Store, request: Request, record: Record, answer: Whole | Part) -> Pieces | None:
    """What an answer tells of a blob; None where the blob had better be had whole, or is not there whole."""
    if record.size <= _LARGE_BYTES or not isinstance(store, Streams):
        return None
    start, stop = (answer.start, answer.stop) if isinstance(answer, Part) else (0, record.size)
    if request.method == "HEAD":
        return Pieces(_nothing(), size=stop - start)
    return await store.stream(record.digest, start, stop)


async def _nothing() -> AsyncIterator[bytes]:
    pieces: tuple[bytes, ...] = ()
    for piece in pieces:
        yield piece
