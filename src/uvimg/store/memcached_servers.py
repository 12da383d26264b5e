"""Servers that speak memcached's protocol, asked as one: each key lies on one of them (core/ring.py).

aiomcache speaks the protocol. What it leaves to us: a connection is given back only when the answer on it has been
read to its end, whoever was cancelled; an answer that was cut is an error, where it would wait for the rest for ever;
an answer of any length is not taken; and whoever waits for a connection gets a new one when one has broken.
Rule: a server that is away takes its own keys with it and no others. They do not move, for it may come back with them.
"""

import contextlib
import socket
from asyncio import Semaphore, StreamReader, open_connection
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from aiomcache import Client
from aiomcache.exceptions import ClientException, ValidationException
from aiomcache.pool import Connection, MemcachePool

from uvimg.core.errors import StoreDown, StoreFull, UvimgError
from uvimg.core.place import Tcp
from uvimg.core.ring import Ring
from uvimg.store.guard import Guard

T = TypeVar("T")

# No answer of ours is larger; a server with a larger limit may hold what others have put there.
_MAX_ANSWER_BYTES = 1 << 20
_CONNECTIONS = 16
# How much of an answer is read ahead.
_READ_AHEAD_BYTES = 256 << 10
# An idle connection whose other end has gone is noticed within so long, in seconds, and tries.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# What aiomcache has no words for: a time in the past, by which an item is gone at once.
_PAST = b"-1"
# Seconds beyond this are no number to a server.
_LAST_SECOND = (1 << 31) - 1
# Seconds up to here count from now, and are POSIX time from there on.
_MONTH_S = 30 * 24 * 3600


class Servers:
    """`get` and what else there is raise StoreDown and StoreFull, and never wait for longer than `timeout_s`.

    `role` is what people call them; an answer of more than `most_bytes` is none of ours.
    """

    def __init__(
        self, servers: Sequence[Tcp], timeout_s: float, role: str = "memcached", most_bytes: int = _MAX_ANSWER_BYTES
    ) -> None:
        self._clients = {str(server): _Client(server, most_bytes) for server in servers}
        self._guards = {name: Guard(f"{role} {name}", _translate, timeout_s) for name in self._clients}
        self._ring = Ring(list(self._clients))

    @property
    def guards(self) -> Sequence[Guard]:
        return list(self._guards.values())

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def get(self, key: bytes) -> bytes | None:
        return await self._ask(key, lambda client: client.get(key))

    async def gets(self, key: bytes) -> tuple[bytes | None, int | None]:
        """An item, and by what `cas` and `take` know whether it is still the same; None and None for none."""
        return await self._ask(key, lambda client: client.gets(key))

    async def add(self, key: bytes, value: bytes, exptime: int = 0) -> bool:
        """Whether there was none."""
        return await self._ask(key, lambda client: client.add(key, value, exptime))

    async def set(self, key: bytes, value: bytes, exptime: int = 0) -> None:
        await self._ask(key, lambda client: client.set(key, value, exptime))

    async def cas(self, key: bytes, value: bytes, cas: int, exptime: int = 0) -> bool:
        """Replace an item, unless it is another one by now, or gone. Whether it is done."""
        return await self._ask(key, lambda client: client.cas(key, value, cas, exptime))

    async def take(self, key: bytes, cas: int) -> bool:
        """Remove an item, unless it is another one by now, or gone. Whether it is done."""
        return await self._ask(key, lambda client: client.take(key, cas))

    async def touch(self, key: bytes) -> bool:
        """Whether there is such an item. It counts as one that was used just now."""
        return await self._ask(key, lambda client: client.touch(key, 0))

    async def delete(self, key: bytes) -> None:
        await self._ask(key, lambda client: client.delete(key))

    async def _ask(self, key: bytes, call: "Callable[[_Client], Awaitable[T]]") -> T:
        name = self._ring.find(key)
        client = self._clients[name]
        try:
            return await self._guards[name].run(lambda: call(client))
        except StoreDown:
            # The others were opened to the same server, and are likely no better.
            await client.close()
            raise


def exptime_at(at_s: int) -> int:
    """A server's way to say a POSIX time, which may have gone by."""
    return 1 if at_s <= _MONTH_S else 0 if at_s > _LAST_SECOND else at_s


def exptime_in(seconds: int) -> int:
    """The same for a time from now: at most a month."""
    return min(seconds, _MONTH_S)


class _Refused(Exception):
    """The server has answered that it will not."""


