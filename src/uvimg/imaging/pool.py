"""Image work, done in child processes.

libvips may crash or hang on a hostile file, so it never runs in the server. A child does one job at a
time; past its deadline it is killed and replaced, and only the request that it worked for fails.
Rule: the parent side never imports pyvips.
Surprise: a job whose caller has gone is given a moment to end before its worker is killed: most jobs
are shorter than the start of a new worker, and a browser that scrolls past cancels many.
"""

import asyncio
import contextlib
import logging
import os
import random
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from uvimg.core.errors import (
    BeyondLimits,
    NotFound,
    Overloaded,
    ScriptFailed,
    TooSlow,
    Undecodable,
    UvimgError,
    WorkerFailed,
)
from uvimg.core.formats import Format
from uvimg.core.message import Content, FilePart
from uvimg.imaging import (
    PREFIX,
    Inspected,
    Job,
    Learn,
    Learnt,
    Order,
    Printed,
    Ready,
    Refused,
    Rendered,
    Reply,
    encode_frame,
)

log = logging.getLogger("uvimg.imaging")
script_log = logging.getLogger("uvimg.script")

Lane = Literal["uploads", "renditions"]

# A worker imports libvips and tries every codec before it is ready: a third of a second on a quiet core.
_START_TIMEOUT_S = 60.0
_ABANDON_GRACE_S = 1.0
# A replaced worker ends by itself when its socket does, unless it hangs in some library's last words.
_FAREWELL_S = 5.0
# A decoder that was taken over may not make the server hold whatever it likes.
_MAX_HEAD_BYTES = 1 << 16
_MAX_BODY_BYTES = 1 << 29
# What a child needs to find its libraries; no secret of the server's environment reaches it.
_PASSED_ON = (
    *("PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_CONF", "MALLOC_ARENA_MAX"),
)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`queue_limit` counts the jobs that wait in one lane; `jobs_per_worker` is 0 for no end.

    `script` is what every worker learns before its first job, with its text.
    """

    workers: int
    queue_limit: int
    timeout_s: float
    memory_bytes: int
    jobs_per_worker: int
    sandbox: Literal["auto", "require", "off"]
    formats: tuple[Format, ...]
    script: tuple[Learn, bytes] | None = None


class WorkerDied(Exception):
    """The child went away in the middle of a job or before it was ready."""


class ScriptError(Exception):
    """What a script failed of, with its file and line."""


class Pool:
    """Workers and the jobs that wait for them. `run` is the door."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._workers: set[_Worker] = set()
        self._idle: deque[_Worker] = deque()
        self._lanes: dict[Lane, deque[asyncio.Future[_Worker]]] = {"uploads": deque(), "renditions": deque()}
        self._last_lane: Lane = "renditions"
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        # In the clock's seconds; None while there is a worker.
        self._workerless_since: float | None = None
        # Since the start, for the metrics.
        self.given, self.refused = Counter[Lane](), Counter[Lane]()
        self.died = self.recycled = self.timeouts = 0

    async def start(self) -> Ready:
        """Start every worker and say what they can do. WorkerDied when they cannot be started as configured."""

        async def start_one() -> Ready:
            worker = await _start_worker(self._settings)
            self._welcome(worker)
            return worker.ready

        try:
            # Every start comes to its end, also when one fails or we are cancelled: none is left to live on.
            started = await asyncio.gather(
                *(start_one() for _ in range(self._settings.workers)), return_exceptions=True
            )
            for outcome in started:
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:
            await self.stop()
            raise
        assert isinstance(started[0], Ready)
        return started[0]

    async def stop(self) -> None:
        """Let no worker live on. Jobs that wait or are in flight end as Overloaded."""
        self._stopping = True
        for line in self._lanes.values():
            while line:
                waiting = line.popleft()
                if not waiting.done():
                    # Not cancelled: to those who wait that would look like their own cancellation.
                    waiting.set_exception(Overloaded())
        for worker in list(self._workers):
            worker.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *(worker.exited() for worker in self._workers), return_exceptions=True)

    async def run(self, job: Job, original: Content, lane: Lane) -> tuple[Inspected | Rendered, bytes]:
        """Have a job done. `original` is not used any more when this returns or raises.

        Raises Overloaded at once when the lane is full, TooSlow past the deadline, Undecodable and
        BeyondLimits for the image's own faults, NotFound and ScriptFailed for what a script makes of its type,
        WorkerFailed when two workers died of it.
        """
        assert isinstance(original, bytes) or original.start == 0, "a worker is given whole files"
        for attempt in range(2):
            try:
                worker = await self._take(lane, again=attempt > 0)
            except Overloaded:
                self.refused[lane] += 1
                raise
            if not attempt:
                self.given[lane] += 1
            try:
                # Here and not in the task: nothing may use `original` once a cancelled caller has gone.
                told = worker.tell(job, original)
            except BaseException:
                worker.kill()
                raise
            work = asyncio.create_task(self._work(worker, told))
            try:
                answer, body = await asyncio.shield(work)
            except asyncio.CancelledError:
                if not work.done():
                    worker.kill_later(_ABANDON_GRACE_S)
                    self._keep(_settle(work))
                raise
            except WorkerDied:
                log.warning("a worker died of a job of the lane %s", lane)
                continue
            if isinstance(answer, Refused):
                _log_printed(answer.printed)
                if answer.kind == "script":
                    # Where it failed is for the log alone.
                    raise ScriptFailed() from ScriptError(answer.detail)
                raise _translate(answer)
            assert isinstance(answer, Inspected | Rendered)
            if isinstance(answer, Rendered):
                _log_printed(answer.printed)
            return answer, body
        raise WorkerFailed()

    @property
    def waiting(self) -> int:
        """How many jobs wait for a worker."""
        return sum(self.queues.values())

    @property
    def queues(self) -> dict[Lane, int]:
        """How many jobs wait for a worker in each lane."""
        return {lane: len(line) for lane, line in self._lanes.items()}

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    @property
    def idle(self) -> int:
        """How many workers have nothing to do."""
        return len(self._idle)

    @property
    def workerless_s(self) -> float:
        """For how long there has been no worker alive, 0 while there is one."""
        return 0.0 if self._workerless_since is None else time.monotonic() - self._workerless_since

    async def _take(self, lane: Lane, *, again: bool) -> "_Worker":
        """An idle worker, now or in turn. Whoever takes one hands it to `_work`, which gives it back.

        `again` is for a job whose worker died: it has been admitted and has waited already.
        """
        if self._stopping:
            raise Overloaded()
        while self._idle:
            worker = self._idle.popleft()
            if not worker.is_gone:
                return worker
        line = self._lanes[lane]
        future: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        if again:
            line.appendleft(future)
        elif len(line) < self._settings.queue_limit:
            line.append(future)
        else:
            raise Overloaded()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await future
        except BaseException as exc:
            if future in line:
                line.remove(future)
            elif not future.cancelled() and future.exception() is None:
                # Handed a worker in the very moment in which the caller went.
                self._offer(future.result())
            if isinstance(exc, TimeoutError):
                raise Overloaded() from None
            raise

    def _offer(self, worker: "_Worker") -> None:
        """A free worker goes to who waits, uploads and renditions by turns, or is idle."""
        if worker.dead:
            return
        order: list[Lane] = ["uploads", "renditions"] if self._last_lane == "renditions" else ["renditions", "uploads"]
        for lane in order:
            line = self._lanes[lane]
            while line:
                future = line.popleft()
                if not future.done():
                    self._last_lane = lane
                    future.set_result(worker)
                    return
        self._idle.append(worker)

    async def _work(self, worker: "_Worker", told: bool) -> tuple[Reply, bytes]:
        """Wait for the answer to the job that a worker was told; it is idle or on its way out afterwards."""
        try:
            if not told:
                raise EOFError
            async with asyncio.timeout(self._settings.timeout_s):
                result = await worker.reply()
        except TimeoutError:
            self.timeouts += 1
            log.warning("a worker was killed: its job took longer than %g s", self._settings.timeout_s)
            worker.kill()
            raise TooSlow() from None
        except (OSError, EOFError) as exc:
            worker.kill()
            raise WorkerDied from exc
        except BaseException:
            # Cancelled, or an answer that we do not understand: where the child stands nobody knows.
            worker.kill()
            raise
        worker.spare()
        if worker.replaced:
            worker.dismiss()
        else:
            if worker.jobs == worker.jobs_until_recycled:
                self._keep(self._recycle(worker))
            self._offer(worker)
        return result

    async def _recycle(self, old: "_Worker") -> None:
        """A worker at the end of its count goes on until its successor is ready."""
        try:
            successor = await _start_worker(self._settings)
        except WorkerDied:
            log.error("a worker that was to replace another could not be started; the old one goes on")
            old.jobs = 0
            return
        if old.dead:
            # It could not wait, and its end has brought a successor too: now there is one too many.
            successor.kill()
            await successor.exited()
            return
        self._welcome(successor)
        self.recycled += 1
        old.replaced = True
        if old in self._idle:
            self._idle.remove(old)
            old.dismiss()

    def _welcome(self, worker: "_Worker") -> None:
        self._workers.add(worker)
        self._workerless_since = None
        self._keep(self._attend(worker))
        self._offer(worker)

    async def _attend(self, worker: "_Worker") -> None:
        """Wait for a worker's end, however it comes, and see to a successor unless it has one."""
        status = await worker.exited()
        worker.dead = True
        self._workers.discard(worker)
        if not self._workers:
            self._workerless_since = time.monotonic()
        if worker in self._idle:
            self._idle.remove(worker)
        delay_s = 0.0
        while not (self._stopping or worker.replaced):
            if not delay_s:
                self.died += 1
                log.warning("worker %d ended with status %s and is replaced", worker.pid, status)
            await asyncio.sleep(delay_s)
            try:
                self._welcome(await _start_worker(self._settings))
                return
            except WorkerDied:
                delay_s = min(5.0, 2 * delay_s or 0.5)
                log.error("no worker could be started; trying again in %g s", delay_s)

    def _keep(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _settle(work: "asyncio.Task[tuple[Reply, bytes]]") -> None:
    """See a job to its end that nobody waits for any more."""
    try:
        await work
    except (WorkerDied, UvimgError):
        pass
    except Exception:
        log.exception("a job that nobody waited for any more failed")


def _translate(refused: Refused) -> UvimgError:
    if refused.kind in ("limits", "memory"):
        return BeyondLimits(refused.detail)
    if refused.kind == "type":
        return NotFound(refused.detail)
    return Undecodable(f"The image cannot be decoded: {refused.detail}.")


# As in syslog, which zimg's scripts count by: 0 to 3 are errors.
_LEVELS = (*[logging.ERROR] * 4, logging.WARNING, logging.INFO, logging.INFO, logging.DEBUG)


def _log_printed(printed: tuple[Printed, ...]) -> None:
    """What a script had logged. A worker that was taken over may not forge a line."""
    for line in printed:
        text = line.text if line.text.isprintable() else ascii(line.text)
        script_log.log(_LEVELS[max(0, min(7, line.level))], "%s", text)


@dataclass(eq=False, slots=True)
class _Worker:
    """A child process and our end of its socket."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    # A second handle on the socket: streams cannot send a descriptor.
    raw: socket.socket
    ready: Ready
    jobs_until_recycled: int
    jobs: int = 0
    replaced: bool = False
    dead: bool = False
    _executioner: asyncio.TimerHandle | None = field(default=None)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, also when the loop has not yet heard of it. For idle workers, which are silent."""
        if self.dead:
            return True
        try:
            return not self.raw.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def tell(self, job: Job, original: Content) -> bool:
        """Hand a job over, whole, in this call. False when the child has gone."""
        self.jobs += 1
        if self.dead:
            # Handed over, it died before its new holder came to it: the socket is closed, and uvloop raises on those.
            return False
        if not isinstance(original, FilePart):
            self.writer.writelines((encode_frame(Order(job), len(original)), original))
            return True
        frame = encode_frame(Order(job, original.size), 0)
        try:
            # Smaller than any socket's buffer, and the worker is idle: never blocks, never goes in part.
            return socket.send_fds(self.raw, [frame], [original.file.fileno()]) == len(frame)
        except OSError:
            return False

    async def reply(self) -> tuple[Reply, bytes]:
        await self.writer.drain()
        return await _read_reply(self.reader)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def kill_later(self, delay_s: float) -> None:
        self._executioner = asyncio.get_running_loop().call_later(delay_s, self.kill)

    def spare(self) -> None:
        """The job came to its end in time after all."""
        if self._executioner is not None:
            self._executioner.cancel()
            self._executioner = None

    def dismiss(self) -> None:
        """Let the child end, as it does by itself when its socket does."""
        self.close()
        self.kill_later(_FAREWELL_S)

    def close(self) -> None:
        self.writer.close()
        self.raw.close()

    async def exited(self) -> int:
        """The exit status, once there is one; frees what was held."""
        status = await self.process.wait()
        self.spare()
        self.close()
        return status


async def _start_worker(settings: PoolSettings) -> _Worker:
    """A worker that has said that it is ready. WorkerDied when there is none to be had; nothing is left over then."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        raw = ours.dup()
    except OSError as exc:
        # Out of descriptors, say: tried again later, like whatever else keeps a worker from starting.
        raise WorkerDied(f"there is no socket for an image worker: {exc.strerror}") from exc
    raw.setblocking(False)
    told = {
        "socket_fd": theirs.fileno(),
        "parent_pid": os.getpid(),
        "memory_bytes": settings.memory_bytes,
        "sandbox": settings.sandbox,
        "allowed": settings.formats,
        "scripted": settings.script is not None,
    }
    # Whatever of it there is, when this fails or is cancelled.
    process: asyncio.subprocess.Process | None = None
    end: socket.socket | asyncio.StreamWriter = ours
    try:
        with theirs:
            creating = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "uvimg.imaging.worker", msgspec.json.encode(told).decode()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                )
            )
            try:
                process = await asyncio.shield(creating)
            except asyncio.CancelledError:
                # A matter of milliseconds, and then there is a process that can be seen off.
                process = await creating
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 22)
        end = writer
        async with asyncio.timeout(_START_TIMEOUT_S):
            ready, _ = await _read_reply(reader)
        if not isinstance(ready, Ready):
            raise EOFError
        if settings.sandbox == "require" and "landlock" not in ready.confined_by:
            raise WorkerDied("sandbox is 'require', but this kernel has no Landlock to confine workers with")
        if settings.script is not None:
            await _teach(reader, writer, *settings.script, settings.timeout_s)
    except BaseException as exc:
        end.close()
        raw.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if isinstance(exc, EOFError | OSError):
            raise WorkerDied("an image worker could not be started; its own message is above") from exc
        raise
    # Not all at the same moment: a tenth of the workers' count apart.
    until = round(settings.jobs_per_worker * random.uniform(0.9, 1.1)) or -1
    return _Worker(process, reader, writer, raw, ready, until)


async def _teach(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, script: Learn, text: bytes, timeout_s: float
) -> None:
    """Have a new worker read the script. WorkerDied where that is broken."""
    writer.writelines((encode_frame(Order(script), len(text)), text))
    try:
        async with asyncio.timeout(timeout_s):
            answer, _ = await _read_reply(reader)
    except TimeoutError:
        raise WorkerDied(f"script {script.name}: it was not read to its end in {timeout_s:g} s") from None
    if isinstance(answer, Refused):
        raise WorkerDied(f"script {answer.detail}")
    if not isinstance(answer, Learnt):
        raise EOFError
    _log_printed(answer.printed)


async def _read_reply(reader: asyncio.StreamReader) -> tuple[Reply, bytes]:
    """An answer and its bytes. EOFError also for one that no honest worker gives."""
    head_size, size = PREFIX.unpack(await reader.readexactly(PREFIX.size))
    if head_size > _MAX_HEAD_BYTES or size > _MAX_BODY_BYTES:
        raise EOFError
    try:
        head = msgspec.msgpack.decode(await reader.readexactly(head_size), type=Reply)
    except msgspec.DecodeError as exc:
        raise EOFError from exc
    return head, await reader.readexactly(size)
