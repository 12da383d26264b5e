"""Method and path → what is asked of the key-value app: a closed set of queries, in two dialects.

OlegDB's and Kyoto Tycoon's have one path: `/<key>` is a key of the database `default`, `/<database>/<key>` one of
another. Segments are told apart before they are decoded, so a slash in a key is written %2F. What is the name of an
operation is never a key.
Surprise: where a segment names an operation, the one before it is a database (`/db/_first`) or a key (`/key/_next`),
by what that operation is asked of.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args
from urllib.parse import unquote_to_bytes

import msgspec

from uvimg.core.address import value_name
from uvimg.core.errors import BadRequest, MethodNotAllowed, NotFound, NotImplementedHere, TooLarge
from uvimg.core.message import split_raw
from uvimg.core.route import METHODS

Dialect = Literal["olegdb", "kyoto"]
Side = Literal["first", "last", "next", "prev"]
Mode = Literal["set", "add", "replace"]

DEFAULT = b"default"
MAX_KEY_BYTES = 400
# With a key, and what stands around both, it fits a name of the store.
MAX_DATABASE_BYTES = 100
# Of a body that is taken apart; each is an object or two.
MAX_LINES = 100_000
# An HTTP date has four digits for the year.
LAST_SECOND = 253_402_300_799

MISSING = "These aren't your ghosts."
NO_RECORDS = "No records found"
NO_MATCHES = "No matches found"
NO_KEY = "Key not found in database"
NOT_A_TIME = "The expiration format is wrong!"


class Read(msgspec.Struct, frozen=True):
    """A value. `record` is its name in the store."""

    name: ClassVar[str] = "get"
    record: bytes


@dataclass(frozen=True, slots=True)
class Write:
    name: ClassVar[str] = "put"
    record: bytes


@dataclass(frozen=True, slots=True)
class Remove:
    name: ClassVar[str] = "delete"
    record: bytes


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The value beside a key, which need not exist, or at an end of a database."""

    name: ClassVar[str] = "cursor"
    database: bytes
    key: bytes
    side: Side


@dataclass(frozen=True, slots=True)
class Listing:
    """Keys with this prefix behind `after`, at most `limit` of them."""

    name: ClassVar[str] = "list"
    database: bytes
    prefix: bytes
    after: bytes
    limit: int | None


@dataclass(frozen=True, slots=True)
class Describe:
    name: ClassVar[str] = "info"
    database: bytes
    record: bytes


@dataclass(frozen=True, slots=True)
class Unjar:
    """Many values at once."""

    name: ClassVar[str] = "bulk_unjar"
    database: bytes


@dataclass(frozen=True, slots=True)
class Squish:
    name: ClassVar[str] = "squish"


@dataclass(frozen=True, slots=True)
class Uptime:
    name: ClassVar[str] = "uptime"


@dataclass(frozen=True, slots=True)
class Call:
    """A procedure of Kyoto Tycoon's."""

    name: ClassVar[str] = "rpc"
    procedure: str


@dataclass(frozen=True, slots=True)
class Options:
    name: ClassVar[str] = "options"
    allow: str


# Each has a name, which stands in the metrics.
Query = Read | Write | Remove | Neighbour | Listing | Describe | Unjar | Squish | Uptime | Call | Options

_OF_DATABASES = frozenset({b"_first", b"_last", b"_all", b"_uptime", b"_bulk_unjar", b"_squish"})
_OF_KEYS = frozenset({b"_next", b"_prev", b"_match", b"_info"})
_BY_POST = frozenset({b"_bulk_unjar", b"_squish"})
OPERATIONS = _OF_DATABASES | _OF_KEYS
_RPC = b"rpc"


