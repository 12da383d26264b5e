"""The pool and its workers: real children that are stopped, killed, starved, dismissed and confined."""

import asyncio
import contextlib
import functools
import gc
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from bench import corpus
from tests.conftest import Server
from uvimg.core.errors import BeyondLimits, Overloaded, TooSlow, Undecodable, WorkerFailed
from uvimg.core.formats import Format
from uvimg.core.message import FilePart
from uvimg.core.plan import Encode, Load, Plan
from uvimg.imaging import PREFIX, Inspect, Inspected, Learnt, Limits, Refused, Render, Rendered, encode_frame
from uvimg.imaging import pool as pool_module
from uvimg.imaging.pool import Lane, Pool, PoolSettings, WorkerDied

PNG = bytes(corpus.photo(64, 48).pngsave_buffer(keep="none"))
LOOPS = {"asyncio": asyncio.DefaultEventLoopPolicy, "uvloop": uvloop.EventLoopPolicy}

# The hook that is to take this fixture's place works from a conftest alone, for all tests or none.
pytestmark = pytest.mark.filterwarnings('ignore:Overriding the "event_loop_policy" fixture')


@pytest.fixture(params=LOOPS)
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Everything here holds on both loops."""
    return LOOPS[request.param]()


def settings(**changed: Any) -> PoolSettings:
    usual = {
        "workers": 1,
        "queue_limit": 100,
        "slow_queue_limit": 100,
        "timeout_s": 30.0,
        "memory_bytes": 4 << 30,
        "jobs_per_worker": 0,
    }
    formats: tuple[Format, ...] = ("jpeg", "png", "webp", "gif", "avif", "tiff")
    return PoolSettings(**{**usual, "sandbox": "auto", "formats": formats, **changed})


StartPool = Callable[..., Awaitable[Pool]]


@pytest.fixture
async def start_pool(event_loop_policy: object) -> AsyncIterator[StartPool]:
    """Starts pools of the test's own; at the end nothing of them is left, and nothing was complained about."""
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop) == isinstance(event_loop_policy, uvloop.EventLoopPolicy)
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    started: list[Pool] = []

    async def start(**changed: Any) -> Pool:
        started.append(Pool(settings(**changed)))
        await started[-1].start()
        return started[-1]

    before = children()
    yield start
    for pool in started:
        for pid in pool.pids:
            resume(pid)
        await pool.stop()
    assert children() <= before
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait for a condition that comes true by itself, but not for ever."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


