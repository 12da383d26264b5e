"""Documents: request → what is asked for, path → name in the store, file name → media type.

A path is a list of segments, and what two readers could read in two ways is refused: empty segments, "." and "..",
encoded slashes, backslashes, control characters, bytes that are no UTF-8. A path with a slash at its end is a
directory, which is there as long as a document is below it.
"""

import re
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote

from uvimg.core.errors import BadParameter, BadRequest, MethodNotAllowed, NotFound, NotImplementedHere, TargetTooLong
from uvimg.core.route import METHODS, read_fields

_PREFIX = b"documents/"
# With the prefix what the store takes as a name, and some room.
MAX_PATH_BYTES = 480
MAX_SEGMENT_BYTES = 255
MOST_LISTED = 1000
_INDEX = "index.html"
_ALLOW_DOCUMENT = "GET, HEAD, PUT, DELETE, OPTIONS"
_ALLOW_DIRECTORY = "GET, HEAD, OPTIONS"


@dataclass(frozen=True, slots=True)
class Show:
    """A document; `path` is never empty and has no slash at its end."""

    name: ClassVar[str] = "document"
    path: str
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Enter:
    """A directory: its index.html, else what is in it. `path` is "" or ends with a slash."""

    name: ClassVar[str] = "directory"
    path: str
    fields: dict[str, str]

    @property
    def index(self) -> str:
        return self.path + _INDEX


@dataclass(frozen=True, slots=True)
class List:
    """What is in a directory, of which `limit` entries behind the entry `after`."""

    name: ClassVar[str] = "listing"
    path: str
    limit: int
    after: str


@dataclass(frozen=True, slots=True)
class Put:
    name: ClassVar[str] = "put"
    path: str


@dataclass(frozen=True, slots=True)
class Delete:
    name: ClassVar[str] = "delete"
    path: str


@dataclass(frozen=True, slots=True)
class Options:
    name: ClassVar[str] = "options"
    allow: str


@dataclass(frozen=True, slots=True)
class AddSlash:
    """The mounted app's own name without the slash that makes it a directory."""

    name: ClassVar[str] = "redirect"
    location: str


Query = Show | Enter | List | Put | Delete | Options | AddSlash


def route(method: str, path: str, query: str, target: str, mount: str) -> Query:
    """What is asked for below `mount`, "" or "/docs". `path` is decoded, `query` is not, `target` is as it came.

    Raises NotFound, MethodNotAllowed, NotImplementedHere, BadRequest, TargetTooLong.
    """
    if method not in METHODS:
        raise NotImplementedHere("This method is not known here.")
    if path == "*" and method == "OPTIONS":
        return Options(_ALLOW_DOCUMENT)
    if path == mount and mount:
        return AddSlash(mount + "/")
    if not path.startswith(mount + "/"):
        raise NotFound("There is nothing here.")
    raw = target.partition("?")[0]
    # Decoded they are what divides a path; a proxy in front may have taken them for part of a name.
    if "%" in raw and re.search(r"%(?:2f|5c)", raw, re.IGNORECASE):
        raise BadRequest("An encoded slash in a path can be read in two ways.")
    path = check_path(path[len(mount) + 1 :])
    is_directory = not path or path.endswith("/")
    match method:
        case "GET" | "HEAD":
            fields = read_fields(query) if query else {}
            if is_directory:
                return _list(path, fields) if _LIST.search(query) else Enter(path, fields)
            return Show(path, fields)
        case "PUT" if not is_directory:
            return Put(path)
        case "DELETE" if not is_directory:
            return Delete(path)
    allow = _ALLOW_DIRECTORY if is_directory else _ALLOW_DOCUMENT
    if method == "OPTIONS":
        return Options(allow)
    raise MethodNotAllowed(allow)


# Alone or with any value.
_LIST = re.compile(r"(?:^|&)list(?:[=&]|\Z)")


def check_path(path: str) -> str:
    """A decoded path below the mount. BadRequest for one that no document can have, TargetTooLong for a long one."""
    if not path:
        return path
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise BadRequest("The path is no UTF-8.") from None
    if len(encoded) > MAX_PATH_BYTES:
        raise TargetTooLong(f"A document's path is at most {MAX_PATH_BYTES} bytes long.")
    if _FOREIGN.search(path):
        raise BadRequest("The path has a control character, a backslash, or bytes that are no UTF-8.")
    segments = path.split("/")
    if "" in segments[:-1] or "." in segments or ".." in segments:
        raise BadRequest("The path has an empty segment, . or .. in it.")
    if any(len(segment.encode()) > MAX_SEGMENT_BYTES for segment in segments):
        raise TargetTooLong(f"A segment of a document's path is at most {MAX_SEGMENT_BYTES} bytes long.")
    return path


