"""A dump of values as lines of JSON, which says what it is: a head, the records, an end that counts and signs them.

    {"uvimg":"values","version":1}
    {"db":"default","key":"greeting","type":"text/plain","created_s":1,"size":5,"sha256":"2cf2…","value":"aGVsbG8="}
    {"more":"…"}                       where a value is longer than one line holds
    {"end":{"records":1,"sha256":"…"}}

What is not UTF-8 stands as base64 in `db64` and `key64`. A dump that was cut has no end, so it cannot pass for whole.
"""

import base64
import binascii

import msgspec

from uvimg.core.errors import UvimgError

# Of a value in one line, and what a line may have at most.
PART_BYTES = 196_608
MAX_LINE_BYTES = 1 << 20


class BadDump(UvimgError):
    """What is no dump, or a damaged one."""


class Entry(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A record; `value` is the beginning of its bytes."""

    type: str
    created_s: int
    size: int
    sha256: str
    value: str
    db: str | None = None
    key: str | None = None
    db64: str | None = None
    key64: str | None = None
    expires_s: int = 0


class _Totals(msgspec.Struct):
    records: int
    sha256: str


class _Head(msgspec.Struct):
    uvimg: str
    version: int


class _More(msgspec.Struct, forbid_unknown_fields=True):
    more: str


class _End(msgspec.Struct, forbid_unknown_fields=True):
    end: _Totals


# What msgspec raises at bytes from anybody: also where brackets are nested too deep, and where it is no UTF-8.
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

_encode = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _line(value: object) -> bytes:
    return _encode(value) + b"\n"


HEAD = _line(_Head("values", 1))


def encode_entry(
    database: bytes, key: bytes, *, type: str, created_s: int, expires_s: int, size: int, digest: bytes, part: bytes
) -> bytes:
    db, db64 = _spell(database)
    text, text64 = _spell(key)
    value = base64.b64encode(part).decode()
    return _line(Entry(type, created_s, size, digest.hex(), value, db, text, db64, text64, expires_s))


def encode_more(part: bytes) -> bytes:
    return _line(_More(base64.b64encode(part).decode()))


def encode_end(records: int, digest: str) -> bytes:
    return _line(_End(_Totals(records, digest)))


def _spell(name: bytes) -> tuple[str | None, str | None]:
    try:
        return name.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(name).decode()


def check_head(line: bytes) -> None:
    try:
        head = msgspec.json.decode(line, type=_Head)
    except _UNREADABLE:
        raise BadDump("this is no dump of values") from None
    if head.uvimg != "values" or head.version != 1:
        raise BadDump("this is no dump of values that this version knows")


def decode_line(line: bytes) -> Entry | bytes | _Totals:
    """A record, more of the value before it, or the end. BadDump for anything else."""
    if not line.endswith(b"\n"):
        raise BadDump("the dump is cut here" if len(line) < MAX_LINE_BYTES else "this line is too long")
    try:
        names = _decode_line(line)
        if "end" in names:
            return msgspec.json.decode(line, type=_End).end
        if "more" in names:
            return unpack(msgspec.json.decode(line, type=_More).more)
        return msgspec.json.decode(line, type=Entry)
    except _UNREADABLE:
        raise BadDump("this is no line of a dump") from None


def unpack(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadDump("its base64 is damaged") from None


def name_of(entry: Entry) -> tuple[bytes, bytes]:
    """Database and key."""
    return _unspell(entry.db, entry.db64), _unspell(entry.key, entry.key64)


def _unspell(text: str | None, text64: str | None) -> bytes:
    if (text is None) == (text64 is None):
        raise BadDump("a record has one database and one key")
    return text.encode() if text is not None else unpack(text64 or "")


Totals = _Totals
