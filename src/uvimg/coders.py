"""The makers of content codings: bytes in, coded bytes out, in threads where there is much of them.

A coding is made a step at a time, and only when somebody asks for the next: a client that reads slowly, or goes away,
stops it, and what it holds stays bounded. Steps run in few threads, which give way to the loop. What all codings
under way hold in memory is bounded too; more wait in a short queue, and the rest are Overloaded. Those that somebody
chose by hand have half of the memory and a queue of their own, so that they can never keep out the others.
Rule: no frame needs a larger window than 8 MiB to be decoded, for browsers have no more (RFC 9659).
Surprise: of a level above 19 zstd would take 128 MiB where nobody says how long the content is.
"""

import asyncio
import concurrent.futures
import contextlib
import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zstandard

from uvimg.core.coding import Coding
from uvimg.core.dictionary import begin_dcz
from uvimg.core.errors import Overloaded
from uvimg.core.message import Content, FilePart


def _find(*names: str) -> Any:
    """The first of these modules that is installed, None where none is."""
    for name in names:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


# zlib-ng takes half the time of zlib, for 0.4 % more bytes.
_zlib, _brotli = _find("zlib_ng.zlib_ng", "zlib"), _find("brotli")

# The codings that can be made here, the one to prefer first.
_BR: tuple[Coding, ...] = ("br",) if _brotli else ()
OFFERED: tuple[Coding, ...] = ("zstd", *_BR, "gzip")

_MAX_WINDOW_LOG = 23
_WHOLE = 8 << 20
# What is coded in the call itself: 0.4 ms at zstd's level 3.
AT_ONCE_BYTES = 65_536
# A step takes one look at the clock for each piece of the content. Most texts are made in one: to wake a thread for
# each 256 KiB, and to send them as chunks, would cost 5 % on top of zstd's level 3.
_PIECE_BYTES = 262_144
_STEP_OUT_BYTES = 2 << 20
_STEP_S = 0.1
_MOST_WAITING = 100
# For room. One that comes later than the content as it is would is of no use to its client.
_PATIENCE_S = 2.0
# Threads above this cost are as nice as can be, others a little: the loop's own always comes first.
_SLOW_LEVEL = 10
_NICE, _VERY_NICE, _NICEST = 5, 10, 19
# Compressors that hold more than this are made again when they are needed.
_MOST_KEPT_BYTES = 16 << 20


class _Compressor(Protocol):
    """What makes one coded body."""

    def compress(self, data: bytes | memoryview, /) -> bytes: ...

    def flush(self) -> bytes: ...


