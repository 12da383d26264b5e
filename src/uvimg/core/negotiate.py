"""Which representation a request gets, and what of it: all, a part, or word that it has it already.

RFC 9110 12.5.3 (content codings), 13 (conditional requests, in the order of 13.2.2) and 14 (range requests).
Rule: every coding of a representation has a strong ETag of its own, and only the one without any has ranges.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from uvimg.core.coding import Coding
from uvimg.core.errors import NotAcceptable

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


# RFC 9110 12.4.2 and 12.5.3: a coding or "*", and perhaps its weight, of at most three decimals.
_ACCEPTED = re.compile(
    r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)(?:[ \t]*;[ \t]*[qQ]=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?))?", re.ASCII
)
_OLD_NAMES = {"x-gzip": "gzip", "x-compress": "compress"}


def choose_coding(accepted: str | None, offered: tuple[Coding, ...]) -> Coding:
    """The coding for a request with this Accept-Encoding, None where it has none. `offered` are ours, best first.

    What is malformed in the field counts as not being there, and of equal weights the best of ours wins. The
    representation as it is comes last of those that are named, but first where it is preferred by its weight.
    NotAcceptable where even that is refused.
    """
    if accepted is None:
        return "identity"
    if len(accepted) > _LONGEST_KNOWN_FIELD:
        return _choose_coding(accepted, offered)
    return _known_choice(accepted, offered)


def _choose_coding(accepted: str, offered: tuple[Coding, ...]) -> Coding:
    weights = weigh_codings(accepted)
    others = weights.get("*", 0.0)
    best: Coding | None = None
    most = 0.0
    for coding in offered:
        weight = weights.get(coding, others)
        if weight > most:
            best, most = coding, weight
    # Without a word on it, it will do where nothing else does.
    plain = weights.get("identity", weights.get("*"))
    if plain is not None and plain > most:
        return "identity"
    if best is not None:
        return best
    if plain == 0.0:
        raise NotAcceptable()
    return "identity"


# Clients send the same few over and over; long ones are an attack on the memory.
_LONGEST_KNOWN_FIELD = 128
_known_choice = lru_cache(1024)(_choose_coding)


def weigh_codings(accepted: str) -> dict[str, float]:
    """Coding → weight. Names in lower case; of two words on one coding the first counts."""
    weights: dict[str, float] = {}
    for member in accepted.split(","):
        found = _ACCEPTED.fullmatch(member.strip(" \t"))
        if found is not None:
            name = found[1].lower()
            weights.setdefault(_OLD_NAMES.get(name, name), 1.0 if found[2] is None else float(found[2]))
    return weights


def name_etag(etag: str, coding: str) -> str:
    """The strong ETag of a representation in a coding, from the one that it has without. Both are quoted."""
    return etag if coding == "identity" else f'{etag[:-1]}-{coding}"'


def find_held(headers: Mapping[str, str], etag: str, coding: str) -> str | None:
    """The ETag of a copy in this coding that the client says it has, whatever the effort it was made with.

    It is as good as the one that we would send now: then that copy is what was asked for.
    """
    field = headers.get("if-none-match")
    start = name_etag(etag, coding)[1:-1] + "-"
    if field is None or start not in field:
        return None
    tags = (tag for _, tag in _tags(field) if tag.startswith(start))
    return next((f'"{tag}"' for tag in tags if re.fullmatch(r"[0-9]{1,2}", tag[len(start) :], re.ASCII)), None)


def choose_answer(
    headers: Mapping[str, str], etag: str, modified_s: int | None, size: int, *, ranges: bool = True
) -> Answer:
    """What a GET or HEAD with these headers gets of a representation of `size` bytes.

    `etag` is strong and quoted, `modified_s` in POSIX seconds, None where nobody knows: dates are not looked at then.
    `ranges` is False for HEAD: Range is defined for GET alone (RFC 9110 14.2).
    """
    if (match := headers.get("if-match")) is not None:
        if not _lists(match, etag, weak=False):
            return _FAILED
    elif (
        modified_s is not None
        and (since := _date(headers.get("if-unmodified-since"))) is not None
        and modified_s > since
    ):
        return _FAILED
    if (none_match := headers.get("if-none-match")) is not None:
        if _lists(none_match, etag, weak=True):
            return _NOT_MODIFIED
    elif (
        modified_s is not None
        and (since := _date(headers.get("if-modified-since"))) is not None
        and modified_s <= since
    ):
        return _NOT_MODIFIED
    if (
        ranges
        and (wanted := headers.get("range")) is not None
        and _may_resume(headers.get("if-range"), etag, modified_s)
    ):
        return _choose_part(wanted, size)
    return _WHOLE


def allows_change(headers: Mapping[str, str], etag: str | None) -> bool:
    """Whether a write or a removal may go on, where what is there has this ETag uncoded, None for there being none.

    The ETag of any coding of it will do: a client that accepts one was never told another.
    """
    if (match := headers.get("if-match")) is not None and (etag is None or not _means(match, etag, weak=False)):
        return False
    none_match = headers.get("if-none-match")
    return none_match is None or etag is None or not _means(none_match, etag, weak=True)


def _means(field: str, etag: str, *, weak: bool) -> bool:
    """Whether an If-Match or If-None-Match field lists this ETag, or that of a coding (`name_etag`)."""
    start = f"{etag[1:-1]}-"
    return _lists(field, etag, weak=weak) or any(
        tag.startswith(start) and (weak or not is_weak) for is_weak, tag in _tags(field)
    )


def _lists(field: str, etag: str, *, weak: bool) -> bool:
    """Whether an If-Match or If-None-Match field lists this ETag. zimg's clients send it without quotes."""
    # Nearly always it is the very one that we gave: then a 304 costs no more than its 200 (0.8 of 10 µs).
    if field == etag or field.strip() == "*":
        return True
    bare = etag[1:-1]
    return any(tag == bare and (weak or not is_weak) for is_weak, tag in _tags(field))


