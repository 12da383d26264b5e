"""THE table: what is measured (suites of cases), on which servers (variants), and what is aimed at (goals).

A new row is a Case; a new server is a Variant with a command and, for each content it can serve, a path, or for what
has to be made its requests (makers.py has those of ours).
"""

import hashlib
import itertools
import os
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import corpus, echoes, keyvalue, serving
from bench.exchange import Ask, exchange
from bench.load import Idle, KeepAlive, Load, NewConnections
from bench.makers import (
    BARE,
    BY_SCRIPT,
    BY_TABLE,
    ENDLESS,
    ENDLESS_ON_JEMALLOC,
    PLAIN,
    PLANS,
    REDUCED,
    SHORT_QUEUE,
    SOAKED,
    TYPED,
    UNREDUCED,
    upload,
)
from bench.making import Making, Paced
from bench.result import Goal
from bench.serving import Address, BenchError, Launch, Server
from bench.site import FILE_NAMES, Content, Site, Variant
from bench.soak import Soak
from bench.work import Picture, Walk, make_walk

_RIVALS = Path(__file__).parent / "rivals"
# What common limits allow for (ulimit -Hn).
_FILES = 20_000


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
    """A server that somebody else has started. {w}, {h} and {q} in its path are filled in where there is a walk."""

    def ask_for(site: Site, walk: Walk, address: Address) -> list[Ask]:
        filled = [path.replace("{w}", str(task.width)).replace("{h}", str(task.height)) for task in walk.tasks]
        is_told = "{w}" in path and "{h}" in path
        return [
            Ask(each.replace("{q}", str(task.quality)), 200, None, task=task if is_told else None)
            for each, task in zip(filled, walk.tasks, strict=True)
        ]

    def launch(site: Site, content: Content, processes: int) -> Launch:
        return Launch((), (address,) * processes)

    return Variant(name, False, launch, path=path, ask_for=ask_for)


TRANSPORT, STREAMS, AIOHTTP = _uvimg("transport"), _uvimg("streams"), _uvimg("aiohttp")
TRANSPORT_ON_ASYNCIO = _uvimg("transport", "asyncio")
NGINX = Variant("nginx", False, _launch_nginx, program="nginx")
BARE_AIOHTTP = Variant("aiohttp web.Server", False, _launch_bare_aiohttp)
LIMIT, LIMIT_ON_ASYNCIO = _limit("uvloop"), _limit("asyncio")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a suite: a load on a content, and who is put under it.

    `processes` are those of a server, or the workers of what makes renditions; the cores that they leave are the
    load's.
    """

    name: str
    content: Content
    load: Load
    variants: tuple[Variant, ...]
    goals: tuple[Goal, ...] = ()
    processes: int = 1
    # What others have measured, with the machine, and the requests/s that they give for a variant.
    published: str = ""
    published_rates: dict[str, float] = field(default_factory=dict, hash=False)


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


def _rate_published(connections: int) -> dict[str, float]:
    """zimg's place is ours."""
    return dict(zip((TRANSPORT.name, NGINX.name), _PUBLISHED_2013[connections], strict=True))


