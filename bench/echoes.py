"""Raw TCP echo: the servers of the published table, each one process, and the load that they were measured with.

Ten connections, each with one message in flight, of 1, 10 and 100 KiB. The client is in C and on another core; its own
share of that is in the table, so that it shows where it, and not the server, is what is measured.
"""

import atexit
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from bench.exchange import Ask
from bench.load import summarise_cost
from bench.messages import Counted, summarise
from bench.programs import PYTHON, lacks_package
from bench.result import Goal
from bench.serving import BenchError, Cores, Launch, Server, find_port, pin
from bench.site import Content, Site, Variant
from bench.work import Walk

_HERE = Path(__file__).parent
_PROGRAMS = _HERE / "rivals" / "echo"
_MIN_WARM_UP_S = 0.1
# The client waits so long for its last messages, and then some.
_END_S = 10.0


@cache
def _build_client() -> str:
    folder = tempfile.mkdtemp(prefix="bench-echo-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _build("cc", "-O2", "-o", f"{folder}/echo", str(_HERE / "clients" / "echo.c"))


def _build(*command: str) -> str:
    """Run a compiler; the path behind its -o."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{command[0]} says: {' '.join(done.stderr.split())[-200:]}")
    return command[command.index("-o") + 1]


@dataclass(frozen=True, slots=True)
class Messages:
    """So many connections that each send a message, wait until it is back, to the byte, and send the next."""

    message_bytes: int
    connections: int = 10

    programs = ("cc",)
    most_rounds = 100
    walks: tuple[Walk, ...] = ()

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        self._send(server, cores, max(_MIN_WARM_UP_S, seconds / 4))
        before = server.cpu_s()
        counted = self._send(server, cores, seconds)
        if not counted.messages:
            raise BenchError("no message came back")
        measures = summarise(counted, self.message_bytes)
        # The cost is of all that was sent, the latencies are of what was sent and came back in time: the same but for
        # the last message of each connection.
        return {**measures, **summarise_cost(server, before, counted.messages, seconds)}

    def _send(self, server: Server, cores: Cores, seconds: float) -> Counted:
        host, port = server.addresses[0]
        what = map(str, (port, self.connections, self.message_bytes, 0, seconds))
        try:
            done = subprocess.run(
                [*pin(cores.load), _build_client(), host, *what],
                capture_output=True,
                text=True,
                timeout=seconds + _END_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BenchError("the client did not come to its end") from None
        server.check_alive()
        if done.returncode:
            raise BenchError(" ".join(done.stderr.split())[-200:] or f"the client ended with {done.returncode}")
        return msgspec.json.decode(done.stdout, type=Counted)


def _variant(
    name: str,
    command: Callable[[Site, int], tuple[str, ...]],
    *,
    ours: bool = False,
    program: str = "",
    package: str = "",
) -> Variant:
    def launch(site: Site, content: Content, processes: int) -> Launch:
        port = find_port()
        return Launch((command(site, port),), (("127.0.0.1", port),))

    return Variant(name, ours, launch, program=program, lacks=lambda: lacks_package(package) if package else "")


def _ours(name: str, style: str, loop: str) -> Variant:
    command = (sys.executable, "-m", "uvimg", "echo", f"--style={style}", f"--loop={loop}")
    return _variant(name, lambda site, port: (*command, f"--port={port}"), ours=True)


def _python(name: str, package: str, *more: str) -> Variant:
    program = str(_PROGRAMS / f"{package}_server.py")
    return _variant(name, lambda site, port: (str(PYTHON), program, str(port), *more), package=package)


def _launch_go(site: Site, port: int) -> tuple[str, ...]:
    program = site.folder / "echo-go"
    if not program.exists():
        _build("go", "build", "-o", str(program), str(_PROGRAMS / "echo.go"))
    # One process as all the others are one; its threads would take the client's core.
    return ("env", "GOMAXPROCS=1", str(program), str(port))


GO = _variant("Go", _launch_go, program="go")
UVLOOP = _ours("uvloop", "protocol", "uvloop")
BUFFERED = _ours("uvloop, buffered", "buffered", "uvloop")
UVLOOP_STREAMS = _ours("uvloop streams", "streams", "uvloop")
ASYNCIO_STREAMS = _ours("asyncio streams", "streams", "asyncio")

VARIANTS = (
    _python("gevent", "gevent"),
    _python("Tornado", "tornado"),
    _python("Twisted", "twisted"),
    _python("curio", "curio"),
    _python("curio streams", "curio", "streams"),
    _variant("Node.js", lambda site, port: ("node", str(_PROGRAMS / "echo.js"), str(port)), program="node"),
    GO,
    _ours("asyncio", "protocol", "asyncio"),
    ASYNCIO_STREAMS,
    UVLOOP,
    UVLOOP_STREAMS,
    BUFFERED,
    _ours("uvloop, curio-style streams", "curio-streams", "uvloop"),
    _ours("uvloop, sockets", "sockets", "uvloop"),
)


def make_goals(kib: int) -> tuple[Goal, ...]:
    """CPU per message beside Go, at least 0.97 of whose is wanted of the better of two; streams beside asyncio's."""
    goals = [Goal(variant.name, "cpu_us", "at most", 1 / 0.97, GO.name) for variant in (BUFFERED, UVLOOP)]
    aim = 1.0 if kib < 100 else None
    return (*goals, Goal(UVLOOP_STREAMS.name, "cpu_us", "at most", aim, ASYNCIO_STREAMS.name))
