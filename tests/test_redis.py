"""The apps on a store in Redis and in a Redis Cluster, and what becomes of both when servers or clients fail."""

import asyncio
import hashlib
import itertools
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import requests

from tests.backends import Program, start_redis
from tests.conftest import Server, decode, make_photo
from tests.faults import Fault, Network
from uvimg.core.address import image_name
from uvimg.core.errors import StoreDown, StoreFull
from uvimg.core.message import FilePart
from uvimg.core.redis import find_partition, find_partitions, name_after, read_redis_url
from uvimg.store import Record, open_store
from uvimg.store.redis import RedisStore
from uvimg.store.redis_step import PIECE_BYTES, Change


def make_url(server: Program) -> str:
    return f"redis://127.0.0.1:{server.port}?prefix={secrets.token_hex(4)}:"


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Program]:
    """One that a test may stop."""
    running = start_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always", "--dir", str(tmp_path))
    yield running
    running.kill()


def make_record(data: bytes) -> Record:
    return Record(hashlib.sha256(data).digest(), len(data), "image/jpeg", 1_800_000_000)


async def put(store: RedisStore, name: bytes, data: bytes) -> None:
    async with store.incoming() as incoming:
        await incoming.write(data)
        await incoming.finish()
        assert await store.bind([name], make_record(data), incoming) == [make_record(data)]


def open_redis(url: str, timeout_s: float = 10.0) -> RedisStore:
    store = open_store(url, timeout_s=timeout_s)
    assert isinstance(store, RedisStore)
    return store


# The apps


@pytest.mark.parametrize("store_url", ["redis", "redis+cluster"], indirect=True)
def test_all_apps_work_on_a_store_in_redis(store_url: str, start_server: Callable[..., Server]) -> None:
    server = start_server(store=store_url, workers=1, processes=0 if "cluster" in store_url else 2)
    photo = make_photo(1, 400, 300)
    md5 = server.upload(photo)
    assert server.upload(photo) == md5
    assert server.get(f"/{md5}?p=0").content == photo
    for _ in range(3):
        image = decode(server.get(f"/{md5}?w=40&h=30").content)
        assert (image.width, image.height) == (40, 30)
    sha256 = hashlib.sha256(photo).hexdigest()
    assert server.get(f"/images/{sha256}/info").json()["md5"] == md5
    url = server.url
    for key in ("a", "b", "c"):
        assert server.http.put(f"{url}/kv/db/{key}", data=key * 2000).status_code == 201
    assert server.get("/kv/db/a").text == "a" * 2000
    assert server.get("/kv/db/b/_next").text == "c" * 2000
    assert server.get("/kv/db/_all").text.split() == ["a", "b", "c"]
    text = b"A document that is compressed once.\n" * 1000
    assert server.http.put(f"{url}/docs/sub/page.txt", data=text).status_code == 201
    for coding in ("gzip", "zstd", "identity"):
        answer = server.get("/docs/sub/page.txt", headers={"Accept-Encoding": coding}, stream=True)
        assert answer.headers.get("Content-Encoding", "identity") == coding
    assert server.get("/docs/sub/page.txt", headers={"Accept-Encoding": "identity"}).content == text
    assert server.get("/docs/sub/?list").json()["entries"]
    assert server.http.delete(f"{url}/images/{sha256}").status_code == 204
    assert server.get(f"/{md5}?w=40&h=30").status_code == 404
    assert server.http.delete(f"{url}/docs/sub/page.txt").status_code == 204
    assert server.get("/health").json()["status"] == "ok"
    done = subprocess.run(
        [sys.executable, "-m", "uvimg", "scrub", "--store", store_url], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split(" in ")[0]) == (0, "no damage found"), done.stderr


# One server that fails


