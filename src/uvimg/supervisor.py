"""Several serving processes on the same sockets: started, replaced when they die, renewed at SIGHUP, stopped together.

Each is a fresh `uvimg serve`, so it runs the code of the moment in which it starts. Its settings are those of the start
or of the last reload, told by its environment: one that is replaced must not read a file that is just being written.
The sockets stay open here for as long as anybody serves: a process that dies takes its open
requests with it, but not the connections that wait in its queue, which its successor finds there.
Rule: nothing heavy is imported here, and nothing served; this process must not have a reason to fail.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from uvimg import config, logs, systemd
from uvimg.config import ENVIRONMENT_PREFIX, ConfigError, Settings
from uvimg.core.place import parse_place
from uvimg.cores import usable_cores
from uvimg.web.listen import choose_places, open_sockets

log = logging.getLogger("uvimg.supervisor")

# Tells a process that its successor is there: it finishes what it has begun.
RETIRE = signal.SIGUSR1

# A process starts its workers before it is ready, and they have a minute themselves.
_START_S = 90.0
# Beyond the grace, for workers and the store.
_MARGIN_S = 5.0
# Who has lived so long may die again without a delay for its successor.
_STEADY_S = 10.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 5.0


# What the sockets and the processes' number are made from, which stay.
_OF_THE_START = ("listen", "host", "port", "processes", "operations_listen", "metrics_dir")


class ChildFailed(Exception):
    """A process ended before it was ready; it has said why on stderr itself."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a new process ended with status {status} before it was ready; its own message is above")
        self.status = status


@dataclass(eq=False, slots=True)
class _Child:
    process: asyncio.subprocess.Process
    ready_line: str
    ready_at: float
    # By its own settings, not by those of its successor.
    patience_s: float


