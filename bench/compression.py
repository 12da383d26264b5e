"""The suite zstd: one long text through every coding and level, as in the published table, and what else must hold.

Requests come one after the other on one connection, as many as were published or as there is time for; seconds are
told for a hundred of them. Every answer's bytes are decoded once by a decoder that is not ours, and held against what
libzstd makes of the same text by itself.
"""

import contextlib
import gzip
import http.client
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

from bench import serving
from bench.prose import write_book
from bench.result import Result
from bench.serving import BenchError, Launch, Server

NAME, TITLE = "zstd", "A text of 4 MB through none, gzip and zstd 1 to 22, on the fly and kept"

_REQUESTS = 100
_PUBLISHED_BYTES = 4_039_229
# April 2024, Ryzen 7 5700G, PHP 8.3 under Apache: bytes, and seconds of 100 requests.
_PUBLISHED: dict[str, tuple[int, float]] = {
    "none": (4_039_229, 3.16),
    "gzip": (1_290_963, 17.65),
    "zstd 1": (1_392_549, 4.01),
    "zstd 2": (1_310_025, 4.32),
    "zstd 3": (1_240_800, 4.45),
    "zstd 4": (1_222_309, 4.76),
    "zstd 5": (1_195_749, 5.84),
    "zstd 6": (1_157_140, 6.94),
    "zstd 7": (1_133_898, 8.18),
    "zstd 8": (1_120_307, 9.71),
    "zstd 9": (1_115_600, 9.80),
    "zstd 10": (1_095_873, 12.33),
    "zstd 11": (1_082_522, 18.20),
    "zstd 12": (1_081_317, 21.91),
    "zstd 13": (1_059_720, 52.40),
    "zstd 14": (1_044_099, 67.91),
    "zstd 15": (1_036_078, 87.37),
    "zstd 16": (983_006, 103.78),
    "zstd 17": (980_923, 115.09),
    "zstd 18": (972_316, 141.62),
    "zstd 19": (971_972, 145.05),
    "zstd 20": (971_972, 146.45),
    "zstd 21": (971_972, 148.13),
    "zstd 22": (971_962, 152.34),
}

_OVERHEAD, _OTHERS = "beside bare libzstd", "what others wait meanwhile"

_KEPT = ("kept zstd 19", "kept gzip 9")

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
    # What libzstd or zlib makes of the text by itself, in bytes; 0 for not asked.
    bare_bytes: int = 0


@dataclass(slots=True)
class Figures:
    body_bytes: int = 0
    requests: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def mean_ms(self) -> float:
        return self.seconds / self.requests * 1e3

    @property
    def cpu_ms(self) -> float:
        return self.cpu_s / self.requests * 1e3


def run(
    text_file: Path | None,
    seconds: float,
    folder: Path,
    watch: Callable[[str], object],
    wants: Callable[[str], bool] = lambda name: True,
) -> list[Result]:
    """Measure and print; `seconds` bounds each row. BenchError when an answer is wrong.

    `wants` tells by their names which rows and which of the two other measurements are wanted.
    """
    text = text_file.read_bytes() if text_file else write_book()
    if not 1000 < len(text) < 100_000_000:
        raise BenchError("the text should have a few megabytes")
    cores = serving.share_cores(1)
    os.sched_setaffinity(0, cores.load)
    servers: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:
        for name, launch in _launches(folder, text):
            servers[name] = Server(name, launch, cores, folder / f"{name}.log")
            stack.callback(servers[name].stop)
        _put(servers["uvimg"], text)
        if any(map(wants, _KEPT)):
            _await_best(servers["uvimg"])
        rows = list(_list_rows(text, "nginx" in servers, wants))
        results: list[Result] = []
        lines = [
            ["", "bytes", "requests", "s for 100", "mean ms", "CPU ms", "bytes ÷ library's", "published: bytes", "s"]
        ]
        for row in filter(lambda row: wants(row.name), rows):
            watch(row.name)
            figures = _measure(servers[row.server], row, text, seconds)
            lines.append(_tell_row(row, figures, len(text)))
            measures = {"coded_bytes": (float(figures.body_bytes),), "cpu_us": (figures.cpu_ms * 1e3,)}
            results.append(Result(NAME, row.name, row.server, row.server == "uvimg", "measured", measures))
        print(f"\nzstd · {len(text):,} bytes of {text_file or 'a made-up novel'}, one client, one core for the server")
        print("\n".join(_align(lines)))
        by_name = {result.case: result for result in results}
        for line in _judge(by_name):
            print(line)
        if wants(_OVERHEAD):
            watch(_OVERHEAD)
            print(_tell_overhead(servers["uvimg"], text, folder / "text" / "text.html", cores.server), flush=True)
        if wants(_OTHERS):
            watch(_OTHERS)
            print(_tell_others(servers["uvimg"], max(3.0, seconds)), flush=True)
    return results


