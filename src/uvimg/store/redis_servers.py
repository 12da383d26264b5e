"""Redis servers, and what is asked of them: a command and its answer, or several in one go.

redis-py connects (authentication, TLS, the database) and hiredis reads; the connections are kept here. What is short
goes over one line, where those who ask at the same time share a write and a read: the system's part of these costs
more than all the rest. What is long has a connection of its own meanwhile, so that nobody waits behind it.
An answer belongs to whoever asked: one who has gone is read for and not told, and a connection on which anything else
went wrong is closed, so nobody ever reads another's.
Rule: nothing is asked twice after a failure, but for what a cluster itself sends elsewhere.
"""

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import hiredis
from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from uvimg.core.errors import Overloaded, StoreDown, StoreFull, UvimgError
from uvimg.core.redis import RedisPlace
from uvimg.store.guard import Guard

Command = tuple[bytes | str | int, ...]

# For what is long. More at once would only wait in the server: it carries out one command after the other.
_MOST_CONNECTIONS = 16
# A longer command does not go over the line that all share.
_SHORT_BYTES = 16_384
# What a cluster may send elsewhere, or ask to be asked again in a moment, before that counts as no answer.
_MOST_REDIRECTIONS = 8
_MOMENT_S = 0.02
# How many of a cluster's servers are asked where its slots are, the first answer being enough; and how often.
_ASKED_AT_ONCE = 3
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

    async def ask(self, partition: int, *command: bytes | str | int, is_long: bool = False) -> Any:
        """`is_long` tells of an answer that may be."""

    async def ask_all(self, commands: Sequence[tuple[int, Command]]) -> list[Any]:
        """Several answers, in one go from each server."""

    async def close(self) -> None: ...


def open_servers(place: RedisPlace, timeout_s: float, role: str = "redis") -> Servers:
    """`role` is what people call each of them."""
    return _Cluster(place, timeout_s, role) if place.is_cluster else _One(place, timeout_s, role)


async def run_script(
    servers: Servers, partition: int, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]
) -> Any:
    """What a script says; a server that has not seen it yet is told all of it."""
    try:
        return await servers.ask(partition, "EVALSHA", script.sha1, len(keys), *keys, *arguments)
    except _NoScript:
        return await servers.ask(partition, "EVAL", script.text, len(keys), *keys, *arguments)


class _Silent(Exception):
    """The server has not answered."""


class _NoScript(UvimgError):
    """The server has not seen this script."""


class _Server:
    """One server's connections, behind a guard."""

    def __init__(self, address: tuple[str, int], place: RedisPlace, timeout_s: float, role: str) -> None:
        self.address = address
        self.guard = Guard(f"{role} {address[0]}:{address[1]}", _translate, timeout_s)
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
        self._timeout_s = timeout_s
        self._idle: list[aioredis.Connection] = []
        self._turns = asyncio.Semaphore(_MOST_CONNECTIONS)
        self._line: _Line | None = None

    async def ask(self, *commands: Command, is_long: bool = False) -> list[Any]:
        """The answers; those that are errors of these very commands are among them, as exceptions."""
        packed = b"".join([hiredis.pack_command(command) for command in commands])  # type: ignore[arg-type]
        if is_long or len(packed) > _SHORT_BYTES:
            return await self._exchange(packed, len(commands))
        return await self._share(packed, len(commands))

    async def _exchange(self, packed: bytes, count: int) -> list[Any]:
        """Ask over a connection of one's own."""

        async def call() -> list[Any]:
            connection = self._idle.pop() if self._idle else self._make(**self._options)
            try:
                await _prepare(connection)
                await connection.send_packed_command(packed, check_health=False)
                answers = [await _read(connection) for _ in range(count)]
            except BaseException:
                await _cut(connection)
                raise
            self._idle.append(connection)
            return _check_able(answers)

        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turns.acquire()
        except TimeoutError as exc:
            raise Overloaded() from exc
        try:
            return await self.guard.run(call)
        except StoreDown:
            # Those who are being answered on the line need not suffer by it.
            if self._line is not None and self._line.is_idle:
                self._line.cut()
            await self._cut_idle()
            raise
        finally:
            self._turns.release()

    async def _share(self, packed: bytes, count: int) -> list[Any]:
        """Ask over the line that all share."""
        line: _Line | None = None

        async def call() -> list[Any]:
            nonlocal line
            if self._line is None or self._line.is_cut:
                self._line = _Line(self._make(**self._options))
            line = self._line
            return _check_able(await line.ask(packed, count))

        try:
            return await self.guard.run(call)
        except StoreDown:
            if line is not None:
                # Only that one: others may have opened another meanwhile, which is well.
                line.cut()
                await self._cut_idle()
            raise

    async def _cut_idle(self) -> None:
        """Let go of connections that have lost their other end too where one has."""
        while self._idle:
            await _cut(self._idle.pop())

    async def close(self) -> None:
        if self._line is not None:
            self._line.cut()
        await self._cut_idle()


