"""Redis servers, and what is asked of them: a command and its answer, or several in one go.

redis-py connects (authentication, TLS, the database) and hiredis reads; the connections are kept here, for that takes
20 µs a command where redis-py's pool takes 70. A connection has one call at a time, and is closed when that ends in
any other way than with all its answers: who comes next never reads another's.
Rule: nothing is asked twice after a failure, but for what a cluster itself sends elsewhere.
"""

import asyncio
import hashlib
import random
import time
from collections.abc import Sequence
from typing import Any, Protocol

import hiredis
from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from uvimg.core.errors import StoreDown, StoreFull, UvimgError
from uvimg.core.redis import RedisPlace
from uvimg.store.guard import Guard

Command = tuple[bytes | str | int, ...]

# More at once would only wait in the server: it carries out one command after the other.
_MOST_CONNECTIONS = 16
# What a cluster may send elsewhere, or ask to be asked again in a moment, before that counts as no answer.
_MOST_REDIRECTIONS = 8
_MOMENT_S = 0.02
# Between two looks where a cluster has its slots.
_LOOK_EVERY_S = 0.2
# What a server answers that is there and cannot serve: it is a replica by now, lacks others of its kind or our rights.
_UNABLE = (exceptions.ReadOnlyError, exceptions.ClusterDownError, exceptions.NoPermissionError)
_UNABLE_WORDS = ("NOREPLICAS", "BUSY")


class Script:
    """A script as the servers know it: by its hash."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha1 = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Servers(Protocol):
    """One server or a cluster. A partition's number says who is asked. StoreDown, StoreFull."""

    @property
    def guards(self) -> Sequence[Guard]: ...

    async def ask(self, partition: int, *command: bytes | str | int) -> Any: ...

    async def ask_all(self, commands: Sequence[tuple[int, Command]]) -> list[Any]:
        """Several answers, in one go from each server."""

    async def close(self) -> None: ...


def open_servers(place: RedisPlace, timeout_s: float) -> Servers:
    return _Cluster(place, timeout_s) if place.is_cluster else _One(place, timeout_s)


async def run_script(
    servers: Servers, partition: int, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]
) -> Any:
    """What a script says; a server that has not seen it yet is told all of it."""
    try:
        return await servers.ask(partition, "EVALSHA", script.sha1, len(keys), *keys, *arguments)
    except _NoScript:
        return await servers.ask(partition, "EVAL", script.text, len(keys), *keys, *arguments)


class _NoScript(UvimgError):
    """The server has not seen this script."""


