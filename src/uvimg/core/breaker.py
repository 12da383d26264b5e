"""Whether to ask a server that may be away (the circuit breaker of Nygard's "Release It!").

Closed while it answers; open after some failures without a success between them, and then nobody is made to wait
for it; half open when it is time to look again: one caller asks, and what he meets is what all others get.
Rule: the clock is the caller's, and never goes back.
"""

from typing import Literal

State = Literal["closed", "open", "half open"]


class Breaker:
    """Opens after `failures` in a row, and lets one through every `pause_s` seconds from then on."""

    def __init__(self, failures: int = 3, pause_s: float = 0.5) -> None:
        assert failures > 0
        assert pause_s > 0
        self._most, self._pause_s = failures, pause_s
        self._failures = 0
        self._retry_at_s = 0.0
        self.state: State = "closed"

    def admit(self, now_s: float) -> bool:
        """Whether to ask now. Who is let through tells by one of the three below how it went."""
        if self.state == "closed":
            return True
        if now_s < self._retry_at_s:
            return False
        # A probe that never tells how it went must not close the door for good: the next one has its turn.
        self.state, self._retry_at_s = "half open", now_s + self._pause_s
        return True

    def succeed(self) -> bool:
        """The server has answered, whatever it said. Whether it is back by that."""
        was_away = self.state != "closed"
        self.state, self._failures = "closed", 0
        return was_away

    def fail(self, now_s: float) -> bool:
        """The server did not answer. Whether it is away by that, and was not before."""
        self._failures += 1
        if self.state == "closed" and self._failures < self._most:
            return False
        is_new = self.state == "closed"
        self.state, self._retry_at_s = "open", now_s + self._pause_s
        return is_new

    def give_up(self) -> None:
        """The caller has gone before the server could answer, which says nothing about the server."""
        if self.state == "half open":
            # The next one may look at once.
            self.state, self._retry_at_s = "open", 0.0
