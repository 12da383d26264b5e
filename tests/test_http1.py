"""HTTP/1.1 as pure functions: what is taken, what is refused, and that where bytes are cut changes nothing."""

import itertools
import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvimg.core import http1
from uvimg.core.errors import UvimgError
from uvimg.core.http1 import Chunks, check_start, encode_head, parse_head
from uvimg.core.message import Response

HOST = b"Host: x\r\n"


def refusal(data: bytes) -> int:
    """The status with which a head is refused, 0 when it is taken."""
    try:
        parse_head(data)
    except UvimgError as exc:
        return exc.status
    return 0


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: :80\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", 0),
        (b"GET / HTTP/1.0\r\n\r\n", 0),
        (b"GET http://y/ HTTP/1.1\r\n\r\n", 400),
        (b"GET http:/// HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET http://u@y/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET ftp://y/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET * HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 0),
        (b"CONNECT y:443 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 505),
        (b"GET / HTTP/1.2\r\n" + HOST + b"\r\n", 505),
        (b"GET / http/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n", 400),
        (b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"\r\nGET / HTTP/1.1\r\n" + HOST + b"\r\n", 0),
        (b"\r\n\r\nGET / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"G\xc4T / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /\xc4 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"Expect: 200-ok\r\n\r\n", 417),
        (b"GET / HTTP/1.0\r\n" + HOST + b"Expect: 200-ok\r\n\r\n", 0),
        (b"GET /" + b"a" * 16_368 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 0),
        (b"GET /" + b"a" * 16_390 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
        (b"GET /" + b"a" * 65_536 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 99 + b"\r\n", 0),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 100 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"b" * 65_536 + b"\r\n\r\n", 431),
    ],
)
def test_a_request_line_or_host_is_taken_or_refused(head: bytes, status: int) -> None:
    assert refusal(head) == status


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"A: b\r\n c", 400),
        (b" A: b", 400),
        (b"A : b", 400),
        (b": b", 400),
        (b"A", 400),
        (b"A: b\rc", 400),
        (b"A: b\nc: d", 400),
        (b"A: b\r\r\nc: d", 400),
        (b"A: b\x00", 400),
        (b"A\x00: b", 400),
        (b"A: \x7f", 400),
        (b"\xc4: b", 400),
        (b"A: \xc4\tb", 0),
        (b"A:b", 0),
        (b"Content-Length: 5\r\nContent-Length: 5", 400),
        (b"Content-Length: 5\r\ncontent-length: 6", 400),
        (b"Content-Length: 5, 5", 400),
        (b"Content-Length: +5", 400),
        (b"Content-Length: -5", 400),
        (b"Content-Length: 0x5", 400),
        (b"Content-Length: 5 5", 400),
        (b"Content-Length: 5_5", 400),
        (b"Content-Length: \xb2", 400),
        (b"Content-Length:", 400),
        (b"Content-Length: " + b"9" * 5000, 400),
        (b"Content-Length: 9223372036854775808", 0),
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 0", 400),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400),
        (b"Transfer-Encoding: chunked, chunked", 501),
        (b"Transfer-Encoding: gzip, chunked", 501),
        (b"Transfer-Encoding: chunked, identity", 501),
        (b"Transfer-Encoding: identity", 501),
        (b"Transfer-Encoding:", 501),
        (b"Transfer-Encoding: \x0bchunked", 400),
        (b"Transfer-Encoding: xchunked", 501),
        (b"Transfer-Encoding : chunked", 400),
        (b"Transfer-Encoding: CHUNKED", 0),
    ],
)
def test_a_field_is_taken_or_refused(fields: bytes, status: int) -> None:
    assert refusal(b"POST / HTTP/1.1\r\n" + HOST + fields + b"\r\n\r\n") == status


