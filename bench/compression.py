"""The suite zstd: one long text through every coding and level, as in the published table, and what else must hold.

Requests come one after the other on one connection, for as long as a round lasts or until there were as many as were
published; seconds are told for a hundred of them. Every round takes all codings in turn. A body of each is decoded by
a decoder that is not ours, and held against what libzstd makes of the same text by itself.
"""

import contextlib
import gzip
import http.client
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from bench import php, published, serving
from bench.programs import find_missing, lacks_php
from bench.prose import write_book
from bench.result import Goal, Result, Section
from bench.serving import BenchError, Launch, Server
from bench.site import Site

NAME, TITLE = "zstd", "A text of 4 MB through none, gzip and zstd 1 to 22, on the fly and kept"

_TEXT, _OVERHEAD, _OTHERS = "the text, one client", "zstd 3 beside bare libzstd", "what others wait meanwhile"
_KEPT = ("kept zstd 19", "kept gzip 9")
_NGINX_GZIP = "nginx gzip 6"
_BARE_ZSTD = "bare libzstd"
_ALONE, _BESIDE = "uvimg, alone", "uvimg, while ten texts get zstd 19"
_MOST_REQUESTS = 100
_OVERHEAD_ROUNDS, _OVERHEAD_REQUESTS = 20, 5


def _beside_gzip(level: int, measure: str) -> Goal:
    return Goal(f"zstd {level}", measure, "at most", 1.0, "gzip")


SECTIONS = (
    Section(
        _TEXT,
        (
            Goal(_KEPT[0], "cpu_ms", "at most", 1.0, "none"),
            # Level 3 makes the longest of those that are to beat gzip.
            _beside_gzip(3, "coded_bytes"),
            *(_beside_gzip(level, "cpu_ms") for level in range(3, 11)),
            *(Goal(name, "cpu_ms", "at most", None, _NGINX_GZIP) for name in ("gzip", "zstd 3")),
            *(
                Goal(name, "to_published", bound, value)
                for name in ("gzip", "zstd 3", "zstd 19")
                for bound, value in (("at most", 1.1), ("at least", 0.9))
            ),
        ),
        published.TEXT_ON,
    ),
    Section(_OVERHEAD, (Goal("uvimg", "cpu_ms", "at most", 1.05, _BARE_ZSTD),)),
    Section(_OTHERS, (Goal(_BESIDE, "p99_ms", "at most", 2.0, _ALONE),)),
)

_NGINX = """
$USER daemon off; pid $FOLDER/nginx-text.pid; error_log $FOLDER/nginx-text.log crit; worker_processes 1;
events { worker_connections 1000; }
http {
    access_log off; default_type text/html; sendfile on; tcp_nopush on; keepalive_requests 1000000000;
    client_body_temp_path $FOLDER/n1; proxy_temp_path $FOLDER/n2; fastcgi_temp_path $FOLDER/n3;
    uwsgi_temp_path $FOLDER/n4; scgi_temp_path $FOLDER/n5;
    gzip on; gzip_comp_level 6; gzip_types text/html; gzip_http_version 1.1;
    server { listen 127.0.0.1:$PORT; root $FOLDER/text; }
}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One way of sending the text, and who is asked for it."""

    name: str
    server: str
    path: str
    accept: str
    # What the answer must be coded in.
    coding: str = ""
    # How many bytes libzstd or zlib makes of the text by itself.
    compress: Callable[[bytes], int] | None = None


@dataclass(slots=True)
class Figures:
    """Of one row: the length of its body, and of each round milliseconds and CPU milliseconds of a request."""

    body_bytes: int = 0
    mean_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)


def run(
    text_file: Path | None,
    seconds: float,
    rounds: int,
    folder: Path,
    watch: Callable[[str], object],
    wants: Callable[[Section, str], bool] = lambda section, name: True,
) -> list[Result]:
    """Measure. BenchError when an answer is wrong.

    `wants` tells of each section and row whether it is wanted; those of the other sections have no rows.
    """
    text = text_file.read_bytes() if text_file else write_book()
    if not 1000 < len(text) < 100_000_000:
        raise BenchError("the text should have a few megabytes")
    cores = serving.share_cores(1)
    (folder / "text").mkdir()
    (folder / "text" / "text.html").write_bytes(text)
    whole, overhead, others = SECTIONS
    servers: dict[str, Server] = {}
    reasons: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores.load)
        for name, missing, launch in _launches(folder):
            if missing:
                reasons[name] = missing
                continue
            servers[name] = Server(name, launch(), cores, folder / f"{name}.log")
            stack.callback(servers[name].stop)
        _put(servers["uvimg"], text)
        rows = [row for row in _list_rows() if wants(whole, row.name)]
        # While the servers work, on a core that is not theirs: the library lets go of the interpreter meanwhile.
        pool = stack.enter_context(ThreadPoolExecutor(1))
        bare = {row.name: pool.submit(row.compress, text) for row in rows if row.compress}
        if any(row.name in _KEPT for row in rows):
            _await_best(servers["uvimg"])
        figures = {row.name: Figures() for row in rows if row.server in servers}
        for _ in range(rounds):
            for row in rows:
                watch(row.name)
                if row.server in servers:
                    _measure(servers[row.server], row, text, seconds, figures[row.name])
        results = [_make_result(row, figures.get(row.name), len(text), bare, reasons) for row in rows]
        if wants(overhead, ""):
            watch(overhead.name)
            results += _measure_overhead(servers["uvimg"], text, folder / "text" / "text.html", cores.server)
        if wants(others, ""):
            watch(others.name)
            results += _measure_others(servers["uvimg"], max(3.0, seconds * rounds))
    return results


