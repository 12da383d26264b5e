"""Values under keys: the published load, a mixed one, durable writes, and very many keys.

The servers are given the quotation first, then asked for it. What writes cost is held against the disk itself: a loop
that syncs after each write, in the same round, on the same file system.
Surprise: with very many keys nothing is answered from the memo (`--memo-size=0`), for either number of them: a memo
holds a thousand answers and never ten million, and what is asked here is what the store's size costs.
"""

import asyncio
import contextlib
import http.client
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lmdb
import msgspec

from bench import nginx, published, serving
from bench.exchange import Ask
from bench.generators import count_threads, end_wrk, read_count, start_wrk, wait, write_wrk_script
from bench.load import KeepAlive, NewConnections, summarise_cost
from bench.result import Goal
from bench.serving import Address, BenchError, Cores, Launch, Server
from bench.site import Content, Site, Variant, absent
from uvimg.apps.values import make_record, receive_bytes
from uvimg.core.address import value_name, values_prefix
from uvimg.store.local import LocalStore

# The value of the published load: Hobbes, Leviathan, as it is quoted there. It is in the public domain.
QUOTATION = (
    b"Man is distinguished, not only by his reason, but by this singular passion from other animals, which is a lust "
    b"of the mind, that by a perseverance of delight in the continued and indefatigable generation of knowledge, "
    b"exceeds the short vehemence of any carnal pleasure. (Hobbes, Leviathan)"
)
_MANY, _MANY_QUICK, _FEW = 10_000_000, 1_000_000, 1_000
_MIXED_KEYS = 100_000
_DATABASE = b"bench"
_START_S = 60.0


class ValueServer(Variant):
    """One that has the quotation at a path, after it has been put there."""

    __slots__ = ()

    def ask(self, site: Site, content: Content, address: Address) -> Ask:
        path = self.path or "/test"
        if not self.blind:
            connection = http.client.HTTPConnection(*address, timeout=30)
            connection.request("PUT", path, QUOTATION, {"Content-Type": "text/plain"})
            status = connection.getresponse().status
            connection.close()
            if status not in (200, 201, 204):
                raise BenchError(f"{self.name} answers PUT {path} with {status}")
        return Ask(path, 200, QUOTATION)


def _serve(site: Site, front_end: str, store: Path, *flags: str) -> Launch:
    port = serving.find_port()
    command = (
        *(sys.executable, "-m", "uvimg", "serve", "kv", f"--front-end={front_end}", f"--port={port}"),
        *(f"--store=local:{store}", "--no-access-log", "--log-level=warning", *flags),
    )
    return Launch((command,), (("127.0.0.1", port),))


def _uvimg(front_end: str) -> ValueServer:
    # One store for all of them: they may share it.
    return ValueServer(
        f"uvimg {front_end}", True, lambda site, content, processes: _serve(site, front_end, site.folder / "values")
    )


def _filled(name: str, count: Callable[[Site], int], *flags: str) -> ValueServer:
    """The transport front-end on a store with so many keys."""

    def launch(site: Site, content: Content, processes: int) -> Launch:
        keys = count(site)
        store = site.folder / f"values-{keys}"
        if not store.exists():
            asyncio.run(fill(store, keys))
        return _serve(site, "transport", store, *flags)

    return ValueServer(name, True, launch)


async def fill(path: Path, count: int) -> None:
    """A store with so many keys of the quotation, past its own door: that would take minutes for millions."""
    await LocalStore(str(path)).close()
    record = msgspec.msgpack.encode(make_record(receive_bytes(QUOTATION), "text/plain", 1_800_000_000, None))
    env = lmdb.open(str(path / "names"), map_size=1 << 40, max_dbs=5, sync=False)
    names, groups = env.open_db(b"names"), env.open_db(b"groups")
    for start in range(0, count, 1_000_000):
        entries = (
            (value_name(_DATABASE, b"%08d" % key), record) for key in range(start, min(count, start + 1_000_000))
        )
        with env.begin(write=True) as txn, txn.cursor(names) as cursor:
            cursor.putmulti(entries, append=True)
    with env.begin(write=True) as txn:
        txn.put(values_prefix(_DATABASE), count.to_bytes(8, "big"), db=groups)
    env.sync(True)
    env.close()


def _launch_nginx(site: Site, content: Content, processes: int) -> Launch:
    return nginx.launch(site, tiny=QUOTATION)


def _launch_kyoto(site: Site, content: Content, processes: int) -> Launch:
    port = serving.find_port()
    return Launch((("ktserver", "-host", "127.0.0.1", "-port", str(port), "-le"),), (("127.0.0.1", port),))