def test_transfer_encoding_is_refused_in_http_1_0() -> None:
    assert refusal(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n") == 400


def test_an_absolute_target_says_the_host() -> None:
    head = parse_head(b"GET HTTP://real:80/p?q HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (head.headers["host"], head.path, head.query) == ("real:80", "/p", "q")


@pytest.mark.parametrize(
    ("version", "fields", "keep_alive"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: x, Close\r\n", False),
        (b"1.1", b"Connection: x\r\nConnection: close\r\n", False),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: Keep-Alive\r\n", True),
        (b"1.0", b"Connection: keep-alive, close\r\n", False),
    ],
)
def test_a_connection_is_kept_when_both_sides_want_it(version: bytes, fields: bytes, keep_alive: bool) -> None:
    assert parse_head(b"GET / HTTP/" + version + b"\r\n" + HOST + fields + b"\r\n").keep_alive is keep_alive


@pytest.mark.parametrize("fill", [b" ", b"\t", b"a", b"\r", b"\n", b"a:", b":", b"\r\n"])
@pytest.mark.parametrize("start", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: x\r\nA:"])
def test_no_head_takes_long_to_refuse(start: bytes, fill: bytes) -> None:
    started = time.process_time()
    refusal(start + fill * (65_000 // len(fill)) + b"\0\r\n\r\n")
    assert time.process_time() - started < 0.1


@given(st.binary(max_size=300))
def test_whatever_comes_for_a_head_raises_nothing_but_our_errors(data: bytes) -> None:
    for head in (data, b"GET / HTTP/1.1\r\n" + data, b"GET / HTTP/1.1\r\n" + HOST + data + b"\r\n\r\n"):
        refusal(head)


WORDS = st.one_of(
    st.sampled_from([b"\r\n", b"\r", b"\n", b" ", b"\t", b":", b"/", b",", b";", b"*", b"x", b"5", b"\x00", b"\xff"]),
    st.sampled_from([b"GET", b"POST", b"http://", b"HTTP/1.1\r\n", b"HTTP/1.0\r\n", b"Host: x\r\n", b"\r\n\r\n"]),
    st.sampled_from([b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect:", b"Connection: close"]),
    st.just(b"GET / HTTP/1.1\r\nHost: x\r\n"),
)


@given(st.lists(WORDS, max_size=20).map(b"".join))
def test_what_is_remembered_of_a_head_is_what_parsing_says(data: bytes) -> None:
    def outcome() -> object:
        try:
            return parse_head(data)
        except UvimgError as exc:
            return exc.status, exc.detail

    first = outcome()
    assert outcome() == first
    for known in (http1._known_line, http1._known_fields, http1._known_field):
        known.cache_clear()
    assert outcome() == first


LONG = st.sampled_from([b"a" * 8_000, b"a" * 16_368, b"b" * 49_152, b"A: b\r\n" * 40, b"\n", b"\r\n", b"GET /"])


@given(st.lists(WORDS | LONG, max_size=12).map(b"".join), st.lists(st.integers(0, 70_000), max_size=6))
def test_where_a_head_is_cut_changes_nothing(data: bytes, cuts: list[int]) -> None:
    end = data.find(b"\r\n\r\n") + 4
    data = data[:end] if end > 3 else data + b"\r\n\r\n"
    places = range(1, len(data)) if len(data) < 300 else sorted(cut for cut in cuts if cut < len(data))

    def outcome(places: Iterable[int]) -> object:
        try:
            for place in places:
                check_start(data[:place])
            return parse_head(data)
        except UvimgError as exc:
            return exc.status, exc.detail

    assert outcome(places) == outcome([])


def test_a_start_is_refused_as_soon_as_it_cannot_become_right() -> None:
    for start, status in [
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"\n", 400),
        (b"GET /" + b"a" * 16_390, 414),
        (b"\r\nGET /" + b"a" * 16_390, 414),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 65_536, 431),
    ]:
        with pytest.raises(UvimgError) as caught:
            check_start(start)
        assert caught.value.status == status


# Chunks


def feed(data: bytes, cuts: list[int]) -> tuple[bytes, bytes | None] | str:
    """What these bytes say when they come cut at these places, up to the end of the body."""
    chunks, out = Chunks(), b""
    places = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    try:
        for start, stop in itertools.pairwise(places):
            out += chunks.feed(data[start:stop])
            if chunks.rest is not None:
                return out, chunks.rest + data[stop:]
    except UvimgError as exc:
        return exc.detail
    return out, None


PIECES = st.one_of(
    st.sampled_from([b"5\r\nhello\r\n", b"005;a=b\r\nhello\r\n", b"1 ; x\r\na\r\n", b"a\r\n0123456789\r\n"]),
    st.sampled_from([b"0\r\n\r\n", b"0\r\nA: b\r\n", b"\r\n", b"5\r\nhello", b"GET / HTTP/1.1\r\n", b"\r"]),
    st.sampled_from([b"5\n", b"-1\r\n", b"5 \r\n", b"fffffffffffffffff\r\n"]),
)


@given(st.lists(PIECES, max_size=8).map(b"".join), st.lists(st.integers(0, 120), max_size=12))
def test_where_chunks_are_cut_changes_nothing(data: bytes, cuts: list[int]) -> None:
    assert feed(data, cuts) == feed(data, [])
    assert feed(data, list(range(len(data)))) == feed(data, [])


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.binary(max_size=20))
def test_chunks_give_back_their_data_and_what_is_behind(pieces: list[bytes], behind: bytes) -> None:
    data = b"".join(b"%x;ext\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: t\r\n\r\n" + behind
    assert feed(data, list(range(0, len(data), 7))) == (b"".join(pieces), behind)


@pytest.mark.parametrize(
    "data",
    [
        b"1;" + b"x" * 5000 + b"\r\na\r\n",
        b"1;" + b"x" * 5000,
        b"1;xxxxxxxxxx\r\na\r\n" * 2000,
        b"0\r\n" + b"A: " + b"x" * 5000,
        b"0\r\n" + b"A: bbbbbbbbbbbb\r\n" * 2000,
        b"0\r\nno field\r\n\r\n",
        b"5\r\nhelloX",
        b"5\r\nhello\n",
        b"g\r\n",
        b"\r\n",
        b"0x5\r\nhello\r\n",
        b"5\r\nhello\r\n;\r\n",
        b"1" * 17 + b"\r\n",
    ],
)
def test_extensions_and_trailers_are_bounded_and_bad_chunks_refused(data: bytes) -> None:
    assert isinstance(feed(data, []), str)
    assert isinstance(feed(data, list(range(0, len(data), 50))), str)


def test_a_head_is_encoded_with_what_its_connection_needs() -> None:
    for status, keep_alive, is_1_0, fields in [
        (200, True, False, b"Content-Length: 2\r\n"),
        (200, True, True, b"Content-Length: 2\r\nConnection: keep-alive\r\n"),
        (200, False, False, b"Content-Length: 2\r\nConnection: close\r\n"),
        (304, True, False, b""),
        (204, True, False, b""),
    ]:
        head = encode_head(Response(status, {}, b"ok"), "now", keep_alive=keep_alive, is_1_0=is_1_0)
        assert head.endswith(b"Server: uvimg\r\n" + fields + b"\r\n")
