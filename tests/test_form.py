"""Forms, in whatever pieces they come and whatever they are made of."""

import contextlib
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvimg.core.errors import BadRequest
from uvimg.core.form import MAX_PARTS, FormReader, PartBegins, PartData, PartEnds

TYPE = "multipart/form-data; boundary=XyZ"
Part = tuple[str, str | None, bytes]


def form(parts: list[Part]) -> bytes:
    body = b""
    for name, filename, data in parts:
        head = f'Content-Disposition: form-data; name="{name}"'
        if filename is not None:
            head += f'; filename="{filename}"\r\nContent-Type: image/jpeg'
        body += b"--XyZ\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n"
    return body + b"--XyZ--\r\n"


def read(body: bytes, cuts: list[int], content_type: str = TYPE) -> list[Part]:
    """The parts of a body that comes in pieces."""
    reader, parts, is_open = FormReader(content_type), list[Part](), False
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for start, stop in pairwise(edges):
        for event in reader.feed(body[start:stop]):
            match event:
                case PartBegins(name, filename):
                    assert not is_open
                    parts.append((name, filename, b""))
                    is_open = True
                case PartData(data):
                    assert is_open
                    parts[-1] = (*parts[-1][:2], parts[-1][2] + data)
                case PartEnds():
                    assert is_open
                    is_open = False
    reader.close()
    return parts


# What a parser may take for the beginning of a boundary, and what is none.
pieces = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b"-", b"--", b"--X", b"--Xy", b"\r\n--Xy", b"XyZ", b"\r\n--XyQ", b"\0\xff"]
)
contents = st.lists(pieces | st.binary(max_size=8), max_size=8).map(b"".join).filter(lambda data: b"--XyZ" not in data)
names = st.text(st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters='"\\'), max_size=9)
parts = st.lists(st.tuples(names, st.none() | names, contents), min_size=1, max_size=4)
cuts = st.lists(st.integers(0, 600), max_size=12)


@given(parts, cuts)
def test_a_form_holds_the_same_in_whatever_pieces_it_comes(made: list[Part], where: list[int]) -> None:
    body = form(made)
    assert read(body, where) == made
    assert read(b"\r\n" + body + b"epilogue\r\n--XyZ\r\n", [*where, 1]) == made


def test_a_form_may_come_byte_by_byte() -> None:
    made: list[Part] = [("userfile", "ü.jpg", b"\r\n--XyX\r\n-"), ("text", None, b""), ("none", "", b"")]
    body = form(made)
    assert read(body, list(range(len(body)))) == made


def test_a_form_that_ends_too_soon_is_refused_wherever_it_ends() -> None:
    body = form([("a", "a.jpg", b"data"), ("b", None, b"")])
    end = body.rindex(b"--")
    for stop in range(end + 2):
        with pytest.raises(BadRequest):
            read(body[:stop], [])
    assert len(read(body[: end + 2], [])) == 2


@given(st.text(), st.lists(st.binary(max_size=60) | st.just(form([("a", "b", b"c")])[:-9]), max_size=5))
def test_nothing_that_is_sent_as_a_form_gets_more_than_a_bad_request(noise: str, chunks: list[bytes]) -> None:
    for content_type in (TYPE, noise, f"multipart/form-data; boundary={noise}", f'a;boundary="{noise}";{noise}'):
        with contextlib.suppress(BadRequest):
            reader = FormReader(content_type)
            for chunk in chunks:
                reader.feed(chunk)
            reader.close()


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary*=utf-8''XyZ",
        "multipart/form-data; boundary=" + "x" * 300,
    ],
)
def test_a_form_without_a_boundary_that_can_be_is_refused(content_type: str) -> None:
    with pytest.raises(BadRequest):
        FormReader(content_type)


def test_a_boundary_may_be_quoted_and_in_any_company() -> None:
    body = form([("a", None, b"1")])
    for content_type in ('multipart/form-data; charset=utf-8; boundary="XyZ"', "Multipart/Form-Data;boundary=XyZ;x=ü"):
        assert read(body, [], content_type) == [("a", None, b"1")]


def test_a_path_is_not_part_of_a_file_name() -> None:
    body = form([("a", r"C:\pictures\me.jpg", b"1")])
    assert read(body, []) == [("a", "me.jpg", b"1")]


def test_a_form_of_too_many_parts_is_refused() -> None:
    assert len(read(form([("a", None, b"")] * MAX_PARTS), [])) == MAX_PARTS
    with pytest.raises(BadRequest):
        read(form([("a", None, b"")] * (MAX_PARTS + 1)), [])


@pytest.mark.parametrize(
    "flood",
    [b"--XyZ\r\nX: " + b"x" * (4 << 20), b"--XyZ\r\n" + b"x" * (4 << 20), b"--XyZ\r\n" + b"X: y\r\n" * (1 << 19)],
    ids=["value", "name", "fields"],
)
def test_a_part_whose_head_does_not_end_is_refused_soon(flood: bytes) -> None:
    reader, started, fed = FormReader(TYPE), time.process_time(), 0
    with contextlib.suppress(BadRequest):
        while fed < len(flood):
            reader.feed(flood[fed : fed + 100])
            fed += 100
    assert fed < 10_000
    assert time.process_time() - started < 1
