"""Reduced versions of large originals: made aside, used, bounded, and never the cause of a wrong answer."""

import asyncio
import contextlib
import hashlib
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pyvips
import requests

from bench import corpus
from tests.conftest import Server, decode
from tests.test_metrics import parse_metrics, value
from tests.test_pool import settings as pool_settings
from uvimg.apps.intermediates import Intermediates
from uvimg.cli import main
from uvimg.core.address import blob_path, image_name, rendition_name, renditions_prefix
from uvimg.core.errors import StoreFull
from uvimg.core.plan import Encode, Load, Plan, Source
from uvimg.core.pyramid import PyramidRules
from uvimg.imaging import Render
from uvimg.imaging.pool import Pool
from uvimg.store import Record, Store
from uvimg.store.local import LocalStore
from uvimg.store.memory import MemoryStore

# Everything that is asked for is made, each time.
NOTHING_KEPT: dict[str, Any] = {"save_new": 0, "cache_size": 0, "memo_size": 0, "workers": 1}
SMALL = {"intermediates_from": 100_000}


def names(store: Path, prefix: bytes = b"") -> dict[str, Record]:
    """What the store of a server, running or not, has under this prefix."""

    async def scan() -> dict[str, Record]:
        opened = LocalStore(str(store), create=False)
        try:
            return {name.decode(): record for name, record in await opened.scan(prefix)}
        finally:
            await opened.close()

    return asyncio.run(scan())


def levels(server: Server, data: bytes) -> dict[str, Record]:
    prefix = renditions_prefix(hashlib.sha256(data).digest()) + b"pyramid-"
    return {name.rpartition("/")[2]: record for name, record in names(server.store, prefix).items()}


def blob(server: Server, record: Record) -> bytes:
    async def read() -> bytes:
        opened = LocalStore(str(server.store), create=False)
        try:
            content = await opened.get(record.digest)
            assert content is not None
            if isinstance(content, bytes):
                return content
            with content.file as file:
                return file.read()
        finally:
            await opened.close()

    return asyncio.run(read())


def counted(server: Server, name: str) -> float:
    return value(parse_metrics(server.get("/metrics").text), f"uvimg_intermediates_{name}_total")


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def photo(seed: int = 1, width: int = 1200, height: int = 900, **options: Any) -> bytes:
    return corpus.jpeg(corpus.photo(width, height, seed=seed), 90, **options)


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Keeps intermediates and nothing else."""
    running = Server(tmp_path_factory.mktemp("keeper"), **NOTHING_KEPT, **SMALL)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Makes everything of the original."""
    running = Server(tmp_path_factory.mktemp("plain"), **NOTHING_KEPT, intermediates_from=0)
    yield running
    running.kill()


def have_levels(server: Server, data: bytes) -> str:
    """Upload, and wait for the smallest level, which comes last; the id."""
    image_id = server.upload(data)
    server.image(f"/{image_id}?w=50")
    wait_for(lambda: bool(levels(server, data)))
    return image_id


# What they are


def wide_gamut() -> bytes:
    image = corpus.photo(1200, 900).icc_transform("p3", input_profile="srgb")
    return corpus.jpeg(corpus.oriented(image, 6), 90, keep="icc|exif")


def inks() -> bytes:
    return corpus.jpeg(corpus.photo(1200, 900).icc_transform("cmyk", input_profile="srgb"), 90, keep="icc")


