"""The cache's makers: one for equal requests, whatever becomes of it and of those who wait."""

import asyncio
import gc
import random
import weakref
from collections.abc import Iterator

import pytest

from uvimg.cache import Cache
from uvimg.core.errors import PreconditionFailed, UvimgError


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nobody looks for cycles, as in a server for a long while."""
    gc.disable()
    yield
    gc.enable()


async def test_an_error_goes_to_all_who_wait_and_stays_with_nobody(no_collector: None) -> None:
    cache: Cache[str, bytes] = Cache(1000, len)

    async def fail() -> bytes:
        await asyncio.sleep(0)
        raise PreconditionFailed()

    waiting = [asyncio.create_task(cache.get("key", fail)) for _ in range(3)]
    errors = [weakref.ref(error) for error in await asyncio.gather(*waiting, return_exceptions=True)]
    assert all(isinstance(error(), PreconditionFailed) for error in errors)
    del waiting
    await asyncio.sleep(0)
    assert [error() for error in errors] == [None] * 3


async def test_whatever_clients_and_makers_do_nobody_waits_for_ever_and_no_error_is_lost() -> None:
    lost: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    cache: Cache[int, bytes] = Cache(1000, len)
    chance = random.Random(2)

    async def make() -> bytes:
        for _ in range(chance.randint(0, 4)):
            await asyncio.sleep(0)
        fate = chance.random()
        if fate < 0.3:
            raise UvimgError("x")
        if fate < 0.4:
            raise asyncio.CancelledError
        return b"v" * chance.randint(1, 300)

    for _ in range(200):
        clients = [asyncio.create_task(cache.get(chance.randint(0, 5), make)) for _ in range(10)]
        for client in clients:
            if chance.random() < 0.5:
                await asyncio.sleep(0)
                client.cancel()
        await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), 10)
        cache.forget(lambda _: True)
    gc.collect()
    await asyncio.sleep(0)
    assert lost == []
    assert len(asyncio.all_tasks()) == 1
