"""Image work, done in child processes.

libvips may crash or hang on a hostile file, so it never runs in the server. A child does one job at a
time; past its deadline it is killed and replaced, and only the request that it worked for fails.
Two crews serve four lanes: the main one uploads and fast jobs; the slow one, of workers that are nice to all
others, are started when there is something for them and end when there is not, slow and background jobs and
uploads that take long. So what is slow never has a worker that a fast job waits for, and the kernel gives the
fast one the core.
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
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Literal, cast, get_args

import msgspec

from uvimg.core.cost import takes_long_to_inspect
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
    Inspect,
    Inspected,
    Job,
    Learn,
    Learnt,
    Order,
    Planned,
    Printed,
    Ready,
    Refused,
    Rendered,
    Reply,
    encode_frame,
)

log = logging.getLogger("uvimg.imaging")
script_log = logging.getLogger("uvimg.script")

Lane = Literal["uploads", "fast", "slow", "background"]
LANES: tuple[Lane, ...] = get_args(Lane)

# A worker imports libvips and tries every codec before it is ready: a third of a second on a quiet core.
_START_TIMEOUT_S = 60.0
_ABANDON_GRACE_S = 1.0
# A replaced worker ends by itself when its socket does, unless it hangs in some library's last words.
_FAREWELL_S = 5.0
# A worker of the slow crew holds some 50 MB, and another one is there within a third of a second.
_SLOW_IDLE_S = 30.0
# The 99th percentile of tiny jobs while the slow crew made AVIF was 5 times their own at a niceness of 10, 1.8 at 15
# and 1.3 at 19, which leaves slow jobs a seventieth of a core where fast ones take all; 15 leaves them a thirtieth.
_SLOW_NICENESS = 15
# Nobody waits for these; each holds its original meanwhile.
_MAX_BACKGROUND = 32
# What waits in the slow lane takes its time.
_RETRY_AFTER_S: dict[Lane, int] = {"uploads": 1, "fast": 1, "slow": 5, "background": 5}
# A decoder that was taken over may not make the server hold whatever it likes.
_MAX_HEAD_BYTES = 1 << 16
_MAX_BODY_BYTES = 1 << 29
# Nearly all renditions arrive in one piece; what is longer gets a buffer of its own.
_BUFFER_BYTES = 1 << 17
# What a child needs to find its libraries; no secret of the server's environment reaches it.
_PASSED_ON = (
    *("PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("MALLOC_CONF", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"),
)
# How a worker's memory stays flat, measured after 1,000 mixed jobs of which one in twenty was a progressive JPEG of
# 12 megapixels, all in the same CPU time. glibc's allocator as it comes holds 242 MB and grows; with two arenas 141 MB;
# with two and thresholds that do not move 67 MB (56 MB with one of 1 MiB, but then a picture of 6 MB decoded took a
# third longer, for new pages). jemalloc, where it is preloaded, holds 71 MB, and 48 MB with two arenas and what was
# free for a second given back. Without such pictures, after 7,000 jobs, it is 79 MB for glibc as it comes and 66 to
# 82 MB for jemalloc, and nothing grows.
_DEFAULTS = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "10485760",
    "MALLOC_TRIM_THRESHOLD_": "16777216",
    "MALLOC_CONF": "narenas:2,dirty_decay_ms:1000,muzzy_decay_ms:0",
}


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`workers` is the size of the main crew, and the most of the slow one.

    `queue_limit` counts the jobs that wait in a lane, `slow_queue_limit` those of the slow lane;
    `jobs_per_worker` is 0 for no end.
    `script` is what every worker learns before its first job, with its text.
    """

    workers: int
    queue_limit: int
    slow_queue_limit: int
    timeout_s: float
    memory_bytes: int
    jobs_per_worker: int
    sandbox: Literal["auto", "require", "off"]
    formats: tuple[Format, ...]
    script: tuple[Learn, bytes] | None = None

    def queue_limit_of(self, lane: Lane) -> int:
        """How many jobs may wait in a lane."""
        if lane == "background":
            return _MAX_BACKGROUND
        return self.slow_queue_limit if lane == "slow" else self.queue_limit


class WorkerDied(Exception):
    """The child went away before it was ready, or cannot be had."""


Answer = tuple[Inspected | Rendered | Planned, bytes]


class ScriptError(Exception):
    """What a script failed of, with its file and line."""


