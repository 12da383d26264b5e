"""The waist: every front-end hands requests in here, every app answers behind it.

`try_now` answers what is at hand without waiting, `handle` answers everything. Neither raises anything but
CancelledError: whatever goes wrong is an answer in the app's own dialect.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from uvimg.core.errors import NotImplementedHere, Overloaded, UvimgError
from uvimg.core.message import Request, Response

log = logging.getLogger("uvimg")

# Request, peer, status, size of the body in bytes, seconds.
AccessLog = Callable[[Request, str, int, int, float], None]


class App(Protocol):
    """What an app offers. Both doors may raise UvimgError; `refuse` tells it as the app tells errors."""

    def try_now(self, request: Request) -> Response | None: ...

    async def handle(self, request: Request) -> Response: ...

    def refuse(self, request: Request, error: UvimgError) -> Response: ...


class Service:
    """One app behind errors and the access log. `access_log` has one call for each answer.

    `version` is a number that changes with whatever answers that last are made of.
    """

    def __init__(self, app: App, access_log: AccessLog | None, version: Callable[[], int]) -> None:
        self._app = app
        self._access_log = access_log
        self.version = version
        # Whether it is about to stop: whoever shares out requests should look elsewhere.
        self.draining = False

    def try_now(self, request: Request) -> Response | None:
        """The answer if it is at hand: a hit, a 304, a refusal. None means: `handle` it. Never waits."""
        started = time.perf_counter()
        try:
            response = self._app.try_now(request)
        except Exception as exc:
            response = self._refuse(request, exc)
        if response is not None:
            self._finish(request, response, started)
        return response

    async def handle(self, request: Request) -> Response:
        """The answer, however long it takes."""
        started = time.perf_counter()
        try:
            response = await self._app.handle(request)
        except Exception as exc:
            response = self._refuse(request, exc)
        self._finish(request, response, started)
        return response

    def repeat(self, request: Request, status: int, size: int, peer: str) -> None:
        """An answer that lasts is given once more, to an equal request of `peer`."""
        if self._access_log is not None:
            self._access_log(request, peer, status, size, 0.0)

    def _refuse(self, request: Request, exc: Exception) -> Response:
        if not isinstance(exc, UvimgError):
            log.error("a request failed: %s %a", request.method, request.target, exc_info=exc)
            exc = UvimgError()
        elif exc.status >= 500 and not isinstance(exc, Overloaded | NotImplementedHere):
            # Overload is told in the access log, once for each; a warning each would make it worse. An unknown
            # method is the client's.
            log.warning("%s %a: %s (%r)", request.method, request.target, exc.detail, exc.__cause__)
        try:
            return self._app.refuse(request, exc)
        except Exception:
            log.exception("an error could not be told: %s %a", request.method, request.target)
            return Response(500)

    def _finish(self, request: Request, response: Response, started: float) -> None:
        # What is served is what it says it is, to every browser.
        response.headers["X-Content-Type-Options"] = "nosniff"
        if self._access_log is not None:
            self._access_log(request, request.peer, response.status, response.size, time.perf_counter() - started)
