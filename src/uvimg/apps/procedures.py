"""Kyoto Tycoon's procedures (POST /rpc/<procedure>) on the values that its and OlegDB's paths show.

A procedure that changes a value does so at once, whoever else does it at the same time. Results are put together in
memory where they are small; where a value is a file, or they are many, they are made while they are sent.
"""

import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from uvimg import __version__
from uvimg.apps.values import INLINE_BYTES, UNTYPED, Values, read_pieces, receive_bytes
from uvimg.core.errors import BadRequest, LogicalError, NotImplementedHere, TooLarge
from uvimg.core.keyvalue import Dialect, name_record
from uvimg.core.kyoto import (
    PROCEDURES,
    Arguments,
    choose_coding,
    decode_fields,
    encode_fields,
    name_type,
    pack_decimal,
    pack_whole,
    read_coding,
    show_decimal,
    unpack_decimal,
    unpack_whole,
)
from uvimg.core.message import Content, Pieces, Response
from uvimg.store import Record

# Of a bulk in one transaction, which keeps all other writes waiting.
_STEP = 1000
_MOST_AT_ONCE = 10_000
_GATHER_BYTES = 1 << 20

_NO_RECORD = "DB: 7: no record: no record"
_DUPLICATE = "DB: 6: record duplication: record duplication"
_INCONSISTENT = "DB: 8: logical inconsistency: logical inconsistency"

# A result's name and its value, or how to come by it when its turn has come.
_Result = tuple[bytes, Content]


class Procedures:
    """`call` is the door."""

    def __init__(self, values: Values, dialect: Dialect) -> None:
        self._values, self._dialect = values, dialect
        self._started = time.monotonic()

    async def call(self, procedure: str, body: bytes, content_type: str) -> Response:
        """BadRequest and LogicalError for what cannot be done, NotImplementedHere for what is not there."""
        if procedure not in PROCEDURES:
            raise NotImplementedHere("There is no such procedure.")
        fields = decode_fields(body, read_coding(content_type))
        if procedure == "echo":
            return _answer(fields)
        do: Callable[[Arguments], Awaitable[Response]] = getattr(self, f"_{procedure}")
        return await do(Arguments(fields))

    # The server

    async def _void(self, _: Arguments) -> Response:
        return _answer()

    async def _report(self, _: Arguments) -> Response:
        told = {
            "version": f"uvimg {__version__}",
            "dialect": self._dialect,
            "uptime": str(int(time.monotonic() - self._started)),
            "db_total_count": str(sum((await self._values.databases()).values())),
        }
        return _answer((name.encode(), value.encode()) for name, value in told.items())

    async def _status(self, arguments: Arguments) -> Response:
        return _answer([(b"count", b"%d" % await self._values.count(arguments.database))])

    async def _vacuum(self, _: Arguments) -> Response:
        await self._values.sweep()
        return _answer()

    async def _synchronize(self, _: Arguments) -> Response:
        await self._values.store.sync()
        return _answer()

    async def _clear(self, arguments: Arguments) -> Response:
        await self._values.clear(arguments.database)
        return _answer()

    # One value

    async def _set(self, arguments: Arguments) -> Response:
        return await self._write(arguments, lambda old: None)

    async def _add(self, arguments: Arguments) -> Response:
        return await self._write(arguments, _need_none)

    async def _replace(self, arguments: Arguments) -> Response:
        return await self._write(arguments, _need_one)

    async def _write(self, arguments: Arguments, allow: Callable[[Record | None], None]) -> Response:
        name, expires_s = _name(arguments), arguments.find_expiry(self._values.now_s())
        async with self._values.receive(_one(arguments.take("value"))) as received:
            await self._values.write(name, received, UNTYPED, expires_s, allow)
        return _answer()

    async def _append(self, arguments: Arguments) -> Response:
        expires_s = arguments.find_expiry(self._values.now_s())
        await self._values.append(_name(arguments), arguments.take("value"), expires_s)
        return _answer()

    async def _increment(self, arguments: Arguments) -> Response:
        step, origin = arguments.take_whole("num"), arguments.find_origin(decimal=False)
        new = await self._count(arguments, step, origin, unpack_whole, pack_whole)
        return _answer([(b"num", b"%d" % new)])

    async def _increment_double(self, arguments: Arguments) -> Response:
        step, origin = arguments.take_decimal("num"), arguments.find_origin(decimal=True)
        new = await self._count(arguments, step, origin, unpack_decimal, pack_decimal)
        return _answer([(b"num", show_decimal(new))])

    async def _count(
        self,
        arguments: Arguments,
        step: int,
        origin: int | str,
        unpack: Callable[[bytes], int],
        pack: Callable[[int], bytes],
    ) -> int:
        """Add to a number; the sum."""

        # Not read from what is there afterwards: a time that has come already leaves nothing.
        total = step

        def add(old: Record | None) -> tuple[bytes, str]:
            nonlocal total
            if old is None and origin == "try":
                raise LogicalError(_NO_RECORD)
            if old is not None:
                total = unpack(old.inline or b"") + step
            else:
                total = step if isinstance(origin, str) else origin + step
            return pack(total), UNTYPED if old is None else old.type

        expires_s = arguments.find_expiry(self._values.now_s())
        await self._values.compute(_name(arguments), add, expires_s)
        return total

    async def _cas(self, arguments: Arguments) -> Response:
        name, expires_s = _name(arguments), arguments.find_expiry(self._values.now_s())
        wanted, value = arguments.find("oval"), arguments.find("nval")
        digest = None if wanted is None else receive_bytes(wanted).digest

        def expect(old: Record | None) -> None:
            if (None if old is None else old.digest) != digest:
                raise LogicalError(_INCONSISTENT)

        if value is None:
            await self._values.remove(name, expect)
        else:
            async with self._values.receive(_one(value)) as received:
                await self._values.write(name, received, UNTYPED, expires_s, expect)
        return _answer()

    async def _remove(self, arguments: Arguments) -> Response:
        await self._values.remove(_name(arguments), _need_one)
        return _answer()

    async def _get(self, arguments: Arguments) -> Response:
        found = await self._values.read(_name(arguments))
        if found is None:
            raise LogicalError(_NO_RECORD)
        return await _answer_records(_one((b"value", found[1])), _tell_expiry(found[0]))

    async def _seize(self, arguments: Arguments) -> Response:
        found = await self._values.seize(_name(arguments))
        if found is None:
            raise LogicalError(_NO_RECORD)
        return await _answer_records(_one((b"value", found[1])), _tell_expiry(found[0]))

    async def _check(self, arguments: Arguments) -> Response:
        record = await self._values.record(_name(arguments))
        if record is None:
            raise LogicalError(_NO_RECORD)
        return _answer([(b"vsiz", b"%d" % record.size), *_tell_expiry(record)])

    # Many

    async def _set_bulk(self, arguments: Arguments) -> Response:
        database, values = arguments.database, arguments.bulk
        for key, value in values.items():
            name_record(database, key)
            if len(value) > self._values.max_bytes:
                raise TooLarge(f"A value has at most {self._values.max_bytes} bytes.")
        at_once = arguments.find("atomic") is not None
        if at_once and (len(values) > _MOST_AT_ONCE or any(len(value) > INLINE_BYTES for value in values.values())):
            raise BadRequest(f"At once go {_MOST_AT_ONCE} records at most, of {INLINE_BYTES} bytes each.")
        expires_s = arguments.find_expiry(self._values.now_s())
        small = [(key, value) for key, value in values.items() if len(value) <= INLINE_BYTES]
        step = max(1, len(small)) if at_once else _STEP
        for start in range(0, len(small), step):
            await self._values.write_all(database, dict(small[start : start + step]), expires_s)
        for key, value in values.items():
            if len(value) > INLINE_BYTES:
                async with self._values.receive(_one(value)) as received:
                    await self._values.write(name_record(database, key), received, UNTYPED, expires_s, lambda old: None)
        return _answer([(b"num", b"%d" % len(values))])

    async def _remove_bulk(self, arguments: Arguments) -> Response:
        names = [name_record(arguments.database, key) for key in arguments.bulk]
        at_once = arguments.find("atomic") is not None
        if at_once and len(names) > _MOST_AT_ONCE:
            raise BadRequest(f"At once go {_MOST_AT_ONCE} records at most.")
        step = max(1, len(names)) if at_once else _STEP
        removed = 0
        for start in range(0, len(names), step):
            removed += await self._values.remove_all(names[start : start + step])
        return _answer([(b"num", b"%d" % removed)])

    async def _get_bulk(self, arguments: Arguments) -> Response:
        database, keys = arguments.database, list(arguments.bulk)
        names = [name_record(database, key) for key in keys]

        async def results() -> AsyncIterator[_Result]:
            for key, name in zip(keys, names, strict=True):
                found = await self._values.read(name)
                if found is not None:
                    yield b"_" + key, found[1]

        return await _answer_records(results(), counted=True)

    async def _match_prefix(self, arguments: Arguments) -> Response:
        database, prefix, most = arguments.database, arguments.take("prefix"), arguments.find_whole("max")

        async def results() -> AsyncIterator[_Result]:
            left = -1 if most is None else most
            if not left:
                return
            number = 0
            async for key, _ in self._values.live(database, prefix):
                yield b"_" + key, b"%d" % number
                number += 1
                if number == left:
                    return

        return await _answer_records(results(), counted=True)