def route(method: str, target: str, depth: int, dialect: Dialect) -> Query:
    """What is asked for by a target, as it came, whose path has so many segments before ours.

    Raises NotFound, MethodNotAllowed, NotImplementedHere, BadRequest.
    """
    if depth == 0 and (method == "GET" or method == "PUT") and (simple := _SIMPLE.fullmatch(target)) is not None:
        name = b"kv/%b/%b" % ((simple[1] or "default").encode(), simple[2].encode())
        return Read(name) if method == "GET" else Write(name)
    if method not in METHODS:
        raise NotImplementedHere("This method is not known here.")
    if target == "*":
        # Of the server as a whole (RFC 9110 9.3.7).
        return Options("GET, HEAD, POST, PUT, DELETE, OPTIONS")
    path, query = split_raw(target)
    segments = [unquote_to_bytes(segment) for segment in path.split("/")[1 + depth :]]
    if segments in ([], [b""]):
        raise NotFound("There is nothing here: a path is /KEY or /DATABASE/KEY.")
    *before, last = segments
    if before == [_RPC]:
        return _choose(method, {"POST": Call(last.decode(errors="replace"))})
    if last in _OF_DATABASES and len(before) <= 1:
        return _route_operation(method, check_database(before[0]) if before else DEFAULT, b"", last, query)
    if last in _OF_KEYS and len(before) in (1, 2):
        return _route_operation(
            method, check_database(before[0]) if len(before) == 2 else DEFAULT, before[-1], last, query
        )
    if len(before) > 1:
        raise BadRequest("A path is /KEY or /DATABASE/KEY; a slash in a key is written %2F.")
    record = name_record(before[0] if before else DEFAULT, last)
    if method == "GET" or method == "HEAD":
        return Read(record)
    choices: dict[str, Query] = {"GET": Read(record), "PUT": Write(record), "DELETE": Remove(record)}
    if dialect == "olegdb":
        choices["POST"] = Write(record)
    elif method == "POST":
        raise NotImplementedHere("POST of a key is not known in this dialect: PUT it, or POST to /rpc.")
    return _choose(method, choices)


# Most of what is asked for, where it is not the same again: nothing to decode, to decide or to refuse.
_SIMPLE = re.compile(r"/(?:(?!rpc/)([A-Za-z0-9.~-][\w.~-]{0,99})/)?([A-Za-z0-9.~-][\w.~-]{0,399})", re.ASCII)


def _route_operation(method: str, database: bytes, key: bytes, operation: bytes, query: str) -> Query:
    asked_by = "POST" if operation in _BY_POST else "GET"
    if method in ("PUT", "POST") and method != asked_by and operation in _OF_DATABASES:
        raise BadRequest(f"{operation.decode()} is the name of an operation, so it cannot be a key.")
    if len(key) > MAX_KEY_BYTES or b"\0" in key:
        raise BadRequest(_KEY_RULE)
    match operation:
        case b"_first" | b"_last" | b"_next" | b"_prev":
            side: Side = next(side for side in get_args(Side) if side == operation[1:].decode())
            asked: Query = Neighbour(database, key, side)
        case b"_all" | b"_match":
            asked = _parse_listing(database, key, query)
        case b"_info":
            asked = Describe(database, name_record(database, key))
        case b"_bulk_unjar":
            asked = Unjar(database)
        case b"_squish":
            asked = Squish()
        case _:
            asked = Uptime()
    return _choose(method, {asked_by: asked})


def _choose(method: str, choices: dict[str, Query]) -> Query:
    """The choice for this method; HEAD goes with GET."""
    found = choices.get("GET" if method == "HEAD" else method)
    if found is not None:
        return found
    allow = ", ".join(
        [*(["GET", "HEAD"] if "GET" in choices else []), *(name for name in choices if name != "GET"), "OPTIONS"]
    )
    if method == "OPTIONS":
        return Options(allow)
    raise MethodNotAllowed(allow)


# Keys and databases

_KEY_RULE = f"A key has 1 to {MAX_KEY_BYTES} bytes after decoding, and no NUL among them."


def name_record(database: bytes, key: bytes) -> bytes:
    """The store's name for a key's value. BadRequest where one of them cannot be."""
    check_database(database)
    if not 0 < len(key) <= MAX_KEY_BYTES or b"\0" in key:
        raise BadRequest(_KEY_RULE)
    if key in OPERATIONS:
        raise BadRequest(f"{key.decode()} is the name of an operation, so it cannot be a key.")
    return value_name(database, key)


