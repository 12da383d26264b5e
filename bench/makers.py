"""Who makes renditions: uvimg, set up so that every request is work, and loops that do the work without requests.

Each has a fresh store with the picture in it, so that nothing one has made is there for another. What one makes is
neither kept nor cached, and no two requests of a walk are equal.
"""

import hashlib
import http.client
import sys
import tempfile
import time
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path

from bench import corpus, serving
from bench.exchange import Ask, exchange, read_metrics
from bench.serving import Address, BenchError, Launch
from bench.site import Content, Site, Variant
from bench.work import Picture, Task, Walk, draw, make_walk

# A level of intermediates takes a worker a tenth of a second, and all of them get their names at once.
_STILL_S = 1.0
_INTERMEDIATES_S = 30.0


def upload(address: Address, data: bytes) -> None:
    """To uvimg. BenchError when it is not taken."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    try:
        connection.request("POST", "/images", data, {"Content-Type": "image/jpeg"})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as exc:
        raise BenchError(f"no answer to an upload: {exc!r}") from None
    finally:
        connection.close()
    if status != 201:
        raise BenchError(f"uvimg answers an upload with {status}")


# uvimg


def _spell(task: Task) -> str:
    """A task as uvimg's parameters."""
    place = f"w={task.width}&h={task.height}" + ("&p=4" if task.fit == "inside" else "")
    format = "" if task.format == "jpeg" else f"&f={task.format}"
    return f"{place}{'&g=1' if task.gray else ''}&q={task.quality}{format}"


def _spell_type(task: Task) -> str:
    """The name of a type that makes the same; see `_write_tables` and types.lua."""
    return f"t=test_{task.width}x{task.height}_{task.quality}"


def _uvimg(
    name: str,
    flags: Callable[[Path], tuple[str, ...]] = lambda folder: (),
    spell: Callable[[Task], str] = _spell,
    settle: Callable[[Address, list[str]], None] = lambda address, paths: None,
    lacks: Callable[[], str] = lambda: "",
    copies: int = 1,
    run: Callable[[], tuple[str, ...]] = lambda: (),
) -> Variant:
    """uvimg with more flags, which may need files in its folder, started by what `run` says.

    Of the picture it is given so many `copies`, each an image of its own: where a walk is short, equal requests would
    meet. `settle` is done once they are there, with the path of a rendition of each.
    """

    def launch(site: Site, content: Content, processes: int) -> Launch:
        folder = Path(tempfile.mkdtemp(prefix="uvimg-", dir=site.folder))
        port = serving.find_port()
        command = (
            *(*run(), sys.executable, "-m", "uvimg", "serve"),
            *(f"--listen=127.0.0.1:{port}", f"--store=local:{folder / 'data'}"),
            *(f"--workers={processes}", "--save-new=0", "--cache-size=0", "--memo-size=0"),
            *("--no-access-log", "--log-level=warning", *flags(folder)),
        )
        return Launch((command,), (("127.0.0.1", port),))

    def ask_for(site: Site, walk: Walk, address: Address) -> list[Ask]:
        pictures = [corpus.number_jpeg(draw(walk.picture), number) for number in range(copies)]
        for picture in pictures:
            upload(address, picture)
        paths = [f"/{hashlib.md5(picture).hexdigest()}?" for picture in pictures]
        settle(address, [path + spell(walk.tasks[0]) for path in paths])
        kind = ("Content-Type", f"image/{walk.tasks[0].format}")
        return [
            Ask(path + spell(task), 200, None, expected=(kind,), task=task) for path in paths for task in walk.tasks
        ]

    return Variant(name, True, launch, ask_for=ask_for, lacks=lacks)


# As many copies as it takes to have more different requests than connections with the shortest walk, `TYPED`.
_COPIES = 4
PLAIN = _uvimg("uvimg", copies=_COPIES)

# A flood fills its queue with few connections.
SHORT_QUEUE = _uvimg(
    "uvimg",
    lambda folder: ("--slow-queue-limit=16",),
)


# Types. There may be 500 tables.
TYPED = make_walk(Picture.SMALL, 100, 3, gray=True)


def _write_tables(folder: Path) -> tuple[str, ...]:
    """A configuration with a type for each task of `TYPED`."""
    file = folder / "types.toml"
    file.write_text(
        "".join(
            f"[types.{_spell_type(task).removeprefix('t=')}]\n"
            f"w = {task.width}\nh = {task.height}\ng = {int(task.gray)}\nq = {task.quality}\n"
            for task in TYPED.tasks
        )
    )
    return (f"--config={file}",)


BY_TABLE = _uvimg("uvimg by a table type", _write_tables, _spell_type, copies=_COPIES)
BY_SCRIPT = _uvimg(
    "uvimg by a Lua type",
    lambda folder: (f"--script={Path(__file__).parent / 'types.lua'}",),
    _spell_type,
    copies=_COPIES,
)


# Intermediates


def _await_intermediates(address: Address, paths: list[str]) -> None:
    """Ask for the first rendition of each, and wait until what uvimg keeps for the next ones is there."""
    before = now = _count_names(address)
    for path in paths:
        exchange(address, Ask(path, 200, None))
    began = still_since = time.monotonic()
    while now == before or time.monotonic() < still_since + _STILL_S:
        if time.monotonic() > began + _INTERMEDIATES_S:
            raise BenchError("uvimg keeps no intermediates")
        time.sleep(0.05)
        if (names := _count_names(address)) != now:
            now, still_since = names, time.monotonic()


def _count_names(address: Address) -> float:
    return sum(read_metrics(address, "uvimg_store_names").values())


UNREDUCED = _uvimg("uvimg without intermediates", lambda folder: ("--intermediates-from=0",))
REDUCED = _uvimg("uvimg with intermediates", settle=_await_intermediates)


# Memory: as it is installed, and where no new worker hides what the old one did not give back.
SOAKED = _uvimg("uvimg")
ENDLESS = _uvimg("uvimg", lambda folder: ("--worker-jobs=0",))
ENDLESS_ON_JEMALLOC = _uvimg(
    "uvimg",
    lambda folder: ("--worker-jobs=0",),
    lacks=lambda: "" if find_library("jemalloc") else "jemalloc is not installed: apt-get install libjemalloc2",
    run=lambda: ("env", f"LD_PRELOAD={find_library('jemalloc')}"),
)


# Loops


def _loop(name: str, module: str) -> Variant:
    def launch(site: Site, content: Content, processes: int) -> Launch:
        ports = [serving.find_port() for _ in range(processes)]
        commands = tuple((sys.executable, "-m", module, str(port), str(site.folder / "pictures")) for port in ports)
        return Launch(commands, tuple(("127.0.0.1", port) for port in ports), loops=True)

    def ask_for(site: Site, walk: Walk, address: Address) -> list[Ask]:
        site.find(walk.picture)
        return []

    return Variant(name, False, launch, ask_for=ask_for)


BARE = _loop("bare libvips", "bench.rivals.bare_libvips")
PLANS = _loop("the plans alone", "bench.rivals.plans")
