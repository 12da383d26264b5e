"""What is counted, how it is told to Prometheus, and how several processes tell it as one.

Counting is plain attributes (core/tally.py); everything dearer happens when somebody asks. prometheus-client
writes the text, no more: its own counters cost ten times as much and take a lock.
With a folder, each process leaves a snapshot of its numbers there every second and before it tells them, and
whoever is asked adds those of the others to its own: another process is seen as it was up to a second ago, and
no total that was told ever goes down. Who is alive says a lock on its file, which the kernel takes away however
a process ends.
Surprise: a file's lock goes with its inode. Each snapshot is a new file that is locked before it gets its name.
"""

import asyncio
import concurrent.futures
import contextlib
import fcntl
import logging
import os
import resource
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from uvimg.core.tally import BOUNDS_S, Key, Place, Snapshot, Tallies, Times, merge

log = logging.getLogger("uvimg.metrics")

_PERIOD_S = 1.0
# A younger draft may be on its way to its name.
_ORPHAN_AGE_S = 60


P = ParamSpec("P")
T = TypeVar("T")


class Reading(NamedTuple):
    """The value of one place of a family in `_FAMILIES`."""

    family: str
    labels: tuple[str, ...]
    value: float


class _Family(NamedTuple):
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


# Counters get their _total when they are told.
_FAMILIES = {
    "uvimg_requests": _Family("counter", "Answers.", ("app", "route", "status")),
    "uvimg_requests_repeated": _Family("counter", "Answers that only had to be written again, of these.", ("app",)),
    "uvimg_errors": _Family("counter", "Errors told, in whatever dialect and status.", ("app", "route", "error")),
    "uvimg_hits": _Family("counter", "Images and renditions answered, by how they were got.", ("app", "kind")),
    "uvimg_process_starts": _Family("counter", "Service processes that were started."),
    "uvimg_cpu_seconds": _Family("counter", "CPU time, of the service and of its image workers.", ("part",)),
    "uvimg_jobs": _Family("counter", "Image jobs that a worker was given.", ("lane",)),
    "uvimg_jobs_refused": _Family("counter", "Image jobs answered 503: no place, or too long a wait.", ("lane",)),
    "uvimg_job_timeouts": _Family("counter", "Image jobs past their deadline, whose worker was killed."),
    "uvimg_worker_restarts": _Family(
        "counter", "Image workers replaced: died, or at the end of their count.", ("reason",)
    ),
    "uvimg_intermediates_made": _Family("counter", "Reduced versions of large originals that were made and kept."),
    "uvimg_intermediates_made_bytes": _Family("counter", "What these took when they were made."),
    "uvimg_intermediates_failed": _Family("counter", "Originals of which none could be made or kept."),
    "uvimg_intermediates_used": _Family("counter", "Renditions that were begun from a reduced version."),
    "uvimg_recoded": _Family("counter", "Kept renditions coded anew, by whether that made them smaller.", ("outcome",)),
    "uvimg_recoded_saved_bytes": _Family("counter", "What these have become smaller by."),
    "uvimg_processes": _Family("gauge", "Service processes.", ("state",)),
    "uvimg_queue_jobs": _Family("gauge", "Image jobs that wait for a worker.", ("lane",)),
    "uvimg_queue_limit_jobs": _Family("gauge", "Image jobs that may wait for a worker.", ("lane",)),
    "uvimg_workers": _Family("gauge", "Image workers that are alive, beside those for slow jobs.", ("state",)),
    "uvimg_workers_wanted": _Family("gauge", "Image workers that there should be, beside those for slow jobs."),
    "uvimg_slow_workers": _Family("gauge", "Image workers for slow jobs; they come and go with these.", ("state",)),
    "uvimg_cache_bytes": _Family("gauge", "Renditions at hand in memory."),
    "uvimg_cache_limit_bytes": _Family("gauge", "Most that renditions at hand may take."),
    "uvimg_cache_entries": _Family("gauge", "Renditions at hand in memory."),
    "uvimg_codings": _Family("counter", "Compressed copies made, for a client or to have a better one.", ("why",)),
    "uvimg_coding_bytes": _Family("gauge", "Memory that compressing for clients is given at the moment."),
    "uvimg_coding_limit_bytes": _Family("gauge", "Most that compressing for clients is given."),
    "uvimg_codings_wanted": _Family("gauge", "Compressed copies that wait to be made better."),
    "uvimg_connections_open": _Family("gauge", "Connections of clients.", ("front_end",)),
    "uvimg_open_fds": _Family("gauge", "File descriptors in use by the service."),
    "uvimg_resident_bytes": _Family("gauge", "Resident memory, of the service and of its image workers.", ("part",)),
    "uvimg_store_blobs": _Family("gauge", "Blobs in the store: originals, renditions and all else."),
    "uvimg_store_names": _Family("gauge", "Names in the store; an original has two, a rendition one."),
    "uvimg_store_database_bytes": _Family("gauge", "Pages in use in the store's database: names and small blobs."),
    "uvimg_backend_away": _Family("gauge", "Processes that do not ask a server, for it did not answer.", ("backend",)),
    "uvimg_backend_failures": _Family("counter", "Calls that a server did not answer.", ("backend",)),
    "uvimg_backend_calls_refused": _Family("counter", "Calls not made because it had not answered.", ("backend",)),
    "uvimg_tier_bytes": _Family("gauge", "Disk space in use by what is kept here of a store that is far away."),
    "uvimg_tier_limit_bytes": _Family("gauge", "The most of it that may be used."),
    "uvimg_tier_blobs": _Family(
        "counter", "Blobs asked for that were kept here, and that had to be fetched.", ("how",)
    ),
    "uvimg_shared_cache_calls": _Family(
        "counter", "Renditions and coded copies asked of the shared cache or given to it, by outcome.", ("outcome",)
    ),
    "uvimg_store_free_bytes": _Family("gauge", "Room left in the store's file system."),
}

