"""One contract, every backend."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.backends import list_memcached
from uvimg.core.errors import NotFound, NotImplementedHere, UvimgError
from uvimg.core.message import Content, FilePart
from uvimg.store import SMALL_BLOB_BYTES, Finding, Record, Store, open_store
from uvimg.store.memcached import MemcachedStore
from uvimg.store.objects import ObjectStore
from uvimg.store.tier import TieredStore

SIZES = [1, 1000, SMALL_BLOB_BYTES, SMALL_BLOB_BYTES + 1, 1_500_000]


# Stores that can list and count what they hold, and those that say they cannot.
LISTING = ["local", "memory", "redis", "redis+cluster", "s3", "tier"]
BLIND = ["memcached"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = any(mark.args[0] == "store_url" for mark in metafunc.definition.iter_markers("parametrize"))
    if "store" in metafunc.fixturenames and not chosen:
        metafunc.parametrize("store_url", [*LISTING, *BLIND], indirect=True)


@pytest.fixture
async def store(store_url: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    # Long enough for a machine that is busy with other tests.
    opened = open_store(store_url, timeout_s=10)
    if request.node.callspec.params["store_url"] == "tier":
        opened = TieredStore(opened, tmp_path / "tier", 64 << 20)
    yield opened
    await opened.close()


async def tidy(store: Store) -> None:
    """Have removed what nobody names, where the store leaves that to gc."""
    if isinstance(store, ObjectStore):
        store.grace_s = 0.0
        async for _ in store.collect():
            pass


async def count_blobs(store: Store) -> int:
    """Of those that are named."""
    await tidy(store)
    if not isinstance(store, MemcachedStore):
        return await store.size()
    keys = [key for guard in store.guards for key in list_memcached(int(guard.name.rpartition(":")[2]))]
    blobs = sum(key.startswith("uvimg1:b:") for key in keys)
    # No chunk is left behind.
    assert blobs or not any(key.startswith("uvimg1:c:") for key in keys)
    return blobs


async def find_names(store: Store, *names: bytes) -> list[bytes]:
    """Those that have a record."""
    return [name for name in names if await store.record(name) is not None]


async def find_damage(store: Store) -> list[Finding]:
    """What a scrub finds, where there is one."""
    if isinstance(store, MemcachedStore):
        return []
    return [finding async for finding in store.scrub() if finding.note]


def make_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(f"{size} {seed}").randbytes(size)


def make_record(data: bytes, facts: bytes = b"") -> Record:
    return Record(hashlib.sha256(data).digest(), len(data), "image/jpeg", 1_800_000_000, facts)


async def put(store: Store, name: bytes, data: bytes, *, replace: bool = True, facts: bytes = b"") -> Record | None:
    async with store.incoming() as incoming:
        for start in range(0, len(data), 70_000):
            await incoming.write(data[start : start + 70_000])
        assert await incoming.finish() == hashlib.sha256(data).digest()
        (bound,) = await store.bind([name], make_record(data, facts), incoming, replace=replace)
        return bound


async def get(store: Store, data: bytes) -> bytes | None:
    """The blob with the digest of `data`, read the slow way and, where there is one, the fast way."""
    digest = hashlib.sha256(data).digest()
    found = _read(await store.get(digest))
    if store.near is not None:
        near = _read(store.near.get(digest))
        # A tier may have given it up or not have it yet; or it has come there while it was deleted.
        assert near == found or isinstance(store, TieredStore)
        assert near in (None, data)
    return found


async def is_gone(store: Store, data: bytes) -> bool:
    """Whether its bytes cannot be had. What was on its way into a tier when it was deleted may stay there, unnamed."""
    return isinstance(store, TieredStore) or await get(store, data) is None


def _read(content: Content | None) -> bytes | None:
    if isinstance(content, FilePart):
        with content.file as file:
            file.seek(content.start)
            data = file.read(content.size)
            assert isinstance(data, bytes)
            return data
    return content


@pytest.mark.parametrize("size", SIZES)
async def test_what_was_put_in_comes_back(store: Store, size: int) -> None:
    data = make_bytes(size)
    record = await put(store, b"images/a", data, facts=b"facts")
    assert record == make_record(data, b"facts")
    assert await store.record(b"images/a") == record
    assert await get(store, data) == data


@pytest.mark.parametrize("size", SIZES)
async def test_equal_bytes_are_kept_once_until_their_last_name_goes(store: Store, size: int) -> None:
    data = make_bytes(size)
    await put(store, b"a", data)
    await put(store, b"b", data)
    assert await count_blobs(store) == 1
    assert await store.unbind([b"a"]) == [make_record(data)]
    assert await get(store, data) == data
    assert await store.unbind([b"b"]) == [make_record(data)]
    async with asyncio.timeout(5):
        # A large blob goes in a second step behind the answer.
        while await count_blobs(store) or not await is_gone(store, data):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("size", SIZES)
async def test_what_nobody_bound_leaves_nothing(store: Store, size: int, tmp_path: Path) -> None:
    data = make_bytes(size)
    async with store.incoming() as incoming:
        await incoming.write(data)
        await incoming.finish()
        assert _read(incoming.content()) == data
        assert await get(store, data) is None
    assert await count_blobs(store) == 0
    assert [path for path in tmp_path.rglob("incoming/*") if path.is_file()] == []


async def test_a_name_that_is_there_stays_when_it_is_not_to_be_replaced(store: Store) -> None:
    first, second = make_bytes(100, 1), make_bytes(100_000, 2)
    await put(store, b"name", first)
    assert await put(store, b"name", second, replace=False) == make_record(first)
    assert await store.record(b"name") == make_record(first)
    assert await get(store, second) is None
    assert await count_blobs(store) == 1


@pytest.mark.parametrize(("old", "new"), [(10, 20), (10, 100_000), (100_000, 10), (100_000, 200_000)])
async def test_a_replaced_blob_goes_and_the_new_one_is_there(store: Store, old: int, new: int) -> None:
    await put(store, b"name", make_bytes(old))
    await put(store, b"name", make_bytes(new))
    assert await get(store, make_bytes(new)) == make_bytes(new)
    async with asyncio.timeout(5):
        while await count_blobs(store) != 1 or not await is_gone(store, make_bytes(old)):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("size", [10, 100_000])
async def test_binding_the_same_again_changes_nothing(store: Store, size: int) -> None:
    data = make_bytes(size)
    for _ in range(3):
        await put(store, b"name", data)
    assert await store.unbind([b"name"]) == [make_record(data)]
    assert await store.unbind([b"name"]) == [None]


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_second_name_needs_no_second_blob(store: Store, size: int) -> None:
    data = make_bytes(size)
    assert await store.bind([b"b"], make_record(data)) == [None]
    assert await store.record(b"b") is None
    await put(store, b"a", data)
    assert await store.bind([b"b"], make_record(data)) == [make_record(data)]
    await store.unbind([b"a"])
    assert await get(store, data) == data


async def test_both_names_of_one_upload_can_be_bound_at_once(store: Store) -> None:
    data = make_bytes(100_000)
    async with store.incoming() as incoming:
        await incoming.write(data)
        await incoming.finish()
        record = make_record(data)
        assert await store.bind([b"x", b"y"], record, incoming) == [record, record]
    await store.unbind([b"x"])
    assert await get(store, data) == data


async def test_names_are_taken_away_only_from_the_blob_that_is_meant(store: Store) -> None:
    ours, theirs = make_bytes(80_000, 1), make_bytes(80_000, 2)
    await put(store, b"a", ours)
    await put(store, b"b", theirs)
    assert await store.unbind([b"a", b"b", b"c"], make_record(ours).digest) == [make_record(ours), None, None]
    assert await find_names(store, b"a", b"b", b"c") == [b"b"]


async def test_uploads_and_deletes_at_once_leave_both_names_or_none(store: Store) -> None:
    data = make_bytes(70_000)
    names = [b"images/sha256", b"images/md5"]

    async def upload() -> None:
        async with store.incoming() as incoming:
            await incoming.write(data)
            await incoming.finish()
            await store.bind(names, make_record(data), incoming, replace=False)

    for _ in range(30):
        tasks = [upload(), store.unbind(names, make_record(data).digest), upload()]
        await asyncio.gather(*tasks, store.unbind(names, make_record(data).digest))
        records = [await store.record(name) for name in names]
        assert records in ([None, None], [make_record(data)] * 2)
        assert (records[0] is None) or await get(store, data) == data
    assert await find_damage(store) == []


async def test_a_blob_that_lost_its_name_is_not_bound_again_without_its_bytes(store: Store) -> None:
    data = make_bytes(100_000)
    async with store.incoming() as incoming:
        await incoming.write(data)
        await incoming.finish()
        await store.bind([b"a"], make_record(data), incoming)
        await store.unbind([b"a"])
        (bound,) = await store.bind([b"b"], make_record(data), incoming)
        assert (bound is not None) == (await get(store, data) == data)


async def test_watch_sees_every_byte_in_order(store: Store) -> None:
    data = make_bytes(1_500_000)
    md5 = hashlib.md5()
    async with store.incoming(md5.update) as incoming:
        for start in range(0, len(data), 100_001):
            await incoming.write(data[start : start + 100_001])
        await incoming.finish()
    assert md5.digest() == hashlib.md5(data).digest()


@pytest.mark.parametrize("store_url", LISTING, indirect=True)
async def test_scan_gives_names_in_order_and_in_pages(store: Store) -> None:
    names = [b"a/%03d" % number for number in range(25)] + [b"a0", b"b/1", b"a", b"a/\xff", b"a/\x00"]
    await asyncio.gather(*(put(store, name, name) for name in names))
    wanted = sorted(name for name in names if name.startswith(b"a/"))
    found: list[bytes] = []
    while page := await store.scan(b"a/", found[-1] if found else b"", limit=10):
        assert len(page) <= 10
        found += [name for name, _ in page]
    assert found == wanted
    assert await store.scan(b"c") == []
    assert (await store.scan(b"b/"))[0][1] == make_record(b"b/1")


@pytest.mark.parametrize("store_url", LISTING, indirect=True)
async def test_scan_goes_backward_too(store: Store) -> None:
    names = [b"a/%03d" % number for number in range(25)] + [b"a/", b"a0", b"b/1", b"a/\xff\xff", b"a/\x00", b"0"]
    await asyncio.gather(*(put(store, name, name) for name in names))
    wanted = sorted((name for name in names if name.startswith(b"a/")), reverse=True)
    found: list[bytes] = []
    while page := await store.scan(b"a/", found[-1] if found else b"", limit=10, backward=True):
        assert len(page) <= 10
        found += [name for name, _ in page]
    assert found == wanted
    assert [name for name, _ in await store.scan(b"a/", b"a/0135", limit=2, backward=True)] == [b"a/013", b"a/012"]
    assert await store.scan(b"a/", b"a/", backward=True) == []
    assert await store.scan(b"c", backward=True) == []
    assert (await store.scan(b"", backward=True, limit=1))[0][0] == b"b/1"


@pytest.mark.parametrize("store_url", BLIND, indirect=True)
async def test_a_store_that_cannot_list_says_so(store: Store) -> None:
    await put(store, b"a", b"a")
    for asked in (store.scan(b""), store.counts(b"", 0), store.size(), anext(store.scrub()), anext(store.collect())):
        with pytest.raises(NotImplementedHere, match="cannot list"):
            await asked
    assert await store.sweep(1) == 0
    assert store.measure() is None


def make_value(data: bytes, expires_s: int = 0) -> Record:
    """A record that holds its bytes itself."""
    digest = hashlib.sha256(data).digest()
    return Record(digest, len(data), "text/plain", 1_800_000_000, expires_s=expires_s, inline=data)


async def set_value(store: Store, name: bytes, data: bytes, expires_s: int = 0) -> None:
    await store.change([name], lambda _, old: make_value(data, expires_s))


async def test_an_inline_record_has_no_blob(store: Store) -> None:
    await set_value(store, b"kv/d/k", b"value")
    assert await store.record(b"kv/d/k") == make_value(b"value")
    assert await count_blobs(store) == 0
    assert await store.change([b"kv/d/k"], lambda _, old: None) == [(make_value(b"value"), None)]
    assert await store.record(b"kv/d/k") is None
    assert await find_damage(store) == []


async def test_increments_at_once_are_all_counted(store: Store) -> None:
    def increment(_: bytes, old: Record | None) -> Record:
        return make_value(b"%d" % (1 + int((old and old.inline) or 0)))

    changed = await asyncio.gather(*(store.change([b"kv/d/n"], increment) for _ in range(200)))
    assert sorted(int(new.inline or 0) for ((_, new),) in changed if new) == list(range(1, 201))


async def test_a_refused_change_does_nothing_and_fails_nobody_elses(store: Store) -> None:
    def refuse_second(name: bytes, old: Record | None) -> Record:
        if name == b"kv/d/b":
            raise NotFound("not this one")
        return make_value(b"new")

    refused = store.change([b"kv/d/a", b"kv/d/b"], refuse_second)
    outcomes = await asyncio.gather(refused, set_value(store, b"kv/d/c", b"c"), return_exceptions=True)
    assert isinstance(outcomes[0], NotFound)
    assert await find_names(store, b"kv/d/a", b"kv/d/b", b"kv/d/c") == [b"kv/d/c"]


@pytest.mark.parametrize("store_url", LISTING, indirect=True)
async def test_a_refused_change_counts_for_nothing(store: Store) -> None:
    def refuse(_: bytes, old: Record | None) -> Record:
        raise NotFound("not this one")

    with pytest.raises(NotFound):
        await store.change([b"kv/d/a"], refuse)
    await set_value(store, b"kv/d/c", b"c")
    assert await store.counts(b"kv/", 0) == {b"kv/d/": 1}


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_change_brings_its_blob_along_and_takes_the_last_one_away(store: Store, size: int) -> None:
    for seed in (1, 2):
        data = make_bytes(size, seed)
        async with store.incoming() as incoming:
            await incoming.write(data)
            await incoming.finish()
            await store.change([b"kv/d/k"], lambda _, old, data=data: make_record(data), incoming)  # type: ignore[misc]
        assert await get(store, data) == data
    same = make_record(make_bytes(size, 2), b"new facts")
    await store.change([b"kv/d/k", b"kv/d/l"], lambda _, old: same)
    assert await get(store, make_bytes(size, 2)) == make_bytes(size, 2)
    with pytest.raises(UvimgError, match="no blob"):
        await store.change([b"kv/d/k"], lambda _, old: make_record(make_bytes(size, 1)))
    await store.change([b"kv/d/k", b"kv/d/l"], lambda _, old: make_value(b""))
    async with asyncio.timeout(5):
        while await count_blobs(store):
            await asyncio.sleep(0.001)
    assert await find_damage(store) == []


@pytest.mark.parametrize("store_url", LISTING, indirect=True)
async def test_counts_know_groups_and_what_has_expired(store: Store) -> None:
    await put(store, b"images/x", b"x")
    for number in range(10):
        await set_value(store, b"kv/a/%d" % number, b"", 100 + number % 2)
        await set_value(store, b"kv/b/%d" % number, b"")
    await set_value(store, b"kv/b/1", b"again", 100)
    assert await store.counts(b"kv/", 99) == {b"kv/a/": 10, b"kv/b/": 10}
    assert await store.counts(b"kv/", 100) == {b"kv/a/": 5, b"kv/b/": 9}
    assert await store.counts(b"kv/b/", 101) == {b"kv/b/": 9}
    await set_value(store, b"kv/b/1", b"for ever")
    assert await store.counts(b"kv/", 101) == {b"kv/b/": 10}


@pytest.mark.parametrize("store_url", LISTING, indirect=True)
async def test_sweeping_takes_what_has_expired_in_steps_and_nothing_else(store: Store) -> None:
    for number in range(25):
        await set_value(store, b"kv/a/%02d" % number, b"", 100 + number)
    await set_value(store, b"kv/a/kept", b"")
    await set_value(store, b"kv/a/03", b"prolonged", 1000)
    assert await store.sweep(99) == 0
    assert [await store.sweep(120, limit=8) for _ in range(4)] == [8, 8, 4, 0]
    left = [name for name, _ in await store.scan(b"kv/")]
    assert left == [b"kv/a/03", b"kv/a/21", b"kv/a/22", b"kv/a/23", b"kv/a/24", b"kv/a/kept"]
    assert await store.counts(b"kv/", 120) == {b"kv/a/": 6}
    assert await store.sweep(2000) == 5
    assert await store.counts(b"kv/", 2000) == {b"kv/a/": 1}
    await store.sync()


async def test_three_hundred_writes_at_once_are_all_there(store: Store) -> None:
    async def put_one(number: int) -> None:
        await put(store, b"n/%d" % number, make_bytes(90_000 if number % 10 == 0 else 50, number % 50))

    await asyncio.gather(*(put_one(number) for number in range(300)))
    assert len(await find_names(store, *(b"n/%d" % number for number in range(300)))) == 300
    assert await count_blobs(store) == 50
    assert await find_damage(store) == []
    if not isinstance(store, MemcachedStore):
        assert [finding async for finding in store.collect()] == []


async def test_random_changes_leave_what_a_dictionary_would_hold(store: Store) -> None:
    chance = random.Random(4869)
    model: dict[bytes, bytes] = {}
    # Where each is some ways to a server, a quarter of them.
    for _ in range(100 if isinstance(store, ObjectStore) else 400):
        name, data = b"m/%d" % chance.randrange(12), make_bytes(chance.choice((5, 70_000)), chance.randrange(6))
        match chance.randrange(4):
            case 0:
                expected = model.pop(name, None)
                (found,) = await store.unbind([name])
                assert (found and found.digest) == (expected and hashlib.sha256(expected).digest())
            case 1:
                await put(store, name, data, replace=False)
                model.setdefault(name, data)
            case 2:
                if await store.bind([name], make_record(data)) != [None]:
                    assert data in model.values()
                    model[name] = data
            case _:
                await put(store, name, data)
                model[name] = data
    for name in (b"m/%d" % number for number in range(12)):
        record = await store.record(name)
        assert (record and record.digest) == (hashlib.sha256(model[name]).digest() if name in model else None)
    assert await count_blobs(store) == len(set(model.values()))
    for data in model.values():
        assert await get(store, data) == data
    assert await find_damage(store) == []


async def test_a_cancelled_upload_leaves_nothing(store: Store, tmp_path: Path) -> None:
    writing = asyncio.Event()

    async def upload() -> None:
        async with store.incoming() as incoming:
            while True:
                await incoming.write(bytes(300_000))
                writing.set()
                await asyncio.sleep(0)

    task = asyncio.create_task(upload())
    await writing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await count_blobs(store) == 0
    assert [path for path in tmp_path.rglob("incoming/*") if path.is_file()] == []


@pytest.mark.parametrize("url", ["", "local", "local:", "memory:x", "ftp://host", "redis"])
def test_an_url_that_is_no_store_is_refused_with_a_sentence(url: str) -> None:
    with pytest.raises(ValueError, match="is not a store"):
        open_store(url)
