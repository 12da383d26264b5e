"""What a request gets of a representation that is there: all of it, a part, or word that it has it already.

RFC 9110 13 (conditional requests, in the order of 13.2.2) and 14 (range requests).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True, slots=True)
class Whole:
    """200 with everything."""


@dataclass(frozen=True, slots=True)
class NotModified:
    """304: the client's copy is good."""


@dataclass(frozen=True, slots=True)
class Failed:
    """412: a precondition does not hold."""


@dataclass(frozen=True, slots=True)
class Part:
    """206 with the bytes from start up to, not including, stop."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Unsatisfiable:
    """416: the range begins behind the end."""


Answer = Whole | NotModified | Failed | Part | Unsatisfiable

_WHOLE, _NOT_MODIFIED, _FAILED, _UNSATISFIABLE = Whole(), NotModified(), Failed(), Unsatisfiable()


def choose_answer(headers: Mapping[str, str], etag: str, modified_s: int, size: int, *, ranges: bool = True) -> Answer:
    """What a GET or HEAD with these headers gets of a representation of `size` bytes.

    `etag` is strong and quoted, `modified_s` in POSIX seconds. `ranges` is False for HEAD: Range is
    defined for GET alone (RFC 9110 14.2).
    """
    if (match := headers.get("if-match")) is not None:
        if not _lists(match, etag, weak=False):
            return _FAILED
    elif (since := _date(headers.get("if-unmodified-since"))) is not None and modified_s > since:
        return _FAILED
    if (none_match := headers.get("if-none-match")) is not None:
        if _lists(none_match, etag, weak=True):
            return _NOT_MODIFIED
    elif (since := _date(headers.get("if-modified-since"))) is not None and modified_s <= since:
        return _NOT_MODIFIED
    if (
        ranges
        and (wanted := headers.get("range")) is not None
        and _may_resume(headers.get("if-range"), etag, modified_s)
    ):
        return _choose_part(wanted, size)
    return _WHOLE


def _lists(field: str, etag: str, *, weak: bool) -> bool:
    """Whether an If-Match or If-None-Match field lists this ETag. zimg's clients send it without quotes."""
    if field.strip() == "*":
        return True
    for item in field.split(","):
        tag = item.strip()
        if weak:
            tag = tag.removeprefix("W/")
        if tag in (etag, etag[1:-1]):
            return True
    return False


def _may_resume(if_range: str | None, etag: str, modified_s: int) -> bool:
    """Whether If-Range allows a part: strong comparison of the ETag or an exact date (RFC 9110 13.1.5)."""
    if if_range is None:
        return True
    return if_range.strip() == etag or _date(if_range) == modified_s


_RANGE = re.compile(r"\s*bytes\s*=\s*(?:(\d{1,18})-(\d{1,18})?|-(\d{1,18}))\s*", re.IGNORECASE | re.ASCII)


def _choose_part(field: str, size: int) -> Answer:
    """A single range (RFC 9110 14.1.2). Several ranges and other units may be ignored, and are."""
    found = _RANGE.fullmatch(field)
    if found is None:
        return _WHOLE
    first, last, suffix = found.groups()
    if suffix is not None:
        length = int(suffix)
        return Part(max(0, size - length), size) if length and size else _UNSATISFIABLE
    start = int(first)
    if last is not None and int(last) < start:
        return _WHOLE
    if start >= size:
        return _UNSATISFIABLE
    return Part(start, size if last is None else min(int(last) + 1, size))


def _date(field: str | None) -> int | None:
    """An HTTP date in POSIX seconds; None when absent or malformed, which both count as absent."""
    if field is None:
        return None
    try:
        return int(parsedate_to_datetime(field).timestamp())
    except (ValueError, OverflowError):
        return None


def http_date(posix_s: int) -> str:
    """IMF-fixdate (RFC 9110 5.6.7)."""
    at = datetime.fromtimestamp(posix_s, UTC)
    return f"{_DAYS[at.weekday()]}, {at.day:02} {_MONTHS[at.month - 1]} {at.year} {at:%H:%M:%S} GMT"
