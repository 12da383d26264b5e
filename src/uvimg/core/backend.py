"""How a store is written: SCHEME:REST, as `local:./data`, `redis://host` or `s3://bucket/prefix`."""

import re

from uvimg.core.bucket import parse_bucket

# What is written behind each scheme, as told to who wrote something else.
SCHEMES = {
    "local": "local:DIR",
    "memory": "memory:",
    "s3": "s3://BUCKET/PREFIX",
    "gs": "gs://BUCKET/PREFIX",
    "az": "az://CONTAINER/PREFIX",
}
# Those that need no server.
NEAR_SCHEMES = ("local", "memory")
_BUCKETS = ("s3", "gs", "az")

_USERINFO = re.compile(r"(?<=://)[^/?#]*@")
_VALUE = re.compile(r"(?<==)[^&#]+")


def split_url(url: str) -> tuple[str, str]:
    """(scheme, what is behind its colon). ValueError with a sentence where it is no store that is known."""
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in SCHEMES or (scheme == "memory") != (not rest):
        raise ValueError(f"'{hide_secrets(url)}' is not a store: write {' or '.join(SCHEMES.values())}")
    if scheme in _BUCKETS:
        parse_bucket(scheme, rest)
    return scheme, rest


def hide_secrets(url: str) -> str:
    """The URL as it may be told to people: without user, password and the values of parameters."""
    head, mark, query = _USERINFO.sub("***@", url).partition("?")
    return head + mark + _VALUE.sub("***", query)
