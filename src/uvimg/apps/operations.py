"""What whoever runs the service asks it: /health and /metrics.

No queue, no lock and no worker stands between; where the metrics are those of several processes, a look into
their folder does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from uvimg.core.access import AccessRules, Network, find_client, is_rebound
from uvimg.core.errors import Forbidden, MethodNotAllowed, NotFound, UvimgError
from uvimg.core.message import Request, Response
from uvimg.metrics import Metrics

PATHS = ("/health", "/metrics")

# A worker starts within a second, and the pool tries again every five where that fails.
_MOST_WORKERLESS_S = 10.0

_ALLOW = "GET, HEAD, OPTIONS"
_encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class OperationsSettings:
    """Who may see the metrics; with `rule` None everybody who can connect."""

    rule: AccessRules | None
    trusted_proxies: tuple[Network, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """How the service is. `reason` is for people."""

    status: Literal["ok", "draining", "unable"]
    reason: str = ""


def judge_health(*, draining: bool, workerless_s: float, store_answers: bool) -> Health:
    """Whether load should come here. A worker that died or a full disk is no reason to send it elsewhere."""
    if draining:
        return Health("draining", "The service is about to end.")
    if not store_answers:
        return Health("unable", "The store cannot be read.")
    if workerless_s > _MOST_WORKERLESS_S:
        return Health("unable", "No image worker could be started for a while.")
    return Health("ok")


class Operations:
    """See `App` in service.py for its doors."""

    name = "operations"

    def __init__(self, settings: OperationsSettings, metrics: Metrics, health: Callable[[], Health]) -> None:
        self._settings, self._metrics, self._health = settings, metrics, health

    def try_now(self, request: Request) -> Response | None:
        if request.path not in PATHS:
            raise NotFound("There is nothing here.")
        if request.method == "OPTIONS":
            return Response(204, {"Allow": _ALLOW}, route=request.path[1:])
        if request.method not in ("GET", "HEAD"):
            raise MethodNotAllowed(_ALLOW)
        if request.path == "/health":
            return self._tell_health()
        self._admit(request)
        return None

    async def handle(self, request: Request) -> Response:
        response = self.try_now(request)
        if response is not None:
            return response
        content_type, text = await self._metrics.expose(request.headers.get("accept", ""))
        return Response(200, {"Content-Type": content_type, "Cache-Control": "no-store"}, text, route="metrics")

    def refuse(self, request: Request, error: UvimgError) -> Response:
        """An error as problem+json (RFC 9457)."""
        problem = {"type": "about:blank", "title": error.title, "status": error.status, "detail": error.detail}
        headers = {"Content-Type": "application/problem+json", "Cache-Control": "no-store"} | error.headers
        route = request.path[1:] if request.path in PATHS else "none"
        return Response(error.status, headers, _encode_json(problem), route=route)

    def _tell_health(self) -> Response:
        health = self._health()
        told = {"status": health.status} | ({"reason": health.reason} if health.reason else {})
        headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
        return Response(200 if health.status == "ok" else 503, headers, _encode_json(told), route="health")

    def _admit(self, request: Request) -> None:
        if self._settings.rule is not None:
            client = find_client(request.peer, request.headers, self._settings.trusted_proxies)
            if not self._settings.rule.allows(client) or is_rebound(client, request.headers):
                raise Forbidden()
