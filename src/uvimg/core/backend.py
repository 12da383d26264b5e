"""How a store is written: SCHEME:REST, as `local:./data`, `redis://host` or `s3://bucket/prefix`.

A shared cache is written the same way.
"""

import re

from uvimg.core.bucket import parse_bucket
from uvimg.core.place import Tcp
from uvimg.core.redis import read_redis_url

# What is written behind each scheme, as told to who wrote something else.
_SERVERS = {
    "redis": "redis://HOST:PORT/DATABASE",
    "rediss": "rediss://HOST:PORT/DATABASE",
    "redis+cluster": "redis+cluster://HOST:PORT,HOST:PORT",
    "rediss+cluster": "rediss+cluster://HOST:PORT,HOST:PORT",
    "memcached": "memcached://HOST[:PORT],HOST[:PORT]",
}
_BUCKETS = {"s3": "s3://BUCKET/PREFIX", "gs": "gs://BUCKET/PREFIX", "az": "az://CONTAINER/PREFIX"}
# Those that need no server.
NEAR_SCHEMES = ("local", "memory")
SCHEMES = {"local": "local:DIR", "memory": "memory:", **_BUCKETS, **_SERVERS}
CACHES = {"none": "none", **_SERVERS}

# memcached's own.
_MEMCACHED_PORT = 11211

# Up to the last @: who writes a password as it is, with a / or a ? in it, shall not read it in the log.
_USERINFO = re.compile(r"(?<=://).*@", re.DOTALL)
_VALUE = re.compile(r"(?<==)[^&#]+")
_SERVER = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::(\d{1,5}))?", re.ASCII)


def split_url(url: str) -> tuple[str, str]:
    """(scheme, what is behind its colon). ValueError with a sentence where it is no store that is known."""
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in SCHEMES or (scheme == "memory") != (not rest):
        raise ValueError(f"'{hide_secrets(url)}' is not a store: write {' or '.join(SCHEMES.values())}")
    if scheme in _BUCKETS:
        parse_bucket(scheme, rest)
    if scheme in _SERVERS:
        _check_servers(scheme, url, rest)
    return scheme, rest


def split_cache(url: str) -> tuple[str, str] | None:
    """The same for a shared cache; None for "none"."""
    scheme, colon, rest = url.partition(":")
    if url == "none":
        return None
    if not colon or scheme not in _SERVERS:
        raise ValueError(f"'{hide_secrets(url)}' is not a shared cache: write {' or '.join(CACHES.values())}")
    _check_servers(scheme, url, rest)
    return scheme, rest


def _check_servers(scheme: str, url: str, rest: str) -> None:
    if scheme != "memcached":
        read_redis_url(url)
    elif not parse_servers(rest):
        raise ValueError(f"memcached is written {_SERVERS[scheme]}, each server once and without a password")


def parse_servers(rest: str) -> tuple[Tcp, ...]:
    """The servers of `//HOST[:PORT],[::1]:PORT`, none where that is not how they are written or one is there twice."""
    found = [_SERVER.fullmatch(server) for server in rest.removeprefix("//").removesuffix("/").split(",")]
    servers = [Tcp(each[1] or each[2], int(each[3] or _MEMCACHED_PORT)) for each in found if each is not None]
    well = rest.startswith("//") and len(servers) == len(found) == len(set(servers))
    return tuple(servers) if well and all(0 < server.port <= 65_535 for server in servers) else ()


def hide_secrets(url: str) -> str:
    """The URL as it may be told to people: without user, password and the values of parameters."""
    head, mark, query = _USERINFO.sub("***@", url).partition("?")
    return head + mark + _VALUE.sub("***", query)