def _lack_kyoto() -> str:
    if shutil.which("ktserver"):
        return ""
    return "ktserver is not installed (Debian has no package): start it yourself, and name it by --against"


TRANSPORT, STREAMS, AIOHTTP = _uvimg("transport"), _uvimg("streams"), _uvimg("aiohttp")
NGINX = ValueServer("nginx return 200", False, _launch_nginx, program="nginx", blind=True, path="/tiny.html")
OLEG = absent("OlegDB", "it is in no package index: start it yourself, and name it by --against")
KYOTO = ValueServer("kyototycoon", False, _launch_kyoto, lacks=_lack_kyoto)
MIXED = _filled("uvimg transport", lambda site: _MIXED_KEYS)
FEW = _filled("uvimg transport", lambda site: _FEW, "--memo-size=0")
MANY = _filled("uvimg transport", lambda site: _MANY_QUICK if site.quick else _MANY, "--memo-size=0")

# Loads

_ZIPF = """
local prepared = {}
local last = 0

function init(args)
    math.randomseed(4869 + first)
    local total, sums = 0, {}
    for rank = 1, %(keys)d do
        total = total + 1 / rank ^ 0.99
        sums[rank] = total
    end
    for number = 1, %(prepared)d do
        local wanted, low, high = math.random() * total, 1, %(keys)d
        while low < high do
            local middle = math.floor((low + high) / 2)
            if sums[middle] < wanted then low = middle + 1 else high = middle end
        end
        -- Neighbours in rank are no neighbours in the store.
        local path = string.format("/%(database)s/%%08d", (low * 7919) %% %(keys)d)
        if math.random() < %(writes)f then
            local value = string.format("%%010d", number) .. string.rep("x", %(size)d - 10)
            prepared[number] = wrk.format("PUT", path, nil, value)
        else
            prepared[number] = wrk.format("GET", path)
        end
    end
end

function request()
    last = last %% #prepared + 1
    return prepared[last]
end
"""
_EVERY_KEY = """
function init(args)
    math.randomseed(4869 + first)
end

function request()
    return wrk.format("GET", string.format("/%(database)s/%%08d", math.random(0, %(keys)d - 1)))
end
"""
_NEW_KEYS = """
local last = 0
local value = string.rep("x", %(size)d)
local beginning = ""

function init(args)
    beginning = string.format("/put/%%s-%%d-", args[1] or os.time(), first)
end

function request()
    last = last + 1
    return wrk.format("PUT", beginning .. last, nil, value)
end
"""


_WARM_UP_S = 0.5


class _Scripted:
    """wrk with requests that differ, counted by wrk: their answers are of no one length."""

    programs = ("wrk",)
    most_rounds = 100
    walks = ()

    def _load(self, server: Server, cores: Cores, seconds: float, connections: int, requests: str) -> dict[str, float]:
        # init of wrk's first call is over when it answers: it is left out of the seconds by wrk itself.
        script = write_wrk_script(requests, "")
        before, began = server.cpu_s(), time.monotonic()
        threads = min(connections, count_threads(cores, 1))
        with start_wrk(script, server.addresses[0], "/", connections, threads, cores) as process:
            wait([process], seconds + _WARM_UP_S)
            (text,) = end_wrk([process])
        server.check_alive()
        count = read_count(text)
        wrong = {name: count[name] for name in ("connect", "read", "write", "status", "timeout") if count[name]}
        if wrong or not count["requests"]:
            raise BenchError(f"among {count['requests']} answers: {wrong}")
        return {
            "rate": count["requests"] / (count["us"] / 1e6),
            **summarise_cost(server, before, count["requests"], time.monotonic() - began),
            "p50_ms": count["p50_us"] / 1e3,
            "p99_ms": count["p99_us"] / 1e3,
            "max_ms": count["max_us"] / 1e3,
        }


@dataclass(frozen=True)
class Mixed(_Scripted):
    """GET and some PUT of keys by Zipf's law."""

    connections: int
    writes: float

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        requests = _ZIPF % {
            "keys": _MIXED_KEYS,
            "prepared": 50_000,
            "database": _DATABASE.decode(),
            "writes": self.writes,
            "size": len(QUOTATION),
        }
        return self._load(server, cores, seconds, self.connections, requests)


