"""Counts of answers, and how those of several processes become one.

To count an answer costs 0.07 µs, and 0.02 µs where its Tally is held; what is dearer is done when somebody asks.
Rule: nothing that a client may choose freely becomes part of a key; the number of keys is bounded by our own code.
"""

from bisect import bisect_left
from collections.abc import Iterable

import msgspec

# Upper bounds of the histogram's buckets; the last one has none. What is at hand takes less than the first.
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FAST_S = BOUNDS_S[0]

# app, route, status, and how the content was got or, with a capital letter, the error that there was instead
Key = tuple[str, str, int, str]
# A family's name and the values of its labels.
Place = tuple[str, tuple[str, ...]]


class Tally:
    """Equal answers. `repeated` are those that nobody timed: they were only written again."""

    __slots__ = ("_fast", "_slow", "repeated", "seconds")

    def __init__(self) -> None:
        self.repeated = self._fast = 0
        self._slow = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0

    def count(self, seconds: float) -> None:
        self.seconds += seconds
        # Most are, and this way they cost half.
        if seconds <= _FAST_S:
            self._fast += 1
        else:
            self._slow[bisect_left(BOUNDS_S, seconds)] += 1

    def rest(self) -> "Times":
        """What it says at this moment."""
        return Times([self._fast + self.repeated, *self._slow[1:]], self.seconds, self.repeated)


class Tallies(dict[Key, Tally]):
    """Every tally there is; one comes into being when it is first asked for."""

    def __missing__(self, key: Key) -> Tally:
        return self.setdefault(key, Tally())


class Times(msgspec.Struct, array_like=True):
    """A tally at rest: the count of each bucket, all seconds together, and how many answers were repeated.

    Those are in the first bucket too.
    """

    counts: list[int]
    seconds: float
    repeated: int


class Snapshot(msgspec.Struct, array_like=True):
    """The numbers of a process at one moment. Counters only grow; gauges mean nothing once the process has ended."""

    times: dict[Key, Times] = {}
    counters: dict[Place, float] = {}
    gauges: dict[Place, float] = {}


def merge(living: Iterable[Snapshot], ended: Iterable[Snapshot]) -> Snapshot:
    """The sum of processes. What the ended ones counted stays, so no total ever goes down; their gauges are gone."""
    merged = Snapshot()
    for snapshot in living:
        _add(merged.gauges, snapshot.gauges)
        _add_counts(merged, snapshot)
    for snapshot in ended:
        _add_counts(merged, snapshot)
    return merged


def _add_counts(merged: Snapshot, snapshot: Snapshot) -> None:
    _add(merged.counters, snapshot.counters)
    for key, times in snapshot.times.items():
        before = merged.times.get(key)
        if before is None:
            merged.times[key] = times
        else:
            counts = [one + other for one, other in zip(before.counts, times.counts, strict=True)]
            seconds, repeated = before.seconds + times.seconds, before.repeated + times.repeated
            merged.times[key] = Times(counts, seconds, repeated)


def _add(merged: dict[Place, float], more: dict[Place, float]) -> None:
    for place, value in more.items():
        merged[place] = merged.get(place, 0) + value
