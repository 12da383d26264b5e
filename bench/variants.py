"""THE table: what is measured (suites of cases), on which servers (variants), and what is aimed at (goals).

A new row is a Case; a new server is a Variant with a command and, for each content it can serve, a path, or for what
has to be made its requests (makers.py has those of ours).
"""

import hashlib
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import caches, corpus, echoes, keyvalue, nginx, php, published, serving, thumbor
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
from bench.published import Figures
from bench.result import Goal, Section
from bench.serving import Address, BenchError, Launch, Server
from bench.site import FILE_NAMES, Content, Site, Variant, absent
from bench.soak import Soak
from bench.work import Picture, Walk, make_walk


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
    return nginx.launch(site, processes)


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
    # Of figures that others have published: where and when, and variant → measure → figure.
    published: str = ""
    published_figures: dict[str, Figures] = field(default_factory=dict, hash=False)
    # Cases that differ in a number alone have the name of their series.
    series: str = ""
    level: int = 0
    # More rounds than this a run for a look has no time for.
    quick_rounds: int = 100

    @property
    def section(self) -> Section:
        return Section(self.name, self.goals, self.published, self.series, self.level)


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


def _rate(variant: Variant, at_least: float | None, rival: Variant | None = None, case: str = "") -> Goal:
    return Goal(variant.name, "rate", "at least", at_least, rival.name if rival else "", case)


_ALL = (TRANSPORT, STREAMS, AIOHTTP, NGINX, BARE_AIOHTTP, LIMIT)
_OURS = (TRANSPORT, STREAMS, AIOHTTP)


def _beside_zimg_rivals(*rivals: Variant) -> tuple[Goal, ...]:
    """What is told beside those of zimg's tables, who are far behind."""
    with_memcached = _cpu(caches.UVIMG, None, caches.NGINX)
    return (with_memcached, *(_cpu(TRANSPORT, None, rival) for rival in (caches.NGINX, *rivals)))


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

_THUMBOR_ORIGINAL = absent(
    "thumbor, as it was uploaded", "thumbor gives back renditions only, never an upload's own bytes"
)


def _rates_published_2013(rates: tuple[float, float, float], with_php: Variant) -> dict[str, Figures]:
    """zimg's place is ours; what it had in memcached stands beside what we have there."""
    variants = (TRANSPORT, caches.UVIMG, with_php)
    return {variant.name: {"rate": rate} for variant, rate in zip(variants, rates, strict=True)}


_RENDITION = "stored rendition"
_STATIC = Suite(
    "static",
    "Stored images, 100 keep-alive connections",
    (
        (
            Case(
                _RENDITION,
                Content.RENDITION,
                KeepAlive(100),
                (*_ALL, caches.UVIMG, caches.UVIMG_ON_REDIS, caches.NGINX, php.KEEPING, thumbor.KEEPING),
                (
                    _cpu(TRANSPORT, 1.15, NGINX),
                    *_BESIDE_BARE,
                    *_beside_zimg_rivals(php.KEEPING, thumbor.KEEPING),
                ),
                published=f"{published.STATIC_ON}, “processing”: kept by zimg; whether PHP kept it is not said",
                published_figures=_rates_published_2013(published.PROCESSING, php.KEEPING),
            ),
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
                (*_ALL, caches.UVIMG, caches.UVIMG_ON_REDIS, caches.NGINX, php.GD, _THUMBOR_ORIGINAL),
                (_cpu(TRANSPORT, 1.25, NGINX), *_BESIDE_BARE, *_beside_zimg_rivals(php.GD)),
                published=f"{published.STATIC_ON}, “static image”",
                published_figures=_rates_published_2013(published.STATIC, php.GD),
            ),
        ),
    ),
)

# Where all front-ends are measured, and new connections too.
_LANDMARKS = (100, 1_000, 5_000, 10_000, 20_000)
# Beyond, the listen queue of one process overflows, and who is not in it tries again a second later; and beyond
# 20,000 one has no descriptors left by default.
_MOST_OF_A_PROCESS = 10_000


def _rates_published(connections: int) -> dict[str, Figures]:
    """zimg's place is ours."""
    rates = zip((TRANSPORT.name, NGINX.name), published.IT_WORKS[connections], strict=True)
    return {name: {"rate": rate} for name, rate in rates}


def _count_processes(connections: int) -> int:
    return 1 if connections <= _MOST_OF_A_PROCESS else 2


def _keep_alive(connections: int) -> Case:
    ours = _OURS if connections in _LANDMARKS else (TRANSPORT,)
    goals = [_cpu(variant, None, NGINX) for variant in ours]
    if connections == 10_000:
        goals += [Goal(variant.name, "rate", "at least", 0.6, case=_name_keep_alive(100)) for variant in ours]
    return Case(
        _name_keep_alive(connections),
        Content.TINY,
        KeepAlive(connections),
        (*ours, NGINX),
        (*(_rate(variant, None, NGINX) for variant in ours), *goals),
        _count_processes(connections),
        published.tell_it_works(connections),
        _rates_published(connections),
        "kept connections",
        connections,
        quick_rounds=1,
    )


