"""`uvimg copy`: everything in one store is in another afterwards, or it is told."""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Server, make_photo
from uvimg.apps.copying import Counts, copy
from uvimg.store import Record, Store, open_store


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uvimg", "copy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


async def read_all(url: str) -> dict[bytes, Record]:
    store = open_store(url, create=False)
    try:
        return dict(await store.scan(b"", limit=100_000))
    finally:
        await store.close()


async def put(store: Store, name: bytes, data: bytes) -> None:
    async with store.incoming() as incoming:
        await incoming.write(data)
        digest = await incoming.finish()
        await store.bind([name], Record(digest, len(data), "image/jpeg", 1_800_000_000), incoming)


def test_a_copy_serves_what_the_first_one_served(start_server: Callable[..., Server], tmp_path: Path) -> None:
    first = start_server()
    md5 = first.upload(make_photo(1, 640, 480))
    paths = [f"/{md5}?p=0", f"/{md5}?w=100", "/kv/short", "/kv/db/long", "/docs/a.html"]
    first.http.put(f"{first.url}/kv/short", data=b"\0value")
    first.http.put(f"{first.url}/kv/db/long", data=b"long" * 50_000)
    first.http.put(f"{first.url}/docs/a.html", data="<p>ü</p>".encode() * 100, headers={"Content-Type": "text/html"})
    answers = [first.get(path).content for path in paths]
    done = run(f"local:{first.store}", f"local:{tmp_path}/copy")
    assert done.returncode == 0, done.stderr
    assert asyncio.run(read_all(f"local:{tmp_path}/copy")) == asyncio.run(read_all(f"local:{first.store}"))
    second = start_server(store=f"local:{tmp_path}/copy")
    assert [second.get(path).content for path in paths] == answers
    again = run(f"local:{first.store}", f"local:{tmp_path}/copy")
    assert (again.returncode, again.stdout[:14]) == (0, "0 names copied")


def test_renditions_stay_behind_where_that_is_asked_for(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server()
    md5 = server.upload(make_photo(1, 640, 480))
    server.get(f"/{md5}?w=100")
    server.stop()
    assert run("--no-renditions", f"local:{server.store}", f"local:{tmp_path}/copy").returncode == 0
    names = asyncio.run(read_all(f"local:{tmp_path}/copy"))
    assert len(names) == 2
    assert all(name.startswith(b"images/") for name in names)


async def test_what_is_damaged_is_told_and_not_copied(tmp_path: Path) -> None:
    source = open_store(f"local:{tmp_path}/source")
    target = open_store("memory:")
    for number in range(6):
        await put(source, b"images/%d" % number, b"%d" % number * 100_000)
    for number, harm in ((1, b"x" * 100_000), (3, b"short"), (4, None), (5, None)):
        digest = hashlib.sha256(b"%d" % number * 100_000).hexdigest()
        file = tmp_path / "source" / "blobs" / digest[:2] / digest
        file.unlink() if harm is None else file.write_bytes(harm)
        if number == 5:
            # As on a disk that has gone bad there.
            file.symlink_to(file)
    counts = Counts()
    notes = {finding.subject: finding.note async for finding in copy(source, target, counts)}
    assert notes == {
        "images/0": "",
        "images/1": "its bytes are not those of its address",
        "images/2": "",
        "images/3": "its bytes are not all there",
        "images/4": "its bytes are missing",
        "images/5": "its bytes cannot be read",
    }
    assert [name for name, _ in await target.scan(b"")] == [b"images/0", b"images/2"]
    assert (counts.copied, counts.failed, counts.bytes, await target.size()) == (2, 4, 200_000, 2)
    await source.close()


async def test_a_name_that_somebody_chose_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    source = open_store(f"local:{tmp_path}/source")
    await put(source, b"kv/a/\x1b[2J\n\xff\xc3\xbc", b"1" * 100_000)
    await source.close()
    for file in (tmp_path / "source" / "blobs").glob("*/*"):
        file.unlink()
    done = run(f"local:{tmp_path}/source", f"local:{tmp_path}/target")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == r"kv/a/\x1b[2J\n\xff\xc3\xbc: its bytes are missing"


@pytest.mark.parametrize(("device", "status"), [("full", 1), ("closed", 141)])
async def test_a_copy_that_could_not_tell_how_it_went_does_not_say_that_it_went_well(
    device: str, status: int, tmp_path: Path
) -> None:
    source = open_store(f"local:{tmp_path}/source")
    await put(source, b"images/1", b"1" * 100_000)
    await source.close()
    command = [sys.executable, "-m", "uvimg", "copy", f"local:{tmp_path}/source", f"local:{tmp_path}/target"]
    if device == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        end, out = os.pipe()
        os.close(end)
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(out)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr


async def test_a_blob_of_several_names_is_sent_once(tmp_path: Path) -> None:
    source, target = open_store("memory:"), open_store(f"local:{tmp_path}/target")
    for name in (b"a", b"b", b"c"):
        await put(source, name, b"blob" * 50_000)
    counts = Counts()
    assert [finding.note async for finding in copy(source, target, counts)] == ["", "", ""]
    assert await target.size() == 1
    assert [finding.note async for finding in target.scrub() if finding.note] == []
    await target.close()


async def test_what_expired_stays_behind(tmp_path: Path) -> None:
    source, target = open_store("memory:"), open_store("memory:")
    for name, expires_s in ((b"kv/a/old", 1), (b"kv/a/new", int(time.time()) + 1000)):
        record = Record(hashlib.sha256(b"v").digest(), 1, "text/plain", 1, b"", expires_s, b"v")
        await source.change([name], lambda _, old, record=record: record)
    async for _ in copy(source, target, Counts()):
        pass
    assert [name for name, _ in await target.scan(b"")] == [b"kv/a/new"]
    assert (await target.scan(b""))[0][1].expires_s > time.time()


async def test_one_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    source = open_store(f"local:{tmp_path}/source")
    await asyncio.gather(*(put(source, b"images/%05d" % number, b"%d" % number * 3000) for number in range(3000)))
    await source.close()
    urls = [f"local:{tmp_path}/source", f"local:{tmp_path}/target"]
    process = subprocess.Popen([sys.executable, "-m", "uvimg", "copy", *urls], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (tmp_path / "target" / "format").exists() and len(await read_all(urls[1])) > 20:
            break
        await asyncio.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = len(await read_all(urls[1]))
    assert 20 < before < 3000
    done = run(*urls)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{3000 - before} names copied")
    assert f"{before} were there" in done.stdout
    assert await read_all(urls[1]) == await read_all(urls[0])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("local:data", "local:./data/"), "into itself"),
        (("local:data", "nowhere:x"), "is not a store"),
        (("memory:", "local:data"), "forgets"),
        (("local:missing", "local:data"), "There is no store"),
    ],
)
def test_what_cannot_be_copied_is_told_in_one_line(
    arguments: tuple[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