def _keep_alive(connections: int, goals: tuple[Goal, ...] = (), processes: int = 1) -> Case:
    return Case(
        _name_keep_alive(connections, processes),
        Content.TINY,
        KeepAlive(connections),
        (*_OURS, NGINX),
        (*goals, *(_cpu(variant, None, NGINX) for variant in _OURS)),
        processes,
        _tell_published(connections),
        _rate_published(connections),
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
        _rate_published(connections),
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

# What has to be made

# As many as cores, so server, workers and load share the machine.
_WORKERS = len(os.sched_getaffinity(0))
_THUMBNAIL = make_walk(Picture.SMALL, 100, 6, gray=True)
_AVIF = make_walk(Picture.PHOTO, 800, 10, "inside", format="avif")

# Requests/s of zimg 2.2, zimg 3.0 and a Lua type in the latter, with `wrk -cN -t8 -d30s` on a Xeon E3-1230 V2.
_PUBLISHED_MADE = {
    10: (73.85, 1346.82, 1316.37),
    50: (74.88, 1343.75, 1305.69),
    100: (74.98, 1322.64, 1319.99),
    300: (75.04, 1328.88, 1324.93),
    500: (75.53, 1342.05, 1321.39),
}


def _tell_published_made(connections: int) -> str:
    old, new, script = _PUBLISHED_MADE[connections]
    return (
        f"Xeon E3-1230 V2, 8 threads, wrk: zimg 2.2 {old:.0f}, 3.0 {new:.0f} ({new / old:.1f} × 2.2), "
        f"3.0 by a Lua type {script:.0f} requests/s ({script / new:.2f} × 3.0)"
    )


def _rate(variant: Variant, at_least: float | None, rival: Variant | None = None, case: str = "") -> Goal:
    return Goal(variant.name, "rate", "at least", at_least, rival.name if rival else "", case)


def _name_thumbnail(connections: int) -> str:
    return f"640 × 856 → 100 × 100 gray, {connections} connections"


def _thumbnail(connections: int) -> Case:
    # Loops have no connections: they and what is held against them alone stand in one of the rows.
    with_loops = connections == 100
    case = "" if with_loops else _name_thumbnail(100)
    goals = [_rate(PLAIN, 2.0, BARE, case), _cpu(PLAIN, None, BARE, case)]
    if with_loops:
        goals.append(Goal(PLAIN.name, "cpu_us", "at most", 250.0, PLANS.name, by="difference"))
    if connections != 10:
        goals += [_rate(PLAIN, 0.95, case=_name_thumbnail(10)), _cpu(PLAIN, None, case=_name_thumbnail(10))]
    if connections == 500:
        goals.append(Goal(PLAIN.name, "rate", "at most", 1.05, case=_name_thumbnail(10)))
    return Case(
        _name_thumbnail(connections),
        Content.MADE,
        Making(connections, _THUMBNAIL),
        (PLAIN, PLANS, BARE) if with_loops else (PLAIN,),
        tuple(goals),
        _WORKERS,
        _tell_published_made(connections),
    )


def _photo(name: str, walk: Walk, with_intermediates: float | None) -> Case:
    return Case(
        f"photo of 2725 × 2225 → {name}",
        Content.MADE,
        Making(32, walk),
        (UNREDUCED, REDUCED, BARE),
        (
            *(_rate(UNREDUCED, 0.9, BARE), _cpu(UNREDUCED, None, BARE)),
            *(_rate(REDUCED, with_intermediates, BARE), _cpu(REDUCED, None, BARE)),
        ),
        _WORKERS,
    )


def _typed(connections: int) -> Case:
    return Case(
        f"640 × 856 → 100 × 100 gray by t=, {connections} connections",
        Content.MADE,
        Making(connections, TYPED),
        (PLAIN, BY_SCRIPT, BY_TABLE),
        (
            _rate(BY_SCRIPT, 0.90, PLAIN),
            _cpu(BY_SCRIPT, None, PLAIN),
            _rate(BY_TABLE, 0.98, PLAIN),
            _cpu(BY_TABLE, None, PLAIN),
        ),
        _WORKERS,
        _tell_published_made(connections),
    )


_SCRIPT = Suite(
    "script",
    "The same renditions by a type's name (t=), which a script in Lua or a table of the settings makes",
    tuple((_typed(connections),) for connections in _PUBLISHED_MADE),
)

_ALONE = "latency of a tiny job, alone"
_RESIZE = Suite(
    "resize",
    "Renditions that have to be made, all different, beside the same work in a bare loop of libvips",
    (
        tuple(_thumbnail(connections) for connections in _PUBLISHED_MADE),
        (_photo("100 × 100 cover", make_walk(Picture.PHOTO, 100, 6), 2.2),),
        (_photo("400 fit", make_walk(Picture.PHOTO, 400, 20, "inside"), 1.5),),
        (_photo("800 fit", make_walk(Picture.PHOTO, 800, 20, "inside"), None),),
        (
            Case(_ALONE, Content.MADE, Paced(60.0, _THUMBNAIL), (SHORT_QUEUE,), (), _WORKERS),
            Case(
                "the same while AVIF is made, as much as is taken",
                Content.MADE,
                Paced(60.0, _THUMBNAIL, _AVIF, 40),
                (SHORT_QUEUE,),
                (Goal(SHORT_QUEUE.name, "p99_ms", "at most", 3.0, case=_ALONE),),
                _WORKERS,
            ),
        ),
    ),
)


def _soak(name: str, variant: Variant) -> Case:
    growth = Goal(variant.name, "growth", "at most", 10.0), Goal(variant.name, "rss_growth", "at most", None)
    return Case(f"100,000 mixed jobs, {name}", Content.MADE, Soak(100_000), (variant,), growth, _WORKERS)


_MEMORY = Suite(
    "memory",
    "What server and workers hold after very many jobs of all kinds; --quick does fewer",
    (
        (_soak("as it is installed", SOAKED),),
        (_soak("no worker replaced", ENDLESS),),
        (_soak("no worker replaced, on jemalloc", ENDLESS_ON_JEMALLOC),),
    ),
)

_KV = Suite(
    "kv",
    "Values under keys: the published load, a mixed one, durable writes, very many keys",
    tuple(
        tuple(
            Case(name, Content.VALUE, load, servers, goals, published=published)
            for name, load, servers, goals, published in rows
        )
        for rows in keyvalue.ROWS
    ),
)

_ECHO = Suite(
    "echo",
    "Raw TCP: messages that come back as they are, on 10 connections",
    tuple(
        (
            Case(
                f"{kib} KiB",
                Content.MESSAGES,
                echoes.Messages(kib * 1024),
                echoes.VARIANTS,
                echoes.make_goals(kib),
                published=echoes.PUBLISHED_ON,
                published_rates=echoes.tell_published(kib),
            ),
        )
        for kib in echoes.SIZES_KIB
    ),
)

SUITES = {suite.name: suite for suite in (_ECHO, _HELLO, _STATIC, _CONNECTIONS, _RESIZE, _SCRIPT, _MEMORY, _KV)}


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
        upload(address, photo)
        replies = {content: exchange(address, Ask(path, 200, b"")) for content, path in paths.items()}
    finally:
        server.stop()
    bodies = {content: reply.body for content, reply in replies.items()}
    if bodies[Content.ORIGINAL] != photo or bodies[Content.RENDITION][:3] != b"\xff\xd8\xff":
        raise BenchError("uvimg does not give back what was uploaded: there is nothing to measure with")
    (folder / "www").mkdir()
    for content, name in FILE_NAMES.items():
        (folder / "www" / name).write_bytes(bodies[content])
    bodies[Content.UNCHANGED] = b""
    return Site(folder, paths, bodies, replies[Content.RENDITION].fields["etag"])
