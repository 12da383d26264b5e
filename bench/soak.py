"""Very many different jobs on one server, and whether its memory is the same at the end as it was early on.

What is held against itself is the memory that belongs to the server and its workers alone. All that they have
resident grows with the store too, whose file is mapped: it is told beside it.
"""

import hashlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import corpus
from bench.exchange import Ask, read_metrics
from bench.generators import start_wrk, stop_wrk, wait, write_wrk_script
from bench.load import check_counts, summarise_cost
from bench.makers import upload
from bench.making import check_samples
from bench.serving import BenchError, Cores, Server
from bench.work import Picture, Walk, make_walk

_CONNECTIONS = 16
_LOOK_S = 0.25
# A server on which nothing moves for so long has lost its workers.
_STUCK_S = 60.0
# Enough to see whether it works, where rounds are shorter than by default.
_QUICK_JOBS = 3_000
# The first tenth is for buffers, caches and heaps to get their size. Medians of a span: jobs differ in what they take.
_EARLY, _LATE = (0.10, 0.20), (0.90, 1.0)


@dataclass(frozen=True, slots=True)
class Footprint:
    """After so many jobs: bytes that are the server's own, and all that it has resident."""

    jobs: float
    own: int
    resident: int


@dataclass(frozen=True, slots=True)
class Soak:
    """So many jobs: JPEG, PNG, WebP and GIF in and out, still and moving, scaled, cut, turned and gray, and uploads."""

    jobs: int

    programs = ("wrk", "ss")
    most_rounds = 1
    # To see that it works at all.
    walks: tuple[Walk, ...] = (make_walk(Picture.SMALL, 100, 0, gray=True),)

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        address, wanted = server.addresses[0], self.jobs if seconds >= 2 else _QUICK_JOBS
        if not server.rss_bytes():
            # Nor is it given images.
            raise BenchError(f"{server.name} was not started here: there is no memory to look at")
        check_samples(address, asks)
        images = draw_images()
        for image in images:
            upload(address, image)
        with tempfile.NamedTemporaryFile(suffix=".jpg") as fresh:
            fresh.write(images[0])
            fresh.flush()
            script = write_wrk_script(*_write_mix(images, Path(fresh.name)))
            with start_wrk(script, address, "/", _CONNECTIONS, 1, cores) as wrk:
                began, before, footprints = time.monotonic(), server.cpu_s(), [_look(server)]
                first = progress = footprints[0].jobs
                moved = began
                while progress < first + wanted:
                    wait([wrk], _LOOK_S)
                    server.check_alive()
                    footprints.append(_look(server))
                    if footprints[-1].jobs > progress:
                        progress, moved = footprints[-1].jobs, time.monotonic()
                    elif time.monotonic() > moved + _STUCK_S:
                        raise BenchError(f"nothing moves after {progress - first:.0f} jobs")
                passed, now = time.monotonic() - began, server.cpu_s()
                counts = stop_wrk([wrk])
        check_counts(server, counts)
        return {
            "jobs": progress - first,
            "rate": (progress - first) / passed,
            **summarise_cost(server, before, progress - first, passed, now),
            "growth": measure_growth([(footprint.jobs - first, footprint.own) for footprint in footprints]),
            "rss_growth": measure_growth([(footprint.jobs - first, footprint.resident) for footprint in footprints]),
        }


def _look(server: Server) -> Footprint:
    jobs = sum(read_metrics(server.addresses[0], "uvimg_jobs_total").values())
    if not jobs:
        raise BenchError(f"{server.name} does not tell how many jobs it has done")
    return Footprint(jobs, server.own_bytes(), server.rss_bytes())


def measure_growth(sizes: Sequence[tuple[float, int]]) -> float:
    """From the second tenth of the jobs to the last, in percent. Each size is what was held after so many jobs."""
    whole = sizes[-1][0]
    early, late = (
        [size for jobs, size in sizes if span[0] * whole <= jobs <= span[1] * whole] for span in (_EARLY, _LATE)
    )
    if not early or not late:
        raise BenchError("there were too few jobs to see a growth")
    return (statistics.median(late) / statistics.median(early) - 1) * 100


def draw_images() -> list[bytes]:
    """Small ones, so that there is time for many; the first is the JPEG that uploads repeat under other hashes."""
    photo = corpus.photo(900, 600, seed=3).gaussblur(1.0)
    part = photo.crop(100, 50, 400, 300)
    round_edge = part.extract_band(0).cast("uchar")
    return [
        corpus.jpeg(part.resize(0.5), quality=85),
        corpus.jpeg(photo, quality=85),
        corpus.jpeg(corpus.oriented(part, 6), quality=90, keep="exif"),
        corpus.jpeg(part.colourspace("b-w"), quality=70, interlace=True),
        bytes(part.pngsave_buffer(compression=3)),
        bytes(part.bandjoin(round_edge).pngsave_buffer(compression=3)),
        bytes(corpus.flat(300, 200, (20, 90, 160)).pngsave_buffer()),
        bytes(photo.resize(0.5).webpsave_buffer(Q=80, effort=1)),
        bytes(corpus.animation(120, 90, 5).gifsave_buffer()),
        bytes(corpus.animation(100, 100, 3).webpsave_buffer(Q=70, effort=1)),
    ]


_MIX = """
local images = {%(images)s}
local formats = {"", "", "", "", "", "", "&f=png", "&f=webp", "&f=webp", "&f=gif"}
local places = {"", "", "", "&p=4", "&p=0", "&p=2"}
local others = {"", "", "", "", "&g=1", "&g=1", "&r=90", "&r=33"}
local fresh, last = nil, 0

function init(args)
    math.randomseed(1)
    local file = io.open("%(fresh)s", "rb")
    fresh = file:read("*a")
    file:close()
end

local function pick(list)
    return list[math.random(#list)]
end

function request()
    last = last + 1
    if last %% 20 == 0 then
        -- A comment makes another image of it.
        local body = fresh:sub(1, 2) .. string.format("\\255\\254\\0\\12%%010d", last) .. fresh:sub(3)
        return wrk.format("POST", "/images", {["Content-Type"] = "image/jpeg"}, body)
    end
    local format = last %% 1000 == 1 and "&f=avif" or pick(formats)
    return wrk.format("GET", string.format("/%%s?w=%%d&h=%%d&q=%%d%%s%%s%%s", pick(images), math.random(24, 240),
        math.random(24, 240), math.random(40, 90), pick(places), pick(others), format))
end
"""
_LOOK = """
function response(status, fields, body)
    if status ~= 200 and status ~= 201 or #body == 0 then
        wrong = wrong + 1
    end
end
"""


def _write_mix(images: Sequence[bytes], fresh: Path) -> tuple[str, str]:
    ids = ", ".join(f'"{hashlib.md5(image).hexdigest()}"' for image in images)
    return _MIX % {"images": ids, "fresh": fresh}, _LOOK
