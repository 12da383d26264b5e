"""What the client of one connection owes, and by when, without the clock: the time comes in.

Deadlines are absolute, not per read: a client that drips bytes gains nothing by it. What is awaited of it has one,
what was written and not taken yet has another; a watcher (web/connections.py) looks whether the earlier has passed.
How long each is stands in core/http1.py.
"""

import math
from typing import Literal

from uvimg.core.http1 import WRITE_STALL_BYTES, WRITE_STALL_S

# Of the client: a request's first byte, the rest of its head, that it closes behind its last answer.
Awaited = Literal["request", "head", "end"]


class Timed:
    """A connection, as its deadlines see it."""

    # There may be tens of thousands.
    __slots__ = ("_awaited_until", "_taken_until", "_untaken", "awaited", "due", "touched")

    def __init__(self) -> None:
        # Since a watcher last looked, it was made or something answered: if nothing else has begun, it is idle from
        # then on. The first deadline of nearly every request would be the next one's to move: this costs less.
        self.touched = True
        self.awaited: Awaited | None = None
        # When to look what is overdue.
        self.due = self._awaited_until = self._taken_until = math.inf
        self._untaken = 0

    def expect(self, awaited: Awaited, until: float) -> None:
        """By then the client must have done so."""
        self.awaited, self._awaited_until = awaited, until
        self.due = min(until, self._taken_until)

    def expect_nothing(self) -> None:
        """It is our turn, or it is over."""
        self.awaited, self._awaited_until = None, math.inf
        self.due = self._taken_until

    def hold(self, untaken: int, now: float) -> None:
        """So many bytes wait for the client to take them, which it must do at a rate."""
        self._untaken, self._taken_until = untaken, now + WRITE_STALL_S
        if self.awaited == "request":
            # It cannot be idle before it has its answer.
            self.expect_nothing()
        self.due = min(self._awaited_until, self._taken_until)

    def release(self) -> None:
        """All has been taken."""
        self._taken_until = math.inf
        self.due = self._awaited_until

    def find_overdue(self, untaken: int, now: float) -> Awaited | Literal["taking"] | None:
        """What is past its deadline, if anything is; it is told once."""
        if self._taken_until < now:
            stalled = untaken > self._untaken - WRITE_STALL_BYTES
            self.hold(untaken, now)
            return "taking" if stalled else None
        if not self._awaited_until < now:
            return None
        overdue = self.awaited
        self.expect_nothing()
        return overdue