def children(pid: int | None = None) -> set[int]:
    """The processes whose parent this is; those that have ended and were not waited for do not count."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = path.read_text().rpartition(") ")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if int(parent) == (pid or os.getpid()) and state != "Z":
            found.add(int(path.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def hang(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    if is_alive(pid):
        os.kill(pid, signal.SIGCONT)


def inspect(pool: Pool, data: bytes = PNG, format: Format = "png") -> Awaitable[tuple[Inspected | Rendered, bytes]]:
    return pool.run(Inspect(format, Limits()), data, "uploads")


def render(pool: Pool, width: int = 32, lane: Lane = "fast") -> Awaitable[tuple[Inspected | Rendered, bytes]]:
    load = Load(width, width * 3 // 4, 1, managed=False, gray=False)
    return pool.run(Render("png", Plan((load, Encode("jpeg", 75, 0)))), PNG, lane)


def render_slowly(pool: Pool, lane: Lane = "slow") -> Awaitable[tuple[Inspected | Rendered, bytes]]:
    """An AVIF with which a worker is busy for many seconds."""
    load = Load(1200, 900, 1, managed=False, gray=False)
    return pool.run(Render("jpeg", Plan((load, Encode("avif", 60, 6)))), large_jpeg(), lane)


@functools.cache
def large_jpeg() -> bytes:
    return corpus.jpeg(corpus.photo(1200, 900))


def begin(work: Awaitable[tuple[Inspected | Rendered, bytes]]) -> "asyncio.Task[tuple[Inspected | Rendered, bytes]]":
    async def wait() -> tuple[Inspected | Rendered, bytes]:
        return await work

    return asyncio.create_task(wait())


async def begin_hanging(pool: Pool) -> "asyncio.Task[tuple[Inspected | Rendered, bytes]]":
    """A job in the hands of the only worker, which does not move."""
    hang(pool.pids[0])
    task = begin(render(pool))
    await asyncio.sleep(0)
    assert pool.waiting == 0
    return task


# Work


async def test_a_job_is_answered_from_bytes_and_from_a_file_alike(start_pool: StartPool, tmp_path: Path) -> None:
    pool = await start_pool()
    path = tmp_path / "original"
    path.write_bytes(PNG)
    with path.open("rb", buffering=0) as file:
        from_file, _ = await pool.run(Inspect("png", Limits()), FilePart(file, 0, len(PNG)), "uploads")
    from_bytes, _ = await inspect(pool)
    assert from_file == from_bytes
    assert isinstance(from_bytes, Inspected)
    assert (from_bytes.source.width, from_bytes.source.height) == (64, 48)


async def test_large_frames_travel_whole_both_ways(start_pool: StartPool) -> None:
    pool = await start_pool()
    data = bytes(corpus.photo(1500, 1500).pngsave_buffer(compression=0, keep="none"))
    assert len(data) > 6 << 20
    load = Load(1500, 1500, 1, managed=False, gray=False)
    plan = Plan((load, Encode("png", 0, 0)))
    _, body = await pool.run(Render("png", plan), data, "fast")
    assert len(body) > 6 << 20
    assert body.endswith(b"IEND\xaeB`\x82")


def test_both_event_loops_give_the_same_results() -> None:
    async def work() -> list[str]:
        pool = Pool(settings())
        await pool.start()
        try:
            return [hashlib.sha256((await render(pool, width))[1]).hexdigest() for width in (8, 33, 64)]
        finally:
            await pool.stop()

    digests = []
    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            digests.append(runner.run(work()))
    assert digests[0] == digests[1]


# Death


async def test_a_job_whose_worker_is_killed_is_done_by_another(start_pool: StartPool) -> None:
    pool = await start_pool()
    old = pool.pids[0]
    first = await begin_hanging(pool)
    second = begin(inspect(pool))
    await until(lambda: pool.waiting == 1)
    os.kill(old, signal.SIGKILL)
    assert isinstance((await first)[0], Rendered)
    assert isinstance((await second)[0], Inspected)
    assert old not in pool.pids


async def test_a_retried_job_is_not_turned_away_by_a_full_queue(start_pool: StartPool) -> None:
    pool = await start_pool(queue_limit=1)
    first = await begin_hanging(pool)
    second = begin(render(pool))
    await until(lambda: pool.waiting == 1)
    os.kill(pool.pids[0], signal.SIGKILL)
    for task in (first, second):
        assert isinstance((await task)[0], Rendered)


async def test_a_job_that_kills_every_worker_fails_alone(start_pool: StartPool) -> None:
    pool = await start_pool()
    victim = await begin_hanging(pool)
    later = begin(inspect(pool))
    await until(lambda: pool.waiting == 1)
    first = pool.pids[0]
    # The successor finds the job before us: its work is made to last until it is killed too.
    given_to = []
    real = pool_module._Worker.tell

    def tell(worker: Any, job: Any, original: Any) -> bool:
        told = real(worker, job, original)
        if isinstance(job, Render):
            given_to.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
        return told

    pool_module._Worker.tell = tell  # type: ignore[method-assign]
    try:
        os.kill(first, signal.SIGKILL)
        with pytest.raises(WorkerFailed):
            await victim
    finally:
        pool_module._Worker.tell = real  # type: ignore[method-assign]
    assert len(given_to) == 1
    assert isinstance((await later)[0], Inspected)


async def test_an_idle_worker_that_is_killed_is_replaced(start_pool: StartPool) -> None:
    pool = await start_pool(workers=2)
    before = set(pool.pids)
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    await until(lambda: len(pool.pids) == 2 and killed not in pool.pids)
    assert len(set(pool.pids) - before) == 1
    results = await asyncio.gather(*(inspect(pool) for _ in range(8)))
    assert len(results) == 8


async def test_jobs_right_after_the_death_of_all_idle_workers_are_done(start_pool: StartPool) -> None:
    pool = await start_pool(workers=2)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
        # Without the loop, which would tell the pool.
        while is_alive(pid):
            os.sched_yield()
    results = await asyncio.gather(*(inspect(pool) for _ in range(4)))
    assert all(isinstance(answer, Inspected) for answer, _ in results)


async def test_a_worker_that_is_dead_when_its_turn_comes_does_not_break_the_pool(start_pool: StartPool) -> None:
    """Handed to a waiter and found dead before that one runs: uvloop would raise on its closed socket."""
    pool = await start_pool()
    worker = next(iter(pool._main.workers))
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: worker.dead)
    await until(lambda: pool.pids)
    pool._main.idle.append(worker)
    assert isinstance((await inspect(pool))[0], Inspected)
    assert worker.tell(Inspect("png", Limits()), PNG) is False


async def test_a_job_past_its_deadline_is_too_slow_and_gets_a_new_worker(start_pool: StartPool) -> None:
    pool = await start_pool(timeout_s=0.3)
    old = pool.pids[0]
    slow = await begin_hanging(pool)
    with pytest.raises(TooSlow) as caught:
        await slow
    assert int(caught.value.headers["Retry-After"]) > 0
    await until(lambda: pool.pids and old not in pool.pids)
    assert not is_alive(old)
    assert isinstance((await render(pool))[0], Rendered)


# Admission


async def test_a_full_queue_refuses_at_once_and_disturbs_nobody(start_pool: StartPool) -> None:
    pool = await start_pool(queue_limit=1)
    tasks = [await begin_hanging(pool), begin(render(pool))]
    await until(lambda: pool.waiting == 1)
    # Nothing moves, so an answer is one that waited for nothing.
    with pytest.raises(Overloaded) as caught:
        await render(pool)
    assert int(caught.value.headers["Retry-After"]) > 0
    tasks.append(begin(inspect(pool)))
    await until(lambda: pool.waiting == 2)
    resume(pool.pids[0])
    for task in tasks:
        await task
    assert pool.waiting == 0


async def test_a_job_that_waits_as_long_as_one_may_take_is_refused(start_pool: StartPool) -> None:
    pool = await start_pool(workers=1, timeout_s=0.3)
    running = await begin_hanging(pool)
    # The worker of the job that runs is killed a moment earlier, but its successor takes longer than that to start.
    with pytest.raises(Overloaded):
        await render(pool)
    assert pool.waiting == 0
    with pytest.raises(TooSlow):
        await running


async def test_a_lane_whose_jobs_take_long_gets_no_more_of_a_worker_than_the_other(start_pool: StartPool) -> None:
    """Uploads and fast jobs share by time: one long upload is worth many small renditions."""
    pool = await start_pool()
    running = await begin_hanging(pool)
    order: list[str] = []
    large = bytes(corpus.photo(1200, 1200).pngsave_buffer(keep="none"))
    tasks = [begin(render(pool)) for _ in range(12)] + [begin(inspect(pool, large)) for _ in range(4)]
    for task in tasks:
        name = "fast" if len(order) + tasks.index(task) < 12 else "uploads"
        task.add_done_callback(lambda _, name=name: order.append(name))
    await until(lambda: pool.waiting == 16)
    running.cancel()
    resume(pool.pids[0])
    await asyncio.gather(*tasks)
    # Neither waits for all of the other: some upload comes before the last small job, and most of those early.
    assert order.index("uploads") < 12
    assert order[:14].count("fast") >= 10, order


async def test_a_cancelled_waiting_job_leaves_the_queue(start_pool: StartPool) -> None:
    pool = await start_pool()
    running, waiting, next_one = await begin_hanging(pool), begin(render(pool)), begin(inspect(pool))
    await until(lambda: pool.waiting == 2)
    waiting.cancel()
    await until(waiting.done)
    assert waiting.cancelled()
    assert pool.waiting == 1
    resume(pool.pids[0])
    await running
    await next_one


async def test_a_worker_handed_to_a_job_that_is_cancelled_in_that_moment_goes_to_the_next(
    start_pool: StartPool,
) -> None:
    pool = await start_pool()
    running, leaving, staying = await begin_hanging(pool), begin(render(pool)), begin(render(pool))
    await until(lambda: pool.waiting == 2)
    real = pool._offer

    def offer(worker: Any) -> None:
        real(worker)
        leaving.cancel()

    pool._offer = offer  # type: ignore[method-assign]
    resume(pool.pids[0])
    await running
    assert isinstance((await staying)[0], Rendered)
    assert leaving.cancelled()
    await until(lambda: pool.workers == (0, 1))


async def test_a_job_run_while_another_error_is_handled_uses_its_worker_alone(start_pool: StartPool) -> None:
    pool = await start_pool()
    running = await begin_hanging(pool)

    async def recover() -> None:
        try:
            raise KeyError
        except KeyError:
            await render(pool)

    recovering = asyncio.create_task(recover())
    await until(lambda: pool.waiting == 1)
    resume(pool.pids[0])
    await running
    await recovering
    assert pool.workers == (0, 1)


async def test_a_cancelled_running_job_frees_its_slot(start_pool: StartPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_ABANDON_GRACE_S", 0.05)
    pool = await start_pool()
    old = pool.pids[0]
    running = await begin_hanging(pool)
    running.cancel()
    await until(running.done)
    assert isinstance((await inspect(pool))[0], Inspected)
    assert old not in pool.pids


async def test_a_job_abandoned_but_done_in_time_costs_no_worker_and_nobody_elses_job(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_ABANDON_GRACE_S", 0.2)
    pool = await start_pool()
    worker = pool.pids[0]
    abandoned, others = await begin_hanging(pool), begin(render(pool))
    await until(lambda: pool.waiting == 1)
    abandoned.cancel()
    resume(worker)
    await until(lambda: pool.waiting == 0)
    # The worker has begun with the next job, and is kept at it past the first one's grace.
    hang(worker)
    loop = asyncio.get_running_loop()
    grace_is_over = asyncio.Event()
    loop.call_later(0.4, grace_is_over.set)
    await grace_is_over.wait()
    resume(worker)
    assert isinstance((await others)[0], Rendered)
    assert pool.pids == [worker]


# Lanes


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow jobs end with those who asked for them."""
    monkeypatch.setattr(pool_module, "_ABANDON_GRACE_S", 0.0)


