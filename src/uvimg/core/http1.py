"""HTTP/1.1 on the wire, as pure functions: head bytes → Head, Response → head bytes, chunks → data.

Strict where RFC 9112 allows it: what two parsers could read in two ways is refused, for a proxy in front
may have read it the other way (request smuggling). Sizes are the front-ends' to watch while bytes come in;
here stands how much is too much.
Surprise: what a request line and a head's fields mean is remembered by their bytes, so requests share the
mappings in their heads; nobody changes them.
"""

import re
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from http import HTTPStatus

import msgspec

from uvimg.core.errors import (
    BadRequest,
    ExpectationFailed,
    HeadTooLarge,
    NotImplementedHere,
    TargetTooLong,
    UvimgError,
    VersionNotSupported,
)
from uvimg.core.message import Pieces, Response, split_target

MAX_HEAD_BYTES = 65_536
MAX_TARGET_BYTES = 16_384
MAX_FIELDS = 100
# Chunk extensions and trailers of one message, which say nothing to us.
MAX_CHUNK_EXTRA_BYTES = 16_384

# Deadlines are absolute, not per read: a client that drips bytes gains nothing by it.
# From a connection's first moment to the end of TLS's handshake.
HANDSHAKE_S = 10.0
# From a head's first byte to its last.
HEAD_S = 15.0
# A body must come at this rate after a start that is free: slower ones only hold a place.
BODY_START_S = 20.0
BODY_BYTES_PER_S = 1024
# A client that takes less than so much in so long does not want its answer.
WRITE_STALL_S = 15.0
WRITE_STALL_BYTES = 16_384
# After a refusal its body is read for so long, so that closing does not destroy the answer on its way.
LINGER_S = 2.0
# At the end idle connections are listened to for so long: a request may be on its way.
LAST_CALL_S = 1.0


class Head(msgspec.Struct, frozen=True):
    """A request's head. `length` is the body's size in bytes, None when it comes in chunks."""

    method: str
    target: str
    path: str
    query: str
    headers: Mapping[str, str]
    length: int | None
    keep_alive: bool
    expects_continue: bool
    # HTTP/1.0 keeps a connection only when it is told so.
    is_1_0: bool

    @property
    def has_body(self) -> bool:
        return self.length != 0


_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}) ([!-~]+) HTTP/(\d)\.(\d)")
# The spaces around a value are left to strip(): two repetitions that both take spaces would try every way to
# share them, 20 s for one head of 64 KiB.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
# RFC 3986 3.2.2: a name or address and a port; nothing that a URL's other parts could hide in.
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]+)(?::[0-9]{0,5})?")
_TO_DECODE = re.compile(r"[%?#]")
_ABSOLUTE = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_ONCE = frozenset({"host", "content-length", "transfer-encoding", "expect", "range", "content-type"})


class _Line(msgspec.Struct, frozen=True):
    """A request line. `host` is the target's own, where it has one."""

    method: str
    target: str
    path: str
    query: str
    host: str | None
    is_1_0: bool


class _Fields(msgspec.Struct, frozen=True):
    """A head's fields, and what they say of the body and the connection."""

    headers: Mapping[str, str]
    length: int | None
    connection: frozenset[str]
    expect: str


def check_start(data: bytes) -> None:
    """What can be said of a head whose end has not come yet: raises what cannot become right any more."""
    start = 2 if data.startswith(b"\r\n") else 0
    end = data.find(b"\n", start, start + MAX_TARGET_BYTES + 2)
    if end < 0 and len(data) - start >= MAX_TARGET_BYTES + 2:
        raise TargetTooLong()
    if end >= 0 and data[end - 1 : end] != b"\r":
        raise BadRequest("A line ends without CR.")
    if len(data) - start >= MAX_HEAD_BYTES:
        raise HeadTooLarge()