def wait_until(what: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_dead_redis_is_503_at_once_and_two_seconds_after_its_return_all_is_well(
    own_redis: Program, start_server: Callable[..., Server]
) -> None:
    server = start_server(store=make_url(own_redis))
    md5 = server.upload(make_photo(1))
    assert server.get(f"/{md5}?p=0").status_code == 200
    own_redis.kill()
    for _ in range(20):
        started = time.monotonic()
        answer = server.get(f"/{md5}?p=0")
        assert (answer.status_code, "Retry-After" in answer.headers) == (503, True)
        assert time.monotonic() - started < 1
    assert server.get("/health").status_code == 503
    assert server.get("/echo").status_code == 200
    own_redis.start()
    wait_until(lambda: server.get(f"/{md5}?p=0").status_code == 200, 2)
    assert server.get("/health").status_code == 200
    assert server.log.count("is away") == server.log.count("answers again") == 1


async def test_a_silent_redis_holds_nobody_for_long_and_is_noticed_when_it_speaks_again(own_redis: Program) -> None:
    store = open_redis(make_url(own_redis), timeout_s=0.2)
    await put(store, b"images/a", b"bytes")
    own_redis.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    for _ in range(40):
        with pytest.raises(StoreDown):
            await store.record(b"images/a")
    assert time.monotonic() - started < 2
    own_redis.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(2):
        # Those who are refused must not disturb the one who tries.
        await asyncio.gather(*(until_it_answers(store, b"images/a") for _ in range(20)))
    await store.close()


async def until_it_answers(store: RedisStore, name: bytes | None) -> None:
    """With this name, which is there, or with any."""
    while True:
        try:
            assert await store.record(name or b"images/none") is not None or name is None
            return
        except StoreDown:
            await asyncio.sleep(0.001)


async def test_a_redis_without_memory_takes_nothing_more_and_goes_on_giving_and_forgetting(tmp_path: Path) -> None:
    server = start_redis(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    store = open_redis(make_url(server))
    taken = 0
    try:
        with pytest.raises(StoreFull):
            for taken in range(200):
                await put(store, b"n/%d" % taken, os.urandom(100_000))
        record = await store.record(b"n/0")
        assert record is not None
        assert await store.get(record.digest) is not None
        assert await store.unbind([b"n/%d" % number for number in range(20)]) != [None] * 20
        await put(store, b"n/new", b"there is room again")
        assert [finding async for finding in store.scrub() if finding.note] == []
    finally:
        await store.close()
        server.kill()


async def test_a_cancelled_call_leaves_no_answer_to_another(redis_server: Program) -> None:
    store = open_redis(make_url(redis_server))
    blobs = {b"n/%d" % number: os.urandom(50_000) + b"%d" % number for number in range(40)}
    await asyncio.gather(*(put(store, name, data) for name, data in blobs.items()))

    async def read(name: bytes, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                (record,), body = await store.look([name])
        except TimeoutError:
            return
        assert record == make_record(blobs[name])
        assert body == blobs[name]

    for step in range(15):
        await asyncio.gather(*(read(name, (step + number % 7) / 2000) for number, name in enumerate(blobs)))
    await asyncio.gather(*(read(name, 60) for name in blobs))
    await store.close()


# A network that fails


async def attempt(store: RedisStore, chance: random.Random, model: dict[bytes, set[bytes | None]]) -> None:
    """Change or read one name, whatever comes of it; `model` is what each name may have."""
    name = chance.choice(sorted(model))
    data = bytes([chance.randrange(4)]) * chance.choice((100, 20_000, 600_000))
    digest = hashlib.sha256(data).digest()
    known, started = model.pop(name), time.monotonic()
    action = chance.choice(("put", "unbind", "read"))
    try:
        match action:
            case "put":
                await put(store, name, data)
                known = {digest}
            case "unbind":
                await store.unbind([name])
                known = {None}
            case _:
                record = await store.record(name)
                assert (record and record.digest) in known
                known = {record and record.digest}
    except StoreDown:
        # It may have been done, or may not.
        known = known | {"put": {digest}, "unbind": {None}, "read": set[bytes | None]()}[action]
    finally:
        # Several questions, each of which may be given all its time.
        assert time.monotonic() - started < 3
        model[name] = known


async def test_no_acknowledged_change_is_lost_while_the_network_fails(redis_server: Program) -> None:
    chance = random.Random(4869)
    model: dict[bytes, set[bytes | None]] = {b"n/%d" % number: {None} for number in range(12)}
    faults: tuple[Fault, ...] = ("delay", "cut", "half open", "away", "black hole")
    with Network(redis_server.port) as network:
        network.delay_s = 0.01
        url = make_url(redis_server)
        store = open_redis(url.replace(str(redis_server.port), str(network.port)), timeout_s=0.2)
        for fault in faults * 2:
            await asyncio.gather(*(attempt(store, chance, model) for _ in range(6)))
            network.fault = fault
            network.cut_after = chance.randrange(3000)
            for _ in range(3):
                await asyncio.gather(*(attempt(store, chance, model) for _ in range(6)))
            network.fault = ""
            async with asyncio.timeout(2):
                await asyncio.gather(*(until_it_answers(store, None) for _ in range(6)))
        await store.close()
    store = open_redis(url, timeout_s=10)
    for name, known in model.items():
        record = await store.record(name)
        assert (record and record.digest) in known
        if record is not None:
            content = await store.get(record.digest)
            assert isinstance(content, bytes)
            assert hashlib.sha256(content).digest() == record.digest
    assert [finding async for finding in store.scrub() if finding.note] == []
    store.grace_s = -1
    async for _ in store.collect():
        pass
    assert await store.size() == len({record.digest for _, record in await store.scan(b"")})
    await store.close()


def test_no_acknowledged_upload_is_lost_when_redis_is_killed_under_load(
    own_redis: Program, start_server: Callable[..., Server]
) -> None:
    url = make_url(own_redis)
    server = start_server(store=url, workers=1)
    photos = [make_photo(seed) for seed in range(40)]
    told: dict[int, str] = {}
    ended = threading.Event()

    def upload() -> None:
        with requests.Session() as http:
            http.trust_env = False
            for seed in itertools.cycle(range(len(photos))):
                if ended.is_set():
                    return
                answer = http.post(f"{server.url}/upload", data=photos[seed], headers={"Content-Type": "jpeg"})
                assert answer.status_code in (200, 503)
                if answer.status_code == 200 and answer.json()["ret"]:
                    told[seed] = answer.json()["info"]["md5"]

    with ThreadPoolExecutor(2) as pool:
        uploads = [pool.submit(upload) for _ in range(2)]
        for count in (5, 15):
            wait_until(lambda count=count: len(told) > count, 20)  # type: ignore[misc]
            own_redis.kill()
            own_redis.start()
        ended.set()
        for each in uploads:
            each.result(30)
    wait_until(lambda: server.get("/health").status_code == 200, 5)
    for seed, md5 in told.items():
        wait_until(lambda md5=md5: server.get(f"/{md5}?p=0").status_code == 200, 2)  # type: ignore[misc]
        assert server.get(f"/{md5}?p=0").content == photos[seed]


# Blobs in pieces


@pytest.mark.parametrize("size", [PIECE_BYTES, PIECE_BYTES + 1, 4 * PIECE_BYTES, 4 * PIECE_BYTES + 1])
async def test_no_value_in_redis_is_larger_than_a_piece(redis_server: Program, size: int) -> None:
    url = make_url(redis_server)
    store, data = open_redis(url), os.urandom(size)
    await put(store, b"images/a", data)
    client = redis.Redis(port=redis_server.port)
    prefix = url.partition("=")[2].encode()
    digest = hashlib.sha256(data).digest()
    if size == PIECE_BYTES:
        assert client.get(prefix + b"b/" + digest) == data
    else:
        pieces = client.hgetall(prefix + b"c/" + digest)
        assert pieces.pop(b"head") == b"%d %d" % (size, PIECE_BYTES)
        assert b"".join(pieces[key] for key in sorted(pieces, key=int)) == data
        assert max(map(len, pieces.values())) == PIECE_BYTES
    content = await store.get(digest)
    if isinstance(content, FilePart):
        with content.file as file:
            file.seek(0)
            assert (content.start, content.size, file.read()) == (0, size, data)
        content = data if size > 1 << 20 else None
    assert content == data
    await store.unbind([b"images/a"])
    assert client.keys(prefix + b"*") == []
    client.close()
    await store.close()


_SILENT_UPLOADER = """
import asyncio, sys
from uvimg.store import Record, open_store
from uvimg.store.spool import Spool

class Silent(Spool):
    async def part(self, start, size):
        if start:
            print("silent", flush=True)
            await asyncio.Event().wait()
        return await super().part(start, size)

async def upload():
    store = open_store(sys.argv[1])
    async with Silent() as incoming:
        await incoming.write(bytes(2_000_000))
        digest = await incoming.finish()
        await store.bind([b"images/a"], Record(digest, incoming.size, "image/jpeg", 0), incoming)

asyncio.run(upload())
"""


@pytest.mark.parametrize("store_url", ["redis", "redis+cluster"], indirect=True)
async def test_what_a_killed_uploader_leaves_is_no_blob_and_is_collected(store_url: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", _SILENT_UPLOADER, store_url], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "silent\n"
    child.kill()
    child.wait()
    child.stdout.close()
    store = open_redis(store_url)
    digest = hashlib.sha256(bytes(2_000_000)).digest()
    assert await store.get(digest) is None
    assert not await store.is_named(digest)
    assert [finding async for finding in store.scrub()] == []
    # Somebody might still be at it.
    assert [finding async for finding in store.collect()] == []
    store.grace_s = 0
    assert [finding.subject async for finding in store.collect(dry_run=True)] == [digest.hex()]
    assert [finding.subject async for finding in store.collect()] == [digest.hex()]
    assert await store.size() == 0
    # The next one is not misled by it.
    await put(store, b"images/a", bytes(2_000_000))
    assert [finding.note async for finding in store.scrub()] == [""]
    await store.close()


async def test_scrub_tells_of_bytes_that_are_damaged_or_gone(redis_server: Program) -> None:
    url = make_url(redis_server)
    store = open_redis(url)
    for number, size in enumerate((100, 600_000, 200)):
        await put(store, b"images/%d" % number, bytes([number]) * size)
    client = redis.Redis(port=redis_server.port)
    prefix = url.partition("=")[2].encode()
    records = [record for _, record in await store.scan(b"images/")]
    client.set(prefix + b"b/" + records[0].digest, b"other bytes")
    client.hdel(prefix + b"c/" + records[1].digest, "1")
    client.delete(prefix + b"b/" + records[2].digest, prefix + b"u/" + records[2].digest)
    client.close()
    troubles = {finding.subject: finding.note async for finding in store.scrub() if finding.note}
    assert troubles == {
        records[0].digest.hex(): "its bytes are not those of its address",
        records[1].digest.hex(): "its bytes are missing",
        "images/2": "it names a blob that is not there",
    }
    # Who uploads them again has them again.
    for number, size in enumerate((100, 600_000, 200)):
        async with store.incoming() as incoming:
            await incoming.write(bytes([number]) * size)
            await incoming.finish()
            await store.bind([b"images/%d" % number], records[number], incoming, replace=False)
    assert [finding.note async for finding in store.scrub()] == ["", "", ""]
    await store.close()


# Several at once

_COUNTER = """
import asyncio, hashlib, sys
from uvimg.store import Record, open_store

def increment(_, old):
    data = b"%d" % (1 + int(old.inline if old else 0))
    return Record(hashlib.sha256(data).digest(), len(data), "text/plain", 0, inline=data)

async def count():
    store = open_store(sys.argv[1])
    for _ in range(10):
        await asyncio.gather(*(store.change([b"kv/d/n"], increment) for _ in range(10)))
    await store.close()

asyncio.run(count())
"""


@pytest.mark.parametrize("store_url", ["redis", "redis+cluster"], indirect=True)
async def test_increments_of_several_processes_are_all_counted(store_url: str) -> None:
    children = [subprocess.Popen([sys.executable, "-c", _COUNTER, store_url]) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    store = open_redis(store_url)
    record = await store.record(b"kv/d/n")
    assert record is not None
    assert record.inline == b"200"
    await store.close()


# A cluster


async def test_names_of_one_image_lie_with_its_blob_and_prefixes_are_known_to() -> None:
    place = read_redis_url("redis+cluster://host")
    digest = hashlib.sha256(b"an image").digest()
    sha256 = digest.hex().encode()
    together = {
        find_partition(name, place.partitions)
        for name in (image_name(digest.hex()), b"renditions/%s/w=1" % sha256, b"codings/%s/gzip" % sha256)
    }
    assert together == {digest[0] % 64} == set(find_partitions(b"renditions/%s/" % sha256, 64))
    assert len(find_partitions(b"renditions/", 64)) == len(find_partitions(b"", 64)) == 64
    assert {find_partition(b"kv/d/%d" % number, 64) for number in range(1000)} == set(range(64))


def test_the_partitions_are_spread_evenly_over_the_slots_of_a_cluster() -> None:
    from redis.crc import key_slot

    place = read_redis_url("redis+cluster://host")
    assert [key_slot(place.base(number) + b"n/x") // 256 for number in range(64)] == list(range(64))


def test_what_may_be_a_records_by_now_is_not_let_go_of() -> None:
    data = b"an image"
    names = [image_name(hashlib.sha256(data).hexdigest()), image_name(hashlib.md5(data).hexdigest())]
    place = read_redis_url("redis+cluster://host")
    change = Change(names, lambda name, old: make_record(data), None, [place.base(number) for number in range(64)])
    change.look(names, [None, None])
    own = change.next_step()
    assert own is not None
    assert ([each.name for each in own.changes], len(own.uses)) == (names[:1], 2)
    change.complete(own)
    other = change.next_step()
    assert other is not None
    assert ([each.name for each in other.changes], other.uses) == (names[1:], [])
    assert [use.name for use in change.loose] == names[1:]
    change.doubt(other)
    assert change.loose == []


@pytest.mark.parametrize("prefix", [b"a", b"a/\xff", b"\xff\xff", b""])
def test_what_is_behind_a_prefix_is_behind_all_its_names_and_before_all_others(prefix: bytes) -> None:
    end = name_after(prefix)
    for name in (prefix, prefix + b"\xff" * 9, prefix + b"\0"):
        assert end is None or name < end
    if end is not None:
        assert not end.startswith(prefix)
        assert end[:-1] + bytes((end[-1] - 1,)) <= prefix


@pytest.mark.parametrize("store_url", ["redis+cluster"], indirect=True)
async def test_a_store_on_a_cluster_finds_slots_that_move_meanwhile(
    redis_cluster: list[Program], store_url: str
) -> None:
    store = open_redis(store_url)
    for number in range(20):
        await put(store, b"n/%d" % number, b"%d" % number)
    clients = [redis.Redis(port=server.port) for server in redis_cluster]
    ids = [client.execute_command("CLUSTER MYID").decode() for client in clients]
    port = redis_cluster[1].port
    # From the first server to the second; what has gone before the rest is asked for with ASKING.
    moved = 0
    for number in range(20):
        name, base = b"n/%d" % number, read_redis_url(store_url).base(find_partition(b"n/%d" % number, 64))
        keys = clients[0].keys(b"*" + base[base.index(b"{") :] + b"*")
        if not keys:
            continue
        slot = clients[0].execute_command("CLUSTER KEYSLOT", base)
        clients[1].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        clients[0].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        clients[0].execute_command("MIGRATE", "127.0.0.1", port, base + b"n/" + name, 0, 5000)
        assert await store.record(name) == make_record(b"%d" % number)
        clients[0].execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
        for client in (clients[1], clients[0], clients[2]):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        assert await store.record(name) == make_record(b"%d" % number)
        await put(store, name, b"%d" % number)
        moved += 1
    assert moved
    assert len(await store.scan(b"n/")) == 20
    assert [finding async for finding in store.scrub() if finding.note] == []
    for client in clients:
        client.close()
    await store.close()


@pytest.mark.parametrize("store_url", ["redis+cluster"], indirect=True)
async def test_a_silent_server_of_a_cluster_takes_its_share_away_and_no_more(
    redis_cluster: list[Program], store_url: str
) -> None:
    store = open_redis(store_url, timeout_s=0.4)
    names = [b"n/%d" % number for number in range(30)]
    await asyncio.gather(*(put(store, name, name) for name in names))
    redis_cluster[1].process.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        found = await asyncio.gather(*(store.record(name) for name in names), return_exceptions=True)
        found = await asyncio.gather(*(store.record(name) for name in names), return_exceptions=True)
        # Shorter than it takes the cluster to give up as a whole.
        assert time.monotonic() - started < 1.5
    finally:
        redis_cluster[1].process.send_signal(signal.SIGCONT)
    answered = [record for record in found if isinstance(record, Record)]
    assert all(isinstance(each, Record | StoreDown) for each in found)
    assert 5 < len(answered) < 25
    assert [guard.is_away for guard in store.guards].count(True) == 1
    async with asyncio.timeout(2):
        await asyncio.gather(*(until_it_answers(store, name) for name in names))
    await store.close()


# URLs


def test_urls_say_all_that_there_is_to_say() -> None:
    place = read_redis_url("rediss+cluster://me:p%40ss@a:1,[::1]:2,c/?prefix=x:&ssl_ca_certs=/ca.pem")
    assert place.addresses == (("a", 1), ("::1", 2), ("c", 6379))
    assert (place.user, place.password, place.prefix) == ("me", "p@ss", b"x:")
    assert (place.is_cluster, place.is_encrypted) == (True, True)
    assert place.certificates == (("ssl_ca_certs", "/ca.pem"),)
    assert read_redis_url("redis://:secret@host/3").database == 3


@pytest.mark.parametrize(
    "url",
    [
        *("redis:", "redis://", "redis://a,b", "redis://host:0", "redis://host:x", "redis://host/db", "redis+x://host"),
        *("redis+cluster://host/1", "redis://host?prefix={x}", "redis://host?socket_timeout=1", "redis:///0"),
        *("redis://host?ssl_ca_certs=/x", "redis://ho st"),
    ],
)
def test_an_url_that_cannot_be_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as told:
        open_store(url.replace("//", "//user:secret@"))
    assert "secret" not in str(told.value)


async def test_password_and_certificate_are_taken_from_the_url(tmp_path: Path, certificate: Path) -> None:
    server = start_redis(tmp_path, "--requirepass", "p@ss", certificate=certificate)
    try:
        for user, file, works in (
            (":p%40ss", certificate, True),
            ("default:p%40ss", certificate, True),
            (":wrong", certificate, False),
            (":p%40ss", None, False),
        ):
            trust = f"?ssl_ca_certs={file}" if file else ""
            store = open_redis(f"rediss://{user}@localhost:{server.port}/2{trust}")
            if works:
                await put(store, b"images/a", b"bytes")
            else:
                with pytest.raises(StoreDown):
                    await store.record(b"images/a")
            await store.close()
    finally:
        server.kill()


async def test_who_names_the_wrong_kind_of_redis_is_told(redis_server: Program, redis_cluster: list[Program]) -> None:
    for url, sentence in (
        (f"redis+cluster://127.0.0.1:{redis_server.port}", "not one of a cluster"),
        (f"redis://127.0.0.1:{redis_cluster[0].port}", "is one of a cluster"),
    ):
        store = open_redis(url)
        told = []
        for number in range(10):
            try:
                await store.record(b"images/%d" % number)
            except StoreDown as exc:
                told.append(exc.detail)
        assert any(sentence in detail for detail in told)
        await store.close()
