"""Content codings as values: what they are called, how hard each may be worked on, what is worth coding at all.

Rule: what is compressed already, and every raster image, stays as it is. Whether a request gets a coding is
decided in negotiate.py; ours are made in uvimg/coders.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from uvimg.core.address import Digest
from uvimg.core.errors import BadParameter

# dcz is zstd with a dictionary that the client has (RFC 9842).
Coding = Literal["identity", "gzip", "br", "zstd", "dcz"]

# Below this the head of an answer is longer than what is saved.
MIN_BYTES = 512
# The efforts that may be asked for by hand.
LEVELS: Mapping[Coding, range] = {"gzip": range(1, 10), "zstd": range(1, 23)}
# What is made when nobody waits for it, and of which one copy serves for ever.
BEST: Mapping[Coding, int] = {"zstd": 19, "br": 11, "gzip": 9, "dcz": 19}
# What is made while the client waits; zstd's is a setting. With a dictionary levels below 6 find little of it.
QUICK: Mapping[Coding, int] = {"zstd": 3, "br": 4, "gzip": 6, "dcz": 9}

# What the names of coded copies begin with.
CODINGS = b"codings/"

_TEXTUAL = frozenset(
    (
        *("application/json", "application/javascript", "application/ecmascript", "application/xml"),
        *("application/x-javascript", "application/x-ndjson", "application/jsonl", "application/sql"),
        *("application/wasm", "application/rtf", "application/graphql", "application/yaml", "application/toml"),
        *("application/x-sh", "application/postscript"),
        *("application/vnd.ms-fontobject", "font/ttf", "font/otf", "font/collection", "application/x-font-ttf"),
        *("application/openmetrics-text", "model/obj", "model/stl", "message/rfc822"),
    )
)
_SUFFIXES = ("+json", "+xml", "+yaml", "+text")


def is_compressible(media_type: str) -> bool:
    """Whether content of this type shrinks: text in one of its many forms, or what is like it."""
    kind = media_type.partition(";")[0].strip().lower()
    return kind.startswith("text/") or kind in _TEXTUAL or kind.endswith(_SUFFIXES)


def is_worth_coding(media_type: str, size: int) -> bool:
    return size >= MIN_BYTES and is_compressible(media_type)


def coding_name(digest: Digest, kind: str) -> bytes:
    """The name of a kept copy of a blob; `kind` is its coding, with the dictionary where there is one."""
    return codings_prefix(digest) + kind.encode()


def codings_prefix(digest: Digest) -> bytes:
    """What the names of all coded copies of one blob begin with."""
    return CODINGS + digest.hex().encode() + b"/"


def coded_digest(name: bytes) -> Digest:
    """The blob that a coded copy was made of, from the copy's name."""
    return bytes.fromhex(name.split(b"/", 2)[1].decode())


@dataclass(frozen=True, slots=True)
class Forced:
    """A coding and a level that the request itself asks for; `level` is 0 for identity."""

    coding: Coding
    level: int


_NUMBER = re.compile(r"[0-9]{1,2}", re.ASCII)


def read_forced(fields: Mapping[str, str], zstd_level: int = QUICK["zstd"]) -> Forced | None:
    """What ?compression= and ?level= ask for, None where they are not there. BadParameter for what cannot be.

    zstd has `zstd_level` where no level is given.
    """
    name, level = fields.get("compression"), fields.get("level")
    if name is None:
        if level is not None:
            raise BadParameter("level", "level says nothing without compression.")
        return None
    if name == "none":
        if level is not None:
            raise BadParameter("level", "There are no levels of none.")
        return Forced("identity", 0)
    if name not in ("gzip", "zstd"):
        raise BadParameter("compression", "compression must be none, gzip or zstd.")
    coding = cast(Coding, name)
    levels = LEVELS[coding]
    usual = zstd_level if coding == "zstd" else QUICK[coding]
    number = usual if level is None else int(level) if _NUMBER.fullmatch(level) else 0
    if number not in levels:
        raise BadParameter("level", f"level of {name} must be a whole number from {levels[0]} to {levels[-1]}.")
    return Forced(coding, number)