class _Line:
    """A connection for all who ask: what is asked while others are answered goes out in one go. Cut by any failure."""

    def __init__(self, connection: aioredis.Connection) -> None:
        self.is_cut = False
        self._connection = connection
        self._asked: list[_Asked] = []
        self._woken: asyncio.Future[None] | None = None
        self._task = asyncio.create_task(self._run())

    def ask(self, packed: bytes, count: int) -> "asyncio.Future[list[Any]]":
        """The answers to so many commands. Who has gone before they come is not told."""
        assert not self.is_cut
        answers: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._asked.append(_Asked(packed, count, answers))
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
        return answers

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return self._woken is not None and not self._woken.done()

    def cut(self) -> None:
        if not self.is_cut:
            self._fail([], "another call was not answered")
            self._task.cancel()

    async def _run(self) -> None:
        out: list[_Asked] = []
        try:
            while True:
                if not self._asked:
                    self._woken = asyncio.get_running_loop().create_future()
                    await self._woken
                out, self._asked = [asked for asked in self._asked if not asked.answers.done()], []
                if out:
                    await _prepare(self._connection)
                    packed = b"".join([asked.packed for asked in out])
                    await self._connection.send_packed_command(packed, check_health=False)
                for asked in out:
                    answers = [await _read(self._connection) for _ in range(asked.count)]
                    if not asked.answers.done():
                        asked.answers.set_result(answers)
        except Exception as exc:
            self._fail(out, f"{type(exc).__name__}: {exc}")
        finally:
            self._fail(out, "another call was not answered")
            await _cut(self._connection)

    def _fail(self, out: "list[_Asked]", reason: str) -> None:
        self.is_cut = True
        for asked in (*out, *self._asked):
            if not asked.answers.done():
                asked.answers.set_exception(exceptions.ConnectionError(reason))


@dataclass(frozen=True, slots=True)
class _Asked:
    """Commands that go over the line together, and what becomes of them."""

    packed: bytes
    count: int
    answers: "asyncio.Future[list[Any]]"


async def _prepare(connection: aioredis.Connection) -> None:
    """Have it connected: perhaps again, where the other end has gone since."""
    if connection.is_connected and await connection.can_read():
        await _cut(connection)
    if not connection.is_connected:
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except exceptions.ResponseError as exc:
            # A server that knows no AUTH repeats what it was told, and logs are read by many.
            said = str(exc).partition(", with args")[0]
            raise exceptions.ConnectionError(f"it lets nobody in: {said}") from None


async def _cut(connection: aioredis.Connection) -> None:
    """End it at once: bytes that nobody takes would keep it open until somebody does."""
    writer = connection._writer
    if writer is not None:
        writer.transport.abort()
    await connection.disconnect(nowait=True)


def _check_able(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, exceptions.ResponseError) and _is_unable(answer):
            raise answer
    return answers


async def _read(connection: aioredis.Connection) -> Any:
    try:
        return await connection.read_response()
    except exceptions.ResponseError as exc:
        return exc


def _is_unable(answer: exceptions.ResponseError) -> bool:
    text = str(answer)
    # Before Redis 7 a script tells in its own words what a command in it was told.
    return isinstance(answer, _UNABLE) or text.startswith(_UNABLE_WORDS) or " -READONLY " in text