def parse_head(data: bytes) -> Head:
    """The head that ends with the blank line at the end of `data`. Raises an UvimgError with its status."""
    # One blank line before a request line is let pass (RFC 9112 2.2): there are clients that end a body with it.
    if data.startswith(b"\r\n"):
        data = data[2:]
    end = data.find(b"\r\n")
    if end > MAX_TARGET_BYTES or len(data) > MAX_HEAD_BYTES:
        # It says why, as if the head had come in pieces: where it was cut makes no difference.
        check_start(data)
    line = (_known_line if end <= _LONGEST_KNOWN_LINE else _parse_line)(data[:end])
    rest = data[end + 2 :]
    fields = (_known_fields if len(rest) <= _LONGEST_KNOWN_FIELDS else _parse_fields)(rest)
    headers, expect = fields.headers, fields.expect
    if line.host is not None:
        # Then Host counts for nothing, for a proxy in front goes by the target (RFC 9112 3.2.2).
        headers = {**headers, "host": line.host}
    if line.is_1_0:
        if fields.length is None:
            raise BadRequest("There is no Transfer-Encoding in HTTP/1.0.")
        # An expectation in HTTP/1.0 was written by a proxy that does not know what it is (RFC 9110 10.1.1).
        expect = ""
        keep_alive = "keep-alive" in fields.connection and "close" not in fields.connection
    else:
        if "host" not in fields.headers:
            raise BadRequest("There must be exactly one Host with a valid value.")
        keep_alive = "close" not in fields.connection
    if expect not in ("", "100-continue"):
        raise ExpectationFailed()
    return Head(
        line.method,
        line.target,
        line.path,
        line.query,
        headers,
        fields.length,
        keep_alive,
        bool(expect),
        line.is_1_0,
    )


def _parse_line(data: bytes) -> _Line:
    found = _REQUEST_LINE.fullmatch(data)
    if found is None:
        raise BadRequest("A line ends without CR." if b"\n" in data else "The request line is malformed.")
    method, target = found[1].decode(), found[2].decode()
    if found[3] != b"1" or found[4] not in (b"0", b"1"):
        raise VersionNotSupported()
    host = None
    if target.startswith("/") and not _TO_DECODE.search(target):
        # Where names are asked for by the million, few lines come twice.
        return _Line(method, target, target, "", None, found[4] == b"0")
    if absolute := _ABSOLUTE.match(target):
        host = absolute[1]
        if not _HOST.fullmatch(host):
            raise BadRequest("The host in the request target is none.")
    elif not (target.startswith("/") or (target == "*" and method == "OPTIONS")):
        raise BadRequest("The request target is neither a path nor an absolute address.")
    path, query = split_target(target)
    return _Line(method, target, path, query, host, found[4] == b"0")


def _parse_fields(data: bytes) -> _Fields:
    """The header fields, names in lower case; those that may come once have come once."""
    lines = data.removesuffix(b"\r\n\r\n").removesuffix(b"\r\n").split(b"\r\n") if data != b"\r\n" else []
    if len(lines) > MAX_FIELDS:
        raise HeadTooLarge()
    headers: dict[str, str] = {}
    for line in lines:
        name, value = (_known_field if len(line) <= _LONGEST_KNOWN_FIELD else _parse_field)(line)
        if name not in headers:
            headers[name] = value
        elif name in _ONCE:
            raise BadRequest(f"The header field {name} came more than once.")
        else:
            headers[name] = f"{headers[name]}, {value}"
    host = headers.get("host")
    if host is not None and not _HOST.fullmatch(host):
        raise BadRequest("There must be exactly one Host with a valid value.")
    said = headers.get("connection", "")
    connection = (_known_tokens if len(said) <= _LONGEST_KNOWN_FIELD else _parse_tokens)(said)
    return _Fields(headers, _parse_length(headers), connection, headers.get("expect", "").lower())


def _parse_tokens(value: str) -> frozenset[str]:
    return frozenset(token.strip(" \t").lower() for token in value.split(","))


def _parse_field(line: bytes) -> tuple[str, str]:
    found = _FIELD.fullmatch(line)
    if found is None:
        # Also a folded line, a space before the colon, a lone CR or LF.
        raise BadRequest("A header field is malformed.")
    return found[1].decode().lower(), found[2].decode("latin-1").strip(" \t")


def _parse_length(headers: Mapping[str, str]) -> int | None:
    """The size of the body (RFC 9112 6.3)."""
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if length is not None:
            raise BadRequest("Transfer-Encoding stands beside Content-Length.")
        if coding.lower() != "chunked":
            raise NotImplementedHere("The only transfer coding that is known here is chunked.")
        return None
    if length is None:
        return 0
    if not re.fullmatch(r"\d{1,19}", length, re.ASCII):
        raise BadRequest("Content-Length is no number, or none that a body could have.")
    return int(length)