@pytest.mark.parametrize(
    ("make", "size", "bands"),
    [
        (photo, (600, 450), 3),
        (wide_gamut, (450, 600), 3),
        (inks, (600, 450), 3),
        (lambda: corpus.jpeg(corpus.photo(1201, 901).colourspace("b-w")), (600, 450), 1),
    ],
)
def test_a_level_is_an_upright_jpeg_in_srgb_or_gray_with_whole_chroma_and_no_metadata(
    keeper: Server, plain: Server, make: Callable[[], bytes], size: tuple[int, int], bands: int
) -> None:
    data = make()
    image_id = have_levels(keeper, data)
    found = levels(keeper, data)
    assert list(found) == ["pyramid-1", "pyramid-2"]
    for shift, record in enumerate(found.values()):
        image = decode(blob(keeper, record))
        assert record.type == "image/jpeg"
        assert (image.width, image.height, image.bands) == (size[0] >> shift, size[1] >> shift, bands)
        assert image.get("jpeg-chroma-subsample") == "4:4:4"
        assert not {"exif-data", "icc-profile-data", "xmp-data"} & set(image.get_fields())
    before = counted(keeper, "used")
    plain.upload(data)
    for query in ("w=110&h=90", "w=200&r=90", "w=100&g=1", "w=90&h=90&p=0&f=webp"):
        made, direct = (server.image(f"/{image_id}?{query}") for server in (keeper, plain))
        assert (made.width, made.height, made.bands) == (direct.width, direct.height, direct.bands)
        assert psnr(made, direct) > 33, query
    assert counted(keeper, "used") == before + 4


# Quality


def psnr(image: Any, wanted: Any) -> float:
    difference = image.cast("float") - wanted.cast("float")
    return 10 * math.log10(65_025 / max(1e-6, (difference * difference).avg()))


@pytest.mark.parametrize("draw", [corpus.photo, corpus.text, corpus.line_art])
def test_a_rendition_of_a_level_is_as_true_as_libvips_thumbnail_of_the_original(
    keeper: Server, draw: Callable[..., Any]
) -> None:
    data = corpus.jpeg(draw(1637, 1331), 90)
    whole = decode(data).copy_memory()
    image_id = have_levels(keeper, data)
    before = counted(keeper, "used")
    # Just below half of a level, and far below it.
    codings = (75, "jpeg"), (85, "jpeg"), (75, "webp")
    queries = [(width, *coding) for width in (100, 204, 400) for coding in codings]
    for width, quality, format in queries:
        made = keeper.image(f"/{image_id}?w={width}&q={quality}&f={format}")
        thumbnail = pyvips.Image.thumbnail_buffer(data, made.width, height=made.height, size="force").copy_memory()
        coded = decode(getattr(thumbnail, f"{format}save_buffer")(Q=quality))
        wanted = whole.resize(made.width / whole.width, vscale=made.height / whole.height, kernel="lanczos3")
        assert (wanted.width, wanted.height) == (made.width, made.height)
        assert psnr(made, wanted) > psnr(coded, wanted) - 0.3, (width, quality, format)
    assert counted(keeper, "used") == before + len(queries)


def test_what_would_show_the_loss_is_not_made_of_a_level(keeper: Server) -> None:
    image_id = have_levels(keeper, photo(2))
    before = counted(keeper, "used")
    for query in ("w=100&f=png", "w=100&q=90", "w=500", "w=100&p=2", "x=5&y=5&w=50&h=50", "", "w=2000"):
        keeper.image(f"/{image_id}?{query}")
    assert counted(keeper, "used") == before


def test_a_rendition_has_the_name_that_it_has_without_them(start_server: Callable[..., Server]) -> None:
    data = photo(3)
    server = start_server(**SMALL, workers=1)
    image_id = have_levels(server, data)
    server.image(f"/{image_id}?w=100&h=100")
    assert counted(server, "used") == 1
    assert server.stop() == 0
    kept = names(server.store, renditions_prefix(hashlib.sha256(data).digest()))
    assert {name.rpartition("/")[2] for name in kept} == {
        *("pyramid-1", "pyramid-2", "50x38-jpeg75.0", "133x100-c16.0.100.100-jpeg75.0"),
    }


# Bounds


def test_only_what_has_room_is_kept(start_server: Callable[..., Server]) -> None:
    data = photo(4)
    server = start_server(**NOTHING_KEPT, **SMALL, intermediates_percent=20)
    image_id = have_levels(server, data)
    assert list(levels(server, data)) == ["pyramid-2"]
    assert sum(record.size for record in levels(server, data).values()) <= len(data) * 0.2
    server.image(f"/{image_id}?w=280")
    assert counted(server, "used") == 0
    server.image(f"/{image_id}?w=140")
    assert counted(server, "used") == 1


