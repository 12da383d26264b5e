"""What was answered to a head that lasts, by the head's very bytes.

Requests repeat to the byte, and what takes the time is reading them, asking the app and writing the answer's
head. So an answer that says that it lasts is kept as it went out, and an equal request gets it again, but only
after a look at the number of the store's last change: what anybody has deleted or replaced meanwhile is seen.
Bounded by bytes: when it is full, what nobody asked for since it was last looked at goes (the clock algorithm).
"""

import time
from collections import OrderedDict
from collections.abc import Hashable

from uvimg.core.message import Request, Response
from uvimg.core.negotiate import http_date
from uvimg.core.tally import Tally
from uvimg.service import Service

# Longer heads are not worth remembering.
LONGEST_HEAD_BYTES = 1024
# What is larger takes so long to send that finding it again is nothing.
_LONGEST_ANSWER = 65_536 + 2048
# The objects beside the bytes.
_OVERHEAD_BYTES = 1024
# Keys of which it is known that they came once, by their hash.
_MOST_SEEN = 65_536
# Looked at for one that is to go: no request waits longer than a few µs for the memory of another.
_MOST_SPARED = 20
_DATE_BYTES = len(http_date(0))


class Known:
    """An answer as it is written. `last` tells that its connection ends with it."""

    __slots__ = ("_date_at", "_until_s", "last", "request", "size", "status", "tally", "used", "version", "whole")

    def __init__(self, whole: bytes, last: bool, version: int | None, request: Request, response: Response) -> None:
        self.whole, self.last, self.version, self.request = whole, last, version, request
        # Not the response, which has the body once more.
        self.status, self.size = response.status, response.size
        self.tally = response.tally or Tally()
        self.used = False
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
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[Hashable, Known] = OrderedDict()
        self._seen: set[int] = set()

    def recall(self, key: Hashable, peer: str) -> Known | None:
        """The answer, if it is known and still right."""
        known = self._known.get(key)
        if known is None:
            return None
        if known.version is not None and known.version != self._service.version():
            self._forget(key)
            return None
        known.used = True
        known.date(time.time())
        self._service.repeat(known.request, known.tally, known.status, known.size, peer)
        return known

    def begin(self, key: Hashable) -> int | None:
        """Before an answer is looked up: what `keep` is to be told of the store. None: do not keep it.

        What comes for the first time may be the only one of its kind, and is not kept.
        """
        mark = hash(key)
        if mark in self._seen:
            return self._service.version()
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(mark)
        return None

    def keep(self, key: Hashable, version: int, whole: bytes, last: bool, request: Request, response: Response) -> None:
        """Remember an answer as it was written, if it lasts. `version` is what `begin` told."""
        size = len(whole) + _OVERHEAD_BYTES
        if response.lasts == "not" or len(whole) > _LONGEST_ANSWER or size > self._max_bytes:
            return
        self._forget(key)
        self._bytes += size
        spared = 0
        while self._bytes > self._max_bytes:
            eldest, known = next(iter(self._known.items()))
            if known.used and spared < _MOST_SPARED:
                known.used, spared = False, spared + 1
                self._known.move_to_end(eldest)
            else:
                self._forget(eldest)
        self._known[key] = Known(whole, last, None if response.lasts == "always" else version, request, response)

    def stop(self) -> None:
        """Know nothing any more: from now on answers say that their connection ends."""
        self._max_bytes = 0
        self._known.clear()

    def _forget(self, key: Hashable) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._bytes -= len(known.whole) + _OVERHEAD_BYTES