Watch = Callable[[], Iterable[Reading]]


class Metrics:
    """All numbers of this process and, with a folder, of those beside it."""

    def __init__(self, folder: str = "") -> None:
        self.tallies = Tallies()
        # What this is, for people.
        self.info: dict[str, str] = {}
        self._watched: list[Watch] = []
        self._viewed: list[Watch] = []
        self._folder = _Folder(Path(folder)) if folder else None
        self._failing = False
        # One thing at a time and in order, in a thread of its own: a disk may take its time.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "uvimg-metrics")

    def watch(self, read: Watch) -> None:
        """Have these read whenever somebody asks, and added to those of other processes."""
        self._watched.append(read)

    def view(self, read: Watch) -> None:
        """The same for gauges of what all processes share: they are not added up."""
        self._viewed.append(read)

    def others_serve(self) -> bool:
        """Whether another process beside this one is not about to end. False where nobody can say."""
        if self._folder is None:
            return False
        try:
            living, _ = self._folder.read()
        except OSError:
            return False
        return any(other.gauges.get(("uvimg_processes", ("serving",))) for other in living)

    async def expose(self, accept: str) -> tuple[str, bytes]:
        """Content type and text for Prometheus, in the older format or in OpenMetrics."""
        snapshot = self._snapshot()
        if self._folder is not None:
            await self._publish(snapshot)
            living, ended = await self._in_thread(self._folder.read)
            snapshot = merge([snapshot, *living], ended)
        registry = CollectorRegistry()
        registry.register(_Collector(list(self._tell(snapshot))))
        # Never the client's own words: the library fails on odd versions, and says others back.
        known = (
            "application/openmetrics-text; version=1.0.0" if "application/openmetrics-text" in accept.lower() else ""
        )
        encode, content_type = choose_encoder(known)
        return content_type, encode(registry)

    @contextlib.asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Leave snapshots for other processes meanwhile. OSError when the folder cannot be used."""
        if self._folder is None:
            yield
            return
        self._folder.open()
        self._folder.write(self._snapshot())
        stop = asyncio.Event()
        task = asyncio.create_task(self._publish_until(stop))
        try:
            yield
        finally:
            # Not cancelled: what it may be writing must not come behind the last word.
            stop.set()
            await task
            await self.publish()
            self._folder.close()
            self._thread.shutdown(wait=False)

    async def publish(self) -> None:
        """Let other processes see this one as it is now."""
        await self._publish(self._snapshot())

    async def _publish(self, snapshot: Snapshot) -> None:
        if self._folder is not None:
            try:
                await self._in_thread(self._folder.write, snapshot)
            except OSError as exc:
                # Once, not every second.
                if not self._failing:
                    log.warning("the metrics of this process could not be written: %s", exc)
                self._failing = True
            else:
                self._failing = False

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._thread.submit(work, *args, **kwargs))

    async def _publish_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_S):
                    await stop.wait()
            await self.publish()

    def _snapshot(self) -> Snapshot:
        snapshot = Snapshot({key: tally.rest() for key, tally in self.tallies.items()})
        for read in self._watched:
            for family, labels, value in read():
                values = snapshot.counters if _FAMILIES[family].kind == "counter" else snapshot.gauges
                values[family, labels] = value
        return snapshot

    def _tell(self, snapshot: Snapshot) -> Iterator[Metric]:
        values = _count_answers(snapshot.times) | snapshot.counters | snapshot.gauges
        for read in self._viewed:
            values |= {(family, labels): value for family, labels, value in read()}
        yield InfoMetricFamily("uvimg_build", "What this is.", self.info)
        yield _tell_times(snapshot.times)
        for name, (kind, help, labels) in _FAMILIES.items():
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, help, labels=labels)
            for place, value in values.items():
                if place[0] == name:
                    family.add_metric(place[1], value)
            if family.samples:
                yield family


class _Collector:
    """Families as prometheus-client's registry wants them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _count_answers(times: dict[Key, Times]) -> dict[Place, float]:
    """What tallies say beside the time that answers took."""
    counters = Counter[Place]()
    for (app, route, status, origin), each in times.items():
        count = sum(each.counts)
        counters["uvimg_requests", (app, route, str(status))] += count
        counters["uvimg_requests_repeated", (app,)] += each.repeated
        if origin[:1].isupper():
            counters["uvimg_errors", (app, route, origin)] += count
        elif origin:
            counters["uvimg_hits", (app, origin)] += count
    return dict(counters)


