"""What a node keeps of a store that is far away: bounded, right, and there when the store is not."""

import asyncio
import contextlib
import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.backends import S3, Program
from tests.conftest import Server, make_photo
from tests.faults import Network
from uvimg.config import ConfigError, load
from uvimg.core.errors import Elsewhere, StoreDown, UvimgError
from uvimg.core.message import Content, FilePart
from uvimg.store import Record, Store, open_store
from uvimg.store.memory import MemoryStore
from uvimg.store.shelf import Shelf
from uvimg.store.tier import TieredStore


@pytest.fixture
def network(s3: S3) -> Iterator[Network]:
    with Network(s3.program.port) as between:
        yield between


def make_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(f"{size} {seed}").randbytes(size)


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def make_record(data: bytes) -> Record:
    return Record(digest_of(data), len(data), "image/jpeg", 1_800_000_000)


def read(content: Content | None) -> bytes | None:
    if not isinstance(content, FilePart):
        return content
    with contextlib.closing(content):
        return os.pread(content.file.fileno(), content.size, content.start)


async def put(store: Store, name: bytes, data: bytes) -> None:
    async with store.incoming() as incoming:
        await incoming.write(data)
        await incoming.finish()
        assert await store.bind([name], make_record(data), incoming) != [None]


async def until(holds: Callable[[], object], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def disk_bytes(folder: Path) -> int:
    """What a folder takes on the disk, beside the folders themselves."""
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found += path.stat().st_blocks * 512
    return found


# The folder

_FILL = """
import hashlib, random, sys
from pathlib import Path
from uvimg.store.shelf import Shelf
shelf = Shelf(Path(sys.argv[1]), 16 << 20)
chance = random.Random(int(sys.argv[2]))
for _ in range(400):
    data = chance.randbytes(chance.choice((300, 20_000, 60_000, 150_000, 400_000)))
    shelf.put(hashlib.sha256(data).digest(), data)
shelf.close()
"""


def test_two_processes_keep_to_one_bound(tmp_path: Path) -> None:
    fillers = [subprocess.Popen([sys.executable, "-c", _FILL, str(tmp_path), str(seed)]) for seed in range(2)]
    most = 0
    while any(filler.poll() is None for filler in fillers):
        most = max(most, disk_bytes(tmp_path))
        time.sleep(0.02)
    assert [filler.returncode for filler in fillers] == [0, 0]
    shelf = Shelf(tmp_path, 16 << 20)
    try:
        # They have brought five times as much.
        assert 8 << 20 < shelf.kept_bytes <= 16 << 20
        # The database's file may have grown by the last commit.
        assert disk_bytes(tmp_path) <= (16 << 20) + (1 << 18)
        # Pages and files of what is being replaced are there twice for a moment.
        assert most <= 20 << 20
    finally:
        shelf.close()


async def test_what_is_used_stays(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 4 << 20)
    used, loop = make_bytes(100_000), asyncio.get_running_loop()
    shelf.put(digest_of(used), used)
    await until(lambda: read(shelf.get(digest_of(used))) == used)
    for seed in range(200):
        data = make_bytes(90_000, seed)
        kept = asyncio.Event()
        shelf.put(digest_of(data), data, lambda kept=kept: loop.call_soon_threadsafe(kept.set))  # type: ignore[misc]
        await kept.wait()
        assert read(shelf.get(digest_of(used))) == used
    assert read(shelf.get(digest_of(make_bytes(90_000, 0)))) is None
    shelf.close()


@pytest.mark.parametrize("size", [300, 200_000])
async def test_what_was_kept_is_there_after_a_restart(tmp_path: Path, size: int) -> None:
    data = make_bytes(size)
    shelf = Shelf(tmp_path, 16 << 20)
    shelf.put(digest_of(data), data)
    shelf.close()
    shelf = Shelf(tmp_path, 16 << 20)
    assert read(await shelf.look(digest_of(data))) == data
    assert read(shelf.get(digest_of(data))) == data
    shelf.close()


async def test_a_file_that_was_damaged_is_not_believed(tmp_path: Path) -> None:
    data = make_bytes(200_000)
    for restarted in (False, True):
        shelf = Shelf(tmp_path, 16 << 20)
        shelf.put(digest_of(data), data)
        await until(lambda shelf=shelf: shelf.get(digest_of(data)))  # type: ignore[misc]
        (path,) = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
        if restarted:
            shelf.close()
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(b"damage")
        if restarted:
            shelf = Shelf(tmp_path, 16 << 20)
        assert shelf.get(digest_of(data)) is None
        assert await shelf.look(digest_of(data)) is None
        await until(lambda path=path: not path.exists())  # type: ignore[misc]
        await until(lambda shelf=shelf: not shelf.kept_bytes)  # type: ignore[misc]
        shelf.close()


async def test_files_that_the_index_does_not_know_go(tmp_path: Path) -> None:
    Shelf(tmp_path, 16 << 20).close()
    data = make_bytes(1000)
    foreign = [tmp_path / "incoming" / "left", tmp_path / "blobs" / "ab" / ("ab" + "0" * 62)]
    for path in foreign:
        path.write_bytes(data)
        os.utime(path, (1, 1))
    shelf = Shelf(tmp_path, 16 << 20)
    await until(lambda: not any(path.exists() for path in foreign))
    shelf.close()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    with pytest.raises(StoreDown, match="not empty"):
        Shelf(tmp_path, 16 << 20)


@pytest.mark.parametrize("store", ["local:./data", "memory:"])
def test_a_tier_over_what_is_near_is_refused(store: str) -> None:
    with pytest.raises(ConfigError, match="tier is for a store that is far away"):
        load({"store": store, "tier": "folder"}, {})


# Any store


async def test_what_is_not_known_is_elsewhere_and_not_missing(tmp_path: Path) -> None:
    far = MemoryStore()
    tier = TieredStore(far, tmp_path, 16 << 20, valid_s=60)
    with pytest.raises(Elsewhere):
        tier.near.record(b"images/a")
    assert await tier.record(b"images/a") is None
    # What others add is there at once.
    await put(far, b"images/a", b"bytes")
    with pytest.raises(Elsewhere):
        tier.near.record(b"images/a")
    assert await tier.record(b"images/a") == make_record(b"bytes")
    assert tier.near.record(b"images/a") == make_record(b"bytes")
    await tier.close()


async def test_a_change_of_ones_own_is_seen_at_once(tmp_path: Path) -> None:
    tier = TieredStore(MemoryStore(), tmp_path, 16 << 20, valid_s=60)
    for number in range(20):
        before = tier.near.version()
        data = b"bytes %d" % number
        # Beside questions that are on their way.
        await asyncio.gather(tier.record(b"n"), put(tier, b"n", data), tier.record(b"n"))
        assert tier.near.version() != before
        assert await tier.record(b"n") == make_record(data)
        assert tier.near.record(b"n") == make_record(data)
        await asyncio.gather(tier.record(b"n"), tier.unbind([b"n"]))
        with pytest.raises(Elsewhere):
            tier.near.record(b"n")
    await tier.close()


async def test_what_others_change_counts_no_longer_than_was_said(tmp_path: Path) -> None:
    far = MemoryStore()
    tier = TieredStore(far, tmp_path, 16 << 20, valid_s=1)
    await put(tier, b"n", b"old")
    assert tier.near.record(b"n") == make_record(b"old")
    version = tier.near.version()
    await far.unbind([b"n"])
    began_s = time.monotonic()
    with pytest.raises(Elsewhere):
        while True:
            # What was remembered elsewhere of this answer lasts as long as the version.
            asked_s = time.monotonic()
            tier.near.record(b"n")
            assert asked_s - began_s < 1
            await asyncio.sleep(0.01)
    assert tier.near.version() != version
    await tier.close()


class _SlowStore(MemoryStore):
    """One that is asked through a slow network."""

    asked = 0

    async def record(self, name: bytes) -> Record | None:
        self.asked += 1
        await asyncio.sleep(0.2)
        return await super().record(name)


async def test_what_is_in_use_does_not_wait_for_the_store(tmp_path: Path) -> None:
    far = _SlowStore()
    tier = TieredStore(far, tmp_path, 16 << 20, valid_s=3)
    await put(tier, b"n", b"bytes")
    end = time.monotonic() + 3.5
    while time.monotonic() < end:
        # Elsewhere would be raised here.
        assert tier.near.record(b"n") == make_record(b"bytes")
        await asyncio.sleep(0.02)
    assert 2 <= far.asked <= 4
    await tier.close()


async def test_other_bytes_than_those_asked_for_are_not_taken(tmp_path: Path, s3: S3) -> None:
    data, url = make_bytes(50_000), s3.url()
    far = open_store(url)
    await put(far, b"n", data)
    (blob,) = [path for path in (s3.path(url) / "blobs").rglob("*") if path.is_file()]
    blob.write_bytes(data[:-1] + b"?")
    tier = TieredStore(far, tmp_path, 16 << 20)
    with pytest.raises(UvimgError, match="other bytes"):
        await tier.get(digest_of(data))
    blob.write_bytes(data)
    assert await tier.get(digest_of(data)) == data
    await tier.close()


@pytest.mark.parametrize("size", [50_000, 3_000_000])
async def test_equal_fetches_at_once_are_one(tmp_path: Path, s3: S3, network: Network, size: int) -> None:
    data = make_bytes(size)
    far = open_store(s3.url(network.port))
    await put(far, b"n", data)
    tier = TieredStore(far, tmp_path, 64 << 20)
    before = network.received
    contents = await asyncio.gather(*(tier.get(digest_of(data)) for _ in range(10)))
    assert [read(content) for content in contents] == [data] * 10
    assert network.received - before < 1.2 * size
    before = network.received
    await until(lambda: (content := tier.near.get(digest_of(data))) is not None and read(content) == data)
    assert network.received == before
    await tier.close()


# The service


def test_a_node_serves_what_it_knows_while_the_store_is_away(
    start_server: Callable[..., Server], s3: S3, network: Network, tmp_path: Path
) -> None:
    server = start_server(
        store=s3.url(network.port), tier=str(tmp_path / "tier"), tier_valid_s=0.5, store_timeout_s=0.3
    )
    photo = make_photo(1, 400, 300)
    md5 = server.upload(photo)
    rendition = server.get(f"/{md5}?w=100").content
    server.http.put(f"{server.url}/kv/db/key", data=b"value")
    for _ in range(20):
        # Until it is kept, and its rendition has a record.
        server.get(f"/{md5}?w=100")
        time.sleep(0.02)
    server.get("/kv/db/key")
    network.fault = "away"
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert server.get(f"/{md5}?p=0").content == photo
        assert server.get(f"/{md5}?w=100").content == rendition
        assert server.get("/kv/db/key").content == b"value"
        time.sleep(0.02)
    answer = server.http.put(f"{server.url}/kv/db/key", data=b"other")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert server.get("/kv/db/key").content == b"value"
    assert server.get("/kv/db/unknown").status_code == 503
    network.fault = ""
    deadline = time.monotonic() + 2
    while server.http.put(f"{server.url}/kv/db/key", data=b"other").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert server.get("/kv/db/key").content == b"other"


def test_two_nodes_see_what_the_other_one_does(start_server: Callable[..., Server], s3: S3, tmp_path: Path) -> None:
    url = s3.url()
    one, other = (
        start_server(store=url, tier=str(tmp_path / name), tier_valid_s=1, **extra)
        for name, extra in (("one", {}), ("other", {}))
    )
    photo = make_photo(3, 300, 200)
    md5 = one.upload(photo)
    # What is added is there at once, and what is known is not asked for again.
    for _ in range(5):
        assert other.get(f"/{md5}?p=0").content == photo
    one.http.put(f"{one.url}/kv/db/key", data=b"old")
    assert other.get("/kv/db/key").content == b"old"
    assert one.http.delete(f"{one.url}/images/{md5}").status_code == 204
    one.http.put(f"{one.url}/kv/db/key", data=b"new")
    changed_s = time.monotonic()
    assert one.get(f"/{md5}?p=0").status_code == 404
    assert one.get("/kv/db/key").content == b"new"
    while True:
        asked_s = time.monotonic()
        if other.get(f"/{md5}?p=0").status_code == 404 and other.get("/kv/db/key").content == b"new":
            break
        assert asked_s - changed_s < 1
        time.sleep(0.01)


def test_a_rendition_of_the_shared_cache_is_near_too(
    start_server: Callable[..., Server], s3: S3, network: Network, redis_server: Program, tmp_path: Path
) -> None:
    settings = {"store": s3.url(network.port), "cache": f"redis://127.0.0.1:{redis_server.port}"}
    one = start_server(**settings)
    md5 = one.upload(make_photo(5, 400, 300))
    rendition = one.get(f"/{md5}?w=100").content
    other = start_server(**settings, tier=str(tmp_path / "tier"), tier_valid_s=60, cache_size=0)
    for _ in range(3):
        assert other.get(f"/{md5}?w=100").content == rendition
    # Once the folder has it.
    deadline = time.monotonic() + 5
    while (answer := other.get("/metrics").text) and 'uvimg_tier_blobs_total{how="here"} 0' in answer:
        assert time.monotonic() < deadline
        assert other.get(f"/{md5}?w=100").content == rendition
    network.fault = "away"
    assert other.get(f"/{md5}?w=100").content == rendition
    assert 'kind="made"' not in other.get("/metrics").text


def test_the_whole_of_a_large_document_comes_once(
    start_server: Callable[..., Server], s3: S3, network: Network, tmp_path: Path
) -> None:
    url = s3.url(network.port)
    data = make_bytes(5_000_000)
    writer = start_server(store=url, apps=("documents",))
    assert writer.http.put(f"{writer.url}/large.bin", data=data).status_code == 201
    server = start_server(store=url, apps=("documents",), tier=str(tmp_path / "tier"))
    before = network.received
    for start in (0, 1_000_000, 4_999_999, 3_000_000):
        answer = server.get("/large.bin", headers={"Range": f"bytes={start}-"})
        assert (answer.status_code, answer.content) == (206, data[start:])
    assert network.received - before < 1.2 * len(data)
    metrics = server.get("/metrics").text
    assert 'uvimg_tier_blobs_total{how="fetched"} 1.0' in metrics
    assert "uvimg_tier_bytes 5" in metrics
