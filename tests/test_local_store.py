"""What only the embedded store promises: several processes, damage found, faults of the disk survived."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import lmdb
import pytest

from tests.test_store import get, make_bytes, make_record, put
from uvimg.core.address import blob_path, image_name, rendition_name
from uvimg.core.errors import StoreDown, StoreFull
from uvimg.store.local import LocalStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    opened = LocalStore(f"{tmp_path}/data")
    yield opened
    await opened.close()


def blob_file(tmp_path: Path, data: bytes) -> Path:
    return tmp_path / "data" / "blobs" / blob_path(hashlib.sha256(data).digest())


# Another process on the same folder: does what it is told, prints when it is done, waits for a line.
OTHER = """
import asyncio, sys
from tests.test_store import put, make_bytes
from uvimg.store.local import LocalStore
async def main():
    store = LocalStore(sys.argv[1])
    {work}
    await store.close()
asyncio.run(main())
"""


def start_other(path: Path, work: str, *prefix: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", OTHER.format(work=work), str(path)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )


def find_strace() -> str:
    strace = shutil.which("strace")
    if strace is None:
        if os.environ.get("CI"):
            pytest.fail("CI must have strace")
        pytest.skip("strace is not installed")
    return strace


async def test_it_is_all_there_after_a_restart(tmp_path: Path) -> None:
    for attempt in range(2):
        store = LocalStore(f"{tmp_path}/data")
        if attempt == 0:
            await put(store, b"small", make_bytes(10))
            await put(store, b"large", make_bytes(100_000))
        assert await get(store, make_bytes(10)) == make_bytes(10)
        assert await get(store, make_bytes(100_000)) == make_bytes(100_000)
        assert [name for name, _ in await store.scan(b"")] == [b"large", b"small"]
        await store.close()


async def test_only_large_blobs_are_files(store: LocalStore, tmp_path: Path) -> None:
    await put(store, b"small", make_bytes(65_536))
    await put(store, b"large", make_bytes(65_537))
    assert not blob_file(tmp_path, make_bytes(65_536)).exists()
    assert blob_file(tmp_path, make_bytes(65_537)).read_bytes() == make_bytes(65_537)


async def test_another_process_sees_a_write_at_once_and_ours_sees_its(store: LocalStore, tmp_path: Path) -> None:
    await put(store, b"ours", make_bytes(100_000))
    work = """
    assert store.near.record(b"ours") is not None
    await put(store, b"theirs", make_bytes(70_000))
    await store.unbind([b"ours"])
    print("done", flush=True)
    sys.stdin.readline()"""
    other = start_other(tmp_path / "data", work)
    assert other.stdout is not None
    assert await asyncio.to_thread(other.stdout.readline) == "done\n", other.communicate()
    assert store.near.record(b"ours") is None
    assert await get(store, make_bytes(70_000)) == make_bytes(70_000)
    other.communicate("\n")
    assert other.returncode == 0


async def test_four_processes_that_add_and_remove_the_same_blobs_lose_none(tmp_path: Path) -> None:
    work = """
    for number in range(60):
        size = 70_000 + number % 3
        await put(store, b"kept/%d" % (number % 3), make_bytes(size))
        await put(store, sys.argv[1].encode() + b"/%d" % id(store), make_bytes(size))
        await store.unbind([sys.argv[1].encode() + b"/%d" % id(store)])"""
    others = [start_other(tmp_path / "data", work) for _ in range(4)]
    for other in others:
        _, errors = await asyncio.to_thread(other.communicate)
        assert other.returncode == 0, errors
    store = LocalStore(f"{tmp_path}/data")
    assert [finding async for finding in store.scrub() if finding.note] == []
    for extra in range(3):
        assert await get(store, make_bytes(70_000 + extra)) == make_bytes(70_000 + extra)
    await store.close()


async def test_scrub_names_every_damaged_and_every_missing_blob(tmp_path: Path) -> None:
    store = LocalStore(f"{tmp_path}/data")
    for size in (10, 20, 100_000, 200_000, 300_000):
        await put(store, b"%d" % size, make_bytes(size))
    await store.close()
    damaged = bytearray(make_bytes(100_000))
    damaged[50_000] ^= 1
    blob_file(tmp_path, make_bytes(100_000)).write_bytes(damaged)
    blob_file(tmp_path, make_bytes(200_000)).unlink()
    with lmdb.open(f"{tmp_path}/data/names", max_dbs=3, map_size=1 << 30) as env, env.begin(write=True) as txn:
        txn.put(hashlib.sha256(make_bytes(10)).digest(), b"not these ten", db=env.open_db(b"small", txn=txn))
    store = LocalStore(f"{tmp_path}/data")
    found = {finding.subject: finding.note async for finding in store.scrub() if finding.note}
    await store.close()
    assert found == {
        hashlib.sha256(make_bytes(10)).hexdigest(): "its bytes are not those of its address",
        hashlib.sha256(make_bytes(100_000)).hexdigest(): "its bytes are not those of its address",
        hashlib.sha256(make_bytes(200_000)).hexdigest(): "its bytes are missing",
    }


async def test_uploading_a_damaged_image_again_heals_it(store: LocalStore, tmp_path: Path) -> None:
    data = make_bytes(100_000)
    await put(store, b"image", data)
    blob_file(tmp_path, data).write_bytes(b"damaged")
    await put(store, b"image", data, replace=False)
    assert await get(store, data) == data
    assert [finding async for finding in store.scrub() if finding.note] == []


async def test_gc_collects_what_nobody_names_and_nothing_else(store: LocalStore, tmp_path: Path) -> None:
    original, rendition, orphan = make_bytes(100_000), make_bytes(500), make_bytes(90_000)
    digest = hashlib.sha256(original).digest()
    await put(store, image_name(digest.hex()), original)
    await put(store, rendition_name(digest, "100x100-jpeg75.0"), rendition)
    await put(store, rendition_name(hashlib.sha256(orphan).digest(), "9x9-jpeg75.0"), make_bytes(600))
    blob_file(tmp_path, orphan).write_bytes(orphan)
    told = [finding.note async for finding in store.collect(dry_run=True)]
    assert blob_file(tmp_path, orphan).exists()
    assert [finding.note async for finding in store.collect()] == told
    assert sorted(told) == ["a blob that nobody names", "a rendition of an image that is gone"]
    assert not blob_file(tmp_path, orphan).exists()
    assert await get(store, original) == original
    assert await get(store, rendition) == rendition
    assert [finding async for finding in store.collect()] == []


async def test_gc_removes_the_remains_of_a_killed_upload_but_not_a_living_one(
    store: LocalStore, tmp_path: Path
) -> None:
    work = """
    incoming = store.incoming()
    await incoming.write(bytes(300_000))
    print(incoming.path, flush=True)
    sys.stdin.readline()"""
    other = start_other(tmp_path / "data", work)
    assert other.stdout is not None
    remains = Path((await asyncio.to_thread(other.stdout.readline)).strip())
    long_ago = time.time() - 3600
    os.utime(remains, (long_ago, long_ago))
    assert [finding async for finding in store.collect()] == []
    assert remains.exists()
    other.kill()
    other.communicate()
    assert [finding.note async for finding in store.collect()] == ["the remains of an interrupted upload"]
    assert not remains.exists()


async def test_a_store_of_another_layout_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "format").write_text("uvimg store 999\n")
    with pytest.raises(StoreDown, match="uvimg store 999"):
        LocalStore(f"{tmp_path}/data")
    assert os.listdir(tmp_path / "data") == ["format"]


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of its own of this size, which takes root."""
    path.mkdir()
    if os.getuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("CI must run as root: this test mounts a tmpfs")
        pytest.skip("mounting a tmpfs takes root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize("size", [50_000, 300_000])
async def test_a_full_disk_fails_writes_alone_and_room_heals_it(tmp_path: Path, size: int) -> None:
    with small_disk(tmp_path / "disk", "4m"):
        store = LocalStore(f"{tmp_path}/disk/data")
        kept: list[int] = []
        with pytest.raises(StoreFull):
            for number in range(200):
                await put(store, b"n/%d" % number, make_bytes(size, number))
                kept.append(number)
        assert kept
        for number in kept:
            assert await get(store, make_bytes(size, number)) == make_bytes(size, number)
        assert [finding async for finding in store.scrub() if finding.note] == []
        subprocess.run(["mount", "-o", "remount,size=16m", str(tmp_path / "disk")], check=True)
        await put(store, b"again", make_bytes(size, 999))
        assert await get(store, make_bytes(size, 999)) == make_bytes(size, 999)
        assert [finding async for finding in store.collect()] == []
        await store.close()


@pytest.mark.parametrize(
    ("size", "call", "place"),
    [
        (1000, "fdatasync", "names/data.mdb"),
        (100_000, "fdatasync", "names/data.mdb"),
        (100_000, "fsync", "blobs/incoming/"),
        (100_000, "fsync", f"blobs/{blob_path(hashlib.sha256(make_bytes(100_000)).digest())[:2]}>"),
        (100_000, "fsync", None),
    ],
)
def test_a_write_whose_fsync_fails_is_not_answered(tmp_path: Path, size: int, call: str, place: str | None) -> None:
    """Each fsync on the way of a write is made to fail; with `place` None none is, which is the control."""
    strace = find_strace()
    path = tmp_path / "data"
    asyncio.run(LocalStore(str(path)).close())
    work = f"""
    try:
        await put(store, b"name", make_bytes({size}))
        print("stored")
    except Exception as exc:
        print(type(exc).__name__, store.near.record(b"name"))"""
    # The file and its folder are synced by threads of their own, each its first fsync: the folder by its path.
    only = ["-P", f"{path}/{place[:-1]}"] if place and place.endswith(">") else []
    fault = [] if place is None else ["-e", f"inject={call}:error=EIO:when=1"]
    trace = ["-f", "-y", "-qq", "-e", "trace=fsync,fdatasync", "-o", f"{tmp_path}/trace", *only, *fault]
    out, errors = start_other(path, work, strace, *trace).communicate(timeout=60)
    assert out == ("stored\n" if place is None else "StoreDown None\n"), errors
    calls = (tmp_path / "trace").read_text().splitlines()
    if place is None:
        order = [
            name for line in calls for name in ("/incoming/", "/blobs/", "/data.mdb") if name in line.split(">")[0]
        ]
        assert list(dict.fromkeys(order)) == ["/incoming/", "/blobs/", "/data.mdb"]
    else:
        assert place in next(line for line in calls if "INJECTED" in line)


def test_with_the_durability_os_a_file_is_removed_after_the_commit_that_took_its_name_is_on_the_disk(
    tmp_path: Path,
) -> None:
    """Else a power cut could undo that commit and leave a name without its bytes."""
    path = tmp_path / "data"
    asyncio.run(LocalStore(str(path)).close())
    work = f"""
    await store.close()
    store = LocalStore({str(path)!r}, durability="os")
    await put(store, b"name", make_bytes(100_000))
    await put(store, b"name", b"")
    await store.close()
    print("done")"""
    trace = ["-f", "-y", "-qq", "-e", "trace=fdatasync,pwrite64,pwritev,unlink", "-o", f"{tmp_path}/trace"]
    out, errors = start_other(path, work, find_strace(), *trace).communicate(timeout=60)
    assert out == "done\n", errors
    blob = blob_path(hashlib.sha256(make_bytes(100_000)).digest())
    calls = [line.split(maxsplit=1)[1] for line in (tmp_path / "trace").read_text().splitlines()]
    (removed,) = [number for number, call in enumerate(calls) if call.startswith("unlink") and blob in call]
    before = [call.partition("(")[0] for call in calls[:removed] if "data.mdb" in call]
    # Behind all that was written of the database.
    assert before[-1] == "fdatasync"


def test_scrub_and_gc_report_on_the_command_line(tmp_path: Path) -> None:
    async def prepare() -> None:
        store = LocalStore(f"{tmp_path}/data")
        await put(store, b"images/x", make_bytes(100_000))
        await store.close()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "uvimg", *arguments, "--store", f"local:{tmp_path}/data"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    asyncio.run(prepare())
    clean = run("scrub")
    assert (clean.returncode, clean.stdout) == (0, f"no damage found in local:{tmp_path}/data\n")
    blob_file(tmp_path, make_bytes(100_000)).write_bytes(b"damaged")
    damaged = run("scrub")
    assert damaged.returncode == 1
    assert hashlib.sha256(make_bytes(100_000)).hexdigest() in damaged.stdout
    assert "1 damaged" in damaged.stderr
    blob_file(tmp_path, make_bytes(80_000)).write_bytes(make_bytes(80_000))
    assert "1 would be removed" in run("gc", "--dry-run").stdout
    assert "1 removed" in run("gc").stdout
    assert "0 removed" in run("gc").stdout


def test_a_mistyped_store_is_not_made_and_not_called_healthy(tmp_path: Path) -> None:
    for command in ("scrub", "gc"):
        arguments = [sys.executable, "-m", "uvimg", command, "--store", f"local:{tmp_path}/typo"]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, f"uvimg: There is no store in {tmp_path}/typo.\n")
        assert not (tmp_path / "typo").exists()


