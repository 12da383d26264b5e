"""Load that is work: every answer has to be made first.

Answers differ in length here, so their number is what wrk has read in the window, by the mean length that it found
over its whole run. Every status and the beginning of every body are looked at, which costs wrk little beside the
work; some answers are decoded before the load, and one a half second while it lasts.
"""

import base64
import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from bench.exchange import Ask, Reply, check, connect, read_metrics
from bench.generators import (
    Count,
    await_answers,
    count_established,
    count_threads,
    end_wrk,
    read_bytes_in,
    read_count,
    start_wrk,
    stop_wrk,
    wait,
    write_wrk_script,
)
from bench.load import check_counts, summarise_cost, summarise_latency
from bench.rivals.loop import Done, Order
from bench.serving import Address, BenchError, Cores, Server, pin, read_cpu_s
from bench.work import Walk, check_picture

# Decoded and measured before each round.
_SAMPLES = 4
_SAMPLE_EVERY_S = 0.5
_MIN_WARM_UP_S = 0.1
# Hundreds of requests at once take slow rivals long; they are slow then, and not wrong.
_TIMEOUT_S = 60
# Of the answers; a client that is stopped makes the few others.
_LEAST_MADE = 0.98
# Longer than the slowest preparation, and than any request takes.
_ORDER_S = 60.0
_FAREWELL_S = 0.5
# Until whatever a flood waits in is full.
_FLOOD_S = 1.0
_FLOOD_DELAY_MS = 100

_WALK = """
local paths = {%(paths)s}
local prepared = {}
local last = 0

function init(args)
    for number, path in ipairs(paths) do
        prepared[number] = wrk.format("GET", path)
    end
    last = math.floor(first * #paths / %(threads)d)
end

function request()
    last = last %% #prepared + 1
    return prepared[last]
end
"""
_LOOK = """
function response(status, fields, body)
    if status ~= 200 or body:sub(1, 2) ~= "\\255\\216" then
        wrong = wrong + 1
    end
end
"""


def write_walk(paths: Sequence[str], threads: int) -> str:
    """Lua for wrk: all paths in turn; each thread begins elsewhere."""
    return _WALK % {"paths": ", ".join(map(json.dumps, paths)), "threads": threads}


@dataclass(frozen=True, slots=True)
class Making:
    """So many connections, each with a rendition of the walk in flight. A loop goes through the same walk."""

    connections: int
    walk: Walk

    programs = ("wrk", "ss")
    most_rounds = 100

    @property
    def walks(self) -> tuple[Walk, ...]:
        return (self.walk,)

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        if server.loops:
            return _run_loops(server, self.walk, seconds)
        least = min(reply.size for reply in check_samples(server.addresses[0], asks))
        threads = min(self.connections, count_threads(cores, 1))
        script = write_wrk_script(write_walk([ask.path for ask in asks], threads), _LOOK)
        address = server.addresses[0]
        with start_wrk(script, address, asks[0].path, self.connections, threads, cores, timeout_s=_TIMEOUT_S) as wrk:
            await_answers([wrk], server.addresses[:1], self.connections, [least], self.connections)
            wait([wrk], max(_MIN_WARM_UP_S, seconds / 4))
            hits = read_metrics(address, "uvimg_hits_total")
            began, had, before, client = time.monotonic(), read_bytes_in(wrk.pid), server.cpu_s(), read_cpu_s(wrk.pid)
            samples = _sample(wrk, address, asks, began + seconds)
            # All at once: the last of the work comes after it, when wrk has ended and what it asked is still made.
            passed, read, now = time.monotonic() - began, read_bytes_in(wrk.pid) - had, server.cpu_s()
            spent = (read_cpu_s(wrk.pid) or 0.0) - (client or 0.0)
            check_made(hits, read_metrics(address, "uvimg_hits_total"))
            established = count_established(server.addresses[:1])
            counts = stop_wrk([wrk])
        check_counts(server, counts)
        if established < self.connections:
            raise BenchError(f"{established} connections were left of {self.connections}")
        answers = count_answers(counts[0], read) + samples
        cost = summarise_cost(server, before, answers, passed, now)
        return {"rate": answers / passed, **cost, "client": spent / passed * 100, **summarise_latency(counts)}


# wrk's own way to wait, in milliseconds, before each request: who is turned away does not come back at once.
_FLOOD = """
function delay()
    return %d
end

function response(status, fields, body)
    if status ~= 200 and status ~= 503 then
        wrong = wrong + 1
    end
end
"""