def _tell_times(times: dict[Key, Times]) -> Metric:
    counts: dict[tuple[str, str, str], list[int]] = {}
    seconds: dict[tuple[str, str, str], float] = {}
    for (app, route, status, _), each in times.items():
        of = (app, route, str(status))
        before = counts.get(of, [0] * len(each.counts))
        counts[of] = [one + other for one, other in zip(before, each.counts, strict=True)]
        seconds[of] = seconds.get(of, 0) + each.seconds
    family = HistogramMetricFamily(
        "uvimg_request_seconds",
        "Time to an answer, without its way over the network. Repeated ones count in the first bucket, untimed.",
        labels=("app", "route", "status"),
    )
    for of, counted in counts.items():
        buckets = zip((*map(str, BOUNDS_S), "+Inf"), accumulate(counted), strict=True)
        family.add_metric(of, list(buckets), seconds[of])
    return family


def watch_process(workers: Callable[[], Iterable[int]], is_draining: Callable[[], bool]) -> Watch:
    """Readings of this process and of its image workers, whose process ids are asked for each time."""

    def read() -> Iterator[Reading]:
        pids = list(workers())
        # In one call with nothing awaited, so no worker is reaped in between and counted twice or not at all.
        mine, reaped = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        living_s = sum(map(_cpu_of, pids))
        yield Reading("uvimg_process_starts", (), 1)
        yield Reading("uvimg_processes", ("draining" if is_draining() else "serving",), 1)
        yield Reading("uvimg_cpu_seconds", ("service",), mine.ru_utime + mine.ru_stime)
        yield Reading("uvimg_cpu_seconds", ("workers",), reaped.ru_utime + reaped.ru_stime + living_s)
        yield Reading("uvimg_resident_bytes", ("service",), _resident_of("self"))
        yield Reading("uvimg_resident_bytes", ("workers",), sum(map(_resident_of, pids)))
        # Since Linux 6.2 the folder's size is the count; listing it would take 10 ms with 20,000 connections.
        if open_fds := os.stat("/proc/self/fd").st_size:
            yield Reading("uvimg_open_fds", (), open_fds)

    return read


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _cpu_of(pid: int) -> float:
    """CPU seconds of a child, 0 once it has been reaped."""
    try:
        # The second field, a name, may hold anything but is the only one in parentheses.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _resident_of(pid: int | str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


