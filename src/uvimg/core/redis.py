"""A store in Redis: how it is written as a URL, and which of its keys lie together.

A cluster gives each key to one of its servers by a hash of what stands in braces in it, and does at once only what
is on one server. So a store on a cluster has 64 partitions, each with a tag in its keys; one server is one partition.
All that belongs to one image (its name, its renditions, its blob) is in one partition.
Rule: what is written here is in people's stores. Change it, and they are lost.
"""

import re
import zlib
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from uvimg.core.address import Digest

# Two letters for each 64th of a cluster's slots, so that its servers have equal shares.
_TAGS = (
    "mm6q9ie82921apax0jkvdndf3go6gcxw8gd6lc02g34con4r99911dm5fmyy2iiu"
    "7ak0ce8y4lopx9x1jf1zzjb3ik2wygfsbk9w6omsafan5bi3c5dpkh0txixahe44"
)
# Of what is written behind the question mark of a URL.
_PARAMETERS = ("prefix", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PORT = 6379
_OF_ID = re.compile(rb"(?:images|dictionaries)/([0-9a-f]{2})(?:[0-9a-f]{30}|[0-9a-f]{62})")
_OF_DIGEST = re.compile(rb"(?:renditions|codings)/([0-9a-f]{2})[0-9a-f]{62}/")


@dataclass(frozen=True, slots=True)
class RedisPlace:
    """Where a store is. A cluster's `addresses` are those that are asked first, for it tells the others.

    `certificates` are files for TLS, by the names that redis-py has for them.
    """

    addresses: tuple[tuple[str, int], ...]
    is_cluster: bool
    is_encrypted: bool
    user: str | None
    password: str | None
    database: int
    prefix: bytes
    certificates: tuple[tuple[str, str], ...]

    @property
    def partitions(self) -> int:
        return len(_TAGS) // 2 if self.is_cluster else 1

    def base(self, partition: int) -> bytes:
        """What all keys of a partition begin with."""
        return self.prefix + (b"{%s}" % _TAGS[2 * partition : 2 * partition + 2].encode() if self.is_cluster else b"")


def read_redis_url(url: str) -> RedisPlace:
    """ValueError with a sentence, and no secret in it, for what is none."""
    try:
        parts = urlsplit(url)
    except ValueError:
        # What it says has the password in it.
        raise ValueError("the servers of a store in Redis are written HOST or HOST:PORT") from None
    scheme, plus, kind = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss") or kind not in ("", "cluster") or (plus and not kind):
        raise ValueError("a store in Redis begins with redis://, rediss://, redis+cluster:// or rediss+cluster://")
    userinfo, _, hosts = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    addresses = tuple(_read_address(host) for host in hosts.split(","))
    if not kind and len(addresses) > 1:
        raise ValueError("redis:// names one server; several are a redis+cluster://")
    database = parts.path.strip("/")
    if not re.fullmatch(r"[0-9]{0,5}", database, re.ASCII) or (kind and database not in ("", "0")):
        raise ValueError("behind the servers comes the number of a database, which a cluster has none of")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(given.keys() - set(_PARAMETERS)):
        raise ValueError(f"{unknown[0]} is no parameter of a store in Redis; there are {', '.join(_PARAMETERS)}")
    prefix = given.pop("prefix", "uvimg:").encode()
    if len(prefix) > 100 or re.search(rb"[{}\s]", prefix):
        raise ValueError("the prefix of a store's keys is at most 100 bytes without braces and spaces")
    if given and scheme != "rediss":
        raise ValueError(f"{min(given)} is for rediss:// and rediss+cluster://")
    return RedisPlace(
        addresses,
        is_cluster=bool(kind),
        is_encrypted=scheme == "rediss",
        user=unquote(user) or None,
        password=unquote(password) or None,
        database=int(database or 0),
        prefix=prefix,
        certificates=tuple(sorted(given.items())),
    )


def _read_address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/?#@\s]+)(?::([0-9]{1,5}))?", text, re.ASCII)
    if found is None or not 0 < int(found[2] or _PORT) < 65_536:
        raise ValueError("a server of a store in Redis is written HOST or HOST:PORT")
    return found[1].strip("[]"), int(found[2] or _PORT)


def find_partition(name: bytes, partitions: int) -> int:
    """Where a name is: with its image if it belongs to one."""
    found = _OF_DIGEST.match(name) or _OF_ID.fullmatch(name)
    return (int(found[1], 16) if found else zlib.crc32(name)) % partitions


def find_blob_partition(digest: Digest, partitions: int) -> int:
    return digest[0] % partitions


def find_partitions(prefix: bytes, partitions: int) -> range:
    """Where names with this prefix may be."""
    if _OF_DIGEST.match(prefix):
        return range(find_partition(prefix, partitions), find_partition(prefix, partitions) + 1)
    return range(partitions)


def name_after(prefix: bytes) -> bytes | None:
    """What stands, in order, behind all names with this prefix and before all others; None where nothing does."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes((stem[-1] + 1,)) if stem else None
