"""Front-ends: bytes on a socket ↔ Request and Response. They translate, no more."""

import asyncio
import socket
import ssl
import sys
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WebSettings:
    """The configuration as front-ends see it. Times in seconds; `grace_s` is for requests in flight at the end."""

    keepalive_s: float
    grace_s: float
    backlog: int
    max_connections: int
    memo_bytes: int
    # For every listener but unix sockets.
    tls: ssl.SSLContext | None = None

    def tls_for(self, listener: socket.socket) -> ssl.SSLContext | None:
        return None if listener.family == socket.AF_UNIX else self.tls


class FrontEnd(Protocol):
    """Serves one service on listening sockets that are its own from `start` on."""

    async def start(self, listeners: list[socket.socket]) -> None: ...

    @property
    def open_connections(self) -> int:
        """How many clients are connected."""

    async def stop(self) -> None:
        """Accept nobody else, finish what is on its way or in flight within the grace, then close everything."""


# Who comes by a unix socket has no address: a process of this machine, exactly like one that comes by loopback.
LOCAL_PEER = "127.0.0.1"


def name_peer(transport: asyncio.BaseTransport | None) -> str:
    """The address of who is at the other end; "" of one that has gone already."""
    name = None if transport is None else transport.get_extra_info("peername")
    if isinstance(name, tuple):
        # Clients by the thousand come from few addresses: one object each keeps them in the processor's cache.
        return sys.intern(str(name[0]))
    connection = None if transport is None else transport.get_extra_info("socket")
    return LOCAL_PEER if connection is not None and connection.family == socket.AF_UNIX else ""