# Several processes


class _Ended(msgspec.Struct, array_like=True):
    """What all ended processes counted. The files named in `folded` are in it, also where they are still there."""

    generation: str
    folded: list[str]
    total: Snapshot


_encode = msgspec.msgpack.Encoder().encode
_decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode
_decode_ended = msgspec.msgpack.Decoder(_Ended).decode


class _Folder:
    """Snapshots, a file for each process and one for all that have ended.

    Reading takes no lock: whoever folds an ended process into the common file names it there before its own file
    goes, so a reader that finds the common file unchanged has seen everybody exactly once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = f"{secrets.token_hex(8)}.live"
        self._held: int | None = None

    def open(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fold()

    def close(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def write(self, snapshot: Snapshot) -> None:
        draft = self._path / f"{self._name}.draft"
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            rest = memoryview(_encode(snapshot))
            while rest:
                rest = rest[os.write(file, rest) :]
            os.rename(draft, self._path / self._name)
        except BaseException:
            os.close(file)
            raise
        self.close()
        self._held = file

    def read(self) -> tuple[list[Snapshot], list[Snapshot]]:
        """The other processes, living and ended."""
        while True:
            before = self._read_ended()
            living: list[Snapshot] = []
            ended = [before.total]
            dead = False
            for name in self._names():
                if name == self._name or name in before.folded:
                    continue
                found = self._look(name)
                if found is not None:
                    (living if found[1] else ended).append(found[0])
                    dead = dead or not found[1]
            # Bounded: it changes once for each process that ends.
            if self._read_ended().generation == before.generation:
                break
        if dead:
            try:
                self._fold()
            except OSError as exc:
                log.warning("the metrics of ended processes could not be put together: %s", exc)
        return living, ended

    def _names(self) -> list[str]:
        return sorted(path.name for path in self._path.glob("*.live"))

    def _look(self, name: str) -> tuple[Snapshot, bool] | None:
        """A process's snapshot and whether it lives; None for one that is not there or not ours to read."""
        path = self._path / name
        while True:
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError):
                return None
            try:
                try:
                    # Shared: two who look at once must not take each other for its owner.
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    if not _is_same(file, path):
                        # Replaced in this moment, so it lives.
                        continue
                    lives = False
                except BlockingIOError:
                    lives = True
                snapshot = _decode_snapshot(os.read(file, os.fstat(file).st_size))
                if _is_ours(snapshot):
                    return snapshot, lives
            except msgspec.DecodeError:
                pass
            finally:
                os.close(file)
            log.warning("%s is not a snapshot of this version's metrics", path)
            return None

    def _read_ended(self) -> _Ended:
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            ended = _decode_ended((self._path / "ended").read_bytes())
            if _is_ours(ended.total):
                return ended
            log.warning("what ended processes of another version counted in %s is left out", self._path)
        return _Ended("", [], Snapshot())

    def _fold(self) -> None:
        """Add those that have ended to the common file, and remove theirs. Whoever finds another at it leaves it."""
        lock = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ended = self._read_ended()
            self._remove(ended.folded)
            looked = {name: self._look(name) for name in self._names()}
            dead = {name: found[0] for name, found in looked.items() if found is not None and not found[1]}
            if dead:
                total = merge([], [ended.total, *dead.values()])
                draft = self._path / "ended.draft"
                draft.write_bytes(_encode(_Ended(secrets.token_hex(8), list(dead), total)))
                draft.rename(self._path / "ended")
                self._remove(dead)
            for draft in self._path.glob("*.live.draft"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - draft.stat().st_mtime > _ORPHAN_AGE_S:
                        draft.unlink()
        except BlockingIOError:
            pass
        finally:
            os.close(lock)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self._path / name).unlink(missing_ok=True)


def _is_ours(snapshot: Snapshot) -> bool:
    """Whether its histograms have the buckets of this version."""
    return all(len(times.counts) == len(BOUNDS_S) + 1 for times in snapshot.times.values())


def _is_same(file: int, path: Path) -> bool:
    """Whether this open file is still the one of that name; while it is open nobody else gets its number."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
