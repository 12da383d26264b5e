"""Kept renditions coded anew while nobody waits: what becomes smaller, who sees it, and that nothing is done twice."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import corpus
from tests.conftest import Server, decode
from tests.test_intermediates import busy, keep, names, photo, wait_for
from tests.test_metrics import parse_metrics, value
from tests.test_pool import settings as pool_settings
from tests.test_pyramid import PARAMS, SOURCES
from uvimg.apps.originals import Facts
from uvimg.apps.recoding import Recoder
from uvimg.cli import main
from uvimg.core.address import image_name, rendition_name, renditions_prefix
from uvimg.core.errors import BadParameter
from uvimg.core.plan import Rules, Source, make_plan, parse_key
from uvimg.core.recoding import plan_recoding
from uvimg.core.route import Params
from uvimg.imaging.pool import Pool
from uvimg.store import Record
from uvimg.store.memory import MemoryStore

PHOTO = Source("jpeg", 640, 856)

# Deciding


@settings(max_examples=60, deadline=None)
@given(PARAMS, SOURCES, st.integers(1, 1 << 30))
def test_a_key_tells_its_whole_plan(params: Params, source: Source, size: int) -> None:
    if params.original:
        return
    try:
        made = make_plan(params, source, size, Rules())
    except BadParameter:
        return
    assert parse_key(made.key, source, size) == made


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("0123456789x.-cgrbjpegwh "), max_size=40) | st.text(max_size=20))
def test_what_is_no_key_is_no_plan(text: str) -> None:
    plan = parse_key(text, PHOTO, 1000)
    assert plan is None or plan.key == text


@pytest.mark.parametrize(
    ("key", "effort"),
    [
        ("100x134-jpeg75.0", 1),
        ("100x134-c0.17.100.100-g-webp75.2", 6),
        ("100x134-avif50.1", 4),
        ("100x134-png0.6", 9),
        ("640x856-jpeg75.0.bare", 1),
        # As good as it gets, or not worth it.
        ("100x134-jpeg75.1", None),
        ("100x134-webp75.6", None),
        ("100x134-avif50.9", None),
        ("100x134-gif0.3", None),
        # Too much for one job.
        ("2000x2000-avif50.1", None),
        ("2000x2000-webp75.2", 6),
        ("2000x2000x7-webp75.2", None),
        ("100x100-r90.ffffff-s2000x2000-avif50.1", None),
        # No plans.
        ("pyramid-1", None),
        ("0100x134-jpeg75.0", None),
        ("100x134", None),
        ("", None),
    ],
)
def test_what_has_an_encoder_with_more_patience_is_coded_anew(key: str, effort: int | None) -> None:
    plan = plan_recoding(key, PHOTO, 30_000)
    if effort is None:
        assert plan is None
        return
    assert plan is not None
    was = parse_key(key, PHOTO, 30_000)
    assert was is not None
    assert plan.steps[:-1] == was.steps[:-1]
    assert plan.steps[-1] == msgspec.structs.replace(was.steps[-1], effort=effort)


# Doing


def renditions(server: Server, data: bytes) -> dict[str, Record]:
    found = names(server.store, renditions_prefix(hashlib.sha256(data).digest()))
    return {name.rpartition("/")[2]: record for name, record in found.items()}


def counted(server: Server, outcome: str) -> float:
    return value(parse_metrics(server.get("/metrics").text), "uvimg_recoded_total", outcome=outcome)


QUERIES = ("w=200", "w=150&f=webp", "w=100&f=png", "w=90&f=gif", "")


def test_renditions_become_smaller_once_and_stay_the_same_pictures(start_server: Callable[..., Server]) -> None:
    data = corpus.jpeg(corpus.photo(640, 480), 95)
    # Files as well as what lies in the database.
    large = corpus.jpeg(corpus.photo(1000, 800, seed=2), 95)
    server = start_server(workers=1)
    image_id, large_id = server.upload(data), server.upload(large)
    before = {query: server.get(f"/{image_id}?{query}") for query in QUERIES}
    large_before = server.get(f"/{large_id}?w=900&q=95")
    assert len(large_before.content) > 65_536
    assert server.stop() == 0
    records = renditions(server, data)
    server = start_server(recode=True, processes=2)
    # In the caches as they were, unless it has been quick.
    for query in QUERIES:
        assert server.get(f"/{image_id}?{query}").status_code == 200
    server.get(f"/{large_id}?w=900&q=95")
    wait_for(lambda: counted(server, "smaller") + counted(server, "left") >= 5)
    found = renditions(server, data)
    assert found.keys() == records.keys()
    assert sum(record.size for record in found.values()) < sum(record.size for record in records.values())
    for query in QUERIES:
        answers = [server.get(f"/{image_id}?{query}") for _ in range(4)]
        after, was = answers[0], before[query]
        assert {answer.content for answer in answers} == {after.content}
        assert len(after.content) <= len(was.content)
        assert (after.headers["ETag"] == was.headers["ETag"]) == (after.content == was.content)
        assert after.headers["Content-Type"] == was.headers["Content-Type"]
        image, wanted = decode(after.content), decode(was.content)
        assert (image.width, image.height, image.bands) == (wanted.width, wanted.height, wanted.bands)
        assert abs(image.avg() - wanted.avg()) < 2
    assert len(server.get(f"/{image_id}?w=200").content) < len(before["w=200"].content) * 0.95
    assert len(server.get(f"/{large_id}?w=900&q=95").content) < len(large_before.content)
    assert value(parse_metrics(server.get("/metrics").text), "uvimg_recoded_saved_bytes_total") > 0
    assert server.stop() == 0
    assert "bytes smaller" in server.log
    # The old blobs are gone.
    blobs = {record.digest for record in names(server.store).values() if record.size > 65_536}
    assert len([path for path in (server.store / "blobs").rglob("*") if path.is_file()]) == len(blobs)
    assert main(["scrub", f"--store=local:{server.store}"]) == 0


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    running = Pool(pool_settings(workers=1))
    await running.start()
    yield running
    await running.stop()


async def test_it_waits_for_idle_workers_does_nothing_twice_and_keeps_nothing_of_what_is_deleted(pool: Pool) -> None:
    data = photo(12, 600, 400)
    digest = hashlib.sha256(data).digest()
    store = MemoryStore()
    facts = msgspec.msgpack.encode(Facts("", Source("jpeg", 600, 400)))
    await keep(store, image_name(digest.hex()), data, facts)
    name = rendition_name(digest, "600x400-jpeg75.0")
    before = await keep(store, name, corpus.jpeg(decode(data), 75))
    recoder = Recoder(store, pool)
    async with busy(pool):
        given = sum(pool.given.values())
        walking = asyncio.create_task(recoder.walk())
        done, _ = await asyncio.wait([walking], timeout=0.5)
        assert not done
        assert sum(pool.given.values()) == given
    await walking
    after = await store.record(name)
    assert after is not None
    assert after.size < before.size
    assert (recoder.counts.smaller, recoder.counts.saved_bytes) == (1, before.size - after.size)
    assert await store.get(before.digest) is None
    given = sum(pool.given.values())
    await recoder.walk()
    assert await store.record(name) == after
    assert sum(pool.given.values()) == given
    # Deleted as soon as the job has begun.
    other = rendition_name(digest, "590x393-jpeg75.0")
    await keep(store, other, corpus.jpeg(decode(data).thumbnail_image(590), 75))
    walking = asyncio.create_task(recoder.walk())
    while sum(pool.given.values()) == given:
        await asyncio.sleep(0.001)
    # In the order in which the app does it.
    await store.unbind([image_name(digest.hex())])
    await store.unbind([name, other])
    await walking
    assert not await store.scan(b"")
    assert await store.size() == 0
    assert recoder.counts.smaller == 1
