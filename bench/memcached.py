"""Answers that are kept in memcached: uvimg before it, as zimg was measured, and nginx by its own module.

uvimg answers from its own memory what it has answered before. For this row it may not: every answer is fetched.
"""

import os
import socket
import sys
from pathlib import Path

from bench import nginx, serving
from bench.exchange import Ask
from bench.serving import Address, BenchError, Launch
from bench.site import Content, Site, Variant
from uvimg import config

_TIMEOUT_S = 10.0


def _command(*place: str) -> tuple[str, ...]:
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
        command=_command("-s", str(path)),
        socket=path,
        place="set $memcached_key $uri; memcached_pass behind;",
        upstream="keepalive 64;",
    )
    return nginx.launch(site, processes, behind=behind, port=port)


NGINX = _Nginx("nginx + memcached", False, _launch_nginx, program="memcached")

# uvimg


def _launch_uvimg(site: Site, content: Content, processes: int) -> Launch:
    port, shared = serving.find_port(), serving.find_port()
    command = (
        *(sys.executable, "-m", "uvimg", "serve", f"--listen=127.0.0.1:{port}"),
        *(f"--store=local:{site.folder / 'data'}", f"--cache=memcached://127.0.0.1:{shared}", "--workers=1"),
        *("--cache-size=0", "--memo-size=0", "--no-access-log", "--log-level=warning"),
    )
    memcached = _command("-l", "127.0.0.1", "-p", str(shared))
    return Launch((memcached, command), (("127.0.0.1", port),), behind=(("127.0.0.1", shared),))


def _lacks_cache() -> str:
    known = {declaration.name for declaration in config.declarations()}
    return "" if "cache" in known else "uvimg cannot keep renditions in memcached yet: it has no setting cache"


UVIMG = Variant("uvimg + memcached", True, _launch_uvimg, program="memcached", lacks=_lacks_cache)