def count_steps(rounds: int, wants: Callable[[Section, str], bool]) -> int:
    """How often `run` will watch."""
    whole, *rest = SECTIONS
    return rounds * sum(wants(whole, row.name) for row in _list_rows()) + sum(wants(section, "") for section in rest)


def _make_result(
    row: Row, figures: Figures | None, size: int, bare: "dict[str, Future[int]]", reasons: dict[str, str]
) -> Result:
    ours = row.server == "uvimg"
    then = published.TEXT.get(row.name)
    beside = {"coded_bytes": float(then[0]), "hundred_s": then[1]} if then else {}
    if figures is None:
        return Result(NAME, _TEXT, row.name, ours, "skipped", {}, reasons[row.server], beside)
    measures: dict[str, tuple[float, ...]] = {
        "coded_bytes": (float(figures.body_bytes),),
        "hundred_s": tuple(mean_ms / 10 for mean_ms in figures.mean_ms),
        "cpu_ms": tuple(figures.cpu_ms),
    }
    if row.name in bare:
        measures["to_library"] = (figures.body_bytes / bare[row.name].result(),)
    if then:
        measures["to_published"] = (figures.body_bytes / size / (then[0] / published.TEXT_BYTES),)
    return Result(NAME, _TEXT, row.name, ours, "measured", measures, "", beside)


def _launches(folder: Path) -> Iterator[tuple[str, str, Callable[[], Launch]]]:
    """Name, what is missing for it, and how it is started."""
    yield "uvimg", "", lambda: _launch_uvimg(folder)
    yield "nginx", find_missing("nginx"), lambda: _launch_nginx(folder)
    missing = find_missing("nginx") or lacks_php("zlib")
    yield "php", missing, lambda: php.launch(Site(folder, {}, {}, ""), folder / "text", "text.php")


def _launch_uvimg(folder: Path) -> Launch:
    port = serving.find_port()
    command = (
        *(sys.executable, "-m", "uvimg", "serve", "documents", f"--port={port}"),
        *(f"--store=local:{folder / 'texts'}", "--no-access-log", "--log-level=warning"),
    )
    return Launch((command,), (("127.0.0.1", port),))


def _launch_nginx(folder: Path) -> Launch:
    port = serving.find_port()
    conf = folder / "text.conf"
    user = "user root;" if os.geteuid() == 0 else ""
    conf.write_text(_NGINX.replace("$USER", user).replace("$FOLDER", str(folder)).replace("$PORT", str(port)))
    return Launch((("nginx", "-c", str(conf), "-p", str(folder)),), (("127.0.0.1", port),))


def _list_rows() -> Iterator[Row]:
    path = "/text.html?compression="
    yield Row("none", "uvimg", path + "none", "identity")
    yield Row("gzip", "uvimg", path + "gzip", "identity", "gzip", _compress_gzip)
    yield Row("ob_gzhandler", "php", "/text.php", "gzip", "gzip")
    for level in range(1, 23):
        compress = _compress_zstd(level)
        yield Row(f"zstd {level}", "uvimg", f"{path}zstd&level={level}", "identity", "zstd", compress)
    for name, coding in zip(_KEPT, ("zstd", "gzip"), strict=True):
        yield Row(name, "uvimg", "/text.html", coding, coding)
    yield Row("nginx none", "nginx", "/text.html", "identity")
    yield Row(_NGINX_GZIP, "nginx", "/text.html", "gzip", "gzip")


def _compress_gzip(text: bytes) -> int:
    deflate = zlib.compressobj(6, zlib.DEFLATED, 31)
    return len(deflate.compress(text) + deflate.flush())


def _compress_zstd(level: int) -> Callable[[bytes], int]:
    return lambda text: len(zstandard.ZstdCompressor(level=level).compress(text))


