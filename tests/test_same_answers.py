"""Equal bytes get equal answers, however they come and whatever was answered before; and never an old one.

Front-ends remember what they have answered. This holds them against themselves, without knowing how they remember.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.conftest import Server, make_photo
from tests.conversation import Client, Hall, one_at_a_time, read_answers, talk
from tests.mutations import BITS
from tests.wire_server import get, last

EVERY_FRONT_END = True

PHOTOS = [make_photo(seed) for seed in (501, 502, 503)]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another process on the store that the front-ends here have."""
    running = Server(tmp_path_factory.mktemp("other"), workers=1, access_log=False, front_end="transport")
    yield running
    running.kill()


@dataclass(frozen=True, slots=True)
class Place:
    hall: Hall
    port: int
    # Of what is stored under PHOTOS.
    ids: list[str]
    etags: list[str]


@pytest.fixture(scope="module")
def place(front_end: dict[str, str], other: Server) -> Iterator[Place]:
    with Hall(front_end["front_end"], front_end["loop"]) as hall:
        port = hall.serve_images(store=f"local:{other.store}")
        ids = [other.upload(photo) for photo in PHOTOS]
        for id in ids:
            for query in ("", "?w=30"):
                assert other.get(f"/{id}{query}").status_code == 200
        yield Place(hall, port, ids, [other.get(f"/{id}?p=0").headers["ETag"] for id in ids])


# How bytes come

# Stands in each request, and is another one each time that bytes have to be new to the server.
NONCE = b"0123456789"
END = last("/echo") * 3


FIELDS = [
    b"Accept: */*\r\n",
    b"A:  b \r\n",
    b"If-None-Match: *\r\n",
    b'If-None-Match: "no", W/"other"\r\n',
    b"If-Modified-Since: Thu, 01 Jan 2099 00:00:00 GMT\r\n",
    b"If-Unmodified-Since: Thu, 01 Jan 1970 00:00:00 GMT\r\n",
    b"If-Match: *\r\n",
    b"Range: bytes=5-20\r\n",
    b"Range: bytes=999999-\r\n",
    b"If-Range: x\r\n",
    b"Connection: close\r\n",
    b"connection: Keep-Alive\r\n",
    b"Expect: 100-continue\r\n",
    b"Content-Length: 0\r\n",
    b"X-Forwarded-For: 9.9.9.9\r\n",
    b"Sec-Fetch-Site: cross-site\r\n",
    b"Origin: http://evil\r\n",
    b"Upgrade: h2c\r\n",
    b"Accept-Encoding: gzip\r\n",
]
BODIES = [
    b"POST /upload HTTP/1.1\r\nHost: x\r\nX-Nonce: %b\r\nContent-Length: 5\r\n\r\nhello" % NONCE,
    b"POST /images HTTP/1.1\r\nHost: x\r\nX-Nonce: %b\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    % NONCE,
    b"GET /echo HTTP/1.1\r\nHost: x\r\nX-Nonce: %b\r\nContent-Length: 3\r\n\r\nabc" % NONCE,
]
ODD_TARGETS = [b"/", b"/echo", b"/favicon.ico", b"//evil/x", b"*", b"http://y/echo", b"/images/x", b"/echo#x", b"/%"]


def request(method: bytes, target: bytes, version: bytes, fields: list[bytes]) -> bytes:
    end = b"X-Nonce: %b\r\n\r\n" % NONCE
    return b"%b %b HTTP/1.%b\r\nHost: x\r\n%b" % (method, target, version, b"".join(fields)) + end


