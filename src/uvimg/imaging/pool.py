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
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from uvimg.core.errors import BeyondLimits, Overloaded, TooSlow, Undecodable, UvimgError, WorkerFailed
from uvimg.core.formats import Format
from uvimg.core.message import Content, FilePart
from uvimg.imaging import PREFIX, Answer, Inspected, Job, Ready, Refused, Rendered, Request, encode_frame

log = logging.getLogger("uvimg.imaging")

Lane = Literal["uploads", "renditions"]

# A worker imports libvips and tries every codec before it is ready: a third of a second on a quiet core.
_START_TIMEOUT_S = 60.0
_ABANDON_GRACE_S = 1.0
# What a child needs to find its libraries; no secret of the server's environment reaches it.
_PASSED_ON = (
    *("PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_CONF", "MALLOC_ARENA_MAX"),
)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`queue_limit` counts the jobs that wait in one lane; `jobs_per_worker` is 0 for no end."""

    workers: int
    queue_limit: int
    timeout_s: float
    memory_bytes: int
    jobs_per_worker: int
    sandbox: Literal["auto", "require", "off"]
    formats: tuple[Format, ...]


class WorkerDied(Exception):
    """The child went away in the middle of a job or before it was ready."""


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

    async def start(self) -> Ready:
        """Start every worker and say what they can do. WorkerDied when they cannot be started as configured."""
        started = await asyncio.gather(
            *(_start_worker(self._settings) for _ in range(self._settings.workers)), return_exceptions=True
        )
        for worker in started:
            if isinstance(worker, _Worker):
                self._welcome(worker)
        for failure in started:
            if isinstance(failure, BaseException):
                await self.stop()
                raise failure
        return next(iter(self._workers)).ready

    async def stop(self) -> None:
        """Let no worker live on. Jobs in flight fail."""
        self._stopping = True
        for worker in list(self._workers):
            worker.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *(worker.exited() for worker in self._workers), return_exceptions=True)
        for lane in self._lanes.values():
            for waiting in lane:
                waiting.cancel()

    async def run(self, job: Job, original: Content, lane: Lane) -> tuple[Inspected | Rendered, bytes]:
        """Have a job done. `original` is not used any more when this returns or raises.

        Raises Overloaded at once when the lane is full, TooSlow past the deadline, Undecodable and
        BeyondLimits for the image's own faults, WorkerFailed when two workers died of it.
        """
        for _ in range(2):
            worker = await self._take(lane)
            work = asyncio.create_task(self._work(worker, worker.tell(job, original)))
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
                raise _translate(answer)
            assert isinstance(answer, Inspected | Rendered)
            return answer, body
        raise WorkerFailed()

    @property
    def waiting(self) -> int:
        """How many jobs wait for a worker."""
        return sum(len(lane) for lane in self._lanes.values())

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    async def _take(self, lane: Lane) -> "_Worker":
        """An idle worker, now or in turn. Whoever takes one hands it to `_work`, which gives it back."""
        if self._idle:
            return self._idle.popleft()
        line = self._lanes[lane]
        if len(line) >= self._settings.queue_limit or self._stopping:
            raise Overloaded()
        future: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        line.append(future)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await future
        except TimeoutError:
            raise Overloaded() from None
        finally:
            if future in line:
                line.remove(future)
            elif future.done() and not future.cancelled() and sys.exc_info()[0] is not None:
                # Handed a worker in the very moment in which the caller went.
                self._offer(future.result())

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

    async def _work(self, worker: "_Worker", told: bool) -> tuple[Answer, bytes]:
        """Wait for the answer to the job that a worker was told; it is idle or on its way out afterwards."""
        try:
            if not told:
                raise EOFError
            async with asyncio.timeout(self._settings.timeout_s):
                result = await worker.answer()
        except TimeoutError:
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
            worker.close()
        else:
            if worker.jobs == worker.jobs_until_recycled:
                self._keep(self._recycle(worker))
            self._offer(worker)
        return result

    async def _recycle(self, old: "_Worker") -> None:
        """A worker at the end of its count goes on until its successor is ready."""
        try:
            self._welcome(await _start_worker(self._settings))
        except WorkerDied:
            log.error("a worker that was to replace another could not be started; the old one goes on")
            old.jobs = 0
            return
        old.replaced = True
        if old in self._idle:
            self._idle.remove(old)
            old.close()

    def _welcome(self, worker: "_Worker") -> None:
        self._workers.add(worker)
        self._keep(self._attend(worker))
        self._offer(worker)

    async def _attend(self, worker: "_Worker") -> None:
        """Wait for a worker's end, however it comes, and see to a successor unless it has one."""
        status = await worker.exited()
        worker.dead = True
        self._workers.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        delay_s = 0.0
        while not (self._stopping or worker.replaced):
            if not delay_s:
                log.warning("worker %d ended with status %s and is replaced", worker.pid, status)
            await asyncio.sleep(delay_s)
            try:
                self._welcome(await _start_worker(self._settings))
                return
            except WorkerDied:
                delay_s = min(30.0, 2 * delay_s or 0.5)
                log.error("no worker could be started; trying again in %g s", delay_s)

    def _keep(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _settle(work: "asyncio.Task[tuple[Answer, bytes]]") -> None:
    """See a job to its end that nobody waits for any more."""
    with contextlib.suppress(WorkerDied, UvimgError, asyncio.CancelledError):
        await work


def _translate(refused: Refused) -> UvimgError:
    if refused.kind == "limits":
        return BeyondLimits(refused.detail)
    return Undecodable(f"The image cannot be decoded: {refused.detail}.")


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

    def tell(self, job: Job, original: Content) -> bool:
        """Hand a job over, whole, in this call. False when the child has gone."""
        self.jobs += 1
        if not isinstance(original, FilePart):
            self.writer.writelines((encode_frame(Request(job), len(original)), original))
            return True
        frame = encode_frame(Request(job, original.size), 0)
        try:
            # Smaller than any socket's buffer, and the worker is idle: never blocks, never goes in part.
            return socket.send_fds(self.raw, [frame], [original.file.fileno()]) == len(frame)
        except OSError:
            return False

    async def answer(self) -> tuple[Answer, bytes]:
        await self.writer.drain()
        return await _read_answer(self.reader)

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

    def close(self) -> None:
        """The child ends by itself when its socket does."""
        self.writer.close()
        self.raw.close()

    async def exited(self) -> int:
        """The exit status, once there is one; frees what was held."""
        status = await self.process.wait()
        self.spare()
        self.close()
        return status


async def _start_worker(settings: PoolSettings) -> _Worker:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    told = {
        "socket_fd": theirs.fileno(),
        "parent_pid": os.getpid(),
        "memory_bytes": settings.memory_bytes,
        "sandbox": settings.sandbox,
        "allowed": settings.formats,
    }
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "uvimg.imaging.worker", msgspec.json.encode(told).decode()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        )
    raw = ours.dup()
    raw.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 22)
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            ready, _ = await _read_answer(reader)
        assert isinstance(ready, Ready)
        if settings.sandbox == "require" and "landlock" not in ready.confined_by:
            raise WorkerDied("sandbox is 'require', but this kernel has no Landlock to confine workers with")
    except (EOFError, OSError, TimeoutError, WorkerDied, asyncio.CancelledError) as exc:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        writer.close()
        raw.close()
        await process.wait()
        if isinstance(exc, WorkerDied | asyncio.CancelledError):
            raise
        raise WorkerDied("an image worker could not be started; its own message is above") from exc
    # Not all at the same moment: a tenth of the workers' count apart.
    until = round(settings.jobs_per_worker * random.uniform(0.9, 1.1)) or -1
    return _Worker(process, reader, writer, raw, ready, until)


async def _read_answer(reader: asyncio.StreamReader) -> tuple[Answer, bytes]:
    head_size, size = PREFIX.unpack(await reader.readexactly(PREFIX.size))
    head = msgspec.msgpack.decode(await reader.readexactly(head_size), type=Answer)
    return head, await reader.readexactly(size)
