"""A store in a bucket: what is sent, what fails, and what two of them do to each other."""

import asyncio
import contextlib
import hashlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends import S3
from tests.conftest import Server, make_photo
from tests.faults import Fault, Network
from uvimg.core.bucket import parse_bucket
from uvimg.core.errors import BadRequest, StoreDown, UvimgError
from uvimg.core.message import FilePart
from uvimg.core.object_keys import blob_key, spell_name
from uvimg.store import Record, open_store
from uvimg.store.bucket import make_client
from uvimg.store.objects import ObjectStore


@pytest.fixture
def network(s3: S3) -> Iterator[Network]:
    with Network(s3.program.port) as between:
        yield between


@pytest.fixture
def own_s3(s3: S3, tmp_path: Path) -> Iterator[S3]:
    """A server that a test may kill."""
    own = S3(tmp_path / "own")
    yield own
    own.program.kill()


@contextlib.asynccontextmanager
async def opened(url: str, timeout_s: float = 10.0) -> AsyncIterator[ObjectStore]:
    store = open_store(url, timeout_s=timeout_s)
    assert isinstance(store, ObjectStore)
    yield store
    await store.close()


def make_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(f"{size} {seed}").randbytes(size)


def make_record(data: bytes) -> Record:
    return Record(hashlib.sha256(data).digest(), len(data), "image/jpeg", 1_800_000_000)


def make_value(data: bytes) -> Record:
    return Record(hashlib.sha256(data).digest(), len(data), "text/plain", 1_800_000_000, inline=data)


async def put(store: ObjectStore, names: list[bytes], data: bytes) -> list[Record | None]:
    async with store.incoming() as incoming:
        for start in range(0, len(data), 1 << 18):
            await incoming.write(data[start : start + (1 << 18)])
        await incoming.finish()
        return await store.bind(names, make_record(data), incoming, replace=False)


async def collect(store: ObjectStore, grace_s: float = 0.0) -> list[str]:
    store.grace_s = grace_s
    return [finding.note async for finding in store.collect()]


async def read(store: ObjectStore, data: bytes) -> bytes | None:
    content = await store.get(hashlib.sha256(data).digest())
    if not isinstance(content, FilePart):
        return content
    with contextlib.closing(content):
        return os.pread(content.file.fileno(), content.size, content.start)


async def test_bytes_that_are_there_are_not_sent_again(s3: S3, network: Network) -> None:
    data = make_bytes(300_000)
    async with opened(s3.url(network.port)) as store:
        await put(store, [b"images/a"], data)
        assert network.sent > len(data)
        before = network.sent
        await put(store, [b"images/b"], data)
        assert network.sent - before < 20_000
        assert await read(store, data) == data


async def test_a_large_upload_goes_in_parts_and_comes_back(s3: S3) -> None:
    data = make_bytes(20_000_000)
    url = s3.url()
    async with opened(url) as store:
        await put(store, [b"images/a"], data)
        assert await read(store, data) == data
    path = s3.path(url) / blob_key(make_record(data).digest)
    # What S3 calls an object that came in parts.
    assert b"-4" in os.getxattr(path, "user.etag")


async def test_a_part_of_a_large_blob_is_fetched_alone(s3: S3, network: Network) -> None:
    data = make_bytes(12_000_000)
    async with opened(s3.url(network.port)) as store:
        await put(store, [b"images/a"], data)
        before = network.received
        pieces = await store.stream(make_record(data).digest, 9_000_000, 11_500_000)
        assert pieces is not None
        assert pieces.size == 2_500_000
        assert b"".join([piece async for piece in pieces.pieces]) == data[9_000_000:11_500_000]
        assert network.received - before < 2_700_000
        assert await store.stream(make_record(data).digest, 0, 12_000_001) is None
        assert await store.stream(bytes(32), 0, 10) is None


async def test_names_of_all_kinds_stand_in_their_order(s3: S3) -> None:
    names = [
        b"a",
        b"a/",
        b"a//b",
        b"a/../b",
        b"a b",
        b"a\xff",
        b"a\x00",
        b"a" * 300,
        b"a" * 80,
        b"a" * 80 + b"/x",
        "ä".encode(),
    ]
    async with opened(s3.url()) as store:
        await store.change(names, lambda name, _: make_value(name))
        assert await store.scan(b"") == [(name, make_value(name)) for name in sorted(names)]
        assert [name for name, _ in await store.scan(b"a/")] == [b"a/", b"a/../b", b"a//b"]
        with pytest.raises(BadRequest, match="too long"):
            await store.change([b"\xff" * 511], lambda name, _: make_value(name))
        assert await store.record(b"\xff" * 511) is None