@dataclass(eq=False, slots=True)
class _Slot:
    """A place for one process at a time, with the sockets that all of them inherit."""

    number: int
    listeners: list[socket.socket]
    # For /health and /metrics alone, where they have a place of their own.
    operations: list[socket.socket]
    child: _Child | None = None
    # Before the next successor of one that died young.
    delay_s: float = 0.0
    # Whoever changes the child holds it: a death and a reload may meet.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Supervisor:
    """`run` is the door. `load` reads the settings again, `command` starts a process."""

    def __init__(self, settings: Settings, load: Callable[[], Settings], command: Sequence[str]) -> None:
        # Those in force, and those of the start, some of which stay in force.
        self._settings = self._first = settings
        self._load, self._command = load, command
        self._slots: list[_Slot] = []
        self._metrics_dir = settings.metrics_dir
        # All that live, those too that are not ready yet or have been retired.
        self._processes: set[asyncio.subprocess.Process] = set()
        self._retiring: set[asyncio.Task[None]] = set()

    async def run(self, announce: Callable[[str], None]) -> None:
        """Until SIGTERM or SIGINT. Raises CannotListen, and ChildFailed when they cannot be started at all."""
        logs.set_up(self._settings.log, self._settings.log_level)
        stop, renew = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number, event in ((signal.SIGTERM, stop), (signal.SIGINT, stop), (signal.SIGHUP, renew)):
            loop.add_signal_handler(number, event.set)
        # For our processes alone.
        signal.signal(RETIRE, signal.SIG_IGN)
        settings = self._settings
        places = choose_places(settings.listen, settings.host, settings.port)
        operations = [parse_place(text) for text in settings.operations_listen]
        with contextlib.ExitStack() as shared:
            groups = shared.enter_context(open_sockets(places, settings.processes))
            beside = shared.enter_context(open_sockets(operations, settings.processes))
            self._slots = [_Slot(number, *both) for number, both in enumerate(zip(groups, beside, strict=True))]
            if not self._metrics_dir:
                runtime = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0] or None
                folder = tempfile.TemporaryDirectory(prefix="uvimg-metrics-", dir=runtime)
                self._metrics_dir = shared.enter_context(folder)
            serving = asyncio.create_task(self._serve(announce, renew))
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                systemd.tell_stopping()
                # Here they are only held: once the processes close theirs too, nobody is let in any more.
                for slot in self._slots:
                    for listener in slot.listeners:
                        listener.close()
                stopped.cancel()
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                await self._end()
            if not serving.cancelled():
                serving.result()
        log.info("stopped")

    async def _serve(self, announce: Callable[[str], None], renew: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as starts:
                for slot in self._slots:
                    starts.create_task(self._fill(slot, self._settings))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        announce(self._describe())
        systemd.tell_ready()
        async with asyncio.TaskGroup() as self._tasks:
            for slot in self._slots:
                assert slot.child is not None
                self._tasks.create_task(self._attend(slot, slot.child))
            while True:
                await renew.wait()
                renew.clear()
                await self._renew()

    def _describe(self) -> str:
        """The line that a person waits for: a process's own, and how many there are."""
        first = self._slots[0].child
        assert first is not None
        count = (
            f"processes {len(self._slots)}, workers {sum(self._share(slot, self._settings) for slot in self._slots)}"
        )
        if ", libvips" not in first.ready_line:
            return f"{first.ready_line.removesuffix(')')}, processes {len(self._slots)})"
        return re.sub(r"workers \d+(?=, libvips)", count, first.ready_line, count=1)

    def _share(self, slot: _Slot, settings: Settings) -> int:
        """How many of the image workers are this process's, which has one at least."""
        total = settings.workers or usable_cores()
        each, more = divmod(total, len(self._slots))
        return max(1, each + (slot.number < more))

    # One process

    async def _fill(self, slot: _Slot, settings: Settings) -> _Child:
        """Put a new process into this place. ChildFailed when it does not become ready; it has ended then."""
        fds, beside = ([listener.fileno() for listener in group] for group in (slot.listeners, slot.operations))
        told = dataclasses.replace(
            settings,
            processes=0,
            workers=self._share(slot, settings),
            listen=tuple(f"fd:{fd}" for fd in fds),
            operations_listen=tuple(f"fd:{fd}" for fd in beside),
            metrics_dir=self._metrics_dir,
        )
        hidden = (ENVIRONMENT_PREFIX, *systemd.VARIABLES)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        process = await asyncio.create_subprocess_exec(
            *self._command,
            pass_fds=fds + beside,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=environment | config.to_environment(told),
        )
        self._processes.add(process)
        try:
            assert process.stdout is not None
            async with asyncio.timeout(_START_S):
                ready_line = (await process.stdout.readline()).decode().strip()
            if not ready_line:
                raise ChildFailed(await self._gone(process))
        except TimeoutError:
            process.kill()
            await self._gone(process)
            raise ChildFailed(1) from None
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        patience_s = settings.drain_delay_s + settings.grace_s + _MARGIN_S
        slot.child = _Child(process, ready_line, asyncio.get_running_loop().time(), patience_s)
        return slot.child

    async def _gone(self, process: asyncio.subprocess.Process) -> int:
        status = await process.wait()
        self._processes.discard(process)
        return status

    async def _attend(self, slot: _Slot, child: _Child) -> None:
        """Wait for a process's end, and see to a successor unless it has one."""
        status = await self._gone(child.process)
        if slot.child is not child:
            return
        log.warning("process %d ended with status %d and is replaced", child.process.pid, status)
        if asyncio.get_running_loop().time() - child.ready_at > _STEADY_S:
            slot.delay_s = 0.0
        while slot.child is child:
            await asyncio.sleep(slot.delay_s)
            slot.delay_s = min(_LONGEST_DELAY_S, 2 * slot.delay_s or _FIRST_DELAY_S)
            async with slot.lock:
                # A reload may have been first.
                if slot.child is child:
                    try:
                        self._tasks.create_task(self._attend(slot, await self._fill(slot, self._settings)))
                    except (ChildFailed, OSError) as exc:
                        log.error("%s; trying again in %g s", exc, slot.delay_s)

    # All of them

    async def _renew(self) -> None:
        """One after the other: the new process first, and when it is ready the old one finishes what it has begun.

        The first one that cannot be had ends it, and who served goes on.
        """
        systemd.tell_reloading()
        renewed = 0
        try:
            settings = self._check(self._load())
            for slot in self._slots:
                async with slot.lock:
                    old = slot.child
                    self._tasks.create_task(self._attend(slot, await self._fill(slot, settings)))
                renewed += 1
                if old is not None:
                    self._retire(old)
            self._settings = settings
            log.info("reloaded: %d processes", renewed)
        except (ConfigError, ChildFailed, OSError) as exc:
            went = f"only {renewed} of {len(self._slots)} processes" if renewed else "nothing"
            log.error("%s was reloaded, the others go on as before: %s", went, exc)
        systemd.tell_ready()

    def _check(self, settings: Settings) -> Settings:
        """The new settings, as far as they count before the next start."""
        for name in _OF_THE_START:
            if getattr(settings, name) != getattr(self._first, name):
                log.warning("the new value of %s counts from the next start on", name)
        return dataclasses.replace(settings, **{name: getattr(self._first, name) for name in _OF_THE_START})

    def _retire(self, child: _Child) -> None:
        task = asyncio.create_task(self._see_off({child.process}, RETIRE, child.patience_s))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _end(self) -> None:
        children = [slot.child for slot in self._slots if slot.child is not None]
        patience_s = max((child.patience_s for child in children), default=_MARGIN_S)
        await self._see_off(set(self._processes), signal.SIGTERM, patience_s)

    async def _see_off(self, processes: set[asyncio.subprocess.Process], by: signal.Signals, patience_s: float) -> None:
        """Have them end: by themselves within the grace, else by force."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(by)
        ends = asyncio.gather(*map(self._gone, processes))
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.shield(ends)
        except TimeoutError:
            for process in processes & self._processes:
                log.warning("process %d did not end in %g s and is killed", process.pid, patience_s)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await ends
