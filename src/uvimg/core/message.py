"""Request and Response: what every front-end turns bytes into, and back.

Header names are lower-case in a request, and a field that came several times is one value joined
by ", " (RFC 9110 5.3), so a lookup sees all of it.
"""

import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Literal
from urllib.parse import unquote

import msgspec

from uvimg.core.tally import Tally


class Request(msgspec.Struct, frozen=True):
    """One request. `target` is the raw request target, `path` its path decoded once, `query` still encoded.

    `length` is the declared size of the body in bytes, 0 when there is none, None when it comes in chunks;
    `body` is iterated at most once, and reads the socket as it is. `peer` is the address of the socket's
    other end, which behind a proxy is the proxy's. `prefix` is the path below which all of this is mounted, ""
    at the root: `path` comes without it, and what names a path in an answer begins with it.
    """

    method: str
    target: str
    path: str
    query: str
    headers: Mapping[str, str]
    peer: str
    length: int | None
    body: AsyncIterable[bytes]
    prefix: str = ""


class _NoBody:
    """The body of a request that has none."""

    def __aiter__(self) -> "_NoBody":
        return self

    async def __anext__(self) -> bytes:
        raise StopAsyncIteration


NO_BODY: AsyncIterable[bytes] = _NoBody()


@dataclass(frozen=True, slots=True)
class FilePart:
    """A stretch of an open file that somebody will send. Whoever holds it closes it."""

    file: BinaryIO
    start: int
    size: int

    def part(self, start: int, stop: int) -> "FilePart":
        return FilePart(self.file, self.start + start, stop - start)

    def close(self) -> None:
        self.file.close()


Content = bytes | FilePart


@dataclass(frozen=True, slots=True)
class Pieces:
    """A body that is made while it is sent: asked for a piece when the client has taken those before. Where making
    fails in the middle, so does the connection: the answer must not look whole.

    `close` frees what makes it, also where nobody has asked for a piece yet. `size` is None where nobody knows it
    before; where it is known, it is what all pieces have together.
    """

    pieces: AsyncIterator[bytes]
    close: Callable[[], None] = lambda: None
    size: int | None = None


@dataclass(slots=True)
class Response:
    """One answer. The front-end adds Content-Length, Date and Server, sends no body to HEAD, and releases it.

    `lasts` tells for how long a request with the same head, whoever sends it, has the same answer.

    For the metrics the app says in `route` which of its routes this was, and in `origin` how it came by the content;
    of an error that is its class. The service puts the tally here in which it counted the answer.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: Content | Pieces = b""
    lasts: Literal["not", "while the store is unchanged", "always"] = "not"
    route: str = ""
    origin: str = ""
    tally: Tally | None = None

    @property
    def size(self) -> int:
        """Of the body in bytes; 0 for one in pieces that nobody has counted."""
        if isinstance(self.body, Pieces):
            return self.body.size or 0
        return self.body.size if isinstance(self.body, FilePart) else len(self.body)

    def release(self) -> None:
        """Close what the body holds open; safe to call at any time."""
        if isinstance(self.body, FilePart | Pieces):
            self.body.close()


# What is told of each answer: request, peer, status, size of the body in bytes, seconds.
AccessLog = Callable[[Request, str, int, int, float], None]

_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")


def split_target(target: str) -> tuple[str, str]:
    """A request target in origin-form or absolute-form (RFC 9112 3.2) as (path decoded once, query still encoded).

    Both can be encoded again: what a front-end could not decode (lone surrogates) is no longer in them.
    """
    path, query = split_raw(target)
    return unquote(path, errors="replace"), query


def split_raw(target: str) -> tuple[str, str]:
    """A request target as (path, query), both still encoded."""
    if not target.isascii():
        target = target.encode(errors="replace").decode()
    if absolute := _ABSOLUTE.match(target):
        rest = target[absolute.end() :]
        target = rest if rest.startswith("/") else "/" + rest
    path, _, query = target.partition("#")[0].partition("?")
    return path, query


def fold_headers(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Header fields as they came, as one mapping with lower-case names and joined values."""
    folded: dict[str, str] = {}
    for name, value in pairs:
        lower = name.lower()
        folded[lower] = f"{folded[lower]}, {value}" if lower in folded else value
    return folded