def _launches(folder: Path, text: bytes) -> Iterator[tuple[str, Launch]]:
    port = serving.find_port()
    command = (
        sys.executable,
        "-m",
        "uvimg",
        "serve",
        "documents",
        f"--port={port}",
        f"--store=local:{folder / 'texts'}",
    )
    options = ("--no-access-log", "--log-level=warning")
    yield "uvimg", Launch(((*command, *options),), (("127.0.0.1", port),))
    (folder / "text").mkdir()
    (folder / "text" / "text.html").write_bytes(text)
    if shutil.which("nginx"):
        port = serving.find_port()
        conf = folder / "text.conf"
        user = "user root;" if os.geteuid() == 0 else ""
        conf.write_text(_NGINX.replace("$USER", user).replace("$FOLDER", str(folder)).replace("$PORT", str(port)))
        yield "nginx", Launch((("nginx", "-c", str(conf), "-p", str(folder)),), (("127.0.0.1", port),))
    else:
        print("  nginx: SKIPPED, nginx is not installed: apt-get install nginx")


def _list_rows(text: bytes, has_nginx: bool, wants: Callable[[str], bool]) -> Iterator[Row]:
    path = "/text.html?compression="
    yield Row("none", "uvimg", path + "none", "identity")
    deflate = zlib.compressobj(6, zlib.DEFLATED, 31)
    yield Row("gzip", "uvimg", path + "gzip", "identity", "gzip", len(deflate.compress(text) + deflate.flush()))
    for level in range(1, 23):
        name = f"zstd {level}"
        bare = len(zstandard.ZstdCompressor(level=level).compress(text)) if wants(name) else 0
        yield Row(name, "uvimg", f"{path}zstd&level={level}", "identity", "zstd", bare)
    for name, coding in zip(_KEPT, ("zstd", "gzip"), strict=True):
        yield Row(name, "uvimg", "/text.html", coding, coding)
    if has_nginx:
        yield Row("nginx none", "nginx", "/text.html", "identity")
        yield Row("nginx gzip 6", "nginx", "/text.html", "gzip", "gzip")


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


def _measure(server: Server, row: Row, text: bytes, seconds: float, most: int = _REQUESTS) -> Figures:
    client = _Client(server)
    try:
        first = client.ask(row)
        _check(row, first, text)
        figures = Figures(len(first))
        before, began = sum(server.cpu_s().values()), time.monotonic()
        while figures.requests < most and (figures.requests < 2 or time.monotonic() - began < seconds):
            if len(client.ask(row)) != len(first):
                raise BenchError(f"{row.name}: answers of different lengths")
            figures.requests += 1
        figures.seconds = time.monotonic() - began
        figures.cpu_s = sum(server.cpu_s().values()) - before
    finally:
        client.close()
    return figures


def _check(row: Row, body: bytes, text: bytes) -> None:
    match row.coding:
        case "zstd":
            body = zstandard.ZstdDecompressor(max_window_size=8 << 20).decompressobj().decompress(body)
        case "gzip":
            body = gzip.decompress(body)
    if body != text:
        raise BenchError(f"{row.name}: the answer does not decode to the text")


def _tell_row(row: Row, figures: Figures, size: int) -> list[str]:
    to_bare = f"{figures.body_bytes / row.bare_bytes:.4f}" if row.bare_bytes else "–"
    bytes_then, seconds_then = _PUBLISHED.get(row.name, (0, 0.0))
    return [
        *(row.name, f"{figures.body_bytes:,}", f"{figures.requests}", f"{figures.mean_ms / 10:.2f}"),
        *(f"{figures.mean_ms:.1f}", f"{figures.cpu_ms:.2f}", to_bare),
        *(f"{bytes_then:,}" if bytes_then else "–", f"{seconds_then:.2f}" if bytes_then else "–"),
    ]


