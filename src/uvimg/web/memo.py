"""What was answered to a request that lasts: by its head's very bytes, else by what of its head mattered.

What takes the time is reading heads, asking the app and writing the answer's head. So an answer that says that it
lasts is kept as it went out, and given again after a look at the number of the store's last change: what anybody
has deleted or replaced meanwhile is seen. Clients that ask for the same differ in cookies and trace ids, which no
app looks at: an app is handed fields that note which of them it asks for, and a head with the same target and the
same values of those has the same answer, for an app decides by nothing else.
Bounded by bytes: when it is full, what nobody asked for since it was last looked at goes (the clock algorithm).
"""

import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import msgspec

from uvimg.core.errors import UvimgError
from uvimg.core.http1 import Head
from uvimg.core.message import NO_BODY, Request, Response
from uvimg.core.negotiate import http_date
from uvimg.core.tally import Tally
from uvimg.service import Service

# Longer heads are not worth remembering.
_LONGEST_HEAD_BYTES = 1024
# What is larger takes so long to send that finding it again is nothing.
_LONGEST_ANSWER = 65_536 + 2048
# The objects beside the bytes of an answer, and of another head that it is known by.
_OVERHEAD_BYTES = 1024
_ALIAS_BYTES = 512
# Heads and targets of which it is known that they came once, by their hash.
_MOST_SEEN = 65_536
# Targets of which it is known which fields matter. Each is at most as long as a head.
_MOST_HEEDED = 16_384
# Looked at for one that is to go: no request waits longer than a few µs for the memory of another.
_MOST_SPARED = 20
_DATE_BYTES = len(http_date(0))


class Known:
    """An answer as it is written. `last` tells that its connection ends with it."""

    __slots__ = ("_date_at", "_until_s", "last", "request", "size", "status", "tally", "used", "version", "whole")

    def __init__(self, whole: bytes, last: bool, version: int | None, request: Request, response: Response) -> None:
        self.whole, self.last, self.version = whole, last, version
        # For the access log alone: its fields are not counted, and its body may hold on to a connection.
        self.request = msgspec.structs.replace(request, headers={}, body=NO_BODY)
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


class Heeded(Mapping[str, str]):
    """A head's fields, which note what of them is asked for; `names` is None once all of them were looked at."""

    __slots__ = ("_headers", "names")

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self.names: set[str] | None = set()

    def __getitem__(self, name: str) -> str:
        if self.names is not None:
            self.names.add(name)
        return self._headers[name]

    def get(self, name: str, default: Any = None) -> Any:
        if self.names is not None:
            self.names.add(name)
        return self._headers.get(name, default)

    def __contains__(self, name: object) -> bool:
        return self.get(str(name)) is not None

    def __iter__(self) -> Iterator[str]:
        self.names = None
        return iter(self._headers)

    def __len__(self) -> int:
        self.names = None
        return len(self._headers)


class Watch:
    """A request on its way through the app. What is asked of it must be asked of `headers`."""

    __slots__ = ("head", "headers", "version")

    def __init__(self, head: Head, version: int) -> None:
        self.head, self.version = head, version
        self.headers = Heeded(head.headers)


class Memo:
    """Answers of one front-end."""

    def __init__(self, service: Service, max_bytes: int) -> None:
        self._service = service
        self._max_bytes = max_bytes
        self._bytes = 0
        # By a head's bytes, and by what of a head mattered.
        self._known: OrderedDict[Hashable, Known] = OrderedDict()
        self._heeded: OrderedDict[tuple[str, str], tuple[str, ...]] = OrderedDict()
        self._seen: set[int] = set()

    def recall(self, key: Hashable, peer: str) -> Known | None:
        """The answer to a head of these bytes, if it is known and still right."""
        known = self._known.get(key)
        if known is None:
            return None
        if known.version is not None and known.version != self._version():
            self._forget(key)
            return None
        known.used = True
        known.date(time.time())
        self._service.repeat(known.request, known.tally, known.status, known.size, peer)
        return known

    def recall_like(self, head: Head, data: bytes, peer: str) -> Known | None:
        """The answer to a head that differs from a known one in nothing that matters."""
        names = self._heeded.get((head.method, head.target))
        if names is None:
            return None
        known = self.recall(_spell_key(head, names), peer)
        if known is not None and self._was_seen(data):
            self._put(data, known, _ALIAS_BYTES + len(data))
        return known

    def begin(self, head: Head) -> Watch | None:
        """Before an answer is looked up. None: do not keep it, for its like may never come again."""
        if not self._max_bytes or not self._was_seen((head.method, head.target)):
            return None
        version = self._version()
        return None if version is None else Watch(head, version)

    def keep(self, watch: Watch, whole: bytes, last: bool, request: Request, response: Response) -> None:
        """Remember an answer as it was written, if it lasts."""
        heeded = watch.headers.names
        if response.lasts == "not" or heeded is None or len(whole) > _LONGEST_ANSWER:
            return
        head = watch.head
        # All that ever mattered: where one field decides which others are looked at, none must be missing.
        names = tuple(sorted(heeded.union(self._heeded.pop((head.method, head.target), ()))))
        self._heeded[head.method, head.target] = names
        if len(self._heeded) > _MOST_HEEDED:
            self._heeded.popitem(last=False)
        version = None if response.lasts == "always" else watch.version
        known = Known(whole, last, version, request, response)
        self._put(_spell_key(head, names), known, _OVERHEAD_BYTES + len(whole))

    def stop(self) -> None:
        """Know nothing any more: from now on answers say that their connection ends."""
        self._max_bytes = 0
        self._known.clear()

    def _version(self) -> int | None:
        """None when the store cannot say: the app is asked then, which tells it in its own dialect."""
        try:
            return self._service.version()
        except UvimgError:
            return None

    def _was_seen(self, what: Hashable) -> bool:
        """Whether it came before; now it has."""
        mark = hash(what)
        if mark in self._seen:
            return True
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(mark)
        return False

    def _put(self, key: Hashable, known: Known, size: int) -> None:
        if size > self._max_bytes:
            return
        self._forget(key)
        self._bytes += size
        spared = 0
        while self._bytes > self._max_bytes:
            eldest, other = next(iter(self._known.items()))
            if other.used and spared < _MOST_SPARED:
                other.used, spared = False, spared + 1
                self._known.move_to_end(eldest)
            else:
                self._forget(eldest)
        self._known[key] = known

    def _forget(self, key: Hashable) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._bytes -= _ALIAS_BYTES + len(key) if isinstance(key, bytes) else _OVERHEAD_BYTES + len(known.whole)


def is_memorable(head: Head, data: bytes) -> bool:
    """Whether the answer to this head may be known, or kept."""
    return not head.has_body and len(data) <= _LONGEST_HEAD_BYTES


def _spell_key(head: Head, names: tuple[str, ...]) -> Hashable:
    """All of a head that an answer depends on. (What ends a connection stands in the answer.)"""
    # With the names: what matters of a target may have been forgotten, and learnt anew in part.
    return (head.method, head.target, head.keep_alive, head.is_1_0, names, *map(head.headers.get, names))
