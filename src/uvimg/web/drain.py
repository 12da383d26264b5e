"""How a front-end comes to its end without a failed request.

While a client has not heard that its connection will be closed, it may send a request at any moment, and would see a
reset. So at first idle connections stay open: what they still bring is answered, and told that it was the last.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from uvimg.core.http1 import LAST_CALL_S

_AGAIN_S = 0.25


class Drain:
    """The rule, the same for every front-end, which has stopped accepting before."""

    def __init__(self) -> None:
        # From now on every answer is the last of its connection.
        self.begun = False
        # From now on a connection that has nothing to do is closed.
        self.is_over = False

    async def run(
        self, all_closed: Callable[[], Awaitable[None]], close_idle: Callable[[], None], grace_s: float
    ) -> None:
        """Returns when no connection is left, or when the grace is over; what is left then is the caller's to end."""
        self.begun = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_CALL_S):
                        await all_closed()
                self.is_over = True
                while True:
                    # Again and again: what had something to be read may have brought no request.
                    close_idle()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_AGAIN_S):
                            await all_closed()
                            return