# A comma may stand inside a quoted tag (RFC 9110 8.8.3), so a list of them cannot be split at commas.
_TAG = re.compile(r'(W/)?(?:"([^"]*)(?:"|\Z)|([^\s",]+))')


def _tags(field: str) -> Iterator[tuple[bool, str]]:
    for found in _TAG.finditer(field):
        yield found[1] is not None, found[3] if found[2] is None else found[2]


def _may_resume(if_range: str | None, etag: str, modified_s: int | None) -> bool:
    """Whether If-Range allows a part: strong comparison of the ETag or an exact date (RFC 9110 13.1.5)."""
    if if_range is None:
        return True
    return if_range.strip() == etag or (modified_s is not None and _date(if_range) == modified_s)


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


# RFC 9110 5.6.7: IMF-fixdate, the obsolete form of RFC 850, asctime's. The day of the week says nothing new and is
# not read. The standard library's parser of mail dates takes far more than these, some of it in local time.
_TIME = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>[0-5]\d|60)"
_DATES = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"[A-Z][a-z]{{2}}, (?P<day>\d\d) (?P<month>[A-Z][a-z]{{2}}) (?P<year>\d{{4}}) {_TIME} GMT",
        rf"[A-Z][a-z]{{5,8}}, (?P<day>\d\d)-(?P<month>[A-Z][a-z]{{2}})-(?P<year>\d\d) {_TIME} GMT",
        rf"[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) (?P<day>[ \d]\d) {_TIME} (?P<year>\d{{4}})",
    )
)


def _date(field: str | None) -> int | None:
    """An HTTP date in POSIX seconds; None when absent or malformed, which both count as absent."""
    if field is None:
        return None
    found = next(filter(None, (form.fullmatch(field.strip()) for form in _DATES)), None)
    if found is None:
        return None
    year = int(found["year"])
    if len(found["year"]) == 2:
        # As POSIX reads two digits: 69 is 1969, 68 is 2068.
        year += 1900 if year >= 69 else 2000
    # The grammar allows a leap second, 60, which this calendar does not know.
    clock = int(found["hour"]), int(found["minute"]), min(int(found["second"]), 59)
    try:
        at = datetime(year, _MONTHS.index(found["month"]) + 1, int(found["day"]), *clock, tzinfo=UTC)
    except ValueError:
        return None
    return int(at.timestamp())


@lru_cache(1024)
def http_date(posix_s: int) -> str:
    """IMF-fixdate (RFC 9110 5.6.7)."""
    at = datetime.fromtimestamp(posix_s, UTC)
    return f"{_DAYS[at.weekday()]}, {at.day:02} {_MONTHS[at.month - 1]} {at.year:04} {at:%H:%M:%S} GMT"
