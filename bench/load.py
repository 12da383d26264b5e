"""Load on a server, and whether every answer to it was the right one.

An answer is looked at whole before any load: status, fields, body. The warm-up has wrk look at every status and
length. The measured part only counts, because looking takes wrk the time it needs to keep a fast server busy: but
wrk counts statuses of 400 and more, broken connections and time-outs itself, and since all answers have one length,
its bytes tell whether any other came.
"""

import contextlib
import json
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bench.serving import Address, BenchError, Cores, Server, pin

# How the requests of one load differ: not at all; not at all, but by the way that the others take through wrk;
# in target and fields, 10,000 of them; in target and fields, every one.
Variety = Literal["same", "same by Lua", "10,000", "never the same"]
_TIMEOUT_S = 10
_MIN_WARM_UP_S = 0.3


@dataclass(frozen=True, slots=True)
class Ask:
    """A GET and the answer that must come to it."""

    path: str
    status: int
    # None: whatever comes.
    body: bytes | None
    fields: tuple[tuple[str, str], ...] = ()
    # Names of fields, and how their values begin.
    expected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Count:
    """What a load generator counted in one run."""

    requests: int
    seconds: float
    bytes: int
    wrong: int
    mean_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    # What of `wrong` is which, in words.
    errors: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    fields: dict[str, str]
    body: bytes
    # Of the whole answer as it came.
    size: int


# Looking at one answer


def exchange(address: Address, ask: Ask) -> Reply:
    """Ask once, on a connection of its own."""
    with socket.create_connection(address, _TIMEOUT_S) as connection:
        return exchange_on(connection, address, ask)


def exchange_on(connection: socket.socket, address: Address, ask: Ask) -> Reply:
    """Ask once; the answer must have a Content-Length or no body. BenchError when none comes."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in ask.fields)
    connection.sendall(f"GET {ask.path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n{fields}\r\n".encode())
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            data += _receive(connection)
        head, _, _ = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        status = int(lines[0].split(" ")[1])
        length = 0 if status in (204, 304) else int(found.get("content-length", "0"))
        while len(data) < len(head) + 4 + length:
            data += _receive(connection)
    except (OSError, ValueError, IndexError) as exc:
        raise BenchError(f"no HTTP answer to GET {ask.path}: {exc}") from None
    return Reply(status, found, data[len(head) + 4 :], len(data))


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(262_144)
    if not data:
        raise ValueError("the connection was closed")
    return data


def check(address: Address, ask: Ask) -> Reply:
    """The whole answer, which must be the expected one: BenchError says what is wrong with it."""
    reply = exchange(address, ask)
    if reply.status != ask.status:
        raise BenchError(f"GET {ask.path} was answered {reply.status} instead of {ask.status}")
    if ask.body is not None and reply.body != ask.body:
        raise BenchError(
            f"GET {ask.path} was answered with another body: {len(reply.body)} bytes, {len(ask.body)} expected"
        )
    for name, start in ask.expected:
        if not reply.fields.get(name.lower(), "").startswith(start):
            raise BenchError(f"GET {ask.path} was answered with {name}: {reply.fields.get(name.lower())!r}")
    return reply


# wrk

_SCRIPT = """
-- Written by bench/load.py.
local workers = {}
wrong = 0

function setup(thread)
    table.insert(workers, thread)
end

%(requests)s
%(response)s
function done(summary, latency, requests)
    local seen = 0
    for _, thread in ipairs(workers) do
        seen = seen + thread:get("wrong")
    end
    local e = summary.errors
    io.write(string.format(
        'COUNT {"requests":%%d,"us":%%d,"bytes":%%d,"connect":%%d,"read":%%d,"write":%%d,"status":%%d,"timeout":%%d,' ..
        '"seen":%%d,"mean_us":%%.1f,"p99_us":%%.1f,"max_us":%%.1f}\\n',
        summary.requests, summary.duration, summary.bytes, e.connect, e.read, e.write, e.status, e.timeout,
        seen, latency.mean, latency:percentile(99), latency.max))
