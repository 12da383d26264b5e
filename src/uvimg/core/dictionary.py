"""Compression dictionaries (RFC 9842): the fields of a request that speak of them, and how a coded body begins.

The fields are structured ones (RFC 9651), read strictly as far as they are used here: what is malformed counts as
not being there where a client offers something, and is refused where somebody stores it.
Surprise: a dictionary is known by the SHA-256 of its bytes, which is what the store knows it by.
"""

import base64
import binascii
import re
from dataclasses import dataclass

from uvimg.core.address import Digest
from uvimg.core.errors import BadRequest

# A larger one costs more memory, in both ends, than it saves.
MAX_BYTES = 8 << 20
# Of so many versions of one document clients may still have the dictionary.
MOST_VERSIONS = 4
# RFC 9842 5: a skippable zstd frame of 32 bytes, which are the dictionary's digest.
_MAGIC = bytes.fromhex("5e2a4d1820000000")


def begin_dcz(dictionary: Digest) -> bytes:
    """What stands before the zstd frame of a body in dcz."""
    return _MAGIC + dictionary


def dictionary_name(digest: Digest) -> bytes:
    """The name that holds on to the bytes of a dictionary, also when its document has newer ones."""
    return b"dictionaries/" + digest.hex().encode()


_BINARY = re.compile(r":([A-Za-z0-9+/]*={0,2}):")


def parse_available(field: str | None) -> Digest | None:
    """Available-Dictionary: the SHA-256 of a dictionary that the client has; None where it names none."""
    if field is None or len(field) > 100:
        return None
    found = _BINARY.fullmatch(field.strip(" "))
    if found is None:
        return None
    try:
        digest = base64.b64decode(found[1], validate=True)
    except binascii.Error:
        return None
    return digest if len(digest) == 32 else None


@dataclass(frozen=True, slots=True)
class Use:
    """Use-As-Dictionary: for which paths a document is a dictionary."""

    match: str
    match_dest: tuple[str, ...] = ()
    id: str = ""

    def __str__(self) -> str:
        """As it stands in the answer with the document."""
        parts = [f"match={_quote(self.match)}"]
        if self.match_dest:
            parts.append(f"match-dest=({' '.join(map(_quote, self.match_dest))})")
        if self.id:
            parts.append(f"id={_quote(self.id)}")
        return ", ".join(parts)


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_STRING = r'"((?:[ !#-\[\]-~]|\\["\\])*)"'
_STRINGS = re.compile(_STRING)
_MEMBER = re.compile(rf'(match|id)={_STRING}|match-dest=\(( *(?:"(?:[ !#-\[\]-~]|\\["\\])*" *)*)\)|type=(raw)')
_COMMA = re.compile(r"[ \t]*,[ \t]*")
_LONGEST = 2048


def parse_use(field: str) -> Use:
    """Use-As-Dictionary, as whoever stores a document gives it. BadRequest for what no client would heed."""
    # The size limit comes first: the pattern of match-dest may look at spaces twice.
    if len(field) > _LONGEST:
        raise BadRequest("Use-As-Dictionary is too long.")
    text, at = field.strip(" "), 0
    said: dict[str, str] = {}
    dests: tuple[str, ...] = ()
    while True:
        found = _MEMBER.match(text, at)
        if found is None:
            raise BadRequest('Use-As-Dictionary is malformed: write match="/path/*", with match-dest, id and type=raw.')
        if found[1]:
            said[found[1]] = _unquote(found[2])
        elif found[3] is not None:
            dests = tuple(map(_unquote, _STRINGS.findall(found[3])))
        at = found.end()
        if at == len(text):
            break
        comma = _COMMA.match(text, at)
        if comma is None:
            raise BadRequest("Use-As-Dictionary is malformed behind a member.")
        at = comma.end()
    pattern = said.get("match", "")
    if not pattern.startswith("/") or pattern.startswith(("//", "/\\")) or re.search(r"[(){}]", pattern):
        # RFC 9842 2.1.1: of the same origin, and without regular expressions.
        raise BadRequest("match of Use-As-Dictionary must be a path of this server, with * for anything.")
    if len(said.get("id", "")) > 1024:
        raise BadRequest("id of Use-As-Dictionary is longer than 1024 characters.")
    return Use(pattern, dests, said.get("id", ""))


def _unquote(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