@st.composite
def byte_strings(draw: st.DrawFn, places: list[bytes], *, odd: bool) -> bytes:
    """A request, or several that somebody has worked on."""
    methods = [b"GET"] * 6 + [b"HEAD"] * 2 + [b"OPTIONS", b"PUT"] + [b"BREW", b"CONNECT", b"get"] * odd
    one = st.builds(
        request,
        st.sampled_from(methods),
        st.sampled_from(places * 2 + ODD_TARGETS[: None if odd else 3]),
        st.sampled_from([b"1"] * 5 + [b"0"] + [b"2"] * odd),
        st.lists(st.sampled_from(FIELDS), max_size=3, unique=True),
    )
    if not odd:
        return draw(one)
    data = b"".join(draw(st.lists(one | one | st.sampled_from(BODIES), min_size=1, max_size=2)))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at = draw(st.integers(0, len(data)))
        gone = draw(st.sampled_from([0, 0, 1, 5]))
        data = data[:at] + draw(st.sampled_from([b"", *BITS]) | st.binary(max_size=3)) + data[at + gone :]
    return data


def comparable(received: bytes, *, has_body: bool) -> bytes:
    text = re.sub(rb"\r\nDate: [^\r]*", b"", received)
    # The order of fields means nothing (RFC 9110 5.3): aiohttp has one of its own.
    text = re.sub(
        rb"(?<=\r\n)(?:[A-Za-z-]+: [^\r\n]*\r\n)+(?=\r\n)",
        lambda fields: b"".join(sorted(fields[0].splitlines(keepends=True))),
        text,
    )
    if has_body:
        # Whether a body had come when its answer was written decides these: that is timing.
        text = re.sub(rb"HTTP/1\.1 100 Continue\r\n\r\n|(?<=\r\n)Connection: close\r\n", b"", text)
    return text


async def differences(port: int, data: bytes, cuts: list[int], nonces: Iterator[bytes]) -> list[str]:
    """In what ways of coming these bytes are answered otherwise than when they come first."""
    has_body = re.search(rb"(?i)content-length|transfer-enc", data) is not None
    new, newer, newest = (data.replace(NONCE, next(nonces)) for _ in range(3))
    places = [0, *sorted({cut % len(data) for cut in cuts} - {0}), len(data)]

    async def answer(*pieces: bytes) -> bytes:
        # What ends it comes by itself: who remembers whole packets would not see the request in one with it.
        return comparable(await talk(port, [*pieces, END], hang_up=0.5), has_body=has_body)

    first = await answer(new)
    ways = {
        "again": await answer(new),
        "once more": await answer(new),
        "in pieces": await answer(*[new[at:stop] for at, stop in itertools.pairwise(places)]),
        "byte by byte, and new": await answer(*one_at_a_time(newer)),
        "whole, and known in pieces": await answer(newer),
    }
    # What is like it and not the same has been remembered before it comes.
    for kin in _kin(newest):
        await answer(kin)
        await answer(kin)
    ways["behind its kin"] = await answer(newest)
    echo = comparable(await talk(port, [get("/echo"), END]), has_body=has_body)
    ended = comparable(await talk(port, [END]), has_body=has_body)
    behind = await answer(get("/echo") + new)
    ways["behind another"] = behind.removeprefix(echo.removesuffix(ended))
    if data.endswith(b"\r\n\r\n") and not data.endswith(b"\r\n\r\n\r\n") and not has_body:
        twice = await answer(new, new)
        kept = first.removesuffix(ended) if first.endswith(ended) else b""
        ways["twice on a connection"] = twice.removeprefix(kept)
    return [f"{way}: {got!r} instead of {first!r}" for way, got in ways.items() if not _same(got, first, has_body)]


def _kin(data: bytes) -> Iterator[bytes]:
    """What a sloppy memory could take for these bytes."""
    if data.startswith((b"GET", b"HEAD")):
        yield data.replace(b"HEAD", b"GET", 1) if data.startswith(b"HEAD") else data.replace(b"GET", b"HEAD", 1)
    start, _, rest = data.partition(b"\r\nHost: x\r\n")
    if rest:
        yield start + b"\r\nHost: x\r\n" + rest[rest.find(b"X-Nonce") :]
        yield start.split(b"?")[0] + data[data.rfind(b" ", 0, len(start)) :]


def _same(one: bytes, other: bytes, has_body: bool) -> bool:
    # A body that was not there yet ends the connection, and what stands behind it is not answered.
    shorter, longer = sorted((one, other), key=len)
    return one == other or (has_body and shorter.startswith(b"HTTP/1.1 ") and longer.startswith(shorter))


