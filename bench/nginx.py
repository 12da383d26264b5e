"""Debian's nginx as one who wants it fast sets it up: with files of its own, or before another server."""

import os
import string
from dataclasses import dataclass
from pathlib import Path

from bench import serving
from bench.serving import Launch
from bench.site import Content, Site

_CONFIGURATION = Path(__file__).parent / "rivals" / "nginx.conf.in"
# What common limits allow for (ulimit -Hn).
_FILES = 20_000
_FROM_FILES = 'add_header Cache-Control "max-age=7776000";'


@dataclass(frozen=True, slots=True)
class Behind:
    """Another server, which nginx asks at a socket of that server's own."""

    command: tuple[str, ...]
    socket: Path
    # How nginx asks it, where `behind` is its upstream's name; and what else that upstream has.
    place: str
    upstream: str = ""


def launch(
    site: Site, processes: int = 1, *, tiny: bytes | None = None, behind: Behind | None = None, port: int = 0
) -> Launch:
    """At one port, with so many workers; of several each has an address of its own for a client of its own."""
    port = port or serving.find_port()
    upstream = f"upstream behind {{ server unix:{behind.socket}; {behind.upstream} }}" if behind else ""
    addresses = tuple((f"127.0.0.{1 + number}", port) for number in range(processes))
    reuseport = " reuseport" if processes > 1 else ""
    text = string.Template(_CONFIGURATION.read_text()).safe_substitute(
        USER="user root;" if os.geteuid() == 0 else "",
        FOLDER=site.folder,
        PROCESSES=processes,
        FILES=_FILES,
        PORT=port,
        LISTEN=" ".join(f"listen {host}:{port} backlog=4096{reuseport};" for host, port in addresses),
        TINY=(site.bodies.get(Content.TINY, b"") if tiny is None else tiny).decode(),
        UPSTREAM=upstream,
        PLACE=behind.place if behind else _FROM_FILES,
    )
    conf = site.folder / f"nginx-{port}.conf"
    conf.write_text(text)
    command = ("nginx", "-c", str(conf), "-p", str(site.folder))
    if behind is None:
        return Launch((command,), addresses)
    return Launch((behind.command, command), addresses, behind=(behind.socket,))
