"""Load on a server, and whether every answer to it was the right one.

An answer is looked at whole before any load: status, fields, body. The warm-up has wrk look at every status and
length. The measured part only counts, because looking takes wrk the time it needs to keep a fast server busy: but
wrk counts statuses of 400 and more, broken connections and time-outs itself, and since all answers have one length,
its bytes tell whether any other came.
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from bench.exchange import Ask, Reply, check, connect, exchange_on
from bench.generators import (
    TIMEOUT_S,
    Count,
    await_answers,
    count_established,
    count_threads,
    listen,
    parse_ab,
    read_bytes_in,
    start,
    start_wrk,
    stop_wrk,
    wait,
    write_wrk_script,
)
from bench.serving import Address, BenchError, Cores, Server
from bench.work import Walk

# How the requests of one load differ: not at all; not at all, but by the way that the others take through wrk;
# in target and fields, 10,000 of them; in target and fields, every one.
Variety = Literal["same", "same by Lua", "10,000", "never the same"]
_MIN_WARM_UP_S = 0.1
# Enough to look at answers with. Thousands take a while to be made, and are made again when they are counted.
_LOOK_CONNECTIONS = 100
# As the suite promises.
_DIFFERENT = 10_000
# As many as zimg's table was made with, and what is enough to see whether it works.
_NEW_CONNECTIONS = 200_000
_NEW_CONNECTIONS_QUICK = 5_000
_MOST_S = 300.0
# The server has its first buffers, caches and code in memory.
_FIRST_IDLE = 100

# What wrk asks

_LOOK = """
function response(status, fields, body)
    if status ~= %d or #body ~= %d then
        wrong = wrong + 1
    end
end
"""
# `never` is unique: a number that only grows. Fields differ as browsers' do, in the middle and at the end of the head.
_VARIED = """
local last = 0
local prepared = {}
local function make(number)
    local fields = {}
    for name, value in pairs(wrk.headers) do
        fields[name] = value
    end
    fields["User-Agent"] = "bench/" .. number
    fields["Cookie"] = "session=" .. number
    return wrk.format("GET", %(path)s .. number, fields)
end

function init(args)
    for number = 1, %(count)d do
        prepared[number] = %(make)s
    end
end

function request()
    last = last + 1
    %(next)s