@dataclass(frozen=True, slots=True)
class Paced:
    """A request of the walk so often a second, each timed from when it was due: latency, where rates say nothing.

    With `beside` so many connections ask for that walk at the same time, more than the server takes: some of them have
    to be turned away, or what they wait in was not full.
    """

    rate: float
    walk: Walk
    beside: Walk | None = None
    connections: int = 0

    programs = ("wrk", "ss")
    most_rounds = 100

    @property
    def walks(self) -> tuple[Walk, ...]:
        return (self.walk, self.beside) if self.beside else (self.walk,)

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        address, asked = server.addresses[0], len(self.walk.tasks)
        check_samples(address, asks[:asked])
        flood = self._flooding(address, asks[asked:], cores) if self.beside else contextlib.nullcontext()
        with flood:
            took_ms = sorted(self._ask(address, asks[:asked], cores, seconds))
        server.check_alive()
        return {
            "mean_ms": statistics.fmean(took_ms),
            "p99_ms": took_ms[math.ceil(0.99 * len(took_ms)) - 1],
            "max_ms": took_ms[-1],
        }

    @contextlib.contextmanager
    def _flooding(self, address: Address, asks: list[Ask], cores: Cores) -> Iterator[None]:
        check_samples(address, asks)
        script = write_wrk_script(write_walk([ask.path for ask in asks], 1), _FLOOD % _FLOOD_DELAY_MS)
        with start_wrk(script, address, asks[0].path, self.connections, 1, cores) as wrk:
            wait([wrk], _FLOOD_S)
            yield
            count = read_count(end_wrk([wrk])[0])
        if count["seen"] or count["connect"] or count["read"] or count["timeout"]:
            raise BenchError(f"what came beside was answered wrongly: {count}")
        # wrk counts what is 400 and more, our script what is neither 200 nor 503.
        if count["status"] == 0:
            raise BenchError(f"none of {count['requests']} requests beside was turned away: their lane was not full")

    def _ask(self, address: Address, asks: list[Ask], cores: Cores, seconds: float) -> list[float]:
        host, port = address
        command = [sys.executable, "-m", "bench.pace", host, str(port), str(self.rate), str(seconds)]
        done = subprocess.run(
            [*pin(cores.load), *command],
            input=json.dumps([ask.path for ask in asks]),
            capture_output=True,
            text=True,
            timeout=seconds + _ORDER_S,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"the client ended: {done.stderr.strip().splitlines()[-1:]}")
        told = json.loads(done.stdout)
        if told["wrong"] or not told["ms"]:
            raise BenchError(f"{len(told['ms'])} answers were right, and not {told['wrong']}")
        return [float(ms) for ms in told["ms"]]


def check_samples(address: Address, asks: Sequence[Ask]) -> list[Reply]:
    """Some of the answers, looked at whole."""
    return [check(address, ask) for ask in asks[:: max(1, len(asks) // _SAMPLES)]]


def check_made(before: dict[str, float], after: dict[str, float]) -> None:
    """BenchError where uvimg says that answers came from elsewhere than from work of their own."""
    came = {labels: count - before.get(labels, 0.0) for labels, count in after.items()}
    made = sum(count for labels, count in came.items() if 'kind="made"' in labels)
    if made < _LEAST_MADE * sum(came.values()):
        raise BenchError(f"answers came without work: {came}")


def _sample(wrk: "subprocess.Popen[str]", address: Address, asks: list[Ask], until: float) -> int:
    """Look at an answer now and then while the load is on; how many that were."""
    taken = 0
    while (left := until - time.monotonic()) > 0:
        wait([wrk], min(left, _SAMPLE_EVERY_S))
        if time.monotonic() < until:
            # Far from where wrk is, most of the time: it asks for them in order.
            check(address, asks[(taken * 977 + 311) % len(asks)])
            taken += 1
    return taken


def count_answers(whole: Count, read: int) -> float:
    """How many of the answers of wrk's whole run came in a part of it in which so many bytes were read."""
    if not whole.requests or read <= 0:
        raise BenchError("no answer at all")
    return read * whole.requests / whole.bytes


# Loops


def _run_loops(server: Server, walk: Walk, seconds: float) -> dict[str, float]:
    for done in _order_all(server, [Order(tasks=walk.tasks)] * len(server.addresses)):
        check_picture(base64.b64decode(done.sample), walk.tasks[0])
    # Each begins elsewhere.
    firsts = [number * len(walk.tasks) // len(server.addresses) for number in range(len(server.addresses))]
    _order_all(server, [Order(first=first, seconds=max(_MIN_WARM_UP_S, seconds / 4)) for first in firsts])
    before = server.cpu_s()
    all_done = _order_all(server, [Order(first=first, seconds=seconds) for first in firsts])
    rate = sum(done.jobs / done.seconds for done in all_done)
    jobs, longest = sum(done.jobs for done in all_done), max(done.seconds for done in all_done)
    return {"rate": rate, **summarise_cost(server, before, jobs, longest), "client": 0.0}


def _order_all(server: Server, orders: Sequence[Order]) -> list[Done]:
    """Have all processes work at the same time."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(address)) for address in server.addresses]
        for connection, order in zip(connections, orders, strict=True):
            connection.settimeout(_ORDER_S + order.seconds)
            connection.sendall(msgspec.json.encode(order) + b"\n")
        try:
            lines = [stack.enter_context(connection.makefile("rb")).readline() for connection in connections]
            return [msgspec.json.decode(line, type=Done) for line in lines]
        except (OSError, msgspec.DecodeError) as exc:
            # Its connections end a moment before it does.
            time.sleep(_FAREWELL_S)
            server.check_alive()
            raise BenchError(f"{server.name} did not do as it was told: {exc}") from None
