"""Images that lie in memcached or Redis: uvimg with either, as zimg was measured, and nginx before memcached.

uvimg has renditions there by its shared cache, and originals by its store. It answers from its own memory what it has
answered before; for these rows it may not: every answer is fetched, and the cache's own count of hits is looked at.
"""

import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import nginx, serving
from bench.exchange import Ask, check, connect
from bench.makers import upload
from bench.programs import find_missing
from bench.serving import Address, BenchError, Launch
from bench.site import Content, Site, Variant

_TIMEOUT_S = 10.0


def _memcached(*place: str) -> tuple[str, ...]:
    return ("memcached", *(("-u", "root") if os.geteuid() == 0 else ()), *place)


# nginx


class _Nginx(Variant):
    """What it is to answer is put into memcached before it is asked."""

    __slots__ = ()

    def ask(self, site: Site, content: Content, address: Address) -> Ask:
        # Not super(): a dataclass with slots is another class than the one that this one was made with.
        ask = Variant.ask(self, site, content, address)
        _put(_find_socket(site, address[1]), ask.path, site.bodies[content])
        return ask


def _find_socket(site: Site, port: int) -> Path:
    return site.folder / f"memcached-{port}.sock"


def _put(path: Path, key: str, value: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(b"set %s 0 0 %d\r\n%s\r\n" % (key.encode(), len(value), value))
        if connection.recv(100) != b"STORED\r\n":
            raise BenchError("memcached does not take an image")


def _launch_nginx(site: Site, content: Content, processes: int) -> Launch:
    port = serving.find_port()
    path = _find_socket(site, port)
    behind = nginx.Behind(
        command=_memcached("-s", str(path)),
        socket=path,
        place="set $memcached_key $uri; memcached_pass behind;",
        upstream="keepalive 64;",
    )
    return nginx.launch(site, processes, behind=behind, port=port)


NGINX = _Nginx("nginx + memcached", False, _launch_nginx, program="memcached", lacks=lambda: find_missing("nginx"))

# uvimg


@dataclass(frozen=True, slots=True)
class _Kind:
    """A cache: how it is started at a port, and how it is asked for its hits and tells of them."""

    name: str
    command: Callable[[int], tuple[str, ...]]
    question: bytes
    hits: str

    def write_url(self, port: int) -> str:
        return f"{self.name}://127.0.0.1:{port}"

    def count_hits(self, port: int) -> int:
        with connect(("127.0.0.1", port)) as connection:
            connection.sendall(self.question)
            said = b""
            while not (found := re.search(self.hits, said.decode(errors="replace"))):
                try:
                    more = connection.recv(65_536)
                except OSError:
                    more = b""
                if not more:
                    raise BenchError(f"{self.name} does not tell its hits")
                said += more
        return int(found[1])


def _find_note(site: Site, port: int) -> Path:
    """Where the port of the cache is written down that belongs to the uvimg at this port."""
    return site.folder / f"cache-of-{port}"


class _Uvimg(Variant):
    """It is given the picture, and asked until the answer has been fetched."""

    __slots__ = ()

    def ask(self, site: Site, content: Content, address: Address) -> Ask:
        upload(address, site.bodies[Content.ORIGINAL])
        ask = Variant.ask(self, site, content, address)
        kind, port = _KINDS[self.name], int(_find_note(site, address[1]).read_text())
        before, deadline = kind.count_hits(port), time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            check(address, ask)
            if kind.count_hits(port) > before:
                return ask
            # It may be kept a moment after it was made.
            time.sleep(0.05)
        raise BenchError(f"{self.name} answers without asking {kind.name}")


def _uvimg(kind: _Kind) -> Variant:
    def launch(site: Site, content: Content, processes: int) -> Launch:
        port, shared = serving.find_port(), serving.find_port()
        _find_note(site, port).write_text(str(shared))
        folder, url = tempfile.mkdtemp(prefix="uvimg-", dir=site.folder), kind.write_url(shared)
        places = (f"--store={url}",) if content is Content.ORIGINAL else (f"--store=local:{folder}", f"--cache={url}")
        command = (
            *(sys.executable, "-m", "uvimg", "serve", "images", f"--listen=127.0.0.1:{port}", *places, "--workers=1"),
            *("--cache-size=0", "--memo-size=0", "--no-access-log", "--log-level=warning"),
        )
        return Launch((kind.command(shared), command), (("127.0.0.1", port),), behind=(("127.0.0.1", shared),))

    return _Uvimg(f"uvimg + {kind.name}", True, launch, program=kind.command(0)[0])


_MEMCACHED = _Kind(
    "memcached",
    lambda port: _memcached("-l", "127.0.0.1", "-p", str(port)),
    b"stats\r\n",
    r"STAT get_hits (\d+)\r\n",
)
_REDIS = _Kind(
    "redis",
    lambda port: ("redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"),
    b"INFO stats\r\n",
    r"keyspace_hits:(\d+)\r\n",
)
UVIMG, UVIMG_ON_REDIS = _uvimg(_MEMCACHED), _uvimg(_REDIS)
_KINDS = {UVIMG.name: _MEMCACHED, UVIMG_ON_REDIS.name: _REDIS}
