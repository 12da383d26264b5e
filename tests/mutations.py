"""Mutated requests, many connections at a time, against servers of its own:

    scripts/mutate --requests 1000000 --seed 1 --front-end transport

The servers live on, log nothing, do not grow, and give nobody's answer to another: whatever comes back on a connection
names only what was asked for on it, and the good requests before, between and beside the mutated ones get theirs.
Each conversation follows from the seed and its number alone, so one that fails can be had again: --first N.
"""

import argparse
import asyncio
import contextlib
import random
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import uvloop
from tqdm import tqdm

from tests.conftest import Server, make_photo
from tests.conversation import Answer, Client, Unreadable, answer_size, read_answers
from tests.wire_server import Wire, get, last

# A conversation has so many mutated requests, and good ones around them.
MUTANTS = 3
_AT_ONCE = 32
_PATIENCE_S = 30
# Of a server's memory, from a tenth of the way to the end: its caches are full by then.
_MAX_GROWTH_BYTES = 24_000_000

BITS = [b"\r\n", b"\r", b"\n", b"\0", b" ", b"\t", b":", b",", b";", b"\xff", b"0", b"-", b"chunked", b"HTTP/1.0"]
BITS += [b"\r\n\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"GET /now/x HTTP/1.1\r\n", b"%"]
BITS += [b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"Host: y\r\n", b"If-None-Match: *\r\n", b"HEAD "]


def mutate(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    data = b"".join(rng.choices(seeds, k=rng.randint(1, 3)))
    for _ in range(rng.randint(1, 4)):
        at, stop = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        match rng.randrange(5):
            case 0:
                data = data[:at] + rng.choice(BITS) + data[at:]
            case 1:
                data = data[:at] + rng.choice(BITS) + data[at + 1 :]
            case 2:
                data = data[:at] + data[min(stop, at + 9) :]
            case 3:
                data = data[:stop] + data[at:]
            case _:
                data = data[:at] + rng.randbytes(rng.randint(1, 4)) + data[at:]
    return data


@dataclass(frozen=True, slots=True)
class Good:
    """A request and the answer that it alone gets; `body` is None where the answer has none because of HEAD."""

    data: bytes
    status: int
    fields: dict[str, str]
    body: bytes | None

    def fits(self, answer: Answer) -> bool:
        return (
            answer.status == self.status
            and all(answer.fields.get(name) == value for name, value in self.fields.items())
            and answer.body == (self.body or b"")
        )


class Target(Protocol):
    """A server under attack. Conversations are told apart by their number."""

    port: int

    def seeds(self, number: int) -> list[bytes]: ...

    def good(self, number: int, place: int, fields: str = "") -> Good: ...

    def foreign(self, number: int, sent: bytes, received: bytes) -> bytes | None:
        """What of another conversation stands in what was received."""

    def memory(self) -> int: ...

    def failures(self) -> list[str]: ...


class WireTarget:
    """tests/wire_server.py: each answer names its target, and each conversation has targets of its own."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self.port = wire, wire.port

    def seeds(self, number: int) -> list[bytes]:
        mark = f"m{number}"
        post = f"POST /body/{mark} HTTP/1.1\r\nHost: x\r\n"
        return [
            get(f"/now/{mark}-1", "Accept: */*\r\n"),
            last(f"/now/{mark}-2"),
            f"{post}Content-Length: 5\r\n\r\nhello".encode(),
            f"{post}Transfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nA: b\r\n\r\n".encode(),
            f"{post}Content-Length: 5\r\nExpect: 100-continue\r\n\r\nhello".replace("body", "early").encode(),
            f"GET http://y/now/{mark}-3 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".encode(),
            get(f"/slow/{mark}?0") + get("/file?300"),
            b"HEAD /file?300000 HTTP/1.1\r\nHost: x\r\n\r\n" + b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        ]

    def good(self, number: int, place: int, fields: str = "") -> Good:
        target = f"/{('now', 'slow')[place % 2]}/m{number}-good{place}" + "?0" * (place % 2)
        text = target if place % 2 else f"x {target}"
        return Good(get(target, fields), 200, {"x-for": target}, text.encode())

    def foreign(self, number: int, sent: bytes, received: bytes) -> bytes | None:
        # A target is answered as it came, whatever a mutation made of it.
        for found in re.findall(rb"X-For: ([^\r]*)\r\n", received):
            if found not in sent:
                return bytes(found)
        return None

    def memory(self) -> int:
        return self._wire.memory("VmRSS")

    def failures(self) -> list[str]:
        gone = [] if self._wire.process.poll() is None else ["the server is gone"]
        return gone + self._wire.failures


class ImagesTarget:
    """`uvimg serve`: a conversation is about one image of several, and gets nothing of the others."""

    def __init__(self, server: Server, images: int = 8) -> None:
        self._server, self.port = server, server.port
        self._images: list[tuple[str, str, bytes]] = []
        for seed in range(images):
            data = make_photo(900 + seed)
            md5 = server.upload(data)
            for query in ("", "?w=40"):
                server.get(f"/{md5}{query}")
            self._images.append((md5, server.get(f"/{md5}?p=0").headers["ETag"], data))

    def seeds(self, number: int) -> list[bytes]:
        md5, etag, data = self._images[number // 2 % len(self._images)]
        return [
            get(f"/{md5}?p=0"),
            last(f"/{md5}?p=0"),
            get(f"/images/{md5}?p=0", f"If-None-Match: {etag}\r\n"),
            get(f"/{md5}?p=0", "Range: bytes=10-30\r\n"),
            b"HEAD " + get(f"/{md5}?p=0")[4:],
            get(f"/{md5}?w=40"),
            get(f"/info?md5={md5}"),
            b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
            f"GET http://y/{md5}?p=0 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".encode(),
            b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\nExpect: 100-continue\r\n\r\n" + data[:50],
            b"POST /images HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        ]

    def good(self, number: int, place: int, fields: str = "") -> Good:
        md5, etag, data = self._images[number // 2 % len(self._images)]
        tag = {"etag": etag}
        match place % 4:
            case 0:
                return Good(get(f"/{md5}?p=0", fields), 200, tag, data)
            case 1:
                return Good(get(f"/{md5}?p=0", f"If-None-Match: {etag}\r\n{fields}"), 304, tag, b"")
            case 2:
                return Good(b"HEAD " + get(f"/{md5}?p=0", fields)[4:], 200, tag, None)
            case _:
                return Good(get(f"/{md5}?p=0", f"Range: bytes=5-99\r\n{fields}"), 206, tag, data[5:100])

    def foreign(self, number: int, sent: bytes, received: bytes) -> bytes | None:
        for other, (md5, etag, data) in enumerate(self._images):
            for trace in (etag.encode(), md5.encode(), data[-40:]):
                if other != number // 2 % len(self._images) and trace in received:
                    return trace
        return None

    def memory(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self._server.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def failures(self) -> list[str]:
        gone = [] if self._server.process.poll() is None else ["the server is gone"]
        return gone + [line for line in self._server.log.splitlines() if re.search(r"ERROR|CRITICAL|never retr", line)]


class Harm(Exception):
    """What a conversation did that it must not; the message is enough to have it again."""


class Attack:
    """`waits`: the front-end loses a good request that comes in one packet with a bad one, so its answer is awaited."""

    def __init__(self, targets: Sequence[Target], seed: int, *, waits: bool = False) -> None:
        self._targets, self._seed, self._waits = targets, seed, waits

    async def run(self, first: int, conversations: int, step: Callable[[int], object]) -> None:
        """The conversations from this number on; `step` is told each that has ended. Raises Harm."""
        numbers = iter(range(first, first + conversations))

        async def attend() -> None:
            async with contextlib.AsyncExitStack() as stack:
                beside = [await stack.enter_async_context(Client.connected(target.port)) for target in self._targets]
                for number in numbers:
                    which = number % len(self._targets)
                    await self._converse(self._targets[which], number, beside[which])
                    step(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(_AT_ONCE, conversations)):
                group.create_task(attend())

    async def _converse(self, target: Target, number: int, beside: Client) -> None:
        rng = random.Random(f"{self._seed} {number}")
        seeds = target.seeds(number)
        opening = [target.good(number, rng.randrange(4)) for _ in range(rng.randint(1, 3))]
        start = b"".join(good.data for good in opening)
        data = b""
        for place in range(MUTANTS):
            data += mutate(rng, seeds) + target.good(number, place).data
        data += target.good(number, 0, "Connection: close\r\n").data
        waits = self._waits or rng.random() < 0.3
        cuts = sorted(rng.randrange(len(data)) for _ in range(rng.choice((0, 0, 0, 1, 3))))
        received = b""
        try:
            async with asyncio.timeout(_PATIENCE_S), Client.connected(target.port) as client:
                with contextlib.suppress(OSError):
                    if waits:
                        await client.send(start)
                        received += await _take(client, opening)
                    pieces = [data[at:stop] for at, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
                    pieces[0] = pieces[0] if waits else start + pieces[0]
                    for piece in pieces:
                        await client.send(piece)
                        await asyncio.sleep(0)
                    if not waits:
                        # A client that has ended its side may have gone, and what takes work for it is dropped.
                        received += await _take(client, opening)
                    client.end()
                    received += await client.rest()
                received += client.taken
                _check_opening(opening, received)
                if (foreign := target.foreign(number, start + data, received)) is not None:
                    raise Harm(f"the answer to another: {foreign!r}")
                # Nobody else has noticed.
                goods = [target.good(number, place) for place in (0, 1, 2)]
                await beside.send(b"".join(good.data for good in goods))
                _check_opening(goods, await _take(beside, goods))
        except (Harm, TimeoutError, EOFError, OSError) as exc:
            what = str(exc) if isinstance(exc, Harm) else f"{exc!r}"
            raise Harm(
                f"{what}\nagain: --seed {self._seed} --first {number} --requests {MUTANTS}\n"
                f"sent {start!r} + {data!r}\nreceived {bytes(received)[:4000]!r}"
            ) from exc


async def _take(client: Client, goods: Sequence[Good]) -> bytes:
    return b"".join([await client.take(bodiless=good.body is None) for good in goods])


def _check_opening(goods: Sequence[Good], received: bytes) -> None:
    """The answers to good requests stand first, in order. What comes behind may end anywhere."""
    for good in goods:
        size = answer_size(received, bodiless=good.body is None)
        try:
            (answer,) = read_answers(received[:size], [0] if good.body is None else [])
        except (Unreadable, ValueError) as exc:
            raise Harm(f"no answer to {good.data!r}: {exc}") from exc
        if not good.fits(answer):
            raise Harm(f"not the answer to {good.data!r}: {answer}")
        received = received[size:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description="Attack a front-end with mutated requests.")
    parser.add_argument("--requests", type=int, default=1_000_000, help="mutated requests (1000000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first conversation (0)")
    parser.add_argument("--front-end", choices=("transport", "streams", "aiohttp"), default="transport")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    chosen = parser.parse_args()
    conversations = max(1, chosen.requests // MUTANTS)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        wire = Wire(folder, (chosen.front_end, chosen.loop), {})
        stack.callback(wire.kill)
        # With so little to remember, what grows is a leak.
        little = {"memo_size": "1MiB", "cache_size": "1MiB"}
        server = Server(folder, front_end=chosen.front_end, loop=chosen.loop, access_log=False, **little)
        stack.callback(server.kill)
        targets = [WireTarget(wire), ImagesTarget(server)]
        attack = Attack(targets, chosen.seed, waits=chosen.front_end == "aiohttp")
        warm = conversations // 10
        memory: list[int] = []
        bar = stack.enter_context(tqdm(total=conversations * MUTANTS, unit=" requests", unit_scale=True))

        def step(_: int) -> None:
            bar.update(MUTANTS)
            if bar.n // MUTANTS == warm:
                memory[:] = [target.memory() for target in targets]

        try:
            uvloop.run(attack.run(chosen.first, conversations, step))
        except ExceptionGroup as exc:
            bar.close()
            print(*exc.exceptions[:1], *(line for target in targets for line in target.failures()), sep="\n")
            return 1
        bar.close()
        wrong = [line for target in targets for line in target.failures()]
        for target, before in zip(targets, memory, strict=False):
            grown = target.memory() - before
            print(f"{type(target).__name__}: {before / 1e6:.1f} MB at a tenth of the way, {grown / 1e6:+.1f} MB since")
            if grown > _MAX_GROWTH_BYTES:
                wrong.append(f"{type(target).__name__} has grown by {grown} bytes")
        print(*wrong[:20], sep="\n", file=sys.stderr)
        print(f"{conversations * MUTANTS} mutated requests, seed {chosen.seed}: {len(wrong)} failures")
        return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