async def test_two_nodes_count_together(s3: S3) -> None:
    url = s3.url()

    def increment(_: bytes, old: Record | None) -> Record:
        return make_value(b"%d" % (1 + int((old and old.inline) or 0)))

    async with opened(url) as one, opened(url) as other:
        changed = await asyncio.gather(*(store.change([b"n"], increment) for store in [one, other] * 20))
        assert sorted(int(new.inline or 0) for ((_, new),) in changed if new) == list(range(1, 41))


def pause_before_second_name(store: ObjectStore, until: Awaitable[Any]) -> None:
    """Let something else happen whole between the changes of one name and of the next."""
    swap, names = store._swap, 0

    async def swap_later(*arguments: Any) -> Any:
        nonlocal names
        names += 1
        if names == 2:
            await until
        return await swap(*arguments)

    store._swap = swap_later  # type: ignore[method-assign]


@pytest.mark.parametrize("interrupted", ["upload", "removal"])
async def test_two_nodes_leave_both_names_of_an_image_or_none(s3: S3, interrupted: str) -> None:
    data, url = make_bytes(5000), s3.url()
    names, digest = [b"images/sha256", b"images/md5"], make_record(make_bytes(5000)).digest
    async with opened(url) as one, opened(url) as other:
        if interrupted == "upload":
            pause_before_second_name(one, other.unbind(names, digest))
            await put(one, names, data)
        else:
            await put(other, names, data)
            pause_before_second_name(one, put(other, names, data))
            await one.unbind(names, digest)
        assert [await other.record(name) for name in names] == [None, None]
    async with opened(url) as one, opened(url) as other:
        for _ in range(8):
            work = [put(one, names, data), put(other, names, data), one.unbind(names, digest)]
            await asyncio.gather(*work, other.unbind(names, digest))
            records = [await one.record(name) for name in names]
            assert records in ([None, None], [make_record(data)] * 2)
            assert (records[0] is None) or await read(other, data) == data
        await other.unbind(names, digest)
        await collect(one)
        assert await one.size() == 0
        assert [finding async for finding in one.scrub() if finding.note] == []


async def test_a_removal_takes_no_value_that_was_written_meanwhile(s3: S3) -> None:
    url = s3.url()
    async with opened(url) as one, opened(url) as other:
        for round in range(15):
            await one.change([b"kv/d/k"], lambda _, old: make_value(b"old"))
            new = make_value(b"new %d" % round)

            def take_old(_: bytes, old: Record | None) -> Record | None:
                return None if old is not None and old.inline == b"old" else old

            await asyncio.gather(
                one.change([b"kv/d/k"], take_old),
                other.change([b"kv/d/k"], lambda _, old, new=new: new),  # type: ignore[misc]
            )
            assert await one.record(b"kv/d/k") == new


async def test_gc_takes_no_blob_that_is_being_named(s3: S3) -> None:
    data, url = make_bytes(5000), s3.url()
    async with opened(url) as binder, opened(url) as collector:
        # What is on its way is younger than this, and what has lost its name is not.
        collector.grace_s = 0.0
        done = False

        async def collect_on() -> None:
            while not done:
                store = collector
                async for page in store._bucket.list("blobs"):
                    for _ in page:
                        await store._condemn(make_record(data).digest)

        collecting = asyncio.create_task(collect_on())
        for _ in range(40):
            await put(binder, [b"images/a"], data)
            assert await read(binder, data) == data
            await binder.unbind([b"images/a"])
        done = True
        await collecting


async def test_gc_leaves_what_is_young_and_takes_what_was_interrupted(s3: S3) -> None:
    data, url = make_bytes(5000), s3.url()
    async with opened(url) as store:
        await put(store, [b"images/a"], data)
        await store.unbind([b"images/a"])
        assert await collect(store, 3600) == []
        assert await store.size() == 1
        # A binder that was killed before it wrote the name.
        claiming = store._claiming([b"images/a"], make_record(data), None)
        (claim,) = await claiming.__aenter__()
        claim.used = True
        await claiming.__aexit__(None, None, None)
        assert await collect(store, 3600) == []
        assert not await store.is_named(make_record(data).digest)
        assert await collect(store) == ["a blob that nobody names"]
        assert await store.size() == 0
        assert [path for path in s3.path(url).rglob("uses/*/*/*") if path.is_file()] == []


