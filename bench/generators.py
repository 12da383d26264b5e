"""wrk and ab as processes: started on their cores, listened to while they run, their last words read.

What happens meanwhile the kernel tells: the bytes that a client has read, its CPU time and its connections.
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
from typing import Any

from bench.serving import Address, BenchError, Cores, pin

TIMEOUT_S = 10
# Where too many come at once for a backlog, the kernel tries again after 1, 3 and 7 seconds.
_CONNECT_S = 30.0
# wrk looks every 100 ms whether it is to end; closing thousands of connections takes it longer.
_END_S = 30.0


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
    thread:set("first", #workers)
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
        '"seen":%%d,"mean_us":%%.1f,"p50_us":%%.1f,"p99_us":%%.1f,"max_us":%%.1f}\\n',
        summary.requests, summary.duration, summary.bytes, e.connect, e.read, e.write, e.status, e.timeout,
        seen, latency.mean, latency:percentile(50), latency:percentile(99), latency.max))
end
"""


def write_wrk_script(requests: str, response: str) -> str:
    """A script that counts. Both parts are Lua: what is asked, and what is looked at (it adds to `wrong`)."""
    return _SCRIPT % {"requests": requests, "response": response}


def read_count(text: str) -> dict[str, Any]:
    """The last line of our script among what wrk printed. BenchError when there is none."""
    found = re.search(r"^COUNT (\{.*\})$", text, re.MULTILINE)
    if found is None:
        raise BenchError(f"wrk says: {' '.join(text.split())[-200:]}")
    count: dict[str, Any] = json.loads(found[1])
    return count


def parse_wrk(text: str) -> Count:
    """What wrk counted with our script, where no answer may be an error."""
    count = read_count(text)
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


# Processes


@contextlib.contextmanager
def start_wrk(
    script_text: str,
    address: Address,
    path: str,
    connections: int,
    threads: int,
    cores: Cores,
    fields: Sequence[tuple[str, str]] = (),
    timeout_s: int = TIMEOUT_S,
) -> Iterator["subprocess.Popen[str]"]:
    """wrk with a script from `write_wrk_script`. `stop_wrk` ends it and reads what it counted."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(script_text)
        script.flush()
        # It is stopped by SIGINT: its own -d knows whole seconds only, and is for the case that we are killed.
        command = ["wrk", f"-t{threads}", f"-c{connections}", "-d60m", f"--timeout={timeout_s}s", "-s", script.name]
        for name, value in fields:
            command += ["-H", f"{name}: {value}"]
        with start([*command, f"http://{address[0]}:{address[1]}{path}"], cores) as process:
            yield process


def await_answers(
    running: "list[subprocess.Popen[str]]",
    addresses: Sequence[Address],
    connections: int,
    sizes: Sequence[int],
    answers: int,
) -> None:
    """Until all connections are made, and about so many answers, of these bytes at each address, have come since."""
    deadline = time.monotonic() + _CONNECT_S
    wanted: list[int] = []
    while True:
        established = count_established(addresses)
        if not wanted and established >= connections:
            each = answers // len(running)
            wanted = [read_bytes_in(process.pid) + each * size for process, size in zip(running, sizes, strict=True)]
        if wanted and all(read_bytes_in(process.pid) >= size for process, size in zip(running, wanted, strict=True)):
            return
        _check_running(running)
        if time.monotonic() > deadline:
            raise BenchError(
                f"{established} of {connections} connections after {_CONNECT_S:g} s, and not {answers} answers"
            )
        time.sleep(0.02)


def count_threads(cores: Cores, clients: int) -> int:
    """Of each wrk. More than four load no server harder."""
    return min(4, max(1, len(cores.load) // clients))


def stop_wrk(running: "list[subprocess.Popen[str]]") -> list[Count]:
    return [parse_wrk(text) for text in end_wrk(running)]


def end_wrk(running: "list[subprocess.Popen[str]]") -> list[str]:
    """All that they have to say."""
    for process in running:
        process.send_signal(signal.SIGINT)
    return [listen(process, "wrk", _END_S) for process in running]


def listen(process: "subprocess.Popen[str]", name: str, seconds: float) -> str:
    """All that it says until it ends, which must be within so many seconds."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        raise BenchError(f"{name} did not end within {seconds:g} s") from None


@contextlib.contextmanager
def start(command: list[str], cores: Cores) -> Iterator["subprocess.Popen[str]"]:
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
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait(running: "list[subprocess.Popen[str]]", seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        _check_running(running)
        time.sleep(min(left, 0.25))


def _check_running(running: "list[subprocess.Popen[str]]") -> None:
    """BenchError, with what it said, when a load generator has ended too early."""
    for process in running:
        if process.poll() is not None:
            raise BenchError(f"the load ended too early: {' '.join(process.communicate()[0].split())[-200:]}")


def count_established(addresses: Sequence[Address]) -> int:
    """Connections to these addresses, as the kernel counts them on the clients' side."""
    counted = 0
    for host, port in addresses:
        command = ["ss", "-Htn", "state", "established", "dst", f"{host}:{port}"]
        counted += subprocess.run(command, capture_output=True, check=True).stdout.count(b"\n")
    return counted


def read_bytes_in(pid: int) -> int:
    """What a load generator has read so far."""
    try:
        found = re.search(r"^rchar: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        raise BenchError("the load ended too early")
    return int(found[1])
