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
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from bench.exchange import Ask, Reply, check, connect, exchange_on
from bench.serving import Address, BenchError, Cores, Server, pin

# How the requests of one load differ: not at all; not at all, but by the way that the others take through wrk;
# in target and fields, 10,000 of them; in target and fields, every one.
Variety = Literal["same", "same by Lua", "10,000", "never the same"]
_TIMEOUT_S = 10
_MIN_WARM_UP_S = 0.3
# Enough to look at answers with. Thousands take a while to be made, and are made again when they are counted.
_LOOK_CONNECTIONS = 100
# Where too many come at once for a backlog, the kernel tries again after 1, 3 and 7 seconds.
_CONNECT_S = 30.0
# As the suite promises.
_DIFFERENT = 10_000
# As many as zimg's table was made with, and what is enough to see whether it works.
_NEW_CONNECTIONS = 200_000
_NEW_CONNECTIONS_QUICK = 20_000
_MOST_S = 300.0
# wrk looks every 100 ms whether it is to end; closing thousands of connections takes it longer.
_END_S = 30.0
# The server has its first buffers, caches and code in memory.
_FIRST_IDLE = 100


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
    # Of the body, where the program says it.
    length: int = 0


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
            "count": {"same by Lua": 1, "10,000": _DIFFERENT, "never the same": 0}[variety],
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
        int(number("Document Length")),
    )


# Loads


class Load(Protocol):
    """What a server is put under."""

    @property
    def programs(self) -> tuple[str, ...]:
        """What has to be installed."""

    @property
    def most_rounds(self) -> int:
        """More rounds than this say nothing new, or take too long."""

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        """One round: measure → value. BenchError when an answer was wrong."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """wrk with so many connections, each with one request in flight."""

    connections: int
    variety: Variety = "same"

    programs = ("wrk", "ss")
    most_rounds = 100

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        replies = [check(address, ask) for address, ask in zip(server.addresses, asks, strict=True)]
        self._look(server, asks, cores, max(_MIN_WARM_UP_S, seconds / 4), replies)
        with contextlib.ExitStack() as stack:
            running = [
                stack.enter_context(
                    _start_wrk(address, ask, self.variety, self.connections // len(asks), len(asks), cores)
                )
                for address, ask in zip(server.addresses, asks, strict=True)
            ]
            # Each of the different requests has come twice: a memo may keep only what is no stranger.
            first = 2 * _DIFFERENT * _count_threads(cores, len(asks)) if self.variety == "10,000" else self.connections
            _await_answers(running, server, self.connections, replies, max(first, self.connections))
            window = _Window(server, running, [reply.size for reply in replies])
            _wait(running, seconds)
            measures = window.close()
            established = _count_established(server.addresses)
            counts = _stop_wrk(running)
        _check_counts(server, counts)
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
                stack.enter_context(_start_wrk(address, ask, self.variety, each, len(asks), cores, len(reply.body)))
                for address, ask, reply in zip(server.addresses, asks, replies, strict=True)
            ]
            _await_answers(running, server, each * len(asks), replies, each * len(asks))
            _wait(running, seconds)
            counts = _stop_wrk(running)
        _check_counts(server, counts)


@dataclass(frozen=True, slots=True)
class NewConnections:
    """ab with so many connections at a time, and a new one for every request."""

    connections: int

    programs = ("ab",)
    most_rounds = 3

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        for address, ask in zip(server.addresses, asks, strict=True):
            check(address, ask)
        requests = _NEW_CONNECTIONS if seconds >= 2 else _NEW_CONNECTIONS_QUICK
        before = server.cpu_s()
        with contextlib.ExitStack() as stack:
            running = []
            for (host, port), ask in zip(server.addresses, asks, strict=True):
                each = f"-n{requests // len(asks)}", f"-c{self.connections // len(asks)}"
                # -r counts a broken connection and goes on, instead of ending there.
                command = ["ab", "-q", "-r", *each, f"-s{_TIMEOUT_S}", f"http://{host}:{port}{ask.path}"]
                running.append(stack.enter_context(_start(command, cores)))
            counts = [parse_ab(_listen(process, "ab", _MOST_S)) for process in running]
        _check_counts(server, counts)
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
        return sum(_read_bytes_in(process.pid) / size for process, size in zip(self._running, self._sizes, strict=True))

    def close(self) -> dict[str, float]:
        """The measures of the server's side."""
        self._server.check_alive()
        seconds, answers = time.monotonic() - self._began, self._count() - self._answers
        if answers <= 0:
            raise BenchError(f"no answer within {seconds:.1f} s")
        return {"rate": answers / seconds, **summarise_cost(self._server, self._cpu, answers, seconds)}


