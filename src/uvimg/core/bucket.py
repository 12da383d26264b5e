"""A bucket as a store's URL names it: `s3://BUCKET/PREFIX?endpoint=…`, `gs://…`, `az://…`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

# What each may be told behind its "?".
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "s3": ("endpoint", "region", "path_style", "allow_http", "profile"),
    "gs": ("endpoint", "allow_http"),
    "az": ("account", "endpoint", "allow_http"),
}
_SWITCHES = ("path_style", "allow_http")
_SEGMENT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")
_LOOPBACK = re.compile(r"localhost|127(?:\.\d{1,3}){3}|::1")
# The rest of a key has to fit behind it.
_LONGEST_PREFIX = 256


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """`prefix` is "" or ends with a slash; `endpoint`, `region`, `account` and `profile` are "" where the environment
    tells them, or nobody does.
    """

    scheme: str
    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    account: str = ""
    profile: str = ""
    path_style: bool = True
    allow_http: bool = False

    def __str__(self) -> str:
        """As it may be told to people."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}"


def parse_bucket(scheme: str, rest: str) -> BucketPlace:
    """A bucket from what is behind the colon of a URL. ValueError with a sentence."""
    parts = urlsplit(rest)
    bucket, prefix = parts.netloc, unquote(parts.path).strip("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}", bucket):
        raise ValueError(f"a store in a bucket is written {scheme}://BUCKET/PREFIX, and its keys are no part of that")
    segments = prefix.split("/") if prefix else []
    if len(prefix) > _LONGEST_PREFIX or not all(
        re.fullmatch(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*", each) for each in segments
    ):
        raise ValueError(f"the prefix behind {scheme}://{bucket}/ is letters, digits and ._=- between single slashes")
    return BucketPlace(
        scheme,
        bucket,
        prefix + "/" if prefix else "",
        **_read_parameters(scheme, parts.query),  # type: ignore[arg-type]
    )


def _read_parameters(scheme: str, query: str) -> dict[str, str | bool]:
    found: dict[str, str | bool] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _PARAMETERS[scheme]:
            raise ValueError(f"behind {scheme}://…? may stand {', '.join(_PARAMETERS[scheme])}, not {name!a}")
        if name in _SWITCHES:
            if value not in ("true", "false"):
                raise ValueError(f"{name} is true or false")
            found[name] = value == "true"
        else:
            found[name] = value
    endpoint = str(found.get("endpoint", ""))
    if endpoint and not re.fullmatch(r"https?://[^/?#@]+/?[^?#@]*", endpoint):
        raise ValueError("endpoint is written http://HOST:PORT or https://HOST:PORT, without user and password")
    if endpoint.startswith("http://") and not is_loopback(endpoint) and not found.get("allow_http"):
        raise ValueError("endpoint is plain HTTP to another machine: add allow_http=true where that is meant")
    return found


def is_loopback(endpoint: str) -> bool:
    """Whether a server is on this machine, by its address alone."""
    return _LOOPBACK.fullmatch(urlsplit(endpoint).hostname or "") is not None
