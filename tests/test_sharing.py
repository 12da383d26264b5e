"""A cache of renditions that nodes share: who looks there, what counts of it, and that its absence fails nobody."""

import asyncio
import contextlib
import hashlib
import hmac
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.backends import Program, start_memcached, start_redis
from tests.conftest import Server, make_photo
from tests.test_intermediates import names
from tests.test_metrics import parse_metrics, value
from tests.test_store import make_bytes, make_record, put
from uvimg.config import ConfigError, load
from uvimg.core.address import image_name, rendition_name, value_name
from uvimg.core.coding import coding_name
from uvimg.core.sharing import may_be_shared
from uvimg.store import Record, Streams, find_look, open_store
from uvimg.store.memory import MemoryStore
from uvimg.store.sharing import MAX_SHARED_BYTES, SharedCache, SharingStore, open_cache

ORIGINAL = hashlib.sha256(b"original").digest()
NAME = rendition_name(ORIGINAL, "w100")


@pytest.fixture(params=["memcached", "redis"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Program]:
    running = start_memcached(tmp_path) if request.param == "memcached" else start_redis(tmp_path)
    yield running
    running.kill()


def url_of(program: Program) -> str:
    scheme = "memcached" if program.command[0].endswith("memcached") else "redis"
    return f"{scheme}://127.0.0.1:{program.port}"


@contextlib.asynccontextmanager
async def sharing(url: str, secret: bytes = b"", timeout_s: float = 2) -> AsyncIterator[SharingStore]:
    """A store of its own before the cache."""
    cache = open_cache(url, timeout_s)
    assert cache is not None
    store = SharingStore(MemoryStore(), cache, 60, secret)
    try:
        yield store
    finally:
        await store.close()


def make_picture(data: bytes) -> Record:
    return replace(make_record(data), inline=data)


def has_bytes(record: Record | None, data: bytes) -> bool:
    return record is not None and record.inline == data and record.digest == hashlib.sha256(data).digest()


async def test_what_one_node_has_made_the_other_has_in_one_look(program: Program) -> None:
    copy = coding_name(ORIGINAL, "zstd")
    async with sharing(url_of(program)) as one, sharing(url_of(program)) as other:
        for name, size in ((NAME, 0), (NAME, 3000), (copy, 100_000), (copy, MAX_SHARED_BYTES)):
            data = make_bytes(size)
            assert await put(one, name, data, facts=b"facts") == make_record(data, b"facts")
            found = await other.record(name)
            assert has_bytes(found, data)
            assert found is not None
            assert found.facts == b"facts"
        # None of it is in the store.
        assert await one.size() == await other.size() == 0
        await one.unbind([NAME, copy])
        assert await other.record(NAME) is await other.record(copy) is None
        assert (other.tally.hits, other.tally.misses) == (4, 2)


async def test_originals_values_intermediates_and_what_is_large_stay_in_the_store(program: Program) -> None:
    names = (image_name(ORIGINAL.hex()), value_name(b"d", b"k"), rendition_name(ORIGINAL, "pyramid-2"), NAME)
    async with sharing(url_of(program)) as one, sharing(url_of(program)) as other:
        for name in names:
            data = make_bytes(MAX_SHARED_BYTES + 1 if name == NAME else 3000)
            await put(one, name, data)
            assert await one.record(name) == make_record(data)
            assert await one.get(make_record(data).digest) == data
            assert await other.record(name) is None
    assert [may_be_shared(name) for name in names] == [False, False, False, True]


async def test_a_redis_cluster_is_a_cache_too(redis_cluster: list[Program]) -> None:
    url = "redis+cluster://" + ",".join(f"127.0.0.1:{program.port}" for program in redis_cluster)
    async with sharing(url) as one, sharing(url) as other:
        names = {rendition_name(hashlib.sha256(b"%d" % number).digest(), "w1"): b"%d" % number for number in range(50)}
        for name, data in names.items():
            await put(one, name, data)
        for name, data in names.items():
            assert has_bytes(await other.record(name), data)
        assert {guard.name.split(":")[0] for guard in other.cache_guards} == {"shared cache redis 127.0.0.1"}


async def test_a_store_that_looks_at_several_names_at_once_does_so_beside_the_cache(
    program: Program, redis_server: Program
) -> None:
    cache = open_cache(url_of(program), 2)
    assert cache is not None
    far = open_store(f"redis://127.0.0.1:{redis_server.port}?prefix={secrets.token_hex(4)}:")
    async with contextlib.AsyncExitStack() as stack:
        store = SharingStore(far, cache, 60)
        stack.push_async_callback(store.close)
        look = find_look(store)
        assert look is not None
        image, large = image_name(ORIGINAL.hex()), rendition_name(ORIGINAL, "w9999")
        await put(store, image, b"original")
        await put(store, large, make_bytes(MAX_SHARED_BYTES + 1))
        assert await look([image, NAME]) == ([make_record(b"original"), None], None)
        await put(store, NAME, b"small")
        (original, rendition), _ = await look([image, NAME])
        assert original == make_record(b"original")
        assert has_bytes(rendition, b"small")
        assert (await look([image, large]))[0][1] == make_record(make_bytes(MAX_SHARED_BYTES + 1))
        assert await look([image]) == ([make_record(b"original")], b"original")


@pytest.mark.parametrize(("url", "streams"), [("memory:", False), ("s3://bucket?endpoint=http://127.0.0.1:1", True)])
async def test_large_blobs_are_sent_on_while_they_come_where_the_store_can(url: str, streams: bool) -> None:
    cache = open_cache("memcached://127.0.0.1:1", 2)
    assert cache is not None
    store = SharingStore(open_store(url), cache, 60)
    assert isinstance(store, Streams) == streams
    await store.close()


async def test_what_the_store_has_already_stays_there(program: Program) -> None:
    async with sharing(url_of(program)) as store:
        await put(store, NAME, make_bytes(MAX_SHARED_BYTES + 1))
        await put(store, NAME, b"smaller")
        assert await store.record(NAME) == make_record(b"smaller")
        # Done with, it says: the same bytes and no blob along with them.
        await store.bind([NAME], make_record(b"smaller", b"done"))
        assert await store.record(NAME) == make_record(b"smaller", b"done")


async def test_what_is_damaged_foreign_or_moved_in_the_cache_is_a_miss(program: Program) -> None:
    data = make_bytes(3000)
    chance = random.Random(4869)
    async with sharing(url_of(program)) as store:
        cache: SharedCache = store._cache
        await put(store, NAME, data)
        key = b"uvimg1:s:" + hashlib.sha256(NAME).hexdigest().encode()
        item = await cache.get(key)
        assert item is not None
        flipped = [bytearray(item) for _ in range(50)]
        for each in flipped:
            each[chance.randrange(len(each))] ^= 1 << chance.randrange(8)
        for wrong in (b"", b"x", item[:-1], item[:32], item + b"x", item[32:], *map(bytes, flipped)):
            await cache.set(key, wrong, 60)
            assert await store.record(NAME) is None
        for change in ({"type": "text/html"}, {"type": "image/x\r\nA: b"}, {"created_s": 1 << 60}, {"size": 1}):
            await cache.set(key, await store._seal(NAME, replace(make_picture(data), **change)), 60)
            assert await store.record(NAME) is None
        deep = b"\x92" + msgspec.msgpack.encode(NAME) + b"\x91" * 100_000
        await cache.set(key, hmac.digest(b"", deep, "sha256") + deep, 60)
        assert await store.record(NAME) is None
        other = rendition_name(ORIGINAL, "w200")
        await cache.set(b"uvimg1:s:" + hashlib.sha256(other).hexdigest().encode(), item, 60)
        assert await store.record(other) is None
        await cache.set(key, item, 60)
        assert has_bytes(await store.record(NAME), data)
        assert store.tally.damaged == 62


async def test_with_a_secret_what_others_have_put_there_does_not_count(program: Program) -> None:
    url = url_of(program)
    async with sharing(url, b"secret") as one, sharing(url, b"secret") as other, sharing(url, b"guess") as stranger:
        await put(one, NAME, b"ours")
        assert has_bytes(await other.record(NAME), b"ours")
        assert await stranger.record(NAME) is None
        await put(stranger, NAME, b"theirs")
        assert await one.record(NAME) is await other.record(NAME) is None


async def test_an_item_goes_when_its_time_has_come(program: Program) -> None:
    cache = open_cache(url_of(program), 2)
    assert cache is not None
    await cache.set(b"k", b"v", 1)
    assert await cache.get(b"k") == b"v"
    async with asyncio.timeout(5):
        while await cache.get(b"k") is not None:
            await asyncio.sleep(0.05)
    await cache.close()


async def test_cancelled_looks_never_get_anothers_item(program: Program) -> None:
    chance = random.Random(4869)
    async with sharing(url_of(program)) as store:
        names = {rendition_name(ORIGINAL, f"w{number}"): make_bytes(3000, number) for number in range(20)}
        for name, data in names.items():
            await put(store, name, data)
        for _ in range(30):
            asked = [chance.choice(list(names)) for _ in range(25)]
            tasks = [asyncio.create_task(store.record(name)) for name in asked]
            for task in tasks:
                if chance.random() < 0.5:
                    asyncio.get_running_loop().call_later(chance.uniform(0, 0.003), task.cancel)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for name, outcome in zip(asked, outcomes, strict=True):
                assert isinstance(outcome, asyncio.CancelledError) or has_bytes(outcome, names[name])  # type: ignore[arg-type]
        assert store.tally.damaged == store.tally.failed == 0


async def test_a_cache_that_is_away_is_a_miss_and_is_used_again_when_it_is_back(program: Program) -> None:
    async with sharing(url_of(program)) as store:
        await put(store, NAME, b"data")
        program.kill()
        for _ in range(5):
            assert await store.record(NAME) is None
            assert await put(store, NAME, b"data") == make_record(b"data")
            await store.unbind([NAME])
        assert all(guard.is_away for guard in store.cache_guards)
        program.start()
        async with asyncio.timeout(2):
            while not has_bytes(await store.record(NAME), b"data"):
                await put(store, NAME, b"data")
                await asyncio.sleep(0.01)


async def test_a_cache_that_is_full_is_told_of_once_and_still_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    redis = start_redis(tmp_path, "--maxmemory", "3mb")
    try:
        async with sharing(url_of(redis)) as store:
            await put(store, NAME, b"data")
            for number in range(10):
                await put(store, rendition_name(ORIGINAL, f"w{number}"), make_bytes(900_000, number))
            assert has_bytes(await store.record(NAME), b"data")
            assert store.tally.dropped > 5
        assert caplog.text.count("the shared cache takes no more") == 1
    finally:
        redis.kill()


@pytest.mark.parametrize("scheme", ["memcached", "redis"])
async def test_a_cache_that_accepts_and_never_answers_makes_nobody_wait_for_long(scheme: str) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    hole = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    async with sharing(f"{scheme}://127.0.0.1:{hole.sockets[0].getsockname()[1]}", timeout_s=0.1) as store:
        started = loop.time()
        for _ in range(100):
            assert await store.record(NAME) is None
            assert await put(store, NAME, b"data") == make_record(b"data")
        assert loop.time() - started < 5
    hole.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"-\xff\xfe\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b":5\r\n",
        b"$5\r\nab",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*1\r\n" * 100_000,
    ],
)
async def test_a_redis_that_answers_oddly_is_a_miss(answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10_000)
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    odd = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with sharing(f"redis://127.0.0.1:{odd.sockets[0].getsockname()[1]}") as store:
        for _ in range(3):
            assert await store.record(NAME) is None
            assert await put(store, NAME, b"data") == make_record(b"data")
    odd.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nothing",
        "redis:",
        "redis://",
        "memcached:host",
        "memcached://a:secret@b",
        "redis://a:secret@b:port",
        "redis://a/?odd=secret",
        "local:./data",
        "s3://b",
    ],
)
def test_an_url_that_is_no_cache_is_refused_with_a_sentence(url: str) -> None:
    with pytest.raises(ValueError, match=r"shared cache|is written|is no parameter") as told:
        open_cache(url, 1)
    assert "secret" not in str(told.value)
    assert open_cache("none", 1) is None