class Pool:
    """Workers and the jobs that wait for them. `run` is the door.

    A job costs one future, no task and no timer: what a child says is acted upon where it arrives, and a lane and a
    worker have a timer each, which looks again where the job that it was set for has long been done.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._main = _Crew(settings.workers, 0, ("uploads", "fast"))
        self._slow = _Crew(settings.workers, _SLOW_NICENESS, ("uploads", "slow", "background"))
        # Where jobs of a lane wait: uploads do for either crew.
        self._lanes = {
            lane: [crew.lines[lane] for crew in (self._main, self._slow) if lane in crew.lines] for lane in LANES
        }
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        # In the clock's seconds; None while there is a worker.
        self._workerless_since: float | None = None
        # Since the start, for the metrics.
        self.given, self.refused = Counter[Lane](), Counter[Lane]()
        self.died = self.recycled = self.timeouts = 0

    async def start(self) -> Ready:
        """Start the main crew and say what it can do. WorkerDied when it cannot be started as configured."""

        async def start_one() -> Ready:
            worker = await _start_worker(self._settings, self._main.niceness)
            self._welcome(worker, self._main)
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
        for crew in (self._main, self._slow):
            for line in crew.lines.values():
                for errand in list(line.errands):
                    # Not cancelled: to those who wait that would look like their own cancellation.
                    self._give_up(errand)
        workers = [*self._main.workers, *self._slow.workers]
        for worker in workers:
            self._lose(worker)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *(worker.exited() for worker in workers), return_exceptions=True)

    async def run(self, job: Job, original: Content, lane: Lane) -> Answer:
        """Have a job done. `original` is not used any more when this returns or raises.

        Raises Overloaded at once when the lane is full, TooSlow past the deadline, Undecodable and
        BeyondLimits for the image's own faults, NotFound and ScriptFailed for what a script makes of its type,
        WorkerFailed when two workers died of it.
        """
        assert isinstance(original, bytes) or original.start == 0, "a worker is given whole files"
        done = asyncio.get_running_loop().create_future()
        errand = _Errand(job, original, self._find_line(job, original, lane), done)
        if self._stopping or not self._place(errand):
            self.refused[lane] += 1
            raise Overloaded(_RETRY_AFTER_S[lane])
        try:
            answer, body = await done
        except asyncio.CancelledError:
            self._abandon(errand)
            raise
        except Overloaded:
            self.refused[lane] += 1
            raise
        finally:
            # An error would hold this frame, and it the error and the original, until somebody looks for cycles.
            del done, errand
        if isinstance(answer, Refused):
            _log_printed(answer.printed)
            if answer.kind == "script":
                # Where it failed is for the log alone.
                raise ScriptFailed() from ScriptError(answer.detail)
            raise _translate(answer)
        assert isinstance(answer, Inspected | Rendered | Planned)
        if not isinstance(answer, Inspected):
            _log_printed(answer.printed)
        return answer, body

    @property
    def waiting(self) -> int:
        """How many jobs wait for a worker."""
        return sum(self.queues.values())

    @property
    def queues(self) -> dict[Lane, int]:
        """How many jobs wait for a worker in each lane."""
        return {lane: self._count_waiting(lane) for lane in LANES}

    def _count_waiting(self, lane: Lane) -> int:
        return sum([len(line.errands) for line in self._lanes[lane]])

    @property
    def pids(self) -> list[int]:
        """Those of both crews."""
        return [worker.pid for crew in (self._main, self._slow) for worker in crew.workers]

    @property
    def workers(self) -> tuple[int, int]:
        """How many of the main crew are busy, and idle."""
        return self._main.busy, len(self._main.idle)

    @property
    def slow_workers(self) -> tuple[int, int]:
        """How many of the slow crew are busy, and idle."""
        return self._slow.busy, len(self._slow.idle)

    @property
    def workerless_s(self) -> float:
        """For how long there has been no worker of the main crew alive, 0 while there is one."""
        return 0.0 if self._workerless_since is None else time.monotonic() - self._workerless_since

    @property
    def is_quiet(self) -> bool:
        """Whether a background job may begin: nothing else waits, a core has nothing to do, and no other one runs."""
        busy = 0
        for crew in (self._main, self._slow):
            if crew.choose_line() is not None:
                return False
            for worker in crew.workers:
                if worker.errand is not None:
                    busy += 1
                    if worker.errand.line.lane == "background":
                        return False
        return busy < self._settings.workers

    # Jobs

    def _find_line(self, job: Job, original: Content, lane: Lane) -> "_Line":
        if lane in self._main.lines:
            size = original.size if isinstance(original, FilePart) else len(original)
            if not (isinstance(job, Inspect) and takes_long_to_inspect(job.format, size)):
                return self._main.lines[lane]
        return self._slow.lines[lane]

    def _place(self, errand: "_Errand") -> bool:
        """Give a job to an idle worker, or let it wait. False where its lane is full."""
        line, crew = errand.line, errand.line.crew
        if line.lane != "background" or self.is_quiet:
            worker = crew.take_idle()
            if worker is not None:
                self._give(worker, errand)
                return True
        if errand.attempts:
            # Its worker died: it has been admitted and has waited already.
            line.errands.appendleft(errand)
        elif self._count_waiting(line.lane) < self._limit(line):
            line.errands.append(errand)
        else:
            return False
        errand.since_s = asyncio.get_running_loop().time()
        if line.timer is None:
            line.timer = asyncio.get_running_loop().call_later(self._settings.timeout_s, self._end_waits, line)
        if crew is self._slow:
            self._reinforce()
        return True

    def _limit(self, line: "_Line") -> int:
        """How many jobs may wait here; those for which a worker is started now do not count."""
        limit = self._settings.queue_limit_of(line.lane)
        if line.crew is self._main or line.lane == "background":
            return limit
        return limit + max(0, line.crew.size - line.crew.living)

    def _give(self, worker: "_Worker", errand: "_Errand") -> None:
        """Hand a job over, whole, in this call: nothing may use an original once a cancelled caller has gone."""
        if not errand.attempts:
            self.given[errand.line.lane] += 1
        errand.attempts += 1
        errand.line.catch_up()
        errand.worker, worker.errand = worker, errand
        loop = asyncio.get_running_loop()
        errand.since_s = loop.time()
        try:
            told = worker.tell(errand.job, errand.original)
        except Exception as exc:
            # Such as an original whose file is closed: the job's fault, and where the child stands nobody knows.
            self._lose(worker, exc)
            return
        if not told:
            self._lose(worker)
        elif worker.deadline is None:
            worker.deadline = loop.call_later(self._settings.timeout_s, self._end_overdue, worker)

    def _take_answer(self, worker: "_Worker", answer: Reply, body: bytes) -> None:
        errand = worker.errand
        if errand is None:
            # It speaks unasked: where it stands nobody knows.
            self._lose(worker)
            return
        worker.errand = None
        errand.end_work()
        if not errand.done.done():
            errand.done.set_result((answer, body))
        # It came to its end in time after all, where its caller had gone.
        worker.spare()
        if worker.replaced:
            worker.dismiss()
            return
        if worker.jobs == worker.jobs_until_recycled:
            self._keep(self._recycle(worker))
        self._offer(worker)

    def _end_overdue(self, worker: "_Worker") -> None:
        worker.deadline = None
        if worker.errand is None:
            return
        loop = asyncio.get_running_loop()
        due_s = worker.errand.since_s + self._settings.timeout_s
        if loop.time() < due_s:
            # It has another job by now.
            worker.deadline = loop.call_at(due_s, self._end_overdue, worker)
            return
        self.timeouts += 1
        log.warning("a worker was killed: its job took longer than %g s", self._settings.timeout_s)
        self._lose(worker, TooSlow())

    def _lose(self, worker: "_Worker", error: Exception | None = None) -> None:
        """Be done with a worker. The job that it had ends with `error`, or else is done by another, once."""
        worker.dead = True
        worker.kill()
        errand, worker.errand = worker.errand, None
        if errand is None:
            return
        errand.end_work()
        if errand.done.done():
            return
        if error is None and self._stopping:
            error = Overloaded()
        if error is None:
            log.warning("a worker died of a job of the lane %s", errand.line.lane)
            if errand.attempts < 2:
                self._place(errand)
                return
            error = WorkerFailed()
        errand.done.set_exception(error)

    def _end_waits(self, line: "_Line") -> None:
        """Give up what has waited for as long as a job may take."""
        line.timer = None
        loop = asyncio.get_running_loop()
        long_ago_s = loop.time() - self._settings.timeout_s
        for errand in [errand for errand in line.errands if errand.since_s <= long_ago_s]:
            self._give_up(errand)
        if line.errands:
            next_s = min(errand.since_s for errand in line.errands) + self._settings.timeout_s
            line.timer = loop.call_at(next_s, self._end_waits, line)

    def _give_up(self, errand: "_Errand") -> None:
        errand.line.errands.remove(errand)
        if not errand.done.done():
            errand.done.set_exception(Overloaded(_RETRY_AFTER_S[errand.line.lane]))

    def _abandon(self, errand: "_Errand") -> None:
        """Nobody waits for this job any more."""
        worker = errand.worker
        if worker is not None and worker.errand is errand:
            worker.kill_later(_ABANDON_GRACE_S)
        elif errand in errand.line.errands:
            errand.line.errands.remove(errand)

    def _offer(self, worker: "_Worker") -> None:
        """A free worker takes the next job of its crew's lanes, or is idle."""
        if worker.dead:
            return
        crew = worker.crew
        while (line := crew.choose_line()) is not None:
            errand = line.errands.popleft()
            if not errand.done.done():
                self._give(worker, errand)
                return
        crew.idle.append(worker)
        if crew is self._slow:
            worker.retire_later(_SLOW_IDLE_S, self._retire)
        self._give_background()

    # The slow crew

    def _give_background(self) -> None:
        errands = self._slow.lines["background"].errands
        while errands and self.is_quiet:
            worker = self._slow.take_idle()
            if worker is None:
                self._reinforce()
                return
            errand = errands.popleft()
            if errand.done.done():
                self._offer(worker)
                return
            self._give(worker, errand)

    def _reinforce(self) -> None:
        """Start workers of the slow crew for what waits there, one for each job, as many as there may be."""
        crew = self._slow
        waiting = sum(len(line.errands) for line in crew.lines.values() if line.lane != "background")
        # A background job keeps no other from a worker.
        extra = any(worker.errand and worker.errand.line.lane == "background" for worker in crew.workers)
        wanted = min(waiting, crew.size + extra - crew.living)
        if not wanted and crew.lines["background"].errands and not crew.idle and self.is_quiet:
            wanted = 1
        while crew.starting < wanted and not self._stopping:
            crew.starting += 1
            self._keep(self._start_slow())

    async def _start_slow(self) -> None:
        try:
            worker = await _start_worker(self._settings, self._slow.niceness)
        except WorkerDied:
            log.error("no worker could be started for slow jobs; those that wait try again in a second")
            await asyncio.sleep(1)
            self._slow.starting -= 1
            self._reinforce()
            return
        except BaseException:
            self._slow.starting -= 1
            raise
        self._slow.starting -= 1
        self._welcome(worker, self._slow)

    def _retire(self, worker: "_Worker") -> None:
        """Nothing has come for a worker of the slow crew for a while."""
        self._slow.idle.remove(worker)
        worker.replaced = True
        worker.dismiss()

    # Workers

    async def _recycle(self, old: "_Worker") -> None:
        """A worker at the end of its count goes on until its successor is ready."""
        try:
            successor = await _start_worker(self._settings, old.crew.niceness)
        except WorkerDied:
            log.error("a worker that was to replace another could not be started; the old one goes on")
            old.jobs = 0
            return
        if old.dead or old.replaced:
            # It could not wait, and its end has brought a successor too: now there is one too many.
            successor.kill()
            await successor.exited()
            return
        self.recycled += 1
        old.replaced = True
        if old in old.crew.idle:
            old.crew.idle.remove(old)
            old.dismiss()
        self._welcome(successor, old.crew)

    def _welcome(self, worker: "_Worker", crew: "_Crew") -> None:
        worker.crew, worker.on_answer, worker.on_loss = crew, self._take_answer, self._lose
        crew.workers.add(worker)
        if crew is self._main:
            self._workerless_since = None
        self._keep(self._attend(worker))
        self._offer(worker)

    async def _attend(self, worker: "_Worker") -> None:
        """Wait for a worker's end, however it comes, and see to a successor unless it has one."""
        status = await worker.exited()
        crew = worker.crew
        crew.workers.discard(worker)
        if worker in crew.idle:
            crew.idle.remove(worker)
        if crew is self._main and not crew.workers:
            self._workerless_since = time.monotonic()
        self._lose(worker)
        if not (self._stopping or worker.replaced):
            self.died += 1
            log.warning("worker %d ended with status %s", worker.pid, status)
        if crew is self._slow:
            self._reinforce()
            return
        if worker.replaced:
            return
        delay_s = 0.0
        while not self._stopping:
            await asyncio.sleep(delay_s)
            try:
                self._welcome(await _start_worker(self._settings, crew.niceness), crew)
                return
            except WorkerDied:
                delay_s = min(5.0, 2 * delay_s or 0.5)
                log.error("no worker could be started; trying again in %g s", delay_s)

    def _keep(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Crew:
    """Workers of one niceness, and the lanes that they serve."""

    def __init__(self, size: int, niceness: int, lanes: tuple[Lane, ...]) -> None:
        self.size, self.niceness = size, niceness
        self.workers: set[_Worker] = set()
        self.idle: list[_Worker] = []
        # How many are on their way beyond those that replace others.
        self.starting = 0
        self.lines: dict[Lane, _Line] = {lane: _Line(lane, self) for lane in lanes}
        self._served = [line for lane, line in self.lines.items() if lane != "background"]
        # What the lane that was served last had used by then.
        self.used_s = 0.0

    @property
    def busy(self) -> int:
        """How many have a job."""
        return sum(worker.errand is not None for worker in self.workers)

    @property
    def living(self) -> int:
        """How many there are, without those that are about to end."""
        return sum(not worker.dead for worker in self.workers)

    def take_idle(self) -> "_Worker | None":
        """The one that worked last: its memory is still warm."""
        while self.idle:
            worker = self.idle.pop()
            worker.spare()
            if not worker.is_gone:
                return worker
        return None

    def choose_line(self) -> "_Line | None":
        """Of those where jobs wait, the one that has used the least time: a large upload counts for many small jobs."""
        chosen = None
        for line in self._served:
            if line.errands and (chosen is None or line.used_s < chosen.used_s):
                chosen = line
        return chosen


class _Line:
    """The jobs of a lane that wait for one crew."""

    def __init__(self, lane: Lane, crew: _Crew) -> None:
        self.lane, self.crew = lane, crew
        self.errands: deque[_Errand] = deque()
        # Ends the longest wait, or one that has ended since.
        self.timer: asyncio.TimerHandle | None = None
        # Of the crew's time, since the start.
        self.used_s = 0.0

    def catch_up(self) -> None:
        """What a lane did not use while it was empty is no credit for later."""
        self.used_s = self.crew.used_s = max(self.used_s, self.crew.used_s)


@dataclass(eq=False, slots=True)
class _Errand:
    """A job on its way through the pool. `since_s` is when its wait began, and then when its work did."""

    job: Job
    original: Content
    line: _Line
    done: "asyncio.Future[tuple[Reply, bytes]]"
    attempts: int = 0
    worker: "_Worker | None" = None
    since_s: float = 0.0

    def end_work(self) -> None:
        self.line.used_s += asyncio.get_running_loop().time() - self.since_s


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


class _Worker(asyncio.BufferedProtocol):
    """A child process and our end of its socket."""

    def __init__(self, process: asyncio.subprocess.Process, raw: socket.socket) -> None:
        self.process = process
        # A second handle on the socket: transports cannot send a descriptor.
        self.raw = raw
        self.transport: asyncio.WriteTransport | None = None
        self.ready: Ready
        self.crew: _Crew
        self.errand: _Errand | None = None
        self.jobs = 0
        self.jobs_until_recycled = -1
        # Its successor is there, or it is to have none.
        self.replaced = False
        # Of no use any more, though it may not have ended yet.
        self.dead = False
        self.on_answer: Callable[[_Worker, Reply, bytes], None]
        self.on_loss: Callable[[_Worker], None]
        # Ends the job that it has, or one that it had.
        self.deadline: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._buffer = self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._filled = 0

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
        if self.dead or self.transport is None:
            return False
        try:
            if isinstance(original, FilePart):
                frame = encode_frame(Order(job, original.size), 0)
                # Smaller than any socket's buffer, and the worker is idle: never blocks, never goes in part.
                return socket.send_fds(self.raw, [frame], [original.file.fileno()]) == len(frame)
            frame = encode_frame(Order(job), len(original))
            sent = self.raw.sendmsg((frame, original)) - len(frame)
        except OSError:
            return False
        if 0 <= sent < len(original):
            self.transport.write(memoryview(original)[sent:])
        return sent >= 0

    # What the child says: one frame for each job

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's does not say that it is one.
        self.transport = cast(asyncio.WriteTransport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < PREFIX.size:
            return
        head_size, size = PREFIX.unpack_from(self._view)
        begin = PREFIX.size + head_size
        end = begin + size
        if head_size > _MAX_HEAD_BYTES or size > _MAX_BODY_BYTES or self._filled > end:
            self._hear_no_more()
            return
        if self._filled < end:
            if end > len(self._view):
                longer = memoryview(bytearray(end))
                longer[: self._filled] = self._view[: self._filled]
                self._view = longer
            return
        try:
            head = _decode_reply(self._view[PREFIX.size : begin])
        except (msgspec.DecodeError, UnicodeDecodeError):
            # msgspec lets the second through where a string is no UTF-8.
            self._hear_no_more()
            return
        body = bytes(self._view[begin:end])
        self._view, self._filled = self._buffer, 0
        self.on_answer(self, head, body)

    def _hear_no_more(self) -> None:
        """Where what it says ends nobody knows: it is lost, and there is no buffer for the rest."""
        assert self.transport is not None
        self.transport.abort()
        self.on_loss(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.replaced or self.errand is not None:
            self.on_loss(self)

    # Its end

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def kill_later(self, delay_s: float) -> None:
        self.spare()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.kill)

    def retire_later(self, delay_s: float, retire: "Callable[[_Worker], None]") -> None:
        self.spare()
        self._timer = asyncio.get_running_loop().call_later(delay_s, retire, self)

    def spare(self) -> None:
        """Go on: no end is near any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def dismiss(self) -> None:
        """Let the child end, as it does by itself when its socket does."""
        self.dead = True
        self.close()
        self.kill_later(_FAREWELL_S)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.raw.close()

    async def exited(self) -> int:
        """The exit status, once there is one; frees what was held."""
        status = await self.process.wait()
        self.spare()
        if self.deadline is not None:
            self.deadline.cancel()
        self.close()
        return status


_decode_reply = msgspec.msgpack.Decoder(Reply).decode


async def _start_worker(settings: PoolSettings, niceness: int) -> _Worker:
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
        "niceness": niceness,
    }
    loop = asyncio.get_running_loop()
    # Whatever of it there is, when this fails or is cancelled.
    process: asyncio.subprocess.Process | None = None
    end: socket.socket | asyncio.BaseTransport = ours
    try:
        with theirs:
            creating = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "uvimg.imaging.worker", msgspec.json.encode(told).decode()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env=_DEFAULTS | {name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                )
            )
            try:
                process = await asyncio.shield(creating)
            except asyncio.CancelledError:
                # A matter of milliseconds, and then there is a process that can be seen off.
                process = await creating
                raise
        worker = _Worker(process, raw)
        answers: asyncio.Queue[Reply | None] = asyncio.Queue()
        worker.on_answer = lambda _, answer, __: answers.put_nowait(answer)
        worker.on_loss = lambda _: answers.put_nowait(None)
        end, _ = await loop.create_unix_connection(lambda: worker, sock=ours)
        async with asyncio.timeout(_START_TIMEOUT_S):
            ready = await answers.get()
        if not isinstance(ready, Ready):
            raise EOFError
        if settings.sandbox == "require" and "landlock" not in ready.confined_by:
            raise WorkerDied("sandbox is 'require', but this kernel has no Landlock to confine workers with")
        if settings.script is not None:
            await _teach(worker, answers, *settings.script, settings.timeout_s)
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
    worker.ready = ready
    # Not all at the same moment: a tenth of the workers' count apart.
    worker.jobs_until_recycled = round(settings.jobs_per_worker * random.uniform(0.9, 1.1)) or -1
    return worker


async def _teach(
    worker: _Worker, answers: "asyncio.Queue[Reply | None]", script: Learn, text: bytes, timeout_s: float
) -> None:
    """Have a new worker read the script. WorkerDied where that is broken."""
    if not worker.tell(script, text):
        raise EOFError
    # It was no job.
    worker.jobs = 0
    try:
        async with asyncio.timeout(timeout_s):
            answer = await answers.get()
    except TimeoutError:
        raise WorkerDied(f"script {script.name}: it was not read to its end in {timeout_s:g} s") from None
    if isinstance(answer, Refused):
        raise WorkerDied(f"script {answer.detail}")
    if not isinstance(answer, Learnt):
        raise EOFError
    _log_printed(answer.printed)