async def test_an_upload_given_up_in_the_middle_of_its_commit_fails_nobody_elses(
    store: LocalStore, tmp_path: Path
) -> None:
    """Uploads that are cancelled while their bind is on its way, beside ones that are not."""

    async def give_up(number: int) -> None:
        task = asyncio.create_task(put(store, b"given-up/%d" % number, make_bytes(70_000, number)))
        for _ in range(number % 40):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    honest = [put(store, b"honest/%d" % number, make_bytes(70_001, number)) for number in range(120)]
    outcomes = await asyncio.gather(*honest, *(give_up(number) for number in range(400)), return_exceptions=True)
    assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
    for number in range(120):
        assert await get(store, make_bytes(70_001, number)) == make_bytes(70_001, number)
    assert [finding async for finding in store.scrub() if finding.note] == []
    assert list((tmp_path / "data" / "blobs" / "incoming").iterdir()) == []
    kept = {bytes(name) for name, _ in await store.scan(b"given-up/", limit=1000)}
    assert await store.size() == 120 + len(kept)


async def test_writes_fail_and_do_not_hang_when_the_folder_is_gone(tmp_path: Path) -> None:
    store = LocalStore(f"{tmp_path}/data")
    async with store.incoming() as incoming:
        await incoming.write(make_bytes(100_000))
        await incoming.finish()
        shutil.rmtree(tmp_path / "data")
        for _ in range(2):
            with pytest.raises(StoreDown):
                async with asyncio.timeout(5):
                    await store.bind([b"name"], make_record(make_bytes(100_000)), incoming)
    await store.close()


async def test_a_record_needs_its_blob(store: LocalStore) -> None:
    assert await store.bind([b"name"], make_record(make_bytes(7))) == [None]
    assert await store.record(b"name") is None