def _read_bytes_in(pid: int) -> int:
    try:
        found = re.search(r"^rchar: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        raise BenchError("the load ended too early")
    return int(found[1])


@contextlib.contextmanager
def _start_wrk(
    address: Address,
    ask: Ask,
    variety: Variety,
    connections: int,
    clients: int,
    cores: Cores,
    length: int | None = None,
) -> Iterator["subprocess.Popen[str]"]:
    """One of so many clients at the same time. With a `length` of the body it looks at every answer."""
    threads = min(connections, _count_threads(cores, clients))
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(write_script(ask, variety, length))
        script.flush()
        # It is stopped by SIGINT: its own -d knows whole seconds only, and is for the case that we are killed.
        command = ["wrk", f"-t{threads}", f"-c{connections}", "-d15m", f"--timeout={_TIMEOUT_S}s", "-s", script.name]
        for name, value in ask.fields:
            command += ["-H", f"{name}: {value}"]
        with _start([*command, f"http://{address[0]}:{address[1]}{ask.path}"], cores) as process:
            yield process


def _await_answers(
    running: "list[subprocess.Popen[str]]", server: Server, connections: int, replies: list[Reply], answers: int
) -> None:
    """Until all connections are made, and about so many answers have come since."""
    deadline = time.monotonic() + _CONNECT_S
    wanted: list[int] = []
    while True:
        established = _count_established(server.addresses)
        if not wanted and established >= connections:
            each = answers // len(running)
            wanted = [
                _read_bytes_in(process.pid) + each * reply.size for process, reply in zip(running, replies, strict=True)
            ]
        if wanted and all(_read_bytes_in(process.pid) >= size for process, size in zip(running, wanted, strict=True)):
            return
        _check_running(running)
        if time.monotonic() > deadline:
            raise BenchError(
                f"{established} of {connections} connections after {_CONNECT_S:g} s, and not {answers} answers"
            )
        time.sleep(0.02)


def _count_threads(cores: Cores, clients: int) -> int:
    """Of each wrk. More than four load no server harder."""
    return min(4, max(1, len(cores.load) // clients))


def _stop_wrk(running: "list[subprocess.Popen[str]]") -> list[Count]:
    for process in running:
        process.send_signal(signal.SIGINT)
    return [parse_wrk(_listen(process, "wrk", _END_S)) for process in running]


def _listen(process: "subprocess.Popen[str]", name: str, seconds: float) -> str:
    """All that it says until it ends, which must be within so many seconds."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        raise BenchError(f"{name} did not end within {seconds:g} s") from None


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
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        _check_running(running)
        time.sleep(min(left, 0.25))


def _check_running(running: "list[subprocess.Popen[str]]") -> None:
    """BenchError, with what it said, when a load generator has ended too early."""
    for process in running:
        if process.poll() is not None:
            raise BenchError(f"the load ended too early: {' '.join(process.communicate()[0].split())[-200:]}")


def _count_established(addresses: Sequence[Address]) -> int:
    """Connections to these addresses, as the kernel counts them on the clients' side."""
    counted = 0
    for host, port in addresses:
        command = ["ss", "-Htn", "state", "established", "dst", f"{host}:{port}"]
        counted += subprocess.run(command, capture_output=True, check=True).stdout.count(b"\n")
    return counted


def _check_counts(server: Server, counts: list[Count]) -> None:
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


def summarise_cost(server: Server, before: dict[int, float], answers: float, seconds: float) -> dict[str, float]:
    """What so many answers in so many seconds cost the server's processes, if they are ours to look at."""
    spent = {pid: now - before.get(pid, 0.0) for pid, now in server.cpu_s().items()}
    if not spent:
        return {}
    total = sum(spent.values())
    return {
        "cpu_us": total / answers * 1e6,
        "load": total / seconds * 100,
        # Of those that worked: helpers that were idle are not what the load cost.
        "rss_mib": server.rss_bytes([pid for pid, cpu_s in spent.items() if cpu_s > 0.01 * total]) / 2**20,
    }