class _Server:
    """One server's connections, behind a guard."""

    def __init__(self, address: tuple[str, int], place: RedisPlace, timeout_s: float) -> None:
        self.address = address
        self.guard = Guard(f"redis {address[0]}:{address[1]}", _translate, timeout_s)
        self._make: type[aioredis.Connection] = aioredis.SSLConnection if place.is_encrypted else aioredis.Connection
        self._options: dict[str, Any] = {
            "host": address[0],
            "port": address[1],
            "db": place.database,
            "username": place.user,
            "password": place.password,
            # The guard alone looks at the clock: another one for each read would double what a command takes.
            "socket_timeout": None,
            "socket_connect_timeout": timeout_s,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "driver_info": None,
            **dict(place.certificates),
        }
        self._idle: list[aioredis.Connection] = []
        self._turns = asyncio.Semaphore(_MOST_CONNECTIONS)

    async def ask(self, *commands: Command) -> list[Any]:
        """The answers; those that are errors of these very commands are among them, as exceptions."""
        async with self._turns:
            try:
                return await self.guard.run(lambda: self._exchange(commands))
            except StoreDown:
                # Those that nobody uses have lost their other end too, or will have.
                await self.close()
                raise

    async def _exchange(self, commands: tuple[Command, ...]) -> list[Any]:
        connection = self._idle.pop() if self._idle else self._make(**self._options)
        try:
            if connection.is_connected and await connection.can_read():
                # The other end has gone meanwhile.
                await connection.disconnect(nowait=True)
            if not connection.is_connected:
                await connection.connect()  # type: ignore[no-untyped-call]
            packed = [hiredis.pack_command(command) for command in commands]  # type: ignore[arg-type]
            await connection.send_packed_command(packed, check_health=False)
            answers = [await _read(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        for answer in answers:
            if isinstance(answer, exceptions.ResponseError) and _is_unable(answer):
                raise answer
        return answers

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)


async def _read(connection: aioredis.Connection) -> Any:
    try:
        return await connection.read_response()
    except exceptions.ResponseError as exc:
        return exc


def _is_unable(answer: exceptions.ResponseError) -> bool:
    return isinstance(answer, _UNABLE) or str(answer).startswith(_UNABLE_WORDS)


def _translate(exc: Exception) -> UvimgError | None:
    """Our error for one of the connection's, or of a server that cannot serve."""
    if isinstance(exc, exceptions.RedisError | exceptions.RedisClusterException | OSError):
        return StoreDown()
    return None


def _tell(exc: exceptions.ResponseError) -> UvimgError:
    """Our error for what a server says to a command that it could not carry out."""
    text = str(exc)
    if isinstance(exc, exceptions.OutOfMemoryError) or "OOM command not allowed" in text or "MISCONF" in text:
        # No memory, or no disk to save it on: what is there can still be read.
        return StoreFull()
    if isinstance(exc, exceptions.NoScriptError):
        return _NoScript()
    if isinstance(exc, exceptions.AskError):
        return StoreDown("This Redis server is one of a cluster: the store is a redis+cluster://.")
    return UvimgError()


def _check(answer: Any) -> Any:
    if isinstance(answer, exceptions.ResponseError):
        raise _tell(answer) from answer
    return answer


class _One:
    """One server."""

    def __init__(self, place: RedisPlace, timeout_s: float) -> None:
        self._server = _Server(place.addresses[0], place, timeout_s)
        self.guards = (self._server.guard,)

    async def ask(self, partition: int, *command: bytes | str | int) -> Any:
        (answer,) = await self._server.ask(command)
        return _check(answer)

    async def ask_all(self, commands: Sequence[tuple[int, Command]]) -> list[Any]:
        if not commands:
            return []
        return [_check(answer) for answer in await self._server.ask(*(command for _, command in commands))]

    async def close(self) -> None:
        await self._server.close()


class _Cluster:
    """A Redis Cluster: each partition is one server's, and may become another's at any time.

    redis-py's own client for that closes everybody's connections when one server is away, and has one clock for all
    of them; here each server has a guard of its own, and nobody waits for one who asks another.
    """

    def __init__(self, place: RedisPlace, timeout_s: float) -> None:
        self._place, self._timeout_s = place, timeout_s
        self._servers: dict[tuple[str, int], _Server] = {}
        self._slots = [key_slot(place.base(partition)) for partition in range(place.partitions)]
        self._owners: dict[int, tuple[str, int]] = {}
        self._looking = asyncio.Lock()
        self._looked_at = float("-inf")
        # Whether something was not where it was taken to be.
        self._is_stale = True

    @property
    def guards(self) -> Sequence[Guard]:
        return [server.guard for server in self._servers.values()]

    async def ask(self, partition: int, *command: bytes | str | int) -> Any:
        server = await self._find(partition)
        before: tuple[Command, ...] = ()
        for step in range(_MOST_REDIRECTIONS):
            try:
                answer = (await server.ask(*before, command))[-1]
            except StoreDown:
                self._is_stale = True
                raise
            before = ()
            if isinstance(answer, exceptions.TryAgainError):
                await asyncio.sleep(_MOMENT_S * (1 + step) * random.random())
            elif isinstance(answer, exceptions.MovedError):
                self._is_stale = True
                server = self._server((answer.host or server.address[0], answer.port))
                self._owners[partition] = server.address
            elif isinstance(answer, exceptions.AskError):
                server, before = self._server((answer.host or server.address[0], answer.port)), (("ASKING",),)
            else:
                return _check(answer)
        raise StoreDown()

    async def ask_all(self, commands: Sequence[tuple[int, Command]]) -> list[Any]:
        shares: dict[tuple[str, int], list[int]] = {}
        for index, (partition, _) in enumerate(commands):
            shares.setdefault((await self._find(partition)).address, []).append(index)
        answers: list[Any] = [None] * len(commands)

        async def ask(address: tuple[str, int], indices: list[int]) -> None:
            try:
                found = await self._server(address).ask(*(commands[index][1] for index in indices))
            except StoreDown:
                self._is_stale = True
                raise
            for index, answer in zip(indices, found, strict=True):
                if isinstance(answer, exceptions.AskError | exceptions.TryAgainError):
                    answer = await self.ask(commands[index][0], *commands[index][1])
                answers[index] = _check(answer)

        # All to their ends, whatever becomes of one: none goes on behind the caller's back.
        outcomes = await asyncio.gather(*(ask(*share) for share in shares.items()), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        return answers

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()

    def _server(self, address: tuple[str, int]) -> _Server:
        server = self._servers.get(address)
        if server is None:
            server = self._servers[address] = _Server(address, self._place, self._timeout_s)
        return server

    async def _find(self, partition: int) -> _Server:
        if self._is_stale:
            await self._look()
        owner = self._owners.get(partition)
        if owner is None:
            raise StoreDown()
        return self._server(owner)

    async def _look(self) -> None:
        """Ask any server where the slots are. What was known stays where none of them answers."""
        async with self._looking:
            if not self._is_stale or time.monotonic() < self._looked_at + _LOOK_EVERY_S:
                return
            self._looked_at = time.monotonic()
            addresses = dict.fromkeys((*self._servers, *self._place.addresses))
            # Those that answered before all others.
            for server in sorted(map(self._server, addresses), key=lambda server: server.guard.is_away):
                try:
                    (slots,) = await server.ask(("CLUSTER", "SLOTS"))
                except StoreDown:
                    continue
                if isinstance(slots, exceptions.ResponseError):
                    raise StoreDown("This Redis server is not one of a cluster: the store is a redis://.") from slots
                self._owners = self._read_slots(slots, server)
                self._is_stale = False
                break
            for address in self._servers.keys() - set(self._owners.values()) - set(self._place.addresses):
                # Its guard would be told of for ever.
                await self._servers.pop(address).close()

    def _read_slots(self, slots: list[Any], asked: _Server) -> dict[int, tuple[str, int]]:
        owners: dict[int, tuple[str, int]] = {}
        for first, last, (host, port, *_), *_ in slots:
            # One that does not know its own address is the one that was asked.
            address = (host or b"").decode() or asked.address[0], int(port)
            for partition, slot in enumerate(self._slots):
                if first <= slot <= last:
                    owners[partition] = address
        return owners