class Coders:
    """Codings under way. `max_bytes` bounds what they may hold in memory, but for those that nobody waits for.

    Of these there is one at a time, in a thread that gives way to all others.
    """

    def __init__(self, max_bytes: int) -> None:
        self._room, self._forced_room = _Room(max_bytes - max_bytes // 2), _Room(max_bytes // 2)
        cores = len(os.sched_getaffinity(0))
        self._idle = concurrent.futures.ThreadPoolExecutor(1, "uvimg-coder-idle", _be_nice, (_NICEST,))
        self._quick = concurrent.futures.ThreadPoolExecutor(cores, "uvimg-coder", _be_nice, (_NICE,))
        self._slow = concurrent.futures.ThreadPoolExecutor(cores, "uvimg-coder-slow", _be_nice, (_VERY_NICE,))

    async def until_idle(self) -> None:
        """Until no client waits for any of them."""
        while self._room.used or self._forced_room.used:
            await self._room.empty.wait()
            await self._forced_room.empty.wait()

    @property
    def held_bytes(self) -> int:
        return self._room.used + self._forced_room.used

    def close(self) -> None:
        for threads in (self._quick, self._slow, self._idle):
            threads.shutdown(cancel_futures=True)

    async def start(
        self,
        content: Content,
        coding: Coding,
        level: int,
        dictionary: tuple[bytes, Content] | None = None,
        *,
        forced: bool = False,
    ) -> "Coded":
        """A coding of `content`, which is closed with it. Overloaded when too many wait already, or for too long.

        A `dictionary` is its digest and its content, which is read once there is room for it, and closed with it too.
        Of one that is `forced` the effort was chosen by hand.
        """
        size = size_of(content)
        weight = weigh(coding, level, size, size_of(dictionary[1]) if dictionary else 0)
        room = self._forced_room if forced else self._room
        try:
            # Whoever chooses by hand waits for it; all others can have the content as it is.
            async with asyncio.timeout(None if forced else _PATIENCE_S):
                await room.enter(weight)
        except BaseException as exc:
            close(content, *dictionary[1:] if dictionary else ())
            if isinstance(exc, TimeoutError):
                raise Overloaded() from exc
            raise
        threads = self._slow if is_slow(coding, level) else self._quick
        return Coded(content, size, coding, level, dictionary, threads, lambda: room.leave(weight))

    def start_idly(
        self, content: Content, coding: Coding, level: int, dictionary: tuple[bytes, Content] | None = None
    ) -> "Coded":
        """The same for something that nobody waits for. One at a time."""
        return Coded(content, size_of(content), coding, level, dictionary, self._idle, lambda: None)


class Coded:
    """One body on its way: iterate, or `step` until `ended`; then `close`, which may come at any time, and again."""

    def __init__(
        self,
        content: Content,
        size: int,
        coding: Coding,
        level: int,
        dictionary: tuple[bytes, Content] | None,
        threads: concurrent.futures.Executor,
        leave: Callable[[], None],
    ) -> None:
        self._content, self._size, self._at = content, size, 0
        self._coding, self._level, self._dictionary = coding, level, dictionary
        self._threads, self._leave = threads, leave
        self._compressor: _Compressor | None = None
        self._buffer = b"" if isinstance(content, bytes) else bytearray(min(size, _PIECE_BYTES))
        self._running: concurrent.futures.Future[bytes] | None = None
        self._closed = self._stopped = False
        # Whether all of it has been made.
        self.ended = False

    def __aiter__(self) -> "Coded":
        return self

    async def __anext__(self) -> bytes:
        if self.ended:
            raise StopAsyncIteration
        return await self.step()

    async def step(self) -> bytes:
        """What comes next of the body, made in a thread; it may be nothing."""
        self._running = self._threads.submit(self._make)
        return await asyncio.wrap_future(self._running)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = self._stopped = True
        loop = asyncio.get_running_loop()
        if self._running is not None and not self._running.done():
            # A file that is being read must not be closed: its number may be another's by then.
            self._running.add_done_callback(lambda _: _call_in(loop, self._free))
        else:
            self._free()

    def _free(self) -> None:
        close(self._content, *self._dictionary[1:] if self._dictionary else ())
        self._compressor = None
        self._leave()

    def _make(self) -> bytes:
        made: list[bytes] = []
        held, until = 0, time.monotonic() + _STEP_S
        if self._compressor is None:
            dictionary = None
            if self._dictionary is not None:
                made.append(begin_dcz(self._dictionary[0]))
                dictionary = _read_all(self._dictionary[1])
            self._compressor = _start(self._coding, self._level, self._size, dictionary)
        while self._at < self._size and held < _STEP_OUT_BYTES and time.monotonic() < until and not self._stopped:
            data = self._read()
            self._at += len(data)
            piece = self._compressor.compress(data)
            held += len(piece)
            made.append(piece)
        if self._at == self._size and not self._stopped:
            made.append(self._compressor.flush())
            self._compressor = None
            self.ended = True
        return b"".join(made)

    def _read(self) -> bytes | memoryview:
        if isinstance(self._content, bytes):
            return memoryview(self._content)[self._at : self._at + _PIECE_BYTES]
        size = min(_PIECE_BYTES, self._size - self._at)
        # Into the same memory again and again: new memory costs more than reading into it.
        room = memoryview(self._buffer)[:size]
        if os.preadv(self._content.file.fileno(), [room], self._content.start + self._at) != size:
            raise ConnectionResetError("a file has become shorter while it was coded")
        return room


def code_now(data: bytes, coding: Coding, level: int) -> bytes:
    """All of it in this call. For small bodies, and for threads."""
    compressor = _start(coding, level, len(data), None)
    return compressor.compress(data) + compressor.flush()


def is_slow(coding: Coding, level: int) -> bool:
    return coding in ("zstd", "dcz", "br") and level >= _SLOW_LEVEL


def weigh(coding: Coding, level: int, size: int, dictionary_bytes: int = 0) -> int:
    """About what a coding holds in memory while it is made, in bytes."""
    if coding == "gzip":
        return 1 << 20
    if coding == "br":
        return (128 << 20) if level >= 10 else (16 << 20)
    # A dictionary is held as it was read and once more by the compressor.
    return _weigh_zstd(_zstd_parameters(level, size, dictionary_bytes)) + 2 * dictionary_bytes


def _weigh_zstd(parameters: zstandard.ZstdCompressionParameters) -> int:
    # Streams keep their window beside the tables.
    held: int = parameters.estimated_compression_context_size() + (1 << parameters.window_log)
    return held + _STEP_OUT_BYTES


def _zstd_parameters(level: int, size: int, dictionary_bytes: int = 0) -> zstandard.ZstdCompressionParameters:
    chosen = zstandard.ZstdCompressionParameters.from_level(level, source_size=size, dict_size=dictionary_bytes)
    window = min(chosen.window_log, _MAX_WINDOW_LOG)
    if level in (3, 4) and not dictionary_bytes and size <= _WHOLE:
        # Their match finder loses 0.3 % where the window moves on, and the memory is small.
        window = max(window, (size - 1).bit_length())
    if window == chosen.window_log:
        return chosen
    # With a smaller window the tables would stay as large as for the larger one.
    return zstandard.ZstdCompressionParameters.from_level(
        level,
        source_size=size,
        dict_size=dictionary_bytes,
        window_log=window,
        hash_log=min(chosen.hash_log, window + 1),
        chain_log=min(chosen.chain_log, window + 1),
    )


class _Kept:
    """Compressors that wait to be used again: making one's tables anew takes longer than a small body."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[tuple[int, ...], zstandard.ZstdCompressor, int]] = []
        self._bytes = 0

    def take(self, key: tuple[int, ...]) -> zstandard.ZstdCompressor | None:
        with self._lock:
            for place, (known, compressor, size) in enumerate(self._waiting):
                if known == key:
                    del self._waiting[place]
                    self._bytes -= size
                    return compressor
        return None

    def give(self, key: tuple[int, ...], compressor: zstandard.ZstdCompressor, size: int) -> None:
        with self._lock:
            self._waiting.append((key, compressor, size))
            self._bytes += size
            while self._bytes > _MOST_KEPT_BYTES:
                self._bytes -= self._waiting.pop(0)[2]


_kept = _Kept()


class _Zstd:
    """A frame that says how long its content is."""

    def __init__(self, level: int, size: int, dictionary: bytes | None) -> None:
        parameters = _zstd_parameters(level, size, len(dictionary or b""))
        self._key = (level, parameters.window_log, parameters.hash_log, parameters.chain_log)
        self._bytes = _weigh_zstd(parameters)
        # One with a dictionary is of use for this body alone.
        self._again = dictionary is None
        compressor = _kept.take(self._key) if self._again else None
        if compressor is None:
            options: dict[str, Any] = {}
            if dictionary is not None:
                options["dict_data"] = zstandard.ZstdCompressionDict(
                    dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT
                )
            compressor = zstandard.ZstdCompressor(compression_params=parameters, **options)
        self._compressor = compressor
        self._frame = compressor.compressobj(size=size)

    def compress(self, data: bytes | memoryview, /) -> bytes:
        return self._frame.compress(data)

    def flush(self) -> bytes:
        data = self._frame.flush()
        if self._again:
            _kept.give(self._key, self._compressor, self._bytes)
        return data


class _Brotli:
    def __init__(self, level: int) -> None:
        self._compressor = _brotli.Compressor(quality=level)

    def compress(self, data: bytes | memoryview, /) -> bytes:
        made: bytes = self._compressor.process(data)
        return made

    def flush(self) -> bytes:
        made: bytes = self._compressor.finish()
        return made


def _start(coding: Coding, level: int, size: int, dictionary: bytes | None) -> _Compressor:
    match coding:
        case "gzip":
            # 31: with gzip's own head and tail.
            compressor: _Compressor = _zlib.compressobj(level, _zlib.DEFLATED, 31)
            return compressor
        case "br":
            return _Brotli(level)
    return _Zstd(level, size, dictionary)


class _Room:
    """So many bytes of memory, for whoever enters, in the order of coming."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.used = 0
        self._inside = 0
        self.empty = asyncio.Event()
        self.empty.set()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, weight: int) -> None:
        """Overloaded when too many wait. What is larger than all the room enters alone."""
        if not self._waiting and self._fits(weight):
            self._take(weight)
            return
        if len(self._waiting) >= _MOST_WAITING:
            raise Overloaded()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((weight, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(weight)
            elif (weight, turn) in self._waiting:
                self._waiting.remove((weight, turn))
                self._admit()
            raise

    def leave(self, weight: int) -> None:
        self.used -= weight
        self._inside -= 1
        self._admit()
        if not self._inside:
            self.empty.set()

    def _fits(self, weight: int) -> bool:
        return not self._inside or self.used + weight <= self._max_bytes

    def _take(self, weight: int) -> None:
        self.used += weight
        self._inside += 1
        self.empty.clear()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            weight, turn = self._waiting.popleft()
            if not turn.done():
                self._take(weight)
                turn.set_result(None)


def _be_nice(nice: int) -> None:
    # Linux knows a thread by a number of its own, and niceness is each thread's.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed: the process ends
        loop.call_soon_threadsafe(call)


def _read_all(content: Content) -> bytes:
    if isinstance(content, bytes):
        return content
    data = os.pread(content.file.fileno(), content.size, content.start)
    if len(data) != content.size:
        raise ConnectionResetError("a dictionary has become shorter while it was read")
    return data


def size_of(content: Content) -> int:
    return content.size if isinstance(content, FilePart) else len(content)


def close(*contents: Content | None) -> None:
    for content in contents:
        if isinstance(content, FilePart):
            content.close()
