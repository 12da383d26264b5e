"""The documents app: what is stored is given back, in every coding, and no path leads anywhere else."""

import gzip
import os
import socket
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import brotli
import pytest
import requests
import zstandard

from tests.conftest import Server

PAGE = b"<!DOCTYPE html><title>T</title>" + b"<p>It was said, and said again, that there is nothing new.</p>\n" * 400


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Docs"]:
    # No better copy comes, and with it another tag, between two requests of a test.
    running = Server(tmp_path_factory.mktemp("documents"), coded_copies="first")
    yield Docs(running)
    running.kill()


class Docs:
    """The documents of a server."""

    def __init__(self, server: Server, base: str = "/docs") -> None:
        self.server, self.base = server, base

    def put(self, path: str, data: bytes, **headers: str) -> requests.Response:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.server.http.put(self.server.url + self.base + path, data=data, headers=fields)

    def get(self, path: str, accept: str | None = None, method: str = "GET", **headers: str) -> requests.Response:
        fields: dict[str, Any] = {"Accept-Encoding": accept} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        answer = self.server.http.request(
            method, self.server.url + self.base + path, headers=fields, stream=True, allow_redirects=False
        )
        # As it came: requests would decode it.
        answer._content = answer.raw.read(decode_content=False)
        return answer

    def delete(self, path: str, **headers: str) -> requests.Response:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.server.http.delete(self.server.url + self.base + path, headers=fields)


def decode(answer: requests.Response) -> bytes:
    match answer.headers.get("Content-Encoding"):
        case None:
            return answer.content
        case "gzip":
            return gzip.decompress(answer.content)
        case "zstd":
            return zstandard.ZstdDecompressor().decompressobj().decompress(answer.content)
        case "br":
            return brotli.decompress(answer.content)
    raise AssertionError(answer.headers["Content-Encoding"])


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_document_is_given_back_with_its_type_in_every_coding_under_a_tag_of_its_own(docs: Docs) -> None:
    created = docs.put("/a/page.html", PAGE)
    assert created.status_code == 201
    assert created.headers["Location"] == "/docs/a/page.html"
    tags = {}
    for accept in (None, "gzip", "br", "zstd", "identity"):
        for _ in range(2):
            answer = docs.get("/a/page.html", accept)
            assert answer.status_code == 200
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert answer.headers["Vary"] == "Accept-Encoding"
            assert decode(answer) == PAGE
        assert answer.headers.get("Content-Encoding", "identity") == (accept or "identity")
        tags[accept or "identity"] = answer.headers["ETag"]
        assert ("Accept-Ranges" in answer.headers) == (accept in (None, "identity"))
        again = docs.get("/a/page.html", accept, If_None_Match=answer.headers["ETag"])
        assert again.status_code == 304
        assert again.headers["Vary"] == "Accept-Encoding"
        assert again.headers["ETag"] == answer.headers["ETag"]
        head = docs.get("/a/page.html", accept, "HEAD")
        assert head.headers["ETag"] == answer.headers["ETag"]
        assert docs.get("/a/page.html", accept, If_Match=answer.headers["ETag"]).status_code == 200
    assert len(set(tags.values())) == 4
    assert not any(tag.startswith("W/") for tag in tags.values())
    # Another coding's tag is no excuse to send nothing.
    assert docs.get("/a/page.html", "gzip", If_None_Match=tags["br"]).status_code == 200
    assert docs.get("/a/page.html", "gzip", If_Match=tags["br"]).status_code == 412


def test_there_are_ranges_of_the_document_as_it_is_alone(docs: Docs) -> None:
    docs.put("/ranges.txt", PAGE)
    plain = docs.get("/ranges.txt", Range="bytes=10-19")
    assert (plain.status_code, plain.content) == (206, PAGE[10:20])
    assert docs.get("/ranges.txt", Range=f"bytes={len(PAGE)}-").status_code == 416
    coded = docs.get("/ranges.txt", "gzip", Range="bytes=10-19")
    assert (coded.status_code, decode(coded)) == (200, PAGE)
    resumed = docs.get("/ranges.txt", Range="bytes=10-19", If_Range=coded.headers["ETag"])
    assert (resumed.status_code, resumed.content) == (200, PAGE)
    resumed = docs.get("/ranges.txt", Range="bytes=10-19", If_Range=plain.headers["ETag"])
    assert resumed.status_code == 206


def test_what_is_compressed_already_or_tiny_is_sent_as_it_is(docs: Docs) -> None:
    for name, data in (("a.png", PAGE), ("a.zip", PAGE), ("a.woff2", PAGE), ("a.txt", b"short")):
        docs.put(f"/{name}", data)
        answer = docs.get(f"/{name}", "gzip, br, zstd")
        assert (answer.content, answer.headers.get("Content-Encoding"), answer.headers.get("Vary")) == (
            data,
            None,
            None,
        )
        assert docs.get(f"/{name}?compression=zstd").content == data