async def leave(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("workers", [1, 2])
async def test_fast_jobs_and_uploads_go_on_while_the_slow_lane_is_full(start_pool: StartPool, workers: int) -> None:
    pool = await start_pool(workers=workers, slow_queue_limit=2)
    slow = [begin(render_slowly(pool)) for _ in range(workers + 2)]
    await until(lambda: pool.slow_workers == (workers, 0))
    assert pool.queues["slow"] == 2
    with pytest.raises(Overloaded) as caught:
        await render_slowly(pool)
    assert int(caught.value.headers["Retry-After"]) > 0
    await asyncio.gather(*(render(pool, width) for width in range(8, 28)), *(inspect(pool) for _ in range(5)))
    assert not any(task.done() for task in slow)
    assert (pool.refused["slow"], pool.refused["fast"], pool.refused["uploads"]) == (1, 0, 0)
    await leave(*slow)


async def test_a_slow_job_finds_a_worker_though_none_may_wait(start_pool: StartPool) -> None:
    pool = await start_pool(queue_limit=0, slow_queue_limit=0)
    assert isinstance((await render(pool, lane="slow"))[0], Rendered)


async def test_workers_for_slow_jobs_are_nice_come_when_they_are_wanted_and_end_when_they_are_not(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_SLOW_IDLE_S", 0.05)
    pool = await start_pool()
    (usual,) = pool.pids
    for _ in range(2):
        assert isinstance((await render(pool, lane="slow"))[0], Rendered)
        (other,) = set(pool.pids) - {usual}
        # As far down as there is room.
        ours = os.getpriority(os.PRIO_PROCESS, usual)
        assert os.getpriority(os.PRIO_PROCESS, other) >= min(19, ours + 5)
        await until(lambda: pool.pids == [usual])
        await until(lambda other=other: not is_alive(other))
    assert pool.died == 0


async def test_a_slow_job_that_comes_while_the_last_slow_worker_ends_is_done_by_a_new_one(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_SLOW_IDLE_S", 0.05)
    pool = await start_pool()
    await render(pool, lane="slow")
    (ending,) = set(pool.pids) - {worker.pid for worker in pool._main.workers}
    # It is told to go, and cannot.
    hang(ending)
    await until(lambda: pool.slow_workers == (0, 0))
    assert ending in pool.pids
    assert isinstance((await render(pool, lane="slow"))[0], Rendered)
    resume(ending)


async def test_a_slow_job_whose_worker_is_killed_is_done_by_another(start_pool: StartPool) -> None:
    pool = await start_pool()
    await render(pool, lane="slow")
    (slow,) = set(pool.pids) - {worker.pid for worker in pool._main.workers}
    hang(slow)
    task = begin(render(pool, lane="slow"))
    await until(lambda: pool.slow_workers == (1, 0))
    os.kill(slow, signal.SIGKILL)
    assert isinstance((await task)[0], Rendered)


async def test_an_upload_that_takes_long_leaves_the_workers_of_fast_jobs_alone(start_pool: StartPool) -> None:
    pool = await start_pool()
    running = await begin_hanging(pool)
    padded = PNG + bytes(9 << 20)
    assert isinstance((await inspect(pool, padded))[0], Inspected)
    assert not running.done()
    resume(next(iter(pool._main.workers)).pid)
    await running


async def test_a_background_job_begins_only_when_nothing_else_is_to_be_done(start_pool: StartPool) -> None:
    pool = await start_pool()
    running = await begin_hanging(pool)
    background = begin(render(pool, lane="background"))
    await until(lambda: pool.queues["background"] == 1)
    next_one = begin(render(pool))
    await until(lambda: pool.queues["fast"] == 1)
    assert pool.slow_workers == (0, 0)
    ended: list[str] = []
    for task, name in ((running, "running"), (next_one, "next"), (background, "background")):
        task.add_done_callback(lambda _, name=name: ended.append(name))
    resume(pool.pids[0])
    assert isinstance((await background)[0], Rendered)
    assert ended == ["running", "next", "background"]


@pytest.mark.usefixtures("no_grace")
async def test_nobody_waits_for_a_background_job(start_pool: StartPool) -> None:
    pool = await start_pool()
    background = begin(render_slowly(pool, "background"))
    await until(lambda: pool.slow_workers == (1, 0))
    another = begin(render(pool, lane="background"))
    assert isinstance((await render(pool))[0], Rendered)
    assert isinstance((await inspect(pool))[0], Inspected)
    assert isinstance((await render(pool, lane="slow"))[0], Rendered)
    assert not background.done()
    assert not another.done()
    await leave(background, another)


async def test_background_jobs_are_dropped_where_many_wait(start_pool: StartPool) -> None:
    pool = await start_pool()
    running = await begin_hanging(pool)
    waiting = [begin(render(pool, lane="background")) for _ in range(pool_module._MAX_BACKGROUND)]
    await until(lambda: pool.waiting == len(waiting))
    with pytest.raises(Overloaded):
        await render(pool, lane="background")
    await leave(*waiting)
    assert pool.waiting == 0
    resume(pool.pids[0])
    await running


# Recycling


async def test_recycling_gives_new_workers_and_fails_no_job(start_pool: StartPool) -> None:
    pool = await start_pool(workers=2, jobs_per_worker=1)
    before = set(pool.pids)
    for _ in range(10):
        await asyncio.gather(*(inspect(pool) for _ in range(3)))
    await until(lambda: not before & set(pool.pids))
    await until(lambda: not before & children())


async def test_a_worker_that_dies_while_it_is_replaced_leaves_the_number_as_it_was(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await start_pool(jobs_per_worker=3)
    real, starts, may_go_on = pool_module._start_worker, [0], asyncio.Event()

    async def start_worker(settings: PoolSettings, niceness: int) -> Any:
        starts[0] += 1
        if starts[0] == 1:
            await may_go_on.wait()
        return await real(settings, niceness)

    monkeypatch.setattr(pool_module, "_start_worker", start_worker)
    for _ in range(3):
        await inspect(pool)
    await until(lambda: starts[0] == 1)
    old = pool.pids[0]
    os.kill(old, signal.SIGKILL)
    await until(lambda: pool.pids and old not in pool.pids)
    known = set(pool.pids)
    may_go_on.set()
    await until(lambda: len(pool._tasks) == 1)
    assert set(pool.pids) == known
    assert children() >= known
    assert len(pool.pids) == 1


# Start and end


async def test_a_pool_that_stops_refuses_its_jobs_and_leaves_no_process(start_pool: StartPool) -> None:
    pool = await start_pool(workers=2)
    pids = pool.pids
    for pid in pids:
        hang(pid)
    tasks = [begin(render(pool)) for _ in range(5)]
    await until(lambda: pool.waiting == 3)
    await pool.stop()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [Overloaded] * 5
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(Overloaded):
        await render(pool)


async def test_a_pool_whose_workers_cannot_start_says_so_and_leaves_nothing(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first child of a process costs the loop a few descriptors of its own.
    await (await start_pool()).stop()
    before, handles = children(), open_handles()
    monkeypatch.setenv("PYTHONHOME", "/where/no/python/is")
    with pytest.raises(WorkerDied):
        await start_pool(workers=2)
    assert children() <= before
    await until(lambda: open_handles() <= handles)


async def test_a_start_that_is_cancelled_leaves_nothing(start_pool: StartPool) -> None:
    before = children()
    for delay_s in (0.0, 0.001, 0.01, 0.08):
        starting = asyncio.create_task(start_pool(workers=2))
        await asyncio.wait([starting], timeout=delay_s)
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled():
            # A machine that is faster than we thought.
            await starting.result().stop()
        assert children() <= before


def open_handles() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_pool_gives_back_every_descriptor(start_pool: StartPool) -> None:
    await (await start_pool()).stop()
    before = open_handles()
    pool = await start_pool(workers=2, jobs_per_worker=1)
    for _ in range(4):
        await inspect(pool)
    os.kill(pool.pids[0], signal.SIGKILL)
    await inspect(pool)
    await pool.stop()
    gc.collect()
    await until(lambda: open_handles() <= before)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_worker_has_nothing_open_but_its_socket(start_server: Callable[..., Server], loop: str) -> None:
    server = start_server(workers=1, loop=loop)
    (worker,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    open_files = {int(path.name): os.readlink(path) for path in Path(f"/proc/{worker}/fd").iterdir()}
    beside = [name for fd, name in open_files.items() if fd > 2]
    assert len(beside) == 1
    assert beside[0].startswith("socket:")


def test_workers_do_not_outlive_a_server_that_is_killed(start_server: Callable[..., Server]) -> None:
    server = start_server(workers=3)
    workers = children(server.process.pid)
    assert len(workers) >= 3
    server.kill()
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# The cage

ESCAPES = """
import os, resource, socket, sys
from uvimg.imaging.confine import confine, limit
still_open = open("/proc/self/status")
listening = socket.create_server(("127.0.0.1", 0))
udp, there = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), listening.getsockname()
if sys.argv[1] == "caged":
    limit(2 << 30)
    print(" ".join(confine()))
attempts = {
    "read a file": lambda: open("/etc/passwd"),
    "write a file": lambda: open("/tmp/never-made-by-a-worker", "w"),
    "list a folder": lambda: os.listdir("/"),
    "make a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "make a named socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "connect": lambda: socket.socket(fileno=os.dup(udp.fileno())).connect(there),
    "run a program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "signal its parent": lambda: os.kill(os.getppid(), 0),
    "limit its parent": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError:
        continue
    print(name)
print("open" if still_open.read() else "closed")
"""


def test_a_confined_process_can_open_nothing_and_connect_to_nothing() -> None:
    def run(how: str) -> list[str]:
        command = [sys.executable, "-c", ESCAPES, how]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()

    free = run("free")
    assert len(free) == 10, "the attempts prove nothing if they fail by themselves"
    in_force, *escaped = run("caged")
    missing = {"landlock", "seccomp"} - set(in_force.split())
    if missing:
        pytest.skip(f"this kernel or machine has no {' and no '.join(sorted(missing))} for us")
    assert escaped == ["open"]


async def test_no_thread_of_a_worker_is_outside_of_its_cage(start_pool: StartPool) -> None:
    pool = await start_pool()
    if "seccomp" not in next(iter(pool._main.workers)).ready.confined_by:
        pytest.skip("this kernel has no seccomp filters for us")
    await render(pool)
    threads = list(Path(f"/proc/{pool.pids[0]}/task").glob("*/status"))
    assert len(threads) > 1
    for status in (path.read_text() for path in threads):
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status


async def test_the_environment_of_a_worker_holds_no_secret(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UVIMG_STORE", "local:/hush-hush")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    pool = await start_pool()
    assert b"hush" not in Path(f"/proc/{pool.pids[0]}/environ").read_bytes()


MATRIX = b"3 3\n1 2 3\n4 5 6\n7 8 9\n"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>'
PDF = b"%PDF-1.7\n1 0 obj\n<</Type/Catalog>>\nendobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"


async def test_what_calls_itself_jpeg_and_is_not_is_refused_by_the_worker_too(
    start_pool: StartPool, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = await start_pool()
    worker = pool.pids
    ppm = b"P6 2 2 255\n" + bytes(12)
    for data in (MATRIX, SVG, PDF, ppm, PNG, b"", b"\xff\xd8\xff", os.urandom(999), PNG[:40]):
        with pytest.raises(Undecodable):
            await inspect(pool, data, "jpeg")
    assert pool.pids == worker
    assert capfd.readouterr() == ("", "")


@functools.cache
def large_interlaced_png() -> bytes:
    """It has to be held in memory whole: 288 MB."""
    picture = corpus.flat(9_000, 8_000, (1, 2, 3, 4))
    return bytes(picture.pngsave_buffer(interlace=True, compression=1, keep="none"))


async def test_an_image_that_needs_more_memory_than_a_worker_has_is_refused_by_a_worker_that_lives_on(
    start_pool: StartPool,
) -> None:
    pool = await start_pool(memory_bytes=352 << 20)
    worker = pool.pids
    data = large_interlaced_png()
    with pytest.raises(BeyondLimits, match="memory"):
        await pool.run(Inspect("png", Limits(max_progressive_pixels=75_000_000)), data, "uploads")
    assert pool.pids == worker
    assert isinstance((await inspect(pool))[0], Inspected)


async def test_damaged_originals_cost_a_worker_no_descriptor(start_pool: StartPool, tmp_path: Path) -> None:
    """It has 64 in all, and a source that an error keeps alive would hold one."""
    pool = await start_pool()
    worker = pool.pids
    path = tmp_path / "original"
    path.write_bytes(PNG[:-60])
    with path.open("rb", buffering=0) as file:
        for _ in range(150):
            with pytest.raises(Undecodable):
                await pool.run(Inspect("png", Limits()), FilePart(file, 0, len(PNG) - 60), "uploads")
    assert pool.pids == worker


@pytest.mark.parametrize(
    "said",
    [
        PREFIX.pack(1 << 31, 0),
        PREFIX.pack(2, 1 << 31),
        PREFIX.pack(2, 0) + b"\xc1\xc1",
        encode_frame(Refused("kind", "xxxx"), 0).replace(b"xxxx", b"\xff\xfe\xfd\xfc"),
        encode_frame(Learnt(), 0) + b"more",
    ],
    ids=["a long head", "a long body", "no msgpack", "no UTF-8", "too much"],
)
@pytest.mark.usefixtures("start_pool")
async def test_a_worker_that_says_what_is_no_answer_is_lost_without_complaint(said: bytes) -> None:
    """As one would that somebody has taken over."""
    ours, theirs = socket.socketpair()
    worker = pool_module._Worker(await asyncio.create_subprocess_exec("sleep", "60"), ours.dup())
    lost: list[object] = []
    worker.on_answer = lambda *answer: pytest.fail(f"taken for an answer: {answer}")
    worker.on_loss = lost.append
    await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
    with theirs:
        theirs.setblocking(False)
        theirs.sendall(said)
        await until(lambda: lost)
        with contextlib.suppress(OSError):
            while theirs.send(bytes(1 << 16)):
                await asyncio.sleep(0)
        worker.kill()
        await worker.exited()


async def test_the_pool_knows_for_how_long_no_worker_has_been_alive(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await start_pool()
    assert (pool.workerless_s, pool.died) == (0, 0)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/no/such/python")
        os.kill(pool.pids[0], signal.SIGKILL)
        await until(lambda: pool.workerless_s > 0.01)
    await until(lambda: len(pool.pids) == 1)
    assert (pool.workerless_s, pool.died, pool.recycled) == (0, 1, 0)