def test_what_has_no_room_is_made_once_and_not_again(start_server: Callable[..., Server]) -> None:
    data = photo(5)
    server = start_server(**NOTHING_KEPT, **SMALL, intermediates_percent=1)
    image_id = server.upload(data)
    for width in range(50, 60):
        server.image(f"/{image_id}?w={width}")
        wait_for(lambda: counted(server, "failed") == 1)
    jobs = value(parse_metrics(server.get("/metrics").text), "uvimg_jobs_total")
    assert jobs == 1 + 10 + 2
    assert not levels(server, data)


def test_they_can_be_switched_off(plain: Server) -> None:
    data = photo(6)
    image_id = plain.upload(data)
    for width in (50, 60):
        plain.image(f"/{image_id}?w={width}")
    assert counted(plain, "made") == counted(plain, "used") == 0
    assert not levels(plain, data)


# What may happen to them


def test_a_damaged_level_is_not_used_and_made_anew(start_server: Callable[..., Server], plain: Server) -> None:
    server = start_server(**NOTHING_KEPT, **SMALL)
    originals = {damage: photo(seed, 1600, 1200) for seed, damage in enumerate(("changed", "lost"), 70)}
    ids = {damage: have_levels(server, data) for damage, data in originals.items()}
    assert server.stop() == 0
    wholes = {}
    for damage, data in originals.items():
        path = server.store / "blobs" / blob_path(levels(server, data)["pyramid-1"].digest)
        wholes[path] = whole = path.read_bytes()
        if damage == "changed":
            path.write_bytes(whole[:30_000] + bytes(5_000) + whole[35_000:])
        else:
            path.unlink()
    assert main(["scrub", f"--store=local:{server.store}"]) == 1
    server = start_server(**NOTHING_KEPT, **SMALL)
    for damage, data in originals.items():
        plain.upload(data)
        query = f"/{ids[damage]}?w=350"
        assert server.get(query).content == plain.get(query).content
    wait_for(lambda: all(path.exists() and path.read_bytes() == whole for path, whole in wholes.items()))
    wait_for(lambda: all(len(levels(server, data)) == 2 for data in originals.values()))
    assert counted(server, "used") == 0
    for image_id in ids.values():
        server.image(f"/{image_id}?w=351")
    assert counted(server, "used") == 2
    assert main(["scrub", f"--store=local:{server.store}"]) == 0
    assert "will be made anew" in server.log


def test_they_go_with_their_original_and_come_again_with_it(keeper: Server) -> None:
    data = photo(8)
    for _ in range(2):
        image_id = have_levels(keeper, data)
        assert keeper.http.delete(f"{keeper.url}/images/{image_id}").status_code == 204
        assert not levels(keeper, data)


def test_none_is_left_of_originals_deleted_while_theirs_were_made(start_server: Callable[..., Server]) -> None:
    server = start_server(**NOTHING_KEPT, **SMALL)
    for seed in range(8):
        image_id = server.upload(photo(20 + seed, 700, 500))
        server.image(f"/{image_id}?w=50")
        # So that it comes between other two steps each time.
        time.sleep(seed * 0.003)
        assert server.http.delete(f"{server.url}/images/{image_id}").status_code == 204
    assert server.stop() == 0
    assert not names(server.store)


def test_a_service_killed_in_the_middle_makes_them_the_next_time(start_server: Callable[..., Server]) -> None:
    data = photo(9)
    server = start_server(**NOTHING_KEPT, **SMALL)
    image_id = server.upload(data)
    server.image(f"/{image_id}?w=50")
    server.kill()
    server = start_server(**NOTHING_KEPT, **SMALL)
    server.image(f"/{image_id}?w=51")
    wait_for(lambda: list(levels(server, data)) == ["pyramid-1", "pyramid-2"])
    assert main(["scrub", f"--store=local:{server.store}"]) == 0


