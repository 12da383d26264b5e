"""What the apps make of a store that cannot list what it holds, and may forget it."""

import socket
from collections.abc import Iterator

import pytest

from tests.backends import Program, list_memcached, start_memcached
from tests.conftest import Server, make_photo
from tests.test_sharing import wait_until
from uvimg.cli import main

TEXT = b"It was said, and said again. " * 3000


@pytest.fixture(scope="module")
def memcached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = start_memcached(tmp_path_factory.mktemp("memcached"))
    yield program
    program.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, memcached: Program) -> Iterator[Server]:
    url = f"memcached://127.0.0.1:{memcached.port}"
    running = Server(tmp_path_factory.mktemp("server"), store=url, workers=1, coded_copies="first", cache_size=0)
    yield running
    running.kill()


def test_an_image_is_shown_described_and_deleted(server: Server) -> None:
    photo = make_photo(1, 600, 400)
    md5 = server.upload(photo)
    assert server.upload(photo) == md5
    assert server.get(f"/{md5}?p=0").content == photo
    rendition = server.get(f"/{md5}?w=50")
    assert rendition.status_code == 200
    assert server.get(f"/{md5}?w=50").content == rendition.content
    assert server.get(f"/{md5}?p=0", headers={"Range": "bytes=10-19"}).content == photo[10:20]
    assert server.get(f"/info?md5={md5}").json()["info"]["width"] == 600
    assert server.get(f"/admin?md5={md5}&t=1").status_code == 200
    assert [server.get(f"/{md5}{query}").status_code for query in ("", "?w=50", "?p=0")] == [404] * 3
    assert server.upload(photo) == md5
    assert server.get(f"/{md5}?w=50").content == rendition.content


def test_a_forgotten_image_is_whole_again_when_it_is_uploaded_again(server: Server, memcached: Program) -> None:
    photo = make_photo(2)
    before = set(list_memcached(memcached.port))
    md5 = server.upload(photo)
    blobs = [key for key in list_memcached(memcached.port) if key not in before and ":b:" in key]
    forget(memcached, blobs)
    assert server.get(f"/{md5}?p=0").status_code == 500
    assert server.upload(photo) == md5
    assert server.get(f"/{md5}?p=0").content == photo


def forget(memcached: Program, keys: list[str]) -> None:
    assert keys
    with socket.create_connection(("127.0.0.1", memcached.port), 5) as asked, asked.makefile("rb") as answer:
        for key in keys:
            asked.sendall(f"delete {key}\r\n".encode())
            assert answer.readline() == b"DELETED\r\n"


def test_a_document_is_shown_coded_and_deleted_and_no_directory_is_listed(server: Server, memcached: Program) -> None:
    docs = server.url + "/docs"
    assert server.http.put(f"{docs}/a/page.txt", TEXT).status_code == 201
    assert server.http.put(f"{docs}/a/page.txt", TEXT + b"new").status_code == 204
    for _ in range(2):
        answer = server.get("/docs/a/page.txt", headers={"Accept-Encoding": "gzip"})
        assert answer.content == TEXT + b"new"
    assert server.get("/docs/a/page.txt", headers={"Accept-Encoding": ""}).content == TEXT + b"new"
    assert server.get("/docs/a/none.txt").status_code == server.get("/docs/a").status_code == 404
    listing = server.get("/docs/a/")
    assert listing.status_code == 501
    assert "cannot list" in listing.json()["detail"]
    assert server.http.delete(f"{docs}/a/page.txt").status_code == 204
    assert server.get("/docs/a/page.txt").status_code == 404


def test_values_are_kept_under_keys_and_what_takes_a_list_of_them_is_told_so(server: Server) -> None:
    kv = server.url + "/kv"
    for value in (b"small", TEXT):
        assert server.http.put(f"{kv}/db/key", value).status_code in (200, 201)
        assert server.get("/kv/db/key").content == value
    assert server.http.delete(f"{kv}/db/key").status_code == 200
    assert server.get("/kv/db/key").status_code == 404
    for path in ("/kv/db/_all", "/kv/db/_first", "/kv/db/k/_match"):
        answer = server.get(path)
        assert (path, answer.status_code) == (path, 501)
        assert "cannot list" in answer.text


def test_health_and_metrics_are_told(server: Server, memcached: Program) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert f'uvimg_backend_away{{backend="memcached 127.0.0.1:{memcached.port}"}} 0.0' in server.get("/metrics").text


def test_a_command_that_takes_a_list_is_refused_in_one_line(
    memcached: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"memcached://127.0.0.1:{memcached.port}"
    for command in (["scrub"], ["gc"], ["kv", "list"], ["kv", "dump"]):
        assert main([*command, "--store", store]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.count("\n") == 1
        assert "cannot list" in told.err


def test_a_store_that_comes_back_is_used_again_and_is_503_meanwhile(server: Server, memcached: Program) -> None:
    md5 = server.upload(make_photo(3))
    memcached.kill()
    for _ in range(5):
        answer = server.get(f"/{md5}?w=20")
        assert answer.status_code == 503
        assert answer.headers["Retry-After"]
    memcached.start()
    wait_until(lambda: server.get(f"/{md5}?w=20").status_code == 404)
    assert server.upload(make_photo(3)) == md5
    assert server.get(f"/{md5}?w=20").status_code == 200
