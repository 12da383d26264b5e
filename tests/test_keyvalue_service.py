"""The key-value app as a service: where it is, what survives kill -9 and a full disk, dumps, and what listings cost.

KILL_ROUNDS=50 and LISTED_KEYS=1000000 make the long forms of two of these.
"""

import asyncio
import contextlib
import http.client
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Server, make_photo
from tests.test_local_store import small_disk
from uvimg.apps.values import UNTYPED, Values, make_record, receive_bytes
from uvimg.config import load
from uvimg.core.address import value_name
from uvimg.store import open_store

CLIENTS = 64
SIZES = (290, 290, 290, 5_000, 100_000)


def start_kv(start_server: Callable[..., Server], **settings: Any) -> Server:
    return start_server(apps=("kv",), **{"access_log": False, **settings})


def test_kv_alone_is_at_the_root_and_listens_at_8080_unless_told_otherwise(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    assert load({"apps": ("kv",)}, {}).port == 8080
    assert load({"apps": ("kv",), "port": 4869}, {}).port == 4869
    assert load({}, {}).port == load({"apps": ("kv", "images")}, {}).port == 4869
    server = start_kv(start_server)
    assert "workers" not in server.ready_line
    assert server.http.put(f"{server.url}/test", b"value").status_code == 201
    assert server.get("/default/test").content == b"value"
    assert server.get("/health").json() == {"status": "ok"}
    assert server.stop() == 0
    # Beside images, on the same data.
    both = start_server(workers=1)
    assert both.get("/kv/test").content == b"value"
    assert both.http.put(f"{both.url}/kv/a%2Fb/c", b"").status_code == 400
    assert both.http.put(f"{both.url}/kv/db/a%2Fb", b"slash").status_code == 201
    assert both.get("/kv/db/_all").content == b"a/b"
    assert both.get(f"/{both.upload(make_photo(1))}").status_code == 200


def test_beside_images_only_this_machine_may_write_unless_told_otherwise() -> None:
    assert load({}, {}).document_write_rule == load({}, {}).admin_rule
    assert load({"apps": ("documents",)}, {}).document_write_rule == "allow all"
    assert load({}, {}).kv_write_rule == load({"apps": ("images", "kv")}, {}).kv_write_rule
    assert load({}, {}).kv_write_rule == load({}, {}).admin_rule
    assert load({"apps": ("kv",)}, {}).kv_write_rule == "allow all"
    assert load({"apps": ("kv",), "kv_write_rule": "deny all"}, {}).kv_write_rule == "deny all"
    assert load({"kv_write_rule": "allow all"}, {}).kv_write_rule == "allow all"


def test_two_processes_see_each_others_writes_at_once(start_server: Callable[..., Server]) -> None:
    servers = [start_kv(start_server) for _ in range(2)]
    for number in range(20):
        writer, reader = servers[number % 2], servers[1 - number % 2]
        # It is at hand there, and then it is another one.
        assert [reader.get("/key").status_code for _ in range(3)] == [200 if number else 404] * 3
        writer.http.put(f"{writer.url}/key", b"%d" % number)
        assert reader.get("/key").content == b"%d" % number
    increment = b"key\tn\nnum\t1"

    def count(server: Server) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        for _ in range(50):
            connection.request("POST", "/rpc/increment", increment)
            assert connection.getresponse().read()

    threads = [threading.Thread(target=count, args=(server,)) for server in servers * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int.from_bytes(servers[0].get("/n").content, "big") == 200


def make_value(client: int, number: int) -> bytes:
    """Says throughout what it is, so that no part of another one could stand in it unseen."""
    size = SIZES[(client + number) % len(SIZES)]
    return (b"%d %d;" % (client, number) * size)[:size]


def test_no_answered_write_is_lost_or_torn_by_kill_9(start_server: Callable[..., Server]) -> None:
    chance = random.Random(4869)
    server = start_kv(start_server)
    # Of each client: the number of its last write that was answered, and of the last that was sent, by key.
    answered = [dict.fromkeys(range(10), -1) for _ in range(CLIENTS)]
    sent = [dict.fromkeys(range(10), -1) for _ in range(CLIENTS)]
    written = 0
    for round_ in range(int(os.environ.get("KILL_ROUNDS", "2"))):
        left = [chance.randrange(100, 600)]
        enough = threading.Event()

        def write(
            client: int,
            port: int = server.port,
            round_: int = round_,
            left: list[int] = left,
            enough: threading.Event = enough,
        ) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                for number in range(round_ * 10_000, round_ * 10_000 + 10_000):
                    sent[client][number % 10] = number
                    connection.request("PUT", f"/db/{client}-{number % 10}", make_value(client, number))
                    answer = connection.getresponse()
                    answer.read()
                    assert answer.status in (200, 201)
                    answered[client][number % 10] = number
                    left[0] -= 1
                    if left[0] <= 0:
                        enough.set()

        threads = [threading.Thread(target=write, args=(client,)) for client in range(CLIENTS)]
        for thread in threads:
            thread.start()
        assert enough.wait(60)
        server.kill()
        for thread in threads:
            thread.join()
        server = start_kv(start_server)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
            for client in range(CLIENTS):
                for place, least in answered[client].items():
                    connection.request("GET", f"/db/{client}-{place}")
                    answer = connection.getresponse()
                    value = answer.read()
                    if answer.status == 404:
                        assert least == -1
                        continue
                    number = int(value.partition(b";")[0].split()[1])
                    assert least <= number <= sent[client][place]
                    assert value == make_value(client, number)
                    # That of a write whose answer never came.
                    answered[client][place] = number
                    written += 1
    assert written > CLIENTS
    server.stop()
    for command in ("scrub", "gc"):
        done = run(command, store=f"local:{server.store}")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("size", [1000, 100_000])
def test_on_a_full_disk_writes_fail_with_507_and_reads_go_on(
    start_server: Callable[..., Server], tmp_path: Path, size: int
) -> None:
    with small_disk(tmp_path / "disk", "4m"):
        server = start_kv(start_server, store=f"local:{tmp_path}/disk/data")
        value = random.Random(size).randbytes
        for kept in range(6000):
            status = server.http.put(f"{server.url}/db/{kept}", value(size)).status_code
            if status != 201:
                break
        assert (status, kept > 1) == (507, True)
        # What takes another one's place may find room.
        assert server.http.put(f"{server.url}/db/0", value(size)).status_code in (200, 507)
        assert server.http.post(f"{server.url}/rpc/increment", b"key\tn\nnum\t1").status_code in (200, 507)
        assert len(server.get("/db/0").content) == size
        assert len(server.get("/db/_all").content.split(b"\n")) in (kept, kept + 1)
        subprocess.run(["mount", "-o", "remount,size=16m", str(tmp_path / "disk")], check=True)
        assert server.http.put(f"{server.url}/db/again", value(size)).status_code == 201
        assert len(server.get("/db/again").content) == size
        server.kill()


def test_what_has_expired_is_swept_in_the_background(start_server: Callable[..., Server]) -> None:
    server = start_kv(start_server)

    def names() -> float:
        found = re.search(r"^uvimg_store_names (\S+)", server.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else -1

    for number in range(20):
        server.http.put(f"{server.url}/db/{number}", b"", headers={"X-Kt-Xt": "-4"})
    assert names() == 20
    deadline = time.monotonic() + 30
    while names() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert names() == 0


def test_a_listing_of_very_many_keys_takes_no_memory(start_server: Callable[..., Server], tmp_path: Path) -> None:
    count = int(os.environ.get("LISTED_KEYS", "30000"))
    asyncio.run(fill(tmp_path / "data", count))
    server = start_kv(start_server)
    before = measure_own_bytes(server)
    with server.http.get(f"{server.url}/many/_all", stream=True) as answer:
        assert answer.headers["X-Olegdb-Num-Matches"] == str(count)
        listed = most = 0
        for piece in answer.iter_content(1 << 16):
            listed += piece.count(b"\n")
            most = max(most, measure_own_bytes(server))
    assert listed == count - 1
    assert most - before < 8 << 20


async def fill(path: Path, count: int) -> None:
    store = open_store(f"local:{path}", durability="os")
    record = make_record(receive_bytes(b"value"), UNTYPED, 1_800_000_000, None)
    for start in range(0, count, 10_000):
        names = [value_name(b"many", b"key-%08d" % number) for number in range(start, min(count, start + 10_000))]
        await store.change(names, lambda name, _: record)
    assert await Values(store, 1 << 20, lambda: 0).count(b"many") == count
    await store.close()


def measure_own_bytes(server: Server) -> int:
    """Without the pages of files that are mapped, which the kernel takes back."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


# uvimg kv


def run(*arguments: str, store: str, input: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "uvimg", *arguments, "--store", store]
    return subprocess.run(command, capture_output=True, check=False, input=input)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """A store with a little of everything, and its dump."""
    folder = tmp_path_factory.mktemp("dumped")

    async def prepare() -> None:
        store = open_store(f"local:{folder}/data")
        values = Values(store, 1 << 20, lambda: 1_800_000_000)
        for key, data, expires_s in (
            (b"small", b"1", None),
            (b"\xff\n", b"2" * 2000, 1_900_000_000),
            (b"large", b"3" * 700_000, None),
            (b"gone", b"4", 1_800_000_001),
        ):
            for database in (b"a", b"b"):
                name = value_name(database, key)
                async with values.receive(pieces_of(data)) as received:
                    await values.write(name, received, "text/plain", expires_s, lambda old: None)
        await store.close()

    async def pieces_of(data: bytes) -> Any:
        yield data

    asyncio.run(prepare())
    # For then is behind us, and the clock of a command is that of the machine.
    return f"local:{folder}/data", run("kv", "dump", store=f"local:{folder}/data").stdout


def test_a_dump_loaded_elsewhere_is_the_same(dumped: tuple[str, bytes], tmp_path: Path) -> None:
    url, data = dumped
    other = f"local:{tmp_path}/other"
    done = run("kv", "load", store=other, input=data)
    assert (done.returncode, done.stdout) == (0, b"8 records loaded\n"), done.stderr

    async def read(url: str) -> Any:
        store = open_store(url, create=False)
        found = [(name, record) for name, record in await store.scan(b"kv/")]
        assert [finding async for finding in store.scrub() if finding.note] == []
        await store.close()
        return found

    assert asyncio.run(read(other)) == asyncio.run(read(url))
    assert run("kv", "list", store=other).stdout == b"a\t4\nb\t4\n"
    assert run("kv", "list", "a", store=other).stdout == b"gone\nlarge\nsmall\n\xff%0A\n"
    assert run("kv", "get", "a", "large", store=other).stdout == b"3" * 700_000
    assert run("kv", "put", "a", "new", store=other, input=b"value").returncode == 0
    assert run("kv", "get", "a", "new", store=other).stdout == b"value"
    for action in ("list", "dump"):
        mistyped = run("kv", action, "none", store=other)
        assert (mistyped.returncode, mistyped.stdout) == (1, b"")
        assert mistyped.stderr == b"uvimg: There is no database 'none'.\n"
    assert b"no such key" in run("kv", "get", "a", "none", store=other).stderr
    assert run("kv", "dump", "b", store=other).stdout.count(b'"db":"b"') == 4


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda data: b"", "line 1: this is no dump of values, it is empty; 0 records"),
        (lambda data: b"\x89PNG\n" + data, "line 1: this is no dump of values; 0 records"),
        (lambda data: data.replace(b'"version":1', b'"version":2'), "that this version knows"),
        (lambda data: data[: len(data) // 2], "records were loaded before"),
        (lambda data: data[: data.rindex(b'{"end"')], "the dump is cut here; 8 records were loaded before"),
        (lambda data: data.replace(b'"value":"MQ=="', b'"value":"MQ!="', 1), "its base64 is damaged"),
        (lambda data: data.replace(b'"value":"MQ=="', b'"value":"Mg=="', 1), "not those of its sha256"),
        (lambda data: data.replace(b"1800000000", b"1800000001", 1), "not what was signed at its end"),
        (lambda data: data.replace(b'"key":"small"', b'"key":"_all"', 1), "_all is the name of an operation"),
        (lambda data: data.replace(b'"size":1,', b'"size":99999999999,', 1), "are allowed"),
        (lambda data: data.replace(b'"size":1,', b'"size":-1,', 1), "are allowed"),
        (lambda data: data.replace(b'{"more"', b'{"less"', 1), "this is no line of a dump"),
        (lambda data: data[:31] + b"x" * 3_000_000, "this line is too long"),
        (lambda data: b'{"uvimg":' + b"[" * 900_000, "this is no dump of values"),
        (lambda data: data[:31] + b'{"db":' + b"[" * 900_000 + b"\n", "line 2: this is no line of a dump"),
        (lambda data: data.replace(b'"key":"small"', b'"key":"\xff"', 1), "this is no line of a dump"),
        # Of such a second no HTTP date tells.
        (lambda data: data.replace(b'"expires_s":1900000000', b'"expires_s":999999999999', 1), "times cannot be"),
    ],
)
def test_a_damaged_dump_is_told_in_one_line(
    dumped: tuple[str, bytes], tmp_path: Path, spoil: Callable[[bytes], bytes], told: str, capsys: Any
) -> None:
    from uvimg.cli import main

    (tmp_path / "dump").write_bytes(spoil(dumped[1]))
    status = main(["kv", "load", "--store", f"local:{tmp_path}/other", "--durability=os", str(tmp_path / "dump")])
    error = capsys.readouterr().err
    assert status == 1
    assert told in error
    assert error.count("\n") == 1