class _Client(Client):
    """One server. Every command that is used comes down to one of the two methods that are made anew below."""

    def __init__(self, server: Tcp, most_bytes: int) -> None:
        super().__init__(server.host, server.port)
        self._most_bytes = most_bytes
        self._pool = _Connections(server)

    async def take(self, key: bytes, cas: int) -> bool:
        connection = await self._pool.acquire()
        try:
            command = b"cas %b 0 %b 0 %d\r\n\r\n" % (key, _PAST, cas)
            answer = await self._execute_simple_command(connection, command)
        finally:
            self._pool.release(connection)
        if answer not in (b"STORED", b"EXISTS", b"NOT_FOUND"):
            raise ClientException("an odd answer to cas", answer)
        return answer == b"STORED"

    async def _execute_simple_command(self, conn: Connection, raw_command: bytes) -> bytes:
        with _closing_unless_read(conn):
            conn.writer.write(raw_command)
            await conn.writer.drain()
            return await _read_line(conn.reader)

    async def _multi_get(  # type: ignore[override]
        self, conn: Connection, *keys: bytes, with_cas: bool = True
    ) -> tuple[dict[bytes, bytes], dict[bytes, int | None]]:
        (key,) = keys
        self._validate_key(key)
        with _closing_unless_read(conn):
            conn.writer.write((b"gets " if with_cas else b"get ") + key + b"\r\n")
            await conn.writer.drain()
            line = await _read_line(conn.reader)
            if line == b"END":
                return {}, {}
            match line.split(b" "):
                case [b"VALUE", found, b"0", length, *rest] if found == key and len(rest) == with_cas:
                    size, cas = int(length), int(rest[0]) if rest else None
                case _:
                    raise ValueError("an odd answer to get")
            if not 0 <= size <= self._most_bytes:
                raise ValueError("an answer that is too long")
            data = await conn.reader.readexactly(size + 2)
            if data[size:] != b"\r\n" or await _read_line(conn.reader) != b"END":
                raise ValueError("an odd end of an answer")
            return {key: data[:size]}, {key: cas}


async def _read_line(reader: StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionResetError("closed in the middle of an answer")
    line = line[:-2]
    if line.startswith((b"ERROR", b"CLIENT_ERROR", b"SERVER_ERROR")):
        raise _Refused(line[:200].decode(errors="backslashreplace"))
    return line


@contextlib.contextmanager
def _closing_unless_read(connection: Connection) -> Iterator[None]:
    """The rest of an answer would be the next one's beginning."""
    try:
        yield
    except BaseException:
        connection.writer.transport.abort()
        raise


class _Connections(MemcachePool):
    """A bounded number to one server, the one that was used last first."""

    def __init__(self, server: Tcp) -> None:
        super().__init__(server.host, server.port, minsize=0, maxsize=_CONNECTIONS)
        self._room = Semaphore(_CONNECTIONS)
        self._idle: list[Connection] = []

    async def acquire(self) -> Connection:
        await self._room.acquire()
        try:
            while self._idle:
                connection = self._idle.pop()
                if _is_sound(connection):
                    return connection
                connection.writer.transport.abort()
            return await self._connect()
        except BaseException:
            self._room.release()
            raise

    async def _connect(self) -> Connection:
        # Both loops send small pieces at once (TCP_NODELAY) unasked.
        connection = Connection(*await open_connection(self._host, self._port, limit=_READ_AHEAD_BYTES))
        opened: Any = connection.writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            # Not every system lets one choose.
            if hasattr(socket, option):
                opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return connection

    def release(self, conn: Connection) -> None:
        self._room.release()
        if _is_sound(conn):
            self._idle.append(conn)
        else:
            conn.writer.transport.abort()

    async def clear(self) -> None:
        while self._idle:
            self._idle.pop().writer.transport.abort()


def _is_sound(connection: Connection) -> bool:
    reader = connection.reader
    return not (connection.writer.is_closing() or reader.at_eof() or reader.exception() is not None)


def _translate(exc: Exception) -> UvimgError | None:
    match exc:
        case _Refused():
            return _translate_refusal(str(exc))
        case ValidationException():
            return None
        # What is no answer at all comes from no memcached, or from one that has lost its way.
        case OSError() | EOFError() | ValueError() | ClientException():
            return StoreDown()
    return None


def _translate_refusal(said: str) -> UvimgError:
    if "out of memory" in said.lower():
        return StoreFull()
    if "too large" in said:
        return StoreFull("The server behind the store takes no items of a megabyte.")
    if said.startswith("SERVER_ERROR"):
        # Such as that of a proxy before it.
        return StoreDown()
    return UvimgError("The server behind the store does not know a command that is needed.")
