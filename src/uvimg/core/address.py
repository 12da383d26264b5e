"""Digest ↔ id ↔ name ↔ path.

A blob's address is the SHA-256 of its bytes (`Digest`, 32 bytes). What a client holds is an id: 64 hex
digits (that digest) or 32 (zimg's MD5, a mere name). Ids are matched whole before anything else is
done with them, so nothing else of a URL ever reaches a name or a path.
"""

import re

Digest = bytes

# What the names of values begin with.
VALUES = b"kv/"
# And those of renditions.
RENDITIONS = b"renditions/"

_ID = re.compile(r"(?:[0-9a-f]{32}|[0-9a-f]{64})")
_BLOB_PATH = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})")


def parse_id(text: str) -> str | None:
    """An image id in lower case, None when `text` is not one. Upper-case hex is the same image."""
    lower = text.lower()
    return lower if _ID.fullmatch(lower) else None


def image_name(image_id: str) -> bytes:
    return b"images/" + image_id.encode()


def rendition_name(digest: Digest, key: str) -> bytes:
    return renditions_prefix(digest) + key.encode()


def renditions_prefix(digest: Digest) -> bytes:
    """What the names of all renditions of one original begin with."""
    return RENDITIONS + digest.hex().encode() + b"/"


def original_of(rendition: bytes) -> bytes:
    """The name of the image that a rendition was made from."""
    return b"images/" + rendition.split(b"/", 2)[1]


def value_name(database: bytes, key: bytes) -> bytes:
    """The name of a value. There is no slash in a database's name, so no key of one can be taken for another's."""
    return values_prefix(database) + key


def values_prefix(database: bytes) -> bytes:
    """What the names of all values of one database begin with; names in its order are keys in theirs."""
    return VALUES + database + b"/"


def group_of(name: bytes) -> bytes | None:
    """The prefix under which a name is counted: that of its database; None for what is no value's."""
    if not name.startswith(VALUES):
        return None
    return name[: name.index(b"/", len(VALUES)) + 1]


def blob_path(digest: Digest) -> str:
    """Where a blob lies below the store's folder: 256 folders, made once, so that no upload has to make one."""
    text = digest.hex()
    return f"{text[:2]}/{text}"


def parse_blob_path(path: str) -> Digest | None:
    """The digest that `blob_path` made this of, None for a foreign file."""
    found = _BLOB_PATH.fullmatch(path)
    return bytes.fromhex(found[2]) if found else None
