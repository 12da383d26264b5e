"""uvimg as an aiohttp application in somebody else's: under a prefix, behind their middlewares, in their process."""

import asyncio
import hashlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, FormData, web
from yarl import URL

import uvimg.web.aiohttp
from tests.conftest import make_photo
from tests.test_wire import get, last
from uvimg import config

ROOT = Path(__file__).parent.parent
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def mark(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The host's own: it must see every answer before its head is sent, also that of a large file."""
    response = await handler(request)
    response.headers["X-Host"] = str(response.status)
    return response


@asynccontextmanager
async def host(folder: Path, prefix: str, **chosen: object) -> AsyncIterator[str]:
    """Where somebody's application with uvimg under this prefix is to be found."""
    settings = config.load({"store": f"local:{folder}", "workers": 1, **chosen}, {})
    embedded = uvimg.web.aiohttp.application(settings)
    app = web.Application(middlewares=[mark]) if prefix else embedded
    if prefix:
        app.router.add_get("/other", _say_other)
        *outer, inner = re.findall(r"/[^/]+", prefix)
        for part in outer:
            between, embedded = embedded, web.Application()
            embedded.add_subapp(inner, between)
            inner = part
        app.add_subapp(inner + "/", embedded)
    # aiohttp waits for so long for bodies that nobody wants, also when it ends.
    runner = web.AppRunner(app, lingering_time=0.2)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await runner.cleanup()


async def _say_other(_: web.Request) -> web.Response:
    return web.Response(text="other")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedded")


@pytest.mark.parametrize("prefix", ["", "/pictures", "/nested/pictures"])
async def test_what_an_answer_names_is_found_under_the_prefix(folder: Path, prefix: str) -> None:
    photo = make_photo(1, 640, 480)
    md5, sha256 = hashlib.md5(photo).hexdigest(), hashlib.sha256(photo).hexdigest()
    async with host(folder, prefix) as origin, ClientSession(origin) as client:
        made = await client.post(f"{prefix}/images", data=photo)
        assert (made.status, made.headers["Location"]) == (201, f"{prefix}/images/{sha256}")
        assert (await made.json())["url"] == made.headers["Location"]
        shown = await client.get(made.headers["Location"] + "?p=0")
        assert await shown.read() == photo
        form = FormData()
        form.add_field("file", photo, filename="a.jpg")
        told = await (await client.post(f"{prefix}/upload", data=form)).text()
        link = re.search(r'<a href="([^"]*)">http://yourhostname:\d+([^<]*)</a>', told)
        assert link is not None
        assert link[1] == link[2] == f"{prefix}/{md5}"
        assert (await client.get(link[1] + "?w=50&h=50")).status == 200
        # zimg's doors
        assert (await (await client.post(f"{prefix}/upload", data=photo)).json())["info"]["md5"] == md5
        assert (await (await client.get(f"{prefix}/info?md5={md5}")).json())["ret"]
        assert "zimg works!" in await (await client.get(f"{prefix}/echo")).text()
        assert (await client.get(f"{prefix}/nothing")).status == 404
        page = await client.get(prefix or "/")
        # The page's links are relative to its folder.
        assert str(page.url) == f"{origin}{prefix}/"
        for relative in re.findall(r'(?:href|action)="([^"#{]+)"', await page.text()):
            assert not relative.startswith("/")
            found = await client.options(page.url.join(type(page.url)(relative)))
            assert found.status == 204, relative
        assert (await client.put(f"{prefix}/images/{sha256}")).status == 405
        assert (await client.delete(f"{prefix}/images/{sha256}")).status == 204
        if prefix:
            assert await (await client.get("/other")).text() == "other"
            assert (await client.get("/echo")).status == 404


async def test_middlewares_see_every_answer_before_it_is_sent(folder: Path) -> None:
    # A file of the store, for its size.
    photo = make_photo(2, 1000, 800)
    assert len(photo) > 100_000
    async with host(folder, "/pictures/") as origin, ClientSession(origin) as client:
        url = (await client.post("/pictures/images", data=photo)).headers["Location"]
        for options in ({}, {"headers": {"Range": "bytes=5-99999"}}, {"headers": {"If-None-Match": "*"}}):
            answer = await client.get(url + "?p=0", **options)
            assert answer.headers["X-Host"] == str(answer.status)
            assert await answer.read() == {200: photo, 206: photo[5:100_000], 304: b""}[answer.status]
        head = await client.head(url + "?p=0")
        assert (head.headers["Content-Length"], head.headers["X-Host"]) == (str(len(photo)), "200")


async def test_the_host_keeps_its_log_and_its_signals(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    handlers = list(logging.getLogger().handlers)
    async with host(folder, "/pictures") as origin, ClientSession(origin) as client:
        await client.get("/pictures/echo?a")
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before
        assert logging.getLogger().handlers == handlers
    lines = [record.getMessage() for record in caplog.records if record.name == "uvimg.access"]
    assert re.fullmatch(r"127\.0\.0\.1 GET /pictures/echo\?a 200 \d+ B \d+\.\d\d ms", lines[0])


async def test_what_can_still_be_seen_of_a_bad_request_is_refused(folder: Path) -> None:
    rows = {
        b"GET /pictures/echo HTTP/1.1\r\n\r\n": {400},
        b"GET /pictures/echo HTTP/1.1\r\nHost:\r\n\r\n": {400},
        b"GET /pictures/echo HTTP/1.1\r\nHost: a/b\r\n\r\n": {400},
        b"GET /pictures/echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n": {400},
        b"GET /pictures/echo HTTP/2.0\r\nHost: a\r\n\r\n": {400, 505},
        b"GET /pictures/echo HTTP/1.1\r\nHost: a\r\nRange: bytes=0-1\r\nRange: bytes=0-2\r\n\r\n": {400},
        b"POST /pictures/upload HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": {400},
        get("/pictures/echo", "A: b\r\n" * 100): {400, 431},
        get("/pictures/echo", "Expect: cake\r\n"): {417},
        b"GET http://y/pictures/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n": {200},
        last("//pictures/echo"): {404},
        last("/pictures%2Fecho"): {404},
        last("/pict%75res/echo"): {200},
    }
    async with host(folder, "/pictures/") as origin:
        for data, expected in rows.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", int(origin.rpartition(":")[2]))
            writer.write(data)
            async with asyncio.timeout(10):
                received = await reader.read()
            writer.close()
            # To what says that it is of another version, aiohttp answers in that.
            assert [int(found) for found in re.findall(rb"HTTP/\d\.\d (\d+) ", received)] in (
                [status] for status in expected
            )


async def test_a_body_is_invited_when_somebody_wants_it_and_only_then(folder: Path) -> None:
    photo = make_photo(3)
    async with host(folder, "/pictures/", max_size=100_000) as origin:
        for size, answers in ((len(photo), [b"100", b"200"]), (200_000, [b"413"])):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(origin.rpartition(":")[2]))
            fields = f"Content-Length: {size}\r\nExpect: 100-continue\r\nConnection: close\r\n"
            writer.write(get("/pictures/upload", fields).replace(b"GET", b"POST", 1))
            async with asyncio.timeout(10):
                received = await reader.readuntil(b"\r\n\r\n")
                if b" 100 " in received:
                    writer.write(photo)
                    received += await reader.readuntil(b"\r\n\r\n")
            writer.close()
            assert re.findall(rb"HTTP/1\.1 (\d+) ", received) == answers


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "port=8080" in code
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "host.py").write_text(code.replace("port=8080", f'host="127.0.0.1", port={port}'))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UVIMG_")}
    process = subprocess.Popen([sys.executable, "host.py"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        photo = make_photo(4)
        with connection:
            fields = f"Content-Length: {len(photo)}\r\nConnection: close\r\n"
            connection.sendall(get("/pictures/images", fields).replace(b"GET", b"POST", 1) + photo)
            received = b""
            while piece := connection.recv(65_536):
                received += piece
        url = json.loads(received.partition(b"\r\n\r\n")[2])["url"]
        assert url == f"/pictures/images/{hashlib.sha256(photo).hexdigest()}"
    finally:
        process.terminate()
        assert process.wait(20) == 0
    assert (tmp_path / "pictures").is_dir()


@pytest.mark.parametrize(("prefix", "apps"), [("", ("kv",)), ("/a/b", ("kv",)), ("/pictures", ("images", "kv"))])
async def test_values_are_there_under_any_prefix(tmp_path: Path, prefix: str, apps: tuple[str, ...]) -> None:
    async with host(tmp_path, prefix, apps=apps) as url, ClientSession() as client:
        place = f"{url}{prefix}{'/kv' if len(apps) > 1 else ''}"
        target = URL(f"{place}/db/a%2Fb", encoded=True)
        for status in (201, 200):
            async with client.put(target, data=b"value") as answer:
                assert answer.status == status, await answer.text()
        async with client.get(target) as answer:
            assert await answer.read() == b"value"
        # More than is put together before it is sent: written behind the host's middlewares.
        body = b"\n".join(b"_%05d\t" % number for number in range(3000))
        async with client.post(f"{place}/rpc/set_bulk", data=body) as answer:
            assert answer.status == 200
        async with client.get(f"{place}/_all") as answer:
            assert len((await answer.read()).split(b"\n")) == 3000
            assert ("X-Host" in answer.headers) == bool(prefix)
