"""Calls to a server that may be away: bounded in time, told in our own errors, and not made while it is.

One guard stands before one server, or one set of them that is asked as one. What it learns becomes one line of the
log for each change, and numbers for the metrics.
Rule: nothing is tried again here. Whoever asked may, and knows whether that is safe.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from uvimg.core.breaker import Breaker
from uvimg.core.errors import StoreDown, UvimgError

log = logging.getLogger("uvimg.store")

T = TypeVar("T")

# More than anybody reads of one.
_LONGEST_REASON = 300

# What a foreign error means: StoreDown where the server did not answer, another error of ours where it did, None for
# what is no error of the server at all.
Translate = Callable[[Exception], UvimgError | None]


class Guard:
    """`name` is told to people and must hold no secret. `timeout_s` bounds a call that does not say otherwise."""

    def __init__(self, name: str, translate: Translate, timeout_s: float, breaker: Breaker | None = None) -> None:
        self.name = name
        self._translate, self._timeout_s = translate, timeout_s
        self._breaker = breaker or Breaker()
        # Calls that were not answered, and calls that were not made.
        self.failures = 0
        self.refused = 0

    @property
    def is_away(self) -> bool:
        return self._breaker.state != "closed"

    async def run(self, call: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        """What the call gives. StoreDown when the server is away or does not answer in time; else what it means."""
        if not self._breaker.admit(time.monotonic()):
            self.refused += 1
            raise StoreDown()
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                answer = await call()
        except Exception as exc:
            # Another's cancellation is no Exception; a time-out of ours is one by now.
            error = StoreDown() if isinstance(exc, TimeoutError) else self._translate(exc)
            if error is None:
                self._breaker.give_up()
                raise
            if isinstance(error, StoreDown):
                self._fail(exc)
            else:
                self._succeed()
            raise error from exc
        except BaseException:
            self._breaker.give_up()
            raise
        self._succeed()
        return answer

    def _succeed(self) -> None:
        if self._breaker.succeed():
            log.warning("%s answers again", self.name)

    def _fail(self, exc: Exception) -> None:
        self.failures += 1
        if self._breaker.fail(time.monotonic()):
            log.error("%s is away: %s", self.name, _tell(exc))


def _tell(exc: Exception) -> str:
    """Why, in one line: some libraries put all that they know into an error."""
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    first, *_ = str(exc).splitlines() or [""]
    return f"{type(exc).__name__}: {first}"[:_LONGEST_REASON]
