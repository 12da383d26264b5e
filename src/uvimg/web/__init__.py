"""Front-ends: bytes on a socket ↔ Request and Response. They translate, no more."""

import os
import socket
from dataclasses import dataclass
from typing import Protocol

from uvimg.core.message import FilePart


@dataclass(frozen=True, slots=True)
class WebSettings:
    """The configuration as front-ends see it. Times in seconds; `grace_s` is for requests in flight at the end."""

    keepalive_s: float
    grace_s: float
    backlog: int
    max_connections: int
    memo_bytes: int


class FrontEnd(Protocol):
    """Serves one service on listening sockets that are its own from `start` on."""

    async def start(self, listeners: list[socket.socket]) -> None: ...

    @property
    def open_connections(self) -> int:
        """How many clients are connected."""

    async def stop(self) -> None:
        """Accept nobody else, finish what is in flight within the grace, then close everything."""


def read_part(part: FilePart, at: int, size: int) -> bytes:
    """Bytes of a file that is being sent. ConnectionResetError when it has become shorter: a body must not be.

    What follows a short body on its connection would be taken for the rest of it.
    """
    data = os.pread(part.file.fileno(), size, part.start + at)
    if len(data) != size:
        raise ConnectionResetError("a file has become shorter while it was sent")
    return data