# Nodes


def calls(server: Server, outcome: str) -> float:
    return value(parse_metrics(server.get("/metrics").text), "uvimg_shared_cache_calls_total", outcome=outcome)


def renditions_made(server: Server) -> float:
    return value(parse_metrics(server.get("/metrics").text), "uvimg_jobs_total", lane="fast")


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("program", ["memcached"], indirect=True)
def test_what_one_node_has_made_of_an_image_or_a_text_is_not_made_by_another(
    start_server: Callable[..., Server], program: Program
) -> None:
    settings: dict[str, Any] = {"workers": 1, "cache": url_of(program), "cache_timeout_s": 2, "coded_copies": "first"}
    one, other = start_server(**settings), start_server(**settings)
    md5 = one.upload(make_photo(1))
    made = one.get(f"/{md5}?w=20")
    wait_until(lambda: calls(one, "kept") == 1)
    found = other.get(f"/{md5}?w=20")
    assert (found.status_code, found.content, found.headers["ETag"]) == (200, made.content, made.headers["ETag"])
    assert (renditions_made(one), renditions_made(other)) == (1, 0)
    assert calls(other, "hits") == 1
    assert other.get(f"/{md5}?w=20", headers={"If-None-Match": made.headers["ETag"]}).status_code == 304
    # Deleted, nobody is shown it, whoever has it.
    assert one.get(f"/admin?md5={md5}&t=1").status_code == 200
    assert other.get(f"/{md5}?w=20").status_code == 404
    text = b"It was said, and said again. " * 200
    assert one.http.put(f"{one.url}/docs/page.txt", text).status_code == 201
    made = one.get("/docs/page.txt", headers={"Accept-Encoding": "gzip"})
    wait_until(lambda: calls(one, "kept") == 2)
    found = other.get("/docs/page.txt", headers={"Accept-Encoding": "gzip"})
    assert found.headers["Content-Encoding"] == "gzip"
    assert (found.content, found.headers["ETag"]) == (text, made.headers["ETag"])
    assert value(parse_metrics(other.get("/metrics").text), "uvimg_codings_total", why="asked") == 0
    # None of it has another place.
    assert names(one.store, b"renditions/") == names(one.store, b"codings/") == {}


