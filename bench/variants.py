"""THE table: what is measured (suites of cases), on which servers (variants), and what is aimed at (goals).

A new row is a Case; a new server is a Variant with a command and, for each content it can serve, a path.
"""

import hashlib
import http.client
import itertools
import os
import shutil
import string
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench import corpus, serving
from bench.exchange import Ask, exchange
from bench.load import Idle, KeepAlive, Load, NewConnections
from bench.result import Goal
from bench.serving import Address, BenchError, Launch, Server

_RIVALS = Path(__file__).parent / "rivals"
# What common limits allow for (ulimit -Hn).
_FILES = 20_000


class Content(StrEnum):
    """What is served."""

    TINY = "tiny"
    RENDITION = "rendition"
    ORIGINAL = "original"
    UNCHANGED = "unchanged"  # a 304 to a GET of the rendition


@dataclass(frozen=True, slots=True)
class Site:
    """A store with a photo in it, and the same bytes as plain files, to serve."""

    folder: Path
    # Where uvimg has each content, and what it answers there.
    paths: dict[Content, str]
    bodies: dict[Content, bytes]
    etag: str


_FILE_NAMES = {
    Content.TINY: "tiny.html",
    Content.RENDITION: "rendition.jpg",
    Content.ORIGINAL: "original.jpg",
    Content.UNCHANGED: "rendition.jpg",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One server: how it is started for a content and a number of processes, and where it has the content."""

    name: str
    ours: bool
    launch: Callable[[Site, Content, int], Launch]
    # A program that has to be installed.
    program: str = ""
    # It answers the same to everything, also where a server would have to look first.
    blind: bool = False
    # Where it has all contents, whatever they are, if neither we nor the site made them.
    path: str = ""

    def ask(self, site: Site, content: Content, address: Address) -> Ask:
        """The request for a content, with the answer that it must have."""
        if self.path:
            return Ask(self.path, 200, None)
        path = site.paths[content] if self.ours else f"/{_FILE_NAMES[content]}"
        kind = ("Content-Type", "text/html" if content is Content.TINY else "image/jpeg")
        if content is not Content.UNCHANGED:
            return Ask(path, 200, site.bodies[content], expected=(kind,))
        etag = site.etag
        if not self.blind:
            etag = exchange(address, Ask(path, 200, b"")).fields.get("etag", "")
            if not etag:
                raise BenchError(f"{self.name} gives {path} no ETag")
        return Ask(path, 304, b"", (("If-None-Match", etag),), (("ETag", etag),))


def _uvimg(front_end: str, loop: str = "uvloop") -> Variant:
    def launch(site: Site, content: Content, processes: int) -> Launch:
        addresses = tuple((f"127.0.0.{1 + number}", serving.find_port()) for number in range(processes))
        command = (
            *(sys.executable, "-m", "uvimg", "serve", f"--front-end={front_end}", f"--loop={loop}"),
            *(f"--listen={host}:{port}" for host, port in addresses),
            *(f"--store=local:{site.folder / 'data'}", "--workers=1", "--no-access-log", "--log-level=warning"),
            f"--processes={processes if processes > 1 else 0}",
        )
        return Launch((command,), addresses)

    return Variant(f"uvimg {front_end}" + ("" if loop == "uvloop" else f" on {loop}"), True, launch)


def _limit(loop: str) -> Variant:
    def launch(site: Site, content: Content, processes: int) -> Launch:
        port = serving.find_port()
        answer = site.folder / f"answer-{content}"
        answer.write_bytes(_write_answer(site, content))
        return Launch(
            ((sys.executable, "-m", "bench.rivals.limit", str(port), loop, str(answer)),),
            (("127.0.0.1", port),),
        )

    return Variant("the limit" + ("" if loop == "uvloop" else f" on {loop}"), False, launch, blind=True)


def _write_answer(site: Site, content: Content) -> bytes:
    """As long as nginx's answer or ours."""
    body = site.bodies[content]
    status = "304 Not Modified" if content is Content.UNCHANGED else "200 OK"
    fields = ["Server: limit", "Date: Sat, 01 Jan 2000 00:00:00 GMT"]
    if content is Content.TINY:
        fields += ["Content-Type: text/html"]
    else:
        fields += ["Content-Type: image/jpeg", f"ETag: {site.etag}", "Cache-Control: max-age=7776000"]
    if content is not Content.UNCHANGED:
        fields.append(f"Content-Length: {len(body)}")
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode() + body


def _launch_bare_aiohttp(site: Site, content: Content, processes: int) -> Launch:
    port = serving.find_port()
    command = (sys.executable, "-m", "bench.rivals.aiohttp_server", str(port), str(site.folder / "www"))
    return Launch((command,), (("127.0.0.1", port),))


def _launch_nginx(site: Site, content: Content, processes: int) -> Launch:
    port = serving.find_port()
    text = string.Template((_RIVALS / "nginx.conf.in").read_text()).safe_substitute(
        USER="user root;" if os.geteuid() == 0 else "",
        FOLDER=site.folder,
        PROCESSES=processes,
        FILES=_FILES,
        HOST="127.0.0.1" if processes == 1 else "0.0.0.0",
        PORT=port,
        REUSEPORT="" if processes == 1 else " reuseport",
        TINY=site.bodies[Content.TINY].decode(),
    )
    conf = site.folder / f"nginx-{port}.conf"
    conf.write_text(text.replace("/nginx.pid", f"/nginx-{port}.pid"))
    addresses = tuple((f"127.0.0.{1 + number}", port) for number in range(processes))
    return Launch((("nginx", "-c", str(conf), "-p", str(site.folder)),), addresses)


def running_already(name: str, address: Address, path: str) -> Variant:
    """A server that somebody else has started."""
    return Variant(name, False, lambda site, content, processes: Launch((), (address,) * processes), path=path)


TRANSPORT, STREAMS, AIOHTTP = _uvimg("transport"), _uvimg("streams"), _uvimg("aiohttp")
TRANSPORT_ON_ASYNCIO = _uvimg("transport", "asyncio")
NGINX = Variant("nginx", False, _launch_nginx, program="nginx")
BARE_AIOHTTP = Variant("aiohttp web.Server", False, _launch_bare_aiohttp)
LIMIT, LIMIT_ON_ASYNCIO = _limit("uvloop"), _limit("asyncio")

# Program → the Debian package that has it.
PACKAGES = {"nginx": "nginx", "wrk": "wrk", "ab": "apache2-utils", "taskset": "util-linux", "ss": "iproute2"}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a suite: a load on a content, and who is put under it."""

    name: str
    content: Content
    load: Load
    variants: tuple[Variant, ...]
    goals: tuple[Goal, ...] = ()
    processes: int = 1
    # What others have measured, with the machine.
    published: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    title: str
    # Cases of one group are measured in the same rounds: a goal may hold one of them against another.
    groups: tuple[tuple[Case, ...], ...]

    @property
    def cases(self) -> Iterator[Case]:
        return itertools.chain.from_iterable(self.groups)


def _cpu(variant: Variant, at_most: float | None, rival: Variant | None = None, case: str = "") -> Goal:
    return Goal(variant.name, "cpu_us", "at most", at_most, rival.name if rival else "", case)


_ALL = (TRANSPORT, STREAMS, AIOHTTP, NGINX, BARE_AIOHTTP, LIMIT)
_OURS = (TRANSPORT, STREAMS, AIOHTTP)
_BESIDE_BARE = (_cpu(AIOHTTP, 1.15, BARE_AIOHTTP), _cpu(STREAMS, 1.0, AIOHTTP), _cpu(STREAMS, None, NGINX))


def _hello(connections: int) -> Case:
    return Case(
        f"tiny answer, {connections} connections",
        Content.TINY,
        KeepAlive(connections),
        (*_ALL, TRANSPORT_ON_ASYNCIO, LIMIT_ON_ASYNCIO),
        (_cpu(TRANSPORT, 1.10, NGINX), _cpu(TRANSPORT, 1.15, LIMIT), *_BESIDE_BARE),
    )


_SAME = "the same request, by Lua"
_HELLO = Suite(
    "hello",
    "A tiny answer over keep-alive connections, and what a memo of requests is worth where they differ",
    (
        (_hello(100),),
        (_hello(400),),
        (
            Case(_SAME, Content.RENDITION, KeepAlive(100, "same by Lua"), _OURS),
            Case(
                "10,000 different URLs and heads",
                Content.RENDITION,
                KeepAlive(100, "10,000"),
                _OURS,
                (_cpu(TRANSPORT, 1.3, case=_SAME),),
            ),
            Case("heads that never repeat", Content.RENDITION, KeepAlive(100, "never the same"), _OURS),
        ),
    ),
)

_RENDITION = "stored rendition"
_STATIC = Suite(
    "static",
    "Stored images, 100 keep-alive connections",
    (
        (
            Case(_RENDITION, Content.RENDITION, KeepAlive(100), _ALL, (_cpu(TRANSPORT, 1.15, NGINX), *_BESIDE_BARE)),
            Case(
                "304 to If-None-Match",
                Content.UNCHANGED,
                KeepAlive(100),
                _ALL,
                (*(_cpu(variant, 1.0, case=_RENDITION) for variant in _OURS), *_BESIDE_BARE),
            ),
        ),
        (
            Case(
                "original of 30 KB",
                Content.ORIGINAL,
                KeepAlive(100),
                _ALL,
                (_cpu(TRANSPORT, 1.25, NGINX), *_BESIDE_BARE),
            ),
        ),
    ),
)

# Requests/s of zimg 1.0 and nginx 1.2.9, August 2013, with `ab -c N -n 200000` on a Xeon E3-1230 V2 (4 cores).
_PUBLISHED_2013 = {
    100: (32_765, 33_412),
    1_000: (28_937, 28_164),
    5_000: (27_947, 13_537),
    10_000: (27_446, 10_901),
    20_000: (27_679, 6_107),
}


def _tell_published(connections: int) -> str:
    zimg, nginx = _PUBLISHED_2013[connections]
    return f"2013, Xeon E3-1230 V2, ab: zimg {zimg:,}, nginx {nginx:,} requests/s ({zimg / nginx:.2f} × nginx)"


def _keep_alive(connections: int, goals: tuple[Goal, ...] = (), processes: int = 1) -> Case:
    return Case(
        _name_keep_alive(connections, processes),
        Content.TINY,
        KeepAlive(connections),
        (*_OURS, NGINX),
        (*goals, *(_cpu(variant, None, NGINX) for variant in _OURS)),
        processes,
        _tell_published(connections),
    )


def _name_keep_alive(connections: int, processes: int = 1) -> str:
    return f"{connections:,} keep-alive connections" + ("" if processes == 1 else f", {processes} processes")


def _new_connections(connections: int, ours: tuple[Variant, ...] = (TRANSPORT,), processes: int = 1) -> Case:
    return Case(
        f"a new connection for every request, {connections:,} at a time"
        + ("" if processes == 1 else f", {processes} processes"),
        Content.TINY,
        NewConnections(connections),
        (*ours, NGINX),
        (
            *(
                Goal(variant.name, "rate", "at least", 1.0 if variant is TRANSPORT else None, NGINX.name)
                for variant in ours
            ),
            *(_cpu(variant, None, NGINX) for variant in ours),
        ),
        processes,
        _tell_published(connections),
    )


_CONNECTIONS = Suite(
    "connections",
    "A tiny answer to very many clients",
    (
        (
            _keep_alive(100),
            _keep_alive(1_000),
            _keep_alive(5_000),
            _keep_alive(
                10_000,
                tuple(Goal(variant.name, "rate", "at least", 0.6, case=_name_keep_alive(100)) for variant in _OURS),
            ),
        ),
        # More than a process may have descriptors for by default.
        (_keep_alive(20_000, processes=2),),
        (
            Case(
                "memory of an idle connection",
                Content.TINY,
                Idle(10_000),
                (*_OURS, NGINX),
                tuple(Goal(variant.name, "connection_kib", "at most", 10.0) for variant in _OURS),
            ),
        ),
        (_new_connections(100, _OURS),),
        *((_new_connections(connections),) for connections in (1_000, 5_000, 10_000)),
        (_new_connections(20_000, processes=2),),
    ),
)

SUITES = {suite.name: suite for suite in (_HELLO, _STATIC, _CONNECTIONS)}


def make_site(folder: Path) -> Site:
    """Upload the photo of zimg's tables to a store in this folder, and put what uvimg makes of it beside it."""
    photo = corpus.zimg_photo()
    image = hashlib.md5(photo).hexdigest()
    paths = {
        Content.TINY: "/echo",
        Content.RENDITION: f"/{image}?w=100&h=100&g=1",
        Content.ORIGINAL: f"/{image}?p=0",
        Content.UNCHANGED: f"/{image}?w=100&h=100&g=1",
    }
    launch = AIOHTTP.launch(Site(folder, paths, {}, ""), Content.TINY, 1)
    server = Server("uvimg", launch, serving.share_cores(1), folder / "log")
    try:
        address = server.addresses[0]
        _upload(address, photo)
        replies = {content: exchange(address, Ask(path, 200, b"")) for content, path in paths.items()}
    finally:
        server.stop()
    bodies = {content: reply.body for content, reply in replies.items()}
    if bodies[Content.ORIGINAL] != photo or bodies[Content.RENDITION][:3] != b"\xff\xd8\xff":
        raise BenchError("uvimg does not give back what was uploaded: there is nothing to measure with")
    (folder / "www").mkdir()
    for content, name in _FILE_NAMES.items():
        (folder / "www" / name).write_bytes(bodies[content])
    bodies[Content.UNCHANGED] = b""
    return Site(folder, paths, bodies, replies[Content.RENDITION].fields["etag"])


def _upload(address: Address, data: bytes) -> None:
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("POST", "/images", data, {"Content-Type": "image/jpeg"})
    status = connection.getresponse().status
    connection.close()
    if status != 201:
        raise BenchError(f"uvimg answers an upload with {status}")


def find_missing(*programs: str) -> str:
    """How to install the first of the programs that is not there; "" when all are."""
    for program in programs:
        if program and not shutil.which(program):
            return (
                f"{program} is not installed: scripts/bench-rivals, or apt-get install {PACKAGES.get(program, program)}"
            )
    return ""
