"""Who makes renditions: uvimg, set up so that every request is work, and loops that do the work without requests.

Each has a fresh store with the picture in it, so that nothing one has made is there for another.
"""

import hashlib
import http.client
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import serving
from bench.exchange import Ask
from bench.serving import Address, BenchError, Launch
from bench.site import Content, Site, Variant
from bench.work import Task, Walk, draw


def upload(address: Address, data: bytes) -> None:
    """To uvimg. BenchError when it is not taken."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("POST", "/images", data, {"Content-Type": "image/jpeg"})
    status = connection.getresponse().status
    connection.close()
    if status != 201:
        raise BenchError(f"uvimg answers an upload with {status}")


def spell(task: Task) -> str:
    """A task as uvimg's parameters."""
    place = f"w={task.width}&h={task.height}" + ("&p=4" if task.fit == "inside" else "")
    format = "" if task.format == "jpeg" else f"&f={task.format}"
    return f"{place}{'&g=1' if task.gray else ''}&q={task.quality}{format}"


def _no_flags(folder: Path) -> tuple[str, ...]:
    return ()


def _uvimg(
    name: str,
    flags: Callable[[Path], tuple[str, ...]] = _no_flags,
    spell: Callable[[Task], str] = spell,
    settle: Callable[[Address, str], None] | None = None,
    lacks: Callable[[], str] = lambda: "",
) -> Variant:
    """uvimg with more flags, which may need files in its folder. `settle` is done once it has the picture."""

    def launch(site: Site, content: Content, processes: int) -> Launch:
        folder = Path(tempfile.mkdtemp(prefix="uvimg-", dir=site.folder))
        port = serving.find_port()
        command = (
            *(sys.executable, "-m", "uvimg", "serve", f"--listen=127.0.0.1:{port}", f"--store=local:{folder / 'data'}"),
            *(f"--workers={processes}", "--save-new=0", "--cache-size=0", "--memo-size=0"),
            *("--no-access-log", "--log-level=warning", *flags(folder)),
        )
        return Launch((command,), (("127.0.0.1", port),))

    def ask_for(site: Site, walk: Walk, address: Address) -> list[Ask]:
        picture = draw(walk.picture)
        upload(address, picture)
        path = f"/{hashlib.md5(picture).hexdigest()}?"
        if settle is not None:
            settle(address, path + spell(walk.tasks[0]))
        kind = ("Content-Type", f"image/{walk.tasks[0].format}")
        return [Ask(path + spell(task), 200, None, expected=(kind,), task=task) for task in walk.tasks]

    return Variant(name, True, launch, ask_for=ask_for, lacks=lacks)


def _loop(name: str, module: str) -> Variant:
    def launch(site: Site, content: Content, processes: int) -> Launch:
        ports = [serving.find_port() for _ in range(processes)]
        commands = tuple((sys.executable, "-m", module, str(port), str(site.folder / "pictures")) for port in ports)
        return Launch(commands, tuple(("127.0.0.1", port) for port in ports), loops=True)

    def ask_for(site: Site, walk: Walk, address: Address) -> list[Ask]:
        site.find(walk.picture)
        return []

    return Variant(name, False, launch, ask_for=ask_for)


PLAIN = _uvimg("uvimg")
# A flood fills it with few connections.
SHORT_QUEUE = _uvimg("uvimg", lambda folder: ("--queue-limit=16",))
BARE = _loop("bare libvips", "bench.rivals.bare_libvips")
PLANS = _loop("the plans alone", "bench.rivals.plans")
