"""Where images may live: the same rendition out of each store, by the transport front-end.

What a store costs shows when nothing is at hand in memory; what a tier is worth shows also as it is installed.
The CPU is that of uvimg and of the servers of its store together, which have its core.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import serving
from bench.exchange import Ask, check, read_metrics
from bench.makers import upload
from bench.serving import Address, BenchError, Launch
from bench.site import Content, Site, Variant

_PATIENCE_S = 20.0
# Between two looks.
_MOMENT_S = 0.05
_KEYS = ("AWS_ACCESS_KEY_ID=bench", "AWS_SECRET_ACCESS_KEY=not a secret", "AWS_REGION=us-east-1")
_ROOT_KEYS = ("ROOT_ACCESS_KEY=bench", "ROOT_SECRET_KEY=not a secret")
_BARE = ("--cache-size=0", "--memo-size=0")


@dataclass(frozen=True, slots=True)
class _Backend:
    """A store: its URL at a folder and a port, and the command of the server that listens there, if it has one."""

    name: str
    url: Callable[[Path, int], str]
    command: Callable[[Path, int], tuple[str, ...]] | None = None
    program: str = ""
    # Where a tier stands before it, below the folder.
    tier: str = ""


class _Uvimg(Variant):
    """It is given the picture, and asked for the rendition until nobody has to make it any more."""

    __slots__ = ()

    def ask(self, site: Site, content: Content, address: Address) -> Ask:
        # Not super(): a dataclass with slots is another class than the one that this one was made with.
        upload(address, site.bodies[Content.ORIGINAL])
        ask = Variant.ask(self, site, content, address)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            before = _count_made(address)
            check(address, ask)
            if _count_made(address) == before:
                return ask
            # It is kept a moment after it was made; what is measured is what comes out of the store.
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} makes the rendition anew each time")
            time.sleep(_MOMENT_S)


def _count_made(address: Address) -> float:
    return sum(value for labels, value in read_metrics(address, "uvimg_hits_total").items() if '"made"' in labels)


def _uvimg(backend: _Backend, *, bare: bool) -> Variant:
    def launch(site: Site, content: Content, processes: int) -> Launch:
        folder = Path(tempfile.mkdtemp(prefix="store-", dir=site.folder))
        port, behind = serving.find_port(), serving.find_port()
        command = (
            *("env", *_KEYS, sys.executable, "-m", "uvimg", "serve", "images", f"--listen=127.0.0.1:{port}"),
            *(f"--store={backend.url(folder, behind)}", "--workers=1", "--no-access-log", "--log-level=warning"),
            *(_BARE if bare else ()),
            *((f"--tier={folder / backend.tier}",) if backend.tier else ()),
        )
        if backend.command is None:
            return Launch((command,), (("127.0.0.1", port),))
        servers = (backend.command(folder, behind), command)
        return Launch(servers, (("127.0.0.1", port),), behind=(("127.0.0.1", behind),))

    lacks = _lacks_s3 if backend.command is _start_s3 else lambda: ""
    return _Uvimg(backend.name, True, launch, program=backend.program, lacks=lacks)


def _start_s3(folder: Path, port: int) -> tuple[str, ...]:
    (folder / "buckets" / "pictures").mkdir(parents=True)
    place = ("--port", f"127.0.0.1:{port}", "--keep-alive", "posix", str(folder / "buckets"))
    return ("env", *_ROOT_KEYS, _find_s3(), *place)


def _find_s3() -> str:
    """The S3 server; Go puts it where PATH may not lead. "" when it is not there."""
    folders = [os.environ.get("PATH", ""), str(Path.home() / "go" / "bin")]
    return shutil.which("versitygw", path=os.pathsep.join(folders)) or ""


def _lacks_s3() -> str:
    return "" if _find_s3() else "versitygw is not installed: scripts/bench-rivals"


def _start_memcached(folder: Path, port: int) -> tuple[str, ...]:
    user = ("-u", "root") if os.geteuid() == 0 else ()
    return ("memcached", *user, "-l", "127.0.0.1", "-p", str(port))


def _start_redis(folder: Path, port: int) -> tuple[str, ...]:
    return ("redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no")


def _write_s3(folder: Path, port: int) -> str:
    return f"s3://pictures/bench?endpoint=http://127.0.0.1:{port}"


_BACKENDS = (
    _Backend("local", lambda folder, port: f"local:{folder / 'data'}"),
    _Backend("s3 with a tier", _write_s3, _start_s3, tier="tier"),
    _Backend("redis", lambda folder, port: f"redis://127.0.0.1:{port}", _start_redis, "redis-server"),
    _Backend("memcached", lambda folder, port: f"memcached://127.0.0.1:{port}", _start_memcached, "memcached"),
    _Backend("s3", _write_s3, _start_s3),
)
# Nothing at hand in memory, and as it is installed.
BARE = tuple(_uvimg(backend, bare=True) for backend in _BACKENDS)
INSTALLED = tuple(_uvimg(backend, bare=False) for backend in _BACKENDS)
LOCAL, TIERED, REDIS = BARE[:3]