end
"""
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
            "count": {"same by Lua": 1, "10,000": 10_000, "never the same": 0}[variety],
            "make": "wrk.format()" if variety == "same by Lua" else "make(number)",
            "next": "return make(last)" if variety == "never the same" else _VARIED_NEXT,
        }
    response = "" if length is None else _LOOK % (ask.status, length)
    return _SCRIPT % {"requests": requests, "response": response}


def parse_wrk(text: str) -> Count:
    """What wrk printed with our script. BenchError when it is something else."""
    found = re.search(r"^COUNT (\{.*\})$", text, re.MULTILINE)
    if found is None:
        raise BenchError(f"wrk says: {' '.join(text.split())[-200:]}")
    count = json.loads(found[1])
    errors = {
        "failed connections": count["connect"],
        "broken answers": count["read"] + count["write"],
        "statuses of 400 and more": count["status"],
        "time-outs": count["timeout"],
        "wrong answers": count["seen"],
    }
    return Count(
        *(count["requests"], count["us"] / 1e6, count["bytes"], sum(errors.values())),
        *(count["mean_us"] / 1e3, count["p99_us"] / 1e3, count["max_us"] / 1e3),
        ", ".join(f"{number} {name}" for name, number in errors.items() if number),
    )


def parse_ab(text: str) -> Count:
    """What `ab` printed."""

    def number(name: str) -> float:
        found = re.search(rf"^{name}:\s+([\d.]+)", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    if "Complete requests:" not in text:
        raise BenchError(f"ab says: {' '.join(text.split())[-200:]}")
    errors = {"failed requests": int(number("Failed requests")), "other statuses": int(number("Non-2xx responses"))}
    mean = re.search(r"^Total:\s+\d+\s+(\d+)\s+[\d.]+\s+\d+\s+(\d+)", text, re.MULTILINE)
    p99 = re.search(r"^\s+99%\s+(\d+)", text, re.MULTILINE)
    return Count(
        *(int(number("Complete requests")), number("Time taken for tests"), int(number("Total transferred"))),
        sum(errors.values()),
        *(float(mean[1]) if mean else 0.0, float(p99[1]) if p99 else 0.0, float(mean[2]) if mean else 0.0),
        ", ".join(f"{number} {name}" for name, number in errors.items() if number),
    )


# Loads


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """wrk with so many connections, each with one request in flight."""

    connections: int
    variety: Variety = "same"
    program = "wrk"

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        """One warm-up and one measured run. BenchError when an answer was wrong."""
        replies = [check(address, ask) for address, ask in zip(server.addresses, asks, strict=True)]
        lengths = [len(reply.body) for reply in replies]
        self._load(server, asks, cores, max(_MIN_WARM_UP_S, seconds / 4), lengths)
        before = server.cpu_s()
        counts = self._load(server, asks, cores, seconds)
        for count, reply in zip(counts, replies, strict=True):
            if self.variety == "same":
                _check_size(count, reply.size, self.connections)
        return summarise(counts, server, before)

    def _load(
        self, server: Server, asks: list[Ask], cores: Cores, seconds: float, lengths: list[int] | None = None
    ) -> list[Count]:
        """Load all addresses at once. With `lengths` of the bodies that must come every answer is looked at."""
        each = self.connections // len(asks)
        threads = min(4, each, max(1, len(cores.load) // len(asks)))
        with contextlib.ExitStack() as stack:
            running = []
            for number, ((host, port), ask) in enumerate(zip(server.addresses, asks, strict=True)):
                script = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".lua"))
                script.write(write_script(ask, self.variety, None if lengths is None else lengths[number]))
                script.flush()
                # It is stopped by SIGINT: its own -d knows whole seconds only.
                command = ["wrk", f"-t{threads}", f"-c{each}", "-d1h", "--timeout", f"{_TIMEOUT_S}s", "-s", script.name]
                for name, value in ask.fields:
                    command += ["-H", f"{name}: {value}"]
                running.append(stack.enter_context(_start([*command, f"http://{host}:{port}{ask.path}"], cores)))
            _wait(running, seconds)
            for process in running:
                process.send_signal(signal.SIGINT)
            counts = [parse_wrk(process.communicate(timeout=30)[0]) for process in running]
        _check_counts(server, counts)
        return counts


@contextlib.contextmanager
def _start(command: list[str], cores: Cores) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [*pin(cores.load), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _wait(running: "list[subprocess.Popen[str]]", seconds: float) -> None:
    """So long, or until one of them ends too early."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and all(process.poll() is None for process in running):
        time.sleep(min(left, 0.25))


def _check_counts(server: Server, counts: list[Count]) -> None:
    server.check_alive()
    for count in counts:
        if count.wrong:
            raise BenchError(f"{count.errors} among {count.requests} answers")
        if not count.requests:
            raise BenchError("no answer at all")


def _check_size(count: Count, size: int, connections: int) -> None:
    # Answers that were under way at the end are in the bytes alone.
    if not count.requests * size <= count.bytes <= (count.requests + connections) * size:
        raise BenchError(f"{count.requests} answers of {size} bytes make {count.bytes} bytes: other answers came")


def summarise(counts: list[Count], server: Server, before: dict[int, float]) -> dict[str, float]:
    """The measures of one round: loads at the same time add up."""
    spent = {pid: seconds - before.get(pid, 0.0) for pid, seconds in server.cpu_s().items()}
    requests, longest = sum(count.requests for count in counts), max(count.seconds for count in counts)
    busy = [pid for pid, seconds in spent.items() if seconds > 0.01 * sum(spent.values())]
    measures = {
        "rate": sum(count.requests / count.seconds for count in counts),
        "mean_ms": sum(count.mean_ms * count.requests for count in counts) / requests,
        "p99_ms": max(count.p99_ms for count in counts),
        "max_ms": max(count.max_ms for count in counts),
    }
    if spent:
        measures["cpu_us"] = sum(spent.values()) / requests * 1e6
        measures["load"] = sum(spent.values()) / longest * 100
        # Of those that worked: helpers that were idle are not what the load cost.
        measures["rss_mib"] = server.rss_bytes(busy) / 2**20
    return measures