class _Client:
    """One connection that is kept."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(*server.addresses[0], timeout=600)

    def ask(self, row: Row) -> bytes:
        self._connection.request("GET", row.path, headers={"Accept-Encoding": row.accept})
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200 or answer.headers.get("Content-Encoding", "") != row.coding:
            raise BenchError(f"{row.name}: answered {answer.status}, {answer.headers.get('Content-Encoding')}")
        return body

    def tag(self, row: Row) -> str:
        self._connection.request("HEAD", row.path, headers={"Accept-Encoding": row.accept})
        answer = self._connection.getresponse()
        answer.read()
        return answer.headers.get("ETag", "")

    def close(self) -> None:
        self._connection.close()


def _put(server: Server, text: bytes) -> None:
    """Store the text, and something small beside it."""
    host, port = server.addresses[0]
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("PUT", "/text.html", text)
    if connection.getresponse().status != 201:
        raise BenchError("uvimg does not take the text")
    connection.close()
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("PUT", "/small.txt", b"x" * 1000)
    connection.getresponse().read()
    connection.close()


def _await_best(server: Server) -> None:
    client = _Client(server)
    try:
        for coding, best in (("zstd", "-zstd-19"), ("gzip", "-gzip-9")):
            row = Row(coding, "uvimg", "/text.html", coding, coding)
            deadline = time.monotonic() + 300
            client.ask(row)
            while best not in client.tag(row):
                if time.monotonic() > deadline:
                    raise BenchError(f"no best copy in {coding} within 300 s")
                time.sleep(0.1)
    finally:
        client.close()


def _measure(server: Server, row: Row, text: bytes, seconds: float, figures: Figures) -> None:
    """One round; a slow row has one request in it."""
    client = _Client(server)
    try:
        requests, before, began = 0, sum(server.cpu_s().values()), time.monotonic()
        while not requests or (requests < _MOST_REQUESTS and time.monotonic() - began < seconds):
            body = client.ask(row)
            requests += 1
            if len(body) != (figures.body_bytes or len(body)):
                raise BenchError(f"{row.name}: answers of different lengths")
        figures.mean_ms.append((time.monotonic() - began) / requests * 1e3)
        figures.cpu_ms.append((sum(server.cpu_s().values()) - before) / requests * 1e3)
        if not figures.body_bytes:
            _check(row, body, text)
            figures.body_bytes = len(body)
    finally:
        client.close()


def _check(row: Row, body: bytes, text: bytes) -> None:
    match row.coding:
        case "zstd":
            body = zstandard.ZstdDecompressor(max_window_size=8 << 20).decompressobj().decompress(body)
        case "gzip":
            body = gzip.decompress(body)
    if body != text:
        raise BenchError(f"{row.name}: the answer does not decode to the text")


_BARE = """
import sys, time, zstandard
compressor = zstandard.ZstdCompressor(level=3)
for line in sys.stdin:
    began = time.process_time()
    for _ in range(int(line)):
        compressor.compress(open(sys.argv[1], "rb").read())
    print(time.process_time() - began, flush=True)
"""


def _measure_overhead(server: Server, text: bytes, file: Path, cores: frozenset[int]) -> list[Result]:
    """Level 3 on the fly beside a loop that reads the file and calls libzstd, in turn, on the same core."""
    row = Row("zstd 3", "uvimg", "/text.html?compression=zstd&level=3", "identity", "zstd")
    command = [*serving.pin(cores), sys.executable, "-c", _BARE, str(file)]
    client, ours, bare = _Client(server), [], []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(1 + _OVERHEAD_ROUNDS):
            process.stdin.write(f"{_OVERHEAD_REQUESTS}\n")
            process.stdin.flush()
            bare_s = float(process.stdout.readline())
            before = sum(server.cpu_s().values())
            for _ in range(_OVERHEAD_REQUESTS):
                client.ask(row)
            ours_s = sum(server.cpu_s().values()) - before
            # The first is the warm-up.
            if number:
                ours.append(ours_s / _OVERHEAD_REQUESTS * 1e3)
                bare.append(bare_s / _OVERHEAD_REQUESTS * 1e3)
        process.stdin.close()
    client.close()
    return [
        Result(NAME, _OVERHEAD, "uvimg", True, "measured", {"cpu_ms": tuple(ours)}),
        Result(NAME, _OVERHEAD, _BARE_ZSTD, False, "measured", {"cpu_ms": tuple(bare)}),
    ]


def _measure_others(server: Server, seconds: float) -> list[Result]:
    """What small requests wait, alone and while ten texts are compressed with level 19."""
    small = Row("small", "uvimg", "/small.txt", "identity")
    hard = Row("zstd 19", "uvimg", "/text.html?compression=zstd&level=19", "identity", "zstd")
    alone = _time_others(server, small, seconds)
    over = threading.Event()

    def load() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            client = _Client(server)
            while not over.is_set():
                client.ask(hard)
            client.close()

    threads = [threading.Thread(target=load, daemon=True) for _ in range(10)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    beside = _time_others(server, small, seconds)
    over.set()
    for thread in threads:
        thread.join(60)
    return [
        Result(NAME, _OTHERS, name, True, "measured", {"p50_ms": (waits[0],), "p99_ms": (waits[1],)})
        for name, waits in ((_ALONE, alone), (_BESIDE, beside))
    ]


def _time_others(server: Server, row: Row, seconds: float) -> tuple[float, float]:
    client, times = _Client(server), []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        client.ask(row)
        times.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.001)
    client.close()
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]