async def test_a_removal_that_was_cut_off_is_ended_by_the_next_who_comes(s3: S3) -> None:
    url = s3.url()
    async with opened(url) as store:
        await store.change([b"kv/d/k"], lambda _, old: make_value(b"1"))
        path = s3.path(url) / spell_name(b"kv/d/k")
        seen = await store._look(b"kv/d/k")
        assert seen.tag is not None
        assert await store._bucket.replace(spell_name(b"kv/d/k"), b"gone12345678", seen.tag)
        assert await store.record(b"kv/d/k") is None
        assert await store.scan(b"kv/") == []
        assert await store.counts(b"kv/", 0) == {}
        with pytest.raises(StoreDown, match="removal"):
            await store.change([b"kv/d/k"], lambda _, old: make_value(b"2"))
        os.utime(path, (time.time() - 100, time.time() - 100))
        await store.change([b"kv/d/k"], lambda _, old: make_value(b"2"))
        assert await store.record(b"kv/d/k") == make_value(b"2")


async def test_damage_is_told_and_a_cut_blob_is_healed_by_its_upload(s3: S3) -> None:
    data, url = make_bytes(100_000), s3.url()
    async with opened(url) as store:
        await put(store, [b"images/a"], data)
        path = s3.path(url) / blob_key(make_record(data).digest)
        path.write_bytes(data[:-1] + b"x")
        notes = [finding.note async for finding in store.scrub() if finding.note]
        assert notes == ["its bytes are not those of its address"]
        path.unlink()
        notes = [finding.note async for finding in store.scrub() if finding.note]
        assert notes == ["it names a blob that is not there"]
        assert await read(store, data) is None
        await put(store, [b"images/b"], data)
        assert await read(store, data) == data