def test_two_processes_that_make_the_same_ones_keep_them_once(start_server: Callable[..., Server]) -> None:
    data = photo(10)
    server = start_server(**NOTHING_KEPT, **SMALL, processes=2)
    image_id = server.upload(data)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda width: requests.get(f"{server.url}/{image_id}?w={width}"), range(40, 56)))
    assert {answer.status_code for answer in answers} == {200}
    wait_for(lambda: list(levels(server, data)) == ["pyramid-1", "pyramid-2"])
    assert server.stop() == 0
    assert len(names(server.store)) == 4
    assert main(["scrub", f"--store=local:{server.store}"]) == 0
    assert main(["gc", f"--store=local:{server.store}"]) == 0


async def test_a_store_that_was_full_for_a_while_has_them_once_it_has_room(pool: Pool) -> None:
    class Full(MemoryStore):
        has_room = False

        async def bind(self, *args: Any, **options: Any) -> Any:
            if not self.has_room:
                raise StoreFull
            return await super().bind(*args, **options)

    data, store, source = photo(12, 600, 400), Full(), Source("jpeg", 600, 400)
    store.has_room = True
    original = await keep(store, image_name(hashlib.sha256(data).hexdigest()), data)
    store.has_room = False
    intermediates = Intermediates(PyramidRules(min_pixels=1), store, pool)
    async with asyncio.timeout(20):
        intermediates.want(original, source)
        while not intermediates.counts.failed:
            await asyncio.sleep(0.01)
        store.has_room = True
        while not intermediates.counts.made:
            intermediates.want(original, source)
            await asyncio.sleep(0.01)
    await intermediates.stop()


# Not under load


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    running = Pool(pool_settings(workers=1))
    await running.start()
    yield running
    await running.stop()


async def keep(store: Store, name: bytes, data: bytes, facts: bytes = b"") -> Record:
    """Bind a name to these bytes of a JPEG."""
    record = Record(hashlib.sha256(data).digest(), len(data), "image/jpeg", 0, facts)
    async with store.incoming() as incoming:
        await incoming.write(data)
        await incoming.finish()
        await store.bind([name], record, incoming)
    return record


@contextlib.asynccontextmanager
async def busy(pool: Pool) -> AsyncIterator[None]:
    """While this lasts the only worker has a job."""
    (worker,) = pool.pids
    os.kill(worker, signal.SIGSTOP)
    plan = Plan((Load(50, 33, 1, managed=False, gray=False), Encode("jpeg", 75, 0)))
    given = sum(pool.given.values())
    job = asyncio.create_task(pool.run(Render("jpeg", plan), photo(1, 60, 40), "uploads"))
    while sum(pool.given.values()) == given:
        await asyncio.sleep(0.001)
    yield
    os.kill(worker, signal.SIGCONT)
    await job


async def test_none_is_made_while_the_workers_have_something_else_to_do(pool: Pool) -> None:
    data = photo(11, 600, 400)
    store, source = MemoryStore(), Source("jpeg", 600, 400)
    original = await keep(store, image_name(hashlib.sha256(data).hexdigest()), data)
    intermediates = Intermediates(PyramidRules(min_pixels=1), store, pool)
    async with busy(pool):
        for _ in range(100):
            intermediates.want(original, source)
        await asyncio.sleep(0)
        # All of them are one job, and that waits.
        assert pool.waiting <= 1
        assert intermediates.counts.made == 0
    async with asyncio.timeout(10):
        while await store.record(rendition_name(original.digest, "pyramid-1")) is None:
            await asyncio.sleep(0.01)
    plan = Plan((Load(50, 33, 1, managed=False, gray=False), Encode("jpeg", 75, 0)))
    start = await intermediates.find(original, source, plan)
    assert start is not None
    assert start.source.upright_size == (300, 200)
    assert intermediates.counts.made == 1
    await intermediates.stop()
