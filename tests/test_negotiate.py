"""Conditional and range requests, RFC 9110 13 and 14, and what zimg's clients make of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvimg.core.negotiate import Answer, Failed, NotModified, Part, Unsatisfiable, Whole, choose_answer, http_date

TAG = '"5f189d8ec57f5a5a0d3dcba47fa797e2"'
BARE = TAG.strip('"')
# Sun, 06 Nov 1994 08:49:37 GMT, the RFC's own example.
MODIFIED = 784_111_777
SIZE = 1000


def answer(**headers: str) -> Answer:
    return choose_answer({name.replace("_", "-"): value for name, value in headers.items()}, TAG, MODIFIED, SIZE)


@pytest.mark.parametrize(
    ("field", "known", "strongly"),
    [
        (TAG, True, True),
        (BARE, True, True),
        (f"  {TAG}\t", True, True),
        ("*", True, True),
        (" * ", True, True),
        (f'"a", {TAG}', True, True),
        (f'"a",{TAG},"b"', True, True),
        (f'"a,b" , {TAG}', True, True),
        (f"a, {BARE}", True, True),
        (f"W/{TAG}", True, False),
        (f'W/"a", W/{TAG}', True, False),
        (f"W/{BARE}", True, False),
        # Inside another tag it is not this one.
        (f'"a,{BARE},b"', False, False),
        (f'"a, {TAG[1:]}', False, False),
        (f'"{BARE}x"', False, False),
        (TAG.upper(), False, False),
        ('"*"', False, False),
        (f'"a", *{TAG[1:]}', False, False),
        ('""', False, False),
        ("", False, False),
        (",,", False, False),
    ],
)
def test_a_list_of_tags_names_this_one_or_does_not(field: str, known: bool, strongly: bool) -> None:
    assert answer(if_none_match=field) == (NotModified() if known else Whole())
    assert answer(if_match=field) == (Whole() if strongly else Failed())


@pytest.mark.parametrize(
    ("date", "seconds"),
    [
        ("Sun, 06 Nov 1994 08:49:37 GMT", MODIFIED),
        (" Sun, 06 Nov 1994 08:49:37 GMT ", MODIFIED),
        ("Sunday, 06-Nov-94 08:49:37 GMT", MODIFIED),
        ("Sun Nov  6 08:49:37 1994", MODIFIED),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 253_402_300_799),
        ("Mon, 01 Jan 0001 00:00:00 GMT", -62_135_596_800),
        ("Sat, 31 Dec 2016 23:59:60 GMT", 1_483_228_799),
        ("Friday, 01-Jan-38 00:00:00 GMT", 2_145_916_800),
        # No HTTP dates: as if they were not there.
        ("Sun, 06 Nov 1994 08:49:37", None),
        ("Sun, 06 Nov 1994 08:49:37 -0000", None),
        ("Sun, 06 Nov 1994 08:49:37 +0100", None),
        ("Sun, 06 Nov 1994 08:49:61 GMT", None),
        ("Sun, 06 Nov 1994 24:00:00 GMT", None),
        ("Sun, 31 Nov 1994 08:49:37 GMT", None),
        ("Sun, 06 Now 1994 08:49:37 GMT", None),
        ("Sun, 06 Nov 0000 08:49:37 GMT", None),
        ("Sun, 06 Nov 10000 08:49:37 GMT", None),
        ("Sun, ٠٦ Nov 1994 08:49:37 GMT", None),
        ("Sun, 06 Nov 1994 08:49:37 GMT, Sun, 06 Nov 1994 08:49:37 GMT", None),
        ("784111777", None),
        ("", None),
    ],
)
def test_a_date_is_read_in_the_three_forms_of_http_and_in_no_other(date: str, seconds: int | None) -> None:
    for modified in [MODIFIED] if seconds is None else [seconds, seconds + 1]:
        fresh = seconds is not None and modified <= seconds
        since = choose_answer({"if-modified-since": date}, TAG, modified, SIZE)
        until = choose_answer({"if-unmodified-since": date}, TAG, modified, SIZE)
        assert since == (NotModified() if fresh else Whole())
        assert until == (Whole() if fresh or seconds is None else Failed())


@given(st.integers(-62_135_596_800, 253_402_300_799))
def test_last_modified_sent_back_is_not_modified(posix_s: int) -> None:
    date = http_date(posix_s)
    assert choose_answer({"if-modified-since": date}, TAG, posix_s, SIZE) == NotModified()
    assert choose_answer({"if-modified-since": date}, TAG, posix_s + 1, SIZE) == Whole()


OLD, NOW = http_date(MODIFIED - 1), http_date(MODIFIED)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        # A tag outweighs a date, a failed precondition a 304, a 304 a range.
        ({"if_none_match": '"other"', "if_modified_since": NOW}, Whole()),
        ({"if_none_match": TAG, "if_modified_since": OLD}, NotModified()),
        ({"if_match": TAG, "if_unmodified_since": OLD}, Whole()),
        ({"if_match": '"other"', "if_unmodified_since": NOW}, Failed()),
        ({"if_match": '"other"', "if_none_match": TAG}, Failed()),
        ({"if_unmodified_since": OLD, "if_none_match": TAG}, Failed()),
        ({"if_none_match": TAG, "range": "bytes=0-1"}, NotModified()),
        ({"if_match": '"other"', "range": "bytes=5000-"}, Failed()),
        # If-Range: a strong tag or the exact date, or else everything.
        ({"range": "bytes=0-1", "if_range": TAG}, Part(0, 2)),
        ({"range": "bytes=0-1", "if_range": NOW}, Part(0, 2)),
        ({"range": "bytes=0-1", "if_range": f"W/{TAG}"}, Whole()),
        ({"range": "bytes=0-1", "if_range": f'{TAG}, "a"'}, Whole()),
        ({"range": "bytes=0-1", "if_range": '"other"'}, Whole()),
        ({"range": "bytes=0-1", "if_range": "*"}, Whole()),
        ({"range": "bytes=0-1", "if_range": OLD}, Whole()),
        ({"range": "bytes=0-1", "if_range": http_date(MODIFIED + 1)}, Whole()),
        ({"range": "bytes=5000-", "if_range": '"other"'}, Whole()),
        ({"if_range": TAG}, Whole()),
    ],
)
def test_preconditions_are_weighed_in_the_order_of_the_rfc(headers: dict[str, str], expected: Answer) -> None:
    assert answer(**headers) == expected


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("bytes=0-0", Part(0, 1)),
        ("bytes=0-", Part(0, SIZE)),
        ("bytes=999-", Part(999, SIZE)),
        ("bytes=10-5000", Part(10, SIZE)),
        ("bytes=-1", Part(999, SIZE)),
        ("bytes=-5000", Part(0, SIZE)),
        ("BYTES = 0-9", Part(0, 10)),
        ("bytes=1000-", Unsatisfiable()),
        ("bytes=999999999999999999-", Unsatisfiable()),
        ("bytes=-0", Unsatisfiable()),
        # Not understood, or not worth it: everything.
        ("bytes=0-1,5-6", Whole()),
        ("bytes=9-1", Whole()),
        ("bytes=-", Whole()),
        ("bytes=", Whole()),
        ("bytes=0x0-0x9", Whole()),
        ("bytes=+0-9", Whole()),
        ("bytes=--1", Whole()),
        ("bytes=0-9\n0", Whole()),
        ("bytes=٠-٩", Whole()),
        ("bytes=" + "9" * 5000 + "-", Whole()),
        ("bits=0-9", Whole()),
        ("", Whole()),
    ],
)
def test_one_range_of_bytes_is_cut_and_anything_else_is_everything(field: str, expected: Answer) -> None:
    assert answer(range=field) == expected
    assert choose_answer({"range": field}, TAG, MODIFIED, SIZE, ranges=False) == Whole()


numbers = st.integers(0, 12).map(str) | st.just("")
ranges = st.builds("bytes={}-{}".format, numbers, numbers) | st.text(alphabet="bytes=-,0123456789 \t", max_size=30)
tags = st.lists(st.sampled_from([TAG, BARE, "*", "W/", '"', ",", " ", '"a,b"', NOW]), max_size=6).map("".join)
fields = {
    "range": ranges,
    "if-range": tags | st.text(),
    "if-match": tags | st.text(),
    "if-none-match": tags | st.text(),
    "if-modified-since": st.text() | st.just(NOW),
    "if-unmodified-since": st.text() | st.just(NOW),
}


@given(st.fixed_dictionaries({}, optional=fields), st.integers(0, 10))
def test_no_headers_lead_outside_the_bytes_that_are_there(headers: dict[str, str], size: int) -> None:
    found = choose_answer(headers, TAG, MODIFIED, size)
    assert not isinstance(found, Part) or 0 <= found.start < found.stop <= size
