"""Which coding a request gets: a pure function of what it says, whatever that is."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uvimg.core.coding import Coding, Forced, is_compressible, read_forced
from uvimg.core.dictionary import parse_available, parse_use
from uvimg.core.errors import BadParameter, BadRequest, NotAcceptable
from uvimg.core.negotiate import choose_coding, find_held, name_etag, weigh_codings

# scripts/try-headers asks for a hundred thousand.
EXAMPLES = int(os.environ.get("HEADER_VALUES", "200"))
OFFERED: tuple[Coding, ...] = ("zstd", "br", "gzip")


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        (None, "identity"),
        ("", "identity"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("gzip, deflate, br", "br"),
        ("gzip", "gzip"),
        ("x-gzip", "gzip"),
        ("GZIP", "gzip"),
        ("deflate", "identity"),
        ("*", "zstd"),
        ("zstd;q=0, *", "br"),
        ("*;q=0.5, gzip;q=0.6", "gzip"),
        ("gzip;q=0.5, zstd;q=0.25", "gzip"),
        ("gzip;q=0.5, zstd;q=0.5", "zstd"),
        ("gzip;q=0.5", "gzip"),
        ("gzip;q=0.5, identity", "identity"),
        ("gzip, identity;q=0.5", "gzip"),
        ("gzip, identity", "gzip"),
        ("identity;q=0, gzip", "gzip"),
        ("*;q=0, gzip", "gzip"),
        ("*;q=0, identity", "identity"),
        ("gzip;q=0", "identity"),
        ("gzip;q=0.000", "identity"),
        ("gzip ; q=1.000", "gzip"),
        ("gzip;Q=1", "gzip"),
        (",, gzip ,,", "gzip"),
        # Malformed: as if it were not there.
        ("gzip;q=2", "identity"),
        ("gzip;q=-1", "identity"),
        ("gzip;q=0.1234", "identity"),
        ("gzip;level=9", "identity"),
        ("gzip q=1", "identity"),
        ('"gzip"', "identity"),
        ("gzip;q=", "identity"),
        ("gzip;q=2, br", "br"),
        # The first word on a coding counts.
        ("gzip;q=0, gzip", "identity"),
    ],
)
def test_the_heaviest_coding_wins_and_of_equals_the_best(accepted: str | None, coding: str) -> None:
    assert choose_coding(accepted, OFFERED) == coding


@pytest.mark.parametrize(
    "accepted", ["identity;q=0", "*;q=0", "identity;q=0, deflate", "identity;q=0, gzip;q=0", "*;q=0.0"]
)
def test_nothing_is_left_where_even_no_coding_is_refused(accepted: str) -> None:
    with pytest.raises(NotAcceptable):
        choose_coding(accepted, OFFERED)


header_values = st.one_of(
    st.text(st.characters(max_codepoint=255), max_size=60),
    st.text('gziprbstd*;q=01., \t-identyx"', max_size=60),
    st.lists(
        st.builds(
            "{}{}{}".format,
            st.sampled_from(["gzip", "br", "zstd", "dcz", "identity", "*", "x-gzip", ""]),
            st.sampled_from(["", ";q=", " ; q=", ";"]),
            st.sampled_from(["", "0", "1", "0.5", "1.0", "0.001", "nan", "1e9"]),
        ),
        max_size=8,
    ).map(",".join),
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(header_values)
def test_whatever_a_client_writes_it_gets_one_of_ours_or_406(value: str) -> None:
    try:
        coding = choose_coding(value, OFFERED)
    except NotAcceptable:
        weights = weigh_codings(value)
        assert weights.get("identity", weights.get("*")) == 0
        return
    weights = weigh_codings(value)
    assert coding == "identity" or weights.get(coding, weights.get("*", 0)) > 0
    assert coding != "identity" or weights.get("identity", weights.get("*")) != 0


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.one_of(header_values, st.text(':A=/+;"(), match-dest=id\\*', max_size=80)))
def test_whatever_is_said_of_dictionaries_is_read_or_refused(value: str) -> None:
    digest = parse_available(value)
    assert digest is None or len(digest) == 32
    try:
        use = parse_use(value)
    except BadRequest:
        return
    assert parse_use(str(use)) == use


@pytest.mark.parametrize(
    "field",
    [
        'match="/app/*.js"',
        'match="/a", match-dest=("script" "document"), id="a\\"b\\\\", type=raw',
        'match-dest=(), match="/*"',
    ],
)
def test_a_use_is_read_as_it_is_written(field: str) -> None:
    assert parse_use(str(parse_use(field))) == parse_use(field)


@pytest.mark.parametrize(
    "field",
    [
        *("", "match", "match=/a", 'match="relative"', 'id="x"', 'match="/a" id="b"', 'match="/a",', 'match="/(a+)"'),
        *('match="/a", type=zip', 'match="/\x7f"', 'match="/a", id="' + "x" * 1025 + '"', 'match="https://other/"'),
        *('match="//other/*"', 'match="/\\\\other/*"'),
    ],
)
def test_a_use_that_no_client_would_heed_is_refused(field: str) -> None:
    with pytest.raises(BadRequest):
        parse_use(field)


def test_what_is_compressed_already_is_not_worth_coding() -> None:
    for kind in ("text/html; charset=utf-8", "image/svg+xml", "application/json", "TEXT/CSS", "application/ld+json"):
        assert is_compressible(kind)
    for kind in (
        "image/png",
        "image/jpeg",
        "video/mp4",
        "application/zip",
        "font/woff2",
        "application/octet-stream",
        "",
    ):
        assert not is_compressible(kind)


def test_levels_are_those_of_their_coding() -> None:
    assert read_forced({}) is None
    assert read_forced({"compression": "zstd"}, 7) == Forced("zstd", 7)
    assert read_forced({"compression": "gzip", "level": "9"}) == Forced("gzip", 9)
    for fields in ({"level": "3"}, {"compression": "gzip", "level": "10"}, {"compression": "zstd", "level": "٣"}):
        with pytest.raises(BadParameter):
            read_forced(fields)


def test_a_copy_made_with_another_effort_is_known_by_its_tag() -> None:
    tag = '"0123"'
    held = {"if-none-match": 'W/"x", "0123-zstd-3"'}
    assert name_etag(tag, "zstd-19") == '"0123-zstd-19"'
    assert find_held(held, tag, "zstd") == '"0123-zstd-3"'
    assert find_held(held, tag, "gzip") is None
    assert find_held({"if-none-match": '"0123-zstd-3-x"'}, tag, "zstd") is None
