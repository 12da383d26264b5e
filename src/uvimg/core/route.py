"""Method and path → what is asked of the images app: a closed set of queries.

Two faces of the same images: zimg's paths, which its clients keep using, and `/images`. They take the
same parameters and differ in how they name things and tell errors.
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import unquote_plus

import msgspec

from uvimg.core.address import parse_id
from uvimg.core.errors import BadParameter, BadRequest, MethodNotAllowed, NotFound, NotImplementedHere
from uvimg.core.formats import OUTPUT_FORMATS, OutputFormat, parse_output_format

Face = Literal["zimg", "images"]


# These two are made for every new URL, and a frozen dataclass takes ten times as long to make.
class Params(msgspec.Struct, frozen=True):
    """What is wanted of an image, as zimg names it; see the table of parameters in the README.

    w and h are 0, x and y are -1, q is 0 and f is "" where they are not given. `bare` is the image
    asked for with no parameter at all.
    """

    w: int = 0
    h: int = 0
    p: int = 1
    g: int = 0
    x: int = -1
    y: int = -1
    r: int = 0
    q: int = 0
    f: OutputFormat | Literal["", "none"] = ""

    @property
    def bare(self) -> bool:
        return self == _BARE

    @property
    def original(self) -> bool:
        """p=0 with neither w nor h is the original, byte for byte, whatever else is given."""
        return self.p == 0 and not self.w and not self.h


_BARE = Params()


class Show(msgspec.Struct, frozen=True):
    """An image, or a rendition of it."""

    name: ClassVar[str] = "image"
    image_id: str
    params: Params


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


def route(method: str, path: str, query: str) -> Query:
    """What is asked for. `path` is decoded, `query` is not.

    Raises NotFound, MethodNotAllowed, NotImplementedHere, BadRequest.
    """
    if method not in METHODS:
        raise NotImplementedHere("This method is not known here.")
    if method == "OPTIONS" and path == "*":
        # Of the server as a whole (RFC 9110 9.3.7).
        return Options("GET, HEAD, POST, DELETE, OPTIONS")
    if face_of(path) == "images":
        return _route_images(method, path, query)
    return _route_zimg(method, path, query)


def _route_images(method: str, path: str, query: str) -> Query:
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
        return Show(image_id, _parse_params(query, extension if dot else None))
    return _choose(method, {"GET": None} if dot else {"GET": None, "DELETE": None})


def _route_zimg(method: str, path: str, query: str) -> Query:
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
        return Show(image_id, _parse_params(query, None))
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


# Nine digits: more than any limit allows, and too few to compute anything huge with.
_INTEGER = re.compile(r"-?\d{1,9}", re.ASCII)


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


def _parse_params(query: str, extension: str | None) -> Params:
    """The parameters of an image. Unknown ones are ignored and make no rendition of their own."""
    fields = read_fields(query)
    if not fields and extension is None:
        return _BARE
    return Params(
        w=_integer(fields, "w", 0, 0, None),
        h=_integer(fields, "h", 0, 0, None),
        p=_integer(fields, "p", 1, 0, 4),
        g=_integer(fields, "g", 0, 0, 1),
        x=_integer(fields, "x", -1, None, None),
        y=_integer(fields, "y", -1, None, None),
        r=_integer(fields, "r", 0, None, None) % 360,
        q=_integer(fields, "q", 0, 1, 100),
        f=_format(fields, extension),
    )


def _integer(fields: dict[str, str], name: str, default: int, low: int | None, high: int | None) -> int:
    text = fields.get(name)
    if text is None:
        return default
    value = int(text) if _INTEGER.fullmatch(text) else None
    if value is None or (low is not None and value < low) or (high is not None and value > high):
        least = "" if low is None else f" from {low} up,"
        allowed = f"{least} of at most nine digits" if high is None else f" from {low} to {high}"
        raise BadParameter(name, f"{name} must be a whole number{allowed}.")
    return value


def _format(fields: dict[str, str], extension: str | None) -> OutputFormat | Literal["", "none"]:
    """The format asked for, by f or by the extension of the path."""
    text = fields.get("f", "").lower()
    wanted = "none" if text == "none" else parse_output_format(text)
    if text and wanted is None:
        raise BadParameter("f", f"f must be one of {', '.join(OUTPUT_FORMATS)} or none.")
    if extension is None:
        return wanted or ""
    format = parse_output_format(extension)
    if format is None:
        raise BadParameter("f", f"The path's extension must be one of {', '.join(OUTPUT_FORMATS)}, or absent.")
    if wanted is not None and wanted != format:
        raise BadParameter("f", f"f={text} contradicts the path's extension, .{extension.lower()}.")
    return format
