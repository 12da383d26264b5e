"""The pictures that locust's users show and upload, generated once for a process, and a look at what comes back.

Every upload has to be another file, so a number is written where a format keeps remarks: a comment in JPEG, a text
chunk in PNG. The rest of the file stays what it is.
"""

import hashlib
import itertools
import logging
import os
import struct
import zlib
from functools import cache
from typing import Any

import pyvips
from locust import events

from bench import corpus

_TYPES = {"jpeg": "image/jpeg", "png": "image/png", "webp": "image/webp", "gif": "image/gif"}
# libvips tells of its threads.
logging.getLogger("pyvips").setLevel(logging.WARNING)
_fresh = itertools.count(int.from_bytes(os.urandom(6), "big"))


@cache
def shown() -> tuple[bytes, ...]:
    """What a gallery shows: a dozen photos of the shapes that cameras and telephones make, in small."""
    sizes = [(1200, 800), (800, 1200), (1600, 900), (1000, 1000)]
    whole = _whole()
    return tuple(
        corpus.jpeg(whole.crop(number * 30, number * 7, *sizes[number % len(sizes)]), quality=85)
        for number in range(12)
    )


@cache
def _whole() -> Any:
    """Making a photo takes half a second, cutting one out takes none."""
    return corpus.photo(2000, 1500, seed=40).copy_memory()


@cache
def _sent() -> tuple[tuple[str, bytes], ...]:
    """What an uploader has: formats and sizes of all kinds."""
    photo = _whole().crop(0, 0, 900, 600)
    return (
        ("jpeg", corpus.jpeg(photo, quality=90)),
        ("jpeg", corpus.jpeg(_whole(), quality=80)),
        ("jpeg", corpus.jpeg(_whole().crop(5, 5, 60, 40), quality=70)),
        ("png", bytes(_whole().crop(9, 9, 300, 200).pngsave_buffer(compression=1))),
        ("png", bytes(corpus.flat(640, 480, (30, 120, 200, 128)).pngsave_buffer())),
        ("webp", bytes(photo.webpsave_buffer(Q=80, effort=0))),
        ("gif", bytes(corpus.animation(80, 60, 6).gifsave_buffer(effort=1))),
    )


def another(index: int) -> tuple[str, str, bytes]:
    """A file that nobody has sent before: its format, media type and bytes."""
    format, data = _sent()[index % len(_sent())]
    remark = b"%d" % next(_fresh)
    if format == "jpeg":
        data = data[:2] + b"\xff\xfe" + struct.pack(">H", 2 + len(remark)) + remark + data[2:]
    elif format == "png":
        # Behind the signature and IHDR, 8 and 25 bytes.
        chunk = b"tEXtComment\0" + remark
        data = data[:33] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[33:]
    elif format == "webp":
        chunk = b"uvim" + struct.pack("<I", len(remark)) + remark + b"\0" * (len(remark) % 2)
        data = data[:4] + struct.pack("<I", len(data) - 8 + len(chunk)) + data[8:] + chunk
    else:
        # Before the trailer; a comment is an extension of one block.
        data = data[:-1] + b"\x21\xfe" + bytes([len(remark)]) + remark + b"\0;"
    return format, _TYPES[format], data


def count_kinds() -> int:
    return len(_sent())


@events.init.add_listener
def _prepare(**_: object) -> None:
    """Now: while one user makes pictures, no other does anything."""
    shown()
    _sent()


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def measure(data: bytes) -> tuple[int, int]:
    """Width and height in pixels of what came. ValueError when it is no picture, or not all of one."""
    try:
        image: Any = pyvips.Image.new_from_buffer(data, "", fail_on="truncated")
        image.avg()
    except pyvips.Error as exc:
        raise ValueError(str(exc).strip().splitlines()[-1]) from exc
    return image.width, image.height
