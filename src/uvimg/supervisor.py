"""Several serving processes on the same sockets: started, replaced when they die, renewed at SIGHUP, stopped together.

Each is a fresh `uvimg serve` with the same arguments, so it runs the code and reads the configuration of the moment
in which it starts. The sockets stay open here for as long as anybody serves: a process that dies takes its open
requests with it, but not the connections that wait in its queue, which its successor finds there.
Rule: nothing heavy is imported here, and nothing served; this process must not have a reason to fail.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from uvimg import logs, systemd
from uvimg.config import ConfigError, Settings
from uvimg.core.place import parse_place
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
    """`run` is the door. `load` reads the settings again, `spell_command` says how a process with these is started."""

    def __init__(
        self, settings: Settings, load: Callable[[], Settings], spell_command: Callable[[Mapping[str, Any]], list[str]]
    ) -> None:
        self._settings, self._load, self._spell_command = settings, load, spell_command
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
        settings = self._settings
        places = choose_places(settings.listen, settings.host, settings.port)
        operations = [parse_place(text) for text in settings.operations_listen]
        with contextlib.ExitStack() as shared:
            groups = shared.enter_context(open_sockets(places, settings.processes))
            beside = shared.enter_context(open_sockets(operations, settings.processes))
            self._slots = [_Slot(number, *both) for number, both in enumerate(zip(groups, beside, strict=True))]
            if not self._metrics_dir:
                self._metrics_dir = shared.enter_context(tempfile.TemporaryDirectory(prefix="uvimg-metrics-"))
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
                    starts.create_task(self._fill(slot))
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
        count = f"processes {len(self._slots)}, workers {sum(self._share(slot) for slot in self._slots)}"
        return re.sub(r"workers \d+", count, first.ready_line, count=1)

    def _share(self, slot: _Slot) -> int:
        """How many of the image workers are this process's, which has one at least."""
        total = self._settings.workers or len(os.sched_getaffinity(0))
        each, more = divmod(total, len(self._slots))
        return max(1, each + (slot.number < more))

    # One process

    async def _fill(self, slot: _Slot) -> _Child:
        """Put a new process into this place. ChildFailed when it does not become ready; it has ended then."""
        fds, beside = ([listener.fileno() for listener in group] for group in (slot.listeners, slot.operations))
        # What a process of ours is told beside what we were told.
        ours: dict[str, Any] = {"processes": 0, "listen": [f"fd:{fd}" for fd in fds], "workers": self._share(slot)}
        ours |= {"metrics_dir": self._metrics_dir, "operations_listen": [f"fd:{fd}" for fd in beside]}
        process = await asyncio.create_subprocess_exec(
            *self._spell_command(ours),
            pass_fds=fds + beside,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in systemd.VARIABLES},
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
        slot.child = _Child(process, ready_line, asyncio.get_running_loop().time())
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
                        self._tasks.create_task(self._attend(slot, await self._fill(slot)))
                    except (ChildFailed, OSError) as exc:
                        log.error("%s; trying again in %g s", exc, slot.delay_s)

    # All of them

    async def _renew(self) -> None:
        """One after the other: the new process first, and when it is ready the old one finishes what it has begun.

        The first one that cannot be had ends it, and who served goes on.
        """
        systemd.tell_reloading()
        try:
            self._settings = self._check(self._load())
            for slot in self._slots:
                async with slot.lock:
                    old = slot.child
                    self._tasks.create_task(self._attend(slot, await self._fill(slot)))
                if old is not None:
                    self._retire(old)
            log.info("reloaded: %d processes", len(self._slots))
        except (ConfigError, ChildFailed, OSError) as exc:
            log.error("not reloaded, the processes before go on: %s", exc)
        finally:
            systemd.tell_ready()

    def _check(self, settings: Settings) -> Settings:
        for name in ("listen", "host", "port", "processes", "operations_listen", "metrics_dir"):
            if getattr(settings, name) != getattr(self._settings, name):
                log.warning("the new value of %s counts from the next start on", name)
        return settings

    def _retire(self, child: _Child) -> None:
        task = asyncio.create_task(self._see_off({child.process}, RETIRE))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _end(self) -> None:
        await self._see_off(set(self._processes), signal.SIGTERM)

    async def _see_off(self, processes: set[asyncio.subprocess.Process], by: signal.Signals) -> None:
        """Have them end: by themselves within the grace, else by force."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(by)
        ends = asyncio.gather(*map(self._gone, processes))
        patience_s = self._settings.drain_delay_s + self._settings.grace_s + _MARGIN_S
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.shield(ends)
        except TimeoutError:
            for process in processes & self._processes:
                log.warning("process %d did not end in %g s and is killed", process.pid, patience_s)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await ends