def check_database(database: bytes) -> bytes:
    if not 0 < len(database) <= MAX_DATABASE_BYTES or b"\0" in database or b"/" in database:
        raise BadRequest(f"The name of a database has 1 to {MAX_DATABASE_BYTES} bytes, and no slash or NUL among them.")
    if database in OPERATIONS or database == _RPC:
        raise BadRequest(f"{database.decode()} has a meaning of its own, so it cannot be a database.")
    return database


_UNSHOWN = re.compile(rb"[\x00-\x1f\x7f%]|\A | \Z")


def show_key(key: bytes) -> bytes:
    """A key as one line of text: what would end it, and %, are percent-encoded."""
    return _UNSHOWN.sub(lambda found: b"%%%02X" % found[0][0], key)


def spell_key(key: bytes) -> str:
    """A key as the value of a header field: as a line of text, and what is not ASCII is percent-encoded too."""
    return "".join(chr(byte) if byte < 128 else f"%{byte:02X}" for byte in show_key(key))


def read_keys(body: bytes) -> list[bytes]:
    """The keys of a body, a line each, spelled as `show_key` spells them."""
    if body.count(b"\n") > MAX_LINES:
        raise TooLarge(f"A body has at most {MAX_LINES} lines.")
    lines = body.removesuffix(b"\n").split(b"\n") if body else []
    # One that is longer can be no key; and to decode it would take 75 times its size in memory.
    return [unquote_to_bytes(line) if len(line) <= 3 * MAX_KEY_BYTES else line for line in lines]


_LIMIT = re.compile(r"[1-9]\d{0,11}", re.ASCII)


def _parse_listing(database: bytes, prefix: bytes, query: str) -> Listing:
    fields: dict[str, str] = {}
    for pair in query.split("&", 50)[:50]:
        name, _, value = pair.partition("=")
        if value:
            fields.setdefault(name, value.replace("+", " "))
    limit, after = fields.get("limit"), unquote_to_bytes(fields.get("after", ""))
    if limit is not None and not _LIMIT.fullmatch(limit):
        raise BadRequest("limit must be a whole number of at least 1.")
    if len(after) > MAX_KEY_BYTES or b"\0" in after:
        raise BadRequest(f"after is no key. {_KEY_RULE}")
    return Listing(database, prefix, after, None if limit is None else int(limit))


# What a write says beside its value

_SECONDS = re.compile(r"\d{1,12}", re.ASCII)


def read_expiry(headers: Mapping[str, str], now_s: int) -> int | None:
    """The second from which a value has expired, in whatever dialect it is said; None for never."""
    text, offset_from = headers.get("x-olegdb-use-by"), 0
    if text is None:
        text = headers.get("x-kt-xt")
        if text is None:
            return None
        if text.startswith("-"):
            text, offset_from = text[1:], now_s
    if not _SECONDS.fullmatch(text) or int(text) + offset_from > LAST_SECOND:
        raise BadRequest(NOT_A_TIME)
    return int(text) + offset_from


def read_mode(headers: Mapping[str, str]) -> Mode:
    text = headers.get("x-kt-mode")
    if text is None:
        return "set"
    for mode in get_args(Mode):
        if text.lower() == mode:
            return mode  # type: ignore[no-any-return]
    raise BadRequest("X-Kt-Mode must be set, add or replace.")


def read_type(headers: Mapping[str, str]) -> str:
    """The media type that a value is kept with."""
    text = headers.get("content-type") or "application/octet-stream"
    if len(text) > 255:
        raise BadRequest("Content-Type has more than 255 characters.")
    if not (text.isascii() and text.isprintable()):
        raise BadRequest("Content-Type is not printable ASCII.")
    return text


# Types that no browser runs anything of. Without a comma: a browser reads a list of types there, and takes the last.
_INERT = re.compile(
    r"(?:text/plain|application/(?:octet-stream|json|x-www-form-urlencoded)|(?:image/(?!svg)|audio/|video/|font/)[\w.+-]+)\s*(?:;[^,]*)?",
    re.IGNORECASE | re.ASCII,
)


def is_inert(media_type: str) -> bool:
    """Whether a browser shows a value of this type without running what may be in it."""
    return _INERT.fullmatch(media_type) is not None
