"""Method and path → what is asked of the images app: a closed set of queries.

Two faces of the same images: zimg's paths, which its clients keep using, and `/images`. They take the
same parameters and differ in how they name things and tell errors.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import unquote_plus

import msgspec

from uvimg.core.address import parse_id
from uvimg.core.errors import BadParameter, BadRequest, MethodNotAllowed, NotFound, NotImplementedHere
from uvimg.core.params import Params, read_params
from uvimg.core.types import NO_TYPES, Types, is_type_name

Face = Literal["zimg", "images"]


# Made for every new URL, and a frozen dataclass takes ten times as long to make.
class Show(msgspec.Struct, frozen=True):
    """An image, or a rendition of it. `typed` says that t= chose it: by `params` or, where `script` is the type's
    name, by what the script makes of that; `params` say nothing then.
    """

    name: ClassVar[str] = "image"
    image_id: str
    params: Params
    typed: bool = False
    script: str = ""


@dataclass(frozen=True, slots=True)
class Describe:
    """Facts about an image. `image_id` is None where zimg's /info got no usable md5."""

    name: ClassVar[str] = "info"
    image_id: str | None


@dataclass(frozen=True, slots=True)
class Remove:
    """An image and all its renditions. `by_get` is zimg's /admin?t=1, which a browser may be lured to."""

    name: ClassVar[str] = "remove"
    image_id: str
    by_get: bool = False


@dataclass(frozen=True, slots=True)
class Upload:
    name: ClassVar[str] = "upload"


@dataclass(frozen=True, slots=True)
class Options:
    """OPTIONS: which methods are allowed here."""

    name: ClassVar[str] = "options"
    allow: str


@dataclass(frozen=True, slots=True)
class Page:
    name: Literal["index", "admin", "favicon", "echo"]


# Each has a name, which stands in the metrics.
Query = Show | Describe | Remove | Upload | Options | Page

# Those of RFC 9110 9.3 and PATCH (RFC 5789): what these may do somewhere is 405, others are nobody's.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})


def face_of(path: str) -> Face:
    """Which face a path belongs to; it decides how errors are told."""
    return "images" if path == "/images" or path.startswith("/images/") else "zimg"


def route(method: str, path: str, query: str, types: Types = NO_TYPES) -> Query:
    """What is asked for. `path` is decoded, `query` is not.

    Raises NotFound, MethodNotAllowed, NotImplementedHere, BadRequest.
    """
    if method not in METHODS:
        raise NotImplementedHere("This method is not known here.")
    if method == "OPTIONS" and path == "*":
        # Of the server as a whole (RFC 9110 9.3.7).
        return Options("GET, HEAD, POST, DELETE, OPTIONS")
    if face_of(path) == "images":
        return _route_images(method, path, query, types)
    return _route_zimg(method, path, query, types)


def _route_images(method: str, path: str, query: str, types: Types) -> Query:
    if path in ("/images", "/images/"):
        return _choose(method, {"POST": Upload()})
    name, _, rest = path.removeprefix("/images/").partition("/")
    stem, dot, extension = name.partition(".")
    image_id = parse_id(stem)
    if image_id is None or rest not in ("", "info") or (dot and rest) or path.endswith("/"):
        raise NotFound()
    if rest == "info":
        return _choose(method, {"GET": Describe(image_id)})
    if method == "DELETE" and not dot:
        return Remove(image_id)
    if method in ("GET", "HEAD"):
        return _show(image_id, query, extension if dot else None, types)
    return _choose(method, {"GET": None} if dot else {"GET": None, "DELETE": None})


def _route_zimg(method: str, path: str, query: str, types: Types) -> Query:
    match path:
        case "/":
            return _choose(method, {"GET": Page("index"), "POST": Upload()})
        case "/upload":
            return _choose(method, {"POST": Upload()})
        case "/info":
            return _choose(method, {"GET": Describe(parse_id(read_fields(query).get("md5", "")))})
        case "/admin":
            return _route_admin(method, query)
        case "/echo":
            return _choose(method, {"GET": Page("echo")})
        case "/favicon.ico":
            return _choose(method, {"GET": Page("favicon")})
    image_id = parse_id(path[1:]) if path.startswith("/") else None
    if image_id is None:
        raise NotFound("There is nothing here.")
    if method in ("GET", "HEAD"):
        return _show(image_id, query, None, types)
    return _choose(method, {"GET": None})


def _route_admin(method: str, query: str) -> Query:
    page = _choose(method, {"GET": Page("admin")})
    if isinstance(page, Options) or not (fields := read_fields(query)):
        return page
    image_id = parse_id(fields.get("md5", ""))
    if image_id is None:
        raise BadParameter("md5", "md5 must be 32 hex digits (or the 64 of a SHA-256).")
    if fields.get("t") != "1":
        raise BadParameter("t", "t must be 1 (delete); there is no other command.")
    if method == "HEAD":
        # Whoever sends HEAD, such as a checker of links, only looks.
        raise MethodNotAllowed("GET, OPTIONS")
    return Remove(image_id, by_get=True)


def _choose(method: str, choices: dict[str, Query | None]) -> Query:
    """The choice for this method; HEAD goes with GET."""
    found = choices.get("GET" if method == "HEAD" else method)
    if found is not None:
        return found
    names = ["GET", "HEAD"] if "GET" in choices else []
    allow = ", ".join([*names, *(name for name in choices if name != "GET"), "OPTIONS"])
    if method == "OPTIONS":
        return Options(allow)
    raise MethodNotAllowed(allow)


def read_fields(query: str) -> dict[str, str]:
    """The query's fields, the first of each name, as zimg took them; empty ones count as not given.

    Encoded as forms are (WHATWG URL, application/x-www-form-urlencoded).
    """
    pairs = query.split("&")
    if len(pairs) > 50:
        raise BadRequest("The query has more than 50 parameters.")
    encoded = "%" in query or "+" in query
    fields: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if encoded:
            name, value = unquote_plus(name, errors="replace"), unquote_plus(value, errors="replace")
        if value:
            fields.setdefault(name, value)
    return fields


def _show(image_id: str, query: str, extension: str | None, types: Types) -> Show:
    fields = read_fields(query)
    name = fields.get("t") if types.are_on else None
    if name is None:
        return Show(image_id, read_params(fields, extension))
    if extension is not None:
        raise BadParameter("t", "A type chooses the format itself: leave out the path's extension.")
    params = types.tables.get(name)
    if params is not None:
        return Show(image_id, params, typed=True)
    if not types.scripted or not is_type_name(name):
        raise NotFound("There is no such type.")
    return Show(image_id, Params(), typed=True, script=name)