def _align(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  "
        + row[0].ljust(widths[0])
        + "  "
        + "  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in table
    ]


def _judge(rows: dict[str, Result]) -> Iterator[str]:
    def ratio(ours: str, theirs: str, measure: str) -> float | None:
        """None where one of the two was not measured."""
        values = [rows[name].median(measure) if name in rows else None for name in (ours, theirs)]
        return None if values[0] is None or not values[1] else values[0] / values[1]

    kept = ratio("kept zstd 19", "none", "cpu_us")
    if kept is not None:
        yield _verdict("kept zstd 19, CPU beside the uncompressed file", kept, 1.0)
    worst = [
        (figure, f"zstd {level}, {measure}")
        for level in range(3, 11)
        for measure in ("coded_bytes", "cpu_us")
        if (figure := ratio(f"zstd {level}", "gzip", measure)) is not None
    ]
    if worst:
        yield _verdict(f"zstd 3 to 10 beside gzip, bytes and CPU, at worst ({max(worst)[1]})", max(worst)[0], 1.0)
    for name in ("gzip", "zstd 3"):
        if (figure := ratio(name, "nginx gzip 6", "cpu_us")) is not None:
            yield f"  · {name}, CPU beside nginx's gzip: {figure:.2f}"
    for name in ("gzip", "zstd 3", "zstd 19"):
        if (figure := ratio(name, "none", "coded_bytes")) is not None:
            then = _PUBLISHED[name][0] / _PUBLISHED_BYTES
            yield _verdict(f"{name}, compression ratio beside the published one, off by", abs(figure / then - 1), 0.10)


def _verdict(what: str, figure: float, aim: float) -> str:
    return f"  {'✓' if figure <= aim else '✗'} {what}: {figure:.3f} (aim ≤ {aim:g})"


_BARE = """
import sys, time, zstandard
compressor = zstandard.ZstdCompressor(level=3)
for line in sys.stdin:
    began = time.process_time()
    for _ in range(int(line)):
        compressor.compress(open(sys.argv[1], "rb").read())
    print(time.process_time() - began, flush=True)
"""


def _tell_overhead(server: Server, text: bytes, file: Path, cores: frozenset[int]) -> str:
    """Level 3 on the fly beside a loop that reads the file and calls libzstd, in turn, on the same core."""
    row = Row("zstd 3", "uvimg", "/text.html?compression=zstd&level=3", "identity", "zstd")
    command = [*serving.pin(cores), sys.executable, "-c", _BARE, str(file)]
    ratios, ours, bare = [], [], []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(21):
            process.stdin.write("5\n")
            process.stdin.flush()
            bare_ms = float(process.stdout.readline()) / 5 * 1e3
            ours_ms = _measure(server, row, text, 60.0, 5).cpu_ms
            if number:
                ours.append(ours_ms)
                bare.append(bare_ms)
                ratios.append(ours_ms / bare_ms)
        process.stdin.close()
    spread = f"[{min(ratios):.3f}–{max(ratios):.3f}]"
    return (
        _verdict(
            "zstd 3, CPU of the whole answer beside bare libzstd",
            statistics.median(ours) / statistics.median(bare),
            1.05,
        )
        + f" {spread}, {statistics.median(ours):.2f} beside {statistics.median(bare):.2f} ms"
    )


def _tell_others(server: Server, seconds: float) -> str:
    """p99 of small requests, alone and while ten texts are compressed with level 19."""
    small = Row("small", "uvimg", "/small.txt", "identity")
    hard = Row("zstd 19", "uvimg", "/text.html?compression=zstd&level=19", "identity", "zstd")
    idle = _time_others(server, small, seconds)
    over = threading.Event()
    done: list[int] = []

    def load() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            client = _Client(server)
            while not over.is_set():
                done.append(len(client.ask(hard)))
            client.close()

    threads = [threading.Thread(target=load, daemon=True) for _ in range(10)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    busy = _time_others(server, small, seconds)
    over.set()
    for thread in threads:
        thread.join(60)
    return (
        _verdict("p99 of others while ten compress with level 19, beside idle", busy[1] / idle[1], 2.0)
        + f"; idle {idle[0]:.2f}/{idle[1]:.2f} ms, then {busy[0]:.2f}/{busy[1]:.2f} ms (median/p99), {len(done)} done"
    )


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
