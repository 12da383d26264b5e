"""The images app through a real server: what it stores, shows, refuses and forgets, in both dialects."""

import asyncio
import concurrent.futures
import hashlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from bench import corpus
from tests.conftest import Server, decode, make_photo
from tests.test_wire import wait_until
from uvimg.core.address import image_name
from uvimg.store.local import LocalStore


@pytest.fixture(scope="module")
def photo_id(server: Server, zimg_photo: bytes) -> str:
    return server.upload(zimg_photo)


def test_the_modern_face_creates_shows_describes_and_deletes(server: Server) -> None:
    data = make_photo(11, 300, 200)
    sha256, md5 = hashlib.sha256(data).hexdigest(), hashlib.md5(data).hexdigest()
    created = server.http.post(f"{server.url}/images", data=data)
    assert created.status_code == 201
    assert created.headers["Location"] == f"/images/{sha256}"
    told = created.json()
    assert (told["id"], told["md5"], told["width"], told["height"], told["format"]) == (sha256, md5, 300, 200, "jpeg")
    for image_id in (sha256, md5, sha256.upper()):
        answer = server.get(f"/images/{image_id}.webp?w=30")
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "image/webp")
        assert decode(answer.content).width == 30
        assert server.get(f"/images/{image_id}?p=0").content == data
        assert server.get(f"/images/{image_id}/info").json() == {key: told[key] for key in told if key != "url"}
    assert server.http.delete(f"{server.url}/images/{md5}").status_code == 204
    for path in (f"/images/{sha256}", f"/images/{md5}", f"/images/{sha256}.webp?w=30", f"/{md5}", f"/{md5}?p=0"):
        assert server.get(path).status_code == 404
    assert server.http.delete(f"{server.url}/images/{md5}").status_code == 404
    assert not list(server.store.rglob(f"*{sha256}*"))


def test_info_tells_what_zimg_told_and_more(server: Server, photo_id: str, zimg_photo: bytes) -> None:
    answer = server.get(f"/info?md5={photo_id.upper()}")
    sha256 = hashlib.sha256(zimg_photo).hexdigest()
    assert answer.text == (
        f'{{"ret":true,"info":{{"size":{len(zimg_photo)},"width":640,"height":856,"quality":80,"format":"JPEG",'
        f'"orientation":1,"frames":1,"has_alpha":false,"sha256":"{sha256}"}}}}'
    )


def test_a_second_file_with_the_md5_of_another_keeps_its_sha256_alone(start_server: Callable[..., Server]) -> None:
    # Two files with one MD5 are made by giving the alias away beforehand: the store knows no better.
    first, second = make_photo(1), make_photo(2)
    server = start_server()
    server.upload(first)
    server.stop()
    md5, sha256 = hashlib.md5(second).hexdigest(), hashlib.sha256(second).hexdigest()
    _give_alias(server.store, md5, first)
    server = start_server()
    answer = server.http.post(f"{server.url}/upload", data=second)
    assert answer.status_code == 409
    assert answer.json()["ret"] is False
    assert answer.json()["error"]["sha256"] == sha256
    modern = server.http.post(f"{server.url}/images", data=second)
    assert (modern.status_code, modern.json()["sha256"]) == (409, sha256)
    assert server.get(f"/{md5}?p=0").content == first
    assert server.get(f"/{sha256}?p=0").content == second
    assert server.http.delete(f"{server.url}/images/{sha256}").status_code == 204
    assert server.get(f"/{md5}?p=0").content == first