async def test_a_server_without_conditional_writes_is_not_written_to(
    s3: S3, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(s3.url()) as store:
        put_if = store._bucket._put_if

        async def put_anyway(key: str, data: bytes, mode: Any) -> bool:
            await store._bucket.put(key, data)
            return True

        monkeypatch.setattr(store._bucket, "_put_if", put_anyway)
        with pytest.raises(UvimgError, match="conditional"):
            await store.change([b"kv/d/k"], lambda _, old: make_value(b"1"))
        assert "If-None-Match" in caplog.text
        assert await store.record(b"kv/d/k") is None
        monkeypatch.setattr(store._bucket, "_put_if", put_if)
        await store.change([b"kv/d/k"], lambda _, old: make_value(b"1"))


async def test_a_bucket_that_is_not_there_is_no_empty_store(s3: S3) -> None:
    async with opened(s3.url().replace(s3.bucket, "no-such-bucket")) as store:
        with pytest.raises(StoreDown, match="no bucket"):
            await store.record(b"images/a")


# When the network or the server fails


@pytest.mark.parametrize("fault", ["black hole", "away", "cut"])
async def test_a_fault_is_told_soon_and_is_over_soon(s3: S3, network: Network, fault: Fault) -> None:
    data = make_bytes(300_000)
    async with opened(s3.url(network.port), timeout_s=0.3) as store:
        await put(store, [b"images/a"], data)
        network.fault = fault
        for _ in range(6):
            began_s = time.monotonic()
            with pytest.raises(StoreDown):
                await read(store, data)
            assert time.monotonic() - began_s < 2
        # One that answers and is cut off then is still there.
        assert store.guards[0].is_away == (fault != "cut")
        network.fault = ""
        deadline = time.monotonic() + 2
        while True:
            try:
                assert await read(store, data) == data
            except StoreDown:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            else:
                break


async def test_a_connection_that_is_open_on_one_side_alone_is_noticed(s3: S3, network: Network) -> None:
    data = make_bytes(100_000)
    async with opened(s3.url(network.port), timeout_s=0.3) as store:
        await put(store, [b"images/a"], data)
        network.fault = "half open"
        failed = 0
        while failed < 20:
            try:
                assert await read(store, data) == data
            except StoreDown:
                failed += 1
                await asyncio.sleep(0.05)
            else:
                break
        assert failed < 20


async def test_no_acknowledged_change_is_lost_while_the_network_fails_at_random(s3: S3, network: Network) -> None:
    chance = random.Random(4869)
    data = [make_bytes(chance.choice((500, 9_000, 120_000)), seed) for seed in range(25)]
    faults: list[Fault] = ["", "", "cut", "delay", "half open", "away", "black hole"]
    async with opened(s3.url(network.port), timeout_s=0.5) as store:

        async def fail() -> None:
            for _ in range(25):
                network.delay_s, network.cut_after = chance.choice((0.01, 0.3)), chance.choice((0, 300, 5_000))
                network.fault = chance.choice(faults)
                await asyncio.sleep(0.1)
            network.fault = ""

        async def upload(number: int) -> None:
            await asyncio.sleep(number * 0.1)
            while True:
                with contextlib.suppress(UvimgError):
                    if await put(store, [b"images/%d" % number], data[number]) != [None]:
                        return
                await asyncio.sleep(chance.uniform(0, 0.1))

        async with asyncio.timeout(60):
            await asyncio.gather(fail(), *map(upload, range(len(data))))
        for number, each in enumerate(data):
            assert await store.record(b"images/%d" % number) == make_record(each)
            assert await read(store, each) == each
        assert [finding async for finding in store.scrub() if finding.note] == []


async def test_no_acknowledged_change_is_lost_while_the_server_is_killed_and_started(own_s3: S3) -> None:
    kept: list[bytes] = []
    async with opened(own_s3.url(), timeout_s=0.5) as store:
        going = True

        async def upload(seed: int) -> None:
            number = seed
            while going:
                data = make_bytes(3000, number)
                try:
                    if await put(store, [b"images/%d" % number], data) != [None]:
                        kept.append(data)
                        number += 8
                except StoreDown:
                    await asyncio.sleep(0.02)

        uploading = [asyncio.create_task(upload(seed)) for seed in range(8)]
        for _ in range(3):
            await asyncio.sleep(0.3)
            own_s3.program.kill()
            await asyncio.sleep(0.2)
            await asyncio.to_thread(own_s3.program.start)
            before, deadline = len(kept), time.monotonic() + 2
            while len(kept) == before:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        going = False
        await asyncio.gather(*uploading)
        assert len(kept) > 30
        for data in kept:
            assert await read(store, data) == data
        assert [finding async for finding in store.scrub() if finding.note] == []


# The service on it


def test_the_apps_work_over_a_bucket(start_server: Callable[..., Server], s3: S3) -> None:
    server = start_server(store=s3.url(), processes=2)
    photo = make_photo(1, 400, 300)
    md5 = server.upload(photo)
    assert server.get(f"/{md5}?p=0").content == photo
    assert server.image(f"/{md5}?w=100").width == 100
    assert server.http.put(f"{server.url}/kv/db/key", data=b"value").status_code == 201
    assert server.get("/kv/db/key").content == b"value"
    assert server.http.put(f"{server.url}/docs/a/page.txt", data=b"text " * 1000).status_code == 201
    for coding in ("identity", "zstd", "gzip"):
        assert server.get("/docs/a/page.txt", headers={"Accept-Encoding": coding}).status_code == 200
    assert server.get("/docs/a").status_code == 200
    assert server.http.delete(f"{server.url}/images/{md5}").status_code == 204
    assert server.get(f"/{md5}?p=0").status_code == 404
    assert server.get("/health").status_code == 200
    assert 'uvimg_backend_away{backend="s3://' in server.get("/metrics").text


def test_ninety_megabytes_come_and_go_in_little_memory(start_server: Callable[..., Server], s3: S3) -> None:
    server = start_server(store=s3.url(), apps=("documents",), document_write_rule="allow all")
    data = make_bytes(1_000_000) * 90

    def held() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    server.http.put(f"{server.url}/small.bin", data=b"x" * 200_000)
    before = held()
    assert server.http.put(f"{server.url}/large.bin", data=data).status_code == 201
    answer = server.get("/large.bin", headers={"Range": "bytes=50000000-50999999"})
    assert (answer.status_code, answer.headers["Content-Length"]) == (206, "1000000")
    assert answer.headers["Content-Range"] == "bytes 50000000-50999999/90000000"
    assert answer.content == data[50_000_000:51_000_000]
    whole = server.get("/large.bin")
    assert hashlib.sha256(whole.content).digest() == hashlib.sha256(data).digest()
    assert "Transfer-Encoding" not in whole.headers
    assert held() - before < 60_000_000


@pytest.mark.parametrize("chosen", ["transport", "streams", "aiohttp"])
def test_what_is_sent_on_while_it_comes_has_its_length(
    start_server: Callable[..., Server], s3: S3, network: Network, chosen: str
) -> None:
    data = make_bytes(3_000_000)
    server = start_server(store=s3.url(network.port), apps=("documents",), front_end=chosen, store_timeout_s=0.3)
    assert server.http.put(f"{server.url}/large.bin", data=data).status_code == 201
    with socket.create_connection(("127.0.0.1", server.port), 10) as client, client.makefile("rb") as answers:
        for method, version, wanted, expected in (
            ("GET", "1.1", "", data),
            ("HEAD", "1.1", "", b""),
            ("GET", "1.1", "Range: bytes=1500000-2999999\r\n", data[1_500_000:]),
            ("GET", "1.0", "Connection: keep-alive\r\n", data),
            ("GET", "1.1", "Range: bytes=-5\r\n", data[-5:]),
        ):
            client.sendall(f"{method} /large.bin HTTP/{version}\r\nHost: x\r\n{wanted}\r\n".encode())
            status = answers.readline().split()[1]
            assert status == (b"206" if "Range" in wanted else b"200")
            fields = dict(line.rstrip().split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
            assert int(fields[b"Content-Length"]) == len(expected or data)
            assert b"Transfer-Encoding" not in fields
            assert answers.read(len(expected)) == expected
        # What cannot be sent to its end does not look whole.
        network.delay_s, network.fault = 0.02, "delay"
        client.sendall(b"GET /large.bin HTTP/1.1\r\nHost: x\r\n\r\n")
        while answers.readline() != b"\r\n":
            pass
        network.fault = "away"
        with contextlib.suppress(ConnectionResetError):
            assert len(answers.read(len(data))) < len(data)


def test_a_server_that_is_away_is_told_of_soon_and_asked_again(start_server: Callable[..., Server], own_s3: S3) -> None:
    server = start_server(store=own_s3.url(), store_timeout_s=0.5)
    md5 = server.upload(make_photo(2))
    own_s3.program.kill()
    for _ in range(5):
        began_s = time.monotonic()
        answer = server.get(f"/images/{md5}")
        assert (answer.status_code, answer.headers.get("Retry-After")) == (503, "5")
        assert time.monotonic() - began_s < 2
    own_s3.program.start()
    deadline = time.monotonic() + 2
    while server.get(f"/images/{md5}").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert server.log.count("is away") == 1
    assert server.log.count("answers again") == 1


def test_scrub_gc_and_copy_work_on_a_bucket(s3: S3, tmp_path: Path) -> None:
    url, target = s3.url(), s3.url()

    def run(*command: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", "uvimg", *command], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    (tmp_path / "page.txt").write_text("text " * 1000)
    assert run("put", "--store", url, str(tmp_path / "page.txt"), "/page.txt")[0] == 0
    assert run("scrub", "--store", url)[0] == 0
    assert run("gc", "--store", url)[1].startswith("0 removed")
    status, told = run("copy", url, target)
    assert status == 0, told
    (blob,) = [path for path in (s3.path(target) / "blobs").rglob("*") if path.is_file()]
    blob.write_text("damage")
    status, told = run("scrub", "--store", target)
    assert (status, told.count("its bytes are not those of its address")) == (1, 1)
    status, told = run("scrub", "--store", url.replace(s3.bucket, "no-such-bucket"))
    assert (status, told) == (1, "uvimg: There is no bucket no-such-bucket.\n")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "BUCKET/PREFIX"),
        ("s3://user:secret@pictures/x", "its keys are no part"),
        ("s3://pictures/a//b", "single slashes"),
        ("s3://pictures/a/../b", "single slashes"),
        ("s3://pictures?colour=red", "not 'colour'"),
        ("s3://pictures?path_style=maybe", "true or false"),
        ("s3://pictures?endpoint=host:9000", "http://HOST:PORT"),
        ("s3://pictures?endpoint=http://other:9000", "allow_http=true"),
        ("gs://pictures?region=x", "not 'region'"),
    ],
)
def test_a_bucket_that_is_written_wrongly_is_told_with_a_sentence(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as told:
        open_store(url)
    assert "secret" not in str(told.value)


def test_keys_are_found_in_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text("[photos]\naws_access_key_id = id\naws_secret_access_key = key\n")
    (tmp_path / "config").write_text("[profile photos]\nregion = eu-north-1\nendpoint_url = http://127.0.0.1:1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_REGION", raising=False)
    client: Any = make_client(parse_bucket("s3", "//pictures?profile=photos"), 1, 0)
    config = dict(client.config)
    assert (config["access_key_id"], config["secret_access_key"], config["region"]) == ("id", "key", "eu-north-1")
    assert config["endpoint"] == "http://127.0.0.1:1"
    with pytest.raises(ValueError, match="no profile 'other'"):
        make_client(parse_bucket("s3", "//pictures?profile=other"), 1, 0)
