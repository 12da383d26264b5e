"""Kyoto Tycoon's procedures: their arguments and results as tab-separated lines, and the numbers they count with.

A line is `name<TAB>value`, both in the encoding that the Content-Type's `colenc` says: U for URL encoding, B for
base64, as it is without.
Surprise: a number is not kept as text. As in Kyoto Tycoon an integer is 8 bytes, big-endian, and a decimal 16: the
whole part and the part behind the point in units of 10^-15.
"""

import base64
import binascii
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Literal
from urllib.parse import quote_from_bytes

from uvimg.core.errors import BadRequest, LogicalError, TooLarge
from uvimg.core.keyvalue import DEFAULT, LAST_SECOND, MAX_LINES, NOT_A_TIME, check_database

Coding = Literal["", "U", "B"]
Fields = Sequence[tuple[bytes, bytes]]

PROCEDURES = frozenset(
    (
        *("void", "echo", "report", "status", "clear", "set", "add", "replace", "append", "increment"),
        *("increment_double", "cas", "remove", "get", "check", "seize", "set_bulk", "remove_bulk", "get_bulk"),
        *("match_prefix", "vacuum", "synchronize"),
    )
)

TYPE = "text/tab-separated-values"
_COLENC = re.compile(r";\s*colenc=\"?([A-Za-z])\"?\s*(?:;|\Z)", re.IGNORECASE)
# A hundred years: what adds more to a time means no time at all.
_LONGEST_S = 3_155_760_000


def read_coding(content_type: str) -> Coding:
    found = _COLENC.search(content_type)
    if found is None:
        return ""
    match found[1].upper():
        case "U":
            return "U"
        case "B":
            return "B"
    raise BadRequest("colenc must be U (URL encoding) or B (base64).")


def decode_fields(body: bytes, coding: Coding) -> list[tuple[bytes, bytes]]:
    """The lines of a body. BadRequest for one that is none."""
    if body.count(b"\n") > MAX_LINES:
        raise TooLarge(f"A body has at most {MAX_LINES} lines.")
    fields = []
    for number, line in enumerate(body.split(b"\n"), 1):
        line = line.removesuffix(b"\r")
        if not line:
            continue
        name, tab, value = line.partition(b"\t")
        if not tab or b"\t" in value:
            raise BadRequest(f"Line {number} is not a name, a tab and a value.")
        try:
            fields.append((_decode(name, coding), _decode(value, coding)))
        except binascii.Error:
            raise BadRequest(f"Line {number} is no base64.") from None
        except _Stray:
            raise BadRequest(f"Line {number} is not URL-encoded: a % has two hex digits behind it.") from None
    return fields


def _decode(column: bytes, coding: Coding) -> bytes:
    if coding == "B":
        return base64.b64decode(column, validate=True)
    return _unquote(column) if coding == "U" else column


class _Stray(Exception):
    """A % that encodes nothing."""


_STRAY = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def _unquote(column: bytes) -> bytes:
    """What urllib does, which takes 75 bytes of memory for each that it is given: 600 MB and a second for a body."""
    if b"%" not in column:
        return column
    if _STRAY.search(column):
        raise _Stray
    # Quoted-printable is the same with another sign, and the standard library has that in C.
    return binascii.a2b_qp(column.replace(b"=", b"=3D").replace(b"%", b"="))


_PLAIN = re.compile(rb"[^\x00-\x1f\x7f]*")
# What URL encoding leaves as it is. It is made at 50 ns a byte, base64 at one: beyond this the shorter one would
# keep everybody else waiting.
_KEPT = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~"
_LONGEST_QUOTED = 65_536


