"""The waist: every front-end hands requests in here, every app answers behind it.

`try_now` answers what is at hand without waiting, `handle` answers everything. Neither raises anything but
CancelledError: whatever goes wrong is an answer in the app's own dialect.
Which app a path belongs to is decided here alone: by the whole path, else by its first segment, else it is the
root's. Apps see paths whole; one that is mounted is told where when it is made.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from uvimg.apps.codings import code_answer, code_long_answer
from uvimg.core.coding import MIN_BYTES
from uvimg.core.errors import Elsewhere, NotImplementedHere, Overloaded, UvimgError
from uvimg.core.http1 import refuse_head
from uvimg.core.message import AccessLog, Request, Response
from uvimg.core.tally import Tally
from uvimg.metrics import Metrics

log = logging.getLogger("uvimg")


class App(Protocol):
    """What an app offers. Both doors may raise UvimgError; `refuse` tells it as the app tells errors."""

    # As the setting `apps` and the metrics have it.
    name: str

    def try_now(self, request: Request) -> Response | None: ...

    async def handle(self, request: Request) -> Response: ...

    def refuse(self, request: Request, error: UvimgError) -> Response: ...


class Service:
    """Apps behind errors, counting and the access log. `access_log` has one call for each answer.

    `pages` are apps by whole paths ("/health"), `mounts` by first segments ("kv" for all below /kv).
    `version` is a number that changes with whatever answers that last are made of.
    """

    def __init__(
        self,
        root: App,
        access_log: AccessLog | None,
        version: Callable[[], int],
        metrics: Metrics | None = None,
        *,
        pages: Mapping[str, App] | None = None,
        mounts: Mapping[str, App] | None = None,
    ) -> None:
        self._root, self._pages, self._mounts = root, dict(pages or {}), dict(mounts or {})
        self._access_log = access_log
        self.version = version
        self.metrics = metrics or Metrics()
        self._tallies = self.metrics.tallies
        # Set when the end has begun: /health says so, and whoever balances load looks elsewhere.
        self.draining = False

    def try_now(self, request: Request) -> Response | None:
        """The answer if it is at hand: a hit, a 304, a refusal. None means: `handle` it. Never waits."""
        started = time.perf_counter()
        app = self._find_app(request.path) if self._mounts else self._pages.get(request.path, self._root)
        try:
            response = app.try_now(request)
            if response is not None and _is_to_be_coded(response):
                code_answer(request.headers, response)
        except Elsewhere:
            return None
        except Exception as exc:
            response = self._refuse(app, request, exc)
        if response is not None:
            self._finish(app, request, response, started)
        return response

    async def handle(self, request: Request) -> Response:
        """The answer, however long it takes."""
        started = time.perf_counter()
        app = self._find_app(request.path)
        try:
            response = await app.handle(request)
            if _is_to_be_coded(response):
                await code_long_answer(request.headers, response)
        except Exception as exc:
            response = self._refuse(app, request, exc)
        self._finish(app, request, response, started)
        return response

    def repeat(self, request: Request, tally: Tally, status: int, size: int, peer: str) -> None:
        """An answer that lasts is given once more, to an equal request of `peer`."""
        tally.repeated += 1
        if self._access_log is not None:
            self._access_log(request, peer, status, size, 0.0)

    def refuse_head(self, error: UvimgError) -> Response:
        """The last answer on a connection, to what is no request that an app could see."""
        response = refuse_head(error)
        self._tallies["none", "none", response.status, type(error).__name__].count(0.0)
        return response

    def _find_app(self, path: str) -> App:
        return self._pages.get(path) or self._mounts.get(path[1:].partition("/")[0], self._root)

    def _refuse(self, app: App, request: Request, exc: Exception) -> Response:
        if not isinstance(exc, UvimgError):
            log.error("a request failed: %s %a", request.method, request.target, exc_info=exc)
            exc = UvimgError()
        elif exc.status >= 500 and not isinstance(exc, Overloaded | NotImplementedHere):
            # Overload is told in the access log, once for each; a warning each would make it worse. An unknown
            # method is the client's.
            log.warning("%s %a: %s (%r)", request.method, request.target, exc.detail, exc.__cause__)
        try:
            response = app.refuse(request, exc)
        except Exception:
            log.exception("an error could not be told: %s %a", request.method, request.target)
            response = Response(500)
        # Some dialects tell errors with 200.
        response.origin = type(exc).__name__
        return response

    def _finish(self, app: App, request: Request, response: Response, started: float) -> None:
        # What is served is what it says it is, to every browser.
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.tally = tally = self._tallies[app.name, response.route, response.status, response.origin]
        seconds = time.perf_counter() - started
        tally.count(seconds)
        if self._access_log is not None:
            self._access_log(request, request.peer, response.status, response.size, seconds)


def _is_to_be_coded(response: Response) -> bool:
    """Most answers are not, and this is asked of every one of them; see `code_answer`."""
    body = response.body
    return isinstance(body, bytes) and len(body) >= MIN_BYTES and "ETag" not in response.headers
