"""The limit of the machine as others reach it: libvips' own thumbnail in a loop, with nothing around it.

python -m bench.rivals.bare_libvips PORT FOLDER

Set up as whoever wants many small jobs done at once would: one thread each, no cache of operations, no metadata.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pyvips

from bench.rivals.loop import Job, serve
from bench.work import Task


def _make(data: bytes, task: Task) -> bytes:
    cut = {"crop": "centre"} if task.fit == "cover" else {}
    image = pyvips.Image.thumbnail_buffer(data, task.width, height=task.height, **cut)
    if task.gray:
        image = image.colourspace("b-w")
    return bytes(image.jpegsave_buffer(Q=task.quality, keep="none"))


def _prepare(data: bytes, tasks: Sequence[Task]) -> list[Job]:
    return [partial(_make, data, task) for task in tasks]


if __name__ == "__main__":
    pyvips.concurrency_set(1)
    pyvips.cache_set_max(0)
    serve(int(sys.argv[1]), Path(sys.argv[2]), _prepare)