def choose_coding(fields: Fields) -> Coding:
    """None where nothing needs one, else the shorter one; base64 where there is much."""
    columns = [column for field in fields for column in field]
    if all(_PLAIN.fullmatch(column) for column in columns):
        return ""
    if sum(map(len, columns)) > _LONGEST_QUOTED:
        return "B"
    by_url = sum(len(column) + 2 * len(column.translate(None, _KEPT)) for column in columns)
    return "U" if by_url <= sum((len(column) + 2) // 3 * 4 for column in columns) else "B"


def encode_fields(fields: Fields, coding: Coding) -> bytes:
    return b"".join(b"%b\t%b\n" % (encode_column(name, coding), encode_column(value, coding)) for name, value in fields)


def encode_column(column: bytes, coding: Coding) -> bytes:
    if coding == "B":
        return base64.b64encode(column)
    return quote_from_bytes(column, safe="").encode() if coding == "U" else column


def name_type(coding: Coding) -> str:
    return f"{TYPE}; colenc={coding}" if coding else TYPE


class Arguments:
    """What a procedure was called with, read as it is wanted. BadRequest for what is missing or cannot be."""

    def __init__(self, fields: Fields) -> None:
        self._fields: Mapping[bytes, bytes] = dict(fields)

    @property
    def database(self) -> bytes:
        return check_database(self._fields.get(b"DB") or DEFAULT)

    def find(self, name: str) -> bytes | None:
        return self._fields.get(name.encode())

    def take(self, name: str) -> bytes:
        value = self.find(name)
        if value is None:
            raise BadRequest(f"The argument {name} is missing.")
        return value

    def take_key(self) -> bytes:
        return self.take("key")

    @property
    def bulk(self) -> dict[bytes, bytes]:
        """The records of a bulk, whose names begin with an underscore."""
        return {name[1:]: value for name, value in self._fields.items() if name.startswith(b"_")}

    def find_whole(self, name: str) -> int | None:
        value = self.find(name)
        if value is None:
            return None
        # Nineteen digits: what fits 64 bits, and too few to compute anything huge with.
        if not re.fullmatch(rb"[+-]?\d{1,19}", value) or not is_whole(int(value)):
            raise BadRequest(f"{name} must be a whole number.")
        return int(value)

    def take_whole(self, name: str) -> int:
        found = self.find_whole(name)
        if found is None:
            raise BadRequest(f"The argument {name} is missing.")
        return found

    def take_decimal(self, name: str) -> int:
        return _parse_decimal(name, self.take(name))

    def find_origin(self, *, decimal: bool) -> "int | Literal['try', 'set']":
        """What an increment begins with where there is nothing: a number, a refusal, or the increment itself."""
        match self.find("orig"):
            case None:
                return 0
            case b"try":
                return "try"
            case b"set":
                return "set"
            case text if decimal:
                return _parse_decimal("orig", text)
        return self.find_whole("orig") or 0

    def find_expiry(self, now_s: int) -> int | None:
        """Seconds from now or, where negative, a POSIX time; None for never."""
        seconds = self.find_whole("xt")
        if seconds is None or seconds > _LONGEST_S:
            return None
        at = now_s + seconds if seconds >= 0 else -seconds
        if at > LAST_SECOND:
            raise BadRequest(NOT_A_TIME)
        return at


# Numbers

_WHOLE = struct.Struct(">q")
_DECIMAL = struct.Struct(">qq")
# Decimals are counted in these: no sum of two is ever inexact.
_UNITS = 10**15
_NUMBER = re.compile(rb"[+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,2})?")


def is_whole(number: int) -> bool:
    return -(1 << 63) <= number < 1 << 63


def _parse_decimal(name: str, text: bytes) -> int:
    if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)) or abs(float(text)) >= 1 << 62:
        raise BadRequest(f"{name} must be a number.")
    return round(float(text) * _UNITS) if b"e" in text.lower() else _parse_places(text)


def _parse_places(text: bytes) -> int:
    sign = -1 if text.startswith(b"-") else 1
    whole, _, places = text.lstrip(b"+-").partition(b".")
    return sign * (int(whole or b"0") * _UNITS + int(places[:15].ljust(15, b"0")))


def unpack_whole(value: bytes) -> int:
    if len(value) != _WHOLE.size:
        raise LogicalError("the value is no integer of 8 bytes, big-endian")
    number: int = _WHOLE.unpack(value)[0]
    return number


def pack_whole(number: int) -> bytes:
    if not is_whole(number):
        raise LogicalError("the sum does not fit 64 bits")
    return _WHOLE.pack(number)


def unpack_decimal(value: bytes) -> int:
    if len(value) != _DECIMAL.size:
        raise LogicalError("the value is no decimal of 16 bytes")
    whole, units = _DECIMAL.unpack(value)
    return int(whole) * _UNITS + int(units)


def pack_decimal(units: int) -> bytes:
    sign = -1 if units < 0 else 1
    whole, rest = divmod(abs(units), _UNITS)
    if not is_whole(whole):
        raise LogicalError("the sum does not fit 64 bits")
    return _DECIMAL.pack(sign * whole, sign * rest)


def show_decimal(units: int) -> bytes:
    whole, rest = divmod(abs(units), _UNITS)
    places = f"{rest:015}".rstrip("0").ljust(6, "0")
    return f"{'-' if units < 0 else ''}{whole}.{places}".encode()


def tell_error(sentence: str) -> tuple[dict[str, str], bytes]:
    """Header fields and body of an error."""
    return {"Content-Type": TYPE}, b"ERROR\t" + " ".join(sentence.split()).encode() + b"\n"
