"""Values where requests alone would rarely meet: what waits, what fails in between, what is held in memory."""

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from uvimg.apps.keyvalue import KeyValue, KeyValueSettings
from uvimg.apps.values import UNTYPED, Values, receive_bytes
from uvimg.coders import Coders
from uvimg.core.access import parse_rules
from uvimg.core.address import Digest
from uvimg.core.errors import LogicalError, Overloaded, TooLarge, UvimgError
from uvimg.core.message import Pieces, Request, Response
from uvimg.store import Record
from uvimg.store.local import LocalStore
from uvimg.store.memory import MemoryStore

NAME = b"kv/db/key"
START_S = 1_800_000_000


async def pieces_of(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_a_change_that_waited_for_its_turn_sees_no_value_that_expired_meanwhile(tmp_path: Path) -> None:
    now_s = START_S
    store = LocalStore(f"{tmp_path}/data", durability="os")
    values = Values(store, 1 << 20, lambda: now_s)
    await values.write(NAME, receive_bytes(b"old"), UNTYPED, START_S + 5, lambda old: None)
    held, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold_up(_: bytes, old: Record | None) -> Record | None:
        loop.call_soon_threadsafe(held.set)
        go_on.wait(10)
        return old

    def need_one(old: Record | None) -> None:
        if old is None:
            raise LogicalError

    before = asyncio.create_task(store.change([b"kv/db/other"], hold_up))
    await held.wait()
    waiting = asyncio.create_task(values.write(NAME, receive_bytes(b"new"), UNTYPED, None, need_one))
    await asyncio.sleep(0)
    now_s += 5
    go_on.set()
    await before
    with pytest.raises(LogicalError):
        await waiting
    assert await values.record(NAME) is None
    await store.close()


class Blinking(MemoryStore):
    """Does not find a blob so often, as if it had been deleted and stored again between two looks."""

    missed = 0

    async def get(self, digest: Digest) -> bytes | None:
        self.missed -= 1
        return await super().get(digest) if self.missed < 0 else None


async def test_a_value_that_is_deleted_and_stored_again_meanwhile_is_found() -> None:
    store = Blinking()
    values = Values(store, 1 << 20, lambda: START_S)
    async with values.receive(pieces_of(bytes(5000))) as received:
        await values.write(NAME, received, UNTYPED, None, lambda old: None)
    store.missed = 1
    found = await values.read(NAME)
    assert found is not None
    assert found[1] == bytes(5000)
    store.missed = 1000
    with pytest.raises(UvimgError, match="missing"):
        await values.read(NAME)


async def test_an_append_does_not_outgrow_the_largest_value() -> None:
    values = Values(MemoryStore(), 10, lambda: START_S)
    await values.append(NAME, b"12345", None)
    await values.append(NAME, b"67890", None)
    with pytest.raises(TooLarge):
        await values.append(NAME, b"1", None)
    record = await values.record(NAME)
    assert record is not None
    assert record.inline == b"1234567890"


async def test_what_answers_hold_in_memory_counts_until_they_have_gone() -> None:
    """Each of these asks for 100,000 keys in 800 KB, and is read by nobody."""
    everybody = parse_rules("allow all")
    app = KeyValue(
        KeyValueSettings("olegdb", 8 << 20, everybody, everybody, ()), MemoryStore(), Coders(64 << 20), lambda: START_S
    )
    async with app.values.receive(pieces_of(bytes(2_000_000))) as received:
        await app.values.write(b"kv/default/00000", received, UNTYPED, None, lambda old: None)
    body = b"".join(b"%05d\n" % number for number in range(99_000))
    bulk = b"".join(b"_%05d\t\n" % number for number in range(99_000))

    async def ask(target: str, body: bytes) -> Response:
        return await app.handle(Request("POST", target, target, "", {}, "127.0.0.1", len(body), pieces_of(body)))

    for target, asked in (("/_bulk_unjar", body), ("/rpc/get_bulk", bulk)):
        answers: list[Response] = []
        with contextlib.suppress(Overloaded):
            while len(answers) < 20:
                answers.append(await ask(target, asked))
        assert 1 < len(answers) < 20
        assert all(isinstance(answer.body, Pieces) for answer in answers)
        for answer in answers:
            answer.release()
            answer.release()
        assert (await ask(target, asked)).status == 200


async def test_a_blob_that_loses_its_name_in_a_failing_commit_keeps_its_bytes(tmp_path: Path) -> None:
    store = LocalStore(f"{tmp_path}/data")
    data = bytes(100_000)
    digest = hashlib.sha256(data).digest()
    async with store.incoming() as incoming:
        await incoming.write(data)
        await incoming.finish()
        await store.bind([b"name"], Record(digest, len(data), UNTYPED, START_S), incoming)

    def fail(*_: object) -> None:
        raise OSError("the disk fails")

    def unbind(txn: object, batch: object) -> object:
        return store._unbind(txn, batch, b"name", None)  # type: ignore[arg-type]

    # What a writer finds waiting together: a removal, a look at the blob that was asked for earlier, and the end.
    await asyncio.to_thread(
        store._writer._commit, [(unbind, None), (store._unused_remover(digest), None), (fail, None)]
    )
    assert await store.record(b"name") is not None
    content = await store.get(digest)
    assert content is not None
    assert not isinstance(content, bytes)
    content.close()
    await store.close()


async def test_what_is_prolonged_again_and_again_takes_no_memory_in_memory() -> None:
    store = MemoryStore()
    values = Values(store, 1 << 20, lambda: START_S)
    for number in range(5000):
        await values.write(NAME, receive_bytes(b"session"), UNTYPED, START_S + 100 + number, lambda old: None)
    assert len(store._due) < 1100
    assert await values.count(b"db") == 1
    assert await store.sweep(START_S + 5099) == 1