# C0, DEL, C1, what ends a line in Unicode, what turns the direction of writing, and what decoding left of bad bytes.
_FOREIGN = re.compile("[\x00-\x1f\x7f-\x9f\\\\\u2028\u2029\u202a-\u202e\u2066-\u2069\ufffd\ufffe\uffff]")


def _list(path: str, fields: dict[str, str]) -> List:
    limit = fields.get("limit", str(MOST_LISTED))
    number = int(limit) if re.fullmatch(r"[0-9]{1,4}", limit, re.ASCII) else 0
    if not 1 <= number <= MOST_LISTED:
        raise BadParameter("limit", f"limit must be a whole number from 1 to {MOST_LISTED}.")
    after = fields.get("after", "")
    try:
        length = len(after.encode())
    except UnicodeEncodeError:
        raise BadParameter("after", "after is no UTF-8.") from None
    if length > MAX_SEGMENT_BYTES + 1 or "/" in after[:-1]:
        raise BadParameter("after", "after must be the name of an entry.")
    return List(path, number, after)


def document_name(path: str) -> bytes:
    return _PREFIX + path.encode()


def entry_of(name: bytes, directory: str) -> str:
    """The entry of a directory that a document's name belongs to: "a.html", or "sub/" for all below it."""
    rest = name[len(document_name(directory)) :].decode()
    first, slash, _ = rest.partition("/")
    return first + slash


def behind(directory: str, entry: str) -> bytes:
    """Where to go on behind an entry: behind all names of a directory, which begin with its own."""
    name = document_name(directory + entry)
    # No UTF-8 has such a byte, so no name with this beginning lies behind it.
    return name + b"\xff" if entry.endswith("/") else name


def link(prefix: str, path: str) -> str:
    """A path as it stands in Location and in links."""
    return quote(f"{prefix}/{path}", safe="/~!$&'()*+,;=:@")


_TYPES = {
    "text/html": "html htm",
    "text/css": "css",
    "text/javascript": "js mjs",
    "text/plain": "txt text log conf ini rst",
    "text/markdown": "md markdown",
    "text/csv": "csv",
    "text/calendar": "ics",
    "text/vtt": "vtt",
    "application/json": "json map",
    "application/geo+json": "geojson",
    "application/manifest+json": "webmanifest",
    "application/ld+json": "jsonld",
    "application/xml": "xml xsl",
    "application/xhtml+xml": "xhtml",
    "application/atom+xml": "atom",
    "application/rss+xml": "rss",
    "application/epub+zip": "epub",
    "application/wasm": "wasm",
    "application/pdf": "pdf",
    "application/zip": "zip",
    "application/gzip": "gz tgz svgz",
    "application/zstd": "zst",
    "application/x-tar": "tar",
    "application/yaml": "yaml yml",
    "application/toml": "toml",
    "application/sql": "sql",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpg jpeg",
    "image/gif": "gif",
    "image/webp": "webp",
    "image/avif": "avif",
    "image/x-icon": "ico",
    "audio/mpeg": "mp3",
    "audio/ogg": "ogg oga opus",
    "audio/flac": "flac",
    "video/mp4": "mp4 m4v",
    "video/webm": "webm",
    "font/woff": "woff",
    "font/woff2": "woff2",
    "font/ttf": "ttf",
    "font/otf": "otf",
}
_TYPE_OF = {ending: media_type for media_type, endings in _TYPES.items() for ending in endings.split()}


def guess_type(path: str) -> str:
    """The media type that a file's name gives away. Text is taken for UTF-8, as it is everywhere today."""
    media_type = _TYPE_OF.get(path.rpartition("/")[2].rpartition(".")[2].lower(), "application/octet-stream")
    return f"{media_type}; charset=utf-8" if media_type.startswith("text/") else media_type


_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
# RFC 9110 8.3.1.
_MEDIA_TYPE = re.compile(rf'{_TOKEN}/{_TOKEN}(?:[ \t]*;[ \t]*(?:{_TOKEN}=(?:{_TOKEN}|"[ !#-\[\]-~]*"))?)*', re.ASCII)
_MAX_FIELD = 256


def parse_type(field: str) -> str:
    """A Content-Type that can be kept and given back. BadRequest for what is none."""
    if len(field) > _MAX_FIELD or not _MEDIA_TYPE.fullmatch(field):
        raise BadRequest("Content-Type is not a media type.")
    return field


def parse_caching(field: str) -> str:
    """A Cache-Control that can be kept and given back. BadRequest for what is none."""
    if len(field) > _MAX_FIELD or not re.fullmatch(r"[ !#-~\t\"]+", field):
        raise BadRequest("Cache-Control is malformed.")
    return field