@pytest.fixture(scope="module")
def nonces() -> Iterator[bytes]:
    return (b"%010d" % number for number in itertools.count(10**9 + 1))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_equal_bytes_get_equal_answers_however_they_come(
    place: Place, nonces: Iterator[bytes], data: st.DataObject
) -> None:
    targets = [f"/{id}{query}".encode() for id in place.ids[:2] for query in ("", "?p=0", "?w=30")]
    targets += [f"/images/{place.ids[0]}?p=0".encode(), f"/{'0' * 32}".encode(), f"/{place.ids[0]}?w=x".encode()]
    text = data.draw(byte_strings(targets, odd=place.hall.front_end != "aiohttp"))
    cuts = data.draw(st.lists(st.integers(1, len(text)), max_size=4))
    assert place.hall.run(differences(place.port, text, cuts, nonces)) == []


# No answer is an old one


class Visitors(RuleBasedStateMachine):
    """Uploads and deletions here and in another process, and who looks right behind them."""

    place: Place
    other: Server
    here: list[Client]
    there: list[Client]

    def __init__(self) -> None:
        super().__init__()
        self.present = [True] * len(PHOTOS)
        for number in range(len(PHOTOS)):
            self.upload(number, 0)

    def ask(self, client: Client, data: bytes) -> tuple[int, bytes]:
        async def talk() -> bytes:
            await client.send(data)
            return await client.take()

        (answer,) = read_answers(self.place.hall.run(talk()))
        return answer.status, answer.body

    @property
    def clients(self) -> list[Client]:
        return self.here + self.there

    @rule(number=st.integers(0, len(PHOTOS) - 1), by=st.integers(0, 3))
    def upload(self, number: int, by: int) -> None:
        photo = PHOTOS[number]
        head = f"POST /images HTTP/1.1\r\nHost: x\r\nContent-Length: {len(photo)}\r\n\r\n".encode()
        assert self.ask(self.clients[by], head + photo)[0] == 201
        self.present[number] = True
        self.everybody_looks(number)

    @rule(number=st.integers(0, len(PHOTOS) - 1), by=st.integers(0, 3))
    def delete(self, number: int, by: int) -> None:
        head = f"DELETE /images/{self.place.ids[number]} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        assert self.ask(self.clients[by], head)[0] == (204 if self.present[number] else 404)
        self.present[number] = False
        self.everybody_looks(number)

    @rule(number=st.integers(0, len(PHOTOS) - 1))
    def everybody_looks(self, number: int) -> None:
        for client in self.here:
            self.look(number, client)
        self.look(number, self.there[0])

    def look(self, number: int, client: Client) -> None:
        id, etag, present = self.place.ids[number], self.place.etags[number], self.present[number]
        original = get(f"/{id}?p=0")
        assert self.ask(client, original) == ((200, PHOTOS[number]) if present else (404, NOT_FOUND))
        conditional = get(f"/{id}?p=0", f"If-None-Match: {etag}\r\n")
        assert self.ask(client, conditional) == ((304, b"") if present else (404, NOT_FOUND))
        assert self.ask(client, get(f"/{id}?w=30"))[0] == (200 if present else 404)


NOT_FOUND = b"<html><body><h1>404 Not Found!</h1></body></html>"


def test_no_answer_is_older_than_the_last_upload_or_deletion(place: Place, other: Server) -> None:
    async def connect(stack: contextlib.AsyncExitStack) -> list[list[Client]]:
        return [
            [await stack.enter_async_context(Client.connected(port)) for _ in range(2)]
            for port in (place.port, other.port)
        ]

    stack = contextlib.AsyncExitStack()

    class Here(Visitors):
        pass

    Here.place, Here.other = place, other
    Here.here, Here.there = place.hall.run(connect(stack))
    try:
        run_state_machine_as_test(Here, settings=settings(max_examples=6, stateful_step_count=10, deadline=None))
    finally:
        place.hall.run(stack.aclose())