def _give_alias(folder: Path, md5: str, data: bytes) -> None:

    from uvimg.store.local import LocalStore

    async def give() -> None:
        store = LocalStore(str(folder))
        record = await store.record(image_name(hashlib.sha256(data).hexdigest()))
        assert record is not None
        assert await store.bind([image_name(md5)], record) == [record]
        await store.close()

    asyncio.run(give())


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("w=-100", "w"),
        ("w=abc", "w"),
        ("w=1.5", "w"),
        ("w=9999999", "w"),
        ("h=99999999999999999999", "h"),
        ("w=20000&h=1", "w"),
        ("w=1&h=20000", "h"),
        ("p=5", "p"),
        ("p=-1", "p"),
        ("w=10&p=0", "h"),
        ("h=10&p=0", "w"),
        ("w=9999&p=3", "w"),
        ("g=2", "g"),
        ("q=0", "q"),
        ("q=101", "q"),
        ("x=700", "x"),
        ("y=856&w=1&h=1", "y"),
        ("r=ninety", "r"),
        ("f=exe", "f"),
        ("f=tiff", "f"),
    ],
)
def test_a_bad_parameter_is_named(server: Server, photo_id: str, query: str, parameter: str) -> None:
    modern = server.get(f"/images/{photo_id}?{query}")
    assert modern.status_code == 400
    assert modern.json()["parameter"] == parameter
    assert parameter in modern.json()["detail"]
    zimg = server.get(f"/{photo_id}?{query}")
    assert zimg.status_code == 400
    assert re.search(rf"<p>{parameter}\b", zimg.text)


def test_an_unknown_argument_makes_no_rendition_of_its_own(server: Server, photo_id: str) -> None:
    etags = {server.get(f"/{photo_id}?w=77{extra}").headers["ETag"] for extra in ("", "&v=1", "&utm=x", "&w=50", "&h=")}
    assert len(etags) == 1


def test_svg_is_served_locked_down_where_it_is_allowed(start_server: Callable[..., Server]) -> None:
    server = start_server(allowed_types="svg,jpeg")
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><rect width="40" height="20" fill="red"/>'
    svg += b"</svg>"
    md5 = server.upload(svg)
    original = server.get(f"/{md5}?p=0")
    assert original.content == svg
    assert original.headers["Content-Type"] == "image/svg+xml"
    assert original.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "sandbox" in original.headers["Content-Security-Policy"]
    rendition = server.get(f"/{md5}?w=80")
    assert rendition.headers["Content-Type"] == "image/jpeg"
    image = decode(rendition.content)
    assert (image.width, image.height) == (80, 40)
    assert image.getpoint(40, 20)[0] > 240


def test_settings_change_what_is_served(start_server: Callable[..., Server], zimg_photo: bytes) -> None:
    server = start_server(
        disable_zoom_up=True, format="webp", quality=50, image_headers="Cache-Control: public, max-age=5"
    )
    md5 = server.upload(zimg_photo)
    image = server.image(f"/{md5}?w=1000&h=100")
    assert (image.width, image.height) == (640, 100)
    answer = server.get(f"/{md5}")
    assert (answer.headers["Content-Type"], answer.headers["Cache-Control"]) == ("image/webp", "public, max-age=5")
    server.stop()
    server = start_server(image_headers=["Link: </a>", "Link: </b>"])
    assert server.get(f"/{md5}").headers["Link"] == "</a>, </b>"
    server.stop()
    server = start_server(disable_args=True)
    assert server.image(f"/{md5}?w=10&g=1").width == 640
    assert server.get(f"/{md5}?p=0").content != zimg_photo


@pytest.mark.parametrize(("save_new", "kept"), [(0, False), (1, True), (2, False)])
def test_save_new_decides_whether_renditions_are_found_after_a_restart(
    start_server: Callable[..., Server], zimg_photo: bytes, save_new: int, kept: bool
) -> None:
    server = start_server(save_new=save_new)
    md5 = server.upload(zimg_photo)
    rendition = server.get(f"/{md5}?w=123").content
    assert server.stop() == 0
    # Without workers that could make it anew within their time, what is found was kept.
    server = start_server(worker_timeout_s=0.1, cache_size=0)

    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGSTOP)
    again = server.get(f"/{md5}?w=123")
    assert again.status_code == (200 if kept else 503)
    if kept:
        assert again.content == rendition


