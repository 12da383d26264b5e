"""Servers to be measured: each in a fresh process, on cores of its own, and what the kernel says it cost.

CPU time is read from the clock that the kernel keeps for every process: nanoseconds, all threads, also those that
have ended. The ticks of /proc/PID/stat are a thousand requests wide, and serve only for children that have ended.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_START_S = 30.0
# Longer than any server here takes to end by itself when its clients are gone.
_STOP_S = 8.0
# Requests that were under way when a load ended take some servers seconds.
_REST_S = 15.0
_IDLE_LOOK_S, _IDLE_SHARE = 0.05, 0.2

Address = tuple[str, int]


class BenchError(Exception):
    """What was to be measured cannot be; the message is one readable line."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started, and where it answers: an address for each client that is to load it.

    One that `loops` speaks no HTTP: it does the work by itself, for as long as it is told at each of its addresses.
    At the places `behind` it those of its processes listen that another of them asks.
    """

    commands: tuple[tuple[str, ...], ...]
    addresses: tuple[Address, ...]
    loops: bool = False
    behind: tuple[Address | Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where. On a machine with one core, or where servers need all, both sides share."""

    server: frozenset[int]
    load: frozenset[int]


def share_cores(processes: int) -> Cores:
    """The last cores for that many server processes, the others for the load."""
    cores = sorted(os.sched_getaffinity(0))
    server = frozenset(cores[-processes:])
    return Cores(server, frozenset(cores) - server or frozenset(cores))


def pin(cores: frozenset[int]) -> list[str]:
    """The beginning of a command that is to run on these cores."""
    return ["taskset", "-c", ",".join(map(str, sorted(cores)))]


def find_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A launched server; it accepts connections when made. Ended by `stop`, which every caller owes it."""

    def __init__(self, name: str, launch: Launch, cores: Cores, log: Path) -> None:
        self.name, self.addresses, self.loops, self._log = name, launch.addresses, launch.loops, log
        self.commands, self._behind = launch.commands, launch.behind
        self._started: list[subprocess.Popen[bytes]] = []
        try:
            with log.open("ab") as output:
                for command in launch.commands:
                    # A session of its own: Ctrl-C is ours, and what it leaves behind can be ended with it.
                    self._started.append(
                        subprocess.Popen(
                            [*pin(cores.server), *command],
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                            start_new_session=True,
                        )
                    )
            self._await_start()
        except BaseException:
            self.stop()
            raise

    def _await_start(self) -> None:
        # Who runs already needs no time to start.
        patience_s = _START_S if self._started else 0.0
        deadline = time.monotonic() + patience_s
        for place in (*self._behind, *self.addresses):
            while True:
                self.check_alive()
                try:
                    _connect(place).close()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        name = place if isinstance(place, Path) else f"{place[0]}:{place[1]}"
                        raise BenchError(f"nobody listens at {name}") from None
                    time.sleep(0.02)

    def check_alive(self) -> None:
        """BenchError, with the last that it said, when a process of it has ended."""
        for process in self._started:
            if process.poll() is not None:
                said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                raise BenchError(f"{self.name} ended with status {process.returncode}: {' '.join(said)}")

    def await_rest(self) -> None:
        """Until it has done what nobody waits for any more, or for long: who is measured next wants that time."""
        deadline = time.monotonic() + _REST_S
        before, now = -1.0, sum(self.cpu_s().values())
        # Who is not given a core spends nothing either, and is ready to.
        while now - before > _IDLE_SHARE * _IDLE_LOOK_S or any(map(_wants_core, self._processes())):
            if time.monotonic() > deadline:
                return
            time.sleep(_IDLE_LOOK_S)
            before, now = now, sum(self.cpu_s().values())

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds so far of each of its processes, children too; those that have ended count with their parents."""
        return {
            pid: seconds + _read_ended_cpu_s(pid)
            for pid in self._processes()
            if (seconds := read_cpu_s(pid)) is not None
        }

    def rss_bytes(self, pids: Sequence[int] | None = None) -> int:
        """What these processes of it, or all, hold in memory."""
        return sum(_read_rss_bytes(pid) for pid in (self._processes() if pids is None else pids))

    def own_bytes(self) -> int:
        """What of that is nobody else's: without what is mapped from files, such as libraries and the store."""
        return sum(_read_rss_bytes(pid, own=True) for pid in self._processes())

    def _processes(self) -> list[int]:
        found, fresh = [], [process.pid for process in self._started]
        while fresh:
            pid = fresh.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    fresh += map(int, children.read_text().split())
        return found

    def stop(self) -> None:
        """SIGTERM, and for whatever is left of it after a while SIGKILL."""
        for process in self._started:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _connect(place: Address | Path) -> socket.socket:
    if not isinstance(place, Path):
        return socket.create_connection(place, 1.0)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(place))
    except OSError:
        connection.close()
        raise
    return connection


def read_cpu_s(pid: int) -> float | None:
    """CPU seconds of a process so far; None when there is none."""
    # CPUCLOCK_SCHED of another process, as clock_getcpuclockid(3) spells it.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


def _read_ended_cpu_s(pid: int) -> float:
    """Of its children that have ended, and theirs: cutime and cstime of proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def _wants_core(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
            if thread.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def _read_rss_bytes(pid: int, *, own: bool = False) -> int:
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except OSError:
        return 0
    return (resident - shared if own else resident) * os.sysconf("SC_PAGE_SIZE")