# Clients repeat themselves to the byte, and parsing is a pure function of the bytes: what is remembered of it is
# right for ever. A whole head may never come twice (a cookie, a trace id) while most of its lines do. Long ones
# are an attack on the memory: what is kept here holds 40 MB at worst.
_LONGEST_KNOWN_LINE = 256
_LONGEST_KNOWN_FIELDS = 1024
_LONGEST_KNOWN_FIELD = 128
_known_line = lru_cache(16_384)(_parse_line)
_known_fields = lru_cache(1024)(_parse_fields)
_known_field = lru_cache(4096)(_parse_field)
_known_tokens = lru_cache(64)(_parse_tokens)


_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_LONGEST_LINE = 4096


class Chunks:
    """A chunked body (RFC 9112 7.1), without the socket: bytes in, data out."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0
        self._extra = 0
        self._state = "size"
        # Behind the last chunk: the bytes that belong to the next request.
        self.rest: bytes | None = None

    def feed(self, data: bytes) -> bytes:
        """The data in these bytes. When the body has ended, `rest` is what came behind it."""
        data, at = self._buffer + data, 0
        out: list[bytes] = []
        # By position, not by cutting: a body of tiny chunks would be copied again for each of them.
        while at < len(data):
            if self._state == "data":
                piece = data[at : at + self._left]
                out.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = "end"
                continue
            if self._state == "end":
                if not b"\r\n".startswith(data[at : at + 2]):
                    raise BadRequest("A chunk is longer than its size.")
                if at + 1 == len(data):
                    break
                self._state, at = "size", at + 2
                continue
            end = data.find(b"\r\n", at, at + _LONGEST_LINE + 2)
            if end < 0:
                if len(data) - at > _LONGEST_LINE + 1:
                    raise BadRequest("A chunk's size line, or a trailer, is too long.")
                break
            line, at = data[at:end], end + 2
            if self._take_line(line):
                self.rest = data[at:]
                break
        self._buffer = b"" if self.rest is not None else data[at:]
        return b"".join(out)

    def _take_line(self, line: bytes) -> bool:
        """A line between the data; whether it was the last of all."""
        if self._state == "size":
            found = _SIZE_LINE.fullmatch(line)
            if found is None:
                raise BadRequest("A chunk's size is malformed.")
            self._left = int(found[1], 16)
            self._state = "data" if self._left else "trailer"
            # The size itself is no extra.
            self._extra += len(line) - len(found[1])
        elif not line:
            return True
        elif _FIELD.fullmatch(line):
            self._extra += len(line)
        else:
            raise BadRequest("A trailer is malformed.")
        if self._extra > MAX_CHUNK_EXTRA_BYTES:
            raise BadRequest("The chunks' extensions and trailers are too long.")
        return False


def encode_head(response: Response, date: str, *, keep_alive: bool, is_1_0: bool = False) -> bytes:
    """The status line and the header fields of an answer, up to the blank line.

    A body in pieces that nobody has counted ends with the connection where the client knows no chunks: it is not kept
    alive then.
    """
    status = response.status
    lines = [_STATUS_LINES[status], f"Date: {date}\r\nServer: uvimg\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in response.headers.items()]
    # 304 and 204 have no body by their nature (RFC 9110 8.6).
    if isinstance(response.body, Pieces) and response.body.size is None:
        if not is_1_0:
            lines.append("Transfer-Encoding: chunked\r\n")
    elif status not in (204, 304):
        lines.append(f"Content-Length: {response.size}\r\n")
    if not keep_alive:
        lines.append("Connection: close\r\n")
    elif is_1_0:
        lines.append("Connection: keep-alive\r\n")
    lines.append("\r\n")
    return "".join(lines).encode("latin-1", "replace")


# 450 is Kyoto Tycoon's own.
PHRASES = {status.value: status.phrase for status in HTTPStatus} | {450: "Logical Inconsistency"}
_STATUS_LINES = {status: f"HTTP/1.1 {status} {phrase}\r\n" for status, phrase in PHRASES.items()}


async def encode_pieces(pieces: Pieces, *, is_1_0: bool) -> AsyncIterator[bytes]:
    """A body in pieces as it goes over the wire (RFC 9112 7.1): in chunks, unless the head has told its size."""
    is_plain = is_1_0 or pieces.size is not None
    async for piece in pieces.pieces:
        if is_plain:
            yield piece
        elif piece:
            # An empty one would be the end.
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
    if not is_plain:
        yield b"0\r\n\r\n"


def refuse_head(error: UvimgError) -> Response:
    """The answer to a head that is none: no app can tell it, for nobody knows whose it is."""
    text = f"{error.status} {error.title}: {error.detail}\n"
    return Response(error.status, {"Content-Type": "text/plain; charset=utf-8", **error.headers}, text.encode())