@dataclass(frozen=True)
class AnyKey(_Scripted):
    """GET of any key that there is; and how long a server takes to start on that store."""

    connections: int
    many: bool

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        store = _find_store(server)
        keys = int(store.rpartition("-")[2])
        requests = _EVERY_KEY % {"keys": keys, "database": _DATABASE.decode()}
        # A process that has just started has none of the store's pages in its address space.
        self._load(server, cores, seconds, self.connections, requests)
        measures = self._load(server, cores, seconds, self.connections, requests)
        return {**measures, "start_ms": _measure_start_s(store, cores) * 1e3}


def _find_store(server: Server) -> str:
    """The flag that names its store. BenchError where it is none of ours."""
    for command in server.commands:
        for word in command:
            if word.startswith("--store="):
                return word
    raise BenchError("this case is about a store of uvimg's")


def _measure_start_s(store: str, cores: Cores) -> float:
    """From nothing to ready, with Python's own start."""
    command = [*serving.pin(cores.server), sys.executable, "-m", "uvimg", "serve", "kv", "--port=0", store]
    began = time.monotonic()
    with subprocess.Popen([*command, "--log-level=warning"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        seconds = time.monotonic() - began
        process.terminate()
    if b"is ready" not in ready:
        raise BenchError("a second server did not start on the same store")
    return seconds


@dataclass(frozen=True)
class Writes(_Scripted):
    """PUT of new keys, each durable when it is answered; and a loop that syncs after each write, in the same round."""

    connections: int

    def run(self, server: Server, asks: list[Ask], cores: Cores, seconds: float) -> dict[str, float]:
        store = _find_store(server)
        folder = Path(store.partition("local:")[2])
        syncs = _count_syncs(folder.parent, seconds / 2)
        measures = self._load(server, cores, seconds, self.connections, _NEW_KEYS % {"size": len(QUOTATION)})
        syncs = (syncs + _count_syncs(folder.parent, seconds / 2)) / 2
        return {**measures, "sync_rate": syncs, "per_sync": measures["rate"] / syncs}


def _count_syncs(folder: Path, seconds: float) -> float:
    """Writes a second that are on the disk one by one."""
    path, count = folder / "synced", 0
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    began = time.monotonic()
    try:
        while time.monotonic() - began < seconds or not count:
            os.write(fd, QUOTATION)
            os.fsync(fd)
            count += 1
        return count / (time.monotonic() - began)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            path.unlink()


FEW_KEYS = "any of 1,000 keys, 100 connections"

# Name, load, servers, goals, published where, and what: what `variants` makes cases of.
ROWS = (
    (
        (
            "the quotation, 400 keep-alive connections",
            KeepAlive(400),
            (TRANSPORT, STREAMS, AIOHTTP, NGINX, KYOTO, OLEG),
            (
                Goal(TRANSPORT.name, "cpu_us", "at most", 1.2, NGINX.name),
                Goal(STREAMS.name, "cpu_us", "at most", None, NGINX.name),
                Goal(AIOHTTP.name, "cpu_us", "at most", None, NGINX.name),
                Goal(TRANSPORT.name, "rate", "at least", 1.1, KYOTO.name),
            ),
            published.VALUES_ON,
            {KYOTO.name: published.KYOTO},
        ),
    ),
    (
        (
            "the quotation, a new connection for every request, 400 at a time",
            NewConnections(400),
            (TRANSPORT, NGINX, KYOTO, OLEG),
            (
                Goal(TRANSPORT.name, "cpu_us", "at most", None, NGINX.name),
                Goal(TRANSPORT.name, "rate", "at least", None, KYOTO.name),
            ),
            published.VALUES_ON,
            {OLEG.name: published.OLEG},
        ),
    ),
    (("95 % GET, 5 % PUT, 100,000 keys by Zipf's law, 400 connections", Mixed(400, 0.05), (MIXED,), (), "", {}),),
    (
        (
            "durable PUT of new keys, 64 connections",
            Writes(64),
            (TRANSPORT,),
            (Goal(TRANSPORT.name, "per_sync", "at least", 20.0),),
            "",
            {},
        ),
    ),
    (
        (FEW_KEYS, AnyKey(100, False), (FEW,), (Goal(FEW.name, "start_ms", "at most", 1000.0),), "", {}),
        (
            "any of ten million keys (of a million with --quick)",
            AnyKey(100, True),
            (MANY,),
            (
                Goal(MANY.name, "rate", "at least", 0.8, case=FEW_KEYS),
                Goal(MANY.name, "cpu_us", "at most", None, case=FEW_KEYS),
                Goal(MANY.name, "start_ms", "at most", 1000.0),
            ),
            "",
            {},
        ),
    ),
)