def _translate(exc: Exception) -> UvimgError | None:
    """Our error for one of the connection's, or of a server that cannot serve."""
    # What cannot be read is a ValueError: it comes from no Redis, or from one that has lost its way.
    if isinstance(exc, exceptions.RedisError | exceptions.RedisClusterException | OSError | ValueError):
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

    def __init__(self, place: RedisPlace, timeout_s: float, role: str) -> None:
        self._server = _Server(place.addresses[0], place, timeout_s, role)
        self.guards = (self._server.guard,)

    async def ask(self, partition: int, *command: bytes | str | int, is_long: bool = False) -> Any:
        (answer,) = await self._server.ask(command, is_long=is_long)
        return _check(answer)

    async def ask_all(self, commands: Sequence[tuple[int, Command]]) -> list[Any]:
        if not commands:
            return []
        return [
            _check(answer) for answer in await self._server.ask(*(command for _, command in commands), is_long=True)
        ]

    async def close(self) -> None:
        await self._server.close()


class _Cluster:
    """A Redis Cluster: each partition is one server's, and may become another's at any time.

    redis-py's own client for that closes everybody's connections when one server is away, and has one clock for all
    of them; here each server has a guard of its own, and nobody waits for one who asks another.
    """

    def __init__(self, place: RedisPlace, timeout_s: float, role: str) -> None:
        self._place, self._timeout_s, self._role = place, timeout_s, role
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

    async def ask(self, partition: int, *command: bytes | str | int, is_long: bool = False) -> Any:
        server = await self._find(partition)
        before: tuple[Command, ...] = ()
        for step in range(_MOST_REDIRECTIONS):
            try:
                answer = (await server.ask(*before, command, is_long=is_long))[-1]
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
                found = await self._server(address).ask(*(commands[index][1] for index in indices), is_long=True)
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
            server = self._servers[address] = _Server(address, self._place, self._timeout_s, self._role)
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
            addresses = dict.fromkeys((*self._servers, *self._place.addresses))
            servers = [self._server(address) for address in addresses]
            found = None
            # Those that are away are left alone while others answer: one who asks them is enough.
            for is_away in (False, True):
                some = [server for server in servers if server.guard.is_away == is_away]
                for start in range(0, len(some), _ASKED_AT_ONCE):
                    found = found or await self._ask_first(some[start : start + _ASKED_AT_ONCE])
            # Whoever has waited for this need not look once more; one who has gone in the middle has not looked.
            self._looked_at = time.monotonic()
            if found is not None:
                self._owners, self._is_stale = found, False
            for address in self._servers.keys() - set(self._owners.values()) - set(self._place.addresses):
                # Its guard would be told of for ever.
                await self._servers.pop(address).close()

    async def _ask_first(self, servers: Sequence[_Server]) -> dict[int, tuple[str, int]] | None:
        """Where the slots are, by the first of these that answers: one that is silent holds nobody up."""
        looks = [asyncio.create_task(self._ask_slots(server)) for server in servers]
        try:
            for look in asyncio.as_completed(looks):
                with contextlib.suppress(_Silent):
                    return await look
            return None
        finally:
            for each in looks:
                each.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def _ask_slots(self, server: _Server) -> dict[int, tuple[str, int]]:
        try:
            (slots,) = await server.ask(("CLUSTER", "SLOTS"))
        except StoreDown as exc:
            raise _Silent from exc
        if isinstance(slots, exceptions.ResponseError):
            raise StoreDown("This Redis server is not one of a cluster: the store is a redis://.") from slots
        return self._read_slots(slots, server)

    def _read_slots(self, slots: list[Any], asked: _Server) -> dict[int, tuple[str, int]]:
        owners: dict[int, tuple[str, int]] = {}
        for first, last, (host, port, *_), *_ in slots:
            # One that does not know its own address is the one that was asked.
            address = (host or b"").decode() or asked.address[0], int(port)
            for partition, slot in enumerate(self._slots):
                if first <= slot <= last:
                    owners[partition] = address
        return owners