def test_who_refuses_everything_hears_406(docs: Docs) -> None:
    docs.put("/b.html", PAGE)
    docs.put("/b.png", PAGE)
    for path, accept in (("/b.html", "identity;q=0"), ("/b.html", "*;q=0"), ("/b.png", "gzip, identity;q=0")):
        answer = docs.get(path, accept)
        assert answer.status_code == 406
        assert answer.headers["Vary"] == "Accept-Encoding"
        assert answer.json()["status"] == 406
    assert docs.get("/b.html", "identity;q=0, gzip").headers["Content-Encoding"] == "gzip"


def test_a_coding_and_level_can_be_forced_and_what_cannot_be_is_400(docs: Docs) -> None:
    docs.put("/c.html", PAGE)
    sizes = []
    for query in ("zstd&level=1", "zstd&level=22", "zstd", "gzip&level=1", "gzip&level=9", "none"):
        answer = docs.get(f"/c.html?compression={query}", "identity")
        assert decode(answer) == PAGE
        assert answer.headers.get("Content-Encoding", "none") == query.partition("&")[0]
        sizes.append(len(answer.content))
        tag = answer.headers["ETag"]
        assert docs.get(f"/c.html?compression={query}", If_None_Match=tag).status_code == 304
    assert sizes[0] > sizes[1]
    for query in (
        *("compression=br", "compression=", "level=3", "compression=zstd&level=0", "compression=zstd&level=23"),
        *("compression=gzip&level=10", "compression=none&level=1", "compression=zstd&level=-1"),
        *("compression=zstd&level=3.0", "compression=zstd&level=%D9%A3"),
    ):
        answer = docs.get(f"/c.html?{query}")
        # An empty value counts as not given.
        assert answer.status_code == (200 if query == "compression=" else 400), query


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *(("/a//b", 400), ("/./a", 400), ("/a/..", 400), ("/%2e%2e/a", 400), ("/a/%2E%2e/%2e%2e/etc", 400)),
        *(("/a%2fb", 400), ("/a%5Cb", 400), ("/%00", 400), ("/a%0d%0aX:%20y", 400), ("/%ff", 400), ("/%c0%af", 400)),
        *(("/" + "x" * 256, 414), ("/" + "x/" * 300 + "y", 414), ("/%e2%80%ae", 400), ("/dir/", 405), ("/", 405)),
    ],
)
def test_no_document_has_a_path_that_can_be_read_in_two_ways(docs: Docs, path: str, status: int) -> None:
    # Not by requests, which mends paths.
    with socket.create_connection(("127.0.0.1", docs.server.port)) as client:
        client.sendall(f"PUT /docs{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        assert client.recv(100).split()[1] == str(status).encode()


def test_paths_keep_what_may_stand_in_them(docs: Docs) -> None:
    for path in ("/~ü/%e6%96%87 %25+&.txt".replace(" ", "%20"), "/a:b;c=d@e"):
        created = docs.put(path, b"one")
        assert created.status_code == 201
        assert docs.server.get(created.headers["Location"]).content == b"one"


def test_a_directory_shows_its_index_else_what_is_in_it(docs: Docs) -> None:
    for name in ("index.html", "b.css", "sub/x.js", "sub/deep/y.js", "sub.txt"):
        docs.put(f"/site/{name}", b"x" * len(name))
    moved = docs.get("/site?a=b")
    assert (moved.status_code, moved.headers["Location"]) == (301, "/docs/site/?a=b")
    assert docs.get("/site/").content == b"x" * len("index.html")
    listed = docs.get("/site/?list").json()
    assert [entry["name"] for entry in listed["entries"]] == ["b.css", "index.html", "sub.txt", "sub/"]
    assert listed["entries"][0]["size"] == 5
    assert "next" not in listed
    assert [entry["name"] for entry in docs.get("/site/sub/").json()["entries"]] == ["deep/", "x.js"]
    names, after = [], ""
    while True:
        page = docs.get(f"/site/?list&limit=1&after={after}").json()
        names += [entry["name"] for entry in page["entries"]]
        if "next" not in page:
            break
        after = page["next"]
    assert names == ["b.css", "index.html", "sub.txt", "sub/"]
    for query in ("limit=0", "limit=1001", "limit=x", "after=a/b"):
        assert docs.get(f"/site/?list&{query}").status_code == 400
    assert docs.get("/nowhere/").status_code == 404
    assert docs.get("/nowhere").status_code == 404
    assert docs.server.http.get(f"{docs.server.url}/docs", allow_redirects=False).headers["Location"] == "/docs/"


def test_a_document_is_replaced_and_deleted_where_its_tag_says_so(docs: Docs) -> None:
    first = docs.put("/e.txt", b"1" * 1000)
    assert docs.put("/e.txt", b"2", If_None_Match="*").status_code == 412
    assert docs.put("/e.txt", b"2", If_Match='"other"').status_code == 412
    # Who changes it may have seen it coded.
    seen = docs.get("/e.txt", "gzip").headers["ETag"]
    second = docs.put("/e.txt", b"2" * 1000, If_Match=seen)
    assert second.status_code == 204
    assert first.headers["ETag"] != second.headers["ETag"]
    for accept in ("gzip", "zstd", "identity"):
        assert decode(docs.get("/e.txt", accept)) == b"2" * 1000
    assert docs.delete("/e.txt", If_Match=first.headers["ETag"]).status_code == 412
    assert docs.delete("/e.txt").status_code == 204
    assert docs.delete("/e.txt").status_code == 404
    assert docs.get("/e.txt", "gzip").status_code == 404


def test_what_cannot_be_stored_as_it_is_meant_is_refused(docs: Docs) -> None:
    assert docs.put("/f.txt", b"x", Content_Encoding="gzip").status_code == 415
    assert docs.put("/f.txt", b"x", Content_Range="bytes 0-0/2").status_code == 400
    assert docs.put("/f.txt", b"x", Content_Type="no type").status_code == 400
    assert docs.put("/f.txt", b"x", Use_As_Dictionary="match=5").status_code == 400
    assert docs.put("/f.txt", b"x", Sec_Fetch_Site="cross-site").status_code == 403
    assert docs.delete("/f.txt", Sec_Fetch_Site="cross-site").status_code == 403
    assert docs.get("/f.txt").status_code == 404
    assert docs.get("/f.txt", method="POST").status_code == 405
    kept = docs.put("/f.bin", b"x", Content_Type='text/x; a="b"', Cache_Control="max-age=60")
    assert kept.status_code == 201
    answer = docs.get("/f.bin")
    assert (answer.headers["Content-Type"], answer.headers["Cache-Control"]) == ('text/x; a="b"', "max-age=60")


def test_a_stored_page_has_no_origin_to_act_from(docs: Docs) -> None:
    docs.put("/g.html", PAGE)
    policy = docs.get("/g.html", "gzip").headers["Content-Security-Policy"]
    assert policy.startswith("sandbox ")
    assert "allow-same-origin" not in policy
    assert docs.get("/g.html").headers["X-Content-Type-Options"] == "nosniff"


def test_pages_json_and_values_are_coded_too_and_photos_never(docs: Docs, zimg_photo: bytes) -> None:
    image = docs.server.upload(zimg_photo)
    root = Docs(docs.server, "")
    page = root.get("/", "gzip")
    assert page.headers["Content-Encoding"] == "gzip"
    assert decode(page) == root.get("/").content
    assert "Accept-Encoding" in page.headers["Vary"]
    assert "Content-Encoding" not in root.get(f"/{image}?p=0", "gzip, zstd").headers
    assert "Vary" not in root.get(f"/{image}?p=0", "gzip, zstd").headers
    docs.server.http.put(f"{docs.server.url}/kv/a/b", data=PAGE, headers={"Content-Type": "text/plain"})
    value = root.get("/kv/a/b", "zstd")
    assert (value.headers["Content-Encoding"], decode(value)) == ("zstd", PAGE)
    assert root.get("/kv/a/b", "zstd", If_None_Match=value.headers["ETag"]).status_code == 304
    assert root.get("/kv/a/b", If_None_Match=value.headers["ETag"]).status_code == 200


FIELDS = ("Accept-Encoding", "Available-Dictionary", "If-None-Match", "If-Match", "Range", "If-Range", "Dictionary-ID")
FRAGMENTS = (
    *("gzip", "zstd", "br", "dcz", "identity", "*", ";q=", "0", "1", "0.5", ", ", ";", "=", '"', ":", "\\", " ", "\t"),
    *("W/", "bytes=", "-", "99999999999999999999", "AAAA", "é", "\xff", "x" * 200, "(", ")", "q", "%00"),
)


def test_no_header_value_breaks_anything(docs: Docs) -> None:
    docs.put("/h.txt", PAGE[:2000])
    random = Random(6)
    for _ in range(int(os.environ.get("HEADER_VALUES", "200"))):
        fields = {
            random.choice(FIELDS): "".join(random.choices(FRAGMENTS, k=random.randrange(8))).strip()
            for _ in range(random.randrange(1, 4))
        }
        answer = docs.get("/h.txt", fields.pop("Accept-Encoding", "dcz, zstd"), **fields)
        assert answer.status_code in (200, 206, 304, 406, 412, 416), fields
        if answer.status_code == 200:
            assert decode(answer) == PAGE[:2000]
    assert "Traceback" not in docs.server.log