def test_renditions_of_a_deleted_image_are_gone_for_good(
    start_server: Callable[..., Server], zimg_photo: bytes
) -> None:
    server = start_server()
    md5 = server.upload(zimg_photo)
    for width in range(20, 40):
        server.get(f"/{md5}?w={width}")
    assert server.http.delete(f"{server.url}/images/{md5}").status_code == 204
    assert server.stop() == 0

    async def look() -> None:
        store = LocalStore(str(server.store))
        assert await store.scan(b"") == []
        assert await store.size() == 0
        await store.close()

    asyncio.run(look())


def test_admin_deletes_as_zimg_does(server: Server) -> None:
    md5 = server.upload(make_photo(41))
    failed = server.get(f"/admin?md5={'0' * 32}&t=1").text
    assert failed == (
        f"<html><body><h1>Admin Command Failed!</h1><p>MD5: {'0' * 32}</p> <p>Command Type: 1</p> "
        "<p>Image Not Found.</p></body></html>"
    )
    assert "Command Failed." in server.get(f"/admin?md5={md5}&t=2").text
    assert "Command Failed." in server.get("/admin?md5=<script>&t=1").text
    assert f"<p>MD5: {'0' * 32}</p>" in server.get(f"/admin?md5={'0' * 32}&t=1&md5={md5}").text
    assert "Command Failed." in server.get("/admin?" + "a=b&" * 60).text
    assert "<script>" not in server.get("/admin?md5=<script>&t=1").text
    done = server.get(f"/admin?md5={md5}&t=1").text
    assert f"<h1>Admin Command Successful!</h1><p>MD5: {md5}</p> <p>Command Type: 1</p>" in done
    assert server.get(f"/{md5}").status_code == 404


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "images.localhost", "[::1]"])
def test_a_browser_may_delete_from_our_own_page(server: Server, host: str) -> None:
    md5 = server.upload(make_photo(42))
    headers = {"Host": f"{host}:{server.port}", "User-Agent": "Mozilla/5.0"}
    for own in ({"Referer": f"http://{host}:{server.port}/admin"}, {"Sec-Fetch-Site": "same-origin"}):
        assert server.get(f"/admin?md5={'1' * 32}&t=1", headers=headers | own).status_code == 200
    answer = server.http.delete(
        f"{server.url}/images/{md5}", headers=headers | {"Origin": f"http://{host}:{server.port}"}
    )
    assert answer.status_code == 204


def test_rules_and_trusted_proxies_decide_who_may_do_what(
    start_server: Callable[..., Server], zimg_photo: bytes
) -> None:
    server = start_server(
        upload_rule="allow 10.0.0.0/8; deny all",
        download_rule="deny 203.0.113.7;allow all",
        admin_rule="allow 2001:db8::/32",
        trusted_proxies="127.0.0.1,192.0.2.0/24",
    )

    def upload(forwarded: str | None) -> Any:
        headers = {"X-Forwarded-For": forwarded} if forwarded else {}
        return server.http.post(f"{server.url}/upload", data=zimg_photo, headers=headers).json()

    assert upload(None)["error"]["code"] == 3
    assert upload("11.1.1.1")["error"]["code"] == 3
    # What the client wrote stands to the left of what our proxies wrote.
    assert upload("10.1.1.1, 11.1.1.1")["error"]["code"] == 3
    assert upload("11.1.1.1, 10.1.1.1, 192.0.2.5")["ret"] is True
    assert upload("::ffff:10.1.1.1")["ret"] is True
    md5 = upload("10.1.1.1")["info"]["md5"]
    assert server.get(f"/{md5}", headers={"X-Forwarded-For": "203.0.113.7"}).status_code == 403
    assert server.get(f"/info?md5={md5}", headers={"X-Forwarded-For": "203.0.113.7"}).json()["error"]["code"] == 3
    assert server.get(f"/{md5}", headers={"X-Forwarded-For": "203.0.113.8"}).status_code == 200
    delete = f"{server.url}/images/{md5}"
    assert server.http.delete(delete).status_code == 403
    assert server.http.delete(delete, headers={"Forwarded": 'for="[2001:db8::1]:4711"'}).status_code == 204


