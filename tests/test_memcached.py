"""memcached as a store and as a client of it: what a cut, a silence, a cancellation or a lost item must not do."""

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.backends import Program, find_port, list_memcached, start_memcached
from tests.faults import Fault, Network
from tests.test_store import get, make_bytes, make_record, put
from uvimg.core.backend import parse_servers
from uvimg.core.errors import StoreDown, StoreFull
from uvimg.core.message import FilePart
from uvimg.core.ring import Ring
from uvimg.store import Record
from uvimg.store.memcached import CHUNK_BYTES, MemcachedStore
from uvimg.store.memcached_servers import Servers

KEYS = [b"%d" % number for number in range(5_000)]
# FAULT_SEED and FAULT_ROUNDS make other and longer forms of one of these.
FAULT_SEED = int(os.environ.get("FAULT_SEED", "4869"))
FAULT_ROUNDS = int(os.environ.get("FAULT_ROUNDS", "1"))
FAULTS: tuple[Fault, ...] = ("delay", "cut", "half open", "black hole", "away", "cut")


def test_each_server_has_its_share_of_the_keys() -> None:
    for count in (2, 3, 10):
        ring = Ring([f"host{number}:11211" for number in range(count)])
        shares = Counter(ring.find(key) for key in KEYS)
        assert len(shares) == count
        assert max(shares.values()) < 1.15 * len(KEYS) / count


def test_one_more_server_takes_its_share_and_nothing_else_moves() -> None:
    names = [f"host{number}:11211" for number in range(5)]
    before, after = Ring(names[:4]), Ring(names)
    moved = [key for key in KEYS if before.find(key) != after.find(key)]
    assert all(after.find(key) == names[4] for key in moved)
    assert 0.15 < len(moved) / len(KEYS) < 0.25


def test_the_order_of_servers_says_nothing() -> None:
    one, other = Ring(["a:1", "b:1", "c:1"]), Ring(["c:1", "a:1", "b:1"])
    assert [one.find(key) for key in KEYS[:1000]] == [other.find(key) for key in KEYS[:1000]]


@pytest.mark.parametrize(
    ("rest", "servers"),
    [
        ("//host", ["host:11211"]),
        ("//a:1,b:65535/", ["a:1", "b:65535"]),
        ("//[::1]:5,10.0.0.1", ["[::1]:5", "10.0.0.1:11211"]),
        *((bad, []) for bad in ("//", "host", "//a,,b", "//a:0", "//a:65536", "//a,a:11211", "//me:secret@a", "//a/b")),
    ],
)
def test_servers_are_read_from_a_url(rest: str, servers: list[str]) -> None:
    assert [str(server) for server in parse_servers(rest)] == servers


@pytest.fixture
def memcached(tmp_path: Path) -> Iterator[Program]:
    program = start_memcached(tmp_path)
    yield program
    program.kill()


@contextlib.asynccontextmanager
async def asking(port: int, timeout_s: float = 2) -> AsyncIterator[Servers]:
    servers = Servers(parse_servers(f"//127.0.0.1:{port}"), timeout_s)
    try:
        yield servers
    finally:
        await servers.close()


@contextlib.asynccontextmanager
async def storing(port: int, timeout_s: float = 2) -> AsyncIterator[MemcachedStore]:
    store = MemcachedStore(f"//127.0.0.1:{port}", timeout_s=timeout_s)
    try:
        yield store
    finally:
        await store.close()


async def test_cancelled_calls_never_shift_an_answer(memcached: Program) -> None:
    chance = random.Random(4869)
    values = {b"k%d" % number: make_bytes(chance.choice((10, 3000, 100_000)), number) for number in range(20)}
    async with asking(memcached.port) as servers:
        for key, value in values.items():
            await servers.set(key, value)

        async def call(key: bytes) -> None:
            match chance.randrange(4):
                case 0:
                    await servers.set(key, values[key])
                case 1:
                    value, cas = await servers.gets(key)
                    assert value == values[key]
                    assert cas is not None
                    await servers.cas(key, value, cas)
                case _:
                    assert await servers.get(key) == values[key]

        wrong: list[BaseException] = []
        cancelled = 0
        for _ in range(40):
            tasks = [asyncio.create_task(call(chance.choice(list(values)))) for _ in range(25)]
            for task in tasks:
                if chance.random() < 0.5:
                    asyncio.get_running_loop().call_later(chance.uniform(0, 0.003), task.cancel)
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, asyncio.CancelledError):
                    cancelled += 1
                elif outcome is not None:
                    wrong.append(outcome)
        assert wrong == []
        assert cancelled > 50
        assert not servers.guards[0].is_away