end
"""
_VARIED_NEXT = """if last > #prepared then
        last = 1
    end
    return prepared[last]"""


def write_script(ask: Ask, variety: Variety, length: int | None = None) -> str:
    """The Lua script for wrk. With a `length` it holds every answer against the expected status and this length."""
    requests = ""
    if variety != "same":
        joined = ask.path + ("&" if "?" in ask.path else "?") + "n="
        requests = _VARIED % {
            "path": json.dumps(joined),
            "count": {"same by Lua": 1, "10,000": _DIFFERENT, "never the same": 0}[variety],
            "make": "wrk.format()" if variety == "same by Lua" else "make(number)",
            "next": "return make(last)" if variety == "never the same" else _VARIED_NEXT,
        }
    response = "" if length is None else _LOOK % (ask.status, length)
    return write_wrk_script(requests, response)


# Loads


class Load(Protocol):
    """What a server is put under."""

    @property
    def programs(self) -> tuple[str, ...]:
        """What has to be installed."""

    @property
    def most_rounds(self) -> int:
        """More rounds than this say nothing new, or take too long."""

    @property
    def walks(self) -> tuple[Walk, ...]:
        """What has to be made; the asks are theirs, one after the other. None where a content is asked for."""

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        """One round: measure → value. BenchError when an answer was wrong."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """wrk with so many connections, each with one request in flight."""

    connections: int
    variety: Variety = "same"

    programs = ("wrk", "ss")
    most_rounds = 100
    walks = ()

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        replies = [check(address, ask) for address, ask in zip(server.addresses, asks, strict=True)]
        self._look(server, asks, cores, max(_MIN_WARM_UP_S, seconds / 4), replies)
        with contextlib.ExitStack() as stack:
            running = [
                stack.enter_context(_start(address, ask, self.variety, self.connections // len(asks), len(asks), cores))
                for address, ask in zip(server.addresses, asks, strict=True)
            ]
            # Each of the different requests has come twice: a memo may keep only what is no stranger.
            first = 2 * _DIFFERENT * count_threads(cores, len(asks)) if self.variety == "10,000" else self.connections
            sizes = [reply.size for reply in replies]
            await_answers(running, server.addresses, self.connections, sizes, max(first, self.connections))
            window = _Window(server, running, sizes)
            wait(running, seconds)
            measures = window.close()
            established = count_established(server.addresses)
            counts = stop_wrk(running)
        check_counts(server, counts)
        if established < self.connections:
            raise BenchError(f"{established} connections were left of {self.connections}")
        for count, reply in zip(counts, replies, strict=True):
            # All are of one length. Those that were under way at the end are in the bytes alone.
            least, most = count.requests * reply.size, (count.requests + self.connections) * reply.size
            if not least <= count.bytes <= most:
                raise BenchError(
                    f"{count.requests} answers of {reply.size} bytes make {count.bytes} bytes: other answers came"
                )
        return {**measures, **summarise_latency(counts)}

    def _look(self, server: Server, asks: list[Ask], cores: Cores, seconds: float, replies: list[Reply]) -> None:
        """The warm-up, in which every answer is looked at."""
        each = max(1, min(self.connections, _LOOK_CONNECTIONS) // len(asks))
        with contextlib.ExitStack() as stack:
            running = [
                stack.enter_context(_start(address, ask, self.variety, each, len(asks), cores, len(reply.body)))
                for address, ask, reply in zip(server.addresses, asks, replies, strict=True)
            ]
            sizes = [reply.size for reply in replies]
            await_answers(running, server.addresses, each * len(asks), sizes, each * len(asks))
            wait(running, seconds)
            counts = stop_wrk(running)
        check_counts(server, counts)


@dataclass(frozen=True, slots=True)
class NewConnections:
    """ab with so many connections at a time, and a new one for every request."""

    connections: int

    programs = ("ab",)
    most_rounds = 3
    walks = ()

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        for address, ask in zip(server.addresses, asks, strict=True):
            check(address, ask)
        requests = _NEW_CONNECTIONS if seconds >= 2 else max(_NEW_CONNECTIONS_QUICK, self.connections)
        before = server.cpu_s()
        with contextlib.ExitStack() as stack:
            running = []
            for (host, port), ask in zip(server.addresses, asks, strict=True):
                each = f"-n{requests // len(asks)}", f"-c{self.connections // len(asks)}"
                # -r counts a broken connection and goes on, instead of ending there.
                command = ["ab", "-q", "-r", *each, f"-s{TIMEOUT_S}", f"http://{host}:{port}{ask.path}"]
                running.append(stack.enter_context(start(command, cores)))
            counts = [parse_ab(listen(process, "ab", _MOST_S)) for process in running]
        check_counts(server, counts)
        for count, ask in zip(counts, asks, strict=True):
            # ab itself holds all against the first.
            if ask.body is not None and count.length != len(ask.body):
                raise BenchError(f"ab got {count.length} bytes, not {len(ask.body)}")
        answers, longest = sum(count.requests for count in counts), max(count.seconds for count in counts)
        return {
            "rate": answers / longest,
            **summarise_cost(server, before, answers, longest),
            **summarise_latency(counts),
        }


@dataclass(frozen=True, slots=True)
class Idle:
    """Connections that have had one answer and are kept open: what each of them holds of the server's memory."""

    connections: int

    programs = ()
    # Later ones find the memory of the first.
    most_rounds = 1
    walks = ()

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        with contextlib.ExitStack() as stack:
            self._open(stack, server, asks, _FIRST_IDLE)
            before = server.rss_bytes()
            self._open(stack, server, asks, self.connections)
            held = server.rss_bytes() - before
        return {"connection_kib": held / self.connections / 1024} if before else {}

    def _open(self, stack: contextlib.ExitStack, server: Server, asks: list[Ask], count: int) -> None:
        for address, ask in zip(server.addresses, asks, strict=True):
            for _ in range(count // len(asks)):
                connection = stack.enter_context(connect(address))
                if exchange_on(connection, address, ask).status != ask.status:
                    raise BenchError(f"another status than {ask.status} on one of {self.connections} connections")


class _Window:
    """What happens on a server from here on, while the load is on: connecting, and the end, are not in it.

    wrk tells what it counted only at its end, but the kernel tells what it has read, and all answers have one length.
    """

    def __init__(self, server: Server, running: "list[subprocess.Popen[str]]", sizes: list[int]) -> None:
        self._server, self._running, self._sizes = server, running, sizes
        self._began, self._answers, self._cpu = time.monotonic(), self._count(), server.cpu_s()

    def _count(self) -> float:
        return sum(read_bytes_in(process.pid) / size for process, size in zip(self._running, self._sizes, strict=True))

    def close(self) -> dict[str, float]:
        """The measures of the server's side."""
        self._server.check_alive()
        seconds, answers = time.monotonic() - self._began, self._count() - self._answers
        if answers <= 0:
            raise BenchError(f"no answer within {seconds:.1f} s")
        return {"rate": answers / seconds, **summarise_cost(self._server, self._cpu, answers, seconds)}


def _start(
    address: Address,
    ask: Ask,
    variety: Variety,
    connections: int,
    clients: int,
    cores: Cores,
    length: int | None = None,
) -> "contextlib.AbstractContextManager[subprocess.Popen[str]]":
    """One of so many clients at the same time. With a `length` of the body it looks at every answer."""
    threads = min(connections, count_threads(cores, clients))
    return start_wrk(write_script(ask, variety, length), address, ask.path, connections, threads, cores, ask.fields)


def check_counts(server: Server, counts: list[Count]) -> None:
    server.check_alive()
    for count in counts:
        if count.wrong:
            raise BenchError(f"{count.errors} among {count.requests} answers")
        if not count.requests:
            raise BenchError("no answer at all")


def summarise_latency(counts: Sequence[Count]) -> dict[str, float]:
    """Of several clients at the same time."""
    requests = sum(count.requests for count in counts)
    return {
        "mean_ms": sum(count.mean_ms * count.requests for count in counts) / requests,
        "p99_ms": max(count.p99_ms for count in counts),
        "max_ms": max(count.max_ms for count in counts),
    }


def summarise_cost(
    server: Server,
    before: dict[int, float],
    answers: float,
    seconds: float,
    now: dict[int, float] | None = None,
) -> dict[str, float]:
    """What so many answers in so many seconds cost the server's processes, if they are ours to look at."""
    now = server.cpu_s() if now is None else now
    if not now:
        return {}
    # Not of each process: what one spent that has ended meanwhile is with its parent.
    total = sum(now.values()) - sum(before.values())
    spent = {pid: cpu_s - before.get(pid, 0.0) for pid, cpu_s in now.items()}
    return {
        "cpu_us": total / answers * 1e6,
        "load": total / seconds * 100,
        # Of those that worked: helpers that were idle are not what the load cost.
        "rss_mib": server.rss_bytes([pid for pid, cpu_s in spent.items() if cpu_s > 0.01 * total]) / 2**20,
    }