def test_equal_requests_in_flight_are_worked_out_once(start_server: Callable[..., Server]) -> None:
    server = start_server(save_new=0, workers=1)
    md5 = server.upload(corpus.jpeg(corpus.photo(3000, 2000, seed=3)))
    path = f"/{md5}?w=900&f=avif"
    single = _cpu_of_children(server, lambda: server.get(path.replace("900", "901")))

    def get(_: int) -> bytes:

        return requests.get(server.url + path, timeout=60).content

    def ten() -> None:
        with concurrent.futures.ThreadPoolExecutor(10) as threads:
            assert len(set(threads.map(get, range(10)))) == 1

    assert _cpu_of_children(server, ten) < 3 * single


def _cpu_of_children(server: Server, work: Callable[[], object]) -> float:
    """CPU seconds that the image workers spend on some work."""

    def spent() -> int:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        return sum(sum(map(int, Path(f"/proc/{child}/stat").read_text().split()[13:15])) for child in children)

    before = spent()
    work()
    return spent() - before + 1


def test_a_kept_rendition_that_was_cut_is_made_again(start_server: Callable[..., Server]) -> None:
    server = start_server(cache_size=0, memo_size=0, workers=1)
    image_id = server.upload(make_photo(1, 600, 400))
    whole = server.get(f"/{image_id}?w=590&f=png").content

    def blobs() -> list[Path]:
        return [path for path in (server.store / "blobs").rglob("*") if path.is_file() and path.stat().st_size > 100]

    wait_until(lambda: len(blobs()) == 1)
    os.truncate(blobs()[0], 1000)
    assert server.get(f"/{image_id}?w=590&f=png").content == whole
    wait_until(lambda: blobs()[0].read_bytes() == whole)


def test_a_cut_or_missing_blob_is_an_error_and_never_half_a_picture(start_server: Callable[..., Server]) -> None:
    server = start_server(cache_size=0)
    data = corpus.jpeg(corpus.photo(700, 500, seed=8), quality=97)
    md5 = server.upload(data)
    (blob,) = [path for path in (server.store / "blobs").rglob("*") if path.is_file()]
    blob.write_bytes(data[:1000])
    for headers in ({}, {"Range": "bytes=2000-2099"}):
        answer = server.get(f"/{md5}?p=0", headers=headers)
        assert (answer.status_code, answer.headers["Cache-Control"]) == (500, "no-store")
    blob.unlink()
    assert server.get(f"/{md5}?w=50").status_code == 500
    assert server.get("/echo").status_code == 200
    server.upload(data)
    assert server.get(f"/{md5}?p=0").content == data


def test_uploads_deletes_and_reads_at_once_end_in_both_ids_or_none(start_server: Callable[..., Server]) -> None:
    """From two processes on one store; whatever the order, no answer is a server error."""
    first, second = start_server(workers=1), start_server(workers=1)
    data = make_photo(71, 200, 150)
    md5, sha256 = hashlib.md5(data).hexdigest(), hashlib.sha256(data).hexdigest()

    def act(number: int) -> int:

        url = (first, second)[number % 2].url
        match number % 5:
            case 0:
                return requests.post(f"{url}/images", data=data, timeout=20).status_code
            case 1:
                return requests.delete(f"{url}/images/{md5}", timeout=20).status_code
            case 2:
                return requests.get(f"{url}/{md5}?p=0", timeout=20).status_code
            case _:
                return requests.get(f"{url}/{sha256}?w={40 + number % 3}", timeout=20).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        statuses = set(threads.map(act, range(300)))
    assert statuses <= {200, 201, 204, 404}
    assert (
        len({server.get(f"/{image_id}?p=0").status_code for server in (first, second) for image_id in (md5, sha256)})
        == 1
    )
    assert "ERROR" not in first.log + second.log
