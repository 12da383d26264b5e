"""All connections of one front-end: who is let in, watched for deadlines, and seen off at the end.

Deadlines are kept by one look at all connections a few times a second, which costs less than a timer for each step of
each. What a deadline is, and which follows from what, is core/deadlines.py's.
`Connection` is one on a transport of the loop, for the front-ends that are protocols.
"""

import asyncio
import contextlib
import logging
import select
import socket
import struct
from typing import Any, Generic, Protocol, TypeVar, cast

from uvimg.core.deadlines import Timed
from uvimg.core.errors import RequestTimeout, UvimgError
from uvimg.core.http1 import HEAD_S, LINGER_S, check_start
from uvimg.web import WebSettings, name_peer
from uvimg.web.drain import Drain

log = logging.getLogger("uvimg.web")

# SO_LINGER for no time at all.
_AT_ONCE = struct.pack("ii", 1, 0)
# How late a deadline may be noticed.
_WATCH_S = 0.25


class Watched(Protocol):
    """What is asked of a connection. The first two are core/deadlines.py's."""

    touched: bool
    due: float

    def rest(self, now: float) -> None:
        """It was touched: it is idle from now on, unless something else has begun."""

    def expire(self, now: float) -> None:
        """Something is due."""

    def close_idle(self) -> None:
        """End it, unless a request is in flight or has come in part."""

    def abort(self) -> None:
        """End it whatever it does. It is forgotten when it has ended."""


Kind = TypeVar("Kind", bound=Watched)


class Connections(Generic[Kind]):
    """Those of one front-end."""

    def __init__(self, settings: WebSettings) -> None:
        self.settings = settings
        self.drain = Drain()
        self._open: set[Kind] = set()
        self._changed = asyncio.Event()

    def watch(self) -> None:
        """Keep their deadlines, from now until they are seen off."""
        self._watching = asyncio.create_task(self._watch())

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        return len(self._open) >= self.settings.max_connections

    def add(self, connection: Kind) -> None:
        self._open.add(connection)

    def forget(self, connection: Kind) -> None:
        """It has ended."""
        self._open.discard(connection)
        self._changed.set()

    async def see_off(self) -> None:
        """Nobody else is accepted any more: let them come to their end within the grace, then end them."""
        await self.drain.run(self._all_closed, self._close_idle, self.settings.grace_s)
        self._watching.cancel()
        for connection in list(self._open):
            connection.abort()
        await asyncio.gather(self._watching, self._all_closed(), return_exceptions=True)

    async def _all_closed(self) -> None:
        while self._open:
            self._changed.clear()
            await self._changed.wait()

    def _close_idle(self) -> None:
        for connection in list(self._open):
            try:
                connection.close_idle()
            except Exception:
                # Nor must one keep the process from its end.
                log.exception("a connection could not be closed")
                connection.abort()

    async def _watch(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_WATCH_S)
            at = now()
            for connection in list(self._open):
                try:
                    if connection.touched:
                        connection.rest(at)
                    elif connection.due < at:
                        connection.expire(at)
                except Exception:
                    # One that fails must not take all others' deadlines with it.
                    log.exception("a deadline could not be kept")
                    connection.abort()


def has_unread(descriptor: int) -> bool:
    """Whether a socket has something that has not been read yet: bytes or an end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def reset_at_end(connection: Any) -> None:
    """Have a socket reset its connection when it is closed: an answer that was cut off must not look whole.

    It would to HTTP/1.0, where a body of a size that nobody knew before ends with its connection.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


class Connection(Timed, asyncio.Protocol):
    """One connection on a transport: what it does when a deadline comes or passes, and how it ends."""

    __slots__ = ("_buffer", "_connections", "_last", "_loop", "_searched", "_transport", "_writable", "peer")

    def __init__(self, connections: "Connections[Any]", loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._connections, self._loop = connections, loop
        self._transport: asyncio.Transport | None = None
        self.peer = ""
        # What has come and is nobody's yet. No head ends before this place of it: it is not searched twice.
        self._buffer = b""
        self._searched = 0
        # Whether the kernel has all that was written.
        self._writable = True
        # Nothing more is read as a request.
        self._last = False

    # What its kinds differ in

    @property
    def is_idle(self) -> bool:
        """Nothing of a request has come, and nothing is being answered or said."""
        raise NotImplementedError

    def _refuse(self, error: UvimgError) -> None:
        """Say why a head is none; nothing behind it can be told apart."""
        raise NotImplementedError

    def _linger(self) -> None:
        """Let the client read its last answer: closing with bytes unread would take it back."""
        raise NotImplementedError

    # What it is told by its transport

    def _meet(self, transport: asyncio.BaseTransport) -> bool:
        """Begin; False when it is ended at once."""
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.peer = name_peer(transport)
        if not self.peer or self._connections.is_full:
            self._transport.abort()
            return False
        self._connections.add(self)
        return True

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._writable = False
        self.hold(self._transport.get_write_buffer_size(), self._loop.time())

    def resume_writing(self) -> None:
        self._writable = self.touched = True
        self.release()

    def _lose(self) -> None:
        self._transport = None
        self._last = self._writable = True
        self._buffer = b""
        self.expect_nothing()
        self.release()

    # What it is told by who watches it

    def rest(self, now: float) -> None:
        self.touched = False
        if self.is_idle:
            self.expect("request", now + self._connections.settings.keepalive_s)

    def expire(self, now: float) -> None:
        if self._transport is None:
            return
        overdue = self.find_overdue(self._transport.get_write_buffer_size(), now)
        if overdue == "head":
            self._refuse(RequestTimeout("The head of the request arrived too slowly."))
        elif overdue == "taking":
            self.abort()
        elif overdue is not None:
            # All of what was said has been taken.
            self._transport.abort()

    def close_idle(self) -> None:
        if self._transport is not None and self.is_idle and not self._transport.is_closing():
            connection = self._transport.get_extra_info("socket")
            # What is to be read already will be answered, and told that it was the last. What crosses our end on its
            # way is read away, so that its client sees an end and no reset.
            if not has_unread(connection.fileno()):
                self._linger()

    def abort(self) -> None:
        if self._transport is not None:
            # Of one that has been told all and waits for its client's end nothing is cut off.
            if self.awaited != "end":
                reset_at_end(self._transport.get_extra_info("socket"))
            self._transport.abort()

    # Beginnings and ends

    def _await_head(self) -> None:
        """What has come is the start of a head."""
        try:
            check_start(self._buffer)
        except UvimgError as exc:
            self._refuse(exc)
            return
        # The end may have come in part.
        self._searched = max(0, len(self._buffer) - 3)
        if self.awaited != "head":
            self.expect("head", self._loop.time() + HEAD_S)

    def _end_writing(self) -> None:
        """Once all is written; before that, asyncio would end a socket that its client may have reset by then."""
        if self._transport is not None and not self._transport.is_closing() and self._writable:
            self.expect("end", self._loop.time() + LINGER_S)
            with contextlib.suppress(OSError):
                self._transport.write_eof()