@contextlib.asynccontextmanager
async def pretending(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """A server that answers as `talk` does, and whose connections end with it; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


ANSWERS = {
    "nothing": b"",
    "half a line": b"STOR",
    "a cut value": b"VALUE k 0 100 7\r\nabc",
    "a value without its end": b"VALUE k 0 3 7\r\nabc\r\n",
    "the value of another key": b"VALUE other 0 3 7\r\nabc\r\nEND\r\n",
    "a value with odd bytes behind it": b"VALUE k 0 3 7\r\nabcdef\r\nEND\r\n",
    "a value of no size": b"VALUE k 0 -3 7\r\n\r\nEND\r\n",
    "what is no protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a line without an end": b"x" * 1_000_000,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_an_answer_that_is_cut_or_odd_is_told_at_once(answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        await writer.drain()

    calls: list[Callable[[Servers], Awaitable[object]]] = [
        lambda servers: servers.gets(b"k"),
        lambda servers: servers.set(b"k", b"v" * 500_000),
        lambda servers: servers.touch(b"k"),
    ]
    for call in calls:
        async with pretending(talk) as port, asking(port, 5) as servers, asyncio.timeout(4):
            with pytest.raises(StoreDown):
                await call(servers)


async def test_an_answer_of_any_length_is_not_waited_for() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"VALUE k 0 99999999999\r\n" + b"x" * 100_000)
        await reader.read()

    async with pretending(talk) as port, asking(port, 60) as servers, asyncio.timeout(5):
        with pytest.raises(StoreDown):
            await servers.get(b"k")


async def test_connections_that_were_cut_unheard_cost_one_timeout_in_all() -> None:
    silent: set[int] = set()
    opened = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        own = opened
        while await reader.readline():
            if own not in silent:
                writer.write(b"END\r\n")

    async with pretending(talk) as port, asking(port, 0.2) as servers:
        await asyncio.gather(*(servers.get(b"k") for _ in range(10)))
        assert opened == 10
        silent |= set(range(1, 11))
        with pytest.raises(StoreDown):
            await servers.get(b"k")
        for _ in range(10):
            assert await servers.get(b"k") is None
        assert servers.guards[0].failures == 1


async def test_a_silent_server_costs_its_timeout_and_then_nothing() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    loop = asyncio.get_running_loop()
    async with pretending(say_nothing) as port, storing(port, 0.1) as store:
        started = loop.time()
        for _ in range(200):
            with pytest.raises(StoreDown):
                await store.record(b"a")
        # A few probes beside the calls by which the silence was noticed.
        assert loop.time() - started < 5
        assert store.guards[0].is_away
        assert store.guards[0].refused > 150


async def test_a_restarted_server_is_used_again(memcached: Program) -> None:
    async with storing(memcached.port) as store:
        await put(store, b"a", b"before")
        memcached.kill()
        for _ in range(5):
            with pytest.raises(StoreDown):
                await store.record(b"a")
        memcached.start()
        async with asyncio.timeout(2):
            while True:
                try:
                    assert await store.record(b"a") is None
                    break
                except StoreDown:
                    await asyncio.sleep(0.01)
        await put(store, b"a", b"after")
        assert await get(store, b"after") == b"after"


async def test_waiters_get_connections_in_place_of_broken_ones(memcached: Program) -> None:
    async with asking(memcached.port) as servers:
        await servers.set(b"k", b"v" * 100_000)
        tasks = [asyncio.create_task(servers.get(b"k")) for _ in range(200)]
        await asyncio.sleep(0)
        for task in tasks[:100]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert outcomes[100:] == [b"v" * 100_000] * 100


async def drop(servers: Servers, port: int, beginning: str) -> None:
    """Have the server forget one item whose key begins so."""
    key = next(key for key in list_memcached(port) if key.startswith(beginning))
    await servers.delete(key.encode())


async def test_a_blob_that_lost_a_chunk_is_not_there_until_it_is_sent_again(memcached: Program) -> None:
    data = make_bytes(3 * CHUNK_BYTES + 1)
    async with storing(memcached.port) as store, asking(memcached.port) as servers:
        await put(store, b"a", data)
        assert await get(store, data) == data
        await drop(servers, memcached.port, "uvimg1:c:")
        assert await get(store, data) is None
        assert await store.bind([b"b"], make_record(data)) == [None]
        # The name has its record still, and that is the same one.
        assert await put(store, b"a", data, replace=False) == make_record(data)
        assert await get(store, data) == data
        await store.unbind([b"a"])
        assert list_memcached(memcached.port) == []


async def test_a_blob_whose_head_was_forgotten_is_not_there_until_it_is_sent_again(memcached: Program) -> None:
    data = make_bytes(1000)
    async with storing(memcached.port) as store, asking(memcached.port) as servers:
        await put(store, b"a", data)
        await drop(servers, memcached.port, "uvimg1:b:")
        assert await get(store, data) is None
        assert not await store.is_named(make_record(data).digest)
        await put(store, b"b", data)
        assert await get(store, data) == data
        # The first name has its record still, and counts for nothing: what was forgotten is not made up.
        assert await store.unbind([b"a"]) == [make_record(data)]
        assert await get(store, data) == data


async def test_items_of_others_are_taken_for_none_and_written_over(memcached: Program) -> None:
    data = make_bytes(1000)
    async with storing(memcached.port) as store, asking(memcached.port) as servers:
        await put(store, b"a", data)
        for key in list_memcached(memcached.port):
            await servers.set(key.encode(), b"\x00 not ours")
        assert await store.record(b"a") is None
        assert await get(store, data) is None
        assert await put(store, b"a", data, replace=False) == make_record(data)
        assert await get(store, data) == data


async def test_bytes_that_are_not_those_of_their_address_are_not_given(memcached: Program) -> None:
    async with storing(memcached.port) as store, asking(memcached.port) as servers:
        for size in (1000, 2 * CHUNK_BYTES):
            data = make_bytes(size)
            await put(store, b"a", data)
            beginning = "uvimg1:b:" if size == 1000 else "uvimg1:c:"
            key = next(key for key in list_memcached(memcached.port) if key.startswith(beginning)).encode()
            item = await servers.get(key)
            assert item is not None
            await servers.set(key, item[:500] + bytes([item[500] ^ 1]) + item[501:])
            assert await get(store, data) is None
            await store.unbind([b"a"])


async def test_two_nodes_that_bind_and_unbind_one_blob_never_lose_it(memcached: Program) -> None:
    chance = random.Random(4869)
    blobs = [make_bytes(500, 1), make_bytes(CHUNK_BYTES + 70_000, 2)]
    async with storing(memcached.port) as one, storing(memcached.port) as other:

        async def work(store: MemcachedStore, own: bytes) -> None:
            """Bind names, some of them also the other's, and look whether what was bound is there."""
            for _ in range(60):
                name, data = chance.choice((own, own, b"both")), chance.choice(blobs)
                if chance.random() < 0.6:
                    await put(store, name, data)
                else:
                    await store.unbind([name])
                record = await store.record(own)
                if record is not None:
                    assert await get(store, next(blob for blob in blobs if make_record(blob) == record)) is not None

        await asyncio.gather(work(one, b"one"), work(other, b"other"), work(one, b"third"), work(other, b"fourth"))
        for name in (b"one", b"other", b"third", b"fourth", b"both"):
            record = await one.record(name)
            assert record is None or await other.get(record.digest) is not None
        await one.unbind([b"one", b"other", b"third", b"fourth", b"both"])
        assert list_memcached(memcached.port) == []


async def test_a_name_that_points_elsewhere_by_now_is_not_taken_away(memcached: Program) -> None:
    old, new = make_bytes(100, 1), make_bytes(100, 2)
    async with storing(memcached.port) as one, storing(memcached.port) as other:
        await put(one, b"kept", new)
        for _ in range(100):
            await put(one, b"a", old)
            await asyncio.gather(one.unbind([b"a"], make_record(old).digest), other.bind([b"a"], make_record(new)))
            assert await one.record(b"a") == make_record(new)


async def test_what_was_begun_is_done_to_its_end_when_nobody_waits_any_more(memcached: Program) -> None:
    data = make_bytes(3 * CHUNK_BYTES)
    async with storing(memcached.port) as store:
        for looks in range(30):
            async with store.incoming() as incoming:
                await incoming.write(data)
                await incoming.finish()
                binding = asyncio.create_task(store.bind([b"x", b"y"], make_record(data), incoming))
                for _ in range(looks):
                    await asyncio.sleep(0)
                binding.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await binding
            names = [await store.record(name) is not None for name in (b"x", b"y")]
            # One that was not begun leaves nothing.
            assert names == [looks > 0] * 2
            await store.unbind([b"x", b"y"])
            assert list_memcached(memcached.port) == []


async def test_two_nodes_count_every_increment(memcached: Program) -> None:
    async with storing(memcached.port) as one, storing(memcached.port) as other:

        async def increment(store: MemcachedStore) -> None:
            await store.change([b"n"], lambda _, old: make_record(b"n", b"%d" % (1 + int(old.facts if old else 0))))

        await put(one, b"n", b"n", facts=b"0")
        await asyncio.gather(*(increment(store) for store in (one, other) for _ in range(40)))
        record = await one.record(b"n")
        assert record is not None
        assert record.facts == b"80"


async def test_faults_on_the_way_lose_nothing_that_was_acknowledged_and_give_no_wrong_byte(memcached: Program) -> None:
    chance = random.Random(FAULT_SEED)
    timeout_s = 0.15
    loop = asyncio.get_running_loop()
    # What a name may point at: what was acknowledged last, and what was tried since and may have come about.
    possible: dict[bytes, list[bytes | None]] = {b"n%d" % number: [None] for number in range(6)}
    longest_s = 0.0
    done = Counter[str]()

    async def work(store: MemcachedStore, name: bytes, rounds: int) -> None:
        nonlocal longest_s
        for _ in range(rounds):
            data = make_bytes(chance.choice((100, 3000, CHUNK_BYTES + 1)), chance.randrange(5))
            started = loop.time()
            try:
                match chance.randrange(4):
                    case 0:
                        # A write that was given up may still be on its way to where there is no name.
                        possible[name].append(None)
                        await store.unbind([name])
                        possible[name] = [None, *possible[name][1:]]
                    case 1:
                        possible[name].append(data)
                        assert await put(store, name, data) == make_record(data)
                        possible[name] = [data]
                    case _:
                        record = await store.record(name)
                        assert record in [value and make_record(value) for value in possible[name]]
                        if record is not None:
                            found = await get_whole(store, record)
                            assert found in possible[name]
                done["well"] += 1
            except StoreDown:
                done["away"] += 1
                await asyncio.sleep(0.005)
            longest_s = max(longest_s, loop.time() - started)

    with Network(memcached.port) as network:
        async with storing(network.port, timeout_s) as store:
            for fault in FAULTS * FAULT_ROUNDS:
                network.delay_s, network.cut_after = timeout_s / 10, chance.choice((3, 300, 30_000))
                network.fault = fault
                await asyncio.gather(*(work(store, name, 12) for name in possible))
                network.fault = ""
                async with asyncio.timeout(2):
                    while True:
                        with contextlib.suppress(StoreDown):
                            await store.record(b"any")
                            break
                        await asyncio.sleep(0.01)
            await asyncio.gather(*(work(store, name, 12) for name in possible))
            for name, values in possible.items():
                record = await store.record(name)
                assert record in [value and make_record(value) for value in values]
                assert record is None or await get_whole(store, record) in values
    assert done["well"] > 100
    assert done["away"] > 50
    # Some calls in a row, each of which is bounded; most of that is the machine's.
    assert longest_s < 30 * timeout_s


async def get_whole(store: MemcachedStore, record: Record) -> bytes | None:
    """A blob that has a name, and so is there, whatever was tried with its other names."""
    content = await store.get(record.digest)
    if isinstance(content, FilePart):
        with contextlib.closing(content):
            return content.file.read(content.size)
    assert content is not None
    return content


async def test_a_server_that_has_no_room_says_so_and_is_not_away(tmp_path: Path) -> None:
    program = start_memcached(tmp_path, "-M", "-m", "8")
    try:
        async with storing(program.port) as store:
            with pytest.raises(StoreFull):
                for number in range(40):
                    await put(store, b"%d" % number, make_bytes(CHUNK_BYTES * 2, number))
            assert not store.guards[0].is_away
            assert await store.record(b"0") is not None
    finally:
        program.kill()


async def test_one_of_several_servers_being_away_costs_its_own_names_alone(tmp_path: Path, memcached: Program) -> None:
    store = MemcachedStore(f"//127.0.0.1:{memcached.port},127.0.0.1:{find_port()}", timeout_s=2)
    outcomes = Counter[str]()
    for number in range(60):
        try:
            await store.record(b"%d" % number)
            outcomes["answered"] += 1
        except StoreDown:
            outcomes["away"] += 1
    await store.close()
    assert outcomes["answered"] > 10
    assert outcomes["away"] > 10
    assert [guard.is_away for guard in store.guards] == [False, True]


async def test_an_expired_record_goes_by_itself_and_one_of_far_away_stays(memcached: Program) -> None:
    async with storing(memcached.port) as store:
        for name, expires_s in ((b"past", 100), (b"far", 1 << 40)):
            await store.change([name], lambda _, old, at=expires_s: _make_until(at))  # type: ignore[misc]
        assert await store.record(b"far") == _make_until(1 << 40)
        async with asyncio.timeout(5):
            while await store.record(b"past") is not None:
                await asyncio.sleep(0.05)


def _make_until(expires_s: int) -> Record:
    return Record(make_record(b"").digest, 0, "text/plain", 1_800_000_000, expires_s=expires_s, inline=b"")