def _name_keep_alive(connections: int) -> str:
    name = f"{connections:,} keep-alive connections"
    return name if _count_processes(connections) == 1 else f"{name}, 2 processes"


def _new_connections(connections: int) -> Case:
    ours = _OURS if connections == 100 else (TRANSPORT,)
    processes = _count_processes(connections)
    return Case(
        f"a new connection for every request, {connections:,} at a time"
        + ("" if processes == 1 else f", {processes} processes"),
        Content.TINY,
        NewConnections(connections),
        (*ours, NGINX),
        (
            *(_rate(variant, 1.0 if variant is TRANSPORT else None, NGINX) for variant in ours),
            *(_cpu(variant, None, NGINX) for variant in ours),
        ),
        processes,
        published.tell_it_works(connections),
        _rates_published(connections),
        "new connections at a time",
        connections,
        quick_rounds=1,
    )


_CONNECTIONS = Suite(
    "connections",
    "A tiny answer to very many clients, who keep their connections or make new ones",
    (
        tuple(_keep_alive(connections) for connections in (100, 1_000, 5_000, 10_000)),
        *(
            (_keep_alive(connections),)
            for connections in published.IT_WORKS
            if connections not in (100, 1_000, 5_000, 10_000)
        ),
        (
            Case(
                "memory of an idle connection",
                Content.TINY,
                Idle(10_000),
                (*_OURS, NGINX),
                tuple(Goal(variant.name, "connection_kib", "at most", 10.0) for variant in _OURS),
            ),
        ),
        *((_new_connections(connections),) for connections in _LANDMARKS),
    ),
)

# What has to be made

# As many as cores, so server, workers and load share the machine.
_WORKERS = len(os.sched_getaffinity(0))
_THUMBNAIL = make_walk(Picture.SMALL, 100, 6, gray=True)
_AVIF = make_walk(Picture.PHOTO, 800, 10, "inside", format="avif")

_OLD_ZIMG = absent("zimg 2.2", "it is in no package index: PHP with ImageMagick, its engine, is measured in its place")


def _figures_published_made(connections: int) -> dict[str, Figures]:
    """zimg 3.0's place is ours."""
    names = (_OLD_ZIMG.name, PLAIN.name, BY_SCRIPT.name)
    figures = zip(names, published.MADE[connections], strict=True)
    return {name: {"rate": rate, "mean_ms": mean_ms} for name, (rate, mean_ms) in figures}


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
    goals += [_cpu(PLAIN, None, rival) for rival in (php.IMAGEMAGICK, thumbor.MAKING)]
    return Case(
        _name_thumbnail(connections),
        Content.MADE,
        Making(connections, _THUMBNAIL),
        (PLAIN, *((PLANS, BARE, php.GD) if with_loops else ()), php.IMAGEMAGICK, thumbor.MAKING, _OLD_ZIMG),
        tuple(goals),
        _WORKERS,
        published.tell_made(connections),
        _figures_published_made(connections),
        "connections, 640 × 856 → 100 × 100 gray",
        connections,
        quick_rounds=2 if connections == 100 else 1,
    )


def _photo(name: str, walk: Walk, with_intermediates: float | None) -> Case:
    return Case(
        f"photo of 2725 × 2225 → {name}",
        Content.MADE,
        Making(32, walk),
        (UNREDUCED, REDUCED, BARE, php.GD, php.IMAGEMAGICK, thumbor.MAKING),
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
        (PLAIN, BY_SCRIPT, BY_TABLE, *((BARE, php.IMAGEMAGICK, thumbor.MAKING) if connections == 100 else ())),
        (
            _rate(BY_SCRIPT, 0.90, PLAIN),
            _cpu(BY_SCRIPT, None, PLAIN),
            _rate(BY_TABLE, 0.98, PLAIN),
            _cpu(BY_TABLE, None, PLAIN),
            *(_cpu(BY_SCRIPT, None, rival) for rival in (php.IMAGEMAGICK, thumbor.MAKING) if connections == 100),
        ),
        _WORKERS,
        published.tell_made(connections),
        _figures_published_made(connections),
        "connections, the same by a type’s name",
        connections,
        quick_rounds=2 if connections == 100 else 1,
    )


_SCRIPT = Suite(
    "script",
    "The same renditions by a type's name (t=), which a script in Lua or a table of the settings makes",
    tuple((_typed(connections),) for connections in published.MADE),
)

_ALONE = "latency of a tiny job, alone"
_RESIZE = Suite(
    "resize",
    "Renditions that have to be made, all different, beside the same work in a bare loop of libvips",
    (
        tuple(_thumbnail(connections) for connections in published.MADE),
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
            Case(name, Content.VALUE, load, servers, goals, published=published, published_figures=figures)
            for name, load, servers, goals, published, figures in rows
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
                published=published.ECHO_ON,
                published_figures=published.tell_echo(kib),
            ),
        )
        for kib in published.ECHO_SIZES_KIB
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
