"""Paths of values, and Kyoto Tycoon's lines and numbers, as plain functions."""

import tracemalloc
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.keyvalue import QUOTATION, fill
from uvimg.core.errors import UvimgError
from uvimg.core.keyvalue import (
    MAX_DATABASE_BYTES,
    MAX_KEY_BYTES,
    Query,
    is_inert,
    read_keys,
    route,
    show_key,
    spell_key,
)
from uvimg.core.kyoto import (
    Arguments,
    choose_coding,
    decode_fields,
    encode_fields,
    name_type,
    pack_decimal,
    read_coding,
    show_decimal,
    unpack_decimal,
)
from uvimg.store import MAX_NAME_BYTES, open_store

SEGMENTS = st.sampled_from(["a", "key", "_all", "_next", "_x", "rpc", "default", "%5Ffirst", "a%2Fb", "", "~.-", "%00"])


@given(st.lists(SEGMENTS, max_size=4), st.sampled_from(["GET", "HEAD", "PUT", "POST", "OPTIONS"]))
def test_the_short_way_to_a_value_leads_where_the_long_one_does(segments: list[str], method: str) -> None:
    target = "/" + "/".join(segments)

    def ask(target: str, depth: int) -> Query | str:
        try:
            return route(method, target, depth, "olegdb")
        except UvimgError as exc:
            return exc.detail

    # What is mounted below another path is never taken the short way.
    assert ask(target, 0) == ask(f"/kv{target}", 1)


def test_the_longest_key_of_the_longest_database_fits_a_name() -> None:
    asked = route("GET", f"/{'d' * MAX_DATABASE_BYTES}/{'%ff' * MAX_KEY_BYTES}", 0, "olegdb")
    assert len(getattr(asked, "record")) <= MAX_NAME_BYTES  # noqa: B009 - the other queries have none


@given(st.binary(min_size=1).filter(lambda key: b"\0" not in key))
def test_a_key_is_shown_so_that_it_can_be_read_again(key: bytes) -> None:
    assert read_keys(show_key(key)) == [key]
    assert read_keys(spell_key(key).encode()) == [key]
    assert spell_key(key).isascii()
    assert spell_key(key).isprintable()
    assert spell_key(key).strip() == spell_key(key)


@pytest.mark.parametrize(
    ("media_type", "inert"),
    [
        ("text/plain", True),
        ("text/plain; charset=utf-8", True),
        ("IMAGE/PNG", True),
        ("text/html", False),
        ("image/svg+xml", False),
        ("text/plain, text/html", False),
        # What Fetch takes for text/html: the last one of the list.
        ("text/plain; a=b, text/html", False),
        ("text/plain;,text/html", False),
    ],
)
def test_only_what_no_browser_runs_is_served_without_a_sandbox(media_type: str, inert: bool) -> None:
    assert is_inert(media_type) is inert


@given(st.lists(st.tuples(st.binary(), st.binary())))
def test_lines_come_back_as_they_went(fields: list[tuple[bytes, bytes]]) -> None:
    coding = choose_coding(fields)
    assert read_coding(name_type(coding)) == coding
    assert decode_fields(encode_fields(fields, coding), coding) == fields


@given(st.binary().map(lambda data: data.replace(b"%", b"%25")), st.binary())
def test_url_encoding_is_read_as_everybody_reads_it(raw: bytes, data: bytes) -> None:
    column = raw.translate(None, b"\t\n") + quote_from_bytes(data, safe="/=").encode()
    ((_, decoded),) = decode_fields(b"x\t" + column + b"\n", "U") or [(b"", b"")]
    if not column.endswith(b"\r"):
        assert decoded == unquote_to_bytes(column)


def test_a_body_of_escapes_takes_no_more_than_a_few_times_its_size() -> None:
    size = 3_000_000
    body = b"x\t" + b"%41" * (size // 3)
    for read in (lambda: decode_fields(body, "U"), lambda: read_keys(body)):
        tracemalloc.start()
        read()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 6 * size


@given(
    st.decimals(-(10**15), 10**15, places=6, allow_nan=False), st.decimals(-(10**9), 10**9, places=15, allow_nan=False)
)
def test_decimals_add_up_exactly(one: Decimal, other: Decimal) -> None:
    units = [Arguments([(b"num", f"{number:f}".encode())]).take_decimal("num") for number in (one, other)]
    total = unpack_decimal(pack_decimal(units[0])) + unpack_decimal(pack_decimal(units[1]))
    assert Fraction(show_decimal(total).decode()) == Fraction(one) + Fraction(other)


@pytest.mark.parametrize("text", [b"", b".", b"1..2", b"nan", b"inf", b"1e999", b"0x1", b"1_0", b"\xd9\xa1", b"9" * 41])
def test_what_is_no_decimal_is_refused(text: bytes) -> None:
    with pytest.raises(UvimgError):
        Arguments([(b"num", text)]).take_decimal("num")


async def test_a_store_that_the_bench_has_filled_is_like_any_other(tmp_path: Path) -> None:
    await fill(tmp_path / "data", 1234)
    store = open_store(f"local:{tmp_path}/data", create=False)
    assert await store.counts(b"kv/", 0) == {b"kv/bench/": 1234}
    record = await store.record(b"kv/bench/00001233")
    assert record is not None
    assert record.inline == QUOTATION
    assert [finding async for finding in store.scrub()] == []
    await store.close()
