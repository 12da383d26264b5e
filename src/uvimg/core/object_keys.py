"""Names and digests ↔ keys of an object store (S3, GCS, Azure), so that keys stand in the order of their names.

Names are any bytes, while keys are text that more than one kind of server has to like: without empty, `.` or `..`
segments, without control characters, with segments of at most 255 bytes (servers that keep objects as files), and
no key may be the folder of another. So each byte has a code of its own, none of which begins another one; codes
are in the order of bytes, and what ends a key stands before all of them.

    !                           the end
    (00 … (2c                   bytes before "-"
    -
    .-                          "."
    /_                          "/", so that no segment is empty
    0-9  =3a … =40  A-Z  _5b … _60  a-z
    ~7b … ~ff

After 80 codes without a slash comes "/+", unless the key ends there.
"""

import re

from uvimg.core.address import Digest, blob_path

# S3 and Azure allow no longer one.
MAX_KEY_BYTES = 1024
NAMES = "names/_"
BLOBS = "blobs/"
USES = "uses/"
CONDEMNED = "condemned/"
DUE = "due/"

# Of three characters at most.
_SEGMENT_CODES = 80
_END, _BREAK = "!", "/+"


def _code_of(byte: int) -> str:
    text = chr(byte)
    if text == "/":
        return "/_"
    if text == ".":
        return ".-"
    if text == "-" or "0" <= text <= "9" or "A" <= text <= "Z" or "a" <= text <= "z":
        return text
    lead = "(" if text < "-" else "=" if text < "A" else "_" if text < "a" else "~"
    return f"{lead}{byte:02x}"


_CODES = [_code_of(byte) for byte in range(256)]
_BYTES = {code: byte for byte, code in enumerate(_CODES)}
_CODE = re.compile(r"\.-|/_|[-0-9A-Za-z]|[(=_~][0-9a-f]{2}")


def spell_prefix(prefix: bytes) -> str:
    """What the keys of all names with this prefix begin with, and those of no others."""
    spelt = [NAMES]
    run = 0
    for byte in prefix:
        if run == _SEGMENT_CODES:
            spelt.append(_BREAK)
            run = 0
        spelt.append(_CODES[byte])
        run = 0 if byte == 0x2F else run + 1
    return "".join(spelt)


def spell_name(name: bytes) -> str:
    """The key of a name's object."""
    return spell_prefix(name) + _END


def read_name(key: str) -> bytes | None:
    """The name that `spell_name` made this key of; None for a foreign one."""
    if not key.startswith(NAMES) or not key.endswith(_END):
        return None
    name = bytearray()
    at, end = len(NAMES), len(key) - 1
    while at < end:
        if key.startswith(_BREAK, at):
            at += len(_BREAK)
            continue
        found = _CODE.match(key, at, end)
        if found is None or found[0] not in _BYTES:
            return None
        name.append(_BYTES[found[0]])
        at = found.end()
    # What is spelt otherwise than we do is not ours.
    return bytes(name) if spell_name(bytes(name)) == key else None


def folder_of(spelt: str) -> str:
    """The longest folder that holds all keys which begin like this."""
    return spelt[: spelt.rindex("/")]


def due_key(second: int, name: bytes) -> str:
    """The key of the object that tells when a name expires, in the order of time."""
    return f"{due_folder(second)}/{spell_name(name)}"


def due_folder(second: int) -> str:
    return f"{DUE}{second:012}"


def read_due(key: str) -> tuple[int, bytes] | None:
    """What `due_key` made this key of; None for a foreign one."""
    found = re.fullmatch(r"due/(\d{12})/(.+)", key, re.ASCII)
    name = read_name(found[2]) if found else None
    return None if found is None or name is None else (int(found[1]), name)


def fits(name: bytes, prefix: str) -> bool:
    """Whether a server takes the keys of this name below a prefix."""
    return len(prefix) + len(due_key(0, name)) <= MAX_KEY_BYTES


def blob_key(digest: Digest) -> str:
    return BLOBS + blob_path(digest)


def uses_folder(digest: Digest) -> str:
    """Where the objects lie that tell who names a blob."""
    return USES + blob_path(digest)


def use_key(digest: Digest, nonce: bytes) -> str:
    return f"{uses_folder(digest)}/{nonce.hex()}"


def read_use(key: str) -> tuple[Digest, bytes] | None:
    """What `use_key` made this key of; None for a foreign one."""
    found = re.fullmatch(r"uses/([0-9a-f]{2})/(\1[0-9a-f]{62})/([0-9a-f]{16})", key, re.ASCII)
    return (bytes.fromhex(found[2]), bytes.fromhex(found[3])) if found else None


def condemned_key(digest: Digest) -> str:
    return CONDEMNED + digest.hex()