@pytest.mark.parametrize("program", ["memcached"], indirect=True)
def test_killing_the_cache_under_load_fails_no_request(start_server: Callable[..., Server], program: Program) -> None:
    # Nothing is at hand but by the cache.
    settings: dict[str, Any] = {
        "cache_size": 0,
        "memo_size": 0,
        "workers": 2,
        "cache_timeout_s": 2,
        "apps": ("images",),
    }
    server = start_server(cache=url_of(program), access_log=False, **settings)
    photos = [server.upload(make_photo(seed)) for seed in range(4)]
    expected = {
        f"/{md5}?w={20 + step}": server.get(f"/{md5}?w={20 + step}").content for md5 in photos for step in range(4)
    }
    stop = threading.Event()
    wrong: list[object] = []
    answered = 0

    def load(seed: int) -> None:
        nonlocal answered
        chance = random.Random(seed)
        while not stop.is_set():
            path = chance.choice(list(expected))
            answer = server.get(path)
            answered += 1
            if answer.status_code != 200 or answer.content != expected[path]:
                wrong.append((path, answer.status_code))

    def answer_more(count: int) -> None:
        wanted = answered + count
        wait_until(lambda: answered >= wanted or bool(wrong))

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        answer_more(50)
        program.kill()
        answer_more(50)
        assert server.get("/health").status_code == 200
        program.start()
        hits = calls(server, "hits")
        wait_until(lambda: calls(server, "hits") > hits)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert server.log.count(" is away:") == server.log.count(" answers again") == 1


def test_what_is_secret_is_in_no_log_no_metric_and_no_complaint(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    redis = start_redis(tmp_path, "--requirepass", "swordfish")
    settings: dict[str, Any] = {"apps": ("images",), "cache_timeout_s": 2, "workers": 1, "cache_secret": "open sesame"}
    try:
        server = start_server(cache=f"redis://:swordfish@127.0.0.1:{redis.port}/0", **settings)
        md5 = server.upload(make_photo(1))
        server.get(f"/{md5}?w=20")
        wait_until(lambda: calls(server, "kept") == 1)
        redis.kill()
        for step in range(5):
            assert server.get(f"/{md5}?w={21 + step}").status_code == 200
        wait_until(lambda: " is away:" in server.log)
        told = server.log + server.get("/metrics").text + server.ready_line
        assert "swordfish" not in told
        assert "sesame" not in told
    finally:
        redis.kill()
    with pytest.raises(ConfigError, match="is written HOST") as complaint:
        load({"cache": "redis://:swordfish@"}, {})
    assert "swordfish" not in str(complaint.value)
