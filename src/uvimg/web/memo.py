"""What was answered to a head that lasts, by the head's very bytes.

Requests repeat to the byte, and what takes the time is reading them, asking the app and writing the answer's
head. So an answer that says that it lasts is kept as it went out, and an equal request gets it again, but only
after a look at the number of the store's last change: what anybody has deleted or replaced meanwhile is seen.
Bounded by bytes: of two generations the older goes when the younger is full.
"""

import time
from collections.abc import Hashable

from uvimg.core.message import Request, Response
from uvimg.core.negotiate import http_date
from uvimg.service import Service

# What is larger takes so long to send that finding it again is nothing.
_LONGEST_ANSWER = 65_536 + 2048
# A request and a response beside their bytes.
_OVERHEAD_BYTES = 2048
# Keys of which it is known that they came once, by their hash.
_MOST_SEEN = 65_536
_DATE_BYTES = len(http_date(0))


class Known:
    """An answer as it is written. `last` tells that its connection ends with it."""

    __slots__ = ("_date_at", "_until_s", "last", "request", "response", "version", "weight", "whole")

    def __init__(self, whole: bytes, last: bool, version: int | None, request: Request, response: Response) -> None:
        self.whole, self.last, self.version = whole, last, version
        self.request, self.response = request, response
        self.weight = 2 * len(whole) + _OVERHEAD_BYTES
        self._date_at = whole.index(b"\r\nDate: ") + 8
        self._until_s = 0

    def date(self, now_s: float) -> None:
        """Put the date right, which changes each second."""
        if not self._until_s - 1 <= now_s < self._until_s:
            second = int(now_s)
            end = self._date_at + _DATE_BYTES
            self.whole = self.whole[: self._date_at] + http_date(second).encode() + self.whole[end:]
            self._until_s = second + 1


class Memo:
    """Answers by key: a head's bytes, or whatever else an answer depends on wholly, beside the store."""

    def __init__(self, service: Service, max_bytes: int) -> None:
        self._service = service
        self._most = max_bytes // 2
        self._young: dict[Hashable, Known] = {}
        self._old: dict[Hashable, Known] = {}
        self._young_bytes = 0
        self._seen: set[int] = set()

    def recall(self, key: Hashable, peer: str) -> Known | None:
        """The answer, if it is known and still right."""
        known = self._young.get(key)
        if known is None:
            known = self._old.pop(key, None)
            if known is None:
                return None
            self._put(key, known)
        if known.version is not None and known.version != self._service.version():
            self._young.pop(key, None)
            return None
        known.date(time.time())
        self._service.repeat(known.request, known.response, peer)
        return known

    def begin(self, key: Hashable) -> int | None:
        """Before an answer is looked up: what `keep` is to be told of the store. None: do not keep it.

        What comes for the first time may be the only one of its kind, and is not kept.
        """
        mark = hash(key)
        if mark in self._seen:
            return self._service.version() if self._most else None
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(mark)
        return None

    def keep(self, key: Hashable, version: int, whole: bytes, last: bool, request: Request, response: Response) -> None:
        """Remember an answer as it was written, if it lasts. `version` is what `begin` told."""
        if response.lasts != "not" and len(whole) <= _LONGEST_ANSWER:
            seen = None if response.lasts == "always" else version
            self._put(key, Known(whole, last, seen, request, response))

    def _put(self, key: Hashable, known: Known) -> None:
        self._young[key] = known
        self._young_bytes += known.weight
        if self._young_bytes > self._most:
            self._old, self._young, self._young_bytes = self._young, {}, 0
