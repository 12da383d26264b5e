"""HTTP through a real socket: uploads, both faces, conditional requests, ranges, errors, access, drain."""

import concurrent.futures
import hashlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import pytest

from bench import corpus
from tests.conftest import Server, make_photo

EVERY_FRONT_END = True


@pytest.fixture
def photo_id(server: Server, zimg_photo: bytes) -> str:
    return server.upload(zimg_photo)


def talk(server: Server, data: bytes, *, half_close: bool = False) -> bytes:
    """What comes back for these bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(65_536):
            received += piece
        return received


# Uploads


@pytest.mark.parametrize(
    "content_type", ["jpeg", "JPEG", "jpg", "image/jpeg", "application/x-www-form-urlencoded", None]
)
def test_a_raw_upload_is_answered_as_zimg_answers(server: Server, zimg_photo: bytes, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    answer = server.http.post(f"{server.url}/upload", data=zimg_photo, headers=headers)
    md5 = hashlib.md5(zimg_photo).hexdigest()
    assert answer.text == f'{{"ret":true,"info":{{"md5":"{md5}","size":{len(zimg_photo)}}}}}'
    assert answer.headers["Content-Type"] == "application/json"


def test_post_to_the_root_uploads_too(server: Server, zimg_photo: bytes) -> None:
    assert server.http.post(f"{server.url}/", data=zimg_photo).json()["ret"] is True


def test_a_form_is_answered_to_the_byte_as_zimg_answers(server: Server, zimg_photo: bytes) -> None:
    files = [
        ("userfile", ("a.jpg", zimg_photo)),
        ("userfile", ("<b>.txt", b"no picture at all")),
        ("userfile", ("c.jpg", zimg_photo[: len(zimg_photo) // 2])),
    ]
    answer = server.http.post(f"{server.url}/upload", files=files, data={"comment": "ignored"})
    md5 = hashlib.md5(zimg_photo).hexdigest()
    assert answer.text == (
        "<html>\n<head>\n<title>Upload Result</title>\n</head>\n<body>\n"
        f"<h1>MD5: {md5}</h1>\n"
        "Image upload successfully! You can get this image via this address:<br/><br/>\n"
        f'<a href="/{md5}">http://yourhostname:{server.port}/{md5}</a>'
        "?w=width&h=height&g=isgray&x=position_x&y=position_y&r=rotate&q=quality&f=format\n"
        "<h1>File: &lt;b&gt;.txt</h1>\n<p>File type is not supported!</p>\n"
        "<h1>Failed!</h1>\n<p>File save failed!</p>\n"
        "</body>\n</html>\n"
    )
    assert answer.headers["Content-Type"].startswith("text/html")


def test_a_form_without_files_says_upload_failed(server: Server) -> None:
    answer = server.http.post(f"{server.url}/upload", files={"text": (None, "value"), "userfile": ("", b"")})
    assert "<h1>Upload Failed!</h1>" in answer.text


def test_a_form_answers_json_to_who_asks_for_it(server: Server, zimg_photo: bytes) -> None:
    files = [("a", ("a.jpg", zimg_photo)), ("b", ("b.jpg", b"not one")), ("c", ("c.png", make_photo(3)))]
    answer = server.http.post(f"{server.url}/upload", files=files, headers={"Accept": "application/json"}).json()
    assert answer["ret"] is True
    assert [entry.get("md5") for entry in answer["info"]] == [
        hashlib.md5(zimg_photo).hexdigest(),
        None,
        hashlib.md5(make_photo(3)).hexdigest(),
    ]
    assert answer["info"][1]["error"]["code"] == 1


def test_a_chunked_upload_is_taken(server: Server, zimg_photo: bytes) -> None:
    pieces = (zimg_photo[start : start + 1000] for start in range(0, len(zimg_photo), 1000))
    assert server.http.post(f"{server.url}/upload", data=pieces).json()["info"]["size"] == len(zimg_photo)


def test_a_form_on_the_modern_face_takes_one_file_and_stores_none_of_two(server: Server) -> None:
    one, two = make_photo(21), make_photo(22)
    created = server.http.post(f"{server.url}/images", files={"file": ("x.jpg", one)})
    assert (created.status_code, created.json()["md5"]) == (201, hashlib.md5(one).hexdigest())
    refused = server.http.post(f"{server.url}/images", files=[("f", ("2.jpg", two)), ("f", ("1.jpg", one))])
    assert refused.status_code == 400
    assert server.get(f"/{hashlib.md5(two).hexdigest()}").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", f"/info?md5={'0' * 32}", 2),
        ("GET", "/info", 8),
        ("GET", "/info?md5=nonsense", 8),
        ("GET", f"/info?md5={'0' * 32}", 9),
        ("GET", "/upload", 2),
    ],
)
def test_zimg_errors_keep_their_codes(server: Server, method: str, path: str, code: int) -> None:
    answer = server.http.request(method, server.url + path)
    assert answer.status_code == 200
    assert answer.json()["error"]["code"] == code


# Bad input


def test_what_is_no_image_is_refused_and_leaves_nothing(start_server: Callable[..., Server], zimg_photo: bytes) -> None:
    server = start_server(max_size="1MiB")
    png = corpus.photo(50, 50).pngsave_buffer()
    bad: dict[str, tuple[bytes, int, int]] = {
        "text": (b"hello, this is no picture", 415, 1),
        "html": (b"<html><script>alert(1)</script></html>" * 99, 415, 1),
        "a matrix, which libvips would load": (b"3 3\n1 2 3\n4 5 6\n7 8 9\n", 415, 1),
        "svg, not allowed": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', 415, 1),
        "half a jpeg": (zimg_photo[: len(zimg_photo) // 2], 422, 1),
        "jpeg magic alone": (b"\xff\xd8\xff\xe0" + bytes(50), 422, 1),
        "half a png": (png[: len(png) // 2], 422, 1),
        "too large": (zimg_photo + bytes(1 << 20), 413, 7),
    }
    for name, (data, status, code) in bad.items():
        modern = server.http.post(f"{server.url}/images", data=data)
        assert (name, modern.status_code) == (name, status)
        assert modern.headers["Content-Type"] == "application/problem+json"
        assert modern.json()["status"] == status
        assert modern.json()["detail"]
        zimg = server.http.post(f"{server.url}/upload", data=data)
        assert (name, zimg.json()["error"]["code"]) == (name, code)
        assert zimg.status_code == (413 if status == 413 else 200)
    assert server.http.post(f"{server.url}/upload").json()["error"]["code"] == 5
    assert server.http.post(f"{server.url}/upload", data=iter([])).json()["error"]["code"] == 4
    assert server.http.post(f"{server.url}/images").status_code == 400
    assert server.stop() == 0
    assert [path for path in (server.store / "blobs").rglob("*") if path.is_file()] == []
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b"--x\r\n"),
        ("multipart/form-data; boundary=x", b"no boundary in here"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="f"; filename="a.jpg"\r\n\r\n\xff\xd8',
        ),
        ("multipart/form-data; boundary=" + "x" * 500, b"--x--\r\n"),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"A: b\r\n" * 5000 + b"\r\n\r\n--x--\r\n"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\n\r\n' * 2000 + b"--x--\r\n",
        ),
    ],
)
def test_a_malformed_form_is_told_apart(server: Server, content_type: str, body: bytes) -> None:
    for path, status in (("/upload", 200), ("/images", 400)):
        answer = server.http.post(server.url + path, data=body, headers={"Content-Type": content_type})
        assert answer.status_code == status
        if path == "/upload":
            assert answer.json()["error"]["code"] == 4


def test_too_large_a_body_is_refused_before_it_is_sent(start_server: Callable[..., Server]) -> None:
    server = start_server(max_size="1MiB")
    for extra in (b"", b"Expect: 100-continue\r\n"):
        started = time.monotonic()
        head = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n" + extra + b"\r\n"
        answer = talk(server, head)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"code":7' in answer
        assert b"100 Continue" not in answer
        assert time.monotonic() - started < 15


def test_an_expected_100_continue_comes_when_the_body_is_wanted(server: Server, zimg_photo: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        head = f"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: {len(zimg_photo)}\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(zimg_photo)
        assert b'"ret":true' in connection.recv(10_000)
    head = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: the-unexpected\r\n\r\n"
    assert talk(server, head).startswith(b"HTTP/1.1 417 ")


def test_a_body_shorter_than_declared_is_told_and_stores_nothing(server: Server) -> None:
    data = make_photo(31)
    head = f"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data) + 10}\r\n\r\n".encode()
    answer = talk(server, head + data, half_close=True)
    assert b'"code":4' in answer
    assert b'"ret":true' not in answer
    assert server.get(f"/{hashlib.md5(data).hexdigest()}").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/" + "0" * 32,
        "/images/" + "0" * 64,
        "/images/" + "0" * 63,
        "/images/%2e%2e/%2e%2e/etc/passwd",
        "/../../etc/passwd",
        "/%2e%2e%2f%2e%2e%2fetc/passwd",
        "//evil.example/" + "0" * 32,
        "/" + "0" * 32 + "%0a",
        "/" + "0" * 32 + "/..",
        "/" + "0" * 32 + "%00.jpg",
        "/images/" + "0" * 32 + "/info/more",
        "/data/names/data.mdb",
        "/dump",
        "/ " * 10,
    ],
)
def test_what_does_not_exist_is_404_whatever_the_path_tries(server: Server, path: str) -> None:
    answer = talk(server, f"GET {path.replace(' ', '%20')} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 ")


def test_methods_that_are_not_there_say_which_are(server: Server, photo_id: str) -> None:
    for method, path, allow in [
        ("PUT", f"/images/{photo_id}", "GET, HEAD, DELETE, OPTIONS"),
        ("DELETE", "/images", "POST, OPTIONS"),
        ("POST", f"/{photo_id}", "GET, HEAD, OPTIONS"),
    ]:
        answer = server.http.request(method, server.url + path)
        assert (answer.status_code, answer.headers["Allow"]) == (405, allow)
        options = server.http.options(server.url + path)
        assert (options.status_code, options.headers["Allow"]) == (204, allow)


def test_the_small_pages_are_there(server: Server) -> None:
    assert server.get("/echo").text == "<html><body><h1>zimg works!</h1></body></html>"
    assert server.get("/favicon.ico").status_code == 200
    index = server.get("/")
    assert 'action="upload"' in index.text
    assert 'name="userfile"' in index.text
    assert "default-src 'none'" in index.headers["Content-Security-Policy"]
    assert server.get("/admin").status_code == 200


# Representations


def test_head_is_get_without_the_body(server: Server, photo_id: str) -> None:
    for path in (f"/{photo_id}?w=50", f"/{photo_id}?p=0", "/echo", "/", f"/info?md5={photo_id}", f"/{'0' * 32}"):
        got, head = server.get(path), server.http.head(server.url + path)
        assert head.content == b""
        assert head.status_code == got.status_code
        for name in ("Content-Length", "Content-Type", "ETag", "Cache-Control", "X-Content-Type-Options"):
            assert (path, name, head.headers.get(name)) == (path, name, got.headers.get(name))


def test_a_matching_etag_is_304_with_the_headers_of_the_200(server: Server, photo_id: str) -> None:
    for path in (f"/{photo_id}?w=60", f"/{photo_id}?p=0"):
        got = server.get(path)
        etag = got.headers["ETag"]
        assert re.fullmatch(r'"[0-9a-f]{32}"', etag)
        for field in (etag, etag.strip('"'), f'"other", {etag}', f"W/{etag}", "*"):
            again = server.get(path, headers={"If-None-Match": field})
            assert (field, again.status_code, again.content) == (field, 304, b"")
            assert "Content-Length" not in again.headers
            for name in ("ETag", "Cache-Control", "Last-Modified"):
                assert again.headers[name] == got.headers[name]
        assert server.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_dates_are_compared_where_no_etag_is_sent(server: Server, photo_id: str) -> None:
    path = f"/{photo_id}?p=0"
    modified = server.get(path).headers["Last-Modified"]
    later, earlier = formatdate(time.time() + 9999, usegmt=True), formatdate(0, usegmt=True)
    assert server.get(path, headers={"If-Modified-Since": modified}).status_code == 304
    assert server.get(path, headers={"If-Modified-Since": later}).status_code == 304
    assert server.get(path, headers={"If-Modified-Since": earlier}).status_code == 200
    assert server.get(path, headers={"If-Modified-Since": later, "If-None-Match": '"x"'}).status_code == 200
    failed = server.get(path, headers={"If-Unmodified-Since": earlier})
    assert (failed.status_code, failed.headers["Cache-Control"]) == (412, "no-store")


@pytest.mark.parametrize("path", ["?p=0", "?w=200", "?f=png"])
def test_a_single_range_is_honoured_on_every_image(server: Server, photo_id: str, path: str) -> None:
    whole = server.get(f"/{photo_id}{path}")
    data, size = whole.content, len(whole.content)
    assert whole.headers["Accept-Ranges"] == "bytes"
    for field, start, stop in [
        ("bytes=0-0", 0, 1),
        ("bytes=10-99", 10, 100),
        (f"bytes=100-{size * 9}", 100, size),
        ("bytes=100-", 100, size),
        ("bytes=-100", size - 100, size),
        (f"bytes=-{size * 9}", 0, size),
    ]:
        part = server.get(f"/{photo_id}{path}", headers={"Range": field})
        assert (field, part.status_code) == (field, 206)
        assert part.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{size}"
        assert part.content == data[start:stop]
        assert part.headers["ETag"] == whole.headers["ETag"]
    beyond = server.get(f"/{photo_id}{path}", headers={"Range": f"bytes={size}-"})
    assert (beyond.status_code, beyond.headers["Content-Range"]) == (416, f"bytes */{size}")
    for ignored in ("bytes=0-1,5-6", "lines=1-2", "bytes=9-2", "nonsense"):
        assert server.get(f"/{photo_id}{path}", headers={"Range": ignored}).content == data
    etag, date = whole.headers["ETag"], whole.headers["Last-Modified"]
    for if_range, status in [
        (etag, 206),
        ('"other"', 200),
        (f"W/{etag}", 200),
        (date, 206),
        (formatdate(0, usegmt=True), 200),
    ]:
        answer = server.get(f"/{photo_id}{path}", headers={"Range": "bytes=1-2", "If-Range": if_range})
        assert (if_range, answer.status_code) == (if_range, status)


def test_a_large_original_comes_back_whole_and_in_parts(server: Server) -> None:
    data = corpus.photo(1500, 1200, seed=5).pngsave_buffer(compression=1)
    assert len(data) > 3_000_000
    md5 = server.upload(data)
    assert server.get(f"/{md5}?p=0").content == data
    part = server.get(f"/{md5}?p=0", headers={"Range": "bytes=1000000-3000000"})
    assert part.content == data[1_000_000:3_000_001]


def test_every_answer_says_nosniff_and_images_say_how_long_they_last(server: Server, photo_id: str) -> None:
    for path in (f"/{photo_id}", f"/{photo_id}?w=-1", "/", "/nothing", f"/images/{photo_id}/info"):
        answer = server.get(path)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        expected = "max-age=7776000" if answer.headers["Content-Type"].startswith("image/") else "no-"
        assert answer.headers["Cache-Control"].startswith(expected)


# Access


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"},
        {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)", "Referer": "http://evil.example/127.0.0.1"},
        {"Host": "rebound.example"},
        {"Host": "rebound.example", "Sec-Fetch-Site": "same-origin", "Origin": "http://rebound.example"},
        {"X-Forwarded-For": "203.0.113.9"},
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
    ],
)
def test_deletes_from_another_site_or_through_an_unknown_proxy_are_forbidden(
    server: Server, photo_id: str, headers: dict[str, str]
) -> None:
    assert server.get(f"/admin?md5={photo_id}&t=1", headers=headers).status_code == 403
    assert server.http.delete(f"{server.url}/images/{photo_id}", headers=headers).status_code == 403
    assert server.get(f"/{photo_id}").status_code == 200


# Running


def test_sigterm_finishes_what_is_in_flight_and_lets_nobody_in(start_server: Callable[..., Server]) -> None:
    server = start_server(workers=1)
    md5 = server.upload(corpus.jpeg(corpus.photo(2000, 1500, seed=4)))
    answers: list[int] = []
    slow = threading.Thread(target=lambda: answers.append(server.get(f"/{md5}?w=1500&f=avif").status_code))
    slow.start()
    while "POST" not in server.log:
        time.sleep(0.01)
    _wait_until(lambda: _cpu_is_busy(server))
    assert server.stop() == 0
    slow.join()
    assert answers == [200]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    assert "Traceback" not in server.log


def test_sigterm_lets_an_upload_come_to_its_end(start_server: Callable[..., Server]) -> None:
    server = start_server(workers=1)
    data = make_photo(51, 400, 300)
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as upload,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as idle,
    ):
        idle.sendall(b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(1000).startswith(b"HTTP/1.1 200")
        upload.sendall(
            f"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data[:2000]
        )
        _wait_until(lambda: _has_read(server, upload))
        server.process.send_signal(signal.SIGTERM)
        _wait_until(lambda: "stopping" in server.log)
        upload.sendall(data[2000:])
        answer = upload.recv(10_000)
        assert b'"ret":true' in answer
    assert server.process.wait(15) == 0
    server = start_server()
    assert server.get(f"/{hashlib.md5(data).hexdigest()}?p=0").content == data


def _has_read(server: Server, connection: socket.socket) -> bool:
    """Whether the server has taken everything that was sent: nothing waits in its socket's receive queue."""
    ours = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), 'little'):08X}:{connection.getsockname()[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[2] == ours and row[4].endswith(":00000000") for row in rows)


def test_aborted_uploads_leave_no_descriptor_and_no_file(start_server: Callable[..., Server]) -> None:
    server = start_server(workers=1, access_log=False)
    data = corpus.jpeg(corpus.photo(1200, 900, seed=6), quality=97)
    assert len(data) > 400_000
    head = f"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    server.get("/echo")
    descriptors = Path(f"/proc/{server.process.pid}/fd")
    before = len(list(descriptors.iterdir()))

    def abort(number: int) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(head + data[: 1000 * (number % 400) + 5])

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        list(threads.map(abort, range(800)))
    _wait_until(lambda: list((server.store / "blobs" / "incoming").iterdir()) == [])
    _wait_until(lambda: len(list(descriptors.iterdir())) <= before + 2)
    assert server.upload(data)


def test_a_form_that_breaks_off_stores_none_of_its_files(server: Server) -> None:
    one, two = make_photo(61), make_photo(62)
    part = b'--x\r\nContent-Disposition: form-data; name="f"; filename="a.jpg"\r\n\r\n'
    body = part + one + b"\r\n" + part + two[:500]
    answer = server.http.post(
        f"{server.url}/upload", data=body, headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert answer.json()["error"]["code"] == 4
    assert server.get(f"/{hashlib.md5(one).hexdigest()}").status_code == 404


def _cpu_is_busy(server: Server) -> bool:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return any(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] == "R" for child in children)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_client_that_goes_away_leaves_the_server_working(server: Server, photo_id: str) -> None:
    for width in range(300, 340):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(f"GET /{photo_id}?w={width}&f=webp HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        connection.close()
    assert server.get(f"/{photo_id}?w=345").status_code == 200
    assert "Traceback" not in server.log


@pytest.fixture(scope="session")
def large_png() -> bytes:
    data = bytes(corpus.flat(6000, 5000, (90, 120, 200)).pngsave_buffer(compression=0))
    assert len(data) > 85_000_000
    return data


def test_an_upload_does_not_grow_the_servers_memory(start_server: Callable[..., Server], large_png: bytes) -> None:
    server = start_server(max_size="200MiB", workers=1)
    server.upload(make_photo(1))
    before = _peak_memory(server)
    md5 = server.upload(large_png)
    assert _peak_memory(server) - before < 30_000_000
    assert server.get(f"/{md5}?w=60").status_code == 200
    assert hashlib.md5(server.get(f"/{md5}?p=0").content).hexdigest() == md5
    assert _peak_memory(server) - before < 30_000_000


def _peak_memory(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_the_log_has_one_line_a_request_in_the_form_wanted(start_server: Callable[..., Server]) -> None:
    server = start_server(log="json", store="memory:")
    server.get("/echo?x=%0D%0Aforged")
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert {'setting log = "json"', "setting port = 0"} <= {line.get("message") for line in lines}
    assert [(line["target"], line["status"]) for line in lines if "target" in line] == [("/echo?x=%0D%0Aforged", 200)]
    server = start_server(access_log=False, store="memory:")
    quiet_from = len(server.log)
    server.get("/echo")
    assert server.log[quiet_from:] == ""