def _name(arguments: Arguments) -> bytes:
    return name_record(arguments.database, arguments.take_key())


def _need_none(old: Record | None) -> None:
    if old is not None:
        raise LogicalError(_DUPLICATE)


def _need_one(old: Record | None) -> None:
    if old is None:
        raise LogicalError(_NO_RECORD)


def _tell_expiry(record: Record) -> list[tuple[bytes, bytes]]:
    return [(b"xt", b"%d" % record.expires_s)] if record.expires_s else []


_T = TypeVar("_T")


async def _one(item: _T) -> AsyncIterator[_T]:
    yield item


# Telling


def _answer(fields: Iterable[tuple[bytes, bytes]] = ()) -> Response:
    fields = list(fields)
    coding = choose_coding(fields)
    return Response(200, {"Content-Type": name_type(coding)}, encode_fields(fields, coding))


async def _answer_records(
    results: AsyncIterator[_Result], more: Iterable[tuple[bytes, bytes]] = (), *, counted: bool = False
) -> Response:
    """Records and, `counted`, how many they are behind them, since nobody knows before."""
    held: list[tuple[bytes, bytes]] = []
    size, count = 0, 0
    waiting: _Result | None = None
    async for name, content in results:
        count += 1
        if not isinstance(content, bytes) or size + len(content) > _GATHER_BYTES:
            waiting = name, content
            break
        held.append((name, content))
        size += len(name) + len(content)
    if waiting is None:
        return _answer([*held, *more, *([(b"num", b"%d" % count)] if counted else [])])

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal count
        yield encode_fields(held, "B")
        held.clear()
        result: _Result | None = waiting
        while result is not None:
            name, content = result
            yield base64.b64encode(name) + b"\t"
            async for piece in read_pieces(content):
                yield base64.b64encode(piece)
            yield b"\n"
            result = await anext(results, None)
            count += result is not None
        last = [*more, *([(b"num", b"%d" % count)] if counted else [])]
        yield encode_fields(last, "B")

    return Response(200, {"Content-Type": name_type("B")}, Pieces(pieces()))
